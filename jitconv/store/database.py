"""diskcache, held to what the store needs: bytes under text keys, bounded waits, no pickle.

What diskcache 5.6.3 does by itself, and what is done about it here:

- ``Disk.get`` unpickles keys with raw = 0, ``Disk.fetch`` values of mode 4: both refuse.
- ``Disk.fetch`` reads and ``Disk.remove`` deletes whatever a row's ``filename`` says, absolute
  paths included. Payloads are kept inside the database, so no file name is ever followed. That
  also makes a publish one transaction, which a kill cannot leave half done.
- ``Cache.__init__`` and ``reset`` turn rows of Settings into attributes and PRAGMAs: ``reset``
  takes every value from ``SETTINGS`` below instead.
- ``_sql_retry`` repeats for 60 s, ``_transact`` hides the reason of a failure behind ``Timeout``
  and leaves a transaction open when COMMIT fails, ``_con`` makes a connection per thread and
  closes the parent's one in a forked child: all four are replaced.
- ``_cull`` evicts silently in the middle of ``set``: ``cull_limit`` and ``eviction_policy`` turn
  it off, and ``evict`` here says what it removed.
- ``iterkeys``, ``clear``, ``expire``, ``check``, ``cull``, ``volume`` follow keys or file names
  of foreign rows, or remove files they do not know: not used. The statements below replace them.

Used as they are: the schema that ``__init__`` creates, ``get`` and ``set``.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn, TypeVar

import diskcache
from diskcache.core import METADATA, MODE_RAW

from jitconv.store.vetting import DATABASE

__all__ = ["Database", "ForeignRowError", "Row"]

T = TypeVar("T")

SETTINGS: dict[str, int | str] = {
    "statistics": 0,
    "tag_index": 0,
    "eviction_policy": "none",
    # Only Cache.cull would read this one; the byte cap is enforced by evict().
    "size_limit": 1 << 40,
    "cull_limit": 0,
    "sqlite_auto_vacuum": 1,
    "sqlite_cache_size": 1 << 11,
    "sqlite_journal_mode": "wal",
    # A mapped file that somebody truncates kills the process with SIGBUS; a read does not.
    "sqlite_mmap_size": 0,
    "sqlite_synchronous": 1,
    "disk_min_file_size": (1 << 31) - 1,
    "disk_pickle_protocol": 4,
}

# Not from SETTINGS: a PRAGMA that diskcache does not know as a setting.
_FIXED_PRAGMAS = ("trusted_schema = OFF", "cell_size_check = ON")

_OWN_ROW = (
    "typeof(key) = 'text' AND length(key) BETWEEN 1 AND 256"
    # Printable ASCII. GLOB stops at a NUL character, the byte count does not.
    " AND key NOT GLOB '*[^!-~]*' AND length(key) = length(CAST(key AS BLOB))"
    f" AND raw = 1 AND mode = {MODE_RAW} AND filename IS NULL AND expire_time IS NULL"
    " AND typeof(value) = 'blob'"
)

# Recording that an entry was read is worth a short wait, not a stalled call.
_TOUCH_WAIT_S = 0.05
_OPENING_WAIT_S = 0.02


class ForeignRowError(ValueError):
    """A row that this library did not write: pickled, in a file, or not bytes under a str key."""


Row = tuple[str, int, float, float, "str | None"]
"""key, payload bytes, time stored, time last read (both seconds since the epoch), metadata."""


class BytesDisk(diskcache.Disk):  # type: ignore[misc]
    """Serialisation that knows one thing: a bytes value under a str key, in the database."""

    def put(self, key: object) -> tuple[str, bool]:
        if type(key) is not str:
            raise TypeError(f"key={key!r}: expected a str")
        return key, True

    def get(self, key: object, raw: object) -> str:
        if type(key) is not str or raw != 1:
            raise ForeignRowError("the key is not text")
        return key

    def store(self, value: object, read: bool, key: object = None) -> tuple[int, int, None, memoryview]:
        if type(value) is not bytes or read:
            raise TypeError(f"value is {type(value).__name__}; expected bytes")
        return 0, MODE_RAW, None, memoryview(value)

    def fetch(self, mode: object, filename: object, value: object, read: bool) -> bytes:
        if mode != MODE_RAW or filename is not None or type(value) is not bytes or read:
            raise ForeignRowError(f"mode {mode!r}, file name {filename!r}")
        return value

    def filename(self, key: object = None, value: object = None) -> NoReturn:
        raise ForeignRowError("payloads are not kept in files")

    def remove(self, file_path: object) -> None:
        """Nothing: no row of ours has a file, and a foreign row's file is not ours to delete."""


