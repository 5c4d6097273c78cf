"""How do seconds and memory grow with rows and clients, beside glmmTMB, lme4 and NUTS? Makes seconds_to_rows.md.

    pip install 'bayesfed[benchmarks]'
    apt-get install r-base-core r-cran-lme4 r-cran-glmmtmb
    python experiments/seconds_to_rows.py                     # on a machine that does nothing else, some hours
    python experiments/seconds_to_rows.py gaussian --sizes 1000 10000 --tools bayesfed glmmTMB lme4

Simulated rows of clients with an independent intercept and slope each; outcomes are Gaussian, Bernoulli or Poisson. The
model is `y ~ x + (1 + x || client)`. Each tool runs in a new process on one thread, and ends after ten minutes. With a
million rows NumPyro, nutpie and, but for Gaussian outcomes, lme4 are not run ("-"):

    bayesfed      bf.fit with the usual settings, "cold" the first fit of a process, "warm" the second, imports apart
    glmmTMB       maximum likelihood, Laplace's approximation
    lme4          lmer (maximum likelihood) or glmer (nAGQ=1)
    NumPyro       NUTS, one chain, 1000 + 1000, centred: weakly informative priors
    nutpie        its NUTS, the same, on the log density of that model and its gradient by JAX

"NUTS" is the faster of the two. "rows" are about that many, equal for each client. MB are the highest resident size
less that before the first fit. "distance" is the largest of the differences between the means of the coefficients, in
standard errors of glmmTMB, and between the logarithms of the two standard deviations, in standard deviations of the
posterior. Rows are made with coefficients 0.5 and -0.3, and standard deviations 0.6 and 0.4. With ten Bernoulli rows a
client Laplace's approximation is biased: of 10,000 clients glmmTMB and lme4 find standard deviations of 0.58 and 0.34,
bayesfed 0.61 and 0.40. Below the table are exponents of growth, fitted to the logarithms of seconds of 10,000 rows and
more: seconds ∝ rows^a clients^b.
"""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import runner
from in_r import run_r

COLUMNS = (
    "outcome | rows | clients | bayesfed: cold, s | warm | rounds | MB | glmmTMB | lme4 | NumPyro | nutpie "
    "| distance | cold ÷ glmmTMB | warm ÷ glmmTMB | cold ÷ NUTS"
)
NUTS = ("NumPyro", "nutpie")
TOOLS = ("bayesfed", "glmmTMB", "lme4", *NUTS)
CLIENTS = (50, 1_000, 10_000)
LIMIT = 600
"""Seconds after which a tool is ended, its data read."""
MOST = 100_000
"""The largest number of rows that the slowest tools are run with."""
GROWN = 10_000
"""Rows from which on growth is measured."""
FORMULA = "y ~ x + (1 + x || client)"
COEFFICIENTS, SPREADS = ("Intercept", "x"), ("1|client_sigma", "x|client_sigma")
R = """
arguments <- commandArgs(TRUE)
suppressMessages(library(arguments[2], character.only = TRUE))
d <- read.csv(arguments[1])
d$client <- factor(d$client)
name <- c(gaussian = "gaussian", bernoulli = "binomial", poisson = "poisson")[[arguments[3]]]
f <- y ~ x + (1 | client) + (0 + x | client)
seconds <- system.time(
  fit <- if (arguments[2] == "glmmTMB") glmmTMB(f, d, family = name)
    else if (name == "gaussian") lmer(f, d, REML = FALSE)
    else glmer(f, d, family = name)
)[["elapsed"]]
fixed <- if (arguments[2] == "glmmTMB") fixef(fit)$cond else fixef(fit)
v <- if (arguments[2] == "glmmTMB") VarCorr(fit)$cond else VarCorr(fit)
error <- sqrt(diag(as.matrix(if (arguments[2] == "glmmTMB") vcov(fit)$cond else vcov(fit))))
sds <- sapply(v, function(one) attr(one, "stddev")[[1]])
cat(sprintf("[%.3f, [%.8f, %.8f], [%.8f, %.8f], [%.8f, %.8f]]", seconds, fixed[1], fixed[2],
  error[1], error[2], sds[1], sds[2]))
"""
"""It prints seconds, coefficients, their standard errors, and standard deviations between clients."""


