"""Tiles of the Hopper family, and when they are the right ones.

As everywhere in planning, the choice looks at the Problem and the architecture, never at the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from jitconv.architectures import limits_of
from jitconv.families import WgmmaTile, conv_wgmma, patches
from jitconv.planning.tensor_cores import math_of
from jitconv.problem import Problem

#: Columns that a product may have (templates/device/wgmma.cuh).
_COLUMNS = (8, 16, 32, 64, 96, 128, 192, 256)

#: fp32 sums that a consumer's thread may hold, by blocks on a multiprocessor and by who fetches x; what is left is for
#: addresses and the epilogue. Sums that are promoted need a second set for one product.
_SUMS = {(2, ""): 128, (1, ""): 144, (2, "raw"): 144, (1, "raw"): 160, (2, "direct"): 144, (1, "direct"): 192}

_MOST_STAGES, _MOST_UNITS = 8, 6

#: Products along k in a chunk of rows of patches: longer rows are loaded element by element.
_MOST_STEPS = 8

#: Extents of outputs that tiles are weighed at, by class (jitconv.problem.size_class).
_TYPICAL = {8: (7, 8), 16: (12, 14, 16), 32: (20, 28, 32, 56, 64, 112, 128, 256)}


def choose_wgmma_tile(problem: Problem, arch: str) -> WgmmaTile | None:
    """The Hopper tile for ``problem``, or None where another family serves it."""
    return next(wgmma_tiles(problem, arch), None)


def wgmma_tiles(problem: Problem, arch: str) -> Iterator[WgmmaTile]:
    """Every tile that fits, in order of preference."""
    if arch != "sm_90a" or problem.operator != "conv":
        return
    math = math_of(problem)
    shapes = [replace(tile, copies=conv_wgmma.copies(problem, tile)) for tile in _shapes(problem, math)]
    if problem.rank == 3 and problem.kernel_size[0] > 1 and problem.stride[0] == problem.dilation[0] == 1:
        shapes += [replace(tile, march=True) for tile in shapes]
    # Tensor copies fetch boxes faster than loads fetch positions one by one, unless images are smaller than boxes.
    small = min(problem.sizes) < 32 or not any(tile.copies for tile in shapes)
    products = [tile for tile in _patch_shapes(problem, math) if tile.patches != "lines" or patches.line(problem, tile)]
    yield from _fitted(problem, products, arch)
    if problem.is_product and (problem.taps > 1 or small):
        shapes += list(_flat_shapes(problem, math))
    yield from _fitted(problem, shapes, arch)


def _fitted(problem: Problem, shapes: Iterable[WgmmaTile], arch: str) -> Iterator[WgmmaTile]:
    """Those that fit, the cheapest first."""

    def cost(tile: WgmmaTile) -> float:
        return _patch_cost(problem, tile) if tile.patches else _cost(problem, tile)

    for shape in sorted(shapes, key=cost):
        fitted = _fit(problem, shape, arch)
        if fitted is not None:
            yield fitted


def _shapes(problem: Problem, math: str) -> Iterator[WgmmaTile]:
    """Tiles whose rings have not been sized yet."""
    outputs = problem.out_channels // problem.groups
    split = math == "TF32X3"
    flat = problem.rank == 1
    taps = problem.kernel_size[-1] * (1 if flat else problem.kernel_size[-2])
    for steps in _steps(problem, math, taps):
        # A stage is also what the tensor core sums of a split product, and it truncates: four steps along k at most.
        most = 4 if split else 8
        stage_taps = max(n for n in range(1, taps + 1) if taps % n == 0 and (n == 1 or n * steps <= most) and n <= 7)
        common: dict[str, Any] = {
            "math": math,
            "steps": steps,
            "stage_taps": stage_taps,
            "stages": 0,
            "units": 0,
            "promote_stages": 1 if split else 0,
            # 32 loads of a thread on their way.
            "depth": 2 if math in ("HALF", "BFLOAT16") and not problem.x_vector else 4,
        }
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
                        yield WgmmaTile(box, channels, True, strip, *groups, blocks=blocks, **common)
            # Positions as rows.
            for n in _widths(outputs):
                for strips in (1, 2, 3, 4, 6, 8):
                    box, strip = _box(64, strips, consumers, flat)
                    yield WgmmaTile(box, n, False, strip, 1, consumers, blocks=blocks, **common)
                    if consumers > 1 and outputs > n and n >= 64 and strips <= 2:
                        box, strip = _box(64, strips, 1, flat)
                        yield WgmmaTile(box, 2 * n, False, strip, 2, 1, blocks=blocks, **common)


def _widths(outputs: int) -> list[int]:
    """Columns for products whose columns are output channels."""
    whole = [n for n in _COLUMNS if n >= outputs]
    parts = [n for n in _COLUMNS if 64 <= n < outputs and -(-outputs // n) * n - outputs < 64]
    return whole[:1] + parts


def _flat_shapes(problem: Problem, math: str) -> Iterator[WgmmaTile]:
    """Flat tiles whose rings have not been sized yet: positions are rows."""
    split = math == "TF32X3"
    halves = math in ("HALF", "BFLOAT16")
    for blocks, consumers in ((2, 1), (1, 2)):
        for n in _widths(problem.out_channels // problem.groups):
            for strips in (1, 2, 3):
                yield WgmmaTile(
                    (1, 64 * strips * consumers), n, False, (1, 64), 1, consumers, math, 4, 1, 0, 0,
                    promote_stages=1 if split else 0, blocks=blocks, flat=True,
                    depth=2 if halves and not problem.x_vector else 4,
                )  # fmt: skip


def _patch_shapes(problem: Problem, math: str) -> Iterator[WgmmaTile]:
    """Tiles whose patches tensor copies fetch, whose rings have not been sized yet."""
    if not problem.x_patches or problem.index_bits != 32:
        return  # the copies' coordinates have 32 bits
    lines = problem.x_patches == "lines"
    steps = patches.steps(problem)
    if steps > _MOST_STEPS:
        return
    matrix = problem.x_patches == "matrix"
    outputs = problem.out_channels // problem.groups
    common: dict[str, Any] = {
        "math": math,
        "steps": steps,
        "stage_taps": 1,
        "stages": 0,
        "units": 0,
        "promote_stages": 1 if math == "TF32X3" else 0,
        "flat": matrix,
        "patches": problem.x_patches,
    }
    for copies, raws in (("direct", 0), ("raw", 3)):
        if copies == "direct" and (lines or problem.dtype == "float32"):
            continue
        common |= {"copies": copies, "raws": raws}
        for blocks, consumers in ((2, 1), (1, 2)):
            for n in _widths(outputs):
                for strips in (1, 2, 3, 4):
                    groups = [(1, consumers)]
                    if consumers > 1 and outputs > n and n >= 64 and strips <= 2:
                        groups.append((2, 1))
                    for along, across in groups:
                        box, strip = _box(64, strips, across, matrix or problem.rank == 1)
                        # A copy spans 256 positions. Two blocks leave little for more than 96 sums of a thread, and
                        # long chunks little for rings of wide stages.
                        if max(box) <= 256 and (blocks == 1 or strips * n <= 192) and (steps <= 4 or along * n <= 128):
                            yield WgmmaTile(box, along * n, False, strip, along, across, blocks=blocks, **common)
            for columns in (64, 128, 256) if not matrix else ():
                # Channels as rows, for few positions or outputs that lie along w.
                box, strip = _box(columns, 1, consumers, problem.rank == 1)
                if max(box) <= 256:
                    yield WgmmaTile(box, 64, True, strip, 1, consumers, blocks=blocks, **common)
                    channels = 64 * consumers
                    if channels <= -(-outputs // 64) * 64 and consumers > 1:
                        box, strip = _box(columns, 1, 1, problem.rank == 1)
                        yield WgmmaTile(box, channels, True, strip, consumers, 1, blocks=blocks, **common)


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
    """Estimated cycles of a multiprocessor per useful output: of the tensor cores, or of what feeds them.

    The rates are those of an H200, rounded; they only rank tiles of one problem.
    """
    group_channels, outputs = problem.in_channels // problem.groups, problem.out_channels // problem.groups
    planes = problem.kernel_size[0] if problem.rank == 3 else 1
    taps = problem.taps // planes
    if tile.flat:
        group_channels, planes, taps = group_channels * problem.taps, 1, 1
    n, cells = tile.columns, float(conv_wgmma.cells(problem, tile))
    steps = tile.chunks(group_channels) * planes * tile.steps  # products along k, for each tap of a plane
    positions = tile.box[0] * tile.box[1]
    # A product reads 64 rows and n columns of 32 bytes from shared memory at 128 bytes a cycle.
    products = taps * positions * tile.channels // (64 * n) * (3 if tile.parts == 2 else 1)
    # Shared memory is read by others too, so what a product reads counts for more than its share.
    multiply = steps * products * (max(n / 2, 16 + n / 4) + 0.3 * (16 + n / 4))
    if tile.march:
        cells = 1.15 * cells / planes  # each plane of x is fetched once, but for the ends of a march
    # L2 gives a multiprocessor about 40 bytes a cycle.
    fetch = steps * 32 * (cells + taps * tile.channels * tile.parts) / 40
    # A cell's 32 bytes are converted (and loaded) by so many instructions of a lane; the producers issue three in two
    # cycles.
    instructions = {"direct": 0.0, "raw": 36.0, "": 40.0 if problem.x_vector else 64.0}[tile.copies]
    if tile.flat:
        instructions *= 1.5  # every tap of every channel has an offset of its own
    elif not tile.copies and cells > 4 * 96:
        instructions *= 2.5  # where each cell lies is worked out every time
    stage = steps * cells * instructions * (1.4 if tile.parts == 2 else 1) / 32 / 1.5
    # Where channels are rows, channels_last outputs are stored one by one, others in pairs.
    singly = tile.channel_rows and problem.memory_format == "channels_last"
    finish = positions * tile.channels * (45 if singly else 20 if tile.channel_rows else 15) / 64
    # A tensor copy takes so many cycles for every row of a raw box along w.
    copy = 14.0 * steps * tile.step_channels * conv_wgmma.raw_rows(problem, tile) / (planes / 1.15 if tile.march else 1)
    work = max(multiply, fetch, stage, copy) + 0.2 * (multiply + fetch + stage)
    # Two blocks on a multiprocessor cover each other's waits, and one's epilogue the other's products.
    work += (0.3 if tile.blocks > 1 else 0.4) * finish
    # Filling the rings, and the latency of an epilogue and of every unit.
    work += (600 + 30 * steps / tile.steps) / tile.blocks
    blocks = -(-outputs // tile.channels)
    useful = positions * _coverage(problem, tile)
    if min(problem.sizes) == 8 and problem.rank > 1:
        # Small images are few tiles: blocks stand idle.
        idle = 0.0
        for typical in _TYPICAL_SMALL:
            tiles = -(-typical // useful) * blocks
            rounds, left = divmod(tiles, _MULTIPROCESSORS * tile.blocks)
            # A block that has a multiprocessor for itself is nearly twice as fast as one that shares it.
            last = 0.0 if left == 0 else 1.2 if tile.blocks > 1 and left <= _MULTIPROCESSORS else tile.blocks
            idle += (rounds * tile.blocks + last) * _MULTIPROCESSORS / tiles
        work *= idle / len(_TYPICAL_SMALL)
    return work / (useful * outputs / blocks)


#: Positions of all samples that products are weighed at: samples, patches of images, or pixels by class of the image.
_TYPICAL_POSITIONS: dict[str | int, tuple[int, ...]] = {
    "samples": (1024, 4096), "patches": (4096, 16384, 65536), 8: (1024, 4096), 16: (4096, 16384), 32: (65536, 262144),
}  # fmt: skip

#: Positions of all samples of small images that their tiles are weighed at.
_TYPICAL_SMALL = (1024, 3136, 8192)

#: Multiprocessors of the largest Hopper.
_MULTIPROCESSORS = 132


def _patch_cost(problem: Problem, tile: WgmmaTile) -> float:
    """Estimated cycles for an output, as in :func:`_cost`, with the multiprocessors that stand idle at typical sizes.

    The rates are fitted to 388 kernels measured on an H200, which they tell within an eighth.
    """
    outputs = problem.out_channels // problem.groups
    units = tile.chunks(patches.reduction(problem, tile))
    n, positions, raw = tile.columns, tile.box[0] * tile.box[1], tile.copies == "raw"
    products = tile.steps * positions * tile.channels // (64 * n) * (3 if tile.parts == 2 else 1)
    multiply = products * max(n / 2, 16 + n / 4)
    # Bytes of x and of the weights in a unit; what shared memory moves of them and for the products.
    x, weights = 32 * tile.steps * positions, 32 * tile.steps * tile.channels * tile.parts
    moved = x * (2 + tile.parts if raw else 1) + weights + products * 32 * (64 + n)
    fetch = (x + weights) / 75
    # A copy takes a cycle for each of its rows, a producer warp some for an instruction.
    element = 4 if problem.dtype == "float32" else 2
    row = 512 if tile.patches == "lines" else patches.piece(problem, tile) * element
    rows = x / row * (1 if raw else 1.2)
    instructions = 37 if tile.parts == 2 else 15 if element == 4 else 9
    convert = x / 512 * instructions * 3.9 / (4 * tile.producers - 1) if raw else 0.0
    shared = moved / 128
    unit = max(multiply, 0.85 * shared, fetch, convert, 0.9 * rows) + 0.23 * rows
    unit += 0.16 * (multiply + shared + 2 * fetch + convert / 4) + 120 / tile.blocks
    work = units * unit + (9 if tile.blocks > 1 else 12) * positions * tile.channels / 64
    kind: str | int = "patches" if tile.patches != "matrix" else "samples" if problem.taps > 1 else min(problem.sizes)
    typical = _TYPICAL_POSITIONS[kind]
    cost = 0.0
    for count in typical:
        tiles = -(-count // (positions * _coverage(problem, tile))) * -(-outputs // tile.channels)
        rounds = -(-tiles // (_MULTIPROCESSORS * tile.blocks)) * tile.blocks
        cost += (0.8 * rounds + 0.2 * tiles / _MULTIPROCESSORS) * work * _MULTIPROCESSORS / (count * outputs)
    return cost / len(typical)


def _coverage(problem: Problem, tile: WgmmaTile) -> float:
    """Share of a tile's positions that exist, on average over typical sizes of the problem's class."""
    share = 1.0
    if tile.flat:
        return share
    for extent, size in zip(tile.box, problem.sizes, strict=True):
        if extent > 1:
            typical = _TYPICAL[size]
            share *= sum(at / (-(-at // extent) * extent) for at in typical) / len(typical)
    return share if problem.rank > 1 else 1.0


def _fit(problem: Problem, tile: WgmmaTile, arch: str) -> WgmmaTile | None:
    """``tile`` with the deepest rings that fit, or None."""
    sums = tile.accumulators + (tile.columns // 2 if tile.promote_stages else 0)
    if sums > _SUMS[tile.blocks, tile.copies] + (48 if tile.promote_stages and tile.blocks > 1 else 0):
        return None
    limits = limits_of(arch)
    # A product's sums, their addresses and descriptors: ptxas asks for that many registers at the start of a block.
    if tile.columns // 2 + 26 > limits.registers_sm // (tile.threads * tile.blocks):
        return None
    # Shared memory is given out by 128 bytes.
    budget = min(limits.shared_block, (limits.shared_sm // tile.blocks - limits.shared_reserved) // 128 * 128)
    if tile.copies == "raw":
        tile = replace(tile, raws=max(tile.raws, 2))
    least, most = 2, _MOST_UNITS
    if tile.march:
        # All planes of the filter, and some of the next plane.
        chunks = tile.chunks(problem.in_channels // problem.groups)
        least, most = chunks * problem.kernel_size[0] + 1, chunks * (problem.kernel_size[0] + 1)

    def fits(units: int, stages: int) -> bool:
        return conv_wgmma.storage_bytes(problem, replace(tile, units=units, stages=stages)) <= budget

    units, stages = least, 2
    # A descriptor reaches 2^18 bytes far.
    if conv_wgmma.unit_bytes(problem, tile) >= 2**18 or not fits(units, stages):
        return None
    while True:
        if stages < _MOST_STAGES and stages < 2 * (units - least + 2) and fits(units, stages + 1):
            stages += 1
        elif units < most and fits(units + 1, stages):
            units += 1
        elif stages < _MOST_STAGES and fits(units, stages + 1):
            stages += 1
        else:
            return replace(tile, units=units, stages=stages)
