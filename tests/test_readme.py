"""What the README says can be typed, can be typed; what it says is so, is so."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jitconv.architectures import KNOWN
from jitconv.calls import OPERATORS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")

_BLOCK = re.compile(r"<!-- test: (\w+) -->\n```\w*\n(.*?)\n```", re.DOTALL)


def blocks(kind: str) -> list[str]:
    return [text for found, text in _BLOCK.findall(README) if found == kind]


def environment(tmp_path: Path) -> dict[str, str]:
    """A shell in which ``jitconv`` is this checkout's, and no GPU is seen."""
    binaries = tmp_path / "bin"
    binaries.mkdir()
    command = binaries / "jitconv"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m jitconv "$@"\n')
    command.chmod(0o755)
    return os.environ | {
        "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "JITCONV_CACHE_DIR": str(tmp_path / "store"),
        "CUDA_VISIBLE_DEVICES": "",
    }


def test_blocks_are_found() -> None:
    """A pattern that finds nothing would make the tests below pass for any README."""
    assert len(blocks("python")) == 4
    assert len(blocks("shell")) == 3
    assert len(blocks("demo")) == 1
    marked = README.count("<!-- test: ")
    assert marked == sum(len(blocks(kind)) for kind in ("python", "shell", "demo")) + 1


@pytest.mark.parametrize("code", blocks("python"))
def test_python_blocks_run(code: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize("code", blocks("shell"))
def test_shell_blocks_run(code: str, tmp_path: Path) -> None:
    done = subprocess.run(
        ["/bin/sh", "-e", "-c", code],
        env=environment(tmp_path),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_make_targets_and_extras_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^make (\w+)", README, re.MULTILINE)
    assert targets == ["demo", "test"]
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
    extras = set(re.findall(r"pip install '\.\[(\w+)\]'", README))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert extras == {"cu12", "cu13"}
    assert extras <= set(project["optional-dependencies"])


def test_links_and_files_exist() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
    sketch = README.split("## How it works")[1]
    modules = re.findall(r"^(\w+(?:\.py|/))  ", sketch, re.MULTILINE)
    assert len(modules) >= 8
    assert [module for module in modules if not (ROOT / "jitconv" / module).exists()] == []


def test_every_environment_variable_is_in_the_table() -> None:
    text = "".join(path.read_text() for path in (ROOT / "jitconv").rglob("*.py"))
    table = README.split("## Environment")[1].split("##")[0]
    assert set(re.findall(r"`(JITCONV_\w+)`", table)) == set(re.findall(r"JITCONV_CACHE_\w+", text))


def test_operators_and_architectures_are_those_of_the_library() -> None:
    assert all(f"`{name}`" in README for name in OPERATORS)
    assert ", ".join(KNOWN) in README.replace("\n", " ")


def test_numbers_in_the_table_are_those_that_the_demo_printed() -> None:
    printed = (ROOT / "examples" / "performance" / "demo.txt").read_text().split("2. run at full size")[1]
    times = [f"{who} {at}" for at in ("TF32", "fp32") for who in ("jitconv", "torch.compile", "eager")]
    errors = [f"{who} {at}" for at in ("TF32", "fp32") for who in ("jitconv", "eager")]
    table = README.split("<!-- test: headline table -->\n")[1].split("\n\n")[0].splitlines()[2:]
    runs = printed.split("\nheadline:")[1:]
    assert len(table) == len(runs) == 3
    for line, run in zip(table, runs, strict=True):
        # A line of the demo: name, median, [quantiles], how fast, error; not every operator runs at every setting.
        found = {name: re.search(rf"^{name} +([\d.]+) \[.* (\S+)$", run, re.MULTILINE) for name in times}
        assert any(found.values())
        medians = [f"{float(match[1]):.2f}" if (match := found[name]) else "–" for name in times]
        measured = [match[2] if (match := found[name]) else "–" for name in errors]
        cells = [cell.strip() for cell in line.strip("|").split("|")][1:]
        assert cells == medians + measured


def test_the_readme_and_the_table_of_layers_disagree() -> None:
    page = (ROOT / "examples" / "performance" / "layers.md").read_text()
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| ")][1:]
    faster = [float(row[-3]) for row in rows]
    mean = math.exp(sum(map(math.log, faster)) / len(faster))
    assert f"in {len(rows)} rows" in README
    assert f"the geometric mean is {mean:.2f} times" in README
    assert sum(speed < 1 for speed in faster) == 6
    assert "six rows are slower" in README
    record = json.loads((ROOT / "examples" / "performance" / "layers.json").read_text())
    frozen = [row["speed-up frozen"] for row in record.values()]
    assert f"and {math.exp(sum(map(math.log, frozen)) / len(frozen)):.2f} with frozen weights" in README
    assert [speed for speed in frozen if speed < 1] == [speed for speed in frozen if 0.93 <= speed < 1]
    assert sum(speed < 1 for speed in frozen) == 3

