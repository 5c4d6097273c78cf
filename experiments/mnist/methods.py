"""The methods of run.py's tables: algorithms, networks, and the values of their settings that are tried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import bayesfed as bf
from bayesfed.models import HyperNetwork, Modulated, Network, mlp

DRAWS = 20
LATER = {"personal_steps": 0}
"""Personal steps are taken by run.py, in numbers of its own."""


@dataclass(frozen=True)
class Method:
    """A method of the table.

    Attributes:
        make: from the number of classes, the steps of an average client in a round and a point of the grid: the
            algorithm and the model.
        grid: the values of its settings that may be tried, beside the rates.
        kept: clients are stateful, or condition on their rows, and are judged without personal steps.
        rounds: of training.
        fraction: of the clients in a round.
        draws: of the posterior, for predictions.
        networks: that are fitted, each by as much smaller a part of the clients in a round; predictions are averaged.
        shares: settings are chosen for the row with label shares.
        compiled: every fit is compiled, which saves half of the time of long ones that are alike.
    """

    make: Callable[..., tuple[Any, Any]]
    grid: dict[str, tuple[float, ...]] = field(default_factory=dict)
    kept: bool = False
    rounds: int = 100
    fraction: float = 0.1
    draws: int = DRAWS
    networks: int = 1
    shares: bool = False
    compiled: bool = False


def network(classes: int, **settings: Any) -> Network:
    return Network(mlp(784, 100, classes), **settings)


def plain(
    parts: Callable[..., Any], classes: int, batches: int, *, rate: float, **point: float
) -> Any:
    """Return a method with point estimates."""
    return parts(lr=rate, **LATER, **point), network(classes)


def subclassed(classes: int, batches: int, *, rate: float, M: int, **settings: Any) -> Any:
    """Return FedAvg with M sub-classes of each label."""
    algorithm = bf.FedAvg(lr=rate, **LATER, **settings)
    return algorithm, Network(mlp(784, 100, classes * M), subclasses=M)


def ifca(classes: int, batches: int, *, rate: float, C: int) -> Any:
    """Return FedAvg with C networks, of which each client has one."""
    return bf.FedAvg(lr=rate, **LATER), network(classes, clusters=C)


def pfedhn(classes: int, batches: int, *, rate: float, E: int) -> Any:
    """Return FedPer with embeddings of E numbers as a client's own variables."""
    return bf.FedPer(lr=rate, **LATER), HyperNetwork(mlp(784, 100, classes), embedding=E)


def fedprox(classes: int, batches: int, *, rate: float, mu: float) -> Any:
    return bf.FedAvg(lr=rate, proximal=mu, **LATER), network(classes)


def maml(classes: int, batches: int, *, rate: float, inner: float) -> Any:
    return bf.PerFedAvg(lr=inner, prior_lr=rate, **LATER), network(classes)


def pfedme(classes: int, batches: int, *, rate: float, lam: float) -> Any:
    """Return pFedMe, whose θ_i goes half of the way to w_i in a step."""
    return bf.PFedMe(lam=lam, lr=rate, prior_lr=0.5 / lam, **LATER), network(classes)


def abml(parts: Callable[..., Any], classes: int, batches: int, *, rate: float, lam: float) -> Any:
    """Return FedABML or pFedBayes at rates of natural steps: η is ``rate``, η' of θ_i a half."""
    algorithm = parts(lr=rate, prior_lr=0.5, kl_weight=lam, draws=3, **LATER)
    return algorithm, network(classes, spread="learnt", scale=0.1)


def plain_abml(classes: int, batches: int, *, rate: float, lam: float) -> Any:
    """Return FedABML with gradient steps of one rate, as its Algorithm 1 has them."""
    algorithm = bf.FedABML(
        lr=rate, prior_lr=rate, natural=False, inner_steps=1, kl_weight=lam, draws=3, **LATER
    )
    return algorithm, network(classes, spread="learnt", scale=0.1)


def pfedmap(classes: int, batches: int, *, rate: float, rho: float) -> Any:
    """Return pFedMAP with a personal last layer on a shared body, as it was published.

    The body's gradients are divided by their root mean square, so that its steps are a hundredth.
    """
    algorithm = bf.PFedMAP(lr=rate, body_lr=rate / 100, optimizer="sgd", **LATER)
    return algorithm, network(classes, local=["2."], scale=rho)


def headed(parts: Callable[..., Any], classes: int, batches: int, *, rate: float) -> Any:
    """Return a method with a personal last layer on a shared body."""
    return parts(lr=rate, **LATER), network(classes, local=["2."])


