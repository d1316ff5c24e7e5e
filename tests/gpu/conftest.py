"""Tests in this folder run on a CUDA device, one after another."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The hook receives the whole session's tests, not only those below this file.
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            # One xdist worker for all: some tests need most of the memory of the device.
            item.add_marker(pytest.mark.xdist_group("gpu"))


@pytest.fixture(autouse=True, scope="session")
def _require_device() -> None:
    if torch.cuda.is_available():
        return
    if os.environ.get("JITCONV_REQUIRE_GPU") == "1":
        pytest.fail("JITCONV_REQUIRE_GPU=1 and torch.cuda.is_available() is False")
    pytest.skip("no CUDA device: torch.cuda.is_available() is False")
