"""The warm call: it launches what the whole way would, or leaves the call to the whole way.

Without a GPU: CPU tensors stand for those of one, kernels are not compiled, and what would be launched is kept. Memory
is handed out by a stand-in too, so that two runs of a call get the same addresses and can be compared byte by byte.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import random
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

import jitconv
from jitconv import calls, fast_path, functional, launch, runtime, tensor_map
from jitconv import epilogue as E
from jitconv.errors import DriverError
from tests.strategies import Case, Twin, random_case

REAL_EMPTY, REAL_EMPTY_STRIDED = torch.empty, torch.empty_strided


class Memory:
    """Hands out the same blocks in the same order after each ``rewind()``."""

    def __init__(self) -> None:
        self.blocks: list[Tensor] = []
        self.taken = 0

    def rewind(self) -> None:
        self.taken = 0

    def empty(self, shape: Any, **named: Any) -> Tensor:
        if str(named["device"]) == "meta":
            return REAL_EMPTY(shape, **named)
        memory_format = named.pop("memory_format")
        strides = REAL_EMPTY(shape, device="meta", memory_format=memory_format).stride()
        return self.empty_strided(shape, strides, **named)

    def empty_strided(self, shape: Any, strides: Any, *, dtype: torch.dtype, device: Any) -> Tensor:
        if self.taken == len(self.blocks):
            self.blocks.append(REAL_EMPTY(1 << 26, dtype=torch.uint8))
        self.taken += 1
        return self.blocks[self.taken - 1].view(dtype).as_strided(shape, strides)


class Device:
    """Stands for a GPU: keeps the name, grid, block, argument, stream and thread of each launch."""

    def __init__(self) -> None:
        self.arch = "sm_90a"
        self.stream = 0
        self.launches: list[tuple[Any, ...]] = []
        self.at_launch: Callable[[], object] = lambda: None

    def load(self, cubin: bytes, name: str, **_: Any) -> SimpleNamespace:
        def start(grid: int, block: int, arguments: bytes, stream: int) -> None:
            self.at_launch()
            self.launches.append((name, grid, block, bytes(arguments), stream, threading.current_thread().name))

        return SimpleNamespace(launch=start)


def encoded(spec: Any, address: int, device: int | None) -> bytes:
    return struct.pack("<Q", address) + repr(spec).encode()[:120].ljust(120, b"\0")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(launch, "device_info", lambda _: SimpleNamespace(name="", arch=device.arch, sm_count=132))
    monkeypatch.setattr(launch, "current_stream", lambda ordinal: device.stream)
    monkeypatch.setattr(launch, "is_capturing", lambda stream: False)
    monkeypatch.setattr(launch, "load", device.load)
    monkeypatch.setattr(tensor_map, "encode", encoded)
    monkeypatch.setattr(runtime, "_prepared", type(runtime._prepared)())
    monkeypatch.setattr(runtime, "_loaded", {})
    monkeypatch.setattr(
        runtime,
        "compiled_kernel",
        lambda kernel, arch: SimpleNamespace(cubin=b"", metadata={"name": f"{kernel.family} {kernel}"}),
    )
    monkeypatch.setattr(functional, "torch_path_reason", functional.kernel_obstacle)
    monkeypatch.setattr(fast_path, "_on_gpu", lambda x: True)
    monkeypatch.setattr(fast_path, "_entries", {})
    jitconv.reset_stats()
    return device


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    memory = Memory()
    monkeypatch.setattr(torch, "empty", memory.empty)
    monkeypatch.setattr(torch, "empty_strided", memory.empty_strided)
    return memory


@pytest.fixture
def whole_way(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions whose calls went the whole way."""
    taken: list[str] = []
    run = runtime.run

    def recorded(call: Any) -> Tensor:
        taken.append(call.function)
        return run(call)

    monkeypatch.setattr(runtime, "run", recorded)
    return taken


X, W, B = torch.randn(2, 16, 8, 9), torch.randn(24, 16, 3, 3), torch.randn(24)
RESIDUAL = torch.randn(2, 24, 8, 9)


