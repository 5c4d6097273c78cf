"""Discrete noise against its exact probabilities. It comes from the operating system; each test fails by chance once in
10⁷ runs or less."""

import math
import os
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy.stats import chisquare, nbinom

import bayesfed as bf
from bayesfed.deploy import fixed_point
from bayesfed.engine import discrete_noise, privacy
from bayesfed.engine.discrete_noise import draw

ODDS = 1e-8


def pmf(mechanism, t, x):
    """Probabilities by their definition, from sums over 60 scales."""
    every = np.arange(-60 * t - 5, 60 * t + 6, dtype=float)

    def weight(v):
        return np.exp(-(v**2) / (2 * t * t) if mechanism == "gaussian" else -np.abs(v) / t)

    return weight(x) / weight(every).sum()


def p_value(drawn, probabilities, x):
    """Of Pearson's test on the values x and all others together."""
    drawn = np.asarray(drawn)
    found = np.array([(drawn == v).sum() for v in x])
    found = np.append(found, len(drawn) - found.sum())
    expected = np.append(probabilities, 1 - probabilities.sum()) * len(drawn)
    assert expected[:-1].min() > 5
    return chisquare(found, expected).pvalue


@pytest.mark.parametrize("margin", [2.0**-46, 0.02])
@pytest.mark.parametrize("t", [1, 2, 5, 7])
@pytest.mark.parametrize("mechanism", ["gaussian", "laplace"])
def test_probabilities(mechanism, t, margin, monkeypatch):
    """With a wide margin one comparison in 25 is made with as many digits as it needs."""
    monkeypatch.setattr(discrete_noise, "_MARGIN", margin)
    x = np.arange(-3 * t, 3 * t + 1)
    drawn = draw(mechanism, t, (200_000 if margin < 0.01 else 20_000,))
    assert p_value(drawn, pmf(mechanism, t, x), x) > ODDS


@pytest.mark.parametrize("mechanism", ["gaussian", "laplace"])
def test_low_digits_of_wide_noise_are_uniform(mechanism):
    """Of t = 3 · 2²³ the remainders by 16 are equally likely, to e^(−10¹⁰)."""
    drawn = draw(mechanism, 3 * 2.0**23, (100_000,)).numpy()
    assert chisquare(np.bincount(drawn % 16, minlength=16)).pvalue > ODDS
    spread = drawn.std() / (3 * 2.0**23)
    assert spread == pytest.approx(1.0 if mechanism == "gaussian" else math.sqrt(2), rel=0.02)


@pytest.mark.parametrize("of", [2, 3, 8])
def test_shares_of_laplace_noise(of):
    """A share is the difference of negative binomial variables of shape 1 / of; the sum of all is discrete Laplace."""
    t, x = 6, np.arange(-12, 13)
    shares = [draw("laplace", t, (60_000,), of).numpy() for _ in range(of)]
    many = np.arange(4000)
    one = nbinom.pmf(many, 1 / of, 1 - math.exp(-1 / t))
    share = np.array([(one[max(0, v) :][:3000] * one[max(0, -v) :][:3000]).sum() for v in x])
    assert p_value(shares[0], share, x) > ODDS
    assert p_value(sum(shares), pmf("laplace", t, x), x) > ODDS


def test_shares_of_gaussian_noise():
    """Five with t = 15 / √5, rounded up: their sum has the convolution of the probabilities of each."""
    t, of, x = 15.0, 5, np.arange(-30, 31)
    least = math.ceil(t / math.sqrt(of))
    total = pmf("gaussian", least, np.arange(-400, 401.0))
    for _ in range(of - 1):
        total = np.convolve(total, pmf("gaussian", least, np.arange(-400, 401.0)))
    centre = len(total) // 2
    drawn = sum(draw("gaussian", t, (60_000,), of).numpy() for _ in range(of))
    assert p_value(drawn, total[centre - 30 : centre + 31], x) > ODDS
    assert int(draw("gaussian", 1e-3, (1000,), 4).abs().max()) >= 3  # a share has t = 3 at least


@pytest.mark.parametrize(("word", "below"), [(-1, True), (1, False)])
def test_comparisons_with_as_many_digits_as_needed(word, below):
    """exp(−1/3) to 52 bits, by one step less and more: only the digits after them decide where it is that number."""
    near = math.floor(Fraction(math.exp(-1 / 3)) * 2**52)
    assert discrete_noise._is_below(near + 2 * word, Fraction(1, 3), os.urandom) == below
    bits = "71653131057378925043"  # e^(−1/3) = 0.71653131057378925043…
    at = math.floor(Fraction(int(bits), 10**20) * 2**52)
    found = [discrete_noise._is_below(at, Fraction(1, 3), os.urandom) for _ in range(2000)]
    share = float(Fraction(int(bits), 10**20) * 2**52 - at)
    assert sum(found) / 2000 == pytest.approx(share, abs=5.4 * math.sqrt(0.25 / 2000))


