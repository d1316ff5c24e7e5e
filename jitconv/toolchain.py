"""From the text of a kernel to a cubin: NVRTC, called in process through cuda-python.

No file is read or written: headers are handed over in memory, so the result depends on the
arguments and on the version of NVRTC alone. Nothing here needs a GPU or a driver, and no CUDA
library is loaded before the first call.
"""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jitconv.architectures import arch_number, normalize_arch
from jitconv.diagnostics import (
    Finding,
    SourceMap,
    find_errors,
    find_serialized_wgmma,
    locate_in_ptx,
)
from jitconv.errors import (
    INSTALL_NVRTC,
    CompileError,
    Diagnostic,
    NVRTCNotFoundError,
    NVRTCVersionError,
    ToolchainError,
    UnsupportedArchitectureError,
)
from jitconv.kernel_resources import Resources, parse_resources

OLDEST_NVRTC = (12, 8)

DEFAULT_OPTIONS = (
    "--std=c++17",
    # The arithmetic that the error bounds were measured with, stated instead of relied upon:
    # IEEE division and square root, subnormals kept, a*b+c contracted.
    "--ftz=false",
    "--prec-div=true",
    "--prec-sqrt=true",
    "--fmad=true",
    # Without it a header that is missing from `headers` would be looked for in the current
    # directory, and found there it would be in no key.
    "--no-source-include",
)
"""Options that decide the generated code; they belong in the key of a stored kernel.

Line information (``--generate-line-info``) is left out on purpose: NVRTC turns the file names
into absolute paths of the current directory, so that two processes would get different bytes.
"""

# Reports registers and spills in the log and changes no byte of the cubin.
_REPORT = "--ptxas-options=-v"
_LINE_INFO = "--generate-line-info"
# Where there is a driver, NVRTC keeps results in the driver's own cache and, on a hit, says nothing of registers,
# spills or serialised wgmma: what may not be judged must not be served. NVRTC 12.8 has no such cache and no option.
_NO_CACHE = "--no-cache"
_FIRST_WITH_CACHE = (12, 9)

# Reading a file or choosing another target would make the result depend on more than its key.
_RESERVED_OPTIONS = (
    "--gpu-architecture", "-arch", "--include-path", "-I", "--pre-include", "-include",
)  # fmt: skip

# The first NVRTC that knows an architecture, for those that came after the oldest one we accept.
_FIRST_NVRTC = {88: (13, 0), 110: (13, 0)}

_SHOWN_DIAGNOSTICS = 5


@dataclass(frozen=True)
class Compiled:
    """A kernel compiled for one architecture.

    Attributes:
        cubin: the ELF image that the driver loads.
        resources: registers, spills and shared memory.
        log: what NVRTC and ptxas had to say, warnings included.
        options: the options asked for, without the architecture.
        arch: exact architecture, such as ``"sm_90a"``.
        nvrtc_version: (major, minor).
        milliseconds: wall time of the compilation.
    """

    cubin: bytes
    resources: Resources
    log: str
    options: tuple[str, ...]
    arch: str
    nvrtc_version: tuple[int, int]
    milliseconds: float


def compile_cubin(
    source: str,
    *,
    name: str,
    arch: str,
    headers: Mapping[str, str],
    options: tuple[str, ...] = DEFAULT_OPTIONS,
    constants: Mapping[str, object] | None = None,
) -> Compiled:
    """Compile a kernel to a cubin for one exact architecture.

    The same arguments give the same bytes, in any process and thread. Safe to call from many
    threads at once; NVRTC runs without the GIL.

    Args:
        source: the rendered text, with ``#line`` directives back to its template.
        name: the ``extern "C" __global__`` function in it.
        arch: in any form that ``normalize_arch`` accepts.
        headers: text of every header by the name that ``#include`` gives it.
        options: NVRTC options, without architecture and include paths.
        constants: what the template baked in, shown when the compilation fails.

    Raises:
        CompileError: NVRTC or ptxas refused the source, or wgmma was serialised.
        NVRTCNotFoundError, NVRTCVersionError: there is no usable NVRTC.
        UnsupportedArchitectureError: jitconv or this NVRTC cannot compile for ``arch``.
        ValueError: ``arch`` is no architecture, or ``options`` holds a reserved option.
    """
    job = _Job(source, name, _checked_arch(arch), headers, _checked(options), constants or {})
    started = time.perf_counter()
    result = job.run("CUBIN", _REPORT)
    milliseconds = (time.perf_counter() - started) * 1e3
    if not result.ok:
        raise job.error(result)
    if serialized := find_serialized_wgmma(result.log):
        raise job.error(result, serialized)
    return Compiled(
        cubin=result.output,
        resources=parse_resources(result.log, name),
        log=result.log,
        options=options,
        arch=job.arch,
        nvrtc_version=nvrtc_version(),
        milliseconds=milliseconds,
    )


