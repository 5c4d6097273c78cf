"""Secure sums: exact, uniform to whoever lacks a key, and of one roster only.

What an adversary sees is drawn from the operating system's entropy. Some hundred tests of it, each at odds of 10⁻⁸,
fail by chance once in a million runs.
"""

import dataclasses
import hashlib
import hmac
import json
import math
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from scipy.stats import chi2_contingency, chisquare, ks_2samp, kstest

from bayesfed.deploy import fixed_point, secure
from bayesfed.deploy.fixed_point import LARGEST
from bayesfed.deploy.secure import (
    MOST,
    Keys,
    SumId,
    mask,
    new_key,
    public_key,
    record_masking,
    record_opening,
    seal,
    unmask,
)

NAMES = ("north", "south", "west")
ODDS = 1e-8


def keys_of(*names, pinned=None):
    """Sites with new keys, each of which has pinned all."""
    identities = {name: new_key() for name in names}
    pins = {name: public_key(key) for name, key in identities.items()}
    return {name: Keys(name, key, new_key(), pins) for name, key in identities.items()}


def sum_of(institutions, *, run="trial", round=0, attempt=0):
    roster = {name: public_key(institution.run_key) for name, institution in institutions.items()}
    return SumId(run, round, attempt, b"theta", roster)


def sent(institutions, uploads, of):
    masked = {
        name: mask(uploads[name], institution, of) for name, institution in institutions.items()
    }
    return masked, {name: seal(institution, of) for name, institution in institutions.items()}


def words_of(masked):
    return np.concatenate([masked[name].ravel() for name in sorted(masked)])


def uniform(words):
    """Whether words modulo 2⁶⁴ pass: their bytes by chi-square, their size by Kolmogorov-Smirnov."""
    counts = np.bincount(np.ascontiguousarray(words).view(np.uint8), minlength=256)
    size = kstest(words / 2.0**64, "uniform").pvalue
    return min(chisquare(counts).pvalue, size) > ODDS


def to_grid(value):
    """The multiple of 2⁻⁵⁷ that is nearest to a number, in whole multiples."""
    return round(Fraction(value) * 2**57)


# -- the sum --------------------------------------------------------------------------------------

DTYPES = {
    np.float64: st.floats(-LARGEST, LARGEST),
    np.float32: st.floats(-LARGEST, LARGEST, width=32),
    np.float16: st.floats(-60000, 60000, width=16),
    np.int64: st.integers(-(2**40), 2**40),
    np.int32: st.integers(-(2**31), 2**31 - 1),
    np.bool_: st.booleans(),
}


@st.composite
def uploads(draw):
    """Uploads of three to six institutions with the same parts: any shapes, precisions and magnitudes."""
    names = draw(st.lists(st.text(max_size=5), min_size=1, max_size=3, unique=True))
    shapes = {
        name: draw(st.just(()) | array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4))
        for name in names
    }
    kinds = {name: draw(st.sampled_from(list(DTYPES))) for name in names}
    return [
        {
            name: torch.from_numpy(
                np.array(draw(arrays(kinds[name], shapes[name], elements=DTYPES[kinds[name]])))
            )
            for name in names
        }
        for _ in range(draw(st.integers(3, 6)))
    ]


@given(uploads())
@settings(max_examples=50, deadline=None)
def test_the_sum_is_that_of_the_integers(found):
    """Each number by Python's fractions: rounded to the grid, unmask as integers, rounded once to double precision.
    The
    grid moves an institution's number by 2⁻⁵⁸ at most, and nothing that double precision holds above 2⁻⁵."""
    institutions = keys_of(*(f"institution {i}" for i in range(len(found))))
    of = sum_of(institutions)
    total = unmask(*sent(institutions, dict(zip(institutions, found, strict=True)), of), of)
    assert total.keys() == found[0].keys()
    for name, value in total.items():
        assert value.dtype == torch.float64 and value.shape == found[0][name].shape
        columns = zip(*(upload[name].flatten().tolist() for upload in found), strict=True)
        for one, numbers in zip(value.flatten().tolist(), columns, strict=True):
            assert one == float(Fraction(sum(map(to_grid, numbers)), 2**57))
            exact = sum(map(Fraction, numbers))
            assert abs(Fraction(one) - exact) <= len(found) * Fraction(1, 2**58) + Fraction(
                math.ulp(one)
            )


