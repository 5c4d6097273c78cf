"""The server's side of secure sums: it stores the masked uploads, asks for the seals, and unmasks the sum."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bayesfed.deploy import secure
from bayesfed.deploy.combine import Answers
from bayesfed.deploy.contents import broadcast_digest
from bayesfed.deploy.institutions import Institutions, run_name
from bayesfed.deploy.masking import sum_id
from bayesfed.deploy.messages import (
    Ask,
    Done,
    Open,
    RoundId,
    Seal,
    Tensors,
    pack,
    unpack,
)
from bayesfed.engine.files import read_tensors, write_tensors
from bayesfed.engine.rounds import Question, Sums
from bayesfed.engine.run import Run

_ELBO = "elbo/terms"
_METADATA = "bayesfed masked uploads"


def masked_form(form: Tensors) -> Tensors:
    """Return the form of an upload once it is masked: two words for each number."""
    parts = {f"total/{name}": value for name, value in form.items()} | {
        _ELBO: torch.zeros(len(Sums._fields))
    }
    return {name: words_like(value) for name, value in parts.items()}


def words_like(value: Tensor) -> Tensor:
    """Return the form of a tensor once it is masked."""
    return torch.zeros(2, *value.shape, dtype=torch.int64)


def unmask_round(
    institutions: Institutions, run: Run, asked: Question, answers: Answers, form: Tensors
) -> tuple[Tensors, Tensor]:
    """Ask for the seals of a round, and return the sums of the uploads and of the ELBO terms.

    The masked uploads are stored before, since nodes do not answer a round again whose seals they have sent.
    """
    _save(run, answers)
    name, round_id = run_name(run), answers.round
    rate, clip, noisy = asked.rate, asked.clip, asked.noisy
    question = Ask(run=name, round=round_id, accepted=None, rate=rate, clip=clip, noisy=noisy)
    broadcast = broadcast_digest(question, asked.message)
    words = {name: parts["masked"] for name, parts in answers.replies.items()}
    found = unmask_sum(institutions, name, round_id, broadcast, words)
    total = {part: found[f"total/{part}"].to(value.dtype) for part, value in form.items()}
    return total, found[_ELBO]


def unmask_sum(
    institutions: Institutions,
    run: str,
    round_id: RoundId,
    broadcast: bytes,
    words: Mapping[str, Tensors],
) -> Tensors:
    """Ask institutions for the seals of their masked tensors, and return the sum of these, float64."""
    roster = {name: institutions.keys[name] for name in words}
    request = pack(Open(run=run, round=round_id, broadcast=broadcast.hex(), roster=roster))
    answers = institutions.request_all(dict.fromkeys(roster, request), Seal, run)
    seals = {name: bytes.fromhex(seal.seal) for name, (seal, _) in answers.items()}
    masked = {
        institution: {name: value.numpy().view(np.uint64) for name, value in parts.items()}
        for institution, parts in words.items()
    }
    return secure.unmask(masked, seals, sum_id(run, round_id, broadcast, roster))


def stored_path(run: Run) -> Path:
    """Return where masked uploads are stored until they are summed."""
    assert run.file is not None
    return run.file.path.with_name(run.file.path.name + ".masked")


def _save(run: Run, answers: Answers) -> None:
    tensors = {
        name: torch.frombuffer(bytearray(pack(Done(run=name), **parts)), dtype=torch.uint8)
        for name, parts in answers.replies.items()
    }
    data = {"round": answers.round.model_dump(), "institutions": list(answers.replies)}
    write_tensors(stored_path(run), tensors, _METADATA, data)


def load_stored(run: Run) -> Answers | None:
    """Return the masked uploads of this round whose seals were asked for before the server was restarted."""
    if not stored_path(run).exists():
        return None
    tensors, data = read_tensors(stored_path(run), _METADATA)
    round_id = RoundId(**data["round"])
    if round_id.number != run.done:
        return None
    replies = {name: unpack(tensors[name].numpy().tobytes())[1] for name in data["institutions"]}
    return Answers(round_id, replies)
