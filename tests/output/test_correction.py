"""The corrected posterior against integrals on a grid and closed forms."""

from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.output.correction import correction
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
    theirs = correction(replace(posterior, correction=None)).theta["global"]
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


@pytest.mark.parametrize("algorithm", [bf.FedAvg(), bf.PACPFL()], ids=lambda a: type(a).__name__)
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
