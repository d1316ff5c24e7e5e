"""Tiles of the tensor-core family for sm_80 and up, and when they are the right ones.

As everywhere in planning, the choice looks at the Problem and the architecture, never at the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, product

from jitconv.architectures import arch_number, limits_of, splits_fp32
from jitconv.families import HaloTile, common, conv_mma
from jitconv.problem import Problem

#: Fewer input channels in a group would leave most of a product's k empty.
_FEWEST_CHANNELS = 3

#: Blocks on a multiprocessor, and consumer and producer warps of each: a scheduler has two consumers, or one where
#: nothing larger fits.
_CREWS = ((1, 8, 3), (2, 4, 1), (2, 4, 3), (1, 4, 3))

#: Registers that a thread needs beside its sums and operands.
_BESIDE_OPERANDS = 16

#: Most products of a run of taps, which is unrolled, and most taps of one that a split product sums: the tensor core
#: truncates.
_RUN_PRODUCTS, _SPLIT_TAPS = 432, 4

#: Most taps and bytes of a stage.
_STAGE_TAPS, _STAGE_BYTES = 12, 60 * 1024

#: Products of a warp from which on a stage is long: the next one arrives in the meantime.
_LONG_STAGE = 200

#: Most tiles that are offered for one problem, the best first.
_MOST_TILES = 24

#: Extents of outputs that tiles are weighed at, by class (jitconv.problem.size_class); along d they have no class.
_TYPICAL = {8: (7, 8), 16: (12, 14, 16), 32: (20, 28, 32, 56, 62, 64, 112, 128, 256)}
_TYPICAL_D = (6, 8, 16, 30, 32)


def choose_halo_tile(problem: Problem, arch: str) -> HaloTile | None:
    """The tensor-core tile for ``problem`` on ``arch``, or None where FFMA serves it."""
    return next(halo_tiles(problem, arch), None)


def halo_tiles(problem: Problem, arch: str, *, most: int = _MOST_TILES) -> Iterator[HaloTile]:
    """At most ``most`` tiles that fit ``arch``, in order of preference; none where FFMA serves the problem."""
    if problem.operator != "conv" or arch_number(arch) < 80:
        return
    if problem.in_channels // problem.groups < _FEWEST_CHANNELS:
        return
    if problem.dtype == "float32" and problem.precision == "ieee" and not splits_fp32(arch):
        return
    fitted = (_fit(problem, shape, arch) for shape in _shapes(problem, arch))
    tiles = sorted((tile for tile in fitted if tile is not None), key=lambda tile: cost(problem, tile))
    yield from islice(tiles, most)


def _shapes(problem: Problem, arch: str) -> Iterator[HaloTile]:
    """Tiles whose rings have not been sized yet."""
    outputs = problem.out_channels // problem.groups
    kind = math_of(problem)
    registers = limits_of(arch).registers_sm
    for blocks, consumers, producers in _CREWS:
        # A scheduler hands out registers to whole warps, in eights.
        warps = -(-blocks * (consumers + producers + 1) // 4)
        most = min(255, registers // 4 // (32 * warps) // 8 * 8) - _BESIDE_OPERANDS
        for channel_warps in (1, 2, 4):
            for channel_tiles in (1, 2, 3, 4):
                channels = 16 * channel_tiles * channel_warps
                if channels > -(-outputs // 16) * 16 + 16 * (channel_warps - 1):
                    continue
                for position_tiles in (2, 4, 8, 16):
                    for steps in _steps(problem, kind):
                        tile = HaloTile(
                            (0, 0, 0), channel_warps, consumers // channel_warps, channel_tiles, position_tiles, kind,
                            steps, position_rows=problem.memory_format == "channels_last",
                            producers=producers, blocks=blocks, depth=8 if problem.dtype == "float32" else 4,
                        )  # fmt: skip
                        if tile.sums + _operands(tile) <= most:
                            for box in _boxes(problem.rank, tile.positions):
                                yield replace(tile, box=box)


def _steps(problem: Problem, kind: str) -> tuple[int, ...]:
    """Products along k, but for taps, in a chunk: with few taps a unit has work between it and the next."""
    step = 8 if kind in ("TF32", "TF32X3") else 16
    most = max(1, -(-(problem.in_channels // problem.groups) // step))
    wanted = 4 if problem.taps < 3 else 2 if problem.taps < 9 else 1
    return tuple(s for s in (4, 2, 1) if s <= min(wanted, most))


def _boxes(rank: int, positions: int) -> Iterator[tuple[int, int, int]]:
    """Boxes (d, h, w) of so many positions: rows of 16 or more, so that reads of a row fill whole sectors."""
    if rank == 1:
        yield 1, 1, positions
        return
    for w in (16, 32, 64):
        for d in (1, 2, 4) if rank == 3 else (1,):
            h = positions // (w * d)
            if h and h <= 32:
                yield d, h, w


def cost(problem: Problem, tile: HaloTile) -> float:
    """Estimated cycles of a multiprocessor per useful output; the rates only rank tiles of one problem."""
    group_channels, outputs = problem.in_channels // problem.groups, problem.out_channels // problem.groups
    chunks = tile.k_steps(group_channels) // tile.steps
    items = chunks * tile.steps * problem.taps
    warps = tile.consumers
    # A scheduler finishes a product of 16 x 8 every 6 cycles, if it has another warp while one waits.
    products = tile.channel_tiles * tile.position_tiles * (3 if tile.parts == 2 else 1)
    multiply = items * warps / 4 * products * (6 if warps * tile.blocks >= 8 else 8)
    # Shared memory gives 128 bytes a cycle, a quarter of what a warp loads at once.
    pairs = tile.position_tiles // 2
    turns = pairs // tile.promoted_pairs if tile.parts == 2 else 1  # the weights are read for each
    read = items * warps * 4 * tile.parts * (tile.channel_tiles * turns + pairs)
    cells = float(conv_mma.plane(problem, tile))
    # L2 gives a multiprocessor about 40 bytes a cycle.
    fetch = chunks * tile.steps * 32 * (cells + problem.taps * tile.channels * tile.parts) / 40
    # A producer takes so many cycles for 32 bytes of 32 cells, waits included.
    turn = 200.0 if conv_mma.copied(problem) or problem.x_vector else 300.0 if problem.dtype == "float32" else 500.0
    stage = chunks * tile.steps * cells / 32 / tile.producers * turn * (1.4 if tile.parts == 2 else 1)
    finish = tile.positions * tile.channels * (20 if problem.memory_format == "contiguous" else 15) / 64
    work = max(multiply, read, fetch, stage) + 0.2 * (multiply + read + fetch + stage)
    # Two blocks on a multiprocessor cover each other's waits, and one's epilogue the other's products.
    work = max(work, stage, (multiply + read) * (1.0 if tile.blocks > 1 else 0.9)) + 0.1 * (fetch + stage)
    work += (0.3 if tile.blocks > 1 else 0.5) * finish
    work += (600 + 200 * chunks + 120 * items / tile.stage_taps) / tile.blocks
    return work / (tile.positions * _coverage(problem, tile) * outputs / -(-outputs // tile.channels))


def _coverage(problem: Problem, tile: HaloTile) -> float:
    """Share of a tile's positions that exist, on average over typical sizes of the problem's class."""
    if problem.rank == 1:
        return 1.0
    share = 1.0
    typical = (_TYPICAL_D, *(_TYPICAL[size] for size in problem.sizes))
    for extent, sizes in zip(tile.box, typical, strict=True):
        if extent > 1:
            share *= sum(at / (-(-at // extent) * extent) for at in sizes) / len(sizes)
    return share


def _operands(tile: HaloTile) -> int:
    """Registers of a thread for operands: weights of all its channels, and two pairs of position tiles."""
    return 4 * tile.parts * (tile.channel_tiles + 2)


def _stage_taps(problem: Problem, tile: HaloTile) -> list[int]:
    """How many taps a stage may have, most first."""
    items = problem.taps * tile.steps
    tap = tile.channels * 32 * tile.parts
    counts = [n for n in range(1, items + 1) if items % n == 0 and n <= _STAGE_TAPS and n * tap <= _STAGE_BYTES]
    return counts[::-1] or [1]


def _run_taps(problem: Problem, tile: HaloTile) -> int:
    """How many taps are unrolled: as many as lie at the same distances from the first one everywhere in a stage.

    And read other cells: what two of them read alike, the compiler would keep in registers, and there are none left.
    """
    area, row = math.prod(common.padded(problem.kernel_size, 1)[1:]), problem.kernel_size[-1]
    products = tile.channel_tiles * tile.position_tiles * (3 if tile.parts == 2 else 1)
    for n in range(tile.stage_taps, 1, -1):
        regular = (
            row % n == 0 or (n % row == 0 and area % n == 0) or (n % area == 0 and problem.taps % n == 0)
            or n % problem.taps == 0
        )  # fmt: skip
        if tile.stage_taps % n or not regular or n * products > _RUN_PRODUCTS or (tile.parts == 2 and n > _SPLIT_TAPS):
            continue
        cells = conv_mma.cells_of_a_warp(problem, tile, n)
        if len(set(cells)) == len(cells):
            return n
    return 1


def _fit(problem: Problem, tile: HaloTile, arch: str) -> HaloTile | None:
    """``tile`` with the longest stages that fit, or None."""
    limits = limits_of(arch)
    # Shared memory is given out by 128 bytes.
    budget = min(limits.shared_block, (limits.shared_sm // tile.blocks - limits.shared_reserved) // 128 * 128)

    def fits(tile: HaloTile) -> bool:
        return conv_mma.storage_bytes(problem, tile) <= budget

    counts = _stage_taps(problem, tile)
    wanted = [n for n in counts if n >= 3]
    products = tile.channel_tiles * tile.position_tiles * (3 if tile.parts == 2 else 1)
    for short, taps in [*product((False, True), wanted), *product((False, True), counts)]:
        # Long stages need no third one. Nor do units: what rings leave of shared memory caches x.
        stages = 2 if short or taps * products >= _LONG_STAGE else 3
        sized = replace(tile, stage_taps=taps, stages=stages, units=2)
        if fits(sized):
            return replace(sized, run_taps=_run_taps(problem, sized))
    return None


def math_of(problem: Problem) -> str:
    """How the operands become products: a value of ``Math`` (templates/device/math.cuh)."""
    if problem.dtype == "float16":
        return "HALF"
    if problem.dtype == "bfloat16":
        return "BFLOAT16"
    return {"tf32": "TF32", "ieee": "TF32X3"}[problem.precision]
