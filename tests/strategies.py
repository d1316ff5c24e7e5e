"""Problems to test with, and what torch in float64 says about them: for the emulator and for the GPU alike.

A :class:`Case` is one public call. Its expected value is computed by torch from the arguments alone; nothing of the
library takes part. :func:`random_case` draws one from a ``random.Random``: a seeded one, or hypothesis' own
(``st.randoms()``), which then shrinks it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import jitconv
from jitconv import emulated, functional, program
from jitconv import epilogue as E
from jitconv.program import Call

CHANNELS_LAST = {2: torch.channels_last, 3: torch.channels_last_3d}

#: Ways in which the elements of a tensor can lie in memory.
LAYOUTS = ("contiguous", "channels_last", "permuted", "sliced", "expanded")


# ---- Tensors --------------------------------------------------------------------------------------------


def make_tensor(
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    layout: str = "contiguous",
    *,
    seed: int = 0,
    scale: float = 1.0,
) -> Tensor:
    """Normally distributed values in one of :data:`LAYOUTS`; a layout that the rank lacks is contiguous."""
    shape = tuple(shape)
    generator = torch.Generator().manual_seed(seed)

    def randn(*sizes: int) -> Tensor:
        return (torch.randn(sizes, generator=generator) * scale).to(dtype)

    if layout == "channels_last" and len(shape) - 2 in CHANNELS_LAST:
        return randn(*shape).contiguous(memory_format=CHANNELS_LAST[len(shape) - 2])
    if layout == "permuted" and len(shape) > 1:
        # The last axis comes first in memory: neither contiguous nor channels_last.
        return randn(shape[-1], *shape[:-1]).permute(*range(1, len(shape)), 0)
    if layout == "sliced" and shape:
        wide = randn(*shape[:-1], 2 * shape[-1] + 1)
        return wide[..., 1::2]
    if layout == "expanded" and shape:
        # One value along the first axis, or along the last where that has but one entry.
        axis = 0 if shape[0] > 1 else len(shape) - 1
        return randn(*shape[:axis], 1, *shape[axis + 1 :]).expand(shape)
    return randn(*shape)


def on_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """``tensor`` on ``device`` with the same strides, overlaps included (``.to`` would make it dense)."""
    flat = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).to(device)
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


# ---- Steps, each beside the torch function that it must equal ----------------------------------------------


@dataclass(frozen=True)
class Twin:
    """A step and ``torch(v, conv_value)``, which gives the same in any dtype."""

    step: E.Step
    torch: Callable[[Tensor, Tensor], Tensor]


def twin(step: E.Step, function: Callable[[Tensor], Tensor]) -> Twin:
    """A step without operands that are tensors."""
    return Twin(step, lambda v, conv: function(v))


POINTWISE: dict[str, Callable[[], Twin]] = {
    "relu": lambda: twin(E.relu(), F.relu),
    "relu6": lambda: twin(E.relu6(), F.relu6),
    "leaky_relu": lambda: twin(E.leaky_relu(0.2), lambda v: F.leaky_relu(v, 0.2)),
    "elu": lambda: twin(E.elu(1.5), lambda v: F.elu(v, 1.5)),
    "selu": lambda: twin(E.selu(), F.selu),
    "celu": lambda: twin(E.celu(0.7), lambda v: F.celu(v, 0.7)),
    "gelu": lambda: twin(E.gelu(), F.gelu),
    "gelu_tanh": lambda: twin(E.gelu("tanh"), lambda v: F.gelu(v, approximate="tanh")),
    "silu": lambda: twin(E.silu(), F.silu),
    "mish": lambda: twin(E.mish(), F.mish),
    "tanh": lambda: twin(E.tanh(), torch.tanh),
    "sigmoid": lambda: twin(E.sigmoid(), torch.sigmoid),
    "logsigmoid": lambda: twin(E.logsigmoid(), F.logsigmoid),
    "softplus": lambda: twin(E.softplus(2.0, 5.0), lambda v: F.softplus(v, 2.0, 5.0)),
    "softsign": lambda: twin(E.softsign(), F.softsign),
    "hardswish": lambda: twin(E.hardswish(), F.hardswish),
    "hardsigmoid": lambda: twin(E.hardsigmoid(), F.hardsigmoid),
    "hardtanh": lambda: twin(E.hardtanh(-0.5, 0.75), lambda v: F.hardtanh(v, -0.5, 0.75)),
    "abs": lambda: twin(E.abs(), torch.abs),
    "neg": lambda: twin(E.neg(), torch.neg),
    "square": lambda: twin(E.square(), torch.square),
    "exp": lambda: twin(E.exp(), torch.exp),
    "sqrt": lambda: twin(E.sqrt(), torch.sqrt),
    "reciprocal": lambda: twin(E.reciprocal(), torch.reciprocal),
    "clamp": lambda: twin(E.clamp(-0.5, 0.25), lambda v: torch.clamp(v, -0.5, 0.25)),
    "clamp_min": lambda: twin(E.clamp(min=-0.25), lambda v: torch.clamp(v, min=-0.25)),
    "clamp_max": lambda: twin(E.clamp(max=0.5), lambda v: torch.clamp(v, max=0.5)),
}

#: Steps whose slope is bounded, so that a chain of them amplifies no rounding error.
TAME = tuple(name for name in POINTWISE if name not in ("square", "exp", "sqrt", "reciprocal"))

BINARY: dict[str, tuple[Callable[[Any], E.Step], Callable[[Tensor, Tensor], Tensor]]] = {
    "add": (E.add, torch.add),
    "sub": (E.sub, torch.sub),
    "mul": (E.mul, torch.mul),
    "div": (E.div, torch.div),
    "minimum": (E.minimum, torch.minimum),
    "maximum": (E.maximum, torch.maximum),
}

OPERANDS = ("number", "scalar", "one_element", "channel", "tensor", "broadcast", "conv")


def binary(
    name: str,
    operand: str,
    shape: Sequence[int],
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    layout: str = "contiguous",
) -> Twin:
    """Step ``name`` with an operand of one of :data:`OPERANDS` for a value of ``shape`` [N, C, ...].

    Tensors hold values of magnitude 0.5 to 1.5: safe to divide by.
    """
    make, function = BINARY[name]
    if operand == "conv":
        return Twin(make(E.CONV), lambda v, conv: function(v, conv))
    if operand == "number":
        value = random.Random(seed).choice((-0.75, 0.5, 1.25, 3))
        return Twin(make(value), lambda v, conv: function(v, torch.as_tensor(value, dtype=v.dtype)))
    shapes = {
        "scalar": (),
        "one_element": (1,) * len(shape),
        "channel": (shape[1],),
        "tensor": tuple(shape),
        "broadcast": tuple(1 if i in (1, len(shape) - 2) else s for i, s in enumerate(shape)),
    }
    drawn = make_tensor(shapes[operand], torch.float32, layout, seed=seed)
    # Elementwise, so that the layout survives.
    tensor = (drawn.sign() + 0.5 * drawn.tanh()).to(dtype)
    aligned = tensor.view(-1, *(1,) * (len(shape) - 2)) if operand == "channel" else tensor
    return Twin(make(tensor), lambda v, conv: function(v, aligned.to(v.dtype)))


def layer_norm(width: int, *, affine: bool = True, eps: float = 1e-5, seed: int = 0) -> Twin:
    """LayerNorm over the last axis, with or without weight and bias."""
    weight = make_tensor((width,), seed=seed) if affine else None
    bias = make_tensor((width,), seed=seed + 1) if affine else None

    def function(v: Tensor, conv: Tensor) -> Tensor:
        cast = [None if t is None else t.to(v.dtype) for t in (weight, bias)]
        return F.layer_norm(v, (width,), cast[0], cast[1], eps)

    return Twin(E.layer_norm((width,), weight, bias, eps), function)


def pool(kind: str, window: int | tuple[int, ...], ceil_mode: bool = False) -> Twin:
    """``kind`` is avg or max; stride = window."""
    step = {"avg": E.avg_pool, "max": E.max_pool}[kind](window, ceil_mode)
    functions = {rank: getattr(F, f"{kind}_pool{rank}d") for rank in (1, 2, 3)}
    return Twin(step, lambda v, conv: functions[v.dim() - 2](v, window, ceil_mode=ceil_mode))


# ---- Cases ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Case:
    """One public call: ``function`` by name, its tensors, its parameters by keyword, its chains."""

    function: str
    x: Tensor
    weights: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...] = (None,)
    parameters: dict[str, Any] = field(default_factory=dict)
    chain: tuple[Twin, ...] = ()
    between: tuple[Twin, ...] = ()

    @property
    def rank(self) -> int:
        return int(self.function[-2])

    @property
    def separable(self) -> bool:
        return self.function == "depthwise_separable_conv2d"

    def arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments of the public function."""
        tensors: list[Any] = [self.x, *self.weights, *self.biases]
        named = {**self.parameters, "epilogue": [t.step for t in self.chain]}
        if self.separable:
            named["between"] = [t.step for t in self.between]
        return tensors, named

    def public(self) -> Tensor:
        """What the public function returns."""
        tensors, named = self.arguments()
        result: Tensor = getattr(jitconv, self.function)(*tensors, **named)
        return result

    def call(self) -> Call:
        """The checked Call behind the public function, at the precision that its expected value asks for."""
        tensors, named = self.arguments()
        chain = named.pop("epilogue")
        defaults: dict[str, Any] = {"stride": 1, "padding": 0, "dilation": 1}
        if self.separable:
            if len(self.biases) == 1:
                tensors.append(None)
            between = named.pop("between")
            return functional.separable_call(*tensors, between, chain, "ieee", **{**defaults, **named})[0]
        defaults["groups"] = 1
        return functional.convolution_call(
            self.function, self.rank, "transpose" in self.function, *tensors, chain, "ieee", **{**defaults, **named}
        )[0]

    def to(self, device: torch.device | str) -> Case:
        """The same case on another device; what is expected stays on the CPU."""

        def moved(t: Twin) -> Twin:
            return replace(t, step=t.step.with_tensors(on_device(v, device) for v in t.step.tensors()))

        return replace(
            self,
            x=on_device(self.x, device),
            weights=tuple(on_device(w, device) for w in self.weights),
            biases=tuple(None if b is None else on_device(b, device) for b in self.biases),
            chain=tuple(moved(t) for t in self.chain),
            between=tuple(moved(t) for t in self.between),
        )

    def expected(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """The result in torch, computed in ``dtype`` throughout, from the tensors that :meth:`to` left behind."""
        x, weights, biases = self.x.to("cpu", dtype), [w.to("cpu", dtype) for w in self.weights], self.biases
        first, *rest = [None if b is None else b.to("cpu", dtype) for b in biases]
        v = self._convolution(x, weights[0], first)
        if self.separable:
            v = apply(self.between, v)
            v = F.conv2d(v, weights[1], rest[0] if rest else None)
        return apply(self.chain, v)

    def _convolution(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        parameters = dict(self.parameters)
        if "transpose" in self.function:
            return getattr(F, self.function)(x, weight, bias, **parameters)
        padding, mode = parameters.pop("padding", 0), parameters.pop("padding_mode", "zeros")
        if self.separable:
            parameters["groups"] = x.shape[-3]
        if not isinstance(padding, str) and (mode != "zeros" or isinstance(padding, tuple)):
            padding = (padding,) * self.rank if isinstance(padding, int) else padding
            sides = [side for p in reversed(padding) for side in ((p, p) if isinstance(p, int) else p)]
            x = F.pad(x, sides, mode="constant" if mode == "zeros" else mode)
            padding = 0
        elif isinstance(padding, str):
            dilation = _each(parameters.get("dilation", 1), self.rank)
            extents = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
            totals = extents if padding == "same" else [0] * self.rank
            sides = [side for t in reversed(totals) for side in (t // 2, t - t // 2)]
            x = F.pad(x, sides, mode="constant" if mode == "zeros" else mode)
            padding = 0
        return getattr(F, f"conv{self.rank}d")(x, weight, bias, padding=padding, **parameters)

    def __repr__(self) -> str:
        def show(tensor: Tensor | None) -> str:
            return "None" if tensor is None else f"{tuple(tensor.shape)} strides {tensor.stride()}"

        tensors = "; ".join(show(t) for t in (self.x, *self.weights, *self.biases))
        chains = f"between {[t.step for t in self.between]}, " if self.separable else ""
        chains += f"epilogue {[t.step for t in self.chain]}"
        return f"{self.function}({tensors}; {self.x.dtype}, {self.parameters}, {chains})"


def _each(value: int | tuple[int, ...], rank: int) -> tuple[int, ...]:
    return (value,) * rank if isinstance(value, int) else value


def apply(chain: Iterable[Twin], v: Tensor) -> Tensor:
    """The chain in torch, in the dtype of ``v``."""
    conv_value = v
    for t in chain:
        v = t.torch(v, conv_value)
    return v


# ---- Comparison -----------------------------------------------------------------------------------------


def run_emulated(call: Call, arch: str | None = None, **options: Any) -> Tensor:
    """``call`` in the emulator, by the kernels of ``arch``.

    Default: float32 by FFMA kernels, which an architecture without TF32 gets, other types by those of mma.sync. Kernels
    that take longer to build have tests of their own.
    """
    if arch is None:
        arch = "sm_75" if call.x.dtype == torch.float32 else "sm_80"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "EMULATED_ARCH", arch)
        return emulated.run(call, **options)


def assert_matches(case: Case, result: Tensor) -> None:
    """Shape, dtype and values of ``result``: an error no larger than 5e-7 of the largest value, or twice torch's own.

    Values of a 16-bit type must be those numbers within that error, rounded once.
    """
    exact = case.expected()
    assert result.shape == exact.shape, case
    assert result.dtype == case.x.dtype, case
    if exact.numel() == 0:
        return
    result = result.cpu()
    bound = tolerance(exact, case.expected(torch.float32))
    if case.x.dtype == torch.float32:
        low, high = exact - bound, exact + bound
    else:
        low, high = (exact - bound).to(case.x.dtype), (exact + bound).to(case.x.dtype)
    inside = (result >= low) & (result <= high)
    # What is not finite must be the same: both NaN, or the same infinity.
    same = (result.isnan() & exact.isnan()) | (result.double() == exact)
    wrong = ~torch.where(exact.isfinite(), inside, same)
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{case}: {int(wrong.sum())} of {wrong.numel()} elements are wrong, the first at {at}: "
            f"{result[at].item()!r} for {exact[at].item()!r}, allowed error {bound:.3g}"
        )


def tolerance(exact: Tensor, in_float32: Tensor) -> float:
    """The error that is allowed before the last rounding."""
    finite = exact.isfinite()
    if not finite.any():
        return 0.0
    largest = float(exact[finite].abs().max())
    own = float((in_float32[finite].double() - exact[finite]).nan_to_num(0.0, 0.0, 0.0).abs().max())
    return max(5e-7 * largest, 2 * own)


def expected_format(x: Tensor, weights: Sequence[Tensor]) -> torch.memory_format:
    """channels_last(_3d) if x or a weight is that and not also contiguous, else contiguous."""
    last = CHANNELS_LAST.get(x.dim() - 2)
    tensors = (x, *weights)
    if last is not None and any(t.is_contiguous(memory_format=last) and not t.is_contiguous() for t in tensors):
        return last
    return torch.contiguous_format


# ---- Random cases ---------------------------------------------------------------------------------------

_CHANNEL_COUNTS = (1, 2, 3, 5, 8, 16, 17, 33, 64, 96)
_FUNCTIONS = (
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "depthwise_separable_conv2d",
)  # fmt: skip


def random_case(rng: random.Random, *, largest: int = 4096, dtypes: Sequence[torch.dtype] | None = None) -> Case:
    """A case over operators, dtypes, layouts, odd sizes and chains, with about ``largest`` input positions at most."""
    function = rng.choice(_FUNCTIONS)
    dtype = rng.choice(tuple(dtypes or (torch.float32, torch.float16, torch.bfloat16)))
    if function == "depthwise_separable_conv2d":
        case = _random_separable(rng, dtype, largest)
    else:
        case = _random_convolution(rng, function, dtype, largest)
    return replace(case, chain=random_chain(rng, tuple(case.expected().shape)))


def random_chain(rng: random.Random, shape: tuple[int, ...], longest: int = 4) -> tuple[Twin, ...]:
    """Up to ``longest`` steps that fit a value of ``shape``, rows and windows among them."""
    chain: list[Twin] = []
    value_shape = shape
    for _ in range(rng.randint(0, longest)):
        kind = rng.choice(("pointwise", "pointwise", "operand", "operand", "norm", "pool"))
        if kind == "pointwise":
            chain.append(POINTWISE[rng.choice(TAME)]())
        elif kind == "operand":
            chain.append(_random_operand(rng, value_shape, pooled=value_shape != shape))
        elif kind == "norm" and value_shape[-1] > 2:
            chain.append(layer_norm(value_shape[-1], affine=rng.random() < 0.5, seed=rng.randint(0, 1000)))
        elif kind == "pool":
            window = tuple(rng.randint(1, min(3, extent)) for extent in value_shape[2:])
            ceil_mode = rng.random() < 0.5
            chain.append(pool(rng.choice(("avg", "max")), window, ceil_mode))
            value_shape = _pooled(value_shape, window, ceil_mode)
    return tuple(chain)


def _pooled(shape: tuple[int, ...], window: tuple[int, ...], ceil_mode: bool) -> tuple[int, ...]:
    return (*shape[:2], *(-(-e // w) if ceil_mode else e // w for e, w in zip(shape[2:], window, strict=True)))


def _random_operand(rng: random.Random, shape: tuple[int, ...], pooled: bool) -> Twin:
    kind = rng.choice([k for k in OPERANDS if not (pooled and k == "conv")])
    # Division by the convolution's own value has no bounded slope.
    name = rng.choice([n for n in BINARY if not (kind == "conv" and n == "div")])
    layout = rng.choice(LAYOUTS) if kind in ("tensor", "channel") else "contiguous"
    return binary(name, kind, shape, seed=rng.randint(0, 1000), layout=layout)


def _random_extents(rng: random.Random, rank: int, largest: int, least: Sequence[int]) -> tuple[int, ...]:
    """Spatial extents, each at least ``least``, with a product of about ``largest`` at most."""
    side = max(1, round(largest ** (1 / rank)))
    return tuple(max(low, rng.randint(1, side)) for low in least)


def _random_convolution(rng: random.Random, function: str, dtype: torch.dtype, largest: int) -> Case:
    rank, transposed = int(function[-2]), "transpose" in function
    groups = rng.choice((1, 1, 1, 2, 3))
    channels = rng.choice(_CHANNEL_COUNTS[:7]) * groups
    outputs = rng.choice(_CHANNEL_COUNTS) * groups
    if rng.random() < 0.15:
        groups, outputs = channels, channels * rng.choice((1, 2))
    kernel = tuple(rng.choice((1, 2, 3, 3, 4, 5)) for _ in range(rank))
    stride = tuple(rng.choice((1, 1, 2, 3, 4)) for _ in range(rank))
    dilation = tuple(rng.choice((1, 1, 2, 3)) for _ in range(rank))
    batch = rng.choice((1, 2, 3, 5))
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    extents = _random_extents(rng, rank, max(largest // batch // groups, 1), [1] * rank if transposed else reach)
    parameters: dict[str, Any] = {"stride": stride, "dilation": dilation, "groups": groups}
    if transposed:
        extra = tuple(rng.randint(0, max(s, d) - 1) for s, d in zip(stride, dilation, strict=True))
        full = [(e - 1) * s + r + o for e, s, r, o in zip(extents, stride, reach, extra, strict=True)]
        parameters["output_padding"] = extra
        parameters["padding"] = tuple(rng.randint(0, min(2, (f - 1) // 2)) for f in full)
    else:
        parameters["padding"], parameters["padding_mode"] = _random_padding(rng, extents)
    weight_shape = (channels, outputs // groups) if transposed else (outputs, channels // groups)
    taps = 1
    for k in kernel:
        taps *= k
    return Case(
        function,
        _random_tensor(rng, (batch, channels, *extents), dtype),
        (_random_tensor(rng, (*weight_shape, *kernel), dtype, scale=(channels // groups * taps) ** -0.5),),
        (_random_tensor(rng, (outputs,), dtype) if rng.random() < 0.5 else None,),
        parameters,
    )


def _random_padding(rng: random.Random, extents: tuple[int, ...]) -> tuple[tuple[tuple[int, int], ...], str]:
    mode = rng.choice(("zeros", "zeros", "replicate", "reflect", "circular"))
    limits = [min(3, {"reflect": e - 1, "circular": e}.get(mode, 3)) for e in extents]
    return tuple((rng.randint(0, limit), rng.randint(0, limit)) for limit in limits), mode


def _random_separable(rng: random.Random, dtype: torch.dtype, largest: int) -> Case:
    channels, multiplier = rng.choice(_CHANNEL_COUNTS[:7]), rng.choice((1, 1, 2, 3))
    outputs, batch = rng.choice(_CHANNEL_COUNTS), rng.choice((1, 2, 3))
    kernel = (rng.choice((1, 2, 3, 5)), rng.choice((1, 3, 4)))
    dilation = (rng.choice((1, 2)), rng.choice((1, 2)))
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    extents = _random_extents(rng, 2, max(largest // batch, 1), reach)
    padding = tuple((rng.randint(0, 3), rng.randint(0, 3)) for _ in extents)
    middle = channels * multiplier
    names = [rng.choice(TAME) for _ in range(rng.randint(0, 2))]
    return Case(
        "depthwise_separable_conv2d",
        _random_tensor(rng, (batch, channels, *extents), dtype),
        (
            _random_tensor(rng, (middle, 1, *kernel), dtype, scale=(kernel[0] * kernel[1]) ** -0.5),
            _random_tensor(rng, (outputs, middle, 1, 1), dtype, scale=middle**-0.5),
        ),
        tuple(_random_tensor(rng, (n,), dtype) if rng.random() < 0.5 else None for n in (middle, outputs)),
        {"stride": (rng.randint(1, 3), rng.randint(1, 3)), "padding": padding, "dilation": dilation},
        between=tuple(POINTWISE[name]() for name in names),
    )


def _random_tensor(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return make_tensor(shape, dtype, rng.choice(LAYOUTS), seed=rng.randint(0, 2**31), scale=scale)
