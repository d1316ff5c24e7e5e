"""The vocabulary of steps around a convolution.

``from jitconv import epilogue as E`` and then ``epilogue=[E.add(s), E.layer_norm((64,)), E.avg_pool(2), E.gelu()]``.
Every step stands here once: its CUDA expression beside its torch reference. The gradient reference is
autograd of the torch reference, so it cannot disagree with it.

**Operands.** Wherever a step takes ``other`` it accepts

* a Python number (a kernel argument: changing it compiles nothing);
* a one-element tensor of any shape (read on the device, no ``.item()``, no synchronisation);
* a 1-D tensor of length C, **one value per channel**, as a bias is. (Broadcasting would align it with the
  last axis; a chain follows the convention of ``bias`` instead. Spell ``t.view(1, 1, -1)`` for the last axis.)
* any other tensor that broadcasts to the value, such as a residual ``[N, C, D, H, W]`` or a gate
  ``[N, C, 1, 1, 1]``, with any strides;
* :data:`CONV`, the convolution's own value (accumulator plus bias), so ``[E.sigmoid(), E.mul(E.CONV)]`` is SiLU.

Tensors are float32 or the dtype of x (one-element tensors of any floating type). The whole chain is
computed in fp32 and rounded once, at the end, to the dtype of x: fp32 operands promote nothing.

Steps know nothing of templates or tiles; :attr:`Step.needs` says what a tile must own to apply one:
``element``, ``row`` (the whole last axis) or ``window`` (a whole pooling window).
"""

from __future__ import annotations

import keyword
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from jitconv.problem import OperandSpec, StepSpec

__all__ = [
    "CONV", "Operand", "Step", "StepKind", "abs", "add", "avg_pool", "bind", "celu", "clamp", "div", "elu",
    "exp", "gelu", "hardsigmoid", "hardswish", "hardtanh", "layer_norm", "leaky_relu", "logsigmoid",
    "max_pool", "maximum", "minimum", "mish", "mul", "neg", "reciprocal", "register", "relu", "relu6",
    "selu", "sigmoid", "silu", "softplus", "softsign", "sqrt", "square", "sub", "tanh",
]  # fmt: skip


class _ConvolutionValue:
    """Stands for the convolution's own value inside a chain."""

    def __repr__(self) -> str:
        return "jitconv.epilogue.CONV"


#: The convolution's own value (accumulator plus bias), as an operand of a later step.
CONV = _ConvolutionValue()

Operand: TypeAlias = float | int | Tensor | _ConvolutionValue


@dataclass(frozen=True, eq=False)
class StepKind:
    """What a step is, for every use of it.

    ``cuda`` is a C++ expression for the new value in terms of ``v`` (the value so far, fp32) and the operand
    names; it may call anything in ``jitconv::act`` (templates/device/activations.cuh) and in ``preamble``,
    device code placed once before the kernel. ``torch`` is the reference, called as
    ``torch(v, **operands)`` with tensors that broadcast to ``v``, or numbers.
    """

    name: str
    cuda: str
    torch: Callable[..., Tensor]
    operands: tuple[str, ...] = ()
    needs: str = "element"
    preamble: str = ""


