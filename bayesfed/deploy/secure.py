"""Secure sums: a server that is told the sum of what M sites upload, and nothing of what any one of them did.

Every rule is encode → sum → decode, so the sum is all that the server needs. Site i sends words modulo 2⁶⁴

    y_i = x_i + Σ_{j > i} p_ij − Σ_{j < i} p_ij + s_i

in which x_i is its upload in fixed point, p_ij is a mask that only i and j know and s_i, its *seal*, one that only i
knows (Bonawitz et al. 2017, section 4, without the shares of secrets that let sums go on after a dropout). The masks
of pairs cancel in Σ y_i; the seals are taken off when each site tells the key of its own.

A round has two steps: sites send what :func:`mask` gives; once the server has that of *all* of them it asks for what
:func:`seal` gives, 32 bytes a site. If a site is missing nothing can be decoded, and the round is repeated with
another roster and attempt. The seals are there for the site that was not dead but late: without them whoever has its
upload of the first attempt and the sums of both would have it by subtraction. A site therefore tells the seal of one
attempt of a round at most; :func:`sending` and :func:`opening` hold that, with a :class:`Record` that the site keeps.

Masks are ChaCha20's key stream (RFC 8439) under keys from HKDF-SHA256 (RFC 5869), of two X25519 secrets (RFC 7748) of
the pair: one of their identities, which each has pinned, and one of keys that are made for the run and deleted after
it. All that a sum is of (run, round, attempt, what the server sent, names and keys of the roster) goes into HKDF:
sites that were told different things send noise.

What this is worth, and what it is not, is in ``docs/deployment_privacy.md``. Nothing here waits, writes or sends.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bayesfed.settings import Times, check

try:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
except ImportError as error:
    raise ImportError(
        "secure sums need cryptography: python -m pip install 'bayesfed[deploy]'"
    ) from error

Words = NDArray[np.uint64]
"""Integers modulo 2⁶⁴: of an upload's part ``(2, ...)``, its high words and its low ones."""

LEAST, MOST = 3, 2**14
"""How many sites a roster may have: of two, each would know the other's upload from the sum."""
LARGEST = 2.0**40
"""How large a number may be in size: about 10¹²."""
HIGH, LOW = 8, 49
"""x is high · 2⁻⁸ + low · 2⁻⁵⁷. Both words are at most 2⁴⁸ in size, so sums of :data:`MOST` of them stay below 2⁶³."""
_WORD = 2**48


# -- keys and sums --------------------------------------------------------------------------------


def new_key() -> bytes:
    """A private key, 32 bytes from the operating system: for a site's identity, or for one run."""
    return X25519PrivateKey.generate().private_bytes_raw()


def check_keys(keys: Mapping[str, str]) -> None:
    """Fail on public keys of a run, in hexadecimal, by which no secret can be agreed upon.

    Raises:
        ValueError: names the site, or the two that have one key.
    """
    found = {name: bytes.fromhex(key) for name, key in keys.items()}
    _distinct(found, "of this run")
    for name, key in found.items():
        try:
            X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(key))
        except ValueError:
            raise ValueError(f"{name!r} has a key that gives no secret") from None


def public_key(private: bytes) -> bytes:
    """What others may know of a private key, 32 bytes."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


@dataclass(frozen=True)
class Sum:
    """One sum, as the server announces it.

    Attributes:
        run: what no other run is called.
        round: number of the round.
        attempt: which try of that round.
        broadcast: what the server sent to all for this round, or a digest that a site makes of what *it* was sent: a
            server that sends different θ to different sites could have all but one answer zeros (Pasquini et al.
            2022).
        roster: names of the sites whose uploads are summed, with their public keys of this run.

    Raises:
        ValueError: fewer than three sites, or more than 16,384; what is no key; two sites with one key.
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
                f"a roster of {len(self.roster)} sites ({', '.join(self.roster)}) is refused: a secure sum is of "
                f"{LEAST} to {MOST:,}"
            )
        _distinct(self.roster, "of this run")

    def digest(self) -> bytes:
        """32 bytes that no other sum has."""
        roster = sorted((name, key.hex()) for name, key in self.roster.items())
        broadcast = hashlib.sha256(self.broadcast).hexdigest()
        return _hashed([self.run, self.round, self.attempt, broadcast, roster])


