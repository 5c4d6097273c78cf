"""Variational families of globals and locals, each a Pyro guide that a user could have written.

An :class:`~bayesfed.Algorithm` is composed of families of globals and locals, steps and a rule.
"""

from bayesfed.guides.factorised import Factorised, factorised
from bayesfed.guides.flow import Flow
from bayesfed.guides.full_rank import FullRank
from bayesfed.guides.globals import Gaussian, LaplaceGaussian, OwnGuide, Particles, Point
from bayesfed.guides.hierarchical import Hierarchical
from bayesfed.guides.locals import (
    AtPrior,
    Conditioned,
    Encoded,
    FromPrior,
    Integrated,
    Kept,
    Locals,
    Remade,
)
from bayesfed.guides.mean_field import MeanField
from bayesfed.guides.particles import ParticleGuide

__all__ = [
    "Point",
    "Gaussian",
    "MeanField",
    "FullRank",
    "Flow",
    "Particles",
    "LaplaceGaussian",
    "OwnGuide",
    "Locals",
    "AtPrior",
    "Kept",
    "Remade",
    "Encoded",
    "Integrated",
    "FromPrior",
    "Conditioned",
    "Factorised",
    "factorised",
    "Hierarchical",
    "ParticleGuide",
]
