"""Warming compiles what is missing, once, and never reports a kernel that is not in the store."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from jitconv import machine, toolchain
from jitconv import warm as warming
from jitconv.cli import main
from jitconv.errors import CompileError, DriverNotFoundError, NVRTCNotFoundError, UnsupportedArchitectureError
from jitconv.machine import Gpu, chosen_archs
from jitconv.manifest import select
from jitconv.stats import reset_stats, stats
from jitconv.store import Store, StoreUnavailableError

ROOT = Path(__file__).resolve().parent.parent

# Small kernels: what is tested here is not the compiler.
MANIFEST = """
[plain]
operator = "conv1d"
input = [1, 2, 16]
weight = [2, 2, 3]

[pooled]
operator = "conv1d"
input = [1, 2, 16]
weight = [2, 2, 3]
epilogue = [{ step = "max_pool", kernel_size = 2 }]

[pooled_longer]
operator = "conv1d"
input = [7, 2, 1000]
weight = [2, 2, 3]
epilogue = [{ step = "max_pool", kernel_size = 2 }]
"""


@pytest.fixture
def manifest(tmp_path: Path) -> str:
    path = tmp_path / "small.toml"
    path.write_text(MANIFEST)
    return str(path)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "store"
    monkeypatch.setenv("JITCONV_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpus", list)


# ---- from entries to jobs -------------------------------------------------------------------------


def test_entries_that_differ_in_sizes_share_their_kernels(manifest: str) -> None:
    jobs = warming.jobs_of(select(manifest), ["sm_80"])
    users = [[address.rpartition(":")[2] for address in job.addresses] for job in jobs]
    # The kernel in front of a pool is not the plain one: its name and its Problem say what follows.
    assert sorted(users) == [["plain"], ["pooled", "pooled_longer"], ["pooled", "pooled_longer"]]


def test_each_architecture_is_a_job_of_its_own(manifest: str) -> None:
    jobs = warming.jobs_of(select(f"{manifest}:plain"), ["sm_80", "sm_86"])
    assert [job.arch for job in jobs] == ["sm_80", "sm_86"]
    assert len({job.key for job in jobs}) == 2


# ---- architectures --------------------------------------------------------------------------------


def test_the_same_architecture_by_two_names_is_compiled_once() -> None:
    assert chosen_archs(["sm_90", "9.0", "sm_90a", "80"]) == ("sm_90a", "sm_80")


def test_all_is_every_known_architecture() -> None:
    assert chosen_archs(["all"]) == ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120")


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_and_without_arch_the_error_names_the_option() -> None:
    with pytest.raises(DriverNotFoundError, match=r"--arch is not given.*--arch all"):
        chosen_archs([])


def test_the_default_is_each_usable_gpu_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Gpu(0, "a", (9, 0)), Gpu(1, "b", (6, 1)), Gpu(2, "c", (9, 0)), Gpu(3, "d", (8, 6))]
    monkeypatch.setattr(machine, "gpus", lambda: found)
    assert chosen_archs([]) == ("sm_90a", "sm_86")


# ---- warming --------------------------------------------------------------------------------------


def test_what_is_warm_is_not_compiled_again(manifest: str, directory: Path) -> None:
    jobs = warming.jobs_of(select(manifest), ["sm_80"])
    seen: list[str] = []
    first = warming.warm(jobs, Store.open(strict=True), progress=lambda outcome: seen.append(outcome.job.key))
    assert first.count("compiled") == len(jobs)
    assert sorted(seen) == sorted(job.key for job in jobs)
    reset_stats()
    second = warming.warm(jobs, Store.open(strict=True))
    assert (second.count("warm"), second.count("compiled")) == (len(jobs), 0)
    assert (stats().compiled, stats().store_hits) == (0, len(jobs))
    assert [outcome.registers for outcome in first.outcomes] == [outcome.registers for outcome in second.outcomes]


def test_a_kernel_that_does_not_compile_fails_alone(
    manifest: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_cubin = toolchain.compile_cubin

    def refuse_pools(source: str, **arguments: object) -> object:
        if "max_pool" in str(arguments["name"]):
            raise CompileError("this one does not compile")
        return compile_cubin(source, **arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(toolchain, "compile_cubin", refuse_pools)
    report = warming.warm(warming.jobs_of(select(manifest), ["sm_80"]), Store.open(strict=True), workers=1)
    assert [outcome.state for outcome in report.outcomes].count("failed") == 1
    assert report.count("compiled") == len(report.outcomes) - 1
    assert report.errors == ("this one does not compile",)


def test_one_missing_compiler_is_one_message(manifest: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> object:
        raise NVRTCNotFoundError("no NVRTC here")

    monkeypatch.setattr(toolchain, "compile_cubin", missing)
    done = CliRunner().invoke(main, ["warm", manifest, "--arch", "sm_80"])
    assert done.exit_code == 1
    assert done.stderr.count("no NVRTC here") == 1
    assert "0 compiled" in done.stdout


def test_a_store_that_is_too_small_is_a_failure(
    manifest: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warming that reports success for a kernel that was thrown out again would compile in production."""
    monkeypatch.setenv("JITCONV_CACHE_SIZE", "20kB")
    done = CliRunner().invoke(main, ["warm", manifest, "--arch", "sm_80,sm_86"])
    assert done.exit_code == 1
    assert "raise JITCONV_CACHE_SIZE" in done.stderr


def test_a_store_that_cannot_be_used_stops_the_command(manifest: str, directory: Path) -> None:
    directory.mkdir()
    directory.chmod(0o777)
    done = CliRunner().invoke(main, ["warm", manifest, "--arch", "sm_80"])
    assert done.exit_code == 1
    assert str(directory) in done.stderr
    assert "chmod go-w" in done.stderr


