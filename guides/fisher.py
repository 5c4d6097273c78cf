"""Fisher information of Normal variational distributions and priors, for natural gradients on their parameters.

The Fisher information of N(μ, σ²) is 1 / σ² for its location μ and 2 for log σ.
"""

import torch
from torch import Tensor

from bayesfed.data.batch import Batch
from bayesfed.elbo.elbo import local_priors
from bayesfed.elbo.moments import Moments
from bayesfed.elbo.program import Params, Program
from bayesfed.guides.factorised import loc_of

Units = dict[str, tuple[Tensor, bool]]
"""By parameter: one over the root of its Fisher information, ``(K, 1, ...)``, and whether it is a log scale."""

FEW = 50
"""The largest number of numbers of a variable that is moved in units of its prior."""


def prior_units(program: Program) -> Params:
    """Return the units in which steps on point estimates are taken, by parameter; those that are left out are 1.

    A local variable and the location of its prior have the prior's scale at the start, other globals the scale of their
    own prior. Then a fit does not depend on the units of the fields, where the priors follow them. A ``pyro.param`` has
    the unit 1, and so have local variables whose prior reads no random global, and variables of more than 50 numbers:
    the rates of the papers are for the weights of networks as they are.
    """
    guide = program.guide
    found = {loc_of(name): site.unit for name, site in guide.globals.items()}
    random = set(found)
    for name, site in guide.locals.items():
        if not random & program.reads.get(name, frozenset()):
            continue
        found[loc_of(name)] = site.unit
        anchor = program.anchors.get(name)
        if anchor is not None and anchor.loc in random:
            own = found[anchor.loc]
            found[anchor.loc] = (
                site.unit if own.shape == site.unit.shape else site.unit.mean().expand_as(own)
            )
    return {name: unit for name, unit in found.items() if unit.numel() <= FEW}


def scaled(grads: Params, units: Params) -> Params:
    """Return gradients in coordinates of these units, or steps there in the parameters' own."""
    return {name: grad * units[name] if name in units else grad for name, grad in grads.items()}


def first_prior_scales(program: Program, batch: Batch) -> Params:
    """Return the standard deviations ``(K, 1, ...)`` of the local priors at the first values of θ."""
    clients = len(batch)
    init = {n: v.detach().expand(clients, 1, *v.shape).clone() for n, v in program.init.items()}
    priors = local_priors(program, init | program.init_locals(batch), batch)
    return {name: at.scale.detach().contiguous() for name, at in priors.items()}


def units_of_posterior(program: Program, phi: Params, widest: Params) -> Units:
    """Return the units of the locations and log scales of q(w_i | φ), no scale counted as larger than ``widest``."""
    guide = program.guide
    scales = {n: torch.minimum(at.scale, widest[n]) for n, at in guide.moments(phi).items()}
    by_name = guide.at({name: Moments(scale, scale, True) for name, scale in scales.items()})
    log_scale = 0.5**0.5
    return {
        name: (torch.full_like(value, log_scale), True)
        if name in guide.log_scales
        else (value, False)
        for name, value in by_name.items()
    }


def units_of_prior(
    program: Program, params: Params, of: Params, widest: Params, batch: Batch
) -> Units:
    """Return the units of those parameters ``of`` that are locations or log scales of Normal local priors only."""
    read = frozenset().union(*(program.reads[site.name] for site in program.likelihood))
    precision: dict[str, Tensor] = {}
    log_scales = set()
    priors = local_priors(program, params, batch)
    for site, anchor in program.anchors.items():
        scale = torch.minimum(priors[site].scale.detach(), widest[site])
        for name, found in (
            (anchor.loc, scale**-2),
            (anchor.log_scale, torch.full_like(scale, 2.0)),
        ):
            if name is not None and name in of and name not in read:
                precision[name] = precision.get(name, 0) + _sum_to(found, of[name])
        if anchor.log_scale is not None:
            log_scales.add(anchor.log_scale)
    return {name: (value**-0.5, name in log_scales) for name, value in precision.items()}


def _sum_to(value: Tensor, like: Tensor) -> Tensor:
    """Sum ``(K, 1, *shape)`` to the shape of a parameter ``(K, 1, ...)`` that is expanded to it."""
    missing = [1] * (value.ndim - like.ndim)
    return value.sum_to_size(*like.shape[:2], *missing, *like.shape[2:]).reshape(like.shape)
