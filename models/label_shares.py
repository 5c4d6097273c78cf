"""Label shares: how often a client has each label, and each sub-class of a label, integrated out of the model.

.. code-block:: text

    client i    π_i ~ Dirichlet(A μ)                            label shares; μ those of all clients together
    row j       y_ij ~ Categorical(π_i),   p(x_ij | y_ij = k) = g(x_ij) softmax_k(z(x_ij)) / μ_k

z are the outputs of a classifier of all clients' rows, and g the density of their inputs. The joint density of a row is
π_ik / μ_k · softmax_k(z) · g(x): so weights are fitted by the usual likelihood softmax_k(z), without π_i, whose
posterior given the labels of a client's rows, n_ik of label k, is Dirichlet(A μ + n_i). With π_i integrated out a
further row of the client has

.. code-block:: text

    p_i(k | x) ∝ softmax_k(z(x)) · (n_ik + A μ_k) / ((n_i + A) μ_k)

which is used for predictions and for personal steps.

A label may consist of M sub-classes, which clients have in different shares, such as two digits that make one label.
The sub-class of a row is a discrete variable, summed out, and its shares ρ_ik are the client's:

.. code-block:: text

    client i    ρ_ik ~ Dirichlet(a, ..., a)        of the M sub-classes of each label k
    row j       m_ij ~ Categorical(ρ_ik) given y_ij = k,   p(x_ij | k, m) ∝ g(x_ij) exp z_km(x_ij)
    so that     p(k | x) ∝ Σ_m ρ_ikm exp z_km(x)

The client's rows give q(ρ_ik) = Dirichlet(a + c_ik) by variational EM, c_ikm being the expected number of its rows with
label k in sub-class m: at the θ that a round starts with, at which the steps of the round have E[ρ_ik], and again at
the parameters that predict.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor, nn

from bayesfed.data.federation import Federation

SHARES = "shares"
"""The field of label shares ``(rows, classes)`` that, where rows to predict have it, replace the client's own."""
SPREAD = 0.3
"""a, the prior of the shares of sub-classes: below 1 a client has few of them."""
EM_STEPS = 30


@dataclass(frozen=True)
class LabelShares:
    """The prior of clients' label shares, Dirichlet(A μ).

    Attributes:
        mean: μ, the label shares of all clients together, all positive.
        concentration: A: the prior counts as much as A rows of a client. Near 0 a client has no further labels
            than its rows have; large values make all clients alike.

    Raises:
        ValueError: a share is not positive, they do not sum to 1, or the concentration is not positive.

    Example:
        >>> from bayesfed.models import LabelShares
        >>> LabelShares((0.5, 0.25, 0.25), concentration=2.0).concentration
        2.0
    """

    mean: Sequence[float]
    concentration: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "mean", tuple(float(share) for share in self.mean))
        if min(self.mean, default=0.0) <= 0 or not math.isclose(sum(self.mean), 1, abs_tol=1e-4):
            raise ValueError(
                f"mean is {self.mean}: the label shares of all clients together are positive and sum to 1"
            )
        if not self.concentration > 0 or math.isinf(self.concentration):
            raise ValueError(f"concentration is {self.concentration}: it must be a positive number")

    @classmethod
    def learn(
        cls, federation: Federation, *, y: str = "y", classes: int | None = None
    ) -> LabelShares:
        """Learn the prior from the clients' label counts n_ik.

        μ_k is proportional to Σ_i n_ik + ½. A maximises the likelihood of each row given the other rows of its client,
        Σ_ik n_ik log((n_ik − 1 + A μ_k) / (n_i − 1 + A)), plus ½ log(A / (n̄ + A)), which counts as half a row of a
        label that its client has not had. Both need sums over clients only: for each label a histogram of n_ik, and one
        of n_i.

        Args:
            federation: the clients of the fit.
            y: the field of labels, 0 to classes − 1, ``(rows,)``; rows where it is NaN are left out.
            classes: number of labels; by default the largest one, plus one.

        Raises:
            ValueError: a label is no integer from 0 to classes − 1 (names the client).

        Example:
            >>> from bayesfed import datasets, models
            >>> train, _ = datasets.digits()  # three of the ten digits for each client
            >>> shares = models.LabelShares.learn(train)
            >>> len(shares.mean), shares.concentration < 0.1
            (10, True)
        """
        counts = label_counts(federation, y, classes)
        total = counts.sum(0) + 0.5
        mean = total / total.sum()
        grid = torch.logspace(-4, 4, 400, dtype=counts.dtype).tolist()
        best = max(grid, key=lambda value: _left_out(counts, mean, value))
        return cls(tuple(mean.tolist()), best)

    def log_ratio(self, counts: Tensor) -> Tensor:
        """Return log E[π_ik | n_i] − log μ_k of label counts ``(..., classes)``: 0 for a client without rows."""
        mean = counts.new_tensor(self.mean)
        total = counts.sum(-1, keepdim=True) + self.concentration
        return (counts / mean + self.concentration).log() - total.log()


