"""Weights as the Hopper family multiplies them: templates/pack_planes.cu.j2.

The packed weights are a float32 tensor only in name: 16-byte lines of tf32 or 16-bit numbers, and a flag for each
warp that packed some.
"""

from __future__ import annotations

from typing import Any

from jitconv.families import Extents, KernelPlan, WgmmaTile, common, pack_weights, patches
from jitconv.problem import Problem

TEMPLATE = "pack_planes.cu.j2"

_THREADS = 256

# Weights in, words out, as in the other packing kernel.
layout = pack_weights.layout
values = pack_weights.values


def channel_blocks(problem: Problem, tile: WgmmaTile) -> int:
    """Tiles along the output channels of a group."""
    return -(-(problem.out_channels // problem.groups) // tile.channels)


def _lines_of_a_block(problem: Problem, tile: WgmmaTile) -> int:
    channels = problem.in_channels // problem.groups
    if tile.product:
        return tile.chunks(patches.reduction(problem, tile)) * 2 * tile.steps * tile.channels
    return tile.chunks(channels) * problem.taps * 2 * tile.steps * tile.channels


def lines(problem: Problem, tile: WgmmaTile) -> int:
    """16-byte lines of one part of all weights."""
    return problem.groups * channel_blocks(problem, tile) * _lines_of_a_block(problem, tile)


def flags_of_a_block(problem: Problem, tile: WgmmaTile) -> int:
    """Warps that pack the weights of one tile along the channels, each of which leaves a word."""
    return -(-_lines_of_a_block(problem, tile) // 32)


def constants(kernel: KernelPlan) -> dict[str, Any]:
    p, tile = kernel.problem, kernel.tile
    assert isinstance(tile, WgmmaTile)
    return {
        **common.problem_constants(kernel),
        "group_channels": p.in_channels // p.groups,
        "group_outputs": p.out_channels // p.groups,
        "groups": p.groups,
        "channel_blocks": channel_blocks(p, tile),
        "kernel_size": common.padded(p.kernel_size, 1),
        "tile": {
            "channels": tile.channels,
            "steps": tile.steps,
            "chunks": tile.chunks(patches.reduction(p, tile) if tile.product else p.in_channels // p.groups),
            "product": tile.product,
            "permuted": tile.permuted,
        },
        "reduced": patches.reduction(p, tile) if tile.product else p.in_channels // p.groups,
        # A row of a patch, and what it is filled up to.
        "patch_row": patches.row(p, tile.patches) if tile.patches else 1,
        "filled_row": patches.row_vectors(p, tile.patches) * patches.vector(p) if tile.patches else 1,
        "math": tile.math,
        "x_along_k": p.x_memory_format == "channels_last",
        "packed_words": lines(p, tile) * tile.parts * 4,
        "flag_words": flags_of_a_block(p, tile),
        "declarations": layout(kernel).declarations(),
        "argument_bytes": layout(kernel).size,
    }


def _warps(problem: Problem, tile: WgmmaTile) -> int:
    return problem.groups * channel_blocks(problem, tile) * flags_of_a_block(problem, tile)


def words(kernel: KernelPlan) -> int:
    """Size of the packed weights in 32-bit words, flags of values that do not split included."""
    p, tile = kernel.problem, kernel.tile
    assert isinstance(tile, WgmmaTile)
    return lines(p, tile) * tile.parts * 4 + (_warps(p, tile) if tile.parts == 2 else 0)


def grid(kernel: KernelPlan, extents: Extents) -> int:
    assert isinstance(kernel.tile, WgmmaTile)
    return -(-_warps(kernel.problem, kernel.tile) * 32 // _THREADS)


def threads(kernel: KernelPlan) -> int:
    return _THREADS


def shared_bytes(kernel: KernelPlan) -> int:
    return 0
