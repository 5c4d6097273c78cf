"""One program, every algorithm: makes matrix.md and matrix_networks.md.

    pip install 'bayesfed[benchmarks]'
    python experiments/matrix.py            # everything, about two hours; rows are replaced as they come
    python experiments/matrix.py --models Network --algorithms FedAvg FOLA

The algorithm is the one argument that changes; its settings are those it comes with. Hierarchies take 200 rounds of all
clients (FOLA, whose rounds are Newton's, 20), the Gaussian process 200, networks 20 rounds in minibatches of 10 rows.
"refused" stands where an algorithm lacks what it needs of a model, with the sentence that a user gets.

Hierarchies are compared with pooled NUTS on the same program, for every entry of every site: the largest shift of a
posterior mean in NUTS' standard deviations, and the range of the ratios of standard deviations, over global and over
local variables. A point has no standard deviation: its cell says "point". The model of `pyro.param` is compared with
its maximum marginal likelihood and the clients' exact posteriors there, both in closed form. Networks and the Gaussian
process are judged by test rows: accuracy % / NLL / calibration error of digits; root mean square error over the
targets' standard deviation / NLL of polynomials.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pooled_nuts import nuts
from problems import thinned
from tables import done, keep
from torch import Tensor
from torch.distributions import constraints

import bayesfed as bf
from bayesfed import datasets, metrics, models, simulations
from bayesfed.algorithms import FAMILY

HERE = Path(__file__).parent
ALGORITHMS: dict[str, Callable[[], Any]] = {
    name: getattr(bf, name)
    for name in ("SFVI", "SFVIAvg", "PVI", "FedABML", "PFedVEM", "FOLA", "CAFeMe", "PACPFL")
} | FAMILY
HEADER = [
    "| model | algorithm | globals: shift | sd ratio | locals: shift | sd ratio | seconds |",
    "| --- | --- | --- | --- | --- | --- | --- |",
]
NETWORKS = [
    "| model | algorithm | test rows | seconds |",
    "| --- | --- | --- | --- |",
]


# -- models that the package does not ship ---------------------------------------------------------


def point_globals(federation: Any) -> None:
    """`varying_intercept` with `pyro.param` in place of random globals."""
    mu = pyro.param("mu", torch.tensor(0.0))
    tau = pyro.param("tau", torch.tensor(0.7), constraint=constraints.positive)
    beta = pyro.param("beta", torch.zeros(federation.event_shape("x")), event_dim=1)
    sigma = pyro.param("sigma", torch.tensor(0.7), constraint=constraints.positive)
    with federation.clients():
        alpha = pyro.sample("alpha", dist.Normal(mu, tau))
        with federation.observations() as obs:
            mean = alpha + (beta * obs["x"]).sum(-1)
            pyro.sample("y", dist.Normal(mean, sigma), obs=obs.get("y"))


def correlated(federation: Any) -> None:
    """Correlated intercepts and slopes (a positive-definite global), and shares of three kinds of rows (a simplex)."""
    shares = pyro.sample("shares", dist.Dirichlet(torch.ones(3)))
    root = pyro.sample("root", dist.LKJCholesky(2, 2.0))
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    tau = pyro.sample("tau", dist.HalfNormal(1.0).expand([2]).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with federation.clients():
        w = pyro.sample("w", dist.MultivariateNormal(mu, scale_tril=tau[..., None] * root))
        with federation.observations() as obs:
            pyro.sample("kind", dist.Categorical(shares), obs=obs.get("kind"))
            mean = w[..., 0] + w[..., 1] * obs["x"]
            pyro.sample("y", dist.Normal(mean, sigma), obs=obs.get("y"))


def correlated_data() -> bf.Federation:
    """12 clients with 5 to 16 rows each, drawn from the model."""
    generator = np.random.default_rng(0)
    clients = {}
    for i in range(12):
        n = 5 + i
        a, b = generator.multivariate_normal([0.5, -1.0], [[0.64, -0.36], [-0.36, 0.36]])
        x = generator.normal(size=n)
        clients[f"client {i}"] = {
            "x": x,
            "y": a + b * x + 0.5 * generator.normal(size=n),
            "kind": torch.as_tensor(generator.choice(3, size=n, p=[0.5, 0.3, 0.2])),
        }
    return bf.Federation.from_arrays(clients)


# -- what a fit is compared with -------------------------------------------------------------------


def exact(federation: bf.Federation) -> tuple[dict[str, Tensor], dict[str, np.ndarray]]:
    """θ of `point_globals` at its maximum marginal likelihood, and 4000 draws of alpha given it, in closed form.

    Client i's rows are Normal with mean mu + x beta and covariance sigma² I + tau² 1 1ᵀ.
    """
    theta = torch.zeros(4 + 1, dtype=torch.float64)  # mu, log tau, log sigma, beta (2)
    data = []
    for name in federation.names:
        one = federation.select([name])
        data.append((one["x"].double(), one["y"].double()))

    def loss() -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for x, y in data:
            ones = torch.ones(len(y), 1, dtype=torch.float64)
            cov = theta[2].exp() ** 2 * torch.eye(len(y)) + theta[1].exp() ** 2 * ones @ ones.T
            mean = theta[0] + x @ theta[3:]
            total = total - dist.MultivariateNormal(mean, cov).log_prob(y)
        return total

    theta.requires_grad_()
    optimiser = torch.optim.LBFGS([theta], max_iter=500, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        value = loss()
        value.backward()
        return value

    optimiser.step(closure)
    theta = theta.detach()
    mu, tau, sigma, beta = theta[0], theta[1].exp(), theta[2].exp(), theta[3:]
    means, scales = [], []
    for x, y in data:
        precision = tau**-2 + len(y) * sigma**-2
        means.append((mu * tau**-2 + (y - x @ beta).sum() * sigma**-2) / precision)
        scales.append(precision**-0.5)
    noise = torch.randn(
        4000, len(data), dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    alpha = torch.stack(means) + torch.stack(scales) * noise
    found = {"mu": mu, "tau": tau, "beta": beta, "sigma": sigma}
    return found, {"alpha": alpha[..., None].squeeze(-1).numpy()}


def spread(draws: np.ndarray, reference: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Shifts of the means in the reference's sds, and ratios of sds, of every entry that varies."""
    draws, reference = draws.astype(np.float64), reference.astype(np.float64)
    sd = np.ravel(reference.std(0))
    free = sd > 1e-6  # not the corner of a Cholesky factor
    shift = np.ravel(np.abs(draws.mean(0) - reference.mean(0)))
    return shift[free] / sd[free], np.ravel(draws.std(0))[free] / sd[free]


