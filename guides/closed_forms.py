"""Parameters with a maximum in closed form: the locations and log scales of Normal local priors."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from bayesfed.data.batch import Batch
from bayesfed.elbo.elbo import local_priors
from bayesfed.elbo.program import Params, Program


class ClosedForms(NamedTuple):
    """The parameters for which the M-step has a closed form: by name, the local variables whose Normal prior they make.

    Attributes:
        centres: m, global.
        spreads: log ρ, global.
        own: log ρ_i, a client's own.
    """

    centres: dict[str, list[str]]
    spreads: dict[str, list[str]]
    own: dict[str, list[str]]

    def others(self, theta: Iterable[str]) -> list[str]:
        """Return the body: global parameters without a closed form."""
        return [name for name in theta if name not in self.centres | self.spreads]

    @property
    def sites(self) -> list[str]:
        """All local variables whose q the server's closed forms need."""
        return sorted({site for sites in (self.centres | self.spreads).values() for site in sites})


def closed_forms(program: Program) -> ClosedForms:
    """Return the parameters that are the location or log scale of Normal local priors, and that nothing else reads."""
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


def own_spreads(
    program: Program,
    own: Mapping[str, list[str]],
    theta: Params,
    phi: Params,
    batch: Batch,
) -> Params:
    """Return log ρ_i = ½ log((tr Σ_i + ‖μ_i − m‖²) / D) of K clients."""
    prior, q = local_priors(program, theta | phi, batch), program.guide.moments(phi)
    new = {}
    for name, sites in own.items():
        total, count = torch.zeros_like(phi[name]), 0.0
        for site in sites:
            square = q[site].scale.square() + (q[site].loc - prior[site].loc).square()
            total = total + square.sum_to_size(phi[name].shape)
            count += square.numel() / phi[name].numel()
        new[name] = (total / count).log() / 2
    return new
