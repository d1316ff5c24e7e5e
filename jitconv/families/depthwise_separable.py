"""Depthwise then pointwise convolution in one kernel: templates/depthwise_separable.cu.j2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jitconv.families import Extents, KernelPlan, Tile, common
from jitconv.layout import Field, Layout

TEMPLATE = "depthwise_separable.cu.j2"


def constants(kernel: KernelPlan) -> dict[str, Any]:
    p, tile = kernel.problem, kernel.tile
    assert isinstance(tile, Tile)
    return {
        **common.gemm_constants(kernel),
        "mid_channels": p.mid_channels,
        "multiplier": p.mid_channels // p.in_channels,
        "out_channels": p.out_channels,
        "channel_tiles": common.channel_tiles(p, tile),
        "bias": p.bias,
        "mid_bias": p.mid_bias,
        "between": common.chain_context("between", enumerate(p.between)),
        "declarations": layout(kernel).declarations(),
        "argument_bytes": layout(kernel).size,
    }


def layout(kernel: KernelPlan) -> Layout:
    fields = common.gemm_fields(kernel, "depthwise_weight", "depthwise_bias", "weight", "bias")
    fields += [
        Field("depthwise_weight_stride", "index", count=5),
        Field("weight_stride", "index", count=5),
    ]
    return Layout(tuple(fields), kernel.problem.index_bits)


def values(
    kernel: KernelPlan, extents: Extents, strides: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    return {
        **common.gemm_values(kernel, extents, extents.value[0], strides),
        "depthwise_weight_stride": strides["depthwise_weight"],
        "weight_stride": strides["weight"],
    }


def grid(kernel: KernelPlan, extents: Extents) -> int:
    tile = kernel.tile
    assert isinstance(tile, Tile)
    d, h, w = extents.value[0]
    return -(-extents.batch * d * h * w // tile.positions) * common.channel_tiles(kernel.problem, tile)


shared_bytes = common.gemm_shared_bytes
threads = common.tile_threads
