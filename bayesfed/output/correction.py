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

If q(w_i | θ) approximates the client's posterior poorly, a log weight is mostly noise, which k-hat does not show where
it hides the weight of a tail. Its variance is measured by computing it twice at some draws of the first proposal; if it
is large, clients compute log p(D_i | θ_s) by :mod:`bayesfed.output.evidence` instead, whose estimates have no noise.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from bayesfed.elbo import noise
from bayesfed.elbo.elbo import server_pass
from bayesfed.elbo.handlers import on_cpu
from bayesfed.guides.family import GLOBAL
from bayesfed.output import khat
from bayesfed.output.effort import (
    DRAWS,
    LARGEST,
    LATER,
    SLOW_PROBE,
    Effort,
    Probed,
    draws_of_q,
    effort_of,
    equal_shares,
    probe_at,
)
from bayesfed.output.evidence import ERROR_OF_SUM
from bayesfed.output.fitted import Correction, Fitted
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
from bayesfed.output.log_densities import DEGREE, Probe, SumLogWeights, sum_log_weights
from bayesfed.output.log_target import (
    learns_block,
    log_target,
    log_target_twice,
    noise_variance,
    weighted_noise_variance,
)
from bayesfed.output.polynomials import is_polynomial
from bayesfed.output.prior_coordinates import find_prior_coordinates
from bayesfed.output.proposal import Around, Proposals
from bayesfed.output.scaled_coordinates import find_scaled_coordinates

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
EVEN = 0.99
"""Effective sample size of q's own draws, relative to their number, above which q(θ) needs no correction."""
FAR = 0.1
"""Relative effective sample size of the first proposal below which q(θ) was so far from the posterior that clients'
variables are drawn from Laplace approximations, not from q(w_i | θ)."""
TAIL = 0.02
"""The largest share of all weight that may lie beyond the largest weight if k is above :func:`khat.limit`."""
FINE = 0.03
"""The largest mean variance of clients' log weights, where Laplace approximations take long, at which clients draw
from q(w_i | θ) although θ has weights from elsewhere, or from closer estimates."""
PROBE, QUIET = 200, 0.1
"""Draws of θ at which the noise of log weights is measured, and the largest variance that is accepted, of nine in ten
draws, and on average over the weights. Noise beyond grows towards the tails, and hides their weight from k-hat."""


