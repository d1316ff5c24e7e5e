"""Tiles that were measured to be the fastest, by model of GPU: what ``jitconv tune`` keeps and plans look up.

Two places hold records, asked in this order:

1. the user's: a store of its own in ``tuned/`` of the kernel store's directory, written by ``jitconv tune``;
2. the shipped ones: ``cache/tuned/<model>.json``, readable and sorted::

    {"format": 1, "gpu": "NVIDIA H200", "arch": "sm_90a", "records": [
    {"problem": {…}, "tile": {…}, "ms": 0.62, "heuristic_ms": 0.66, "templates": "1f0c…"},
    …
    ]}

A record only *names* a tile. It counts if the planner, today, makes a tile of that name for that problem, and then it
is the planner's tile that is taken, its rings as deep as they fit today. So a record that became stale, was damaged or
was forged cannot do worse than choose a slower one of the tiles that any call may use. What does not count is ignored,
and the log says why. A changed template makes no record stale: its tile is still right, and seldom slow.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from jitconv.families import HaloTile, Tile, WgmmaTile
from jitconv.planning.selection import ConvolutionTile, every_tile, identity
from jitconv.problem import Problem, StepSpec, canonical_json
from jitconv.resources import cache_root

if TYPE_CHECKING:
    from jitconv.store import Store

__all__ = [
    "Choice",
    "InvalidRecordError",
    "Record",
    "Table",
    "choice_for",
    "clear",
    "described",
    "forget",
    "known_gpus",
    "overview",
    "parse_table",
    "put",
    "remove",
    "shipped",
    "stored",
    "table_text",
]

_log = logging.getLogger("jitconv")

FORMAT = 1

#: Folder of the user's records in the directory of the kernel store, and bytes that they may take: a record has a few
#: hundred, so nobody tunes that many problems.
_FOLDER = "tuned"
_SIZE_LIMIT = 64 << 20

#: Nothing that jitconv writes comes near these; they bound what a hostile file can cost.
_LONGEST_PROBLEM = 1 << 16
_LARGEST_TABLE = 1 << 26

_TILES = {kind.__name__: kind for kind in (Tile, HaloTile, WgmmaTile)}
_RECORD_KEYS = frozenset({"problem", "tile", "ms", "heuristic_ms", "templates"})
_DIGEST = re.compile(r"[0-9a-f]{0,64}")


class InvalidRecordError(ValueError):
    """A record, or a whole table, is not what ``jitconv tune`` writes. It is ignored, and the log says why."""


@dataclass(frozen=True)
class Record:
    """One measurement: ``tile`` was the fastest for ``problem``.

    Attributes:
        problem: :func:`described`, the problem as canonical JSON.
        tile: :func:`jitconv.planning.selection.identity` of the tile.
        milliseconds: of the whole call with this tile.
        heuristic_milliseconds: with the tile that the heuristic chose, in the same run.
        templates: digest of the sources that the kernel was made of; whoever reads may compare it.
    """

    problem: str
    tile: str
    milliseconds: float
    heuristic_milliseconds: float
    templates: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The record as JSON values."""
        return {
            "problem": json.loads(self.problem),
            "tile": json.loads(self.tile),
            "ms": self.milliseconds,
            "heuristic_ms": self.heuristic_milliseconds,
            "templates": self.templates,
        }


@dataclass(frozen=True)
class Choice:
    """A record that counts: the planner's own ``tile``; ``source`` is where the record is, ``store`` or ``shipped``."""

    tile: ConvolutionTile
    gpu: str
    source: str
    record: Record


@dataclass(frozen=True)
class Table:
    """The records of one model of GPU, by described problem."""

    gpu: str
    arch: str
    records: Mapping[str, Record]


def described(problem: Problem) -> str:
    """``problem`` as short canonical JSON: without fields that have their default, and steps without their CUDA text.

    The speed of a tile does not hang on the spelling of an expression, and a record should outlive a change of it.
    """
    said = {}
    for field in fields(problem):
        value = getattr(problem, field.name)
        if field.name in ("prologue", "between", "epilogue"):
            value = [_described_step(step) for step in value]
        if value != field.default and value != []:
            said[field.name] = value
    return canonical_json(said)


