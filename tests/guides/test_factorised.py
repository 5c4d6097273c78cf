"""The coordinates of the factorised guide."""

import pytest
import torch
from torch.distributions import constraints

from bayesfed.guides.factorised import constant_support


def test_bounds_that_differ_are_refused():
    zero = torch.zeros(2, 1)
    for upper in (torch.ones(2, 1), torch.tensor(1.0)):
        support = constraints.interval(zero, upper)
        assert constant_support("x", support) is support
    for differing in (torch.tensor([[1.0], [2.0]]), torch.tensor([[2.0], [1.0]])):
        with pytest.raises(ValueError, match="the bounds of site 'x' depend on other variables"):
            constant_support("x", constraints.independent(constraints.interval(zero, differing), 1))
