"""A barrier, wait or fence that the emulator models cannot be removed unnoticed."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jitconv import emulated, program
from jitconv.emulate import ALL_SCHEDULES, execute
from jitconv.families import KernelPlan
from jitconv.render import Rendered, render
from tests.kernels import Kernel, cases, load
from tests.kernels.mutation import SYNCHRONISING, mutants, mutations, notices, survivors
from tests.strategies import Case, assert_matches, layer_norm, make_tensor, pool, run_emulated

pytestmark = pytest.mark.compiler

run = functools.partial(execute, schedules=ALL_SCHEDULES, timeout=30)

CASES = {
    "barriers": (cases.barriers, ("device/warp.cuh",)),
    "named_barriers": (cases.named_barriers, ()),
    "pipeline": (cases.pipeline, ()),
    "bulk": (cases.bulk, ()),
    "warpgroups": (cases.warpgroups, ()),
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


# ---- The generated kernels ------------------------------------------------------------------------------------------


def _cases() -> Iterator[Case]:
    for layout in ("contiguous", "channels_last"):
        # Two slices of the reduction and more: each reuses the shared memory of the one before.
        x = make_tensor((2, 17, 9, 10), layout=layout)
        yield Case("conv2d", x, (make_tensor((20, 17, 3, 3), scale=0.2),))
        yield Case("conv_transpose2d", x, (make_tensor((17, 20, 3, 3), scale=0.2),), (None,), {"stride": 2})
        weights = (make_tensor((17, 1, 3, 3), scale=0.3), make_tensor((9, 17, 1, 1), scale=0.3))
        yield Case("depthwise_separable_conv2d", x, weights, (None, None))
    for width in (20, 300):  # a row for part of a warp, a row for the block
        x = make_tensor((2, 2, 4, width))
        yield Case("conv2d", x, (make_tensor((3, 2, 1, 1)),), chain=(layer_norm(width), pool("avg", 2)))


@pytest.mark.slow
def test_every_barrier_of_the_generated_kernels_is_needed_and_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    unnoticed: dict[str, bool] = {}
    for case in _cases():
        for kernel in [render(step.kernel) for step in program.build(case.call(), "sm_75").launches]:
            files = [kernel.name, *(name for name in kernel.headers if name.startswith("device/"))]
            for statement, mutant in itertools.chain(*(mutants(kernel, file) for file in files)):
                if unnoticed.get(statement, True):
                    unnoticed[statement] = not _noticed(case, kernel, mutant, monkeypatch)
    assert len(unnoticed) > 5
    # Some functions of the vocabulary no kernel here calls; test_every_removed_synchronisation_is_noticed has them.
    ours = {statement for statement in unnoticed if not statement.startswith("device/warp.cuh")}
    assert [statement for statement in sorted(ours) if unnoticed[statement]] == []


def _noticed(case: Case, kernel: Rendered, mutant: Any, monkeypatch: pytest.MonkeyPatch) -> bool:
    def rendered(plan: KernelPlan) -> Any:
        original = render(plan)
        return mutant if original.name == kernel.name else original

    def check(races: bool) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(emulated, "render", rendered)
            assert_matches(case, run_emulated(case.call(), races=races, schedules=ALL_SCHEDULES))

    return notices(lambda: check(races=False)) or notices(lambda: check(races=True))
