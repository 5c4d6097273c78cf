"""What sites answer in a round: what of it counts, and its sum, which the server may see the terms of or not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bayesfed.deploy import secure
from bayesfed.deploy.institutions import Due, Member, Sites
from bayesfed.deploy.messages import (
    Ask,
    MessageError,
    Open,
    Reply,
    Round,
    Seal,
    Tensors,
    asked_of_all,
    check_like,
    of_kind,
    packed,
)
from bayesfed.deploy.node_run import sum_of
from bayesfed.engine.files import read_tensors, write_tensors
from bayesfed.engine.parts import ROWS, flat, nested
from bayesfed.engine.privacy import NORMS, SHORT
from bayesfed.engine.rounds import Question, can_update
from bayesfed.engine.run import Run

TOO_LARGE = 1e3
"""By what factor an upload, a client of it, may exceed the median of the sites'."""
SAID = "said/terms"
_MASKED = "bayesfed masked uploads"


Late = dict[str, tuple[Round, dict[str, Tensors]]]
"""Answers to earlier rounds, by site, and to which."""


class Answered(NamedTuple):
    """A round's answers, by site in the order of the members."""

    round: Round
    replies: dict[str, dict[str, Tensors]]


def checked(
    sites: Sites,
    run: Run,
    asked: Question,
    number: Round,
    members: Mapping[str, Member],
    payloads: Mapping[str, bytes],
    form: Tensors,
) -> Answered:
    """The answers that count, by site in the order of the members; others are counted, and told of.

    Args:
        sites: of the run.
        run: the server's.
        asked: what the round asks.
        number: of the round, and its attempt.
        members: the sites that were asked.
        payloads: what came back, by site.
        form: an upload's parts.
    """
    found: dict[str, dict[str, Tensors]] = {}
    for name, member in members.items():
        if name not in payloads:
            sites.absent[name] += 1
            sites.say(f"round {run.done + 1}: site {name!r} has not answered in time")
            continue
        due = Due(number, int(member.own(asked.cohort).sum()))
        parts = _read(sites, run, name, due, payloads[name], form, asked.clip)
        if parts is not None:
            found[name] = parts
    if not sites.plan.secure:  # nobody can look into a secure sum
        for name in _too_large(sites, run, found):
            del found[name]
        if not sites.plan.noisy:
            for name in _spoiling(sites, run, asked, found):
                del found[name]
    return Answered(number, found)


def belated(sites: Sites, run: Run, form: Tensors, answers: Answered) -> Late:
    """Answers to earlier rounds that have come since and still count, beside those to this round."""
    found: Late = {}
    for name, payload in sites.belated().items():
        due = sites.due.pop(name, None)
        if due is None or run.done - due.round.number > sites.patience.late:
            continue
        parts = _read(sites, run, name, due, payload, form, math.inf)
        if parts is not None and not _too_large(sites, run, answers.replies | {name: parts}):
            found[name] = (due.round, parts)
            of = due.round.number + 1
            sites.say(f"round {run.done + 1}: site {name!r} has answered round {of}")
    return found


def _too_large(sites: Sites, run: Run, found: Mapping[str, dict[str, Tensors]]) -> list[str]:
    """Whose uploads are out of all proportion to the others', which are refused."""
    lengths = {name: _length(parts) for name, parts in found.items()}
    middle = float(torch.tensor(list(lengths.values())).median()) if len(found) > 2 else 0.0
    middle = middle or math.inf  # beside nothing, nothing is large
    large = [name for name, length in lengths.items() if length > TOO_LARGE * middle]
    for name in large:
        what = f"it is {lengths[name]:.3g} long a client, the sites' median is {middle:.3g}"
        _refuse(sites, run, name, what)
    return large


