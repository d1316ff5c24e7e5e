"""A seeded generator of calls over operators, dtypes, layouts, odd sizes and epilogues, their oracles and limits."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch import Tensor

from jitconv import epilogue as E
from jitconv import functional, reference
from jitconv.program import Call

CHANNELS = (1, 2, 3, 5, 8, 16, 17, 32, 64, 65, 96, 130)
_SPATIAL = {1: (1, 200), 2: (1, 24), 3: (1, 11)}
_ACTIVATIONS = (
    E.relu, E.relu6, E.leaky_relu, E.elu, E.selu, E.celu, E.gelu, E.silu, E.mish, E.tanh, E.sigmoid, E.logsigmoid,
    E.softplus, E.softsign, E.hardswish, E.hardsigmoid, E.hardtanh, E.abs, E.neg, E.square,
)  # fmt: skip


class Generator:
    """Random calls from one seed; every parameter is random and none is an identity.

    ``precision`` is that of every call: a name, or None for torch's setting as the call is drawn.
    """

    def __init__(self, seed: int, device: str = "cuda", precision: str | None = None) -> None:
        self.precision = precision
        self.random = random.Random(seed)
        self.torch = torch.Generator(device).manual_seed(seed)
        self.device = device

    def tensor(self, *shape: int, dtype: torch.dtype) -> Tensor:
        values = torch.randn(shape, generator=self.torch, device=self.device, dtype=torch.float32)
        return values.to(dtype)

    def laid_out(self, tensor: Tensor) -> Tensor:
        """The same values contiguous, channels_last, with permuted strides, or as every second element."""
        choice = self.random.choice(("contiguous", "contiguous", "channels_last", "permuted", "strided"))
        if choice == "channels_last" and tensor.dim() in (4, 5):
            last = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
            return tensor.contiguous(memory_format=last)
        if choice == "permuted":
            order = list(range(tensor.dim()))
            self.random.shuffle(order)
            inverse = [order.index(i) for i in range(tensor.dim())]
            return tensor.permute(order).contiguous().permute(inverse)
        if choice == "strided":
            wide = torch.empty(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype, device=tensor.device)
            wide[..., ::2] = tensor
            return wide[..., ::2]
        return tensor

    def call(self) -> Call:
        """A valid call with at least one output."""
        while True:
            try:
                return self._call()
            except RuntimeError as error:
                # Sizes are drawn without looking: those that torch refuses too are drawn again.
                if not str(error).startswith(("conv", "depthwise")) and "output would be empty" not in str(error):
                    raise

    def _call(self) -> Call:
        r = self.random
        dtype = r.choice((torch.float32, torch.float32, torch.float16, torch.bfloat16))
        operator = r.choice(("conv", "conv", "conv_transpose", "depthwise_separable"))
        if operator == "depthwise_separable":
            return self._separable(dtype)
        transposed = operator == "conv_transpose"
        rank = r.choice((1, 2, 3))
        groups = r.choice((1, 1, 1, 2, 3, 8))
        c = groups * r.choice((1, 2, 3, 5, 16) if groups > 1 else CHANNELS)
        k = groups * r.choice((1, 2, 3, 5, 16) if groups > 1 else CHANNELS)
        kernel = [r.choice((1, 2, 3, 3, 4, 5)) for _ in range(rank)]
        stride = [r.choice((1, 1, 2, 3)) for _ in range(rank)]
        dilation = [r.choice((1, 1, 1, 2)) for _ in range(rank)]
        spatial = [r.randint(*_SPATIAL[rank]) for _ in range(rank)]
        x = self.laid_out(self.tensor(r.choice((1, 2, 3)), c, *spatial, dtype=dtype))
        scale = (c // groups * torch.Size(kernel).numel()) ** -0.5
        shape = (c, k // groups) if transposed else (k, c // groups)
        weight = self.laid_out(self.tensor(*shape, *kernel, dtype=dtype) * scale)
        bias = self.tensor(k, dtype=dtype) if r.random() < 0.7 else None
        parameters: dict[str, Any] = {"stride": stride, "dilation": dilation, "groups": groups}
        if transposed:
            parameters["padding"] = [r.randint(0, 2) for _ in range(rank)]
            parameters["output_padding"] = [
                r.randint(0, max(s, d) - 1) for s, d in zip(stride, dilation, strict=True)
            ]
        else:
            mode = r.choice(("zeros", "zeros", "replicate", "reflect", "circular"))
            parameters["padding_mode"] = mode
            parameters["padding"] = [[r.randint(0, 2), r.randint(0, 2)] for _ in range(rank)]
        name = f"conv_transpose{rank}d" if transposed else f"conv{rank}d"

        def make(epilogue: list[E.Step]) -> Call:
            return functional.convolution_call(
                name, rank, transposed, x, weight, bias, epilogue, self.precision, **parameters
            )[0]

        out = reference_shape(make([]))
        if 0 in out:
            raise RuntimeError("convolution without an output: draw again")
        return make(self.epilogue(out, dtype))

    def _separable(self, dtype: torch.dtype) -> Call:
        r = self.random
        c, multiplier, k = r.choice(CHANNELS), r.choice((1, 1, 2)), r.choice(CHANNELS)
        kernel = [r.choice((1, 3, 3, 5, 7)) for _ in range(2)]
        x = self.laid_out(self.tensor(r.choice((1, 2)), c, r.randint(1, 24), r.randint(1, 24), dtype=dtype))
        mid = c * multiplier
        dw = self.laid_out(self.tensor(mid, 1, *kernel, dtype=dtype) * (kernel[0] * kernel[1]) ** -0.5)
        pw = self.tensor(k, mid, 1, 1, dtype=dtype) * mid**-0.5
        dw_bias = self.tensor(mid, dtype=dtype) if r.random() < 0.5 else None
        pw_bias = self.tensor(k, dtype=dtype) if r.random() < 0.5 else None
        between = [r.choice(_ACTIVATIONS)()] if r.random() < 0.5 else []
        parameters = {"stride": r.choice((1, 2)), "padding": [k // 2 for k in kernel], "dilation": r.choice((1, 2))}

        def make(epilogue: list[E.Step]) -> Call:
            return functional.separable_call(
                x, dw, pw, dw_bias, pw_bias, between, epilogue, self.precision, **parameters
            )[0]

        return make(self.epilogue(reference_shape(make([])), dtype))

    def epilogue(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[E.Step]:
        """Up to four steps that fit a value of ``shape``."""
        steps: list[E.Step] = []
        for _ in range(self.random.randint(0, 4)):
            kind = self.random.choice(("activation", "activation", "operand", "operand", "norm", "pool", "value"))
            if kind == "activation":
                steps.append(self.random.choice(_ACTIVATIONS)())
            elif kind == "operand":
                step = self.random.choice((E.add, E.sub, E.mul, E.minimum, E.maximum))
                steps.append(step(self.operand(shape, dtype)))
            elif kind == "norm" and shape[-1] > 1:
                affine = [self.tensor(shape[-1], dtype=dtype) for _ in range(2)]
                steps.append(E.layer_norm(shape[-1], *affine, eps=self.random.choice((1e-5, 1e-2))))
            elif kind == "pool":
                window = tuple(self.random.choice((1, 2, 3)) if s >= 3 else 1 for s in shape[2:])
                ceil_mode = self.random.random() < 0.3
                steps.append(self.random.choice((E.avg_pool, E.max_pool))(window, ceil_mode))
                shape = (
                    *shape[:2],
                    *((-(-s // w) if ceil_mode else s // w) for s, w in zip(shape[2:], window, strict=True)),
                )
            elif kind == "value" and all(step.needs != "window" for step in steps):
                steps.append(E.mul(E.CONV))
        return steps

    def operand(self, shape: tuple[int, ...], dtype: torch.dtype) -> E.Operand:
        kind = self.random.choice(("number", "scalar", "channel", "tensor", "broadcast"))
        if kind == "number":
            return self.random.uniform(-2, 2)
        if kind == "scalar":
            return self.tensor(dtype=torch.float32)
        if kind == "channel":
            return self.tensor(shape[1], dtype=dtype)
        if kind == "broadcast":
            return self.tensor(shape[0], shape[1], *(1 for _ in shape[2:]), dtype=dtype)
        return self.laid_out(self.tensor(*shape, dtype=dtype))


def reference_shape(call: Call) -> tuple[int, ...]:
    """Shape of the convolution's output, from torch itself (on meta tensors)."""
    meta = [t.to("meta") for t in functional.differentiable(call)]
    return tuple(functional.run_reference(functional.replaced(call, meta)).shape)


