"""The warm call: what a public function does for arguments it has seen before, in a few tens of microseconds.

::

    read(raw arguments) ─► key, slots ─► run ─► known key? ──yes──► output, argument bytes, launches
                                                   │ no
                                                   └► checks, Call, runtime.run ─► remember(key, …)

The key is made of the arguments as they were given, before anything is checked, and decides every check and the whole
Program: all that is left out of it are addresses and numbers, which go into the slots. So a known key needs no checks,
and a call that failed one is never remembered. What cannot be put into a key in little time (subclasses of Tensor,
iterators, parameters that are neither int nor str nor a sequence of them), what is recorded for a gradient and what
PyTorch serves has no key or is not remembered: it takes the whole way, every time.

Nothing here holds a tensor: an entry is strides, constant bytes and loaded kernels. That of an operator whose weights
are frozen also has the address of its packed weights, and a key that nobody has when the operator is gone.
"""

from __future__ import annotations

import functools
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from ctypes import c_float
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad

from jitconv import launch, tensor_map
from jitconv.epilogue import Step, _ConvolutionValue
from jitconv.families import common
from jitconv.precision import torchs
from jitconv.stats import count_call

if TYPE_CHECKING:
    from jitconv.program import Call, KernelLaunch
    from jitconv.runtime import Prepared

__all__ = ["Seen", "forget", "read", "remember", "run"]

#: A key and its slots: the address of each tensor argument (0 for None), then a value for each operand of the chains,
#: in the order in which they were given.
Seen: TypeAlias = tuple[tuple[Any, ...], list[Any]]

_Pick: TypeAlias = Callable[[list[Any]], tuple[Any, ...]]
_Maps: TypeAlias = tuple[tuple[int, Callable[[int], bytes]], ...]

#: Entries kept; the oldest go first. An entry is one set of sizes and strides, a few kilobytes.
_LIMIT = 4096

#: Encoded tensor maps kept for each kernel of an entry: an allocator hands out the same few addresses again and again.
_MAPS = 16

_entries: dict[tuple[Any, ...], _Ready] = {}
_lock = threading.Lock()

#: Tensors that have nothing about them that a key would miss. Others may override what any of this does.
_PLAIN = frozenset((Tensor, torch.nn.Parameter))

#: Exact types of parameters: True == 1 == 1.0, and only one of the three is valid.
_SIMPLE = frozenset((int, str))
_SEQUENCES = frozenset((tuple, list, torch.Size))

_on_gpu: Callable[[Tensor], bool] = attrgetter("is_cuda")


def read(
    function: str | int,
    tensors: Sequence[Tensor | None],
    parameters: tuple[Any, ...],
    chains: Iterable[Any],
    precision: str | None,
) -> Seen | None:
    """The key and the slots of a call as its caller wrote it, or None where it has no key.

    Args:
        function: name of the public function, or number of the operator that was prepared; it says what the others
            mean, and whose packed weights are read.
        tensors: x, then every weight with its bias behind it.
        parameters: stride, padding and so on, in one order for each function.
        chains: of steps, in the order in which data meets them.
        precision: as given.
    """
    x: Any = tensors[0]
    if type(x) not in _PLAIN or not _on_gpu(x):
        return None
    if forward_ad._current_level >= 0:
        return None  # a tangent shows in no attribute
    if precision is None:
        precision = torchs()
    elif type(precision) is not str:
        return None
    recording = torch.is_grad_enabled()
    dtype, device = x.dtype, x.device
    slots: list[Any] = []
    try:
        if not _SIMPLE.issuperset(map(type, parameters)):
            frozen = _frozen(parameters)
            if frozen is None:
                return None
            parameters = frozen
        key: list[Any] = [function, precision, parameters, dtype, device]
        for tensor in tensors:
            if tensor is None:
                key.append(None)
                slots.append(0)
                continue
            if type(tensor) not in _PLAIN or tensor.dtype is not dtype or tensor.device != device or tensor.is_neg():
                return None
            if recording and tensor.requires_grad:
                return None
            address = tensor.data_ptr()
            key += tensor.shape, tensor.stride(), address % 16 == 0
            slots.append(address)
        if not _read_chains(chains, device, recording, key, slots):
            return None
    except RuntimeError:
        return None  # sparse, nested and transformed tensors have no strides or no address; a list may hold itself
    return tuple(key), slots


def _read_chains(
    chains: Iterable[Any], device: torch.device, recording: bool, key: list[Any], slots: list[Any]
) -> bool:
    """Add steps to a key and their operands to its slots; False where they have no key."""
    for chain in chains:
        key.append(None)  # where one chain ends and the next begins
        if type(chain) is not list and type(chain) is not tuple:
            if chain is None:
                continue
            if type(chain) is not Step:
                return False  # an iterator would be spent here
            chain = (chain,)
        for step in chain:
            if type(step) is not Step:
                return False
            key += step.kind, step.attributes
            for name, operand in step.operands:
                value: Any = operand
                key.append(name)
                if isinstance(value, float):
                    slots.append(c_float(value).value)
                elif type(value) in _PLAIN:
                    if value.is_neg() or (recording and value.requires_grad):
                        return False
                    key += value.shape, value.stride(), value.dtype
                    if value.device == device:
                        address = value.data_ptr()
                        key.append(address % 16 == 0)
                        slots.append(address)
                    elif value.is_cpu and value.numel() == 1:
                        # Passed as a number. Whoever reads one from a GPU waits for all that runs there.
                        key.append("on the host")
                        slots.append(c_float(value.item()).value)
                    else:
                        return False
                elif type(value) is _ConvolutionValue:
                    key.append(_ConvolutionValue)
                    slots.append(0)
                else:
                    return False
    return True


