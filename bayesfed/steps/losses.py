"""The loss of a client at point estimates of θ and w_i, and sums of squares of its parameters.

L_i(w_i, θ) = (−log p(D_i | w_i, θ) − log p(θ) / N) / n_i
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from bayesfed.data.batch import Batch
from bayesfed.elbo.elbo import centred_losses, client_losses
from bayesfed.elbo.program import Params, Program
from bayesfed.guides.locals import with_model_locals


def client_loss(
    program: Program, params: Mapping[str, Tensor], batch: Batch, *, at_prior: bool = False
) -> Tensor:
    """Return L_i of K clients, ``(K,)``.

    Args:
        program: the model/guide pair.
        params: θ, shared or a copy for each client, and the clients' own parameters.
        batch: the clients' rows.
        at_prior: w_i is the centre of p(w_i | θ), through which the loss is differentiable in θ.
    """
    params = with_model_locals(program, params, batch)
    losses = (
        centred_losses(program, params, batch)
        if at_prior
        else client_losses(program, params, batch, {}, 1)
    )
    return (losses.nll + losses.hyper / program.clients) / losses.rows


RISE = 5.0
"""The rise of a loss, in nats a row, that is uphill."""


def uphill(before: Tensor, after: Tensor, rows: Tensor) -> Tensor:
    """Return whether steps down a loss per row ``(K,)`` have raised it, beyond the noise of minibatches: bool ``(K,)``.

    A rise of more than five nats for each row, and one more, or to a number that is not finite, shows steps that are
    too long for the curvature of the loss. Smaller ones occur in minibatches of networks, and averaging mends them. A
    loss that was not finite before is another matter.

    Example:
        >>> import torch
        >>> from bayesfed.steps.losses import uphill
        >>> before, after = torch.tensor([0.1, 0.1, 0.1]), torch.tensor([0.9, 9.0, torch.nan])
        >>> uphill(before, after, torch.tensor([10.0, 10.0, 10.0])).tolist()
        [False, True, True]
    """
    return before.isfinite() & ~(rows * (after - before) <= 1 + RISE * rows)


def squared_distance(own: Params, other: Params, units: Params) -> Tensor | float:
    """Return ‖own − other‖² of each client, ``(K,)``, in units that are 1 where none are given."""
    found: Tensor | float = 0.0
    for name, value in own.items():
        gap = value - other[name]
        gap = gap / units[name] if name in units else gap
        found = found + gap.square().flatten(1).sum(1)
    return found


def inner_product(own: Params, other: Params) -> Tensor:
    """Return ⟨own, other⟩ of each client, ``(K,)``."""
    return torch.stack([(v * other[n]).flatten(1).sum(1) for n, v in own.items()]).sum(0)


def zeros_like(params: Mapping[str, Tensor]) -> Params:
    """Return zeros of the same shapes."""
    return {name: torch.zeros_like(value) for name, value in params.items()}


def per_client(numbers: Tensor, value: Tensor) -> Tensor:
    """Reshape numbers ``(K,)`` or ``(K, 1)`` so that they broadcast against values ``(K, ...)``."""
    return numbers.reshape(-1, *[1] * (value.ndim - 1))
