"""The Normal with the mean and the variance of the clients' copies of θ, whose draws are an ensemble (FedBE).

    client i  θ_i: a round's steps from μ_S, as in FedAvg; uploads n_i (θ_i − μ_S) and n_i (θ_i − μ_S)²
    server    μ_S ← Σ π_i θ_i,  Σ_S = diag(Σ π_i (θ_i − μ_S)²),  π_i = n_i / Σ n

(Chen & Chao 2021, *FedBE: Making Bayesian model ensemble applicable to federated learning*, section 3.2.) Predictions
are means over draws of N(μ_S, Σ_S). p(θ) enters the steps as its quadratic expansion at μ_S.

*Left out.* The paper's server distils the ensemble into one network, which clients go on from. That needs unlabelled
data at the server, which has none here: clients go on from μ_S. The paper's other ensemble, means of the θ_i with
weights from a Dirichlet distribution, needs the single uploads, of which a server here has the sum alone.

*The spread* is that of the clients' copies after a round. It depends on the rate and the number of the steps, does not
shrink with the number of clients, and is no posterior's: take SFVI or FOLA for standard deviations of θ.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from bayesfed.elbo.program import Params, Program
from bayesfed.guides.globals import LaplaceGaussian
from bayesfed.guides.laplace import gaussian_params
from bayesfed.guides.precisions import definite
from bayesfed.rules.rule import NO_TERM, Progress, Rule, Turn, mean_of, weighted_sum
from bayesfed.steps.job import Job, Parts, Work
from bayesfed.steps.optimizer import State
from bayesfed.steps.steps import Steps

NARROWEST = 1e-6
"""The smallest standard deviation, which clients that agree have."""


class Server(NamedTuple):
    """μ_S and the diagonal of Σ_S, ``(D,)`` each."""

    loc: Tensor
    variance: Tensor


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
        return Server(guide.start.clone(), definite(curvature, matrix=False).reciprocal())

    def params(self, server: Server) -> Params:
        """Return N(μ_S, Σ_S) as the guide has it."""
        return gaussian_params(server.loc, server.variance.reciprocal())

    def broadcast(self, turn: Turn, server: Server) -> Parts:
        """Return μ_S, and p(θ)^(1/n) as the Normal with its gradient and curvature at μ_S."""
        program, loc = turn.program, server.loc
        slope, curvature = program.guide.prior_slopes(loc, program.schema, full=False)
        precision = definite(curvature / program.rows, matrix=False)
        centre = loc + slope / program.rows / precision
        return {"gaussian": {"loc": loc, "centre": centre, "precision": precision}}

    def prepare(self, job: Job) -> Parts:
        """Return the prior for the steps."""
        message = job.message["gaussian"]
        prior = {"loc": message["centre"], "precision": message["precision"]}
        return {"prior": {name: value.expand(len(job), -1) for name, value in prior.items()}}

    def encode(self, job: Job, work: Work) -> tuple[Parts, State]:
        """Return the moves and their squares, weighted by n_i."""
        move = (work.found["mode"]["theta"] - job.message["gaussian"]["loc"])[:, None]
        return weighted_sum({"move": move, "square": move.square()}, job.counts), {}

    def decode(self, turn: Turn, server: Server, total: Parts) -> tuple[Server, Tensor]:
        """Return the mean and the variance. The server has no ELBO term."""
        mean = mean_of(turn, total)
        variance = (mean["square"] - mean["move"].square()).clamp(min=NARROWEST**2)
        return Server(server.loc + mean["move"], variance), NO_TERM

    def progress(self, turn: Turn, server: Server) -> Progress:
        """Return the cohort's share of all clients: no rate is known at which the clients' steps approach their end."""
        return Progress(1 / turn.scale)
