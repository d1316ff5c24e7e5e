"""An operator bound to its weights: ``op = prepare(conv3d, weight, bias, …)``, then ``op(x)`` for any size of x.

::

    op(x) ─┬─ weights free ───► the public function
           └─ weights frozen ─► known? ──yes──► output, argument bytes, launches: without packing the weights
                                  │ no
                                  └► checks, Call on the copies of the weights, then as the public function does
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from jitconv import calls, fast_path, functional, validation
from jitconv import epilogue as E
from jitconv.frozen import FrozenWeights
from jitconv.precision import resolved
from jitconv.program import Call

__all__ = ["PreparedOperator", "prepare"]

#: Arguments that are weights and biases, in the order of use.
_CONVOLUTION = ("weight", "bias")
_SEPARABLE = ("dw_weight", "dw_bias", "pw_weight", "pw_bias")

_CHAINS = ("between", "epilogue")

#: Largest extent of an input that parameters are checked with: a tensor without memory has limits too.
_LARGEST_STAND_IN = 1 << 15

#: Numbers of operators with frozen weights, never given twice: a remembered call of one must not serve another.
_numbers = itertools.count()


def prepare(
    function: Callable[..., Tensor], /, *tensors: Tensor | None, freeze_weights: bool = False, **options: Any
) -> PreparedOperator:
    """Bind a public function to all of its arguments but the input.

    Args:
        function: ``jitconv.conv1d`` … ``conv_transpose3d`` or ``depthwise_separable_conv2d``.
        tensors, options: its arguments without the first one, as the function takes them. Lists are copied; tensors
            are kept as they are, and read at each call.
        freeze_weights: copy weights and biases now and use the copies. Convolutions on tensor cores then lay them out
            once for each tile (and for channels_last and other inputs, 16-byte aligned or not, and precision, where
            tiles differ), not at each call. For inference.

    Returns:
        What ``op(x)`` is called on, with ``x`` of any batch and spatial size, in any memory format, batched or not.

    With frozen weights:
        - A change of the weight or bias, in whatever way, is not seen, on no device, until ``op.refresh()`` reads them
          again. Tensors in a chain are read at each call, frozen or not.
        - The tensors that were given are not kept alive: the memory taken is a copy of them, and one packed layout for
          each packing kernel that calls have needed (``op.frozen_bytes``).
        - Weights are constants: while gradients are enabled, a call raises RuntimeError if a weight or bias requires
          one. Gradients of x and of tensors in a chain flow.
        - x must have the dtype and be on the device of the weights at the time of ``prepare``.
        - A call may be captured in a CUDA graph if one of the same shape has run before; else it raises
          KernelNotWarmedError. The graph reads the operator's memory: keep the operator as long as the graph. After
          ``refresh()`` its replays use the new weights.
        - Any thread and any stream may call. An operator must outlive work on other streams than the one that it was
          first called on, as any tensor must.

    Raises:
        TypeError: ``function`` is no public operator, or does not take these arguments.
        RuntimeError, ValueError, NotImplementedError: what the function raises for the same mistake, as far as it shows
            without an input; ``freeze_weights`` while a CUDA graph is being captured.

    >>> import torch, jitconv
    >>> from jitconv import epilogue as E
    >>> w, b = torch.randn(8, 3, 3, 3), torch.randn(8)
    >>> op = jitconv.prepare(jitconv.conv2d, w, b, padding=1, epilogue=[E.silu()], freeze_weights=True)
    >>> [tuple(op(torch.randn(n, 3, h, 20)).shape) for n, h in ((1, 10), (4, 30))]
    [(1, 8, 10, 20), (4, 8, 30, 20)]
    """
    name = calls.name_of(function)
    if type(freeze_weights) is not bool:
        raise TypeError(f"prepare({name}): freeze_weights={freeze_weights!r}: expected True or False")
    signature = inspect.signature(function)
    first, *names = signature.parameters
    try:
        bound = signature.bind(None, *tensors, **options)
    except TypeError as error:
        raise TypeError(
            f"prepare({name}): {error}: expected the arguments of jitconv.{name} without {first}: {', '.join(names)}"
        ) from None
    bound.apply_defaults()
    given = dict(bound.arguments)
    del given[first]
    arguments = _checked(name, given)
    return PreparedOperator(function, arguments, freeze_weights)


class PreparedOperator:
    """A public function bound to its weights, biases, parameters and chains; made by :func:`prepare`.

    Attributes:
        function: name of the public function.
        freeze_weights: whether the weights are frozen.
    """

    def __init__(self, function: Callable[..., Tensor], arguments: dict[str, Any], freeze_weights: bool) -> None:
        self.function: str = function.__name__
        self.freeze_weights = freeze_weights
        self._public = function
        self._arguments = arguments
        self._frozen: FrozenWeights | None = None
        if freeze_weights:
            named = {name: arguments[name] for name in _weights_of(arguments) if arguments[name] is not None}
            self._frozen = FrozenWeights(self.function, named)
            self._arguments = {**arguments, **self._frozen.copies}
            # What fast_path reads, in its order.
            others = {name: v for name, v in arguments.items() if name not in _weights_of(arguments)}
            self._number = next(_numbers)
            self._tensors = tuple(self._arguments[name] for name in _weights_of(arguments))
            self._precision = others.pop("precision")
            self._chains = tuple(others.pop(name) for name in _CHAINS if name in others)
            self._parameters = tuple(others.values())

    def __call__(self, x: Tensor) -> Tensor:
        """The function of ``x`` and of what is bound.

        Raises what the function raises for the same mistake, and what :func:`prepare` says of frozen weights.
        """
        if self._frozen is None:
            return self._public(x, **self._arguments)
        if torch.compiler.is_dynamo_compiling():
            return functional._untraced(self._run)(x)
        return self._run(x)

    def refresh(self) -> None:
        """Read frozen weights and biases again: copy and pack them as they are now. Without frozen ones do nothing.

        Waits for all work on the device; meanwhile no other thread may call the operator, and no CUDA graph may be
        captured. Packed weights stay where they are: graphs that were captured use the new ones.

        Raises:
            RuntimeError: a tensor that was given to ``prepare`` does not exist any more, or has another shape, dtype
                or device; or a CUDA graph is being captured. The weights are then what they were.
        """
        if self._frozen is not None:
            self._frozen.refresh()

    @property
    def frozen_bytes(self) -> int:
        """Memory of the copied and the packed weights so far, in bytes; 0 without frozen ones."""
        return 0 if self._frozen is None else self._frozen.nbytes

    def call(self, x: Tensor) -> Call:
        """The checked Call that ``self(x)`` would run."""
        if self._frozen is not None:
            self._check_like(x)
        call = calls.call_of(self._public, x, **self._arguments)
        return replace(call, frozen=self._frozen)

    def __repr__(self) -> str:
        weight = self._arguments[_weights_of(self._arguments)[0]]
        frozen = f", frozen, packed {self._frozen.packings} times" if self._frozen is not None else ""
        return f"<jitconv.{self.function} with weight {list(weight.shape)}, {weight.dtype}, {weight.device}{frozen}>"

    def _run(self, x: Tensor) -> Tensor:
        self._refuse_gradients()
        seen = fast_path.read(self._number, (x, *self._tensors), self._parameters, self._chains, self._precision)
        out = fast_path.run(seen)
        if out is None:
            call = self.call(x)
            out = functional._apply(call, call.x.dim() > x.dim(), seen)
        return out

    def _refuse_gradients(self) -> None:
        """RuntimeError where a gradient of a frozen tensor could be asked for: there would be none."""
        assert self._frozen is not None
        if torch.is_grad_enabled():
            trainable = self._frozen.trainable()
            if trainable is not None:
                raise RuntimeError(
                    f"prepared {self.function}: {trainable} requires a gradient, and the weights of this operator are "
                    "frozen (freeze_weights=True): call it under torch.no_grad(), or "
                    f"{trainable}.requires_grad_(False) first"
                )
        if forward_ad._current_level >= 0:
            for name, tensor in self._frozen.given().items():
                if functional._has_tangent(tensor):
                    raise RuntimeError(
                        f"prepared {self.function}: {name} has a tangent, and the weights of this operator are frozen "
                        "(freeze_weights=True): prepare it without freeze_weights for forward-mode differentiation"
                    )

    def _check_like(self, x: Any) -> None:
        """RuntimeError unless x is where the frozen weights are, and of their dtype. What is no tensor fails later."""
        weight = self._tensors[0]
        assert weight is not None
        if isinstance(x, Tensor) and (x.dtype, x.device) != (weight.dtype, weight.device):
            raise RuntimeError(
                f"prepared {self.function}: the input has dtype {x.dtype} and is on {x.device}, and the frozen weights "
                f"have {weight.dtype} and are on {weight.device}: expected the same; convert the input, or prepare "
                "another operator from weights like it"
            )


def _weights_of(arguments: dict[str, Any]) -> tuple[str, ...]:
    return _SEPARABLE if "dw_weight" in arguments else _CONVOLUTION


def _checked(function: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """``arguments`` with copies of what may be changed behind the operator's back; raises for what no input can fit."""
    names = _weights_of(arguments)
    tensors = {name: arguments[name] for name in names}
    functional._check_tensors(
        function, tensors, optional=[n for n in names if "bias" in n], transposed=function.startswith("conv_transpose")
    )
    resolved(function, arguments["precision"])
    chains = {name: E.as_chain(arguments[name], f"{function}(): {name}") for name in _CHAINS if name in arguments}
    free = {name: v for name, v in arguments.items() if name not in (*names, *chains, "precision")}
    _check_parameters(function, tensors, free)
    # Numbers and sequences of them: that was checked.
    return {**arguments, **chains, **copy.deepcopy(free)}


