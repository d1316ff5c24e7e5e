"""The Hopper family in the emulator, against torch in float64: every tile that the planner may choose must be right."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from jitconv import emulate, emulated, program
from jitconv import epilogue as E
from jitconv.architectures import limits_of
from jitconv.families import KernelPlan, WgmmaTile, family
from jitconv.functional import convolution_call
from jitconv.inspect import resident_blocks
from jitconv.planning import plan_with_tile
from jitconv.planning.hopper import wgmma_tiles
from jitconv.program import Call
from jitconv.render import Rendered, render
from jitconv.toolchain import Compiled, compile_cubin
from tests.kernels.mutation import mutations, notices
from tests.strategies import (
    CHANNELS_LAST,
    LAYOUTS,
    POINTWISE,
    Case,
    Twin,
    assert_matches,
    binary,
    layer_norm,
    make_tensor,
    pool,
    random_chain,
    run_emulated,
)

pytestmark = pytest.mark.compiler

ARCH = "sm_90a"

# One order of threads where arithmetic is tested; for what another order would change there are the tests of waits.
SCHEDULES = emulate.DEFAULT_SCHEDULES[2:]

#: How operands become products: the dtype of x, and the precision.
KINDS = {
    "tf32": (torch.float32, "tf32"),
    "ieee": (torch.float32, "ieee"),
    "half": (torch.float16, "ieee"),
    "bfloat16": (torch.bfloat16, "ieee"),
}

Wanted = Callable[[WgmmaTile], bool]


# Flat tiles and marches have tests of their own beside these (test_hopper_walks.py).


def channel_rows(tile: WgmmaTile) -> bool:
    return tile.channel_rows and not tile.march


def position_rows(tile: WgmmaTile) -> bool:
    return not tile.channel_rows and not tile.march and not tile.flat


ORIENTATIONS: dict[str, Wanted] = {"channels": channel_rows, "positions": position_rows}


def positions(tile: WgmmaTile) -> int:
    return tile.box[0] * tile.box[1]


def strips(tile: WgmmaTile) -> int:
    """Strips of one consumer."""
    return positions(tile) // (tile.strip[0] * tile.strip[1]) // tile.position_groups


# ---- Cases -----------------------------------------------------------------------------------------------------------


def tf32(t: Tensor) -> Tensor:
    """Rounded to 10 bits of mantissa, to nearest, ties away from zero."""
    bits = t.view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


@dataclass(frozen=True)
class Hopper:
    """A convolution and the kind of its products; tensors are drawn when it is run."""

    kind: str
    x: tuple[int, ...]
    outputs: int
    kernel: tuple[int, ...]
    layout: str = "contiguous"
    weight_layout: str = "contiguous"
    bias: bool = True
    parameters: dict[str, Any] = field(default_factory=dict)

    def case(self, chain: Sequence[Twin] = (), **changes: Any) -> Case:
        dtype = KINDS[self.kind][0]
        channels = self.x[1] // self.parameters.get("groups", 1)
        scale = (channels * math.prod(self.kernel)) ** -0.5
        shape = (self.outputs, channels, *self.kernel)
        return Case(
            f"conv{len(self.kernel)}d",
            changes.pop("x", make_tensor(self.x, dtype, self.layout, seed=1)),
            (changes.pop("weight", make_tensor(shape, dtype, self.weight_layout, seed=2, scale=scale)),),
            (make_tensor((self.outputs,), dtype, seed=3) if self.bias else None,),
            self.parameters,
            chain=tuple(chain),
        )


def made(case: Case, kind: str) -> Call:
    return replace(case.call(), precision=KINDS[kind][1])


def tiles(call: Call) -> list[WgmmaTile]:
    return list(wgmma_tiles(program.build(call, ARCH).problem, ARCH))


def choose(call: Call, wanted: Wanted = lambda tile: True, **changes: Any) -> WgmmaTile:
    """The best tile that is ``wanted``, with ``changes``."""
    return replace(next(tile for tile in tiles(call) if wanted(tile)), **changes)


def smallest(call: Call, wanted: Wanted = lambda tile: True, **changes: Any) -> WgmmaTile:
    """The tile with the fewest positions among those that are ``wanted``: many tiles in a small image."""
    return replace(min((tile for tile in tiles(call) if wanted(tile)), key=positions), **changes)


def least_units(call: Call, tile: WgmmaTile) -> int:
    """Shortest halo ring: two units, or for a march all planes of the filter and one unit of the next."""
    problem = program.build(call, ARCH).problem
    chunks = tile.chunks(problem.in_channels // problem.groups)
    return chunks * problem.kernel_size[0] + 1 if tile.march else 2


def built(call: Call, tile: WgmmaTile) -> program.Program:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "plan", lambda problem, *_: plan_with_tile(problem, tile))
        return program.build(call, ARCH)


def run(call: Call, tile: WgmmaTile, *families: str, **options: Any) -> Tensor:
    """The emulated result by kernels with ``tile``, and then ``families``."""
    launches = built(call, tile).launches
    assert [step.kernel.family for step in launches] == ["pack_planes", "conv_wgmma", *families]
    options = {"schedules": SCHEDULES, "sanitize": False, **options}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "plan", lambda problem, *_: plan_with_tile(problem, tile))
        return run_emulated(call, ARCH, **options)


def check(case: Case, kind: str, tile: WgmmaTile, *families: str, **options: Any) -> Tensor:
    """The result must be what float64 makes of the operands, which tf32 rounds to nearest, within fp32's own error."""
    call = made(case, kind)
    y = run(call, tile, *families, **options)
    if kind == "tf32":
        case = replace(case, x=tf32(case.x), weights=tuple(tf32(w) for w in case.weights))
    assert_matches(case, y)
    assert y.is_contiguous(memory_format=call.memory_format)
    return y


