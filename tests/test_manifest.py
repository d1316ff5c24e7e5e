"""Manifests say what the library does, and every mistake in one is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import jitconv
from jitconv import epilogue as E
from jitconv import program
from jitconv.calls import call_of
from jitconv.compilation import key_of
from jitconv.errors import ManifestError
from jitconv.manifest import ManifestEntry, find, load, select, shipped
from jitconv.problem import OperandSpec

CONV = 'operator = "conv2d"\ninput = [1, 4, 8, 8]\nweight = [6, 4, 3, 3]\n'


def write(folder: Path, text: str) -> str:
    path = folder / "shapes.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def entry_of(folder: Path, body: str) -> ManifestEntry:
    return find(f"{write(folder, f'[e]{chr(10)}{body}')}:e")


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def problem_of(call: Any) -> Any:
    return program.build(call).problem


# ---- what is shipped ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "output", "steps"),
    [
        ("w1", (16, 64, 30, 62, 62), ["mish", "tanh"]),
        ("w2", (32, 64, 16, 32, 32), ["add", "layer_norm", "avg_pool", "gelu"]),
        ("w3", (16, 128, 512, 512), []),
    ],
)
def test_headline_holds_the_three_operators_at_full_size(name: str, output: tuple[int, ...], steps: list[str]) -> None:
    built = program.build(find(f"headline:{name}").call())
    assert built.shape == output
    assert [step.name for step in built.problem.epilogue] == steps


def test_headline_w2_adds_a_tensor_that_is_read_on_the_device() -> None:
    """A number there would mean a host synchronisation for the learnable scalar of the operator."""
    add, norm, *_ = problem_of(find("headline:w2").call()).epilogue
    assert dict(add.operands) == {"other": OperandSpec("scalar", "float32")}
    assert {name for name, _ in norm.operands} == {"eps", "weight", "bias"}


def test_headline_biases_are_those_of_the_workloads() -> None:
    problems = {name: problem_of(find(f"headline:{name}").call()) for name in ("w1", "w2", "w3")}
    assert {name: (p.bias, p.mid_bias) for name, p in problems.items()} == {
        "w1": (True, False),
        "w2": (True, False),
        "w3": (False, False),
    }


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_manifest_describes_valid_calls(name: str) -> None:
    for entry in load(name).entries.values():
        assert program.build(entry.call()).launches


# ---- the same as the call -------------------------------------------------------------------------


def test_an_entry_is_the_call_with_the_same_arguments(tmp_path: Path) -> None:
    entry = entry_of(
        tmp_path,
        """
operator = "conv2d"
input = [2, 8, 20, 20]
weight = [12, 4, 3, 5]
bias = true
stride = [1, 2]
padding = [[2, 0], 1]
dilation = [2, 1]
groups = 2
padding_mode = "replicate"
precision = "ieee"
dtype = "bfloat16"
memory_format = "channels_last"
epilogue = ["relu", { step = "max_pool", kernel_size = [2, 1] }, { step = "gelu", approximate = "tanh" }]
""",
    )
    half = torch.bfloat16
    call = call_of(
        jitconv.conv2d,
        meta(2, 8, 20, 20, dtype=half).contiguous(memory_format=torch.channels_last),
        meta(12, 4, 3, 5, dtype=half),
        meta(12, dtype=half),
        stride=(1, 2),
        padding=((2, 0), 1),
        dilation=(2, 1),
        groups=2,
        padding_mode="replicate",
        precision="ieee",
        epilogue=[E.relu(), E.max_pool((2, 1)), E.gelu("tanh")],
    )
    assert problem_of(entry.call()) == problem_of(call)


def test_a_transposed_entry_counts_its_bias_by_groups(tmp_path: Path) -> None:
    entry = entry_of(
        tmp_path,
        'operator = "conv_transpose1d"\ninput = [1, 6, 9]\nweight = [6, 5, 4]\nbias = true\ngroups = 3\n'
        "stride = 2\noutput_padding = 1",
    )
    call = call_of(
        jitconv.conv_transpose1d, meta(1, 6, 9), meta(6, 5, 4), meta(15), stride=2, output_padding=1, groups=3
    )
    assert problem_of(entry.call()) == problem_of(call)


def test_a_separable_entry_has_both_biases_and_both_chains(tmp_path: Path) -> None:
    entry = entry_of(
        tmp_path,
        """
