"""Is every posterior that is off named? Fits of many programs against NUTS on the pooled data. Makes misses.md.

    python experiments/misses.py                    # a quarter of an hour
    python experiments/misses.py seeds pumps        # two rows

The programs are those of first_try.py, and generated ones (tests/invariants/programs.py). Each is fitted by SFVI with
its usual settings ("corrected"), and again without the corrections that follow a fit ("plain"). A fit is off if the
mean of a variable is more than a quarter of a standard deviation from that of NUTS, or its standard deviation is
outside 0.8 to 1.25 times that of NUTS, beyond three Monte Carlo standard errors; of a variable whose tails are too
heavy for a standard deviation it is the median and the interquartile range. It is named if ``posterior.caveat`` says
so. A fit that is off and not named is a miss; one that is named and not off is a false alarm. The horseshoe of
first_try.py, whose variables have no moments, is left out.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import runner
from distances import Summary, summary
from first_tries import PROGRAMS, REFERENCES

import bayesfed as bf

sys.path.append(str(runner.ROOT))
from tests.invariants.programs import program as generated

COLUMNS = "program | fit | shift | sd ratio | k | off | named | what is said"
SEEDS = (
    *(
        2000,
        2001,
        2002,
        2003,
        2006,
        2007,
        2008,
        2009,
        2010,
        2011,
        2012,
        2013,
        2018,
        2019,
        2021,
        2022,
        2023,
    ),
    *(2024, 2025, 2027, 2029, 2035, 2036, 2037, 2043, 2044),
)
"""Seeds of generated programs: from 2000 to 2044 those of which NUTS ends in two minutes, and some that took longer."""
GENERATED = [f"program_{seed}" for seed in SEEDS]
WITHOUT_MOMENTS = ("horseshoe",)
"""Programs whose posteriors have neither means nor standard deviations."""
SHIFT, RATIO, ERRORS, DRAWS = 0.25, 1.25, 3.0, 20_000
HEAVY = 50.0
"""Kurtosis of either draws from which on a standard deviation is that of a few of them, as with a Cauchy tail."""
QUARTILES, OF_MEDIAN, OF_QUARTILES = 1.349, 1.25, 2.7
"""Of a standard Normal: its interquartile range; the standard error of its median relative to that of its mean, and the
variance of its interquartile range relative to that of its standard deviation."""


def location_and_spread(found: Summary, moments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return means and standard deviations ``(D,)``; without moments, medians and interquartile ranges.

    The latter are in units of that of a standard Normal.
    """
    _, low, middle, high, _ = found.quantiles
    spread = np.where(moments, found.sd, (high - low) / QUARTILES)
    return np.where(moments, found.mean, middle), spread


def off(found: Summary, reference: Summary) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return shift and ratio of each entry that varies, and whether it is off: ``(D,)`` each."""
    moments = np.maximum(reference.kurtosis, found.kurtosis) < HEAVY
    centre, sd = location_and_spread(reference, moments)
    location, spread = location_and_spread(found, moments)
    varies = reference.sd > 1e-6
    shift, ratio = np.abs(location - centre) / sd, spread / sd
    fourth = np.where(moments, reference.kurtosis, 1 + 2 * OF_QUARTILES)
    error = ERRORS * reference.size**-0.5 * np.where(moments, 1.0, OF_MEDIAN)
    error_of_spread = ERRORS * ((fourth - 1) / (4 * reference.size)) ** 0.5
    far = shift - error > SHIFT
    far |= np.abs(np.log(ratio)) - error_of_spread > np.log(RATIO)
    return shift[varies], ratio[varies], far[varies]


def measure(name: str, corrected: bool) -> list[Any]:
    """Fit one program and compare it with NUTS."""
    from pooled_nuts import nuts

    known = name in PROGRAMS
    model, data = (PROGRAMS[name][0], PROGRAMS[name][1]()) if known else generated(int(name[8:]))
    try:
        posterior = bf.fit(model, data, bf.SFVI(corrected=corrected), seed=1, progress=False)
    except bf.Stopped as error:
        return ["", "", "", "off", "named", first_sentence(str(error))]
    key = f"first_try_{name}" if known else name
    reference = nuts(key, REFERENCES.get(name, model), data)
    found = [off(summary(x), reference[site]) for site, x in posterior.sample(DRAWS).items()]
    shift, ratio, far = (np.concatenate(part) for part in zip(*found, strict=True))
    k = "" if posterior.khat is None else f"{posterior.khat:.2f}"
    caveat = first_sentence(posterior.caveat)
    ratios = f"{ratio.min():.2f}–{ratio.max():.2f}"
    return [
        f"{shift.max():.2f}",
        ratios,
        k,
        "off" if far.any() else "",
        "named" if caveat else "",
        caveat,
    ]


def first_sentence(text: str) -> str:
    """Return the first sentence of a caveat or an error, for a cell of a table."""
    return text.replace("|", "\\|").replace("\n", " ").partition(". ")[0]


def rows_of(path: Path) -> dict[tuple[str, str], list[str]]:
    """Return the cells of a table's rows by program and fit; a run of some rows leaves the others there."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    split = (re.split(r" (?<!\\)\| ?", line[2:]) for line in lines if line.startswith("| "))
    return {(name, fit): cells for name, fit, *cells in split if fit in ("corrected", "plain")}


def answer(found: Mapping[tuple[str, str], Sequence[str]]) -> str:
    """Return how many fits are off, and how many of these are not named, by kind of fit."""
    parts = []
    for fit in ("corrected", "plain"):
        rows = [cells for key, cells in found.items() if key[1] == fit]
        off = [cells for cells in rows if cells[3]]
        missed = sum(not cells[4] for cells in off)
        parts.append(f"{len(off)} of {len(rows)} {fit} fits are off, {missed} of them not named")
    return "; ".join(parts) + "."


def main() -> None:
    given = runner.arguments(__doc__)
    names = [name for name in PROGRAMS if name not in WITHOUT_MOMENTS] + GENERATED
    rows = {
        (name, "corrected" if corrected else "plain"): [(name, corrected)]
        for name in names
        for corrected in (True, False)
    }
    path = given.out or Path(__file__).with_suffix(".md")
    runner.table(COLUMNS, rows, measure, given, note=lambda: answer(rows_of(path)))


if __name__ == "__main__":
    main()
