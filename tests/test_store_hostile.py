"""A database somebody else prepared: it runs nothing, and reaches nothing outside the directory."""

from __future__ import annotations

import os
import pickle
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import diskcache
import pytest

from jitconv.errors import StoreWarning
from jitconv.store import Entry, Store, StoreUnavailableError
from jitconv.store.database import SETTINGS, BytesDisk, Database, ForeignRowError
from jitconv.store.vetting import _SETTINGS_TYPES

GOOD = Entry(b"cubin" * 1000, "// good\n", {"good": True})
SECRET = b"not for the cache"
UNDECODABLE = "CAST(x'626164ff' AS TEXT)"  # SQL for text that is not UTF-8
DISKCACHE_NAME = "ab/cd/" + "0" * 28 + ".val"

_touched: list[tuple[str, str]] = []
_outside: list[str] = []


def _watch(event: str, arguments: tuple) -> None:
    """Audit hook: note every file operation on the paths that tests declare out of bounds."""
    if not _outside or event not in ("open", "os.remove", "os.rename", "os.rmdir", "os.truncate"):
        return
    follows = event == "os.truncate" or (event == "open" and not arguments[2] & os.O_NOFOLLOW)
    for path in filter(lambda argument: isinstance(argument, str | os.PathLike), arguments):
        parent, name = os.path.split(os.fspath(path))
        reached = os.path.realpath(path) if follows else f"{os.path.realpath(parent)}/{name}"
        if any(reached.startswith(outside) for outside in _outside):
            _touched.append((event, os.fspath(path)))


sys.addaudithook(_watch)


