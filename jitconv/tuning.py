"""Measuring the tiles of a problem on the GPU.

::

    study ─► compile_all ─► measure ─► keep
    tiles    in parallel    each checked against float64, then timed in turns    the winner, in the user's store

What is timed is the whole call, the packing of weights and the kernels behind the convolution included: that is what a
caller waits for.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from jitconv import launch, program, reference
from jitconv.compilation import compile_kernel, key_of
from jitconv.errors import DriverNotFoundError, JitconvError
from jitconv.families import HaloTile, KernelPlan, Tile, WgmmaTile, common, family
from jitconv.machine import cores, gpus
from jitconv.planning import ConvolutionTile, candidates, tuned
from jitconv.planning.selection import identity
from jitconv.problem import Problem, canonical_json
from jitconv.program import Call, KernelLaunch, Program
from jitconv.render import source_digests
from jitconv.runtime import arguments
from jitconv.store import Entry, default_store, fetch_or_build
from jitconv.timing import Timing, interleaved
from jitconv.warm import Job, Outcome

__all__ = ["Result", "Row", "Study", "compile_all", "current_gpu", "keep", "measure", "study", "words"]

#: How much faster than the heuristic's tile another one must be to be kept: less is noise of a GPU's clock.
_WORTH_KEEPING = 1.02

#: A first look at all of them, then the full number of repeats for those that can still win.
_FIRST_LOOK = 3
_IN_REACH = 1.25
_MOST_FINALISTS = 8

#: Elements of the output that are compared at once: eight bytes each, several times over.
_COMPARED = 1 << 25

#: Largest relative L2 error against float64, and what an element's own error may be: so many times its value plus so
#: many times the root mean square of all. Sums of thousands of products are good to a few 1e-7 in fp32; of operands
#: rounded to TF32, whose steps are 2^-11, to a few 1e-4; the output's own rounding is 2^-12 or 2^-9 on top.
_LIMITS = {
    "ieee": (1e-5, 1e-4, 1e-4),
    "tf32": (1e-3, 1e-2, 2e-2),
    "float16": (1e-3, 2e-3, 1e-3),
    "bfloat16": (8e-3, 1.6e-2, 1e-3),
}


@dataclass(frozen=True)
class GpuModel:
    """The GPU that is measured on: torch's ordinal, the model's name as torch says it, and its architecture."""

    ordinal: int
    name: str
    arch: str


@dataclass(frozen=True, eq=False)
class Study:
    """What will be measured: ``programs`` of one call, one for each of ``tiles``, the heuristic's first.

    ``jobs`` are their kernels, each once.
    """

    title: str
    call: Call
    gpu: GpuModel
    tiles: tuple[ConvolutionTile, ...]
    programs: tuple[Program, ...]
    jobs: tuple[Job, ...]

    @property
    def problem(self) -> Problem:
        """The problem whose tile is in question."""
        return self.programs[0].problem


@dataclass(frozen=True)
class Row:
    """What became of one candidate.

    ``state``: ``ok``; ``wrong`` (it disagrees with float64) and ``failed`` (it does not compile or load) with a
    ``reason``: both are faults of jitconv. ``error`` is the relative L2 error against float64; ``timing`` is None
    unless it is ok.
    """

    tile: ConvolutionTile
    state: str
    error: float = math.nan
    timing: Timing | None = None
    reason: str = ""


@dataclass(frozen=True)
class Result:
    """The candidates of one problem, measured, the heuristic's own first.

    ``stored``: the user's store now holds the winner for this problem.
    """

    title: str
    problem: Problem
    gpu: GpuModel
    rows: tuple[Row, ...]
    stored: bool = False

    @property
    def heuristic(self) -> Row:
        """The tile that is taken without a measurement."""
        return self.rows[0]

    @property
    def fastest(self) -> Row | None:
        """The fastest tile that is right, None where none is."""
        timed = [row for row in self.rows if row.timing is not None]
        return min(timed, key=_median, default=None)

    @property
    def winner(self) -> Row | None:
        """The tile to take: the fastest, unless the heuristic's own is as good as that."""
        best = self.fastest
        if best is None or self.heuristic.timing is None:
            return best
        return best if _median(self.heuristic) > _WORTH_KEEPING * _median(best) else self.heuristic

    @property
    def behind(self) -> float | None:
        """Time of the heuristic's tile over that of the fastest one; None where either was not timed."""
        best = self.fastest
        if best is None or self.heuristic.timing is None:
            return None
        return _median(self.heuristic) / _median(best)

    @property
    def faults(self) -> tuple[str, ...]:
        """What is wrong with candidates, in words."""
        return tuple(
            f"{self.title}: {words(row.tile)}: {row.reason}; please report this together with 'jitconv doctor'"
            for row in self.rows
            if row.state != "ok"
        )


