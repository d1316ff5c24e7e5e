"""Every template compiles for every architecture, without spills, and its errors point at its own lines."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jitconv import render as rendering
from jitconv import toolchain
from jitconv.architectures import KNOWN
from jitconv.errors import CompileError
from jitconv.families import KernelPlan, Tile
from jitconv.kernel_resources import Resources
from jitconv.planning import plan
from jitconv.planning.tiles import CANDIDATES, MAX_POOLED_ROW
from jitconv.problem import OperandSpec, Problem, StepSpec
from jitconv.render import kernel_key, render
from jitconv.resources import templates_root

MISH = StepSpec("mish", cuda="act::mish(v)")
TANH = StepSpec("tanh", cuda="act::tanh(v)")
GELU = StepSpec("gelu", cuda="act::gelu_erf(v)")
ADD_SCALAR = StepSpec("add", (("other", OperandSpec("scalar", "float32")),), cuda="v + other")


def norm(width: int) -> StepSpec:
    operands = (
        ("eps", OperandSpec("number")),
        ("weight", OperandSpec("row", "float32")),
        ("bias", OperandSpec("row", "float32")),
    )
    return StepSpec("layer_norm", operands, (("width", width),))


def pool(window: tuple[int, int, int], kind: str = "avg_pool") -> StepSpec:
    return StepSpec(kind, (), (("ceil_mode", False), ("window", window)))


def problem(operator: str, rank: int, *, kernel: int = 3, stride: int = 1, **changes: Any) -> Problem:
    values: dict[str, Any] = {
        "in_channels": 32,
        "out_channels": 64,
        "kernel_size": (kernel,) * rank,
        "stride": (stride,) * rank,
        "padding": ((kernel // 2, kernel // 2),) * rank,
        "dilation": (1,) * rank,
        "output_padding": (stride - 1,) * rank,
        "bias": True,
    }
    return Problem(operator, **{**values, **changes})


CONV = problem("conv", 3, epilogue=(MISH, TANH))
TRANSPOSED = problem("conv_transpose", 3, stride=2)
SEPARABLE = problem(
    "depthwise_separable", 2, in_channels=64, out_channels=128, groups=64, mid_channels=64, bias=False, mid_bias=True
)
HEADLINE = {
    "w1": CONV,
    "w2": replace(TRANSPOSED, epilogue=(ADD_SCALAR, norm(64), pool((2, 2, 2)), GELU)),
    "w3": replace(SEPARABLE, mid_bias=False),
}


def compile_plan(kernel: KernelPlan, arch: str) -> Resources:
    rendered = render(kernel)
    return toolchain.compile_cubin(
        rendered.source, name=rendered.name, arch=arch, headers=rendered.headers, constants=rendered.constants
    ).resources


def assert_no_spills(kernel: KernelPlan, arch: str) -> None:
    resources = compile_plan(kernel, arch)
    found = (resources.spill_stores, resources.spill_loads, resources.stack_bytes)
    assert found == (0, 0, 0), f"{kernel.family} {kernel.tile} on {arch}: {resources}"
    # What the planner knows of shared memory is all of it.
    assert resources.static_shared == 0


@pytest.mark.parametrize("arch", KNOWN)
@pytest.mark.parametrize("name", HEADLINE)
def test_a_headline_operator_spills_on_some_architecture(name: str, arch: str) -> None:
    for kernel in plan(HEADLINE[name], "sm_75").kernels:
        assert_no_spills(kernel, arch)


def chosen(base: Problem, tile: Tile) -> KernelPlan:
    """The convolution's kernel for the widest problem that gets ``tile`` of its own accord."""
    kernel = plan(replace(base, out_channels=tile.channels), "sm_75").kernels[0]
    assert kernel.tile == tile
    return kernel


# Every second tile in each dtype; each layout of x; both widths of an offset.
VARIANTS = [
    {"dtype": "float32", "x_memory_format": "channels_first"},
    {"dtype": "float16", "x_memory_format": "channels_last", "memory_format": "channels_last"},
]


@pytest.mark.parametrize("arch", KNOWN)
@pytest.mark.parametrize("base", [CONV, TRANSPOSED], ids=lambda p: p.operator)
def test_a_tile_spills_on_some_architecture(base: Problem, arch: str) -> None:
    for i, tile in enumerate(CANDIDATES):
        if tile.channels > 64:
            continue
        assert_no_spills(chosen(replace(base, **VARIANTS[i % 2]), tile), arch)


