"""The interface of steps: the work of a client in a round.

Steps *give* parts to the rule, such as copies of θ, and may *need* parts of its message. A combination whose steps do
not give what its rule needs is refused before anything runs (:mod:`bayesfed.algorithms.algorithm`).
"""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from bayesfed.data.batch import Batch
from bayesfed.data.federation import Federation
from bayesfed.elbo.elbo import Noise
from bayesfed.elbo.program import Params, Program
from bayesfed.guides.globals import Point
from bayesfed.guides.locals import AtPrior, Encoded, Kept, Locals, Remade
from bayesfed.steps.gradients import copies
from bayesfed.steps.job import Job, Work
from bayesfed.steps.optimizer import State
from bayesfed.steps.structure import check_moves

Objective = Callable[[Program, Params, Batch, Noise], Tensor]
"""A loss ``(K,)`` of K clients, of (program, parameters, batch, noise)."""


class Inputs(NamedTuple):
    """The inputs of a step beside the parameters and its noise.

    Attributes:
        batch: the minibatch.
        rates: the learning rates.
        active: the clients that take it, bool ``(K,)``; None where all do.
        constants: what does not change in the round.
    """

    batch: Batch
    rates: tuple[Any, ...] = ()
    active: Tensor | None = None
    constants: Params = {}  # noqa: RUF012  (a constant)


class Steps:
    """Steps of K clients at once. Subclasses are frozen dataclasses, whose fields are the settings.

    Attributes:
        gives: the parts that :meth:`run` gives to the rule.
        needs: the parts that it reads of the rule's message, beside ``theta``.
        globals: the families of the globals that it can move.
        locals: the families of the clients' variables that it can move.
        kinds: point estimates or Normals, where a family of the clients' variables has both.
        moved: what a program must have to be moved: ``"globals"``, ``"body"`` (of the globals), ``"locals"``, or
            ``"all"``, locals and body.
    """

    gives: ClassVar[frozenset[str]] = frozenset({"theta"})
    needs: ClassVar[frozenset[str]] = frozenset()
    globals: ClassVar[tuple[type[Any], ...]] = (Point,)
    locals: ClassVar[tuple[type[Any], ...]] = (AtPrior, Kept, Remade, Encoded)
    kinds: ClassVar[tuple[str, ...]] = ("point", "normal")
    moved: ClassVar[frozenset[str]] = frozenset()

    def gradient_of(self, program: Program) -> list[str] | None:
        """Return the globals of which a single step is the gradient of the steps' objective; None if there is no such.

        The list is empty where a single step moves the clients' own variables alone, to their optimum. Where the
        message has the part :data:`~bayesfed.steps.job.SINGLE`, :meth:`run` takes that step, at rate 1 in the units of
        the priors, without bounds, with the clients' own variables at their optimum given θ.
        """
        return None

    def reads_single_rows(self, program: Program) -> bool:
        """Return whether the steps use gradients of single rows, or divide rows, so that sums over them are not enough.

        A run of many rows may then not replace them by fewer ones (:mod:`bayesfed.checks.sufficient`).
        """
        return False

    def draws_in_step(self, program: Program) -> int:
        """Return the number of draws of (θ, w_i) that a step evaluates together."""
        draws: int = getattr(self, "draws", 1)
        return draws

    def accept(
        self, program: Program, federation: Federation, locals_: Locals, name: str
    ) -> Program:
        """Return the program, or refuse one that lacks what the steps of algorithm ``name`` move.

        Raises:
            ValueError: names the missing structure, and an algorithm that does without it.
        """
        if self.moved:
            check_moves(program, self.moved, locals_, name)
        return program

    def start_clients(
        self, program: Program, theta: Params, batch: Batch, locals_: Locals
    ) -> State:
        """Return the state of K clients before their first visit; stateless clients have none."""
        if not locals_.stateful:
            return {}
        return {"params": locals_.begin(program, copies(theta, len(batch)), batch)}

    def message(self, program: Program, params: Params, key: Tensor) -> Params:
        """Return draws of θ that the server makes for the steps; most need none."""
        return {}

    def run(self, job: Job, locals_: Locals) -> Work:
        """Take the steps of a round."""
        raise NotImplementedError

    def adapt(self, job: Job, theta: Params, own: Params, steps: int, lr: float | None) -> Params:
        """Take steps on the clients' own variables alone, θ as it is; both are a copy for each client."""
        raise NotImplementedError

    def personalize(self, job: Job, locals_: Locals, steps: int, lr: float | None) -> Params:
        """Make the local parameters ``(K, 1, ...)`` of K clients from θ and their own rows.

        Args:
            job: the clients; they need not have taken part.
            locals_: the family of their variables.
            steps: number of steps.
            lr: the rate of the steps; by default that of a round.
        """
        theta = copies(job.theta, len(job))
        own = locals_.begin(job.program, theta, job.rows(0))
        return self.adapt(job, theta, own, steps, lr)


def gradient_of(steps: Any, program: Program) -> list[str] | None:
    """Return the globals of which a single step is the gradient; None if a subclass does not say so itself."""
    says = "gradient_of" in vars(type(steps))
    found: list[str] | None = steps.gradient_of(program) if says else None
    return found