def cells(pairs: list[tuple[np.ndarray, np.ndarray]]) -> list[str]:
    """Largest shift and range of ratios."""
    if not pairs:
        return ["", ""]
    shift, ratio = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
    if ratio.max() < 1e-3:
        return [f"{shift.max():.2f}", "point"]
    return [f"{shift.max():.2f}", f"{ratio.min():.2f}–{ratio.max():.2f}"]


def against(posterior: bf.Posterior, reference: Mapping[str, np.ndarray]) -> list[str]:
    """The cells of a hierarchy."""
    draws = posterior.sample(4000)
    if not all(value.isfinite().all() for value in draws.values()):
        raise FloatingPointError("draws that are not finite")
    local = {site.name for site in posterior.program.locals}
    parts: dict[bool, list[Any]] = {False: [], True: []}
    for name, ref in reference.items():
        value = draws[name].numpy()
        parts[name in local].append(spread(value, ref.reshape(len(ref), *value.shape[1:])))
    return [*cells(parts[False]), *cells(parts[True])]


def against_exact(posterior: bf.Posterior) -> list[str]:
    """The cells of the model of `pyro.param`: distances of θ in its own units, no reference having a width for it."""
    theta, reference = exact(posterior.federation)
    drawn = posterior.sample(4000)
    found = {}
    for name in theta:
        if name in drawn:  # an algorithm with a distribution over parameters
            found[name] = drawn[name].double().mean(0)
        else:
            over = posterior.program.constraints[name]
            found[name] = torch.distributions.transform_to(over)(posterior.params[name].double())
    far = max(float((found[name] - theta[name]).abs().max()) for name in theta)
    return [
        f"{far:.2f} (in its units)",
        "point",
        *cells([spread(drawn["alpha"].numpy(), reference["alpha"])]),
    ]


# -- the table -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A model, its data and schedule."""

    model: Callable[[], Any]
    data: Callable[[], Any]
    rounds: int
    batch_size: int | None = None
    kind: str = "hierarchy"


