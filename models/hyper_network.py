"""Hyper-networks: a client's weights are the output of a network of all clients, at an embedding of the client."""

from dataclasses import dataclass, field
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor, nn

from bayesfed.functional.networks import apply, check_stateless, flatten
from bayesfed.models.label_shares import LabelShares
from bayesfed.models.network import label_distribution, mlp

SPREAD = 0.01
"""Factor on the first weights of the hyper-network's last layer, whose bias are the module's weights."""


@dataclass(frozen=True)
class HyperNetwork:
    r"""A classifier whose weights a hyper-network makes from an embedding of the client.

    .. code-block:: text

        client i    v_i ~ N(0, I)                       embedding
                    w_i = h(v_i; φ)                     h: two layers, φ a ``pyro.param`` of all clients
        row j       y_ij ~ Categorical(softmax f(x_ij; w_i))

    With ``FedPer`` a client takes steps on v_i and on its copy of φ: pFedHN (Shamsian et al. 2021, "Personalized
    federated learning using hypernetworks"), except that there the server has φ, and applies the chain rule to the
    change of w_i that a client returns. A new client takes steps on its embedding alone. An embedding has few
    numbers, so that its posterior can be had: with ``PFedVEM`` clients keep a Normal of it.

    Args:
        module: any module without state; h starts near its present weights for all clients.
        embedding: the number of dimensions of v_i.
        hidden: width of the hidden layer of h.
        label_shares: as of :class:`~bayesfed.models.Network`.
        x: the field of inputs ``(rows, *event)``.
        y: the field of labels, 0 to classes − 1, ``(rows,)``.

    Raises:
        ValueError: the module keeps state.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> train, test = datasets.digits()
        >>> network = models.HyperNetwork(models.mlp(64, 16, 10), embedding=4)
        >>> posterior = bf.fit(network, train, bf.FedPer(), rounds=2, batch_size=10)
        >>> posterior.sample(1)["embedding"].shape
        torch.Size([1, 20, 4])
    """

    module: nn.Module
    embedding: int = 8
    hidden: int = 32
    label_shares: LabelShares | None = None
    x: str = "x"
    y: str = "y"
    hyper: nn.Sequential = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_stateless(self.module)
        weights = flatten(self.module)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            hyper = mlp(self.embedding, self.hidden, len(weights))
            last: Any = hyper[-1]
            last.weight.mul_(SPREAD)
            last.bias.copy_(weights)
        object.__setattr__(self, "hyper", hyper)

    @property
    def __name__(self) -> str:
        return f"hyper-network of {type(self.module).__name__}"

    def __call__(self, federation: Any) -> None:
        """Run the Pyro program."""
        phi = pyro.param("hyper", lambda: flatten(self.hyper), event_dim=1)
        prior = dist.Normal(torch.zeros(self.embedding), 1.0).to_event(1)
        with federation.clients():
            v = pyro.sample("embedding", prior)
            with federation.observations() as obs:
                logits = apply(self.module, self.weights(phi, v), obs[self.x])
                y = label_distribution(logits, self.label_shares, obs)
                pyro.sample(self.y, y, obs=obs.get(self.y))

    def weights(self, phi: Tensor, v: Tensor) -> Tensor:
        """Return h(v; φ), ``(..., K, 1, D)``, of embeddings ``(..., K, 1, E)``."""
        lead = v.shape[:-2]
        each = phi.expand(*lead, 1, phi.shape[-1]).reshape(-1, 1, phi.shape[-1])
        return apply(self.hyper, each, v.reshape(-1, *v.shape[-2:])).reshape(*lead, 1, -1)