def conv(x: Tensor = X, **arguments: Any) -> Tensor:
    given: dict[str, Any] = {"weight": W, "bias": B, "padding": 1, "epilogue": [E.silu()], **arguments}
    return jitconv.conv2d(x, **given)


# ---- The same launches ----------------------------------------------------------------------------------------


def copied(tensor: Tensor) -> Tensor:
    """Other memory, other values, the same shape, strides and alignment."""
    flat = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).clone()
    return (flat + 1).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def varied(case: Case) -> Case:
    """The same call with other tensors and other numbers."""

    def step(twin: Twin) -> Twin:
        new = twin.step.with_tensors(copied(tensor) for tensor in twin.step.tensors())
        operands = tuple((name, v * 1.5 + 0.1 if isinstance(v, float) else v) for name, v in new.operands)
        return replace(twin, step=E.Step(new.kind, operands, new.attributes))

    return replace(
        case,
        x=copied(case.x),
        weights=tuple(copied(w) for w in case.weights),
        biases=tuple(None if b is None else copied(b) for b in case.biases),
        chain=tuple(step(twin) for twin in case.chain),
        between=tuple(step(twin) for twin in case.between),
    )


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a"])
@pytest.mark.parametrize("seed", range(25))
def test_a_warm_call_launches_something_else_than_a_cold_one(
    device: Device, whole_way: list[str], monkeypatch: pytest.MonkeyPatch, arch: str, seed: int
) -> None:
    device.arch = arch
    first = random_case(random.Random(seed), largest=400)
    other = varied(first)
    tensors, named = other.arguments()
    call = calls.call_of(getattr(jitconv, other.function), *tensors, **named)
    # Only now: the cases above need memory of their own.
    memory = Memory()
    monkeypatch.setattr(torch, "empty", memory.empty)
    monkeypatch.setattr(torch, "empty_strided", memory.empty_strided)
    first.public()
    device.launches.clear()
    memory.rewind()
    cold = runtime.run(call)
    expected = device.launches[:]
    device.launches.clear()
    memory.rewind()
    whole_way.clear()
    warm = other.public()
    assert not whole_way, first
    assert device.launches == expected
    assert (warm.shape, warm.stride(), warm.dtype, warm.data_ptr()) == (
        cold.shape, cold.stride(), cold.dtype, cold.data_ptr()
    )  # fmt: skip


@pytest.mark.parametrize("unbatched", [X[0], X[0].to(memory_format=torch.contiguous_format)], ids=["view", "copy"])
def test_a_warm_call_without_a_batch_returns_one(device: Device, whole_way: list[str], unbatched: Tensor) -> None:
    cold, warm = conv(unbatched), conv(unbatched)
    assert len(whole_way) == 1
    assert warm.shape == cold.shape == (24, 8, 9)
    assert warm.stride() == cold.stride()


def test_an_empty_batch_is_launched(device: Device, whole_way: list[str]) -> None:
    assert [tuple(conv(X[:0]).shape) for _ in range(3)] == [(0, 24, 8, 9)] * 3
    assert len(whole_way) == 1
    assert not device.launches
    assert jitconv.stats().generated_calls == 3


def test_a_number_of_an_earlier_call_is_launched(device: Device, whole_way: list[str]) -> None:
    factors = [2.125, 3.25, float("nan"), 1e300]
    for factor in factors:
        conv(epilogue=[E.mul(factor)])
    assert len(whole_way) == 1
    passed = [np.float32(min(factor, float("inf")) if factor == factor else factor).tobytes() for factor in factors[:2]]
    argument = [launched[3] for launched in device.launches if not launched[0].startswith("pack")]
    assert [[number in found for number in passed] for found in argument[:2]] == [[True, False], [False, True]]
    assert struct.pack("<f", float("inf")) in argument[3]  # beyond float32, as torch rounds it


