"""An institution's side of a run by post: what would leave it in answer to a letter, in words, and the signed answer.

The node computes its answers before anybody is asked for consent, so that what is shown is what the file has: names
and counts are of these numbers. Nothing leaves before consent, and the log says "sent" after it. A letter that is
answered a second time has the same answer.

    letters.json       the number and digest of the last letter of each study that was read
    signing.key        the institution's key, which only its owner can read
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesfed.data.federation import Federation
from bayesfed.data.plural import plural
from bayesfed.deploy.coding_messages import Columns, Totals
from bayesfed.deploy.letters import (
    Letter,
    LetterAnswer,
    SignedFile,
    new_signing_key,
    public_signing_key,
    read_letter,
    sign_letter,
)
from bayesfed.deploy.masking import load_or_make_key
from bayesfed.deploy.messages import (
    Ask,
    Average,
    Averages,
    Digest,
    LeaveOut,
    LeftOut,
    LogDensities,
    MessageError,
    MoveChains,
    Refusal,
    Reply,
    Request,
    Response,
    Schema,
    Seal,
    summarise,
    unpack,
)
from bayesfed.deploy.moments_messages import Revealed
from bayesfed.deploy.node import Node
from bayesfed.deploy.plan import DeploymentPlan
from bayesfed.engine.files import atomically

_LETTERS, _KEY = "letters.json", "signing.key"
_NAMED = 5
"""The most clients that are named one by one."""


@dataclass(frozen=True)
class Draft:
    """An answer that has not left.

    Attributes:
        letter: that it answers.
        replies: the node's messages.
        lines: what would leave, in words.
    """

    letter: SignedFile
    replies: tuple[bytes, ...]
    lines: tuple[str, ...]

    @property
    def final(self) -> bool:
        """True if the letter needs no answer."""
        return isinstance(self.letter.head, Letter) and self.letter.head.final


def signing_key(folder: Path) -> bytes:
    """Return an institution's private key; make one if there is none."""
    folder.mkdir(parents=True, exist_ok=True)
    return load_or_make_key(folder / _KEY, new_signing_key)


def draft_answer(node: Node, data: bytes, coordinator: str) -> Draft:
    """Return a node's answer to a letter, before anybody has agreed to send it.

    Args:
        node: of the institution.
        data: the letter.
        coordinator: the public key of the coordinator, which has signed it.

    Raises:
        MessageError: the letter is not of the coordinator, not for this institution, or an old one; the node refuses
            a message in it.
    """
    file = read_letter(data)
    head = file.head
    if not isinstance(head, Letter):
        raise MessageError("it is an institution's answer, not a letter of the coordinator")
    file.check(coordinator, "the coordinator")
    if node.name not in head.requests:
        others = ", ".join(head.requests)
        raise MessageError(f"the letter is not for institution {node.name!r}, but for {others}")
    folder = Path(node.folder)
    _check_order(folder, head, file.digest)
    replies, lines = [], []
    for payload in file.requests_to(node.name):
        request, parts = unpack(payload)
        if isinstance(request, LeaveOut) and "weights" in parts:
            raise MessageError(
                "stacking weights are for runs over a network, where the node counts what is asked"
            )
        if isinstance(request, MoveChains):
            raise MessageError("chains are for runs over a network: each step would be a letter")
        reply = node.answer(payload)
        (response, found) = unpack(reply)
        if isinstance(response, Refusal):
            raise MessageError(response.why)
        replies.append(reply)
        lines += describe_reply(request, parts, response, found, _rows(node.federation), node.plan)
    _note(folder, head, file.digest)
    return Draft(file, tuple(replies), tuple(lines))


def sign_answer(node: Node, draft: Draft) -> bytes:
    """Return the file that leaves, once the log says that it does."""
    head = draft.letter.head
    for reply in draft.replies:
        message, parts = unpack(reply)
        how = {"by": "post", "study": head.study, "letter": head.number}
        node.record("sent", bytes=len(reply), **summarise(message, parts), **how)
    answer = LetterAnswer(
        study=head.study, number=head.number, letter=draft.letter.digest, institution=node.name
    )
    return sign_letter(answer, draft.replies, signing_key(Path(node.folder)))