def _check_parameters(function: str, tensors: dict[str, Tensor], parameters: dict[str, Any]) -> None:
    """Check weights against parameters, on an input without memory that is as small as they allow."""
    separable, transposed = "dw_weight" in tensors, function.startswith("conv_transpose")
    rank = int(function[-2])
    weight = tensors["dw_weight" if separable else "weight"]

    def stand_in(channels: int, *extents: int) -> Tensor:
        return torch.empty((1, channels, *extents), dtype=weight.dtype, device="meta")

    fixed = {"groups": 1, "weight_name": "dw_weight"} if separable else {"transposed": transposed}
    geometry = validation.geometry(function, stand_in(1, *(1,) * rank), weight, **parameters, **fixed)
    extents = [
        dilation * (kernel - 1) + 1 + 2 * max(padding)
        for kernel, dilation, padding in zip(geometry.kernel_size, geometry.dilation, geometry.padding, strict=True)
    ]
    if max(extents) > _LARGEST_STAND_IN:
        return  # the first call says what is wrong, if anything is
    if separable:
        x = stand_in(weight.shape[0], *extents)
        dw_bias, pw_bias = tensors["dw_bias"], tensors["pw_bias"]
        validation.check_separable(function, x, weight, tensors["pw_weight"], dw_bias, pw_bias)
    else:
        channels = weight.shape[0] if transposed else weight.shape[1] * geometry.groups
        x = stand_in(channels, *extents)
        validation.check_convolution(function, x, weight, tensors["bias"], geometry, transposed)
