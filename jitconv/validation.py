"""Arguments as torch.nn.functional takes them, checked and brought to one form.

Every check raises the exception type that torch raises for the same mistake on CPU, and its text names the
argument, its value, what was expected and, where one exists, the remedy. All of this happens before anything
is rendered, compiled or launched.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Union

import torch
from torch import Tensor

from jitconv.problem import PADDING_MODES

Padding = Union[str, int, Sequence[Union[int, Sequence[int]]]]

_NAMES = ("depth", "height", "width")


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
        return len(self.kernel_size)


def check_tensor(function: str, name: str, value: Any) -> None:
    """TypeError unless ``value`` is a tensor with ordinary strides."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{function}(): {name}={value!r} (type {type(value).__name__}): expected a torch.Tensor")
    if value.layout != torch.strided:
        raise RuntimeError(
            f"{function}(): {name} has layout {value.layout}: expected torch.strided; use {name}.to_dense()"
        )


def check_like(function: str, x: Tensor, name: str, value: Tensor) -> None:
    """RuntimeError unless ``value`` has the dtype and device of x, as torch's convolutions demand."""
    if value.dtype != x.dtype:
        raise RuntimeError(
            f"{function}(): {name} has dtype {value.dtype} and input has {x.dtype}: expected the same dtype; "
            f"convert one with .to({x.dtype})"
        )
    if value.device != x.device:
        raise RuntimeError(
            f"{function}(): {name} is on {value.device} and input on {x.device}: expected the same device; "
            f"move one with .to('{x.device}')"
        )


def check_dtype(function: str, x: Tensor) -> None:
    """torch convolves floating-point and complex tensors (and integers on CPU only, which fuse with nothing)."""
    if not (x.is_floating_point() or x.is_complex()):
        raise NotImplementedError(
            f"{function}(): input has dtype {x.dtype}: expected float32, float16, bfloat16, float64 or a complex "
            "dtype; convert it with .to(torch.float32)"
        )


def batched(function: str, x: Tensor, rank: int) -> tuple[Tensor, bool]:
    """x with a batch axis, and whether it had one. RuntimeError for any other rank."""
    if x.dim() == rank + 2:
        return x, True
    if x.dim() == rank + 1:
        return x.unsqueeze(0), False
    raise RuntimeError(
        f"{function}(): input has shape {tuple(x.shape)}: expected {rank + 1}D (unbatched) or {rank + 2}D "
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
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"{function}(): {name}={whole!r} (type {type(value).__name__}): expected an int or a tuple of ints"
        ) from None


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
) -> Geometry:
    """Check stride … groups against batched x ``[N, C, *]`` and weight, and normalise them.

    ``padding`` may be an int, a tuple with an int or a (before, after) pair per dimension, ``'valid'`` or
    ``'same'``.
    """
    rank = x.dim() - 2
    if weight.dim() != rank + 2:
        order = "in_channels, out_channels/groups" if transposed else "out_channels, in_channels/groups"
        raise RuntimeError(
            f"{function}(): weight has shape {tuple(weight.shape)}: expected {rank + 2} dimensions, "
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
            f"{function}(): weight has shape {tuple(weight.shape)}: expected a kernel of at least one element "
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
        totals = [d * (k - 1) for d, k in zip(dilation, kernel)]
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
        raise RuntimeError(
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
    if bias is not None and tuple(bias.shape) != (channels,):
        raise RuntimeError(
            f"{function}(): {name} has shape {tuple(bias.shape)}: expected ({channels},), one value per output channel"
        )


def check_extents(function: str, x: Tensor, g: Geometry, transposed: bool) -> None:
    """Spatial extents against kernel, padding mode and output_padding."""
    for i, extent in enumerate(x.shape[2:]):
        name = _NAMES[3 - g.rank + i]
        before, after = g.padding[i]
        if extent == 0:
            raise RuntimeError(
                f"{function}(): input has shape {tuple(x.shape)}: expected a {name} of at least 1 "
                "(only the batch may be empty)"
            )
        if transposed:
            _check_transposed_extent(function, g, i, extent, name)
            continue
        need = g.dilation[i] * (g.kernel_size[i] - 1) + 1
        if extent + before + after < need:
            raise RuntimeError(
                f"{function}(): input {name} {extent} padded by {(before, after)} is {extent + before + after}: "
                f"expected at least {need} = dilation*(kernel-1)+1 for kernel {g.kernel_size[i]}, "
                f"dilation {g.dilation[i]}"
            )
        limit = {"reflect": extent - 1, "circular": extent}.get(g.padding_mode)
        if limit is not None and max(before, after) > limit:
            raise RuntimeError(
                f"{function}(): padding {(before, after)} of the {name} with padding_mode={g.padding_mode!r}: "
                f"expected at most {limit} for an input {name} of {extent}"
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
    if out < 1:
        raise RuntimeError(
            f"{function}(): the output {name} would be {out} for input {name} {extent}, kernel "
            f"{g.kernel_size[i]}, stride {g.stride[i]}, padding {g.padding[i]}: expected at least 1; use less padding"
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
