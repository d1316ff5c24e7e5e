"""The activation functions of the epilogue on the hardware, against float64."""

from __future__ import annotations

import struct

import pytest
import torch
from torch import Tensor

from jitconv.launch import LoadedKernel, device_info, load
from jitconv.toolchain import DEFAULT_OPTIONS, compile_cubin
from tests.activation_cases import (
    AT_THE_EDGES,
    CASES,
    EXP2_ULP,
    INSTRUCTIONS,
    RECIPROCAL_ULP,
    Case,
    beyond_bound,
    headers,
    kernel_source,
    special,
    sweep,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CHUNK = 1 << 25

# Results must not depend on whether the compiler turns a * b + c into one instruction.
FMAD = {
    "fma": DEFAULT_OPTIONS,
    "separate": tuple("--fmad=false" if option == "--fmad=true" else option for option in DEFAULT_OPTIONS),
}


def kernel(case: Case, options: tuple[str, ...] = DEFAULT_OPTIONS) -> LoadedKernel:
    name = f"activation_{case.name}"
    cubin = compile_cubin(
        kernel_source([case], name),
        name=name,
        arch=device_info(0).arch,
        headers=headers(),
        options=options,
    ).cubin
    return load(cubin, name, device=0, shared_bytes=0)


def apply(loaded: LoadedKernel, v: Tensor, w: Tensor, p: float, q: float) -> Tensor:
    """Run the kernel on device tensors of one shape."""
    result = torch.full_like(v, 12345.0)
    pointers = (v.data_ptr(), w.data_ptr(), result.data_ptr())
    arguments = struct.pack("<QQQqff", *pointers, v.numel(), p, q)
    grid = min(-(-v.numel() // 256), 4096)
    loaded.launch(grid, 256, arguments, torch.cuda.current_stream(0).cuda_stream)
    return result


def test_both_contractions_are_tried() -> None:
    assert FMAD["fma"] != FMAD["separate"]


@pytest.mark.parametrize("contraction", list(FMAD))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_error_stays_within_bound_over_all_exponents(case: Case, contraction: str) -> None:
    loaded = kernel(case, FMAD[contraction])
    v, w = sweep()
    on_device = v.cuda(), w.cuda()
    for p, q in case.numbers:
        got = apply(loaded, *on_device, p, q).cpu()
        own = case.torch(*on_device, p, q).cpu()
        assert not beyond_bound(case, v, got, case.exact(v.double(), w.double(), p, q), own), (p, q)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_zeros_infinities_and_nan_come_out_as_from_torch(case: Case) -> None:
    loaded = kernel(case)
    v, w = special()
    for p, q in case.numbers:
        got = apply(loaded, v.cuda(), w.cuda(), p, q)
        own = case.torch(v.cuda(), w.cuda(), p, q)
        torch.testing.assert_close(got, own, rtol=1e-6, atol=0, equal_nan=True)
        if case.sign_of_zero:
            zero = (got == 0).cpu()
            expected = case.exact(v.double(), w.double(), p, q)
            assert torch.equal(got.cpu().signbit()[zero], expected.signbit()[zero]), (p, q)


def test_approximate_instructions_are_as_good_as_the_bounds_assume() -> None:
    # Whole exponents and powers of two among them: there the functions rely on exact results.
    exponents = torch.cat([torch.linspace(-126, 127.999, 1 << 24), torch.linspace(-1, 1, 1 << 23)])
    mantissas = (torch.arange(1 << 23, dtype=torch.int32) | (127 << 23)).view(torch.float32)
    powers = torch.exp2(torch.arange(-125.0, 126.0))
    points = (
        (torch.cat([exponents, torch.arange(-126.0, 128.0)]), EXP2_ULP),
        (torch.cat([mantissas, mantissas[::64] * 2.0**100, -mantissas[::64] * 2.0**-100, powers]), RECIPROCAL_ULP),
    )
    for case, (v, ulp) in zip(INSTRUCTIONS, points, strict=True):
        got = apply(kernel(case), v.cuda(), v.cuda(), 0.0, 0.0).cpu()
        rounded = case.exact(v.double(), v.double(), 0.0, 0.0).float()
        distance = (got.view(torch.int32).long() - rounded.view(torch.int32).long()).abs()
        assert distance.max() <= ulp, (case.name, v[distance.argmax()].item())
        power_of_two = rounded.double() == case.exact(v.double(), v.double(), 0.0, 0.0)
        power_of_two &= (rounded.view(torch.int32) & 0x7FFFFF) == 0
        assert power_of_two.any()
        assert distance[power_of_two].max() == 0, case.name


def test_approximate_instructions_take_and_give_subnormals_as_zero() -> None:
    for case, pairs in zip(INSTRUCTIONS, AT_THE_EDGES, strict=True):
        v, result = torch.tensor(pairs).unbind(1)
        v = v.contiguous().cuda()
        assert torch.equal(apply(kernel(case), v, v, 0.0, 0.0).cpu(), result), case.name


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_error_stays_within_bound_for_every_float32(case: Case) -> None:
    loaded = kernel(case)
    p, q = case.numbers[0]
    for start in range(-(1 << 31), 1 << 31, CHUNK):
        bits = torch.arange(start, start + CHUNK, dtype=torch.int64, device="cuda")
        v = bits.to(torch.int32).view(torch.float32)
        w = v.flip(0)
        got, own = apply(loaded, v, w, p, q), case.torch(v, w, p, q)
        assert not beyond_bound(case, v, got, case.exact(v.double(), w.double(), p, q), own)
