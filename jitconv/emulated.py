"""A call on the CPU emulator: the same Programs, the same source, the same argument bytes as on a GPU."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from jitconv import emulate, program, tensor_map
from jitconv.program import Call
from jitconv.render import render

__all__ = ["run"]

#: A small GPU: blocks that take one tile after the other then have several, as on a real one.
_MULTIPROCESSORS = 2


def run(
    call: Call,
    *,
    sanitize: bool = True,
    races: bool = False,
    schedules: Sequence[emulate.Schedule] = emulate.DEFAULT_SCHEDULES,
) -> Tensor:
    """``call``, whose tensors are on the CPU, by its generated kernels in the emulator.

    Outputs and workspaces start as NaN, so that an element that no thread writes shows. Raises EmulationError for
    what a sanitizer or a schedule finds, EmulatorUnavailableError without a C++ compiler.
    """
    built = program.build(call, program.EMULATED_ARCH)
    tensors, numbers = call.tensors(), call.numbers()
    for step in built.launches:
        out = torch.full(step.shape, torch.nan, dtype=step.dtype)
        tensors[step.writes] = out = out.contiguous(memory_format=step.memory_format)
        if not step.grid:
            continue
        data = bytearray(step.arguments)
        for offset, name in step.numbers:
            struct.pack_into("<f", data, offset, numbers[name])
        pointers = {offset: tensors[name] for offset, name in step.pointers if name in tensors}
        for offset, name, spec in step.tensor_maps:
            data[offset : offset + tensor_map.MAP_BYTES] = tensor_map.encode_for_emulator(spec)
            pointers[offset + tensor_map.ADDRESS_OFFSET] = tensors[name]
        emulate.execute(
            render(step.kernel),
            emulate.Launch(step.blocks(_MULTIPROCESSORS), step.block, step.shared_bytes),
            bytes(data),
            pointers,
            sanitize=sanitize,
            races=races,
            schedules=schedules,
        )
    return tensors["y"]
