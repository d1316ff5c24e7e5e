"""The bytes of a kernel's argument are those that its C struct has."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitconv.layout import MAX_ARGUMENT_BYTES, Field, Layout, divisor

FIELDS = (
    Field("scale", "float"),
    Field("x", "pointer", "const half_t"),
    Field("extent", "index", count=3),
    Field("by", "divisor"),
    Field("bound", "float"),
    Field("y", "pointer", "float"),
    Field("last", "float"),
)


def test_offsets_ignore_natural_alignment() -> None:
    # float 0, pad, pointer 8, 3 ints 16, divisor of three uint32 at 28, float 40, pad, pointer 48, float 56, pad.
    narrow = Layout(FIELDS, 32)
    assert narrow.offsets == {"scale": 0, "x": 8, "extent": 16, "by": 28, "bound": 40, "y": 48, "last": 56}
    assert narrow.size == 64
    # With 64-bit indices: 3 longs at 16, divisor of one long at 40.
    wide = Layout(FIELDS, 64)
    assert wide.offsets == {"scale": 0, "x": 8, "extent": 16, "by": 40, "bound": 48, "y": 56, "last": 64}
    assert wide.size == 72


def test_a_struct_of_small_members_is_padded() -> None:
    assert Layout((Field("a", "float"), Field("b", "index")), 32).size == 8
    assert Layout((Field("a", "float"),), 64).size == 4
    assert Layout((), 32).size == 0


def test_declarations_have_other_types_or_order() -> None:
    assert Layout(FIELDS, 32).declarations() == [
        "float scale;", "const half_t* x;", "Index extent[3];", "Divisor<Index> by;", "float bound;", "float* y;",
        "float last;",
    ]  # fmt: skip


@pytest.mark.parametrize("bits", [32, 64])
def test_values_land_at_other_offsets(bits: int) -> None:
    layout = Layout(FIELDS, bits)
    data = layout.pack({"extent": (7, -8, 9), "x": 0x1122334455667788, "bound": 2.5, "by": 10})
    code = "i" if bits == 32 else "q"
    assert struct.unpack_from(f"<3{code}", data, layout.offsets["extent"]) == (7, -8, 9)
    assert struct.unpack_from("<Q", data, layout.offsets["x"]) == (0x1122334455667788,)
    assert struct.unpack_from("<f", data, layout.offsets["bound"]) == (2.5,)
    # What has no value is a null pointer or a zero.
    assert struct.unpack_from("<Q", data, layout.offsets["y"]) == (0,)
    first = struct.unpack_from("<I" if bits == 32 else "<q", data, layout.offsets["by"])
    assert first == (10,)
    assert len(data) == layout.size


def test_more_arguments_than_a_launch_takes_are_packed() -> None:
    many = tuple(Field(f"p{i}", "pointer", "float") for i in range(MAX_ARGUMENT_BYTES // 8))
    assert Layout(many, 32).size == MAX_ARGUMENT_BYTES
    with pytest.raises(ValueError, match=r"4104 bytes of arguments: expected at most 4096"):
        Layout((*many, Field("one_more", "pointer", "float")), 32)


def test_an_unknown_kind_is_laid_out() -> None:
    with pytest.raises(ValueError, match="kind='double': expected pointer, index, float, divisor or tensor_map"):
        Layout((Field("a", "double"),), 32)


def quotient(n: int, by: int) -> int:
    """n / by as Divisor<int32_t> computes it, in uint32 arithmetic."""
    value, multiplier, shift = divisor(by, 32)
    assert value == by
    assert 0 < multiplier < 2**32
    assert 0 <= shift < 32
    total = (n * multiplier >> 32) + n
    assert total < 2**32, "the sum overflows"
    return total >> shift


@given(st.integers(0, 2**31 - 1), st.integers(1, 2**31 - 1))
def test_a_quotient_by_multiplication_is_off_by_one(n: int, by: int) -> None:
    assert quotient(n, by) == n // by


@given(st.integers(1, 2**31 - 1), st.integers(0, 2**31 - 1), st.sampled_from([-1, 0, 1]))
def test_a_quotient_is_off_by_one_beside_a_multiple(by: int, times: int, beside: int) -> None:
    n = times % (2**31 // by + 1) * by + beside
    if 0 <= n < 2**31:
        assert quotient(n, by) == n // by


@pytest.mark.parametrize("by", [1, 2, 3, 5, 7, 641, 2**16, 2**16 + 1, 2**30, 2**30 + 1, 2**31 - 1])
def test_a_quotient_is_wrong_at_the_ends_of_the_range(by: int) -> None:
    for n in (0, 1, by - 1, by, 2**31 - 2, 2**31 - 1):
        assert quotient(n, by) == n // by


def test_a_wide_divisor_is_not_the_number_itself() -> None:
    assert divisor(2**40 + 1, 64) == (2**40 + 1,)