def test_a_scalar_on_the_host_is_baked_in_or_its_pointer_passed(device: Device) -> None:
    # Only shapes and devices are looked at, so tensors without memory stand for those of another device than the CPU.
    x, w = torch.empty(2, 16, 8, 9, device="meta"), torch.empty(24, 16, 3, 3, device="meta")
    read = [fast_path.read("conv2d", (x, w), (1,), ([E.mul(torch.tensor(s))],), None) for s in (2.5, 3.5)]
    (key, slots), (other_key, other_slots) = [seen for seen in read if seen is not None]
    assert key == other_key
    assert (slots[-1], other_slots[-1]) == (2.5, 3.5)
    number = fast_path.read("conv2d", (x, w), (1,), ([E.mul(2.5)],), None)
    assert number is not None
    assert number[0] != key


def test_lists_that_change_between_calls_are_remembered_by_identity(device: Device) -> None:
    stride, chain = [1, 1], [E.silu()]
    assert conv(stride=stride, epilogue=chain).shape[2:] == (8, 9)
    stride[:] = [2, 3]
    chain.append(E.max_pool(2))
    assert conv(stride=stride, epilogue=chain).shape[2:] == (2, 1)


def test_one_tensor_in_two_places_is_mistaken_for_two(device: Device, whole_way: list[str]) -> None:
    """The first call has one residual twice, the second has two."""
    other = RESIDUAL.clone()
    conv(epilogue=[E.add(RESIDUAL), E.mul(RESIDUAL)])
    conv(epilogue=[E.add(RESIDUAL), E.mul(other)])
    assert len(whole_way) == 1
    assert struct.pack("<Q", other.data_ptr()) not in device.launches[-3][3]
    assert struct.pack("<Q", RESIDUAL.data_ptr()) in device.launches[-1][3]
    assert struct.pack("<Q", other.data_ptr()) in device.launches[-1][3]


# ---- What a key must tell apart -------------------------------------------------------------------------------


def misaligned(tensor: Tensor) -> Tensor:
    flat = torch.empty(tensor.numel() + 1)
    return flat[1:].view(tensor.shape).copy_(tensor)


ROW = torch.randn(9)

ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)

