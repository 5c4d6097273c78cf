"""A client's part of expectation maximisation by Markov chains (FedPop).

    θ maximises  log p(θ) + Σ_i log ∫ p(D_i | w, θ) p(w | θ) dw                     (Kotelevskii et al. 2022, eq. 2)
    client i     moves a chain on p(w_i | D_i, θ), θ as it was sent, and its copy of what has no closed form in the
                 server's M-step along ∇_θ log p(D_i, w_i | θ), whose mean over the chain is that of the marginal
                 likelihood (Fisher's identity)
    server       takes the M-step of :mod:`bayesfed.rules.m_step` on moments of the chains

q(w_i) is the Normal with the chain's mean and variance, in which a round counts for less as rates fall: stochastic
approximation EM (Delyon, Lavielle & Moulines 1999). The posterior's draws of w_i are q's.

A run without a number of rounds does not take the M-step. Clients move longer chains, :data:`MOVES`, and send the mean
of ∇_θ log p(D_i, w_i | θ), and the information, for Newton steps (:mod:`bayesfed.rules.observed_information`): an
M-step is far too short where rows say little of w_i, and gradient steps fit no two parameters that are correlated.
These means, and the moments of the chains, have control variates (:mod:`bayesfed.steps.control_variates`).

Two things differ from the paper. Its chains are unadjusted, and biased by their step size; these are accepted or
rejected, and each client adapts its step. In minibatches the density is that of the minibatch, so that a chain is too
wide: take all rows where memory allows. And the paper takes gradient steps on the parameters of the prior too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesfed.data.batch import Batch
from bayesfed.elbo import noise
from bayesfed.elbo.elbo import Noise, client_terms
from bayesfed.elbo.moments import Moments
from bayesfed.elbo.own_rows import centre_noise
from bayesfed.elbo.program import Params, Program
from bayesfed.guides.closed_forms import closed_forms
from bayesfed.guides.globals import Point
from bayesfed.guides.locals import Kept, Locals
from bayesfed.guides.newton import attached_gradient, curvature, jacobian, magnitude
from bayesfed.guides.precisions import solve_root, times
from bayesfed.settings import Rate
from bayesfed.steps import optimizer
from bayesfed.steps.control_variates import controls, expectation
from bayesfed.steps.gradients import copies, gradients, leaves
from bayesfed.steps.job import INFORMATION, SINGLE, Job, Work
from bayesfed.steps.optimizer import State
from bayesfed.steps.single import FEW, WEAKEST, as_vectors, dimensions, in_units
from bayesfed.steps.steps import Inputs, Steps
from bayesfed.steps.variational_em import VariationalEM
from bayesfed.tracing.compiler import traceable

ACCEPTED, ADAPTED = 0.6, 0.1
"""The fraction of proposals to accept (Roberts & Rosenthal 1998), and how far one proposal moves the log step."""
SHARE = 0.5
"""How much a round's draws count beside those of all rounds before, at the first rate."""
NARROW = 1e-5
"""The standard deviation of a Normal that is in place of a draw."""
MOVES, BURNT, THIN = 100, 20, 2
"""The moves of a chain for a Newton step, those that are left out at first, and one in how many gives derivatives."""
_EM = VariationalEM(optimizer="adam")


