"""Every operator on every kind of shape, layout and dtype: generated kernels in the emulator against torch in float64.

A parametrised test builds one kernel and runs it at many sizes and layouts, which are arguments of the kernel.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from jitconv import program
from jitconv.emulate import Schedule
from tests.strategies import (
    CHANNELS_LAST,
    Case,
    assert_matches,
    expected_format,
    layer_norm,
    make_tensor,
    pool,
    random_case,
    run_emulated,
    twin,
)

pytestmark = pytest.mark.compiler

ONE_SCHEDULE = (Schedule(),)


def check(case: Case, **options: Any) -> Tensor:
    """Run ``case`` in the emulator; its result must match torch in float64, its strides the memory format's rule."""
    result = run_emulated(case.call(), **options)
    assert_matches(case, result)
    expected = torch.empty(result.shape, memory_format=expected_format(case.x, case.weights))
    assert result.stride() == expected.stride(), case
    return result


class Kernel(NamedTuple):
    """One kernel and the sizes to run it at: (batch, spatial extents)."""

    function: str
    channels: int
    outputs: int
    kernel: tuple[int, ...]
    parameters: dict[str, Any]
    sizes: list[tuple[int, tuple[int, ...]]]
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        parameters = ",".join(f"{name}={value}" for name, value in self.parameters.items())
        kernel = "x".join(map(str, self.kernel))
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.function}-{self.channels}to{self.outputs}-k{kernel}-{parameters.replace(' ', '')}-{dtype}"

    def case(self, batch: int, extents: tuple[int, ...], layout: str, *, seed: int = 0, bias: bool = True) -> Case:
        groups = self.parameters.get("groups", 1)
        pair = (self.outputs, self.channels // groups)
        if "transpose" in self.function:
            pair = (self.channels, self.outputs // groups)
        # Layouts that a kernel does not know of: strides are arguments.
        weight_layout = {"contiguous": "contiguous", "sliced": "permuted"}.get(layout, "sliced")
        return Case(
            self.function,
            make_tensor((batch, self.channels, *extents), self.dtype, layout, seed=seed),
            (make_tensor((*pair, *self.kernel), self.dtype, weight_layout, seed=seed + 1, scale=0.25),),
            (make_tensor((self.outputs,), self.dtype, weight_layout, seed=seed + 2) if bias else None,),
            self.parameters,
        )


def run_everywhere(kernel: Kernel) -> None:
    """Every size in turn, each in another layout, and an empty batch."""
    layouts = ("contiguous", "sliced", "permuted", "expanded")
    for i, (batch, extents) in enumerate(kernel.sizes):
        check(kernel.case(batch, extents, layouts[i % len(layouts)], seed=10 * i))
    empty = run_emulated(kernel.case(0, kernel.sizes[0][1], "contiguous").call())
    assert empty.shape[0] == 0


HALF, BF16 = torch.float16, torch.bfloat16
LINES = [(1, (7,)), (3, (129,)), (2, (300,)), (5, (16,))]
PLANES = [(1, (5, 6)), (3, (9, 31)), (2, (17, 8)), (7, (6, 6))]
BOXES = [(1, (4, 3, 5)), (3, (5, 6, 7)), (2, (3, 9, 4)), (1, (6, 6, 6))]

FORWARD = [
    # One output channel, a filter of one element: the smallest tile and the shortest reduction.
    Kernel("conv1d", 1, 1, (1,), {}, [(1, (1,)), (3, (257,)), (2, (300,)), (1, (2,))]),
    Kernel("conv1d", 3, 2, (3,), {"stride": 2, "padding": 1}, LINES),
    Kernel("conv1d", 5, 4, (4,), {"dilation": 3, "padding": ((9, 0),)}, LINES),
    Kernel("conv1d", 17, 8, (4,), {"padding": "same"}, LINES, HALF),
    Kernel("conv1d", 64, 64, (1,), {"stride": 3}, LINES),
    Kernel("conv1d", 2, 6, (2,), {"stride": 4, "padding": "valid", "groups": 2}, LINES, BF16),
    # One output channel more than each tile has, so that the second tile is almost empty.
    Kernel("conv2d", 3, 16, (3, 3), {"padding": 1}, PLANES),
    Kernel("conv2d", 5, 17, (2, 3), {"stride": (2, 1), "padding": (0, 1)}, PLANES),
    Kernel("conv2d", 17, 33, (3, 1), {"stride": (1, 3), "dilation": (2, 1), "padding": (2, 0)}, PLANES, HALF),
    Kernel("conv2d", 96, 65, (1, 1), {}, PLANES),
    Kernel("conv2d", 1, 130, (5, 2), {"stride": 4}, PLANES),
    Kernel("conv2d", 3, 32, (4, 4), {"stride": 2, "padding": ((1, 2), (0, 3))}, PLANES, BF16),
    # Groups that do not fill a tile; depthwise; channel multipliers.
    Kernel("conv2d", 10, 15, (3, 3), {"groups": 5, "padding": 1}, PLANES),
    Kernel("conv2d", 5, 5, (3, 2), {"groups": 5, "dilation": 2}, PLANES),
    Kernel("conv2d", 3, 6, (3, 3), {"groups": 3, "stride": 2, "padding": 1}, PLANES, HALF),
    Kernel("conv2d", 34, 66, (1, 3), {"groups": 2}, PLANES),
    Kernel("conv3d", 3, 5, (3, 3, 3), {"padding": 1}, BOXES),
    Kernel("conv3d", 2, 32, (1, 2, 3), {"stride": (1, 2, 1), "padding": (0, 1, 2)}, BOXES),
    Kernel("conv3d", 4, 8, (3, 3, 3), {"padding": ((2, 0), 1, 1), "groups": 2}, BOXES, BF16),
    Kernel("conv3d", 5, 64, (2, 1, 1), {"stride": (3, 2, 4), "dilation": (2, 1, 1)}, BOXES, HALF),
    # What is outside of x, by every mode, with each side of each axis padded differently.
    Kernel("conv1d", 2, 3, (3,), {"padding_mode": "reflect", "padding": ((6, 2),)}, LINES),
    Kernel("conv1d", 2, 3, (5,), {"padding_mode": "circular", "padding": ((7, 0),)}, LINES),
    Kernel("conv2d", 2, 3, (3, 3), {"padding_mode": "replicate", "padding": ((3, 9), (0, 4))}, PLANES),
    Kernel("conv2d", 2, 3, (3, 3), {"padding_mode": "reflect", "padding": ((4, 1), (0, 3))}, PLANES),
    Kernel("conv2d", 2, 3, (2, 3), {"padding_mode": "circular", "padding": "same", "dilation": 2}, PLANES),
    Kernel("conv3d", 2, 3, (3, 2, 3), {"padding_mode": "circular", "padding": ((3, 1), (2, 0), 1)}, BOXES),
    Kernel("conv3d", 2, 3, (2, 3, 3), {"padding_mode": "reflect", "padding": ((2, 1), (0, 2), 1), "stride": 2}, BOXES),
    Kernel("conv3d", 2, 3, (2, 3, 1), {"padding_mode": "replicate", "padding": ((2, 7), (0, 5), 1)}, BOXES),
]

TRANSPOSED = [
    Kernel("conv_transpose1d", 1, 1, (1,), {}, [(1, (1,)), (3, (257,)), (2, (300,)), (1, (2,))]),
    Kernel("conv_transpose1d", 3, 2, (16,), {"stride": 8, "padding": 4}, LINES),
    Kernel("conv_transpose1d", 5, 4, (3,), {"dilation": 3, "padding": 2}, LINES, HALF),
    Kernel("conv_transpose1d", 17, 8, (4,), {"stride": 3, "output_padding": 2}, LINES),
    # Holes: the stride is wider than the filter, so some outputs are the bias alone.
    Kernel("conv_transpose1d", 2, 6, (2,), {"stride": 5, "output_padding": 4, "groups": 2}, LINES, BF16),
    Kernel("conv_transpose2d", 3, 16, (3, 3), {"stride": 2, "padding": 1, "output_padding": 1}, PLANES),
    Kernel("conv_transpose2d", 5, 17, (2, 3), {"stride": (2, 1), "padding": (0, 1)}, PLANES),
    Kernel("conv_transpose2d", 3, 33, (1, 1), {"stride": (3, 2)}, PLANES),
    Kernel("conv_transpose2d", 33, 65, (3, 1), {"stride": (1, 3), "dilation": (2, 1)}, PLANES, HALF),
    Kernel("conv_transpose2d", 1, 130, (4, 2), {"stride": 2, "padding": (2, 1)}, PLANES),
    # Stride and dilation share a factor, so whole classes have no taps.
    Kernel("conv_transpose2d", 2, 3, (3, 3), {"stride": 4, "dilation": 2, "output_padding": 3}, PLANES),
    Kernel("conv_transpose2d", 10, 15, (3, 3), {"groups": 5, "stride": 2, "padding": 1}, PLANES),
    Kernel("conv_transpose2d", 5, 5, (3, 2), {"groups": 5, "dilation": 2, "output_padding": (0, 1)}, PLANES, BF16),
    Kernel("conv_transpose2d", 4, 12, (2, 2), {"groups": 4, "stride": 2}, PLANES),
    Kernel("conv_transpose3d", 3, 5, (3, 3, 3), {"stride": 2, "padding": 1, "output_padding": 1}, BOXES),
    Kernel("conv_transpose3d", 2, 32, (1, 2, 3), {"stride": (1, 2, 1), "padding": (0, 0, 1)}, BOXES),
    Kernel("conv_transpose3d", 4, 8, (2, 3, 1), {"groups": 2, "stride": (3, 1, 2), "dilation": (1, 2, 3)}, BOXES, HALF),
    Kernel("conv_transpose3d", 3, 64, (2, 2, 2), {"stride": 2}, BOXES),
]


@pytest.mark.parametrize("kernel", FORWARD, ids=str)
def test_a_convolution_is_wrong_at_some_size_or_layout(kernel: Kernel) -> None:
    run_everywhere(kernel)


@pytest.mark.parametrize("kernel", TRANSPOSED, ids=str)
def test_a_transposed_convolution_is_wrong_at_some_size_or_layout(kernel: Kernel) -> None:
    run_everywhere(kernel)


class Separable(NamedTuple):
    channels: int
    multiplier: int
    outputs: int
    kernel: tuple[int, int]
    parameters: dict[str, Any]
    biases: tuple[bool, bool]
    dtype: torch.dtype = torch.float32
    between: tuple[str, ...] = ()

    def case(self, batch: int, extents: tuple[int, int], layout: str, seed: int = 0) -> Case:
        middle = self.channels * self.multiplier
        other = "sliced" if layout != "sliced" else "permuted"

        def tensor(*shape: int, at: int, scale: float = 1.0) -> Tensor:
            return make_tensor(shape, self.dtype, other, seed=seed + at, scale=scale)

        return Case(
            "depthwise_separable_conv2d",
            make_tensor((batch, self.channels, *extents), self.dtype, layout, seed=seed),
            (tensor(middle, 1, *self.kernel, at=1, scale=0.3), tensor(self.outputs, middle, 1, 1, at=2, scale=0.3)),
            tuple(tensor(n, at=3) if b else None for n, b in zip((middle, self.outputs), self.biases, strict=True)),
            self.parameters,
            between=tuple(twin(getattr(program.E, name)(), getattr(F, name)) for name in self.between),
        )


SEPARABLE = [
    Separable(1, 1, 1, (1, 1), {}, (False, False)),
    Separable(3, 2, 5, (3, 3), {"padding": 1}, (True, True)),
    Separable(17, 1, 33, (3, 3), {"stride": 2, "padding": 1}, (True, False), between=("relu6",)),
    Separable(5, 3, 130, (2, 3), {"stride": (1, 3), "padding": ((0, 1), (2, 0))}, (False, True), HALF),
    Separable(64, 1, 16, (5, 5), {"padding": "same"}, (False, False)),
    Separable(8, 1, 2, (3, 1), {"dilation": (2, 1)}, (True, True), BF16, between=("silu", "hardswish")),
    Separable(33, 1, 65, (1, 4), {"stride": 3}, (False, True)),
]


@pytest.mark.parametrize("pair", SEPARABLE, ids=lambda p: f"{p.channels}x{p.multiplier}to{p.outputs}-k{p.kernel}")
def test_a_depthwise_separable_pair_is_wrong_at_some_size_or_layout(pair: Separable) -> None:
    for i, (size, layout) in enumerate(zip(PLANES, ("contiguous", "sliced", "permuted", "expanded"), strict=True)):
        check(pair.case(*size, layout, seed=10 * i))
    assert run_emulated(pair.case(0, (9, 9), "contiguous").call()).shape[:2] == (0, pair.outputs)


def test_a_step_between_the_convolutions_sees_a_rounded_or_biasless_value() -> None:
    # The depthwise result stays in fp32: rounding it to bfloat16 first would be off by far more than one ulp.
    pair = Separable(8, 2, 4, (3, 3), {"padding": 1}, (True, True), BF16, between=("gelu",))
    check(pair.case(2, (7, 9), "contiguous"))


# ---- Memory formats ---------------------------------------------------------------------------------------

LAST_KERNELS = [
    Kernel("conv2d", 5, 33, (3, 3), {"padding": 1}, PLANES),
    Kernel("conv2d", 16, 16, (3, 2), {"groups": 4, "stride": 2}, PLANES, HALF),
    Kernel("conv3d", 3, 8, (2, 3, 2), {"padding": 1, "stride": (1, 2, 1)}, BOXES, BF16),
    Kernel("conv_transpose2d", 5, 33, (3, 3), {"stride": 2, "padding": 1}, PLANES),
    Kernel("conv_transpose3d", 3, 8, (2, 3, 2), {"stride": (1, 2, 3)}, BOXES),
    Kernel("conv1d", 5, 4, (3,), {"padding": 1}, LINES),
]


@pytest.mark.parametrize("kernel", LAST_KERNELS, ids=str)
def test_channels_last_input_is_read_or_written_wrongly(kernel: Kernel) -> None:
    for i, (batch, extents) in enumerate(kernel.sizes[:3]):
        case = kernel.case(batch, extents, "contiguous", seed=i)
        order = [0, *range(2, case.rank + 2), 1]
        back = [0, case.rank + 1, *range(1, case.rank + 1)]
        # Dense along channels, whatever the rank has a name for.
        dense = case.x.permute(order).contiguous().permute(back)
        check(Case(case.function, dense, case.weights, case.biases, case.parameters))


def test_depthwise_separable_in_channels_last_is_read_or_written_wrongly() -> None:
    pair = SEPARABLE[2]
    case = pair.case(2, (9, 8), "channels_last")
    assert check(case).is_contiguous(memory_format=torch.channels_last)


FORMAT_CASES = [
    ("conv2d", (2, 3, 5, 6), (4, 3, 3, 3)),
    ("conv2d", (2, 1, 5, 6), (4, 1, 3, 3)),  # one channel: both formats at once
    ("conv2d", (2, 3, 1, 1), (4, 3, 1, 1)),  # one position: both formats at once
    ("conv2d", (1, 3, 5, 6), (1, 3, 1, 1)),
    ("conv3d", (2, 3, 4, 5, 6), (4, 3, 3, 3, 3)),
    ("conv_transpose2d", (2, 3, 5, 6), (3, 4, 3, 3)),
    ("conv_transpose3d", (2, 3, 2, 3, 4), (3, 4, 2, 2, 2)),
]


@pytest.mark.parametrize("weight_layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("x_layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize(("function", "x_shape", "weight_shape"), FORMAT_CASES)
def test_the_output_has_another_memory_format_than_torch_gives(
    function: str, x_shape: tuple[int, ...], weight_shape: tuple[int, ...], x_layout: str, weight_layout: str
) -> None:
    case = Case(function, make_tensor(x_shape, layout=x_layout), (make_tensor(weight_shape, layout=weight_layout),))
    ours = program.build(case.call())
    torchs = getattr(F, function)(case.x, case.weights[0])
    strides = torch.empty(ours.shape, memory_format=ours.launches[-1].memory_format).stride()
    last = CHANNELS_LAST[case.rank]
    # Strides of axes with one entry are arbitrary, so formats are compared, not strides.
    for memory_format in (torch.contiguous_format, last):
        assert torch.empty_strided(torchs.shape, strides).is_contiguous(
            memory_format=memory_format
        ) == torchs.is_contiguous(memory_format=memory_format)


@pytest.mark.parametrize("chain", [(layer_norm(6),), (pool("max", 2),), (layer_norm(6), pool("avg", (1, 2)))])
def test_an_epilogue_kernel_forgets_channels_last(chain: tuple[Any, ...]) -> None:
    case = Case("conv2d", make_tensor((2, 3, 4, 6), layout="channels_last"), (make_tensor((5, 3, 1, 1)),), chain=chain)
    assert check(case).is_contiguous(memory_format=torch.channels_last)


# ---- 64-bit offsets, large extents, large batches ---------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        FORWARD[7].case(3, (9, 31), "sliced"),
        FORWARD[25].case(2, (4, 5, 6), "permuted"),
        TRANSPOSED[5].case(2, (5, 6), "sliced"),
        SEPARABLE[1].case(2, (9, 7), "permuted"),
        Case(
            "conv2d",
            make_tensor((2, 3, 5, 6)),
            (make_tensor((4, 3, 1, 1)),),
            chain=(layer_norm(6), pool("avg", 2), layer_norm(3), pool("max", (1, 3))),
        ),
    ],
    ids=lambda case: case.function,
)
def test_a_kernel_with_64_bit_offsets_differs(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "index_bits", lambda *offsets: 64)
    assert program.build(case.call()).problem.index_bits == 64
    check(case)


LONG = [
    Kernel("conv1d", 2, 3, (5,), {"padding": ((4, 0),)}, []),
    Kernel("conv_transpose1d", 2, 3, (4,), {"stride": 2, "padding": 1}, []),
]


@pytest.mark.parametrize("kernel", LONG, ids=str)
def test_an_extent_of_100000_is_cut_short(kernel: Kernel) -> None:
    check(kernel.case(1, (100_000,), "contiguous"), sanitize=False, schedules=ONE_SCHEDULE)


@pytest.mark.parametrize("function", ["conv2d", "conv_transpose2d"])
def test_a_batch_of_100000_is_cut_short(function: str) -> None:
    kernel = Kernel(function, 1, 1, (2, 1), {"padding": (1, 0)}, [])
    check(kernel.case(100_000, (2, 1), "contiguous"), sanitize=False, schedules=ONE_SCHEDULE)


def test_a_batch_of_100000_is_cut_short_behind_the_convolution() -> None:
    case = Case(
        "conv2d", make_tensor((100_000, 1, 1, 2)), (make_tensor((1, 1, 1, 1)),),
        chain=(layer_norm(2, affine=False, eps=1.0), pool("max", (1, 2))),
    )  # fmt: skip
    check(case, sanitize=False, schedules=ONE_SCHEDULE)


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_the_bits_of_a_sample_depend_on_its_batch(batch: int) -> None:
    kernel = FORWARD[7]
    whole = kernel.case(7, (6, 5), "contiguous")
    call = whole.call()
    part = Case(kernel.function, whole.x[:batch], whole.weights, whole.biases, whole.parameters).call()
    assert torch.equal(run_emulated(part, schedules=ONE_SCHEDULE), run_emulated(call, schedules=ONE_SCHEDULE)[:batch])


def test_long_reductions_lose_more_than_torch_does() -> None:
    kernel = Kernel("conv2d", 257, 3, (5, 5), {}, [])
    check(kernel.case(1, (6, 6), "contiguous"))


# ---- Large filters and strides ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kernel",
    [
        Kernel("conv1d", 1, 2, (400,), {"stride": 160, "padding": 200}, []),
        Kernel("conv_transpose1d", 2, 1, (400,), {"stride": 160, "padding": 8}, []),
        Kernel("conv_transpose2d", 2, 1, (11, 13), {"stride": (7, 9)}, []),
        # Tables of taps that do not fit constant memory.
        Kernel("conv_transpose1d", 2, 1, (2600,), {"stride": 640, "padding": 7}, []),
    ],
    ids=str,
)
def test_a_filter_longer_than_the_tile_is_wrong(kernel: Kernel) -> None:
    extents = (900,) if kernel.function == "conv1d" else (9,) * len(kernel.kernel)
    check(kernel.case(2, extents, "contiguous"))


