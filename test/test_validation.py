"""Checks of numbers: which values pass, as what type, and what the errors state."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from variable_batch_size._validation import as_int, check_int, check_number, type_error, value_error

INTEGER_DTYPES = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
FLOAT_DTYPES = [np.float16, np.float32, np.float64, np.longdouble]

numpy_integers = st.sampled_from(INTEGER_DTYPES).flatmap(
    lambda dtype: st.integers(int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)).map(dtype)
)
any_integer = st.one_of(st.integers(-(2**300), 2**300), numpy_integers)
not_numbers = st.one_of(
    st.none(),
    st.booleans(),
    st.booleans().map(np.bool_),
    st.text(),
    st.binary(),
    st.complex_numbers(),
    st.complex_numbers(width=64).map(np.complex64),
    st.fractions(),
    st.decimals(),
    st.lists(st.integers(), max_size=2),
    st.lists(st.integers(0, 9), max_size=2).map(np.array),
)
not_integers = st.one_of(not_numbers, st.floats(), st.floats(width=32).map(np.float32))


class Index:
    """A number of another library: not an int, but usable as an index."""

    def __init__(self, number):
        self.number = number

    def __index__(self):
        return self.number


@given(any_integer)
def test_as_int_returns_every_integer_as_a_python_int(value):
    for integer in (value, Index(int(value))):
        number = as_int(integer)
        assert type(number) is int
        assert number == value


@given(not_integers)
def test_as_int_returns_none_for_any_other_value(value):
    assert as_int(value) is None


@given(any_integer, any_integer, st.one_of(st.none(), any_integer))
def test_check_int_returns_a_python_int_in_range_and_rejects_others(value, minimum, maximum):
    minimum, maximum = int(minimum), None if maximum is None else int(maximum)
    if minimum <= int(value) and (maximum is None or int(value) <= maximum):
        number = check_int(value, "rank", minimum, maximum)
        assert type(number) is int
        assert number == value
        return
    with pytest.raises(ValueError, match=r"^rank must be an integer >= .*; use another one$") as caught:
        check_int(value, "rank", minimum, maximum, "use another one")
    assert f"must be an integer >= {minimum}" in str(caught.value)
    assert f"got {int(value)};" in str(caught.value)


@given(st.one_of(st.floats(), any_integer, *(st.floats(width=16).map(dtype) for dtype in FLOAT_DTYPES)))
def test_check_number_returns_a_finite_float_from_zero_and_rejects_others(value):
    if math.isfinite(value) and value >= 0:
        number = check_number(value, "lr", "pass a number")
        assert type(number) is float
        assert number == float(value)
        return
    with pytest.raises(ValueError, match="lr") as caught:
        check_number(value, "lr", "pass a number")
    assert str(caught.value) == f"lr must be a finite number >= 0, got {value!r}; pass a number"


@given(not_numbers)
def test_check_number_raises_a_type_error_for_any_other_value(value):
    with pytest.raises(TypeError) as caught:
        check_number(value, "lr", "pass a number")
    found = f"{value!r:.60} ({type(value).__name__})"
    assert str(caught.value) == f"lr must be a finite number >= 0, got {found}; pass a number"


def test_an_error_has_three_parts_and_shortens_a_long_value():
    assert str(value_error("a must be b", 3, "do c")) == "a must be b, got 3; do c"
    assert str(type_error("a must be b", None, "do c")) == "a must be b, got None (NoneType); do c"
    lines = torch.nn.Sequential(torch.nn.Tanh())
    assert str(type_error("a", lines, "c")) == "a, got Sequential; c"
    message = str(type_error("a must be b", "x" * 1000, "do c"))
    assert message == f"a must be b, got '{'x' * 59} (str); do c"
    assert type(value_error("", 0, "")) is ValueError
    assert type(type_error("", 0, "")) is TypeError


@pytest.mark.parametrize("value", [np.array(True), torch.tensor(True), torch.tensor([True])[0]], ids=str)
def test_rejects_a_bool_in_an_array_or_tensor(value):
    assert as_int(value) is None


def test_an_integer_beyond_float64_is_out_of_range():
    with pytest.raises(ValueError, match=r"^x must be a finite number >= 0, got 10+; pass one$"):
        check_number(10**400, "x", "pass one")
