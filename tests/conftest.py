"""What every test relies on: nothing of the user's is touched, and a missing tool is not a pass."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

_REQUIRE_COMPILER = "JITCONV_REQUIRE_COMPILER"
_REQUIREMENTS = {_REQUIRE_COMPILER, "JITCONV_REQUIRE_GPU"}


def _isolate() -> Path:
    """Point jitconv at an empty store and drop the settings of the person who runs the tests."""
    for name in list(os.environ):
        if name.startswith("JITCONV_") and name not in _REQUIREMENTS:
            del os.environ[name]
    # One store per xdist worker: tests clear and damage it.
    directory = Path(tempfile.mkdtemp(prefix="jitconv-tests-"))
    os.environ["JITCONV_CACHE_DIR"] = str(directory)
    return directory


def _limit_threads() -> None:
    """One compute thread per xdist worker: torch would start one per core in each of them."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ.setdefault("OMP_NUM_THREADS", "1")


# At import, before a test module can import torch or jitconv.
_CACHE_DIRECTORY = _isolate()
_limit_threads()


def pytest_unconfigure() -> None:
    shutil.rmtree(_CACHE_DIRECTORY, ignore_errors=True)


def _missing_compiler() -> str | None:
    """Why generated kernels cannot be built for the CPU here, or None when they can."""
    # Imported late, so that jitconv sees the environment as _isolate() leaves it.
    from jitconv.emulate import compiler
    from jitconv.errors import EmulatorUnavailableError

    try:
        compiler()
    except EmulatorUnavailableError as error:
        return str(error)
    return None


def pytest_configure() -> None:
    if os.environ.get(_REQUIRE_COMPILER) != "1":
        return
    missing = _missing_compiler()
    if missing is not None:
        raise pytest.UsageError(
            f"{missing}. Or unset {_REQUIRE_COMPILER} to skip the tests that run generated kernels."
        )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The longest first: at the end no worker waits for another one's.
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    needing = [item for item in items if item.get_closest_marker("compiler")]
    missing = _missing_compiler() if needing else None
    if missing is not None:
        for item in needing:
            item.add_marker(pytest.mark.skip(reason=missing))
