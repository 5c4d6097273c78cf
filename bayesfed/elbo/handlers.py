"""Pyro effect handlers that give a program its parameters, noise and values."""

from __future__ import annotations

import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions.util import broadcast_shape
from pyro.nn import PyroModule
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor
from torch._C._functorch import is_batchedtensor
from torch.distributions import biject_to, constraints, transform_to

from bayesfed.data.batch import CLIENTS
from bayesfed.elbo.moments import moments, unconstrained_shape
from bayesfed.elbo.noise import Draw, SuppliedNoise

DRAWS = "draws"


def draws_plate(count: int) -> Any:
    """The plate of draws, to the left of the two others."""
    return pyro.plate(DRAWS, count, dim=-3)


@contextmanager
def trusted(device: torch.device) -> Iterator[None]:
    """Turn off Pyro's checks of arguments, which the first run of a program has made, and enter :func:`on`."""
    with pyro.validation_enabled(False), on(device):
        yield


def on(device: torch.device) -> AbstractContextManager[object]:
    """Create new tensors on a device, so that a model's own constants lie where its data do."""
    return nullcontext() if torch.get_default_device() == device else device


@contextmanager
def on_cpu() -> Iterator[None]:
    """Create new tensors on the CPU, whatever ``torch.set_default_device`` says: schedules are made there."""
    with nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu"):
        yield


@contextmanager
def given(
    device: torch.device,
    params: Mapping[str, Tensor] | None = None,
    noise: Mapping[str, Sequence[Tensor]] | None = None,
    values: Mapping[str, Tensor] | None = None,
    draws: int | None = None,
    starting: Collection[str] = (),
) -> Iterator[Parameters]:
    """Run programs on a device with given parameters, noise and values.

    Args:
        device: where new tensors go.
        params: values of ``pyro.param``, unconstrained; by default all take their initial value.
        noise: of latent sites; sites without noise lie at the origin. By default torch's generator draws the sites.
        values: of latent sites.
        draws: S, the size of a plate to the left of the two others; by default there is no such plate.
        starting: parameters that take their initial value if ``params`` lacks them, as local ones without clients.

    Example:
        >>> import torch
        >>> from pyro import poutine
        >>> from bayesfed import datasets, models
        >>> from bayesfed.elbo import handlers
        >>> batch = datasets.eight_schools().batch()
        >>> with handlers.given(batch.device, noise={}, values={"mu": torch.tensor(3.0)}, draws=2):
        ...     trace = poutine.trace(models.eight_schools).get_trace(batch)
        >>> trace.nodes["mu"]["value"].tolist(), trace.nodes["tau"]["value"].tolist()
        (3.0, [[[1.0]], [[1.0]]])
    """
    with ExitStack() as stack:
        stack.enter_context(trusted(device))
        found = stack.enter_context(Parameters(params, starting))
        if noise is not None:
            stack.enter_context(Noise(noise))
        if values is not None:
            stack.enter_context(Values(values))
        if draws is not None:
            stack.enter_context(draws_plate(draws))
        yield found


def is_plate(message: Mapping[str, Any]) -> bool:
    """Return whether a sample message only opens a plate."""
    return isinstance(message["fn"], _Subsample)


def sample_sites(trace: Any) -> dict[str, Any]:
    """The nodes of a trace that are sample sites, by name."""
    return {
        name: node
        for name, node in trace.nodes.items()
        if node["type"] == "sample" and not is_plate(node)
    }


def plates(message: Mapping[str, Any]) -> set[str]:
    """The names of the plates that a site lies in."""
    return {frame.name for frame in message["cond_indep_stack"]}


def is_local(message: Mapping[str, Any]) -> bool:
    """Return whether a site lies inside the clients plate."""
    return CLIENTS in plates(message)


def is_point(message: Mapping[str, Any]) -> bool:
    """Return whether a guide's site is a point estimate (or a function of other sites), not a draw."""
    fn = message["fn"]
    while isinstance(fn, dist.Independent):
        fn = fn.base_dist
    return isinstance(fn, dist.Delta)


