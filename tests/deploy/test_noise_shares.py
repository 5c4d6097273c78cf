"""Shares of noise. They come from the operating system's entropy; each test fails by chance once in 10⁸ runs or
less."""

import math
import os

import pytest
import torch
from scipy.stats import kstest

import bayesfed as bf
from bayesfed.deploy.noise_shares import add_noise_share, noise_share
from bayesfed.deploy.secure import Keys, SumId, mask, new_key, public_key, seal, unmask
from bayesfed.engine.privacy import entropy

FAMILIES = {"gaussian": "norm", "laplace": "laplace"}
ODDS = 1e-8


@pytest.mark.parametrize("of", [1, 2, 7, 30])
@pytest.mark.parametrize("mechanism", FAMILIES)
def test_shares_add_up_to_the_mechanisms_noise(mechanism, of):
    """20,000 sums by Kolmogorov-Smirnov, which at these odds shows a scale that is off by a tenth."""
    total = sum(noise_share((20_000,), mechanism, 3.0, of) for _ in range(of))
    assert total.dtype == torch.float64
    assert kstest(total.numpy() / 3.0, FAMILIES[mechanism]).pvalue > ODDS


@pytest.mark.parametrize("mechanism", FAMILIES)
def test_of_more_institutions_than_are_counted_on_there_is_more_noise(mechanism):
    """Ten institutions, of which six are counted on: 10 / 6 of the variance.

    With 100,000 draws the standard error of a variance is 0.5 % (Gaussian) and 0.7 % (Laplace): 5 % is seven of them.
    """
    total = sum(noise_share((100_000,), mechanism, 1.0, 6) for _ in range(10))
    one = {"gaussian": 1.0, "laplace": 2.0}[mechanism]
    assert float(total.var()) == pytest.approx(one * 10 / 6, rel=0.05)


@pytest.mark.parametrize("mechanism", FAMILIES)
def test_the_noise_of_a_masked_sum(mechanism):
    """From the clip to the server: four institutions, the sum less what they had, by Kolmogorov-Smirnov."""
    identities = {f"{i}": new_key() for i in range(4)}
    pinned = {name: public_key(key) for name, key in identities.items()}
    institutions = {name: Keys(name, key, new_key(), pinned) for name, key in identities.items()}
    of = SumId(
        "run",
        0,
        0,
        b"",
        {name: public_key(institution.run_key) for name, institution in institutions.items()},
    )
    privacy = bf.Privacy(clip=0.5, noise=2.0, mechanism=mechanism)
    upload = {"a": torch.full((100, 100), 0.25)}
    sent = {name: add_noise_share(upload, privacy, 0.5, 2.0, 4) for name in institutions}
    total = unmask(
        {name: mask(sent[name], institution, of) for name, institution in institutions.items()},
        {name: seal(institution, of) for name, institution in institutions.items()},
        of,
    )
    noise = (total["a"] - 1.0).flatten().numpy() / (2 * 0.5 * 2.0)
    assert kstest(noise, FAMILIES[mechanism]).pvalue > ODDS


def test_the_clips_own_part_has_its_own_scale():
    """As where the server adds the noise: with 20,000 draws, 4 % is eight standard errors of a standard deviation."""
    privacy = bf.Privacy(noise=1.0)
    short, other = "whether the norm is below the clip", "x"
    upload = {short: torch.zeros(20_000), other: torch.zeros(20_000)}
    found = add_noise_share(upload, privacy, 0.3, 1.0, 5)
    for name in upload:
        expected = privacy.scale(name, 0.3, 1.0) / math.sqrt(5)
        assert float(found[name].std()) == pytest.approx(expected, rel=0.04)


def test_a_share_is_never_drawn_again():
    torch.manual_seed(0)
    first = noise_share((5,), "laplace", 1.0, 3)
    torch.manual_seed(0)
    assert not torch.equal(first, noise_share((5,), "laplace", 1.0, 3))
    with pytest.raises(ValueError, match="a share of noise has no seed"):
        add_noise_share({"x": torch.zeros(2)}, bf.Privacy(noise=1.0, seed=0), 1.0, 1.0, 3)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("normal", 1.0, 3), "mechanism is 'normal'"),
        (("gaussian", 0.0, 3), "the scale of noise is 0.0"),
        (("laplace", math.inf, 3), "the scale of noise is inf"),
        (("laplace", 1.0, 0), "among 0 institutions"),
    ],
)
def test_what_is_no_share(arguments, said):
    with pytest.raises(ValueError, match=said):
        noise_share((2,), *arguments)


@pytest.mark.parametrize("byte", [b"\x00", b"\xff"])
def test_the_ends_of_the_entropy_are_finite(byte, monkeypatch):
    """Uniform numbers lie strictly between 0 and 1, whatever the bits."""
    monkeypatch.setattr(os, "urandom", lambda count: byte * count)
    (u,) = entropy((1,)).tolist()
    assert 0 < u < 1
    assert torch.isfinite(noise_share((1,), "gaussian", 1.0, 1)).all()
