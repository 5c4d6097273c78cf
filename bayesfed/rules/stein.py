"""Stein variational gradient descent on the particles of a hyper-posterior (PAC-PFL).

    φ ~ P, the hyper-prior; given φ, a client's hypothesis (function, weights) has the prior P_φ.
    Q*(φ) ∝ P(φ) exp(τ Σ_i ln Z_i(φ)),   τ = λ / (λ + β n (n₂ + υ)) < 1                        (Corollary 4.4)

    server    has k particles φ_κ, at first drawn from P; sends them
              g_κ = ∇ ln P(φ_κ) + τ Σ_i ∇ ln Z_i(φ_κ), the sum over a cohort scaled by n / c
              φ_κ ← φ_κ + (η / k) Σ_l (K(φ_l, φ_κ) g_l + ∇_φl K(φ_l, φ_κ))          SVGD (eq. 39), RBF kernel K

all in units of the spreads of P where φ has at most 50 numbers. There, unless an optimiser is named, the steps and the
kernel are in the metric of the curvature, of which clients send their part where no noise is added:

    H_κ = −∇² ln P(φ_κ) − τ Σ_i ∇² ln Z_i(φ_κ), with its eigenvalues' sizes, at least 1; H̄ of the mean in the same way
    K(φ, φ') in coordinates H̄^{½} φ                     (matrix-valued kernels; Wang, Tang, Bajaj & Liu 2019, section 4)
    φ_κ ← φ_κ + ½ H_κ⁻¹ Σ_l (K g_l + ∇K) / Σ_l K

The bandwidth is bounded by the distance of draws of a Normal, so that particles far apart climb by themselves. Fixed
points are those of SVGD in these coordinates. A step is at most 1 in any number.

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
from bayesfed.guides.particles import FEW, PARTICLE, PARTICLES
from bayesfed.rules.quasi_newton import advance, begin
from bayesfed.rules.rule import NO_TERM, Rule, Turn
from bayesfed.steps import optimizer
from bayesfed.steps.evidence import exact, particle_curvature, particle_gradients
from bayesfed.steps.gradients import leaves
from bayesfed.steps.job import CURVED, Job, Parts, Work
from bayesfed.steps.optimizer import State
from bayesfed.steps.steps import Steps

RATE, LONGEST = 0.5, 1.0
"""How far a step in the metric of the curvature goes, and the longest in one number, in units of the hyper-prior."""
WIDER = 4.0
"""The bandwidth in that metric, as a multiple of the paper's, at which a few particles have 0.6 of the width of a
Normal hyper-posterior. Kernels ever wider match its means and covariances in the directions that the particles span
(Liu & Wang 2018, *Stein variational gradient descent as moment matching*); at 4 it is 0.9 of the width."""
SHORT = 0.02
"""The step that counts as short, in the metric of the curvature: in standard deviations of the hyper-posterior."""


@dataclass(frozen=True)
class Stein(Rule):
    """SVGD of all particles along the sum of the clients' gradients.

    Attributes:
        lr: η of an optimiser; steps in the metric of the curvature have none.
        optimizer: ``"adam"``, ``"momentum"`` or ``"sgd"``. None: steps in the metric of the curvature, where there are
            several particles of at most 50 numbers, no noise, and evidence without draws; else Adam's.
        tau: τ; by default from ``lam``, ``beta``, ``new_data_clients`` and ``upsilon``. Above 1 it is outside the
            theorem: a hyper-prior weakened at will.
        lam: λ of the server's bound; by default so large that τ = 1: the hierarchical Bayesian posterior.
        beta: β of the bound, by default the clients' mean number of rows.
        new_data_clients: n₂, how many clients will get more rows; by default all.
        upsilon: υ in the temperature τ, a small positive number.
        flat: leave the hyper-prior out.
    """

    lr: float = 0.05
    optimizer: Literal["sgd", "momentum", "adam"] | None = None
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
        return optimizer.begin(self.optimizer or "adam", super().start(program)["theta"])

    def newton(self, program: Program, steps: Steps) -> Params:
        """Return the first state of steps that say when they have converged.

        Those of a single particle are quasi-Newton steps (:mod:`bayesfed.rules.quasi_newton`), of which several
        particles only count the short ones.
        """
        if program.particles == 1:
            return begin(program, [*program.init])
        few = self.curved(program) and len(program.init) == 1
        return {"calm": program.init[PARTICLES].new_zeros(())} if few else {}

    def curved(self, program: Program) -> bool:
        """Return whether steps are in the metric of the curvature."""
        several = program.particles > 1 and program.init[PARTICLES].shape[1] <= FEW
        return self.optimizer is None and several and exact(program)

    def broadcast(self, turn: Turn, server: State) -> Parts:
        """Return the particles and the parameters, and whether clients send second derivatives."""
        asked = {CURVED: {"wanted": server["params"][PARTICLES].new_ones(())}}
        asked = asked if self.curved(turn.program) else {}
        return super().broadcast(turn, server) | asked

    def params(self, server: State) -> Params:
        """Return the particles, and the parameters."""
        return server["params"]

    def encode(self, job: Job, work: Work) -> tuple[Parts, State]:
        """Return the gradients."""
        parts = {part: work.found.get(part, {}) for part in ("gradients", "curvature")}
        upload = {p: {n: v.squeeze(1) for n, v in found.items()} for p, found in parts.items()}
        return {part: found for part, found in upload.items() if found or part == "gradients"}, {}

    def decode(self, turn: Turn, server: State, total: Parts) -> tuple[State, Tensor]:
        """Take an SVGD step of all particles; the server's term ``()`` is their mean of ln P, or 0 where it is flat."""
        program, theta = turn.program, leaves(server["params"])
        phi = theta[PARTICLES]
        prior = log_prior(program, theta, {PARTICLE: phi[:, None, None]}, len(phi))
        tau = self.temperature(program.clients, program.rows / program.clients)
        score = {name: turn.scale * tau * total["gradients"][name] for name in theta}
        curvature = total.get("curvature", {}).get(PARTICLES)
        if curvature is not None:
            curvature = -turn.scale * tau * curvature
        if program.globals and not self.flat:
            if curvature is not None:
                curvature = curvature - particle_curvature(prior, phi)
            found = particle_gradients(prior, theta)
            score = {name: score[name] + slope for name, slope in found.items()}
        term = NO_TERM.to(prior) if self.flat else prior.detach().mean()
        units = {PARTICLES: program.guide.unit}
        score[PARTICLES] = units[PARTICLES] * score[PARTICLES]
        if "newton" in server and len(phi) == 1:  # a point, as PFedGP's
            move = {n: v / program.rows for n, v in scaled(score, units).items()}
            found, newton = advance(turn, units, server["newton"], server["params"], move)
            return server | {"params": found, "newton": newton}, term
        own = phi.detach() / units[PARTICLES]
        if curvature is None:
            step, length = None, None
            score[PARTICLES] = stein_direction(own, score[PARTICLES])
        else:
            square = units[PARTICLES].expand(phi.shape[1])
            curvature = square[:, None] * curvature * square
            step, length = newton_step(own, score[PARTICLES], curvature)
            score[PARTICLES] = torch.zeros_like(own)
        downhill = {name: -slope for name, slope in score.items()}
        rate = turn.rate * self.lr
        moved = optimizer.descend(self.optimizer or "adam", server, downhill, rate, units=units)
        if step is not None:
            rate = 1.0 if turn.whole else turn.rate
            there = phi.detach() + rate * units[PARTICLES] * step.to(phi)
            moved["params"] = moved["params"] | {PARTICLES: there}
        if "newton" in server and length is not None:
            calm = (server["newton"]["calm"] + 1) * (length < SHORT)
            moved["newton"] = {"calm": calm.to(phi)}
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
    kernel, repulsion = _kernel(phi)
    return (kernel.T @ score + repulsion) / count


