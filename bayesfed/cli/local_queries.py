"""What people at a site ask of its worker: what is said of rows of theirs, new clients' too. Nothing of it leaves.

A question and its answer are JSON and go over a socket of their own, see :mod:`bayesfed.deploy.sockets`. Imports no
torch: whoever asks a worker that has the posterior at hand does not wait for it.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from bayesfed.deploy.sockets import call
from bayesfed.settings import Strict

SECONDS = 600.0
"""How long a worker may take: it answers once it has done with the round that it is in."""


class Question(Strict):
    """What is asked of rows.

    Attributes:
        rows: a CSV file's text.
        variables: of their clients' variables, in place of the rows' outcomes.
        run: of the fit, by default the last that has ended.
    """

    rows: str
    variables: bool = False
    run: str | None = None


class Told(Strict):
    """A CSV file's text, or why there is none."""

    table: str = ""
    error: str = ""


def asked(address: str, question: Question, seconds: float = SECONDS) -> str:
    """The table that the worker at a site's own socket makes.

    Raises:
        ConnectionError: no worker listens there.
        TimeoutError: it does not answer in time.
        ValueError: it says why not.
    """
    found = call(address, question.model_dump_json().encode(), seconds, here=True)
    told = Told.model_validate_json(found)
    if told.error:
        raise ValueError(told.error)
    return told.table


def question_of(payload: bytes) -> Question:
    """What is asked.

    Raises:
        ValueError: these bytes are no question.
    """
    try:
        return Question.model_validate_json(payload)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(
            f"no question: {'.'.join(map(str, first['loc']))} {first['msg']}"
        ) from None


def text_of(path: Path) -> str:
    """A CSV file's text.

    Raises:
        ValueError: it is not UTF-8.
        OSError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text: rows to predict are a CSV file") from None
