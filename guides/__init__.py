"""Guides: variational families, each a Pyro program that a user could have written."""

from bayesfed.guides.factorised import Factorised, factorised
from bayesfed.guides.flow import Flow
from bayesfed.guides.full_rank import FullRank
from bayesfed.guides.hierarchical import Hierarchical
from bayesfed.guides.mean_field import MeanField
from bayesfed.guides.particles import Particles

__all__ = ["Factorised", "factorised", "Flow", "FullRank", "Hierarchical", "MeanField", "Particles"]
