"""The examples run, and what they print is true."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import jitconv
from jitconv import epilogue as E
from jitconv import program
from jitconv.calls import call_of
from jitconv.manifest import load
from tests.strategies import run_emulated

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"


def run(name: str, directory: Path) -> str:
    # Without a GPU, so that the output is the same on every machine.
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JITCONV_CACHE_DIR": str(directory),
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_custom_step_runs_and_shows_its_expression(tmp_path: Path) -> None:
    text = run("custom_step.py", tmp_path)
    assert "served by torch" in text
    assert "v = snake_of(v, alpha);" in text
    error = float(text.split("float64: ")[1].split()[0])
    assert error < 1e-6


@pytest.mark.compiler
def test_custom_step_computes_the_same_in_the_generated_kernel() -> None:
    """The two halves of a registered step, CUDA and torch, must be the same function."""
    snake = module("custom_step").snake
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 4, 40), torch.randn(4, 4, 7), torch.randn(4)
    alpha = torch.rand(4) + 0.5

    def arguments(*tensors: torch.Tensor) -> dict[str, object]:
        x, alpha = tensors
        return {"padding": ((6, 0),), "epilogue": [snake(alpha), E.add(x)]}

    out = run_emulated(call_of(jitconv.conv1d, x, weight, bias, precision="ieee", **arguments(x, alpha)))
    double = x.double()
    expected = jitconv.conv1d(double, weight.double(), bias.double(), **arguments(double, alpha.double()))
    assert (out - expected).norm() / expected.norm() < 1e-6


def test_frozen_weights_says_what_it_does(tmp_path: Path) -> None:
    text = run("frozen_weights.py", tmp_path)
    assert text.count("difference from torch") == 3
    differences = [float(line.rsplit(maxsplit=1)[1]) for line in text.splitlines() if "difference" in line]
    assert max(differences) < 1e-5
    stale, fresh = (float(line.rsplit(maxsplit=1)[1]) for line in text.splitlines() if line.startswith("after "))
    assert fresh < 1e-5 < 0.1 < stale


def test_warm_and_inspect_compiles_once(tmp_path: Path) -> None:
    entries = load(str(EXAMPLES / "decoder.toml")).entries.values()
    kernels = sum(len(program.build(entry.call()).launches) for entry in entries)
    first, second = run("warm_and_inspect.py", tmp_path), run("warm_and_inspect.py", tmp_path)
    assert first.startswith(f"{2 * kernels} kernels compiled, 0 already")
    assert second.startswith(f"0 kernels compiled, {2 * kernels} already")
    assert second.count("on tensor cores") == 2


def test_the_manifest_of_the_examples_is_valid() -> None:
    for entry in load(str(EXAMPLES / "decoder.toml")).entries.values():
        launches = program.build(entry.call(), "sm_80").launches
        assert [step.kernel.family for step in launches] == ["pack_weights", "conv_mma"]


def test_every_example_is_in_the_index() -> None:
    index = (EXAMPLES / "README.md").read_text()
    files = [path.relative_to(EXAMPLES) for path in EXAMPLES.rglob("*") if path.suffix in (".py", ".toml")]
    assert files
    assert [str(path) for path in files if f"`{path}`" not in index] == []