class ClientLabels(dist.Categorical):
    """Labels of a client's rows, its shares integrated out (see :mod:`bayesfed.models.label_shares`).

    As any observed distribution with the methods ``evidence``, ``given`` and ``left_out`` it is conditioned on the
    client's own rows by predictions and by personal steps, and with ``in_training`` and ``trained`` by the steps of a
    round; without evidence its density is the usual one of a classifier.

    Args:
        logits: z, ``(..., K, B, classes · M)``, the M sub-classes of a label side by side.
        prior: of the label shares; by default they are those of all clients.
        shares: those of the rows, ``(K, B, classes)``, where they are known from elsewhere.
        subclasses: M.

    Raises:
        ValueError: the prior has another number of labels than there are outputs, or these are no multiple of M.

    Example:
        >>> import torch
        >>> from bayesfed.models.label_shares import ClientLabels, LabelShares
        >>> labels = ClientLabels(torch.zeros(1, 4, 2), LabelShares((0.5, 0.5), concentration=2.0))
        >>> counts = labels.evidence(torch.tensor([[0, 0, 0, 1]]), torch.tensor([[True, True, True, False]]))
        >>> counts, labels.given(counts).probs[0, 0]
        (tensor([[[3., 0.]]]), tensor([0.8000, 0.2000]))
    """

    def __init__(
        self,
        logits: Tensor,
        prior: LabelShares | None = None,
        shares: Tensor | None = None,
        subclasses: int = 1,
    ) -> None:
        labels, rest = divmod(logits.shape[-1], subclasses)
        if rest:
            raise ValueError(
                f"the network has {logits.shape[-1]} outputs, which are no multiple of subclasses={subclasses}: a "
                "label has as many outputs as sub-classes"
            )
        if prior is not None and labels != len(prior.mean):
            raise ValueError(
                f"label_shares has {len(prior.mean)} labels, and the network outputs for {labels}: they must "
                "be as many; LabelShares.learn(..., classes=) sets the number"
            )
        self.prior, self.shares, self.subclasses = prior, shares, subclasses
        self.cells = logits.unflatten(-1, (labels, subclasses))
        super().__init__(logits=self.cells.logsumexp(-1))

    @property
    def in_training(self) -> bool:
        """Whether the steps of a round are conditional on a client's own rows."""
        return self.subclasses > 1

    def expand(self, batch_shape: Any, _instance: Any = None) -> Any:
        """Return the same distribution over more draws or clients."""
        cells = self.cells.flatten(-2)
        cells = cells.expand(*batch_shape, cells.shape[-1])
        return ClientLabels(cells, self.prior, self.shares, self.subclasses)

    def evidence(self, value: Tensor, mask: Tensor) -> Tensor:
        """Return the counts c_ikm of the rows that count, ``(..., K, 1, classes · M)``; of label k they sum to n_ik."""
        labels = one_hot(value, self.logits) * mask.unsqueeze(-1)
        counts = labels.sum(-2).unsqueeze(-1).expand(*self.cells.shape[:-3], *self.cells.shape[-2:])
        counts = counts / self.subclasses
        for _ in range(EM_STEPS if self.subclasses > 1 else 0):
            counts = (labels.unsqueeze(-1) * self._responsibilities(labels, counts)).sum(-3)
        return counts.flatten(-2).unsqueeze(-2)

    def given(self, counts: Tensor) -> dist.Categorical:
        """Return the distribution of further rows of the clients with these counts."""
        logits = self.trained(counts).logits
        labels = counts.unflatten(-1, self.cells.shape[-2:]).sum(-1)
        return dist.Categorical(logits=logits + label_offset(self.prior, self.shares, labels))

    def trained(self, counts: Tensor) -> dist.Categorical:
        """Return the distribution of rows of the clients with these counts in which all have the same label shares."""
        shares = counts.unflatten(-1, self.cells.shape[-2:]) + SPREAD
        shares = shares / shares.sum(-1, keepdim=True)
        return dist.Categorical(logits=(self.cells + shares.log().to(self.cells)).logsumexp(-1))

    def left_out(self, counts: Tensor, value: Tensor) -> dist.Categorical:
        """Return the distribution of each of the rows that were counted given the others."""
        labels, cells = one_hot(value, self.logits), counts.unflatten(-1, self.cells.shape[-2:])
        own = labels.unsqueeze(-1) * self._responsibilities(labels, cells.squeeze(-3))
        return self.given((cells - own).clamp(min=0).flatten(-2))

    def _responsibilities(self, labels: Tensor, counts: Tensor) -> Tensor:
        """Return q(m) of each row given its label, ``(..., K, B, 1, M)``, at counts ``(..., K, classes, M)``."""
        prior = SPREAD + counts
        log_shares = prior.digamma() - prior.sum(-1, keepdim=True).digamma()
        own = labels.unsqueeze(-1) * (self.cells + log_shares.unsqueeze(-3))
        return own.sum(-2, keepdim=True).softmax(-1)


