"""Comparison of the institutions' data by their schemas."""

from __future__ import annotations

from collections.abc import Sequence

from bayesfed.deploy.messages import MessageError, Schema


def schema_difference(one: Schema, other: Schema) -> str | None:
    """Return the first difference of two schemas that must be alike, in words, or None."""
    first, second = f"institution {one.institution!r}", f"institution {other.institution!r}"
    for name in [*one.fields, *other.fields]:
        if name not in one.fields or name not in other.fields:
            has, lacks = (first, second) if name in one.fields else (second, first)
            return f"{has} has a field {name!r}, {lacks} has none"
        a, b = one.fields[name], other.fields[name]
        if a != b:
            return f"field {name!r} has {a} at {first} and {b} at {second}"
    for what in ("client_dim", "version"):
        a, b = getattr(one, what), getattr(other, what)
        if a != b:
            return f"{what} is {a!r} at {first} and {b!r} at {second}"
    return None


def check_unique(schemas: Sequence[Schema]) -> None:
    """Fail on clients of two institutions that have the same name.

    Raises:
        MessageError: names the client and the institutions.
    """
    owner: dict[str, str] = {}
    for schema in schemas:
        for client in schema.clients:
            if client in owner:
                raise MessageError(
                    f"a client is called {client!r} at institution {owner[client]!r} and at institution "
                    f"{schema.institution!r}: rename one"
                )
            owner[client] = schema.institution