class Parameters(Messenger):
    """Give ``pyro.param`` its value from ``values`` (unconstrained), never from Pyro's global store.

    ``seen`` records all parameters. If ``values`` is None, parameters take their initial value; so do those of
    ``starting``. Any other that ``values`` lacks is an error.
    """

    def __init__(
        self, values: Mapping[str, Tensor] | None = None, starting: Collection[str] = ()
    ) -> None:
        super().__init__()
        self.values = values
        self.starting = starting
        self.seen: dict[str, dict[str, Any]] = {}

    def _pyro_param(self, msg: Any) -> None:
        if msg["value"] is not None:  # poutine.substitute in the program makes it a constant
            return
        name, *init = complete_param(msg)
        constraint = msg["kwargs"].get("constraint") or constraints.real
        if self.values is not None and name in self.values:
            value = self.values[name]
            if constraint is not constraints.real:
                value = transform_to(constraint)(value)
        elif self.values is not None and name not in self.starting:
            raise RuntimeError(
                f"parameter {name!r} is given no value, only {', '.join(self.values) or 'none'} are: what runs the "
                "program must supply it. A model has the same parameters whatever its data: no pyro.param "
                "under a condition"
            )
        elif init:
            with torch.no_grad():
                value = init[0]() if callable(init[0]) else init[0]
            value = value.detach().to(torch.get_default_device())
        else:
            raise ValueError(f"parameter {name!r} has no initial value: pyro.param(name, init)")
        self.seen[name] = {
            "value": value,
            "constraint": constraint,
            "local": is_local(msg),
        }
        msg["value"] = value
        msg["done"] = True


def complete_param(msg: Any) -> tuple[Any, ...]:
    """Give a ``PyroParam`` the initial value that its module has stored, and return name and initial value.

    Raises:
        ValueError: the parameter is one of a torch module.
    """
    name, *init = msg["args"]
    if not init and name in (store := pyro.get_param_store()):
        msg["args"], msg["kwargs"]["constraint"] = (name, store[name]), store._constraints[name]
    elif init and isinstance(init[0], torch.nn.Parameter) and _of_module():
        raise ValueError(
            f"parameter {name!r} belongs to a torch module, which computes with its own value whatever Pyro says. Give "
            "its weights priors (PyroSample, bayesfed.models.Network), or write torch.func.functional_call(net, {name: "
            "pyro.param(name, value.detach()) for name, value in net.named_parameters()}, x)"
        )
    return tuple(msg["args"])


def check_local_param(name: str, value: Tensor, clients: int) -> None:
    """Fail on a parameter inside the clients plate that has no row per client."""
    if value.shape[:2] != (clients, 1):
        raise ValueError(
            f"local parameter {name!r} has shape {tuple(value.shape)}: inside the clients plate a parameter has a row "
            "per client, shape (K, 1, *event) with K = len(federation). One that all clients share belongs outside "
            "(a PyroParam is where it is first read)"
        )


def _of_module() -> bool:
    """Return whether ``pyro.module`` or a ``PyroModule`` asks for a parameter: both ignore the value that they get."""
    frames = (frame for frame, _ in traceback.walk_stack(None))
    return any(
        frame.f_code in (pyro.module.__code__, PyroModule.__getattr__.__code__) for frame in frames
    )


class Values(Messenger):
    """Give latent sites the values of ``values``; other sites are left alone."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.values = values

    def _pyro_sample(self, msg: Any) -> None:
        if not msg["is_observed"] and msg["name"] in self.values:
            msg["value"] = self.values[msg["name"]]
            msg["done"] = True


class Centred(Messenger):
    """Put latent sites without a value at the centre of their prior; ``found`` has their distributions and values."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, tuple[Any, Tensor]] = {}

    def _pyro_sample(self, msg: Any) -> None:
        if msg["is_observed"] or msg["done"] or is_plate(msg):
            return
        fn = msg["fn"]
        loc = moments(fn).loc
        msg["value"] = biject_to(fn.support)(loc)
        msg["done"] = True
        self.found[msg["name"]] = fn, msg["value"]


class _Enough(Exception):
    """All requested sites of a program have been sampled."""


