"""The messages by which a formula's coding is agreed, and what all messages of a run have."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from bayesfed.settings import Strict, Times

Name = Annotated[str, Field(min_length=1, max_length=200)]
Key = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Scalar = bool | int | float | str
Level = Scalar | tuple[Scalar, ...]


class RunMessage(Strict):
    """A message of the run with this identifier."""

    run: Name


class RoundId(Strict):
    """The number of a round and of an attempt at it: a node answers the same identifier with the same bytes."""

    number: Times
    attempt: Times

    @property
    def order(self) -> tuple[int, int]:
        """A key that sorts requests by time."""
        return self.number, self.attempt


class Describe(RunMessage):
    """A request for the kinds and levels of a formula's columns; ``run`` is the name of the agreement.

    Attributes:
        terms: the settings that all must share.
    """

    kind: Literal["describe"] = "describe"
    terms: dict[str, Any]


class Columns(RunMessage):
    """The answer to :class:`Describe`, as in :class:`bayesfed.formulas.columns.ClientColumns`.

    Attributes:
        key: for secure sums, the node's public key of this agreement, in hexadecimal.
    """

    kind: Literal["columns"] = "columns"
    kinds: dict[Name, Literal["number", "text", "ordered"]]
    levels: dict[Name, tuple[Level, ...]]
    within: dict[Name, Times]
    key: Key | None = None


class AgreedCoding(Strict):
    """What is agreed on a formula's coding, see :class:`bayesfed.formulas.agreement.Agreement`."""

    kinds: dict[Name, Literal["number", "text", "ordered"]]
    levels: dict[Name, tuple[Level, ...]]
    within: dict[Name, Times]
    totals: dict[Name, tuple[tuple[float, ...], ...]]


class Add(RunMessage):
    """A request for the sums over the node's clients that come next in an agreement.

    Attributes:
        agreement: so far.
        round: for secure sums, the identifier of this sum.
        roster: for secure sums, all institutions, with their public keys.
    """

    kind: Literal["add"] = "add"
    agreement: AgreedCoding
    round: RoundId | None = None
    roster: dict[Name, Key] | None = None


class Totals(RunMessage):
    """The answer to :class:`Add`. Tensors: ``sums``, see :mod:`bayesfed.deploy.coded`; with secure sums ``masked``."""

    kind: Literal["totals"] = "totals"


class Code(RunMessage):
    """An agreement with all its sums: the node codes its clients, and answers with their :class:`Schema`."""

    kind: Literal["code"] = "code"
    agreement: AgreedCoding


CodingRequest = Describe | Add | Code
CodingResponse = Columns | Totals