def test_single_precision_is_held_exactly():
    """Precisions of 10⁸ beside steps of 10⁻⁹ in one part: what is unmask are the numbers themselves."""
    torch.manual_seed(0)
    institutions = keys_of(*NAMES)
    of = sum_of(institutions)
    magnitude = 10 ** torch.empty(10_000).uniform_(-9.5, 11)
    found = {name: {"x": torch.randn(10_000).clamp(0.8, 3) * magnitude} for name in NAMES}
    total = unmask(*sent(institutions, found, of), of)["x"]
    columns = zip(*(upload["x"].tolist() for upload in found.values()), strict=True)
    assert total.tolist() == [math.fsum(numbers) for numbers in columns]


@pytest.mark.parametrize("value", [LARGEST, -LARGEST, 255.5 / 256, -0.5 / 256, 2.0**-57, 0.1])
def test_as_many_institutions_as_may_be(value):
    """16,384 equal uploads, at the ends of what both words hold: exact, as their number is a power of 2."""
    word = fixed_point.encode("x", torch.tensor([value], dtype=torch.float64))
    once = fixed_point.decode(word)
    assert abs(float(once) - value) <= 2.0**-58
    assert float(fixed_point.decode(word * np.uint64(MOST))) == MOST * float(once)


def test_what_cancels_leaves_the_rest():
    """12,285 uploads whose high words and low words, 2⁶¹ each, cancel but for 24,570 steps of 2⁻⁵⁷."""
    large, small = (0.5 + 3 * 2.0**-49) / 256, -1 / 256
    first, second = (
        fixed_point.encode("x", torch.tensor([x], dtype=torch.float64)) for x in (large, small)
    )
    total = fixed_point.decode(first * np.uint64(8190) + second * np.uint64(4095))
    assert float(total) == 8190 * 3 * 2.0**-57


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, LARGEST * (1 + 2**-20), -1e30])
def test_what_cannot_be_encoded_is_refused_by_name(bad):
    institutions = keys_of(*NAMES)
    upload = {"fine": torch.zeros(3), "bent": torch.tensor([0.0, bad])}
    with pytest.raises(ValueError, match=r"^bent has numbers .*nothing of this upload is sent"):
        mask(upload, institutions["north"], sum_of(institutions))


def test_complex_numbers_are_refused_by_name():
    institutions = keys_of(*NAMES)
    with pytest.raises(ValueError, match="wave is complex"):
        mask(
            {"wave": torch.ones(2, dtype=torch.cfloat)}, institutions["north"], sum_of(institutions)
        )


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


# -- rosters --------------------------------------------------------------------------------------


def garbage(institutions, sums):
    """What a server gets whose institutions were told these sums: refused, and uniform noise."""
    uploads = {name: {"x": torch.ones(1000)} for name in institutions}
    masked = {
        name: mask(uploads[name], institution, sums[name])
        for name, institution in institutions.items()
    }
    seals = {name: seal(institution, sums[name]) for name, institution in institutions.items()}
    of = sums["north"]
    with pytest.raises(ValueError, match="no sum of uploads"):
        unmask({n: masked[n] for n in of.roster}, {n: seals[n] for n in of.roster}, of)
    total = sum(words_of(m) - secure._stream(seals[n], 2000) for n, m in masked.items())
    return uniform(total)


@pytest.mark.parametrize("other", ["run", "round", "attempt", "broadcast", "key"])
def test_institutions_that_are_told_different_things_send_noise(other):
    institutions = keys_of(*NAMES)
    of = sum_of(institutions)
    changed = {
        "run": {"run": "another"},
        "round": {"round": 1},
        "attempt": {"attempt": 1},
        "broadcast": {"broadcast": b"another theta"},
        "key": {"roster": of.roster | {"south": public_key(new_key())}},  # the server's own
    }[other]
    assert garbage(
        institutions, {name: of for name in NAMES} | {"west": dataclasses.replace(of, **changed)}
    )


