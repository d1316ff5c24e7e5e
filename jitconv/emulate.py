"""Run a rendered kernel on the CPU: the same text that NVRTC gets, built by the host C++ compiler.

::

    rendered ──► build(): one program per kernel text, cached by content ──► execute(): one launch

The program (``templates/host/``) runs the threads of a block as fibers, one block after another, on
buffers that end exactly where the tensors end. It is sanitized unless asked otherwise, so an access
out of bounds, a misaligned vector or an undefined shift ends it with a report. A launch runs under
several schedules, which differ in every liberty that the hardware has: the order in which threads
run, when asynchronous copies land, what shared memory holds at the start. All must give the same
bits, or the kernel has a race.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from jitconv.errors import EmulatorUnavailableError, JitconvError
from jitconv.resources import templates_root
from jitconv.store.location import configured_directory, prepare_directory, private_subdirectory

if TYPE_CHECKING:
    import torch

__all__ = [
    "ALL_SCHEDULES",
    "DEFAULT_SCHEDULES",
    "EmulationError",
    "Launch",
    "Schedule",
    "build",
    "compiler",
    "execute",
]

# What lies between the elements of a strided tensor: a NaN in every floating type.
_GAP = 0xFF
# What shared memory holds before a kernel writes it. The first is NaN in every floating type and
# far out of bounds as an index. A maximum or a minimum can swallow NaN, but not a huge number too.
_POISON_NAN = 0x7FFF7FFF
_POISON_HUGE = 0x7F7F7F7F
_POISON_HUGE_NEGATIVE = 0xFF7FFF7F

_ORDERS = ("forward", "reversed", "random")
_LANDINGS = ("late", "early")

_SANITIZED = (
    "-O1",
    "-g1",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
)
_FAST = ("-O1",)
# Instrumented as for ThreadSanitizer, but linked with the emulator's own race detector.
_RACES = ("-O1", "-g1", "-fsanitize=thread", "-fPIE", "-DJITCONV_RACES=true")
# The runtime checks what it touches itself; instrumented it would take most of the time.
_RUNTIME = ("-std=c++17", "-O2", "-fPIE", "-Wall", "-Wextra", "-DJITCONV_HOST=1")
_Checks = Literal["memory", "races", "nothing"]
# No contraction: a product and a sum round separately unless the kernel says fmaf, so that a result
# does not depend on the machine that ran it.
_COMMON = ("-std=c++17", "-w", "-fno-strict-aliasing", "-ffp-contract=off", "-DJITCONV_HOST=1")


# A leak at exit is no concern of a kernel's. Wide redzones catch an overshoot by a whole row.
_SANITIZER_ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:redzone=512:abort_on_error=0"
    ":handle_sigfpe=1:handle_sigill=1",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
}


class EmulationError(JitconvError):
    """The kernel did something wrong on the CPU, or could not be built for it.

    The message names the kernel, the block, thread and schedule where it happened, and what the
    sanitizer or the emulator found. ``report`` is the program's whole stderr.
    """

    def __init__(self, message: str, report: str = "") -> None:
        super().__init__(message)
        self.report = report


class RenderedKernel(Protocol):
    """What the emulator needs of a rendered kernel."""

    @property
    def name(self) -> str:
        """Symbol of the ``extern "C" __global__`` function."""

    @property
    def source(self) -> str:
        """The text that NVRTC gets."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Text of every header by its include name (``device/platform.cuh``)."""


@dataclass(frozen=True)
class Launch:
    """Blocks in the grid, threads in a block, bytes of dynamic shared memory."""

    grid: int
    block: int
    shared_bytes: int = 0


@dataclass(frozen=True)
class Schedule:
    """One way in which the hardware may run a launch.

    ``order``: which of the threads that can run does: the lowest, the highest, a random one
    (``seed``). ``landing``: whether asynchronous copies land as late as allowed or at once.
    ``poison``: the 32-bit pattern that fills shared memory before every block.
    """

    order: Literal["forward", "reversed", "random"] = "forward"
    landing: Literal["late", "early"] = "late"
    seed: int = 0
    poison: int = _POISON_NAN


