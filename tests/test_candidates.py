"""Tiles worth measuring, and the resource model that rejects tiles before they are compiled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from jitconv.architectures import KNOWN, limits_of
from jitconv.families import HaloTile, KernelPlan, Tile, WgmmaTile, family
from jitconv.inspect import resident_blocks
from jitconv.manifest import ManifestEntry
from jitconv.planning import candidates, heuristic_tile, plan, plan_with_tile, selection
from jitconv.planning.budget import budget, misfit
from jitconv.planning.hopper import wgmma_tiles
from jitconv.planning.selection import ConvolutionTile, every_tile, identity
from jitconv.problem import Problem
from jitconv.program import build
from jitconv.render import render
from jitconv.toolchain import Compiled, compile_cubin

EPILOGUE = ["gelu", {"step": "add", "other": "tensor"}]


def problem(operator: str, x: list[int], weight: list[int], arch: str = "sm_90a", **said: Any) -> Problem:
    table = {"operator": operator, "input": x, "weight": weight, "bias": True, "epilogue": EPILOGUE, **said}
    return build(ManifestEntry("a test", "problem", table).call(), arch).problem


def spread(arch: str) -> dict[str, Problem]:
    """Problems of every kind of product, layout and size."""
    last = {"memory_format": "channels_last"}
    return {
        "volume_tf32": problem("conv3d", [2, 32, 16, 64, 64], [64, 32, 3, 3, 3], arch, precision="tf32"),
        "volume_ieee": problem("conv3d", [2, 32, 16, 64, 64], [64, 32, 3, 3, 3], arch, precision="ieee"),
        "video_bf16": problem("conv3d", [1, 192, 6, 32, 48], [192, 192, 3, 3, 3], arch, dtype="bfloat16", padding=1),
        "wide_last": problem("conv2d", [2, 512, 56, 56], [512, 512, 3, 3], arch, dtype="bfloat16", padding=1, **last),
        "strided_ieee": problem("conv2d", [8, 64, 57, 57], [96, 64, 3, 3], arch, precision="ieee", stride=2),
        "pointwise": problem("conv2d", [8, 64, 56, 56], [64, 64, 1, 1], arch, precision="tf32", **last),
        "stem": problem("conv2d", [8, 3, 224, 224], [64, 3, 7, 7], arch, precision="tf32", stride=2, padding=3),
        "groups": problem("conv2d", [8, 64, 56, 56], [64, 4, 3, 3], arch, precision="tf32", groups=16),
        "audio": problem("conv1d", [8, 64, 5600], [128, 64, 7], arch, dtype="float16"),
        "transposed": problem("conv_transpose2d", [8, 64, 28, 28], [64, 32, 4, 4], arch, stride=2),
    }


def kernel_of(p: Problem, tile: ConvolutionTile) -> KernelPlan:
    """The kernel that multiplies."""
    return next(k for k in plan_with_tile(p, tile).kernels if not k.family.startswith("pack"))


# ---- candidates -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", KNOWN)
def test_the_heuristic_is_no_candidate(arch: str) -> None:
    """A winner is judged against it: it must be measured, and it is the first."""
    for p in spread(arch).values():
        assert candidates(p, arch)[0] == heuristic_tile(p, arch) == kernel_of(p, plan(p, arch).kernels[0].tile).tile


@pytest.mark.parametrize("arch", KNOWN)
def test_a_candidate_is_measured_twice_or_does_not_fit(arch: str) -> None:
    for name, p in spread(arch).items():
        found = candidates(p, arch)
        assert len({identity(tile) for tile in found}) == len(found) <= 40, name
        assert [misfit(kernel_of(p, tile), arch) for tile in found] == [None] * len(found), name


def test_a_family_is_missing_on_hopper() -> None:
    found = {name: {type(tile) for tile in candidates(p, "sm_90a")} for name, p in spread("sm_90a").items()}
    assert found["volume_tf32"] == {WgmmaTile, HaloTile}
    assert found["video_bf16"] == {WgmmaTile, HaloTile}
    # With few channels a group tensor cores are partly empty: FFMA may win.
    assert found["stem"] == found["groups"] == {WgmmaTile, HaloTile, Tile}
    assert found["transposed"] == {Tile}


def test_both_orientations_and_both_numbers_of_blocks_are_in_question() -> None:
    for name in ("volume_tf32", "wide_last", "pointwise"):
        tiles = [tile for tile in candidates(spread("sm_90a")[name], "sm_90a") if isinstance(tile, WgmmaTile)]
        shapes = {(tile.channel_rows, tile.blocks) for tile in tiles}
        every = {(t.channel_rows, t.blocks) for t in wgmma_tiles(spread("sm_90a")[name], "sm_90a")}
        assert shapes == every, name
        assert len(tiles) <= 32


def test_the_halo_family_has_one_candidate_where_it_is_the_best() -> None:
    found = candidates(spread("sm_80")["pointwise"], "sm_80")
    assert len(found) > 2
    assert all(isinstance(tile, HaloTile) for tile in found)


def test_ffma_has_one_candidate_where_it_is_the_best() -> None:
    for name in ("transposed", "volume_tf32"):
        found = candidates(spread("sm_75")[name], "sm_75")
        assert len(found) > 1
        assert all(isinstance(tile, Tile) for tile in found)


def test_the_name_of_a_tile_hangs_on_its_rings_or_misses_a_field() -> None:
    tile = heuristic_tile(spread("sm_90a")["volume_tf32"], "sm_90a")
    assert isinstance(tile, WgmmaTile)
    assert identity(replace(tile, stages=3, units=2, raws=1, depth=2)) == identity(tile)
    for change in ({"steps": 2}, {"blocks": 3 - tile.blocks}, {"channels": 128}, {"strip": (1, 1)}):
        assert identity(replace(tile, **change)) != identity(tile)  # type: ignore[arg-type]
    ffma = Tile(128, 64, 8, 8, 8)
    assert identity(replace(ffma, depth=16)) != identity(ffma)


def test_a_tile_that_does_not_fit_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the list of a family says, the model has the last word."""
    p = spread("sm_90a")["video_bf16"]
    fitting = heuristic_tile(p, "sm_90a")
    assert isinstance(fitting, WgmmaTile)
    bad = replace(fitting, stages=64)

    def tiles(*_: object) -> Iterator[WgmmaTile]:
        yield bad
        yield fitting

    monkeypatch.setattr(selection, "wgmma_tiles", tiles)
    assert heuristic_tile(p, "sm_90a") == fitting
    assert bad not in candidates(p, "sm_90a")