# A whole depthwise filter is inlined for every staged element: seconds each, so not every tile on every architecture.
@pytest.mark.parametrize(
    ("arch", "tiles"), [("sm_75", CANDIDATES[::3]), ("sm_90a", CANDIDATES[1::3]), ("sm_120", CANDIDATES[::2])]
)
def test_a_depthwise_separable_tile_spills(arch: str, tiles: tuple[Tile, ...]) -> None:
    for tile in tiles:
        assert_no_spills(chosen(SEPARABLE, tile), arch)


@pytest.mark.parametrize("base", [CONV, TRANSPOSED, SEPARABLE], ids=lambda p: p.operator)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v["dtype"])
def test_64_bit_offsets_spill(base: Problem, variant: dict[str, str]) -> None:
    for arch in ("sm_80", "sm_90a"):
        assert_no_spills(plan(replace(base, index_bits=64, **variant), "sm_75").kernels[0], arch)


ROWS = {
    "short": (norm(3),),
    "warp": (norm(64), GELU, pool((1, 2, 2), "max_pool"), MISH),
    "widest_of_a_warp": (norm(1024), pool((2, 1, 1))),
    "block": (norm(1025), TANH),
    "widest_pooled": (norm(MAX_POOLED_ROW), pool((2, 2, 1))),
    "long": (norm(100_000), GELU),
    "pool": (MISH, pool((2, 3, 4), "max_pool"), GELU),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_kernel_behind_a_convolution_spills(name: str) -> None:
    *_, last = plan(replace(CONV, epilogue=ROWS[name], dtype="bfloat16"), "sm_75").kernels
    for arch in KNOWN:
        assert_no_spills(last, arch)


@pytest.mark.parametrize(
    ("rank", "kernel", "stride"), [(1, 4096, 1024), (3, 16, 16), (1, 2048, 512)], ids=["1d", "3d", "istft"]
)
def test_the_tables_of_a_large_transposed_filter_exceed_constant_memory(rank: int, kernel: int, stride: int) -> None:
    large = problem("conv_transpose", rank, kernel=kernel, stride=stride, in_channels=2, out_channels=1)
    compile_plan(plan(large, "sm_75").kernels[0], "sm_80")


# ---- Rendering ------------------------------------------------------------------------------------------------


def every_kernel() -> list[KernelPlan]:
    problems = [CONV, HEADLINE["w2"], SEPARABLE, replace(CONV, epilogue=ROWS["pool"])]
    kernels = [kernel for p in problems for kernel in plan(p, "sm_75").kernels]
    kernels += [kernel for arch in ("sm_80", "sm_90a") for kernel in plan(CONV, arch).kernels]
    return list({kernel.family: kernel for kernel in kernels}.values())


def test_every_family_is_among_those_that_are_tested() -> None:
    templates = {path.name for path in templates_root().glob("*.cu.j2")}
    assert {f"{kernel.family}.cu.j2" for kernel in every_kernel()} == templates


_RENDER = """
import sys
from jitconv.problem import Problem
from jitconv.planning import plan
from jitconv.render import kernel_key, render
import json
problem = Problem.from_canonical(json.loads(sys.argv[1]))
for kernel in plan(problem, "sm_75").kernels:
    print(kernel_key(kernel, "sm_90a", ("-a",)))
    sys.stdout.write(render(kernel).source)
"""


@pytest.mark.parametrize("seed", ["0", "1"])
def test_another_process_renders_another_text_or_key(seed: str) -> None:
    problem = HEADLINE["w2"]
    command = [sys.executable, "-c", _RENDER, json.dumps(problem.canonical())]
    root = str(Path(rendering.__file__).parent.parent)
    environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": root, "PATH": ""}
    out = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    expected = ""
    for kernel in plan(problem, "sm_75").kernels:
        expected += f"{kernel_key(kernel, 'sm_90a', ('-a',))}\n{render(kernel).source}"
    assert out == expected


def test_a_kernel_mentions_a_path_of_this_machine() -> None:
    for kernel in every_kernel():
        assert str(templates_root()) not in render(kernel).source


@pytest.mark.parametrize("kernel", every_kernel(), ids=lambda k: k.family)
def test_a_changed_template_or_header_keeps_its_key(kernel: KernelPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    key = kernel_key(kernel, "sm_90a", ())
    read = rendering._read
    names = [f"{kernel.family}.cu.j2", "macros/chain.j2", *render(kernel).headers]
    assert len(names) > 5
    for changed in names:
        rendering.source_digests.cache_clear()
        rendering.headers.cache_clear()
        monkeypatch.setattr(
            rendering, "_read", lambda name, changed=changed: read(name) + ("// one\n" if name == changed else "")
        )
        assert kernel_key(kernel, "sm_90a", ()) != key, changed
    monkeypatch.undo()
    rendering.source_digests.cache_clear()
    rendering.headers.cache_clear()
    assert kernel_key(kernel, "sm_90a", ()) == key


def test_arch_options_tile_or_problem_are_missing_from_the_key() -> None:
    kernel = plan(CONV, "sm_75").kernels[0]
    tile = replace(kernel.tile, depth=16)
    keys = [
        kernel_key(kernel, "sm_90a", ()),
        kernel_key(kernel, "sm_100a", ()),
        kernel_key(kernel, "sm_90a", ("--use_fast_math",)),
        kernel_key(replace(kernel, tile=tile), "sm_90a", ()),
        kernel_key(plan(replace(CONV, in_channels=33), "sm_75").kernels[0], "sm_90a", ()),
        kernel_key(plan(replace(CONV, precision="tf32"), "sm_75").kernels[0], "sm_90a", ()),
        kernel_key(plan(replace(CONV, epilogue=(TANH, MISH)), "sm_75").kernels[0], "sm_90a", ()),
    ]
    assert len(set(keys)) == len(keys)


# ---- Errors -----------------------------------------------------------------------------------------------------


def marked_lines(name: str) -> list[int]:
    """Lines of a template, one in every stretch between Jinja statements, at which a declaration may stand."""
    lines = (templates_root() / name).read_text("utf-8").split("\n")
    return [
        number for number, line in enumerate(lines, start=1) if line.startswith(("using ", "constexpr int ", "}  //"))
    ]


@pytest.mark.parametrize("kernel", every_kernel(), ids=lambda k: k.family)
def test_an_error_is_reported_at_another_line_of_the_template(
    kernel: KernelPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    template, read = f"{kernel.family}.cu.j2", rendering._read
    lines = read(template).split("\n")
    places = marked_lines(template)
    # The first, the last, and what follows macros and tables.
    rendered = render(kernel).source.split("\n")
    last_statement = max(i for i, line in enumerate(lines, start=1) if line.endswith(";") and line in rendered)
    for at in (places[0], places[-1], last_statement):
        broken = [*lines]
        broken[at - 1] = "undeclared_name here; " + lines[at - 1]
        text = "\n".join(broken)
        monkeypatch.setattr(rendering, "_read", lambda name, text=text: text if name == template else read(name))
        rendering._environment.cache_clear()
        with pytest.raises(CompileError) as error:
            compile_plan(kernel, "sm_90a")
        assert (error.value.file, error.value.line) == (f"templates/{template}", at)
        assert "undeclared_name here" in error.value.excerpt
    monkeypatch.undo()
    rendering._environment.cache_clear()


def test_an_error_in_a_header_is_reported_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    read, name = rendering._read, "device/padding.cuh"
    lines = read(name).split("\n")
    at = lines.index("namespace jitconv {") + 2
    lines[at - 1] += " undeclared_name here;"
    monkeypatch.setattr(rendering, "_read", lambda asked: "\n".join(lines) if asked == name else read(asked))
    rendering.headers.cache_clear()
    with pytest.raises(CompileError) as error:
        compile_plan(plan(CONV, "sm_75").kernels[0], "sm_90a")
    monkeypatch.undo()
    rendering.headers.cache_clear()
    assert (error.value.file, error.value.line) == (name, at)


def test_a_registered_step_with_a_mistake_is_not_named() -> None:
    step = StepSpec("mine", cuda="v + undeclared_name")
    kernel = plan(replace(CONV, epilogue=(MISH, step)), "sm_75").kernels[0]
    with pytest.raises(CompileError, match="undeclared_name") as error:
        compile_plan(kernel, "sm_90a")
    assert "// mine" in error.value.excerpt
    assert "oc_tile" in str(error.value)