def _frozen(parameters: Iterable[Any]) -> tuple[Any, ...] | None:
    """``parameters``, nested sequences too, as tuples of int and str; None where something else is among them."""
    frozen: list[Any] = []
    for value in parameters:
        kind = type(value)
        if kind in _SEQUENCES:
            value = _frozen(value)
            if value is None:
                return None
        elif kind not in _SIMPLE:
            return None
        frozen.append(value)
    return tuple(frozen)


def run(seen: Seen | None) -> Tensor | None:
    """Run a call that is remembered; None where it is not."""
    if seen is None:
        return None
    key, slots = seen
    ready = _entries.get(key)
    return None if ready is None else ready.run(slots)


def remember(seen: Seen, call: Call, prepared: Prepared, unbatched: bool) -> None:
    """Keep how ``call``, which was made of the arguments that ``seen`` was read from, is launched."""
    key, _ = seen
    if key[1] != call.precision or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        # torch's setting was changed meanwhile, or sizes are tensors that belong to a trace.
        return
    ready = _Ready(call, prepared, unbatched)
    with _lock:
        _entries[key] = ready
        while len(_entries) > _LIMIT:
            del _entries[next(iter(_entries))]


def forget() -> None:
    """Forget every call: the next one of each is planned anew."""
    with _lock:
        _entries.clear()


class _Ready:
    """The launches of a key, ready but for the slots."""

    __slots__ = ("behind", "device", "launches", "unbatched")

    def __init__(self, call: Call, prepared: Prepared, unbatched: bool) -> None:
        self.device = prepared.device.index
        self.unbatched = unbatched
        names = _slot_names(call)
        launches = prepared.program.launches
        places = {name: place for place, name in enumerate([*names, *(step.writes for step in launches)]) if name}
        #: What stands behind the slots of a call: places for what its launches write, or the address of weights that
        #: are packed already, then the constant bytes.
        self.behind: list[Any] = [0] * len(launches)
        self.launches: list[tuple[Any, ...]] = []
        for i, (step, kernel) in enumerate(zip(launches, prepared.kernels, strict=True)):
            if step.packs and call.frozen is not None:
                if step.grid:
                    self.behind[i] = call.frozen.packed(step, kernel, call.tensors()["weight"]).data_ptr()
                continue
            strides = torch.empty(step.shape, device="meta", memory_format=step.memory_format).stride()
            # Half the time of torch.empty(memory_format=…).
            allocate = functools.partial(
                torch.empty_strided, step.shape, strides, dtype=step.dtype, device=prepared.device
            )
            start = functools.partial(kernel.launch, step.blocks(prepared.multiprocessors), step.block)
            constants, pick, pack, maps = _arguments(step, places, len(names) + len(self.behind), self.device)
            self.behind += constants
            self.launches.append((allocate, places[step.writes], start if step.grid else None, pick, pack, maps))

    def run(self, slots: list[Any]) -> Tensor:
        """Allocate, launch, and return the output; ``slots`` is used up."""
        stream = launch.current_stream(self.device)
        slots += self.behind
        written: list[Tensor] = []
        launched = 0
        try:
            for allocate, place, start, pick, pack, maps in self.launches:
                out = allocate()
                # Held until the last launch: memory that is free would be handed out again.
                written.append(out)
                slots[place] = out.data_ptr()
                if start is None:
                    continue
                values = [*pick(slots)]
                for i, encode in maps:
                    values[i] = encode(values[i])
                start(pack(*values), stream)
                launched += 1
        finally:
            count_call(launched)
        y = written[-1]
        return y.squeeze(0) if self.unbatched else y


def _slot_names(call: Call) -> list[str | None]:
    """Which kernel argument each slot is for, in the order of :func:`read`; None for an argument that was None."""
    named = iter(call.tensors())
    given = (call.x, *(tensor for pair in zip(call.weights, call.biases, strict=True) for tensor in pair))
    names = [None if tensor is None else next(named) for tensor in given]
    for phase, chain in call.chains().items():
        for i, step in enumerate(chain):
            names += [common.operand_name(phase, i, name) for name, _ in step.operands]
    return names


def _arguments(
    step: KernelLaunch, places: dict[str, int], first: int, device: int
) -> tuple[list[bytes], _Pick, Callable[..., bytes], _Maps]:
    """The argument of one launch as constants, with holes between them that slots fill.

    Returns the constants, for the places from ``first`` on; what picks constants and slots in the order of the
    argument; what packs them; and for each tensor map where it is among them and what encodes it.
    """
    size = tensor_map.MAP_BYTES
    holes: list[tuple[int, int, str, str, Any]] = [
        *((offset, 8, "Q", name, None) for offset, name in step.pointers if name in places),
        *((offset, 4, "f", name, None) for offset, name in step.numbers),
        *((offset, size, f"{size}s", name, spec) for offset, name, spec in step.tensor_maps),
    ]
    constants: list[bytes] = []
    chosen, maps = [], []
    form = "<"
    start = 0
    for offset, width, code, name, spec in sorted(holes, key=itemgetter(0)):
        constants.append(step.arguments[start:offset])
        form += f"{offset - start}s{code}"
        chosen += [first + len(constants) - 1, places[name]]
        if spec is not None:
            encode = functools.partial(tensor_map.encode, spec, device=device)
            maps.append((len(chosen) - 1, functools.lru_cache(_MAPS)(encode)))
        start = offset + width
    constants.append(step.arguments[start:])
    chosen.append(first + len(constants) - 1)
    return constants, itemgetter(*chosen), struct.Struct(f"{form}{len(constants[-1])}s").pack, tuple(maps)
