"""Tuned tiles: what is kept, what is believed, and how a winner is found, with a stand-in for the GPU and its clock."""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch import Tensor

import jitconv
from jitconv import calls, functional, launch, machine, program, reference, runtime, tuning
from jitconv import epilogue as E
from jitconv.cli import main
from jitconv.compilation import key_of
from jitconv.errors import CompileError, DriverNotFoundError, JitconvError, ManifestError
from jitconv.families import HaloTile
from jitconv.machine import Gpu
from jitconv.manifest import select
from jitconv.planning import candidates, plan, selection, tuned
from jitconv.planning.selection import ConvolutionTile, identity
from jitconv.planning.tuned import InvalidRecordError, Record, Table
from jitconv.problem import Problem
from jitconv.program import Call, Program
from jitconv.store import Entry, Store, StoreUnavailableError, default_store
from jitconv.timing import Timing
from jitconv.warm import jobs_of

GPU, ARCH = "NVIDIA TEST 80GB", "sm_80"

MANIFEST = """
[layer]
operator = "conv2d"
input = [2, 16, 12, 20]
weight = [24, 16, 1, 1]
bias = true
epilogue = ["silu", { step = "add", other = "tensor" }]
"""


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "store"
    monkeypatch.setenv("JITCONV_CACHE_DIR", str(folder))
    tuned.forget()
    yield folder
    tuned.forget()


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of shipped tables of our own."""
    folder = tmp_path / "shipped"
    folder.mkdir()
    monkeypatch.setattr(tuned, "_tables", lambda: folder)
    return folder


@pytest.fixture
def manifest(tmp_path: Path) -> str:
    path = tmp_path / "small.toml"
    path.write_text(MANIFEST)
    return str(path)


@pytest.fixture
def problem(manifest: str) -> Problem:
    (entry,) = select(manifest)
    return program.build(entry.call(), ARCH).problem


def record(problem: Problem, tile: ConvolutionTile | None = None, **changes: Any) -> Record:
    """A record that names ``tile``, by default one that the heuristic would not take."""
    tile = tile or candidates(problem, ARCH)[-1]
    return replace(Record(tuned.described(problem), identity(tile), 0.5, 0.75, "0f" * 8), **changes)


def ship(tables: Path, *records: Record, gpu: str = GPU, arch: str = ARCH) -> Path:
    path = tables / f"{tuned.slug(gpu)}.json"
    path.write_text(tuned.table_text(Table(gpu, arch, {r.problem: r for r in records})))
    tuned.forget()
    return path


def taken(problem: Problem, gpu: str | None = GPU, arch: str = ARCH) -> tuple[ConvolutionTile, str | None]:
    """The tile of the plan, and where it comes from."""
    chosen = plan(problem, arch, gpu)
    (tile,) = {k.tile for k in chosen.kernels if not k.family.startswith("pack")}
    return tile, chosen.tuned and chosen.tuned.source  # type: ignore[return-value]


# ---- records --------------------------------------------------------------------------------------------------------


def test_a_record_changes_on_its_way(problem: Problem) -> None:
    written = record(problem)
    tuned.put(GPU, ARCH, written)
    assert tuned.stored(GPU) == Table(GPU, ARCH, {written.problem: written})
    assert tuned.parse_table(tuned.table_text(Table(GPU, ARCH, {written.problem: written}))).records == {
        written.problem: written
    }


def test_a_table_has_other_bytes_for_the_same_records(problem: Problem) -> None:
    one, two = record(problem), record(replace(problem, bias=False))
    texts = {tuned.table_text(Table(GPU, ARCH, {r.problem: r for r in pair})) for pair in ([one, two], [two, one])}
    (text,) = texts
    assert text.count("\n") == len([one, two]) + 2
    assert json.loads(text)["gpu"] == GPU


def test_two_problems_have_one_name(problem: Problem) -> None:
    others = [
        replace(problem, bias=False),
        replace(problem, dtype="float16"),
        replace(problem, sizes=(8, 8)),
        replace(problem, stride=(2, 2)),
        replace(problem, epilogue=problem.epilogue[:1]),
        replace(problem, epilogue=problem.epilogue[::-1]),
    ]
    assert len({tuned.described(p) for p in [problem, *others]}) == len(others) + 1


def test_the_wording_of_a_step_makes_a_record_stale(problem: Problem) -> None:
    silu, add = problem.epilogue
    reworded = replace(problem, epilogue=(replace(silu, cuda="act::silu( v )", preamble="// moved"), add))
    assert tuned.described(reworded) == tuned.described(problem)
    assert "cuda" not in tuned.described(problem)


# ---- which one counts -----------------------------------------------------------------------------------------------


def test_without_a_gpu_a_record_counts(problem: Problem) -> None:
    tuned.put(GPU, ARCH, record(problem))
    heuristic, other = candidates(problem, ARCH)[0], candidates(problem, ARCH)[-1]
    assert heuristic != other
    assert taken(problem) == (other, "store")
    assert taken(problem, None) == (heuristic, None)
    assert taken(problem, "NVIDIA TEST 40GB") == (heuristic, None)
    assert taken(replace(problem, bias=False)) == (heuristic, None)


def test_the_shipped_record_beats_the_users_own(problem: Problem, tables: Path) -> None:
    heuristic, second, *_, last = candidates(problem, ARCH)
    assert len({identity(t) for t in (heuristic, second, last)}) == 3
    ship(tables, record(problem, second))
    assert taken(problem) == (second, "shipped")
    tuned.put(GPU, ARCH, record(problem, last))
    assert taken(problem) == (last, "store")
    assert tuned.remove(GPU, ARCH, tuned.described(problem))
    assert taken(problem) == (second, "shipped")
    assert not tuned.remove(GPU, ARCH, tuned.described(problem))


def test_a_table_of_another_model_or_architecture_counts(problem: Problem, tables: Path) -> None:
    heuristic = candidates(problem, ARCH)[0]
    path = ship(tables, record(problem), gpu="nvidia-test-80gb")
    assert path.name == f"{tuned.slug(GPU)}.json"
    assert taken(problem) == (heuristic, None)
    ship(tables, record(problem), arch="sm_86")
    assert taken(problem) == (heuristic, None)


def test_the_store_is_searched_in_the_directory_of_before(
    problem: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned.put(GPU, ARCH, record(problem))
    assert taken(problem)[1] == "store"
    monkeypatch.setenv("JITCONV_CACHE_DIR", str(tmp_path / "another"))
    assert taken(problem)[1] is None


def test_a_look_up_creates_something(problem: Problem, directory: Path) -> None:
    taken(problem)
    tuned.overview()
    assert not directory.exists()


def test_records_are_listed_as_kernels_or_cleared_with_them(problem: Problem) -> None:
    tuned.put(GPU, ARCH, record(problem))
    with Store.open(strict=True) as store:
        assert store.keys() == []
        store.clear()
    assert taken(problem)[1] == "store"
    assert tuned.overview() == [(GPU, ARCH, 1, 0)]
    assert tuned.clear() == 1
    assert taken(problem)[1] is None


def test_the_rings_of_a_record_are_those_of_its_day() -> None:
    """A record names a tile; how deep its rings are, today's planner says."""
    x, w = torch.empty(1, 32, 8, 32, 32, device="meta"), torch.empty(64, 32, 3, 3, 3, device="meta")
    problem = program.build(calls.call_of(jitconv.conv3d, x, w, precision="tf32"), "sm_90a").problem
    today = candidates(problem, "sm_90a")[3]
    then = replace(today, stages=2, units=2)  # type: ignore[call-arg]
    assert then != today
    tuned.put(GPU, "sm_90a", record(problem, then))
    assert taken(problem, arch="sm_90a") == (today, "store")


