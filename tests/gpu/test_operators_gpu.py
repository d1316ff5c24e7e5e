"""The operators on a GPU, against float64: full-size headline problems, random problems, huge tensors, streams."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from random_calls import Generator, allowed, conv_setting, describe, error, exact, over_draws
from torch import Tensor

import jitconv
from jitconv import epilogue as E
from jitconv import launch, program, runtime
from jitconv.compilation import compiled_kernel
from jitconv.program import Call

PROBLEMS = int(os.environ.get("JITCONV_GPU_PROBLEMS", "240"))


@contextmanager
def generated(calls: int = 1) -> Iterator[None]:
    """Exactly ``calls`` public calls inside are served by generated kernels and none by torch."""
    before = jitconv.stats()
    yield
    after = jitconv.stats()
    assert after.torch_calls == before.torch_calls, dict(after.torch_reasons)
    assert after.generated_calls == before.generated_calls + calls


def poison(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Leave NaN in the block of memory that the allocator hands out next for this size."""
    torch.full(shape, torch.nan, dtype=dtype, device="cuda")


def run_poisoned(call: Call) -> Tensor:
    shape = program.build(call).shape
    poison(shape, call.x.dtype)
    with generated():
        return runtime.run(call)


def rand(*shape: int) -> Tensor:
    return torch.rand(shape, device="cuda")


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda")


def headline(precision: str) -> dict[str, Call]:
    """The three workloads at full size, every parameter random."""
    from jitconv.functional import convolution_call, separable_call

    torch.manual_seed(torch.seed() % 2**31)
    scale = (32 * 27) ** -0.5
    w1 = convolution_call(
        "conv3d", 3, False, rand(16, 32, 32, 64, 64), randn(64, 32, 3, 3, 3) * scale, randn(64),
        [E.mish(), E.tanh()], precision, stride=1, padding=0, dilation=1, groups=1,
    )  # fmt: skip
    w2 = convolution_call(
        "conv_transpose3d", 3, True, rand(32, 32, 16, 32, 32), randn(32, 64, 3, 3, 3) * scale, randn(64),
        [E.add(randn()), E.layer_norm((64,), randn(64), randn(64)), E.avg_pool(2), E.gelu()], precision,
        stride=2, padding=1, output_padding=1, dilation=1, groups=1,
    )  # fmt: skip
    w3 = separable_call(
        rand(16, 64, 512, 512), randn(64, 1, 3, 3) / 3, randn(128, 64, 1, 1) / 8, None, None, (), (), precision,
        stride=1, padding=1, dilation=1,
    )  # fmt: skip
    return {"w1": w1[0], "w2": w2[0], "w3": w3[0]}


@pytest.mark.parametrize("precision", ["tf32", "ieee"])
@pytest.mark.parametrize("name", ["w1", "w2", "w3"])
def test_headline_at_full_size_is_as_accurate_as_pytorch_at_the_same_precision(name: str, precision: str) -> None:
    call = headline(precision)[name]
    result = run_poisoned(call)
    expected = exact(call)
    assert result.shape == expected.shape
    assert not result.isnan().any()
    reached, limit = error(result, expected), allowed(call, expected)
    print(f"\n{name} {precision}: error {reached:.2e}, allowed {limit:.2e}")
    assert reached <= limit


@pytest.fixture(scope="module")
def random_calls() -> list[Call]:
    """The problems, with their kernels compiled by all cores at once."""
    generator = Generator(seed=20261129, precision="ieee")
    calls = [generator.call() for _ in range(PROBLEMS)]
    arch = launch.device_info(0).arch
    kernels = {step.kernel for call in calls for step in program.build(call, arch).launches}
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda kernel: compiled_kernel(kernel, arch), kernels))
    return calls


@pytest.mark.parametrize("index", range(PROBLEMS))
def test_random_problem_against_float64(random_calls: list[Call], index: int) -> None:
    call = random_calls[index]
    result = run_poisoned(call)
    assert result.shape == exact(call).shape, describe(call)
    # Strides of extents of 1 are anybody's, so the layout is asked for, not the strides.
    assert result.is_contiguous(memory_format=call.memory_format), describe(call)
    reached, limit = over_draws(call, run_poisoned)
    assert reached <= limit, f"error {reached:.3e} > {limit:.3e}: {describe(call)}"


def test_a_second_run_gives_the_same_bits_and_a_sample_does_not_depend_on_its_batch() -> None:
    x, w, b = randn(5, 17, 9, 11, 13), randn(33, 17, 3, 3, 3), randn(33)
    steps = [E.gelu(), E.layer_norm(13)]
    whole = jitconv.conv3d(x, w, b, padding=1, epilogue=steps)
    assert torch.equal(whole, jitconv.conv3d(x, w, b, padding=1, epilogue=steps))
    for i in range(5):
        alone = jitconv.conv3d(x[i : i + 1], w, b, padding=1, epilogue=steps)
        assert torch.equal(whole[i : i + 1], alone)


