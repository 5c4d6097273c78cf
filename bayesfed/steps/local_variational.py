"""Steps on the parameters φ_i of q(w_i | θ), θ drawn by the server: the local work of SFVI, SFVI-Avg and PVI.

Clients are stateful: they keep φ_i, Adam's moments, and the origin of φ_i: its closed form by Laplace's method at the
last visit (:mod:`bayesfed.guides.client_factor`). What gradient steps have learnt is a correction to the origin.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from bayesfed.data.batch import Batch
from bayesfed.data.chunks import NOISE
from bayesfed.elbo import noise
from bayesfed.elbo.elbo import Noise, client_terms
from bayesfed.elbo.program import Params, Program
from bayesfed.guides.flow import Flow
from bayesfed.guides.full_rank import FullRank
from bayesfed.guides.globals import Gaussian, OwnGuide
from bayesfed.guides.locals import Conditioned, Locals
from bayesfed.guides.mean_field import MeanField
from bayesfed.guides.precisions import solve_root, times
from bayesfed.steps import optimizer
from bayesfed.steps.gradients import annealed, gradients, leaves
from bayesfed.steps.job import Job, Work
from bayesfed.steps.local_loop import all_clients, local_loop
from bayesfed.steps.losses import per_client
from bayesfed.steps.noise_of_weights import (
    PERSONAL_DRAWS,
    largest_noise,
    noise_of_weights,
    personal_terms,
)
from bayesfed.steps.optimizer import State
from bayesfed.steps.steps import Inputs, Steps
from bayesfed.tracing.compiler import traceable

EPS = 0.1
"""Adam's ε for φ_i: an ELBO gradient of less than a tenth of a nat a unit is noise, not to be chased at full rate."""
_DOUBT = 2.0
"""Standard errors by which learnt corrections must be worse than the closed form to be given up."""
PERSONAL_DECAY = 0.01
"""The fraction of the rate of ``personalize`` that is left at its end."""
NEARER, BENT = tuple(4.0**-i for i in range(1, 6)), 1.5
"""Fractions of the draws' distance from their mean at which gradients are compared with those farther off, and the
ratio of their differences from which on the latter are left out."""
ENOUGH_STEPS = 30
"""The number of steps that a client should have taken at the end of a run; if it has not, it takes as many then."""
TRIED, TRIED_DRAWS, WORTH = 50, 64, 0.003
"""Steps with which ``personalize`` tries to improve the closed form, the draws by which it is compared with the result,
and the gain, in nats, from which on all steps are taken."""


