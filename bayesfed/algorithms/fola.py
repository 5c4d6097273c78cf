"""FOLA: one Gaussian over all that clients have in common, by federated online Laplace approximation.

    N(μ_S, Σ_S) is the server's Gaussian over θ, π_i = n_i / n, L_i(θ) = −log p(D_i | θ) / n_i

    server    sends μ_S, Σ_S⁻¹ and the round r = 1, 2, ...; at first the model's start and the prior's curvature there
    client i  θ = μ_S; steps t = 1 ... T on  J_i(θ) = L_i(θ) + λ ½ (θ − μ_S)ᵀ Σ_S⁻¹ (θ − μ_S)        (eq. 15, 16)
                  F̄_i = mean over t and rows of ∇ log p(y | x, θ_t) ∇ log p(y | x, θ_t)ᵀ            (eq. 19, 22)
                  Σ_i⁻¹ = F̄_i / r + (r − 1) / r Σ_S⁻¹                                              (eq. 24)
              and uploads n_i Σ_i⁻¹ and n_i Σ_i⁻¹ (θ_i − μ_S)
    server    q_S ∝ Π q_i^π_i:  Σ_S⁻¹ ← Σ π_i Σ_i⁻¹,  μ_S ← Σ_S Σ π_i Σ_i⁻¹ μ_i                     (eq. 11, 12)

(Liu et al. 2023, *A Bayesian federated learning framework with online Laplace approximation*.) Precisions are per row:
the posterior is N(μ_S, Σ_S / n). θ is unconstrained; a ``pyro.param`` has the prior N(start, 1 / γ).

*The prior.* Eq. 24 forgets the first Σ_S⁻¹, eq. 25 keeps it. Here it is kept: the server takes p(θ) for one more
factor, so that after R rounds Σ_S⁻¹ = (1 / R) Σ_r Σ_i π_i F̄_i + curvature of −log p(θ) / n at μ_S, the product's mode.

*A client's own variables.* Where they are few they are integrated out by Laplace's method. Then a client's rows are
not independent given θ, and F̄ is the Hessian of L_i. Where they are many, clients stand at the centre of their prior.

*Steps.* A step takes the gradient of L_i at θ, and the prior's at the point it arrives at, which has the stationary
point of J_i, as the paper's plain step, but for every λ Σ_S⁻¹ is stable (that one diverges beyond η λ Σ_S⁻¹ = 2):

    θ ← θ − (I / η + λ Σ_S⁻¹)⁻¹ (∇L_i(θ) + λ Σ_S⁻¹ (θ − μ_S))

*Drift.* Eq. 24 is the curvature of J_i, up to 1 / r, only where λ = r − 1, and then  Σ_i⁻¹ μ_i = (F̄_i μ_i −
∇L_i(μ_i)) / r + (r − 1) / r Σ_S⁻¹ μ_S: the server averages what the likelihoods say over clients and rounds. With
another λ, μ_S drifts off the pooled mode even where every L_i is quadratic: towards the fixed point of FedProx, since
Σ_i → Σ_S. Two ways out; ``experiments/fola_drift.py`` measures both:

``prior_weight=None`` is λ = r − 1: nothing is kept by clients, and steps shrink as 1 / r.

``cavity=True`` is expectation propagation. The server holds  A = Σ π_i F_i  and  b = Σ π_i h_i  beside the prior;
client i keeps its factor (F_i, h_i), takes it out of what the server sent and has the rest, N(m, Λ⁻¹), for prior:

    J_i(θ) = L_i(θ) + λ / π_i ½ (θ − m)ᵀ Λ (θ − m),   Λ = Σ_S⁻¹ − π_i F_i,   Λ m = Σ_S⁻¹ μ_S − π_i h_i
    F_i ← F̄_i,   h_i ← F̄_i θ_i + λ / π_i Λ (θ_i − m)       (the second term is −∇L_i(θ_i) where J_i is least)

At its fixed point with λ = 1 every θ_i is μ_S, the pooled mode of p(θ) Π p(D_i | θ), whatever the losses and however
crude F̄; and A is Σ π_i F̄_i there: with whole Hessians, Laplace's approximation of the pooled posterior. (A factor
takes the eigenvalues of its Hessian by their size, a negative one being no precision; what that adds is taken off in
the end.) The clients' moves add up, so undamped (ρ = 1) it gets there only where Σ_S⁻¹ is about half the pooled
curvature or more: with Hessians, but not in a network, whose weights are correlated and whose F̄ is diagonal. With
ρ = 1 / K they are averaged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from bayesfed.algorithms.protocol import Algorithm, Turn, Upload
from bayesfed.data.batch import Batch
from bayesfed.data.federation import Federation, Model
from bayesfed.elbo.build import build
from bayesfed.elbo.handlers import given
from bayesfed.elbo.program import Params, Program
from bayesfed.guides.laplace import Laplace, gaussian_params, laplace
from bayesfed.guides.precisions import definite, inverse, solve, times
from bayesfed.settings import Rate, Times
from bayesfed.steps.curvature import Loss, layered, slopes
from bayesfed.steps.job import Job, Work
from bayesfed.steps.optimizer import State
from bayesfed.steps.point_estimates import against
from bayesfed.tracing.compiler import traceable

FULL_UP_TO = 50
"""The largest number of dimensions of θ for which a bare ``FOLA()`` takes whole matrices."""
ROWS = ("per-sample", "batch")
LR = 0.1


class Server(NamedTuple):
    """The server's state; precisions are ``(D,)`` or ``(D, D)``, all per row.

    Attributes:
        loc: μ_S.
        precision: Σ_S⁻¹.
        likelihood: Σ_S⁻¹ less the prior's curvature: A.
        excess: by how much the clients' Hessians add up to less than A, which is made of definite ones.
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
class FOLA(Algorithm):
    """Federated online Laplace approximation of one posterior over all globals, of any model.

    Where θ has at most 50 numbers the settings that are None mean Laplace's method of the pooled posterior: whole
    Hessians, J_i to its least point by Newton's method, and the cavity. Beyond, they mean the paper's method.

    Draws of a network's weights predict worse than their centre, a known trait of diagonal Laplace approximations: of
    digits (8 clients with 40 rows, 64-32-10, γ = 1) the centre names .90, one draw .19, 100 draws .36 to .57, 500 about
    .75, as does one in plain torch at the same point. Use ``probabilities(..., centre=True)``, or a larger γ (10: 100
    draws .84, the centre .88).

    Attributes:
        lr: η; None is 0.1, or Newton's method (on all rows of a client) where θ is small.
        prior_weight: λ; None is r − 1 (in ``cavity``: 1).
        local_epochs: E, passes over a client's rows in a round.
        local_steps: T, in minibatches, instead.
        covariance: ``"full"`` matrices, their ``"diagonal"``, or ``"e-full"``, the eigenvalues of the full matrix for
            a diagonal (the paper's section IV). None: full where θ is small.
        fisher: F̄. ``"per-sample"``: the squared gradient of each row (the paper's text). ``"batch"``: the
            square of a minibatch's mean gradient (its pseudo-code). ``"hessian"``: the Hessian of L_i (its
            eigenvalues by their size; of a diagonal what is positive), by one backward pass for each number. None: the
            Hessian where θ is small, or where rows are not independent given θ; else per-sample.
        online: F̄ is the mean over all steps. False: F̄ is taken at the last point, over all of the client's rows. None:
            online where gradients are squared, for they vanish at the last point.
        cavity: leave a client's own factor out of its prior; see above. Clients keep it. None: where θ is small.
        damping: ρ, the fraction of a factor's change that ``cavity`` makes in a visit; None is 1 with whole
            Hessians, else 1 / K. 1 is exact in one round where the L_i are quadratic, with the diagonal for curvature.
        gamma: γ, the precision of the prior of every ``pyro.param``.
        personal_steps: steps in which clients with many variables make them.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> posterior = bf.fit(models.eight_schools, datasets.eight_schools(), bf.FOLA(), rounds=5)
        >>> posterior
        Posterior: FOLA (FullRank globals, conditioned locals), 5 rounds, 8 clients; globals mu, tau; locals theta
        5 rounds are too few to tell whether the fit still moves
    """

    lr: Rate | None = None
    prior_weight: float | None = 1.0
    local_epochs: int = 5
    local_steps: int | None = None
    covariance: Literal["full", "e-full", "diagonal"] | None = None
    fisher: Literal["per-sample", "batch", "hessian"] | None = None
    online: bool | None = None
    cavity: bool | None = None
    damping: Annotated[float, Field(gt=0, le=1)] | None = None
    gamma: Rate = 1.0
    personal_steps: Times = 50
    remembered = ("factor",)
    no_noise = (
        "it sums precisions, weighted by numbers of rows, which noise makes improper: use SFVI"
    )

    # -- server ---------------------------------------------------------------------------------------

    def program(self, model: Model, federation: Federation) -> Program:
        """The model, its parameters lifted, with a Gaussian over its globals.

        Raises:
            ValueError: there are no globals; squared gradients of rows are asked for where rows are not independent.
        """
        full = None if self.covariance is None else self.covariance == "full"
        guide = laplace(model, federation, self.gamma, full, FULL_UP_TO)
        program = build(guide.model, guide, federation)
        if self.fisher in ROWS and _dependent(program):
            which = [site.name for site in (*program.locals, *program.observed) if site.joint]
            raise ValueError(
                f"fisher={self.fisher!r} takes the rows of a client for independent given the globals, but "
                f"{', '.join(which) or ', '.join(guide.locals)} makes them depend on each other: use 'hessian'"
            )
        few = federation.batch(torch.arange(min(2, len(federation))))
        at = guide.start.expand(len(few), -1)
        if self._for(program).fisher == "per-sample" and layered(_loss(guide), at, few):
            guide = replace(guide, layered=True)
        return replace(program, guide=guide)

    def start(self, program: Program) -> Server:
        """The model's start, with the curvature of the prior there."""
        guide = _guide(program)
        rows = guide.start.new_tensor(float(program.rows))
        full = self._for(program).covariance == "full"
        _, curvature = guide.prior_slopes(guide.start, program.schema, full)
        nothing = torch.zeros_like(curvature)
        precision = definite(curvature / rows, matrix=full)
        zero = torch.zeros((), dtype=torch.int64, device=rows.device)
        pull = torch.zeros_like(guide.start)
        return Server(guide.start.clone(), precision, nothing, nothing.clone(), pull, zero, rows)

    def start_clients(self, program: Program, server: Server, batch: Batch) -> State:
        """In ``cavity`` every client's factor is 1, else clients keep nothing."""
        if not self._for(program).cavity:
            return {}
        precision = torch.zeros_like(server.precision).expand(len(batch), *server.precision.shape)
        shift = torch.zeros_like(server.loc).expand(len(batch), -1)
        factor = {"precision": precision.clone(), "shift": shift.clone()}
        return {"factor": factor | ({"excess": precision.clone()} if precision.ndim == 3 else {})}

    def broadcast(self, turn: Turn, server: Server) -> dict[str, Tensor]:
        """μ_S, Σ_S⁻¹, the number of the round, n and the damping."""
        own = self._for(turn.program)
        damping = own.damping or 1 / turn.cohort
        message = {"loc": server.loc, "precision": server.precision, "rows": server.rows}
        return message | {"round": server.rounds + 1, "damping": server.loc.new_tensor(damping)}

    def decode(self, turn: Turn, server: Server, total: Upload) -> tuple[Server, Tensor]:
        """The product of the clients' Gaussians (eq. 12) and of the prior. The server has no ELBO term."""
        r = server.rounds + 1
        if self._for(turn.program).cavity:
            likelihood = server.likelihood + total["precision"]
            pull = server.pull + total["shift"]
        else:  # the clients' Gaussians hold (r − 1) / r of the prior, which is added as a whole
            before = (r - 1) / r
            prior = server.precision - server.likelihood
            likelihood = total["precision"] / total["weight"] - before * prior
            pull = total["shift"] / total["weight"] + before * server.pull
        guide, batch = _guide(turn.program), turn.program.schema
        loc, precision = guide.product(server.loc, likelihood, pull, server.rows, batch)
        pull = pull - times(likelihood, loc - server.loc)
        excess = server.excess + total.get("excess", 0.0)
        return Server(loc, precision, likelihood, excess, pull, r, server.rows), torch.zeros(())

    def params(self, server: Server) -> Params:
        """N(μ_S, Σ_S / n) as the guide has it."""
        precision = definite(server.precision - server.excess, matrix=server.precision.ndim == 2)
        return gaussian_params(server.loc, server.rows * precision)

    # -- clients --------------------------------------------------------------------------------------

    def work(self, job: Job) -> Work:
        """K clients at once: what they upload, their log likelihoods and, in ``cavity``, their factors."""
        own, message, guide = self._for(job.program), job.message, _guide(job.program)
        loc, r = message["loc"].expand(len(job), -1), message["round"]
        precision = message["precision"].expand(len(job), *message["precision"].shape)
        n = job.counts[:, None]
        share = n / message["rows"]
        if own.cavity:
            factor = job.clients["factor"]
            rest = precision - against(share, precision) * factor["precision"]
            rest = definite(rest, matrix=rest.ndim == 3)
            force = -share * (factor["shift"] - times(factor["precision"], loc))  # Λ (m − μ_S)
            pull = (1.0 if self.prior_weight is None else self.prior_weight) / share
            centre, strength = loc + solve(rest, force), against(pull, precision) * rest
        else:
            ahead = r - 1 if self.prior_weight is None else self.prior_weight
            strength, centre = ahead * precision[:1], loc
        theta, hessian = own.trained(job, centre, strength)
        fisher, offset = (
            definite(hessian, matrix=True) if hessian.ndim == 3 else hessian,
            theta - loc,
        )
        with torch.no_grad():
            terms = -job.counts * _loss(guide)(theta, job.rows(0))
        if not own.cavity:
            mine = fisher / r + (r - 1) / r * precision
            found = {
                "precision": against(n, precision) * mine,
                "shift": n * times(mine, offset),
                "weight": n[:, 0],
            }
            return Work(found, terms)
        shift = times(fisher, offset) + pull * (times(rest, offset) - force)  # relative to μ_S
        new = {"precision": fisher, "shift": shift + times(fisher, loc), "excess": fisher - hessian}
        new = {name: v.lerp(new[name], message["damping"]) for name, v in factor.items()}
        change = {name: against(share, v) * (new[name] - v) for name, v in factor.items()}
        change["shift"] = change["shift"] - times(change["precision"], loc)
        return Work(change, terms, {"factor": new})

    def encode(self, job: Job, work: Work) -> Upload:
        """The Gaussians, weighted by n_i; or the changes of the factors."""
        return work.found

    def trained(self, job: Job, centre: Tensor, strength: Tensor) -> tuple[Tensor, Tensor]:
        """θ_i ``(K, D)`` and F̄_i of K clients, from μ_S with a prior of that centre and precision ``(K, ...)``."""
        guide, full = _guide(job.program), self.covariance != "diagonal"
        kind = "layers" if guide.layered and not full else self.fisher
        theta = job.message["loc"].expand(len(job), -1)
        if self.lr is None:
            theta = guide.minimum(theta, centre, strength, job.rows(None))
        else:
            lr = job.rate * self.lr
            step_of = inverse(strength, 1 / lr, matrix=strength.ndim == 3)
            active_steps = job.rows.schedule(self.local_epochs, self.local_steps)
            online = kind if self.online else None
            shape = (len(job), *[theta.shape[1]] * (2 if full else 1))
            fisher = theta.new_zeros(shape if online else (len(job), 1))
            for step, active in enumerate(active_steps.to(theta.device)):
                theta, fisher = _step(
                    guide,
                    theta,
                    fisher,
                    centre,
                    strength,
                    step_of,
                    job.rows(step),
                    online,
                    full,
                    active,
                )
            if online:
                count = active_steps.sum(0).to(theta)[:, None]
                return theta, self._kept(fisher / against(count, fisher))
        return theta, self._kept(slopes(_loss(guide), theta, job.rows(None), kind, full=full)[1])

    def _kept(self, fisher: Tensor) -> Tensor:
        """What the covariance keeps of F̄."""
        if self.covariance == "diagonal":
            return fisher
        return torch.linalg.eigvalsh(fisher).abs() if self.covariance == "e-full" else fisher

    # -- a client's own variables -----------------------------------------------------------------------

    def personalize(self, job: Job, steps: int | None = None, lr: float | None = None) -> Params:
        """Of K clients the closed form of q(w_i | θ), or Laplace's approximation at μ_S; of many numbers the mode."""
        program, guide = job.program, _guide(job.program)
        start = program.init_locals(job.rows(0))
        if not guide.locals:
            return start
        if guide.block:
            return start | program.laplace(job.message, start, job.rows(None))
        with torch.no_grad(), given(job.keys.device, job.message, noise={}):
            theta = guide.sample_globals()[1].reshape(1, 1, 1, -1)
        if guide.integrated:
            _, mode, precision = guide.integrate_locals(
                theta.expand(-1, len(job), -1, -1), job.rows(None)
            )
            loc, variance = mode[0, :, 0], torch.linalg.inv(precision)[0, :, 0].diagonal(0, -2, -1)
            return start | guide.local_params(loc, variance.sqrt())
        centre, scale = guide.prior_centre(theta, job.rows(0))
        strength = 1 / (job.counts[:, None] * scale.square())
        w, step_of = centre, inverse(strength, 1 / (lr or self.lr or LR), matrix=False)
        for step in range(self.personal_steps if steps is None else steps):
            w = _own_step(guide, theta, w, centre, strength, step_of, job.rows(step))
        return start | guide.local_params(w, torch.zeros_like(w))

    def _for(self, program: Program) -> FOLA:
        """These settings with what None means for a program."""
        small = len(_guide(program).start) <= FULL_UP_TO
        fisher = self.fisher or ("hessian" if small or _dependent(program) else "per-sample")
        covariance = self.covariance or ("full" if small else "diagonal")
        whole = fisher == "hessian" and covariance == "full"
        return replace(
            self,
            lr=LR if self.lr is None and not (small and fisher == "hessian") else self.lr,
            covariance=covariance,
            fisher=fisher,
            online=fisher in ROWS if self.online is None else self.online,
            cavity=small if self.cavity is None else self.cavity,
            damping=1.0 if self.damping is None and whole else self.damping,
        )


