"""Algorithms: pairings of a guide, a local schedule and an aggregation rule, one file each."""

from bayesfed.algorithms.pvi import PVI
from bayesfed.algorithms.sfvi import SFVI
from bayesfed.algorithms.sfvi_avg import SFVIAvg

__all__ = ["SFVI", "SFVIAvg", "PVI"]
