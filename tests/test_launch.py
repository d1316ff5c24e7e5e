"""The driver API behind a fake driver: contexts, errors with remedies, arguments, threads."""

from __future__ import annotations

import ctypes
import struct
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from jitconv import launch
from jitconv.errors import (
    DriverError,
    DriverNotFoundError,
    DriverTooOldError,
    UnsupportedArchitectureError,
)

CUBIN = b"\x7fELF and the rest"
ARGUMENTS = struct.pack("<QQi4x", 0x1122334455667788, 7, -3)

NAMES = {
    1: "CUDA_ERROR_INVALID_VALUE",
    100: "CUDA_ERROR_NO_DEVICE",
    101: "CUDA_ERROR_INVALID_DEVICE",
    200: "CUDA_ERROR_INVALID_IMAGE",
    201: "CUDA_ERROR_INVALID_CONTEXT",
    209: "CUDA_ERROR_NO_BINARY_FOR_GPU",
    222: "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
    400: "CUDA_ERROR_INVALID_HANDLE",
    500: "CUDA_ERROR_NOT_FOUND",
    700: "CUDA_ERROR_ILLEGAL_ADDRESS",
    701: "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
    803: "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
    901: "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
}
ATTRIBUTES = {
    "COMPUTE_CAPABILITY_MAJOR": 9,
    "COMPUTE_CAPABILITY_MINOR": 0,
    "MULTIPROCESSOR_COUNT": 132,
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 232448,
    "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": 233472,
    "L2_CACHE_SIZE": 50 << 20,
}


