"""A client's part of expectation maximisation by Markov chains (FedPop).

    θ maximises  log p(θ) + Σ_i log ∫ p(D_i | w, θ) p(w | θ) dw                     (Kotelevskii et al. 2022, eq. 2)
    client i     moves a chain on p(w_i | D_i, θ), θ as it was sent, and its copy of what has no closed form in the
                 server's M-step along ∇_θ log p(D_i, w_i | θ), whose mean over the chain is that of the marginal
                 likelihood (Fisher's identity)
    server       takes the M-step of :mod:`bayesfed.rules.m_step` on moments of the chains

q(w_i) is the Normal with the chain's mean and variance, in which a round counts for less as rates fall: stochastic
approximation EM (Delyon, Lavielle & Moulines 1999). The posterior's draws of w_i are q's.

Two things differ from the paper. Its chains are unadjusted, and biased by their step size; these are accepted or
rejected, and each client adapts its step. In minibatches the density is that of the minibatch, so that a chain is too
wide: take all rows where memory allows. And the paper takes gradient steps on the parameters of the prior too.
"""

from __future__ import annotations

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
from bayesfed.settings import Rate
from bayesfed.steps import optimizer
from bayesfed.steps.gradients import copies, gradients, leaves
from bayesfed.steps.job import Job, Work
from bayesfed.steps.losses import per_client
from bayesfed.steps.optimizer import State
from bayesfed.steps.steps import Inputs, Steps
from bayesfed.steps.variational_em import VariationalEM
from bayesfed.tracing.compiler import traceable

ACCEPTED, ADAPTED = 0.6, 0.1
"""The fraction of proposals to accept (Roberts & Rosenthal 1998), and how far one proposal moves the log step."""
SHARE = 0.5
"""How much a round's draws count beside those of all rounds before, at the first rate."""
NARROW = 1e-5
"""The standard deviation of a Normal that is in place of a draw."""
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
    gives = frozenset({"theta", "posterior", "squares"})
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
        program, theta, client = job.program, copies(job.theta, len(job)), job.clients
        others = closed_forms(program).others(theta)
        body = optimizer.begin("sgd", {name: theta[name] for name in others})
        squares = {name: torch.zeros_like(job.counts) for name in others}
        at, zero = theta | client["params"], centre_noise(program, job.keys, 1, local=True)
        rates, before, path = (job.rate * self.body_lr,), job.message.get("squares", {}), []
        for number in range(self.steps):
            client = self.next(job, at, client, number)
            path.append(client["chain"])
            if others:
                here = at | normal_at(program, client["chain"], NARROW)
                given = Inputs(job.rows(number), rates, constants=before)
                body, found = _EM.m_step(program, here, body, given, zero)
                squares = {n: v + found[n] / self.steps for n, v in squares.items()}
        own = client["params"] | blended(program, client["params"], path, SHARE * job.rate)
        client = _EM.with_own_spreads(program, theta, client | {"params": own}, job.rows(0))
        own = client["params"]
        with torch.no_grad():
            supplied = program.noise(job.keys, 1, local=True)
            term = _EM.term(program, theta | body["params"] | own, job.rows(0), supplied)
        squares = {name: value[:, None] for name, value in squares.items()}
        parts = {"theta": body["params"], "posterior": own, "squares": squares}
        return Work(parts, term, client)

    def next(self, job: Job, at: Params, client: State, number: int) -> State:
        """Return the clients with their chains moved by one step, accepted or not."""
        keys = noise.fold(job.keys, number)
        supplied = job.program.noise(keys, 1, local=True)
        dice = noise.uniform(noise.fold(keys, noise.word("accept"))).to(job.counts)
        chain, log_step = client["chain"], client["step"]["log"]
        inputs = Inputs(job.rows(number))
        chain, log_step = self.move(job.program, at, chain, log_step, inputs, supplied, dice)
        return client | {"chain": chain, "step": {"log": log_step}}

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
        """Take one step of MALA in units of q's standard deviations; return the chains and their log steps."""
        unit, step = program.guide.moments(at), log_step.exp()
        size = {name: per_client(step, v) * unit[name].scale for name, v in chain.items()}
        xi = {name: parts[0].squeeze(0) for name, parts in supplied.items()}
        zero = {
            name: [torch.zeros_like(part) for part in parts] for name, parts in supplied.items()
        }

        def slopes(w: Params) -> tuple[Tensor, Params]:
            own = leaves(w)
            value = log_joint(program, at, own, given.batch, zero)
            return value.detach(), gradients(value, own)

        here, slope = slopes(chain)
        drift = {name: v + size[name].square() / 2 * slope[name] for name, v in chain.items()}
        there = {name: v + size[name] * xi[name] for name, v in drift.items()}
        value, slope = slopes(there)
        log_ratio = value - here
        for name, v in there.items():
            back = (chain[name] - v - size[name].square() / 2 * slope[name]) / size[name]
            log_ratio = log_ratio + (xi[name].square() - back.square()).flatten(1).sum(1) / 2
        chance = log_ratio.nan_to_num(-torch.inf, torch.inf, -torch.inf).clamp(max=0.0).exp()
        moved = optimizer.where_active(chain, there, dice < chance)
        return moved, log_step + ADAPTED * (chance - ACCEPTED)

    def adapt(self, job: Job, theta: Params, own: Params, steps: int, lr: float | None) -> Params:
        """Return q(w_i) with the moments of the last two thirds of a chain."""
        client, path = start_of_chain(job.program, own, job.rows(0)), []
        for number in range(steps):
            client = self.next(job, theta | own, client, number)
            path.append(client["chain"])
        return own | blended(job.program, own, path[steps // 3 :], 1.0) if path else own


def start_of_chain(program: Program, params: Params, batch: Batch) -> State:
    """Return the state of K clients whose chains start at the centre of q(w_i)."""
    chain = {name: at.loc.clone() for name, at in program.guide.moments(params).items()}
    return {"params": params, "chain": chain, "step": {"log": torch.zeros_like(batch.rows)}}


def normal_at(program: Program, w: Params, scale: float) -> Params:
    """Return the parameters of a Normal around w."""
    found = {name: Moments(v, torch.full_like(v, scale), True) for name, v in w.items()}
    return dict(program.guide.at(found))


def log_joint(program: Program, at: Params, w: Params, batch: Batch, zero: Noise) -> Tensor:
    """Return log p(D_i, w_i | θ) at unconstrained w_i, ``(K,)``, up to a constant."""
    return client_terms(program, at | normal_at(program, w, 1.0), {}, batch, zero, 1)[0]


def blended(program: Program, params: Params, path: list[Params], share: float) -> Params:
    """Return q(w_i) of moments that are those before by 1 − ``share``, and of draws by ``share``."""
    found = {}
    for name, (loc, scale, _) in program.guide.moments(params).items():
        drawn = torch.stack([w[name] for w in path])
        mean = loc.lerp(drawn.mean(0), share)
        square = (scale.square() + (loc - mean).square()).lerp(
            (drawn - mean).square().mean(0), share
        )
        found[name] = Moments(mean, square.clamp(min=NARROW**2).sqrt(), True)
    return dict(program.guide.at(found))
