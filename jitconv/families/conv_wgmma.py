"""Forward convolution (fprop) on Hopper's tensor cores, sm_90a: templates/conv_wgmma.cu.j2."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jitconv.families import Extents, KernelPlan, WgmmaTile, common, pack_planes, patches
from jitconv.layout import Field, Layout
from jitconv.problem import Problem
from jitconv.tensor_map import TensorMap

TEMPLATE = "conv_wgmma.cu.j2"


def _axes(problem: Problem, tile: WgmmaTile) -> list[tuple[int, int, int]]:
    """For h and w: distance of staged coordinates in x, their number, and by how many of them two outputs differ."""
    axes = []
    for extent, k, stride, dilation in zip(
        tile.box,
        common.padded(problem.kernel_size, 1)[1:],
        common.padded(problem.stride, 1)[1:],
        common.padded(problem.dilation, 1)[1:],
        strict=True,
    ):
        step = stride if k == 1 else math.gcd(stride, dilation)
        staged = (extent - 1) * (stride // step) + (0 if k == 1 else (k - 1) * dilation // step) + 1
        axes.append((step, staged, stride // step))
    return axes


def cells(problem: Problem, tile: WgmmaTile) -> int:
    """Cells of one plane of the halo ring (WgmmaTile::CELLS in templates/device/halo_wgmma.cuh)."""
    if tile.product:
        return tile.box[0] * tile.box[1]
    (_, rows, _), (_, columns, classes) = _axes(problem, tile)
    return classes * (-(-rows * -(-columns // classes) // 8) * 8)


def raw_rows(problem: Problem, tile: WgmmaTile) -> int:
    """Rows along w of a channel of a raw box, as tensor copies take them; 0 where there are none."""
    if tile.copies != "raw" or problem.x_memory_format == "channels_last":
        return 0
    (_, rows, _), _ = _axes(problem, tile)
    return rows * _piece(problem, tile)[0]


def copies(problem: Problem, tile: WgmmaTile) -> str:
    """How tensor copies can fetch x for a tile: "direct", "raw" or, where they cannot, "" (see WgmmaTile)."""
    if tile.flat or not problem.x_vector or problem.padding_mode != "zeros" or problem.prologue:
        return ""
    if problem.groups > 1 and problem.in_channels // problem.groups % (tile.step_channels * tile.steps):
        return ""  # a box would reach into the next group
    spans, steps = _box(problem, tile)
    if any(span > 256 for span in spans) or any(step > 8 for step in steps):
        return ""
    return "direct" if problem.x_memory_format == "channels_last" and problem.dtype != "float32" else "raw"


def _box(problem: Problem, tile: WgmmaTile) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Span of a tensor copy in x and its element strides, innermost axis first."""
    (row_step, rows, _), (column_step, columns, classes) = _axes(problem, tile)
    height = (rows - 1) * row_step + 1
    if problem.x_memory_format == "channels_last":
        width, step = -(-columns // classes), column_step * classes
        return (_vector(problem), (width - 1) * step + 1, height, 1, 1), (1, step, row_step, 1, 1)
    return (_piece(problem, tile)[1], height, 1, tile.step_channels * tile.steps, 1), (1, row_step, 1, 1, 1)


def _vector(problem: Problem) -> int:
    """Elements of x in 16 bytes."""
    return 4 if problem.dtype == "float32" else 8


def _piece(problem: Problem, tile: WgmmaTile) -> tuple[int, int]:
    """In how many pieces a row of a raw box is copied, and elements in each."""
    (_, _, _), (step, columns, _) = _axes(problem, tile)
    vector = _vector(problem)
    # A copy starts at a multiple of 16 bytes.
    span = -problem.padding[-1][0] % vector + (columns - 1) * step + 1
    pieces = -(-span // 256)
    return pieces, -(-span // (pieces * vector)) * vector


def tensor_maps(
    kernel: KernelPlan, extents: Extents, strides: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[str, TensorMap]]:
    p, tile = kernel.problem, kernel.tile
    assert isinstance(tile, WgmmaTile)
    if not tile.copies:
        return {}
    if tile.patches:
        return {"x_boxes": ("x", patches.tensor_map(p, tile, extents, strides["x"]))}
    spans, steps = _box(p, tile)
    (x_d, x_h, x_w), (n, c, d, h, w) = extents.x, strides["x"]
    if p.x_memory_format == "channels_last":
        axes, outer = (p.in_channels, x_w, x_h, x_d, extents.batch), (w, h, d, n)
    else:
        axes, outer = (x_w, x_h, x_d, p.in_channels, extents.batch), (h, d, c, n)
    # An axis of one element has no stride; the map wants one all the same.
    apart = tuple((stride or _vector(p)) * 16 // _vector(p) for stride in outer)
    return {"x_boxes": ("x", TensorMap(p.dtype, axes, apart, spans, steps))}


def constants(kernel: KernelPlan) -> dict[str, Any]:
    p, tile = kernel.problem, kernel.tile
    assert isinstance(tile, WgmmaTile)
    producer_registers, consumer_registers = tile.registers
    return {
        **common.problem_constants(kernel),
        "group_channels": p.in_channels // p.groups,
        "group_outputs": p.out_channels // p.groups,
        "groups": p.groups,
        "channel_blocks": pack_planes.channel_blocks(p, tile),
        "kernel_size": common.padded(p.kernel_size, 1),
        "stride": common.padded(p.stride, 1),
        "dilation": common.padded(p.dilation, 1),
        "padding": common.padded([before for before, _ in p.padding], 0),
        "padding_mode": p.padding_mode.upper(),
        "x_along_k": p.x_memory_format == "channels_last",
        "y_channels_last": writes_channels_last(kernel),
        "x_vector": p.x_vector,
        "math": tile.math,
        "tile": {
            "box": list(tile.box),
            "channels": tile.channels,
            "channel_rows": tile.channel_rows,
            "strip": list(tile.strip),
            "channel_groups": tile.channel_groups,
            "position_groups": tile.position_groups,
            "steps": tile.steps,
            "stage_taps": tile.stage_taps,
            "stages": tile.stages,
            "units": tile.units,
            "promote_stages": tile.promote_stages,
            "producers": tile.producers,
            "depth": tile.depth,
            "copies": tile.copies,
            "raws": tile.raws,
            "march": tile.march,
            "flat": tile.flat,
            "patches": tile.patches,
            "product": tile.product,
            "permuted": tile.permuted,
            "threads": tile.threads,
            "blocks": tile.blocks,
            "producer_registers": producer_registers,
            "consumer_registers": consumer_registers,
        },
        "reduced": patches.reduction(p, tile) if tile.product else p.in_channels // p.groups,
        "patch": _patch(p, tile) if tile.patches else None,
        "packed_words": pack_planes.lines(p, tile) * tile.parts * 4,
        "flag_words": pack_planes.flags_of_a_block(p, tile),
        "prologue": common.chain_context("prologue", enumerate(p.prologue)),
        # Tensors that the epilogue reads, which nobody has read before.
        "prefetched": not tile.flat
        and any(spec.kind == "tensor" for step in kernel.steps for _, spec in step.operands),
        "bias": p.bias,
        "shared_bytes": shared_bytes(kernel),
        "declarations": layout(kernel).declarations(),
        "argument_bytes": layout(kernel).size,
    }


def _patch(problem: Problem, tile: WgmmaTile) -> dict[str, int]:
    """What the copies of patches know of them."""
    row = patches.row(problem, tile.patches)
    filled = patches.row_vectors(problem, tile.patches) * patches.vector(problem)
    line = patches.line(problem, tile) if tile.patches == "lines" else None
    if line is None:
        return {"row": row, "filled": filled, "piece": patches.piece(problem, tile)}
    return {
        "row": row,
        "filled": filled,
        "piece": line.span,
        "positions": line.positions,
        "pieces": line.pieces,
        "line_bytes": patches.line_bytes(problem, tile, line),
    }


def writes_channels_last(kernel: KernelPlan) -> bool:
    """Whether the output is dense along channels; a workspace is contiguous, whatever the output is."""
    return kernel.problem.memory_format == "channels_last" and kernel.last == len(kernel.problem.epilogue)


def layout(kernel: KernelPlan) -> Layout:
    p = kernel.problem
    source, target = f"const {common.ELEMENT[kernel.source_dtype]}", common.ELEMENT[kernel.target_dtype]
    assert isinstance(kernel.tile, WgmmaTile)
    fields = [
        *([Field("x_boxes", "tensor_map")] if kernel.tile.copies else []),
        Field("x", "pointer", source),
        Field("weight", "pointer", source),
        Field("packed", "pointer", "const uint32_t"),
        Field("bias", "pointer", source),
        Field("y", "pointer", target),
        Field("tiles", "index"),
        Field("segment", "index"),
        Field("segments", "divisor"),
        Field("boxes_h", "divisor"),
        Field("boxes_w", "divisor"),
        *(
            [Field("positions", "index"), *(Field(f"grid_{axis}", "divisor") for axis in "dhw")]
            if kernel.tile.flat
            else []
        ),
        Field("x_extent", "index", count=3),
        Field("y_extent", "index", count=3),
        Field("x_stride", "index", count=5),
        Field("y_stride", "index", count=5),
        Field("weight_stride", "index", count=5),
        Field("bias_stride", "index"),
        *common.chain_fields("prologue", enumerate(p.prologue)),
        *common.chain_fields("epilogue", common.indexed(kernel)),
    ]
    return Layout(tuple(fields), p.index_bits)


#: Blocks that run at once on the largest Hopper, for every block that a multiprocessor holds.
_MULTIPROCESSORS = 132


def _segment(kernel: KernelPlan, extents: Extents) -> int:
    """Planes of outputs in a tile. Results do not depend on it: it shares the work out evenly."""
    p, tile = kernel.problem, kernel.tile
    assert isinstance(tile, WgmmaTile)
    if not tile.march:
        return 1
    d, h, w = extents.value[0]
    boxes = -(-h // tile.box[0]) * -(-w // tile.box[1])
    columns = extents.batch * boxes * p.groups * pack_planes.channel_blocks(p, tile)
    more = common.padded(p.kernel_size, 1)[0] - 1  # planes of x that a tile has in common with the next

    def rounds(segment: int) -> int:
        tiles = columns * -(-d // segment)
        # A plane of outputs is worth about three planes of x.
        return -(-tiles // (_MULTIPROCESSORS * tile.blocks)) * (3 * segment + segment + more)

    lengths = [-(-d // parts) for parts in range(1, min(d, 64) + 1)]
    return min(lengths, key=rounds, default=1)


def _boxes(kernel: KernelPlan, extents: Extents) -> tuple[int, int, int]:
    assert isinstance(kernel.tile, WgmmaTile)
    d, h, w = extents.value[0]
    if kernel.tile.flat:
        return 1, 1, -(-extents.batch * d * h * w // kernel.tile.box[1])
    return -(-d // _segment(kernel, extents)), -(-h // kernel.tile.box[0]), -(-w // kernel.tile.box[1])


def _grid(extents: Extents) -> dict[str, int]:
    d, h, w = extents.value[0]
    return {"positions": extents.batch * d * h * w, "grid_d": d, "grid_h": h, "grid_w": w}


def values(
    kernel: KernelPlan, extents: Extents, strides: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    p = kernel.problem
    assert isinstance(kernel.tile, WgmmaTile)
    d, h, w = _boxes(kernel, extents)
    return {
        "tiles": grid(kernel, extents),
        "segment": _segment(kernel, extents),
        "segments": d,
        "boxes_h": h,
        "boxes_w": w,
        **(_grid(extents) if kernel.tile.flat else {}),
        "x_extent": extents.x,
        "y_extent": extents.value[0],
        "x_stride": strides["x"],
        "y_stride": strides["y"],
        "weight_stride": strides["weight"],
        "bias_stride": strides.get("bias", (0,))[0],
        **common.chain_values("prologue", enumerate(p.prologue), strides),
        **common.chain_values("epilogue", common.indexed(kernel), strides),
    }


def grid(kernel: KernelPlan, extents: Extents) -> int:
    p, tile = kernel.problem, kernel.tile
    assert isinstance(tile, WgmmaTile)
    d, h, w = _boxes(kernel, extents)
    return (1 if tile.flat else extents.batch) * d * h * w * p.groups * pack_planes.channel_blocks(p, tile)


def resident_blocks(kernel: KernelPlan) -> int:
    assert isinstance(kernel.tile, WgmmaTile)
    return kernel.tile.blocks


def unit_bytes(problem: Problem, tile: WgmmaTile) -> int:
    """Size of one buffer of the halo ring."""
    return tile.parts * 2 * tile.steps * cells(problem, tile) * 16


def stage_bytes(tile: WgmmaTile) -> int:
    """Size of one buffer of the weight ring."""
    return tile.stage_taps * tile.parts * 2 * tile.steps * tile.channels * 16


def raw_bytes(problem: Problem, tile: WgmmaTile) -> int:
    """Size of one raw box."""
    if problem.x_memory_format == "channels_last" or tile.patches:
        return 2 * tile.steps * cells(problem, tile) * 16
    (_, rows, _), _ = _axes(problem, tile)
    pieces, piece = _piece(problem, tile)
    elements = tile.step_channels * tile.steps * rows * piece
    return pieces * (-(-elements * 16 // _vector(problem) // 128) * 128)


def shared_bytes(kernel: KernelPlan) -> int:
    assert isinstance(kernel.tile, WgmmaTile)
    return storage_bytes(kernel.problem, kernel.tile)


def storage_bytes(p: Problem, tile: WgmmaTile) -> int:
    """Size of Storage: the rings, their barriers, a word for each unit, and a flat tile's offsets."""
    rings = -(-(tile.units * unit_bytes(p, tile) + tile.stages * stage_bytes(tile)) // 128) * 128
    raws = tile.raws if tile.copies == "raw" else 1
    rings += raws * raw_bytes(p, tile) if tile.copies == "raw" else 128
    rings = -(-(rings + 8 * raws + 16 * (tile.units + tile.stages)) // 128) * 128
    behind = 4 * tile.units
    if tile.flat:
        # A number for every channel of every chunk, at its own alignment.
        size = p.index_bits // 8
        channels = tile.chunks(patches.reduction(p, tile)) * tile.step_channels * tile.steps
        # And for split products a word for every cell of every unit.
        behind += 4 * tile.units * cells(p, tile) if tile.parts == 2 else 0
        if not tile.patches:
            behind = -(-behind // size) * size + channels * size
    return -(-(rings + behind) // 128) * 128


threads = common.tile_threads
