"""The result of a fit: fitted parameters with the program and the data that they belong to.

All functions of this folder take a :class:`Fitted`. :class:`~bayesfed.Posterior` adds the methods that users call.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Self

import torch
from torch import Tensor

from bayesfed.algorithms.algorithm import Algorithm
from bayesfed.data.columns import UnknownName, client_name
from bayesfed.data.federation import Federation
from bayesfed.data.plural import plural
from bayesfed.elbo import noise
from bayesfed.elbo.program import Params, Program
from bayesfed.output.lazy_locals import LazyLocals


@dataclass(frozen=True, eq=False)
class Correction:
    """Draws of θ by importance sampling or by chains, used in place of draws from q(θ).

    Attributes:
        theta: equally weighted draws of the guide's global random site, ``(S, 1, 1, *event)``; of chains one draw of
            each after the other.
        khat: Pareto k-hat of the importance weights by which the draws were resampled; None of chains.
        laplace: q(w_i | θ) is a poor approximation, so that clients' variables too are drawn by importance sampling,
            with a Laplace approximation at each draw of θ as proposal: see :mod:`bayesfed.output.evidence`.
        chains: the number of chains, see :mod:`bayesfed.output.chains`; 1 of importance sampling.
        rhat: the largest R-hat of chains; None of importance sampling.
        ess: the effective number of the draws; of chains the smallest of all variables.
        log_weights: the log importance weights of all draws before they were resampled, ``(T,)``, of which the evidence
            of the model is the mean; None of chains, and of the draws of :meth:`bayesfed.Posterior.without`.
    """

    theta: Params
    khat: float | None
    laplace: bool = False
    chains: int = 1
    rhat: float | None = None
    ess: float | None = None
    log_weights: Tensor | None = None

    @property
    def count(self) -> int:
        """Number of draws."""
        return len(next(iter(self.theta.values())))

    def sample(self, count: int, key: Tensor) -> Params:
        """Choose ``count`` of the draws, ``(count, 1, 1, *event)``: at random, each equally often or once more.

        Of C chains they are evenly spaced: draw s is of chain s mod C, in the order in which it made its draws.
        """
        key = noise.fold(key, noise.word("corrected"))
        if self.chains == 1:
            places = torch.arange(count, device=key.device) % self.count
            at = noise.permuted(key, self.count, places)
        else:
            s, each = torch.arange(count, device=key.device), math.ceil(count / self.chains)
            place = (s // self.chains + noise.uniform(key, (1,))) / each
            length = self.count // self.chains
            at = (place * length).long().clamp(max=length - 1) * self.chains + s % self.chains
        return {name: value[at] for name, value in self.theta.items()}


class CorrectionResult(NamedTuple):
    """The outcome of importance sampling.

    Attributes:
        reliable: q(θ), or the correction if there is one, is a good approximation.
        correction: draws in place of q(θ); None if q(θ) needs none, or if it cannot be corrected.
        attempted: weights were computed, and were too uneven if the outcome is not reliable.
        certain: it is reliable, the weights have a finite variance and a large effective sample size.
    """

    reliable: bool
    correction: Correction | None = None
    attempted: bool = True
    certain: bool = False

    def confirms(self, early: bool) -> bool:
        """Return whether a run has its posterior; after an early end that must be certain."""
        return self.certain if early else self.reliable


@dataclass(frozen=True, eq=False)
class Fitted:
    """q(θ) Π_i q(w_i | θ), fitted to a federation.

    Attributes:
        program: the model and its guide.
        federation: the clients of the fit, or some of them, or new ones.
        params: the guide's global parameters, unconstrained.
        local_params: the guide's local parameters, unconstrained, one row per client. Under algorithms with stateless
            clients they are computed from θ; those of large networks when they are first read.
        history: per-round figures ``elbo``, ``seconds`` and ``clients``, each of shape ``(rounds,)``.
        algorithm: the algorithm and its settings.
        seed: the run's seed.
        epsilon: ε of differential privacy that the run has spent; None for a run without privacy.
        compiled: a description of whether the run was compiled, and why; empty if unknown.
        moving: estimated distance of q(θ) from convergence at the end of the run, by global site: in standard
            deviations of q or in its log standard deviation, if above a quarter. None if there were too few rounds for
            an estimate. Always empty for point estimates.
        rising: estimated number of nats by which the ELBO would have risen further, if it is large; None as above.
        converged: True if the run stopped because it had converged, False if it reached the largest number of rounds,
            None if the number of rounds was given.
        correction: draws of θ by importance sampling that replace draws from q(θ), see
            :mod:`bayesfed.output.correction`.
        correctable: False if importance weights were too uneven to correct q(θ) by.
        resampled: the clients whose variables are drawn by importance sampling in place of q(w_i | θ), see
            :mod:`bayesfed.output.poor_variables`.
        precision: the largest Monte Carlo error of the globals' means that was asked for, in their standard deviations.
    """

    program: Program
    federation: Federation
    params: Params
    local_params: Mapping[str, Tensor]
    history: Mapping[str, Tensor]
    algorithm: Algorithm
    seed: int
    epsilon: float | None = None
    compiled: str = ""
    moving: Mapping[str, float] | None = None
    rising: float | None = None
    converged: bool | None = None
    correction: Correction | None = None
    correctable: bool = True
    resampled: frozenset[str] = frozenset()
    precision: float | None = None

    @property
    def draws_needed(self) -> float:
        """The effective number of draws of θ that :attr:`precision` needs; 0 where none is given."""
        return 0.0 if self.precision is None else self.precision**-2

    @property
    def monte_carlo_error(self) -> float | None:
        """The largest Monte Carlo error of the means of the globals over all draws that the fit has.

        In posterior standard deviations. None without a correction: draws from q(θ) are as many as are asked for.
        """
        if self.correction is None or self.correction.ess is None:
            return None
        return self.correction.ess**-0.5

    def check_is_of_all(self, remedy: str) -> None:
        """Raise a ValueError with a remedy if this is not the posterior of all clients of the fit."""
        if len(self.federation) != self.program.clients:
            raise ValueError(
                f"this is the posterior of {len(self.federation):,} of the fit's "
                f"{plural(self.program.clients, 'client')}: {remedy}"
            )

    @property
    def title(self) -> str:
        """The algorithm, its guide, the rounds, the clients and the variables, in one line."""
        shared = [s.name for s in self.program.globals] or list(self.program.init)
        globals_ = ", ".join(shared[:8] + ["..."] * (len(shared) > 8)) or "none"
        locals_ = ", ".join(s.name for s in self.program.locals) or "none"
        rounds = len(self.history["elbo"])
        ended = "converged in " if self.converged else ""
        return (
            f"Posterior: {self.algorithm} ({self.program.guide_name}), {ended}{plural(rounds, 'round')}, "
            f"{plural(len(self.federation), 'client')}; globals {globals_}; locals {locals_}"
            + ("" if self.epsilon is None else f"; ε = {self.epsilon:.3g}")
        )

    @property
    def laplace(self) -> bool:
        """True if clients' variables are drawn with Laplace approximations as proposals, see :class:`Correction`."""
        return self.correction is not None and self.correction.laplace

    @cached_property
    def sufficient(self) -> Self:
        """The same q, over the rows that the likelihood is computed from (:attr:`bayesfed.Federation.sufficient`)."""
        few = self.federation.moments
        return self if few is None else replace(self, federation=few)

    @property
    def rows_read(self) -> int:
        """The number of rows that the likelihood of all clients of the fit is computed from."""
        few = self.federation.moments
        return self.program.rows if few is None else few.rows

    def key(self, seed: int, word: str = "posterior") -> Tensor:
        """Return the root noise key of a seed and a purpose, on the federation's device."""
        return noise.fold(noise.key(seed), noise.word(word)).to(self.federation.device)

    def params_of(self, chunk: Tensor) -> Params:
        """Return all global parameters, and the local ones of the clients at positions ``chunk``."""
        return self.params | {name: value[chunk] for name, value in self.local_params.items()}

    def select(self, clients: Iterable[str]) -> Self:
        """Return the posterior of some clients, by name. Their draws are the same as among all clients.

        Raises:
            KeyError: a client took no part in the fit.

        Example:
            >>> import bayesfed as bf
            >>> from bayesfed import datasets, models
            >>> posterior = bf.fit(models.eight_schools, datasets.eight_schools(), rounds=2)
            >>> posterior.select(["C", "A"]).sample(100)["theta"].shape
            torch.Size([100, 2])
        """
        names = tuple(client_name(name) for name in clients)
        if names == self.federation.names:
            return self
        self.check_known(names)
        few, own = self.federation.select(names), self.local_params
        if isinstance(own, LazyLocals) and not own.computed:
            return replace(self, federation=few, local_params=own.of(few))
        position = self.federation.index(names)
        own = {name: value[position] for name, value in own.items()}
        return replace(self, federation=few, local_params=own)

    def check_known(self, clients: Iterable[str]) -> None:
        """Raise a KeyError that names the first client, if any, that took no part in the fit."""
        known = set(self.federation.names)
        for name in clients:
            if name not in known:
                raise UnknownName(
                    f"client {name!r} took no part in the fit: use "
                    "posterior.personalize(its data) first, which gives its local posterior"
                )