class FakeDriver(types.ModuleType):
    """cuda.bindings.driver with two GPUs, in its convention: every call returns (status, value).

    A context is 0x1000 + ordinal; each thread has its own stack of them, as in the real driver.
    ``fail`` maps the name of a call to the status that it returns; ``strict`` refuses a launch
    in another context than the kernel's, which the real driver promises for no stream.
    """

    def __init__(self):
        super().__init__("cuda.bindings.driver")
        prefix = "CU_DEVICE_ATTRIBUTE_"
        self.CUdevice_attribute = types.SimpleNamespace(
            **{prefix + name: prefix + name for name in ATTRIBUTES}
        )
        self.CUfunction_attribute = types.SimpleNamespace(
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="max_dynamic_shared"
        )
        self.CUstreamCaptureMode = types.SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED="relaxed")
        self.attributes = dict(ATTRIBUTES)
        self.version = 13000
        self.fail = {}
        self.calls = []
        self.launches = []
        self.contexts = []
        self.strict = True
        self.capture_modes = []
        self.capturing = {}
        self.waits = []
        self.threads = threading.local()

    def stack(self):
        if not hasattr(self.threads, "stack"):
            self.threads.stack = [0]
        return self.threads.stack

    def answer(self, call, *values):
        self.calls.append(call)
        status = self.fail.get(call, 0)
        return (status, *values) if status == 0 else (status, *(None for _ in values))

    def cuInit(self, _):
        return self.answer("cuInit")

    def cuDriverGetVersion(self):
        return self.answer("cuDriverGetVersion", self.version)

    def cuGetErrorName(self, status):
        return 0, NAMES.get(status, "CUDA_ERROR_UNKNOWN").encode()

    def cuGetErrorString(self, _):
        return 0, b"what it means"

    def cuDeviceGet(self, ordinal):
        return self.answer("cuDeviceGet", ordinal) if 0 <= ordinal < 2 else (101, None)

    def cuDeviceGetName(self, length, device):
        return self.answer("cuDeviceGetName", f"GPU {device}".encode().ljust(length, b"\0"))

    def cuDeviceGetAttribute(self, attribute, _):
        value = self.attributes[attribute.removeprefix("CU_DEVICE_ATTRIBUTE_")]
        return self.answer("cuDeviceGetAttribute", value)

    def cuDeviceGetUuid(self, device):
        return self.answer("cuDeviceGetUuid", types.SimpleNamespace(bytes=bytes([device] * 16)))

    def cuDeviceTotalMem(self, _):
        return self.answer("cuDeviceTotalMem", 139 << 30)

    def cuDevicePrimaryCtxRetain(self, device):
        return self.answer("cuDevicePrimaryCtxRetain", 0x1000 + device)

    def cuCtxPushCurrent(self, context):
        self.stack().append(context)
        return self.answer("cuCtxPushCurrent")

    def cuCtxPopCurrent(self):
        return self.answer("cuCtxPopCurrent", self.stack().pop())

    def cuCtxGetCurrent(self):
        return self.answer("cuCtxGetCurrent", self.stack()[-1])

    def cuCtxSetCurrent(self, context):
        self.stack()[-1] = context
        return self.answer("cuCtxSetCurrent")

    def cuCtxSynchronize(self):
        return self.answer("cuCtxSynchronize")

    def cuThreadExchangeStreamCaptureMode(self, mode):
        before = self.capture_modes[-1] if self.capture_modes else "global"
        self.capture_modes.append(mode)
        return self.answer("cuThreadExchangeStreamCaptureMode", before)

    def cuModuleLoadData(self, image):
        if self.stack()[-1] == 0:
            return 201, None
        assert self.capture_modes[-1] == "relaxed"
        return self.answer("cuModuleLoadData", ("module", self.stack()[-1], image))

    def cuModuleUnload(self, _):
        return self.answer("cuModuleUnload")

    def cuModuleGetFunction(self, module, name):
        if name != b"kernel":
            return 500, None
        return self.answer("cuModuleGetFunction", ("function", module[1]))

    def cuFuncSetAttribute(self, _, attribute, value):
        self.calls.append((attribute, value))
        return self.answer("cuFuncSetAttribute")

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, _, block, shared):
        return self.answer("cuOccupancyMaxActiveBlocksPerMultiprocessor", 2048 // block)

    def cuStreamIsCapturing(self, stream):
        status, capture = self.capturing.get(stream, (0, 0))
        return status, capture

    def cuStreamSynchronize(self, stream):
        self.waits.append((stream, self.stack()[-1], self.capture_modes[-1]))
        return self.answer("cuStreamSynchronize")

    def cuLaunchKernel(self, function, *rest):
        *shape, stream, parameters, extra = rest
        assert extra == 0
        if self.stack()[-1] == 0:
            return (201,)
        if self.stack()[-1] != function[1] and self.strict:
            return (400,)
        pointer = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))[0]
        self.contexts.append(self.stack()[-1])
        self.launches.append((*shape, stream, ctypes.string_at(pointer, len(ARGUMENTS))))
        return self.answer("cuLaunchKernel")


def forget():
    for cached in (
        launch._bindings,
        launch._driver,
        launch._primary_context,
        launch.device_info,
    ):
        cached.cache_clear()


@pytest.fixture
def driver(monkeypatch):
    fake = FakeDriver()
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", fake)
    # What torch calls the current device is whatever context the thread has.
    monkeypatch.setattr(launch, "_current_device", lambda: max(fake.stack()[-1] - 0x1000, 0))
    forget()
    yield fake
    forget()


def load(device=0, shared_bytes=0, **more):
    return launch.load(CUBIN, "kernel", device=device, shared_bytes=shared_bytes, **more)


# --- no driver, old driver --------------------------------------------------------------------


