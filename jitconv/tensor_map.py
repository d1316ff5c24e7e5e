"""Tensor maps: what a kernel's tensor copies (templates/device/tensor_copy.cuh) know of a tensor and of their boxes.

::

    TensorMap ─┬─ encode(address) ──► 128 bytes that only the GPU understands, by the driver
               └─ encode_for_emulator() ──► plain numbers for templates/host/tensor_copy.cpp

A map belongs to one address: it is made at launch, into the kernel's argument.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from dataclasses import dataclass
from typing import Any

from jitconv import launch

__all__ = ["ADDRESS_OFFSET", "MAP_BYTES", "TensorMap", "encode", "encode_for_emulator"]

#: Size of a map; it is aligned to half of that.
MAP_BYTES = 128
_ALIGNMENT = 64

#: Where an emulator's map holds its address: what fills in the pointers of an argument fills it in too.
ADDRESS_OFFSET = 8

# CUtensorMapDataType of cuda.h, and the bytes of an element.
_DTYPES = {"float16": (6, 2), "float32": (7, 4), "bfloat16": (9, 2)}
# Of cuda.h too: no interleave, no swizzle, whole cache lines of 128 bytes into L2, zeros outside of the tensor.
_INTERLEAVE_NONE = _SWIZZLE_NONE = _FILL_ZERO = 0
_L2_PROMOTION_128B = 2

# The driver's limits (cuTensorMapEncodeTiled).
_MAX_RANK = 5
_MAX_EXTENT = 2**32
_MAX_STRIDE = 2**40
_MAX_BOX = 256
_MAX_ELEMENT_STRIDE = 8

_COOKIE = 0x7FE1BA47E4504A9D


@dataclass(frozen=True)
class TensorMap:
    """A tensor of up to five axes, innermost first, and the box that one copy takes of it; all but the address.

    Attributes:
        dtype: "float32", "float16" or "bfloat16".
        extents: elements along each axis; the innermost axis is dense.
        strides: bytes from one element to the next along every axis but the innermost: multiples of 16, positive.
        box: elements that a copy spans along each axis, at most 256; along the innermost a multiple of 16 bytes.
        element_strides: of the box, every how many elements are taken along each axis; () is all of them. The innermost
            must be 1.
        swizzle: "none": shared memory holds the box densely, innermost axis first.

    Raises:
        ValueError: the hardware has no such map.
    """

    dtype: str
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...] = ()
    swizzle: str = "none"

    def __post_init__(self) -> None:
        rank = len(self.extents)
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype={self.dtype!r}: expected one of {', '.join(_DTYPES)}")
        if not 2 <= rank <= _MAX_RANK:
            raise ValueError(f"extents={self.extents}: expected 2 to {_MAX_RANK} axes; join or split some")
        if not self.element_strides:
            object.__setattr__(self, "element_strides", (1,) * rank)
        self._require("extents", rank, 1, _MAX_EXTENT)
        self._require("strides", rank - 1, 16, _MAX_STRIDE - 16, multiple_of=16)
        self._require("box", rank, 1, _MAX_BOX)
        self._require("element_strides", rank, 1, _MAX_ELEMENT_STRIDE)
        if self.element_strides[0] != 1:
            raise ValueError(f"element_strides={self.element_strides}: expected 1 along the innermost axis")
        if self.box[0] * self.element_bytes % 16:
            raise ValueError(
                f"box={self.box}: its innermost axis has {self.box[0] * self.element_bytes} bytes of {self.dtype}: "
                "expected a multiple of 16"
            )
        if self.swizzle != "none":
            raise ValueError(f"swizzle={self.swizzle!r}: expected 'none'; kernels here lay boxes out densely")

    def _require(self, name: str, count: int, least: int, most: int, multiple_of: int = 1) -> None:
        values = getattr(self, name)
        if len(values) != count:
            raise ValueError(f"{name}={values}: expected {count} for {len(self.extents)} axes")
        if not all(least <= value <= most and value % multiple_of == 0 for value in values):
            multiples = f"multiples of {multiple_of} " if multiple_of > 1 else ""
            raise ValueError(f"{name}={values}: expected {multiples}from {least} to {most}")

    @property
    def rank(self) -> int:
        """Number of axes."""
        return len(self.extents)

    @property
    def element_bytes(self) -> int:
        """Bytes of an element."""
        return _DTYPES[self.dtype][1]

    @property
    def box_extents(self) -> tuple[int, ...]:
        """Elements that a copy puts into shared memory along each axis."""
        return tuple(-(-span // step) for span, step in zip(self.box, self.element_strides, strict=True))

    @property
    def box_bytes(self) -> int:
        """Bytes of shared memory that a copy fills, and that count against its mbarrier: zeros too."""
        return functools.reduce(int.__mul__, self.box_extents) * self.element_bytes


@functools.lru_cache(maxsize=4096)
def encode(spec: TensorMap, address: int, device: int) -> bytes:
    """Return the map of the tensor at ``address`` on a GPU, given by its ordinal, as its copies take it.

    Raises:
        DriverNotFoundError: there is no driver or no GPU.
        DriverError: the driver refuses the map, or is too old to know of any.
        ValueError: ``address`` is not a multiple of 16.
    """
    _require_address(address)
    # The object that cuda-python would return the map in is not always aligned as the driver wants it; this one is.
    memory = ctypes.create_string_buffer(MAP_BYTES + _ALIGNMENT)
    target = -(-ctypes.addressof(memory) // _ALIGNMENT) * _ALIGNMENT
    rank = spec.rank
    launch.call_entry_point(
        "cuTensorMapEncodeTiled",
        (12, 0),
        device,
        _SIGNATURE,
        (
            target,
            _DTYPES[spec.dtype][0],
            rank,
            address,
            (ctypes.c_uint64 * rank)(*spec.extents),
            (ctypes.c_uint64 * (rank - 1))(*spec.strides),
            (ctypes.c_uint32 * rank)(*spec.box),
            (ctypes.c_uint32 * rank)(*spec.element_strides),
            _INTERLEAVE_NONE,
            _SWIZZLE_NONE,
            _L2_PROMOTION_128B,
            _FILL_ZERO,
        ),
        f"{spec}, address {address:#x}",
    )
    return ctypes.string_at(target, MAP_BYTES)


_SIGNATURE: tuple[Any, ...] = (
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
)


def encode_for_emulator(spec: TensorMap, address: int = 0) -> bytes:
    """Return the map as the emulator reads it (``Map`` in templates/host/tensor_copy.cpp).

    The address of an emulated buffer is known only to the program that runs the kernel, which writes it at
    ``ADDRESS_OFFSET``.
    """
    _require_address(address)
    padding = (0,) * (_MAX_RANK - spec.rank)
    ones = (1,) * (_MAX_RANK - spec.rank)
    data = struct.pack(
        "<2Q5Q4Q5H5BBB",
        _COOKIE,
        address,
        *spec.extents,
        *padding,
        *spec.strides,
        *padding,
        *spec.box,
        *ones,
        *spec.element_strides,
        *ones,
        spec.rank,
        spec.element_bytes,
    )
    return data.ljust(MAP_BYTES, b"\0")


def _require_address(address: int) -> None:
    if address % 16:
        raise ValueError(f"address={address:#x}: expected a multiple of 16; copy the tensor to an aligned one")
