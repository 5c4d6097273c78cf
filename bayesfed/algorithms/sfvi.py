"""SFVI: structured federated variational inference, for any model/guide pair.

Maximises  E_q[log p(θ) − log q(θ)] + Σ_i E_q[log p(w_i, D_i | θ) − log q(w_i | θ)]  over the server's
parameters λ of q(θ) and every client's φ_i of q(w_i | θ) (Hassan, Salomone & Mengersen 2023, *Federated
variational inference methods for structured latent variable models*).

    server    sends draws θ = T_λ(ε), and the global parameters that a client reads directly
    client i  moves φ_i with its closed form (elbo/laplace.py), takes Adam steps on it, and makes of the
              gradients of its term in the draws a site, ∇f_i(z) ≈ h_i + H_i z; uploads by how much that has changed
    server    keeps Σ_i h_i and Σ_i H_i, adds its own term's, and takes a natural-gradient step on λ (elbo/natural.py)

The paper's client uploads the gradient in λ; the chain rule splits it at θ, so that what a client uploads does not
depend on the size of λ. Of λ itself it only reads where q(θ) lies. φ_i never leaves the client.

The steps are Newton's where q(θ) is Gaussian, of rate 1 at first: as long as one goes on where the last one went,
there is way to go; each time one goes back, noise has the upper hand, and the rate falls (Kesten 1958, *Accelerated
stochastic approximation*).

Under partial participation what clients said at their last visit stands, and those who have not been seen are taken to
be like those who have. But a site is made where q(θ) lies, and may say little of where q(θ) has gone since. What two
cohorts say differs by √(2 D N / K) standard deviations of q(θ) where all is well. Where what a cohort says moves a step
by more, d of them, all sites keep exp(1 − d² K / (2 D N)) of their weight: first steps rest on the last cohorts, sites
of quadratics are kept, and in the end nothing is forgotten.

What has no Gaussian takes Adam's steps along gradients: a Flow's spline, a guide of one's own, a model's global
``pyro.param``, which are points. There clients upload, for each draw, what their site does not say of the gradient
(for a guide of one's own the mean gradient that it sent last), of which the server takes N / K times the sum:
unbiased, and less noisy as clients differ less in how they change than in where they are (SAGA; Defazio, Bach &
Lacoste-Julien 2014, eq. 1). With all clients in every round nothing is different.

Where the sum is noisy, what the server keeps would add up the noise of all rounds, and a clipped change would not
be what the client remembers. Then clients upload the gradients themselves and remember nothing: the cohort's sum
times N / K is unbiased.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesfed.algorithms.protocol import Turn, Upload
from bayesfed.algorithms.structured import (
    Structured,
    begun,
    family_of,
    hierarchical,
    local_steps,
    moved,
)
from bayesfed.data.batch import Batch
from bayesfed.data.federation import Federation, Model
from bayesfed.elbo import noise
from bayesfed.elbo.build import build
from bayesfed.elbo.elbo import Noise, draw, server_pass
from bayesfed.elbo.program import Params, Program
from bayesfed.guides import natural_gradient
from bayesfed.guides.family import GLOBAL
from bayesfed.guides.flow import Flow
from bayesfed.guides.full_rank import FullRank
from bayesfed.guides.mean_field import MeanField
from bayesfed.guides.natural_gradient import Direction, QuadraticTerm
from bayesfed.steps import optimizer
from bayesfed.steps.gradients import gradients, leaves
from bayesfed.steps.job import Job, Work
from bayesfed.steps.optimizer import State
from bayesfed.tracing.compiler import traceable

PULL, SLOPE, SEEN = f"{GLOBAL}.pull", f"{GLOBAL}.slope", f"{GLOBAL}.seen"
"""A client's site, or the sum over clients; and whether, or how many, have been seen."""
LEVEL = f"{GLOBAL}.level"
"""How much has been forgotten until now, or until the client's last visit: −log of the weight that a first site has."""
FORGOTTEN = 4.0
"""The most that a round adds to it: of a thousand clients, ten a round, one run in 32 lost its way without a bound."""
TURN = 0.25
"""What a turn adds to what the first rate is divided by: 1 + turns / 4."""