class LocalVariational(Steps):
    """Steps of stateful clients with Adam on φ_i.

    Attributes:
        local_lr: Adam's rate for the clients' parameters.
    """

    local_lr: float
    globals: ClassVar[tuple[type[Any], ...]] = (Gaussian, FullRank, MeanField, Flow, OwnGuide)
    locals: ClassVar[tuple[type[Any], ...]] = (Conditioned,)

    def start_clients(
        self, program: Program, theta: Params, batch: Batch, locals_: Locals
    ) -> State:
        """Return φ_i with Adam's first moments and its origin."""
        return first_state(program, batch)

    def personalize(self, job: Job, locals_: Locals, steps: int, lr: float | None) -> Params:
        """Return φ_i of K clients: from its closed form, steps on their terms alone, θ drawn from q(θ) at each.

        The closed form stays where the first steps gain next to nothing.
        """
        program, params, rows = job.program, job.theta, job.rows(None)
        origin = follow_origin(program, params, first_state(program, rows), rows)
        if not program.laplace_params or steps <= TRIED:
            return self._personal_steps(job, origin, steps, lr)["params"]
        tried = self._personal_steps(job, origin, TRIED, lr)
        key = noise.fold(job.keys, noise.word("tried"))
        drawn = next(noise_of_steps(program, key, 1, TRIED_DRAWS, theta=True))
        before, after = (
            personal_terms(program, state["params"], params, rows, drawn, TRIED_DRAWS).mean(0)
            for state in (origin, tried)
        )
        late = ~(after - before <= WORTH)
        if bool(late.any()):
            full = self._personal_steps(job, origin, steps, lr)
            return optimizer.where_active(origin["params"], full["params"], late)
        return origin["params"]

    def complete(self, job: Job, *, near: float | None = None) -> Params:
        """Return φ_i of K clients at the end of a run; those that lack steps take :data:`ENOUGH_STEPS` more.

        Where a run ends after few rounds clients have learnt little. Those whose closed form is their posterior already
        take none. Clients whose closed form is nearer to their posterior than what they have learnt return to it.

        Args:
            job: the server's parameters, the clients' states, and their rows.
            near: the variance of a client's log weights from which on it takes steps; by default so little that their
                sum over all clients is little.
        """
        program, clients = job.program, phi_state(job.clients)
        few = lacks_steps(clients)
        if not is_completed(program, clients):
            return clients["params"]
        if bool(few.any()):
            followed = follow_origin(program, job.theta, clients, job.rows(None))
            clients = {n: optimizer.where_active(v, followed[n], few) for n, v in clients.items()}
        closed = clients["params"] | clients["origin"]
        off = self._noise(job, closed)
        lacking = few & ~(off < (largest_noise(program.clients) if near is None else near))
        found = clients["params"]
        if bool(lacking.any()):
            moved = self._personal_steps(job, clients, ENOUGH_STEPS, None)["params"]
            found = optimizer.where_active(found, moved, lacking)
        if any(not torch.equal(value, closed[name]) for name, value in found.items()):
            nearer = ~(self._noise(job, found) <= off) & off.isfinite()
            found = optimizer.where_active(found, closed, nearer)
        finite = torch.cat([value.flatten(1) for value in found.values()], 1).isfinite().all(1)
        return optimizer.where_active(job.clients["params"], found, finite)

    def _noise(self, job: Job, phi: Params) -> Tensor:
        """Return the variances of the log weights of K clients at φ_i, given θ, at draws of θ: ``(K,)``."""
        program, key = job.program, noise.fold(job.keys, noise.word("exact"))
        (drawn,) = noise_of_steps(program, key, 1, PERSONAL_DRAWS, theta=True)
        return noise_of_weights(program, phi, job.theta, job.rows(None), drawn)

    def _personal_steps(self, job: Job, clients: State, steps: int, lr: float | None) -> State:
        """Return the clients after steps with θ drawn from q(θ) at each."""
        lr = self.local_lr if lr is None else lr
        streams = noise_of_steps(job.program, job.keys, steps, PERSONAL_DRAWS, theta=True)

        def step(state: State, number: int, active: Tensor | None) -> State:
            rate = lr * annealed(PERSONAL_DECAY, number / steps)
            given = Inputs(job.rows(number), (rate,), constants=job.theta)
            return personal_step(job.program, state, given, next(streams))

        return local_loop(all_clients(len(job), steps), job.keys.device, clients, step)