def exact(call: Call) -> Tensor:
    """The call in float64, by torch."""
    doubles = [t.double() for t in functional.differentiable(call)]
    return functional.run_reference(functional.replaced(call, doubles))


def convolved(call: Call) -> Tensor:
    """The value that the epilogue of ``call`` is applied to, by torch in the dtype of x."""
    v, g = call.x, call.geometry
    convolve = reference.conv_transpose if call.operator == "conv_transpose" else reference.convolution
    v = convolve(v, call.weights[0], call.biases[0], g)
    if call.operator == "depthwise_separable":
        v = E.reference(call.between, v)
        v = torch.nn.functional.conv2d(v, call.weights[1], call.biases[1])
    return v


def eager(call: Call) -> Tensor:
    """The call as eager torch runs it in the dtype of x: each operator rounds."""
    return E.reference(call.epilogue, convolved(call))


def magnified(call: Call, expected: Tensor, relative: float) -> float:
    """The error of an exact epilogue behind a convolution with an error of ``relative``: a square doubles it."""
    doubles = functional.replaced(call, [t.double() for t in functional.differentiable(call)])
    v = convolved(doubles)
    noise = torch.randn(v.shape, generator=torch.Generator(v.device).manual_seed(0), device=v.device, dtype=v.dtype)
    return error(E.reference(doubles.epilogue, v + noise * (relative * v.norm() / noise.norm())), expected)


