"""Fork: an SQLite connection must not be used, nor closed, on both sides of one.

Every store closes its connection before a fork, while no thread is in the middle of using it, and
opens another when it is next used, in the parent and in the child.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jitconv.store.store import Store

__all__ = ["register"]

_stores: weakref.WeakSet[Store] = weakref.WeakSet()
# By thread, because several may fork at once: the stores that each has stopped.
_stopped: dict[int, list[Store]] = {}


def register(store: Store) -> None:
    """Look after ``store`` at every fork for as long as it exists."""
    _stores.add(store)


def _before() -> None:
    _stopped[threading.get_ident()] = [store for store in list(_stores) if store.stop_for_fork()]


def _after_in_parent() -> None:
    for store in _stopped.pop(threading.get_ident(), []):
        store.go_on_after_fork()


def _after_in_child() -> None:
    stopped = _stopped.pop(threading.get_ident(), [])
    # What other threads had stopped is not theirs to release any more: they do not exist here.
    _stopped.clear()
    for store in list(_stores):
        if store in stopped:
            store.go_on_after_fork()
        else:
            store.start_over_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before,
        after_in_parent=_after_in_parent,
        after_in_child=_after_in_child,
    )
