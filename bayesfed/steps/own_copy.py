"""Steps of each client on its own copy of q(θ), and on φ_i: the local work of SFVI-Avg.

    client i  with its copy λ_i = λ: steps uphill on λ_i and φ_i of
                  E_q[log p(θ) − log q(θ)] + N · E_q[log p(w_i, D_i | θ) − log q(w_i | θ)]
              that is, as if all N clients were like it          (Hassan, Salomone & Mengersen 2023)

Where clients differ, rounds of several such steps converge, but not to the optimum: on hierarchies they ended 2 to 18
standard deviations away. So steps are corrected for this drift by control
variates (SCAFFOLD; Karimireddy et al. 2020): c_i is the gradient of a client's share, log p(θ) / N and its term of the
ELBO, that it had at its last visit. At the optimum no copy moves.

    natural-gradient steps   c_i(θ) ≈ ∇share_i(θ) is a function, h_i + H_i θ: Σ_j c_j, and the change of its own,
                             ∇share_i − c_i, since the others are known away from λ too. For a Gaussian q(θ) of at most
                             :data:`MOST_DIMENSIONS` dimensions, see :mod:`bayesfed.guides.natural_gradient`
    plain steps              Σ_j c_j + N (∇share_i − c_i), for other parameters, divided by a root mean square that the
                             server keeps, equal for all: Adam in each client would normalise each client's gradient by
                             itself, and the mean of the normalised gradients is zero in the wrong place

A client without a c_i takes its first gradient of the visit. In the first round no client has one, and copies stay.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bayesfed.elbo.elbo import Noise, elbo_terms
from bayesfed.elbo.program import Params, Program
from bayesfed.guides.family import GLOBAL
from bayesfed.guides.full_rank import FullRank
from bayesfed.guides.gaussian_factors import factor_of
from bayesfed.guides.globals import Gaussian
from bayesfed.guides.locals import Locals
from bayesfed.guides.mean_field import MeanField
from bayesfed.guides.natural_gradient import QuadraticTerm
from bayesfed.steps.cavity_steps import DIMENSIONS
from bayesfed.steps.gradients import copies, gradients, leaves
from bayesfed.steps.job import Job, Work
from bayesfed.steps.local_loop import all_clients, local_loop
from bayesfed.steps.local_variational import (
    LocalVariational,
    ascend,
    drop_harmful_corrections,
    follow_origin,
    noise_of_steps,
    phi_state,
)
from bayesfed.steps.losses import per_client, zeros_like
from bayesfed.steps.optimizer import State
from bayesfed.steps.steps import Inputs
from bayesfed.tracing.compiler import traceable

Copies = tuple[State, Params, Params, Params]
"""φ_i with Adam's moments; λ_i; the sums of squared plain gradients, and of gradients for c_i, so far."""
PLAIN = 0.125
"""The rate of plain steps, as a fraction of that of natural-gradient steps."""
DRAWS, SMALL, MANY_ROWS = (32, 8), 20, 10_000
"""Draws in a step where both are small and otherwise; the largest numbers of dimensions and of rows that are small."""
MOST = 3.0
"""The largest gradient of a plain step, in root mean squares of the rounds before: where a step goes too far for the
curvature the next gradient is even larger, and only the next round measures it."""


