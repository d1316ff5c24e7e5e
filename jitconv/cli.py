"""The ``jitconv`` command: parses, calls the library, prints.

Nothing here computes. torch and rich are imported by the commands that need them, so that ``--help`` and
``--version`` answer at once.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jitconv._version import __version__
from jitconv.errors import JitconvError
from jitconv.problem import PRECISIONS

if TYPE_CHECKING:
    from rich.console import Console

    from jitconv.store import EntryInfo, Store
    from jitconv.tuning import GpuModel, Result, Row, Study
    from jitconv.warm import Outcome, Report

# Where output is no terminal there is no edge to wrap at, and a table must not be cut off.
_PIPED_WIDTH = 160


class _Group(click.Group):
    """A group whose commands end with one message and exit status 1 where jitconv raises an error of its own."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except JitconvError as error:
            click.echo(f"error: {error}", err=True)
            ctx.exit(1)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="jitconv", message="%(prog)s %(version)s")
def main() -> None:
    """Fused convolution kernels for PyTorch: generate, compile, cache, look inside.

    Environment: JITCONV_CACHE_DIR (directory of compiled kernels), JITCONV_CACHE_SIZE (its limit, such as 2GiB),
    JITCONV_CACHE_TRUST=1 (use a directory of another owner), CXX (C++ compiler of the emulator).
    """


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _archs(ctx: click.Context, option: click.Parameter, text: str | None) -> tuple[str, ...]:
    """The names in --arch, checked; empty when it is not given."""
    from jitconv.architectures import normalize_arch

    names = _split(text or "")
    if text is not None and not names:
        raise click.BadParameter("expected architectures, such as sm_90a,sm_80, or all")
    for name in names:
        if name == "all":
            continue
        try:
            exact = normalize_arch(name)
        except ValueError as error:
            raise click.BadParameter(str(error)) from error
        if exact == f"{name}a":
            click.echo(f"{name}: compiling for {exact}, which the same GPUs run", err=True)
    return tuple(names)


_precision = click.option(
    "--precision",
    type=click.Choice(PRECISIONS),
    help="Torch's setting for convolutions where the calls will run; float32 entries that name no precision follow it. "
    "Default: tf32, torch's own default.",
)


_jobs = click.option("--jobs", type=click.IntRange(min=1), help="Compilations at a time. Default: one per core.")


@main.command()
@click.argument("manifests", metavar="MANIFEST...", nargs=-1, required=True)
@click.option(
    "--arch",
    "archs",
    metavar="ARCH[,ARCH...]",
    callback=_archs,
    help="Architectures to compile for, such as sm_90a,sm_80, or 'all'. Default: those of the GPUs here.",
)
@_precision
@click.option(
    "--gpu",
    metavar="MODEL",
    help="Compile only what this model runs, such as 'NVIDIA H200'. Default: what any model may, tuned tiles included.",
)
@_jobs
def warm(
    manifests: Sequence[str], archs: tuple[str, ...], precision: str | None, gpu: str | None, jobs: int | None
) -> None:
    """Compile the kernels of manifests ahead of time; needs no GPU.

    MANIFEST is the path of a TOML file, the name of one that comes with jitconv (headline), or one entry of either
    (headline:w1). What the store has already is not compiled again.

    Exit status: 0 when every kernel is in the store, else 1.
    """
    from jitconv.machine import chosen_archs
    from jitconv.manifest import select
    from jitconv.warm import jobs_of
    from jitconv.warm import warm as run

    entries = [entry.at_precision(precision) for text in manifests for entry in select(text)]
    planned = jobs_of(entries, chosen_archs(archs), gpu)
    store = _store()
    with _progress(len(planned)) as show:
        report = run(planned, store, workers=jobs, progress=show)
    _print_report(report, store)
    if report.errors:
        for error in report.errors:
            click.echo(f"error: {error}", err=True)
        sys.exit(1)


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    """A callback for each finished kernel: a bar on a terminal, else one line each."""
    console = _console()
    if not console.is_terminal:
        done = 0

        def line(outcome: Outcome) -> None:
            nonlocal done
            done += 1
            click.echo(f"[{done}/{total}] {outcome.job.arch} {outcome.name}: {_state(outcome)}")

        yield line
        return
    from rich.progress import Progress

    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("compiling", total=total)
        yield lambda outcome: bar.update(task, advance=1, description=f"{outcome.job.arch} {outcome.name[:48]}")


