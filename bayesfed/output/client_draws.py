"""Draws of θ and of some clients' variables, with weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesfed.elbo import noise


@dataclass(frozen=True, eq=False)
class Draws:
    """S draws of θ and of K clients' variables.

    Attributes:
        values: draws by latent site of the model, ``(S, K or 1, 1, *event)``.
        count: S.
        log_weights: log weight of each draw for each client, ``(S, K)``; None for equal weights.
    """

    values: Mapping[str, Tensor]
    count: int
    log_weights: Tensor | None = None

    def normalised_log_weights(self, clients: int) -> Tensor:
        """Return log weights whose exponentials sum to 1 for each of K clients: ``(S, K)``."""
        if self.log_weights is None:
            return torch.full((self.count, clients), -math.log(self.count))
        return self.log_weights.log_softmax(0)

    def resample(self, groups: int, count: int, keys: Tensor) -> Draws:
        """Choose ``count`` draws of each of some equal consecutive groups by weight, for each client separately.

        Sampling importance resampling (Rubin 1987): as groups grow, these become draws from the client's posterior.

        Args:
            groups: G, of S / G draws each.
            count: draws from each group, with replacement.
            keys: the clients' noise streams, ``(K,)``.
        """
        if self.log_weights is None:
            raise ValueError("draws with equal weights cannot be resampled")
        size, clients = self.count // groups, len(keys)
        weights = self.log_weights.double().reshape(groups, size, clients)
        below = weights.softmax(1).cumsum(1).transpose(1, 2).contiguous()  # (G, K, size)
        u = noise.uniform(noise.fold(keys, noise.word("resample")), (groups, count)).transpose(0, 1)
        nth = torch.searchsorted(below, u.contiguous()).clamp(max=size - 1)  # (G, K, count)
        first = size * torch.arange(groups, device=nth.device)[:, None, None]
        nth = (first + nth).transpose(1, 2).reshape(-1, clients)
        who = torch.arange(clients, device=nth.device)
        values = {
            name: value.expand(-1, clients, *value.shape[2:])[nth, who]
            for name, value in self.values.items()
        }
        return Draws(values, groups * count)
