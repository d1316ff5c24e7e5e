"""Loading and launching compiled kernels: the CUDA driver API, through cuda-python.

Everything lives in the primary context of a device, the one that torch uses too, whichever of
the two asks for it first. No other context is ever made. No CUDA library is loaded before the
first call.

    cubin ─ load() ─► LoadedKernel ─ launch(grid, block, arguments, stream) ─► GPU
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from jitconv.architectures import arch_of_capability
from jitconv.errors import DriverError, DriverNotFoundError, DriverTooOldError

# Above this a kernel must ask for its dynamic shared memory before it is launched.
_SHARED_WITHOUT_ASKING = 48 * 1024

_INVALID_VALUE = 1
_NO_DEVICE = 100
_INVALID_CONTEXT = 201
_INVALID_HANDLE = 400
_NOT_FOUND = 500
_OUT_OF_RESOURCES = 701
_CAPTURE_IMPLICIT = 906
_CAPTURE_STATUSES = range(900, 909)
# INVALID_IMAGE, NO_BINARY_FOR_GPU, INVALID_PTX, UNSUPPORTED_PTX_VERSION, INVALID_SOURCE: what
# drivers answer to an image that they cannot read.
_REJECTED_IMAGE = (200, 209, 218, 222, 300)
# ILLEGAL_ADDRESS, LAUNCH_TIMEOUT and the faults after it: the context is lost.
_FAULTS = (700, 702, 710, 714, 715, 716, 717, 718, 719)

# The array of parameter pointers that cuLaunchKernel takes, for kernels with one parameter.
_OneParameter = ctypes.c_char_p * 1

# torch's public calls cost 0.5 to 5 us more than these, which exist in CUDA builds only.
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def _public_current_stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


current_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", _public_current_stream
)
"""Return the handle of torch's current stream on a device, given by its ordinal."""


@dataclass(frozen=True)
class DeviceInfo:
    """One GPU, as torch numbers it; sizes in bytes.

    ``shared_optin`` is the most shared memory that one block may use, ``shared_sm`` what one
    multiprocessor has. ``uuid`` is as nvidia-smi prints it.
    """

    ordinal: int
    name: str
    capability: tuple[int, int]
    arch: str
    sm_count: int
    shared_optin: int
    shared_sm: int
    l2_bytes: int
    memory_bytes: int
    uuid: str


def driver_version() -> tuple[int, int]:
    """Return the (major, minor) version of CUDA that the driver supports, such as (13, 0).

    Raises:
        DriverNotFoundError: there is no driver. A driver without a GPU is no error here.
    """
    driver = _bindings()
    number = int(_call(driver, "cuDriverGetVersion"))
    return number // 1000, number % 1000 // 10


