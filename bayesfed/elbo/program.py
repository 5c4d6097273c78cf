"""A Pyro model and its guide as pure functions of parameters, rows and noise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import transform_to

from bayesfed.data.batch import Batch
from bayesfed.data.chunks import PASS, chunks, weight
from bayesfed.data.federation import Federation, Model
from bayesfed.elbo import handlers, noise
from bayesfed.elbo.sites import Site

Params = dict[str, Tensor]
"""Parameter name to unconstrained tensor; local parameters have a row per client in front."""


class PriorParameters(NamedTuple):
    """The parameters that a Normal local prior consists of.

    Attributes:
        loc: the parameter that is its unconstrained location, or None.
        log_scale: the parameter that is the logarithm of its scale, or None.
        fixed: whether its scale depends on no parameter.
    """

    loc: str | None
    log_scale: str | None
    fixed: bool


@dataclass(frozen=True)
class Program:
    """A model/guide pair that runs as pure functions of (parameters, batch, noise).

    Attributes:
        model: the Pyro model.
        guide: the Pyro guide; an algorithm that has chosen it may use its other methods.
        sites: the model's sample sites by name.
        random: the guide's global random sites: the server draws them and sends them to the clients.
        direct: the global parameters that a client's ELBO term reads other than through these draws; they are sent too.
        local_params: the parameters inside the clients plate, which have a row per client.
        constraints: the constraint of every parameter.
        init: the unconstrained initial value of every global parameter.
        schema: one client with one row of zeros, on which a server without data runs the program.
        randomness: the random tensors that each guide site needs.
        clients: N, the number of clients in the federation.
        rows: Σ n_i, the number of rows of all clients.
        unread: the global parameters that the likelihood does not depend on, given the local variables. Only found if
            the global variables are point estimates; so are ``anchors`` and ``reads``.
        resting: the local parameters of the model that the guide does not have, such as a scale of each client's own.
        anchors: by local site with a Normal prior, the parameters that are its location and its log scale.
        reads: by local or observed site, the parameters that its distribution depends on, also through the site's
            parents in the clients plate.
        derived: the names of ``pyro.deterministic`` values, and the dimension that each value has: none, ``client`` or
            ``observation``.
    """

    model: Model
    guide: Any
    sites: Mapping[str, Site]
    random: tuple[str, ...]
    direct: tuple[str, ...]
    local_params: tuple[str, ...]
    constraints: Mapping[str, Any]
    init: Params
    schema: Batch
    randomness: Mapping[str, list[noise.Draw]]
    clients: int
    rows: int
    unread: frozenset[str] = frozenset()
    resting: tuple[str, ...] = ()
    anchors: Mapping[str, PriorParameters] = field(default_factory=dict)
    reads: Mapping[str, frozenset[str]] = field(default_factory=dict)
    derived: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def guide_name(self) -> str:
        """The guide in words."""
        named = "__str__" in vars(type(self.guide))
        return str(self.guide) if named else "a guide of your own"

    @property
    def joint(self) -> bool:
        """Return whether the rows of a client depend on each other given all variables, as in a Gaussian process."""
        return any(site.joint for site in self.observed)

    @property
    def globals(self) -> list[Site]:
        """The model's global latent sites."""
        return [s for s in self.sites.values() if not s.local and not s.observed]

    @property
    def locals(self) -> list[Site]:
        """The model's local latent sites."""
        return [s for s in self.sites.values() if s.local and not s.observed]

    @property
    def latent(self) -> list[Site]:
        """The model's latent sites, global ones first."""
        return [*self.globals, *self.locals]

    @property
    def contexts(self) -> list[Site]:
        """The local latent sites that have an encoder."""
        return [s for s in self.locals if s.context]

    @property
    def observed(self) -> list[Site]:
        """The model's sites that have data."""
        return [s for s in self.likelihood if not s.factor]

    @property
    def likelihood(self) -> list[Site]:
        """The model's sites that have data, and its factors."""
        return [s for s in self.sites.values() if s.observed]

    def noise(self, keys: Tensor, draws: int, *, local: bool) -> dict[str, list[Tensor]]:
        """The noise of the guide's local (or global) sites.

        Args:
            keys: int64, ``(K,)`` for K clients, or ``()`` for the server. K keys with ``local=False``
                give each client its own draws of the global sites. The result has further dimensions of the keys,
                such as steps, in front.
            draws: S.
            local: the noise of the local sites, else of the global ones.

        Returns:
            Site name to tensors of shape ``(S, K, 1, ...)``, or ``(S, 1, 1, ...)`` for the server.
        """
        supplied = {}
        keys = keys.reshape(1, 1) if keys.ndim == 0 else keys[..., None, :, None]
        for name, parts in self.randomness.items():
            if (name in self.random) == local:
                continue
            path = noise.word(name), torch.arange(draws, device=keys.device)[:, None, None]
            supplied[name] = [
                draw(keys, self.schema.scale.dtype, (*path, number))
                for number, draw in enumerate(parts)
            ]
        return supplied

    @property
    def size(self) -> int:
        """The number of numbers in the global parameters and in one client's variables."""
        return self.variables + sum(value.numel() for value in self.init.values())

    @property
    def variables(self) -> int:
        """The number of numbers in one client's variables."""
        return sum(site.event_shape.numel() for site in self.locals)

    @property
    def points(self) -> int:
        """The number of values of a row's own variable at which the model runs at once."""
        return getattr(self.model, "points", 1)

    @property
    def terms(self) -> int:
        """The largest number of terms that the density of a row is the sum of."""
        return max(site.terms for site in self.likelihood)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The clients' discrete variables, which are summed out."""
        return getattr(self.model, "kinds", ())

    @property
    def conditional(self) -> list[Site]:
        """The observed sites with a client's variable integrated out in closed form."""
        return [s for s in self.observed if s.conditional]

    @property
    def in_training(self) -> list[Site]:
        """Those that are conditional on a client's own rows in the steps of a round too."""
        return [s for s in self.conditional if s.in_training]

    @property
    def laplace_params(self) -> list[str]:
        """The local parameters that the guide's ``laplace`` method gives in closed form."""
        return list(getattr(self.guide, "laplace_params", ()))

    def laplace(self, params: Mapping[str, Tensor], phi: Params, batch: Batch) -> Params:
        """The guide's closed form of the local parameters of K clients: ``(K, 1, ...)``."""
        return self.guide.laplace(dict(params), phi, batch)

    def context_unit(self, params: Mapping[str, Tensor], batch: Batch) -> Tensor | None:
        """The unit in which the guide's variables of K clients read θ, ``(K, 1, D)``; None if it has none."""
        unit = getattr(self.guide, "context_unit", None)
        return None if unit is None else unit(dict(params), batch)

    def unit_roots(self, phi: Params) -> Params:
        """By local parameter, C of K clients: a unit is a column of C^{−⊤}, or 1 / C where C is a vector."""
        roots = getattr(self.guide, "unit_roots", None)
        return {} if roots is None else roots(phi)

    @property
    def weights_draws(self) -> bool:
        """True if draws of (θ, w_i) are weighted by client i's ELBO term, as they are if q(w_i | θ) is the prior."""
        return bool(getattr(self.guide, "weights_draws", False))

    @property
    def local_draws(self) -> int:
        """Number of draws of w_i for each draw of θ, of which one is chosen by weight if draws are weighted."""
        return int(getattr(self.guide, "local_draws", 1))

    @property
    def particles(self) -> int:
        """Number of values of θ that the guide holds at once."""
        return int(getattr(self.guide, "particles", 1))

    @property
    def levels(self) -> tuple[float, ...]:
        """The rates at which q(θ) has to converge, one after the other, in a run without a number of rounds."""
        return getattr(getattr(self.guide, "family", None), "levels", (1.0,))

    def temper(self, batch: Batch) -> Batch:
        """Scale the rows' log likelihoods as the guide's weights of draws need it; by default leave them unchanged."""
        temper = getattr(self.guide, "temper", None)
        return batch if temper is None else temper(batch)

    def init_locals(self, batch: Batch) -> Params:
        """The initial local parameters of K clients: tensors of shape ``(K, ...)``."""
        at = handlers.given(batch.device, self.init, noise={}, starting=self.local_params)
        with at as recorder:
            self.guide(batch)
            if self.resting:
                self.model(batch.head())
        found = {}
        for name in self.local_params:
            seen = recorder.seen[name]
            value = transform_to(seen["constraint"]).inv(seen["value"])
            found[name] = value.detach().contiguous()
        return found

    def chunks(self, federation: Federation, copies: int = 1) -> Iterator[Tensor]:
        """The positions of all clients in chunks, so that ``copies`` of a chunk's rows and variables fit in memory."""
        return chunks(
            federation.lengths,
            *weight(self.variables, federation.numbers_per_row, copies, self.points),
        )

    def draw_blocks(self, clients: int, count: int) -> Iterator[slice]:
        """Parts of ``count`` draws, so that what the guide computes for them and K clients fits in memory."""
        together = max(1, PASS // (clients * self.workspace)) if self.workspace else count
        for start in range(0, count, together):
            yield slice(start, min(count, start + together))

    @property
    def workspace(self) -> int:
        """The size of what the guide computes q(w_i | θ) from, in numbers, for one client and one draw of θ."""
        return int(getattr(self.guide, "workspace", 0))

    @property
    def guide_of_globals(self) -> Callable[[Any], None]:
        """The guide as far as its global sites: itself, unless it has a shorter way to sample them."""
        return getattr(self.guide, "of_globals", self.guide)

    @property
    def learns_locals(self) -> bool:
        """Return whether gradient steps move the clients' parameters, as they do unless the guide says no."""
        return bool(getattr(self.guide, "learns_locals", True))

    @property
    def needs_rows(self) -> bool:
        """Return whether the guide reads the clients' rows, as a user's guide may."""
        return getattr(self.guide, "needs_rows", True)

    def starts(self, federation: Federation) -> Iterator[Batch]:
        """All clients in chunks, with the rows that the guide needs for its initial values."""
        for some in self.chunks(federation):
            rows = None if self.needs_rows else torch.zeros(len(some), 1, dtype=torch.int64)
            yield federation.batch(some, rows)
