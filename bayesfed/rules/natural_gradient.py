"""Natural-gradient steps on q(θ), from the clients' gradients at the server's draws of θ (SFVI).

Maximises  E_q[log p(θ) − log q(θ)] + Σ_i E_q[log p(w_i, D_i | θ) − log q(w_i | θ)]  over the server's
parameters λ of q(θ) and every client's φ_i of q(w_i | θ) (Hassan, Salomone & Mengersen 2023, *Federated
variational inference methods for structured latent variable models*).

    server    sends draws θ = T_λ(ε), and the global parameters that a client reads directly
    client i  moves φ_i (:mod:`bayesfed.steps.local_variational`), and makes of the gradients of its term in the draws a
              quadratic term, ∇f_i(z) ≈ h_i + H_i z; uploads by how much that has changed
    server    keeps Σ_i h_i and Σ_i H_i, adds its own term's, and takes a natural-gradient step on λ
              (:mod:`bayesfed.guides.natural_gradient`)

The paper's client uploads the gradient in λ; the chain rule splits it at θ, so that an upload does not depend on the
size of λ. Of λ itself it only reads where q(θ) lies. φ_i never leaves the client.

The steps are Newton's where q(θ) is Gaussian, of rate 1 at first. While successive steps agree in direction, q(θ) is
far from its target; each time a step goes back, noise dominates, and the rate falls (Kesten 1958, *Accelerated
stochastic approximation*). Of many rows half as many draws are made before the first such step as after it. While steps
are longer than :data:`FAR`, clients give gradients at φ_i in closed form, and learn nothing: what they would learn of
how their variables follow θ in a wide q(θ) would hold q(θ) back later.

Under partial participation the clients' last uploads remain in the sum, and clients that have not been seen are taken
to be like those that have. But a quadratic term is made where q(θ) lies, and may say little of where q(θ) has gone
since. The uploads of two cohorts differ by √(2 D N / K) standard deviations of q(θ) where all is well. Where those of
a cohort move a step by more, d of them, all terms keep exp(1 − d² K / (2 D N)) of their weight: first steps rest on
the last cohorts, terms that are quadratic are kept, and in the end nothing is forgotten.

Parameters that have no Gaussian take Adam's steps along gradients: a Flow's spline, a guide of the user's, a model's
global ``pyro.param``, which are points. There clients upload, for each draw, the difference between the gradient and
that of their quadratic term (for a guide of the user's, the mean gradient that they sent last), of which the server
takes N / K times the sum: unbiased, and less noisy as clients differ less in how they change than in where they are
(SAGA; Defazio, Bach & Lacoste-Julien 2014, eq. 1). With all clients in every round nothing is different.

Where the sum is noisy, the server's memory would add up the noise of all rounds, and a clipped change would not
be what the client remembers. Then clients upload the gradients themselves and remember nothing: the cohort's sum
times N / K is unbiased.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bayesfed.data.batch import Batch
from bayesfed.elbo import noise
from bayesfed.elbo.elbo import Noise, draw, server_pass
from bayesfed.elbo.program import Params, Program
from bayesfed.guides import natural_gradient
from bayesfed.guides.family import GLOBAL, Family
from bayesfed.guides.flow import Flow
from bayesfed.guides.full_rank import FullRank
from bayesfed.guides.globals import Gaussian, OwnGuide
from bayesfed.guides.hierarchical import Hierarchical
from bayesfed.guides.mean_field import MeanField
from bayesfed.guides.natural_gradient import Direction, QuadraticTerm
from bayesfed.rules.rule import Progress, Rule, Turn
from bayesfed.steps import optimizer
from bayesfed.steps.gradients import gradients, leaves
from bayesfed.steps.job import Job, Parts, Work
from bayesfed.steps.optimizer import State
from bayesfed.tracing.compiler import traceable

FORGOTTEN = 4.0
"""The most that a round adds to the level: without a bound one run in 32 diverged (1,000 clients, ten a round)."""
TURN = 0.25
"""The number that a turn adds to the divisor of the first rate: 1 + turns / 4."""
FAR = 1.0
"""The step, in units of q(θ), after which another is taken before clients learn: what they learnt would not last."""
MANY_ROWS = 10_000
"""Rows of all clients beyond which draws cost more than another kind of step."""
ADAM = 1 / 20
"""Adam's rate, as a fraction of that of natural-gradient steps."""
QUADRATIC = ("pull", "slope", "seen")
"""A client's quadratic term, or the sum over clients; and the number of clients that it is of."""


