"""A program written for one client and one draw, run for all clients and draws of a batch at once.

Between two sites such a program is any function of tensors without dimensions of draws and clients, and ``torch.vmap``
adds these. At a site it leaves vmap: the distribution becomes one of all draws and clients, with batch shape
``(S, K, 1)`` or ``(S, K, B)``, for the handlers outside, and the program continues inside vmap with the value that they
give. So the program does not depend on the number of draws and clients, and the handlers do not depend on vmap.

Further plates of the program, and batch dimensions that it did not declare as an event, become part of the event.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pyro
import torch
from pyro.nn.module import PyroModule
from pyro.poutine.indep_messenger import IndepMessenger
from pyro.poutine.runtime import _DIM_ALLOCATOR, _PYRO_STACK
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.distributions import transform_to

from bayesfed.data.batch import CLIENTS, OBSERVATIONS, Batch, Fields
from bayesfed.data.federation import Federation, Model
from bayesfed.data.missing import MISSING
from bayesfed.elbo import handlers
from bayesfed.elbo.sites import check_handled, check_whole, expand_data
from bayesfed.vmap import distributions, quadrature
from bayesfed.vmap.boundary import Boundary, layout_of, weight_of, weight_outside
from bayesfed.vmap.levels import Layout, Levels, opened
from bayesfed.vmap.marginalise import Marginalisation
from bayesfed.vmap.mixtures import Mixture
from bayesfed.vmap.rerun import Rerun
from bayesfed.vmap.writes import Writes


@dataclass(frozen=True)
class OneClient:
    """A model that runs under vmap on a batch, and unchanged on a federation.

    Attributes:
        model: the Pyro model.
        latent: the latent variables of a row; None before they are found, when every site without data counts.
        kinds: the clients' discrete variables, found together with ``latent``.
        covariates: observed sites of a row that others depend on; a missing value is a latent variable of the row.
        points: the number of values of a row's latent variable at which the model runs at once.
        writes: whether the model, or a distribution in it, writes into tensors.

    Example:
        >>> import torch, pyro, pyro.distributions as dist, bayesfed as bf
        >>> from pyro import poutine
        >>> from bayesfed.elbo import handlers
        >>> from bayesfed.vmap.one_client import OneClient
        >>> def model(federation):
        ...     effect = pyro.sample("effect", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        ...     with federation.clients(), federation.observations() as obs:
        ...         pyro.sample("y", dist.Normal(effect[obs["kind"].long()], 1.0), obs=obs["y"])
        >>> rows = {"kind": [0, 1, 1], "y": [1.0, 2.0, 3.0]}
        >>> batch = bf.Federation.from_arrays({"a": rows, "b": rows}).batch()
        >>> with handlers.given(batch.device, noise={}, draws=5):
        ...     trace = poutine.trace(OneClient(model)).get_trace(batch)
        >>> tuple(trace.nodes["effect"]["value"].shape), tuple(trace.nodes["y"]["fn"].batch_shape)
        ((5, 1, 1, 2), (5, 2, 3))
    """

    model: Model
    latent: frozenset[str] | None = None
    kinds: tuple[str, ...] = ()
    covariates: frozenset[str] = frozenset()
    points: int = 1
    writes: bool = False

    @property
    def __name__(self) -> str:
        return getattr(self.model, "__name__", type(self.model).__name__)

    @property
    def coords(self) -> dict[str, list[str]]:
        """The names of the entries of vectors, where a formula has them."""
        return getattr(self.model, "coords", {})

    def __call__(self, batch: Any) -> None:
        """The Pyro program."""
        if isinstance(batch, Federation):
            self.model(batch)
        else:
            self.run(batch)

    def run(self, batch: Batch, changed: str | None = None) -> Run:
        """Run the model on a batch and return a record of its sites; the site ``changed`` takes other values."""
        return self._run(batch, Outside, self, batch, changed).seen

    def _run(self, batch: Batch, kind: Callable[..., Any], *settings: Any, copies: int = 1) -> Any:
        # a check needs a value, which vmap does not give
        unchecked = pyro.validation_enabled(False)
        plates = [frame for frame in _PYRO_STACK if isinstance(frame, IndepMessenger)]
        sizes = [frame.size for frame in plates if frame.name == handlers.DRAWS]
        draws = copies * (sizes[-1] if sizes else 1) if sizes or copies > 1 else None
        with unchecked, opened(draws, len(batch)) as levels:
            messenger = kind(levels, *settings)
            writes = Writes() if self.writes else nullcontext()
            with messenger, _own_dimensions(), writes, handlers.NameReparametrised():
                self.model(_batch_of_one_client(batch, levels))
        return messenger


@dataclass
class Run:
    """A record of the sites of a run.

    Attributes:
        layouts: the layouts of the sites.
        values: the values of the sites outside vmap; the data of observed ones.
        given: in a first run, the values of latent sites, and the copies of them that the program was given.
        rows: the variables of rows and clients that are summed or integrated out.
    """

    rows: Marginalisation
    layouts: dict[str, Layout] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)
    given: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def written(self) -> list[str]:
        """The latent sites into whose values the program has written."""
        return [name for name, (drawn, copy) in self.given.items() if not _same(drawn, copy)]


class Outside(Boundary):
    """Give the handlers outside each site with all clients and draws, and return its value to the program.

    They do not get a latent variable of a row, or a discrete one of a client: later sites have a mixture distribution,
    see :class:`~bayesfed.vmap.marginalise.Marginalisation`.

    Args:
        levels: the levels of vmap.
        program: the program that runs.
        batch: the clients' rows.
        changed: a site inside the observations plate to which the program is given other values.
    """

    def __init__(
        self, levels: Levels, program: OneClient, batch: Batch, changed: str | None = None
    ) -> None:
        super().__init__(levels)
        self.program, self.batch, self.changed = program, batch, changed
        asked = (frame.log_weights for frame in _PYRO_STACK if isinstance(frame, handlers.Known))
        before = (f.name for f in _PYRO_STACK if isinstance(f, handlers.BeforeOutcome))
        self.before = set(before)
        nodes = program.points if program.points > 1 else quadrature.NODES[0]
        self.seen = Run(Marginalisation(self._again, levels, nodes, next(asked, None)))

    def _again(self, until: str, marginalised: Any, *at: Any, copies: int) -> Rerun:
        """Run the program again, up to a site."""
        here = _PYRO_STACK.index(self)
        stack, _PYRO_STACK[here:] = _PYRO_STACK[:], []
        try:
            with _fresh_modules():
                return self.program._run(
                    self.batch,
                    Rerun,
                    until,
                    marginalised,
                    self.seen.values,
                    *at,
                    copies,
                    copies=copies,
                )
        finally:
            _PYRO_STACK[:] = stack

    def _pyro_post_sample(self, msg: Any) -> None:
        if self.back is not None:
            name, distribution = msg["name"], msg["fn"]
            value = self.seen.values.setdefault(name, msg["value"])
            if isinstance(distribution, Mixture):
                self.seen.rows.record(
                    name, distribution, value, OBSERVATIONS in handlers.plates(msg)
                )
        self._return(msg)

    def _pyro_sample(self, msg: Any) -> None:
        if handlers.is_plate(msg):
            check_whole(msg["name"], msg["fn"].size, msg["fn"].subsample_size)
            msg["stop"] = True  # the plate has another size outside
            return
        if msg["infer"].get("_deterministic"):
            msg["stop"] = True
            self._derive(msg)
            return
        check_handled(msg)
        fn, layout, name = distributions.expand_matrices(msg["fn"]), layout_of(msg), msg["name"]
        value, observed, rows = msg["value"], msg["is_observed"], self.seen.rows
        in_rows = OBSERVATIONS in handlers.plates(msg)
        if in_rows and not layout.local:
            raise ValueError(
                f"site {name!r} lies inside the observations plate and outside the clients plate: rows belong to "
                "clients, open `with federation.clients():` around `with federation.observations()`"
            )
        if not observed and not msg["done"] and self._is_latent(msg, fn, layout, in_rows):
            drawn = rows.add(name, fn, layout, in_rows, rows.values_of(name, fn, layout, in_rows))
            given = self.levels.enter(drawn, layout, 0)
            msg["value"] = _other_values(fn, given) if name == self.changed else given
            msg["done"] = msg["stop"] = True
            return
        self.seen.layouts[name] = layout
        weights = {what: weight_of(msg, what, msg[what], layout) for what in ("mask", "scale")}
        own, clients = len(layout.own), self.levels.clients[1]
        given = _other_values(fn, value) if name == self.changed else value

        def back(drawn: Any) -> Any:
            if observed:
                return given
            if self.program.latent is None:  # a first run, which finds out what the program does
                copy = drawn.clone()
                self.seen.given[name], drawn = (drawn, copy), copy
            return self.levels.enter(drawn, layout, fn.event_dim + own)

        seen = expand_data(msg | {"fn": fn}) if observed else value
        gaps = observed and name in self.program.covariates and MISSING in msg["infer"]
        values = rows.values_of(name, fn, layout, in_rows) if gaps else None
        self._leave(back)
        distribution = distributions.batched(fn, self.levels, layout)
        if layout.local and distribution.batch_shape[-2] != clients:
            distribution = distribution.expand(
                (*distribution.batch_shape[:-2], clients, distribution.batch_shape[-1])
            )
        for what, weight in weights.items():
            msg[what] = weight_outside(weight, self.levels, layout)
        if observed:
            seen = self.levels.leave(seen, layout)
            seen = seen.squeeze(0) if self.levels.draws and len(seen) == 1 else seen
            msg["value"] = self.seen.values[name] = seen
        if rows.is_mixture(layout, in_rows):
            data = seen if observed and name not in self.before else None
            distribution = rows.distribution(name, distribution, in_rows, data, msg["mask"])
        if gaps:
            rows.add(name, fn, layout, in_rows, values, seen)
        msg["fn"] = distribution
        frames = {frame.name: frame for frame in msg["cond_indep_stack"]}
        msg["cond_indep_stack"] = tuple(
            frames[name]._replace(size=clients if name == CLIENTS else frames[name].size)
            for name in (OBSERVATIONS, CLIENTS)
            if name in frames
        )

    def _is_latent(self, msg: Any, fn: Any, layout: Layout, in_rows: bool) -> bool:
        """Return whether a site without data is to be summed or integrated out, and is not an outcome to predict."""
        if self.program.latent is None:
            return layout.local and (in_rows or fn.support.is_discrete)
        return msg["name"] in (*self.program.latent, *self.program.kinds)

    def _derive(self, msg: Any) -> None:
        """Give the value of a ``pyro.deterministic`` to the handlers that record them."""
        asked = [frame for frame in _PYRO_STACK if isinstance(frame, handlers.Derived)]
        for derived in asked:
            batch = self._batch_of_derived(msg)
            alike = (1,) * (2 - len(batch)) if handlers.is_local(msg) else ()
            value, layout = (
                msg["value"][(None,) * len(alike)],
                layout_of(msg, torch.Size(alike + batch)),
            )
            per_row = OBSERVATIONS in handlers.plates(msg)
            with temporarily_clear_interpreter_stack():
                value = self.levels.leave(value, layout)
            derived.found[msg["name"]] = handlers.Derivation(value, layout.local, per_row)

    def _batch_of_derived(self, msg: Any) -> tuple[int, ...]:
        """The batch shape of a ``pyro.deterministic``, all dimensions of which are an event by Pyro's default."""
        shape = tuple(msg["value"].shape)
        declared = shape[: len(shape) - msg["fn"].event_dim]
        if declared or not handlers.is_local(msg):
            return declared or shape
        of_clients = (1, 1), (1, self.batch.mask.shape[1])
        if shape[:2] in of_clients:
            return shape[:2]
        return shape if shape[-2:] in of_clients else ()


def _same(one: Tensor, other: Tensor) -> bool:
    """Return whether all values are the same, NaN included."""
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _other_values(fn: Any, value: Tensor) -> Tensor:
    """Other values in the support of a site."""
    if not fn.support.is_discrete:
        return transform_to(fn.support)(torch.full_like(value, 0.3))
    if not fn.has_enumerate_support:
        return value + 1
    first, *_, last = fn.enumerate_support(expand=False).flatten()
    return torch.where(value == first, last, first)


def _batch_of_one_client(batch: Batch, levels: Levels) -> Batch:
    """The batch of one client that the program sees inside vmap."""

    def one(value: Tensor) -> Tensor:
        return levels.inside(value[None]).unsqueeze(0)

    fields = Fields({name: one(value) for name, value in batch.fields.items()})
    fields.constant = batch.fields.constant
    index = one(batch.index[:, None]).squeeze(-1)
    return Batch(fields, one(batch.mask), one(batch.scale), index, batch.gaps)


@contextmanager
def _fresh_modules() -> Iterator[None]:
    """Let every ``PyroModule`` that is running sample its attributes again: until it ends it keeps their values."""
    frame, contexts = sys._getframe(), []
    while frame.f_back is not None:
        frame = frame.f_back
        if isinstance(module := frame.f_locals.get("self"), PyroModule):
            contexts.append(module._pyro_context)
    caches = [context.cache for context in contexts]
    try:
        for context in contexts:
            context.cache = {}
        yield
    finally:
        for context, cache in zip(contexts, caches, strict=True):
            context.cache = cache


@contextmanager
def _own_dimensions() -> Iterator[None]:
    """Let the program's plates take the dimensions that they would take without the plates outside."""
    outer, _DIM_ALLOCATOR._stack = _DIM_ALLOCATOR._stack, []
    try:
        yield
    finally:
        _DIM_ALLOCATOR._stack = outer
