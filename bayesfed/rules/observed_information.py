"""Newton steps of the server on a gradient that is known from draws, for runs of FedPop that stop by themselves.

    S_i = E[s],   s = ∇_θ log p(D_i, w_i | θ)                 the gradient of log p(D_i | θ), by Fisher's identity
    I_i = −E[∇²_θ log p(D_i, w_i | θ)] − Var(s)               the information of D_i, by Louis' formula
    θ ← θ + γ (Σ I_i)⁻¹ Σ S_i,   over w_i ~ p(w_i | D_i, θ)              (Gu & Kong 1998, algorithm 1; Louis 1982)

Clients estimate both from draws of their chains. Steps are whole, γ = 1, until one is short, or turns back and is not
much shorter than the last. Then they are noise, and γ = 1 / n in the n-th round that follows, so that θ, the
information and the moments of the chains are means over rounds; unless these steps add up, as noise does not. θ has
converged when two steps were short, or the standard error of such a mean is, in standard deviations (Σ I_i)^{−1/2} in
every direction; and the information is positive definite, as it is at a maximum.

T. A. Louis (1982), *Finding the observed information matrix when using the EM algorithm*; M. G. Gu, F. H. Kong (1998),
*A stochastic approximation algorithm with Markov chain Monte Carlo method for incomplete data estimation problems*.
"""

import torch
from torch import Tensor

from bayesfed.elbo.program import Params, Program
from bayesfed.guides.newton import magnitude
from bayesfed.rules.quasi_newton import CALM, bounded, in_units, shaped

NEAR, PRECISE = 1.5, 0.02
"""The length of a step, in standard deviations in every direction, below which rounds may be averaged; the length, or
standard error, that is short."""
LEAST, DRIFT = 5, 3.0
"""The smallest number of rounds that are averaged; the sum of their steps over its standard deviation, were they noise,
from which on they are not."""
WEAKEST = 0.1
"""The smallest information that is assumed, in units of the priors."""


def begin(program: Program, size: int) -> Params:
    """Return the first state of steps on so many numbers of θ."""
    number = program.schema.scale.new_zeros((), dtype=torch.float64)
    return {
        "information": number.new_zeros(size, size),
        "step": number.new_zeros(size),
        "sums": number.new_zeros(size),
        "squares": number.new_zeros(size),
        "averaged": number,
        "gain": number + 1,
        "calm": number,
    }


def advance(
    program: Program, units: Params, state: Params, theta: Params, move: Params, information: Tensor
) -> tuple[Params, Params]:
    """Return the next θ and state.

    Args:
        program: the model/guide pair.
        units: of some parameters, 1 for the others.
        state: before the round.
        theta: of which some are moved.
        move: of these, the mean single step per row, which is the gradient in these units.
        information: the mean information per row, in these units, ``(D, D)``.
    """
    theta, unit, x, slope = in_units(units, theta, move)
    score = program.rows * slope
    now = program.rows * (information + information.mT).double() / 2
    if not (score.isfinite().all() and now.isfinite().all()):
        return theta, state | {"calm": 0 * state["calm"]}
    averaged = state["averaged"]
    total = state["information"].lerp(now, 1 / (averaged + 1))
    precision = magnitude(total, torch.full_like(score, WEAKEST))
    step = torch.linalg.solve(precision, score)
    whole = torch.linalg.cholesky(precision).mT @ step
    length, last = whole.abs().max(), state["step"]
    if averaged:
        sums, squares = state["sums"] + whole, state["squares"] + whole.square()
        is_drift = (sums.abs() > DRIFT * squares.sqrt()).any()
        averaged = (averaged + 1) * ~(is_drift & (length > PRECISE))
    else:
        turns_back = (whole @ last < 0) & (length > last.abs().max() / 2)
        averaged = averaged + ((turns_back & (length < NEAR)) | (length < PRECISE))
        sums, squares = whole, whole.square()
    n = averaged.clamp(min=1)
    is_maximum = torch.linalg.cholesky_ex(total)[1] == 0
    precise = (averaged >= LEAST) & ((squares / n).max().sqrt() < PRECISE * n.sqrt())
    state = {
        "information": total,
        "step": whole,
        "sums": sums,
        "squares": squares,
        "averaged": averaged,
        "gain": 1 / (averaged + 1),
        "calm": torch.where(precise, CALM, (state["calm"] + 1) * (length < PRECISE)) * is_maximum,
    }
    return shaped((x + bounded(step) / n) * unit, theta), state