def _median(row: Row) -> float:
    assert row.timing is not None
    return row.timing.median


def current_gpu() -> GpuModel:
    """The current GPU of torch.

    Raises DriverNotFoundError where there is none that jitconv has kernels for.
    """
    found = gpus()
    gpu = found[torch.cuda.current_device()] if found else None
    if gpu is None or gpu.arch is None:
        what = "no GPU that torch can use" if gpu is None else f"{gpu.name}, which jitconv has no kernels for"
        raise DriverNotFoundError(
            f"tune: this machine has {what}: tiles are measured on the GPU that the kernels will run on; "
            "'jitconv warm' compiles without one"
        )
    return GpuModel(gpu.ordinal, gpu.name, gpu.arch)


# ---- what is measured ---------------------------------------------------------------------------------------------


def study(title: str, call: Call, gpu: GpuModel, *, limit: int | None = None) -> Study:
    """The tiles in question for ``call``, whose tensors are on ``gpu``; at most ``limit`` of them.

    Raises JitconvError for a call that launches nothing.
    """
    first = program.build(call, gpu.arch)
    if not all(step.grid for step in first.launches):
        raise JitconvError(f"{title}: the output of shape {tuple(first.shape)} has no elements: nothing can be timed")
    tiles = candidates(first.problem, gpu.arch)[:limit]
    programs = tuple(program.build(call, gpu.arch, tile=tile) for tile in tiles)
    jobs: dict[str, Job] = {}
    for built in programs:
        for step in built.launches:
            key = key_of(step.kernel, gpu.arch)
            jobs.setdefault(key, Job(key, step.kernel, gpu.arch, (title,)))
    return Study(title, call, gpu, tuple(tiles), programs, tuple(jobs.values()))


