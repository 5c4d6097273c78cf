"""What passes between the server and a site: plain data and tensors in one safetensors file, never a pickle.

    server → site        site → server
    Hello                Schema       who are you?
    Begin                Digest       the settings, and the server's first state
    Ask                  Reply        a round; and which earlier answer was accepted
    Open                 Seal         of a secure sum: the masked uploads of all are there
    Finish               Done         the last state, of which clients make their variables
    Weigh                Weights      log densities of draws of θ, see bayesfed.output.correction
    End                  Done         what stands for q(θ)
    any of these         Refusal      why not, in words

A message is checked before anything of it is used: its plain data by pydantic, its tensors by their names, shapes and
types, see :func:`check_like`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import Field, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten

from bayesfed.settings import Strict

Name = Annotated[str, Field(min_length=1, max_length=200)]
Key = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Number = Annotated[int, Field(ge=0)]
Tensors = dict[str, Tensor]
_METADATA = "bayesfed message"


class MessageError(ValueError):
    """Bytes that are no message, or one that says what cannot be."""


class Hello(Strict):
    """Who is there?"""

    kind: Literal["hello"] = "hello"


class FieldSchema(Strict):
    """Of a field: the shape of one row of it, and its type."""

    shape: list[Number]
    dtype: Literal["float16", "bfloat16", "float32", "float64", "int64", "int32", "bool", "uint8"]


class Schema(Strict):
    """What a site has, without a number of its rows.

    Attributes:
        site: what it is called.
        clients: its clients' names.
        rows: how many rows they have together.
        client_dim: what a client is called in the data.
        gaps: fields may have missing values.
        version: of bayesfed.
    """

    kind: Literal["schema"] = "schema"
    site: Name
    clients: Annotated[list[Name], Field(min_length=1)]
    rows: Annotated[int, Field(ge=1)]
    client_dim: Name
    gaps: bool
    fields: dict[Name, FieldSchema]
    version: str


class Begin(Strict):
    """The run that a site is to take part in.

    Tensors: ``state`` the server's first, ``start`` the coordinates of the guide.

    Attributes:
        run: what it calls itself.
        terms: the settings that all must have in common.
        clients: N.
        rows: Σ n_i.
        cohort: K.
    """

    kind: Literal["begin"] = "begin"
    run: Name
    terms: dict[str, Any]
    clients: Annotated[int, Field(ge=1)]
    rows: Annotated[int, Field(ge=1)]
    cohort: Annotated[int, Field(ge=1)]


class Digest(Strict):
    """A site has begun. Tensors: ``program``, by which the server knows its model again.

    Attributes:
        key: of secure sums, the site's public key of this run, in hexadecimal.
    """

    kind: Literal["digest"] = "digest"
    run: Name
    key: Key | None = None


class Round(Strict):
    """A round's number and attempt: what is answered to the same twice has the same bytes."""

    number: Number
    attempt: Number

    @property
    def order(self) -> tuple[int, int]:
        """By which a question is earlier or later than another."""
        return self.number, self.attempt


class Ask(Strict):
    """What a round asks of a site. Tensors: ``message``, ``cohort`` the positions of its clients in it.

    Attributes:
        accepted: the round whose answer by this site the server took last, if any.
        roster: of secure sums, the sites that are asked, with their keys.
    """

    kind: Literal["ask"] = "ask"
    run: Name
    round: Round
    accepted: Round | None
    rate: float
    clip: float
    noisy: bool
    roster: dict[Name, Key] | None = None


class Reply(Strict):
    """A site's answer. Tensors: ``total``, ``sound``, ``said``; of secure sums ``masked`` and ``sound``."""

    kind: Literal["reply"] = "reply"
    run: Name
    round: Round


class Open(Strict):
    """All masked uploads of a round are there. ``broadcast`` is the digest of what was asked."""

    kind: Literal["open"] = "open"
    run: Name
    round: Round
    broadcast: Key
    roster: dict[Name, Key]


class Seal(Strict):
    """The key of a site's own mask, in hexadecimal."""

    kind: Literal["seal"] = "seal"
    run: Name
    seal: Key


class Finish(Strict):
    """The rounds are over. Tensors: ``state`` the server's last, ``history``."""

    kind: Literal["finish"] = "finish"
    run: Name
    accepted: Round | None
    done: Number
    epsilon: float | None
    moving: dict[str, float] | None
    rising: float | None
    settled: bool | None


class Weigh(Strict):
    """Draws of θ to weigh. Tensors: ``theta``, ``key``.

    Attributes:
        round: of secure sums, the number of this one.
        roster: of secure sums, all sites, with their keys.
        closely: how they are weighed, see :func:`bayesfed.output.log_densities.sum_log_weights`.
    """

    kind: Literal["weigh"] = "weigh"
    run: Name
    closely: bool = False
    round: Round | None = None
    roster: dict[Name, Key] | None = None


class Weights(Strict):
    """What a site says of them. Tensors: ``terms``; of secure sums ``masked``."""

    kind: Literal["weights"] = "weights"
    run: Name


class End(Strict):
    """The fit is over. Tensors: ``theta``, draws that stand for q(θ), if any; the rest is of these."""

    kind: Literal["end"] = "end"
    run: Name
    khat: float | None
    closely: bool = False


class Done(Strict):
    """It is done."""

    kind: Literal["done"] = "done"
    run: Name


class Refusal(Strict):
    """It cannot be done."""

    kind: Literal["refusal"] = "refusal"
    why: str


Request = Hello | Begin | Ask | Open | Finish | Weigh | End
Response = Schema | Digest | Reply | Seal | Weights | Done | Refusal
_ANY: TypeAdapter[Request | Response] = TypeAdapter(
    Annotated[Request | Response, Field(discriminator="kind")]
)
M = TypeVar("M", bound=Strict)


