"""LayerNorm over W, optionally pooled, behind a convolution: templates/layer_norm.cu.j2.

Steps: pointwise…, layer_norm, pointwise…, [pool], pointwise…
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jitconv.families import Extents, KernelPlan, RowTile, common
from jitconv.families.rows import reads_conv_value, row_constants, row_fields, row_values
from jitconv.layout import Layout

TEMPLATE = "layer_norm.cu.j2"


def constants(kernel: KernelPlan) -> dict[str, Any]:
    tile = kernel.tile
    assert isinstance(tile, RowTile)
    steps = common.chain_context("epilogue", common.indexed(kernel))
    norm = next(i for i, step in enumerate(steps) if step["needs"] == "row")
    pool = next((i for i, step in enumerate(steps) if step["needs"] == "window"), None)
    return {
        **row_constants(kernel),
        "before": steps[:norm],
        "norm": steps[norm],
        "eps": common.operand_name("epilogue", kernel.first + norm, "eps"),
        "middle": steps[norm + 1 : pool],
        "conv_value_after_norm": reads_conv_value(steps[norm + 1 : pool]),
        "conv_value_after_pool": pool is not None and reads_conv_value(steps[pool + 1 :]),
        "pool": None if pool is None else steps[pool],
        "after": [] if pool is None else steps[pool + 1 :],
        "width": steps[norm]["attributes"]["width"],
        "tile": {"threads": tile.threads, "lanes": tile.lanes, "rows": tile.threads // tile.lanes},
        "shared_bytes": shared_bytes(kernel),
        "declarations": layout(kernel).declarations(),
        "argument_bytes": layout(kernel).size,
    }


def _pooled(kernel: KernelPlan) -> bool:
    return any(step.needs == "window" for step in kernel.steps)


def layout(kernel: KernelPlan) -> Layout:
    return Layout(tuple(row_fields(kernel)), kernel.problem.index_bits)


def values(
    kernel: KernelPlan, extents: Extents, strides: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    return row_values(kernel, extents, strides)


def grid(kernel: KernelPlan, extents: Extents) -> int:
    tile = kernel.tile
    assert isinstance(tile, RowTile)
    d, h, _ = extents.value[kernel.last]
    rows = extents.batch * kernel.problem.out_channels * d * h
    return -(-rows // (tile.threads // tile.lanes))


def shared_bytes(kernel: KernelPlan) -> int:
    """Block-wide reductions need a float per warp; a pool behind the norm needs the normalised rows."""
    tile = kernel.tile
    assert isinstance(tile, RowTile)
    width = next(step.attribute("width") for step in kernel.steps if step.needs == "row")
    scratch = tile.threads // 32
    rows = tile.threads // tile.lanes * width if _pooled(kernel) else 0
    return 4 * (scratch + rows)


threads = common.tile_threads