def simulate(outcome: str, rows: int, clients: int) -> pd.DataFrame:
    """Draw rows with coefficients 0.5 and -0.3, and standard deviations 0.6 and 0.4 between clients."""
    generator = np.random.default_rng(0)
    client = np.repeat(np.arange(clients), max(1, rows // clients))
    x = generator.normal(size=len(client))
    intercept = 0.5 + 0.6 * generator.normal(size=clients)
    slope = -0.3 + 0.4 * generator.normal(size=clients)
    eta = intercept[client] + slope[client] * x
    drawn = {
        "gaussian": lambda: eta + 0.8 * generator.normal(size=len(eta)),
        "bernoulli": lambda: (generator.uniform(size=len(eta)) < 1 / (1 + np.exp(-eta))) * 1,
        "poisson": lambda: generator.poisson(np.exp(eta)),
    }
    return pd.DataFrame({"client": client, "x": x, "y": drawn[outcome]()})


def megabytes() -> float:
    """Return the highest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def bayesfed(outcome: str, frame: pd.DataFrame) -> dict[str, Any]:
    """Fit twice; return seconds, rounds, memory, and means and standard deviations of the globals."""
    import bayesfed as bf

    frame = frame.assign(client=frame["client"].astype(str))
    model = bf.formula(FORMULA, frame, client="client", family=outcome)
    federation, fit, before, seconds = model.federation, bf.fit, megabytes(), []
    for seed in range(2):
        begin = time.perf_counter()
        posterior = fit(model, federation, seed=seed, progress=False)
        draws = posterior.derived(num_samples=1000)
        seconds.append(time.perf_counter() - begin)
    values = {name: draws[name] for name in COEFFICIENTS}
    values |= {name: draws[name].log() for name in SPREADS}
    found = {name: [float(value.mean()), float(value.std())] for name, value in values.items()}
    return {
        "seconds": seconds,
        "rounds": runner.rounds_of(posterior),
        "megabytes": megabytes() - before,
        "found": found,
    }


def in_numpyro(outcome: str, frame: pd.DataFrame) -> Callable[[], None]:
    """Return the model with its data, in NumPyro."""
    import jax.numpy as jnp
    import numpyro as npr
    import numpyro.distributions as dist

    of, x = jnp.asarray(frame["client"].to_numpy()), jnp.asarray(frame["x"].to_numpy())
    y, clients = jnp.asarray(frame["y"].to_numpy()), int(frame["client"].max()) + 1

    def model() -> None:
        mean = npr.sample("mean", dist.Normal(0.0, 2.5).expand([2]).to_event(1))
        sd = npr.sample("sd", dist.HalfNormal(1.0).expand([2]).to_event(1))
        with npr.plate("clients", clients):
            own = npr.sample("own", dist.Normal(mean, sd).to_event(1))
        eta = own[of, 0] + own[of, 1] * x
        if outcome == "gaussian":
            over = dist.Normal(eta, npr.sample("sigma", dist.HalfNormal(1.0)))
        elif outcome == "bernoulli":
            over = dist.Bernoulli(logits=eta)
        else:
            over = dist.Poisson(jnp.exp(eta))
        npr.sample("y", over, obs=y)

    return model


def numpyro(outcome: str, frame: pd.DataFrame) -> list[float]:
    """Return the seconds of one chain of NumPyro's NUTS, with compilation."""
    import jax
    from numpyro.infer import MCMC, NUTS

    kernel = NUTS(in_numpyro(outcome, frame))
    sampler = MCMC(kernel, num_warmup=1000, num_samples=1000, progress_bar=False)
    begin = time.perf_counter()
    sampler.run(jax.random.PRNGKey(0))
    jax.block_until_ready(sampler.get_samples())
    return [time.perf_counter() - begin]


def nutpie(outcome: str, frame: pd.DataFrame) -> list[float]:
    """Return the seconds of one chain of nutpie's NUTS, with compilation; draws are of unconstrained values."""
    import jax
    from in_nutpie import compile_density, sample_chain
    from numpyro.infer.util import initialize_model

    begin = time.perf_counter()
    start, potential, *_ = initialize_model(jax.random.PRNGKey(0), in_numpyro(outcome, frame))
    compiled, _ = compile_density(potential, start.z)
    sample_chain(compiled, seed=0)
    return [time.perf_counter() - begin]


def measure(tool: str, outcome: str, rows: int, clients: int) -> Any:
    """Return what a tool gives in a new process; None if it fails or does not end in time."""
    if tool in ("glmmTMB", "lme4"):
        try:
            frame = simulate(outcome, rows, clients)
            return json.loads(run_r(R, frame, [tool, outcome], timeout=LIMIT + 60))
        except subprocess.SubprocessError:
            return None
    call = [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), "--child"]
    call += [tool, outcome, str(rows), str(clients)]
    env = os.environ | {
        "OMP_NUM_THREADS": "1",
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    }
    try:
        done = subprocess.run(
            call, capture_output=True, text=True, env=env, timeout=LIMIT + 60, check=True
        )
    except subprocess.SubprocessError:
        return None
    return json.loads(done.stdout.splitlines()[-1])


def cells(found: dict[str, Any]) -> list[str]:
    """Return the cells of a row; "-" where a tool was not run."""
    ours, tmb = found["bayesfed"], found.get("glmmTMB")
    if ours is None:
        return [f"> {LIMIT}", *[""] * 11]
    cold, warm = ours["seconds"]
    others = [one[0] if (one := found.get(tool)) else None for tool in TOOLS[1:]]
    nuts = min((one[0] for tool in NUTS if (one := found.get(tool))), default=None)
    distance = "" if tmb is None else f"{_distance(ours['found'], tmb):.2f}"
    ratios = [
        "" if other is None else f"{mine / other:.2f}"
        for mine, other in ((cold, others[0]), (warm, others[0]), (cold, nuts))
    ]
    return [
        *(f"{cold:.1f}", f"{warm:.1f}", ours["rounds"], f"{ours['megabytes']:.0f}"),
        *(_seconds(found, *pair) for pair in zip(TOOLS[1:], others, strict=True)),
        *(distance, *ratios),
    ]


def _seconds(found: dict[str, Any], tool: str, seconds: float | None) -> str:
    if tool not in found:
        return "-"
    return f"> {LIMIT}" if seconds is None else f"{seconds:.1f}"


def _distance(found: dict[str, list[float]], tmb: list[Any]) -> float:
    _, fixed, errors, sds = tmb
    coefficients = [found[name] for name in COEFFICIENTS]
    spreads = [found[name] for name in SPREADS]
    away = [
        abs(mean - to) / error
        for (mean, _), to, error in zip(coefficients, fixed, errors, strict=True)
    ]
    away += [
        abs(mean - math.log(max(to, 1e-9))) / sd
        for (mean, sd), to in zip(spreads, sds, strict=True)
    ]
    return max(away)


def growth(seconds: dict[tuple[str, str, int, int], float]) -> str:
    """Return the exponents of rows and clients by outcome and tool, as text."""
    lines = []
    for outcome, tool in dict.fromkeys((outcome, tool) for tool, outcome, *_ in seconds):
        of = [
            (1.0, math.log(rows), math.log(clients), math.log(s))
            for (name, kind, rows, clients), s in seconds.items()
            if (name, kind) == (tool, outcome) and rows >= GROWN
        ]
        *terms, logs = np.array(of).T if of else np.empty((4, 0))
        if len(logs) > len(terms) and np.linalg.matrix_rank(np.array(terms)) == len(terms):
            _, a, b = np.linalg.lstsq(np.array(terms).T, logs, rcond=None)[0]
            lines.append(f"{outcome}, {tool}: rows^{a:.2f} clients^{b:.2f}")
    return "  \n".join(lines)


def is_slow(tool: str, outcome: str) -> bool:
    """Return whether a million rows take a tool longer than the limit."""
    return tool in NUTS or (tool == "lme4" and outcome != "gaussian")


def main() -> None:
    sizes = [1_000, 10_000, 100_000, 1_000_000]
    given = runner.arguments(__doc__, sizes=sizes, tools=list(TOOLS))
    seconds: dict[tuple[str, str, int, int], float] = {}

    def of_row(row: tuple[str, int, int], found: list[Any]) -> list[str]:
        results = {tool: one for (tool, *_), one in zip(rows[row], found, strict=True)}
        for tool, one in results.items():
            if one is not None:
                seconds[tool, *row] = one["seconds"][1] if tool == "bayesfed" else one[0]
        return cells(results)

    rows = {
        (outcome, rows, clients): [
            (tool, outcome, rows, clients)
            for tool in given.tools
            if rows <= MOST or not is_slow(tool, outcome)
        ]
        for outcome in ("gaussian", "bernoulli", "poisson")
        for rows in given.sizes
        for clients in CLIENTS
        if clients < rows
    }
    runner.table(
        COLUMNS,
        rows,
        measure,
        given,
        of_row,
        note=lambda: growth(seconds),
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        tool, outcome, rows, clients = sys.argv[2:]
        import torch

        torch.set_num_threads(1)
        work = {"bayesfed": bayesfed, "NumPyro": numpyro, "nutpie": nutpie}[tool]
        print("\n" + json.dumps(work(outcome, simulate(outcome, int(rows), int(clients)))))
    else:
        main()