#: Changes of :func:`conv` that need another kernel, another output, other arguments, or are mistakes.
CHANGES: dict[str, dict[str, Any]] = {
    "misaligned input": {"x": misaligned(X)},
    "channels_last input": {"x": X.contiguous(memory_format=torch.channels_last)},
    "strided input": {"x": torch.randn(2, 16, 8, 18)[..., ::2]},
    "unbatched input": {"x": X[0]},
    "larger batch": {"x": torch.randn(3, 16, 8, 9)},
    "half everything": {"x": X.half(), "weight": W.half(), "bias": B.half()},
    "half input": {"x": X.half()},
    "half bias": {"bias": B.half()},
    "integer input": {"x": X.int(), "weight": W.int(), "bias": B.int()},
    "double": {"x": X.double(), "weight": W.double(), "bias": B.double()},
    "fewer channels": {"x": X[:, :15]},
    "weight with other strides": {"weight": W.contiguous(memory_format=torch.channels_last)},
    "larger filter": {"weight": torch.randn(24, 16, 5, 5)},
    "no bias": {"bias": None},
    "bias of another length": {"bias": B[:23]},
    "bias of a length of one": {"bias": B[:1]},
    "strided bias": {"bias": torch.randn(48)[::2]},
    "a bias that is no tensor": {"bias": 1.0},
    "weight elsewhere": {"weight": W.to("meta")},
    "stride 2": {"stride": 2},
    "stride per axis": {"stride": (1, 2)},
    "stride True": {"stride": True},
    "stride 1.0": {"stride": 1.0},
    "stride (True, 1)": {"stride": (True, 1)},
    "stride [1, 1.0]": {"stride": [1, 1.0]},
    "stride that holds itself": {"stride": ENDLESS},
    "stride of numpy": {"stride": np.int64(1)},
    "stride bool of numpy": {"stride": np.bool_(True)},
    "stride a tensor": {"stride": torch.tensor(2)},
    "stride None": {"stride": None},
    "padding 0": {"padding": 0},
    "padding False": {"padding": False},
    "padding negative": {"padding": -1},
    "padding same": {"padding": "same"},
    "padding misspelt": {"padding": "some"},
    "padding per side": {"padding": ((1, 0), (0, 1))},
    "padding per side with a bool": {"padding": ((1, True), (1, 1))},
    "padding an iterator": {"padding": iter((1, 1))},
    "padding a set": {"padding": {1}},
    "padding of unhashable things": {"padding": ([], {})},
    "dilation 2": {"dilation": 2},
    "groups 2": {"groups": 2},
    "groups True": {"groups": True},
    "circular": {"padding_mode": "circular"},
    "padding mode misspelt": {"padding_mode": "zero"},
    "precision ieee": {"precision": "ieee"},
    "precision misspelt": {"precision": "fp32"},
    "precision a list": {"precision": ["ieee"]},
    "no steps": {"epilogue": ()},
    "None for steps": {"epilogue": None},
    "a step alone": {"epilogue": E.silu()},
    "steps in a tuple": {"epilogue": (E.silu(),)},
    "another step": {"epilogue": [E.mish()]},
    "two steps": {"epilogue": [E.silu(), E.silu()]},
    "something that is no step": {"epilogue": [E.silu]},
    "a string": {"epilogue": "silu"},
    "a number for steps": {"epilogue": 3},
    "an operand": {"epilogue": [E.add(2.0)]},
    "a scalar": {"epilogue": [E.add(torch.tensor(2.0))]},
    "a value per channel": {"epilogue": [E.add(B)]},
    "a residual": {"epilogue": [E.add(RESIDUAL)]},
    "a residual with other strides": {"epilogue": [E.add(RESIDUAL.contiguous(memory_format=torch.channels_last))]},
    "a residual of half": {"epilogue": [E.add(RESIDUAL.half())]},
    "a residual of another shape": {"epilogue": [E.add(RESIDUAL[:, :5])]},
    "a residual elsewhere": {"epilogue": [E.add(RESIDUAL.to("meta"))]},
    "a residual of integers": {"epilogue": [E.add(RESIDUAL.int())]},
    "the convolution's value": {"epilogue": [E.mul(E.CONV)]},
    "a norm": {"epilogue": [E.layer_norm(9)]},
    "a norm with a weight": {"epilogue": [E.layer_norm(9, ROW)]},
    "a norm with a bias": {"epilogue": [E.layer_norm(9, None, ROW)]},
    "a norm with both": {"epilogue": [E.layer_norm(9, ROW, ROW)]},
    "a norm of another width": {"epilogue": [E.layer_norm(8)]},
    "a pool": {"epilogue": [E.avg_pool(2)]},
    "a pool of another window": {"epilogue": [E.avg_pool((2, 3))]},
    "a pool of another kind": {"epilogue": [E.max_pool(2)]},
    "a pool that hangs over": {"epilogue": [E.avg_pool(2, ceil_mode=True)]},
    "a pool that is too large": {"epilogue": [E.avg_pool(20)]},
    "one step of the user's": {"epilogue": [E.register("mine", cuda="v + 1.0f", torch=lambda v: v + 1)()]},
    "another by the same name": {"epilogue": [E.register("mine", cuda="v + 2.0f", torch=lambda v: v + 2)()]},
}


def outcome(device: Device, memory: Memory, function: Callable[[], Tensor]) -> Any:
    """What a call returns or raises, and what it launches."""
    device.launches.clear()
    memory.rewind()
    try:
        y = function()
    except Exception as error:
        return type(error), str(error)
    # What torch served has memory of its own.
    return tuple(y.shape), y.stride(), y.dtype, list(device.launches)