DEFAULT_SCHEDULES: tuple[Schedule, ...] = (
    Schedule("forward", "late"),
    Schedule("reversed", "early", poison=_POISON_HUGE),
    Schedule("random", "late", seed=1, poison=_POISON_HUGE_NEGATIVE),
)

# Every pair of order and landing, several random orders: for tests of kernels with hand-made
# synchronisation.
ALL_SCHEDULES: tuple[Schedule, ...] = (
    *DEFAULT_SCHEDULES,
    Schedule("forward", "early", poison=_POISON_HUGE),
    Schedule("reversed", "late"),
    Schedule("random", "early", seed=2),
    Schedule("random", "late", seed=3, poison=_POISON_HUGE),
)


# ---- The compiler -------------------------------------------------------------------------------


def compiler() -> str:
    """Return the path of the host C++ compiler: ``$CXX``, else c++, g++ or clang++.

    Raises:
        EmulatorUnavailableError: none is installed, or ``CXX`` names a program that is not there.
    """
    named = os.environ.get("CXX", "")
    if named:
        found = shutil.which(named)
        if found is None:
            raise EmulatorUnavailableError(
                f"CXX={named!r}: no such program; expected the name or path of a C++17 compiler. Correct or unset CXX"
            )
        return found
    for name in ("c++", "g++", "clang++"):
        found = shutil.which(name)
        if found is not None:
            return found
    raise EmulatorUnavailableError(
        "no host C++ compiler: looked for c++, g++ and clang++ on PATH. Install one "
        "(apt-get install g++, dnf install gcc-c++), or name one in the CXX variable"
    )


@functools.cache
def _identity(cxx: str) -> str:
    """What distinguishes this compiler's output from another's."""
    result = subprocess.run([cxx, "--version"], capture_output=True, text=True, check=False)
    return f"{platform.machine()}\n{result.stdout}"


@functools.cache
def _flags(cxx: str, checks: _Checks) -> tuple[str, ...]:
    flags = _COMMON + {"memory": _SANITIZED, "races": _RACES, "nothing": _FAST}[checks]
    # An uninitialised local becomes -1.7e38 rather than, by luck, the right value.
    pattern = "-ftrivial-auto-var-init=pattern"
    probe = [cxx, pattern, "-x", "c++", "-fsyntax-only", os.devnull]
    if subprocess.run(probe, capture_output=True, check=False).returncode == 0:
        flags += (pattern,)
    return flags


def _host_files() -> dict[str, str]:
    folder = templates_root() / "host"
    return {
        f"host/{path.name}": path.read_text(encoding="utf-8")
        for path in sorted(folder.iterdir())
        if path.suffix in (".h", ".cpp")
    }