def test_empty_batch_launches_nothing() -> None:
    before = jitconv.stats().launches
    with generated():
        y = jitconv.conv2d(randn(0, 3, 8, 8), randn(4, 3, 3, 3), epilogue=[E.layer_norm(6), E.max_pool(2)])
    assert y.shape == (0, 4, 3, 3)
    assert jitconv.stats().launches == before


def test_more_blocks_than_fit_two_grid_dimensions() -> None:
    x, w = randn(100_000, 3, 2, 2), randn(5, 3, 2, 2)
    with generated():
        y = jitconv.conv2d(x, w, precision="ieee")
    expected = torch.nn.functional.conv2d(x.double(), w.double())
    assert error(y, expected) < 5e-7


@pytest.mark.parametrize("length", [100_000, 3_000_001])
def test_long_rows(length: int) -> None:
    x, w, gamma = randn(1, 3, length), randn(4, 3, 5), randn(length)
    with generated():
        steps = [E.layer_norm(length, gamma), E.avg_pool(3)]
        y = jitconv.conv1d(x, w, padding=2, epilogue=steps, precision="ieee")
    v = torch.nn.functional.conv1d(x.double(), w.double(), padding=2)
    v = torch.nn.functional.layer_norm(v, (length,), gamma.double())
    assert error(y, torch.nn.functional.avg_pool1d(v, 3)) < 5e-7


