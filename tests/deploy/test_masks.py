"""The masks of secure sums: by hand, uniform, and used once."""

import hashlib
import hmac
import json
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from scipy.stats import chi2_contingency, ks_2samp

from bayesfed.deploy import fixed_point, secure
from bayesfed.deploy.secure import (
    mask,
    seal,
)
from tests.deploy.masked_uploads import NAMES, ODDS, keys_of, sent, sum_of, uniform, words_of

# -- the masks ------------------------------------------------------------------------------------


def hkdf(secret, info):
    """RFC 5869 for one block."""
    return hmac.digest(hmac.digest(bytes(32), secret, "sha256"), info + b"\x01", "sha256")


def chacha20(key, count):
    """RFC 8439, section 2.3, with a nonce of zeros: so many 64-bit words."""

    def turned(x, a, b, c, d):
        for i, j, k, by in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            x[i] = (x[i] + x[j]) & 0xFFFFFFFF
            x[k] ^= x[i]
            x[k] = ((x[k] << by) | (x[k] >> (32 - by))) & 0xFFFFFFFF

    stream = b""
    for block in range(-(-count // 8)):
        start = [*struct.unpack("<4I", b"expand 32-byte k"), *struct.unpack("<8I", key)]
        start += [block, 0, 0, 0]
        x = list(start)
        for _ in range(10):
            for column in range(4):
                turned(x, *(4 * row + column for row in range(4)))
            for column in range(4):
                turned(x, *(4 * row + (column + row) % 4 for row in range(4)))
        stream += struct.pack(
            "<16I", *((a + b) & 0xFFFFFFFF for a, b in zip(x, start, strict=True))
        )
    return struct.unpack(f"<{count}Q", stream[: 8 * count])


def hashed(data):
    return hashlib.sha256(json.dumps(data).encode()).digest()


def by_hand(numbers, institution, of):
    """The words of an upload of one part: high words, then low ones."""
    high = [round(Fraction(x) * 256) for x in numbers]
    low = [round((Fraction(x) * 256 - h) * 2**49) for x, h in zip(numbers, high, strict=True)]
    words = high + low
    keys = sorted((name, key.hex()) for name, key in of.roster.items())
    broadcast = hashlib.sha256(of.broadcast).hexdigest()
    digest = hashed([of.run, of.round, of.attempt, broadcast, keys]).hex()
    pins = sorted((name, institution.pinned[name].hex()) for name in of.roster)
    agreed = hashed(["secure sum", digest, pins]).hex()
    for other in of.roster:
        if other == institution.name:
            sign, key = 1, hkdf(institution.run_key, hashed(["seal", other, digest]))
        else:
            sign = 1 if institution.name < other else -1
            secret = b"".join(
                X25519PrivateKey.from_private_bytes(own).exchange(
                    X25519PublicKey.from_public_bytes(theirs)
                )
                for own, theirs in (
                    (institution.identity, institution.pinned[other]),
                    (institution.run_key, of.roster[other]),
                )
            )
            key = hkdf(secret, hashed([agreed, *sorted((institution.name, other))]))
        words = [w + sign * p for w, p in zip(words, chacha20(key, len(words)), strict=True)]
    return [w % 2**64 for w in words]


def test_a_masked_upload_by_hand():
    """ChaCha20, HKDF and the words, written out from the RFCs and in Python's integers; 11 numbers are 3 blocks."""
    institutions = keys_of("ä", "b", "c", "d")
    of = sum_of(institutions, round=7, attempt=2)
    numbers = [0.0, 1.0, -1.0, 1e8, -1e-9, 0.1, 2.0**40, -(2.0**40), 3.5, 0.001953125, -0.3]
    for institution in institutions.values():
        words = mask({"x": torch.tensor(numbers, dtype=torch.float64)}, institution, of)["x"]
        assert words.shape == (2, 11) and words.dtype == np.uint64
        assert words.ravel().tolist() == by_hand(numbers, institution, of)


def test_the_same_upload_gives_the_same_bytes_and_is_left_alone():
    institutions = keys_of(*NAMES)
    upload = {"b": torch.randn(3, 2), "a": torch.arange(4)}
    before = {name: value.clone() for name, value in upload.items()}
    twice = [
        mask(found, institutions["north"], sum_of(institutions))
        for found in (upload, dict(reversed(upload.items())))
    ]
    assert all((twice[0][name] == twice[1][name]).all() for name in upload)
    assert all(torch.equal(upload[name], before[name]) for name in upload)


@pytest.mark.parametrize("content", [0.0, 1.0, -1e9])
def test_masked_uploads_are_uniform(content):
    """Whatever is in them; 240,000 words each, which chi-square over bytes would show to be off by some 1 %."""
    institutions = keys_of(*NAMES)
    of = sum_of(institutions)
    uploads = {name: {"x": torch.full((120_000,), content)} for name in NAMES}
    masked, seals = sent(institutions, uploads, of)
    for name in NAMES:
        words = words_of(masked[name])
        assert uniform(words)
        assert uniform(words[1:] - words[:-1]) and uniform(words[:120_000] ^ words[120_000:])
        assert uniform(
            words - secure._stream(seals[name], len(words))
        )  # all that is left in the end
    assert uniform(words_of(masked["north"]) + words_of(masked["south"]))
    open_ = sum(words_of(m) - secure._stream(seals[n], 240_000) for n, m in masked.items())
    assert not uniform(open_)  # and the tests can tell


def test_masked_uploads_say_nothing_of_their_content():
    """Two federations, zeros and numbers of a billion, cannot be told apart: bytes and sizes of 240,000 words."""
    found = []
    for content in (0.0, 1e9):
        institutions = keys_of(*NAMES)
        uploads = {name: {"x": torch.full((120_000,), content)} for name in NAMES}
        found.append(words_of(sent(institutions, uploads, sum_of(institutions))[0]["north"]))
    bytes_ = [np.bincount(words.view(np.uint8), minlength=256) for words in found]
    assert chi2_contingency(bytes_).pvalue > ODDS
    assert ks_2samp(*(words / 2.0**64 for words in found)).pvalue > ODDS


def test_no_mask_is_used_twice():
    """The masks of an upload of zeros, over institutions, rounds, attempts, runs, rosters, parts: no word occurs twice.

    Among 20,000 random ones some would in one of 10¹¹ trials.
    """
    four = keys_of(*NAMES, "east")
    three = {name: four[name] for name in NAMES}
    upload = {name: torch.zeros(200) for name in ("a", "b")}
    sums = [
        sum_of(three, run=run, round=r, attempt=a) for run in "xy" for r in (0, 1) for a in (0, 1)
    ]
    drawn = [
        words_of(mask(upload, institution, of)) for of in sums for institution in three.values()
    ]
    drawn.append(words_of(mask(upload, four["north"], sum_of(four))))
    drawn += [
        secure._stream(seal(institution, of), 800)
        for of in sums[:2]
        for institution in three.values()
    ]
    words = np.concatenate(drawn)
    assert len(np.unique(words)) == len(words) > 20_000


def test_of_two_honest_institutions_a_server_and_all_others_learn_the_sum():
    """Everything but the secrets of two is known. Taken off, it leaves a + p and b − p, p the mask of the two.

    In two splits of one sum they add up to the same, and apart they are uniform, differ from a and b by p only and
    cannot be told from each other: 50 rounds of 1,000 numbers.
    """
    institutions = keys_of("honest", "other", "spy", "thief")
    full = torch.full((1000,), 1.0, dtype=torch.float64)
    views = []
    for a, b in ((5.0, 5.0), (1e9, 10.0 - 1e9)):
        contents = {"honest": a, "other": b, "spy": 3.0, "thief": -1.0}
        uploads = {name: {"x": value * full} for name, value in contents.items()}
        known = {"honest": [], "other": []}
        for round in range(50):
            of = sum_of(institutions, round=round)
            masked, seals = sent(institutions, uploads, of)
            for name in known:
                words = words_of(masked[name]) - secure._stream(seals[name], 2000)
                for spy in ("spy", "thief"):  # they sort last: the honest added what they subtract
                    agreed = secure._agreement(institutions[spy], of)
                    words -= secure._stream(
                        secure._pair_key(institutions[spy], name, of, agreed), 2000
                    )
                known[name].append(words)
            both = known["honest"][-1] + known["other"][-1]
            assert (fixed_point.decode(both.reshape(2, 1000)) == 10 * full).all()
            agreed = secure._agreement(institutions["honest"], of)
            p = secure._stream(secure._pair_key(institutions["honest"], "other", of, agreed), 2000)
            for name, left in (("honest", -p), ("other", p)):
                content = (known[name][-1] + left).reshape(2, 1000)
                assert (content == fixed_point.encode("x", uploads[name]["x"])).all()
        views.append({name: np.concatenate(found) for name, found in known.items()})
        institutions = keys_of("honest", "other", "spy", "thief")
    for name in ("honest", "other"):
        assert uniform(views[0][name]) and uniform(views[1][name])
        assert ks_2samp(*(view[name] / 2.0**64 for view in views)).pvalue > ODDS
