"""A modulated network: a second network reads a client's rows and gates the units of the first (CAFeMe)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor, nn

from bayesfed.models.network import WEIGHTS, mlp
from bayesfed.network import apply, flatten

GATES = "gates"
"""The local site that holds what multiplies a client's hidden units, before the sigmoid."""


@dataclass(frozen=True, init=False, eq=False)
class Modulated:
    r"""A classifier f whose hidden units are gated by what a modulator g makes of the client's labelled rows.

    .. code-block:: text

        client i    ω_i = (ψ_i, μ_i) ~ N(m, scale²)         site ``weights``: of f and of g
                    ζ_i ~ N(0, 1)                           site ``gates``: one number per hidden unit
        row j       y_ij ~ Categorical(softmax f(x_ij; ψ_i, ζ_i)),    hidden layers a(·) ⊗ sigmoid(ζ_i)   (eq. 4.4)
        modulator   g(D; μ) = MLP(mean_b h(h_x(x_b) ⊕ onehot(y_b)))                                      (section 4.1)

    f is an MLP of the given sizes with ReLU; m is a point, the server's parameter ``prior.loc``. As a program the
    model does not know that ζ_i comes from g: whoever fits it passes ``gates`` of the client's own support rows
    (:class:`~bayesfed.algorithms.cafeme.CAFeMe` does). So what is predicted for a row never depends on which
    other rows are predicted with it. The prior of ζ_i is there because a program needs one; it enters no loss.

    Equations of Vettoruzzo, Bouguelia & Rögnvaldsson, "Personalized Federated Learning with Contextual
    Modulation and Meta-Learning".

    Args:
        sizes: of f's layers: inputs, hidden ones (at least one), classes.
        context: width of the modulator's hidden layers and of the context.
        film: scale and shift the activations, (1 + ζ_a) ⊗ a(·) + ζ_b, with two numbers per unit, in place of
            the gates. The paper has ζ_a for 1 + ζ_a and found it unstable.
        scale: standard deviation of the weights' prior, for good.
        x: the field of inputs ``(rows, *event)``; they are flattened.
        y: the field of labels, 0 to classes − 1, ``(rows,)``.

    Raises:
        ValueError: fewer than three sizes.

    Example:
        >>> from bayesfed.models.modulated import Modulated
        >>> model = Modulated(64, 32, 10, context=16)
        >>> model.size, model.base_size, model.gates_size
        (4970, 2410, 32)
    """

    sizes: tuple[int, ...]
    context: int
    film: bool
    scale: float
    x: str
    y: str
    base: nn.Module = field(repr=False)
    modulator: nn.Module = field(repr=False)
    start: Tensor = field(repr=False)

    def __init__(
        self,
        *sizes: int,
        context: int = 64,
        film: bool = False,
        scale: float = 1.0,
        x: str = "x",
        y: str = "y",
    ) -> None:
        if len(sizes) < 3:
            raise ValueError(
                f"sizes are {sizes}: give the inputs, at least one hidden layer (they are what is "
                "modulated) and the classes"
            )
        base = _Base(sizes, film)
        modulator = _Modulator(sizes, context, len(base.gates))
        psi = flatten(base, [name for name, _ in base.named_parameters() if name != GATES])
        for name, value in {
            "sizes": sizes,
            "context": context,
            "film": film,
            "scale": scale,
            "x": x,
            "y": y,
            "base": base,
            "modulator": modulator,
            "start": torch.cat([psi, flatten(modulator)]),
        }.items():
            object.__setattr__(self, name, value)

    @property
    def size(self) -> int:
        """How many weights there are, of f and g together: D."""
        return len(self.start)

    @property
    def base_size(self) -> int:
        """How many of them, the first ones, are f's."""
        return self.size - len(flatten(self.modulator))

    @property
    def gates_size(self) -> int:
        """How many numbers modulate a client's network: G."""
        return len(flatten(self.base, [GATES]))

    @property
    def __name__(self) -> str:
        return f"{'-'.join(map(str, self.sizes))} modulated network"

    def __call__(self, federation: Any) -> None:
        """The Pyro program."""
        loc = pyro.param("prior.loc", self.start.clone, event_dim=1)
        scale = self.scale * torch.ones_like(loc)
        with federation.clients():
            w = pyro.sample(WEIGHTS, dist.Normal(loc, scale).to_event(1))
            zeros = loc.new_zeros(self.gates_size)
            gates = pyro.sample(GATES, dist.Normal(zeros, torch.ones_like(zeros)).to_event(1))
            with federation.observations() as obs:
                y = dist.Categorical(logits=self.outputs(w, gates, obs[self.x]))
                pyro.sample(self.y, y, obs=obs.get(self.y))

    def outputs(self, weights: Tensor, gates: Tensor, x: Tensor) -> Tensor:
        """f(x; ψ, ζ), the logits of every row.

        Args:
            weights: ω, ``(..., K, 1, D)``.
            gates: ζ, ``(..., K, 1, G)``.
            x: ``(K, B, *event)``.

        Returns:
            ``(..., K, B, classes)``.

        Example:
            >>> import torch
            >>> from bayesfed.models.modulated import Modulated
            >>> model = Modulated(3, 4, 2, context=5)
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
        """g(D; μ): what the modulator makes of each client's labelled rows, in whatever order they come.

        Args:
            weights: ω, ``(K, 1, D)``; the result is differentiable in it.
            x: ``(K, B, *event)``.
            y: labels ``(K, B)``.
            mask: bool ``(K, B)``: the rows that are read.

        Returns:
            ζ, ``(K, 1, G)``.

        Example:
            >>> import torch
            >>> from bayesfed.models.modulated import Modulated
            >>> model = Modulated(3, 4, 2, context=5)
            >>> x, y = torch.ones(7, 6, 3), torch.zeros(7, 6)
            >>> model.gates(torch.zeros(7, 1, model.size), x, y, y == 0).shape
            torch.Size([7, 1, 4])
        """
        mu = weights[..., self.base_size :]
        onehot = nn.functional.one_hot(y.long(), self.sizes[-1]).to(weights.dtype)
        return apply(self.modulator, mu, x, onehot, mask.to(weights.dtype)).unsqueeze(-2)


class _Base(nn.Module):
    """f: an MLP with modulated hidden layers. ζ stands first among its parameters, ``(G,)``."""

    def __init__(self, sizes: Sequence[int], film: bool) -> None:
        super().__init__()
        self.film = film
        self.widths = [width * (2 if film else 1) for width in sizes[1:-1]]
        self.gates = nn.Parameter(torch.zeros(sum(self.widths)))
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in itertools.pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        *hidden, head = self.layers
        for layer, gates in zip(hidden, self.gates.split(self.widths), strict=True):
            x = layer(x).relu()
            if self.film:
                scale, shift = gates.chunk(2)
                x = (1 + scale) * x + shift
            else:
                x = x * gates.sigmoid()
        return head(x)


class _Modulator(nn.Module):
    """g: rows ``(B, *event)``, one-hot labels ``(B, classes)`` and which count ``(B,)``, to ζ ``(G,)``."""

    def __init__(self, sizes: Sequence[int], context: int, gates: int) -> None:
        super().__init__()
        self.of_x = mlp(sizes[0], context)
        self.of_row = mlp(context + sizes[-1], context, context)
        self.of_context = mlp(context, context, gates)

    def forward(self, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        rows = self.of_row(torch.cat([self.of_x(x.flatten(1)).relu(), y], -1))
        context = (weight[:, None] * rows).sum(0) / weight.sum().clamp(min=1)
        return self.of_context(context)
