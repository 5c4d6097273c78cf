"""The messages between the server and a node: plain data and tensors in one safetensors file, never a pickle.

    server → node        node → server
    Hello                Schema          a description of the institution's data
    Describe             Columns         of a formula: the kinds and levels of its columns
    Add                  Totals          of a formula: sums that its coding needs, see bayesfed.formulas.agreement
    Code                 Schema          of a formula: its coding is agreed; the schema has the coded fields
    Reveal               Revealed        moments of each client, where the plan reveals them: no round follows
    Deliver              Done            the posterior of the node's clients, fitted to them
    Begin                Digest          the settings, and the server's first state and model
    Ask                  Reply           a round, and which earlier answer the server accepted
    Open                 Seal            secure sums: the masked uploads of all institutions have arrived
    Finish               Done            the last state, from which the node makes its clients' local variables
    Evaluate             LogDensities    log densities at draws of θ, see bayesfed.output.correction
    End                  Done            the corrected draws of θ, if any
    MoveChains           ChainSums       a leapfrog step of chains, see bayesfed.output.client_chains
    Average              Averages        sums for an effect on which all have agreed, see bayesfed.effects.agreed
    LeaveOut             LeftOut         sums of leave-one-out predictive densities, see bayesfed.output.comparison
    Close                Done            no question follows: the node deletes its key of the run
    any of these         Refusal         the reason for a refusal, in words

Some travel together (:mod:`bayesfed.deploy.bundles`). A message is checked before any of it is used: pydantic checks
its plain data, :func:`~bayesfed.deploy.contents.check_like` the names, shapes and types of its tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from bayesfed.deploy.coding_messages import (
    AgreedCoding,
    CodingRequest,
    CodingResponse,
    Key,
    Name,
    RunMessage,
)
from bayesfed.deploy.coding_messages import RoundId as RoundId
from bayesfed.deploy.moments_messages import Deliver, Reveal, Revealed
from bayesfed.engine.files import metadata_text, to_bytes
from bayesfed.engine.parts import flat, nested
from bayesfed.settings import Count, Strict, Times

Tensors = dict[str, Tensor]
_METADATA = "bayesfed message"


class MessageError(ValueError):
    """Bytes that are not a message, or a message whose contents are not valid."""


class Hello(Strict):
    """A request for the schema of the institution behind an address."""

    kind: Literal["hello"] = "hello"


class FieldSchema(Strict):
    """The shape of one row of a field, and its type."""

    shape: list[Times]
    dtype: Literal["float16", "bfloat16", "float32", "float64", "int64", "int32", "bool", "uint8"]


class Schema(Strict):
    """A description of an institution's data, without any number from its rows.

    Attributes:
        institution: its name.
        clients: the names of its clients.
        rows: the number of rows of all its clients.
        client_dim: the name of the data's client dimension.
        gaps: true if fields may have missing values.
        fields: the schema of each field; empty where a formula has them, before its coding is agreed.
        version: the node's version of bayesfed.
    """

    kind: Literal["schema"] = "schema"
    institution: Name
    clients: Annotated[list[Name], Field(min_length=1)]
    rows: Count
    client_dim: Name
    gaps: bool
    fields: dict[Name, FieldSchema]
    version: str


class Begin(RunMessage):
    """The run in which a node is to take part.

    Tensors: ``state``, the server's first state; ``start``, the coordinates of the guide; ``program``, a fingerprint.

    Attributes:
        terms: the settings that all must share.
        clients: N, the number of clients.
        rows: Σ n_i, the number of rows.
        cohort: K, the number of clients in a round.
        agreement, coding: of a formula, its coding; and a digest of its program and coding.
    """

    kind: Literal["begin"] = "begin"
    terms: dict[str, Any]
    clients: Count
    rows: Count
    cohort: Count
    agreement: AgreedCoding | None = None
    coding: Key | None = None


class Digest(RunMessage):
    """The answer to :class:`Begin`. Tensors: ``program``, a fingerprint by which the server recognises its model.

    Attributes:
        key: for secure sums, the node's public key of this run, in hexadecimal.
        coding: of a formula, a digest of its program and its coding.
    """

    kind: Literal["digest"] = "digest"
    key: Key | None = None
    coding: Key | None = None


class Ask(RunMessage):
    """A round's request to a node. Tensors: ``message``; ``cohort``, the positions of the node's clients in it.

    Attributes:
        round: the round and attempt.
        accepted: the round in which the server last accepted an answer of this node, if any.
        rate: the learning rate's factor.
        clip: the largest norm of a client's upload.
        noisy: true if the uploads have the noise of differential privacy.
        roster: for secure sums, the institutions that are asked, with their public keys.
    """

    kind: Literal["ask"] = "ask"
    round: RoundId
    accepted: RoundId | None
    rate: float
    clip: float
    noisy: bool
    roster: dict[Name, Key] | None = None


class Reply(RunMessage):
    """The answer to :class:`Ask`. Tensors: ``total``, ``sound``, ``elbo``; with secure sums ``masked``, ``sound``."""

    kind: Literal["reply"] = "reply"
    round: RoundId


class Open(RunMessage):
    """A request for a seal, when all masked uploads have arrived; ``broadcast`` is the digest of the request."""

    kind: Literal["open"] = "open"
    round: RoundId
    broadcast: Key
    roster: dict[Name, Key]


class Seal(RunMessage):
    """The key of a node's own mask, in hexadecimal."""

    kind: Literal["seal"] = "seal"
    seal: Key


