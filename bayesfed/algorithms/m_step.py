"""The M-step of parameters on which Normal local priors stand, in closed form from sums over clients (see PFedVEM).

For a site w_i of K clients with q(w_i) = N(μ_i, diag s_i²), and p(w_i | θ) = N(m, ρ²) as it was sent, the sums of

    τ_i = 1 / ρ²        τ_i (μ_i − m)        τ_i (s_i² + (μ_i − m)²)

give Σ_i E_q[log p(w_i | θ)] at any other m and ρ, and so where it has its maximum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from bayesfed.algorithms.protocol import Upload
from bayesfed.data.batch import Batch
from bayesfed.elbo.elbo import local_priors, log_prior
from bayesfed.elbo.moments import Moments
from bayesfed.elbo.program import Params, Program
from bayesfed.steps.gradients import leaves


class ClosedForms(NamedTuple):
    """The parameters for which the M-step has a closed form; by name, the local sites whose Normal prior they make.

    Attributes:
        centres: m, global.
        spreads: log ρ, global.
        own: log ρ_i, a client's own.
    """

    centres: dict[str, list[str]]
    spreads: dict[str, list[str]]
    own: dict[str, list[str]]

    def others(self, theta: Iterable[str]) -> list[str]:
        """The body: global parameters without a closed form."""
        return [name for name in theta if name not in self.centres | self.spreads]

    @property
    def sites(self) -> list[str]:
        """All sites whose q the server's closed forms need to know of."""
        return sorted({site for sites in (self.centres | self.spreads).values() for site in sites})


def closed_forms(program: Program) -> ClosedForms:
    """The parameters that are the location or the log scale of Normal local priors, and that nothing else reads."""
    local = set(program.local_params)
    alone = {  # a prior on another local variable is no sum of squares around m
        site: anchor
        for site, anchor in program.anchors.items()
        if program.reads[site] & local <= {anchor.log_scale} and anchor.loc != anchor.log_scale
    }

    def named(field: str, names: Iterable[str]) -> dict[str, list[str]]:
        found = {n: [site for site, read in program.reads.items() if n in read] for n in names}
        return {
            name: sites
            for name, sites in found.items()
            if sites and all(s in alone and getattr(alone[s], field) == name for s in sites)
        }

    return ClosedForms(
        named("loc", program.init),
        named("log_scale", program.init),
        named("log_scale", program.local_params),
    )


def m_step_of_own(
    program: Program,
    own: Mapping[str, list[str]],
    theta: Params,
    phi: Params,
    batch: Batch,
) -> Params:
    """log ρ_i = ½ log((tr Σ_i + ‖μ_i − m‖²) / D) of K clients."""
    prior, q, new = local_priors(program, theta | phi, batch), posteriors(program, phi), {}
    for name, sites in own.items():
        total, count = torch.zeros_like(phi[name]), 0.0
        for site in sites:
            square = q[site].scale.square() + (q[site].loc - prior[site].loc).square()
            total = total + square.sum_to_size(phi[name].shape)
            count += square.numel() / phi[name].numel()
        new[name] = (total / count).log() / 2
    return new


def statistics(program: Program, theta: Params, phi: Params, batch: Batch) -> Params:
    """What the M-step needs of K clients, for each site in turn: τ_i, τ_i (μ_i − m) and τ_i (s_i² + (μ_i − m)²).

    The first and the last are summed over the dimensions that share a ρ, the last only where ρ is to be learnt.
    """
    known, found = closed_forms(program), {}
    prior, q, params = (
        local_priors(program, theta | phi, batch),
        posteriors(program, phi),
        theta | phi,
    )
    for site in known.sites:
        spread = program.anchors[site].log_scale
        scale = prior[site].scale if spread is None else params[spread].exp()
        precision, gap = scale.square().reciprocal(), q[site].loc - prior[site].loc
        found[f"{site}: precision"] = precision.squeeze(1)
        found[f"{site}: first"] = (precision * gap).squeeze(1)
        if spread in known.spreads:
            second = precision * (q[site].scale.square() + gap.square())
            found[f"{site}: second"] = second.sum_to_size(precision.shape).squeeze(1)
    return found


