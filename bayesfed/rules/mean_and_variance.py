"""The Normal with the mean and the variance of the clients' copies of θ, whose draws are an ensemble (FedBE).

    client i  θ_i: a round's steps from μ_S, as in FedAvg; uploads n_i (θ_i − μ_S) and n_i (θ_i − μ_S)²
    server    m = Σ π_i θ_i,  Σ_S = diag(Σ π_i (θ_i − m)²),  π_i = n_i / Σ n,  μ_S ← m

(Chen & Chao 2021, *FedBE: Making Bayesian model ensemble applicable to federated learning*, section 3.2.) Predictions
are means over draws of N(μ_S, Σ_S). p(θ) enters the steps as its quadratic expansion at μ_S. Where θ has at most 50
numbers, steps are in units of the prior at the model's start.

In a run without a number of rounds, as of FedAvg, μ_S does not go to m but takes quasi-Newton steps on the mean of the
clients' gradients, which they upload as well (:mod:`bayesfed.rules.quasi_newton`). So μ_S ends at the maximum of
log p(θ) + Σ log p(D_i | θ), without the drift of several local steps, and Σ_S is that of a round's steps from there.

*Left out.* The paper's server distils the ensemble into one network, which clients go on from. That needs unlabelled
data at the server, which has none here: clients go on from μ_S. The paper's other ensemble, means of the θ_i with
weights from a Dirichlet distribution, needs the single uploads, of which a server here has the sum alone.

*The spread* is that of the clients' copies after a round. It depends on the rate and the number of the steps, does not
shrink with the number of clients, and is no posterior's: take SFVI or FOLA for standard deviations of θ.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bayesfed.elbo.program import Params, Program
from bayesfed.guides.globals import LaplaceGaussian
from bayesfed.guides.laplace import gaussian_params
from bayesfed.guides.precisions import definite
from bayesfed.rules.quasi_newton import advance, begin
from bayesfed.rules.rule import NO_TERM, Progress, Rule, Turn, mean_of, weighted_sum
from bayesfed.steps.job import SINGLE, Job, Parts, Work
from bayesfed.steps.optimizer import State
from bayesfed.steps.steps import Steps, gradient_of

LOC = "global.loc"
"""The name of μ_S among the guide's parameters."""

NARROWEST = 1e-6
"""The smallest standard deviation, which clients that agree have."""


Server = dict[str, Params]
"""``q``: μ_S (``loc``), the diagonal of Σ_S (``variance``) and the units of the steps (``unit``), ``(D,)`` each."""


@dataclass(frozen=True)
class MeanAndVariance(Rule):
    """The mean and the variance of the clients' copies, weighted by their numbers of rows.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> posterior = bf.fit(models.varying_intercept, datasets.grunfeld(), bf.FedBE(), rounds=3)
        >>> posterior.sample(50)["beta"].std(0) > 0  # the ensemble
        tensor([True, True])
    """

    by_gradient = True
    needs = frozenset({"mode"})
    sends = frozenset({"gaussian"})
    globals = (LaplaceGaussian,)
    no_noise = "its variance is a difference of sums, which noise may make negative: use FedAvg"

    def accept(self, program: Program, steps: Steps, name: str) -> Program:
        """Refuse a covariance that is no diagonal.

        Raises:
            ValueError: what to take.
        """
        if program.guide.covariance == "full":
            raise ValueError(
                f"{name}: MeanAndVariance() has a diagonal covariance: take LaplaceGaussian('diagonal')"
            )
        return program

    def start(self, program: Program) -> Server:
        """Return the model's start, and the variance of the prior there."""
        guide = program.guide
        curvature = guide.prior_slopes(guide.start, program.schema, full=False)[1]
        variance = definite(curvature, matrix=False).reciprocal()
        unit = variance.sqrt() if guide.small else torch.ones_like(variance)
        return {"q": {"loc": guide.start.clone(), "variance": variance, "unit": unit}}

    def newton(self, program: Program, steps: Steps) -> Params:
        """Return the first state of quasi-Newton steps; empty where θ is not small."""
        return begin(program, gradient_of(steps, program))

    def params(self, server: Server) -> Params:
        """Return N(μ_S, Σ_S) as the guide has it."""
        return gaussian_params(server["q"]["loc"], server["q"]["variance"].reciprocal())

    def broadcast(self, turn: Turn, server: Server) -> Parts:
        """Return μ_S, the units, and p(θ)^(1/n) as the Normal with its gradient and curvature at μ_S."""
        program, loc, unit = turn.program, server["q"]["loc"], server["q"]["unit"]
        slope, curvature = program.guide.prior_slopes(loc, program.schema, full=False)
        precision = definite(curvature / program.rows, matrix=False)
        centre = loc + slope / program.rows / precision
        single = {SINGLE: {"calm": server["newton"]["calm"]}} if "newton" in server else {}
        message = {"loc": loc, "centre": centre, "precision": precision, "unit": unit}
        return {"gaussian": message} | single

    def prepare(self, job: Job) -> Parts:
        """Return the prior and the units for the steps."""
        message = job.message["gaussian"]
        names = {"loc": "centre", "precision": "precision", "unit": "unit"}
        prior = {name: message[of].expand(len(job), -1) for name, of in names.items()}
        return {"prior": prior}

    def encode(self, job: Job, work: Work) -> tuple[Parts, State]:
        """Return the moves and their squares, and the gradients where they are asked for, weighted by n_i."""
        move = (work.found["mode"]["theta"] - job.message["gaussian"]["loc"])[:, None]
        found = {"move": move, "square": move.square()}
        if "gradient" in work.found["mode"]:
            found["gradient"] = work.found["mode"]["gradient"][:, None]
        return weighted_sum(found, job.counts), {}

    def decode(self, turn: Turn, server: Server, total: Parts) -> tuple[Server, Tensor]:
        """Return the mean and the variance. The server has no ELBO term."""
        mean, q = mean_of(turn, total), server["q"]
        variance = (mean["square"] - mean["move"].square()).clamp(min=NARROWEST**2)
        if "newton" not in server:
            return {"q": q | {"loc": q["loc"] + mean["move"], "variance": variance}}, NO_TERM
        at, move = {LOC: q["loc"]}, {LOC: mean["gradient"] * q["unit"].square()}
        theta, newton = advance(turn, {LOC: q["unit"]}, server["newton"], at, move)
        return {"q": q | {"loc": theta[LOC], "variance": variance}, "newton": newton}, NO_TERM

    def progress(self, turn: Turn, server: Server) -> Progress | None:
        """Return the cohort's share of all clients; None where quasi-Newton steps say when they have converged.

        No rate is known at which the clients' steps approach their end.
        """
        return None if "newton" in server else Progress(1 / turn.scale)
