"""The torch path: public calls on CPU tensors equal torch's own operators followed by torch's own steps."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

import jitconv
from jitconv import epilogue as E
from jitconv import reference
from tests.strategies import Case, assert_matches, expected_format, layer_norm, make_tensor, pool, random_case, twin


@pytest.mark.parametrize("seed", range(60))
def test_a_random_call_on_the_cpu_differs_from_torch(seed: int) -> None:
    case = random_case(random.Random(seed), largest=400)
    result = case.public()
    assert_matches(case, result)
    assert result.is_contiguous(memory_format=expected_format(case.x, case.weights))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_16_bit_type_is_rounded_more_than_once(dtype: torch.dtype) -> None:
    # Rounded to 16 bits before the step, 2049 (2048 + 1) and 257 would lose their last bit.
    big = {torch.float16: 2048.0, torch.bfloat16: 256.0}[dtype]
    x, weight = torch.full((1, 1, 3), big, dtype=dtype), torch.ones(1, 1, 1, dtype=dtype)
    out = jitconv.conv1d(x, weight, torch.ones(1, dtype=dtype), epilogue=[E.sub(big)])
    assert out.dtype == dtype
    assert (out == 1).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.complex128])
def test_other_dtypes_lose_precision(dtype: torch.dtype) -> None:
    x, weight = torch.randn(2, 3, 8, dtype=dtype), torch.randn(4, 3, 3, dtype=dtype)
    out = jitconv.conv1d(x, weight, padding=1, epilogue=[E.add(0.1)])
    torch.testing.assert_close(out, F.conv1d(x, weight, padding=1) + 0.1, rtol=0, atol=0)


def test_the_path_is_not_counted_or_not_explained() -> None:
    before = jitconv.stats()
    jitconv.conv1d(torch.ones(1, 1, 3), torch.ones(1, 1, 1))
    jitconv.conv1d(torch.ones(1, 1, 3).double(), torch.ones(1, 1, 1).double())
    after = jitconv.stats()
    assert after.torch_calls - before.torch_calls == 2
    assert after.launches == before.launches
    assert after.compiled == before.compiled
    reasons = {k: v - before.torch_reasons.get(k, 0) for k, v in after.torch_reasons.items()}
    assert reasons["cpu tensor"] == 2


@pytest.mark.parametrize("function", ["conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d"])
def test_unbatched_input_gains_or_loses_an_axis(function: str) -> None:
    rank = int(function[-2])
    x = make_tensor((3, *(5,) * rank))
    weight = make_tensor((3, 3, *(2,) * rank))
    torch.testing.assert_close(getattr(jitconv, function)(x, weight), getattr(F, function)(x, weight))


def test_the_memory_format_survives_a_chain() -> None:
    x = make_tensor((2, 3, 4, 6), layout="channels_last")
    chain = (layer_norm(6), twin(E.relu(), F.relu), pool("avg", 2))
    out = Case("conv2d", x, (make_tensor((5, 3, 1, 1)),), chain=chain).public()
    assert out.is_contiguous(memory_format=torch.channels_last)


def test_what_lies_between_is_computed_in_another_type() -> None:
    assert reference.compute_dtype(torch.float16) == torch.float32
    assert reference.compute_dtype(torch.bfloat16) == torch.float32
    assert reference.compute_dtype(torch.float64) == torch.float64
    assert reference.compute_dtype(torch.complex64) == torch.complex64


def test_gradients_do_not_reach_operands() -> None:
    gate = torch.ones(4, requires_grad=True)
    x, weight = torch.randn(1, 3, 8), torch.randn(4, 3, 3, requires_grad=True)
    jitconv.conv1d(x, weight, epilogue=[E.mul(gate), E.relu()]).sum().backward()
    expected = F.conv1d(x, weight.detach())
    torch.testing.assert_close(gate.grad, (expected * (expected > 0)).sum(dim=(0, 2)))
    assert weight.grad is not None
