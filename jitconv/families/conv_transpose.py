"""Transposed convolution by output parity, no zero insertion: templates/conv_transpose.cu.j2.

Per dimension, output o = q·stride + r takes filter tap k from input i = (o + padding - k·dilation) / stride,
which is an integer only for taps with k·dilation ≡ r + padding (mod stride). So each residue r, the parity class,
has its own short list of (tap, i - q), known when the kernel is generated; classes with an empty list are
the holes of stride > kernel and hold the bias alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

from jitconv.families import Extents, KernelPlan, Tile, common
from jitconv.layout import Field, Layout, divisor
from jitconv.problem import Problem

TEMPLATE = "conv_transpose.cu.j2"

#: Constant memory of a module is 64 KiB (CUDA programming guide, technical specifications), some of it the compiler's.
_MAX_CONSTANT_BYTES = 56 * 1024


def axis_classes(kernel: int, stride: int, padding: int, dilation: int) -> list[list[tuple[int, int]]]:
    """For each residue r of one axis: its taps as (k, i - q)."""
    return [
        [
            (k, (r + padding - k * dilation) // stride)
            for k in range(kernel)
            if (r + padding - k * dilation) % stride == 0
        ]
        for r in range(stride)
    ]


def parity_classes(problem: Problem) -> tuple[list[dict[str, int]], list[dict[str, int]]]:
    """The classes (residues, first tap, number of taps) and all taps, class after class."""
    axes = [
        axis_classes(k, s, before, dil)
        for k, s, before, dil in zip(
            common.padded(problem.kernel_size, 1),
            common.padded(problem.stride, 1),
            common.padded([before for before, _ in problem.padding], 0),
            common.padded(problem.dilation, 1),
            strict=True,
        )
    ]
    classes: list[dict[str, int]] = []
    taps: list[dict[str, int]] = []
    for (rd, d_taps), (rh, h_taps), (rw, w_taps) in product(*(list(enumerate(axis)) for axis in axes)):
        first = len(taps)
        for (kd, dd), (kh, dh), (kw, dw) in product(d_taps, h_taps, w_taps):
            taps.append({"kd": kd, "kh": kh, "kw": kw, "d": dd, "h": dh, "w": dw})
        count = len(taps) - first
        # A class without taps never divides; 1 keeps its Divisor valid.
        by, multiplier, shift = divisor(max(count, 1), 32)
        classes.append(
            {
                "d": rd, "h": rh, "w": rw, "first": first, "taps": count,
                "divisor": by, "multiplier": multiplier, "shift": shift,
            }
        )  # fmt: skip
    return classes, taps


def _table_space(classes: int, taps: int) -> str:
    """Where the tables live: constant memory if they fit in it, else global memory behind the L1 cache."""
    return "__constant__" if 32 * classes + 24 * taps <= _MAX_CONSTANT_BYTES else "__device__"


def constants(kernel: KernelPlan) -> dict[str, Any]:
    p, tile = kernel.problem, kernel.tile
    assert isinstance(tile, Tile)
    classes, taps = parity_classes(p)
    return {
        **common.gemm_constants(kernel),
        "group_channels": p.in_channels // p.groups,
        "group_outputs": p.out_channels // p.groups,
        "groups": p.groups,
        "channel_tiles": common.channel_tiles(p, tile),
        "bias": p.bias,
        "table_space": _table_space(len(classes), len(taps)),
        "classes": classes,
        "taps": taps,
        "declarations": layout(kernel).declarations(),
        "argument_bytes": layout(kernel).size,
    }


def layout(kernel: KernelPlan) -> Layout:
    fields = common.gemm_fields(kernel, "weight", "bias")
    fields += [Field("weight_stride", "index", count=5), Field("y_extent", "index", count=3)]
    return Layout(tuple(fields), kernel.problem.index_bits)


def _class_extents(problem: Problem, extents: Extents) -> tuple[int, int, int]:
    """Positions q per axis of a parity class: the largest class, the others mask what they lack."""
    d, h, w = (-(-o // s) for o, s in zip(extents.value[0], common.padded(problem.stride, 1), strict=True))
    return d, h, w


def values(
    kernel: KernelPlan, extents: Extents, strides: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    return {
        **common.gemm_values(kernel, extents, _class_extents(kernel.problem, extents), strides),
        "weight_stride": strides["weight"],
        "y_extent": extents.value[0],
    }


def grid(kernel: KernelPlan, extents: Extents) -> int:
    p, tile = kernel.problem, kernel.tile
    assert isinstance(tile, Tile)
    d, h, w = _class_extents(p, extents)
    position_tiles = -(-extents.batch * d * h * w // tile.positions)
    classes = 1
    for s in p.stride:
        classes *= s
    return position_tiles * p.groups * common.channel_tiles(p, tile) * classes


shared_bytes = common.gemm_shared_bytes
threads = common.tile_threads
