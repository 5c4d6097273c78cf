"""How close federated fits come to pooled NUTS on the same program: makes accuracy.md.

    python experiments/accuracy.py                  # all three problems, about half an hour
    python experiments/accuracy.py "eight schools"  # one of them; its rows in accuracy.md are replaced as they come

Radon needs its data, a JSON file with `county`, `x` (floor) and `y` (log radon): --radon PATH.

For every latent variable (each entry of each site, global and local) the posterior mean is compared in units
of NUTS' posterior standard deviation, and the standard deviations by their ratio; a row holds the largest
shift and the range of the ratios. NUTS' draws are kept in runs/reference/.

Rows "pooled SVI" are pyro.infer.SVI with the same guide on all data at once: where such a row has the same
error, the family is the limit and not the federation. Rows "new client" fit without one client, personalise
it, and compare with its posterior given NUTS' draws of the globals from the others, drawn in closed form.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from pyro.infer.reparam import LocScaleReparam
from tables import keep

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.elbo.sites import sites

warnings.simplefilter("ignore", FutureWarning)
HERE = Path(__file__).parent
RUNS = HERE.parent / "runs" / "reference"


def radon(path: Path) -> bf.Federation:
    raw = json.loads(path.read_text())
    import pandas as pd

    frame = pd.DataFrame({"county": raw["county"], "floor": raw["x"], "log_radon": raw["y"]})
    return bf.Federation.from_frame(
        frame, client="county", fields={"x": ["floor"], "y": "log_radon"}
    )


def nuts(
    name: str, model, federation, centred: bool, draws: int, chains: int
) -> dict[str, np.ndarray]:
    """Draws ``(S, ...)`` of pooled NUTS on the same program.

    With ``centred=False`` Pyro's LocScaleReparam makes the local sites non-centred: the same posterior, and
    easier to walk where a client has few rows.
    """
    path = RUNS / f"{name}.npz"
    if path.exists():
        return dict(np.load(path))
    local = [s.name for s in sites(model, federation).values() if s.local and not s.observed]
    config = {} if centred else {site: LocScaleReparam(0.0) for site in local}
    free = poutine.reparam(model, config=config)
    parts, start = [], time.perf_counter()
    for chain in range(chains):
        pyro.clear_param_store()
        pyro.set_rng_seed(chain)
        kernel = NUTS(free, target_accept_prob=0.9, jit_compile=True, ignore_jit_warnings=True)
        mcmc = MCMC(kernel, num_samples=draws, warmup_steps=1000, disable_progbar=True)
        mcmc.run(federation)
        latent = mcmc.get_samples()
        parts.append(_constrained(model, federation, free, latent, local))
    merged = {k: np.stack([p[k] for p in parts]) for k in parts[0]}
    import arviz as az

    r_hat = float(az.rhat(az.convert_to_dataset(merged)).to_array().max())
    ess = float(az.ess(az.convert_to_dataset(merged)).to_array().min())
    print(
        f"{name}: NUTS {time.perf_counter() - start:.0f} s, r_hat {r_hat:.3f}, ess {ess:.0f}",
        flush=True,
    )
    result = {k: v.reshape(-1, *v.shape[2:]) for k, v in merged.items()}
    RUNS.mkdir(parents=True, exist_ok=True)
    np.savez(path, **result)
    return result


def _constrained(model, federation, free, latent, local) -> dict[str, np.ndarray]:
    """All sites' values, the non-centred ones put back, one pass of the program per draw."""
    found: dict[str, list] = {}
    names = [s.name for s in sites(model, federation).values() if not s.observed]
    with torch.no_grad():
        for i in range(len(next(iter(latent.values())))):
            given = {k: v[i] for k, v in latent.items()}
            trace = poutine.trace(poutine.condition(free, given)).get_trace(federation)
            for name in names:
                value = trace.nodes[name]["value"]
                found.setdefault(name, []).append(value.squeeze(1) if name in local else value)
    return {k: torch.stack(v).numpy() for k, v in found.items()}


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

    All three models are y = D w + offset + N(0, s²) with w ~ N(m, diag t²), so
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
class Problem:
    """A model, its data, and how it is fitted here."""

    model: Callable[[Any], None]
    load: Callable[[Path], bf.Federation]
    batch_size: int | None
    centred: bool
    rounds: int
    new_client: str


