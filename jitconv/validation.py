"""Arguments as torch.nn.functional takes them, checked and brought to one form.

Every check raises the exception type that torch raises for the same mistake on CPU, and its text names the
argument, its value, what was expected and, where one exists, the remedy. All of this happens before anything
is rendered, compiled or launched.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jitconv.problem import PADDING_MODES

Padding = str | int | Sequence[int | Sequence[int]]

_NAMES = ("depth", "height", "width")

_FLOATING = frozenset(
    (
        torch.float16, torch.bfloat16, torch.float32, torch.float64,
        torch.complex32, torch.complex64, torch.complex128,
    )
)  # fmt: skip
_INTEGERS = frozenset((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))

_INT64 = 2**63


@dataclass(frozen=True)
class Geometry:
    """Normalised parameters of one convolution: a tuple entry per spatial dimension.

    ``padding`` holds (before, after) per dimension.
    """

    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    groups: int
    padding_mode: str

    @property
    def rank(self) -> int:
        """Number of spatial dimensions, 1 to 3."""
        return len(self.kernel_size)


def check_tensor(function: str, name: str, value: Any) -> None:
    """TypeError unless ``value`` is a tensor with ordinary strides."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{function}(): {name}={value!r} (type {type(value).__name__}): expected a torch.Tensor")
    if value.layout != torch.strided:
        raise RuntimeError(
            f"{function}(): {name} has layout {value.layout}: expected torch.strided; use {name}.to_dense()"
        )
    if value.is_nested:
        raise NotImplementedError(
            f"{function}(): {name} is a nested tensor: expected one of one shape; use {name}.to_padded_tensor()"
        )


def check_like(function: str, x: Tensor, name: str, value: Tensor, x_name: str = "input") -> None:
    """RuntimeError unless ``value`` has the dtype and device of x, as torch's convolutions demand."""
    if value.dtype != x.dtype:
        raise RuntimeError(
            f"{function}(): {name} has dtype {value.dtype} and {x_name} has {x.dtype}: expected the same dtype; "
            f"convert one with .to({x.dtype})"
        )
    if value.device != x.device:
        raise RuntimeError(
            f"{function}(): {name} is on {value.device} and {x_name} on {x.device}: expected the same device; "
            f"move one with .to('{x.device}')"
        )


def check_dtype(function: str, x: Tensor, name: str = "input", *, transposed: bool) -> None:
    """NotImplementedError unless torch convolves the dtype of x: floating point, complex, on CPU some integers."""
    if x.dtype in _FLOATING:
        return
    if x.dtype in _INTEGERS and not transposed and x.device.type != "cuda":
        return
    raise NotImplementedError(
        f"{function}(): {name} has dtype {x.dtype}: expected float32, float16, bfloat16, float64 or a complex "
        "dtype; convert it with .to(torch.float32)"
    )


def check_fusible(function: str, x: Tensor, argument: str, chain: Sequence[object]) -> None:
    """NotImplementedError for a chain on integers: it is computed in floating point, which they cannot hold."""
    if chain and x.dtype not in _FLOATING:
        raise NotImplementedError(
            f"{function}(): {argument}={list(chain)} on an input of dtype {x.dtype}: expected a floating-point "
            "dtype; convert the tensors with .to(torch.float32)"
        )


def batched(function: str, x: Tensor, rank: int, name: str = "input") -> tuple[Tensor, bool]:
    """x with a batch axis, and whether it had one. RuntimeError for any other rank."""
    if x.dim() == rank + 2:
        return x, True
    if x.dim() == rank + 1:
        return x.unsqueeze(0), False
    raise RuntimeError(
        f"{function}(): {name} has shape {tuple(x.shape)}: expected {rank + 1}D (unbatched) or {rank + 2}D "
        f"(batched) input, [N, C, {', '.join(('D', 'H', 'W')[3 - rank :])}]"
    )


def tuple_of_ints(function: str, name: str, value: Any, rank: int) -> tuple[int, ...]:
    """An int or a sequence of 1 or ``rank`` ints as a tuple of ``rank`` ints."""
    values = tuple(value) if isinstance(value, (tuple, list, torch.Size)) else (value,)
    ints = tuple(_index(function, name, v, value) for v in values)
    if len(ints) == 1:
        ints = ints * rank
    if len(ints) != rank:
        raise RuntimeError(
            f"{function}(): {name}={value!r}: expected a single int or {rank} ints, one per spatial dimension"
        )
    return ints


def _index(function: str, name: str, value: Any, whole: Any) -> int:
    """``value``, which is ``whole`` or an entry of it, as an int; bools and what int64 cannot hold are refused."""
    expected = "an int" if name == "groups" else "an int or a tuple of ints"
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{function}(): {name}={whole!r} (type {type(value).__name__}): expected {expected}")
    if not -_INT64 <= number < _INT64:
        # torch raises ValueError for an int and TypeError for an entry of a tuple.
        error = ValueError if value is whole else TypeError
        raise error(f"{function}(): {name}={whole!r}: expected {expected} of at most 64 bits")
    return number


