"""From a cubin to SASS, with the nvdisasm or cuobjdump that this machine has.

jitconv does not depend on a disassembler: it is looked for on PATH, in a CUDA toolkit, in
NVIDIA's wheels and in Triton's copy, in this order.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jitconv.errors import DisassemblerNotFoundError, ToolchainError

REMEDY = "pip install nvidia-cuda-nvdisasm, or put the bin folder of a CUDA toolkit on PATH"

_TOOLS = {"nvdisasm": ("--print-code",), "cuobjdump": ("--dump-sass",)}
_TIMEOUT_SECONDS = 120


def disassemble(cubin: bytes) -> str:
    """Return the SASS of a cubin as text.

    An old tool cannot read the cubins of a newer compiler, so every tool found is tried.

    Raises:
        DisassemblerNotFoundError: there is no nvdisasm and no cuobjdump.
        ToolchainError: none of those found can read the cubin; the message holds their words.
    """
    failures = []
    with tempfile.TemporaryDirectory(prefix="jitconv-") as folder:
        image = Path(folder, "kernel.cubin")
        image.write_bytes(cubin)
        for tool in disassemblers():
            text, failure = _run(tool, image)
            if failure is None:
                return text
            failures.append(f"{tool}: {failure}")
    if not failures:
        raise DisassemblerNotFoundError(f"no nvdisasm or cuobjdump was found; {REMEDY}")
    raise ToolchainError(
        f"cubin: no disassembler on this machine can read these {len(cubin)} bytes "
        f"({'; '.join(failures)}); expected a cubin, and a tool no older than the NVRTC that "
        f"made it; {REMEDY}"
    )


def disassemblers() -> list[Path]:
    """Return every nvdisasm and cuobjdump on this machine, the one to try first at the front."""
    found: dict[Path, None] = {}
    for folder in _folders():
        for name in _TOOLS:
            if path := shutil.which(name, path=str(folder)):
                found[Path(path)] = None
    return list(found)


def _folders() -> Iterator[Path]:
    yield from (Path(entry) for entry in os.get_exec_path() if entry)
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(variable):
            yield Path(home, "bin")
    for package in _package_folders("nvidia"):
        # nvidia/cu13/bin in the wheels for CUDA 13, nvidia/cuda_nvdisasm/bin in those before.
        yield from sorted(package.glob("*/bin"))
    for package in _package_folders("triton"):
        yield package / "backends" / "nvidia" / "bin"


def _package_folders(name: str) -> list[Path]:
    """Return the folders of an installed package, without importing it."""
    spec = importlib.util.find_spec(name)
    return [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []


def _run(tool: Path, image: Path) -> tuple[str, str | None]:
    """Return (SASS, None), or ("", why the tool failed)."""
    options = _TOOLS[tool.name.removesuffix(".exe")]
    try:
        done = subprocess.run(
            [tool, *options, image],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    if done.returncode != 0 or not done.stdout.strip():
        said = " ".join((done.stderr or done.stdout).split())
        return "", said or f"exit status {done.returncode} and no output"
    return done.stdout, None
