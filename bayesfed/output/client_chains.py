"""The clients' part of chains of Hamiltonian Monte Carlo: their own variables, which move with their own momenta.

In C chains a client has C values e_i of the noise of its variables, see :mod:`bayesfed.output.chains`. At each leapfrog
step the server sends the global vector of each chain. The clients move e_i, and give the server two sums over all of
them: the change of their energy since the trajectory began, and the gradient of their log densities in the global
vector. Nothing else of them is needed, in one process and between machines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import NamedTuple, Self

import torch
from pyro import poutine
from torch import Tensor

from bayesfed.data.batch import Batch
from bayesfed.elbo import handlers, noise
from bayesfed.elbo.program import Params, Program
from bayesfed.guides import local
from bayesfed.guides.family import GLOBAL
from bayesfed.guides.hierarchical import LOCAL
from bayesfed.output.draws import client_chunks
from bayesfed.output.failing_draws import skip_failing
from bayesfed.output.fitted import Fitted
from bayesfed.tracing.compiler import Compiler, traceable, using

WARMUP = (15, 25)
"""Iterations after each of which the coordinates are adapted to the draws of their second half."""
LARGEST = 1e9
"""The size at which sums are cut off, so that they have a place in a secure sum; such a trajectory is not accepted."""


def adapted_from(iteration: int) -> int | None:
    """Return the first iteration of whose draws the coordinates are made after this one; None if they stay.

    Example:
        >>> from bayesfed.output.client_chains import adapted_from
        >>> adapted_from(15), adapted_from(40), adapted_from(41)
        (8, 28, None)
    """
    ends = dict(zip(accumulate(WARMUP), WARMUP, strict=True))
    length = ends.get(iteration)
    return None if length is None else iteration - length + length // 2 + 1


class Leap(NamedTuple):
    """A leapfrog step that the server asks of all clients.

    Attributes:
        iteration: the number of the trajectory, from 1; 0 for the start of the chains.
        step: the number of the step in it, from 0.
        size: the length of the step.
        z: the global vectors at its end, ``(C, D)``.
        taken: which chains have accepted the end of the trajectory before, bool ``(C,)``.
    """

    iteration: int
    step: int
    size: float
    z: Tensor
    taken: Tensor


class Moved(NamedTuple):
    """Sums over clients after a leapfrog step, in double precision.

    Attributes:
        gain: by how much log p(w_i, D_i | θ) + log |∂w_i / ∂e_i| less the kinetic energy of all clients together is
            larger than at the start of the trajectory, ``(C,)``.
        slope: the gradient of their log densities in the global vector, ``(C, D)``.
    """

    gain: Tensor
    slope: Tensor


Move = Callable[[Leap], Moved]
"""Moves the variables of all clients; between machines it asks the institutions and adds up their answers."""


class Place(NamedTuple):
    """The clients' variables in C chains.

    Attributes:
        e: their noise, ``(C, N, P)``.
        slope: the gradient of the log density in it, ``(C, N, P)``.
        value: the sum of the clients' log densities, float64 ``(C,)``.
    """

    e: Tensor
    slope: Tensor
    value: Tensor


class Memory(NamedTuple):
    """What clients keep between two leapfrog steps.

    Attributes:
        iteration: of the last step.
        step: the number of the last step.
        start: where its trajectory began.
        now: where it is.
        momentum: ``(C, N, P)``.
        kinetic: the kinetic energy at the start of the trajectory, float64 ``(C,)``.
        spread: standard deviations of e, ``(N, P)``, the units of the momenta.
        sums: of e and its square over the draws to which the spread is to be adapted, float64 ``(2, N, P)``.
        seen: their number.
    """

    iteration: int
    step: int
    start: Place
    now: Place
    momentum: Tensor
    kinetic: Tensor
    spread: Tensor
    sums: Tensor
    seen: int

    def to_tensors(self) -> dict[str, Tensor]:
        """Return all of it but the numbers, by name."""
        found = {name: value for name, value in self._asdict().items() if torch.is_tensor(value)}
        for place in ("start", "now"):
            found |= {f"{place}.{n}": v for n, v in getattr(self, place)._asdict().items()}
        return found

    @classmethod
    def from_tensors(
        cls, found: Mapping[str, Tensor], *, iteration: int, step: int, seen: int
    ) -> Self:
        """Return the inverse of :meth:`to_tensors`."""
        start, now = (
            Place(*(found[f"{place}.{name}"] for name in Place._fields))
            for place in ("start", "now")
        )
        plain = {name: found[name] for name in ("momentum", "kinetic", "spread", "sums")}
        return cls(iteration, step, start, now, **plain, seen=seen)


@dataclass(frozen=True, eq=False)
class ChainClients:
    """Clients whose variables move in chains.

    Attributes:
        fitted: q of these clients.
        keys: their noise streams, ``(N,)``.
        chains: C.
        chunks: positions of clients, their rows and their parameters.
    """

    fitted: Fitted
    keys: Tensor
    chains: int
    chunks: Sequence[tuple[Tensor, Batch, Params]]

    @classmethod
    def of(cls, fitted: Fitted, chains: int, key: Tensor) -> Self:
        """Return the clients of a posterior, in so many chains; ``key`` is the noise key of the chains."""
        fitted = fitted.sufficient
        federation = fitted.federation
        chunks = [
            (chunk, federation.batch(chunk), fitted.params_of(chunk))
            for chunk in client_chunks(fitted, 4 * chains, federation)
        ]
        keys = noise.fold(noise.fold(key, noise.word("clients")), federation.stream_ids)
        return cls(fitted, keys, chains, chunks)

    def move(self, memory: Memory | None, asked: Leap) -> tuple[Memory, Moved]:
        """Take a leapfrog step, which follows the one of the memory; the start of chains follows any.

        Args:
            memory: after the step before; None before the start of the chains.
            asked: the step.
        """
        if asked.iteration == 0:
            memory = self._first_memory(asked.z)
        elif asked.step == 0:
            assert memory is not None
            memory = self._begin_trajectory(memory, asked)
        assert memory is not None
        h, spread, now = asked.size, memory.spread, memory.now
        momentum = memory.momentum + h / 2 * spread * now.slope
        now, slope = self._place(asked.z, now.e + h * spread * momentum)
        momentum = momentum + h / 2 * spread * now.slope
        start = now if asked.iteration == 0 else memory.start
        gain = now.value - _kinetic(momentum) - (start.value - memory.kinetic)
        gain = gain.nan_to_num(-LARGEST).clamp(-LARGEST, LARGEST)
        slope = slope.nan_to_num(0.0).clamp(-LARGEST, LARGEST)
        memory = memory._replace(step=asked.step, start=start, now=now, momentum=momentum)
        return memory, Moved(gain, slope)

    def _normals(self, iteration: int) -> Tensor:
        """Return the clients' Normal noise of an iteration, ``(C, N, P)``."""
        size = self.fitted.program.randomness[LOCAL][0].tail[-1]
        draw = noise.Draw("normal", (self.chains, size))
        return draw(self.keys, self.fitted.federation.dtype, (iteration,)).transpose(0, 1)

    def _first_memory(self, z: Tensor) -> Memory:
        """Return the memory before the start of chains, at draws from q(w_i | θ), without momentum."""
        e = self._normals(0)
        place = Place(e, torch.zeros_like(e), torch.zeros(len(z), dtype=torch.float64).to(z.device))
        spread = torch.ones_like(e[0])
        sums = e.new_zeros(2, *spread.shape, dtype=torch.float64)
        momentum = torch.zeros_like(e)
        return Memory(0, 0, place, place, momentum, place.value, spread, sums, 0)

    def _begin_trajectory(self, memory: Memory, asked: Leap) -> Memory:
        """Return the memory at the start of a trajectory, where the one before has been accepted or not."""
        if memory.iteration == asked.iteration:  # it is asked again
            start, spread, sums, seen = memory.start, memory.spread, memory.sums, memory.seen
        else:
            start = Place(
                *(
                    torch.where(asked.taken.reshape(-1, *[1] * (new.ndim - 1)), new, old)
                    for new, old in zip(memory.now, memory.start, strict=True)
                )
            )
            spread, sums, seen = _adapted(memory, start.e)
        momentum = self._normals(asked.iteration)
        kinetic = _kinetic(momentum)
        return Memory(asked.iteration, 0, start, start, momentum, kinetic, spread, sums, seen)

    def _place(self, z: Tensor, e: Tensor) -> tuple[Place, Tensor]:
        """Return the place of noise ``(C, N, P)``, and the gradient in z ``(C, D)``."""
        slopes, value = torch.empty_like(e), torch.zeros(len(z), dtype=torch.float64).to(z.device)
        slope = torch.zeros_like(z, dtype=torch.float64)
        for chunk, batch, params in self.chunks:
            log_densities = partial(_log_densities, self.fitted.program, params, batch)
            own = skip_failing(log_densities, (z, e[:, chunk]), _not_a_number)
            value, slope = value + own[0].double(), slope + own[1].double()
            slopes[:, chunk] = own[2].nan_to_num(0.0, 0.0, 0.0)
        return Place(e, slopes, value), slope