def _digest(parts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()[:32]


def _directory() -> Path:
    root = configured_directory(os.environ)
    prepare_directory(root, os.environ)
    return private_subdirectory(root, "emulator")


def _run_compiler(command: Sequence[str], folder: Path, what: str) -> None:
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        lines = result.stderr.splitlines()
        shown = "\n".join(lines[:40])
        raise EmulationError(f"{what} does not compile for the CPU with {command[0]}:\n{shown}", result.stderr)


def _write_tree(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _publish(path: Path, build_in: Path, built: Path) -> Path:
    # Two processes that build the same text publish the same program: whoever comes last wins.
    os.replace(build_in / built, path)
    return path


def _build_runtime(cxx: str, checks: _Checks, files: Mapping[str, str]) -> Path:
    """Compile ``templates/host/*.cpp`` to one object, once for each compiler."""
    flags = (*_RUNTIME, "-DJITCONV_ASAN=1") if checks == "memory" else _RUNTIME
    root = _directory()
    path = root / f"runtime-{_digest([_identity(cxx), *flags, *files, *files.values()])}.o"
    if path.exists():
        return path
    with tempfile.TemporaryDirectory(dir=root, prefix="build-") as name:
        folder = Path(name)
        _write_tree(folder, files)
        objects = []
        for source in (file for file in files if file.endswith(".cpp")):
            objects.append(f"{Path(source).stem}.o")
            command = [cxx, *flags, "-I.", "-c", source, "-o", objects[-1]]
            _run_compiler(command, folder, "the emulator's runtime")
        link = [cxx, "-r", "-nostdlib", *objects, "-o", "runtime"]
        _run_compiler(link, folder, "the emulator's runtime")
        return _publish(path, folder, Path("runtime"))


def build(rendered: RenderedKernel, *, sanitize: bool = True, races: bool = False, arch: str = "sm_90a") -> Path:
    """Build a kernel for the CPU and return the path of the program.

    The program is cached in ``JITCONV_CACHE_DIR/emulator`` by content: kernel text, headers,
    compiler and flags. Sizes and pointers come at run time, so one program serves all of them.

    Args:
        rendered: the kernel: its name, source and headers.
        sanitize: build with AddressSanitizer and UndefinedBehaviorSanitizer (slower, finds more);
            otherwise for speed.
        races: build with the race detector on shared memory instead of the sanitizers.
        arch: the architecture whose branches (``JITCONV_ARCH``) are compiled.

    Raises:
        EmulatorUnavailableError: there is no host C++ compiler.
        EmulationError: the text does not compile.
    """
    cxx = compiler()
    checks: _Checks = "races" if races else "memory" if sanitize else "nothing"
    flags = (*_flags(cxx, checks), f"-DJITCONV_ARCH={_arch_number(arch)}")
    host_files = _host_files()
    headers = {name: text for name, text in rendered.headers.items() if name not in host_files}
    parts = [rendered.name, rendered.source, *headers, *headers.values()]
    parts += [*host_files, *host_files.values(), _identity(cxx), *flags]
    path = _directory() / f"{rendered.name[:80]}-{_digest(parts)}"
    if path.exists():
        return path
    runtime = _build_runtime(cxx, checks, host_files)
    with tempfile.TemporaryDirectory(dir=_directory(), prefix="build-") as name:
        folder = Path(name)
        _write_tree(folder, {**host_files, **headers, "kernel.cu": rendered.source})
        main = f'#include "kernel.cu"\n#include "host/main.h"\nJITCONV_MAIN({rendered.name})\n'
        _write_tree(folder, {"main.cpp": main})
        _run_compiler([cxx, *flags, "-I.", "-c", "main.cpp"], folder, f"kernel {rendered.name}")
        # Without -fsanitize=thread, which would bring ThreadSanitizer's own runtime.
        link = ["-pie"] if races else flags
        command = [cxx, *link, "main.o", str(runtime), "-ldl", "-o", "program"]
        _run_compiler(command, folder, f"kernel {rendered.name}")
        return _publish(path, folder, Path("program"))


def _arch_number(arch: str) -> int:
    match = re.fullmatch(r"sm_(\d+)[af]?", arch)
    if match is None:
        raise ValueError(f"arch {arch!r}: expected an architecture such as 'sm_80' or 'sm_90a'")
    return int(match.group(1)) * 10


# ---- Buffers ------------------------------------------------------------------------------------


@dataclass
class _Span:
    """The bytes of a storage that some of the tensors reach: one buffer of the emulated device."""

    storage: torch.UntypedStorage
    start: int
    end: int
    #: Which of the bytes belong to an element; None if all do.
    elements: torch.Tensor | None = None

    def bytes_view(self) -> torch.Tensor:
        """The bytes as a uint8 tensor that shares the storage."""
        import torch

        flat = torch.empty(0, dtype=torch.uint8)
        return flat.set_(self.storage, self.start, (self.end - self.start,), (1,))

    def contents(self) -> bytes:
        """The bytes to start from: a kernel that reads the gaps between elements reads poison."""
        data = self.bytes_view().clone()
        if self.elements is not None:
            data[~self.elements] = _GAP
        return data.numpy().tobytes()

    def stray_write(self, data: torch.Tensor) -> int | None:
        """Position of the first byte in ``data`` that a kernel wrote between elements."""
        if self.elements is None:
            return None
        stray = (~self.elements & (data != _GAP)).nonzero()
        return int(stray[0]) if len(stray) else None

    def take(self, data: torch.Tensor) -> None:
        """Copy the elements in ``data`` to the storage."""
        import torch

        if self.elements is None:
            self.bytes_view().copy_(data)
        else:
            self.bytes_view().copy_(torch.where(self.elements, data, self.bytes_view()))


def _reach(tensor: torch.Tensor) -> tuple[int, int]:
    """First and one-past-last byte, within its storage, of a tensor's elements."""
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    if tensor.numel() == 0:
        return start, start
    last = sum((tensor.shape[axis] - 1) * tensor.stride(axis) for axis in range(tensor.dim()))
    return start, start + (last + 1) * size


def _spans(tensors: Sequence[torch.Tensor]) -> list[_Span]:
    """The buffers: tensors that overlap in one storage share one; all others are apart."""
    spans = _merged(tensors)
    for index, span in enumerate(spans):
        inside = [tensor for tensor in tensors if _find_span(spans, tensor)[0] == index]
        span.elements = _element_bytes(span, inside)
    return spans


def _merged(tensors: Iterable[torch.Tensor]) -> list[_Span]:
    spans: list[_Span] = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        start, end = _reach(tensor)
        merged = _Span(storage, start, end)
        apart = []
        for span in spans:
            same = span.storage.data_ptr() == storage.data_ptr() and storage.nbytes() > 0
            if same and span.start < merged.end and merged.start < span.end:
                merged.start = min(merged.start, span.start)
                merged.end = max(merged.end, span.end)
            else:
                apart.append(span)
        spans = [*apart, merged]
    return spans


def _element_bytes(span: _Span, tensors: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """Which bytes of a buffer belong to an element of some tensor; None if all do."""
    import torch

    mask = torch.zeros(span.end - span.start, dtype=torch.bool)
    for tensor in tensors:
        size = tensor.element_size()
        shape = (*tensor.shape, size)
        stride = (*(size * step for step in tensor.stride()), 1)
        start = _reach(tensor)[0] - span.start
        mask.as_strided(shape, stride, start).fill_(True)
    return None if bool(mask.all()) else mask


def _find_span(spans: Sequence[_Span], tensor: torch.Tensor) -> tuple[int, int]:
    """Index of the buffer that holds a tensor, and where in it the tensor starts."""
    start, end = _reach(tensor)
    pointer = tensor.untyped_storage().data_ptr()
    for index, span in enumerate(spans):
        if span.storage.data_ptr() == pointer and span.start <= start and end <= span.end:
            return index, start - span.start
    raise AssertionError("every tensor has been given a span")


def _check_pointers(arguments: bytes, pointers: Mapping[int, torch.Tensor]) -> None:
    for offset, tensor in pointers.items():
        if offset < 0 or offset % 8 != 0 or offset + 8 > len(arguments):
            raise ValueError(
                f"pointers[{offset}]: expected a multiple of 8 within the {len(arguments)} bytes of arguments"
            )
        if tensor.device.type != "cpu":
            raise ValueError(f"pointers[{offset}]: the tensor is on {tensor.device}; expected a CPU tensor")


# ---- A run --------------------------------------------------------------------------------------


def execute(
    rendered: RenderedKernel,
    launch: Launch,
    arguments: bytes,
    pointers: Mapping[int, torch.Tensor],
    *,
    sanitize: bool = True,
    races: bool = False,
    schedules: Sequence[Schedule] = DEFAULT_SCHEDULES,
    arch: str = "sm_90a",
    timeout: float = 300.0,
) -> None:
    """Run one launch of a kernel on CPU tensors, in place.

    Args:
        rendered: the kernel: its name, source and headers.
        launch: grid, block and dynamic shared memory.
        arguments: the bytes of the kernel's one parameter; null pointers are zeros.
        pointers: byte offset of a pointer field to the tensor that it points to. The buffer is the
            memory from the tensor's first to its last element, whatever its strides; tensors that
            overlap share one.
        sanitize: see :func:`build`.
        races: look for races on shared memory instead, see :func:`build`. It finds any two
            accesses with no barrier between them and any read of what nobody has written, also
            where no schedule makes it show, and knows that shuffles order nothing.
        schedules: the ways to run the launch; all must give bit-identical results.
        arch: see :func:`build`.
        timeout: seconds after which the run is given up.

    Raises:
        EmulatorUnavailableError: there is no host C++ compiler.
        EmulationError: the kernel does not compile, or did something wrong under some schedule;
            the tensors are then unchanged.
        ValueError: an argument does not fit the others.
    """
    _check_launch(launch, schedules)
    _check_pointers(arguments, pointers)
    program = build(rendered, sanitize=sanitize, races=races, arch=arch)
    if launch.grid == 0:
        return
    spans = _spans(list(pointers.values()))
    job = _encode_job(launch, arguments, pointers, schedules, spans)
    result = _run_program(program, job, rendered.name, timeout)
    if result.returncode != 0:
        report = _with_lines(result.stderr.decode(errors="replace"), program)
        message = f"kernel {rendered.name}: {_trim(report) or f'exit code {result.returncode}'}"
        raise EmulationError(message + _locate(report, pointers, spans), report)
    data = _split(result.stdout, spans)
    for index, span in enumerate(spans):
        byte = span.stray_write(data[index])
        if byte is not None:
            report = f"buffer {index} of {span.end - span.start} bytes, offset {byte}"
            message = f"kernel {rendered.name}: write into the gap between elements: {report}"
            raise EmulationError(message + _locate(report, pointers, spans))
    for span, written in zip(spans, data, strict=True):
        span.take(written)


def _check_launch(launch: Launch, schedules: Sequence[Schedule]) -> None:
    if not 0 <= launch.grid < 1 << 31:
        raise ValueError(f"launch.grid = {launch.grid}: expected 0 to 2**31 - 1")
    if not 1 <= launch.block <= 1024:
        raise ValueError(f"launch.block = {launch.block}: expected 1 to 1024 threads")
    if launch.shared_bytes < 0:
        raise ValueError(f"launch.shared_bytes = {launch.shared_bytes}: expected 0 or more")
    if not schedules:
        raise ValueError("schedules is empty: expected at least one Schedule")


def _encode_job(
    launch: Launch,
    arguments: bytes,
    pointers: Mapping[int, torch.Tensor],
    schedules: Sequence[Schedule],
    spans: Sequence[_Span],
) -> bytes:
    """The job as templates/host/job.cpp reads it."""
    numbers = [launch.grid, launch.block, launch.shared_bytes, len(arguments)]
    numbers += [len(spans), len(pointers), len(schedules)]
    for schedule in schedules:
        numbers += [_ORDERS.index(schedule.order), _LANDINGS.index(schedule.landing)]
        numbers += [schedule.seed, schedule.poison]
    for offset, tensor in pointers.items():
        numbers += [offset, *_find_span(spans, tensor)]
    for span in spans:
        # A CUDA allocation is aligned to 256 bytes and more; a view into it is not.
        numbers += [span.end - span.start, span.start % 256]
    parts = [struct.pack(f"<{len(numbers)}Q", *numbers), arguments]
    parts += [span.contents() for span in spans]
    return b"".join(parts)


def _split(output: bytes, spans: Sequence[_Span]) -> list[torch.Tensor]:
    """The bytes of each buffer after the run."""
    import torch

    everything = torch.frombuffer(bytearray(output or b"\0"), dtype=torch.uint8)
    parts = []
    position = 0
    for span in spans:
        parts.append(everything[position : position + span.end - span.start])
        position += span.end - span.start
    return parts


def _run_program(program: Path, job: bytes, name: str, timeout: float) -> subprocess.CompletedProcess[bytes]:
    command = [*_without_randomisation(), str(program)]
    environment = {**os.environ, **_SANITIZER_ENVIRONMENT}
    try:
        return subprocess.run(command, input=job, capture_output=True, env=environment, timeout=timeout, check=False)
    except subprocess.TimeoutExpired as error:
        report = (error.stderr or b"").decode(errors="replace")
        raise EmulationError(
            f"kernel {name}: still running after {timeout:g} s: a loop that never ends, or a "
            "launch too large for the emulator",
            report,
        ) from None


@functools.cache
def _without_randomisation() -> tuple[str, ...]:
    """A prefix that runs a program without address randomisation, where sanitizers need that.

    With more than 28 random bits, older AddressSanitizer runtimes find their shadow memory taken.
    """
    try:
        bits = int(Path("/proc/sys/vm/mmap_rnd_bits").read_text())
    except (OSError, ValueError):
        return ()
    setarch = shutil.which("setarch")
    if bits <= 28 or setarch is None:
        return ()
    prefix = (setarch, platform.machine(), "-R")
    # A container may forbid the system call behind it.
    usable = subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0
    return prefix if usable else ()


# ---- Reports ------------------------------------------------------------------------------------

# Rulers, summaries, and every stack frame that is not in the kernel or a device header.
_NOISE = re.compile(
    r"^(=+|SUMMARY.*|AddressSanitizer:DEADLYSIGNAL|\s*"
    r"|\s*#\d+ .*(jitconv::host::|host/|libasan|libubsan|libc\.so|_start).*)$"
)
# The sanitizer's notes on who allocated an address: the emulator names the buffer instead.
_REST = ("allocated by thread", "Shadow bytes around", "AddressSanitizer can not provide")
# Where a program was built, in front of the names of its files.
_BUILD_FOLDER = re.compile(r"\S*/build-[^/\s]+/")
_LONGEST_REPORT = 40


def _trim(report: str) -> str:
    """The part of a program's report that a person reads, the emulator's own words last."""
    found: list[str] = []
    emulator: list[str] = []
    skipping = False
    for line in _BUILD_FOLDER.sub("", report).splitlines():
        if line.startswith("emulator: "):
            emulator.append(line.removeprefix("emulator: "))
            skipping = False
        elif line.startswith(_REST):
            skipping = True
        elif emulator:
            emulator.append(line)
        elif not skipping and not _NOISE.match(line):
            found.append(re.sub(r"^==\d+==\s*", "", line))
    return "\n".join([*found[:_LONGEST_REPORT], *emulator])


def _with_lines(report: str, program: Path) -> str:
    """Replace addresses of code by ``file:line``, where binutils can tell."""
    addresses = re.findall(r"\bcode (0x[0-9a-f]+)", report)
    addr2line = shutil.which("addr2line")
    if not addresses or addr2line is None:
        return report
    command = [addr2line, "-e", str(program), *addresses]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    for address, line in zip(addresses, result.stdout.splitlines(), strict=False):
        report = report.replace(f"code {address}", re.sub(r" \(discriminator.*\)", "", line), 1)
    return report


_BUFFER = re.compile(r"buffer (\d+) (?:differs at byte|of \d+ bytes, offset) (-?\d+)")


def _locate(report: str, pointers: Mapping[int, torch.Tensor], spans: Sequence[_Span]) -> str:
    """Name the tensor that a report means by a buffer's number."""
    match = _BUFFER.search(report)
    if match is None:
        return ""
    buffer, byte = int(match.group(1)), int(match.group(2))
    offsets = [offset for offset in pointers if _find_span(spans, pointers[offset])[0] == buffer]
    places = []
    for offset in offsets:
        tensor = pointers[offset]
        start, end = _reach(tensor)
        place = byte - _find_span(spans, tensor)[1]
        shape = f"{tuple(tensor.shape)} tensor at argument offset {offset}"
        if 0 <= place < end - start:
            element = _element_at(place // tensor.element_size(), tensor)
            places.append(f"element {element} of the {shape}")
        else:
            places.append(f"outside the {shape}")
    return f"\nbuffer {buffer}: " + "; ".join(places)


def _element_at(position: int, tensor: torch.Tensor) -> list[int]:
    """Index of the element that lies ``position`` elements behind a tensor's first one."""
    order = sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)
    element = [0] * tensor.dim()
    for axis in order:
        if tensor.stride(axis) > 0:
            element[axis] = min(position // tensor.stride(axis), tensor.shape[axis] - 1)
            position -= element[axis] * tensor.stride(axis)
    return element
