"""The store that library calls use, as the environment configures it."""

from __future__ import annotations

import atexit
import os
import threading
import warnings

from jitconv.errors import StoreWarning
from jitconv.store.location import (
    DEFAULT_SIZE_LIMIT,
    StoreUnavailableError,
    configured_size_limit,
)
from jitconv.store.store import Store

__all__ = ["default_store"]

_VARIABLES = ("JITCONV_CACHE_DIR", "JITCONV_CACHE_SIZE", "JITCONV_CACHE_TRUST", "XDG_CACHE_HOME")

_lock = threading.Lock()
_configured: tuple[str | None, ...] | None = None
_store: Store | None = None


def default_store() -> Store | None:
    """The process-wide store, or None where this user has no place for one (warned once).

    JITCONV_CACHE_DIR names its directory, JITCONV_CACHE_SIZE its limit (``2GiB``, ``500MB``, or
    bytes). Both are looked at on every call, so that a change in ``os.environ`` takes effect.
    """
    global _configured, _store
    configured = tuple(os.environ.get(name) for name in (*_VARIABLES, "HOME"))
    with _lock:
        if configured != _configured:
            if _store is not None:
                _store.close()
            _store = _make()
            _configured = configured
        return _store


def _make() -> Store | None:
    try:
        size_limit = configured_size_limit(os.environ)
    except ValueError as error:
        warnings.warn(f"{error}; using 1 GiB", StoreWarning, stacklevel=3)
        size_limit = DEFAULT_SIZE_LIMIT
    try:
        return Store(size_limit=size_limit)
    except StoreUnavailableError as error:
        warnings.warn(
            f"kernel store not used: {error}. Kernels are kept in memory only and the next process compiles them again",
            StoreWarning,
            stacklevel=3,
        )
        return None


def _close_at_exit() -> None:
    if _store is not None:
        _store.close()


def _unlock_in_child() -> None:
    global _lock
    _lock = threading.Lock()


atexit.register(_close_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock_in_child)
