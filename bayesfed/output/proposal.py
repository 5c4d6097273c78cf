"""Proposals of importance sampling: Student's t around weighted draws, a surrogate's mode, or the largest weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from bayesfed.output.importance import (
    effective_sample_size,
    systematic_resample,
    temper_weights,
)
from bayesfed.output.student import FREEDOM, PER_SD, student_log_density

_AT_ONCE = 100_000
"""Distances between draws and centres that are computed at once, so that they stay in a processor's cache."""
SMALLEST = 2.0**-32
"""Half of the distance of neighbouring numbers of a Sobol sequence, which may be 0 but are less than 1."""
WIDER = 1.1
"""The factor by which the t distributions are wider than the draws."""
PER_TERM, EQUATIONS = 2, 3
"""The effective number of draws, relative to (1 + D)², that a quadratic surrogate is fitted to, and the least number of
draws relative to that of its coefficients."""
SURROGATE = 3
"""The number of draws from around a surrogate's mode, relative to that from around the draws."""
ONE_SIDED = 1.0
"""The distance of the mean of the largest weights from that of all, in standard deviations, above which they lie in one
tail."""
FLATTEST, FARTHEST = 0.1, 4.0
"""The least curvature of a surrogate and the largest distance of its mode, in units of the draws it is fitted to."""


