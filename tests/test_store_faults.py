"""The store under faults: other users, read-only and full disks, locks, kills, forks, races.

Real processes and signals. Continuous integration may run as root, whom permissions do not stop:
those tests drop to another uid in a forked child instead of being skipped.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import random
import resource
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

import jitconv
from jitconv.errors import StoreWarning
from jitconv.stats import reset_stats, stats
from jitconv.store import Entry, Store, StoreUnavailableError, claims, default_store, fetch_or_build
from jitconv.store import database as database_module  # noqa: F401  (loaded before any uid change)
from jitconv.store import store as store_module

ROOT = Path(jitconv.__file__).parents[1]
ORDINARY_UID = 54321
ENTRY = Entry(b"cubin" * 2000, "// source\n", {"arch": "sm_90a"})
# Calls promise about a second; the rest is for a machine that is busy with something else.
BOUND_S = 3.0


@pytest.fixture(autouse=True)
def fresh_counters():
    reset_stats()


@pytest.fixture
def reachable():
    """A directory that other users can enter, unlike pytest's own temporary ones."""
    path = Path(tempfile.mkdtemp(prefix="jitconv-test-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def give_to_ordinary_user(path: Path) -> Path:
    path.mkdir()
    if os.geteuid() == 0:
        os.chown(path, ORDINARY_UID, ORDINARY_UID)
    return path


def as_ordinary_user(action: Callable[[], object]) -> object:
    """Run ``action`` in a child that permissions apply to; returns its JSON-able result."""
    reader, writer = os.pipe()
    pid = fork()
    if pid == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(ORDINARY_UID)
                os.setuid(ORDINARY_UID)
            answer = {"result": action()}
        except BaseException:
            answer = {"failure": traceback.format_exc()}
        os.write(writer, json.dumps(answer).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        answer = json.load(pipe)
    os.waitpid(pid, 0)
    assert "failure" not in answer, answer["failure"]
    return answer["result"]


def fork() -> int:
    with warnings.catch_warnings():
        # Newer Pythons warn about fork in a process with threads; fork is the subject here.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def start(script: str, *arguments: object, **options: object) -> subprocess.Popen[str]:
    """A Python process that runs ``script`` with jitconv importable."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )


def finish(process: subprocess.Popen[str], timeout: float = 60) -> str:
    output, _ = process.communicate(timeout=timeout)
    assert process.returncode == 0, output
    return output


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def warned(action: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(w.message) for w in caught if issubclass(w.category, StoreWarning)]


def use(store: Store) -> None:
    """What a convolution call does with a store, twice; nothing here may raise."""
    for _ in range(2):
        assert store.get("k") is None
        store.put("k", ENTRY)
        with store.claim("k", 0.1):
            pass
        assert fetch_or_build("other", lambda: ENTRY, store) == ENTRY
        store.mark_loaded("k")
        store.entries()
        store.verify()
        store.info()
        store.remove("k")
        store.clear()


# --- whose directory it is ---


def test_a_directory_of_another_user_is_not_used(reachable):
    owner = Path("/") if os.geteuid() != 0 else reachable

    def attempt() -> object:
        store = Store(owner)
        messages = warned(lambda: use(store))
        with pytest.raises(StoreUnavailableError) as refused:
            Store.open(owner, strict=True)
        return messages, str(refused.value), store.info().available

    messages, refusal, available = as_ordinary_user(attempt)
    assert len(messages) == 1
    for text in (messages[0], refusal):
        assert f"{owner} belongs to uid" in text
        assert "JITCONV_CACHE_DIR" in text
        assert "JITCONV_CACHE_TRUST=1" in text
    assert not available
    assert list(reachable.iterdir()) == []


def test_a_link_that_another_user_can_turn_is_not_used(reachable, monkeypatch):
    own = give_to_ordinary_user(reachable / "own")
    (reachable / "link").symlink_to(own)
    real = Path.lstat

    def foreign_link(path: Path) -> os.stat_result:
        fields = list(real(path))
        if stat.S_ISLNK(fields[stat.ST_MODE]):
            fields[stat.ST_UID] = ORDINARY_UID + 1
        return os.stat_result(fields)

    monkeypatch.setattr(Path, "lstat", foreign_link)
    messages = as_ordinary_user(lambda: warned(lambda: use(Store(reachable / "link"))))
    assert len(messages) == 1
    assert f"belongs to uid {ORDINARY_UID + 1}" in messages[0]


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_directory_that_others_can_write_is_not_used(mode, tmp_path, monkeypatch):
    directory = tmp_path / "kernels"
    directory.mkdir()
    directory.chmod(mode)
    store = Store(directory)
    (message,) = warned(lambda: use(store))
    assert f"{mode:04o}" in message
    assert "JITCONV_CACHE_TRUST=1" in message
    assert list(directory.iterdir()) == []
    monkeypatch.setenv("JITCONV_CACHE_TRUST", "1")
    assert Store(directory).put("k", ENTRY)


def test_a_directory_that_others_can_only_read_is_used(tmp_path):
    directory = tmp_path / "kernels"
    directory.mkdir(mode=0o755)
    assert warned(lambda: Store(directory).put("k", ENTRY)) == []
    assert Store(directory).get("k") == ENTRY


def test_a_read_only_directory_is_named_once(reachable):
    directory = give_to_ordinary_user(reachable / "kernels")
    directory.chmod(0o555)
    (message,) = as_ordinary_user(lambda: warned(lambda: use(Store(directory))))
    assert f"{directory} is not writable" in message
    assert "JITCONV_CACHE_DIR" in message


def test_a_parent_that_cannot_be_written_is_named_once(reachable):
    directory = reachable / "missing" / "kernels"
    reachable.chmod(0o555)
    (message,) = as_ordinary_user(lambda: warned(lambda: use(Store(directory))))
    assert f"{directory} cannot be created: Permission denied" in message


def test_a_file_in_the_directorys_place_is_named_once(tmp_path):
    (tmp_path / "kernels").write_text("")
    (message,) = warned(lambda: use(Store(tmp_path / "kernels")))
    assert f"{tmp_path / 'kernels'} cannot be created" in message


def test_permission_lost_half_way_is_named_once(reachable):
    directory = give_to_ordinary_user(reachable / "kernels")

    def attempt() -> object:
        store = Store(directory)
        assert store.put("k", ENTRY)
        store.close()
        (directory / "cache.db").chmod(0o444)
        return warned(lambda: [store.put("k2", ENTRY), store.put("k3", ENTRY), store.get("k")])

    (message,) = as_ordinary_user(attempt)
    assert str(directory) in message
    assert "readonly" in message


def test_no_home_and_no_passwd_entry_means_no_store_and_one_warning(monkeypatch):
    for name in ("HOME", "XDG_CACHE_HOME", "JITCONV_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    if os.geteuid() != 0:
        import pwd

        def nobody(_: int) -> None:
            raise KeyError("no such uid")

        monkeypatch.setattr(pwd, "getpwuid", nobody)

    def attempt() -> object:
        messages = warned(lambda: [default_store(), default_store()])
        assert default_store() is None
        assert fetch_or_build("k", lambda: ENTRY, None) == ENTRY
        return messages

    (message,) = as_ordinary_user(attempt)
    assert "JITCONV_CACHE_DIR" in message


# --- full disk ---

FILL = """
    import json, os, sys, warnings
    from jitconv.store import Entry, Store
    size = int(sys.argv[2])
    store = Store(sys.argv[1])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if len(sys.argv) > 3:
            import resource
            resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, size // 2))
        done = [store.put(f"k{n}", Entry(os.urandom(size // 20), "")) for n in range(40)]
        # Reads go on after a failed write.
        found = [store.get(f"k{n}") is not None for n in range(40)]
        store.close()
    print(json.dumps([done, found, [str(w.message) for w in caught]]))
"""


def check_filled(output: str, directory: Path) -> None:
    done, found, messages = json.loads(output)
    assert done[0]
    assert not done[-1]
    assert found == done
    assert len(messages) == 1
    assert str(directory) in messages[0]
    assert "full" in messages[0] or "I/O" in messages[0]


def test_a_write_that_the_system_refuses_costs_one_warning(tmp_path):
    # A limit on file sizes stops SQLite's writes the way a full disk does, without a mount.
    directory = tmp_path / "kernels"
    output = finish(start(FILL, directory, 1 << 20, "limit"))
    check_filled(output, directory)
    with Store(directory) as store:
        assert store.verify() == []
        assert store.put("afterwards", ENTRY)


def test_a_full_disk_costs_one_warning(tmp_path):
    mount = tmp_path / "mount"
    mount.mkdir()
    inside = f'mount -t tmpfs -o size=1m,mode=0700 tmpfs {mount} && exec {sys.executable} -c "$1" "$2" 1048576'
    command = ["unshare", "-rm", "sh", "-c", inside, "sh", textwrap.dedent(FILL)]
    finished = subprocess.run([*command, str(mount / "kernels")], cwd=ROOT, capture_output=True, text=True)
    if "mount" in finished.stderr or "unshare" in finished.stderr:
        pytest.skip(f"no file system can be mounted here: {finished.stderr.strip()}")
    assert finished.returncode == 0, finished.stderr
    check_filled(finished.stdout, mount / "kernels")


# --- locks of other processes ---

HOLD = """
    import sqlite3, sys
    connection = sqlite3.connect(sys.argv[1] + "/cache.db", isolation_level=None)
    connection.execute("PRAGMA locking_mode = " + sys.argv[2])
    connection.execute("BEGIN EXCLUSIVE")
    connection.execute("UPDATE Settings SET value = value")
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("opened_before", [True, False])
@pytest.mark.parametrize("locking_mode", ["NORMAL", "EXCLUSIVE"])
def test_a_lock_of_another_process_bounds_every_call(locking_mode, opened_before, tmp_path, monkeypatch):
    with Store(tmp_path / "kernels") as store:
        store.put("k", ENTRY)
    # A connection in exclusive mode shuts others out only if it is there first.
    holder = start(HOLD, store.directory, locking_mode)
    assert holder.stdout.readline() == "held\n"
    try:
        slowest = 0.0
        messages = []
        for call in (
            lambda: store.get("k"),
            lambda: store.put("k2", ENTRY),
            lambda: fetch_or_build("k3", lambda: ENTRY, store),
            store.entries,
            store.info,
            lambda: store.get("k"),
            lambda: store.put("k2", ENTRY),
        ):
            if not opened_before:
                store.close()
            before = time.monotonic()
            messages += warned(call)
            slowest = max(slowest, time.monotonic() - before)
        assert slowest < BOUND_S
        assert len(messages) == 1
        assert str(store.directory) in messages[0]
        assert "locked" in messages[0]
        # Once it is known to be locked, further calls do not wait for it again.
        before = time.monotonic()
        for number in range(20):
            store.put(f"n{number}", ENTRY)
        assert time.monotonic() - before < 0.5
        with pytest.raises(StoreUnavailableError, match="locked"):
            Store.open(store.directory, strict=True).put("k2", ENTRY)
    finally:
        kill(holder)
    monkeypatch.setattr(store_module, "RETRY_AFTER_S", 0.0)
    store._reads_resume = store._writes_resume = 0.0
    assert store.get("k") == ENTRY
    assert store.put("k2", ENTRY)
    assert stats().store_errors >= 1


def test_a_failure_that_lasts_is_warned_of_once_and_counted_each_time(tmp_path, monkeypatch):
    def locked(_: Store) -> None:
        raise sqlite3.OperationalError("database is locked")

    monkeypatch.setattr(store_module, "RETRY_AFTER_S", 0.0)
    monkeypatch.setattr(Store, "_open_database", locked)
    store = Store(tmp_path / "kernels")
    assert len(warned(lambda: [store.get("k") for _ in range(3)])) == 1
    assert stats().store_errors == 3


def test_a_thread_that_holds_the_store_bounds_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "CALL_DEADLINE_S", 0.2)
    store = Store(tmp_path / "kernels")
    store.put("k", ENTRY)
    with store._lock:
        before = time.monotonic()
        assert store.get("k") is None
        assert time.monotonic() - before < BOUND_S
    assert store.get("k") == ENTRY


# --- what disappears or breaks while it is open ---


def test_a_directory_removed_while_open_is_made_again(tmp_path):
    store = Store(tmp_path / "kernels")
    store.put("k", ENTRY)
    shutil.rmtree(store.directory)
    assert store.get("k") is None
    assert warned(lambda: store.put("k", ENTRY)) == []
    assert Store(store.directory).get("k") == ENTRY


def test_a_database_that_breaks_while_open_is_replaced(tmp_path, caplog):
    store = Store(tmp_path / "kernels")
    for number in range(30):
        store.put(f"k{number}", ENTRY)
    store.close()
    path = store.directory / "cache.db"
    content = bytearray(path.read_bytes())
    # The schema on the first page stays readable: only use finds this damage.
    for page in range(4096 * 3, len(content), 4096):
        content[page : page + 2048] = b"\xff" * 2048
    path.write_bytes(content)
    (message,) = warned(lambda: [store.get(f"k{number}") for number in range(30)])
    assert "malformed" in message
    assert "set aside" in caplog.text
    assert store.put("k", ENTRY)
    assert store.get("k") == ENTRY


def test_a_replaced_database_is_not_set_aside_a_second_time(tmp_path):
    first, second = Store(tmp_path / "kernels"), Store(tmp_path / "kernels")
    first.put("k", ENTRY)
    assert second.get("k") == ENTRY
    damage = sqlite3.DatabaseError("database disk image is malformed")
    first._replace_database(damage)
    first.put("k", ENTRY)
    second._replace_database(damage)
    assert second.get("k") == ENTRY


def test_a_creation_killed_before_its_commit_is_started_over(tmp_path):
    directory = tmp_path / "kernels"
    directory.mkdir(mode=0o700)
    script = """
        import os, signal, sqlite3, sys
        connection = sqlite3.connect(sys.argv[1] + "/cache.db", isolation_level=None)
        connection.execute("CREATE TABLE Settings (key TEXT NOT NULL UNIQUE, value)")
        connection.execute("PRAGMA cache_size = 1")
        connection.execute("BEGIN")
        for n in range(2000):
            connection.execute("INSERT INTO Settings VALUES (?, ?)", (n, "x" * 500))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    start(script, directory).wait(30)
    assert (directory / "cache.db-journal").stat().st_size > 0
    assert warned(lambda: Store(directory).put("k", ENTRY)) == []
    assert Store(directory).get("k") == ENTRY


# --- kill -9 ---

PUBLISH = """
    import os, sys
    from jitconv.store import Entry, Store
    store = Store(sys.argv[1])
    n = 0
    while True:
        n += 1
        seed = n % 7
        with store.claim(f"k{seed}"):
            store.put(f"k{seed}", Entry(bytes([seed]) * (1000 * 4 ** seed), f"// {seed}", {"n": n}))
        if n == 1:
            print("running", flush=True)
"""


def check_published(directory: Path) -> None:
    with Store(directory) as store:
        assert store.verify() == []
        for info in store.entries():
            seed = int(info.key[1:])
            entry = store.get(info.key)
            assert entry.cubin == bytes([seed]) * (1000 * 4**seed)
            assert entry.source == f"// {seed}"


def publish_and_kill(directory: Path, times: int) -> None:
    chance = random.Random(20)
    for _ in range(times):
        process = start(PUBLISH, directory)
        # From before the directory exists to the middle of a publish.
        if chance.random() < 0.7:
            process.stdout.readline()
            time.sleep(chance.random() * 0.05)
        else:
            time.sleep(0.05 + chance.random() * 0.2)
        kill(process)
        assert warned(lambda: check_published(directory)) == []
        with Store(directory) as store, store.claim("k1", timeout=1.0) as held:
            assert held


def test_a_killed_writer_leaves_nothing_half_done(tmp_path):
    publish_and_kill(tmp_path / "kernels", 12)


@pytest.mark.slow
def test_two_hundred_killed_writers_leave_nothing_half_done(tmp_path):
    publish_and_kill(tmp_path / "kernels", 200)


CLAIM = """
    import os, sys, time
    from jitconv.store import Store
    with Store(sys.argv[1]).claim("k") as held:
        child = None
        if sys.argv[2] == "fork":
            child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
        print(held, child, flush=True)
        sys.stdin.read()
"""


@pytest.mark.parametrize("forks", ["fork", "no fork"])
def test_a_killed_claimant_blocks_nobody(forks, tmp_path):
    process = start(CLAIM, tmp_path / "kernels", forks)
    held, child = process.stdout.readline().split()
    assert held == "True"
    store = Store(tmp_path / "kernels")
    with store.claim("k", timeout=0.1) as ours:
        assert not ours
    process.kill()
    process.wait()
    try:
        before = time.monotonic()
        with store.claim("k", timeout=20) as ours:
            assert ours
        assert time.monotonic() - before < BOUND_S
    finally:
        if child != "None":
            os.kill(int(child), signal.SIGKILL)
        process.communicate()


def test_a_stopped_claimant_costs_the_time_limit_and_no_more(tmp_path):
    process = start(CLAIM, tmp_path / "kernels", "no fork")
    process.stdout.readline()
    process.send_signal(signal.SIGSTOP)
    try:
        before = time.monotonic()
        store = Store(tmp_path / "kernels")
        assert fetch_or_build("k", lambda: ENTRY, store, claim_timeout=0.3) == ENTRY
        assert 0.3 <= time.monotonic() - before < BOUND_S
        assert store.get("k") == ENTRY
    finally:
        kill(process)


def test_a_claim_is_free_again_after_its_block(tmp_path):
    store = Store(tmp_path / "kernels")
    for _ in range(3):
        with store.claim("k", timeout=0) as held:
            assert held
    with pytest.raises(ZeroDivisionError), store.claim("k"):
        raise ZeroDivisionError
    with store.claim("k", timeout=0) as held:
        assert held


def test_a_claim_excludes_other_holders_of_the_same_key_only(tmp_path):
    store = Store(tmp_path / "kernels")
    with (
        store.claim("a", timeout=0) as first,
        store.claim("a", timeout=0.05) as second,
        store.claim("b", timeout=0) as other,
    ):
        assert (first, second, other) == (True, False, True)


def test_a_lock_on_a_claim_file_that_was_removed_does_not_count(tmp_path, monkeypatch):
    path = tmp_path / "k.lock"
    lock = fcntl.flock
    others = []

    def lock_late(descriptor: int, operation: int) -> None:
        # Between opening and locking, the holder leaves and somebody else comes.
        if not others:
            path.unlink()
            others.append(os.open(path, os.O_RDWR | os.O_CREAT))
            lock(others[0], fcntl.LOCK_EX)
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    with claims.claim(path, 0.05) as held:
        assert not held
    os.close(others[0])


def test_claim_files_of_killed_processes_are_tidied_up(tmp_path):
    process = start(CLAIM, tmp_path / "kernels", "no fork")
    process.stdout.readline()
    kill(process)
    store = Store(tmp_path / "kernels")
    store.clear()
    assert list((tmp_path / "kernels" / "locks").iterdir()) == []


# --- many processes ---

FETCH = """
    import json, os, sys, time, warnings
    from jitconv.stats import stats
    from jitconv.store import Entry, Store, fetch_or_build
    import random
    warnings.simplefilter("error")
    directory, number, keys, pause = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    store = Store(directory)
    order = list(range(keys))
    random.Random(number).shuffle(order)
    print("ready", flush=True)
    sys.stdin.readline()
    right = True
    for n in order:
        wanted = Entry(bytes([n]) * 30_000, f"// {n}", {"n": n})
        def build(wanted=wanted):
            time.sleep(float(pause))
            return wanted
        right &= fetch_or_build(f"k{n}", build, store) == wanted
    store.close()
    print(json.dumps([right, stats().compiled, stats().store_errors]))
"""


@pytest.mark.parametrize(("processes", "keys", "pause"), [(8, 1, 0.3), (16, 40, 0.0)])
def test_processes_that_start_cold_build_each_key_once(processes, keys, pause, tmp_path):
    directory = tmp_path / "kernels"
    running = [start(FETCH, directory, n, keys, pause) for n in range(processes)]
    for process in running:
        assert process.stdout.readline() == "ready\n"
    for process in running:
        process.stdin.write("go\n")
        process.stdin.flush()
    results = [json.loads(finish(process)) for process in running]
    assert all(right for right, _, _ in results)
    assert sum(compiled for _, compiled, _ in results) == keys
    assert sum(errors for _, _, errors in results) == 0
    assert len(Store(directory).keys()) == keys


def test_a_second_process_builds_nothing(tmp_path):
    store = Store(tmp_path / "kernels")
    fetch_or_build("k0", lambda: Entry(bytes(30_000), "// 0", {"n": 0}), store)
    process = start(FETCH, store.directory, 0, 1, 0.0)
    process.stdin.write("go\n")
    assert json.loads(finish(process).splitlines()[-1]) == [True, 0, 0]


# --- fork ---


def in_child(action: Callable[[], object], timeout: float = 20) -> object:
    """Run ``action`` in a forked child; a child that hangs is killed and fails the test."""
    reader, writer = os.pipe()
    pid = fork()
    if pid == 0:
        signal.alarm(int(timeout))
        try:
            answer = {"result": action()}
        except BaseException:
            answer = {"failure": traceback.format_exc()}
        os.write(writer, json.dumps(answer).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"the child ended with status {status}"
    answer = json.loads(text)
    assert "failure" not in answer, answer["failure"]
    return answer["result"]


def test_parent_and_child_both_go_on_after_a_fork(tmp_path):
    store = Store(tmp_path / "kernels")
    store.put("before", ENTRY)

    def child() -> bool:
        assert store._database is None
        return store.get("before") == ENTRY and store.put("child", ENTRY)

    assert in_child(child)
    assert store.get("child") == ENTRY
    assert store.put("parent", ENTRY)
    assert in_child(lambda: store.get("parent") == ENTRY)


def test_a_fork_while_another_thread_is_in_the_store(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "CALL_DEADLINE_S", 0.2)
    store = Store(tmp_path / "kernels")
    store.put("k", ENTRY)
    inside = threading.Event()
    leave = threading.Event()

    def stay(_: object) -> None:
        inside.set()
        leave.wait()

    thread = threading.Thread(target=store._run, args=(stay, None))
    thread.start()
    inside.wait()
    try:
        assert in_child(lambda: store.get("k") == ENTRY)
    finally:
        leave.set()
        thread.join()
    assert store.get("k") == ENTRY


def test_a_fork_while_another_thread_builds_does_not_leave_the_child_waiting(tmp_path):
    store = Store(tmp_path / "kernels")
    building = threading.Event()
    proceed = threading.Event()

    def slow() -> Entry:
        building.set()
        proceed.wait()
        return ENTRY

    thread = threading.Thread(target=fetch_or_build, args=("k", slow, store))
    thread.start()
    building.wait()
    try:
        # The child cannot have the claim, which its parent holds, so it builds without.
        fetched = in_child(lambda: fetch_or_build("k", lambda: ENTRY, store, claim_timeout=0.2) == ENTRY)
        assert fetched
    finally:
        proceed.set()
        thread.join()


FORKING = """
import os, signal, sys, threading
from pathlib import Path
from jitconv.store import Entry, Store

ENTRY = Entry(b"cubin", "source", {})
store = Store(Path(sys.argv[1]))
store.put("k", ENTRY)
results = []

def work():
    for _ in range(3):
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            os._exit(0 if store.get("k") == ENTRY else 1)
        results.append(os.waitpid(pid, 0)[1])

threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(60)
assert results == [0] * 12, results
"""


def test_forks_from_several_threads_do_not_block_each_other(tmp_path):
    # In a process of its own: the threads of a test runner would be forked away in the middle of their work too.
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKING, str(tmp_path / "kernels")], check=True, timeout=100)


def test_the_default_store_works_in_a_forked_child(tmp_path, monkeypatch):
    monkeypatch.setenv("JITCONV_CACHE_DIR", str(tmp_path / "kernels"))
    default_store().put("k", ENTRY)
    assert in_child(lambda: default_store().get("k") == ENTRY)


# --- descriptors ---


def test_running_out_of_descriptors_damages_nothing(tmp_path):
    with Store(tmp_path / "kernels") as store:
        store.put("k", ENTRY)

    def starve() -> object:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        starved = Store(tmp_path / "kernels")
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        messages = warned(lambda: starved.get("k"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return messages

    assert len(in_child(starve)) == 1
    with Store(tmp_path / "kernels") as store:
        assert store.get("k") == ENTRY
        assert store.info().quarantined == 0


def test_a_degraded_store_logs_no_traceback(tmp_path, caplog):
    caplog.set_level(logging.DEBUG, "jitconv.store")
    (tmp_path / "kernels").write_text("")
    warned(lambda: use(Store(tmp_path / "kernels")))
    assert all(record.levelno < logging.WARNING for record in caplog.records)
    assert all(record.exc_info is None for record in caplog.records)
