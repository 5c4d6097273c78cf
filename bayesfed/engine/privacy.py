"""Differential privacy of clients: each upload is clipped and their sum is noisy, whatever the aggregation rule.

    u_i ← u_i · min(1, γ / ‖u_i‖),     Σ u_i ← Σ u_i + noise

An upload is all that a client encodes, as one vector. Two federations are neighbours if they differ in one client's
data: then the clipped sum differs by at most 2 γ. What is private is the sums of all rounds, and so the posterior's
global parameters and all that the server sends; a client's own posterior is as private as the client keeps it. With
noise nothing else is sent: no numbers of rows, no ELBO terms (the history has NaN for them), and in place of an upload
that is not finite, zeros. ``docs/privacy.md`` lists what leaves a client.

*The clip* follows a quantile of the clients' norms where none is given (Andrew et al. 2021, Algorithm 1): each client
sends whether its norm was below γ, as ±½, and  γ ← γ exp(−η (b̄ − q))  with b̄ the noisy share that was. That takes
a part :data:`SHARE` of the privacy of each round. A clip bends what is longer, and what it spares is noise: q is the
median where noise is half as long as all uploads together, or longer, and grows up to :data:`MOST` where it is less.

Noise and cohorts come from the operating system's entropy, are written nowhere and cannot be drawn again: not from
``seed``, nor from a file. A run that goes on from a file draws anew.

``"laplace"`` clips in L1 and is ε-DP (Dwork & Roth 2014, Theorem 3.6): ε' = 2 γ / scale a round; a cohort drawn
without replacement from N gives ln(1 + (K / N)(e^ε' − 1)) (Balle, Barthe & Gaboardi 2018, Theorem 9), and rounds add
up. PAC-PFL's private variant clips in L2 and adds Laplace noise, which in more than one dimension is not ε-DP.

``"gaussian"`` clips in L2 and is (ε, δ)-DP by dp-accounting's Rényi accountant for cohorts without replacement.

That a cohort is drawn in secret only helps where a client's upload does not depend on which cohorts it was in before.
Clients that keep something from round to round, as under SFVI, are accounted for as if they took part in every round.

The noise is drawn in double precision and rounded: the attack on floating-point numbers of Mironov (2012) is not
guarded against.
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

import torch
from pydantic import Field
from torch import Tensor

from bayesfed.elbo import noise
from bayesfed.settings import Rate, check

NORMS = {"gaussian": 2, "laplace": 1}
"""The norm in which a mechanism clips."""
SHARE = 0.05
"""What of a round's privacy goes into the share of clients below an adaptive clip."""
FIRST_CLIP = 0.1
MOST = 0.9
"""How many of the clients an adaptive clip leaves alone at most."""
LOUD = 0.75
"""From how many times the longest sum of uploads on noise is warned of."""
SHAKEN = 0.5
"""From how many of its standard deviations on q(θ) is said to be shaken by the noise of a round."""
SHORT = "whether the norm is below the clip"
_COHORT = -1
_WHAT_TO_DO = (
    "the result may be off by more than it says. Take more clients or fewer rounds, a larger ε, or a model with fewer "
    "global parameters"
)


