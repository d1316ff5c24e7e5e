"""Remove one synchronising statement at a time: does anything notice?

A barrier, wait or fence whose removal changes nothing is either not needed or not tested.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import NamedTuple

from jitconv.emulate import EmulationError, build
from tests.kernels import Kernel

__all__ = ["SYNCHRONISING", "Mutation", "mutations", "survivors"]

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
)

# A call as a statement: its value, if it has one, is not used.
_STATEMENT = re.compile(r"(?<![\w:.])(?:jitconv::)?(?:" + "|".join(SYNCHRONISING) + r")(?:<[^;{}]*?>)?\([^;{}]*\);")


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


def survivors(kernel: Kernel, check: Callable[[Kernel], None], *, headers: Collection[str] = ()) -> list[str]:
    """Return the statements, as ``file:line: statement``, whose removal ``check`` does not notice.

    Args:
        kernel: the kernel to mutate; ``dataclasses.replace`` must work on it.
        check: runs a kernel and raises EmulationError or AssertionError if anything is wrong.
        headers: names of the headers to mutate beside the source: those that the kernel uses in full.
    """
    unnoticed = []
    texts = {kernel.name: kernel.source, **{name: kernel.headers[name] for name in headers}}
    for name, text in texts.items():
        for mutation in mutations(text):
            if name == kernel.name:
                mutant = replace(kernel, source=mutation.text)
            else:
                mutant = replace(kernel, headers={**kernel.headers, name: mutation.text})
            build(mutant)  # a mutant that does not compile has not been noticed
            try:
                check(mutant)
            except (EmulationError, AssertionError):
                continue
            unnoticed.append(f"{name}:{mutation.line}: {mutation.statement}")
    return unnoticed
