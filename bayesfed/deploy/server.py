"""The server of a fit between machines: the same start, steps and finish as in process, over sites in place of rows.

It has no data. Its program is made from made-up rows of the sites' fields, its clients are names; a round asks each
site that has clients in the cohort and adds up what comes in time. What it has accepted is written before anything else
is asked, so that it may be killed at any point and started again with the same file.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from bayesfed.data.federation import Federation
from bayesfed.deploy.carrier import Carrier
from bayesfed.deploy.messages import (
    Ask,
    Begin,
    Digest,
    Done,
    End,
    Finish,
    Hello,
    MessageError,
    Reply,
    Round,
    Schema,
    Tensors,
    Weigh,
    Weights,
    check_like,
    leaves,
    of_kind,
    packed,
    schema_difference,
    unique,
)
from bayesfed.deploy.plan import Plan
from bayesfed.elbo import digest
from bayesfed.elbo.handlers import on_cpu
from bayesfed.elbo.program import Params, Program
from bayesfed.elbo.terms import client_terms
from bayesfed.engine.cohort import cohort_size
from bayesfed.engine.execution import Execution
from bayesfed.engine.moving import caveat
from bayesfed.engine.run import Round as Report
from bayesfed.engine.run import Run
from bayesfed.engine.states import States
from bayesfed.fitting import begun, concluded, programmed
from bayesfed.output import khat
from bayesfed.output.checkpoint import Placed
from bayesfed.output.correction import correction
from bayesfed.output.draws import of_globals
from bayesfed.output.posterior import Posterior
from bayesfed.rounds import Answer, Asked, answer, ask, take

ROWS = 3
"""Made-up rows of a client."""
MADE_UP = (1.0, 0.5, 0.0, 2.0)
"""What stands in them: the first of these that is no nonsense to the model."""
TOO_LARGE = 1e3
"""By what factor an upload may exceed the median of the sites'."""
M = TypeVar("M")


@dataclass(frozen=True)
class Patience:
    """What the server waits for.

    Attributes:
        sites: names of the sites that take part; a run begins once all have answered.
        seconds: how long a round waits for answers.
        minimum: how many of the sites that a round asks must answer in time; else it is asked again.
        attempts: how often.
        joining: how long a run waits for all sites at its start, in seconds.
    """

    sites: tuple[str, ...]
    seconds: float = 600.0
    minimum: int = 1
    attempts: int = 10
    joining: float = 600.0


@dataclass(frozen=True)
class Member:
    """A site of the run.

    Attributes:
        schema: what it has.
        first: position of its first client among all.
    """

    schema: Schema
    first: int

    @property
    def name(self) -> str:
        """What it is called."""
        return self.schema.site

    def own(self, cohort: Tensor) -> Tensor:
        """Which of a cohort are its clients: bool ``(K,)``."""
        return (cohort >= self.first) & (cohort < self.first + len(self.schema.clients))


@dataclass(frozen=True)
class Globals:
    """What a server has in the end: q(θ). The clients' variables are at their sites.

    Attributes:
        posterior: of no client.
        refused: by site, how many of its answers were refused, and absent, how often it did not answer in time.
    """

    posterior: Posterior
    refused: Mapping[str, int]
    absent: Mapping[str, int]

    @property
    def params(self) -> Params:
        """The guide's global parameters, unconstrained."""
        return self.posterior.params

    def sample(self, num_samples: int = 1000, *, seed: int = 0) -> dict[str, Tensor]:
        """Independent draws of the global sites, ``(S, *event)`` each."""
        return of_globals(self.posterior, num_samples, seed)

    @property
    def caveat(self) -> str:
        """What must be known before its numbers are used."""
        of, mended = self.posterior, self.posterior.correction
        moving = caveat(of.moving, of.rising, len(of.history["elbo"]))
        return moving or khat.caveat(None if mended is None else mended.khat)

    def __repr__(self) -> str:
        of, names = self.posterior, ", ".join(site.name for site in self.posterior.program.globals)
        return (
            f"Globals: {type(of.algorithm).__name__} ({of.program.guide_name}), {len(of.history['elbo']):,} rounds, "
            f"{len(self.refused)} sites, {of.program.clients:,} clients; {names or 'none'}"
            + (self.caveat and f"\n{self.caveat}")
        )


