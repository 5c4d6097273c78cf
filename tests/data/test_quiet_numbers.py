"""Tests that numbers are never changed silently."""

import numpy as np
import pandas as pd
import pytest
import torch

import bayesfed as bf

WHO = {"who": ["a", "a", "b"]}


def from_frame(**columns):
    return bf.Federation.from_frame(pd.DataFrame(WHO | columns), client="who")


def from_arrow(**columns):
    pa = pytest.importorskip("pyarrow")
    return bf.Federation.from_arrow(pa.table(WHO | columns), client="who")


def from_arrays(**columns):
    return bf.Federation.from_arrays({"a": {name: np.array(v) for name, v in columns.items()}})


WAYS = pytest.mark.parametrize("build", [from_frame, from_arrow, from_arrays])


@pytest.mark.parametrize("build", [from_frame, from_arrays])
@pytest.mark.parametrize("codes", [["02139", "10001", "2139"], ["1", "2", "3"], [1, "2", 3.0]])
def test_text_is_refused(build, codes):
    with pytest.raises(TypeError, match=r"'code' is categorical or text.*astype\(float\)"):
        build(code=pd.Series(codes, dtype=object))


def test_the_advice_for_categories_mentions_missing_values():
    with pytest.raises(TypeError, match="codes missing values as -1"):
        from_frame(sex=["m", None, "f"])


@WAYS
@pytest.mark.parametrize(
    "values",
    [
        [1_700_000_000, 1_700_000_050, 1_700_000_100],
        [16_777_217, 16_777_216, 5],
        [1.7e9, 1.7e9 + 50.0, 1.7e9 + 100.0],
    ],
    ids=["seconds", "identifiers", "fractional seconds"],
)
def test_numbers_that_single_precision_merges_are_named(build, values):
    with pytest.raises(ValueError, match=r"'stamp' has numbers that float32 cannot represent"):
        build(stamp=values)
    torch.set_default_dtype(torch.float64)
    try:
        kept = build(stamp=values)["stamp"]
    finally:
        torch.set_default_dtype(torch.float32)
    assert kept.tolist() == values


@WAYS
@pytest.mark.parametrize(
    "values",
    [
        [0.1, 0.2, 0.3],
        [1e6, 1.2e6, 3.3e6],
        [0.1, 0.1, 0.1],
        [2**24, 3, -(2**24)],
        [True, False, True],
        [1e-30, 0.0, 2.0],
    ],
    ids=["fractions", "dollars", "constant", "whole", "boolean", "small"],
)
def test_numbers_that_single_precision_represents_are_kept(build, values):
    np.testing.assert_allclose(
        build(x=values)["x"].numpy(), np.array(values, dtype=float), rtol=1e-7
    )


@WAYS
def test_infinity_is_refused(build):
    with pytest.raises(ValueError, match="field 'x' (is infinite|holds an infinite number)"):
        build(x=[1.0, float("inf"), 2.0])


def test_dropped_rows_are_counted():
    frame = pd.DataFrame({"who": list("aaabbc"), "x": [1.0, np.nan, np.nan, 2.0, np.nan, 3.0]})
    with pytest.warns(
        UserWarning, match=r"leaves out 3 of 6 rows, of 2 clients \(most of 'a' 2, 'b' 1\)"
    ):
        kept = bf.Federation.from_frame(frame, client="who", missing="drop")
    assert kept["x"].tolist() == [1.0, 2.0, 3.0]


def test_a_client_may_have_two_rows_that_are_nearly_equal():
    """Single precision changes them by more than a ten-thousandth of their difference, not of the field's range."""
    pa = pytest.importorskip("pyarrow")
    clients = {"a": [0.22316192930400555, 0.2231619], "b": [0.0, 1.0]}
    arrays = bf.Federation.from_arrays({name: {"x": x} for name, x in clients.items()})
    parts = [pa.table({"who": [name] * 2, "x": x}) for name, x in clients.items()]
    table = bf.Federation.from_arrow(pa.concat_tables(parts), client="who")
    assert (
        table["x"].tolist()
        == arrays["x"].tolist()
        == torch.tensor([*clients["a"], *clients["b"]]).tolist()
    )


def test_the_error_names_the_client_whose_number_is_merged():
    stamps = {"a": {"stamp": [1_700_000_000.0]}, "b": {"stamp": [1_700_000_050.0, 1_700_000_100.0]}}
    with pytest.raises(ValueError, match="client '[ab]': field 'stamp' has numbers"):
        bf.Federation.from_arrays(stamps)


@pytest.mark.parametrize("other", [[0.5], torch.tensor([0.5])], ids=["fractions", "tensor"])
def test_whole_numbers_are_not_merged_beside_other_types(other):
    codes = np.array([16_777_217, 16_777_216])
    with pytest.raises(ValueError, match="client 'a': field 'code' has numbers"):
        bf.Federation.from_arrays({"a": {"code": codes}, "b": {"code": other}})
