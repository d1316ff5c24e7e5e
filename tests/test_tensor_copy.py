"""Tensor maps say what the driver is told, and the twin of tensor copies moves what torch's indexing says."""

from __future__ import annotations

import ctypes
import functools
import struct
from dataclasses import replace
from typing import Any

import pytest
import torch

from jitconv import launch, program, runtime, tensor_map
from jitconv.emulate import ALL_SCHEDULES, EmulationError, Launch, build, execute
from jitconv.errors import DriverError
from jitconv.families import conv
from jitconv.layout import Field, Layout
from jitconv.tensor_map import ADDRESS_OFFSET, MAP_BYTES, TensorMap, encode, encode_for_emulator
from tests.kernels import HEADERS, cases, write
from tests.kernels.cases import BOX_MAP, tensor_map_of
from tests.strategies import Case, make_tensor

DTYPES = [torch.float32, torch.float16, torch.bfloat16]

every_schedule = functools.partial(execute, schedules=ALL_SCHEDULES)


def numbered(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor without zeros; in 16 bits neighbours differ, though numbers come again."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 251 + 1).to(dtype).view(shape)


def boxes(x: torch.Tensor, spec: TensorMap, *corners: tuple[int, ...], **options: Any) -> None:
    """Load boxes in the emulator and compare them with what indexing says."""
    run = functools.partial(every_schedule, **options)
    pointers = {BOX_MAP + ADDRESS_OFFSET: x}
    y, expected = cases.boxes(run, x, spec, corners, encode_for_emulator(spec), pointers)
    assert torch.equal(y, expected)


# ---- The twin -------------------------------------------------------------------------------


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_boxes_inside_and_across_every_border(dtype: torch.dtype) -> None:
    x = numbered(5, 7, 24, dtype=dtype)
    spec = tensor_map_of(x, (8, 3, 2))
    # Along the innermost axis the hardware starts at multiples of 16 bytes.
    boxes(x, spec, (0, 0, 0), (8, 2, 1), (-8, -1, -1), (16, 5, 4))
    boxes(x, spec, (-8, 0, 0), (24, 0, 0), (0, 7, 0), (0, 0, -2), (0, -9, 99))


@pytest.mark.compiler
@pytest.mark.parametrize("rank", [2, 3, 4, 5])
def test_every_rank(rank: int) -> None:
    x = numbered(*(4, 3, 5, 6, 12)[-rank:])
    spec = tensor_map_of(x, (8, 4, 2, 2, 3)[:rank])
    boxes(x, spec, (0,) * rank, (4,) + (1,) * (rank - 1), (-4,) + (-1,) * (rank - 1), (8, 3, 4, 2, 3)[:rank])


@pytest.mark.compiler
def test_every_so_many_elements_of_an_axis() -> None:
    x = numbered(6, 11, 12)
    # Of a span of 5 every second element is 3 elements, of a span of 4 every third is 2.
    spec = tensor_map_of(x, (4, 5, 4), (1, 2, 3))
    assert spec.box_extents == (4, 3, 2)
    boxes(x, spec, (0, 0, 0), (8, -1, 1), (-4, 8, -1))


@pytest.mark.compiler
def test_a_tensor_with_gaps_between_its_rows() -> None:
    storage = numbered(9, 3, 20)
    x = storage[::2, 1:, :10]
    boxes(x, tensor_map_of(x, (12, 2, 2)), (0, 0, 0), (4, 1, 3))


@pytest.mark.compiler
def test_tensor_copies_have_no_race() -> None:
    x = numbered(5, 12)
    boxes(x, tensor_map_of(x, (4, 3)), (0, 0), (-4, 4), races=True)


# ---- Misuse ---------------------------------------------------------------------------------

FIELDS = "TensorMap map; float* x; float* y;"
SETUP = """
uint64_t* barrier = reinterpret_cast<uint64_t*>(shared + 64);
if (t == 0) {
    mbarrier_init(barrier, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(barrier, 64);
"""
COPY = "const int corner[2] = {}; tensor_load(shared, &a.map, corner, barrier); }\n"
REST = "__syncthreads(); mbarrier_wait(barrier, 0); if (t < 16) a.y[t] = shared[t];"


def run(body: str, x: torch.Tensor | None = None, encoded: bytes | None = None) -> torch.Tensor:
    """Run a body with `a.map`, of boxes of 4 x 4 floats."""
    x = numbered(6, 8) if x is None else x
    y = torch.full((32,), torch.nan)
    kernel = write(body, fields=FIELDS, headers=(*HEADERS, "tensor_copy"))
    data = encode_for_emulator(tensor_map_of(numbered(6, 8), (4, 4))) if encoded is None else encoded
    every_schedule(kernel, Launch(1, 32, 264), data + bytes(64), {ADDRESS_OFFSET: x, 128: x, 136: y})
    return y


def refused(body: str, *expected: str, **options: Any) -> None:
    with pytest.raises(EmulationError) as caught:
        run(body, **options)
    for text in expected:
        assert text in str(caught.value), str(caught.value)


@pytest.mark.compiler
def test_the_body_that_the_others_break() -> None:
    assert torch.equal(run(SETUP + COPY + REST)[:16].view(4, 4), numbered(6, 8)[:4, :4])


@pytest.mark.compiler
def test_misused_copies() -> None:
    refused(SETUP + COPY + REST.replace("mbarrier_wait(barrier, 0);", ""), "1 bulk copies to shared memory in flight")
    early = SETUP + COPY + "__syncthreads(); a.y[t] = shared[t % 16]; mbarrier_wait(barrier, 0);"
    refused(early, "depends on the schedule")
    refused(SETUP.replace("tx(barrier, 64)", "tx(barrier, 68)") + COPY + REST, "lacks 0 of 1 arrivals and 4 bytes")
    refused(SETUP.replace("fence_mbarrier_init();", "") + COPY + REST, "no fence_mbarrier_init()")


@pytest.mark.compiler
def test_misplaced_copies() -> None:
    refused(SETUP + COPY.replace("(shared", "(shared + 4") + REST, "is not a multiple of 128", "written.cu:7")
    refused(SETUP + COPY.replace("(shared", "(shared + 64") + REST, "64 bytes at shared memory + 256 are out of bounds")
    refused(SETUP + COPY.replace("corner[2] = {}", "corner[2] = {-1, 0}") + REST, "starts at element -1 of 4 bytes")
    # The map says six rows, the tensor has three.
    refused(SETUP + COPY + REST, "16 bytes at buffer 0 of 96 bytes, offset 96", x=numbered(6, 8)[:3])
    refused(SETUP + COPY + REST, "is not a multiple of 16", x=numbered(56)[1:49].view(6, 8))


@pytest.mark.compiler
def test_maps_that_are_none() -> None:
    refused(SETUP + COPY + REST, "there is no tensor map at", encoded=bytes(MAP_BYTES))
    refused("prefetch_tensor_map(&a.map);", "there is no tensor map at", encoded=bytes(MAP_BYTES))
    three = encode_for_emulator(tensor_map_of(numbered(1, 6, 8), (4, 4, 1)))
    refused(SETUP + COPY + REST, "a copy of 2 axes with a tensor map of 3", encoded=three)


@pytest.mark.compiler
def test_tensor_copies_do_not_exist_below_sm_90() -> None:
    body = "prefetch_tensor_map(&a.map);"
    with pytest.raises(EmulationError, match="prefetch_tensor_map"):
        build(write(body, fields=FIELDS, headers=("platform", "tensor_copy")), arch="sm_80")


# ---- Maps -----------------------------------------------------------------------------------

SPEC = TensorMap("float16", (64, 20, 7), (128, 2560), (8, 5, 4), (1, 2, 1))


def test_size_of_a_box() -> None:
    assert SPEC.box_extents == (8, 3, 4)
    assert SPEC.box_bytes == 8 * 3 * 4 * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float64"}, "dtype='float64': expected one of"),
        ({"extents": (64,)}, "expected 2 to 5 axes"),
        ({"extents": (64, 20, 0)}, "expected from 1 to 4294967296"),
        ({"strides": (128,)}, "strides=.*: expected 2 for 3 axes"),
        ({"strides": (128, 2564)}, "expected multiples of 16 from 16"),
        ({"strides": (0, 2560)}, "expected multiples of 16 from 16"),
        ({"strides": (128, 2**40)}, "expected multiples of 16 from 16"),
        ({"box": (8, 257, 4)}, "box=.*: expected from 1 to 256"),
        ({"box": (12, 5, 4)}, "24 bytes of float16: expected a multiple of 16"),
        ({"element_strides": (1, 9, 1)}, "expected from 1 to 8"),
        ({"element_strides": (2, 1, 1)}, "expected 1 along the innermost"),
        ({"swizzle": "128B"}, "swizzle='128B': expected 'none'"),
    ],
)
def test_maps_that_the_hardware_lacks(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SPEC, **changes)


