"""Fixtures of these tests."""

import pytest

import bayesfed as bf
from tests.deploy.runs_over_nodes import EAGER, PLAN, SCHOOLS


@pytest.fixture(scope="module")
def in_one_process():
    """The fit in one process."""
    return bf.fit(PLAN.model, SCHOOLS, PLAN.algorithm, rounds=3, execution=EAGER)