class Deployment:
    """The sites of a run, and where they are reached.

    Args:
        carrier: what carries messages.
        plan: what was agreed on.
        patience: what is waited for.
        say: told what happens, a line at a time.
    """

    def __init__(
        self, carrier: Carrier, plan: Plan, patience: Patience, say: Callable[[str], None]
    ) -> None:
        self.carrier, self.plan, self.patience, self.say = carrier, plan, patience, say
        self.addresses: dict[str, str] = {}
        self.refused = dict.fromkeys(patience.sites, 0)
        self.absent = dict.fromkeys(patience.sites, 0)

    def members(self) -> list[Member]:
        """The sites, in the order of the plan.

        Raises:
            MessageError: their data do not fit together, or clients are called the same.
            TimeoutError: one has not answered.
        """
        schemas = self.found(self.patience.joining)
        ordered = [schemas[name] for name in self.patience.sites]
        for schema in ordered[1:]:
            differs = schema_difference(ordered[0], schema)
            if differs is not None:
                raise MessageError(differs)
        unique(ordered)
        members, first = [], 0
        for schema in ordered:
            members.append(Member(schema, first))
            first += len(schema.clients)
        return members

    def found(self, seconds: float) -> dict[str, Schema]:
        """Where the sites are now.

        Raises:
            TimeoutError: one has not answered in time.
        """
        end, schemas = time.monotonic() + seconds, dict[str, Schema]()
        while True:
            missing = set(self.patience.sites) - schemas.keys()
            if not missing:
                return schemas
            if (left := end - time.monotonic()) <= 0:
                raise TimeoutError(
                    f"site {min(missing)!r} has not answered in {seconds:.0f} s ({len(missing)} of "
                    f"{len(self.patience.sites)} sites have not): is its worker running?"
                )
            unknown = [a for a in self.carrier.reachable() if a not in self._where(schemas)]
            hello = dict.fromkeys(unknown, packed(Hello()))
            for address, payload in self.carrier.exchange(hello, max(1.0, min(left, 60.0))).items():
                try:
                    schema, _ = of_kind(payload, Schema)
                except MessageError as error:
                    self.say(f"{address}: {error}")
                    continue
                if schema.site in self.patience.sites:
                    schemas[schema.site] = schema
                    self.addresses[schema.site] = address
            time.sleep(0.0 if set(self.patience.sites) == schemas.keys() else 0.2)

    def _where(self, schemas: Mapping[str, Schema]) -> set[str]:
        return {self.addresses[name] for name in schemas}

    def told(
        self, requests: Mapping[str, bytes], kind: type[M], run: str
    ) -> dict[str, tuple[M, dict[str, Tensors]]]:
        """What all of these sites answer; who does not is asked again.

        Raises:
            MessageError: a site refuses.
            TimeoutError: one does not answer.
        """
        found: dict[str, tuple[M, dict[str, Tensors]]] = {}
        for _ in range(self.patience.attempts):
            left = {name: payload for name, payload in requests.items() if name not in found}
            if not left:
                break
            for name, payload in self.sent(left).items():
                found[name] = of_kind(payload, kind, run)  # type: ignore[type-var]
        if missing := requests.keys() - found.keys():
            raise TimeoutError(f"site {min(missing)!r} does not answer")
        return found

    def sent(self, requests: Mapping[str, bytes]) -> dict[str, bytes]:
        """What these sites answer in time, by site; those that do not are looked for at other addresses."""
        at = {self.addresses[name]: payload for name, payload in requests.items()}
        replies = self.carrier.exchange(at, self.patience.seconds)
        found = {n: replies[self.addresses[n]] for n in requests if self.addresses[n] in replies}
        if len(found) < len(requests):
            self._look_again(requests.keys() - found.keys())
        return found

    def _look_again(self, names: Any) -> None:
        known = {self.addresses[n] for n in self.addresses if n not in names}
        hello = {a: packed(Hello()) for a in self.carrier.reachable() if a not in known}
        for address, payload in self.carrier.exchange(
            hello, min(10.0, self.patience.seconds)
        ).items():
            try:
                schema, _ = of_kind(payload, Schema)
            except MessageError:
                continue
            if schema.site in names:
                self.addresses[schema.site] = address


