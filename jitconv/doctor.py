"""``jitconv doctor``: what this machine has, what works with it, and what would go wrong.

A check ends ``ok``, ``warn`` (something that jitconv can do is not available here) or ``fail`` (generated kernels
should work here and cannot). Only the last makes the machine ill: one without a GPU is not.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata

from jitconv.architectures import KNOWN, arch_number
from jitconv.errors import (
    DriverError,
    DriverNotFoundError,
    EmulatorUnavailableError,
    JitconvError,
)
from jitconv.machine import DEFAULT_ARCH, Gpu, gpus

__all__ = ["Check", "examine"]


@dataclass(frozen=True)
class Check:
    """What one check found. ``remedy`` is empty where there is nothing to do."""

    name: str
    state: str
    text: str
    remedy: str = ""


def examine() -> list[Check]:
    """Run every check, in the order in which things depend on each other. Raises nothing for what it finds."""
    found = gpus()
    driver = _driver()
    # A GPU that torch cannot use still says that generated kernels are wanted here.
    wanted = any(gpu.arch is not None for gpu in found) or (driver.state == "ok" and not found and _driver_sees_gpu())
    return [
        _python(),
        _torch(found, wanted),
        driver,
        *_gpus(found, driver),
        _cuda_python(),
        _nvrtc(wanted),
        _architectures(),
        *_driver_matches(wanted),
        *_kernels(found, wanted),
        _store(),
        *_tuned(found),
        _disassembler(),
        _compiler(),
    ]


def _python() -> Check:
    return Check("python", "ok", f"{platform.python_version()} at {sys.executable}")


def _torch(found: list[Gpu], wanted: bool) -> Check:
    import torch

    if torch.version.hip is not None:
        return Check("torch", "warn", f"{torch.__version__}, built for ROCm", "generated kernels need a CUDA build")
    if torch.version.cuda is None:
        text = f"{torch.__version__}, built without CUDA"
        if not wanted:
            return Check("torch", "ok", f"{text}: calls on CPU tensors take torch's path")
        return Check("torch", "fail", text, "there is a GPU here: install a CUDA build of torch (pytorch.org)")
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    text = f"{torch.__version__}, built for CUDA {torch.version.cuda}, cuDNN {cudnn or 'not found'}"
    if wanted and not found:
        return Check("torch", "fail", f"{text}, but it cannot use the GPU here", "see what torch.cuda.init() raises")
    return Check("torch", "ok", text)


def _driver() -> Check:
    from jitconv import launch

    try:
        major, minor = launch.driver_version()
    except DriverNotFoundError as error:
        return Check("driver", "warn", "none: warming, inspecting and the emulator work without one", str(error))
    except DriverError as error:
        return Check("driver", "fail", "does not answer", str(error))
    return Check("driver", "ok", f"supports CUDA {major}.{minor}")


def _driver_sees_gpu() -> bool:
    from jitconv import launch

    try:
        launch.device_info(0)
    except JitconvError:
        return False
    return True


def _gpus(found: list[Gpu], driver: Check) -> list[Check]:
    if not found:
        text = "none that torch can use"
        remedy = "" if driver.state != "ok" else "check CUDA_VISIBLE_DEVICES and how the container was started"
        return [Check("gpu", "warn", f"{text}: generated kernels do not run here", remedy)]
    checks = []
    for gpu in found:
        text = f"{gpu.ordinal}: {gpu.name}, compute capability {gpu.capability[0]}.{gpu.capability[1]}"
        if gpu.arch is None:
            checks.append(Check("gpu", "warn", f"{text}, too old", "jitconv needs 7.5 (Turing) or newer; use torch"))
        elif gpu.arch not in KNOWN:
            remedy = f"it should work, and is not tested: tested are {', '.join(KNOWN)}"
            checks.append(Check("gpu", "warn", f"{text}, {gpu.arch}", remedy))
        else:
            checks.append(Check("gpu", "ok", f"{text}, {gpu.arch}"))
    return checks


def _cuda_python() -> Check:
    versions = []
    for package in ("cuda-python", "cuda-bindings"):
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            versions.append(f"{package} not installed")
    state = "warn" if any("not installed" in version for version in versions) else "ok"
    return Check("cuda-python", state, ", ".join(versions), "" if state == "ok" else "pip install 'jitconv[cu13]'")


def _nvrtc(wanted: bool) -> Check:
    from jitconv import toolchain

    try:
        major, minor = toolchain.nvrtc_version()
    except JitconvError as error:
        lost = "nothing can be compiled" if wanted else "nothing can be compiled or warmed here"
        return Check("nvrtc", "fail" if wanted else "warn", f"not usable: {lost}", str(error))
    return Check("nvrtc", "ok", f"{major}.{minor} at {toolchain.nvrtc_path() or 'an unknown path'}")


def _architectures() -> Check:
    from jitconv import toolchain

    try:
        compiles = toolchain.nvrtc_architectures()
    except JitconvError:
        return Check("targets", "warn", "unknown without NVRTC")
    missing = [arch for arch in KNOWN if arch_number(arch) not in compiles]
    if missing:
        return Check("targets", "warn", f"this NVRTC lacks {', '.join(missing)}", "install a newer NVRTC")
    return Check("targets", "ok", ", ".join(KNOWN))


def _driver_matches(wanted: bool) -> list[Check]:
    """A driver runs what compilers up to its own major version made; nothing to say where one is missing."""
    from jitconv import launch, toolchain

    try:
        driver, nvrtc = launch.driver_version(), toolchain.nvrtc_version()
    except JitconvError:
        return []
    versions = f"NVRTC {nvrtc[0]}.{nvrtc[1]}, driver for CUDA {driver[0]}.{driver[1]}"
    if nvrtc[0] > driver[0]:
        remedy = f"update the driver, or pip install 'jitconv[cu{driver[0]}]'"
        return [Check("match", "fail" if wanted else "warn", f"{versions}: the driver is too old", remedy)]
    return [Check("match", "ok", versions)]


def _kernels(found: list[Gpu], wanted: bool) -> list[Check]:
    """The proof: a kernel from template to result on each GPU, or to machine code without one."""
    usable = [gpu for gpu in found if gpu.arch is not None]
    if not usable:
        return [_attempt(f"compiled for {DEFAULT_ARCH}", _compile_one, wanted)]
    return [_attempt(f"right on GPU {gpu.ordinal}", partial(_run_one, gpu.ordinal), True) for gpu in usable]


def _attempt(text: str, action: Callable[[], None], wanted: bool) -> Check:
    try:
        action()
    except Exception as error:
        # Whatever it is, this is the place where it is wanted: as a finding, not as a traceback.
        return Check("kernel", "fail" if wanted else "warn", f"not {text}", str(error))
    return Check("kernel", "ok", f"generated and {text}")


def _compile_one() -> None:
    import torch

    from jitconv.calls import call_of, public_function
    from jitconv.compilation import compile_kernel
    from jitconv.program import build

    x, weight = torch.empty(1, 2, 8, device="meta"), torch.empty(2, 2, 3, device="meta")
    for step in build(call_of(public_function("conv1d"), x, weight)).launches:
        # Not through the store: what it holds proves nothing about the compiler.
        compile_kernel(step.kernel, DEFAULT_ARCH)


def _run_one(ordinal: int) -> None:
    import torch

    from jitconv.functional import conv1d

    x = torch.arange(16.0, device=f"cuda:{ordinal}").view(1, 2, 8)
    weight = torch.arange(12.0, device=x.device).view(2, 2, 3)
    out = conv1d(x, weight)
    expected = torch.nn.functional.conv1d(x.cpu(), weight.cpu())
    # Small whole numbers: every order of summation gives the same bits.
    if not torch.equal(out.cpu(), expected):
        raise JitconvError(f"it computed {out.cpu().tolist()}, expected {expected.tolist()}; please report this")


def _store() -> Check:
    from jitconv.report import size
    from jitconv.store import Store

    try:
        state = Store.open(strict=True).info()
    except (JitconvError, ValueError) as error:
        return Check("store", "warn", "not usable: every process compiles again", str(error))
    text = f"{state.path}: {state.entries} kernels, {size(state.size)} of {size(state.size_limit)}"
    if state.quarantined:
        return Check(
            "store", "warn", f"{text}, {state.quarantined} files moved aside as damaged", "jitconv cache clear"
        )
    return Check("store", "ok", text)


def _tuned(found: list[Gpu]) -> list[Check]:
    """What was measured for the models here, each once."""
    from jitconv.planning import tuned

    known = {(gpu, arch): counts for gpu, arch, *counts in tuned.overview()}
    checks = []
    for name, arch in dict.fromkeys((gpu.name, gpu.arch) for gpu in found if gpu.arch is not None):
        mine, shipped = known.get((name, arch), (0, 0))
        text = f"{name}: tiles of {mine} problems measured on this machine, of {shipped} before this release"
        remedy = "" if mine + shipped else "'jitconv tune MANIFEST' measures; until then a heuristic chooses"
        checks.append(Check("tuned", "ok", text, remedy))
    return checks


def _disassembler() -> Check:
    from jitconv.disassemble import REMEDY, disassemblers

    tools = disassemblers()
    if not tools:
        return Check("disassembler", "warn", "none: 'jitconv inspect --format sass' does not work", REMEDY)
    return Check("disassembler", "ok", str(tools[0]))


def _compiler() -> Check:
    from jitconv import emulate

    try:
        return Check("c++", "ok", f"{emulate.compiler()}: the emulator runs generated kernels on the CPU")
    except EmulatorUnavailableError as error:
        return Check("c++", "warn", "none: the emulator does not work", str(error))
