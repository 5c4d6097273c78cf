"""How does every algorithm fare on one program? Makes matrix.md and matrix_networks.md.

    pip install 'bayesfed[benchmarks]'
    python experiments/matrix.py            # everything, about two hours
    python experiments/matrix.py Network --algorithms FedAvg FOLA

Only the algorithm changes; it has its usual settings. Hierarchies take all clients in each round, and as many rounds as
the stopping rule says, 500 at most; 200 where there is none. The Gaussian process takes 200, networks 20 in minibatches
of 10 rows. "refused" stands where an algorithm lacks what it needs of a model, with the sentence that a user gets.
Three hierarchies are in no example: 12 hospitals with one binomial row each, growth curves of 30 animals in days and
grams, falls in 15 wards.

Hierarchies are compared with pooled NUTS on the same program, for all entries of all latent variables: the largest
shift of a posterior mean in NUTS' standard deviations, and the range of the ratios of standard deviations. A point
estimate has no standard deviation: its cell says "point". What a point estimate converges to is not NUTS' mean. So
"own" is the distance from the optimum of the algorithm's own objective, which own_optima.py computes without the
package's algorithms, in the same unit: NUTS' standard deviations. It is of those variables that the algorithm moves
towards an objective, where that has a finite optimum (FedAvg's clients are fine-tuned in a number of steps; under
FedPer the log rate of a client whose counts are all 0 goes on falling), and of the centre of FedBE's ensemble, whose
spread is that of the clients' copies and no posterior's. A distance beyond 1000 says "diverged". The model of
`pyro.param` is compared with its maximum marginal likelihood and the clients' exact posteriors there, both in closed
form. Networks and the Gaussian process are judged by test rows: accuracy % / NLL / calibration error of digits; root
mean square error over the targets' standard deviation / NLL of polynomials.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import runner
import torch
from distances import cells, moments
from problems import thinned
from torch import Tensor
from torch.distributions import constraints

import bayesfed as bf
from bayesfed import datasets, metrics, models, simulations
from bayesfed.algorithms import METHODS
from tests import scenarios

ALGORITHMS: dict[str, Callable[[], Any]] = {
    name: METHODS[name]
    for name in ("SFVI", "SFVIAvg", "PVI", "FedABML", "PFedVEM", "FOLA", "CAFeMe", "PACPFL")
} | METHODS
COLUMNS = (
    "model | algorithm | own: globals | own: locals | globals: shift | sd ratio | locals: shift | sd ratio | "
    "rounds | seconds"
)
MANY = 100_000
"""Draws by which a fit's means are compared with its own optimum: of 4000, the error is up to 0.09 sd itself."""
ABSURD = 1000.0
"""Standard deviations beyond which a fit counts as diverged."""
NETWORKS = "model | algorithm | test rows | seconds"


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
    """Return 12 clients with 5 to 16 rows each, drawn from the model."""
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


# -- references ------------------------------------------------------------------------------------


def exact(federation: bf.Federation) -> tuple[dict[str, Tensor], dict[str, np.ndarray]]:
    """Return the θ of `point_globals` with the largest marginal likelihood, and 4000 draws of alpha given it.

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


def against_nuts(posterior: bf.Posterior, name: str, algorithm: str) -> list[str]:
    """Return the cells of a hierarchy, from draws of pooled NUTS.

    Raises:
        FloatingPointError: draws are not finite.
    """
    from pooled_nuts import nuts

    slug, case = "matrix_" + name.replace(" ", "_"), CASES[name]
    draws = posterior.sample(4000)
    if not all(value.isfinite().all() for value in draws.values()):
        raise FloatingPointError("draws that are not finite")
    local = {site.name for site in posterior.program.locals}
    reference = nuts(slug, case.model(), case.data())
    if algorithm == "Pooled":  # its single client is none of the reference's
        reference = {name: value for name, value in reference.items() if name not in local}
    found = against_own_optimum(case, posterior, draws, reference, local)
    return [_shown(cell) for cell in [*found, *cells(draws, reference, local)]]


def at_centre(posterior: bf.Posterior) -> dict[str, Tensor]:
    """Return draws of a Normal q(θ) that has no spread."""
    scale = torch.full_like(posterior.params["global.log_scale"], -20.0)
    return replace(posterior, params=posterior.params | {"global.log_scale": scale}).sample(2)


def against_own_optimum(
    case: Case, posterior: bf.Posterior, draws: Any, reference: Any, local: set[str]
) -> list[str]:
    """Return the distances of globals and of locals from the optimum of the algorithm's own objective."""
    from own_optima import hierarchy_of, own_optimum

    if posterior.correction is not None:
        return ["NUTS", "NUTS"]
    name = posterior.algorithm.name
    drawn = at_centre(posterior) if name == "FedBE" else posterior.sample(MANY)
    fitted = {n: v.double().mean(0) for n, v in drawn.items() if n in draws}
    torch.set_default_dtype(torch.float64)
    try:
        hierarchy = hierarchy_of(case.model(), case.data(), posterior)
        optimum = own_optimum(name, hierarchy, fitted)
    except ValueError:  # variables that it does not know
        return ["", ""]
    finally:
        torch.set_default_dtype(torch.float32)
    if optimum is None:
        return ["NUTS", "NUTS"]
    made = []
    for wanted in (False, True):
        names = [name for name in optimum if (name in local) == wanted]
        truth = moments(reference, names)
        own = np.concatenate([optimum[name].reshape(-1) for name in names] or [[]])
        mean = np.concatenate([fitted[name].numpy().reshape(-1) for name in names] or [[]])
        varies = truth[1] > 1e-6
        made.append(
            f"{np.nanmax((np.abs(mean - own) / truth[1])[varies]):.2f}" if varies.any() else ""
        )
    return made


