"""Leave-one-client-out: how well the others predict a client, what changes without it, and whether it contradicts them.

    elpd_i = log p(D_i | D_-i) = log Σ_s r_is p(D_i | θ_s) / Σ_s r_is,   r_is = 1 / p(D_i | θ_s),   θ_s ~ p(θ | D)

w_i are integrated out. Draws of a q that is not corrected have the further weights p(θ_s, D) / q(θ_s). The weights are
Pareto-smoothed (Vehtari, Gelman & Gabry 2017, *Practical Bayesian model evaluation*). For clients whose k-hat is too
large θ is drawn again without them (:mod:`bayesfed.output.without`), and elpd_i is the difference of two log evidences,
log p(D) − log p(D_-i), where both draws have importance weights.

Conflict is measured by a cross-validated predictive p-value: the mean outcome of the client's rows, within the
distribution of the means that the posterior of all others predicts for a new client with the same covariates (Marshall
& Spiegelhalter 2003, *Approximate cross-validatory predictive checks in disease mapping models*).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from bayesfed.data.moments import is_of_moments
from bayesfed.data.plural import plural
from bayesfed.elbo import noise
from bayesfed.elbo.handlers import on_cpu
from bayesfed.elbo.program import Params
from bayesfed.output import khat
from bayesfed.output.client_draws import Draws
from bayesfed.output.draws import client_chunks, derive, draw_theta, globals_at
from bayesfed.output.fitted import Fitted
from bayesfed.output.importance import pareto_smooth
from bayesfed.output.khat import FINITE_VARIANCE
from bayesfed.output.log_densities import log_evidence_of_clients
from bayesfed.output.log_evidence import correction_weights, log_mean
from bayesfed.output.prior import prior_predictive, sample_prior
from bayesfed.output.without import check_weights, draw_weighted, leave_out

if TYPE_CHECKING:
    import pandas as pd

Estimate = tuple[float, float, float]
"""A log evidence, its Monte Carlo standard error, and Pareto k."""


@dataclass(frozen=True, eq=False, repr=False)
class ClientsLeftOut:
    """A table of all clients, each left out in turn.

    Attributes:
        table: by client its ``rows``; ``elpd``, ``log p(D_i | D_-i)`` in nats, with its Monte Carlo standard error
            ``mcse``; ``khat`` of the importance weights, or the larger one of two evidences; ``moves``, the number
            among the global variables whose mean moves most, and ``shift``, by how many posterior standard deviations
            it moves when the client is left out; ``conflict``, the two-sided p-value of its mean outcome, NaN if
            outcomes cannot be drawn, or only moments of the rows are here.
        shifts: the shifts of all global variables, a row for each client.
        refined: the clients whose weights were too uneven, for whom θ was drawn again without them.
        caveat: the clients whose numbers are not reliable, with their k-hat.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> posterior = bf.fit(models.eight_schools, datasets.eight_schools())
        >>> left_out = bf.leave_one_client_out(posterior)
        >>> left_out.table.columns.tolist()
        ['client', 'rows', 'elpd', 'mcse', 'khat', 'moves', 'shift', 'conflict']
        >>> left_out.shifts.columns.tolist()
        ['mu', 'tau']
    """

    table: pd.DataFrame
    shifts: pd.DataFrame
    refined: tuple[str, ...]
    caveat: str

    @property
    def elpd(self) -> float:
        """The sum of the clients' log predictive densities: larger for the model that predicts new clients better."""
        return float(self.table["elpd"].sum())

    @property
    def se(self) -> float:
        """The standard error of :attr:`elpd` over clients."""
        return float(self.table["elpd"].std() * len(self.table) ** 0.5)

    def __repr__(self) -> str:
        heading = f"Leave-one-client-out: elpd {self.elpd:.1f} ± {self.se:.1f} over {plural(len(self.table), 'client')}"
        table = self.table.to_string(index=False, float_format=lambda value: f"{value:.3g}")
        named = ", ".join(map(repr, self.refined))
        refined = (
            f"θ was drawn again without {named}, whose weights were too uneven" if named else ""
        )
        return "\n".join(filter(None, (heading, table, refined, self.caveat)))


class _Draws(NamedTuple):
    """S draws of θ, and quantities at them for K clients.

    Attributes:
        names: the names of D numbers, such as ``beta[1]``: the global variables and what derives from them.
        numbers: ``(S, D)``.
        evidence: log p(D_i | θ_s), ``(S, K)``.
        predicted: by observed site the mean outcomes of new clients with the covariates of these, ``(S, K)``.
        scarcity: the factor of Monte Carlo errors of draws that were chosen from fewer effective ones.
    """

    names: list[str]
    numbers: Tensor
    evidence: Tensor
    predicted: Mapping[str, Tensor]
    scarcity: float


