"""A program written for one client and one draw, run for all clients and draws of a batch at once.

Between two sites such a program is any function of tensors without dimensions of draws and clients, and ``torch.vmap``
adds these. At a site it steps out of vmap: the law that was written becomes one over draws and clients, ``(S, K, 1)``
or ``(S, K, B)`` in front, as the engine's handlers know it, and the value that they give it goes back in. So whatever
the program does between its sites it need not know how many there are, and what is outside need not know of vmap.

Plates of the program's own, and entries that it did not declare as an event, become part of the event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import pyro
import torch
from pyro.poutine.indep_messenger import IndepMessenger
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import _DIM_ALLOCATOR, _PYRO_STACK
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from bayesfed.data.batch import CLIENTS, OBSERVATIONS, Batch, Fields
from bayesfed.data.federation import Federation, Model
from bayesfed.elbo import handlers, laws
from bayesfed.elbo.levels import Layout, Levels, opened


@dataclass(frozen=True)
class OneClient:
    """The model, run under vmap wherever it is given a batch; given a federation it is the program that it was.

    Example:
        >>> import torch, pyro, pyro.distributions as dist, bayesfed as bf
        >>> from pyro import poutine
        >>> from bayesfed.elbo import handlers
        >>> from bayesfed.elbo.one_client import OneClient
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

    @property
    def __name__(self) -> str:
        return getattr(self.model, "__name__", type(self.model).__name__)

    def __call__(self, batch: Any) -> None:
        """The Pyro program."""
        if isinstance(batch, Federation):
            self.model(batch)
        else:
            self.run(batch)

    def run(self, batch: Batch) -> Run:
        """The program on a batch, and what its sites were like."""
        return self._run(batch, _Outside)

    def _run(self, batch: Batch, kind: Callable[..., Any], *settings: Any) -> Run:
        unchecked = pyro.validation_enabled(False)  # a check asks for a value, which vmap has not
        plates = [frame for frame in _PYRO_STACK if isinstance(frame, IndepMessenger)]
        draws = [frame.size for frame in plates if frame.name == handlers.DRAWS]
        with unchecked, opened(draws[-1] if draws else None, len(batch)) as levels:
            messenger = kind(levels, Run(), partial(self._run, batch), *settings)
            with messenger, _own_dimensions():
                self.model(_seen(batch, levels))
        return messenger.seen


@dataclass
class Run:
    """What a run of a program has met.

    Attributes:
        layouts: where it has the dimensions of its sites.
        values: of its sites, as those outside know them.
        discrete: by latent site of a row that is to be summed out, the values that it can have.
        log_weight: of the values that these have taken, with all that was observed before: ``(S, K, B)``.
        law: that of the site at which it ended, if it ended at one.
    """

    layouts: dict[str, Layout] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)
    discrete: dict[str, Tensor] = field(default_factory=dict)
    log_weight: Any = 0.0
    law: Any = None


