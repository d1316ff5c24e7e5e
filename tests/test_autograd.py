"""Gradients: through torch on the CPU, and through the generated path's own backward.

The generated path runs here without a GPU: its kernels are replaced by a stand-in that computes the value without
recording it, so that every gradient must come from the backward under test. Expected gradients come from the same
operation written in eager torch.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import jitconv
from jitconv import epilogue as E
from jitconv import functional, runtime
from jitconv.program import Call
from tests.strategies import run_emulated


class Kernels:
    """Stands for the generated kernels: the value alone, detached, and the calls that asked for it."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def run(self, call: Call) -> Tensor:
        self.calls.append(call)
        with torch.no_grad():
            value = functional.run_reference(call)
        assert not value.requires_grad
        return value


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """The generated path for CPU tensors."""
    stand_in = Kernels()
    monkeypatch.setattr(functional, "torch_path_reason", lambda call: None)
    monkeypatch.setattr(runtime, "run", stand_in.run)
    return stand_in


@pytest.fixture(params=["torch's path", "generated path"])
def either_path(request: pytest.FixtureRequest) -> str:
    if request.param == "generated path":
        request.getfixturevalue("kernels")
    return str(request.param)


def leaves(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def per_channel(t: Tensor) -> Tensor:
    return t.view(-1, 1, 1)


X, W, B, VALUE = (2, 4, 6, 7), (6, 4, 3, 3), (6,), (2, 6, 4, 5)

#: Shapes of the tensors, the call, and the same in eager torch.
Form = tuple[list[tuple[int, ...]], Callable[..., Tensor], Callable[..., Tensor]]

FORMS: dict[str, Form] = {
    "bare": ([X, W], jitconv.conv2d, F.conv2d),
    "bias": ([X, W, B], jitconv.conv2d, F.conv2d),
    "numbers only": (
        [X, W, B],
        lambda x, w, b: jitconv.conv2d(x, w, b, 2, 1, epilogue=[E.mul(1.5), E.leaky_relu(0.1), E.clamp(-2, 2)]),
        lambda x, w, b: F.leaky_relu(F.conv2d(x, w, b, 2, 1) * 1.5, 0.1).clamp(-2, 2),
    ),
    "no bias, three kinds of operand": (
        [X, W, (), (6,), VALUE],
        lambda x, w, s, c, r: jitconv.conv2d(x, w, epilogue=[E.mul(s), E.add(c), E.mish(), E.sub(r)]),
        lambda x, w, s, c, r: F.mish(F.conv2d(x, w) * s + per_channel(c)) - r,
    ),
    "operand that broadcasts": (
        [X, W, B, (2, 6, 1, 1), (1, 5), (1, 1, 1)],
        lambda x, w, b, g, row, one: jitconv.conv2d(x, w, b, epilogue=[E.mul(g), E.div(row), E.add(one)]),
        lambda x, w, b, g, row, one: F.conv2d(x, w, b) * g / row + one,
    ),
    "two bounds": (
        [X, W, (6,), ()],
        lambda x, w, low, high: jitconv.conv2d(x, w, epilogue=[E.clamp(low, high), E.minimum(low)]),
        lambda x, w, low, high: torch.minimum(
            torch.minimum(torch.maximum(F.conv2d(x, w), per_channel(low)), high), per_channel(low)
        ),
    ),
    "value twice": (
        [X, W, B],
        lambda x, w, b: jitconv.conv2d(x, w, b, epilogue=[E.sigmoid(), E.mul(E.CONV), E.add(E.CONV)]),
        lambda x, w, b: F.silu(F.conv2d(x, w, b)) + F.conv2d(x, w, b),
    ),
    "norm and pools": (
        [X, W, B, (5,), (5,)],
        lambda x, w, b, g, s: jitconv.conv2d(x, w, b, epilogue=[E.layer_norm(5, g, s), E.avg_pool(2), E.gelu()]),
        lambda x, w, b, g, s: F.gelu(F.avg_pool2d(F.layer_norm(F.conv2d(x, w, b), (5,), g, s), 2)),
    ),
    "norm without weight": (
        [X, W, B, (5,)],
        lambda x, w, b, s: jitconv.conv2d(x, w, b, epilogue=[E.layer_norm(5, None, s), E.max_pool((1, 2))]),
        lambda x, w, b, s: F.max_pool2d(F.layer_norm(F.conv2d(x, w, b), (5,), None, s), (1, 2)),
    ),
    "reflected and grouped": (
        [X, (6, 2, 3, 3)],
        lambda x, w: jitconv.conv2d(x, w, None, 1, ((2, 0), 1), 1, 2, padding_mode="reflect"),
        lambda x, w: F.conv2d(F.pad(x, (1, 1, 2, 0), mode="reflect"), w, groups=2),
    ),
    "unbatched": (
        [X[1:], W, B, VALUE[1:]],
        lambda x, w, b, r: jitconv.conv2d(x, w, b, epilogue=[E.add(r), E.tanh()]),
        lambda x, w, b, r: torch.tanh(F.conv2d(x, w, b) + r),
    ),
    "conv1d": (
        [(2, 4, 9), (6, 4, 3), (6,)],
        lambda x, w, b: jitconv.conv1d(x, w, b, padding="same", dilation=2, epilogue=[E.softplus()]),
        lambda x, w, b: F.softplus(F.conv1d(x, w, b, padding="same", dilation=2)),
    ),
    "conv3d": (
        [(1, 2, 3, 4, 4), (3, 2, 2, 2, 2), (3,)],
        lambda x, w, b: jitconv.conv3d(x, w, b, epilogue=[E.mish(), E.tanh()]),
        lambda x, w, b: torch.tanh(F.mish(F.conv3d(x, w, b))),
    ),
    "conv_transpose3d": (
        [(1, 4, 2, 2, 2), (4, 2, 3, 3, 3), (4,), ()],
        lambda x, w, b, s: jitconv.conv_transpose3d(x, w, b, 2, 1, 1, 2, epilogue=[E.add(s), E.elu()]),
        lambda x, w, b, s: F.elu(F.conv_transpose3d(x, w, b, 2, 1, 1, 2) + s),
    ),
    "separable": (
        [X, (8, 1, 3, 3), (5, 8, 1, 1), (8,), (5,), (8,), ()],
        lambda x, d, p, db, pb, c, s: jitconv.depthwise_separable_conv2d(
            x, d, p, db, pb, padding=1, between=[E.mul(c), E.silu()], epilogue=[E.add(s)]
        ),
        lambda x, d, p, db, pb, c, s: (
            F.conv2d(F.silu(F.conv2d(x, d, db, padding=1, groups=4) * per_channel(c)), p, pb) + s
        ),
    ),
    "separable without one bias": (
        [X, (4, 1, 3, 3), (5, 4, 1, 1), (5,)],
        lambda x, d, p, pb: jitconv.depthwise_separable_conv2d(x, d, p, None, pb, stride=2),
        lambda x, d, p, pb: F.conv2d(F.conv2d(x, d, stride=2, groups=4), p, pb),
    ),
}


def gradients(function: Callable[..., Tensor], arguments: list[Tensor]) -> list[Tensor]:
    y = function(*arguments)
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    return list(torch.autograd.grad(y, arguments, upstream))


@pytest.mark.usefixtures("either_path")
@pytest.mark.parametrize("form", FORMS)
def test_a_gradient_differs_from_eager_torch(form: str) -> None:
    shapes, ours, theirs = FORMS[form]
    arguments = leaves(*shapes)
    for actual, expected in zip(gradients(ours, arguments), gradients(theirs, arguments), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("form", ["no bias, three kinds of operand", "norm and pools", "conv_transpose3d", "separable"])
def test_a_gradient_differs_from_finite_differences(form: str) -> None:
    shapes, ours, _ = FORMS[form]
    arguments = leaves(*shapes, dtype=torch.float64)
    assert torch.autograd.gradcheck(ours, arguments, fast_mode=True)


@pytest.mark.usefixtures("either_path")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_gradient_has_another_dtype_than_its_tensor(dtype: torch.dtype) -> None:
    x, w, b = leaves(X, W, B, dtype=dtype)
    (r,) = leaves(VALUE, seed=1)
    wide = [t.detach().float().requires_grad_() for t in (x, w, b, r)]

    def theirs(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
        return F.silu(F.conv2d(x, w, b) + r)

    def ours(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
        return jitconv.conv2d(x, w, b, epilogue=[E.add(r), E.silu()])

    found = gradients(ours, [x, w, b, r])
    assert [g.dtype for g in found] == [dtype, dtype, dtype, torch.float32]
    unit = torch.finfo(dtype).eps
    for actual, expected in zip(found, gradients(theirs, wide), strict=True):
        torch.testing.assert_close(actual.float(), expected, rtol=4 * unit, atol=8 * unit)


@pytest.mark.usefixtures("either_path")
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (4,), (0, 3), (1, 2, 4), (2, 3, 4)])
def test_a_gradient_lands_on_another_tensor_when_only_some_are_wanted(wanted: tuple[int, ...]) -> None:
    shapes, ours, theirs = FORMS["no bias, three kinds of operand"]
    found = []
    for function in (ours, theirs):
        arguments = leaves(*shapes)
        for i, tensor in enumerate(arguments):
            tensor.requires_grad_(i in wanted)
        function(*arguments).square().sum().backward()
        found.append([tensor.grad for tensor in arguments])
    for i, (actual, expected) in enumerate(zip(*found, strict=True)):
        assert (actual is not None) is (i in wanted)
        if expected is not None:
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("either_path")
def test_a_tensor_that_stands_in_two_places_gets_the_gradient_of_one() -> None:
    shared, x, w = leaves((), (1, 3, 5, 5), (3, 3, 1, 1))

    def ours(shared: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return jitconv.conv2d(x, w, epilogue=[E.mul(shared), E.tanh(), E.add(shared), E.sub(x)])

    def theirs(shared: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(F.conv2d(x, w) * shared) + shared - x

    for actual, expected in zip(gradients(ours, [shared, x, w]), gradients(theirs, [shared, x, w]), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("either_path")
@pytest.mark.parametrize("bounds", [(0.0, 1.0), (torch.tensor(0.0), 1.0), (0.0, torch.tensor(1.0))])
def test_a_value_on_a_bound_of_clamp_gets_half_a_gradient(bounds: tuple[Any, Any]) -> None:
    x = torch.tensor([-1.0, 0.0, 0.5, 1.0, 2.0]).view(1, 1, -1).requires_grad_()
    jitconv.conv1d(x, torch.ones(1, 1, 1), epilogue=[E.clamp(*bounds)]).sum().backward()
    same = x.detach().clone().requires_grad_()
    torch.clamp(same, 0.0, 1.0).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == same.grad.tolist() == [[[0, 1, 1, 1, 0]]]


@pytest.mark.usefixtures("either_path")
def test_a_strided_view_gets_the_gradient_of_another_element() -> None:
    x, w, b, r = leaves((2, 12, 14, 8), (3, 3, 4, 6), (12,), (4, 1))

    def views(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return x.permute(0, 3, 1, 2)[:, ::2, ::2, ::2], w.permute(3, 2, 1, 0), b[::2], r.expand(6, 4, 5)

    def ours(*tensors: Tensor) -> Tensor:
        x, w, b, r = views(*tensors)
        return jitconv.conv2d(x, w, b, epilogue=[E.mul(r)])

    def theirs(*tensors: Tensor) -> Tensor:
        x, w, b, r = views(*tensors)
        return F.conv2d(x, w, b) * r

    for actual, expected in zip(gradients(ours, [x, w, b, r]), gradients(theirs, [x, w, b, r]), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("either_path")
def test_a_step_of_the_callers_own_has_no_gradient() -> None:
    swish = E.register(
        "swish_of",
        cuda="v * act::sigmoid(beta * v)",
        operands=("beta",),
        torch=lambda v, beta: v * (beta * v).sigmoid(),
    )
    x, w, beta = leaves(X, W, ())
    found = gradients(lambda x, w, beta: jitconv.conv2d(x, w, epilogue=[swish(beta)]), [x, w, beta])
    expected = gradients(lambda x, w, beta: F.conv2d(x, w) * (beta * F.conv2d(x, w)).sigmoid(), [x, w, beta])
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("either_path")
def test_an_empty_batch_has_no_gradient() -> None:
    x, w, b = leaves((0, *X[1:]), W, B)
    jitconv.conv2d(x, w, b, epilogue=[E.relu()]).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert w.grad is not None
    assert not w.grad.any()


# ---------------------------------------------------------------------------------------------------------
# What the generated path keeps, and what it must notice.


@pytest.mark.usefixtures("either_path")
@pytest.mark.parametrize("changed", range(4))
def test_an_argument_changed_in_place_before_backward_gives_a_wrong_gradient(changed: int) -> None:
    arguments = [t * 1 for t in leaves(X, W, B, VALUE)]
    x, w, b, r = arguments
    y = jitconv.conv2d(x, w, b, epilogue=[E.mul(r), E.sigmoid(), E.mul(E.CONV)])
    with torch.no_grad():
        arguments[changed].mul_(2)
    if changed == 2 and y.grad_fn is not None and "Fused" not in y.grad_fn.name():
        y.sum().backward()  # eager torch saves no bias
        return
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.usefixtures("either_path")
@pytest.mark.parametrize("form", ["no bias, three kinds of operand", "value twice", "conv_transpose3d", "separable"])
def test_a_gradient_penalty_has_no_gradient(form: str) -> None:
    shapes, ours, theirs = FORMS[form]
    found = []
    for function in (ours, theirs):
        arguments = leaves(*shapes)
        y = function(*arguments)
        first = torch.autograd.grad(y.square().mean(), arguments, create_graph=True)
        penalty = sum((g.square().sum() for g in first), torch.zeros(()))
        found.append(torch.autograd.grad(y.mean() + penalty, arguments))
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("kernels")
def test_a_second_derivative_of_a_tensor_in_two_places_is_counted_twice() -> None:
    (x,) = leaves((1, 1, 3, 3), dtype=torch.float64)
    w = torch.randn(1, 1, 1, 1, dtype=torch.float64, requires_grad=True)

    def ours(x: Tensor, w: Tensor) -> Tensor:
        return jitconv.conv2d(x, w, epilogue=[E.mul(x), E.sigmoid(), E.mul(x)])

    assert torch.autograd.gradgradcheck(ours, [x, w])


@pytest.mark.usefixtures("kernels")
def test_a_second_backward_needs_no_retained_graph() -> None:
    x, w = leaves(X, W)
    y = jitconv.conv2d(x, w, epilogue=[E.tanh()]).sum()
    y.backward(retain_graph=True)
    y.backward()
    once = gradients(lambda x, w: jitconv.conv2d(x, w, epilogue=[E.tanh()]).sum()[None], [x, w])
    assert x.grad is not None
    upstream = torch.randn((1,), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(x.grad * upstream / 2, once[0])
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


def test_a_graph_is_recorded_where_nothing_requires_a_gradient(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functional._Fused, "apply", lambda *args: pytest.fail("recorded a graph"))
    x, w, b, r = leaves(X, W, B, VALUE)
    with torch.no_grad():
        assert jitconv.conv2d(x, w, b, epilogue=[E.add(r)]).grad_fn is None
    with torch.inference_mode():
        assert jitconv.conv2d(x, w, b, epilogue=[E.add(r)]).is_inference()
    detached = [t.detach() for t in (x, w, b, r)]
    assert jitconv.conv2d(*detached[:3], epilogue=[E.add(detached[3])]).grad_fn is None
    assert len(kernels.calls) == 3


def test_backward_runs_the_kernels_of_forward_again(kernels: Kernels) -> None:
    arguments = leaves(X, W, B)
    gradients(lambda *t: jitconv.conv2d(*t, epilogue=[E.gelu()]), arguments)
    assert len(kernels.calls) == 1


def test_a_graph_keeps_its_arguments_after_backward(kernels: Kernels) -> None:
    x, w, r = (t * 1 for t in leaves(X, W, VALUE))
    y = jitconv.conv2d(x, w, epilogue=[E.mul(r)])
    alive = [weakref.ref(t) for t in (x, w, r)]
    kernels.calls.clear()
    y.sum().backward()
    del x, w, r
    gc.collect()
    assert [ref() for ref in alive] == [None, None, None]
    assert y.grad_fn is not None


@pytest.mark.usefixtures("kernels")
def test_hooks_on_saved_tensors_are_passed_over() -> None:
    x, w, b, r = leaves(X, W, B, VALUE)
    packed: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tuple(tensor.shape))
        return tensor.detach() * 0

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = jitconv.conv2d(x, w, b, epilogue=[E.mul(r)])
    y.sum().backward()
    assert packed == [X, W, B, VALUE]
    # What the hook gave back, zeros, is what backward used.
    for tensor in (x, w, b, r):
        assert tensor.grad is not None
        assert not tensor.grad.any()


@pytest.mark.usefixtures("either_path")
def test_checkpointing_changes_the_gradient() -> None:
    from torch.utils.checkpoint import checkpoint

    shapes, ours, theirs = FORMS["no bias, three kinds of operand"]
    arguments = leaves(*shapes)
    found = gradients(lambda *t: checkpoint(ours, *t, use_reentrant=False), arguments)
    for actual, expected in zip(found, gradients(theirs, arguments), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("either_path")
def test_a_module_does_not_learn() -> None:
    torch.manual_seed(0)
    conv = torch.nn.Conv2d(2, 3, 3)
    scale = torch.nn.Parameter(torch.ones(()))
    parameters = [*conv.parameters(), scale]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    x, target = torch.randn(4, 2, 6, 6), torch.randn(4, 3, 2, 2) * 0.1
    losses = []
    for _ in range(20):
        y = jitconv.conv2d(x, conv.weight, conv.bias, epilogue=[E.silu(), E.avg_pool(2), E.mul(scale)])
        loss = F.mse_loss(y, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.slow
@pytest.mark.compiler
def test_the_gradient_of_a_generated_kernel_differs_from_eager_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(call: Call, **options: Any) -> Tensor:
        return run_emulated(call, sanitize=False)

    monkeypatch.setattr(functional, "torch_path_reason", lambda call: None)
    monkeypatch.setattr(runtime, "run", run)
    x, w, r = leaves((1, 2, 5, 6), (4, 2, 3, 3), (1, 4, 3, 4))

    def ours(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
        return jitconv.conv2d(x, w, epilogue=[E.mul(r), E.tanh()])

    def theirs(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
        return torch.tanh(F.conv2d(x, w) * r)

    torch.testing.assert_close(ours(x, w, r), theirs(x, w, r), rtol=1e-5, atol=1e-6)
    for actual, expected in zip(gradients(ours, [x, w, r]), gradients(theirs, [x, w, r]), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