@dataclass(frozen=True)
class GradientsAtDraws(LocalVariational):
    """Adam steps on φ_i, and the gradients of the client's term in the server's draws of θ (SFVI).

    Attributes:
        steps: Adam steps in a round; the gradients are those of the second half, when φ_i has caught up with θ.
        draws: S, draws in a step. Of many rows the server makes half as many until a step has turned back,
            and it makes more where the curvature in all directions needs them.
        local_lr: Adam's rate for the clients' parameters.
    """

    steps: int = 10
    draws: int = 8
    local_lr: float = 0.03
    gives = frozenset({"gradients"})
    needs = frozenset({"draws"})

    @property
    def late(self) -> int:
        """The number of steps whose gradients are given."""
        return self.steps - self.steps // 2

    def run(self, job: Job, locals_: Locals) -> Work:
        """Take the steps of a round, and return the gradients in each draw, ``(K, draws, ...)``."""
        program, keys, drawn = job.program, job.keys, job.message.get("draws", {})
        draws = next((len(v) for v in drawn.values()), self.steps * self.draws) // self.steps
        params, lr = job.theta, job.rate * self.local_lr
        clients = follow_origin(program, params, phi_state(job.clients), job.rows(None))
        if "approach" in job.message:
            return self._at_origin(job, clients)
        streams = noise_of_steps(program, keys, self.steps, draws)
        found: dict[str, list[Tensor]] = {n: [] for n in (*program.random, *program.direct)}
        terms: list[Tensor] = []

        def step(state: State, number: int, active: Tensor | None) -> State:
            if number < self.steps // 2 and not program.learns_locals:
                return state
            now = {n: v[number * draws : (number + 1) * draws] for n, v in drawn.items()}
            given = Inputs(job.rows(number), (lr,), constants=params)
            state, grad, term = local_step(program, now, state, given, next(streams), draws)
            if number >= self.steps // 2:
                for name in found:
                    found[name].append(grad[name])
                terms.append(term)
            return state

        clients = local_loop(all_clients(len(job), self.steps), keys.device, clients, step)
        grads = {name: torch.cat(parts, 1) / len(terms) for name, parts in found.items()}
        return Work({"gradients": grads}, torch.stack(terms).mean(0), clients)

    def _at_origin(self, job: Job, clients: State) -> Work:
        """Return the gradients in each draw where the clients are, who learn nothing.

        Where the gradients of a client overflow, or differ far more between these draws than between draws near to
        their mean, as those of counts under a vague prior, they are extrapolated from the latter:
        ḡ + (∇f(z̄ + c (z − z̄)) − ḡ) / c. A quadratic term is then that of the mean, not of the largest values.
        """
        drawn = job.message["draws"]
        draws = len(next(iter(drawn.values())))
        given = Inputs(job.rows(0), (0.0,), constants=job.theta)
        (supplied,) = noise_of_steps(job.program, job.keys, 1, draws)
        _, grads, term = local_step(job.program, drawn, clients, given, supplied, draws)
        curvature, bent = _differences(grads), torch.ones_like(term, dtype=torch.bool)
        for factor in NEARER:
            near = {n: torch.lerp(v.mean(0, keepdim=True), v, factor) for n, v in drawn.items()}
            _, found, terms = local_step(job.program, near, clients, given, supplied, draws)
            nearby = _differences(found) / factor
            bent = bent & (~curvature.isfinite() | (curvature > BENT * nearby))
            if bent.device.type == "cpu" and not bent.any():
                break
            for name, grad in found.items():
                mean = grad.mean(1, keepdim=True)
                far = mean + (grad - mean) / factor
                grads[name] = torch.where(per_client(bent, far), far, grads[name])
            term, curvature = torch.where(bent, terms, term), torch.where(bent, nearby, curvature)
        term = term.where(term.isfinite(), torch.nan)  # −∞ would be a step that went uphill
        return Work({"gradients": grads}, term, clients)


def _differences(grads: Params) -> Tensor:
    """Return how far the gradients ``(K, S, ...)`` of K clients at S draws lie from their mean, ``(K,)``."""
    return torch.stack(
        [(g - g.mean(1, keepdim=True)).abs().flatten(1).sum(1) for g in grads.values()]
    ).sum(0)


def lacks_steps(clients: State) -> Tensor:
    """Return which of K clients have taken fewer than :data:`ENOUGH_STEPS` steps, bool ``(K,)``."""
    return clients["step"]["step"] < ENOUGH_STEPS if clients["params"] else torch.zeros(0).bool()


def is_completed(program: Program, clients: State) -> bool:
    """Return whether K clients may have other parameters at the end of a run than they have learnt in it."""
    closed = bool(program.laplace_params) and bool(clients["params"])
    return program.learns_locals and (closed or bool(lacks_steps(clients).any()))


