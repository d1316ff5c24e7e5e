"""A mistake raises what torch raises for it, says what is wrong, and costs nothing: no kernel is rendered.

The expected exception type of a case is found by making the same mistake with torch.nn.functional on CPU.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import jitconv
from jitconv import epilogue as E
from jitconv import functional, render, runtime, toolchain

_generator = torch.Generator().manual_seed(0)


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, generator=_generator)


X, W, B = rand(2, 4, 6, 7), rand(6, 4, 3, 3), rand(6)
WT = rand(4, 6, 3, 3)
X1, W1 = rand(2, 4, 9), rand(6, 4, 3)
X3, W3 = rand(1, 2, 4, 4, 4), rand(3, 2, 2, 2, 2)
DW, PW = rand(8, 1, 3, 3), rand(5, 8, 1, 1)


# torch announces the end of the one and the youth of the other.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    QUANTIZED_X, QUANTIZED_W, QUANTIZED_WT = (
        torch.quantize_per_tensor(t, 0.1, 0, torch.qint8) for t in (X, W, WT)
    )
    NESTED = torch.nested.nested_tensor([X[0], X[1]])


def composed(
    x: Tensor,
    dw_weight: Tensor,
    pw_weight: Tensor,
    dw_bias: Any = None,
    pw_bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
) -> Tensor:
    """What depthwise_separable_conv2d is in torch."""
    groups = x.shape[-3] if isinstance(x, Tensor) and x.dim() >= 3 else 1
    middle = F.conv2d(x, dw_weight, dw_bias, stride, padding, dilation, groups)
    return F.conv2d(middle, pw_weight, pw_bias)


def namesake(function: str) -> Callable[..., Tensor]:
    return composed if function == "depthwise_separable_conv2d" else getattr(F, function)


@dataclass(frozen=True)
class Case:
    """One call and what its message must say besides the function's name."""

    function: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    words: tuple[str, ...] = ()


def conv2d(*words: str, x: Any = X, w: Any = W, b: Any = None, **kwargs: Any) -> Case:
    return Case("conv2d", (x, w, b), kwargs, words)


def transposed(*words: str, x: Any = X, w: Any = WT, b: Any = None, **kwargs: Any) -> Case:
    return Case("conv_transpose2d", (x, w, b), kwargs, words)


def separable(*words: str, x: Any = X, dw: Any = DW, pw: Any = PW, **kwargs: Any) -> Case:
    return Case("depthwise_separable_conv2d", (x, dw, pw), kwargs, words)


NOT_INTS = {
    "float": 1.0,
    "fraction": 1.5,
    "bool": True,
    "bool in a tuple": (True, 1),
    "string": "1",
    "None": None,
    "None in a tuple": (1, None),
    "string in a tuple": (1, "a"),
    "float in a list": [2.0],
    "float after an int": (2, 2.0),
    "numpy float": np.float64(2),
    "numpy bool": np.bool_(True),
    "numpy array": np.array([2, 2]),
    "float tensor": torch.tensor(2.0),
    "tensor of two": torch.tensor([2, 2]),
    "complex": 1j,
    "range": range(1, 3),
    "set": {2},
    "dict": {2: 2},
    "wider than 64 bits": 2**70,
    "wider than 64 bits in a tuple": (1, 2**70),
}