def one_hot(labels: Tensor, logits: Tensor) -> Tensor:
    """Return 1 at each label and 0 elsewhere, ``(..., classes)``, of the kind of the logits; 0 where it is NaN."""
    classes = torch.arange(logits.shape[-1], device=labels.device)
    return (labels.unsqueeze(-1) == classes).to(logits)


def label_offset(prior: LabelShares | None, shares: Tensor | None, counts: Tensor) -> Tensor:
    """Return the offset of the logits of further rows ``(..., classes)``: 0 without a prior.

    Args:
        prior: of the label shares.
        shares: those of the rows, where they are known from elsewhere.
        counts: the label counts of each client's rows.
    """
    if prior is None:
        return torch.zeros_like(counts)
    if shares is None:
        return prior.log_ratio(counts)
    return shares.to(counts).log() - counts.new_tensor(prior.mean).log()


def start_subclasses(
    module: nn.Module,
    federation: Federation,
    subclasses: int,
    *,
    width: float = 3.0,
    x: str = "x",
    y: str = "y",
) -> nn.Module:
    """Return a copy of a module in which the sub-classes of each label start apart.

    The weights of the last linear layer are multiplied by ``width``. Then the mean of each output z_km over the rows
    of label k, which is a sum over clients, is subtracted from its bias: so that each sub-class is the nearest for some
    of the rows. Where they start alike, clients do not find them.

    Args:
        module: with M outputs side by side for each label, the last linear layer's.
        federation: the clients of the fit.
        subclasses: M.
        width: the factor.
        x: the field of inputs.
        y: the field of labels.

    Raises:
        ValueError: the module has no linear layer with a bias.

    Example:
        >>> from bayesfed import datasets, models
        >>> train, _ = datasets.digits()
        >>> module = models.start_subclasses(models.mlp(64, 32, 10 * 4), train, subclasses=4)
        >>> network = models.Network(module, subclasses=4)
    """
    started = copy.deepcopy(module)
    head = next((m for m in reversed(list(started.modules())) if isinstance(m, nn.Linear)), None)
    if head is None or head.bias is None:
        raise ValueError(
            "the module has no linear layer with a bias, whose outputs would start apart"
        )
    with torch.no_grad():
        head.weight.mul_(width)
        z = started(federation[x]).unflatten(-1, (-1, subclasses))
        labels = federation[y]
        for k, bias in enumerate(head.bias.unflatten(0, (-1, subclasses))):
            if (labels == k).any():
                bias -= z[labels == k, k].mean(0)
    return started


def label_counts(federation: Federation, y: str, classes: int | None) -> Tensor:
    """Count the labels of each client: ``(N, classes)``, float64 on the CPU.

    Raises:
        ValueError: see :meth:`LabelShares.learn`.
    """
    value, owner = federation[y].cpu(), federation.owner.cpu()
    seen = ~value.isnan()
    value, owner = value[seen], owner[seen]
    count = int(value.max()) + 1 if classes is None else classes
    wrong = (value < 0) | (value >= count) | (value != value.long())
    if wrong.any():
        client = federation.names[int(owner[wrong][0])]
        raise ValueError(
            f"client {client!r}: {value[wrong][0].item():g} in field {y!r} is no label: label shares are for the "
            f"integers 0 to {count - 1}"
        )
    places = owner * count + value.long()
    found = torch.bincount(places, minlength=len(federation) * count)
    return found.reshape(len(federation), count).double()


def _left_out(counts: Tensor, mean: Tensor, concentration: float) -> float:
    """Return the objective of :meth:`LabelShares.learn`."""
    total = counts.sum(1, keepdim=True)
    each = (counts - 1 + concentration * mean) / (total - 1 + concentration)
    rows = torch.where(counts > 0, counts * each.log(), 0.0).sum()
    unseen = concentration / (total.mean() + concentration)
    return float(rows + unseen.log() / 2)