class Database(diskcache.Cache):  # type: ignore[misc]
    """One open database, used by one thread at a time (``Store`` holds a lock around it).

    A statement waits at most ``timeout`` seconds for a lock of another process, opening waits
    until ``deadline`` (``time.monotonic``); then they raise ``sqlite3.OperationalError``.
    """

    def __init__(self, directory: Path, timeout: float, deadline: float) -> None:
        self._wait = timeout
        self._opening = True
        path = str(directory / DATABASE)
        self._connection: sqlite3.Connection | None = _until(deadline, lambda: _connect(path))
        try:
            self._open(self._connection, directory, deadline)
            self._set_wait(timeout)
        except BaseException:
            self._opening = False
            self.close()
            raise
        self._opening = False

    def _open(self, connection: sqlite3.Connection, directory: Path, deadline: float) -> None:
        """Let diskcache make its tables, in one transaction: a kill leaves all of them or none.

        diskcache also writes every setting anew. Where they are right already that is undone,
        so that a process which only reads kernels does not wait for the disk.
        """
        _until(deadline, lambda: connection.execute("BEGIN IMMEDIATE"))
        settings = _stored_settings(connection)
        schema = _schema_version(connection)
        super().__init__(str(directory), timeout=self._wait, disk=BytesDisk, **SETTINGS)
        unchanged = settings.items() >= SETTINGS.items() and schema == _schema_version(connection)
        connection.execute("ROLLBACK" if unchanged else "COMMIT")

    # --- replaced members of diskcache.Cache ---

    @property
    def _con(self) -> sqlite3.Connection:
        if self._connection is None:
            raise sqlite3.OperationalError("the database is closed")
        return self._connection

    @property
    def _sql_retry(self) -> Callable[..., sqlite3.Cursor]:
        # Called by __init__ only, which holds the lock already.
        return self._con.execute

    @contextmanager
    def _transact(
        self, retry: bool = False, filename: None = None
    ) -> Iterator[tuple[Callable[..., sqlite3.Cursor], Callable[[object], None]]]:
        connection = self._con
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield connection.execute, lambda _: None
            connection.execute("COMMIT")
        except BaseException:
            # SQLite may have rolled back by itself, when the disk is full for one.
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    def reset(self, key: str, value: object = None, update: bool = True) -> object:
        """Set the attribute ``key`` from ``SETTINGS``, whatever the table or the caller says."""
        if key in METADATA:
            value = METADATA[key]
        elif key in SETTINGS:
            value = SETTINGS[key]
        else:
            raise ForeignRowError(f"unknown setting {key!r}")
        setattr(self, key, value)
        return value

    def close(self) -> None:
        """Close the connection, for good."""
        # diskcache reopens in the middle of __init__; with the transaction open, that must not be.
        if self._opening:
            return
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    # --- what the store asks for ---

    def load(self, key: str) -> bytes | None:
        """The payload under ``key``, or None.

        Raises:
            ForeignRowError: the row is not one of ours.
        """
        payload: bytes | None = self.get(key)
        return payload

    def touch_read(self, key: str, interval: float) -> None:
        """Note that ``key`` was read, unless that was noted within ``interval`` seconds."""
        now = time.time()
        self._set_wait(_TOUCH_WAIT_S)
        # A lost note costs nothing but a less exact eviction order.
        with suppress(sqlite3.OperationalError):
            # abs(): after the clock was set back, a time in the future is as stale as an old one.
            self._con.execute(
                "UPDATE Cache SET access_time = ? WHERE key = ? AND raw = 1 AND (abs(access_time - ?) < ?) IS NOT 1",
                (now, key, now, interval),
            )
        self._set_wait(self._wait)

    def publish(self, key: str, payload: bytes, metadata: str) -> None:
        """Store ``payload`` under ``key``; ``metadata`` is kept beside it for ``rows``."""
        self.set(key, payload, tag=metadata)

    def rows(self) -> list[Row]:
        """Every entry in order of its key, without reading any payload."""
        return self._con.execute(
            "SELECT key, length(value), CAST(store_time AS REAL), CAST(access_time AS REAL),"
            f" CASE typeof(tag) WHEN 'text' THEN tag END FROM Cache WHERE {_OWN_ROW} ORDER BY key"
        ).fetchall()

    def foreign_rows(self) -> int:
        """How many rows are not ours."""
        ((number,),) = self._con.execute(f"SELECT count(*) FROM Cache WHERE ({_OWN_ROW}) IS NOT 1")
        return int(number)

    def drop_foreign_rows(self) -> int:
        """Remove the rows that are not ours, never a file they name; returns how many."""
        if not self.foreign_rows():
            return 0
        return self._con.execute(f"DELETE FROM Cache WHERE ({_OWN_ROW}) IS NOT 1").rowcount

    def totals(self) -> tuple[int, int]:
        """Number of entries and the bytes of their payloads."""
        query = f"SELECT count(*), coalesce(sum(length(value)), 0) FROM Cache WHERE {_OWN_ROW}"
        ((number, size),) = self._con.execute(query)
        return int(number), int(size)

    def evict(self, limit: int, keep: Collection[str]) -> list[tuple[str, int]]:
        """Remove the least recently read entries, but none in ``keep``, until at most ``limit``
        bytes are left. Returns the removed keys and their bytes."""
        if self.totals()[1] <= limit:
            return []
        removed = []
        with self._transact() as (execute, _):
            # Counted again: another process may have evicted before the lock was ours.
            excess = self.totals()[1] - limit
            oldest_first = execute(
                f"SELECT key, length(value) FROM Cache WHERE {_OWN_ROW} ORDER BY access_time, rowid"
            ).fetchall()
            for key, size in oldest_first:
                if excess <= 0:
                    break
                if key not in keep:
                    execute("DELETE FROM Cache WHERE key = ?", (key,))
                    removed.append((key, size))
                    excess -= size
        return removed

    def remove(self, key: str) -> bool:
        """Remove whatever is stored under ``key``; returns whether there was anything."""
        return self._con.execute("DELETE FROM Cache WHERE key = ?", (key,)).rowcount > 0

    def remove_payload(self, key: str, payload: bytes) -> None:
        """Remove ``key`` if it still holds exactly ``payload``, not what a better writer put."""
        self._con.execute("DELETE FROM Cache WHERE key = ? AND value = ?", (key, payload))

    def remove_all(self) -> int:
        """Remove every row and give the space back; returns how many entries there were."""
        number = self._con.execute("DELETE FROM Cache").rowcount
        self._con.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return number

    def _set_wait(self, seconds: float) -> None:
        self._con.execute(f"PRAGMA busy_timeout = {int(seconds * 1000)}").close()


