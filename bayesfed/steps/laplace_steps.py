"""A client's mode under a Gaussian prior, and the curvature of its loss: the local work of FOLA.

    θ = μ_S; steps t = 1 ... T on  J_i(θ) = L_i(θ) + ½ (θ − m)ᵀ Λ (θ − m)                          (eq. 15, 16)
    F̄_i = mean over t and rows of ∇ log p(y | x, θ_t) ∇ log p(y | x, θ_t)ᵀ                         (eq. 19, 22)

(Liu et al. 2024, *A Bayesian federated learning framework with online Laplace approximation*.) L_i(θ) = −log p(D_i |
θ) / n_i; the rule prepares the client's prior, N(m, Λ⁻¹).

*A client's own variables.* Where they are few they are integrated out by Laplace's method. Then a client's rows are
not independent given θ, and F̄ is the Hessian of L_i. Where they are many, clients stand at the centre of their prior.

*Steps.* A step takes the gradient of L_i at θ, and the prior's at the point it arrives at, which has the stationary
point of J_i, as the paper's plain step, but is stable for every Λ (the paper's diverges beyond η Λ = 2):

    θ ← θ − (I / η + Λ)⁻¹ (∇L_i(θ) + Λ (θ − m))
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from bayesfed.data.batch import Batch
from bayesfed.data.federation import Federation
from bayesfed.elbo import handlers
from bayesfed.elbo.program import Params, Program
from bayesfed.guides.globals import LaplaceGaussian
from bayesfed.guides.laplace import Laplace
from bayesfed.guides.locals import Integrated, Locals
from bayesfed.guides.precisions import inverse, times
from bayesfed.settings import Rate
from bayesfed.steps.curvature import Loss, layered, slopes
from bayesfed.steps.job import SINGLE, Job, Work
from bayesfed.steps.local_loop import all_clients, local_loop
from bayesfed.steps.losses import per_client, uphill
from bayesfed.steps.optimizer import where_active
from bayesfed.steps.steps import Inputs, Steps
from bayesfed.tracing.compiler import traceable

ROWS = ("per-sample", "batch")
LR = 0.1


@dataclass(frozen=True)
class LaplaceSteps(Steps):
    """Steps to the mode of a client's rows under its prior, and the curvature of its loss.

    Where θ has at most 50 numbers the settings that are None mean Laplace's method: whole Hessians, and the mode by
    Newton's method. Beyond, they mean the paper's method.

    Attributes:
        lr: η; None is 0.1, or Newton's method (on all rows of a client) where θ is small.
        epochs: E, passes over a client's rows in a round.
        steps: T, in minibatches, in place of ``epochs``.
        fisher: F̄. ``"per-sample"``: the squared gradient of each row (the paper's text). ``"batch"``: the
            square of a minibatch's mean gradient (its pseudo-code). ``"hessian"``: the Hessian of L_i (its
            eigenvalues by their size; of a diagonal what is positive), by one backward pass for each number.
            ``"none"``: only the θ_i are given (FedBE). None: the Hessian where θ is small, or where rows are not
            independent given θ; else per-sample.
        online: F̄ is the mean over all steps. False: F̄ is taken at the last point, over all of the client's rows. None:
            online where gradients are squared, for they vanish at the last point.
    """

    lr: Rate | None = None
    epochs: int = 5
    steps: int | None = None
    fisher: Literal["per-sample", "batch", "hessian", "none"] | None = None
    online: bool | None = None
    needs = frozenset({"gaussian"})
    globals = (LaplaceGaussian,)
    locals = (Integrated,)

    @property
    def gives(self) -> frozenset[str]:  # type: ignore[override]
        """The modes, and the curvatures where there are any."""
        return frozenset({"mode"} if self.fisher == "none" else {"mode", "curvature"})

    def accept(
        self, program: Program, federation: Federation, locals_: Locals, name: str
    ) -> Program:
        """Return the program, its guide with a note on whether all of θ are weights of linear layers.

        Raises:
            ValueError: squared gradients of rows are asked for where rows are not independent.
        """
        guide = program.guide
        if self.fisher in ROWS and _dependent(program):
            which = [site.name for site in (*program.locals, *program.observed) if site.joint]
            raise ValueError(
                f"fisher={self.fisher!r} takes the rows of a client for independent given the globals, but "
                f"{', '.join(which) or ', '.join(guide.locals)} makes them depend on each other: use 'hessian'"
            )
        few = federation.batch(torch.arange(min(2, len(federation))))
        at = guide.start.expand(len(few), -1)
        if self.kind(program) == "per-sample" and layered(_loss(guide), at, few):
            guide = replace(guide, layered=True)
        return replace(program, guide=guide)

    def kind(self, program: Program) -> str:
        """Return the kind of F̄ for a program."""
        guide = program.guide
        return self.fisher or ("hessian" if guide.small or _dependent(program) else "per-sample")

    def gradient_of(self, program: Program) -> list[str] | None:
        """Return all of θ, whose gradient is given beside the modes where there is no F̄."""
        return ["global.loc"] if self.fisher == "none" else None

    def reads_single_rows(self, program: Program) -> bool:
        """Return whether F̄ is the mean of squared gradients of rows, or of minibatches."""
        return self.kind(program) in ROWS

    def run(self, job: Job, locals_: Locals) -> Work:
        """Return the modes ``(K, D)``, the curvatures ``(K, D)`` or ``(K, D, D)``, and the log likelihoods."""
        loss, first = _loss(job.program.guide), job.rows(0)
        theta, curvature = self.mode_and_curvature(job, job.given["prior"])
        mode = {"theta": theta}
        if SINGLE in job.message:
            mode["gradient"] = self.slope(job, job.given["prior"])
        with torch.no_grad():
            terms = -job.counts * loss(theta, first)
            if self.fisher != "none":
                return Work({"mode": mode, "curvature": {"theta": curvature}}, terms)
            before = loss(self.start(job), first)  # plain steps may be too long
            rose = uphill(before, -terms / job.counts, job.counts)
            return Work({"mode": mode}, terms.masked_fill(rose, -torch.inf))

    def start(self, job: Job) -> Tensor:
        """Return μ_S for K clients, ``(K, D)``."""
        return job.message["gaussian"]["loc"].expand(len(job), -1)

    def slope(self, job: Job, prior: Params) -> Tensor:
        """Return −∇J_i at μ_S, on all of a client's rows, ``(K, D)``."""
        theta, loss = self.start(job), _loss(job.program.guide)
        grad = slopes(loss, theta, job.rows(None), None)[0]
        return -grad - times(prior["precision"], theta - prior["loc"])

    def mode_and_curvature(self, job: Job, prior: Params) -> tuple[Tensor, Tensor]:
        """Return θ_i ``(K, D)`` and F̄_i from μ_S with a prior of that ``loc`` and ``precision`` ``(K, ...)``."""
        guide, kind, strength = job.program.guide, self.kind(job.program), prior["precision"]
        full, online = guide.covariance != "diagonal", self.online
        online = kind in ROWS if online is None else online
        newton = self.lr is None and guide.small and kind == "hessian"
        if guide.layered and not full:
            kind = "layers"
        start = self.start(job)
        if newton:
            theta = guide.minimum(start, prior["loc"], strength, job.rows(None))
        else:
            lr = job.rate * (LR if self.lr is None else self.lr)
            slowness = 1 / lr / prior["unit"].square() if "unit" in prior else 1 / lr
            prior = prior | {"step": inverse(strength, slowness, matrix=strength.ndim == 3)}
            schedule = job.rows.schedule(self.epochs, self.steps)
            shape = (len(job), *[start.shape[1]] * (2 if full else 1))
            fisher = start.new_zeros(shape if online else (len(job), 1))
            every = kind if online else None

            def step(state: Params, number: int, active: Tensor | None) -> Params:
                given = Inputs(job.rows(number), active=active)
                return _step(guide, state, prior, given, every, full)

            state = {"theta": start, "fisher": fisher}
            state = local_loop(schedule, job.keys.device, state, step)
            theta, fisher = state["theta"], state["fisher"]
            if kind == "none":
                return theta, fisher
            if online:
                count = schedule.sum(0).to(theta)[:, None]
                return theta, _covariance(guide, fisher / per_client(count, fisher))
        fisher = slopes(_loss(guide), theta, job.rows(None), kind, full=full)[1]
        return theta, _covariance(guide, fisher)

    def personalize(self, job: Job, locals_: Locals, steps: int, lr: float | None) -> Params:
        """Return the closed form of q(w_i | θ), or Laplace's approximation at μ_S; of many numbers the mode."""
        program, guide = job.program, job.program.guide
        start = program.init_locals(job.rows(0))
        if not guide.locals:
            return start
        if guide.block:
            return start | program.laplace(job.theta, start, job.rows(None))
        with torch.no_grad(), handlers.given(job.keys.device, job.theta, noise={}):
            theta = guide.sample_globals()[1].reshape(1, 1, 1, -1)
        if guide.integrated:
            _, mode, precision = guide.integrate_locals(
                theta.expand(-1, len(job), -1, -1), job.rows(None)
            )
            loc, variance = mode[0, :, 0], torch.linalg.inv(precision)[0, :, 0].diagonal(0, -2, -1)
            return start | guide.local_params(loc, variance.sqrt())
        centre, scale = guide.prior_centre(theta, job.rows(0))
        strength = 1 / (job.counts[:, None] * scale.square())
        prior = {"loc": centre, "precision": strength}
        prior["step"] = inverse(strength, 1 / (lr or self.lr or LR), matrix=False)

        def step(w: Tensor, number: int, active: Tensor | None) -> Tensor:
            return _own_step(guide, theta, w, prior, job.rows(number))

        w = local_loop(all_clients(len(job), steps), job.keys.device, centre, step)
        return start | guide.local_params(w, torch.zeros_like(w))


