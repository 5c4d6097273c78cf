"""The loop of a client's local steps, for K clients at once."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

S = TypeVar("S")


def local_loop(
    schedule: Tensor, device: torch.device, state: S, step: Callable[[S, int, Tensor | None], S]
) -> S:
    """Take all steps of a round.

    Args:
        schedule: the clients that take each step, bool ``(steps, K)``, on the CPU.
        device: where the clients' tensors lie.
        state: of K clients before the first step.
        step: gives the next state from a state, the number of the step and the mask ``(K,)`` of the clients that
            take it, None where all do.

    Example:
        >>> import torch
        >>> from bayesfed.steps.local_loop import local_loop
        >>> schedule = torch.tensor([[True, True], [True, False]])
        >>> def add(state, number, active):
        ...     return state + (1 if active is None else active)
        >>> local_loop(schedule, torch.device("cpu"), torch.zeros(2), add).tolist()
        [2.0, 1.0]
    """
    everyone = bool(schedule.all())
    masks = schedule.to(device)
    for number in range(len(schedule)):
        state = step(state, number, None if everyone else masks[number])
    return state


def all_clients(clients: int, steps: int) -> Tensor:
    """Return the schedule in which all K clients take every step, bool ``(steps, K)``."""
    return torch.ones(steps, clients, dtype=torch.bool)