def _state(outcome: Outcome) -> str:
    if outcome.state == "compiled":
        return f"compiled in {outcome.milliseconds:.0f} ms"
    return "already warm" if outcome.state == "warm" else "FAILED"


def _print_report(report: Report, store: Store) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("entry", "arch", "kernel"):
        table.add_column(heading, overflow="fold")
    for heading in ("registers", "spills"):
        table.add_column(heading, justify="right")
    table.add_column("state", no_wrap=True)
    for outcome in report.outcomes:
        numbers = ("–", "–") if outcome.state == "failed" else (str(outcome.registers), f"{outcome.spills} B")
        addresses = " ".join(outcome.job.addresses)
        tuned = f", tuned for {', '.join(outcome.job.gpus)}" if outcome.job.gpus else ""
        table.add_row(escape(addresses), outcome.job.arch, outcome.name, *numbers, _state(outcome) + escape(tuned))
    _console().print(table)
    click.echo(
        f"kernels: {report.count('compiled')} compiled, {report.count('warm')} already warm, "
        f"{report.count('failed')} failed, in {report.seconds:.1f} s; store {store.directory}"
    )


@main.command()
@click.argument("address")
@click.option("--arch", "archs", metavar="ARCH", callback=_archs, help="Default: the current GPU's, else sm_90a.")
@_precision
@click.option(
    "--gpu",
    metavar="MODEL",
    help="Show what this model runs, tuned tiles included, such as 'NVIDIA H200'. Default: the GPU that is here.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "source", "ptx", "sass", "json"]),
    default="text",
    show_default=True,
    help="source needs no compiler; sass needs nvdisasm or cuobjdump; json is resources, constants and source.",
)
@click.option("--kernel", "index", type=click.IntRange(min=0), help="Only this kernel, counted from 0.")
def inspect(
    address: str, archs: tuple[str, ...], precision: str | None, gpu: str | None, form: str, index: int | None
) -> None:
    """Show the source, PTX, SASS and resources of one problem.

    The kernels need not be warm.

    ADDRESS is an entry of a manifest: headline:w1, or shapes.toml:block.
    """
    if len(archs) > 1 or "all" in archs:
        raise click.BadParameter("expected one architecture", param_hint="--arch")
    from jitconv.inspect import inspect_call
    from jitconv.manifest import find

    call = find(address).at_precision(precision).call()
    found = inspect_call(call, address, archs[0] if archs else None, gpu)
    if index is not None:
        try:
            found = found.selected(index)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--kernel") from error
    if form == "json":
        click.echo(json.dumps(found.as_dict(), indent=2, allow_nan=False))
    else:
        click.echo(found.report() if form == "text" else getattr(found, form))


