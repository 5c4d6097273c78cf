"""How close are fits where clients have many local variables that depend on each other? Makes many_locals.md.

    python experiments/many_locals.py                  # about ten minutes
    python experiments/many_locals.py "AR, sites"      # some rows
    python experiments/many_locals.py --seconds 600    # give up a fit after ten minutes of CPU time

Each client has a path of T numbers: a random walk, an autoregression (AR) of order 1, a Gaussian process, or the
effects of wards within hospitals. It is written in one of the ways that people write it: centred, one site for each
number; "noise", standard Normal numbers and what is computed from them; "precision", a multivariate Normal with a
precision matrix; "covariance", one with a covariance matrix. Rows are a number of the path with Normal noise, about
one in five is missing; or they are Poisson: counts on a random walk, computed from noise, from a level of the client's
own, and on a Gaussian process given by its covariance.

The reference integrates the paths out: the marginal posterior of θ, of two to five numbers, by importance sampling in
double precision, with as many draws as give an effective sample size of 4,000. The proposal is a Student t distribution
of θ itself, not of logarithms, in which a standard deviation that may be 0 has a long tail; a first one, around the
mode in unconstrained coordinates, gives its mean and covariance. A path given θ is Normal. For Poisson rows the
reference is a chain of 10,000 draws of NumPyro's NUTS, of standard Normal noise in place of paths.
The table has the largest shift of a posterior mean, in the reference's standard deviations, and the range of the
ratios of standard deviations, of the globals and of all numbers of all clients' paths. Seconds are CPU time of one
thread, fit and correction. Shifts and ratios have Monte Carlo errors of about 0.03.

Not measured: counts with dense precisions of 100 numbers and more, whose fits take minutes.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyro.distributions as dist
import runner
import torch
from distances import distance, moments
from paths import CLIENTS, JITTER, Problem, Theta, column, problems
from scipy.optimize import minimize
from torch import Tensor
from torch.distributions import biject_to

import bayesfed as bf

COLUMNS = "program | numbers a client | globals: shift | sd ratio | paths: shift | sd ratio | rounds | k-hat | CPU s"
DRAWS, EFFECTIVE, MOST, NEAR = 2000, 4000, 100_000, 1000
"""Draws of θ in the reference that are made at a time, their least effective number, and the most draws; draws of θ
given which paths are compared."""


# -- the reference ---------------------------------------------------------------------------------


def exact(
    problem: Problem, clients: Mapping[str, Mapping[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """Draws of θ, and means and standard deviations of the paths as two draws that have them."""
    t = torch.as_tensor(next(iter(clients.values()))["t"]).long()
    y = torch.stack([torch.as_tensor(rows["y"]) for rows in clients.values()], -1)
    supports = list(problem.priors.values())
    transforms = [biject_to(prior.support) for prior in supports]

    def natural(u: Tensor) -> Tensor:
        """θ ``(S, D)`` of unconstrained values."""
        return torch.stack([transform(u[:, i]) for i, transform in enumerate(transforms)], 1)

    def named(x: Tensor) -> dict[str, Tensor]:
        return {name: x[:, i] for i, name in enumerate(problem.priors)}

    def parts(x: Tensor) -> tuple[Theta, Tensor, Tensor, Tensor]:
        at = named(x)
        C = problem.covariance(at, problem.size)
        V = C[:, t][..., t] + torch.diag_embed(column(at["sigma"] ** 2).expand(-1, len(t)))
        return at, C, *torch.linalg.cholesky_ex(V)

    def log_density(x: Tensor) -> Tensor:
        """The log density of θ at values in its support."""
        at, _, L, failed = parts(x)
        gap = y - column(column(at["mu"])) if "mu" in at else y.expand(len(x), *y.shape)
        white = torch.linalg.solve_triangular(L, gap, upper=False)
        found = -white.square().sum((-2, -1)) / 2
        found = found - CLIENTS * L.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        found = found + sum(prior.log_prob(at[name]) for name, prior in problem.priors.items())
        return found.masked_fill(failed > 0, -torch.inf)

    def of_unconstrained(u: Tensor) -> Tensor:
        x = natural(u)
        volume = (f.log_abs_det_jacobian(u[:, i], x[:, i]) for i, f in enumerate(transforms))
        return log_density(x) + sum(volume)

    def loss(u: np.ndarray) -> tuple[float, np.ndarray]:
        leaf = torch.as_tensor(u)[None].requires_grad_()
        value = -of_unconstrained(leaf).sum()
        return float(value.detach()), torch.autograd.grad(value, leaf)[0][0].numpy()

    def in_support(x: Tensor) -> Tensor:
        inside = torch.stack([p.support.check(x[:, i]) for i, p in enumerate(supports)])
        return inside.all(0)

    def blocks(density: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return torch.cat([density(some) for some in x.split(20)])

    def student(mean: Tensor, root: Tensor, scale: float) -> Any:
        freedom = torch.tensor(4.0, dtype=torch.float64)
        return dist.MultivariateStudentT(freedom, mean, scale * root)

    truth = torch.tensor([[problem.truth[n] for n in problem.priors]], dtype=torch.float64)
    start = torch.cat([f.inv(truth[:, i]) for i, f in enumerate(transforms)])
    found = minimize(loss, start.numpy(), jac=True, method="BFGS")
    mode = torch.as_tensor(found.x)
    hessian = torch.autograd.functional.hessian(lambda u: -of_unconstrained(u[None]).sum(), mode)
    torch.manual_seed(0)
    proposal = student(mode, torch.linalg.cholesky(hessian.inverse()), 1.3)
    u = proposal.sample((DRAWS,))
    weights = (blocks(of_unconstrained, u) - proposal.log_prob(u)).softmax(0)
    mean = weights @ (x := natural(u))
    covariance = (x - mean).mT @ (weights[:, None] * (x - mean))
    proposal = student(mean, torch.linalg.cholesky(covariance), 1.5)
    x, log_w, size = mode.new_empty(0, len(mode)), mode.new_empty(0), 0.0
    while size < EFFECTIVE:
        assert len(x) < MOST, "the reference's proposal is poor"
        new = proposal.sample((DRAWS,))
        new = new[in_support(new)]
        x = torch.cat([x, new])
        log_w = torch.cat([log_w, blocks(log_density, new) - proposal.log_prob(new)])
        weights = log_w.softmax(0)
        size = float(1 / weights.square().sum())
    x = x[torch.multinomial(weights, EFFECTIVE, replacement=True)]
    means, squares = [], []
    for some in x[:NEAR].split(20):
        at, C, L, _ = parts(some)
        gain = torch.cholesky_solve(C[:, t], L)
        mean = gain.mT @ (y - column(column(at["mu"])) if "mu" in at else y)
        if "mu" in at:
            mean = mean + column(column(at["mu"]))
        variance = (C.diagonal(dim1=-2, dim2=-1) - (C[:, t] * gain).sum(-2))[..., None]
        means.append(mean)
        squares.append(mean.square() + variance)
    mean = torch.cat(means).mean(0)
    sd = (torch.cat(squares).mean(0) - mean.square()).sqrt()
    path = torch.stack([mean - sd, mean + sd]).mT
    return {name: value.numpy() for name, value in named(x).items()} | {"path": path.numpy()}


def sampled(
    problem: Problem, clients: Mapping[str, Mapping[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """Draws of θ and of the paths, where rows are Poisson, by NumPyro's NUTS."""
    import jax
    import jax.numpy as jnp
    import numpyro
    from numpyro import distributions, infer

    numpyro.enable_x64()
    t = next(iter(clients.values()))["t"].astype(int)
    y = np.stack([rows["y"] for rows in clients.values()])
    steps = jnp.arange(problem.size)

    def path_of(at: Mapping[str, Any], z: Any) -> Any:
        if "length" not in at:
            return at["tau"] * z[:, :1] + at["step"] * z[:, 1:].cumsum(1)
        away = 0.25 * (steps[:, None] - steps) / at["length"]
        smooth = jnp.exp(-(away**2) / 2) + JITTER * jnp.eye(problem.size)
        return at["height"] * z[:, 1:] @ jnp.linalg.cholesky(smooth).T

    def program() -> None:
        at = {}
        for name, prior in problem.priors.items():
            values = [float(getattr(prior, n)) for n in ("loc", "scale") if hasattr(prior, n)]
            one = getattr(distributions, type(prior).__name__)
            at[name] = numpyro.sample(name, one(*values[-len(prior.arg_constraints) :]))
        noise = distributions.Normal(0.0, 1.0).expand([len(y), problem.size + 1]).to_event(2)
        path = numpyro.deterministic("path", at["mu"] + path_of(at, numpyro.sample("z", noise)))
        numpyro.sample("y", distributions.Poisson(jnp.exp(path[:, t])).to_event(2), obs=y)

    kernel = infer.NUTS(program, target_accept_prob=0.9)
    run = infer.MCMC(kernel, num_warmup=1000, num_samples=10_000, progress_bar=False)
    run.run(jax.random.PRNGKey(0))
    found = run.get_samples()
    return {name: np.asarray(found[name]) for name in (*problem.priors, "path")}