def m_step_in_closed_form(
    known: ClosedForms, server: Params, total: Upload, *, spreads: bool
) -> Params:
    """m ← m + Σ τ_i (μ_i − m) / Σ τ_i;  then  ρ² ← Σ (tr Σ_i + ‖μ_i − m‖²) / (K D)."""
    new: Params = {}
    for name, sites in known.centres.items():
        first, weight = torch.zeros_like(server[name]), torch.zeros_like(server[name])
        for site in sites:
            each = total[f"{site}: first"]
            first = first + each.sum_to_size(first.shape)
            weight = weight + total[f"{site}: precision"].expand_as(each).sum_to_size(first.shape)
        new[name] = server[name] + torch.where(weight > 0, first / weight, 0.0)
    for name, sites in known.spreads.items() if spreads else ():
        square, count = torch.zeros_like(server[name]), torch.zeros_like(server[name])
        for site in sites:
            each = squares(known, server, new, total, site)
            square = square + each.sum_to_size(square.shape)
            count = count + total["uploads"] * total[f"{site}: first"].numel() / square.numel()
        ratio = square / count
        new[name] = server[name] + torch.where(ratio > 0, ratio, 1.0).log() / 2
    return new


def m_step_under_prior(
    program: Program,
    names: Iterable[str],
    server: Params,
    start: Params,
    total: Upload,
    weight: Tensor,
) -> Params:
    """These m and log ρ at the maximum of log p(θ) + weight · Σ_i E_q[log p(w_i | θ)], from where they start."""
    known = closed_forms(program)
    free = leaves({name: start[name] for name in names})

    def loss() -> Tensor:
        at = start | free
        expected = torch.zeros_like(total["uploads"])
        for site in known.sites:
            first = total[f"{site}: first"]
            stretch = moved(known.spreads, server, at, site, first)
            square = squares(known, server, at, total, site)
            narrow = moved(known.spreads, server, at, site, square)
            expected = expected + total["uploads"] * stretch.sum()
            expected = expected + ((-2 * narrow).exp() * square).sum() / 2
        return weight * expected - log_prior(program, at, {}, 1)[0]

    search = torch.optim.LBFGS(free.values(), max_iter=50, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        value = loss()
        for leaf, grad in zip(
            free.values(), torch.autograd.grad(value, [*free.values()]), strict=True
        ):
            leaf.grad = grad
        return value.detach()

    with torch.enable_grad():
        search.step(closure)
    return {name: value.detach() for name, value in free.items()}


def squares(
    known: ClosedForms, server: Params, at: Mapping[str, Tensor], total: Upload, site: str
) -> Tensor:
    """Σ_i τ_i (s_i² + (μ_i − m)²) for another m than that which was sent, summed over what shares a ρ.

    s_i² is left out where no ρ follows from it.
    """
    first, precision = total[f"{site}: first"], total[f"{site}: precision"]
    move = moved(known.centres, server, at, site, first)
    change = (move.square() * precision - 2 * move * first).sum_to_size(precision.shape)
    return total.get(f"{site}: second", 0.0) + change


def moved(
    stands: Mapping[str, list[str]],
    server: Params,
    at: Mapping[str, Tensor],
    site: str,
    like: Tensor,
) -> Tensor:
    """By how much a site's location or log scale differs from what was sent."""
    for name, sites in stands.items():
        if site in sites:
            return (at[name] - server[name]).expand_as(like)
    return torch.zeros_like(like)


def posteriors(program: Program, phi: Params) -> dict[str, Moments]:
    """μ_i and s_i of each site."""
    return program.guide.moments(phi)