CASES = {
    "varying_intercept": Case(lambda: models.varying_intercept, datasets.grunfeld, 200),
    "varying_slope": Case(lambda: models.varying_slope, datasets.grunfeld, 200),
    "hierarchical_logistic": Case(
        lambda: models.hierarchical_logistic,
        lambda: thinned(datasets.china_smoking(), 200),
        200,
    ),
    "hierarchical_count": Case(
        lambda: models.hierarchical_count, lambda: thinned(datasets.randhie(), 200), 200
    ),
    "pyro.param globals": Case(lambda: point_globals, datasets.grunfeld, 200, kind="exact"),
    "simplex and correlation": Case(lambda: correlated, correlated_data, 200),
    "Network": Case(
        lambda: models.Network(models.mlp(64, 32, 10), spread="learnt", scale=0.1, hyper_scale=0.3),
        lambda: datasets.digits(clients=8),
        20,
        10,
        kind="network",
    ),
    "Modulated": Case(
        lambda: models.Modulated(models.mlp(64, 32, 10), models.mlp(64, 16), context=16),
        lambda: datasets.digits(clients=8),
        20,
        10,
        kind="network",
    ),
    "GaussianProcess": Case(
        lambda: models.GaussianProcess(
            models.mlp(1, 16, 16, 1, activation=torch.nn.Tanh),
            features=models.mlp(1, 16, 16, 2, activation=torch.nn.Tanh),
        ),
        lambda: simulations.polynomials(clients=12, seed=0),
        200,
        kind="process",
    ),
}


def reference(name: str, case: Case) -> dict[str, np.ndarray]:
    """Draws of pooled NUTS, kept in runs/reference."""
    slug = "matrix_" + name.replace(" ", "_")
    return nuts(slug, case.model(), case.data())


def row(model: str, algorithm: str) -> str:
    """One row, without its bars."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    case, start = CASES[model], time.perf_counter()
    given = case.data()
    train, test = given if isinstance(given, tuple) else (given, None)
    wide = 5 if case.kind in ("hierarchy", "exact") else 2
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            posterior = bf.fit(
                case.model(),
                train,
                ALGORITHMS[algorithm](),
                rounds=20 if algorithm == "FOLA" and case.kind != "network" else case.rounds,
                batch_size=case.batch_size,
                seed=1,
                progress=False,
                execution=bf.Execution(compile=False),
            )
            seconds = f"{time.perf_counter() - start:.0f}"
            if case.kind == "hierarchy":
                found = against(posterior, reference(model, case))
            elif case.kind == "exact":
                found = against_exact(posterior)
            elif case.kind == "network":
                found = [digits_cell(posterior, test)]
            else:
                found = [process_cell(posterior, test)]
    except (ValueError, TypeError, NotImplementedError) as error:
        return " | ".join([model, algorithm, f"refused: {error}", *[""] * (wide - 1)])
    except ArithmeticError as error:
        return " | ".join([model, algorithm, f"failed: {error}", *[""] * (wide - 1)])
    return " | ".join([model, algorithm, *found, seconds])


def digits_cell(posterior: bf.Posterior, test: bf.Federation) -> str:
    """Accuracy % / NLL / calibration error over all test rows."""
    (site,) = posterior.program.observed
    probabilities = posterior.probabilities(test, 50)[site.name]
    overall = metrics.classification(probabilities, test["y"], test.owner, test.names).overall
    return f"{100 * overall['accuracy']:.1f} / {overall['nll']:.3f} / {overall['ece']:.3f}"


def process_cell(posterior: bf.Posterior, test: bf.Federation) -> str:
    """RMSE over the targets' standard deviation / NLL over all test rows."""
    mixture = posterior.predictive(test)
    y = test["y"]
    rsmse = float((mixture.mean - y).square().mean().sqrt() / y.std())
    return f"{rsmse:.3f} / {-float(mixture.log_prob(y).mean()):.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--algorithms", nargs="*", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="take rows that are stored")
    args = parser.parse_args()
    for model in args.models:
        if CASES[model].kind == "hierarchy":
            reference(model, CASES[model])
    calls = [(m, a) for m in args.models for a in args.algorithms]
    for (model, _), line in done(row, calls, args.jobs, args.resume):
        print(f"| {line} |", flush=True)
        small = CASES[model].kind in ("hierarchy", "exact")
        path, header = (
            (HERE / "matrix.md", HEADER) if small else (HERE / "matrix_networks.md", NETWORKS)
        )
        keep(path, header, f"| {line} |", list(CASES), columns=2)


if __name__ == "__main__":
    main()
