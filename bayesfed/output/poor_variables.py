"""The variables whose draws are far from the posterior, found by importance sampling.

Pareto k-hat is one number for all variables, and uses draws from q only: it stays low where q lacks a mode or a tail of
one client's posterior, and a standard deviation may be a third too small at a k-hat of 0.6. Here means and standard
deviations are compared: of each client's draws, at some draws of θ, with those of weighted draws from a wider proposal,
see :mod:`bayesfed.output.defensive`; of a q(θ) that is not corrected, with those of the same draws by their weights.

A q(w_i | θ) with one of two modes may have the lower one at some θ and the upper one at others, so that its errors
cancel over few draws of θ. Clients whose means given single draws of θ are off are suspect as well. Suspect clients are
compared again, at many draws of θ. Where data are small a Normal q(w_i | θ) is also compared with the posterior by two
sets of weights of the same candidates, so that Monte Carlo error does not hide a small difference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributions import biject_to, constraints

from bayesfed.data.absent import are_absent
from bayesfed.elbo import handlers, noise
from bayesfed.elbo.elbo import run
from bayesfed.elbo.moments import base_support, unconstrained
from bayesfed.elbo.program import Params, Program
from bayesfed.output.conditionals import Conditionals, has_block, has_normal_prior
from bayesfed.output.defensive import LARGEST, defensive_candidates, draw_mixture, unstack
from bayesfed.output.draws import client_chunks, draw_theta, globals_at
from bayesfed.output.fitted import Fitted
from bayesfed.output.importance import truncate_weights
from bayesfed.output.locals_given_theta import draw_guide_locals, proposal_centre
from bayesfed.output.log_densities import noise_of_clients
from bayesfed.steps.noise_of_weights import EXACT

THETAS, FEW = 8, 64
"""Number of draws of θ at which all clients are compared, and of draws of a client's variables at each."""
MORE_THETAS, DRAWS = 64, 128
"""The same for clients that are found suspect."""
WORK = 2.5e7
"""The largest size of clients' rows and variables, in numbers, over all draws."""
FEWEST = 25
"""Effective sample size of weights below which they give no standard deviation."""
SHIFT, RATIO = 0.25, 1.25
"""Difference of means, in standard deviations, and ratio of standard deviations that are named."""
GIVEN = 0.5
"""The same of root mean squares of differences given single draws of θ, most of which cancel over the draws of θ."""
ERRORS = 3.0
"""Monte Carlo standard errors by which a difference must exceed these."""
REACHED = 0.1
"""Relative effective sample size from which a few weighted draws are enough to choose one from."""
SUSPECT = 0.5
"""Share of these differences, beyond one standard error, from which more draws are made of a client's variables."""
CLOSE, SMALL = 0.2, 1500
"""The same of differences between a Normal q(w_i | θ) and the posterior by the weights of the same candidates, where
the variables of so many clients with so few rows can be resampled; the largest size of these rows and variables, in
numbers, if all clients have as many as this one."""
NAMED = 3
"""Number of clients that a warning names."""


class Distance(NamedTuple):
    """How far draws of one variable are from the posterior, in unconstrained coordinates.

    Attributes:
        site: its sample site.
        shift: difference of the means, in standard deviations of the posterior.
        ratio: standard deviation of the draws over that of the posterior.
        size: effective sample size of the weighted draws that were compared, relative to their number.
    """

    site: str
    shift: float
    ratio: float
    size: float

    def __str__(self) -> str:
        return f"mean off by {abs(self.shift):.2f} sd, sd {self.ratio:.2f} times the posterior's"

    @property
    def reached(self) -> bool:
        """Return whether importance sampling reaches the posterior, so that the client's variables can be resampled."""
        return self.size > REACHED


class ClientCheck(NamedTuple):
    """The outcome of :func:`check_clients`.

    Attributes:
        poor: the clients whose draws are not a good approximation, beyond Monte Carlo error, the worst first.
        doubtful: the clients whose draws may not be one, and whose variables can be resampled.
    """

    poor: dict[str, Distance]
    doubtful: frozenset[str]


