"""Which precision a call without ``precision=`` has: that of torch's own convolutions at the same moment.

torch multiplies float32 convolutions in TF32 where ``torch.backends.cudnn.conv.fp32_precision`` says ``"tf32"`` (its
default), and in fp32 at every other value: ``"ieee"``, and ``"none"``, which is what ``allow_tf32 = False`` and
``cudnn.flags(allow_tf32=False)`` leave behind (at::Context::allowTF32CuDNN, asked for the convolution). Convolutions
that were set to ``"none"`` (with newer versions also those never set) inherit ``torch.backends.cudnn.fp32_precision``,
and behind it ``torch.backends.fp32_precision``: what is read here is the outcome.

The setting of the convolution alone is always defined. ``allow_tf32`` and ``cudnn.flags()`` are not: torch raises when
they are read while convolutions and RNNs differ.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from jitconv.problem import PRECISIONS

__all__ = ["resolved", "torchs"]


def _property(backend: str, operator: str) -> str:
    return str(torch.backends.cudnn.conv.fp32_precision)  # type: ignore[attr-defined]  # set up in a way mypy misses


#: The function behind the property: 0.2 µs a call instead of 1 µs, and every call asks.
_read: Callable[[str, str], str] = getattr(torch._C, "_get_fp32_precision_getter", _property)


def torchs() -> str:
    """The precision of torch's own float32 convolutions now: ``"tf32"`` or ``"ieee"``."""
    return "tf32" if _read("cuda", "conv") == "tf32" else "ieee"


def resolved(function: str, precision: str | None) -> str:
    """The precision that ``function(precision=…)`` asks for; ValueError for a name that is none."""
    if precision is None:
        return torchs()
    if precision not in PRECISIONS:
        raise ValueError(
            f"{function}(): precision={precision!r}: expected None (torch's setting for convolutions) or one of "
            f"{PRECISIONS}"
        )
    return precision
