"""What the families share: element types, chains of steps, and the arguments of an implicit GEMM."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jitconv.families import Extents, KernelPlan, Tile
from jitconv.layout import Field
from jitconv.problem import Problem, StepSpec

#: Storage types of templates/device/numeric.cuh by torch's name of the dtype.
ELEMENT = {"float32": "float", "float16": "half_t", "bfloat16": "bfloat16_t", "float64": "double"}


def operand_name(phase: str, index: int, operand: str) -> str:
    """Name of the kernel argument that holds operand ``operand`` of step ``index`` of chain ``phase``."""
    return f"{phase}{index}_{operand}"


def chain_fields(phase: str, steps: Iterable[tuple[int, StepSpec]]) -> list[Field]:
    """The arguments that the operands of a chain need; ``steps`` are (index in the whole chain, step)."""
    fields = []
    for index, step in steps:
        for operand, spec in step.operands:
            name = operand_name(phase, index, operand)
            if spec.kind == "number":
                fields.append(Field(name, "float"))
            elif spec.kind != "value":
                fields.append(Field(name, "pointer", f"const {ELEMENT[spec.dtype or '']}"))
                if spec.kind != "scalar":
                    fields.append(Field(f"{name}_stride", "index", count=5 if spec.kind == "tensor" else 1))
    return fields


def chain_values(
    phase: str, steps: Iterable[tuple[int, StepSpec]], strides: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """Strides of the tensor operands of a chain."""
    values: dict[str, Any] = {}
    for index, step in steps:
        for operand, spec in step.operands:
            name = operand_name(phase, index, operand)
            if spec.kind == "tensor":
                values[f"{name}_stride"] = strides[name]
            elif spec.kind in ("channel", "row"):
                values[f"{name}_stride"] = strides[name][0]
    return values


def chain_context(phase: str, steps: Iterable[tuple[int, StepSpec]]) -> list[dict[str, Any]]:
    """The steps as a template sees them: expression, operands with the C++ text that reads each."""
    context = []
    for index, step in steps:
        operands = [
            {
                "name": operand,
                "kind": spec.kind,
                "argument": operand_name(phase, index, operand),
                "load": _load(operand_name(phase, index, operand), spec.kind),
            }
            for operand, spec in step.operands
        ]
        context.append(
            {
                "name": step.name,
                "needs": step.needs,
                "expression": step.cuda,
                "operands": operands,
                "attributes": step.canonical()["attributes"],
            }
        )
    return context


def _load(name: str, kind: str) -> str:
    """C++ text that reads an operand as a float at coordinate ``at``."""
    return {
        "number": f"arguments.{name}",
        "scalar": f"to_float(*arguments.{name})",
        "channel": f"to_float(arguments.{name}[at.channel * arguments.{name}_stride])",
        "row": f"to_float(arguments.{name}[at.w * arguments.{name}_stride])",
        "tensor": f"to_float(arguments.{name}[offset_of(at, arguments.{name}_stride)])",
        "value": "conv_value",
    }[kind]


def preambles(*chains: Sequence[StepSpec]) -> list[str]:
    """Device code of registered steps, each once, in order of first use."""
    texts = [step.preamble for chain in chains for step in chain if step.preamble]
    return list(dict.fromkeys(texts))


def tile_threads(kernel: KernelPlan) -> int:
    """Threads of a block where the tile says it."""
    return kernel.tile.threads


def padded(values: Sequence[int], fill: int) -> tuple[int, int, int]:
    """Per-dimension values of a 1-D, 2-D or 3-D problem as (d, h, w)."""
    full = (fill,) * (3 - len(values)) + tuple(values)
    return full[0], full[1], full[2]


def indexed(kernel: KernelPlan) -> list[tuple[int, StepSpec]]:
    """The epilogue steps of this kernel with their index in the whole epilogue."""
    return list(enumerate(kernel.problem.epilogue))[kernel.first : kernel.last]


def problem_constants(kernel: KernelPlan) -> dict[str, Any]:
    """Constants that every template gets."""
    p = kernel.problem
    return {
        "name": kernel_name(kernel),
        "label": p.label(),
        "problem": p.canonical(),
        "rank": p.rank,
        "index_bits": p.index_bits,
        "source": ELEMENT[kernel.source_dtype],
        "target": ELEMENT[kernel.target_dtype],
        "preambles": preambles(p.prologue, p.between, kernel.steps),
        "epilogue": chain_context("epilogue", indexed(kernel)),
    }


def kernel_name(kernel: KernelPlan) -> str:
    """The symbol in the cubin, which a profiler shows: says what the kernel does, as far as it fits."""
    p = kernel.problem
    if kernel.family in ("pack_weights", "pack_planes"):
        parts = ["jitconv_pack_weights", f"c{p.in_channels}k{p.out_channels}", f"t{p.taps}", p.dtype, p.precision]
    elif kernel.family in ("layer_norm", "pool"):
        parts = ["jitconv", *(step.name for step in kernel.steps), kernel.target_dtype]
    else:
        parts = ["jitconv", p.label()]
        if kernel.last < len(p.epilogue):
            label = [step.name for step in p.epilogue]
            parts = ["jitconv", p.label().replace("_".join(["", *label]), "_".join(["", *label[: kernel.last]]))]
    return "_".join(parts)[:120]


def gemm_constants(kernel: KernelPlan) -> dict[str, Any]:
    """Constants of the implicit-GEMM families."""
    p, tile = kernel.problem, kernel.tile
    assert isinstance(tile, Tile)
    return {
        **problem_constants(kernel),
        "tile": {
            "positions": tile.positions,
            "channels": tile.channels,
            "depth": tile.depth,
            "px": tile.px,
            "oc_tile": tile.oc_tile,
            "threads": tile.threads,
        },
        "launch_bounds": _launch_bounds(tile),
        "kernel_size": padded(p.kernel_size, 1),
        "stride": padded(p.stride, 1),
        "dilation": padded(p.dilation, 1),
        "padding": padded([before for before, _ in p.padding], 0),
        "padding_mode": p.padding_mode.upper(),
        "x_along_k": p.x_memory_format == "channels_last",
        "prologue": chain_context("prologue", enumerate(p.prologue)),
        "shared_bytes": gemm_shared_bytes(kernel),
    }


def _launch_bounds(tile: Tile) -> str:
    """Arguments of __launch_bounds__: threads, and for narrow tiles the blocks that an SM must hold.

    Without the latter ptxas takes few accumulators for a wish for occupancy, and spills to get it.
    """
    return f"{tile.threads}, 3" if tile.px * tile.oc_tile < 64 else f"{tile.threads}"


def gemm_shared_bytes(kernel: KernelPlan) -> int:
    """Size of GemmStorage plus the position table (templates/device/implicit_gemm.cuh)."""
    tile = kernel.tile
    assert isinstance(tile, Tile)
    x_pitch = tile.positions + 4
    w_pitch = -(-tile.channels // 4) * 4 + 4
    position = 4 * kernel.problem.index_bits // 8
    return 2 * tile.depth * (x_pitch + w_pitch) * 4 + tile.positions * position


def gemm_fields(kernel: KernelPlan, *weights: str) -> list[Field]:
    """Arguments of the implicit-GEMM families; ``weights`` are the names of weight and bias pointers."""
    source, target = f"const {ELEMENT[kernel.source_dtype]}", ELEMENT[kernel.target_dtype]
    fields = [Field("x", "pointer", source)]
    fields += [Field(name, "pointer", source) for name in weights]
    fields += [
        Field("y", "pointer", target),
        Field("positions", "index"),
        Field("grid_d", "divisor"),
        Field("grid_h", "divisor"),
        Field("grid_w", "divisor"),
        Field("x_extent", "index", count=3),
        Field("x_stride", "index", count=5),
        Field("y_stride", "index", count=5),
    ]
    fields += [Field(f"{name}_stride", "index") for name in weights if name.endswith("bias")]
    fields += chain_fields("prologue", enumerate(kernel.problem.prologue))
    fields += chain_fields("between", enumerate(kernel.problem.between))
    fields += chain_fields("epilogue", indexed(kernel))
    return fields


def gemm_values(
    kernel: KernelPlan,
    extents: Extents,
    grid: tuple[int, int, int],
    strides: Mapping[str, tuple[int, ...]],
) -> dict[str, Any]:
    """Values of :func:`gemm_fields`; ``grid`` are the extents over which positions are flattened."""
    p = kernel.problem
    return {
        "positions": extents.batch * grid[0] * grid[1] * grid[2],
        "grid_d": grid[0],
        "grid_h": grid[1],
        "grid_w": grid[2],
        "x_extent": extents.x,
        "x_stride": strides["x"],
        "y_stride": strides["y"],
        **{f"{name}_stride": strides[name][0] for name in ("depthwise_bias", "bias") if name in strides},
        **chain_values("prologue", enumerate(p.prologue), strides),
        **chain_values("between", enumerate(p.between), strides),
        **chain_values("epilogue", indexed(kernel), strides),
    }


def channel_tiles(problem: Problem, tile: Tile) -> int:
    """Blocks along the output channels of one group."""
    groups = 1 if problem.operator == "depthwise_separable" else problem.groups
    return -(-(problem.out_channels // groups) // tile.channels)
