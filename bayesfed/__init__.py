"""Hierarchical Bayesian models, written in Pyro, fitted across clients whose data never meet."""

from bayesfed import guides, models
from bayesfed.algorithms import (
    FOLA,
    PACPFL,
    PVI,
    SFVI,
    Algorithm,
    CAFeMe,
    Ditto,
    FedABML,
    FedAvg,
    FedBABU,
    FedCurv,
    FedNova,
    FedPer,
    FedRep,
    Local,
    PerFedAvg,
    PFedMe,
    PFedVEM,
    Scaffold,
    SFVIAvg,
)
from bayesfed.data import datasets, simulations
from bayesfed.data.federation import Federation
from bayesfed.engine.execution import Execution
from bayesfed.engine.privacy import Privacy
from bayesfed.engine.run import Round, Run, Stopped
from bayesfed.fit import finish, fit, start, step
from bayesfed.guides import Flow, FullRank, MeanField
from bayesfed.output import bounds, metrics
from bayesfed.output.posterior import Posterior

__version__ = "0.1.0"

__all__ = [
    "Federation",
    "fit",
    "start",
    "step",
    "finish",
    "Run",
    "Round",
    "Stopped",
    "Execution",
    "Privacy",
    "Posterior",
    "Algorithm",
    "SFVI",
    "SFVIAvg",
    "PVI",
    "FedABML",
    "PFedVEM",
    "FOLA",
    "CAFeMe",
    "PACPFL",
    "FedAvg",
    "FedNova",
    "Scaffold",
    "PerFedAvg",
    "PFedMe",
    "Ditto",
    "Local",
    "FedPer",
    "FedRep",
    "FedBABU",
    "FedCurv",
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
