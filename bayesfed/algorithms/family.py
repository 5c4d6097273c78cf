"""Methods of the literature as choices of parts: each is one of our algorithms with settings, and no code of its own.

Every function takes further settings of the algorithm that it returns, and names the model that it needs:
``Network(module)`` with all weights a client's own, ``local=[head]`` for a personal head on a shared body.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bayesfed.algorithms.fedabml import FedABML
from bayesfed.algorithms.fola import FOLA
from bayesfed.algorithms.pacpfl import PACPFL
from bayesfed.algorithms.pfedvem import PFedVEM

# -- the clients' posteriors are made from θ and forgotten; θ follows them ---------------------------


def fed_avg(**settings: Any) -> FedABML:
    """FedAvg (McMahan et al. 2017), with fine-tuning by ``personalize``: points, no prior, φ uploaded.

    Model: ``Network(module)``.

    Example:
        >>> from bayesfed.algorithms.family import fed_avg
        >>> fed_avg(lr=0.05).upload
        'posterior'
    """
    return _abml({"upload": "posterior", "kl_weight": 0.0, "weighted": True, "lr": 0.1}, settings)


def fed_prox(mu: float = 0.1, **settings: Any) -> FedABML:
    """FedProx (Li et al. 2020): FedAvg under the prior N(θ, I / μ). Model: ``Network(module, scale=1.0)``."""
    return fed_avg(**{"kl_weight": mu, "kl_per_row": False} | settings)


def per_fed_avg(second_order: bool = True, **settings: Any) -> FedABML:
    """Per-FedAvg (Fallah et al. 2020), or MAML: points, no prior, θ's gradient through the inner step.

    Model: ``Network(module)``.
    """
    order = "second-order" if second_order else "first-order"
    return _abml({"gradient": order, "kl_weight": 0.0, "lr": 0.1, "prior_lr": 0.1}, settings)


def pfedme(lam: float = 15.0, **settings: Any) -> FedABML:
    """pFedMe (Dinh et al. 2020): points under the prior N(θ, I / λ), five steps on φ for each on θ.

    Model: ``Network(module, scale=1.0)``.
    """
    parts = {"kl_weight": lam, "kl_per_row": False, "inner_steps": 5, "lr": 0.05, "prior_lr": 0.01}
    return _abml(parts, settings)


def pfedbayes(zeta: float = 0.05, **settings: Any) -> FedABML:
    """pFedBayes (Zhang et al. 2022): Normals for q and prior, the KL weighted by ζ.

    Its local algorithm is FedABML's, the likelihood not depending on θ given φ. Model:
    ``Network(module, spread="learnt", scale=0.05)``.
    """
    return FedABML(**{"kl_weight": zeta} | settings)


# -- the clients keep their posteriors ----------------------------------------------------------------


def pfedmap(**settings: Any) -> PFedVEM:
    """pFedMAP, or Ditto (Li et al. 2021): kept points under N(w, ρ² I), one ρ for all.

    Model: ``Network(module, scale=ρ)``, all weights or a head of them personal. The common w is the mean of
    the personal weights; Ditto trains it by FedAvg beside them. Mean-regularised multi-task learning (MTL) is
    the same objective.
    """
    return PFedVEM(**{"point": True} | settings)


def local_only(**settings: Any) -> PFedVEM:
    """Every client by itself: kept points, no prior. Model: ``Network(module)``."""
    return PFedVEM(**{"point": True, "kl_weight": 0.0} | settings)


def fed_per(**settings: Any) -> PFedVEM:
    """FedPer (Arivazhagan et al. 2019): personal head without prior, stepped together with the body.

    Model: ``Network(module, local=[head])``.
    """
    return local_only(**{"joint": True} | settings)


def fed_rep(**settings: Any) -> PFedVEM:
    """FedRep (Collins et al. 2021): as FedPer, the head first and then the body."""
    return local_only(**settings)


def fed_babu(**settings: Any) -> PFedVEM:
    """FedBABU (Oh et al. 2022): the head stays where it starts; ``personalize`` trains it at the end."""
    return local_only(**{"head_epochs": 0} | settings)


# -- one network for all ------------------------------------------------------------------------------


def fed_curv(lam: float = 1.0, **settings: Any) -> FOLA:
    """FedCurv (Shoham et al. 2019): penalty λ Σ_{j≠i} (w − w_j)ᵀ F_j (w − w_j), F_j the Fisher at w_j; a mean.

    Model: ``Network(module, spread="learnt", scale=1000.0)``: the scale stands for no prior.
    """
    parts: dict[str, Any] = {"cavity": True, "aggregate": "mean", "online": False, "damping": 1.0}
    return FOLA(**parts | {"prior_weight": 2 * lam} | settings)


def pooled(**settings: Any) -> FedABML:
    """All rows in one place, for ``federation.pool()``: FedAvg of a single client is stochastic gradient descent.

    Model: ``Network(module)``.
    """
    return fed_avg(**settings)


# -- a hyper-posterior over priors ---------------------------------------------------------------------


def pfedgp(**settings: Any) -> PACPFL:
    """pFedGP (Achituve et al. 2021): one prior for all clients, maximum marginal likelihood.

    Model: :class:`~bayesfed.models.GaussianProcess`. Theirs is a classifier on a tree; this is its regression.
    """
    return PACPFL(**{"particles": 1, "flat": True} | settings)


def _abml(parts: dict[str, Any], settings: dict[str, Any]) -> FedABML:
    return FedABML(**{"point": True, "whitened": False} | parts | settings)


FAMILY: dict[str, Callable[..., Any]] = {
    "FedAvg": fed_avg,
    "FedProx": fed_prox,
    "PerFedAvg": per_fed_avg,
    "MAML": per_fed_avg,
    "PFedMe": pfedme,
    "PFedBayes": pfedbayes,
    "PFedMAP": pfedmap,
    "Ditto": pfedmap,
    "MTL": pfedmap,
    "Local": local_only,
    "FedPer": fed_per,
    "FedRep": fed_rep,
    "FedBABU": fed_babu,
    "FedCurv": fed_curv,
    "Pooled": pooled,
    "PFedGP": pfedgp,
}
"""Special cases by name."""