P = "positions"
C = "channels"

#: What could go wrong, the orientations in which it is tried, how x is fetched, and a convolution that would show it.
CASES: dict[str, tuple[str, str, Hopper]] = {
    "3d, odd extents and channels": (
        f"{C} {P}", "", Hopper("tf32", (1, 13, 4, 9, 19), 21, (3, 3, 3), parameters={"padding": 1})),
    "3d, another stride on every axis": (
        f"{C} {P}", "", Hopper("tf32", (2, 9, 5, 21, 26), 19, (2, 3, 3),
                               parameters={"stride": (2, 1, 3), "padding": 1})),
    "stride beyond the filter": (
        f"{C} {P}", "", Hopper("tf32", (1, 10, 23, 41), 18, (2, 1), parameters={"stride": (3, 4)})),
    "dilation and stride with a common factor": (
        f"{C} {P}", "", Hopper("tf32", (1, 8, 25, 47), 24, (3, 3), parameters={"stride": (2, 4), "dilation": (4, 2)})),
    "the same, by tensor copies": (
        f"{C} {P}", "direct", Hopper("half", (1, 16, 25, 47), 24, (3, 3), "channels_last",
                           parameters={"stride": (2, 4), "dilation": (4, 2), "padding": ((1, 2), (3, 0))})),
    "dilation and stride without a common factor": (
        f"{C} {P}", "", Hopper("bfloat16", (1, 9, 25, 41), 17, (3, 2),
                               parameters={"stride": (2, 3), "dilation": (3, 2)})),
    "the same, by tensor copies without a common factor": (
        P, "direct", Hopper("bfloat16", (1, 24, 25, 40), 40, (3, 2), "channels_last", bias=False,
                  parameters={"stride": (2, 3), "dilation": (3, 2), "padding": 2})),
    "even filter, uneven padding": (
        f"{C} {P}", "", Hopper("tf32", (2, 11, 9, 21), 35, (4, 2), bias=False,
                               parameters={"padding": ((3, 0), (0, 1))})),
    "reflected": (
        C, "", Hopper("ieee", (1, 9, 9, 17), 18, (5, 5), parameters={"padding": 2, "padding_mode": "reflect"})),
    "replicated": (
        P, "", Hopper("tf32", (1, 9, 3, 5, 9), 18, (3, 1, 3), parameters={
            "padding": ((2, 1), (0, 3), (1, 2)), "padding_mode": "replicate"})),
    "circular": (
        P, "", Hopper("half", (1, 16, 9, 17), 20, (3, 3), "channels_last",
                  parameters={"padding": 1, "padding_mode": "circular"})),
    "groups that fill neither chunks nor tiles": (
        f"{C} {P}", "", Hopper("tf32", (1, 33, 7, 20), 57, (3, 3), parameters={"groups": 3, "padding": 1})),
    "groups, by tensor copies": (
        C, "direct", Hopper("half", (2, 48, 7, 20), 60, (3, 3), "channels_last",
                            parameters={"groups": 3, "padding": 1})),
    "groups whose channels end within a chunk": (
        P, "", Hopper("bfloat16", (1, 48, 7, 20), 60, (1, 3), "channels_last", parameters={"groups": 2})),
    "several blocks of channels": (
        f"{C} {P}", "", Hopper("tf32", (1, 10, 6, 21), 270, (1, 3))),
    "1d, long filter": (
        f"{C} {P}", "", Hopper("tf32", (1, 19, 301), 24, (7,), parameters={"padding": 3, "stride": 2})),
    "1d, 16 bit": (
        C, "", Hopper("bfloat16", (2, 24, 290), 24, (4,), parameters={"padding": ((2, 1),), "dilation": 3})),
    "pointwise, several products a chunk": (
        f"{C} {P}", "", Hopper("tf32", (2, 37, 9, 21), 50, (1, 1), bias=False)),
    "channels that end within a product": (
        f"{C} {P}", "", Hopper("half", (2, 21, 9, 20), 50, (3, 3), "channels_last")),
    "channels that end within a chunk, by tensor copies": (
        f"{C} {P}", "direct", Hopper("half", (2, 40, 9, 20), 50, (3, 3), "channels_last", parameters={"padding": 1})),
    "3d, by tensor copies": (
        P, "direct", Hopper("bfloat16", (1, 16, 5, 9, 18), 33, (3, 3, 3), "channels_last",
                  parameters={"padding": ((1, 0), (2, 1), (1, 1)), "stride": (2, 1, 1), "dilation": (1, 2, 1)})),
    "fp32 in vectors of channels": (
        f"{C} {P}", "", Hopper("tf32", (1, 36, 9, 20), 33, (3, 3), "channels_last",
                               parameters={"padding": 1, "padding_mode": "replicate"})),
    "every second column": (C, "", Hopper("tf32", (1, 9, 9, 20), 18, (3, 3), "sliced", "permuted")),
    "columns far apart": (P, "", Hopper("half", (2, 17, 9, 20), 18, (3, 3), "permuted", "channels_last")),
    "one sample for all": (P, "", Hopper("half", (3, 16, 9, 12), 18, (3, 3), "expanded", "expanded")),
    "three products": (
        f"{C} {P}", "", Hopper("ieee", (2, 19, 9, 21), 35, (3, 3), parameters={"padding": 1, "stride": (1, 2)})),
    "three products, 3d": (
        P, "", Hopper("ieee", (1, 13, 4, 8, 17), 18, (2, 3, 3), "channels_last", bias=False)),
    "three products, 1d groups": (
        C, "", Hopper("ieee", (1, 18, 290), 38, (5,), parameters={"groups": 2, "padding": 2})),
    "one channel in, one out": (
        f"{C} {P}", "", Hopper("tf32", (2, 1, 9, 21), 1, (3, 3), parameters={"padding": 1})),
    "three channels in, few out, by raw boxes": (
        f"{C} {P}", "raw", Hopper("half", (2, 3, 9, 24), 5, (7, 7), parameters={"padding": 3, "stride": 2})),
    "a group for every channel": (
        f"{C} {P}", "", Hopper("ieee", (1, 5, 9, 20), 10, (3, 3), parameters={"padding": 1, "groups": 5})),
    "raw boxes with another stride on every axis": (
        f"{C} {P}", "raw", Hopper("tf32", (2, 9, 5, 21, 28), 19, (2, 3, 3), parameters={
            "stride": (2, 1, 3), "padding": ((1, 0), (0, 2), (1, 1))})),
    "raw boxes with dilation, stride and uneven padding": (
        f"{C} {P}", "raw", Hopper("half", (2, 21, 25, 48), 24, (3, 4), parameters={
            "stride": (2, 3), "dilation": (2, 2), "padding": ((1, 2), (5, 0))})),
    "raw boxes of groups": (
        C, "raw", Hopper("tf32", (2, 48, 7, 20), 60, (3, 3), parameters={"groups": 3, "padding": 1})),
    "raw boxes, 1d, in pieces": (
        f"{C} {P}", "raw", Hopper("bfloat16", (2, 24, 600), 24, (5,), parameters={"stride": 2, "padding": 7})),
    "raw boxes of channels side by side": (
        f"{C} {P}", "raw", Hopper("tf32", (2, 20, 9, 21), 33, (3, 2), "channels_last", parameters={
            "padding": ((1, 0), (2, 1)), "stride": (1, 2)})),
    "raw boxes split": (
        f"{C} {P}", "raw", Hopper("ieee", (2, 19, 9, 20), 35, (3, 3), parameters={"padding": 1, "dilation": (1, 2)})),
    "raw boxes of channels side by side, split": (
        f"{C} {P}", "raw", Hopper("ieee", (1, 12, 4, 9, 17), 18, (2, 3, 3), "channels_last",
                                  parameters={"padding": 1})),
}  # fmt: skip

