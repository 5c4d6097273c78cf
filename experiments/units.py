"""Does the answer of every algorithm stay as it is where the units of the fields change? Makes units.md.

    python experiments/units.py
    python experiments/units.py FedAvg FOLA

Growth curves of 30 animals (tests/scenarios.py), with their priors, in ten random units: ages in 10^-3 to 10^3 days,
weights in 10^-3 to 10^3 grams. Each algorithm has its usual settings and stops by itself. The table has the largest
difference of a mean, in NUTS' standard deviations, and the range of the ratios of standard deviations, both from the
fit in days and grams, over the ten changes and all entries of the global and of the local variables; and the rounds.
"""

from __future__ import annotations

import time
import warnings
from functools import partial
from typing import Any

import numpy as np
import runner
import torch
from distances import moments

import bayesfed as bf
from bayesfed.algorithms import METHODS
from tests.scenarios import curves, growth

COLUMNS = "algorithm | globals: difference | sd ratio | locals: difference | sd ratio | rounds | seconds a fit"
CHANGES, LOCALS = 10, ("a", "b")
POWERS = {"level": (0, 1), "slope": (-1, 1), "sd_level": (0, 1), "sd_slope": (-1, 1)}
POWERS |= {"sigma": (0, 1), "a": (0, 1), "b": (-1, 1)}
"""The powers of the days and of the grams in a variable's unit."""


def fitted(name: str, day: float, gram: float) -> tuple[dict[str, Any], int]:
    """Return draws of a fit in these units, in days and grams, and the rounds."""
    model, data = partial(growth, day=day, gram=gram), curves(day, gram)
    data = data.pool() if name == "Pooled" else data
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = bf.fit(model, data, METHODS[name](), seed=1, progress=False)
    units = {site: day ** POWERS[site][0] * gram ** POWERS[site][1] for site in POWERS}
    draws = {site: draw.double() * units[site] for site, draw in posterior.sample(4000).items()}
    return draws, len(posterior.history["elbo"])


def measure(name: str) -> list[str]:
    """Fit in all units and compare with the fit in days and grams."""
    from pooled_nuts import nuts

    start = time.perf_counter()
    generator = torch.Generator().manual_seed(0)
    powers = (6 * torch.rand(CHANGES, 2, generator=generator) - 3).tolist()
    try:
        first, rounds = fitted(name, 1.0, 1.0)
        others = [fitted(name, 10**day, 10**gram) for day, gram in powers]
    except (ValueError, ArithmeticError) as error:
        return [f"refused: {error}", *[""] * 5]
    known, cells = nuts("matrix_growth_curves", growth, curves()), []
    for of_clients in (False, True):
        names = [site for site in first if (site in LOCALS) == of_clients]
        if not names or (of_clients and name == "Pooled"):  # it has one client
            cells += ["", ""]
            continue
        width, (mean, sd) = moments(known, names)[1], moments(first, names)
        found = [moments(draws, names) for draws, _ in others]
        far = max(float((np.abs(each[0] - mean) / width).max()) for each in found)
        varies = sd > 1e-4 * width
        ratio = np.concatenate([each[1][varies] / sd[varies] for each in found])
        shown = f"{ratio.min():.2f}–{ratio.max():.2f}" if len(ratio) else "point"
        cells += [f"{far:.3f}", shown]
    counts = [rounds, *(count for _, count in others)]
    seconds = (time.perf_counter() - start) / (CHANGES + 1)
    return [*cells, f"{min(counts)}–{max(counts)}", f"{seconds:.1f}"]


def main() -> None:
    given = runner.arguments(__doc__, jobs=2)
    rows = {name: [(name,)] for name in METHODS}
    runner.table(COLUMNS, rows, measure, given)


if __name__ == "__main__":
    main()
