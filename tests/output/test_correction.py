"""The corrected posterior against integrals on a grid and closed forms."""

from dataclasses import replace

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.output.correction import WIDER, Kernels, around, unseen, weighed
from tests.scenarios import known_scales

SCHOOLS = datasets.eight_schools()


def of_grid():
    """Mean and standard deviation of eight schools' μ and τ, by the integral over a grid, θ integrated out."""
    y, sigma = SCHOOLS["y"].double(), SCHOOLS["sigma"].double()
    mu = torch.linspace(-25, 35, 601, dtype=torch.float64)[:, None]
    tau = torch.linspace(0.005, 80, 8000, dtype=torch.float64)[None]
    log_density = -(mu**2) / 50 - torch.log1p((tau / 5) ** 2)
    for one, sd in zip(y, sigma, strict=True):
        log_density = log_density + dist.Normal(mu, (sd**2 + tau**2).sqrt()).log_prob(one)
    p = (log_density - log_density.max()).exp()
    p = p / p.sum()
    found = {}
    for name, at in (("mu", mu), ("tau", tau)):
        mean = float((p * at).sum())
        found[name] = mean, float((p * (at - mean) ** 2).sum().sqrt())
    return found


def test_a_skewed_posterior_of_few_clients():
    """Within five Monte Carlo errors of 2000 draws: .11 sd, and 8 %; heavy tails, so 12 %. q's τ is 30 % too wide."""
    plain = bf.fit(models.eight_schools, SCHOOLS, bf.SFVI(corrected=False))
    draws, before = plain.corrected().sample(20_000), plain.sample(20_000)
    for name, (mean, sd) in of_grid().items():
        assert abs(float(draws[name].mean()) - mean) < 0.11 * sd
        assert abs(float(draws[name].std()) / sd - 1) < 0.12
    assert float(before["tau"].std()) / of_grid()["tau"][1] > 1.2


TAU = SIGMA = 0.5


def product(federation):
    size = pyro.sample("size", dist.HalfNormal(1.0))
    sign = pyro.sample("sign", dist.Normal(0.0, 1.0))
    with federation.clients():
        level = pyro.sample("level", dist.Normal(0.0, TAU))
        with federation.observations() as obs:
            mean = level + size * sign * obs["x"]
            pyro.sample("y", dist.Normal(mean, SIGMA), obs=obs.get("y"))


def of_product():
    """Eight clients of twelve rows, the product being .3."""
    generator, clients = np.random.default_rng(0), {}
    for i in range(8):
        x = generator.uniform(0.5, 1.5, 12)
        mean = generator.normal(0, TAU) + 0.3 * x
        clients[f"c{i}"] = {"x": x, "y": mean + SIGMA * generator.normal(size=12)}
    return bf.Federation.from_arrays(clients)


def moments_of_product(federation):
    """Means and standard deviations of all variables, by the integral over a grid, levels integrated out."""
    size = torch.linspace(0.0005, 4.5, 1500, dtype=torch.float64)[:, None]
    sign = torch.linspace(-4, 5, 1501, dtype=torch.float64)[None]
    log_density, levels = -(size**2) / 2 - sign**2 / 2, []
    for name in federation.names:
        one = federation.select([name])
        x, y, slope = one["x"].double(), one["y"].double(), size * sign
        total = y.sum() - slope * x.sum()
        squares = (y * y).sum() - 2 * slope * (x * y).sum() + slope**2 * (x * x).sum()
        shrunk = TAU**2 / (SIGMA**2 + len(y) * TAU**2)
        log_density = log_density - (squares - shrunk * total**2) / (2 * SIGMA**2)
        levels.append((shrunk * total, SIGMA**2 * shrunk))
    p = (log_density - log_density.max()).exp()
    p = p / p.sum()
    found = {}
    for name, at in (("size", size), ("sign", sign)):
        mean = (p * at).sum()
        found[name] = mean[None], (p * (at - mean) ** 2).sum().sqrt()[None]
    means = torch.stack([(p * loc).sum() for loc, _ in levels])
    squares = torch.stack([(p * (loc**2 + variance)).sum() for loc, variance in levels])
    return found | {"level": (means, (squares - means**2).sqrt())}