def _spoiling(
    sites: Sites, run: Run, asked: Question, found: Mapping[str, dict[str, Tensors]]
) -> list[str]:
    """The site after whose answer the server could not go on, as it could from those of the others; it is refused.

    Such as one that makes a precision negative, which is within all bounds. Where leaving out one site does not help,
    it is no site's fault.
    """

    def last(names: Iterable[str]) -> bool:
        some = [found[name] for name in names]
        counted = sum(int(parts["sound"]["clients"].sum()) for parts in some)
        return not counted or can_update(run, asked, summed(some, sites.plan.median)[0], counted)

    if len(found) < 3 or last(found):
        return []
    for name in sorted(found, key=lambda name: -_length(found[name])):
        if last(found.keys() - {name}):
            _refuse(
                sites, run, name, "with it the server's step has no solution, without it it has"
            )
            return [name]
    return []


def _refuse(sites: Sites, run: Run, name: str, why: object) -> None:
    sites.refused[name] += 1
    sites.say(f"round {run.done + 1}: refused what site {name!r} sent: {why}")


def _read(
    sites: Sites, run: Run, name: str, due: Due, payload: bytes, form: Tensors, clip: float
) -> dict[str, Tensors] | None:
    """What a site has answered, if it counts."""
    assert run.file is not None
    try:
        reply, parts = of_kind(payload, Reply, run.file.name)
        if reply.round != due.round:
            raise MessageError(
                f"an answer to round {reply.round.number} came in place of {due.round.number}"
            )
        sound = {"clients": torch.zeros(due.clients, dtype=torch.bool)}
        check_like("its clients", parts.get("sound", {}), sound)
        if sites.plan.secure:
            check_like("its masked upload", parts.get("masked", {}), masked(form))
        else:
            _check_plain(run, clip, parts, form, due.clients)
    except MessageError as error:
        _refuse(sites, run, name, error)
        return None
    return parts


def _check_plain(
    run: Run, clip: float, parts: Mapping[str, Tensors], form: Tensors, clients: int
) -> None:
    """Fail on an upload that has not the form of one, numbers that are none, or more than a clip allows."""
    check_like("its upload", parts.get("total", {}), form)
    check_like("its terms", parts.get("said", {}), {"terms": torch.zeros(3, dtype=torch.float64)})
    for name, value in {**parts["total"], **parts["said"]}.items():
        if not bool(value.isfinite().all()):
            raise MessageError(f"{name!r} is not finite")
    if bool((parts["total"].get(ROWS, torch.zeros(())) < 0).any()):
        raise MessageError(f"{ROWS!r} is negative")
    *terms, first = parts["said"]["terms"].tolist()
    if max(map(abs, terms)) > clients * torch.finfo(torch.float32).max:
        raise MessageError("its ELBO terms are larger than single precision has them")
    if first not in range(clients + 1):
        raise MessageError(f"{first:g} of its {clients} clients are new")
    if run.privacy.clips:
        order, most = NORMS[run.privacy.mechanism], clients * clip
        clipped = {n: v for n, v in parts["total"].items() if n != SHORT}
        length = float(torch.linalg.vector_norm(_flat(clipped), order))
        if length > 1.001 * most:
            raise MessageError(
                f"its upload is {length:.3g} long, {clients} clients' can be {most:.3g}"
            )


def _length(parts: Mapping[str, Tensors]) -> float:
    """Of an upload, a client of it."""
    return float(_flat(parts["total"]).norm()) / len(parts["sound"]["clients"])


def _flat(upload: Tensors) -> Tensor:
    return torch.cat([torch.zeros(1), *(value.flatten().float() for value in upload.values())])


def with_late(
    sites: Sites, run: Run, asked: Question, total: Tensors, counted: int, late: Late
) -> tuple[Tensors, Late]:
    """The sum with late answers, and those of them after which the server can go on; others are refused."""
    taken: Late = {}
    for name, (number, parts) in late.items():
        own = int(parts["sound"]["clients"].sum())
        more = flat(run.plan.algorithm.rule.stale(run.server, nested(parts["total"]), own))
        wider = total | {part: total[part] + value for part, value in more.items()}
        if can_update(run, asked, wider, counted):
            total, taken[name] = wider, (number, parts)
        else:
            _refuse(sites, run, name, "with it, late as it is, the server's step has no solution")
    return total, taken


def summed(replies: Sequence[dict[str, Tensors]], median: bool) -> tuple[Tensors, Tensor]:
    """What counts of what sites have sent in the open."""
    return middle(replies) if median else added(replies)


