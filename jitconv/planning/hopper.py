"""Tiles of the Hopper family, and when they are the right ones.

As everywhere in planning, the choice looks at the Problem and the architecture, never at the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from jitconv.architectures import limits_of
from jitconv.families import WgmmaTile, conv_wgmma
from jitconv.planning.tensor_cores import math_of
from jitconv.problem import Problem

#: Columns that a product may have (templates/device/wgmma.cuh).
_COLUMNS = (8, 16, 32, 64, 96, 128, 192, 256)

#: fp32 sums that a consumer's thread may hold, by blocks on a multiprocessor; what is left is for addresses and the
#: epilogue. Sums that are promoted need a second set for one product.
_SUMS = {2: 128, 1: 160}

#: The same where tensor copies leave the producers' registers to the consumers.
_SUMS_WITH_COPIES = {2: 128, 1: 192}

_MOST_STAGES, _MOST_UNITS = 8, 6

#: Fewer input channels in a group would leave most of a product's k empty, fewer output channels most of its columns.
_FEWEST_CHANNELS, _FEWEST_OUTPUTS = 8, 17


def choose_wgmma_tile(problem: Problem, arch: str) -> WgmmaTile | None:
    """The Hopper tile for ``problem``, or None where another family serves it."""
    return next(wgmma_tiles(problem, arch), None)


def wgmma_tiles(problem: Problem, arch: str) -> Iterator[WgmmaTile]:
    """Every tile that fits, in order of preference."""
    if arch != "sm_90a" or problem.operator != "conv":
        return
    math = math_of(problem)
    outputs = problem.out_channels // problem.groups
    if problem.in_channels // problem.groups < _FEWEST_CHANNELS or outputs < _FEWEST_OUTPUTS:
        return
    for shape in sorted(_shapes(problem, math), key=lambda tile: _cost(problem, tile)):
        fitted = _fit(problem, replace(shape, tensor_copies=conv_wgmma.takes_tensor_copies(problem, shape)), arch)
        if fitted is not None:
            yield fitted


def _shapes(problem: Problem, math: str) -> Iterator[WgmmaTile]:
    """Tiles whose rings have not been sized yet."""
    outputs = problem.out_channels // problem.groups
    split = math == "TF32X3"
    flat = problem.rank == 1
    taps = problem.kernel_size[-1] * (1 if flat else problem.kernel_size[-2])
    for steps in _steps(problem, math, taps):
        stage_taps = max(n for n in range(1, taps + 1) if taps % n == 0 and (n == 1 or n * steps <= 8) and n <= 7)
        common = {"math": math, "steps": steps, "stage_taps": stage_taps, "stages": 0, "units": 0,
                  "promote_stages": 1 if split else 0,
                  # 32 loads of a thread on their way.
                  "depth": 2 if math in ("HALF", "BFLOAT16") and not problem.x_vector else 4}  # fmt: skip
        for blocks, consumers in ((2, 1), (1, 2)):
            # Channels as rows.
            for channels in (64, 128):
                if channels > max(64, -(-outputs // 64) * 64):
                    continue
                for columns in (128, 64) if blocks > 1 else (128, 256, 64):
                    for strips in (1, 2, 4):
                        groups = (1, consumers)
                        if channels == 64 * consumers and consumers > 1 and strips == 1:
                            groups = (consumers, 1)
                        box, strip = _box(columns, strips, groups[1], flat)
                        yield WgmmaTile(box, channels, True, strip, *groups, blocks=blocks, **common)  # type: ignore[arg-type]
            # Positions as rows.
            for n in _widths(outputs):
                for strips in (1, 2, 3, 4, 6, 8):
                    box, strip = _box(64, strips, consumers, flat)
                    yield WgmmaTile(box, n, False, strip, 1, consumers, blocks=blocks, **common)  # type: ignore[arg-type]


def _widths(outputs: int) -> list[int]:
    """Columns for products whose columns are output channels."""
    whole = [n for n in _COLUMNS if n >= outputs]
    if whole:
        return whole[:1]
    return [n for n in _COLUMNS if n >= 96 and -(-outputs // n) * n - outputs < 64]


def _steps(problem: Problem, math: str, taps: int) -> tuple[int, ...]:
    """Products along k in a chunk: few taps, or channels that lie side by side, want long chunks."""
    step = 8 if math in ("TF32", "TF32X3") else 16
    most = max(1, -(-(problem.in_channels // problem.groups) // step))
    wanted = 4 if taps < 3 or problem.x_memory_format == "channels_last" else 2 if taps < 9 else 1
    return tuple(s for s in (4, 2, 1) if s <= min(wanted, most))


def _box(strip: int, strips: int, groups: int, flat: bool) -> tuple[tuple[int, int], tuple[int, int]]:
    """Box and strip (h, w) of ``groups`` x ``strips`` strips of ``strip`` positions, as square as it gets."""
    total = strips * groups
    if flat:
        return (1, strip * total), (1, strip)
    height = strip // 8
    across = min(
        # A group's strips are whole rows of strips, or lie in one row.
        (n for n in range(1, total + 1) if total % n == 0 and (strips % n == 0 or n % strips == 0)),
        key=lambda n: abs(8 * n - height * total // n),
    )
    return (height * (total // across), 8 * across), (height, 8)


def _cost(problem: Problem, tile: WgmmaTile) -> float:
    """Estimated cycles per useful output and product along k: the tensor cores', or those of what feeds them."""
    outputs = problem.out_channels // problem.groups
    n = tile.columns
    # A product reads 64 rows and n columns of 32 bytes from shared memory at 128 bytes a cycle.
    product = max(n / 2, 16 + n / 4)
    positions = tile.box[0] * tile.box[1]
    products = positions * tile.channels / (64 * n)
    channel_blocks = -(-outputs // tile.channels)
    useful = positions * outputs / channel_blocks
    multiply = products * product / useful
    # Staging: 32 bytes of a cell, loaded, converted and stored by about 50 instructions of a lane, once for all taps of
    # a plane; weights come from L2 at about 40 bytes a cycle.
    taps = problem.kernel_size[-1] * (problem.kernel_size[-2] if problem.rank > 1 else 1)
    cells = conv_wgmma.cells(problem, tile)
    staging = cells * 50 * tile.parts / 32 / 2.5 / taps / useful
    weights = tile.channels * 32 * tile.parts / 40 / useful
    work = max(multiply * (1.5 if tile.parts == 2 else 1.0), staging, weights) + 0.15 * (multiply + staging + weights)
    # Two blocks cover each other's waits.
    return work + (0.0 if tile.blocks > 1 else 0.05 * multiply)


def _fit(problem: Problem, tile: WgmmaTile, arch: str) -> WgmmaTile | None:
    """``tile`` with the deepest rings that fit, or None."""
    sums = tile.accumulators + (tile.columns // 2 if tile.promote_stages else 0)
    most = (_SUMS_WITH_COPIES if tile.tensor_copies else _SUMS)[tile.blocks]
    if sums > most + (64 if tile.promote_stages and tile.blocks > 1 else 0):
        return None
    limits = limits_of(arch)
    budget = min(limits.shared_block, limits.shared_sm // tile.blocks - limits.shared_reserved) - 512
    unit, stage = conv_wgmma.unit_bytes(problem, tile), conv_wgmma.stage_bytes(tile)
    if unit >= 2**18 or 2 * unit + 2 * stage > budget:
        return None
    units, stages = 2, 2
    while True:
        if stages < _MOST_STAGES and stages < 2 * units and units * unit + (stages + 1) * stage <= budget:
            stages += 1
        elif units < _MOST_UNITS and (units + 1) * unit + stages * stage <= budget:
            units += 1
        elif stages < _MOST_STAGES and units * unit + (stages + 1) * stage <= budget:
            stages += 1
        else:
            return replace(tile, units=units, stages=stages)