def _connect(path: str) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=_OPENING_WAIT_S, isolation_level=None, check_same_thread=False)
    try:
        for pragma in _FIXED_PRAGMAS:
            connection.execute(f"PRAGMA {pragma}").close()
        # auto_vacuum comes first in this order, and must: it is fixed by the first page written.
        for name, value in SETTINGS.items():
            if name.startswith("sqlite_"):
                _set_pragma(connection, name[7:], value)
        # A hostile row may hold text that is not UTF-8; it must not fail the query it is in.
        connection.text_factory = _lenient_text
    except BaseException:
        connection.close()
        raise
    return connection


def _set_pragma(connection: sqlite3.Connection, name: str, value: int | str) -> None:
    # Asked first: setting auto_vacuum writes, and waits for the disk, even where it is right.
    if connection.execute(f"PRAGMA {name}").fetchall() != [(value,)]:
        connection.execute(f"PRAGMA {name} = {value}").fetchall()


def _stored_settings(connection: sqlite3.Connection) -> dict[object, object]:
    try:
        return dict(connection.execute("SELECT key, value FROM Settings"))
    except sqlite3.OperationalError:  # There is no table yet.
        return {}


def _schema_version(connection: sqlite3.Connection) -> int:
    ((version,),) = connection.execute("PRAGMA schema_version")
    return int(version)


def _until(deadline: float, action: Callable[[], T]) -> T:
    """Repeat while another process holds a lock: opening meets locks that SQLite's own busy
    handler does not wait for, such as the switch to write-ahead logging."""
    while True:
        try:
            return action()
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.002)


def _lenient_text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")