PAIRS = [(name, orientation) for name, (orientations, _, _) in CASES.items() for orientation in orientations.split()]


@pytest.mark.parametrize(("name", "orientation"), PAIRS, ids=lambda part: str(part).replace(" ", "-"))
def test_a_value_is_wrong(name: str, orientation: str) -> None:
    _, copies, hopper = CASES[name]
    case = hopper.case([POINTWISE["silu"]()])
    tile = choose(made(case, hopper.kind), ORIENTATIONS[orientation])
    assert tile.copies == copies
    check(case, hopper.kind, tile)


PLAIN = Hopper("tf32", (2, 11, 20, 37), 70, (3, 3), parameters={"padding": 1})

#: Tiles of every shape that the planner knows, and one that it does not choose.
SHAPES: dict[str, tuple[Wanted, dict[str, Any]]] = {
    "several strips of channels": (lambda t: t.channel_rows and strips(t) > 1, {}),
    "two tiles of channels": (lambda t: t.channel_rows and t.channels == 128 and t.channel_groups == 1, {}),
    "two consumers along channels": (lambda t: t.channel_groups == 2, {}),
    "two consumers along positions": (lambda t: t.channel_rows and t.position_groups == 2, {}),
    "several strips of positions": (lambda t: not t.channel_rows and strips(t) > 1, {}),
    "two consumers of positions": (lambda t: not t.channel_rows and t.position_groups == 2, {}),
    "channels in their own order": (position_rows, {"channels": 16}),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["tf32", "half", "ieee"])
