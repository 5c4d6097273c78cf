"""The server's part of chains of Hamiltonian Monte Carlo: θ and its momentum, acceptance, and step sizes.

    v = m + L a,   log π(a, e) = log p(θ) + log |∂z / ∂v| + Σ_i log p(w_i, D_i | θ) + log |∂w_i / ∂e_i|

z is the global vector of the guide, and v the same in the coordinates of θ's prior, in which a funnel of effects and
their scale is close to a Normal (:mod:`bayesfed.output.prior_coordinates`), or z itself. What the server needs of the
clients, see :mod:`bayesfed.output.client_chains`, are sums over them. Noise comes from streams, so that a run that was
killed goes on with the same numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesfed.elbo import noise
from bayesfed.elbo.elbo import log_prior
from bayesfed.elbo.program import Params, Program
from bayesfed.engine.files import read_tensors, write_tensors
from bayesfed.guides.family import GLOBAL
from bayesfed.output.client_chains import WARMUP, Leap, Move
from bayesfed.output.prior_coordinates import PriorCoordinates
from bayesfed.tracing.compiler import traceable

ACCEPTANCE = 0.8
"""The mean acceptance probability that the step size is adapted to."""
MOST_STEPS = 64
"""Leapfrog steps of a trajectory."""
_METADATA = "bayesfed chains"
_TENSORS = ("loc", "root", "a", "z", "prior", "slope", "taken")


@dataclass(frozen=True, eq=False)
class Server:
    """What moves θ.

    Attributes:
        program: the model and its guide.
        params: the guide's global parameters.
        key: the noise key of the chains.
        move: moves the clients' variables.
        coordinates: those of θ's prior; None if they are the guide's.
    """

    program: Program
    params: Params
    key: Tensor
    move: Move
    coordinates: PriorCoordinates | None = None

    def to_guide(self, v: Tensor) -> Tensor:
        """Return the global vectors ``(C, D)`` at v."""
        return v if self.coordinates is None else _to_guide(self.coordinates, v)

    def from_guide(self, z: Tensor) -> Tensor:
        """Return v ``(C, D)`` at global vectors."""
        return z if self.coordinates is None else self.coordinates.from_guide(z)[0].to(z)

    def prior(self, v: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log density of θ's prior in v, float64 ``(C,)``, and the gradient of log π in v ``(C, D)``.

        Args:
            v: ``(C, D)``.
            slope: the gradient of the clients' terms in z there.
        """
        value, slope = _log_prior(self.program, self.params, self.coordinates, v, slope)
        return value.double(), slope.nan_to_num(0.0, 0.0, 0.0)

    def noise(self, iteration: int) -> tuple[Tensor, Tensor]:
        """Return the noise keys of an iteration: of momenta, and of the other numbers."""
        key = noise.fold(noise.fold(self.key, noise.word("server")), iteration)
        return noise.fold(key, 0), noise.fold(key, 1)


class State(NamedTuple):
    """C chains between two trajectories.

    Attributes:
        loc: m, ``(D,)``.
        root: L, ``(D, D)``.
        a: positions ``(C, D)``.
        z: the global vectors there, ``(C, D)``.
        prior: the log density of θ's prior in v, float64 ``(C,)``.
        slope: the gradient of log π in v, ``(C, D)``.
        taken: which chains have accepted their last trajectory, bool ``(C,)``.
        size: the length of a leapfrog step.
        iteration: the number of trajectories so far.
        gradients: the number of gradients that each chain has taken, the same number of exchanges between machines.
        acceptance: the mean acceptance probability of the last trajectory.
    """

    loc: Tensor
    root: Tensor
    a: Tensor
    z: Tensor
    prior: Tensor
    slope: Tensor
    taken: Tensor
    size: float
    iteration: int = 0
    gradients: int = 1
    acceptance: float = 0.0

    def at(self, a: Tensor) -> Tensor:
        """Return v at positions ``(C, D)``."""
        return self.loc + a @ self.root.mT

    def placed(self, loc: Tensor, root: Tensor) -> State:
        """Return the same chains in other coordinates."""
        return self._replace(loc=loc, root=root, a=_positions(self.at(self.a), loc, root))


def _positions(v: Tensor, loc: Tensor, root: Tensor) -> Tensor:
    """Return a ``(C, D)`` at v."""
    return torch.linalg.solve_triangular(root, (v - loc).mT, upper=False).mT


def start_chains(server: Server, draws: Tensor, z: Tensor, size: int) -> State:
    """Return chains that start at these draws.

    Args:
        server: moves them.
        draws: those of q or of its correction ``(S, D)``, whose mean and covariance make the coordinates.
        z: the first global vectors, ``(C, D)``.
        size: the number of all variables of a chain, those of the clients included.
    """
    everywhere = torch.ones(len(z), dtype=torch.bool, device=z.device)
    moved, v = server.move(Leap(0, 0, 0.0, z, everywhere)), server.from_guide(z)
    prior, slope = server.prior(v, moved.slope.to(z))
    loc, root = mean_and_root(server.from_guide(draws))
    a = _positions(v, loc, root)
    return State(loc, root, a, z, prior, slope, everywhere, min(0.5, size**-0.25))


