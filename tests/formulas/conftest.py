"""The rows of most tests of formulas."""

import numpy as np
import pandas as pd
import pytest


@pytest.fixture(scope="module")
def frame():
    rng = np.random.default_rng(0)
    rows = 90
    frame = pd.DataFrame(
        {
            "hospital": np.sort(rng.choice(list("BACD"), rows)),
            "x": rng.normal(5.0, 2.0, rows),
            "z": rng.normal(0.0, 1.0, rows),
            "kind": rng.choice(["b", "a", "c"], rows),
            "ward": rng.choice(["w1", "w2"], rows),
            "item": rng.integers(3, 7, rows),
            "male": rng.random(rows) < 0.5,
            "n": rng.integers(1, 20, rows),
        }
    )
    frame.loc[frame.hospital == "C", "kind"] = "a"  # C has one level only
    eta = 0.3 * (frame.x - 5.0) + (frame.kind == "b")
    frame["y"] = 100.0 + 10.0 * (eta + rng.normal(size=rows))
    frame["count"] = rng.poisson(np.exp(eta))
    frame["s"] = rng.binomial(frame.n, 0.5)
    frame["yes"] = np.where(rng.random(rows) < 0.5, "yes", "no")
    frame["share"] = rng.beta(3.0, 3.0, rows)
    return frame