def phi_state(clients: State) -> State:
    """Return φ_i, its moments and its origin, without what clients remember of their uploads."""
    names = ("params", "mean", "square", "step", "origin", "unit")
    return {part: clients[part] for part in names if part in clients}


def first_state(program: Program, batch: Batch) -> State:
    """Return φ_i of K clients before their first visit, Adam's moments, and the origin of φ_i."""
    clients = optimizer.init(program.init_locals(batch), len(batch), batch.device)
    clients["origin"] = {n: clients["params"][n].clone() for n in program.laplace_params}
    if (unit := program.context_unit(program.init, batch)) is not None:
        clients["unit"] = {"context": unit.contiguous()}
    return clients


def follow_origin(
    program: Program, params: Mapping[str, Tensor], clients: State, rows: Batch
) -> State:
    """Return φ_i moved by the changes of the unit of θ and of its closed-form origin since the last visit.

    Guides without a closed form have no origin.
    """
    unit = program.context_unit(params, rows)
    if unit is not None:
        clients = _rescaled(program, clients, unit)
    if not program.laplace_params:
        return clients
    origin = program.laplace(params, clients["params"], rows)
    return _shifted(program, clients, origin)


@traceable
def _rescaled(program: Program, clients: State, unit: Tensor) -> State:
    """Return φ_i and its origin in another unit of θ.

    What they have learnt of θ in units of a wide q(θ) would be far too much in those of a narrow one: q(w_i | θ) would
    change with θ more than the posterior does, which looks like information on θ and makes q(θ) narrower yet.
    """
    ratio, rescaled = unit / clients["unit"]["context"], program.guide.in_context_units
    parts = {part: rescaled(clients[part], ratio) for part in ("params", "origin")}
    return clients | parts | {"unit": {"context": unit}}


@traceable
def _shifted(program: Program, clients: State, origin: Params) -> State:
    """Return φ_i and its origin, moved to another origin; clients whose new origin is not finite keep theirs.

    A correction keeps its size in units of the factor.
    """
    phi, before = clients["params"], clients["origin"]
    finite = torch.cat([value.flatten(1) for value in origin.values()], 1).isfinite().all(1)
    there = {n: torch.where(per_client(finite, b), origin[n], b) for n, b in before.items()}
    learnt = {name: phi[name] - value for name, value in before.items()}
    old, new = program.unit_roots(before), program.unit_roots(there)
    for name, root in new.items():
        earlier = old[name] if root.ndim == learnt[name].ndim else old[name].mT
        learnt[name] = solve_root(root, times(earlier, learnt[name]), transposed=True)
    shifted = {name: value + learnt[name] for name, value in there.items()}
    return clients | {"params": phi | shifted, "origin": there}


def ascend(program: Program, clients: State, grads: Params, lr: float) -> State:
    """Take one Adam step of K clients uphill on φ_i, locations in units of their factors.

    A client of many rows has a factor that is far narrower than the prior. Steps in units of the prior would never end
    near its mode: round-off alone would make them go back and forth.
    """
    roots, phi = program.unit_roots(clients["params"]), clients["params"]
    there = {name: torch.zeros_like(phi[name]) for name in roots}
    white = {name: solve_root(root, grads[name]) for name, root in roots.items()}
    state = clients | {"params": phi | there}
    state = optimizer.ascend(state, {n: white.get(n, grads[n]) for n in phi}, lr, EPS)
    moved = {
        name: phi[name] + solve_root(root, state["params"][name], transposed=True)
        for name, root in roots.items()
    }
    return state | {"params": state["params"] | moved}