MISTAKES: dict[str, Case] = {
    # Tensors that are none, or not of the kind that convolves.
    "input: list": conv2d("input=[1.0]", "expected a torch.Tensor", x=[1.0]),
    "input: None": conv2d("input=None", x=None),
    "input: numpy": conv2d("input=", "ndarray", x=X.numpy()),
    "weight: None": conv2d("weight=None", w=None),
    "weight: number": conv2d("weight=1.0", w=1.0),
    "bias: list": conv2d("bias=[0.0", "expected a torch.Tensor", b=[0.0] * 6),
    "bias: number": conv2d("bias=0.0", b=0.0),
    "bias: False": conv2d("bias=False", b=False),
    "bias: string": conv2d("bias='b'", b="b"),
    "input: sparse": conv2d("input", "sparse_coo", "to_dense", x=X.to_sparse()),
    "weight: sparse": conv2d("weight", "sparse_coo", "to_dense", w=W.to_sparse()),
    "bias: sparse": conv2d("bias", "sparse_coo", b=B.to_sparse()),
    "input: nested": conv2d("input", "nested", x=NESTED),
    "quantized": conv2d("input", "qint8", x=QUANTIZED_X, w=QUANTIZED_W),
    "transposed: quantized": transposed("input", "qint8", x=QUANTIZED_X, w=QUANTIZED_WT),
    "transposed: sparse": transposed("weight", "sparse_coo", w=WT.to_sparse()),
    # Element types.
    "bool": conv2d("input", "torch.bool", x=X.bool(), w=W.bool()),
    "uint16": conv2d("input", "torch.uint16", x=X.to(torch.uint16), w=W.to(torch.uint16)),
    "float8": conv2d("input", "float8_e4m3fn", x=X.to(torch.float8_e4m3fn), w=W.to(torch.float8_e4m3fn)),
    "transposed: int32": transposed("input", "torch.int32", ".to(torch.float32)", x=X.int(), w=WT.int()),
    "transposed: int32 beside float32": transposed("input", "torch.int32", x=X.int()),
    "half input": conv2d("weight", "torch.float32", "torch.float16", x=X.half()),
    "half weight": conv2d("weight", "torch.float16", "same dtype", w=W.half()),
    "double weight": conv2d("weight", "torch.float64", w=W.double()),
    "complex input": conv2d("weight", "complex64", x=X.to(torch.complex64)),
    "int32 input": conv2d("weight", "torch.int32", x=X.int(), b=B),
    "bool input": conv2d("weight", "torch.bool", x=X.bool(), b=B),
    "double bias": conv2d("bias", "torch.float64", "torch.float32", b=B.double()),
    "half bias": conv2d("bias", "torch.float16", b=B.half()),
    "float bias of half": conv2d("bias", "torch.float32", x=X.half(), w=W.half(), b=B),
    "int bias": conv2d("bias", "torch.int64", b=B.long()),
    "transposed: half input": transposed("weight", "torch.float16", x=X.half()),
    "transposed: half bias": transposed("bias", "torch.float16", b=B.half()),
    "separable: half pointwise": separable("pw_weight", "torch.float16", "x has", pw=PW.half()),
    "separable: half depthwise": separable("dw_weight", "torch.float16", dw=DW.half()),
    # Ranks.
    **{
        f"input: {rank}-D": conv2d("input", str((4,) * rank), "3D (unbatched) or 4D", x=rand(*(4,) * rank))
        for rank in (0, 1, 2, 5, 6)
    },
    **{f"weight: {rank}-D": conv2d("weight", str((4,) * rank), w=rand(*(4,) * rank)) for rank in (0, 1, 2, 3, 5)},
    **{
        f"transposed: input {rank}-D": transposed("input", str((4,) * rank), x=rand(*(4,) * rank))
        for rank in (0, 2, 5)
    },
    **{f"transposed: weight {rank}-D": transposed("weight", w=rand(*(4,) * rank)) for rank in (0, 3, 5)},
    "conv1d: input 4-D": Case("conv1d", (X, W1), words=("input", "2D (unbatched) or 3D")),
    "conv1d: weight 4-D": Case("conv1d", (X1, W), words=("weight", "(6, 4, 3, 3)")),
    "conv3d: input 3-D": Case("conv3d", (X1, W3), words=("input", "4D (unbatched) or 5D")),
    "conv3d: weight 4-D": Case("conv3d", (X3, W), words=("weight", "[out_channels, in_channels/groups")),
    "separable: input 2-D": separable("x has shape", x=rand(6, 7)),
    "separable: depthwise 3-D": separable("dw_weight", "(8, 1, 3)", dw=DW[..., 0]),
    # Channels and groups.
    "too few channels": conv2d("input must have 4 channels", "(2, 3, 6, 7)", x=X[:, :3]),
    "too many channels": conv2d("input must have 4 channels", "8 channels", x=rand(2, 8, 6, 7)),
    "no input channels": conv2d("input must have 4 channels", x=X[:, :0]),
    "unbatched, batch as channels": conv2d("input must have 4 channels", x=rand(5, 6, 7)),
    "groups: too many": conv2d("groups=2", "(6, 4, 3, 3)", groups=2),
    "groups: do not divide K": conv2d("weight.shape[0] is 5", "groups=2", w=rand(5, 2, 3, 3), groups=2),
    "groups: zero": conv2d("groups=0", groups=0),
    "groups: negative": conv2d("groups=-1", groups=-1),
    "groups: tuple": conv2d("groups=(1, 1)", groups=(1, 1)),
    "groups: None": conv2d("groups=None", "expected an int", groups=None),
    "groups: True": conv2d("groups=True", groups=True),
    "groups: float": conv2d("groups=1.0", groups=1.0),
    "groups: string": conv2d("groups='1'", groups="1"),
    "groups: wider than 64 bits": conv2d("groups=", "64 bits", groups=2**63),
    "no output channels": conv2d("weight", "(0, 4, 3, 3)", "output channel", w=W[:0]),
    "transposed: too few channels": transposed("input must have 4 channels", x=X[:, :3]),
    "transposed: groups do not divide C": transposed("groups=3", "input channels is 4", groups=3),
    "transposed: no output channels": transposed("weight", "output channel", w=WT[:, :0]),
    "transposed: groups zero": transposed("groups=0", groups=0),
    "transposed: groups None": transposed("groups=None", groups=None),
    "separable: depthwise of other channels": separable("dw_weight", "(6, 1, 3, 3)", "[4*m, 1", dw=DW[:6]),
    "separable: pointwise of other channels": separable("pw_weight", "[K, 8, 1, 1]", pw=PW[:, :6]),
    "separable: no depthwise channels": separable("dw_weight", dw=DW[:0]),
    # Bias.
    "bias: too short": conv2d("bias", "(5,)", "expected (6,)", b=B[:5]),
    "bias: one": conv2d("bias", "(1,)", b=B[:1]),
    "bias: 0-D": conv2d("bias", "()", b=B[0]),
    "bias: empty": conv2d("bias", "(0,)", b=B[:0]),
    "bias: 2-D": conv2d("bias", "(6, 1)", b=B[:, None]),
    "bias: row": conv2d("bias", "(1, 6)", b=B[None]),
    "transposed: bias too short": transposed("bias", "(5,)", "expected (6,)", b=B[:5]),
    "transposed: bias 2-D": transposed("bias", "(6, 1)", b=B[:, None]),
    "separable: depthwise bias too short": separable("dw_bias", "(7,)", "expected (8,)", dw_bias=rand(7)),
    "separable: pointwise bias too long": separable("pw_bias", "(6,)", "expected (5,)", pw_bias=rand(6)),
    # Stride, padding, dilation, output_padding.
    **{
        f"{name}: {what}": conv2d(f"{name}={value!r}", **{name: value})
        for name in ("stride", "padding", "dilation")
        for what, value in NOT_INTS.items()
        if not (name == "padding" and what == "string")
    },
    **{
        f"transposed: {name}: {what}": transposed(f"{name}={value!r}", **{name: value})
        for name in ("stride", "padding", "output_padding", "dilation")
        for what, value in NOT_INTS.items()
    },
    **{
        f"{name}: {value}": conv2d(f"{name}={value}", "expected a single int or 2 ints", **{name: value})
        for name in ("stride", "padding", "dilation")
        for value in ((1, 1, 1), (1, 1, 1, 1), (), [])
    },
    **{
        f"transposed: {name}: {value}": transposed(f"{name}={value}", **{name: value})
        for name in ("stride", "padding", "output_padding", "dilation")
        for value in ((1, 1, 1), ())
    },
    **{
        f"{name}: {value}": conv2d(f"{name}=", "expected positive", **{name: value})
        for name in ("stride", "dilation")
        for value in (0, -1, (1, 0), (-1, 1))
    },
    "padding: negative": conv2d("padding=-1", "negative padding", padding=-1),
    "padding: negative in a tuple": conv2d("padding=(1, -1)", padding=(1, -1)),
    "padding: unknown string": conv2d("padding='full'", "'same', 'valid'", padding="full"),
    "padding: SAME": conv2d("padding='SAME'", padding="SAME"),
    "padding: empty string": conv2d("padding=''", padding=""),
    "padding: string in a tuple": conv2d("padding=('same',)", padding=("same",)),
    "padding: same with stride": conv2d("padding='same'", "stride=(2, 2)", padding="same", stride=2),
    "padding: same with one stride": conv2d("padding='same'", "stride=(1, 2)", padding="same", stride=(1, 2)),
    "padding: pairs that are none": conv2d("padding=((1,), (1,))", "pair", padding=((1,), (1,))),
    "padding: three pairs": conv2d("padding=((1, 1),", padding=((1, 1), (1, 1), (1, 1))),
    "padding: pair of floats": conv2d("padding=((1.0, 1), 1)", padding=((1.0, 1), 1)),
    **{
        f"transposed: padding {padding!r}": transposed(f"padding={padding!r}", "takes ints", padding=padding)
        for padding in ("same", "valid", "full")
    },
    "transposed: padding pairs": transposed("padding=((1, 0), 1)", padding=((1, 0), 1)),
    "transposed: stride zero": transposed("stride=(0, 0)", stride=0),
    "transposed: dilation zero": transposed("dilation=(0, 0)", dilation=0),
    "transposed: dilation negative": transposed("dilation=(-1, -1)", dilation=-1),
    "transposed: padding negative": transposed("padding=-1", padding=-1),
    "output_padding: negative": transposed("output_padding=(-1, -1)", stride=2, output_padding=-1),
    "output_padding: as stride": transposed("output_padding=(1, 1)", "stride (1, 1)", output_padding=1),
    "output_padding: of one dimension": transposed("output_padding=(0, 1)", stride=(2, 1), output_padding=(0, 1)),
    "output_padding: of neither": transposed("output_padding=(2, 0)", stride=2, output_padding=(2, 0)),
    "separable: stride zero": separable("stride=(0, 0)", stride=0),
    "separable: padding string": separable("padding='full'", padding="full"),
    "separable: dilation float": separable("dilation=1.0", dilation=1.0),
    # Extents.
    "kernel larger than input": conv2d("input height 6", "at least 9", w=rand(6, 4, 9, 3)),
    "kernel larger than padded input": conv2d("width 2", "(1, 1)", "at least 5", x=X[..., :2], padding=1, dilation=2),
    "no rows": conv2d("input", "(2, 4, 0, 7)", "height of at least 1", x=X[:, :, :0], padding=2),
    "no columns": conv2d("input", "(2, 4, 6, 0)", "width of at least 1", x=X[..., :0]),
    "no rows, unbatched": conv2d("input", x=X[0, :, :0]),
    "empty batch, kernel larger than input": conv2d("width 2", "at least 3", x=X[:0, :, :, :2]),
    "no rows of an empty batch": conv2d("height 0", x=X[:0, :, :0]),
    "kernel without rows": conv2d("weight", "(6, 4, 0, 3)", "at least one element", w=W[:, :, :0]),
    "weight without elements": conv2d("weight", "(0, 0, 0, 0)", w=rand(0, 0, 0, 0)),
    "transposed: negative output": transposed("output height", "-2", "padding", x=X[..., :2, :2], padding=3),
    "transposed: very negative output": transposed("output height", x=X[..., :2, :2], padding=100),
    "transposed: no columns": transposed("input", "width of at least 1", x=X[..., :0]),
    "transposed: kernel without rows": transposed("weight", w=WT[:, :, :0]),
    "conv1d: kernel larger than input": Case("conv1d", (X1, rand(6, 4, 10)), words=("width 9", "at least 10")),
    "conv3d: kernel larger than input": Case("conv3d", (X3, rand(3, 2, 5, 1, 1)), words=("depth 4", "at least 5")),
    "separable: kernel larger than input": separable("x height 6", "at least 9", dw=rand(8, 1, 9, 3)),
    "separable: no rows": separable("x has shape", "height of at least 1", x=X[:, :, :0], padding=2),
    "separable: kernel without rows": separable("dw_weight", "(8, 1, 0, 3)", dw=DW[:, :, :0]),
}


