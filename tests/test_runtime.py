"""The life of a call without a GPU: compiled for real, loaded and launched by stand-ins."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import jitconv
from jitconv import calls, launch, runtime
from jitconv import epilogue as E
from jitconv.compilation import compile_kernel
from jitconv.errors import KernelNotWarmedError

WEIGHT = torch.ones(8, 4, 3, 3)


class Device:
    """Stands for a GPU: counts what is loaded, keeps the arguments of what is launched."""

    def __init__(self) -> None:
        self.loads: list[str] = []
        self.launches: list[bytes] = []
        self.capturing = False
        self.meet: Callable[[], object] = lambda: None

    def load(self, cubin: bytes, name: str, **_: Any) -> Device:
        self.loads.append(name)
        return self

    def launch(self, grid: int, block: int, arguments: bytes, stream: int) -> None:
        self.launches.append(arguments)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(launch, "device_info", lambda ordinal: SimpleNamespace(arch="sm_90a"))
    monkeypatch.setattr(launch, "current_stream", lambda ordinal: 0)
    monkeypatch.setattr(launch, "is_capturing", lambda stream: device.capturing)
    monkeypatch.setattr(launch, "load", device.load)
    monkeypatch.setattr(runtime, "_prepared", type(runtime._prepared)())
    monkeypatch.setattr(runtime, "_loaded", {})

    def compiled(kernel: Any, arch: str) -> Any:
        device.meet()
        return compile_kernel(kernel, arch)

    monkeypatch.setattr(runtime, "compiled_kernel", compiled)
    jitconv.reset_stats()
    return device


def run(batch: int = 1, extent: int = 5, factor: float = 2.0) -> Tensor:
    x = torch.ones(batch, 4, extent, extent + 1)
    return runtime.run(calls.call_of(jitconv.conv2d, x, WEIGHT, padding=1, epilogue=[E.mul(factor)]))


def test_threads_that_come_at_once_load_a_kernel_each(device: Device) -> None:
    # Nobody gets past the store before all have asked it.
    device.meet = threading.Barrier(4).wait
    threads = [threading.Thread(target=run, kwargs={"batch": 1 + i}) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert device.loads == ["jitconv_conv2d_c4k8_k3_mul_float32"]
    assert jitconv.stats().launches == 4


def test_another_size_loads_another_kernel(device: Device) -> None:
    shapes = {tuple(run(batch, extent).shape) for batch in (1, 2) for extent in range(1, 30)}
    assert len(shapes) == 58
    assert len(device.loads) == 1
    assert jitconv.stats().memory_hits == 57


def test_prepared_calls_grow_without_bound(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_PREPARED_LIMIT", 8)
    for extent in range(1, 20):
        run(extent=extent)
    assert len(runtime._prepared) == 8


def test_another_number_prepares_a_call_anew_or_is_not_passed(device: Device) -> None:
    factors = (2.123, 3.456)
    for factor in factors:
        run(factor=factor)
    assert len(runtime._prepared) == 1
    assert [struct.pack("<f", f) in arguments for arguments in device.launches for f in factors] == [1, 0, 0, 1]


def test_a_kernel_is_loaded_while_a_graph_is_captured(device: Device) -> None:
    device.capturing = True
    with pytest.raises(KernelNotWarmedError, match="call the same function once"):
        run()
    assert not device.loads
    device.capturing = False
    run()
    device.capturing = True
    run(batch=3)
    assert len(device.loads) == 1
