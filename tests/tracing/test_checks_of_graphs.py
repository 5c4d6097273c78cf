"""Traced graphs are compared with the function that they were traced from before their numbers are used."""

import pytest
import torch

from bayesfed.tracing import compiler as compiling
from bayesfed.tracing.compiler import Compiler, traceable, using
from bayesfed.tracing.recorder import Recorder


def test_a_traced_graph_that_is_wrong_gives_no_result(monkeypatch):
    """It is compared with the run that was recorded before its first result is used."""
    function = Recorder.function

    def wrong(self, results):
        graph = function(self, results)
        return lambda *inputs: [x + 1 for x in graph(*inputs)]

    monkeypatch.setattr(Recorder, "function", wrong)

    @traceable
    def double(w):
        return 2 * w

    with using(Compiler()) as compiler:
        with pytest.warns(UserWarning, match="double runs eagerly: its traced graph gives other"):
            assert double(torch.ones(2)).tolist() == [2, 2]
        assert double(torch.full((2,), 3.0)).tolist() == [6, 6]
    assert not any(compiler.graphs.values())


def test_what_is_traced_is_checked_at_other_numbers():
    """A function with state gives other numbers than its graph at the second call."""
    calls = []

    @traceable
    def remembers(w):
        calls.append(len(calls))
        return w + len(calls)

    with using(Compiler("auto")) as compiler:
        assert remembers(torch.ones(2)).tolist() == [2, 2]
        with pytest.warns(UserWarning, match="remembers runs eagerly: .*more than its arguments"):
            assert remembers(torch.ones(2)).tolist() == [3, 3]
        assert remembers(torch.ones(2)).tolist() == [4, 4]
    assert list(compiler.graphs.values()) == [None]


def test_an_overflow_that_a_graph_avoids_is_no_disagreement():
    """As y log(exp(x)) does, which is y x in a graph; what is wrong where the function is finite is one."""
    expected = torch.tensor([1.0, torch.inf, torch.nan])
    assert compiling.agree([torch.tensor([1.0, 300.0, -torch.inf])], [expected], 1e-3)
    assert not compiling.agree([torch.tensor([torch.nan, torch.inf, torch.nan])], [expected], 1e-3)
    assert not compiling.agree([torch.tensor([1.1, torch.inf, torch.nan])], [expected], 1e-3)
