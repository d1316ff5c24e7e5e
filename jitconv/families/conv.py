"""Forward convolution (fprop) as an implicit GEMM: templates/conv.cu.j2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jitconv.families import Extents, KernelPlan, Tile, common
from jitconv.layout import Field, Layout

TEMPLATE = "conv.cu.j2"


def constants(kernel: KernelPlan) -> dict[str, Any]:
    p, tile = kernel.problem, kernel.tile
    assert isinstance(tile, Tile)
    return {
        **common.gemm_constants(kernel),
        "group_channels": p.in_channels // p.groups,
        "group_outputs": p.out_channels // p.groups,
        "groups": p.groups,
        "channel_tiles": common.channel_tiles(p, tile),
        "bias": p.bias,
        "declarations": layout(kernel).declarations(),
        "argument_bytes": layout(kernel).size,
    }


def layout(kernel: KernelPlan) -> Layout:
    fields = common.gemm_fields(kernel, "weight", "bias")
    return Layout((*fields, Field("weight_stride", "index", count=5)), kernel.problem.index_bits)


def values(
    kernel: KernelPlan, extents: Extents, strides: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    return {
        **common.gemm_values(kernel, extents, extents.value[0], strides),
        "weight_stride": strides["weight"],
    }


def grid(kernel: KernelPlan, extents: Extents) -> int:
    tile = kernel.tile
    assert isinstance(tile, Tile)
    d, h, w = extents.value[0]
    position_tiles = -(-extents.batch * d * h * w // tile.positions)
    return position_tiles * kernel.problem.groups * common.channel_tiles(kernel.problem, tile)


shared_bytes = common.gemm_shared_bytes
threads = common.tile_threads