class Explosive:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.fixture
def marker(tmp_path, monkeypatch):
    """A path that exists after the test if anything was unpickled; unpickling also raises."""
    path = tmp_path / "unpickled"

    def refuse(*_: object, **__: object) -> None:
        path.touch()
        raise AssertionError("unpickled")

    for name in ("load", "loads", "Unpickler", "_load", "_loads", "_Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    yield path
    assert not path.exists()


@pytest.fixture
def secret(tmp_path):
    """A file outside the store that must be neither read nor changed nor removed."""
    path = tmp_path / "outside" / "secret"
    path.parent.mkdir()
    path.write_bytes(SECRET)
    _touched.clear()
    _outside.append(os.path.realpath(path.parent))
    yield path
    _outside.clear()
    assert _touched == []
    assert path.read_bytes() == SECRET
    assert [entry.name for entry in path.parent.iterdir()] == ["secret"]


@pytest.fixture
def directory(tmp_path):
    """A closed store with one good entry."""
    with Store(tmp_path / "kernels") as store:
        store.put("good", GOOD)
    return store.directory


def change(directory: Path, *statements: str | tuple) -> None:
    with closing(sqlite3.connect(directory / "cache.db", isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(*([statement] if isinstance(statement, str) else statement))


def insert(directory: Path, **columns: object) -> None:
    """A row as an attacker would write it; what is not said is as in our own rows."""
    row = {"key": "bad", "raw": 1, "access_time": 0.0, "store_time": 0.0, "mode": 1} | columns
    marks = ", ".join(UNDECODABLE if v == UNDECODABLE else "?" for v in row.values())
    values = [value for value in row.values() if value != UNDECODABLE]
    change(directory, (f"INSERT INTO Cache ({', '.join(row)}) VALUES ({marks})", values))


def use_everything(directory: Path, key: str = "bad") -> None:
    """Every operation of a store, on a database that may hold anything; nothing may raise."""
    limit = 20_000
    with Store(directory, size_limit=limit) as store:
        assert store.get(key) is None
        store.entries()
        store.verify()
        assert store.put(key, GOOD)
        assert store.get(key) == GOOD
        for number in range(5):
            store.put(f"filler{number}", GOOD)
        store.remove(key)
    with Store(directory, size_limit=limit) as store:
        store.info()
        store.clear()
        assert store.keys() == []


def hostile_rows(tmp_path: Path) -> dict[str, dict[str, object]]:
    bomb = pickle.dumps(Explosive(tmp_path / "unpickled"))
    secret = tmp_path / "outside" / "secret"
    return {
        "pickled value": {"mode": 4, "value": bomb},
        "pickled value in a file": {"mode": 4, "filename": DISKCACHE_NAME},
        "pickled key": {"key": bomb, "raw": 0, "value": b"x"},
        "pickled key and value": {"key": bomb, "raw": 0, "mode": 4, "value": bomb},
        "text key that is not raw": {"raw": 0, "value": b"x"},
        "bytes key": {"key": b"bad", "value": b"x"},
        "number for a key": {"key": 7, "value": b"x"},
        "key that is not UTF-8": {"key": UNDECODABLE, "value": b"x"},
        "value that is not UTF-8": {"value": UNDECODABLE},
        "tag that is not UTF-8": {"value": b"x", "tag": UNDECODABLE},
        "file name that is not UTF-8": {"mode": 2, "filename": UNDECODABLE},
        "key with NUL": {"key": "bad\0worse", "value": b"x"},
        "key with a space": {"key": "bad key", "value": b"x"},
        "endless key": {"key": "k" * 100_000, "value": b"x"},
        "absolute file name": {"mode": 2, "filename": str(secret), "size": len(SECRET)},
        "absolute file name, text": {"mode": 3, "filename": str(secret)},
        "absolute file name, pickle": {"mode": 4, "filename": str(secret)},
        "absolute file name beside a value": {"filename": str(secret), "value": b"x"},
        "file name that climbs": {"mode": 2, "filename": "../outside/secret"},
        "file name through a link": {"mode": 2, "filename": "link/secret"},
        "file name that is bytes": {"mode": 2, "filename": os.fsencode(secret)},
        "diskcache's own file name": {"mode": 2, "filename": DISKCACHE_NAME},
        "text value": {"value": "text"},
        "number for a value": {"value": 1},
        "no value": {"value": None},
        "unknown mode": {"mode": 99, "value": b"x"},
        "mode that is text": {"mode": "pickle", "value": b"x"},
        "no mode": {"mode": None, "value": b"x"},
        "expired": {"value": b"x", "expire_time": 1.0},
        "to expire": {"value": b"x", "expire_time": 1e300},
        "short value": {"value": b"x"},
        "times that are text": {"value": b"x", "access_time": "a", "store_time": "b"},
        "times that are missing": {"value": b"x", "access_time": None, "store_time": None},
        "time without end": {"value": b"x", "access_time": 9e999, "store_time": -9e999},
        "negative size": {"value": b"x", "size": -(1 << 62)},
    }


CASES = list(hostile_rows(Path("/")))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("error")
def test_a_hostile_row_is_a_miss_and_touches_nothing(case, directory, tmp_path, marker, secret):
    # A link is enough to leave the directory with a file name that looks relative.
    (directory / "link").symlink_to(secret.parent)
    stray = directory / DISKCACHE_NAME
    stray.parent.mkdir(parents=True)
    stray.write_bytes(pickle.dumps(Explosive(marker)))
    row = hostile_rows(tmp_path)[case]
    insert(directory, **row)
    with Store(directory) as store:
        assert store.get("good") == GOOD
    use_everything(directory)
    assert stray.exists()


@pytest.mark.parametrize("case", CASES)
def test_a_hostile_row_is_dropped_when_it_is_met(case, directory, tmp_path, marker, secret):
    insert(directory, **hostile_rows(tmp_path)[case])
    with Store(directory) as store:
        for info in store.entries():
            store.get(info.key)
        assert store.keys() == ["good"]
    with closing(sqlite3.connect(directory / "cache.db")) as connection:
        assert connection.execute("SELECT key FROM Cache").fetchall() == [("good",)]


def test_a_foreign_row_is_dropped_by_the_lookup_that_meets_it(directory, marker, caplog):
    insert(directory, mode=4, value=pickle.dumps(Explosive(marker)))
    with Store(directory) as store:
        assert store.get("bad") is None
    assert "dropped 1 rows" in caplog.text
    with closing(sqlite3.connect(directory / "cache.db")) as connection:
        assert connection.execute("SELECT key FROM Cache").fetchall() == [("good",)]


def test_verify_reports_foreign_rows_and_leaves_them(directory, marker):
    insert(directory, mode=4, value=b"x")
    with Store(directory) as store:
        for _ in range(2):
            assert [str(found) for found in store.verify()] == ["1 rows that jitconv did not write"]


def test_diskcaches_own_iteration_does_not_unpickle_either(directory, marker):
    insert(directory, key=pickle.dumps(Explosive(marker)), raw=0, value=b"x")
    database = Database(directory, 1.0, float("inf"))
    for iterate in (database.iterkeys, lambda: iter(database), lambda: reversed(database)):
        with pytest.raises(ForeignRowError):
            list(iterate())
    database.close()


def test_only_bytes_under_text_keys_can_be_written(directory, marker):
    database = Database(directory, 1.0, float("inf"))
    for value in (object(), "text", 1, 1.5, None, bytearray(b"x"), Explosive(marker)):
        with pytest.raises(TypeError):
            database.set("k", value)
    for key in (b"k", 1, None, ("k",), Explosive(marker)):
        with pytest.raises(TypeError):
            database.set(key, b"x")
    with pytest.raises(TypeError), open(os.devnull, "rb") as file:
        database.set("k", file, read=True)
    database.close()


def test_no_file_is_ever_removed_or_named(directory, secret):
    disk = BytesDisk(str(directory))
    disk.remove(str(secret))
    disk.remove("../outside/secret")
    with pytest.raises(ForeignRowError):
        disk.filename("k", b"x")


# --- settings and schema ---


def set_aside(directory: Path) -> list[str]:
    """Names of what the store moved into its quarantine when it was opened."""
    with Store(directory) as store:
        assert store.put("k", GOOD)
        assert store.get("k") == GOOD
        assert store.info().available
    return [path.name.partition("-")[2] for path in (directory / "quarantine").glob("*")]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "setting",
    [
        ("get", "x"),
        ("_sql", "x"),
        ("__class__", 1),
        ("sqlite_writable_schema", 1),
        ("sqlite_temp_store_directory", "/"),
        ("disk_directory", "/"),
        ("disk_key", b"x"),
        ("eviction_policy", 5),
        ("sqlite_mmap_size", "1; DROP TABLE Cache"),
        ("sqlite_journal_mode", None),
        ("size_limit", 1.5),
        ("count", "many"),
        (b"\xff", 1),
        (3, 3),
    ],
    ids=lambda setting: repr(setting[0]),
)
def test_a_poisoned_setting_sets_the_database_aside(setting, directory, marker, caplog):
    change(directory, ("INSERT OR REPLACE INTO Settings VALUES (?, ?)", setting))
    assert "cache.db" in set_aside(directory)
    assert "set aside" in caplog.text
    with Store(directory) as store:
        assert store.get("good") is None


def test_a_known_setting_with_another_value_is_overruled(directory):
    for name, value in SETTINGS.items():
        other = "off" if isinstance(value, str) else value + 3
        change(directory, ("UPDATE Settings SET value = ? WHERE key = ?", (other, name)))
    with Store(directory) as store:
        assert store.get("good") == GOOD
        assert store.info().quarantined == 0
    database = Database(directory, 1.0, float("inf"))
    for name, value in SETTINGS.items():
        assert getattr(database, name) == value
        assert database.reset(name, "other") == value
    assert database._con.execute("PRAGMA journal_mode").fetchall() == [("wal",)]
    assert database._con.execute("PRAGMA mmap_size").fetchall() in ([(0,)], [])
    database.close()


def test_a_setting_poisoned_while_the_database_is_open_changes_nothing(directory):
    with Store(directory) as store:
        assert store.get("good") == GOOD
        change(
            directory,
            "INSERT INTO Settings VALUES ('get', 'x')",
            "INSERT INTO Settings VALUES ('sqlite_writable_schema', 1)",
        )
        assert store.get("good") == GOOD
        assert store.put("k", GOOD)


def test_a_setting_poisoned_between_the_check_and_the_opening_stops_the_opening(directory, monkeypatch):
    from jitconv.store import vetting

    change(directory, "INSERT INTO Settings VALUES ('get', 'x')")
    monkeypatch.setattr(vetting, "reason_to_set_aside", lambda *_: None)
    with pytest.warns(StoreWarning, match="changed while opening"), Store(directory) as store:
        assert store.get("good") is None


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "statements",
    [
        ["CREATE TABLE Extra (x)"],
        ["CREATE VIEW Extra AS SELECT 1"],
        ["ALTER TABLE Cache RENAME TO Old", "CREATE VIEW Cache AS SELECT * FROM Old"],
        ["DROP TABLE Cache", "CREATE TABLE Cache (rowid, key, value)"],
        ["ALTER TABLE Cache ADD COLUMN more"],
        ["ALTER TABLE Cache ADD COLUMN more AS (key)"],
        [
            "DROP TABLE Cache",
            "CREATE TABLE Cache (rowid INTEGER PRIMARY KEY, key, raw, store_time, expire_time,"
            " access_time, access_count, tag, size, mode, filename, value AS (key))",
        ],
        ["CREATE TRIGGER Extra AFTER INSERT ON Cache BEGIN DELETE FROM Cache; END"],
        [
            "DROP TRIGGER Settings_count_insert",
            "CREATE TRIGGER Settings_count_insert AFTER INSERT ON Cache FOR EACH ROW BEGIN DELETE FROM Cache; END",
        ],
        ["CREATE INDEX Extra ON Cache (tag)"],
        ["DROP INDEX Cache_key_raw", "CREATE INDEX Cache_key_raw ON Cache (key, raw)"],
        [
            "DROP INDEX Cache_key_raw",
            "CREATE UNIQUE INDEX Cache_key_raw ON Cache (key, raw) WHERE raw = 0",
        ],
        ["DROP INDEX Cache_key_raw", "CREATE UNIQUE INDEX Cache_key_raw ON Cache (rowid, key)"],
        ["DROP TABLE Settings", "CREATE TABLE Settings (key, value, more)"],
    ],
    ids=lambda statements: statements[-1][:48],
)
def test_a_schema_that_is_not_diskcaches_sets_the_database_aside(statements, directory):
    change(directory, *statements)
    assert "cache.db" in set_aside(directory)


def test_duplicate_keys_without_an_index_set_the_database_aside(directory):
    change(directory, "DROP INDEX Cache_key_raw")
    for _ in range(2):
        insert(directory, value=b"x")
    with Store(directory) as store:
        with pytest.warns(StoreWarning, match="UNIQUE"):
            assert store.get("bad") is None
        assert store.put("bad", GOOD)
        assert store.get("bad") == GOOD


@pytest.mark.parametrize("content", [b"garbage" * 1000, b"SQLite format 3\0" + b"\xff" * 5000])
@pytest.mark.filterwarnings("error")
def test_a_file_that_is_no_database_is_set_aside(content, directory):
    (directory / "cache.db").write_bytes(content)
    assert "cache.db" in set_aside(directory)


@pytest.mark.filterwarnings("error")
def test_an_empty_database_file_is_simply_filled(directory):
    (directory / "cache.db").write_bytes(b"")
    assert set_aside(directory) == []


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm", "-journal"])
@pytest.mark.parametrize("link", [os.symlink, os.link])
@pytest.mark.filterwarnings("error")
def test_a_database_file_that_is_a_link_is_not_written_through(link, suffix, directory, secret):
    path = directory / f"cache.db{suffix}"
    path.unlink(missing_ok=True)
    link(secret, path)
    # SQLite opens files without Python's audit hook seeing it; the fixture compares the content.
    assert f"cache.db{suffix}" in set_aside(directory)


@pytest.mark.filterwarnings("error")
def test_something_that_is_no_file_in_the_databases_place_is_set_aside(directory):
    (directory / "cache.db").unlink()
    (directory / "cache.db").mkdir()
    assert "cache.db" in set_aside(directory)


@pytest.mark.parametrize("name", ["quarantine", "locks"])
def test_a_link_in_a_subdirectorys_place_is_not_followed(name, directory, secret):
    for path in (directory / "locks").glob("*"):
        path.unlink()
    (directory / "locks").rmdir()
    (directory / name).symlink_to(secret.parent)
    change(directory, "UPDATE Cache SET value = x'00'")
    for number in range(40):
        (secret.parent / f"{number:020d}-x.entry").write_bytes(b"")
    try:
        if name == "locks":
            with pytest.warns(StoreWarning, match="link"), Store(directory) as store:
                assert store.get("good") is None
        else:
            with Store(directory) as store:
                assert store.get("good") is None
                store.clear()
                assert store.info().quarantined == 0
        assert len(list(secret.parent.iterdir())) == 41
    finally:
        for path in secret.parent.glob("*.entry"):
            path.unlink()
        # Making and removing the bystanders above is the test's own doing.
        _touched[:] = [item for item in _touched if not item[1].endswith(".entry")]


def test_a_claim_file_that_is_a_link_is_not_followed(directory, secret):
    with Store(directory) as store:
        with store.claim("k") as held:
            assert held
            (path,) = (directory / "locks").iterdir()
        path.symlink_to(secret)
        with store.claim("k", timeout=0.1) as held:
            assert not held


# --- what the defences rest on ---


def test_diskcache_still_has_the_members_that_are_replaced():
    for name in ("_con", "_sql_retry", "_transact", "reset", "close", "__init__"):
        assert name in vars(diskcache.Cache), name
    for name in ("put", "get", "store", "fetch", "filename", "remove"):
        assert name in vars(diskcache.Disk), name


def test_every_setting_of_diskcache_is_passed_and_known():
    assert SETTINGS.keys() == diskcache.core.DEFAULT_SETTINGS.keys()
    assert _SETTINGS_TYPES.keys() == SETTINGS.keys() | diskcache.core.METADATA.keys()
    for name, value in (SETTINGS | diskcache.core.METADATA).items():
        assert type(value) is _SETTINGS_TYPES[name], name


def test_a_strict_store_raises_for_what_cannot_be_moved_aside(directory, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    change(directory, "CREATE TABLE Extra (x)")
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(StoreUnavailableError, match="Read-only"):
        Store.open(directory, strict=True)
    with pytest.warns(StoreWarning, match="Read-only"), Store(directory) as store:
        assert store.get("good") is None
