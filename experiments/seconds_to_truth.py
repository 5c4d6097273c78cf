"""How many seconds does a user wait for a posterior, beside NUTS and SVI on the pooled data? Makes seconds_to_truth.md.

    pip install 'bayesfed[benchmarks]'
    python experiments/seconds_to_truth.py          # on a machine that does nothing else, about a quarter of an hour

The problems are those of problems.py. Each of these runs in a new process:

    bayesfed      bf.fit without a number of rounds, all clients in each
    NumPyro       NUTS, one chain, 1000 + 1000, on the same model in NumPyro
    Pyro          pyro.infer.SVI with bayesfed's own program and guide, 1000 steps of 8 draws at ClippedAdam's 0.03

"cold" is the first fit of the process, imports apart; "warm" the second, with another seed. Compiled graphs of earlier
processes are not used. Beside the seconds stands the largest shift of a global variable's mean from the reference, four
long chains, in its standard deviations, and the range of the ratios of standard deviations. The error of one chain is
about 0.05.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import runner
from distances import moments, words

COLUMNS = (
    "problem | bayesfed cold | warm | rounds | distance | NumPyro cold | warm | distance "
    "| Pyro cold | warm | distance | cold ÷ NUTS | warm ÷ NUTS"
)
METHODS = ("bayesfed", "NumPyro", "Pyro")
Fit = Callable[[int], tuple[Callable[[], Any], str]]


def bayesfed(name: str, federation: Any) -> Fit:
    """Return a fit with the usual settings, which gives what makes draws, and the number of rounds."""
    from problems import PROBLEMS

    import bayesfed as bf

    def fit(seed: int) -> tuple[Callable[[], Any], str]:
        posterior = bf.fit(PROBLEMS[name].model, federation, seed=seed, progress=False)
        return lambda: posterior.sample(4000), runner.rounds_of(posterior)

    return fit


def numpyro(name: str, federation: Any) -> Fit:
    """Return one chain of NUTS; the sampler is made once, and keeps what it has compiled."""
    import jax
    from problems import PROBLEMS, pooled, sampler

    mcmc = sampler(PROBLEMS[name], 1000, 1000, 1)

    def fit(seed: int) -> tuple[Callable[[], Any], str]:
        mcmc.run(jax.random.PRNGKey(seed), *pooled(federation))
        return mcmc.get_samples, ""

    return fit


def pyro(name: str, federation: Any) -> Fit:
    """Return Pyro's own SVI with the program and guide that bayesfed has."""
    from accuracy import pooled_svi

    import bayesfed as bf

    def fit(seed: int) -> tuple[Callable[[], Any], str]:
        posterior = pooled_svi(name, federation, bf.SFVI(), 1000, seed)
        return lambda: posterior.sample(4000), ""

    return fit


def measure(name: str, method: str) -> dict[str, Any]:
    """Fit cold and warm in this process."""
    from problems import PROBLEMS, reference

    from bayesfed.elbo.sites import sites

    problem, seconds = PROBLEMS[name], []
    federation = problem.data()
    found = sites(problem.model, federation).values()
    names = [site.name for site in found if not site.observed and not site.local]
    fit = {"bayesfed": bayesfed, "NumPyro": numpyro, "Pyro": pyro}[method](name, federation)
    for seed in range(2):
        start = time.perf_counter()
        draws, rounds = fit(seed)
        seconds.append(time.perf_counter() - start)
    truth = moments(reference(name, problem, federation), names)
    return {"seconds": seconds, "distance": words(moments(draws(), names), truth), "rounds": rounds}


def cells(_: Any, found: list[dict[str, Any]]) -> list[str]:
    """Return the cells of a problem from the results of the three methods."""
    made = []
    for method, result in zip(METHODS, found, strict=True):
        made += [f"{seconds:.1f}" for seconds in result["seconds"]]
        made += [result["rounds"]] * (method == "bayesfed") + [result["distance"]]
    ratios = zip(found[0]["seconds"], found[1]["seconds"], strict=True)
    return made + [f"{ours / theirs:.2f}" for ours, theirs in ratios]


def main() -> None:
    from problems import SMALL

    given = runner.arguments(__doc__)
    rows = {name: [(name, method) for method in METHODS] for name in SMALL}
    runner.table(COLUMNS, rows, measure, given, cells, alone=True)


if __name__ == "__main__":
    main()