class StepContext(NamedTuple):
    """The inputs of a round's step on λ beside the state, the uploads and the noise.

    Attributes:
        draws: the number of draws of θ.
        used: the number of draws, the last ones, at which clients give gradients.
        natural: take a natural-gradient step on the family's own parameters.
        rate: factor on the rates.
        scale: N / K.
        added: the scale of the noise in the sum.
        absent: some clients have uploaded nothing in this round.
    """

    draws: int
    used: int
    natural: bool
    rate: float
    scale: float
    added: float
    absent: bool


@dataclass(frozen=True)
class NaturalGradient(Rule):
    """Natural-gradient steps on a Gaussian q(θ), Adam's steps on all other parameters.

    The server's and the clients' memory has, where q(θ) is a family's, the part ``quadratic``: pull h, slope H, the
    number ``seen`` of clients, and the ``level``, −log of the weight that a first term has left.

    Attributes:
        lr: the first rate of natural-gradient steps; a twentieth of it is Adam's. A Flow's affine part takes
            natural-gradient steps in the first half of the rounds, the spline resting; then all of it takes Adam's.
    """

    lr: float = 1.0
    needs = frozenset({"gradients"})
    sends = frozenset({"draws"})
    globals = (Gaussian, FullRank, MeanField, Flow, OwnGuide)

    def start(self, program: Program) -> State:
        """Return λ with Adam's moments, and the sums over clients."""
        server = optimizer.init({n: v.clone() for n, v in program.init.items()})
        mean = {name: torch.zeros_like(program.init[name]) for name in program.direct}
        if family := _family(program):
            pull, slope = nothing = family.zero_term(program.init)
            none = pull.new_zeros(())
            server["quadratic"] = {"pull": pull, "slope": slope, "seen": none, "level": none}
            server["prior"] = nothing._asdict()
            far = none + math.inf
            server["before"] = Direction(pull, slope, pull)._asdict() | {"turns": none, "far": far}
        else:
            with torch.no_grad():
                supplied = program.noise(noise.key(0).to(program.schema.device), 1, local=False)
                theta = draw(program, program.init, supplied, 1)
            mean |= {name: torch.zeros_like(value[0, 0, 0]) for name, value in theta.items()}
        return server | {"mean gradient": mean}

    def params(self, server: State) -> Params:
        """Return λ."""
        return server["params"]

    def start_clients(self, program: Program, server: State, batch: Batch) -> State:
        """Return zeros: clients have sent nothing yet."""
        return {
            part: {n: v.new_zeros(len(batch), *v.shape) for n, v in server[part].items()}
            for part in ("quadratic", "mean gradient")
            if part in server
        }

    def broadcast(self, turn: Turn, server: State) -> Parts:
        """Return draws of θ for every local step, ``(steps · S, 1, 1, ...)``, and the global parameters."""
        count, approaches = _draws(turn, server)
        with torch.no_grad():
            drawn = draw(turn.program, server["params"], _noise(turn, count), count)
        message = {"theta": server["params"], "draws": drawn}
        if approaches:
            message["approach"] = {"far": server["before"]["far"]}
        if "quadratic" in server:
            message["forgetting"] = {"level": server["quadratic"]["level"]}
        return message

    def encode(self, job: Job, work: Work) -> tuple[Parts, State]:
        """Return the changes of what clients have sent, and the rest of the gradients that the server uses.

        Under noise these are the gradients themselves.
        """
        grads, program = work.found["gradients"], job.program
        memory: State = {
            p: job.clients[p] for p in ("quadratic", "mean gradient") if p in job.clients
        }
        if job.private:
            return {"gradients": dict(grads)}, memory
        before = memory.get("mean gradient", {})
        mean = {name: grads[name].sum(1) for name in before}
        upload: Parts = {"mean gradient": {n: v - before[n] for n, v in mean.items()}}
        new: State = {"mean gradient": mean}
        rest = {name: grads[name] - before[name][:, None] / grads[name].shape[1] for name in before}
        if family := _family(program):
            sent, grad = memory["quadratic"], grads[GLOBAL]
            used, level = grad.shape[1], job.message["forgetting"]["level"]
            z = job.message["draws"][GLOBAL][-used:, 0, 0]
            old = QuadraticTerm(sent["pull"], sent["slope"])
            pull, slope = family.fit_quadratic(job.theta, z, used * grad, old)
            one = pull.new_ones(len(job))
            term = {"pull": pull, "slope": slope, "seen": one}
            left = sent | fade(sent, level * one)
            upload["quadratic"] = {n: term[n] - left[n] for n in QUADRATIC}
            upload["forgetting"] = {"level": level * one}
            new["quadratic"] = term | {"level": level * one}
            if not family.takes_natural_steps(job.rate):
                said = natural_gradient.gradient_at(QuadraticTerm(left["pull"], left["slope"]), z)
                rest[GLOBAL] = grad - said / used
        return upload | {"gradients": rest}, new

    def stale(self, server: State, total: Parts, count: int) -> Parts:
        """Return the changes, as much as is left of them; the rest ends with its round's draws."""
        changes = {"mean gradient": total.get("mean gradient", {})}
        if "quadratic" not in total:
            return changes
        then = total["quadratic"] | {"level": total["forgetting"]["level"] / count}
        return changes | {"quadratic": fade(then, server["quadratic"]["level"])}

    def decode(self, turn: Turn, server: State, total: Parts) -> tuple[State, Tensor]:
        """Take a step on λ."""
        family, (count, approaches) = _family(turn.program), _draws(turn, server)
        context = StepContext(
            draws=count,
            used=count if approaches else count // turn.steps.steps * turn.steps.late,
            natural=family is not None and family.takes_natural_steps(turn.rate),
            rate=turn.rate,
            scale=turn.scale,
            added=turn.noise,
            absent=turn.cohort < turn.program.clients,
        )
        return self.step(turn.program, server, total, _noise(turn, count), context)

    @traceable
    def step(
        self, program: Program, server: State, total: Parts, supplied: Noise, context: StepContext
    ) -> tuple[State, Tensor]:
        """Return the state after a step on λ, and the server's ELBO term ``()``; ``supplied`` draws θ."""
        params, used, scale = leaves(server["params"]), context.used, context.scale
        term, prior, theta = server_pass(program, params, supplied, context.draws)
        if not params:
            return server, term.mean()
        before, changes = server["mean gradient"], total.get("mean gradient", {})
        surrogate = term.mean()
        for name, grad in total.get("gradients", {}).items():
            if name == GLOBAL and context.natural:
                continue
            used = len(grad)
            at = params[name] if name in params else theta[name][-used:, 0, 0]
            if name in before:
                said = before[name]
            else:
                sent = server["quadratic"]
                said = natural_gradient.gradient_at(
                    QuadraticTerm(sent["pull"], sent["slope"]), at.detach()
                )
            # a number times a traced rate, which is in double precision, would be so too
            grad = (scale * grad).to(at.dtype) + said / used
            surrogate = surrogate + (grad * at).sum()
        new = server | {"mean gradient": {n: v + changes.get(n, 0.0) for n, v in before.items()}}
        ascended: Params = {}
        if context.natural:
            draws = theta[GLOBAL]
            flat = 0.0 * draws.sum()  # a prior that is masked depends on no draw
            (slopes,) = torch.autograd.grad(prior.sum() + flat, draws, retain_graph=True)
            z, grad = (x[-used:, 0, 0].detach() for x in (draws, slopes))
            new, ascended = self.natural_step(program, new, total, z, grad, context)
        elif "quadratic" in server:
            new = new | {"quadratic": _summed(server["quadratic"], total)}
        if rest := {name: value for name, value in params.items() if name not in ascended}:
            found = gradients(surrogate, rest)
            with torch.no_grad():
                adam = {"params": rest} | {p: new[p] for p in ("mean", "square", "step")}
                adam = optimizer.ascend(adam, found, context.rate * self.lr * ADAM, beta2=0.99)
            new = {part: tensors | adam.get(part, {}) for part, tensors in new.items()}
        new = new | {"params": new["params"] | ascended}
        return new, term.mean().detach()

    def natural_step(
        self,
        program: Program,
        server: State,
        total: Parts,
        z: Tensor,
        grad: Tensor,
        context: StepContext,
    ) -> tuple[State, Params]:
        """Return the server's state, and the family's parameters after a natural-gradient step.

        At draws ``z`` the log density of the prior has the gradients ``grad``, ``(S, D)``.
        """
        family, params, before = program.guide.family, server["params"], server["quadratic"]
        noisy, used, scale = "quadratic" not in total, len(z), context.scale
        known = _summed(before, total)
        with torch.no_grad():
            old = QuadraticTerm(*(value[None] for value in server["prior"].values()))
            prior = QuadraticTerm(*(v[0] for v in family.fit_quadratic(params, z, grad[None], old)))
            if noisy:  # there is no memory of earlier rounds
                grads = (used * scale * total["gradients"][GLOBAL]).to(z.dtype)[None]
                blank = QuadraticTerm(*(v[None] for v in family.zero_term(params)))
                clients = QuadraticTerm(
                    *(v[0] for v in family.fit_quadratic(params, z, grads, blank))
                )
            else:
                clients = _of_all(program, known)
            of_mean = math.sqrt(used) * scale * context.added if noisy else None
            to = family.direction(params, _sum(prior, clients), z, of_mean)
            last = {name: server["before"][name] for name in Direction._fields}
            back = natural_gradient.agreement(Direction(**last), to) < 0
            turns = server["before"]["turns"] + back.to(z.dtype)
            far = torch.maximum(to.loc.abs().max(), to.spread.abs().max())
            pace = context.rate / (1 + TURN * turns)
            ascended = family.ascend(params, to, self.lr * pace)
            if context.absent and not noisy:
                stale = family.direction(params, _sum(prior, _of_all(program, before)), z)
                news = Direction(to.loc - stale.loc, to.spread - stale.spread, to.noise)
                of_cohorts = 2 * scale * z.shape[-1]
                distance = natural_gradient.agreement(news, news) / of_cohorts
                gone = distance * (before["seen"] > 0) - 1
                level = known["level"] + (gone * pace**2).clamp(0.0, FORGOTTEN).to(z.dtype)
                known = fade(known, level) | {"level": level}
        state = {
            "quadratic": known,
            "prior": prior._asdict(),
            "before": to._asdict() | {"turns": turns, "far": far},
        }
        return server | state, ascended

    def progress(self, turn: Turn, server: State) -> Progress:
        """Return the rate of natural-gradient steps; Adam's, which goes its rate's length where all gradients agree."""
        if "before" not in server:
            return Progress(turn.rate * self.lr * ADAM)
        sds = float(server["before"]["noise"].max())
        if not turn.program.guide.family.takes_natural_steps(turn.rate):
            return Progress(turn.rate * self.lr * ADAM, sds)
        turns = float(server["before"]["turns"])
        far = float(server["before"]["far"])
        return Progress(turn.rate * self.lr / (1 + TURN * turns), sds, far)


