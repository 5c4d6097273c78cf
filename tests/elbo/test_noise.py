from contextlib import nullcontext

import pyro.distributions as dist
import pytest
import torch
from scipy import stats

import bayesfed as bf
from bayesfed.elbo import noise
from bayesfed.elbo.noise import SuppliedNoise
from tests.scenarios import conjugate_hierarchy, ragged

LEVEL = (
    1e-3  # seeds are fixed, so the tests pass or fail for good; a right generator fails 1 in 1000
)


def stream(*parts, count=1000):
    """The numbers of the stream (seed, round, client, name, ...)."""
    seed, *rest = parts
    key = noise.key(seed)
    for part in rest:
        key = noise.fold(key, noise.word(part) if isinstance(part, str) else part)
    return noise.uniform(key, (count,))


# -- streams --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        (1, 0, "north", "alpha"),
        (0, 1, "north", "alpha"),
        (0, 0, "south", "alpha"),
        (0, 0, "north", "beta"),
        (0, -1, "north", "alpha"),
    ],
    ids=["seed", "round", "client", "name", "a negative round"],
)
def test_streams_differ_and_are_uncorrelated(other):
    first, second = stream(0, 0, "north", "alpha"), stream(*other)
    assert not (first == second).any()
    correlation = torch.corrcoef(torch.stack([first, second]))[0, 1]
    assert abs(correlation) < 4 / 1000**0.5  # four standard errors
    assert torch.equal(first, stream(0, 0, "north", "alpha"))


def test_folding_does_not_commute():
    """Round 1 of client 2 is not round 2 of client 1."""
    key = noise.key(0)
    assert noise.fold(noise.fold(key, 1), 2) != noise.fold(noise.fold(key, 2), 1)


def test_neighbouring_keys_are_distinct():
    keys = noise.fold(noise.key(0), torch.arange(100_000))
    assert len(keys.unique()) == 100_000  # fold is a bijection of its data
    seeds = torch.stack([noise.key(seed) for seed in range(1000)])
    grid = noise.fold(seeds[:, None], torch.arange(100)).flatten()
    assert len(grid.unique()) == 100_000  # 10¹⁰ / 2⁶⁵ collisions expected


def test_a_name_is_the_same_word_on_every_machine():
    assert noise.word("alpha") == int.from_bytes(
        __import__("hashlib").blake2b(b"alpha", digest_size=8).digest(), "big", signed=True
    )
    assert noise.words(["alpha", "Øst"]).tolist() == [noise.word("alpha"), noise.word("Øst")]


def test_chunking_order_and_shape_do_not_matter():
    keys = noise.fold(noise.key(3), noise.words([f"c{i}" for i in range(10)]))
    whole = noise.uniform(keys, (4, 3))
    parts = torch.cat([noise.uniform(chunk, (4, 3)) for chunk in keys.split(3)])
    assert torch.equal(whole, parts)
    order = torch.tensor([3, 1, 4, 0, 5, 9, 2, 6, 8, 7])
    assert torch.equal(noise.uniform(keys[order], (4, 3)), whole[order])
    assert torch.equal(noise.uniform(keys, (12,)).reshape(10, 4, 3), whole)
    assert torch.equal(noise.uniform(keys, (24,))[:, :12], noise.uniform(keys, (12,)))
    assert noise.uniform(keys[0]).shape == ()