@dataclass(frozen=True)
class Site:
    """What a site brings to the sums of a run.

    Attributes:
        name: its name in rosters.
        identity: its private key for all runs.
        run_key: its private key for this run, to be deleted after it: what was sent then stays masked even if the
            identities are stolen later.
        pinned: names of all sites that it will be summed with, and the public keys of their identities, agreed upon by
            the sites themselves: a server that could name them could fill a roster with sites of its own.

    Raises:
        ValueError: what is no key; two names with one key; its own name with another key.
    """

    name: str
    identity: bytes = field(repr=False)
    run_key: bytes = field(repr=False)
    pinned: Mapping[str, bytes]

    def __post_init__(self) -> None:
        check(self)
        _distinct(self.pinned, "pinned")
        if self.pinned.get(self.name) != public_key(self.identity):
            raise ValueError(f"the key pinned for {self.name!r} is not that of its identity")


def _distinct(keys: Mapping[str, bytes], what: str) -> None:
    owners: dict[bytes, str] = {}
    for name, key in keys.items():
        if len(key) != 32:
            raise ValueError(f"the key {what} of {name!r} has {len(key)} bytes, not 32")
        if owners.setdefault(key, name) != name:
            raise ValueError(f"{owners[key]!r} and {name!r} have one key {what}")


# -- fixed point ----------------------------------------------------------------------------------


def encoded(name: str, value: Tensor) -> Words:
    """A part of an upload in fixed point, ``(2, ...)``: to the nearest multiple of 2⁻⁵⁷.

    Exact for single precision from 2⁻³⁴ on in size, for double precision from 2⁻⁵ on, and for whole numbers.

    Raises:
        ValueError: complex numbers, one that is not finite, or one above 2⁴⁰ in size.

    Example:
        >>> import torch
        >>> from bayesfed.deploy.secure import decoded, encoded
        >>> a, b = torch.tensor([1e8, 0.1]), torch.tensor([-1e-9, -0.3])
        >>> bool((decoded(encoded("a", a) + encoded("b", b)) == a.double() + b.double()).all())
        True
    """
    if value.is_complex():
        raise ValueError(f"{name} is complex: send its real and imaginary parts")
    x = value.detach().cpu().double().numpy()
    if not np.isfinite(x).all():
        raise ValueError(f"{name} has numbers that are not finite: nothing of this upload is sent")
    if np.abs(x).max(initial=0) > LARGEST:
        raise ValueError(
            f"{name} has numbers up to {np.abs(x).max():.3g} in size, above {LARGEST:.3g}: "
            "nothing of this upload is sent"
        )
    x = np.ldexp(x, HIGH)
    high = np.rint(x)
    low = np.rint(np.ldexp(x - high, LOW))
    return np.stack([high, low]).astype(np.int64).view(np.uint64)


def decoded(total: Words) -> Tensor:
    """A sum of encoded parts, float64 ``(...)``: rounded once, correctly below 2⁴⁵ in size."""
    high, low = (np.asarray(words) for words in total.view(np.int64))
    carry = (low + _WORD) >> LOW
    value = np.ldexp((high + carry).astype(float), -HIGH)
    return torch.as_tensor(value + np.ldexp((low - (carry << LOW)).astype(float), -HIGH - LOW))


# -- masks ----------------------------------------------------------------------------------------


