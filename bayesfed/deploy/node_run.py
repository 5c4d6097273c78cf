"""A node's part in a run, and the files that preserve it if any process is killed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesfed.checks.program_fingerprint import describe_program_change, program_fingerprint
from bayesfed.data.federation import Federation
from bayesfed.deploy.coded import coding_digest
from bayesfed.deploy.contents import check_like, read_state
from bayesfed.deploy.masking import Masking
from bayesfed.deploy.messages import (
    Begin,
    End,
    Evaluate,
    Finish,
    MessageError,
    MoveChains,
    RoundId,
    Tensors,
)
from bayesfed.deploy.node_chains import NodeChains
from bayesfed.deploy.node_elpds import NodeElpds
from bayesfed.effects.agreed import sums_of_clients
from bayesfed.engine.files import read_tensors, write_tensors
from bayesfed.engine.parts import flat
from bayesfed.engine.run import Run
from bayesfed.fitting import global_params
from bayesfed.formulas.formula import Formula
from bayesfed.output.conditionals import has_block
from bayesfed.output.effort import QUIET
from bayesfed.output.fitted import Correction
from bayesfed.output.locals_of_run import make_local_params
from bayesfed.output.log_densities import Probe, sum_log_weights
from bayesfed.output.log_target import noise_variance
from bayesfed.output.posterior import Posterior
from bayesfed.settings import EffectSettings, LeaveOneOutSettings

BEGIN, FINISH, END = "begin.message", "finish.message", "end.message"
POSTERIOR, HELD_OUT = "posterior.safetensors", "held_out.safetensors"
CHAINS = "chains.safetensors"
_ACCEPTED, _ANSWERED = "accepted.safetensors", "answered.safetensors"
_METADATA = "bayesfed node"


class LastAnswer(NamedTuple):
    """The last answer to :class:`~bayesfed.deploy.messages.Ask`.

    Attributes:
        round: the round that it answers.
        asked: hash of the request.
        reply: the answer's bytes.
    """

    round: RoundId
    asked: str
    reply: bytes


@dataclass
class NodeRun:
    """A node's part in a run.

    Attributes:
        begin: the message with which the server began it.
        run: the run of the node's own clients.
        form: the server's first state, whose structure all others have.
        folder: where it is stored.
        accepted: the last answer that the server accepted, and the clients' states after it.
        answered: the last answer, which the server may not have accepted yet: the run's clients are in the states
            after it.
        posterior: the posterior of the clients, after the rounds.
        ended: the posterior has the corrected draws of θ, if any.
        elpds: predictive densities of the clients' rows under it, once they are asked for.
        chains: its clients' variables in chains, once they are asked for.
        held_out: the node's clients that take no part in the rounds, if there are any.
    """

    begin: Begin
    run: Run
    form: Any
    folder: Path
    accepted: tuple[RoundId | None, Tensors]
    answered: LastAnswer | None = None
    posterior: Posterior | None = None
    ended: bool = False
    elpds: NodeElpds | None = None
    chains: NodeChains | None = None
    held_out: Federation | None = None

    def check_model(self, message: Begin, theirs: Tensors) -> tuple[Tensors, str | None]:
        """Return the fingerprint of the node's model, and the digest of its formula's coding, if they are the server's.

        Raises:
            MessageError: they are not, so that nothing of a round leaves the node.
        """
        run, model = self.run, self.run.plan.model
        own = program_fingerprint(run.program, run.federation, torch.arange(0))
        coding = coding_digest(model) if isinstance(model, Formula) else None
        differs = describe_program_change(run.program, theirs, own)
        if differs is None and coding != message.coding:
            differs = "the formula's program or its agreed coding is not the server's"
        if differs is not None:
            raise MessageError(f"its model is not the server's: {differs}")
        return own, coding

    def save_answer(self, answered: LastAnswer) -> bytes:
        """Store an answer beside what was accepted, and return its bytes."""
        self.answered = answered
        reply = torch.frombuffer(bytearray(answered.reply), dtype=torch.uint8)
        metadata = {"round": answered.round.model_dump(), "asked": answered.asked}
        saved = copy_states(self.run) | {"reply": reply}
        write_tensors(self.folder / _ANSWERED, saved, _METADATA, metadata)
        return answered.reply

    def commit(self, accepted: RoundId | None) -> None:
        """Keep the states that go with the answer that the server accepted last, and no others.

        Raises:
            MessageError: the server accepted an answer that this node has not stored.
        """
        before, states = self.accepted
        if self.answered is not None and accepted == self.answered.round:
            (self.folder / _ANSWERED).replace(self.folder / _ACCEPTED)
            self.accepted = (accepted, copy_states(self.run))
        elif accepted == before:
            _restore(self.run, states)
            (self.folder / _ANSWERED).unlink(missing_ok=True)
        else:
            raise MessageError(
                f"the server accepted {describe(accepted)} last, and this node's clients are in their states after "
                f"{describe(before)}: a folder or file was put back. Begin another run"
            )
        self.answered = None

    def reopen(self) -> None:
        """Go on with the rounds after an end; the posterior's file remains until the next one replaces it."""
        self.posterior, self.ended, self.elpds = None, False, None
        self._forget_chains()
        (self.folder / FINISH).unlink()
        (self.folder / END).unlink(missing_ok=True)

    def end(self, message: End, parts: Mapping[str, Tensors]) -> None:
        """Make the final posterior, with the corrected draws of θ if there are any, and store it."""
        posterior = self.posterior
        assert posterior is not None
        device = posterior.federation.device
        if theta := {name: value.to(device) for name, value in parts.get("theta", {}).items()}:
            of_chains = message.chains, message.rhat, message.ess
            mended = Correction(theta, message.khat, message.closely, *of_chains)
            posterior = replace(posterior, correction=mended)
        self._forget_chains()
        if posterior.algorithm.corrected:
            posterior = posterior.with_clients_resampled()
        self.posterior, self.ended = posterior, True
        posterior.save(self.folder / POSTERIOR)
        if self.held_out is not None:
            posterior.personalize(self.held_out).save(self.folder / HELD_OUT)

    def load(self) -> None:
        """Load the clients' states that an earlier process has stored."""
        for name in (_ACCEPTED, _ANSWERED):
            path = self.folder / name
            if not path.exists():
                continue
            found, metadata = read_tensors(path, _METADATA)
            reply = found.pop("reply").numpy().tobytes()
            check_like(f"{path}: ", found, copy_states(self.run))
            round_id = RoundId(**metadata["round"])
            if name == _ACCEPTED:
                self.accepted = (round_id, found)
            else:
                self.answered = LastAnswer(round_id, metadata["asked"], reply)
            _restore(self.run, found)

    def make_posterior(self, message: Finish, parts: Mapping[str, Tensors]) -> Posterior:
        """Return the posterior of the node's clients; stateless ones make their local variables from θ."""
        run = self.run
        run.server = read_state(parts.get("state", {}), self.form)
        run.done = message.done
        params = global_params(run)
        return Posterior(
            program=run.program,
            federation=run.federation,
            params=params,
            local_params=make_local_params(run, params),
            history=parts.get("history", {}),
            algorithm=run.plan.algorithm,
            seed=run.plan.seed,
            epsilon=message.epsilon,
            moving=message.moving,
            rising=message.rising,
            converged=message.converged,
        )

    def sum_effect(self, effects: Sequence[EffectSettings], number: int) -> Tensors:
        """Return the sums of an effect over the rows of the node's clients.

        Raises:
            MessageError: there is no such effect, or the posterior is not the final one.
        """
        posterior = self._final_posterior()
        if number >= len(effects):
            raise MessageError("no such effect was agreed on")
        found = sums_of_clients(posterior, effects[number])
        return {"total": found.total, "weight": found.weight}

    def sum_left_out(
        self, agreed: LeaveOneOutSettings | None, folder: Path, weights: Tensor | None
    ) -> Tensors:
        """Return sums of leave-one-out predictive densities over the node's clients.

        Raises:
            MessageError: no leave-one-out was agreed on, or the posterior is not the final one.
        """
        posterior = self._final_posterior()
        if agreed is None:
            raise MessageError("no leave-one-out was agreed on")
        if self.elpds is None:
            self.elpds = NodeElpds(posterior, agreed, folder)
        return self.elpds.sums(weights)

    def evaluate(
        self, message: Evaluate, theta: Tensors, key: Tensor
    ) -> tuple[Tensors, dict[str, Tensors]]:
        """Return the sums over the node's clients of log densities at draws of θ, and what is sent with them.

        Raises:
            MessageError: the run is private; the draws are none; close estimates do not apply; the probe is none.
        """
        posterior = self.posterior
        assert posterior is not None
        if posterior.epsilon is not None:
            raise MessageError("log densities are not sent where uploads are private")
        count = min((len(value) for value in theta.values()), default=0)
        if key.dtype != torch.int64 or key.ndim or not count:
            raise MessageError("draws of θ come with a key")
        probe = None if message.probe is None else Probe(*message.probe)
        if (message.closely or probe is not None) and not has_block(posterior.program):
            raise MessageError("these clients' local variables are not a Normal block")
        if probe is not None and not probe.repeats <= probe.first <= count - probe.repeats:
            raise MessageError("a probe is of some of the draws of θ")
        terms = sum_log_weights(posterior, theta, count, key, message.closely)
        if probe is None or not self._is_noisy(terms, probe):
            return {"terms": terms}, {}
        first = {name: value[: probe.first] for name, value in theta.items()}
        closer = sum_log_weights(posterior, first, probe.first, key, laplace=True)
        return {"terms": terms}, {"further": {"closer": closer}}

    def _is_noisy(self, terms: Tensor, probe: Probe) -> bool:
        """Return whether sums over all clients are too noisy if the others' are as noisy as those of this node's."""
        again = terms[probe.first :][: probe.repeats]
        own = noise_variance(terms[: probe.repeats], again)
        return own * self.begin.clients / len(self.run.federation) > QUIET

    def move_chains(self, message: MoveChains, sent: Tensors) -> Tensors:
        """Take a leapfrog step of chains, and return the sums over the node's clients.

        Raises:
            MessageError: the rounds are not over, or the draws of θ are final; see :class:`NodeChains`.
        """
        if self.posterior is None or self.ended:
            raise MessageError("chains come between Finish and End")
        if self.chains is None:
            self.chains = NodeChains(self.posterior, self.folder / CHAINS)
        return self.chains.move(message, sent)

    def _forget_chains(self) -> None:
        self.chains = None
        (self.folder / CHAINS).unlink(missing_ok=True)

    def _final_posterior(self) -> Posterior:
        """Return the posterior that has the corrected draws of θ."""
        if self.posterior is None or not self.ended:
            raise MessageError("the draws of θ are not final: End comes first")
        return self.posterior

    @property
    def masking(self) -> Masking:
        """The key and the record of its secure sums."""
        return Masking(self.folder)


def copy_states(run: Run) -> Tensors:
    """Return copies of the clients' states."""
    return {name: value.clone() for name, value in _states(run).items()}


def _restore(run: Run, before: Tensors) -> None:
    for name, value in _states(run).items():
        value.copy_(before[name])


def _states(run: Run) -> Tensors:
    clients = {f"clients/{name}": value for name, value in flat(run.clients.tensors).items()}
    return clients | {"known": run.client_terms}


def describe(round_id: RoundId | None) -> str:
    """Return a round and its attempt in words."""
    if round_id is None:
        return "no round"
    return f"round {round_id.number} (attempt {round_id.attempt})"
