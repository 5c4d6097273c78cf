"""A check of an algorithm with parts of one's own: the invariants that the engine, files and deployments rely on."""

import copy
import json
import tempfile
import warnings
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

from bayesfed.algorithms.algorithm import Algorithm, Answer
from bayesfed.algorithms.registry import PARTS, algorithm_of, settings_of
from bayesfed.data.federation import Federation, Model
from bayesfed.elbo import noise
from bayesfed.elbo.program import Program
from bayesfed.engine.batches import batches
from bayesfed.engine.execution import Execution
from bayesfed.engine.plan import Plan
from bayesfed.engine.privacy import Privacy
from bayesfed.engine.program import build_program
from bayesfed.engine.run import Run
from bayesfed.fitting import prepare_run, step
from bayesfed.rules.rule import Turn
from bayesfed.steps.job import Job, Work
from bayesfed.steps.losses import per_client
from bayesfed.steps.optimizer import take
from bayesfed.testing.compare import (
    call_pure,
    check_close,
    check_rows,
    describe_difference,
    finite,
    guarded,
    label,
)


def check_algorithm(
    algorithm: Algorithm, model: Model, federation: Federation, rounds: int = 2
) -> None:
    """Try the invariants of an algorithm on a model and data: small ones, as every member runs several times.

    The parts fit together, and their settings go to plain data and back. Every member gives the same when it is
    called again, and changes nothing that it is given. A client's result and upload do not depend on the other
    clients of its batch, nor on their order, and the sum of the uploads is all that ``decode`` needs: chunks of one
    client give the same fit. Clients' states keep their shapes. A run that is stopped and resumed from its file ends
    with the same bits. An upload that is not finite is left out. Under noise the rule works, unless it says
    ``no_noise``, and clients' memory of their uploads does not change. ``personalize`` makes local parameters of the
    right shapes.

    A federation in float64 shows smaller differences: results must agree to three times the root of the precision.

    Args:
        algorithm: with parts of one's own.
        model: a Pyro program that it can fit.
        federation: at least three clients, as one of them is left out.
        rounds: how many rounds are tried, at least two.

    Raises:
        AssertionError: an invariant does not hold; the message names it and the member of the part that is to blame.

    Example:
        >>> import bayesfed as bf
        >>> bf.testing.check_algorithm(bf.FedAvg(), bf.models.eight_schools, bf.datasets.eight_schools())
    """
    _check_settings(algorithm)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = Plan(model, algorithm, rounds=rounds, execution=Execution(compile=False))
        try:
            program = build_program(model, federation, algorithm, plan.seed)
        except ValueError as error:
            raise AssertionError(
                f"the parts, the model and the data do not fit: {error}"
            ) from error
        case = _Case(plan, program, federation)
        server = _check_members(case)
        _check_runs(case, server)
        _check_left_out(case)
        _check_noise(case)


@dataclass(frozen=True)
class _Case:
    """The parts of a run that has not started."""

    plan: Plan
    program: Program
    federation: Federation

    @property
    def algorithm(self) -> Algorithm:
        return self.plan.algorithm

    def start(self, file: Path | None = None, **changes: Any) -> Run:
        """Return a run before its first round, or where its file ends."""
        plan = replace(self.plan, **changes)
        return prepare_run(plan, self.program, self.federation, file)

    def job(self, run: Run, clients: Tensor, message: Any) -> Job:
        """Return the next round's work of some clients."""
        key = noise.fold(noise.key(self.plan.seed).to(self.federation.device), run.done)
        keys = noise.fold(key, self.federation.stream_ids[clients])
        rows = batches(self.federation, clients, self.plan.batch_size, keys)
        states = take(run.clients.tensors, clients)
        return Job(self.program, message, states, rows, keys, run.rate)


# -- settings ------------------------------------------------------------------------------------------