@dataclass(eq=False)
class MoveHere:
    """The clients of one process, with their memory: a :data:`Move`.

    Attributes:
        clients: all of them.
        compiler: of the function that each step evaluates.
    """

    clients: ChainClients
    compiler: Compiler = field(default_factory=Compiler)
    memory: Memory | None = None

    @torch.no_grad()
    def __call__(self, asked: Leap) -> Moved:
        """Take a leapfrog step."""
        with using(self.compiler):
            self.memory, moved = self.clients.move(self.memory, asked)
        return moved


def _adapted(memory: Memory, e: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return the spread, the sums and their number after an iteration that ended at these values of e."""
    ends = [*accumulate(WARMUP)]
    end = next((end for end in ends if memory.iteration <= end), None)
    if end is None or memory.iteration == 0:
        return memory.spread, memory.sums, memory.seen
    first = adapted_from(end)
    assert first is not None
    sums, seen = memory.sums, memory.seen
    if memory.iteration >= first:
        own = e.double()
        sums, seen = sums + torch.stack([own.sum(0), own.square().sum(0)]), seen + len(own)
    if memory.iteration < end:
        return memory.spread, sums, seen
    variance = (sums[1] - sums[0].square() / seen) / (seen - 1)
    return variance.clamp(min=1e-12).sqrt().to(e), torch.zeros_like(sums), 0


def _kinetic(momentum: Tensor) -> Tensor:
    return momentum.double().square().sum((1, 2)) / 2


def _not_a_number(z: Tensor, e: Tensor) -> tuple[Tensor, ...]:
    """Return the result of :func:`_log_densities` for a chain that is where it cannot be computed."""
    return tuple(torch.full_like(x, torch.nan) for x in (z[:, 0], z, e))


@traceable
def _log_densities(
    program: Program, params: Params, batch: Batch, z: Tensor, e: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Σ_i log p(w_i, D_i | θ) + log |∂w_i / ∂e_i| of K clients, and its gradients in z and e."""
    with torch.enable_grad():
        z, e = z.detach().requires_grad_(), e.detach().requires_grad_()
        theta = z[:, None, None]
        with handlers.given(batch.device, params, {}, {GLOBAL: theta}, len(z)):
            rows = batch if program.needs_rows else batch.head()
            guide = poutine.trace(program.guide).get_trace(rows)
        u, log_det = local.unwhiten(guide.nodes[LOCAL]["fn"].drawn, e[:, :, None])
        log_joint = program.guide.block_log_joint(params, batch, u, theta)
        terms = log_joint.sum(1) + log_det.sum((1, 2))
        grads = torch.autograd.grad(terms.sum(), (z, e), materialize_grads=True)
    return terms.detach(), *grads
