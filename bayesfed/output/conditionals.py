"""The posteriors of clients' variables given draws of θ, whose densities are computed for many draws at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from pyro import poutine
from torch import Tensor

from bayesfed.data.batch import Batch
from bayesfed.elbo import handlers
from bayesfed.elbo.program import Params, Program
from bayesfed.guides.family import GLOBAL
from bayesfed.guides.hierarchical import LOCAL
from bayesfed.tracing.blocks import in_blocks


def has_block(program: Program) -> bool:
    """Return whether all local variables are one Normal vector in the guide, as this estimate needs."""
    return set(program.randomness) - set(program.random) == {LOCAL}


def is_laplace(program: Program) -> bool:
    """Return whether q(w_i | θ) is Laplace's approximation at θ, see :mod:`bayesfed.guides.client_laplace`."""
    return has_block(program) and getattr(program.guide, "structure", None) is not None


def is_exact(program: Program) -> bool:
    """Return whether q(w_i | θ) is Laplace's approximation and the posterior, whose log density is quadratic."""
    return is_laplace(program) and program.guide.structure.quadratic


def is_inexact(program: Program) -> bool:
    """Return whether q(w_i | θ) is Laplace's approximation, but not the posterior."""
    return is_laplace(program) and not is_exact(program)


def rows_width(program: Program, batch: Batch) -> int:
    """Return how many numbers the clients' rows hold for one draw of θ and one value of their variables, about."""
    rows = batch.mask.shape[1] * program.points
    return len(batch) * max(rows, *(value[0].numel() for value in batch.fields.values()))


class Conditionals(NamedTuple):
    """The posteriors p(w_i | θ_s, D_i) of K clients' variables at S draws of θ.

    Attributes:
        program: the model and its guide.
        params: parameters of the program and of these clients.
        theta: draws of the guide's global sites, ``(S, 1, 1, *event)``.
        batch: the clients' rows.
        size: S.
    """

    program: Program
    params: Mapping[str, Tensor]
    theta: Mapping[str, Tensor]
    batch: Batch
    size: int

    def at(self, draws: Tensor) -> Conditionals:
        """Return those at some of the draws, by position."""
        some = {name: value[draws] for name, value in self.theta.items()}
        return self._replace(theta=some, size=len(draws))

    def of_clients(self, clients: Tensor) -> Conditionals:
        """Return those of some of the clients, by position."""
        own = self.program.local_params
        params = {n: value[clients] if n in own else value for n, value in self.params.items()}
        return self._replace(params=params, batch=self.batch.select(clients))

    @property
    def z(self) -> Tensor:
        """The guide's global vector, ``(S, 1, 1, D)``, D = 0 if it has none."""
        return self.theta.get(GLOBAL, self.batch.scale.new_zeros(self.size, 1, 1, 0))

    @torch.no_grad()
    def block(self) -> Any:
        """Return q(u | θ_s), over ``(S, K, 1, P)``."""
        with handlers.given(self.batch.device, self.params, {}, self.theta, self.size):
            rows = self.batch if self.program.needs_rows else self.batch.head()
            nodes = poutine.trace(self.program.guide).get_trace(rows).nodes
        return nodes[LOCAL]["fn"].detached

    @property
    def width(self) -> int:
        """The result of :func:`rows_width`."""
        return rows_width(self.program, self.batch)

    def log_joint(self, u: Tensor) -> Tensor:
        """Compute log p(u, D_i | θ_s) of values of the block ``(R, S, K, 1, P)``: ``(R, S, K)``."""
        z = self.z.repeat(len(u), 1, 1, 1)
        (found,) = self.run(log_joint, self.width, u.flatten(0, 1), z)
        return found.unflatten(0, u.shape[:2])

    def run(self, function: Any, numbers: int, *draws: Tensor) -> list[Tensor]:
        """Compute a function of (program, params, rows, draws) for blocks of draws."""
        return in_blocks(function, self.program, (self.params, self.batch), draws, numbers)


def log_joint(program: Program, params: Params, batch: Batch, u: Tensor, z: Tensor) -> list[Tensor]:
    """Compute log p(u, D_i | θ) of values of the block ``(S, K, 1, P)`` at z ``(S, 1, 1, D)``: ``(S, K)``."""
    found = program.guide.block_log_joint(params, batch, u, z)
    return [torch.as_tensor(found).expand(len(z), len(batch))]


@torch.no_grad()
def normal_prior(given: Conditionals) -> tuple[Tensor, Tensor]:
    """Return location and scale of the block's Normal priors, over ``(S, K, 1, P)``; infinite scales of others."""
    program, params, _, batch, size = given
    with handlers.given(batch.device, params, noise={}, draws=size):
        prior = program.guide.block_prior(given.z, batch.head())
    return prior.loc, prior.scale


def has_normal_prior(given: Conditionals) -> bool:
    """Return whether the clients' variables are a block with Normal priors."""
    return has_block(given.program) and bool(normal_prior(given)[1].isfinite().all())