def test_a_tile_that_the_planner_no_longer_makes_is_taken(
    problem: Problem, tables: Path, caplog: pytest.LogCaptureFixture
) -> None:
    heuristic, second, *_ = candidates(problem, ARCH)
    assert isinstance(second, HaloTile)
    gone = replace(second, box=(1, 3, 5))
    tuned.put(GPU, ARCH, record(problem, gone))
    with caplog.at_level(logging.INFO, logger="jitconv"):
        assert taken(problem) == (heuristic, None)
    assert "no such tile any more" in caplog.text
    # What is shipped is the next best.
    ship(tables, record(problem, second))
    assert taken(problem) == (second, "shipped")


def test_a_tile_of_another_problem_is_taken(problem: Problem) -> None:
    """FFMA's tile of 128 channels spills in a plain convolution: it is in no list of its tiles."""
    from jitconv.planning.tiles import CANDIDATES

    wide = CANDIDATES[-1]
    assert wide.channels == 128
    tuned.put(GPU, ARCH, record(problem, wide))
    assert taken(problem)[1] is None


# ---- hostile ones ---------------------------------------------------------------------------------------------------

HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "unknown field": lambda r: {**r, "exec": "rm -rf /"},
    "missing field": lambda r: {k: v for k, v in r.items() if k != "tile"},
    "no object": lambda r: [r],
    "text for a time": lambda r: {**r, "ms": "0.5"},
    "true for a time": lambda r: {**r, "ms": True},
    "a negative time": lambda r: {**r, "heuristic_ms": -1.0},
    "an endless time": lambda r: {**r, "ms": 1e400},
    "another type of tile": lambda r: {**r, "tile": {**r["tile"], "type": "KernelPlan"}},
    "a list for a type": lambda r: {**r, "tile": {**r["tile"], "type": ["HaloTile"]}},
    "an unknown field of a tile": lambda r: {**r, "tile": {**r["tile"], "__class__": 1}},
    "text in a tile": lambda r: {**r, "tile": {**r["tile"], "channel_warps": "2"}},
    "a float in a tile": lambda r: {**r, "tile": {**r["tile"], "channel_warps": 2.0}},
    "true in a box": lambda r: {**r, "tile": {**r["tile"], "box": [True, 8, 16]}},
    "a box of four": lambda r: {**r, "tile": {**r["tile"], "box": [1, 8, 16, 1]}},
    "code for math": lambda r: {**r, "tile": {**r["tile"], "math": 'TF32"; asm("trap'}},
    "a huge box": lambda r: {**r, "tile": {**r["tile"], "box": [1, 1 << 40, 1 << 40]}},
    "an unknown field of a problem": lambda r: {**r, "problem": {**r["problem"], "cuda": "v"}},
    "no problem": lambda r: {**r, "problem": None},
    "an endless problem": lambda r: {**r, "problem": {"operator": "x" * (1 << 17)}},
    "no digest": lambda r: {**r, "templates": "../../etc"},
}


