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


def constants(kernel: KernelPlan) -> dict[str, Any]:
    p, tile = kernel.problem, kernel.tile
    assert isinstance(tile, HaloTile)
    return {
        **common.problem_constants(kernel),
        "group_channels": p.in_channels // p.groups,
        "group_outputs": p.out_channels // p.groups,
        "groups": p.groups,
        "channel_tiles": _channel_blocks(p, tile),
        "kernel_size": common.padded(p.kernel_size, 1),
        "stride": common.padded(p.stride, 1),
        "dilation": common.padded(p.dilation, 1),
        "padding": common.padded([before for before, _ in p.padding], 0),
        "padding_mode": p.padding_mode.upper(),
        "x_along_k": p.x_memory_format == "channels_last",
        "y_channels_last": _writes_channels_last(kernel),
        "x_vector": p.x_vector and p.x_memory_format == "channels_last",
        "math": tile.math,
        "promote_rows": tile.promote_rows,
        "tile": {
            "box": list(tile.box),
            "channels": tile.channels,
            "channel_warps": tile.channel_warps,
            "position_warps": tile.position_warps,
            "channel_tiles": tile.channel_tiles,
            "position_tiles": tile.position_tiles,
            "step_channels": tile.step_channels,
            "steps": tile.steps,
            "threads": tile.threads,
            # Blocks that a multiprocessor holds at once: what the compiler may spend in registers.
            "blocks": 1 if tile.parts == 2 else 3,
        },
        "prologue": common.chain_context("prologue", enumerate(p.prologue)),
        "bias": p.bias,
        "shared_bytes": shared_bytes(kernel),
        "declarations": layout(kernel).declarations(),
        "argument_bytes": layout(kernel).size,
    }


def _writes_channels_last(kernel: KernelPlan) -> bool:
    # A workspace is contiguous, whatever the output is.
    return kernel.problem.memory_format == "channels_last" and kernel.last == len(kernel.problem.epilogue)


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


def shared_bytes(kernel: KernelPlan) -> int:
    """Size of Storage: two halo buffers, or the outlets of all warps, and a flag."""
    tile = kernel.tile
    assert isinstance(tile, HaloTile)
    d, h, w = halo(kernel.problem, tile)
    plane = (d * h * w + 3) // 8 * 8 + 4
    buffers = 2 * tile.parts * 2 * tile.steps * plane * 16
    pitch = 17 if _writes_channels_last(kernel) else 24
    outlets = tile.channel_warps * tile.position_warps * 16 * tile.channel_tiles * pitch * 4
    return max(buffers, -(-outlets // 16) * 16) + 16


threads = common.tile_threads
