"""The predictive distribution of every row: a mixture over weighted draws of a posterior."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Categorical, Independent, MixtureSameFamily

from bayesfed.data.batch import Batch
from bayesfed.data.federation import Federation
from bayesfed.elbo.sites import Site
from bayesfed.output import dependent_rows
from bayesfed.output.client_draws import Draws
from bayesfed.output.draws import flatten_rows, run_model, weighted_draws
from bayesfed.output.fitted import Fitted
from bayesfed.vmap.mixtures import Mixture


class Part(NamedTuple):
    """The components of the mixtures of some rows.

    Attributes:
        logits: log weights, ``(rows, S)``.
        family: makes distributions of ``params``.
        params: parameters, ``(rows, S, *)``.
    """

    logits: Tensor
    family: Callable[..., Any]
    params: dict[str, Tensor]


def predictive(
    fitted: Fitted, federation: Federation, num_samples: int = 100, *, seed: int = 0
) -> MixtureSameFamily:
    """Return the predictive distribution p(y | row) of every row, given the fit and the client's own rows.

    The components are draws of θ and of the client's variables. They have equal weights unless the guide weights draws,
    as particles do, by the likelihood of the client's own rows (PAC-PFL, eq. 37). If the rows of a client are one
    multivariate Normal, as in a Gaussian process, each component is conditional on the client's own rows.

    Args:
        fitted: a posterior; the rows that it was fitted to, or personalised with, are the clients' own.
        federation: rows to predict, of clients of this posterior.
        num_samples: number of components. If θ has finitely many values, such as particles, each has the same number of
            components, or one if no client has random variables. A point estimate is one component.
        seed: seed of the draws.

    Returns:
        torch's mixture, over rows in the federation's order (over clients for a site outside the observations plate),
        with ``mean``, ``variance``, ``cdf``, ``log_prob`` and ``sample``. :func:`quantiles` inverts its ``cdf``.

    Raises:
        ValueError: the model observes more than one site; the rows of a client are one event that is not multivariate
            Normal.
        KeyError: a client took no part in the fit.

    Example:
        >>> import torch
        >>> import bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> panel = datasets.grunfeld()
        >>> posterior = bf.fit(models.varying_intercept, panel, rounds=2)
        >>> posterior.predictive(panel).log_prob(panel["y"]).shape
        torch.Size([220])
    """
    program = fitted.program
    if len(program.observed) != 1:
        raise ValueError(
            f"the model observes {', '.join(s.name for s in program.observed)}: a mixture is of one site"
        )
    few = fitted.select(federation.names)
    of_rows = _dependent_rows if program.joint else _independent_rows
    parts = list(of_rows(few, federation, num_samples, seed))
    logits = torch.cat([part.logits for part in parts])
    params = {name: torch.cat([part.params[name] for part in parts]) for name in parts[0].params}
    return MixtureSameFamily(Categorical(logits=logits), parts[0].family(**params))


def quantiles(mixture: MixtureSameFamily, levels: Tensor, steps: int = 60) -> Tensor:
    """Compute quantiles of univariate continuous mixtures, by bisection.

    Args:
        mixture: components need a mean, a standard deviation and a distribution function.
        levels: levels in (0, 1), ``(H,)``.
        steps: number of bisections of an interval that begins ten standard deviations of the widest component below
            the smallest mean of a component, and ends as far above the largest.

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


def _independent_rows(
    fitted: Fitted, federation: Federation, num_samples: int, seed: int
) -> Iterator[Part]:
    """Yield the distribution of the observed site at each draw, for some clients at a time."""
    (site,) = fitted.program.observed
    for chunk, draws in weighted_draws(fitted, num_samples, seed, federation):
        batch = federation.batch(chunk)
        fn = run_model(fitted, fitted.program.model, draws, chunk, batch)[site.name]["fn"]
        weights, found = _weights(draws, site, batch), []
        for weight, component in (
            fn.weighted_components() if isinstance(fn, Mixture) else ((None, fn),)
        ):
            family, params = _family_and_params(component, site)
            if weight is not None:
                params["weight"] = weight
            found.append({n: flatten_rows(v, site, batch, draws.count) for n, v in params.items()})
        flat = {n: torch.cat([one[n] for one in found]).transpose(0, 1) for n in found[0]}
        own = flat.pop("weight", 0.0)
        yield Part(weights.repeat(1, len(found)) + own, family, flat)


def _dependent_rows(
    fitted: Fitted, federation: Federation, num_samples: int, seed: int
) -> Iterator[Part]:
    """Yield the distribution of new rows given the client's own at each draw, if a client's rows are one event."""
    (site,) = fitted.program.observed
    for _, draws, batch, params in dependent_rows.predictive(fitted, federation, num_samples, seed):
        rows = {name: value[:, batch.mask].transpose(0, 1) for name, value in params.items()}
        yield Part(_weights(draws, site, batch), dependent_rows.family(params), rows)


def _weights(draws: Draws, site: Site, batch: Batch) -> Tensor:
    """Return the log weights of the draws of each row's client, ``(rows, S)``."""
    weights = draws.normalised_log_weights(len(batch)).to(batch.scale).T
    return weights if not (site.per_row or site.joint) else weights[batch.mask.nonzero()[:, 0]]


def _family_and_params(fn: Any, site: Site) -> tuple[Callable[..., Any], dict[str, Tensor]]:
    """Return a distribution's family and its parameters, expanded to the batch dimensions."""
    if isinstance(fn, Independent):
        family, params = _family_and_params(fn.base_dist, site)
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