@dataclass(frozen=True, eq=False)
class StudentMixture:
    """A mixture of multivariate Student's t with equal weights and one scale matrix.

    Attributes:
        centres: locations of the M components, ``(M, D)``.
        root: Cholesky factor of the scale matrix, ``(D, D)``.

    Example:
        >>> import torch
        >>> from bayesfed.output.proposal import StudentMixture
        >>> proposal = StudentMixture(torch.zeros(1, 2), torch.eye(2))
        >>> float(proposal.log_prob(torch.zeros(1, 2))) == -float(torch.tensor(2 * torch.pi).log())
        True
    """

    centres: Tensor
    root: Tensor

    def sample(self, count: int) -> Tensor:
        """Draw ``(count, D)`` from a scrambled Sobol sequence, in random order, by torch's random number generator.

        Together they have means of smooth functions with far less noise than independent draws (Owen 1997, *Scrambled
        net variance for integrals of smooth functions*).
        """
        size, many = self.root.shape[0], len(self.centres)
        seed = int(torch.randint(2**31, ()))
        sequence = torch.quasirandom.SobolEngine(size + FREEDOM + 1, scramble=True, seed=seed)
        u = sequence.draw(count, dtype=torch.float64)[torch.randperm(count)].to(self.root.device)
        normal = torch.special.ndtri(u[:, 1:] + SMALLEST).to(self.root)
        chi = normal[:, size:].square().sum(1, keepdim=True)
        away = normal[:, :size] @ self.root.mT * (FREEDOM / chi).sqrt()
        return self.centres[(u[:, 0] * many).long()] + away

    def log_prob(self, z: Tensor) -> Tensor:
        """Compute log densities of ``(S, D)``: ``(S,)``."""
        white, centres = (
            torch.linalg.solve_triangular(self.root, x.mT, upper=False).mT
            for x in (z, self.centres)
        )
        found = [
            student_log_density(torch.cdist(few, centres).square(), self.root.shape[0]).logsumexp(1)
            for few in white.split(_AT_ONCE // len(centres) + 1)
        ]
        return torch.cat(found) - math.log(len(centres)) - self.root.diagonal().log().sum()


def fit_proposal(z: Tensor, weights: Tensor, centres: int) -> StudentMixture | None:
    """Fit a proposal to weighted draws ``(S, D)``: their mean and covariance, somewhat wider.

    With one centre it is a single t. With more, they are draws moved towards the mean by as much as the width of the
    components adds to the covariance (West 1993, *Approximating posterior distributions by mixture*, section 2.2); the
    width follows Silverman's rule. Returns None if the covariance of the draws is singular.
    """
    z, weights = _with_weight(z, weights)
    mean, root, size = *_mean_and_root(z, weights), z.shape[1]
    if root is None:
        return None
    width = 1.0
    if centres > 1:
        count = min(centres, effective_sample_size(weights))
        width = (4 / (count * (size + 2))) ** (1 / (size + 4))
    shrunk = (1 - min(width, 1.0) ** 2) ** 0.5
    at = mean + shrunk * (z[systematic_resample(weights, centres)] - mean)
    return StudentMixture(at, WIDER * min(width, 1.0) * PER_SD * root)


def surrogate_proposal(x: Tensor, log_density: Tensor, weights: Tensor) -> StudentMixture | None:
    """Fit a quadratic function of x to the log density by weighted least squares, and return a t at its maximum.

    A few hundred draws show where the target is, and how wide, even if most of its weight lies on one of them. Returns
    None if there are too few draws for the coefficients, or if their covariance is singular.

    Args:
        x: draws ``(S, D)``.
        log_density: of the target at these, up to a constant, ``(S,)``.
        weights: of the draws in the fit, ``(S,)``.

    Example:
        >>> import torch
        >>> from bayesfed.output.proposal import surrogate_proposal
        >>> x = torch.linspace(-1.0, 1.0, 50, dtype=torch.float64)[:, None]
        >>> found = surrogate_proposal(x, -2 * (x[:, 0] - 1.5) ** 2, torch.full((50,), 0.02, dtype=torch.float64))
        >>> round(found.centres.item(), 3)
        1.5
    """
    x, weights, log_density = _with_weight(x, weights, log_density)
    mean, root, size = *_mean_and_root(x, weights), x.shape[1]
    i, j = torch.triu_indices(size, size, device=x.device)
    if root is None or len(x) < EQUATIONS * (1 + size + len(i)):
        return None
    u = torch.linalg.solve_triangular(root, (x - mean).mT, upper=False).mT
    features = torch.cat([torch.ones_like(u[:, :1]), u, u[:, i] * u[:, j]], 1)
    scale = weights.sqrt()[:, None]
    level = (log_density - log_density.max())[:, None]
    found = torch.linalg.lstsq(scale * features, scale * level).solution[:, 0]
    upper = torch.zeros_like(root)
    upper[i, j] = found[1 + size :]
    values, vectors = torch.linalg.eigh(-(upper + upper.mT))
    half = vectors * values.clamp(min=FLATTEST).rsqrt()  # half halfᵀ is the covariance
    mode = half @ (half.mT @ found[1 : 1 + size])
    mode = mode * (FARTHEST / mode.norm()).clamp(max=1.0)
    factor = torch.linalg.qr(half.mT).R  # factorᵀ factor is the covariance
    width = root @ (factor * factor.diagonal().sign()[:, None]).mT
    return StudentMixture((mean + root @ mode)[None], WIDER * PER_SD * width)


def stretched_proposal(z: Tensor, weights: Tensor) -> StudentMixture | None:
    """Return a t that reaches into the tail in which the largest weights lie; None if they lie in none.

    Where a tail of the target is longer than those of the proposals so far, the few draws in it have the largest
    weights, and what lies beyond has no draws at all, which k-hat does not show. The direction is that of the mean with
    squared weights, which are the parts of the variance of a weighted mean. The t lies around that mean, and its
    standard deviation along the direction is larger by the distance.

    Args:
        z: draws ``(S, D)``.
        weights: their weights ``(S,)``.

    Example:
        >>> import torch
        >>> from bayesfed.output.proposal import stretched_proposal
        >>> z = torch.cat([torch.linspace(-1.0, 1.0, 100), torch.tensor([5.0])]).double()[:, None]
        >>> weights = torch.ones(101, dtype=torch.float64)
        >>> stretched_proposal(z, weights) is None
        True
        >>> weights[100] = 10.0
        >>> round(stretched_proposal(z, weights).centres.item(), 1)
        2.5
    """
    z, weights = _with_weight(z, weights)
    mean, root = _mean_and_root(z, weights)
    if root is None:
        return None
    squares = weights.square() / weights.square().sum()
    away = squares @ z - mean
    white = torch.linalg.solve_triangular(root, away[:, None], upper=False)
    if not float(white.norm()) > ONE_SIDED:
        return None
    stretched = torch.linalg.cholesky(root @ root.mT + torch.outer(away, away))
    return StudentMixture((mean + away)[None], WIDER * PER_SD * stretched)


def _with_weight(x: Tensor, weights: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Return the finite draws that have a weight, their weights, which sum to 1, and others' entries of them."""
    kept = x.isfinite().all(1) & (weights > 0)
    for other in others:
        kept &= other.isfinite()
    return x[kept], weights[kept] / weights[kept].sum(), *(other[kept] for other in others)


def _mean_and_root(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the mean of weighted draws and the Cholesky factor of their covariance; None if that is singular."""
    mean = weights @ x
    root, failed = torch.linalg.cholesky_ex((weights[:, None] * (x - mean)).mT @ (x - mean))
    return mean, None if bool(failed) else root


def prior_proposal(like: Tensor) -> StudentMixture:
    """Return a single t with about the mean and standard deviation of the prior in the guide's coordinates: 0 and 1.

    Args:
        like: draws ``(S, D)``, for size, kind and device.
    """
    size = like.shape[1]
    root = torch.eye(size, dtype=like.dtype, device=like.device)
    return StudentMixture(like.new_zeros(1, size), WIDER * PER_SD * root)


class Part(NamedTuple):
    """A mixture that draws of θ come from.

    Attributes:
        mixture: in its own coordinates.
        system: number of these coordinates: 0 for the guide's, i for the i-th of the others.
        draws: number of draws from it.
    """

    mixture: StudentMixture
    system: int
    draws: int


class Coordinates(Protocol):
    """Other coordinates v of θ than the guide's, z."""

    def from_guide(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return v ``(S, D)`` and log |det ∂v / ∂z| ``(S,)`` at draws z ``(S, D)``."""

    def to_guide(self, v: Tensor) -> Tensor:
        """Return z ``(S, D)`` at v ``(S, D)``."""


class Proposals:
    """Proposals for θ, one after another, each in the guide's coordinates and in others.

    Args:
        *others: other coordinates, in each of which as many draws are made; None if there are none. More can be added.

    Attributes:
        others: these.
        parts: the mixtures that draws come from.
        draws: all draws so far, ``(S, D)``, in the guide's coordinates.
    """

    def __init__(self, *others: Coordinates | None) -> None:
        self.others = [other for other in others if other is not None]
        self.parts: list[Part] = []
        self.draws = torch.empty(0, 0)
        self._last: list[Part] = []
        self._log_densities = torch.empty(0, 0, dtype=torch.float64)

    def add(
        self,
        z: Tensor,
        weights: Tensor,
        draws: int,
        *,
        centres: int,
        prior: float = 0.0,
        log_target: Tensor | None = None,
    ) -> bool:
        """Add a proposal.

        Args:
            z: draws ``(S, D)``, to which it is fitted.
            weights: their weights ``(S,)``.
            draws: the number of draws that it is to give.
            centres: number of components around the draws ``z``; with more than one, draws also come from a
                distribution that reaches into the tail in which the largest weights lie, if there is one.
            prior: the number of draws as wide as the prior, relative to that from these components.
            log_target: the log density of the target at ``z``, all draws so far, ``(S,)``: :data:`SURROGATE` times as
                many draws as around these come from around the mode of a surrogate of it.

        Returns:
            False if the covariance of the draws is singular.
        """
        mixtures: list[tuple[StudentMixture | None, int, float]] = []
        if log_target is not None:
            ratios = log_target - self.log_prob()
            tempered = temper_weights(ratios, PER_TERM * (1 + z.shape[1]) ** 2)
        for system, (x, log_volume) in enumerate(self._coordinates(z)):
            mixtures.append((fit_proposal(x, weights, centres), system, 1))
            if centres > 1:
                mixtures.append((stretched_proposal(x, weights), system, 1))
            if log_target is not None:
                surrogate = surrogate_proposal(x, log_target - log_volume, tempered)
                mixtures.append((surrogate, system, SURROGATE))
            if prior:
                mixtures.append((prior_proposal(x), system, prior))
        found = [(part, system, share) for part, system, share in mixtures if part is not None]
        if not found:
            return False
        total = list(accumulate((share for *_, share in found), initial=0.0))
        ends = [int(draws * part / total[-1]) for part in total]
        self._last = [
            Part(mixture, system, end - start)
            for (mixture, system, _), (start, end) in zip(found, pairwise(ends), strict=True)
        ]
        return True

    def sample(self, dtype: torch.dtype) -> Tensor:
        """Draw z, ``(draws, D)``, from the last proposal, by torch's random number generator."""
        drawn = []
        for mixture, system, count in self._last:
            x = mixture.sample(count)
            drawn.append(self.others[system - 1].to_guide(x) if system else x)
        new = torch.cat(drawn).to(dtype)
        at_new = self._of_parts([*self.parts, *self._last], new)
        if not self.parts:
            self.draws, self._log_densities = new, at_new
        else:
            at_old = torch.cat([self._log_densities, self._of_parts(self._last, self.draws)])
            self.draws = torch.cat([self.draws, new])
            self._log_densities = torch.cat([at_old, at_new], 1)
        self.parts += self._last
        return new

    def keep_some(self, first: int, each: int) -> None:
        """Keep one in ``each`` of the first draws; forget the others, and proposals that gave none but the last added.

        Args:
            first: the number of draws of the first proposals.
            each: 1 or more.
        """
        ends = list(accumulate((part.draws for part in self.parts), initial=0))
        kept = [
            part._replace(draws=-(-end // each) + (-start // each))
            for part, (start, end) in zip(self.parts, pairwise(ends), strict=True)
            if end <= first
        ]
        self.parts, self.draws = kept, self.draws[:first:each]
        self._log_densities = self._log_densities[: len(kept), :first:each]

    def log_prob(self) -> Tensor:
        """Return the log density of all proposals' draws together at all draws: ``(S,)``."""
        counts = self._log_densities.new_tensor([part.draws for part in self.parts])
        return (self._log_densities + (counts / counts.sum()).log()[:, None]).logsumexp(0)

    def _of_parts(self, parts: Sequence[Part], z: Tensor) -> Tensor:
        """Compute the log densities of P parts at draws ``(S, D)``: ``(P, S)``."""
        systems = self._coordinates(z)
        each = [part.mixture.log_prob(systems[part.system][0]) for part in parts]
        return torch.stack([x + systems[p.system][1] for x, p in zip(each, parts, strict=True)])

    def _coordinates(self, z: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return draws ``(S, D)`` in each coordinates, and the logarithm of the change of volume ``(S,)``."""
        own = z.double(), z.new_zeros(len(z), dtype=torch.float64)
        return [own, *(other.from_guide(z) for other in self.others)]
