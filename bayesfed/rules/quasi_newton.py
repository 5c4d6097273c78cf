"""Quasi-Newton steps of the server on the gradient of an algorithm's own objective, for runs that stop by themselves.

    g = mean of θ_i − θ                       the gradient of the objective, as clients take one plain step at rate 1
    θ ← θ + H g,   H by BFGS from the changes of θ and of g                  (Nocedal & Wright 2006, eq. 6.17)

Several local steps at a fixed rate end where the mean move vanishes, which is not the optimum where clients differ
(client drift, Karimireddy et al. 2020), and short moves do not show that it is near. So in a run without a number of
rounds clients take one step without bounds, with all their rows and their own variables at their optimum given θ
(:func:`~bayesfed.steps.steps.gradient_of`). That is where all clients take part and θ has at most 50 numbers. A given
number of rounds has the papers' steps.

At first each of up to :data:`PROBED` numbers of θ is moved by itself, in a round for each, which gives H. Everything is
in units of the priors (:func:`~bayesfed.guides.fisher.prior_units`). A step after which the slope along it points back
more steeply than it pointed forth, or after which some client has no finite gradient, is taken again, shorter. θ has
converged when H g is short, and g·H g, twice the gain that is left, is next to nothing, twice in a row; in between H is
made anew, as BFGS may see too much curvature where there is little.
"""

from typing import Any

import torch
from torch import Tensor

from bayesfed.elbo.program import Params, Program
from bayesfed.guides.fisher import prior_units
from bayesfed.rules.rule import Rule, Turn, add
from bayesfed.steps.job import INFORMATION, SINGLE, Parts
from bayesfed.steps.steps import Steps, gradient_of

MOST = 50
"""The largest number of numbers in θ: H has its square."""
SHORT, LONGEST = 1e-3, 1.0
"""The step that counts as short, and the longest in one number, in units of the priors."""
GAIN = 1e-3
"""Twice the gain that counts as none, in nats."""
BACK = 0.9
"""The slope at the end of a step, pointing back, over that at its start, beyond which the step was too long."""
CALM = 2
"""The number of short steps in a row after which they have converged."""
PROBED, PROBE = 12, 0.05
"""The largest number of numbers in θ that are moved one by one for a first H, and by how much."""


def begin(program: Program, names: list[str] | None) -> Params:
    """Return the first state of steps on some of θ; nothing where these are not few, or have no gradient (None).

    Where the names are none the clients' own variables alone are moved, to their optimum, and rounds are counted.
    """
    size = sum(program.init[name].numel() for name in names or ())
    if names is None or size > MOST:
        return {}
    zero = program.schema.scale.new_zeros(size, dtype=torch.float64)
    number = zero.new_zeros(())
    if not names:
        return {"calm": number}
    vectors = {name: zero for name in ("base", "slope", "step")}
    return vectors | {
        "inverse": zero.new_zeros(size, size),
        "calm": number,
        "checked": number + float(size > PROBED),
        "probe": number + float(size <= PROBED),
    }


def advance(
    turn: Turn, units: Params, state: Params, theta: Params, move: Params
) -> tuple[Params, Params]:
    """Return the next θ and state from the mean of single steps, per row; of the θ that they move.

    A round in which some client is missing has no gradient. ``units``: of some parameters, 1 for the others.
    """
    theta, unit, x, g = in_units(units, theta, move)
    probing = bool(state["probe"] > 0)
    if not (turn.whole and g.isfinite().all()):
        found = {"base": x - state["step"], "step": state["step"] * (1.0 if probing else 0.5)}
    else:
        found = _probed(state, x, g) if probing else _stepped(state, x, g, turn.program.rows)
    return shaped((found["base"] + found["step"]) * unit, theta), state | found


def in_units(units: Params, theta: Params, move: Params) -> tuple[Params, Tensor, Tensor, Tensor]:
    """Return the θ that is moved, its units, and itself and the gradient as vectors in these units."""
    theta = {name: value for name, value in theta.items() if name in move}
    unit = flat({n: units[n].expand_as(v) if n in units else v * 0 + 1 for n, v in theta.items()})
    return theta, unit, flat(theta) / unit, flat({name: move[name] for name in theta}) / unit


