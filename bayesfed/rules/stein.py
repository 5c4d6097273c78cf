"""Stein variational gradient descent on the particles of a hyper-posterior (PAC-PFL).

    φ ~ P, the hyper-prior; given φ, a client's hypothesis (function, weights) has the prior P_φ.
    Q*(φ) ∝ P(φ) exp(τ Σ_i ln Z_i(φ)),   τ = λ / (λ + β n (n₂ + υ)) < 1                        (Corollary 4.4)

    server    has k particles φ_κ, at first drawn from P; sends them
              g_κ = ∇ ln P(φ_κ) + τ Σ_i ∇ ln Z_i(φ_κ), the sum over a cohort scaled by n / c
              φ_κ ← φ_κ + (η / k) Σ_l (K(φ_l, φ_κ) g_l + ∇_φl K(φ_l, φ_κ))          SVGD (eq. 39), RBF kernel K

all in units of the spreads of P where φ has at most 50 numbers.

Globals that are ``pyro.param`` are points η beside the particles: they take plain steps of the same optimiser along
mean_κ (∇_η ln P(φ_κ) + τ Σ_i ∇_η ln Z_i(φ_κ)), the gradient of ln E_P exp(τ Σ_i ln Z_i): maximum marginal likelihood.

The pseudo-code of the paper averages the gradients over the cohort, its derivation sums them over all n clients;
this is the sum. τ = (their τ) / n is the average. A τ above 1 counts every row more than once:
there is no λ for it, and no bound that its Q* would be the minimum of.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bayesfed.elbo.elbo import log_prior
from bayesfed.elbo.program import Params, Program
from bayesfed.guides.fisher import scaled
from bayesfed.guides.globals import Particles
from bayesfed.guides.particles import PARTICLE, PARTICLES
from bayesfed.rules.quasi_newton import advance, begin
from bayesfed.rules.rule import NO_TERM, Rule, Turn
from bayesfed.steps import optimizer
from bayesfed.steps.evidence import particle_gradients
from bayesfed.steps.gradients import leaves
from bayesfed.steps.job import Job, Parts, Work
from bayesfed.steps.optimizer import State
from bayesfed.steps.steps import Steps


@dataclass(frozen=True)
class Stein(Rule):
    """SVGD of all particles along the sum of the clients' gradients.

    Attributes:
        lr: η.
        optimizer: ``"adam"``, ``"momentum"`` or ``"sgd"``.
        tau: τ; by default from ``lam``, ``beta``, ``new_data_clients`` and ``upsilon``. Above 1 it is outside the
            theorem: a hyper-prior weakened at will.
        lam: λ of the server's bound; by default so large that τ = 1: the hierarchical Bayesian posterior.
        beta: β of the bound, by default the clients' mean number of rows.
        new_data_clients: n₂, how many clients will get more rows; by default all.
        upsilon: υ.
        flat: leave the hyper-prior out.
    """

    lr: float = 0.05
    optimizer: Literal["sgd", "momentum", "adam"] = "adam"
    tau: float | None = None
    lam: float | None = None
    beta: float | None = None
    new_data_clients: int | None = None
    upsilon: float = 1e-4
    flat: bool = False
    by_gradient = True
    needs = frozenset({"gradients"})
    globals = (Particles,)

    @property
    def no_noise(self) -> str:
        """The reason against noise: a τ that follows from the clients' numbers of rows discloses these."""
        if self.tau is not None or self.lam is None or self.beta is not None:
            return ""
        return "lam makes τ of the clients' mean number of rows, which would be disclosed: use tau, or beta beside lam"

    def accept(self, program: Program, steps: Steps, name: str) -> Program:
        """Refuse a λ that does not exceed n₂ + υ, as the bound needs."""
        self.temperature(program.clients, program.rows / program.clients)
        return program

    def temperature(self, clients: int, rows: float) -> float:
        """Return τ for n clients with so many rows each, on average (Corollary 4.4).

        Example:
            >>> from bayesfed.rules import Stein
            >>> Stein(lam=24.0, new_data_clients=0, upsilon=0.1).temperature(clients=24, rows=10)
            0.5
        """
        if self.tau is not None:
            return self.tau
        if self.lam is None:
            return 1.0
        more = clients if self.new_data_clients is None else self.new_data_clients
        if self.lam <= more + self.upsilon:
            raise ValueError(
                f"lam is {self.lam}; it must exceed n₂ + υ = {more + self.upsilon:g} (Theorem 4.2)"
            )
        beta = rows if self.beta is None else self.beta
        return self.lam / (self.lam + beta * clients * (more + self.upsilon))

    def start(self, program: Program) -> State:
        """Return particles drawn from the hyper-prior, the parameters, and the optimiser's first state."""
        return optimizer.begin(self.optimizer, super().start(program)["theta"])

    def newton(self, program: Program, steps: Steps) -> Params:
        """Return the first state of quasi-Newton steps of a single particle (:mod:`bayesfed.rules.quasi_newton`)."""
        return begin(program, [*program.init]) if program.particles == 1 else {}

    def params(self, server: State) -> Params:
        """Return the particles, and the parameters."""
        return server["params"]

    def encode(self, job: Job, work: Work) -> tuple[Parts, State]:
        """Return the gradients."""
        slopes = work.found["gradients"]
        return {"gradients": {name: slope.squeeze(1) for name, slope in slopes.items()}}, {}

    def decode(self, turn: Turn, server: State, total: Parts) -> tuple[State, Tensor]:
        """Take an SVGD step of all particles; the server's term ``()`` is their mean of ln P, or 0 where it is flat."""
        program, theta = turn.program, leaves(server["params"])
        phi = theta[PARTICLES]
        prior = log_prior(program, theta, {PARTICLE: phi[:, None, None]}, len(phi))
        tau = self.temperature(program.clients, program.rows / program.clients)
        score = {name: turn.scale * tau * total["gradients"][name] for name in theta}
        if program.globals and not self.flat:
            found = particle_gradients(prior, theta)
            score = {name: score[name] + slope for name, slope in found.items()}
        term = NO_TERM.to(prior) if self.flat else prior.detach().mean()
        units = {PARTICLES: program.guide.unit}
        score[PARTICLES] = units[PARTICLES] * score[PARTICLES]
        if "newton" in server:  # a point, as PFedGP's
            move = {n: v / program.rows for n, v in scaled(score, units).items()}
            found, newton = advance(program, units, server["newton"], server["params"], move)
            return server | {"params": found, "newton": newton}, term
        score[PARTICLES] = stein_direction(phi.detach() / units[PARTICLES], score[PARTICLES])
        downhill = {name: -slope for name, slope in score.items()}
        moved = optimizer.descend(
            self.optimizer, server, downhill, turn.rate * self.lr, units=units
        )
        return server | moved, term


def stein_direction(phi: Tensor, score: Tensor) -> Tensor:
    """Return the SVGD direction of particles (Liu & Wang 2016, eq. 8; PAC-PFL, eq. 39).

    The kernel is exp(−‖φ − φ'‖² / h) with h = median² / ln k over the pairs of particles. Pyro's RBF kernel has a
    bandwidth for each dimension: in hundreds of dimensions it is zero between any two particles.

    Args:
        phi: particles, ``(k, D)``.
        score: ∇ ln p at each, ``(k, D)``.

    Returns:
        ``(k, D)``.

    Example:
        >>> import torch
        >>> from bayesfed.rules.stein import stein_direction
        >>> stein_direction(torch.zeros(1, 2), torch.tensor([[1.0, -2.0]]))
        tensor([[ 1., -2.]])
    """
    count = len(phi)
    if count == 1:
        return score
    difference = phi[:, None] - phi[None]  # (l, κ, D)
    squared = difference.square().sum(-1)
    h = torch.pdist(phi).square().median() / math.log(count)
    kernel = (-squared / h).exp()
    repulsion = -2 / h * (kernel[..., None] * difference).sum(0)  # Σ_l ∇_φl K(φ_l, φ_κ)
    return (kernel.T @ score + repulsion) / count
