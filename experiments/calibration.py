"""Do intervals cover as often as they say? Simulation-based calibration of shipped models; makes calibration.md.

    python experiments/calibration.py                   # half an hour
    python experiments/calibration.py --n 200 --out my.md

Each replication draws true values from the model's prior and outcomes on simulated covariates of eight clients with
twelve rows each (the eight schools have one), and fits them as ``bf.fit`` does by default. In rows named "censored" all
rows are observed until a time of 2. The network is a line with weights of each client's own and a hyper-prior; without
one, and in ``HyperNetwork`` and ``Modulated``, weights are parameters without a prior and cannot be calibrated. "p" is
the smallest p-value of uniform ranks over variables, times their number; "bias" that of symmetric ranks (VSBC).
"Coverage" is of intervals of 50 and 90 % of the variable whose coverage of 90 % is farthest off, in standard errors.
The first row has the closed form beside it: the largest error of a posterior mean, in posterior standard deviations,
and of a standard deviation, over all replications. The last rows have a fault: a q(θ) whose scale is halved after the
fit; true values from other priors: of a mean that is 10 higher, of a spread between schools that is three times as
wide, which sixty replications do not show, and of noise that is three times as wide with intercepts that are 2 higher;
fits without the correction by importance sampling, one of them by a mean-field q, which may be small faults. Seconds
are of the clock, on a machine that other programs used too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import runner
import torch

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.calibration import replications
from bayesfed.guides.mean_field import LOG_SCALE

COLUMNS = (
    "model | fit | variables | replications | failed | not converged, or with a caveat | p | bias | off "
    "| coverage of the worst: 50 % | 90 % | seconds a fit | beside the closed form"
)
CLIENTS, ROWS = 8, 12


def conjugate(federation):
    """Normal throughout: mu ~ N(0, 2), alpha_i ~ N(mu, 1), y_ij ~ N(alpha_i, 0.5)."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    with federation.clients():
        alpha = pyro.sample("alpha", dist.Normal(mu, 1.0))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(alpha, 0.5), obs=obs.get("y"))


def wide_schools(federation):
    """The eight schools with effects that differ three times as much."""
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(15.0))
    with federation.clients():
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(theta, obs["sigma"]), obs=obs.get("y"))


