"""Aggregation rules: what is summed over a cohort, and what the server does with the sum."""

from bayesfed.rules.barycentre import Barycentre
from bayesfed.rules.m_step import MStep
from bayesfed.rules.mean import ControlVariates, Mean, MedianOfInstitutions, NormalisedMean, OfOne
from bayesfed.rules.mean_and_variance import MeanAndVariance
from bayesfed.rules.natural_gradient import NaturalGradient
from bayesfed.rules.product_of_factors import ProductOfFactors
from bayesfed.rules.product_of_gaussians import ProductOfGaussians
from bayesfed.rules.rule import Progress, Rule, Turn, add, mean_of, moves, weighted_sum
from bayesfed.rules.stein import Stein
from bayesfed.rules.summed_curvature import SummedCurvature

__all__ = [
    "Rule",
    "Turn",
    "Progress",
    "moves",
    "weighted_sum",
    "mean_of",
    "add",
    "Mean",
    "NormalisedMean",
    "OfOne",
    "ControlVariates",
    "MedianOfInstitutions",
    "SummedCurvature",
    "MeanAndVariance",
    "MStep",
    "ProductOfGaussians",
    "Stein",
    "NaturalGradient",
    "Barycentre",
    "ProductOfFactors",
]
