"""A modulated network: a second network reads a client's rows and gates the hidden units of the first (CAFeMe)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor, nn

from bayesfed.functional.networks import apply, check_stateless, flatten
from bayesfed.models.label_shares import LabelShares
from bayesfed.models.network import WEIGHTS, common, label_distribution, mlp

ACTIVATIONS = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid)
GATES = "gates"
"""The local sample site of the gates, which after a sigmoid multiply a client's hidden units."""


@dataclass(frozen=True, eq=False)
class Modulated:
    r"""A classifier f whose hidden units are gated by a modulator g that reads a client's labelled rows.

    .. code-block:: text

        client i    ω_i = (ψ_i, μ_i) ~ N(m, scale²)         sample site ``weights``: those of f and of g
                    ζ_i ~ N(0, 1)                           sample site ``gates``: one number per hidden unit
        row j       y_ij ~ Categorical(softmax f(x_ij; ψ_i, ζ_i)),    hidden layers a(·) ⊗ sigmoid(ζ_i)   (eq. 4.4)
        context     ζ_i = g(D_i; μ_i),    g(D; μ) = MLP(mean_b h(h_x(x_b) ⊕ onehot(y_b)))                (section 4.1)

    The output of each activation of f is gated, each unit or channel by one number. m is named ``prior.loc``: a
    ``pyro.param``, or with ``hyper_scale`` a random variable, Normal around its initial value. g is the encoder of the
    sample site ``gates`` (:mod:`bayesfed.guides.encoders`): an algorithm with a context
    (:data:`~bayesfed.CAFeMe`) computes ζ_i from the client's labelled rows, and its prior enters no
    loss; for any other algorithm ζ_i is a local variable with a standard Normal prior. In both cases the prediction for
    a row does not depend on the other rows that are predicted with it.

    Equations of Vettoruzzo, Bouguelia & Rögnvaldsson, "Personalized Federated Learning with Contextual
    Modulation and Meta-Learning".

    Args:
        module: f, layers in sequence with an activation after every hidden one, for example from
            :func:`~bayesfed.models.mlp` or :func:`~bayesfed.models.cnn`; its present parameters are the initial ψ.
        encoder: h_x, any module that maps an input to a vector; its last layer is linear. A ReLU follows it.
        context: width of h and of the context.
        film: scale and shift the activations, (1 + ζ_a) ⊗ a(·) + ζ_b, with two numbers per unit, in place of
            the gates. The paper has ζ_a for 1 + ζ_a and found it unstable.
        scale: standard deviation of the weights' prior, which is fixed.
        hyper_scale: standard deviation of the hyper-prior of m; by default m is a ``pyro.param``.
        label_shares: as of :class:`~bayesfed.models.Network`.
        x: the field of inputs ``(rows, *event)``.
        y: the field of labels, 0 to classes − 1, ``(rows,)``.

    Raises:
        ValueError: f has no hidden layer, or a module keeps state.

    Example:
        >>> from bayesfed import models
        >>> model = models.Modulated(models.mlp(64, 32, 10), models.mlp(64, 16), context=16)
        >>> model.size, model.base_size, model.gates_size
        (4970, 2410, 32)
    """

    module: nn.Sequential
    encoder: nn.Module
    context: int = 64
    film: bool = False
    scale: float = 0.3
    hyper_scale: float | None = None
    label_shares: LabelShares | None = None
    x: str = "x"
    y: str = "y"
    classes: int = field(init=False)
    base: nn.Module = field(init=False, repr=False)
    modulator: nn.Module = field(init=False, repr=False)
    start: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_stateless(self.module)
        check_stateless(self.encoder)
        base = _Base(self.module, self.film)
        classes = _width(list(self.module))
        modulator = _Modulator(self.encoder, classes, self.context, len(base.gates))
        psi = flatten(base, [name for name, _ in base.named_parameters() if name != GATES])
        for name, value in {
            "classes": classes,
            "base": base,
            "modulator": modulator,
            "start": torch.cat([psi, flatten(modulator)]),
        }.items():
            object.__setattr__(self, name, value)

    @property
    def size(self) -> int:
        """The number D of weights of f and g together."""
        return len(self.start)

    @property
    def base_size(self) -> int:
        """The number of weights of f, which come first."""
        return self.size - len(flatten(self.modulator))

    @property
    def gates_size(self) -> int:
        """The number G of gates of a client's network."""
        return len(flatten(self.base, [GATES]))

    @property
    def __name__(self) -> str:
        return f"modulated {type(self.module).__name__} network"

    def __call__(self, federation: Any) -> None:
        """Run the Pyro program."""
        loc = common("prior.loc", self.start, self.hyper_scale)
        zeros = loc.new_zeros(self.gates_size)
        with federation.clients():
            w = pyro.sample(
                WEIGHTS, dist.Normal(loc, self.scale * torch.ones_like(loc)).to_event(1)
            )

            def encode(rows: Any, mask: Tensor) -> Tensor:
                return self.gates(w, rows[self.x], rows[self.y], mask)

            standard = dist.Normal(zeros, torch.ones_like(zeros)).to_event(1)
            gates = pyro.sample(GATES, standard, infer={"context": encode})
            with federation.observations() as obs:
                logits = self.outputs(w, gates, obs[self.x])
                y = label_distribution(logits, self.label_shares, obs)
                pyro.sample(self.y, y, obs=obs.get(self.y))

    def outputs(self, weights: Tensor, gates: Tensor, x: Tensor) -> Tensor:
        """Return f(x; ψ, ζ), the logits of every row.

        Args:
            weights: ω, ``(..., K, 1, D)``.
            gates: ζ, ``(..., K, 1, G)``.
            x: ``(K, B, *event)``.

        Returns:
            ``(..., K, B, classes)``.

        Example:
            >>> import torch
            >>> from bayesfed.models import Modulated, mlp
            >>> model = Modulated(mlp(3, 4, 2), mlp(3, 5), context=5)
            >>> w, gates = torch.zeros(7, 1, model.size), torch.zeros(7, 1, 4)
            >>> model.outputs(w, gates, torch.ones(7, 6, 3)).shape
            torch.Size([7, 6, 2])
        """
        psi = weights[..., : self.base_size]
        shape = torch.broadcast_shapes(psi.shape[:-1], gates.shape[:-1])
        return apply(
            self.base, torch.cat([gates.expand(*shape, -1), psi.expand(*shape, -1)], -1), x
        )

    def gates(self, weights: Tensor, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """Return g(D; μ), the modulator's output for each client's labelled rows; their order does not matter.

        Args:
            weights: ω, ``(..., K, 1, D)``; the result is differentiable in it.
            x: ``(K, B, *event)``.
            y: labels ``(K, B)``.
            mask: bool ``(K, B)``: the rows to read.

        Returns:
            ζ, ``(..., K, 1, G)``.

        Example:
            >>> import torch
            >>> from bayesfed.models import Modulated, mlp
            >>> model = Modulated(mlp(3, 4, 2), mlp(3, 5), context=5)
            >>> x, y = torch.ones(7, 6, 3), torch.zeros(7, 6)
            >>> model.gates(torch.zeros(7, 1, model.size), x, y, y == 0).shape
            torch.Size([7, 1, 4])
        """
        mu = weights[..., self.base_size :]
        onehot = (y[..., None] == torch.arange(self.classes, device=y.device)).to(weights.dtype)
        return apply(self.modulator, mu, x, onehot, mask.to(weights.dtype)).unsqueeze(-2)


class _Base(nn.Module):
    """The network f: layers in sequence, modulated after each activation. ζ ``(G,)`` is its first parameter."""

    def __init__(self, module: nn.Sequential, film: bool) -> None:
        super().__init__()
        self.film = film
        layers = list(module)
        self.widths = [
            (2 if film else 1) * _width(layers[:place])
            for place, layer in enumerate(layers)
            if isinstance(layer, ACTIVATIONS)
        ]
        if not self.widths:
            raise ValueError(
                "the module has no activation, and so no hidden layer to modulate; it must be an "
                "nn.Sequential such as models.mlp(64, 32, 10)"
            )
        self.gates = nn.Parameter(torch.zeros(sum(self.widths)))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        parts = iter(self.gates.split(self.widths))
        for layer in self.layers:
            x = layer(x)
            if not isinstance(layer, ACTIVATIONS):
                continue
            gates = next(parts).reshape(-1, *[1] * (x.ndim - 2))  # one for a channel's whole map
            if self.film:
                scale, shift = gates.chunk(2)
                x = (1 + scale) * x + shift
            else:
                x = x * gates.sigmoid()
        return x


class _Modulator(nn.Module):
    """The network g: from rows ``(B, *event)``, one-hot labels ``(B, classes)`` and mask ``(B,)`` to ζ ``(G,)``."""

    def __init__(self, encoder: nn.Module, classes: int, context: int, gates: int) -> None:
        super().__init__()
        self.of_x = encoder
        self.of_row = mlp(_width(list(encoder.modules())) + classes, context, context)
        self.of_context = mlp(context, context, gates)

    def forward(self, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        rows = self.of_row(torch.cat([self.of_x(x).relu(), y], -1))
        context = (weight[:, None] * rows).sum(0) / weight.sum().clamp(min=1)
        return self.of_context(context)


def _width(layers: Sequence[nn.Module]) -> int:
    """Return the number of output units or channels of the last linear or convolutional layer.

    Raises:
        ValueError: there is no such layer.
    """
    for layer in reversed(layers):
        if isinstance(layer, nn.Linear):
            return layer.out_features
        if isinstance(layer, nn.modules.conv._ConvNd):
            return layer.out_channels
    raise ValueError(
        "the width is unknown: no linear or convolutional layer precedes the activation"
    )