def compile_ptx(
    source: str,
    *,
    name: str,
    arch: str,
    headers: Mapping[str, str],
    options: tuple[str, ...] = DEFAULT_OPTIONS,
    constants: Mapping[str, object] | None = None,
) -> str:
    """Compile a kernel to PTX, for reading only: kernels are always loaded as cubins.

    Arguments and errors as for ``compile_cubin``.
    """
    job = _Job(source, name, _checked_arch(arch), headers, _checked(options), constants or {})
    result = job.run("PTX")
    if not result.ok:
        raise job.error(result)
    return result.output.decode().rstrip("\0")


def nvrtc_version() -> tuple[int, int]:
    """Return (major, minor) of the NVRTC that compiles.

    Raises:
        NVRTCNotFoundError, NVRTCVersionError: there is no usable NVRTC.
    """
    return _nvrtc().version


def nvrtc_path() -> str | None:
    """Return the path of the NVRTC library in this process, None when none is loaded.

    It tells which of several installed copies the loader picked.
    """
    return _mapped_library("libnvrtc.so")


def nvrtc_architectures() -> tuple[int, ...]:
    """Return the numbers of the architectures that this NVRTC compiles for, such as 75 or 90.

    Raises:
        NVRTCNotFoundError, NVRTCVersionError: there is no usable NVRTC.
    """
    nvrtc = _nvrtc().module
    return tuple(_value(nvrtc, "nvrtcGetSupportedArchs", nvrtc.nvrtcGetSupportedArchs()))


@dataclass(frozen=True)
class _Library:
    module: Any
    version: tuple[int, int]


@functools.cache
def _nvrtc() -> _Library:
    """Load NVRTC and check that it is one that works.

    A failure is not remembered, so that a notebook can install the extra and try again.
    """
    try:
        module = importlib.import_module("cuda.bindings.nvrtc")
        bindings = importlib.import_module("cuda.bindings")
    except ImportError as error:
        raise NVRTCNotFoundError(
            f"cuda-python is not installed or does not import ({error}); expected the package "
            f"cuda-python 12.9 or newer; {INSTALL_NVRTC}"
        ) from error
    try:
        # cuda-python opens the library on the first call and, by version, raises RuntimeError,
        # a subclass of it or FileNotFoundError when there is none.
        status, major, minor = module.nvrtcVersion()
    except Exception as error:
        raise NVRTCNotFoundError(
            f"the NVRTC library cannot be loaded ({_one_line(error)}); expected the package "
            f"nvidia-cuda-nvrtc; {INSTALL_NVRTC}"
        ) from error
    _check(module, "nvrtcVersion", status)
    _check_version((major, minor), str(bindings.__version__))
    return _Library(module, (major, minor))


def _check_version(version: tuple[int, int], bindings_version: str) -> None:
    """Refuse an NVRTC that is too old or that belongs to another major of cuda-python."""
    found = f"NVRTC {version[0]}.{version[1]} was loaded from {nvrtc_path() or 'an unknown path'}"
    where = "take other copies of libnvrtc.so off LD_LIBRARY_PATH and the system's library path"
    if version < OLDEST_NVRTC:
        raise NVRTCVersionError(f"{found}; expected 12.8 or newer; {INSTALL_NVRTC}, and {where}")
    bindings_major = int(bindings_version.split(".")[0])
    if version[0] != bindings_major:
        extra = f"pip install 'jitconv[cu{bindings_major}]'"
        raise NVRTCVersionError(
            f"{found}, but cuda-python is {bindings_version}; expected both of the same major "
            f"version; {extra} installs a matching pair; {where}"
        )


