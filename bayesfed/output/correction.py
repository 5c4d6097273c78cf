"""What q(θ) has not of the posterior's shape, mended: draws around it, weighed by what all clients say of them.

    log weight of θ_s:  log p(θ_s) − log t(θ_s) + Σ_i log p(w_is, D_i | θ_s) − log q(w_is | θ_s),   w_is ~ q(w_i | θ_s)

A Normal q(θ) has neither the skewness nor the tails of a posterior of few clients. t is Student's, with tails that hold
the posterior's: first around the mean and covariance of q, then around those of the weighted draws. Where these are not
enough there follows, up to four times, a mixture of narrower ones around the weighted draws so far. All draws are
weighed against the mean of the laws that they come from (Cappé, Guillin, Marin & Robert 2004, *Population Monte Carlo*;
Owen & Zhou 2000, *Safe and effective importance sampling*, section 3). A client says a number a draw, of which the
server needs the sums. Weights are truncated at √S times their mean (Ionides 2008, *Truncated importance sampling*).

Where q(w_i | θ) misses what it stands for, a log weight is little but noise. It is seen twice at some draws; where it
differs, clients say log p(D_i | θ_s) by :mod:`bayesfed.output.evidence` instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import pyro.distributions as dist
import torch
from torch import Tensor

from bayesfed.elbo import noise
from bayesfed.elbo.elbo import log_prior
from bayesfed.elbo.handlers import on_cpu
from bayesfed.elbo.program import Params
from bayesfed.guides.family import GLOBAL
from bayesfed.output import khat
from bayesfed.output.draws import Weigh, elbo, key_of, of_server, terms
from bayesfed.output.evidence import COST, has_block

if TYPE_CHECKING:
    from bayesfed.output.posterior import Posterior

DRAWS, FEWEST = 2000, 500
"""Draws from each law; and with fewer it is not worth while."""
LAWS, ENOUGH = (2, 6), 1000
"""The least and the most laws, and the number of equal weights that is enough for no more of them."""
FINITE = 0.5
"""Pareto's k beyond which weights have no variance: another law of many centres is drawn from then."""
LEAST, A_NUMBER = 50, 5
"""Weights that count for less, or for less a dimension, say nothing of a mean and a covariance."""
FREEDOM, WIDER = 5.0, 1.1
"""Degrees of freedom of t, and how much wider it is than what it stands for."""
CENTRES = 500
"""Draws that a law of many has as its centres."""
EVEN = 0.95
"""Where the weights of q's own draws count for so many of them, without a tail, q is the posterior, and stays."""
UNSEEN = 0.02
"""Of all weight, what may lie beyond the largest one where k is above :data:`khat.LIMIT`."""
PROBE, QUIET = 200, 0.1
"""Draws of θ at which the noise of a log weight is seen, and the variance that is let be."""


@dataclass(frozen=True, eq=False)
class Correction:
    """Draws of the posterior that stand for q(θ).

    Attributes:
        theta: equally weighted draws of the guide's global random site, ``(S, 1, 1, *event)``.
        khat: Pareto's k of the weights by which they were taken.
        closely: clients' variables too are drawn by weights, see :mod:`bayesfed.output.evidence`: q(w_i | θ) is some
            way from what it stands for.
    """

    theta: Params
    khat: float
    closely: bool = False

    def drawn(self, count: int, key: Tensor) -> Params:
        """Some of them, independently: ``(count, 1, 1, *event)``."""
        u = noise.uniform(noise.fold(key, noise.word("corrected")), (count,))
        return {name: value[(u * len(value)).long()] for name, value in self.theta.items()}


class Weighed(NamedTuple):
    """What weights say: whether q(θ), or the correction where there is one, is the posterior."""

    good: bool
    correction: Correction | None = None


