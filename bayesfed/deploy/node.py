"""The process at an institution: it holds its clients' rows, local variables and keys, and answers the server.

A client's state changes only when the server says that it has accepted the answer that goes with the change. Until
then the answer and the new states wait in a separate file, so that the same request gets the same bytes, even from a
process that has been restarted:

    runs/<run>/begin.message           the server's Begin; finish.message its Finish, end.message its End
    runs/<run>/accepted.safetensors    the clients' states after the last accepted answer
    runs/<run>/answered.safetensors    the states after the last answer, and that answer
    runs/<run>/posterior.safetensors   the result; held_out.safetensors, that of clients who took no part
    runs/<run>/chains.safetensors      its clients' variables in chains, deleted at the end
    runs/<run>/run.key                 secure sums: the run's key, deleted at the end
    runs/<run>/record.json             what was masked last in a round; record_after.json: after the rounds
    agreements/<run>/                  key and record of the sums of a formula's agreement
    identity.key                       secure sums: the institution's key for all runs
    log.jsonl                          what left the institution, message by message

The server learns that there is a mistake in an institution's data, but not what it is: that is in the node's log.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bayesfed.data.federation import Federation
from bayesfed.deploy import secure
from bayesfed.deploy.bundles import join, split
from bayesfed.deploy.contents import broadcast_digest, check_like, read_state
from bayesfed.deploy.fixed_point import finite_log_densities
from bayesfed.deploy.masking import Masking, load_or_make_key, sum_id
from bayesfed.deploy.messages import (
    Ask,
    Average,
    Averages,
    Begin,
    ChainSums,
    Close,
    Digest,
    Done,
    End,
    Evaluate,
    Finish,
    Hello,
    LeaveOut,
    LeftOut,
    LogDensities,
    MessageError,
    MoveChains,
    Open,
    Refusal,
    Reply,
    Seal,
    Tensors,
    pack,
    summarise,
    unpack,
    unpack_as,
)
from bayesfed.deploy.node_agreement import Handler, NodeAgreement
from bayesfed.deploy.node_clients import NodeClients
from bayesfed.deploy.node_moments import Consent, NodeMoments
from bayesfed.deploy.node_privacy import add_share, check_privacy
from bayesfed.deploy.node_run import (
    BEGIN,
    END,
    FINISH,
    POSTERIOR,
    LastAnswer,
    NodeRun,
    copy_states,
    describe,
)
from bayesfed.deploy.plan import DeploymentPlan, difference
from bayesfed.elbo.handlers import on_cpu
from bayesfed.engine.execution import Execution
from bayesfed.engine.files import atomically
from bayesfed.engine.parts import flat
from bayesfed.engine.resume import initialise
from bayesfed.engine.rounds import Question, answer
from bayesfed.engine.states import States
from bayesfed.fitting import start_run
from bayesfed.output.checkpoint import Placed

if TYPE_CHECKING:
    import pandas as pd


@dataclass
class Node:
    """A resident process at an institution.

    Attributes:
        name: the institution's name.
        federation: its clients; of a formula, client's name to rows, which are coded when all have agreed how.
        plan: the fit that it has agreed to.
        folder: where it stores what must not be lost.
        execution: how it runs.
        pinned: for secure sums, the institutions that it will be summed with, and their public keys.
        held: the names of its clients that take no part in the rounds, and get their local variables after the fit.
        consent: which moments of its clients may leave; by default none.

    Example:
        >>> import tempfile, bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> from bayesfed.deploy.messages import Hello, pack, unpack
        >>> from bayesfed.deploy.plan import DeploymentPlan
        >>> from bayesfed.deploy.node import Node
        >>> plan, schools = DeploymentPlan(models.eight_schools, bf.SFVI()), datasets.eight_schools()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     node = Node("north", schools.select(schools.names[:2]), plan, folder)
        ...     schema, _ = unpack(node.handle(pack(Hello())))
        >>> schema.institution, schema.clients, schema.fields["y"].shape
        ('north', ['A', 'B'], [])
    """

    name: str
    federation: Federation | Mapping[str, pd.DataFrame]
    plan: DeploymentPlan
    folder: str | Path
    execution: Execution = field(default_factory=Execution)
    pinned: Mapping[str, bytes] = field(default_factory=dict)
    held: Sequence[str] = ()
    consent: Consent = field(default_factory=Consent)
    _runs: dict[str, NodeRun] = field(default_factory=dict, init=False)
    _clients: NodeClients = field(init=False)

    def __post_init__(self) -> None:
        self.folder = Path(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        if isinstance(self.federation, Federation) and self.execution.device is not None:
            self.federation = self.federation.to(self.execution.device)
        self._clients = NodeClients.divide(self.plan, self.federation, self.held)
        self.federation = self._clients.data

    @property
    def identity(self) -> bytes:
        """The private key of secure sums for all runs; only its owner can read the file."""
        return load_or_make_key(Path(self.folder) / "identity.key")

    def handle(self, payload: bytes) -> bytes:
        """Return the answer to a message or a bundle, as bytes, to be sent at once: the log says that it was."""
        replies: list[bytes] = []
        for one in split(payload):
            replies.append(self.answer(one))
            message, parts = unpack(replies[-1])
            self.record("sent", bytes=len(replies[-1]), **summarise(message, parts))
            if isinstance(message, Refusal):
                break
        return join(replies)

    @torch.enable_grad()
    @on_cpu()
    def answer(self, payload: bytes) -> bytes:
        """Return the answer to a message, as bytes; to an invalid one it is a :class:`Refusal`."""
        folder = partial(self._folder, of="agreements")
        agreement = NodeAgreement(self.name, self.plan, self._clients, folder, self._keys)
        moments = NodeMoments(self.plan, self._clients, self.consent, self._folder, self.record)
        handlers: dict[type[Any], Handler] = agreement.handlers | moments.handlers
        handlers |= {
            Hello: self._hello,
            Begin: self._begin,
            Ask: self._ask,
            Open: self._open,
            Finish: self._finish,
            Evaluate: self._evaluate,
            MoveChains: self._move_chains,
            End: self._end,
            Average: self._average,
            LeaveOut: self._leave_out,
            Close: self._close,
        }
        try:
            message, parts = unpack(payload)
            if type(message) not in handlers:
                raise MessageError(f"a node is not sent a message of kind {message.kind}")
            reply = handlers[type(message)](message, parts, payload)
        except MessageError as error:
            reply = pack(Refusal(why=f"institution {self.name!r}: {error}"))
        except Exception as error:
            kind = type(error).__name__
            self.record("failed", error=f"{kind}: {error}")
            why = f"institution {self.name!r} failed ({kind}): its log says why"
            reply = pack(Refusal(why=why))
        return reply

    def _hello(self, message: Hello, parts: Mapping[str, Tensors], payload: bytes) -> bytes:
        return pack(self._clients.describe(self.name))

    def _begin(self, message: Begin, parts: Mapping[str, Tensors], payload: bytes) -> bytes:
        own = self._runs.get(message.run)
        if own is None:
            differs = difference(self.plan.description, message.terms)
            if differs is not None:
                raise MessageError(f"another run was agreed on: {differs}")
            started = (self._folder(message.run) / BEGIN).exists()  # both were restarted
            own = self._run(message.run) if started else self._start_run(message, parts)
        program, coding = own.check_model(message, parts.get("program", {}))
        if message.run not in self._runs:
            own.folder.mkdir(parents=True, exist_ok=True)
            with atomically(own.folder / BEGIN) as file:
                file.write_bytes(payload)
            self._runs[message.run] = own
        key = secure.public_key(own.masking.run_key).hex() if self.plan.secure else None
        return pack(Digest(run=message.run, key=key, coding=coding), program=program)

    def _start_run(self, message: Begin, parts: Mapping[str, Tensors]) -> NodeRun:
        """Return the node's part in a run, before its first round."""
        model, federation, held_out = self._clients.code(message.agreement)
        plan = replace(self.plan, model=model, clients_per_round=1.0, execution=self.execution)
        run = start_run(plan, federation)
        program = replace(run.program, clients=message.clients, rows=message.rows)
        if isinstance(program.guide, Placed):
            own, coordinates = program.guide.coordinates(), parts.get("start", {})
            check_like("the guide's coordinates", coordinates, own)
            program = replace(program, guide=program.guide.placed(coordinates))
        run.program, run.cohort_size = program, message.cohort
        form = plan.algorithm.start(program, self.plan.whole(message.clients))
        run.server = read_state(parts.get("state", {}), form)
        run.clients = States(len(run.federation), device=run.federation.device)
        initialise(run)
        folder, accepted = self._folder(message.run), (None, copy_states(run))
        return NodeRun(message, run, form, folder, accepted, held_out=held_out)

    def _run(self, run: str) -> NodeRun:
        """Return the node's part in a run, which an earlier process may have started."""
        if run not in self._runs:
            folder = self._folder(run)
            if not (folder / BEGIN).exists():
                raise MessageError(f"run {run!r} was not started here")
            own = self._start_run(*unpack_as((folder / BEGIN).read_bytes(), Begin))
            own.load()
            if (folder / FINISH).exists():
                finish = unpack_as((folder / FINISH).read_bytes(), Finish)
                own.posterior = own.make_posterior(*finish)
            if (folder / END).exists():
                own.end(*unpack_as((folder / END).read_bytes(), End))
            self._runs[run] = own
        return self._runs[run]

    def _ask(self, message: Ask, parts: Mapping[str, Tensors], payload: bytes) -> bytes:
        own, asked = self._run(message.run), blake2b(payload, digest_size=16).hexdigest()
        if own.answered is not None and own.answered.round == message.round:
            if own.answered.asked == asked:
                return own.answered.reply
            raise MessageError(
                f"{describe(message.round)} was asked before, with another message: it is answered once"
            )
        if own.answered is not None and message.round.order < own.answered.round.order:
            # a request that was delayed must not undo what the server has accepted since
            raise MessageError(
                f"{describe(message.round)} comes after {describe(own.answered.round)}, which was answered"
            )
        check_privacy(self.plan, message)
        own.commit(message.accepted)
        done = own.accepted[0]
        if done is not None and message.round.number <= done.number:
            raise MessageError(
                f"{describe(message.round)} comes after {describe(done)}, which was accepted"
            )
        run, cohort = own.run, parts.get("cohort", {}).get("clients", torch.zeros(0))
        if (
            cohort.dtype != torch.int64
            or not len(cohort)
            or not bool((cohort[1:] > cohort[:-1]).all())
            or not 0 <= int(cohort[0]) <= int(cohort[-1]) < len(run.federation)
        ):
            raise MessageError("a cohort is ascending positions of the institution's clients")
        if own.posterior is not None:
            own.reopen()
        sent = self._to_device(own, parts.get("message", {}))
        number, rate, clip = message.round.number, message.rate, message.clip
        found = answer(run, Question(sent, cohort, number, rate, clip, message.noisy, 0.0))
        if number == 0:
            run.compiler.decide(run.stopping.usual - 1)
        refused = [run.federation.names[i] for i in cohort[~found.sound].tolist()]
        if refused:
            self.record("not finite", run=message.run, round=number, clients=refused)
        sound = {"clients": found.sound | message.noisy}
        upload = {"total": found.total, "elbo": {"terms": found.sums * (not message.noisy)}}
        if self.plan.secure:
            if message.noisy:
                clients = own.begin.clients
                upload["total"] = add_share(self.plan, message, found.total, clients)
            upload = {"masked": self._mask(own, message, sent, flat(upload))}
        reply = pack(Reply(run=message.run, round=message.round), sound=sound, **upload)
        return own.save_answer(LastAnswer(message.round, asked, reply))

    def _mask(
        self,
        own: NodeRun,
        message: Ask | Evaluate | MoveChains | Average | LeaveOut,
        sent: Tensors,
        upload: Tensors,
    ) -> Tensors:
        """Return what the node uploads to the secure sum of a request."""
        if message.round is None:
            raise MessageError("a sum is not as secure as was agreed on")
        broadcast = broadcast_digest(message, sent)
        of = sum_id(message.run, message.round, broadcast, message.roster)
        after = not isinstance(message, Ask)
        return own.masking.mask(upload, self._keys(own.masking), of, after=after)

    def _keys(self, masking: Masking) -> secure.Keys:
        return secure.Keys(self.name, self.identity, masking.run_key, self.pinned)

    def _open(self, message: Open, parts: Mapping[str, Tensors], payload: bytes) -> bytes:
        folder = self._folder(message.run, "agreements")
        masking = Masking(folder) if folder.exists() else self._run(message.run).masking
        of = sum_id(message.run, message.round, bytes.fromhex(message.broadcast), message.roster)
        return pack(Seal(run=message.run, seal=masking.seal(self._keys(masking), of)))

    def _finish(self, message: Finish, parts: Mapping[str, Tensors], payload: bytes) -> bytes:
        own = self._run(message.run)
        if own.posterior is None:
            own.commit(message.accepted)
            own.posterior = own.make_posterior(message, parts)
            own.posterior.save(own.folder / POSTERIOR)
            with atomically(own.folder / FINISH) as file:
                file.write_bytes(payload)
        return pack(Done(run=message.run))

    def _evaluate(self, message: Evaluate, parts: Mapping[str, Tensors], payload: bytes) -> bytes:
        own = self._finished(message.run)
        theta, key = (self._to_device(own, parts.get(part, {})) for part in ("theta", "key"))
        sums, further = own.evaluate(message, theta, key.get("key", torch.zeros(1)))
        if self.plan.secure:
            sums = {name: finite_log_densities(value) for name, value in sums.items()}
        return self._summed(LogDensities(run=message.run), own, message, parts, sums, further)

    def _move_chains(
        self, message: MoveChains, parts: Mapping[str, Tensors], payload: bytes
    ) -> bytes:
        own = self._run(message.run)
        if not self.plan.chains:
            raise MessageError("no chains were agreed on")
        sums = own.move_chains(message, self._to_device(own, parts.get("chains", {})))
        return self._summed(ChainSums(run=message.run), own, message, parts, sums)

    def _end(self, message: End, parts: Mapping[str, Tensors], payload: bytes) -> bytes:
        own = self._finished(message.run)
        own.end(message, parts)
        with atomically(own.folder / END) as file:
            file.write_bytes(payload)
        if not self.plan.asks_after_fit:
            own.masking.delete_key()
        return pack(Done(run=message.run))

    def _average(self, message: Average, parts: Mapping[str, Tensors], payload: bytes) -> bytes:
        own = self._finished(message.run)
        sums = own.sum_effect(self.plan.effects, message.effect)
        return self._summed(Averages(run=message.run), own, message, parts, sums)

    def _leave_out(self, message: LeaveOut, parts: Mapping[str, Tensors], payload: bytes) -> bytes:
        own, weights = self._finished(message.run), parts.get("weights", {}).get("weights")
        sums = own.sum_left_out(self.plan.leave_one_out, Path(self.folder), weights)
        return self._summed(LeftOut(run=message.run), own, message, parts, sums)

    def _close(self, message: Close, parts: Mapping[str, Tensors], payload: bytes) -> bytes:
        self._finished(message.run).masking.delete_key()
        return pack(Done(run=message.run))

    def _summed(
        self,
        reply: LogDensities | ChainSums | Averages | LeftOut,
        own: NodeRun,
        message: Evaluate | MoveChains | Average | LeaveOut,
        parts: Mapping[str, Tensors],
        sums: Tensors,
        further: Mapping[str, Tensors] | None = None,
    ) -> bytes:
        """Return the answer to a request for sums over the node's clients, masked if they are secure."""
        if not self.plan.secure:
            return pack(reply, sums=sums, **(further or {}))
        return pack(reply, masked=self._mask(own, message, flat(parts), sums))

    def _finished(self, run: str) -> NodeRun:
        own = self._run(run)
        if own.posterior is None:
            raise MessageError("the rounds are not over: finish comes first")
        return own

    def _to_device(self, own: NodeRun, tensors: Tensors) -> Tensors:
        return {name: value.to(own.run.federation.device) for name, value in tensors.items()}

    def _folder(self, run: str, of: str = "runs") -> Path:
        if not run.isalnum():
            raise MessageError(f"a run's name has letters and digits only: it is not {run!r}")
        return Path(self.folder) / of / run

    def record(self, what: str, **data: Any) -> None:
        """Add a line to the institution's log."""
        line = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "what": what} | data
        with (Path(self.folder) / "log.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")