@dataclass(frozen=True)
class SFVI(Structured):
    """Structured federated variational inference, any model.

    Attributes:
        global_guide: family of the globals: MeanField, FullRank or Flow. By default full rank where the
            model has at most 100 global dimensions, else mean-field, with a warning.
        conditioned: whether local variables are conditioned on the globals (see
            :class:`~bayesfed.guides.Hierarchical`). By default up to 50 global dimensions.
        guide: a Pyro guide of your own instead of both.
        local_steps: Adam steps on φ_i per round.
        draws: S, ELBO draws per step; more where q(θ) has correlations and more dimensions than a round has pairs of
            draws, since a step needs the curvature in all of them.
        lr: the first rate of natural-gradient steps on a Gaussian q(θ); a twentieth of it is Adam's, on what else
            there is (point globals, a guide of your own). A Flow's affine part takes natural-gradient steps
            in the first half of the rounds, the spline resting; then all of it takes Adam's.
        local_lr: the clients' Adam rate.
        lr_decay: all rates fall, as half a cosine, to this fraction of their start.
        corrected: in the end all clients weigh draws around q(θ), which then stand for it, where it is some way from
            the posterior and their weights can tell (see :mod:`bayesfed.output.correction`).

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> bf.fit(models.eight_schools, datasets.eight_schools(), bf.SFVI(global_guide=bf.Flow()), rounds=2)
        Posterior: SFVI (Flow globals, conditioned locals), 2 rounds, 8 clients; globals mu, tau; locals theta
        2 rounds are too few to tell whether the fit still moves
    """

    global_guide: MeanField | FullRank | Flow | None = None
    conditioned: bool | None = None
    guide: Callable[[Any], Any] | None = None
    local_steps: int = 10
    draws: int = 16
    lr: float = 1.0
    local_lr: float = 0.03
    lr_decay: float = 0.01
    corrected: bool = True
    remembered = ("sent",)

    def program(self, model: Model, federation: Federation) -> Program:
        """The model with the guide that these settings choose."""
        if self.guide is not None:
            return build(model, self.guide, federation)
        return hierarchical(model, federation, self.global_guide, self.conditioned)

    def start(self, program: Program) -> State:
        """λ with Adam's moments, and the sum of what the server knows of the clients."""
        server = optimizer.init({n: v.clone() for n, v in program.init.items()})
        known = {name: torch.zeros_like(program.init[name]) for name in program.direct}
        if self._automatic(program):
            family = family_of(program)
            pull, slope = nothing = family.zero_term(program.init)
            known |= {PULL: pull, SLOPE: slope, SEEN: pull.new_zeros(()), LEVEL: pull.new_zeros(())}
            server["prior"] = nothing._asdict()
            still = Direction(pull, slope, pull)
            server["before"] = still._asdict() | {"turns": pull.new_zeros(())}
        else:
            with torch.no_grad():
                supplied = program.noise(noise.key(0).to(program.schema.device), 1, local=False)
                theta = draw(program, program.init, supplied, 1)
            known |= {name: torch.zeros_like(value[0, 0, 0]) for name, value in theta.items()}
        return server | {"known": known}

    def start_clients(self, program: Program, server: State, batch: Batch) -> State:
        """φ_i, and what the client has sent: nothing yet."""
        sent = {n: v.new_zeros(len(batch), *v.shape) for n, v in server["known"].items()}
        return begun(program, batch) | {"sent": sent}

    def broadcast(self, turn: Turn, server: State) -> Params:
        """Draws of θ for every local step, ``(steps · S, 1, 1, ...)``, and the global parameters."""
        with torch.no_grad():
            count = self.local_steps * self._draws(turn.program)
            message = draw(turn.program, server["params"], self._noise(turn), count)
        message |= {name: value for name, value in server["known"].items() if name == LEVEL}
        return message | server["params"]

    def work(self, job: Job) -> Work:
        """Steps of K clients on φ_i; found are the gradients in each draw, ``(K, draws, ...)``."""
        program = job.program
        kept = {part: tensors for part, tensors in job.clients.items() if part != "sent"}
        params = {name: job.message[name] for name in program.init}
        clients, grads, terms = local_steps(
            program,
            {name: job.message[name] for name in program.random},
            params,
            moved(program, params, kept, job.rows(None)),
            job.rows,
            job.keys,
            steps=self.local_steps,
            draws=self._draws(program),
            lr=job.rate * self.local_lr,
        )
        if job.private:
            return Work(grads, terms, clients | {"sent": job.clients["sent"]})
        sent = {name: grad.sum(1) for name, grad in grads.items()}
        if self._automatic(program):
            grad, before = grads[GLOBAL], job.clients["sent"]
            z = job.message[GLOBAL][-grad.shape[1] :, 0, 0]
            old = QuadraticTerm(before[PULL], before[SLOPE])
            pull, slope = family_of(program).fit_quadratic(params, z, grad.shape[1] * grad, old)
            del sent[GLOBAL]
            one = pull.new_ones(len(job))
            sent |= {PULL: pull, SLOPE: slope, SEEN: one, LEVEL: job.message[LEVEL] * one}
        return Work(grads, terms, clients | {"sent": sent})

    def encode(self, job: Job, work: Work) -> Upload:
        """Changes of what clients have sent, and what that leaves unsaid of the gradients that are used; or these."""
        if job.private:
            return work.found
        before, now, upload = job.clients["sent"], work.clients["sent"], {}
        if LEVEL in now:
            before = before | faded(before, now[LEVEL])
            upload[LEVEL] = now[LEVEL]
        upload |= {f"change.{name}": now[name] - before[name] for name in now if name != LEVEL}
        for name, grad in work.found.items():
            if name not in before:
                if self._natural(job.program, job.rate):
                    continue
                z = job.message[name][-grad.shape[1] :, 0, 0]
                said = natural_gradient.gradient_at(QuadraticTerm(before[PULL], before[SLOPE]), z)
            else:
                said = before[name][:, None]
            upload[name] = grad - said / grad.shape[1]
        return upload

    def late(self, server: State, total: Upload, count: int) -> Upload:
        """The changes, as much as is left of them; the rest goes with its round's draws."""
        changes = {n: value for n, value in total.items() if n.startswith("change.")}
        if LEVEL not in total:
            return changes
        then = {n: changes[f"change.{n}"] for n in (PULL, SLOPE, SEEN)}
        left = faded(then | {LEVEL: total[LEVEL] / count}, server["known"][LEVEL])
        return changes | {f"change.{name}": value for name, value in left.items()}

    def decode(self, turn: Turn, server: State, total: Upload) -> tuple[State, Tensor]:
        """A step on λ."""
        steps = self._natural(turn.program, turn.rate)
        return self.server_step(
            turn.program,
            server,
            total,
            self._noise(turn),
            steps,
            turn.rate,
            turn.scale,
            turn.noise,
            turn.cohort < turn.program.clients,
        )

    @traceable
    def server_step(
        self,
        program: Program,
        server: State,
        total: Upload,
        supplied: Noise,
        steps: bool,
        rate: float,
        scale: float,
        added: float,
        absent: bool,
    ) -> tuple[State, Tensor]:
        """A step on λ, where ``steps`` a natural-gradient one on the family's own parameters.

        ``absent``: some clients have said nothing in this round.
        """
        count = self.local_steps * self._draws(program)
        params = leaves(server["params"])
        term, prior, theta = server_pass(program, params, supplied, count)
        if not params:
            return server, term.mean()
        before = server["known"]
        known = {name: value + total.get(f"change.{name}", 0.0) for name, value in before.items()}
        surrogate = term.mean()
        for name in (*program.random, *program.direct):
            if name == GLOBAL and steps:
                continue
            used = len(total[name])
            if name in params:
                at, said = params[name], before[name]
            else:
                at = theta[name][-used:, 0, 0]
                said = (
                    before[name]
                    if name in before
                    else natural_gradient.gradient_at(
                        QuadraticTerm(before[PULL], before[SLOPE]), at.detach()
                    )
                )
            # a number times a traced rate, which is in double precision, would be so too
            grad = (scale * total[name]).to(at.dtype) + said / used
            surrogate = surrogate + (grad * at).sum()
        server = server | {"known": known}
        ascended: Params = {}
        if steps:
            draws = theta[GLOBAL]
            (grad,) = torch.autograd.grad(prior.sum(), draws, retain_graph=True)
            used = self._draws(program) * self._late
            z, slopes = (x[-used:, 0, 0].detach() for x in (draws, grad))
            server, ascended = self._ascended(
                program, server, before, total, z, slopes, rate, scale, added, absent
            )
        if rest := {name: value for name, value in params.items() if name not in ascended}:
            found = gradients(surrogate, rest)
            with torch.no_grad():
                adam = {
                    "params": rest,
                    **{part: server[part] for part in ("mean", "square", "step")},
                }
                adam = optimizer.ascend(adam, found, rate * self.lr / 20, beta2=0.99)
            server = {part: tensors | adam.get(part, {}) for part, tensors in server.items()}
        server = server | {"params": server["params"] | ascended}
        return server, term.mean().detach()

    def _ascended(
        self,
        program: Program,
        server: State,
        before: Params,
        total: Upload,
        z: Tensor,
        grad: Tensor,
        rate: float,
        scale: float,
        added: float,
        absent: bool,
    ) -> tuple[State, Params]:
        """The server's state and the family's parameters after a natural-gradient step; ``before`` it knew less.

        At draws ``z`` the log density of the prior has these gradients, ``(S, D)``.
        """
        family, params, known = family_of(program), server["params"], server["known"]
        used, noisy = len(z), GLOBAL in total
        with torch.no_grad():
            old = QuadraticTerm(*(value[None] for value in server["prior"].values()))
            prior = QuadraticTerm(*(v[0] for v in family.fit_quadratic(params, z, grad[None], old)))
            if noisy:  # it knows nothing of before
                grads = (used * scale * total[GLOBAL]).to(z.dtype)[None]
                blank = QuadraticTerm(*(v[None] for v in family.zero_term(params)))
                clients = QuadraticTerm(
                    *(v[0] for v in family.fit_quadratic(params, z, grads, blank))
                )
            else:
                clients = _of_all(program, known)
            of_mean = math.sqrt(used) * scale * added if noisy else None
            to = family.direction(params, _sum(prior, clients), z, of_mean)
            last = dict(server["before"])
            turns = last.pop("turns")
            turns = turns + (natural_gradient.agreement(Direction(**last), to) < 0).to(z.dtype)
            pace = rate / (1 + TURN * turns)
            ascended = family.ascend(params, to, self.lr * pace)
            if absent and not noisy:
                stale = family.direction(params, _sum(prior, _of_all(program, before)), z)
                news = Direction(to.loc - stale.loc, to.spread - stale.spread, to.noise)
                of_cohorts = 2 * scale * z.shape[-1]
                gone = natural_gradient.agreement(news, news) / of_cohorts * (before[SEEN] > 0) - 1
                level = known[LEVEL] + (gone * pace**2).clamp(0.0, FORGOTTEN).to(z.dtype)
                server = server | {"known": known | faded(known, level) | {LEVEL: level}}
        state = {"prior": prior._asdict(), "before": to._asdict() | {"turns": turns}}
        return server | state, ascended

    def _automatic(self, program: Program) -> bool:
        """Whether q(θ) is a family's."""
        return self.guide is None and bool(program.random)

    def _natural(self, program: Program, rate: float) -> bool:
        """Whether q(θ) takes natural-gradient steps when this is left of the learning rate."""
        return self._automatic(program) and family_of(program).takes_natural_steps(rate)

    @property
    def _late(self) -> int:
        """In how many of the local steps the gradients are used."""
        return self.local_steps - self.local_steps // 2

    def _draws(self, program: Program) -> int:
        """S: pairs in all directions, where the curvature of all is wanted."""
        if not self._automatic(program) or not family_of(program).full_curvature:
            return self.draws
        return max(self.draws, 2 * math.ceil(len(program.init[f"{GLOBAL}.loc"]) / self._late))

    def _noise(self, turn: Turn) -> dict[str, list[Tensor]]:
        """Of the round's draws of θ; of a family's in pairs."""
        count = self.local_steps * self._draws(turn.program)
        supplied = turn.program.noise(turn.key, count, local=False)
        if not self._automatic(turn.program):
            return supplied
        return supplied | {GLOBAL: [natural_gradient.paired(part) for part in supplied[GLOBAL]]}

    def params(self, server: State) -> Params:
        """λ."""
        return server["params"]

    def shaken(self, server: State) -> float:
        """n of :mod:`bayesfed.guides.natural_gradient`, of the global variables that it is largest of."""
        return float(server["before"]["noise"].max()) if "before" in server else 0.0

    def pace(self, turn: Turn, server: State) -> float | None:
        """The rate of natural-gradient steps; Adam's, which goes its rate's length where all gradients agree."""
        if not self._natural(turn.program, turn.rate):
            return turn.rate * self.lr / 20
        return turn.rate * self.lr / (1 + TURN * float(server["before"]["turns"]))

    def levels(self, program: Program) -> tuple[float, ...]:
        """Once for each kind of steps."""
        both = self._natural(program, 1.0) != self._natural(program, 0.5)
        return (1.0, 0.5) if both else (1.0,)


def _of_all(program: Program, known: Params) -> QuadraticTerm:
    """Of all clients; those who have not been seen are taken to be like those who have.

    Where fewer than none have been, as a liar may say, it is no number.
    """
    seen = known[SEEN]
    each = program.clients / torch.where(seen < 0, torch.nan, seen.clamp(min=1e-30))
    return QuadraticTerm(each * known[PULL], each * known[SLOPE])


def _sum(one: QuadraticTerm, other: QuadraticTerm) -> QuadraticTerm:
    return QuadraticTerm(one.pull + other.pull, one.slope + other.slope)


def faded(known: Mapping[str, Tensor], level: Tensor) -> Params:
    """What is left, at a level, of sites or their sum that are from another: ``(K, ...)`` or ``(...)``."""
    left = (known[LEVEL] - level).exp()
    sites = {name: known[name] for name in (PULL, SLOPE, SEEN)}
    return {n: v * left[(..., *[None] * (v.ndim - left.ndim))] for n, v in sites.items()}
