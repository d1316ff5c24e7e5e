"""A public function and its arguments made into a checked Call, without running it.

Warming and inspection need what a call would generate, from tensors of any device, ``meta`` included.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jitconv.program import Call

__all__ = ["OPERATORS", "call_of", "name_of", "public_function"]

#: The public functions that generate kernels, by name.
OPERATORS = (
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "depthwise_separable_conv2d",
)

_CONVOLUTION = re.compile(r"conv(_transpose)?([123])d")


def public_function(name: str) -> Callable[..., Any]:
    """The public function called ``name``; ValueError when there is none that generates kernels."""
    if name not in OPERATORS:
        raise ValueError(f"operator={name!r}: expected one of {', '.join(OPERATORS)}")
    from jitconv import functional

    function: Callable[..., Any] = getattr(functional, name)
    return function


def name_of(function: Callable[..., Any]) -> str:
    """The name of a public function; TypeError when ``function`` is no public operator of jitconv."""
    from jitconv import functional

    name = getattr(function, "__name__", "")
    if name not in OPERATORS or getattr(functional, name) is not function:
        raise TypeError(
            f"function={function!r}: expected a public operator of jitconv "
            f"({', '.join(f'jitconv.{operator}' for operator in OPERATORS)})"
        )
    return name


def call_of(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Call:
    """The checked Call that ``function(*args, **kwargs)`` would run.

    Raises TypeError when ``function`` is no public operator of jitconv, and whatever the call itself raises.
    """
    from jitconv import functional

    name = name_of(function)
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    match = _CONVOLUTION.fullmatch(name)
    if match is None:
        return functional.separable_call(**bound.arguments)[0]
    transposed, rank = match.groups()
    return functional.convolution_call(
        function=name, rank=int(rank), transposed=transposed is not None, **bound.arguments
    )[0]
