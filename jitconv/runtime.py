"""The life of a call on a GPU: signature → prepared launches → addresses → launch.

::

    run(call) ─► prepared? ──yes──────────────────────────────► output, addresses, launches
                    │ no
                    └► build Program ─► for each kernel: loaded? ─► key ─► store ─► compile once, publish ─► load

A call that is prepared is one dictionary look-up, its allocations and its launches: nothing is rendered, compiled or
asked of the device. A call without gradients does not even get here a second time: fast_path.py recognises it by its
arguments, before they are checked.
"""

from __future__ import annotations

import logging
import struct
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jitconv import launch, program, tensor_map
from jitconv.compilation import compiled_kernel, key_of
from jitconv.errors import KernelNotWarmedError
from jitconv.families import KernelPlan
from jitconv.program import Call, KernelLaunch, Program
from jitconv.stats import count

_log = logging.getLogger("jitconv")

#: Prepared signatures kept; a signature is one set of sizes, a few hundred bytes.
_PREPARED_LIMIT = 4096

_lock = threading.Lock()
_loading = threading.Lock()
_prepared: OrderedDict[tuple[Any, ...], Prepared] = OrderedDict()
_loaded: dict[tuple[str, int], launch.LoadedKernel] = {}


@dataclass(frozen=True, eq=False)
class Prepared:
    """A Program with its kernels loaded on one device."""

    program: Program
    kernels: tuple[launch.LoadedKernel, ...]
    device: torch.device
    multiprocessors: int


def run(call: Call) -> Tensor:
    """Run ``call`` with generated kernels on the current stream of the device of ``call.x``."""
    ready = prepared(call)
    count("generated_calls")
    return _launch_all(ready, call)


def prepared(call: Call) -> Prepared:
    """The Program of ``call`` with its kernels loaded: from memory, else built."""
    signature = call.signature()
    return _prepared.get(signature) or _prepare(call, signature)


def _launch_all(prepared: Prepared, call: Call) -> Tensor:
    tensors = call.tensors()
    numbers = call.numbers()
    stream = launch.current_stream(prepared.device.index)
    for step, kernel in zip(prepared.program.launches, prepared.kernels, strict=True):
        if step.packs and call.frozen is not None:
            if step.grid:
                tensors[step.writes] = call.frozen.packed(step, kernel, tensors["weight"])
            continue
        out = torch.empty(
            step.shape, dtype=step.dtype, device=prepared.device, memory_format=step.memory_format
        )
        tensors[step.writes] = out
        if step.grid:
            kernel.launch(step.blocks(prepared.multiprocessors), step.block, arguments(step, tensors, numbers), stream)
            count("launches")
    return tensors["y"]


def arguments(step: KernelLaunch, tensors: dict[str, Tensor], numbers: dict[str, float]) -> bytes:
    """The bytes of one launch with addresses and numbers filled in."""
    data = bytearray(step.arguments)
    for offset, name in step.pointers:
        tensor = tensors.get(name)
        if tensor is not None:
            struct.pack_into("<Q", data, offset, tensor.data_ptr())
    for offset, name in step.numbers:
        struct.pack_into("<f", data, offset, numbers[name])
    for offset, name, spec in step.tensor_maps:
        tensor = tensors[name]
        encoded = tensor_map.encode(spec, tensor.data_ptr(), tensor.device.index)
        data[offset : offset + tensor_map.MAP_BYTES] = encoded
    return bytes(data)


def _prepare(call: Call, signature: tuple[Any, ...]) -> Prepared:
    # A chain that does not fit is the caller's mistake: it is named before the device is looked at.
    program.bind_chains(call)
    device = call.x.device
    info = launch.device_info(device.index)
    built = program.build(call, info.arch, info.name)
    kernels = tuple(loaded_kernel(step.kernel, step.shared_bytes, device.index) for step in built.launches)
    prepared = Prepared(built, kernels, device, info.sm_count)
    with _lock:
        _prepared[signature] = prepared
        while len(_prepared) > _PREPARED_LIMIT:
            _prepared.popitem(last=False)
    return prepared


def forget() -> None:
    """Plan every call anew, as other tiles may have been measured to be faster. What is loaded stays loaded."""
    with _lock:
        _prepared.clear()


def loaded_kernel(kernel: KernelPlan, shared_bytes: int, device: int) -> launch.LoadedKernel:
    """``kernel`` loaded on ``device``: from memory, else from the store, else compiled."""
    arch = launch.device_info(device).arch
    key = key_of(kernel, arch)
    found = _loaded.get((key, device))
    if found is not None:
        count("memory_hits")
        return found
    if launch.is_capturing(launch.current_stream(device)):
        # Compiling or loading would break the capture that is going on; refusing leaves it intact.
        raise KernelNotWarmedError(
            f"kernel {kernel.problem.label()} is not loaded on device {device} and a CUDA graph is being captured: "
            "call the same function once with the same shapes before the capture"
        )
    entry = compiled_kernel(kernel, arch)
    # A module stays loaded until the process ends: of threads that come at once, one loads it.
    with _loading:
        found = _loaded.get((key, device))
        if found is None:
            _log.info("loading %s (%s) on device %d", entry.metadata["name"], key[:12], device)
            found = _loaded[key, device] = launch.load(
                entry.cubin, entry.metadata["name"], device=device, shared_bytes=shared_bytes, arch=arch
            )
        return found
