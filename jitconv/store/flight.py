"""Getting a kernel with as little work as possible: one build per key, whoever asks.

1. look in the store;
2. wait for a thread of this process that is already building it;
3. claim it between processes, waiting for one that has;
4. look again, because somebody else may have published meanwhile;
5. build and publish.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from jitconv.stats import count
from jitconv.store.entry import Entry, check_key
from jitconv.store.store import CLAIM_TIMEOUT_S, Store

__all__ = ["fetch_or_build"]


class _Flight:
    """A build in progress: its thread, and how it ended once ``done`` is set."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.done = threading.Event()
        self.entry: Entry | None = None
        self.error: Exception | None = None


_lock = threading.Lock()
# By store too: a build for one store must not stand in for a publish to another.
_flights: dict[tuple[int, str], _Flight] = {}


def fetch_or_build(
    key: str,
    build: Callable[[], Entry],
    store: Store | None,
    *,
    claim_timeout: float = CLAIM_TIMEOUT_S,
) -> Entry:
    """The entry for ``key`` from ``store``, or from ``build``, which is then published.

    Threads of this process that ask for the same key share one build and its outcome; other
    processes wait up to ``claim_timeout`` seconds for this one's, then build for themselves.
    ``store=None`` shares builds between threads only. Counts ``store_hits``, ``store_misses``
    and ``compiled``, once per key fetched.

    Raises:
        RuntimeError: ``build`` asks for the key that it is building.
        Exception: whatever ``build`` raised, in every thread that waited for it.
    """
    check_key(key)
    if store is not None:
        entry = store.get(key)
        if entry is not None:
            count("store_hits")
            return entry
    while True:
        flight, ours = _board(key, store)
        if ours:
            return _lead(flight, key, build, store, claim_timeout)
        flight.done.wait()
        if flight.error is not None:
            raise flight.error
        if flight.entry is not None:
            return flight.entry
        # Its thread was interrupted (KeyboardInterrupt, SystemExit): that was not about the
        # kernel, so the next one in line takes over.


def _board(key: str, store: Store | None) -> tuple[_Flight, bool]:
    """The flight for ``key``, and whether this thread is the one that has to fly it."""
    with _lock:
        flight = _flights.get((id(store), key))
        if flight is None:
            flight = _flights[id(store), key] = _Flight()
            return flight, True
    if flight.thread == threading.get_ident():
        raise RuntimeError(f"the build of {key} asks for {key} itself")
    return flight, False


def _lead(
    flight: _Flight,
    key: str,
    build: Callable[[], Entry],
    store: Store | None,
    claim_timeout: float,
) -> Entry:
    try:
        if store is None:
            flight.entry = _build(build)
        else:
            flight.entry = _fetch_or_publish(key, build, store, claim_timeout)
        return flight.entry
    except Exception as error:
        flight.error = error
        raise
    finally:
        with _lock:
            _flights.pop((id(store), key), None)
        flight.done.set()


def _fetch_or_publish(key: str, build: Callable[[], Entry], store: Store, claim_timeout: float) -> Entry:
    with store.claim(key, claim_timeout):
        entry = store.get(key)
        if entry is not None:
            count("store_hits")
            return entry
        count("store_misses")
        entry = _build(build)
        store.put(key, entry)
        return entry


def _build(build: Callable[[], Entry]) -> Entry:
    entry = build()
    count("compiled")
    return entry


def _forget_in_child() -> None:
    """The threads that were building do not exist in a forked child: nobody may wait for them."""
    global _lock
    _lock = threading.Lock()
    _flights.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
