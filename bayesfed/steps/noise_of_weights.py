"""How near q(w_i | θ) is to a client's posterior given θ: the variance of its log weights, 0 where they agree."""

import torch
from torch import Tensor

from bayesfed.data.batch import Batch
from bayesfed.elbo.elbo import Noise, client_terms
from bayesfed.elbo.program import Params, Program
from bayesfed.tracing.compiler import traceable

PERSONAL_DRAWS = 16
"""Draws of θ and w_i by which a client's q(w_i | θ) is moved, or compared with its posterior, by itself."""
EXACT, NEAR, IN_ALL = 1e-5, 1e-3, 0.01
"""The largest variance of a client's log weights, given θ, at which q(w_i | θ) is its posterior but for round-off; that
at which it is near enough, if the sum over all clients is no larger than the last."""
NEAR_ALONE = 0.01
"""The same of a client by itself, whose log weights no sum over clients contains."""


def largest_noise(clients: int) -> float:
    """Return the largest variance of log weights at which each of so many clients is near enough to its posterior."""
    return max(EXACT, min(NEAR, IN_ALL / clients))


def noise_of_weights(
    program: Program, phi: Params, params: Params, rows: Batch, supplied: Noise
) -> Tensor:
    """Return the variances ``(K,)`` of log p(w_i, D_i | θ) − log q(w_i | θ) of K clients at φ_i, given θ.

    From two draws of w_i at each of half as many draws of θ, of their own, as there is noise for.
    """
    half = PERSONAL_DRAWS // 2
    pairs = {
        name: [torch.cat([x[:half], x[:half]]) for x in parts] if name in program.random else parts
        for name, parts in supplied.items()
    }
    terms = personal_terms(program, phi, params, rows, pairs, PERSONAL_DRAWS)
    return (terms[:half] - terms[half:]).square().mean(0) / 2


@traceable
def personal_terms(
    program: Program, phi: Params, params: Params, rows: Batch, supplied: Noise, draws: int
) -> Tensor:
    """Return the terms ``(S, K)`` of K clients at φ_i, at S = ``draws`` draws of θ of their own."""
    with torch.no_grad():
        return client_terms(program, params | phi, {}, rows, supplied, draws)
