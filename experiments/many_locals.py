"""Clients with many local variables that depend on each other, beside the exact posterior. Makes many_locals.md.

    python experiments/many_locals.py                  # about ten minutes
    python experiments/many_locals.py "AR, sites"      # some rows
    python experiments/many_locals.py --seconds 600    # give up a fit after ten minutes of CPU time

Each client has a path of T numbers: a random walk, an autoregression (AR) of order 1, a Gaussian process, or the
effects of wards within hospitals. It is written in one of the ways that people write it: centred, one site for each
number; "noise", standard Normal numbers and what is computed from them; "precision", a multivariate Normal with a
precision matrix; "covariance", one with a covariance matrix. Rows are a number of the path with Normal noise, about
one in five is missing; or they are Poisson.

The reference integrates the paths out: the marginal posterior of θ, of two to five numbers, by importance sampling in
double precision, with as many draws as give an effective sample size of 4,000. The proposal is a Student t distribution
of θ itself, not of logarithms, in which a standard deviation that may be 0 has a long tail; a first one, around the
mode in unconstrained coordinates, gives its mean and covariance. A path given θ is Normal. For Poisson rows the
reference is nutpie's NUTS.
The table has the largest shift of a posterior mean, in the reference's standard deviations, and the range of the
ratios of standard deviations, of the globals and of all numbers of all clients' paths. Seconds are CPU time of one
thread, fit and correction. Shifts and ratios have Monte Carlo errors of about 0.03.

Before q(w_i | θ) was Laplace's approximation at θ (a full factor with learnt parameters up to 64 numbers, diagonal
factors of each site beyond), with a limit of 120 s on a busy machine:

- walk, noise, 30: 0.03 | 0.98–1.01, 5 rounds, k-hat -0.04, 23 s
- walk, noise, 100: 18.3 | 0.13–1.10, not converged after 500 rounds, k-hat 7.0, warned, 29 s; 200: 29.8, warned
- AR, sites, 20: 0.04 | 0.98–1.04, 6 rounds, 95 s
- AR, sites, 50; AR, noise, 50, 200, 500; AR, precision, 50; GP, noise, 40: not done
- GP, covariance, 40: the fit stopped at an ELBO that is not a number

Rows that the table lacks are not measured: those with dense precisions of 100 numbers and more take minutes.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import runner
import torch
from distances import distance, moments
from scipy.optimize import minimize
from torch import Tensor
from torch.distributions import biject_to

import bayesfed as bf

COLUMNS = "program | numbers a client | globals: shift | sd ratio | paths: shift | sd ratio | rounds | k-hat | CPU s"
CLIENTS, DRAWS, EFFECTIVE, MOST, NEAR = 8, 2000, 4000, 100_000, 1000
"""Clients; draws of θ in the reference that are made at a time, their least effective number, and the most draws; draws
of θ given which paths are compared."""
WALK = {"step": dist.HalfNormal(0.5), "sigma": dist.HalfNormal(1.0)}
AR = {"rho": dist.Uniform(0.0, 1.0), **WALK}
GP = {
    "length": dist.LogNormal(0.0, 0.5),
    "height": dist.HalfNormal(1.0),
    "sigma": dist.HalfNormal(1.0),
}
TREE = {
    "mu": dist.Normal(0.0, 2.0),
    "tau_client": dist.HalfNormal(1.0),
    "tau_hospital": dist.HalfNormal(1.0),
    "tau_ward": dist.HalfNormal(1.0),
    "sigma": dist.HalfNormal(1.0),
}
JITTER = 1e-4
Theta = Mapping[str, Tensor]


# -- programs --------------------------------------------------------------------------------------


def sampled(priors: Mapping[str, Any]) -> dict[str, Tensor]:
    """Sample the globals."""
    return {name: pyro.sample(name, prior) for name, prior in priors.items()}


def column(value: Tensor) -> Tensor:
    """A global beside a vector of numbers."""
    return value[..., None]


def rows_of(path: Tensor, obs: Any) -> Tensor:
    """The number of the path ``(..., K, 1, T)`` that each row belongs to, ``(..., K, rows)``."""
    at, path = obs["t"].long(), path.squeeze(-2)
    return path.gather(-1, at.expand(*path.shape[:-1], at.shape[-1]))


def normal_rows(federation: Any, path: Tensor, sigma: Tensor) -> None:
    """Rows with Normal noise."""
    pyro.deterministic("path", path)
    with federation.observations() as obs:
        pyro.sample("y", dist.Normal(rows_of(path, obs), sigma), obs=obs.get("y"))


def walk_noise(size: int) -> Callable[[Any], None]:
    """A random walk of which the steps are sampled."""

    def program(federation: Any) -> None:
        at = sampled(WALK)
        with federation.clients():
            z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([size]).to_event(1))
            path = z[..., :1] + column(at["step"]) * (z.cumsum(-1) - z[..., :1])
            normal_rows(federation, path, at["sigma"])

    return program


def walk_poisson(size: int) -> Callable[[Any], None]:
    """Counts whose log mean is a random walk."""

    def program(federation: Any) -> None:
        step = pyro.sample("step", WALK["step"])
        with federation.clients():
            z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([size]).to_event(1))
            path = 1.0 + z[..., :1] + column(step) * (z.cumsum(-1) - z[..., :1])
            with federation.observations() as obs:
                pyro.sample("y", dist.Poisson(rows_of(path, obs).exp()), obs=obs.get("y"))

    return program


def ar_sites(size: int) -> Callable[[Any], None]:
    """An autoregression with a site for each number."""

    def program(federation: Any) -> None:
        at = sampled(AR)
        with federation.clients():
            x = pyro.sample("x_0", dist.Normal(0.0, at["step"] * (1 - at["rho"] ** 2).rsqrt()))
            path = [x]
            for t in range(1, size):
                path.append(x := pyro.sample(f"x_{t}", dist.Normal(at["rho"] * x, at["step"])))
            normal_rows(federation, torch.stack(torch.broadcast_tensors(*path), -1), at["sigma"])

    return program


def ar_noise(size: int) -> Callable[[Any], None]:
    """An autoregression computed from noise."""

    def program(federation: Any) -> None:
        at = sampled(AR)
        steps = torch.arange(size)
        away = (steps[:, None] - steps).clamp(min=0)
        weights = (column(at["rho"].log())[..., None] * away).exp().tril()
        with federation.clients():
            z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([size]).to_event(1))
            first = z[..., :1] * (1 - column(at["rho"]) ** 2).rsqrt()
            noise = column(at["step"]) * torch.cat(
                [first, z[..., 1:].expand(*first.shape[:-1], -1)], -1
            )
            normal_rows(federation, (weights @ noise[..., None]).squeeze(-1), at["sigma"])

    return program


def ar_precision(size: int) -> Callable[[Any], None]:
    """An autoregression as a multivariate Normal with a tridiagonal precision matrix."""

    def program(federation: Any) -> None:
        at = sampled(AR)
        inner, beside = torch.zeros(size), torch.zeros(size, size)
        inner[1:-1] = 1.0
        beside[1:, :-1] = torch.eye(size - 1)
        rho = column(column(at["rho"]))
        Q = torch.eye(size) + rho**2 * torch.diag(inner) - rho * (beside + beside.T)
        Q = Q / column(column(at["step"])) ** 2
        with federation.clients():
            x = pyro.sample("x", dist.MultivariateNormal(torch.zeros(size), precision_matrix=Q))
            normal_rows(federation, x, at["sigma"])

    return program


def gp_covariance(size: int) -> Callable[[Any], None]:
    """A Gaussian process as a multivariate Normal."""

    def program(federation: Any) -> None:
        at = sampled(GP)
        with federation.clients():
            x = pyro.sample("x", dist.MultivariateNormal(torch.zeros(size), kernel(at, size)))
            normal_rows(federation, x, at["sigma"])

    return program


def gp_noise(size: int) -> Callable[[Any], None]:
    """A Gaussian process computed from noise."""

    def program(federation: Any) -> None:
        at = sampled(GP)
        root = torch.linalg.cholesky(kernel(at, size))
        with federation.clients():
            z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([size]).to_event(1))
            normal_rows(federation, (root @ z[..., None]).squeeze(-1), at["sigma"])

    return program


def tree(hospitals: int, wards: int) -> Callable[[Any], None]:
    """Wards within hospitals within clients."""

    def program(federation: Any) -> None:
        at = sampled(TREE)
        with federation.clients():
            client = pyro.sample("level", dist.Normal(at["mu"], at["tau_client"]))
            spread = column(at["tau_hospital"]).expand(*at["mu"].shape, hospitals)
            hospital = pyro.sample("hospital", dist.Normal(column(client), spread).to_event(1))
            above = hospital.repeat_interleave(wards, -1)
            ward = pyro.sample("ward", dist.Normal(above, column(at["tau_ward"])).to_event(1))
            normal_rows(federation, ward, at["sigma"])

    return program


# -- the same in closed form ------------------------------------------------------------------------


def kernel(at: Theta, size: int) -> Tensor:
    """The covariance of a Gaussian process at inputs 0.25 apart, ``(..., T, T)``."""
    x = 0.25 * torch.arange(size).to(at["length"])
    away = (x[:, None] - x) / column(column(at["length"]))
    smooth = (-away.square() / 2).exp() + JITTER * torch.eye(size).to(x)
    return column(column(at["height"])) ** 2 * smooth


def walk_covariance(at: Theta, size: int) -> Tensor:
    t = torch.arange(size).to(at["step"])
    return 1 + column(column(at["step"])) ** 2 * torch.minimum(t[:, None], t)


def ar_covariance(at: Theta, size: int) -> Tensor:
    t = torch.arange(size).to(at["step"])
    rho, step = (column(column(at[name])) for name in ("rho", "step"))
    return step**2 / (1 - rho**2) * rho ** (t[:, None] - t).abs()


def tree_covariance(hospitals: int, wards: int) -> Callable[[Theta, int], Tensor]:
    def covariance(at: Theta, size: int) -> Tensor:
        same = torch.block_diag(*[torch.ones(wards, wards)] * hospitals).to(at["mu"])
        parts = {"tau_client": torch.ones_like(same), "tau_hospital": same}
        parts["tau_ward"] = torch.eye(size).to(same)
        return sum(column(column(at[name])) ** 2 * part for name, part in parts.items())

    return covariance


@dataclass(frozen=True)
class Problem:
    """A program, its priors, the covariance of a client's path given θ, and θ of the simulation."""

    program: Callable[[Any], None]
    size: int
    priors: Mapping[str, Any]
    covariance: Callable[[Theta, int], Tensor]
    truth: Mapping[str, float]
    each: int = 1
    poisson: bool = False

    def data(self) -> dict[str, dict[str, np.ndarray]]:
        """Simulate the clients' rows."""
        torch.manual_seed(self.size)
        at = {name: torch.tensor(value, dtype=torch.float64) for name, value in self.truth.items()}
        root = torch.linalg.cholesky(self.covariance(at, self.size) + 1e-9 * torch.eye(self.size))
        kept = (torch.rand(self.size) < 0.8).nonzero()[:, 0].repeat_interleave(self.each)
        clients = {}
        for i in range(CLIENTS):
            path = at.get("mu", 0.0) + root @ torch.randn(self.size, dtype=torch.float64)
            if self.poisson:
                y = torch.poisson((1 + path[kept]).exp())
            else:
                y = path[kept] + at["sigma"] * torch.randn(len(kept), dtype=torch.float64)
            clients[f"client {i}"] = {"t": kept.numpy().astype(float), "y": y.numpy()}
        return clients


