"""Hamiltonian Monte Carlo over θ and all clients' variables, many chains at once, in the coordinates of q.

    z = m + L a,   w_i = w(e_i, θ): the guide's draw of w_i as a function of its noise e_i
    log π(a, e) = log p(θ) + Σ_i log p(w_i, D_i | θ) + log |∂w_i / ∂e_i|

z is the global vector of the guide. If q were the posterior, π would be a standard Normal, of which trajectories of
length π/2 give independent draws; where q is only near it, the chains make up for the difference (Hoffman et al. 2019,
*NeuTra-lizing bad geometry in Hamiltonian Monte Carlo using neural transport*). A client moves its own e_i with its own
momentum (:mod:`bayesfed.output.client_chains`); the server needs the sums over clients of the changes of their energies
and of their gradients in z (:mod:`bayesfed.output.trajectories`). Between machines each leapfrog step is an exchange.

Draws are used where importance weights are too uneven: with tens of global variables, heavy tails or funnels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesfed.engine.execution import threads
from bayesfed.guides.family import GLOBAL
from bayesfed.guides.hierarchical import LOCAL
from bayesfed.output import khat
from bayesfed.output.client_chains import WARMUP, ChainClients, Move, MoveHere, adapted_from
from bayesfed.output.conditionals import has_block
from bayesfed.output.draws import draw_theta
from bayesfed.output.fitted import Correction, CorrectionResult, Fitted
from bayesfed.output.prior_coordinates import find_prior_coordinates
from bayesfed.output.trajectories import (
    Record,
    Server,
    load_record,
    mean_and_root,
    next_state,
    start_chains,
)
from bayesfed.tracing.compiler import Compiler, using

FEWEST, MOST, PASS = 16, 64, 200_000
"""Numbers of chains; the size of clients' rows and variables, in numbers, that all chains have together."""
BLOCK = 25
"""Iterations between two looks at the draws."""
ENOUGH = 1000
"""The effective number of draws of each global variable: a Monte Carlo error of 0.03 standard deviations."""
QUANTILE, DOUBT = 0.15, 0.05
"""By how many standard deviations a 5 % or 95 % quantile of a global variable may be off, in one process, where a draw
costs no exchange; and the probability that one of them is off by more."""
FEW = 400
"""The effective number of draws with which chains that agree are used when they end without enough: R-hat and quantiles
are reliable from there (Vehtari, Gelman, Simpson, Carpenter & Bürkner 2021, *Rank-normalization, folding, and
localization*, section 4.3)."""
LARGEST_RHAT = 1.05
"""R-hat up to which chains agree."""
WORK = 2e9
"""The largest size of clients' rows and variables, in numbers, over all chains and :data:`GRADIENTS`."""
QUICK = 2e8
"""The largest number of rows and of clients' variables, over the same, at which chains take about twenty seconds."""
GRADIENTS = 1000
"""Gradients that a chain takes, about; after three times as many, chains that have not mixed are given up."""
EARLIEST = 75
"""Draws of a chain from which on chains are given up earlier if their effective draws do not become more."""


class Chains(NamedTuple):
    """Draws of the global vector by chains, after their warm-up.

    Attributes:
        z: ``(C, T, D)``.
        rhat: the largest rank-normalised split R-hat of its entries.
        ess: the smallest effective number of draws, of means and of tails.
        acceptance: the mean acceptance probability.
        gradients: the number of gradients that each chain has taken, the warm-up included.
        needed: the effective number of draws that is enough.
    """

    z: Tensor
    rhat: float
    ess: float
    acceptance: float
    gradients: int
    needed: float = ENOUGH

    @property
    def mixed(self) -> bool:
        """True if the chains agree, and have given enough effective draws."""
        return self.rhat <= LARGEST_RHAT and self.ess >= self.needed

    def correction(self) -> Correction | None:
        """Return the draws in place of q(θ); None if the chains do not agree, or have given too few draws."""
        if self.rhat > LARGEST_RHAT or self.ess < min(FEW, self.needed):
            return None
        chains, theta = len(self.z), {GLOBAL: self.z.transpose(0, 1).flatten(0, 1)[:, None, None]}
        return Correction(theta, None, True, chains, self.rhat, self.ess)


def can_sample(fitted: Fitted) -> bool:
    """Return whether chains apply: q(θ) and q(w_i | θ) are families over one vector each, and the data are small."""
    program = fitted.program
    vectors = program.random == (GLOBAL,) and has_block(program)
    small = number_of_chains(fitted) * GRADIENTS * _size(fitted) <= WORK
    return vectors and khat.has_density(fitted) and small


