"""Every step of the epilogue in every place of every kernel: generated kernels in the emulator against torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from jitconv import epilogue as E
from jitconv import program
from jitconv.emulate import Schedule
from jitconv.planning.tiles import MAX_POOLED_ROW
from jitconv.render import kernel_key
from tests.strategies import (
    BINARY,
    OPERANDS,
    POINTWISE,
    Case,
    Twin,
    assert_matches,
    binary,
    layer_norm,
    make_tensor,
    pool,
    run_emulated,
    twin,
)

pytestmark = pytest.mark.compiler

SHAPE = (2, 3, 4, 5, 6)
IN_FAMILIES = ("conv3d", "conv_transpose3d", "depthwise_separable_conv2d")


def convolution(function: str, shape: Sequence[int], chain: Sequence[Twin], **changes: Any) -> Case:
    """A convolution of 1x1 filters whose value has ``shape`` and magnitude one, with ``chain`` behind it."""
    channels, dtype = 2, changes.pop("dtype", torch.float32)
    outputs, ones = shape[1], (1,) * (len(shape) - 2)
    x = make_tensor((shape[0], channels, *shape[2:]), dtype, seed=7)
    pair = (channels, outputs) if "transpose" in function else (outputs, channels)
    weights = (make_tensor((*pair, *ones), dtype, seed=8, scale=0.7),)
    biases: tuple[Tensor | None, ...] = (make_tensor((outputs,), dtype, seed=9, scale=0.3),)
    if function.startswith("depthwise"):
        weights = (make_tensor((channels, 1, 1, 1), dtype, seed=10), *weights)
        biases = (None, *biases)
    return Case(function, x, weights, biases, chain=tuple(chain), **changes)


def check(case: Case, **options: Any) -> Tensor:
    result = run_emulated(case.call(), **options)
    assert_matches(case, result)
    return result


def families(case: Case) -> list[str]:
    return [launch.kernel.family for launch in program.build(case.call(), "sm_75").launches]


# ---- Pointwise steps ----------------------------------------------------------------------------------------

BEFORE = {
    # Where a step is undefined or without bounded slope, the value is first brought to safe ground.
    "sqrt": [POINTWISE["square"], lambda: twin(E.add(0.5), lambda v: v + 0.5)],
    "reciprocal": [POINTWISE["square"], lambda: twin(E.add(0.5), lambda v: v + 0.5)],
    "exp": [lambda: twin(E.clamp(-4.0, 2.0), lambda v: v.clamp(-4.0, 2.0))],
}


@pytest.mark.parametrize("function", IN_FAMILIES)
@pytest.mark.parametrize("half", [0, 1, 2])
def test_a_pointwise_step_is_wrong_behind_a_convolution(function: str, half: int) -> None:
    steps: list[Twin] = []
    for name in list(POINTWISE)[half::3]:
        steps += [make() for make in BEFORE.get(name, ())] + [POINTWISE[name]()]
        # The convolution's own value again, so that no step flattens what the next one sees.
        steps += [twin(E.mul(0.25), lambda v: v * 0.25), Twin(E.add(E.CONV), torch.add)]
    shape = SHAPE if function != "depthwise_separable_conv2d" else (2, 3, 5, 6)
    check(convolution(function, shape, steps))


@pytest.mark.parametrize("name", list(BINARY))
@pytest.mark.parametrize("function", IN_FAMILIES)
def test_an_operand_is_read_wrongly_behind_a_convolution(function: str, name: str) -> None:
    shape = SHAPE if function != "depthwise_separable_conv2d" else (2, 3, 5, 6)
    steps = operand_steps(name, shape)
    check(convolution(function, shape, steps))


def operand_steps(name: str, shape: Sequence[int], kinds: Sequence[str] = OPERANDS) -> list[Twin]:
    """Step ``name`` with every kind of operand, in every layout and dtype that operands may have."""
    steps: list[Twin] = []
    for i, kind in enumerate(kinds):
        if kind == "conv" and name == "div":
            # Away from zero, where the quotient would have no digits that count.
            steps += [twin(E.abs(), torch.abs), twin(E.add(1.0), lambda v: v + 1.0)]
            continue
        layout = ("contiguous", "sliced", "permuted", "expanded", "channels_last")[i % 5]
        steps.append(binary(name, kind, shape, seed=i, layout=layout))
    return steps


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_operands_of_another_dtype_are_read_wrongly(dtype: torch.dtype) -> None:
    # float32 and the dtype of x side by side; one-element operands of float64 too.
    steps = [
        binary("add", "channel", SHAPE, dtype=dtype, seed=1, layout="sliced"),
        binary("mul", "tensor", SHAPE, dtype=torch.float32, seed=2),
        binary("sub", "broadcast", SHAPE, dtype=dtype, seed=3),
        binary("add", "scalar", SHAPE, dtype=torch.float64, seed=4),
        binary("mul", "one_element", SHAPE, dtype=dtype, seed=5),
        binary("minimum", "channel", SHAPE, dtype=torch.float32, seed=6, layout="expanded"),
    ]
    check(convolution("conv3d", SHAPE, steps, dtype=dtype))
    check(convolution("conv3d", SHAPE, [*steps, layer_norm(6), pool("avg", 2), *steps[3:5]], dtype=dtype))


def test_layer_norm_reads_a_strided_or_half_precision_weight_wrongly() -> None:
    weight, bias = make_tensor((6,), torch.bfloat16, "sliced", seed=1), make_tensor((1,), seed=2).expand(6)

    def function(v: Tensor, conv: Tensor) -> Tensor:
        return F.layer_norm(v, (6,), weight.to(v.dtype), bias.to(v.dtype))

    step = Twin(E.layer_norm(6, weight, bias), function)
    check(convolution("conv3d", SHAPE, [step], dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("low", "high"),
    [(-0.25, "channel"), ("channel", 0.5), ("scalar", 0.5), ("tensor", "channel"), ("conv", 0.25), (-0.5, "conv")],
)
def test_clamp_of_a_mixture_of_operands_is_wrong(low: Any, high: Any) -> None:
    shape = (2, 3, 5, 6)

    def operand(kind: Any, seed: int) -> tuple[Any, Callable[[Tensor, Tensor], Tensor]]:
        if isinstance(kind, float):
            return kind, lambda v, conv: torch.as_tensor(kind, dtype=v.dtype)
        if kind == "conv":
            return E.CONV, lambda v, conv: conv
        shapes = {"channel": (3,), "scalar": (), "tensor": shape}
        tensor = make_tensor(shapes[kind], seed=seed, scale=0.5)
        aligned = tensor.view(3, 1, 1) if kind == "channel" else tensor
        return tensor, lambda v, conv: aligned.to(v.dtype)

    (minimum, torch_minimum), (maximum, torch_maximum) = operand(low, 1), operand(high, 2)
    step = Twin(
        E.clamp(minimum, maximum),
        lambda v, conv: torch.minimum(torch.maximum(v, torch_minimum(v, conv)), torch_maximum(v, conv)),
    )
    check(convolution("conv2d", shape, [twin(E.neg(), torch.neg), step]))


# ---- Around rows and windows ----------------------------------------------------------------------------------

AROUND: dict[str, tuple[list[Twin], list[str]]] = {
    "norm": ([layer_norm(6)], ["conv", "layer_norm"]),
    "norm_pool": ([layer_norm(6), pool("avg", 2)], ["conv", "layer_norm"]),
    "pool": ([pool("max", (1, 2, 3))], ["conv", "pool"]),
    "pool_norm": ([pool("avg", 2), layer_norm(3)], ["conv", "pool", "layer_norm"]),
    "norm_norm": ([layer_norm(6), layer_norm(6, affine=False)], ["conv", "layer_norm", "layer_norm"]),
    "pool_pool": ([pool("max", 2), pool("avg", (1, 2, 1))], ["conv", "pool", "pool"]),
    "norm_pool_norm_pool": (
        [layer_norm(6), pool("avg", (1, 1, 2)), layer_norm(3, affine=False), pool("max", 2)],
        ["conv", "layer_norm", "layer_norm"],
    ),
}


@pytest.mark.parametrize("name", list(AROUND))
def test_rows_and_windows_are_wrong(name: str) -> None:
    steps, kernels = AROUND[name]
    case = convolution("conv3d", SHAPE, steps)
    assert families(case) == kernels
    check(case)


@pytest.mark.parametrize("name", ["norm", "norm_pool", "pool", "norm_pool_norm_pool"])
def test_an_operand_around_rows_and_windows_is_read_wrongly(name: str) -> None:
    # Every kind of operand before, between and after; each at the shape that the value has there.
    steps, shape = [], SHAPE
    steps += operand_steps("add", shape)
    for i, t in enumerate(AROUND[name][0]):
        steps.append(t)
        shape = tuple(t.torch(torch.zeros(shape), torch.zeros(0)).shape)
        kinds = [kind for kind in OPERANDS if kind != "conv" or shape == SHAPE]
        steps += operand_steps("sub" if i % 2 else "mul", shape, kinds)
    check(convolution("conv3d", SHAPE, steps))


@pytest.mark.parametrize("function", IN_FAMILIES)
def test_the_convolutions_own_value_is_lost_behind_a_norm(function: str) -> None:
    shape = SHAPE if function != "depthwise_separable_conv2d" else (2, 3, 5, 6)
    chain = [
        twin(E.relu(), F.relu),
        layer_norm(6),
        binary("add", "conv", shape),
        twin(E.tanh(), torch.tanh),
        layer_norm(6, affine=False),
        binary("mul", "conv", shape),
        pool("max", (2,) * (len(shape) - 2)),
    ]
    check(convolution(function, shape, chain))


def test_the_convolutions_own_value_is_lost_before_a_pool() -> None:
    chain = [layer_norm(6), twin(E.relu(), F.relu), layer_norm(6), binary("mul", "conv", SHAPE), pool("avg", 3, True)]
    check(convolution("conv3d", SHAPE, chain))
    chain = [twin(E.relu(), F.relu), binary("sub", "conv", SHAPE), pool("avg", 2)]
    case = convolution("conv3d", SHAPE, chain)
    assert families(case) == ["conv", "pool"]
    check(case)


def test_the_convolutions_own_value_is_lost_behind_a_pool_that_keeps_the_shape() -> None:
    relu, mul, add = twin(E.relu(), F.relu), binary("mul", "conv", SHAPE), binary("add", "conv", SHAPE)
    check(convolution("conv3d", SHAPE, [relu, pool("max", 1), add]))
    check(convolution("conv3d", SHAPE, [layer_norm(6), pool("avg", 1), mul]))
    # Not in the kernel behind the convolution, which reads that value as its source, but in a later one.
    check(convolution("conv3d", SHAPE, [pool("avg", 1), relu, pool("max", 1), mul]))
    check(convolution("conv3d", SHAPE, [layer_norm(6), relu, layer_norm(6), pool("max", 1), add]))
    # A window that hangs over an axis of one entry.
    check(convolution("conv1d", (2, 3, 1), [relu, pool("avg", 2, True), binary("add", "conv", (2, 3, 1))]))


@pytest.mark.parametrize("rank", [1, 2])
def test_rows_and_windows_are_wrong_in_fewer_dimensions(rank: int) -> None:
    shape = (3, 4, *(5, 6)[2 - rank :])
    check(convolution(f"conv{rank}d", shape, [layer_norm(6), pool("avg", 2), twin(E.gelu(), F.gelu)]))
    check(convolution(f"conv_transpose{rank}d", shape, [pool("max", 2, True), layer_norm(3)]))


WINDOWS = [(1, 1, 2), (1, 2, 1), (2, 1, 1), (3, 2, 4), (4, 5, 6), (1, 1, 1), (7, 1, 4)]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("kind", ["avg", "max"])
def test_a_window_is_wrong_where_it_hangs_over(kind: str, window: tuple[int, int, int]) -> None:
    for ceil_mode in (False, True):
        if window[0] <= SHAPE[2] or (ceil_mode and kind == "max"):
            check(convolution("conv3d", SHAPE, [pool(kind, window, ceil_mode)]))


@pytest.mark.parametrize("window", [(1, 1, 4), (3, 1, 1), (1, 3, 1), (3, 4, 5)], ids=str)
@pytest.mark.parametrize("kind", ["avg", "max"])
def test_a_window_behind_a_norm_is_wrong_where_it_hangs_over(kind: str, window: tuple[int, int, int]) -> None:
    for ceil_mode in (False, True):
        check(convolution("conv3d", SHAPE, [layer_norm(6), pool(kind, window, ceil_mode)]))


# ---- Rows of every length -------------------------------------------------------------------------------------

WIDTHS = (1, 2, 3, 5, 16, 32, 33, 64, 257, 1024, 1025, 9000)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_row_of_some_length_is_normalised_wrongly(width: int) -> None:
    # Two or three values may lie so close together that their difference has few digits.
    check(convolution("conv2d", (2, 3, 3, width), [layer_norm(width, eps=0.1 if width < 4 else 1e-5)]))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", ["avg", "max"])
def test_a_row_of_some_length_is_pooled_wrongly(width: int, kind: str) -> None:
    case = convolution("conv2d", (1, 3, 5, width), [layer_norm(width), pool(kind, (2, min(width, 3)), True)])
    # A row that does not fit shared memory is pooled by a kernel of its own.
    assert families(case) == ["conv", "layer_norm"] + ["pool"] * (width > MAX_POOLED_ROW)
    check(case)


@pytest.mark.parametrize("width", [33, 1025])
def test_a_row_that_is_constant_or_far_from_zero_loses_its_digits(width: int) -> None:
    # x passes through a filter of one: the rows are exact, so every error is the norm's own.
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1, 1, 6, width, generator=generator)
    offset = torch.tensor([0.0, 1e4, -1e4, 3.0, 1e4, 1e-3]).view(1, 1, 6, 1)
    scale = torch.tensor([1.0, 1.0, 1e-2, 0.0, 0.0, 1e-6]).view(1, 1, 6, 1)
    x = offset + scale * noise
    case = Case("conv2d", x, (torch.ones(1, 1, 1, 1),), chain=(layer_norm(width, affine=False),))
    result, exact = run_emulated(case.call()), case.expected()
    # Rows keep fp32's precision whatever their mean.
    torch.testing.assert_close(result.double(), exact, rtol=2e-6, atol=2e-6)


# ---- NaN and Inf ----------------------------------------------------------------------------------------------

SPECIAL_CHAINS: dict[str, list[Twin]] = {
    "max_pool": [pool("max", 2)],
    "avg_pool": [pool("avg", 2)],
    "norm": [layer_norm(6, affine=False)],
    "norm_max_pool": [layer_norm(6, affine=False), pool("max", 2)],
    "minimum_maximum": [binary("minimum", "number", SHAPE), binary("maximum", "channel", SHAPE)],
    "nan_operand": [
        Twin(E.minimum(torch.tensor(torch.nan)), lambda v, conv: torch.minimum(v, torch.tensor(torch.nan).to(v)))
    ],
    "clamp": [twin(E.clamp(-1.0, 1.0), lambda v: v.clamp(-1.0, 1.0))],
    "clamp_nan": [twin(E.clamp(max=torch.nan), lambda v: v.clamp(max=torch.nan))],
    "relu6": [twin(E.relu6(), F.relu6), twin(E.hardswish(), F.hardswish)],
    "all_infinite": [twin(E.mul(torch.inf), lambda v: v * torch.inf), pool("max", 2)],
    "smallest": [twin(E.mul(-torch.inf), lambda v: v * -torch.inf), pool("max", (1, 1, 2)), pool("max", (2, 2, 1))],
}


@pytest.mark.parametrize("name", list(SPECIAL_CHAINS))
def test_nan_and_inf_behave_as_nowhere_in_torch(name: str) -> None:
    x = make_tensor((2, 1, 4, 5, 6), seed=3)
    x[0, 0, 0, 0, 0], x[0, 0, 1, 2, 3], x[1, 0, 2, 2, 2], x[1, 0, 3, 4, 5] = torch.nan, torch.inf, -torch.inf, 0.0
    check(Case("conv3d", x, (torch.tensor([1.0, -0.5, 2.0]).view(3, 1, 1, 1, 1),), chain=tuple(SPECIAL_CHAINS[name])))


@pytest.mark.parametrize("number", [1e39, -1e39, 1e300, 10**40, torch.inf, torch.nan])
def test_a_number_beyond_float32_cannot_be_passed(number: float) -> None:
    # torch rounds it to an infinity.
    step = twin(E.minimum(number), lambda v: torch.minimum(v, torch.tensor(float(number)).to(v.dtype)))
    check(convolution("conv1d", (1, 2, 5), [step]))


# ---- Registered steps -----------------------------------------------------------------------------------------


def test_a_registered_step_with_a_preamble_does_not_compile() -> None:
    snake = E.register(
        "snake",
        cuda="snake_of(v, frequency)",
        torch=lambda v, frequency: v + torch.sin(frequency * v) ** 2 / frequency,
        operands=("frequency",),
        preamble="__device__ inline float snake_of(float v, float f) {\n    const float s = sinf(f * v);\n"
        "    return v + s * s / f;\n}",
    )
    frequency = make_tensor((3,), seed=1).abs() + 0.5
    per_channel = Twin(
        snake(frequency),
        lambda v, conv: v + torch.sin(frequency.to(v).view(3, 1, 1, 1) * v) ** 2 / frequency.to(v).view(3, 1, 1, 1),
    )
    twice = twin(snake(frequency=2.0), lambda v: v + torch.sin(2.0 * v) ** 2 / 2.0)
    # Used twice, before and after other kernels: its preamble stands once in each.
    check(convolution("conv3d", SHAPE, [per_channel, twice, layer_norm(6), twice, pool("avg", 2), per_channel]))


def test_a_registered_step_that_spans_lines_does_not_compile() -> None:
    bent = E.register("bent", cuda="v > 0.0f\n    ? v * gain\n    : v", torch=lambda v, gain: v, operands=("gain",))
    step = Twin(bent(E.CONV), lambda v, conv: torch.where(v > 0, v * conv, v))
    check(convolution("conv1d", (1, 2, 5), [step]))


def test_two_steps_of_one_name_are_taken_for_one() -> None:
    first = E.register("mine", cuda="v + 1.0f", torch=lambda v: v + 1)
    second = E.register("mine", cuda="v * 3.0f", torch=lambda v: v * 3)
    check(convolution("conv1d", (1, 2, 5), [twin(first(), lambda v: v + 1), twin(second(), lambda v: v * 3)]))


# ---- Numbers are arguments ------------------------------------------------------------------------------------


def keys(case: Case) -> list[str]:
    return [kernel_key(launch.kernel, "sm_90a", ()) for launch in program.build(case.call(), "sm_75").launches]


def test_another_number_compiles_another_kernel() -> None:
    def case(a: float, slope: float, eps: float, scalar: float) -> Case:
        value = torch.tensor(scalar)
        chain = [
            twin(E.add(a), lambda v: v + a),
            twin(E.leaky_relu(slope), lambda v: F.leaky_relu(v, slope)),
            twin(E.clamp(-a, a), lambda v: v.clamp(-a, a)),
            twin(E.softplus(a, 20.0), lambda v: F.softplus(v, a, 20.0)),
            layer_norm(6, eps=eps),
            Twin(E.mul(value), lambda v, conv: v * value.to(v)),
            pool("avg", 2),
            twin(E.elu(slope), lambda v: F.elu(v, slope)),
        ]
        return convolution("conv3d", SHAPE, chain)

    first, second = case(1.5, 0.1, 1e-5, 2.0), case(0.25, 0.3, 0.5, -1.0)
    assert keys(first) == keys(second)
    check(first)
    check(second)


def test_large_workspaces_mix_up_their_rows() -> None:
    # Many blocks of every kernel, in the fast build.
    case = convolution("conv3d", (3, 5, 7, 9, 66), [layer_norm(66), pool("avg", 2), twin(E.gelu(), F.gelu)])
    check(case, sanitize=False, schedules=(Schedule(),))
