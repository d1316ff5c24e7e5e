"""Tests in this folder run on a CUDA device, one after another."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The hook receives the whole session's tests, not only those below this file.
    ours = [item for item in items if _HERE in item.path.parents]
    for item in ours:
        item.add_marker(pytest.mark.gpu)
        # One xdist worker for all: some tests need most of the memory of the device.
        item.add_marker(pytest.mark.xdist_group("gpu"))
    required = os.environ.get("JITCONV_REQUIRE_GPU") == "1"
    if ours and required and not torch.cuda.is_available():
        raise pytest.UsageError("JITCONV_REQUIRE_GPU=1 and torch.cuda.is_available() is False")


@pytest.fixture(autouse=True, scope="session")
def _skip_without_device() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device: torch.cuda.is_available() is False")
