"""Compiling kernels ahead of time, with or without a GPU: entries × architectures → the store.

Kernels that several entries share are compiled once. NVRTC releases the GIL, so threads are enough.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from jitconv.errors import JitconvError
from jitconv.machine import cores

if TYPE_CHECKING:
    from jitconv.families import KernelPlan
    from jitconv.manifest import ManifestEntry
    from jitconv.store import Entry, Store

__all__ = ["Job", "Outcome", "Report", "fetch", "jobs_of", "warm"]


@dataclass(frozen=True)
class Job:
    """One kernel to have in the store, and the addresses of the entries that need it.

    ``gpus``: the models of GPU whose tuned tile it has; empty where the heuristic's has it too.
    """

    key: str
    kernel: KernelPlan
    arch: str
    addresses: tuple[str, ...]
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What became of a job.

    ``state`` is ``compiled``, ``warm`` (it was in the store), or ``failed`` with ``error``. ``name`` is the kernel's
    symbol, ``milliseconds`` the time this job took, ``registers`` per thread and ``spills`` in bytes.
    """

    job: Job
    state: str
    name: str
    milliseconds: float
    registers: int = 0
    spills: int = 0
    error: JitconvError | None = None


@dataclass(frozen=True)
class Report:
    """The outcomes in the order of the jobs, and the wall time in seconds."""

    outcomes: tuple[Outcome, ...]
    seconds: float

    def count(self, state: str) -> int:
        """How many jobs ended in ``state``."""
        return sum(outcome.state == state for outcome in self.outcomes)

    @property
    def errors(self) -> tuple[str, ...]:
        """What went wrong, each text once: a missing compiler fails every job with the same words."""
        return tuple(dict.fromkeys(str(outcome.error) for outcome in self.outcomes if outcome.error is not None))


def jobs_of(entries: Iterable[ManifestEntry], archs: Sequence[str], gpu: str | None = None) -> list[Job]:
    """The kernels that ``entries`` need on ``archs``, each once.

    A model of GPU for which tiles were tuned runs other kernels than others of its architecture. So without ``gpu``
    these are the kernels of every model that may run them: those by heuristic, and those of each model that there are
    measurements for; with ``gpu`` (a name such as ``"NVIDIA H200"``) only what that model runs.

    Raises ManifestError for an entry that is no valid call, before anything is compiled.
    """
    from jitconv.compilation import key_of
    from jitconv.planning.tuned import known_gpus
    from jitconv.program import build

    models = {arch: [None, *known_gpus(arch)] if gpu is None else [gpu] for arch in archs}
    found: dict[str, Job] = {}
    for entry in entries:
        call = entry.call()
        for arch in archs:
            for model in models[arch]:
                built = build(call, arch, model)
                chosen = () if built.plan.tuned is None else (built.plan.tuned.gpu,)
                for step in built.launches:
                    key = key_of(step.kernel, arch)
                    known = found.get(key, Job(key, step.kernel, arch, (), chosen))
                    addresses = tuple(dict.fromkeys((*known.addresses, entry.address)))
                    gpus = tuple(dict.fromkeys((*known.gpus, *chosen))) if known.gpus and chosen else ()
                    found[key] = replace(known, addresses=addresses, gpus=gpus)
    return list(found.values())


def warm(
    jobs: Sequence[Job],
    store: Store,
    *,
    workers: int | None = None,
    progress: Callable[[Outcome], None] | None = None,
) -> Report:
    """Have every kernel of ``jobs`` in ``store``, compiling those that are not.

    A kernel that cannot be compiled fails alone: the others are still compiled. ``workers`` is the number of
    compilations at a time (default: one per core); ``progress`` is called in this thread as each job ends.

    Raises StoreUnavailableError when a strict ``store`` cannot be used.
    """
    started = time.perf_counter()
    outcomes: dict[str, Outcome] = {}
    with ThreadPoolExecutor(max_workers=workers or cores(), thread_name_prefix="jitconv-warm") as pool:
        pending: list[Future[Outcome]] = [pool.submit(_do, job, store) for job in jobs]
        try:
            for future in as_completed(pending):
                outcome = future.result()
                outcomes[outcome.job.key] = outcome
                if progress is not None:
                    progress(outcome)
        except BaseException:
            # Ctrl-C, or a store that failed: those that have not begun need not begin.
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    _check_kept(outcomes, store)
    return Report(tuple(outcomes[job.key] for job in jobs), time.perf_counter() - started)


def fetch(key: str, kernel: KernelPlan, arch: str, store: Store | None) -> tuple[Entry, bool]:
    """The kernel that ``key`` names, and whether it had to be compiled for that."""
    from jitconv.compilation import compile_kernel
    from jitconv.store import fetch_or_build

    compiled = False

    def build() -> Entry:
        nonlocal compiled
        compiled = True
        return compile_kernel(kernel, arch)

    return fetch_or_build(key, build, store), compiled


def _do(job: Job, store: Store) -> Outcome:
    from jitconv.families.common import kernel_name
    from jitconv.store import StoreUnavailableError

    started = time.perf_counter()
    name = kernel_name(job.kernel)
    try:
        entry, compiled = fetch(job.key, job.kernel, job.arch, store)
    except StoreUnavailableError:
        raise
    except JitconvError as error:
        return Outcome(job, "failed", name, _since(started), error=error)
    return Outcome(
        job,
        "compiled" if compiled else "warm",
        name,
        _since(started),
        registers=entry.metadata["registers"],
        spills=entry.metadata["spill_stores"] + entry.metadata["spill_loads"],
    )


def _since(started: float) -> float:
    return (time.perf_counter() - started) * 1e3


def _check_kept(outcomes: dict[str, Outcome], store: Store) -> None:
    """A store that is too small has thrown out what was just put in: that is a failure, not a success."""
    kept = set(store.keys())
    for key, outcome in outcomes.items():
        if outcome.state != "failed" and key not in kept:
            error = JitconvError(
                f"the store {store.directory} does not hold all of these kernels: its limit is "
                f"{store.size_limit} bytes; raise JITCONV_CACHE_SIZE (such as 4GiB) and warm again"
            )
            outcomes[key] = Outcome(outcome.job, "failed", outcome.name, outcome.milliseconds, error=error)
