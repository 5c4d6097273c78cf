"""Frames of every kind give the numbers that are in them, or an error in the package's own words."""

from __future__ import annotations

import decimal
import importlib.util

import numpy as np
import pandas as pd
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bayesfed as bf
from bayesfed.data.columns import UnknownName

OWN = (ValueError, TypeError, UnknownName)
NUMBERS = {  # dtype to whether it may have gaps
    "float64": True,
    "float32": True,
    "int64": False,
    "uint8": False,
    "bool": False,
    "Int64": True,
    "Float32": True,
    "boolean": True,
    "object": True,
    "decimal": True,
    "double[pyarrow]": True,
    "int64[pyarrow]": True,
}
IDS = {
    "text": ["a", "Øst/2", "a "],
    "int": [1, 2, 10],
    "float": [1.0, 2.0, 10.0],
    "category": ["z", "a", "b"],
    "date": pd.to_datetime(["2024-01-01", "2024-02-01", "2024-03-01"]).tolist(),
    "Int64": [1, 2, 3],
    "string[pyarrow]": ["a", "b", "c"],
}
LABELS = ["y", "a b", "Größe", "x/y", 7, "x.y", "[0]"]


def column(values, dtype):
    """Return a column of small whole numbers and gaps, None."""
    if dtype == "decimal":
        values = [None if v is None else decimal.Decimal(v) for v in values]
    elif dtype in ("bool", "boolean"):
        values = [None if v is None else bool(v) for v in values]
    elif dtype in ("float64", "float32"):
        values = [np.nan if v is None else v for v in values]
    if dtype == "decimal":
        return pd.Series(values, dtype=object)
    return pd.Series(values, dtype=dtype)


@st.composite
def frames(draw):
    rows = draw(st.integers(1, 6))
    kind = draw(st.sampled_from(sorted(IDS)))
    ids = pd.Series(draw(st.lists(st.sampled_from(IDS[kind]), min_size=rows, max_size=rows)))
    dtype = draw(st.sampled_from(sorted(NUMBERS)))
    numbers = st.integers(0, 1 if dtype in ("bool", "boolean") else 9)
    values = draw(
        st.lists(st.none() | numbers if NUMBERS[dtype] else numbers, min_size=rows, max_size=rows)
    )
    label = draw(st.sampled_from(LABELS))
    own = {"who": ids.astype(kind) if kind in ("category", "Int64", "string[pyarrow]") else ids}
    index = draw(st.sampled_from([range(rows), list("zyxwvu")[:rows], [0] * rows]))
    frame = pd.DataFrame(own | {label: column(values, dtype)}).set_axis(index)
    return frame, label, values


def check(frame, label, values, missing):
    try:
        found = bf.Federation.from_frame(frame, client="who", missing=missing)
    except OWN as error:
        assert missing == "fail" and None in values
        assert str(label) in str(error) and "NaN" in str(error)
        return
    order = np.argsort(pd.factorize(frame["who"])[0], kind="stable")
    expected = np.array([np.nan if v is None else float(v) for v in values])[order]
    np.testing.assert_array_equal(found[label].double().numpy(), expected)
    assert len(found) == frame["who"].nunique() == len(set(found.names))


@given(frames(), st.sampled_from(["fail", "keep"]))
@settings(max_examples=300, deadline=None)
def test_every_frame_gives_its_numbers(drawn, missing):
    check(*drawn, missing)


@pytest.mark.slow
@given(frames(), st.sampled_from(["fail", "keep"]))
@settings(max_examples=1000, deadline=None)
def test_every_frame_gives_its_numbers_at_length(drawn, missing):
    check(*drawn, missing)


PLAIN = {"who": ["a", "b", "a"], "y": [1.0, 2.0, None], "n": [3, 4, 5]}


def polars(columns):
    return pl.DataFrame(columns)


def arrow(columns):
    return pytest.importorskip("pyarrow").table(columns)