def test_a_bent_posterior_whose_clients_do_not_follow_in_a_line():
    """Only the product of two globals is known, and clients' levels lie where it is.

    Within five Monte Carlo errors of 2500 draws with long tails, .1 sd and 12 %. q has half of the spreads; a single t
    misses the ends of the ridge, and with one draw of each level from q(level | θ) weights there are noise.
    """
    federation = of_product()
    plain = bf.fit(product, federation, bf.SFVI(corrected=False))
    posterior = plain.corrected()
    assert posterior.correction.closely
    truth = moments_of_product(federation)
    after, before = posterior.sample(10_000), plain.sample(10_000)
    for name, (mean, sd) in truth.items():
        draws = after[name].double().reshape(10_000, -1)
        assert float(((draws.mean(0) - mean) / sd).abs().max()) < 0.1
        assert float((draws.std(0) / sd - 1).abs().max()) < 0.12
    for name in ("size", "sign"):
        assert float(before[name].std() / truth[name][1]) < 0.6


def test_weights_of_many_clients_are_let_be_where_they_are_quiet():
    assert not bf.fit(models.eight_schools, SCHOOLS, rounds=20).correction.closely


def test_kernels_are_a_mixture_of_students():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        centres, root = torch.randn(3, 2), torch.tensor([[0.7, 0.0], [0.4, 1.1]])
        law = Kernels(centres, root)
        z = 2 * torch.randn(50, 2)
        draws = law.sample(60_000)
    parts = dist.MultivariateStudentT(torch.full((3,), 5.0), centres, root.expand(3, 2, 2))
    mixture = dist.MixtureSameFamily(dist.Categorical(torch.ones(3)), parts)
    torch.testing.assert_close(law.log_prob(z), mixture.log_prob(z))
    torch.testing.assert_close(draws.mean(0), centres.mean(0), atol=0.03, rtol=0)


@pytest.mark.parametrize("centres", [1, 400])
def test_a_law_has_the_moments_of_the_weighted_draws(centres):
    """Draws of a circle, not all of it. Its own covariance is theirs, but for what each t is wider."""
    angle = torch.linspace(0, 6, 3000, dtype=torch.float64)
    z = torch.stack([angle.cos(), angle.sin()], -1)
    weights = (2 + angle) / (2 + angle).sum()
    law = around(z, weights, centres)
    mean = weights @ z
    covariance = (weights[:, None] * (z - mean)).mT @ (z - mean)
    torch.testing.assert_close(law.centres.mean(0), mean, atol=2e-3, rtol=0)
    of_centres = torch.cov(law.centres.mT, correction=0) if centres > 1 else 0.0
    of_each = law.root @ law.root.mT * 5 / 3 / WIDER**2
    torch.testing.assert_close(of_centres + of_each, covariance, atol=5e-3, rtol=0)
    there, middle = law.log_prob(torch.stack([z[1500], mean]))
    assert bool(there > middle + 1) == (centres > 1)  # many bend as the draws do


def test_what_lies_beyond_the_largest_weight():
    """Of a Pareto law with shape k the part of the mean beyond x is (x / x₀)^(1 − 1/k), x being its largest of S."""
    for k in (0.5, 0.7):
        draws = torch.arange(1, 10_001, dtype=torch.float64).div(10_001).pow(-k)  # quantiles
        beyond = float(draws.max()) ** (1 - 1 / k)
        assert unseen(draws.log(), k) == pytest.approx(beyond, rel=0.2)
    assert unseen(draws.log(), 1.2) == float("inf")


def exact():
    y, variance = SCHOOLS["y"], SCHOOLS["sigma"] ** 2 + 64
    precision = 1 / 25 + (1 / variance).sum()
    return float((y / variance).sum() / precision), float(precision.rsqrt())


def test_an_exact_q_stays():
    posterior = bf.fit(known_scales, SCHOOLS)
    assert posterior.correction is None
    assert posterior.corrected().correction is None


def wrong(**moves):
    """A q(θ) of that model that is somewhere else."""
    posterior = bf.fit(known_scales, SCHOOLS, rounds=30)
    moved = {name: posterior.params[f"global.{name}"] + by for name, by in moves.items()}
    return replace(
        posterior, params=posterior.params | {f"global.{n}": v for n, v in moved.items()}
    )


