"""Hamiltonian Monte Carlo over θ and all clients' variables, many chains at once, in the coordinates of q.

    z = m + L a,   w_i = w(e_i, θ): the guide's draw of w_i as a function of its noise e_i
    log π(a, e) = log p(θ) + Σ_i log p(w_i, D_i | θ) + log |∂w_i / ∂e_i|

z is the global vector of the guide. If q were the posterior, π would be a standard Normal, of which trajectories of
length π/2 give independent draws; where q is only near it, the chains make up for the difference (Hoffman et al. 2019,
*NeuTra-lizing bad geometry in Hamiltonian Monte Carlo using neural transport*). A client moves its own e_i with its own
momentum; the server needs the sums over clients of the log densities and of their gradients in z.

Draws are used where importance weights are too uneven: with tens of global variables, heavy tails or funnels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from pyro import poutine
from torch import Tensor

from bayesfed.data.batch import Batch
from bayesfed.elbo import handlers, noise
from bayesfed.elbo.elbo import log_prior
from bayesfed.elbo.program import Params, Program
from bayesfed.engine.execution import threads
from bayesfed.guides import local
from bayesfed.guides.family import GLOBAL
from bayesfed.guides.hierarchical import LOCAL
from bayesfed.output import khat
from bayesfed.output.correction import FINITE_VARIANCE, CorrectionResult
from bayesfed.output.draws import client_chunks, draw_theta
from bayesfed.output.evidence import has_block
from bayesfed.output.fitted import Correction, Fitted
from bayesfed.tracing.compiler import Compiler, traceable, using

FEWEST, MOST, PASS = 16, 64, 200_000
"""Numbers of chains; the size of clients' rows and variables, in numbers, that all chains have together."""
WARMUP = (15, 25)
"""Iterations after each of which the coordinates are adapted to the draws."""
BLOCK = 25
"""Iterations between two looks at the draws."""
ENOUGH = 1000
"""The effective number of draws of each global variable: a Monte Carlo error of 0.03 standard deviations."""
LARGEST_RHAT = 1.05
"""R-hat up to which chains agree."""
ACCEPTANCE = 0.8
"""The mean acceptance probability that the step size is adapted to."""
MOST_STEPS = 64
"""Leapfrog steps of a trajectory."""
WORK = 2e9
"""The largest size of clients' rows and variables, in numbers, over all chains and :data:`GRADIENTS`."""
QUICK = 1e8
"""The largest number of rows and of clients' variables, over the same, at which chains take about twenty seconds."""
GRADIENTS = 1000
"""Gradients that a chain takes, about; after three times as many, chains that have not mixed are given up."""


class Chains(NamedTuple):
    """Draws of the global vector by chains, after their warm-up.

    Attributes:
        z: ``(C, T, D)``.
        rhat: the largest rank-normalised split R-hat of its entries.
        ess: the smallest effective number of draws.
        acceptance: the mean acceptance probability.
        needed: the effective number of draws that is enough.
    """

    z: Tensor
    rhat: float
    ess: float
    acceptance: float
    needed: float = ENOUGH

    @property
    def mixed(self) -> bool:
        """True if the chains agree, and have given enough effective draws."""
        return self.rhat <= LARGEST_RHAT and self.ess >= self.needed

    def correction(self) -> Correction | None:
        """Return the draws in place of q(θ); None if the chains have not mixed."""
        if not self.mixed:
            return None
        chains, theta = len(self.z), {GLOBAL: self.z.transpose(0, 1).flatten(0, 1)[:, None, None]}
        return Correction(theta, None, True, chains, self.rhat, self.ess)


def can_sample(fitted: Fitted) -> bool:
    """Return whether chains apply: q(θ) and q(w_i | θ) are families over one vector each, and the data are small."""
    program = fitted.program
    vectors = program.random == (GLOBAL,) and has_block(program)
    small = _chains(fitted) * GRADIENTS * _size(fitted) <= WORK
    return vectors and khat.has_density(fitted) and small