def _check_settings(algorithm: Algorithm) -> None:
    """Fail unless the parts are dataclasses that fit, and plain data describe the algorithm."""
    for name in PARTS:
        part = getattr(algorithm, name)
        frozen = getattr(part, "__dataclass_params__", None)
        if frozen is None or not frozen.frozen:
            raise AssertionError(
                f"{type(part).__name__}: give the class of {name} @dataclass(frozen=True); its fields are its settings"
            )
    try:
        algorithm.check()
        found = algorithm_of(
            json.loads(json.dumps(settings_of(algorithm))),
            guide=getattr(algorithm.globals, "guide", None),
        )
    except (TypeError, ValueError) as error:
        raise AssertionError(f"the parts do not fit, or are not plain data: {error}") from error
    for name in PARTS:
        before, after = getattr(algorithm, name), getattr(found, name)
        for field in fields(before):
            one, other = getattr(before, field.name), getattr(after, field.name)
            if type(before) is not type(after) or one != other:
                raise AssertionError(
                    f"{type(before).__name__}.{field.name} is {one!r}, but {other!r} when it comes back from a file: "
                    "settings are numbers, text, tuples or parts"
                )


# -- members -------------------------------------------------------------------------------------------


def _check_members(case: _Case) -> Any:
    """Check every member in each round; return the server's state at the end."""
    algorithm, clients = case.algorithm, len(case.federation)
    rule, steps = algorithm.rule, algorithm.steps
    run, everyone = case.start(), torch.arange(clients)
    _check_server(algorithm, run.server, run.server, "start")
    for _ in range(case.plan.rounds or 0):
        key = noise.fold(noise.fold(noise.key(case.plan.seed), run.done), -1)
        turn = Turn(case.program, key, clients, run.rate, steps=steps)
        message = call_pure(rule, "broadcast", (turn, run.server), server=run.server)
        missing = rule.sends - message.keys()
        if missing:
            raise AssertionError(f"{label(rule)}.broadcast does not send {sorted(missing)}")
        job, work, answer = _check_work(case, case.job(run, everyone, message))
        if run.done + 1 == case.plan.rounds:  # states are not those of the start any more
            for some in (everyone.flip(0), everyone[:1]):
                own = case.job(run, some, message)
                _check_alone(case, own, some, job, work, (answer.upload, answer.memory))
        total = tree_map(lambda v: v.sum(0), answer.upload)
        found = call_pure(rule, "decode", (turn, run.server, total), server=run.server, total=total)
        if not isinstance(found, tuple) or len(found) != 2:
            raise AssertionError(f"{label(rule)}.decode gives {type(found)}: a state and a term")
        server, term = found
        _check_server(algorithm, run.server, server, "decode")
        if not finite([server, term]):
            raise AssertionError(f"{label(rule)}.decode gives numbers that are not finite")
        call_pure(rule, "progress", (turn, server), server=server)
        run.server = server
        run.clients.put(everyone, answer.clients | answer.memory)
        run.done += 1
    _check_personal(case, case.job(run, everyone, {"theta": algorithm.params(run.server)}))
    return run.server


def _check_work(case: _Case, job: Job) -> tuple[Job, Work, Answer]:
    """Return all clients' prepared work, its result and their answers: their parts, shapes and states are right."""
    rule, steps = case.algorithm.rule, case.algorithm.steps
    given = {"message": job.message, "clients": job.clients, "rows": dict(job.rows(0).fields)}
    job = replace(job, given=call_pure(rule, "prepare", (job,), **given))
    given |= {"what the rule prepares": job.given}
    work: Work = call_pure(steps, "run", (job, case.algorithm.locals), **given)
    check_rows(steps, "run", "found", work.found, len(job))
    check_rows(steps, "run", "terms", work.terms, len(job))
    if missing := steps.gives - work.found.keys():
        raise AssertionError(
            f"{label(steps)}.run does not give {sorted(missing)}, which `gives` has"
        )
    upload, memory = call_pure(rule, "encode", (job, work), **given, work=work)
    check_rows(rule, "encode", "the upload", upload, len(job))
    if not all(isinstance(part, dict) for part in upload.values()):
        raise AssertionError(f"{label(rule)}.encode: an upload has tensors by part and name")
    if not finite([work, upload, memory]):
        raise AssertionError(f"{label(steps)}.run or {label(rule)}.encode: numbers are not finite")
    if both := work.clients.keys() & memory.keys():
        raise AssertionError(
            f"{label(rule)}.encode remembers {sorted(both)}, which is a state of {label(steps)} too: rename it"
        )
    _check_states(case, job, work.clients, memory)
    return job, work, Answer(upload, work.terms, work.clients, memory)