def packed(message: Request | Response, /, **parts: Mapping[str, Tensor]) -> bytes:
    """A message as bytes: its tensors are called ``<part>/<name>``.

    Example:
        >>> import torch
        >>> from bayesfed.deploy.messages import Weigh, packed, unpacked
        >>> sent = packed(Weigh(run="demo"), theta={"global": torch.zeros(2, 3)})
        >>> message, parts = unpacked(sent)
        >>> message.kind, parts["theta"]["global"].shape
        ('weigh', torch.Size([2, 3]))
    """
    tensors = {
        f"{part}/{name}": value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for part, values in parts.items()
        for name, value in values.items()
    }
    return save(tensors, {_METADATA: message.model_dump_json()})


def unpacked(payload: bytes) -> tuple[Request | Response, dict[str, Tensors]]:
    """The message that bytes are, and its tensors by part and name.

    Raises:
        MessageError: they are none.
    """
    try:
        tensors = load(payload)
        size = int.from_bytes(payload[:8], "little")
        text = json.loads(payload[8 : 8 + size]).get("__metadata__", {}).get(_METADATA)
        if text is None:
            raise MessageError("these bytes are a safetensors file, but no message of bayesfed's")
        message = _ANY.validate_json(text)
    except SafetensorError as error:
        raise MessageError(f"these bytes are no whole safetensors file: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise MessageError(f"a message's {where or 'data'}: {first['msg']}") from None
    except (ValueError, TypeError, AttributeError, KeyError, RuntimeError) as error:
        if isinstance(error, MessageError):
            raise
        raise MessageError(f"these bytes are no message: {error}") from None
    parts: dict[str, Tensors] = {}
    for full, value in tensors.items():
        part, slash, name = full.partition("/")
        if not slash:
            raise MessageError(f"a message's tensor is called {full!r}, not <part>/<name>")
        parts.setdefault(part, {})[name] = value
    return message, parts


def of_kind(payload: bytes, kind: type[M], run: str | None = None) -> tuple[M, dict[str, Tensors]]:
    """The message of a kind, of a run, that bytes are.

    Raises:
        MessageError: they are none, or one of another kind or run; a :class:`Refusal` says why.
    """
    message, parts = unpacked(payload)
    if isinstance(message, Refusal):  # is shown at a terminal, which obeys some characters
        raise MessageError("".join(c if c.isprintable() else " " for c in message.why[:1000]))
    if not isinstance(message, kind):
        raise MessageError(f"a message is of kind {message.kind}, not {kind.__name__.lower()}")
    if run is not None and getattr(message, "run", run) != run:
        raise MessageError("a message is of another run")
    return message, parts


def check_like(part: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Fail on tensors that have not the names, shapes and types of others.

    Raises:
        MessageError: names the tensor.
    """
    for name in [*expected, *found]:
        if name not in found or name not in expected:
            raise MessageError(
                f"{part} {'lacks' if name in expected else 'has an unknown'} {name!r}"
            )
        now, then = found[name], expected[name]
        if now.shape != then.shape or now.dtype != then.dtype:
            raise MessageError(
                f"{part} {name!r} is {now.dtype} {tuple(now.shape)} in place of {then.dtype} {tuple(then.shape)}"
            )


def leaves(state: Any) -> Tensors:
    """The tensors of nested dicts and named tuples, by their place."""
    return {keystr(at): leaf for at, leaf in tree_flatten_with_path(state)[0]}


def formed(part: str, found: Mapping[str, Tensor], form: Any) -> Any:
    """Tensors by their place, in the form of a state.

    Raises:
        MessageError: they have not its places, shapes or types.
    """
    check_like(part, found, leaves(form))
    at, tree = tree_flatten_with_path(form)
    return tree_unflatten([found[keystr(place)].to(leaf.device) for place, leaf in at], tree)


def asked_of_all(message: Ask | Weigh, sent: Mapping[str, Tensor]) -> bytes:
    """32 bytes that say what is asked of every site: a secure sum is of sites that were asked the same."""
    common = message.model_dump(include={"kind", "run", "rate", "clip", "noisy", "closely"})
    found = sha256(json.dumps(common, sort_keys=True).encode())
    for name, value in sorted(sent.items()):
        found.update(json.dumps([name, str(value.dtype), list(value.shape)]).encode())
        found.update(value.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.digest()


def schema_difference(one: Schema, other: Schema) -> str | None:
    """In what two sites' data differ that must have it in common, in words; None where in nothing."""
    for name in [*one.fields, *other.fields]:
        if name not in one.fields or name not in other.fields:
            has, lacks = (one, other) if name in one.fields else (other, one)
            return f"site {has.site!r} has a field {name!r}, site {lacks.site!r} has none"
        for what in ("shape", "dtype"):
            a, b = (getattr(schema.fields[name], what) for schema in (one, other))
            if a != b:
                return f"field {name!r} has {what} {a} at site {one.site!r} and {b} at site {other.site!r}"
    for what in ("client_dim", "version"):
        a, b = getattr(one, what), getattr(other, what)
        if a != b:
            return f"{what} is {a!r} at site {one.site!r} and {b!r} at site {other.site!r}"
    return None


def unique(schemas: Sequence[Schema]) -> None:
    """Fail on sites or clients that are called the same.

    Raises:
        MessageError: names them.
    """
    of: dict[str, str] = {}
    for schema in schemas:
        for client in schema.clients:
            if client in of:
                raise MessageError(
                    f"a client is called {client!r} at site {of[client]!r} and at site {schema.site!r}: rename one"
                )
            of[client] = schema.site
