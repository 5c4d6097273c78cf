"""The guide of a hierarchical model: a distribution of all global variables, and one per client of its local ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pyro
import torch
from pyro.distributions.util import broadcast_shape
from torch import Tensor

from bayesfed.data.federation import Model
from bayesfed.elbo.handlers import Until, draws_plate, given
from bayesfed.elbo.program import Params
from bayesfed.guides import client_factor, client_laplace, local
from bayesfed.guides.client_factor import BlockPrior
from bayesfed.guides.client_laplace import Structure
from bayesfed.guides.family import Family
from bayesfed.guides.local import NormalPrior, Scaling
from bayesfed.guides.newton import NEWTON_STEPS, is_going
from bayesfed.guides.precision_normal import PrecisionNormal
from bayesfed.guides.site_factors import SiteFactors, client_params
from bayesfed.guides.sticking_the_landing import StickingTheLanding
from bayesfed.guides.unconstrained import AsGuide, ModelAt, delta_at, split
from bayesfed.tracing.compiler import traceable

LOCAL = "local"
"""The auxiliary site that holds a client's local variables as one unconstrained vector, where the guide has a block."""


@dataclass(frozen=True)
class Hierarchical:
    """q(θ) Π_i q(w_i | θ) for any model.

    Global variables: ``family`` gives q(z), where z are all of them, unconstrained, scaled and stacked. The model's
    own ``pyro.param`` are point estimates.
    Local variables: see :mod:`bayesfed.guides.local`. With ``conditioned=True`` q(w_i | θ) is the prior times a
    Gaussian factor that depends on z and on the client's earlier variables; else q(w_i) is mean-field and independent
    of θ.

    Attributes:
        model: the Pyro model.
        family: :class:`~bayesfed.guides.MeanField`, :class:`~bayesfed.guides.FullRank` or
            :class:`~bayesfed.guides.Flow`.
        conditioned: see above.
        globals: the scaling of each global latent site, in order.
        locals: the same of the local latent sites.
        block: all local sites share one Gaussian factor, else each has its own.
        normal: in a block, the sites whose priors are Normal, with a location that is linear in other sites of the
            block, if it depends on local sites at all; multivariate Normal ones if all sites are Normal and no location
            depends on others. The factor approximates the likelihood and the other priors.
        chain: where locations depend on other sites, the local variables are this matrix times their innovations, the
            differences from what the other sites predict, and the factor is one of the innovations: ``(P, P)``.
        structure: in a block, q(w_i | θ) is Laplace's approximation at θ, whose precision has this structure, in place
            of a prior times a factor. It needs the clients' rows: see :mod:`bayesfed.guides.client_laplace`.
    """

    model: Model
    family: Family
    conditioned: bool
    globals: Mapping[str, Scaling]
    locals: Mapping[str, Scaling]
    block: bool = False
    normal: tuple[str, ...] = ()
    chain: Tensor | None = None
    structure: Structure | None = None

    def __call__(self, federation: Any) -> None:
        """Sample every latent site of the model."""
        z, loc, scale = self.sample_globals()
        head = federation.head()
        context = (z - loc.detach()) / _unit(scale)
        values = self._unconstrained_globals(z)
        draw: Callable[[], Tensor] | None = None
        plate = federation.clients()
        if self.structure is not None:
            q = self._laplace_at(self.structure, values, federation, plate)
            draw = partial(pyro.sample, LOCAL, q, infer={"is_auxiliary": True})
        elif self.block:
            draw = partial(self._sample_block, self.block_prior(z, head), context, len(head))
        sites = self._global_sites(values)
        locals_ = SiteFactors(self.locals, self.conditioned, context)
        with plate:
            if draw is not None:
                parts = self.block_parts(draw())
                sites |= {name: partial(delta_at, u=u) for name, u in parts.items()}
            else:
                locals_.start(len(head))
                sites |= {name: partial(locals_.distribution, name) for name in self.locals}
        with locals_, AsGuide(sites), Until([*self.globals, *self.locals]):
            self.model(head)

    def at_block(self, federation: Any, u: Tensor) -> None:
        """Sample the globals and the local sites at given values of all local variables, ``(..., K, 1, P)``.

        Their distribution q(w_i | θ) is not computed.
        """
        z, _, _ = self.sample_globals()
        sites = self._global_sites(self._unconstrained_globals(z))
        sites |= {name: partial(delta_at, u=part) for name, part in self.block_parts(u).items()}
        with AsGuide(sites), Until([*self.globals, *self.locals]):
            self.model(federation.head())

    def of_globals(self, federation: Any) -> None:
        """Sample the global sites alone, for which no client's variables are computed."""
        z, _, _ = self.sample_globals()
        sites = self._global_sites(self._unconstrained_globals(z))
        with AsGuide(sites), Until(self.globals):
            self.model(federation.head())

    def __str__(self) -> str:
        locals_ = "conditioned" if self.conditioned else "mean-field"
        globals_ = type(self.family).__name__ if self.globals else "point"
        return f"{globals_} globals, {locals_} locals"

    # -- coordinates ----------------------------------------------------------------------------------

    def coordinates(self) -> dict[str, Tensor]:
        """Origin and unit of every site's coordinates, ``(2, P)``, which are estimated from draws of the prior."""
        scalings = {**self.globals, **self.locals}
        return {name: torch.stack([s.loc, s.scale]) for name, s in scalings.items()}

    def placed(self, coordinates: Mapping[str, Tensor]) -> Hierarchical:
        """The same guide in these coordinates, where they have a site's shape."""

        def replaced(own: Mapping[str, Scaling]) -> dict[str, Scaling]:
            return {
                name: Scaling(*coordinates[name])
                if name in coordinates and coordinates[name].shape[1:] == scaling.loc.shape
                else scaling
                for name, scaling in own.items()
            }

        return replace(self, globals=replaced(self.globals), locals=replaced(self.locals))

    @property
    def needs_rows(self) -> bool:
        """True if q(w_i | θ) is a function of the clients' rows."""
        return self.structure is not None

    @property
    def learns_locals(self) -> bool:
        """True if gradient steps move the clients' parameters."""
        return self.structure is None

    @property
    def workspace(self) -> int:
        """The largest size of what q(w_i | θ) is computed from, in numbers, for one client and one draw of θ."""
        return 0 if self.structure is None else self.structure.seeds.numel()

    @property
    def block_scaling(self) -> Scaling:
        """The scaling of all local variables as one vector."""
        parts = self.locals.values()
        return Scaling(
            *(torch.cat([getattr(s, field) for s in parts]) for field in ("loc", "scale"))
        )

    def block_parts(self, u: Tensor) -> dict[str, Tensor]:
        """The local sites' unconstrained values from that vector, ``(..., P)``."""
        u = u if self.chain is None else u @ self.chain.mT.to(u)
        return split(u, sizes(self.locals))

    def _unconstrained_globals(self, z: Tensor) -> dict[str, Tensor]:
        """The global sites' unconstrained values from z, ``(..., D)``."""
        parts = split(z, sizes(self.globals))
        return {name: s.loc + s.scale * parts[name] for name, s in self.globals.items()}

    def _global_sites(self, values: Params) -> dict[str, Callable[[Any], Any]]:
        """The distributions of the global sites, all at these unconstrained values, as functions of their priors."""
        return {
            name: partial(delta_at, u=values[name], log_scale=scaling.scale.log().sum(-1))
            for name, scaling in self.globals.items()
        }

    # -- distributions --------------------------------------------------------------------------------

    def sample_globals(self) -> tuple[Tensor, Tensor, Tensor]:
        """Sample z; returns z, and the location and scale that standardise it, each ``(..., D)``."""
        parts = [torch.zeros_like(scaling.loc) for scaling in self.globals.values()]
        start = torch.cat(parts or [torch.zeros(0)])
        return self.family(start) if self.globals else (start, start, start)

    def _sample_block(self, prior: NormalPrior, context: Tensor, clients: int) -> Tensor:
        """Sample the local variables of K clients as one vector each, ``(..., K, 1, P)``."""
        scaling = self.block_scaling
        params = client_params(LOCAL, local.init_conditional(scaling, context.shape[-1]), clients)

        def family(*values: Tensor) -> Any:
            by_name = dict(zip(params, values, strict=True))
            return local.as_vector(local.conditional(scaling, prior, context, **by_name))

        q = StickingTheLanding(family, *params.values())
        return pyro.sample(LOCAL, q, infer={"is_auxiliary": True})

    def _laplace_at(
        self, structure: Structure, values: Params, batch: Any, plate: Any
    ) -> StickingTheLanding:
        """Laplace's approximation of the local variables of K clients at θ, over ``(..., K, 1, P)``."""
        with plate:
            start = {"loc": self.block_scaling.loc}
            mode = client_params(LOCAL, start, len(batch.head()))["loc"]
        fixed = {name: value.detach() for name, value in values.items()}
        lead = [value.shape[:-3] for value in values.values()]
        q = client_laplace.laplace_at(
            structure,
            partial(self._log_joint, batch),
            values,
            fixed,
            mode.expand(*broadcast_shape(*lead), *mode.shape),
            self._least,
        )
        return StickingTheLanding(lambda: q)

    def laplace_near(
        self, params: Params, batch: Any, u: Tensor, z: Tensor
    ) -> tuple[PrecisionNormal, Tensor]:
        """Laplace's approximation at z near u, see :func:`~bayesfed.guides.client_laplace.laplace_near`."""
        assert self.structure is not None
        log_joint = partial(self.block_log_joint, params, batch, z=z)
        return client_laplace.laplace_near(self.structure, log_joint, u, self._least)

    def _log_joint(self, batch: Any, u: Tensor, values: Params) -> Tensor:
        """log p(u, D_i | θ) under the handlers that the guide runs in, ``(..., K)``."""
        model = ModelAt(self.block_parts(u) | values, without=self.globals)
        with model:
            self.model(batch)
        return model.log_prob()

    @property
    def _least(self) -> Tensor:
        """The smallest precision of local variables that is assumed where their density is not concave, ``(P,)``."""
        return client_factor.WEAKEST / self.block_scaling.scale.square()

    # -- units of the context -------------------------------------------------------------------------

    @traceable
    def context_unit(self, params: Params, batch: Any) -> Tensor:
        """The unit in which K clients' variables read the globals, ``(K, 1, D)``."""
        with given(batch.device, params, noise={}):
            _, _, scale = self.sample_globals()
        return _unit(scale).expand(len(batch), 1, -1)

    def in_context_units(self, phi: Params, ratio: Tensor) -> Params:
        """K clients' parameters after the unit has changed by ``ratio``; q(w_i | θ) is the same function of θ."""
        sites = (LOCAL,) if self.block else self.locals
        weights = [f"{site}.{of}" for site in sites for of in ("loc_weight", "precision_weight")]
        size, changed = ratio.shape[-1], {}
        for name in phi.keys() & set(weights):
            of_globals, rest = phi[name][..., :size], phi[name][..., size:]
            changed[name] = torch.cat([of_globals * ratio[..., None, :], rest], -1)
        return {**phi, **changed}

    # -- the block's factor in closed form ------------------------------------------------------------

    @property
    def laplace_params(self) -> list[str]:
        """The local parameters that :meth:`laplace` gives."""
        if not self.block:
            return []
        if self.structure is not None:
            return [f"{LOCAL}.loc"]
        return [f"{LOCAL}.{name}" for name in local.init_conditional(self.block_scaling, 0)]

    def laplace(self, params: Params, phi: Params, batch: Any) -> Params:
        """K clients' factors in closed form, parameters ``(K, 1, ...)``; see :mod:`bayesfed.guides.client_factor`."""
        params = {**params, **phi}
        if self.structure is not None:
            return {f"{LOCAL}.loc": self._mode(self.structure, params, phi[f"{LOCAL}.loc"], batch)}
        earlier = {n: phi[f"{LOCAL}.{n}"] for n in client_factor.FACTOR if f"{LOCAL}.{n}" in phi}
        found = client_factor.closed_form(self, params, earlier, batch)
        return {f"{LOCAL}.{n}": value for n, value in found.items() if f"{LOCAL}.{n}" in phi}

    def with_moments(self, phi: Params, prior: BlockPrior, mean: Tensor, root: Tensor) -> Params:
        """K clients' factors with which q(u | z̄) has given moments at the centre of q(θ).

        Only for a block with factors, not for Laplace's approximation.

        Args:
            phi: the clients' parameters, ``(K, 1, ...)``.
            prior: that of :meth:`block_prior_at_centre`.
            mean: ``(K, 1, P)``.
            root: a root of the covariance, ``(K, 1, P, P)``.
        """
        scaling = self.block_scaling
        earlier = {n.removeprefix(f"{LOCAL}."): phi[n] for n in self.laplace_params if n in phi}
        scaled = (mean - scaling.loc) / scaling.scale, root / scaling.scale[:, None]
        found = client_factor.with_moments(earlier, prior, *scaled)
        return phi | {f"{LOCAL}.{name}": value for name, value in found.items()}

    def _mode(self, structure: Structure, params: Params, u: Tensor, batch: Any) -> Tensor:
        """The modes of K clients' variables at the centre of q(θ), ``(K, 1, P)``, by Newton steps from u.

        Raises:
            ValueError: a client's rows connect variables that no client's rows connect in the structure.
        """
        active = batch.scale.new_ones(len(batch))
        on_cpu = active.device.type == "cpu"
        for _ in range(client_factor.MOST_STEPS if on_cpu else NEWTON_STEPS):
            u, active = self._climb(structure, params, batch, u, active)
            if on_cpu and not bool(active.any()):
                break
        with given(batch.device, params, noise={}):
            z = self.sample_globals()[1].detach()
        log_joint = partial(self.block_log_joint, params, batch, z=z)
        if not client_laplace.has_structure(structure, log_joint, u[None]):
            raise ValueError(
                "a client's rows depend together on local variables that the rows of no client of the fit depend on "
                "together, so that the zeros of their precision that the fit found are wrong for it: fit the model "
                "again with this client, or with such rows"
            )
        return u

    @traceable
    def _climb(
        self, structure: Structure, params: Params, batch: Any, u: Tensor, active: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Take a Newton step with the clients that are active, 1; return u, and those that are active after it."""
        with given(batch.device, params, noise={}):
            _, loc, _ = self.sample_globals()
        z = loc.detach()

        def log_joint(u: Tensor) -> Tensor:
            return self.block_log_joint(params, batch, u, z)

        moved, gain = client_laplace.newton_step(structure, log_joint, u[None], self._least)
        there = torch.where(active.reshape(-1, 1, 1) > 0, moved[0], u)
        return there, active * is_going(gain[0], u, moved[0])

    def unit_roots(self, phi: Params) -> Params:
        """C of K clients' factors by the name of their locations, whose steps are measured in units of C^{−⊤}."""
        if not self.block or self.structure is not None:
            return {}
        return {
            f"{LOCAL}.loc": local.unit_root(phi[f"{LOCAL}.log_precision"], phi.get(f"{LOCAL}.tril"))
        }

    def block_prior(self, z: Tensor, head: Any) -> NormalPrior:
        """The block's Normal priors, over ``(..., P)``; infinitely wide where a prior is not Normal."""
        model = ModelAt(self._unconstrained_globals(z), without=self.globals)
        if self.normal:
            with model, Until(self.normal):
                self.model(head)
        priors = []
        for name, scaling in self.locals.items():
            found = local.joint_prior(model.priors[name]) if name in self.normal else None
            priors.append(found or local.flat_prior(scaling))
        return local.join_priors(priors)

    @traceable
    def block_prior_at_centre(self, params: Params, batch: Any) -> BlockPrior:
        """The Normal prior of K clients' blocks at the centre of q(θ)."""
        with given(batch.device, params, noise={}):
            _, loc, scale = self.sample_globals()
            z, unit = (x.detach().expand(len(batch), 1, -1) for x in (loc, _unit(scale)))
        centre, precision = (x.detach() for x in self.block_prior_at(params, batch, z))
        return BlockPrior(centre, precision, z, unit)

    def block_prior_at(self, params: Params, batch: Any, z: Tensor) -> tuple[Tensor, Tensor]:
        """Location ``(K, 1, P)`` and precision of K clients' Normal priors of u at z ``(K, 1, D)``, scaled.

        The precision is a diagonal ``(K, 1, P)``, or a matrix ``(K, 1, P, P)`` where variables are correlated.
        """
        with given(batch.device, params, noise={}):
            centre, spread, root = self.block_prior(z, batch.head())
        scaling, clients = self.block_scaling, len(batch)
        loc = ((centre - scaling.loc) / scaling.scale).expand(clients, 1, -1)
        if root is None:
            return loc, (scaling.scale / spread).square().expand(clients, 1, -1)
        eye = torch.eye(len(scaling.scale)).to(root)
        inverse = torch.linalg.solve_triangular(root / scaling.scale[:, None], eye, upper=False)
        return loc, (inverse.mT @ inverse).expand(clients, 1, -1, -1)

    def block_log_likelihood(self, params: Params, batch: Any, u: Tensor, z: Tensor) -> Tensor:
        """log p(D_i | u, z) at S values of u in scaled coordinates, with the priors that are not Normal: ``(S, K)``."""
        scaling = self.block_scaling
        unscaled = scaling.loc + scaling.scale * u
        return self._block_log_prob(params, batch, unscaled, z, without=self.normal)

    def block_log_joint(self, params: Params | None, batch: Any, u: Tensor, z: Tensor) -> Tensor:
        """log p(u, D_i | z) at S values of u, ``(S, K)``."""
        return self._block_log_prob(params, batch, u, z)

    def block_log_density_of_rows(
        self, params: Params | None, batch: Any, u: Tensor, z: Tensor
    ) -> Tensor:
        """log p(D_i | u, z) at S values of u, ``(S, K)``."""
        return self._block_log_prob(params, batch, u, z, without=self.locals)

    def block_log_prior(self, params: Params | None, head: Any, u: Tensor, z: Tensor) -> Tensor:
        """log p(u | z) at S values of u, ``(S, K)``; ``head`` has a row of each client."""
        model = ModelAt(self.block_parts(u) | self._unconstrained_globals(z), without=self.globals)
        with given(head.device, params, noise={}), model, draws_plate(len(u)), Until(self.locals):
            self.model(head)
        return model.log_prob(self.locals)

    def _block_log_prob(
        self, params: Params | None, batch: Any, u: Tensor, z: Tensor, without: Collection[str] = ()
    ) -> Tensor:
        """Log densities of the rows and of the local sites, but for some, at S values of u: ``(S, K)``."""
        values = self.block_parts(u) | self._unconstrained_globals(z)
        model = ModelAt(values, without={*self.globals, *without})
        with given(batch.device, params, noise={}), model, draws_plate(len(u)):
            self.model(batch)
        return model.log_prob()


def _unit(scale: Tensor) -> Tensor:
    """Return the unit of the globals as clients read them: the geometric mean of the scales of q(θ) and of its prior.

    Each of N clients learns how its variables follow θ with some error. In units of q(θ), which is √N times as narrow
    as what one client's rows say of θ, these errors would together look like information on θ, and q(θ) be too narrow.
    """
    return scale.detach().sqrt()


def sizes(scalings: Mapping[str, Scaling]) -> dict[str, int]:
    """Return the number of unconstrained dimensions of each site."""
    return {name: len(scaling.loc) for name, scaling in scalings.items()}
