"""Timing on a GPU: CUDA events, warm, interleaved, with the L2 cache flushed between runs.

A hot card is slower than a paused one, so candidates are timed in turns within one run, never one after another.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

__all__ = ["Timing", "interleaved"]

#: Larger than the L2 cache of any GPU so far (126 MB); writing it evicts what an earlier run left there.
_FLUSH_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one candidate: the median, and the 10 % and 90 % quantiles as its spread."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def interleaved(
    candidates: Mapping[str, Callable[[], object]], *, repeats: int = 20, warmup: int = 3
) -> dict[str, Timing]:
    """Time each candidate ``repeats`` times on the current stream, in turns; device time only.

    Candidates are called ``warmup`` times first, which is when they compile. Raises what a candidate raises.
    """
    for function in candidates.values():
        for _ in range(warmup):
            function()
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in candidates}
    for _ in range(repeats):
        for name, function in candidates.items():
            flush.zero_()
            pair = (_event(), _event())
            pair[0].record()
            function()
            pair[1].record()
            events[name].append(pair)
        # One wait a round: the queue stays short, and no candidate waits for the host.
        torch.cuda.synchronize()
    return {name: _summary([a.elapsed_time(b) for a, b in pairs]) for name, pairs in events.items()}


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _summary(times: list[float]) -> Timing:
    ordered = sorted(times)
    last = len(ordered) - 1
    return Timing(statistics.median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)])
