"""Quasi-Newton steps of the server, made of the clients' mean moves, where θ is small and all rows take part.

    g = mean of (θ_i − θ) / rate              the clients' mean move: a gradient of the objective, up to a constant
    θ ← θ + H g,   H by BFGS from the changes of θ and of g                  (Nocedal & Wright 2006, eq. 6.17)

A server optimiser on mean moves is FedOpt (Reddi et al. 2021); the first round is that of the paper, and so is every
round where θ has more than 50 numbers, or in cohorts, minibatches or noise, whose means are not the same function of θ
twice. Everything is in units of the priors (:func:`~bayesfed.guides.fisher.prior_units`), and with H no longer depends
on units or step sizes.

A step after which the slope along it points back more steeply than it pointed forth is taken again, shorter. With
several local steps at a fixed rate the mean move vanishes beside the objective's maximum (client drift, Karimireddy et
al. 2020). So once steps are short (:data:`SHORT`), or after :data:`PATIENCE` rounds, clients take one local step in a
round, whose mean is the gradient itself. After as many rounds of that kind H is kept, and steps fall as one over their
number, which averages out noise. Once they are short too, θ has converged.

Before that, each of up to :data:`PROBED` numbers of θ is moved by itself, in a round for each, which gives H: steps
that were short by an H without curvature in some direction, such as that of a variable that only priors read, go on.
Where clients' moves follow from those of the round before (SCAFFOLD, FedCurv) the first steps are the papers'.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from bayesfed.elbo.program import Params, Program
from bayesfed.guides.fisher import prior_units
from bayesfed.rules.rule import Rule, Turn, add
from bayesfed.steps.job import SINGLE, Parts

MOST = 50
"""The largest number of numbers in θ: H has its square."""
SHORT, LONGEST = 1e-3, 1.0
"""The step that counts as short, and the longest in one number, in units of the priors."""
BACK = 0.9
"""The slope at the end of a step, pointing back, over that at its start, beyond which the step was too long."""
CALM = 2
"""The number of short steps in a row after which they have converged."""
PATIENCE = 40
"""The largest number of rounds with several local steps, and of whole steps with one."""

PROBED, PROBE = 12, 0.05
"""The largest number of numbers in θ that are moved one by one for a first H, and by how much."""


def begin(program: Program) -> Params:
    """Return the first state; nothing where θ is not small."""
    size = sum(value.numel() for value in program.init.values())
    if not 0 < size <= MOST:
        return {}
    zero = next(iter(program.init.values())).new_zeros(size, dtype=torch.float64)
    number = zero.new_zeros(())
    vectors = {name: zero for name in ("base", "slope", "step")}
    counts = dict.fromkeys(("calm", "rounds", "single", "probe"), number)
    return vectors | counts | {"inverse": zero.new_zeros(size, size)}


def advance(
    units: Params, state: Params, theta: Params, move: Params, rate: float, plain: bool = False
) -> tuple[Params, Params]:
    """Return the next θ and state from the clients' mean move at a factor on their rates.

    ``units``: of some parameters, 1 for the others.
    ``plain``: that move is the step as long as clients take several.
    """
    unit = torch.cat([u.reshape(-1).double() for u in _units(units, theta).values()])
    x = _flat(theta) / unit
    g = _flat({name: move.get(name, torch.zeros_like(v)) for name, v in theta.items()})
    g = g / unit / rate
    step, before, inverse = x - state["base"], state["slope"], state["inverse"]
    was, now = before @ step, g @ step
    if state["probe"] > 0:
        found = _probed(state, x, g)
        return _shaped((found["base"] + found["step"]) * unit, theta), found
    plain = plain and not state["single"]
    compared = not plain and bool(state["step"].any()) and float(step.abs().max()) > SHORT
    if compared and bool(now < -BACK * was):
        step = step * (was / (was - now)).clamp(0.1, 0.5)
        found = state | {"step": step, "rounds": state["rounds"] + 1}
        return _shaped((state["base"] + step) * unit, theta), found
    rounds, single = state["rounds"] + 1, state["single"]
    if compared and single <= PATIENCE:
        inverse = _updated(inverse, step, before - g)
    step = inverse @ g if inverse.any() else rate * g
    step = step * (LONGEST / float(step.abs().max().clamp(min=LONGEST)))
    step = step / (1 + (single - PATIENCE).clamp(min=0))
    calm = (state["calm"] + 1) * (step.abs().max() < (0.0 if plain else SHORT))
    found = {"base": x, "slope": g, "step": step, "inverse": inverse, "probe": state["probe"]}
    if not single and (calm >= CALM or rounds >= PATIENCE):  # other steps have slopes of their own
        found |= {"step": 0 * step, "inverse": inverse * (calm >= CALM)}
        found |= {"probe": single + 1} if len(step) <= PROBED else {}
        single, calm = single + 1, 0 * calm
    elif single:
        single = single + 1
    counts = {"calm": calm, "rounds": rounds, "single": single}
    return _shaped((x + step) * unit, theta), found | counts


def converged(state: Params) -> bool:
    """Return whether steps are short where clients take one local step."""
    return bool(state["single"] > 0) and bool(state["calm"] >= CALM)


def _probed(state: Params, x: Tensor, g: Tensor) -> Params:
    """Return the state after one of D + 1 rounds, of which D move one number each; after the last H is known.

    The changes of the gradient are the columns of minus the Hessian; H has the inverses of its eigenvalues' sizes.
    """
    number, columns, one = int(state["probe"]), state["inverse"], state["probe"] * 0 + 1
    if number == 1:
        state = state | {"base": x, "slope": g}
    else:
        column = (state["slope"] - g) / PROBE
        columns = columns.index_copy(1, torch.tensor([number - 2]), column[:, None])
    step = torch.zeros_like(x)
    if number <= len(x):
        step[number - 1] = PROBE
        return state | {"step": step, "inverse": columns, "probe": state["probe"] + 1}
    values, vectors = torch.linalg.eigh((columns + columns.mT) / 2)
    sizes = values.abs().clamp(min=1e-6 * float(values.abs().max()))
    inverse = (vectors / sizes) @ vectors.mT
    step = inverse @ state["slope"]
    step = step * (LONGEST / float(step.abs().max().clamp(min=LONGEST)))
    return state | {"step": step, "inverse": inverse, "probe": 0 * one}


def _updated(inverse: Tensor, s: Tensor, y: Tensor) -> Tensor:
    """Return H after a step s that has changed the gradient by −y."""
    curvature = s @ y
    if not curvature > 1e-6 * s.norm() * y.norm():
        return 2 * inverse
    eye = torch.eye(len(s), dtype=s.dtype, device=s.device)
    if not inverse.any():
        inverse = curvature / (y @ y) * eye
    left = eye - torch.outer(s, y) / curvature
    return left @ inverse @ left.mT + torch.outer(s, s) / curvature


def _units(known: Params, theta: Params) -> Params:
    return {
        n: known[n].expand_as(v) if n in known else torch.ones_like(v) for n, v in theta.items()
    }


def _flat(values: Params) -> Tensor:
    return torch.cat([value.reshape(-1).double() for value in values.values()])


def _shaped(flat: Tensor, like: Params) -> Params:
    parts = flat.split([value.numel() for value in like.values()])
    return {
        name: part.reshape(value.shape).to(value)
        for (name, value), part in zip(like.items(), parts, strict=True)
    }


class ByMeanMove(Rule):
    """A rule whose server moves θ by the clients' mean move.

    Attributes:
        quasi_newton: take that move for a gradient where θ is small and all rows take part; otherwise it is the step.
    """

    quasi_newton: bool
    lagged: ClassVar[bool] = False
    """Whether clients' moves follow from those of the round before: then the move is the step, until they take one."""

    def start(self, program: Program) -> Any:
        """Return θ, and the first state of quasi-Newton steps."""
        newton = begin(program) if self.quasi_newton else {}
        return super().start(program) | ({"newton": newton} if newton else {})

    def broadcast(self, turn: Turn, server: Any) -> Parts:
        """Return θ and what the rule sends beside it, and whether clients take a single step."""
        message = super().broadcast(turn, server) | {part: server[part] for part in self.sends}
        state = server.get("newton") if self.quasi_newton else None
        single = state is not None and bool(state["single"] > 0)
        return message | ({SINGLE: {"step": state["single"]}} if state and single else {})

    def moved(self, turn: Turn, server: dict[str, Params], move: Params) -> dict[str, Params]:
        """Return θ after a mean move, and the state of quasi-Newton steps."""
        state = server.get("newton")
        if state is None or not turn.whole:
            return {"theta": add(server["theta"], move)} | (
                {} if state is None else {"newton": state}
            )
        units = prior_units(turn.program)
        theta, state = advance(units, state, server["theta"], move, turn.rate, self.lagged)
        return {"theta": theta, "newton": state}

    def arrived(self, server: Any) -> bool | None:
        """Return whether steps are short where clients take one local step; None where the mean move is the step."""
        state = server.get("newton")
        return None if state is None else converged(state)