def write_row(problem: Problem, row: Any, **around: Any) -> None:
    """A row of the user's store as somebody else might have written it, checksum and all."""
    tuned.put(GPU, ARCH, record(problem))
    metadata = {"format": 1, "gpu": GPU, "arch": ARCH, "record": row, **around}
    with tuned._writable() as store:
        (key,) = store.keys()
        assert store.put(key, Entry(cubin=b"", source="", metadata=metadata))
    tuned.forget()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_record_is_believed(
    name: str, problem: Problem, tables: Path, caplog: pytest.LogCaptureFixture
) -> None:
    row = HOSTILE[name](record(problem).as_dict())
    text = json.dumps({"format": 1, "gpu": GPU, "arch": ARCH, "records": [row]})
    (tables / f"{tuned.slug(GPU)}.json").write_text(text)
    tuned.forget()
    with caplog.at_level(logging.INFO, logger="jitconv"):
        assert taken(problem)[1] is None
    assert "ignored" in caplog.text
    if name == "an endless time":
        return  # JSON of the store cannot say it
    caplog.clear()
    (tables / f"{tuned.slug(GPU)}.json").unlink()
    write_row(problem, row)
    with caplog.at_level(logging.INFO, logger="jitconv"):
        assert taken(problem)[1] is None
    assert "ignored" in caplog.text


@pytest.mark.parametrize(
    "around", [{"gpu": "another"}, {"arch": "sm_86"}, {"format": 2}, {"format": True}, {"gpu": 1}, {"more": 1}], ids=str
)
def test_a_row_under_the_key_of_another_is_believed(problem: Problem, around: dict[str, Any]) -> None:
    write_row(problem, record(problem).as_dict(), **around)
    assert taken(problem)[1] is None
    tuned.overview()
    tuned.stored(GPU)


def test_a_good_record_is_lost_with_a_bad_one(problem: Problem, tables: Path) -> None:
    good = record(problem)
    text = json.dumps({"format": 1, "gpu": GPU, "arch": ARCH, "records": [{"tile": []}, good.as_dict()]})
    (tables / f"{tuned.slug(GPU)}.json").write_text(text)
    tuned.forget()
    assert taken(problem)[1] == "shipped"


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", "null", '{"format": 1}', "[" * 100_000, '{"format": NaN, "gpu": "", "arch": "", "records": []}',
     '{"format": 2, "gpu": "NVIDIA TEST 80GB", "arch": "sm_80", "records": []}',
     '{"format": 1, "gpu": "NVIDIA TEST 80GB", "arch": "sm_80", "records": {}}', "9" * 5000],
    ids=range(10),
)  # fmt: skip
def test_a_file_that_is_no_table_fails_a_call(text: str, problem: Problem, tables: Path) -> None:
    with pytest.raises(InvalidRecordError):
        tuned.parse_table(text)
    (tables / f"{tuned.slug(GPU)}.json").write_text(text)
    tuned.forget()
    assert taken(problem)[1] is None
    (tables / f"{tuned.slug(GPU)}.json").write_bytes(b"\xff\xfe")
    tuned.forget()
    assert taken(problem)[1] is None


