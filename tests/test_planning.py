"""Plans and programs: where the epilogue is cut, which tile is taken, what is launched."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from jitconv import epilogue as E
from jitconv import functional, planning, program
from jitconv.architectures import KNOWN, limits_of
from jitconv.families import RowTile, Tile, family
from jitconv.layout import divisor
from jitconv.planning import plan
from jitconv.planning.tiles import CANDIDATES, MAX_POOLED_ROW
from jitconv.program import Call, KernelLaunch, Program
from tests.strategies import Case, Twin, layer_norm, make_tensor

NORM, POOL, RELU, VALUE = E.layer_norm(8), E.max_pool((1, 2, 1)), E.relu(), E.add(E.CONV)


#: No tensor cores that any kernel here uses, so one kernel convolves. Those that do: test_tensor_cores.py.
FFMA = "sm_75"


def build(
    steps: Sequence[E.Step],
    shape: Sequence[int] = (2, 3, 4, 6, 8),
    *,
    dtype: torch.dtype = torch.float32,
    arch: str = FFMA,
) -> Program:
    x = torch.empty(tuple(shape), device="meta", dtype=dtype)
    weight = torch.empty(5, shape[1], *(1,) * (len(shape) - 2), device="meta", dtype=x.dtype)
    return program.build(meta_call(x, weight, steps), arch)


def pointers(launch: KernelLaunch) -> dict[str, str]:
    """What each pointer of a kernel's argument is given, by the name of the field."""
    fields = {offset: name for name, offset in family(launch.kernel).layout(launch.kernel).offsets.items()}
    return {fields[offset]: name for offset, name in launch.pointers}


def meta_call(x: torch.Tensor, weight: torch.Tensor, steps: Sequence[E.Step] = (), transposed: bool = False) -> Call:
    rank = x.dim() - 2
    return functional.convolution_call(
        f"conv{rank}d", rank, transposed, x, weight, None, steps, None, stride=1, padding=0, dilation=1, groups=1
    )[0]


CUTS = [
    ([], [("conv", 0, 0)]),
    ([RELU, RELU], [("conv", 0, 2)]),
    ([RELU, NORM], [("conv", 0, 1), ("layer_norm", 1, 2)]),
    ([NORM, RELU, RELU], [("conv", 0, 0), ("layer_norm", 0, 3)]),
    ([POOL], [("conv", 0, 0), ("pool", 0, 1)]),
    ([RELU, POOL, RELU], [("conv", 0, 1), ("pool", 1, 3)]),
    ([NORM, RELU, POOL, RELU], [("conv", 0, 0), ("layer_norm", 0, 4)]),
    ([NORM, NORM], [("conv", 0, 0), ("layer_norm", 0, 1), ("layer_norm", 1, 2)]),
    ([POOL, RELU, NORM], [("conv", 0, 0), ("pool", 0, 2), ("layer_norm", 2, 3)]),
    ([NORM, POOL, RELU, POOL], [("conv", 0, 0), ("layer_norm", 0, 3), ("pool", 3, 4)]),
    # The convolution's own value is asked for behind a norm: nothing may have been applied to what is kept.
    ([RELU, NORM, VALUE], [("conv", 0, 0), ("layer_norm", 0, 3)]),
    ([RELU, VALUE, NORM], [("conv", 0, 2), ("layer_norm", 2, 3)]),
]


@pytest.mark.parametrize(("steps", "expected"), CUTS, ids=[str(steps) for steps, _ in CUTS])
def test_an_epilogue_is_cut_elsewhere(steps: list[E.Step], expected: list[tuple[str, int, int]]) -> None:
    kernels = build(steps).plan.kernels
    assert [(k.family, k.first, k.last) for k in kernels] == expected
    # Every step once, in order.
    assert [k.first for k in kernels[1:]] == [k.last for k in kernels[:-1]]
    assert kernels[-1].last == len(steps)


def test_what_lies_between_two_kernels_is_rounded() -> None:
    packing, *launches = build([NORM, POOL, NORM], dtype=torch.float16, arch="sm_90a").launches
    assert packing.writes == "packed"
    kinds = [(launch.kernel.source_dtype, launch.kernel.target_dtype) for launch in launches]
    assert kinds == [("float16", "float32"), ("float32", "float32"), ("float32", "float16")]
    assert [launch.dtype for launch in launches] == [torch.float32, torch.float32, torch.float16]
    assert [launch.writes for launch in launches] == ["workspace0", "workspace1", "y"]


