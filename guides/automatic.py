"""The construction of the :class:`~bayesfed.guides.Hierarchical` guide of a model from draws of its prior."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from bayesfed.data.batch import Batch
from bayesfed.data.chunks import PASS
from bayesfed.data.federation import Federation, Model
from bayesfed.elbo.handlers import Until, given
from bayesfed.elbo.sites import Site
from bayesfed.guides import local
from bayesfed.guides.chain import Priors, find_chain
from bayesfed.guides.client_laplace import Structure, find_structure
from bayesfed.guides.family import Family
from bayesfed.guides.hierarchical import Hierarchical
from bayesfed.guides.local import Scaling
from bayesfed.guides.newton import curvature
from bayesfed.guides.unconstrained import ModelAt, median_and_spread, unconstrained_draws

DRAWS = 100
"""The number of draws of the prior."""
NEAR = 0.3
"""The spread of the points at which second derivatives are probed, in units of the prior's."""
SPREADS = 1e-6, 1e6
"""The bounds of the spread of a prior: that of a constant is none, and that of heavy tails may be any."""
LAPLACE = 20, 1000
"""Between these numbers of dimensions of a client's variables q(w_i | θ) may be Laplace's approximation at θ: where it
is exact, or else where their log density is concave, and there are too many for a full factor or their prior has a
precision that is a function of θ and not diagonal, as that of a Gaussian process, which a factor follows poorly."""


def automatic_guide(
    model: Model,
    sites: Mapping[str, Site],
    federation: Federation,
    family: Family,
    conditioned: bool,
    *,
    many: bool = True,
) -> Hierarchical:
    """The guide of a model, in coordinates scaled by the median and spread of its prior.

    Args:
        model: the Pyro model.
        sites: its sample sites.
        federation: the clients' data.
        family: the distribution of the globals.
        conditioned: q(w_i | θ) in place of q(w_i). Then all local variables share one factor, if they are few.
        many: q(w_i | θ) of more variables may be Laplace's approximation at each draw of θ.
    """
    values: dict[bool, dict[str, Tensor]] = {False: {}, True: {}}
    for name, u in unconstrained_draws(model, sites, federation, DRAWS).items():
        values[sites[name].local][name] = u.to(federation.dtype)
    globals_, locals_ = (
        {name: _scaling(u) for name, u in values[is_local].items()} for is_local in (False, True)
    )
    guide = Hierarchical(model, family, conditioned, globals_, locals_)
    sizes = [len(scaling.loc) for scaling in locals_.values()]
    size, structure = sum(sizes), None
    if many and conditioned and LAPLACE[0] < size <= LAPLACE[1]:
        block = replace(guide, block=True)
        structure = _structure(block, federation)
        if structure.quadratic or (structure.concave and size > local.FULL_UP_TO):
            return replace(block, structure=structure)
    if not conditioned or not 0 < size <= local.FULL_UP_TO:
        return guide
    head = federation.batch(torch.arange(1)).head()
    normal, slopes = _chain(guide, head, size)
    guide = replace(guide, block=True, normal=normal)
    if structure is not None and structure.concave and _has_dependent_prior(guide, head):
        return replace(guide, normal=(), structure=structure)
    if not slopes.any():
        return guide
    to_innovations = torch.eye(len(slopes)).to(slopes) - slopes
    u = torch.cat(list(values[True].values()), -1) @ to_innovations.mT.to(federation.dtype)
    innovations = dict(zip(locals_, u.split(sizes, -1), strict=True))
    locals_ = {name: _scaling(u) for name, u in innovations.items()}
    return replace(guide, locals=locals_, chain=torch.linalg.inv(to_innovations))


def _structure(guide: Hierarchical, federation: Federation) -> Structure:
    """Find the structure of the precision of clients' local variables, at two points."""
    generator = torch.Generator().manual_seed(0)
    scaling = guide.block_scaling
    size, numbers = sum(len(s.loc) for s in guide.globals.values()), len(scaling.loc)
    z, u = (
        torch.randn(2, 1, 1, length, generator=generator, device="cpu").to(scaling.loc)
        for length in (size, numbers)
    )
    most = federation.rows // len(federation) + numbers
    log_joints = (
        (len(some), partial(guide.block_log_joint, None, federation.batch(some), z=z))
        for some in torch.arange(len(federation)).split(max(1, PASS // (numbers * most)))
    )
    return find_structure(log_joints, scaling.loc + NEAR * scaling.scale * u)


def _has_dependent_prior(guide: Hierarchical, head: Batch) -> bool:
    """Return whether local variables outside the chain depend on each other in their prior."""
    apart = [name not in guide.normal for name, s in guide.locals.items() for _ in s.loc]
    if not any(apart):
        return False
    u, size = guide.block_scaling.loc, sum(len(s.loc) for s in guide.globals.values())

    def log_prior(u: Tensor) -> Tensor:
        return guide.block_log_prior(None, head, u, u.new_zeros(1, 1, 1, size))

    with torch.enable_grad():
        _, hessian = curvature(log_prior, u[None, None])
    beside = hessian[0, 0] - torch.diag(hessian[0, 0].diagonal())
    return bool(beside[torch.tensor(apart, device=beside.device)].any())


def _scaling(u: Tensor) -> Scaling:
    """Return median and spread of draws ``(S, P)``; zero where the median is that within its Monte Carlo error.

    Under a vague prior that error is itself large: a rate of exp(error) may have no finite value.
    """
    middle, spread = median_and_spread(u)
    error = math.sqrt(math.pi / 2 / len(u)) * spread
    return Scaling(torch.where(middle.abs() < 2 * error, 0.0, middle), spread.clamp(*SPREADS))


def _chain(guide: Hierarchical, head: Batch, size: int) -> tuple[tuple[str, ...], Tensor]:
    """Return the local sites that belong to a chain, and the slopes of their locations, as :func:`find_chain`.

    Sites with multivariate Normal priors do where all do, without slopes, and if they are few: Laplace's approximation
    at θ follows a prior such as a Gaussian process's better than a factor.
    """
    found = [_normal_priors(guide, head, seed) for seed in range(2)]
    if size <= LAPLACE[0]:
        normal, slopes = find_chain(found)
        if set(normal) == set(guide.locals) and not slopes.any():
            return normal, slopes
    independent = [
        (values, {name: prior for name, prior in priors.items() if prior.root is None})
        for values, priors in found
    ]
    return find_chain(independent)


def _normal_priors(guide: Hierarchical, batch: Batch, seed: int) -> Priors:
    """Draw values of all variables; return the local ones, and the Normal priors of the local sites there."""
    generator = torch.Generator().manual_seed(seed)

    def standard_normal(scaling: Scaling) -> Tensor:
        return torch.randn(len(scaling.loc), generator=generator, device="cpu").to(scaling.loc)

    z = {name: standard_normal(scaling) for name, scaling in guide.globals.items()}
    u = {name: standard_normal(s).requires_grad_() for name, s in guide.locals.items()}
    values = {name: s.loc + s.scale * z[name] for name, s in guide.globals.items()}
    values |= u
    model = ModelAt(values, without=values)
    with torch.enable_grad(), given(batch.device), model, Until(guide.locals):
        guide.model(batch)
    priors = {name: local.joint_prior(model.priors[name]) for name in guide.locals}
    return u, {name: prior for name, prior in priors.items() if prior is not None}