def fade(known: Mapping[str, Tensor], level: Tensor) -> Params:
    """Return what is left, at a level, of quadratic terms or their sum from another: ``(K, ...)`` or ``(...)``."""
    left = (known["level"] - level).exp()
    terms = {name: known[name] for name in QUADRATIC}
    return {n: v * left[(..., *[None] * (v.ndim - left.ndim))] for n, v in terms.items()}


def _family(program: Program) -> Family | None:
    """Return the family of q(θ), if the guide is the automatic one and θ has random variables."""
    guide = program.guide
    return guide.family if isinstance(guide, Hierarchical) and program.random else None


def _draws(turn: Turn, server: State) -> tuple[int, bool]:
    """Return the draws of a round: S a step, in pairs in all directions where the curvature of all is wanted.

    Of many rows there are half as many until a step has turned back, which shows that noise matters. Return also
    whether the last step was long, so that what clients would learn in this round could not last: those that have no
    closed form know nothing yet, and learn in any case.
    """
    steps, family, draws = turn.steps, _family(turn.program), turn.steps.draws
    if family is None:
        return steps.steps * draws, False
    size, before = len(turn.program.init[f"{GLOBAL}.loc"]), server["before"]
    newton = not turn.noise and family.takes_natural_steps(turn.rate)
    closed = bool(turn.program.laplace_params) or not turn.program.local_params
    far = newton and closed and float(before["far"]) > FAR
    few = turn.program.rows > MANY_ROWS and not turn.noise
    if few and not far and not float(before["turns"]):
        draws = max(2, draws // 2)
    if family.full_curvature:
        draws = max(draws, 2 * math.ceil(size / (1 if far else steps.late)))
    return (draws if far else steps.steps * draws), far


def _noise(turn: Turn, count: int) -> dict[str, list[Tensor]]:
    """Return the noise of so many draws of θ; a family's draws come in antithetic pairs."""
    supplied = turn.program.noise(turn.key, count, local=False)
    if _family(turn.program) is None:
        return supplied
    return supplied | {GLOBAL: [natural_gradient.paired(part) for part in supplied[GLOBAL]]}


def _summed(known: Params, total: Parts) -> Params:
    """Return the sum over clients with its changes."""
    return known | {n: known[n] + v for n, v in total.get("quadratic", {}).items()}


def _of_all(program: Program, known: Params) -> QuadraticTerm:
    """Return the sum over all clients; those that have not been seen are taken to be like those that have.

    Where fewer than none have been, as a liar may say, it is not a number.
    """
    seen = known["seen"]
    each = program.clients / torch.where(seen < 0, torch.nan, seen.clamp(min=1e-30))
    return QuadraticTerm(each * known["pull"], each * known["slope"])


def _sum(one: QuadraticTerm, other: QuadraticTerm) -> QuadraticTerm:
    return QuadraticTerm(one.pull + other.pull, one.slope + other.slope)
