"""``import jitconv`` is cheap and harmless: no CUDA, no surprise, whatever the machine has."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import jitconv

ROOT = Path(__file__).resolve().parent.parent

# What a caller writes first. The second resolves every public name, so that laziness does not hide
# a cost or a CUDA library behind the first attribute access.
IMPORTS = {
    "package": "import jitconv",
    "every_name": "import jitconv; [getattr(jitconv, name) for name in jitconv.__all__]",
}
imports = pytest.mark.parametrize("statement", IMPORTS.values(), ids=IMPORTS.keys())


def run_python(script: str) -> str:
    """Run ``script`` in a fresh interpreter that finds this checkout, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@imports
def test_import_loads_no_cuda_library_that_torch_did_not(statement: str) -> None:
    report = json.loads(
        run_python(f"""
import json, re, sys
import torch

def cuda_state():
    with open("/proc/self/maps") as maps:
        libraries = set(re.findall(r"/\\S*/(lib(?:cu|nv)\\w*)\\S*\\.so", maps.read()))
    return libraries | {{name for name in sys.modules if name.split(".")[0] == "cuda"}}

before = cuda_state()
{statement}
print(json.dumps({{
    "added": sorted(cuda_state() - before),
    "initialized": torch.cuda.is_initialized(),
}}))
""")
    )
    assert report == {"added": [], "initialized": False}


# Every name together takes about 100 ms, and half as much again where another process shares the core.
@pytest.mark.parametrize(
    ("statement", "limit"), list(zip(IMPORTS.values(), (0.150, 0.250), strict=True)), ids=IMPORTS.keys()
)
def test_import_adds_less_than_150_ms_to_torch(statement: str, limit: float) -> None:
    # CPU time of a process and a median: a busy machine does not make it longer. Forks of one
    # process that has imported torch, because that takes far longer than what is measured.
    printed = run_python(f"""
import os, time
import torch

for _ in range(3):
    if os.fork() == 0:
        start = time.process_time()
        {statement}
        print(time.process_time() - start, flush=True)
        os._exit(0)
    _, status = os.wait()
    assert status == 0
""")
    seconds = [float(line) for line in printed.splitlines()]
    assert len(seconds) == 3
    assert statistics.median(seconds) < limit


@imports
def test_import_works_without_cuda_python_and_nvrtc(statement: str) -> None:
    run_python(f"""
import sys
import torch  # before the ban: what torch itself imports is not the matter here

class NoCuda:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "cuda":
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, NoCuda())
{statement}
""")


def test_importing_the_package_does_not_import_torch() -> None:
    assert run_python("import sys, jitconv; print('torch' in sys.modules)") == "False\n"


def test_submodules_do_not_take_over_public_names() -> None:
    """``jitconv.stats`` stays a function after ``from jitconv.stats import ...`` anywhere."""
    shadowed = run_python("""
import importlib, pkgutil, types
import jitconv

for module in pkgutil.walk_packages(jitconv.__path__, "jitconv."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
modules = {"epilogue", "errors"}
for name in jitconv.__all__:
    if isinstance(getattr(jitconv, name), types.ModuleType) != (name in modules):
        print(name)
""")
    assert shadowed == ""


def test_dir_lists_names_that_are_not_loaded_yet() -> None:
    listed = run_python("import jitconv; print(*dir(jitconv))").split()
    assert set(jitconv.__all__) <= set(listed)


def test_unknown_name_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="'jitconv' has no attribute 'conv4d'"):
        jitconv.conv4d  # noqa: B018