@contextmanager
def conv_setting(value: str) -> Iterator[None]:
    """torch's own setting for convolutions in float32: ``"tf32"`` or ``"ieee"``."""
    before = torch.backends.cudnn.conv.fp32_precision
    torch.backends.cudnn.conv.fp32_precision = value
    try:
        yield
    finally:
        torch.backends.cudnn.conv.fp32_precision = before


def tf32(t: Tensor) -> Tensor:
    """``t`` rounded to 10 bits of mantissa, to nearest, ties away from zero."""
    bits = t.contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


def rounded(call: Call) -> Tensor:
    """The exact result of the convolution of operands rounded to TF32."""
    doubles = [t.double() for t in functional.differentiable(call)]
    doubles[0], doubles[1] = tf32(call.x).double(), tf32(call.weights[0]).double()
    return functional.run_reference(functional.replaced(call, doubles))


#: Fewer outputs than this say little about an error: another order of the same sums moves it by more than a tenth.
_MANY = 4096


def allowed(call: Call, expected: Tensor) -> float:
    """The largest error that is right for ``call``: that of PyTorch at the same precision, and a tenth.

    tf32: or that of an exact convolution of rounded operands. ieee: or 2e-7, or what the epilogue makes of 2e-7 of
    the convolution's own value; of other operators than the forward convolution, and where outputs are few, or
    normalised by each other (which magnifies errors by what happens to be in a row), twice PyTorch's or 5e-7.
    """
    if call.x.dtype != torch.float32:
        with conv_setting("ieee"):
            return 1.1 * error(eager(call), expected)
    if call.operator == "conv" and call.precision == "tf32":
        with conv_setting("tf32"):
            peer = error(eager(call), expected)
        # What FFMA serves at tf32 is an fp32 result, and cuDNN may serve it so as well.
        return max(1.1 * max(peer, error(rounded(call), expected)), magnified(call, expected, 2e-7), 2e-7)
    with conv_setting("ieee"):
        peer = error(eager(call), expected)
    rows = any(step.needs == "row" for step in call.epilogue)
    if call.operator != "conv" or expected.numel() < _MANY or rows:
        return max(2 * peer, 5e-7, magnified(call, expected, 5e-7))
    return max(1.1 * peer, 2e-7, magnified(call, expected, 2e-7))


def over_draws(call: Call, run: Callable[[Call], Tensor], draws: int = 5) -> tuple[float, float]:
    """Median error of ``run(call)``, and the median of what is allowed, over new values of x, drawn in place."""
    reached, limits = [], []
    for seed in range(draws):
        generator = torch.Generator(call.x.device).manual_seed(seed)
        call.x.normal_(generator=generator)
        expected = exact(call)
        reached.append(error(run(call), expected))
        limits.append(allowed(call, expected))
    return median(reached), median(limits)


def error(result: Tensor, expected: Tensor) -> float:
    """Relative L2 error; inf where NaN or Inf are not in the same places."""
    result = result.double()
    if not torch.equal(result.isfinite(), expected.isfinite()):
        return float("inf")
    finite = expected.isfinite()
    difference = (result - expected)[finite].norm()
    scale = expected[finite].norm()
    return float(difference / scale) if scale > 0 else float(difference)


def describe(call: Call) -> str:
    tensors = {name: (tuple(t.shape), t.stride()) for name, t in call.tensors().items()}
    return f"{call.function} {call.x.dtype} {call.geometry} {call.between} {call.epilogue} {tensors}"