def crops(extent: int) -> list[slice]:
    return [slice(0, 40), slice(extent // 2, extent // 2 + 40), slice(extent - 40, extent)]


def test_input_and_output_of_more_than_2_to_the_31_elements() -> None:
    height, width = 46_500, 46_400
    x = torch.randn(1, 1, height, width, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(2, 1, 3, 3, device="cuda", dtype=torch.bfloat16)
    assert x.numel() > 2**31
    poison((1, 2, height, width), torch.bfloat16)
    with generated():
        y = jitconv.conv2d(x, w, padding=1, epilogue=[E.silu()])
    assert y.numel() > 2**32
    padded = torch.nn.functional.pad(x[..., :, -42:].double(), (0, 1, 1, 1))
    for rows in crops(height):
        window = padded[..., rows.start : rows.stop + 2, :]
        expected = torch.nn.functional.silu(torch.nn.functional.conv2d(window, w.double()))
        assert error(y[..., rows, -41:], expected) < 3e-3


def test_transposed_output_of_more_than_2_to_the_31_elements() -> None:
    x = torch.randn(2, 2, 16_500, 16_400, device="cuda", dtype=torch.float16)
    w = torch.randn(2, 2, 2, 2, device="cuda", dtype=torch.float16)
    poison((2, 2, 33_000, 32_800), torch.float16)
    with generated():
        y = jitconv.conv_transpose2d(x, w, stride=2)
    assert y.numel() > 2**31
    expected = torch.nn.functional.conv_transpose2d(x[1:, :, -20:, -20:].double(), w.double(), stride=2)
    assert error(y[1:, :, -40:, -40:], expected) < 1e-3


def test_separable_and_rows_of_more_than_2_to_the_31_elements() -> None:
    x = torch.randn(1, 2, 33_000, 33_000, device="cuda", dtype=torch.float16)
    dw, pw = torch.randn(2, 1, 3, 3, device="cuda").half(), torch.randn(2, 2, 1, 1, device="cuda").half()
    gamma = torch.randn(33_000, device="cuda").half()
    with generated():
        y = jitconv.depthwise_separable_conv2d(x, dw, pw, padding=1, epilogue=[E.layer_norm(33_000, gamma)])
    v = torch.nn.functional.pad(x[:, :, -41:, :].double(), (1, 1, 0, 1))
    v = torch.nn.functional.conv2d(v, dw.double(), groups=2)
    v = torch.nn.functional.conv2d(v, pw.double())
    expected = torch.nn.functional.layer_norm(v, (33_000,), gamma.double())
    assert error(y[:, :, -39:, :], expected[:, :, -39:, :]) < 1e-3


def test_the_current_stream_is_honoured() -> None:
    side = torch.cuda.Stream()
    w = randn(8, 8, 3, 3)
    big = randn(4096, 4096)
    x = torch.zeros(4, 8, 64, 64, device="cuda")
    source = randn(4, 8, 64, 64)
    jitconv.conv2d(x, w, precision="ieee")  # warm
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for _ in range(30):
            big = big @ big / 64
        x.copy_(source)  # comes after the long products: a launch on another stream would read zeros
        with generated():
            y = jitconv.conv2d(x, w, precision="ieee")
    side.synchronize()
    assert error(y, torch.nn.functional.conv2d(source.double(), w.double())) < 5e-7


def test_a_cuda_graph_replays_with_new_inputs() -> None:
    x, w, s = randn(2, 8, 20, 20), randn(16, 8, 3, 3), randn()
    steps = [E.add(s), E.layer_norm(18), E.avg_pool(2)]
    jitconv.conv2d(x, w, epilogue=steps, precision="ieee")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = jitconv.conv2d(x, w, epilogue=steps, precision="ieee")
    x.copy_(randn(2, 8, 20, 20))
    s.fill_(0.75)
    graph.replay()
    v = torch.nn.functional.conv2d(x.double(), w.double()) + 0.75
    v = torch.nn.functional.avg_pool2d(torch.nn.functional.layer_norm(v, (18,)), 2)
    assert error(y, v) < 5e-7


def test_a_cold_kernel_under_capture_is_refused_and_the_capture_survives() -> None:
    x, w = randn(1, 3, 9, 9), randn(7, 3, 3, 3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
        with pytest.raises(jitconv.errors.KernelNotWarmedError, match="before the capture"):
            jitconv.conv2d(x, w, epilogue=[E.softsign()])
        y = y * 2
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, (x + 1) * 2)


def test_torchs_setting_is_followed_at_each_call_and_a_named_precision_is_not_changed_by_it() -> None:
    x, w = randn(2, 16, 20, 20), randn(24, 16, 3, 3)
    named = {precision: jitconv.conv2d(x, w, precision=precision) for precision in ("tf32", "ieee")}
    assert not torch.equal(named["tf32"], named["ieee"])
    for setting in ("ieee", "tf32", "ieee"):
        with conv_setting(setting):
            assert torch.equal(jitconv.conv2d(x, w), named[setting])
            for precision, y in named.items():
                assert torch.equal(jitconv.conv2d(x, w, precision=precision), y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_nan_and_inf_in_data_behave_as_in_torch(dtype: torch.dtype) -> None:
    x = torch.randn(1, 3, 12, 12, device="cuda", dtype=dtype)
    x[0, 0, 2, 2], x[0, 1, 5, 5], x[0, 2, 9, 9] = float("nan"), float("inf"), float("-inf")
    w = torch.rand(4, 3, 3, 3, device="cuda", dtype=dtype) + 0.1
    for steps in ([], [E.relu()], [E.tanh()], [E.minimum(0.5)], [E.clamp(-1, 1)], [E.max_pool(2)], [E.layer_norm(10)]):
        y = jitconv.conv2d(x, w, epilogue=steps)
        expected = E.reference(steps, torch.nn.functional.conv2d(x.double(), w.double()))
        assert torch.equal(y.isnan(), expected.isnan()), steps
        assert torch.equal(y.isposinf(), expected.isposinf()), steps
        assert torch.equal(y.isneginf(), expected.isneginf()), steps


def test_numbers_change_without_a_compile() -> None:
    x, w = randn(1, 3, 40, 41), randn(4, 3, 3, 3)
    for width in (41, 44):  # rows that are no whole vectors, and rows that are
        jitconv.conv2d(randn(1, 3, 40, width), w, epilogue=[E.mul(2.0), E.leaky_relu(0.1)], precision="ieee")
    before = jitconv.stats()
    for factor in (3.0, -1.5, 1e-3):
        y = jitconv.conv2d(x, w, epilogue=[E.mul(factor), E.leaky_relu(factor)], precision="ieee")
        v = torch.nn.functional.conv2d(x.double(), w.double()) * factor
        assert error(y, torch.nn.functional.leaky_relu(v, factor)) < 5e-7
    for size in range(40, 60):
        x = randn(2, 3, size, size + 1)
        jitconv.conv2d(x, w, epilogue=[E.mul(2.0), E.leaky_relu(0.1)], precision="ieee")
    after = jitconv.stats()
    assert after.compiled == before.compiled
    assert after.store_hits == before.store_hits


def test_gradients_flow_to_every_tensor() -> None:
    tensors = [randn(2, 3, 8, 8), randn(4, 3, 3, 3), randn(4), randn(), randn(2, 4, 6, 6)]
    for t in tensors:
        t.requires_grad_()
    x, w, b, s, residual = tensors
    grad = randn(2, 4, 3, 3)
    steps = [E.add(s), E.gelu(), E.mul(residual), E.avg_pool(2)]
    with generated():
        y = jitconv.conv2d(x, w, b, epilogue=steps)
    found = torch.autograd.grad(y, tensors, grad)
    doubles = [t.detach().double().requires_grad_() for t in tensors]
    x, w, b, s, residual = doubles
    v = torch.nn.functional.gelu(torch.nn.functional.conv2d(x, w, b) + s) * residual
    expected = torch.autograd.grad(torch.nn.functional.avg_pool2d(v, 2), doubles, grad.double())
    for a, e in zip(found, expected, strict=True):
        assert error(a, e) < 2e-3  # torch's backward at its default precision, TF32


def test_float64_takes_torchs_path_and_says_so() -> None:
    jitconv.reset_stats()
    x, w = randn(1, 3, 8, 8).double(), randn(4, 3, 3, 3).double()
    y = jitconv.conv2d(x, w, epilogue=[E.relu()])
    assert torch.equal(y, torch.nn.functional.conv2d(x, w).relu())
    assert jitconv.stats().torch_reasons == {"float64": 1}
