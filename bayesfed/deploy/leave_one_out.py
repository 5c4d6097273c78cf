"""The server's side of leave-one-out: it asks the institutions for sums, and compares models by their totals."""

from __future__ import annotations

import numpy as np
import torch

from bayesfed.deploy.global_posterior import GlobalPosterior
from bayesfed.deploy.institutions import Institutions
from bayesfed.deploy.messages import LeaveOut, LeftOut, MessageError, Tensors
from bayesfed.deploy.node_elpds import form_of_sums, from_tensors, names_of
from bayesfed.deploy.sums import request_sum
from bayesfed.elbo.program import Program
from bayesfed.output import khat
from bayesfed.output.comparison import Comparison, ElpdSums, compare_sums
from bayesfed.output.elpds import outcome_site
from bayesfed.output.stacking import MixtureSums
from bayesfed.settings import LeaveOneOutSettings

UNCORRECTED = "draws of θ are from q(θ), which was not corrected by importance weights"


def check_leave_one_out(program: Program, agreed: LeaveOneOutSettings) -> None:
    """Check before a fit that its draws will have a density, and that the outcome exists.

    Raises:
        ValueError: names what is wrong.
    """
    if not program.random or program.weights_draws:
        raise ValueError(
            "leave_one_out: θ has no density (point estimates, particles): use SFVI, or leave it out"
        )
    if agreed.unit == "observation":
        outcome_site(program, agreed.outcome)


def compute_leave_one_out(
    institutions: Institutions, run: str, found: GlobalPosterior
) -> Comparison | None:
    """Return the comparison of the plan; if it cannot be computed it is reported, and is None."""
    agreed = institutions.plan.leave_one_out
    if agreed is None:
        return None
    try:
        return _compare(institutions, run, found, agreed)
    except (ValueError, TimeoutError, RuntimeError) as error:
        institutions.report(f"leave-one-out is left out: {error}")
        return None


def _compare(
    institutions: Institutions, run: str, found: GlobalPosterior, agreed: LeaveOneOutSettings
) -> Comparison:
    of, names = found.posterior, names_of(agreed)
    trusted = of.correction is not None or (of.algorithm.corrected and of.correctable)

    def ask(weights: np.ndarray | None) -> Tensors:
        form = form_of_sums(len(names), stacking=weights is not None)
        of = {} if weights is None else {"weights": torch.from_numpy(weights)}
        what, request = "sums of leave-one-out", LeaveOut(run=run)
        called = f"{what} with {[] if weights is None else weights.tolist()}"
        sent = {"weights": of} if of else {}
        sums = request_sum(institutions, request, LeftOut, lambda _: form, what, called, sent)
        if not all(bool(value.isfinite().all()) for value in sums.values()):
            raise MessageError(f"the {what} are not finite")
        return sums

    sums = from_tensors(ElpdSums, ask(None))
    caveat = "; ".join(filter(None, (found.caveat, "" if trusted else UNCORRECTED)))
    return compare_sums(
        names,
        sums,
        lambda weights: from_tensors(MixtureSums, ask(weights)),
        agreed.unit,
        khat.limit(agreed.num_samples),
        {agreed.name: caveat} if caveat else {},
    )
