"""Secure aggregation: the server learns the sum of what M institutions upload, and nothing about a single upload.

Every aggregation rule is encode → sum → decode, so the server needs only the sum. Institution i sends words modulo 2⁶⁴

    y_i = x_i + Σ_{j > i} p_ij − Σ_{j < i} p_ij + s_i

in which x_i is its upload in fixed point, p_ij is a mask that only i and j can compute, and s_i, its *seal*, is a mask
that only i can compute (Bonawitz et al. 2017, section 4, without the shares of secrets that let a sum survive a
dropout). The masks of pairs cancel in Σ y_i; the seals are subtracted when each institution sends the key of its own.

A round has two steps. Institutions send the result of :func:`mask`; once the server has *all* of these, it asks for
the results of :func:`seal`, 32 bytes each. If an institution is missing nothing can be decoded, and the round is
repeated with another roster and attempt. The seals protect an institution that was late rather than dead: without
them, whoever has its upload of the first attempt and the sums of both attempts finds that upload by subtraction. An
institution therefore sends the seal of at most one attempt of a round; :func:`record_masking` and
:func:`record_opening` enforce that, with a :class:`Record` that the institution stores.

Masks are ChaCha20's key stream (RFC 8439) under keys from HKDF-SHA256 (RFC 5869) of two X25519 secrets (RFC 7748) of
the pair: one of their identities, which each has pinned, and one of keys that are made for the run and deleted after
it. The whole description of a sum (run, round, attempt, what the server sent, names and keys of the roster) enters
HKDF: institutions that were sent different descriptions send noise.

``docs/deployment_privacy.md`` says what this guarantees and what it does not. Nothing here waits, writes or sends.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from bayesfed.data.optional import import_optional
from bayesfed.data.plural import plural
from bayesfed.deploy.fixed_point import WORD, Words, decode, encode
from bayesfed.settings import Times, check

LEAST, MOST = 3, 2**14
"""The smallest and largest roster: of two institutions, each would find the other's upload from the sum."""


# -- keys and sums --------------------------------------------------------------------------------


def new_key() -> bytes:
    """Return a private key, 32 bytes from the operating system: for an institution's identity, or for one run."""
    return bytes(_x25519().X25519PrivateKey.generate().private_bytes_raw())


def public_key(private: bytes) -> bytes:
    """Return the public half of a private key, 32 bytes."""
    key = _x25519().X25519PrivateKey.from_private_bytes(private)
    return bytes(key.public_key().public_bytes_raw())


def _x25519() -> Any:
    return _primitives("asymmetric.x25519")


def _primitives(module: str) -> Any:
    """Import a module of cryptography, which only secure sums need."""
    return import_optional(f"cryptography.hazmat.primitives.{module}", "'bayesfed[deploy]'")


def check_keys(keys: Mapping[str, str]) -> None:
    """Fail on public keys of a run, in hexadecimal, that cannot give a shared secret.

    Raises:
        ValueError: names the institution, or the two that have the same key.
    """
    found = {name: bytes.fromhex(key) for name, key in keys.items()}
    _check_distinct(found, "of this run")
    for name, key in found.items():
        _exchange(new_key(), key, name)


def _exchange(private: bytes, public: bytes, owner: str) -> bytes:
    """Return the X25519 secret of two keys, of which the public one has this owner."""
    x25519 = _x25519()
    theirs = x25519.X25519PublicKey.from_public_bytes(public)
    try:
        return bytes(x25519.X25519PrivateKey.from_private_bytes(private).exchange(theirs))
    except ValueError:
        raise ValueError(f"{owner!r} has a key that gives no secret") from None


@dataclass(frozen=True)
class SumId:
    """The identity of one sum, as the server announces it.

    Attributes:
        run: a name that no other run has.
        round: number of the round.
        attempt: number of the attempt at that round.
        broadcast: what the server sent to all in this round, or a digest that an institution makes of what *it* was
            sent: a server that sends different θ to different institutions could have all but one answer zeros
            (Pasquini et al. 2022).
        roster: names of the institutions whose uploads are summed, with their public keys of this run.

    Raises:
        ValueError: fewer than three institutions, or more than 16,384; an invalid key; two with the same key.
    """

    run: str
    round: Times
    attempt: Times
    broadcast: bytes
    roster: Mapping[str, bytes]

    def __post_init__(self) -> None:
        check(self)
        if not LEAST <= len(self.roster) <= MOST:
            raise ValueError(
                f"a roster of {plural(len(self.roster), 'institution')} ({', '.join(self.roster)}) is refused: a "
                f"secure sum is of {LEAST} to {MOST:,}"
            )
        _check_distinct(self.roster, "of this run")

    def digest(self) -> bytes:
        """Return 32 bytes that no other sum has."""
        roster = sorted((name, key.hex()) for name, key in self.roster.items())
        broadcast = hashlib.sha256(self.broadcast).hexdigest()
        return _hash([self.run, self.round, self.attempt, broadcast, roster])

    def __str__(self) -> str:
        return f"attempt {self.attempt} of round {self.round}"