def newton_step(phi: Tensor, score: Tensor, curvature: Tensor) -> tuple[Tensor, Tensor]:
    """Return an SVGD step in the metric of the curvature, and the length ``()`` of the longest in that metric.

    Args:
        phi: particles in units of the hyper-prior, ``(k, D)``.
        score: ∇ ln p at each, ``(k, D)``.
        curvature: −∇² ln p at each, ``(k, D, D)``.

    Example:
        >>> import torch
        >>> from bayesfed.rules.stein import newton_step
        >>> phi = torch.tensor([[0.3, 0.0], [9.0, 0.0]])  # p is a Normal of standard deviation 1/10
        >>> step, _ = newton_step(phi, -100 * phi, 100 * torch.eye(2).expand(2, 2, 2))
        >>> step[:, 0].round(decimals=2).tolist()  # halfway to the mode, and at most 1
        [-0.15, -1.0]
    """
    phi, score, curvature = phi.double(), score.double(), curvature.double()
    values, vectors = _sizes(curvature.mean(0))
    root = (vectors * values.sqrt()) @ vectors.mT
    kernel, repulsion = _kernel(phi @ root, WIDER, 2.0 * phi.shape[1])
    direction = kernel.T @ score + repulsion @ root
    values, vectors = _sizes(curvature)
    along = (vectors.mT @ direction[..., None]) / values[..., None]
    step = RATE * (vectors @ along).squeeze(-1) / kernel.sum(0)[:, None]
    step = step / step.abs().max(1, keepdim=True).values.clamp(min=LONGEST)
    return step, (step @ root).square().sum(1).mean().sqrt()


def _sizes(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sizes of eigenvalues, at least 1, and the eigenvectors."""
    values, vectors = torch.linalg.eigh((matrices + matrices.mT) / 2)
    return values.abs().clamp(min=1.0), vectors


def _kernel(phi: Tensor, times: float = 1.0, widest: float = math.inf) -> tuple[Tensor, Tensor]:
    """Return K(φ_l, φ_κ) ``(k, k)`` and Σ_l ∇_φl K(φ_l, φ_κ) ``(k, D)`` at so many times the bandwidth of the paper.

    The median² that this is made of is at most ``widest``.
    """
    difference = phi[:, None] - phi[None]  # (l, κ, D)
    squared = difference.square().sum(-1)
    h = times * torch.pdist(phi).square().median().clamp(max=widest) / math.log(len(phi))
    kernel = (-squared / h).exp()
    return kernel, -2 / h * (kernel[..., None] * difference).sum(0)
