"""compute-sanitizer finds nothing in small problems of every kernel family."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PROBLEMS = 30


def sanitizer() -> str:
    found = shutil.which("compute-sanitizer")
    for root in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if found is None and root is not None:
            found = shutil.which("compute-sanitizer", path=str(Path(root) / "bin"))
    if found is None:
        pytest.skip("compute-sanitizer is not installed (it comes with the CUDA toolkit)")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_no_error_in_generated_kernels(tool: str, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")]),
        # Each tensor an allocation of its own: an access past one is then outside of everything.
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "JITCONV_CACHE_DIR": str(tmp_path),
    }
    command = [
        sanitizer(), "--tool", tool, "--error-exitcode", "9",
        # Libraries probe the driver for functions that it may lack; those answers are not errors of a kernel.
        "--report-api-errors", "no", "--kernel-name", "kernel_substring=jitconv_",
        sys.executable, str(HERE / "small_shapes.py"), str(PROBLEMS), "5",
    ]  # fmt: skip
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=540, check=False)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text[-6000:]
    assert f"{PROBLEMS} problems" in text
    assert "0 wrong" in text
