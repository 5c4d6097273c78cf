"""Bayesian networks: every client has its own weights around a common centre, in all layers or in some."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor, nn
from torch.distributions import constraints

from bayesfed.functional.networks import apply, check_stateless, flatten
from bayesfed.models.clusters import ClusteredLabels, start_apart
from bayesfed.models.label_shares import SHARES, ClientLabels, LabelShares

WEIGHTS = "weights"
"""The local sample site of a client's weights, as one vector."""


@dataclass(frozen=True)
class Network:
    r"""A hierarchical model of any ``torch.nn.Module``.

    .. code-block:: text

        client i    w_i ~ N(m, diag(σ²))          σ fixed, learnt (one for each weight) or one ρ_i per client
        row j       y_ij ~ Categorical(softmax f(x_ij; w_i, v))    or    N(f(x_ij; w_i, v), noise²)

    m, σ and v, the weights that all clients share, are named ``prior.loc``, ``prior.scale`` and ``shared``: each a
    ``pyro.param``, or with ``hyper_scale`` a random variable, Normal (σ: log-Normal) around its initial value. ρ_i is
    the client's parameter ``prior.rho``. Without local weights all clients have the same network.

    Args:
        module: any module without state; its present parameters are the initial m and v.
        local: the local parameters: ``"all"``, or prefixes of their names, ``()`` for none.
        scale: σ, initial or fixed: one number, or one for each prefix of a local parameter's name, of which the longest
            counts (``{"": 0.1, "2.bias": 0.3}``).
        spread: ``"fixed"``, ``"learnt"`` (σ) or ``"client"`` (ρ_i).
        likelihood: ``"categorical"`` or ``"normal"``.
        label_shares: the prior of the clients' label shares π_i, which predictions and personal steps then read from
            the labels of a client's rows, see :mod:`bayesfed.models.label_shares`; by default all clients have the
            same.
        subclasses: M, the number of sub-classes of each label, whose shares are a client's own and made from its rows
            in every round, see :mod:`bayesfed.models.label_shares`; the module has M outputs side by side for each
            label. For algorithms with a point estimate of θ.
        clusters: C, the number of networks of which each client has one, see :mod:`bayesfed.models.clusters`; the local
            weights are those of all C, which start apart. For algorithms with a point estimate of θ.
        noise: standard deviation of the normal likelihood.
        hyper_scale: standard deviation of the hyper-prior of m, log σ and v; by default they are ``pyro.param``.
        x: the field of inputs ``(rows, *event)``.
        y: the field of labels, 0 to classes − 1, or of targets, ``(rows,)``.

    Raises:
        ValueError: the module keeps state; ``local`` is a prefix of no parameter; an unknown spread or likelihood;
            label shares, sub-classes or clusters without labels; sub-classes and clusters.

    Example:
        >>> from bayesfed import models
        >>> head = models.Network(models.mlp(64, 32, 10), local=["2."])
        >>> head.size, head.shared_size
        (330, 2080)
    """

    module: nn.Module
    local: str | Sequence[str] = "all"
    scale: float | Mapping[str, float] = 0.3
    spread: str = "fixed"
    likelihood: str = "categorical"
    noise: float = 1.0
    label_shares: LabelShares | None = None
    subclasses: int = 1
    clusters: int = 1
    hyper_scale: float | None = None
    x: str = "x"
    y: str = "y"
    names: tuple[str, ...] = field(init=False)
    start: Tensor = field(init=False, repr=False)
    shared_start: Tensor = field(init=False, repr=False)
    scales: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_stateless(self.module)
        if self.spread not in ("fixed", "learnt", "client"):
            raise ValueError(f"spread is {self.spread!r}: use 'fixed', 'learnt' or 'client'")
        if self.likelihood not in ("categorical", "normal"):
            raise ValueError(f"likelihood is {self.likelihood!r}: use 'categorical' or 'normal'")
        own = self.label_shares is not None or self.subclasses != 1 or self.clusters != 1
        if own and self.likelihood != "categorical":
            raise ValueError(
                f"label_shares, subclasses and clusters are for labels, and likelihood is {self.likelihood!r}: leave "
                "them out"
            )
        if self.clusters != 1 and (self.subclasses != 1 or not self.local):
            raise ValueError(
                "clusters are of clients with local weights and without subclasses: give local a prefix, and one of "
                "clusters and subclasses"
            )
        every = [name for name, _ in self.module.named_parameters()]
        wanted = ("",) if self.local == "all" else tuple(self.local)
        names = tuple(name for name in every if name.startswith(wanted))
        if wanted and not names:
            raise ValueError(
                f"local={self.local!r} is a prefix of no parameter's name; there are {', '.join(every)}"
            )
        rest = [name for name in every if name not in names]
        object.__setattr__(self, "names", names)
        starts = [flatten(module, names) for module in start_apart(self.module, self.clusters)]
        object.__setattr__(self, "start", torch.cat(starts))
        object.__setattr__(self, "shared_start", flatten(self.module, rest))
        object.__setattr__(self, "scales", self._scales())

    def _scales(self) -> Tensor:
        """Return σ of every local weight, ``(D,)``."""
        given = self.scale if isinstance(self.scale, Mapping) else {"": self.scale}
        if self.spread == "client" and len(given) > 1:
            raise ValueError(
                "spread='client' has one ρ_i for all weights: give scale as one number"
            )
        params = dict(self.module.named_parameters())
        parts = []
        for name in self.names:
            prefixes = [prefix for prefix in given if name.startswith(prefix)]
            if not prefixes:
                raise ValueError(
                    f"scale gives no standard deviation for the local weights {name!r}"
                )
            parts.append(torch.full_like(params[name].detach(), given[max(prefixes, key=len)]))
        found = torch.cat([part.flatten() for part in parts]) if parts else torch.zeros(0)
        return found.repeat(self.clusters)

    @property
    def size(self) -> int:
        """The number of local weights of a client."""
        return len(self.start)

    @property
    def shared_size(self) -> int:
        """The number of weights that all clients share."""
        return len(self.shared_start)

    @property
    def __name__(self) -> str:
        return f"{type(self.module).__name__} network"

    def __call__(self, federation: Any) -> None:
        """Run the Pyro program."""
        local, shared = self.size > 0, None
        if local:
            loc, scale = common("prior.loc", self.start, self.hyper_scale), self.scales
            if self.spread == "learnt":
                scale = common("prior.scale", scale, self.hyper_scale, positive=True)
            scale, _ = torch.broadcast_tensors(scale.to(loc.device), loc)
        if self.shared_size:
            shared = common("shared", self.shared_start, self.hyper_scale)
        with federation.clients() as index:
            if local and self.spread == "client":
                start = self.scales[:1].expand(len(index), 1, 1)
                rho = pyro.param(
                    "prior.rho", start.clone(), constraint=constraints.positive, event_dim=1
                )
                scale, _ = torch.broadcast_tensors(rho, loc)
            w = pyro.sample(WEIGHTS, dist.Normal(loc, scale).to_event(1)) if local else None
            with federation.observations() as obs:
                out = self.outputs(w, obs, shared)
                if self.likelihood == "categorical":
                    settings = self.label_shares, obs, self.subclasses, self.clusters
                    y = label_distribution(out, *settings)
                else:
                    y = dist.Normal(out.squeeze(-1), self.noise)
                pyro.sample(self.y, y, obs=obs.get(self.y))

    def outputs(self, w: Tensor | None, obs: Any, shared: Tensor | None) -> Tensor:
        """Return f(x; w, v) for every row, of all clusters side by side: ``(..., K, B, C · classes)``."""
        w, shared = (v[None, None] if v is not None and v.ndim == 1 else v for v in (w, shared))
        if w is None:
            assert shared is not None
            return apply(self.module, shared, obs[self.x])
        return torch.cat(
            [
                apply(self.module, each, obs[self.x], shared=shared, names=self.names)
                for each in w.chunk(self.clusters, -1)
            ],
            -1,
        )