def raised(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Exception | None:
    try:
        function(*args, **kwargs)
    except Exception as error:
        return error
    return None


@pytest.fixture(params=["torch's path", "generated path"])
def no_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test that renders, compiles or launches; on the generated path CPU tensors pass for CUDA ones."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        pytest.fail("a kernel was made before the arguments were checked")

    for module, name in [(runtime, "loaded_kernel"), (render, "render"), (toolchain, "compile_cubin")]:
        monkeypatch.setattr(module, name, refuse)
    if request.param == "generated path":
        monkeypatch.setattr(functional, "torch_path_reason", lambda call: None)


@pytest.mark.usefixtures("no_kernel")
@pytest.mark.parametrize("case", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_raises_another_type_than_torch_or_says_too_little(case: Case) -> None:
    expected = raised(namesake(case.function), *case.args, **case.kwargs)
    assert expected is not None, "torch accepts this"
    actual = raised(getattr(jitconv, case.function), *case.args, **case.kwargs)
    assert type(actual) is type(expected), (actual, expected)
    for word in (f"{case.function}()", *case.words):
        assert word in str(actual)


class Labelled(torch.Tensor):
    """A tensor subclass that changes nothing."""


ACCEPTED: dict[str, Case] = {
    **{
        f"{name}: {what}": conv2d(b=B, **{name: value})
        for name in ("stride", "padding", "dilation")
        for what, value in {
            "numpy int": np.int64(2),
            "numpy int32 in a tuple": (np.int32(2), 1),
            "list of one": [2],
            "tuple of one": (2,),
            "torch.Size": torch.Size([2, 1]),
            "torch.Size of one": torch.Size([2]),
            "0-D tensor": torch.tensor(2),
            "tensor of one": torch.tensor([2]),
            "tensors in a tuple": (torch.tensor(2), torch.tensor(1)),
        }.items()
    },
    "groups: numpy int": conv2d(w=W[:, :2], groups=np.int64(2)),
    "groups: tensor": conv2d(w=W[:, :2], groups=torch.tensor(2)),
    "output_padding: list of one": transposed(stride=3, output_padding=[1]),
    "output_padding: less than the dilation only": transposed(stride=1, dilation=3, output_padding=2),
    "padding: same": conv2d(padding="same", dilation=2),
    "padding: same, even kernel": conv2d(w=rand(6, 4, 2, 4), padding="same"),
    "padding: same, one stride for all": conv2d(padding="same", stride=(1,)),
    "padding: valid with stride": conv2d(padding="valid", stride=2),
    "padding: wider than the kernel": conv2d(padding=(5, 0)),
    "unbatched": conv2d(x=X[0], b=B),
    "unbatched transposed": transposed(x=X[0]),
    "unbatched conv1d": Case("conv1d", (X1[0], W1)),
    "unbatched conv3d": Case("conv3d", (X3[0], W3)),
    "unbatched separable": separable(x=X[0]),
    "empty batch": conv2d(x=X[:0], b=B),
    "empty batch, transposed": transposed(x=X[:0]),
    "empty batch without rows that padding makes": conv2d(x=X[:0, :, :0], padding=2),
    "empty batch without columns, transposed": transposed(x=X[:0, :, :, :0]),
    "no channels": conv2d(x=X[:, :0], w=W[:, :0]),
    "no channels and no rows": conv2d(x=X[:, :0, :0], w=W[:, :0], padding=2),
    "no channels, grouped": conv2d(x=X[:, :0], w=W[:, :0], groups=2),
    "no output": transposed(x=X[:, :, :1, :1], w=rand(4, 6, 2, 2), padding=1),
    "int32": conv2d(x=X.int(), w=W.int(), b=B.int()),
    "int64": conv2d(x=X.long(), w=W.long(), padding=1),
    "uint8": conv2d(x=X.to(torch.uint8), w=W.to(torch.uint8)),
    "complex64": conv2d(x=X + 1j * X, w=W - 1j * W),
    "complex128, transposed": transposed(x=(X + 1j * X).to(torch.complex128), w=WT.to(torch.complex128)),
    "float64": conv2d(x=X.double(), w=W.double(), b=B.double()),
    "parameter": conv2d(x=torch.nn.Parameter(X), w=torch.nn.Parameter(W), b=torch.nn.Parameter(B)),
    "subclass": conv2d(x=X.as_subclass(Labelled)),
    "conjugate": conv2d(x=(X + 1j * X).conj(), w=W + 0j),
    "negated lazily": conv2d(x=(X + 1j * X).conj().imag),
    "expanded": conv2d(x=rand(1, 1, 6, 1).expand(2, 4, 6, 7), b=rand(1).expand(6)),
    "backwards strides": conv2d(x=rand(7, 6, 4, 2).permute(3, 2, 1, 0), w=rand(3, 3, 4, 6).permute(3, 2, 1, 0)),
    "strided slices": conv2d(x=rand(2, 8, 12, 14)[:, ::2, ::2, ::2], b=rand(12)[::2]),
}


@pytest.mark.filterwarnings("ignore:Using padding=.same.")
@pytest.mark.parametrize("case", ACCEPTED.values(), ids=ACCEPTED)
def test_an_argument_that_torch_accepts_is_refused_or_misread(case: Case) -> None:
    expected = namesake(case.function)(*case.args, **case.kwargs)
    actual = getattr(jitconv, case.function)(*case.args, **case.kwargs)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert actual.dtype == expected.dtype


# What torch accepts, or refuses for another reason, and jitconv refuses on purpose.
STRICTER: dict[str, tuple[Case, type[Exception]]] = {
    # Two devices: torch refuses any but the meta device, which stands for a GPU here.
    "weight on another device": (conv2d("weight is on meta", "cpu", w=W.to("meta")), RuntimeError),
    "input on another device": (conv2d("weight is on cpu", "meta", x=X.to("meta")), RuntimeError),
    "bias on another device": (conv2d("bias is on meta", "same device", b=B.to("meta")), RuntimeError),
    "transposed: weight on another device": (transposed("weight is on meta", w=WT.to("meta")), RuntimeError),
    "separable: pointwise on another device": (separable("pw_weight is on meta", pw=PW.to("meta")), RuntimeError),
    # torch looks at the first entry of a tuple only.
    "a bool behind an int": (conv2d("stride=(1, True)", stride=(1, True)), TypeError),
    # A layout without strides; what follows the convolution has none of its operators.
    "mkldnn": (conv2d("input", "_mkldnn", "to_dense", x=X.to_mkldnn(), w=W.to_mkldnn()), RuntimeError),
    # An empty batch hides these from torch until there is a sample.
    "output_padding of an empty batch": (transposed("output_padding=(1, 1)", x=X[:0], output_padding=1), RuntimeError),
    "dilation of an empty batch": (transposed("dilation=(0, 0)", x=X[:0], dilation=0), RuntimeError),
    "kernel without rows": (conv2d("weight", "(6, 0, 0, 3)", x=X[:, :0], w=W[:, :0, :0]), RuntimeError),
    "no output channels of an empty batch": (transposed("weight", x=X[:0], w=WT[:, :0]), RuntimeError),
    # The pair is one operator only with a pointwise second half and one filter per channel in the first.
    "separable: pointwise with taps": (separable("pw_weight", "[K, 8, 1, 1]", pw=rand(5, 8, 3, 3)), RuntimeError),
    "separable: not depthwise": (separable("dw_weight", "[2*m, 1", x=rand(1, 2, 6, 6), dw=rand(8, 2, 3, 3)),
                                 RuntimeError),
    # Arguments that torch does not have.
    "padding mode": (conv2d("padding_mode='mirror'", "'reflect'", padding_mode="mirror"), ValueError),
    "padding mode None": (conv2d("padding_mode=None", padding_mode=None), ValueError),
    "precision": (conv2d("precision='fp16'", "'tf32'", precision="fp16"), ValueError),
    "negative padding of one side": (conv2d("padding=((0, -1), 0)", padding=((0, -1), 0)), RuntimeError),
    "epilogue on integers": (conv2d("epilogue=[relu()]", "torch.int32", x=X.int(), w=W.int(), epilogue=[E.relu()]),
                             NotImplementedError),
    "between on integers": (separable("between=[relu()]", "torch.int32", x=X.int(), dw=DW.int(), pw=PW.int(),
                                      between=[E.relu()]), NotImplementedError),
}  # fmt: skip


@pytest.mark.usefixtures("no_kernel")
@pytest.mark.parametrize(("case", "error"), STRICTER.values(), ids=STRICTER)
def test_a_mistake_that_only_jitconv_sees_passes(case: Case, error: type[Exception]) -> None:
    actual = raised(getattr(jitconv, case.function), *case.args, **case.kwargs)
    assert type(actual) is error, actual
    for word in (f"{case.function}()", *case.words):
        assert word in str(actual)


@pytest.mark.usefixtures("no_kernel")
@pytest.mark.parametrize(
    ("mode", "padding", "most"),
    [("reflect", 6, 5), ("reflect", (0, 7), 6), ("circular", 7, 6), ("circular", (6, 8), 7)],
)
def test_padding_reaches_beyond_what_the_mode_can_mirror(mode: str, padding: Any, most: int) -> None:
    rows, columns = padding if isinstance(padding, tuple) else (padding, padding)
    expected = raised(F.pad, X, (columns, columns, rows, rows), mode=mode)
    actual = raised(jitconv.conv2d, X, W, padding=padding, padding_mode=mode)
    assert type(actual) is type(expected) is RuntimeError
    for word in ("conv2d()", f"padding_mode={mode!r}", f"at most {most}"):
        assert word in str(actual)
    fits = (min(rows, most), min(columns, most))
    padded = F.pad(X, (fits[1], fits[1], fits[0], fits[0]), mode=mode)
    assert raised(F.conv2d, padded, W) is None


@pytest.mark.parametrize("function", ["conv1d", "conv2d", "conv3d", "conv_transpose2d", "depthwise_separable_conv2d"])
def test_a_missing_or_unknown_argument_is_not_a_type_error(function: str) -> None:
    ours, theirs = getattr(jitconv, function), namesake(function)
    for args, kwargs in [((), {}), ((X,), {}), ((X, W, PW), {"strides": 1}), ((X, W, None, 1), {"stride": 1})]:
        if function == "depthwise_separable_conv2d" and len(args) == 4:
            continue
        assert type(raised(ours, *args, **kwargs)) is type(raised(theirs, *args, **kwargs)) is TypeError


# ---------------------------------------------------------------------------------------------------------
# Epilogues.

R = rand(2, 6, 4, 5)


@dataclass(frozen=True)
class Misfit:
    """A step and the same mistake in torch, on the convolution's value R."""

    step: Callable[[], Any]
    torch: Callable[[], Any]
    words: tuple[str, ...]


MISFITS: dict[str, Misfit] = {
    "layer_norm: other width": Misfit(
        lambda: E.layer_norm(6), lambda: F.layer_norm(R, (6,)), ("layer_norm", "normalized_shape=(6,)", "(5,)")
    ),
    "layer_norm: weight of other length": Misfit(
        lambda: E.layer_norm(5, rand(4)), lambda: F.layer_norm(R, (5,), rand(4)), ("weight", "(4,)", "(5,)")
    ),
    "layer_norm: bias of other length": Misfit(
        lambda: E.layer_norm(5, None, rand(1)), lambda: F.layer_norm(R, (5,), None, rand(1)), ("bias", "(1,)")
    ),
    "layer_norm: weight is a list": Misfit(
        lambda: E.layer_norm(5, [1.0] * 5), lambda: F.layer_norm(R, (5,), [1.0] * 5), ("weight=[1.0", "tensor")
    ),
    "layer_norm: no axis": Misfit(lambda: E.layer_norm(()), lambda: F.layer_norm(R, ()), ("normalized_shape=()",)),
    "layer_norm: no width": Misfit(lambda: E.layer_norm(0), lambda: F.layer_norm(R, (0,)), ("normalized_shape=0",)),
    **{
        f"layer_norm: width {width!r}": Misfit(
            lambda width=width: E.layer_norm(width),
            lambda width=width: F.layer_norm(R, width),
            (f"normalized_shape={width!r}", "expected an int"),
        )
        for width in (5.0, True, None, "5", (True,), range(5, 6))
    },
    "layer_norm: eps is a string": Misfit(
        lambda: E.layer_norm(5, eps="a"), lambda: F.layer_norm(R, (5,), eps="a"), ("eps='a'",)
    ),
    "max_pool: larger than the value": Misfit(
        lambda: E.max_pool(5), lambda: F.max_pool2d(R, 5), ("max_pool", "kernel_size=(5, 5)", "(2, 6, 4, 5)")
    ),
    "avg_pool: larger than the value": Misfit(
        lambda: E.avg_pool((1, 6)), lambda: F.avg_pool2d(R, (1, 6)), ("avg_pool", "kernel_size=(1, 6)")
    ),
    "max_pool: other rank": Misfit(
        lambda: E.max_pool((2, 2, 2)), lambda: F.max_pool2d(R, (2, 2, 2)), ("kernel_size=(2, 2, 2)", "2 ints")
    ),
    **{
        f"{pool}: kernel_size {size!r}": Misfit(
            lambda pool=pool, size=size: getattr(E, pool)(size),
            lambda pool=pool, size=size: getattr(F, f"{pool}2d")(R, size),
            (pool, f"kernel_size={size!r}"),
        )
        for pool in ("avg_pool", "max_pool")
        for size in (0, -1, (2, 0), 2.0, True, None, "2", (2, None), (), (1, 1, 1, 1), range(1, 3))
    },
    "add: other channels": Misfit(
        lambda: E.add(rand(5)[:, None, None]), lambda: R + rand(5)[:, None, None], ("add: other", "(5, 1, 1)")
    ),
    "add: other extent": Misfit(
        lambda: E.add(rand(2, 6, 4, 4)), lambda: R + rand(2, 6, 4, 4), ("(2, 6, 4, 4)", "(2, 6, 4, 5)")
    ),
    "mul: other batch": Misfit(lambda: E.mul(rand(3, 6, 4, 5)), lambda: R * rand(3, 6, 4, 5), ("mul: other",)),
    "clamp: bound of other extent": Misfit(
        lambda: E.clamp(rand(3, 1), 1.0), lambda: torch.maximum(R, rand(3, 1)), ("clamp: min", "(3, 1)")
    ),
    "maximum: other channels": Misfit(
        lambda: E.maximum(rand(5)), lambda: torch.maximum(R, rand(5)[:, None, None]), ("5 entries", "6 channels")
    ),
    "add: string": Misfit(lambda: E.add("a"), lambda: R + "a", ("other='a'", "expected a number")),
    "add: None": Misfit(lambda: E.add(None), lambda: R + None, ("other=None",)),
    "gelu: approximation": Misfit(
        lambda: E.gelu("sigmoid"), lambda: F.gelu(R, approximate="sigmoid"), ("approximate='sigmoid'", "'tanh'")
    ),
    "celu: alpha 0": Misfit(lambda: E.celu(0), lambda: F.celu(R, 0), ("alpha=0",)),
    "hardtanh: bounds swapped": Misfit(
        lambda: E.hardtanh(1.0, -1.0), lambda: F.hardtanh(R, 1.0, -1.0), ("min_val=1.0", "max_val=-1.0")
    ),
}


@pytest.mark.usefixtures("no_kernel")
@pytest.mark.parametrize("misfit", MISFITS.values(), ids=MISFITS)
def test_an_epilogue_that_does_not_fit_raises_another_type_than_torch(misfit: Misfit) -> None:
    expected = raised(misfit.torch)
    assert expected is not None, "torch accepts this"
    actual = raised(lambda: jitconv.conv2d(X, W, B, epilogue=[E.relu(), misfit.step()]))
    assert type(actual) is type(expected), (actual, expected)
    for word in misfit.words:
        assert word in str(actual)


# Chains that have no counterpart in torch, or that torch would promote or broadcast to something else.
REFUSED_CHAINS: dict[str, tuple[Callable[[], Any], type[Exception], tuple[str, ...]]] = {
    "per-channel vector of the width": (lambda: [E.add(rand(5))], RuntimeError, ("[0] add: other", "5 entries")),
    "vector without entries": (lambda: [E.add(rand(0))], RuntimeError, ("0 entries",)),
    "operand that makes the value larger": (lambda: [E.add(rand(1, 2, 6, 4, 5))], RuntimeError, ("(1, 2, 6, 4, 5)",)),
    "int operand": (lambda: [E.relu(), E.add(torch.ones(6).int())], RuntimeError, ("epilogue[1] add", "torch.int32")),
    "int scalar": (lambda: [E.mul(torch.tensor(2))], RuntimeError, ("mul: other", "torch.int64")),
    "bool operand": (lambda: [E.mul(torch.ones(6).bool())], RuntimeError, ("torch.bool", "floating-point")),
    "complex operand": (lambda: [E.mul(torch.ones(6) + 0j)], RuntimeError, ("torch.complex64",)),
    "double operand": (lambda: [E.add(R.double())], RuntimeError, ("torch.float64", "expected torch.float32 (")),
    "half operand of float32": (lambda: [E.add(R.half())], RuntimeError, ("torch.float16", "torch.float32")),
    "double weight of a norm": (
        lambda: [E.layer_norm(5, rand(5).double())], RuntimeError, ("layer_norm: weight", "torch.float64")
    ),
    "sparse operand": (lambda: [E.add(R.to_sparse())], RuntimeError, ("sparse_coo",)),
    "operand on another device": (lambda: [E.add(R.to("meta"))], RuntimeError, ("on meta", "expected cpu")),
    "scalar on another device": (lambda: [E.add(R[0, 0, 0, 0].to("meta"))], RuntimeError, ("on meta",)),
    "norm weight on another device": (lambda: [E.layer_norm(5, rand(5).to("meta"))], RuntimeError, ("on meta",)),
    "norm over two axes": (lambda: [E.layer_norm((4, 5))], ValueError, ("normalized_shape=(4, 5)", "one entry")),
    "slope that is a tensor": (lambda: [E.leaky_relu(torch.tensor(0.1))], TypeError, ("negative_slope",)),
    "clamp without bounds": (lambda: [E.clamp()], ValueError, ("min=None", "max=None")),
    "complex number": (lambda: [E.add(1j)], TypeError, ("other=1j",)),
    "convolution's value after a pool": (lambda: [E.max_pool(2), E.mul(E.CONV)], RuntimeError, ("CONV", "pool")),
    "width that a pool changed": (lambda: [E.max_pool(2), E.layer_norm(5)], RuntimeError, ("epilogue[1]", "(2,)")),
    "pool larger than a pooled value": (lambda: [E.max_pool(2), E.avg_pool(3)], RuntimeError, ("[1] avg_pool",)),
    "residual of the value before a pool": (lambda: [E.max_pool(2), E.add(R)], RuntimeError, ("(2, 6, 2, 2)",)),
    "step not called": (lambda: [E.relu], TypeError, ("epilogue[0]=", "call it: E.relu()")),
    "step not called, alone": (lambda: E.relu, TypeError, ("epilogue=", "call")),
    "torch function": (lambda: [F.relu], TypeError, ("epilogue[0]=", "jitconv.epilogue")),
    "torch module": (lambda: [torch.nn.ReLU()], TypeError, ("epilogue[0]=ReLU()",)),
    "name": (lambda: ["relu"], TypeError, ("epilogue[0]='relu'",)),
    "name, alone": (lambda: "relu", TypeError, ("epilogue='relu'",)),
    "None in the list": (lambda: [E.relu(), None], TypeError, ("epilogue[1]=None",)),
    "number": (lambda: 3, TypeError, ("epilogue=3",)),
}  # fmt: skip


@pytest.mark.usefixtures("no_kernel")
@pytest.mark.parametrize(("chain", "error", "words"), REFUSED_CHAINS.values(), ids=REFUSED_CHAINS)
def test_a_chain_with_a_mistake_is_applied(
    chain: Callable[[], Any], error: type[Exception], words: tuple[str, ...]
) -> None:
    actual = raised(lambda: jitconv.conv2d(X, W, B, epilogue=chain()))
    assert type(actual) is error, actual
    for word in words:
        assert word in str(actual)


@pytest.mark.usefixtures("no_kernel")
@pytest.mark.parametrize(
    ("step", "error", "words"),
    [
        (E.layer_norm(5), ValueError, ("between[0]=layer_norm", "pointwise")),
        (E.max_pool(2), ValueError, ("between[0]=max_pool", "two calls")),
        (E.add(rand(5)), RuntimeError, ("between[0] add: other", "5 entries", "8 channels")),
        (E.add(rand(2, 8, 4, 4)), RuntimeError, ("between[0] add: other", "(2, 8, 4, 5)")),
        (E.relu, TypeError, ("between[0]=", "call it")),
    ],
    ids=["norm", "pool", "channels", "extent", "not called"],
)
def test_a_chain_between_with_a_mistake_is_applied(step: Any, error: type[Exception], words: tuple[str, ...]) -> None:
    actual = raised(lambda: jitconv.depthwise_separable_conv2d(X, DW, PW, between=[step]))
    assert type(actual) is error, actual
    for word in ("depthwise_separable_conv2d()", *words):
        assert word in str(actual)


def test_a_wider_or_narrower_operand_is_refused_where_the_chain_can_hold_it() -> None:
    half = X.half(), W.half()
    one = torch.tensor(0.5)
    for x, w, chain in [
        (X, W, [E.mul(one.double()), E.add(one.half()), E.sub(one.bfloat16()), E.div(one.reshape(1, 1, 1, 1))]),
        (*half, [E.add(R), E.mul(R.half()), E.sub(one.double())]),
        (X.double(), W.double(), [E.add(R), E.mul(R.double())]),
        (X + 0j, W + 0j, [E.add(R), E.mul(R + 0j)]),
    ]:
        assert jitconv.conv2d(x, w, epilogue=chain).dtype == x.dtype


# ---------------------------------------------------------------------------------------------------------
# Random calls: torch and jitconv agree on which are mistakes.


def _some(rng: random.Random, low: int, high: int, rank: int) -> Any:
    """An int or a list of ints, now and then an out-of-range or mis-sized one."""
    if rng.random() < 0.05:
        return rng.choice([low - 1, (low,) * (rank + 1), (low,) * (rank - 1) + (low - 1,)])
    return rng.choice([low, rng.randint(low, high), [rng.randint(low, high) for _ in range(rank)]])


def _extent(rng: random.Random, high: int, empty: float) -> int:
    return 0 if rng.random() < empty else rng.randint(1, high)


def random_call(rng: random.Random) -> Case:
    """A small convolution, right about every third time."""
    rank, is_transposed = rng.choice([1, 2, 3]), rng.random() < 0.5
    groups = rng.choice([1, 1, 2, 3, 0, -1]) if rng.random() < 0.2 else rng.choice([1, 2])
    per_group_in, per_group_out = _extent(rng, 2, 0.05), _extent(rng, 2, 0.03)
    channels = max(per_group_in * max(groups, 1) + rng.choice([0] * 20 + [1, -1]), 0)
    kernel = [_extent(rng, 3, 0.02) for _ in range(rank)]
    x_shape = [_extent(rng, 2, 0.1), channels, *(_extent(rng, 6, 0.04) for _ in range(rank))]
    x_shape = x_shape[rng.choice([0, 0, 0, 0, 1]) :]
    outputs = per_group_out * max(groups, 1)
    shape = [per_group_in * max(groups, 1), per_group_out] if is_transposed else [outputs, per_group_in]
    bias = None if rng.random() < 0.5 else torch.randn(max(outputs + rng.choice([0] * 20 + [1]), 0))
    kwargs = {
        "stride": _some(rng, 1, 3, rank),
        "padding": _some(rng, 0, 2, rank),
        "dilation": _some(rng, 1, 3, rank),
        "groups": groups,
    }
    if is_transposed:
        kwargs["output_padding"] = _some(rng, 0, 1, rank)
    elif rng.random() < 0.1:
        kwargs["padding"] = rng.choice(["same", "valid", "full"])
    function = f"conv_transpose{rank}d" if is_transposed else f"conv{rank}d"
    return Case(function, (torch.randn(x_shape), torch.randn([*shape, *kernel]), bias), kwargs)


def _hidden_from_torch(case: Case) -> bool:
    """Whether torch computes nothing and so lets a mistake pass (see STRICTER), or stumbles over it."""
    x, weight, _ = case.args
    return x.numel() == 0 or 0 in weight.shape or np.min(case.kwargs["dilation"]) == 0


@pytest.mark.parametrize("seed", range(2))
def test_torch_and_jitconv_disagree_on_a_random_call(seed: int) -> None:
    rng = random.Random(seed)
    accepted = 0
    for _ in range(250):
        case = random_call(rng)
        theirs = raised(getattr(F, case.function), *case.args, **case.kwargs)
        ours = raised(getattr(jitconv, case.function), *case.args, **case.kwargs)
        if _hidden_from_torch(case) and type(ours) is RuntimeError:
            continue
        described = (case.function, *(None if t is None else tuple(t.shape) for t in case.args), case.kwargs)
        assert type(ours) is type(theirs), (described, ours, theirs)
        if theirs is None:
            accepted += 1
            expected = getattr(F, case.function)(*case.args, **case.kwargs)
            actual = getattr(jitconv, case.function)(*case.args, **case.kwargs)
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert accepted > 50
