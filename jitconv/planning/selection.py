"""The tiles in question for a convolution: the heuristic's, those worth measuring, and all that fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any, TypeAlias

from jitconv.families import HaloTile, KernelPlan, Tile, WgmmaTile
from jitconv.planning.budget import misfit
from jitconv.planning.hopper import wgmma_tiles
from jitconv.planning.tensor_cores import choose_halo_tile, halo_tiles
from jitconv.planning.tiles import CANDIDATES, choose_tile
from jitconv.problem import Problem, canonical_json

__all__ = ["FAMILIES", "ConvolutionTile", "candidates", "every_tile", "heuristic_tile", "identity"]

ConvolutionTile: TypeAlias = Tile | HaloTile | WgmmaTile
"""Tile of a convolution's own kernel; its type says the family."""

#: The families of a convolution's own kernel by the type of its tile: the one that packs its weights, and itself
#: (None: the one named after the operator).
FAMILIES = {WgmmaTile: ("pack_planes", "conv_wgmma"), HaloTile: ("pack_weights", "conv_mma"), Tile: (None, None)}

#: Fields that say how deep a tile's rings are, not what it computes: they follow from the others and from what fits.
_RINGS = frozenset({"stages", "units", "raws", "depth"})

#: Most Hopper tiles that are measured for one problem: they are ranked, and the winner is seldom far down.
_MOST_HOPPER = 32

#: Up to so many input channels a group, a product's k is so short, or so empty, that FFMA may be as fast.
_FEW_CHANNELS = 16

#: Widest FFMA tile that is tried where a narrower one is the default: a wider one would spill in some families.
_WIDEST_FFMA = 64


def heuristic_tile(problem: Problem, arch: str) -> ConvolutionTile:
    """The tile that is taken where nothing has been measured: the first of the fastest family that fits."""
    for tile in wgmma_tiles(problem, arch):
        if misfit(_kernel(problem, tile), arch) is None:
            return tile
    return choose_halo_tile(problem, arch) or choose_tile(problem)


def candidates(problem: Problem, arch: str) -> list[ConvolutionTile]:
    """Tiles worth measuring for ``problem`` on ``arch``, the heuristic's own first.

    They differ in more than the depth of their rings, and all of them fit (:mod:`jitconv.planning.budget`).
    """
    hopper = _spread([tile for tile in every_tile(problem, arch) if isinstance(tile, WgmmaTile)])
    found: list[ConvolutionTile] = [*hopper]
    halo = choose_halo_tile(problem, arch)
    if halo is not None:
        # Beside Hopper's own tiles one of the other family is enough.
        others = [tile for tile in every_tile(problem, arch) if isinstance(tile, HaloTile)]
        found += [halo] if hopper else others
    ffma = choose_tile(problem)
    if not found:
        near = range(ffma.channels // 4, min(2 * ffma.channels, max(_WIDEST_FFMA, ffma.channels)) + 1)
        found += [tile for tile in CANDIDATES if tile.channels in near]
    elif problem.in_channels // problem.groups <= _FEW_CHANNELS:
        found.append(ffma)
    first = heuristic_tile(problem, arch)
    return [first, *(tile for tile in found if tile != first)]


def every_tile(problem: Problem, arch: str) -> Iterator[ConvolutionTile]:
    """Every tile that could serve ``problem`` on ``arch`` and fits, each identity once."""
    seen = set()
    for tile in _possible(problem, arch):
        name = identity(tile)
        if name not in seen and misfit(_kernel(problem, tile), arch) is None:
            seen.add(name)
            yield tile


def _possible(problem: Problem, arch: str) -> Iterable[ConvolutionTile]:
    yield from wgmma_tiles(problem, arch)
    yield from halo_tiles(problem, arch)
    widest = max(_WIDEST_FFMA, choose_tile(problem).channels)
    yield from (tile for tile in CANDIDATES if tile.channels <= widest)


def identity(tile: ConvolutionTile) -> str:
    """What tells a tile from others, whatever the depth of its rings: canonical JSON of its type and fields.

    Fields that have their default are left out, so that a name survives a field that is added later.
    """
    # The slices of an FFMA tile are no ring: their depth is the order of its sums.
    rings = frozenset[str]() if isinstance(tile, Tile) else _RINGS
    said: dict[str, Any] = {"type": type(tile).__name__}
    for field in fields(tile):
        value = getattr(tile, field.name)
        if field.name not in rings and value != field.default:
            said[field.name] = value
    return canonical_json(said)


def _kernel(problem: Problem, tile: ConvolutionTile) -> KernelPlan:
    """The convolution's kernel as far as the budget depends on it: as if it wrote a workspace, which takes most."""
    family = FAMILIES[type(tile)][1] or problem.operator
    return KernelPlan(family, problem, tile, 0, 0, problem.dtype, "float32")


def _spread(tiles: list[WgmmaTile]) -> list[WgmmaTile]:
    """At most so many of ``tiles``, in their order: the best of each kind, then the best of the others."""
    best: dict[tuple[bool, int, int, bool, bool, str, str], WgmmaTile] = {}
    for tile in tiles:
        kind = (tile.channel_rows, tile.columns, tile.blocks, tile.march, tile.flat, tile.patches, tile.copies)
        best.setdefault(kind, tile)
    chosen = list(best.values())
    wanted = [*chosen, *(tile for tile in tiles if tile not in chosen)][:_MOST_HOPPER]
    return [tile for tile in tiles if tile in wanted]
