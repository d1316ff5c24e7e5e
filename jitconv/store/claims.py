"""Claims between processes: one compiles, the others wait and then read what it published.

A claim saves work and never guards correctness, so every way to fail to get one (time limit, no
lock support, no permission) simply means "not claimed" and the caller compiles for itself.

It is an ``flock`` on a file rather than a row with a lease: the kernel releases it the moment its
process dies, however it dies, and no clock is compared between processes. ``flock`` rather than
POSIX record locks, because those vanish when any descriptor of the same file is closed.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: no claims, each process compiles for itself.
    fcntl = None  # type: ignore[assignment]

__all__ = ["claim", "remove_stale"]

_log = logging.getLogger("jitconv.store")

_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.05

# Descriptors of claims held or awaited. A forked child shares their lock with its parent and, if
# it kept them open, would go on holding the claim of a parent that was killed.
_descriptors: set[int] = set()


@contextmanager
def claim(path: Path, timeout: float) -> Iterator[bool]:
    """Hold the claim named by ``path`` (its directory must exist), waiting up to ``timeout`` s.

    Yields True when held. Yields False, never raises, when it could not be had.
    """
    owner = os.getpid()
    descriptor = _acquire(path, timeout)
    try:
        yield descriptor is not None
    finally:
        # A child forked inside the block returns through here too; the claim is its parent's.
        if descriptor is not None and os.getpid() == owner:
            _release(path, descriptor)


def remove_stale(directory: Path) -> int:
    """Remove the claim files that killed processes left behind; returns how many.

    They lock nothing; this only tidies up.
    """
    removed = 0
    for path in directory.glob("*.lock"):
        descriptor = _acquire(path, 0.0)
        if descriptor is not None:
            _release(path, descriptor)
            removed += 1
    return removed


def _acquire(path: Path, timeout: float) -> int | None:
    if fcntl is None:
        return None
    deadline = time.monotonic() + timeout
    pause = _FIRST_PAUSE_S
    while True:
        try:
            descriptor = _try_once(path)
        except OSError as error:
            _log.debug("no claim on %s: %s", path, error)
            return None
        if descriptor is not None:
            return descriptor
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            return None
        time.sleep(min(pause, remaining))
        pause = min(pause * 1.5, _LONGEST_PAUSE_S)


def _try_once(path: Path) -> int | None:
    """A locked descriptor of the file at ``path``, or None while somebody else has it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    _descriptors.add(descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The previous holder removes the file as it leaves. A lock on a removed file excludes
        # nobody who comes later, so it counts only while the path still leads to it.
        if _same_file(path, descriptor):
            return descriptor
    except BlockingIOError:
        pass
    except BaseException:
        _close(descriptor)
        raise
    _close(descriptor)
    return None


def _same_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _release(path: Path, descriptor: int) -> None:
    # Removed while still locked: a waiter then finds the path gone and starts over with a new
    # file. The other way round it could lock a file that is about to disappear.
    with suppress(OSError):
        path.unlink()
    _close(descriptor)


def _close(descriptor: int) -> None:
    _descriptors.discard(descriptor)
    os.close(descriptor)


def _close_in_child() -> None:
    for descriptor in list(_descriptors):
        with suppress(OSError):
            os.close(descriptor)
    _descriptors.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