@dataclass(frozen=True)
class Privacy:
    """How uploads are clipped and how noisy their sum is.

    Give either ``epsilon``, which sets the noise, or ``noise``. With neither, uploads are clipped only, which limits
    what a single client can do to the others.

    Attributes:
        clip: γ, the largest norm of an upload; by default it follows a quantile of the clients' norms. A smaller one
            needs less noise, and lets each client say less.
        epsilon: what all rounds together may spend.
        noise: scale of the noise (standard deviation, or Laplace's scale) over the sensitivity 2 γ.
        delta: δ of the Gaussian mechanism.
        mechanism: ``"gaussian"`` or ``"laplace"``.
        seed: noise and cohorts that can be drawn again, for tests: whoever knows the seed can take the noise off, so
            that ε is infinite. By default they come from the operating system's entropy.

    Raises:
        ValueError: an unknown mechanism, both ``epsilon`` and ``noise``, or a number out of range.

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
    noise: float | None = None
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    mechanism: Literal["gaussian", "laplace"] = "gaussian"
    seed: Annotated[int, Field(ge=0)] | None = None

    def __post_init__(self) -> None:
        check(self)
        if self.epsilon is not None and self.noise is not None:
            raise ValueError("give either epsilon, which sets the noise, or noise")
        if self.clip == math.inf and (self.epsilon is not None or self.noise):
            raise ValueError("noise needs a finite clip, which is what its scale is relative to")

    def multiplier(self, rounds: int, cohort: int, clients: int) -> float:
        """Scale of the noise over 2 γ: as given, or as ``epsilon`` needs for so many rounds and cohorts."""
        if self.epsilon is None:
            return self.noise or 0.0
        if self.mechanism == "laplace":
            a_round = math.log1p(math.expm1(self.epsilon / rounds) * clients / cohort)
            return 1 / a_round
        return _calibrated(self.epsilon, self.delta, rounds, cohort, clients)

    def spent(self, rounds: int, cohort: int, clients: int) -> float:
        """ε of so many rounds; infinite without noise, or with noise that a seed tells."""
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
        """γ in the first round, ``()``."""
        return torch.tensor(FIRST_CLIP if self.clip is None else self.clip, dtype=torch.float64)

    def clipped(
        self, upload: Mapping[str, Tensor], clip: float
    ) -> tuple[dict[str, Tensor], Tensor]:
        """K uploads ``(K, ...)``, each of norm γ at most over all its tensors; and the factors that made them so."""
        order = NORMS[self.mechanism]
        flat = torch.cat([value.reshape(len(value), -1) for value in upload.values()], 1)
        norm = torch.linalg.vector_norm(flat, order, dim=1)
        factor = (clip / norm.clamp(min=1e-30)).clamp(max=1.0)
        clipped = {
            name: value * factor.reshape(-1, *[1] * (value.ndim - 1))
            for name, value in upload.items()
        }
        if self.clip is None:
            clipped[SHORT] = (norm <= clip).to(norm) - 0.5
        return clipped, factor

    def adapted(
        self, total: dict[str, Tensor], clip: Tensor, multiplier: float, cohort: int
    ) -> Tensor:
        """γ of the next round; takes what it is made of from the (noisy) sum of K uploads.

        The step is smaller where the noise of b̄ would shake γ by more than a fifth.
        """
        if self.clip is not None:
            return clip
        below = total.pop(SHORT).double().cpu() / cohort + 0.5
        most = min(MOST, max(0.5, 1 - self.loudness(total, multiplier, cohort)))
        shake = multiplier / self._part(SHARE) / cohort
        step = min(1.0, 0.2 / max(shake, 1e-30)) * (below - most)
        return clip * torch.exp(-step.clamp(-1.0, 1.0))

    def cohort(self, number: int, clients: int, size: int) -> Tensor:
        """Positions of the clients of a round, ascending, int64 ``(K,)``."""
        if self.seed is None:
            return torch.tensor(sorted(secrets.SystemRandom().sample(range(clients), size)))
        key = noise.fold(self._key(number), _COHORT)
        return noise.permuted(key, clients, torch.arange(size)).sort().values

    def noisy(
        self, total: Mapping[str, Tensor], clip: float, multiplier: float, number: int
    ) -> dict[str, Tensor]:
        """The sum of a round with noise of this multiple of the sensitivity."""
        if multiplier == 0:
            return dict(total)
        return {
            name: value + self.scale(name, clip, multiplier) * self._drawn(value, name, number)
            for name, value in total.items()
        }

    def loudness(self, total: Mapping[str, Tensor], multiplier: float, cohort: int) -> float:
        """How many times the noise of a round's sum is as long as the uploads of K clients can be together."""
        numbers = _numbers(total)
        length = numbers if self.mechanism == "laplace" else math.sqrt(numbers)
        return 2 * multiplier * length / cohort

    def warn_if_loud(self, total: Mapping[str, Tensor], multiplier: float, cohort: int) -> None:
        """Warn where the noise of a round is about as long as the uploads of all K clients can be together.

        In ``experiments/private.md`` global means are off by .5 to 10 posterior standard deviations from there on.
        """
        if (times := self.loudness(total, multiplier, cohort)) > LOUD:
            numbers = _numbers(total)
            warnings.warn(
                f"the noise that privacy adds to a round's sum is about {times:.1f} times as long as the uploads of "
                f"its {cohort} clients can be together ({numbers:,} numbers each): {_WHAT_TO_DO}",
                stacklevel=3,
            )

    def warn_if_shaken(self, sds: float) -> None:
        """Warn where the noise of a last round would move q(θ) by about so many of its standard deviations."""
        if sds > SHAKEN:
            warnings.warn(
                f"the noise that privacy adds to a round's sum would move q(θ) by {sds:.1f} of its standard deviations "
                f"where it is widest: {_WHAT_TO_DO}",
                stacklevel=3,
            )

    def scale(self, name: str, clip: float, multiplier: float) -> float:
        """Of the noise of a part of the upload: the sensitivity is 2 γ, and 1 of what a client says of its norm."""
        if name == SHORT:
            return multiplier / self._part(SHARE)
        return 2 * clip * multiplier / (1.0 if self.clip is not None else self._part(1 - SHARE))

    def _part(self, share: float) -> float:
        """By what a release of its own that takes this share of a round's privacy has less noise's inverse scale.

        The inverse scales of releases side by side add up with Laplace noise, their squares with Gaussian noise.
        """
        return share if self.mechanism == "laplace" else math.sqrt(share)

    def _drawn(self, like: Tensor, name: str, number: int) -> Tensor:
        """Noise of unit scale."""
        if self.seed is None:
            u = entropy(like.shape)
        else:
            u = noise.uniform(noise.fold(self._key(number), noise.word(name)), like.shape)
        if self.mechanism == "gaussian":
            return torch.special.ndtri(u).to(like)
        centred = u - 0.5
        return (-centred.sign() * torch.log1p(-2 * centred.abs())).to(like)

    def _key(self, number: int) -> Tensor:
        """Of a round, where there is a seed."""
        assert self.seed is not None
        return noise.fold(noise.fold(noise.key(self.seed), noise.word("privacy")), number)


def _numbers(total: Mapping[str, Tensor]) -> int:
    """How many numbers an upload has, but for what it says of its norm."""
    return sum(value.numel() for name, value in total.items() if name != SHORT)


def entropy(shape: Sequence[int]) -> Tensor:
    """Uniform numbers in (0, 1), in double precision, from the operating system's cryptographic generator."""
    count = math.prod(shape)
    bits = torch.frombuffer(bytearray(os.urandom(8 * max(1, count))), dtype=torch.int64)[:count]
    return (((bits >> 12) & ((1 << 52) - 1)).double() + 0.5).mul(2.0**-52).reshape(shape)


@cache
def _calibrated(epsilon: float, delta: float, rounds: int, cohort: int, clients: int) -> float:
    """The Gaussian noise that spends ε: a search of seconds, once."""
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
