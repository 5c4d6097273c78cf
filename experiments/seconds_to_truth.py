"""What a user waits for: SFVI as it comes beside NUTS and SVI on the pooled data. Makes seconds_to_truth.md.

    pip install 'bayesfed[benchmarks]'
    python experiments/seconds_to_truth.py          # on a machine that does nothing else, about a quarter of an hour

The problems are those of problems.py. For each the three take turns, in a new process each time:

    bayesfed      bf.fit without a number of rounds, all clients in each
    NumPyro       NUTS, one chain, 1000 + 1000, on the same model in NumPyro
    Pyro          pyro.infer.SVI with bayesfed's own program and guide, 1000 steps of 8 draws at ClippedAdam's 0.03

"cold" is the first fit of the process, imports apart; "warm" the second, with another seed. Compiled graphs of earlier
processes are not used. Beside the seconds stands the largest shift of a global's mean from the reference, four long
chains, in its standard deviations, and the range of the ratios of standard deviations; one chain's error is about .05.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tables import alone, grown, rounds_of

HERE = Path(__file__).parent
METHODS = ("bayesfed", "NumPyro", "Pyro")
HEADER = [
    "| problem | bayesfed cold | warm | rounds | distance | NumPyro cold | warm | distance "
    "| Pyro cold | warm | distance | cold ÷ NUTS | warm ÷ NUTS |",
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
]


def far(draws: dict[str, Any], reference: dict[str, np.ndarray]) -> str:
    """The largest shift and the range of ratios over all globals."""
    shifts, ratios = [], []
    for name, value in draws.items():
        found = np.asarray(value).reshape(len(value), -1)
        truth = reference[name].reshape(len(reference[name]), -1)
        shifts.append(np.abs(found.mean(0) - truth.mean(0)) / truth.std(0))
        ratios.append(found.std(0) / truth.std(0))
    shift, ratio = np.concatenate(shifts), np.concatenate(ratios)
    return f"{shift.max():.2f}, {ratio.min():.2f}–{ratio.max():.2f}"


def ours(problem: Any, federation: Any, seed: int, _: Any) -> tuple[Any, str]:
    """A fit as it comes; the draws of its globals, and how many rounds it took."""
    import bayesfed as bf

    posterior = bf.fit(problem.model, federation, seed=seed, progress=False)
    names = [site.name for site in posterior.program.globals]

    def draws() -> dict[str, np.ndarray]:
        found = posterior.sample(4000)
        return {name: found[name].numpy() for name in names}

    return draws, rounds_of(posterior)


def numpyro(problem: Any, federation: Any, seed: int, kept: Any) -> tuple[Any, str]:
    """One chain of NUTS; the same sampler again, which keeps what it has compiled."""
    import jax
    from problems import pooled, sampler

    mcmc = kept.setdefault("sampler", sampler(problem, 1000, 1000, 1))
    mcmc.run(jax.random.PRNGKey(seed), *pooled(federation))
    found = {name: np.asarray(value) for name, value in mcmc.get_samples().items()}
    return lambda: {name: found[name] for name in kept["globals"]}, ""


def pyro(problem: Any, federation: Any, seed: int, _: Any) -> tuple[Any, str]:
    """Pyro's own SVI with the program and guide of bayesfed's."""
    from accuracy import pooled_svi

    import bayesfed as bf

    run = bf.start(problem.model, federation, rounds=1, execution=bf.Execution(compile=False))
    posterior = pooled_svi(bf.finish(run), 1000, seed)

    def draws() -> dict[str, np.ndarray]:
        drawn = posterior.sample(4000)
        return {site.name: drawn[site.name].numpy() for site in run.program.globals}

    return draws, ""


def one(name: str, method: str, data: Path) -> dict[str, Any]:
    """Cold and warm in this process."""
    warnings.simplefilter("ignore")
    from problems import PROBLEMS, reference

    from bayesfed.elbo.sites import sites

    problem = PROBLEMS[name]
    federation = problem.data(data)
    latent = [s for s in sites(problem.model, federation).values() if not s.observed]
    kept: dict[str, Any] = {"globals": [site.name for site in latent if not site.local]}
    seconds = []
    for seed in range(2):
        start = time.perf_counter()
        draws, note = {"bayesfed": ours, "NumPyro": numpyro, "Pyro": pyro}[method](
            problem, federation, seed, kept
        )
        seconds.append(time.perf_counter() - start)
    distance = far(draws(), reference(name, problem, federation))
    return {"cold": seconds[0], "warm": seconds[1], "distance": distance, "note": note}


def row(name: str, data: Path) -> str:
    """The cells of a problem."""
    found = {
        method: alone(__file__, name, "--method", method, "--radon", str(data))
        for method in METHODS
    }
    cells = [name]
    for method, value in found.items():
        cells += [f"{value['cold']:.1f}", f"{value['warm']:.1f}"]
        cells += [value["note"]] if method == "bayesfed" else []
        cells.append(value["distance"])
    ours, theirs = found["bayesfed"], found["NumPyro"]
    cells += [f"{ours[when] / theirs[when]:.2f}" for when in ("cold", "warm")]
    return " | ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("problems", nargs="*", metavar="problem")
    parser.add_argument("--method", choices=METHODS, help=argparse.SUPPRESS)
    parser.add_argument(
        "--radon", type=Path, default=HERE.parent.parent / "shared/data/radon_mn.json"
    )
    args = parser.parse_args()
    if args.method:
        torch.manual_seed(0)
        print(json.dumps(one(args.problems[0], args.method, args.radon)))
        return
    from problems import PROBLEMS

    small = [name for name in PROBLEMS if name != "10,000 clients"]
    found = (f"| {row(name, args.radon)} |" for name in args.problems or small)
    grown(HERE / "seconds_to_truth.md", HEADER, found, small)


if __name__ == "__main__":
    main()
