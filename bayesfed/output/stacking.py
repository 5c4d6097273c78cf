"""Stacking weights of models, from sums over observations alone.

    max_w  Σ_i log Σ_k w_k exp(elpd_ik),   w_k ≥ 0,  Σ_k w_k = 1

with elpd_ik the leave-one-out predictive density of observation i under model k (Yao, Vehtari, Simpson & Gelman 2018,
*Using stacking to average Bayesian predictive distributions*). Value, gradient and Hessian at a given w are sums over
i, which clients can compute. It is the likelihood of mixture proportions, which sequential quadratic programming
maximises in about ten steps (Kim, Carbonetto, Stephens & Anitescu 2020, *A fast algorithm for maximum likelihood
estimation of mixture proportions using sequential quadratic programming*).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

STEPS = 30
"""The largest number of times that the sums are asked for."""
TOLERANCE = 1e-8
"""The gain of a step, in nats, below which it is not taken."""
RIDGE = 1e-10
"""The part of the mean curvature that is added to its diagonal: equal models have none between them."""
FLOOR = 1e-6
"""The smallest weight of a model whose gradient is computed; a model with this weight has none."""


@dataclass(frozen=True, eq=False)
class MixtureSums:
    """Sums over observations at weights w of K models, with r_ik = w_k exp(elpd_ik) / Σ_l w_l exp(elpd_il).

    Attributes:
        value: Σ_i log Σ_k w_k exp(elpd_ik), in nats.
        shares: Σ_i r_ik, ``(K,)``, which is w_k times the gradient.
        products: Σ_i r_ik r_il, ``(K, K)``, which is -w_k w_l times the Hessian.
    """

    value: float
    shares: np.ndarray
    products: np.ndarray


def mixture_sums(elpd: np.ndarray, weights: np.ndarray) -> MixtureSums:
    """Compute the sums over some observations.

    Args:
        elpd: log predictive densities, ``(n, K)``.
        weights: of the models, positive, ``(K,)``.

    Example:
        >>> import numpy as np
        >>> from bayesfed.output.stacking import mixture_sums
        >>> found = mixture_sums(np.log([[0.2, 0.4], [0.3, 0.1]]), np.array([0.5, 0.5]))
        >>> round(found.value, 4), found.shares.round(3).tolist()
        (-2.8134, [1.083, 0.917])
    """
    joint = elpd + np.log(weights)
    whole = np.logaddexp.reduce(joint, 1)
    shares = np.exp(joint - whole[:, None])
    return MixtureSums(float(whole.sum()), shares.sum(0), shares.T @ shares)


def stack(count: int, models: int, ask: Callable[[np.ndarray], MixtureSums]) -> np.ndarray:
    """Return the weights that maximise the mixture's log predictive density, ``(K,)``.

    Args:
        count: n, the number of observations.
        models: K.
        ask: returns the sums over all observations at weights; it is called at most :data:`STEPS` times.

    Example:
        >>> import numpy as np
        >>> from bayesfed.output.stacking import mixture_sums, stack
        >>> elpd = np.log([[0.2, 0.4], [0.3, 0.1], [0.1, 0.3]])
        >>> stack(3, 2, lambda weights: mixture_sums(elpd, weights)).round(3).tolist()
        [0.236, 0.764]
    """
    weights = np.full(models, 1 / models)
    if models == 1:
        return weights
    found, asked = ask(weights), 1
    while asked < STEPS:
        gradient, curvature = found.shares / weights, found.products / np.outer(weights, weights)
        step = _maximise_quadratic(count, gradient, curvature) - weights
        if gradient @ step - step @ curvature @ step / 2 <= TOLERANCE:
            break
        for _ in range(STEPS - asked):
            there, asked = ask(weights + step), asked + 1
            if there.value > found.value:
                weights, found = weights + step, there
                break
            step /= 2
    weights = np.where(weights < 2 * FLOOR, 0.0, weights)
    return np.asarray(weights / weights.sum())


def _maximise_quadratic(count: int, gradient: np.ndarray, curvature: np.ndarray) -> np.ndarray:
    """Return the weights that maximise the quadratic approximation at other weights, scaled to a sum of 1.

    Of Σ_i log Σ_k w_k exp(elpd_ik) - n Σ_k w_k, whose maximum over w ≥ 0 has the sum 1. The curvature at w times w is
    the gradient.
    """
    from scipy.optimize import nnls  # takes a while to import

    ridge = RIDGE * np.trace(curvature) / len(gradient)
    root = np.linalg.cholesky(curvature + ridge * np.eye(len(gradient))).T
    best, _ = nnls(root, np.linalg.solve(root.T, 2 * gradient - count))
    best = np.maximum(best / best.sum(), FLOOR)
    return np.asarray(best / best.sum())
