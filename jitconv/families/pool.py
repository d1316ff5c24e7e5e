"""A pool with the pointwise steps around it, behind a convolution: templates/pool.cu.j2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jitconv.families import Extents, KernelPlan, RowTile, common
from jitconv.families.rows import reads_conv_value, row_constants, row_fields, row_values
from jitconv.layout import Layout

TEMPLATE = "pool.cu.j2"


def constants(kernel: KernelPlan) -> dict[str, Any]:
    tile = kernel.tile
    assert isinstance(tile, RowTile)
    steps = common.chain_context("epilogue", common.indexed(kernel))
    pool = next(i for i, step in enumerate(steps) if step["needs"] == "window")
    return {
        **row_constants(kernel),
        "before": steps[:pool],
        "pool": steps[pool],
        "after": steps[pool + 1 :],
        "conv_value_after_pool": reads_conv_value(steps[pool + 1 :]),
        "tile": {"threads": tile.threads},
        "declarations": layout(kernel).declarations(),
        "argument_bytes": layout(kernel).size,
    }


def layout(kernel: KernelPlan) -> Layout:
    return Layout(tuple(row_fields(kernel)), kernel.problem.index_bits)


def values(
    kernel: KernelPlan, extents: Extents, strides: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    return row_values(kernel, extents, strides)


def grid(kernel: KernelPlan, extents: Extents) -> int:
    d, h, w = extents.value[kernel.last]
    total = extents.batch * kernel.problem.out_channels * d * h * w
    assert isinstance(kernel.tile, RowTile)
    return -(-total // kernel.tile.threads)


def shared_bytes(kernel: KernelPlan) -> int:
    return 0


threads = common.tile_threads