def problems() -> dict[str, Problem]:
    """All rows of the table."""
    walk, ar = {"step": 0.25, "sigma": 0.4}, {"rho": 0.9, "step": 0.3, "sigma": 0.4}
    gp = {"length": 1.0, "height": 1.0, "sigma": 0.4}
    effects = {"mu": 1.0, "tau_client": 0.5, "tau_hospital": 0.6, "tau_ward": 0.3, "sigma": 0.5}
    found = {
        f"walk, noise, {T}": Problem(walk_noise(T), T, WALK, walk_covariance, walk)
        for T in (30, 100, 200)
    }
    for T in (20, 50, 100):
        found[f"AR, sites, {T}"] = Problem(ar_sites(T), T, AR, ar_covariance, ar)
    for T in (50, 100):
        found[f"AR, noise, {T}"] = Problem(ar_noise(T), T, AR, ar_covariance, ar)
    for T in (50,):
        found[f"AR, precision, {T}"] = Problem(ar_precision(T), T, AR, ar_covariance, ar)
    found["GP, covariance, 40"] = Problem(gp_covariance(40), 40, GP, kernel, gp)
    found["GP, noise, 40"] = Problem(gp_noise(40), 40, GP, kernel, gp)
    for h, w in ((5, 8), (10, 20), (15, 20)):
        covariance = tree_covariance(h, w)
        found[f"tree, {h} × {w}"] = Problem(tree(h, w), h * w, TREE, covariance, effects, each=2)
    few = {"step": 0.25}
    for T in (30, 100):
        prior = {"step": WALK["step"]}
        found[f"walk, Poisson, {T}"] = Problem(
            walk_poisson(T), T, prior, walk_covariance, few, poisson=True
        )
    return found


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
    draws = dict(posterior.sample(4000))
    if problem.poisson:
        from pooled_nuts import nuts

        reference, local = nuts(f"many_locals_{name}", problem.program, federation), "z"
    else:
        reference, local = exact(problem, clients), "path"
        draws |= posterior.derived(num_samples=4000)
    found = []
    for names in (list(problem.priors), [local]):
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
