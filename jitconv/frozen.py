"""Weights that do not change: copied once, and packed once for each kernel that reads them packed.

::

    prepare(…, freeze_weights=True) ─► copies ─┬─ packed(step) ─► known? ──yes──► the packed weights
                                               │                   │ no
                                               │                   └► pack, wait, keep
                                               └─ refresh() ─► copy and pack again, in the same memory

Packed weights keep their address from the first call to the last. So a launch can be remembered with them
(fast_path.py), and a CUDA graph that reads them reads the new ones after a refresh.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from jitconv import launch
from jitconv.errors import KernelNotWarmedError
from jitconv.program import KernelLaunch
from jitconv.stats import count

__all__ = ["FrozenWeights"]


@dataclass(frozen=True, eq=False)
class _Packing:
    """One layout of the weights: the memory that holds it, and the launch that fills it."""

    packed: Tensor
    kernel: launch.LoadedKernel
    step: KernelLaunch
    arguments: bytes

    def fill(self, stream: int) -> None:
        self.kernel.launch(self.step.grid, self.step.block, self.arguments, stream)
        count("launches")


class FrozenWeights:
    """Copies of the weights and biases of one operator, and what packing kernels made of them.

    The tensors that were given are not kept alive. Safe to use from many threads, :meth:`refresh` excepted.

    Args:
        function: name of the public function, for errors.
        tensors: the weights and biases by the names of their arguments, on one device.
    """

    def __init__(self, function: str, tensors: Mapping[str, Tensor]) -> None:
        self._function = function
        self._device = next(iter(tensors.values())).device
        self._refuse_capture("prepare(freeze_weights=True)")
        self._given = {name: TensorWeakRef(tensor) for name, tensor in tensors.items()}
        self._trainable = frozenset(name for name, tensor in tensors.items() if tensor.requires_grad)
        # Under inference_mode a copy could never take part in a gradient, that of x included.
        with torch.inference_mode(False), torch.no_grad():
            self.copies = {name: _copy(tensor) for name, tensor in tensors.items()}
        self._packings: dict[int, _Packing] = {}
        self._lock = threading.Lock()
        self._wait()

    def __reduce__(self) -> NoReturn:
        # A copy would know nothing of the tensors that refresh() reads, and its packed weights are of this process.
        raise TypeError(
            f"prepared {self._function}: frozen weights cannot be copied or pickled: prepare another operator"
        )

    def packed(self, step: KernelLaunch, kernel: launch.LoadedKernel, weight: Tensor) -> Tensor:
        """What ``step`` makes of ``weight``, one of the copies: kept from an earlier call, else packed now.

        It may be read from any stream: whoever packs waits until that is done.

        Raises:
            KernelNotWarmedError: it is not there, and a CUDA graph is being captured.
        """
        found = self._packings.get(id(kernel))
        return self._pack(step, kernel, weight) if found is None else found.packed

    def _pack(self, step: KernelLaunch, kernel: launch.LoadedKernel, weight: Tensor) -> Tensor:
        from jitconv.runtime import arguments

        device = weight.device
        stream = launch.current_stream(device.index)
        if launch.is_capturing(stream):
            # A packing within the graph would be there after its first replay only, for everybody.
            raise KernelNotWarmedError(
                f"prepared {self._function}: its frozen weights are not packed for an input of this kind and a CUDA "
                "graph is being captured: call the operator once with the same shapes before the capture"
            )
        # Of threads that come at once, one packs.
        with self._lock:
            found = self._packings.get(id(kernel))
            if found is None:
                packed = torch.empty(step.shape, dtype=step.dtype, device=device)
                found = _Packing(packed, kernel, step, arguments(step, {"weight": weight, step.writes: packed}, {}))
                found.fill(stream)
                launch.wait(stream, device.index)
                self._packings[id(kernel)] = found
        return found.packed

    def refresh(self) -> None:
        """Copy and pack the given tensors as they are now; waits for the device before and after."""
        given = self.given()
        for name, copy in self.copies.items():
            self._check(name, given.get(name), copy)
        self._refuse_capture("refresh()")
        with self._lock, torch.inference_mode(False), torch.no_grad():
            # Kernels of other streams may still read what is about to be written.
            if _has_streams(self._device):
                torch.cuda.synchronize(self._device)
            for name, copy in self.copies.items():
                copy.copy_(given[name])
            for packing in self._packings.values():
                packing.fill(launch.current_stream(packing.packed.device.index))
            self._wait()

    def given(self) -> dict[str, Tensor]:
        """The tensors that were given, as far as they still exist, by name."""
        alive = ((name, reference()) for name, reference in self._given.items())
        return {name: tensor for name, tensor in alive if tensor is not None}

    def trainable(self) -> str | None:
        """The name of a tensor that requires a gradient, or did as long as it existed; None where there is none."""
        for name, reference in self._given.items():
            tensor = reference()
            if name in self._trainable if tensor is None else tensor.requires_grad:
                return name
        return None

    @property
    def packings(self) -> int:
        """How many packings there are: at most one for each packing kernel."""
        return len(self._packings)

    @property
    def nbytes(self) -> int:
        """Memory of the copies and their packings."""
        return sum(t.nbytes for t in (*self.copies.values(), *(p.packed for p in [*self._packings.values()])))

    def _check(self, name: str, tensor: Tensor | None, copy: Tensor) -> None:
        """RuntimeError unless ``tensor`` can take the place of ``copy``."""
        if tensor is None:
            raise RuntimeError(
                f"prepared {self._function}: refresh(): the tensor that was given as {name} does not exist any more: "
                "expected that it is kept as long as it is to be read again; prepare another operator"
            )
        if (tensor.shape, tensor.dtype, tensor.device) != (copy.shape, copy.dtype, copy.device):
            raise RuntimeError(
                f"prepared {self._function}: refresh(): {name} now has shape {tuple(tensor.shape)}, dtype "
                f"{tensor.dtype} and is on {tensor.device}: expected {tuple(copy.shape)}, {copy.dtype} and "
                f"{copy.device} as it was given; prepare another operator"
            )

    def _refuse_capture(self, what: str) -> None:
        if _has_streams(self._device) and launch.is_capturing(launch.current_stream(self._device.index)):
            raise RuntimeError(
                f"{what} of {self._function} while a CUDA graph is being captured: expected a call before or after the "
                "capture; graphs that were captured use refreshed weights when they are replayed"
            )

    def _wait(self) -> None:
        if _has_streams(self._device):
            launch.wait(launch.current_stream(self._device.index), self._device.index)


def _has_streams(device: torch.device) -> bool:
    return device.type == "cuda"


def _copy(tensor: Tensor) -> Tensor:
    # The memory format of weights is part of what decides that of the output.
    return tensor.detach().clone(memory_format=torch.preserve_format)