def federation_of(schemas: Sequence[Schema], filling: float) -> Federation:
    """All clients with made-up rows."""
    names = tuple(name for schema in schemas for name in schema.clients)
    first = schemas[0]
    fields = {
        name: torch.full(
            (ROWS * len(names), *kind.shape),
            filling if "float" in kind.dtype else 0,
            dtype=getattr(torch, kind.dtype),
        )
        for name, kind in first.fields.items()
    }
    offsets = ROWS * torch.arange(len(names) + 1)
    return Federation(fields, offsets, names, first.client_dim, first.gaps)


def program_of(plan: Plan, schemas: Sequence[Schema]) -> tuple[Program, Federation]:
    """The program of all sites' clients, without a row of theirs.

    Raises:
        ValueError: the model fits no made-up rows.
    """
    first: Exception | None = None
    for filling in MADE_UP:
        federation = federation_of(schemas, filling)
        try:
            program = programmed(plan.model, federation, plan.algorithm, plan.seed)
            few = federation.batch(torch.arange(min(2, len(federation))))
            with torch.no_grad():
                keys = federation.stream_ids[few.index]
                supplied = program.noise(keys, 1, local=False) | program.noise(keys, 1, local=True)
                params = program.init | program.init_locals(few)
                client_terms(program, params, {}, few, supplied, 1)
        except Exception as error:
            first = first or error
            continue
        rows = sum(schema.rows for schema in schemas)
        return replace(program, rows=rows), federation
    assert first is not None
    raise ValueError(
        f"the server cannot make the model's program from the fields alone: {first}"
    ) from first


@on_cpu()
def deployed(
    carrier: Carrier,
    plan: Plan,
    patience: Patience,
    file: str | Path,
    *,
    say: Callable[[str], None] = lambda line: None,
    callbacks: Sequence[Callable[[Report], object]] = (),
) -> Globals:
    """Fit a hierarchical model to clients at their sites.

    Args:
        carrier: what carries messages to the sites.
        plan: what is fitted, and how; the sites must have agreed to the same.
        patience: which sites take part, and how long they are waited for.
        file: keeps the run; where it is there already the run goes on from it.
        say: told what happens, a line at a time.
        callbacks: called with a :class:`~bayesfed.Round` after each.

    Returns:
        q(θ); each site has the posterior of its own clients in its folder.

    Raises:
        ValueError: the sites' data, settings or models differ; the message names the site.
        TimeoutError: a site that is needed does not answer.
        Stopped: see :func:`bayesfed.fit`.
    """
    sites = Deployment(carrier, plan, patience, say)
    members = sites.members()
    schemas = [member.schema for member in members]
    program, federation = program_of(plan, schemas)
    run = begun(
        program,
        federation,
        plan.algorithm,
        cohort_size(plan.clients_per_round, len(federation)),
        rounds=plan.rounds,
        batch_size=plan.batch_size,
        privacy=plan.privacy,
        held_out=None,
        seed=plan.seed,
        execution=Execution(),
        resume=file,
        sites=len(members),
    )
    assert run.file is not None and run.accepted is not None
    first = plan.algorithm.start(program)
    _begin(sites, run, members, first)
    form = _form(run) if run.done < run.rounds else {}
    while run.done < run.rounds:
        report = _round(sites, run, members, form)
        for callback in callbacks:
            callback(report)
    return _finished(sites, run, members)


