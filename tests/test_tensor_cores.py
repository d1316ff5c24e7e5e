"""The tensor-core kernels in the emulator, against torch in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernels.mutation import mutants, notices
from torch import Tensor

from jitconv import emulate, emulated, program
from jitconv import epilogue as E
from jitconv.architectures import KNOWN, arch_number, splits_fp32
from jitconv.families import HaloTile, KernelPlan
from jitconv.functional import convolution_call
from jitconv.kernel_resources import Resources
from jitconv.planning import plan_with_tile
from jitconv.planning.tensor_cores import choose_halo_tile, halo_tiles
from jitconv.program import Call
from jitconv.render import Rendered, render
from jitconv.toolchain import compile_cubin
from tests.strategies import run_emulated

pytestmark = pytest.mark.compiler

# One order of threads where arithmetic is tested; for what another order would change there is the test of barriers.
SCHEDULES = emulate.DEFAULT_SCHEDULES[2:]

#: Gets mma.sync for every kind of product.
ARCH = "sm_80"

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + math.prod(shape))).to(dtype)


def weight(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (randn(*shape, seed=1) / math.prod(shape[1:]) ** 0.5).to(dtype)


def call(x: Tensor, w: Tensor, b: Tensor | None, steps: Any = (), precision: str | None = None, **given: Any) -> Call:
    parameters = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1, **given}
    rank = x.dim() - 2
    return convolution_call(f"conv{rank}d", rank, False, x, w, b, steps, precision, **parameters)[0]


def run(c: Call, *families: str) -> Tensor:
    """The emulated result, by tensor-core kernels (and then ``families``)."""
    assert [step.kernel.family for step in program.build(c, ARCH).launches] == ["pack_weights", "conv_mma", *families]
    return run_emulated(c, ARCH, schedules=SCHEDULES)


def relative(result: Tensor, expected: Tensor) -> float:
    return float((result.double() - expected).norm() / expected.norm())


def tf32(t: Tensor) -> Tensor:
    """Rounded to 10 bits of mantissa, to nearest, ties away from zero."""
    bits = t.view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


CASES: dict[str, tuple[Tensor, Tensor, dict[str, Any]]] = {
    "3d with odd extents": (randn(1, 5, 5, 7, 18), weight(9, 5, 3, 3, 3), {"padding": 1}),
    "2d strided with uneven padding": (
        randn(2, 19, 21, 33), weight(35, 19, 3, 3), {"stride": (2, 1), "padding": ((1, 0), (2, 1))},
    ),
    "2d rectangular and dilated": (randn(1, 8, 20, 40), weight(16, 8, 2, 5), {"dilation": (3, 2), "padding": 2}),
    "1d long filter": (randn(1, 24, 700), weight(8, 24, 7), {"padding": 3}),
    "pointwise, several products a chunk": (randn(2, 37, 9, 40), weight(50, 37, 1, 1), {}),
    "groups that fill no tile": (randn(1, 12, 7, 35), weight(21, 4, 3, 3), {"groups": 3, "padding": 1}),
    "more channels than a block": (randn(1, 10, 5, 20), weight(150, 10, 3, 3), {"padding": 1}),
    "reflected": (randn(1, 6, 9, 17), weight(8, 6, 5, 5), {"padding": 2, "padding_mode": "reflect"}),
    "circular": (randn(1, 6, 9, 17), weight(8, 6, 3, 3), {"padding": 1, "padding_mode": "circular"}),
}  # fmt: skip


def exact(x: Tensor, w: Tensor, b: Tensor | None, given: dict[str, Any]) -> Tensor:
    given = dict(given)
    pairs = given.pop("padding", 0)
    mode = given.pop("padding_mode", "zeros")
    rank = x.dim() - 2
    pairs = [pairs] * rank if isinstance(pairs, int) else pairs
    sides = [side for pair in reversed(pairs) for side in ((pair, pair) if isinstance(pair, int) else pair)]
    x = F.pad(x.double(), sides, mode="constant" if mode == "zeros" else mode)
    return CONV[rank](x, w.double(), None if b is None else b.double(), **given)


@pytest.mark.parametrize("name", CASES)
def test_tf32_is_the_product_of_rounded_operands(name: str) -> None:
    x, w, given = CASES[name]
    b = randn(w.shape[0])
    y = run(call(x, w, b, [E.silu()], "tf32", **given))
    # The operands are rounded to nearest and nothing else is lost: truncation would show as an error ten times this.
    assert relative(y, F.silu(exact(tf32(x), tf32(w), b, given))) < 2e-6
    assert y.is_contiguous()


@pytest.mark.parametrize("name", ["3d with odd extents", "2d strided with uneven padding", "circular"])
def test_three_products_are_as_exact_as_fp32(name: str) -> None:
    x, w, given = CASES[name]
    y = run(call(x, w, None, (), "ieee", **given))
    assert relative(y, exact(x, w, None, given)) < 3e-7


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("layout", "k"),
    [("contiguous", 40), ("vectors of channels", 40), ("channels_last, unaligned", 40), ("vectors of channels", 5)],
)
def test_16_bit_types_are_rounded_once(dtype: torch.dtype, layout: str, k: int) -> None:
    c = 21 if layout.endswith("unaligned") else 32
    x, w, b = randn(1, c, 9, 20, dtype=dtype), weight(k, c, 3, 3, dtype=dtype), randn(k, dtype=dtype)
    if layout != "contiguous":
        x = x.contiguous(memory_format=torch.channels_last)
    made = call(x, w, b, [E.mul(2.0)], padding=1)
    assert program.build(made, ARCH).problem.x_vector == (layout == "vectors of channels")
    y = run(made)
    assert y.is_contiguous(memory_format=made.memory_format)
    expected = exact(x, w, b, {"padding": 1}) * 2
    # Half a unit in the last place of the result, and what fp32 accumulation adds to that.
    step = 2.0**-11 if dtype == torch.float16 else 2.0**-8
    assert ((y.double() - expected).abs() <= step * expected.abs() + 1e-5).all()


def test_a_view_that_straddles_vectors_is_read_element_by_element() -> None:
    base = randn(1, 9, 20, 40, dtype=torch.float16)
    x = base[..., 3:35].permute(0, 3, 1, 2)  # dense channels that start at an odd address
    y = run(call(x, weight(8, 32, 3, 3, dtype=torch.float16), None))
    assert relative(y, exact(x, weight(8, 32, 3, 3, dtype=torch.float16), None, {})) < 1e-3


def test_what_follows_reads_the_same_workspace() -> None:
    x, w, b = randn(2, 8, 9, 21), weight(5, 8, 3, 3), randn(5)
    y = run(call(x, w, b, [E.gelu(), E.layer_norm(21), E.max_pool(3)], "tf32", padding=1), "layer_norm")
    v = F.gelu(exact(tf32(x), tf32(w), b, {"padding": 1}))
    assert relative(y, F.max_pool2d(F.layer_norm(v, (21,)), 3)) < 5e-6


def test_the_prologue_comes_before_zero_padding() -> None:
    x, w = randn(1, 8, 9, 17, dtype=torch.float16), weight(8, 8, 3, 3, dtype=torch.float16)
    plain = call(x, w, None, padding=1)
    made = Call(**{**plain.__dict__, "prologue": (E.add(1.0), E.relu())})
    y = run(made)
    expected = exact((x + 1).relu(), w, None, {"padding": 1})
    assert relative(y, expected) < 1e-3


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (float("nan"), "x"), (float("inf"), "x"), (float("-inf"), "weight"), (float("nan"), "weight"),
        (1e-38, "x"), (1e-42, "x"), (3e38, "x"), (1e-40, "weight"),
    ],
)  # fmt: skip
def test_values_that_do_not_split_are_computed_in_fp32(value: float, where: str) -> None:
    x, w = randn(1, 4, 6, 17), weight(3, 4, 3, 3)
    if where == "x":
        # A corner of the image holds nothing else, so its outputs depend on these values alone.
        x[0, :, :3, :3] = value if math.isnan(value) or math.isinf(value) else value * (1 + x[0, :, :3, :3].abs() % 0.5)
    else:
        w[1] = value
    y = run(call(x, w, None, (), "ieee"))
    expected = exact(x, w, None, {})
    scale = exact(x.abs(), w.abs(), None, {})
    assert torch.equal(y.isnan(), expected.isnan())
    finite = expected.isfinite() & (expected.abs() < 3.4e38)
    # Relative to the sum of magnitudes, plus the smallest steps that fp32 has.
    assert ((y.double() - expected).abs()[finite] <= 1e-6 * scale[finite] + 36 * 2.0**-149).all()


def test_64_bit_offsets_read_or_write_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "index_bits", lambda *offsets: 64)
    x, w, b = randn(2, 9, 7, 20), weight(10, 9, 3, 3), randn(10)
    made = call(x, w, b, [E.add(randn(2, 10, 7, 20))], "tf32", padding=1)
    assert program.build(made, ARCH).problem.index_bits == 64
    expected = exact(tf32(x), tf32(w), b, {"padding": 1}) + randn(2, 10, 7, 20)
    assert relative(run(made), expected) < 2e-6


def test_a_sample_does_not_depend_on_its_batch() -> None:
    x, w = randn(3, 6, 8, 20), weight(7, 6, 3, 3)
    whole = run(call(x, w, None, (), "tf32"))
    for i in range(3):
        assert torch.equal(run(call(x[i : i + 1], w, None, (), "tf32")), whole[i : i + 1])


def test_sizes_and_numbers_compile_nothing_new() -> None:
    w = weight(7, 6, 3, 3)

    def kernels(*shape: int, factor: float = 1.0) -> list[Any]:
        made = call(randn(*shape), w, None, [E.mul(factor)], "tf32")
        return [step.kernel for step in program.build(made, ARCH).launches]

    assert kernels(1, 6, 8, 20) == kernels(5, 6, 100, 3, factor=2.0)


SPILLED = [
    # rank, filter, stride, output channels: what spilled once at some architecture, and the tiles' corners.
    (1, 5, 2, 256), (1, 7, 1, 64), (2, 1, 1, 256), (2, 3, 1, 16), (2, 3, 2, 256), (2, 5, 1, 64), (2, 7, 2, 32),
    (3, 3, 1, 64), (3, 3, 2, 256),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("arch", KNOWN)
def test_default_tiles_spill(arch: str) -> None:
    def compiled(kernel: KernelPlan) -> Resources:
        rendered = render(kernel)
        return compile_cubin(rendered.source, name=rendered.name, arch=arch, headers=rendered.headers).resources

    served = 0
    for number, (rank, kernel, stride, k) in enumerate(SPILLED):
        # A compilation takes seconds: shapes and kinds of products take turns over the architectures.
        if (number + arch_number(arch) // 5) % 2:
            continue
        kinds = [(torch.float32, "tf32"), (torch.float16, None), (torch.float32, "ieee"), (torch.bfloat16, None)]
        if not splits_fp32(arch):
            del kinds[2]
        for dtype, precision in (kinds * 2)[(number + arch_number(arch)) % len(kinds) :][:1]:
            x = torch.empty(1, 64, *(64,) * rank, device="meta", dtype=dtype)
            if number % 2 and rank > 1:
                x = x.contiguous(memory_format=torch.channels_last if rank == 2 else torch.channels_last_3d)
            w, b = x.new_empty(k, 64, *(kernel,) * rank), x.new_empty(k)
            made = call(x, w, b, [E.gelu(), E.add(x.new_empty(k))], precision, stride=stride)
            problem = program.build(made, arch).problem
            tile = choose_halo_tile(problem, arch)
            if tile is None:
                continue  # its halo does not fit; FFMA kernels have tests of their own (test_templates.py)
            served += 1
            for kernel_plan in plan_with_tile(problem, tile).kernels:
                resources = compiled(kernel_plan)
                # A few words outside of the loop over taps: all registers but 16 are sums and operands there.
                # NVRTC 13.0 needs more of them on sm_120 than later ones.
                most = 128 if arch == "sm_120" else 64
                assert resources.spill_stores <= most, (rank, kernel, stride, k, dtype, resources)
    assert served >= 3 if arch_number(arch) >= 80 else served == 0


def built_with(c: Call, tile: HaloTile) -> program.Program:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "plan", lambda problem, *_: plan_with_tile(problem, tile))
        return program.build(c, ARCH)


def run_with(c: Call, tile: HaloTile, **options: Any) -> Tensor:
    options = {"schedules": SCHEDULES, **options}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "plan", lambda problem, *_: plan_with_tile(problem, tile))
        return run_emulated(c, ARCH, **options)


def small_tile(c: Call, **changes: Any) -> HaloTile:
    """The smallest tile for a call, with ``changes``: many tiles in a small image."""
    problem = program.build(c, ARCH).problem
    smallest = min(halo_tiles(problem, ARCH, most=1000), key=lambda t: (t.positions * t.channels, t.threads))
    return replace(smallest, **changes)


#: What distinguishes tiles, the problem where it would show, and in which layout.
TILES: dict[str, tuple[str, dict[str, Any]]] = {
    "one tile of channels a warp": (
        "contiguous", {"channel_tiles": 1, "channel_warps": 4, "position_warps": 2, "box": (1, 4, 16)}),
    "one tile of channels a warp, side by side": (
        "channels_last", {"channel_tiles": 1, "channel_warps": 2, "position_warps": 2, "box": (1, 2, 32)}),
    "an odd number of tiles of channels": (
        "contiguous", {"channel_tiles": 3, "channel_warps": 1, "position_warps": 4, "box": (1, 4, 32)}),
    "an odd number of tiles of channels, side by side": (
        "channels_last", {"channel_tiles": 3, "channel_warps": 1, "position_warps": 4, "box": (1, 8, 16)}),
    "four tiles of channels": (
        "contiguous", {"channel_tiles": 4, "channel_warps": 1, "position_warps": 2, "box": (1, 2, 32)}),
    "four tiles of channels, side by side": (
        "channels_last", {"channel_tiles": 4, "channel_warps": 1, "position_warps": 2, "box": (1, 4, 16)}),
    "a warp owns part of a row": (
        "contiguous", {"channel_tiles": 2, "channel_warps": 1, "position_warps": 4, "box": (1, 2, 64)}),
    "one producer, many items each": ("contiguous", {"producers": 1, "depth": 3}),
    "many producers, few items": ("channels_last", {"producers": 7, "depth": 1}),
    "shortest rings": ("contiguous", {"stages": 2, "units": 2, "stage_taps": 1, "run_taps": 1}),
    "a stage of every tap": ("channels_last", {"stages": 2, "stage_taps": 9, "run_taps": 9}),
    "a stage of taps and steps": ("contiguous", {"steps": 2, "stages": 2, "stage_taps": 18, "run_taps": 3}),
}  # fmt: skip


@pytest.mark.parametrize("name", TILES)
def test_a_tile_that_nobody_chooses_by_default_is_wrong(name: str) -> None:
    layout, changes = TILES[name]
    kind: tuple[torch.dtype, str | None] = (torch.float32, "tf32") if layout == "contiguous" else (torch.bfloat16, None)
    # Channels that end within a chunk (and, of 16 bits, in a vector), outputs that end within a tile and a run.
    x = randn(2, 24, 9, 37, dtype=kind[0])
    w, b = weight(57, 24, 3, 3, dtype=kind[0]), randn(57, dtype=kind[0])
    if layout == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    made = call(x, w, b, [E.add(randn(2, 57, 9, 37, dtype=kind[0], seed=5))], kind[1], padding=1)
    tile = small_tile(made, channel_tiles=2, channel_warps=1, position_warps=4, position_tiles=2, box=(1, 4, 16))
    tile = replace(tile, **changes)
    tile = replace(tile, position_tiles=math.prod(tile.box) // 8 // tile.position_warps)
    launches = built_with(made, tile).launches
    assert launches[1].blocks(2) < launches[1].grid  # blocks that take several tiles
    y = run_with(made, tile)
    expected = exact(tf32(x), tf32(w), b, {"padding": 1}) if kind[1] else exact(x, w, b, {"padding": 1})
    expected = expected + randn(2, 57, 9, 37, dtype=kind[0], seed=5).double()
    assert relative(y, expected) < (2e-6 if kind[1] else 2.0**-8)
    assert y.is_contiguous(memory_format=made.memory_format)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tf32", "ieee", "copied"])
def test_every_barrier_is_needed(kind: str) -> None:
    if kind == "copied":
        x = randn(1, 40, 5, 17, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
        made = call(x, weight(20, 40, 3, 3, dtype=torch.bfloat16), None)
    else:
        made = call(randn(1, 20, 5, 17), weight(20, 20, 3, 3), None, (), kind)
    tile = small_tile(made, stages=2, units=2, stage_taps=3, run_taps=3)
    expected = run_with(made, tile)
    kernel = render(built_with(made, tile).launches[1].kernel)
    # The rings' own statements are the same for all kinds.
    shared = list(mutants(kernel, "device/halo_gemm.cuh")) if kind == "tf32" else []
    own = list(mutants(kernel, kernel.name))
    assert (len(shared), len(own)) == {"tf32": (12, 1), "ieee": (0, 1), "copied": (0, 3)}[kind]

    def noticed(mutant: Rendered) -> bool:
        def check(races: bool) -> None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(emulated, "render", lambda k: mutant if k.family == "conv_mma" else render(k))
                y = run_with(made, tile, races=races, sanitize=not races, schedules=emulate.ALL_SCHEDULES)
                assert torch.equal(y, expected)

        return notices(lambda: check(races=False)) or notices(lambda: check(races=True))

    assert [statement for statement, mutant in [*shared, *own] if not noticed(mutant)] == []