def decline(node: Node, draft: Draft) -> None:
    """Log that a person has not agreed to send an answer."""
    node.record("declined", study=draft.letter.head.study, letter=draft.letter.head.number)


def public_key_of(folder: Path) -> str:
    """Return an institution's public key, 64 hexadecimal digits."""
    return public_signing_key(signing_key(folder))


def _check_order(folder: Path, letter: Letter, digest: str) -> None:
    """Fail on a letter before the last one that was read, and on another one of the same number."""
    number, before = _last_letters(folder).get(letter.study, (0, ""))
    if letter.number < number:
        raise MessageError(
            f"it is an old letter, number {letter.number}; letter {number} of this study was read before"
        )
    if letter.number == number and digest != before:
        raise MessageError(f"another letter {number} of this study was read before")


def _note(folder: Path, letter: Letter, digest: str) -> None:
    letters = _last_letters(folder) | {letter.study: (letter.number, digest)}
    with atomically(folder / _LETTERS) as file:
        file.write_text(json.dumps(letters), encoding="utf-8")


def _last_letters(folder: Path) -> dict[str, tuple[int, str]]:
    path = folder / _LETTERS
    if not path.exists():
        return {}
    return {study: (n, d) for study, (n, d) in json.loads(path.read_text("utf-8")).items()}


# -- in words -------------------------------------------------------------------------------------


def describe_reply(
    request: Request | Response,
    asked: Mapping[str, Mapping[str, Tensor]],
    reply: Request | Response,
    found: Mapping[str, Mapping[str, Tensor]],
    rows: Mapping[str, int],
    plan: DeploymentPlan,
) -> list[str]:
    """Return what a reply reveals, in lines of text: quantities, counts, and the clients and rows that they are of.

    Args:
        request: that it answers.
        asked: the tensors of the request.
        reply: the reply.
        found: the tensors of the reply.
        rows: the institution's clients, and the number of rows of each.
        plan: the fit on which all have agreed.
    """
    everyone = _clients(rows, torch.arange(len(rows)))
    numbers = sum(_count(one) for one in found.values())
    if isinstance(reply, Schema):
        return [
            f"a description of the data: the institution's name, the names of its clients ({_listed(reply.clients)}; "
            f"{len(reply.clients)} in all), the number of their rows ({reply.rows}), and name, shape and type of "
            f"{len(reply.fields)} fields ({_listed(list(reply.fields))}); no value of a row"
        ]
    if isinstance(reply, Revealed):
        total = int(found["moments"]["counts"].sum())
        return [
            f"of each of {everyone}: the number of its rows ({total} in all), the means of {len(reply.fields)} fields "
            f"({_listed(reply.fields)}), and their variances and covariances",
            f"  {_numbers(numbers)} in all, which the coordinator can read: no secure sums",
            "  without noise; they can show parts of rows, see the page on the threat model",
        ]
    if isinstance(reply, Digest):
        key = "" if reply.key is None else "; and the public key of secure sums in this run"
        return [
            f"a fingerprint of the model: {_numbers(numbers)}, its log densities at made-up values; no value of a "
            f"row{key}"
        ]
    if isinstance(reply, Reply) and isinstance(request, Ask):
        return _describe_round(request, asked, found, rows, plan)
    if isinstance(reply, Columns):
        levels = [
            f"  levels of {name}: {', '.join(map(str, own))}" for name, own in reply.levels.items()
        ]
        within = [
            f"  the largest number of levels of {name} at a client: {count}; no level"
            for name, count in reply.within.items()
        ]
        if reply.key is not None:
            within.append("  the public key of secure sums in this agreement")
        return [
            f"for the formula's coding, of the columns {', '.join(reply.kinds)}: whether they hold numbers or text",
            *levels,
            *within,
            "  without noise; no count of a level and no value of a row",
        ]
    if isinstance(reply, Totals):
        named = found.get("masked", found.get("sums", {}))
        return [
            f"for the formula's coding: sums over {everyone}, of",
            *(f"  {name}: {_numbers(value.shape[-1])}" for name, value in named.items()),
            "  the number of rows, sums and sums of squares; of the column of a level that is the number of its rows",
            *_masking(plan, numbers),
            "  without noise",
        ]
    if isinstance(reply, LogDensities):
        what = f"at {_draws(asked['theta'])} draws of the global variables: sums over {everyone}"
        closer = [
            f"  and closer estimates of these sums, at {len(own['closer'])} of the draws"
            for own in [found.get("further", {})]
            if "closer" in own
        ]
        return [f"log densities {what}", *closer, *_masking(plan, numbers), "  without noise"]
    if isinstance(reply, Averages) and isinstance(request, Average):
        effect = plan.effects[request.effect]
        return [
            f"for effect {request.effect + 1} ({effect.kind} of {', '.join(effect.variables)}): sums over the rows of "
            f"{everyone} of the expected outcome, at {effect.num_samples} draws of the global variables",
            *_masking(plan, numbers),
            "  without noise",
        ]
    if isinstance(reply, LeftOut) and plan.leave_one_out is not None:
        unit = plan.leave_one_out.unit
        return [
            f"leave-one-out of each {unit}: sums of predictive densities over {everyone}",
            *_masking(plan, numbers),
            "  without noise",
        ]
    if isinstance(reply, Seal):
        return [
            "the key that takes this institution's own mask off its masked upload: the coordinator then has the sum "
            "over all institutions, and no single upload"
        ]
    return []