def next_state(server: Server, state: State, most: int) -> State:
    """Take a trajectory of leapfrog steps, of a random length around π/2, and accept its end or not.

    While the coordinates are adapted the step size is, too.

    Args:
        server: moves the chains.
        state: before it.
        most: the largest number of steps.
    """
    number = state.iteration + 1
    of_momenta, of_others = server.noise(number)
    u = noise.uniform(of_others, (1 + len(state.a),)).to(state.a.device)
    length = (0.5 + float(u[0])) * math.pi / 2
    steps = min(MOST_STEPS, most, max(1, math.ceil(length / state.size)))
    h, a, z, slope, prior = state.size, state.a, state.z, state.slope, state.prior
    p = noise.Draw("normal", tuple(a.shape))(of_momenta, a.dtype)
    before = prior - _kinetic(p)
    gain = torch.zeros_like(prior)
    for step in range(steps):
        p = p + h / 2 * (slope @ state.root)
        a = a + h * p
        v = state.at(a)
        z = server.to_guide(v)
        moved = server.move(Leap(number, step, h, z, state.taken))
        gain, (prior, slope) = moved.gain, server.prior(v, moved.slope.to(z))
        p = p + h / 2 * (slope @ state.root)
    change = prior - _kinetic(p) - before + gain
    chance = change.nan_to_num(-torch.inf).clamp(max=0.0).exp()
    taken = u[1:] < chance

    def chosen(new: Tensor, old: Tensor) -> Tensor:
        return torch.where(taken.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    acceptance, size = float(chance.mean()), state.size
    if number <= sum(WARMUP):
        size *= math.exp(number**-0.5 * (acceptance - ACCEPTANCE))
    return state._replace(
        a=chosen(a, state.a),
        z=chosen(z, state.z),
        prior=chosen(prior, state.prior),
        slope=chosen(slope, state.slope),
        taken=taken,
        size=size,
        iteration=number,
        gradients=state.gradients + steps,
        acceptance=acceptance,
    )


def mean_and_root(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean ``(D,)`` of draws ``(S, D)``, and the Cholesky factor of their covariance."""
    covariance = z.double().mT.cov().reshape(z.shape[1], -1)
    return z.double().mean(0).to(z), torch.linalg.cholesky(covariance).to(z)


@traceable
def _to_guide(coordinates: PriorCoordinates, v: Tensor) -> Tensor:
    """Return the global vectors ``(C, D)`` at v."""
    with torch.no_grad():
        return coordinates.to_guide(v)


@traceable
def _log_prior(
    program: Program, params: Params, at: PriorCoordinates | None, v: Tensor, slope: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what :meth:`Server.prior` does; ``slope`` is a constant."""
    with torch.enable_grad():
        v = v.detach().requires_grad_()
        z, volume = (v, torch.zeros_like(v[:, 0])) if at is None else at.to_guide_and_volume(v)
        value = log_prior(program, params, {GLOBAL: z[:, None, None]}, len(z)) + volume
        of_clients = (z * slope).sum()
        (grad,) = torch.autograd.grad(value.sum() + of_clients, v, materialize_grads=True)
    return value.detach(), grad


def _kinetic(p: Tensor) -> Tensor:
    return p.double().square().sum(1) / 2


# -- files ----------------------------------------------------------------------------------------


class Record(NamedTuple):
    """Chains so far.

    Attributes:
        state: after the last trajectory.
        drawn: the global vectors after each trajectory, ``(C, D)`` each.
        acceptances: the mean acceptance probability of each.
    """

    state: State
    drawn: list[Tensor]
    acceptances: list[float]

    def save(self, path: Path, of: dict[str, Any]) -> None:
        """Write to a file, atomically; ``of`` says whose chains they are."""
        tensors = {name: getattr(self.state, name) for name in _TENSORS}
        plain = {n: v for n, v in self.state._asdict().items() if n not in _TENSORS}
        about = {"of": of, "state": plain, "acceptances": self.acceptances}
        write_tensors(path, tensors | {"drawn": torch.stack(self.drawn)}, _METADATA, about)


def load_record(path: Path, of: dict[str, Any], like: Tensor) -> Record | None:
    """Return what :meth:`Record.save` wrote of these chains, on a tensor's device; None if there is no such file."""
    if not path.exists():
        return None
    tensors, about = read_tensors(path, _METADATA)
    whole = tensors.keys() >= set(_TENSORS)  # those of an earlier version lack some
    if about["of"] != of or not whole:
        return None
    found: dict[str, Any] = {name: value.to(like.device) for name, value in tensors.items()}
    drawn = found.pop("drawn")
    return Record(State(**found, **about["state"]), [*drawn], about["acceptances"])