def random_tensors(device: torch.device) -> Callable[[str, tuple[int, ...], torch.dtype], Tensor]:
    """A maker of tensors for a manifest's entry: each element at random, so that a misplaced one shows."""
    generator = torch.Generator(device).manual_seed(0)

    def make(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        values = torch.rand(shape, dtype=dtype, device=device, generator=generator)
        if "[" in name:
            # An operand of a step may be a divisor.
            return values.add_(0.5)
        values = values.mul_(2).sub_(1)
        fan_in = math.prod(shape[1:])
        return values.div_(fan_in**0.5) if "weight" in name and fan_in else values

    return make


# ---- compiling ----------------------------------------------------------------------------------------------------


def compile_all(
    plan: Study, *, workers: int | None = None, progress: Callable[[Outcome], None] | None = None
) -> dict[str, Entry | JitconvError]:
    """Every kernel of the study by its key, compiled in ``workers`` threads (default: one per core), or the error.

    What the store has is taken from there. What is compiled here is not put there: most of it loses.
    """
    found: dict[str, Entry | JitconvError] = {}
    with ThreadPoolExecutor(max_workers=workers or cores(), thread_name_prefix="jitconv-tune") as pool:
        pending = [pool.submit(_compiled, job) for job in plan.jobs]
        try:
            for future in as_completed(pending):
                outcome, made = future.result()
                found[outcome.job.key] = made
                if progress is not None:
                    progress(outcome)
        except BaseException:
            # Ctrl-C: those that have not begun need not begin.
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return found


def _compiled(job: Job) -> tuple[Outcome, Entry | JitconvError]:
    name = common.kernel_name(job.kernel)
    store = default_store()
    entry = None if store is None else store.get(job.key)
    state = "compiled" if entry is None else "warm"
    try:
        entry = entry or fetch_or_build(job.key, lambda: compile_kernel(job.kernel, job.arch), None)
    except JitconvError as error:
        return Outcome(job, "failed", name, 0.0, error=error), error
    said = entry.metadata
    spills = said["spill_stores"] + said["spill_loads"]
    return Outcome(job, state, name, said["compile_ms"], said["registers"], spills), entry


# ---- running ------------------------------------------------------------------------------------------------------


class Runner:
    """One program of a call, loaded on the GPU, its argument bytes complete: calling it only launches.

    ``buffers`` are the outputs and workspaces that runners share; they run one after the other.
    """

    def __init__(
        self, call: Call, built: Program, entries: Sequence[Entry], gpu: GpuModel, buffers: dict[Any, Tensor]
    ) -> None:
        tensors, numbers = call.tensors(), call.numbers()
        self._loaded: list[launch.LoadedKernel] = []
        self._launches: list[tuple[int, int, bytes]] = []
        self._written: list[Tensor] = []
        self._ordinal = gpu.ordinal
        multiprocessors = launch.device_info(gpu.ordinal).sm_count
        try:
            for step, entry in zip(built.launches, entries, strict=True):
                tensors[step.writes] = out = _buffer(step, call.x.device, buffers)
                self._written.append(out)
                self._loaded.append(
                    launch.load(
                        entry.cubin, entry.metadata["name"], device=gpu.ordinal, shared_bytes=step.shared_bytes,
                        arch=gpu.arch,
                    )
                )  # fmt: skip
                blocks = step.blocks(multiprocessors)
                self._launches.append((blocks, step.block, arguments(step, tensors, numbers)))
        except BaseException:
            self.unload()
            raise
        # Addresses in the argument bytes keep nothing alive.
        self._tensors = tensors

    @property
    def output(self) -> Tensor:
        """What the last kernel writes."""
        return self._written[-1]

    def poison(self) -> None:
        """Fill outputs and workspaces with NaN, so that an element that no thread writes shows."""
        for tensor in self._written:
            tensor.fill_(torch.nan)

    def __call__(self) -> None:
        stream = launch.current_stream(self._ordinal)
        for kernel, (blocks, block, data) in zip(self._loaded, self._launches, strict=True):
            kernel.launch(blocks, block, data, stream)

    def unload(self) -> None:
        """Free the kernels; it must not be called any more."""
        for kernel in self._loaded:
            kernel.unload()


def _buffer(step: KernelLaunch, device: torch.device, buffers: dict[Any, Tensor]) -> Tensor:
    key = (step.writes, step.shape, step.dtype, step.memory_format)
    if key not in buffers:
        buffers[key] = torch.empty(step.shape, dtype=step.dtype, device=device, memory_format=step.memory_format)
    return buffers[key]


def measure(plan: Study, compiled: Mapping[str, Entry | JitconvError], *, repeats: int = 20) -> Result:
    """Check every candidate against float64, then time those that are right, in turns, the L2 cache flushed.

    Raises JitconvError where the GPU has not enough memory for the call, or a kernel faults.
    """
    rows: list[Row] = []
    runners: dict[int, Runner] = {}
    buffers: dict[Any, Tensor] = {}
    try:
        for tile, built in zip(plan.tiles, plan.programs, strict=True):
            entries = [compiled[key_of(step.kernel, plan.gpu.arch)] for step in built.launches]
            made = _loaded(plan, built, entries, buffers)
            if isinstance(made, str):
                rows.append(Row(tile, "failed", reason=made))
                continue
            rows.append(_checked(plan, tile, made))
            if rows[-1].state == "ok":
                runners[len(rows) - 1] = made
            else:
                made.unload()
        for index, timing in _timed(runners, repeats).items():
            rows[index] = replace(rows[index], timing=timing)
    except torch.OutOfMemoryError as error:
        raise JitconvError(
            f"{plan.title}: not enough memory on {plan.gpu.name} to measure and check it: name a smaller batch; its "
            f"kernels are the same ({_first_line(error)})"
        ) from error
    finally:
        for runner in runners.values():
            runner.unload()
    return Result(plan.title, plan.problem, plan.gpu, tuple(rows))


def _loaded(
    plan: Study, built: Program, entries: Sequence[Entry | JitconvError], buffers: dict[Any, Tensor]
) -> Runner | str:
    """A runner, or why there is none."""
    usable = [entry for entry in entries if isinstance(entry, Entry)]
    if len(usable) < len(entries):
        return next(_first_line(entry) for entry in entries if isinstance(entry, JitconvError))
    try:
        return Runner(plan.call, built, usable, plan.gpu, buffers)
    except JitconvError as error:
        return _first_line(error)


def _checked(plan: Study, tile: ConvolutionTile, runner: Runner) -> Row:
    try:
        runner.poison()
        runner()
        error, excess = _deviation(plan, runner.output)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as fault:
        # After a fault the context is lost: nothing more can be measured by this process.
        raise JitconvError(
            f"{plan.title}: {words(tile)} failed on {plan.gpu.name}: {_first_line(fault)}; please report this"
        ) from fault
    limit = _LIMITS[_accuracy(plan.problem)][0]
    if error <= limit and excess <= 1:
        return Row(tile, "ok", error)
    what = f"an element is {excess:.1f} times as far off as it may be" if error <= limit else f"more than {limit:.0e}"
    return Row(tile, "wrong", error, reason=f"WRONG RESULTS: error {error:.1e} against float64, {what}")


def _timed(runners: Mapping[int, Runner], repeats: int) -> dict[int, Timing]:
    if not runners:
        return {}
    names = {str(index): runner for index, runner in runners.items()}
    first = interleaved(names, repeats=min(repeats, _FIRST_LOOK), warmup=2)
    reach = _IN_REACH * min(timing.median for timing in first.values())
    close = sorted((name for name in names if first[name].median <= reach), key=lambda name: first[name].median)
    # The heuristic's own tile is what the others are compared with.
    finalists = dict.fromkeys(["0"] * ("0" in names) + close[:_MOST_FINALISTS])
    final = interleaved({name: names[name] for name in finalists}, repeats=repeats, warmup=2)
    return {int(name): timing for name, timing in {**first, **final}.items()}


# ---- checking -----------------------------------------------------------------------------------------------------


def _accuracy(problem: Problem) -> str:
    """Which of the limits apply."""
    return problem.precision if problem.dtype == "float32" else problem.dtype


def _deviation(plan: Study, y: Tensor) -> tuple[float, float]:
    """Relative L2 error of ``y`` against float64, and the largest error of an element over what it may be."""
    _, relative, floor = _LIMITS[_accuracy(plan.problem)]
    wrong = total = excess = 0.0
    for call, where in _parts(plan.call, y.shape):
        expected, out = _exact(call), y[where]
        finite = expected.to(out.dtype).isfinite()
        if expected.shape != out.shape or not torch.equal(out.isfinite(), finite):
            return math.inf, math.inf
        zero = expected.new_zeros(())
        expected = torch.where(finite, expected, zero)
        difference = (torch.where(finite, out.double(), zero) - expected).abs_()
        size = float(expected.square().mean().sqrt())
        wrong += float(difference.square().sum())
        total += float(expected.square().sum())
        allowed = expected.abs_().mul_(relative).add_(floor * size)
        # Where nothing but zero is right, zero over zero is.
        excess = max(excess, float((difference / allowed.clamp_(min=1e-30)).max()))
    return (math.sqrt(wrong / total) if total else math.sqrt(wrong)), excess


def _exact(call: Call) -> Tensor:
    """The same call in float64, by plain torch."""

    def doubled(tensor: Tensor | None) -> Any:
        return None if tensor is None else tensor.detach().double()

    def chain(steps: Sequence[Any]) -> list[Any]:
        return [step.with_tensors(iter([doubled(t).to(call.x.device) for t in step.tensors()])) for step in steps]

    # Another library's TF32 must not be what is compared with; float64 is not subject to it.
    with torch.no_grad():
        return reference.run(
            call.operator, doubled(call.x), [doubled(w) for w in call.weights], [doubled(b) for b in call.biases],
            call.geometry, between=chain(call.between), epilogue=chain(call.epilogue), prologue=chain(call.prologue),
        )  # fmt: skip


def _parts(call: Call, shape: Sequence[int]) -> Iterator[tuple[Call, tuple[slice, ...]]]:
    """The whole call where it is small, else its first and last sample, or slabs of those; and where they lie in y."""
    batch = shape[0]
    largest = max(math.prod(shape), call.x.numel())
    if largest <= _COMPARED:
        yield call, (slice(None),)
        return
    for sample in sorted({0, batch - 1}):
        one = _narrowed(call, shape, 0, sample, sample + 1)
        if largest // batch <= _COMPARED or not _local(call):
            yield one, (slice(sample, sample + 1),)
            continue
        length = max(1, _COMPARED * shape[2] * batch // largest)
        for first in sorted({0, (shape[2] - length) // 2, shape[2] - length}):
            last = first + length
            yield _slab(one, shape, first, last), (slice(sample, sample + 1), slice(None), slice(first, last))


def _local(call: Call) -> bool:
    """Whether a slab of the output, along the first spatial axis, depends on a slab of x alone."""
    steps = (*call.between, *call.epilogue)
    return (
        call.operator != "conv_transpose"
        and not call.prologue
        and call.geometry.rank > 1
        and call.geometry.padding_mode == "zeros"
        and not any(step.needs == "window" for step in steps)
    )


def _slab(call: Call, shape: Sequence[int], first: int, last: int) -> Call:
    """The call that computes positions [first, last) of the first spatial axis of the output."""
    g, extent = call.geometry, call.x.shape[2]
    start = first * g.stride[0] - g.padding[0][0]
    end = (last - 1) * g.stride[0] + g.dilation[0] * (g.kernel_size[0] - 1) + 1 - g.padding[0][0]
    inside = slice(max(start, 0), max(min(end, extent), max(start, 0)))
    padding = ((inside.start - start, end - inside.stop), *g.padding[1:])
    narrowed = _narrowed(call, shape, 2, first, last)
    return replace(narrowed, x=call.x[:, :, inside], geometry=replace(g, padding=padding))


def _narrowed(call: Call, shape: Sequence[int], axis: int, first: int, last: int) -> Call:
    """The call for [first, last) of one axis of the value: its tensor operands narrowed, and x along the batch."""

    def narrow(tensor: Tensor) -> Tensor:
        at = axis - len(shape) + tensor.dim()
        # An operand that broadcasts along this axis stays whole.
        return tensor.narrow(at, first, last - first) if at >= 0 and tensor.shape[at] > 1 else tensor

    def chain(steps: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(step.with_tensors(iter([narrow(t) for t in step.tensors()])) for step in steps)

    narrowed = replace(call, between=chain(call.between), epilogue=chain(call.epilogue))
    if axis == 0:
        narrowed = replace(narrowed, x=narrow(call.x), prologue=chain(call.prologue))
    return narrowed


# ---- keeping ------------------------------------------------------------------------------------------------------


def keep(result: Result, compiled: Mapping[str, Entry | JitconvError], plan: Study) -> Result:
    """Put the winner into the user's store where the next plan would take another tile; and its kernels, compiled.

    Raises StoreUnavailableError when the store cannot be used.
    """
    winner = result.winner
    if winner is None or winner.timing is None:
        return result
    name, arch, gpu = tuned.described(result.problem), result.gpu.arch, result.gpu.name
    table = tuned.shipped(gpu)
    ours = table.records.get(name) if table is not None and table.arch == arch else None
    by_default = identity(result.heuristic.tile) if ours is None else ours.tile
    stored = identity(winner.tile) != by_default
    if stored:
        heuristic = result.heuristic.timing or winner.timing
        built = plan.programs[plan.tiles.index(winner.tile)]
        record = tuned.Record(
            name, identity(winner.tile), round(winner.timing.median, 4), round(heuristic.median, 4),
            templates_digest([step.kernel for step in built.launches]),
        )  # fmt: skip
        tuned.put(gpu, arch, record)
    else:
        # An earlier measurement that says otherwise is superseded.
        tuned.remove(gpu, arch, name)
    _publish(winner.tile, plan, compiled)
    return replace(result, stored=stored)


def _publish(tile: ConvolutionTile, plan: Study, compiled: Mapping[str, Entry | JitconvError]) -> None:
    store = default_store()
    for step in plan.programs[plan.tiles.index(tile)].launches if store is not None else ():
        key = key_of(step.kernel, plan.gpu.arch)
        entry = compiled[key]
        if store is not None and isinstance(entry, Entry) and store.get(key) is None:
            store.put(key, entry)


def templates_digest(kernels: Sequence[KernelPlan]) -> str:
    """A digest of the sources of the convolution's own kernels: what a measurement was made with."""
    sources = {}
    for kernel in kernels:
        if kernel.family not in ("layer_norm", "pool"):
            template = family(kernel).TEMPLATE
            sources[template] = source_digests(template)
    return hashlib.sha256(canonical_json(sources).encode()).hexdigest()[:16]


# ---- words --------------------------------------------------------------------------------------------------------


def words(tile: ConvolutionTile) -> str:
    """A tile for people: what distinguishes it among the candidates of one problem."""
    if isinstance(tile, Tile):
        return f"FFMA {tile.positions} × {tile.channels}, {tile.px}×{tile.oc_tile} a thread"
    box = "×".join(map(str, tile.box))
    if isinstance(tile, HaloTile):
        warps = f"{tile.channel_warps}×{tile.position_warps}+{tile.producers} warps"
        blocks = "2 blocks" if tile.blocks == 2 else f"{tile.blocks} block"
        return f"mma {box} × {tile.channels}, {warps}, {blocks}, steps {tile.steps}"
    assert isinstance(tile, WgmmaTile)
    rows = "channels" if tile.channel_rows else "positions"
    groups = f"{tile.channel_groups}×{tile.position_groups} groups"
    blocks = "2 blocks" if tile.blocks == 2 else f"{tile.blocks} block"
    shape = f"wgmma {box} × {tile.channels}, {rows} as rows, N {tile.columns}"
    marching = ", marching" if tile.march else ""
    return f"{shape}, {groups}, {blocks}, steps {tile.steps}{marching}"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
