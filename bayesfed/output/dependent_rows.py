"""Models whose rows are one event of a client (``federation.jointly()``), such as Gaussian processes.

Given all variables, rows still depend on each other, so that to predict is to condition on the client's own rows. Where
the event is multivariate Normal the model itself says how: it is run on the own and the new rows together, and the law
of the new ones given the own follows from the blocks of its covariance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from linear_operator.utils.cholesky import psd_safe_cholesky
from torch import Tensor
from torch.distributions import MultivariateNormal

from bayesfed.data.batch import Batch, Fields
from bayesfed.data.federation import Federation
from bayesfed.elbo import noise
from bayesfed.functional.multivariate_normal import Gaussian, conditioned
from bayesfed.output.draws import Draws, key_of, replayed, weighted

if TYPE_CHECKING:
    from bayesfed.output.posterior import Posterior


class NotGaussian(ValueError):
    """The rows of a client are one event whose law given some of them is not known."""


def laws(
    posterior: Posterior, federation: Federation, num_samples: int, seed: int
) -> Iterator[tuple[Tensor, Draws, Batch, Tensor, Tensor]]:
    """The law of each new row given the client's own rows, the noise included, at each draw (PAC-PFL, eq. 35).

    Args:
        posterior: of a model with one observed site, and of the clients of ``federation``.
        federation: rows to predict; what is observed of them is not looked at.
        num_samples: draws of the posterior, see :func:`~bayesfed.output.draws.weighted`.
        seed: of the draws.

    Yields:
        Positions of K clients, S weighted draws, the rows to predict, their means and variances ``(S, K, Q)``.

    Raises:
        NotGaussian: the observed site is not multivariate Normal over the rows.
    """
    program, (site,) = posterior.program, posterior.program.observed
    square = (2 * int(posterior.federation.lengths.max())) ** 2
    for chunk, draws in weighted(posterior, num_samples, seed, federation, numbers=square):
        own, there = posterior.federation.batch(chunk), federation.batch(chunk)
        node = replayed(posterior, program.model, draws, chunk, own)[site.name]
        value, parts = _by_client(node["value"], draws.count, own), []
        for rows in torch.arange(there.mask.shape[1]).split(max(own.mask.shape[1], 64)):
            mean, covariance = law(posterior, draws, chunk, _joined(own, _columns(there, rows)))
            parts.append(conditioned(mean, covariance, value, own.mask))
        means, variances = zip(*parts, strict=True)
        yield chunk, draws, there, torch.cat(means, -1), torch.cat(variances, -1)


def predict(posterior: Posterior, federation: Federation, num_samples: int, seed: int) -> Tensor:
    """Draws of new rows given the client's own, by torch's generator: ``(S, rows)``. Arguments as for :func:`laws`."""
    parts = []
    for chunk, draws, batch, mean, variance in laws(posterior, federation, num_samples, seed):
        weights = draws.log_probabilities(len(chunk)).to(mean)
        keys = noise.fold(
            key_of(posterior, seed, "predict"), posterior.federation.stream_ids[chunk]
        )
        found = Draws({"mean": mean, "variance": variance}, draws.count, weights)
        values = found.picked(1, num_samples, keys).values
        y = values["mean"] + values["variance"].sqrt() * torch.randn_like(values["mean"])
        parts.append(y[:, batch.mask])
    return torch.cat(parts, 1)


def law(posterior: Posterior, draws: Draws, chunk: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Mean ``(S, K, B)`` and covariance ``(S, K, B, B)`` of the rows of K clients at draws of the latent sites.

    Raises:
        NotGaussian: see :func:`laws`.
    """
    (site,) = posterior.program.observed
    fn = replayed(posterior, posterior.program.model, draws, chunk, batch)[site.name]["fn"]
    rows = batch.mask.shape[1]
    if not isinstance(fn, Gaussian | MultivariateNormal) or fn.event_shape != (rows,):
        raise NotGaussian(
            f"site {site.name!r} is all rows of a client as one {type(fn).__name__}: only of a multivariate "
            "Normal over the rows (torch's, or bayesfed.functional.multivariate_normal.Gaussian) is the law of new "
            "rows given a client's own known here. sample and log_likelihood need none"
        )
    mean = _by_client(fn.loc, draws.count, batch)
    covariance = fn.covariance_matrix.squeeze(-3).expand(draws.count, len(batch), rows, rows)
    return mean, covariance


def functions(
    posterior: Posterior,
    draws: Draws,
    chunk: Tensor,
    own: Batch,
    there: Batch,
    count: int,
    keys: Tensor,
) -> tuple[Tensor, Tensor]:
    """log p(y | f) of one client's own and of other rows, under functions drawn from the prior.

    The function is what two observations of the same row share: with every row given twice, the covariance between
    the two halves is that of f, and what is left of either is noise, which must be independent between rows.

    Args:
        posterior: of a model with one observed site.
        draws: S draws of its latent sites.
        chunk: the position of one client.
        own: its own rows.
        there: other rows of it.
        count: L, functions for each draw.
        keys: the client's noise stream, ``(1,)``.

    Returns:
        ``(L, S, m)`` and ``(L, S, m')``.

    Raises:
        NotGaussian: see :func:`laws`; or the noise of two rows is not independent.
    """
    (site,) = posterior.program.observed
    rows = _joined(own, there)
    width, size = own.mask.shape[1], rows.mask.shape[1]
    nodes = replayed(posterior, posterior.program.model, draws, chunk, rows)
    y = _by_client(nodes[site.name]["value"], draws.count, rows)[:, 0]
    mean, covariance = law(posterior, draws, chunk, _joined(rows, rows))
    mean, covariance = mean[:, 0, :size], covariance[:, 0].double()
    seen, common = covariance[:, :size, :size], covariance[:, :size, size:]
    noisy = (seen - common).diagonal(dim1=-2, dim2=-1)
    scale = seen.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    rest = seen - common - torch.diag_embed(noisy)
    if (rest.abs() > 1e-3 * scale).any() or (noisy <= 0).any():
        raise NotGaussian(
            f"site {site.name!r} is not a function plus noise that is independent between rows: "
            "there is no loss of a row by itself"
        )
    common = seen - torch.diag_embed(noisy)
    jitter = 1e-6 * scale * torch.eye(size).to(common)  # it is nearly singular
    factor = psd_safe_cholesky(common + jitter)
    u = noise.uniform(keys, (count, draws.count, size))[0]
    f = mean + (factor @ torch.special.ndtri(u)[..., None]).squeeze(-1).to(mean)
    log_prob = torch.distributions.Normal(f, noisy.sqrt().to(mean)).log_prob(y)
    return log_prob[..., :width], log_prob[..., width:]


def _by_client(value: Tensor, count: int, batch: Batch) -> Tensor:
    """``(S or none, K, 1, B)`` to ``(S, K, B)``."""
    return value.squeeze(-2).expand(count, *batch.mask.shape)


def _joined(first: Batch, second: Batch) -> Batch:
    """The rows of both, of the same clients, with the fields that both have."""
    fields = {
        name: torch.cat([value, second.fields[name]], 1)
        for name, value in first.fields.items()
        if name in second.fields
    }
    mask = torch.cat([first.mask, second.mask], 1)
    return Batch(Fields(fields), mask, torch.ones_like(first.scale), first.index)


def _columns(batch: Batch, rows: Tensor) -> Batch:
    """Some columns of a batch."""
    fields = {name: value[:, rows] for name, value in batch.fields.items()}
    return replace(batch, fields=Fields(fields), mask=batch.mask[:, rows])
