"""SASS: whatever disassembler this machine has, and a clear word when it has none."""

from __future__ import annotations

import stat

import pytest

from jitconv import disassemble as module
from jitconv.disassemble import disassemble, disassemblers
from jitconv.errors import DisassemblerNotFoundError, ToolchainError
from jitconv.toolchain import compile_cubin

CUBIN = b"\x7fELF fake"


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A machine without any disassembler; returns a maker of fake ones."""
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setattr(module, "_package_folders", lambda name: [])

    def make(place, name, script):
        folder = tmp_path / place
        folder.mkdir(parents=True, exist_ok=True)
        tool = folder / name
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
        return tool

    return make


def test_without_a_tool_the_remedy_is_named(bare):
    with pytest.raises(DisassemblerNotFoundError, match="pip install nvidia-cuda-nvdisasm"):
        disassemble(CUBIN)


def test_the_tool_gets_the_bytes_of_the_cubin(bare):
    bare("path", "nvdisasm", 'IFS= read -r line < "$2"; echo "$1 $line"')
    assert disassemble(CUBIN + b"\n") == "--print-code \x7fELF fake\n"


def test_cuobjdump_will_do(bare):
    bare("path", "cuobjdump", 'echo "sass $1"')
    assert disassemble(CUBIN) == "sass --dump-sass\n"


def test_a_tool_that_is_too_old_is_passed_over(bare, monkeypatch, tmp_path):
    bare("path", "nvdisasm", "echo 'nvdisasm fatal: unknown version' >&2; exit 1")
    bare("toolkit/bin", "nvdisasm", "echo newer")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    assert disassemble(CUBIN) == "newer\n"


def test_when_every_tool_fails_their_words_are_kept(bare):
    bare("path", "nvdisasm", "echo 'unknown version 9' >&2; exit 1")
    bare("path", "cuobjdump", "exit 0")  # no output is no answer
    with pytest.raises(ToolchainError, match=r"unknown version 9.*exit status 0 and no output"):
        disassemble(CUBIN)


@pytest.mark.parametrize(
    ("package", "inside"),
    [("nvidia", "cu13/bin"), ("nvidia", "cuda_nvdisasm/bin"), ("triton", "backends/nvidia/bin")],
)
def test_the_copies_in_wheels_are_found(bare, monkeypatch, tmp_path, package, inside):
    tool = bare(f"site/{package}/{inside}", "nvdisasm", "echo found")
    monkeypatch.setattr(
        module, "_package_folders", lambda name: [tmp_path / "site" / name] * (name == package)
    )
    assert disassemblers() == [tool]


def test_packages_are_looked_for_without_importing_them():
    assert module._package_folders("no_such_package_of_ours") == []
    assert module._package_folders("email")[0].name == "email"


@pytest.mark.skipif(not disassemblers(), reason="no nvdisasm or cuobjdump on this machine")
def test_real_sass_of_a_real_cubin():
    source = 'extern "C" __global__ void kernel(float* out) { out[0] = 1.0f; }'
    compiled = compile_cubin(source, name="kernel", arch="sm_90", headers={})
    sass = disassemble(compiled.cubin)
    assert "EXIT" in sass
    assert "STG" in sass