@dataclass(frozen=True)
class Keys:
    """The keys with which an institution takes part in the sums of a run.

    Attributes:
        name: its name in rosters.
        identity: its private key for all runs.
        run_key: its private key for this run, to be deleted after it: past uploads then stay masked even if the
            identities are stolen later.
        pinned: names of all institutions that it will be summed with, and the public keys of their identities, which
            the institutions have exchanged themselves: a server that could name them could fill a roster with
            institutions that it invented.

    Raises:
        ValueError: an invalid key; two names with the same key; its own name with another key.
    """

    name: str
    identity: bytes = field(repr=False)
    run_key: bytes = field(repr=False)
    pinned: Mapping[str, bytes]

    def __post_init__(self) -> None:
        check(self)
        _check_distinct(self.pinned, "pinned")
        if self.pinned.get(self.name) != public_key(self.identity):
            raise ValueError(f"the key pinned for {self.name!r} is not that of its identity")


def _check_distinct(keys: Mapping[str, bytes], what: str) -> None:
    owners: dict[bytes, str] = {}
    for name, key in keys.items():
        if len(key) != 32:
            raise ValueError(f"the key {what} of {name!r} has {len(key)} bytes, not 32")
        if owners.setdefault(key, name) != name:
            raise ValueError(f"{owners[key]!r} and {name!r} have one key {what}")


# -- masks ----------------------------------------------------------------------------------------


def mask(upload: Mapping[str, Tensor], keys: Keys, sum_id: SumId) -> dict[str, Words]:
    """Return an upload as it may be sent: words ``(2, ...)`` by part, uniform to whoever lacks one of the keys.

    The same arguments give the same words. Never mask other contents for the same sum: :func:`record_masking`.

    Raises:
        ValueError: names the part that cannot be encoded, or what in the roster the institution does not agree to.

    Example:
        >>> import torch
        >>> from bayesfed.deploy.secure import Keys, SumId, mask, new_key, public_key, seal, unmask
        >>> identities = {name: new_key() for name in ("north", "south", "west")}
        >>> pinned = {name: public_key(key) for name, key in identities.items()}
        >>> keys = {name: Keys(name, key, new_key(), pinned) for name, key in identities.items()}
        >>> roster = {name: public_key(own.run_key) for name, own in keys.items()}
        >>> sum_id = SumId("trial", round=1, attempt=0, broadcast=b"theta", roster=roster)
        >>> upload = {"precision": torch.tensor([0.5, 2.0])}
        >>> masked = {name: mask(upload, own, sum_id) for name, own in keys.items()}
        >>> seals = {name: seal(own, sum_id) for name, own in keys.items()}
        >>> unmask(masked, seals, sum_id)
        {'precision': tensor([1.5000, 6.0000], dtype=torch.float64)}
    """
    agreed = _agreement(keys, sum_id)
    parts = {name: encode(name, upload[name]) for name in sorted(upload)}
    words = _join(parts)
    for other in sum_id.roster:
        if other != keys.name:
            stream = _stream(_pair_key(keys, other, sum_id, agreed), len(words))
            words = words + stream if keys.name < other else words - stream
    words += _stream(seal(keys, sum_id), len(words))
    return _split(words, {name: part.shape for name, part in parts.items()})


def seal(keys: Keys, sum_id: SumId) -> bytes:
    """Return the key of an institution's own mask, 32 bytes, to be sent once the server has all masked uploads.

    Call :func:`record_opening` before it is sent.
    """
    return _derive(keys.run_key, _hash(["seal", keys.name, sum_id.digest().hex()]))


def unmask(
    masked: Mapping[str, Mapping[str, Words]], seals: Mapping[str, bytes], sum_id: SumId
) -> dict[str, Tensor]:
    """Return the sum of the uploads of a roster, float64 ``(...)`` by part.

    Raises:
        ValueError: an institution has not sent its upload or its seal, or is not in the roster; uploads have different
            parts; or the result is not a sum of uploads, because institutions were sent different descriptions of it
            or pinned different keys.
    """
    for what, found in (("a masked upload", masked), ("a seal", seals)):
        if missing := sorted(sum_id.roster.keys() - found.keys()):
            raise ValueError(
                f"there is not {what} of {', '.join(missing)}: no sum without it; "
                "wait, or repeat the round with another roster and attempt"
            )
        if strange := sorted(found.keys() - sum_id.roster.keys()):
            raise ValueError(f"there is {what} of {', '.join(strange)}, not of this roster")
    first = next(iter(sum_id.roster))
    shapes = {name: part.shape for name, part in sorted(masked[first].items())}
    total = np.zeros(sum(part.size for part in masked[first].values()), np.uint64)
    for name in sum_id.roster:
        parts = masked[name]
        if {n: part.shape for n, part in parts.items()} != shapes:
            raise ValueError(f"the parts of {name}'s upload are not those of {first}'s")
        if any(part.dtype != np.uint64 or part.shape[:1] != (2,) for part in parts.values()):
            raise ValueError(f"{name}'s upload is not of masked words")
        if len(seals[name]) != 32:
            raise ValueError(f"{name}'s seal has {len(seals[name])} bytes, not 32")
        total += _join({n: parts[n] for n in shapes}) - _stream(seals[name], len(total))
    limit = len(sum_id.roster) * WORD
    if ((total.view(np.int64) > limit) | (total.view(np.int64) < -limit)).any():
        raise ValueError(
            "what was sent is no sum of uploads: institutions were sent different rosters or different θ, "
            "pinned different keys, or one sent what it did not mask"
        )
    return {name: decode(part) for name, part in _split(total, shapes).items()}