def test_a_damaged_store_fails_a_call(problem: Problem, directory: Path) -> None:
    tuned.put(GPU, ARCH, record(problem))
    for file in (directory / "tuned").glob("cache.db*"):
        file.write_bytes(b"not a database")
    tuned.forget()
    tuned._store_in.cache_clear()
    # A new database takes its place, as in the store of kernels.
    assert taken(problem)[1] is None
    tuned.put(GPU, ARCH, record(problem))
    assert taken(problem)[1] == "store"


def test_a_directory_that_others_can_write_is_believed(problem: Problem, directory: Path) -> None:
    tuned.put(GPU, ARCH, record(problem))
    directory.chmod(0o777)
    tuned.forget()
    assert taken(problem)[1] is None
    directory.chmod(0o700)


def test_the_shipped_tables_are_not_what_this_version_writes() -> None:
    """Every shipped record must be valid and name a tile that the planner makes; sorted, one record a line."""
    for path in sorted(tuned._tables().glob("*.json")) if tuned._tables().is_dir() else ():
        text = path.read_text(encoding="utf-8")
        table = tuned.parse_table(text)
        assert len(table.records) == len(json.loads(text)["records"]), path
        assert tuned.table_text(table) == text
        assert path.stem == tuned.slug(table.gpu)


# ---- finding a winner: a stand-in for the GPU ----------------------------------------------------------------------


class Bench:
    """Stands for a GPU: its runners compute by torch, its clock says what a test wrote down for each tile."""

    def __init__(self) -> None:
        self.milliseconds: Callable[[int], float] = lambda place: 1.0 + place
        self.spoil: dict[int, Callable[[Tensor], None]] = {}
        self.broken: set[int] = set()
        self.idle: set[int] = set()
        self.buffers: dict[Any, Tensor] = {}
        self.places: list[str] = []
        self.loaded = 0
        self.ran: list[int] = []
        self.rounds: list[list[int]] = []

    def place(self, tile: ConvolutionTile) -> int:
        return self.places.index(identity(tile))

    def runner(self, call: Call, built: Program, entries: list[Entry], gpu: Any, buffers: Any) -> FakeRunner:
        assert all(entry.cubin == b"\x7fELF" for entry in entries)
        return FakeRunner(self, call, built)

    def compile(self, kernel: Any, arch: str) -> Entry:
        # Kernels that pack weights are shared by many tiles.
        if not kernel.family.startswith("pack") and self.place(kernel.tile) in self.broken:
            raise CompileError("it does not compile\nat all")
        said = {"name": "k", "registers": 1, "spill_stores": 0, "spill_loads": 0, "compile_ms": 1.0}
        return Entry(b"\x7fELF", "", said)

    def interleaved(self, runners: Mapping[str, FakeRunner], *, repeats: int, warmup: int) -> dict[str, Timing]:
        self.rounds.append([runner.place for runner in runners.values()])
        assert repeats <= 20
        return {name: Timing(*[self.milliseconds(runner.place)] * 3) for name, runner in runners.items()}


