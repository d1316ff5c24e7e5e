"""What the kernels behind a convolution share: they read a workspace and write the next tensor.

The workspace is float32, contiguous NC(D)HW, so that nothing is rounded before the end of the chain.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jitconv.families import Extents, KernelPlan, common
from jitconv.layout import Field


def row_constants(kernel: KernelPlan) -> dict[str, Any]:
    window = next(
        (step.attribute("window") for step in kernel.steps if step.needs == "window"), (1, 1, 1)
    )
    return {
        **common.problem_constants(kernel),
        "channels": kernel.problem.out_channels,
        "window": common.padded(window, 1),
        "conv_value": kernel.conv_value,
    }


def reads_conv_value(steps: Iterable[Mapping[str, Any]]) -> bool:
    """Whether one of ``steps``, as a template sees them, has the convolution's own value as an operand."""
    return any(operand["kind"] == "value" for step in steps for operand in step["operands"])


def row_fields(kernel: KernelPlan) -> list[Field]:
    return [
        Field("x", "pointer", f"const {common.ELEMENT[kernel.source_dtype]}"),
        Field("conv_value", "pointer", f"const {common.ELEMENT[kernel.source_dtype]}"),
        Field("y", "pointer", common.ELEMENT[kernel.target_dtype]),
        Field("outputs", "index"),
        Field("y_d", "divisor"),
        Field("y_h", "divisor"),
        Field("y_w", "divisor"),
        Field("x_extent", "index", count=3),
        Field("x_stride", "index", count=5),
        Field("y_stride", "index", count=5),
        *common.chain_fields("epilogue", common.indexed(kernel)),
    ]


def row_values(
    kernel: KernelPlan, extents: Extents, strides: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    d, h, w = extents.value[kernel.last]
    # layer_norm counts rows, pool counts elements; the divisor by w serves the latter.
    outputs = extents.batch * kernel.problem.out_channels * d * h
    return {
        "outputs": outputs * (w if kernel.family == "pool" else 1),
        "y_d": d,
        "y_h": h,
        "y_w": w,
        "x_extent": extents.value[kernel.first],
        "x_stride": strides["x"],
        "y_stride": strides["y"],
        **common.chain_values("epilogue", common.indexed(kernel), strides),
    }