def added(replies: Sequence[dict[str, Tensors]]) -> tuple[Tensors, Tensor]:
    """The sum of what sites have sent: of their uploads, and of what they say of their ELBO terms."""
    total = {
        name: torch.stack([parts["total"][name] for parts in replies]).sum(0)
        for name in replies[0]["total"]
    }
    return total, torch.stack([parts["said"]["terms"] for parts in replies]).sum(0)


def middle(replies: Sequence[dict[str, Tensors]]) -> tuple[Tensors, Tensor]:
    """As :func:`added`, where every client has moved by the median, number by number, of the sites' mean moves."""
    total, said = added(replies)
    means, weight = [], torch.zeros(())
    for parts in replies:
        own = parts["total"].get(ROWS, parts["sound"]["clients"].sum())
        if bool(own > 0):
            means.append({name: value / own for name, value in parts["total"].items()})
            weight = weight + own
    for name in total.keys() - {ROWS} if means else ():
        total[name] = weight * torch.stack([move[name] for move in means]).median(0).values
    return total, said


def unsealed(
    sites: Sites, run: Run, asked: Question, answers: Answered, form: Tensors
) -> tuple[Tensors, Tensor]:
    """The sum of what they have masked, once each has told its seal.

    What they have sent is written before, since a round whose seals have been told is not answered again.
    """
    assert run.file is not None
    _keep(run, answers)
    name, number = run.file.name, answers.round
    rate, clip, noisy = asked.rate, asked.clip, asked.noisy
    question = Ask(run=name, round=number, accepted=None, rate=rate, clip=clip, noisy=noisy)
    broadcast = asked_of_all(question, asked.message)
    words = {site: parts["masked"] for site, parts in answers.replies.items()}
    found = opened(sites, name, number, broadcast, words)
    total = {part: found[f"total/{part}"].to(value.dtype) for part, value in form.items()}
    return total, found[SAID]


def opened(
    sites: Sites, run: str, number: Round, broadcast: bytes, words: Mapping[str, Tensors]
) -> Tensors:
    """A secure sum of what sites have masked, which are asked for their seals; float64."""
    roster = {site: sites.keys[site] for site in words}
    question = packed(Open(run=run, round=number, broadcast=broadcast.hex(), roster=roster))
    told = sites.told(dict.fromkeys(roster, question), Seal, run)
    seals = {site: bytes.fromhex(seal.seal) for site, (seal, _) in told.items()}
    masked = {
        site: {name: value.numpy().view(np.uint64) for name, value in parts.items()}
        for site, parts in words.items()
    }
    return secure.summed(masked, seals, sum_of(run, number, broadcast, roster))


def masked(form: Tensors) -> Tensors:
    """What an upload looks like once it is masked: two words a number."""
    parts = {f"total/{name}": value for name, value in form.items()} | {SAID: torch.zeros(3)}
    return {name: words_like(value) for name, value in parts.items()}


def words_like(value: Tensor) -> Tensor:
    """What stands in place of numbers in a secure sum: two words each."""
    return torch.zeros(2, *value.shape, dtype=torch.int64)


def pending(run: Run) -> Path:
    """Where masked uploads are kept until they are summed."""
    assert run.file is not None
    return run.file.path.with_name(run.file.path.name + ".masked")


def _keep(run: Run, answers: Answered) -> None:
    tensors = {
        f"{site}/{part}/{name}": value
        for site, parts in answers.replies.items()
        for part, values in parts.items()
        for name, value in values.items()
    }
    data = {"round": answers.round.model_dump(), "sites": list(answers.replies)}
    write_tensors(pending(run), tensors, _MASKED, data)


def kept(run: Run) -> Answered | None:
    """The masked uploads of this round whose seals were asked for before the server was started anew."""
    if not pending(run).exists():
        return None
    tensors, data = read_tensors(pending(run), _MASKED)
    number = Round(**data["round"])
    if number.number != run.done:
        return None
    replies: dict[str, dict[str, Tensors]] = {site: {} for site in data["sites"]}
    for full, value in tensors.items():
        site, part, name = full.split("/", 2)
        replies[site].setdefault(part, {})[name] = value
    return Answered(number, replies)