# -- local steps --------------------------------------------------------------------------------------


@traceable
def _step(
    guide: Laplace,
    theta: Tensor,
    fisher: Tensor,
    centre: Tensor,
    strength: Tensor,
    step_of: Tensor,
    batch: Batch,
    kind: str | None,
    full: bool,
    active: Tensor,
) -> tuple[Tensor, Tensor]:
    """One step of θ_i, and the sum of the curvatures so far, of the K clients that are active."""
    grad, curvature = slopes(_loss(guide), theta, batch, kind, full=full)
    moved = theta - times(step_of, grad + times(strength, theta - centre))
    active = active[:, None]
    return (
        torch.where(active, moved, theta),
        torch.where(against(active, fisher), fisher + curvature, fisher),
    )


@traceable
def _own_step(
    guide: Laplace,
    theta: Tensor,
    w: Tensor,
    centre: Tensor,
    strength: Tensor,
    step_of: Tensor,
    batch: Batch,
) -> Tensor:
    """The same of w_i given θ."""
    grad, _ = slopes(_own_loss(guide, theta), w, batch, None)
    return w - step_of * (grad + strength * (w - centre))


def _loss(guide: Laplace) -> Loss:
    """L_i of K clients on a minibatch, ``(K,)``, as a function of their θ ``(K, D)``."""

    def loss(theta: Tensor, batch: Batch) -> Tensor:
        return -guide.log_likelihood(theta[None, :, None], batch)[0] / batch.rows

    return loss


def _own_loss(guide: Laplace, theta: Tensor) -> Loss:
    """−log p(D_i | w_i, θ) / n_i as a function of w_i ``(K, P)``, θ being ``(1, 1, 1, D)``."""

    def loss(w: Tensor, batch: Batch) -> Tensor:
        return -guide.log_likelihood(theta, batch, w[None, :, None])[0] / batch.rows

    return loss


def _guide(program: Program) -> Laplace:
    """The guide that :meth:`FOLA.program` has chosen."""
    return program.guide


def _dependent(program: Program) -> bool:
    """Whether the rows of a client depend on each other given θ."""
    return program.joint or _guide(program).integrated
