"""The server's M-step: the parameters of Normal local priors in closed form, the body as a mean (pFedVEM).

    clients upload (τ_i μ_i, τ_i) with τ_i = 1 / ρ_i², and (n_i body_i, n_i)
    m ← Σ τ_i μ_i / Σ τ_i (eq. 7);  body ← Σ n_i body_i / Σ n_i                           (Zhu et al. 2023)

An uncertain or outlying client has a large ρ_i: it pulls m less and is pulled less. The M-step is as exact as the
structure of the local priors lets it be:

- m: a parameter that is the location of Normal priors, and nothing else: eq. 7. (The sum is of τ_i (μ_i − m), and
  the result is added to m: the same number, with less round-off.)
- ρ_i, a client's own: by the client, see :mod:`bayesfed.steps.variational_em`.
- ρ, one for all: ρ² = Σ_i (tr Σ_i + ‖μ_i − m‖²) / (N D), from Σ_i τ (tr Σ_i + ‖μ_i − m‖²); one that is fixed stays, and
  so does any where q(w_i) is a point estimate, whose density has no maximum in it.
- Where θ has a prior, m and ρ are at the maximum of  log p(θ) + λ (N / K) Σ_i E_q[log p(w_i | θ)], a function of the
  same sums, which the server finds by L-BFGS from the closed form.
- All other θ, the body: slopes, noise, shared layers, parameters of a local prior that is not Normal: the mean of the
  clients' copies.

For a variable w_i of K clients with q(w_i) = N(μ_i, diag s_i²), and p(w_i | θ) = N(m, ρ²) as it was sent, the sums of

    precision: τ_i = 1 / ρ²        first: τ_i (μ_i − m)        second: τ_i (s_i² + (μ_i − m)²)

give Σ_i E_q[log p(w_i | θ)] at any other m and ρ, and so where it has its maximum.

The authors' code lets every client train in every round and a random tenth of them upload: that is
``clients_per_round=1.0`` with ``upload_fraction=0.1``. ``clients_per_round=0.1`` alone trains the cohort only.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from bayesfed.elbo import noise
from bayesfed.elbo.elbo import local_priors, log_prior
from bayesfed.elbo.program import Params, Program
from bayesfed.guides.closed_forms import ClosedForms, closed_forms
from bayesfed.guides.fisher import prior_units
from bayesfed.rules import observed_information
from bayesfed.rules.quasi_newton import MOST, ByMeanMove
from bayesfed.rules.rule import NO_TERM, Turn, mean_of, moves, weighted_sum
from bayesfed.steps.gradients import copies, gradients, leaves
from bayesfed.steps.job import INFORMATION, SINGLE, Job, Parts, Work
from bayesfed.steps.losses import per_client
from bayesfed.steps.optimizer import State
from bayesfed.steps.steps import Steps, gradient_of
from bayesfed.tracing.compiler import traceable

Server = dict[str, Params]


@dataclass(frozen=True)
class MStep(ByMeanMove):
    """The M-step of variational expectation maximisation.

    Attributes:
        kl_weight: λ.
        upload_fraction: the part of the cohort that uploads, drawn at random in each round.
    """

    by_gradient = True
    kl_weight: float = 1.0
    upload_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    needs = frozenset({"theta", "posterior"})
    sends = frozenset({"squares"})
    no_noise = "its rule divides a sum by a sum of precisions, both noisy: use FedABML, or Ditto for points"

    def start(self, program: Program) -> Server:
        """Return θ, and mean squares of gradients that are not known yet."""
        theta = super().start(program)["theta"]
        body = closed_forms(program).others(theta)
        return {"theta": theta, "squares": {name: theta[name].new_zeros(()) for name in body}}

    def newton(self, program: Program, steps: Steps) -> Params:
        """Return the first state of quasi-Newton steps, or of steps by the information that clients give.

        It is empty where not all clients upload.
        """
        if self.upload_fraction < 1:
            return {}
        if INFORMATION not in steps.gives:
            return super().newton(program, steps)
        size = sum(program.init[name].numel() for name in gradient_of(steps, program) or ())
        return observed_information.begin(program, size) if 0 < size <= MOST else {}

    def broadcast(self, turn: Turn, server: Server) -> Parts:
        """Return θ and mean squares; and that clients take a single step, with the share of this round in means."""
        message = super().broadcast(turn, server)
        if "gain" in server.get("newton", {}):
            message[SINGLE]["gain"] = server["newton"]["gain"]
        return message

    def encode(self, job: Job, work: Work) -> tuple[Parts, State]:
        """Return the sums for m and ρ, and (n_i body_i, n_i), of those clients that upload; or their single steps."""
        if SINGLE in job.message:
            upload = weighted_sum(moves(job, work.found["theta"]), job.counts)
            if information := work.found.get(INFORMATION):
                weighted = {n: per_client(job.counts, v) * v for n, v in information.items()}
                upload[INFORMATION] = weighted
            return upload, {}
        dice = noise.uniform(noise.fold(job.keys, noise.word("upload")))
        uploads = (dice < self.upload_fraction).to(job.counts)
        rows = uploads * job.counts
        others = closed_forms(job.program).others(job.theta)
        body = {name: work.found["theta"].get(name) for name in others}
        theta = copies(job.theta, len(job)) | work.found["theta"]
        with torch.no_grad():
            sums = statistics(job.program, theta, work.found["posterior"], job)
        upload = {p: {n: per_client(uploads, v) * v for n, v in s.items()} for p, s in sums.items()}
        for part, values in (("theta", body), ("squares", work.found.get("squares", {}))):
            upload[part] = {
                name: per_client(rows, value.squeeze(1)) * value.squeeze(1)
                for name, value in values.items()
                if value is not None
            }
        return upload | {"weight": {"rows": rows, "uploads": uploads}}, {}

    def decode(self, turn: Turn, server: Server, total: Parts) -> tuple[Server, Tensor]:
        """Return the next θ; θ as it was where nobody has uploaded."""
        if "information" in server.get("newton", {}):
            return server | self._informed(turn, server, total), NO_TERM
        if "newton" in server:
            return server | self.moved(turn, server, mean_of(turn, total)), NO_TERM
        program, known, theta = turn.program, closed_forms(turn.program), server["theta"]
        uploads, rows = total["weight"]["uploads"], total["weight"]["rows"]
        if not uploads > 0:
            return server, NO_TERM
        spreads, new = not program.guide.local_point, dict(theta)
        new |= {name: value / rows for name, value in total.get("theta", {}).items()}
        squares = server["squares"] | {
            name: _running_mean(server["squares"][name], value / rows)
            for name, value in total.get("squares", {}).items()
        }
        new |= in_closed_form(known, theta, total, spreads=spreads)
        learnt = [*known.centres, *(known.spreads if spreads else ())]
        if learnt and program.globals:
            weight = self.kl_weight * program.clients / uploads
            new |= under_prior(program, learnt, theta, new, total, weight)
        return {"theta": new, "squares": squares}, NO_TERM

    def _informed(self, turn: Turn, server: Server, total: Parts) -> Server:
        """Return θ after a step by the information that clients give, and the state of such steps."""
        program, theta = turn.program, server["theta"]
        (information,) = mean_of(turn, total, INFORMATION).values()
        if not turn.whole:
            information = torch.full_like(information, torch.nan)
        units, move = prior_units(program), mean_of(turn, total)
        found, state = observed_information.advance(
            program, units, server["newton"], theta, move, information
        )
        return {"theta": theta | found, "newton": state}


def statistics(program: Program, theta: Params, phi: Params, job: Job) -> Parts:
    """Return the parts ``precision``, ``first`` and ``second`` of K clients' uploads, by local variable.

    The first and the last are summed over the dimensions that share a ρ, the last only where ρ is to be learnt.
    """
    known, found = closed_forms(program), Parts(precision={}, first={}, second={})
    params = theta | phi
    prior, q = local_priors(program, params, job.rows(0)), program.guide.moments(phi)
    for site in known.sites:
        spread = program.anchors[site].log_scale
        scale = prior[site].scale if spread is None else params[spread].exp()
        precision, gap = scale.square().reciprocal(), q[site].loc - prior[site].loc
        found["precision"][site] = precision.squeeze(1)
        found["first"][site] = (precision * gap).squeeze(1)
        if spread in known.spreads:
            second = precision * (q[site].scale.square() + gap.square())
            found["second"][site] = second.sum_to_size(precision.shape).squeeze(1)
    return found


def in_closed_form(known: ClosedForms, server: Params, total: Parts, *, spreads: bool) -> Params:
    """Return m + Σ τ_i (μ_i − m) / Σ τ_i, and log ρ of ρ² = Σ (tr Σ_i + ‖μ_i − m‖²) / (K D)."""
    new: Params = {}
    for name, sites in known.centres.items():
        first, weight = torch.zeros_like(server[name]), torch.zeros_like(server[name])
        for site in sites:
            each = total["first"][site]
            first = first + each.sum_to_size(first.shape)
            weight = weight + total["precision"][site].expand_as(each).sum_to_size(first.shape)
        new[name] = server[name] + torch.where(weight > 0, first / weight, 0.0)
    for name, sites in known.spreads.items() if spreads else ():
        square, count = torch.zeros_like(server[name]), torch.zeros_like(server[name])
        for site in sites:
            each = squares(known, server, new, total, site)
            square = square + each.sum_to_size(square.shape)
            numbers = total["first"][site].numel() / square.numel()
            count = count + total["weight"]["uploads"] * numbers
        ratio = square / count
        new[name] = server[name] + torch.where(ratio > 0, ratio, 1.0).log() / 2
    return new


def under_prior(
    program: Program,
    names: Iterable[str],
    server: Params,
    start: Params,
    total: Parts,
    weight: Tensor,
) -> Params:
    """Return these m and log ρ at the maximum of log p(θ) + weight · Σ_i E_q[log p(w_i | θ)], found from ``start``."""
    free = leaves({name: start[name] for name in names})
    search = torch.optim.LBFGS(free.values(), max_iter=50, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        at = {name: value.detach() for name, value in free.items()}
        value, slopes = negative_objective(program, at, server, start, total, weight)
        for name, slope in slopes.items():
            free[name].grad = slope
        return value

    search.step(closure)
    return {name: value.detach() for name, value in free.items()}


@traceable
def negative_objective(
    program: Program, free: Params, server: Params, start: Params, total: Parts, weight: Tensor
) -> tuple[Tensor, Params]:
    """Return −log p(θ) − weight · Σ_i E_q[log p(w_i | θ)] at other m and log ρ, and its gradients in them."""
    known, uploads = closed_forms(program), total["weight"]["uploads"]
    with torch.enable_grad():
        free = leaves(free)
        at = start | free
        expected = torch.zeros_like(uploads)
        for site in known.sites:
            stretch = change_of(known.spreads, server, at, site, total["first"][site])
            square = squares(known, server, at, total, site)
            narrow = change_of(known.spreads, server, at, site, square)
            expected = expected + uploads * stretch.sum()
            expected = expected + ((-2 * narrow).exp() * square).sum() / 2
        value = weight * expected - log_prior(program, at, {}, 1)[0]
        return value.detach(), gradients(value, free)


def squares(
    known: ClosedForms, server: Params, at: Mapping[str, Tensor], total: Parts, site: str
) -> Tensor:
    """Return Σ_i τ_i (s_i² + (μ_i − m)²) for another m than that which was sent, summed over the numbers of one ρ.

    s_i² is left out where no ρ follows from it.
    """
    first, precision = total["first"][site], total["precision"][site]
    move = change_of(known.centres, server, at, site, first)
    change = (move.square() * precision - 2 * move * first).sum_to_size(precision.shape)
    return total.get("second", {}).get(site, 0.0) + change


def change_of(
    parameters: Mapping[str, list[str]],
    server: Params,
    at: Mapping[str, Tensor],
    site: str,
    like: Tensor,
) -> Tensor:
    """Return the difference between a variable's location or log scale and that which was sent."""
    for name, sites in parameters.items():
        if site in sites:
            return (at[name] - server[name]).expand_as(like)
    return torch.zeros_like(like)


def _running_mean(before: Tensor, now: Tensor) -> Tensor:
    """Return a running mean over about two rounds."""
    return torch.where(before > 0, (before + now) / 2, now)
