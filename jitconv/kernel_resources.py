"""What a compiled kernel uses of a multiprocessor, read from the log of ptxas.

ptxas (run by NVRTC with ``-v``) writes for every kernel and for every function that it calls:

    ptxas info    : Compiling entry function 'NAME' for 'sm_90a'
    ptxas info    : Function properties for NAME
    ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
    ptxas info    : Used 167 registers, used 1 barriers, 128 bytes smem, 376 bytes cmem[0]
    ptxas info    : Function properties for _Z1ff
    ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from jitconv.errors import ToolchainError

_ENTRY = re.compile(r"Compiling entry function '([^']+)' for")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_BARRIERS = re.compile(r"used (\d+) barriers")
_SHARED = re.compile(r"(\d+) bytes smem")
_CONSTANT = re.compile(r"(\d+) bytes cmem\[\d+\]")


@dataclass(frozen=True)
class Resources:
    """Registers per thread, sizes in bytes, named barriers per block.

    ``spill_stores``, ``spill_loads`` and ``stack_bytes`` (per thread) are summed over the kernel
    and the functions that it calls. ``static_shared`` excludes dynamic shared memory.
    ``constant_bytes`` is what ptxas prints; it prints none for sm_90 and newer.
    """

    registers: int
    spill_stores: int
    spill_loads: int
    stack_bytes: int
    static_shared: int
    constant_bytes: int
    barriers: int

    @property
    def spills(self) -> bool:
        """Whether any register was spilled to local memory."""
        return self.spill_stores > 0 or self.spill_loads > 0


def parse_resources(log: str, name: str) -> Resources:
    """Return the resources of kernel ``name`` from the log of one compilation.

    Raises:
        ToolchainError: the log has no complete entry for that kernel. Guessing zeros would let a
            kernel that spills pass for one that does not.
    """
    section = _section(log, name)
    used = _USED.search(section)
    frames = _FRAME.findall(section)
    if used is None or not frames:
        kernels = _ENTRY.findall(log)
        raise ToolchainError(
            f"the compiler's log has no resource usage for kernel {name!r} (kernels in it: "
            f"{', '.join(kernels) or 'none'}); expected the source to define "
            f'extern "C" __global__ {name} and ptxas to report on it. The log was:\n{log}'
        )
    stack, stores, loads = (sum(int(frame[i]) for frame in frames) for i in range(3))
    usage = section[used.start() :].splitlines()[0]
    return Resources(
        registers=int(used.group(1)),
        spill_stores=stores,
        spill_loads=loads,
        stack_bytes=stack,
        static_shared=sum(map(int, _SHARED.findall(usage))),
        constant_bytes=sum(map(int, _CONSTANT.findall(usage))),
        barriers=sum(map(int, _BARRIERS.findall(usage))),
    )


def _section(log: str, name: str) -> str:
    """Return the part of the log from the kernel's heading to the next kernel's."""
    for heading in _ENTRY.finditer(log):
        if heading.group(1) == name:
            following = _ENTRY.search(log, heading.end())
            return log[heading.end() : following.start() if following else len(log)]
    return ""