def test_a_shape_of_tiles_is_wrong(kind: str, shape: str) -> None:
    hopper = replace(PLAIN, kind=kind)
    wanted, changes = SHAPES[shape]
    case = hopper.case()
    candidates = [tile for tile in tiles(made(case, kind)) if wanted(tile)]
    if not candidates:
        pytest.skip(f"no such tile fits for {kind}")
    tile = replace(candidates[0], **changes)
    assert tile.permuted == (not tile.channel_rows and not changes)
    check(case, kind, tile)


def test_every_shape_of_tiles_is_tried() -> None:
    for wanted, _ in SHAPES.values():
        assert any(wanted(tile) for kind in KINDS for tile in tiles(made(replace(PLAIN, kind=kind).case(), kind)))


# ---- Tiles after tiles -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "hopper",
    [
        Hopper("tf32", (2, 20, 3, 20, 17), 70, (3, 2, 2), parameters={"padding": 1}),
        Hopper("ieee", (3, 20, 20, 17), 35, (3, 2), parameters={"padding": 1}),
        Hopper("half", (3, 40, 20, 17), 35, (3, 2), parameters={"padding": 1}),
        Hopper("half", (3, 40, 20, 17), 35, (3, 2), "channels_last", parameters={"padding": 1}),
    ],
    ids=str,
)
@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_a_block_loses_its_place_in_the_rings(hopper: Hopper, orientation: str) -> None:
    # Rings as short as they get, and of coprime lengths: every tile starts at another place.
    case = hopper.case()
    call = made(case, hopper.kind)
    tile = smallest(call, ORIENTATIONS[orientation], stages=3)
    tile = replace(tile, units=least_units(call, tile))
    launch = built(call, tile).launches[1]
    assert launch.grid >= 3 * launch.blocks(2), "every block of the emulated GPU has several tiles"
    check(case, hopper.kind, tile, schedules=emulate.ALL_SCHEDULES, sanitize=True)


@pytest.mark.parametrize("kind", ["tf32", "ieee", "half"])
def test_a_sample_depends_on_its_batch(kind: str) -> None:
    hopper = Hopper(kind, (5, 16, 9, 20), 24, (3, 3), "channels_last" if kind == "half" else "contiguous")
    case = hopper.case()
    call = made(case, kind)
    tile = choose(call)
    whole = run(call, tile)
    for i in (0, 3):
        alone = made(replace(case, x=case.x[i : i + 1]), kind)
        assert choose(alone) == tile
        assert torch.equal(run(alone, tile), whole[i : i + 1])


def test_a_sample_depends_on_values_that_do_not_split_in_others() -> None:
    case = Hopper("ieee", (3, 20, 9, 15), 40, (3, 3), parameters={"stride": 3}).case()
    case.x[0, 0, 0, 0] = 1e-39
    call, alone = made(case, "ieee"), made(replace(case, x=case.x[1:2].clone()), "ieee")
    assert torch.equal(run(call, choose(call))[1:2], run(alone, choose(alone)))


def test_sizes_and_numbers_compile_something_new() -> None:
    def kernels(n: int, h: int, w: int, factor: float) -> list[KernelPlan]:
        hopper = Hopper("tf32", (n, 9, h, w), 18, (3, 3))
        call = made(replace(hopper.case(), chain=(Twin(E.mul(factor), lambda v, conv: v),)), "tf32")
        return [step.kernel for step in program.build(call, ARCH).launches]

    # Small images have tiles, and so kernels, of their own.
    assert kernels(1, 40, 50, 1.0) == kernels(5, 100, 35, 2.0) != kernels(1, 8, 50, 1.0)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("kind", ["tf32", "ieee", "half"])
def test_how_x_is_fetched_changes_bits(kind: str, layout: str) -> None:
    # The halo's rows and columns do not fill its last 128 bytes: what lies there must not matter either.
    case = Hopper(kind, (2, 24, 15, 24), 24, (3, 4), layout, parameters={"padding": 1}).case()
    call = made(case, kind)
    copied = choose(call)
    assert copied.copies == ("direct" if kind == "half" and layout == "channels_last" else "raw")
    halo = (copied.box[0] + 2) * (copied.box[1] + 3)
    assert halo % 8 != 0
    loaded = replace(copied, copies="", raws=0)
    assert torch.equal(run(call, copied), run(call, loaded))


# ---- What surrounds the convolution ----------------------------------------------------------------------------------


