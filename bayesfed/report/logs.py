"""The log of an institution as a table of what left it."""

from __future__ import annotations

import json
import math
from pathlib import Path

from bayesfed.report.facts import Sent


def read_log(path: Path, run: str | None = None) -> list[Sent]:
    """Return what a node has sent, by kind of message, in the order in which the kinds first occur.

    Args:
        path: the node's ``log.jsonl``.
        run: the identifier of a run, whose messages alone count, beside those that are of no run; by default all.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is not one of a node's log.
    """
    found: dict[str, Sent] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            entry = json.loads(line)
            if entry["what"] != "sent":
                continue
            message, shapes, size = entry["message"], entry["tensors"], int(entry["bytes"])
            kind, of = str(message["kind"]), message.get("run", run)
            numbers = sum(math.prod(shape) for shape in shapes.values())
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{path}, line {number} is not one of a node's log.jsonl") from None
        if run is not None and of != run:
            continue
        before = found.get(kind, Sent(kind, 0, 0, 0, {}))
        found[kind] = Sent(
            kind, before.count + 1, before.numbers + numbers, before.size + size, shapes
        )
    return list(found.values())
