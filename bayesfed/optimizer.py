"""Adam as a pure function of (parameters, gradients, state), for the server or for a row per client.

torch.optim keeps its state by parameter identity and one step count for all; a federation needs the
state of each client apart, since a client steps only when it takes part.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

State = dict[str, dict[str, Tensor]]


def init(params: Mapping[str, Tensor], rows: int | None = None) -> State:
    """Zero moments; ``step`` has shape ``()``, or ``(rows,)`` where each row steps by itself."""
    zeros = {name: torch.zeros_like(value) for name, value in params.items()}
    like = next(iter(params.values()), torch.zeros(()))
    step = torch.zeros(() if rows is None else (rows,), dtype=like.dtype, device=like.device)
    return {
        "params": dict(params),
        "mean": zeros,
        "square": {name: value.clone() for name, value in zeros.items()},
        "step": {"step": step},
    }


def ascend(
    state: State,
    grads: Mapping[str, Tensor],
    lr: float,
    eps: float = 1e-8,
    beta1: float = 0.9,
    beta2: float = 0.999,
) -> State:
    """One Adam step uphill (Kingma & Ba 2015, Algorithm 1, with the sign of maximisation)."""
    step = state["step"]["step"] + 1
    new: State = state | {"params": {}, "mean": {}, "square": {}, "step": {"step": step}}
    for name, value in state["params"].items():
        grad = grads[name]
        mean = beta1 * state["mean"][name] + (1 - beta1) * grad
        square = beta2 * state["square"][name] + (1 - beta2) * grad.square()
        t = step.reshape(step.shape + (1,) * (value.ndim - step.ndim))
        corrected = mean / (1 - beta1**t)
        direction = corrected / ((square / (1 - beta2**t)).sqrt() + eps)
        new["params"][name] = value + lr * direction.clamp(-1.0, 1.0)
        new["mean"][name], new["square"][name] = mean, square
    return new


def take(state: State, rows: Tensor) -> State:
    """The state of some rows."""
    return {part: {n: v[rows] for n, v in tensors.items()} for part, tensors in state.items()}


def put(state: State, rows: Tensor, values: State) -> None:
    """Store the state of some rows, in place."""
    for part, tensors in state.items():
        for name, tensor in tensors.items():
            tensor[rows] = values[part][name]
