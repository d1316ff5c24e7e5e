"""What each function of templates/device/activations.cuh is measured against, on CPU and GPU.

A case holds the C++ call, torch's own fp32 function and the exact function in float64. The float64
forms are written so that float64 itself loses nothing: ``0.5 * v * (1 + erf(..))``, for one, has no
correct digit left at v = -9 even there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from jitconv.resources import templates_root

SQRT_HALF = math.sqrt(0.5)
LARGEST = torch.finfo(torch.float32).max
#: The distance between neighbouring subnormal numbers of float32.
SUBNORMAL_STEP = 2.0**-149
#: Below it a gelu may be 0, as torch's own is.
GELU_TAIL = 2.0**-122


@dataclass(frozen=True)
class Case:
    """One function and what it is compared with.

    ``call`` is C++ in terms of v, a second input w and two numbers p, q; ``numbers`` are the pairs
    (p, q) to try. ``torch`` and ``exact`` take (v, w, p, q).
    """

    name: str
    call: str
    torch: Callable[..., Tensor]
    exact: Callable[..., Tensor]
    numbers: tuple[tuple[float, float], ...] = ((0.0, 0.0),)
    #: False where torch's vector and scalar code differ on -0 against +0.
    sign_of_zero: bool = True
    #: Results below this may be as wrong as torch's own fp32 function is there.
    tail: float = 0.0

    def __str__(self) -> str:
        return self.name


def _unary(
    name: str, torch_function: Callable[[Tensor], Tensor], exact: Callable[[Tensor], Tensor], tail: float = 0.0
) -> Case:
    return Case(
        name,
        f"{name}(v)",
        lambda v, w, p, q: torch_function(v),
        lambda v, w, p, q: exact(v),
        tail=tail,
    )


def _gelu_tanh(v: Tensor) -> Tensor:
    return v * torch.sigmoid(math.sqrt(8 / math.pi) * (v + 0.044715 * v**3))


def _softplus(v: Tensor, w: Tensor, beta: float, threshold: float) -> Tensor:
    # On which side of the threshold v lies is decided in fp32, as torch does.
    linear = v.float() * beta > threshold
    z = v * beta
    return torch.where(linear, v, (z.clamp(min=0) + torch.log1p(torch.exp(-z.abs()))) / beta)


def _elu(v: Tensor, alpha: float, scale: float, inverse: float) -> Tensor:
    return torch.where(v < 0, scale * alpha * torch.expm1(v * inverse), scale * v)


_SELU_ALPHA = 1.6732632423543772848170429916717
_SELU_SCALE = 1.0507009873554804934193349852946

# Numbers are exact in fp32: a kernel receives fp32, and that rounding is not the function's error.
_ALPHAS = ((1.0, 0.0), (0.3125, 0.0), (7.5, 0.0), (-1.75, 0.0), (0.0, 0.0))
_BOUNDS = (
    (-1.0, 1.0),
    (-0.375, 2.5),
    (2.0, 1.0),
    (-math.inf, 3.0),
    (0.0, 0.0),
    (math.nan, 1.0),
    (-1.0, math.nan),
)

CASES = (
    _unary("relu", F.relu, F.relu),
    _unary("relu6", F.relu6, F.relu6),
    Case(
        "leaky_relu",
        "leaky_relu(v, p)",
        lambda v, w, p, q: F.leaky_relu(v, p),
        lambda v, w, p, q: F.leaky_relu(v, p),
        ((0.0, 0.0), (0.0078125, 0.0), (-0.3125, 0.0), (1.5, 0.0)),
    ),
    Case(
        "elu",
        "elu(v, p)",
        lambda v, w, p, q: F.elu(v, p),
        lambda v, w, p, q: _elu(v, p, 1.0, 1.0),
        _ALPHAS,
    ),
    _unary("selu", F.selu, lambda v: _elu(v, _SELU_ALPHA, _SELU_SCALE, 1.0)),
    Case(
        "celu",
        "celu(v, p)",
        lambda v, w, p, q: F.celu(v, p),
        lambda v, w, p, q: _elu(v, p, 1.0, 1.0 / p),
        _ALPHAS[:-1],
    ),
    _unary("gelu_erf", F.gelu, lambda v: v * (0.5 * torch.erfc(-v * SQRT_HALF)), GELU_TAIL),
    _unary("gelu_tanh", lambda v: F.gelu(v, approximate="tanh"), _gelu_tanh, GELU_TAIL),
    _unary("silu", F.silu, lambda v: v * torch.sigmoid(v)),
    _unary("mish", F.mish, F.mish),
    _unary("tanh", torch.tanh, torch.tanh),
    _unary("sigmoid", torch.sigmoid, torch.sigmoid),
    _unary("logsigmoid", F.logsigmoid, F.logsigmoid),
    Case(
        "softplus",
        "softplus(v, p, q)",
        lambda v, w, p, q: F.softplus(v, p, q),
        _softplus,
        (
            (1.0, 20.0),
            (0.7890625, 3.0),
            (5.5, 200.0),
            (-1.25, 20.0),
            (0.03125, 1.0),
            (1.0, math.inf),
        ),
    ),
    _unary("softsign", F.softsign, F.softsign),
    _unary("hardswish", F.hardswish, F.hardswish),
    _unary("hardsigmoid", F.hardsigmoid, F.hardsigmoid),
    Case(
        "hardtanh",
        "hardtanh(v, p, q)",
        lambda v, w, p, q: F.hardtanh(v, p, q),
        lambda v, w, p, q: v.clamp(p, q),
        _BOUNDS[:2],
    ),
    _unary("abs", torch.abs, torch.abs),
    _unary("neg", torch.neg, torch.neg),
    _unary("square", torch.square, torch.square),
    _unary("exp", torch.exp, torch.exp),
    _unary("sqrt", torch.sqrt, torch.sqrt),
    _unary("reciprocal", torch.reciprocal, torch.reciprocal),
    Case(
        "minimum",
        "minimum(v, w)",
        lambda v, w, p, q: torch.minimum(v, w),
        lambda v, w, p, q: torch.minimum(v, w),
        sign_of_zero=False,
    ),
    Case(
        "maximum",
        "maximum(v, w)",
        lambda v, w, p, q: torch.maximum(v, w),
        lambda v, w, p, q: torch.maximum(v, w),
        sign_of_zero=False,
    ),
    Case(
        "clamp",
        "clamp(v, p, q)",
        lambda v, w, p, q: torch.clamp(v, p, q),
        lambda v, w, p, q: torch.clamp(v, p, q),
        _BOUNDS,
    ),
    Case(
        "clamp_min",
        "clamp_min(v, p)",
        lambda v, w, p, q: torch.clamp_min(v, p),
        lambda v, w, p, q: torch.clamp_min(v, p),
        _BOUNDS,
    ),
    Case(
        "clamp_max",
        "clamp_max(v, q)",
        lambda v, w, p, q: torch.clamp_max(v, q),
        lambda v, w, p, q: torch.clamp_max(v, q),
        _BOUNDS,
    ),
)


#: The approximate instructions that the functions above are made of.
INSTRUCTIONS = (
    Case(
        "exp2_approximate",
        "detail::exp2_approximate(v)",
        lambda v, w, p, q: torch.exp2(v),
        lambda v, w, p, q: torch.exp2(v),
    ),
    Case(
        "reciprocal_approximate",
        "detail::reciprocal_approximate(v)",
        lambda v, w, p, q: torch.reciprocal(v),
        lambda v, w, p, q: torch.reciprocal(v),
    ),
)

_INF = math.inf
#: Pairs (v, result) for each of the instructions: overflow, and subnormals that count as zero.
AT_THE_EDGES = (
    ((-127.0, 0.0), (-126.0, 2.0**-126), (128.0, _INF), (1e-40, 1.0), (-_INF, 0.0), (_INF, _INF), (3.0, 8.0)),
    ((1e-40, _INF), (-1e-40, -_INF), (0.0, _INF), (-0.0, -_INF), (2.0**127, 0.0), (2.0**126, 2.0**-126), (_INF, 0.0)),
)


def special() -> tuple[Tensor, Tensor]:
    """Every pair (v, w) of zeros, infinities, NaN and 1."""
    values = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1.0])
    v, w = torch.meshgrid(values, values, indexing="ij")
    return v.flatten(), w.flatten()


def sweep() -> tuple[Tensor, Tensor]:
    """Finite pairs (v, w). v: all exponents, both signs, 2048 mantissas each; [-120, 120] evenly.

    w is v in another order, with equal and opposite values mixed in.
    """
    generator = torch.Generator().manual_seed(0)
    exponents = torch.arange(255, dtype=torch.int32)[:, None] << 23
    mantissas = torch.arange(2048, dtype=torch.int32) << 12
    jitter = torch.randint(0, 1 << 12, (255, 2048), generator=generator, dtype=torch.int32)
    jitter[:, 0] = 0
    jitter[:, -1] = (1 << 12) - 1
    positive = (exponents + mantissas + jitter).view(torch.float32).flatten()
    v = torch.cat([positive, -positive, torch.linspace(-120, 120, 1 << 19)])
    w = v.roll(12345)
    w[::5] = v[::5]
    w[1::5] = -v[1::5]
    return v, w


def beyond_bound(case: Case, v: Tensor, got: Tensor, exact: Tensor, torch_fp32: Tensor | None = None) -> str:
    """Describe the point where ``got`` exceeds its bound by most; empty when there is none.

    The bound is 1e-6 |exact| and half a subnormal step, and the error of ``torch_fp32`` if that is
    given and larger. Where the exact value exceeds the largest float, ``got`` may be infinite or
    within the bound of the largest.
    """
    in_range = exact.clamp(-LARGEST, LARGEST)
    bound = 1e-6 * in_range.abs().nan_to_num(0.0) + SUBNORMAL_STEP / 2
    if torch_fp32 is not None:
        own = (torch_fp32.double() - in_range).abs().nan_to_num(0.0, posinf=0.0)
        bound = torch.maximum(bound, own)
    overflow = (exact.abs() > LARGEST) & got.isinf() & (got.sign() == exact.sign())
    error = torch.where(overflow, 0.0, (got.double() - in_range).abs())
    error = torch.where(exact.isnan(), torch.where(got.isnan(), 0.0, math.inf), error)
    excess = (error / bound).nan_to_num(math.inf)
    at = int(excess.argmax())
    if excess[at] <= 1:
        return ""
    return (
        f"{case.name} at v={v[at].item()!r}: got {got[at].item()!r}, exact {exact[at].item()!r}, "
        f"error {error[at].item():.3e} > bound {bound[at].item():.3e}; "
        f"{int((excess > 1).sum())} such points"
    )


def tail_of_torch(case: Case, v: Tensor, w: Tensor, p: float, q: float, exact: Tensor) -> Tensor | None:
    """The exact results but for torch's own fp32 in the case's tail: what ``beyond_bound`` may measure against."""
    if not case.tail:
        return None
    return torch.where(exact.abs() < case.tail, case.torch(v, w, p, q).double(), exact)


#: How far from the correctly rounded result the approximate instructions may be, in units in the last place.
EXP2_ULP = 2
RECIPROCAL_ULP = 1

# The two approximate instructions, off by as many units as set_error says. Powers of two stay exact, as they are on
# the hardware (tests/gpu asks it).
_HOST_INSTRUCTIONS = """
#include <cmath>
#include <cstdint>
#include <cstring>

