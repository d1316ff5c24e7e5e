"""The emulated device vocabulary computes what arithmetic and torch say it must."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import pytest
import torch

from jitconv.architectures import KNOWN
from jitconv.emulate import ALL_SCHEDULES, execute
from jitconv.toolchain import compile_cubin
from tests.kernels import cases, load

pytestmark = pytest.mark.compiler

_MASK32 = 2**32 - 1
_MASK64 = 2**64 - 1

every_schedule = functools.partial(execute, schedules=ALL_SCHEDULES)
fast = functools.partial(execute, sanitize=False, schedules=ALL_SCHEDULES[:1])


SYNCHRONISED = (cases.barriers, cases.named_barriers, cases.pipeline, cases.bulk, cases.warpgroups)


@pytest.mark.parametrize("case", SYNCHRONISED)
def test_synchronised_kernels_are_right_under_every_schedule(case) -> None:
    cases.assert_close(*case(every_schedule))


@pytest.mark.parametrize("case", SYNCHRONISED)
def test_synchronised_kernels_have_no_race(case) -> None:
    cases.assert_close(*case(functools.partial(execute, races=True, schedules=ALL_SCHEDULES)))


@pytest.mark.parametrize("case", [cases.barriers, cases.pipeline, cases.bulk, cases.warpgroups])
def test_the_fast_build_gives_the_same_bits(case) -> None:
    fast_results, _ = case(fast)
    results, _ = case(execute)
    for name, value in results.items():
        assert torch.equal(value, fast_results[name]), name


def test_conversions_match_torch_bit_for_bit() -> None:
    results, x, patterns = cases.numeric(fast)
    for name, dtype in (("to_half", torch.float16), ("to_bfloat16", torch.bfloat16)):
        expected = x.to(dtype)
        number = ~torch.isnan(x)
        got = results[name].view(torch.int16)
        assert torch.equal(got[number], expected.view(torch.int16)[number]), name
        assert torch.isnan(results[name][~number]).all(), name
    for name, dtype in (("from_half", torch.float16), ("from_bfloat16", torch.bfloat16)):
        expected = patterns.view(dtype).float()
        number = ~torch.isnan(expected)
        got = results[name].view(torch.int32)
        assert torch.equal(got[number], expected.view(torch.int32)[number]), name
        assert torch.isnan(results[name][~number]).all(), name


def test_round_tf32_takes_the_nearest_and_ties_away_from_zero() -> None:
    results, x, _ = cases.numeric(fast)
    rounded = results["to_tf32"]
    assert torch.equal(torch.isnan(rounded), torch.isnan(x))
    finite = torch.isfinite(x)
    assert torch.equal(rounded[torch.isinf(x)], x[torch.isinf(x)])
    # In float64, with the unit of the 10-bit mantissa at each value's own exponent.
    value = x[finite].double()
    exponent = torch.frexp(value.abs())[1].clamp(min=-125) - 1
    unit = torch.ldexp(torch.ones_like(value), exponent - 10)
    expected = torch.sign(value) * torch.floor(value.abs() / unit + 0.5) * unit
    largest = 2.0**128 - 2.0**117
    expected = torch.where(expected.abs() > largest, torch.sign(value) * math.inf, expected)
    assert torch.equal(rounded[finite].double(), expected)


def _signed32(value: int) -> int:
    return (value & _MASK32) - 2**32 if value & 2**31 else value & _MASK32


def _signed64(value: int) -> int:
    return (value & _MASK64) - 2**64 if value & 2**63 else value & _MASK64


def _byte_perm(a: int, b: int, selector: int) -> int:
    data = a.to_bytes(4, "little") + b.to_bytes(4, "little")
    result = []
    for i in range(4):
        # Of a nibble the intrinsic takes three bits.
        result.append(data[selector >> (4 * i) & 7])
    return int.from_bytes(bytes(result), "little")


def _integers(a: int, b: int) -> list[int]:
    a32, b32 = a & _MASK32, b & _MASK32
    return [
        a32 * b32 >> 32,
        (_signed32(a32) * _signed32(b32) >> 32) & _MASK32,
        (a & _MASK64) * (b & _MASK64) >> 64,
        a * b >> 64,
        32 - a32.bit_length(),
        64 - (a & _MASK64).bit_length(),
        (a32 & -a32).bit_length(),
        (a & -a & _MASK64).bit_length(),
        a32.bit_count(),
        (a & _MASK64).bit_count(),
        int(f"{a32:032b}"[::-1], 2),
        _byte_perm(a32, b32, (b & _MASK64) >> 32),
        min(a32, b32),
        max(_signed32(a32), _signed32(b32)) & _MASK32,
        min(a32, b32),
        a32,
    ]


def test_integer_intrinsics_match_python_integers() -> None:
    results, a, b = cases.integers(execute)
    pairs = zip(a.tolist(), b.tolist(), strict=True)
    expected = torch.tensor([[_signed64(v) for v in _integers(x, y)] for x, y in pairs]).T
    for index, name in enumerate(cases.INTEGERS):
        assert torch.equal(results[index], expected[index]), name


def test_arithmetic_intrinsics_round_once() -> None:
    results, (a, b, c) = cases.arithmetic(fast)
    # A number where the other is NaN, of either kind: torch.fmin keeps a signalling one.
    quiet = [torch.where(torch.isnan(value), torch.nan, value) for value in (a, b)]
    expected = {
        "__fadd_rn": a + b,
        "__fsub_rn": a - b,
        "__fmul_rn": a * b,
        "__fdiv_rn": a / b,
        "__frcp_rn": 1 / a,
        # Through double, which keeps enough digits: torch's own float root is not always the nearest.
        "__fsqrt_rn": a.double().sqrt().float(),
        "fminf": torch.fmin(*quiet),
        "fmaxf": torch.fmax(*quiet),
        "min": torch.fmin(*quiet),
        "max": torch.fmax(*quiet),
    }
    got = dict(zip(cases.ARITHMETIC, results, strict=True))
    for name, value in expected.items():
        torch.testing.assert_close(
            got[name], value, rtol=0, atol=0, equal_nan=True, msg=lambda text, n=name: f"{n}: {text}"
        )
    # The product of two floats is exact in double, and so is its difference to its own rounding; as a float it
    # is, unless it is subnormal.
    residual = a.double() * b.double() + c.double()
    exact = torch.isfinite(residual) & ((residual.abs() > 2.0**-100) | (residual == 0))
    assert int(exact.sum()) > 5000
    for name in ("__fmaf_rn", "fmaf"):
        assert torch.equal(got[name].double()[exact], residual[exact]), name
    positive = torch.isfinite(a) & (a > 0)
    root = a.double()[positive].rsqrt()
    torch.testing.assert_close(got["rsqrtf"].double()[positive], root, rtol=2.0**-23, atol=0)


def test_atomics_lose_nothing() -> None:
    results, expected = cases.atomics(every_schedule)
    assert results == expected


@pytest.mark.parametrize("operand", [0, 1, 5, 16, 31, 33])
def test_shuffles_and_votes_follow_the_definition(operand: int) -> None:
    results, x = cases.warps(execute, operand)
    lanes = list(range(32))
    distance = operand % 32

    def shuffled(width: int, source) -> list[int]:
        found = []
        for lane in lanes:
            low = lane // width * width
            other = source(lane, low)
            found.append(other if other is not None else lane)
        return found

    def sources(width: int) -> list[list[int]]:
        return [
            shuffled(width, lambda lane, low: low + distance % width),
            shuffled(width, lambda lane, low: lane - distance if lane - distance >= low else None),
            shuffled(width, lambda lane, low: lane + distance if lane + distance < low + width else None),
            # A partner in a later group is out of reach, one in an earlier group is not.
            shuffled(width, lambda lane, low: lane ^ distance if lane ^ distance < low + width else None),
        ]

    for block in range(2):
        value = x[32 * block : 32 * block + 32]
        got = results[:, 32 * block : 32 * block + 32]
        expected = [value[source] for width in (32, 8) for source in sources(width)]
        bits = sum(1 << lane for lane in lanes if value[lane] > 0)
        votes = [bits & 0xFFFF, bits >> 16, (value > 2).any(), (value > -2).all()]
        expected += [torch.full((32,), float(vote)) for vote in votes]
        assert torch.equal(got[:12], torch.stack(expected))
        double = value.double()
        groups = [double.sum().expand(32), double.view(4, 8).sum(1).repeat_interleave(8)]
        torch.testing.assert_close(got[12:14].double(), torch.stack(groups), rtol=1e-6, atol=1e-6)
        assert torch.equal(got[14], value.amax().expand(32))
        assert torch.equal(got[15], value.view(8, 4).amax(1).repeat_interleave(4))
        assert torch.equal(got[16], value[[lane ^ 1 for lane in lanes]])
        assert torch.equal(got[17], value[[lane ^ 3 for lane in lanes]])


EVERYWHERE = (
    "barriers", "named_barriers", "pipeline", "numeric", "arithmetic", "integers", "atomics", "warps",
)  # fmt: skip
TEXTS = [(name, arch) for name in EVERYWHERE for arch in KNOWN]
TEXTS += [(name, arch) for name in ("bulk", "boxes") for arch in ("sm_90a", "sm_100a", "sm_120")]
TEXTS += [("warpgroups", "sm_90a"), ("products", "sm_90a")]


@pytest.mark.parametrize(("name", "arch"), TEXTS)
def test_nvrtc_takes_the_text_that_the_emulator_runs(name: str, arch: str) -> None:
    kernel = load(name)
    compiled = compile_cubin(kernel.source, name=name, arch=arch, headers=kernel.headers)
    assert compiled.resources.spill_stores == 0


def test_every_kernel_of_the_folder_is_tested() -> None:
    files = {path.stem for path in Path(cases.__file__).parent.glob("*.cu")}
    assert files == {name for name, _ in TEXTS}