def label_distribution(
    logits: Tensor,
    label_shares: LabelShares | None,
    obs: Any,
    subclasses: int = 1,
    clusters: int = 1,
) -> Any:
    """Return the distribution of a classifier's labels, with the clients' shares and clusters if they have any."""
    if clusters > 1:
        return ClusteredLabels(logits, clusters, label_shares, obs.get(SHARES))
    if label_shares is None and subclasses == 1:
        return dist.Categorical(logits=logits)
    return ClientLabels(logits, label_shares, obs.get(SHARES), subclasses)


def common(
    name: str, start: Tensor, hyper_scale: float | None, *, positive: bool = False
) -> Tensor:
    """Return a global vector: a ``pyro.param``, or with a hyper-prior's scale a sample around the initial value."""
    if hyper_scale is None:
        over = constraints.positive if positive else constraints.real
        return pyro.param(name, start.clone, constraint=over, event_dim=1)
    start = start.to(torch.get_default_device())
    prior = (
        dist.LogNormal(start.log(), hyper_scale) if positive else dist.Normal(start, hyper_scale)
    )
    return pyro.sample(name, prior.to_event(1))


def mlp(*sizes: int, activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    """Make linear layers of the given sizes with an activation between them; ``mlp(784, 10)`` is a logistic regression.

    Example:
        >>> from bayesfed import models
        >>> [name for name, _ in models.mlp(784, 100, 10).named_parameters()]
        ['0.weight', '0.bias', '2.weight', '2.bias']
    """
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), activation()]
    return nn.Sequential(*layers[:-1])
