"""The public names. bayesfed imports the module of a name when the name is first used."""

from bayesfed import effects, guides, models, rules, steps, testing
from bayesfed.algorithms import Algorithm
from bayesfed.algorithms.table import (
    FOLA,
    PACPFL,
    PVI,
    SFVI,
    CAFeMe,
    Ditto,
    FedABML,
    FedAvg,
    FedBABU,
    FedBE,
    FedCurv,
    FedNova,
    FedPer,
    FedPop,
    FedProx,
    FedRep,
    Local,
    PerFedAvg,
    PFedBayes,
    PFedGP,
    PFedMAP,
    PFedMe,
    PFedVEM,
    Scaffold,
    SFVIAvg,
)
from bayesfed.calibration.calibrate import calibrate
from bayesfed.calibration.power import power
from bayesfed.data import datasets, images, simulations
from bayesfed.data.federation import Federation
from bayesfed.engine.execution import Execution
from bayesfed.engine.moments import Moments
from bayesfed.engine.privacy import Privacy
from bayesfed.engine.run import Round, Run, Stopped
from bayesfed.fitting import finish, fit, start, step
from bayesfed.formulas.formula import formula
from bayesfed.guides import Flow, FullRank, MeanField
from bayesfed.output import bounds, metrics
from bayesfed.output.comparison import compare
from bayesfed.output.leave_one_client_out import leave_one_client_out
from bayesfed.output.loo import loo
from bayesfed.output.posterior import Posterior

__all__ = [
    "FOLA",
    "PACPFL",
    "PVI",
    "SFVI",
    "Algorithm",
    "CAFeMe",
    "Ditto",
    "Execution",
    "FedABML",
    "FedAvg",
    "FedBABU",
    "FedBE",
    "FedCurv",
    "FedNova",
    "FedPer",
    "FedPop",
    "FedProx",
    "FedRep",
    "Federation",
    "Flow",
    "FullRank",
    "Local",
    "MeanField",
    "Moments",
    "PFedBayes",
    "PFedGP",
    "PFedMAP",
    "PFedMe",
    "PFedVEM",
    "PerFedAvg",
    "Posterior",
    "Privacy",
    "Round",
    "Run",
    "SFVIAvg",
    "Scaffold",
    "Stopped",
    "bounds",
    "calibrate",
    "compare",
    "datasets",
    "effects",
    "finish",
    "fit",
    "formula",
    "guides",
    "images",
    "leave_one_client_out",
    "loo",
    "metrics",
    "models",
    "power",
    "rules",
    "simulations",
    "start",
    "step",
    "steps",
    "testing",
]

__version__: str