@main.command()
@click.argument("manifests", metavar="MANIFEST...", nargs=-1, required=True)
@_precision
@click.option("--limit", type=click.IntRange(min=1), help="Candidates to measure, the likeliest first. Default: all.")
@click.option(
    "--repeats", type=click.IntRange(min=1), default=20, show_default=True, help="Times that each one is timed."
)
@_jobs
@click.option(
    "--export",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write what is known of this model of GPU to this file, in the form in which jitconv ships it.",
)
def tune(
    manifests: Sequence[str],
    precision: str | None,
    limit: int | None,
    repeats: int,
    jobs: int | None,
    export: Path | None,
) -> None:
    """Measure tiles on the GPU and keep the fastest for its model.

    For each entry every tile that may be the right one is compiled, checked against float64 and timed. One that beats
    the default by more than 2 % is kept in the store, and calls on the same model of GPU take it from then on.

    MANIFEST is the path of a TOML file, the name of one that comes with jitconv (headline), or one entry of either
    (headline:w1).

    Exit status: 1 when a candidate was wrong or did not compile, which is a fault of jitconv; else 0.
    """
    from jitconv.manifest import select
    from jitconv.tune import exported, results
    from jitconv.tuning import current_gpu

    entries = [entry.at_precision(precision) for text in manifests for entry in select(text)]
    gpu = current_gpu()
    _store().close()  # where nothing could be kept, nothing need be measured
    faults: list[str] = []
    behind: list[float] = []
    for result in results(entries, gpu, limit=limit, repeats=repeats, jobs=jobs, display=_studied):
        _print_result(result)
        faults += result.faults
        behind += [] if result.behind is None else [result.behind]
    if behind:
        click.echo(
            f"the heuristic's tile takes {statistics.median(behind) - 1:.0%} more time than the fastest one, in the "
            f"median of {len(behind)} problems; {max(behind) - 1:.0%} at worst"
        )
    _print_export(export, gpu, exported)
    for fault in faults:
        click.echo(f"error: {fault}", err=True)
    if faults:
        sys.exit(1)


def _studied(study: Study) -> Any:
    """The display of a study's compilation."""
    click.echo(f"{study.title}: {len(study.tiles)} tiles, {len(study.jobs)} kernels, on {study.gpu.name}")
    return _progress(len(study.jobs))


def _print_result(result: Result) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("tile", overflow="fold")
    for heading in ("ms: median [10 %, 90 %]", "against heuristic", "error"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    rows = sorted(result.rows, key=lambda row: (row.timing is None, row.timing.median if row.timing else 0.0))
    for row in rows:
        table.add_row(*_result_row(result, row), style="bold red" if row.state != "ok" else None)
    _console().print(table)
    click.echo(f"{result.title}: {_verdict_of(result)}\n")


def _result_row(result: Result, row: Row) -> list[str]:
    from rich.markup import escape

    from jitconv.tuning import words

    if row.timing is None:
        return [words(row.tile), "–", "–", "–" if row.state == "failed" else f"{row.error:.1e}", escape(row.reason)]
    base = result.heuristic.timing
    ratio = f"{base.median / row.timing.median:.2f} × as fast" if base is not None else "–"
    notes = ["heuristic"] * (row is result.heuristic) + ["winner"] * (row is result.winner)
    return [words(row.tile), str(row.timing), ratio, f"{row.error:.1e}", ", ".join(notes)]


def _verdict_of(result: Result) -> str:
    if result.winner is None:
        return "no candidate is right: nothing kept"
    if result.winner is result.heuristic:
        kept = ", kept in place of the one that jitconv ships" if result.stored else ""
        return f"the heuristic's tile is the one to take{kept}"
    return "the winner is kept" if result.stored else "the winner is the one that jitconv ships"


def _print_export(export: Path | None, gpu: GpuModel, exported: Any) -> None:
    if export is not None:
        count = exported(gpu, export)
        click.echo(f"{export}: {count} tuned problems of {gpu.name}")


@main.group()
def cache() -> None:
    """The store of compiled kernels on this machine."""


@cache.command()
def path() -> None:
    """Print the directory of the store, whether it exists or not."""
    import os

    from jitconv.store.location import configured_directory

    click.echo(configured_directory(os.environ))


@cache.command()
def ls() -> None:
    """List the compiled kernels, newest first."""
    from rich.table import Table

    from jitconv.report import size

    store = _store()
    entries = sorted(store.entries(), key=lambda entry: entry.stored, reverse=True)
    if not entries:
        click.echo(f"no kernels in {store.directory}; 'jitconv warm headline --arch sm_90a' compiles some")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("key", "stored"):
        table.add_column(heading, no_wrap=True)
    table.add_column("arch", no_wrap=True)
    table.add_column("kernel", overflow="fold")
    for heading in ("registers", "compile", "size"):
        table.add_column(heading, justify="right", no_wrap=True)
    for entry in entries:
        table.add_row(*_entry_row(entry), size(entry.size))
    _console().print(table)


def _entry_row(entry: EntryInfo) -> list[str]:
    # Metadata of an entry that another version wrote may lack any of these.
    said = entry.metadata
    stored = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.stored))
    took = f"{said['compile_ms']:.0f} ms" if isinstance(said.get("compile_ms"), (int, float)) else "?"
    fields = [str(said.get(name, "?")) for name in ("arch", "name", "registers")]
    return [entry.key[:12], stored, *fields, took]


