"""Correct q(θ) by importance sampling: draws from a wider proposal, weighted by what all clients' data say of them.

    log weight of θ_s:  log p(θ_s) − log t(θ_s) + Σ_i log p(w_is, D_i | θ_s) − log q(w_is | θ_s),   w_is ~ q(w_i | θ_s)

A Normal q(θ) has neither the skewness nor the heavy tails of a posterior of few clients. The first proposal t is a
Student's t with the mean and covariance of q. Up to five others follow. While the effective sample size is small, they
have the mean and covariance of the weighted draws, and those of a quadratic surrogate of the log target, fitted to what
the clients have said of all draws, which finds the posterior from far away (if weights are very uneven, a power of them
is used); then they are mixtures of narrower t distributions around the weighted draws. The third one has a part as wide
as the prior. Without it, draws never reach the ends of a funnel, and k-hat does not show it. Where the priors of some
globals depend on others, are heavy-tailed or end at 0, half of the draws come from proposals in coordinates in which
these priors are standard Normal, see :mod:`bayesfed.output.prior_coordinates`; where draws are closer to a Normal once
some globals are multiplied by others, as many come from coordinates of these products, see
:mod:`bayesfed.output.scaled_coordinates`.

The density t in the weights of all draws is the mean of the proposals so far (Cappé, Guillin, Marin & Robert 2004,
*Population Monte Carlo*; Owen & Zhou 2000, *Safe and effective importance sampling*, section 3). A client computes one
number per draw, of which the server needs the sum over clients. Weights are truncated at √S times their mean (Ionides
2008, *Truncated importance sampling*).

Where a log weight is mostly noise, clients compute log p(D_i | θ_s) by Laplace approximations, see
:mod:`bayesfed.output.estimates`. If that is found after the first proposal, some of its draws have these instead, and
others start from the weighted draws: without the first, which is as wide as q(θ), proposals that are too narrow would
not show it in many dimensions. None of these is as wide as the prior, since one of those before was.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from bayesfed.elbo import noise
from bayesfed.elbo.handlers import on_cpu
from bayesfed.guides.family import GLOBAL
from bayesfed.output import khat
from bayesfed.output.conditionals import is_inexact, is_laplace
from bayesfed.output.effort import (
    DRAWS,
    Probed,
    draws_of_q,
    effort_of,
    equal_shares,
)
from bayesfed.output.estimates import Estimates, Target, join_targets
from bayesfed.output.evidence import ERROR_OF_SUM
from bayesfed.output.fitted import Correction, CorrectionResult, Fitted
from bayesfed.output.importance import (
    effective_sample_size,
    least_effective_size,
    least_tail_size,
    pareto_k,
    systematic_resample,
    tail_share,
    temper_weights,
    truncate_weights,
)
from bayesfed.output.log_densities import SumLogWeights, sum_log_weights
from bayesfed.output.log_target import (
    learns_block,
    log_target,
    mean_noise_variance,
)
from bayesfed.output.polynomials import is_polynomial
from bayesfed.output.prior_coordinates import find_prior_coordinates
from bayesfed.output.proposal import Proposals
from bayesfed.output.scaled_coordinates import find_scaled_coordinates
from bayesfed.output.sum_of_evidence import DEGREE

PROPOSALS = 2, 6
"""The least and the largest number of proposals."""
PATIENCE, QUICK_PATIENCE = 3, 5
"""The number of proposals after which the effective sample size must be large enough to estimate a covariance: where
log weights take long, and where they do not. Priors that are nearly improper need four or five to get there."""
PRIOR = 2
"""The number of proposals after which one is up to twice as large, a part of it as wide as the prior. It is left out
where Laplace's estimates take long, as they do far from the posterior, and the log target is a polynomial in θ: there
is no funnel."""
FURTHER, SPARE = 3, 1.1
"""Where the fit has a precision: the number of proposals beyond :data:`PROPOSALS`, and the factor on their draws."""
EACH_GLOBAL = 0.5
"""The effective sample size of the mean and of the tails of each global at which no more proposals are needed, relative
to that of the weights: the largest weights may all be those of the tail of one of them."""
SEEDS = 100
"""The difference between the seeds of the proposals of two fits whose seeds differ by one."""
CENTRES = 500
"""Number of centres around the draws of the third and later proposals."""
KEPT = 4
"""Where noise is found after the first proposal: one in so many of its draws have Laplace's estimates."""
FAR = 0.1
"""Relative effective sample size of the first proposal below which q(θ) was so far from the posterior that clients'
variables are drawn from Laplace approximations, not from q(w_i | θ), unless this turns out to be their posterior."""
LITTLE = 0.01
"""The variance of log weights, on average over these, up to which q(w_i | θ) is the clients' posterior."""
TAIL = 0.02
"""The largest share of all weight that may lie beyond the largest weight if k is above :func:`khat.limit`."""


