"""The activation functions of the epilogue on the hardware, against float64."""

from __future__ import annotations

import struct

import pytest
import torch
from torch import Tensor

from jitconv.launch import LoadedKernel, device_info, load
from jitconv.toolchain import DEFAULT_OPTIONS, compile_cubin
from tests.activation_cases import (
    CASES,
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