def test_a_workspace_has_another_size_than_its_tensors() -> None:
    built = build([NORM, POOL, NORM], dtype=torch.float16, arch="sm_90a")
    packing, *launches = built.launches
    assert [launch.shape for launch in launches] == [(2, 5, 4, 6, 8), (2, 5, 4, 3, 8), (2, 5, 4, 3, 8)]
    assert built.workspace_bytes == 4 * 2 * 5 * 4 * (6 * 8 + 3 * 8) + 4 * packing.shape[0]
    assert build([RELU]).workspace_bytes == 0


def test_the_convolutions_own_value_is_read_from_the_wrong_workspace() -> None:
    second, third = build([RELU, NORM, NORM, VALUE]).launches[1:]
    assert pointers(second) == {"x": "workspace0", "y": "workspace1"}
    assert pointers(third) == {"x": "workspace1", "conv_value": "workspace0", "y": "y"}


def test_a_wide_row_does_not_fit_shared_memory() -> None:
    wide = MAX_POOLED_ROW + 1
    steps = [E.layer_norm(wide), E.max_pool((1, 1, 2))]
    kernels = build(steps, (1, 3, 1, 1, wide)).plan.kernels
    assert [k.family for k in kernels] == ["conv", "layer_norm", "pool"]


def test_a_kernel_asks_for_more_shared_memory_than_an_architecture_has() -> None:
    smallest = min(limits_of(arch).shared_block for arch in KNOWN)
    for width in (1, 2, 31, 33, 512, 513, 1024, 1025, MAX_POOLED_ROW):
        for steps in ([E.layer_norm(width)], [E.layer_norm(width), E.avg_pool(1)]):
            for launch in build(steps, (1, 3, 1, 1, width)).launches:
                # Up to 48 KiB needs no attribute of the function.
                assert launch.shared_bytes <= 48 * 1024 <= smallest


@pytest.mark.parametrize("tile", CANDIDATES, ids=lambda t: f"{t.positions}x{t.channels}")
def test_a_tile_is_not_a_whole_number_of_warps(tile: Tile) -> None:
    assert tile.threads % 32 == 0
    assert 32 <= tile.threads <= 1024
    assert tile.positions * tile.channels == tile.threads * tile.px * tile.oc_tile
    assert tile.depth * tile.positions % tile.threads == 0


@pytest.mark.parametrize(
    ("outputs", "channels"), [(1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 32), (33, 64), (65, 64), (512, 64)]
)
def test_a_tile_leaves_more_channels_idle_than_another(outputs: int, channels: int) -> None:
    call = meta_call(torch.empty(1, 3, 8, device="meta"), torch.empty(outputs, 3, 1, device="meta"))
    tile = program.build(call, FFMA).plan.kernels[0].tile
    assert isinstance(tile, Tile)
    assert tile.channels == channels


@pytest.mark.parametrize("width", [1, 2, 3, 31, 32, 33, 64, 512, 513, 1024, 1025, 100_000])
@pytest.mark.parametrize("pooled", [False, True])
def test_a_row_is_shared_by_more_lanes_than_a_warp_or_fewer_than_the_block(width: int, pooled: bool) -> None:
    steps = [E.layer_norm(width)] + [E.avg_pool(1)] * pooled
    tile = build(steps, (1, 3, 1, 1, width)).launches[1].kernel.tile
    assert isinstance(tile, RowTile)
    assert tile.lanes in (1, 2, 4, 8, 16, 32, tile.threads)
    assert tile.threads % tile.lanes == 0


def test_batch_or_extents_compile_another_kernel() -> None:
    steps = [RELU, POOL, RELU]
    plans = {build(steps, shape).plan for shape in [(2, 3, 4, 6, 8), (7, 3, 5, 9, 33), (1, 3, 1, 2, 1)]}
    assert len(plans) == 1