operator = "depthwise_separable_conv2d"
x = [1, 4, 9, 9]
dw_weight = [8, 1, 3, 3]
pw_weight = [6, 8, 1, 1]
dw_bias = true
pw_bias = true
between = [{ step = "mul", other = "channel" }, "relu6"]
epilogue = [{ step = "add", other = "channel" }]
""",
    )
    call = call_of(
        jitconv.depthwise_separable_conv2d,
        meta(1, 4, 9, 9),
        meta(8, 1, 3, 3),
        meta(6, 8, 1, 1),
        meta(8),
        meta(6),
        between=[E.mul(meta(8)), E.relu6()],
        epilogue=[E.add(meta(6))],
    )
    assert problem_of(entry.call()) == problem_of(call)


STEP_ARGUMENTS = {
    **dict.fromkeys(("add", "sub", "mul", "div", "minimum", "maximum"), "other = 2"),
    "clamp": "min = -1, max = 1.5",
    "layer_norm": "normalized_shape = 6",
    "avg_pool": "kernel_size = 2",
    "max_pool": "kernel_size = 2",
}
STEPS = [name for name in E.__all__ if name.islower() and name not in ("bind", "register")]


@pytest.mark.parametrize("name", STEPS)
def test_every_step_of_the_vocabulary_can_be_written(name: str, tmp_path: Path) -> None:
    arguments = STEP_ARGUMENTS.get(name)
    step = f'{{ step = "{name}", {arguments} }}' if arguments else f'"{name}"'
    assert [s.name for s in entry_of(tmp_path, f"{CONV}epilogue = [{step}]").call().epilogue] == [name]


@pytest.mark.parametrize(
    ("operand", "spec"),
    [
        ("0.5", OperandSpec("number")),
        ("-3", OperandSpec("number")),
        ('"scalar"', OperandSpec("scalar", "float16")),
        ('"channel"', OperandSpec("channel", "float16")),
        ('"tensor"', OperandSpec("tensor", "float16")),
        ('"conv"', OperandSpec("value")),
        ('{ kind = "channel", dtype = "float32" }', OperandSpec("channel", "float32")),
    ],
)
def test_every_form_of_an_operand(operand: str, spec: OperandSpec, tmp_path: Path) -> None:
    body = f'{CONV}dtype = "float16"\nepilogue = ["relu", {{ step = "mul", other = {operand} }}]'
    assert problem_of(entry_of(tmp_path, body).call()).epilogue[1].operands == (("other", spec),)


def test_operands_have_the_shape_that_the_value_has_where_they_meet_it(tmp_path: Path) -> None:
    """Behind a pool a full tensor is the pooled one; taking the convolution's shape would not broadcast."""
    body = f'{CONV}epilogue = [{{ step = "avg_pool", kernel_size = 2 }}, {{ step = "add", other = "tensor" }}]'
    (_, other) = entry_of(tmp_path, body).call().epilogue
    assert [tuple(t.shape) for t in other.tensors()] == [(1, 6, 3, 3)]


def test_sizes_do_not_change_the_kernels() -> None:
    entry = find("headline:w2")
    keys = [
        [key_of(step.kernel, "sm_90a") for step in program.build(each.call()).launches]
        for each in (entry, entry.resized((1, 32, 3, 5, 32)))
    ]
    assert keys[0] == keys[1]


def test_torchs_setting_changes_an_entry_that_names_its_precision(tmp_path: Path) -> None:
    silent, named = entry_of(tmp_path, CONV), entry_of(tmp_path, f'{CONV}precision = "ieee"')
    before = torch.backends.cudnn.conv.fp32_precision
    try:
        for setting in ("ieee", "tf32"):
            torch.backends.cudnn.conv.fp32_precision = setting
            assert problem_of(silent.call()).precision == setting
            assert problem_of(silent.at_precision("tf32").call()).precision == "tf32"
            assert problem_of(silent.at_precision(None).call()).precision == setting
            assert problem_of(named.call()).precision == "ieee"
            assert problem_of(named.at_precision("tf32").call()).precision == "ieee"
    finally:
        torch.backends.cudnn.conv.fp32_precision = before


# ---- addresses ------------------------------------------------------------------------------------


def test_an_address_in_a_folder_with_a_colon(tmp_path: Path) -> None:
    folder = tmp_path / "a:b"
    folder.mkdir()
    source = write(folder, f"[e]\n{CONV}")
    assert [entry.name for entry in select(source)] == ["e"]
    assert [entry.address for entry in select(f"{source}:e")] == [f"{source}:e"]


def test_a_name_means_a_shipped_manifest_whatever_the_directory_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "headline").write_text(f"[mine]\n{CONV}")
    monkeypatch.chdir(tmp_path)
    assert list(load("headline").entries) == ["w1", "w2", "w3"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("headlin", ["'headlin'", "did you mean 'headline'", ".toml"]),
        ("missing.toml", ["missing.toml", "no such file"]),
        ("headline:w9", ["headline", "no entry 'w9'", "w1, w2, w3"]),
        ("headline:", ["'headline:'", "MANIFEST:ENTRY"]),
    ],
)
def test_an_address_of_nothing_says_what_there_is(text: str, words: list[str]) -> None:
    with pytest.raises(ManifestError) as caught:
        select(text)
    assert all(word in str(caught.value) for word in words), str(caught.value)


