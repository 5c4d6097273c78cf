"""Fixtures of these tests."""

import numpy as np
import pandas as pd
import pytest
from scipy.special import expit

from tests.effects.by_hand import fitted


@pytest.fixture(scope="module")
def frame():
    rng = np.random.default_rng(0)
    rows = 120
    frame = pd.DataFrame(
        {
            "hospital": rng.choice(list("BACD"), rows),
            "kind": rng.choice(["b", "a", "c"], rows),
            "x": rng.normal(5.0, 2.0, rows),
            "treated": rng.integers(0, 2, rows),
            "years": rng.uniform(1.0, 9.0, rows),
            "n": rng.integers(1, 9, rows),
        }
    )
    eta = 0.3 * (frame.x - 5.0) * (1.0 + 0.5 * (frame.kind == "b")) - 0.7 * frame.treated
    frame["y"] = 3.0 + eta + rng.normal(size=rows)
    frame["died"] = (rng.random(rows) < expit(eta)).astype(float)
    frame["falls"] = rng.poisson(frame.years * np.exp(0.3 * eta))
    frame["cured"] = rng.binomial(frame.n, expit(eta))
    return frame


@pytest.fixture(scope="module")
def logistic(frame):
    posterior, draws = fitted("died ~ x * treated + (x | hospital)", frame, family="bernoulli")
    place = [posterior.federation.names.index(name) for name in frame.hospital]

    def predictor(x, treated, own=True):
        """The linear predictor of all rows at all draws, ``(S, rows)``."""
        eta = draws["Intercept"][:, None] + draws["x"][:, None] * x
        eta = eta + (draws["treated"][:, None] + draws["x:treated"][:, None] * x) * treated
        if own:
            eta = eta + draws["1|hospital"][:, place] + draws["x|hospital"][:, place] * x
        return eta

    return posterior, draws, predictor
