"""What a call without precision= is multiplied in: torch's own setting for convolutions, whatever set it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from jitconv import precision
from jitconv.problem import PRECISIONS


@pytest.fixture(autouse=True)
def _settings_put_back() -> Iterator[None]:
    yield
    for backend in ("generic", "cuda"):
        torch._C._set_fp32_precision_setter(backend, "all", "none")
    torch.backends.cudnn.allow_tf32 = True  # convolutions and RNNs both


@pytest.fixture(params=["getter", "property"])
def _either_way_of_reading(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The function behind the property, and what is read where a version of torch has it no more."""
    if request.param == "property":
        monkeypatch.setattr(precision, "_read", precision._property)
    else:
        assert precision._read is not precision._property


@pytest.mark.usefixtures("_either_way_of_reading")
def test_a_value_of_the_setting_is_taken_for_another() -> None:
    assert precision.torchs() == "tf32"  # torch's default
    for value, expected in (("ieee", "ieee"), ("none", "ieee"), ("tf32", "tf32")):
        torch.backends.cudnn.conv.fp32_precision = value
        assert precision.torchs() == expected


@pytest.mark.usefixtures("_either_way_of_reading")
def test_the_setting_of_all_of_cudnn_is_not_inherited() -> None:
    torch.backends.cudnn.conv.fp32_precision = "none"
    for value in ("tf32", "ieee"):
        torch.backends.cudnn.fp32_precision = value
        assert precision.torchs() == value
    torch.backends.cudnn.fp32_precision = "none"
    torch.backends.fp32_precision = "tf32"
    assert precision.torchs() == "tf32"
    torch.backends.fp32_precision = "bf16"  # convolutions on CUDA have no such precision
    assert precision.torchs() == "ieee"


def test_the_setting_of_rnns_or_matrix_products_is_taken_for_that_of_convolutions() -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cudnn.rnn.fp32_precision = torch.backends.cuda.matmul.fp32_precision = "ieee"
    try:
        assert precision.torchs() == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_flags_are_followed_inside_alone() -> None:
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        assert precision.torchs() == "ieee"
    assert precision.torchs() == "tf32"


@pytest.mark.parametrize("named", PRECISIONS)
def test_a_named_precision_is_changed_by_the_setting(named: str) -> None:
    for value in ("ieee", "tf32"):
        torch.backends.cudnn.conv.fp32_precision = value
        assert precision.resolved("conv2d", named) == named
        assert precision.resolved("conv2d", None) == value


@pytest.mark.parametrize("wrong", ["tf32x3", "none", "fp32", "", "TF32"])
def test_a_name_that_is_none_is_accepted(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"conv3d.*precision=.*expected None.*'ieee', 'tf32'") as caught:
        precision.resolved("conv3d", wrong)
    assert repr(wrong) in str(caught.value)