def mask(upload: Mapping[str, Tensor], site: Site, of: Sum) -> dict[str, Words]:
    """A site's upload as it may be sent: words ``(2, ...)`` by part, uniform to whoever lacks one of their keys.

    The same arguments give the same words. Other contents must never be masked for the same sum: :func:`sending`.

    Raises:
        ValueError: names the part that cannot be encoded, or what in the roster the site does not agree to.

    Example:
        >>> import torch
        >>> from bayesfed.deploy.secure import Site, Sum, mask, new_key, public_key, seal, summed
        >>> identities = {name: new_key() for name in ("north", "south", "west")}
        >>> pinned = {name: public_key(key) for name, key in identities.items()}
        >>> sites = {name: Site(name, key, new_key(), pinned) for name, key in identities.items()}
        >>> roster = {name: public_key(site.run_key) for name, site in sites.items()}
        >>> of = Sum("trial", round=1, attempt=0, broadcast=b"theta", roster=roster)
        >>> upload = {"precision": torch.tensor([0.5, 2.0])}
        >>> masked = {name: mask(upload, site, of) for name, site in sites.items()}
        >>> seals = {name: seal(site, of) for name, site in sites.items()}
        >>> summed(masked, seals, of)
        {'precision': tensor([1.5000, 6.0000], dtype=torch.float64)}
    """
    agreed = _agreed(site, of)
    parts = {name: encoded(name, upload[name]) for name in sorted(upload)}
    words = np.concatenate([np.empty(0, np.uint64), *(part.ravel() for part in parts.values())])
    for other in of.roster:
        if other != site.name:
            stream = _stream(_pair_key(site, other, of, agreed), len(words))
            if site.name < other:
                words += stream
            else:
                words -= stream
    words += _stream(seal(site, of), len(words))
    return _divided(words, {name: part.shape for name, part in parts.items()})


def seal(site: Site, of: Sum) -> bytes:
    """The key of a site's own mask, 32 bytes: for the server once it has the masked uploads of all, see `opening`."""
    return _derived(site.run_key, _hashed(["seal", site.name, of.digest().hex()]))


def summed(
    masked: Mapping[str, Mapping[str, Words]], seals: Mapping[str, bytes], of: Sum
) -> dict[str, Tensor]:
    """Σ of the uploads of a roster, float64 ``(...)`` by part.

    Raises:
        ValueError: a site has not sent its upload or its seal, or is not of the roster; uploads have different parts;
            or what comes out is no sum of uploads, as sites were told different things or pinned different keys.
    """
    for what, found in (("a masked upload", masked), ("a seal", seals)):
        if missing := sorted(of.roster.keys() - found.keys()):
            raise ValueError(
                f"there is not {what} of {', '.join(missing)}: no sum without it; "
                "wait, or repeat the round with another roster and attempt"
            )
        if strange := sorted(found.keys() - of.roster.keys()):
            raise ValueError(f"there is {what} of {', '.join(strange)}, not of this roster")
    first = next(iter(of.roster))
    shapes = {name: part.shape for name, part in masked[first].items()}
    size = sum(part.size for part in masked[first].values())
    total = np.zeros(size, np.uint64)
    for site in of.roster:
        parts = masked[site]
        if {name: part.shape for name, part in parts.items()} != shapes:
            raise ValueError(f"the parts of {site}'s upload are not those of {first}'s")
        if any(part.dtype != np.uint64 or part.shape[:1] != (2,) for part in parts.values()):
            raise ValueError(f"{site}'s upload is not of masked words")
        if len(seals[site]) != 32:
            raise ValueError(f"{site}'s seal has {len(seals[site])} bytes, not 32")
        total += np.concatenate(
            [np.empty(0, np.uint64), *(parts[name].ravel() for name in sorted(parts))]
        )
        total -= _stream(seals[site], size)
    limit = len(of.roster) * _WORD
    if ((total.view(np.int64) > limit) | (total.view(np.int64) < -limit)).any():
        raise ValueError(
            "what was sent is no sum of uploads: sites were told different rosters or sent different θ, "
            "pinned different keys, or one sent what it did not mask"
        )
    return {
        n: decoded(part)
        for n, part in _divided(total, {n: shapes[n] for n in sorted(shapes)}).items()
    }


