"""The one argument of a generated kernel: a struct, its C text and its bytes.

A kernel takes one POD struct by value, so that a launch is one buffer of bytes with a few addresses patched
in, the same bytes for the GPU and for the emulator. :class:`Layout` computes offsets by the natural alignment
that both NVRTC and the host compiler use; the generated source asserts the size it arrived at.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: cuLaunchKernel takes at least this many bytes of parameters on every architecture.
MAX_ARGUMENT_BYTES = 4096


@dataclass(frozen=True)
class Field:
    """One member: ``kind`` is ``pointer``, ``index``, ``float``, ``divisor`` or ``tensor_map``.

    ``element`` is the C type a pointer points to; ``count`` > 1 makes an array. A tensor map is filled in at launch.
    """

    name: str
    kind: str
    element: str = ""
    count: int = 1


@dataclass(frozen=True)
class Layout:
    """Ordered fields with their offsets, for one width of Index."""

    fields: tuple[Field, ...]
    index_bits: int
    offsets: dict[str, int] = field(init=False, compare=False)
    size: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        offsets, at, widest = {}, 0, 1
        for member in self.fields:
            size, alignment = self._extent(member)
            at = -(-at // alignment) * alignment
            offsets[member.name] = at
            at += size * member.count
            widest = max(widest, alignment)
        object.__setattr__(self, "offsets", offsets)
        object.__setattr__(self, "size", -(-at // widest) * widest)
        if self.size > MAX_ARGUMENT_BYTES:
            raise ValueError(
                f"epilogue: the kernel would need {self.size} bytes of arguments: expected at most "
                f"{MAX_ARGUMENT_BYTES}; apply part of the chain after the call"
            )

    def _extent(self, member: Field) -> tuple[int, int]:
        if member.kind == "pointer":
            return 8, 8
        if member.kind == "float":
            return 4, 4
        if member.kind == "index":
            return self.index_bits // 8, self.index_bits // 8
        if member.kind == "divisor":
            return (12, 4) if self.index_bits == 32 else (8, 8)
        if member.kind == "tensor_map":
            return 128, 64
        raise ValueError(f"kind={member.kind!r}: expected pointer, index, float, divisor or tensor_map")

    def declarations(self) -> list[str]:
        """The members as C declarations, in order."""
        types = {"index": "Index", "float": "float", "divisor": "Divisor<Index>", "tensor_map": "TensorMap"}
        lines = []
        for member in self.fields:
            ctype = f"{member.element}*" if member.kind == "pointer" else types[member.kind]
            array = f"[{member.count}]" if member.count > 1 else ""
            lines.append(f"{ctype} {member.name}{array};")
        return lines

    def pack(self, values: Mapping[str, Any]) -> bytearray:
        """The struct's bytes; a field without a value is zero (a null pointer)."""
        data = bytearray(self.size)
        for member in self.fields:
            value = values.get(member.name)
            if value is not None:
                self.write(data, member, value)
        return data

    def write(self, data: bytearray, member: Field, value: Any) -> None:
        """Write one field; arrays take a sequence of ``count`` values."""
        at = self.offsets[member.name]
        if member.kind == "divisor":
            struct.pack_into("<3I" if self.index_bits == 32 else "<q", data, at, *divisor(value, self.index_bits))
            return
        code = {"pointer": "Q", "float": "f", "index": "i" if self.index_bits == 32 else "q"}[member.kind]
        numbers: Sequence[Any] = value if member.count > 1 else (value,)
        struct.pack_into(f"<{member.count}{code}", data, at, *numbers)


def divisor(value: int, index_bits: int) -> tuple[int, ...]:
    """The members of ``Divisor<Index>`` for a positive ``value`` (see templates/device/index.cuh)."""
    if index_bits == 64:
        return (value,)
    shift = (value - 1).bit_length()
    multiplier = (2**32 * (2**shift - value)) // value + 1
    return value, multiplier, shift