@pytest.mark.parametrize("mechanism", ["gaussian", "laplace"])
@pytest.mark.parametrize("clip", [0.3, 1.0, 1e-12, 7e5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uploads_on_the_grid_are_within_the_clip(mechanism, clip, dtype):
    """In whole numbers: Σ |k| ≤ γ / step, or Σ k² ≤ (γ / step)², whatever the rounding of the factor."""
    own = bf.Privacy(clip=clip, noise=1.0, mechanism=mechanism)
    torch.manual_seed(0)
    upload = {
        "a": clip * torch.randn(6, 40, 5, dtype=dtype),
        "b": torch.full((6,), clip, dtype=dtype),
    }
    upload["a"][0], upload["a"][1] = 0, upload["a"][1] * 1e-6
    clipped, _ = own.clip_uploads(upload, clip)
    step = Fraction(own.grid("a", clip))
    power = {"gaussian": 2, "laplace": 1}[mechanism]
    for i in range(6):
        whole = [Fraction(v) / step for n in clipped for v in clipped[n][i].flatten().tolist()]
        assert all(k.denominator == 1 for k in whole)
        assert sum(abs(k) ** power for k in whole) <= (Fraction(clip) / step) ** power
    assert clipped["a"].dtype == torch.float64
    if clip > 1e-9:
        torch.testing.assert_close(clipped["b"][0], torch.tensor(clip).double(), rtol=1e-6, atol=0)


def test_sums_and_noise_are_multiples_of_the_step():
    """In process, and once encoded for a secure sum, from which the sum of shares comes back exactly."""
    own = bf.Privacy(clip=0.3, noise=1.5)
    upload, _ = own.clip_uploads({"a": torch.randn(8, 1000)}, 0.3)
    total, step = upload["a"].sum(0), own.grid("a", 0.3)
    shares = [own.add_noise({"a": total}, 0.3, 1.5, 0, of=3)["a"] for _ in range(3)]
    for value in [*shares, own.add_noise({"a": total}, 0.3, 1.5, 0)["a"]]:
        assert bool((value / step == (value / step).round()).all())
        assert bool(((value - total) / step != 0).any())
    words = sum(fixed_point.encode("a", share) for share in shares)
    exact = [sum(map(Fraction, each)) for each in zip(*(s.tolist() for s in shares), strict=True)]
    assert [Fraction(v) for v in fixed_point.decode(words).tolist()] == exact
    assert float(fixed_point.decode(np.array([0, 1], np.uint64))) == privacy.FINEST


def test_moments_of_likelihood_ratios_are_those_of_gaussians():
    """For shifts by whole numbers: E[(p_μ / p_0)^k] = exp(k (k − 1) μ² / 2t²), which the accountant takes."""
    t, every = 2, np.arange(-400, 401.0)
    p, shifted = pmf("gaussian", t, every), pmf("gaussian", t, every - 3)
    for k in (2, 3, 5):
        found = float((p * (shifted / np.where(p > 0, p, 1)) ** k)[320:481].sum())
        assert found == pytest.approx(math.exp(k * (k - 1) * 9 / (2 * t * t)), rel=1e-9)


@pytest.mark.parametrize("of", [1, 3, 4])
@pytest.mark.parametrize("shifts", [[4], [-4], [2, 3], [4, 4]], ids=str)
def test_epsilon_and_delta_bound_the_exact_privacy_loss(of, shifts):
    """Uploads at opposite ends of a clip of two steps, from the probabilities of the sum of shares with t = 6 in all.

    [2, 3] are two numbers of one round, [4, 4] are two rounds: losses of independent numbers add up. The bound is no
    better than it need be: half of ε has a larger δ.
    """
    own, every, rounds = bf.Privacy(clip=1.0, noise=1.5), np.arange(-90, 91.0), shifts.count(4) or 1
    share = pmf("gaussian", math.ceil(6 / math.sqrt(of)), every)
    law = share
    for _ in range(of - 1):
        law = np.convolve(law, share)
    x = np.arange(len(law) // 2 - 75, len(law) // 2 + 76)
    loss, weight = np.zeros(1), np.ones(1)
    for shift in shifts:
        loss = np.add.outer(loss, np.log(law[x] / law[x - shift])).ravel()
        weight = np.multiply.outer(weight, law[x]).ravel()

    def delta(epsilon):
        return float((weight * -np.expm1(np.minimum(epsilon - loss, 0.0))).sum())

    epsilon = own.spent(rounds, cohort=3, clients=3)
    assert delta(epsilon) < own.delta < delta(epsilon / 2)


@pytest.mark.parametrize("of", [2, 3, 8])
def test_a_sum_of_shares_exceeds_the_divergence_of_gaussians_by_less_than_is_said(of):
    """Proposition 14's τ, 10 Σ exp(−2π² t² k / (k + 1)), at a share of t = 0.7, where it can be seen."""
    t, every, alpha, shift = 0.7, np.arange(-40, 41.0), 3.0, 1
    tau = 10 * sum(math.exp(-2 * (math.pi * t) ** 2 * k / (k + 1)) for k in range(1, of))
    share = np.exp(-(every**2) / (2 * t * t))
    law = share = share / share.sum()
    for _ in range(of - 1):
        law = np.convolve(law, share)
    x = np.arange(len(law) // 2 - 8, len(law) // 2 + 9)
    moment = (law[x] ** alpha * law[x - shift] ** (1 - alpha)).sum()
    divergence, gaussian = math.log(moment) / (alpha - 1), alpha * shift**2 / (2 * of * t * t)
    assert divergence < gaussian + tau
    least = discrete_noise.LEAST_SHARE
    assert 10 * math.exp(-((math.pi * least) ** 2)) < 1e-36  # of each of the k, at least


def test_noise_is_never_drawn_again():
    torch.manual_seed(0)
    first = draw("laplace", 1e6, (5,))
    torch.manual_seed(0)
    assert not torch.equal(first, draw("laplace", 1e6, (5,)))


@pytest.mark.parametrize("scale", [0.0, math.inf, math.nan, 2.0**46])
def test_scales_that_are_refused(scale):
    with pytest.raises(ValueError, match="steps of the grid"):
        draw("gaussian", scale, (2,))
