"""The public operators: arguments of their torch.nn.functional namesakes, plus what follows the convolution.

Every call takes one of two paths. CUDA tensors of float32, float16 and bfloat16 run generated kernels; CPU
tensors, float64 and complex take PyTorch's own operators, with the same semantics. ``jitconv.stats()`` counts
which path served a call, and why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from jitconv import epilogue as E
from jitconv import fast_path, reference, validation
from jitconv.precision import resolved
from jitconv.problem import DTYPES
from jitconv.program import Call, output_format
from jitconv.stats import count

__all__ = [
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "depthwise_separable_conv2d",
]  # fmt: skip

Ints = int | Sequence[int]
Steps = Iterable[E.Step] | E.Step | None


_log = logging.getLogger("jitconv")

_DTYPES = frozenset(getattr(torch, name) for name in DTYPES)


def conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: validation.Padding = 0,
    dilation: Ints = 1,
    groups: int = 1,
    *,
    padding_mode: str = "zeros",
    epilogue: Steps = (),
    precision: str | None = None,
) -> Tensor:
    """1-D convolution with everything that follows it, in one call.

    As :func:`jitconv.conv2d`, for input ``[N, C, W]`` or ``[C, W]`` and weight ``[K, C/groups, kW]``.

    >>> import torch, jitconv
    >>> jitconv.conv1d(torch.randn(1, 3, 100), torch.randn(4, 3, 5), padding=((4, 0),)).shape  # causal
    torch.Size([1, 4, 100])
    """
    return _convolution(
        "conv1d", 1, False, input, weight, bias, epilogue, precision,
        stride=stride, padding=padding, dilation=dilation, groups=groups, padding_mode=padding_mode,
    )  # fmt: skip


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: validation.Padding = 0,
    dilation: Ints = 1,
    groups: int = 1,
    *,
    padding_mode: str = "zeros",
    epilogue: Steps = (),
    precision: str | None = None,
) -> Tensor:
    """2-D convolution with everything that follows it, in one call.

    Arguments up to ``groups`` are those of :func:`torch.nn.functional.conv2d`.

    Args:
        input: ``[N, C, H, W]`` or ``[C, H, W]``; float32, float16 or bfloat16 (float64 and complex take torch's path).
        weight: ``[K, C/groups, kH, kW]``, of the dtype and on the device of ``input``.
        bias: ``[K]`` or None.
        stride: int or one int per dimension; likewise ``dilation``.
        padding: int, one int or (before, after) pair per dimension, ``'valid'``, or ``'same'`` (stride 1 only).
        dilation: spacing of the filter taps.
        groups: must divide C and K.
        padding_mode: ``'zeros'``, ``'replicate'``, ``'reflect'`` or ``'circular'``.
        epilogue: steps of :mod:`jitconv.epilogue`, applied in order.
        precision: how float32 is multiplied. ``'tf32'``: operands rounded to TF32, on the tensor cores of sm_80 and up.
            ``'ieee'``: with fp32's accuracy over fp32's whole range; by three TF32 products where tensor cores outrun
            fp32 (FFMA) by more than that costs (sm_80, sm_90, sm_100), else by FFMA. None: as torch's convolutions
            are multiplied at this moment, which ``torch.backends.cudnn.conv.fp32_precision`` says (``'tf32'`` unless
            changed; anything but that is ``'ieee'``). One or two channels a group, and filters whose tile would not
            fit shared memory, are multiplied by FFMA at any precision. It means nothing to other dtypes, to CPU
            tensors, and to what PyTorch computes, gradients included: that follows torch's setting.

    Returns:
        ``[N, K, oH, oW]`` (or what the epilogue makes of it) in the dtype of ``input``, rounded once at the end;
        channels_last if input or weight is that and not also contiguous, else contiguous.

    Raises:
        RuntimeError, TypeError, ValueError, NotImplementedError: what torch raises for the same mistake, naming
            the argument, its value and what was expected.

    >>> import torch, jitconv
    >>> from jitconv import epilogue as E
    >>> x, w = torch.randn(1, 3, 8, 8), torch.randn(4, 3, 3, 3)
    >>> jitconv.conv2d(x, w, padding="same", epilogue=[E.relu(), E.max_pool(2)]).shape
    torch.Size([1, 4, 4, 4])
    """
    return _convolution(
        "conv2d", 2, False, input, weight, bias, epilogue, precision,
        stride=stride, padding=padding, dilation=dilation, groups=groups, padding_mode=padding_mode,
    )  # fmt: skip


def conv3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: validation.Padding = 0,
    dilation: Ints = 1,
    groups: int = 1,
    *,
    padding_mode: str = "zeros",
    epilogue: Steps = (),
    precision: str | None = None,
) -> Tensor:
    """3-D convolution with everything that follows it, in one call.

    As :func:`jitconv.conv2d`, for input ``[N, C, D, H, W]`` or ``[C, D, H, W]`` and weight
    ``[K, C/groups, kD, kH, kW]``. ``padding=((2, 0), 1, 1)`` is causal in time.

    >>> import torch, jitconv
    >>> from jitconv import epilogue as E
    >>> x, w = torch.randn(1, 3, 6, 8, 8), torch.randn(4, 3, 3, 3, 3)
    >>> jitconv.conv3d(x, w, epilogue=[E.mish(), E.tanh()]).shape
    torch.Size([1, 4, 4, 6, 6])
    """
    return _convolution(
        "conv3d", 3, False, input, weight, bias, epilogue, precision,
        stride=stride, padding=padding, dilation=dilation, groups=groups, padding_mode=padding_mode,
    )  # fmt: skip


def conv_transpose1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
    *,
    epilogue: Steps = (),
    precision: str | None = None,
) -> Tensor:
    """1-D transposed convolution with everything that follows it, in one call.

    As :func:`jitconv.conv_transpose2d`, for input ``[N, C, W]`` or ``[C, W]`` and weight ``[C, K/groups, kW]``.

    >>> import torch, jitconv
    >>> jitconv.conv_transpose1d(torch.randn(1, 3, 10), torch.randn(3, 4, 16), stride=8, padding=4).shape
    torch.Size([1, 4, 80])
    """
    return _convolution(
        "conv_transpose1d", 1, True, input, weight, bias, epilogue, precision,
        stride=stride, padding=padding, dilation=dilation, groups=groups, output_padding=output_padding,
    )  # fmt: skip


def conv_transpose2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
    *,
    epilogue: Steps = (),
    precision: str | None = None,
) -> Tensor:
    """2-D transposed convolution with everything that follows it, in one call.

    Arguments up to ``dilation`` are those of :func:`torch.nn.functional.conv_transpose2d`, in its order.

    Args:
        input: ``[N, C, H, W]`` or ``[C, H, W]``; float32, float16 or bfloat16 (float64 and complex take torch's path).
        weight: ``[C, K/groups, kH, kW]``, of the dtype and on the device of ``input``.
        bias: ``[K]`` or None.
        stride: int or one int per dimension; likewise ``padding`` and ``dilation``.
        padding: how much of the full result is cut off on each side.
        output_padding: extra extent on one side, less than stride or dilation.
        groups: must divide C.
        dilation: spacing of the filter taps.
        epilogue: steps of :mod:`jitconv.epilogue`, applied in order.
        precision: ``'ieee'``, ``'tf32'`` or None, as in :func:`jitconv.conv2d`; without effect yet: every precision
            is multiplied in fp32 (FFMA).

    Returns:
        ``[N, K, oH, oW]`` (or what the epilogue makes of it); dtype and memory format as in :func:`jitconv.conv2d`.

    Raises:
        RuntimeError, TypeError, ValueError, NotImplementedError: what torch raises for the same mistake, naming
            the argument, its value and what was expected.

    >>> import torch, jitconv
    >>> x, w = torch.randn(1, 3, 8, 8), torch.randn(3, 4, 2, 2)
    >>> jitconv.conv_transpose2d(x, w, stride=2).shape
    torch.Size([1, 4, 16, 16])
    """
    return _convolution(
        "conv_transpose2d", 2, True, input, weight, bias, epilogue, precision,
        stride=stride, padding=padding, dilation=dilation, groups=groups, output_padding=output_padding,
    )  # fmt: skip


def conv_transpose3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
    *,
    epilogue: Steps = (),
    precision: str | None = None,
) -> Tensor:
    """3-D transposed convolution with everything that follows it, in one call.

    As :func:`jitconv.conv_transpose2d`, for input ``[N, C, D, H, W]`` or ``[C, D, H, W]`` and weight
    ``[C, K/groups, kD, kH, kW]``.

    >>> import torch, jitconv
    >>> from jitconv import epilogue as E
    >>> x, w = torch.randn(1, 3, 2, 4, 4), torch.randn(3, 4, 3, 3, 3)
    >>> jitconv.conv_transpose3d(x, w, stride=2, padding=1, output_padding=1,
    ...                          epilogue=[E.layer_norm((8,)), E.avg_pool(2), E.gelu()]).shape
    torch.Size([1, 4, 2, 4, 4])
    """
    return _convolution(
        "conv_transpose3d", 3, True, input, weight, bias, epilogue, precision,
        stride=stride, padding=padding, dilation=dilation, groups=groups, output_padding=output_padding,
    )  # fmt: skip


def depthwise_separable_conv2d(
    x: Tensor,
    dw_weight: Tensor,
    pw_weight: Tensor,
    dw_bias: Tensor | None = None,
    pw_bias: Tensor | None = None,
    stride: Ints = 1,
    padding: validation.Padding = 0,
    dilation: Ints = 1,
    *,
    between: Steps = (),
    epilogue: Steps = (),
    precision: str | None = None,
) -> Tensor:
    """Depthwise then pointwise 2-D convolution in one kernel: the depthwise result is never in memory.

    Args:
        x: ``[N, C, H, W]`` or ``[C, H, W]``; float32, float16 or bfloat16 (float64 and complex take torch's path).
        dw_weight: ``[C·m, 1, kH, kW]``, m the channel multiplier.
        pw_weight: ``[K, C·m, 1, 1]``.
        dw_bias, pw_bias: ``[C·m]``, ``[K]`` or None.
        stride, padding, dilation: of the depthwise convolution, as in :func:`jitconv.conv2d`.
        between: pointwise steps on the depthwise result (with its bias), before the pointwise convolution.
        epilogue: steps after the pointwise convolution.
        precision: ``'ieee'``, ``'tf32'`` or None, as in :func:`jitconv.conv2d`; without effect yet: every precision
            is multiplied in fp32 (FFMA), in both convolutions.

    Returns:
        ``[N, K, oH, oW]`` (or what the epilogue makes of it); dtype and memory format as in :func:`jitconv.conv2d`.
        What lies between the convolutions stays in fp32.

    Raises:
        RuntimeError, TypeError, ValueError, NotImplementedError: what torch raises for the same mistake, naming
            the argument, its value and what was expected.

    >>> import torch, jitconv
    >>> from jitconv import epilogue as E
    >>> x, dw, pw = torch.randn(1, 8, 6, 6), torch.randn(8, 1, 3, 3), torch.randn(16, 8, 1, 1)
    >>> jitconv.depthwise_separable_conv2d(x, dw, pw, padding=1, between=[E.relu6()]).shape
    torch.Size([1, 16, 6, 6])
    """
    return _separable(
        x, dw_weight, pw_weight, dw_bias, pw_bias, between, epilogue, precision,
        stride=stride, padding=padding, dilation=dilation,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------
# From arguments to a checked Call, and from there to one of the two paths. What ran before skips all of that.


def _untraced(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``function`` for a caller that torch.compile traces: a break between two graphs, where tracing makes dozens."""
    untraced: Callable[..., Tensor] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return untraced


def _convolution(
    function: str,
    rank: int,
    transposed: bool,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    epilogue: Steps,
    precision: str | None,
    **parameters: Any,
) -> Tensor:
    if torch.compiler.is_dynamo_compiling():
        untraced = _untraced(_convolution)
        return untraced(function, rank, transposed, input, weight, bias, epilogue, precision, **parameters)
    seen = fast_path.read(function, (input, weight, bias), tuple(parameters.values()), (epilogue,), precision)
    out = fast_path.run(seen)
    if out is None:
        call, unbatched = convolution_call(
            function, rank, transposed, input, weight, bias, epilogue, precision, **parameters
        )
        out = _apply(call, unbatched, seen)
    return out


def _separable(
    x: Tensor,
    dw_weight: Tensor,
    pw_weight: Tensor,
    dw_bias: Tensor | None,
    pw_bias: Tensor | None,
    between: Steps,
    epilogue: Steps,
    precision: str | None,
    **parameters: Any,
) -> Tensor:
    tensors = (x, dw_weight, pw_weight, dw_bias, pw_bias)
    if torch.compiler.is_dynamo_compiling():
        return _untraced(_separable)(*tensors, between, epilogue, precision, **parameters)
    seen = fast_path.read(
        "depthwise_separable_conv2d", (x, dw_weight, dw_bias, pw_weight, pw_bias), tuple(parameters.values()),
        (between, epilogue), precision,
    )  # fmt: skip
    out = fast_path.run(seen)
    if out is None:
        call, unbatched = separable_call(*tensors, between, epilogue, precision, **parameters)
        out = _apply(call, unbatched, seen)
    return out


def convolution_call(
    function: str,
    rank: int,
    transposed: bool,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    epilogue: Steps,
    precision: str | None,
    **parameters: Any,
) -> tuple[Call, bool]:
    """Check the arguments of a (transposed) convolution; the Call, and whether ``input`` lacked a batch axis."""
    named = {"input": input, "weight": weight, "bias": bias}
    _check_tensors(function, named, optional=("bias",), transposed=transposed)
    precision = resolved(function, precision)
    x, batched = validation.batched(function, input, rank)
    geometry = validation.geometry(function, x, weight, transposed=transposed, **parameters)
    validation.check_convolution(function, x, weight, bias, geometry, transposed)
    chain = _chain(function, x, epilogue, "epilogue")
    call = Call(
        function=function,
        operator="conv_transpose" if transposed else "conv",
        x=x,
        weights=(weight,),
        biases=(bias,),
        geometry=geometry,
        prologue=(),
        between=(),
        epilogue=chain,
        memory_format=output_format(x, (weight,)),
        precision=precision,
    )
    return call, not batched


def separable_call(
    x: Tensor,
    dw_weight: Tensor,
    pw_weight: Tensor,
    dw_bias: Tensor | None,
    pw_bias: Tensor | None,
    between: Steps,
    epilogue: Steps,
    precision: str | None,
    **parameters: Any,
) -> tuple[Call, bool]:
    """Check the arguments of :func:`depthwise_separable_conv2d`; as :func:`convolution_call`."""
    function = "depthwise_separable_conv2d"
    named = {
        "x": x, "dw_weight": dw_weight, "pw_weight": pw_weight, "dw_bias": dw_bias, "pw_bias": pw_bias,
    }  # fmt: skip
    _check_tensors(function, named, optional=("dw_bias", "pw_bias"))
    precision = resolved(function, precision)
    batch, batched = validation.batched(function, x, 2, "x")
    channels = batch.shape[1]
    validation.check_separable(function, batch, dw_weight, pw_weight, dw_bias, pw_bias)
    geometry = validation.geometry(
        function, batch, dw_weight, groups=channels, weight_name="dw_weight", **parameters
    )
    validation.check_extents(function, batch, geometry, transposed=False, x_name="x")
    chain = _chain(function, x, between, "between")
    for i, step in enumerate(chain):
        if step.needs != "element":
            raise ValueError(
                f"{function}(): between[{i}]={step}: expected a pointwise step; a norm or a pool between the two "
                "convolutions needs two calls"
            )
    call = Call(
        function=function,
        operator="depthwise_separable",
        x=batch,
        weights=(dw_weight, pw_weight),
        biases=(dw_bias, pw_bias),
        geometry=geometry,
        prologue=(),
        between=chain,
        epilogue=_chain(function, x, epilogue, "epilogue"),
        memory_format=output_format(batch, (dw_weight, pw_weight)),
        precision=precision,
    )
    return call, not batched


def _check_tensors(
    function: str, named: dict[str, Tensor | None], optional: Sequence[str], transposed: bool = False
) -> None:
    """The tensor arguments by name, x first: tensors at all, of one dtype and device, of a dtype that convolves."""
    for name, value in named.items():
        if value is None and name in optional:
            continue
        validation.check_tensor(function, name, value)
    x_name, x = next(iter(named.items()))
    assert x is not None  # not optional, so checked above
    if transposed:
        # torch's transposed convolutions look at the dtype of x first, the others at the mixture.
        validation.check_dtype(function, x, x_name, transposed=True)
    for name, value in named.items():
        if value is not None:
            validation.check_like(function, x, name, value, x_name)
    validation.check_dtype(function, x, x_name, transposed=transposed)


def _chain(function: str, x: Tensor, steps: Steps, argument: str) -> tuple[E.Step, ...]:
    chain = E.as_chain(steps, f"{function}(): {argument}")
    validation.check_fusible(function, x, argument, chain)
    return chain


def torch_path_reason(call: Call) -> str | None:
    """Why PyTorch's own operators serve this call, or None where a generated kernel does."""
    device = call.x.device.type
    if device == "cpu":
        return "cpu tensor"
    return kernel_obstacle(call) or (None if device == "cuda" else f"{device} tensor")


def kernel_obstacle(call: Call) -> str | None:
    """What in the arguments, on whatever device, a generated kernel cannot read; None where there is nothing."""
    if call.x.dtype not in _DTYPES:
        return str(call.x.dtype).removeprefix("torch.")
    if call.x.shape[1] == 0:
        return "no channels"
    if _beyond_kernels(call):
        return "a parameter beyond 31 bits"
    if any(tensor.is_neg() for tensor in differentiable(call)):
        # The sign is a flag of the tensor: what is in memory has the other one.
        return "lazily negated tensor"
    if forward_ad._current_level >= 0 and any(_has_tangent(tensor) for tensor in differentiable(call)):
        # A kernel would compute the value and drop the tangent without a word.
        return "forward-mode differentiation"
    return None


def _beyond_kernels(call: Call) -> bool:
    """Whether a stride, dilation or padding does not fit the int that a kernel bakes it into."""
    g = call.geometry
    return max(*g.stride, *g.dilation, *(p for pair in g.padding for p in pair)) > 2**31 - 1


def _has_tangent(tensor: Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def _apply(call: Call, unbatched: bool, seen: fast_path.Seen | None) -> Tensor:
    from jitconv import program

    reason = torch_path_reason(call)
    if reason is not None:
        # Chains are checked here too, so that a mistake reads the same on every device.
        program.bind_chains(call)
        out = run_reference(call)
        if call.x.device.type != "cpu":
            _log.info("%s: served by torch (%s)", call.function, reason)
        count("torch_calls", reason=reason)
    else:
        tensors = list(differentiable(call))
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            out = _Fused.apply(call, *tensors)  # type: ignore[no-untyped-call]
        else:
            from jitconv import runtime

            out = runtime.run(call)
            if seen is not None:
                fast_path.remember(seen, call, runtime.prepared(call), unbatched)
    return out.squeeze(0) if unbatched else out


def run_reference(call: Call) -> Tensor:
    """``call`` by PyTorch's own operators, on any device."""
    return reference.run(
        call.operator,
        call.x,
        call.weights,
        call.biases,
        call.geometry,
        prologue=call.prologue,
        between=call.between,
        epilogue=call.epilogue,
        memory_format=call.memory_format,
    )


def differentiable(call: Call) -> Iterator[Tensor]:
    """Every tensor that a gradient may flow to, in a fixed order."""
    yield call.x
    yield from call.weights
    yield from (bias for bias in call.biases if bias is not None)
    for chain in call.chains().values():
        for step in chain:
            yield from step.tensors()


def replaced(call: Call, tensors: Iterable[Tensor]) -> Call:
    """``call`` on other tensors, given in the order of :func:`differentiable`."""
    source = iter(tensors)
    x = next(source)
    weights = tuple(next(source) for _ in call.weights)
    biases = tuple(None if bias is None else next(source) for bias in call.biases)
    chains = {
        phase: tuple(step.with_tensors(source) for step in chain) for phase, chain in call.chains().items()
    }
    return Call(
        call.function, call.operator, x, weights, biases, call.geometry,
        chains["prologue"], chains["between"], chains["epilogue"], call.memory_format, call.precision,
    )  # fmt: skip


#: Stands for a tensor that autograd holds, in the Call of a graph.
_SAVED = torch.empty(0, device="cpu")


class _Fused(torch.autograd.Function):
    """A generated kernel forward; backward through the torch reference, recomputed from the arguments."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor) -> Tensor:
        from jitconv import runtime

        # Autograd alone holds the arguments: it notices one that is changed in place before backward, frees them
        # after backward, and lets hooks move them elsewhere meanwhile.
        ctx.save_for_backward(*tensors)
        ctx.call = replaced(call, (_SAVED for _ in tensors))
        return runtime.run(call)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        # Gradients are recorded here when the caller asked for a graph of them (create_graph=True).
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            copies = [_copy(t, need, again) for t, need in zip(ctx.saved_tensors, needed, strict=True)]
            out = run_reference(replaced(ctx.call, copies))
            wanted = [copy for copy, need in zip(copies, needed, strict=True) if need]
            found = iter(torch.autograd.grad(out, wanted, grad, create_graph=again, allow_unused=True))
        return None, *(next(found) if need else None for need in needed)


def _copy(tensor: Tensor, differentiate: bool, again: bool) -> Tensor:
    """``tensor`` as a point of its own in a graph, so that one that stands in two places gets two gradients."""
    if differentiate and again:
        return tensor.view_as(tensor)
    return tensor.detach().requires_grad_(differentiate)
