"""Functions of many draws of θ, at some of which a program fails to factorise a matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def skip_failing(
    function: Callable[..., tuple[Tensor, ...]],
    draws: Sequence[Tensor],
    failed: Callable[..., tuple[Tensor, ...]],
) -> tuple[Tensor, ...]:
    """Compute a function of draws; where it raises a ``LinAlgError``, find the draws that are the reason, by halves.

    Args:
        function: ``function(*draws)``, tensors with the draws in front.
        draws: tensors with the same number of draws in front.
        failed: the result at a single draw at which the function fails, as a function of it.

    Example:
        >>> import torch
        >>> from bayesfed.output.failing_draws import skip_failing
        >>> root = lambda x: (torch.linalg.cholesky(x[:, None, None])[:, 0, 0],)
        >>> skip_failing(root, [torch.tensor([4.0, -1.0, 9.0])], lambda x: (torch.full_like(x, torch.nan),))
        (tensor([2., nan, 3.]),)
    """
    try:
        return function(*draws)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        if len(draws[0]) == 1:
            return failed(*draws)
        halves = zip(*(x.tensor_split(2) for x in draws), strict=True)
        parts = [skip_failing(function, half, failed) for half in halves]
        return tuple(torch.cat(own) for own in zip(*parts, strict=True))
