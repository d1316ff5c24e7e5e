"""The public functions on CPU: torch's results, formats and modes, and an account of which path ran.

What is expected is written here in eager torch, step by step, not taken from jitconv's own reference.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

import jitconv
from jitconv import epilogue as E
from jitconv import functional, program

# Some of torch's own decompositions are still scripted.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")

CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")
TRANSPOSED = ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
SPATIAL = (5, 6, 7)


def tensors(function: str, dtype: torch.dtype = torch.float32, groups: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """x [2, 4, *], weight with 3 taps per dimension, bias [6]."""
    rank, generator = int(function[-2]), torch.Generator().manual_seed(3)
    shape = (4, 6 // groups) if function in TRANSPOSED else (6, 4 // groups)
    shapes = [(2, 4, *SPATIAL[-rank:]), (*shape, *(3,) * rank), (6,)]
    x, w, b = (torch.randn(s, generator=generator, dtype=dtype) for s in shapes)
    return x, w, b


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# ---------------------------------------------------------------------------------------------------------
# Signatures.


@pytest.mark.parametrize("name", [*CONVOLUTIONS, *TRANSPOSED])
def test_arguments_have_other_names_order_or_defaults_than_in_torch(name: str) -> None:
    theirs = inspect.signature(torch.overrides.get_testing_overrides()[getattr(F, name)]).parameters
    ours = inspect.signature(getattr(jitconv, name)).parameters
    positional = [p for p in ours.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in positional] == list(theirs)
    assert [p.default for p in positional] == [p.default for p in theirs.values()]
    extra = [p.name for p in ours.values() if p.kind is p.KEYWORD_ONLY]
    assert extra == [*(["padding_mode"] if name in CONVOLUTIONS else []), "epilogue", "precision"]


@pytest.mark.parametrize("name", [*CONVOLUTIONS, *TRANSPOSED])
def test_a_positional_argument_lands_in_another_parameter_than_in_torch(name: str) -> None:
    x, w, b = tensors(name, groups=2)
    fifth_to_last = (2, 1, 1, 2, 3) if name in TRANSPOSED else (2, 1, 3, 2)
    close(getattr(jitconv, name)(x, w, b, *fifth_to_last), getattr(F, name)(x, w, b, *fifth_to_last))


def test_depthwise_separable_takes_its_arguments_in_another_order() -> None:
    parameters = inspect.signature(jitconv.depthwise_separable_conv2d).parameters.values()
    assert " ".join(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD) == (
        "x dw_weight pw_weight dw_bias pw_bias stride padding dilation"
    )
    assert [p.name for p in parameters if p.kind is p.KEYWORD_ONLY] == ["between", "epilogue", "precision"]


# ---------------------------------------------------------------------------------------------------------
# Values.

#: Per chain: the steps, and the same in torch, of the convolution's value and of some operands by name.
Chain = tuple[Callable[[dict[str, Any]], list[E.Step]], Callable[[Tensor, dict[str, Any]], Tensor]]


def per_channel(t: Tensor, v: Tensor) -> Tensor:
    return t.view(-1, *(1,) * (v.dim() - 2))


CHAINS: dict[str, Chain] = {
    "none": (lambda o: [], lambda v, o: v),
    "residual": (lambda o: [E.add(o["full"]), E.relu()], lambda v, o: torch.relu(v + o["full"])),
    "residual of a broadcast sample": (lambda o: [E.sub(o["full"][:1])], lambda v, o: v - o["full"][:1]),
    "per channel": (
        lambda o: [E.mul(o["channel"]), E.maximum(o["channel"])],
        lambda v, o: torch.maximum(v * per_channel(o["channel"], v), per_channel(o["channel"], v)),
    ),
    "scalars": (
        lambda o: [E.add(o["scalar"]), E.div(2), E.minimum(0.5)],
        lambda v, o: torch.clamp_max((v + o["scalar"]) / 2, 0.5),
    ),
    "gate by its own value": (lambda o: [E.sigmoid(), E.mul(E.CONV)], lambda v, o: F.silu(v)),
    "mish and tanh": (lambda o: [E.mish(), E.tanh()], lambda v, o: torch.tanh(F.mish(v))),
    "bounds of two kinds": (
        lambda o: [E.clamp(-0.5, o["channel"])],
        lambda v, o: torch.minimum(v.clamp_min(-0.5), per_channel(o["channel"], v)),
    ),
    "norm, pool and gelu": (
        lambda o: [E.layer_norm(o["width"], o["row"], o["row"] * 2), E.avg_pool(2), E.gelu()],
        lambda v, o: F.gelu(o["avg_pool"](F.layer_norm(v, (o["width"],), o["row"], o["row"] * 2), 2)),
    ),
    "two pools": (
        lambda o: [E.max_pool(2, ceil_mode=True), E.avg_pool(2, ceil_mode=True)],
        lambda v, o: o["avg_pool"](o["max_pool"](v, 2, ceil_mode=True), 2, ceil_mode=True),
    ),
}


def operands(value: Tensor) -> dict[str, Any]:
    """Operands that fit a convolution's value, and the pools of its rank."""
    generator = torch.Generator().manual_seed(5)
    rank = value.dim() - 2

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(value.dtype)

    return {
        "full": draw(*value.shape),
        "channel": draw(value.shape[1]),
        "row": draw(value.shape[-1]),
        "scalar": draw(),
        "width": value.shape[-1],
        "avg_pool": getattr(F, f"avg_pool{rank}d"),
        "max_pool": getattr(F, f"max_pool{rank}d"),
    }


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("function", [*CONVOLUTIONS, *TRANSPOSED])
def test_a_chain_gives_another_result_than_eager_torch(function: str, chain: str) -> None:
    x, w, b = tensors(function)
    value = getattr(F, function)(x, w, b, 2, 1)
    steps, eager = CHAINS[chain]
    given = operands(value)
    close(getattr(jitconv, function)(x, w, b, 2, 1, epilogue=steps(given)), eager(value, given))


