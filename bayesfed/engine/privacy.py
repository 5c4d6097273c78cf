"""Client-level differential privacy: uploads are clipped and noise is added to their sum, for any aggregation rule.

    u_i ← [u_i · min(1, γ / ‖u_i‖)],     Σ u_i ← Σ u_i + noise

An upload is all that a client encodes, as one vector. Two federations are neighbours if they differ in one client's
data: then the clipped sum differs by at most 2 γ. Private are the sums of all rounds, and so the posterior's global
parameters and all that the server sends; a client's own posterior is as private as the client keeps it. With noise
nothing else is sent: no numbers of rows, no ELBO terms (the history has NaN for them), and zeros in place of an upload
that is not finite. ``docs/privacy.md`` lists all that leaves a client.

*The grid.* With noise an upload is rounded towards zero, [·], to multiples of 2⁻²² of the largest power of two up to γ
(of 2⁻⁵⁷ at least). This never makes a norm larger, so the sensitivity is 2 γ after it as well. Sums of multiples are
exact, and the noise is a multiple drawn exactly (:mod:`bayesfed.engine.discrete_noise`), so that no digit of a noisy
sum shows where the sum was, as those of floating-point noise do (Mironov 2012). Its scale is rounded up to a multiple.

*The clip* follows a quantile q of the clients' norms unless it is given (Andrew et al. 2021, Algorithm 1): each client
sends whether its norm was below γ, as ±½, and  γ ← γ exp(−η (b̄ − q))  with b̄ the noisy share of those that were. That
takes a part :data:`SHARE` of the privacy of each round. A smaller clip biases more uploads, and needs less noise: q is
the median where noise is half as long as all uploads together, or longer, and grows up to :data:`MOST` where it is
less.

Noise and cohorts come from the operating system's entropy and are stored nowhere, so they cannot be drawn again,
neither from ``seed`` nor from a file. A run that is resumed from a file draws again.

``"laplace"`` clips in L1 and is ε-DP (Dwork & Roth 2014, Theorem 3.6): ε' = 2 γ / scale a round, with discrete noise as
well (Ghosh, Roughgarden & Sundararajan 2009); a cohort drawn without replacement from N gives
ln(1 + (K / N)(e^ε' − 1)) (Balle, Barthe & Gaboardi 2018, Theorem 9), and rounds add up. PAC-PFL's private variant clips
in L2 and adds Laplace noise, which in more than one dimension is not ε-DP.

``"gaussian"`` clips in L2 and is (ε, δ)-DP by dp-accounting's Rényi accountant for cohorts without replacement (Wang,
Balle & Kasiviswanathan 2019, arXiv 1808.00087, Theorem 27, in dp-accounting's version for Gaussians). Discrete noise
needs no other: on the grid the Rényi divergences of order α are at most α Δ² / 2σ², as those of Gaussians (Canonne,
Kamath & Steinke 2020). The theorem also takes moments of whole orders of likelihood ratios, which are those of
Gaussians: each is a sum over the grid around a centre that is on the grid too.

That a cohort is drawn in secret only helps if a client's upload does not depend on which cohorts it was in before.
Stateful clients, as under SFVI, are accounted for as if they took part in every round.
"""

from __future__ import annotations

import math
import os
import secrets
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from bayesfed.data.plural import plural
from bayesfed.elbo import noise
from bayesfed.engine import discrete_noise
from bayesfed.settings import Rate, check
from bayesfed.steps.losses import per_client

NORMS = {"gaussian": 2, "laplace": 1}
"""The norm in which a mechanism clips."""
SHARE = 0.05
"""The part of a round's privacy that is spent on the share of clients below an adaptive clip."""
FIRST_CLIP = 0.1
MOST = 0.9
"""The largest quantile of the clients' norms that an adaptive clip follows."""
LOUD = 0.75
"""Noise that is longer than this times the longest possible sum of uploads raises a warning."""
DISTURBED = 0.5
"""Noise of a round that moves q(θ) by more than so many of its standard deviations raises a warning."""
FINEST = 2.0**-57
"""The finest grid of uploads, that of secure sums."""
LARGEST = 2.0**17
"""The largest scale of noise over the sensitivity: with it sums are exact."""
SHORT = "whether the norm is below the clip"
_COHORT = -1
_WHAT_TO_DO = (
    "the result may be off by more than its standard deviations. Take more clients or fewer rounds, a larger ε, or a "
    "model with fewer global parameters"
)


