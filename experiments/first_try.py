"""Do programs fit at the first try, as people write them? Makes first_try.md.

    python experiments/first_try.py                 # five minutes
    python experiments/first_try.py seeds pumps     # two rows
    python experiments/first_try.py --no-nuts       # only fit, without the reference: minutes

The programs of ``first_tries`` are plain Pyro, written for one client; only their two plates are bayesfed's. Each is
fitted by `bf.fit(program, data)` with the usual settings, and stops by itself. The table has the distance from NUTS on
the pooled data (the same function, see pooled_nuts.py): the largest shift of a posterior mean in NUTS' standard
deviations, and the range of the ratios of standard deviations, over all entries of global and of local variables. The
scales of a horseshoe have the tails of a Cauchy, hence neither mean nor standard deviation: the figures of that row
mean little. The `size` of baseball has a long tail, of which NUTS misses a part: its standard deviation is 150 by an
integral on a grid (tests/output/test_correction.py), 129 of NUTS' draws. k is Pareto's.
"""

from __future__ import annotations

import time

import runner
from distances import cells
from first_tries import PROGRAMS, REFERENCES

import bayesfed as bf

COLUMNS = "program | what is in it | globals: shift | sd ratio | locals: shift | sd ratio | rounds | k | s"


def measure(name: str, sampled: bool) -> list[str]:
    """Fit a program and compare it with NUTS if it is ``sampled``."""
    program, data = PROGRAMS[name]
    start, what = time.perf_counter(), (program.__doc__ or "").rstrip(".")
    try:
        posterior = bf.fit(program, data(), seed=1, progress=False)
    except (ValueError, NotImplementedError) as error:
        return [what, f"refused: {error}", *[""] * 6]
    seconds = time.perf_counter() - start
    found = [""] * 4
    if sampled:
        from pooled_nuts import nuts

        draws = posterior.sample(20_000)
        reference = nuts(f"first_try_{name}", REFERENCES.get(name, program), data())
        local = {site.name for site in posterior.program.locals}
        found = cells(draws, {n: reference[n] for n in draws}, local)
    k = "" if posterior.khat is None else f"{posterior.khat:.2f}"
    return [what, *found, runner.rounds_of(posterior), k, f"{seconds:.0f}"]


def main() -> None:
    given = runner.arguments(__doc__, no_nuts=False)
    rows = {name: [(name, not given.no_nuts)] for name in PROGRAMS}
    runner.table(COLUMNS, rows, measure, given)


if __name__ == "__main__":
    main()