def _covariance(guide: Laplace, fisher: Tensor) -> Tensor:
    """Return the part of F̄ that the covariance keeps."""
    return torch.linalg.eigvalsh(fisher).abs() if guide.covariance == "e-full" else fisher


@traceable
def _step(
    guide: Laplace, state: Params, prior: Params, given: Inputs, kind: str | None, full: bool
) -> Params:
    """Take one step of θ_i, and add up the curvatures, with the K clients that are active."""
    theta, fisher = state["theta"], state["fisher"]
    grad, curvature = slopes(_loss(guide), theta, given.batch, kind, full=full)
    force = grad + times(prior["precision"], theta - prior["loc"])
    new = {"theta": theta - times(prior["step"], force), "fisher": fisher + curvature}
    return where_active(state, new, given.active)


@traceable
def _own_step(guide: Laplace, theta: Tensor, w: Tensor, prior: Params, batch: Batch) -> Tensor:
    """Take the same step of w_i given θ."""
    grad, _ = slopes(_own_loss(guide, theta), w, batch, None)
    return w - prior["step"] * (grad + prior["precision"] * (w - prior["loc"]))


def _loss(guide: Laplace) -> Loss:
    """Return L_i of K clients on a minibatch, ``(K,)``, as a function of their θ ``(K, D)``."""

    def loss(theta: Tensor, batch: Batch) -> Tensor:
        return -guide.log_likelihood(theta[None, :, None], batch)[0] / batch.rows

    return loss


def _own_loss(guide: Laplace, theta: Tensor) -> Loss:
    """Return −log p(D_i | w_i, θ) / n_i as a function of w_i ``(K, P)``, θ being ``(1, 1, 1, D)``."""

    def loss(w: Tensor, batch: Batch) -> Tensor:
        return -guide.log_likelihood(theta, batch, w[None, :, None])[0] / batch.rows

    return loss


def _dependent(program: Program) -> bool:
    """Return whether the rows of a client depend on each other given θ."""
    return program.joint or program.guide.integrated