@pytest.mark.parametrize("chain", CHAINS)
def test_a_separable_chain_gives_another_result_than_eager_torch(chain: str) -> None:
    x, dw, pw, middle_bias, bias = torch.randn(2, 3, 8, 9), *map(torch.randn, [(6, 1, 3, 3), (4, 6, 1, 1), (6,), (4,)])
    middle = F.conv2d(x, dw, middle_bias, padding=1, groups=3)
    value = F.conv2d(F.relu6(middle * 1.5), pw, bias)
    steps, eager = CHAINS[chain]
    given = operands(value)
    actual = jitconv.depthwise_separable_conv2d(
        x, dw, pw, middle_bias, bias, padding=1, between=[E.mul(1.5), E.relu6()], epilogue=steps(given)
    )
    close(actual, eager(value, given))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("chain", CHAINS)
def test_a_chain_is_rounded_more_than_once(dtype: torch.dtype, chain: str) -> None:
    x, w, b = tensors("conv2d", dtype)
    steps, eager = CHAINS[chain]
    given = operands(F.conv2d(x, w, b))
    wide = {name: value.float() if isinstance(value, Tensor) else value for name, value in given.items()}
    expected = eager(F.conv2d(x.float(), w.float(), b.float()), wide)
    actual = jitconv.conv2d(x, w, b, epilogue=steps(given))
    assert actual.dtype == dtype
    # One rounding is half a unit in the last place; a second one would show as up to a whole unit.
    unit = torch.finfo(dtype).eps
    assert ((actual.float() - expected).abs() <= 0.501 * unit * expected.abs() + 1e-6).all()


@pytest.mark.parametrize("mode", ["zeros", "replicate", "reflect", "circular"])
@pytest.mark.parametrize("function", CONVOLUTIONS)
def test_a_padding_mode_differs_from_the_module_of_torch(function: str, mode: str) -> None:
    rank = int(function[-2])
    module = getattr(nn, f"Conv{rank}d")(4, 6, 3, stride=2, padding=2, padding_mode=mode)
    x, _, _ = tensors(function)
    actual = getattr(jitconv, function)(x, module.weight, module.bias, 2, 2, padding_mode=mode)
    close(actual, module(x))


def test_padding_per_side_lands_on_the_wrong_side() -> None:
    x, w, b = tensors("conv3d")
    actual = jitconv.conv3d(x, w, b, padding=((2, 0), 1, (0, 3)))
    close(actual, F.conv3d(F.pad(x, (0, 3, 1, 1, 2, 0)), w, b))
    changed = x.clone()
    changed[:, :, 3:] += 1
    causal = [jitconv.conv3d(t, w, b, padding=((2, 0), 1, 1)) for t in (x, changed)]
    assert torch.equal(causal[0][:, :, :3], causal[1][:, :, :3])
    assert not torch.equal(causal[0][:, :, 3], causal[1][:, :, 3])


