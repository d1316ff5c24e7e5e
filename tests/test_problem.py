"""The Problem: its identity, its shapes, its errors."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import jitconv
from jitconv.problem import BAKED, OperandSpec, Problem, StepSpec, canonical_json, index_bits

ADD = StepSpec("add", (("other", OperandSpec("channel", "float32")),), cuda="v + other")
POOL = StepSpec("max_pool", (), (("ceil_mode", True), ("window", (2, 3))))
NORM = StepSpec("layer_norm", (("eps", OperandSpec("number")),), (("width", 9),))
MINE = StepSpec("mine", cuda="f(v)", preamble="__device__ float f(float v) { return v; }")

BASE = Problem(
    "conv", 6, 12, (3, 2), (2, 1), ((1, 0), (2, 2)), (1, 2), (0, 0), groups=2, bias=True, epilogue=(ADD, POOL, NORM)
)

CHANGES: dict[str, Any] = {
    "operator": "conv_transpose",
    "in_channels": 8,
    "out_channels": 14,
    "kernel_size": (3, 3),
    "stride": (1, 2),
    "padding": ((0, 1), (2, 2)),
    "padding_mode": "reflect",
    "dilation": (2, 1),
    "output_padding": (0, 1),
    "groups": 3,
    "mid_channels": 6,
    "dtype": "float16",
    "memory_format": "channels_last",
    "x_memory_format": "channels_last",
    "x_vector": True,
    "x_patches": "rows",
    "sizes": (8, 16),
    "precision": "tf32",
    "index_bits": 64,
    "bias": False,
    "mid_bias": True,
    "prologue": (MINE,),
    "between": (MINE,),
    "epilogue": (POOL, ADD, NORM),
}


def test_a_baked_constant_is_missing_from_the_table_or_the_test() -> None:
    names = {f.name for f in fields(Problem)}
    assert set(BAKED) == names
    assert set(CHANGES) == names


@pytest.mark.parametrize("name", CHANGES)
def test_a_field_is_missing_from_the_identity(name: str) -> None:
    changed = replace(BASE, **{name: CHANGES[name]})
    assert changed != BASE
    assert changed.digest() != BASE.digest()
    assert changed.canonical() != BASE.canonical()


STEP_CHANGES = [
    replace(ADD, name="sub"),
    replace(ADD, operands=(("other", OperandSpec("tensor", "float32")),)),
    replace(ADD, operands=(("other", OperandSpec("channel", "float16")),)),
    replace(ADD, operands=(("alpha", OperandSpec("channel", "float32")),)),
    replace(ADD, cuda="v - other"),
    replace(ADD, preamble="// edited"),
    replace(ADD, attributes=(("axis", 1),)),
]


@pytest.mark.parametrize("step", STEP_CHANGES, ids=range(len(STEP_CHANGES)))
def test_a_part_of_a_step_is_missing_from_the_identity(step: StepSpec) -> None:
    assert replace(BASE, epilogue=(step, POOL, NORM)).digest() != BASE.digest()


@pytest.mark.parametrize(
    "problem", [BASE, *(replace(BASE, **{n: v}) for n, v in CHANGES.items())], ids=["base", *CHANGES]
)
def test_json_loses_something(problem: Problem) -> None:
    again = Problem.from_canonical(json.loads(canonical_json(problem.canonical())))
    assert again == problem
    assert hash(again) == hash(problem)
    assert again.digest() == problem.digest()


def test_the_digest_depends_on_the_process() -> None:
    code = (
        "import sys, json; from jitconv.problem import Problem; "
        "print(Problem.from_canonical(json.loads(sys.argv[1])).digest())"
    )
    root = str(Path(jitconv.__file__).parent.parent)
    for seed in ("0", "1"):
        out = subprocess.run(
            [sys.executable, "-c", code, json.dumps(BASE.canonical())],
            capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed, "PYTHONPATH": root},
        ).stdout  # fmt: skip
        assert out.strip() == BASE.digest()


@pytest.mark.parametrize("value", [float("nan"), {1}, b"x", object()])
def test_what_cannot_be_hashed_is_ignored(value: Any) -> None:
    step = replace(ADD, attributes=(("what", value),))
    with pytest.raises((TypeError, ValueError)):
        replace(BASE, epilogue=(step,)).digest()


INVALID = [
    ("operator", "conv4d", r"operator='conv4d': expected one of"),
    ("kernel_size", (1, 1, 1, 1), r"kernel_size=\(1, 1, 1, 1\): expected 1 to 3 dimensions"),
    ("kernel_size", (), r"kernel_size=\(\): expected 1 to 3 dimensions"),
    ("stride", (1,), r"stride=\(1,\): expected 2 entries, as kernel_size has"),
    ("padding", ((0, 0),), r"padding=.*: expected 2 entries"),
    ("dilation", (1, 1, 1), r"dilation=.*: expected 2 entries"),
    ("output_padding", (0,), r"output_padding=.*: expected 2 entries"),
    ("dtype", "float64", r"dtype='float64': expected one of"),
    ("padding_mode", "zero", r"padding_mode='zero': expected one of"),
    ("memory_format", "nhwc", r"memory_format='nhwc': expected one of"),
    ("index_bits", 16, r"index_bits=16: expected 32 or 64"),
    ("in_channels", 0, r"in_channels=0: expected at least 1"),
    ("out_channels", 0, r"out_channels=0: expected at least 1"),
    ("groups", 0, r"groups=0: expected at least 1"),
    ("in_channels", 7, r"in_channels=7: expected a multiple of groups=2"),
    ("out_channels", 13, r"out_channels=13: expected a multiple of groups=2"),
]


@pytest.mark.parametrize(("name", "value", "message"), INVALID)
def test_an_invalid_problem_is_accepted(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(BASE, **{name: value})


def test_a_depthwise_separable_pair_needs_outputs_that_its_groups_divide() -> None:
    pair = replace(BASE, operator="depthwise_separable", in_channels=6, groups=6, mid_channels=6, out_channels=7)
    assert pair.out_channels % pair.groups != 0


@given(
    kernel=st.integers(1, 5), stride=st.integers(1, 4), before=st.integers(0, 4), after=st.integers(0, 4),
    dilation=st.integers(1, 3), extra=st.integers(0, 20),
)  # fmt: skip
def test_a_convolution_has_another_extent_than_in_torch(
    kernel: int, stride: int, before: int, after: int, dilation: int, extra: int
) -> None:
    extent = dilation * (kernel - 1) + 1 + extra
    problem = Problem("conv", 1, 1, (kernel,), (stride,), ((before, after),), (dilation,), (0,))
    x = F.pad(torch.zeros(1, 1, extent), (before, after))
    expected = F.conv1d(x, torch.zeros(1, 1, kernel), stride=stride, dilation=dilation)
    assert problem.convolution_extents((extent,)) == tuple(expected.shape[2:])


@given(
    kernel=st.integers(1, 5), stride=st.integers(1, 4), padding=st.integers(0, 2), dilation=st.integers(1, 3),
    extent=st.integers(1, 9), extra=st.integers(0, 3),
)  # fmt: skip
def test_a_transposed_convolution_has_another_extent_than_in_torch(
    kernel: int, stride: int, padding: int, dilation: int, extent: int, extra: int
) -> None:
    extra = min(extra, max(stride, dilation) - 1)
    if (extent - 1) * stride - 2 * padding + dilation * (kernel - 1) + extra + 1 < 1:
        return
    problem = Problem("conv_transpose", 1, 1, (kernel,), (stride,), ((padding, padding),), (dilation,), (extra,))
    expected = F.conv_transpose1d(
        torch.zeros(1, 1, extent), torch.zeros(1, 1, kernel), stride=stride, padding=padding, dilation=dilation,
        output_padding=extra,
    )  # fmt: skip
    assert problem.convolution_extents((extent,)) == tuple(expected.shape[2:])


def test_offsets_that_overflow_are_32_bits_wide() -> None:
    assert index_bits() == 32
    assert index_bits(2**31 - 2**17, 5) == 32
    assert index_bits(5, 2**31 - 2**15) == 64
    assert index_bits(2**31) == 64
    assert index_bits(2**40, 1) == 64


def test_labels_hide_what_matters_to_a_reader() -> None:
    assert BASE.label() == "conv2d_c6k12_k3x2_s2x1_g2_add_max_pool_layer_norm_float32"
    assert replace(BASE, epilogue=(), stride=(1, 1), groups=1, kernel_size=(3, 3)).label() == "conv2d_c6k12_k3_float32"
    assert replace(BASE, memory_format="channels_last").label().endswith("_channels_last")


def test_a_step_with_an_expression_needs_more_than_an_element() -> None:
    assert (ADD.needs, NORM.needs, POOL.needs) == ("element", "row", "window")
    # A registered step may take the name of a built-in one.
    assert StepSpec("layer_norm", cuda="v").needs == "element"
    assert POOL.attribute("window") == (2, 3)
    with pytest.raises(KeyError):
        POOL.attribute("width")


def test_taps_are_not_the_product_of_the_filter() -> None:
    assert BASE.taps == 6
    assert BASE.rank == 2
