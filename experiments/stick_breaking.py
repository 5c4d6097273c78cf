"""How do time and error grow with the components of a mixture? Makes stick_breaking.md.

    pip install 'bayesfed[benchmarks]'
    python experiments/stick_breaking.py                # twenty minutes
    python experiments/stick_breaking.py "of clients"   # some rows

A truncated Dirichlet process by stick breaking: shares of K components, their centres, and an effect of each client.
The component of a row ("of rows") or of a client ("of clients") is a discrete variable, which bayesfed sums out;
"written out" has the same sum over components of rows as a `MixtureSameFamily`. Data are of three components: 8 clients
of 60 rows, or 40 clients of 5. Components have no order, so that a posterior has many modes and means of centres say
nothing. Compared are densities of further rows of the same clients, as many again: "lost" is by how many nats a row the
posterior's are below the density that the rows came from. NUTS is NumPyro's, with the sum over components written out,
one chain of 1000 + 1000. The fit has the usual settings, and ends after 500 rounds if it has not converged. Seconds are
those of a fit in a process that has run nothing before. Another program ran beside it on the two cores. "named" is
whether the caveat says that the posterior may be wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import runner
from torch import Tensor
from torch.nn.functional import pad

import bayesfed as bf
from bayesfed.engine.run import Stopped

COLUMNS = (
    "component | K | rounds | s | s a round and K | k | named | lost | NUTS: s | lost | s ÷ NUTS"
)
CENTRES, SHARES, NOISE, EFFECT = np.array([-4.0, 0.0, 5.0]), np.array([0.5, 0.3, 0.2]), 0.6, 0.3
DRAWS = 1000
ROWS = [
    *[("of rows", size) for size in (3, 6, 12)],
    *[("of rows, written out", size) for size in (3, 6, 12, 24)],
    *[("of clients", size) for size in (3, 6, 12)],
]


def shares_of(sticks: Tensor) -> Tensor:
    """Return the components' shares from the parts that are broken off the stick."""
    left = (1 - sticks).cumprod(-1)
    return pad(sticks, (0, 1), value=1.0) * pad(left, (1, 0), value=1.0)


def program(kind: str, size: int) -> Callable[[Any], None]:
    """Return the Pyro program of a row of the table."""

    def mixture(federation: Any) -> None:
        alpha = pyro.sample("alpha", dist.Gamma(2.0, 1.0))
        with pyro.plate("sticks", size - 1):
            sticks = pyro.sample("stick", dist.Beta(1.0, alpha))
        with pyro.plate("components", size):
            centre = pyro.sample("centre", dist.Normal(0.0, 5.0))
        kinds = dist.Categorical(shares_of(sticks))
        with federation.clients():
            effect = pyro.sample("effect", dist.Normal(0.0, EFFECT))
            if kind == "of clients":
                own = centre[pyro.sample("component", kinds)] + effect
            with federation.observations() as obs:
                if kind == "of rows":
                    own = centre[pyro.sample("component", kinds)] + effect
                outcome: Any = (
                    dist.MixtureSameFamily(kinds, dist.Normal(centre + effect, NOISE))
                    if kind == "of rows, written out"
                    else dist.Normal(own, NOISE)
                )
                pyro.sample("y", outcome, obs=obs.get("y"))

    return mixture


def simulated(kind: str) -> tuple[np.ndarray, np.ndarray, float]:
    """Return rows ``(clients, rows)``, as many further ones, and the mean log density that these came from."""
    generator = np.random.default_rng(23)
    clients, rows = (40, 5) if kind == "of clients" else (8, 60)
    effect = EFFECT * generator.normal(size=(clients, 1))
    width = 1 if kind == "of clients" else 2 * rows
    component = generator.choice(3, size=(clients, width), p=SHARES)
    y = effect + CENTRES[component] + NOISE * generator.normal(size=(clients, 2 * rows))
    new = y[:, rows:]
    known = effect + CENTRES[component[:, :1]] if kind == "of clients" else None
    if known is not None:
        density = log_normal(new, known, NOISE)
    else:
        each = log_normal(new[..., None], effect[..., None] + CENTRES, NOISE)
        density = np.log((SHARES * np.exp(each)).sum(-1))
    return y[:, :rows], new, float(density.mean())