@torch.no_grad()
@on_cpu()
def weighed(posterior: Posterior, weigh: Weigh = terms) -> Weighed:
    """The correction of a posterior of all clients of a fit, where it needs one that can be had.

    It cannot where weights are too uneven to mend q(θ) (k above :data:`khat.LIMIT` and a tail that counts, or too few
    that do), where q(θ) is no family's over one vector of reals, under privacy, or where the clients' rows are too many
    to ask. ``weigh`` asks the clients.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> from bayesfed.output.correction import weighed
        >>> posterior = bf.fit(models.eight_schools, datasets.eight_schools(), bf.SFVI(corrected=False))
        >>> weighed(posterior).correction.theta["global"].shape[1:]
        torch.Size([1, 1, 2])
    """
    afforded = khat.affordable(posterior, posterior.program.rows) // 2
    draws = min(DRAWS, afforded)
    family = posterior.program.random == (GLOBAL,)
    if not family or not khat.has_density(posterior) or draws < FEWEST:
        return Weighed(good=False)
    of_q = elbo(posterior, min(draws, khat.DRAWS), 0, weigh).double()
    even = effective((of_q - of_q.max()).exp()) > EVEN * len(of_q)
    if even and khat.pareto(of_q) <= khat.LIMIT:
        return Weighed(good=True)
    key = key_of(posterior, 0, "correction")
    own = of_server(posterior, draws, key)[GLOBAL][:, 0, 0]
    z = own.double()
    weights = torch.full_like(z[:, 0], 1 / len(z))
    laws: list[Kernels] = []
    closely = False
    drawn: list[Tensor] = []
    logs: list[Tensor] = []
    found, trusted, enough = math.inf, False, False
    while len(laws) < LAWS[0] or (len(laws) < LAWS[1] and not enough):
        law = around(z, weights, CENTRES if len(laws) > 1 else 1)
        if law is None:
            return Weighed(good=False)
        with noise.seeded(len(laws)):
            new = law.sample(draws).to(own.dtype)
        if not laws and draws * COST <= afforded and has_block(posterior.program):
            closely = _noise_of(posterior, new[:PROBE], key, weigh) > QUIET
        logs.append(_target(posterior, new, noise.fold(key, len(laws)), weigh, closely))
        laws.append(law)
        drawn.append(new)
        z = torch.cat(drawn).double()
        against = torch.stack([law.log_prob(z) for law in laws]).logsumexp(0) - math.log(len(laws))
        log_weights = torch.cat(logs) - against
        weights = truncated(log_weights)
        if effective(weights) < max(LEAST, A_NUMBER * z.shape[1]):
            return Weighed(good=False)
        found = khat.pareto(log_weights)
        trusted = found <= khat.LIMIT or unseen(log_weights, found) < UNSEEN
        sure = found <= FINITE or len(laws) > LAWS[0]
        enough = trusted and sure and effective(weights) > ENOUGH
    if not trusted:
        return Weighed(good=False)
    theta = torch.cat(drawn)[spaced(weights, len(z))][:, None, None]
    return Weighed(good=True, correction=Correction({GLOBAL: theta}, found, closely))


def _target(posterior: Posterior, z: Tensor, key: Tensor, weigh: Weigh, closely: bool) -> Tensor:
    """log p(θ) and what the clients say, at draws of θ ``(S, D)``: ``(S,)``."""
    theta, count = {GLOBAL: z[:, None, None]}, len(z)
    of_prior = log_prior(posterior.program, posterior.params, theta, count)
    return of_prior.double() + weigh(posterior, theta, count, key, closely)


def _noise_of(posterior: Posterior, z: Tensor, key: Tensor, weigh: Weigh) -> float:
    """The variance of a log weight at a given θ, from seeing each twice, as one draw in ten has it or more."""
    twice = _target(posterior, torch.cat([z, z]), noise.fold(key, -1), weigh, False)
    differences = twice[: len(z)] - twice[len(z) :]
    return float(differences.nan_to_num(0.0).square().quantile(0.9)) / 2


