"""The read-write store of compiled kernels on this machine.

Nothing here makes a convolution fail that could have succeeded: a store that cannot be used
(foreign directory, read-only, disk full, locked) says so in one :class:`StoreWarning` and answers
as if it were empty. A *strict* store, for command-line tools, raises instead.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import sqlite3
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from jitconv.errors import StoreWarning
from jitconv.stats import count
from jitconv.store import fork, vetting
from jitconv.store.claims import claim, remove_stale
from jitconv.store.entry import (
    CorruptEntryError,
    Entry,
    OtherFormatError,
    check_key,
    decode,
    encode,
    metadata_json,
)
from jitconv.store.location import (
    StoreUnavailableError,
    absolute_directory,
    configured_directory,
    configured_size_limit,
    prepare_directory,
    private_subdirectory,
)
from jitconv.store.records import EntryInfo, Finding, StoreInfo

if TYPE_CHECKING:
    from jitconv.store.database import Database, Row

__all__ = ["Store"]

T = TypeVar("T")

_log = logging.getLogger("jitconv.store")

# The longest that a call waits for a lock of another process or of another thread.
CALL_DEADLINE_S = 1.0
# After a failure the store is left alone for this long: a hundred kernels that each wait a second
# for a database locked by a backup would be worse than a hundred kernels compiled.
RETRY_AFTER_S = 10.0
# Longest wait for another process that compiles the same kernel, before compiling it here.
CLAIM_TIMEOUT_S = 60.0
# Reads are noted at most this often per entry; the eviction order needs no more.
TOUCH_INTERVAL_S = 60.0

_abandoned: list[object] = []

_LOCKS = "locks"
_OPENING = "opening.lock"


class Store:
    """A store of compiled kernels in one directory, shared by processes and threads.

    Creating one touches no disk; the first use opens it.

    Args:
        directory: where it lives; default JITCONV_CACHE_DIR, else the user's cache directory.
        size_limit: bytes of payload to keep; default JITCONV_CACHE_SIZE, else 1 GiB.
        strict: raise :class:`StoreUnavailableError` instead of warning and going on without.

    Raises:
        StoreUnavailableError: no directory is given, configured, or derivable from a home.
        ValueError: JITCONV_CACHE_SIZE is no size, or ``size_limit`` is negative.
    """

    def __init__(
        self,
        directory: Path | str | None = None,
        size_limit: int | None = None,
        *,
        strict: bool = False,
    ) -> None:
        if size_limit is not None and size_limit < 0:
            raise ValueError(f"size_limit={size_limit}: expected a number of bytes, 0 or more")
        self.directory = configured_directory(os.environ) if directory is None else absolute_directory(directory)
        self.size_limit = configured_size_limit(os.environ) if size_limit is None else size_limit
        self._strict = strict
        self._lock = threading.Lock()
        self._database: Database | None = None
        self._identity: tuple[int, int] | None = None
        self._unusable: str | None = None
        self._reads_resume = 0.0
        self._writes_resume = 0.0
        self._warned: set[str] = set()
        self._loaded: set[str] = set()
        self._hits = 0
        self._misses = 0
        fork.register(self)

    @classmethod
    def open(
        cls,
        directory: Path | str | None = None,
        size_limit: int | None = None,
        *,
        strict: bool = False,
    ) -> Store:
        """A store that is open now; with ``strict``, raises if it cannot be.

        Arguments and errors as for the constructor.
        """
        store = cls(directory, size_limit, strict=strict)
        store._run(lambda database: None, None)
        return store

    # --- entries ---

    def get(self, key: str) -> Entry | None:
        """The entry stored under ``key``, verified, or None.

        A damaged entry is moved aside and counts as missing.

        Raises:
            ValueError: ``key`` is not 1 to 256 printable ASCII characters.
        """
        check_key(key)
        return self._run(lambda database: self._fetch(database, key), None)

    def put(self, key: str, entry: Entry) -> bool:
        """Store ``entry`` under ``key``, then make room if the store grew past its limit.

        Returns whether it is stored; a failure is a warning, not an error.

        Raises:
            ValueError: ``key`` as for ``get``; metadata with NaN or infinity.
            TypeError: the cubin is not bytes, or the metadata is not JSON.
        """
        payload = encode(check_key(key), entry)
        metadata = metadata_json(entry)
        if len(payload) > self.size_limit:
            _log.info(
                "kernel %s is not stored: %d bytes exceed the limit of %d (JITCONV_CACHE_SIZE)",
                key,
                len(payload),
                self.size_limit,
            )
            return False

        def publish(database: Database) -> bool:
            database.publish(key, payload, metadata)
            self._make_room(database, key)
            return True

        return self._run(publish, False, write=True)

    def remove(self, key: str) -> bool:
        """Remove the entry under ``key``; returns whether there was one."""
        check_key(key)
        return self._run(lambda database: database.remove(key), False, write=True)

    def clear(self) -> int:
        """Remove every entry, everything moved aside and stale claims; returns how many entries."""

        def empty(database: Database) -> int:
            removed = database.remove_all()
            for path in vetting.quarantined(self.directory):
                path.unlink(missing_ok=True)
            remove_stale(private_subdirectory(self.directory, _LOCKS))
            return removed

        return self._run(empty, 0, write=True)

    def keys(self) -> list[str]:
        """The keys of all entries, sorted."""
        return [info.key for info in self.entries()]

    def entries(self) -> list[EntryInfo]:
        """All entries, sorted by key, without loading their payloads.

        Rows that this library did not write are removed on the way; files they name are not.
        """
        nothing: list[Row] = []
        rows = self._run(_own_rows, nothing)
        return [
            EntryInfo(key, size, stored, read, _parsed(metadata) or {}) for key, size, stored, read, metadata in rows
        ]

    def verify(self) -> list[Finding]:
        """Read and check everything, change nothing; returns what is wrong, so [] is good."""

        def check(database: Database) -> list[Finding]:
            foreign = database.foreign_rows()
            problems = [Finding(None, f"{foreign} rows that jitconv did not write")]
            return problems[: bool(foreign)] + _defects(database)

        unchecked = [Finding(None, "the store could not be read")]
        problems = self._run(check, unchecked)
        if problems is unchecked and self._unusable is not None:
            problems = [Finding(None, self._unusable)]
        return problems + [
            Finding(None, f"moved aside earlier: {path}") for path in vetting.quarantined(self.directory)
        ]

    def mark_loaded(self, key: str) -> None:
        """Say that this process uses ``key``, so that it is the last to evict it."""
        self._loaded.add(key)

    def info(self) -> StoreInfo:
        """Where the store is, whether it can be used, and what it holds."""
        totals = self._run(lambda database: database.totals(), None)
        entries, size = totals or (0, 0)
        return StoreInfo(
            path=self.directory,
            available=totals is not None,
            reason=None if totals is not None else self._unusable or "busy or failing for now",
            entries=entries,
            size=size,
            size_limit=self.size_limit,
            hits=self._hits,
            misses=self._misses,
            loaded=len(self._loaded),
            quarantined=len(vetting.quarantined(self.directory)),
        )

    @contextlib.contextmanager
    def claim(self, key: str, timeout: float = CLAIM_TIMEOUT_S) -> Iterator[bool]:
        """Hold the right to compile ``key`` on this machine, waiting up to ``timeout`` seconds.

        Yields whether it is held. Without it the caller compiles all the same: two processes that
        compile one kernel publish the same bytes. A claim ends with its process, even a killed
        one. It does not exclude other threads of this process reliably on every system; use
        ``fetch_or_build`` for that.
        """
        path = self._claim_path(check_key(key))
        if path is None:
            yield False
        else:
            with claim(path, timeout) as held:
                yield held

    def close(self) -> None:
        """Close the database. The store opens it again when it is next used."""
        with self._lock:
            self._close_database()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- fork ---

    def stop_for_fork(self) -> bool:
        """Close the connection and keep every thread out; False if one stays in too long."""
        stopped = self._lock.acquire(timeout=CALL_DEADLINE_S)
        if stopped:
            self._close_database()
        return stopped

    def go_on_after_fork(self) -> None:
        """Let the threads in again that ``stop_for_fork`` kept out."""
        self._lock.release()

    def start_over_in_child(self) -> None:
        """Forget a connection that was in use by a thread which does not exist in this child."""
        # Kept, unused: closing it would act on locks that are still the parent's.
        _abandoned.append(self._database)
        self._database = None
        self._lock = threading.Lock()

    # --- one operation ---

    def _run(self, operation: Callable[[Database], T], default: T, *, write: bool = False) -> T:
        """``operation`` on the open database, or ``default`` when that is not possible now."""
        if self._unusable is not None:
            return self._refuse(self._unusable, default)
        if time.monotonic() < (self._writes_resume if write else self._reads_resume):
            return self._refuse(f"{self.directory} failed a moment ago", default)
        if not self._lock.acquire(timeout=CALL_DEADLINE_S):
            return self._refuse(f"{self.directory} is in use by another thread", default)
        try:
            return operation(self._current_database())
        except StoreUnavailableError as error:
            self._unusable = str(error)
            failure = str(error)
        except sqlite3.OperationalError as error:
            failure = self._suspend(error, write)
        except sqlite3.DatabaseError as error:
            failure = self._replace_database(error)
        except OSError as error:
            failure = self._suspend(error, write)
        finally:
            self._lock.release()
        count("store_errors")
        self._warn_once(failure)
        return self._refuse(failure, default)

    def _refuse(self, reason: str, default: T) -> T:
        if self._strict:
            raise StoreUnavailableError(f"kernel store: {reason}")
        return default

    def _suspend(self, error: Exception, write: bool) -> str:
        """Leave the store alone for a while; a failed write does not stop reads."""
        # Whatever happened (disk full, directory removed), the next attempt starts from the
        # checks of a fresh opening.
        self._close_database()
        self._writes_resume = time.monotonic() + RETRY_AFTER_S
        if not write:
            self._reads_resume = self._writes_resume
        return f"{self.directory}: {error}"

    def _replace_database(self, error: Exception) -> str:
        """Move a database that turned out to be damaged aside; the next call makes a new one."""
        identity = self._identity
        self._close_database()
        try:
            with self._opening():
                # Another process may have replaced it already; its new one stays.
                if vetting.database_identity(self.directory) == identity:
                    vetting.set_aside(self.directory, str(error))
        except (OSError, StoreUnavailableError) as second:
            self._unusable = f"{self.directory}: {error}; and it cannot be moved aside: {second}"
            return self._unusable
        return f"{self.directory}: {error}"

    def _warn_once(self, failure: str) -> None:
        if failure in self._warned or self._strict:
            _log.debug("kernel store: %s", failure)
            return
        self._warned.add(failure)
        warnings.warn(
            f"kernel store not used: {failure}. Kernels are kept in memory only and the next "
            "process compiles them again",
            StoreWarning,
            stacklevel=4,
        )

    # --- opening ---

    def _current_database(self) -> Database:
        # Removed or replaced since: SQLite would go on with a file that nobody else can see.
        if self._database is not None and vetting.database_identity(self.directory) != self._identity:
            self._close_database()
        if self._database is None:
            self._database = self._open_database()
        return self._database

    def _open_database(self) -> Database:
        from jitconv.store.database import Database, ForeignRowError

        prepare_directory(self.directory, os.environ)
        deadline = time.monotonic() + CALL_DEADLINE_S
        with self._opening():
            remaining = max(deadline - time.monotonic(), 0.05)
            reason = vetting.reason_to_set_aside(self.directory, remaining)
            if reason is not None:
                vetting.set_aside(self.directory, reason)
            self._identity = vetting.database_identity(self.directory)
            try:
                database = Database(self.directory, CALL_DEADLINE_S, deadline)
            except ForeignRowError as error:
                raise StoreUnavailableError(f"{self.directory}: changed while opening") from error
            self._identity = vetting.database_identity(self.directory)
        return database

    def _opening(self) -> contextlib.AbstractContextManager[bool]:
        """Keeps processes that open at once from meeting each other's schema locks, and two that
        find the same bad database from moving away the good one that replaced it."""
        return claim(private_subdirectory(self.directory, _LOCKS) / _OPENING, CALL_DEADLINE_S)

    def _close_database(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            with contextlib.suppress(sqlite3.Error):
                database.close()

    # --- parts of the operations above ---

    def _fetch(self, database: Database, key: str) -> Entry | None:
        payload = _load(database, key)
        entry = None if payload is None else self._verified(database, key, payload)
        if entry is None:
            self._misses += 1
        else:
            self._hits += 1
            database.touch_read(key, TOUCH_INTERVAL_S)
        return entry

    def _verified(self, database: Database, key: str, payload: bytes) -> Entry | None:
        try:
            return decode(key, payload)
        except OtherFormatError as error:
            _log.debug("kernel %s: %s", key, error)
        except CorruptEntryError as error:
            self._move_aside(database, key, payload, error)
        return None

    def _move_aside(self, database: Database, key: str, payload: bytes, error: CorruptEntryError) -> None:
        count("corrupt")
        kept: Path | str = "not kept"
        with contextlib.suppress(OSError, StoreUnavailableError):
            kept = vetting.quarantine_payload(self.directory, key, payload)
        _log.warning("kernel %s in %s is damaged (%s): %s", key, self.directory, error, kept)
        # It stays a miss even where it cannot be removed now.
        with contextlib.suppress(sqlite3.OperationalError):
            database.remove_payload(key, payload)

    def _make_room(self, database: Database, newest: str) -> None:
        removed = database.evict(self.size_limit, self._loaded | {newest})
        if not removed:
            return
        count("evicted", len(removed))
        _log.info(
            "kernel store %s: removed the %d least recently used kernels (%d bytes) to stay under %d bytes: %s",
            self.directory,
            len(removed),
            sum(size for _, size in removed),
            self.size_limit,
            ", ".join(key for key, _ in removed),
        )

    def _claim_path(self, key: str) -> Path | None:
        # Opening first: it is what decides whether the directory may be used at all.
        if self._run(lambda database: True, False) is not True:
            return None
        try:
            directory = private_subdirectory(self.directory, _LOCKS)
        except (OSError, StoreUnavailableError) as error:
            _log.debug("no claims in %s: %s", self.directory, error)
            return None
        return directory / f"{hashlib.sha256(key.encode()).hexdigest()[:40]}.lock"


def _load(database: Database, key: str) -> bytes | None:
    from jitconv.store.database import ForeignRowError

    try:
        return database.load(key)
    except ForeignRowError:
        _drop_foreign_rows(database)
        return None


def _drop_foreign_rows(database: Database) -> None:
    # Tidying up must not fail a look-up in a database that cannot be written now.
    with contextlib.suppress(sqlite3.OperationalError):
        dropped = database.drop_foreign_rows()
        if dropped:
            _log.warning("kernel store: dropped %d rows that jitconv did not write", dropped)


def _own_rows(database: Database) -> list[Row]:
    _drop_foreign_rows(database)
    return database.rows()


def _defects(database: Database) -> list[Finding]:
    problems = []
    for key, _, _, _, metadata in database.rows():
        payload = database.load(key)
        # Absent by now: another process evicted it.
        what = None if payload is None else _defect(key, payload, metadata)
        if what is not None:
            problems.append(Finding(key, what))
    return problems


def _defect(key: str, payload: bytes, metadata: str | None) -> str | None:
    try:
        entry = decode(key, payload)
    except CorruptEntryError as error:
        return str(error)
    if _parsed(metadata) != entry.metadata:
        return "the metadata in the index differs from the entry's own"
    return None


def _parsed(metadata: str | None) -> dict[str, Any] | None:
    try:
        value = json.loads(metadata or "")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
