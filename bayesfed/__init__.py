"""Hierarchical Bayesian models, written in Pyro, fitted across clients whose data never meet."""

from bayesfed import bounds, datasets, guides, metrics, models, simulations
from bayesfed.algorithms import FOLA, PACPFL, PVI, SFVI, CAFeMe, FedABML, PFedVEM, SFVIAvg
from bayesfed.federation import Federation
from bayesfed.guides import Flow, FullRank, MeanField
from bayesfed.posterior import Posterior
from bayesfed.privacy import Privacy
from bayesfed.runner import Round, fit

__version__ = "0.1.0"

__all__ = [
    "Federation",
    "fit",
    "Posterior",
    "Privacy",
    "Round",
    "SFVI",
    "SFVIAvg",
    "PVI",
    "FedABML",
    "PFedVEM",
    "FOLA",
    "CAFeMe",
    "PACPFL",
    "MeanField",
    "FullRank",
    "Flow",
    "bounds",
    "datasets",
    "guides",
    "metrics",
    "models",
    "simulations",
]