class Finish(RunMessage):
    """The end of the rounds. Tensors: ``state``, the server's last state; ``history``."""

    kind: Literal["finish"] = "finish"
    accepted: RoundId | None
    done: Times
    epsilon: float | None
    moving: dict[str, float] | None
    rising: float | None
    converged: bool | None


class Evaluate(RunMessage):
    """A request for log densities at draws of θ. Tensors: ``theta``, ``key``.

    Attributes:
        closely: use Laplace approximations, see :func:`bayesfed.output.log_densities.sum_log_weights`.
        probe: a :class:`~bayesfed.output.log_densities.Probe`, after which closer ones may come with the answer.
        round, roster: for secure sums, the identifier of this sum; all institutions, with their public keys.
    """

    kind: Literal["evaluate"] = "evaluate"
    closely: bool = False
    probe: tuple[Count, Count] | None = None
    round: RoundId | None = None
    roster: dict[Name, Key] | None = None


class LogDensities(RunMessage):
    """The answer to :class:`Evaluate`. Tensors: ``sums``, ``further``; with secure sums ``masked``."""

    kind: Literal["log_densities"] = "log_densities"


class MoveChains(RunMessage):
    """A leapfrog step of chains over θ. Tensors: ``chains``, with ``z``, ``taken`` and ``key``.

    Attributes:
        iteration: number of the trajectory; 0 for the start of the chains.
        step: number of the step in it.
        size: length of the step.
        round: for secure sums, the identifier of this sum.
        roster: for secure sums, all institutions, with their public keys.
    """

    kind: Literal["move_chains"] = "move_chains"
    iteration: Times
    step: Times
    size: float
    round: RoundId | None = None
    roster: dict[Name, Key] | None = None


class ChainSums(RunMessage):
    """The answer to :class:`MoveChains`. Tensors: ``sums``: ``gain``, ``slope``; with secure sums ``masked``."""

    kind: Literal["chain_sums"] = "chain_sums"


class End(RunMessage):
    """The end of the fit. Tensors: ``theta``, the draws of a :class:`~bayesfed.output.fitted.Correction`, if any."""

    kind: Literal["end"] = "end"
    khat: float | None
    closely: bool = False
    chains: Count = 1
    rhat: float | None = None
    ess: float | None = None


class Average(RunMessage):
    """A request for the sums of an effect over the rows of the node's clients.

    Attributes:
        effect: its number in the plan.
        round, roster: for secure sums, the identifier of this sum; all institutions, with their public keys.
    """

    kind: Literal["average"] = "average"
    effect: Times
    round: RoundId | None = None
    roster: dict[Name, Key] | None = None


class Averages(RunMessage):
    """The answer to :class:`Average`. Tensors: ``sums``, with ``total`` and ``weight``; with secure sums ``masked``."""

    kind: Literal["averages"] = "averages"


