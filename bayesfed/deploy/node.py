"""A site: it holds its clients' rows, variables and keys, and answers the server's messages.

What its clients keep changes only when the server says that it took the answer that goes with it. Until then both are
in a file of their own, so that the same question is answered by the same bytes, also by a process started anew:

    runs/<run>/begin.message           the server's Begin; finish.message its Finish
    runs/<run>/accepted.safetensors    what the clients keep, after the last answer that was taken
    runs/<run>/answered.safetensors    what they would keep after the last answer, and the answer
    runs/<run>/posterior.safetensors   in the end
    runs/<run>/run.key, record.json    of secure sums: the run's key, gone in the end, and what was masked last
    identity.key                       of secure sums: the site's key for all runs
    log.jsonl                          what left the site, message by message

Of a mistake in its data the server learns that there is one, not what it is: that stands in the site's log.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from bayesfed.checks.program_fingerprint import program_fingerprint
from bayesfed.data.federation import Federation
from bayesfed.deploy import secure
from bayesfed.deploy.messages import (
    Ask,
    Begin,
    Digest,
    Done,
    End,
    FieldSchema,
    Finish,
    Hello,
    MessageError,
    Open,
    Refusal,
    Reply,
    Request,
    Response,
    Schema,
    Seal,
    Tensors,
    Weigh,
    Weights,
    asked_of_all,
    check_like,
    formed,
    of_kind,
    packed,
    unpacked,
)
from bayesfed.deploy.node_run import (
    BEGIN,
    FINISH,
    Answered,
    Part,
    in_words,
    kept,
    private_key,
    sum_of,
)
from bayesfed.deploy.noise_shares import noisy
from bayesfed.deploy.plan import DeploymentPlan, difference
from bayesfed.elbo.handlers import on_cpu
from bayesfed.engine.execution import Execution
from bayesfed.engine.files import atomically
from bayesfed.engine.resume import initialise
from bayesfed.engine.rounds import Question, answer
from bayesfed.engine.states import States
from bayesfed.fitting import global_params, start_run
from bayesfed.output.checkpoint import Placed
from bayesfed.output.evidence import has_block
from bayesfed.output.fitted import Correction
from bayesfed.output.locals_of_run import make_local_params
from bayesfed.output.log_densities import sum_log_weights
from bayesfed.output.posterior import Posterior

_VERSION = version("bayesfed")


@dataclass
class Site:
    """A resident worker.

    Attributes:
        name: what the site is called.
        federation: its clients.
        plan: what it has agreed to.
        folder: where it keeps what must not be lost.
        execution: how it runs.
        pinned: of secure sums, the sites that it will be summed with, and their public keys.

    Example:
        >>> import tempfile, bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> from bayesfed.deploy.messages import Hello, packed, unpacked
        >>> from bayesfed.deploy.plan import DeploymentPlan
        >>> from bayesfed.deploy.node import Site
        >>> plan, schools = DeploymentPlan(models.eight_schools), datasets.eight_schools()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     site = Site("north", schools.select(schools.names[:2]), plan, folder)
        ...     schema, _ = unpacked(site.handle(packed(Hello())))
        >>> schema.site, schema.clients, schema.fields["y"].shape
        ('north', ['A', 'B'], [])
    """

    name: str
    federation: Federation
    plan: DeploymentPlan
    folder: str | Path
    execution: Execution = field(default_factory=Execution)
    pinned: Mapping[str, bytes] = field(default_factory=dict)
    _parts: dict[str, Part] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.folder = Path(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.execution.device is not None:
            self.federation = self.federation.to(self.execution.device)

    @on_cpu()
    def handle(self, payload: bytes) -> bytes:
        """The answer to a message, as bytes; whatever is wrong with it is answered by a :class:`Refusal`."""
        try:
            message, parts = unpacked(payload)
            reply = self._answers(message)(self, message, parts, payload)
        except MessageError as error:
            reply = packed(Refusal(why=f"site {self.name!r}: {error}"))
        except Exception as error:
            kind = type(error).__name__
            self._note("failed", error=f"{kind}: {error}")
            reply = packed(Refusal(why=f"site {self.name!r} failed ({kind}): its log says why"))
        message, parts = unpacked(reply)
        self._note("sent", bytes=len(reply), **_contents(message, parts))
        return reply

    @staticmethod
    def _answers(message: Request | Response) -> Callable[..., bytes]:
        by_kind: dict[type[Any], Callable[..., bytes]] = {
            Hello: Site._hello,
            Begin: Site._begin,
            Ask: Site._ask,
            Open: Site._open,
            Finish: Site._finish,
            Weigh: Site._weigh,
            End: Site._end,
        }
        if type(message) not in by_kind:
            raise MessageError(f"a site is not sent a message of kind {message.kind}")
        return by_kind[type(message)]

    def _hello(self, message: Hello, parts: Mapping[str, Tensors], payload: bytes) -> bytes:
        data = self.federation
        fields = {
            name: FieldSchema(shape=list(v.shape[1:]), dtype=str(v.dtype).removeprefix("torch."))  # type: ignore[arg-type]
            for name, v in data.fields.items()
        }
        return packed(
            Schema(
                site=self.name,
                clients=list(data.names),
                rows=data.rows,
                client_dim=data.client_dim,
                gaps=data.gaps,
                fields=fields,
                version=_VERSION,
            )
        )

    def _begin(self, message: Begin, parts: Mapping[str, Tensors], payload: bytes) -> bytes:
        part = self._parts.get(message.run)
        if part is None:
            differs = difference(self.plan.description, message.terms)
            if differs is not None:
                raise MessageError(f"another run was agreed on: {differs}")
            if (self._folder(message.run) / BEGIN).exists():  # both have been started again
                part = self._part(message.run)
            else:
                part = self._begun(message, parts)
                part.folder.mkdir(parents=True, exist_ok=True)
                with atomically(part.folder / BEGIN) as file:
                    file.write_bytes(payload)
                self._parts[message.run] = part
        program = program_fingerprint(part.run.program, self.federation, torch.arange(0))
        key = secure.public_key(part.run_key).hex() if self.plan.secure else None
        return packed(Digest(run=message.run, key=key), program=program)

    def _begun(self, message: Begin, parts: Mapping[str, Tensors]) -> Part:
        """The site's part in a run, before its first round."""
        plan = replace(self.plan, clients_per_round=1.0, execution=self.execution)
        run = start_run(plan, self.federation)
        program = replace(run.program, clients=message.clients, rows=message.rows)
        if isinstance(program.guide, Placed):
            own, coordinates = program.guide.coordinates(), parts.get("start", {})
            check_like("the guide's coordinates", coordinates, own)
            program = replace(program, guide=program.guide.placed(coordinates))
        run.program, run.cohort_size = program, message.cohort
        form = plan.algorithm.start(program)
        run.server = formed("the server's state", parts.get("state", {}), form)
        run.clients = States(len(self.federation), device=self.federation.device)
        initialise(run)
        return Part(message, run, form, self._folder(message.run), (None, kept(run)))

    def _part(self, run: str) -> Part:
        """The part in a run that has begun, also before this process was started."""
        if run not in self._parts:
            folder = self._folder(run)
            if not (folder / BEGIN).exists():
                raise MessageError(f"run {run!r} has not begun here")
            part = self._begun(*of_kind((folder / BEGIN).read_bytes(), Begin))
            part.read()
            if (folder / FINISH).exists():
                ended = of_kind((folder / FINISH).read_bytes(), Finish)
                part.posterior = self._posterior(part, *ended)
            self._parts[run] = part
        return self._parts[run]

    def _ask(self, message: Ask, parts: Mapping[str, Tensors], payload: bytes) -> bytes:
        part, asked = self._part(message.run), blake2b(payload, digest_size=16).hexdigest()
        if part.answered is not None and part.answered.round == message.round:
            if part.answered.asked != asked:
                raise MessageError(
                    f"{in_words(message.round)} was asked before, with another message: it is answered once"
                )
            return part.answered.reply
        if part.answered is not None and message.round.order < part.answered.round.order:
            # on its way for long; what the server has taken since must not be put back
            raise MessageError(
                f"{in_words(message.round)} comes after {in_words(part.answered.round)}, which was answered"
            )
        self._check_privacy(message)
        part.settle(message.accepted)
        done = part.accepted[0]
        if done is not None and message.round.number <= done.number:
            raise MessageError(
                f"{in_words(message.round)} comes after {in_words(done)}, which was taken"
            )
        run, cohort = part.run, parts.get("cohort", {}).get("clients", torch.zeros(0))
        if (
            cohort.dtype != torch.int64
            or not len(cohort)
            or not bool((cohort[1:] > cohort[:-1]).all())
            or not 0 <= int(cohort[0]) <= int(cohort[-1]) < len(self.federation)
        ):
            raise MessageError("a cohort is positions of the site's clients, ascending")
        if part.posterior is not None:
            part.reopen()
        sent = {n: v.to(self.federation.device) for n, v in parts.get("message", {}).items()}
        number, rate, clip = message.round.number, message.rate, message.clip
        found = answer(run, Question(sent, cohort, number, rate, clip, message.noisy, 0.0))
        if number == 0:
            run.compiler.decide(run.stopping.usual - 1)
        refused = [self.federation.names[i] for i in cohort[~found.sound].tolist()]
        if refused:
            self._note("not finite", run=message.run, round=number, clients=refused)
        sound = {"clients": found.sound | message.noisy}
        said = {"terms": found.sums * (not message.noisy)}
        answered = Reply(run=message.run, round=message.round)
        if self.plan.secure:
            masked = self._masked(part, message, sent, {"total": found.total, "said": said})
            reply = packed(answered, masked=masked, sound=sound)
        else:
            reply = packed(answered, total=found.total, sound=sound, said=said)
        return part.answer(Answered(message.round, asked, reply))

    def _check_privacy(self, message: Ask) -> None:
        """Fail on a question that is not as noisy, or not as secure, as was agreed on."""
        privacy = self.plan.privacy
        if message.noisy != self.plan.noisy or (message.roster is not None) != self.plan.secure:
            raise MessageError("a round is not as private as was agreed on")
        if privacy is None or privacy.clip is None:
            return
        if message.clip != float(privacy.first_clip()):
            raise MessageError(f"the clip is {message.clip}; {privacy.clip} was agreed on")

    def _keys(self, part: Part) -> secure.Site:
        """The site's keys, made where there are none."""
        return secure.Site(self.name, self.identity, part.run_key, self.pinned)

    @property
    def identity(self) -> bytes:
        """The private key of secure sums for all runs; only its owner can read the file."""
        return private_key(Path(self.folder) / "identity.key")

    def _masked(
        self, part: Part, message: Ask, sent: Tensors, parts: Mapping[str, Tensors]
    ) -> Tensors:
        """What a site uploads to a secure sum, with its share of the noise of privacy."""
        plan, privacy = self.plan, self.plan.privacy
        if message.noisy:
            assert privacy is not None and plan.honest is not None and plan.rounds is not None
            if plan.honest > len(message.roster or ()):
                raise MessageError(
                    f"{len(message.roster or ())} sites are too few: the noise is shared out among {plan.honest}"
                )
            clients = part.begin.clients  # the server knows the cohorts, so they hide nobody
            multiplier = privacy.multiplier(plan.rounds, clients, clients)
            total = noisy(parts["total"], privacy, message.clip, multiplier, plan.honest)
            parts = {**parts, "total": total}
        flat = {f"{p}/{n}": v for p, values in parts.items() for n, v in values.items()}
        of = sum_of(message.run, message.round, asked_of_all(message, sent), message.roster or {})
        return part.masked(flat, self._keys(part), of)

    def _open(self, message: Open, parts: Mapping[str, Tensors], payload: bytes) -> bytes:
        part = self._part(message.run)
        of = sum_of(message.run, message.round, bytes.fromhex(message.broadcast), message.roster)
        return packed(Seal(run=message.run, seal=part.seal(self._keys(part), of)))

    def _finish(self, message: Finish, parts: Mapping[str, Tensors], payload: bytes) -> bytes:
        part = self._part(message.run)
        if part.posterior is None:
            part.settle(message.accepted)
            part.posterior = self._posterior(part, message, parts)
            part.posterior.save(part.folder / "posterior.safetensors")
            with atomically(part.folder / FINISH) as file:
                file.write_bytes(payload)
        return packed(Done(run=message.run))

    def _posterior(self, part: Part, message: Finish, parts: Mapping[str, Tensors]) -> Posterior:
        """That of the site's clients, which make their variables from θ where they keep none."""
        run = part.run
        run.server = formed("the server's state", parts.get("state", {}), part.form)
        run.done = message.done
        params = global_params(run)
        return Posterior(
            program=run.program,
            federation=self.federation,
            params=params,
            local_params=make_local_params(run, params),
            history=parts.get("history", {}),
            algorithm=run.plan.algorithm,
            seed=run.plan.seed,
            epsilon=message.epsilon,
            moving=message.moving,
            rising=message.rising,
            settled=message.settled,
        )

    def _weigh(self, message: Weigh, parts: Mapping[str, Tensors], payload: bytes) -> bytes:
        part = self._finished(message.run)
        posterior = part.posterior
        assert posterior is not None
        if posterior.epsilon is not None:
            raise MessageError("log densities are not told where uploads are private")
        theta, key = parts.get("theta", {}), parts.get("key", {}).get("key", torch.zeros(1))
        count = min((len(value) for value in theta.values()), default=0)
        if key.dtype != torch.int64 or key.ndim or not count:
            raise MessageError("draws of θ come with a key")
        if message.closely and not has_block(posterior.program):
            raise MessageError(
                "these clients' variables are no Normal block to be looked at closely"
            )
        theta = {n: v.to(self.federation.device) for n, v in theta.items()}
        key = key.to(self.federation.device)
        found = {"terms": sum_log_weights(posterior, theta, count, key, message.closely)}
        if not self.plan.secure:
            return packed(Weights(run=message.run), terms=found)
        if message.round is None:
            raise MessageError("a sum is not as secure as was agreed on")
        broadcast = asked_of_all(message, {**theta, "": key})
        of = sum_of(message.run, message.round, broadcast, message.roster or {})
        return packed(Weights(run=message.run), masked=part.masked(found, self._keys(part), of))

    def _end(self, message: End, parts: Mapping[str, Tensors], payload: bytes) -> bytes:
        part = self._finished(message.run)
        assert part.posterior is not None
        if theta := parts.get("theta", {}):
            theta = {n: v.to(self.federation.device) for n, v in theta.items()}
            mended = Correction(theta, float(message.khat or 0.0), message.closely)
            part.posterior = replace(part.posterior, correction=mended)
        part.posterior.save(part.folder / "posterior.safetensors")
        (part.folder / "run.key").unlink(missing_ok=True)
        return packed(Done(run=message.run))

    def _finished(self, run: str) -> Part:
        part = self._part(run)
        if part.posterior is None:
            raise MessageError("the rounds are not over: finish comes first")
        return part

    def _folder(self, run: str) -> Path:
        if not run.isalnum():
            raise MessageError(f"a run is called by letters and digits, not {run!r}")
        return Path(self.folder) / "runs" / run

    def _note(self, what: str, **data: Any) -> None:
        """Add a line to the site's log."""
        line = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "what": what} | data
        with (Path(self.folder) / "log.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")


def _contents(message: Any, parts: Mapping[str, Tensors]) -> dict[str, Any]:
    """What a message says, for the log."""
    shapes = {f"{p}/{n}": list(v.shape) for p, found in parts.items() for n, v in found.items()}
    said = message.model_dump(exclude={"fields", "clients"} if message.kind == "schema" else set())
    return {"message": said, "tensors": shapes}
