"""PAC-PFL: a hyper-posterior over priors, held by particles; every client turns it into its own posterior.

    φ ~ P, the hyper-prior; given φ, a client's hypothesis (function, weights) has the prior P_φ.
    Z_i(φ) = E_{w ~ P_φ} exp(−(β / n_i) Σ_{rows of D_i} ℓ(w, row)),   ℓ = −log p: with β = n_i the marginal likelihood
    Q*(φ) ∝ P(φ) exp(τ Σ_i ln Z_i(φ)),   τ = λ / (λ + β n (n₂ + υ)) < 1                        (Corollary 4.4)

    server    has k particles φ_κ, at first drawn from P; sends them
    client i  uploads ∇_φκ ln Z_i(φ_κ) for each, on a minibatch                                 (Algorithm 2)
    server    g_κ = ∇ ln P(φ_κ) + τ Σ_i ∇ ln Z_i(φ_κ), the sum over a cohort scaled by n / c
              φ_κ ← φ_κ + (η / k) Σ_l (K(φ_l, φ_κ) g_l + ∇_φl K(φ_l, φ_κ))          SVGD (eq. 39), RBF kernel K

For Gaussian processes ln Z_i is known in closed form (eq. 33); for other models it is logsumexp − ln L of the
log-likelihoods of L draws from the prior (eq. 38), which is the Rényi bound at α = 0 with the prior as guide.

A client, old or new, conditions: it takes no gradient step and uploads nothing. Draws of φ and w from the prior count
by exp(−(β / n_i) Σ ℓ), and so particles by their Z_i (eq. 37).

Globals that are ``pyro.param`` are points η beside the particles: they take plain steps of the same optimiser along
mean_κ (∇_η ln P(φ_κ) + τ Σ_i ∇_η ln Z_i(φ_κ)), the gradient of ln E_P exp(τ Σ_i ln Z_i): maximum marginal likelihood.

The pseudo-code of the paper averages the gradients over the cohort, its derivation sums them over all n clients;
this is the sum. τ = (their τ) / n is the average. A τ above 1 counts every row more than once:
there is no λ for it, and no bound that its Q* would be the minimum of.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesfed.algorithms.protocol import Algorithm, Turn, Upload
from bayesfed.data.batch import Batch
from bayesfed.data.federation import Federation, Model
from bayesfed.elbo.build import build
from bayesfed.elbo.elbo import Noise, client_terms, log_prior
from bayesfed.elbo.program import Params, Program
from bayesfed.elbo.sites import sites
from bayesfed.guides.particles import PARTICLE, PARTICLES, from_prior
from bayesfed.steps import optimizer
from bayesfed.steps.gradients import copies, gradients, leaves
from bayesfed.steps.job import Job, Work
from bayesfed.steps.optimizer import State
from bayesfed.tracing.compiler import traceable


@dataclass(frozen=True)
class PACPFL(Algorithm):
    """Particles of a hyper-posterior over priors, moved by Stein variational gradient descent.

    The model's global variables, at least one of them random, are what a prior is made of: a
    :class:`~bayesfed.models.GaussianProcess`, a :class:`~bayesfed.models.Network` with ``hyper_scale``, or any
    other model. With ``particles=1`` all may be ``pyro.param``: points of maximum marginal likelihood.

    Attributes:
        particles: k.
        draws: L, draws from the prior for a client's marginal likelihood; models without local random
            variables need none.
        tau: τ; by default from ``lam``, ``beta``, ``new_data_clients`` and ``upsilon``. Above 1 it is outside the
            theorem: a hyper-prior weakened at will.
        lam: λ of the server's bound; by default so large that τ = 1: the hierarchical Bayesian posterior.
        beta: β, where it is not n_i, in training and in what is predicted. For models with local random variables
            only.
        new_data_clients: n₂, how many clients will get more rows; by default all.
        upsilon: υ.
        flat: leave the hyper-prior out.
        lr: η.
        optimizer: ``"adam"``, ``"momentum"`` or ``"sgd"``.
        lr_decay: what is left of η in the last round, on half a cosine.

    Raises:
        ValueError: ``lam`` does not exceed n₂ + υ, as the bound needs.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import models, simulations
        >>> train, test = simulations.polynomials(clients=4)
        >>> posterior = bf.fit(models.GaussianProcess(), train, bf.PACPFL(), rounds=2)
        >>> posterior.predictive(test).mean.shape
        torch.Size([800])
    """

    particles: int = 4
    draws: int = 10
    tau: float | None = None
    lam: float | None = None
    beta: float | None = None
    new_data_clients: int | None = None
    upsilon: float = 1e-4
    flat: bool = False
    lr: float = 0.05
    optimizer: str = "adam"
    lr_decay: float = 0.1

    def __post_init__(self) -> None:
        optimizer.check_rules(optimizer=self.optimizer)

    @property
    def no_noise(self) -> str:
        """Where τ is made of the clients' numbers of rows, these would be told."""
        if self.tau is not None or self.lam is None or self.beta is not None:
            return ""
        return "lam makes τ of the clients' mean number of rows, which would be told: use tau, or beta beside lam"

    def temperature(self, clients: int, rows: float) -> float:
        """τ for n clients with so many rows each, on average (Corollary 4.4).

        Example:
            >>> import bayesfed as bf
            >>> bf.PACPFL(lam=24.0, new_data_clients=0, upsilon=0.1).temperature(clients=24, rows=10)
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

    def program(self, model: Model, federation: Federation) -> Program:
        """The model with particles for its random globals, points for its parameters; its locals from their prior.

        Raises:
            ValueError: no random global, but several particles; a client has a parameter of its own; ``beta`` with a
                marginal likelihood in closed form; a local prior that no noise can be put in from outside.
        """
        found = sites(model, federation)
        guide = from_prior(model, found, federation, self.particles, self.draws, self.beta)
        try:
            program = build(model, guide, federation)
        except NotImplementedError as error:
            raise ValueError(
                "PACPFL draws a client's variables from their prior, by noise from outside. Give the site another "
                f"prior, or take SFVI, whose guide is not the prior: {str(error).splitlines()[0]}"
            ) from None
        if not guide.sizes and not (self.particles == 1 and program.direct):
            raise ValueError(
                "no global of the model is random, and so there is nothing that particles could differ in: give the "
                "globals a prior, such as Network(..., hyper_scale=0.4), or, where they are pyro.param, take PFedGP: "
                "one particle (particles=1, flat=True), all of them points"
            )
        if program.local_params:
            raise ValueError(
                f"parameter {program.local_params[0]!r} is a client's own, but PACPFL's clients take no steps: make "
                "it global, or random inside the clients plate (Network: spread='learnt' or 'fixed'); or take PFedVEM"
            )
        if self.beta is not None and not program.locals:
            raise ValueError(
                "beta is for models with local random variables; the closed form is that of β = n_i: leave it out"
            )
        self.temperature(program.clients, program.rows / program.clients)
        return program

    def start(self, program: Program) -> State:
        """Particles drawn from the hyper-prior, and the parameters."""
        return optimizer.begin(self.optimizer, super().start(program))

    def broadcast(self, turn: Turn, server: State) -> Params:
        """The particles, and the parameters."""
        return server["params"]

    def work(self, job: Job) -> Work:
        """∇ ln Z_i of K clients on a minibatch, in each particle ``(K, 1, k, D)`` and in the parameters."""
        supplied = self.noise(job.program, job.keys, len(job.message[PARTICLES]))
        slopes, evidence = self.slopes(job.program, job.message, job.rows(0), supplied)
        return Work(slopes, evidence.mean(0))

    @traceable
    def slopes(
        self, program: Program, message: Params, batch: Batch, supplied: Noise
    ) -> tuple[Params, Tensor]:
        """∇_φκ ln Z_i(φ_κ), mean_κ ∇_η ln Z_i(φ_κ); and ln Z_i(φ_κ) ``(k, K)``."""
        theta = leaves(copies(message, len(batch)))  # φ (K, 1, k, D), η (K, 1, ...)
        phi = theta[PARTICLES].permute(2, 0, 1, 3)
        params = {**theta, PARTICLES: message[PARTICLES]}
        evidence = self.evidence(program, params, phi, batch, supplied)
        return _slopes(evidence, theta), evidence.detach()

    def noise(self, program: Program, keys: Tensor, particles: int) -> Noise:
        """What L draws from the prior of each particle need."""
        return program.noise(keys, particles * (self.draws if program.locals else 1), local=True)

    def evidence(
        self,
        program: Program,
        params: Mapping[str, Tensor],
        phi: Tensor,
        batch: Batch,
        supplied: Noise,
    ) -> Tensor:
        """ln Z_i(φ_κ), ``(k, K)``, of particles ``(k, K or 1, 1, D)``."""
        draws = self.draws if program.locals else 1
        repeated = {PARTICLE: phi.repeat_interleave(draws, 0)}
        counted = program.temper(batch)
        terms = client_terms(program, params, repeated, counted, supplied, draws * len(phi))
        return terms.unflatten(0, (len(phi), draws)).logsumexp(1) - math.log(draws)

    def encode(self, job: Job, work: Work) -> Upload:
        """The gradients."""
        return {name: slope.squeeze(1) for name, slope in work.found.items()}

    def decode(self, turn: Turn, server: State, total: Upload) -> tuple[State, Tensor]:
        """An SVGD step of all particles; and the mean of ln P over them, the server's ELBO term ``()``."""
        program, theta = turn.program, leaves(server["params"])
        phi = theta[PARTICLES]
        prior = log_prior(program, theta, {PARTICLE: phi[:, None, None]}, len(phi))
        tau = self.temperature(program.clients, program.rows / program.clients)
        score = {name: turn.scale * tau * total[name] for name in theta}
        if program.globals and not self.flat:
            score = {name: score[name] + slope for name, slope in _slopes(prior, theta).items()}
        score[PARTICLES] = stein(phi.detach(), score[PARTICLES])
        downhill = {name: -slope for name, slope in score.items()}
        server = optimizer.descend(self.optimizer, server, downhill, turn.rate * self.lr)
        return server, prior.detach().mean()

    def params(self, server: State) -> Params:
        """The particles, and the parameters."""
        return server["params"]


def _slopes(values: Tensor, theta: Params) -> Params:
    """Of values ``(k, ...)``, one a particle: the gradient of each in its particle, of their mean in the parameters."""
    found = gradients(values, theta)
    return {n: v if n == PARTICLES else v / len(values) for n, v in found.items()}


def stein(phi: Tensor, score: Tensor) -> Tensor:
    """The SVGD direction of particles (Liu & Wang 2016, eq. 8; PAC-PFL, eq. 39).

    The kernel is exp(−‖φ − φ'‖² / h) with h = median² / ln k over the pairs of particles. Pyro's RBF kernel has a
    bandwidth for each dimension: in hundreds of dimensions it is zero between any two particles.

    Args:
        phi: particles, ``(k, D)``.
        score: ∇ ln p at each, ``(k, D)``.

    Returns:
        ``(k, D)``.

    Example:
        >>> import torch
        >>> from bayesfed.algorithms.pacpfl import stein
        >>> stein(torch.zeros(1, 2), torch.tensor([[1.0, -2.0]]))
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
