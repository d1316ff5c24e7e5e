"""Plans, kernels and inspections in words: what the tools print."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from jitconv.families import HaloTile, KernelPlan, RowTile, WgmmaTile
from jitconv.problem import StepSpec

if TYPE_CHECKING:
    from jitconv.inspect import Inspection, KernelInspection, KernelResources
    from jitconv.planning.tuned import Choice

__all__ = ["baked", "inspection_report", "resources_line", "size", "step_text"]

#: Families of kernels that lay out weights, of which the sizes of a call and its chains are no part.
_PACKING = ("pack_planes", "pack_weights")


def baked(kernel: KernelPlan) -> list[tuple[str, str]]:
    """The constants of a kernel, as (name, value) for people: C input channels, K output channels, and so on.

    The list that the template gets is longer.
    """
    tile = kernel.tile
    common = [("dtype", _dtypes(kernel)), ("offsets", f"{kernel.problem.index_bits}-bit")]
    steps = [("epilogue", " → ".join(map(step_text, kernel.steps)) or "none")]
    if isinstance(tile, RowTile):
        lanes = f"{tile.threads} threads, {tile.lanes} on a row" if tile.lanes > 1 else f"{tile.threads} threads"
        return [("C", str(kernel.problem.out_channels)), *steps, *common, ("tile", lanes)]
    if isinstance(tile, (HaloTile, WgmmaTile)):
        math = {"TF32": "TF32", "TF32X3": "3 TF32 products", "HALF": "fp16", "BFLOAT16": "bf16"}[tile.math]
        if kernel.family in _PACKING:
            layout = f"{tile.channels} channels"
            return [*_weights(kernel), *common, ("tile", layout), ("for", f"{math} on tensor cores")]
        box = f"box of {_by(tile.box)} positions × {tile.channels} channels, {tile.threads} threads"
        engine = "tensor cores, by warpgroups" if isinstance(tile, WgmmaTile) else "tensor cores"
        return [*_convolution(kernel), *steps, *common, ("tile", box), ("math", f"{math} on {engine}")]
    tile_text = f"{tile.positions} positions × {tile.channels} channels, slices of {tile.depth}, {tile.px} per thread"
    return [*_convolution(kernel), *steps, *common, ("tile", tile_text), ("OC_TILE", str(tile.oc_tile))]


def _weights(kernel: KernelPlan) -> list[tuple[str, str]]:
    p = kernel.problem
    sizes = [("C", str(p.in_channels)), ("K", str(p.out_channels))]
    return [*sizes, ("filter", _by(p.kernel_size)), ("groups", str(p.groups))]


def _convolution(kernel: KernelPlan) -> list[tuple[str, str]]:
    p = kernel.problem
    found = [("C", str(p.in_channels)), ("K", str(p.out_channels)), ("filter", _by(p.kernel_size))]
    if p.operator == "depthwise_separable":
        found.insert(1, ("depthwise channels", str(p.mid_channels)))
    found += [("stride", _by(p.stride)), ("padding", _padding(p.padding, p.padding_mode))]
    found.append(("dilation", _by(p.dilation)))
    if p.operator == "conv_transpose":
        found.append(("output padding", _by(p.output_padding)))
    if p.operator != "depthwise_separable":
        found.append(("groups", str(p.groups)))
    found.append(("bias", "yes" if p.bias else "no"))
    if p.between:
        found.append(("between", " → ".join(map(step_text, p.between))))
    return found


def _dtypes(kernel: KernelPlan) -> str:
    if kernel.source_dtype == kernel.target_dtype:
        return kernel.source_dtype
    return f"{kernel.source_dtype} → {kernel.target_dtype}"


def _padding(padding: Sequence[tuple[int, int]], mode: str) -> str:
    if all(before == after for before, after in padding):
        text = _by(before for before, _ in padding)
    else:
        text = " × ".join(f"({before}, {after})" for before, after in padding)
    return text if mode == "zeros" else f"{text} {mode}"


def step_text(step: StepSpec) -> str:
    """A step with the kind of each operand and its baked attributes: ``add(scalar)``, ``avg_pool(2×2×2)``."""
    inside = [kind if name == "other" else f"{name}: {kind}" for name, kind in _kinds(step)]
    for name, value in step.attributes:
        if name == "window":
            inside.append(_by(value))
        elif name == "width":
            inside.insert(0, str(value))
        elif value:
            inside.append(name)
    return f"{step.name}({', '.join(inside)})" if inside else step.name


def _kinds(step: StepSpec) -> list[tuple[str, str]]:
    return [(name, operand.kind) for name, operand in step.operands]


def _by(values: Iterable[int]) -> str:
    return "×".join(map(str, values))


def size(count: float) -> str:
    """Bytes for people: ``14.5 KiB``."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def resources_line(r: KernelResources) -> str:
    """Registers, spills and shared memory on one line."""
    spilled = r.spill_stores + r.spill_loads
    spills = f"{spilled} B of spills" if spilled else "no spills"
    return f"{r.registers} registers, {spills}, {size(r.shared_bytes)} shared"


