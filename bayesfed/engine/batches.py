"""Batches: the rows that clients use in their local steps."""

import math
from functools import cache, lru_cache

import torch
from torch import Tensor

from bayesfed.data.batch import Batch
from bayesfed.data.chunks import KEPT
from bayesfed.data.federation import Federation
from bayesfed.data.minibatches import Minibatches
from bayesfed.elbo import noise

_LITTLE = 50_000  # numbers of a batch below which a smaller batch makes a step no faster
_BLOCK = 16  # steps whose rows are located at once


def padded_length(federation: Federation, lengths: Tensor) -> int:
    """The number of rows to which a full batch of clients of these lengths is padded.

    Few lengths mean few shapes to trace and compile: the length of the longest client of all if this is little work,
    else the next of a geometric sequence with ratio 1.2.
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
    """The rows that each client uses in a local step: all, or the next ``batch_size`` of a shuffled order.

    ``None`` in place of the step gives all rows. A round goes through all of a client's rows before it uses one again,
    which leaves less noise in the mean of its gradients than rows drawn again in each step.
    """
    lengths = federation.lengths[clients]
    places = torch.arange(padded_length(federation, lengths))
    places = torch.where(places < lengths[:, None], places, -1)
    if batch_size is None or batch_size >= int(lengths.max()):
        full = federation.batch(clients, places)
        counts = None if federation.counts is None else federation.counts.cpu()[clients.cpu()]
        return Minibatches(lambda step: full, lengths, places.shape[1], counts)
    order = noise.shuffle(noise.fold(keys, noise.word("rows")), lengths)[None]
    here = clients.to(keys.device)
    slots = torch.arange(batch_size, device=keys.device)
    own = lengths[:, None].to(keys.device)

    @lru_cache(maxsize=2)
    def locate(block: int) -> tuple[Tensor, ...]:
        """The places of the rows of some steps, ``(steps, K, batch_size)``."""
        steps = block * _BLOCK + torch.arange(_BLOCK, device=keys.device)[:, None, None]
        nth = torch.where(own > batch_size, (steps * batch_size + slots) % own, slots)
        rows = order.expand(_BLOCK, -1, -1).gather(2, nth.clamp(max=order.shape[2] - 1))
        return federation.locate(here, torch.where(nth < own, rows, -1))

    def at(step: int | None) -> Batch:
        if step is None:
            return federation.batch(clients, places)
        rows, mask, scale = (x[step % _BLOCK] for x in locate(step // _BLOCK))
        return federation.gather(here, rows, mask, scale)

    period, rest = divmod(int(lengths[0]), batch_size)
    small = int(lengths.sum()) * federation.numbers_per_row <= KEPT
    if rest or not small or (lengths != lengths[0]).any():
        return Minibatches(at, lengths, batch_size)
    cached = cache(at)  # every epoch has the minibatches of the first
    return Minibatches(
        lambda step: cached(step if step is None else step % period), lengths, batch_size
    )
