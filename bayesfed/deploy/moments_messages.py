"""The messages by which institutions reveal the moments of their clients, and get the posterior of these."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from bayesfed.deploy.coding_messages import AgreedCoding, Name, RunMessage


class Reveal(RunMessage):
    """A request for the moments of each of the node's clients.

    Attributes:
        terms: the settings that all must share.
        agreement: of a formula, its coding.
    """

    kind: Literal["reveal"] = "reveal"
    terms: dict[str, Any]
    agreement: AgreedCoding | None = None


class Revealed(RunMessage):
    """The answer to :class:`Reveal`. Tensors: ``moments``: ``counts``, ``mean`` and ``covariance``.

    Attributes:
        clients: the names of the clients.
        fields: the names of the fields, in the order of the numbers.
    """

    kind: Literal["revealed"] = "revealed"
    clients: Annotated[list[Name], Field(min_length=1)]
    fields: Annotated[list[Name], Field(min_length=1)]


class Deliver(RunMessage):
    """The posterior of the node's clients, fitted to their moments. Tensors: ``file``, with ``bytes``, its file.

    Attributes:
        agreement: of a formula, its coding.
    """

    kind: Literal["deliver"] = "deliver"
    agreement: AgreedCoding | None = None
