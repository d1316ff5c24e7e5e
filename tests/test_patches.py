"""Products whose patches tensor copies fetch (Hopper family), in the emulator against torch in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from jitconv import program
from jitconv.families import WgmmaTile
from jitconv.planning import plan_with_tile
from jitconv.planning.budget import misfit
from tests.strategies import POINTWISE
from tests.test_hopper import ARCH, Hopper, built, check, choose, made, positions, run, tiles

pytestmark = pytest.mark.compiler


def patches(tile: WgmmaTile) -> bool:
    return tile.patches != ""


S = "stride"

#: How x is fetched, whether channels are rows, and a convolution.
CASES: dict[str, tuple[str, str, bool, Hopper]] = {
    "an image": ("rows", "raw", False, Hopper("tf32", (2, 3, 33, 40), 40, (8, 8), parameters={S: 8})),
    "channels_last": ("rows", "raw", False, Hopper("tf32", (2, 3, 12, 36), 40, (4, 4), "channels_last", parameters={S: 4})),
    "16 bit": ("rows", "raw", False, Hopper("half", (2, 3, 32, 48), 40, (16, 16), parameters={S: 16})),
    "16 bit, straight": ("rows", "direct", False, Hopper("bfloat16", (3, 3, 32, 48), 70, (8, 8), parameters={S: 8})),
    "16 bit, channels_last": ("rows", "direct", False, Hopper("half", (2, 16, 8, 12), 40, (2, 2), "channels_last", parameters={S: 2})),
    "channels are rows": ("rows", "raw", True, Hopper("tf32", (2, 5, 12, 88), 40, (1, 8), parameters={S: (1, 8)})),
    "channels are rows, 16 bit": ("rows", "direct", True, Hopper("half", (2, 5, 12, 88), 40, (1, 8), parameters={S: (1, 8)})),
    "split": ("rows", "raw", False, Hopper("ieee", (2, 5, 12, 40), 40, (4, 4), parameters={S: 4})),
    "split, whole": ("whole", "raw", False, Hopper("ieee", (5, 3, 2, 6, 6), 70, (2, 6, 6), parameters={S: (2, 6, 6)})),
    "whole": ("whole", "raw", False, Hopper("tf32", (130, 3, 2, 4, 5), 70, (2, 4, 5))),
    "whole, channels_last": ("whole", "raw", False, Hopper("tf32", (5, 3, 4, 6), 70, (4, 6), "channels_last")),
    "whole, 16 bit": ("whole", "raw", False, Hopper("bfloat16", (130, 3, 2, 4, 5), 70, (2, 4, 5), bias=False)),
    "whole, straight": ("whole", "direct", False, Hopper("half", (5, 3, 2, 4, 5), 150, (2, 4, 5))),
    "one position": ("whole", "direct", False, Hopper("half", (9, 24, 1, 1), 40, (1, 1))),
    "3d with gaps": (
        "rows", "raw", False,
        Hopper("tf32", (2, 3, 7, 13, 28), 33, (2, 3, 4), parameters={S: (3, 6, 8), "dilation": (2, 2, 1)})),
    "groups": ("rows", "raw", False, Hopper("tf32", (2, 6, 8, 12), 70, (4, 4), parameters={S: 4, "groups": 2})),
    "1d": ("rows", "direct", False, Hopper("half", (2, 6, 1000), 40, (8,), parameters={S: 8})),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_patch_is_wrong(name: str) -> None:
    how, copies, rows, hopper = CASES[name]
    case = hopper.case([POINTWISE["silu"]()])

    def wanted(tile: WgmmaTile) -> bool:
        return tile.patches == how and tile.copies == copies and tile.channel_rows == rows

    check(case, hopper.kind, choose(made(case, hopper.kind), wanted))
