"""How close a federated fit comes to pooled NUTS on the same program: the table accuracy.md.

    python experiments/accuracy.py              # all problems; radon needs its data, see --radon
    python experiments/accuracy.py grunfeld     # one of them

For every latent variable (each entry of each site, global and local) it compares the posterior mean, in
units of NUTS' posterior standard deviation, and the ratio of the standard deviations. NUTS' draws are kept
in runs/reference/. Rows "pooled SVI" are pyro.infer.SVI with the same guide on all data at once: where such
a row has the same error, the family is the limit and not the federation.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path

import numpy as np
import pyro
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from pyro.infer.reparam import LocScaleReparam

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.program import sites

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


def nuts(name: str, model, federation, centred: bool, draws: int, chains: int) -> dict[str, np.ndarray]:
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
    print(f"{name}: NUTS {time.perf_counter() - start:.0f} s, r_hat {r_hat:.3f}, ess {ess:.0f}", flush=True)
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


def compare(draws: dict[str, torch.Tensor], reference: dict[str, np.ndarray], local: set[str]) -> str:
    cells = []
    for wanted in (False, True):
        shift, ratio = [], []
        for name, ref in reference.items():
            if (name in local) != wanted:
                continue
            value = draws[name].numpy()
            sd = ref.std(0)
            shift.append(np.ravel(np.abs(value.mean(0) - ref.mean(0)) / sd))
            ratio.append(np.ravel(value.std(0) / sd))
        shift, ratio = np.concatenate(shift), np.concatenate(ratio)
        cells += [f"{shift.max():.2f}", f"{ratio.min():.2f}–{ratio.max():.2f}"]
    return " | ".join(cells)


def pooled_svi(posterior: bf.Posterior, steps: int, seed: int) -> bf.Posterior:
    """The same guide fitted by pyro.infer.SVI on all rows at once."""
    from dataclasses import replace

    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    program, federation = posterior.program, posterior.federation
    optimiser = pyro.optim.ClippedAdam({"lr": 0.05, "lrd": 0.01 ** (1 / steps), "clip_norm": 1e9})
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


PROBLEMS = {
    "eight schools": (models.eight_schools, datasets.eight_schools, None, False, 4000),
    "grunfeld": (models.varying_slope, datasets.grunfeld, 10, True, 1500),
    "radon": (models.varying_intercept, None, 5, False, 1500),
}
GUIDES = {
    "default": bf.SFVI(),
    "Flow": bf.SFVI(global_guide=bf.Flow()),
    "MeanField": bf.SFVI(global_guide=bf.MeanField(), conditioned=False),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("problems", nargs="*", default=list(PROBLEMS), metavar="problem")
    parser.add_argument("--radon", type=Path, default=HERE.parent.parent / "shared/data/radon_mn.json")
    parser.add_argument("--rounds", type=int, default=1500)
    parser.add_argument("--guides", nargs="*", default=list(GUIDES))
    parser.add_argument("--nuts-only", action="store_true")
    parser.add_argument("--no-pooled", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| problem | guide | run | mean, global | sd ratio | mean, local | sd ratio | seconds |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for problem in args.problems:
        model, load, batch_size, centred, draws = PROBLEMS[problem]
        federation = radon(args.radon) if load is None else load()
        reference = nuts(problem.replace(" ", "_"), model, federation, centred, draws, chains=2)
        if args.nuts_only:
            continue
        for guide in args.guides:
            for size in (None, batch_size) if batch_size else (None,):
                start = time.perf_counter()
                posterior = bf.fit(
                    model,
                    federation,
                    GUIDES[guide],
                    rounds=args.rounds,
                    clients_per_round=0.2,
                    batch_size=size,
                    seed=1,
                )
                seconds = time.perf_counter() - start
                local = {s.name for s in posterior.program.locals}
                cells = compare(posterior.sample(20_000), reference, local)
                rows = "all rows" if size is None else f"{size} rows"
                print(f"| {problem} | {guide} | 20 %, {rows} | {cells} | {seconds:.0f} |", flush=True)
            if not args.no_pooled:
                start = time.perf_counter()
                pooled = pooled_svi(posterior, 5000, seed=1)
                seconds = time.perf_counter() - start
                cells = compare(pooled.sample(20_000), reference, local)
                print(f"| {problem} | {guide} | pooled SVI | {cells} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