@pytest.mark.parametrize("function", [*CONVOLUTIONS, *TRANSPOSED])
def test_an_unbatched_input_gives_a_batched_or_a_wrong_result(function: str) -> None:
    x, w, b = tensors(function)
    run = getattr(jitconv, function)
    single = run(x[1], w, b, epilogue=[E.gelu(), E.max_pool(2)])
    assert single.dim() == x.dim() - 1
    close(single, run(x, w, b, epilogue=[E.gelu(), E.max_pool(2)])[1])
    residual = run(x[1], w, b)
    close(run(x[1], w, b, epilogue=[E.sub(residual)]), torch.zeros_like(residual))


def test_nan_and_inf_in_the_data_vanish() -> None:
    x, w, b = tensors("conv2d")
    x[0, 0, 2, 3], x[1, 0, 4, 4] = float("nan"), float("inf")
    expected = F.max_pool2d(F.relu(F.conv2d(x, w, b)), 2)
    actual = jitconv.conv2d(x, w, b, epilogue=[E.relu(), E.max_pool(2)])
    torch.testing.assert_close(actual, expected, equal_nan=True)
    assert actual.isnan().any()


# ---------------------------------------------------------------------------------------------------------
# Memory formats.

LAST = {"conv2d": torch.channels_last, "conv3d": torch.channels_last_3d}


@pytest.mark.parametrize("epilogue", [(), (E.mish(),), (E.max_pool(2), E.layer_norm(2))], ids=["none", "mish", "norm"])
@pytest.mark.parametrize("last", ["neither", "x", "weight", "both"])
@pytest.mark.parametrize("function", LAST)
def test_the_output_has_another_memory_format_than_torch_gives_it(function: str, last: str, epilogue: Any) -> None:
    x, w, b = tensors(function)
    x, w = x[..., :6], w.clone()
    x = x.contiguous(memory_format=LAST[function] if last in ("x", "both") else torch.contiguous_format)
    w = w.contiguous(memory_format=LAST[function] if last in ("weight", "both") else torch.contiguous_format)
    theirs = getattr(F, function)(x, w, b)
    ours = getattr(jitconv, function)(x, w, b, epilogue=epilogue)
    expected = torch.contiguous_format if last == "neither" else LAST[function]
    assert theirs.is_contiguous(memory_format=expected), "torch itself gives another format"
    assert ours.is_contiguous(memory_format=expected)
    assert ours.is_contiguous() is (last == "neither")


@pytest.mark.parametrize("function", [*CONVOLUTIONS, *TRANSPOSED])
def test_the_output_of_odd_strides_is_not_contiguous(function: str) -> None:
    x, w, b = tensors(function)
    reversed_axes = tuple(range(x.dim()))[::-1]
    x = x.permute(reversed_axes).contiguous().permute(reversed_axes)
    actual = getattr(jitconv, function)(x, w, b, epilogue=[E.relu()])
    assert actual.is_contiguous()
    close(actual, getattr(F, function)(x, w, b).relu())


def test_a_tensor_that_is_contiguous_in_both_formats_makes_the_output_channels_last() -> None:
    x, w, b = torch.randn(2, 1, 6, 7), torch.randn(6, 1, 3, 3), torch.randn(6)
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert w.is_contiguous(memory_format=torch.channels_last)
    assert jitconv.conv2d(x, w, b).is_contiguous()
    assert jitconv.depthwise_separable_conv2d(x, w, torch.randn(4, 6, 1, 1)).is_contiguous()


def test_a_channels_last_pointwise_weight_is_ignored() -> None:
    x, dw = torch.randn(2, 4, 6, 7), torch.randn(4, 1, 3, 3)
    x = x.contiguous(memory_format=torch.channels_last)
    y = jitconv.depthwise_separable_conv2d(x, dw, torch.randn(4, 4, 1, 1), epilogue=[E.relu()])
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert not y.is_contiguous()


# ---------------------------------------------------------------------------------------------------------
# Which path ran.


@pytest.fixture(autouse=True)
def _fresh_stats() -> None:
    jitconv.reset_stats()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.complex64, torch.complex128])
def test_a_call_on_the_cpu_is_counted_as_generated(dtype: torch.dtype) -> None:
    x, w, b = tensors("conv2d", dtype)
    jitconv.conv2d(x, w, b)
    jitconv.depthwise_separable_conv2d(x, w[:4, :1], w[:, :, :1, :1])
    counted = jitconv.stats()
    assert (counted.torch_calls, counted.generated_calls, counted.compiled) == (2, 0, 0)
    assert dict(counted.torch_reasons) == {"cpu tensor": 2}


