"""The server of a fit between machines: the same start, steps and finish as in process, over sites in place of rows.

It has no data. Its program is made from made-up rows of the sites' fields, its clients are names; a round asks each
site that has clients in the cohort and adds up what comes in time. What it has accepted is written before anything else
is asked, so that it may be killed at any point and started again with the same file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from bayesfed.checks.program_fingerprint import describe_program_change, program_fingerprint
from bayesfed.deploy import secure
from bayesfed.deploy.collect import (
    Answered,
    Late,
    belated,
    checked,
    kept,
    opened,
    pending,
    summed,
    unsealed,
    with_late,
    words_like,
)
from bayesfed.deploy.institutions import Due, Member, Patience, Sites
from bayesfed.deploy.messages import (
    Ask,
    Begin,
    Digest,
    Done,
    End,
    Finish,
    MessageError,
    Round,
    Tensors,
    Weigh,
    Weights,
    asked_of_all,
    check_like,
    leaves,
    packed,
    schema_difference,
    unique,
)
from bayesfed.deploy.plan import DeploymentPlan
from bayesfed.deploy.server_program import form_of, program_of
from bayesfed.deploy.transport import Carrier
from bayesfed.elbo.handlers import on_cpu
from bayesfed.elbo.program import Params
from bayesfed.engine.files import lock
from bayesfed.engine.rounds import Answer, Question, ask, update
from bayesfed.engine.run import Round as Report
from bayesfed.engine.run import Run
from bayesfed.engine.stopping.drift import caveat
from bayesfed.fitting import make_posterior, prepare_run, warn_of_flaws
from bayesfed.output import khat
from bayesfed.output.checkpoint import Placed
from bayesfed.output.correction import CorrectionResult, correct
from bayesfed.output.draws import draw_globals
from bayesfed.output.fitted import Fitted
from bayesfed.output.posterior import Posterior


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
        return draw_globals(self.posterior, num_samples, seed)

    @property
    def caveat(self) -> str:
        """What must be known before its numbers are used."""
        of, mended = self.posterior, self.posterior.correction
        moving = caveat(of.moving, of.rising, len(of.history["elbo"]))
        return moving or khat.caveat(None if mended is None else mended.khat)

    def __repr__(self) -> str:
        of, names = self.posterior, ", ".join(site.name for site in self.posterior.program.globals)
        return (
            f"Globals: {of.algorithm} ({of.program.guide_name}), {len(of.history['elbo']):,} rounds, "
            f"{len(self.refused)} sites, {of.program.clients:,} clients; {names or 'none'}"
            + (self.caveat and f"\n{self.caveat}")
        )


@on_cpu()
def deployed(
    carrier: Carrier,
    plan: DeploymentPlan,
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
        BlockingIOError: another process is at this run.
        Stopped: see :func:`bayesfed.fit`.
    """
    path = Path(file)
    with lock(path.with_name(f".{path.name}.lock"), f"the run of {path}"):
        return _deployed(Sites(carrier, plan, patience, say), path, callbacks)


def _deployed(sites: Sites, file: Path, callbacks: Sequence[Callable[[Report], object]]) -> Globals:
    plan = sites.plan
    members = sites.members()
    schemas = [member.schema for member in members]
    program, federation = program_of(plan, schemas)
    run = prepare_run(plan, program, federation, file, institutions=len(members))
    assert run.file is not None and run.accepted is not None
    first = _beginning(sites, run)
    _begin(sites, run, first, [m for m in members if m.name in sites.there])
    while True:
        while run.done < run.rounds:
            _join(sites, run, first, members)
            report = _round(sites, run, members)
            for callback in callbacks:
                callback(report)
        _join(sites, run, first, members)
        posterior, good = _finished(sites, run, members)
        if good or not run.stopping.provisional:
            return _ended(sites, run, posterior)
        run.stopping.withdraw()


def _beginning(sites: Sites, run: Run) -> bytes:
    """What every site is told first of the run."""
    assert run.file is not None
    program = run.program
    message = Begin(
        run=run.file.name,
        terms=sites.plan.description,
        clients=program.clients,
        rows=program.rows,
        cohort=run.cohort_size,
    )
    start = program.guide.coordinates() if isinstance(program.guide, Placed) else {}
    return packed(message, state=leaves(run.plan.algorithm.start(program)), start=start)


