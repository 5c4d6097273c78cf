"""Institutions with keys, their uploads, and statistics of masked ones."""

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from scipy.stats import chisquare, kstest

from bayesfed.deploy.fixed_point import LARGEST
from bayesfed.deploy.secure import (
    Keys,
    SumId,
    mask,
    new_key,
    public_key,
    seal,
)

NAMES = ("north", "south", "west")


ODDS = 1e-8


def keys_of(*names, pinned=None):
    """Sites with new keys, each of which has pinned all."""
    identities = {name: new_key() for name in names}
    pins = {name: public_key(key) for name, key in identities.items()}
    return {name: Keys(name, key, new_key(), pins) for name, key in identities.items()}


def sum_of(institutions, *, run="trial", round=0, attempt=0):
    roster = {name: public_key(institution.run_key) for name, institution in institutions.items()}
    return SumId(run, round, attempt, b"theta", roster)


def sent(institutions, uploads, of):
    masked = {
        name: mask(uploads[name], institution, of) for name, institution in institutions.items()
    }
    return masked, {name: seal(institution, of) for name, institution in institutions.items()}


def words_of(masked):
    return np.concatenate([masked[name].ravel() for name in sorted(masked)])


def uniform(words):
    """Whether words modulo 2⁶⁴ pass: their bytes by chi-square, their size by Kolmogorov-Smirnov."""
    counts = np.bincount(np.ascontiguousarray(words).view(np.uint8), minlength=256)
    size = kstest(words / 2.0**64, "uniform").pvalue
    return min(chisquare(counts).pvalue, size) > ODDS


# -- the sum --------------------------------------------------------------------------------------

DTYPES = {
    np.float64: st.floats(-LARGEST, LARGEST),
    np.float32: st.floats(-LARGEST, LARGEST, width=32),
    np.float16: st.floats(-60000, 60000, width=16),
    np.int64: st.integers(-(2**40), 2**40),
    np.int32: st.integers(-(2**31), 2**31 - 1),
    np.bool_: st.booleans(),
}


@st.composite
def uploads(draw):
    """Uploads of three to six institutions with the same parts: any shapes, precisions and magnitudes."""
    names = draw(st.lists(st.text(max_size=5), min_size=1, max_size=3, unique=True))
    shapes = {
        name: draw(st.just(()) | array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4))
        for name in names
    }
    kinds = {name: draw(st.sampled_from(list(DTYPES))) for name in names}
    return [
        {
            name: torch.from_numpy(
                np.array(draw(arrays(kinds[name], shapes[name], elements=DTYPES[kinds[name]])))
            )
            for name in names
        }
        for _ in range(draw(st.integers(3, 6)))
    ]