def _described_step(step: StepSpec) -> Any:
    whole = step.canonical()
    said = {name: whole[name] for name in ("name", "operands", "attributes") if whole[name]}
    return step.name if len(said) == 1 else said


# ---- look-up -----------------------------------------------------------------------------------------------------


def choice_for(problem: Problem, arch: str, gpu: str) -> Choice | None:
    """The tile that was measured to be the fastest for ``problem`` on ``gpu``, or None; bad records are ignored."""
    return _choice(problem, arch, gpu, _directory())


@lru_cache(maxsize=4096)
def _choice(problem: Problem, arch: str, gpu: str, directory: Path | None) -> Choice | None:
    store, table = _open(directory), shipped(gpu)
    if store is None and table is None:
        return None
    try:
        name = described(problem)
    except TypeError:
        # In a trace of torch.jit sizes are tensors, and such a problem has no name.
        return None
    found = [("store", None if store is None else _from_store(store, name, arch, gpu))]
    if table is not None and table.arch == arch:
        found.append(("shipped", table.records.get(name)))
    for source, record in found:
        if record is None:
            continue
        for tile in every_tile(problem, arch):
            if identity(tile) == record.tile:
                return Choice(tile, gpu, source, record)
        _log.info(
            "tuned tile of %s for %s (%s) ignored: the planner makes no such tile any more: %s",
            problem.label(), gpu, source, record.tile,
        )  # fmt: skip
    return None


def forget() -> None:
    """Forget what was looked up, so that the next plan sees records that were written since."""
    _choice.cache_clear()
    _read_table.cache_clear()


# ---- shipped records ----------------------------------------------------------------------------------------------


def shipped(gpu: str) -> Table | None:
    """The records that come with jitconv for this model, or None."""
    table = _read_table(_tables() / f"{slug(gpu)}.json")
    return table if table is not None and table.gpu == gpu else None


def slug(gpu: str) -> str:
    """A model's name as the name of a file: ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def _tables() -> Path:
    return cache_root() / "tuned"


@lru_cache(maxsize=64)
def _read_table(path: Path) -> Table | None:
    try:
        if path.stat().st_size > _LARGEST_TABLE:
            raise InvalidRecordError(f"it is larger than {_LARGEST_TABLE} bytes")
        return parse_table(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _log.warning("tuned tiles in %s ignored: %s", path, error)
        return None


def parse_table(text: str, where: str = "the table") -> Table:
    """The table in the text of a file. A record that is invalid is left out, and the log says why.

    Raises InvalidRecordError when the text is no table at all.
    """
    data = _parsed(text)
    if not isinstance(data, dict) or data.keys() != {"format", "gpu", "arch", "records"}:
        raise InvalidRecordError("expected an object with format, gpu, arch and records")
    if type(data["format"]) is not int or data["format"] != FORMAT:
        raise InvalidRecordError(f"format {data['format']!r}: expected {FORMAT}")
    if not all(type(data[name]) is str for name in ("gpu", "arch")) or type(data["records"]) is not list:
        raise InvalidRecordError("expected gpu and arch as text, and a list of records")
    records = {}
    for number, entry in enumerate(data["records"]):
        try:
            record = parse_record(entry)
        except InvalidRecordError as error:
            _log.warning("record %d of %s ignored: %s", number, where, error)
        else:
            records[record.problem] = record
    return Table(data["gpu"], data["arch"], records)


def table_text(table: Table) -> str:
    """``table`` as the text of a file: a line a record, sorted, the same for equal tables."""
    head = canonical_json({"gpu": table.gpu, "arch": table.arch, "format": FORMAT})
    records = [record for _, record in sorted(table.records.items())]
    lines = ",\n".join(json.dumps(record.as_dict(), sort_keys=True, allow_nan=False) for record in records)
    return f'{head[:-1]},"records":[\n{lines}\n]}}\n'


# ---- the user's records -------------------------------------------------------------------------------------------


def stored(gpu: str) -> Table | None:
    """The user's records for this model, or None where there are none."""
    store = _open(_directory())
    records: dict[str, Record] = {}
    arch = ""
    for entry in store.entries() if store is not None else ():
        try:
            owner, arch_of, record = _parse_entry(entry.metadata)
        except InvalidRecordError as error:
            _log.warning("tuned record %s ignored: %s", entry.key[:12], error)
            continue
        if owner == gpu:
            arch = arch_of
            records[record.problem] = record
    return Table(gpu, arch, records) if records else None


