"""Predictions of models whose rows are one event of a client (``federation.jointly()``), such as Gaussian processes.

Given all variables, the rows of a client depend on each other, so that new rows are predicted given the client's own
rows. If the event is multivariate Normal, the model is run on the own and the new rows together, and the conditional
distribution of the new rows follows from the blocks of the covariance matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from linear_operator.utils.cholesky import psd_safe_cholesky
from torch import Tensor
from torch.distributions import Categorical, MultivariateNormal, Normal

from bayesfed.data.batch import Batch, Fields
from bayesfed.data.federation import Federation
from bayesfed.elbo import noise
from bayesfed.functional.gaussian_classes import GaussianClasses
from bayesfed.functional.multivariate_normal import Gaussian, conditioned
from bayesfed.output.client_draws import Draws
from bayesfed.output.draws import run_model, weighted_draws
from bayesfed.output.fitted import Fitted


class NotGaussian(ValueError):
    """The rows of a client are one event that is not multivariate Normal, so that new rows cannot be conditioned."""


def predictive(
    fitted: Fitted, federation: Federation, num_samples: int, seed: int
) -> Iterator[tuple[Tensor, Draws, Batch, dict[str, Tensor]]]:
    """Compute the distribution of each new row given the client's own rows, noise included (PAC-PFL, eq. 35).

    Args:
        fitted: q of a model with one observed site, and of the clients of ``federation``.
        federation: rows to predict; their outcomes are not used.
        num_samples: number of draws, see :func:`~bayesfed.output.draws.weighted_draws`.
        seed: seed of the draws.

    Yields:
        Positions of K clients, S weighted draws, the rows to predict, and the parameters of their :func:`family`:
        ``loc`` and ``scale`` ``(S, K, Q)`` of Normals, or ``probs`` ``(S, K, Q, C)`` of classes.

    Raises:
        NotGaussian: the observed site is neither multivariate Normal over the rows nor
            :class:`~bayesfed.functional.gaussian_classes.GaussianClasses`.
    """
    program, (site,) = fitted.program, fitted.program.observed
    square = (2 * int(fitted.federation.lengths.max())) ** 2
    for chunk, draws in weighted_draws(fitted, num_samples, seed, federation, numbers=square):
        own, there = fitted.federation.batch(chunk), federation.batch(chunk)
        node = run_model(fitted, program.model, draws, chunk, own)[site.name]
        value, parts = _by_client(node["value"], draws.count, own), []
        for rows in torch.arange(there.mask.shape[1]).split(max(own.mask.shape[1], 64)):
            both = _concatenate(own, _columns(there, rows))
            fn = run_model(fitted, program.model, draws, chunk, both)[site.name]["fn"]
            if isinstance(fn, GaussianClasses):
                probs = fn.given(value.unsqueeze(-2), own.mask.unsqueeze(-2))["probs"].squeeze(-3)
                parts.append({"probs": probs.expand(*value.shape[:2], *probs.shape[-2:])})
                continue
            mean, covariance = joint_moments(fn, site.name, draws.count, both)
            mean, variance = conditioned(mean, covariance, value, own.mask)
            parts.append({"loc": mean, "scale": variance.sqrt()})
        yield chunk, draws, there, {n: torch.cat([p[n] for p in parts], 2) for n in parts[0]}


def family(params: Mapping[str, Tensor]) -> Callable[..., Any]:
    """Return the distribution that has these parameters."""
    return Categorical if "probs" in params else Normal


def predict(fitted: Fitted, federation: Federation, num_samples: int, seed: int) -> Tensor:
    """Draw new rows given the client's own rows, by torch's generator: ``(S, rows)``.

    Arguments as for :func:`predictive`.
    """
    parts, key = [], fitted.key(seed, "predict")
    for chunk, draws, batch, params in predictive(fitted, federation, num_samples, seed):
        weights = draws.normalised_log_weights(len(chunk)).to(batch.scale)
        keys = noise.fold(key, fitted.federation.stream_ids[chunk])
        values = Draws(params, draws.count, weights).resample(1, num_samples, keys).values
        parts.append(family(params)(**values).sample().to(batch.scale)[:, batch.mask])
    return torch.cat(parts, 1)


def joint_moments(fn: Any, name: str, count: int, batch: Batch) -> tuple[Tensor, Tensor]:
    """Compute mean ``(S, K, B)`` and covariance ``(S, K, B, B)`` of the rows of K clients at S draws.

    Args:
        fn: the distribution of the observed site at the draws.
        name: the site's name.
        count: S.
        batch: the rows.

    Raises:
        NotGaussian: see :func:`predictive`.
    """
    rows = batch.mask.shape[1]
    if not isinstance(fn, Gaussian | MultivariateNormal) or fn.event_shape != (rows,):
        raise NotGaussian(
            f"site {name!r} is all rows of a client as one {type(fn).__name__}: new rows can be predicted given a "
            "client's own only if it is a multivariate Normal over the rows (torch's, or "
            "bayesfed.functional.multivariate_normal.Gaussian). sample and log_likelihood work for all"
        )
    mean = _by_client(fn.loc, count, batch)
    covariance = fn.covariance_matrix.squeeze(-3).expand(count, len(batch), rows, rows)
    return mean, covariance


def log_likelihoods_of_functions(
    fitted: Fitted,
    draws: Draws,
    chunk: Tensor,
    own: Batch,
    there: Batch,
    count: int,
    keys: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute log p(y | f) of one client's own and of other rows, for functions f drawn from the prior.

    The model is run with every row given twice. The covariance between the two halves is that of f; the rest of either
    half's covariance is noise, which must be independent between rows.

    Args:
        fitted: q of a model with one observed site.
        draws: S draws of its latent sites.
        chunk: the position of one client.
        own: the client's own rows.
        there: other rows of the client.
        count: L, functions for each draw.
        keys: the client's noise stream, ``(1,)``.

    Returns:
        ``(L, S, m)`` and ``(L, S, m')``.

    Raises:
        NotGaussian: see :func:`predictive`; or the noise of two rows is not independent.
    """
    (site,) = fitted.program.observed
    rows = _concatenate(own, there)
    width, size = own.mask.shape[1], rows.mask.shape[1]
    nodes = run_model(fitted, fitted.program.model, draws, chunk, rows)
    y = _by_client(nodes[site.name]["value"], draws.count, rows)[:, 0]
    twice = _concatenate(rows, rows)
    fn = run_model(fitted, fitted.program.model, draws, chunk, twice)[site.name]["fn"]
    mean, covariance = joint_moments(fn, site.name, draws.count, twice)
    mean, covariance = mean[:, 0, :size], covariance[:, 0].double()
    seen, common = covariance[:, :size, :size], covariance[:, :size, size:]
    noisy = (seen - common).diagonal(dim1=-2, dim2=-1)
    scale = seen.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    rest = seen - common - torch.diag_embed(noisy)
    if (rest.abs() > 1e-3 * scale).any() or (noisy <= 0).any():
        raise NotGaussian(
            f"site {site.name!r} is not a function plus noise that is independent between rows: "
            "the loss of a single row is not defined"
        )
    common = seen - torch.diag_embed(noisy)
    jitter = 1e-6 * scale * torch.eye(size).to(common)  # the covariance is nearly singular
    factor = psd_safe_cholesky(common + jitter)
    u = noise.uniform(keys, (count, draws.count, size))[0]
    f = mean + (factor @ torch.special.ndtri(u)[..., None]).squeeze(-1).to(mean)
    log_prob = Normal(f, noisy.sqrt().to(mean)).log_prob(y)
    return log_prob[..., :width], log_prob[..., width:]


def _by_client(value: Tensor, count: int, batch: Batch) -> Tensor:
    """Turn ``(S, K, 1, B)``, or ``(K, 1, B)``, into ``(S, K, B)``."""
    return value.squeeze(-2).expand(count, *batch.mask.shape)


def _concatenate(first: Batch, second: Batch) -> Batch:
    """Concatenate rows of the same clients, with the fields that both batches have."""
    fields = {
        name: torch.cat([value, second.fields[name]], 1)
        for name, value in first.fields.items()
        if name in second.fields
    }
    mask = torch.cat([first.mask, second.mask], 1)
    return Batch(Fields(fields), mask, torch.ones_like(first.scale), first.index)


def _columns(batch: Batch, rows: Tensor) -> Batch:
    """Select columns, each with one row per client, of a batch."""
    fields = {name: value[:, rows] for name, value in batch.fields.items()}
    return replace(batch, fields=Fields(fields), mask=batch.mask[:, rows])