class Distances(NamedTuple):
    """The distances of draws of K clients' variables, or of θ as of one client, by number of the variables.

    Attributes:
        sites: the sample site of each number, ``(P,)``.
        shift: differences of means, as in :class:`Distance`, ``(K, P)``.
        ratio: ratios of standard deviations, ``(K, P)``.
        size: effective sample size of the weighted draws, relative to their number, ``(K, 1)``.
        draws: their number.
        given: root mean square of the differences of means given single draws of θ, in the same standard deviations,
            beyond Monte Carlo error, ``(K, P)``; None of θ.
        of_normal: the largest distance of each client's Normal approximation given θ, 1 if it is just named, ``(K,)``.
            Both distributions are those of the same candidates, by weights, so that the error of this distance is a
            fraction of it. None of θ, and where q(w_i | θ) is no Normal.
    """

    sites: list[str]
    shift: Tensor
    ratio: Tensor
    size: Tensor
    draws: int
    given: Tensor | None = None
    of_normal: Tensor | None = None

    def excess(self, errors: float) -> tuple[Tensor, Tensor]:
        """Return the largest distance of each client, 1 if it is just named, and the number that it is of: ``(K,)``."""
        error = errors * ((1 / self.size + 1) / self.draws).sqrt()
        mean_off = (self.shift.abs() - error) / SHIFT
        spread_off = (self.ratio.log().abs() - error / 2**0.5) / math.log(RATIO)
        worst, number = torch.maximum(mean_off, spread_off).nan_to_num(0.0).max(1)
        return worst, number

    def doubt(self) -> Tensor:
        """Return the largest distance of each client beyond a standard error, over all θ or given each: ``(K,)``."""
        worst, _ = self.excess(errors=1.0)
        if self.given is None:
            return worst
        given = (self.given / GIVEN).nan_to_num(0.0).amax(1)
        return torch.maximum(worst, given.where(self.size[:, 0] > REACHED, 0.0))

    @property
    def normal_is_off(self) -> Tensor:
        """Whether a client's Normal is a little off, where importance sampling reaches the posterior, bool ``(K,)``."""
        if self.of_normal is None:
            return torch.zeros_like(self.size[:, 0], dtype=torch.bool)
        return (self.of_normal > CLOSE) & (self.size[:, 0] > REACHED)

    def of(self, client: int, number: int) -> Distance:
        """Return the distance of one number of a client."""
        shift, ratio = float(self.shift[client, number]), float(self.ratio[client, number])
        return Distance(self.sites[number], shift, ratio, float(self.size[client]))


