"""The gradient of every step and operand, through the torch reference that backward uses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from jitconv import epilogue as E

SHAPE = (2, 3, 4, 5)


def value(seed: int = 0, shape: tuple[int, ...] = SHAPE) -> Tensor:
    """Distinct values away from the kinks of every step, at which no gradient exists."""
    count = torch.Size(shape).numel()
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(count, generator=generator).double()
    # Odd multiples of a step that puts no value within 1e-3 of 0, ±0.5, ±1, 3 or 6.
    return ((2 * order + 1 - count) * 0.03137).view(shape).requires_grad_()


STEPS: dict[str, Callable[[], E.Step]] = {
    "relu": E.relu, "relu6": E.relu6, "leaky_relu": lambda: E.leaky_relu(0.2), "elu": lambda: E.elu(1.5),
    "selu": E.selu, "celu": lambda: E.celu(0.7), "gelu": E.gelu, "gelu_tanh": lambda: E.gelu("tanh"), "silu": E.silu,
    "mish": E.mish, "tanh": E.tanh, "sigmoid": E.sigmoid, "logsigmoid": E.logsigmoid,
    "softplus": lambda: E.softplus(2.0, 5.0), "softsign": E.softsign, "hardswish": E.hardswish,
    "hardsigmoid": E.hardsigmoid, "hardtanh": lambda: E.hardtanh(-0.5, 0.75), "abs": E.abs, "neg": E.neg,
    "square": E.square, "exp": E.exp, "reciprocal": E.reciprocal, "clamp": lambda: E.clamp(-0.51, 0.52),
    "clamp_min": lambda: E.clamp(min=-0.51), "clamp_max": lambda: E.clamp(max=0.52),
    "layer_norm": lambda: E.layer_norm(5), "avg_pool": lambda: E.avg_pool((3, 2)),
    "avg_pool_ceil": lambda: E.avg_pool((3, 2), ceil_mode=True), "max_pool": lambda: E.max_pool((3, 2)),
    "max_pool_ceil": lambda: E.max_pool((3, 2), ceil_mode=True),
}  # fmt: skip


def test_a_step_has_no_gradient_test() -> None:
    public = {name for name in E.__all__ if name.islower() and name not in ("bind", "register")}
    tested = {name.removesuffix("_ceil").removesuffix("_tanh") for name in STEPS} | {"sqrt", *BINARY}
    assert public <= tested


@pytest.mark.parametrize("name", STEPS)
def test_the_gradient_of_a_step_is_wrong(name: str) -> None:
    assert torch.autograd.gradcheck(lambda v: E.reference([STEPS[name]()], v), value())


def test_the_gradient_of_sqrt_is_wrong() -> None:
    v = value().detach().abs().add(0.1).requires_grad_()
    assert torch.autograd.gradcheck(lambda v: E.reference([E.sqrt()], v), v)


BINARY: dict[str, Callable[[E.Operand], E.Step]] = {
    "add": E.add, "sub": E.sub, "mul": E.mul, "div": E.div, "minimum": E.minimum, "maximum": E.maximum,
}  # fmt: skip

OPERAND_SHAPES = {
    "scalar": (), "one_element": (1, 1, 1, 1), "channel": (3,), "tensor": SHAPE, "gate": (2, 1, 4, 1), "row": (1, 5),
}  # fmt: skip


@pytest.mark.parametrize("kind", OPERAND_SHAPES)
@pytest.mark.parametrize("name", BINARY)
def test_the_gradient_of_an_operand_is_wrong(name: str, kind: str) -> None:
    other = value(1, OPERAND_SHAPES[kind]).detach().add(0.01111).requires_grad_()
    assert torch.autograd.gradcheck(lambda v, o: E.reference([BINARY[name](o)], v), (value(), other))


@pytest.mark.parametrize("name", BINARY)
def test_the_gradient_through_the_convolutions_own_value_is_wrong(name: str) -> None:
    # tanh first, so that the value and CONV differ.
    assert torch.autograd.gradcheck(lambda v: E.reference([E.tanh(), BINARY[name](E.CONV)], v), value())


@pytest.mark.parametrize(
    "bounds",
    [("tensor", "tensor"), ("number", "tensor"), ("tensor", "number"), (None, "tensor"), ("tensor", None)],
    ids=str,
)
def test_the_gradient_of_a_bound_is_wrong(bounds: tuple[str | None, str | None]) -> None:
    tensors = [value(i + 1, (3,)).detach().add(0.0111 + i).requires_grad_() for i in range(2)]

    def step(low: Tensor, high: Tensor) -> E.Step:
        values = [
            {"tensor": t, "number": number, None: None}[kind]
            for t, number, kind in zip((low, high), (-0.51, 0.52), bounds, strict=True)
        ]
        return E.clamp(*values)

    def clamped(v: Tensor, low: Tensor, high: Tensor) -> Tensor:
        # Both take part, whichever is a bound.
        return E.reference([step(low, high)], v) + 0 * (low.sum() + high.sum())

    assert torch.autograd.gradcheck(clamped, (value(), *tensors))


def test_the_gradient_of_a_norms_weight_or_bias_is_wrong() -> None:
    weight, bias = value(1, (5,)), value(2, (5,))

    def norm(v: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return E.reference([E.layer_norm(5, w, b)], v)

    assert torch.autograd.gradcheck(norm, (value(), weight, bias))


def test_the_gradient_of_a_registered_step_is_wrong() -> None:
    step = E.register("snake", cuda="v", torch=lambda v, a: v + (a * v).sin() ** 2 / a, operands=("a",))
    a = value(1, (3,)).detach().abs().add(1).requires_grad_()
    assert torch.autograd.gradcheck(lambda v, a: E.reference([step(a)], v), (value(), a))


def test_the_gradient_of_a_chain_is_wrong() -> None:
    scale, weight = value(1, ()), value(2, (5,))

    def chain(v: Tensor, s: Tensor, w: Tensor) -> Tensor:
        steps = [E.mul(s), E.layer_norm(5, w), E.add(E.CONV), E.avg_pool(2), E.gelu()]
        return E.reference(steps, v)

    assert torch.autograd.gradcheck(chain, (value(), scale, weight))
