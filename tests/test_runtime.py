"""The life of a call without a GPU: compiled for real, loaded and launched by stand-ins."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import jitconv
from jitconv import calls, launch, runtime
from jitconv import epilogue as E
from jitconv.architectures import KNOWN, arch_number
from jitconv.compilation import compile_kernel
from jitconv.errors import KernelNotWarmedError

WEIGHT = torch.ones(8, 4, 3, 3)


class Device:
    """Stands for a GPU: counts what is loaded, keeps the arguments of what is launched."""

    def __init__(self) -> None:
        self.loads: list[str] = []
        self.launches: list[bytes] = []
        self.capturing = False
        #: One kernel a convolution: without tensor cores no kernel lays out the weights.
        self.arch = "sm_75"
        self.meet: Callable[[], object] = lambda: None

    def load(self, cubin: bytes, name: str, **_: Any) -> Device:
        self.loads.append(name)
        return self

    def launch(self, grid: int, block: int, arguments: bytes, stream: int) -> None:
        self.launches.append(arguments)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(launch, "device_info", lambda _: SimpleNamespace(name="", arch=device.arch, sm_count=132))
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


def test_a_norm_with_a_weight_is_launched_for_one_with_a_bias(device: Device) -> None:
    """Both have one row of the same shape, and the first prepared one served the other: its bias was a null pointer."""
    x, row = torch.ones(1, 4, 5, 6), torch.ones(6)
    for norm in (E.layer_norm(6, row), E.layer_norm(6, None, row), E.layer_norm(6, row, row)):
        runtime.run(calls.call_of(jitconv.conv2d, x, WEIGHT, padding=1, epilogue=[norm]))
        assert struct.pack("<Q", row.data_ptr()) in device.launches[-1]
    assert len(runtime._prepared) == 3


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


# ---- Precision ------------------------------------------------------------------------------------------------


@contextmanager
def conv_setting(value: str) -> Iterator[None]:
    """torch's own setting for convolutions, put back behind."""
    before = torch.backends.cudnn.conv.fp32_precision
    torch.backends.cudnn.conv.fp32_precision = value
    try:
        yield
    finally:
        torch.backends.cudnn.conv.fp32_precision = before


def kernels_of_a_call(**arguments: Any) -> list[str]:
    """The kinds of product of the kernels that a call runs: the tile's math, ``FFMA`` where it has none."""
    call = calls.call_of(jitconv.conv2d, torch.ones(1, 4, 5, 6), WEIGHT, padding=1, **arguments)
    runtime.run(call)
    launches = runtime._prepared[call.signature()].program.launches
    return [getattr(step.kernel.tile, "math", "FFMA") for step in launches]


@pytest.fixture
def uncompiled(device: Device, monkeypatch: pytest.MonkeyPatch) -> Device:
    """A GPU with the tensor cores of sm_90a, on which which kernels are loaded is all that matters."""
    device.arch = "sm_90a"
    entry = SimpleNamespace(cubin=b"", metadata={"name": "a kernel"})
    monkeypatch.setattr(runtime, "compiled_kernel", lambda kernel, arch: entry)
    return device


SPLIT, ROUNDED = ["TF32X3"] * 2, ["TF32"] * 2  # the weights are laid out, then convolved


def test_a_change_of_torchs_setting_between_two_calls_is_missed(uncompiled: Device) -> None:
    for setting, expected in (("tf32", ROUNDED), ("ieee", SPLIT), ("tf32", ROUNDED), ("none", SPLIT)):
        with conv_setting(setting):
            assert kernels_of_a_call() == expected, setting
    assert len(uncompiled.loads) == 4
    assert len(runtime._prepared) == 2


def test_the_older_names_of_torchs_setting_are_not_followed(uncompiled: Device) -> None:
    assert kernels_of_a_call() == ROUNDED
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        assert kernels_of_a_call() == SPLIT
    assert kernels_of_a_call() == ROUNDED
    torch.backends.cudnn.allow_tf32 = False
    try:
        assert kernels_of_a_call() == SPLIT
    finally:
        torch.backends.cudnn.allow_tf32 = True
    assert kernels_of_a_call() == ROUNDED


def test_a_mixture_of_old_and_new_settings_raises(uncompiled: Device) -> None:
    """Of convolutions alone torch always has an answer; of convolutions and RNNs together it has none here."""
    with conv_setting("ieee"):
        with pytest.raises(RuntimeError):
            _ = torch.backends.cudnn.allow_tf32
        assert kernels_of_a_call() == SPLIT
    with conv_setting("none"):
        torch.backends.cudnn.fp32_precision = "tf32"
        try:
            assert kernels_of_a_call() == ROUNDED  # inherited from all of cuDNN
        finally:
            torch.backends.cudnn.fp32_precision = "none"


def test_a_named_precision_gives_way_to_torchs_setting(uncompiled: Device) -> None:
    with conv_setting("ieee"):
        assert kernels_of_a_call(precision="tf32") == ROUNDED
    with conv_setting("tf32"):
        assert kernels_of_a_call(precision="ieee") == SPLIT


@pytest.mark.parametrize("arch", KNOWN)
def test_an_architecture_multiplies_in_another_way(uncompiled: Device, arch: str) -> None:
    uncompiled.arch = arch
    number = arch_number(arch)
    # Three TF32 products repay themselves where TF32 runs at more than three times the rate of FFMA.
    assert kernels_of_a_call(precision="ieee") == (SPLIT if number in (80, 90, 100) else ["FFMA"])
    assert kernels_of_a_call(precision="tf32") == (ROUNDED if number >= 80 else ["FFMA"])


def test_a_setting_loads_second_kernels_where_it_changes_nothing(uncompiled: Device) -> None:
    half = torch.ones(1, 4, 5, 6, dtype=torch.float16)
    for setting in ("tf32", "ieee"):
        with conv_setting(setting):
            runtime.run(calls.call_of(jitconv.conv2d, half, WEIGHT.half(), padding=1))
            runtime.run(calls.call_of(jitconv.conv_transpose2d, half.float(), WEIGHT.mT[:4], stride=2))
    assert len(uncompiled.loads) == 3
