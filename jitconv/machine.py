"""What this machine offers to generated kernels: its GPUs, and the architectures to compile for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from jitconv.architectures import KNOWN, arch_of_capability, normalize_arch
from jitconv.errors import DriverNotFoundError, UnsupportedArchitectureError

__all__ = ["DEFAULT_ARCH", "Gpu", "chosen_archs", "cores", "default_arch", "gpus", "present_archs"]

#: What is compiled for where nobody chose and there is no GPU to ask.
DEFAULT_ARCH = "sm_90a"


@dataclass(frozen=True)
class Gpu:
    """A GPU that torch can use, by torch's ordinal."""

    ordinal: int
    name: str
    capability: tuple[int, int]

    @property
    def arch(self) -> str | None:
        """The architecture to compile for, None when jitconv has no kernels for this GPU."""
        try:
            return arch_of_capability(self.capability)
        except UnsupportedArchitectureError:
            return None


def gpus() -> list[Gpu]:
    """The GPUs that torch can use; none with a CPU build of torch, without a driver, or with none visible."""
    import torch

    if not torch.cuda.is_available():
        return []
    return [
        Gpu(i, torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i))
        for i in range(torch.cuda.device_count())
    ]


def present_archs() -> tuple[str, ...]:
    """Architectures of the GPUs here, each once, in the order of the GPUs."""
    return tuple(dict.fromkeys(gpu.arch for gpu in gpus() if gpu.arch is not None))


def default_arch() -> tuple[str, str]:
    """The architecture to show where none was asked for, and why it is that one."""
    import torch

    found = gpus()
    if found:
        gpu = found[torch.cuda.current_device()]
        if gpu.arch is not None:
            return gpu.arch, f"that of GPU {gpu.ordinal}, {gpu.name}"
    return DEFAULT_ARCH, "the default: no GPU here that jitconv has kernels for"


def chosen_archs(names: Sequence[str]) -> tuple[str, ...]:
    """Exact names of the architectures asked for; of the GPUs here when ``names`` is empty; ``all`` is every known one.

    Raises:
        DriverNotFoundError: none was asked for and there is no GPU.
        ValueError, UnsupportedArchitectureError: a name is no architecture, or one older than sm_75.
    """
    if not names:
        archs = present_archs()
        if not archs:
            raise DriverNotFoundError(
                "--arch is not given and this machine has no GPU that jitconv has kernels for: name the "
                f"architectures to compile for, such as --arch sm_90a,sm_80, or --arch all ({', '.join(KNOWN)})"
            )
        return archs
    expanded = [known for name in names for known in (KNOWN if name == "all" else (normalize_arch(name),))]
    return tuple(dict.fromkeys(expanded))


def cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
