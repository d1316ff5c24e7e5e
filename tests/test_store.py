"""The store of compiled kernels: entries, their format, limits, eviction, configuration."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import struct
import subprocess
import sys
import threading
import time
import warnings
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jitconv
from jitconv.errors import StoreWarning
from jitconv.stats import reset_stats, stats
from jitconv.store import (
    CorruptEntryError,
    Entry,
    Store,
    StoreUnavailableError,
    decode,
    default_store,
    encode,
    fetch_or_build,
    parse_size,
)
from jitconv.store import entry as entry_module
from jitconv.store import store as store_module
from jitconv.store.location import configured_directory

ROOT = Path(jitconv.__file__).parents[1]


@pytest.fixture(autouse=True)
def fresh_counters():
    reset_stats()


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "kernels", size_limit=1 << 30) as store:
        yield store


@pytest.fixture
def every_read_is_noted(monkeypatch):
    monkeypatch.setattr(store_module, "TOUCH_INTERVAL_S", 0.0)


def kernel(size: int = 1000, seed: int = 0, **metadata: object) -> Entry:
    """An entry whose payload is incompressible and close to ``size`` bytes."""
    cubin = (seed.to_bytes(4, "little") * (size // 4 + 1))[:size]
    return Entry(cubin, f"// kernel {seed}\n", metadata)


def rows(directory: Path, statement: str, *arguments: object) -> list[tuple]:
    """Run one statement on the database from outside."""
    connection = sqlite3.connect(directory / "cache.db", isolation_level=None)
    try:
        return connection.execute(statement, arguments).fetchall()
    finally:
        connection.close()


# --- format ---


@given(
    key=st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=256),
    cubin=st.binary(max_size=300),
    source=st.text(st.characters(exclude_categories=["Cs"]), max_size=300),
    metadata=st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
        st.integers() | st.booleans() | st.none() | st.floats(allow_nan=False, allow_infinity=False),
        max_size=4,
    ),
)
@settings(max_examples=60, deadline=None)
def test_an_entry_survives_encoding(key, cubin, source, metadata):
    assert decode(key, encode(key, Entry(cubin, source, metadata))) == Entry(cubin, source, metadata)


def test_any_flipped_bit_is_noticed():
    payload = encode("k", Entry(b"\x00\xff" * 8, "int x;", {"a": 1}))
    for position in range(len(payload)):
        for bit in (0x01, 0x80):
            damaged = bytearray(payload)
            damaged[position] ^= bit
            with pytest.raises(CorruptEntryError):
                decode("k", bytes(damaged))


def test_any_truncation_or_extension_is_noticed():
    payload = encode("k", kernel(40))
    for length in range(len(payload)):
        with pytest.raises(CorruptEntryError):
            decode("k", payload[:length])
    with pytest.raises(CorruptEntryError):
        decode("k", payload + b"\x00")


def test_a_payload_is_refused_under_another_key():
    payload = encode("sm_80", kernel())
    with pytest.raises(CorruptEntryError, match="of another key"):
        decode("sm_90a", payload)


def forged(key: str, packed: bytes, announced: int, metadata: bytes = b"{}") -> bytes:
    """A payload with a right digest over content that ``encode`` would not write."""
    body = struct.pack("<QQQQ", len(metadata), len(packed), announced, 0) + metadata + packed
    digest = entry_module._digest(key, body)
    return struct.pack("<8sI32s", entry_module.MAGIC, entry_module.FORMAT, digest) + body


@pytest.mark.parametrize(
    "payload",
    [
        forged("k", zlib.compress(bytes(1 << 24)), 100),  # unpacks to more than announced
        forged("k", zlib.compress(b"ab"), 100),  # and to less
        forged("k", zlib.compress(b""), 1 << 62),
        forged("k", b"not zlib", 8),
        forged("k", zlib.compress(b"\xff"), 1),  # not UTF-8
        forged("k", zlib.compress(b""), 0, b"[1]"),
        forged("k", zlib.compress(b""), 0, b"{"),
        forged("k", zlib.compress(b""), 0, b"[" * 100_000),
    ],
    ids=["bomb", "short", "huge", "packing", "encoding", "no-object", "no-json", "nested"],
)
def test_unreadable_content_is_corrupt_rather_than_a_crash(payload):
    with pytest.raises(CorruptEntryError):
        decode("k", payload)


def test_a_source_beyond_the_bound_is_neither_written_nor_unpacked(monkeypatch):
    payload = encode("k", Entry(b"", "x" * 101))
    monkeypatch.setattr(entry_module, "MAX_SOURCE_BYTES", 100)
    with pytest.raises(CorruptEntryError, match="101 bytes"):
        decode("k", payload)
    with pytest.raises(ValueError, match="at most 100"):
        encode("k", Entry(b"", "x" * 101))


@pytest.mark.parametrize("metadata", [{"a": float("nan")}, {"a": float("inf")}])
def test_metadata_that_json_cannot_say_is_refused_before_the_disk(store, metadata):
    with pytest.raises(ValueError, match="JSON"):
        store.put("k", Entry(b"", "", metadata))
    with pytest.raises(TypeError, match="JSON"):
        store.put("k", Entry(b"", "", {"a": object()}))
    assert not store.directory.exists()


def test_a_cubin_that_is_not_bytes_is_refused(store):
    with pytest.raises(TypeError, match=r"entry\.cubin is bytearray"):
        store.put("k", Entry(bytearray(b"x"), ""))  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["", "a b", "ä", "x" * 257, "a\n", "\0", 7, None])
def test_a_bad_key_is_named(store, key):
    for call in (store.get, store.remove, lambda key: store.put(key, kernel())):
        with pytest.raises(ValueError, match="key="):
            call(key)


# --- entries ---


def test_another_store_object_finds_what_was_put(store):
    entry = kernel(5000, seed=3, registers=40)
    assert store.put("k", entry)
    with Store(store.directory) as second:
        assert second.get("k") == entry


def test_a_missing_key_is_none(store):
    store.put("k", kernel())
    assert store.get("other") is None


def test_the_last_put_wins(store):
    store.put("k", kernel(seed=1))
    store.put("k", kernel(seed=2))
    assert store.get("k") == kernel(seed=2)
    assert store.keys() == ["k"]


def test_listing_gives_metadata_and_sizes_without_reading_payloads(store, monkeypatch):
    before = time.time()
    store.put("b", kernel(3000, problem="conv3d"))
    store.put("a", kernel(2000))
    monkeypatch.setattr(store_module, "decode", None)
    first, second = store.entries()
    assert (first.key, second.key) == ("a", "b")
    assert 3000 < second.size < 3300
    assert second.metadata == {"problem": "conv3d"}
    assert before - 1 <= second.stored <= time.time() + 1
    assert store.keys() == ["a", "b"]


def test_remove_and_clear_report_what_was_there(store):
    for key in "abc":
        store.put(key, kernel())
    assert store.remove("a") is True
    assert store.remove("a") is False
    assert store.clear() == 2
    assert store.keys() == []
    assert store.get("b") is None


def test_clear_gives_the_disk_space_back(store):
    for number in range(20):
        store.put(f"k{number}", Entry(os.urandom(100_000), ""))
    store.clear()
    assert sum(path.stat().st_size for path in store.directory.glob("cache.db*")) < 200_000


def test_info_counts_entries_bytes_hits_and_misses(store):
    store.put("a", kernel(1000))
    store.get("a")
    store.get("b")
    store.mark_loaded("a")
    info = store.info()
    assert (info.available, info.reason) == (True, None)
    assert info.path == store.directory
    assert info.entries == 1
    assert info.size == store.entries()[0].size
    assert info.size_limit == 1 << 30
    assert (info.hits, info.misses, info.loaded, info.quarantined) == (1, 1, 1, 0)


def test_nothing_is_created_before_the_first_use(tmp_path):
    Store(tmp_path / "kernels")
    assert not (tmp_path / "kernels").exists()


def test_the_directory_is_private(store):
    store.put("k", kernel())
    assert store.directory.stat().st_mode & 0o777 == 0o700
    assert (store.directory / "locks").stat().st_mode & 0o777 == 0o700


def test_a_closed_store_opens_again(store):
    store.put("k", kernel())
    store.close()
    assert store.get("k") == kernel()


# --- damage ---


def test_a_damaged_entry_is_a_miss_moved_aside_and_counted(store, caplog):
    store.put("k", kernel(5000))
    payload = encode("k", kernel(5000))
    damaged = payload[:-1] + b"\xee"
    rows(store.directory, "UPDATE Cache SET value = ? WHERE key = 'k'", damaged)
    assert [str(found).partition(":")[0] for found in store.verify()] == ["k"]
    assert store.get("k") is None
    assert stats().corrupt == 1
    assert store.keys() == []
    (kept,) = (store.directory / "quarantine").iterdir()
    assert kept.read_bytes() == damaged
    assert str(kept) in caplog.text
    assert [str(kept) in str(found) for found in store.verify()] == [True]
    store.put("k", kernel(5000))
    assert store.get("k") == kernel(5000)


def test_swapped_payloads_are_two_misses(store):
    store.put("a", kernel(seed=1))
    store.put("b", kernel(seed=2))
    payloads = dict(rows(store.directory, "SELECT key, value FROM Cache"))
    for key, other in ("ab", "ba"):
        rows(store.directory, "UPDATE Cache SET value = ? WHERE key = ?", payloads[other], key)
    assert store.get("a") is None
    assert store.get("b") is None


def test_an_entry_of_another_version_is_a_miss_that_is_left_alone(store, monkeypatch):
    monkeypatch.setattr(entry_module, "FORMAT", 99)
    store.put("k", kernel())
    monkeypatch.undo()
    assert store.get("k") is None
    assert stats().corrupt == 0
    assert store.keys() == ["k"]
    store.put("k", kernel())
    assert store.get("k") == kernel()


def test_verify_notices_an_index_that_tells_other_metadata(store):
    store.put("k", kernel(problem="conv1d"))
    assert store.verify() == []
    rows(store.directory, "UPDATE Cache SET tag = '{}'")
    (found,) = store.verify()
    assert found.key == "k"
    assert "metadata" in found.what


def test_unreadable_metadata_does_not_break_a_listing(store):
    store.put("k", kernel())
    for tag in ("{", "[]", b"\xff", None, "[" * 100_000):
        rows(store.directory, "UPDATE Cache SET tag = ?", tag)
        assert store.entries()[0].metadata == {}


def test_the_quarantine_does_not_grow_without_bound(store):
    for number in range(40):
        store.put("k", kernel(seed=number))
        rows(store.directory, "UPDATE Cache SET value = x'00' WHERE key = 'k'")
        assert store.get("k") is None
    assert store.info().quarantined == 32
    store.clear()
    assert store.info().quarantined == 0


# --- the byte cap ---


def test_the_least_recently_read_go_first(tmp_path, every_read_is_noted, caplog):
    caplog.set_level(logging.INFO, "jitconv.store")
    with Store(tmp_path / "kernels", size_limit=10_000) as store:
        for key in "abc":
            store.put(key, kernel(3000))
        store.get("a")
        store.put("d", kernel(3000))
        assert store.keys() == ["a", "c", "d"]
        assert store.info().size <= 10_000
    assert stats().evicted == 1
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.endswith(": b")


def test_a_kernel_in_use_here_is_never_evicted(tmp_path, every_read_is_noted):
    with Store(tmp_path / "kernels", size_limit=10_000) as store:
        for key in "abc":
            store.put(key, kernel(3000))
            store.mark_loaded(key)
        store.put("d", kernel(3000))
        assert store.keys() == ["a", "b", "c", "d"]


def test_a_kernel_larger_than_the_limit_evicts_nothing(tmp_path):
    with Store(tmp_path / "kernels", size_limit=10_000) as store:
        store.put("a", kernel(3000))
        assert store.put("big", kernel(20_000)) is False
        assert store.keys() == ["a"]


def test_diskcache_evicts_nothing_by_itself(store):
    # Its own default limit is what 10 entries of cull_limit would be measured against.
    rows_before = 30
    for number in range(rows_before):
        store.put(f"k{number}", kernel())
    rows(store.directory, "UPDATE Settings SET value = 1 WHERE key = 'size_limit'")
    rows(store.directory, "UPDATE Settings SET value = 10 WHERE key = 'cull_limit'")
    rows(
        store.directory,
        "UPDATE Settings SET value = 'least-recently-stored' WHERE key = 'eviction_policy'",
    )
    store.close()
    store.put("last", kernel())
    assert len(store.keys()) == rows_before + 1
    assert store.info().quarantined == 0


def test_a_clock_set_back_does_not_freeze_the_order(tmp_path):
    with Store(tmp_path / "kernels", size_limit=10_000) as store:
        for key in "abc":
            store.put(key, kernel(3000))
        future = time.time() + 10_000_000
        rows(store.directory, "UPDATE Cache SET access_time = ?", future)
        store.get("a")
        assert abs(store.entries()[0].read - time.time()) < 60


def test_a_read_is_noted_at_most_once_a_minute(store):
    store.put("k", kernel())
    rows(store.directory, "UPDATE Cache SET access_time = ?", time.time() - 30)
    noted = store.entries()[0].read
    store.get("k")
    assert store.entries()[0].read == noted


# --- configuration ---


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("1048576", 1048576),
        ("2GiB", 2 << 30),
        ("500MB", 500_000_000),
        ("1.5 kb", 1500),
        (" 3tib ", 3 << 40),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes_mean_what_they_say(text, expected):
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "2G", "-1", "1e9", "many", "1 MiB extra", "٣MB"])
def test_a_size_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="2GiB"):
        parse_size(text)


def test_the_environment_names_directory_and_limit(tmp_path, monkeypatch):
    monkeypatch.setenv("JITCONV_CACHE_DIR", str(tmp_path / "one"))
    monkeypatch.setenv("JITCONV_CACHE_SIZE", "3MiB")
    store = default_store()
    assert (store.directory, store.size_limit) == (tmp_path / "one", 3 << 20)
    assert default_store() is store
    monkeypatch.setenv("JITCONV_CACHE_DIR", str(tmp_path / "two"))
    assert default_store().directory == tmp_path / "two"


def test_a_bad_limit_in_the_environment_is_named_and_calls_go_on(tmp_path, monkeypatch):
    monkeypatch.setenv("JITCONV_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setenv("JITCONV_CACHE_SIZE", "lots")
    with pytest.warns(StoreWarning, match="JITCONV_CACHE_SIZE: size 'lots'"):
        store = default_store()
    assert store.size_limit == 1 << 30
    with pytest.raises(ValueError, match="JITCONV_CACHE_SIZE"):
        Store()
    with pytest.raises(ValueError, match="size_limit=-1"):
        Store(size_limit=-1)


def test_the_default_is_the_users_cache_directory(tmp_path, monkeypatch):
    monkeypatch.delenv("JITCONV_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert configured_directory(os.environ) == tmp_path / "jitconv"


def test_variables_in_the_directory_are_expanded_once(tmp_path, monkeypatch):
    monkeypatch.setenv("PLACE", str(tmp_path))
    assert Store("$PLACE/kernels").directory == tmp_path / "kernels"
    # diskcache would expand what is left and open another directory than the one checked.
    monkeypatch.setenv("INNER", "$PLACE")
    with pytest.raises(StoreUnavailableError, match="variable"):
        Store("/$INNER/kernels")


def test_an_old_platformdirs_without_a_home_makes_no_directory_called_tilde(monkeypatch):
    import platformdirs

    monkeypatch.delenv("JITCONV_CACHE_DIR", raising=False)
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda *_, **__: "~/.cache/jitconv")
    with pytest.raises(StoreUnavailableError, match="JITCONV_CACHE_DIR"):
        configured_directory(os.environ)


def test_importing_the_store_opens_and_loads_nothing_heavy():
    script = (
        "import sys, jitconv.store; print([m for m in ('diskcache', 'torch', 'cuda.bindings') if m in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


# --- one build per key ---


def test_threads_that_ask_for_one_key_build_once(store):
    barrier = threading.Barrier(8)
    built = []
    results = []

    def build() -> Entry:
        time.sleep(0.05)
        built.append(threading.get_ident())
        return kernel(seed=len(built))

    def ask(store: Store | None) -> None:
        barrier.wait()
        results.append(fetch_or_build("k", build, store))

    for where in (store, None):
        reset_stats()
        built.clear()
        results.clear()
        threads = [threading.Thread(target=ask, args=(where,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(built) == 1
        assert results == [kernel(seed=1)] * 8
        assert stats().compiled == 1


def test_the_second_fetch_is_a_hit_and_builds_nothing(store):
    fetch_or_build("k", kernel, store)
    assert (stats().store_misses, stats().store_hits, stats().compiled) == (1, 0, 1)
    fetch_or_build("k", pytest.fail, store)
    assert (stats().store_misses, stats().store_hits, stats().compiled) == (1, 1, 1)


def test_every_waiting_thread_gets_the_error_and_the_key_is_free_again():
    started = threading.Event()
    proceed = threading.Event()
    errors = []

    def build() -> Entry:
        started.set()
        proceed.wait()
        raise ValueError("does not compile")

    def ask() -> None:
        try:
            fetch_or_build("k", build, None)
        except ValueError as error:
            errors.append(error)

    first = threading.Thread(target=ask)
    first.start()
    started.wait()
    others = [threading.Thread(target=ask) for _ in range(3)]
    for thread in others:
        thread.start()
    proceed.set()
    for thread in (first, *others):
        thread.join()
    assert len(errors) == 4
    assert fetch_or_build("k", kernel, None) == kernel()


def test_an_interrupted_build_is_taken_over_by_a_waiting_thread():
    started = threading.Event()
    proceed = threading.Event()
    outcomes = []

    def interrupted() -> Entry:
        started.set()
        proceed.wait()
        raise KeyboardInterrupt

    def lead() -> None:
        try:
            fetch_or_build("k", interrupted, None)
        except KeyboardInterrupt:
            outcomes.append("interrupted")

    leader = threading.Thread(target=lead)
    leader.start()
    started.wait()
    follower = threading.Thread(target=lambda: outcomes.append(fetch_or_build("k", kernel, None)))
    follower.start()
    proceed.set()
    leader.join()
    follower.join(timeout=10)
    assert sorted(map(str, outcomes)) == sorted(map(str, ["interrupted", kernel()]))


def test_a_build_that_asks_for_itself_fails_instead_of_waiting_for_ever(store):
    with pytest.raises(RuntimeError, match="asks for k itself"):
        fetch_or_build("k", lambda: fetch_or_build("k", kernel, None), None)


def test_different_keys_build_at_the_same_time(store):
    both = threading.Barrier(2, timeout=10)

    def build() -> Entry:
        both.wait()
        return kernel()

    threads = [threading.Thread(target=fetch_or_build, args=(key, build, store)) for key in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.keys() == ["a", "b"]


def test_threads_share_one_store(store):
    problems = []

    def work(number: int) -> None:
        for step in range(15):
            key = f"k{(number * 7 + step) % 20}"
            expected = kernel(2000, seed=int(key[1:]))
            if fetch_or_build(key, lambda entry=expected: entry, store) != expected:
                problems.append(key)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert problems == []
    assert stats().compiled == 20
    assert stats().store_errors == 0


def test_metadata_is_kept_as_json_says_it(store):
    metadata = {"tile": [64, 128], "arch": "sm_90a", "ms": 1.5, "note": "ä", "none": None}
    store.put("k", Entry(b"x", "", metadata))
    assert store.get("k").metadata == json.loads(json.dumps(metadata))


def test_a_process_that_only_reads_writes_nothing(store):
    store.put("k", kernel())
    store.close()
    before = (store.directory / "cache.db").read_bytes()
    assert store.get("k") == kernel()
    # A write would make SQLite wait for the disk twice, at every start of a process.
    assert (store.directory / "cache.db-wal").stat().st_size == 0
    store.close()
    assert (store.directory / "cache.db").read_bytes() == before