@torch.no_grad()
@on_cpu()
def leave_one_client_out(
    posterior: Fitted, num_samples: int = 2000, *, seed: int = 0
) -> ClientsLeftOut:
    """Leave out each client in turn: how well the others predict it, its influence, its conflict with the others.

    Args:
        posterior: the posterior of all clients of the fit; if its draws of θ are corrected, also that of some, such as
            those of one institution, by :meth:`~bayesfed.Posterior.select`.
        num_samples: number of draws of θ.
        seed: seed of the draws.

    Returns:
        A :class:`ClientsLeftOut`: print it, or read ``table``, a row for each client.

    Raises:
        ValueError: the draws have no importance weights; or they need those of all clients, and these are some.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> posterior = bf.fit(models.eight_schools, datasets.eight_schools())
        >>> table = bf.leave_one_client_out(posterior).table
        >>> table.loc[table["shift"].abs().idxmax(), ["client", "moves"]].tolist()
        ['G', 'mu']
    """
    import pandas as pd

    check_weights(posterior)
    federation, count = posterior.federation, num_samples
    theta, at_server = draw_weighted(posterior, count, seed)
    draws = _evaluate(posterior, theta, count, seed)
    log_weights, whole = torch.zeros(count, dtype=torch.float64), None
    if at_server is not None:
        log_weights = at_server.cpu() + draws.evidence.sum(1)
        whole = log_mean(log_weights)
    centre = _moments(draws.numbers, pareto_smooth(log_weights)[0])
    names = draws.names
    observed = {} if is_of_moments(federation) else _client_means(posterior, None)
    rows, shifts, refined = [], [], []
    poor: dict[str, float] = {}
    for k, name in enumerate(federation.names):
        own, other = _column(draws, k), None
        smooth, k_hat = pareto_smooth(log_weights - own.evidence[:, 0])
        if k_hat > FINITE_VARIANCE:
            try:
                own, k_hat, other = _draw_without(posterior, name, count, seed)
                smooth = torch.zeros(count, dtype=torch.float64)
                refined.append(name)
                whole = whole or _log_evidence(posterior)
            except ValueError:
                if k_hat > khat.limit(count):
                    poor[name] = k_hat
        elpd, mcse = _predictive_density(smooth, own)
        if other is not None and whole is not None:
            elpd, mcse = whole[0] - other[0], math.hypot(whole[1], other[1])
            k_hat = max(whole[2], other[2])
        shift = (_moments(own.numbers, smooth)[0] - centre[0]) / centre[1]
        most = int(shift.abs().argmax())
        conflict = _conflict(smooth, own.predicted, {s: t[0, k] for s, t in observed.items()})
        length, moved = int(federation.lengths[k]), float(shift[most])
        rows.append((name, length, elpd, mcse, k_hat, names[most], moved, conflict))
        shifts.append(shift.tolist())
    columns = ["client", "rows", "elpd", "mcse", "khat", "moves", "shift", "conflict"]
    index = pd.Index(federation.names, name="client")
    return ClientsLeftOut(
        pd.DataFrame(rows, columns=columns),
        pd.DataFrame(shifts, index=index, columns=names),
        tuple(refined),
        _caveat(poor, count),
    )


def _evaluate(fitted: Fitted, theta: Params, count: int, seed: int) -> _Draws:
    """Compute quantities of the clients of ``fitted`` at S draws of θ."""
    evidence = log_evidence_of_clients(fitted, theta, count, fitted.key(seed, "left out"))
    values = globals_at(fitted, theta, count)
    public = _public(fitted, values, count)
    numbers = torch.cat([value.reshape(count, -1) for value in public.values()], 1)
    chosen = fitted.correction
    scarcity = 1.0 if chosen is None or chosen.ess is None else (1 + count / chosen.ess) ** 0.5
    rows = not is_of_moments(fitted.federation)
    means = _predict_means(fitted, values, count, seed) if rows else {}
    return _Draws(_names(public), numbers.double().cpu(), evidence.cpu(), means, scarcity)


def _predict_means(
    fitted: Fitted, values: Mapping[str, Tensor], count: int, seed: int
) -> dict[str, Tensor]:
    """Draw mean outcomes of new clients with the covariates of these at draws of the globals, some at a time."""
    parts: dict[str, list[Tensor]] = {}
    with noise.seeded(seed):
        for chunk in client_chunks(fitted, count, fitted.federation):
            few = fitted.select([fitted.federation.names[i] for i in chunk.tolist()])
            predicted = prior_predictive(few, sample_prior(few, count, values), count)
            for site, means in _client_means(few, predicted).items():
                parts.setdefault(site, []).append(means)
    return {site: torch.cat(means, 1) for site, means in parts.items()}


def _column(draws: _Draws, k: int) -> _Draws:
    """Return those of one client."""
    predicted = {site: values[:, k : k + 1] for site, values in draws.predicted.items()}
    return draws._replace(evidence=draws.evidence[:, k : k + 1], predicted=predicted)


