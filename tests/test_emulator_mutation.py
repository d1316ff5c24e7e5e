"""A barrier, wait or fence that the emulator models cannot be removed unnoticed."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from jitconv.emulate import ALL_SCHEDULES, execute
from tests.kernels import Kernel, cases, load
from tests.kernels.mutation import SYNCHRONISING, mutations, survivors

pytestmark = pytest.mark.compiler

run = functools.partial(execute, schedules=ALL_SCHEDULES, timeout=30)

CASES = {
    "barriers": (cases.barriers, ("device/warp.cuh",)),
    "named_barriers": (cases.named_barriers, ()),
    "pipeline": (cases.pipeline, ()),
    "bulk": (cases.bulk, ()),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_removed_synchronisation_is_noticed(name: str) -> None:
    case, headers = CASES[name]

    def check(kernel: Kernel) -> None:
        cases.assert_close(*case(run, kernel))

    assert survivors(load(name), check, headers=headers) == []


def test_the_cases_use_every_statement_that_is_modelled() -> None:
    texts = [load(name).source for name in CASES]
    removed = {m.statement.split("(")[0].split("<")[0] for text in texts for m in mutations(text)}
    assert removed == set(SYNCHRONISING)


def test_an_unneeded_barrier_survives() -> None:
    kernel = load("named_barriers")
    source = kernel.source.replace("    if (producer) {", "    __syncthreads();\n    if (producer) {")
    check: Callable[[Kernel], None] = lambda k: cases.assert_close(*cases.named_barriers(run, k))  # noqa: E731
    found = survivors(Kernel(kernel.name, source, kernel.headers), check)
    assert [line.split(": ")[1] for line in found] == ["__syncthreads();"]


def test_mutations_remove_statements_only() -> None:
    text = "\n".join(
        [
            "// __syncthreads(); in a comment",
            "void named_barrier_sync(int id, int threads) { asm(); }",
            "    __syncthreads();  // why",
            "    if (a) { jitconv::cp_async_wait_group<STAGES - 2>(); b(); }",
            "    const int c = my__syncwarp();",
        ]
    )
    found = [(m.line, m.statement, m.text.split("\n")[m.line - 1]) for m in mutations(text)]
    assert found == [
        (3, "__syncthreads();", "    ;  // why"),
        (4, "jitconv::cp_async_wait_group<STAGES - 2>();", "    if (a) { ; b(); }"),
    ]
