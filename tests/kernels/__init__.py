"""Small kernels that exercise the device vocabulary, one ``.cu`` file each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jitconv.resources import templates_root

__all__ = ["Kernel", "device_headers", "load", "write"]


@dataclass(frozen=True)
class Kernel:
    """What the emulator and NVRTC need of a kernel."""

    name: str
    source: str
    headers: Mapping[str, str]


def device_headers() -> dict[str, str]:
    """Every header of ``templates/device`` by its include name."""
    folder = templates_root() / "device"
    return {f"device/{path.name}": path.read_text("utf-8") for path in folder.glob("*.cuh")}


def _reached(source: str, available: Mapping[str, str]) -> dict[str, str]:
    reached: dict[str, str] = {}
    pending = [source]
    while pending:
        for name in re.findall(r'#include "(device/[^"]+)"', pending.pop()):
            if name not in reached:
                reached[name] = available[name]
                pending.append(available[name])
    return reached


def load(name: str) -> Kernel:
    """The kernel ``name`` from ``tests/kernels/name.cu``."""
    source = (Path(__file__).parent / f"{name}.cu").read_text("utf-8")
    return Kernel(name, f'#line 1 "{name}.cu"\n{source}', _reached(source, device_headers()))


HEADERS = ("platform", "numeric", "warp", "async_copy")


def write(
    body: str, *, fields: str = "float* x; float* y; int32_t n;", headers: Sequence[str] = HEADERS
) -> Kernel:
    """A kernel of the given body with ``device/`` headers; ``a`` is its parameter, a struct of ``fields``."""
    includes = "".join(f'#include "device/{name}.cuh"\n' for name in headers)
    source = (
        f"{includes}using namespace jitconv;\nstruct Arguments {{ {fields} }};\n"
        'extern "C" __global__ void written(const Arguments a) {\n'
        "const int t = static_cast<int>(threadIdx.x);\n"
        "float* const shared = reinterpret_cast<float*>(shared_memory());\n"
        "static_cast<void>(t); static_cast<void>(shared);\n"
        f'#line 1 "written.cu"\n{body}\n}}\n'
    )
    return Kernel("written", source, _reached(source, device_headers()))