class FakeRunner:
    def __init__(self, bench: Bench, call: Call, built: Program) -> None:
        (tile,) = {k.tile for k in built.plan.kernels}
        self.bench, self.call, self.place = bench, call, bench.place(tile)  # type: ignore[arg-type]
        # Runners share their outputs.
        buffer = torch.empty(built.shape, dtype=call.x.dtype)
        self.output = bench.buffers.setdefault((buffer.shape, buffer.dtype), buffer)
        bench.loaded += 1

    def poison(self) -> None:
        self.output.fill_(torch.nan)

    def __call__(self) -> None:
        c = self.call
        self.bench.ran.append(self.place)
        if self.place in self.bench.idle:
            return
        self.output.copy_(
            reference.run(c.operator, c.x, c.weights, c.biases, c.geometry, between=c.between, epilogue=c.epilogue)
        )
        self.bench.spoil.get(self.place, lambda y: None)(self.output)

    def unload(self) -> None:
        self.bench.loaded -= 1


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, problem: Problem) -> Bench:
    bench = Bench()
    bench.places = [identity(tile) for tile in candidates(problem, ARCH)]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for module in (tuning, machine):
        monkeypatch.setattr(module, "gpus", lambda: [Gpu(0, GPU, (8, 0))])
    # jitconv.tune is the function.
    monkeypatch.setattr(sys.modules["jitconv.tune"], "device_of", lambda gpu: torch.device("cpu"))
    monkeypatch.setattr(functional, "torch_path_reason", lambda call: None)
    monkeypatch.setattr(tuning, "Runner", bench.runner)
    monkeypatch.setattr(tuning, "compile_kernel", bench.compile)
    monkeypatch.setattr(tuning, "interleaved", bench.interleaved)
    return bench


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def test_the_fastest_is_not_taken_by_the_next_plan(bench: Bench, manifest: str, problem: Problem) -> None:
    bench.milliseconds = lambda place: 0.6 if place == 2 else 1.0 + place / 100
    (result,) = jitconv.tune(manifest)
    tiles = candidates(problem, ARCH)
    assert result.winner is not None
    assert result.winner.tile == tiles[2]
    assert result.stored
    assert [row.state for row in result.rows] == ["ok"] * len(tiles)
    assert all(row.error < 1e-6 for row in result.rows)
    assert taken(problem) == (tiles[2], "store")
    kept = plan(problem, ARCH, GPU).tuned
    assert kept is not None
    assert (kept.record.milliseconds, kept.record.heuristic_milliseconds) == (0.6, 1.0)
    assert kept.record.templates == tuning.templates_digest(plan(problem, ARCH).kernels)
    assert bench.loaded == 0
    # A call that follows compiles nothing.
    store = default_store()
    assert store is not None
    (entry,) = select(manifest)
    launches = program.build(entry.call(), ARCH, GPU).launches
    assert {key_of(step.kernel, ARCH) for step in launches} <= set(store.keys())
    assert len(store.keys()) < 2 * len(tiles)


def test_a_gain_within_noise_is_kept(bench: Bench, manifest: str, problem: Problem) -> None:
    bench.milliseconds = lambda place: 1.0 if place == 0 else 0.985
    (result,) = jitconv.tune(manifest)
    assert result.winner is result.heuristic
    assert not result.stored
    assert taken(problem)[1] is None


def test_an_earlier_winner_outlives_a_measurement_that_it_loses(bench: Bench, manifest: str, problem: Problem) -> None:
    tuned.put(GPU, ARCH, record(problem))
    jitconv.tune(manifest)
    assert taken(problem) == (candidates(problem, ARCH)[0], None)


def test_a_shipped_tile_that_loses_here_is_taken_all_the_same(
    bench: Bench, manifest: str, problem: Problem, tables: Path, tmp_path: Path
) -> None:
    ship(tables, record(problem))
    (result,) = jitconv.tune(manifest)
    assert result.winner is result.heuristic
    assert taken(problem) == (candidates(problem, ARCH)[0], "store")
    # It is no winner to ship either.
    done = run("tune", manifest, "--export", str(tmp_path / "out.json"))
    assert "0 tuned problems" in done.stdout
    assert tuned.parse_table((tmp_path / "out.json").read_text()).records == {}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda y: y.view(-1)[7].fill_(math.nan),
        lambda y: y.view(-1)[-1].add_(1.0),
        lambda y: y.view(-1)[-1].add_(0.1),
        lambda y: y.mul_(1.01),
        lambda y: y.copy_(y.roll(1, 0)),
        lambda y: y.view(-1)[0].fill_(math.inf),
    ],
    ids=["one not written", "an element", "a little of it", "a scale", "samples in another order", "an infinity"],
)
def test_a_wrong_result_wins(
    spoil: Callable[[Tensor], None], bench: Bench, manifest: str, problem: Problem
) -> None:
    bench.milliseconds = lambda place: 0.1 if place == 1 else 1.0 - 0.1 * (place == 2)
    bench.spoil[1] = spoil
    done = run("tune", manifest)
    assert done.exit_code == 1
    assert "WRONG RESULTS" in done.stderr
    assert "please report" in done.stderr
    assert taken(problem) == (candidates(problem, ARCH)[2], "store")
    assert all(1 not in places for places in bench.rounds)
    assert bench.loaded == 0


def test_a_kernel_that_writes_nothing_passes_for_the_one_before(bench: Bench, manifest: str) -> None:
    bench.idle = {1}
    (result,) = jitconv.tune(manifest)
    assert [row.state for row in result.rows[:3]] == ["ok", "wrong", "ok"]


def test_a_tile_that_does_not_compile_ends_it(bench: Bench, manifest: str, problem: Problem) -> None:
    bench.milliseconds = lambda place: 0.5 if place == 2 else 1.0
    bench.broken = {1}
    done = run("tune", manifest)
    assert done.exit_code == 1
    assert "it does not compile" in done.stderr
    assert taken(problem) == (candidates(problem, ARCH)[2], "store")


