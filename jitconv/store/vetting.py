"""Look at a store database before diskcache does, and move one aside that it should not open.

diskcache believes its Settings table: a row named ``get`` replaces the method of that name, rows
named ``sqlite_*`` and ``disk_*`` become PRAGMAs and constructor arguments. SQLite, in turn,
follows links and hard links, and would write its log into whatever ``cache.db-wal`` leads to. So
a database is opened only if its files are plain and its schema and settings are diskcache's own.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import sqlite3
import stat
import time
from contextlib import closing, suppress
from pathlib import Path

from jitconv.store.location import private_subdirectory

__all__ = [
    "DATABASE",
    "database_identity",
    "quarantine_payload",
    "quarantined",
    "reason_to_set_aside",
    "set_aside",
]

_log = logging.getLogger("jitconv.store")

DATABASE = "cache.db"
_SUFFIXES = ("", "-wal", "-shm", "-journal")

_QUARANTINE = "quarantine"
_QUARANTINED_NAME = re.compile(r"(\d{19,20})-[\w.-]+", re.ASCII)
_QUARANTINE_FILES = 32
_QUARANTINE_BYTES = 256 << 20

_TABLES = {
    "Settings": {"key", "value"},
    "Cache": {
        "rowid",
        "key",
        "raw",
        "store_time",
        "expire_time",
        "access_time",
        "access_count",
        "tag",
        "size",
        "mode",
        "filename",
        "value",
    },
}
_KEY_INDEX = "Cache_key_raw"
_INDEXES = {
    _KEY_INDEX,
    "sqlite_autoindex_Settings_1",
    "Cache_expire_time",
    "Cache_store_time",
    "Cache_access_time",
    "Cache_access_count",
    "Cache_tag_rowid",
}
# The only thing diskcache's triggers do: keep two counters. A trigger of another shape would run
# its own statements on every write.
_TRIGGER = re.compile(
    r"CREATE TRIGGER Settings_\w+ AFTER (INSERT|UPDATE|DELETE) ON Cache FOR EACH ROW BEGIN"
    r" UPDATE Settings SET value = value( [+-] (1|NEW\.size|OLD\.size))+"
    r' WHERE key = "(count|size)"; END',
    re.ASCII,
)
_SETTINGS_TYPES: dict[str, type] = {
    "statistics": int,
    "tag_index": int,
    "eviction_policy": str,
    "size_limit": int,
    "cull_limit": int,
    "sqlite_auto_vacuum": int,
    "sqlite_cache_size": int,
    "sqlite_journal_mode": str,
    "sqlite_mmap_size": int,
    "sqlite_synchronous": int,
    "disk_min_file_size": int,
    "disk_pickle_protocol": int,
    "count": int,
    "size": int,
    "hits": int,
    "misses": int,
}


def reason_to_set_aside(directory: Path, timeout: float) -> str | None:
    """Why the database in ``directory`` must not be opened, or None if it may (or is absent).

    Reads only. Waits at most ``timeout`` seconds for a lock.

    Raises:
        sqlite3.OperationalError: it is locked or cannot be read now; no verdict.
    """
    for suffix in _SUFFIXES:
        reason = _not_a_plain_file(directory / (DATABASE + suffix))
        if reason is not None:
            return reason
    path = directory / DATABASE
    if not path.exists():
        return None
    try:
        with closing(_connect_read_only(path, timeout)) as connection:
            return _schema_reason(connection) or _settings_reason(connection)
    except sqlite3.OperationalError as error:
        # Killed while it was first created: only a writer can roll that back, and there is
        # nothing in it to keep.
        if "readonly" in str(error):
            return f"creation was interrupted ({error})"
        raise
    except sqlite3.DatabaseError as error:
        return f"damaged ({error})"


def set_aside(directory: Path, reason: str) -> None:
    """Rename the database files into the quarantine, so that a new database can be made.

    Raises:
        OSError, StoreUnavailableError: they cannot be moved.
    """
    quarantine = private_subdirectory(directory, _QUARANTINE)
    stamp = _stamp()
    for suffix in _SUFFIXES:
        with suppress(FileNotFoundError):
            os.replace(directory / (DATABASE + suffix), quarantine / f"{stamp}-{DATABASE}{suffix}")
    _log.warning(
        "kernel store %s: the database was set aside as %s and a new one is made: %s",
        directory,
        quarantine / f"{stamp}-{DATABASE}",
        reason,
    )
    _trim(quarantine)


def quarantine_payload(directory: Path, key: str, payload: bytes) -> Path:
    """Keep the bytes of a bad entry for inspection; returns the file.

    Raises:
        OSError, StoreUnavailableError: they cannot be written.
    """
    quarantine = private_subdirectory(directory, _QUARANTINE)
    name = hashlib.sha256(key.encode("utf-8")).hexdigest()[:16]
    path = quarantine / f"{_stamp()}-{name}.entry"
    with open(path, "xb") as file:
        file.write(payload)
    _trim(quarantine)
    return path


def quarantined(directory: Path) -> list[Path]:
    """The files that were moved aside, newest first."""
    quarantine = directory / _QUARANTINE
    # A link here would lead elsewhere; private_subdirectory refuses to write through it too.
    if quarantine.is_symlink() or not quarantine.is_dir():
        return []
    files = [path for path in quarantine.iterdir() if _QUARANTINED_NAME.fullmatch(path.name)]
    return sorted(files, key=lambda path: path.name, reverse=True)


def database_identity(directory: Path) -> tuple[int, int] | None:
    """What tells this database file from a later one of the same name; None if there is none."""
    try:
        status = (directory / DATABASE).stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _connect_read_only(path: Path, timeout: float) -> sqlite3.Connection:
    connection = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=timeout)
    connection.execute("PRAGMA trusted_schema = OFF")
    # Text that is not UTF-8 would otherwise fail the whole query instead of being looked at.
    connection.text_factory = bytes
    return connection


def _not_a_plain_file(path: Path) -> str | None:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):
        return f"{path.name} is not a regular file"
    if status.st_nlink > 1:
        return f"{path.name} has {status.st_nlink} hard links"
    return None


def _schema_reason(connection: sqlite3.Connection) -> str | None:
    query = "SELECT type, name, sql FROM sqlite_master LIMIT 100"
    for row in connection.execute(query).fetchall():
        kind, name, statement = map(_text, row)
        if kind == "table" and name in _TABLES:
            known = _has_columns(connection, name)
        elif kind == "trigger":
            known = _TRIGGER.fullmatch(statement) is not None
        else:
            known = kind == "index" and name in _INDEXES
        if not known:
            return f"it holds a {kind} {name!r} that is not diskcache's"
    return _duplicates_reason(connection)


def _duplicates_reason(connection: sqlite3.Connection) -> str | None:
    """diskcache takes it for granted that a look-up yields at most one row."""
    # Columns: position, name, unique, origin, partial.
    for row in connection.execute("PRAGMA index_list(Cache)").fetchall():
        if _text(row[1]) == _KEY_INDEX:
            indexed = connection.execute(f"PRAGMA index_info({_KEY_INDEX})").fetchall()
            columns = [_text(column[2]) for column in indexed]
            if not row[2] or row[4] or columns != ["key", "raw"]:
                return f"index {_KEY_INDEX} does not keep keys unique"
    return None


def _has_columns(connection: sqlite3.Connection, table: str) -> bool:
    # Columns: position, name, type, not null, default, primary key, hidden (generated if not 0).
    rows = connection.execute(f"PRAGMA table_xinfo({table})").fetchall()
    return {_text(row[1]) for row in rows} == _TABLES[table] and not any(row[6] for row in rows)


def _settings_reason(connection: sqlite3.Connection) -> str | None:
    if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'Settings'").fetchall():
        return None
    rows = connection.execute("SELECT key, value FROM Settings LIMIT 100").fetchall()
    for raw_key, value in rows:
        key = _text(raw_key)
        expected = _SETTINGS_TYPES.get(key)
        if expected is None:
            return f"it holds an unknown setting {key!r}"
        stored_type = str if type(value) is bytes else type(value)
        if stored_type is not expected:
            return f"setting {key!r} is a {stored_type.__name__}, not {expected.__name__}"
    return None


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else repr(value)


def _stamp() -> str:
    return f"{time.time_ns():020d}"


def _trim(quarantine: Path) -> None:
    """Bound what is kept: the newest incident always, older ones while they are few and small."""
    kept_bytes = 0
    newest: str | None = None
    for rank, path in enumerate(quarantined(quarantine.parent)):
        incident = path.name.partition("-")[0]
        newest = newest or incident
        with suppress(FileNotFoundError):
            kept_bytes += path.lstat().st_size
        if incident != newest and (rank >= _QUARANTINE_FILES or kept_bytes > _QUARANTINE_BYTES):
            with suppress(OSError):
                path.unlink()
