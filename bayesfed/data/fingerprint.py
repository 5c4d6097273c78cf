"""A fingerprint of the clients' rows, stored in files so that changed rows are noticed: a hash per client and field.

The hashes do not depend on where the fields lie, in memory, on disk or on a device. They keep no secret: whoever has
one can confirm a guess of a small client's rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from bayesfed.data.absent import AbsentColumn
from bayesfed.data.arrow import Column
from bayesfed.data.federation import Federation
from bayesfed.data.moments import is_of_moments
from bayesfed.data.plural import plural

READ = 1_000_000
"""Numbers read at once."""
_ROWS, _FIELD = "rows", "field "


def data_fingerprint(federation: Federation) -> dict[str, Tensor]:
    """Return the clients' numbers of rows (``"rows"``) and hashes of each field (``"field <name>"``): int64 ``(N,)``.

    Example:
        >>> from bayesfed import datasets
        >>> from bayesfed.data.fingerprint import data_fingerprint
        >>> {name: len(value) for name, value in data_fingerprint(datasets.eight_schools()).items()}
        {'rows': 8, 'field y': 8, 'field sigma': 8}
    """
    if is_of_moments(federation):
        return data_fingerprint(federation.sufficient) | {_ROWS: federation.lengths.clone()}
    offsets = federation.offsets.tolist()
    hashes = {
        f"{_FIELD}{name}": torch.tensor(list(_hashes(value, offsets)), dtype=torch.int64)
        for name, value in federation.fields.items()
    }
    return {_ROWS: federation.lengths.clone()} | hashes


def describe_data_change(
    before: Mapping[str, Tensor], now: Mapping[str, Tensor], names: Sequence[str]
) -> str | None:
    """Describe the first change between two fingerprints of the same clients' data, or return None if there is none.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed.data.fingerprint import data_fingerprint, describe_data_change
        >>> one, other = (bf.Federation.from_arrays({"a": {"y": [1.0]}, "b": {"y": [y]}}) for y in (2.0, 3.0))
        >>> describe_data_change(data_fingerprint(one), data_fingerprint(other), one.names)
        "field 'y' of client 'b' has changed"
    """
    for name in [*now, *before]:
        if name not in now:
            return f"the clients have no {_label(name)} any more"
        if name not in before:
            return f"the clients had no {_label(name)} before"
        changed = (before[name] != now[name]).nonzero().flatten().tolist()
        if not changed:
            continue
        client = repr(names[changed[0]])
        more = f" (and {len(changed) - 1:,} more)" if len(changed) > 1 else ""
        if name == _ROWS:
            had, has = (int(rows[name][changed[0]]) for rows in (before, now))
            return f"client {client}{more} had {plural(had, 'row')} and now has {has:,}"
        return f"{_label(name)} of client {client}{more} has changed"
    return None


def _label(name: str) -> str:
    return f"field {name.removeprefix(_FIELD)!r}"


def _hashes(value: Tensor | Column | AbsentColumn, offsets: Sequence[int]) -> Iterator[int]:
    """Hash each client's rows; a client may be read in several pieces, and a piece may hold several clients."""
    step = max(1, READ // max(1, value.shape[1:].numel()))
    ends, whole = iter(offsets[1:]), blake2b(digest_size=8)
    end = next(ends)
    for start in range(0, offsets[-1], step):
        rows = torch.arange(start, min(start + step, offsets[-1]), device=value.device)
        read = value.index_select(0, rows).cpu().contiguous().view(len(rows), -1)
        numbers = memoryview(read.view(torch.uint8).numpy()).cast("B")  # type: ignore[arg-type]
        width, at = len(numbers) // len(rows), start
        while end <= start + len(rows):
            whole.update(numbers[(at - start) * width : (end - start) * width])
            yield int.from_bytes(whole.digest(), "big", signed=True)
            at, end, whole = end, next(ends, offsets[-1] + 1), blake2b(digest_size=8)
        whole.update(numbers[(at - start) * width :])