class Until(Messenger):
    """Stop the program as soon as all of these sites are sampled."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self.left = set(names)

    def _pyro_post_sample(self, msg: Any) -> None:
        self.left.discard(msg["name"])
        if not self.left:
            raise _Enough

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> bool:
        super().__exit__(kind, value, traceback)
        return kind is _Enough


class Derivation(NamedTuple):
    """A value computed from other variables; ``local`` if each client has one, ``per_row`` if each row has."""

    value: Tensor
    local: bool
    per_row: bool


class Noise(Messenger):
    """Draw latent sites from the noise supplied for them.

    Sites without noise take the origin of their unconstrained space, so that a server can run a program without any
    client's variables. With ``supplied=None`` every site is drawn from constants, and ``draws`` records the random
    tensors that it needs.
    """

    def __init__(self, supplied: Mapping[str, Sequence[Tensor]] | None) -> None:
        super().__init__()
        self.supplied = supplied
        self.draws: dict[str, list[Draw]] = {}

    def _pyro_sample(self, msg: Any) -> None:
        if msg["is_observed"] or msg["done"] or is_plate(msg):
            return
        name, fn = msg["name"], msg["fn"]
        if self.supplied is not None and name not in self.supplied and not is_point(msg):
            msg["value"] = origin(fn)
        elif is_point(msg):
            msg["value"] = fn()
        else:
            if not fn.has_rsample:
                raise NotImplementedError(
                    f"site {name!r} of the guide is drawn from {type(fn).__name__}, which has no "
                    "reparameterised sampler: use a (transformed) Normal"
                )
            supplied = None if self.supplied is None else self.supplied[name]
            if supplied:  # each client has its own draw of a global site
                lead = supplied[0].shape[: len(fn.batch_shape)]
                if (shape := broadcast_shape(fn.batch_shape, lead)) != fn.batch_shape:
                    msg["fn"] = fn = fn.expand(shape)
            source = SuppliedNoise(supplied, len(fn.batch_shape))
            try:
                with source:
                    msg["value"] = fn.rsample()
            except NotImplementedError as error:
                raise NotImplementedError(f"site {name!r} of the guide: {error}") from None
            self.draws[name] = source.recorded
        msg["done"] = True


class Known(Messenger):
    """Supply the evidence of clients' own rows for their discrete variables: log p(z, own rows), ``(S, K, 1, k)``."""

    def __init__(self, log_weights: Tensor) -> None:
        super().__init__()
        self.log_weights = log_weights


class BeforeOutcome(Messenger):
    """Name a site whose distribution is wanted given the earlier sites of its row, and not given its own value.

    Where a variable of the row is integrated out, nodes lie around the mode of an integrand. This leaves the density of
    the site's value out of that integrand: nodes that are placed by it cover the distribution given the value alone.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


class GivenOwnRows(Messenger):
    """Condition observed sites on their clients' own rows.

    A distribution with a client's variable integrated out has the methods ``evidence(value, mask)`` of a client's rows,
    ``given(evidence)`` for further rows, for predictions and personal steps, ``left_out(evidence, value)`` for each of
    the rows given the others, and, if it has ``in_training``, ``trained(evidence)`` for the steps of a round.

    Args:
        evidence: by the name of one of these methods and by site, ``(..., K, 1, *)``.
    """

    def __init__(self, evidence: Mapping[str, Mapping[str, Tensor]]) -> None:
        super().__init__()
        self.evidence = evidence

    def _pyro_sample(self, msg: Any) -> None:
        for use, found in self.evidence.items():
            if msg["name"] in found:
                value = (msg["value"],) if use == "left_out" else ()
                msg["fn"] = getattr(msg["fn"], use)(found[msg["name"]], *value)


class FindEvidence(Messenger):
    """Record the evidence of the rows that a program runs on, by site; rows without an outcome do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, Tensor] = {}

    def _pyro_sample(self, msg: Any) -> None:
        fn = msg["fn"]
        if not hasattr(fn, "evidence"):
            return
        mask = torch.as_tensor(True if msg["mask"] is None else msg["mask"])
        if not msg["is_observed"]:
            msg["value"], msg["done"] = torch.zeros(fn.batch_shape), True
            mask = torch.zeros_like(mask)
        self.found[msg["name"]] = fn.evidence(msg["value"], mask.expand(fn.batch_shape))


class Derived(Messenger):
    """Record the values of ``pyro.deterministic``: ``(S, K, B or 1, *)`` for S draws and K clients."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, Derivation] = {}


class NameReparametrised(Messenger):
    """Make a site that ``poutine.reparam`` has replaced by a function of other sites a ``pyro.deterministic``.

    Raises:
        ValueError: the site has a log density of its own.
    """

    def _pyro_sample(self, msg: Any) -> None:
        fn = msg["fn"]
        masked = isinstance(fn, dist.MaskedDistribution) and fn._mask is False
        fn = fn.base_dist if masked else fn
        if not msg["is_observed"] or not isinstance(fn, dist.Delta) or msg["value"] is not fn.v:
            return
        if not masked and (is_batchedtensor(fn.log_density) or (fn.log_density != 0).any()):
            raise ValueError(
                f"site {msg['name']!r} is a Delta with a log density. If NeuTraReparam, StructuredReparam, "
                "SplitReparam or ConjugateReparam makes it, leave that out: the guide needs none of them. Else name "
                "the value by pyro.deterministic, and add the log density by pyro.factor"
            )
        msg["infer"] = {**msg["infer"], "_deterministic": True}


def origin(fn: Any) -> Tensor:
    """The value of a site whose unconstrained coordinates are all zero."""
    return biject_to(fn.support)(torch.zeros(unconstrained_shape(fn.support, fn.shape())))