@pytest.mark.parametrize("moves", [{"loc": 0.4}, {"log_scale": -0.5}, {"log_scale": 0.5}], ids=str)
def test_a_wrong_q_is_mended(moves):
    """Half a standard deviation or more off before; after it within four Monte Carlo errors of 1500 draws."""
    posterior = wrong(**moves)
    mean, sd = exact()
    before, after = (p.sample(20_000)["mu"] for p in (posterior, posterior.corrected()))
    assert abs(float(before.mean()) - mean) > 0.4 * sd or abs(float(before.std()) / sd - 1) > 0.3
    assert abs(float(after.mean()) - mean) < 0.1 * sd
    assert abs(float(after.std()) / sd - 1) < 0.075


def test_a_q_that_is_too_far_stays_and_is_named():
    posterior = wrong(loc=30.0).corrected()
    assert posterior.correction is None
    assert posterior.khat > 0.7


def test_it_is_the_same_each_time_and_after_a_file(tmp_path):
    posterior = bf.fit(models.eight_schools, SCHOOLS, rounds=20)
    again = posterior.corrected()
    assert torch.equal(again.correction.theta["global"], posterior.correction.theta["global"])
    posterior.save(tmp_path / "p.safetensors")
    loaded = bf.Posterior.load(tmp_path / "p.safetensors", models.eight_schools, SCHOOLS)
    assert loaded.khat == posterior.khat == posterior.correction.khat
    for name, value in posterior.sample(50).items():
        assert torch.equal(loaded.sample(50)[name], value)


def test_chunks_of_clients_add_up(monkeypatch):
    posterior = bf.fit(models.eight_schools, SCHOOLS, rounds=20)
    monkeypatch.setattr("bayesfed.data.chunks.PASS", 1)
    monkeypatch.setattr("bayesfed.data.chunks.SMALL", 1)
    theirs = weighed(replace(posterior, correction=None)).correction.theta["global"]
    torch.testing.assert_close(theirs, posterior.correction.theta["global"])


def test_new_clients_and_some_of_them_take_its_draws():
    everyone = datasets.eight_schools()
    federation, newcomer = everyone.hold_out(["A"])
    posterior = bf.fit(models.eight_schools, federation, rounds=20)
    assert posterior.correction is not None
    for other in (posterior.personalize(newcomer), posterior.select(["C"])):
        assert torch.equal(other.sample(30)["tau"], posterior.sample(30)["tau"])
        with pytest.raises(
            ValueError, match="1 clients, the fit had 7: correct the posterior of the"
        ):
            other.corrected()


def test_the_centre_is_that_of_q():
    plain = bf.fit(models.eight_schools, SCHOOLS, bf.SFVI(corrected=False), rounds=20)
    centre = plain.sample(1, centre=True)["tau"]
    assert torch.equal(plain.corrected().sample(1, centre=True)["tau"], centre)


@pytest.mark.parametrize("algorithm", [bf.FedAvg(), bf.PACPFL()], ids=str)
def test_points_and_particles_have_none(algorithm):
    posterior = bf.fit(models.eight_schools, SCHOOLS, algorithm, rounds=1)
    assert posterior.corrected().correction is None


def test_a_guide_of_ones_own_stays_as_it_is():
    """Its site is the model's own, whose prior counts: as a family's it would be drawn by the likelihood alone."""

    def model(federation):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with federation.clients(), federation.observations() as obs:
            pyro.sample("y", dist.Normal(w[..., 0], 10.0), obs=obs.get("y"))
            pyro.sample("sigma", dist.Normal(10 + w[..., 1], 10.0), obs=obs.get("sigma"))

    def guide(federation):
        loc = pyro.param("loc", torch.zeros(2), event_dim=1)
        pyro.sample("w", dist.Normal(loc, 3.0).to_event(1))

    posterior = bf.fit(model, SCHOOLS, bf.SFVI(guide=guide), rounds=2)
    assert posterior.correction is None
    assert posterior.corrected().correction is None


def test_a_private_run_asks_nobody():
    privacy = bf.Privacy(epsilon=100.0, clip=10.0)
    with pytest.warns(UserWarning, match="would move q"):
        posterior = bf.fit(models.eight_schools, SCHOOLS, rounds=2, privacy=privacy)
    assert posterior.correction is None


def test_other_algorithms_are_corrected_when_asked():
    posterior = bf.fit(models.eight_schools, SCHOOLS, bf.PVI(), rounds=30)
    assert posterior.correction is None
    tau = posterior.corrected().sample(20_000)["tau"]
    mean, sd = of_grid()["tau"]
    assert abs(float(tau.mean()) - mean) < 0.11 * sd
    assert abs(float(tau.std()) / sd - 1) < 0.12