class LeaveOut(RunMessage):
    """A request for sums of leave-one-out predictive densities over the node's clients.

    Tensors: ``weights``, of the models, for the sums from which stacking weights follow; else none.

    Attributes:
        round: for secure sums, the identifier of this sum.
        roster: for secure sums, all institutions, with their public keys.
    """

    kind: Literal["leave_out"] = "leave_out"
    round: RoundId | None = None
    roster: dict[Name, Key] | None = None


class LeftOut(RunMessage):
    """The answer to :class:`LeaveOut`. Tensors: ``sums``; with secure sums ``masked``."""

    kind: Literal["left_out"] = "left_out"


class Close(RunMessage):
    """The end of all questions about a run, where the plan has effects or leave-one-out."""

    kind: Literal["close"] = "close"


class Done(RunMessage):
    """The answer to a request that needs no other."""

    kind: Literal["done"] = "done"


class Refusal(Strict):
    """The reason why a request was refused."""

    kind: Literal["refusal"] = "refusal"
    why: str


Request = (
    Hello
    | CodingRequest
    | Reveal
    | Deliver
    | Begin
    | Ask
    | Open
    | Finish
    | Evaluate
    | MoveChains
    | End
    | Average
    | LeaveOut
    | Close
)
Response = (
    Schema
    | CodingResponse
    | Revealed
    | Digest
    | Reply
    | Seal
    | LogDensities
    | ChainSums
    | Averages
    | LeftOut
    | Done
    | Refusal
)
_ANY: TypeAdapter[Request | Response] = TypeAdapter(
    Annotated[Request | Response, Field(discriminator="kind")]
)
M = TypeVar("M", bound=Strict)


def pack(message: Request | Response, /, **parts: Mapping[str, Tensor]) -> bytes:
    """Return a message as bytes; its tensors are called ``<part>/<name>``.

    Example:
        >>> import torch
        >>> from bayesfed.deploy.messages import Evaluate, pack, unpack
        >>> payload = pack(Evaluate(run="demo"), theta={"global": torch.zeros(2, 3)})
        >>> message, parts = unpack(payload)
        >>> message.kind, parts["theta"]["global"].shape
        ('evaluate', torch.Size([2, 3]))
    """
    return to_bytes(flat(parts), _METADATA, message.model_dump_json())


def unpack(payload: bytes) -> tuple[Request | Response, dict[str, Tensors]]:
    """Return the message in these bytes, and its tensors by part and name.

    Raises:
        MessageError: the bytes are not a message.
    """
    try:
        tensors, text = load(payload), metadata_text(payload, _METADATA)
        message = None if text is None else _ANY.validate_json(text)
    except SafetensorError as error:
        raise MessageError(f"these bytes are not a whole safetensors file: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise MessageError(f"a message's {where or 'data'}: {first['msg']}") from None
    except (ValueError, TypeError, AttributeError, KeyError, RuntimeError) as error:
        raise MessageError(f"these bytes are not a message: {error}") from None
    if message is None:
        raise MessageError("these bytes are a safetensors file, but not a bayesfed message")
    for full in tensors:
        if "/" not in full:
            raise MessageError(f"a message's tensor is called {full!r}, not <part>/<name>")
    return message, nested(tensors)


def unpack_as(
    payload: bytes, kind: type[M], run: str | None = None
) -> tuple[M, dict[str, Tensors]]:
    """Return the message in these bytes, which must be of this kind and of this run.

    Raises:
        MessageError: the bytes are not such a message; a :class:`Refusal` gives its reason.
    """
    message, parts = unpack(payload)
    if isinstance(message, Refusal):  # it is printed on a terminal, which obeys some characters
        raise MessageError("".join(c if c.isprintable() else " " for c in message.why[:1000]))
    if not isinstance(message, kind):
        raise MessageError(f"a message is of kind {message.kind}, not {kind.__name__.lower()}")
    if run is not None and getattr(message, "run", run) != run:
        raise MessageError("a message is of another run")
    return message, parts


def summarise(message: Request | Response, parts: Mapping[str, Tensors]) -> dict[str, Any]:
    """Return the contents of a message for a log: its plain data and the shapes of its tensors."""
    shapes = {name: list(value.shape) for name, value in flat(parts).items()}
    hidden = {"fields", "clients"} if message.kind == "schema" else set()
    return {"message": message.model_dump(exclude=hidden), "tensors": shapes}