@pytest.mark.parametrize(
    ("dtype", "reason"),
    [(torch.float64, "float64"), (torch.complex64, "complex64"), (torch.float32, "meta tensor")],
)
def test_the_reason_for_torchs_path_is_not_the_dtype(dtype: torch.dtype, reason: str) -> None:
    x, w, b = (t.to("meta") for t in tensors("conv3d", dtype))
    y = jitconv.conv3d(x, w, b, padding=1, epilogue=[E.square(), E.add(1.0)])
    assert (y.shape, y.dtype, y.device.type) == ((2, 6, *SPATIAL), dtype, "meta")
    assert dict(jitconv.stats().torch_reasons) == {reason: 1}


def _reason(x: Tensor, *args: Any, **kwargs: Any) -> str | None:
    """The reason for torch's path that the same call on CUDA tensors has."""
    call, _ = functional.convolution_call("conv2d", 2, False, x, *args, None, kwargs.get("epilogue", ()), None,
                                          stride=1, padding=0, dilation=1, groups=1)  # fmt: skip
    return functional.kernel_obstacle(call)


def test_a_kernel_is_asked_for_what_it_cannot_read() -> None:
    x, w, _ = tensors("conv2d")
    negated = (x + 1j * x).conj().imag
    assert negated.is_neg()
    assert _reason(x, w) is None
    assert _reason(x[:0], w) is None
    assert _reason(x[:, :0], w[:, :0]) == "no channels"
    assert _reason(x.double(), w.double()) == "float64"
    assert _reason(negated, w) == "lazily negated tensor"
    assert _reason(x, (w + 1j * w).conj().imag) == "lazily negated tensor"
    assert _reason(x, w, epilogue=[E.add(negated[:, :1, 2:, 2:])]) == "lazily negated tensor"


@pytest.mark.parametrize("parameter", ["stride", "padding", "dilation"])
def test_a_parameter_beyond_31_bits_is_cut_to_an_int(parameter: str) -> None:
    parameters = {"stride": 2**31 - 1, "padding": 0, "dilation": 1, parameter: 2**31}
    x, w = torch.empty(1, 2, 9, device="meta"), torch.empty(3, 2, 1, device="meta")
    call, _ = functional.convolution_call("conv1d", 1, False, x, w, None, (), None, groups=1, **parameters)
    assert functional.kernel_obstacle(call) == "a parameter beyond 31 bits"


def test_a_kernel_drops_the_tangent_of_forward_mode_differentiation() -> None:
    x, w, _ = tensors("conv2d")
    with forward_ad.dual_level():
        assert _reason(x, w) is None
        assert _reason(forward_ad.make_dual(x, x), w) == "forward-mode differentiation"
        assert _reason(x, w, epilogue=[E.add(forward_ad.make_dual(x[0, 0, 0, 0], x[0, 0, 0, 0]))]) is not None
        y = jitconv.conv2d(forward_ad.make_dual(x, 2 * x), w, epilogue=[E.mul(3.0)])
        close(forward_ad.unpack_dual(y).tangent, 6 * F.conv2d(x, w))
    (_, tangent) = torch.func.jvp(lambda x: jitconv.conv2d(x, w, epilogue=[E.tanh()]), (x,), (x,))
    close(tangent, torch.func.jvp(lambda x: F.conv2d(x, w).tanh(), (x,), (x,))[1])


@pytest.mark.parametrize(
    ("shape", "padding"),
    [((0, 4, 6, 7), 1), ((2, 4, 1, 1), 1), ((0, 4, 0, 7), 0)],
    ids=["no samples", "no output", "neither samples nor rows"],
)
def test_an_output_without_elements_is_launched(shape: tuple[int, ...], padding: int) -> None:
    w = torch.randn(4, 6, 2, 2)
    call, _ = functional.convolution_call(
        "conv_transpose2d", 2, True, torch.randn(shape), w, None, [E.relu()], None,
        stride=1, padding=padding, output_padding=0, dilation=1, groups=1,
    )  # fmt: skip
    built = program.build(call)
    assert 0 in built.shape
    assert [step.grid for step in built.launches] == [0]
    assert built.shape == F.conv_transpose2d(call.x, w, padding=padding).shape