@pytest.mark.filterwarnings("ignore")
def test_a_change_of_a_call_is_overlooked(
    device: Device, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The table holds every change that is valid, each seen a few times, in many orders.
    changes = {"none": {}, **{name: c for name, c in CHANGES.items() if name != "padding an iterator"}}
    expected = {}
    for name, change in changes.items():
        monkeypatch.setattr(fast_path, "_entries", {})
        expected[name] = outcome(device, memory, functools.partial(conv, **change))
    monkeypatch.setattr(fast_path, "_entries", {})
    order = [name for name in changes for _ in range(3)]
    for seed in range(2):
        random.Random(seed).shuffle(order)
        for name in order:
            assert outcome(device, memory, functools.partial(conv, **changes[name])) == expected[name], name
    assert len(fast_path._entries) > 35


def test_a_misaligned_input_gets_the_kernel_of_an_aligned_one(device: Device) -> None:
    # Rows of 32 bytes: where they start at multiples of 16, kernels read whole vectors.
    aligned = torch.randn(2, 16, 8, 8)
    other = misaligned(aligned)
    assert aligned.data_ptr() % 16 == 0 != other.data_ptr() % 16
    names = []
    for x in (aligned, other, aligned, other):
        device.launches.clear()
        conv(x)
        names.append(device.launches[-1][0])
    assert names[0] == names[2] != names[1] == names[3]


@pytest.mark.parametrize(
    ("function", "arguments", "different"),
    [
        ("conv_transpose2d", {"stride": 2, "padding": 1, "output_padding": 0, "groups": 1, "dilation": 1},
         {"stride": 2, "padding": 1, "output_padding": 1, "groups": 1, "dilation": 1}),
        ("conv_transpose2d", {"stride": 2, "padding": 0, "output_padding": 1}, {"stride": 2, "padding": 1}),
        ("conv2d", {"stride": 2, "dilation": 1}, {"stride": 1, "dilation": 2}),
    ],
)  # fmt: skip
def test_parameters_are_told_apart_by_value_but_not_by_place(
    device: Device, function: str, arguments: dict[str, Any], different: dict[str, Any]
) -> None:
    x, w = torch.randn(1, 8, 9, 9), torch.randn(8, 8, 3, 3)
    shapes = [getattr(jitconv, function)(x, w, **given).shape for given in (arguments, different) for _ in range(2)]
    expected = [getattr(F, function)(x, w, **given).shape for given in (arguments, different) for _ in range(2)]
    assert shapes == expected


def test_a_step_between_is_taken_for_one_behind(device: Device, whole_way: list[str]) -> None:
    x, dw, pw = torch.randn(1, 8, 6, 6), torch.randn(8, 1, 3, 3), torch.randn(8, 8, 1, 1)
    separable = functools.partial(jitconv.depthwise_separable_conv2d, x, dw, pw, padding=1)
    for _ in range(2):
        separable(between=[E.silu()])
        separable(epilogue=[E.silu()])
        separable(between=[E.silu()], epilogue=[E.silu()])
        separable(dw_bias=B[:8])
        separable(pw_bias=B[:8])
    assert len(whole_way) == 5
    names = [name for name, *_ in device.launches]
    assert names[:5] == names[5:]
    assert len(set(names)) == 5


def test_a_mistake_is_overlooked_once_the_right_call_is_known(device: Device) -> None:
    for _ in range(3):
        conv()
        with pytest.raises(TypeError, match="stride=True"):
            conv(stride=True)
        with pytest.raises(RuntimeError, match="bias has shape"):
            conv(bias=B[:7])
    assert len(fast_path._entries) == 1


# ---- Who has no key -------------------------------------------------------------------------------------------


def test_an_iterator_is_spent_by_looking_at_it(device: Device, whole_way: list[str]) -> None:
    for _ in range(2):
        conv(epilogue=iter([E.silu(), E.max_pool(2)]))
        conv(epilogue=(step for step in [E.silu(), E.max_pool(2)]))
    assert {tuple(conv(epilogue=iter([E.silu(), E.max_pool(2)])).shape) for _ in range(2)} == {(2, 24, 4, 4)}
    assert len(whole_way) == 6
    assert not fast_path._entries


class Marked(Tensor):
    """A subclass: its methods may be anything."""


def unkeyed() -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    yield "subclass", lambda: {"x": X.as_subclass(Marked)}
    yield "subclass as weight", lambda: {"weight": W.as_subclass(Marked)}
    yield "subclass in a chain", lambda: {"epilogue": [E.add(RESIDUAL.as_subclass(Marked))]}
    yield "negated", lambda: {"x": torch._neg_view(X)}
    yield "negated in a chain", lambda: {"epilogue": [E.add(torch._neg_view(RESIDUAL))]}
    yield "sparse", lambda: {"x": X.to_sparse()}
    yield "sparse in a chain", lambda: {"epilogue": [E.add(RESIDUAL.to_sparse())]}
    yield "no tensor", lambda: {"x": None}
    yield "input needs a gradient", lambda: {"x": X.clone().requires_grad_()}
    yield "weight needs a gradient", lambda: {"weight": torch.nn.Parameter(W)}
    yield "residual needs a gradient", lambda: {"epilogue": [E.add(RESIDUAL.clone().requires_grad_())]}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("arguments", [pytest.param(make, id=name) for name, make in unkeyed()])
def test_an_argument_that_a_key_cannot_describe_gets_one(
    device: Device, arguments: Callable[[], dict[str, Any]]
) -> None:
    given = {"x": X, "weight": W, "bias": B, "epilogue": [E.add(RESIDUAL)], **arguments()}
    tensors = (given["x"], given["weight"], given["bias"])
    assert fast_path.read("conv2d", tensors, (1, 1, 1, 1, "zeros"), (given["epilogue"],), None) is None


def test_a_gradient_is_lost_once_a_call_is_known(device: Device, whole_way: list[str]) -> None:
    weight = torch.nn.Parameter(W)
    for _ in range(2):
        with torch.no_grad():
            assert not conv(weight=weight).requires_grad
        with torch.inference_mode():
            assert conv(weight=weight).is_inference()
        assert conv(weight=weight).requires_grad
        assert conv(epilogue=[E.mul(torch.ones((), requires_grad=True))]).requires_grad
        assert not conv().requires_grad
    assert len(whole_way) == 1 + 2 * 2  # the first, and those that record


def test_a_tangent_is_lost_once_a_call_is_known(device: Device) -> None:
    conv()
    with forward_ad.dual_level():
        y = conv(forward_ad.make_dual(X, torch.ones_like(X)))
        assert forward_ad.unpack_dual(y).tangent is not None
    assert jitconv.stats().torch_calls == 1


def test_transformed_tensors_are_taken_for_plain_ones(device: Device) -> None:
    conv()
    keys: list[Any] = []

    def look(x: Tensor) -> Tensor:
        keys.append(fast_path.read("conv2d", (x, W, B), (1, 1, 1, 1, "zeros"), ([E.silu()],), None))
        return x.sum()

    torch.func.vmap(look)(torch.randn(3, 2, 16, 8, 9))
    torch.func.grad(look)(X)
    torch.func.jvp(look, (X,), (X,))
    torch.func.grad(lambda x: (look(x.detach()), x.sum())[1])(X)
    assert keys == [None] * 4


@pytest.mark.filterwarnings("ignore")
def test_the_sizes_of_a_trace_are_remembered(device: Device) -> None:
    conv()
    # Kernels are not traced; whether the call says so or runs is no matter here.
    with contextlib.suppress(AttributeError, TypeError):
        torch.jit.trace(lambda x: conv(x) + x.sum(), (X,), check_trace=False)
    assert len(fast_path._entries) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_caller_traces_a_call_or_keeps_an_address(device: Device, whole_way: list[str]) -> None:
    from torch import _dynamo as dynamo

    pw = torch.randn(8, 16, 1, 1)

    def convolve(x: Tensor) -> Tensor:
        return conv(x).sum() + jitconv.depthwise_separable_conv2d(x, W[:16, :1], pw, padding=1).sum()

    dynamo.reset()
    dynamo.utils.counters.clear()
    compiled = torch.compile(convolve, backend="eager")
    with torch.no_grad():
        for x in [X.clone() for _ in range(4)]:
            device.launches.clear()
            compiled(x)
            address = struct.pack("<Q", x.data_ptr())
            names = [launched[0] for launched in device.launches if address in launched[3]]
            assert len(names) == 2
    traced = dynamo.utils.counters["frames"]["total"]
    dynamo.reset()
    # Of this file, of the public functions, and what is left of them behind the break.
    assert traced < 30
    assert whole_way == ["conv2d", "depthwise_separable_conv2d"]


def test_a_chain_that_was_deepcopied_loses_its_key(device: Device, whole_way: list[str]) -> None:
    chain = copy.deepcopy([E.sigmoid(), E.mul(E.CONV)])
    for _ in range(3):
        conv(epilogue=chain)
    assert len(whole_way) == 1


# ---- The state of the process ---------------------------------------------------------------------------------


def test_a_change_of_torchs_precision_is_missed(device: Device) -> None:
    before = torch.backends.cudnn.conv.fp32_precision
    names = []
    try:
        for setting in ("tf32", "ieee", "tf32", "none", "tf32"):
            torch.backends.cudnn.conv.fp32_precision = setting
            device.launches.clear()
            conv()
            names.append([name for name, *_ in device.launches])
    finally:
        torch.backends.cudnn.conv.fp32_precision = before
    assert names[0] == names[2] == names[4]
    assert names[1] == names[3] != names[0]
    assert len(fast_path._entries) == 2


def test_a_setting_that_changes_during_a_call_is_remembered_wrong(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast_path, "torchs", lambda: "ieee")  # and the checks, a moment later, read tf32
    conv()
    assert not fast_path._entries


def test_the_stream_of_the_first_call_is_kept(device: Device) -> None:
    for stream in (3, 3, 5, 0):
        device.launches.clear()
        device.stream = stream
        conv()
        assert {launched[4] for launched in device.launches} == {stream}


def test_a_captured_call_asks_the_driver_for_more_than_launches(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    conv()

    def refused(*_: Any) -> None:
        raise AssertionError("a warm call asked for something that a capture may refuse")

    for name in ("is_capturing", "load", "device_info"):
        monkeypatch.setattr(launch, name, refused)
    conv()


def test_entries_grow_without_bound(device: Device, whole_way: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_path, "_LIMIT", 8)
    for extent in range(3, 20):
        conv(X.new_ones(1, 16, extent, 5))
    assert len(fast_path._entries) == 8
    whole_way.clear()
    conv(X.new_ones(1, 16, 19, 5))
    assert not whole_way
    conv(X.new_ones(1, 16, 3, 5))
    assert len(whole_way) == 1
    assert len(fast_path._entries) == 8


def test_a_call_outlives_its_plan(device: Device, whole_way: list[str]) -> None:
    for _ in range(2):
        conv()
        conv()
        runtime.forget()
        fast_path.forget()
    assert len(whole_way) == 2


def test_an_entry_keeps_a_tensor_alive(device: Device) -> None:
    tensors = [X.clone(), W.clone(), B.clone(), RESIDUAL.clone(), torch.tensor(2.0)]
    x, w, b, r, s = tensors
    for _ in range(3):
        conv(x, weight=w, bias=b, epilogue=[E.add(r), E.mul(s)])
    references = [weakref.ref(tensor) for tensor in tensors]
    del tensors, x, w, b, r, s
    gc.collect()
    assert [reference() for reference in references] == [None] * 5
    assert len(fast_path._entries) == 1


def test_memory_that_a_later_kernel_reads_is_given_back(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = [E.layer_norm(9), E.avg_pool(2)]
    made: list[weakref.ref[Tensor]] = []

    def empty_strided(*args: Any, **named: Any) -> Tensor:
        made.append(weakref.ref(tensor := REAL_EMPTY_STRIDED(*args, **named)))
        return tensor

    monkeypatch.setattr(torch, "empty_strided", empty_strided)
    conv(epilogue=chain)
    made.clear()
    alive: list[list[bool]] = []
    device.at_launch = lambda: alive.append([reference() is not None for reference in made])
    y = conv(epilogue=chain)
    assert [len(launched) for launched in alive] == [1, 2, 3]
    assert all(map(all, alive))
    assert [reference() is not None for reference in made] == [False, False, True]
    assert made[-1]() is y


def test_threads_mix_up_their_arguments(device: Device) -> None:
    residuals = [RESIDUAL.clone() for _ in range(6)]
    conv(epilogue=[E.add(RESIDUAL), E.mul(1.0)])
    jitconv.reset_stats()

    def work(number: int) -> None:
        for _ in range(200):
            conv(epilogue=[E.add(residuals[number]), E.mul(number + 0.5)])

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(i,), name=f"thread {i}") for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    for number, residual in enumerate(residuals):
        mine = [launched for launched in device.launches if launched[5] == f"thread {number}"]
        arguments = [launched[3] for launched in mine if not launched[0].startswith("pack")]
        assert len(arguments) == 200
        for own in (struct.pack("<Q", residual.data_ptr()), struct.pack("<f", number + 0.5)):
            assert all(own in argument for argument in arguments)
    assert (jitconv.stats().generated_calls, jitconv.stats().launches) == (1200, 2400)


# ---- Counters and cost ----------------------------------------------------------------------------------------


def test_a_warm_call_is_counted_otherwise_than_a_cold_one(device: Device) -> None:
    counted = []
    for _ in range(3):
        jitconv.reset_stats()
        conv(epilogue=[E.layer_norm(9), E.silu()])
        counted.append(jitconv.stats().as_dict())
    assert counted[1] == counted[2]
    assert (counted[0]["generated_calls"], counted[0]["launches"]) == (1, 3)
    assert (counted[1]["generated_calls"], counted[1]["launches"]) == (1, 3)
    assert counted[1]["memory_hits"] == counted[1]["torch_calls"] == 0


def test_a_launch_that_fails_is_counted_or_forgets_the_call(device: Device, whole_way: list[str]) -> None:
    conv()
    jitconv.reset_stats()
    whole_way.clear()

    def fail_second() -> None:
        if len(device.launches) % 2:
            raise DriverError("no")

    device.at_launch = fail_second
    with pytest.raises(DriverError, match="no"):
        conv()
    assert (jitconv.stats().generated_calls, jitconv.stats().launches) == (1, 1)
    device.at_launch = lambda: None
    conv()
    assert not whole_way


def test_a_tensor_map_is_encoded_at_every_call(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    addresses: list[int] = []

    def encode(spec: Any, address: int, device: int | None) -> bytes:
        addresses.append(address)
        return encoded(spec, address, device)

    monkeypatch.setattr(tensor_map, "encode", encode)
    x, w = (t.half().contiguous(memory_format=torch.channels_last) for t in (X, W))
    other = x.clone(memory_format=torch.preserve_format)
    conv(x, weight=w, bias=None)
    if not addresses:
        pytest.skip("no kernel of this call copies by tensor maps")
    addresses.clear()
    for _ in range(5):
        conv(x, weight=w, bias=None)
        conv(other, weight=w, bias=None)
    assert {x.data_ptr(), other.data_ptr()} <= set(addresses)
    assert addresses.count(x.data_ptr()) == addresses.count(other.data_ptr()) == 1


def functions_called(function: Callable[[], object]) -> tuple[int, int]:
    """Functions called in Python and in C while ``function`` runs, but for those of the stand-ins."""
    counts = {"call": 0, "c_call": 0}

    def count(frame: Any, event: str, argument: Any) -> None:
        if event in counts and frame.f_code.co_filename not in (__file__, threading.__file__):
            counts[event] += 1

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return counts["call"], counts["c_call"]


@pytest.mark.parametrize(
    ("chain", "native"),
    [([E.silu()], 32), ([E.silu(), E.add(RESIDUAL)], 40)],
    ids=["activation", "activation and residual"],
)
def test_a_warm_call_calls_many_functions(device: Device, chain: list[E.Step], native: int) -> None:
    """A call of a function costs 0.05 to 0.2 us: their number is a measure of time that a busy machine does not move.

    The whole way calls hundreds. Raise a limit with a measurement of the time.
    """
    with torch.no_grad():
        conv(epilogue=chain)
        found = functions_called(lambda: conv(epilogue=chain))
    assert len(device.launches) == 4
    assert 0 < found[0] <= 12
    assert 0 < found[1] <= native