@torch.no_grad()
@on_cpu()
def correct(
    fitted: Fitted, log_weights: SumLogWeights = sum_log_weights, probed: Probed | None = None
) -> CorrectionResult:
    """Correct q(θ) of all clients of a fit by importance sampling, if it needs a correction.

    There is no correction if the weights are too uneven (Pareto k above :func:`khat.limit` with a heavy tail, or a
    small effective sample size), if q(θ) is no family over one real vector, under privacy, or if the clients' rows are
    too many. Where the fit has a :attr:`~bayesfed.output.fitted.Fitted.precision`, there are as many draws as it needs,
    from further proposals, and from a q(θ) that needs no correction too.

    Args:
        fitted: q without a correction, of all clients of the fit.
        log_weights: sums the clients' log weights; between machines it asks the institutions.
        probed: the result of :func:`probe`, if it has been computed.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> from bayesfed.output.correction import correct
        >>> posterior = bf.fit(models.eight_schools, datasets.eight_schools(), bf.SFVI(corrected=False))
        >>> correct(posterior).correction.theta["global"].shape[1:]
        torch.Size([1, 1, 2])
    """
    effort = effort_of(fitted, elsewhere=log_weights is not sum_log_weights)
    if effort is None:
        return CorrectionResult(reliable=False, attempted=False)
    draws, least = effort.draws, effort.least
    patience = PATIENCE if effort.slow or effort.mixture else QUICK_PATIENCE
    estimates = Estimates(fitted, log_weights, fitted.key(0, "correction"), effort)
    own = draws_of_q(fitted, draws)
    laplace, is_far, variance = False, False, math.nan
    proposals = Proposals(find_prior_coordinates(fitted.program, fitted.params, own))
    z, shares = own, equal_shares(own)
    targets: list[Target] = []
    rough, certain, further, wide, scaled, number = True, False, False, False, False, draws
    starts_again = restarted = False
    while number:
        added = proposals.add(
            z,
            shares,
            number,
            centres=1 if rough else CENTRES,
            prior=effort.prior if further or wide else 0.0,
            log_target=join_targets(targets).target if rough and targets else None,
        )
        if not added:
            return CorrectionResult(reliable=False)
        if starts_again:
            proposals.keep_some(draws, KEPT)
            targets = [estimates.at(proposals.draws, 0, laplace)]
            starts_again, restarted, certain = False, True, False
        with noise.seeded(len(targets) + SEEDS * fitted.seed):
            new = proposals.sample(own.dtype)
        if targets:
            target = estimates.at(new, len(targets), laplace)
        else:
            first = estimates.at_first(proposals, probed)
            if isinstance(first, CorrectionResult):
                return first
            target, laplace = first
        targets.append(target)
        wide = (
            not restarted
            and len(targets) == PRIOR
            and not (
                (laplace or is_laplace(fitted.program))
                and (effort.slow or effort.shared)
                and is_polynomial(new, target.target, DEGREE, ERROR_OF_SUM)
            )
        )
        z, every = proposals.draws, join_targets(targets)
        weights = _assess(every.target - proposals.log_prob(), effort.enough)
        if len(targets) > 1 and not laplace:
            variance = mean_noise_variance(weights.shares, *every)
            laplace = starts_again = variance > effort.acceptable_noise
        shares, rough = weights.shares, weights.size < draws / 2
        size_of_each = weights.size_of_each(z)
        number = effort.further(size_of_each, laplace, wide)
        if len(targets) == 1:
            is_far = weights.size < FAR * len(z)
        if starts_again:
            number, wide = effort.restarted, False
        elif weights.size < least and len(targets) >= patience:
            return CorrectionResult(reliable=False)
        if starts_again or weights.size < least:
            shares = temper_weights(weights.logs, least)
            continue
        if not scaled and (found := find_scaled_coordinates(fitted.program, z, shares)):
            proposals.others.append(found)
            scaled = True
        certain = certain or weights.are_enough
        if len(targets) < PROPOSALS[0]:
            continue
        enough = weights.are_enough and size_of_each > effort.enough
        if len(targets) < PROPOSALS[1] and not enough:
            continue
        number, size = 0, weights.least_size(z)
        more = weights.have_variance and len(targets) < PROPOSALS[1] + FURTHER
        if size < fitted.draws_needed and more:
            wanted = len(z) * (SPARE * fitted.draws_needed / size - 1)
            further, number = True, min(math.ceil(wanted), max(effort.affordable, draws))
    if not weights.are_trusted:
        return CorrectionResult(reliable=False)
    z = z[systematic_resample(shares, len(z))]
    laplace_locals = laplace or (is_far and learns_block(fitted) and not variance <= LITTLE)
    inexact = is_inexact(fitted.program)
    correction = Correction(
        {GLOBAL: z[:, None, None]},
        weights.k,
        inexact or (laplace_locals and not estimates.suffice_for_locals(z)),
        ess=size,
        log_weights=weights.logs,
    )
    return CorrectionResult(reliable=True, correction=correction, certain=certain)


