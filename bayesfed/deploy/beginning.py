"""The beginning of a run at its institutions, in one exchange with the first round.

The first round needs nothing of what institutions answer to Begin: the server's first state is made from their schemas,
and they check themselves that their settings and model are the server's. So both travel together, and a node that
refuses to begin computes nothing of the round. Secure sums are of rosters with the keys that institutions make for a
run, which come with the answers: there, and where a round does not wait for all, the run begins before the round.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bayesfed.checks.program_fingerprint import describe_program_change, program_fingerprint
from bayesfed.deploy import secure
from bayesfed.deploy.coded import coding_digest, write_agreement
from bayesfed.deploy.institutions import Institutions, read_reply, run_name
from bayesfed.deploy.messages import Begin, Digest, MessageError, pack
from bayesfed.deploy.transport import Wait
from bayesfed.engine.parts import flatten_state
from bayesfed.engine.run import Run
from bayesfed.formulas.formula import Formula
from bayesfed.output.checkpoint import Placed

Digests = dict[str, tuple[Digest, dict[str, dict[str, Tensor]]]]
"""Answers to Begin, by institution."""


@dataclass
class Beginning:
    """The message that begins a run, and the institutions at which it has started.

    Attributes:
        institutions: of the run.
        run: the server's.
        started: their names.
        message: that begins the run.
    """

    institutions: Institutions
    run: Run
    started: set[str] = field(default_factory=set, init=False)
    message: bytes = field(init=False)
    _fingerprint: dict[str, Tensor] = field(init=False)
    _coding: str | None = field(init=False)

    def __post_init__(self) -> None:
        run, program, formula = self.run, self.run.program, self.formula
        self._fingerprint = program_fingerprint(program, run.federation, torch.arange(0))
        self._coding = None if formula is None else coding_digest(formula)
        message = Begin(
            run=run_name(run),
            terms=self.institutions.plan.description,
            clients=program.clients,
            rows=program.rows,
            cohort=run.cohort_size,
            agreement=None if formula is None else write_agreement(formula.agreement),
            coding=self._coding,
        )
        start = program.guide.coordinates() if isinstance(program.guide, Placed) else {}
        state = flatten_state(run.plan.algorithm.start(program, run.plan.whole(program.clients)))
        self.message = pack(message, state=state, start=start, program=self._fingerprint)

    @property
    def formula(self) -> Formula | None:
        """The model, if it is a formula."""
        model = self.institutions.plan.model
        return model if isinstance(model, Formula) else None

    @property
    def travels(self) -> bool:
        """True if the message travels with a round."""
        patience, run = self.institutions.patience, self.run
        waits = patience.enough is None and not patience.max_staleness
        return waits and not self.institutions.plan.secure and run.done < run.rounds

    def begin_at(self, names: Iterable[str]) -> None:
        """Begin the run at some institutions, and check that their programs are the server's.

        Raises:
            MessageError: an institution refuses, or its program is not the server's.
            TimeoutError: an institution does not answer.
        """
        requests = dict.fromkeys(names, self.message)
        self._check(self.institutions.request_all(requests, Digest, run_name(self.run)))

    def send_round(self, requests: Mapping[str, bytes], wait: Wait) -> dict[str, bytes]:
        """Send the requests of a round, and begin the run where it has not started; return the answers to the round.

        All institutions have to begin. An answer to the round may be missing, as in any other.

        Raises:
            MessageError: as of :meth:`begin_at`.
            TimeoutError: as of :meth:`begin_at`.
        """
        new = self.institutions.present - self.started
        if not new:
            return self.institutions.send(requests, wait)
        bundles = {name: [self.message] * (name in new) for name in sorted(new | requests.keys())}
        for name, request in requests.items():
            bundles[name].append(request)
        found, run = self.institutions.send_bundles(bundles, wait), run_name(self.run)
        started = {n: read_reply(n, own[0], Digest, run) for n, own in found.items() if n in new}
        self._check(started)
        self.begin_at(new - started.keys())
        return {name: own[-1] for name, own in found.items() if name in requests}

    def _check(self, digests: Digests) -> None:
        """Check answers to the message, and note the institutions' keys.

        Raises:
            MessageError: a program is not the server's; or there is no key for secure sums, or an unfit one.
        """
        institutions, program = self.institutions, self.run.program
        keys = {name: digest.key for name, (digest, _) in digests.items() if digest.key is not None}
        if institutions.plan.secure:
            for name in digests.keys() - keys.keys():
                raise MessageError(f"institution {name!r} has no key for secure sums")
            secure.check_keys(institutions.keys | keys)
        institutions.keys |= keys
        for name, (digest, parts) in digests.items():
            theirs = parts.get("program", {})
            differs = describe_program_change(program, self._fingerprint, theirs)
            if differs is None and digest.coding != self._coding:
                differs = "the formula's program or its agreed coding is not the server's"
            if differs is not None:
                raise MessageError(f"institution {name!r} has another model: {differs}")
        self.started |= digests.keys()
