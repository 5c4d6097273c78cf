"""The product of the clients' Gaussians over all that they have in common (FOLA).

N(μ_S, Σ_S) is the server's Gaussian over θ, π_i = n_i / n. Precisions are per row: the posterior is N(μ_S, Σ_S / n).
θ is unconstrained; a ``pyro.param`` has the prior N(start, 1 / γ).

    server    sends μ_S, Σ_S⁻¹ and the round r = 1, 2, ...; at first the model's start and the prior's curvature there
    client i  has the prior N(μ_S, Σ_S / λ), finds θ_i and F̄_i (:mod:`bayesfed.steps.laplace_steps`)
                  Σ_i⁻¹ = F̄_i / r + (r − 1) / r Σ_S⁻¹                                              (eq. 24)
              and uploads n_i Σ_i⁻¹ and n_i Σ_i⁻¹ (θ_i − μ_S)
    server    q_S ∝ Π q_i^π_i:  Σ_S⁻¹ ← Σ π_i Σ_i⁻¹,  μ_S ← Σ_S Σ π_i Σ_i⁻¹ μ_i                     (eq. 11, 12)

(Liu et al. 2024, *A Bayesian federated learning framework with online Laplace approximation*.)

*The prior.* Eq. 24 forgets the first Σ_S⁻¹, eq. 25 keeps it. Here it is kept: the server takes p(θ) for one more
factor, so that after R rounds Σ_S⁻¹ = (1 / R) Σ_r Σ_i π_i F̄_i + curvature of −log p(θ) / n at μ_S, the product's mode.

*Drift.* Eq. 24 is the curvature of J_i, up to 1 / r, only where λ = r − 1, and then  Σ_i⁻¹ μ_i = (F̄_i μ_i −
∇L_i(μ_i)) / r + (r − 1) / r Σ_S⁻¹ μ_S: the server averages what the likelihoods say over clients and rounds. With
another λ, μ_S drifts off the pooled mode even where every L_i is quadratic: towards the fixed point of FedProx, since
Σ_i → Σ_S. Two ways out; ``experiments/fola_drift.py`` measures both:

``prior_weight=None`` is λ = r − 1: clients are stateless, and steps shrink as 1 / r.

``cavity=True`` is expectation propagation. The server holds  A = Σ π_i F_i  and  b = Σ π_i h_i  beside the prior;
client i keeps its factor (F_i, h_i), takes it out of the message and has the rest, N(m, Λ⁻¹), for prior:

    J_i(θ) = L_i(θ) + λ / π_i ½ (θ − m)ᵀ Λ (θ − m),   Λ = Σ_S⁻¹ − π_i F_i,   Λ m = Σ_S⁻¹ μ_S − π_i h_i
    F_i ← F̄_i,   h_i ← F̄_i θ_i + λ / π_i Λ (θ_i − m)       (the second term is −∇L_i(θ_i) where J_i is least)

At its fixed point with λ = 1 every θ_i is μ_S, the pooled mode of p(θ) Π p(D_i | θ), whatever the losses and however
crude F̄; and A is Σ π_i F̄_i there: with whole Hessians, Laplace's approximation of the pooled posterior. (A factor
takes the eigenvalues of its Hessian by their size, a negative one being no precision; the excess is taken off in
the end.) The clients' moves add up, so undamped (ρ = 1) it gets there only where Σ_S⁻¹ is about half the pooled
curvature or more: with Hessians, but not in a network, whose weights are correlated and whose F̄ is diagonal. With
ρ = 1 / K they are averaged.
"""

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from bayesfed.data.batch import Batch
from bayesfed.elbo.program import Params, Program
from bayesfed.guides.globals import LaplaceGaussian
from bayesfed.guides.laplace import gaussian_params
from bayesfed.guides.precisions import definite, solve, times
from bayesfed.rules.rule import NO_TERM, Progress, Rule, Turn
from bayesfed.steps.job import Job, Parts, Work
from bayesfed.steps.losses import per_client
from bayesfed.steps.optimizer import State