@pytest.mark.parametrize(
    "raised",
    [
        RuntimeError("Failed to dlopen libcuda.so.1"),
        FileNotFoundError("libcuda.so.1"),
        type("DynamicLibNotFoundError", (RuntimeError,), {})("libcuda.so.1 not found"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_no_driver_is_one_error_in_every_version_of_cuda_python(driver, raised):
    def no_library():
        raise raised

    driver.cuDriverGetVersion = no_library
    for call in (launch.driver_version, lambda: launch.device_info(0), load):
        with pytest.raises(DriverNotFoundError, match=r"libcuda.so.1.*install the driver \(580"):
            call()


def test_no_cuda_python_is_a_missing_driver(driver, monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(DriverNotFoundError, match=r"cuda-python is not installed.*pip install"):
        launch.driver_version()


def test_a_driver_without_a_gpu_tells_its_version_but_loads_nothing(driver):
    driver.fail["cuInit"] = 100
    assert launch.driver_version() == (13, 0)
    with pytest.raises(DriverNotFoundError, match=r"no GPU.*CUDA_VISIBLE_DEVICES"):
        load()


def test_a_driver_that_does_not_start_names_its_status(driver):
    driver.fail["cuInit"] = 803
    with pytest.raises(DriverNotFoundError, match=r"SYSTEM_DRIVER_MISMATCH.*nvidia-smi"):
        load()


@pytest.fixture
def real():
    forget()
    yield
    forget()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a driver")
def test_a_machine_without_a_driver_gets_that_error_from_the_real_cuda_python(real):
    with pytest.raises(DriverNotFoundError):
        launch.device_info(0)


def test_the_version_has_a_minor_part(driver):
    driver.version = 12090
    assert launch.driver_version() == (12, 9)


@pytest.mark.parametrize("status", [200, 209, 222])
def test_an_old_driver_is_told_from_a_bad_kernel(driver, status):
    driver.version = 12080
    driver.fail["cuModuleLoadData"] = status
    with pytest.raises(DriverTooOldError) as caught:
        load(arch="sm_90a", nvrtc_version=(13, 0))
    text = str(caught.value)
    assert f"{NAMES[status]} ({status}" in text
    for part in ("CUDA 12.8", "NVRTC 13.0", "sm_90a", "580 or newer", "jitconv[cu12]", "'kernel'"):
        assert part in text


def test_a_kernel_for_another_gpu_is_not_blamed_on_the_driver(driver):
    driver.fail["cuModuleLoadData"] = 209
    with pytest.raises(DriverError, match=r"for sm_80.*expected a kernel for sm_90a") as caught:
        load(arch="sm_80", nvrtc_version=(13, 0))
    assert not isinstance(caught.value, DriverTooOldError)


def test_a_damaged_image_is_not_blamed_on_the_driver(driver):
    driver.fail["cuModuleLoadData"] = 200
    with pytest.raises(DriverError, match=r"the image is damaged.*jitconv cache clear") as caught:
        load(arch="sm_90a", nvrtc_version=(13, 0))
    assert not isinstance(caught.value, DriverTooOldError)
    with pytest.raises(DriverError, match=r"not an ELF image.*jitconv cache clear"):
        launch.load(b"PTX", "kernel", device=0, shared_bytes=0)


# --- devices ----------------------------------------------------------------------------------


def test_a_device_is_described_and_asked_once(driver):
    info = launch.device_info(1)
    assert (info.ordinal, info.name, info.capability, info.arch) == (1, "GPU 1", (9, 0), "sm_90a")
    assert (info.sm_count, info.shared_optin, info.shared_sm) == (132, 232448, 233472)
    assert (info.l2_bytes, info.memory_bytes) == (50 << 20, 139 << 30)
    assert info.uuid == "GPU-01010101-0101-0101-0101-010101010101"
    asked = len(driver.calls)
    assert launch.device_info(1) is info
    assert len(driver.calls) == asked


def test_device_0_does_not_stand_for_the_others(driver):
    assert launch.device_info(0).name == "GPU 0"
    assert launch.device_info(1).name == "GPU 1"


def test_a_device_that_is_not_there(driver):
    with pytest.raises(DriverError, match=r"cuDeviceGet.*INVALID_DEVICE.*device_count"):
        launch.device_info(7)


def test_a_device_before_turing_is_refused(driver):
    driver.attributes.update(COMPUTE_CAPABILITY_MAJOR=7, COMPUTE_CAPABILITY_MINOR=0)
    with pytest.raises(UnsupportedArchitectureError, match="torch's own operators"):
        launch.device_info(0)


# --- loading ----------------------------------------------------------------------------------


def test_loading_leaves_the_current_context_and_capture_mode_alone(driver):
    load(device=1)
    assert driver.stack() == [0]
    assert driver.capture_modes == ["relaxed", "global"]
    driver.fail["cuModuleLoadData"] = 1
    with pytest.raises(DriverError):
        load(device=1)
    assert driver.stack() == [0]
    assert driver.capture_modes[-1] == "global"


@pytest.mark.parametrize(("shared", "asks"), [(48 * 1024, False), (48 * 1024 + 16, True)])
def test_more_than_48_kib_of_shared_memory_is_asked_for(driver, shared, asks):
    load(shared_bytes=shared)
    assert (("max_dynamic_shared", shared) in driver.calls) == asks


def test_more_shared_memory_than_a_block_may_have_is_refused_before_loading(driver):
    with pytest.raises(DriverError, match=r"shared_bytes.*232449.*232448; use a smaller tile"):
        load(shared_bytes=232449)
    assert "cuModuleLoadData" not in driver.calls


def test_a_cubin_without_the_kernel_is_unloaded_again(driver):
    with pytest.raises(DriverError, match="name: the cubin has no kernel 'other'"):
        launch.load(CUBIN, "other", device=0, shared_bytes=0)
    assert "cuModuleUnload" in driver.calls


def test_a_refused_attribute_is_an_error_and_leaks_no_module(driver):
    driver.fail["cuFuncSetAttribute"] = 1
    with pytest.raises(DriverError, match=r"cuFuncSetAttribute.*'kernel', 100000 bytes"):
        load(shared_bytes=100_000)
    assert "cuModuleUnload" in driver.calls


# --- launching --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [ARGUMENTS, bytearray(ARGUMENTS), (ctypes.c_char * len(ARGUMENTS)).from_buffer_copy(ARGUMENTS)],
    ids=["bytes", "bytearray", "ctypes"],
)
def test_the_kernel_gets_the_bytes_of_its_arguments(driver, arguments):
    load(shared_bytes=1024).launch(5, 128, arguments, 0x99)
    assert driver.launches == [(5, 1, 1, 128, 1, 1, 1024, 0x99, ARGUMENTS)]


def test_grid_and_block_may_have_three_dimensions(driver):
    load().launch((5, 6, 7), (32, 4, 2), ARGUMENTS, 0)
    assert driver.launches[0][:6] == (5, 6, 7, 32, 4, 2)


def test_a_kernel_runs_in_the_context_of_its_own_device(driver):
    # Stream 0 means the stream of whatever context is current.
    kernels = [load(device=0), load(device=1)]
    driver.stack()[-1] = 0x1000
    driver.strict = False
    for kernel in kernels:
        kernel.launch(1, 32, ARGUMENTS, 0)
    assert driver.contexts == [0x1000, 0x1001]
    assert driver.stack() == [0x1000]


def test_a_foreign_context_is_stepped_over_and_restored(driver, monkeypatch):
    kernel = load()
    driver.stack()[-1] = 0xABC
    monkeypatch.setattr(launch, "_current_device", lambda: 0)
    kernel.launch(1, 32, ARGUMENTS, 0)
    assert len(driver.launches) == 1
    assert driver.stack() == [0xABC]


def test_a_thread_that_never_used_cuda_can_launch(driver):
    kernel = load()

    def work():
        kernel.launch(1, 32, ARGUMENTS, 0)
        kernel.launch(2, 32, ARGUMENTS, 0)
        return driver.stack()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(work).result() == [0x1000]  # bound once, then on the fast path
    assert [shape[0] for shape in driver.launches] == [1, 2]
    assert driver.calls.count("cuCtxSetCurrent") == 1


def test_the_hot_path_asks_the_driver_for_nothing_but_the_launch(driver):
    # Under graph capture most other calls would break the capture.
    kernel = load()
    driver.stack()[-1] = 0x1000
    driver.calls.clear()
    kernel.launch(1, 32, ARGUMENTS, 0)
    assert driver.calls == ["cuLaunchKernel"]


def test_threads_do_not_mix_up_their_arguments(driver):
    kernel = load()

    def work(number):
        driver.stack()[-1] = 0x1000
        for _ in range(50):
            kernel.launch(number, 32, struct.pack("<QQi4x", number, number, number), number)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(1, 17)))
    assert len(driver.launches) == 16 * 50
    for launched in driver.launches:
        number, stream, arguments = launched[0], launched[7], launched[8]
        assert (number, stream) == (stream, struct.unpack("<QQi4x", arguments)[0])


@pytest.mark.parametrize(
    ("status", "remedy"),
    [
        (1, "at most 1024 threads"),
        (701, "fewer threads or a smaller tile"),
        (700, "CUDA_LAUNCH_BLOCKING=1.*compute-sanitizer"),
        (901, "launch on the stream that is captured"),
        (400, "stream belongs to the kernel's device"),
    ],
)
def test_a_failed_launch_says_what_was_launched_and_what_to_do(driver, status, remedy):
    kernel = load(shared_bytes=512)
    driver.fail["cuLaunchKernel"] = status
    driver.stack()[-1] = 0x1000
    with pytest.raises(DriverError, match=f"{NAMES[status]}.*{remedy}") as caught:
        kernel.launch(9, 2048, ARGUMENTS, 0)
    for part in ("'kernel'", "(9, 1, 1)", "(2048, 1, 1)", "512 bytes", "device 0"):
        assert part in str(caught.value)


def test_a_failed_launch_on_another_device_is_an_error_too(driver):
    kernel = load(device=1)
    driver.fail["cuLaunchKernel"] = 700
    driver.stack()[-1] = 0x1000
    with pytest.raises(DriverError, match="device 1"):
        kernel.launch(1, 32, ARGUMENTS, 0)
    assert driver.stack() == [0x1000]


def test_occupancy_is_asked_in_the_kernels_context(driver):
    assert load(device=1).blocks_per_sm(256) == 8
    assert driver.stack() == [0]


# --- the life of a module ---------------------------------------------------------------------


def test_a_module_outlives_its_last_reference(driver):
    # A launch in flight or a captured graph may still need it.
    kernel = load()
    del kernel
    assert "cuModuleUnload" not in driver.calls


def test_unloading_waits_for_the_device_and_refuses_later_launches(driver):
    kernel = load(device=1)
    driver.calls.clear()
    kernel.unload()
    kernel.unload()
    calls = [call for call in driver.calls if call.startswith(("cuCtxS", "cuModule"))]
    assert calls == ["cuCtxSynchronize", "cuModuleUnload"]
    with pytest.raises(DriverError, match="was unloaded from device 1; load it again"):
        kernel.launch(1, 32, ARGUMENTS, 0)
    assert driver.launches == []
    assert driver.stack() == [0]


# --- capture ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ((0, 0), False),
        ((0, 1), True),
        ((0, 2), True),  # invalidated: still not a time to load anything
        ((906, None), True),  # the legacy stream while another one captures
        ((201, None), False),  # a thread without a context captures nothing
    ],
)
def test_a_capture_is_seen(driver, answer, expected):
    driver.capturing[0x77] = answer
    assert launch.is_capturing(0x77) is expected


def test_waiting_breaks_the_capture_of_another_thread_or_waits_in_another_context(driver):
    """Stream 0 is one of the current context."""
    launch.wait(0, 1)
    assert driver.waits == [(0, 0x1001, "relaxed")]
    assert (driver.stack(), driver.capture_modes[-1]) == ([0], "global")
    driver.fail["cuStreamSynchronize"] = 700
    with pytest.raises(DriverError, match=r"cuStreamSynchronize.*ILLEGAL_ADDRESS.*restart the process"):
        launch.wait(5, 0)
    assert (driver.stack(), driver.capture_modes[-1]) == ([0], "global")


def test_a_stream_that_cannot_be_asked_is_an_error(driver):
    driver.capturing[0x77] = (400, None)
    with pytest.raises(DriverError, match=r"cuStreamIsCapturing.*INVALID_HANDLE"):
        launch.is_capturing(0x77)