@torch.no_grad()
@handlers.on_cpu()
def check_clients(fitted: Fitted) -> ClientCheck:
    """Compare clients' draws with their posteriors given θ.

    As many clients as are affordable are checked, those with few rows first, but for those whose variables are
    resampled already, or whose log weights show that q(w_i | θ) is their posterior where that is Normal. None is
    checked under privacy, if the guide has no density of real variables of a client, or if these are more than
    :data:`~bayesfed.output.defensive.LARGEST` numbers.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> from bayesfed.output.poor_variables import check_clients
        >>> check_clients(bf.fit(models.eight_schools, datasets.eight_schools())).poor
        {}
    """
    unknown = fitted.epsilon is not None or are_absent(fitted.federation.sufficient.fields)
    if not _has_real_locals(fitted.program) or unknown:
        return ClientCheck({}, frozenset())
    exact = _find_exact(fitted)
    fitted = fitted.sufficient
    if not (names := _affordable(fitted, exact)):
        return ClientCheck({}, frozenset())
    few = fitted.select(names)
    small = fitted.program.clients * torch.tensor(_sizes(few)) <= SMALL
    key = few.key(0, "client check")
    theta = draw_theta(few, MORE_THETAS, key)
    first = {name: value[:THETAS] for name, value in theta.items()}
    found: dict[str, tuple[float, Distance]] = {}
    doubtful: set[str] = set()
    for chunk in client_chunks(few, THETAS * FEW, few.federation):
        distances = _distances(few, first, THETAS, chunk, key, FEW)
        is_suspect = (distances.doubt() > SUSPECT).cpu()
        off = small[chunk.cpu()] & distances.normal_is_off.cpu() & ~is_suspect
        doubtful |= {few.federation.names[k] for k in chunk.cpu()[off].tolist()}
        suspect = chunk[is_suspect.to(chunk.device)]
        together = max(1, len(chunk) * THETAS * FEW // (MORE_THETAS * DRAWS))
        for some in suspect.split(together) if len(suspect) else ():
            distances = _distances(few, theta, MORE_THETAS, some, key, DRAWS)
            worst, number = distances.excess(ERRORS)
            off = small[some.cpu()] & distances.normal_is_off.cpu()
            likely = (distances.doubt() > SUSPECT).cpu() | off
            for k in range(len(some)):
                name = few.federation.names[int(some[k])]
                distance = distances.of(k, int(number[k]))
                if worst[k] > 1:
                    found[name] = float(worst[k]), distance
                if likely[k] and distance.reached:
                    doubtful.add(name)
    return ClientCheck(_sorted(found), frozenset(doubtful))


@torch.no_grad()
@handlers.on_cpu()
def find_poor_globals(fitted: Fitted, log_weights: Tensor) -> dict[str, Distance]:
    """Return the global sites whose draws differ from the same draws with their weights, the worst first.

    Args:
        fitted: a posterior without a correction.
        log_weights: log p(D, θ_s, w_s) − log q(θ_s, w_s), ``(S,)``, of the draws by the key "elbo", see
            :func:`~bayesfed.output.khat.log_weights`.
    """
    count = len(log_weights)
    weights = truncate_weights(log_weights.double())[:, None, None]
    if 1 / float(weights.square().sum()) < FEWEST:
        return {}
    values = globals_at(fitted, draw_theta(fitted, count, fitted.key(0, "elbo")), count)
    found = {}
    for site in fitted.program.globals:
        u = biject_to(site.support).inv(values[site.name]).reshape(count, 1, -1).double().cpu()
        distances = _compare(u, u, weights, u.shape[-1] * [site.name])
        worst, number = distances.excess(ERRORS)
        if worst > 1:
            found[site.name] = float(worst), distances.of(0, int(number))
    return _sorted(found)


def caveat(poor: Mapping[str, Distance], clients: Mapping[str, Distance]) -> str:
    """Return a warning for the user that names the worst sites or clients, or an empty string if there are none."""
    if poor:
        named = [f"{name} ({far})" for name, far in list(poor.items())[:NAMED]]
        return (
            f"q(θ) is not a good approximation of the posterior of {', '.join(named)}: posterior.corrected() draws θ "
            "by importance sampling; or use another guide (SFVI(global_guide=FullRank()))"
        )
    return _caveat_of_clients(clients)


def _caveat_of_clients(poor: Mapping[str, Distance]) -> str:
    """Return the part of :func:`caveat` about clients."""
    if not poor:
        return ""
    named = [f"{name!r} ({far.site}: {far})" for name, far in list(poor.items())[:NAMED]]
    more = f" and {len(poor) - NAMED} more" if len(poor) > NAMED else ""
    remedy = (
        "posterior.corrected() draws their variables by importance sampling"
        if any(far.reached for far in poor.values())
        else "compare with NUTS on these clients, or give a client fewer variables"
    )
    return f"q(w_i | θ) is not a good approximation of the posterior of {', '.join(named)}{more}: {remedy}"


def _sorted(found: Mapping[str, tuple[float, Distance]]) -> dict[str, Distance]:
    """Return distances in descending order of their excess."""
    ordered = sorted(found.items(), key=lambda item: -item[1][0])
    return {name: distance for name, (_, distance) in ordered}


def _has_real_locals(program: Program) -> bool:
    """Return whether a client has random variables in the guide, few, with a density over real numbers."""
    names = program.randomness.keys() - set(program.random)
    supports = [base_support(site.support) for site in program.locals if site.name in names]
    real = all(s in (constraints.real, constraints.real_vector) for s in supports)
    return bool(names) and real and not program.weights_draws and program.variables <= LARGEST


def _find_exact(fitted: Fitted) -> frozenset[str]:
    """Return the clients with a posterior given θ that is Normal, and q(w_i | θ), but for round-off.

    It has no other mode: their outcomes are Gaussian, with a mean that is linear in the rows, their priors are Normal,
    and log weights at all draws from q show no other shape of its density.
    """
    few = fitted.federation.moments
    if few is None or few.weights is not None:  # rows that are counted may have any likelihood
        return frozenset()
    fitted, key = fitted.sufficient, fitted.key(0, "exact clients")
    theta, batch = draw_theta(fitted, THETAS, key), fitted.federation.batch(torch.arange(1))
    given = Conditionals(fitted.program, fitted.params_of(torch.arange(1)), theta, batch, THETAS)
    if not has_normal_prior(given):
        return frozenset()
    exact = noise_of_clients(fitted, theta, THETAS, key) < EXACT
    return frozenset(fitted.federation.names[k] for k in exact.nonzero()[:, 0].tolist())


def _affordable(fitted: Fitted, exact: frozenset[str]) -> list[str]:
    """Return as many clients as are affordable, or one, those with few rows first; no resampled or exact ones."""
    sizes = dict(zip(fitted.federation.names, _sizes(fitted), strict=True))
    others = sorted(sizes.keys() - fitted.resampled - exact, key=lambda name: sizes[name])
    total = THETAS * FEW * np.cumsum([sizes[name] for name in others])
    return others[: max(1, int((total <= WORK).sum()))]


def _sizes(fitted: Fitted) -> list[int]:
    """Return the size of each client's rows and variables, in numbers."""
    federation = fitted.federation
    rows = federation.lengths * federation.numbers_per_row
    return (rows + fitted.program.variables).tolist()


def _distances(
    fitted: Fitted, theta: Params, thetas: int, chunk: Tensor, key: Tensor, each: int
) -> Distances:
    """Compare the draws of K clients' variables, ``each`` at each draw of θ, with weighted ones."""
    program, federation, count = fitted.program, fitted.federation, each * thetas
    batch, params = federation.batch(chunk), fitted.params_of(chunk)
    given = {name: value.repeat(each, *[1] * (value.ndim - 1)) for name, value in theta.items()}
    own = draw_guide_locals(fitted, given, count, chunk, key)
    keys = noise.fold(key, federation.stream_ids[chunk])
    centre = proposal_centre(fitted, theta, thetas, chunk, key, each)
    conditionals = Conditionals(program, params, theta, batch, thetas)
    mixture = draw_mixture(keys, each, centre)
    proposed = defensive_candidates(conditionals, centre, mixture)

    def equalised(log_weights: Tensor) -> Tensor:
        """Return weights of candidates ``(L, S, K)`` that sum to 1, equally over the draws of θ, ``(L * S, K, 1)``."""
        return log_weights.softmax(0).flatten(0, 1)[..., None] / thetas

    weights = equalised(proposed.log_weights)
    rows = batch if program.needs_rows else batch.head()

    def sites(values: Params) -> tuple[Tensor, list[str]]:
        """Return the model's local sites, unconstrained, ``(S, K, P)``, and the name of each number."""
        guide, model = run(program, params, given | values, rows, {}, count)
        found, names = [], []
        for site in program.locals:
            u = unconstrained(model.nodes[site.name]["fn"], guide.nodes[site.name]["value"])
            found.append(u.expand(count, len(chunk), *u.shape[2:]).flatten(2).double())
            names += found[-1].shape[-1] * [site.name]
        return torch.cat(found, -1), names

    flat = proposed.draws.flatten(0, 1).to(federation.dtype)
    u, names = sites(unstack(flat, centre.shapes))
    drawn = sites(own)[0]
    found = _compare(drawn, u, weights, names)
    found = found._replace(given=_distance_given_theta(drawn, u, weights, thetas))
    if not has_block(program):
        return found
    normal = equalised(
        -mixture.draws.square().sum(-1).squeeze(-1) / 2 - mixture.log_density.squeeze(-1)
    )
    of_normal, _ = _compare(u, u, weights, names, normal).excess(errors=0.0)
    return found._replace(of_normal=of_normal)


def _compare(
    drawn: Tensor, u: Tensor, weights: Tensor, sites: list[str], of_drawn: Tensor | None = None
) -> Distances:
    """Compare draws ``(S, K, P)``, equally weighted or with weights, with others; weights ``(S, K, 1)`` sum to 1."""
    count = len(weights)
    mean, sd = _moments(u, weights)
    own = torch.full_like(weights, 1 / count) if of_drawn is None else of_drawn
    mean_drawn, sd_drawn = _moments(drawn, own)
    size = 1 / (count * weights.square().sum(0))
    return Distances(sites, (mean_drawn - mean) / sd, sd_drawn / sd, size, count)


def _distance_given_theta(drawn: Tensor, u: Tensor, weights: Tensor, thetas: int) -> Tensor:
    """Return :attr:`Distances.given` of draws ``(S, K, P)``, each draw of θ in every ``thetas``-th row: ``(K, P)``."""
    own, other = drawn.unflatten(0, (-1, thetas)), u.unflatten(0, (-1, thetas))
    share = weights.unflatten(0, (-1, thetas)) * thetas
    mean, mean_own = (share * other).sum(0), own.mean(0)
    error = (share * (other - mean)).square().sum(0) + own.var(0) / len(own)
    error = error.mean(0) * (1 + ERRORS * (2 / thetas) ** 0.5)
    _, sd = _moments(u, weights)
    return ((mean_own - mean).square().mean(0) - error).clamp(min=0.0).sqrt() / sd


def _moments(u: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return means and standard deviations of weighted draws ``(S, K, P)``: ``(K, P)``."""
    mean = (weights * u).sum(0)
    return mean, (weights * (u - mean).square()).sum(0).sqrt()
