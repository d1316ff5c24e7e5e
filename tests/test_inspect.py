"""Inspection shows what a call would run, and compiles only for what was asked."""

from __future__ import annotations

import doctest
import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import jitconv
from jitconv import disassemble, machine, toolchain
from jitconv import epilogue as E
from jitconv.cli import main
from jitconv.errors import DisassemblerNotFoundError, JitconvError, ManifestError, NVRTCNotFoundError
from jitconv.inspect import Inspection, resident_blocks
from jitconv.stats import reset_stats, stats

MANIFEST = """
[pooled]
operator = "conv1d"
input = [2, 2, 16]
weight = [2, 2, 3]
epilogue = ["relu", { step = "max_pool", kernel_size = 2 }]
"""


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "store"
    monkeypatch.setenv("JITCONV_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def address(tmp_path: Path) -> str:
    path = tmp_path / "small.toml"
    path.write_text(MANIFEST)
    return f"{path}:pooled"


@pytest.fixture
def no_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> object:
        raise NVRTCNotFoundError("no NVRTC here")

    monkeypatch.setattr(toolchain, "compile_cubin", missing)
    monkeypatch.setattr(toolchain, "compile_ptx", missing)


def pooled(x: torch.Tensor, weight: torch.Tensor) -> Inspection:
    return jitconv.inspect(jitconv.conv1d, x, weight, epilogue=[E.relu(), E.max_pool(2)], arch="sm_80")


def small(dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(2, 2, 16, dtype=dtype, device=device), torch.ones(2, 2, 3, dtype=dtype, device=device)


# ---- what is shown --------------------------------------------------------------------------------


def test_a_call_and_its_manifest_entry_are_the_same_kernels(address: str) -> None:
    by_address, by_call = jitconv.inspect(address, arch="sm_80"), pooled(*small())
    assert [kernel.key for kernel in by_address.kernels] == [kernel.key for kernel in by_call.kernels]
    assert by_address.problem == by_call.problem
    assert (by_call.input_shape, by_call.output_shape) == ((2, 2, 16), (2, 2, 7))


def test_every_part_belongs_to_the_same_kernel(address: str) -> None:
    kernel = jitconv.inspect(address, arch="sm_90").kernels[1]
    assert kernel.arch == "sm_90a"
    assert f"{kernel.name}(" in kernel.source
    assert f".entry {kernel.name}(" in kernel.ptx
    assert ".target sm_90a" in kernel.ptx
    assert kernel.name.encode() in kernel.cubin
    assert kernel.constants["name"] == kernel.name
    assert kernel.resources.threads == kernel.block
    assert 0 < kernel.resources.registers <= 255


def test_grid_follows_the_inspected_sizes() -> None:
    # 28 outputs behind the pool and 7 * 2 * 499: one thread each, 256 in a block.
    x, weight = small()
    assert pooled(x, weight).kernels[1].grid == 1
    assert pooled(torch.ones(7, 2, 1000), weight).kernels[1].grid == -(-7 * 2 * 499 // 256)


def test_workspace_is_what_lies_between_the_kernels() -> None:
    assert pooled(*small()).workspace_bytes == 2 * 2 * 14 * 4
    x, weight = small()
    assert jitconv.inspect(jitconv.conv1d, x, weight, arch="sm_80").workspace_bytes == 0


def test_source_needs_no_compiler(address: str, no_nvrtc: None) -> None:
    found = jitconv.inspect(address, arch="sm_80")
    assert 'extern "C" __global__' in found.source
    with pytest.raises(NVRTCNotFoundError):
        found.kernels[0].resources  # noqa: B018
    with pytest.raises(NVRTCNotFoundError):
        found.kernels[0].ptx  # noqa: B018


def test_a_warm_kernel_is_not_compiled_to_be_looked_at(address: str) -> None:
    first = jitconv.inspect(address, arch="sm_80").kernels[0]
    assert not first.was_stored
    reset_stats()
    second = jitconv.inspect(address, arch="sm_80").kernels[0]
    assert second.resources == first.resources
    assert second.was_stored
    assert stats().compiled == 0


def test_several_kernels_are_told_apart_in_joined_text(address: str) -> None:
    found = jitconv.inspect(address, arch="sm_80")
    for i, kernel in enumerate(found.kernels):
        assert f"// kernel {i}: {kernel.name}\n{kernel.source}" in found.source
    assert found.selected(1).source == found.kernels[1].source


def test_the_example_in_the_docstring_does_not_run() -> None:
    (example,) = doctest.DocTestFinder(recurse=False).find(jitconv.inspect, "inspect", globs={})
    assert example.examples
    assert doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(example).failed == 0


# ---- which path serves the call -------------------------------------------------------------------


def test_a_cpu_tensor_takes_torchs_path_and_its_kernels_are_shown() -> None:
    found = pooled(*small())
    assert (found.path, found.path_reason) == ("torch", "cpu tensor")
    assert len(found.kernels) == 2


def test_a_tensor_without_memory_stands_for_one_on_a_gpu(address: str) -> None:
    assert pooled(*small(device="meta")).path == "generated"
    assert jitconv.inspect(address, arch="sm_80").path == "generated"


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_float64_generates_nothing_and_says_so(device: str) -> None:
    found = pooled(*small(torch.float64, device))
    assert (found.path, found.path_reason, found.kernels) == ("torch", "float64", ())
    assert "float64" in found.report()
    assert found.output_shape == (2, 2, 7)
    with pytest.raises(JitconvError, match="float64"):
        found.source  # noqa: B018


def test_a_call_that_would_raise_raises_the_same() -> None:
    with pytest.raises(RuntimeError, match="weight has shape"):
        jitconv.inspect(jitconv.conv1d, torch.ones(1, 3, 8), torch.ones(2, 2, 3))
    with pytest.raises(RuntimeError, match="1-D tensor is one value per channel"):
        jitconv.inspect(jitconv.conv1d, *small(), epilogue=[E.add(torch.ones(5))])


def test_only_operators_and_addresses_can_be_inspected() -> None:
    with pytest.raises(TypeError, match=r"expected a public operator of jitconv"):
        jitconv.inspect(torch.nn.functional.conv1d, *small())
    with pytest.raises(TypeError, match="an address takes no arguments"):
        jitconv.inspect("headline:w1", torch.ones(1))
    with pytest.raises(ManifestError, match="no entry 'w7'"):
        jitconv.inspect("headline:w7")


# ---- architecture ---------------------------------------------------------------------------------


def test_the_default_architecture_is_that_of_the_gpu_else_sm_90a(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpus", list)
    found = jitconv.inspect("headline:w1")
    assert found.arch == "sm_90a"
    assert "default" in found.arch_reason
    monkeypatch.setattr(machine, "gpus", lambda: [machine.Gpu(0, "a GPU", (8, 6))])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    found = jitconv.inspect("headline:w1")
    assert found.arch == "sm_86"
    assert "a GPU" in found.arch_reason


@pytest.mark.parametrize(
    ("arch", "registers", "threads", "shared", "blocks"),
    [
        ("sm_90a", 128, 128, 0, 4),  # 128 * 128 of 65536 registers
        ("sm_90a", 164, 128, 0, 3),  # 168 after rounding: 21504 each
        ("sm_90a", 255, 96, 0, 2),  # 8 warps by registers, 3 in a block
        ("sm_90a", 32, 256, 0, 8),  # 2048 threads
        ("sm_90a", 16, 32, 0, 32),  # 32 blocks
        ("sm_80", 32, 128, 48 * 1024, 3),  # 49 of 164 KiB
        ("sm_86", 32, 1024, 0, 1),  # 1536 threads
        ("sm_75", 32, 128, 64 * 1024, 1),
        ("sm_90a", 32, 128, 227 * 1024, 1),
    ],
)
def test_resident_blocks(arch: str, registers: int, threads: int, shared: int, blocks: int) -> None:
    assert resident_blocks(arch, registers, threads, shared) == blocks


# ---- the command ----------------------------------------------------------------------------------


def test_text_shows_constants_resources_and_key(address: str) -> None:
    done = CliRunner().invoke(main, ["inspect", address, "--arch", "sm_80"])
    assert done.exit_code == 0, done.output
    found = jitconv.inspect(address, arch="sm_80")
    for kernel in found.kernels:
        assert kernel.name in done.stdout
        assert kernel.key in done.stdout
        assert f"{kernel.resources.registers} per thread, no spills" in done.stdout
    assert "epilogue relu" in done.stdout
    assert "max_pool(2)" in done.stdout
    assert "sm_80 (as asked)" in done.stdout


def test_json_is_all_that_is_printed(address: str) -> None:
    # --arch sm_90 has something to say, and must not say it there.
    done = CliRunner().invoke(main, ["inspect", address, "--arch", "sm_90", "--format", "json"])
    said = json.loads(done.stdout)
    assert said["arch"] == "sm_90a"
    assert [kernel["block"] for kernel in said["kernels"]] == [
        kernel.block for kernel in jitconv.inspect(address, arch="sm_90a").kernels
    ]
    assert said["kernels"][0]["resources"]["registers"] > 0
    assert said["problem"]["operator"] == "conv"


@pytest.mark.parametrize(("form", "heading"), [("source", "void __launch_bounds__"), ("ptx", ".entry")])
def test_text_formats_of_one_kernel_are_that_text_alone(form: str, heading: str, address: str) -> None:
    done = CliRunner().invoke(main, ["inspect", address, "--arch", "sm_80", "--format", form, "--kernel", "1"])
    assert done.exit_code == 0
    assert done.stdout.count(heading) == 1
    assert f"{jitconv.inspect(address, arch='sm_80').kernels[1].name}(" in done.stdout
    assert "// kernel" not in done.stdout


def test_sass_without_a_disassembler_says_what_to_install(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disassemble, "disassemblers", list)
    with pytest.raises(DisassemblerNotFoundError):
        jitconv.inspect(address, arch="sm_80").sass  # noqa: B018
    done = CliRunner().invoke(main, ["inspect", address, "--arch", "sm_80", "--format", "sass"])
    assert done.exit_code == 1
    assert "nvidia-cuda-nvdisasm" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("headline:w8",), 1, "no entry 'w8'"),
        (("headline",), 1, "MANIFEST:ENTRY"),
        (("headline:w3", "--kernel", "1"), 2, "1 kernels, counted from 0"),
        (("headline:w1", "--arch", "sm_80,sm_90a"), 2, "expected one architecture"),
        (("headline:w1", "--arch", "all"), 2, "expected one architecture"),
        (("headline:w1", "--format", "html"), 2, "--format"),
    ],
)
def test_a_mistake_is_one_message_and_a_failure(arguments: tuple[str, ...], code: int, words: str) -> None:
    done = CliRunner().invoke(main, ["inspect", *arguments])
    assert done.exit_code == code
    assert words in done.stderr
    assert done.stdout == ""