def converged(state: Params) -> bool:
    """Return whether the last steps were short, or there were none to be taken."""
    return bool(state["calm"] >= CALM)


def _stepped(state: Params, x: Tensor, g: Tensor, rows: float) -> Params:
    """Return the state after the gradient g at x, where the last step has led."""
    step, before, inverse = x - state["base"], state["slope"], state["inverse"]
    was, now = before @ step, g @ step
    if bool(step.abs().max() > SHORT):
        if bool(now < -BACK * was):
            return {"base": state["base"], "step": step * (was / (was - now)).clamp(0.1, 0.5)}
        inverse = _updated(inverse, step, before - g)
    step = inverse @ g if inverse.any() else g
    short = (step.abs().max() < SHORT) & (rows * (g @ step) < GAIN)
    state = state | {"calm": (state["calm"] + 1) * short}
    if short and not state["checked"]:
        return _probed(state | {"checked": state["calm"], "probe": state["calm"]}, x, g)
    return state | {"base": x, "slope": g, "step": bounded(step), "inverse": inverse}


def _probed(state: Params, x: Tensor, g: Tensor) -> Params:
    """Return the state after one of D + 1 rounds, of which D move one number each; after the last H is known.

    The changes of the gradient are the columns of minus the Hessian; H has the inverses of its eigenvalues' sizes.
    """
    number, columns = int(state["probe"]), state["inverse"]
    if number == 1:
        state = state | {"base": x, "slope": g}
    else:
        columns = columns.clone()
        columns[:, number - 2] = (state["slope"] - g) / PROBE
    if number <= len(x):
        step = torch.zeros_like(x)
        step[number - 1] = PROBE
        return state | {"step": step, "inverse": columns, "probe": state["probe"] + 1}
    values, vectors = torch.linalg.eigh((columns + columns.mT) / 2)
    sizes = values.abs().clamp(min=1e-6 * float(values.abs().max()))
    inverse = (vectors / sizes) @ vectors.mT
    step = bounded(inverse @ state["slope"])
    return state | {"step": step, "inverse": inverse, "probe": 0 * state["probe"]}


def bounded(step: Tensor) -> Tensor:
    """Return a step, shorter if it is longer than :data:`LONGEST` in one number."""
    return step * (LONGEST / float(step.abs().max().clamp(min=LONGEST)))


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


def flat(values: Params) -> Tensor:
    """Return all values as one vector, in double precision."""
    return torch.cat([value.reshape(-1).double() for value in values.values()])


def shaped(vector: Tensor, like: Params) -> Params:
    """Return a vector as values of these names, shapes and types."""
    parts = vector.split([value.numel() for value in like.values()])
    return {
        name: part.reshape(value.shape).to(value)
        for (name, value), part in zip(like.items(), parts, strict=True)
    }


class ByMeanMove(Rule):
    """A rule whose server moves θ by the clients' mean move, or by quasi-Newton steps on their mean single step."""

    def newton(self, program: Program, steps: Steps) -> Params:
        """Return the first state of quasi-Newton steps; empty where the clients' gradients are noisy."""
        return {} if INFORMATION in steps.gives else begin(program, gradient_of(steps, program))

    def broadcast(self, turn: Turn, server: Any) -> Parts:
        """Return θ and what the rule sends beside it, and that clients take a single step."""
        message = super().broadcast(turn, server) | {part: server[part] for part in self.sends}
        single = {SINGLE: {"calm": server["newton"]["calm"]}} if "newton" in server else {}
        return message | single

    def moved(self, turn: Turn, server: dict[str, Params], move: Params) -> dict[str, Params]:
        """Return θ after a mean move, and the state of quasi-Newton steps."""
        state, theta = server.get("newton"), server["theta"]
        if state is None:
            return {"theta": add(theta, move)}
        program = turn.program
        if "step" not in state:  # clients are at their own optimum, and θ stays
            return {"theta": theta, "newton": {"calm": (state["calm"] + 1) * turn.whole}}
        found, state = advance(turn, prior_units(program), state, theta, move)
        return {"theta": theta | found, "newton": state}
