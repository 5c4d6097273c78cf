"""Secure sums: exact, uniform to whoever lacks a key, and of one roster only.

What an adversary sees is drawn from the operating system's entropy. Some hundred tests of it, each at odds of 10⁻⁸,
fail by chance once in a million runs.
"""

import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from bayesfed.deploy import fixed_point, secure
from bayesfed.deploy.fixed_point import LARGEST
from bayesfed.deploy.secure import (
    MOST,
    SumId,
    mask,
    new_key,
    public_key,
    record_masking,
    record_opening,
    seal,
    unmask,
)
from tests.deploy.masked_uploads import (
    NAMES,
    keys_of,
    sent,
    sum_of,
    uniform,
    uploads,
    words_of,
)


def to_grid(value):
    """The multiple of 2⁻⁵⁷ that is nearest to a number, in whole multiples."""
    return round(Fraction(value) * 2**57)


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
