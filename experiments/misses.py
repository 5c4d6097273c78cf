"""Is every posterior that is off named? Fits of many programs against NUTS on the pooled data. Makes misses.md.

    pip install 'bayesfed[benchmarks]'
    python experiments/misses.py                    # an hour and a half, of which NUTS takes an hour
    python experiments/misses.py seeds pumps        # two rows

The programs are those of first_try.py, and generated ones (tests/invariants/programs.py). Each is fitted by SFVI with
its usual settings, and again without the corrections that follow a fit. A fit is off if the mean of a variable is more
than a quarter of a standard deviation from that of NUTS, or its standard deviation is outside 0.8 to 1.25 times that of
NUTS, beyond three Monte Carlo standard errors. It is named if ``posterior.caveat`` says so. A fit that is off and not
named is a miss; one that is named and not off is a false alarm.
"""

from __future__ import annotations

import sys
from typing import Any

import arviz as az
import numpy as np
import runner
from first_tries import PROGRAMS, REFERENCES

import bayesfed as bf

sys.path.append(str(runner.ROOT))
from tests.invariants.programs import program as generated

COLUMNS = "program | fit | shift | sd ratio | k | off | named | what is said"
GENERATED = [f"program_{seed}" for seed in range(2000, 2030)]
WITHOUT_MOMENTS = ("horseshoe",)
"""Programs whose posteriors have neither means nor standard deviations."""
SHIFT, RATIO, ERRORS, DRAWS = 0.25, 1.25, 3.0, 20_000


def off(draws: np.ndarray, reference: np.ndarray) -> tuple[float, float, bool]:
    """Return shift and ratio of one number, whose NUTS draws are ``(chains * draws,)``, and whether it is off."""
    size = float(az.ess(reference[None]))
    sd = reference.std()
    shift, ratio = abs(draws.mean() - reference.mean()) / sd, draws.std() / sd
    heavy = float(((reference - reference.mean()) ** 4).mean() / sd**4)
    error = ERRORS * size**-0.5
    spread = ERRORS * ((heavy - 1) / (4 * size)) ** 0.5
    far = shift - error > SHIFT or abs(np.log(ratio)) - spread > np.log(RATIO)
    return shift, ratio, bool(far)


def measure(name: str, corrected: bool) -> list[Any]:
    """Fit one program and compare it with NUTS."""
    from pooled_nuts import nuts

    known = name in PROGRAMS
    model, data = (PROGRAMS[name][0], PROGRAMS[name][1]()) if known else generated(int(name[8:]))
    try:
        posterior = bf.fit(model, data, bf.SFVI(corrected=corrected), seed=1, progress=False)
    except bf.Stopped as error:
        return ["", "", "", "off", "named", str(error)[:160]]
    key = f"first_try_{name}" if known else name
    reference = nuts(key, REFERENCES.get(name, model), data)
    draws, found = posterior.sample(DRAWS), []
    for site, value in draws.items():
        ours, theirs = (
            np.asarray(v, np.float64).reshape(len(v), -1) for v in (value, reference[site])
        )
        varies = theirs.std(0) > 1e-6
        found += [off(a, b) for a, b in zip(ours.T[varies], theirs.T[varies], strict=True)]
    shift, ratio, far = (np.array(part) for part in zip(*found, strict=True))
    k = "" if posterior.khat is None else f"{posterior.khat:.2f}"
    caveat = posterior.caveat.replace("|", "\\|").replace("\n", " ")
    ratios = f"{ratio.min():.2f}–{ratio.max():.2f}"
    return [
        f"{shift.max():.2f}",
        ratios,
        k,
        "off" if far.any() else "",
        "named" if caveat else "",
        caveat[:160],
    ]


def main() -> None:
    given = runner.arguments(__doc__)
    names = [name for name in PROGRAMS if name not in WITHOUT_MOMENTS] + GENERATED
    rows = {
        (name, "corrected" if corrected else "plain"): [(name, corrected)]
        for name in names
        for corrected in (True, False)
    }
    runner.table(COLUMNS, rows, measure, given)


if __name__ == "__main__":
    main()