@dataclass(frozen=True)
class OwnCopy(LocalVariational):
    """Steps on (λ_i, φ_i).

    Attributes:
        steps: steps in a round; c_i is the mean gradient of those of the second half.
        draws: S, ELBO draws in a step; one more where it is odd, as they come in antithetic pairs. None: 32 where θ has
            up to 20 dimensions and the clients up to 10,000 rows together, else 8. With 8 the noise of the copies,
            which stays in q(θ), is up to 0.08 of its standard deviations, and rounds are a third more.
        lr: rate of the natural-gradient steps on λ_i; an eighth of it is that of plain steps.
        local_lr: Adam's rate of the steps on φ_i.
    """

    steps: int = 10
    draws: int | None = None
    lr: float = 0.2
    local_lr: float = 0.03
    gives = frozenset({"copy", "squares", "control"})
    needs = frozenset({"size", "seen"})
    globals = (Gaussian, FullRank, MeanField)

    def draws_in_step(self, program: Program) -> int:
        """Return S."""
        if self.draws is not None:
            return self.draws + self.draws % 2
        small = takes_natural_steps(program) and len(program.init[f"{GLOBAL}.loc"]) <= SMALL
        return DRAWS[0] if small and program.rows <= MANY_ROWS else DRAWS[1]

    def run(self, job: Job, locals_: Locals) -> Work:
        """Return the copies λ_i, the mean squares of plain gradients, and the c_i."""
        program, new = job.program, job.given["new"]["client"]
        mean, own = job.message.get("control", {}), dict(job.given.get("own", {}))
        seen = job.message["seen"]["clients"]
        lr = (
            job.rate * self.lr * (seen > 0).to(seen)
        )  # a tensor: reading it would wait for the device
        plain, late = plain_params(program), self.steps - self.steps // 2
        streams = noise_of_steps(
            program, job.keys, self.steps, self.draws_in_step(program), theta=True
        )
        terms: list[Tensor] = []

        def step(state: Copies, number: int, active: Tensor | None) -> Copies:
            clients, copy, squares, control = state
            given = Inputs(job.rows(number), (job.rate * self.local_lr,), constants=job.theta)
            clients, grad, term = self.step(program, clients, copy, given, next(streams))
            terms.append(term)
            if number == 0:
                own.update({n: torch.where(per_client(new, v), v, own[n]) for n, v in grad.items()})
                control = zeros_like(grad)
            uphill = {}
            for name, value in grad.items():
                weight = program.clients if name in plain else 1
                uphill[name] = program.clients * mean[name] + weight * (value - own[name])
            squares = {
                n: v + (program.clients * grad[n]).square() / self.steps for n, v in squares.items()
            }
            if number >= self.steps - late:
                control = {n: v + grad[n] / late for n, v in control.items()}
            copy = moved(program, copy, uphill, lr, job.message.get("size", {}))
            return clients, copy, squares, control

        copy = copies(job.theta, len(job))
        start: Copies = self.caught_up(job), copy, zeros_like({n: copy[n] for n in plain}), {}
        schedule = all_clients(len(job), self.steps)
        clients, copy, squares, control = local_loop(schedule, job.keys.device, start, step)
        # the terms at λ itself, before the copies part
        return Work({"copy": copy, "squares": squares, "control": control}, terms[0], clients)

    def caught_up(self, job: Job) -> State:
        """Return K clients whose φ_i has followed λ, without learnt corrections that make their terms worse."""
        program, rows = job.program, job.rows(None)
        clients = follow_origin(program, job.theta, phi_state(job.clients), rows)
        if not program.laplace_params or not takes_natural_steps(program):
            return clients
        draws = self.draws_in_step(program)
        supplied = program.noise(job.keys, draws, local=True)
        noise = program.noise(job.keys, draws, local=False)
        z = draws_of(program, copies(job.theta, len(job)), noise)
        given = Inputs(rows, constants=job.theta)
        return drop_harmful_corrections(program, z, clients, given, supplied, draws)

    @traceable
    def step(
        self, program: Program, clients: State, copy: Params, given: Inputs, supplied: Noise
    ) -> tuple[State, Params, Tensor]:
        """Take one step of K clients on φ_i; return also the gradients of their shares, and their terms ``(K,)``.

        The gradients are in the plain parameters ``(K, 1, ...)``; and as ``pull`` and ``slope``, h_i and H_i at q_i.
        """
        lam, phi = leaves({n: copy[n] for n in plain_params(program)}), leaves(clients["params"])
        values: Params = {}
        if takes_natural_steps(program):
            values = leaves(draws_of(program, copy, supplied))
            supplied = {name: parts for name, parts in supplied.items() if name != GLOBAL}
        at = {**given.constants, **lam, **phi}
        draws = self.draws_in_step(program)
        server, client = elbo_terms(program, at, values, given.batch, supplied, draws)
        share, term = server / program.clients + client, client.mean(0)
        # φ_i climbs the client's own term
        found = gradients(share.mean(0), {**lam, **phi}, retain_graph=bool(values))
        with torch.no_grad():
            of_term = {name: found[name] for name in phi}
            clients = ascend(program, clients, of_term, given.rates[0])
        grad = {name: found[name] for name in lam}
        if values:
            grad |= quadratic(program, share, values[GLOBAL], copy)._asdict()
        return clients, grad, term.detach()


def quadratic(program: Program, share: Tensor, z: Tensor, copy: Params) -> QuadraticTerm:
    """Return h_i and H_i of functions ``(S, K)`` of draws of q_i, H_i diagonal where q_i has no correlations."""
    family = program.guide.family
    loc = family.normal(copy)[0].squeeze(1)
    factor = factor_of(share, z, loc)
    pull, slope = factor.shift, -factor.precision
    if family.full_curvature:
        return QuadraticTerm(pull, slope)
    diagonal = slope.diagonal(dim1=-2, dim2=-1)
    mean = pull + (slope @ loc[..., None]).squeeze(-1)
    return QuadraticTerm(mean - diagonal * loc, diagonal)


def moved(program: Program, copy: Params, uphill: Params, lr: Tensor, size: Params) -> Params:
    """Return the copies ``(K, 1, ...)`` of K clients after a step."""
    new = {}
    for name in plain_params(program):
        sizes = (uphill[name] / (size[name] + 1e-12)).clamp(-MOST, MOST)
        new[name] = copy[name] + PLAIN * lr * torch.where(size[name] > 0, sizes, 0.0)
    if not takes_natural_steps(program):
        return new
    family = program.guide.family

    def one(params: Params, pull: Tensor, slope: Tensor) -> Params:
        to = family.direction(params, QuadraticTerm(pull, slope))
        return family.ascend(params, to, lr)

    of_q = {name: value.squeeze(1) for name, value in copy.items() if name not in new}
    found = torch.func.vmap(one)(of_q, uphill["pull"], uphill["slope"])
    return new | {name: value[:, None] for name, value in found.items()}


def takes_natural_steps(program: Program) -> bool:
    """Return whether q(θ) is a Gaussian of few enough dimensions for natural-gradient steps."""
    return bool(program.random) and len(program.init[f"{GLOBAL}.loc"]) <= DIMENSIONS


def plain_params(program: Program) -> list[str]:
    """Return the global parameters that take plain steps."""
    natural = takes_natural_steps(program)
    return [n for n in program.init if not (natural and n.startswith(f"{GLOBAL}."))]


def draws_of(program: Program, copy: Params, supplied: Noise) -> dict[str, Tensor]:
    """Return draws of q_i ``(S, K, 1, D)``, the second half antithetic to the first."""
    loc, root = program.guide.family.normal(copy)
    (whole,) = supplied[GLOBAL]
    half = whole[: len(whole) // 2]
    offset = root * half if root.ndim == loc.ndim else (root @ half[..., None]).squeeze(-1)
    return {GLOBAL: loc + torch.cat([offset, -offset])}