def inspection_report(inspection: Inspection) -> str:
    """The page that ``jitconv inspect`` prints."""
    dtype = "" if inspection.problem is None else f" {inspection.problem.dtype}"
    rows = [
        ("input", f"{list(inspection.input_shape)}{dtype}"),
        ("output", f"{list(inspection.output_shape)}{dtype}"),
        ("path", _path(inspection)),
        ("arch", f"{inspection.arch} ({inspection.arch_reason})"),
        ("kernels", _count(inspection)),
        *([("weights", _frozen(inspection))] if inspection.frozen else []),
        *([("tile", _tuned(inspection.tuned))] if inspection.tuned is not None else []),
    ]
    parts = [inspection.title, _table(rows)]
    for kernel in inspection.kernels:
        parts += ["", f"kernel {kernel.index}  {kernel.name}", _table(_kernel_rows(kernel))]
    return "\n".join(parts)


def _path(inspection: Inspection) -> str:
    if inspection.path == "generated":
        return "generated kernels"
    text = f"torch ({inspection.path_reason})"
    return f"{text}; on a CUDA tensor: the kernels below" if inspection.kernels else text


def _tuned(choice: Choice) -> str:
    where = "by 'jitconv tune' on this machine" if choice.source == "store" else "before this release"
    record = choice.record
    return (
        f"tuned for {choice.gpu}: measured {where}, {record.milliseconds:g} ms against the "
        f"heuristic's {record.heuristic_milliseconds:g}"
    )


def _count(inspection: Inspection) -> str:
    count = inspection.kernel_count
    if count == 0:
        return "none: torch serves this dtype"
    return f"{count}, with a workspace of {size(inspection.workspace_bytes)}" if count > 1 else "1, no workspace"


def _frozen(inspection: Inspection) -> str:
    packing = [kernel.name for kernel in inspection.kernels if kernel.plan.family in _PACKING]
    return f"frozen: {packing[0]} runs once, not at each call" if packing else "frozen"


def _kernel_rows(kernel: KernelInspection) -> list[tuple[str, str]]:
    r = kernel.resources
    constants = ", ".join(f"{name} {value}" for name, value in baked(kernel.plan))
    origin = "found in the store; compiled" if kernel.was_stored else "compiled now"
    nvrtc = ".".join(map(str, r.nvrtc_version))
    spills = "no spills" if not r.spill_stores + r.spill_loads else (
        f"spills: {r.spill_stores} B stored, {r.spill_loads} B loaded"
    )  # fmt: skip
    return [
        ("constants", constants),
        ("run time", _run_time(kernel.plan)),
        ("launch", f"{kernel.grid} blocks × {kernel.block} threads"),
        ("registers", f"{r.registers} per thread, {spills}, {r.stack_bytes} B of stack"),
        ("shared", f"{size(r.shared_bytes)} per block"),
        ("occupancy", f"{r.blocks_per_sm} blocks per SM, {r.occupancy:.0%} of its warps"),
        ("compiler", f"{origin} by NVRTC {nvrtc} in {r.compile_ms:.0f} ms"),
        ("key", kernel.key),
    ]


def _run_time(kernel: KernelPlan) -> str:
    if kernel.family in _PACKING:
        return "strides of the weights, addresses"
    return "batch, extents, strides, addresses, numbers of the epilogue"


def _table(rows: Sequence[tuple[str, str]]) -> str:
    """Two columns; a long value continues under its own column."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(
        textwrap.fill(
            f"{name:<{width}}  {value}",
            width=110,
            initial_indent="  ",
            subsequent_indent=" " * (width + 4),
            break_long_words=False,
        )
        for name, value in rows
    )
