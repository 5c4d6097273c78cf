"""The log evidence log p(D) of a model, by importance sampling, and Bayes factors.

    log p(D) ≈ log 1/S Σ_s r_s,   r_s = p(θ_s) Π_i p(D_i | θ_s) / t(θ_s),   θ_s ~ t

r_s are the importance weights by which a fit is corrected (:mod:`bayesfed.output.correction`), or those of q if it
needs no correction. The server needs the sum over clients only. The largest weights are smoothed by a generalised
Pareto distribution (:func:`bayesfed.output.importance.pareto_smooth`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from pyro import poutine
from torch import Tensor

from bayesfed.data.absent import RowsAbsent, are_absent
from bayesfed.data.plural import plural
from bayesfed.elbo import handlers
from bayesfed.output import khat
from bayesfed.output.correction import log_weights_around
from bayesfed.output.fitted import Fitted
from bayesfed.output.importance import pareto_smooth


@dataclass(frozen=True, repr=False)
class LogEvidence:
    """An estimate of log p(D), in nats; the difference of two is a :class:`LogBayesFactor`.

    Attributes:
        value: the estimate.
        mcse: its Monte Carlo standard error.
        khat: Pareto k-hat of the importance weights.
        draws: their number.
        clients: number of clients.
        rows: number of their rows.
        estimated: the model's ``pyro.param``, which are at their estimates: the value is log p(D | them).

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> posterior = bf.fit(models.eight_schools, datasets.eight_schools())
        >>> posterior.log_evidence  # by integration over a grid of μ and τ: -31.33
        log p(D) = -31.3... ± 0.0... (k-hat ..., 8 clients, 8 rows)
    """

    value: float
    mcse: float
    khat: float
    draws: int
    clients: int
    rows: int
    estimated: tuple[str, ...] = ()

    @property
    def caveat(self) -> str:
        """A warning that the estimate is not reliable, or what it is conditional on; empty if neither."""
        if self.khat > khat.limit(self.draws):
            return (
                f"Pareto k {self.khat:.2f} > {khat.limit(self.draws):.2g}: the estimate, usually too low, and its "
                "error are not reliable. posterior.corrected(), narrower priors or another guide "
                "(SFVI(global_guide=Flow())) may help"
            )
        if self.estimated:
            return (
                f"given the estimates of {', '.join(self.estimated)}, which have no prior: a model with more such "
                "parameters has a larger value"
            )
        return ""

    def __sub__(self, other: LogEvidence) -> LogBayesFactor:
        """Return the log Bayes factor of two models of the same data.

        Raises:
            ValueError: the numbers of clients or rows differ.
        """
        if (self.clients, self.rows) != (other.clients, other.rows):
            raise ValueError(
                f"evidence of different data: {plural(self.clients, 'client')} with {plural(self.rows, 'row')}, and "
                f"{other.clients} with {other.rows}. Fit both models to the same rows"
            )
        caveats = dict.fromkeys(filter(None, (self.caveat, other.caveat)))
        return LogBayesFactor(
            self.value - other.value,
            math.hypot(self.mcse, other.mcse),
            (self.khat, other.khat),
            "\n".join(caveats),
        )

    def __repr__(self) -> str:
        text = (
            f"log p(D) = {self.value:.2f} ± {self.mcse:.2f} (k-hat {self.khat:.2f}, {plural(self.clients, 'client')}, "
            f"{plural(self.rows, 'row')})"
        )
        return "\n".join(filter(None, (text, self.caveat)))


@dataclass(frozen=True, repr=False)
class LogBayesFactor:
    """The difference of two log evidences, in nats.

    Attributes:
        value: log p(D | first model) − log p(D | second model).
        mcse: its Monte Carlo standard error.
        khats: Pareto k-hat of both.
        caveat: the warnings of both.

    Example:
        >>> from bayesfed.output.log_evidence import LogEvidence
        >>> first = LogEvidence(-31.0, 0.03, 0.2, 2000, clients=8, rows=8)
        >>> first - LogEvidence(-33.5, 0.04, 0.4, 2000, clients=8, rows=8)
        log Bayes factor 2.50 ± 0.05, factor 12.2 (k-hat 0.20 and 0.40)
    """

    value: float
    mcse: float
    khats: tuple[float, float]
    caveat: str = ""

    @property
    def factor(self) -> float:
        """The Bayes factor p(D | first model) / p(D | second model)."""
        return math.exp(self.value) if self.value < 700 else math.inf

    def __repr__(self) -> str:
        first, second = self.khats
        text = (
            f"log Bayes factor {self.value:.2f} ± {self.mcse:.2f}, factor {self.factor:.3g} "
            f"(k-hat {first:.2f} and {second:.2f})"
        )
        return "\n".join(filter(None, (text, self.caveat)))


def estimate_log_evidence(fitted: Fitted, log_weights: Tensor | None) -> LogEvidence:
    """Estimate log p(D) from the importance weights of a posterior of all clients.

    Args:
        fitted: the posterior.
        log_weights: of q without a correction, ``(S,)``; None if there are none.

    Raises:
        ValueError: the posterior is one of some of the clients, or its draws have no importance weights.
    """
    program = fitted.program
    fitted.check_is_of_all("log_evidence is of all, use the posterior of the fit")
    if fitted.correction is not None:
        log_weights = correction_weights(fitted)
    if log_weights is None and are_absent(fitted.federation.sufficient.fields):
        raise RowsAbsent
    if log_weights is None:
        raise ValueError(
            f"log_evidence needs importance weights, which this fit by {fitted.algorithm} has not: θ has no density "
            "(point estimates, particles), the run was private, or the clients have too many rows. Fit by bf.SFVI()"
        )
    value, mcse, k = log_mean(log_weights)
    return LogEvidence(
        value, mcse, k, len(log_weights), program.clients, program.rows, find_estimated(fitted)
    )


def correction_weights(fitted: Fitted) -> Tensor | None:
    """Return the log importance weights of a correction, ``(S,)``; of chains those of draws around theirs."""
    correction = fitted.correction
    if correction is None or correction.log_weights is not None or correction.rhat is None:
        return None if correction is None else correction.log_weights
    return log_weights_around(fitted)


def log_mean(log_weights: Tensor) -> tuple[float, float, float]:
    """Return the logarithm of the mean of weights ``(S,)``, its Monte Carlo standard error, and Pareto k.

    Example:
        >>> import torch
        >>> from bayesfed.output.log_evidence import log_mean
        >>> log_mean(torch.full((1000,), 2.0))
        (2.0, 0.0, 0.0)
    """
    smooth, k = pareto_smooth(log_weights)
    share = smooth.softmax(0)
    value = float(smooth.logsumexp(0)) - math.log(len(smooth))
    return value, float((share - 1 / len(share)).square().sum().sqrt()), k


def find_estimated(fitted: Fitted) -> tuple[str, ...]:
    """Return the names of the model's ``pyro.param``."""
    program = fitted.program
    given = handlers.given(program.schema.device, fitted.params, {}, starting=program.local_params)
    with torch.no_grad(), given as parameters:
        poutine.trace(program.model).get_trace(program.schema)
    return tuple(parameters.seen)
