"""Prepared operators on a GPU: frozen weights in streams, threads and graphs, changed weights, a thousand sizes."""

from __future__ import annotations

import gc
import random
import resource
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import jitconv
from jitconv import epilogue as E
from jitconv import launch
from jitconv.errors import KernelNotWarmedError

SIZES, THREADS = 1000, 16

#: What one layer may compile for all sizes of image in one memory format (tests/test_sizes.py).
MOST_KERNELS = 10


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(20261129)


@pytest.fixture
def needs_packing() -> None:
    if launch.device_info(0).capability < (8, 0):
        pytest.skip("weights are packed for tensor cores of sm_80 and up")


def weights(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    w = torch.randn(48, 32, 3, 3, device="cuda") / 17
    return w.to(dtype), torch.randn(48, device="cuda", dtype=dtype)


def image(n: int = 2, h: int = 40, w: int = 56, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(n, 32, h, w, device="cuda", dtype=dtype)


def prepared(w: Tensor, b: Tensor, freeze: bool = True) -> jitconv.PreparedOperator:
    return jitconv.prepare(jitconv.conv2d, w, b, padding=1, epilogue=[E.silu()], freeze_weights=freeze)


def plain(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return jitconv.conv2d(x, w, b, padding=1, epilogue=[E.silu()])


def exact(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.silu(F.conv2d(x.double(), w.double(), b.double(), padding=1))


def error(y: Tensor, expected: Tensor) -> float:
    return float((y.double() - expected).norm() / expected.norm())


# ---- Frozen weights -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_frozen_weights_give_other_bits(needs_packing: None, dtype: torch.dtype) -> None:
    w, b = weights(dtype)
    op = prepared(w, b)
    inputs = [image(n, h, v, dtype) for n, h, v in ((2, 40, 56), (1, 7, 8), (3, 15, 13), (1, 100, 33))]
    inputs += [x.contiguous(memory_format=torch.channels_last) for x in inputs]
    for x in inputs:
        expected = plain(x, w, b)
        before = jitconv.stats()
        results = [op(x), op(x)]
        after = jitconv.stats()
        assert all(torch.equal(y, expected) and y.stride() == expected.stride() for y in results)
        assert after.generated_calls == before.generated_calls + 2
        assert after.launches <= before.launches + 3
    assert error(op(inputs[0]), exact(inputs[0], w, b)) < (2e-3 if dtype != torch.bfloat16 else 1e-2)
    before = jitconv.stats().launches
    for x in inputs:
        op(x)
    assert jitconv.stats().launches == before + len(inputs)


def _adamw(w: Tensor) -> None:
    w.grad = torch.ones_like(w)
    torch.optim.AdamW([w], lr=0.1, fused=True).step()


def _set(w: Tensor) -> None:
    with torch.no_grad():
        w.set_(torch.randn_like(w))


UPDATES: dict[str, Callable[[Tensor], object]] = {
    "fused AdamW": _adamw,
    "foreach": lambda w: torch._foreach_mul_([w.detach()], 2.0),
    "written through .data": lambda w: w.data.mul_(2.0),
    "set_": _set,
}


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES.keys())
def test_a_change_is_missed_by_the_function_or_seen_by_frozen_weights(update: Callable[[Tensor], object]) -> None:
    w, b = weights()
    x, w = image(), torch.nn.Parameter(w)
    op, free = prepared(w, b), prepared(w, b, freeze=False)
    with torch.no_grad():
        old = plain(x, w, b)
        assert torch.equal(op(x), old)
        assert torch.equal(free(x), old)
        update(w)
        new = plain(x, w, b)
        assert error(new, exact(x, w.detach(), b)) < 2e-3
        assert not torch.equal(new, old)
        assert torch.equal(free(x), new)
        assert torch.equal(op(x), old)
        op.refresh()
        assert torch.equal(op(x), new)


def test_a_stream_reads_weights_before_they_are_packed(needs_packing: None) -> None:
    w, b = weights()
    x = image()
    streams = [torch.cuda.Stream() for _ in range(4)]
    expected = plain(x, w, b)
    torch.cuda.synchronize()
    for _ in range(5):
        with torch.cuda.stream(streams[0]):
            # What packs stands behind this in its own stream, and in no other.
            torch.cuda._sleep(20_000_000)
            op = prepared(w, b)
            first = op(x)
        others = []
        for stream in streams[1:]:
            with torch.cuda.stream(stream):
                others.append(op(x))
        torch.cuda.synchronize()
        assert all(torch.equal(y, expected) for y in (first, *others))


def test_threads_that_come_at_once_disturb_each_other(needs_packing: None) -> None:
    w, b = weights()
    inputs = [image(1 + i % 3, 6 + 5 * (i % 5), 20 + i) for i in range(THREADS)]
    expected = [plain(x, w, b) for x in inputs]
    torch.cuda.synchronize()
    for _ in range(3):
        op = prepared(w, b)
        together = threading.Barrier(THREADS)

        def work(x: Tensor, op: jitconv.PreparedOperator = op, together: threading.Barrier = together) -> list[Tensor]:
            with torch.cuda.stream(torch.cuda.Stream()):
                together.wait()
                found = [op(x) for _ in range(5)]
                torch.cuda.current_stream().synchronize()
            return found

        with ThreadPoolExecutor(THREADS) as pool:
            for found, right in zip(pool.map(work, inputs), expected, strict=True):
                assert all(torch.equal(y, right) for y in found)


def captured(function: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y = function()
    return graph, y


def test_a_graph_replays_stale_weights() -> None:
    w, b = weights()
    x = image()
    op = prepared(w, b)
    op(x)
    plain(x, w, b)
    frozen_graph, frozen = captured(lambda: op(x))
    plain_graph, free = captured(lambda: plain(x, w, b))
    old = plain(x, w, b)
    w.mul_(2.0)
    new = plain(x, w, b)
    for graph in (frozen_graph, plain_graph):
        graph.replay()
    assert torch.equal(frozen, old)
    assert torch.equal(free, new)
    op.refresh()
    frozen_graph.replay()
    assert torch.equal(frozen, new)


def test_weights_that_are_not_packed_break_a_capture(needs_packing: None) -> None:
    w, b = weights()
    x = image()
    warm, cold = prepared(w, b), prepared(w, b)
    expected = warm(x)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        with pytest.raises(KernelNotWarmedError, match="call the operator once"):
            cold(x)
        with pytest.raises(RuntimeError, match="captured"):
            warm.refresh()
        with pytest.raises(RuntimeError, match="captured"):
            prepared(w, b)
        y = warm(x)
    graph.replay()
    assert torch.equal(y, expected)
    assert torch.equal(cold(x), expected)


def test_packing_in_another_thread_breaks_a_capture(needs_packing: None) -> None:
    w, b = weights()
    x = image()
    expected = plain(x, w, b)
    warm, cold = prepared(w, b), prepared(w, b)
    warm(x)
    side = torch.cuda.Stream()

    def work(op: jitconv.PreparedOperator) -> Tensor:
        with torch.cuda.stream(side):
            return op(x)

    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    # In torch's default mode any thread that asks the driver for memory ends a capture, torch's own operators included.
    with ThreadPoolExecutor(1) as pool, torch.cuda.graph(graph, capture_error_mode="thread_local"):
        first = warm(x)
        other = pool.submit(work, cold).result()
        second = warm(x)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(y, expected) for y in (first, second, other))


def test_gradients_of_the_input_are_wrong_with_frozen_weights() -> None:
    w, b = weights()
    x = image().requires_grad_()
    (found,) = torch.autograd.grad(prepared(w, b)(x).square().sum(), x)
    (expected,) = torch.autograd.grad(exact(x, w, b).square().sum(), x)
    assert error(found, expected) < 5e-3
    with pytest.raises(RuntimeError, match="requires a gradient"):
        prepared(torch.nn.Parameter(w), b)(x)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_another_device_reads_the_weights_of_the_first() -> None:
    w, b = weights()
    x = image()
    ops = [prepared(w.to(f"cuda:{i}"), b.to(f"cuda:{i}")) for i in range(2)]
    for _ in range(2):
        assert torch.equal(ops[0](x), ops[1](x.to("cuda:1")).to("cuda:0"))
    with pytest.raises(RuntimeError, match=r"on cuda:1.*are on cuda:0"):
        ops[0](x.to("cuda:1"))


# ---- A thousand sizes ------------------------------------------------------------------------------------------------


def resident() -> int:
    """Memory of this process in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def some_sizes() -> Iterator[tuple[int, int, int]]:
    r = random.Random(0)
    found = set()
    while len(found) < SIZES:
        size = (r.randint(1, 2), r.randint(1, 60), r.choice((1, 1, 4)) * r.randint(1, 15))
        if size not in found:
            found.add(size)
            yield size


@pytest.mark.parametrize("freeze", [False, True])
def test_a_thousand_sizes_compile_or_grow_without_bound(freeze: bool) -> None:
    w, b = weights()
    op = prepared(w, b, freeze)
    classes = [(h, v) for h in (8, 16, 40) for v in (5, 8, 13, 16, 41, 44)]
    before = jitconv.stats()
    for h, v in classes:
        op(image(1, h, v))
    found = jitconv.stats()
    compiled = found.compiled + found.store_hits - before.compiled - before.store_hits
    # None at all where the other half of this test has run.
    assert compiled <= MOST_KERNELS
    work = list(some_sizes())
    memory = torch.randn(2 * 32 * 60 * 60, device="cuda")
    torch.cuda.synchronize()

    def run(seed: int, sizes: list[tuple[int, int, int]]) -> list[tuple[tuple[int, int, int], Tensor]]:
        kept = []
        with torch.cuda.stream(torch.cuda.Stream()):
            for i, (n, h, v) in enumerate(random.Random(seed).sample(sizes, len(sizes))):
                y = op(memory[: n * 32 * h * v].view(n, 32, h, v))
                if i % 97 == seed:
                    kept.append(((n, h, v), y))
            torch.cuda.current_stream().synchronize()
        return kept

    with ThreadPoolExecutor(THREADS) as pool:
        # The first hundred bring what every thread and stream takes once.
        list(pool.map(lambda seed: run(seed, work[:100]), range(THREADS)))
        gc.collect()
        start = resident()
        results = list(pool.map(lambda seed: run(seed, work), range(THREADS)))
    gc.collect()
    assert jitconv.stats().compiled == found.compiled
    assert jitconv.stats().store_misses == found.store_misses
    # Entries of a thousand sizes are some 8 MB (tests/test_sizes.py).
    assert resident() - start < 64 << 20
    checked = [pair for kept in results for pair in kept]
    assert len(checked) >= THREADS * 10
    for (n, h, v), y in checked:
        x = memory[: n * 32 * h * v].view(n, 32, h, v)
        assert error(y, exact(x, w, b)) < 5e-3, (n, h, v)
