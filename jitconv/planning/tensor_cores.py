"""Tiles of the tensor-core families, and when they are the right ones.

As everywhere in planning, the choice looks at the Problem and the architecture, never at the batch.
"""

from __future__ import annotations

from jitconv.architectures import arch_number, limits_of, splits_fp32
from jitconv.families import HaloTile, KernelPlan, conv_mma
from jitconv.problem import Problem

#: Boxes of output positions by rank and by how many positions: near-cubes keep the halo small, and 16 positions
#: along w keep the reads of a row in whole sectors.
_BOXES = {
    1: {512: (1, 1, 512), 256: (1, 1, 256), 128: (1, 1, 128), 64: (1, 1, 64)},
    2: {512: (1, 16, 32), 256: (1, 8, 32), 128: (1, 8, 16), 64: (1, 4, 16)},
    3: {512: (4, 8, 16), 256: (4, 4, 16), 128: (2, 4, 16), 64: (2, 2, 16)},
}

#: Fewer input channels in a group would leave most of a product's k empty.
_FEWEST_CHANNELS = 3


def choose_halo_tile(problem: Problem, arch: str) -> HaloTile | None:
    """The tensor-core tile for ``problem`` on ``arch``, or None where FFMA serves it."""
    if problem.operator != "conv" or arch_number(arch) < 80:
        return None
    if problem.in_channels // problem.groups < _FEWEST_CHANNELS:
        return None
    if problem.dtype == "float32" and problem.precision == "ieee" and not splits_fp32(arch):
        return None
    limit = limits_of(arch).shared_block
    for tile in _candidates(problem):
        if conv_mma.shared_bytes(KernelPlan("conv_mma", problem, tile, 0, 0, problem.dtype, "float32")) <= limit:
            return tile
    return None


def _candidates(problem: Problem) -> list[HaloTile]:
    """Tiles in order of preference."""
    outputs = problem.out_channels // problem.groups
    math = math_of(problem)
    split = math == "TF32X3"
    channel_tiles = min(2, -(-outputs // 16))
    channel_warps = min(2, -(-outputs // (16 * channel_tiles)))
    # Three blocks of four warps a multiprocessor, so that some stage or finish while others multiply: 168 registers a
    # thread. Split products keep a second set of accumulators, and eight warps have a multiprocessor to themselves.
    warps = 8 if split else 4
    # Long rows of taps are unrolled, and strides cost addresses: both leave registers for fewer accumulators.
    tight = problem.kernel_size[-1] > 3 or (split and any(stride > 1 for stride in problem.stride))
    most_tiles = 4 if tight else 8
    promote = max(1, 3 // problem.kernel_size[-1]) if split else 0
    channels = problem.in_channels // problem.groups
    tiles = []
    for positions, box in _BOXES[problem.rank].items():
        position_warps = warps // channel_warps
        position_tiles = positions // 8 // position_warps
        if not 2 <= position_tiles <= most_tiles:
            continue
        # Few taps: several products along k per chunk, so that a barrier has work between it and the next.
        for steps in (4, 2, 1) if problem.taps < 9 else (1,):
            tile = HaloTile(box, channel_warps, position_warps, channel_tiles, position_tiles, math, steps, promote)
            if steps == 1 or channels >= tile.step_channels * steps:
                tiles.append(tile)
    return tiles


def math_of(problem: Problem) -> str:
    """How the operands become products: a value of ``Math`` (templates/device/math.cuh)."""
    if problem.dtype == "float16":
        return "HALF"
    if problem.dtype == "bfloat16":
        return "BFLOAT16"
    return {"tf32": "TF32", "ieee": "TF32X3"}[problem.precision]