def takes_seconds(fitted: Fitted) -> bool:
    """Return whether chains apply, and take so little time that they are run without being asked for."""
    program = fitted.program
    numbers = fitted.rows_read + len(fitted.federation) * (program.variables + program.workspace)
    return can_sample(fitted) and number_of_chains(fitted) * GRADIENTS * numbers <= QUICK


def remedy(fitted: Fitted) -> str:
    """Return a sentence on chains for the warning that q is poor; empty unless they apply and have not been tried."""
    all_clients = len(fitted.federation) == fitted.program.clients
    by_chains = fitted.correction is not None and fitted.correction.rhat is not None
    if by_chains or not all_clients or not can_sample(fitted):
        return ""
    tried = fitted.converged is not None and takes_seconds(fitted)
    return "" if tried else "; posterior.with_chains() draws from the posterior itself in minutes"


def _size(fitted: Fitted) -> int:
    """The size of all clients' rows and variables, and of what q(w_i | θ) is computed from, in numbers."""
    federation, program = fitted.federation, fitted.program
    own = program.variables + program.workspace
    return fitted.rows_read * federation.numbers_per_row + len(federation) * own


def number_of_chains(fitted: Fitted) -> int:
    """Return the number of chains: many where they cost little more than few."""
    return min(MOST, max(FEWEST, PASS // _size(fitted)))


def numbers_at_once(fitted: Fitted) -> int:
    """Return the size of what a leapfrog step computes with, in numbers."""
    return number_of_chains(fitted) * _size(fitted)


class ChainsFile(NamedTuple):
    """A file that chains are stored in.

    Attributes:
        path: it, which need not exist.
        of: says whose chains they are; those of others in the file are replaced.
    """

    path: Path
    of: dict[str, Any]


def most_gradients(fitted: Fitted) -> int:
    """Return the largest number of gradients that a chain takes; between machines that of exchanges."""
    return int(3 * GRADIENTS * _draws_needed(fitted) / ENOUGH)


@torch.no_grad()
def sample_chains(
    fitted: Fitted,
    seed: int = 0,
    *,
    move: Move | None = None,
    resume: ChainsFile | None = None,
    look: Callable[[Chains], object] = lambda found: None,
) -> Chains:
    """Draw the global vector from the posterior by Hamiltonian Monte Carlo.

    Args:
        fitted: q of all clients of the fit, for which :func:`can_sample` is true. The chains start at draws from its
            correction by importance sampling if these are certain, else at draws from q.
        seed: seed of starts, momenta and acceptances.
        move: moves the variables of all clients; by default those of ``fitted``.
        resume: stores the chains after each trajectory; if the file has them, they go on from there.
        look: called with the draws so far, every :data:`BLOCK` trajectories after the warm-up.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> from bayesfed.output.chains import sample_chains
        >>> posterior = bf.fit(models.eight_schools, datasets.eight_schools(), rounds=20)
        >>> chains = sample_chains(posterior)
        >>> len(chains.z), chains.mixed
        (64, True)
    """
    count, most, key = (
        number_of_chains(fitted),
        most_gradients(fitted),
        chains_key(fitted, seed),
    )
    needed = _draws_needed(fitted)
    if move is None:
        move = MoveHere(ChainClients.of(fitted, count, key))
        size = sum(fitted.program.randomness[GLOBAL][0].tail)
        needed = max(needed, draws_for_quantiles(size))
    fitted = _starts(fitted)
    draws = draw_theta(fitted, 2000, fitted.key(0, "chains"))[GLOBAL][:, 0, 0]
    coordinates = find_prior_coordinates(fitted.program, fitted.params, draws)
    server = Server(fitted.program, fitted.params, key, move, coordinates)
    with using(Compiler()), threads(numbers_at_once(fitted)):
        record = None if resume is None else load_record(resume.path, resume.of, draws)
        if record is None:
            z = draw_theta(fitted, count, key)[GLOBAL][:, 0, 0]
            size = z.shape[1] + _own(fitted) * len(fitted.federation)
            record = Record(start_chains(server, draws, z, size), [], [])
        state, drawn, acceptances = record
        while True:
            state = next_state(server, state, most - state.gradients)
            drawn.append(state.z)
            acceptances.append(state.acceptance)
            first = adapted_from(state.iteration)
            if first is not None:
                v = server.from_guide(torch.cat(drawn[first - 1 :]))
                state = state.placed(*mean_and_root(v))
            if resume is not None:
                Record(state, drawn, acceptances).save(resume.path, resume.of)
            past, ended = state.iteration - sum(WARMUP), state.gradients >= most
            if ended or (past > 0 and past % BLOCK == 0):
                kept = slice(min(sum(WARMUP), len(drawn) - 4), None)
                found = _summary(drawn[kept], acceptances[kept], state.gradients, needed)
                look(found)
                if ended or found.mixed or _are_stuck(found, most):
                    return found


def _starts(fitted: Fitted) -> Fitted:
    """Return what chains start from: the correction of q by importance sampling if it is certain, else q.

    q of the first rounds may be forty times as wide as the posterior, and its correction exact.
    """
    plain, found = replace(fitted, correction=None), fitted.correction
    if found is None or found.khat is None:
        return plain
    certain = found.khat <= khat.FINITE_VARIANCE and (found.ess or 0.0) >= ENOUGH
    return fitted if certain else plain


def _are_stuck(found: Chains, most: int) -> bool:
    """Return whether chains that do not agree would end with too few draws at the pace of the second half so far.

    The effective draws of chains that mix are in proportion to their length. Those of chains that each stay at a mode
    of their own are as many as the modes, however long they are.
    """
    from bayesfed.output.arviz_compat import ess_and_rhat

    draws, enough = found.z.shape[1], min(FEW, found.needed)
    if draws < EARLIEST or found.rhat <= LARGEST_RHAT or found.ess >= enough:
        return False
    ess, _ = ess_and_rhat(found.z[:, : draws // 2].cpu().numpy())
    left = draws * (most / found.gradients - 1)
    return found.ess + (found.ess - ess) / (draws - draws // 2) * left < enough


def draws_for_quantiles(size: int) -> float:
    """Return how many effective draws hold the 5 % and 95 % quantiles of all of ``size`` variables to :data:`QUANTILE`.

    The quantile of n draws of a Normal has a standard error of √(0.05 · 0.95 / n) over the density there.

    Example:
        >>> from bayesfed.output.chains import draws_for_quantiles
        >>> round(draws_for_quantiles(1)), round(draws_for_quantiles(43))
        (997, 2349)
    """
    normal = NormalDist()
    error = math.sqrt(0.05 * 0.95) / normal.pdf(normal.inv_cdf(0.05))
    furthest = normal.inv_cdf(1 - DOUBT / (4 * size))  # of two quantiles of each, on both sides
    return (error * furthest / QUANTILE) ** 2


def chains_key(fitted: Fitted, seed: int) -> Tensor:
    """Return the noise key of chains."""
    return fitted.key(seed, "chains")


def _own(fitted: Fitted) -> int:
    """The number of variables of a client."""
    return int(fitted.program.randomness[LOCAL][0].tail[-1])


def _draws_needed(fitted: Fitted) -> float:
    """The effective number of draws that is enough where each step is an exchange."""
    return max(ENOUGH, fitted.draws_needed)


def _summary(
    drawn: list[Tensor], acceptances: list[float], gradients: int, needed: float
) -> Chains:
    """Return draws, ``(C, D)`` of each trajectory, with their diagnostics."""
    from bayesfed.output.arviz_compat import ess_and_rhat  # ArviZ takes a second to import

    z = torch.stack(drawn, 1)
    ess, rhat = ess_and_rhat(z.cpu().numpy())
    acceptance = sum(acceptances) / len(acceptances)
    return Chains(z, rhat, ess, acceptance, gradients, needed)


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


def better_correction(weighted: Correction | None, drawn: Correction | None) -> Correction | None:
    """Return draws by chains if there are any, unless importance weights are more exact.

    Args:
        weighted: draws by importance sampling.
        drawn: draws by chains.
    """
    if weighted is None or drawn is None:
        return drawn or weighted
    finite = (weighted.khat or 0.0) <= khat.FINITE_VARIANCE
    return weighted if finite and (weighted.ess or 0.0) >= (drawn.ess or 0.0) else drawn


def with_chains_where_uncertain(
    fitted: Fitted, found: CorrectionResult
) -> tuple[Correction | None, bool]:
    """Return a correction of q(θ), by chains where importance weights failed, or are not certain.

    They are not if they have no finite variance, or if all proposals together did not have the effective sample size
    that ends them: with tens of globals weights may look even because all proposals are too narrow. Chains are tried
    for fits that stopped by themselves, where they take seconds; and where the draws are fewer than the fit's precision
    needs. Also returns whether what was tried has not failed.
    """
    correction, failed = found.correction, found.attempted and not found.reliable
    infinite = correction is not None and (correction.khat or 0.0) > khat.FINITE_VARIANCE
    uncertain = correction is not None and not found.certain
    few = correction is None or (correction.ess or 0.0) < fitted.draws_needed
    asked = fitted.precision is not None and (infinite or few) and can_sample(fitted)
    by_itself = (failed or infinite or uncertain) and fitted.converged is not None
    if asked or (by_itself and takes_seconds(fitted)):
        start = replace(fitted, correction=correction) if found.certain else fitted
        drawn = sample_chains(start).correction()
        correction = drawn if uncertain and drawn else better_correction(correction, drawn)
    return correction, correction is not None or not failed
