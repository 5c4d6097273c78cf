"""Variational families of the globals that have no file of their own: a point estimate, particles, a user's guide.

``MeanField``, ``FullRank`` and ``Flow`` are the others. An :class:`~bayesfed.Algorithm` names one of them as its
``globals``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from bayesfed.settings import Rate


@dataclass(frozen=True)
class Point:
    """A point estimate of θ, in unconstrained coordinates."""


@dataclass(frozen=True)
class Gaussian:
    """A Normal q(θ): :class:`FullRank` up to 100 dimensions, else :class:`MeanField`, with a warning."""


@dataclass(frozen=True)
class Particles:
    """Particles of θ that start at draws of its prior; each is one prior for the clients (PAC-PFL).

    Attributes:
        count: k, the number of particles. None: 16 where θ has at most 50 numbers and clients' marginal likelihoods
            take no draws, else 4.
    """

    count: int | None = None


@dataclass(frozen=True)
class LaplaceGaussian:
    """A Normal q(θ) over all globals, ``pyro.param`` included, by Laplace's method (FOLA).

    Attributes:
        covariance: ``"full"`` matrices, their ``"diagonal"``, or ``"e-full"``, the eigenvalues of the full matrix as a
            diagonal (FOLA, section IV). None: full where θ has at most 50 numbers, else diagonal.
        gamma: γ, the precision of the prior of every ``pyro.param``.
    """

    covariance: Literal["full", "e-full", "diagonal"] | None = None
    gamma: Rate = 1.0


@dataclass(frozen=True)
class OwnGuide:
    """A Pyro guide of the user's own, of global and local variables.

    Attributes:
        guide: the guide, a function of the federation.
    """

    guide: Callable[[Any], Any]
