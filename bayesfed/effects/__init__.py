"""Effects after a fit, ``bf.effects``: predictions, comparisons, slopes, hypotheses, ranks, centiles, R² and ICC."""

from bayesfed.effects.clients import centiles, random_effects
from bayesfed.effects.estimands import comparisons, marginal_means, predictions, slopes
from bayesfed.effects.hypotheses import hypotheses
from bayesfed.effects.question import Settings
from bayesfed.effects.result import Effects
from bayesfed.effects.variance import bayes_r2, icc

__all__ = [
    "Effects",
    "Settings",
    "bayes_r2",
    "centiles",
    "comparisons",
    "hypotheses",
    "icc",
    "marginal_means",
    "predictions",
    "random_effects",
    "slopes",
]
