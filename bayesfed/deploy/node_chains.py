"""The node's side of chains of Hamiltonian Monte Carlo: its clients' variables, which only their sums leave.

They are stored after each leapfrog step, with the sums, so that the same request gets the same answer and a node that
was killed goes on.
"""

from __future__ import annotations

from pathlib import Path

import torch

from bayesfed.deploy.contents import broadcast_digest
from bayesfed.deploy.messages import MessageError, MoveChains, Tensors
from bayesfed.engine.execution import threads
from bayesfed.engine.files import read_tensors, write_tensors
from bayesfed.guides.family import GLOBAL
from bayesfed.output.chains import MOST, numbers_at_once
from bayesfed.output.client_chains import ChainClients, Leap, Memory, MoveHere
from bayesfed.output.conditionals import has_block
from bayesfed.output.posterior import Posterior

_METADATA = "bayesfed chains of a node"


class NodeChains:
    """The variables of a node's clients in chains.

    Args:
        posterior: of the clients, before its draws of θ are corrected.
        path: stores the chains; what an earlier process has stored is loaded.
    """

    def __init__(self, posterior: Posterior, path: Path) -> None:
        self.posterior, self.path = posterior, path
        self._here: MoveHere | None = None
        self._memory: Memory | None = None
        self._last: tuple[str, Tensors] = "", {}
        if path.exists():
            device = posterior.federation.device
            found, about = read_tensors(path, _METADATA)
            found = {name: value.to(device) for name, value in found.items()}
            self._last = about.pop("asked"), {n: found.pop(f"sums.{n}") for n in ("gain", "slope")}
            self._memory = Memory.from_tensors(found, **about)

    def move(self, message: MoveChains, sent: Tensors) -> Tensors:
        """Take a leapfrog step, and return the sums over the node's clients.

        Raises:
            MessageError: the step does not follow the last one; the tensors are not those of chains.
        """
        asked = broadcast_digest(message, sent).hex()
        if asked == self._last[0]:
            return self._last[1]
        leap = self._checked(message, sent)
        if self._here is None or message.iteration == 0:
            clients = ChainClients.of(self.posterior, len(leap.z), sent["key"])
            self._here = MoveHere(clients, memory=self._memory)
        with threads(numbers_at_once(self.posterior)):
            moved = self._here(leap)
        memory = self._memory = self._here.memory
        assert memory is not None
        sums = moved._asdict()
        tensors = memory.to_tensors() | {f"sums.{name}": value for name, value in sums.items()}
        about = {"iteration": memory.iteration, "step": memory.step, "seen": memory.seen}
        write_tensors(self.path, tensors, _METADATA, about | {"asked": asked})
        self._last = asked, sums
        return sums

    def _checked(self, message: MoveChains, sent: Tensors) -> Leap:
        program, memory = self.posterior.program, self._memory
        if self.posterior.epsilon is not None or program.random != (GLOBAL,):
            raise MessageError("chains need a q(θ) with a density, and no privacy")
        if not has_block(program):
            raise MessageError("these clients' local variables are not a Normal block")
        if set(sent) != {"z", "taken", "key"}:
            raise MessageError("a step of chains has the tensors z, taken and key")
        z, taken, key = sent["z"], sent["taken"], sent["key"]
        size, dtype = program.randomness[GLOBAL][0].tail[-1], self.posterior.federation.dtype
        if z.ndim != 2 or z.dtype != dtype or z.shape[1] != size or not 0 < len(z) <= MOST:
            raise MessageError(f"the global vectors of chains are up to {MOST} × {size}, {dtype}")
        if taken.dtype != torch.bool or taken.shape != z.shape[:1]:
            raise MessageError("each chain has accepted its last trajectory, or not")
        if key.dtype != torch.int64 or key.ndim:
            raise MessageError("chains come with a key")
        leap = Leap(message.iteration, message.step, message.size, z, taken)
        if leap.iteration == 0 and leap.step == 0:
            return leap
        at = (-1, -1) if memory is None else (memory.iteration, memory.step)
        follows = leap.step > 0 and at == (leap.iteration, leap.step - 1)
        begins = leap.step == 0 and at[0] in (leap.iteration - 1, leap.iteration)
        if memory is None or not (follows or begins) or leap.iteration == 0:
            raise MessageError(
                f"step {leap.step} of trajectory {leap.iteration} of chains does not follow the last one here, step "
                f"{at[1]} of trajectory {at[0]}: a folder or file was put back. Delete the server's file that ends in "
                ".chains, and the chains start again"
            )
        if len(memory.kinetic) != len(z):
            raise MessageError(f"there are {len(memory.kinetic)} chains, not {len(z)}")
        return leap
