"""Checks of the nodes' answers: which of them count. Others are refused, counted and reported."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesfed.data.plural import plural
from bayesfed.deploy.combine import Answers, Parts, combine
from bayesfed.deploy.contents import check_like
from bayesfed.deploy.institutions import Institution, Institutions, Overdue, run_name
from bayesfed.deploy.messages import MessageError, Reply, RoundId, Tensors, unpack_as
from bayesfed.deploy.secure_round import masked_form
from bayesfed.engine.parts import ROWS, flat, nested
from bayesfed.engine.privacy import NORMS, SHORT
from bayesfed.engine.rounds import Question, Sums, can_update
from bayesfed.engine.run import Run

TOO_LARGE = 1e3
"""The factor by which the norm of an upload, a client, may exceed the institutions' median."""

Stale = dict[str, tuple[RoundId, Parts]]
"""Answers to earlier rounds, by institution, each with its round."""


@dataclass(frozen=True)
class Collector:
    """The checks of a round's answers.

    Attributes:
        institutions: of the run.
        run: the server's.
        asked: the request of the round.
        form: a tensor like each part of an upload.
    """

    institutions: Institutions
    run: Run
    asked: Question
    form: Tensors

    def check(
        self, round_id: RoundId, members: Mapping[str, Institution], payloads: Mapping[str, bytes]
    ) -> Answers:
        """Return the answers that count.

        Args:
            round_id: the round and attempt that they must answer.
            members: the institutions that were asked.
            payloads: the answers, by institution.
        """
        found: dict[str, Parts] = {}
        for name, member in members.items():
            if name not in payloads:
                self.institutions.absent[name] += 1
                self._report(f"institution {name!r} has not answered in time")
                continue
            due = Overdue(round_id, int(member.owns(self.asked.cohort).sum()))
            parts = self._read(name, due, payloads[name], self.asked.clip)
            if parts is not None:
                found[name] = parts
        plan = self.institutions.plan
        if not plan.secure:  # nobody can look into a secure sum
            refused = self._refuse_large(found)
            found = {name: parts for name, parts in found.items() if name not in refused}
            if not plan.noisy and (fatal := self._refuse_fatal(found)) is not None:
                del found[fatal]
        return Answers(round_id, found)

    def check_stale(self, answers: Answers) -> Stale:
        """Return the stale answers that have come since and count, to be used beside those to this round."""
        found: Stale = {}
        limit = self.institutions.patience.max_staleness
        for name, payload in self.institutions.take_stale().items():
            due = self.institutions.overdue.pop(name, None)
            if due is None or self.run.done - due.round.number > limit:
                continue
            parts = self._read(name, due, payload, math.inf)
            if parts is not None and not self._refuse_large(answers.replies | {name: parts}):
                found[name] = (due.round, parts)
                self._report(f"institution {name!r} has answered round {due.round.number + 1}")
        return found

    def add_stale(self, total: Tensors, counted: int, stale: Stale) -> tuple[Tensors, Stale]:
        """Return the sum with stale answers, and those of them after which the server's step has a solution."""
        added: Stale = {}
        for name, (round_id, parts) in stale.items():
            own = int(parts["sound"]["clients"].sum())
            more = flat(
                self.run.plan.algorithm.rule.stale(self.run.server, nested(parts["total"]), own)
            )
            wider = total | {part: total[part] + value for part, value in more.items()}
            if can_update(self.run, self.asked, wider, counted):
                total, added[name] = wider, (round_id, parts)
            else:
                self._refuse(name, "with it, stale as it is, the server's step has no solution")
        return total, added

    def _refuse_large(self, found: Mapping[str, Parts]) -> list[str]:
        """Refuse uploads that are out of all proportion to the others; return their institutions."""
        norms = {name: _norm(parts) for name, parts in found.items()}
        median = float(torch.tensor(list(norms.values())).median()) if len(found) > 2 else 0.0
        median = median or math.inf  # beside zeros, nothing is large
        large = [name for name, norm in norms.items() if norm > TOO_LARGE * median]
        for name in large:
            why = (
                f"its norm is {norms[name]:.3g} a client, the institutions' median is {median:.3g}"
            )
            self._refuse(name, why)
        return large

    def _refuse_fatal(self, found: Mapping[str, Parts]) -> str | None:
        """Refuse the upload after which the server's step has no solution, if it has one without it.

        Such an upload may make a precision negative, which is within all bounds. If leaving out one institution does
        not help, none is at fault. Return the institution.
        """

        def has_solution(names: Iterable[str]) -> bool:
            some = [found[name] for name in names]
            counted = sum(int(parts["sound"]["clients"].sum()) for parts in some)
            rule = self.institutions.plan.algorithm.rule
            return not counted or can_update(self.run, self.asked, combine(some, rule)[0], counted)

        if len(found) < 3 or has_solution(found):
            return None
        for name in sorted(found, key=lambda name: -_norm(found[name])):
            if has_solution(found.keys() - {name}):
                self._refuse(name, "with it the server's step has no solution, without it it has")
                return name
        return None

    def _refuse(self, name: str, why: object) -> None:
        self.institutions.refused[name] += 1
        self._report(f"refused what institution {name!r} sent: {why}")

    def _report(self, event: str) -> None:
        self.institutions.report(f"round {self.run.done + 1}: {event}")

    def _read(self, name: str, due: Overdue, payload: bytes, clip: float) -> Parts | None:
        """Return the tensors of an institution's answer, if it counts."""
        try:
            reply, parts = unpack_as(payload, Reply, run_name(self.run))
            if reply.round != due.round:
                raise MessageError(
                    f"an answer to round {reply.round.number} came in place of {due.round.number}"
                )
            sound = {"clients": torch.zeros(due.clients, dtype=torch.bool)}
            check_like("its clients", parts.get("sound", {}), sound)
            if self.institutions.plan.secure:
                check_like("its masked upload", parts.get("masked", {}), masked_form(self.form))
            else:
                self._check_plain(clip, parts, due.clients)
        except MessageError as error:
            self._refuse(name, error)
            return None
        return parts

    def _check_plain(self, clip: float, parts: Parts, clients: int) -> None:
        """Fail on an upload of another form, numbers that are not finite, and a norm above what the clip allows."""
        like = {"terms": torch.zeros(len(Sums._fields), dtype=torch.float64)}
        check_like("its upload", parts.get("total", {}), self.form)
        check_like("its ELBO terms", parts.get("elbo", {}), like)
        for name, value in {**parts["total"], **parts["elbo"]}.items():
            if not bool(value.isfinite().all()):
                raise MessageError(f"{name!r} is not finite")
        if bool((parts["total"].get(ROWS, torch.zeros(())) < 0).any()):
            raise MessageError(f"{ROWS!r} is negative")
        *terms, first, uphill = parts["elbo"]["terms"].tolist()
        if max(map(abs, terms)) > clients * torch.finfo(torch.float32).max:
            raise MessageError("its ELBO terms are beyond the range of single precision")
        if first not in range(clients + 1):
            raise MessageError(f"{first:g} of its {plural(clients, 'client')} are new")
        if uphill not in range(clients + 1):
            raise MessageError(
                f"the steps of {uphill:g} of its {plural(clients, 'client')} went uphill"
            )
        privacy = self.run.privacy
        if privacy.clips:
            clipped = {n: v for n, v in parts["total"].items() if n != SHORT}
            norm = float(torch.linalg.vector_norm(_flat(clipped), NORMS[privacy.mechanism]))
            if norm > 1.001 * clients * clip:
                raise MessageError(
                    f"the norm of its upload is {norm:.3g}; for {plural(clients, 'client')} it can be "
                    f"{clients * clip:.3g}"
                )


def _norm(parts: Parts) -> float:
    """Return the norm of an upload, divided by its number of clients."""
    return float(_flat(parts["total"]).norm()) / len(parts["sound"]["clients"])


def _flat(upload: Tensors) -> Tensor:
    return torch.cat([torch.zeros(1), *(value.flatten().float() for value in upload.values())])
