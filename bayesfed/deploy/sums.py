"""Sums over all institutions of what each computes after the rounds, secure if the plan says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from bayesfed.deploy.contents import broadcast_digest, check_like
from bayesfed.deploy.institutions import Institutions
from bayesfed.deploy.messages import (
    Average,
    Averages,
    ChainSums,
    Close,
    Evaluate,
    LeaveOut,
    LeftOut,
    LogDensities,
    MoveChains,
    RoundId,
    Tensors,
    pack,
)
from bayesfed.deploy.plan import DeploymentPlan
from bayesfed.deploy.secure_round import unmask_sum, words_like
from bayesfed.engine.parts import flat

M = TypeVar("M", Average, LeaveOut, Evaluate, MoveChains)


def request_sum(
    institutions: Institutions,
    message: M,
    answer: type[Averages] | type[LeftOut] | type[LogDensities] | type[ChainSums],
    form: Callable[[Tensors], Tensors],
    what: str,
    called: str,
    sent: Mapping[str, Tensors] | None = None,
    optional: Tensors | None = None,
) -> Tensors:
    """Ask all institutions for tensors, and return their sum.

    Args:
        institutions: all that take part.
        message: the request, which gets a roster for secure sums.
        answer: the kind of the answers.
        form: returns tensors like the sums from the first answer, whose shapes may depend on it.
        what: names the sums in errors.
        called: names the request, like no other of the run.
        sent: the tensors of the request, by part and name.
        optional: tensors like further sums, which the result has if all institutions send them; not with secure sums.

    Raises:
        MessageError: an institution refuses, or answers with tensors of another form.
        TimeoutError: an institution does not answer.
    """
    secure, sent = institutions.plan.secure, sent or {}
    if secure:
        # a sum after all rounds
        round_id = RoundId(number=institutions.new_number(called), attempt=0)
        update = {"round": round_id, "roster": dict(institutions.keys)}
        message = message.model_copy(update=update)
    requests = dict.fromkeys(sorted(institutions.present), pack(message, **sent))
    answers = institutions.request_all(requests, answer, message.run)
    part = "masked" if secure else "sums"
    own = {name: parts.get(part, {}) for name, (_, parts) in answers.items()}
    expected = form(next(iter(own.values())))
    further = {name: parts.get("further", {}) for name, (_, parts) in answers.items()}
    if optional and all(further.values()):
        own = {name: sums | further[name] for name, sums in own.items()}
        expected = expected | optional
    wanted = {n: words_like(value) for n, value in expected.items()} if secure else expected
    for institution, sums in own.items():
        check_like(f"institution {institution!r}: the {what}", sums, wanted)
    if message.round is not None:
        broadcast = broadcast_digest(message, flat(sent))
        return unmask_sum(institutions, message.run, message.round, broadcast, own)
    return {name: torch.stack([sums[name] for sums in own.values()]).sum(0) for name in expected}


def requests_after_fit(plan: DeploymentPlan, run: str) -> list[bytes]:
    """Return the requests for effects and leave-one-out, which do not depend on each other's answers.

    There are none of secure sums, each of which needs the seals of the one before.
    """
    if plan.secure:
        return []
    found = [pack(Average(run=run, effect=number)) for number in range(len(plan.effects))]
    return found if plan.leave_one_out is None else [*found, pack(LeaveOut(run=run))]


def close(institutions: Institutions, run: str) -> None:
    """Say that no question follows, where there were any, and send what no request has taken along."""
    if institutions.plan.asks_after_fit:
        institutions.queue(dict.fromkeys(institutions.present, pack(Close(run=run))))
    institutions.send_queued(run)