def test_nothing_right_is_a_winner(bench: Bench, manifest: str, problem: Problem) -> None:
    bench.spoil = {place: lambda y: y.zero_() for place in range(len(bench.places))}
    (result,) = jitconv.tune(manifest)
    assert result.winner is None
    assert len(result.faults) == len(bench.places)
    assert taken(problem)[1] is None
    assert "nothing kept" in run("tune", manifest).stdout


def test_a_wrong_heuristic_keeps_a_right_tile_from_winning(bench: Bench, manifest: str, problem: Problem) -> None:
    bench.spoil[0] = lambda y: y.zero_()
    (result,) = jitconv.tune(manifest)
    assert result.winner is result.rows[1]
    assert taken(problem) == (candidates(problem, ARCH)[1], "store")


def test_candidates_out_of_reach_are_timed_to_the_end(bench: Bench, manifest: str) -> None:
    bench.milliseconds = lambda place: 10.0 if place == 0 else 1.0 + place
    (result,) = jitconv.tune(manifest)
    assert bench.rounds == [list(range(len(bench.places))), [0, 1]]
    assert all(row.timing is not None for row in result.rows)


def test_a_limit_drops_the_heuristic(bench: Bench, manifest: str) -> None:
    (result,) = jitconv.tune(manifest, limit=2)
    assert [bench.place(row.tile) for row in result.rows] == [0, 1]


def test_a_fault_of_the_gpu_is_not_named(bench: Bench, manifest: str) -> None:
    def fault(y: Tensor) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    bench.spoil[1] = fault
    done = run("tune", manifest)
    assert done.exit_code == 1
    assert "illegal memory access" in done.stderr
    assert "mma" in done.stderr
    assert "Traceback" not in done.output
    assert bench.loaded == 1  # the one that faulted: unloading would fail too


def test_not_enough_memory_is_a_traceback(bench: Bench, manifest: str) -> None:
    def full(y: Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    bench.spoil[0] = full
    done = run("tune", manifest)
    assert done.exit_code == 1
    assert "smaller batch" in done.stderr


def test_the_command_prints_what_it_found(bench: Bench, manifest: str, tmp_path: Path) -> None:
    bench.milliseconds = lambda place: 0.5 if place == 2 else 1.0
    out = tmp_path / "out.json"
    done = run("tune", manifest, "--repeats", "5", "--jobs", "2", "--export", str(out))
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    row = next(line for line in lines if "winner" in line)
    assert "mma" in row
    assert "0.500" in row
    assert "2.00 × as fast" in row
    assert "heuristic" in next(line for line in lines if "1.00 ×" in line)
    assert "the winner is kept" in done.stdout
    assert "takes 100% more time than the fastest one, in the median of 1 problems" in done.stdout
    assert "1 tuned problems" in done.stdout
    table = tuned.parse_table(out.read_text())
    assert (table.gpu, table.arch, len(table.records)) == (GPU, ARCH, 1)


def test_a_call_on_tensors_is_measured_like_an_entry(bench: Bench) -> None:
    x, w = torch.randn(2, 16, 5, 7), torch.randn(8, 16, 3, 3)
    call = calls.call_of(jitconv.conv2d, x, w, padding=1, epilogue=[E.relu()])
    bench.places = [identity(tile) for tile in candidates(program.build(call, ARCH).problem, ARCH)]
    (result,) = jitconv.tune(jitconv.conv2d, x, w, padding=1, epilogue=[E.relu()])
    assert result.title == "conv2d"
    assert result.heuristic.state == "ok"


def test_what_cannot_be_tuned_is_not_named(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ManifestError):
        jitconv.tune("nothing")
    with pytest.raises(TypeError, match="address"):
        jitconv.tune("headline", torch.ones(1))
    for option in ("limit", "repeats", "jobs"):
        with pytest.raises(ValueError, match=f"{option}=0"):
            jitconv.tune("headline", **{option: 0})  # type: ignore[arg-type]
    with pytest.raises(JitconvError, match="no elements"):
        jitconv.tune(jitconv.conv2d, torch.ones(0, 4, 5, 5), torch.ones(4, 4, 3, 3))
    monkeypatch.setattr(functional, "torch_path_reason", lambda call: "float64")
    with pytest.raises(JitconvError, match="float64"):
        jitconv.tune(jitconv.conv2d, torch.ones(1, 4, 5, 5), torch.ones(4, 4, 3, 3))


def test_a_store_that_cannot_keep_the_winner_is_noticed_late(bench: Bench, manifest: str, directory: Path) -> None:
    directory.mkdir()
    directory.chmod(0o777)
    done = run("tune", manifest)
    assert done.exit_code == 1
    assert str(directory) in done.stderr
    with pytest.raises(StoreUnavailableError):
        jitconv.tune(manifest)
    assert bench.ran == []


def test_without_a_gpu_there_is_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "gpus", list)
    with pytest.raises(DriverNotFoundError, match="no GPU"):
        jitconv.tune("headline:w1")
    done = run("tune", "headline:w1")
    assert done.exit_code == 1
    assert "measured on the GPU" in done.stderr
    assert "jitconv warm" in done.stderr