def test_a_complex_chain_that_torch_refuses_is_applied() -> None:
    x, w, b = tensors("conv2d", torch.complex64)
    zero = torch.zeros((), dtype=torch.complex64)
    refused = [(E.gelu(), F.gelu), (E.relu(), F.relu), (E.maximum(0.0), lambda v: torch.maximum(v, zero))]
    for step, theirs in refused:
        with pytest.raises(Exception) as expected:  # noqa: PT011 - whatever torch raises
            theirs(F.conv2d(x, w, b))
        with pytest.raises(expected.type) as actual:
            jitconv.conv2d(x, w, b, epilogue=[step])
        assert actual.type is expected.type
    close(jitconv.conv2d(x, w, b, epilogue=[E.tanh(), E.mul(2)]), torch.tanh(F.conv2d(x, w, b)) * 2)


# ---------------------------------------------------------------------------------------------------------
# Modes.


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_a_graph_is_kept_where_none_is_recorded(mode: Callable[[], Any]) -> None:
    x, w, b = tensors("conv2d")
    w.requires_grad_()
    with mode():
        y = jitconv.conv2d(x, w, b, epilogue=[E.mish()])
        expected = F.mish(F.conv2d(x, w, b))
        assert y.is_inference() is expected.is_inference()
    assert not y.requires_grad
    close(y, expected)
    assert jitconv.conv2d(x, w, b, epilogue=[E.mish()]).requires_grad


def test_a_default_dtype_or_device_leaks_into_the_result() -> None:
    x, w, b = tensors("conv2d")
    torch.set_default_dtype(torch.float64)
    try:
        y = jitconv.conv2d(x, w, b, epilogue=[E.minimum(0.25), E.clamp(-1, 1), E.softplus()])
    finally:
        torch.set_default_dtype(torch.float32)
    assert y.dtype == torch.float32
    with torch.device("meta"):
        assert jitconv.conv2d(x, w, b, epilogue=[E.maximum(0.25)]).device.type == "cpu"


def test_an_argument_is_changed_by_the_call() -> None:
    x, w, b = tensors("conv2d")
    residual = torch.randn(2, 6, 4, 5)
    given = [x, w, b, residual]
    before = [(t.clone(), t._version) for t in given]
    steps = [E.add(residual), E.relu(), E.hardswish(), E.mul(E.CONV)]
    y = jitconv.conv2d(x, w, b, epilogue=steps)
    assert len(steps) == 4
    for tensor, (value, version) in zip(given, before, strict=True):
        assert torch.equal(tensor, value)
        assert tensor._version == version
        assert tensor.data_ptr() != y.data_ptr()


@pytest.mark.parametrize("chain", [[], [E.add(0)], [E.clamp(min=-1e9)]], ids=["none", "add", "clamp"])
def test_a_pointwise_convolution_that_changes_nothing_returns_its_input(chain: list[E.Step]) -> None:
    x = torch.randn(1, 1, 4, 4)
    y = jitconv.conv2d(x, torch.ones(1, 1, 1, 1), epilogue=chain)
    y.zero_()
    assert x.abs().sum() > 0


def test_a_copied_chain_gives_another_result() -> None:
    x, w, b = tensors("conv2d")
    chain = [E.clamp(b, 1.0), E.clamp(-0.5, 0.5), E.mul(E.CONV), E.layer_norm(5), E.max_pool(2), E.minimum(b)]
    expected = jitconv.conv2d(x, w, b, epilogue=chain)
    close(jitconv.conv2d(x, w, b, epilogue=copy.deepcopy(chain)), expected)
    close(jitconv.conv2d(x, w, b, epilogue=[copy.copy(step) for step in chain]), expected)


def test_a_generator_of_steps_is_used_up_by_the_checks() -> None:
    x, w, b = tensors("conv2d")
    y = jitconv.conv2d(x, w, b, epilogue=(step for step in [E.relu(), E.neg()]))
    close(y, -F.relu(F.conv2d(x, w, b)))
    close(jitconv.conv2d(x, w, b, epilogue=E.relu()), F.relu(F.conv2d(x, w, b)))
    close(jitconv.conv2d(x, w, b, epilogue=None), F.conv2d(x, w, b))


@pytest.mark.parametrize("precision", [None, "ieee", "tf32"])
def test_a_precision_changes_the_result_on_the_cpu(precision: str | None) -> None:
    x, w, b = tensors("conv2d")
    assert torch.equal(jitconv.conv2d(x, w, b, precision=precision), jitconv.conv2d(x, w, b))


@pytest.mark.parametrize("name", functional.__all__)
def test_an_example_in_a_docstring_does_not_run(name: str) -> None:
    import doctest

    finder = doctest.DocTestFinder(recurse=False)
    (example,) = finder.find(getattr(functional, name), name, globs={"__name__": "__main__"})
    assert example.examples
    assert doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(example).failed == 0
