"""Clusters of clients: a client's network is one of C, and which one is a discrete variable of the client.

.. code-block:: text

    client i    c_i ~ Categorical(1/C, ..., 1/C)
    row j       y_ij ~ Categorical(softmax f(x_ij; w_{c_i}))
    so that     p(c_i = c | own rows) ∝ Π_j p(y_ij | x_ij, w_c)

The steps of a round are on the network that has the highest density of the client's rows at the θ that was sent, which
is IFCA (Ghosh et al. 2020, "An efficient framework for clustered federated learning", Algorithm 1) with averaged
models; predictions are averaged over p(c_i | own rows).
"""

from __future__ import annotations

import copy
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor, nn

from bayesfed.models.label_shares import LabelShares, label_offset, one_hot


class ClusteredLabels(dist.Categorical):
    """Labels of a client's rows, its cluster summed out (see :mod:`bayesfed.models.clusters`).

    Its methods ``evidence``, ``given``, ``left_out`` and ``trained`` are those of
    :class:`~bayesfed.models.label_shares.ClientLabels`.

    Args:
        logits: the outputs of the C networks side by side, ``(..., K, B, C · classes)``.
        clusters: C.
        prior: of the label shares; by default they are those of all clients.
        shares: those of the rows, ``(K, B, classes)``, where they are known from elsewhere.

    Example:
        >>> import torch
        >>> from bayesfed.models.clusters import ClusteredLabels
        >>> labels = ClusteredLabels(torch.tensor([[[0.0, 2.0, 2.0, 0.0]]]).expand(1, 3, 4), clusters=2)
        >>> evidence = labels.evidence(torch.tensor([[1, 1, 0]]), torch.tensor([[True, True, False]]))
        >>> labels.trained(evidence).probs[0, 0], labels.given(evidence).probs[0, 0]
        (tensor([0.1192, 0.8808]), tensor([0.1329, 0.8671]))
    """

    in_training = True

    def __init__(
        self,
        logits: Tensor,
        clusters: int,
        prior: LabelShares | None = None,
        shares: Tensor | None = None,
    ) -> None:
        self.clusters, self.prior, self.label_shares = clusters, prior, shares
        self.each = logits.unflatten(-1, (clusters, -1)).log_softmax(-1)
        super().__init__(logits=self.each.logsumexp(-2))

    def expand(self, batch_shape: Any, _instance: Any = None) -> Any:
        """Return the same distribution over more draws or clients."""
        each = self.each.flatten(-2)
        each = each.expand(*batch_shape, each.shape[-1])
        return ClusteredLabels(each, self.clusters, self.prior, self.label_shares)

    def evidence(self, value: Tensor, mask: Tensor) -> Tensor:
        """Return the rows' log density under each network, and their label counts: ``(..., K, 1, C + labels)``."""
        labels = one_hot(value, self.logits) * mask.unsqueeze(-1)
        fits = (labels.unsqueeze(-2) * self.each).sum((-3, -1))
        counts = labels.sum(-2).expand(*fits.shape[:-1], -1)
        return torch.cat([fits, counts], -1).unsqueeze(-2)

    def trained(self, evidence: Tensor) -> dist.Categorical:
        """Return the distribution of rows under the network that is the most probable for each client."""
        best = evidence[..., : self.clusters].argmax(-1)
        chosen = torch.nn.functional.one_hot(best, self.clusters).to(self.each)
        return dist.Categorical(logits=(chosen.unsqueeze(-1) * self.each).sum(-2))

    def given(self, evidence: Tensor) -> dist.Categorical:
        """Return the distribution of further rows of the clients."""
        fits, counts = evidence[..., : self.clusters], evidence[..., self.clusters :]
        logits = (fits.log_softmax(-1).unsqueeze(-1) + self.each).logsumexp(-2)
        return dist.Categorical(logits=logits + label_offset(self.prior, self.label_shares, counts))

    def left_out(self, evidence: Tensor, value: Tensor) -> dist.Categorical:
        """Return the distribution of each of the rows that were counted given the others."""
        labels = one_hot(value, self.logits)
        own = torch.cat([(labels.unsqueeze(-2) * self.each).sum(-1), labels], -1)
        return self.given(evidence - own)


def start_apart(module: nn.Module, clusters: int) -> list[nn.Module]:
    """Return a module and copies of it with other first weights, which are the same at every call.

    Raises:
        ValueError: no layer of the module can draw its first weights.
    """
    found = [module]
    with torch.random.fork_rng(devices=[]):
        for number in range(1, clusters):
            torch.manual_seed(number)
            other = copy.deepcopy(module)
            layers: list[Any] = [m for m in other.modules() if hasattr(m, "reset_parameters")]
            if not layers:
                raise ValueError(
                    "no layer of the module has reset_parameters(), by which the clusters' networks start apart"
                )
            for layer in layers:
                layer.reset_parameters()
            found.append(other)
    return found
