"""The activation functions of the epilogue against float64, on the CPU and through the compiler."""

from __future__ import annotations

import ctypes
import math
import re
import subprocess
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from jitconv.architectures import KNOWN
from jitconv.emulate import compiler
from jitconv.resources import templates_root
from jitconv.toolchain import compile_cubin
from tests.activation_cases import (
    CASES,
    Case,
    beyond_bound,
    headers,
    host_source,
    kernel_source,
    special,
    sweep,
)

CASES_WITH_NUMBERS = [
    pytest.param(case, p, q, id=f"{case.name}({p},{q})" if len(case.numbers) > 1 else case.name)
    for case in CASES
    for p, q in case.numbers
]

# Results must not depend on whether the compiler turns a * b + c into one instruction.
CONTRACTION = {"separate": ["-ffp-contract=off"], "fma": ["-ffp-contract=fast", "-march=native"]}


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ctypes.CDLL]:
    """The header compiled for the CPU, as a shared library for each kind of contraction."""
    folder = tmp_path_factory.mktemp("activations")
    source = folder / "activations.cpp"
    source.write_text(host_source(), encoding="utf-8")
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
    flags += ["-DJITCONV_HOST", f"-I{templates_root()}", str(source), "-o"]
    built = {}
    for name, contraction in CONTRACTION.items():
        output = str(folder / f"{name}.so")
        subprocess.run([compiler(), *contraction, *flags, output], check=True)
        built[name] = ctypes.CDLL(output)
    return built


def apply(library: ctypes.CDLL, case: Case, v: Tensor, w: Tensor, p: float, q: float) -> Tensor:
    result = torch.full_like(v, 12345.0)
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (v, w, result)]
    function = getattr(library, f"run_{case.name}")
    function(*pointers, ctypes.c_int64(v.numel()), ctypes.c_float(p), ctypes.c_float(q))
    return result


@lru_cache(maxsize=1)
def points() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    v, w = sweep()
    return v, w, v.double(), w.double()


@pytest.mark.compiler
@pytest.mark.parametrize(("case", "p", "q"), CASES_WITH_NUMBERS)
def test_error_stays_within_bound_over_all_of_fp32(
    libraries: dict[str, ctypes.CDLL], case: Case, p: float, q: float
) -> None:
    v, w, v64, w64 = points()
    exact = case.exact(v64, w64, p, q)
    for name, library in libraries.items():
        assert not beyond_bound(case, v, apply(library, case, v, w, p, q), exact), name


@pytest.mark.compiler
@pytest.mark.parametrize(("case", "p", "q"), CASES_WITH_NUMBERS)
def test_zeros_infinities_and_nan_come_out_as_from_torch(
    libraries: dict[str, ctypes.CDLL], case: Case, p: float, q: float
) -> None:
    v, w = special()
    expected, exact = case.torch(v, w, p, q), case.exact(v.double(), w.double(), p, q)
    for library in libraries.values():
        got = apply(library, case, v, w, p, q)
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=0, equal_nan=True)
        if case.sign_of_zero:
            zero = got == 0
            assert torch.equal(got.signbit()[zero], exact.signbit()[zero])


@pytest.mark.parametrize(("case", "p", "q"), CASES_WITH_NUMBERS)
def test_float64_form_is_the_function_that_torch_defines(case: Case, p: float, q: float) -> None:
    # Where nothing cancels, torch's own function in float64 is right to its last digits.
    v = torch.linspace(-2.0, 30.0, 4001, dtype=torch.float64)
    w = v.flip(0)
    torch.testing.assert_close(case.exact(v, w, p, q), case.torch(v, w, p, q), rtol=1e-13, atol=0, equal_nan=True)


def test_every_function_of_the_header_has_a_case() -> None:
    text = headers()["device/activations.cuh"].split("}  // namespace detail")[1]
    names = set(re.findall(r"__forceinline__ float (\w+)\(", text))
    assert names == {case.name for case in CASES}


@pytest.mark.parametrize("arch", KNOWN)
def test_all_functions_together_spill_no_register(arch: str) -> None:
    source = kernel_source(CASES, "activations")
    resources = compile_cubin(source, name="activations", arch=arch, headers=headers()).resources
    assert not resources.spills
    assert resources.stack_bytes == 0


def test_bound_catches_overflow_on_the_way_and_a_lost_nan() -> None:
    # mish as e * ... * v once overflowed at v = 1.5e34: the check itself must see such points.
    v = torch.tensor([1.5e34, 1.0, math.nan])
    case = next(case for case in CASES if case.name == "mish")
    exact = case.exact(v.double(), v.double(), 0, 0)
    right = exact.float()
    assert not beyond_bound(case, v, right, exact)
    for at, wrong in ((0, math.inf), (1, float(right[1]) * (1 + 3e-6)), (2, 0.0)):
        got = right.clone()
        got[at] = wrong
        assert f"v={v[at].item()!r}" in beyond_bound(case, v, got, exact)