def _begin(sites: Sites, run: Run, payload: bytes, members: Sequence[Member]) -> None:
    """Tell sites of the run, and see that their programs are the server's."""
    assert run.file is not None
    program = run.program
    mine = program_fingerprint(program, run.federation, torch.arange(0))
    found = sites.told({member.name: payload for member in members}, Digest, run.file.name)
    keys = {name: said.key for name, (said, _) in found.items() if said.key is not None}
    if sites.plan.secure:
        for name in found.keys() - keys.keys():
            raise MessageError(f"site {name!r} has no key for secure sums")
        secure.check_keys(sites.keys | keys)
    sites.keys |= keys
    for name, (_, parts) in found.items():
        differs = describe_program_change(program, mine, parts.get("program", {}))
        if differs is not None:
            raise MessageError(f"site {name!r} has another model: {differs}")


def _join(sites: Sites, run: Run, first: bytes, members: Sequence[Member]) -> None:
    """Take in sites that were expected and are there now; who is another than was expected is told of, and left out."""
    for name, schema in sites.arrived().items():
        member = next(m for m in members if m.name == name)
        brings, others = member.schema, [m.schema for m in members if m.name in sites.there]
        try:
            if (len(schema.clients), schema.rows) != (len(brings.clients), brings.rows):
                raise MessageError(
                    f"it has {len(schema.clients)} clients of {schema.rows} rows in all, {len(brings.clients)} of "
                    f"{brings.rows} were expected"
                )
            differs = schema_difference(others[0], schema)
            if differs is not None:
                raise MessageError(differs)
            unique([*others, schema])
            _begin(sites, run, first, [member])
        except (MessageError, TimeoutError) as error:
            sites.refused[name] += 1
            sites.say(f"round {run.done + 1}: site {name!r} cannot join: {error}")
            continue
        sites.there.add(name)
        sites.say(f"round {run.done + 1}: site {name!r} has joined")


def _round(sites: Sites, run: Run, members: Sequence[Member]) -> Report:
    """One round, of the sites that answer in time, and of late answers to those before."""
    assert run.accepted is not None
    asked, plan = ask(run), sites.plan
    own = {m.name: m for m in members if m.name in sites.there and bool(m.own(asked.cohort).any())}
    form = form_of(run, asked)
    found, late = _answers(sites, run, asked, own, members, form)
    whose = torch.zeros(len(asked.cohort), dtype=torch.bool)
    for name in found.replies:
        whose |= own[name].own(asked.cohort)
    if plan.secure:
        total, said = unsealed(sites, run, asked, found, form)
    else:
        total, said = summed(list(found.replies.values()), plan.median)
    sound = torch.cat([parts["sound"]["clients"] for parts in found.replies.values()])
    total, late = with_late(sites, run, asked, total, int(sound.sum()), late)
    for _, parts in late.values():
        run.term_totals += parts["said"]["terms"][1:]
    accepted = dict.fromkeys(found.replies, found.round) | {n: r for n, (r, _) in late.items()}
    for position, member in enumerate(members):
        if member.name in accepted:
            taken = accepted[member.name]
            run.accepted[position] = torch.tensor([taken.number, taken.attempt])
    answer = Answer(total, sound, said, noised=plan.honest is not None)
    report = update(run, replace(asked, cohort=asked.cohort[whose]), answer)
    pending(run).unlink(missing_ok=True)
    return report