# ---- the model ------------------------------------------------------------------------------------------------------


def test_what_cannot_fit_passes() -> None:
    p = spread("sm_90a")["volume_tf32"]
    tile = heuristic_tile(p, "sm_90a")
    assert isinstance(tile, WgmmaTile)
    halo = next(t for t in every_tile(spread("sm_80")["video_bf16"], "sm_80") if isinstance(t, HaloTile))

    def reason(tile: ConvolutionTile, arch: str = "sm_90a") -> str:
        return misfit(kernel_of(p, tile), arch) or ""

    assert "shared memory" in reason(replace(tile, stages=64))
    assert "registers" in reason(replace(tile, channels=256, stages=2, units=2))
    assert "threads" in reason(replace(tile, position_groups=16))
    assert "registers" in reason(replace(halo, math="TF32", position_tiles=32))
    # What fits an A100 need not fit a GPU with 100 KiB of shared memory.
    large = replace(halo, math="TF32", box=(8, 8, 16), stages=2, units=2)
    assert reason(large, "sm_80") == ""
    assert "shared memory" in reason(large, "sm_86")


def compiled(kernel: KernelPlan, arch: str) -> Compiled:
    text = render(kernel)
    return compile_cubin(text.source, name=text.name, arch=arch, headers=text.headers, constants=text.constants)


#: A problem and every how manieth of its candidates: a compilation takes seconds.
COMPILED = [
    ("sm_90a", "volume_tf32", 22),
    ("sm_90a", "volume_ieee", 14),
    ("sm_90a", "video_bf16", 22),
    ("sm_90a", "strided_ieee", 18),
    ("sm_90a", "pointwise", 26),
    ("sm_90a", "groups", 16),
    ("sm_80", "volume_ieee", 1),
    ("sm_80", "pointwise", 2),
    ("sm_86", "audio", 1),
    ("sm_75", "transposed", 1),
]


@pytest.mark.parametrize(("arch", "name", "stride"), COMPILED, ids=lambda value: str(value))
def test_the_compiler_disagrees_with_the_model(arch: str, name: str, stride: int) -> None:
    p = spread(arch)[name]
    for tile in candidates(p, arch)[::stride]:
        kernel = kernel_of(p, tile)
        model, found = budget(kernel, arch), compiled(kernel, arch)
        used = found.resources
        assert used.registers <= model.registers, tile
        assert used.static_shared == 0
        assert (model.threads, model.shared_bytes) == (tile.threads, family(kernel).shared_bytes(kernel))
        # A few words outside of the inner loop; fewer where nothing has been measured (other tests).
        assert used.spill_stores <= 64, f"{tile}: {used}"
        if isinstance(tile, WgmmaTile):
            # Warpgroups share anew what a block starts with: it must start with all of it.
            assert used.registers == model.registers
            assert resident_blocks(arch, used.registers, model.threads, model.shared_bytes) >= model.blocks
        assert used.registers * model.threads <= limits_of(arch).registers_sm
        assert model.shared_bytes <= limits_of(arch).shared_block
