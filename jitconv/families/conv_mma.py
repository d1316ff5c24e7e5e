"""Forward convolution (fprop) on tensor cores, sm_80 and up: templates/conv_mma.cu.j2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jitconv.families import Extents, HaloTile, KernelPlan, common
from jitconv.layout import Field, Layout
from jitconv.problem import Problem

TEMPLATE = "conv_mma.cu.j2"


def halo(problem: Problem, tile: HaloTile) -> tuple[int, int, int]:
    """Extents of the input box that a block stages."""
    d, h, w = (
        (extent - 1) * stride + (k - 1) * dilation + 1
        for extent, stride, k, dilation in zip(
            tile.box,
            common.padded(problem.stride, 1),
            common.padded(problem.kernel_size, 1),
            common.padded(problem.dilation, 1),
            strict=True,
        )
    )
    return d, h, w


def copied(problem: Problem) -> bool:
    """Whether x lies in memory as it will in the halo, so that it can be copied there without conversion."""
    last = problem.x_memory_format == "channels_last" and problem.x_vector
    return last and problem.dtype != "float32" and not problem.prologue


def constants(kernel: KernelPlan) -> dict[str, Any]:
    p, tile = kernel.problem, kernel.tile
    assert isinstance(tile, HaloTile)
    return {
        **common.problem_constants(kernel),
        "group_channels": p.in_channels // p.groups,
        "group_outputs": p.out_channels // p.groups,
        "groups": p.groups,
        "channel_blocks": _channel_blocks(p, tile),
        "kernel_size": common.padded(p.kernel_size, 1),
        "stride": common.padded(p.stride, 1),
        "dilation": common.padded(p.dilation, 1),
        "padding": common.padded([before for before, _ in p.padding], 0),
        "padding_mode": p.padding_mode.upper(),
        "x_along_k": p.x_memory_format == "channels_last",
        "x_vector": p.x_vector and p.x_memory_format == "channels_last",
        "direct": copied(p),
        "math": tile.math,
        "tile": {
            "box": list(tile.box),
            "channels": tile.channels,
            "channel_warps": tile.channel_warps,
            "position_warps": tile.position_warps,
            "channel_tiles": tile.channel_tiles,
            "position_tiles": tile.position_tiles,
            "position_rows": tile.position_rows,
            "steps": tile.steps,
            "promote": tile.parts == 2,
            "stage_taps": tile.stage_taps,
            "run_taps": tile.run_taps,
            "stages": tile.stages,
            "units": tile.units,
            "producers": tile.producers,
            "depth": tile.depth,
            "threads": tile.threads,
            "blocks": tile.blocks,
        },
        "prologue": common.chain_context("prologue", enumerate(p.prologue)),
        "bias": p.bias,
        "shared_bytes": shared_bytes(kernel),
        "declarations": layout(kernel).declarations(),
        "argument_bytes": layout(kernel).size,
    }


def _channel_blocks(problem: Problem, tile: HaloTile) -> int:
    return -(-(problem.out_channels // problem.groups) // tile.channels)


def layout(kernel: KernelPlan) -> Layout:
    p = kernel.problem
    source, target = f"const {common.ELEMENT[kernel.source_dtype]}", common.ELEMENT[kernel.target_dtype]
    fields = [
        Field("x", "pointer", source),
        Field("weight", "pointer", source),
        Field("packed", "pointer", "const uint32_t"),
        Field("bias", "pointer", source),
        Field("y", "pointer", target),
        Field("tiles", "index"),
        Field("boxes_d", "divisor"),
        Field("boxes_h", "divisor"),
        Field("boxes_w", "divisor"),
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


def _boxes(kernel: KernelPlan, extents: Extents) -> tuple[int, int, int]:
    assert isinstance(kernel.tile, HaloTile)
    d, h, w = (-(-o // b) for o, b in zip(extents.value[0], kernel.tile.box, strict=True))
    return d, h, w


def values(
    kernel: KernelPlan, extents: Extents, strides: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    p = kernel.problem
    d, h, w = _boxes(kernel, extents)
    return {
        "tiles": grid(kernel, extents),
        "boxes_d": d,
        "boxes_h": h,
        "boxes_w": w,
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
    assert isinstance(tile, HaloTile)
    d, h, w = _boxes(kernel, extents)
    return extents.batch * d * h * w * p.groups * _channel_blocks(p, tile)


def resident_blocks(kernel: KernelPlan) -> int:
    assert isinstance(kernel.tile, HaloTile)
    return kernel.tile.blocks


def shared_bytes(kernel: KernelPlan) -> int:
    assert isinstance(kernel.tile, HaloTile)
    return storage_bytes(kernel.problem, kernel.tile)


def storage_bytes(p: Problem, tile: HaloTile) -> int:
    """Size of Storage: the rings, their barriers, and a word for each unit."""
    unit = tile.parts * 2 * tile.steps * plane(p, tile) * 16
    stage = tile.stage_taps * tile.channels * 32 * tile.parts
    barriers = 16 * (tile.units + tile.stages)
    return -(-(tile.units * unit + tile.stages * stage + barriers + 4 * tile.units) // 16) * 16


def plane(p: Problem, tile: HaloTile) -> int:
    """Cells of one plane of the halo ring, those that fill it up included."""
    d, h, w = halo(p, tile)
    return (d * h * w + 3) // 8 * 8 + 4


def cells_of_a_warp(p: Problem, tile: HaloTile, items: int) -> list[int]:
    """Where the pairs of position tiles of a consumer warp start in the halo ring, for so many items of a chunk."""
    _, height, width = halo(p, tile)
    _, kernel_h, kernel_w = common.padded(p.kernel_size, 1)
    dilation, stride = common.padded(p.dilation, 1), common.padded(p.stride, 1)
    _, box_h, box_w = tile.box
    found = []
    for item in range(items):
        step, tap = divmod(item, p.taps)
        kd, kh, kw = tap // (kernel_h * kernel_w), tap // kernel_w % kernel_h, tap % kernel_w
        shift = (kd * dilation[0] * height + kh * dilation[1]) * width + kw * dilation[2]
        for first in range(0, 8 * tile.position_tiles, 16):
            d, h, w = first // (box_h * box_w), first // box_w % box_h, first % box_w
            at = (d * stride[0] * height + h * stride[1]) * width + w * stride[2]
            found.append(2 * step * plane(p, tile) + at + shift)
    return found


threads = common.tile_threads