def test_institutions_that_are_told_different_rosters_send_noise():
    """The server tells one institution that a fourth takes part: all of the four answer."""
    institutions = keys_of(*NAMES, "east")
    three = {name: institutions[name] for name in NAMES}
    sums = {name: sum_of(three) for name in NAMES} | {
        "west": sum_of(institutions),
        "east": sum_of(institutions),
    }
    assert garbage(institutions, sums)


def test_institutions_that_pinned_different_keys_send_noise():
    institutions = keys_of(*NAMES)
    wrong = institutions["north"].pinned | {"south": public_key(new_key())}
    institutions["west"] = dataclasses.replace(institutions["west"], pinned=wrong)
    assert garbage(institutions, dict.fromkeys(NAMES, sum_of(institutions)))


def test_a_server_cannot_leave_a_site_out():
    names = (*NAMES, "east")
    institutions = keys_of(*names)
    of = sum_of(institutions)
    masked, seals = sent(institutions, {name: {"x": torch.ones(1000)} for name in names}, of)
    fewer = {name: institution for name, institution in institutions.items() if name != "east"}
    with pytest.raises(ValueError, match="not a masked upload of east: no sum without it"):
        unmask({name: masked[name] for name in fewer}, seals, of)
    with pytest.raises(ValueError, match="not a seal of east"):
        unmask(masked, {name: seals[name] for name in fewer}, of)
    with pytest.raises(ValueError, match="a masked upload of east, not of this roster"):
        unmask(masked, seals, sum_of(fewer))
    with pytest.raises(ValueError, match="no sum of uploads"):
        unmask({n: masked[n] for n in fewer}, {n: seals[n] for n in fewer}, sum_of(fewer))
    assert uniform(sum(words_of(masked[n]) - secure._stream(seals[n], 2000) for n in fewer))


def test_after_a_dropout_the_round_is_repeated_without_the_one_that_is_late():
    """East's upload comes when the others have been asked again. The server then has the masked uploads of both
    attempts,
    and east tells its seal of the first; the others do not, and the difference of the two sums is noise."""
    names = (*NAMES, "east")
    institutions = keys_of(*names)
    uploads = {name: {"x": torch.full((500,), float(i))} for i, name in enumerate(names)}
    first = sum_of(institutions)
    late, _ = sent(institutions, uploads, first)
    records = {name: record_masking(None, first, late[name]) for name in names}

    rest = {name: institutions[name] for name in NAMES}
    again = sum_of(rest, attempt=1)
    masked, _ = sent(rest, uploads, again)
    records |= {name: record_masking(records[name], again, masked[name]) for name in NAMES}
    records |= {name: record_opening(records[name], again) for name in NAMES}
    seals = {name: seal(institutions[name], again) for name in NAMES}
    total = unmask(masked, seals, again)["x"]
    assert (total == 0.0 + 1.0 + 2.0).all()

    record_opening(records["east"], first)
    for name in NAMES:
        with pytest.raises(ValueError, match="seal of attempt 0 of round 0 is not sent"):
            record_opening(records[name], first)
    known = sum(words_of(found) for found in late.values())
    known -= secure._stream(seal(institutions["east"], first), 1000)
    assert uniform(known - words_of({"x": fixed_point.encode("x", total)}))


def test_what_a_site_does_not_agree_to():
    institutions = keys_of(*NAMES)
    upload, of = {"x": torch.ones(2)}, sum_of(institutions)
    two = {name: of.roster[name] for name in NAMES[:2]}
    with pytest.raises(ValueError, match=r"roster of 2 institutions \(north, south\) is refused"):
        dataclasses.replace(of, roster=two)
    with pytest.raises(ValueError, match="'north' and 'twin' have one key of this run"):
        dataclasses.replace(of, roster=of.roster | {"twin": of.roster["north"]})
    with pytest.raises(ValueError, match="of 'south' has 31 bytes, not 32"):
        dataclasses.replace(of, roster=of.roster | {"south": bytes(31)})
    with pytest.raises(ValueError, match="round is -1"):
        dataclasses.replace(of, round=-1)
    strangers = dataclasses.replace(of, roster=of.roster | {"mole": public_key(new_key())})
    with pytest.raises(ValueError, match="'north' has no pinned key of mole"):
        mask(upload, institutions["north"], strangers)
    for roster in (two | {"x": bytes(32)}, of.roster | {"north": public_key(new_key())}):
        with pytest.raises(ValueError, match="does not have the key of this run of '"):
            mask(
                upload,
                institutions["west" if "x" in roster else "north"],
                SumId("r", 0, 0, b"", roster),
            )
    weak = dataclasses.replace(of, roster=of.roster | {"south": bytes(32)})  # of order 1
    with pytest.raises(ValueError, match="'south' has a key that gives no secret"):
        mask(upload, institutions["north"], weak)
    with pytest.raises(ValueError, match="pinned for 'north' is not that of its identity"):
        dataclasses.replace(institutions["north"], identity=new_key())
    with pytest.raises(ValueError, match="have one key pinned"):
        dataclasses.replace(
            institutions["north"],
            pinned=institutions["north"].pinned | {"x": institutions["north"].pinned["west"]},
        )