def test_strides_compile_another_kernel() -> None:
    weight = make_tensor((5, 3, 1, 1))
    layouts = ("contiguous", "sliced", "expanded")
    plans = {Case("conv2d", make_tensor((2, 3, 4, 6), layout=name), (weight,)).call() for name in layouts}
    assert len({program.build(call).plan for call in plans}) == 1


def test_the_same_problem_has_another_plan() -> None:
    problem = build([NORM, POOL]).problem
    first = plan(problem, "sm_75")
    planning._plan.cache_clear()
    assert plan(problem, "sm_75") == first


# ---- Sizes ----------------------------------------------------------------------------------------------------


def test_more_than_2_to_the_31_elements_have_32_bit_offsets() -> None:
    assert build([], (8, 3, 1, 1, 2**20)).problem.index_bits == 32
    assert build([], (2**11, 1, 1, 1, 2**20)).problem.index_bits == 64  # x itself
    assert build([], (2**9, 1, 1, 1, 2**20)).problem.index_bits == 64  # the output, five times as large
    assert build([], (2**8, 1, 1, 1, 2**20)).problem.index_bits == 32


def test_a_residual_spread_over_memory_has_32_bit_offsets() -> None:
    spread = torch.empty(2**32, device="meta").as_strided((2, 5, 4, 6, 8), (2**31, 1, 5, 20, 120))
    assert build([E.add(spread)]).problem.index_bits == 64


def test_the_coordinates_of_an_expanded_input_overflow() -> None:
    x = torch.empty(1, 1, 1, device="meta").expand(1, 1, 2**32)
    call = functional.convolution_call(
        "conv1d", 1, False, x, torch.empty(1, 1, 1, device="meta"), None, (), None,
        stride=2**16, padding=0, dilation=1, groups=1,
    )[0]  # fmt: skip
    assert program.build(call).problem.index_bits == 64


def test_the_coordinates_of_a_padded_input_overflow() -> None:
    x, weight = torch.empty(1, 1, 2**30, device="meta"), torch.empty(1, 1, 1, device="meta")
    call = functional.convolution_call(
        "conv1d", 1, False, x, weight, None, (), None,
        stride=2**20, padding=((0, 2**30),), dilation=1, groups=1,
    )[0]  # fmt: skip
    assert program.build(call).problem.index_bits == 64


def test_the_stride_of_a_single_entry_overflows_an_argument() -> None:
    # One row of a huge matrix: its first stride exceeds 32 bits and is never used.
    row = torch.empty(2**33, device="meta").as_strided((1, 3, 8), (2**32, 8, 1))
    weight = torch.empty(2**33, device="meta").as_strided((1, 3, 1), (2**32, 1, 2**31))
    assert program.build(meta_call(row, weight)).problem.index_bits == 32


def test_a_grid_beyond_the_limit_is_launched() -> None:
    # 2^40 positions in tiles of 256: 2^32 blocks.
    x = torch.empty(1, device="meta").expand(2**20, 1, 2**20)
    with pytest.raises(ValueError, match=r"needs a grid of 4294967296 blocks: expected at most 2147483647; split"):
        program.build(meta_call(x, torch.empty(1, 1, 1, device="meta")), "sm_75")
    # On Hopper blocks take one tile after the other: their number is that of the multiprocessors.
    launch = program.build(meta_call(x, torch.empty(1, 1, 1, device="meta")), "sm_90a").launches[-1]
    assert launch.grid > program.MAX_GRID
    assert launch.blocks(132) <= 264


def test_a_grid_misses_positions_or_channels() -> None:
    x = make_tensor((3, 4, 5, 7))
    for outputs in (1, 5, 64, 65, 200):
        call = Case("conv2d", x, (make_tensor((outputs, 4, 2, 2)),)).call()
        launch = program.build(call, FFMA).launches[0]
        tile = launch.kernel.tile
        assert isinstance(tile, Tile)
        assert launch.grid == math.ceil(3 * 4 * 6 / tile.positions) * math.ceil(outputs / tile.channels)
        assert launch.block == tile.threads


def test_an_empty_batch_is_launched() -> None:
    built = build([NORM, POOL], (0, 3, 4, 6, 8))
    assert built.shape == (0, 5, 4, 3, 8)
    assert [launch.grid for launch in built.launches] == [0, 0]