@cache.command()
def info() -> None:
    """Show where the store is, how full, and what was moved aside."""
    from jitconv.report import size

    store = _store()
    state = store.info()
    rows = {
        "directory": state.path,
        "kernels": state.entries,
        "size": f"{size(state.size)} of {size(state.size_limit)} (JITCONV_CACHE_SIZE)",
        "moved aside": f"{state.quarantined} damaged or hostile files",
        "tuned": _tuned_text(),
        "emulator": f"{size(_tree_size(state.path / 'emulator'))} of programs built for the CPU",
    }
    for name, value in rows.items():
        click.echo(f"{name:<12} {value}")


def _tuned_text() -> str:
    from jitconv.planning import tuned

    known = [f"{mine} of {gpu} (and {shipped} shipped)" for gpu, _, mine, shipped in tuned.overview()]
    return f"problems whose tiles were measured: {', '.join(known)}" if known else "no tiles measured (jitconv tune)"


@cache.command()
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--tuned", "measured", is_flag=True, help="Also forget what 'jitconv tune' measured here.")
def clear(yes: bool, measured: bool) -> None:
    """Remove every compiled kernel, and the emulator's programs."""
    import shutil

    from jitconv.planning import tuned

    store = _store()
    if not yes:
        click.confirm(f"Remove {store.info().entries} kernels from {store.directory}?", abort=True)
    removed = store.clear()
    shutil.rmtree(store.directory / "emulator", ignore_errors=True)
    click.echo(f"removed {removed} kernels from {store.directory}")
    if measured:
        click.echo(f"removed the tuned tiles of {tuned.clear()} problems")


def _tree_size(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        # Another process may be building there, and remove what this one has just seen.
        with suppress(OSError):
            total += file.stat().st_size if file.is_file() else 0
    return total


def _store() -> Store:
    """The configured store, open; StoreUnavailableError says why when it cannot be."""
    from jitconv.store import Store

    try:
        return Store.open(strict=True)
    except ValueError as error:
        raise JitconvError(str(error)) from error


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=False)
    return console if console.is_terminal else Console(highlight=False, width=_PIPED_WIDTH)


@main.command()
def demo() -> None:
    """Take the three headline operators from template to result.

    Generates, compiles, runs and compares with PyTorch: with a GPU at full size beside eager PyTorch and torch.compile,
    without one in the emulator on small inputs.
    """
    from jitconv.demo import demo as run

    run(_console())


@main.command()
def doctor() -> None:
    """Say what this machine has, and what would go wrong.

    Exit status: 1 when generated kernels should work here and cannot. A machine without a GPU is not ill.
    """
    from rich.markup import escape

    from jitconv.doctor import examine

    console = _console()
    colours = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    checks = examine()
    for check in checks:
        text = f"[{colours[check.state]}]{check.state:<4}[/]  {check.name:<12}  {escape(check.text)}"
        console.print(text, soft_wrap=True)
        if check.remedy:
            console.print(escape(f"{'':20}→ {check.remedy}"), soft_wrap=True)
    console.print(_verdict({check.name: check.state for check in checks}))
    if any(check.state == "fail" for check in checks):
        sys.exit(1)


def _verdict(states: dict[str, str]) -> str:
    if "fail" in states.values():
        return "\ngenerated kernels do not work here: see 'fail' above"
    if states.get("gpu") == "ok":
        return "\ngenerated kernels work here"
    works = ["inspecting source"]
    if states["kernel"] == "ok":
        works = ["warming for other machines", "inspecting"]
    if states["c++"] == "ok":
        works.append("running generated kernels in the emulator")
    return f"\nno GPU: calls take torch's path; what works here: {', '.join(works)}"
