"""Forward convolution (fprop) on Hopper's tensor cores, sm_90a: templates/conv_wgmma.cu.j2."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jitconv.families import Extents, KernelPlan, WgmmaTile, common, pack_planes
from jitconv.layout import Field, Layout
from jitconv.problem import Problem

TEMPLATE = "conv_wgmma.cu.j2"


def cells(problem: Problem, tile: WgmmaTile) -> int:
    """Positions of x in one unit of the halo ring (WgmmaTile::CELLS in templates/device/halo_wgmma.cuh)."""
    extents = []
    for extent, k, stride, dilation in zip(
        tile.box,
        common.padded(problem.kernel_size, 1)[1:],
        common.padded(problem.stride, 1)[1:],
        common.padded(problem.dilation, 1)[1:],
        strict=True,
    ):
        step = stride if k == 1 else math.gcd(stride, dilation)
        extents.append((extent - 1) * stride // step + (0 if k == 1 else (k - 1) * dilation // step) + 1)
        spread = stride // step
    rows, columns = extents
    return rows * (-(-columns // spread) * spread)


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
            "permuted": tile.permuted,
            "threads": tile.threads,
            "blocks": tile.blocks,
            "producer_registers": producer_registers,
            "consumer_registers": consumer_registers,
        },
        "packed_words": pack_planes.lines(p, tile) * tile.parts * 4,
        "flag_words": pack_planes.flags_of_a_block(p, tile),
        "prologue": common.chain_context("prologue", enumerate(p.prologue)),
        "bias": p.bias,
        "shared_bytes": shared_bytes(kernel),
        "declarations": layout(kernel).declarations(),
        "argument_bytes": layout(kernel).size,
    }


def writes_channels_last(kernel: KernelPlan) -> bool:
    """Whether the output is dense along channels; a workspace is contiguous, whatever the output is."""
    return kernel.problem.memory_format == "channels_last" and kernel.last == len(kernel.problem.epilogue)


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
        Field("planes", "divisor"),
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
    assert isinstance(kernel.tile, WgmmaTile)
    d, h, w = extents.value[0]
    return d, -(-h // kernel.tile.box[0]), -(-w // kernel.tile.box[1])


def values(
    kernel: KernelPlan, extents: Extents, strides: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    p = kernel.problem
    d, h, w = _boxes(kernel, extents)
    return {
        "tiles": grid(kernel, extents),
        "planes": d,
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
    assert isinstance(tile, WgmmaTile)
    d, h, w = _boxes(kernel, extents)
    return extents.batch * d * h * w * p.groups * pack_planes.channel_blocks(p, tile)


def resident_blocks(kernel: KernelPlan) -> int:
    assert isinstance(kernel.tile, WgmmaTile)
    return kernel.tile.blocks


def unit_bytes(problem: Problem, tile: WgmmaTile) -> int:
    """Size of one buffer of the halo ring."""
    return tile.parts * 2 * tile.steps * cells(problem, tile) * 16


def stage_bytes(tile: WgmmaTile) -> int:
    """Size of one buffer of the weight ring."""
    return tile.stage_taps * tile.parts * 2 * tile.steps * tile.channels * 16


def shared_bytes(kernel: KernelPlan) -> int:
    """Size of Storage: both rings, their barriers and a word for each unit."""
    tile = kernel.tile
    assert isinstance(tile, WgmmaTile)
    rings = tile.units * unit_bytes(kernel.problem, tile) + tile.stages * stage_bytes(tile)
    rings = -(-(rings + 16 * (tile.units + tile.stages)) // 128) * 128
    return -(-(rings + 4 * tile.units) // 128) * 128


threads = common.tile_threads
