"""How many seconds does a user wait for a posterior, beside other tools on the pooled data? Makes seconds_to_truth.md.

    pip install 'bayesfed[benchmarks]'
    apt-get install r-base-core r-cran-glmmtmb
    python experiments/seconds_to_truth.py          # on a machine that does nothing else, about a quarter of an hour

The problems are those of problems.py. Each of these runs in a new process:

    bayesfed      bf.fit without a number of rounds, all clients in each
    NumPyro       NUTS, one chain, 1000 + 1000, on the same model in NumPyro
    four chains   the same with four chains, one after the other, in the first fit of a process
    nutpie        its NUTS, one chain, 1000 + 1000, on the log density of the model in NumPyro and its gradient by JAX
    glmmTMB       maximum likelihood, where the model has a formula: no posterior, and no priors
    Pyro          pyro.infer.SVI with bayesfed's own program and guide, 1000 steps of 8 draws at ClippedAdam's 0.03

"cold" is the first fit of the process, imports apart, but for those that bayesfed makes when it fits, half a second;
"warm" is the second, with another seed. The time of glmmTMB leaves out that of R and its packages. Compiled graphs of
earlier processes are not used. Beside the seconds stands the largest shift of a global variable's mean from the
reference, four long chains, in its standard deviations, and the range of the ratios of standard deviations. The
distances of NumPyro's and nutpie's single chains show how large a Monte Carlo error is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pandas as pd
import runner
from distances import moments, words
from in_r import run_r

COLUMNS = (
    "problem | bayesfed cold | warm | rounds | distance | NumPyro cold | warm | distance | four chains "
    "| nutpie cold | warm | distance | glmmTMB | Pyro cold | warm | distance | cold ÷ NumPyro | warm ÷ NumPyro"
)
METHODS = ("bayesfed", "NumPyro", "four chains", "nutpie", "glmmTMB", "Pyro")
FAMILIES = {
    "grunfeld": ("gaussian", "(1 + x || client)"),
    "correlated slopes": ("gaussian", "(1 + x0 | client)"),
    "radon": ("gaussian", "(1 | client)"),
    "count": ("poisson", "(1 | client)"),
    "logistic": ("binomial", "(1 + x || client)"),
    "negative binomial": ("nbinom2", "offset(log(exposure)) + (1 | client)"),
}
"""glmmTMB's family and what follows the coefficients in its formula, where the problem has them."""
R = """
arguments <- commandArgs(TRUE)
suppressMessages(library(glmmTMB))
d <- read.csv(arguments[1])
d$client <- factor(d$client)
cat(system.time(glmmTMB(as.formula(arguments[2]), d, family = arguments[3]))[["elapsed"]])
"""
Fit = Callable[[int], tuple[Callable[[], Any], str]]


def bayesfed(name: str, federation: Any) -> Fit:
    """Return a fit with the usual settings, which gives what makes draws, and the number of rounds."""
    from problems import PROBLEMS

    import bayesfed as bf

    def fit(seed: int) -> tuple[Callable[[], Any], str]:
        posterior = bf.fit(PROBLEMS[name].model, federation, seed=seed, progress=False)
        return lambda: posterior.sample(4000), runner.rounds_of(posterior)

    return fit


def numpyro(name: str, federation: Any, chains: int = 1) -> Fit:
    """Return chains of NUTS; the sampler is made once, and keeps what it has compiled."""
    import jax
    from problems import PROBLEMS, pooled, sampler

    mcmc = sampler(PROBLEMS[name], 1000, 1000, chains)

    def fit(seed: int) -> tuple[Callable[[], Any], str]:
        mcmc.run(jax.random.PRNGKey(seed), *pooled(federation))
        return mcmc.get_samples, ""

    return fit


def nutpie(name: str, federation: Any) -> Fit:
    """Return one chain of nutpie's NUTS; the density is compiled by JAX, once."""
    import jax
    from in_nutpie import compile_density, sample_chain
    from numpyro.infer.util import initialize_model
    from problems import PROBLEMS, pooled, sampler

    jax.config.update("jax_enable_x64", True)
    rows, model = pooled(federation), sampler(PROBLEMS[name], 1, 1, 1).sampler.model
    start, potential, constrained, _ = initialize_model(
        jax.random.PRNGKey(0), model, model_args=rows, dynamic_args=True
    )
    compiled, unravel = compile_density(potential(*rows), start.z)

    def fit(seed: int) -> tuple[Callable[[], Any], str]:
        x = sample_chain(compiled, seed)
        return lambda: jax.vmap(lambda one: constrained(*rows)(unravel(one)))(x), ""

    return fit


def glmmtmb(name: str, federation: Any) -> float:
    """Return the seconds of a fit by glmmTMB."""
    family, rest = FAMILIES[name]
    columns = {"client": federation.owner.numpy()}
    columns |= {n: federation[n].numpy() for n in federation.fields if n != "x"}
    x = federation["x"].reshape(len(federation.owner), -1).numpy()
    names = [f"x{i}" for i in range(x.shape[1])]
    columns |= dict(zip(names, x.T, strict=True))
    slopes = " + ".join(f"(0 + {one} | client)" for one in names)
    rest = rest.replace("(1 + x || client)", f"(1 | client) + {slopes}")
    wanted = f"y ~ {' + '.join(names)} + {rest}"
    return float(run_r(R, pd.DataFrame(columns), [wanted, family]))


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
    if method == "glmmTMB":
        return {"seconds": [glmmtmb(name, federation)] if name in FAMILIES else []}
    fits = {"bayesfed": bayesfed, "NumPyro": numpyro, "nutpie": nutpie, "Pyro": pyro}
    if method == "four chains":
        fit, fitted = numpyro(name, federation, 4), 1
    else:
        fit, fitted = fits[method](name, federation), 2
    for seed in range(fitted):
        start = time.perf_counter()
        draws, rounds = fit(seed)
        seconds.append(time.perf_counter() - start)
    truth = moments(reference(name, problem, federation), names)
    return {"seconds": seconds, "distance": words(moments(draws(), names), truth), "rounds": rounds}


def cells(_: Any, found: list[dict[str, Any]]) -> list[str]:
    """Return the cells of a problem from the results of the methods."""
    made = []
    for method, result in zip(METHODS, found, strict=True):
        seconds = [f"{one:.1f}" for one in result["seconds"]]
        if method in ("four chains", "glmmTMB"):
            made += seconds or [""]
        else:
            made += [*seconds, *[result["rounds"]] * (method == "bayesfed"), result["distance"]]
    ratios = zip(found[0]["seconds"], found[1]["seconds"], strict=True)
    return made + [f"{ours / theirs:.2f}" for ours, theirs in ratios]


def main() -> None:
    from problems import PROBLEMS

    given = runner.arguments(__doc__)
    rows = {name: [(name, method) for method in METHODS] for name in PROBLEMS}
    runner.table(COLUMNS, rows, measure, given, cells, alone=True)


if __name__ == "__main__":
    main()