def log_normal(x: Any, mean: Any, sd: float) -> Any:
    """Return the log density of a Normal."""
    return -(((x - mean) / sd) ** 2) / 2 - np.log(sd * np.sqrt(2 * np.pi))


def by_nuts(kind: str, size: int, y: np.ndarray, new: np.ndarray) -> tuple[float, float]:
    """Return the seconds of NUTS, and the mean log density of further rows."""
    import jax
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as nd
    from jax.nn import log_softmax
    from jax.scipy.special import logsumexp

    def parts(centre: Any, effect: Any, rows: Any) -> Any:
        """Log densities ``(clients, rows, K)``."""
        return nd.Normal(centre + effect[:, None, None], NOISE).log_prob(rows[..., None])

    def log_shares(sticks: Any) -> Any:
        left = jnp.concatenate([jnp.zeros(1), jnp.cumsum(jnp.log1p(-sticks))])
        return left + jnp.concatenate([jnp.log(sticks), jnp.zeros(1)])

    def model() -> None:
        alpha = numpyro.sample("alpha", nd.Gamma(2.0, 1.0))
        sticks = numpyro.sample("stick", nd.Beta(1.0, alpha).expand([size - 1]))
        centre = numpyro.sample("centre", nd.Normal(0.0, 5.0).expand([size]))
        effect = numpyro.sample("effect", nd.Normal(0.0, EFFECT).expand([len(y)]))
        each = parts(centre, effect, y)
        each = each.sum(1) if kind == "of clients" else each
        numpyro.factor("y", logsumexp(each + log_shares(sticks), -1).sum())

    def log_density(draw: Any) -> Any:
        level = log_shares(draw["stick"])
        if kind == "of clients":  # given the client's own rows
            own = parts(draw["centre"], draw["effect"], y).sum(1)
            level = log_softmax(own + level, -1)[:, None]
        return logsumexp(parts(draw["centre"], draw["effect"], new) + level, -1)

    start = time.perf_counter()
    chain = numpyro.infer.MCMC(
        numpyro.infer.NUTS(model), num_warmup=1000, num_samples=1000, progress_bar=False
    )
    chain.run(jax.random.PRNGKey(0))
    draws = chain.get_samples()
    seconds = time.perf_counter() - start
    each = jax.lax.map(log_density, draws)
    return seconds, float((logsumexp(each, 0) - np.log(len(each))).mean())


def federation(y: np.ndarray) -> bf.Federation:
    return bf.Federation.from_arrays({f"c{i}": {"y": own} for i, own in enumerate(y)})


def measure(kind: str, size: int) -> list[str]:
    """Fit a program, and compare densities of further rows."""
    y, new, best = simulated(kind)
    start = time.perf_counter()
    try:
        posterior = bf.fit(program(kind, size), federation(y), seed=1, progress=False)
    except Stopped as stopped:
        seconds, rounds = time.perf_counter() - start, stopped.run.done
        found, k, named = "", "", f"error: {stopped}"
    else:
        seconds, rounds = time.perf_counter() - start, len(posterior.history["elbo"])
        each = posterior.log_likelihood(federation(new), DRAWS)["y"].double()
        found = f"{best - float((each.logsumexp(0) - np.log(len(each))).mean()):.3f}"
        k = "" if posterior.khat is None else f"{posterior.khat:.2f}"
        named = "yes" if posterior.caveat else "no"
    by_chain, of_chain = by_nuts(kind, size, y, new)
    return [
        str(rounds),
        f"{seconds:.1f}",
        f"{seconds / rounds / size:.3f}",
        k,
        named,
        found,
        f"{by_chain:.1f}",
        f"{best - of_chain:.3f}",
        f"{seconds / by_chain:.2f}",
    ]


def main() -> None:
    given = runner.arguments(__doc__)
    runner.table(COLUMNS, ROWS, measure, given, alone=True)


if __name__ == "__main__":
    main()
