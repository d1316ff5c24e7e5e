"""The activation functions of the epilogue against float64, on the CPU and through the compiler."""

from __future__ import annotations

import ctypes
import itertools
import math
import re
import subprocess
from collections.abc import Iterator
from functools import lru_cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from jitconv.architectures import KNOWN
from jitconv.emulate import compiler
from jitconv.resources import templates_root
from jitconv.toolchain import compile_cubin, compile_ptx
from tests.activation_cases import (
    AT_THE_EDGES,
    CASES,
    EXP2_ULP,
    INSTRUCTIONS,
    RECIPROCAL_ULP,
    Case,
    beyond_bound,
    headers,
    host_source,
    kernel_source,
    special,
    sweep,
    tail_of_torch,
)

CASES_WITH_NUMBERS = [
    pytest.param(case, p, q, id=f"{case.name}({p},{q})" if len(case.numbers) > 1 else case.name)
    for case in CASES
    for p, q in case.numbers
]

# Functions that may stand behind a product on tensor cores, and how often each uses the two approximate instructions
# (2^x, 1 / d): half of the cost, as the hardware issues them at an eighth of the rate of other arithmetic.
STRAIGHT_LINES = {
    "celu": (1, 0),
    "elu": (1, 0),
    "gelu_erf": (1, 1),
    "gelu_tanh": (1, 1),
    "logsigmoid": (1, 0),
    "mish": (1, 1),
    "selu": (1, 0),
    "sigmoid": (1, 1),
    "silu": (1, 1),
    "softplus": (1, 0),
    "softsign": (0, 1),
    "tanh": (1, 1),
}

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


@pytest.fixture
def wrong(libraries: dict[str, ctypes.CDLL]) -> Iterator[ctypes.CDLL]:
    """A library whose approximate instructions may be made wrong; right again afterwards."""
    library = libraries["fma"]
    yield library
    library.set_error(0, 0)


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
    tail = tail_of_torch(case, v, w, p, q, exact)
    for name, library in libraries.items():
        assert not beyond_bound(case, v, apply(library, case, v, w, p, q), exact, tail), name


@pytest.mark.compiler
@pytest.mark.parametrize(("case", "p", "q"), CASES_WITH_NUMBERS)
def test_bound_holds_when_the_approximate_instructions_are_as_wrong_as_they_may_be(
    wrong: ctypes.CDLL, case: Case, p: float, q: float
) -> None:
    v, w, v64, w64 = (each[::3].contiguous() for each in points())
    right = apply(wrong, case, v, w, p, q)
    exact = case.exact(v64, w64, p, q)
    tail = tail_of_torch(case, v, w, p, q, exact)
    for exp2_ulp, reciprocal_ulp in itertools.product((-EXP2_ULP, EXP2_ULP), (-RECIPROCAL_ULP, RECIPROCAL_ULP)):
        wrong.set_error(exp2_ulp, reciprocal_ulp)
        got = apply(wrong, case, v, w, p, q)
        if torch.equal(got.view(torch.int32), right.view(torch.int32)):
            continue
        assert not beyond_bound(case, v, got, exact, tail), (exp2_ulp, reciprocal_ulp)


@pytest.mark.compiler
def test_every_approximated_function_is_tried_with_wrong_instructions(wrong: ctypes.CDLL) -> None:
    # Were the wrongness not to reach a function, the test above would hold for nothing.
    v, w = (each[::16].contiguous() for each in points()[:2])
    for name, (exp2, reciprocal) in STRAIGHT_LINES.items():
        case = next(case for case in CASES if case.name == name)
        p, q = case.numbers[0]
        right = apply(wrong, case, v, w, p, q)
        for errors, used in (((EXP2_ULP, 0), exp2), ((0, RECIPROCAL_ULP), reciprocal)):
            wrong.set_error(*errors)
            assert torch.equal(apply(wrong, case, v, w, p, q).nan_to_num(), right.nan_to_num()) != bool(used), name
            wrong.set_error(0, 0)


@pytest.mark.compiler
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=64, max_size=256))
@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_bound_holds_at_any_point(libraries: dict[str, ctypes.CDLL], values: list[float]) -> None:
    v = torch.tensor(values, dtype=torch.float32)
    for case in CASES:
        for p, q in case.numbers:
            exact = case.exact(v.double(), v.double(), p, q)
            tail = tail_of_torch(case, v, v, p, q, exact)
            got = apply(libraries["fma"], case, v, v, p, q)
            assert not beyond_bound(case, v, got, exact, tail), (case.name, p, q)


@pytest.mark.compiler
def test_functions_reach_their_limits_exactly(libraries: dict[str, ctypes.CDLL]) -> None:
    by_name = {case.name: case for case in CASES}
    v = torch.cat([torch.linspace(41.6, 200.0, 4096), torch.tensor([1e10, 2.0**100, torch.finfo(torch.float32).max])])
    for library in libraries.values():

        def run(name: str, v: Tensor, library: ctypes.CDLL = library) -> Tensor:
            return apply(library, by_name[name], v, v, 0.0, 0.0)

        for name in ("mish", "silu", "gelu_erf", "gelu_tanh"):
            assert torch.equal(run(name, v), v), name
        for name in ("tanh", "sigmoid"):
            assert torch.equal(run(name, v), torch.ones_like(v)), name
        assert torch.equal(run("tanh", -v), -torch.ones_like(v))
        everywhere = points()[0]
        assert run("tanh", everywhere).abs().max() <= 1
        assert run("sigmoid", everywhere).max() <= 1
        assert run("sigmoid", everywhere).min() >= 0


@pytest.mark.compiler
def test_host_instructions_take_and_give_subnormals_as_zero(libraries: dict[str, ctypes.CDLL]) -> None:
    for case, pairs in zip(INSTRUCTIONS, AT_THE_EDGES, strict=True):
        v, result = torch.tensor(pairs).unbind(1)
        v = v.contiguous()
        for library in libraries.values():
            assert torch.equal(apply(library, case, v, v, 0.0, 0.0), result), case.name
            assert apply(library, case, v * math.nan, v, 0.0, 0.0).isnan().all(), case.name


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
    text = headers()["device/activations.cuh"].split("}  // namespace detail")[-1]
    names = set(re.findall(r"__forceinline__ float (\w+)\(", text))
    assert names == {case.name for case in CASES}


@pytest.mark.parametrize("case", [case for case in CASES if case.name in STRAIGHT_LINES], ids=str)
def test_function_is_a_straight_line_around_the_fast_instructions(case: Case) -> None:
    # One element a thread: what branches is the function.
    source = f"""#include "device/activations.cuh"
extern "C" __global__ void one(const float* in, float* out, float p, float q) {{
    const float v = in[threadIdx.x];
    out[threadIdx.x] = jitconv::act::{case.call};
}}
"""
    ptx = compile_ptx(source, name="one", arch="sm_90a", headers=headers())
    exp2, reciprocal = STRAIGHT_LINES[case.name]
    assert len(re.findall(r"\bex2\.approx\.ftz\.f32\b", ptx)) == exp2
    assert len(re.findall(r"\brcp\.approx\.ftz\.f32\b", ptx)) == reciprocal
    assert not re.findall(r"\b(?:bra|call)\b.*", ptx)


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
