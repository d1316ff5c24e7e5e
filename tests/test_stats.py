"""The counters: exact under threads, separate in a forked child, readable, and strict on names."""

from __future__ import annotations

import json
import os
import sys
import threading
import warnings

import pytest

from jitconv.stats import Stats, count, reset_stats, stats


@pytest.fixture(autouse=True)
def fresh_counters():
    reset_stats()
    yield
    reset_stats()


def test_threads_lose_no_increment():
    previous = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=lambda: [count("launches") for _ in range(5000)]) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(previous)
    assert stats().launches == 40_000


def test_snapshot_does_not_change_afterwards():
    count("torch_calls", reason="float64")
    before = stats()
    count("torch_calls", reason="float64")
    count("compiled")
    assert before.compiled == 0
    assert dict(before.torch_reasons) == {"float64": 1}
    with pytest.raises(TypeError):
        before.torch_reasons["float64"] = 7  # type: ignore[index]


def test_reasons_add_up_to_torch_calls():
    count("torch_calls", reason="cpu tensor")
    count("torch_calls", 3, reason="float64")
    snapshot = stats()
    assert snapshot.torch_calls == 4
    assert dict(snapshot.torch_reasons) == {"cpu tensor": 1, "float64": 3}


def test_misspelt_event_is_refused():
    with pytest.raises(ValueError, match="'compile' is not counted"):
        count("compile")


def test_a_torch_call_without_its_reason_is_refused():
    with pytest.raises(ValueError, match="needs a reason"):
        count("torch_calls")
    with pytest.raises(ValueError, match="no other event"):
        count("compiled", reason="cpu tensor")
    assert stats() == Stats()


def test_reset_returns_everything_to_zero():
    count("evicted", 5)
    count("torch_calls", reason="complex64")
    reset_stats()
    assert stats() == Stats()


def test_dict_survives_json_and_text_names_every_event():
    count("compiled", 2)
    count("torch_calls", reason="cpu tensor")
    as_dict = json.loads(json.dumps(stats().as_dict()))
    assert as_dict["compiled"] == 2
    assert as_dict["torch_reasons"] == {"cpu tensor": 1}
    text = str(stats())
    for event in as_dict:
        if event != "torch_reasons":
            assert event in text
    assert "cpu tensor: 1" in text


def test_forked_child_counts_from_zero():
    count("compiled", 3)
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Newer Pythons warn about fork in a process with threads; fork is the subject here.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        count("compiled")
        os.write(writer, str(stats().compiled).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reader, 16) == b"1"
    assert stats().compiled == 3