@dataclass(frozen=True, eq=False)
class Step:
    """One use of a :class:`StepKind`: with its operands and baked attributes."""

    kind: StepKind
    operands: tuple[tuple[str, Operand], ...] = ()
    attributes: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """The step's name, as in kernel labels."""
        return self.kind.name

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors among the operands, in order."""
        return tuple(value for _, value in self.operands if isinstance(value, Tensor))

    def signature(self) -> tuple[Any, ...]:
        """A hashable value that is the same for steps which differ in numbers and addresses only."""
        return (self.kind, self.attributes, *((name, _operand_signature(value)) for name, value in self.operands))

    def with_tensors(self, tensors: Iterator[Tensor]) -> Step:
        """The same step with its tensors replaced, in order, by the next ones of ``tensors``."""
        return Step(
            self.kind,
            tuple((n, next(tensors) if isinstance(v, Tensor) else v) for n, v in self.operands),
            self.attributes,
        )

    @property
    def needs(self) -> str:
        """``element``, ``row`` or ``window``: what a tile must own to apply this step."""
        return self.kind.needs

    def __repr__(self) -> str:
        values = [f"{n}={_show(v)}" for n, v in self.operands] + [f"{n}={v}" for n, v in self.attributes]
        return f"{self.name}({', '.join(values)})"


# ---------------------------------------------------------------------------------------------------------
# Pointwise steps. CUDA functions live in templates/device/activations.cuh.


def _both(lower: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """A torch reference for a binary function of two tensors that also takes a number."""

    def reference(v: Tensor, other: Any) -> Tensor:
        return lower(v, torch.as_tensor(other, dtype=v.dtype, device=v.device))

    return reference


def _clamp_reference(v: Tensor, min: Any, max: Any) -> Tensor:
    """torch.clamp, which takes two numbers or two tensors, for one of each too."""
    if isinstance(min, Tensor) != isinstance(max, Tensor):
        min, max = (torch.as_tensor(bound, dtype=v.dtype, device=v.device) for bound in (min, max))
    return torch.clamp(v, min, max)


_ADD = StepKind("add", "v + other", lambda v, other: v + other, ("other",))
_SUB = StepKind("sub", "v - other", lambda v, other: v - other, ("other",))
_MUL = StepKind("mul", "v * other", lambda v, other: v * other, ("other",))
_DIV = StepKind("div", "v / other", lambda v, other: v / other, ("other",))
_MINIMUM = StepKind("minimum", "act::minimum(v, other)", _both(torch.minimum), ("other",))
_MAXIMUM = StepKind("maximum", "act::maximum(v, other)", _both(torch.maximum), ("other",))
_CLAMP = StepKind("clamp", "act::clamp(v, min, max)", _clamp_reference, ("min", "max"))
_CLAMP_MIN = StepKind(
    "clamp_min", "act::clamp_min(v, min)", lambda v, min: torch.clamp_min(v, min), ("min",)
)
_CLAMP_MAX = StepKind(
    "clamp_max", "act::clamp_max(v, max)", lambda v, max: torch.clamp_max(v, max), ("max",)
)
_RELU = StepKind("relu", "act::relu(v)", F.relu)
_RELU6 = StepKind("relu6", "act::relu6(v)", F.relu6)
_LEAKY_RELU = StepKind(
    "leaky_relu", "act::leaky_relu(v, negative_slope)", F.leaky_relu, ("negative_slope",)
)
_ELU = StepKind("elu", "act::elu(v, alpha)", F.elu, ("alpha",))
_SELU = StepKind("selu", "act::selu(v)", F.selu)
_CELU = StepKind("celu", "act::celu(v, alpha)", F.celu, ("alpha",))
_GELU = StepKind("gelu", "act::gelu_erf(v)", F.gelu)
_GELU_TANH = StepKind("gelu_tanh", "act::gelu_tanh(v)", lambda v: F.gelu(v, approximate="tanh"))
_SILU = StepKind("silu", "act::silu(v)", F.silu)
_MISH = StepKind("mish", "act::mish(v)", F.mish)
_TANH = StepKind("tanh", "act::tanh(v)", torch.tanh)
_SIGMOID = StepKind("sigmoid", "act::sigmoid(v)", torch.sigmoid)
_LOGSIGMOID = StepKind("logsigmoid", "act::logsigmoid(v)", F.logsigmoid)
_SOFTPLUS = StepKind(
    "softplus", "act::softplus(v, beta, threshold)", F.softplus, ("beta", "threshold")
)
_SOFTSIGN = StepKind("softsign", "act::softsign(v)", F.softsign)
_HARDSWISH = StepKind("hardswish", "act::hardswish(v)", F.hardswish)
_HARDSIGMOID = StepKind("hardsigmoid", "act::hardsigmoid(v)", F.hardsigmoid)
_HARDTANH = StepKind(
    "hardtanh", "act::hardtanh(v, min_val, max_val)", F.hardtanh, ("min_val", "max_val")
)
_ABS = StepKind("abs", "act::abs(v)", torch.abs)
_NEG = StepKind("neg", "act::neg(v)", torch.neg)
_SQUARE = StepKind("square", "act::square(v)", torch.square)
_EXP = StepKind("exp", "act::exp(v)", torch.exp)
_SQRT = StepKind("sqrt", "act::sqrt(v)", torch.sqrt)
_RECIPROCAL = StepKind("reciprocal", "act::reciprocal(v)", torch.reciprocal)


def add(other: Operand) -> Step:
    """``v + other``: a number, a tensor (see the module's page on operands) or :data:`CONV`."""
    return Step(_ADD, (("other", _operand("other", other)),))


def sub(other: Operand) -> Step:
    """``v - other``."""
    return Step(_SUB, (("other", _operand("other", other)),))


def mul(other: Operand) -> Step:
    """``v * other``."""
    return Step(_MUL, (("other", _operand("other", other)),))


def div(other: Operand) -> Step:
    """``v / other``, IEEE division."""
    return Step(_DIV, (("other", _operand("other", other)),))


def minimum(other: Operand) -> Step:
    """``torch.minimum(v, other)``: NaN in either operand gives NaN."""
    return Step(_MINIMUM, (("other", _operand("other", other)),))


def maximum(other: Operand) -> Step:
    """``torch.maximum(v, other)``: NaN in either operand gives NaN."""
    return Step(_MAXIMUM, (("other", _operand("other", other)),))


def clamp(min: Operand | None = None, max: Operand | None = None) -> Step:
    """``torch.clamp(v, min, max)``; one bound may be None. ``min > max`` gives ``max``, NaN stays NaN."""
    if min is None and max is None:
        raise ValueError("clamp: min=None and max=None: expected at least one bound")
    if max is None:
        return Step(_CLAMP_MIN, (("min", _operand("min", min)),))
    if min is None:
        return Step(_CLAMP_MAX, (("max", _operand("max", max)),))
    return Step(_CLAMP, (("min", _operand("min", min)), ("max", _operand("max", max))))


def relu() -> Step:
    """``max(v, 0)``, NaN stays NaN."""
    return Step(_RELU)


def relu6() -> Step:
    """``min(max(v, 0), 6)``."""
    return Step(_RELU6)


def leaky_relu(negative_slope: float = 0.01) -> Step:
    """``v`` where positive, else ``negative_slope * v``."""
    return Step(_LEAKY_RELU, (("negative_slope", _number("negative_slope", negative_slope)),))


def elu(alpha: float = 1.0) -> Step:
    """``v`` where positive, else ``alpha * (exp(v) - 1)``."""
    return Step(_ELU, (("alpha", _number("alpha", alpha)),))


def selu() -> Step:
    """``scale * elu(v, alpha)`` with the constants of torch.nn.SELU."""
    return Step(_SELU)


def celu(alpha: float = 1.0) -> Step:
    """``max(0, v) + min(0, alpha * (exp(v / alpha) - 1))``; ``alpha`` must not be 0, as in torch."""
    if _number("alpha", alpha) == 0:
        raise RuntimeError("celu: alpha=0: expected a number other than 0 (the formula divides by alpha)")
    return Step(_CELU, (("alpha", float(alpha)),))


def gelu(approximate: str = "none") -> Step:
    """Gaussian error linear unit: ``"none"`` (with erf) or ``"tanh"``, as torch.nn.functional.gelu."""
    if approximate not in ("none", "tanh"):
        raise RuntimeError(f"gelu: approximate={approximate!r}: expected 'none' or 'tanh'")
    return Step(_GELU if approximate == "none" else _GELU_TANH)


def silu() -> Step:
    """``v * sigmoid(v)``."""
    return Step(_SILU)


def mish() -> Step:
    """``v * tanh(softplus(v))``."""
    return Step(_MISH)


def tanh() -> Step:
    """Hyperbolic tangent."""
    return Step(_TANH)


def sigmoid() -> Step:
    """``1 / (1 + exp(-v))``."""
    return Step(_SIGMOID)


def logsigmoid() -> Step:
    """``log(sigmoid(v))``, without overflow in either tail."""
    return Step(_LOGSIGMOID)


def softplus(beta: float = 1.0, threshold: float = 20.0) -> Step:
    """``log(1 + exp(beta * v)) / beta``; ``v`` itself where ``beta * v > threshold``, as in torch."""
    return Step(_SOFTPLUS, (("beta", _number("beta", beta)), ("threshold", _number("threshold", threshold))))


def softsign() -> Step:
    """``v / (1 + |v|)``."""
    return Step(_SOFTSIGN)


def hardswish() -> Step:
    """``v * relu6(v + 3) / 6``."""
    return Step(_HARDSWISH)


def hardsigmoid() -> Step:
    """``relu6(v + 3) / 6``."""
    return Step(_HARDSIGMOID)


def hardtanh(min_val: float = -1.0, max_val: float = 1.0) -> Step:
    """``v`` limited to ``[min_val, max_val]``; ``min_val`` must not exceed ``max_val``, as in torch."""
    low, high = _number("min_val", min_val), _number("max_val", max_val)
    if low > high:
        raise ValueError(f"hardtanh: min_val={low} exceeds max_val={high}: swap them")
    return Step(_HARDTANH, (("min_val", low), ("max_val", high)))


def abs() -> Step:
    """Absolute value."""
    return Step(_ABS)


def neg() -> Step:
    """``-v``."""
    return Step(_NEG)


def square() -> Step:
    """``v * v``."""
    return Step(_SQUARE)


def exp() -> Step:
    """``e ** v``."""
    return Step(_EXP)


def sqrt() -> Step:
    """Square root; NaN below zero."""
    return Step(_SQRT)


def reciprocal() -> Step:
    """``1 / v``."""
    return Step(_RECIPROCAL)


# ---------------------------------------------------------------------------------------------------------
# Steps that need more than one element. Their kernels are templates/layer_norm.cu.j2 and pool.cu.j2; `cuda` is empty.


def _layer_norm_reference(
    v: Tensor, eps: float, weight: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    return F.layer_norm(v, (v.shape[-1],), weight, bias, eps)


_LAYER_NORM = StepKind("layer_norm", "", _layer_norm_reference, ("eps", "weight", "bias"), needs="row")


def layer_norm(
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Step:
    """LayerNorm over the **last axis** (W), as ``F.layer_norm(v, (W,), weight, bias, eps)``.

    ``normalized_shape`` is W, an int or a 1-tuple, and must equal the width of the value there;
    ``weight`` and ``bias`` are 1-D of that length, indexed by w (not by channel). The variance is computed in
    two passes over centred values.
    """
    shape = _sizes("layer_norm", "normalized_shape", normalized_shape)
    if not shape:
        raise RuntimeError("layer_norm: normalized_shape=(): expected one entry, the width of the last axis")
    if len(shape) > 1:
        raise ValueError(
            f"layer_norm: normalized_shape={shape}: expected one entry, the width of the last axis "
            "(norms over several axes are not generated; apply torch.nn.functional.layer_norm after the call)"
        )
    width = shape[0]
    operands: list[tuple[str, Operand]] = [("eps", _number("eps", eps))]
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"layer_norm: {name}={tensor!r}: expected a tensor of shape ({width},) or None")
        if tuple(tensor.shape) != (width,):
            raise RuntimeError(
                f"layer_norm: {name} has shape {tuple(tensor.shape)}: expected ({width},), "
                f"as normalized_shape={shape} says"
            )
        operands.append((name, tensor))
    return Step(_LAYER_NORM, tuple(operands), (("width", width),))


def _pool_reference(kind: str) -> Callable[..., Tensor]:
    def reference(v: Tensor, *, window: tuple[int, ...], ceil_mode: bool) -> Tensor:
        function = getattr(F, f"{kind}_pool{len(window)}d")
        return function(v, window, stride=window, ceil_mode=ceil_mode)  # type: ignore[no-any-return]

    return reference


_AVG_POOL = StepKind("avg_pool", "", _pool_reference("avg"), needs="window")
_MAX_POOL = StepKind("max_pool", "", _pool_reference("max"), needs="window")


def _pool(kind: StepKind, kernel_size: int | Sequence[int], ceil_mode: bool) -> Step:
    window = _sizes(kind.name, "kernel_size", kernel_size)
    if not 1 <= len(window) <= 3:
        raise RuntimeError(f"{kind.name}: kernel_size={window}: expected an int or one int per dimension")
    return Step(kind, (), (("ceil_mode", bool(ceil_mode)), ("window", window)))


def avg_pool(kernel_size: int | Sequence[int], ceil_mode: bool = False) -> Step:
    """Average over windows of ``kernel_size`` with stride equal to the window, no padding.

    With ``ceil_mode`` a window may hang over the edge; it then averages over what is inside, as torch does.
    """
    return _pool(_AVG_POOL, kernel_size, ceil_mode)


def max_pool(kernel_size: int | Sequence[int], ceil_mode: bool = False) -> Step:
    """Maximum over windows of ``kernel_size`` with stride equal to the window; NaN wins, as in torch."""
    return _pool(_MAX_POOL, kernel_size, ceil_mode)


# ---------------------------------------------------------------------------------------------------------
# Steps of the caller's own.

_IDENTIFIER = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
# What the text around an expression uses, and what C++ reserves (C++17 standard, table 5).
_RESERVED = """
    v at arguments act conv_value to_float offset_of
    alignas alignof and and_eq asm auto bitand bitor bool break case catch char char16_t char32_t class compl const
    constexpr const_cast continue decltype default delete do double dynamic_cast else enum explicit export extern
    false float for friend goto if inline int long mutable namespace new noexcept not not_eq nullptr operator or
    or_eq private protected public register reinterpret_cast return short signed sizeof static static_assert
    static_cast struct switch template this thread_local throw true try typedef typeid typename union unsigned using
    virtual void volatile wchar_t while xor xor_eq
"""
_TAKEN = frozenset(_RESERVED.split())


def register(
    name: str,
    *,
    cuda: str,
    torch: Callable[..., Tensor],
    operands: Sequence[str] = (),
    preamble: str = "",
) -> Callable[..., Step]:
    """Make a pointwise step of your own and return the function that creates it.

    ``cuda`` is a C++ expression for the new value in terms of ``v`` (float) and the names in ``operands``
    (floats); ``torch`` is its reference, called as ``torch(v, **operands)``; ``preamble`` is device code
    (functions) that the expression may call. Expression and preamble are part of the kernel's key, so editing them
    compiles anew. Nothing is global: two libraries may register the same name.

    >>> shifted = register("shifted_relu", cuda="act::relu(v - shift)", operands=("shift",),
    ...                    torch=lambda v, shift: (v - shift).relu())
    >>> shifted(0.5)
    shifted_relu(shift=0.5)

    Raises ValueError for a name that is not a C identifier or that a kernel already uses.
    """
    for what, text in [("name", name), *(("operands", operand) for operand in operands)]:
        if not _IDENTIFIER.fullmatch(text) or text in _TAKEN or keyword.iskeyword(text):
            raise ValueError(
                f"register: {what}={text!r}: expected a C identifier that neither C++, Python nor the generated kernel "
                "uses itself; choose another name"
            )
    if len(set(operands)) != len(operands):
        raise ValueError(f"register: operands={tuple(operands)!r}: expected distinct names")
    if "//" in cuda:
        raise ValueError(f"register: cuda={cuda!r}: expected an expression without // comments; put them in preamble")
    if not cuda.strip():
        raise ValueError("register: cuda='': expected a C++ expression in v")
    kind = StepKind(name, cuda.strip(), torch, tuple(operands), preamble=preamble)

    def step(*values: Operand, **named: Operand) -> Step:
        if len(values) > len(operands):
            raise TypeError(f"{name}() takes {len(operands)} operands, got {len(values)}")
        given = dict(zip(operands, values, strict=False))
        for key, value in named.items():
            if key not in operands or key in given:
                raise TypeError(f"{name}(): unexpected operand {key}={value!r}: expected {tuple(operands)}")
            given[key] = value
        missing = [key for key in operands if key not in given]
        if missing:
            raise TypeError(f"{name}(): operands {missing} are missing")
        return Step(kind, tuple((key, _operand(key, given[key])) for key in operands))

    step.__name__ = step.__qualname__ = name
    step.__doc__ = f"``{cuda.strip()}``"
    return step


# ---------------------------------------------------------------------------------------------------------
# Binding a chain to the tensor it follows: specs, operand values, shapes, errors.


@dataclass(frozen=True)
class Bound:
    """A chain checked against the shape it meets.

    ``specs`` is its structure, ``operands[i]`` the run-time values of step i in the order of ``specs[i].operands``
    (numbers as floats; tensors as given, ``tensor`` kinds expanded to the value's shape), and ``shapes[i]`` the
    shape that step i sees; ``shape`` is what comes out.
    """

    specs: tuple[StepSpec, ...]
    operands: tuple[tuple[Any, ...], ...]
    shapes: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...]


def as_chain(steps: Iterable[Step] | Step | None, argument: str) -> tuple[Step, ...]:
    """``steps`` as a tuple; TypeError naming ``argument`` when something in it is not a Step."""
    if steps is None:
        return ()
    if isinstance(steps, Step):
        steps = (steps,)
    # Callers without a type checker pass names and functions; a string would even iterate.
    given: Any = steps
    if isinstance(given, str) or not isinstance(given, Iterable):
        hint = "; call the function that makes the step" if callable(given) else ""
        raise TypeError(
            f"{argument}={given!r}: expected a sequence of steps from jitconv.epilogue, such as [E.relu()]{hint}"
        )
    chain: tuple[Step, ...] = tuple(given)
    for i, step in enumerate(chain):
        if not isinstance(step, Step):
            hint = "; call it: E.relu()" if callable(step) else ""
            raise TypeError(
                f"{argument}[{i}]={step!r}: expected a step from jitconv.epilogue, such as E.relu(){hint}"
            )
    return chain


def bind(
    chain: Sequence[Step], shape: Sequence[int], dtype: torch.dtype, device: torch.device, argument: str
) -> Bound:
    """Check ``chain`` against a value of ``shape`` ``[N, C, *spatial]`` and split structure from values.

    Raises what torch raises for the same mistake (RuntimeError for shapes, devices and dtypes; ValueError for
    windows), naming the step, the operand, its value and what was expected.
    """
    specs: list[StepSpec] = []
    values: list[tuple[Any, ...]] = []
    shapes: list[tuple[int, ...]] = []
    current = tuple(shape)
    for i, step in enumerate(chain):
        where = f"{argument}[{i}] {step.name}"
        reshaped = current != tuple(shape)
        bound = [
            _bind_operand(where, name, value, step, current, dtype, device, reshaped)
            for name, value in step.operands
        ]
        shapes.append(current)
        attributes = step.attributes
        if step.needs == "row":
            _check_row(where, step, current)
        elif step.needs == "window":
            window = _window(where, step, len(current) - 2)
            attributes = (("ceil_mode", dict(attributes)["ceil_mode"]), ("window", window))
            if step.kind is _AVG_POOL:
                _check_avg_pool(where, current, window)
            current = _pooled(where, current, window, dict(attributes)["ceil_mode"])
        specs.append(
            StepSpec(
                name=step.name,
                operands=tuple((name, spec) for (name, _), (spec, _) in zip(step.operands, bound, strict=True)),
                attributes=attributes,
                cuda=step.kind.cuda,
                preamble=step.kind.preamble,
            )
        )
        values.append(tuple(value for _, value in bound))
    return Bound(tuple(specs), tuple(values), tuple(shapes), current)


def reference(chain: Sequence[Step], v: Tensor) -> Tensor:
    """The chain in torch operations on ``v`` ``[N, C, *spatial]``, in the dtype of ``v``; differentiable."""
    conv_value = v
    for step in chain:
        operands = {name: _torch_operand(value, v, conv_value, step) for name, value in step.operands}
        if step.needs == "window":
            window = _window(step.name, step, v.dim() - 2)
            v = step.kind.torch(v, window=window, ceil_mode=dict(step.attributes)["ceil_mode"])
        else:
            v = step.kind.torch(v, **operands)
    return v


def _torch_operand(value: Operand, v: Tensor, conv_value: Tensor, step: Step) -> Any:
    if isinstance(value, _ConvolutionValue):
        return conv_value
    if not isinstance(value, Tensor):
        return value
    value = value.to(v.dtype)
    if step.needs == "row":
        return value
    if value.numel() == 1:
        return value.reshape(()).to(v.device)
    if value.dim() == 1:
        return value.view(-1, *(1,) * (v.dim() - 2))
    return value


def _bind_operand(
    where: str,
    name: str,
    value: Operand,
    step: Step,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    reshaped: bool,
) -> tuple[OperandSpec, Any]:
    if isinstance(value, _ConvolutionValue):
        if reshaped:
            raise RuntimeError(
                f"{where}: {name}=CONV after a pool: the convolution's own value no longer has the shape "
                f"{shape}; use CONV before the pool"
            )
        return OperandSpec("value"), None
    if not isinstance(value, Tensor):
        return OperandSpec("number"), float(value)
    _check_tensor(where, name, value, dtype)
    if value.numel() == 1 and step.needs != "row":
        if value.device.type == "cpu" and device.type != "cpu":
            # Reading a CPU scalar waits for nothing, and torch accepts it beside CUDA tensors too.
            return OperandSpec("number"), float(value.detach())
        _check_device(where, name, value, device)
        return OperandSpec("scalar", _dtype_name(value.dtype)), value
    _check_device(where, name, value, device)
    if value.dtype not in (dtype, torch.float32, dtype.to_real()):
        expected = " or ".join(str(d) for d in dict.fromkeys((dtype, torch.float32, dtype.to_real())))
        raise RuntimeError(
            f"{where}: {name} has dtype {value.dtype}: expected {expected} (only a one-element tensor may have "
            f"another floating-point dtype); convert it with .to({dtype})"
        )
    if step.needs == "row":
        return OperandSpec("row", _dtype_name(value.dtype)), value
    channels = shape[1]
    if value.dim() == 1:
        if value.shape[0] != channels:
            raise RuntimeError(
                f"{where}: {name} has {value.shape[0]} entries: a 1-D tensor is one value per channel, and the "
                f"value has {channels} channels; for the last axis use {name}.view(1, 1, -1)"
            )
        return OperandSpec("channel", _dtype_name(value.dtype)), value
    try:
        expanded = value.expand(shape)
    except RuntimeError:
        raise RuntimeError(
            f"{where}: {name} has shape {tuple(value.shape)}, which does not broadcast to the value's shape {shape}"
        ) from None
    return OperandSpec("tensor", _dtype_name(value.dtype)), expanded


def _check_tensor(where: str, name: str, value: Tensor, dtype: torch.dtype) -> None:
    if dtype.is_complex and value.dtype == dtype:
        return
    if value.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        raise RuntimeError(
            f"{where}: {name} has dtype {value.dtype}: expected a floating-point tensor; convert it with .to({dtype})"
        )
    if value.layout != torch.strided:
        raise RuntimeError(f"{where}: {name} has layout {value.layout}: expected torch.strided")


def _check_device(where: str, name: str, value: Tensor, device: torch.device) -> None:
    if value.device != device:
        raise RuntimeError(
            f"{where}: {name} is on {value.device}: expected {device}, where x is; move it with .to('{device}')"
        )


def _check_row(where: str, step: Step, shape: tuple[int, ...]) -> None:
    width = dict(step.attributes)["width"]
    if shape[-1] != width:
        raise RuntimeError(
            f"{where}: normalized_shape=({width},): the value there has shape {shape}, whose last axis is "
            f"{shape[-1]}; expected normalized_shape=({shape[-1]},)"
        )


def _window(where: str, step: Step, rank: int) -> tuple[int, ...]:
    window: tuple[int, ...] = dict(step.attributes)["window"]
    if len(window) == 1:
        window = window * rank
    if len(window) != rank:
        raise RuntimeError(f"{where}: kernel_size={window}: expected an int or {rank} ints, one per dimension")
    return window


def _check_avg_pool(where: str, shape: tuple[int, ...], window: tuple[int, ...]) -> None:
    # torch refuses this in three dimensions only, and for the average only.
    if len(window) == 3 and any(size > extent for size, extent in zip(window, shape[2:], strict=True)):
        raise RuntimeError(
            f"{where}: kernel_size={window} on a value of shape {shape}: expected a window no larger than the value"
        )


def _pooled(
    where: str, shape: tuple[int, ...], window: tuple[int, ...], ceil_mode: bool
) -> tuple[int, ...]:
    """Shape after a pool with stride = window and no padding (formula: the page of torch.nn.AvgPool3d)."""
    out = []
    for extent, size in zip(shape[2:], window, strict=True):
        out.append(math.ceil(extent / size) if ceil_mode else extent // size)
    if any(o == 0 for o, extent in zip(out, shape[2:], strict=True)):
        raise RuntimeError(
            f"{where}: kernel_size={window} on a value of shape {shape}: the output would be empty; "
            "expected a window no larger than the value"
        )
    return (*shape[:2], *out)


def _operand(name: str, value: Operand | None) -> Operand:
    if isinstance(value, (Tensor, _ConvolutionValue)):
        return value
    return _number(name, value)


def _number(name: str, value: Any) -> float:
    if isinstance(value, Tensor):
        raise TypeError(f"{name} is a tensor: expected a Python number")
    try:
        return float(operator.index(value)) if not isinstance(value, float) else value
    except TypeError:
        pass
    if hasattr(value, "__float__") and not isinstance(value, (str, complex)):
        return float(value)
    raise TypeError(f"{name}={value!r}: expected a number, a tensor or jitconv.epilogue.CONV")


def _sizes(step: str, name: str, value: Any) -> tuple[int, ...]:
    """An int or a sequence of ints, each at least 1, as a tuple."""
    sizes = []
    for entry in value if isinstance(value, (tuple, list)) else (value,):
        try:
            size = operator.index(entry)
        except TypeError:
            size = None
        if size is None or isinstance(entry, bool):
            raise TypeError(f"{step}: {name}={value!r}: expected an int or a tuple of ints")
        if size < 1:
            raise RuntimeError(f"{step}: {name}={value!r}: expected at least 1")
        sizes.append(size)
    return tuple(sizes)


def _operand_signature(value: Operand) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    return "value" if isinstance(value, _ConvolutionValue) else "number"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _show(value: Operand) -> str:
    if isinstance(value, Tensor):
        return f"tensor{tuple(value.shape)}"
    return "CONV" if isinstance(value, _ConvolutionValue) else f"{value:g}"