def takes_seconds(fitted: Fitted) -> bool:
    """Return whether chains apply, and take so little time that they are run without being asked for."""
    program = fitted.program
    numbers = fitted.rows_read + len(fitted.federation) * (program.variables + program.workspace)
    return can_sample(fitted) and _chains(fitted) * GRADIENTS * numbers <= QUICK


def remedy(fitted: Fitted) -> str:
    """Return a sentence on chains for the warning that q is poor; empty unless they apply and have not been tried."""
    all_clients = len(fitted.federation) == fitted.program.clients
    if fitted.correction is not None or not all_clients or not can_sample(fitted):
        return ""
    tried = fitted.converged is not None and takes_seconds(fitted)
    return "" if tried else "; posterior.with_chains() draws from the posterior itself in minutes"


def _size(fitted: Fitted) -> int:
    """The size of all clients' rows and variables, and of what q(w_i | θ) is computed from, in numbers."""
    federation, program = fitted.federation, fitted.program
    own = program.variables + program.workspace
    return fitted.rows_read * federation.numbers_per_row + len(federation) * own


def _chains(fitted: Fitted) -> int:
    """The number of chains: many where they cost little more than few."""
    return min(MOST, max(FEWEST, PASS // _size(fitted)))


@torch.no_grad()
def sample_chains(fitted: Fitted, seed: int = 0) -> Chains:
    """Draw the global vector from the posterior by Hamiltonian Monte Carlo.

    Args:
        fitted: q of all clients of the fit, for which :func:`can_sample` is true.
        seed: seed of starts, momenta and acceptances.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> from bayesfed.output.chains import sample_chains
        >>> posterior = bf.fit(models.eight_schools, datasets.eight_schools(), rounds=20)
        >>> chains = sample_chains(posterior)
        >>> len(chains.z), chains.mixed
        (64, True)
    """
    from bayesfed.output.arviz_compat import ess_and_rhat  # ArviZ takes a second to import

    target, needed = _target(fitted), max(ENOUGH, fitted.draws_needed)
    numbers = _chains(fitted) * _size(fitted)
    with noise.seeded(seed), using(Compiler()), threads(numbers):
        start = draw_theta(fitted, _chains(fitted), fitted.key(seed, "chains"))[GLOBAL][:, 0, 0]
        state = _start(target, start)
        for length in WARMUP:
            state, seen = _iterate(target, state, length, adapt=True)
            target, state = _adapted(target, state, seen)
        drawn: list[Tensor] = []
        acceptances: list[float] = []
        while state.gradients < 3 * GRADIENTS * needed / ENOUGH:
            state, seen = _iterate(target, state, BLOCK, adapt=False)
            drawn.append(torch.stack([target.z(one.a) for one in seen], 1))
            acceptances.append(state.acceptance)
            z = torch.cat(drawn, 1)
            ess, rhat = ess_and_rhat(z.cpu().numpy())
            found = Chains(z, rhat, ess, sum(acceptances) / len(acceptances), needed)
            if found.mixed:
                break
    return found


def correction_by_chains(fitted: Fitted, seed: int = 0) -> Correction:
    """Return draws by chains in place of q(θ); for arguments and errors see :meth:`bayesfed.Posterior.with_chains`."""
    if len(fitted.federation) != fitted.program.clients or not can_sample(fitted):
        raise ValueError(
            "chains need the posterior of all clients of the fit, a q(θ) with a density, such as SFVI's, one Gaussian "
            "for all variables of a client (up to 64 numbers, or more whose log density is concave), no privacy, and "
            "data that are not too large"
        )
    chains = sample_chains(fitted, seed)
    found = chains.correction()
    if found is None:
        raise ValueError(
            f"the chains have not mixed: R-hat {chains.rhat:.2f}, {chains.ess:.0f} draws. Write narrower priors"
        )
    return found


def with_chains_where_infinite(
    fitted: Fitted, found: CorrectionResult
) -> tuple[Correction | None, bool]:
    """Return a correction of q(θ), by chains where importance weights failed or have no finite variance.

    Chains are tried for fits that stopped by themselves, where they take seconds; and where the draws are fewer than
    the fit's precision needs. Also returns whether what was tried has not failed.
    """
    correction, failed = found.correction, found.attempted and not found.reliable
    infinite = correction is not None and (correction.khat or 0.0) > FINITE_VARIANCE
    few = correction is None or (correction.ess or 0.0) < fitted.draws_needed
    asked = fitted.precision is not None and (infinite or few) and can_sample(fitted)
    by_itself = (failed or infinite) and fitted.converged is not None and takes_seconds(fitted)
    if asked or by_itself:
        correction = sample_chains(fitted).correction() or correction
    return correction, correction is not None or not failed


# -- the density in the coordinates of q -----------------------------------------------------------


class Density(NamedTuple):
    """log π of C chains, and its gradients: ``(C,)``, ``(C, D)``, ``(C, N, P)``."""

    value: Tensor
    a: Tensor
    e: Tensor


@dataclass(frozen=True, eq=False)
class _Target:
    """The density of the chains.

    Attributes:
        fitted: q of all clients.
        loc: m, ``(D,)``.
        root: L, ``(D, D)``.
        spread: standard deviations of e, ``(N, P)``, for the momenta.
        chunks: positions of clients, their rows and their parameters.
    """

    fitted: Fitted
    loc: Tensor
    root: Tensor
    spread: Tensor
    chunks: Sequence[tuple[Tensor, Batch, Params]]

    def z(self, a: Tensor) -> Tensor:
        """The global vector, ``(C, D)``."""
        return self.loc + a @ self.root.mT

    def a(self, z: Tensor) -> Tensor:
        """The coordinates of global vectors, ``(C, D)``."""
        return torch.linalg.solve_triangular(self.root, (z - self.loc).mT, upper=False).mT

    def density(self, a: Tensor, e: Tensor) -> Density:
        """log π and its gradients."""
        program, z = self.fitted.program, self.z(a)
        value, grad = _server(program, self.fitted.params, z)
        grads = torch.empty_like(e)
        for chunk, batch, params in self.chunks:
            own, grad_z, grads[:, chunk] = _clients(program, params, batch, z, e[:, chunk])
            value, grad = value + own, grad + grad_z
        return Density(value, grad @ self.root, grads)


def _target(fitted: Fitted) -> _Target:
    """Return the density of a fit, in the units of draws from q."""
    fitted = fitted.sufficient
    program, federation = fitted.program, fitted.federation
    loc, root = _mean_and_root(draw_theta(fitted, 2000, fitted.key(0, "chains"))[GLOBAL][:, 0, 0])
    spread = root.new_ones(len(federation), program.randomness[LOCAL][0].tail[-1])
    chunks = [
        (chunk, federation.batch(chunk), fitted.params_of(chunk))
        for chunk in client_chunks(fitted, 4 * _chains(fitted), federation)
    ]
    return _Target(fitted, loc, root, spread, chunks)


def _mean_and_root(z: Tensor) -> tuple[Tensor, Tensor]:
    """The mean ``(D,)`` of draws ``(S, D)``, and the Cholesky factor of their covariance."""
    covariance = z.double().mT.cov().reshape(z.shape[1], -1)
    return z.double().mean(0).to(z), torch.linalg.cholesky(covariance).to(z)


@traceable
def _server(program: Program, params: Params, z: Tensor) -> tuple[Tensor, Tensor]:
    """log p(θ) and its gradient in z."""
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        value = log_prior(program, params, {GLOBAL: z[:, None, None]}, len(z))
        (grad,) = torch.autograd.grad(value.sum(), z, materialize_grads=True)
    return value.detach(), grad


@traceable
def _clients(
    program: Program, params: Params, batch: Batch, z: Tensor, e: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Σ_i log p(w_i, D_i | θ) + log |∂w_i / ∂e_i| of K clients, and its gradients in z and e."""
    with torch.enable_grad():
        z, e = z.detach().requires_grad_(), e.detach().requires_grad_()
        theta = z[:, None, None]
        with handlers.given(batch.device, params, {}, {GLOBAL: theta}, len(z)):
            rows = batch if program.needs_rows else batch.head()
            guide = poutine.trace(program.guide).get_trace(rows)
        u, log_det = local.unwhiten(guide.nodes[LOCAL]["fn"].drawn, e[:, :, None])
        log_joint = program.guide.block_log_joint(params, batch, u, theta)
        terms = log_joint.sum(1) + log_det.sum((1, 2))
        grads = torch.autograd.grad(terms.sum(), (z, e), materialize_grads=True)
    return terms.detach(), *grads


# -- chains ----------------------------------------------------------------------------------------


class _State(NamedTuple):
    """Positions of C chains, their density, and the step size with what adapts it."""

    a: Tensor
    e: Tensor
    at: Density
    step: float
    adapted: int = 0
    acceptance: float = 0.0
    gradients: int = 0


def _start(target: _Target, z: Tensor) -> _State:
    """Return chains that start at draws from q."""
    a = target.a(z)
    e = torch.randn(len(a), *target.spread.shape, dtype=a.dtype, device=a.device)
    size = a[0].numel() + e[0].numel()
    return _State(a, e, target.density(a, e), min(0.5, size**-0.25))


def _iterate(
    target: _Target, state: _State, count: int, *, adapt: bool
) -> tuple[_State, list[_State]]:
    """Take trajectories; return the last state, and the state after each."""
    seen, total = [], 0.0
    for _ in range(count):
        state = _trajectory(target, state)
        total += state.acceptance
        if adapt:
            rate = (1 + state.adapted) ** -0.5
            step = state.step * math.exp(rate * (state.acceptance - ACCEPTANCE))
            state = state._replace(step=step, adapted=state.adapted + 1)
        seen.append(state)
    return state._replace(acceptance=total / count), seen


def _trajectory(target: _Target, state: _State) -> _State:
    """Take a trajectory of leapfrog steps, of a random length around π/2, and accept its end or not."""
    length = (0.5 + float(torch.rand(()))) * math.pi / 2
    steps = min(MOST_STEPS, max(1, math.ceil(length / state.step)))
    h, spread = state.step, target.spread
    a, e, at = state.a, state.e, state.at
    p, r = torch.randn_like(a), torch.randn_like(e)
    before = at.value - _kinetic(p, r)
    for _ in range(steps):
        p, r = p + h / 2 * at.a, r + h / 2 * spread * at.e
        a, e = a + h * p, e + h * spread * r
        at = target.density(a, e)
        p, r = p + h / 2 * at.a, r + h / 2 * spread * at.e
    chance = (at.value - _kinetic(p, r) - before).nan_to_num(-torch.inf).clamp(max=0.0).exp()
    take = torch.rand_like(chance) < chance

    def chosen(new: Tensor, old: Tensor) -> Tensor:
        return torch.where(take.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    at = Density(*map(chosen, at, state.at))
    return state._replace(
        a=chosen(a, state.a),
        e=chosen(e, state.e),
        at=at,
        acceptance=float(chance.mean()),
        gradients=state.gradients + steps,
    )


def _kinetic(p: Tensor, r: Tensor) -> Tensor:
    return p.square().sum(1) / 2 + r.square().sum((1, 2)) / 2


def _adapted(target: _Target, state: _State, seen: Sequence[_State]) -> tuple[_Target, _State]:
    """Return the density in the units of the second half of the draws, and the chains there."""
    half = seen[len(seen) // 2 :]
    loc, root = _mean_and_root(torch.cat([target.z(one.a) for one in half]))
    spread = torch.cat([one.e for one in half]).std(0)
    new = replace(target, loc=loc, root=root, spread=spread)
    a = new.a(target.z(state.a))
    return new, state._replace(a=a, at=new.density(a, state.e))
