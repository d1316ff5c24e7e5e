"""Prepared operators: what they compute, and that only frozen weights are packed once.

Without a GPU: a stand-in runs launches on CPU memory, in order. A kernel that packs copies the bytes of the weights to
where it packs them; a convolution's writes the first of its weights, as it finds them, to the first element of its
output. So the output says which values were packed, and when.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import pickle
import random
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import jitconv
from jitconv import calls, fast_path, frozen, functional, launch, program, runtime, tensor_map
from jitconv import epilogue as E
from jitconv.errors import KernelNotWarmedError
from jitconv.families import KernelPlan, family
from jitconv.planning import plan_with_tile
from jitconv.planning.selection import every_tile
from jitconv.program import Call
from tests.strategies import random_case
from tests.test_fast_path import functions_called

REAL_EMPTY, REAL_EMPTY_STRIDED = torch.empty, torch.empty_strided


class Device:
    """Stands for a GPU, see above. While it captures, launches are kept for ``replay()`` and not run."""

    def __init__(self) -> None:
        self.arch = "sm_90a"
        self.stream = 0
        self.kernels: dict[str, KernelPlan] = {}
        #: Names of the families that were launched.
        self.launches: list[str] = []
        self.waits: list[int] = []
        self.synchronized = 0
        self.capturing = False
        self.graph: list[tuple[KernelPlan, bytes]] = []
        #: Memory of a graph stays as it is: so does all memory here.
        self.memory: list[Tensor] = []
        self.at_launch: Callable[[], object] = lambda: None

    def compiled(self, kernel: KernelPlan, arch: str) -> SimpleNamespace:
        name = f"{kernel.family} {len(self.kernels)}"
        self.kernels[name] = kernel
        return SimpleNamespace(cubin=b"", metadata={"name": name})

    def load(self, cubin: bytes, name: str, **_: Any) -> SimpleNamespace:
        kernel = self.kernels[name]

        def start(grid: int, block: int, arguments: bytes, stream: int) -> None:
            self.at_launch()
            if self.capturing:
                self.graph.append((kernel, bytes(arguments)))
            else:
                self.run(kernel, arguments)

        return SimpleNamespace(launch=start)

    def replay(self) -> None:
        for kernel, arguments in self.graph:
            self.run(kernel, arguments)

    def run(self, kernel: KernelPlan, arguments: bytes) -> None:
        self.launches.append(kernel.family)
        offsets = family(kernel).layout(kernel).offsets

        def address(name: str) -> int:
            return int(struct.unpack_from("<Q", arguments, offsets[name])[0])

        p = kernel.problem
        if kernel.family.startswith("pack"):
            count = p.out_channels * (p.in_channels // p.groups) * p.taps
            ctypes.memmove(address("y"), address("weight"), count * getattr(torch, p.dtype).itemsize)
        else:
            source = "packed" if "packed" in offsets else "weight"
            ctypes.memmove(address("y"), address(source), getattr(torch, p.dtype).itemsize)

    def empty(self, *args: Any, **named: Any) -> Tensor:
        return self.kept(REAL_EMPTY(*args, **named))

    def empty_strided(self, *args: Any, **named: Any) -> Tensor:
        return self.kept(REAL_EMPTY_STRIDED(*args, **named))

    def kept(self, tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            self.memory.append(tensor)
        return tensor

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        self.capturing = True
        self.graph = []
        try:
            yield
        finally:
            self.capturing = False

    def synchronize(self, device: torch.device) -> None:
        self.synchronized += 1

    def wait(self, stream: int, device: int) -> None:
        self.waits.append(stream)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(launch, "device_info", lambda _: SimpleNamespace(name="", arch=device.arch, sm_count=132))
    monkeypatch.setattr(launch, "current_stream", lambda ordinal: device.stream)
    monkeypatch.setattr(launch, "is_capturing", lambda stream: device.capturing)
    monkeypatch.setattr(launch, "load", device.load)
    monkeypatch.setattr(launch, "wait", device.wait)
    monkeypatch.setattr(torch.cuda, "synchronize", device.synchronize)
    monkeypatch.setattr(frozen, "_has_streams", lambda _: True)
    monkeypatch.setattr(tensor_map, "encode", lambda spec, address, device: struct.pack("<Q", address).ljust(128))
    monkeypatch.setattr(runtime, "_prepared", type(runtime._prepared)())
    monkeypatch.setattr(runtime, "_loaded", {})
    monkeypatch.setattr(runtime, "compiled_kernel", device.compiled)
    monkeypatch.setattr(functional, "torch_path_reason", functional.kernel_obstacle)
    monkeypatch.setattr(fast_path, "_on_gpu", lambda x: True)
    monkeypatch.setattr(fast_path, "_entries", {})
    monkeypatch.setattr(torch, "empty", device.empty)
    monkeypatch.setattr(torch, "empty_strided", device.empty_strided)
    jitconv.reset_stats()
    return device


X = torch.randn(2, 16, 8, 9)
#: Of another class of sizes, with another tile: and so perhaps of another layout of the weights.
LARGE = torch.randn(1, 16, 40, 44)
B = torch.randn(24)


def weight(first: float = 3.0, **named: Any) -> Tensor:
    w = torch.full((24, 16, 3, 3), 0.5, **named)
    w.view(-1)[0] = first
    return w


def prepared(w: Tensor, freeze: bool = True, **options: Any) -> jitconv.PreparedOperator:
    given: dict[str, Any] = {"padding": 1, "epilogue": [E.silu()], **options}
    return jitconv.prepare(jitconv.conv2d, w, B, freeze_weights=freeze, **given)


def plain(w: Tensor, x: Tensor = X) -> Tensor:
    return jitconv.conv2d(x, w, B, padding=1, epilogue=[E.silu()])


def seen(y: Tensor) -> float:
    """The first weight that the kernel read that wrote ``y``."""
    return float(y.detach().flatten()[0])


# ---- Weights that change ------------------------------------------------------------------------------------------


def _adamw(w: Tensor, **options: Any) -> None:
    w.grad = torch.ones_like(w)
    with torch.inference_mode(False):
        torch.optim.AdamW([w], lr=0.25, weight_decay=0.0, **options).step()


def _set(w: Tensor) -> None:
    with torch.no_grad():
        w.set_(weight(4.0).view(w.shape))


def _swap_data(w: Tensor) -> None:
    w.data = weight(5.0)


def _in_place(w: Tensor) -> None:
    with torch.no_grad():
        w.mul_(2.0)


def _numpy(w: Tensor) -> None:
    w.detach().numpy()[0, 0, 0, 0] = 7.0


#: Ways in which weights change; most of them leave no trace in the tensor's version.
UPDATES: dict[str, Callable[[Tensor], object]] = {
    "fused AdamW": lambda w: _adamw(w, fused=True),
    "foreach AdamW": lambda w: _adamw(w, foreach=True),
    "foreach multiplication": lambda w: torch._foreach_mul_([w.detach()], 2.0),
    "written through .data": lambda w: w.data.mul_(2.0),
    "another .data": _swap_data,
    "set_": _set,
    "in place": _in_place,
    "numpy": _numpy,
    "storage": lambda w: w.untyped_storage().copy_(weight(6.0).untyped_storage()),
    "load_state_dict": lambda w: _loaded(w),
}


def _loaded(w: Tensor) -> None:
    module = torch.nn.Module()
    module.register_parameter("w", w if isinstance(w, torch.nn.Parameter) else torch.nn.Parameter(w))
    module.load_state_dict({"w": weight(8.0)})


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES.keys())
@pytest.mark.parametrize("arch", ["sm_75", "sm_90a"])
def test_a_function_multiplies_by_weights_that_are_no_more(
    device: Device, arch: str, update: Callable[[Tensor], object]
) -> None:
    device.arch = arch
    w = torch.nn.Parameter(weight())
    op, cold = prepared(w, freeze=False), prepared(w, freeze=False)
    with torch.no_grad():
        assert [seen(plain(w)), seen(plain(w)), seen(op(X)), seen(op(X))] == [3.0] * 4
        update(w)
        now = float(w.flatten()[0])
        assert now != 3.0
        assert [seen(plain(w)), seen(plain(w)), seen(op(X)), seen(cold(LARGE))] == [now] * 4


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES.keys())
@pytest.mark.parametrize("arch", ["sm_75", "sm_90a"])
def test_frozen_weights_follow_a_change_or_miss_a_refresh(
    device: Device, arch: str, update: Callable[[Tensor], object]
) -> None:
    """Also where nothing is packed (sm_75), and for a size that comes for the first time after the change."""
    device.arch = arch
    w = torch.nn.Parameter(weight())
    op = prepared(w)
    with torch.no_grad():
        assert [seen(op(X)), seen(op(X))] == [3.0] * 2
        update(w)
        now = float(w.flatten()[0])
        assert now != 3.0
        assert [seen(op(X)), seen(op(LARGE)), seen(op(LARGE))] == [3.0] * 3
        op.refresh()
        assert [seen(op(X)), seen(op(LARGE)), seen(op(LARGE[:, :, 1:]))] == [now] * 3


@pytest.mark.parametrize("arch", ["sm_75", "sm_90a"])
def test_a_change_under_inference_mode_is_missed(device: Device, arch: str) -> None:
    """Inference tensors have no version at all."""
    device.arch = arch
    with torch.inference_mode():
        w = weight()
        op = prepared(w)
        assert [seen(plain(w)), seen(plain(w)), seen(op(X)), seen(op(X))] == [3.0] * 4
        w.mul_(2.0)
        assert [seen(plain(w)), seen(plain(w)), seen(op(X)), seen(op(LARGE))] == [6.0, 6.0, 3.0, 3.0]
        op.refresh()
        assert [seen(op(X)), seen(op(LARGE))] == [6.0, 6.0]
    # Outside, copies made inside must still be of use.
    assert seen(op(X)) == 6.0
    assert op(X.clone().requires_grad_()).requires_grad


def test_a_graph_replays_old_weights(device: Device) -> None:
    w = weight()
    plain(w)
    with device.capture():
        y = plain(w)
    device.replay()
    assert seen(y) == 3.0
    w.mul_(2.0)
    device.replay()
    assert seen(y) == 6.0


def test_a_graph_packs_frozen_weights_or_misses_a_refresh(device: Device) -> None:
    w = weight()
    op = prepared(w)
    op(X)
    with device.capture():
        y = op(X)
    assert [kernel.family for kernel, _ in device.graph] == ["conv_wgmma"]
    device.replay()
    assert seen(y) == 3.0
    w.mul_(2.0)
    device.replay()
    assert seen(y) == 3.0
    op.refresh()
    device.replay()
    assert seen(y) == 6.0


def test_weights_are_packed_within_a_capture(device: Device) -> None:
    op, other = prepared(weight()), prepared(weight(4.0))
    op(X)
    op(LARGE)
    with device.capture(), pytest.raises(KernelNotWarmedError, match=r"conv2d.*call the operator once"):
        other(X)
    assert not device.graph
    assert seen(other(X)) == 4.0
    with device.capture():
        other(X)
    assert len(device.graph) == 1


def test_weights_are_frozen_or_read_again_within_a_capture(device: Device) -> None:
    w = weight()
    op, free = prepared(w), prepared(w, freeze=False)
    with device.capture():
        with pytest.raises(RuntimeError, match="captured: expected a call before or after"):
            prepared(weight())
        with pytest.raises(RuntimeError, match="captured: expected a call before or after"):
            op.refresh()
        prepared(weight(), freeze=False)
        free.refresh()
    assert not device.graph


# ---- Once, for each layout ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("arch", "packing", "computing"), [
    ("sm_80", "pack_weights", "conv_mma"), ("sm_90a", "pack_planes", "conv_wgmma"),
])  # fmt: skip
def test_frozen_weights_are_packed_at_each_call(device: Device, arch: str, packing: str, computing: str) -> None:
    device.arch = arch
    w = weight()
    free, op = prepared(w, freeze=False), prepared(w)
    for _ in range(3):
        free(X)
    assert device.launches == [packing, computing] * 3
    device.launches.clear()
    jitconv.reset_stats()
    for x in (X, X, X.clone(), X[:1]):
        op(x)
    assert device.launches == [packing] + [computing] * 4
    assert (jitconv.stats().generated_calls, jitconv.stats().launches) == (4, 5)
    jitconv.reset_stats()
    op.refresh()
    assert (jitconv.stats().generated_calls, jitconv.stats().launches) == (0, 1)


def test_packings_grow_with_sizes(device: Device) -> None:
    op = prepared(weight())
    last = torch.channels_last
    for extent in (*range(4, 40), 64, 100):
        for w in (extent, extent + 1):
            op(torch.zeros(1, 16, extent, w))
            op(torch.zeros(2, 16, w, extent).contiguous(memory_format=last))
    kernels = {name for name in device.kernels if name.startswith("pack")}
    packed = device.launches.count("pack_planes")
    # One for each packing kernel that was compiled: for either memory format, and for tiles of small and large images.
    assert packed == len(kernels) <= 4
    assert f"packed {packed} times" in repr(op)
    copies = 24 * 16 * 9 * 4 + 24 * 4
    assert copies < op.frozen_bytes < 20 * copies
    assert prepared(weight(), freeze=False).frozen_bytes == 0


def test_a_precision_uses_the_weights_of_another(device: Device) -> None:
    op = prepared(weight())
    before = torch.backends.cudnn.conv.fp32_precision
    try:
        for setting in ("tf32", "ieee", "tf32"):
            torch.backends.cudnn.conv.fp32_precision = setting
            assert seen(op(X)) == 3.0
    finally:
        torch.backends.cudnn.conv.fp32_precision = before
    assert device.launches.count("pack_planes") == 2


def test_operators_of_the_same_shape_share_their_weights(device: Device) -> None:
    w, other = weight(3.0), weight(4.0)
    ops = [prepared(w), prepared(other), prepared(w, padding=0)]
    for _ in range(3):
        assert [seen(op(X)) for op in ops] == [3.0, 4.0, 3.0]
        assert [seen(plain(w)), seen(plain(other))] == [3.0, 4.0]
    w.fill_(5.0)
    ops[2].refresh()
    for _ in range(2):
        assert [seen(op(X)) for op in ops] == [3.0, 4.0, 5.0]
        assert [seen(plain(w)), seen(plain(other))] == [5.0, 4.0]


def test_an_operator_that_is_gone_serves_another(device: Device) -> None:
    """Its launches are remembered, with an address that may hold anything by now."""
    for first in (3.0, 4.0, 5.0):
        op = prepared(weight(first))
        assert [seen(op(X)), seen(op(X))] == [first] * 2
        del op
        plain(weight(first + 10.0))


def test_what_is_remembered_keeps_weights_alive(device: Device) -> None:
    op = prepared(weight())
    op(X)
    op(X)
    assert op._frozen is not None
    copies = [weakref.ref(copy) for copy in op._frozen.copies.values()]
    del op
    gc.collect()
    assert [copy() for copy in copies] == [None] * 2


def test_an_empty_batch_packs_or_forgets_to(device: Device) -> None:
    op = prepared(weight())
    assert [tuple(op(X[:0]).shape) for _ in range(2)] == [(0, 24, 8, 9)] * 2
    assert not device.launches
    assert seen(op(X)) == 3.0
    assert device.launches == ["pack_planes", "conv_wgmma"]


def test_a_wait_is_missing_or_repeated(device: Device) -> None:
    """Other streams may read what one stream has packed, so that one is waited for: once."""
    device.stream = 5
    w = weight()
    op = prepared(w)
    assert device.waits == [5]  # the copies
    device.stream = 7
    op(X)
    assert device.waits == [5, 7]
    for stream in (7, 9, 0):
        device.stream = stream
        op(X)
        op(X.clone())
    assert device.waits == [5, 7]
    device.stream = 3
    op.refresh()
    assert (device.waits, device.synchronized) == ([5, 7, 3], 1)


def test_threads_that_come_at_once_pack_each(device: Device) -> None:
    op = prepared(weight())
    found: list[float] = []
    together = threading.Barrier(8)
    device.at_launch = lambda: time.sleep(0.01)  # long enough for all to find nothing packed

    def work(x: Tensor) -> None:
        together.wait()
        found.extend(seen(op(x)) for _ in range(3))

    threads = [threading.Thread(target=work, args=(x,)) for x in (X, X.clone(), LARGE, LARGE.clone()) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [3.0] * 24
    packed = device.launches.count("pack_planes")
    assert f"packed {packed} times" in repr(op)
    assert packed <= 2
    assert len(device.launches) == 24 + packed


def test_a_warm_call_of_frozen_weights_does_more_than_one_that_packs(device: Device) -> None:
    w = weight()
    free, op = prepared(w, freeze=False), prepared(w)
    with torch.no_grad():
        for each in (free, op):
            each(X)
            each(X)
        packs, packed = functions_called(lambda: free(X)), functions_called(lambda: op(X))
    assert packed[1] < packs[1]
    assert packed[0] <= packs[0]


def random_calls() -> Iterator[Call]:
    for seed in range(10):
        yield random_case(random.Random(seed)).call()
    # Filters that share no x between outputs have tiles of their own, and short ones small tiles.
    patches, point = torch.randn(2, 40, 24, 24), torch.randn(48, 40, 1, 1)
    yield calls.call_of(jitconv.conv2d, patches, torch.randn(96, 40, 4, 4), stride=4)
    yield calls.call_of(jitconv.conv2d, patches[..., :7], point)
    yield calls.call_of(jitconv.conv2d, patches.contiguous(memory_format=torch.channels_last), point, precision="ieee")


#: Constants that say what a kernel is for, not what it does.
_NAMES = frozenset({"problem", "label", "preambles"})


@pytest.mark.parametrize("call", [*random_calls()], ids=lambda call: call.function)
def test_packing_kernels_that_are_shared_differ(call: Call) -> None:
    """A change of what packing kernels read of a tile or a problem must show here, not in wrong weights."""
    for arch in ("sm_80", "sm_90a"):
        problem = program._problem(call, program.bind_chains(call), arch)
        for tile in every_tile(problem, arch):
            for kernel in plan_with_tile(problem, tile).kernels:
                if kernel.family not in program._PACKING:
                    continue
                shared, module = program._packing(kernel), family(kernel)
                before, after = (
                    {name: value for name, value in module.constants(each).items() if name not in _NAMES}
                    for each in (kernel, shared)
                )
                assert before == after
                for size in (module.words, module.threads, module.shared_bytes):
                    assert size(shared) == size(kernel)
                assert module.layout(shared).offsets == module.layout(kernel).offsets


# ---- Gradients ----------------------------------------------------------------------------------------------------


def test_a_gradient_of_frozen_weights_is_dropped_in_silence(device: Device) -> None:
    w, b = torch.nn.Parameter(weight()), torch.nn.Parameter(B)
    op = jitconv.prepare(jitconv.conv2d, w, b, padding=1, freeze_weights=True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"weight requires a gradient.*no_grad.*weight.requires_grad_\(False\)"):
            op(X)
        with torch.no_grad():
            assert seen(op(X)) == 3.0
        with torch.inference_mode():
            assert op(X).is_inference()
    w.requires_grad_(False)
    with pytest.raises(RuntimeError, match="bias requires a gradient"):
        op(X)
    b.requires_grad_(False)
    assert not op(X).requires_grad
    w.requires_grad_(True)
    with pytest.raises(RuntimeError, match="weight requires a gradient"):
        op(X)


def test_a_gradient_of_weights_that_are_gone_is_dropped_in_silence() -> None:
    """What they were computed from may be there."""
    v = weight().requires_grad_()
    op = prepared(v * 2.0)
    with pytest.raises(RuntimeError, match="weight requires a gradient"):
        op(X)
    assert not prepared((v * 2.0).detach())(X).requires_grad


def test_a_tangent_of_frozen_weights_is_dropped_in_silence() -> None:
    w = weight()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(w, torch.ones_like(w))
        op = prepared(dual)
        with pytest.raises(RuntimeError, match="weight has a tangent"):
            op(X)
        op = prepared(w)
        assert forward_ad.unpack_dual(op(forward_ad.make_dual(X, torch.ones_like(X)))).tangent is not None


@pytest.mark.parametrize("freeze", [False, True])
def test_gradients_of_inputs_and_steps_do_not_flow(freeze: bool) -> None:
    w, scale = torch.randn(24, 16, 3, 3), torch.randn(24, requires_grad=True)
    x = X.clone().requires_grad_()
    op = jitconv.prepare(jitconv.conv2d, w, B, epilogue=[E.mul(scale)], freeze_weights=freeze)
    grads = torch.autograd.grad(op(x).square().sum(), (x, scale))
    y = torch.nn.functional.conv2d(x, w, B) * scale.view(-1, 1, 1)
    expected = torch.autograd.grad(y.square().sum(), (x, scale))
    for found, right in zip(grads, expected, strict=True):
        torch.testing.assert_close(found, right)


def test_a_recorded_call_packs_frozen_weights_again(device: Device) -> None:
    op = prepared(weight())
    op(X)
    device.launches.clear()
    x = X.clone().requires_grad_()
    y = op(x)
    assert device.launches == ["conv_wgmma"]
    y.sum().backward()
    assert x.grad is not None


def test_a_refresh_between_forward_and_backward_goes_unnoticed(device: Device) -> None:
    op_weight = weight()
    op = prepared(op_weight)
    y = op(X.clone().requires_grad_())
    op.refresh()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# ---- The same results as the functions ----------------------------------------------------------------------------


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_an_operator_computes_something_else_than_its_function(seed: int, freeze: bool) -> None:
    case = random_case(random.Random(seed), largest=400)
    (x, *tensors), options = case.arguments()
    op = jitconv.prepare(getattr(jitconv, case.function), *tensors, freeze_weights=freeze, **options)
    jitconv.reset_stats()
    y, expected = op(x), case.public()
    assert dict(jitconv.stats().torch_reasons) == {"cpu tensor": 2}
    assert torch.equal(y, expected)
    assert (y.stride(), y.dtype) == (expected.stride(), expected.dtype)
    assert op.function == case.function


def test_weights_lie_otherwise_when_frozen() -> None:
    """The memory format of the weights decides that of the output."""
    layouts: dict[str, Tensor] = {
        "contiguous": weight(),
        "channels_last": weight().contiguous(memory_format=torch.channels_last),
        "strided": torch.randn(24, 16, 3, 6)[..., ::2],
        "transposed": torch.randn(24, 16, 3, 3).transpose(2, 3),
        "expanded": torch.randn(24, 16, 1, 1).expand(24, 16, 3, 3),
        "negated": torch._neg_view(weight()),
    }
    for name, w in layouts.items():
        y, expected = prepared(w)(X), plain(w)
        assert torch.equal(y, expected), name
        assert y.stride() == expected.stride(), name
    z = torch.randn(24, 16, 3, 3, dtype=torch.complex64).conj()
    x = X.to(torch.complex64)
    assert torch.allclose(jitconv.prepare(jitconv.conv2d, z, freeze_weights=True)(x), jitconv.conv2d(x, z))


@pytest.mark.parametrize("freeze", [False, True])
def test_batch_size_layout_or_rank_of_the_input_is_bound(device: Device, freeze: bool) -> None:
    op = prepared(weight(), freeze)
    inputs = [X, X[0], X[:1], LARGE, LARGE[0], LARGE.contiguous(memory_format=torch.channels_last), LARGE[..., ::2]]
    for _ in range(2):
        for x in inputs:
            y = op(x)
            assert seen(y) == 3.0
            assert y.shape == (*x.shape[:-3], 24, *x.shape[-2:])
            assert y.stride() == plain(weight(), x).stride()


def test_lists_are_bound_by_identity() -> None:
    stride, steps = [1, 1], [E.silu()]
    op = jitconv.prepare(jitconv.conv2d, weight(), stride=stride, epilogue=steps)
    once = jitconv.prepare(jitconv.conv2d, weight(), epilogue=iter(steps), freeze_weights=True)
    stride[:] = [2, 2]
    steps.clear()
    assert op(X).shape == (2, 24, 6, 7)
    assert torch.equal(op(X), jitconv.conv2d(X, weight(), epilogue=[E.silu()]))
    assert torch.equal(once(X), op(X))
    assert torch.equal(once(X), op(X))


@pytest.mark.parametrize("freeze", [False, True])
def test_a_step_is_frozen_too(device: Device, freeze: bool) -> None:
    """What a tensor in a chain holds is read when the kernel runs: its own address is passed, warm and cold."""
    scale = torch.ones(24)
    op = prepared(weight(), freeze, epilogue=[E.mul(scale)])
    op(X)
    for _ in range(2):
        with device.capture():
            op(X)
        assert struct.pack("<Q", scale.data_ptr()) in device.graph[-1][1]


# ---- Mistakes -----------------------------------------------------------------------------------------------------

W = torch.randn(24, 16, 3, 3)

MISTAKES: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "no function of jitconv": (
        lambda: jitconv.prepare(torch.nn.functional.conv2d, W), TypeError, "expected a public operator of jitconv",
    ),
    "a name": (lambda: jitconv.prepare("conv2d", W), TypeError, "expected a public operator of jitconv"),
    "no weight": (lambda: jitconv.prepare(jitconv.conv2d), TypeError, "missing a required argument: 'weight'"),
    "an input": (
        lambda: jitconv.prepare(jitconv.conv2d, W, input=X), TypeError, "expected the arguments of jitconv.conv2d with",
    ),
    "an unknown option": (lambda: jitconv.prepare(jitconv.conv2d, W, pad=1), TypeError, "unexpected keyword .*'pad'"),
    "no tensor": (lambda: jitconv.prepare(jitconv.conv2d, 3), TypeError, r"weight=3 .*expected a torch.Tensor"),
    "an input before the weight": (
        lambda: jitconv.prepare(jitconv.conv2d, X, W), RuntimeError, r"bias has shape \(24, 16, 3, 3\): expected",
    ),
    "another rank": (lambda: jitconv.prepare(jitconv.conv3d, W), RuntimeError, "weight has shape .*: expected 5 dim"),
    "dtypes": (lambda: jitconv.prepare(jitconv.conv2d, W, B.half()), RuntimeError, "bias has dtype torch.float16"),
    "integers": (lambda: jitconv.prepare(jitconv.conv_transpose2d, W.int()), NotImplementedError, "torch.int32"),
    "groups": (lambda: jitconv.prepare(jitconv.conv2d, W, groups=5), RuntimeError, "groups=5"),
    "stride": (lambda: jitconv.prepare(jitconv.conv2d, W, stride=0), RuntimeError, r"stride=\(0, 0\)"),
    "padding": (lambda: jitconv.prepare(jitconv.conv2d, W, padding="some"), RuntimeError, "padding='some'"),
    "precision": (lambda: jitconv.prepare(jitconv.conv2d, W, precision="x"), ValueError, "precision='x'"),
    "a step that is not called": (
        lambda: jitconv.prepare(jitconv.conv2d, W, epilogue=[E.silu]), TypeError, r"epilogue\[0\].*call it",
    ),
    "a pointwise weight": (
        lambda: jitconv.prepare(jitconv.depthwise_separable_conv2d, W[:, :1], W), RuntimeError, "pw_weight has shape",
    ),
    "freeze_weights": (
        lambda: jitconv.prepare(jitconv.conv2d, W, freeze_weights=B), TypeError, "freeze_weights=tensor",
    ),
    "a dtype": (lambda: prepared(W)(X.half()), RuntimeError, "torch.float16.*frozen weights have torch.float32"),
    "a device": (lambda: prepared(W)(X.to("meta")), RuntimeError, "on meta.*convert the input, or prepare another"),
    "a dtype of weights that are free": (lambda: prepared(W, False)(X.half()), RuntimeError, "expected the same dtype"),
    "no tensor for x": (lambda: prepared(W)(None), TypeError, "input=None"),
    "channels": (lambda: prepared(W)(X[:, :5]), RuntimeError, "with 5 channels"),
    "a chain that does not fit": (lambda: prepared(W, epilogue=[E.add(B[:5])])(X), RuntimeError, "epilogue"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_not_named(mistake: tuple[Callable[[], object], type[Exception], str]) -> None:
    make, kind, text = mistake
    with pytest.raises(kind, match=text):
        make()


def test_large_parameters_are_refused_by_what_checks_them() -> None:
    op = jitconv.prepare(jitconv.conv3d, torch.randn(2, 2, 1, 1, 1), stride=2**40, padding=2**33)
    assert "conv3d" in repr(op)
    reflected = jitconv.prepare(jitconv.conv2d, W, padding=4, padding_mode="reflect")
    assert reflected(X).shape == (2, 24, 14, 15)
    transposed = jitconv.prepare(jitconv.conv_transpose2d, W.mT, padding=7)
    assert transposed(torch.randn(1, 24, 20, 20)).shape == (1, 16, 8, 8)


def test_frozen_weights_keep_the_given_ones_or_need_them(device: Device) -> None:
    w = weight()
    op = prepared(w)
    alive = weakref.ref(w)
    del w
    gc.collect()
    assert alive() is None
    assert seen(op(X)) == 3.0
    with pytest.raises(RuntimeError, match="given as weight does not exist any more"):
        op.refresh()
    assert seen(op(X)) == 3.0


def test_a_refresh_takes_weights_that_do_not_fit(device: Device) -> None:
    w = torch.nn.Parameter(weight())
    op = prepared(w)
    with torch.no_grad():
        for data in (weight().half(), torch.randn(24, 16, 3, 5)):
            w.data = data
            with pytest.raises(RuntimeError, match=r"expected \(24, 16, 3, 3\), torch.float32 .*prepare another op"):
                op.refresh()
            assert seen(op(X)) == 3.0
        w.data = weight(9.0).contiguous(memory_format=torch.channels_last)
        op.refresh()
        assert seen(op(X)) == 9.0


def test_a_copy_of_an_operator_shares_or_loses_its_weights() -> None:
    free = copy.deepcopy(prepared(weight(), freeze=False))
    assert torch.equal(free(X), plain(weight()))
    for duplicate in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"conv2d.*cannot be copied or pickled: prepare another operator"):
            duplicate(prepared(weight()))


def test_a_packing_that_fails_is_kept(device: Device) -> None:
    op = prepared(weight())

    def fail() -> None:
        raise OSError("no")

    device.at_launch = fail
    with pytest.raises(OSError, match="no"):
        op(X)
    device.at_launch = lambda: None
    assert seen(op(X)) == 3.0


def test_torch_compile_traces_a_prepared_operator() -> None:
    op = prepared(weight())
    compiled = torch.compile(lambda x: op(x) * 2.0, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(X), op(X) * 2.0)


# ---- What it would run --------------------------------------------------------------------------------------------


def test_an_inspection_shows_other_kernels_than_the_call(device: Device) -> None:
    free, op = prepared(weight(), freeze=False), prepared(weight())
    found = [jitconv.inspect(each, X, arch="sm_90a") for each in (free, op)]
    named = jitconv.inspect(jitconv.conv2d, X, weight(), B, padding=1, epilogue=[E.silu()], arch="sm_90a")
    keys = [[kernel.key for kernel in each.kernels] for each in (*found, named)]
    assert keys[0] == keys[1] == keys[2]
    assert [each.frozen for each in found] == [False, True]
    assert found[0].workspace_bytes == named.workspace_bytes > found[1].workspace_bytes == 0
    # The kernel that packs is enough: the other one takes long to compile.
    reports = [each.selected(0).report() for each in found]
    said = [line for line in reports[1].splitlines() if "frozen" in line]
    assert len(said) == 1
    assert found[1].kernels[0].name in said[0]
    assert "frozen" not in reports[0]
