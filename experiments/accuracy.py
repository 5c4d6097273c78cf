"""How close do federated fits come to NUTS on the pooled data? Makes accuracy.md.

    pip install 'bayesfed[benchmarks]'
    python experiments/accuracy.py                  # all problems, about an hour
    python experiments/accuracy.py "eight schools"  # the rows of one problem

The problems and their references are those of problems.py. Fits have no number of rounds: they stop by themselves. The
posterior means of all entries of all latent variables are compared in units of NUTS' posterior standard deviation, the
standard deviations by their ratio; a row holds the largest shift and the range of the ratios.

Rows "pooled SVI" are pyro.infer.SVI with the same guide on all data at once: where such a row has the same error, the
variational family is the limit and not the federation. Rows "new client" fit without one client, personalise it, and
compare with its posterior given NUTS' draws of the global variables from the others, which is known in closed form.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyro
import runner
from distances import cells
from problems import PROBLEMS, reference
from pyro.infer import SVI, Trace_ELBO

import bayesfed as bf
from bayesfed.elbo.sites import sites

COLUMNS = (
    "problem | guide | run | rounds | mean, globals | sd ratio | mean, locals | sd ratio | ELBO"
)
NEW_CLIENT = {"eight schools": "A", "grunfeld": "IBM", "radon": "20"}
BATCHES = {"grunfeld": 10, "radon": 10, "anes96": 10}
NAMES = ["eight schools", "grunfeld", "radon", "anes96", "kidney", "kidney, Cox"]
GUIDES = {
    "default": bf.SFVI(),
    "Flow": bf.SFVI(global_guide=bf.Flow()),
    "MeanField": bf.SFVI(global_guide=bf.MeanField(), conditioned=False),
    "PVI": bf.PVI(),
}


def given_globals(
    theta: dict[str, np.ndarray], client: bf.Federation, seed: int = 0
) -> dict[str, np.ndarray]:
    """Draw the client's variables in closed form for each draw of the global ones.

    The models that leave out a client are y = D w + offset + N(0, s²) with w ~ N(m, diag t²), so
    w | θ, y ~ N(V (m / t² + Dᵀ(y − offset) / s²), V) with V = (diag t⁻² + DᵀD / s²)⁻¹.
    """
    y = client["y"].double().numpy()
    ones = np.ones((len(y), 1))
    generator = np.random.default_rng(seed)
    if "mu_alpha" in theta:
        x = client["x"].double().numpy()
        design, offset = np.hstack([ones, x]), np.zeros((len(theta["sigma"]), len(y)))
        m = np.column_stack([theta["mu_alpha"], theta["mu_beta"]])
        t = np.column_stack([theta["tau_alpha"], theta["tau_beta"]])
        s = np.repeat(theta["sigma"][:, None], len(y), 1)
    else:
        design, m, t = ones, theta["mu"][:, None], theta["tau"][:, None]
        if "beta" in theta:
            offset = theta["beta"] @ client["x"].double().numpy().T
            s = np.repeat(theta["sigma"][:, None], len(y), 1)
        else:
            offset = np.zeros((len(m), len(y)))
            s = np.repeat(client["sigma"].double().numpy()[None], len(m), 0)
    scaled = design.T[None] / s[:, None] ** 2
    precision = scaled @ design
    precision[:, np.arange(m.shape[1]), np.arange(m.shape[1])] += t**-2.0
    natural = m / t**2 + (scaled @ (y - offset)[..., None])[..., 0]
    cov = np.linalg.inv(precision)
    w = (cov @ natural[..., None])[..., 0]
    w = w + (np.linalg.cholesky(cov) @ generator.standard_normal(w.shape)[..., None])[..., 0]
    if "mu_alpha" in theta:
        return {"alpha": w[:, :1], "beta": w[:, None, 1:]}
    return {"alpha" if "beta" in theta else "theta": w[:, :1]}


def pooled_svi(
    problem: str, federation: bf.Federation, algorithm: bf.SFVI, steps: int, seed: int
) -> bf.Posterior:
    """Return the same guide fitted by pyro.infer.SVI on all rows at once."""
    execution = bf.Execution(compile=False)
    run = bf.start(PROBLEMS[problem].model, federation, algorithm, rounds=1, execution=execution)
    posterior = replace(bf.finish(run), correction=None)
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    program = posterior.program
    optimiser = pyro.optim.ClippedAdam({"lr": 0.03, "lrd": 0.01 ** (1 / steps), "clip_norm": 1e9})
    elbo = Trace_ELBO(num_particles=8, vectorize_particles=True, max_plate_nesting=2)
    svi = SVI(program.model, program.guide, optimiser, elbo)
    for _ in range(steps):
        svi.step(federation)
    store = pyro.get_param_store()
    fitted = {n: store[n].detach().clone() for n in store}
    return replace(
        posterior,
        params={n: fitted[n] for n in posterior.params},
        local_params={n: fitted[n] for n in posterior.local_params},
    )


def runs(name: str) -> dict[str, dict[str, float]]:
    """Return how a problem is fitted, by the words of the table."""
    some: dict[str, float] = {"clients_per_round": 0.2}
    found: dict[str, dict[str, float]] = {"all clients": {}, "20 %": some}
    if name in BATCHES:
        found[f"20 %, {BATCHES[name]} rows a step"] = some | {"batch_size": BATCHES[name]}
    return found


def measure(name: str, guide: str, run: str) -> list[str]:
    """Fit a problem and compare it with NUTS."""
    problem, algorithm = PROBLEMS[name], GUIDES[guide]
    federation = problem.data()
    found = sites(problem.model, federation).values()
    latent = [site.name for site in found if not site.observed]
    local = {site.name for site in found if site.local}
    if run.startswith("new client"):
        others, client = federation.hold_out([NEW_CLIENT[name]])
        theta = reference(f"{name} without {NEW_CLIENT[name]}", problem, others)
        posterior = bf.fit(problem.model, others, seed=1, clients_per_round=0.2)
        draws = posterior.personalize(client).sample(20_000)
        truth = given_globals({k: theta[k] for k in latent if k not in local}, client)
        return [runner.rounds_of(posterior), *cells(draws, truth, local), ""]
    truth = reference(name, problem, federation)
    truth = {site: truth[site] for site in latent if site in truth}
    if run == "pooled SVI":
        posterior, rounds = pooled_svi(name, federation, algorithm, 5000, seed=1), ""
    else:
        posterior = bf.fit(problem.model, federation, algorithm, seed=1, **runs(name)[run])
        rounds = runner.rounds_of(posterior)
    elbo = posterior.elbo(20_000)
    error = float(elbo.std()) / len(elbo) ** 0.5
    compared = cells(posterior.sample(20_000), truth, local)
    return [rounds, *compared, f"{float(elbo.mean()):.2f} ± {error:.2f}"]


def main() -> None:
    given = runner.arguments(__doc__, guides=list(GUIDES))
    rows = []
    for name in NAMES:
        for guide in given.guides:
            rows += [(name, guide, run) for run in runs(name)]
            rows += [(name, guide, "pooled SVI")] * (guide != "PVI")
        if "default" in given.guides and name in NEW_CLIENT:
            rows.append((name, "default", f"new client {NEW_CLIENT[name]}"))
    runner.table(COLUMNS, rows, measure, given)


if __name__ == "__main__":
    main()
