"""Questions of an institution's own people to its node: predictions for rows of theirs. Nothing leaves the institution.

A question and its answer are JSON and go over a socket of their own, see :mod:`bayesfed.deploy.sockets`. The module
does not import torch: nobody waits for it who asks a node that has loaded the posterior already.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from bayesfed.deploy.sockets import call
from bayesfed.settings import Strict

SECONDS = 600.0
"""The longest time in which a node must answer: it first completes the round that it is computing."""


class Question(Strict):
    """A question about rows.

    Attributes:
        rows: the text of a CSV file.
        variables: true to ask for their clients' local variables, in place of the rows' outcomes.
        run: the fit to use, by default the last that has ended.
    """

    rows: str
    variables: bool = False
    run: str | None = None


class Answer(Strict):
    """The text of a CSV file, or the reason why there is none."""

    table: str = ""
    error: str = ""


def ask(address: str, question: Question, seconds: float = SECONDS) -> str:
    """Return the table that the node at an institution's own socket makes.

    Raises:
        ConnectionError: no node listens there.
        TimeoutError: the node does not answer in time.
        ValueError: the node gives a reason why there is no table.
    """
    payload = call(address, question.model_dump_json().encode(), seconds, local=True)
    answer = Answer.model_validate_json(payload)
    if answer.error:
        raise ValueError(answer.error)
    return answer.table


def read_question(payload: bytes) -> Question:
    """Return the question in these bytes.

    Raises:
        ValueError: the bytes are not a question.
    """
    try:
        return Question.model_validate_json(payload)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"not a question: {where} {first['msg']}") from None


def read_text(path: Path) -> str:
    """Return the text of a CSV file.

    Raises:
        ValueError: it is not UTF-8.
        OSError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text: rows to predict are a CSV file") from None