def _check_alone(
    case: _Case, own: Job, some: Tensor, job: Job, work: Work, encoded: tuple[Any, Any]
) -> None:
    """Fail if some clients have another result by themselves, or in another order, than in the batch of all.

    Args:
        case: the run.
        own: their work.
        some: their positions.
        job: the work of all.
        work: its result.
        encoded: uploads and memory of all.
    """
    rule, steps = case.algorithm.rule, case.algorithm.steps
    own = replace(own, given=rule.prepare(own))
    check_close(rule, "prepare", job.given, own.given, some)
    check_close(steps, "run", work, steps.run(own, case.algorithm.locals), some)
    picked = tree_map(lambda v: v[some], work)  # so that the rule is checked by itself
    check_close(rule, "encode", encoded, rule.encode(own, picked), some)


def _check_states(case: _Case, job: Job, own: Any, memory: Any) -> None:
    """Fail if the clients' next states are not of the form of the first ones."""
    for part, member, found in (
        (case.algorithm.steps, "run", own),
        (case.algorithm.rule, "encode", memory),
    ):
        before = {name: job.clients.get(name) for name in found}
        if (difference := describe_difference(before, found)) is not None:
            raise AssertionError(
                f"{label(part)}.{member}: the clients' states differ in form from those of start_clients: {difference}"
            )
    if missing := job.clients.keys() - own.keys() - memory.keys():
        raise AssertionError(
            f"{label(case.algorithm.steps)}.run and {label(case.algorithm.rule)}.encode lose the clients' states "
            f"{sorted(missing)} of start_clients"
        )


def _check_server(algorithm: Algorithm, before: Any, after: Any, member: str) -> None:
    """Fail if a server's state is not nested tensors of the form of the first one."""
    rule = algorithm.rule
    for path, leaf in tree_flatten_with_path(after)[0]:
        if not isinstance(leaf, Tensor):
            raise AssertionError(
                f"{label(rule)}.{member}: the server's state has {keystr(path)} = {leaf!r}; it is made of tensors "
                "in dicts and named tuples, so that files can hold it"
            )
    if (difference := describe_difference(before, after)) is not None:
        raise AssertionError(f"{label(rule)}.{member} changes the server's form: {difference}")


def _check_personal(case: _Case, job: Job) -> None:
    """Fail if new clients' parameters are not as their program has them."""
    algorithm, program = case.algorithm, case.program
    if not program.local_params:
        return
    job = replace(job, clients={})
    member = "personalize (adapt)"
    found = guarded(algorithm.steps, member, lambda: algorithm.personalize(job, steps=2))
    expected = program.init_locals(job.rows(0))
    for name, value in found.items():
        if name in expected and value.shape != expected[name].shape:
            raise AssertionError(
                f"{label(algorithm.steps)}.{member}: {name!r} has shape {tuple(value.shape)}, not "
                f"{tuple(expected[name].shape)}"
            )
    if missing := expected.keys() - found.keys() - set(program.resting):
        raise AssertionError(f"{label(algorithm.steps)}.{member} does not give {sorted(missing)}")
    if not finite(found):
        raise AssertionError(f"{label(algorithm.steps)}.{member}: numbers are not finite")