def _agreement(keys: Keys, sum_id: SumId) -> bytes:
    """Return a digest of a sum as an institution sees it: the server's announcement and its own pins."""
    if sum_id.roster.get(keys.name) != public_key(keys.run_key):
        raise ValueError(f"the roster does not have the key of this run of {keys.name!r}")
    if strange := sorted(sum_id.roster.keys() - keys.pinned.keys()):
        raise ValueError(
            f"{keys.name!r} has no pinned key of {', '.join(strange)} and is not summed with them"
        )
    pins = sorted((name, keys.pinned[name].hex()) for name in sum_id.roster)
    return _hash(["secure sum", sum_id.digest().hex(), pins])


def _pair_key(keys: Keys, other: str, sum_id: SumId, agreed: bytes) -> bytes:
    """Return the key of the mask that two institutions share."""
    secret = _exchange(keys.identity, keys.pinned[other], other)
    secret += _exchange(keys.run_key, sum_id.roster[other], other)
    return _derive(secret, _hash([agreed.hex(), *sorted((keys.name, other))]))


def _derive(secret: bytes, info: bytes) -> bytes:
    hkdf, hashes = _primitives("kdf.hkdf").HKDF, _primitives("hashes")
    return bytes(hkdf(hashes.SHA256(), 32, salt=None, info=info).derive(secret))


def _stream(key: bytes, count: int) -> Words:
    """Return words of the key stream of a key that is used for nothing else, so that its nonce may be zero."""
    ciphers = _primitives("ciphers")
    cipher = ciphers.Cipher(ciphers.algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    return np.frombuffer(cipher.update(bytes(8 * count)), dtype="<u8")


def _hash(data: list[object]) -> bytes:
    return hashlib.sha256(json.dumps(data).encode()).digest()


def _join(parts: Mapping[str, Words]) -> Words:
    """Return the words of all parts, in their order."""
    return np.concatenate([np.empty(0, np.uint64), *(part.ravel() for part in parts.values())])


def _split(words: Words, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Words]:
    """Return words as parts of these shapes, in their order."""
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()], dtype=int)
    pieces = np.split(words, ends[:-1]) if shapes else []
    return {
        name: piece.reshape(shape)
        for (name, shape), piece in zip(shapes.items(), pieces, strict=True)
    }


# -- what an institution has done ------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """The last sum that an institution masked for, stored beside its key of the run before anything is sent.

    Attributes:
        run, round, attempt: of that sum.
        digest: of that sum and its roster, in hexadecimal.
        words: digest of the masked upload, in hexadecimal.
        opened: true if its seal may have been sent.
    """

    run: str
    round: Times
    attempt: Times
    digest: str
    words: str
    opened: bool = False


def record_masking(record: Record | None, sum_id: SumId, masked: Mapping[str, Words]) -> Record:
    """Return the record to store before a masked upload is sent.

    Raises:
        ValueError: another upload or roster for a sum that was masked for already, since from two the server could
            take the masks off; an earlier round or attempt; another run, which needs another key; another attempt of a
            round whose seal was sent, since the two sums would differ by one upload.
    """
    words = hashlib.sha256()
    for name in sorted(masked):
        words.update(_hash([name, list(masked[name].shape)]))
        words.update(masked[name].tobytes())
    now = Record(sum_id.run, sum_id.round, sum_id.attempt, sum_id.digest().hex(), words.hexdigest())
    if record is None:
        return now
    if record.run != sum_id.run:
        raise ValueError(
            f"the key and record are of run {record.run!r}, not {sum_id.run!r}: make others"
        )
    new, old = (sum_id.round, sum_id.attempt), (record.round, record.attempt)
    if new < old:
        raise ValueError(
            f"{sum_id} is refused: attempt {record.attempt} of round {record.round} has been masked for since"
        )
    if new == old:
        if dataclasses.replace(record, opened=False) != now:
            raise ValueError(f"{sum_id} has been masked for already, with another upload or roster")
        return record
    if sum_id.round == record.round and record.opened:
        raise ValueError(f"{sum_id} is refused: the seal of attempt {record.attempt} has been sent")
    return now


def record_opening(record: Record | None, sum_id: SumId) -> Record:
    """Return the record to store before the seal of a sum is sent.

    Raises:
        ValueError: the sum is not the last that was masked for.
    """
    if record is None or record.digest != sum_id.digest().hex():
        raise ValueError(
            f"the seal of {sum_id} is not sent: it is not of the last sum that was masked for"
        )
    return dataclasses.replace(record, opened=True)
