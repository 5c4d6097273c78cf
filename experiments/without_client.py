"""Are leave-one-client-out, ``without`` and the evidence right? Twelve hospitals; makes without_client.md.

    python experiments/without_client.py                # two minutes

One row of each of twelve simulated hospitals, of which Kiel has two and a half times the others' rate of deaths and
Lund has 12 patients. "Exact" are integrals over a grid of μ and τ, with each hospital's own variable integrated out by
quadrature. "Refit" is a fit to the other eleven hospitals. elpd is log p(D_i | D_-i); that of the refit is the mean of
the hospital's density by quadrature over its draws. Figures of τ are the mean and standard deviation without the
hospital. "Conflict" is the p-value of the hospital's variable given the others. "k-hat, draws" are those of the weights
of ``without`` and its effective number of draws, "new draws" and "chains" say that draws were made again, where weights
are too uneven. The last row, "none", has log p(D) in place of elpd.
"""

from __future__ import annotations

import functools
import math
import time

import numpy as np
import pyro
import pyro.distributions as dist
import runner
from scipy.stats import binom, halfnorm, norm

import bayesfed as bf
from bayesfed.output.leave_one_client_out import ClientsLeftOut

COLUMNS = (
    "left out | elpd: exact | estimate ± error | refit | k-hat | τ: exact | without | refit "
    "| k-hat, draws of without | conflict: exact | estimate | seconds: without | refit"
)
NAMES = [
    "Aarhus",
    "Basel",
    "Cork",
    "Delft",
    "Evora",
    "Fulda",
    "Graz",
    "Hull",
    "Ivrea",
    "Jena",
    "Kiel",
    "Lund",
]
MU, TAU = np.meshgrid(np.linspace(-4.5, 0.5, 301), np.linspace(0.004, 2.5, 400), indexing="ij")
S = 4000


def hospitals(federation):
    """Deaths of the patients of each hospital."""
    mu = pyro.sample("mu", dist.Normal(-2.0, 1.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(mu, tau))
        with federation.observations() as obs:
            deaths = dist.Binomial(total_count=obs["n"], logits=a)
            pyro.sample("died", deaths, obs=obs.get("died"))


@functools.cache
def counts() -> dict[str, tuple[int, int]]:
    """Return patients and deaths by hospital, as in docs/sensitivity.md."""
    rng = np.random.default_rng(1)
    patients = rng.integers(60, 700, 12)
    patients[-1] = 12
    rate = 1 / (1 + np.exp(2.4 - 0.25 * rng.normal(size=12)))
    rate[-2] = 0.20
    died = rng.binomial(patients, rate)
    return dict(zip(NAMES, zip(patients.tolist(), died.tolist(), strict=True), strict=True))


def federation(names: list[str]) -> bf.Federation:
    """Return some of the hospitals."""
    rows = {name: counts()[name] for name in names}
    return bf.Federation.from_arrays(
        {name: {"n": [float(n)], "died": [float(d)]} for name, (n, d) in rows.items()}
    )


def log_density(name: str, mu: np.ndarray, tau: np.ndarray) -> np.ndarray:
    """Return log p(D_i | μ, τ) by quadrature around the hospital's own rate."""
    n, died = counts()[name]
    rate = (died + 0.5) / (n + 1)
    at, width = math.log(rate / (1 - rate)), 1.3 / math.sqrt(n * rate * (1 - rate))
    a = at + width * np.linspace(-8, 8, 121)
    parts = binom.logpmf(died, n, 1 / (1 + np.exp(-a))) + norm.logpdf(
        a, mu[..., None], tau[..., None]
    )
    return np.logaddexp.reduce(parts, -1) + math.log(a[1] - a[0])


@functools.cache
def on_grid() -> dict[str, np.ndarray]:
    """Return log p(D_i | μ, τ) of all hospitals on the grid."""
    return {name: log_density(name, MU, TAU) for name in NAMES}


def exact(left_out: str) -> tuple[float, float, float, float]:
    """Return log p(D_i | D_-i) or log p(D), mean and standard deviation of τ, and the p-value of conflict."""
    prior = norm.logpdf(MU, -2, 1) + halfnorm.logpdf(TAU)
    rest = prior + sum(value for name, value in on_grid().items() if name != left_out)
    cell = math.log(MU[1, 0] - MU[0, 0]) + math.log(TAU[0, 1] - TAU[0, 0])
    evidence = np.logaddexp.reduce(rest, None)
    p = np.exp(rest - evidence)
    mean = (p * TAU).sum()
    sd = math.sqrt((p * TAU**2).sum() - mean**2)
    if left_out == "none":
        return evidence + cell, mean, sd, math.nan
    elpd = np.logaddexp.reduce(rest + on_grid()[left_out], None) - evidence
    rng, (n, died) = np.random.default_rng(0), counts()[left_out]
    chosen = rng.choice(p.size, 50_000, p=p.ravel() / p.sum())
    rate = 1 / (1 + np.exp(-rng.normal(MU.ravel()[chosen], TAU.ravel()[chosen])))
    below = (binom.cdf(died - 1, n, rate) + binom.pmf(died, n, rate) / 2).mean()
    return elpd, mean, sd, 2 * min(below, 1 - below)


@functools.cache
def whole() -> tuple[bf.Posterior, ClientsLeftOut]:
    """Return the fit of all hospitals, and its table."""
    posterior = bf.fit(hospitals, federation(NAMES), progress=False)
    return posterior, bf.leave_one_client_out(posterior)


def tau_of(posterior: bf.Posterior) -> str:
    """Return mean and standard deviation of τ."""
    tau = posterior.sample(S)["tau"].double()
    return f"{float(tau.mean()):.3f} ± {float(tau.std()):.3f}"


def measure(name: str) -> list[str]:
    """Leave one hospital out in three ways."""
    posterior, table = whole()
    elpd, mean, sd, conflict = exact(name)
    if name == "none":
        found = posterior.log_evidence
        estimate = f"{found.value:.2f} ± {found.mcse:.2f}"
        exact_tau = f"{mean:.3f} ± {sd:.3f}"
        return [
            f"{elpd:.2f}",
            estimate,
            "",
            f"{found.khat:.2f}",
            exact_tau,
            tau_of(posterior),
            *6 * [""],
        ]
    row = table.table.set_index("client").loc[name]
    start = time.perf_counter()
    others = posterior.without(name)
    middle = time.perf_counter()
    refit = bf.fit(hospitals, federation([n for n in NAMES if n != name]), progress=False)
    end = time.perf_counter()
    draws = {site: value.double().numpy() for site, value in refit.sample(S).items() if site != "a"}
    of_refit = np.logaddexp.reduce(log_density(name, draws["mu"], draws["tau"])) - math.log(S)
    drawn = others.correction
    how = (
        "q"
        if drawn is None
        else f"{'chains' if drawn.khat is None else f'{drawn.khat:.2f}'}, {drawn.ess:.0f}"
    )
    return [
        f"{elpd:.2f}",
        f"{row['elpd']:.2f} ± {row['mcse']:.2f}",
        f"{of_refit:.2f}",
        f"{row['khat']:.2f}" + (" (new draws)" if name in table.refined else ""),
        f"{mean:.3f} ± {sd:.3f}",
        tau_of(others),
        tau_of(refit),
        how,
        f"{conflict:.3f}",
        f"{row['conflict']:.3f}",
        f"{middle - start:.1f}",
        f"{end - middle:.1f}",
    ]


def main() -> None:
    given = runner.arguments(__doc__)
    runner.table(COLUMNS, {name: [(name,)] for name in (*NAMES, "none")}, measure, given)


if __name__ == "__main__":
    main()
