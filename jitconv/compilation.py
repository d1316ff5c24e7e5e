"""A KernelPlan made into machine code, once: from the store if it is there, else rendered and compiled.

Used by the runtime, by warming and by inspection alike, so that all of them mean the same kernel by the same key.
"""

from __future__ import annotations

import time
from functools import lru_cache

from jitconv import toolchain
from jitconv.architectures import normalize_arch
from jitconv.families import KernelPlan, family
from jitconv.render import kernel_key, render
from jitconv.store import Entry, Store, default_store, fetch_or_build


@lru_cache(maxsize=4096)
def key_of(kernel: KernelPlan, arch: str) -> str:
    """The store key of ``kernel`` for ``arch`` (any form that ``normalize_arch`` takes)."""
    return kernel_key(kernel, normalize_arch(arch), toolchain.DEFAULT_OPTIONS)


def compiled_kernel(kernel: KernelPlan, arch: str, *, store: Store | None = None) -> Entry:
    """The compiled kernel with its source and metadata: from the store, else compiled and published.

    ``store`` defaults to the process-wide one. Compiles at most once per key in this process, and across
    processes as long as the claim on the key can be had in time.

    Raises CompileError and the other errors of :mod:`jitconv.toolchain`.
    """
    arch = normalize_arch(arch)
    key = key_of(kernel, arch)
    target = default_store() if store is None else store
    entry = fetch_or_build(key, lambda: compile_kernel(kernel, arch), target)
    if target is not None:
        target.mark_loaded(key)
    return entry


def compile_kernel(kernel: KernelPlan, arch: str) -> Entry:
    """Render and compile ``kernel``, asking no store."""
    rendered = render(kernel)
    compiled = toolchain.compile_cubin(
        rendered.source, name=rendered.name, arch=arch, headers=rendered.headers, constants=rendered.constants
    )
    resources = compiled.resources
    metadata = {
        "name": rendered.name,
        "label": kernel.problem.label(),
        "arch": compiled.arch,
        "problem": kernel.problem.canonical(),
        "plan": kernel.canonical(),
        "options": list(compiled.options),
        "nvrtc_version": list(compiled.nvrtc_version),
        "registers": resources.registers,
        "spill_stores": resources.spill_stores,
        "spill_loads": resources.spill_loads,
        "stack_bytes": resources.stack_bytes,
        "shared_bytes": resources.static_shared + rendered.constants.get("shared_bytes", 0),
        "threads": family(kernel).threads(kernel),
        "compile_ms": round(compiled.milliseconds, 1),
        "created": time.time(),
    }
    return Entry(cubin=compiled.cubin, source=rendered.source, metadata=metadata)
