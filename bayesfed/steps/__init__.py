"""Steps: what a client does in a round."""

from bayesfed.steps.cavity_steps import CavitySteps
from bayesfed.steps.descent import Descent
from bayesfed.steps.evidence import Evidence
from bayesfed.steps.job import Job, Work
from bayesfed.steps.langevin_em import LangevinEM
from bayesfed.steps.laplace_steps import LaplaceSteps
from bayesfed.steps.local_loop import local_loop
from bayesfed.steps.local_variational import GradientsAtDraws
from bayesfed.steps.natural_descent import NaturalDescent
from bayesfed.steps.own_copy import OwnCopy
from bayesfed.steps.penalised_descent import PenalisedDescent
from bayesfed.steps.phases import Alternate, InTurn
from bayesfed.steps.steps import Steps
from bayesfed.steps.through_steps import ThroughContext, ThroughSteps
from bayesfed.steps.variational_em import VariationalEM

__all__ = [
    "Steps",
    "Job",
    "Work",
    "local_loop",
    "Descent",
    "PenalisedDescent",
    "NaturalDescent",
    "InTurn",
    "Alternate",
    "ThroughSteps",
    "ThroughContext",
    "VariationalEM",
    "LangevinEM",
    "LaplaceSteps",
    "Evidence",
    "GradientsAtDraws",
    "OwnCopy",
    "CavitySteps",
]
