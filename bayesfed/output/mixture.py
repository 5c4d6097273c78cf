"""The predictive distribution of every row as a mixture over weighted draws of a posterior."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal

from bayesfed.data.batch import Batch
from bayesfed.data.federation import Federation
from bayesfed.elbo.handlers import Derivation
from bayesfed.elbo.sites import Site
from bayesfed.output import dependent_rows
from bayesfed.output.draws import Draws, replayed, weighted
from bayesfed.vmap.mixtures import Mixture

if TYPE_CHECKING:
    from bayesfed.output.posterior import Posterior

Part = tuple[Tensor, Callable[..., Any], dict[str, Tensor]]
"""Log weights ``(rows, S)``, a family and its parameters ``(rows, S, *)``."""


def predictive(
    posterior: Posterior, federation: Federation, num_samples: int = 100, *, seed: int = 0
) -> MixtureSameFamily:
    """p(y | row) of every row, given all that the posterior knows of its client.

    The components are draws of θ and of the client's variables. Where the algorithm weighs them, as for particles, each
    counts by the likelihood of the client's own rows (PAC-PFL, eq. 37), else all count alike. Where the rows of a
    client are one multivariate Normal, as in a Gaussian process, each component conditions on the client's own rows.

    Args:
        posterior: a fitted posterior; the rows that it was fitted to, or personalised with, are the clients' own.
        federation: rows to predict, of clients that the posterior knows.
        num_samples: components: where θ has finitely many values, such as particles, as many for each as make up this
            number, but one where no client has variables that are random. A point is one.
        seed: of the draws.

    Returns:
        torch's mixture, over rows in the federation's order (over clients for a site outside the observations plate):
        ``mean``, ``variance``, ``cdf``, ``log_prob``, ``sample``. :func:`quantiles` inverts its distribution function.

    Raises:
        ValueError: the model observes more than one site; the rows of a client are one event that is not multivariate
            Normal.
        KeyError: a client that took no part.

    Example:
        >>> import torch
        >>> import bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> panel = datasets.grunfeld()
        >>> posterior = bf.fit(models.varying_intercept, panel, rounds=2)
        >>> posterior.predictive(panel).log_prob(panel["y"]).shape
        torch.Size([220])
    """
    program = posterior.program
    if len(program.observed) != 1:
        raise ValueError(
            f"the model observes {', '.join(s.name for s in program.observed)}: a mixture is of one site"
        )
    few = posterior.select(federation.names)
    parts = list((_of_rows if program.joint else _by_row)(few, federation, num_samples, seed))
    logits = torch.cat([part[0] for part in parts])
    family = parts[0][1]
    params = {name: torch.cat([part[2][name] for part in parts]) for name in parts[0][2]}
    return MixtureSameFamily(Categorical(logits=logits), family(**params))


def quantiles(mixture: MixtureSameFamily, levels: Tensor, steps: int = 60) -> Tensor:
    """The quantiles of univariate continuous mixtures, by bisection.

    Args:
        mixture: with components that have a mean, a standard deviation and a distribution function.
        levels: in (0, 1), ``(H,)``.
        steps: halvings of an interval that begins ten standard deviations of the widest component around all means.

    Returns:
        ``(H, rows)``.

    Example:
        >>> import torch
        >>> from torch.distributions import Categorical, MixtureSameFamily, Normal
        >>> from bayesfed.output.mixture import quantiles
        >>> mixture = MixtureSameFamily(Categorical(torch.ones(1, 2)), Normal(torch.tensor([[-1.0, 1.0]]), 1.0))
        >>> quantiles(mixture, torch.tensor([0.5])).round(decimals=4).abs()
        tensor([[0.]])
    """
    parts: Any = mixture.component_distribution
    reach = 10 * parts.stddev.max(-1).values
    shape = (len(levels), *reach.shape)
    low = (parts.mean.min(-1).values - reach).expand(shape)
    high = (parts.mean.max(-1).values + reach).expand(shape)
    for _ in range(steps):
        middle = (low + high) / 2
        below = mixture.cdf(middle) < levels[:, None]
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return (low + high) / 2


def _by_row(
    posterior: Posterior, federation: Federation, num_samples: int, seed: int
) -> Iterator[Part]:
    """The law of the observed site at each draw."""
    (site,) = posterior.program.observed
    for chunk, draws in weighted(posterior, num_samples, seed, federation):
        batch = federation.batch(chunk)
        fn = replayed(posterior, posterior.program.model, draws, chunk, batch)[site.name]["fn"]
        weights, found = _weights(draws, site, batch), []
        for weight, law in fn.weighted_components() if isinstance(fn, Mixture) else ((None, fn),):
            family, params = _taken_apart(law, site)
            if weight is not None:
                params["weight"] = weight
            found.append({n: by_row(v, site, batch, draws.count) for n, v in params.items()})
        flat = {n: torch.cat([one[n] for one in found]).transpose(0, 1) for n in found[0]}
        own = flat.pop("weight", 0.0)
        yield weights.repeat(1, len(found)) + own, family, flat


def _of_rows(
    posterior: Posterior, federation: Federation, num_samples: int, seed: int
) -> Iterator[Part]:
    """The law of new rows given the client's own, at each draw, for a model whose rows are one event."""
    (site,) = posterior.program.observed
    for _, draws, batch, mean, variance in dependent_rows.laws(
        posterior, federation, num_samples, seed
    ):
        mean, variance = (value[:, batch.mask].T for value in (mean, variance))
        weights = _weights(draws, site, batch)
        yield weights, Normal, {"loc": mean, "scale": variance.sqrt()}


def by_row(value: Tensor, site: Site | Derivation, batch: Batch, count: int) -> Tensor:
    """``(S, K, B, *)`` or what expands to it to ``(S, rows, *)``; of a site with a value per client ``(S, K, *)``."""
    if site.per_row:
        return value.expand(count, *batch.mask.shape, *value.shape[3:])[:, batch.mask]
    return value.expand(count, len(batch), 1, *value.shape[3:])[:, :, 0]


def _weights(draws: Draws, site: Site, batch: Batch) -> Tensor:
    """Of every row the log weights of its client's draws, ``(rows, S)``."""
    weights = draws.log_probabilities(len(batch)).to(batch.scale).T
    return weights if not (site.per_row or site.joint) else weights[batch.mask.nonzero()[:, 0]]


def _taken_apart(fn: Any, site: Site) -> tuple[Callable[..., Any], dict[str, Tensor]]:
    """A distribution's family and its parameters, with its batch dimensions in front."""
    if isinstance(fn, Independent):
        family, params = _taken_apart(fn.base_dist, site)
        dims = fn.reinterpreted_batch_ndims
        return (lambda **given: Independent(family(**given), dims)), params
    given = [name for name in fn.arg_constraints if name in vars(fn)] or list(fn.arg_constraints)
    if {"probs", "logits"} <= set(given):
        given.remove("probs")
    if not given:
        raise ValueError(
            f"site {site.name!r} is {type(fn).__name__}, which has no parameters to make a mixture of: use predict"
        )
    params = {name: getattr(fn, name) for name in given}
    return type(fn), {
        name: value.expand(*fn.batch_shape, *value.shape[len(fn.batch_shape) :])
        for name, value in params.items()
    }
