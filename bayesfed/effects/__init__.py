"""Effects after a fit, ``bf.effects``: predictions, marginal means, comparisons, slopes and hypotheses."""

from bayesfed.effects.estimands import comparisons, marginal_means, predictions, slopes
from bayesfed.effects.hypotheses import hypotheses
from bayesfed.effects.question import Settings
from bayesfed.effects.result import Effects

__all__ = [
    "Effects",
    "Settings",
    "comparisons",
    "hypotheses",
    "marginal_means",
    "predictions",
    "slopes",
]