def test_a_runner_launches_something_else_than_a_call(
    manifest: str, monkeypatch: pytest.MonkeyPatch, problem: Problem
) -> None:
    """The bytes of each launch are those of the runtime, but for the buffers, which runners share."""
    launched: list[tuple[Any, ...]] = []
    unloaded: list[str] = []

    class Kernel:
        def __init__(self, cubin: bytes, name: str, *, device: int, shared_bytes: int, arch: str) -> None:
            self.name, self.shared_bytes = name, shared_bytes

        def launch(self, *arguments: Any) -> None:
            launched.append((self.name, self.shared_bytes, *arguments))

        def unload(self) -> None:
            unloaded.append(self.name)

    monkeypatch.setattr(launch, "load", Kernel)
    monkeypatch.setattr(launch, "device_info", lambda _: SimpleNamespace(sm_count=132))
    monkeypatch.setattr(launch, "current_stream", lambda _: 77)
    gpu = tuning.GpuModel(0, GPU, ARCH)
    call = select(manifest)[0].call(tuning.random_tensors(torch.device("cpu")))
    plan = tuning.study("layer", call, gpu)
    buffers: dict[Any, Tensor] = {}
    runners = []
    for built in plan.programs:
        entries = [Entry(b"", "", {"name": step.kernel.family}) for step in built.launches]
        runners.append(tuning.Runner(call, built, entries, gpu, buffers))
    assert len({runner.output.data_ptr() for runner in runners}) == 1
    for runner, built in zip(runners, plan.programs, strict=True):
        launched.clear()
        runner.poison()
        assert runner.output.isnan().all()
        runner()
        tensors = call.tensors()
        for step, given in zip(built.launches, launched, strict=True):
            tensors[step.writes] = buffers[step.writes, step.shape, step.dtype, step.memory_format]
            expected = runtime.arguments(step, tensors, call.numbers())
            blocks = step.blocks(132)
            assert given == (step.kernel.family, step.shared_bytes, blocks, step.block, expected, 77)
        assert tensors["y"] is runner.output
        unloaded.clear()
        runner.unload()
        assert unloaded == [step.kernel.family for step in built.launches]


# ---- comparing a part of a large output -----------------------------------------------------------------------------