class _Outside(Messenger):
    """Give each site to the handlers outside as one of all clients and draws, and its value back to the program.

    A discrete latent variable of a row is not given to them. It takes its first value; where a site is observed, the
    program is run once more up to there for each of the other values, and the site's law is the mixture.
    """

    def __init__(self, levels: Levels, seen: Run, run: Callable[..., Run]) -> None:
        super().__init__()
        self.levels = levels
        self.seen = seen
        self.run = run
        self.out = ExitStack()
        self.back: Callable[[Any], Any] | None = None
        self.nth: Mapping[str, int] = {}

    def __exit__(self, *error: Any) -> Any:
        self.out.close()
        return super().__exit__(*error)

    def _leave(self, back: Callable[[Any], Any]) -> None:
        """Leave vmap; ``back`` makes of the value that is given outside what the program gets."""
        self.back = back
        self.out.enter_context(temporarily_clear_interpreter_stack())

    def _return(self, msg: Any) -> None:
        if self.back is not None:
            self.out.close()
            msg["value"], self.back = self.back(msg["value"]), None

    _pyro_post_param = _return

    def _pyro_post_sample(self, msg: Any) -> None:
        if self.back is not None:
            self.seen.values[msg["name"]] = msg["value"]
            if isinstance(msg["fn"], laws.Mixture):
                self.seen.log_weight = self.seen.log_weight + msg["fn"].laws[0].log_prob(
                    msg["value"]
                )
        self._return(msg)

    def _pyro_sample(self, msg: Any) -> None:
        if handlers.is_plate(msg):
            msg["stop"] = True  # outside it has another size
            return
        if msg["infer"].get("_deterministic"):
            msg["stop"] = True
            self._derive(msg)
            return
        fn, layout = laws.whole(msg["fn"]), _layout(msg)
        if not msg["is_observed"] and not msg["done"] and _of_rows(msg, layout):
            self._take(msg, fn, layout)
            return
        self.seen.layouts[msg["name"]] = layout
        weights = {
            what: self._weight(msg, what, layout)
            for what in ("mask", "scale")
            if isinstance(msg[what], Tensor)
        }
        value, observed = msg["value"], msg["is_observed"]
        own, clients = len(layout.own), self.levels.clients[1]

        def back(given: Any) -> Any:
            return value if observed else self.levels.enter(given, layout, fn.event_dim + own)

        seen = value.expand(fn.batch_shape + fn.event_shape) if observed else value
        self._leave(back)
        law = laws.outside(fn, self.levels, layout)
        if layout.local and law.batch_shape[-2] != clients:
            law = law.expand((*law.batch_shape[:-2], clients, law.batch_shape[-1]))
        for what, weight in weights.items():
            weight = self.levels.leave(weight, layout)
            for _ in range(own):
                weight = weight.select(-1, 0)
            msg[what] = weight
        if self.seen.discrete and layout.rows:
            law = self._summed(msg["name"], law)
        msg["fn"] = law
        if observed:
            seen = self.levels.leave(seen, layout)
            msg["value"] = seen.squeeze(0) if self.levels.draws and len(seen) == 1 else seen
        frames = {frame.name: frame for frame in msg["cond_indep_stack"]}
        msg["cond_indep_stack"] = tuple(
            frames[name]._replace(size=clients if name == CLIENTS else frames[name].size)
            for name in (OBSERVATIONS, CLIENTS)
            if name in frames
        )

    def _take(self, msg: Any, fn: Any, layout: Layout) -> None:
        """A discrete variable of a row takes one of its values."""
        name = msg["name"]
        if not fn.has_enumerate_support or layout.own or fn.event_dim:
            raise ValueError(
                f"latent site {name!r} is discrete, and {type(fn).__name__} has no list of its values, or it is a "
                "vector: one number a row, Bernoulli or Categorical, is summed out"
            )
        values = fn.enumerate_support(expand=False).flatten()
        value = values[self.nth.get(name, 0)].expand(fn.batch_shape)
        log_prob = fn.log_prob(value).expand(layout.batch)
        with temporarily_clear_interpreter_stack():
            self.seen.log_weight = self.seen.log_weight + self.levels.leave(log_prob, layout)
        self.seen.discrete[name] = values
        msg["value"], msg["done"], msg["stop"] = value, True, True

    def _summed(self, name: str, law: Any) -> laws.Mixture:
        """The law of a site, the discrete variables before it summed out."""
        found, seen = [(self.seen.log_weight, law)], self.seen
        sizes = [len(values) for values in seen.discrete.values()]
        at = _PYRO_STACK.index(self)
        stack, _PYRO_STACK[at:] = _PYRO_STACK[:], []
        try:
            for nth in list(product(*map(range, sizes)))[1:]:
                other = self.run(
                    _Again, name, seen.values, dict(zip(seen.discrete, nth, strict=True))
                )
                found.append((other.log_weight, other.law))
        finally:
            _PYRO_STACK[:] = stack
        log_weights, components = zip(*found, strict=True)
        weights = torch.stack(torch.broadcast_tensors(*log_weights), -1)
        return laws.Mixture(weights, components, sizes)

    def _weight(self, msg: Any, what: str, layout: Layout) -> Tensor:
        """A site's mask or scale, of the site's batch, in whose own dimensions all must be alike."""
        weight = msg[what]
        lead = len(layout.batch) - weight.ndim
        if any(axis >= lead and weight.shape[axis - lead] > 1 for axis in layout.own):
            raise ValueError(
                f"site {msg['name']!r}: a {what} differs along a plate of the program's own. Give the site's log "
                "density by pyro.factor, with what does not count as 0"
            )
        return weight.expand(layout.batch)

    def _derive(self, msg: Any) -> None:
        """A value that depends on others, for those who ask."""
        asked = [frame for frame in _PYRO_STACK if isinstance(frame, handlers.Derived)]
        for derived in asked:
            layout, per_row = _layout(msg, msg["value"].shape), OBSERVATIONS in handlers.plates(msg)
            with temporarily_clear_interpreter_stack():
                value = self.levels.leave(msg["value"], layout)
            derived.found[msg["name"]] = handlers.Derivation(value, layout.local, per_row)

    def _pyro_param(self, msg: Any) -> None:
        name, *init = msg["args"]
        start = init[0]() if init and callable(init[0]) else init[0] if init else None
        local = CLIENTS in {frame.name for frame in msg["cond_indep_stack"]}
        event = None if start is None else start.ndim

        def back(value: Tensor) -> Tensor:
            if local:
                return self.levels.inside(value[None]).unsqueeze(0)
            lead = 0 if event is None else value.ndim - event
            if not lead:
                return value
            value = value.reshape((*[1] * (3 - lead), *value.shape))
            return self.levels.inside(value).squeeze(0)

        self._leave(back)
        if local and start is not None:
            msg["args"] = name, start.expand(self.levels.clients[1], *start.shape[1:])


