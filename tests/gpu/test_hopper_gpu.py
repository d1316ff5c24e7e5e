"""The Hopper family on a GPU: tiles that the planner may choose, against float64 at the limits of their precision."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from random_calls import Generator, describe, error, exact, over_draws
from test_operators_gpu import crops, poison, randn
from torch import Tensor

import jitconv
from jitconv import epilogue as E
from jitconv import launch, program, runtime
from jitconv.compilation import compiled_kernel
from jitconv.families import WgmmaTile
from jitconv.functional import convolution_call
from jitconv.planning import plan_with_tile
from jitconv.planning.hopper import wgmma_tiles
from jitconv.program import Call, Program, build

ARCH = "sm_90a"
PROBLEMS = int(os.environ.get("JITCONV_GPU_PROBLEMS", "240")) // 2
KINDS = [(torch.float32, "tf32"), (torch.float32, "ieee"), (torch.float16, "ieee"), (torch.bfloat16, "ieee")]
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@pytest.fixture(autouse=True, scope="module")
def _needs_hopper() -> None:
    arch = launch.device_info(0).arch
    if arch != ARCH:
        pytest.skip(f"the GPU is {arch}; warpgroup products are those of {ARCH}")


def tiles(call: Call) -> list[WgmmaTile]:
    return list(wgmma_tiles(build(call, ARCH).problem, ARCH))


def built(call: Call, tile: WgmmaTile) -> Program:
    """The Program of ``call`` whose convolution has ``tile``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "plan", lambda problem, *_: plan_with_tile(problem, tile))
        return build(call, ARCH)


def run(call: Call, tile: WgmmaTile) -> Tensor:
    """``call`` by kernels with ``tile``; its output and workspaces are NaN before."""
    device, chosen = call.x.device, built(call, tile)
    info = launch.device_info(device.index)
    kernels = tuple(runtime.loaded_kernel(step.kernel, step.shared_bytes, device.index) for step in chosen.launches)
    for step in chosen.launches:
        poison(step.shape, step.dtype)
    # Not by the public call: what that has prepared for this signature has another tile.
    return runtime._launch_all(runtime.Prepared(chosen, kernels, device, info.sm_count), call)


def bits(t: Tensor) -> Tensor:
    """NaN and the sign of zero count too; any strides."""
    return t.view(torch.int32 if t.element_size() == 4 else torch.int16)


def compile_all(chosen: Sequence[tuple[Call, WgmmaTile]]) -> None:
    """Compile the kernels of all calls by all cores at once."""
    kernels = {step.kernel for call, tile in chosen for step in built(call, tile).launches}
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda kernel: compiled_kernel(kernel, ARCH), kernels))


# ---- Random problems, random tiles -----------------------------------------------------------------------------------