PARTS: dict[str, tuple[Any, ...]] = {
    "conv3d": (jitconv.conv3d, (3, 4, 9, 6, 7), (5, 4, 3, 3, 3), {"padding": ((2, 1), 1, 0)}),
    "strided": (jitconv.conv2d, (2, 4, 23, 6), (5, 4, 3, 3), {"padding": 2, "stride": (3, 1), "dilation": (2, 1)}),
    "one sample": (jitconv.conv2d, (1, 4, 17, 6), (5, 4, 4, 3), {"stride": 2}),
    "transposed": (jitconv.conv_transpose2d, (2, 4, 9, 6), (4, 5, 3, 3), {"stride": 2}),
    "circular": (jitconv.conv2d, (2, 4, 9, 6), (5, 4, 3, 3), {"padding": 1, "padding_mode": "circular"}),
    "1-D": (jitconv.conv1d, (3, 4, 29), (5, 4, 3), {"padding": 1}),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_is_compared_with_another_part(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part in float64 must be that part of the whole, borders and operands included."""
    function, x, w, parameters = PARTS[name]
    x, w = torch.randn(x), torch.randn(w)
    shape = function(x, w, **parameters).shape
    operands = [torch.randn(shape), torch.randn(shape[1:]), torch.randn(shape[1], *(1,) * (len(shape) - 2))]
    operands.append(torch.randn(shape[0], 1, *shape[2:]))
    call = calls.call_of(function, x, w, epilogue=[E.silu(), *map(E.add, operands)], **parameters)
    whole = tuning._exact(call)
    monkeypatch.setattr(tuning, "_COMPARED", 40)
    parts = list(tuning._parts(call, shape))
    assert len(parts) >= (3 if name == "one sample" else 2)
    for part, where in parts:
        assert torch.allclose(tuning._exact(part), whole[where], rtol=1e-12, atol=1e-12)
    # Both ends of the batch and of the first axis are looked at.
    covered = torch.zeros(shape)
    for _, where in parts:
        covered[where] = 1
    assert covered[0, :, 0].all()
    assert covered[-1, :, -1].all()


def test_a_window_is_cut_in_two(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.randn(2, 4, 16, 6), torch.randn(5, 4, 3, 3)
    call = calls.call_of(jitconv.conv2d, x, w, padding=1, epilogue=[E.max_pool(2)])
    whole = tuning._exact(call)
    monkeypatch.setattr(tuning, "_COMPARED", 40)
    parts = list(tuning._parts(call, whole.shape))
    assert [where for _, where in parts] == [(slice(0, 1),), (slice(1, 2),)]
    for part, where in parts:
        assert torch.equal(tuning._exact(part), whole[where])


# ---- who says that a plan is tuned ---------------------------------------------------------------------------------


def test_inspect_hides_that_a_plan_is_tuned(manifest: str, problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned.put(GPU, ARCH, record(problem))
    tile = candidates(problem, ARCH)[-1]
    # The model brings its architecture.
    found = jitconv.inspect(f"{manifest}:layer", gpu=GPU)
    assert (found.arch, found.gpu) == (ARCH, GPU)
    assert found.kernels[-1].plan.tile == tile
    assert found.tuned is not None
    assert found.tuned.record.milliseconds == 0.5
    assert jitconv.inspect(f"{manifest}:layer", arch=ARCH).tuned is None
    done = run("inspect", f"{manifest}:layer", "--gpu", GPU)
    assert f"tuned for {GPU}" in done.stdout
    assert "0.5 ms against the heuristic's 0.75" in " ".join(done.stdout.split())
    shown = json.loads(run("inspect", f"{manifest}:layer", "--gpu", GPU, "--format", "json").stdout)
    assert shown["tuned"]["source"] == "store"
    assert shown["gpu"] == GPU
    # Without --gpu: the one that is here.
    monkeypatch.setattr(machine, "gpus", lambda: [Gpu(0, GPU, (8, 0))])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert jitconv.inspect(f"{manifest}:layer").tuned is not None
    assert jitconv.inspect(f"{manifest}:layer", arch="sm_86").tuned is None


def test_warming_misses_the_kernels_of_a_tuned_model(manifest: str, problem: Problem) -> None:
    entries = select(manifest)
    before = jobs_of(entries, [ARCH])
    assert {job.gpus for job in before} == {()}
    tuned.put(GPU, ARCH, record(problem))
    both, only = jobs_of(entries, [ARCH]), jobs_of(entries, [ARCH], GPU)
    assert {job.key for job in both} == {job.key for job in [*before, *only]}
    assert len(both) > len(before)
    convolution = key_of(plan(problem, ARCH, GPU).kernels[-1], ARCH)
    assert {job.gpus for job in both if job.key == convolution} == {(GPU,)}
    assert [job.key for job in jobs_of(entries, [ARCH], "another model")] == [job.key for job in before]
    # A job of the heuristic that a tuned plan shares is nobody's own.
    assert all(job.gpus == () for job in both if job.key in {b.key for b in before})


def test_the_cache_commands_hide_or_lose_tuned_tiles(problem: Problem) -> None:
    assert "no tiles measured" in run("cache", "info").stdout
    tuned.put(GPU, ARCH, record(problem))
    assert f"1 of {GPU}" in run("cache", "info").stdout
    assert run("cache", "clear", "--yes").exit_code == 0
    assert taken(problem)[1] == "store"
    assert "1 problems" in run("cache", "clear", "--yes", "--tuned").stdout
    assert taken(problem)[1] is None


def test_doctor_hides_tuned_tiles(problem: Problem) -> None:
    from jitconv import doctor

    found = [Gpu(0, GPU, (8, 0)), Gpu(1, GPU, (8, 0)), Gpu(2, "old", (6, 1))]
    (check,) = doctor._tuned(found)
    assert "jitconv tune" in check.remedy
    tuned.put(GPU, ARCH, record(problem))
    (check,) = doctor._tuned(found)
    assert "1 problems measured on this machine" in check.text
    assert check.remedy == ""


def test_the_universe_misses_the_heuristic(problem: Problem) -> None:
    for arch in ("sm_75", "sm_80", "sm_90a"):
        assert selection.heuristic_tile(problem, arch) in list(selection.every_tile(problem, arch))
