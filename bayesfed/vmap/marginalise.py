"""Marginalise over latent variables of a row and discrete variables of a client.

    p(y_k | y_<k) = Σ_z ∫ p(z, u, y_<k) p(y_k | z, u, y_<k) du / p(y_<k)

z are discrete variables, and u is one continuous variable of the row. For each value of z, and for nodes of u around
the mode of each row's integrand (:mod:`bayesfed.vmap.quadrature`), the program runs again up to y_k, with nodes as
further draws. For a discrete variable of a client this happens within each of its values
(:class:`~bayesfed.vmap.mixtures.ClientMixture`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.distributions import biject_to

from bayesfed.elbo.moments import moments
from bayesfed.elbo.sites import name_of
from bayesfed.vmap import distributions, quadrature
from bayesfed.vmap.levels import Layout, Levels
from bayesfed.vmap.mixtures import ClientMixture, Mixture, masked, repeat_draws, split_copies
from bayesfed.vmap.quadrature import Place
from bayesfed.vmap.rerun import Marginalised, Rerun, Values


class EarlierSite(NamedTuple):
    """A site after a variable that is summed or integrated out.

    Attributes:
        distribution: the distribution of the site.
        value: its value.
        in_rows: whether it lies inside the observations plate.
        within: whether it does, and a variable of the row comes before it.
    """

    distribution: Mixture
    value: Tensor
    in_rows: bool
    within: bool


@dataclass
class Marginalisation:
    """The variables of rows and clients that a run sums or integrates out.

    Attributes:
        run: runs the program again, up to a site.
        levels: the levels of vmap.
        nodes: the number of nodes of an integral.
        known: the evidence of the clients' own rows for their discrete variables, see :class:`handlers.Known`.
        marginalised: the variables, in order.
        before: the earlier sites that depend on them.
        places: location and scale of the integrand at the last site, by the values of the discrete variables.
    """

    run: Callable[..., Rerun]
    levels: Levels
    nodes: int = quadrature.NODES[0]
    known: Tensor | None = None
    marginalised: dict[str, Marginalised] = field(default_factory=dict)
    before: list[EarlierSite] = field(default_factory=list)
    places: dict[tuple[tuple[str, int], ...], Place] = field(default_factory=dict)

    def add(
        self,
        name: str,
        fn: Any,
        layout: Layout,
        of_row: bool,
        values: Tensor | None,
        data: Tensor | None = None,
    ) -> Tensor:
        """Set a marginalised variable to its first value, or to the centre of its prior.

        Args:
            name: the name of the site.
            fn: its distribution inside vmap.
            layout: the layout of the site.
            of_row: whether it lies inside the observations plate.
            values: its possible values, see :meth:`values_of`.
            data: the data of an observed site, whose missing values are the variable.
        """
        batch, place = self._batch(layout.width), None
        with temporarily_clear_interpreter_stack():
            if values is not None:
                value = values[0].expand(batch)
            else:
                distribution = distributions.batched(fn, self.levels, layout)
                at, lead = moments(distribution), (1, *batch)[-3:]
                value = biject_to(distribution.support)(at.loc).expand(batch)
                place = Place(at.loc.expand(lead).detach(), at.scale.expand(lead).detach())
        self.marginalised[name] = Marginalised(
            layout, of_row, value if data is None else data, values, place
        )
        return value

    def values_of(self, name: str, fn: Any, layout: Layout, of_row: bool) -> Tensor | None:
        """All possible values of a variable inside vmap; None if it is continuous.

        Raises:
            ValueError: the variable cannot be summed or integrated out.
        """
        discrete = fn.support.is_discrete
        if layout.own or fn.event_dim or (discrete and not fn.has_enumerate_support):
            kind = "discrete" if discrete else "of a row"
            raise ValueError(
                f"latent site {name!r} is {kind}, and {name_of(fn)} has no list of its values, or it is a "
                f"vector: one number a {'row' if of_row else 'client'}, Bernoulli or Categorical, is summed out"
                f"{', a continuous one integrated out' if of_row else ''}. A PyroSample attribute is sampled where it "
                "is first read: read it outside, if it is not one of these"
            )
        if discrete:
            return fn.enumerate_support(expand=False).flatten()
        if self._number is not None:
            raise ValueError(
                f"latent sites {self._number!r} and {name!r} are continuous, and of a row: one is integrated out, not "
                "two. Write the outcomes' distribution with one of them: of two Normals that are added, their sum"
            )
        return None

    def is_mixture(self, layout: Layout, in_rows: bool) -> bool:
        """Return whether the distribution of a site is a mixture over earlier variables."""
        return layout.local and any(in_rows or not v.of_row for v in self.marginalised.values())

    def record(self, name: str, distribution: Mixture, value: Tensor, in_rows: bool) -> None:
        """Record a site and its value."""
        within = in_rows and any(v.of_row for n, v in self.marginalised.items() if n != name)
        self.before.append(EarlierSite(distribution, value, in_rows, within))

    def distribution(
        self, name: str, first: Any, in_rows: bool, value: Tensor | None, mask: Any
    ) -> Mixture:
        """The mixture of a site with data ``value``; ``first`` is its distribution in the program's own run."""
        kinds = [n for n, one in self.marginalised.items() if not one.of_row]
        size = prod(self._sizes[n] for n in kinds)
        within = in_rows and len(kinds) < len(self.marginalised)
        batch = self._batch(first.batch_shape[-1])
        before = evidence = torch.zeros(*batch, size)
        for seen in self.before:
            if seen.in_rows:
                rows = seen.distribution.rows(seen.value, size)
                before, evidence = before + rows, evidence + rows * seen.within
        if not kinds:
            return self._within(name, {}, first, evidence.squeeze(-1), value, mask)
        weights, components = [], []
        for k, kind in enumerate(self._each(kinds)):
            again = self._again(name, dict.fromkeys(self._sizes, 0) | kind)
            weights.append(again.log_client.expand(*batch[:-1], 1))
            components.append(
                self._within(name, kind, again.distribution, evidence[..., k], value, mask)
                if within
                else again.distribution
            )
        if self.known is not None:
            weight = self.known.unflatten(-1, (size, -1)).logsumexp(-1)
        else:
            weight = torch.stack(weights, -1)
            for seen in self.before:
                if not seen.in_rows:
                    weight = weight + seen.distribution.rows(seen.value, size)
        return ClientMixture(
            weight,
            components,
            {n: self._sizes[n] for n in kinds},
            before=before,
            mask=mask,
            known=self.known is not None,
            first=first,
        )

    def _within(
        self,
        name: str,
        kind: Mapping[str, int],
        first: Any,
        evidence: Tensor,
        value: Tensor | None,
        mask: Any,
    ) -> Mixture:
        """The mixture over the variables of a row; ``kind`` has the numbers of the values of the client's variables."""
        batch, found = self._batch(first.batch_shape[-1]), []
        sizes = {n: size for n, size in self._sizes.items() if n not in kind}
        if self._number is None:
            for nth in self._each(sizes, kind):
                again = self._again(name, nth)
                weight = again.log_weight.expand(batch)
                found.append((weight[..., None], again.distribution))
            variables, copies = sizes, 1
        else:
            copies = self.nodes
            for nth in self._each(sizes, kind):
                log_f = partial(self._log_joint, name, nth, value, mask)
                place = quadrature.find_modes(log_f, self._place(nth))
                self.places[tuple(nth.items())] = place
                points, log_weight = quadrature.nodes(place, self.nodes)
                again = self._at(name, nth, points)
                weight = split_copies(again.log_weight, batch, copies)
                log_weight = split_copies(log_weight.flatten(0, 1), batch, copies)
                found.append((weight + log_weight, again.distribution))
            variables = sizes | {self._number: copies}
        weights, components = zip(*found, strict=True)
        return Mixture(
            torch.cat(torch.broadcast_tensors(*weights), -1),
            components,
            variables,
            log_evidence=evidence,
            mask=mask,
            copies=copies,
            first=first,
            sampler=None
            if self._number is None
            else partial(self._sampled_mixture, name, sizes, kind),
        )

    def _sampled_mixture(
        self, name: str, sizes: Mapping[str, int], kind: Mapping[str, int]
    ) -> Mixture:
        """The mixture that a site is sampled from, at a draw of the continuous variable given the earlier sites."""
        found = []
        for nth in self._each(sizes, kind):
            log_f = partial(self._log_joint, name, nth, None, None)
            place = quadrature.find_modes(log_f, self._place(nth))
            points, log_weight = quadrature.nodes(place, self.nodes)
            evidence = (log_f(points) + log_weight).logsumexp(1)
            u = quadrature.sample(log_f, place)
            again = self._at(name, nth, u.unsqueeze(1))
            batch = self._batch(u.shape[-1])
            found.append((evidence.reshape(batch), again.distribution))
        weights, components = zip(*found, strict=True)
        return Mixture(torch.stack(weights, -1), components, sizes)

    def _log_joint(
        self, name: str, nth: Mapping[str, int], value: Tensor | None, mask: Any, points: Tensor
    ) -> Tensor:
        """log p(z, u, y_<k) at points ``(S, Q, K, B)`` of u, times p(y_k | z, u, y_<k) if its value is given."""
        again = self._at(name, nth, points)
        found = again.log_weight
        if value is not None:
            own = repeat_draws(value, points.shape[1], len(again.distribution.event_shape))
            at = repeat_draws(mask, points.shape[1], 0) if isinstance(mask, Tensor) else mask
            found = found + masked(again.distribution.log_prob(own), at)
        return found.expand(points.flatten(0, 1).shape).reshape(points.shape)

    def _at(self, name: str, nth: Mapping[str, int], points: Tensor) -> Rerun:
        assert self._number is not None
        return self._again(name, nth, {self._number: points.flatten(0, 1)}, points.shape[1])

    def _again(
        self, name: str, nth: Mapping[str, int], points: Values | None = None, copies: int = 1
    ) -> Rerun:
        """Run the program up to a site, at values of its discrete variables and points of the continuous one."""
        return self.run(name, self.marginalised, nth, points or {}, copies=copies)

    @property
    def _sizes(self) -> dict[str, int]:
        """The number of values of each discrete variable."""
        return {
            name: len(v.values) for name, v in self.marginalised.items() if v.values is not None
        }

    @property
    def _number(self) -> str | None:
        """The name of the continuous variable."""
        return next((name for name, v in self.marginalised.items() if v.values is None), None)

    def _each(
        self, names: Collection[str], others: Mapping[str, int] | None = None
    ) -> Iterator[dict[str, int]]:
        """Yield the numbers of the values of some discrete variables, together with those of others."""
        sizes = self._sizes
        for nth in product(*(range(sizes[name]) for name in names)):
            yield {**(others or {}), **dict(zip(names, nth, strict=True))}

    def _place(self, nth: Mapping[str, int]) -> Place:
        assert self._number is not None
        start = self.marginalised[self._number].place
        assert start is not None
        return self.places.get(tuple(nth.items()), start)

    def _batch(self, width: int) -> torch.Size:
        draws = (self.levels.draws[1],) if self.levels.draws else ()
        return torch.Size((*draws, self.levels.clients[1], width))
