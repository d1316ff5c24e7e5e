"""The Problem: everything that decides which kernel is right, and nothing else.

A :class:`Problem` is frozen and hashable. It knows channels, filters, strides and the structure of what
happens before, between and after the convolutions; it does not know batch, spatial extents, addresses or
numbers, because those are arguments of the kernel at run time (:data:`BAKED` and :data:`RUN_TIME` are the
whole table). One Problem therefore serves every image size, or, where small images want smaller tiles, every size of
a class (:func:`size_class`).

Nothing here knows CUDA, tiles or tensors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

#: Operators that the generator knows, as they appear in canonical JSON.
OPERATORS = ("conv", "conv_transpose", "depthwise_separable")

#: Element types of x, weight and output that have generated kernels.
DTYPES = ("float32", "float16", "bfloat16")

PADDING_MODES = ("zeros", "replicate", "reflect", "circular")

#: How float32 is multiplied: ``ieee`` with fp32's accuracy and range, ``tf32`` with operands rounded to TF32.
PRECISIONS = ("ieee", "tf32")

MEMORY_FORMATS = ("channels_first", "channels_last")

#: Constants of the generated source: a change of any of them is another kernel.
BAKED = (
    "operator",
    "in_channels",
    "out_channels",
    "kernel_size",
    "stride",
    "padding",
    "padding_mode",
    "dilation",
    "output_padding",
    "groups",
    "mid_channels",
    "dtype",
    "memory_format",
    "x_memory_format",
    "x_vector",
    "x_patches",
    "sizes",
    "precision",
    "index_bits",
    "bias",
    "mid_bias",
    "prologue",
    "between",
    "epilogue",
)

#: Arguments of the kernel: a change of any of them compiles nothing.
RUN_TIME = (
    "addresses of tensors",
    "batch N",
    "spatial extents of x and of the output",
    "strides of x, weight, output and epilogue tensors",
    "numbers in a chain (slopes, factors, bounds, eps)",
)

#: How a filter that never reads x twice finds its patches in memory (:class:`Problem`).
PATCHES = ("", "lines", "rows", "matrix")

#: Classes of an extent: at most 8, at most 16, and all others.
SIZE_CLASSES = (8, 16, 32)

_MAX_INT32 = 2**31 - 1

#: Steps without a pointwise expression: what a tile must own to apply them.
_NEEDS = {"layer_norm": "row", "avg_pool": "window", "max_pool": "window"}


@dataclass(frozen=True)
class OperandSpec:
    """What one operand of a step is, without its value.

    ``kind``: ``number`` (a Python number, a kernel argument), ``scalar`` (a one-element tensor, read on the
    device), ``channel`` (one value per channel), ``row`` (one value per position of the last axis),
    ``tensor`` (anything that broadcasts to the value), ``value`` (the convolution's own result).
    ``dtype`` is the element type of the tensor kinds, else None.
    """

    kind: str
    dtype: str | None = None

    def canonical(self) -> list[str | None]:
        """The spec as plain JSON values."""
        return [self.kind, self.dtype]


@dataclass(frozen=True)
class StepSpec:
    """The structure of one step of a chain: all of a step except numbers and addresses.

    ``attributes`` are baked (axis, window, mode); ``cuda`` is the CUDA expression, part of the identity so
    that a changed expression can never meet an old kernel.
    """

    name: str
    operands: tuple[tuple[str, OperandSpec], ...] = ()
    attributes: tuple[tuple[str, Any], ...] = ()
    cuda: str = ""
    preamble: str = ""

    @property
    def needs(self) -> str:
        """``element``, ``row`` or ``window``: what a tile must own to apply this step."""
        # A step with an expression of its own is pointwise, whatever its name.
        return "element" if self.cuda else _NEEDS[self.name]

    def attribute(self, name: str) -> Any:
        """Value of the baked attribute ``name``; KeyError when the step has none of that name."""
        return dict(self.attributes)[name]

    def canonical(self) -> dict[str, Any]:
        """The spec as plain JSON values."""
        return {
            "name": self.name,
            "operands": [[name, *spec.canonical()] for name, spec in self.operands],
            "attributes": {name: _plain(value) for name, value in self.attributes},
            "cuda": self.cuda,
            "preamble": self.preamble,
        }

    @staticmethod
    def from_canonical(data: Mapping[str, Any]) -> StepSpec:
        """The inverse of :meth:`canonical`."""
        return StepSpec(
            name=data["name"],
            operands=tuple((n, OperandSpec(kind, dtype)) for n, kind, dtype in data["operands"]),
            attributes=tuple((n, _frozen(v)) for n, v in sorted(data["attributes"].items())),
            cuda=data["cuda"],
            preamble=data["preamble"],
        )


@dataclass(frozen=True)
class Problem:
    """One convolution problem, up to sizes.

    Shapes: x ``[N, in_channels, *spatial]``; weight ``[out_channels, in_channels/groups, *kernel_size]``
    (conv), ``[in_channels, out_channels/groups, *kernel_size]`` (conv_transpose); for the
    depthwise-separable pair, depthwise ``[mid_channels, 1, *kernel_size]`` with ``groups == in_channels``
    and pointwise ``[out_channels, mid_channels, 1…]``. ``padding`` holds (before, after) per dimension.
    ``memory_format`` is the layout of the output; ``x_memory_format`` says which axis of x is dense in memory and
    decides only the order in which x is read (its strides are run-time values); ``x_vector``: x is made
    of aligned 16-byte vectors, of a position's channels (channels_last) or of a row (channels_first).
    ``x_patches`` says how the patches lie in memory that a filter reads whose outputs share no x: "matrix": each is
    dense, in the order of ``x_memory_format``, and they lie at a constant distance, all in whole aligned 16-byte
    vectors (a filter as large as x, or a pointwise one); "rows": so lies what a patch holds side by side, its columns,
    with their channels where x is channels_last; "lines": so lie lines of x along w, wherever the rows of patches start
    in them; "": none of these.
    ``index_bits`` is the width of element offsets. ``sizes`` are the classes of the output's last two extents.
    The prologue is what happens to x while it is staged: ``prologue`` steps, then padding.
    """

    operator: str
    in_channels: int
    out_channels: int
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    groups: int = 1
    mid_channels: int = 0
    padding_mode: str = "zeros"
    dtype: str = "float32"
    memory_format: str = "channels_first"
    x_memory_format: str = "channels_first"
    x_vector: bool = False
    x_patches: str = ""
    sizes: tuple[int, int] = (32, 32)
    precision: str = "ieee"
    index_bits: int = 32
    bias: bool = False
    mid_bias: bool = False
    prologue: tuple[StepSpec, ...] = ()
    between: tuple[StepSpec, ...] = ()
    epilogue: tuple[StepSpec, ...] = ()

    def __post_init__(self) -> None:
        _require(self.operator in OPERATORS, "operator", self.operator, f"one of {OPERATORS}")
        _require(1 <= self.rank <= 3, "kernel_size", self.kernel_size, "1 to 3 dimensions")
        for name in ("stride", "padding", "dilation", "output_padding"):
            value = getattr(self, name)
            _require(len(value) == self.rank, name, value, f"{self.rank} entries, as kernel_size has")
        _require(self.dtype in DTYPES, "dtype", self.dtype, f"one of {DTYPES}")
        _require(
            self.padding_mode in PADDING_MODES, "padding_mode", self.padding_mode, f"one of {PADDING_MODES}"
        )
        _require(
            self.memory_format in MEMORY_FORMATS,
            "memory_format",
            self.memory_format,
            f"one of {MEMORY_FORMATS}",
        )
        _require(self.precision in PRECISIONS, "precision", self.precision, f"one of {PRECISIONS}")
        _require(self.x_patches in PATCHES, "x_patches", self.x_patches, f"one of {PATCHES}")
        _require(self.index_bits in (32, 64), "index_bits", self.index_bits, "32 or 64")
        _require(all(size in SIZE_CLASSES for size in self.sizes), "sizes", self.sizes, f"two of {SIZE_CLASSES}")
        for name in ("in_channels", "out_channels", "groups"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        for name in ("in_channels", "out_channels"):
            divides = name == "out_channels" and self.operator == "depthwise_separable"
            _require(
                divides or getattr(self, name) % self.groups == 0,
                name,
                getattr(self, name),
                f"a multiple of groups={self.groups}",
            )

    @property
    def rank(self) -> int:
        """Number of spatial dimensions, 1 to 3."""
        return len(self.kernel_size)

    @property
    def taps(self) -> int:
        """Number of filter positions."""
        count = 1
        for k in self.kernel_size:
            count *= k
        return count

    @property
    def is_product(self) -> bool:
        """Whether outputs share no x, so that a convolution is a matrix product over all positions of all samples."""
        apart = all(
            k == 1 or stride >= (k - 1) * dilation + 1
            for k, stride, dilation in zip(self.kernel_size, self.stride, self.dilation, strict=True)
        )
        return self.operator == "conv" and apart and not self.prologue and not self.is_padded

    @property
    def is_padded(self) -> bool:
        """Whether x is padded along any dimension."""
        return any(before or after for before, after in self.padding)

    def convolution_extents(self, extents: Sequence[int]) -> tuple[int, ...]:
        """Spatial extents of the convolution's own output, before any pool, for input ``extents``.

        Source: the shape formulas on the pages of torch.nn.Conv3d and torch.nn.ConvTranspose3d.
        """
        out = []
        for i, extent in enumerate(extents):
            k, s, dil = self.kernel_size[i], self.stride[i], self.dilation[i]
            before, after = self.padding[i]
            if self.operator == "conv_transpose":
                out.append((extent - 1) * s - before - after + dil * (k - 1) + self.output_padding[i] + 1)
            else:
                out.append((extent + before + after - dil * (k - 1) - 1) // s + 1)
        return tuple(out)

    def canonical(self) -> dict[str, Any]:
        """The Problem as plain JSON values, the same for equal Problems in every process."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}

    @staticmethod
    def from_canonical(data: Mapping[str, Any]) -> Problem:
        """The inverse of :meth:`canonical`."""
        values = dict(data)
        for name in ("prologue", "between", "epilogue"):
            values[name] = tuple(StepSpec.from_canonical(step) for step in values[name])
        for name in ("kernel_size", "stride", "sizes", "padding", "dilation", "output_padding"):
            values[name] = _frozen(values[name])
        return Problem(**values)

    def digest(self) -> str:
        """SHA-256 of the canonical JSON, in hex: stable across processes, machines and versions of Python."""
        return hashlib.sha256(canonical_json(self.canonical()).encode()).hexdigest()

    def label(self) -> str:
        """A short name for people: ``conv3d_c32k64_k3_mish_tanh_float32``. Not unique."""
        kernel = self.kernel_size
        size = str(kernel[0]) if len(set(kernel)) == 1 else "x".join(map(str, kernel))
        parts = [f"{self.operator}{self.rank}d", f"c{self.in_channels}k{self.out_channels}", f"k{size}"]
        if any(s != 1 for s in self.stride):
            parts.append("s" + "x".join(map(str, dict.fromkeys(self.stride))))
        if self.groups > 1 and self.operator != "depthwise_separable":
            parts.append(f"g{self.groups}")
        parts += [step.name for step in self.between] + [step.name for step in self.epilogue]
        parts.append(self.dtype)
        if self.memory_format == "channels_last":
            parts.append("channels_last")
        return "_".join(parts)


def index_bits(*largest_offsets: int) -> int:
    """32 when every element offset (and one tile beyond it) fits a signed 32-bit integer, else 64."""
    # A tile may compute, without using it, an offset up to one tile past the end.
    margin = 1 << 16
    return 32 if all(offset + margin <= _MAX_INT32 for offset in largest_offsets) else 64


def size_class(extent: int) -> int:
    """The class of an extent of the output: the first of :data:`SIZE_CLASSES` that is not smaller, else the last."""
    return next((size for size in SIZE_CLASSES if extent <= size), SIZE_CLASSES[-1])


def canonical_json(data: Any) -> str:
    """JSON text with sorted keys and no free choice in it; refuses what JSON cannot hold (NaN, objects)."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=True)


def _plain(value: Any) -> Any:
    if isinstance(value, (StepSpec, OperandSpec)):
        return value.canonical()
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    # What cannot be hashed is refused, not ignored: a key must never miss something that matters.
    raise TypeError(f"a Problem cannot hold {value!r} of type {type(value).__name__}: expected plain values")


def _frozen(value: Any) -> Any:
    return tuple(_frozen(v) for v in value) if isinstance(value, (tuple, list)) else value


def _require(condition: bool, name: str, value: object, expected: str) -> None:
    if not condition:
        raise ValueError(f"{name}={value!r}: expected {expected}")