@pytest.mark.parametrize("make", [polars, lambda c: polars(c).lazy(), arrow, dict])
def test_frames_of_other_libraries(make):
    found = bf.Federation.from_frame(make(PLAIN), client="who", missing="keep")
    expected = bf.Federation.from_frame(pd.DataFrame(PLAIN), client="who", missing="keep")
    assert found.names == expected.names
    for name in ("y", "n"):
        np.testing.assert_array_equal(found[name].numpy(), expected[name].numpy())


@pytest.mark.skipif(not importlib.util.find_spec("formulae"), reason="bayesfed[formulas]")
@pytest.mark.parametrize("make", [polars, arrow, dict])
def test_formulas_take_them_too(make):
    plain = {"g": list("aabbcc"), "y": [1.0, 2.0, 4.0, 3.0, 0.5, 1.5], "x": [0.0, 1, 2, 3, 4, 5]}
    expected = bf.formula("y ~ x + (1 | g)", pd.DataFrame(plain))
    if make is not dict:
        assert bf.formula("y ~ x + (1 | g)", make(plain)).source == expected.source
    apart = {name: make(rows.to_dict("list")) for name, rows in pd.DataFrame(plain).groupby("g")}
    assert bf.formula("y ~ x + (1 | g)", apart).source == expected.source


def test_ids_that_became_floats_are_the_same_clients():
    """A column of numbers with a gap, or one that a merge made, has 1.0 in place of 1."""
    frames = [
        pd.DataFrame({"who": who, "y": [1.0, 2.0]}) for who in ([1, 2], [1.0, 2.0], ["1", "2"])
    ]
    assert {bf.Federation.from_frame(f, client="who").names for f in frames} == {("1", "2")}
    narrow = pd.DataFrame({"who": np.array([1, 2], np.float32), "y": [1.0, 2.0]})
    assert bf.Federation.from_frame(narrow, client="who").names == ("1", "2")
    with pytest.raises(ValueError, match="client '1' appears twice"):
        bf.Federation.from_frame({"who": [1, "1"], "y": [1.0, 2.0]}, client="who")


def test_lists_in_cells_are_vectors():
    frame = pd.DataFrame({"who": ["a", "b"], "x": [[1.0, 2.0], [3.0, 4.0]]})
    assert bf.Federation.from_frame(frame, client="who")["x"].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    frame = pd.DataFrame({"who": ["a", "b"], "x": [[1.0, 2.0], [3.0]]})
    with pytest.raises(TypeError, match="'x' holds lists of different lengths"):
        bf.Federation.from_frame(frame, client="who")


def test_a_client_may_be_a_level_of_the_index():
    frame = pd.DataFrame(PLAIN).fillna(0.0).set_index("who")
    assert bf.Federation.from_frame(frame, client="who").names == ("a", "b")


REFUSED = {
    "two columns with the name 'y'": pd.concat(
        [pd.DataFrame(PLAIN), pd.DataFrame({"y": [0.0] * 3})], axis=1
    ),
    "labels of several levels": pd.DataFrame([[1.0, 2.0]], columns=[["a", "b"], ["who", "y"]]),
    "not a str: of pandas or polars": "rows.csv",
    "use Federation.from_arrays": {"a": pd.DataFrame(PLAIN)},
    "has type complex128": {"who": ["a"], "y": [1 + 1j]},
    "'y' is categorical or text": {"who": ["a"], "y": ["one"]},
    "has type datetime64": {"who": ["a"], "y": [pd.Timestamp("2024-01-01")]},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_no_frame_of_numbers_is_refused(message):
    with pytest.raises((ValueError, TypeError), match=message):
        bf.Federation.from_frame(REFUSED[message], client="who")


def test_rows_to_predict_are_a_federation():
    posterior = bf.fit(bf.models.eight_schools, bf.datasets.eight_schools(), rounds=1)
    with pytest.raises(TypeError, match="rows are a Federation, not a DataFrame"):
        posterior.predict(pd.DataFrame(PLAIN))