class Draw(Generator):
    """Forward convolutions with enough outputs for several tiles a multiprocessor in some of them."""

    def convolution(self, kind: tuple[torch.dtype, str]) -> Call:
        while True:
            try:
                return self._convolution(*kind)
            except RuntimeError as refused:
                # Sizes are drawn without looking: those that torch refuses too are drawn again.
                if not str(refused).startswith("conv") and "output would be empty" not in str(refused):
                    raise

    def _convolution(self, dtype: torch.dtype, precision: str) -> Call:
        r = self.random
        rank, groups = r.choice((1, 2, 2, 3, 3)), r.choice((1, 1, 1, 2, 3))
        c = groups * r.choice((1, 3, 8, 15, 16, 32, 40, 64, 96, 130))
        k = groups * r.choice((1, 5, 17, 32, 48, 64, 65, 96, 128, 200, 270))
        kernel = [r.choice((1, 2, 3, 3, 4, 5)) for _ in range(rank)]
        stride = [r.choice((1, 1, 2, 3, 4)) for _ in range(rank)]
        dilation = [r.choice((1, 1, 1, 2, 3)) for _ in range(rank)]
        largest = {1: 3000, 2: 90, 3: 24}[rank]
        # Rows of whole vectors, which tensor copies take, as often as others.
        spatial = [r.randint(1, largest) if r.random() < 0.5 else 8 * r.randint(1, largest // 8) for _ in range(rank)]
        x = self.tensor(r.choice((1, 2, 3, 7)), c, *spatial, dtype=dtype)
        x = x.contiguous(memory_format=LAST[x.dim()]) if rank > 1 and r.random() < 0.4 else self.laid_out(x)
        scale = (c // groups * math.prod(kernel)) ** -0.5
        weight = self.laid_out(self.tensor(k, c // groups, *kernel, dtype=dtype) * scale)
        bias = self.tensor(k, dtype=dtype) if r.random() < 0.7 else None
        mode = r.choice(("zeros", "zeros", "zeros", "replicate", "reflect", "circular"))
        padding = [[r.randint(0, 3), r.randint(0, 3)] for _ in range(rank)]
        make = functools.partial(
            convolution_call, f"conv{rank}d", rank, False, x, weight, bias, precision=precision, stride=stride,
            dilation=dilation, groups=groups, padding=padding, padding_mode=mode,
        )  # fmt: skip
        shape = build(make(())[0], ARCH).shape
        if 0 in shape:
            raise RuntimeError("convolution without an output: draw again")
        return make(self.epilogue(shape, dtype))[0]


@pytest.fixture(scope="module")
def drawn() -> list[tuple[Call, WgmmaTile]]:
    """Random problems in turns over the kinds of products, each with one of its tiles at random; kernels compiled."""
    draw, chosen = Draw(seed=90), []
    while len(chosen) < PROBLEMS:
        call = draw.convolution(KINDS[len(chosen) % len(KINDS)])
        candidates = tiles(call)
        if candidates:
            # The planner's choice as often as all others.
            tile = candidates[0] if draw.random.random() < 0.5 else draw.random.choice(candidates)
            chosen.append((call, tile))
    compile_all(chosen)
    return chosen


@pytest.mark.parametrize("index", range(PROBLEMS))
def test_a_random_tile_of_a_random_problem_is_wrong(drawn: list[tuple[Call, WgmmaTile]], index: int) -> None:
    call, tile = drawn[index]
    result = run(call, tile)
    assert result.shape == exact(call).shape, describe(call)
    assert result.is_contiguous(memory_format=call.memory_format), describe(call)
    assert torch.equal(bits(result), bits(run(call, tile))), f"{tile}: {describe(call)}"
    reached, limit = over_draws(call, lambda drawn: run(drawn, tile))
    assert reached <= limit, f"error {reached:.3e} > {limit:.3e} with {tile}: {describe(call)}"


# ---- Many tiles of some problems -------------------------------------------------------------------------------------


def convolution(
    kind: tuple[torch.dtype, str], x: Sequence[int], w: Sequence[int], steps: Sequence[E.Step] = (), last: bool = False,
    **given: Any,
) -> Call:  # fmt: skip
    dtype, precision = kind
    rank = len(x) - 2
    tensor = randn(*x).to(dtype)
    weight = (randn(*w) * math.prod(w[1:]) ** -0.5).to(dtype)
    given = {"stride": 1, "padding": 1, "dilation": 1, "groups": 1, **given}
    tensor = tensor.contiguous(memory_format=LAST[len(x)]) if last else tensor
    bias = randn(w[0]).to(dtype)
    return convolution_call(f"conv{rank}d", rank, False, tensor, weight, bias, steps, precision, **given)[0]


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0]}-{kind[1]}")
@pytest.mark.parametrize("stride", [1, 2])
def test_some_tile_is_wrong(kind: tuple[torch.dtype, str], last: bool, stride: int) -> None:
    # Extents that no box divides, and enough of them that every block takes several tiles.
    call = convolution(kind, (3, 72, 5, 61, 104), (136, 72, 3, 3, 3), [E.gelu()], last, stride=stride)
    first, *others = tiles(call)
    candidates = [first]
    for channel_rows in (True, False):
        kept = [tile for tile in others if tile.channel_rows == channel_rows]
        candidates += random.Random(stride).sample(kept, min(5, len(kept)))
    assert len(candidates) > 6
    compile_all([(call, tile) for tile in candidates])
    results = [run(call, tile) for tile in candidates]
    expected = exact(call)
    for tile, result in zip(candidates, results, strict=True):
        reached = error(result, expected)
        limit = {"tf32": 4e-4, "ieee": 1e-6}[kind[1]] if kind[0] == torch.float32 else 4e-3
        assert reached <= limit, f"{tile}: {reached:.3e}"


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0]}-{kind[1]}")
def test_a_sample_depends_on_its_batch_or_on_the_run(kind: tuple[torch.dtype, str], last: bool) -> None:
    call = convolution(kind, (7, 40, 45, 67), (72, 40, 3, 3), [E.silu()], last)
    whole = runtime.run(call)
    for _ in range(20):
        assert torch.equal(whole, runtime.run(call))
    for i in range(7):
        # A copy: a slice of the batch may begin where tensor copies cannot.
        alone = dataclasses.replace(call, x=call.x[i : i + 1].clone(memory_format=torch.preserve_format))
        assert torch.equal(whole[i : i + 1], runtime.run(alone))


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
def test_what_shared_memory_held_before_changes_bits(last: bool) -> None:
    # Halos that fill no 128 bytes; between runs another kernel leaves NaN and huge numbers in shared memory.
    call = convolution((torch.float32, "ieee"), (2, 24, 45, 68), (72, 24, 3, 4), (), last)
    dirt = convolution((torch.float32, "ieee"), (16, 64, 64, 64), (64, 64, 3, 3), (), last)
    clean = runtime.run(call)
    for value in (math.nan, 3e38, 1e-40):
        dirt.x.fill_(value)
        runtime.run(dirt)
        assert torch.equal(clean, runtime.run(call))


def test_only_tiles_that_met_a_value_that_does_not_split_are_computed_term_by_term() -> None:
    call = convolution((torch.float32, "ieee"), (2, 32, 65, 70), (64, 32, 3, 3), (), padding=0)
    for tile in random.Random(0).sample(tiles(call), 4):
        clean = run(call, tile)
        dirty = call.x.clone()
        dirty[1, 7, 64, 69] = 1e-39  # in the halo of the last tile alone
        changed = dataclasses.replace(call, x=dirty)
        y = run(changed, tile)
        met = torch.zeros_like(clean, dtype=torch.bool)
        h, w = (((size - 1) // extent) * extent for size, extent in zip(clean.shape[2:], tile.box, strict=True))
        met[1, :, h:, w:] = True
        assert torch.equal(y[~met], clean[~met])
        assert (y != clean)[met].any()
        assert error(y, exact(changed)) < 1e-6


# ---- Beyond 2^31 elements --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
def test_input_and_output_of_more_than_2_to_the_31_elements(last: bool) -> None:
    height, width = 11_600, 11_608
    x = torch.empty(1, 16, height, width, device="cuda", dtype=torch.bfloat16)
    x = x.to(memory_format=torch.channels_last) if last else x
    x.normal_()
    assert x.numel() > 2**31
    w = (randn(17, 16, 3, 3) / 12).bfloat16()
    poison((1, 17, height, width), torch.bfloat16)
    y = jitconv.conv2d(x, w, padding=1, epilogue=[E.silu()])
    families = [step.kernel.family for step in build(_call(x, w), ARCH).launches]
    assert families[-1] == "conv_wgmma"
    assert y.numel() > 2**31
    padded = F.pad(x[..., -42:].double(), (0, 1, 1, 1))
    for rows in crops(height):
        window = padded[..., rows.start : rows.stop + 2, :]
        expected = F.silu(F.conv2d(window, w.double()))
        assert error(y[..., rows, -41:], expected) < 4e-3


def _call(x: Tensor, w: Tensor) -> Call:
    return convolution_call(
        "conv2d", 2, False, x, w, None, [E.silu()], "ieee", stride=1, padding=1, dilation=1, groups=1
    )[0]
