"""Weights in the order in which the tensor-core kernels read them: templates/pack_weights.cu.j2.

The packed weights are a float32 tensor only in name: 32-bit words of tf32, or pairs of 16-bit numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jitconv.families import Extents, HaloTile, KernelPlan, common
from jitconv.layout import Field, Layout

TEMPLATE = "pack_weights.cu.j2"

_THREADS = 256


def constants(kernel: KernelPlan) -> dict[str, Any]:
    p, tile = kernel.problem, kernel.tile
    assert isinstance(tile, HaloTile)
    return {
        **common.problem_constants(kernel),
        "group_channels": p.in_channels // p.groups,
        "group_outputs": p.out_channels // p.groups,
        "groups": p.groups,
        "kernel_size": common.padded(p.kernel_size, 1),
        "tile": {
            "channels": tile.channels,
            "step_channels": tile.step_channels,
            "k_steps": tile.k_steps(p.in_channels // p.groups),
            "parts": tile.parts,
            "position_rows": tile.position_rows,
        },
        "declarations": layout(kernel).declarations(),
        "argument_bytes": layout(kernel).size,
    }


def layout(kernel: KernelPlan) -> Layout:
    source = f"const {common.ELEMENT[kernel.source_dtype]}"
    fields = (
        Field("weight", "pointer", source),
        Field("y", "pointer", "uint32_t"),
        Field("weight_stride", "index", count=5),
    )
    return Layout(fields, kernel.problem.index_bits)


def values(
    kernel: KernelPlan, extents: Extents, strides: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    return {"weight_stride": strides["weight"]}


def lanes(kernel: KernelPlan) -> int:
    """Threads that have words to write."""
    p, tile = kernel.problem, kernel.tile
    assert isinstance(tile, HaloTile)
    blocks = -(-(p.out_channels // p.groups) // tile.channels)
    return p.groups * blocks * tile.k_steps(p.in_channels // p.groups) * p.taps * tile.channels // 16 * 32


def words(kernel: KernelPlan) -> int:
    """Size of the packed weights in 32-bit words, flags of values that do not split included."""
    assert isinstance(kernel.tile, HaloTile)
    parts = kernel.tile.parts
    return lanes(kernel) * 4 * parts + (lanes(kernel) // 32 if parts == 2 else 0)


def grid(kernel: KernelPlan, extents: Extents) -> int:
    return -(-lanes(kernel) // _THREADS)


def threads(kernel: KernelPlan) -> int:
    return _THREADS


def shared_bytes(kernel: KernelPlan) -> int:
    return 0
