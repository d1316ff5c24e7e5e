"""The demo shows what it says it shows, on machines that lack one thing or another."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console

from jitconv import calls, precision, program, toolchain
from jitconv import demo as demonstration
from jitconv.compilation import key_of
from jitconv.demo import HEADLINES, Headline, demo
from jitconv.errors import JitconvError, NVRTCNotFoundError
from jitconv.problem import PRECISIONS
from jitconv.timing import Timing


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demonstration, "gpus", list)
    monkeypatch.setattr("jitconv.machine.gpus", list)
    monkeypatch.setenv("JITCONV_CACHE_DIR", str(tmp_path / "store"))


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")


@pytest.fixture
def without_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> object:
        raise NVRTCNotFoundError("no NVRTC here; install it")

    monkeypatch.setattr(toolchain, "compile_cubin", missing)


def shown() -> str:
    text = io.StringIO()
    demo(Console(file=text, width=160, highlight=False))
    return text.getvalue()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """What a machine prints that has everything but a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demonstration, "gpus", list)
        patch.setattr("jitconv.machine.gpus", list)
        patch.setenv("JITCONV_CACHE_DIR", str(tmp_path_factory.mktemp("store")))
        yield shown()


def without_measurements(text: str) -> list[str]:
    """The lines of a demo without what differs between machines and versions of the compiler."""
    text = re.sub(r"\d+(\.\d+)?(e-\d+)?( ms| s\b| registers| against float64)", r"#\3", text)
    text = re.sub(r"built by \S+", "built by #", text)
    return [re.sub(r" +", " ", line).strip() for line in text.strip().splitlines()]


@pytest.mark.compiler
@pytest.mark.slow
@pytest.mark.xdist_group("demo")  # one worker, one run
def test_the_readme_shows_what_the_demo_prints(whole: str) -> None:
    readme = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")
    block = readme.split("<!-- test: demo -->\n```\n")[1].split("\n```")[0]
    assert without_measurements(block) == without_measurements(whole)


@pytest.mark.compiler
@pytest.mark.slow
@pytest.mark.xdist_group("demo")  # one worker, one run
def test_without_a_gpu_every_operator_is_compiled_and_emulated(whole: str) -> None:
    text = whole
    # One convolution on tensor cores at two precisions, its weights laid out by a kernel of their own; three others.
    assert text.count("baked in") == text.count("compiled   for sm_90a") == 7
    assert text.count("no spills") == 7
    assert " ".join(text.split()).count("on tensor cores") == 4
    assert text.count("against float64") == 4
    assert "try next" in text
    assert "not run" not in text


@pytest.mark.usefixtures("without_gpu", "without_compiler")
def test_without_a_compiler_it_says_so_and_shows_the_rest() -> None:
    text = shown()
    assert "no-such-compiler" in text
    assert text.count("registers, no spills") == 7
    assert "against float64" not in text
    assert "try next" in text


@pytest.mark.usefixtures("without_gpu", "without_compiler", "without_nvrtc")
def test_without_nvrtc_it_says_so_and_shows_the_constants() -> None:
    text = shown()
    assert text.count("no NVRTC here; install it") == 7
    assert text.count("lines of CUDA") == 7
    assert text.count("baked in") == 7
    assert "try next" in text


@pytest.mark.parametrize("headline", HEADLINES, ids=lambda headline: headline.address)
def test_the_small_inputs_run_the_very_kernels_that_were_shown(headline: Headline) -> None:
    small = headline.entry.resized(headline.small_input)
    for setting in headline.settings:
        keys = [
            [key_of(step.kernel, "sm_90a") for step in program.build(entry.at_precision(setting).call()).launches]
            for entry in (headline.entry, small)
        ]
        assert keys[0] == keys[1]


@pytest.mark.parametrize("headline", HEADLINES, ids=lambda headline: headline.address)
def test_a_setting_of_torch_makes_other_kernels_than_those_shown(headline: Headline) -> None:
    kernels = {
        setting: [step.kernel for step in program.build(headline.entry.at_precision(setting).call()).launches]
        for setting in PRECISIONS
    }
    assert (kernels["tf32"] != kernels["ieee"]) == (len(headline.settings) > 1)
    # What a call does where nobody touched the setting comes first.
    default = [step.kernel for step in program.build(headline.entry.call()).launches]
    assert default == kernels[headline.settings[0]]


@pytest.mark.parametrize("headline", HEADLINES, ids=lambda headline: headline.address)
def test_the_plain_pytorch_beside_an_entry_is_the_same_operator(headline: Headline) -> None:
    """Errors are measured against it, so it must not be another operator that happens to run."""
    from jitconv.functional import run_reference

    tensors: dict[str, torch.Tensor] = {}
    call = headline.entry.resized(headline.small_input).call(demonstration._random_tensors(tensors, "cpu"))
    torch.testing.assert_close(headline.torch(tensors), run_reference(call))