# ---- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["no entry", "operator ="]),
        ("[e\n", ["not valid TOML", "line 1"]),
        ("e = 3", ["e = 3", "expected a table [e]"]),
        ("[e]\ninput = [1]", ["[e]", "operator is missing", "conv2d"]),
        ('[e]\noperator = "conv2dd"', ["operator = 'conv2dd'", "did you mean 'conv2d'"]),
        ("[e]\noperator = [1]", ["operator = [1]", "expected one of conv1d"]),
        ('[e]\noperator = "conv2d"\ninput = [1, 2, 8, 8]', ["[e]", "weight is missing"]),
        (f"[e]\n{CONV}strides = 2", ["strides = 2", "no argument strides", "did you mean 'stride'"]),
        (f"[e]\n{CONV}output_padding = 1", ["output_padding = 1", "conv2d has no argument"]),
    ],
)
def test_a_mistake_in_the_structure_is_found_while_loading(text: str, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(ManifestError) as caught:
        load(write(tmp_path, text))
    message = str(caught.value)
    assert "shapes.toml" in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (CONV.replace("[1, 4, 8, 8]", "[1, 4.5, 8, 8]"), ["input = [1, 4.5, 8, 8]", "whole numbers"]),
        (CONV.replace("[1, 4, 8, 8]", "[1, true, 8, 8]"), ["input = [1, True, 8, 8]", "whole numbers"]),
        (CONV.replace("[1, 4, 8, 8]", "[1, -4, 8, 8]"), ["input = [1, -4, 8, 8]", "0 or more"]),
        (CONV.replace("[1, 4, 8, 8]", f"[1, 4, {2**40}, {2**40}]"), ["input = [1, 4, ", "at most"]),
        (CONV.replace("[1, 4, 8, 8]", "[8, 8]"), ["input has shape (8, 8)", "3D (unbatched) or 4D"]),
        (CONV.replace("[6, 4, 3, 3]", "[6, 5, 3, 3]"), ["weight has shape (6, 5, 3, 3)", "4 channels"]),
        (CONV.replace("[6, 4, 3, 3]", "[]"), ["weight has shape ()"]),
        (f"{CONV}bias = 6", ["bias = 6", "true or false"]),
        (f'{CONV}dtype = "float64"', ["dtype = 'float64'", "float32, float16, bfloat16", "torch's path"]),
        (f"{CONV}dtype = 32", ["dtype = 32"]),
        (f'{CONV}memory_format = "nhwc"', ["memory_format = 'nhwc'", "channels_last"]),
        (f"{CONV}stride = 0", ["stride", "positive"]),
        (f"{CONV}stride = 1.5", ["stride", "int"]),
        (f"{CONV}padding_mode = 'mirror'", ["padding_mode='mirror'", "reflect"]),
        (f"{CONV}precision = 'fp8'", ["precision='fp8'", "tf32"]),
        (f"{CONV}epilogue = 'relu'", ["epilogue = 'relu'", "a list of steps"]),
        (f"{CONV}epilogue = ['rellu']", ["epilogue[0] = 'rellu'", "did you mean 'relu'", "registered in Python"]),
        (f"{CONV}epilogue = [3]", ["epilogue[0] = 3", "name of a step"]),
        (f"{CONV}epilogue = [{{ other = 3 }}]", ["epilogue[0]", "name of a step"]),
        (f"{CONV}epilogue = ['add']", ["epilogue[0]", "'other'"]),
        (f"{CONV}epilogue = [{{ step = 'add', otter = 3 }}]", ["epilogue[0].otter = 3", "step, other"]),
        (f"{CONV}epilogue = [{{ step = 'add', other = 'scaler' }}]", ["epilogue[0].other = 'scaler'", "scalar"]),
        (f"{CONV}epilogue = [{{ step = 'add', other = true }}]", ["epilogue[0].other = True", "a number"]),
        (f"{CONV}epilogue = [{{ step = 'add', other = {{ kind = 'channel', type = 'x' }} }}]", ["[0].other", "dtype"]),
        (f"{CONV}epilogue = [{{ step = 'layer_norm', normalized_shape = 7 }}]", ["normalized_shape=(7,)", "(6,)"]),
        (
            f"{CONV}epilogue = [{{ step = 'layer_norm', normalized_shape = 6, weight = 'row' }}]",
            ["epilogue[0].weight = 'row'", "true or false"],
        ),
        (f"{CONV}epilogue = [{{ step = 'avg_pool', kernel_size = 9 }}]", ["avg_pool", "would be empty"]),
    ],
)
def test_a_mistake_in_a_value_names_entry_key_and_value(body: str, words: list[str], tmp_path: Path) -> None:
    entry = entry_of(tmp_path, body)
    with pytest.raises(ManifestError) as caught:
        entry.call()
    message = str(caught.value)
    assert "shapes.toml: [e]" in message
    assert all(word in message for word in words), message


def test_a_manifest_that_is_not_text_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ManifestError, match=r"binary\.toml: cannot be read"):
        load(str(path))


def test_only_a_public_operator_is_a_call() -> None:
    with pytest.raises(TypeError, match=r"jitconv\.conv2d"):
        call_of(torch.nn.functional.conv2d, meta(1, 1, 8, 8), meta(1, 1, 3, 3))
