"""The log density that importance sampling of θ aims at, estimated by clients, and the noise of its estimates."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayesfed.elbo.elbo import log_prior
from bayesfed.guides.family import GLOBAL
from bayesfed.output.conditionals import has_block
from bayesfed.output.failing_draws import skip_failing
from bayesfed.output.fitted import Fitted
from bayesfed.output.log_densities import Probe, SumLogWeights


def learns_block(fitted: Fitted) -> bool:
    """Return whether Laplace's approximation may replace q(w_i | θ); where this learns nothing, it is the former."""
    return has_block(fitted.program) and fitted.program.learns_locals


def log_target(
    fitted: Fitted,
    z: Tensor,
    key: Tensor,
    log_weights: SumLogWeights,
    laplace: bool,
    probe: Probe | None = None,
) -> Tensor:
    """Compute log p(θ) plus the clients' estimates of log p(D_i | θ) at draws of θ ``(S, D)``: ``(S,)``.

    It is −∞ where this or θ is not a number, or too large for one.
    """
    known = z.isfinite().all(1)
    z = z.where(known[:, None], 0.0)
    theta, count = {GLOBAL: z[:, None, None]}, len(z)
    found = _log_prior(fitted, z).double() + log_weights(fitted, theta, count, key, laplace, probe)
    return found.where(known & (found < torch.inf), -torch.inf)


def _log_prior(fitted: Fitted, z: Tensor) -> Tensor:
    """Compute log p(θ), ``(S,)``; −∞ where the program fails to factorise a matrix."""

    def at(z: Tensor) -> tuple[Tensor]:
        return (log_prior(fitted.program, fitted.params, {GLOBAL: z[:, None, None]}, len(z)),)

    (found,) = skip_failing(at, [z], lambda z: (torch.full_like(z[:, 0], -torch.inf),))
    return found


def log_target_twice(
    fitted: Fitted, z: Tensor, key: Tensor, log_weights: SumLogWeights
) -> tuple[Tensor, Tensor]:
    """Compute the log target at draws of θ with the noise of two draws of the clients' variables, ``(S,)`` each."""
    pair = log_target(fitted, torch.cat([z, z]), key, log_weights, laplace=False)
    once, again = pair.split(len(z))
    return once, again


def noise_variance(once: Tensor, again: Tensor) -> float:
    """Estimate the variance of numbers that were computed twice, ``(S,)`` each: the 0.9 quantile; 0 of none."""
    if not len(once):
        return 0.0
    return float((once - again).nan_to_num(0.0).square().quantile(0.9)) / 2


def weighted_noise_variance(once: Tensor, again: Tensor, log_proposal: Tensor) -> float:
    """Estimate the mean variance of log targets that were computed twice, over the weights of their draws; 0 of none.

    The logarithm of an unbiased estimate is too small by half of its variance, if its noise is Normal: that is added.
    Otherwise draws of a tail where q(w_i | θ) is poor seem to have no weight, and their noise hides itself.

    Args:
        once: log targets of draws, ``(S,)``.
        again: the same with other noise.
        log_proposal: log density of the proposal at these draws, ``(S,)``.
    """
    variance = (once - again).square() / 2
    logs = (once + again + variance) / 2 - log_proposal
    known = logs.isfinite()
    return float(logs[known].softmax(0) @ variance[known])


def mean_noise_variance(shares: Tensor, once: Tensor, again: Tensor) -> float:
    """Estimate the mean variance of log targets over the weights of their draws; NaN if none was computed twice.

    Args:
        shares: the weights, ``(S,)``.
        once: log targets, ``(S,)``.
        again: the same with other noise, NaN where they were computed once.
    """
    known = again.isfinite() & once.isfinite()
    if not bool(known.any()):
        return math.nan
    own = shares[known] / shares[known].sum()
    return float(own @ (once[known] - again[known]).square()) / 2
