"""Every algorithm, and every special case, on models small enough for a test of invariants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import bayesfed as bf
from bayesfed import models
from bayesfed.algorithms import METHODS, Algorithm

SMALL = {
    "local_steps": 2,
    "local_epochs": 1,
    "personal_steps": 2,
    "inner_steps": 1,
    "outer_steps": 2,
    "particles": 2,
    "draws": 2,
    "corrected": False,
}
"""As little work as shows what an algorithm does; "SFVI, corrected" has importance weights."""


def federation(dtype: torch.dtype | None = None) -> bf.Federation:
    """Five clients of 4 to 9 rows: three numbers each, and which of two classes."""
    generator = torch.Generator().manual_seed(0)

    def client(n: int) -> dict[str, torch.Tensor]:
        x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
        kind = dtype or torch.get_default_dtype()
        return {"x": x.to(kind), "y": (x.sum(1) > 0).to(kind)}

    return bf.Federation.from_arrays({f"client {n}": client(n) for n in (4, 9, 5, 7, 6)})


def small(algorithm: Algorithm) -> Algorithm:
    """Return the algorithm with small settings, where it has and uses them."""
    method = METHODS[algorithm.name]
    values = method.values(algorithm)
    used = {name for name, value in values.items() if value or name == "particles"}
    return method.compose(values | {n: v for n, v in SMALL.items() if n in used})


def network(**settings: Any) -> models.Network:
    torch.manual_seed(0)
    return models.Network(models.mlp(3, 4, 2), **settings)


def modulated() -> models.Modulated:
    torch.manual_seed(0)
    return models.Modulated(models.mlp(3, 4, 2), models.mlp(3, 2), context=3)


def _hierarchy(name: str) -> Callable[[], tuple[Any, Any]]:
    return lambda: (small(METHODS[name]()), models.hierarchical_logistic)


def _head(name: str) -> Callable[[], tuple[Any, Any]]:
    return lambda: (small(METHODS[name]()), network(local=["2."], scale=0.5))


HEADS = ("FedPer", "FedRep", "FedBABU")
ALIASES = ("MAML", "MTL", "Pooled")
SPECIAL_CASES = ("FedProx", "PFedBayes", "PFedMAP", "PFedGP")
ON_A_HIERARCHY = {
    n: _hierarchy(n) for n in METHODS if n not in (*HEADS, *ALIASES, *SPECIAL_CASES, "CAFeMe")
}
"""What any of them does with one and the same model; CAFeMe's clients need an encoder of their rows, others a body."""
ON_A_NETWORK: dict[str, Callable[[], tuple[Any, Any]]] = {
    **{name: _head(name) for name in HEADS},
    "CAFeMe": lambda: (small(bf.CAFeMe()), modulated()),
    "FedAvg of a network": lambda: (small(bf.FedAvg()), network(scale=0.5)),
    "Scaffold of a network": lambda: (small(bf.Scaffold()), network(local=())),
    "FedABML of a network": lambda: (small(bf.FedABML()), network(spread="learnt", scale=0.5)),
    "PFedVEM of a network": lambda: (small(bf.PFedVEM()), network(spread="client", scale=0.5)),
    "PFedVEM of a head": lambda: (small(bf.PFedVEM()), network(local=["2."], scale=0.5)),
    "FOLA of a network": lambda: (small(bf.FOLA()), network(local=(), hyper_scale=1.0)),
    "PACPFL of a network": lambda: (
        small(bf.PACPFL()),
        network(spread="learnt", scale=0.3, hyper_scale=0.4),
    ),
}
FAMILIES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "SFVI, corrected": lambda: (bf.SFVI(local_steps=2, draws=2), models.hierarchical_logistic),
    "SFVI, flow": lambda: (
        small(bf.SFVI(global_guide=bf.Flow())),
        models.hierarchical_logistic,
    ),
    "SFVI, mean field": lambda: (
        small(bf.SFVI(global_guide=bf.MeanField(), conditioned=False)),
        models.hierarchical_logistic,
    ),
    "SFVIAvg, mean field": lambda: (
        small(bf.SFVIAvg(global_guide=bf.MeanField())),
        models.hierarchical_logistic,
    ),
}
CASES = ON_A_HIERARCHY | ON_A_NETWORK | FAMILIES
"""By name: an algorithm and a model."""
SPECIAL = {
    name: lambda make=make: (small(make()), network(scale=0.5, hyper_scale=0.5))
    for name, make in METHODS.items()
    if name in SPECIAL_CASES + ALIASES and name != "Pooled"  # which refuses several clients
}
"""The special cases, on a network."""