def high_schools(federation):
    """The eight schools with a mean effect that the prior does not expect."""
    mu = pyro.sample("mu", dist.Normal(10.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    with federation.clients():
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(theta, obs["sigma"]), obs=obs.get("y"))


def noisy_intercepts(federation):
    """``varying_intercept`` with noise whose prior is three times as wide."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    beta = pyro.sample("beta", dist.Normal(0.0, 2.0).expand((2,)).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfNormal(3.0))
    with federation.clients():
        alpha = pyro.sample("alpha", dist.Normal(mu + 2.0, tau))
        with federation.observations() as obs:
            mean = alpha + (beta * obs["x"]).sum(-1)
            pyro.sample("y", dist.Normal(mean, sigma), obs=obs.get("y"))


def rows() -> bf.Federation:
    """Return clients with two standard Normal covariates, and outcomes that are replaced."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(CLIENTS, ROWS, 2, generator=generator)
    one = torch.ones(ROWS)
    parts = {f"client {i}": {"x": x[i], "y": one, "time": one} for i in range(CLIENTS)}
    return bf.Federation.from_arrays(parts)


def followed_up() -> bf.Federation:
    """Return the same clients, whose rows are observed until a time of 2."""
    found = rows()
    fields = {"time": torch.full_like(found["time"], 2.0), "event": torch.zeros_like(found["time"])}
    return replace(found, fields={**found.fields, **fields}, moments=None)


MODELS: dict[str, tuple[Any, Callable[[], bf.Federation]]] = {
    "conjugate": (conjugate, rows),
    "eight_schools": (models.eight_schools, datasets.eight_schools),
    "varying_intercept": (models.varying_intercept, rows),
    "varying_slope": (models.varying_slope, rows),
    "hierarchical_logistic": (models.hierarchical_logistic, rows),
    "hierarchical_count": (models.hierarchical_count, rows),
    "OrderedLogistic": (models.OrderedLogistic(4), rows),
    "weibull_survival": (models.weibull_survival, rows),
    "weibull_survival, censored": (models.weibull_survival, followed_up),
    "Cox": (models.Cox([0.5, 1.5]), rows),
    "Cox, censored": (models.Cox([0.5, 1.5]), followed_up),
    "GaussianProcess": (models.GaussianProcess(), rows),
    "Network": (models.Network(models.mlp(2, 1), likelihood="normal", hyper_scale=0.5), rows),
}
FAULTS = {
    "eight_schools, scale halved": ("eight_schools", "halved", None),
    "varying_intercept, scale halved": ("varying_intercept", "halved", None),
    "eight_schools, no correction": ("eight_schools", "plain", None),
    "hierarchical_logistic, mean field, no correction": (
        "hierarchical_logistic",
        "mean field",
        None,
    ),
    "eight_schools, mean elsewhere": ("eight_schools", "", high_schools),
    "eight_schools, other prior": ("eight_schools", "", wide_schools),
    "varying_intercept, other prior": ("varying_intercept", "", noisy_intercepts),
}


def halved(*arguments: Any, **options: Any) -> bf.Posterior:
    """Fit, and halve the standard deviations of q(θ)."""
    found = bf.fit(*arguments, **options)
    params = found.params | {LOG_SCALE: found.params[LOG_SCALE] - math.log(2.0)}
    return replace(found, params=params, correction=None, resampled=frozenset())


def measure(name: str, n: int) -> list[str]:
    """Calibrate one model, or one with a fault."""
    model, fault, simulate = FAULTS.get(name, (name, "", None))
    program, clients = MODELS[model][0], MODELS[model][1]()
    federations: list[bf.Federation] = []

    def recorded(fitted: Any, federation: bf.Federation, *rest: Any, **options: Any) -> Any:
        federations.append(federation)
        return (halved if fault == "halved" else bf.fit)(fitted, federation, *rest, **options)

    algorithm = bf.SFVI(corrected=not fault)
    if fault == "mean field":
        algorithm = bf.SFVI(global_guide=bf.MeanField(), corrected=False)
    replications.fit = recorded  # type: ignore[attr-defined]
    found = bf.calibrate(program, clients, algorithm, n=n, simulate=simulate, progress=False)
    table, ends = found.table, found.replications
    off = (table["coverage_90"] - 0.9).abs() / table["error_90"].clip(lower=1e-9)
    worst = table.loc[off.idxmax()]
    poor = int((ends["converged"].eq(False) | (ends["caveat"] != "")).sum())
    return [
        str(algorithm) if fault else "default",
        str(len(table)),
        str(len(ends)),
        str(int((ends["failed"] != "").sum())),
        str(poor),
        _p(found.p_value),
        _p(min(1.0, len(table) * float(table["p_bias"].min()))),
        "; ".join(f"{variable}: {words}" for variable, words in found.off.items()) or "none",
        *(f"{worst[f'coverage_{k}']:.2f} ± {worst[f'error_{k}']:.2f}" for k in (50, 90)),
        f"{ends['seconds'].median():.2f}",
        _beside_closed_form(found, federations) if name == "conjugate" else "",
    ]


def _p(value: float) -> str:
    return f"{value:.3f}" if value >= 0.001 else "<0.001"


def _beside_closed_form(found: Any, federations: list[bf.Federation]) -> str:
    """Return the largest differences to the conditioned joint Normal of mu and alpha."""
    shift = ratio = 0.0
    for number, federation in enumerate(federations):
        y, counts = federation["y"].double(), federation.lengths.double()
        means = torch.zeros(len(federation), dtype=torch.float64)
        means.index_add_(0, federation.owner, y)
        means /= counts
        spread = 0.25 / counts
        precision = 0.25 + (1 / (1 + spread)).sum()
        mu = (means / (1 + spread)).sum() / precision
        own = 1 / (1 + 1 / spread)
        loc = (means / spread + mu) * own
        sd = (own + own**2 / precision).sqrt()
        exact = {"mu": (mu, precision.rsqrt()), "alpha": (loc, sd)}
        for variable, (at, scale) in exact.items():
            mean, own_sd = (
                torch.as_tensor(np.asarray(part[variable][number]))
                for part in (found.means, found.sds)
            )
            shift = max(shift, float(((mean - at) / scale).abs().max()))
            ratio = max(ratio, float((own_sd / scale - 1).abs().max()))
    return f"{shift:.2f} sd, {100 * ratio:.0f} %"


def main() -> None:
    given = runner.arguments(__doc__, n=60)
    calls = {name: [(name, given.n)] for name in (*MODELS, *FAULTS)}
    runner.table(COLUMNS, calls, measure, given)


if __name__ == "__main__":
    main()