def unaligned(t: Twin, shape: tuple[int, ...]) -> Twin:
    """``t``, whose tensor starts one element behind a multiple of 16 bytes, dense all the same."""

    def moved(value: Tensor) -> Tensor:
        storage = torch.zeros(math.prod(shape) + 8, dtype=value.dtype)
        offset = 1 + (-storage.data_ptr() // value.element_size()) % 4
        view = storage[offset : offset + math.prod(shape)].view(shape)
        return view.copy_(value)

    return replace(t, step=t.step.with_tensors(moved(value) for value in t.step.tensors()))


def operands(shape: tuple[int, ...], dtype: torch.dtype) -> list[Twin]:
    """Every kind of operand, full tensors in every layout, of x's dtype and of float32."""
    return [
        binary("mul", "number", shape, seed=1),
        binary("add", "scalar", shape, seed=2),
        binary("mul", "channel", shape, seed=3, dtype=dtype),
        binary("add", "channel", shape, seed=4, layout="sliced"),
        binary("add", "tensor", shape, seed=5, dtype=dtype),
        binary("mul", "tensor", shape, seed=6, layout="channels_last"),
        POINTWISE["tanh"](),
        binary("sub", "tensor", shape, seed=7, layout="permuted"),
        unaligned(binary("add", "tensor", shape, seed=8, dtype=dtype), shape),
        binary("maximum", "conv", shape),
        binary("add", "tensor", shape, seed=9, dtype=dtype, layout="channels_last"),
        binary("div", "broadcast", shape, seed=10),
        binary("minimum", "tensor", shape, seed=11, layout="sliced"),
        binary("add", "conv", shape),
    ]


@pytest.mark.parametrize("orientation", ORIENTATIONS)
@pytest.mark.parametrize("kind", ["tf32", "half", "ieee"])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_an_operand_of_the_epilogue_is_read_wrongly(kind: str, layout: str, orientation: str) -> None:
    # Runs that end within the tensor, and channels and rows that make vectors possible: multiples of 8.
    k, w = (72, 24) if layout == "channels_last" or kind == "half" else (70, 21)
    hopper = Hopper(kind, (2, 16, 9, w), k, (1, 1), layout)
    case = hopper.case(operands((2, k, 9, w), KINDS[kind][0]))
    # Sanitized: a vector that is not aligned, or that reaches beyond its tensor, ends the run.
    check(case, kind, choose(made(case, kind), ORIENTATIONS[orientation]), sanitize=True)


@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_64_bit_offsets_read_or_write_elsewhere(monkeypatch: pytest.MonkeyPatch, orientation: str) -> None:
    monkeypatch.setattr(program, "index_bits", lambda *offsets: 64)
    for hopper in (
        Hopper("ieee", (2, 9, 7, 20), 20, (3, 3), parameters={"padding": 1}),
        Hopper("half", (2, 16, 7, 20), 20, (3, 3), "channels_last", parameters={"padding": 1}),
    ):
        case = hopper.case([binary("add", "tensor", (2, 20, 7, 20), layout="sliced")])
        call = made(case, hopper.kind)
        tile = choose(call, ORIENTATIONS[orientation])
        assert built(call, tile).problem.index_bits == 64
        check(case, hopper.kind, tile)


@pytest.mark.parametrize("orientation", ORIENTATIONS)
@pytest.mark.parametrize("kind", ["half", "tf32", "ieee"])
def test_the_prologue_comes_after_zero_padding(kind: str, orientation: str) -> None:
    layout = "channels_last" if orientation == "positions" else "contiguous"
    channels = 13 if layout == "contiguous" else 16
    hopper = Hopper(kind, (2, channels, 9, 20), 20, (3, 3), layout, parameters={"padding": 1})
    plain = hopper.case()
    factor, tensor = make_tensor((channels,), seed=4), make_tensor(hopper.x, seed=5)
    call = replace(made(plain, kind), prologue=(E.add(1.0), E.mul(factor), E.add(tensor), E.relu()))
    y = run(call, choose(call, ORIENTATIONS[orientation]))
    # A prologue of 16-bit numbers rounds what it gives to x's type.
    before = ((plain.x.double() + 1) * factor.double().view(-1, 1, 1) + tensor.double()).relu()
    before = before.float() if kind == "ieee" else tf32(before.float()) if kind == "tf32" else before.half()
    weights = tuple(tf32(w) if kind == "tf32" else w for w in plain.weights)
    expected = replace(plain, x=before, weights=weights).expected()
    # An operand whose last bit rounds the other way moves an output by 2^-11 of a term.
    limit = {"ieee": 1e-6, "tf32": 2e-4, "half": 1e-3}[kind]
    assert float((y.double() - expected).norm() / expected.norm()) < limit


@pytest.mark.parametrize("kind", ["tf32", "half", "ieee"])
def test_what_follows_reads_another_workspace(kind: str) -> None:
    hopper = Hopper(kind, (2, 16, 9, 21), 20, (3, 3), "channels_last", parameters={"padding": 1})
    for chain in ([POINTWISE["gelu"](), layer_norm(21), pool("max", 3)], [pool("avg", 2), POINTWISE["tanh"]()]):
        case = hopper.case(chain)
        behind = "layer_norm" if len(chain) == 3 else "pool"
        check(case, kind, choose(made(case, kind)), behind)


# ---- Values that two tf32 numbers do not hold ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (math.nan, "x"), (math.inf, "x"), (-math.inf, "weight"), (math.nan, "weight"), (1e-38, "x"), (1e-42, "x"),
        (3e38, "x"), (1e-39, "weight"), (3e38, "weight"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_values_that_do_not_split_are_wrong(value: float, where: str, orientation: str) -> None:
    case = Hopper("ieee", (1, 9, 8, 19), 18, (3, 3)).case()
    x, w = case.x, case.weights[0]
    if where == "x":
        # A corner of the image holds nothing else, so its outputs depend on these values alone.
        x[0, :, :3, :3] = value * (1 + x[0, :, :3, :3].abs() % 0.1) if abs(value) < math.inf else value
    else:
        w[1] = value
    call = made(case, "ieee")
    y = run(call, choose(call, ORIENTATIONS[orientation]))
    expected = case.expected()
    scale = F.conv2d(x.double().abs(), w.double().abs(), case.biases[0].double().abs())  # type: ignore[union-attr]
    assert torch.equal(y.isnan(), expected.isnan() | ((scale > 3.4e38) & y.isnan()))
    finite = expected.isfinite() & (scale < 3.4e38)
    assert finite.any()
    # Relative to the sum of magnitudes, plus the smallest steps that fp32 has.
    assert ((y.double() - expected).abs()[finite] <= 1e-6 * scale[finite] + 81 * 2.0**-149).all()


def test_magnitudes_from_end_to_end_are_mixed() -> None:
    case = Hopper("ieee", (1, 9, 8, 19), 18, (3, 3), bias=False).case()
    case.x.mul_(10.0 ** make_tensor(case.x.shape, seed=5).mul(8).clamp(-30, 30))
    call = made(case, "ieee")
    y, expected = run(call, choose(call)), case.expected()
    scale = F.conv2d(case.x.double().abs(), case.weights[0].double().abs())
    assert ((y.double() - expected).abs() <= 1e-6 * scale).all()


@pytest.mark.parametrize("orientation", ORIENTATIONS)
@pytest.mark.parametrize("place", ["first", "last", "weight"])
def test_only_tiles_that_met_such_a_value_are_computed_term_by_term(place: str, orientation: str) -> None:
    case = Hopper("ieee", (2, 9, 32, 34), 80, (3, 3), bias=False).case()
    call = made(case, "ieee")
    tile = smallest(call, ORIENTATIONS[orientation])
    launch = built(call, tile).launches[1]
    assert launch.grid > 2 * launch.blocks(2)
    clean = run(call, tile)
    assert torch.equal(clean, run(call, replace(tile, units=2, stages=2)))
    x, w = case.x.clone(), case.weights[0].clone()
    # The value itself changes no more than the outputs that read it.
    touched = torch.zeros(clean.shape, dtype=torch.bool)
    met = torch.zeros(clean.shape, dtype=torch.bool)
    h, width = tile.box
    if place == "weight":
        w[tile.channels if tile.channels < 80 else 3, 4, 1, 1] = 1e-39
        first = tile.channels if tile.channels < 80 else 0
        met[:, first : first + tile.channels] = True
        touched[:, tile.channels if tile.channels < 80 else 3] = True
    else:
        n, row, column = (0, 0, 0) if place == "first" else (1, 31, 33)
        x[n, 5, row, column] = 1e-39
        # Of the tile that holds the output, which alone has the corner in its halo.
        last = ((clean.shape[2] - 1) // h * h, (clean.shape[3] - 1) // width * width)
        at = (0, 0) if place == "first" else last
        met[n, :, at[0] : at[0] + h, at[1] : at[1] + width] = True
        touched[n, :, max(row - 2, 0) : row + 1, max(column - 2, 0) : column + 1] = True
    y = run(made(replace(case, x=x, weights=(w,)), "ieee"), replace(tile, units=2, stages=2))
    assert torch.equal(y[~met], clean[~met])
    # Another order of the same sums: many last bits differ.
    assert (y != clean)[met & ~touched].float().mean() > 0.1


# ---- Anything --------------------------------------------------------------------------------------------------------


def random_hopper(rng: random.Random) -> tuple[str, Case, WgmmaTile]:
    """A problem that the family serves, and a tile: any of the planner's that is not slow to emulate."""
    while True:
        kind = rng.choice(list(KINDS))
        rank, groups = rng.choice((1, 2, 2, 3)), rng.choice((1, 1, 1, 2))
        channels = groups * rng.choice((1, 3, 8, 9, 16, 23, 32, 40))
        outputs = groups * rng.choice((1, 5, 17, 24, 33, 64, 70, 130))
        kernel = tuple(rng.choice((1, 2, 3, 3, 4)) for _ in range(rank))
        stride = tuple(rng.choice((1, 1, 2, 3)) for _ in range(rank))
        dilation = tuple(rng.choice((1, 1, 2, 3)) for _ in range(rank))
        extents = tuple(rng.randint(1, {1: 200, 2: 22, 3: 9}[rank]) for _ in range(rank))
        mode = rng.choice(("zeros", "zeros", "replicate", "reflect", "circular"))
        limits = [min(3, {"reflect": e - 1, "circular": e}.get(mode, 3)) for e in extents]
        padding = tuple((rng.randint(0, limit), rng.randint(0, limit)) for limit in limits)
        reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
        if any(e + sum(p) < r for e, p, r in zip(extents, padding, reach, strict=True)):
            continue
        hopper = Hopper(
            kind, (rng.choice((1, 2, 3)), channels, *extents), outputs, kernel, rng.choice(("contiguous", *LAYOUTS)),
            rng.choice(LAYOUTS), rng.random() < 0.7,
            {"stride": stride, "dilation": dilation, "groups": groups, "padding": padding, "padding_mode": mode},
        )  # fmt: skip
        case = hopper.case()
        candidates = [tile for tile in tiles(made(case, kind)) if positions(tile) * tile.channels <= 2**15]
        if not candidates:
            continue
        tile = rng.choice(candidates)
        if rng.random() < 0.5:
            least = least_units(made(case, kind), tile)
            tile = replace(tile, units=rng.randint(least, tile.units), stages=rng.randint(2, tile.stages))
        chain = random_chain(rng, tuple(case.expected().shape), longest=3)
        if any(t.step.needs == "row" for t in chain):
            continue  # a norm magnifies rounding errors by what happens to be in a row
        return kind, replace(case, chain=chain), tile


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
def test_a_random_tile_of_a_random_problem_is_wrong(seed: int) -> None:
    kind, case, tile = random_hopper(random.Random(seed))
    families = [step.kernel.family for step in built(made(case, kind), tile).launches][2:]
    try:
        check(case, kind, tile, *families)
    except AssertionError as error:
        raise AssertionError(f"{kind}, {tile}: {error}") from error


# ---- Waits -----------------------------------------------------------------------------------------------------------

#: Several tiles a block, rings shorter than a tile's units and stages, one and two consumers.
WAITING: dict[str, tuple[Hopper, Wanted]] = {
    "one consumer": (Hopper("tf32", (3, 20, 10, 9), 20, (3, 1)), channel_rows),
    "promoted": (Hopper("ieee", (3, 20, 10, 9), 20, (3, 1)), position_rows),
    "tensor copies": (Hopper("half", (3, 40, 10, 9), 20, (3, 1), "channels_last"), position_rows),
    "raw boxes": (Hopper("tf32", (3, 20, 10, 12), 20, (3, 1)), channel_rows),
    "two consumers": (Hopper("half", (1, 40, 10, 20), 130, (3, 1)), lambda tile: tile.channel_groups == 2),
    "flat": (Hopper("tf32", (3, 40, 20, 24), 20, (1, 2), parameters={"stride": 2}), lambda tile: tile.flat),
    "march": (Hopper("tf32", (3, 9, 5, 10, 9), 20, (2, 1, 1)), lambda tile: tile.march),
}


def waiting(name: str) -> tuple[Case, str, WgmmaTile]:
    hopper, wanted = WAITING[name]
    case = hopper.case()
    call = made(case, hopper.kind)
    tile = smallest(call, wanted, stages=2, stage_taps=1, steps=1)
    tile = replace(tile, units=least_units(call, tile), raws=min(tile.raws, 2))
    launch = built(call, tile).launches[1]
    assert launch.grid > launch.blocks(2)
    return case, hopper.kind, tile


@pytest.mark.parametrize("name", WAITING)
def test_accesses_race(name: str) -> None:
    check(*waiting(name), races=True, schedules=emulate.ALL_SCHEDULES)


HEADER = "device/halo_wgmma.cuh"

#: Where statements are removed from: the template's own text, or the header's where a kernel takes ways of its own.
MUTATED = {
    "one consumer": (None,),
    "promoted": (HEADER,),
    "tensor copies": (None,),
    "raw boxes": (None,),
    "flat": (None,),
    "march": (HEADER,),
}

#: What may be removed without notice. release(): the lanes of a warp have come out of wgmma_wait_group together; the
#: barrier says so for what a lane may have read by itself since.
UNNOTICED = {f"{HEADER}: __syncwarp();"}


#: What a default run leaves out: their files are mutated in other kernels too.
MORE_MUTATED = ("one consumer", "march")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.exhaustive] if name in MORE_MUTATED else []) for name in MUTATED]
)
def test_a_wait_or_fence_is_not_needed(name: str) -> None:
    case, kind, tile = waiting(name)
    call = made(case, kind)
    expected = check(case, kind, tile)
    kernel = render(built(call, tile).launches[1].kernel)
    survived, removed = set(), 0
    for file in MUTATED[name]:
        text = kernel.source if file is None else kernel.headers[file]
        for mutation in mutations(text):
            removed += 1
            if noticed(call, tile, mutated(kernel, file, mutation.text), expected):
                continue
            lines = text.split("\n")
            lines[mutation.line - 1] = lines[mutation.line - 1].replace(mutation.statement, "__builtin_trap();")
            # What this kernel does not come by, another one does.
            if noticed(call, tile, mutated(kernel, file, "\n".join(lines)), expected):
                survived.add(f"{file or kernel.name}: {mutation.statement}")
    assert removed >= 2
    assert survived <= UNNOTICED


