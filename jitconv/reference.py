"""The same operators in plain torch: oracle of the tests, CPU path, path of float64 and complex, and backward.

Semantics are those of the generated kernels: float16 and bfloat16 are computed in float32 and rounded once, at
the end; other dtypes are computed in their own precision.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from jitconv import epilogue as E
from jitconv.validation import Geometry

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CONV_TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
_PAD_MODE = {"zeros": "constant", "replicate": "replicate", "reflect": "reflect", "circular": "circular"}


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for the 16-bit types, else the dtype itself."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, g: Geometry) -> Tensor:
    """``[N, C, *]`` → ``[N, K, *]``, padded per side and by any padding mode."""
    padding = [before for before, _ in g.padding]
    if g.padding_mode != "zeros" or any(before != after for before, after in g.padding):
        sides = [side for pair in reversed(g.padding) for side in pair]
        x = F.pad(x, sides, mode=_PAD_MODE[g.padding_mode])
        padding = [0] * g.rank
    return _CONV[g.rank](
        x, weight, bias, stride=g.stride, padding=padding, dilation=g.dilation, groups=g.groups
    )


def conv_transpose(x: Tensor, weight: Tensor, bias: Tensor | None, g: Geometry) -> Tensor:
    """``[N, C, *]`` → ``[N, K, *]``."""
    return _CONV_TRANSPOSE[g.rank](
        x,
        weight,
        bias,
        stride=g.stride,
        padding=[before for before, _ in g.padding],
        output_padding=g.output_padding,
        groups=g.groups,
        dilation=g.dilation,
    )


def run(
    operator: str,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    g: Geometry,
    *,
    between: Sequence[E.Step] = (),
    epilogue: Sequence[E.Step] = (),
    prologue: Sequence[E.Step] = (),
    memory_format: torch.memory_format = torch.contiguous_format,
) -> Tensor:
    """The whole operator on batched ``x``; ``weights`` and ``biases`` in order of use. Differentiable.

    Returns a tensor of the dtype of ``x`` in ``memory_format``.
    """
    dtype = compute_dtype(x.dtype)
    v = E.reference(prologue, x.to(dtype))
    first, first_bias = weights[0].to(dtype), _cast(biases[0], dtype)
    if operator == "conv_transpose":
        v = conv_transpose(v, first, first_bias, g)
    else:
        v = convolution(v, first, first_bias, g)
    if operator == "depthwise_separable":
        v = E.reference(between, v)
        v = _CONV[g.rank](v, weights[1].to(dtype), _cast(biases[1], dtype))
    v = E.reference(epilogue, v)
    return v.to(x.dtype).contiguous(memory_format=memory_format)


def _cast(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if bias is None else bias.to(dtype)
