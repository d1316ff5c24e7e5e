"""Products whose patches tensor copies fetch (Hopper family), in the emulator against torch in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from jitconv import emulate, program
from jitconv import epilogue as E
from jitconv.families import WgmmaTile
from jitconv.functional import convolution_call
from jitconv.planning import plan_with_tile
from jitconv.planning.budget import misfit
from jitconv.planning.hopper import wgmma_tiles
from jitconv.render import render
from tests.kernels.mutation import mutations
from tests.strategies import POINTWISE, Case
from tests.test_hopper import (
    ARCH,
    KINDS,
    Hopper,
    assert_runs_as_planned,
    built,
    check,
    choose,
    compiled,
    made,
    mutated,
    noticed,
    positions,
    run,
    tiles,
)

pytestmark = pytest.mark.compiler


def patches(tile: WgmmaTile) -> bool:
    return tile.patches != ""


S = "stride"

#: How x is fetched (C: by tiles whose rows are channels), and a convolution.
CASES: dict[str, tuple[str, Hopper]] = {
    "an image": ("rows raw", Hopper("tf32", (2, 3, 33, 40), 40, (8, 8), parameters={S: 8})),
    "channels_last": ("rows raw", Hopper("tf32", (2, 3, 12, 36), 40, (4, 4), "channels_last", parameters={S: 4})),
    "16 bit": ("rows raw", Hopper("half", (2, 3, 32, 48), 40, (16, 16), parameters={S: 16})),
    "16 bit, straight": ("rows direct", Hopper("bfloat16", (3, 3, 32, 48), 70, (8, 8), parameters={S: 8})),
    "16 bit, channels_last": (
        "rows direct", Hopper("half", (2, 16, 8, 12), 40, (2, 2), "channels_last", parameters={S: 2})),
    "channels are rows": ("rows raw C", Hopper("tf32", (2, 5, 12, 88), 40, (1, 8), parameters={S: (1, 8)})),
    "channels are rows, 16 bit": ("rows direct C", Hopper("half", (2, 5, 12, 88), 40, (1, 8), parameters={S: (1, 8)})),
    "split": ("rows raw", Hopper("ieee", (2, 5, 12, 40), 40, (4, 4), parameters={S: 4})),
    "split, whole": ("matrix raw", Hopper("ieee", (5, 3, 2, 6, 6), 70, (2, 6, 6), parameters={S: (2, 6, 6)})),
    "whole": ("matrix raw", Hopper("tf32", (130, 3, 2, 4, 5), 70, (2, 4, 5))),
    "whole, channels_last": ("matrix raw", Hopper("tf32", (5, 3, 4, 6), 70, (4, 6), "channels_last")),
    "whole, 16 bit": ("matrix raw", Hopper("bfloat16", (130, 3, 2, 4, 5), 70, (2, 4, 5), bias=False)),
    "whole, straight": ("matrix direct", Hopper("half", (5, 3, 2, 4, 5), 150, (2, 4, 5))),
    "an image of one pixel": ("matrix direct", Hopper("half", (9, 24, 1, 1), 40, (1, 1))),
    "pixels": ("matrix direct", Hopper("bfloat16", (3, 24, 7, 9), 40, (1, 1), "channels_last")),
    "pixels, split": ("matrix raw", Hopper("ieee", (3, 12, 7, 9), 40, (1, 1), "channels_last")),
    "3d with gaps": (
        "rows raw", Hopper("tf32", (2, 3, 7, 13, 28), 33, (2, 3, 4), parameters={S: (3, 6, 8), "dilation": (2, 2, 1)})),
    "lines": ("lines raw", Hopper("tf32", (2, 3, 30, 40), 40, (7, 7), parameters={S: 7})),
    "lines of 16 bit": ("lines raw", Hopper("half", (2, 3, 30, 56), 40, (14, 14), parameters={S: 14})),
    "lines of channels": (
        "lines raw", Hopper("tf32", (2, 3, 28, 44), 40, (14, 14), "channels_last", parameters={S: 14})),
    "lines of channels, 16 bit": (
        "lines raw", Hopper("bfloat16", (2, 3, 28, 72), 40, (14, 14), "channels_last", parameters={S: 14})),
    "lines, split": ("lines raw", Hopper("ieee", (2, 3, 28, 44), 40, (14, 14), parameters={S: 14})),
    "lines with gaps": (
        "lines raw C", Hopper("half", (2, 5, 28, 88), 40, (4, 5), parameters={S: (7, 6), "dilation": (2, 1)})),
    "lines, 1d": ("lines raw", Hopper("bfloat16", (2, 6, 1000), 40, (9,), parameters={S: 9})),
    "groups": ("rows raw", Hopper("tf32", (2, 6, 8, 12), 70, (4, 4), parameters={S: 4, "groups": 2})),
    "1d": ("rows direct", Hopper("half", (2, 6, 1000), 40, (8,), parameters={S: 8})),
}  # fmt: skip


#: What other cases show in part.
MORE = {
    "an image of one pixel", "whole, 16 bit", "whole, channels_last", "split", "16 bit", "channels are rows, 16 bit",
    "channels_last", "pixels", "lines of channels", "lines, split", "whole",
}  # fmt: skip
assert set(CASES) > MORE


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.exhaustive] if name in MORE else []) for name in CASES]
)
def test_a_patch_is_wrong(name: str) -> None:
    how, hopper = CASES[name]
    case = hopper.case([POINTWISE["silu"]()])

    def wanted(tile: WgmmaTile) -> bool:
        return f"{tile.patches} {tile.copies}" + " C" * tile.channel_rows == how

    check(case, hopper.kind, choose(made(case, hopper.kind), wanted))


@pytest.mark.parametrize("kind", ["tf32"])
def test_what_lies_beyond_the_patches_is_taken_in(kind: str) -> None:
    # Columns and rows that fill no patch, of a view into a larger image: nan there must go nowhere.
    hopper = Hopper(kind, (2, 3, 29, 44), 40, (8, 8), parameters={S: 8})
    large = torch.full((3, 4, 40, 64), math.nan, dtype=hopper.case().x.dtype)
    large[:2, :3, 2:31, 8:52] = hopper.case().x
    x = large[:2, :3, 2:31, 8:52]
    x[:, :, 24:] = x[..., 40:] = math.nan
    case = hopper.case(x=x)
    tile = choose(made(case, kind), lambda tile: patches(tile) and tile.copies == "raw")
    assert not check(case, kind, tile).isnan().any()


def test_the_end_of_the_reduction_is_taken_in() -> None:
    # 5 rows of 4: the last chunk ends behind them, where the next group of channels lies.
    hopper = Hopper("tf32", (2, 10, 4, 8), 40, (1, 4), parameters={S: (1, 4), "groups": 2})
    x = hopper.case().x
    x[:, 5:] = math.nan
    case = hopper.case(x=x)
    y = run(made(case, "tf32"), choose(made(case, "tf32"), patches))
    assert not y[:, :20].isnan().any()
    assert y[:, 20:].isnan().all()


@pytest.mark.parametrize(
    "hopper",
    [
        Hopper("tf32", (5, 3, 2, 4, 5), 70, (2, 4, 5), parameters={S: (2, 4, 5)}),
        Hopper("ieee", (5, 3, 16, 24), 70, (4, 4), parameters={S: 4}),
    ],
    ids=["matrix", "rows"],
)
def test_a_sample_depends_on_its_batch(hopper: Hopper) -> None:
    case = hopper.case()
    one = made(hopper.case(x=case.x[3:4]), hopper.kind)
    every = made(case, hopper.kind)
    assert torch.equal(run(every, choose(every, patches))[3:4], run(one, choose(one, patches)))


@pytest.mark.parametrize("value", [math.inf, 1e-42])
@pytest.mark.parametrize(
    "hopper",
    [
        Hopper("ieee", (5, 3, 2, 4, 5), 70, (2, 4, 5), bias=False, parameters={S: (2, 4, 5)}),
        Hopper("ieee", (5, 3, 8, 24), 70, (4, 4), bias=False, parameters={S: 4}),
    ],
    ids=["matrix", "rows"],
)
def test_a_value_that_does_not_split_is_wrong_or_reaches_another_sample(hopper: Hopper, value: float) -> None:
    case = hopper.case()
    call = made(case, "ieee")
    clean = run(call, choose(call, patches))
    x = case.x.clone()
    x[2] *= 1e-30
    x[2].view(-1)[-1] = value
    dirty = replace(case, x=x)
    y = run(made(dirty, "ieee"), choose(call, patches))
    others = torch.arange(5) != 2
    assert torch.equal(y[others], clean[others])
    expected = dirty.expected()
    scale = replace(dirty, x=x.abs(), weights=(case.weights[0].abs(),)).expected()
    finite = expected.isfinite() & (scale < 3e38)
    assert torch.equal(y.isfinite(), finite)
    assert ((y.double() - expected).abs()[finite] <= 1e-6 * scale[finite] + 120 * 2.0**-149).all()


#: Which patches x has, by its shape, the filter's and the parameters.
FOUND: dict[str, tuple[str, tuple[int, ...], tuple[int, ...], dict[str, Any], str, str]] = {
    "an image": ("rows", (2, 3, 32, 32), (8, 8), {S: 8}, "contiguous", "float32"),
    "columns that are no vectors": ("lines", (2, 3, 28, 28), (7, 7), {S: 7}, "contiguous", "float32"),
    "rows that are no vectors": ("", (2, 3, 32, 34), (8, 8), {S: 8}, "contiguous", "bfloat16"),
    "channels_last": ("rows", (2, 3, 32, 32), (8, 8), {S: 8}, "channels_last", "float32"),
    "groups of channels side by side": ("", (2, 8, 32, 32), (8, 8), {S: 8, "groups": 2}, "channels_last", "float32"),
    "groups": ("rows", (2, 8, 32, 32), (8, 8), {S: 8, "groups": 2}, "contiguous", "float32"),
    "padding": ("", (2, 3, 30, 30), (8, 8), {S: 8, "padding": 1}, "contiguous", "float32"),
    "overlap": ("", (2, 3, 32, 32), (8, 8), {S: 4}, "contiguous", "float32"),
    "gaps": ("rows", (2, 3, 32, 32), (8, 4), {S: 8, "dilation": (1, 1)}, "contiguous", "float32"),
    "gaps between columns": ("", (2, 3, 32, 32), (8, 4), {S: 8, "dilation": (1, 2)}, "contiguous", "float32"),
    "gaps between rows": ("rows", (2, 3, 32, 32), (4, 8), {S: 8, "dilation": (2, 1)}, "contiguous", "float32"),
    "a filter as large as x": ("matrix", (2, 3, 7, 4), (7, 4), {}, "contiguous", "float32"),
    "with channels inside": ("matrix", (2, 3, 7, 4), (7, 4), {}, "channels_last", "float32"),
    "of no whole vectors": ("", (2, 3, 7, 3), (7, 3), {}, "contiguous", "float32"),
    "padded": ("", (2, 4, 7, 4), (7, 4), {"padding": 1}, "contiguous", "float32"),
    "in groups": ("", (2, 4, 7, 4), (7, 4), {"groups": 2}, "contiguous", "float32"),
    "of every second column": ("", (2, 4, 7, 4), (7, 4), {}, "sliced", "float32"),
    "of one sample for all": ("", (2, 4, 7, 4), (7, 4), {}, "expanded", "float32"),
    "pixels": ("matrix", (2, 8, 7, 5), (1, 1), {}, "channels_last", "bfloat16"),
    "every second pixel": ("", (2, 8, 7, 5), (1, 1), {S: 2}, "channels_last", "bfloat16"),
    "rows of pixels": ("", (2, 8, 7, 5), (1, 1), {}, "contiguous", "bfloat16"),
    "1d": ("rows", (2, 4, 32), (8,), {S: 8}, "contiguous", "float32"),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_patches_are_taken_for_what_they_are_not(name: str) -> None:
    expected, x, kernel, parameters, layout, dtype = FOUND[name]
    kind = {"float32": "tf32", "bfloat16": "bfloat16"}[dtype]
    call = made(Hopper(kind, x, 16, kernel, layout, parameters=parameters).case(), kind)
    problem = program.build(call, ARCH).problem
    assert problem.x_patches == expected
    assert program.build(call, "sm_80").problem.x_patches == ""
    assert any(tile.patches for tile in tiles(call)) == (expected != "")


@pytest.mark.parametrize("name", ["unaligned", "a slice of channels", "a slice of rows"])
def test_a_view_is_taken_for_a_matrix(name: str) -> None:
    large = torch.zeros(2, 16, 7, 6).contiguous(memory_format=torch.channels_last)
    view, expected = {
        "unaligned": (large[:, 1:9], ""),
        "a slice of channels": (large[:, 4:12], "matrix"),
        "a slice of rows": (large[:, :, 1:5], ""),
    }[name]
    call = made(Hopper("tf32", tuple(view.shape), 16, (1, 1)).case(x=view), "tf32")
    assert program.build(call, ARCH).problem.x_patches == expected
    if expected:
        view.copy_(torch.randn(view.shape))
        case = Hopper("tf32", tuple(view.shape), 16, (1, 1)).case(x=view)
        check(case, "tf32", choose(made(case, "tf32"), patches))


def test_offsets_beyond_32_bits_are_fetched_by_copies() -> None:
    call = made(Hopper("tf32", (2, 3, 32, 32), 16, (8, 8), parameters={S: 8}).case(), "tf32")
    problem = replace(program.build(call, ARCH).problem, index_bits=64)
    assert not any(tile.patches for tile in wgmma_tiles(problem, ARCH))


def test_a_tile_of_patches_that_does_not_fit_is_offered() -> None:
    for _, hopper in CASES.values():
        problem = program.build(made(hopper.case(), hopper.kind), ARCH).problem
        for tile in wgmma_tiles(problem, ARCH):
            assert misfit(plan_with_tile(problem, tile).kernels[-1], ARCH) is None, tile


#: Several tiles a block, rings shorter than the units and stages of a tile.
WAITING: dict[str, Hopper] = {
    "matrix": Hopper("ieee", (400, 3, 2, 4, 5), 20, (2, 4, 5), parameters={S: (2, 4, 5)}),
    "rows": Hopper("tf32", (3, 3, 36, 144), 20, (4, 16), parameters={S: (4, 16)}),
    "straight": Hopper("half", (3, 3, 36, 144), 20, (4, 16), parameters={S: (4, 16)}),
}


def waiting(name: str) -> tuple[Case, str, WgmmaTile]:
    hopper = WAITING[name]
    case = hopper.case()
    call = made(case, hopper.kind)
    fewest = min((t for t in tiles(call) if t.patches and (name != "straight" or t.copies == "direct")), key=positions)
    tile = replace(fewest, stages=2, units=2, raws=min(fewest.raws, 2))
    launch = built(call, tile).launches[1]
    assert launch.grid > launch.blocks(1)
    return case, hopper.kind, tile


@pytest.mark.parametrize("name", WAITING)
def test_accesses_race(name: str) -> None:
    check(*waiting(name), races=True, schedules=emulate.ALL_SCHEDULES)


@pytest.mark.slow
def test_a_wait_or_fence_is_not_needed() -> None:
    case, kind, tile = waiting("rows")
    call = made(case, kind)
    expected = check(case, kind, tile)
    kernel = render(built(call, tile).launches[1].kernel)
    survived = {
        mutation.statement
        for mutation in mutations(kernel.source)
        if not noticed(call, tile, mutated(kernel, None, mutation.text), expected)
    }
    assert survived == set()


@pytest.mark.parametrize("kind", ["tf32", "ieee", "half"])
def test_ptxas_spills_or_serialises(kind: str) -> None:
    for shape, kernel in (((64, 3, 224, 224), (16, 16)), ((64, 3, 2, 14, 14), (2, 14, 14))):
        x = torch.empty(shape, device="meta", dtype=KINDS[kind][0])
        weight, bias = x.new_empty(768, 3, *kernel), x.new_empty(768)
        call = convolution_call(
            f"conv{len(kernel)}d", len(kernel), False, x, weight, bias, [E.gelu()], KINDS[kind][1],
            stride=kernel, padding=0, dilation=1, groups=1,
        )[0]  # fmt: skip
        computing = built(call, choose(call, patches)).launches[1].kernel
        found = compiled(computing)
        assert_runs_as_planned(computing, found)
        assert not found.resources.spills, found.resources
