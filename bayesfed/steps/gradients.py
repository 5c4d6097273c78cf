"""Clients' own copies of parameters, their gradients, gradient steps to differentiate through, and annealing."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from bayesfed.guides.fisher import scaled
from bayesfed.steps.optimizer import bounded

Params = Mapping[str, Tensor]
ORDERS = ("detached", "first", "second")


def leaves(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the same values as leaves of a new autograd graph."""
    return {name: value.detach().requires_grad_() for name, value in params.items()}


def copies(params: Mapping[str, Tensor], clients: int) -> dict[str, Tensor]:
    """Return each client's own copy of the server's parameters: ``(K, 1, ...)``."""
    return {n: v.detach().expand(clients, 1, *v.shape).clone() for n, v in params.items()}


def gradients(
    loss: Tensor,
    params: Mapping[str, Tensor],
    *,
    create_graph: bool = False,
    retain_graph: bool | None = None,
) -> dict[str, Tensor]:
    """Return the gradients of losses ``(K,)`` in every client's parameters, zeros where they do not depend on them."""
    found = torch.autograd.grad(
        loss.sum(),
        list(params.values()),
        create_graph=create_graph,
        retain_graph=retain_graph,
        materialize_grads=True,
    )
    return dict(zip(params, found, strict=True))


def annealed(final: float, done: float) -> float:
    """Return the factor on the learning rates when a fraction ``done`` of the rounds is over: 1 down to ``final``.

    Half a cosine (Loshchilov & Hutter 2017, eq. 5): long at high rates, to get there, then long at low ones,
    to average the noise of cohorts and minibatches out.
    """
    return final + (1 - final) * (1 + math.cos(math.pi * done)) / 2


def elapsed(final: float, done: float) -> float:
    """Return the part of all steps, measured by their rates, that is over after a part of the rounds: ∫ annealed.

    Example:
        >>> from bayesfed.steps.gradients import elapsed
        >>> elapsed(0.01, 0.0), round(elapsed(0.01, 0.5), 2), elapsed(0.01, 1.0), elapsed(1.0, 0.25)
        (0.0, 0.81, 1.0, 0.25)
    """
    area = final * done + (1 - final) * (done + math.sin(math.pi * done) / math.pi) / 2
    return area / (final + (1 - final) / 2)


def adapted(
    loss: Callable[[Params, int], Tensor],
    start: Params,
    steps: int,
    lr: float,
    units: dict[str, Tensor] | None = None,
    *,
    order: str = "detached",
    most: float | None = None,
) -> dict[str, Tensor]:
    """Return φ_i of K clients after gradient steps.

    Args:
        loss: L_i ``(K,)`` of the parameters at a step, counted from 0.
        start: φ⁰, ``(K, ...)`` each.
        steps: k.
        lr: η.
        units: of some parameters, in which a step is taken; by default 1.
        order: what the result is differentiable in. ``"second"``: in ``start``, through the steps. ``"first"``: in
            ``start``, the steps' gradients taken as constants. ``"detached"``: in nothing, as always where
            ``start`` requires no gradient.
        most: how large a client's gradient may be, see :func:`~bayesfed.steps.optimizer.bounded`; by default any.

    Raises:
        ValueError: an unknown order.

    Example:
        >>> import torch
        >>> from bayesfed.steps.gradients import adapted
        >>> start = {"w": torch.tensor([1.0, 2.0], requires_grad=True)}
        >>> w = adapted(lambda phi, step: phi["w"] ** 2 / 2, start, 2, lr=0.5, order="second")["w"]
        >>> w.tolist(), torch.autograd.grad(w.sum(), start["w"])[0].tolist()
        ([0.25, 0.5], [0.25, 0.25])
    """
    if order not in ORDERS:
        raise ValueError(f"order is {order!r}: use one of {ORDERS}")
    if not any(value.requires_grad for value in start.values()):
        order = "detached"
    phi = dict(start)
    for step in range(steps):
        if order == "detached":
            phi = {name: value.detach() for name, value in phi.items()}
        leaves = {  # what no gradient reaches, such as a fixed scale, has none yet
            name: value if value.requires_grad else value.clone().requires_grad_()
            for name, value in phi.items()
        }
        found = gradients(
            loss(leaves, step),
            leaves,
            create_graph=order == "second",
        )
        found = scaled(found, units or {})
        if most is not None:
            found = bounded(found, most)
        found = scaled(found, units or {})
        phi = {name: value - lr * found[name] for name, value in leaves.items()}
    return {name: value.detach() for name, value in phi.items()} if order == "detached" else phi