class CorrectionResult(NamedTuple):
    """The outcome of importance sampling.

    Attributes:
        reliable: q(θ), or the correction if there is one, is a good approximation.
        correction: draws in place of q(θ); None if q(θ) needs none, or if it cannot be corrected.
        attempted: weights were computed, and were too uneven if the outcome is not reliable.
        certain: it is reliable, the weights have a finite variance and a large effective sample size.
    """

    reliable: bool
    correction: Correction | None = None
    attempted: bool = True
    certain: bool = False

    def confirms(self, early: bool) -> bool:
        """Return whether a run has its posterior; after an early end that must be certain."""
        return self.certain if early else self.reliable


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
    estimates = _Estimates(fitted, log_weights, fitted.key(0, "correction"), effort)
    own = draws_of_q(fitted, draws)
    laplace = laplace_locals = False
    proposals = Proposals(find_prior_coordinates(fitted.program, fitted.params, own))
    z, shares = own, equal_shares(own)
    targets: list[Tensor] = []
    rough, certain, further, wide, scaled, number = True, False, False, False, False, draws
    while number:
        around = Around.BOTH if further or wide else Around.DRAWS
        added = proposals.add(
            z,
            shares,
            number,
            around=around,
            centres=1 if rough else CENTRES,
            log_target=torch.cat(targets) if rough and targets else None,
        )
        if not added:
            return CorrectionResult(reliable=False)
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
        wide = len(targets) == PRIOR and not (
            laplace and effort.slow and is_polynomial(new, target, DEGREE, ERROR_OF_SUM)
        )
        weights = _assess(torch.cat(targets) - proposals.log_prob(), effort.enough)
        z = proposals.draws
        shares, rough = weights.shares, weights.size < draws / 2
        size_of_each = weights.size_of_each(z)
        number = effort.further(size_of_each)
        if wide:
            number = max(2 * draws, min(2 * number, LATER))
        if len(targets) == 1 and weights.size < FAR * len(z):
            laplace_locals = learns_block(fitted)
        if weights.size < least:
            if len(targets) >= patience:
                return CorrectionResult(reliable=False)
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
    correction = Correction(
        {GLOBAL: z[:, None, None]},
        weights.k,
        (laplace or laplace_locals) and not estimates.suffice_for_locals(z),
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
    if not proposals.add(z, equal_shares(z), DRAWS, around=Around.DRAWS, centres=CENTRES):
        raise ValueError("the draws of θ have a singular covariance: there is no proposal for them")
    with noise.seeded(0):
        new = proposals.sample(z.dtype)
    key, laplace = fitted.key(0, "evidence"), learns_block(fitted)
    return log_target(fitted, new, key, log_weights, laplace) - proposals.log_prob()


class _Estimates(NamedTuple):
    """The clients' estimates of the log target of one correction.

    Attributes:
        fitted: q without a correction.
        log_weights: as for :func:`correct`.
        key: of the clients' noise.
        effort: how long these and other estimates take.
    """

    fitted: Fitted
    log_weights: SumLogWeights
    key: Tensor
    effort: Effort

    def at(self, z: Tensor, number: int, laplace: bool, probe: Probe | None = None) -> Tensor:
        """Compute the log target at draws ``(S, D)`` of a proposal, whose number is 0 for the first: ``(S,)``."""
        key = noise.fold(self.key, number)
        return log_target(self.fitted, z, key, self.log_weights, laplace, probe)

    def at_first(
        self, proposals: Proposals, probed: Probed | None
    ) -> tuple[Tensor, bool] | CorrectionResult:
        """Compute the log target at draws of the first proposal, and choose how clients estimate log p(D_i | θ).

        One request has these draws, those whose estimates are repeated, which shows their noise, and draws of q(θ). If
        the noise is large, a second one has Laplace's estimates, which have none; between machines these may come with
        the answer to the first. Where they take long, a request of few draws shows the noise before.

        Args:
            proposals: the first, with its draws ``(S, D)``.
            probed: as for :func:`correct`.

        Returns:
            The log target ``(S,)``, and whether it is Laplace's; or the result, if there is one already.
        """
        z, repeats = proposals.draws, PROBE if learns_block(self.fitted) else 0
        if self.effort.shared:
            return self.at(z, 0, laplace=True), True
        if repeats and self.effort.slow:
            key = noise.fold(self.key, 0)
            probed = probed or probe_at(self.fitted, z[:SLOW_PROBE], key, self.log_weights)
            if probed.noisy:
                if self.effort.cost > LARGEST:
                    return CorrectionResult(reliable=False, attempted=False)
                return self.at(z, 0, laplace=True), True
            repeats = 0
        of_q, minus_log_q = self._draws_of_q(z)
        together = torch.cat([z, z[:repeats], of_q])
        probe = Probe(len(z), repeats) if repeats else None
        found = self.at(together, 0, laplace=False, probe=probe)
        target, again, at_q = found.split([len(z), repeats, len(of_q)])
        if len(of_q) and _is_posterior(at_q + minus_log_q):
            return CorrectionResult(reliable=True, certain=True)
        once, log_proposal = target[:repeats], proposals.log_prob()[:repeats]
        of_weights = weighted_noise_variance(once, again, log_proposal)
        if max(noise_variance(once, again), of_weights) <= QUIET:
            return target, False
        return self.at(z, 0, laplace=True), True

    def _draws_of_q(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Draw θ from q ``(S, D)``; return the draws with −log q(θ) ``(S,)``, in double precision.

        They show whether q needs a correction. There are none where the fit has a precision, since then it does.

        Args:
            z: draws of the first proposal.
        """
        if self.fitted.precision is not None:
            return z[:0], z[:0]
        count = min(len(z) // 2 if self.effort.large else len(z), khat.DRAWS)
        program, params = self.fitted.program, self.fitted.params
        supplied = program.noise(self.fitted.key(0, "elbo"), count, local=False)
        found = server_pass(program, params, supplied, count)
        return found.theta[GLOBAL][:, 0, 0], (found.term - found.log_prior).double()

    def suffice_for_locals(self, z: Tensor) -> bool:
        """Return whether clients may draw from q(w_i | θ) at draws of the posterior, where Laplace's takes long."""
        if not self.effort.slow:
            return False
        some = z[:: max(1, len(z) // SLOW_PROBE)]
        once, again = log_target_twice(self.fitted, some, self.key, self.log_weights)
        variance = float((once - again).square().mean()) / 2
        return variance <= FINE * len(self.fitted.federation)


def _is_posterior(log_weights: Tensor) -> bool:
    """Return whether weights p / q ``(S,)`` are so even that q needs no correction."""
    size = effective_sample_size((log_weights - log_weights.max()).exp())
    return size > EVEN * len(log_weights) and pareto_k(log_weights) <= khat.limit(len(log_weights))