def put(gpu: str, arch: str, record: Record) -> None:
    """Keep ``record`` in the user's store, in place of an earlier one of the same problem.

    Raises StoreUnavailableError when that store cannot be used.
    """
    from jitconv.store import Entry, StoreUnavailableError

    metadata = {"format": FORMAT, "gpu": gpu, "arch": arch, "record": record.as_dict()}
    with _writable() as store:
        kept = store.put(_key(gpu, arch, record.problem), Entry(cubin=b"", source="", metadata=metadata))
    if not kept:
        raise StoreUnavailableError(f"{store.directory}: the tuned tile was not stored")
    forget()


def remove(gpu: str, arch: str, problem: str) -> bool:
    """Drop the user's record of a (described) problem; whether there was one."""
    if _open(_directory()) is None:
        return False
    with _writable() as store:
        removed = store.remove(_key(gpu, arch, problem))
    forget()
    return removed


def clear() -> int:
    """Drop every record of the user's; how many there were."""
    if _open(_directory()) is None:
        return 0
    with _writable() as store:
        removed = store.clear()
    forget()
    return removed


def known_gpus(arch: str) -> list[str]:
    """Models of ``arch`` that there are records for."""
    return sorted(gpu for gpu, arch_of, _, _ in overview() if arch_of == arch)


def overview() -> list[tuple[str, str, int, int]]:
    """For every model that there are records for: its name, its architecture, records of the user's, and shipped."""
    counts: dict[tuple[str, str], list[int]] = {}
    store = _open(_directory())
    for entry in store.entries() if store is not None else ():
        try:
            gpu, arch, _ = _parse_entry(entry.metadata)
        except InvalidRecordError:
            continue
        counts.setdefault((gpu, arch), [0, 0])[0] += 1
    for path in sorted(_tables().glob("*.json")) if _tables().is_dir() else ():
        table = _read_table(path)
        if table is not None:
            counts.setdefault((table.gpu, table.arch), [0, 0])[1] = len(table.records)
    return [(gpu, arch, mine, theirs) for (gpu, arch), (mine, theirs) in sorted(counts.items())]


def _from_store(store: Store, problem: str, arch: str, gpu: str) -> Record | None:
    entry = store.get(_key(gpu, arch, problem))
    if entry is None:
        return None
    try:
        owner, arch_of, record = _parse_entry(entry.metadata)
        if (owner, arch_of, record.problem) != (gpu, arch, problem):
            raise InvalidRecordError("it is the record of another problem")
    except InvalidRecordError as error:
        _log.warning("tuned record of %s for %s ignored: %s", problem, gpu, error)
        return None
    return record


def _key(gpu: str, arch: str, problem: str) -> str:
    return hashlib.sha256(canonical_json([gpu, arch, problem]).encode()).hexdigest()


def _directory() -> Path | None:
    """Where the user's records are, whether that exists or not; None where this user has no place for them."""
    from jitconv.store.location import StoreUnavailableError, configured_directory

    try:
        return configured_directory(os.environ) / _FOLDER
    except StoreUnavailableError:
        return None


@lru_cache(maxsize=8)
def _store_in(directory: Path) -> Store:
    from jitconv.store import Store

    return Store(directory, _SIZE_LIMIT)


def _open(directory: Path | None) -> Store | None:
    """The user's records for reading, or None where there are none. Nothing is created for a look-up."""
    from jitconv.store.location import StoreUnavailableError, prepare_directory

    if directory is None or not directory.is_dir():
        return None
    try:
        # Whoever can write the directory above can put another one in this one's place.
        prepare_directory(directory.parent, os.environ)
    except StoreUnavailableError as error:
        _log.info("tuned tiles in %s ignored: %s", directory, error)
        return None
    return _store_in(directory)


