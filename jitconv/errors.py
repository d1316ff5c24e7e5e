"""The exceptions of jitconv, one class per thing that a caller can act on.

Every message names the argument or the component, its value, what was expected and what to do.
Mistakes in the arguments of an operator are not here: those raise what torch raises for them.

    JitconvError
    ├── ToolchainError            NVRTC, the disassembler
    │   ├── NVRTCNotFoundError
    │   ├── NVRTCVersionError
    │   ├── CompileError
    │   └── DisassemblerNotFoundError
    ├── DriverError               the CUDA driver
    │   ├── DriverNotFoundError
    │   └── DriverTooOldError
    ├── UnsupportedArchitectureError   (a ToolchainError and a DriverError)
    ├── KernelNotWarmedError
    ├── EmulatorUnavailableError
    ├── StoreUnavailableError     (defined in jitconv.store)
    └── ManifestError             (a ValueError too)
    StoreWarning                  (a UserWarning)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

INSTALL_NVRTC = (
    "pip install 'jitconv[cu13]' (for drivers 580 and newer) or "
    "pip install 'jitconv[cu12]' (for drivers 525 to 579)"
)


class JitconvError(RuntimeError):
    """Base class of every error that jitconv raises for a reason outside the call's arguments.

    Catch it to handle all of them; each subclass states its own remedy.
    """


class ToolchainError(JitconvError):
    """The compiler could not do its work, for a reason that no subclass describes better.

    The message carries NVRTC's own status; the remedy is in the message.
    """


class NVRTCNotFoundError(ToolchainError):
    """cuda-python or the NVRTC library (or its builtins library) cannot be loaded.

    Remedy: install one of the extras, ``jitconv[cu13]`` or ``jitconv[cu12]``. A process that
    only loads kernels from a warm store never needs NVRTC.
    """


class NVRTCVersionError(ToolchainError):
    """The NVRTC that was loaded is older than 12.8 or of another major version than cuda-python.

    It usually comes from LD_LIBRARY_PATH or a system-wide CUDA. Remedy: install the matching
    extra, and take the foreign directory off the library path.
    """


@dataclass(frozen=True)
class Diagnostic:
    """One error of NVRTC or ptxas, mapped back to the file that a person edits.

    ``file`` is the name in the source's ``#line`` directives or the include name of a header;
    ``line`` counts from 1 in that file. Both are None when the compiler names no place (a kernel
    that uses too much shared memory). ``excerpt`` holds the offending lines with their numbers,
    the line itself marked, and is empty when the text of the file is not known.
    """

    message: str
    file: str | None = None
    line: int | None = None
    excerpt: str = ""


class CompileError(ToolchainError):
    """NVRTC or ptxas refused the source, or ptxas serialised its wgmma instructions.

    Remedy: correct the template or header named by ``file`` and ``line``; when the message is
    about resources (registers, shared memory), choose a smaller tile.

    Attributes:
        kernel: name of the kernel.
        arch: architecture it was compiled for, such as ``"sm_90a"``.
        diagnostics: every error found, the first one first.
        file, line: place of the first error, None when the compiler names none.
        message: text of the first error, without the place.
        excerpt: the lines around the first error.
        constants: what the template baked in, by name.
        log: the whole log of the compiler.
        source: the rendered text that was compiled.
    """

    def __init__(
        self,
        text: str,
        *,
        kernel: str = "",
        arch: str = "",
        diagnostics: tuple[Diagnostic, ...] = (),
        constants: Mapping[str, object] | None = None,
        log: str = "",
        source: str = "",
    ) -> None:
        super().__init__(text)
        first = diagnostics[0] if diagnostics else Diagnostic(text)
        self.kernel = kernel
        self.arch = arch
        self.diagnostics = diagnostics
        self.file = first.file
        self.line = first.line
        self.message = first.message
        self.excerpt = first.excerpt
        self.constants = dict(constants or {})
        self.log = log
        self.source = source


class DisassemblerNotFoundError(ToolchainError):
    """No nvdisasm or cuobjdump that can read the cubin was found.

    Remedy: ``pip install nvidia-cuda-nvdisasm``, or put a CUDA toolkit's ``bin`` on PATH.
    """


class DriverError(JitconvError):
    """A call of the CUDA driver failed.

    The message names the call, the driver's status and the arguments that matter (kernel, grid,
    block, shared memory). After a fault inside a kernel the context is lost: restart the process.
    """


class DriverNotFoundError(DriverError):
    """There is no CUDA driver, or it sees no GPU.

    Remedy: install the NVIDIA driver, start the container with its GPUs, check
    CUDA_VISIBLE_DEVICES; or pass CPU tensors, which need no driver.
    """


class DriverTooOldError(DriverError):
    """The driver rejected a compiled kernel that it cannot read.

    Remedy: update the driver to 580 or newer, or install ``jitconv[cu12]`` and warm again.
    """


class UnsupportedArchitectureError(ToolchainError, DriverError):
    """The GPU is below sm_75, or this NVRTC cannot compile for it.

    Remedy: below sm_75 there is none in jitconv, use torch's own operators; otherwise install
    the NVRTC version that the message asks for.
    """


class KernelNotWarmedError(JitconvError):
    """Strict serving or CUDA graph capture met a kernel that is not compiled and loaded.

    Nothing was compiled and a capture in progress is intact. Remedy: add ``manifest`` (TOML) to
    a manifest and run ``jitconv warm``, or call the operator once before serving or capturing.
    """

    def __init__(self, text: str, *, manifest: str = "") -> None:
        super().__init__(text)
        self.manifest = manifest


class EmulatorUnavailableError(JitconvError):
    """Generated source cannot run on the CPU because no usable host C++ compiler was found.

    Remedy: install g++ or clang++ with C++17 support, or name one in the CXX variable.
    """


class ManifestError(JitconvError, ValueError):
    """A manifest cannot be read, or an entry in it describes no problem.

    The message names the file, the entry and the field. Remedy: correct that field.
    """


class StoreWarning(UserWarning):
    """The kernel store on disk cannot be used; kernels are kept in memory only.

    Calls still succeed, but the next process compiles again. The message names the path and the
    reason. Remedy: correct the directory's owner or mode, or set JITCONV_CACHE_DIR.
    """
