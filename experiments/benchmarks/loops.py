"""Federated training in plain PyTorch, client after client, as one would write it: what rounds are timed against.

A network 784-100-classes (or other sizes with FedAvg), an nn.Module or flat vectors where weights are random, autograd
and a step. Each loop trains for a round of a cohort, personalises clients, and predicts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayesfed import models

BATCH, EPOCHS, DRAWS = 50, 5, 5
Clients = Sequence[tuple[Tensor, Tensor]]


def batches(x: Tensor, y: Tensor, steps: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield minibatches of some steps, or of the epochs of a round."""
    done, most = 0, EPOCHS * -(-len(x) // BATCH) if steps is None else steps
    while done < most:
        for rows in torch.randperm(len(x)).split(BATCH)[: most - done]:
            yield x[rows], y[rows]
            done += 1


def descend(net: nn.Module, parts: Iterable[tuple[Tensor, Tensor]], loss: Any) -> None:
    """Take a gradient step on each minibatch."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for images, labels in parts:
        optimizer.zero_grad()
        loss(images, labels).backward()
        optimizer.step()


def add(total: dict[str, Tensor], net: nn.Module, clients: int) -> None:
    """Add a client's share to the mean of all."""
    for name, value in net.state_dict().items():
        total[name] += value / clients


def divergence(m: Tensor, v: Tensor, loc: Tensor, log_scale: Tensor) -> Tensor:
    """Return KL(N(m, e^2v) ‖ N(loc, scale²)), summed."""
    gap = ((2 * v).exp() + (m - loc) ** 2) / (2 * (2 * log_scale).exp())
    return (log_scale - v + gap - 0.5).sum()


class FedAvg:
    """One network for all, then one for each client."""

    def __init__(self, clients: Clients, *sizes: int) -> None:
        self.clients, self.sizes = clients, sizes
        self.server, self.net = models.mlp(*sizes), models.mlp(*sizes)
        self.personal: list[nn.Module] = []

    def _train(self, net: nn.Module, x: Tensor, y: Tensor, steps: int | None = None) -> None:
        net.load_state_dict(self.server.state_dict())
        descend(
            net, batches(x, y, steps), lambda images, labels: F.cross_entropy(net(images), labels)
        )

    def round(self, cohort: Sequence[int]) -> None:
        """Train the clients of a cohort."""
        total = {n: torch.zeros_like(v) for n, v in self.server.state_dict().items()}
        for i in cohort:
            self._train(self.net, *self.clients[i])
            add(total, self.net, len(cohort))
        self.server.load_state_dict(total)

    def personalize(self, clients: Clients, steps: int, *, new: bool) -> None:
        """Give each client a network of its own."""
        self.personal = [models.mlp(*self.sizes) for _ in clients]
        for net, (x, y) in zip(self.personal, clients, strict=True):
            self._train(net, x, y, steps)

    def predict(self, tests: Sequence[Tensor], draws: int) -> list[Tensor]:
        """Return the class probabilities of each client's images."""
        pairs = zip(self.personal, tests, strict=True)
        return [net(x).softmax(-1) for net, x in pairs]


class FedABML:
    """Algorithm 1 of FedABML: a step on a client's Gaussian φ with draws of all weights, a step on its prior θ_i."""

    def __init__(self, clients: Clients, classes: int) -> None:
        self.clients, self.classes, size = clients, classes, 78500 + 101 * classes
        self.server = [0.05 * torch.randn(size), torch.full((size,), -3.0)]
        self.personal: list[Any] = []

    def _outputs(self, w: Tensor, x: Tensor) -> Tensor:
        hidden, end = torch.relu(F.linear(x, w[:78400].view(100, 784), w[78400:78500])), 78500
        end += 100 * self.classes
        return F.linear(hidden, w[78500:end].view(self.classes, 100), w[end:])

    def _step(self, phi: Any, theta: Any, images: Tensor, labels: Tensor, rows: int) -> Any:
        m, v = (value.requires_grad_() for value in phi)
        loss = 0.0
        for _ in range(DRAWS):
            w = m + v.exp() * torch.randn_like(m)
            loss = loss + F.cross_entropy(self._outputs(w, images), labels) / DRAWS
        grads = torch.autograd.grad(loss + divergence(m, v, *theta) / rows, (m, v))
        return [p.detach() - 0.001 * g for p, g in zip(phi, grads, strict=True)]

    def round(self, cohort: Sequence[int]) -> None:
        """Train the clients of a cohort."""
        total = [torch.zeros_like(value) for value in self.server]
        for x, y in (self.clients[i] for i in cohort):
            theta, phi = [v.clone() for v in self.server], [v.clone() for v in self.server]
            for images, labels in batches(x, y):
                phi = self._step(phi, theta, images, labels, len(x))
                prior = [value.requires_grad_() for value in theta]
                grads = torch.autograd.grad(divergence(*phi, *prior) / len(x), prior)
                theta = [p.detach() - 0.001 * g for p, g in zip(theta, grads, strict=True)]
            for sum_, value in zip(total, theta, strict=True):
                sum_ += value / len(cohort)
        self.server = total

    def personalize(self, clients: Clients, steps: int, *, new: bool) -> None:
        """Give each client a Gaussian of its own."""
        self.personal = []
        for x, y in clients:
            phi = [v.clone() for v in self.server]
            for images, labels in batches(x, y, steps):
                phi = self._step(phi, self.server, images, labels, len(x))
            self.personal.append(phi)

    def predict(self, tests: Sequence[Tensor], draws: int) -> list[Tensor]:
        """Return the class probabilities of each client's images, by draws."""
        return [
            self._outputs(m + v.exp() * torch.randn_like(m), x).softmax(-1)
            for (m, v), x in zip(self.personal, tests, strict=True)
            for _ in range(draws)
        ]


class PFedVEM:
    """Epochs on the Gaussian of a client's head (Adam), then on the body, with draws of the head in each step."""

    def __init__(self, clients: Clients, classes: int, lr: float = 0.01) -> None:
        self.clients, self.classes, self.lr, self.size = clients, classes, lr, 101 * classes
        self.body, self.centre = nn.Linear(784, 100), 0.05 * torch.randn(101 * classes)
        self.heads = [self._first() for _ in clients]

    def _first(self) -> list[Tensor]:
        return [self.centre.clone(), torch.full((self.size,), -2.3)]

    def _outputs(self, hidden: Tensor, m: Tensor, v: Tensor) -> Tensor:
        w, end = m + v.exp() * torch.randn_like(m), 100 * self.classes
        return F.linear(hidden, w[:end].view(self.classes, 100), w[end:])

    def _loss(self, hidden: Tensor, labels: Tensor, m: Tensor, v: Tensor) -> Any:
        losses = (F.cross_entropy(self._outputs(hidden, m, v), labels) for _ in range(DRAWS))
        return sum(losses) / DRAWS

    def _head(self, head: Any, x: Tensor, y: Tensor, steps: int | None) -> tuple[Any, Tensor]:
        m, v = (value.detach().requires_grad_() for value in head)
        rho = ((2 * v).exp() + (m - self.centre) ** 2).mean().log().detach() / 2
        adam = torch.optim.Adam([m, v], lr=self.lr)
        for images, labels in batches(x, y, steps):
            with torch.no_grad():
                hidden = torch.relu(self.body(images))
            adam.zero_grad()
            prior = divergence(m, v, self.centre, rho.expand(self.size)) / len(x)
            (self._loss(hidden, labels, m, v) + prior).backward()
            adam.step()
        return [m.detach(), v.detach()], (-2 * rho).exp()

    def round(self, cohort: Sequence[int]) -> None:
        """Train the clients of a cohort."""
        start = {n: p.clone() for n, p in self.body.state_dict().items()}
        total = {n: torch.zeros_like(p) for n, p in start.items()}
        mean, precision = torch.zeros(self.size), torch.zeros(())
        for i in cohort:
            self.body.load_state_dict(start)
            head, tau = self._head(self.heads[i], *self.clients[i], None)
            descend(
                self.body,
                batches(*self.clients[i]),
                lambda x, y, head=head: self._loss(torch.relu(self.body(x)), y, *head),
            )
            add(total, self.body, len(cohort))
            mean, precision, self.heads[i] = mean + tau * head[0], precision + tau, head
        self.body.load_state_dict(total)
        self.centre = mean / precision

    def personalize(self, clients: Clients, steps: int, *, new: bool) -> None:
        """Give new clients a head; the others have theirs."""
        if new:
            self.heads = [self._head(self._first(), x, y, steps)[0] for x, y in clients]

    def predict(self, tests: Sequence[Tensor], draws: int) -> list[Tensor]:
        """Return the class probabilities of each client's images, by draws."""
        return [
            self._outputs(hidden, *head).softmax(-1)
            for head, x in zip(self.heads, tests, strict=True)
            for hidden in [torch.relu(self.body(x))]
            for _ in range(draws)
        ]
