"""How many draws of θ a correction takes, and a probe of large data that shows whether it is worth them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from bayesfed.elbo import noise
from bayesfed.elbo.handlers import on_cpu
from bayesfed.guides.family import GLOBAL
from bayesfed.output import khat
from bayesfed.output.conditionals import has_block, is_exact, is_inexact, is_laplace
from bayesfed.output.draws import draw_theta
from bayesfed.output.evidence import COST
from bayesfed.output.fitted import Fitted
from bayesfed.output.importance import effective_sample_size
from bayesfed.output.log_densities import SumLogWeights, sum_log_weights
from bayesfed.output.log_target import learns_block, log_target, log_target_twice, noise_variance
from bayesfed.output.polynomials import evaluations
from bayesfed.output.prior_coordinates import find_prior_coordinates
from bayesfed.output.proposal import Proposals
from bayesfed.output.shared_points import COMPARED, share_points
from bayesfed.output.sum_of_evidence import DEGREE, size_of_evidence

DRAWS, LATER = 2000, 8000
"""Draws from the first proposal, and the most from each later one, unless that takes long."""
LONGER = 2
"""The most draws from each later proposal, relative to those that are affordable. A proposal that is too small for a
good approximation is followed by another, which takes an exchange between machines."""
BY_LAPLACE = 3e7
"""The largest size of all clients' estimates by Laplace's approximations at the draws of a later proposal."""
RATE = 0.5
"""The effective sample size of draws from a later proposal, relative to their number, that is expected."""
FEWEST, LARGE, LARGEST = 250, 64, 200
"""The number of draws from each proposal where data are large; their largest number relative to those that are
affordable; the largest cost of estimates without noise."""
MORE, OF_CLIENTS = 1000, 1e5
"""The least number of draws from the first proposal where points that they share give estimates, if a polynomial of
large data needs as few of these as there would be draws otherwise, and of other data if it times the number of clients
is at most the latter."""
FEW_FAR = 0.1
"""The number of draws as wide as the prior, relative to others, where points that all draws share give estimates: far
from the posterior these do not, so that all rows are read at each draw."""
SLOW = 2.4
"""The cost of estimates without noise above which a probe shows first whether they are needed. Where clients are
elsewhere a probe is an exchange, so that only large data are worth one."""
PART = 4
"""The divisor of the draws that are affordable after a fit, for those from each proposal."""
LEAST, PER_DIMENSION, EACH = 50, 5, 4
"""Effective sample sizes, in all and per dimension of θ, below which a mean and a covariance cannot be estimated; where
data are large, the least number of draws from each proposal relative to these."""
ENOUGH = 0.8
"""The effective sample size at which no more proposals are needed, relative to the number of draws from the first."""
ON_REQUEST = 10
"""The factor on the work where the fit has a precision."""
QUIET = 0.1
"""The largest variance of log weights that is accepted, of nine in ten draws, and on average over the weights. Noise
beyond grows towards the tails, and hides their weight from k-hat."""
SLOW_PROBE, LOUD = 50, 1.0
"""Draws of θ at which the noise of log weights is measured first where estimates without it take long, and the largest
variance that is accepted there; where data are large, it is on average over the weights, too."""
DISTANT, CLOSE = 100.0, 5.0
"""The spread of the log target, its largest less its median value, of draws from a proposal that is so far from the
posterior that another round gets closer sooner than other proposals do, where data are large; the effective sample size
of the probe's draws below which it is that far where q(w_i | θ) is Laplace's approximation, for which a round takes
less time than estimates do."""


class Effort(NamedTuple):
    """How many draws of θ a correction takes.

    Attributes:
        affordable: the number of draws from each proposal that take no longer than other work after a fit.
        draws: their number from the first proposal.
        later: the most from each of the others.
        by_laplace: the most from any of the others, where clients' estimates are Laplace's.
        enough: the effective sample size at which no more are needed.
        least: the effective sample size below which a mean and a covariance cannot be estimated.
        cost: the time of Laplace's estimates at the draws of the first proposal, relative to that of other work.
        slow: whether that is so long that a few draws show first whether they are needed, or q(θ) is close enough.
        mixture: rows are sums or integrals over latent variables.
        shared: points that all draws of θ share give estimates without noise, which take no longer than others.
    """

    affordable: int
    draws: int
    later: int
    by_laplace: int
    enough: int
    least: int
    cost: float
    slow: bool
    mixture: bool
    shared: bool

    @property
    def large(self) -> bool:
        """Whether data are so large that there are few draws, which take longer than other work."""
        return self.affordable < FEWEST

    @property
    def acceptable_noise(self) -> float:
        """The largest variance of log weights, on average over these, that needs no Laplace estimates."""
        return LOUD if self.large else QUIET

    @property
    def prior(self) -> float:
        """The number of draws as wide as the prior, relative to others, of a proposal that has such."""
        return FEW_FAR if self.shared else 1.0

    @property
    def restarted(self) -> int:
        """The number of draws from the first proposal after noise is found: half of the usual, if these are enough."""
        return min(self.draws, max(self.draws // 2, EACH * self.least))

    def further(self, size: float, laplace: bool = False, wide: bool = False) -> int:
        """Return how many draws another proposal gives.

        They are a multiple of those from the first, if not the most, so that round-off in the size does not matter.

        Args:
            size: the effective sample size of those before.
            laplace: clients' estimates are Laplace's.
            wide: a part of the proposal is as wide as the prior.
        """
        most = self.by_laplace if laplace else LATER
        number = min(self.later, most)
        if size >= self.least:  # which a size that is not a number is not
            missing = (self.enough - size) / RATE
            number = min(max(math.ceil(missing / self.draws), 1) * self.draws, number)
        return max(2 * self.draws, min(2 * number, most)) if wide else number


def effort_of(fitted: Fitted, elsewhere: bool = False) -> Effort | None:
    """Return how many draws a correction takes; None if there is none, or if it would take too long.

    Args:
        fitted: q without a correction.
        elsewhere: clients are on other machines.
    """
    factor = 1 if fitted.precision is None else ON_REQUEST
    affordable = khat.affordable_draws(fitted, fitted.rows_read) // PART * factor
    large = affordable < FEWEST
    draws = FEWEST if large else min(DRAWS, affordable)
    family = fitted.program.random == (GLOBAL,)
    if not family or not khat.has_density(fitted) or draws > affordable * LARGE:
        return None
    own = draws_of_q(fitted, COMPARED)
    size = own.shape[1]
    least = max(LEAST, PER_DIMENSION * size)
    if large and draws < EACH * least:
        return None
    later = draws if large else min(LATER, LONGER * affordable)
    computed = evaluations(draws, size, DEGREE) if large else draws
    cost = computed * COST * fitted.program.terms / affordable
    inexact = is_inexact(fitted.program)
    slow = large if elsewhere else cost > SLOW or inexact
    mixture = fitted.program.terms > 1
    shared = not elsewhere and learns_block(fitted) and share_points(fitted, own, draws)
    if shared and large and evaluations(MORE, size, DEGREE) <= draws:
        draws = later = MORE
    elif shared and not large and MORE * len(fitted.federation) <= OF_CLIENTS:
        draws, later = max(draws, MORE), max(later, LONGER * MORE)
    of_laplace = int(BY_LAPLACE / max(1, size_of_evidence(fitted)))
    if inexact:
        draws = min(draws, max(MORE, of_laplace))
        later = min(later, LONGER * draws)
    by_laplace = min(LATER, max(draws, of_laplace))
    return Effort(
        affordable,
        draws,
        later,
        by_laplace,
        int(ENOUGH * draws),
        least,
        cost,
        slow,
        mixture,
        shared,
    )


def draws_of_q(fitted: Fitted, count: int) -> Tensor:
    """Return draws of q(θ), from which the first proposal is made, ``(S, D)``."""
    return draw_theta(fitted, count, fitted.key(0, "correction"))[GLOBAL][:, 0, 0]


def equal_shares(draws: Tensor) -> Tensor:
    """Return the equal shares of draws that have no weights, ``(S,)``, in double precision."""
    return draws.new_full((len(draws),), 1 / len(draws), dtype=torch.float64)


class Probed(NamedTuple):
    """What the log target of a few draws, computed twice, shows of q.

    Attributes:
        distant: q(θ) is so far from the posterior that another round gets closer sooner than other proposals do.
        noisy: q(w_i | θ) approximates the clients' posteriors so poorly that the log target is mostly noise.
    """

    distant: bool
    noisy: bool


@on_cpu()
def probed_effort(fitted: Fitted, elsewhere: bool = False) -> Effort | None:
    """Return the result of :func:`effort_of` if a probe shows first what estimates need; else None.

    It does so where data are large; for mixtures of rows in one process, whose posteriors have several modes, which
    proposals do not find from far away; and there where q(w_i | θ) is Laplace's approximation, see :data:`CLOSE`.
    """
    effort = effort_of(fitted, elsewhere)
    if effort is None or not has_block(fitted.program) or is_exact(fitted.program):
        return None
    return effort if effort.slow or (effort.mixture and not elsewhere) else None


@torch.no_grad()
@on_cpu()
def probe(fitted: Fitted, log_weights: SumLogWeights = sum_log_weights) -> Probed:
    """Show by a few draws from the first proposal how good q is.

    Args:
        fitted: q without a correction, of all clients of the fit. They may lack steps of their own.
        log_weights: as for :func:`correct`.
    """
    own = draws_of_q(fitted, DRAWS)
    proposals = Proposals(find_prior_coordinates(fitted.program, fitted.params, own))
    if not proposals.add(own, equal_shares(own), SLOW_PROBE, centres=1):
        return Probed(distant=True, noisy=False)
    with noise.seeded(0):
        z = proposals.sample(own.dtype)
    key = fitted.key(0, "correction")
    if not is_laplace(fitted.program):
        return probe_at(fitted, z, key, log_weights)
    log_shares = log_target(fitted, z, key, log_weights, laplace=False) - proposals.log_prob()
    log_shares = log_shares.where(log_shares.isfinite(), -torch.inf)
    size = effective_sample_size(log_shares.softmax(0))
    return Probed(distant=not size >= CLOSE, noisy=False)


def probe_at(fitted: Fitted, z: Tensor, key: Tensor, log_weights: SumLogWeights) -> Probed:
    """Compute the log target at some draws of θ ``(S, D)`` twice; other arguments as of :func:`probe`."""
    pair = log_target_twice(fitted, z, key, log_weights)
    spread = float(torch.cat(pair).max() - torch.cat(pair).median())
    return Probed(not spread <= DISTANT, noise_variance(*pair) > LOUD)
