"""An algorithm is a value composed of four parts: globals, locals, steps and rule.

    server    state = start(program);                      each round: message = broadcast(turn, state)
    client i  work(job): the steps, from the message and the client's state; then the rule encodes their result
    server    sees the sum of the uploads only:            state, term = decode(turn, state, total)

:mod:`bayesfed.algorithms.table` has every method of the literature as such a value. All K clients of a job are rows
of the same tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from torch import Tensor

from bayesfed.data.batch import Batch
from bayesfed.data.federation import Federation, Model
from bayesfed.data.minibatches import Minibatches
from bayesfed.elbo.own_rows import given_own_rows
from bayesfed.elbo.program import Params, Program
from bayesfed.guides.locals import Locals
from bayesfed.rules.rule import Progress, QuasiNewton, Rule, Turn
from bayesfed.steps.gradients import copies
from bayesfed.steps.job import Job, Parts
from bayesfed.steps.optimizer import State
from bayesfed.steps.steps import Steps


class Answer(NamedTuple):
    """The answers of K clients in a round.

    Attributes:
        upload: of which the server sees the sum over the cohort only, ``(K, ...)`` each.
        terms: estimates of the clients' ELBO terms, ``(K,)``.
        clients: the states that they keep until their next visit, ``(K, ...)`` each.
        memory: what they remember of their uploads; it changes by what the server takes of these.
    """

    upload: Parts
    terms: Tensor
    clients: State
    memory: State


@dataclass(frozen=True)
class Algorithm:
    """A method of federated inference.

    Attributes:
        globals: the family of q(θ): a :class:`~bayesfed.guides.Point`, ``Gaussian``, ``MeanField``, ``FullRank``,
            ``Flow``, ``Particles``, ``LaplaceGaussian`` or ``OwnGuide``.
        locals: the family of q(w_i | θ), and what clients keep of it.
        steps: what a client does in a round.
        rule: what is summed over the cohort, and what the server does with the sum.
        lr_decay: the fraction of the learning rates towards which they fall over the rounds, on half a cosine; with 1
            they do not fall.
        corrected: whether a fit ends with importance weights for draws of θ, by all clients, where q(θ) is some way
            from the posterior (:mod:`bayesfed.output.correction`).
        name: the name of the method, "" for a composition without one.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import datasets, models, rules
        >>> algorithm = bf.FedABML().replace(rule=rules.MStep())  # a composition that has no name
        >>> print(bf.fit(models.eight_schools, datasets.eight_schools(), algorithm, rounds=2).algorithm)
        Point · Remade · Alternate · MStep
    """

    globals: Any
    locals: Locals
    steps: Steps
    rule: Rule
    lr_decay: float = 1.0
    corrected: bool = False
    name: str = ""

    def __str__(self) -> str:
        parts = (self.globals, self.locals, self.steps, self.rule)
        return self.name or " · ".join(type(part).__name__ for part in parts)

    def replace(self, **parts: Any) -> Algorithm:
        """Return the algorithm with other parts; it has no name unless one is given."""
        return replace(self, **{"name": ""} | parts)

    def check(self) -> None:
        """Refuse parts that do not fit.

        Raises:
            TypeError: a part is of another kind.
            ValueError: names the parts that do not fit, and those that would do.
        """
        for name, whole in _KINDS.items():
            if not isinstance(getattr(self, name), whole):
                raise TypeError(f"{name} is {getattr(self, name)!r}; it must be a {whole.__name__}")
        for part in (self.locals, self.steps, self.rule):
            self._check_family("globals", self.globals, part, part.globals)
        self._check_family("locals", self.locals, self.steps, self.steps.locals)
        kind, fitting = getattr(self.locals, "kind", None), self.steps.kinds
        if kind is not None and kind not in fitting:
            family = type(self.locals).__name__
            raise ValueError(
                f"{self}: {_called(self.steps)} does not go with locals={family}({kind!r}): take "
                f"locals={' or '.join(f'{family}({other!r})' for other in fitting)}"
            )
        for needed, giver, verb, given in (
            (self.rule, self.steps, "give", self.steps.gives),
            (self.steps, self.rule, "send", self.rule.sends),
        ):
            if missing := needed.needs - given:
                raise ValueError(
                    f"{self}: {_called(needed)} needs {_listed(missing)}, which {_called(giver)} does not {verb}: "
                    f"take {_alternatives(needed, giver, missing)}"
                )

    def _check_family(self, kind: str, family: Any, part: Any, fitting: tuple[type, ...]) -> None:
        if not isinstance(family, fitting):
            raise ValueError(
                f"{self}: {_called(part)} does not go with {kind}={type(family).__name__}(): take {kind}="
                f"{' or '.join(f'{cls.__name__}()' for cls in fitting)}"
            )

    def program(self, model: Model, federation: Federation) -> Program:
        """Return the model with the guide that the parts choose.

        Raises:
            ValueError: parts that do not fit, or a model that lacks a structure that they need.
        """
        self.check()
        program = self.locals.build(self.globals, model, federation)
        if program.in_training and program.random:
            raise ValueError(
                f"{self}: site {program.in_training[0].name!r} is conditional on a client's rows in its steps, at a "
                "point estimate of θ, and here θ is random: take FedAvg, FedABML or PFedVEM, or subclasses=1"
            )
        program = self.steps.accept(program, federation, self.locals, str(self))
        return self.rule.accept(program, self.steps, str(self))

    def start(self, program: Program, whole: bool = False) -> Any:
        """Return the server's first state: nested dicts and named tuples of tensors.

        Args:
            program: the model/guide pair.
            whole: all clients take part with all rows until θ has converged.
        """
        server = self.rule.start(program)
        declared = vars(type(self.rule)).get("by_gradient", False)
        if not (whole and declared and isinstance(self.rule, QuasiNewton)):
            return server
        newton = self.rule.newton(program, self.steps)
        return server | {"newton": newton} if newton else server

    def start_clients(self, program: Program, server: Any, batch: Batch) -> State:
        """Return the states of K clients before their first visit."""
        own = self.steps.start_clients(program, self.params(server), batch, self.locals)
        return own | self.rule.start_clients(program, server, batch)

    def broadcast(self, turn: Turn, server: Any) -> Parts:
        """Return the message to every client of the cohort."""
        return self.rule.broadcast(replace(turn, steps=self.steps), server)

    def work(self, job: Job) -> Answer:
        """Return the answers of K clients."""
        job = replace(job, given=self.rule.prepare(job))
        if job.program.in_training:
            job = replace(job, rows=self._given_own_rows(job, "trained"))
        work = self.steps.run(job, self.locals)
        upload, memory = self.rule.encode(job, work)
        return Answer(upload, work.terms, work.clients, memory)

    def decode(self, turn: Turn, server: Any, total: Parts) -> tuple[Any, Tensor]:
        """Return the server's next state from the sum of the uploads, and its ELBO term ``()``."""
        return self.rule.decode(replace(turn, steps=self.steps), server, total)

    def params(self, server: Any) -> Params:
        """Return the guide's global parameters of a server state."""
        return self.rule.params(server)

    def progress(self, turn: Turn, server: Any) -> Progress | None:
        """Return the progress of the last round, for the convergence criterion; None where a number is needed."""
        return self.rule.progress(replace(turn, steps=self.steps), server)

    def personalize(self, job: Job, steps: int | None = None, lr: float | None = None) -> Params:
        """Return the local parameters ``(K, 1, ...)`` of K clients, made from θ and their own rows.

        Args:
            job: the clients; they need not have taken part.
            steps: by default the ``personal_steps`` of the locals.
            lr: the rate of the steps; by default that of the steps.
        """
        steps = self.locals.personal_steps if steps is None else steps
        if job.program.conditional:
            job = replace(job, rows=self._given_own_rows(job, "given"))
        return self.steps.personalize(job, self.locals, steps, lr)

    def _given_own_rows(self, job: Job, use: str) -> Minibatches:
        """Return the clients' rows with their evidence at θ, as sent, and at the clients' variables."""
        theta = copies(job.theta, len(job))
        own = job.clients.get("params") or self.locals.begin(job.program, theta, job.rows(0))
        own = job.program.init_locals(job.rows(0)) | own
        return given_own_rows(job.program, theta | own, job.rows, use)


