"""The server of a fit between machines: the same start, steps and finish as in process, but the rows are elsewhere.

The server has no data. It makes its program from made-up rows of the institutions' fields, and its clients are names;
a round asks each institution with clients in the cohort, and adds up the answers that come in time. What it accepts is
stored before anything else is asked, so that it may be killed at any point and restarted with the same file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from bayesfed.data.plural import plural
from bayesfed.deploy import secure
from bayesfed.deploy.agree import agree, coded_schemas
from bayesfed.deploy.averages import compute_effects
from bayesfed.deploy.beginning import Beginning
from bayesfed.deploy.collect import Collector, Stale
from bayesfed.deploy.combine import Answers, combine
from bayesfed.deploy.evaluations import Evaluations
from bayesfed.deploy.global_posterior import GlobalPosterior
from bayesfed.deploy.institutions import Institution, Institutions, Overdue, Patience, run_name
from bayesfed.deploy.leave_one_out import check_leave_one_out, compute_leave_one_out
from bayesfed.deploy.messages import (
    Ask,
    End,
    Finish,
    MessageError,
    RoundId,
    pack,
)
from bayesfed.deploy.plan import DeploymentPlan
from bayesfed.deploy.revealed import fit_revealed
from bayesfed.deploy.schemas import check_unique, schema_difference
from bayesfed.deploy.secure_round import (
    load_stored,
    stored_path,
    unmask_round,
)
from bayesfed.deploy.server_chains import check_chains, draw_by_chains
from bayesfed.deploy.server_program import UploadForms, build_server_program
from bayesfed.deploy.sums import close, requests_after_fit
from bayesfed.deploy.transport import Carrier
from bayesfed.effects.agreed import check_effect
from bayesfed.elbo.handlers import on_cpu
from bayesfed.engine.files import lock
from bayesfed.engine.parts import flatten_state
from bayesfed.engine.rounds import Answer, Question, Sums, add_to_totals, ask, update
from bayesfed.engine.run import Round as Report
from bayesfed.engine.run import Run
from bayesfed.fitting import make_posterior, prepare_run, warn_of_flaws
from bayesfed.output.correction import correct
from bayesfed.output.effort import probe, probed_effort
from bayesfed.output.fitted import CorrectionResult
from bayesfed.output.posterior import Posterior


@on_cpu()
def run_server(
    carrier: Carrier,
    plan: DeploymentPlan,
    patience: Patience,
    file: str | Path,
    *,
    report: Callable[[str], None] = lambda line: None,
    callbacks: Sequence[Callable[[Report], object]] = (),
) -> GlobalPosterior:
    """Fit a hierarchical model to clients at their institutions.

    Args:
        carrier: the transport of messages to the nodes.
        plan: the model and how it is fitted; the institutions must have agreed to the same.
        patience: the institutions that take part, and how long the server waits for them.
        file: stores the run; if it exists the run goes on from it.
        report: called with a line of text for each event.
        callbacks: called with a :class:`~bayesfed.Round` after each round.

    Returns:
        q(θ); each node has the posterior of its own clients in its folder.

    Raises:
        ValueError: the institutions' data, settings or models differ; the message names the institution.
        TimeoutError: an institution that is needed does not answer.
        BlockingIOError: another process has opened this run.
        Stopped: see :func:`bayesfed.fit`.
    """
    path = Path(file)
    with lock(path.with_name(f".{path.name}.lock"), f"the run of {path}"):
        fit = _fit if plan.reveal is None else fit_revealed
        return fit(Institutions(carrier, plan, patience, report), path, callbacks)


def _fit(
    institutions: Institutions, file: Path, callbacks: Sequence[Callable[[Report], object]]
) -> GlobalPosterior:
    members = institutions.gather()
    if institutions.plan.formula is not None:
        institutions.plan, members = agree(institutions, members, file)
    plan, schemas = institutions.plan, [member.schema for member in members]
    program, federation = build_server_program(plan, schemas)
    for agreed in plan.effects:
        check_effect(plan.model, federation, agreed)
    if plan.leave_one_out is not None:
        check_leave_one_out(program, plan.leave_one_out)
    if plan.chains:
        check_chains(program)
    run = prepare_run(plan, program, federation, file, institutions=len(members))
    coordinator = Coordinator(institutions, run, members)
    if not coordinator.beginning.travels:
        coordinator.beginning.begin_at(institutions.present)
    while True:
        while run.done < run.rounds:
            coordinator.join()
            report = coordinator.run_round()
            for callback in callbacks:
                callback(report)
        coordinator.join()
        posterior, good = coordinator.finish()
        if good or not run.stopping.provisional:
            return coordinator.end(posterior)
        institutions.drop_queued()
        run.stopping.withdraw()


@dataclass
class Coordinator:
    """The server's dialogue with the institutions of a run.

    Attributes:
        institutions: where they are, and their counts.
        run: the server's run.
        members: the institutions in the order of the plan, those that may join later included.
        beginning: the message that begins the run, and where it has started.
        forms: tensors like the institutions' uploads.
    """

    institutions: Institutions
    run: Run
    members: Sequence[Institution]
    beginning: Beginning = field(init=False)
    forms: UploadForms = field(init=False)

    def __post_init__(self) -> None:
        self.forms = UploadForms(self.run)
        self.beginning = Beginning(self.institutions, self.run)

    def join(self) -> None:
        """Admit institutions that were expected and have appeared; one with other data is reported and left out."""
        institutions = self.institutions
        for name, schema in institutions.newcomers().items():
            expected = next(m.schema for m in self.members if m.name == name)
            others = [m.schema for m in self._present()]
            try:
                if (len(schema.clients), schema.rows) != (len(expected.clients), expected.rows):
                    raise MessageError(
                        f"it has {plural(len(schema.clients), 'client')} of {plural(schema.rows, 'row')} in all, "
                        f"{len(expected.clients)} of {expected.rows} were expected"
                    )
                if (formula := self.beginning.formula) is not None:
                    agreement, called = formula.agreement, run_name(self.run)
                    schema = coded_schemas(institutions, agreement, [name], called)[name]
                differs = schema_difference(others[0], schema)
                if differs is not None:
                    raise MessageError(differs)
                check_unique([*others, schema])
                self.beginning.begin_at([name])
            except (MessageError, TimeoutError) as error:
                institutions.refused[name] += 1
                self._report(f"institution {name!r} cannot join: {error}")
                continue
            institutions.present.add(name)
            self._report(f"institution {name!r} has joined")

    def run_round(self) -> Report:
        """Run one round: of the institutions that answer in time, and of stale answers to earlier rounds."""
        run, plan, asked = self.run, self.institutions.plan, self._question()
        assert run.accepted is not None
        own = {m.name: m for m in self._present() if bool(m.owns(asked.cohort).any())}
        collector = Collector(self.institutions, run, asked, self.forms.of(asked))
        found, stale = self._collect(collector, own)
        whose = torch.zeros(len(asked.cohort), dtype=torch.bool)
        for name in found.replies:
            whose |= own[name].owns(asked.cohort)
        if plan.secure:
            total, elbo = unmask_round(self.institutions, run, asked, found, collector.form)
        else:
            total, elbo = combine(list(found.replies.values()), plan.algorithm.rule)
        sound = torch.cat([parts["sound"]["clients"] for parts in found.replies.values()])
        total, stale = collector.add_stale(total, int(sound.sum()), stale)
        for _, parts in stale.values():
            add_to_totals(run, Sums(*parts["elbo"]["terms"].tolist()))
        accepted = dict.fromkeys(found.replies, found.round) | {n: r for n, (r, _) in stale.items()}
        for position, member in enumerate(self.members):
            if member.name in accepted:
                taken = accepted[member.name]
                run.accepted[position] = torch.tensor([taken.number, taken.attempt])
        answer = Answer(total, sound, elbo, noised=plan.honest is not None)
        report = update(run, replace(asked, cohort=asked.cohort[whose]), answer)
        stored_path(run).unlink(missing_ok=True)
        return report

    def _question(self) -> Question:
        """Return the question of the next round; a secret cohort is drawn once, whichever process asks."""
        asked = ask(self.run)
        if not asked.noisy:
            return asked
        remember, name = self.institutions.carrier.remember, f"cohort {self.run.done}"
        return replace(asked, cohort=torch.tensor(remember(name, asked.cohort.tolist)))

    def _collect(
        self, collector: Collector, own: Mapping[str, Institution]
    ) -> tuple[Answers, Stale]:
        """Ask institutions until enough of them answer; return their answers, and stale ones to earlier rounds.

        Raises:
            TimeoutError: too few answer.
        """
        institutions, run = self.institutions, self.run
        plan, patience, cohort = institutions.plan, institutions.patience, collector.asked.cohort
        fewest = max(min(patience.minimum, len(own)), secure.LEAST if plan.secure else 0)
        if plan.secure and (found := load_stored(run)) is not None:
            return found, {}
        wanted, stale = institutions.available(own, run.done, fewest), Stale()
        for number in range(patience.attempts):
            attempt = institutions.new_number(f"round {run.done}, attempt {number}")
            round_id = RoundId(number=run.done, attempt=attempt)
            roster = {name: institutions.keys[name] for name in wanted} if plan.secure else None
            requests = {
                name: self._request(collector.asked, round_id, member, roster)
                for name, member in wanted.items()
            }
            for name in wanted:  # an earlier answer of theirs counts no longer
                institutions.overdue.pop(name, None)
                stale.pop(name, None)
            payloads = self.beginning.send_round(requests, patience.wait)
            if patience.max_staleness:
                institutions.overdue |= {
                    name: Overdue(round_id, int(member.owns(cohort).sum()))
                    for name, member in wanted.items()
                    if name not in payloads
                }
            answers = collector.check(round_id, wanted, payloads)
            replies, stale = answers.replies, stale | collector.check_stale(answers)
            if len(replies) >= fewest and (not plan.secure or len(replies) == len(wanted)):
                return answers, stale
            if plan.secure:  # there is no sum without those that are missing
                wanted = {n: own[n] for n in replies} if len(replies) >= fewest else own
            self._report(
                f"{len(replies)} of {plural(len(own), 'institution has', 'institutions have')} answered, asking again"
            )
            institutions.await_return(own.keys() - replies.keys())
        raise TimeoutError(
            f"round {run.done + 1}: fewer than {plural(fewest, 'institution')} have answered, {patience.attempts} "
            "times: start again when they are back"
        )

    def _request(
        self, asked: Question, round_id: RoundId, member: Institution, roster: dict[str, str] | None
    ) -> bytes:
        """Return a round's message to an institution."""
        message = Ask(
            run=run_name(self.run),
            round=round_id,
            accepted=self._accepted(member),
            rate=asked.rate,
            clip=asked.clip,
            noisy=asked.noisy,
            roster=roster,
        )
        own = asked.cohort[member.owns(asked.cohort)] - member.first
        return pack(message, message=asked.message, cohort={"clients": own})

    def _accepted(self, member: Institution) -> RoundId | None:
        """Return the round in which an answer of an institution was last accepted."""
        assert self.run.accepted is not None
        number, attempt = self.run.accepted[self.members.index(member)].tolist()
        return None if number < 0 else RoundId(number=number, attempt=attempt)

    def finish(self) -> tuple[Posterior, bool]:
        """Let the nodes make their posteriors and evaluate the server's draws of θ, in one exchange at first.

        Returns:
            The server's posterior, corrected if the importance weights show that it can be; and whether the run is
            done according to them.
        """
        run, requests = self.run, {}
        evaluate = Evaluations(self.institutions, run)
        posterior = make_posterior(run, {})
        warn_of_flaws(run, posterior)
        for name in sorted(self.institutions.refused.keys() - self.institutions.present):
            self.institutions.report(
                f"institution {name!r} has not joined: its clients count as if they were like the others"
            )
        for member in self._present():
            message = Finish(
                run=run_name(run),
                accepted=self._accepted(member),
                done=run.done,
                epsilon=posterior.epsilon,
                moving=None if posterior.moving is None else dict(posterior.moving),
                rising=posterior.rising,
                converged=posterior.converged,
            )
            requests[member.name] = pack(
                message, state=flatten_state(run.server), history=dict(posterior.history)
            )
        self.institutions.queue(requests)
        found = CorrectionResult(reliable=True)
        if run.plan.algorithm.corrected:
            early = run.stopping.early
            probed = None
            if early and probed_effort(posterior, elsewhere=True) is not None:
                probed = probe(posterior, evaluate)
            if probed is None or run.stopping.is_worth_correcting(*probed):
                found = correct(posterior, evaluate, probed=probed)
            else:
                found = CorrectionResult(reliable=False)
        correctable = found.reliable or not found.attempted
        posterior = replace(posterior, correction=found.correction, correctable=correctable)
        return posterior, found.confirms(run.stopping.early)

    def end(self, posterior: Posterior) -> GlobalPosterior:
        """Draw θ by chains if the plan has them, and send the draws to the nodes; return the result."""
        institutions, name = self.institutions, run_name(self.run)
        posterior = draw_by_chains(institutions, self.run, posterior)
        mended = posterior.correction
        payload = pack(End(run=name, khat=None), theta={})
        if mended is not None:
            same = {n: getattr(mended, n) for n in ("khat", "chains", "rhat", "ess")}
            message = End(run=name, closely=mended.laplace, **same)
            payload = pack(message, theta=mended.theta)
        institutions.queue(dict.fromkeys(institutions.present, payload))
        institutions.prefetch(requests_after_fit(institutions.plan, name))
        found = GlobalPosterior(posterior, institutions.refused, institutions.absent)
        effects = compute_effects(institutions, name, found)
        comparison = compute_leave_one_out(institutions, name, found)
        close(institutions, name)
        counts = {n: getattr(institutions, n) for n in ("exchanges", "chain_exchanges")}
        return replace(found, effects=effects, comparison=comparison, **counts)

    def _present(self) -> list[Institution]:
        """Return the institutions that take part already, in the order of the plan."""
        return [member for member in self.members if member.name in self.institutions.present]

    def _report(self, event: str) -> None:
        self.institutions.report(f"round {self.run.done + 1}: {event}")
