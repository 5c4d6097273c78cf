"""Do mi(), me() and mo() of formulas agree with NUTS of the same models, written by hand? Makes covariates.md.

    python experiments/covariates.py            # minutes a row

Data are simulated: 12 clients of 25 rows. A covariate z depends on x; of mi() a third of its values are missing, more
often where x is large; of me() it is measured with a standard error of 0.4 to 0.8. mo() is of four levels with unequal
steps. The reference is written in NumPyro with a variable for each unknown value, and has bayesfed's default priors.
bayesfed integrates the unknown values out. The cells are the largest shift of a mean in NUTS's standard deviations
and the range of the ratios of standard deviations, over the coefficients in the data's units and the clients' effects.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import runner
from distances import cells
from numpyro.infer import MCMC, NUTS

import bayesfed as bf

CLIENTS, ROWS = 12, 25
FAMILIES = "gaussian", "bernoulli", "poisson"
TERMS = {
    "mi": "y ~ x + mi(z) + (1 | g)\nz | mi() ~ x",
    "mi, error": "y ~ x + mi(z) + (1 | g)\nz | mi(s) ~ x",
    "me": "y ~ x + me(z, s) + (1 | g)",
    "mo": "y ~ x + mo(level) + (1 | g)",
}
STEPS = np.array([0.0, 0.1, 0.8, 1.0])


def frame_of(family: str, term: str) -> pd.DataFrame:
    """Simulate the rows."""
    rng = np.random.default_rng(0)
    client = np.repeat(np.arange(CLIENTS), ROWS)
    x = rng.normal(size=len(client))
    true, level = 2 + 0.6 * x + 0.8 * rng.normal(size=len(x)), rng.integers(0, 4, len(x))
    effect = 1.5 * STEPS[level] if term == "mo" else 0.6 * (true - 2)
    eta = 0.3 * x + effect + 0.5 * rng.normal(size=CLIENTS)[client]
    y = {
        "gaussian": eta + 0.7 * rng.normal(size=len(x)),
        "bernoulli": (rng.logistic(size=len(x)) < eta).astype(float),
        "poisson": rng.poisson(np.exp(0.5 + eta)).astype(float),
    }[family]
    s = rng.uniform(0.4, 0.8, len(x))
    z = true if term == "mi" else true + s * rng.normal(size=len(x))
    if term.startswith("mi"):
        z = np.where(rng.logistic(size=len(x)) < x - 0.8, np.nan, z)
    return pd.DataFrame({"g": client.astype(str), "x": x, "z": z, "s": s, "level": level, "y": y})


def reference(family: str, term: str, frame: pd.DataFrame) -> dict[str, np.ndarray]:
    """Return draws of NUTS, in the data's units."""
    x, z, s, y = (jnp.array(frame[name].to_numpy()) for name in ("x", "z", "s", "y"))
    level, client = frame.level.to_numpy(), frame.g.astype(int).to_numpy()
    gaps = frame.z.isna().to_numpy()
    mx, sx, mz, sz = float(x.mean()), float(x.std()), float(jnp.nanmean(z)), float(jnp.nanstd(z))
    sl = float(level.std())
    identity, logit = family == "gaussian", family == "bernoulli"
    unit = float(y.std()) if identity else 1.0
    centre = float({"gaussian": y.mean(), "bernoulli": 0.0, "poisson": jnp.log(y.mean())}[family])
    wide = 1.0 if logit else 2.5

    def half_student(name: str) -> Any:
        return numpyro.sample(name, dist.FoldedDistribution(dist.StudentT(4.0, 0.0, 1.0)))

    def model() -> None:
        spread = {"gaussian": 2.5 * unit, "bernoulli": 1.5, "poisson": 2.5}[family]
        middle = numpyro.sample("middle", dist.Normal(centre, spread))
        b = numpyro.sample("x", dist.Normal(0.0, wide * unit / sx))
        tau = numpyro.sample("1|g_sigma", dist.HalfNormal(2.5 * unit))
        u = numpyro.sample("noise", dist.Normal(0.0, 1.0).expand([CLIENTS]).to_event(1)) * tau
        numpyro.deterministic("1|g", u)
        if term == "mo":
            c = numpyro.sample("mo(level)", dist.Normal(0.0, wide * unit / sl))
            simplex = numpyro.sample("mo(level)_simplex", dist.Dirichlet(jnp.ones(3)))
            reached = jnp.concatenate([jnp.zeros(1), jnp.cumsum(simplex)])[level] * 3
            own, at = c * reached, c * reached.mean()
        else:
            label = "me(z, s)" if term == "me" else "mi(z)"
            c = numpyro.sample(label, dist.Normal(0.0, wide * unit / sz))
            mean = numpyro.sample("z middle", dist.Normal(mz, 2.5 * sz))
            d = numpyro.sample("z_x", dist.Normal(0.0, 2.5 * sz / sx)) if term != "me" else 0.0
            sigma = numpyro.deterministic("z_sigma", sz * half_student("z noise"))
            numpyro.deterministic("z_Intercept", mean - d * mx)
            at_x = mean + d * (x - mx)
            free = gaps if term == "mi" else np.ones(len(gaps), bool)
            unknown = numpyro.sample("unknown", dist.Normal(0, 1).expand([free.sum()]).to_event(1))
            value = (
                jnp.where(free, 0.0, jnp.nan_to_num(z)).at[free].set(at_x[free] + sigma * unknown)
            )
            if term == "mi":
                numpyro.sample("z", dist.Normal(at_x[~gaps], sigma), obs=z[~gaps])
            else:
                numpyro.sample("z", dist.Normal(value[~gaps], s[~gaps]), obs=z[~gaps])
            own, at = c * value, c * mz
        numpyro.deterministic("Intercept", middle - b * mx - at)
        eta = middle + b * (x - mx) + own - at + u[client]
        if identity:
            scale = numpyro.deterministic("sigma", unit * half_student("sigma noise"))
            numpyro.sample("y", dist.Normal(eta, scale), obs=y)
        elif logit:
            numpyro.sample("y", dist.Bernoulli(logits=eta), obs=y)
        else:
            numpyro.sample("y", dist.Poisson(jnp.exp(eta)), obs=y)

    kernel = NUTS(model, target_accept_prob=0.9)
    mcmc = MCMC(
        kernel,
        num_warmup=1000,
        num_samples=2000,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.PRNGKey(0))
    found = {
        name: np.asarray(value, dtype=np.float64) for name, value in mcmc.get_samples().items()
    }
    scratch = "middle", "noise", "z middle", "z noise", "sigma noise", "unknown"
    return {name: value for name, value in found.items() if name not in scratch}


def measure(name: str) -> list[str]:
    """Fit a formula, and run NUTS."""
    family, term = name.split(", ", 1)
    frame = frame_of(family, term)
    model = bf.formula(TERMS[term], frame, client="g", family=family)
    begin = time.perf_counter()
    posterior = bf.fit(model, model.federation, progress=False)
    seconds = time.perf_counter() - begin
    draws = {k: v.double().numpy() for k, v in posterior.derived(num_samples=8000).items()}
    khat = "" if posterior.khat is None else f"{posterior.khat:.2f}"
    found = cells(draws, reference(family, term, frame), {"1|g"})
    return [*found, khat, runner.rounds_of(posterior), f"{seconds:.1f}"]


def main() -> None:
    given = runner.arguments(__doc__)
    columns = (
        "model | coefficients: shift | sd ratio | clients: shift | sd ratio | k̂ | rounds | seconds"
    )
    runner.table(columns, [f"{f}, {t}" for t in TERMS for f in FAMILIES], measure, given)


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    main()