class Server(NamedTuple):
    """The server's state; precisions are ``(D,)`` or ``(D, D)``, all per row.

    Attributes:
        loc: μ_S.
        precision: Σ_S⁻¹.
        likelihood: Σ_S⁻¹ less the prior's curvature: A.
        excess: the difference between A, which is made of definite ones, and the sum of the clients' Hessians.
        pull: the gradient of the clients' factors at μ_S: b − A μ_S.
        rounds: rounds done.
        rows: n.
    """

    loc: Tensor
    precision: Tensor
    likelihood: Tensor
    excess: Tensor
    pull: Tensor
    rounds: Tensor
    rows: Tensor


@dataclass(frozen=True)
class ProductOfGaussians(Rule):
    """The product of the clients' Gaussians and of the prior.

    Attributes:
        prior_weight: λ; None is r − 1 (in ``cavity``: 1).
        cavity: leave a client's own factor out of its prior; see above. Clients keep it. None: where θ is small.
        damping: ρ, the fraction of a factor's change that ``cavity`` makes in a visit; None is 1 with whole
            Hessians, else 1 / K. 1 is exact in one round where the L_i are quadratic, with the diagonal for curvature.
    """

    prior_weight: float | None = 1.0
    cavity: bool | None = None
    damping: Annotated[float, Field(gt=0, le=1)] | None = None
    needs = frozenset({"mode", "curvature"})
    sends = frozenset({"gaussian"})
    globals = (LaplaceGaussian,)
    no_noise = (
        "it sums precisions, weighted by numbers of rows, which noise makes improper: use SFVI"
    )

    def with_cavity(self, program: Program) -> bool:
        """Return whether clients keep their factors."""
        return program.guide.small if self.cavity is None else self.cavity

    def start(self, program: Program) -> Server:
        """Return the model's start, with the curvature of the prior there."""
        guide = program.guide
        rows = guide.start.new_tensor(float(program.rows))
        full = guide.covariance == "full"
        _, curvature = guide.prior_slopes(guide.start, program.schema, full)
        zero = torch.zeros_like(curvature)
        precision = definite(curvature / rows, matrix=full)
        rounds = torch.zeros((), dtype=torch.int64, device=rows.device)
        pull = torch.zeros_like(guide.start)
        return Server(guide.start.clone(), precision, zero, zero.clone(), pull, rounds, rows)

    def params(self, server: Server) -> Params:
        """Return N(μ_S, Σ_S / n) as the guide has it."""
        precision = definite(server.precision - server.excess, matrix=server.precision.ndim == 2)
        return gaussian_params(server.loc, server.rows * precision)

    def start_clients(self, program: Program, server: Server, batch: Batch) -> State:
        """Return factors of 1 with ``cavity``, else nothing."""
        if not self.with_cavity(program):
            return {}
        precision = torch.zeros_like(server.precision).expand(len(batch), *server.precision.shape)
        shift = torch.zeros_like(server.loc).expand(len(batch), -1)
        factor = {"precision": precision.clone(), "shift": shift.clone()}
        return {"factor": factor | ({"excess": precision.clone()} if precision.ndim == 3 else {})}

    def broadcast(self, turn: Turn, server: Server) -> Parts:
        """Return μ_S, Σ_S⁻¹, the number of the round, n and the damping."""
        damping = self._damping(turn)
        message = {"loc": server.loc, "precision": server.precision, "rows": server.rows}
        message |= {"round": server.rounds + 1, "damping": server.loc.new_tensor(damping)}
        return {"gaussian": message}

    def _damping(self, turn: Turn) -> float:
        """Return ρ."""
        whole = turn.program.guide.covariance == "full" and (
            turn.steps.kind(turn.program) == "hessian"
        )
        return self.damping or (1.0 if whole else 1 / turn.cohort)

    def prepare(self, job: Job) -> Parts:
        """Return the client's prior for its steps; with ``cavity`` also its parts, for :meth:`encode`."""
        message = job.message["gaussian"]
        loc, precision = message["loc"].expand(len(job), -1), message["precision"]
        if not self.with_cavity(job.program):
            ahead = message["round"] - 1 if self.prior_weight is None else self.prior_weight
            return {"prior": {"loc": loc, "precision": ahead * precision[None]}}
        factor, share = job.clients["factor"], self.share(job)
        rest = precision.expand(len(job), *precision.shape)
        rest = rest - per_client(share, rest) * factor["precision"]
        rest = definite(rest, matrix=rest.ndim == 3)
        force = -share * (factor["shift"] - times(factor["precision"], loc))  # Λ (m − μ_S)
        weight = (1.0 if self.prior_weight is None else self.prior_weight) / share
        prior = {"loc": loc + solve(rest, force), "precision": per_client(weight, rest) * rest}
        return {"prior": prior, "cavity": {"rest": rest, "force": force, "weight": weight}}

    def share(self, job: Job) -> Tensor:
        """Return π_i of K clients, ``(K, 1)``."""
        return job.counts[:, None] / job.message["gaussian"]["rows"]

    def encode(self, job: Job, work: Work) -> tuple[Parts, State]:
        """Return the Gaussians, weighted by n_i; or the changes of the factors."""
        message = job.message["gaussian"]
        theta, hessian = work.found["mode"]["theta"], work.found["curvature"]["theta"]
        fisher = definite(hessian, matrix=True) if hessian.ndim == 3 else hessian
        loc = message["loc"].expand(len(job), -1)
        offset = theta - loc
        if not self.with_cavity(job.program):
            n, r = job.counts[:, None], message["round"]
            own = fisher / r + (r - 1) / r * message["precision"]
            upload = {"precision": per_client(n, own) * own, "shift": n * times(own, offset)}
            return {"gaussian": upload, "weight": {"rows": n[:, 0]}}, {}
        cavity, factor, share = job.given["cavity"], job.clients["factor"], self.share(job)
        shift = times(fisher, offset)  # relative to μ_S
        shift = shift + cavity["weight"] * (times(cavity["rest"], offset) - cavity["force"])
        new = {"precision": fisher, "shift": shift + times(fisher, loc), "excess": fisher - hessian}
        new = {name: v.lerp(new[name], message["damping"]) for name, v in factor.items()}
        change = {name: per_client(share, v) * (new[name] - v) for name, v in factor.items()}
        change["shift"] = change["shift"] - times(change["precision"], loc)
        return {"gaussian": change}, {"factor": new}

    def decode(self, turn: Turn, server: Server, total: Parts) -> tuple[Server, Tensor]:
        """Return the product of the clients' Gaussians (eq. 12) and of the prior. The server has no ELBO term."""
        r, of_clients = server.rounds + 1, total["gaussian"]
        if self.with_cavity(turn.program):
            likelihood = server.likelihood + of_clients["precision"]
            pull = server.pull + of_clients["shift"]
        else:  # the clients' Gaussians hold (r − 1) / r of the prior, which is added as a whole
            before, rows = (r - 1) / r, total["weight"]["rows"]
            prior = server.precision - server.likelihood
            likelihood = of_clients["precision"] / rows - before * prior
            pull = of_clients["shift"] / rows + before * server.pull
        guide, batch = turn.program.guide, turn.program.schema
        loc, precision = guide.product(server.loc, likelihood, pull, server.rows, batch)
        pull = pull - times(likelihood, loc - server.loc)
        excess = server.excess + of_clients.get("excess", 0.0)
        return Server(loc, precision, likelihood, excess, pull, r, server.rows), NO_TERM

    def progress(self, turn: Turn, server: Server) -> Progress | None:
        """Return the cohort's share of all clients' changes, times ρ; None without ``cavity``, where steps shrink."""
        if not self.with_cavity(turn.program):
            return None
        return Progress(self._damping(turn) / turn.scale)