@dataclass(frozen=True)
class LangevinEM(Steps):
    """Moves of a Langevin chain on w_i (MALA), each followed by a step on the client's copy of the body.

    Attributes:
        steps: moves of the chain in a round.
        body_lr: as that of :class:`~bayesfed.steps.VariationalEM`.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> algorithm = bf.FedPop(local_steps=5)
        >>> posterior = bf.fit(models.eight_schools, datasets.eight_schools(), algorithm, rounds=2)
        >>> posterior.sample(100)["theta"].shape
        torch.Size([100, 8])
    """

    steps: int = 20
    body_lr: Rate = 0.02
    gives = frozenset({"theta", "posterior", "squares", INFORMATION})
    needs = frozenset({"squares"})
    globals = (Point,)
    locals = (Kept,)
    kinds = ("normal",)
    moved = frozenset({"globals", "locals"})

    def start_clients(
        self, program: Program, theta: Params, batch: Batch, locals_: Locals
    ) -> State:
        """Return q(w_i), a chain that starts at its centre, and the logarithm of the chain's step."""
        return start_of_chain(
            program, locals_.begin(program, copies(theta, len(batch)), batch), batch
        )

    def run(self, job: Job, locals_: Locals) -> Work:
        """Move the chains, and the clients' copies of the body."""
        if SINGLE in job.message:
            return self.single(job)
        program, theta, client = job.program, copies(job.theta, len(job)), job.clients
        others = closed_forms(program).others(theta)
        body = optimizer.begin("sgd", {name: theta[name] for name in others})
        squares = {name: torch.zeros_like(job.counts) for name in others}
        at, zero = theta | client["params"], centre_noise(program, job.keys, 1, local=True)
        rates, before, path = (job.rate * self.body_lr,), job.message.get("squares", {}), []
        root = q_root(program, at)
        for number in range(self.steps):
            client = self.next(job, at, client, number, root)
            path.append(client["chain"])
            if others:
                here = at | normal_at(program, client["chain"], NARROW)
                given = Inputs(job.rows(number), rates, constants=before)
                body, found = _EM.m_step(program, here, body, given, zero)
                squares = {n: v + found[n] / self.steps for n, v in squares.items()}
        own = client["params"] | blended(
            program, client["params"], _moments(path), SHARE * job.rate
        )
        client = _EM.with_own_spreads(program, theta, client | {"params": own}, job.rows(0))
        own = client["params"]
        with torch.no_grad():
            supplied = program.noise(job.keys, 1, local=True)
            term = _EM.term(program, theta | body["params"] | own, job.rows(0), supplied)
        squares = {name: value[:, None] for name, value in squares.items()}
        parts = {"theta": body["params"], "posterior": own, "squares": squares, INFORMATION: {}}
        return Work(parts, term, client)

    def gradient_of(self, program: Program) -> list[str] | None:
        """Return all of θ; None where a client has its own ρ_i."""
        return None if closed_forms(program).own else list(program.init)

    def single(self, job: Job) -> Work:
        """Move the chains, θ as it is; give a single step on θ along the mean gradient, and the information."""
        program, theta, client = job.program, copies(job.theta, len(job)), job.clients
        at, zero = theta | client["params"], centre_noise(program, job.keys, 1, local=True)
        path, rows = [], job.rows(0)
        root = (
            self.metric(program, at, client["chain"], rows, zero)
            if dimensions(program) <= FEW
            else q_root(program, at)
        )
        for number in range(MOVES):
            client = self.next(job, at, client, number, root)
            path.append(client["chain"])
        path = path[BURNT::THIN]
        found = [self.derivatives(program, theta, w, rows, zero) for w in path]
        value, score, hessian, slope = (torch.stack(part) for part in zip(*found, strict=True))
        w = torch.stack([_flat(each) for each in path])
        unit = w.std(0).clamp(min=NARROW)
        terms = controls((w - w.mean(0)) / unit, job.counts[:, None] * slope * unit)
        mean, counts = expectation(score, terms), job.counts[:, None, None]
        away = (score - mean)[..., None]
        squares = (counts * away @ away.mT).flatten(2)
        information = expectation(-hessian.flatten(2) - squares, terms).reshape(hessian.shape[1:])
        centre = expectation(w, terms)
        spread = expectation((w - centre).square(), terms).clamp(min=NARROW**2)
        means, variances = (_split(x, path[0]) for x in (centre, spread))
        drawn = {name: (value, variances[name]) for name, value in means.items()}
        gain = float(job.message[SINGLE]["gain"])
        own = client["params"] | blended(program, client["params"], drawn, gain)
        narrower = sum(
            (q.scale / NARROW).log().flatten(1).sum(1) for q in program.guide.moments(own).values()
        )
        x, values = as_vectors(program, theta)
        parts = {
            "theta": values(x + mean[:, None]),
            "posterior": own,
            "squares": {},
            INFORMATION: {"theta": information},
        }
        value = expectation(value[..., None], terms).squeeze(1)
        return Work(parts, job.counts * value + narrower, client | {"params": own})

    @traceable
    def derivatives(
        self, program: Program, theta: Params, w: Params, batch: Batch, zero: Noise
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return log p(D_i, w_i | θ) and a share of log p(θ), per row, with derivatives: two in θ, one in w_i, flat."""
        own = leaves(w)

        def loss(theta: Params) -> Tensor:
            at = theta | normal_at(program, own, NARROW)
            return _EM.loss(program, at, batch, zero, hyper=1 / program.clients)

        gain, x, _ = in_units(program, loss, theta)
        x = x.requires_grad_()
        value = gain(x[None])[0]
        score = attached_gradient(value, x)
        hessian = jacobian(score, x).detach().squeeze(1)
        slope = _flat(gradients(value, own))
        return value.detach(), score.detach().squeeze(1), hessian, slope

    def next(self, job: Job, at: Params, client: State, number: int, root: Tensor) -> State:
        """Return the clients with their chains moved by one step, accepted or not.

        Args:
            job: the clients.
            at: the parameters at which they are.
            client: their states.
            number: of the step.
            root: C of the precision C Cᵀ by which steps are scaled: of :meth:`metric`, or of :func:`q_root`.
        """
        keys = noise.fold(job.keys, number)
        supplied = job.program.noise(keys, 1, local=True)
        dice = noise.uniform(noise.fold(keys, noise.word("accept"))).to(job.counts)
        chain, log_step = client["chain"], client["step"]["log"]
        given = Inputs(job.rows(number), constants={"root": root})
        chain, log_step = self.move(job.program, at, chain, log_step, given, supplied, dice)
        return client | {"chain": chain, "step": {"log": log_step}}

    @traceable
    def metric(
        self, program: Program, at: Params, chain: Params, batch: Batch, zero: Noise
    ) -> Tensor:
        """Return C ``(K, 1, P, P)`` of the precision C Cᵀ of w_i where the chains are, in units of the priors."""
        gain, w, _ = in_units(program, lambda w: -log_joint(program, at, w, batch, zero), chain)
        precision = magnitude(-curvature(gain, w)[1].detach(), torch.full_like(w, WEAKEST))
        return torch.linalg.cholesky(precision)

    @traceable
    def move(
        self,
        program: Program,
        at: Params,
        chain: Params,
        log_step: Tensor,
        given: Inputs,
        supplied: Noise,
        dice: Tensor,
    ) -> tuple[Params, Tensor]:
        """Take one step of MALA; return the chains and their log steps."""
        root, step = given.constants["root"], log_step.exp()[:, None, None]
        xi = _flat({name: parts[0].squeeze(0) for name, parts in supplied.items()})[:, None]
        zero = {
            name: [torch.zeros_like(part) for part in parts] for name, parts in supplied.items()
        }
        gain, w, values = in_units(
            program, lambda w: -log_joint(program, at, w, given.batch, zero), chain
        )

        def drift(w: Tensor) -> tuple[Tensor, Tensor]:
            (own,) = leaves({"w": w}).values()
            value = gain(own[None])[0]
            slope = solve_root(root, gradients(value, {"w": own})["w"])
            return value.detach(), step.square() / 2 * solve_root(root, slope, transposed=True)

        here, forth = drift(w)
        there = w + forth + step * solve_root(root, xi, transposed=True)
        value, back = drift(there)
        way = w - there - back
        again = (times(root.mT, way) if root.ndim > way.ndim else root * way) / step
        log_ratio = value - here + (xi.square() - again.square()).sum((1, 2)) / 2
        chance = log_ratio.nan_to_num(-torch.inf, torch.inf, -torch.inf).clamp(max=0.0).exp()
        moved = optimizer.where_active(chain, values(there), dice < chance)
        return moved, log_step + ADAPTED * (chance - ACCEPTED)

    def adapt(self, job: Job, theta: Params, own: Params, steps: int, lr: float | None) -> Params:
        """Return q(w_i) with the moments of the last two thirds of a chain."""
        client, path = start_of_chain(job.program, own, job.rows(0)), []
        root = q_root(job.program, own)
        for number in range(steps):
            client = self.next(job, theta | own, client, number, root)
            path.append(client["chain"])
        return own | blended(job.program, own, _moments(path[steps // 3 :]), 1.0) if path else own


def start_of_chain(program: Program, params: Params, batch: Batch) -> State:
    """Return the state of K clients whose chains start at the centre of q(w_i)."""
    chain = {name: at.loc.clone() for name, at in program.guide.moments(params).items()}
    return {"params": params, "chain": chain, "step": {"log": torch.zeros_like(batch.rows)}}


def q_root(program: Program, params: Params) -> Tensor:
    """Return the diagonal C ``(K, 1, P)`` of the precision C Cᵀ of q(w_i), in units of the priors."""
    scales = {name: q.scale for name, q in program.guide.moments(params).items()}
    return 1 / as_vectors(program, scales)[0]


def normal_at(program: Program, w: Params, scale: float) -> Params:
    """Return the parameters of a Normal around w."""
    found = {name: Moments(v, torch.full_like(v, scale), True) for name, v in w.items()}
    return dict(program.guide.at(found))


def log_joint(program: Program, at: Params, w: Params, batch: Batch, zero: Noise) -> Tensor:
    """Return log p(D_i, w_i | θ) at unconstrained w_i, ``(K,)``, up to a constant."""
    return client_terms(program, at | normal_at(program, w, 1.0), {}, batch, zero, 1)[0]


def blended(
    program: Program, params: Params, drawn: Mapping[str, tuple[Tensor, Tensor]], share: float
) -> Params:
    """Return q(w_i) with the moments before by 1 − ``share``, and the means and variances of draws by ``share``."""
    found = {}
    for name, (loc, scale, _) in program.guide.moments(params).items():
        centre, variance = drawn[name]
        mean = loc.lerp(centre, share)
        square = (scale.square() + (loc - mean).square()).lerp(
            variance + (centre - mean).square(), share
        )
        found[name] = Moments(mean, square.clamp(min=NARROW**2).sqrt(), True)
    return dict(program.guide.at(found))


def _moments(path: Sequence[Params]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the means and variances of draws."""
    drawn = {name: torch.stack([w[name] for w in path]) for name in path[0]}
    return {name: (w.mean(0), w.var(0, correction=0)) for name, w in drawn.items()}


def _flat(w: Params) -> Tensor:
    """Return K clients' variables as vectors ``(K, P)``."""
    return torch.cat([value.flatten(1) for value in w.values()], 1)


def _split(vectors: Tensor, like: Params) -> dict[str, Tensor]:
    """Return vectors ``(K, P)`` as variables."""
    parts = vectors.split([value[0].numel() for value in like.values()], 1)
    return {n: part.reshape(v.shape) for (n, v), part in zip(like.items(), parts, strict=True)}