@dataclass(frozen=True, eq=False)
class Kernels:
    """A mixture of Student's t, all of one shape.

    Attributes:
        centres: ``(M, D)``, which weigh alike.
        root: Cholesky factor of their scale, ``(D, D)``.

    Example:
        >>> import torch
        >>> from bayesfed.output.correction import Kernels
        >>> law = Kernels(torch.zeros(1, 2), torch.eye(2))
        >>> float(law.log_prob(torch.zeros(1, 2))) == -float(torch.tensor(2 * torch.pi).log())
        True
    """

    centres: Tensor
    root: Tensor

    def sample(self, count: int) -> Tensor:
        """As many from each centre, ``(count, D)``, by torch's own random numbers."""
        size = self.root.shape[0]
        of = self.centres[torch.arange(count, device=self.centres.device) % len(self.centres)]
        law = dist.MultivariateStudentT(
            self.root.new_tensor(FREEDOM), self.root.new_zeros(size), self.root, validate_args=False
        )
        return of + law.sample((count,))

    def log_prob(self, z: Tensor) -> Tensor:
        """Of ``(S, D)``: ``(S,)``."""
        size = self.root.shape[0]
        white, centres = (
            torch.linalg.solve_triangular(self.root, x.mT, upper=False).mT
            for x in (z, self.centres)
        )
        far = torch.cdist(white, centres).square()
        each = -(FREEDOM + size) / 2 * torch.log1p(far / FREEDOM)
        level = (
            math.lgamma((FREEDOM + size) / 2)
            - math.lgamma(FREEDOM / 2)
            - size / 2 * math.log(FREEDOM * math.pi)
        )
        return each.logsumexp(1) - math.log(len(centres)) + level - self.root.diagonal().log().sum()


def around(z: Tensor, weights: Tensor, centres: int) -> Kernels | None:
    """Student's t around weighted draws ``(S, D)``, with their mean and covariance, somewhat wider; None of too few.

    Around one centre, or around many of the draws, drawn in to the mean as much as each adds to the covariance (West
    1993, *Approximating posterior distributions by mixtures*, section 2.2), whose width is that of Silverman's rule.
    """
    mean, size = weights @ z, z.shape[1]
    root, failed = torch.linalg.cholesky_ex((weights[:, None] * (z - mean)).mT @ (z - mean))
    if bool(failed):
        return None
    width = 1.0
    if centres > 1:
        width = (4 / (min(centres, effective(weights)) * (size + 2))) ** (1 / (size + 4))
    shrunk = (1 - min(width, 1.0) ** 2) ** 0.5
    at = mean + shrunk * (z[spaced(weights, centres)] - mean)
    return Kernels(at, WIDER * min(width, 1.0) * math.sqrt((FREEDOM - 2) / FREEDOM) * root)


def spaced(weights: Tensor, count: int) -> Tensor:
    """Positions of ``count`` draws by their weights, at even distances (Carpenter, Clifford & Fearnhead 1999)."""
    at = (torch.arange(count, dtype=weights.dtype, device=weights.device) + 0.5) / count
    return torch.searchsorted(weights.cumsum(0), at).clamp(max=len(weights) - 1)


def truncated(log_weights: Tensor) -> Tensor:
    """Weights ``(S,)``, those beyond √S times their mean cut, made to sum to 1; what is no number has none."""
    weights = (log_weights - log_weights.nan_to_num(-torch.inf).max()).exp().nan_to_num(0.0)
    weights = weights.clamp(max=weights.mean() * len(weights) ** 0.5)
    return weights / weights.sum()


def unseen(log_weights: Tensor, k: float) -> float:
    """The part of all weight that a generalised Pareto tail of shape k has beyond the largest of ``(S,)``, about."""
    largest = float(
        (log_weights - log_weights.nan_to_num(-torch.inf).logsumexp(0))
        .nan_to_num(-torch.inf)
        .max()
        .exp()
    )
    return largest / (1 - k) if k < 1 else math.inf


def effective(weights: Tensor) -> float:
    """How many equal weights they are worth (Kong 1992)."""
    return float(weights.sum().square() / weights.square().sum())
