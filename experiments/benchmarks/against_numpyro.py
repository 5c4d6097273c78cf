"""How long does a gradient of a hierarchical model's ELBO take, beside NumPyro's SVI? Makes against_numpyro.md.

    pip install 'bayesfed[benchmarks]'
    python experiments/benchmarks/against_numpyro.py      # some minutes, on a machine that does nothing else

Varying intercepts, all groups in every step, mean-field guides, 8 draws. NumPyro holds all rows in one place and runs
its steps in one compiled loop. Ours are rounds of 10 local steps, in which the clients' parameters are stepped and the
server's gradient is summed; the time is a round's over 10. They take turns in one process.
"""

from __future__ import annotations

import statistics
import time

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import torch
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from timing import ratio, runner

import bayesfed as bf
from bayesfed import models

STEPS, DRAWS = 10, 8


def federation(groups: int, rows: int) -> bf.Federation:
    rng = np.random.default_rng(0)
    total = groups * rows
    x = rng.normal(size=(total, 1)).astype("float32")
    level = rng.normal(size=groups).repeat(rows)
    y = (level + 0.5 * x[:, 0] + 0.3 * rng.normal(size=total)).astype("float32")
    fields = {"x": torch.as_tensor(x), "y": torch.as_tensor(y)}
    return bf.Federation(fields, torch.arange(0, total + 1, rows), [f"{i}" for i in range(groups)])


def pooled(group: jax.Array, x: jax.Array, y: jax.Array, groups: int) -> None:
    """Sample as models.varying_intercept, in NumPyro."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 2.0))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    beta = numpyro.sample("beta", dist.Normal(0.0, 2.0).expand([1]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    with numpyro.plate("clients", groups):
        alpha = numpyro.sample("alpha", dist.Normal(mu, tau))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(alpha[group] + x @ beta, sigma), obs=y)


def measure(groups: int, rows: int, rounds: int) -> list[str]:
    """Time a number of groups; NumPyro's steps run between our rounds."""
    data = federation(groups, rows)
    group = jax.numpy.asarray(np.arange(groups).repeat(rows))
    x, y = (jax.numpy.asarray(data[name].numpy()) for name in ("x", "y"))
    svi = SVI(pooled, AutoNormal(pooled), numpyro.optim.Adam(0.01), Trace_ELBO(num_particles=DRAWS))
    state = svi.init(jax.random.PRNGKey(0), group, x, y, groups)

    @jax.jit
    def steps(state, svi=svi, group=group, x=x, y=y, groups=groups):
        update = lambda state, _: svi.update(state, group, x, y, groups)  # noqa: E731
        return jax.lax.scan(update, state, length=STEPS)

    times: dict[bool | str, list[float]] = {"numpyro": []}

    def theirs(_: object, steps=steps, times=times, start=state) -> None:
        jax.block_until_ready(steps(start))
        begin = time.perf_counter()
        jax.block_until_ready(steps(start))
        times["numpyro"].append((time.perf_counter() - begin) / STEPS)

    cell = ""
    for compile in (True, False):
        algorithm = bf.SFVI(
            global_guide=bf.MeanField(), conditioned=False, local_steps=STEPS, draws=DRAWS
        )
        posterior = bf.fit(
            models.varying_intercept,
            data,
            algorithm,
            rounds=rounds,
            execution=bf.Execution(compile=compile),
            progress=False,
            callbacks=[theirs],
        )
        times[compile] = [s / STEPS for s in posterior.history["seconds"].tolist()[2:]]
        if compile:
            cell = ratio(times["numpyro"][2:], times[True], ".2f")
    middle = [1000 * statistics.median(times[k]) for k in ("numpyro", True, False)]
    return [*(f"{m:.2f}" for m in middle), cell]


def main() -> None:
    given = runner.arguments(__doc__, rounds=30)
    sizes = ((85, 11), (1000, 10), (1000, 100))
    rows = {f"{groups} × {rows}": [(groups, rows, given.rounds)] for groups, rows in sizes}
    columns = (
        "groups × rows | NumPyro, ms a gradient | ours compiled | ours eager | NumPyro / compiled"
    )
    note = f"NumPyro {numpyro.__version__}, jax {jax.__version__}."
    runner.table(columns, rows, measure, given, note=lambda: note, threads=None)


if __name__ == "__main__":
    main()
