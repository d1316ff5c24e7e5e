"""The tensor-core kernels on a GPU: accuracy beside cuDNN's at the same precision, range, and the emulator's twins."""

from __future__ import annotations

import dataclasses
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from random_calls import Generator, conv_setting, describe, error, exact, over_draws
from test_operators_gpu import rand, randn, run_poisoned
from torch import Tensor

from jitconv import emulated, launch, program
from jitconv.compilation import compiled_kernel
from jitconv.functional import convolution_call
from jitconv.problem import PRECISIONS
from jitconv.program import Call

PROBLEMS = int(os.environ.get("JITCONV_GPU_PROBLEMS", "240")) // 2


def on_tensor_cores(call: Call) -> bool:
    arch = launch.device_info(0).arch
    return hasattr(program.build(call, arch).launches[0].kernel.tile, "math")


@pytest.fixture(scope="module")
def calls() -> list[Call]:
    """Random float32 problems that tensor cores serve, in turns at either precision; kernels compiled."""
    generator = Generator(seed=7)
    found: list[Call] = []
    while len(found) < PROBLEMS:
        call = dataclasses.replace(generator.call(), precision=PRECISIONS[len(found) % 2])
        if call.x.dtype == torch.float32 and on_tensor_cores(call):
            found.append(call)
    arch = launch.device_info(0).arch
    kernels = {step.kernel for call in found for step in program.build(call, arch).launches}
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda kernel: compiled_kernel(kernel, arch), kernels))
    return found


@pytest.mark.parametrize("index", range(PROBLEMS))
def test_error_is_that_of_the_precision_asked_for(calls: list[Call], index: int) -> None:
    call = calls[index]
    reached, limit = over_draws(call, run_poisoned)
    assert reached <= limit, f"error {reached:.3e} > {limit:.3e} at {call.precision}: {describe(call)}"


def conv3d(x: Tensor, w: Tensor, precision: str) -> Call:
    return convolution_call(
        "conv3d", 3, False, x, w, None, (), precision, stride=1, padding=1, dilation=1, groups=1
    )[0]


def test_ieee_is_no_less_exact_than_strict_fp32_at_full_size() -> None:
    # Median of five seeds, as relative L2 and relative to the sum of magnitudes.
    ours, peers, ours_max, peers_max = [], [], [], []
    for seed in range(5):
        torch.manual_seed(seed)
        x, w = rand(4, 64, 16, 48, 48), randn(64, 64, 3, 3, 3) / 40
        call = conv3d(x, w, "ieee")
        expected = exact(call)
        scale = F.conv3d(x.abs().double(), w.abs().double(), padding=1)
        y = run_poisoned(call)
        with conv_setting("ieee"):
            peer = F.conv3d(x, w, padding=1)
        ours.append(error(y, expected))
        peers.append(error(peer, expected))
        ours_max.append(float(((y.double() - expected).abs() / scale).max()))
        peers_max.append(float(((peer.double() - expected).abs() / scale).max()))
    for mine, theirs in ((ours, peers), (ours_max, peers_max)):
        assert sorted(mine)[2] <= max(1.1 * sorted(theirs)[2], 2e-7), (mine, theirs)


@pytest.mark.parametrize("value", [1e-38, 1e-42, 1e30, 3e38, 65504.0, float("inf"), float("nan")])
@pytest.mark.parametrize("where", ["x", "weight"])
def test_the_whole_range_of_fp32(value: float, where: str) -> None:
    x, w = randn(2, 16, 6, 18, 20), randn(24, 16, 3, 3, 3) / 20
    if where == "x":
        x[:, :, :, :5, :5] = value * (0.5 + rand(2, 16, 6, 5, 5) / 2) if value == value and value < 1e39 else value
    else:
        w[3] = value
    call = conv3d(x, w, "ieee")
    y, expected = run_poisoned(call), exact(call)
    with conv_setting("ieee"):
        peer = F.conv3d(x, w, padding=1)
    assert torch.equal(y.isnan(), peer.isnan())
    assert torch.equal(y.isinf(), peer.isinf())
    scale = F.conv3d(x.abs().double(), w.abs().double(), padding=1)
    finite = peer.isfinite()
    assert ((y.double() - expected).abs()[finite] <= 2e-6 * scale[finite] + 432 * 2.0**-149).all()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.compiler
def test_the_emulators_products_are_the_hardwares(dtype: torch.dtype, precision: str) -> None:
    x, w = randn(1, 20, 3, 9, 17).to(dtype), (randn(18, 20, 3, 3, 3) / 23).to(dtype)
    y = run_poisoned(conv3d(x, w, precision))
    twin = emulated.run(conv3d(x.cpu(), w.cpu(), precision)).cuda()
    # Operands are cut alike. The hardware's sums truncate, by parts of the sum of magnitudes; a 16-bit result may then
    # round the other way.
    scale = F.conv3d(x.abs().double(), w.abs().double(), padding=1)
    step = {torch.float32: 0.0, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}[dtype]
    assert ((y.double() - twin.double()).abs() <= step * twin.double().abs() + 1e-5 * scale).all()