def test_uniform_numbers_are_the_same_in_both_floating_types():
    keys = noise.fold(noise.key(0), torch.arange(50))
    draw = noise.Draw("uniform", (20,))
    single, double = draw(keys, torch.float32), draw(keys, torch.float64)
    assert single.dtype == torch.float32
    assert torch.equal(single, double.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normal_numbers_are_normal(dtype):
    """Kolmogorov–Smirnov on 100,001 numbers, and no correlation between the two from one hash."""
    from scipy.stats import kstest

    drawn = noise.Draw("normal", (100_001,))(noise.key(3)[None], dtype)[0].double()
    assert bool(drawn.isfinite().all())
    assert kstest(drawn.numpy(), "norm").pvalue > 0.01
    half = drawn[:50_000], drawn[50_001:100_001]
    assert abs(float(torch.corrcoef(torch.stack(half))[0, 1])) < 4 / 50_000**0.5


@pytest.mark.parametrize("local", [True, False])
def test_a_program_draws_the_same_noise_alone_and_in_a_cohort(local):
    data = ragged(5)
    program = bf.SFVI().program(conjugate_hierarchy, data)
    keys = noise.fold(noise.key(7), data.stream_ids)
    together = program.noise(keys, 3, local=local)
    assert together
    assert all((name in program.random) != local for name in together)
    for i in range(5):
        alone = program.noise(keys[i], 3, local=local)
        for name, values in alone.items():
            for value, cohort in zip(values, together[name], strict=True):
                assert value.shape[:3] == (3, 1, 1)
                assert torch.equal(value, cohort[:, i : i + 1])
    more = program.noise(keys, 6, local=local)
    assert all(torch.equal(more[n][0][:3], together[n][0]) for n in together)


# -- distributions --------------------------------------------------------------------------------

LAYOUTS = {
    "one stream": lambda: (noise.key(1), (20_000,)),
    "many rounds": lambda: (noise.fold(noise.key(1), torch.arange(20_000)), ()),
    "many clients": lambda: (
        noise.fold(noise.key(1), noise.words([f"client {i}" for i in range(2000)])),
        (10,),
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_numbers_are_uniform_normal_and_uncorrelated(layout):
    keys, shape = LAYOUTS[layout]()
    u = noise.uniform(keys, shape).flatten()
    assert u.dtype == torch.float64
    assert ((u > 0) & (u < 1)).all()
    assert stats.kstest(u.numpy(), "uniform").pvalue > LEVEL
    z = noise.Draw("normal", shape)(keys, torch.float64).flatten()
    assert stats.kstest(z.numpy(), "norm").pvalue > LEVEL
    for lag in (1, 2, 7, 10, 100):
        correlation = torch.corrcoef(torch.stack([z[:-lag], z[lag:]]))[0, 1]
        assert abs(correlation) < 4 / len(z) ** 0.5  # four standard errors
    pairs = torch.histogramdd(torch.stack([u[:-1:2], u[1::2]], -1), bins=8).hist.flatten()
    assert stats.chisquare(pairs.numpy()).pvalue > LEVEL


# -- choosing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 5, 301, 10_000, 10_001, 12_345])
def test_a_permutation_has_every_number_once(count):
    for seed in range(3):
        found = noise.permuted(noise.key(seed), count, torch.arange(count))
        assert torch.equal(found.sort().values, torch.arange(count))


def test_a_place_does_not_depend_on_the_others():
    places = torch.tensor([7, 999_999, 123_456])
    whole = noise.permuted(noise.key(0), 10**6, torch.arange(10**6))
    assert torch.equal(noise.permuted(noise.key(0), 10**6, places), whole[places])


def test_every_permutation_of_few_is_equally_likely():
    """A chi-square test at level 0.001 accepts the uniform distribution over permutations."""
    drawn = [noise.permuted(noise.fold(noise.key(4), r), 4, torch.arange(4)) for r in range(3000)]
    seen = (torch.stack(drawn) * 4 ** torch.arange(4)).sum(1).unique(return_counts=True)[1]
    assert len(seen) == 24
    assert stats.chisquare(seen.numpy()).pvalue > LEVEL


@pytest.mark.parametrize("count", [50, 20_000])
def test_neighbours_are_anywhere_and_places_are_uniform(count):
    """Three neighbouring places are permuted uniformly: eight parts of the range, seven of the gaps."""
    places = count // 2 + torch.arange(3)
    keys = noise.fold(noise.key(5), torch.arange(20_000 if count < 10_000 else 4000))
    drawn = torch.stack([noise.permuted(key, count, places) for key in keys])
    part = drawn * 8 // count
    size = torch.arange(count).mul(8).div(count, rounding_mode="floor").bincount().double() / count
    for place in part.T:
        seen, expected = place.bincount(minlength=8), size * len(keys)
        assert stats.chisquare(seen.numpy(), expected.numpy()).pvalue > LEVEL
    for one, other in ((0, 1), (0, 2), (1, 2)):
        gap = (drawn[:, other] - drawn[:, one]).remainder(count) - 1  # of count − 1, alike
        seen = (gap * 7 // (count - 1)).bincount(minlength=7)
        assert stats.chisquare(seen.numpy()).pvalue > LEVEL


# -- lifting --------------------------------------------------------------------------------------

TRIL = torch.tensor([[1.0, 0.0], [0.5, 2.0]])
LIFTED = {
    "Normal": lambda: dist.Normal(torch.tensor([1.0, -1.0]), torch.tensor([0.5, 2.0])),
    "Normal, independent": lambda: dist.Normal(torch.zeros(2, 3), 2.0).to_event(1),
    "MultivariateNormal": lambda: dist.MultivariateNormal(torch.ones(4, 2), scale_tril=TRIL),
    "LowRankMultivariateNormal": lambda: dist.LowRankMultivariateNormal(
        torch.ones(2), torch.tensor([[0.3], [0.4]]), torch.tensor([0.1, 0.2])
    ),
    "LogNormal": lambda: dist.LogNormal(torch.tensor([0.2, -1.0]), 0.5),
    "Uniform": lambda: dist.Uniform(torch.tensor([-1.0, 2.0]), 3.0),
    "Laplace": lambda: dist.Laplace(torch.tensor([0.5, 3.0]), 2.0),
    "HalfNormal": lambda: dist.HalfNormal(torch.tensor([0.5, 3.0])),
    "Gumbel": lambda: dist.Gumbel(torch.tensor([0.5, 3.0]), 2.0),
}
CDFS = {
    "Normal": stats.norm([1.0, -1.0], [0.5, 2.0]),
    "LogNormal": stats.lognorm(0.5, scale=[1.2214028, 0.36787944]),
    "Uniform": stats.uniform([-1.0, 2.0], [4.0, 1.0]),
    "Laplace": stats.laplace([0.5, 3.0], 2.0),
    "HalfNormal": stats.halfnorm(scale=[0.5, 3.0]),
    "Gumbel": stats.gumbel_r([0.5, 3.0], 2.0),
}


def record(fn):
    with SuppliedNoise(None, len(fn.batch_shape)) as lifted:
        fn.rsample()
    return lifted.recorded


def replay(fn, keys):
    """Draws of an expanded distribution with the noise that a program supplies, one for each key."""
    draws = record(fn)
    wide = fn.expand((len(keys), *fn.batch_shape))
    site = noise.fold(keys, 0).reshape(-1, *[1] * len(fn.batch_shape))
    site = noise.fold(site, torch.arange(fn.batch_shape.numel()).reshape(fn.batch_shape))
    supplied = [draw(noise.fold(site, j), torch.float32) for j, draw in enumerate(draws)]
    with SuppliedNoise(supplied, len(wide.batch_shape)):
        return wide.rsample()


@pytest.mark.parametrize("name", LIFTED)
def test_what_is_recorded_is_all_that_is_random(name):
    fn = LIFTED[name]()
    keys = noise.fold(noise.key(0), torch.arange(6))
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = replay(fn, keys)
    assert torch.equal(torch.get_rng_state(), state)  # torch's own generator is not asked
    torch.manual_seed(1)
    assert torch.equal(replay(fn, keys), first)
    assert not torch.equal(replay(fn, keys + 1), first)
    assert fn.support.check(first).all()
    assert torch.equal(replay(fn, keys[2:4]), first[2:4])


@pytest.mark.parametrize("name", CDFS)
def test_replayed_draws_follow_the_distribution(name):
    draws = replay(LIFTED[name](), noise.fold(noise.key(0), torch.arange(4000)))
    p = CDFS[name].cdf(draws.double().numpy())
    for column in p.T:
        assert stats.kstest(column, "uniform").pvalue > LEVEL


@pytest.mark.parametrize("name", ["MultivariateNormal", "LowRankMultivariateNormal"])
def test_replayed_draws_have_the_covariance(name):
    fn = LIFTED[name]()
    draws = replay(fn, noise.fold(noise.key(0), torch.arange(4000))).reshape(4000, -1, 2)[:, 0]
    cov = fn.covariance_matrix.reshape(-1, 2, 2)[0]
    white = torch.linalg.solve(torch.linalg.cholesky(cov), (draws - 1.0).T).T
    # four standard errors of a mean, of a variance (√2 as large) and of a covariance
    assert white.mean(0).abs().max() < 4 / 4000**0.5
    assert (white.T.cov() - torch.eye(2)).abs().max() < 4 * 2**0.5 / 4000**0.5


def test_gradients_pass_through():
    loc = torch.tensor([0.3], requires_grad=True)
    scale = torch.tensor([2.0], requires_grad=True)
    with SuppliedNoise([torch.tensor([1.5])], 1):
        value = dist.Normal(loc, scale).rsample()
    value.backward()
    assert (value.item(), loc.grad.item(), scale.grad.item()) == pytest.approx((3.3, 1.0, 1.5))


@pytest.mark.parametrize(
    "fn",
    [
        dist.Gamma(2.0, 1.0),
        dist.Beta(2.0, 1.0),
        dist.Dirichlet(torch.ones(3)),
        dist.StudentT(5.0),
        dist.InverseGamma(2.0, 1.0),
        dist.Exponential(1.0),
        dist.Cauchy(0.0, 1.0),
        dist.HalfCauchy(1.0),
    ],
    ids=lambda fn: type(fn).__name__,
)
def test_what_is_no_function_of_such_noise_is_refused(fn):
    with (
        SuppliedNoise(None, 0),
        pytest.raises(NotImplementedError, match="normal or uniform noise"),
    ):
        fn.rsample()


def test_draws_for_another_device_are_those_of_the_cpu():
    """The operations that run under ``seeded`` with a GPU at hand are those that run without it."""
    drawn = {}
    for name, mode in (("plain", nullcontext()), ("moved", noise._DrawnOnCPU())):
        with noise.seeded(3), mode:
            drawn[name] = [
                torch.randn(2, 3),
                torch.empty(4).uniform_(1.0, 2.0),
                torch.normal(torch.zeros(2), torch.ones(2)),
                torch.distributions.Gamma(torch.tensor([0.5, 3.0]), 1.0).sample(),
                torch.distributions.Categorical(torch.tensor([0.2, 0.8])).sample((5,)),
                torch.distributions.Poisson(torch.tensor([2.0, 9.0])).sample(),
                torch.rand(3, device="cpu") + 1,
            ]
    for plain, moved in zip(drawn["plain"], drawn["moved"], strict=True):
        assert torch.equal(plain, moved)