PROBLEMS = {
    "eight schools": Problem(
        models.eight_schools, lambda _: datasets.eight_schools(), None, False, 1000, "A"
    ),
    "grunfeld": Problem(models.varying_slope, lambda _: datasets.grunfeld(), 10, True, 1000, "IBM"),
    "radon": Problem(models.varying_intercept, radon, 10, False, 1000, "20"),
}
GUIDES = {
    "default": bf.SFVI(),
    "Flow": bf.SFVI(global_guide=bf.Flow()),
    "MeanField": bf.SFVI(global_guide=bf.MeanField(), conditioned=False),
    "PVI": bf.PVI(),
}
HEADER = [
    "| problem | guide | run | mean, globals | sd ratio | mean, locals | sd ratio | ELBO |",
    "| --- | --- | --- | --- | --- | --- | --- | --- |",
]


def rows(
    name: str, problem: Problem, path: Path, draws: int, only: str | None, rounds: int | None
) -> Iterator[str]:
    federation = problem.load(path)
    slug = name.replace(" ", "_")
    reference = nuts(slug, problem.model, federation, problem.centred, draws, chains=2)
    local = {s.name for s in sites(problem.model, federation).values() if s.local}
    schedule = {"rounds": problem.rounds, "seed": 1}
    runs = [("20 %", {"clients_per_round": 0.2})]
    if rounds is not None:  # one more row a guide: minibatches, for longer
        schedule["rounds"] = rounds
        runs = []
    if problem.batch_size:
        batch = {"batch_size": problem.batch_size, "clients_per_round": 0.2}
        longer = "" if rounds is None else f", {rounds} rounds"
        runs.append((f"20 %, {problem.batch_size} rows a step{longer}", batch))
    for guide, algorithm in GUIDES.items():
        if only not in (None, guide):
            continue
        everyone = [("all clients", {})] if guide == "default" and rounds is None else []
        for run, how in runs + everyone:
            posterior = bf.fit(problem.model, federation, algorithm, **schedule, **how)
            cells = compare(posterior.sample(20_000), reference, local)
            yield " | ".join([name, guide, run, *cells, elbo(posterior)])
        if guide != "PVI" and rounds is None:
            pooled = pooled_svi(posterior, 5000, seed=1)
            cells = compare(pooled.sample(20_000), reference, local)
            yield " | ".join([name, guide, "pooled SVI", *cells, elbo(pooled)])
    if only is not None or rounds is not None:
        return
    others, client = federation.hold_out([problem.new_client])
    theta = nuts(f"{slug}_without", problem.model, others, problem.centred, draws, chains=2)
    posterior = bf.fit(problem.model, others, bf.SFVI(), clients_per_round=0.2, **schedule)
    new = posterior.personalize(client)
    theta = {k: v for k, v in theta.items() if k not in local}
    cells = compare(new.sample(20_000), given_globals(theta, client), local)
    yield " | ".join([name, "default", f"new client {problem.new_client}", *cells, ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("problems", nargs="*", default=list(PROBLEMS), metavar="problem")
    parser.add_argument(
        "--radon", type=Path, default=HERE.parent.parent / "shared/data/radon_mn.json"
    )
    parser.add_argument("--guide", choices=GUIDES, help="the rows of one guide only")
    parser.add_argument(
        "--rounds", type=int, help="only the row with minibatches, for so many rounds"
    )
    parser.add_argument("--draws", type=int, default=1500, help="NUTS draws in each of two chains")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("\n".join(HEADER))
    for name in args.problems:
        for row in rows(name, PROBLEMS[name], args.radon, args.draws, args.guide, args.rounds):
            print(f"| {row} |", flush=True)
            keep(HERE / "accuracy.md", HEADER, f"| {row} |", list(PROBLEMS), columns=3)


if __name__ == "__main__":
    main()