class _Weights(NamedTuple):
    """Importance weights of draws of θ.

    Attributes:
        logs: their logarithms, ``(S,)``; −∞ of what is not a number.
        shares: the weights, truncated, which sum to 1.
        size: their effective sample size.
        k: Pareto's k of the weights as they are.
        enough: the effective sample size at which no more draws are needed.
    """

    logs: Tensor
    shares: Tensor
    size: float
    k: float
    enough: int

    @property
    def are_trusted(self) -> bool:
        """Whether k is small for so many draws, or the tail beyond the largest weight has little of all weight."""
        return self.k <= khat.limit(len(self.logs)) or tail_share(self.logs, self.k) < TAIL

    @property
    def have_variance(self) -> bool:
        """Whether they are trusted, and have a finite variance."""
        return self.are_trusted and self.k <= khat.FINITE_VARIANCE

    @property
    def are_enough(self) -> bool:
        """Whether no more draws are needed, unless a precision is asked for."""
        return self.have_variance and self.size > self.enough

    def size_of_each(self, z: Tensor) -> float:
        """Return the smallest effective sample size: of the weights, or of the mean or a tail of a global.

        Of the latter :data:`EACH_GLOBAL` times as much is enough, so that they are divided by it.

        Args:
            z: the draws ``(S, D)``.
        """
        size = min(least_effective_size(self.shares, z), least_tail_size(self.shares, z))
        return min(self.size, size / EACH_GLOBAL)

    def least_size(self, z: Tensor) -> float:
        """Return the smallest effective sample size, of the weights and of the mean of each global."""
        return min(self.size, least_effective_size(self.shares, z))


def _assess(log_weights: Tensor, enough: int) -> _Weights:
    """Assess log weights ``(S,)``."""
    logs = log_weights.where(~log_weights.isnan(), -torch.inf)
    shares = truncate_weights(logs)
    return _Weights(logs, shares, effective_sample_size(shares), pareto_k(logs), enough)


@torch.no_grad()
@on_cpu()
def log_weights_around(fitted: Fitted, log_weights: SumLogWeights = sum_log_weights) -> Tensor:
    """Compute log importance weights of draws from a proposal that is fitted to the draws of a correction: ``(S,)``.

    Their mean estimates the evidence of the model for draws that have no weights, such as those of chains.

    Args:
        fitted: a posterior with a correction, of all clients of the fit.
        log_weights: as for :func:`correct`.

    Raises:
        ValueError: the covariance of the draws is singular.
    """
    assert fitted.correction is not None
    program, z = fitted.program, fitted.correction.theta[GLOBAL][:, 0, 0]
    proposals = Proposals(find_prior_coordinates(program, fitted.params, z))
    if not proposals.add(z, equal_shares(z), DRAWS, centres=CENTRES):
        raise ValueError("the draws of θ have a singular covariance: there is no proposal for them")
    with noise.seeded(0):
        new = proposals.sample(z.dtype)
    key, laplace = fitted.key(0, "evidence"), learns_block(fitted)
    return log_target(fitted, new, key, log_weights, laplace) - proposals.log_prob()