def test_a_store_that_fails_midway_is_no_success(manifest: str, directory: Path) -> None:
    store = Store.open(strict=True)
    jobs = warming.jobs_of(select(manifest), ["sm_80"])
    store.close()
    directory.chmod(0o777)
    with pytest.raises(StoreUnavailableError):
        warming.warm(jobs, store)


# ---- the command ----------------------------------------------------------------------------------


def test_the_command_says_what_it_did_and_what_was_warm(manifest: str, directory: Path) -> None:
    arguments = ["warm", f"{manifest}:plain", "--arch", "sm_80", "--jobs", "1"]
    first = CliRunner().invoke(main, arguments)
    assert first.exit_code == 0, first.output
    assert "[1/1] sm_80 jitconv_conv1d_c2k2_k3_float32: compiled in" in first.stdout
    assert "1 compiled, 0 already warm, 0 failed" in first.stdout
    assert str(directory) in first.stdout
    second = CliRunner().invoke(main, arguments)
    assert "already warm" in second.stdout
    assert "0 compiled, 1 already warm, 0 failed" in second.stdout


def test_sm_90_says_that_it_means_sm_90a(manifest: str, directory: Path) -> None:
    done = CliRunner().invoke(main, ["warm", f"{manifest}:plain", "--arch", "sm_90"])
    assert "sm_90: compiling for sm_90a" in done.stderr
    assert "sm_90a jitconv_conv1d" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("headline", "--arch", "sm_9x"), 2, "'sm_9x' is not the name of a GPU architecture"),
        (("headline", "--arch", ","), 2, "expected architectures"),
        (("headline", "--arch", "sm_70"), 1, "sm_75"),
        (("headline", "--jobs", "0", "--arch", "sm_80"), 2, "--jobs"),
        (("headline", "--precision", "fp32", "--arch", "sm_80"), 2, "'fp32' is not one of 'ieee', 'tf32'"),
        (("nothing", "--arch", "sm_80"), 1, "ships no manifest"),
        ((), 2, "MANIFEST"),
    ],
)
def test_a_mistake_is_one_message_and_a_failure(
    arguments: tuple[str, ...], code: int, words: str, directory: Path
) -> None:
    done = CliRunner().invoke(main, ["warm", *arguments])
    assert done.exit_code == code
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not directory.exists()


def test_an_architecture_that_nvrtc_lacks_fails_only_itself(manifest: str, directory: Path) -> None:
    done = CliRunner().invoke(main, ["warm", f"{manifest}:plain", "--arch", "sm_80,sm_999"])
    assert done.exit_code == 1
    assert "1 compiled, 0 already warm, 1 failed" in done.stdout
    assert "does not compile for sm_999" in done.stderr


def test_older_architectures_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedArchitectureError, match="sm_75"):
        chosen_archs(["sm_61"])


# ---- between processes ----------------------------------------------------------------------------

SECOND = """
import sys
import jitconv
from jitconv import program
from jitconv.compilation import compiled_kernel
from jitconv.manifest import select

for entry in select(sys.argv[1]):
    for step in program.build(entry.call(), "sm_80").launches:
        assert compiled_kernel(step.kernel, "sm_80").cubin[:4] == b"\\x7fELF"
counted = jitconv.stats()
print(counted.compiled, counted.store_hits, counted.store_misses)
"""


@pytest.fixture
def process(directory: Path) -> Callable[..., str]:
    def run_python(*arguments: str) -> str:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "JITCONV_CACHE_DIR": str(directory)}
        done = subprocess.run(
            [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run_python


def test_a_second_process_compiles_nothing(manifest: str, process: Callable[..., str]) -> None:
    """The key must not hold anything of a process: a path, a hash seed, an address, the time."""
    process("-m", "jitconv", "warm", manifest, "--arch", "sm_80")
    compiled, hits, misses = map(int, process("-c", SECOND, manifest).split())
    assert (compiled, misses) == (0, 0)
    assert hits == 5


CALL = """
import sys
from types import SimpleNamespace
import torch
import jitconv
from jitconv import functional, launch

# A GPU is stood for as far as the store: what is loaded is launched nowhere.
kernel = SimpleNamespace(launch=lambda *arguments: None)
functional.torch_path_reason = lambda call: None
launch.device_info = lambda ordinal: SimpleNamespace(name="NVIDIA H200", arch="sm_90a", sm_count=132)
launch.current_stream = lambda ordinal: 0
launch.is_capturing = lambda stream: False
launch.load = lambda *arguments, **named: kernel

torch.backends.cudnn.allow_tf32 = sys.argv[1] == "tf32"
# Another size of the same class: rows are no whole vectors, as they were not where it was warmed.
jitconv.conv1d(torch.ones(3, 4, 50), torch.ones(8, 4, 3))
counted = jitconv.stats()
print(counted.compiled, counted.store_hits)
"""


@pytest.mark.parametrize("setting", [None, "ieee"])
def test_a_call_at_the_setting_that_was_warmed_compiles(
    setting: str | None, tmp_path: Path, process: Callable[..., str]
) -> None:
    path = tmp_path / "tensor_cores.toml"
    path.write_text('[layer]\noperator = "conv1d"\ninput = [1, 4, 18]\nweight = [8, 4, 3]\n')
    option = ("--precision", setting) if setting else ()
    process("-m", "jitconv", "warm", str(path), "--arch", "sm_90a", *option)
    warmed, other = ("ieee", "tf32") if setting else ("tf32", "ieee")
    # The weights are laid out by one kernel, convolved by another.
    assert process("-c", CALL, warmed).split() == ["0", "2"]
    assert process("-c", CALL, other).split() == ["2", "0"]
