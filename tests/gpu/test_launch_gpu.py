"""The launcher on a real driver: results, streams, graphs, threads, several devices."""

from __future__ import annotations

import struct
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

import jitconv.launch
from jitconv.errors import DriverError
from jitconv.launch import (
    LoadedKernel,
    current_stream,
    device_info,
    driver_version,
    is_capturing,
    load,
)
from jitconv.toolchain import compile_cubin

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# out[i] = factor * in[reversed within the block], through dynamic shared memory. The last word
# of the buffer is used too, so that too small a buffer is a fault.
SOURCE = """\
struct Arguments { float* out; const float* in; float factor; int shared_words; };
extern "C" __global__ void __launch_bounds__(256) kernel(const Arguments arguments) {
    extern __shared__ float tile[];
    const long long base = (long long)blockIdx.x * blockDim.x;
    const int last = arguments.shared_words - 1;
    tile[last - threadIdx.x] = arguments.in[base + threadIdx.x];
    __syncthreads();
    const int other = blockDim.x - 1 - threadIdx.x;
    arguments.out[base + threadIdx.x] = arguments.factor * tile[last - other];
}
"""
BLOCK = 256


def loaded(device: int = 0, shared_bytes: int = 4 * BLOCK, arch: str | None = None) -> LoadedKernel:
    compiled = compile_cubin(
        SOURCE, name="kernel", arch=arch or device_info(device).arch, headers={}
    )
    return load(
        compiled.cubin,
        "kernel",
        device=device,
        shared_bytes=shared_bytes,
        arch=compiled.arch,
        nvrtc_version=compiled.nvrtc_version,
    )


def start(kernel: LoadedKernel, x: Tensor, out: Tensor, factor: float, stream: int) -> None:
    words = kernel.shared_bytes // 4
    arguments = struct.pack("<QQfi", out.data_ptr(), x.data_ptr(), factor, words)
    kernel.launch(x.numel() // BLOCK, BLOCK, arguments, stream)


def run(kernel: LoadedKernel, x: Tensor, factor: float = 3.0) -> Tensor:
    out = torch.full_like(x, float("nan"))
    start(kernel, x, out, factor, current_stream(kernel.device))
    return out


def expected(x: Tensor, factor: float = 3.0) -> Tensor:
    return factor * x.reshape(-1, BLOCK).flip(1).reshape(-1)


def data(device: int = 0, blocks: int = 100) -> Tensor:
    generator = torch.Generator().manual_seed(blocks)
    return torch.randn(blocks * BLOCK, generator=generator).to(f"cuda:{device}")


def test_the_device_is_the_one_that_torch_sees():
    properties = torch.cuda.get_device_properties(0)
    info = device_info(0)
    assert info.name == properties.name
    assert info.capability == (properties.major, properties.minor)
    assert info.sm_count == properties.multi_processor_count
    assert info.l2_bytes == properties.L2_cache_size
    assert info.shared_optin >= 64 * 1024
    assert info.uuid == f"GPU-{properties.uuid}"
    assert driver_version() >= (12, 0)


def test_a_kernel_computes_on_torch_tensors():
    x = data()
    assert torch.equal(run(loaded(), x), expected(x))


def test_all_the_shared_memory_of_a_block_can_be_used():
    kernel = loaded(shared_bytes=device_info(0).shared_optin)
    x = data()
    assert torch.equal(run(kernel, x), expected(x))
    assert kernel.blocks_per_sm(BLOCK) == 1


def test_a_launch_follows_the_work_of_its_own_stream():
    kernel, x = loaded(), data(blocks=4096)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        y = x * 2
        assert current_stream(0) == side.cuda_stream
        out = run(kernel, y)
    side.synchronize()
    assert torch.equal(out, expected(x * 2))


def test_a_graph_replays_the_launch_on_new_data():
    kernel, x = loaded(), data()
    out = torch.zeros_like(x)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    assert not is_capturing(current_stream(0))
    with torch.cuda.graph(graph):
        assert is_capturing(current_stream(0))
        start(kernel, x, out, 2.0, current_stream(0))
    assert torch.count_nonzero(out) == 0  # captured, not run
    x.copy_(data(blocks=100) + 1)
    graph.replay()
    assert torch.equal(out, expected(x, 2.0))


def test_loading_in_another_thread_does_not_break_a_capture():
    kernel, x = loaded(), data()
    compiled = compile_cubin(SOURCE, name="kernel", arch=device_info(0).arch, headers={})
    out = torch.zeros_like(x)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph), ThreadPoolExecutor(1) as pool:
        start(kernel, x, out, 2.0, current_stream(0))
        other = pool.submit(load, compiled.cubin, "kernel", device=0, shared_bytes=4 * BLOCK)
        second = other.result()
    graph.replay()
    assert torch.equal(out, expected(x, 2.0))
    assert torch.equal(run(second, x), expected(x))


