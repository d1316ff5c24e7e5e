"""What this process has done so far: compiles, cache hits, launches, and which path served a call.

``stats()`` is the user's proof that a generated kernel ran and that a second process compiled
nothing::

    jitconv.reset_stats()
    y = jitconv.conv2d(x, w)
    assert jitconv.stats().generated_calls == 1

Counting costs one uncontended lock and one dictionary add, well under a microsecond. A lock
rather than a bare ``+=``: the read-add-write of ``counts[event] += 1`` is only safe because of
where today's CPython happens to switch threads, and it loses counts on a free-threaded build.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from dataclasses import fields as dataclass_fields
from types import MappingProxyType
from typing import Any

__all__ = ["Stats", "count", "reset_stats", "stats"]


@dataclass(frozen=True)
class Stats:
    """Counters of this process at one moment, since it started or since ``reset_stats()``.

    Attributes:
        compiled: kernels compiled by NVRTC.
        store_hits: kernels found in the on-disk store.
        store_misses: kernels looked for in the on-disk store and not found.
        memory_hits: kernels found already loaded in this process.
        launches: kernel launches of generated kernels.
        generated_calls: public calls served by generated kernels.
        torch_calls: public calls served by PyTorch's own operators.
        evicted: store entries removed to stay under the size limit.
        corrupt: store entries that failed verification and were moved aside.
        store_errors: store operations that failed (locked, full, read-only, ...) and were skipped.
        torch_reasons: why PyTorch served a call ("cpu tensor", "float64", ...) and how often;
            the values add up to ``torch_calls``.
    """

    compiled: int = 0
    store_hits: int = 0
    store_misses: int = 0
    memory_hits: int = 0
    launches: int = 0
    generated_calls: int = 0
    torch_calls: int = 0
    evicted: int = 0
    corrupt: int = 0
    store_errors: int = 0
    torch_reasons: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    def as_dict(self) -> dict[str, Any]:
        """The counters as plain, JSON-serialisable values; ``torch_reasons`` as a dict."""
        counters: dict[str, Any] = {event: getattr(self, event) for event in _EVENTS}
        counters["torch_reasons"] = dict(self.torch_reasons)
        return counters

    def __str__(self) -> str:
        width = max(map(len, _EVENTS))
        lines = [f"{event:<{width}}  {getattr(self, event)}" for event in _EVENTS]
        if self.torch_reasons:
            by_count = sorted(self.torch_reasons.items(), key=lambda item: (-item[1], item[0]))
            lines.append("torch_calls by reason:")
            lines += [f"  {reason}: {times}" for reason, times in by_count]
        return "\n".join(lines)


_EVENTS = tuple(f.name for f in dataclass_fields(Stats) if f.name != "torch_reasons")

_lock = threading.Lock()
_counts: dict[str, int] = dict.fromkeys(_EVENTS, 0)
_reasons: dict[str, int] = {}


def count(event: str, n: int = 1, *, reason: str | None = None) -> None:
    """Add ``n`` to a counter. Safe from any thread.

    Args:
        event: a counter of :class:`Stats`.
        n: how many happened.
        reason: for ``"torch_calls"`` only, and required there: why PyTorch served the call.

    Raises:
        ValueError: ``event`` is not a counter, or ``reason`` is missing or out of place.
    """
    if event not in _counts:
        raise ValueError(f"event={event!r} is not counted; expected one of {', '.join(_EVENTS)}")
    if (reason is not None) != (event == "torch_calls"):
        raise ValueError(
            f"reason={reason!r} with event={event!r}: 'torch_calls' needs a reason, no other event takes one"
        )
    with _lock:
        _counts[event] += n
        if reason is not None:
            _reasons[reason] = _reasons.get(reason, 0) + n


def count_call(launches: int) -> None:
    """Count a public call served by generated kernels and its launches, at the price of one ``count()``."""
    with _lock:
        _counts["generated_calls"] += 1
        _counts["launches"] += launches


def stats() -> Stats:
    """A consistent snapshot of the counters of this process."""
    with _lock:
        return Stats(**_counts, torch_reasons=MappingProxyType(dict(_reasons)))


def reset_stats() -> None:
    """Set every counter to zero."""
    with _lock:
        _clear()


def _clear() -> None:
    _counts.update(dict.fromkeys(_EVENTS, 0))
    _reasons.clear()


def _restart_in_child() -> None:
    """Start a forked child at zero, with a lock that no vanished thread can be holding."""
    global _lock
    _lock = threading.Lock()
    _clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_restart_in_child)