def _agreed(site: Site, of: Sum) -> bytes:
    """What a site takes the sum to be of: the server's announcement and its own pins."""
    if of.roster.get(site.name) != public_key(site.run_key):
        raise ValueError(f"the roster does not have the key of this run of {site.name!r}")
    if strange := sorted(of.roster.keys() - site.pinned.keys()):
        raise ValueError(
            f"{site.name!r} has no pinned key of {', '.join(strange)} and is not summed with them"
        )
    pins = sorted((name, site.pinned[name].hex()) for name in of.roster)
    return _hashed(["secure sum", of.digest().hex(), pins])


def _pair_key(site: Site, other: str, of: Sum, agreed: bytes) -> bytes:
    try:
        secret = b"".join(
            X25519PrivateKey.from_private_bytes(own).exchange(
                X25519PublicKey.from_public_bytes(theirs)
            )
            for own, theirs in (
                (site.identity, site.pinned[other]),
                (site.run_key, of.roster[other]),
            )
        )
    except ValueError:
        raise ValueError(f"{other!r} has a key that gives no secret") from None
    return _derived(secret, _hashed([agreed.hex(), *sorted((site.name, other))]))


def _derived(secret: bytes, info: bytes) -> bytes:
    return HKDF(hashes.SHA256(), 32, salt=None, info=info).derive(secret)


def _stream(key: bytes, count: int) -> Words:
    """So many words of a key that serves for nothing else, so that its nonce may be zero."""
    cipher = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    return np.frombuffer(cipher.update(bytes(8 * count)), dtype="<u8")


def _hashed(data: list[object]) -> bytes:
    return hashlib.sha256(json.dumps(data).encode()).digest()


def _divided(words: Words, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Words]:
    """Words in the order of the parts, in their shapes."""
    divided, start = {}, 0
    for name, shape in shapes.items():
        end = start + math.prod(shape)
        divided[name] = words[start:end].reshape(shape)
        start = end
    return divided


# -- what a site has done -------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """What a site keeps beside its key of a run: the last sum that it masked for. Written before anything is sent.

    Attributes:
        run, round, attempt: of that sum.
        digest: of that sum and its roster, in hexadecimal.
        words: digest of the masked upload, in hexadecimal.
        opened: whether its seal may have been told.
    """

    run: str
    round: Times
    attempt: Times
    digest: str
    words: str
    opened: bool = False


def sending(record: Record | None, of: Sum, masked: Mapping[str, Words]) -> Record:
    """What a site keeps before it sends a masked upload.

    Raises:
        ValueError: another upload or roster for a sum that it has masked for already, from which two the server could
            take the masks off; an earlier round or attempt; another run, which needs another key; another attempt of a
            round whose seal it has told, the two sums of which could be told apart.
    """
    words = hashlib.sha256()
    for name in sorted(masked):
        words.update(_hashed([name, list(masked[name].shape)]))
        words.update(masked[name].tobytes())
    now = Record(of.run, of.round, of.attempt, of.digest().hex(), words.hexdigest())
    if record is None:
        return now
    what = f"attempt {of.attempt} of round {of.round}"
    if record.run != of.run:
        raise ValueError(
            f"the key and record are of run {record.run!r}, not {of.run!r}: make others"
        )
    if (of.round, of.attempt) < (record.round, record.attempt):
        raise ValueError(
            f"{what} is refused: attempt {record.attempt} of round {record.round} has been masked for since"
        )
    if (of.round, of.attempt) == (record.round, record.attempt):
        if dataclasses.replace(record, opened=False) != now:
            raise ValueError(f"{what} has been masked for already, with another upload or roster")
        return record
    if of.round == record.round and record.opened:
        raise ValueError(f"{what} is refused: the seal of attempt {record.attempt} has been told")
    return now


def opening(record: Record | None, of: Sum) -> Record:
    """What a site keeps before it tells the seal of a sum.

    Raises:
        ValueError: that sum is not the last that it masked for.
    """
    if record is None or record.digest != of.digest().hex():
        raise ValueError(
            f"the seal of attempt {of.attempt} of round {of.round} is not told: "
            "it is not of the last sum that was masked for"
        )
    return dataclasses.replace(record, opened=True)
