"""The rows that clients use at their local steps, as batches."""

from __future__ import annotations

import math
from functools import cache, lru_cache

import torch
from torch import Tensor

from bayesfed.data.batch import Batch
from bayesfed.data.chunks import KEPT
from bayesfed.data.federation import Federation
from bayesfed.data.minibatches import Minibatches
from bayesfed.elbo import noise

_LITTLE = 50_000  # numbers of a batch that a step takes no longer for than for fewer
_TOGETHER = 16  # steps whose rows are found at once


def width(federation: Federation, lengths: Tensor) -> int:
    """How many rows a full batch of clients of these lengths is padded to.

    Few widths are few shapes to trace and compile: that of the longest client of all where this is little work, else
    the next of a ladder with steps of a fifth.
    """
    own, found = int(lengths.max()), int(federation.lengths.max())
    if found * len(lengths) * federation.numbers_per_row <= _LITTLE:
        return found
    while (smaller := math.ceil(found / 1.2)) >= own and smaller < found:
        found = smaller
    return found


def batches(
    federation: Federation, clients: Tensor, batch_size: int | None, keys: Tensor
) -> Minibatches:
    """The rows that each client uses at a local step: all, or the next ``batch_size`` of a shuffled order.

    ``None`` in place of the step asks for all.

    A round goes through a client's rows before it meets one again, which leaves less noise in the mean of its
    gradients than rows drawn afresh at each step.
    """
    lengths = federation.lengths[clients]
    places = torch.arange(width(federation, lengths))
    places = torch.where(places < lengths[:, None], places, -1)
    if batch_size is None or batch_size >= int(lengths.max()):
        full = federation.batch(clients, places)
        return Minibatches(lambda step: full, lengths, places.shape[1])
    order = noise.shuffle(noise.fold(keys, noise.word("rows")), lengths)[None]
    here = clients.to(keys.device)
    slots = torch.arange(batch_size, device=keys.device)
    own = lengths[:, None].to(keys.device)

    @lru_cache(maxsize=2)
    def located(block: int) -> tuple[Tensor, ...]:
        """Where the rows of some steps are, ``(steps, K, batch_size)``."""
        steps = block * _TOGETHER + torch.arange(_TOGETHER, device=keys.device)[:, None, None]
        nth = torch.where(own > batch_size, (steps * batch_size + slots) % own, slots)
        rows = order.expand(_TOGETHER, -1, -1).gather(2, nth.clamp(max=order.shape[2] - 1))
        return federation.locate(here, torch.where(nth < own, rows, -1))

    def at(step: int | None) -> Batch:
        if step is None:
            return federation.batch(clients, places)
        rows, mask, scale = (x[step % _TOGETHER] for x in located(step // _TOGETHER))
        return federation.gather(here, rows, mask, scale)

    period, rest = divmod(int(lengths[0]), batch_size)
    kept = int(lengths.sum()) * federation.numbers_per_row <= KEPT
    if rest or not kept or (lengths != lengths[0]).any():
        return Minibatches(at, lengths, batch_size)
    again = cache(at)  # every epoch has the minibatches of the first
    return Minibatches(
        lambda step: again(step if step is None else step % period), lengths, batch_size
    )
