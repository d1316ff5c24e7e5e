"""The doctor tells a machine without a GPU from one whose GPU cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from jitconv import disassemble, doctor, launch, toolchain
from jitconv.cli import main
from jitconv.doctor import Check, examine
from jitconv.errors import DriverNotFoundError, JitconvError, NVRTCNotFoundError
from jitconv.machine import Gpu


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "store"
    monkeypatch.setenv("JITCONV_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> object:
        raise DriverNotFoundError("no driver here")

    monkeypatch.setattr(doctor, "gpus", list)
    monkeypatch.setattr(launch, "driver_version", missing)
    monkeypatch.setattr(launch, "device_info", missing)


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that works: the part that needs one is taken out."""
    monkeypatch.setattr(doctor, "gpus", lambda: [Gpu(0, "a GPU", (9, 0))])
    monkeypatch.setattr(launch, "driver_version", lambda: (13, 0))
    monkeypatch.setattr(doctor, "_torch", lambda found, wanted: Check("torch", "ok", "stands in for a CUDA build"))
    monkeypatch.setattr(doctor, "_run_one", lambda ordinal: None)


@pytest.fixture
def without_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> object:
        raise NVRTCNotFoundError("no NVRTC here; install it")

    for name in ("nvrtc_version", "nvrtc_architectures", "compile_cubin"):
        monkeypatch.setattr(toolchain, name, missing)


def states() -> dict[str, str]:
    return {check.name: check.state for check in examine()}


def run() -> tuple[int, str]:
    done = CliRunner().invoke(main, ["doctor"])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.output
    return done.exit_code, done.stdout


@pytest.mark.usefixtures("without_gpu")
def test_a_machine_without_a_gpu_is_not_ill() -> None:
    found = states()
    assert "fail" not in found.values()
    assert (found["driver"], found["gpu"], found["nvrtc"], found["kernel"]) == ("warn", "warn", "ok", "ok")
    code, text = run()
    assert code == 0
    assert "warming for other machines" in text


@pytest.mark.usefixtures("without_gpu", "without_nvrtc")
def test_without_gpu_and_nvrtc_it_says_what_is_left() -> None:
    found = states()
    assert (found["nvrtc"], found["kernel"]) == ("warn", "warn")
    code, text = run()
    assert code == 0
    assert "no NVRTC here; install it" in text
    assert "inspecting source" in text
    assert "warming for other machines" not in text


@pytest.mark.usefixtures("with_gpu")
def test_a_machine_with_a_working_gpu_is_well() -> None:
    code, text = run()
    assert code == 0
    assert "generated kernels work here" in text
    assert "0: a GPU, compute capability 9.0, sm_90a" in text


@pytest.mark.usefixtures("with_gpu", "without_nvrtc")
def test_a_gpu_without_nvrtc_is_a_failure() -> None:
    assert states()["nvrtc"] == "fail"
    code, text = run()
    assert code == 1
    assert "no NVRTC here; install it" in text


@pytest.mark.usefixtures("with_gpu")
def test_a_driver_older_than_nvrtc_is_a_failure_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "driver_version", lambda: (12, 4))
    monkeypatch.setattr(toolchain, "nvrtc_version", lambda: (13, 0))
    code, text = run()
    assert code == 1
    assert "NVRTC 13.0, driver for CUDA 12.4" in text
    assert "jitconv[cu12]" in text


@pytest.mark.usefixtures("with_gpu")
def test_a_kernel_that_computes_the_wrong_thing_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(ordinal: int) -> None:
        raise JitconvError("it computed 3, expected 4")

    monkeypatch.setattr(doctor, "_run_one", wrong)
    code, text = run()
    assert code == 1
    assert "it computed 3, expected 4" in text


@pytest.mark.usefixtures("without_gpu")
def test_a_gpu_that_torch_cannot_use_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU build of torch on a machine with a GPU: everything works, slowly and silently."""
    monkeypatch.setattr(launch, "driver_version", lambda: (13, 0))
    monkeypatch.setattr(launch, "device_info", lambda ordinal: None)
    monkeypatch.setattr("torch.version.cuda", None)
    monkeypatch.setattr("torch.version.hip", None)
    check = next(check for check in examine() if check.name == "torch")
    assert check.state == "fail"
    assert "CUDA build of torch" in check.remedy


@pytest.mark.usefixtures("without_gpu")
def test_a_gpu_that_is_too_old_is_named_and_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "gpus", lambda: [Gpu(0, "an old GPU", (6, 1))])
    check = next(check for check in examine() if check.name == "gpu")
    assert check.state == "warn"
    assert "an old GPU" in check.text
    assert "7.5" in check.remedy
    assert run()[0] == 0


@pytest.mark.usefixtures("without_gpu")
def test_an_unusable_store_is_shown_with_its_remedy(directory: Path) -> None:
    directory.mkdir()
    directory.chmod(0o777)
    check = next(check for check in examine() if check.name == "store")
    assert check.state == "warn"
    assert "chmod go-w" in check.remedy


@pytest.mark.usefixtures("without_gpu")
def test_an_unreadable_size_limit_does_not_end_the_examination(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITCONV_CACHE_SIZE", "lots")
    check = next(check for check in examine() if check.name == "store")
    assert check.state == "warn"
    assert "JITCONV_CACHE_SIZE" in check.remedy


@pytest.mark.usefixtures("without_gpu")
def test_missing_tools_are_named_with_what_they_are_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disassemble, "disassemblers", list)
    monkeypatch.setenv("CXX", "no-such-compiler")
    code, text = run()
    assert code == 0
    assert "nvidia-cuda-nvdisasm" in text
    assert "no-such-compiler" in text
    assert "emulator" not in text.splitlines()[-1]


@pytest.mark.usefixtures("without_gpu")
def test_the_versions_that_matter_are_shown() -> None:
    import torch

    code, text = run()
    major, minor = toolchain.nvrtc_version()
    assert code == 0
    assert torch.__version__ in text
    assert f"{major}.{minor} at {toolchain.nvrtc_path()}" in text
