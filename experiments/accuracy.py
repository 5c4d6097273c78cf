"""How close federated fits come to pooled NUTS on the same program: makes accuracy.md.

    pip install 'bayesfed[benchmarks]'
    python experiments/accuracy.py                  # all problems, about an hour
    python experiments/accuracy.py "eight schools"  # one of them; its rows in accuracy.md are replaced as they come

Fits without a number of rounds, which stop by themselves, after so many rounds. For every latent variable (each entry
of each site, global and local) the posterior mean is compared in units of NUTS' posterior standard deviation, and the
standard deviations by their ratio; a row holds the largest shift and the range of the ratios. The problems and their
references are those of problems.py. Radon needs its data, a JSON file with `county`, `x` (floor) and `y` (log radon):
--radon PATH.

Rows "pooled SVI" are pyro.infer.SVI with the same guide on all data at once: where such a row has the same
error, the family is the limit and not the federation. Rows "new client" fit without one client, personalise
it, and compare with its posterior given NUTS' draws of the globals from the others, drawn in closed form; only where
there is one.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyro
import torch
from problems import PROBLEMS, reference
from pyro.infer import SVI, Trace_ELBO
from tables import keep, rounds_of

import bayesfed as bf
from bayesfed.elbo.sites import sites

warnings.simplefilter("ignore", FutureWarning)
HERE = Path(__file__).parent


def compare(
    draws: dict[str, torch.Tensor], reference: dict[str, np.ndarray], local: set[str]
) -> list[str]:
    """Largest shift and range of sd ratios, over the globals and over the locals."""
    cells = []
    for wanted in (False, True):
        shift, ratio = [np.zeros(0)], [np.zeros(0)]
        for name, ref in reference.items():
            if (name in local) == wanted:
                value, sd = draws[name].numpy(), ref.std(0)
                shift.append(np.ravel(np.abs(value.mean(0) - ref.mean(0)) / sd))
                ratio.append(np.ravel(value.std(0) / sd))
        shift, ratio = np.concatenate(shift), np.concatenate(ratio)
        cells += (
            [f"{shift.max():.2f}", f"{ratio.min():.2f}–{ratio.max():.2f}"]
            if len(shift)
            else ["", ""]
        )
    return cells


def elbo(posterior: bf.Posterior) -> str:
    values = posterior.elbo(20_000)
    return f"{float(values.mean()):.2f} ± {float(values.std()) / len(values) ** 0.5:.2f}"


def given_globals(
    theta: dict[str, np.ndarray], client: bf.Federation, seed: int = 0
) -> dict[str, np.ndarray]:
    """The client's variables, drawn in closed form for each draw of the globals.

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
    weighted = design.T[None] / s[:, None] ** 2
    precision = weighted @ design
    precision[:, np.arange(m.shape[1]), np.arange(m.shape[1])] += t**-2.0
    natural = m / t**2 + (weighted @ (y - offset)[..., None])[..., 0]
    cov = np.linalg.inv(precision)
    w = (cov @ natural[..., None])[..., 0]
    w = w + (np.linalg.cholesky(cov) @ generator.standard_normal(w.shape)[..., None])[..., 0]
    if "mu_alpha" in theta:
        return {"alpha": w[:, :1], "beta": w[:, None, 1:]}
    return {"alpha" if "beta" in theta else "theta": w[:, :1]}


def pooled_svi(posterior: bf.Posterior, steps: int, seed: int) -> bf.Posterior:
    """The same guide fitted by pyro.infer.SVI on all rows at once."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    program, federation = posterior.program, posterior.federation
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


@dataclass(frozen=True)
class Schedule:
    """How a problem is fitted here beside the runs of all rows, and who is left out, if anybody."""

    new_client: str | None
    batch_size: int | None = 10


SCHEDULES = {
    "eight schools": Schedule("A", None),
    "grunfeld": Schedule("IBM"),
    "radon": Schedule("20"),
    "anes96": Schedule(None),
    "kidney": Schedule(None, None),
    "kidney, Cox": Schedule(None, None),
}
GUIDES = {
    "default": bf.SFVI(),
    "Flow": bf.SFVI(global_guide=bf.Flow()),
    "MeanField": bf.SFVI(global_guide=bf.MeanField(), conditioned=False),
    "PVI": bf.PVI(),
}
HEADER = [
    "| problem | guide | run | rounds | mean, globals | sd ratio | mean, locals | sd ratio | ELBO |",
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
]


def rows(name: str, guides: list[str], path: Path) -> Iterator[str]:
    """Its rows, as they come."""
    problem, schedule = PROBLEMS[name], SCHEDULES[name]
    federation = problem.data(path)
    truth = reference(name, problem, federation)
    latent = {site.name for site in sites(problem.model, federation).values() if not site.observed}
    truth = {name: draws for name, draws in truth.items() if name in latent}
    some = {"clients_per_round": 0.2}
    runs: list[tuple[str, dict[str, float]]] = [("all clients", {}), ("20 %", some)]
    if schedule.batch_size:
        batch = some | {"batch_size": schedule.batch_size}
        runs.append((f"20 %, {schedule.batch_size} rows a step", batch))
    for guide in guides:
        for run, how in runs:
            posterior = bf.fit(problem.model, federation, GUIDES[guide], seed=1, **how)
            local = {site.name for site in posterior.program.locals}
            cells = compare(posterior.sample(20_000), truth, local)
            yield " | ".join([name, guide, run, rounds_of(posterior), *cells, elbo(posterior)])
        if guide != "PVI":
            pooled = pooled_svi(posterior, 5000, seed=1)
            cells = compare(pooled.sample(20_000), truth, local)
            yield " | ".join([name, guide, "pooled SVI", "", *cells, elbo(pooled)])
    if "default" not in guides or schedule.new_client is None:
        return
    others, client = federation.hold_out([schedule.new_client])
    theta = reference(f"{name} without {schedule.new_client}", problem, others)
    posterior = bf.fit(problem.model, others, seed=1, **some)
    new = posterior.personalize(client)
    of_client = given_globals({k: theta[k] for k in latent - local}, client)
    cells = compare(new.sample(20_000), of_client, local)
    run = f"new client {schedule.new_client}"
    yield " | ".join([name, "default", run, rounds_of(posterior), *cells, ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("problems", nargs="*", default=list(SCHEDULES), metavar="problem")
    parser.add_argument(
        "--radon", type=Path, default=HERE.parent.parent / "shared/data/radon_mn.json"
    )
    parser.add_argument("--guides", nargs="*", choices=GUIDES, default=list(GUIDES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("\n".join(HEADER))
    for name in args.problems:
        for row in rows(name, args.guides, args.radon):
            print(f"| {row} |", flush=True)
            keep(HERE / "accuracy.md", HEADER, f"| {row} |", list(SCHEDULES), columns=3)


if __name__ == "__main__":
    main()