def _log_evidence(fitted: Fitted) -> Estimate | None:
    """Return log p(D) of a posterior's clients by the weights of its correction; None if it has none."""
    weights = correction_weights(fitted)
    return None if weights is None else log_mean(weights)


def _draw_without(
    posterior: Fitted, name: str, count: int, seed: int
) -> tuple[_Draws, float, Estimate | None]:
    """Draw θ from the posterior of all others.

    Returns:
        Quantities of the client at the draws, k-hat, and the log evidence of the others.
    """
    others = leave_out(posterior, [name])
    theta = draw_theta(others, count, others.key(seed, "without"))
    one = replace(posterior.select([name]), correction=others.correction)
    k_hat = None if others.correction is None else others.correction.khat
    k_hat = math.nan if k_hat is None else k_hat
    return _evaluate(one, theta, count, seed), k_hat, _log_evidence(others)


def _public(fitted: Fitted, values: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """Return the global variables and what a model derives from them, ``(S, *event)``.

    The model's auxiliary variables, ``_name``, are left out, unless there are no others.
    """
    found = {name: value for name, value in values.items() if not name.startswith("_")}
    derived = [name for name, dims in fitted.program.derived.items() if not dims]
    if derived:
        one, first = fitted.select(fitted.federation.names[:1]), torch.zeros(1, dtype=torch.int64)
        with noise.seeded(0):
            prior = sample_prior(one, count, values)
        local = {site.name for site in fitted.program.locals}
        at = {
            name: v[:, :, None] if name in local else v[:, None, None] for name, v in prior.items()
        }
        more = derive(one, Draws(at, count), first, one.federation.batch(first, first[:, None]))
        for name in derived:
            value = more[name].value[:, 0, 0]
            found[name] = value.expand(count, *value.shape[1:])
    return found or dict(values)


def _names(values: Mapping[str, Tensor]) -> list[str]:
    """Return the name of each number of values ``(S, *event)``, such as ``beta[1]``."""
    found = []
    for name, value in values.items():
        places = itertools.product(*map(range, value.shape[1:]))
        found += [name + (f"{list(at)}".replace(" ", "") if at else "") for at in places]
    return found


def _moments(numbers: Tensor, log_weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of weighted draws ``(S, D)``: ``(D,)``."""
    weights = log_weights.softmax(0)
    mean = weights @ numbers
    return mean, (weights @ (numbers - mean).square()).sqrt()


def _predictive_density(log_weights: Tensor, own: _Draws) -> tuple[float, float]:
    """Return log p(D_i | D_-i) and its Monte Carlo standard error."""
    evidence = own.evidence[:, 0]
    elpd = (log_weights.log_softmax(0) + evidence).logsumexp(0)
    terms = log_weights.softmax(0) * ((evidence - elpd).exp() - 1)
    return float(elpd), own.scarcity * float(terms.square().sum().sqrt())


def _client_means(fitted: Fitted, values: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Return each client's mean outcome, ``(S, K)``, of its own rows or of ``values``, where its own are observed."""
    from bayesfed.output.inference_data import find_data  # xarray takes a while to import

    federation, found = fitted.federation, {}
    observed = find_data(fitted)[0]
    for name, value in (observed if values is None else values).items():
        site, data = fitted.program.sites[name], observed[name]
        there = ~data.isnan().reshape(len(data), -1)
        owner = federation.owner if site.per_row or site.joint else torch.arange(len(federation))
        own = value.double().reshape(-1, *there.shape).where(there, 0.0).sum(-1)
        total = own.new_zeros(len(own), len(federation)).index_add_(1, owner.to(own.device), own)
        number = total.new_zeros(len(federation))
        number.index_add_(0, owner.to(own.device), there.sum(-1).to(own))
        found[name] = (total / number).cpu()
    return found


def _conflict(
    log_weights: Tensor, predicted: Mapping[str, Tensor], observed: Mapping[str, Tensor]
) -> float:
    """Return the two-sided p-value of a client's mean outcome, the smallest of all sites times their number."""
    found = []
    for site, values in predicted.items():
        if observed[site].isnan():
            continue
        below = (values[:, 0] < observed[site]).double() + (values[:, 0] == observed[site]) / 2
        lower = float(log_weights.softmax(0) @ below)
        found.append(max(0.0, 2 * min(lower, 1 - lower)))
    return min(1.0, len(found) * min(found)) if found else math.nan


def _caveat(poor: Mapping[str, float], draws: int) -> str:
    """Return a warning that names the clients whose weights are too uneven."""
    if not poor:
        return ""
    named = ", ".join(f"{name!r} ({k:.2f})" for name, k in poor.items())
    return (
        f"Pareto k > {khat.limit(draws):.2g} without {named}: these numbers are not reliable. Fit the others, "
        "bf.fit(model, federation.select(others))"
    )