def _begin(sites: Deployment, run: Run, members: Sequence[Member], first: Any) -> None:
    """Tell all sites of the run, and see that their programs are the server's."""
    assert run.file is not None
    program = run.program
    message = Begin(
        run=run.file.name,
        terms=sites.plan.terms,
        clients=program.clients,
        rows=program.rows,
        cohort=run.size,
    )
    start = program.guide.coordinates() if isinstance(program.guide, Placed) else {}
    payload = packed(message, state=leaves(first), start=start)
    mine = digest.digest(program, run.federation, torch.arange(0))
    found = sites.told({member.name: payload for member in members}, Digest, run.file.name)
    for name, (_, parts) in found.items():
        differs = digest.difference(program, mine, parts.get("program", {}))
        if differs is not None:
            raise MessageError(f"site {name!r} has another model: {differs}")


def _round(sites: Deployment, run: Run, members: Sequence[Member], expected: Tensors) -> Report:
    """One round, asked again until enough sites have answered."""
    assert run.file is not None and run.accepted is not None
    asked = ask(run)
    took_part = {m.name: m for m in members if bool(m.own(asked.cohort).any())}
    for _ in range(sites.patience.attempts):
        number = Round(number=run.done, attempt=secrets.randbits(48))
        requests = {n: _question(run, asked, number, m, members) for n, m in took_part.items()}
        replies = _checked(sites, run, asked, number, took_part, sites.sent(requests), expected)
        if len(replies) >= min(sites.patience.minimum, len(took_part)):
            break
        sites.say(
            f"round {run.done + 1}: {len(replies)} of {len(took_part)} sites have answered, asking again"
        )
    else:
        raise TimeoutError(
            f"round {run.done + 1}: fewer than {sites.patience.minimum} sites have answered, {sites.patience.attempts} "
            "times: start again when they are back"
        )
    whose = torch.zeros(len(asked.cohort), dtype=torch.bool)
    for name in replies:
        whose |= took_part[name].own(asked.cohort)
        run.accepted[members.index(took_part[name])] = torch.tensor([number.number, number.attempt])
    found = list(replies.values())
    total = {
        name: sum((r["total"][name] for r in found[1:]), found[0]["total"][name])
        for name in expected
    }
    sound = torch.cat([r["sound"]["clients"] for r in found])
    said = torch.stack([r["said"]["terms"] for r in found]).sum(0)
    return take(run, replace(asked, cohort=asked.cohort[whose]), Answer(total, sound, said))


def _question(
    run: Run, asked: Asked, number: Round, member: Member, members: Sequence[Member]
) -> bytes:
    assert run.file is not None
    message = Ask(
        run=run.file.name,
        round=number,
        accepted=_accepted(run, members.index(member)),
        rate=asked.rate,
        clip=asked.clip,
        noisy=asked.noisy,
    )
    own = asked.cohort[member.own(asked.cohort)] - member.first
    return packed(message, message=asked.message, cohort={"clients": own})


def _accepted(run: Run, position: int) -> Round | None:
    assert run.accepted is not None
    number, attempt = run.accepted[position].tolist()
    return None if number < 0 else Round(number=number, attempt=attempt)


def _checked(
    sites: Deployment,
    run: Run,
    asked: Asked,
    number: Round,
    members: Mapping[str, Member],
    payloads: Mapping[str, bytes],
    expected: Tensors,
) -> dict[str, dict[str, Tensors]]:
    """The answers that count, by site in the order of the members; others are counted, and told of."""
    assert run.file is not None
    found: dict[str, dict[str, Tensors]] = {}
    for name, member in members.items():
        if name not in payloads:
            sites.absent[name] += 1
            sites.say(f"round {run.done + 1}: site {name!r} has not answered in time")
            continue
        try:
            reply, parts = of_kind(payloads[name], Reply, run.file.name)
            if reply.round != number:
                raise MessageError(
                    f"an answer to round {reply.round.number} came in place of {number.number}"
                )
            clients = int(member.own(asked.cohort).sum())
            _check_reply(parts, expected, clients)
            if (
                run.privacy is not None
                and (length := _norm(run, parts["total"])) > 1.001 * clients * asked.clip
            ):
                raise MessageError(
                    f"its upload is {length:.3g} long, {clients} clients' can be {clients * asked.clip:.3g}"
                )
        except MessageError as error:
            sites.refused[name] += 1
            sites.say(f"round {run.done + 1}: refused what site {name!r} sent: {error}")
            continue
        found[name] = parts
    lengths = {
        n: float(_flat(parts["total"]).norm()) / int(members[n].own(asked.cohort).sum())
        for n, parts in found.items()
    }
    if len(lengths) > 2:
        middle = float(torch.tensor(list(lengths.values())).median())
        for name, length in lengths.items():
            if length > TOO_LARGE * middle:
                del found[name]
                sites.refused[name] += 1
                sites.say(
                    f"round {run.done + 1}: refused what site {name!r} sent: it is {length:.3g} long a client, the "
                    f"sites' median is {middle:.3g}"
                )
    return found


