"""Do formulas of each family agree with NUTS of the same program on the pooled rows? Makes families.md.

    python experiments/families.py            # five minutes

Data are simulated: 12 clients of 30 rows, an effect of a covariate, effects of the clients of standard deviation 0.5.
bayesfed fits with its defaults. The cells are the largest shift of a mean in NUTS's standard deviations, and the range
of the ratios of standard deviations, over the global and the local variables of the program.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import runner
from distances import cells
from pooled_nuts import nuts

import bayesfed as bf

CLIENTS, ROWS = 12, 30
Draw = Callable[[np.random.Generator, np.ndarray, np.ndarray], Any]


def ordered(rng: np.random.Generator, eta: np.ndarray, z: np.ndarray) -> np.ndarray:
    cutpoints = np.array([-1.0, 0.5, 1.5])
    return ((eta + rng.logistic(size=len(eta)))[:, None] > cutpoints).sum(1)


def one_of_three(rng: np.random.Generator, eta: np.ndarray, z: np.ndarray) -> np.ndarray:
    logits = np.stack([0 * eta, eta, z - eta], 1) + rng.gumbel(size=(len(eta), 3))
    return np.array(["a", "b", "c"])[logits.argmax(1)]


def positive(rng: np.random.Generator, rate: np.ndarray) -> np.ndarray:
    """Return draws of zero-truncated Poisson variables."""
    first = -np.log1p(-rng.random(len(rate)) * -np.expm1(-rate))
    return 1 + rng.poisson(rate - first)


PROBLEMS: dict[str, tuple[str, str, Draw]] = {
    "gaussian, sigma": (
        "gaussian",
        "y ~ x + (1 | g)\nsigma ~ z + (1 | g)",
        lambda rng, eta, z: eta + np.exp(-0.5 + 0.4 * z) * rng.normal(size=len(eta)),
    ),
    "weibull, cens": (
        "weibull",
        "y | cens(late) ~ x + (1 | g)",
        lambda rng, eta, z: rng.weibull(1.5, len(eta)) * np.exp(eta),
    ),
    "lognormal": (
        "lognormal",
        "y ~ x + (1 | g)",
        lambda rng, eta, z: np.exp(eta + 0.5 * rng.normal(size=len(eta))),
    ),
    "hurdle_gamma": (
        "hurdle_gamma",
        "y ~ x + (1 | g)\nhu ~ z",
        lambda rng, eta, z: rng.gamma(2.0, np.exp(eta) / 2.0) * (rng.logistic(size=len(z)) < 1 - z),
    ),
    "beta_binomial": (
        "beta_binomial",
        "y | trials(n) ~ x + (1 | g)",
        lambda rng, eta, z: rng.binomial(
            10, rng.beta(5 / (1 + np.exp(-eta)), 5 / (1 + np.exp(eta)))
        ),
    ),
    "zero_inflated_poisson": (
        "zero_inflated_poisson",
        "y ~ x + (1 | g)\nzi ~ z",
        lambda rng, eta, z: rng.poisson(np.exp(1 + eta)) * (rng.logistic(size=len(z)) < 1 - z),
    ),
    "zero_inflated_negative_binomial": (
        "zero_inflated_negative_binomial",
        "y ~ x + (1 | g)",
        lambda rng, eta, z: (
            rng.poisson(np.exp(1 + eta) * rng.gamma(3.0, 1 / 3, len(z)))
            * (rng.random(len(z)) < 0.7)
        ),
    ),
    "hurdle_poisson": (
        "hurdle_poisson",
        "y ~ x + (1 | g)",
        lambda rng, eta, z: positive(rng, np.exp(1 + eta)) * (rng.random(len(z)) < 0.7),
    ),
    "cumulative": ("cumulative", "y ~ x + (1 + x | g)", ordered),
    "categorical": ("categorical", "y ~ x + (1 | g)", one_of_three),
    "poisson, weights": (
        "poisson",
        "y | weights(w) ~ x + (1 | g)",
        lambda rng, eta, z: rng.poisson(np.exp(1 + eta)),
    ),
}


def frame_of(draw: Draw) -> pd.DataFrame:
    """Simulate the rows."""
    rng = np.random.default_rng(0)
    client = np.repeat(np.arange(CLIENTS), ROWS)
    x, z = rng.normal(size=(2, len(client)))
    eta = 0.4 * x + 0.5 * rng.normal(size=CLIENTS)[client]
    columns = {"g": client.astype(str), "x": x, "z": z, "n": 10, "w": rng.integers(1, 4, len(x))}
    return pd.DataFrame(columns | {"y": draw(rng, eta, z)})


def measure(name: str) -> list[str]:
    """Fit a problem, and run NUTS."""
    family, text, draw = PROBLEMS[name]
    frame = frame_of(draw)
    if "cens" in text:
        end = np.random.default_rng(1).exponential(4.0, len(frame))
        frame = frame.assign(late=(frame.y > end).astype(int), y=np.minimum(frame.y, end))
    model = bf.formula(text, frame, client="g", family=family)
    begin = time.perf_counter()
    posterior = bf.fit(model, model.federation, progress=False)
    seconds = time.perf_counter() - begin
    reference = nuts(f"family_{name.replace(', ', '_')}", model, model.federation)
    draws = {k: v.double().numpy() for k, v in posterior.sample(8000).items()}
    local = {site.name for site in posterior.program.locals}
    khat = "" if posterior.khat is None else f"{posterior.khat:.2f}"
    return [*cells(draws, reference, local), khat, runner.rounds_of(posterior), f"{seconds:.1f}"]


def main() -> None:
    given = runner.arguments(__doc__)
    columns = "family | globals: shift | sd ratio | locals: shift | sd ratio | k̂ | rounds | seconds"
    runner.table(columns, list(PROBLEMS), measure, given)


if __name__ == "__main__":
    main()
