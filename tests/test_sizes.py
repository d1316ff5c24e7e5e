"""A thousand sizes of image: how many kernels they are, and how much memory of the host they take.

What decides, beside the layer itself, is written in program.py: whether x is made of whole 16-byte vectors
(``Problem.x_vector``), the classes of the output's last two extents (``Problem.sizes``), which choose a tile and are no
part of a kernel, and the width of offsets (``Problem.index_bits``), which only tensors of 2³¹ elements change.
"""

from __future__ import annotations

import gc
import random
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import jitconv
from jitconv import epilogue as E
from jitconv import fast_path, functional, launch, planning, program, runtime, tensor_map
from jitconv.calls import call_of
from jitconv.compilation import key_of
from jitconv.planning import tuned
from jitconv.program import Call

SIZES = 1000
THREADS = 16

LAST = {2: torch.channels_last, 3: torch.channels_last_3d}


def sizes(rank: int, largest: int, seed: int = 0, count: int = SIZES) -> list[tuple[int, ...]]:
    """Different batches and extents; as many small ones as large ones."""
    r = random.Random(seed)

    def extent() -> int:
        return r.randint(1, 20) if r.random() < 0.5 else r.choice((1, 4, 8)) * r.randint(1, largest // 8)

    found: dict[tuple[int, ...], None] = {}
    while len(found) < count:
        found[(r.randint(1, 5), *(extent() for _ in range(rank)))] = None
    return list(found)


# ---- Kernels --------------------------------------------------------------------------------------------------------


def layer_of(rank: int, channels: int, dtype: torch.dtype, last: bool) -> Callable[[tuple[int, ...]], Call]:
    """A layer with everything that people put behind one, as a function of the size of its input."""
    function = {2: jitconv.conv2d, 3: jitconv.conv3d}[rank]
    w = torch.empty((channels, channels, *(3,) * rank), dtype=dtype, device="meta")
    b = torch.empty(channels, dtype=dtype, device="meta")

    def call(size: tuple[int, ...]) -> Call:
        x = torch.empty((size[0], channels, *size[1:]), dtype=dtype, device="meta")
        r = torch.empty_like(x)
        if last:
            x = x.contiguous(memory_format=LAST[rank])
        return call_of(function, x, w, b, padding=1, epilogue=[E.silu(), E.add(r)])

    return call


#: Most kernels of one layer, by architecture, channels, and whether x is channels_last; those that pack its weights are
#: among them. Hopper has tiles for 16-byte vectors and for others, for images of up to 8, of up to 16 and larger, so
#: for wide layers, where several numbers of channels a tile are in question, that is most.
LIMITS = {
    ("sm_75", 64, False): 1,
    ("sm_80", 64, False): 3,
    ("sm_90a", 64, False): 10,
    ("sm_90a", 64, True): 8,
    ("sm_90a", 512, False): 15,
    ("sm_90a", 512, True): 11,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize(("arch", "channels", "last"), LIMITS, ids=str)
def test_sizes_are_many_kernels(arch: str, channels: int, last: bool, rank: int, dtype: torch.dtype) -> None:
    call = layer_of(rank, channels, dtype, last)
    keys = set()
    # All of them where there is most to find, and less of the same elsewhere.
    count = SIZES if (arch, channels, last, dtype) == ("sm_90a", 512, False, torch.bfloat16) else SIZES // 8
    # Small enough for 32-bit offsets: those of 64 bits are another kernel.
    for size in sizes(rank, {2: 600, 3: 80}[rank], count=count):
        keys |= {key_of(step.kernel, arch) for step in program.build(call(size), arch).launches}
    assert 1 <= len(keys) <= LIMITS[arch, channels, last]


# ---- Memory ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """CPU tensors stand for those of a Hopper GPU, whose launches do nothing; the keys that were compiled."""
    compiled: set[str] = set()

    def compiled_kernel(kernel: Any, arch: str) -> SimpleNamespace:
        compiled.add(key_of(kernel, arch))
        return SimpleNamespace(cubin=b"", metadata={"name": kernel.family})

    kernel = SimpleNamespace(launch=lambda *_: None)
    info = SimpleNamespace(name="NVIDIA H200", arch="sm_90a", sm_count=132)
    monkeypatch.setattr(launch, "device_info", lambda _: info)
    monkeypatch.setattr(launch, "current_stream", lambda _: 0)
    monkeypatch.setattr(launch, "is_capturing", lambda _: False)
    monkeypatch.setattr(launch, "wait", lambda *_: None)
    monkeypatch.setattr(launch, "load", lambda *_, **__: kernel)
    monkeypatch.setattr(tensor_map, "encode", lambda spec, address, device: bytes(tensor_map.MAP_BYTES))
    monkeypatch.setattr(runtime, "compiled_kernel", compiled_kernel)
    monkeypatch.setattr(runtime, "_prepared", type(runtime._prepared)())
    monkeypatch.setattr(runtime, "_loaded", {})
    monkeypatch.setattr(functional, "torch_path_reason", functional.kernel_obstacle)
    monkeypatch.setattr(fast_path, "_on_gpu", lambda x: True)
    monkeypatch.setattr(fast_path, "_entries", {})
    planning._plan.cache_clear()
    tuned._choice.cache_clear()
    return compiled


def by_threads(call: Callable[[tuple[int, ...]], object], work: list[tuple[int, ...]]) -> None:
    """Every thread makes every call, each in an order of its own."""
    failures: list[BaseException] = []

    def run(seed: int) -> None:
        try:
            for size in random.Random(seed).sample(work, len(work)):
                call(size)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def image(size: tuple[int, ...]) -> Tensor:
    # Nobody reads or writes it, so it takes no memory.
    return torch.empty(size[0], 16, *size[1:])


Layer = Callable[[tuple[int, ...]], Tensor]


@pytest.fixture
def layers(gpu: set[str]) -> tuple[Layer, Layer]:
    """A layer as a function, and with frozen weights."""
    w, b = torch.zeros(24, 16, 3, 3), torch.zeros(24)
    frozen = jitconv.prepare(jitconv.conv2d, w, b, padding=1, epilogue=[E.silu()], freeze_weights=True)
    return (
        lambda size: jitconv.conv2d(image(size), w, b, padding=1, epilogue=[E.silu()]),
        lambda size: frozen(image(size)),
    )


def test_a_thousand_sizes_and_sixteen_threads_leave_more_than_an_entry_a_size(
    gpu: set[str], layers: tuple[Layer, Layer]
) -> None:
    function, frozen = layers
    work = sizes(2, 100)
    jitconv.reset_stats()
    by_threads(function, work)
    by_threads(frozen, work[: SIZES // 10])
    assert jitconv.stats().generated_calls == THREADS * (SIZES + SIZES // 10)
    assert 2 <= len(gpu) <= LIMITS["sm_90a", 64, False]
    assert len(runtime._loaded) == len(gpu)
    assert len(runtime._prepared) == SIZES
    assert len(fast_path._entries) == SIZES + SIZES // 10
    # One for each Problem: x_vector, and three classes of two extents.
    for table in (planning._plan, tuned._choice):
        assert 1 <= table.cache_info().currsize <= 2 * 3**2


@pytest.fixture
def memory() -> Iterator[Callable[[], int]]:
    """Bytes allocated by Python and its extensions since the test began, as far as they tell."""

    def traced() -> int:
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    yield traced
    tracemalloc.stop()


def test_a_size_takes_more_than_ten_kilobytes(
    gpu: set[str], layers: tuple[Layer, Layer], memory: Callable[[], int]
) -> None:
    """All tables are full at 4096 sizes: then they take some 40 MB, and no more ever."""
    assert runtime._PREPARED_LIMIT <= 4096
    assert fast_path._LIMIT <= 4096
    work = sizes(2, 100, count=150)
    # What is remembered of frozen weights is their own; the rest is there from the first layer.
    for layer, most in zip(layers, (10_000, 6_000), strict=True):
        for size in work[:50]:
            layer(size)
        before = memory()
        for size in work[50:]:
            layer(size)
        assert 0 < memory() - before < 100 * most


def test_memory_grows_once_the_tables_are_full(
    gpu: set[str], layers: tuple[Layer, Layer], memory: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "_PREPARED_LIMIT", 40)
    monkeypatch.setattr(fast_path, "_LIMIT", 40)
    work = sizes(2, 100, count=200)
    for layer in layers:
        for size in work[:100]:
            layer(size)
        before = memory()
        by_threads(layer, work[100:120])
        for size in work[120:]:
            layer(size)
        # A hundred entries are new, of 3 to 5 kilobytes each.
        assert memory() - before < 30_000
        assert len(runtime._prepared) == len(fast_path._entries) == 40