def test_what_a_server_does_not_take():
    institutions = keys_of(*NAMES)
    of = sum_of(institutions)
    masked, seals = sent(institutions, {name: {"x": torch.ones(2)} for name in NAMES}, of)
    with pytest.raises(ValueError, match="the parts of west's upload are not those of north's"):
        unmask(masked | {"west": {"x": masked["west"]["x"][:, :1]}}, seals, of)
    with pytest.raises(ValueError, match="west's upload is not of masked words"):
        unmask(masked | {"west": {"x": masked["west"]["x"].astype(float)}}, seals, of)
    with pytest.raises(ValueError, match="west's seal has 5 bytes"):
        unmask(masked, seals | {"west": b"short"}, of)
    with pytest.raises(ValueError, match="no sum of uploads"):
        unmask(masked, seals | {"west": bytes(32)}, of)


def test_keys_are_not_shown():
    institution = keys_of(*NAMES)["north"]
    assert str(institution.identity) not in repr(institution) and str(
        institution.run_key
    ) not in repr(institution)


# -- what an institution has done -------------------------------------------------------------------------


def test_a_sum_is_masked_for_once():
    institutions = keys_of(*NAMES)
    institution = institutions["north"]
    of = sum_of(institutions, round=4, attempt=1)
    masked = mask({"x": torch.ones(3)}, institution, of)
    record = record_masking(None, of, masked)
    assert (
        record_masking(record, of, mask({"x": torch.ones(3)}, institution, of)) == record
    )  # lost on the way
    with pytest.raises(ValueError, match="attempt 1 of round 4 has been masked for already"):
        record_masking(record, of, mask({"x": 2 * torch.ones(3)}, institution, of))
    other = dataclasses.replace(of, roster=of.roster | {"south": public_key(new_key())})
    with pytest.raises(ValueError, match="with another upload or roster"):
        record_masking(record, other, mask({"x": torch.ones(3)}, institution, other))
    for round, attempt in ((4, 0), (3, 1), (3, 2), (0, 0)):
        stale = dataclasses.replace(of, round=round, attempt=attempt)
        with pytest.raises(ValueError, match="attempt 1 of round 4 has been masked for since"):
            record_masking(record, stale, masked)
    with pytest.raises(ValueError, match="of run 'trial', not 'next'"):
        record_masking(record, dataclasses.replace(of, run="next", round=5), masked)
    assert record_masking(record, dataclasses.replace(of, attempt=3), masked).attempt == 3
    assert record_masking(record, dataclasses.replace(of, round=5, attempt=0), masked).round == 5


def test_the_seals_of_one_attempt_are_told():
    institutions = keys_of(*NAMES)
    of = sum_of(institutions)
    masked = mask({"x": torch.ones(3)}, institutions["north"], of)
    with pytest.raises(ValueError, match="it is not of the last sum"):
        record_opening(None, of)
    record = record_opening(record_masking(None, of, masked), of)
    assert record.opened and record_opening(record, of) == record
    assert record_masking(record, of, masked) == record  # the same bytes again
    with pytest.raises(ValueError, match="the seal of attempt 0 has been sent"):
        record_masking(record, dataclasses.replace(of, attempt=1), masked)
    further = record_masking(record, dataclasses.replace(of, round=1), masked)
    assert not further.opened
    with pytest.raises(ValueError, match="seal of attempt 0 of round 0 is not sent"):
        record_opening(further, of)
