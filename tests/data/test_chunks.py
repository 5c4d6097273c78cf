import torch
from hypothesis import given
from hypothesis import strategies as st

from bayesfed.data import chunks as module
from bayesfed.data.chunks import chunks


def parts(lengths, *args, **settings):
    return [part.tolist() for part in chunks(torch.tensor(lengths), *args, **settings)]


def test_chunks_are_consecutive_and_fit():
    lengths = [1, 1, 1, 5, 1, 9, 1]
    assert parts(lengths, 0, 1, most=6) == [[0, 1, 2], [3], [4], [5], [6]]
    assert parts(lengths, 0, 1) == [list(range(7))]
    assert parts([9], 0, 1, most=1) == [[0]]
    assert parts(lengths, 4, 0, most=9) == [[0, 1], [2, 3], [4, 5], [6]]


@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=60).map(sorted),
    st.integers(1, 300_000_000),
)
def test_chunks_waste_little_and_fit_into_memory(lengths, weight):
    found = parts(lengths, weight, 0, module.ROUND, padding=1.25)
    assert [i for part in found for i in part] == list(range(len(lengths)))
    for part in found:
        own = [lengths[i] for i in part]
        assert len(own) == 1 or len(own) * weight <= module.ROUND
        assert len(own) * max(own) <= 1.25 * sum(own) or len(own) * weight <= module.SMALL