@dataclass(frozen=True)
class Privacy:
    """Differential privacy of clients: the clip of the uploads and the noise of their sum.

    Two federations are neighbours if all rows of one client differ. ``clip`` is of the L2 norm (``"gaussian"``) or the
    L1 norm (``"laplace"``).

    Give either ``epsilon``, which sets the noise, or ``noise``. With neither, uploads are only clipped, which limits
    the influence of a single client.

    Attributes:
        clip: γ, the largest norm of an upload; by default it follows a quantile of the clients' norms. A smaller one
            needs less noise, and biases the uploads more.
        epsilon: ε of all rounds together, whose number must be given.
        noise: scale of the noise (standard deviation, or Laplace's scale) over the sensitivity 2 γ.
        delta: δ of the Gaussian mechanism.
        mechanism: ``"gaussian"`` or ``"laplace"``.
        seed: makes noise and cohorts reproducible, for tests: anyone with the seed can subtract the noise, so that ε
            is infinite. By default they come from the operating system's entropy.

    Raises:
        ValueError: an unknown mechanism, both ``epsilon`` and ``noise``, a number out of range, or noise without a
            finite clip.

    Example:
        >>> import bayesfed as bf
        >>> privacy = bf.Privacy(clip=1.0, epsilon=2.0, mechanism="laplace")
        >>> round(privacy.multiplier(rounds=100, cohort=10, clients=100), 2)  # Laplace's scale over 2 γ
        5.43
        >>> round(bf.Privacy(clip=1.0, noise=5.43, mechanism="laplace").spent(100, 10, 100), 1)
        2.0
    """

    clip: Annotated[float, Field(gt=0)] | None = None
    epsilon: Rate | None = None
    noise: Annotated[float, Field(ge=0, le=LARGEST)] | None = None
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    mechanism: Literal["gaussian", "laplace"] = "gaussian"
    seed: Annotated[int, Field(ge=0)] | None = None

    def __post_init__(self) -> None:
        check(self)
        if self.epsilon is not None and self.noise is not None:
            raise ValueError("give either epsilon, which sets the noise, or noise")
        if self.clip == math.inf and (self.epsilon is not None or self.noise):
            raise ValueError("noise needs a finite clip, which is what its scale is relative to")

    @property
    def clips(self) -> bool:
        """True if uploads are clipped."""
        return self.clip != math.inf

    @property
    def noisy(self) -> bool:
        """True if noise is added to the sums."""
        return bool(self.epsilon or self.noise)

    def multiplier(self, rounds: int, cohort: int, clients: int) -> float:
        """Scale of the noise over 2 γ: as given, or as ``epsilon`` needs for these rounds and cohorts.

        Args:
            rounds: their number.
            cohort: K; N, where clients keep states between rounds, as those of SFVI do.
            clients: N.

        Raises:
            ValueError: ε is so small that the noise would be more than :data:`LARGEST` times the sensitivity.
        """
        if self.epsilon is None:
            return self.noise or 0.0
        if self.mechanism == "laplace":
            found = 1 / math.log1p(math.expm1(self.epsilon / rounds) * clients / cohort)
        else:
            found = _calibrate(self.epsilon, self.delta, rounds, cohort, clients)
        if found > LARGEST:
            raise ValueError(
                f"epsilon is {self.epsilon}: for {plural(rounds, 'round')} it needs noise of {found:.3g} times the "
                f"sensitivity, above {LARGEST:,.0f}. Take a larger epsilon or fewer rounds"
            )
        return found

    def spent(self, rounds: int, cohort: int, clients: int) -> float:
        """ε of so many rounds; infinite without noise, or with noise from a seed; arguments as :meth:`multiplier`."""
        scale = self.multiplier(rounds, cohort, clients)
        if scale == 0 or self.seed is not None:
            return math.inf
        if self.mechanism == "laplace":
            a_round, share = 1 / scale, cohort / clients
            if a_round > 50:  # e^ε' alone counts, and may be too large
                return rounds * (a_round + math.log(share))
            return rounds * math.log1p(share * math.expm1(a_round))
        accountant = _accountant()
        accountant.compose(_event(scale, rounds, cohort, clients))
        return float(accountant.get_epsilon(self.delta))

    def first_clip(self) -> Tensor:
        """γ in the first round, ``()``; some finite number, which JSON can hold, where nothing is clipped."""
        given = self.clip if self.clip is not None and self.clips else FIRST_CLIP
        return torch.tensor(given, dtype=torch.float64)

    def clip_uploads(
        self, upload: Mapping[str, Tensor], clip: float
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Clip K uploads ``(K, ...)``, each to norm γ over all its tensors; and the factors by which, ``(K,)`` or 1.

        With noise they are multiples of :meth:`grid` in double precision, whose norms are at most γ beyond doubt.
        """
        if not self.clips or not upload:
            return dict(upload), torch.ones(())
        dtype = next(iter(upload.values())).dtype
        if self.noisy:
            upload = {name: value.double() for name, value in upload.items()}
        order = NORMS[self.mechanism]
        flat = torch.cat([value.reshape(len(value), -1) for value in upload.values()], 1)
        norm = torch.linalg.vector_norm(flat, order, dim=1)
        if self.noisy:  # by more than the error of a sum in double precision
            norm = norm * (1 + 2.0**-51 * (flat.shape[1] + 4))
        factor = (clip / norm.clamp(min=1e-30)).clamp(max=1.0)
        clipped = {name: value * per_client(factor, value) for name, value in upload.items()}
        if self.noisy:
            step = self.grid("", clip)
            clipped = {name: (value / step).trunc() * step for name, value in clipped.items()}
        if self.clip is None:
            clipped[SHORT] = (norm <= clip).to(norm) - 0.5
        return clipped, factor.to(dtype)

    def grid(self, name: str, clip: float) -> float:
        """The step, a power of two, of which a part of a clipped upload and its noise are multiples."""
        largest = 0.5 if name == SHORT else clip
        return max(math.ldexp(1.0, math.frexp(largest)[1] - 23), FINEST)

    def next_clip(
        self, total: dict[str, Tensor], clip: Tensor, multiplier: float, cohort: int
    ) -> Tensor:
        """γ of the next round. The share of norms below γ is removed from the (noisy) sum of K uploads.

        The step is smaller where the noise of b̄ would change γ by more than a fifth.
        """
        if self.clip is not None:
            return clip
        below = total.pop(SHORT).double().cpu() / cohort + 0.5
        quantile = min(MOST, max(0.5, 1 - self.relative_noise(total, multiplier, cohort)))
        noise_of_share = multiplier / self._part(SHARE) / cohort
        step = min(1.0, 0.2 / max(noise_of_share, 1e-30)) * (below - quantile)
        return clip * torch.exp(-step.clamp(-1.0, 1.0))

    def cohort(self, number: int, clients: int, size: int) -> Tensor:
        """Draw the cohort of a round: positions of K clients, ascending, int64 ``(K,)``."""
        if self.seed is None:
            return torch.tensor(sorted(secrets.SystemRandom().sample(range(clients), size)))
        key = noise.fold(self._key(number), _COHORT)
        return noise.permuted(key, clients, torch.arange(size)).sort().values

    def add_noise(
        self, total: Mapping[str, Tensor], clip: float, multiplier: float, number: int, of: int = 1
    ) -> dict[str, Tensor]:
        """Add noise of this multiple of the sensitivity to the sum of clipped uploads of a round, float64.

        Args:
            total: multiples of :meth:`grid`.
            clip: γ of the round.
            multiplier: the noise multiplier.
            number: of the round.
            of: draw one of so many shares of the noise, see :mod:`bayesfed.engine.discrete_noise`.
        """
        if multiplier == 0:
            return dict(total)
        noisy = {}
        for name, value in total.items():
            step = self.grid(name, clip)
            scale = self.scale(name, clip, multiplier) / step
            drawn = self._draw(scale, name, value.shape, number, of).to(value.device)
            noisy[name] = value.double() + step * drawn.double()
        return noisy

    def relative_noise(self, total: Mapping[str, Tensor], multiplier: float, cohort: int) -> float:
        """The length of the noise of a round's sum over the largest length of the sum of K clipped uploads."""
        numbers = _numbers(total)
        length = numbers if self.mechanism == "laplace" else math.sqrt(numbers)
        return 2 * multiplier * length / cohort

    def warn_if_loud(self, total: Mapping[str, Tensor], multiplier: float, cohort: int) -> None:
        """Warn if the noise of a round is about as long as the sum of the uploads of all K clients can be.

        In ``experiments/private.md`` global means are then off by 0.5 to 10 posterior standard deviations.
        """
        if (times := self.relative_noise(total, multiplier, cohort)) > LOUD:
            numbers = _numbers(total)
            warnings.warn(
                f"the noise that privacy adds to a round's sum is about {times:.1f} times as long as the uploads of "
                f"its {plural(cohort, 'client')} can be together ({plural(numbers, 'number')} each): {_WHAT_TO_DO}",
                stacklevel=3,
            )

    def warn_if_disturbed(self, sds: float) -> None:
        """Warn if the noise of the last round moves q(θ) by about so many of its standard deviations."""
        if sds > DISTURBED:
            warnings.warn(
                f"the noise that privacy adds to a round's sum would move q(θ) by {sds:.1f} of its standard deviations "
                f"where it is widest: {_WHAT_TO_DO}",
                stacklevel=3,
            )

    def scale(self, name: str, clip: float, multiplier: float) -> float:
        """Scale of the noise of a part of the upload: its sensitivity is 2 γ, and 1 of the part about the norm."""
        if multiplier == 0:
            return 0.0
        if name == SHORT:
            return multiplier / self._part(SHARE)
        return 2 * clip * multiplier / (1.0 if self.clip is not None else self._part(1 - SHARE))

    def _part(self, share: float) -> float:
        """The factor on the inverse scale of the noise of a release that takes this share of a round's privacy.

        The inverse scales of releases side by side add up with Laplace noise, their squares with Gaussian noise.
        """
        return share if self.mechanism == "laplace" else math.sqrt(share)

    def _draw(self, scale: float, name: str, shape: Sequence[int], number: int, of: int) -> Tensor:
        """Draw noise in steps of the grid, int64."""
        source = os.urandom
        if self.seed is not None:
            source = np.random.default_rng([self.seed, number, *name.encode()]).bytes
        return discrete_noise.draw(self.mechanism, scale, shape, of, source)

    def _key(self, number: int) -> Tensor:
        """The key of a round's cohort, from the seed."""
        assert self.seed is not None
        return noise.fold(noise.fold(noise.key(self.seed), noise.word("privacy")), number)


NO_PRIVACY = Privacy(clip=math.inf)
"""Neither clip nor noise."""


def _numbers(total: Mapping[str, Tensor]) -> int:
    """The number of numbers of an upload, without the part about its norm."""
    return sum(value.numel() for name, value in total.items() if name != SHORT)


@cache
def _calibrate(epsilon: float, delta: float, rounds: int, cohort: int, clients: int) -> float:
    """Find the Gaussian noise that spends ε: a search of seconds, made once."""
    import dp_accounting as dp  # here, since it takes as long to import as torch

    scale = dp.calibrate_dp_mechanism(
        _accountant,
        lambda scale: _event(scale, rounds, cohort, clients),
        epsilon,
        delta,
        dp.LowerEndpointAndGuess(0.05, 1.0),
    )
    return float(scale)


def _accountant() -> Any:
    import dp_accounting as dp
    from dp_accounting.rdp import RdpAccountant

    return RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)


def _event(scale: float, rounds: int, cohort: int, clients: int) -> Any:
    import dp_accounting as dp

    event: Any = dp.GaussianDpEvent(scale)
    if cohort < clients:
        event = dp.SampledWithoutReplacementDpEvent(clients, cohort, event)
    return dp.SelfComposedDpEvent(event, rounds)
