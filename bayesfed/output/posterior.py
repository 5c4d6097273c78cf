"""The fitted posterior: draws, predictions, log-likelihoods and new clients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyro.distributions as dist
import torch
from pyro import poutine
from torch import Tensor
from torch.distributions import MixtureSameFamily

from bayesfed.algorithms.protocol import Algorithm
from bayesfed.checks.data import check_data
from bayesfed.data.columns import UnknownName
from bayesfed.data.federation import Federation, Model
from bayesfed.elbo import noise
from bayesfed.elbo.program import Params, Program
from bayesfed.engine.stopping.drift import caveat
from bayesfed.output import checkpoint, dependent_rows, khat
from bayesfed.output.correction import Correction, weighed
from bayesfed.output.draws import derived, elbo, key_of, of_kinds, replayed, sampled, weighted
from bayesfed.output.mixture import by_row, predictive
from bayesfed.output.personal import OnDemand, gathered, personal
from bayesfed.tracing.compiler import Compiler, using
from bayesfed.vmap.mixtures import ClientMixture

if TYPE_CHECKING:
    import arviz as az
    import xarray as xr


@dataclass(frozen=True, eq=False)
class Posterior:
    """q(θ) Π_i q(w_i | θ), fitted to a federation.

    Attributes:
        program: the model and its guide.
        federation: the clients that it was fitted to.
        params: the guide's global parameters, unconstrained.
        local_params: the guide's local parameters, unconstrained, a row per client. Where clients keep nothing from
            round to round they are made from θ, of large networks when somebody asks for them.
        history: per-round figures ``elbo``, ``seconds`` and ``clients``, each of shape ``(rounds,)``.
        algorithm: the algorithm and its settings.
        seed: the run's seed.
        epsilon: ε of differential privacy that the run has spent; None for a run without privacy.
        compiled: whether the run was compiled, and why; empty where it is not known.
        moving: about how far q(θ) had still to go in the end, by global site: in standard deviations of q, or in its
            log standard deviation, where that is more than a quarter. None where there were too few rounds to tell.
            Points are never said to move.
        rising: about how many nats the ELBO had still to rise in the end, where that is no trifle; None as above.
        settled: whether the run stopped by itself, as q(θ) moved no more, or went on to the bound on its rounds. None
            where it was given a number of rounds.
        correction: draws that stand for q(θ), see :mod:`bayesfed.output.correction`.
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
    settled: bool | None = None
    correction: Correction | None = None

    @cached_property
    def khat(self) -> float | None:
        """Pareto's k of the weights p(D, θ, w) / q(θ, w): above 0.7 q is some way from the posterior.

        Of a corrected posterior that of the weights by which its draws were taken. None where q(θ) has no density,
        under privacy, and where the clients' rows are too many to ask.
        """
        return khat.khat(self) if self.correction is None else self.correction.khat

    def corrected(self) -> Posterior:
        """The same with draws of θ that all clients have weighed in place of q(θ)'s, where these can be had.

        See :mod:`bayesfed.output.correction`. SFVI's fits are corrected as they end.

        Raises:
            ValueError: this is not the posterior of all clients of the fit, whose rows are what draws are weighed by.
        """
        if len(self.federation) != self.program.clients:
            raise ValueError(
                f"this is the posterior of {len(self.federation)} clients, the fit had {self.program.clients}: correct "
                "the posterior of the fit, then select or personalize"
            )
        return replace(self, correction=weighed(replace(self, correction=None)).correction)

    @property
    def caveat(self) -> str:
        """What must be known before its numbers are used: that it was still moving, or is far from the posterior."""
        moving = caveat(self.moving, self.rising, len(self.history["elbo"]))
        return moving or khat.caveat(self.khat)

    def __repr__(self) -> str:
        globals_ = ", ".join(s.name for s in self.program.globals) or "none"
        locals_ = ", ".join(s.name for s in self.program.locals) or "none"
        rounds = len(self.history["elbo"])
        ended = "settled in " if self.settled else ""
        return (
            f"Posterior: {type(self.algorithm).__name__} ({self.program.guide_name}), {ended}{rounds:,} rounds, "
            f"{len(self.federation):,} clients; globals {globals_}; locals {locals_}"
            + ("" if self.epsilon is None else f"; ε = {self.epsilon:.3g}")
            + (self.caveat and f"\n{self.caveat}")
        )

    def sample(
        self, num_samples: int = 1000, *, seed: int = 0, centre: bool = False
    ) -> dict[str, Tensor]:
        """Independent draws of every latent site.

        Where the algorithm weighs draws, as for particles, θ is drawn from q(θ), and of several draws of a client's
        variables given θ one is taken by its weight.

        Args:
            num_samples: S.
            seed: of the draws.
            centre: every draw is the centre of the guide (zero noise) instead, the posterior mean where it is Normal;
                of a posterior with particles one of them.

        Returns:
            Site name to draws: globals ``(S, *event)``, locals ``(S, N, *event)``.
        """
        found: dict[str, list[Tensor]] = {}
        for _, draws in sampled(self, num_samples, seed, centre=centre):
            for name, value in draws.values.items():
                found.setdefault(name, []).append(value.squeeze(2))
        return {
            name: torch.cat(parts, 1) if self.program.sites[name].local else parts[0].squeeze(1)
            for name, parts in found.items()
        }

    def select(self, clients: Iterable[str]) -> Posterior:
        """The posterior of some clients only, by name; their draws stay as they are among all.

        Raises:
            KeyError: a client took no part in the fit.

        Example:
            >>> import bayesfed as bf
            >>> from bayesfed import datasets, models
            >>> posterior = bf.fit(models.eight_schools, datasets.eight_schools(), rounds=2)
            >>> posterior.select(["C", "A"]).sample(100)["theta"].shape
            torch.Size([100, 2])
        """
        names = tuple(str(name) for name in clients)
        if names == self.federation.names:
            return self
        self.check_known(names)
        few, own = self.federation.select(names), self.local_params
        if isinstance(own, OnDemand) and not own.made:
            return replace(self, federation=few, local_params=own.of(few))
        position = self.federation.index(names)
        own = {name: value[position] for name, value in own.items()}
        return replace(self, federation=few, local_params=own)

    def predict(
        self, federation: Federation | None = None, num_samples: int = 1000, *, seed: int = 0
    ) -> dict[str, Tensor]:
        """Draws from the posterior predictive.

        Args:
            federation: rows to predict, of clients that this posterior knows (:meth:`personalize` adds
                new ones); the observed fields may be absent, if the model reads them with
                ``obs.get``. By default the rows that it was fitted to.
            num_samples: S.
            seed: of the draws.

        Returns:
            Observed site to draws ``(S, rows, *event)``, rows in the federation's order; ``(S, N, *event)``
            for a site outside the observations plate.
        """
        federation = self.federation if federation is None else federation
        few, model = self.select(federation.names), poutine.uncondition(self.program.model)
        with noise.seeded(seed):
            if self.program.joint:
                (site,) = self.program.observed
                return {site.name: dependent_rows.predict(few, federation, num_samples, seed)}
            kind = weighted if self.algorithm.weighs else sampled
            parts: dict[str, list[Tensor]] = {site.name: [] for site in self.program.observed}
            for chunk, draws in kind(few, num_samples, seed, federation):
                batch = federation.batch(chunk)
                if self.algorithm.weighs:
                    streams = few.federation.stream_ids[chunk]
                    keys = noise.fold(key_of(self, seed, "predict"), streams)
                    draws = draws.picked(1, num_samples, keys)
                nodes = replayed(few, model, draws, chunk, batch)
                for site in self.program.observed:
                    value = nodes[site.name]["value"]
                    parts[site.name].append(by_row(value, site, batch, num_samples))
        return {name: torch.cat(part, 1) for name, part in parts.items()}

    def log_likelihood(
        self, federation: Federation | None = None, num_samples: int = 1000, *, seed: int = 0
    ) -> dict[str, Tensor]:
        """log p(observation | draw) of every row, for the draws that :meth:`sample` gives.

        Where clients have discrete variables, rows that the posterior was fitted to are given all the others of their
        client, as leave-one-out needs them, and new ones given the client's own.

        Args:
            federation: rows of clients that this posterior knows; by default those it was fitted to.
            num_samples: S.
            seed: of the draws.

        Returns:
            Observed site, or factor, to ``(S, rows)``, NaN where the outcome is missing, or ``(S, N)`` for a site
            outside the observations plate.
        """
        federation = self.federation if federation is None else federation
        few, model = self.select(federation.names), self.program.model
        parts: dict[str, list[Tensor]] = {site.name: [] for site in self.program.likelihood}
        for chunk, draws in sampled(few, num_samples, seed, federation):
            batch = federation.batch(chunk)
            nodes = replayed(few, model, draws, chunk, batch)
            for site in self.program.likelihood:
                fn, value = nodes[site.name]["fn"], nodes[site.name]["value"]
                among = isinstance(fn, ClientMixture) and federation is self.federation
                log_prob = fn.left_out(value) if among else fn.log_prob(value)
                if federation.gaps and site.per_row:
                    log_prob = log_prob.where(nodes[site.name]["mask"], torch.nan)
                parts[site.name].append(by_row(log_prob, site, batch, num_samples))
        return {name: torch.cat(part, 1) for name, part in parts.items()}

    def derived(
        self, federation: Federation | None = None, num_samples: int = 1000, *, seed: int = 0
    ) -> dict[str, Tensor]:
        """What the model names by ``pyro.deterministic``, for the draws that :meth:`sample` gives.

        Args:
            federation: rows of clients that this posterior knows; by default those it was fitted to.
            num_samples: S.
            seed: of the draws.

        Returns:
            Name to ``(S, *)`` for what lies outside the clients plate, ``(S, N, *)`` inside it, ``(S, rows, *)`` inside
            the observations plate.

        Example:
            >>> import bayesfed as bf, pyro, pyro.distributions as dist
            >>> def model(federation):
            ...     mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
            ...     with federation.clients():
            ...         a = pyro.sample("a", dist.Normal(mu, 1.0))
            ...         pyro.deterministic("effect", a - mu)
            ...         with federation.observations() as obs:
            ...             pyro.sample("y", dist.Normal(a, 1.0), obs=obs.get("y"))
            >>> data = bf.Federation.from_arrays({"a": {"y": [1.0, 3.0]}, "b": {"y": [2.0]}})
            >>> bf.fit(model, data, rounds=2).derived(num_samples=100)["effect"].shape
            torch.Size([100, 2])
        """
        federation = self.federation if federation is None else federation
        few = self.select(federation.names)
        parts: dict[str, list[Tensor]] = {name: [] for name in self.program.derived}
        for chunk, draws in sampled(few, num_samples, seed, federation):
            batch = federation.batch(chunk)
            for name, found in derived(few, draws, chunk, batch).items():
                if found.local:
                    parts[name].append(by_row(found.value, found, batch, draws.count))
                elif not parts[name]:
                    shape = (draws.count, *found.value.shape[3:])
                    parts[name].append(found.value[:, 0, 0].expand(shape))
        return {name: torch.cat(part, min(1, part[0].ndim - 1)) for name, part in parts.items()}

    def probabilities(
        self,
        federation: Federation | None = None,
        num_samples: int = 100,
        *,
        seed: int = 0,
        centre: bool = False,
    ) -> dict[str, Tensor]:
        """Class probabilities of every row, averaged over draws of the posterior.

        Args:
            federation: rows of clients that this posterior knows; by default those it was fitted to.
            num_samples: S.
            seed: of the draws.
            centre: predict with the posterior's centre instead of draws, see :meth:`sample`.

        Returns:
            Observed site to ``(rows, classes)``, of classes that are the values that it can have, in order.

        Raises:
            ValueError: the values of an observed site cannot be listed.
        """
        federation = self.federation if federation is None else federation
        few, model = self.select(federation.names), self.program.model
        parts: dict[str, list[Tensor]] = {site.name: [] for site in self.program.observed}
        found = (
            sampled(few, 1, seed, federation, centre=True)
            if centre
            else weighted(few, num_samples, seed, federation)
        )
        for chunk, draws in found:
            batch = federation.batch(chunk)
            nodes = replayed(few, model, draws, chunk, batch)
            weight = draws.log_probabilities(len(batch)).exp().to(batch.scale)[..., None, None]
            for site in self.program.observed:
                fn = nodes[site.name]["fn"]
                fn = fn.base_dist if isinstance(fn, dist.MaskedDistribution) else fn
                if not fn.has_enumerate_support or fn.event_shape:
                    raise ValueError(f"site {site.name!r} is {type(fn).__name__}: no classes")
                log_probs = fn.log_prob(fn.enumerate_support(expand=False)).movedim(0, -1)
                probs = (weight * log_probs.exp()).sum(0, keepdim=True)
                parts[site.name].append(by_row(probs, site, batch, 1)[0])
        return {name: torch.cat(part) for name, part in parts.items()}

    def kinds(self, num_samples: int = 1000, *, seed: int = 0) -> dict[str, Tensor]:
        """The probabilities of the clients' discrete variables, which the fit summed out, given all data.

        Args:
            num_samples: draws of all else that they are averaged over.
            seed: of the draws.

        Returns:
            Discrete site inside the clients plate to ``(N, values)``, in the order in which the site's distribution
            lists them; empty where there is none.

        Example:
            >>> import bayesfed as bf, pyro, pyro.distributions as dist
            >>> def model(federation):
            ...     level = pyro.sample("level", dist.Normal(0.0, 1.0))
            ...     with federation.clients():
            ...         high = pyro.sample("high", dist.Bernoulli(0.5))
            ...         with federation.observations() as obs:
            ...             pyro.sample("y", dist.Normal(level + 9 * high, 1.0), obs=obs.get("y"))
            >>> data = bf.Federation.from_arrays({"a": {"y": [9.0, 8.0]}, "b": {"y": [0.5]}})
            >>> bf.fit(model, data).kinds(100)["high"].argmax(1)
            tensor([1, 0])
        """
        parts: dict[str, list[Tensor]] = {name: [] for name in self.program.kinds}
        for chunk, draws in sampled(self, num_samples, seed) if parts else ():
            log_p, sizes = of_kinds(self, draws, chunk)
            grid = log_p.squeeze(2).softmax(-1).mean(0).unflatten(-1, tuple(sizes.values()))
            for axis, found in enumerate(parts.values(), 1):
                others = [a for a in range(1, grid.ndim) if a != axis]
                found.append(grid.sum(others) if others else grid)
        return {name: torch.cat(found) for name, found in parts.items()}

    def check_known(self, clients: Iterable[str]) -> None:
        """Fail on a client that took no part."""
        known = set(self.federation.names)
        for name in clients:
            if name not in known:
                raise UnknownName(
                    f"client {name!r} took no part in the fit: use "
                    "posterior.personalize(its data) first, which gives its local posterior"
                )

    def predictive(
        self, federation: Federation | None = None, num_samples: int = 100, *, seed: int = 0
    ) -> MixtureSameFamily:
        """The predictive distribution of every row; see :func:`bayesfed.output.mixture.predictive`."""
        federation = self.federation if federation is None else federation
        return predictive(self, federation, num_samples, seed=seed)

    def elbo(self, num_samples: int = 1000, *, seed: int = 0) -> Tensor:
        """The ELBO of all clients, one value per draw: shape ``(S,)``; its mean estimates the ELBO."""
        return elbo(self, num_samples, seed)

    def personalize(
        self,
        federation: Federation,
        *,
        steps: int | None = None,
        lr: float | None = None,
        batch_size: int | None = None,
        seed: int = 0,
    ) -> Posterior:
        """The local posteriors of clients that took no part, q(θ) staying as it is.

        Each client works on its own variables alone; nothing leaves it and no other client is asked.

        Args:
            federation: the new clients and their data; what they have no outcomes of is as their covariates and q(θ)
                tell.
            steps: by default as many as the algorithm's ``personal_steps``.
            lr: the rate of the steps; by default the algorithm's.
            batch_size: rows per client and step; by default all.
            seed: of the noise.

        Returns:
            A posterior over the new clients.
        """
        key = noise.fold(noise.key(seed), noise.word("personalize"))
        federation = federation.with_gaps(self.federation)
        check_data(self.program, federation)
        with using(Compiler()):
            parts = personal(
                self.algorithm,
                self.program,
                self.params,
                federation,
                batch_size,
                key,
                None,
                steps,
                lr,
            )
            return replace(self, federation=federation, local_params=gathered(federation, parts))

    def to_arviz(self, num_samples: int = 1000, *, seed: int = 0) -> az.InferenceData | xr.DataTree:
        """Everything as ArviZ has it; see :func:`bayesfed.output.inference_data.to_arviz`."""
        from bayesfed.output.inference_data import to_arviz

        return to_arviz(self, num_samples, seed=seed)

    def save(self, path: str | Path) -> None:
        """Write to one safetensors file, atomically; see :func:`bayesfed.output.checkpoint.save`."""
        checkpoint.save(self, path)

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: Model,
        federation: Federation,
        *,
        guide: Callable[[Any], Any] | None = None,
        other_rows: bool = False,
    ) -> Posterior:
        """Read what :meth:`save` wrote; see :func:`bayesfed.output.checkpoint.load`."""
        found = checkpoint.load(path, model, federation, guide=guide, other_rows=other_rows)
        return cls(**found)
