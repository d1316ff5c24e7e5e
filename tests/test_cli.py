"""The command as a whole: help, exit codes, the store's own commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from jitconv import __version__
from jitconv.cli import main
from jitconv.store import Entry, Store

ROOT = Path(__file__).resolve().parent.parent


def run(*arguments: str, answer: str | None = None) -> Result:
    return CliRunner().invoke(main, arguments, input=answer)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "store"
    monkeypatch.setenv("JITCONV_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def filled(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store of two kernels, the second one newer, and one program of the emulator."""
    with Store.open(strict=True) as store:
        for i, (key, arch) in enumerate([("a" * 64, "sm_80"), ("b" * 64, "sm_90a")]):
            metadata = {"name": f"kernel_{i}", "arch": arch, "registers": 40 + i, "compile_ms": 12.0}
            monkeypatch.setattr("time.time", lambda i=i: 1.7e9 + 60 * i)
            store.put(key, Entry(cubin=b"\x7fELF" + bytes(2000), source="// source", metadata=metadata))
    (directory / "emulator").mkdir()
    (directory / "emulator" / "program").write_bytes(bytes(3 * 1024))
    return directory


# ---- help, version, start-up ----------------------------------------------------------------------


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, command in group.commands.items():
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


@pytest.mark.parametrize("path", [path for path, _ in commands(main)], ids=" ".join)
def test_every_command_and_every_option_is_explained(path: tuple[str, ...]) -> None:
    done = run(*path, "--help")
    assert done.exit_code == 0
    command = dict(commands(main))[path]
    assert command.help
    assert all(option.help for option in command.params if isinstance(option, click.Option))


def test_help_names_the_environment_variables_that_the_library_reads() -> None:
    text = "".join(file.read_text() for file in (ROOT / "jitconv").rglob("*.py") if file.name != "cli.py")
    assert set(re.findall(r"JITCONV_CACHE_\w+", text)) == set(re.findall(r"JITCONV_\w+", run("--help").stdout))


def test_version() -> None:
    assert run("--version").stdout == f"jitconv {__version__}\n"


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["warm", "--help"], ["cache", "path"]], ids=" ".join)
def test_answers_that_need_no_torch_do_not_wait_for_it(arguments: list[str], tmp_path: Path) -> None:
    script = f"""
import sys
from jitconv.cli import main
try:
    main({arguments!r})
except SystemExit:
    pass
print(sorted({{"torch", "rich", "cuda", "diskcache"}} & sys.modules.keys()))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": str(ROOT), "JITCONV_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "[]"


# ---- the store ------------------------------------------------------------------------------------


def test_path_prints_the_directory_and_creates_nothing(directory: Path) -> None:
    assert run("cache", "path").stdout == f"{directory}\n"
    assert not directory.exists()


def test_ls_lists_the_newest_first_with_what_is_known(filled: Path) -> None:
    lines = run("cache", "ls").stdout.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["b" * 12, "a" * 12]
    assert all(word in lines[1] for word in ("sm_90a", "kernel_1", "41", "12 ms", "2.1 KiB"))


def test_ls_of_an_empty_store_says_how_to_fill_it(directory: Path) -> None:
    done = run("cache", "ls")
    assert done.exit_code == 0
    assert "jitconv warm" in done.stdout


def test_ls_shows_entries_of_a_version_that_said_less(directory: Path) -> None:
    with Store.open(strict=True) as store:
        store.put("c" * 64, Entry(cubin=b"\x7fELF", source="", metadata={"compile_ms": "soon"}))
    done = run("cache", "ls")
    assert done.exit_code == 0, done.output
    assert "c" * 12 in done.stdout


def test_info_counts_kernels_and_programs(filled: Path) -> None:
    text = run("cache", "info").stdout
    assert str(filled) in text
    assert re.search(r"kernels +2\n", text)
    assert "of 1.0 GiB (JITCONV_CACHE_SIZE)" in text
    assert "3.0 KiB of programs" in text


def test_clear_asks_first(filled: Path) -> None:
    done = run("cache", "clear", answer="n\n")
    assert done.exit_code == 1
    assert "2 kernels" in done.stdout
    assert len(Store.open().keys()) == 2
    assert run("cache", "clear", answer="y\n").exit_code == 0
    assert Store.open().keys() == []


def test_clear_yes_removes_kernels_and_programs_without_asking(filled: Path) -> None:
    done = run("cache", "clear", "--yes")
    assert done.exit_code == 0
    assert "removed 2 kernels" in done.stdout
    assert not (filled / "emulator").exists()
    assert Store.open().keys() == []


@pytest.mark.parametrize("command", [("ls",), ("info",), ("clear", "--yes")], ids=" ".join)
def test_a_directory_that_others_can_write_is_refused(command: tuple[str, ...], filled: Path) -> None:
    filled.chmod(0o777)
    done = run("cache", *command)
    assert done.exit_code == 1
    assert str(filled) in done.stderr
    assert "JITCONV_CACHE_DIR" in done.stderr
    assert "Traceback" not in done.output
    assert (filled / "emulator" / "program").exists()


def test_a_size_limit_that_is_no_size_is_named(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITCONV_CACHE_SIZE", "plenty")
    done = run("cache", "info")
    assert done.exit_code == 1
    assert "JITCONV_CACHE_SIZE" in done.stderr
    assert "'plenty'" in done.stderr