class Encoder:
    """The driver's function: remembers what it is told and fills the map with a pattern."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, statuses: list[int]) -> None:
        self.calls: list[dict[str, Any]] = []
        self.statuses = statuses
        signature = tensor_map._SIGNATURE
        self.function = ctypes.CFUNCTYPE(ctypes.c_int, *signature)(self._encode)
        self.address = ctypes.cast(self.function, ctypes.c_void_p).value
        driver = self._driver()
        monkeypatch.setattr(launch, "_driver", lambda: driver)
        monkeypatch.setattr(launch, "_primary_context", lambda device: 0x1000 + device)
        launch._entry_point.cache_clear()
        encode.cache_clear()
        self.pushed: list[int] = []

    def _encode(self, target, dtype, rank, address, extents, strides, box, steps, *rest) -> int:
        def read(kind, pointer, count):
            return tuple((kind * count).from_address(pointer))

        self.calls.append(
            {
                "aligned": target % 64 == 0,
                "dtype": dtype,
                "address": address,
                "extents": read(ctypes.c_uint64, extents, rank),
                "strides": read(ctypes.c_uint64, strides, rank - 1),
                "box": read(ctypes.c_uint32, box, rank),
                "steps": read(ctypes.c_uint32, steps, rank),
                "rest": rest,
            }
        )
        status = self.statuses.pop(0)
        if status == 0:
            ctypes.memmove(target, bytes(range(MAP_BYTES)), MAP_BYTES)
        return status

    def _driver(self) -> Any:
        encoder = self

        class Driver:
            CUresult = int

            def cuGetProcAddress(self, symbol: bytes, version: int, flags: int) -> Any:
                assert (symbol, version, flags) == (b"cuTensorMapEncodeTiled", 12000, 0)
                return 0, encoder.address, 0

            def cuGetErrorName(self, status: int) -> Any:
                return 0, b"CUDA_ERROR_INVALID_VALUE"

            def cuGetErrorString(self, status: int) -> Any:
                return 0, b"invalid argument"

            def cuCtxPushCurrent(self, context: int) -> Any:
                encoder.pushed.append(context)
                return (0,)

            def cuCtxPopCurrent(self) -> Any:
                return 0, 0

        return Driver()


@pytest.fixture
def _forget_encodings():
    yield
    launch._entry_point.cache_clear()
    encode.cache_clear()


@pytest.mark.usefixtures("_forget_encodings")
def test_what_the_driver_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = Encoder(monkeypatch, [0])
    assert encode(SPEC, 0x7000, 0) == bytes(range(MAP_BYTES))
    # From memory the second time.
    assert encode(replace(SPEC), 0x7000, 0) == bytes(range(MAP_BYTES))
    assert encoder.calls == [
        {
            "aligned": True,
            "dtype": 6,
            "address": 0x7000,
            "extents": (64, 20, 7),
            "strides": (128, 2560),
            "box": (8, 5, 4),
            "steps": (1, 2, 1),
            "rest": (0, 0, 2, 0),
        }
    ]


def test_the_numbers_are_those_of_cuda_h() -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    for dtype, (number, size) in tensor_map._DTYPES.items():
        assert getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{dtype.upper()}") == number
        assert getattr(torch, dtype).itemsize == size
    assert driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE == 0
    assert driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE == 0
    assert driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B == 2
    assert driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE == 0


@pytest.mark.usefixtures("_forget_encodings")
def test_a_thread_without_a_context_borrows_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = Encoder(monkeypatch, [201, 0])
    assert encode(SPEC, 0x7000, 3) == bytes(range(MAP_BYTES))
    assert encoder.pushed == [0x1003]


@pytest.mark.usefixtures("_forget_encodings")
def test_a_map_that_the_driver_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = Encoder(monkeypatch, [1, 0])
    with pytest.raises(DriverError, match=r"cuTensorMapEncodeTiled failed with .*INVALID_VALUE .*float16.*0x7000"):
        encode(SPEC, 0x7000, 0)
    encode(SPEC, 0x7000, 0)
    assert len(encoder.calls) == 2


def test_a_misaligned_tensor() -> None:
    with pytest.raises(ValueError, match="address=0x7008: expected a multiple of 16"):
        encode(SPEC, 0x7008, 0)


# ---- On the way to a launch -----------------------------------------------------------------


def test_layout_of_a_map() -> None:
    layout = Layout((Field("n", "index"), Field("map", "tensor_map"), Field("y", "pointer", "float")), 32)
    assert layout.offsets == {"n": 0, "map": 64, "y": 192}
    assert layout.size == 256
    assert layout.declarations() == ["Index n;", "TensorMap map;", "float* y;"]
    assert layout.pack({"n": 1})[64:192] == bytes(128)


def test_maps_reach_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(7, 20, 64, dtype=torch.float16)
    data = bytearray(struct.pack("<Q", 5).ljust(256, b"\0"))

    class Step:
        arguments = bytes(data)
        pointers = ((192, "y"),)
        numbers = ()
        tensor_maps = ((64, "x", SPEC),)

    seen = []

    def encoded(spec: TensorMap, address: int, device: int | None) -> bytes:
        seen.append((spec, address, device))
        return bytes(range(MAP_BYTES))

    monkeypatch.setattr(tensor_map, "encode", encoded)
    found = runtime.arguments(Step(), {"x": x, "y": x}, {})  # type: ignore[arg-type]
    data[64:192] = bytes(range(MAP_BYTES))
    struct.pack_into("<Q", data, 192, x.data_ptr())
    assert found == data
    assert seen == [(SPEC, x.data_ptr(), None)]


def test_a_family_says_what_its_kernel_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = conv.layout
    monkeypatch.setattr(conv, "layout", lambda kernel: Layout((*plain(kernel).fields, Field("map", "tensor_map")), 32))
    monkeypatch.setattr(conv, "tensor_maps", lambda kernel, extents, strides: {"map": ("x", SPEC)}, raising=False)
    case = Case("conv2d", make_tensor((1, 3, 5, 5)), (make_tensor((4, 3, 3, 3)),))
    (step,) = program.build(case.call(), "sm_75").launches
    assert step.tensor_maps == ((len(step.arguments) - MAP_BYTES, "x", SPEC),)
    assert step.tensor_maps[0][0] % 64 == 0