@traceable
def drop_harmful_corrections(
    program: Program, theta: Params, clients: State, given: Inputs, supplied: Noise, draws: int
) -> State:
    """Return clients at the origin itself where their learnt correction makes their term worse.

    A correction that was learnt around a wide q(θ) may be far off around a narrow one, and its factor then keeps q(θ)
    where it is. It is given up where that is worth more than ``_DOUBT`` standard errors of the draws, which come in
    antithetic pairs; so is one whose term is not finite.

    Args:
        program: the model/guide pair.
        theta: draws of θ, ``(S, K, 1, *event)``, the second half antithetic to the first.
        clients: the K clients' φ_i, with their origins.
        given: the cohort's rows, and the global parameters (unconstrained).
        supplied: the noise of the local variables.
        draws: S.
    """
    phi, origin = clients["params"], clients["origin"]
    here = given.constants | phi
    with torch.no_grad():
        learnt = client_terms(program, here, theta, given.batch, supplied, draws)
        closed = client_terms(program, here | origin, theta, given.batch, supplied, draws)
    gain = (learnt - closed).unflatten(0, (2, draws // 2)).mean(0)
    keep = gain.mean(0) >= -_DOUBT * gain.std(0, correction=0) / math.sqrt(max(1, draws // 2 - 1))
    keep = keep | (learnt.isfinite() & ~closed.isfinite()).any(0)
    chosen = {
        name: torch.where(per_client(keep, there), phi[name], there)
        for name, there in origin.items()
    }
    return clients | {"params": phi | chosen}


def noise_of_steps(
    program: Program, keys: Tensor, steps: int, draws: int, *, theta: bool = False
) -> Iterator[Noise]:
    """Yield the noise of K clients for each step, drawn for several steps at once where it is little.

    It is of their local variables, and with ``theta`` also of the global ones, for draws of each client's own.
    """
    wanted = (True, False) if theta else (True,)
    numbers = sum(
        math.prod(draw.tail)
        for name, parts in program.randomness.items()
        if (name not in program.random) in wanted
        for draw in parts
    )
    together = max(1, min(steps, NOISE // (len(keys) * draws * max(1, numbers))))
    for some in torch.arange(steps, device=keys.device).split(together):
        streams = noise.fold(keys, some[:, None])
        drawn: dict[str, list[Tensor]] = {}
        for local in wanted:
            drawn |= program.noise(streams, draws, local=local)
        for i in range(len(some)):
            yield {name: [part[i] for part in parts] for name, parts in drawn.items()}


@traceable
def local_step(
    program: Program, theta: Params, clients: State, given: Inputs, supplied: Noise, draws: int
) -> tuple[State, dict[str, Tensor], Tensor]:
    """Take one Adam step of K clients on their φ_i, from draws ``(S, 1, 1, *event)`` of θ.

    The global parameters are the constants of the step.

    Returns:
        The clients' next states; the gradients of their terms in the draws ``(K, S, *event)`` and in the direct
        parameters ``(K, 1, ...)``; the terms ``(K,)``.
    """
    size, params = len(given.batch), given.constants
    theta = leaves({n: v.expand(-1, size, *v.shape[2:]) for n, v in theta.items()})
    direct = leaves({n: params[n].expand(size, 1, *params[n].shape) for n in program.direct})
    phi = leaves(clients["params"])
    at = params | direct | phi
    term = client_terms(program, at, theta, given.batch, supplied, draws).mean(0)
    grad = gradients(term, {**theta, **direct, **phi})
    upload = {name: grad[name].movedim(1, 0).squeeze(2) for name in theta}
    upload |= {name: grad[name] for name in direct}
    with torch.no_grad():
        clients = ascend(program, clients, {name: grad[name] for name in phi}, given.rates[0])
    return clients, upload, term.detach()


@traceable
def personal_step(program: Program, clients: State, given: Inputs, supplied: Noise) -> State:
    """Take one Adam step of K clients on their φ_i, each with draws of θ of its own."""
    phi = leaves(clients["params"])
    at = given.constants | phi
    term = client_terms(program, at, {}, given.batch, supplied, PERSONAL_DRAWS).mean(0)
    return ascend(program, clients, gradients(term, phi), given.rates[0])