class _Again(_Outside):
    """Run the program again with values that are known, up to a site."""

    def __init__(
        self,
        levels: Levels,
        seen: Run,
        run: Callable[..., Run],
        until: str,
        values: Mapping[str, Tensor],
        nth: Mapping[str, int],
    ) -> None:
        super().__init__(levels, seen, run)
        self.until, self.values, self.nth = until, values, nth

    def __exit__(self, kind: Any, *error: Any) -> Any:
        super().__exit__(kind, *error)
        return kind is _There

    def _pyro_sample(self, msg: Any) -> None:
        msg["stop"] = True
        if handlers.is_plate(msg) or msg["infer"].get("_deterministic"):
            return
        fn, layout, name = laws.whole(msg["fn"]), _layout(msg), msg["name"]
        if name not in self.values and name != self.until:
            self._take(msg, fn, layout)
            return
        if name == self.until or (self.seen.discrete and layout.rows):
            with temporarily_clear_interpreter_stack():
                law = laws.outside(fn, self.levels, layout)
                if name == self.until:
                    self.seen.law = law
                    raise _There
                self.seen.log_weight = self.seen.log_weight + law.log_prob(self.values[name])
        if not msg["is_observed"]:
            event = fn.event_dim + len(layout.own)
            msg["value"] = self.levels.enter(self.values[name], layout, event)
        msg["done"] = True


class _There(Exception):
    """The site at which a run is to end."""


def _of_rows(msg: Any, layout: Layout) -> bool:
    """Whether a latent variable is discrete and of a row."""
    fn = msg["fn"]
    return OBSERVATIONS in handlers.plates(msg) and layout.local and fn.support.is_discrete


def _layout(msg: Any, batch: torch.Size | None = None) -> Layout:
    """Where a site has what dimensions."""
    batch = msg["fn"].batch_shape if batch is None else batch
    frames = {frame.name: frame.dim for frame in msg["cond_indep_stack"]}
    others = {dim for name, dim in frames.items() if name not in (CLIENTS, OBSERVATIONS)}
    rows = OBSERVATIONS in frames or (batch[-1:] == (1,) and -1 not in others)
    return Layout(batch, CLIENTS in frames, CLIENTS in frames and rows)


def _seen(batch: Batch, levels: Levels) -> Batch:
    """What the program sees of one client."""

    def one(value: Tensor) -> Tensor:
        return levels.inside(value[None]).unsqueeze(0)

    fields = Fields({name: one(value) for name, value in batch.fields.items()})
    fields.constant = batch.fields.constant
    index = one(batch.index[:, None]).squeeze(-1)
    return Batch(fields, one(batch.mask), one(batch.scale), index, batch.gaps)


@contextmanager
def _own_dimensions() -> Iterator[None]:
    """Plates of the program take the dimensions that they would without those around it."""
    taken, _DIM_ALLOCATOR._stack = _DIM_ALLOCATOR._stack, []
    try:
        yield
    finally:
        _DIM_ALLOCATOR._stack = taken