@functools.cache
def device_info(ordinal: int) -> DeviceInfo:
    """Return what is known of a device, asked once per process.

    Raises:
        DriverNotFoundError: there is no driver or no GPU.
        DriverError: there is no device of that ordinal.
        UnsupportedArchitectureError: the device is older than sm_75.
    """
    driver = _driver()
    device = _call(driver, "cuDeviceGet", ordinal)

    def attribute(name: str) -> int:
        which = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(_call(driver, "cuDeviceGetAttribute", which, device))

    capability = (attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR"))
    identity = bytes(_call(driver, "cuDeviceGetUuid", device).bytes)
    return DeviceInfo(
        ordinal=ordinal,
        name=_call(driver, "cuDeviceGetName", 256, device).split(b"\0")[0].decode(),
        capability=capability,
        arch=arch_of_capability(capability),
        sm_count=attribute("MULTIPROCESSOR_COUNT"),
        shared_optin=attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        shared_sm=attribute("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
        l2_bytes=attribute("L2_CACHE_SIZE"),
        memory_bytes=int(_call(driver, "cuDeviceTotalMem", device)),
        uuid=f"GPU-{uuid.UUID(bytes=identity)}",
    )


def is_capturing(stream: int) -> bool:
    """Return whether a CUDA graph is being captured from a stream, given by its handle.

    Loading a kernel then would break the capture. True also for the legacy stream (0) while
    another stream of the thread captures: a launch there would break that capture.

    Raises:
        DriverNotFoundError, DriverError: the driver cannot say.
    """
    driver = _driver()
    status, capture = driver.cuStreamIsCapturing(stream)
    if int(status) == _INVALID_CONTEXT:
        return False  # this thread has not used CUDA yet, so it captures nothing
    if int(status) == _CAPTURE_IMPLICIT:
        return True
    _check(driver, "cuStreamIsCapturing", status)
    return int(capture) != 0


def wait(stream: int, device: int) -> None:
    """Wait until everything in a stream, given by its handle, has run.

    A capture in another thread is not disturbed.

    Raises:
        DriverNotFoundError: there is no driver or no GPU.
        DriverError: the stream is being captured, or a kernel in it has failed.
    """
    driver = _driver()
    with _current(driver, _primary_context(device)), _captures_undisturbed(driver):
        _call(driver, "cuStreamSynchronize", stream)


def load(
    cubin: bytes,
    name: str,
    *,
    device: int,
    shared_bytes: int,
    arch: str | None = None,
    nvrtc_version: tuple[int, int] | None = None,
) -> LoadedKernel:
    """Load a cubin into the primary context of a device and prepare one kernel of it.

    Do not call it while the current stream is captured (``is_capturing``). A capture in another
    thread is not disturbed.

    Args:
        cubin: the image, for the device's exact architecture.
        name: the ``extern "C" __global__`` function in it.
        device: ordinal of the device.
        shared_bytes: dynamic shared memory of every launch.
        arch, nvrtc_version: what the cubin was made for and by; only used to explain a failure.

    Raises:
        DriverTooOldError: the driver cannot read the image.
        DriverError: the image is damaged, has no such kernel, or asks for more shared memory
            than a block may have.
    """
    driver = _driver()
    info = device_info(device)
    if shared_bytes > info.shared_optin:
        raise DriverError(
            f"shared_bytes: kernel {name!r} asks for {shared_bytes} bytes of shared memory, and a "
            f"block on device {device} ({info.name}) may have {info.shared_optin}; use a smaller "
            "tile or fewer pipeline stages"
        )
    if not cubin.startswith(b"\x7fELF"):
        raise DriverError(
            f"cubin: the {len(cubin)} bytes of kernel {name!r} are not an ELF image; the stored "
            "entry is damaged; remove it with 'jitconv cache clear' and call again"
        )
    context = _primary_context(device)
    with _current(driver, context), _captures_undisturbed(driver):
        status, module = driver.cuModuleLoadData(cubin)
        if int(status) in _REJECTED_IMAGE:
            raise _rejected(driver, status, name, info, arch, nvrtc_version)
        _check(driver, "cuModuleLoadData", status, f"kernel {name!r}, device {device}")
        try:
            function = _function(driver, module, name, shared_bytes)
        except DriverError:
            driver.cuModuleUnload(module)
            raise
    return LoadedKernel(driver, context, module, function, name, device, shared_bytes)


class LoadedKernel:
    """A kernel that is ready to launch on one device; made by ``load``.

    Safe to launch from many threads. The module stays loaded until the process ends, because a
    launch or a CUDA graph may still need it when the last reference to this object goes; a
    program that loads many short-lived kernels, such as a tuner, calls ``unload``.

    Attributes:
        name: the kernel's symbol.
        device: ordinal of the device.
        shared_bytes: dynamic shared memory of every launch.
    """

    __slots__ = ("_context", "_driver", "_function", "_launch", "_module", "device", "name",
                 "shared_bytes")  # fmt: skip

    def __init__(
        self,
        driver: Any,
        context: Any,
        module: Any,
        function: Any,
        name: str,
        device: int,
        shared_bytes: int,
    ) -> None:
        self._driver = driver
        self._context = context
        self._module = module
        self._function = function
        self._launch = driver.cuLaunchKernel
        self.name = name
        self.device = device
        self.shared_bytes = shared_bytes

    def launch(
        self,
        grid: int | tuple[int, int, int],
        block: int | tuple[int, int, int],
        arguments: bytes | bytearray | ctypes.Array[Any],
        stream: int,
    ) -> None:
        """Launch the kernel; returns before it has run.

        Any device may be current in the calling thread; that does not change. Works in a stream
        that is being captured: nothing but the launch itself is asked of the driver.

        Args:
            grid: number of blocks, one number or (x, y, z).
            block: threads per block, one number or (x, y, z).
            arguments: the bytes of the kernel's one parameter; copied before the call returns.
            stream: handle of a stream of the kernel's device.

        Raises:
            DriverError: the driver refused the launch, or an earlier kernel has failed.
        """
        gx, gy, gz = grid if isinstance(grid, tuple) else (grid, 1, 1)
        bx, by, bz = block if isinstance(block, tuple) else (block, 1, 1)
        # The array points into the bytes object, so that nothing is shared between threads.
        pointers = _OneParameter(arguments if type(arguments) is bytes else bytes(arguments))
        call = (self._function, gx, gy, gz, bx, by, bz, self.shared_bytes, stream,
                ctypes.addressof(pointers), 0)  # fmt: skip
        if _current_device() == self.device:
            (status,) = self._launch(*call)
            if status == 0:
                return
            if status not in (_INVALID_CONTEXT, _INVALID_HANDLE):
                raise self._launch_error(status, (gx, gy, gz), (bx, by, bz))
            # This thread has no context yet, or somebody made another one current.
            self._adopt_context()
        with _current(self._driver, self._context):
            (status,) = self._launch(*call)
        if status != 0:
            raise self._launch_error(status, (gx, gy, gz), (bx, by, bz))

    def blocks_per_sm(self, block: int) -> int:
        """Return how many blocks of ``block`` threads fit on one multiprocessor at once.

        Raises:
            DriverError: no block of that size can be launched.
        """
        query = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
        with _current(self._driver, self._context):
            return int(_call(self._driver, query, self._function, block, self.shared_bytes))

    def unload(self) -> None:
        """Wait for the device, then free the module; no launch may follow.

        No CUDA graph that holds the kernel may be replayed afterwards.
        """
        if self._module is None:
            return
        with _current(self._driver, self._context):
            _call(self._driver, "cuCtxSynchronize")
            _call(self._driver, "cuModuleUnload", self._module)
        self._module = None
        self._launch = self._refuse_unloaded

    def _refuse_unloaded(self, *_: object) -> tuple[int]:
        raise DriverError(
            f"kernel {self.name!r} was unloaded from device {self.device}; load it again before "
            "launching it"
        )

    def _adopt_context(self) -> None:
        """Bind the context to a thread that has none, as the CUDA runtime does on first use."""
        if int(_call(self._driver, "cuCtxGetCurrent")) == 0:
            _call(self._driver, "cuCtxSetCurrent", self._context)

    def _launch_error(
        self, status: Any, grid: tuple[int, int, int], block: tuple[int, int, int]
    ) -> DriverError:
        return DriverError(
            f"cuLaunchKernel failed with {_status_text(self._driver, status)}: kernel "
            f"{self.name!r}, grid {grid}, block {block}, {self.shared_bytes} bytes of dynamic "
            f"shared memory, device {self.device}; {_launch_remedy(int(status))}"
        )


def call_entry_point(
    name: str,
    since: tuple[int, int],
    device: int,
    signature: tuple[Any, ...],
    arguments: tuple[Any, ...],
    what: str,
) -> None:
    """Call a function of the driver through its C entry point, in the primary context of a device.

    For what cuda-python does not pass on as it is needed. ``since`` is the version of CUDA that brought the function,
    ``signature`` its ctypes parameters, ``what`` the subject of an error.

    Raises:
        DriverNotFoundError: there is no driver or no GPU.
        DriverError: the driver has no such function, or it failed.
    """
    driver = _driver()
    function = _entry_point(name, since, signature)
    status = function(*arguments)
    if status == _INVALID_CONTEXT:
        with _current(driver, _primary_context(device)):
            status = function(*arguments)
    if status != 0:
        _check(driver, name, driver.CUresult(status), what)


@functools.cache
def _entry_point(name: str, since: tuple[int, int], signature: tuple[Any, ...]) -> Callable[..., int]:
    driver = _driver()
    status, address, *_ = driver.cuGetProcAddress(name.encode(), since[0] * 1000 + since[1] * 10, 0)
    if int(status) != 0 or not int(address):
        major, minor = driver_version()
        raise DriverError(
            f"{name}: the driver (CUDA {major}.{minor}) has no such function; expected a driver of CUDA {since[0]}."
            f"{since[1]} or newer; update it to 525 or newer"
        )
    return ctypes.CFUNCTYPE(ctypes.c_int, *signature)(int(address))


def _launch_remedy(status: int) -> str:
    if status == _INVALID_VALUE:
        return (
            "expected a grid of 1 to 2147483647 x 65535 x 65535 blocks, at most 1024 threads in "
            "a block and no more shared memory than the kernel was loaded with"
        )
    if status == _OUT_OF_RESOURCES:
        return "a block needs more registers than there are; use fewer threads or a smaller tile"
    if status in _FAULTS:
        return (
            "a kernel that ran before, not necessarily this one, has failed and the context is "
            "lost; restart the process with CUDA_LAUNCH_BLOCKING=1, or under compute-sanitizer, "
            "to see which"
        )
    if status in _CAPTURE_STATUSES:
        return "launch on the stream that is captured, not on another one"
    return "check that the stream belongs to the kernel's device and still exists"


def _function(driver: Any, module: Any, name: str, shared_bytes: int) -> Any:
    """Look a kernel up in a loaded module and allow it its shared memory."""
    status, function = driver.cuModuleGetFunction(module, name.encode())
    if int(status) == _NOT_FOUND:
        raise DriverError(
            f'name: the cubin has no kernel {name!r}; expected the extern "C" __global__ '
            "function that it was compiled with; remove the entry with 'jitconv cache clear' and "
            "call again"
        )
    _check(driver, "cuModuleGetFunction", status, f"kernel {name!r}")
    if shared_bytes > _SHARED_WITHOUT_ASKING:
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (status,) = driver.cuFuncSetAttribute(function, attribute, shared_bytes)
        what = f"kernel {name!r}, {shared_bytes} bytes of dynamic shared memory"
        _check(driver, "cuFuncSetAttribute", status, what)
    return function


def _rejected(
    driver: Any,
    status: Any,
    name: str,
    info: DeviceInfo,
    arch: str | None,
    nvrtc_version: tuple[int, int] | None,
) -> DriverError:
    """Explain why the driver cannot read an image that is an ELF file."""
    major, minor = driver_version()
    made_by = f" by NVRTC {nvrtc_version[0]}.{nvrtc_version[1]}" if nvrtc_version else ""
    found = (
        f"the driver (CUDA {major}.{minor}) rejected kernel {name!r}, compiled{made_by} for "
        f"{arch or 'an unknown architecture'}, on device {info.ordinal} ({info.name}, "
        f"{info.arch}): {_status_text(driver, status)}"
    )
    if arch is not None and arch != info.arch:
        return DriverError(
            f"{found}; expected a kernel for {info.arch}: warm for that architecture"
        )
    if nvrtc_version is not None and nvrtc_version[0] <= major:
        # Any driver of a major version runs what any compiler of that major version made.
        return DriverError(
            f"{found}; the driver is new enough, so the image is damaged; remove it with "
            "'jitconv cache clear' and call again"
        )
    return DriverTooOldError(
        f"{found}; expected a driver of at least the compiler's major version; update the driver "
        "to 580 or newer, or pip install 'jitconv[cu12]' (drivers 525 to 579), run 'jitconv cache clear' "
        "and call again"
    )


@functools.cache
def _primary_context(ordinal: int) -> Any:
    """Return the device's primary context, held until the process ends."""
    driver = _driver()
    return _call(driver, "cuDevicePrimaryCtxRetain", _call(driver, "cuDeviceGet", ordinal))


@contextmanager
def _current(driver: Any, context: Any) -> Iterator[None]:
    """Make a context current in this thread for the duration of a block."""
    _call(driver, "cuCtxPushCurrent", context)
    try:
        yield
    finally:
        _call(driver, "cuCtxPopCurrent")


@contextmanager
def _captures_undisturbed(driver: Any) -> Iterator[None]:
    """Let this thread load a module, or wait, while another thread captures a CUDA graph.

    By default a capture forbids such calls in every thread and is itself broken by them.
    """
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = _call(driver, "cuThreadExchangeStreamCaptureMode", relaxed)
    try:
        yield
    finally:
        _call(driver, "cuThreadExchangeStreamCaptureMode", before)


@functools.cache
def _driver() -> Any:
    """Return the bindings of the driver API, initialised; a failure is not remembered."""
    driver = _bindings()
    (status,) = driver.cuInit(0)
    if int(status) == _NO_DEVICE:
        raise DriverNotFoundError(
            "the CUDA driver sees no GPU (CUDA_ERROR_NO_DEVICE); check CUDA_VISIBLE_DEVICES and "
            "that the container was started with its GPUs, or pass CPU tensors"
        )
    if int(status) != 0:
        raise DriverNotFoundError(
            f"the CUDA driver does not start: cuInit failed with {_status_text(driver, status)}; "
            "reload or reinstall the NVIDIA driver (nvidia-smi shows whether it works), or pass "
            "CPU tensors"
        )
    return driver


@functools.cache
def _bindings() -> Any:
    """Import the bindings of the driver API and make sure that there is a driver behind them."""
    try:
        driver = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise DriverNotFoundError(
            f"cuda-python is not installed or does not import ({error}); expected the package "
            "cuda-python 12.9 or newer; pip install jitconv"
        ) from error
    try:
        # cuda-python opens libcuda on the first call and, by version, raises RuntimeError, a
        # subclass of it or FileNotFoundError when there is none.
        driver.cuDriverGetVersion()
    except Exception as error:
        raise DriverNotFoundError(
            f"the CUDA driver cannot be loaded ({' '.join(str(error).split())}); expected "
            "libcuda.so.1 of the NVIDIA driver; install the driver (580 or newer; 525 or newer "
            "with jitconv[cu12]), start the container with its GPUs, or pass CPU tensors"
        ) from error
    return driver


def _call(driver: Any, name: str, *arguments: Any) -> Any:
    """Call the driver and return the value after the status, None when there is none."""
    status, *values = getattr(driver, name)(*arguments)
    _check(driver, name, status)
    return values[0] if values else None


def _check(driver: Any, call: str, status: Any, what: str = "") -> None:
    if int(status) != 0:
        subject = f" ({what})" if what else ""
        raise DriverError(
            f"{call} failed with {_status_text(driver, status)}{subject}; "
            f"{_launch_remedy(int(status)) if int(status) in _FAULTS else _general_remedy(call)}"
        )


def _general_remedy(call: str) -> str:
    if call == "cuDeviceGet":
        return "expected the ordinal of a device that torch.cuda.device_count() counts"
    return "see 'jitconv doctor' for the driver and the devices that it sees"


def _status_text(driver: Any, status: Any) -> str:
    """Return a status as "CUDA_ERROR_INVALID_VALUE (1, invalid argument)"."""
    _, name = driver.cuGetErrorName(status)
    _, text = driver.cuGetErrorString(status)
    described = text.decode() if text else "no description"
    return f"{name.decode() if name else 'an unknown status'} ({int(status)}, {described})"