def test_every_parameter_of_the_data_is_random() -> None:
    """A gamma of ones and a beta of zeros would hide that they are never read."""
    for headline in HEADLINES:
        tensors: dict[str, torch.Tensor] = {}
        headline.entry.resized(headline.small_input).call(demonstration._random_tensors(tensors, "cpu"))
        assert all(tensor.numel() == 1 or tensor.std() > 0 for tensor in tensors.values())


@pytest.mark.parametrize("setting", PRECISIONS)
@pytest.mark.parametrize("wrong", [torch.full((2, 3), torch.nan), torch.full((2, 3), 1.01), torch.ones(3, 2)])
def test_a_wrong_result_is_not_shown_as_a_small_error(wrong: torch.Tensor, setting: str) -> None:
    with pytest.raises(JitconvError, match=rf"headline:w1 at {setting}.*wrong"):
        demonstration._checked_error(HEADLINES[0], setting, wrong, torch.ones(2, 3, dtype=torch.float64))


def test_an_error_of_tf32_passes_for_fp32() -> None:
    exact = torch.ones(2, 3, dtype=torch.float64)
    assert demonstration._checked_error(HEADLINES[0], "tf32", torch.full((2, 3), 1.0003), exact) > 0
    with pytest.raises(JitconvError, match="expected less than 1e-05"):
        demonstration._checked_error(HEADLINES[0], "ieee", torch.full((2, 3), 1.0003), exact)


def test_the_batch_is_halved_until_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[int, ...]] = []

    def race_at(console: Console, headline: Headline, shape: tuple[int, ...], note: str) -> None:
        tried.append(shape)
        if shape[0] > 4:
            raise torch.OutOfMemoryError("out of memory")
        assert note == ", batch 16 → 4 to fit"

    monkeypatch.setattr(demonstration, "_race_at", race_at)
    demonstration._race(Console(file=io.StringIO()), HEADLINES[0])
    assert [shape[0] for shape in tried] == [16, 8, 4]
    assert {shape[1:] for shape in tried} == {(32, 32, 64, 64)}


def test_a_gpu_without_room_for_one_sample_is_said_and_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def race_at(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(demonstration, "_race_at", race_at)
    text = io.StringIO()
    demonstration._race(Console(file=text, width=120), HEADLINES[0])
    assert "not enough memory" in text.getvalue()


def test_a_peer_that_does_not_run_here_is_left_out_with_its_reason() -> None:
    def broken() -> torch.Tensor:
        raise AssertionError("Triton is not installed\nand a long trace")

    candidates = {"jitconv TF32": broken, "eager": lambda: torch.ones(1), "compiled": broken}
    assert demonstration._drop_failing(candidates) == {"compiled": "Triton is not installed"}
    assert list(candidates) == ["jitconv TF32", "eager"]


def test_precision_of_the_peers_is_set_and_put_back() -> None:
    def setting() -> str:
        return str(torch.backends.cudnn.conv.fp32_precision)  # type: ignore[attr-defined]

    before = setting()
    for chosen in ("ieee", "tf32"):
        with demonstration._conv_precision(chosen):
            assert setting() == chosen
    assert setting() == before


@pytest.mark.parametrize("headline", HEADLINES, ids=lambda headline: headline.address)
def test_the_table_of_a_race_has_every_candidate_with_its_error(
    headline: Headline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of the race but the GPU: data on the CPU, and a clock that does not look at it."""
    on_any_device = demonstration._random_tensors

    def fake_times(candidates: dict[str, object]) -> dict[str, Timing]:
        return {name: Timing(2.0 * i + 2, 1.0, 9.0) for i, name in enumerate(candidates)}

    monkeypatch.setattr(demonstration, "_random_tensors", lambda made, device: on_any_device(made, "cpu"))
    settings: set[str] = set()

    def public_function(name: str) -> Callable[..., torch.Tensor]:
        def call(**arguments: object) -> torch.Tensor:
            settings.add(precision.torchs())
            return calls.public_function(name)(**arguments)  # type: ignore[no-any-return]

        return call

    monkeypatch.setattr(demonstration, "public_function", public_function)
    monkeypatch.setattr(demonstration, "interleaved", fake_times)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    text = io.StringIO()
    shape = (2, *headline.small_input[1:])
    demonstration._race_at(Console(file=text, width=160, highlight=False), headline, shape, "")
    rows = [line for line in text.getvalue().splitlines() if "[1.000, 9.000]" in line]
    assert settings == set(headline.settings)  # each of ours runs at its setting, none at another
    both = len(headline.settings) > 1
    ours = ["jitconv TF32", "jitconv fp32"] if both else ["jitconv fp32"]
    peers = ["eager TF32", "torch.compile TF32", "eager fp32", "torch.compile fp32"]
    assert [row.split("  ")[0] for row in rows] == ours + peers
    # Each row takes 2 ms more than the one before, the first one 2: a peer is compared with its own precision.
    ratios = ["3.00", "4.00", "2.50", "3.00"] if both else ["2.00", "3.00", "4.00", "5.00"]
    assert [row.split(" × as fast")[0].split()[-1] for row in rows[len(ours) :]] == ratios
    assert all(float(row.split()[-1]) < 1e-5 for row in rows)
