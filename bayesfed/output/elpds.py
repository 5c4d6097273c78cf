"""Leave-one-out predictive densities of single observations or clients, of which sums compare models.

Those of observations are :func:`bayesfed.loo`'s, some clients at a time; those of clients
:func:`bayesfed.leave_one_client_out`'s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from bayesfed.data.moments import is_of_moments
from bayesfed.data.plural import plural
from bayesfed.elbo.handlers import on_cpu
from bayesfed.elbo.program import Program
from bayesfed.output import khat
from bayesfed.output.fitted import Fitted
from bayesfed.output.leave_one_client_out import leave_one_client_out
from bayesfed.output.log_densities import log_densities
from bayesfed.output.loo import elpd_of_draws
from bayesfed.output.predictions import log_likelihood

if TYPE_CHECKING:
    from bayesfed.data.federation import Federation
    from bayesfed.elbo.sites import Site

Unit = Literal["observation", "client"]
NUMBERS = 20_000_000
"""The largest size of a log likelihood, draws times observations, that is computed at once."""


@dataclass(frozen=True, eq=False)
class Elpds:
    """What one model predicts of n observations, or clients, each from all others.

    Attributes:
        elpd: log p(y_i | all others), in nats, ``(n,)``.
        fit: log p(y_i | all), ``(n,)``; NaN of clients.
        khat: Pareto k-hat of the importance weights, ``(n,)``; NaN where chains need none.
        limit: the largest reliable k-hat, see :func:`bayesfed.output.khat.limit`.
    """

    elpd: np.ndarray
    fit: np.ndarray
    khat: np.ndarray
    limit: float


@torch.no_grad()
@on_cpu()
def leave_each_out(
    fitted: Fitted, unit: Unit, num_samples: int, seed: int, outcome: str | None = None
) -> Elpds:
    """Leave out each observation, or each client, in turn.

    Args:
        fitted: the posterior of all clients of the fit. It may be that of some, such as those of one institution: the
            draws of θ are then taken for draws from the posterior, as those of a correction are.
        unit: what is left out.
        num_samples: number of draws.
        seed: seed of the draws.
        outcome: the observed site of ``unit="observation"``, if there are several.

    Raises:
        ValueError: the draws have no importance weights; there are several observed sites, and none is named.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> from bayesfed.output.elpds import leave_each_out
        >>> posterior = bf.fit(models.varying_intercept, datasets.grunfeld(), rounds=30)
        >>> leave_each_out(posterior, "observation", 500, 0).elpd.shape
        (220,)
    """
    if unit == "client":
        table = leave_one_client_out(fitted, num_samples, seed=seed).table
        elpd, k = (table[name].to_numpy(float) for name in ("elpd", "khat"))
        return Elpds(elpd, np.full(len(elpd), np.nan), k, khat.limit(num_samples))
    check_draws(fitted)
    site, common = outcome_site(fitted.program, outcome), None
    if fitted.correction is None and len(fitted.federation) == fitted.program.clients:
        log_p, log_q = log_densities(fitted, num_samples, fitted.key(seed))
        common = {"log_p": log_p, "log_q": log_q}
    parts = [
        _leave_rows_out(fitted.select(names), site.name, common, num_samples, seed)
        for names in _blocks(fitted, num_samples)
    ]
    return Elpds(
        np.concatenate([one.elpd for one in parts]),
        np.concatenate([one.fit for one in parts]),
        np.concatenate([one.khat for one in parts]),
        khat.limit(num_samples),
    )


def check_draws(fitted: Fitted) -> None:
    """Raise a ValueError if the draws are those of point estimates or particles, or of a private run."""
    if fitted.correction is None and not khat.has_density(fitted):
        raise ValueError(
            f"leave-one-out needs draws from a density, and a fit by {fitted.algorithm} has none: point estimates and "
            "particles have no density, and it is not evaluated after private runs. Compare predictions of held-out "
            "rows (bf.metrics), or fit by bf.SFVI()"
        )


def outcome_site(program: Program, outcome: str | None) -> Site:
    """Return the observed site whose observations are left out.

    Raises:
        ValueError: there is no such site, or there are several and none is named.
    """
    sites = {site.name: site for site in program.likelihood}
    if outcome is None and len(sites) == 1:
        return next(iter(sites.values()))
    if outcome not in sites:
        what = "name one" if outcome is None else f"there is no {outcome!r}"
        raise ValueError(f"outcome: {what}; the model's are {', '.join(sites)}")
    return sites[outcome]


def describe_observations(fitted: Fitted, unit: Unit, outcome: str | None) -> dict[str, Tensor]:
    """Return the clients' numbers of rows and a hash of each client's outcomes, int64 ``(N,)``.

    Models can be compared if they have the same. Where a client is left out the hash is that of all its outcomes,
    whatever their names; there is none of a factor, which has no data, or where only moments of the rows are here.
    """
    from bayesfed.output.inference_data import find_data  # xarray takes a while to import

    federation = fitted.federation
    found = {"rows": federation.lengths.clone().cpu()}
    every = fitted.program.likelihood
    sites = [outcome_site(fitted.program, outcome)] if unit == "observation" else [*every]
    data = {} if is_of_moments(federation) else find_data(fitted)[0]
    if all(site.name in data for site in sites):
        hashes = [_hash_outcomes(data[site.name], site, federation) for site in sites]
        found["outcome"] = torch.stack(hashes).sum(0)
    return found


def _hash_outcomes(observed: Tensor, site: Site, federation: Federation) -> Tensor:
    """Return a hash of each client's outcomes of one site, int64 ``(N,)``."""
    values = observed.detach().double().cpu().numpy()
    cuts = federation.offsets[1:-1].tolist() if site.per_row or site.joint else None
    parts = np.split(values, len(federation) if cuts is None else cuts)
    hashes = [blake2b(np.ascontiguousarray(p).tobytes(), digest_size=8).digest() for p in parts]
    return torch.tensor([int.from_bytes(h, "big", signed=True) for h in hashes])


