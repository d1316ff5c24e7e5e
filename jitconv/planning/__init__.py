"""From a Problem to a Plan: which kernels run, with which tiles, and where the epilogue is cut.

A tile of the convolution families owns single elements. So the convolution's kernel applies the pointwise steps
up to the first one that needs a row or a window; what follows is done by generated kernels behind it, each
reading the tensor before it once and writing the next one once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from jitconv.families import KernelPlan, RowTile
from jitconv.planning.selection import FAMILIES, ConvolutionTile, candidates, heuristic_tile
from jitconv.planning.tiles import MAX_POOLED_ROW, ROW_THREADS, choose_row_tile
from jitconv.planning.tuned import Choice, choice_for
from jitconv.problem import Problem, StepSpec

__all__ = ["ConvolutionTile", "Plan", "candidates", "heuristic_tile", "plan", "plan_with_tile"]


@dataclass(frozen=True)
class Plan:
    """The kernels of one Problem, in launch order.

    Kernel i+1 reads what kernel i wrote: a float32 workspace, contiguous, of the shape that the step
    ``kernels[i].last`` sees. The last one writes the output. ``tuned`` is the measurement that chose the tile, None
    where the heuristic did.
    """

    problem: Problem
    kernels: tuple[KernelPlan, ...]
    tuned: Choice | None = None


def plan(problem: Problem, arch: str, gpu: str | None = None) -> Plan:
    """The plan for ``problem`` on ``arch``.

    Args:
        problem: what is computed.
        arch: exact name of the architecture.
        gpu: model of the GPU as torch names it (``"NVIDIA H200"``). Where a tile has been measured to be the fastest
            on that model, by ``jitconv tune`` on this machine or before this release, it is taken. Without ``gpu``,
            or without a measurement, the heuristic chooses: the same tile in every process.
    """
    choice = None if gpu is None else choice_for(problem, arch, gpu)
    return _plan(problem, arch, choice)


@lru_cache(maxsize=4096)
def _plan(problem: Problem, arch: str, choice: Choice | None) -> Plan:
    tile = heuristic_tile(problem, arch) if choice is None else choice.tile
    return replace(plan_with_tile(problem, tile), tuned=choice)


def plan_with_tile(problem: Problem, tile: ConvolutionTile) -> Plan:
    """The plan for ``problem`` whose convolution has this tile."""
    cuts = _cuts(problem.epilogue)
    uses_value = _uses_value(problem.epilogue[cuts[0] :])
    packing, computing = FAMILIES[type(tile)]
    # Sizes choose a tile, and that is all: classes that chose the same one share their kernels.
    computed = replace(problem, sizes=Problem.sizes)
    kernels = []
    if packing is not None:
        # Weights are packed alike whatever happens to x and to outputs.
        packed = replace(computed, x_vector=False, x_patches="", bias=False, prologue=(), epilogue=())
        kernels.append(KernelPlan(packing, packed, tile, 0, 0, problem.dtype, "float32"))
    for i, last in enumerate(cuts):
        first = cuts[i - 1] if i else 0
        final = i == len(cuts) - 1
        steps = problem.epilogue[first:last]
        kernels.append(
            KernelPlan(
                family=_row_family(steps) if i else computing or problem.operator,
                problem=computed,
                tile=_row_tile(steps) if i else tile,
                first=first,
                last=last,
                source_dtype=problem.dtype if i == 0 else "float32",
                target_dtype=problem.dtype if final else "float32",
                # The second kernel reads the convolution's own value as its source.
                conv_value=i > 1 and uses_value and _uses_value(steps),
            )
        )
    return Plan(problem, tuple(kernels))


def _uses_value(steps: tuple[StepSpec, ...]) -> bool:
    return any(spec.kind == "value" for step in steps for _, spec in step.operands)


def _cuts(steps: tuple[StepSpec, ...]) -> list[int]:
    """Where each kernel's steps end. The first entry belongs to the convolution's kernel."""

    def skip(at: int, need: str) -> int:
        while at < len(steps) and steps[at].needs == need:
            at += 1
        return at

    first = skip(0, "element")
    if first == len(steps):
        return [first]
    if _uses_value(steps[first:]):
        # Later kernels need the convolution's own value: the workspace must hold that, not a processed one.
        first = 0
    cuts = [first]
    at = first
    while at < len(steps):
        at = skip(at, "element")
        if at < len(steps) and steps[at].needs == "row":
            width = steps[at].attribute("width")
            behind = skip(at + 1, "element")
            pooled = behind < len(steps) and steps[behind].needs == "window"
            at = skip(behind + 1, "element") if pooled and width <= MAX_POOLED_ROW else behind
        elif at < len(steps):
            at = skip(at + 1, "element")
        cuts.append(at)
    return cuts


def _row_family(steps: tuple[StepSpec, ...]) -> str:
    return "layer_norm" if any(step.needs == "row" for step in steps) else "pool"


def _row_tile(steps: tuple[StepSpec, ...]) -> RowTile:
    norm = next((step for step in steps if step.needs == "row"), None)
    if norm is None:
        return RowTile(ROW_THREADS, 1)
    return choose_row_tile(norm.attribute("width"), pooled=any(step.needs == "window" for step in steps))