def draws_at_once(algorithm: Algorithm, program: Program) -> int:
    """Return the number of values of (θ, w_i) that a client's step evaluates together."""
    return program.particles * max(program.local_draws, algorithm.steps.draws_in_step(program))


def _called(part: Any) -> str:
    """Return how a user writes a part: ``rule=Mean()``."""
    kind = next(name for name, whole in _KINDS.items() if isinstance(part, whole))
    return f"{kind}={type(part).__name__}()"


def _listed(parts: frozenset[str]) -> str:
    return " and ".join(repr(part) for part in sorted(parts))


def _alternatives(needed: Any, giver: Any, missing: frozenset[str]) -> str:
    """Return the parts that would do in place of either."""
    base, kind, attribute, other = (
        (Steps, "steps", "gives", "rule")
        if isinstance(giver, Steps)
        else (Rule, "rule", "sends", "steps")
    )
    fitting = [cls for cls in subclasses(base) if missing <= _by_default(cls, attribute)]
    names = [f"{cls.__name__}()" for cls in fitting if cls is not type(giver)]
    found = f"{kind}={' or '.join(names)}, or " if names else ""
    if type(giver) in fitting:
        found = f"other settings of {type(giver).__name__}, {found}"
    return f"{found}another {other} than {type(needed).__name__}()"


def _by_default(cls: type[Any], attribute: str) -> frozenset[str]:
    """Return the parts that instances with default settings give or send; none where there are no defaults."""
    try:
        found: frozenset[str] = getattr(cls(), attribute)
    except TypeError:
        return frozenset()
    return found


def subclasses(base: type[Any]) -> list[type[Any]]:
    """Return all parts of a kind that can be used, those of users included."""
    found = []
    for cls in base.__subclasses__():
        found += [*([cls] if "__dataclass_params__" in vars(cls) else []), *subclasses(cls)]
    return found


_KINDS = {"locals": Locals, "steps": Steps, "rule": Rule}
FIELDS = tuple(field.name for field in fields(Algorithm))