def _describe_round(
    request: Ask,
    asked: Mapping[str, Mapping[str, Tensor]],
    found: Mapping[str, Mapping[str, Tensor]],
    rows: Mapping[str, int],
    plan: DeploymentPlan,
) -> list[str]:
    clients = asked["cohort"]["clients"]
    lines = [f"round {request.round.number + 1}: sums over {_clients(rows, clients)}, of"]
    if "masked" in found:
        parts = {n.removeprefix("total/"): v[0] for n, v in found["masked"].items()}
        parts.pop("elbo/terms", None)
    else:
        parts = dict(found["total"])
    lines += [f"  {name}: {_numbers(value.numel())}" for name, value in parts.items()]
    lines += ["  terms of the ELBO, and counts of clients: 4 numbers"]
    lines += [
        f"  and for each of these clients whether its upload is finite: {len(clients)} yes or no"
    ]
    lines += _masking(plan, sum(_count(one) for one in found.values()))
    if plan.noisy:
        mine = "this institution's share of the noise is" if plan.secure else "no noise is"
        lines += [f"  {mine} in these numbers"]
        lines += [] if plan.secure else ["  the coordinator adds noise to the sum that it receives"]
    else:
        lines += ["  without noise"]
    if plan.privacy is not None:
        lines += [f"  each client's upload is clipped to the norm {request.clip:g}"]
    return lines


def _masking(plan: DeploymentPlan, numbers: int) -> list[str]:
    if plan.secure:
        return [
            f"  masked ({_numbers(numbers)} in the file): the coordinator can compute the sum over all institutions, "
            "and nothing less"
        ]
    return [f"  {_numbers(numbers)} in all, which the coordinator can read: no secure sums"]


def _rows(clients: Federation | Mapping[str, Any]) -> dict[str, int]:
    """Return the number of rows of each client."""
    if isinstance(clients, Federation):
        return dict(zip(clients.names, clients.lengths.tolist(), strict=True))
    return {name: len(rows) for name, rows in clients.items()}


def _clients(rows: Mapping[str, int], clients: Tensor) -> str:
    """Return clients and the number of their rows in words."""
    everyone = list(rows)
    names = [everyone[i] for i in clients.tolist()]
    count = sum(rows[name] for name in names)
    which = f"client {names[0]}" if len(names) == 1 else f"{len(names)} clients ({_listed(names)})"
    return f"{which} with {plural(count, 'row')}"


def _listed(names: Iterable[str]) -> str:
    first = list(names)
    return ", ".join(first[:_NAMED]) + (", ..." if len(first) > _NAMED else "")


def _numbers(count: int) -> str:
    return plural(count, "number")


def _count(tensors: Mapping[str, Tensor]) -> int:
    return sum(math.prod(value.shape) for value in tensors.values())


def _draws(theta: Mapping[str, Tensor]) -> int:
    return len(next(iter(theta.values())))
