"""Do intervals cover as often as they say, within three percent? Makes coverage.md.

    python experiments/coverage.py                      # ten minutes
    python experiments/coverage.py eight_schools

Models, clients and fits of calibration.py, with 200 replications of three models: true values are drawn from the prior,
outcomes given them, and the fit is ``bf.fit``'s default. Coverage is the share of replications, and of the entries of a
variable, whose central interval has the true value, in percent ± its standard error; of 200 replications of one number
that of a coverage of 90 % is 2.1. "All" is the mean over the variables. "p" is that of uniform ranks, of "all" the
smallest times the number of variables. Means over the variables are to be within three percent of each level; single
variables have standard errors of up to 3.5.
"""

from __future__ import annotations

from typing import Any

import runner
from calibration import MODELS

import bayesfed as bf

COLUMNS = "model | variable | replications | 50 % | 80 % | 90 % | 95 % | p"
LEVELS = (50, 80, 90, 95)
NAMES = ("eight_schools", "varying_intercept", "hierarchical_count")


def measure(name: str, n: int) -> list[list[str]]:
    """Return a row for each variable of a model, and one for all."""
    program, clients = MODELS[name]
    found = bf.calibrate(program, clients(), n=n, progress=False)
    table, done = found.table, str(int((found.replications["failed"] == "").sum()))
    made: list[list[str]] = [
        [
            row["variable"],
            done,
            *(f"{100 * row[f'coverage_{k}']:.1f} ± {100 * row[f'error_{k}']:.1f}" for k in LEVELS),
            f"{row['p']:.3f}",
        ]
        for _, row in table.iterrows()
    ]
    means = [f"{100 * table[f'coverage_{k}'].mean():.1f}" for k in LEVELS]
    return [*made, ["all", done, *means, f"{found.p_value:.3f}"]]


def main() -> None:
    given = runner.arguments(__doc__, n=200)
    rows: dict[str, Any] = {name: [(name, given.n)] for name in NAMES}
    runner.table(COLUMNS, rows, measure, given)


if __name__ == "__main__":
    main()