def test_pointers_point_elsewhere_than_their_fields() -> None:
    residual = torch.empty(2, 5, 4, 6, 8, device="meta")
    for launch in build([E.add(residual), E.mul(2.0), NORM, E.sub(0.5)]).launches:
        layout = family(launch.kernel).layout(launch.kernel)
        at = {offset: name for name, offset in layout.offsets.items()}
        assert pointers(launch)["y"] == launch.writes
        assert {at[offset] for offset, _ in launch.numbers} == {f.name for f in layout.fields if f.kind == "float"}
        assert len(launch.arguments) == layout.size


def test_the_extents_of_a_launch_are_not_its_divisors() -> None:
    x = make_tensor((2, 3, 5, 7))
    launch = program.build(Case("conv2d", x, (make_tensor((4, 3, 2, 3)),)).call(), FFMA).launches[0]
    layout = family(launch.kernel).layout(launch.kernel)
    for name, extent in (("grid_d", 1), ("grid_h", 4), ("grid_w", 5)):
        at = layout.offsets[name]
        words = tuple(int.from_bytes(launch.arguments[at + 4 * i : at + 4 * i + 4], "little") for i in range(3))
        assert words == divisor(extent, 32)


# ---- Signatures -----------------------------------------------------------------------------------------------


def signature(case: Case) -> object:
    return hash(case.call().signature())


def test_calls_that_need_other_programs_share_a_signature() -> None:
    x, weight = make_tensor((2, 3, 4, 6)), make_tensor((5, 3, 1, 1))
    scalar, channel = torch.tensor(2.0), make_tensor((5,))

    def case(*steps: E.Step, **changes: object) -> Case:
        chain = tuple(Twin(step, lambda v, conv: v) for step in steps)
        values = {"x": x, "weights": (weight,), "biases": (None,), "parameters": {}, **changes}
        return Case("conv2d", chain=chain, **values)  # type: ignore[arg-type]

    different = [
        case(),
        case(E.relu()),
        case(E.add(1.0)),
        case(E.add(scalar)),
        case(E.add(scalar.double())),
        case(E.add(channel)),
        case(E.add(make_tensor((5,), layout="sliced"))),
        case(E.add(E.CONV)),
        case(E.sub(1.0)),
        case(E.layer_norm(6)),
        case(E.max_pool(2)),
        case(E.max_pool(2, ceil_mode=True)),
        case(biases=(channel,)),
        case(biases=(make_tensor((5,), layout="sliced"),)),
        case(x=make_tensor((3, 3, 4, 6))),
        case(x=make_tensor((2, 3, 4, 6), layout="channels_last")),
        case(weights=(make_tensor((5, 3, 1, 1), layout="sliced"),)),
        case(parameters={"padding": 1}),
        case(parameters={"padding": 1, "padding_mode": "reflect"}),
    ]
    assert len({signature(c) for c in different}) == len(different)


def test_other_numbers_and_addresses_need_another_program() -> None:
    x, weight = make_tensor((2, 3, 4, 6)), make_tensor((5, 3, 1, 1))

    def case(number: float, seed: int) -> Case:
        step = Twin(E.leaky_relu(number), lambda v, conv: v)
        bias = make_tensor((5,), seed=seed)
        return Case("conv2d", x.clone(), (weight.clone(),), (bias,), chain=(step, layer_norm(6, seed=seed)))

    assert signature(case(0.1, 1)) == signature(case(0.7, 2))


def test_precision_makes_a_second_kernel_where_it_changes_nothing() -> None:
    def problems(operator: str, dtype: torch.dtype) -> set[object]:
        x, w = torch.empty(1, 8, 9, 9, device="meta", dtype=dtype), torch.empty(8, 8, 3, 3, device="meta", dtype=dtype)
        found = set()
        for precision in ("ieee", "tf32", None):
            call, _ = functional.convolution_call(
                operator, 2, operator.startswith("conv_transpose"), x, w, None, (), precision,
                stride=1, padding=0, dilation=1, groups=1,
            )  # fmt: skip
            found.add(program.build(call).problem)
        return found

    assert len(problems("conv_transpose2d", torch.float32)) == 1
    assert len(problems("conv2d", torch.float16)) == 1
    assert len(problems("conv2d", torch.float32)) == 2
