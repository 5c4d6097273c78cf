"""pFedVEM: personal variables whose closeness to the common ones every client decides by its own uncertainty.

    p(w_i | θ) = N(m, ρ_i² I),   q(w_i) = N(μ_i, diag s_i²) = N(μ_i, Σ_i)                 (Zhu et al. 2023, eq. 5)

    server    sends θ: m, and what all clients share (the body)
    client i  M-step  ρ_i² = (tr Σ_i + ‖μ_i − m‖²) / D
              E-step  steps on (μ_i, s_i), downhill in −E_q[log p(D_i | w_i, θ)] + λ KL(q(w_i) ‖ p(w_i | θ))
              M-step  steps on its copy of the body, downhill in the same
              keeps q(w_i) and ρ_i; uploads (τ_i μ_i, τ_i) with τ_i = 1 / ρ_i², and (n_i body_i, n_i)
    server    M-step  m ← Σ τ_i μ_i / Σ τ_i (eq. 7);  body ← Σ n_i body_i / Σ n_i

An uncertain or outlying client has a large ρ_i: it pulls m less and is pulled less.

That is variational EM for any hierarchical model, its M-step as exact as the structure of the local priors lets it be:

- m: a parameter that is the location of Normal priors, and nothing else: eq. 7. (What is summed is τ_i (μ_i − m), and
  the result added to m: the same number, with less round-off.)
- ρ_i, a client's own: as above, before the E-step, as in the authors' code.
- ρ, one for all: ρ² = Σ_i (tr Σ_i + ‖μ_i − m‖²) / (N D) at the server, from Σ_i τ (tr Σ_i + ‖μ_i − m‖²); one that is
  fixed stays, and so does any where q(w_i) is a point, whose density has no maximum in it.
- Where θ has a prior, m and ρ are at the maximum of  log p(θ) + λ (N / K) Σ_i E_q[log p(w_i | θ)], a function of the
  same sums, which the server finds by L-BFGS from the closed form.
- All other θ, the body: slopes, noise, shared layers, what a local prior that is not Normal stands on: the gradient
  steps above, with log p(θ) / N added. Gradients are divided by their root mean square over the clients of the rounds
  before, one number for each parameter, which the server keeps: steps fit any unit, as Adam's do, but as it is the
  same number for all clients they still pull by the size of their gradients, so that where steps end is the maximum.

As in the paper q(w_i) has no correlations, and where rows make them (an intercept with a slope) its variances, and ρ
with them, come out too small: in ``varying_slope`` on Grunfeld's firms a slope's ρ is .033 after 200 rounds and .013 in
the end, where the exact marginal likelihood under the same priors has its maximum at .18. A fit warns of that.

The authors' code lets every client train in every round and a random tenth of them upload: that is
``clients_per_round=1.0`` with ``upload_fraction=0.1``. ``clients_per_round=0.1`` alone trains the cohort only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bayesfed.algorithms.m_step import (
    closed_forms,
    m_step_in_closed_form,
    m_step_of_own,
    m_step_under_prior,
    statistics,
)
from bayesfed.algorithms.protocol import WEIGHT, Algorithm, Turn, Upload, mean, weighted
from bayesfed.data.batch import Batch
from bayesfed.data.federation import Federation, Model
from bayesfed.elbo import noise
from bayesfed.elbo.build import build
from bayesfed.elbo.elbo import Noise, client_losses
from bayesfed.elbo.program import Params, Program
from bayesfed.guides.factorised import factorised
from bayesfed.settings import Rate, Times
from bayesfed.steps import optimizer
from bayesfed.steps.gradients import copies, gradients, leaves
from bayesfed.steps.job import Job, Work
from bayesfed.steps.optimizer import State
from bayesfed.steps.point_estimates import against, centre
from bayesfed.tracing.compiler import traceable

LONGEST = 3.0
"""No step on the body is longer than so many of its rate."""


@dataclass(frozen=True)
class PFedVEM(Algorithm):
    """Personalised federated learning with variational expectation maximisation, and its point versions.

    Attributes:
        point: q(w_i) is a point instead of Normals: pFedMAP, mean-regularised multi-task learning.
        head_epochs: E-step: passes over the rows in a round.
        body_epochs: M-step: passes for the client's copy of the body, with w_i drawn from q.
        head_steps: steps of the E-step in minibatches, in place of ``head_epochs``.
        body_steps: likewise for the body.
        lr: rate for q(w_i), in the mean over rows of the negative ELBO term.
        body_lr: rate for the body: how far a parameter moves in a step whose gradient is as large as those of all
            clients are on average.
        optimizer: of q(w_i): ``"adam"``, ``"momentum"`` or ``"sgd"``; its state stays with the client.
        lr_decay: what is left of the rates in the last round, on half a cosine.
        kl_weight: λ.
        draws: draws of w_i per step.
        init_scale: standard deviation of q(w_i) at the start.
        upload_fraction: which part of the cohort uploads, drawn at random each round.
        personal_steps: steps in which a client that took no part makes its q(w_i), ρ_i anew before each.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> train, test = datasets.digits(clients=5)
        >>> model = models.Network(models.mlp(64, 10), spread="client")
        >>> posterior = bf.fit(model, train, bf.PFedVEM(), rounds=5, batch_size=10)
        >>> accuracy = (posterior.probabilities(test)["y"].argmax(1) == test["y"]).float().mean()
        >>> bool(accuracy > 0.9)
        True
    """

    point: bool = False
    head_epochs: Times = 5
    body_epochs: Times = 5
    head_steps: int | None = None
    body_steps: int | None = None
    lr: Rate = 0.01
    body_lr: Rate = 0.02
    optimizer: str = "adam"
    lr_decay: Rate = 0.1
    kl_weight: float = 1.0
    draws: int = 5
    init_scale: Rate = 0.3
    upload_fraction: float = 1.0
    personal_steps: Times = 50

    no_noise = "its rule divides a sum by a sum of confidences, both noisy: use FedABML, or Ditto for points"

    def __post_init__(self) -> None:
        if not 0 < self.upload_fraction <= 1:
            raise ValueError(f"upload_fraction is {self.upload_fraction}; it lies in (0, 1]")
        optimizer.check_rules(optimizer=self.optimizer)

    def program(self, model: Model, federation: Federation) -> Program:
        """The model with a point for θ and a factorised q(w_i)."""
        guide = factorised(model, federation, local_point=self.point, scale=self.init_scale)
        return build(model, guide, federation)

    def start(self, program: Program) -> State:
        """θ, and mean squares of gradients that are not known yet."""
        theta = super().start(program)
        body = closed_forms(program).others(theta)
        return {"theta": theta, "square": {name: theta[name].new_zeros(()) for name in body}}

    def broadcast(self, turn: Turn, server: State) -> Params:
        """θ and the mean squares."""
        return server["theta"] | {f"{name}: square": v for name, v in server["square"].items()}

    def params(self, server: State) -> Params:
        """θ."""
        return server["theta"]

    def start_clients(self, program: Program, server: State, batch: Batch) -> State:
        """Every q(w_i) at the centre of its prior."""
        return self.at_centre(program, server["theta"], batch)

    def at_centre(self, program: Program, theta: Params, batch: Batch) -> State:
        """States of K clients whose q(w_i) is at the centre of its prior."""
        theta, local = copies(theta, len(batch)), program.init_locals(batch)
        at, scales = centre(program, theta | local, batch), program.guide.log_scales
        local |= {name: v.detach().clone() for name, v in at.items() if name not in scales}
        return optimizer.begin(self.optimizer, local, rows=len(batch))

    def work(self, job: Job) -> Work:
        """The M-step for ρ_i, the E-step, and the M-step for the body of K clients."""
        program, size, first = job.program, len(job), job.rows(0)
        known = closed_forms(program)
        theta = copies({name: job.message[name] for name in program.init}, size)
        body = {name: theta[name] for name in known.others(theta)}
        state = self.own_spreads(program, theta, job.clients, first)
        if program.locals:
            for step, active in enumerate(self.schedule(job, self.head_epochs, self.head_steps)):
                supplied, lr = self.noise(program, job.keys, step), job.rate * self.lr
                state = self.e_step(program, theta, state, job.rows(step), supplied, active, lr)
        squares: Params = {}
        if body:
            moving = optimizer.begin("sgd", body)
            before = {n: job.message[f"{n}: square"] for n in body}
            schedule = self.schedule(job, self.body_epochs, self.body_steps)
            squares = {n: torch.zeros_like(job.counts) for n in body}
            for step, active in enumerate(schedule):
                supplied, lr = self.noise(program, job.keys, -1 - step), job.rate * self.body_lr
                phi, batch = state["params"], job.rows(step)
                moving, found = self.m_step(
                    program, theta, moving, phi, before, batch, supplied, active, lr
                )
                squares = {n: v + active * found[n] / schedule.sum(0) for n, v in squares.items()}
            body = moving["params"]
        with torch.no_grad():
            supplied = program.noise(job.keys, 1, local=True)
            term = self.term(program, theta | body | state["params"], first, supplied)
        squares = {f"{name}: square": v[:, None] for name, v in squares.items()}
        return Work(body | squares, term, state)

    def own_spreads(self, program: Program, theta: Params, state: State, batch: Batch) -> State:
        """The clients' states with their ρ_i in closed form; a point has none."""
        own = {} if self.point else closed_forms(program).own
        if not own:
            return state
        with torch.no_grad():
            new = m_step_of_own(program, own, theta, state["params"], batch)
        return state | {"params": state["params"] | new}

    @traceable
    def e_step(
        self,
        program: Program,
        theta: Params,
        state: State,
        batch: Batch,
        supplied: Noise,
        active: Tensor,
        lr: float,
    ) -> State:
        """One step of each client's q(w_i), and of variables of its own that have no closed form."""
        params = state["params"]
        own = leaves({n: v for n, v in params.items() if n not in closed_forms(program).own})
        loss = self.loss(program, theta | params | own, batch, supplied)
        grads = {name: torch.zeros_like(value) for name, value in params.items()}
        return optimizer.descend(self.optimizer, state, grads | gradients(loss, own), lr, active)

    @traceable
    def m_step(
        self,
        program: Program,
        theta: Params,
        body: State,
        phi: Params,
        before: Params,
        batch: Batch,
        supplied: Noise,
        active: Tensor,
        lr: float,
    ) -> tuple[State, Params]:
        """One step of each client's copy of the body, and its gradients' mean squares ``(K,)``."""
        own = leaves(body["params"])
        loss = self.loss(program, theta | own | phi, batch, supplied, hyper=1 / program.clients)
        grads = gradients(loss, own)
        squares = {n: g.square().flatten(1).mean(1) for n, g in grads.items()}
        for name, grad in grads.items():
            square = torch.where(before[name] > 0, before[name], squares[name])
            unit = square.clamp(min=1e-30).sqrt()
            grads[name] = (grad / against(unit, grad)).clamp(-LONGEST, LONGEST)
        return optimizer.descend("sgd", body, grads, lr, active), squares

    def loss(
        self,
        program: Program,
        params: Params,
        batch: Batch,
        supplied: Noise,
        hyper: float = 0.0,
    ) -> Tensor:
        """Each client's negative ELBO term over its rows, the KL weighed by λ, with a share of −log p(θ): ``(K,)``."""
        losses = client_losses(program, params, batch, supplied, self.drawn)
        total = losses.nll + self.kl_weight * losses.divergence
        return (total + hyper * losses.hyper if hyper else total) / losses.rows

    @traceable
    def term(self, program: Program, params: Params, batch: Batch, supplied: Noise) -> Tensor:
        """K clients' ELBO terms, with one draw: ``(K,)``."""
        losses = client_losses(program, params, batch, supplied, 1)
        return -(losses.nll + losses.divergence)

    def schedule(self, job: Job, epochs: int, steps: int | None) -> Tensor:
        """Which clients take each step, ``(steps, K)``."""
        return job.rows.schedule(epochs, steps).to(job.keys.device)

    def noise(self, program: Program, keys: Tensor, step: int) -> Noise:
        """What the draws of one step need; a point needs nothing."""
        return program.noise(noise.fold(keys, step), self.drawn, local=True)

    @property
    def drawn(self) -> int:
        """Draws of w_i per step; a point needs one."""
        return 1 if self.point else self.draws

    def encode(self, job: Job, work: Work) -> Upload:
        """The sums that m and ρ follow from, and (n_i body_i, n_i), of those who upload."""
        dice = noise.uniform(noise.fold(job.keys, noise.word("upload")))
        chosen = (dice < self.upload_fraction).to(job.counts)
        theta = copies({n: job.message[n] for n in job.program.init}, len(job)) | work.found
        with torch.no_grad():
            sums = statistics(job.program, theta, work.clients["params"], job.rows(0))
        upload = {name: against(chosen, v) * v for name, v in sums.items()}
        if work.found:
            upload |= weighted(work.found, chosen * job.counts)
        return upload | {"uploads": chosen}

    def decode(self, turn: Turn, server: State, total: Upload) -> tuple[State, Tensor]:
        """The next θ; as it was where nobody has uploaded."""
        program, known, theta = turn.program, closed_forms(turn.program), server["theta"]
        if not total["uploads"] > 0:
            return server, torch.zeros(())
        body, new, squares = known.others(theta), dict(theta), server["square"]
        if body:
            named = [*body, *(f"{name}: square" for name in body), WEIGHT]
            found = mean(turn, {name: total[name] for name in named})
            new |= {name: found[name] for name in body}
            squares = {
                name: _remembered(before, found[f"{name}: square"])
                for name, before in squares.items()
            }
        new |= m_step_in_closed_form(known, theta, total, spreads=not self.point)
        learnt = [*known.centres, *(() if self.point else known.spreads)]
        if learnt and program.globals:
            weight = self.kl_weight * program.clients / total["uploads"]
            new |= m_step_under_prior(program, learnt, theta, new, total, weight)
        return {"theta": new, "square": squares}, torch.zeros(())

    def personalize(self, job: Job, steps: int | None = None, lr: float | None = None) -> Params:
        """q(w_i) of K clients that took no part: the E-step from the centre, ρ_i in closed form before each step."""
        program, first = job.program, job.rows(0)
        theta, state = (
            copies(job.message, len(job)),
            self.at_centre(program, job.message, first),
        )
        active = torch.ones(len(job), dtype=torch.bool, device=job.keys.device)
        for step in range(self.personal_steps if steps is None else steps):
            state = self.own_spreads(program, theta, state, first)
            supplied, rate = self.noise(program, job.keys, step), self.lr if lr is None else lr
            state = self.e_step(program, theta, state, job.rows(step), supplied, active, rate)
        return state["params"]


def _remembered(before: Tensor, now: Tensor) -> Tensor:
    """A running mean over rounds, of about two."""
    return torch.where(before > 0, (before + now) / 2, now)
