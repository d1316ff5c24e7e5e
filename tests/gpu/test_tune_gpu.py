"""Tuning on the GPU, from the first compilation to the call that takes the winner."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch

import jitconv
from jitconv import calls, launch, runtime, tuning
from jitconv import epilogue as E
from jitconv.planning import candidates, tuned
from jitconv.planning.selection import identity
from jitconv.timing import Timing, interleaved


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("JITCONV_CACHE_DIR", str(tmp_path / "store"))
    tuned.forget()
    yield tmp_path / "store"
    tuned.forget()


def arguments() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(2, 32, 30, 34, device="cuda")
    return x, torch.randn(48, 32, 3, 3, device="cuda") / 17, torch.randn(48, device="cuda")


def test_the_next_call_misses_the_winner(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, b = arguments()
    options = {"padding": 1, "epilogue": [E.silu()], "precision": "tf32"}

    def timed(runners: Mapping[str, Callable[[], object]], *, repeats: int, warmup: int) -> dict[str, Timing]:
        """Measured for real; then the second candidate wins, so that there is something to keep."""
        times = interleaved(runners, repeats=repeats, warmup=warmup)
        return times | {"1": Timing(1e-3, 1e-3, 1e-3)}

    monkeypatch.setattr(tuning, "interleaved", timed)
    before = jitconv.conv2d(x, w, b, **options)
    result = jitconv.tune(jitconv.conv2d, x, w, b, **options, repeats=3)[0]
    assert result.faults == ()
    assert result.stored
    info = launch.device_info(torch.cuda.current_device())
    call = calls.call_of(jitconv.conv2d, x, w, b, **options)
    assert result.winner is not None
    assert identity(result.winner.tile) == identity(candidates(result.problem, info.arch)[1])

    jitconv.reset_stats()
    after = jitconv.conv2d(x, w, b, **options)
    counted = jitconv.stats()
    assert (counted.generated_calls, counted.compiled) == (1, 0)
    assert counted.store_hits >= 1
    chosen = runtime.prepared(call).program.plan
    assert chosen.tuned is not None
    assert (chosen.tuned.source, chosen.tuned.gpu) == ("store", torch.cuda.get_device_name())
    assert result.winner.tile in {kernel.tile for kernel in chosen.kernels}
    assert jitconv.inspect(jitconv.conv2d, x, w, b, **options).tuned == chosen.tuned
    torch.testing.assert_close(after, before, rtol=1e-2, atol=1e-2)


# Every way in which operands become products, every orientation, and what FFMA serves.
PROBLEMS = {
    "tf32": (jitconv.conv3d, (2, 24, 5, 18, 20), (40, 24, 3, 3, 3), "float32", {"precision": "tf32"}),
    "ieee": (jitconv.conv2d, (2, 24, 18, 21), (40, 24, 3, 3), "float32", {"precision": "ieee", "stride": 2}),
    "bfloat16": (jitconv.conv2d, (2, 64, 18, 20), (96, 64, 3, 3), "bfloat16", {"padding": 1}),
    "few channels": (jitconv.conv2d, (2, 3, 40, 41), (32, 3, 7, 7), "float16", {"stride": 2, "padding": 3}),
    "transposed": (jitconv.conv_transpose2d, (2, 16, 9, 10), (16, 24, 4, 4), "float32", {"stride": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROBLEMS)
def test_a_candidate_is_wrong(name: str) -> None:
    function, x_shape, w_shape, dtype, options = PROBLEMS[name]
    x, w = (torch.randn(shape, device="cuda", dtype=getattr(torch, dtype)) for shape in (x_shape, w_shape))
    (result,) = jitconv.tune(function, x, w / w[0].numel() ** 0.5, epilogue=[E.mish()], **options, repeats=1)
    assert result.faults == ()
    assert len(result.rows) > 1
    assert all(row.timing is not None and 0 < row.timing.median < 100 for row in result.rows)


def test_an_element_that_no_kernel_writes_passes() -> None:
    """Outputs start as NaN; a runner that launches nothing must be wrong."""
    x, w, b = arguments()
    gpu = tuning.current_gpu()
    plan = tuning.study("idle", calls.call_of(jitconv.conv2d, x, w, b, precision="ieee"), gpu, limit=1)
    compiled = tuning.compile_all(plan)
    entries = [compiled[job.key] for job in plan.jobs]
    runner = tuning.Runner(plan.call, plan.programs[0], entries, gpu, {})  # type: ignore[arg-type]
    try:
        assert tuning._checked(plan, plan.tiles[0], runner).state == "ok"
        runner._launches, runner._loaded = [], []
        assert tuning._checked(plan, plan.tiles[0], runner).state == "wrong"
    finally:
        runner.unload()