def _checked_arch(arch: str) -> str:
    """Normalize an architecture and check that this NVRTC compiles for it."""
    exact = normalize_arch(arch)
    number, known = arch_number(exact), nvrtc_architectures()
    if number in known:
        return exact
    major, minor = nvrtc_version()
    first = _FIRST_NVRTC.get(number)
    if first is not None and first > (major, minor):
        remedy = f"install NVRTC {first[0]}.{first[1]} or newer: {INSTALL_NVRTC}"
    elif number > max(known):
        remedy = f"install a newer NVRTC: {INSTALL_NVRTC}"
    else:
        remedy = "choose one of those"
    raise UnsupportedArchitectureError(
        f"arch: NVRTC {major}.{minor} does not compile for {exact}; it compiles for "
        f"{', '.join(f'sm_{n}' for n in known)}; {remedy}"
    )


def _checked(options: tuple[str, ...]) -> tuple[str, ...]:
    for option in options:
        if option.split("=")[0] in _RESERVED_OPTIONS or option.startswith("-I"):
            raise ValueError(
                f"options: {option!r} is set by jitconv; pass the architecture as `arch` and "
                "headers as `headers`"
            )
    return options


@dataclass(frozen=True)
class _Result:
    ok: bool
    status: str
    log: str
    output: bytes