def test_a_thread_that_never_used_cuda_can_launch():
    kernel, x = loaded(), data()
    out = torch.zeros_like(x)
    torch.cuda.synchronize()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            start(kernel, x, out, 3.0, 0)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert failures == []
    assert torch.equal(out, expected(x))


def test_sixteen_threads_keep_their_arguments_apart():
    kernel = loaded()
    inputs = [data(blocks=50 + i) for i in range(16)]
    torch.cuda.synchronize()

    def work(i: int) -> list[Tensor]:
        with torch.cuda.stream(torch.cuda.Stream()):
            outs = [run(kernel, inputs[i], float(k)) for k in range(1, 41)]
            torch.cuda.current_stream().synchronize()
        return outs

    with ThreadPoolExecutor(16) as pool:
        for x, outs in zip(inputs, pool.map(work, range(16)), strict=True):
            for k, out in enumerate(outs, start=1):
                assert torch.equal(out, expected(x, float(k)))


def test_a_refused_launch_leaves_the_context_usable():
    kernel, x = loaded(), data()
    with pytest.raises(DriverError, match=r"cuLaunchKernel.*CUDA_ERROR_INVALID_VALUE"):
        kernel.launch(1, 4096, bytes(24), current_stream(0))
    assert torch.equal(run(kernel, x), expected(x))


def test_a_kernel_for_another_architecture_is_named():
    other = "sm_80" if device_info(0).capability[0] != 8 else "sm_90"
    with pytest.raises(DriverError, match=f"expected a kernel for {device_info(0).arch}"):
        loaded(arch=other)


def test_a_damaged_image_is_an_error():
    cubin = compile_cubin(SOURCE, name="kernel", arch=device_info(0).arch, headers={}).cubin
    # Of full length: the driver is not told the length and believes the header.
    damaged = cubin[:64] + bytes(len(cubin) - 64)
    with pytest.raises(DriverError):
        load(damaged, "kernel", device=0, shared_bytes=0)


def test_unloading_waits_for_the_kernel():
    kernel, x = loaded(), data()
    torch.cuda._sleep(20_000_000)
    out = run(kernel, x)
    kernel.unload()
    assert torch.equal(out, expected(x))


def test_a_process_may_end_with_a_kernel_in_flight():
    # Unloading in a destructor crashes when the driver is gone before the object.
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import importlib.util, torch\n"
        "spec = importlib.util.spec_from_file_location('launch_tests', sys.argv[2])\n"
        "t = importlib.util.module_from_spec(spec); spec.loader.exec_module(t)\n"
        "kernel, x = t.loaded(), t.data()\n"
        "torch.cuda._sleep(200_000_000)\n"
        "out = t.run(kernel, x)\n"
    )
    root = Path(jitconv.launch.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", program, str(root), __file__], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_callers_current_device_does_not_matter():
    kernels, inputs = [loaded(0), loaded(1)], [data(0), data(1)]
    for current in (0, 1):
        with torch.cuda.device(current):
            for kernel, x in zip(kernels, inputs, strict=True):
                assert torch.equal(run(kernel, x), expected(x))
            assert torch.cuda.current_device() == current


def test_a_kernel_compiled_before_reports_its_resources_again() -> None:
    # With a driver present NVRTC would answer from the driver's cache, and its log would be empty.
    source = SOURCE.replace("float factor", "float factor_")
    source = source.replace("arguments.factor", "arguments.factor_")
    first, second = (compile_cubin(source, name="kernel", arch="sm_90a", headers={}) for _ in range(2))
    assert first.resources == second.resources
    assert first.cubin == second.cubin
