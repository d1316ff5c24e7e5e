"""Fused convolution kernels for PyTorch, generated, compiled and cached for the shapes they meet.

The public functions follow their ``torch.nn.functional`` namesakes and add ``epilogue=`` and
``precision=``::

    import jitconv
    from jitconv import epilogue as E

    y = jitconv.conv3d(x, w, b, padding=1, epilogue=[E.mish(), E.tanh()])

Importing jitconv imports neither torch nor any CUDA library: each name loads what it needs when it
is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from jitconv._version import __version__

# A function that shares its module's name is imported here, not looked up lazily: importing a
# submodule rebinds that name in the package, and it happens once, so whoever imported the module
# first would decide whether `jitconv.stats` can be called.
from jitconv.inspect import inspect
from jitconv.stats import reset_stats, stats
from jitconv.tune import tune

if TYPE_CHECKING:
    from jitconv import epilogue, errors
    from jitconv.functional import (
        conv1d,
        conv2d,
        conv3d,
        conv_transpose1d,
        conv_transpose2d,
        conv_transpose3d,
        depthwise_separable_conv2d,
    )
    from jitconv.prepared import PreparedOperator, prepare

__all__ = [
    "PreparedOperator",
    "__version__",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "depthwise_separable_conv2d",
    "epilogue",
    "errors",
    "inspect",
    "prepare",
    "reset_stats",
    "stats",
    "tune",
]

# Public name -> module that defines it; a name mapped to itself is that module.
_LAZY = {
    "PreparedOperator": "prepared",
    "conv1d": "functional",
    "conv2d": "functional",
    "conv3d": "functional",
    "conv_transpose1d": "functional",
    "conv_transpose2d": "functional",
    "conv_transpose3d": "functional",
    "depthwise_separable_conv2d": "functional",
    "epilogue": "epilogue",
    "errors": "errors",
    "prepare": "prepared",
}


def __getattr__(name: str) -> object:
    """Import what ``name`` needs at its first use (PEP 562) and keep it."""
    home = _LAZY.get(name)
    if home is None:
        raise AttributeError(f"module 'jitconv' has no attribute {name!r}")
    module = importlib.import_module(f"jitconv.{home}")
    value = module if name == home else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
