"""Optimisers as pure functions of (parameters, gradients, state), for the server or for a row per client.

torch.optim keeps its state by parameter identity and one step count for all; a federation needs the
state of each client apart, since a client steps only when it takes part.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from bayesfed.steps.losses import per_client, zeros_like
from bayesfed.tracing.compiler import tracing

State = dict[str, dict[str, Tensor]]
UNBOUNDED = 0.25
"""The root mean square up to which :func:`bounded` leaves gradients as they are, as a fraction of the largest."""
MOMENTUM = 0.9


def init(
    params: Mapping[str, Tensor], rows: int | None = None, device: torch.device | None = None
) -> State:
    """Return parameters with zero moments; ``step`` has shape ``()``, or ``(rows,)`` for rows that step alone.

    The device is needed where there may be no parameters.
    """
    like = next(iter(params.values()), torch.zeros((), device=device))
    step = torch.zeros(() if rows is None else (rows,), dtype=like.dtype, device=like.device)
    return {
        "params": dict(params),
        "mean": zeros_like(params),
        "square": zeros_like(params),
        "step": {"step": step},
    }


def ascend(
    state: State,
    grads: Mapping[str, Tensor],
    lr: float | Tensor,
    eps: float = 1e-8,
    beta1: float = 0.9,
    beta2: float = 0.999,
) -> State:
    """Take one Adam step uphill (Kingma & Ba 2015, Algorithm 1, with the sign of maximisation), of at most ``lr``.

    Algorithm 1 has no such limit: after many small gradients a large one makes a step of (1 − β₁) / √(1 − β₂),
    about 3.2 rates, in one number. Clients whose rows or draws are few have such gradients by chance.
    """
    step = state["step"]["step"] + 1
    unbias1, unbias2 = 1 - beta1**step, 1 - beta2**step
    new: State = state | {"params": {}, "mean": {}, "square": {}, "step": {"step": step}}
    for name, value in state["params"].items():
        grad, rows = grads[name], step.shape + (1,) * (value.ndim - step.ndim)
        mean = state["mean"][name].lerp(grad, 1 - beta1)
        square = (beta2 * state["square"][name]).addcmul(grad, grad, value=1 - beta2)
        corrected = mean / unbias1.reshape(rows)
        direction = corrected / ((square / unbias2.reshape(rows)).sqrt() + eps)
        new["params"][name] = value + (lr * direction.clamp(-1.0, 1.0)).to(value.dtype)
        new["mean"][name], new["square"][name] = mean, square
    return new


def begin(rule: str, params: Mapping[str, Tensor], rows: int | None = None) -> State:
    """Return the first state of an optimiser; arguments as for :func:`init`."""
    if rule == "adam":
        return init(params, rows)
    state: State = {"params": dict(params)}
    if rule == "momentum":
        state["velocity"] = zeros_like(params)
    return state


def clipped(grads: Mapping[str, Tensor], most: float = 1.0) -> dict[str, Tensor]:
    """Shorten gradients ``(K, ...)`` of K clients whose root mean square over all numbers exceeds ``most``.

    Networks never come near 1 in the mean loss of a row. A hierarchy of a few parameters does, where the noise of its
    rows is small: without a bound its steps diverge at rates that suit networks.

    Example:
        >>> import torch
        >>> from bayesfed.steps.optimizer import clipped
        >>> clipped({"w": torch.tensor([[3.0, 4.0], [0.5, 0.25]])}, most=2.5)["w"].tolist()
        [[2.1213202476501465, 2.8284270763397217], [0.5, 0.25]]
    """
    factor = (most**2 / _mean_squares(grads).clamp(min=most**2)).sqrt()
    if not tracing() and factor.device.type == "cpu" and bool((factor == 1).all()):
        return dict(grads)
    return {name: grad * per_client(factor, grad) for name, grad in grads.items()}


def bounded(grads: Mapping[str, Tensor], most: float = 1.0) -> dict[str, Tensor]:
    """Shorten gradients ``(K, ...)`` of K clients smoothly, to a root mean square over all numbers below ``most``.

    Their root mean square r over ``most`` becomes b + (1 − b) x / √(1 + x²) with x = (r − b) / (1 − b) beyond b = ¼;
    smaller ones are left as they are. Where :func:`clipped` begins to act it has a kink, and so has an objective that
    is evaluated after steps along its gradients: it may be largest at the kink, where no gradient vanishes.

    Example:
        >>> import torch
        >>> from bayesfed.steps.optimizer import bounded
        >>> found = bounded({"w": torch.tensor([[0.125], [1.0], [100.0]], dtype=torch.float64)})["w"]
        >>> found.squeeze(1).numpy().round(4).tolist()
        [0.125, 0.7803, 1.0]
    """
    size = (_mean_squares(grads) / most**2).clamp(min=1e-30).sqrt()
    beyond = ((size - UNBOUNDED) / (1 - UNBOUNDED)).clamp(min=0.0)
    factor = 1 - (1 - UNBOUNDED) * beyond * (1 - (1 + beyond.square()).rsqrt()) / size
    return {name: grad * per_client(factor, grad) for name, grad in grads.items()}


def _mean_squares(grads: Mapping[str, Tensor]) -> Tensor:
    """Return the mean squares over all numbers of gradients ``(K, ...)``, ``(K,)``."""
    flat = [grad.reshape(len(grad), -1) for grad in grads.values()]
    count = sum(part.shape[1] for part in flat)
    return torch.stack([part.square().sum(1) for part in flat]).sum(0) / count


def descend(
    rule: str,
    state: State,
    grads: Mapping[str, Tensor],
    lr: float | Tensor,
    active: Tensor | None = None,
    units: Mapping[str, Tensor] | None = None,
) -> State:
    """Take one step downhill with the clients that are ``active`` ``(K,)``.

    Args:
        rule: ``"sgd"``, ``"momentum"`` (heavy ball, 0.9) or ``"adam"``.
        state: of K clients, a row each.
        grads: the gradients.
        lr: the rate.
        active: bool ``(K,)``; by default all.
        units: of some parameters, in which the gradients and the step are; by default 1.

    Example:
        >>> import torch
        >>> from bayesfed.steps import optimizer
        >>> state = optimizer.begin("sgd", {"w": torch.ones(2)})
        >>> active = torch.tensor([True, False])
        >>> optimizer.descend("sgd", state, {"w": torch.ones(2)}, 0.25, active)["params"]["w"].tolist()
        [0.75, 1.0]
    """
    params, units = state["params"], units or {}
    # a step in units is taken from 0: beside a large value it would be rounded before it is multiplied by its unit
    base = {n: torch.zeros_like(v) if n in units else v for n, v in params.items()}
    new: State
    if rule == "adam":
        new = ascend(state | {"params": base}, {name: -grad for name, grad in grads.items()}, lr)
    else:
        velocity = {name: grads[name] for name in params}
        if rule == "momentum":
            velocity = {n: MOMENTUM * state["velocity"][n] + v for n, v in velocity.items()}
        new = state | {"params": {n: less(v, lr, velocity[n]) for n, v in base.items()}}
        if rule == "momentum":
            new["velocity"] = velocity
    for name, unit in units.items():
        if name in params:
            new["params"][name] = params[name] + unit * new["params"][name]
    return {part: where_active(state[part], tensors, active) for part, tensors in new.items()}


def less(value: Tensor, lr: float | Tensor, grad: Tensor) -> Tensor:
    """Return w − η g, in one pass."""
    if isinstance(lr, float):
        return value.sub(grad, alpha=lr)
    return torch.addcmul(value, grad, lr, value=-1)


def where_active(
    old: Mapping[str, Tensor], new: Mapping[str, Tensor], active: Tensor | None
) -> dict[str, Tensor]:
    """Return the new tensors ``(K, ...)`` of the clients that are ``active`` ``(K,)``, the old ones of the others."""
    if active is None:
        return dict(new)
    if not tracing() and active.device.type == "cpu" and bool(active.all()):
        return dict(new)
    return {n: torch.where(per_client(active, v), v, old[n]) for n, v in new.items()}


def take(state: State, rows: Tensor) -> State:
    """The state of some rows."""
    return {part: {n: v[rows] for n, v in tensors.items()} for part, tensors in state.items()}


def put(state: State, rows: Tensor, values: State) -> None:
    """Store what is given of some rows, in place."""
    for part, tensors in values.items():
        for name, value in tensors.items():
            state[part][name][rows] = value