def vem(classes: int, batches: int, *, rate: float, head: float, **settings: Any) -> Any:
    """Return PFedVEM with Adam for the head, as its authors' code has; the body's steps are as in pFedMAP."""
    algorithm = bf.PFedVEM(lr=head, body_lr=rate / 100, **LATER, **settings)
    return algorithm, network(classes, local=["2."], spread="client", scale=0.1)


def cafeme(classes: int, batches: int, *, rate: float, inner: float) -> Any:
    """Return CAFeMe with as many steps on ω_i as the others take, each through one inner step on 20 rows.

    Gates scale and shift. Momentum multiplies a rate by ten.
    """
    model = Modulated(mlp(784, 100, classes), mlp(784, 100), context=100, film=True)
    algorithm = bf.CAFeMe(
        inner_lr=inner,
        lr=rate / 10,
        optimizer="momentum",
        inner_steps=1,
        outer_steps=batches,
        support_rows=20,
        **LATER,
    )
    return algorithm, model


def gated(classes: int, batches: int, *, rate: float, inner: float) -> Any:
    """Return CAFeMe with the gates of its eq. 4.4, five inner steps, and one gradient of the server's a round."""
    model = Modulated(mlp(784, 100, classes), mlp(784, 100), context=100)
    algorithm = bf.CAFeMe(inner_lr=inner, lr=rate, inner_steps=5, outer_steps=1, **LATER)
    return algorithm, model


def pacpfl(classes: int, batches: int, *, rate: float, tau: float) -> Any:
    """Return PACPFL with priors N(m, s²) over the weights; Adam's rate is ``rate`` / 100.

    Clients condition by 60 draws. Particles start at draws of the hyper-prior, N(start, 0.1²); τ = 20 counts as a
    hyper-prior that is √20 as wide.
    """
    algorithm = bf.PACPFL(particles=3, draws=3, lr=rate / 100, tau=tau)
    return algorithm, network(classes, spread="learnt", scale=0.02, hyper_scale=0.1)


M = {"M": (1, 2, 4, 6, 8, 12)}
METHODS = {
    "Local": Method(partial(plain, bf.Local), kept=True, rounds=20, fraction=1.0),
    "FedAvg": Method(partial(plain, bf.FedAvg)),
    "FedAvg, two networks": Method(partial(plain, bf.FedAvg, averaged_rounds=10), networks=2),
    "FedAvg, sub-classes": Method(subclassed, M, shares=True),
    "FedAvg, two networks, sub-classes": Method(
        partial(subclassed, averaged_rounds=10), M, networks=2, shares=True
    ),
    "IFCA": Method(ifca, {"C": (2, 3, 4, 6)}),
    "pFedHN": Method(pfedhn, {"E": (4, 8, 16)}, kept=True),
    "FedProx": Method(fedprox, {"mu": (0.01, 0.03, 0.1, 0.3, 1.0)}),
    "FedNova": Method(partial(plain, bf.FedNova)),
    "SCAFFOLD": Method(partial(plain, bf.Scaffold)),
    "Per-FedAvg": Method(maml, {"inner": (0.01, 0.03, 0.1, 0.3)}, compiled=True),
    "pFedMe": Method(pfedme, {"lam": (0.5, 1.0, 2.0, 5.0, 15.0)}, compiled=True),
    "pFedBayes": Method(
        partial(abml, bf.PFedBayes), {"lam": (0.02, 0.05, 0.1, 0.2)}, compiled=True
    ),
    "Ditto": Method(partial(plain, bf.Ditto), {"lam": (0.03, 0.1, 0.3, 1.0)}, kept=True),
    "pFedMAP": Method(pfedmap, {"rho": (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)}, kept=True),
    "FedPer": Method(partial(headed, bf.FedPer), kept=True),
    "FedRep": Method(partial(headed, bf.FedRep), kept=True),
    "FedBABU": Method(partial(headed, bf.FedBABU)),
    "PFedVEM": Method(vem, {"head": (0.003, 0.01, 0.03, 0.1, 0.3)}, kept=True),
    "PFedVEM, all train": Method(
        partial(vem, upload_fraction=0.1),
        {"head": (0.001, 0.003, 0.01, 0.03, 0.1)},
        kept=True,
        fraction=1.0,
    ),
    "CAFeMe": Method(cafeme, {"inner": (0.03, 0.1, 0.3, 1.0)}, compiled=True),
    "CAFeMe, eq. 4.4": Method(gated, {"inner": (0.03, 0.1, 0.3, 1.0)}, compiled=True),
    "PACPFL": Method(pacpfl, {"tau": (1.0, 5.0, 20.0, 80.0)}, kept=True, rounds=250, draws=60),
    "FedABML": Method(partial(abml, bf.FedABML), {"lam": (0.3, 1.0, 3.0)}, compiled=True),
    "FedABML, plain steps": Method(plain_abml, {"lam": (0.3, 1.0, 3.0)}, compiled=True),
}