def _at_least(function: str, name: str, values: Sequence[int], least: int) -> None:
    if any(v < least for v in values):
        sign = "positive" if least == 1 else "non-negative"
        raise RuntimeError(f"{function}(): {name}={tuple(values)}: expected {sign} ints")


def geometry(
    function: str,
    x: Tensor,
    weight: Tensor,
    *,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: Any,
    padding_mode: str = "zeros",
    output_padding: Any = 0,
    transposed: bool = False,
    weight_name: str = "weight",
) -> Geometry:
    """Check stride … groups against batched x ``[N, C, *]`` and weight, and normalise them.

    ``padding`` may be an int, a tuple with an int or a (before, after) pair per dimension, ``'valid'`` or
    ``'same'``.
    """
    rank = x.dim() - 2
    if weight.dim() != rank + 2:
        order = "in_channels, out_channels/groups" if transposed else "out_channels, in_channels/groups"
        raise RuntimeError(
            f"{function}(): {weight_name} has shape {tuple(weight.shape)}: expected {rank + 2} dimensions, "
            f"[{order}, *kernel_size]"
        )
    kernel = tuple(weight.shape[2:])
    strides = tuple_of_ints(function, "stride", stride, rank)
    dilations = tuple_of_ints(function, "dilation", dilation, rank)
    outputs = tuple_of_ints(function, "output_padding", output_padding, rank)
    count = _index(function, "groups", groups, groups)
    _at_least(function, "stride", strides, 1)
    _at_least(function, "dilation", dilations, 1)
    _at_least(function, "output_padding", outputs, 0)
    if count < 1:
        raise RuntimeError(f"{function}(): groups={count}: expected a positive int")
    if any(k < 1 for k in kernel):
        raise RuntimeError(
            f"{function}(): {weight_name} has shape {tuple(weight.shape)}: expected a kernel of at least one element "
            "per dimension"
        )
    if padding_mode not in PADDING_MODES:
        raise ValueError(f"{function}(): padding_mode={padding_mode!r}: expected one of {PADDING_MODES}")
    pads = _padding(function, padding, kernel, strides, dilations, transposed)
    return Geometry(kernel, strides, pads, dilations, outputs, count, padding_mode)


def _padding(
    function: str,
    padding: Any,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    transposed: bool,
) -> tuple[tuple[int, int], ...]:
    rank = len(kernel)
    if isinstance(padding, str):
        if transposed:
            raise TypeError(
                f"{function}(): padding={padding!r}: a transposed convolution takes ints; expected an int or "
                f"{rank} ints"
            )
        if padding == "valid":
            return ((0, 0),) * rank
        if padding != "same":
            raise RuntimeError(f"{function}(): padding={padding!r}: expected 'same', 'valid', an int or a tuple")
        if any(s != 1 for s in stride):
            raise RuntimeError(
                f"{function}(): padding='same' with stride={stride}: not defined for strided convolutions; "
                "give the padding as numbers"
            )
        totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    values = tuple(padding) if isinstance(padding, (tuple, list, torch.Size)) else (padding,)
    if not transposed and any(isinstance(v, (tuple, list)) for v in values):
        pads = _pairs(function, padding, values, rank)
    else:
        pads = tuple((p, p) for p in tuple_of_ints(function, "padding", padding, rank))
    if any(p < 0 for pair in pads for p in pair):
        raise RuntimeError(
            f"{function}(): padding={padding!r}: negative padding is not supported; slice the input instead"
        )
    return pads


def _pairs(function: str, padding: Any, values: tuple[Any, ...], rank: int) -> tuple[tuple[int, int], ...]:
    """Padding per side: an int or (before, after) for each dimension, e.g. causal in time ((2, 0), 1, 1)."""
    if len(values) == 1:
        values = values * rank
    if len(values) != rank or any(isinstance(v, (tuple, list)) and len(v) != 2 for v in values):
        # TypeError, as torch raises for any nested sequence.
        raise TypeError(
            f"{function}(): padding={padding!r}: expected {rank} entries, each an int or a (before, after) pair"
        )
    pairs = [tuple(v) if isinstance(v, (tuple, list)) else (v, v) for v in values]
    return tuple(
        (_index(function, "padding", a, padding), _index(function, "padding", b, padding)) for a, b in pairs
    )