# -- runs ----------------------------------------------------------------------------------------------


def _check_runs(case: _Case, server: Any) -> None:
    """Fail if chunks of one client, or a stop in between, change a run; ``server`` ends the members' rounds."""
    rounds = case.plan.rounds or 0
    whole = _run(case.start(), rounds)
    chunked = _run(case.start(execution=Execution(compile=False, chunk_size=1)), rounds)
    for run, how in ((whole, "in the engine"), (chunked, "in chunks of one client")):
        if (difference := describe_difference(server, run.server, exact=False)) is not None:
            raise AssertionError(
                f"{case.algorithm}: the server's state {how} differs from that of all clients at once: {difference}"
            )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.safetensors"
        _run(case.start(file), 1)
        resumed = _run(case.start(file), rounds - 1)
    for part in ("server", "clients"):
        one, other = whole.state[part], resumed.state[part]
        if (difference := describe_difference(one, other, exact=True)) is not None:
            raise AssertionError(
                f"{case.algorithm}: a run that is resumed after round 1 ends in another state ({part}, {difference}); "
                "all that lasts must be in the server's state (start, decode) or the clients' (start_clients, run, "
                "encode)"
            )


def _check_left_out(case: _Case) -> None:
    """Fail if an upload that is not finite changes others', or if the rule cannot do without it."""
    rule = case.algorithm.rule
    run = case.start(algorithm=_Infinite(**vars(case.algorithm)))
    first = tree_map(lambda v: v[:1].clone(), run.clients.tensors)
    try:
        _run(run, 1)
    except FloatingPointError as error:
        raise AssertionError(
            f"{label(rule)}.encode or decode: an upload that is not finite is not left out: {error}"
        ) from error
    if int(run.refused.sum()) != 1 or not finite(run.server):
        raise AssertionError(
            f"{label(rule)}: one upload is not finite, {run.refused.tolist()} count as such"
        )
    if describe_difference(first, tree_map(lambda v: v[:1], run.clients.tensors), exact=True):
        raise AssertionError(f"{case.algorithm}: a client that was left out has another state")


@dataclass(frozen=True)
class _Infinite(Algorithm):
    """An algorithm in which the steps of the first client of the federation give numbers that are not finite."""

    def work(self, job: Job) -> Answer:
        job = replace(job, given=self.rule.prepare(job))
        work = self.steps.run(job, self.locals)
        first = job.rows(0).index == 0
        spoilt = tree_map(lambda v: _spoil(v, first), work.found)
        upload, memory = self.rule.encode(job, work._replace(found=spoilt))
        return Answer(upload, _spoil(work.terms, first), work.clients, memory)


def _spoil(value: Tensor, where: Tensor) -> Tensor:
    return torch.where(per_client(where, value), torch.nan, value)


def _check_noise(case: _Case) -> None:
    """Fail if a rule that does not refuse noise cannot bear it, or if memory changes by what is not taken."""
    rule = case.algorithm.rule
    if rule.no_noise:
        return
    run = case.start(privacy=Privacy(clip=1.0, noise=0.01, seed=0))
    before = copy.deepcopy(run.clients.tensors)
    memory = rule.start_clients(
        case.program, run.server, next(case.program.starts(case.federation))
    )
    guarded(
        rule,
        "decode",
        lambda: _run(run, case.plan.rounds or 0),
        " under noise: mend it, or say so in no_noise",
    )
    if not finite(run.server):
        raise AssertionError(f"{label(rule)}.decode under noise gives numbers that are not finite")
    for part in memory:
        if describe_difference(before[part], run.clients.tensors[part], exact=True):
            raise AssertionError(
                f"{label(rule)}.encode changes {part!r} under noise, though the server does not get what it sends: "
                "give it as memory, not as a state of the steps"
            )


def _run(run: Run, rounds: int) -> Run:
    """Return a run after some rounds."""
    for _ in range(rounds):
        step(run)
    return run