# ---- Data ---------------------------------------------------------------------------------------------------


def special_values(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    x = make_tensor(shape, dtype)
    flat = x.view(-1)
    flat[3], flat[17], flat[40] = torch.nan, torch.inf, -torch.inf
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("function", ["conv2d", "conv_transpose2d"])
def test_nan_and_inf_reach_other_outputs_than_in_torch(function: str, dtype: torch.dtype) -> None:
    weight = make_tensor((2, 2, 3, 3), dtype)
    parameters = {"padding": 1} if function == "conv2d" else {"padding": 1, "stride": 2}
    check(Case(function, special_values(dtype, (1, 2, 6, 7)), (weight,), parameters=parameters))


def test_a_result_beyond_float16_is_not_infinite() -> None:
    x, weight = torch.full((1, 1, 4), 300.0, dtype=HALF), torch.full((1, 1, 1), 300.0, dtype=HALF)
    assert check(Case("conv1d", x, (weight,))).isinf().all()


def test_a_large_intermediate_overflows_float16_although_the_result_fits() -> None:
    # 300 * 300 exceeds float16; the chain is computed in fp32, so what it scales back is exact.
    x, weight = torch.full((1, 1, 4), 300.0, dtype=HALF), torch.full((1, 1, 1), 300.0, dtype=HALF)
    case = Case("conv1d", x, (weight,), chain=(twin(program.E.mul(0.125), lambda v: v * 0.125),))
    assert (check(case) == 11248.0).all()


def test_x_and_weight_may_be_views_of_one_storage() -> None:
    storage = make_tensor((200,))
    check(Case("conv1d", storage.as_strided((1, 3, 20), (60, 20, 1)), (storage.as_strided((2, 3, 3), (9, 3, 1), 5),)))


# ---- Random calls -------------------------------------------------------------------------------------------


@settings(
    max_examples=16,
    derandomize=True,
    database=None,
    deadline=None,
    # A build takes seconds: shrinking would cost minutes, and a case that fails says all about itself.
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
@given(st.integers(0, 2**32 - 1))
def test_a_random_call_differs_from_torch(seed: int) -> None:
    check(random_case(random.Random(seed), largest=400))


@settings(max_examples=30, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    batch=st.integers(1, 6),
    extents=st.tuples(st.integers(1, 20), st.integers(1, 40)),
    layout=st.sampled_from(["contiguous", "sliced", "expanded"]),
    seed=st.integers(0, 1000),
)
@pytest.mark.parametrize("kernel", [FORWARD[7], TRANSPOSED[10]], ids=str)
def test_one_kernel_fails_at_some_size(
    kernel: Kernel, batch: int, extents: tuple[int, int], layout: str, seed: int
) -> None:
    # The smallest height that FORWARD[7] accepts is that of its filter.
    height, width = max(extents[0], 2), extents[1]
    check(kernel.case(batch, (height, width), layout, seed=seed))