def _shown(cell: str) -> str:
    """Return a cell, or "diverged" where it is a distance that is absurd."""
    try:
        return cell if float(cell) < ABSURD else "diverged"
    except ValueError:
        return cell


def against_exact(posterior: bf.Posterior) -> list[str]:
    """Return the cells of the model of `pyro.param`; θ is compared in its own units, as the reference has no width."""
    theta, reference = exact(posterior.federation)
    drawn = posterior.sample(4000)
    far = 0.0
    for name, value in theta.items():
        if name in drawn:  # an algorithm with a distribution over parameters
            found = drawn[name].double().mean(0)
        else:
            over = posterior.program.constraints[name]
            found = torch.distributions.transform_to(over)(posterior.params[name].double())
        far = max(far, float((found - value).abs().max()))
    return ["", "", f"{far:.2f} (in its units)", "point", *cells(drawn, reference, {"alpha"})[2:]]


def digits_cell(posterior: bf.Posterior, test: bf.Federation) -> str:
    """Return accuracy % / NLL / calibration error over all test rows."""
    (site,) = posterior.program.observed
    probabilities = posterior.probabilities(test, 50)[site.name]
    overall = metrics.classification(probabilities, test["y"], test.owner, test.names).overall
    return f"{100 * overall['accuracy']:.1f} / {overall['nll']:.3f} / {overall['ece']:.3f}"


def process_cell(posterior: bf.Posterior, test: bf.Federation) -> str:
    """Return RMSE over the targets' standard deviation / NLL over all test rows."""
    mixture = posterior.predictive(test)
    y = test["y"]
    rsmse = float((mixture.mean - y).square().mean().sqrt() / y.std())
    return f"{rsmse:.3f} / {-float(mixture.log_prob(y).mean()):.3f}"


# -- the table -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A model, its data and its schedule."""

    model: Callable[[], Any]
    data: Callable[[], Any]
    rounds: int
    batch_size: int | None = None
    kind: str = "hierarchy"


CASES = {
    "varying_intercept": Case(lambda: models.varying_intercept, datasets.grunfeld, 200),
    "varying_slope": Case(lambda: models.varying_slope, datasets.grunfeld, 200),
    "hierarchical_logistic": Case(
        lambda: models.hierarchical_logistic, lambda: thinned(datasets.china_smoking(), 200), 200
    ),
    "hierarchical_count": Case(
        lambda: models.hierarchical_count, lambda: thinned(datasets.randhie(), 200), 200
    ),
    "pyro.param globals": Case(lambda: point_globals, datasets.grunfeld, 200, kind="exact"),
    "simplex and correlation": Case(lambda: correlated, correlated_data, 200),
    "hospitals": Case(lambda: scenarios.deaths, scenarios.hospitals, 200),
    "growth curves": Case(lambda: scenarios.growth, scenarios.curves, 200),
    "falls": Case(lambda: scenarios.falls, scenarios.wards, 200),
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


def fit(case: Case, data: bf.Federation, algorithm: bf.Algorithm) -> bf.Posterior:
    """Fit until the stopping rule ends the run; for as many rounds as the case says where there is none."""
    options: dict[str, Any] = {"seed": 1, "progress": False}
    options |= {"batch_size": case.batch_size, "execution": bf.Execution(compile=False)}
    rounds = None if case.kind in ("hierarchy", "exact") else case.rounds
    try:
        return bf.fit(case.model(), data, algorithm, rounds=rounds, **options)
    except ValueError as error:
        if not str(error).startswith("rounds: "):
            raise
    return bf.fit(case.model(), data, algorithm, rounds=case.rounds, **options)


def measure(model: str, algorithm: str) -> list[str]:
    """Fit a model by an algorithm and compare it with the reference."""
    case, start = CASES[model], time.perf_counter()
    given = case.data()
    train, test = given if isinstance(given, tuple) else (given, None)
    try:
        if algorithm == "Pooled":
            train, test = train.pool(), None if test is None else test.pool()
        posterior = fit(case, train, ALGORITHMS[algorithm]())
        seconds = f"{time.perf_counter() - start:.0f}"
        if case.kind == "hierarchy":
            found = against_nuts(posterior, model, algorithm)
        elif case.kind == "exact":
            found = against_exact(posterior)
        else:
            found = [(digits_cell if case.kind == "network" else process_cell)(posterior, test)]
    except (ValueError, TypeError, NotImplementedError, ArithmeticError) as error:
        how = "failed" if isinstance(error, ArithmeticError) else "refused"
        return [f"{how}: {error}", *[""] * (len(COLUMNS.split(" | ")) - 3 if test is None else 1)]
    rounds = [str(len(posterior.history["elbo"]))] if test is None else []
    return [*found, *rounds, seconds]


def main() -> None:
    given = runner.arguments(__doc__, jobs=2, algorithms=list(ALGORITHMS))
    path = runner.ROOT / "experiments/matrix_networks.md"
    small = [name for name, case in CASES.items() if case.kind in ("hierarchy", "exact")]
    large = [name for name in CASES if name not in small]
    for columns, names, file in ((COLUMNS, small, None), (NETWORKS, large, path)):
        rows = [(name, algorithm) for name in names for algorithm in given.algorithms]
        runner.table(columns, rows, measure, given, path=file)


if __name__ == "__main__":
    main()