def _answers(
    sites: Sites,
    run: Run,
    asked: Question,
    own: Mapping[str, Member],
    members: Sequence[Member],
    form: Tensors,
) -> tuple[Answered, Late]:
    """What enough of these sites answer, asked until they do; and what others have answered to earlier rounds.

    Raises:
        TimeoutError: too few do.
    """
    plan, patience = sites.plan, sites.patience
    fewest = min(patience.minimum, len(own))
    fewest = max(fewest, secure.LEAST) if plan.secure else fewest
    if plan.secure and (found := kept(run)) is not None:
        return found, {}
    wanted, late = sites.idle(own, run.done, fewest), Late()
    for _ in range(patience.attempts):
        number = Round(number=run.done, attempt=time.time_ns())
        roster = {name: sites.keys[name] for name in wanted} if plan.secure else None
        requests = {n: _question(run, asked, number, m, members, roster) for n, m in wanted.items()}
        for name in wanted:  # what they have answered before is forgotten
            sites.due.pop(name, None)
            late.pop(name, None)
        payloads = sites.sent(requests, patience.wait)
        if patience.late:
            missing = [member for name, member in wanted.items() if name not in payloads]
            clients = {m.name: int(m.own(asked.cohort).sum()) for m in missing}
            sites.due |= {name: Due(number, count) for name, count in clients.items()}
        answers = checked(sites, run, asked, number, wanted, payloads, form)
        replies, late = answers.replies, late | belated(sites, run, form, answers)
        if len(replies) >= fewest and (not plan.secure or len(replies) == len(wanted)):
            return answers, late
        if plan.secure:  # there is no sum without those that are missing
            wanted = {n: own[n] for n in replies} if len(replies) >= fewest else own
        sites.say(
            f"round {run.done + 1}: {len(replies)} of {len(own)} sites have answered, asking again"
        )
        sites.await_back(own.keys() - replies.keys())
    raise TimeoutError(
        f"round {run.done + 1}: fewer than {fewest} sites have answered, {patience.attempts} times: start again when "
        "they are back"
    )


def _question(
    run: Run,
    asked: Question,
    number: Round,
    member: Member,
    members: Sequence[Member],
    roster: dict[str, str] | None,
) -> bytes:
    assert run.file is not None
    message = Ask(
        run=run.file.name,
        round=number,
        accepted=_accepted(run, members.index(member)),
        rate=asked.rate,
        clip=asked.clip,
        noisy=asked.noisy,
        roster=roster,
    )
    own = asked.cohort[member.own(asked.cohort)] - member.first
    return packed(message, message=asked.message, cohort={"clients": own})


def _accepted(run: Run, position: int) -> Round | None:
    assert run.accepted is not None
    number, attempt = run.accepted[position].tolist()
    return None if number < 0 else Round(number=number, attempt=attempt)


def _finished(sites: Sites, run: Run, members: Sequence[Member]) -> tuple[Posterior, bool]:
    """The sites make their posteriors, and weigh the server's draws of θ; whether these say that the run is done."""
    assert run.file is not None
    name = run.file.name
    posterior = make_posterior(run, {})
    warn_of_flaws(run, posterior)
    history = {n: v for n, v in posterior.history.items()}
    state = leaves(run.server)
    requests = {}
    for position, member in enumerate(members):
        if member.name not in sites.there:
            sites.say(
                f"site {member.name!r} has not joined: its clients count as if they were like the others"
            )
            continue
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

    def weigh(of: Fitted, theta: Params, count: int, key: Tensor, closely: bool) -> Tensor:
        sent, message = {**theta, "": key}, Weigh(run=name, closely=closely)
        if sites.plan.secure:
            number = Round(number=time.time_ns(), attempt=0)  # a sum of its own, after all rounds
            message = message.model_copy(update={"round": number, "roster": dict(sites.keys)})
        payload = packed(message, theta=theta, key={"key": key})
        found = sites.told(dict.fromkeys(requests, payload), Weights, name)
        form = {"terms": torch.zeros(count, dtype=torch.float64)}
        part = "masked" if sites.plan.secure else "terms"
        expected = {n: words_like(v) for n, v in form.items()} if sites.plan.secure else form
        for site, (_, parts) in found.items():
            check_like(f"site {site!r}: the weights", parts.get(part, {}), expected)
        if message.round is not None:
            words = {site: parts[part] for site, (_, parts) in found.items()}
            return opened(sites, name, message.round, asked_of_all(message, sent), words)["terms"]
        return torch.stack([parts[part]["terms"] for _, parts in found.values()]).sum(0)

    corrected = run.plan.algorithm.corrected
    found = correct(posterior, weigh) if corrected else CorrectionResult(reliable=True)
    return replace(posterior, correction=found.correction), found.reliable


def _ended(sites: Sites, run: Run, posterior: Posterior) -> Globals:
    """The sites are told what stands for q(θ)."""
    assert run.file is not None
    name, mended = run.file.name, posterior.correction
    end = End(run=name, khat=None)
    if mended is not None:
        end = End(run=name, khat=mended.khat, closely=mended.laplace)
    payload = packed(end, theta={} if mended is None else mended.theta)
    sites.told(dict.fromkeys(sites.there, payload), Done, name)
    return Globals(posterior, sites.refused, sites.absent)