class Late(Exception):
    """A fit takes too long."""


def measure(name: str, seconds: int) -> list[str]:
    """Fit a program and compare it with the exact posterior."""
    problem = problems()[name]
    clients = problem.data()
    federation = bf.Federation.from_arrays(clients)

    def late(*_: Any) -> None:
        raise Late

    signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    start = time.process_time()
    try:
        posterior = bf.fit(problem.program, federation, seed=1, progress=False)
        signal.setitimer(signal.ITIMER_PROF, 0)
    except Late:
        return [str(problem.size), *[""] * 6, f"> {seconds}"]
    took = time.process_time() - start
    draws = {**posterior.sample(4000), **posterior.derived(num_samples=4000)}
    reference = (sampled if problem.poisson else exact)(problem, clients)
    found = []
    for names in (list(problem.priors), ["path"]):
        shift, least, most = distance(moments(draws, names), moments(reference, names))
        found += [f"{shift:.2f}", f"{least:.2f}–{most:.2f}"]
    k = "" if posterior.khat is None else f"{posterior.khat:.2f}"
    if posterior.caveat:
        k += " (warned)"
    return [str(problem.size), *found, runner.rounds_of(posterior), k, f"{took:.0f}"]


def main() -> None:
    given = runner.arguments(__doc__, seconds=120)
    rows = {name: [(name, given.seconds)] for name in problems()}
    runner.table(COLUMNS, rows, measure, given)


if __name__ == "__main__":
    main()
