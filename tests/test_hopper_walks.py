"""Flat tiles, marches along d and grouped outputs of the Hopper family, in the emulator against torch in float64."""

from __future__ import annotations

import pytest
import torch

from jitconv import program
from jitconv.families import WgmmaTile
from jitconv.planning import plan_with_tile
from jitconv.planning.budget import misfit
from jitconv.planning.hopper import wgmma_tiles
from tests.test_hopper import ARCH, Hopper, check, choose, made, run, tiles

pytestmark = pytest.mark.compiler


def flat(tile: WgmmaTile) -> bool:
    return tile.flat


def march(tile: WgmmaTile) -> bool:
    return tile.march


PRODUCTS = {
    "1x1": Hopper("tf32", (3, 24, 7, 9), 40, (1, 1)),
    "1x1 strided": Hopper("half", (5, 24, 7, 9), 40, (1, 1), parameters={"stride": (2, 3)}),
    "patches of channels_first": Hopper("tf32", (3, 3, 2, 21, 14), 70, (2, 7, 7), parameters={"stride": (2, 7, 7)}),
    "patches of channels_last": Hopper("half", (3, 16, 8, 12), 40, (2, 2), "channels_last", parameters={"stride": 2}),
    "few channels, channels_last": Hopper("tf32", (3, 3, 8, 12), 40, (4, 4), "channels_last", parameters={"stride": 4}),
    "gaps between patches": Hopper("bfloat16", (2, 5, 40), 33, (3,), parameters={"stride": 9, "dilation": 2}),
    "groups": Hopper("tf32", (3, 12, 8, 12), 40, (2, 2), parameters={"stride": 2, "groups": 2}),
    "fp32": Hopper("ieee", (3, 20, 9, 15), 40, (3, 3), parameters={"stride": 3}),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_matrix_product_over_all_positions_is_wrong(name: str) -> None:
    hopper = PRODUCTS[name]
    case = hopper.case()
    check(case, hopper.kind, choose(made(case, hopper.kind), flat))


def test_a_flat_tile_ignores_padding() -> None:
    padded = made(Hopper("tf32", (3, 24, 7, 9), 40, (1, 1), parameters={"padding": 1}).case(), "tf32")
    overlapping = made(Hopper("tf32", (3, 24, 7, 9), 40, (3, 3), parameters={"stride": 2}).case(), "tf32")
    for call in (padded, overlapping):
        assert not any(tile.flat for tile in tiles(call))


def test_a_sample_of_a_flat_tile_depends_on_its_batch() -> None:
    hopper = Hopper("tf32", (5, 24, 7, 9), 40, (1, 1))
    case = hopper.case()
    call, one = made(case, "tf32"), made(hopper.case(x=case.x[3:4]), "tf32")
    assert torch.equal(run(call, choose(call, flat))[3:4], run(one, choose(one, flat)))


MARCHES = {
    "raw boxes": Hopper("tf32", (2, 20, 7, 10, 12), 33, (3, 3, 3), parameters={"padding": 1}),
    "loads": Hopper("tf32", (2, 20, 7, 10, 11), 33, (2, 3, 1), parameters={"padding": (1, 0, 1)}),
    "tensor copies": Hopper("half", (2, 24, 9, 10, 12), 40, (3, 3, 3), "channels_last", parameters={"padding": 1}),
    "fp32": Hopper("ieee", (1, 20, 6, 10, 12), 33, (3, 1, 2)),
    "strides along the plane": Hopper("tf32", (2, 8, 7, 10, 12), 33, (3, 3, 3), parameters={"stride": (1, 2, 3)}),
}


@pytest.mark.parametrize("name", MARCHES)
def test_a_march_loses_a_plane(name: str) -> None:
    hopper = MARCHES[name]
    case = hopper.case()
    check(case, hopper.kind, choose(made(case, hopper.kind), march))


def test_a_march_skips_planes_that_no_output_shares() -> None:
    for parameters in ({"stride": (2, 1, 1)}, {"dilation": (2, 1, 1)}):
        call = made(Hopper("tf32", (2, 20, 7, 10, 12), 33, (3, 3, 3), parameters=parameters).case(), "tf32")
        assert not any(tile.march for tile in wgmma_tiles(program.build(call, ARCH).problem, ARCH))


# The channels of the second group start at a multiple of 4, not of the 8 that a thread holds side by side.
@pytest.mark.parametrize("kind", ["half", "tf32"])
def test_channels_of_a_group_are_stored_as_an_unaligned_vector(kind: str) -> None:
    hopper = Hopper(kind, (2, 16, 6, 9), 40, (3, 3), "channels_last", parameters={"groups": 2})
    case = hopper.case()
    check(case, kind, choose(made(case, kind), lambda tile: tile.permuted))


def test_a_tile_that_does_not_fit_is_offered() -> None:
    problems = [hopper.case() for hopper in (*PRODUCTS.values(), *MARCHES.values())]
    kinds = [hopper.kind for hopper in (*PRODUCTS.values(), *MARCHES.values())]
    for case, kind in zip(problems, kinds, strict=True):
        problem = program.build(made(case, kind), ARCH).problem
        for tile in wgmma_tiles(problem, ARCH):
            kernel = plan_with_tile(problem, tile).kernels[-1]
            assert misfit(kernel, ARCH) is None, tile