def mutated(kernel: Rendered, file: str | None, text: str) -> Rendered:
    changed = replace(kernel, source=text) if file is None else replace(kernel, headers={**kernel.headers, file: text})
    emulate.build(changed)  # one that does not compile would be noticed for the wrong reason
    return changed


def noticed(call: Call, tile: WgmmaTile, mutant: Rendered, expected: Tensor) -> bool:
    def look(races: bool) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(emulated, "render", lambda k: mutant if k.family == "conv_wgmma" else render(k))
            y = run(call, tile, races=races, sanitize=not races, schedules=emulate.ALL_SCHEDULES)
            assert torch.equal(y, expected)

    return notices(lambda: look(races=False)) or notices(lambda: look(races=True))


# ---- What ptxas makes of it ------------------------------------------------------------------------------------------

#: Problems from 10 to 512 channels: (rank, C, K, filter, stride, dilation, groups, layout of x, width).
SPREAD = [
    (3, 32, 64, 3, 1, 1, 1, "contiguous", 64),
    (3, 192, 192, 3, 1, 1, 1, "channels_last", 64),
    (3, 96, 96, 3, 1, 1, 1, "contiguous", 63),
    (3, 64, 64, 3, 2, 1, 1, "channels_last", 64),
    (2, 64, 64, 3, 1, 1, 1, "contiguous", 64),
    (2, 512, 512, 1, 1, 1, 1, "channels_last", 64),
    (2, 128, 256, 3, 2, 1, 1, "contiguous", 64),
    (2, 64, 64, 7, 2, 1, 1, "channels_last", 64),
    (2, 10, 35, 4, 3, 2, 1, "contiguous", 63),
    (1, 256, 512, 7, 2, 1, 1, "contiguous", 64),
    (1, 128, 128, 3, 1, 1, 4, "contiguous", 63),
    (2, 64, 320, 3, 1, 1, 1, "contiguous", 64),
]

