"""The clients' estimates of the log target at draws of θ, and whether their noise hides the posterior.

If q(w_i | θ) approximates a client's posterior poorly, the logarithm of an importance weight is mostly noise, which
k-hat does not show where it hides the weight of a tail. Its variance is measured by computing it twice at some draws.
If it is large, clients compute log p(D_i | θ_s) by :mod:`bayesfed.output.evidence` instead, whose estimates have no
noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bayesfed.elbo import noise
from bayesfed.elbo.elbo import server_pass
from bayesfed.guides.family import GLOBAL
from bayesfed.output import khat
from bayesfed.output.effort import LARGEST, QUIET, SLOW_PROBE, Effort, Probed, probe_at
from bayesfed.output.fitted import CorrectionResult, Fitted
from bayesfed.output.importance import effective_sample_size, pareto_k
from bayesfed.output.log_densities import Probe, SumLogWeights
from bayesfed.output.log_target import (
    learns_block,
    log_target,
    log_target_twice,
    noise_variance,
    weighted_noise_variance,
)
from bayesfed.output.proposal import Proposals

EVEN = 0.99
"""Effective sample size of q's own draws, relative to their number, above which q(θ) needs no correction."""
FINE = 0.03
"""The largest mean variance of clients' log weights, where Laplace approximations take long, at which clients draw
from q(w_i | θ) although θ has weights from elsewhere, or from closer estimates."""
PROBE, REPEATED = 200, 8
"""Draws of θ of the first proposal at which the noise of log weights is measured; the number of draws of others for
each at which it is."""


class Target(NamedTuple):
    """The clients' estimates of the log target at the draws of a proposal.

    Attributes:
        target: ``(S,)``.
        repeated: the same with other noise at some of the draws, NaN at the others, ``(S,)``.
    """

    target: Tensor
    repeated: Tensor

    @staticmethod
    def of(found: Tensor, count: int, some: Tensor) -> Target:
        """Return the first ``count`` values, and those that follow, which repeat the draws at ``some`` positions."""
        target, again = found.split([count, len(some)])
        at = some.to(target.device)
        return Target(target, torch.full_like(target, torch.nan).index_copy(0, at, again))


def join_targets(targets: Sequence[Target]) -> Target:
    """Return the estimates at the draws of several proposals."""
    return Target(*(torch.cat(parts) for parts in zip(*targets, strict=True)))


class Estimates(NamedTuple):
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

    def at(self, z: Tensor, number: int, laplace: bool) -> Target:
        """Compute the log target at draws ``(S, D)`` of a proposal, whose number is 0 for the first."""
        repeats = 0
        if not laplace and learns_block(self.fitted) and self.effort.cost <= LARGEST:
            repeats = math.ceil(len(z) / REPEATED)
        some = torch.linspace(0, len(z) - 1, repeats, device=z.device).long()
        found = self._log_target(torch.cat([z, z[some]]), number, laplace)
        return Target.of(found, len(z), some)

    def _log_target(
        self, z: Tensor, number: int, laplace: bool, probe: Probe | None = None
    ) -> Tensor:
        """Compute the log target at draws ``(S, D)``, ``(S,)``, with the noise of a proposal's number."""
        key = noise.fold(self.key, number)
        return log_target(self.fitted, z, key, self.log_weights, laplace, probe)

    def at_first(
        self, proposals: Proposals, probed: Probed | None
    ) -> tuple[Target, bool] | CorrectionResult:
        """Compute the log target at draws of the first proposal, and choose how clients estimate log p(D_i | θ).

        One request has these draws, those whose estimates are repeated, which shows their noise, and draws of q(θ). If
        the noise is large, a second one has Laplace's estimates, which have none; between machines these may come with
        the answer to the first. Where they take long, a request of few draws shows the noise before.

        Args:
            proposals: the first, with its draws ``(S, D)``.
            probed: as for :func:`correct`.

        Returns:
            The log target, and whether it is Laplace's; or the result, if there is one already.
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
        found = self._log_target(together, 0, laplace=False, probe=probe)
        target, again, at_q = found.split([len(z), repeats, len(of_q)])
        if len(of_q) and _is_posterior(at_q + minus_log_q):
            return CorrectionResult(reliable=True, certain=True)
        once, log_proposal = target[:repeats], proposals.log_prob()[:repeats]
        of_weights = weighted_noise_variance(once, again, log_proposal)
        if max(noise_variance(once, again), of_weights) <= QUIET:
            return Target.of(torch.cat([target, again]), len(z), torch.arange(repeats)), False
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