static int exp2_error = 0, reciprocal_error = 0;

extern "C" void set_error(int exp2_ulp, int reciprocal_ulp) {
    exp2_error = exp2_ulp;
    reciprocal_error = reciprocal_ulp;
}

static inline float off_by(float value, int ulp) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint32_t exponent = bits & 0x7f800000u;
    if (exponent == 0 || exponent == 0x7f800000u || (bits & 0x007fffffu) == 0) return value;
    bits += static_cast<uint32_t>(ulp);
    memcpy(&value, &bits, sizeof value);
    return value;
}

#define JITCONV_EXP2(x) off_by(exp2f(x), exp2_error)
#define JITCONV_RECIPROCAL(d) off_by(1.0f / (d), reciprocal_error)
#include "device/activations.cuh"
"""


def host_source() -> str:
    """C++ with one function ``run_NAME(v, w, result, count, p, q)`` for every case and instruction.

    ``set_error(exp2_ulp, reciprocal_ulp)`` makes the approximate instructions wrong by so many units in the last place.
    """
    functions = (
        f"""extern "C" void run_{case.name}(const float* vs, const float* ws, float* result,
                                   int64_t count, float p, float q) {{
    for (int64_t i = 0; i < count; ++i) {{
        const float v = vs[i], w = ws[i];
        (void)w, (void)p, (void)q;
        result[i] = jitconv::act::{case.call};
    }}
}}
"""
        for case in (*CASES, *INSTRUCTIONS)
    )
    return _HOST_INSTRUCTIONS + "\n".join(functions)


def kernel_source(cases: Sequence[Case], name: str) -> str:
    """CUDA kernel ``name``: ``result[k * count + i]`` is case k applied to element i."""
    stores = "\n".join(
        f"        arguments.result[{k} * arguments.count + i] = jitconv::act::{case.call};"
        for k, case in enumerate(cases)
    )
    return f"""#include "device/activations.cuh"

struct Arguments {{
    const float* v;
    const float* w;
    float* result;
    int64_t count;
    float p, q;
}};

extern "C" __global__ void __launch_bounds__(256) {name}(const Arguments arguments) {{
    const float p = arguments.p, q = arguments.q;
    const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
         i < arguments.count; i += stride) {{
        const float v = arguments.v[i], w = arguments.w[i];
{stores}
    }}
}}
"""


def headers() -> dict[str, str]:
    """The device headers that both sources include, by include name."""
    names = ("device/platform.cuh", "device/activations.cuh")
    return {name: (templates_root() / name).read_text(encoding="utf-8") for name in names}