#: What ptxas writes when it serialised products, or moved or waited for their accumulators by itself.
SERIALISED = ("serialized", "C7510", "C7514", "C7519", "C7520")


def meta_call(kind: str, spread: tuple[Any, ...]) -> Call:
    """A call on tensors without memory, with a GELU and a residual behind the convolution."""
    rank, c, k, kernel, stride, dilation, groups, layout, width = spread
    dtype = KINDS[kind][0]

    def laid_out(*shape: int) -> Tensor:
        empty = torch.empty(shape, device="meta", dtype=dtype)
        return empty.contiguous(memory_format=CHANNELS_LAST[rank]) if layout == "channels_last" else empty

    out = (width + 2 * (kernel // 2) - dilation * (kernel - 1) - 1) // stride + 1
    weight = torch.empty(k, c // groups, *(kernel,) * rank, device="meta", dtype=dtype)
    bias = torch.empty(k, device="meta", dtype=dtype)
    steps = [E.gelu(), E.add(laid_out(2, k, *(out,) * rank))]
    return convolution_call(
        f"conv{rank}d", rank, False, laid_out(2, c, *(width,) * rank), weight, bias, steps, KINDS[kind][1],
        stride=stride, padding=kernel // 2, dilation=dilation, groups=groups,
    )[0]  # fmt: skip


def compiled(kernel: KernelPlan) -> Compiled:
    rendered = render(kernel)
    return compile_cubin(
        rendered.source, name=rendered.name, arch=ARCH, headers=rendered.headers, constants=rendered.constants
    )


def assert_runs_as_planned(kernel: KernelPlan, found: Compiled) -> None:
    """Products are not serialised, and as many blocks as the tile says fit on a multiprocessor."""
    tile, limits = kernel.tile, limits_of(ARCH)
    assert isinstance(tile, WgmmaTile)
    assert [word for word in SERIALISED if word in found.log] == [], found.log
    assert found.resources.static_shared == 0
    shared = family(kernel).shared_bytes(kernel)
    assert shared <= limits.shared_block
    assert resident_blocks(ARCH, found.resources.registers, tile.threads, shared) >= tile.blocks
    # setmaxnreg: what warpgroups take must have been given by others, all of them multiples of 8 that exist.
    producer, consumer = tile.registers
    start = found.resources.registers
    assert producer % 8 == consumer % 8 == 0
    assert 24 <= producer <= start <= consumer <= 256
    assert producer * tile.producers + consumer * tile.consumers <= start * (tile.producers + tile.consumers)


@pytest.mark.parametrize("spread", SPREAD, ids=str)
def test_ptxas_spills_or_serialises(spread: tuple[Any, ...]) -> None:
    # A compilation takes seconds: the kinds of products take turns over the problems.
    number = SPREAD.index(spread)
    kind = list(KINDS)[(number + number // len(KINDS)) % len(KINDS)]
    call = meta_call(kind, spread)
    for preference, tile in enumerate(tiles(call)[: 1 + (number % 3 == 0)]):
        packing, computing = (step.kernel for step in built(call, tile).launches)
        found = compiled(computing)
        assert_runs_as_planned(computing, found)
        if preference == 0:
            # A few words, around an epilogue whose tensors run ahead of it.
            assert found.resources.spill_stores <= 16, f"{kind}, {tile}: {found.resources}"
            assert not compiled(packing).resources.spills


@pytest.mark.parametrize("kind", ["half", "ieee"])
def test_groups_of_rows_that_are_no_vectors_spill(kind: str) -> None:
    call = meta_call(kind, (1, 128, 128, 3, 1, 1, 4, "contiguous", 63))
    found = compiled(built(call, choose(call)).launches[1].kernel)
    assert found.resources.spill_stores <= 16, f"{found.resources}"
