"""Names and limits of the GPU architectures that kernels are compiled for.

A cubin is made for one exact architecture. On Hopper and datacenter Blackwell the name carries
the suffix ``a``: only such code may use wgmma and the tensor memory, and the GPU loads it as
readily as the plain one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from jitconv.errors import UnsupportedArchitectureError

KNOWN = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120")
"""The architectures that every kernel family is compiled and tested for."""

OLDEST = 75

_SUFFIX = {90: "a", 100: "a"}
_NAME = re.compile(r"(?:sm_|compute_)?(?:(\d+)\.(\d)|(\d+))([af]?)")


@dataclass(frozen=True)
class Limits:
    """What one streaming multiprocessor offers; sizes in bytes.

    ``shared_block`` is the most that one block may ask for (opt-in), static and dynamic together;
    ``shared_reserved`` is what the system keeps for each resident block out of ``shared_sm``.
    """

    shared_block: int
    shared_sm: int
    shared_reserved: int
    threads_sm: int
    blocks_sm: int
    registers_sm: int = 65536
    registers_thread: int = 255


_KIB = 1024
# CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability".
_LIMITS = {
    75: Limits(64 * _KIB, 64 * _KIB, 0, 1024, 16),
    80: Limits(163 * _KIB, 164 * _KIB, _KIB, 2048, 32),
    86: Limits(99 * _KIB, 100 * _KIB, _KIB, 1536, 16),
    87: Limits(163 * _KIB, 164 * _KIB, _KIB, 1536, 16),
    89: Limits(99 * _KIB, 100 * _KIB, _KIB, 1536, 24),
    90: Limits(227 * _KIB, 228 * _KIB, _KIB, 2048, 32),
    100: Limits(227 * _KIB, 228 * _KIB, _KIB, 2048, 32),
    120: Limits(99 * _KIB, 100 * _KIB, _KIB, 1536, 24),
}

#: Where a float32 product is worth splitting into three of TF32: dense TF32 runs there at 8 (sm_80), 7 (sm_90) and 14
#: (sm_100) times the rate of FFMA, by the vendor's data sheets of A100, H100 and B200. On sm_86, sm_89 and sm_120 it
#: runs at FFMA's own rate (GeForce) or twice that (workstation boards), so three products lose; below sm_80 there is
#: no TF32. What is not listed has not been looked at, and takes FFMA.
_SPLITS_FP32 = frozenset({80, 90, 100})


def normalize_arch(arch: str) -> str:
    """Return the exact name of an architecture, such as ``"sm_90a"`` for ``"sm_90"``.

    Accepts ``"90"``, ``"9.0"``, ``"sm_90"``, ``"sm_90a"`` and ``"compute_90"``. An architecture
    that jitconv does not know keeps its plain name: NVRTC may know it.

    Raises:
        ValueError: the text is not the name of an architecture.
        UnsupportedArchitectureError: it is older than sm_75.
    """
    match = _NAME.fullmatch(arch.strip().lower())
    if match is None:
        raise ValueError(
            f"arch: {arch!r} is not the name of a GPU architecture; "
            f"expected one like 'sm_80', '8.0' or '80' (tested ones: {', '.join(KNOWN)})"
        )
    major, minor, digits, suffix = match.groups()
    number = int(digits) if digits is not None else int(major) * 10 + int(minor)
    if number < OLDEST:
        raise UnsupportedArchitectureError(
            f"arch: {arch!r} is sm_{number}, and jitconv's kernels need sm_{OLDEST} (Turing) or "
            "newer; on this GPU call torch's own operators instead"
        )
    return f"sm_{number}{suffix or _SUFFIX.get(number, '')}"


def arch_number(arch: str) -> int:
    """Return the number in an architecture's name: 90 for ``"sm_90a"``, 120 for ``"sm_120"``."""
    return int(normalize_arch(arch).removeprefix("sm_").rstrip("af"))


def splits_fp32(arch: str) -> bool:
    """Whether fp32 accuracy is cheaper as three TF32 products on tensor cores than by FFMA."""
    return arch_number(arch) in _SPLITS_FP32


def arch_of_capability(capability: tuple[int, int]) -> str:
    """Return the architecture to compile for on a device of this compute capability.

    ``(9, 0)`` gives ``"sm_90a"``, the form that ``torch.cuda.get_device_capability`` returns.

    Raises:
        UnsupportedArchitectureError: the device is older than sm_75.
    """
    major, minor = capability
    return normalize_arch(f"{major}.{minor}")


def limits_of(arch: str) -> Limits:
    """Return the limits of an architecture.

    One that is not in the table gets those of the nearest older one in it, except that the
    consumer limits of sm_120 are the smaller and therefore the safe guess above 100.
    """
    number = arch_number(arch)
    if number > 100:
        return _LIMITS.get(number, _LIMITS[120])
    return _LIMITS[max(known for known in _LIMITS if known <= number)]
