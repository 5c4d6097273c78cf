"""Expectations under a chain's target from its draws and the gradients of its log density: zero-variance estimates.

    E[Δψ + ∇ψ · ∇ log π] = 0   for any polynomial ψ                             (Mira, Solgi & Imparato 2013, section 2)

So the mean of a function is the intercept of its regression on such terms. With ψ of degree 2 it is exact for quadratic
functions where π is Normal, however few the draws are, and has little variance where π is nearly so.

A. Mira, R. Solgi, D. Imparato (2013), *Zero variance Markov chain Monte Carlo for Bayesian estimators*, Statistics and
Computing 23.
"""

import torch
from torch import Tensor

FEWEST = 3
"""The smallest number of draws for each number that a regression estimates."""


def controls(w: Tensor, slope: Tensor) -> Tensor:
    """Return the terms at S draws of K chains, whose means are 0: ``(S, K, C)``; none where draws are too few.

    Args:
        w: the draws, ``(S, K, P)``, centred and in about unit scale.
        slope: the gradients of the log density there, in the same unit.
    """
    size = w.shape[-1]
    first, second = torch.tril_indices(size, size)
    both = w[..., first] * slope[..., second] + w[..., second] * slope[..., first]
    quadratic = torch.cat([slope, both + 2.0 * (first == second)], -1)
    for terms in (quadratic, slope):
        if FEWEST * (terms.shape[-1] + 1) <= len(w):
            return terms
    return slope[..., :0]


def expectation(values: Tensor, terms: Tensor) -> Tensor:
    """Return the means ``(K, M)`` of values ``(S, K, M)`` at draws at which terms ``(S, K, C)`` with mean 0 are known.

    Example:
        >>> import torch
        >>> from bayesfed.steps.control_variates import controls, expectation
        >>> w = torch.linspace(-1.0, 2.0, 12, dtype=torch.float64)[:, None, None]  # not even draws of N(0, 1)
        >>> expectation(w.square() + 3 * w, controls(w, -w)).round(decimals=6)
        tensor([[1.]], dtype=torch.float64)
    """
    design = torch.cat([torch.ones_like(terms[..., :1]), terms], -1).double().movedim(0, 1)
    fitted = torch.linalg.pinv(design) @ values.double().movedim(0, 1)
    return fitted[:, 0].to(values)