def check_convolution(
    function: str, x: Tensor, weight: Tensor, bias: Tensor | None, g: Geometry, transposed: bool
) -> None:
    """Channels, bias and extents of batched x against weight; RuntimeError as torch raises."""
    shape, channels = tuple(weight.shape), x.shape[1]
    if transposed:
        if shape[0] != channels:
            raise RuntimeError(
                f"{function}(): weight has shape {shape}, so input must have {shape[0]} channels, but input has "
                f"shape {tuple(x.shape)} with {channels} channels"
            )
        _divides(function, "input channels", channels, g.groups)
        out_channels = shape[1] * g.groups
    else:
        if shape[1] * g.groups != channels:
            raise RuntimeError(
                f"{function}(): weight has shape {shape} and groups={g.groups}, so input must have "
                f"{shape[1] * g.groups} channels, but input has shape {tuple(x.shape)} with {channels} channels"
            )
        _divides(function, "weight.shape[0]", shape[0], g.groups)
        out_channels = shape[0]
    if out_channels < 1:
        raise RuntimeError(f"{function}(): weight has shape {shape}: expected at least one output channel")
    check_bias(function, "bias", bias, out_channels)
    check_extents(function, x, g, transposed)


def _divides(function: str, name: str, value: int, groups: int) -> None:
    if value % groups != 0:
        raise RuntimeError(f"{function}(): {name} is {value} and groups={groups}: expected groups to divide it")


def check_bias(function: str, name: str, bias: Tensor | None, channels: int) -> None:
    """RuntimeError unless ``bias`` is None or has one value per output channel."""
    if bias is not None and tuple(bias.shape) != (channels,):
        raise RuntimeError(
            f"{function}(): {name} has shape {tuple(bias.shape)}: expected ({channels},), one value per output channel"
        )


def check_extents(function: str, x: Tensor, g: Geometry, transposed: bool, x_name: str = "input") -> None:
    """Spatial extents against kernel, padding mode and output_padding."""
    for i, extent in enumerate(x.shape[2:]):
        name = _NAMES[3 - g.rank + i]
        before, after = g.padding[i]
        if extent == 0 and (g.padding_mode != "zeros" or x.shape[0] * x.shape[1] > 0):
            raise RuntimeError(
                f"{function}(): {x_name} has shape {tuple(x.shape)}: expected a {name} of at least 1"
            )
        if transposed:
            _check_transposed_extent(function, g, i, extent, name)
            continue
        need = g.dilation[i] * (g.kernel_size[i] - 1) + 1
        if extent + before + after < need:
            raise RuntimeError(
                f"{function}(): {x_name} {name} {extent} padded by {(before, after)} is {extent + before + after}: "
                f"expected at least {need} = dilation*(kernel-1)+1 for kernel {g.kernel_size[i]}, "
                f"dilation {g.dilation[i]}"
            )
        limit = {"reflect": extent - 1, "circular": extent}.get(g.padding_mode)
        if limit is not None and max(before, after) > limit:
            raise RuntimeError(
                f"{function}(): padding {(before, after)} of the {name} with padding_mode={g.padding_mode!r}: "
                f"expected at most {limit} for an {x_name} {name} of {extent}"
            )


def _check_transposed_extent(function: str, g: Geometry, i: int, extent: int, name: str) -> None:
    if g.output_padding[i] >= max(g.stride[i], g.dilation[i]):
        raise RuntimeError(
            f"{function}(): output_padding={g.output_padding}: expected each smaller than stride {g.stride} or "
            f"dilation {g.dilation} of its dimension"
        )
    before, after = g.padding[i]
    out = (extent - 1) * g.stride[i] - before - after
    out += g.dilation[i] * (g.kernel_size[i] - 1) + g.output_padding[i] + 1
    if out < 0:
        raise RuntimeError(
            f"{function}(): the output {name} would be {out} for input {name} {extent}, kernel "
            f"{g.kernel_size[i]}, stride {g.stride[i]}, padding {g.padding[i]}: expected at least 0; use less padding"
        )


def check_separable(
    function: str,
    x: Tensor,
    dw_weight: Tensor,
    pw_weight: Tensor,
    dw_bias: Tensor | None,
    pw_bias: Tensor | None,
) -> None:
    """Shapes of a depthwise-separable pair: [C·m, 1, kH, kW] and [K, C·m, 1, 1]."""
    channels, dw, pw = x.shape[1], tuple(dw_weight.shape), tuple(pw_weight.shape)
    if len(dw) != 4 or dw[1] != 1 or channels == 0 or dw[0] % channels != 0 or dw[0] == 0:
        raise RuntimeError(
            f"{function}(): dw_weight has shape {dw}: expected [{channels}*m, 1, kH, kW] for x of shape "
            f"{tuple(x.shape)}, m the channel multiplier"
        )
    if len(pw) != 4 or pw[1:] != (dw[0], 1, 1) or pw[0] == 0:
        raise RuntimeError(
            f"{function}(): pw_weight has shape {pw}: expected [K, {dw[0]}, 1, 1], as dw_weight of shape {dw} says"
        )
    check_bias(function, "dw_bias", dw_bias, dw[0])
    check_bias(function, "pw_bias", pw_bias, pw[0])
