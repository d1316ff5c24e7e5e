"""Steps and chains without a kernel: binding, shapes, specs, registration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from jitconv import epilogue as E
from jitconv.problem import OperandSpec

SHAPE = (2, 3, 4, 5)
CPU = torch.device("cpu")


def bind(*steps: E.Step, shape: tuple[int, ...] = SHAPE, dtype: torch.dtype = torch.float32) -> E.Bound:
    return E.bind(steps, shape, dtype, CPU, "epilogue")


# ---- What an operand is -----------------------------------------------------------------------------------------

KINDS: list[tuple[Any, OperandSpec]] = [
    (2, OperandSpec("number")),
    (2.5, OperandSpec("number")),
    (True, OperandSpec("number")),
    (torch.tensor(2.0), OperandSpec("scalar", "float32")),
    (torch.tensor(2.0, dtype=torch.float64), OperandSpec("scalar", "float64")),
    (torch.ones(1), OperandSpec("scalar", "float32")),
    (torch.ones(1, 1, 1, 1, dtype=torch.bfloat16), OperandSpec("scalar", "bfloat16")),
    (torch.ones(3), OperandSpec("channel", "float32")),
    (torch.ones(SHAPE), OperandSpec("tensor", "float32")),
    (torch.ones(3, 1, 1), OperandSpec("tensor", "float32")),
    (torch.ones(1, 5), OperandSpec("tensor", "float32")),
    (E.CONV, OperandSpec("value")),
]


@pytest.mark.parametrize(("value", "expected"), KINDS, ids=range(len(KINDS)))
def test_an_operand_is_taken_for_another_kind(value: Any, expected: OperandSpec) -> None:
    (spec,) = bind(E.add(value)).specs
    assert spec.operands == (("other", expected),)


def test_an_operand_of_the_inputs_dtype_is_refused_or_converted() -> None:
    half = torch.ones(3, dtype=torch.float16)
    (spec,) = bind(E.add(half), dtype=torch.float16).specs
    assert spec.operands == (("other", OperandSpec("channel", "float16")),)
    with pytest.raises(RuntimeError, match=r"other has dtype torch.float16: expected torch.float32"):
        bind(E.add(half))


def test_a_tensor_is_bound_with_other_strides_than_broadcasting_gives() -> None:
    gate = torch.ones(2, 1, 4, 1)
    ((bound,),) = bind(E.mul(gate)).operands
    assert (bound.shape, bound.stride()) == (SHAPE, (4, 0, 1, 0))
    assert bound.data_ptr() == gate.data_ptr()


def test_numbers_are_part_of_the_structure() -> None:
    assert bind(E.add(1.0), E.elu(0.5)).specs == bind(E.add(7), E.elu(0.25)).specs
    assert bind(E.layer_norm(5, eps=1e-5)).specs == bind(E.layer_norm(5, eps=0.1)).specs
    assert bind(E.clamp(0.0, 1.0)).specs != bind(E.clamp(0.0)).specs


def test_windows_are_missing_from_the_structure() -> None:
    specs = [bind(E.max_pool(w, c)).specs for w, c in ((2, False), (2, True), ((2, 1), False), ((1, 2), False))]
    assert len(set(specs)) == 4
    assert bind(E.max_pool(2)).specs == bind(E.max_pool((2, 2))).specs
    assert bind(E.max_pool(2)).specs != bind(E.avg_pool(2)).specs


@given(
    extents=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 5), min_size=3, max_size=3),
    ceil_mode=st.booleans(),
    average=st.booleans(),
)
def test_a_pool_has_another_shape_than_in_torch(
    extents: list[int], sizes: list[int], ceil_mode: bool, average: bool
) -> None:
    window, shape = tuple(sizes[: len(extents)]), (1, 2, *extents)
    function = getattr(F, f"{'avg' if average else 'max'}_pool{len(extents)}d")
    step = (E.avg_pool if average else E.max_pool)(window, ceil_mode)
    try:
        expected = tuple(function(torch.zeros(shape), window, ceil_mode=ceil_mode).shape)
    except RuntimeError:
        with pytest.raises(RuntimeError, match="kernel_size"):
            bind(step, shape=shape)
        return
    assert bind(step, shape=shape).shape == expected


def test_the_average_of_a_window_beyond_three_dimensions_is_taken() -> None:
    # torch refuses it there, and only there, even with ceil_mode.
    with pytest.raises(RuntimeError, match=r"epilogue\[0\] avg_pool: kernel_size=\(3, 1, 1\) on a value of shape"):
        bind(E.avg_pool((3, 1, 1), ceil_mode=True), shape=(1, 2, 2, 4, 4))
    assert bind(E.max_pool((3, 1, 1), ceil_mode=True), shape=(1, 2, 2, 4, 4)).shape == (1, 2, 1, 4, 4)


def test_a_step_sees_another_shape_than_the_steps_before_it_left() -> None:
    bound = bind(E.relu(), E.max_pool((2, 1)), E.add(torch.ones(2, 3, 2, 5)), E.layer_norm(5), E.avg_pool((1, 5)))
    assert bound.shapes == (SHAPE, SHAPE, (2, 3, 2, 5), (2, 3, 2, 5), (2, 3, 2, 5))
    assert bound.shape == (2, 3, 2, 1)


MISFITS: list[tuple[Callable[[], E.Bound], str]] = [
    (lambda: bind(E.add(torch.ones(5))), r"epilogue\[0\] add: other has 5 entries: a 1-D tensor is one value per chan"),
    (lambda: bind(E.add(torch.ones(2, 3, 4, 4))), r"other has shape \(2, 3, 4, 4\), which does not broadcast"),
    (lambda: bind(E.add(torch.ones(1, 2, 3, 4, 5))), r"does not broadcast to the value's shape \(2, 3, 4, 5\)"),
    (lambda: bind(E.relu(), E.add(torch.ones(3).int())), r"epilogue\[1\] add: other has dtype torch.int32"),
    (lambda: bind(E.add(torch.ones(3).double())), r"other has dtype torch.float64: expected torch.float32"),
    (lambda: bind(E.add(torch.ones(3, device="meta"))), r"other is on meta: expected cpu"),
    (lambda: bind(E.layer_norm(4)), r"normalized_shape=\(4,\): the value there has shape \(2, 3, 4, 5\)"),
    (lambda: bind(E.max_pool((2, 2, 2))), r"kernel_size=\(2, 2, 2\): expected an int or 2 ints"),
    (lambda: bind(E.max_pool(6)), r"kernel_size=\(6, 6\) on a value of shape .*: the output would be empty"),
    (lambda: bind(E.max_pool(2), E.add(E.CONV)), r"other=CONV after a pool"),
]


@pytest.mark.parametrize(("make", "message"), MISFITS, ids=[m for _, m in MISFITS])
def test_a_step_that_does_not_fit_is_bound(make: Callable[[], E.Bound], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        make()


# ---- Making steps -------------------------------------------------------------------------------------------------

REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: E.add("1"), TypeError, "other='1': expected a number, a tensor or"),  # type: ignore[arg-type]
    (lambda: E.add(1j), TypeError, "other=1j: expected a number"),  # type: ignore[arg-type]
    (lambda: E.elu(torch.ones(3)), TypeError, "alpha is a tensor: expected a Python number"),  # type: ignore[arg-type]
    (lambda: E.clamp(), ValueError, "expected at least one bound"),
    (lambda: E.gelu("fast"), RuntimeError, "approximate='fast': expected 'none' or 'tanh'"),
    (lambda: E.celu(0), RuntimeError, "alpha=0: expected a number other than 0"),
    (lambda: E.hardtanh(1, -1), ValueError, "min_val=1.0 exceeds max_val=-1.0"),
    (lambda: E.layer_norm((4, 5)), ValueError, r"normalized_shape=\(4, 5\): expected one entry"),
    (lambda: E.layer_norm(0), RuntimeError, "normalized_shape=0: expected at least 1"),
    (lambda: E.layer_norm(5, torch.ones(4)), RuntimeError, r"weight has shape \(4,\): expected \(5,\)"),
    (lambda: E.layer_norm(5, 1.0), TypeError, "weight=1.0: expected a tensor"),  # type: ignore[arg-type]
    (lambda: E.max_pool(0), RuntimeError, "kernel_size=0: expected at least 1"),
    (lambda: E.max_pool((1, 1, 1, 1)), RuntimeError, "expected an int or one int per dimension"),
    (lambda: E.avg_pool((2.0,)), TypeError, r"avg_pool: kernel_size=.*2.0.*: expected an int"),  # type: ignore[arg-type]
    (lambda: E.as_chain(E.relu, "epilogue"), TypeError, "expected a sequence of steps"),  # type: ignore[arg-type]
    (lambda: E.as_chain([E.relu], "between"), TypeError, r"between\[0\]=.*call it: E.relu\(\)"),  # type: ignore[list-item]
    (lambda: E.as_chain(["relu"], "epilogue"), TypeError, r"epilogue\[0\]='relu': expected a step"),  # type: ignore[list-item]
]


@pytest.mark.parametrize(("make", "error", "message"), REFUSED, ids=range(len(REFUSED)))
def test_a_wrong_step_is_made(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_a_single_step_is_no_chain() -> None:
    step = E.relu()
    assert E.as_chain(step, "epilogue") == (step,)
    assert E.as_chain(None, "epilogue") == ()
    assert E.as_chain((s for s in [step, step]), "epilogue") == (step, step)


def test_steps_print_as_something_else_than_their_call() -> None:
    assert repr(E.clamp(-1, torch.ones(3))) == "clamp(min=-1, max=tensor(3,))"
    assert repr(E.add(E.CONV)) == "add(other=CONV)"
    assert repr(E.max_pool(2)) == "max_pool(ceil_mode=False, window=(2,))"


# ---- Steps of the caller's own ------------------------------------------------------------------------------------


def scaled(v: Tensor, gain: Any, shift: Any = 0) -> Tensor:
    return v * gain + shift


def test_a_registered_step_takes_its_operands_in_another_order() -> None:
    step = E.register("scaled", cuda="v * gain + shift", torch=scaled, operands=("gain", "shift"))
    v = torch.arange(3.0).view(1, 3, 1)
    expected = v * 2 + 5
    for made in (step(2, 5), step(2, shift=5), step(shift=5, gain=2)):
        assert torch.equal(E.reference([made], v), expected)
        assert bind(made, shape=(1, 3, 1)).specs[0].cuda == "v * gain + shift"
    channel = torch.tensor([1.0, 2.0, 3.0])
    assert torch.equal(E.reference([step(channel, 1)], v), v * channel.view(1, 3, 1) + 1)


@pytest.mark.parametrize(
    ("arguments", "named", "message"),
    [
        ((1, 2, 3), {}, r"scaled\(\) takes 2 operands, got 3"),
        ((1,), {}, r"operands \['shift'\] are missing"),
        ((1,), {"gain": 2}, r"unexpected operand gain=2"),
        ((1, 2), {"bias": 2}, r"unexpected operand bias=2: expected \('gain', 'shift'\)"),
    ],
)
def test_a_registered_step_takes_wrong_operands(arguments: Any, named: Any, message: str) -> None:
    step = E.register("scaled", cuda="v * gain + shift", torch=scaled, operands=("gain", "shift"))
    with pytest.raises(TypeError, match=message):
        step(*arguments, **named)


@pytest.mark.parametrize("name", ["at", "v", "float", "switch", "offset_of", "lambda", "2x", "_x", "a b", ""])
def test_an_operand_is_called_what_the_kernel_uses_itself(name: str) -> None:
    with pytest.raises(ValueError, match="register: operands="):
        E.register("mine", cuda="v", torch=scaled, operands=(name,))


def test_a_registration_without_meaning_is_accepted() -> None:
    with pytest.raises(ValueError, match="register: name='my step'"):
        E.register("my step", cuda="v", torch=scaled)
    with pytest.raises(ValueError, match="without // comments"):
        E.register("commented", cuda="v + 1  // one more", torch=lambda v: v + 1)
    with pytest.raises(ValueError, match=r"cuda='': expected a C\+\+ expression"):
        E.register("mine", cuda="  ", torch=scaled)
    with pytest.raises(ValueError, match="expected distinct names"):
        E.register("mine", cuda="v", torch=scaled, operands=("a", "a"))


def test_steps_replace_the_wrong_tensors() -> None:
    first, second = torch.ones(3), torch.zeros(3)
    step = E.clamp(first, 2.0).with_tensors(iter([second]))
    assert step.tensors() == (second,)
    assert dict(step.operands)["max"] == 2.0
    norm = E.layer_norm(3, first, second).with_tensors(iter([second, first]))
    assert [t is u for t, u in zip(norm.tensors(), (second, first), strict=True)] == [True, True]