@dataclass(frozen=True)
class _Job:
    """One kernel to compile: the arguments, and how to explain a failure in their terms."""

    source: str
    name: str
    arch: str
    headers: Mapping[str, str]
    options: tuple[str, ...]
    constants: Mapping[str, object]

    @property
    def source_name(self) -> str:
        """The name that NVRTC gives to lines before the first ``#line`` directive."""
        return f"{self.name}.cu"

    def run(self, kind: str, *extra: str) -> _Result:
        """Compile to ``kind``, "CUBIN" or "PTX"."""
        target = self.arch if kind == "CUBIN" else self.arch.replace("sm_", "compute_")
        no_cache = (_NO_CACHE,) if nvrtc_version() >= _FIRST_WITH_CACHE else ()
        options = (f"--gpu-architecture={target}", *no_cache, *self.options, *extra)
        nvrtc = _nvrtc().module
        with self._program(nvrtc) as program:
            encoded = [option.encode() for option in options]
            (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
            ok = int(status) == 0
            # NVRTC 12.9 leaves a NUL between the logs of the stages it joins.
            log = _read(nvrtc, program, "ProgramLog").decode(errors="replace").replace("\0", "\n")
            output = _read(nvrtc, program, kind) if ok else b""
        return _Result(ok, _status_name(nvrtc, status), log.rstrip(), output)

    @contextmanager
    def _program(self, nvrtc: Any) -> Iterator[Any]:
        program = _value(
            nvrtc,
            "nvrtcCreateProgram",
            nvrtc.nvrtcCreateProgram(
                self.source.encode(),
                self.source_name.encode(),
                len(self.headers),
                [text.encode() for text in self.headers.values()],
                [name.encode() for name in self.headers],
            ),
        )
        try:
            yield program
        finally:
            nvrtc.nvrtcDestroyProgram(program)

    def error(self, result: _Result, findings: Sequence[Finding] = ()) -> ToolchainError:
        """Return the exception for a failed compilation, or for findings in a successful one."""
        if "libnvrtc-builtins" in result.log or "BUILTIN_OPERATION" in result.status:
            return NVRTCNotFoundError(
                f"NVRTC works but its library of built-in functions cannot be loaded "
                f"({result.log.strip() or result.status}); the installation is incomplete or "
                f"mixes two versions; reinstall it: {INSTALL_NVRTC}"
            )
        findings = findings or find_errors(result.log) or [Finding(result.log or result.status)]
        if any(finding.ptx_line for finding in findings):
            findings = self._locate(findings)
        source_map = SourceMap(self.source, self.source_name, self.headers)
        # An unrolled loop repeats one mistake once per copy; a reader needs it once.
        diagnostics = tuple(dict.fromkeys(source_map.explain(finding) for finding in findings))
        return CompileError(
            self._explanation(diagnostics),
            kernel=self.name,
            arch=self.arch,
            diagnostics=diagnostics,
            constants=self.constants,
            log=result.log,
            source=self.source,
        )

    def _locate(self, findings: Sequence[Finding]) -> Sequence[Finding]:
        """Map lines of PTX to lines of the source, by compiling again with line information."""
        ptx = self.run("PTX", _LINE_INFO)
        if not ptx.ok:
            return findings
        # Line information moves the lines of the PTX, so the log must be of that kind too.
        log = self.run("CUBIN", _REPORT, _LINE_INFO).log
        again = find_errors(log) or find_serialized_wgmma(log)
        names = SourceMap(self.source, self.source_name, self.headers).names()
        return locate_in_ptx(again or findings, ptx.output.decode(errors="replace"), names)

    def _explanation(self, diagnostics: Sequence[Diagnostic]) -> str:
        major, minor = nvrtc_version()
        parts = [f"kernel {self.name!r} does not compile for {self.arch} (NVRTC {major}.{minor})"]
        for diagnostic in diagnostics[:_SHOWN_DIAGNOSTICS]:
            place = f"{diagnostic.file}({diagnostic.line}): " if diagnostic.file else ""
            parts.append(f"{place}{diagnostic.message}\n{diagnostic.excerpt}".rstrip())
        if len(diagnostics) > _SHOWN_DIAGNOSTICS:
            parts.append(f"and {len(diagnostics) - _SHOWN_DIAGNOSTICS} more, see the log attribute")
        if self.constants:
            lines = "\n".join(f"  {name} = {value!r}" for name, value in self.constants.items())
            parts.append(f"constants in force:\n{lines}")
        parts.append(f"options: {' '.join(self.options)}")
        parts.append(_remedy(diagnostics))
        return "\n\n".join(parts)


def _remedy(diagnostics: Sequence[Diagnostic]) -> str:
    texts = " ".join(diagnostic.message for diagnostic in diagnostics)
    if "serialized" in texts:
        return (
            "The kernel would run, several times too slow. Keep accumulators and A registers "
            "untouched between wgmma.fence and wgmma.wait_group, or use a smaller tile."
        )
    if "too much shared data" in texts or "register" in texts:
        return "The kernel asks for more than the architecture has: use a smaller tile."
    if "open source file" in texts:
        return "Pass every included header in `headers`, under the name that #include gives it."
    if all(diagnostic.file is None for diagnostic in diagnostics):
        return "Correct the options, or read the whole log in the error's log attribute."
    return "Correct the lines marked above. The whole log is in the error's log attribute."


def _read(nvrtc: Any, program: Any, what: str) -> bytes:
    """Read one output of a program: "CUBIN", "PTX" or "ProgramLog"."""
    size = _value(nvrtc, f"nvrtcGet{what}Size", getattr(nvrtc, f"nvrtcGet{what}Size")(program))
    # Not bytes: NVRTC writes into the buffer, and Python shares one-byte bytes objects.
    buffer = bytearray(size)
    (status,) = getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
    _check(nvrtc, f"nvrtcGet{what}", status)
    return bytes(buffer)


def _value(nvrtc: Any, call: str, answer: tuple[Any, ...]) -> Any:
    """Return the value in cuda-python's answer (status, value), raising if the status is bad."""
    _check(nvrtc, call, answer[0])
    return answer[1]


def _check(nvrtc: Any, call: str, status: Any) -> None:
    if int(status) != 0:
        raise ToolchainError(
            f"{call} failed with {_status_name(nvrtc, status)}; expected NVRTC_SUCCESS; "
            f"reinstall NVRTC if this repeats: {INSTALL_NVRTC}"
        )


def _status_name(nvrtc: Any, status: Any) -> str:
    _, text = nvrtc.nvrtcGetErrorString(status)
    return text.decode() if isinstance(text, bytes) else str(text)


def _mapped_library(name: str) -> str | None:
    """Return the path of a shared library that this process has mapped."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            paths = [line.split(maxsplit=5)[-1].strip() for line in maps if name in line]
    except OSError:
        return None
    return paths[0] if paths else None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