def _check_reply(parts: Mapping[str, Tensors], expected: Tensors, clients: int) -> None:
    """Fail on an answer that has not the form of one, or numbers that are none."""
    check_like("its upload", parts.get("total", {}), expected)
    form = {"clients": torch.zeros(clients, dtype=torch.bool)}
    check_like("its clients", parts.get("sound", {}), form)
    check_like("its terms", parts.get("said", {}), {"terms": torch.zeros(3, dtype=torch.float64)})
    for name, value in {**parts["total"], **parts["said"]}.items():
        if not bool(value.isfinite().all()):
            raise MessageError(f"{name!r} is not finite")


def _flat(upload: Tensors) -> Tensor:
    return torch.cat([torch.zeros(1), *(value.flatten().float() for value in upload.values())])


def _norm(run: Run, upload: Tensors) -> float:
    order = 1 if run.privacy is not None and run.privacy.mechanism == "laplace" else 2
    return float(torch.linalg.vector_norm(_flat(upload), order))


def _form(run: Run) -> Tensors:
    """What an upload looks like: that of a client with made-up rows."""
    kept = {
        part: {name: value.clone() for name, value in found.items()}
        for part, found in run.clients.tensors.items()
    }
    alone = replace(run, clients=States(1), known=run.known.clone())
    alone.clients.begin(torch.zeros(1, dtype=torch.int64), kept)
    return answer(alone, replace(ask(run), cohort=torch.zeros(1, dtype=torch.int64))).total


def _finished(sites: Deployment, run: Run, members: Sequence[Member]) -> Globals:
    """The sites make their posteriors, and weigh the server's draws of θ."""
    assert run.file is not None
    name = run.file.name
    posterior = concluded(run, {})
    history = {n: v for n, v in posterior.history.items()}
    state = leaves(run.server)
    requests = {}
    for position, member in enumerate(members):
        message = Finish(
            run=name,
            accepted=_accepted(run, position),
            done=run.done,
            epsilon=posterior.epsilon,
            moving=None if posterior.moving is None else dict(posterior.moving),
            rising=posterior.rising,
            settled=posterior.settled,
        )
        requests[member.name] = packed(message, state=state, history=history)
    sites.told(requests, Done, name)

    def weigh(of: Posterior, theta: Params, count: int, key: Tensor) -> Tensor:
        payload = packed(Weigh(run=name), theta=theta, key={"key": key})
        found = sites.told({member.name: payload for member in members}, Weights, name)
        form = {"terms": torch.zeros(count, dtype=torch.float64)}
        for _, parts in found.values():
            check_like("the weights", parts.get("terms", {}), form)
        return torch.stack([parts["terms"]["terms"] for _, parts in found.values()]).sum(0)

    if run.algorithm.corrected:
        posterior = replace(posterior, correction=correction(posterior, weigh))
    mended = posterior.correction
    theta = {} if mended is None else mended.theta
    payload = packed(End(run=name, khat=None if mended is None else mended.khat), theta=theta)
    sites.told({member.name: payload for member in members}, Done, name)
    return Globals(posterior, sites.refused, sites.absent)