def _writable() -> Store:
    """The user's records for writing. Raises StoreUnavailableError when they cannot be written."""
    from jitconv.store import Store

    # The store above first: it makes its directory, and says whether that may be used.
    with Store.open(strict=True) as kernels:
        directory = kernels.directory / _FOLDER
    return Store.open(directory, _SIZE_LIMIT, strict=True)


# ---- reading strictly ---------------------------------------------------------------------------------------------


def _parse_entry(metadata: Mapping[str, Any]) -> tuple[str, str, Record]:
    if metadata.keys() != {"format", "gpu", "arch", "record"}:
        _fail(f"fields {sorted(metadata)}: expected format, gpu, arch and record")
    if type(metadata["format"]) is not int or metadata["format"] != FORMAT:
        _fail(f"format {metadata['format']!r}: expected {FORMAT}")
    if not all(type(metadata[name]) is str for name in ("gpu", "arch")):
        _fail("expected gpu and arch as text")
    return metadata["gpu"], metadata["arch"], parse_record(metadata["record"])


def parse_record(data: Any) -> Record:
    """The record in JSON values. Raises InvalidRecordError unless it is just what :meth:`Record.as_dict` makes."""
    if not isinstance(data, dict) or data.keys() != _RECORD_KEYS:
        _fail(f"expected an object with {', '.join(sorted(_RECORD_KEYS))}, got {_short(data)}")
    for name in ("ms", "heuristic_ms"):
        # Not bool, and neither NaN nor an infinity.
        if type(data[name]) not in (int, float) or not 0 < data[name] < 1e9:
            _fail(f"{name}={_short(data[name])}: expected milliseconds")
    if type(data["templates"]) is not str or not _DIGEST.fullmatch(data["templates"]):
        _fail(f"templates={_short(data['templates'])}: expected a digest")
    _check_tile(data["tile"])
    problem = data["problem"]
    known = {field.name for field in fields(Problem)}
    if not isinstance(problem, dict) or not problem.keys() <= known:
        _fail(f"problem={_short(problem)}: expected an object with fields of a Problem")
    try:
        text, tile = canonical_json(problem), canonical_json(data["tile"])
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRecordError(f"problem={_short(problem)}: {error}") from error
    if len(text) > _LONGEST_PROBLEM:
        _fail(f"problem: {len(text)} characters, expected at most {_LONGEST_PROBLEM}")
    return Record(text, tile, float(data["ms"]), float(data["heuristic_ms"]), data["templates"])


def _check_tile(data: Any) -> None:
    """Fields and their types; whether such a tile is any good, the planner says."""
    kind = _TILES.get(data["type"]) if isinstance(data, dict) and type(data.get("type")) is str else None
    if kind is None:
        _fail(f"tile={_short(data)}: expected an object whose type is one of {', '.join(_TILES)}")
    annotations = {field.name: str(field.type) for field in fields(kind)}
    for name, value in data.items():
        if name != "type" and not _is(value, annotations.get(name, "")):
            expected = annotations.get(name, f"no such field in a {kind.__name__}")
            _fail(f"tile: {_short(name)}={_short(value)}: expected {expected}")


def _is(value: Any, annotation: str) -> bool:
    """Whether a JSON value is one of a tile's field with this annotation."""
    if annotation.startswith("tuple["):
        count = annotation.count("int")
        return type(value) is list and len(value) == count and all(type(part) is int for part in value)
    return type(value).__name__ == annotation


def _parsed(text: str) -> Any:
    def refused(name: str) -> NoReturn:
        raise InvalidRecordError(f"{name} is no number of JSON")

    try:
        return json.loads(text, parse_constant=refused)
    except (ValueError, RecursionError) as error:
        raise InvalidRecordError(f"not valid JSON: {error}") from error


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except (RecursionError, ValueError):
        # Nested too deep, or a number of too many digits to print.
        return f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _fail(reason: str) -> NoReturn:
    raise InvalidRecordError(reason)