def describe_difference(
    one: Mapping[str, Tensor], other: Mapping[str, Tensor], names: Sequence[str]
) -> str | None:
    """Describe the first client whose observations two models do not share, or return None."""
    for what in ("rows", "outcome"):
        mine, theirs = one.get(what), other.get(what)
        if mine is None or theirs is None:
            continue
        for name, a, b in zip(names, mine.tolist(), theirs.tolist(), strict=True):
            if a != b:
                if what == "rows":
                    return (
                        f"client {name!r} has {plural(a, 'row')} under one and {b:,} under another"
                    )
                return f"client {name!r} has other outcomes, or the outcome in another unit"
    return None


def _blocks(fitted: Fitted, num_samples: int) -> list[list[str]]:
    """Return the names of the clients in groups whose log likelihoods fit into memory."""
    most, found, size = NUMBERS // num_samples, [list[str]()], 0
    for name, rows in zip(fitted.federation.names, fitted.federation.lengths.tolist(), strict=True):
        if found[-1] and size + rows > most:
            found.append([])
            size = 0
        found[-1].append(name)
        size += rows
    return found


def _leave_rows_out(
    few: Fitted, site: str, common: Mapping[str, Tensor] | None, num_samples: int, seed: int
) -> Elpds:
    """Leave out each observation of some clients; ``common`` has the densities of draws from q, if they are."""
    import xarray as xr  # imports of half a second wait until they are needed

    log_lik = log_likelihood(few, few.federation, num_samples, seed)[site].double().cpu()
    log_lik = log_lik[:, ~log_lik.isnan().any(0)]
    dims = ("chain", "draw")
    groups = {"log_likelihood": xr.Dataset({site: ((*dims, "of"), log_lik[None].numpy())})}
    if common is None:
        groups["log_likelihood"].attrs["corrected"] = "draws from the posterior"
    else:
        both = {name: (dims, value[None].double().cpu().numpy()) for name, value in common.items()}
        groups["sample_stats"] = xr.Dataset(both)
    elpd, k = elpd_of_draws(groups)
    fit = log_lik.logsumexp(0) - math.log(len(log_lik))
    return Elpds(elpd, fit.numpy(), k, khat.limit(num_samples))
