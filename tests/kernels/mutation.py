"""Remove one synchronising statement at a time: does anything notice?

A barrier, wait or fence whose removal changes nothing is either not needed or not tested.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple, Protocol

from jitconv.emulate import EmulationError, build

__all__ = ["SYNCHRONISING", "Mutation", "mutants", "mutations", "notices", "survivors"]

SYNCHRONISING = (
    "__syncthreads",
    "__syncwarp",
    "named_barrier_sync",
    "named_barrier_arrive",
    "cp_async_commit_group",
    "cp_async_wait_group",
    "mbarrier_init",
    "mbarrier_arrive",
    "mbarrier_arrive_expect_tx",
    "mbarrier_wait",
    "fence_mbarrier_init",
    "fence_proxy_async",
    "bulk_commit_group",
    "bulk_wait_group_read",
    "wgmma_fence",
    "wgmma_commit_group",
    "wgmma_wait_group",
)

# A call as a statement: its value, if it has one, is not used.
_STATEMENT = re.compile(r"(?<![\w:.])(?:jitconv::)?(?:" + "|".join(SYNCHRONISING) + r")(?:<[^;{}]*?>)?\([^;{}]*\);")
_LINE = re.compile(r'\s*#\s*line\s+(\d+)(?:\s+"([^"]+)")?')


class Mutation(NamedTuple):
    """A text without one statement, which stood in ``line`` (from 1)."""

    line: int
    statement: str
    text: str


def mutations(text: str) -> Iterator[Mutation]:
    """Yield ``text`` without each of its synchronising statements in turn; lines keep their numbers."""
    lines = text.split("\n")
    for index, line in enumerate(lines):
        code = line.split("//")[0]
        for match in _STATEMENT.finditer(code):
            mutated = line[: match.start()] + ";" + line[match.end() :]
            changed = "\n".join([*lines[:index], mutated, *lines[index + 1 :]])
            yield Mutation(index + 1, match.group(), changed)


class RenderedKernel(Protocol):
    """A frozen dataclass with a kernel's name, source and headers."""

    name: str
    source: str
    headers: Mapping[str, str]


def _place(text: str, line: int, file: str) -> str:
    """``file:line`` of a line, by the ``#line`` directives before it where there are any."""
    number = line
    for index, directive in enumerate(text.split("\n")[: line - 1], start=1):
        match = _LINE.match(directive)
        if match:
            number = int(match.group(1)) + line - index - 1
            file = match.group(2) or file
    return f"{file}:{number}"


def mutants(kernel: RenderedKernel, file: str) -> Iterator[tuple[str, RenderedKernel]]:
    """Yield the kernel without each synchronising statement of ``file``, its source if that is its own name or one
    of its headers; before it, the statement as ``file:line: statement``."""
    text = kernel.source if file == kernel.name else kernel.headers[file]
    for mutation in mutations(text):
        if file == kernel.name:
            changed = {"source": mutation.text}
        else:
            changed = {"headers": {**kernel.headers, file: mutation.text}}
        mutant = replace(kernel, **changed)  # type: ignore[type-var]
        build(mutant)  # one that does not compile would be noticed for the wrong reason
        yield f"{_place(text, mutation.line, file)}: {mutation.statement}", mutant


def notices(check: Callable[[], object]) -> bool:
    """Whether a check of a mutant finds something wrong."""
    try:
        check()
    except (EmulationError, AssertionError):
        return True
    return False


def survivors(
    kernel: RenderedKernel, check: Callable[[RenderedKernel], object], *, headers: Collection[str] = ()
) -> list[str]:
    """Return the statements, as ``file:line: statement``, whose removal ``check`` does not notice.

    Args:
        kernel: the kernel to mutate.
        check: runs a kernel and raises EmulationError or AssertionError if anything is wrong.
        headers: names of the headers to mutate beside the source: those that the kernel uses in full.
    """
    unnoticed = []
    for file in (kernel.name, *headers):
        for statement, mutant in mutants(kernel, file):
            if not notices(functools.partial(check, mutant)):
                unnoticed.append(statement)
    return unnoticed
