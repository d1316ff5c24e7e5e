"""Choosing tiles by measurement: ``jitconv tune`` and :func:`tune`.

Measuring is in :mod:`jitconv.tuning`, what is kept of it in :mod:`jitconv.planning.tuned`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jitconv.errors import JitconvError

if TYPE_CHECKING:
    from jitconv.manifest import ManifestEntry
    from jitconv.program import Call
    from jitconv.tuning import GpuModel, Result, Study

__all__ = ["exported", "tune"]

#: Opens a display for the compilation of one study, and gives what is called as each kernel ends.
Display = Callable[["Study"], Any]


def tune(
    target: str | Callable[..., Any],
    /,
    *args: Any,
    limit: int | None = None,
    repeats: int = 20,
    jobs: int | None = None,
    **kwargs: Any,
) -> list[Result]:
    """Measure the tiles that could serve a call, on the current GPU, and keep the fastest for this model of GPU.

    Every candidate is compiled, run on outputs full of NaN and compared with torch in float64; those that are right
    are timed in turns. A tile that beats the heuristic's choice by more than 2 % goes into the user's store, and the
    next plan for the same problem on the same model takes it, in this process too.

    Args:
        target: a manifest or an entry of one (``"headline"``, ``"shapes.toml:block"``), run on random tensors; or a
            public function of jitconv, followed by the arguments of the call, its tensors on the GPU.
        limit: measure at most so many candidates, the likeliest first; default: all.
        repeats: times that each candidate in reach of the best is timed.
        jobs: compilations at a time; default: one per core.

    Returns:
        For each problem its candidates with their times, errors and states, and the ``winner``.

    Raises:
        DriverNotFoundError: there is no GPU that jitconv has kernels for.
        ManifestError: the manifest or the entry is none.
        JitconvError: the call is served by torch, launches nothing, or does not fit the GPU's memory.
        StoreUnavailableError: the winner cannot be stored.
        ValueError: ``limit``, ``repeats`` or ``jobs`` is not positive. Also whatever the call itself would raise.
    """
    for name, value in (("limit", limit), ("repeats", repeats), ("jobs", jobs)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value}: expected 1 or more")
    from jitconv.tuning import current_gpu

    gpu = current_gpu()
    check_store()
    if isinstance(target, str):
        if args or kwargs:
            raise TypeError(f"tune({target!r}): an address takes no arguments of a call")
        from jitconv.manifest import select

        return list(results(select(target), gpu, limit=limit, repeats=repeats, jobs=jobs))
    from jitconv.calls import call_of

    call = call_of(target, *args, **kwargs)
    return [_one(call.function, call, gpu, limit, repeats, jobs, None)]


def results(
    entries: list[ManifestEntry],
    gpu: GpuModel,
    *,
    limit: int | None = None,
    repeats: int = 20,
    jobs: int | None = None,
    display: Display | None = None,
) -> Iterator[Result]:
    """Measure one entry after the other and keep each winner; arguments and errors as for :func:`tune`."""
    import torch

    from jitconv.tuning import random_tensors

    # Every entry is looked at before the first is measured: a mistake should not wait for that.
    for entry in entries:
        entry.call()
    for entry in entries:
        device = device_of(gpu)
        try:
            call = entry.call(random_tensors(device))
        except torch.OutOfMemoryError as error:
            raise JitconvError(
                f"{entry.address}: its tensors do not fit the memory of {gpu.name}: name a smaller batch; its kernels "
                "are the same"
            ) from error
        yield _one(entry.address, call, gpu, limit, repeats, jobs, display)


def check_store() -> None:
    """Raise StoreUnavailableError where no winner could be kept: better before the measurement than after it."""
    from jitconv.store import Store

    Store.open(strict=True).close()


def device_of(gpu: GpuModel) -> Any:
    """The torch.device of ``gpu``."""
    import torch

    return torch.device("cuda", gpu.ordinal)


def _one(
    title: str,
    call: Call,
    gpu: GpuModel,
    limit: int | None,
    repeats: int,
    jobs: int | None,
    display: Display | None,
) -> Result:
    from jitconv import fast_path, functional, runtime, tuning

    reason = functional.torch_path_reason(call)
    if reason is not None:
        raise JitconvError(f"{title}: torch serves this call ({reason}), so there are no tiles to choose from")
    plan = tuning.study(title, call, gpu, limit=limit)
    if display is None:
        compiled = tuning.compile_all(plan, workers=jobs)
    else:
        with display(plan) as progress:
            compiled = tuning.compile_all(plan, workers=jobs, progress=progress)
    result = tuning.keep(tuning.measure(plan, compiled, repeats=repeats), compiled, plan)
    # Calls that were prepared before must not go on with the tile that lost.
    runtime.forget()
    fast_path.forget()
    return result


def exported(gpu: GpuModel, path: Path) -> int:
    """Write what is known of this model of GPU, as it is shipped, to ``path``; how many records.

    That is what jitconv ships for it, in which the user's own records replace those of the same problem; records of a
    problem for which the heuristic's tile won are left out.
    """
    from jitconv.planning import tuned

    records: dict[str, tuned.Record] = {}
    for table in (tuned.shipped(gpu.name), tuned.stored(gpu.name)):
        if table is not None and table.arch == gpu.arch:
            records.update(table.records)
    better = {name: r for name, r in records.items() if r.milliseconds < r.heuristic_milliseconds}
    try:
        path.write_text(tuned.table_text(tuned.Table(gpu.name, gpu.arch, better)), encoding="utf-8")
    except OSError as error:
        raise JitconvError(f"--export {path}: cannot be written: {error.strerror}") from error
    return len(better)
