"""The host twins that the emulator runs on behave as the hardware does, on the same text and the same data."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import pytest
import torch

from jitconv.emulate import Launch, execute
from jitconv.errors import DriverError
from jitconv.launch import current_stream, device_info, load
from jitconv.tensor_map import ADDRESS_OFFSET, encode, encode_for_emulator
from jitconv.toolchain import compile_cubin
from tests.kernels import Kernel, cases

pytestmark = pytest.mark.compiler

DEVICE = 0

on_cpu = functools.partial(execute, sanitize=False)


#: Compiled kernels by their source: some tests run one many times.
_cubins: dict[str, bytes] = {}


def on_gpu(kernel: Kernel, launch: Launch, arguments: bytes, pointers: Mapping[int, torch.Tensor]) -> None:
    """Run a kernel on the GPU, on copies of CPU tensors, and copy the results back."""
    if kernel.source not in _cubins:
        arch = device_info(DEVICE).arch
        compiled = compile_cubin(kernel.source, name=kernel.name, arch=arch, headers=kernel.headers)
        _cubins[kernel.source] = compiled.cubin
    loaded = load(_cubins[kernel.source], kernel.name, device=DEVICE, shared_bytes=launch.shared_bytes)
    copies = {offset: tensor.to(f"cuda:{DEVICE}") for offset, tensor in pointers.items()}
    packed = bytearray(arguments)
    for offset, copy in copies.items():
        packed[offset : offset + 8] = copy.data_ptr().to_bytes(8, "little")
    loaded.launch(launch.grid, launch.block, bytes(packed), current_stream(DEVICE))
    torch.cuda.synchronize(DEVICE)
    for offset, copy in copies.items():
        pointers[offset].copy_(copy)


def needs(capability: tuple[int, int]) -> None:
    if torch.cuda.get_device_capability(DEVICE) < capability:
        pytest.skip(f"needs compute capability {capability[0]}.{capability[1]}")


def assert_same_bits(gpu: torch.Tensor, cpu: torch.Tensor, name: str) -> None:
    """Equal bit for bit, the sign of zero included; any NaN equals any other."""
    assert torch.equal(torch.isnan(gpu), torch.isnan(cpu)), f"{name}: NaN in different places"
    number = ~torch.isnan(cpu)
    integer = torch.int16 if cpu.element_size() == 2 else torch.int32
    differing = (gpu.view(integer) != cpu.view(integer)) & number
    assert not differing.any(), (
        f"{name}: {int(differing.sum())} of {cpu.numel()} differ, first at {differing.nonzero()[0].tolist()}: "
        f"GPU {gpu[differing][0].item()!r}, emulator {cpu[differing][0].item()!r}"
    )


def test_conversions() -> None:
    count = 4_000_000
    gpu, _, _ = cases.numeric(on_gpu, count)
    cpu, _, _ = cases.numeric(functools.partial(on_cpu, schedules=[cases.FORWARD]), count)
    for name, value in cpu.items():
        assert_same_bits(gpu[name], value, name)


def test_arithmetic() -> None:
    gpu, _ = cases.arithmetic(on_gpu, 500_000)
    cpu, _ = cases.arithmetic(functools.partial(on_cpu, schedules=[cases.FORWARD]), 500_000)
    for index, name in enumerate(cases.ARITHMETIC):
        if name == "rsqrtf":
            # Documented to be within 2 units in the last place.
            torch.testing.assert_close(gpu[index], cpu[index], rtol=2.0**-21, atol=0, equal_nan=True)
        elif name in ("fminf", "fmaxf", "min", "max"):
            # Which of +0 and -0 is larger is not specified.
            torch.testing.assert_close(gpu[index], cpu[index], rtol=0, atol=0, equal_nan=True)
        else:
            assert_same_bits(gpu[index], cpu[index], name)


def test_integers() -> None:
    gpu, _, _ = cases.integers(on_gpu, 100_000)
    cpu, _, _ = cases.integers(on_cpu, 100_000)
    for index, name in enumerate(cases.INTEGERS):
        assert torch.equal(gpu[index], cpu[index]), name


def test_atomics() -> None:
    assert cases.atomics(on_gpu) == cases.atomics(on_cpu)


@pytest.mark.parametrize("operand", [0, 1, 3, 7, 8, 16, 31, 32, 33, 40])
def test_shuffles_votes_and_warp_reductions(operand: int) -> None:
    gpu, _ = cases.warps(on_gpu, operand, blocks=64)
    cpu, _ = cases.warps(on_cpu, operand, blocks=64)
    for index in range(cases.WARP_RESULTS):
        assert_same_bits(gpu[index], cpu[index], f"result {index} of warps.cu")


def test_block_barriers_and_reductions() -> None:
    # Not bit for bit: the compiler for the GPU may fuse a product and a sum.
    cases.assert_close(*cases.barriers(on_gpu))
    cases.assert_close(*cases.barriers(on_cpu))


@pytest.mark.parametrize(
    ("case", "capability"),
    [(cases.named_barriers, (7, 5)), (cases.pipeline, (7, 5)), (cases.bulk, (9, 0))],
)
def test_named_barriers_and_asynchronous_copies(case, capability: tuple[int, int]) -> None:
    needs(capability)
    for _ in range(20):
        gpu, expected = case(on_gpu)
        cases.assert_close(gpu, expected)
    cpu, _ = case(on_cpu)
    for name, value in cpu.items():
        assert_same_bits(gpu[name], value, name)


# Operands of 16 products, back to back, and some that start anywhere, with rows at other distances.
PLACES = [
    (cases.Operand(0, 2048, 128, 4096, 1024), cases.Operand(32768, 4096, 128, 8192)),
    (cases.Operand(48, 2048, 128, 2048 + 16, 1024), cases.Operand(16384 + 112, 4096, 144, 16)),
    (cases.Operand(16, 128, 256, 32, 2048), cases.Operand(20480, 128, 256, 32)),
]


@pytest.mark.parametrize("math", list(cases.MATHS))
@pytest.mark.parametrize("places", PLACES, ids=["planes", "offsets", "bricks"])
def test_warpgroup_products(math: str, places: tuple[cases.Operand, cases.Operand]) -> None:
    if torch.cuda.get_device_capability(DEVICE) != (9, 0):
        pytest.skip("needs compute capability 9.0")
    for n in (8, 16, 32, 64, 96, 128, 192, 256):
        for steps, accumulate in ((1, True), (2, False), (4, True)):
            found = {
                name: cases.products(run, math, n, *places, steps=steps, accumulate=accumulate, size=102400)
                for name, run in (("GPU", on_gpu), ("emulator", functools.partial(on_cpu, schedules=[cases.FORWARD])))
            }
            # Sums of up to 64 products, a few units each; as it adds, the hardware drops what lies about 24 bits below
            # the largest of them.
            for y, expected in found.values():
                torch.testing.assert_close(y.double(), expected, rtol=0, atol=2.0**-13)


def test_warpgroup_products_from_alternating_buffers() -> None:
    if torch.cuda.get_device_capability(DEVICE) != (9, 0):
        pytest.skip("needs compute capability 9.0")
    for _ in range(20):
        gpu, expected = cases.warpgroups(on_gpu)
        torch.testing.assert_close(gpu["y"].double(), expected["y"], rtol=0, atol=2.0**-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rank", [2, 3, 4, 5])
@pytest.mark.parametrize("step", [1, 2])
def test_tensor_copies(dtype: torch.dtype, rank: int, step: int) -> None:
    needs((9, 0))
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn((4, 3, 5, 6, 24)[-rank:], generator=generator).to(dtype)
    spec = cases.tensor_map_of(x, (8, 4, 3, 2, 3)[:rank], (1, step, step, 1, step)[:rank])
    # Along the innermost axis the hardware starts at multiples of 16 bytes.
    starts = [(0,) * 5, (8, 1, 1, 1, 1), (-8, -1, -1, -1, -1), (16, 3, 4, 2, 3), (-16, 0, 0, 0, 0)]
    corners = [start[:rank] for start in starts]
    on_device = x.to(f"cuda:{DEVICE}")
    gpu, expected = cases.boxes(on_gpu, x, spec, corners, encode(spec, on_device.data_ptr(), DEVICE), {})
    pointers = {cases.BOX_MAP + ADDRESS_OFFSET: x}
    cpu, _ = cases.boxes(on_cpu, x, spec, corners, encode_for_emulator(spec), pointers)
    assert_same_bits(gpu, expected, "GPU")
    assert_same_bits(cpu, expected, "emulator")


def test_a_map_that_the_driver_refuses_names_it() -> None:
    needs((9, 0))
    # TensorMap would not have made one with an empty box.
    spec = cases.tensor_map_of(torch.zeros(4, 8), (4, 4))
    object.__setattr__(spec, "box", (0, 4))
    with pytest.raises(DriverError, match=r"cuTensorMapEncodeTiled failed with .*INVALID_VALUE .*box=\(0, 4\)"):
        encode(spec, 0x1000, DEVICE)
