"""Weighted draws: their weights, resampling by them, and independence of how clients are chunked."""

from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.distributions import Normal

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.data.chunks import chunks as cut
from bayesfed.elbo import noise
from bayesfed.output import draws as module
from bayesfed.output.client_draws import Draws
from bayesfed.output.draws import theta_support, weighted_draws
from tests.scenarios import conjugate_hierarchy, ragged

pytestmark = pytest.mark.usefixtures("float64")
QUIET = {"progress": False, "execution": bf.Execution(compile=False)}


@pytest.fixture(scope="module")
def data():
    return ragged(6, dtype=torch.float64)


@pytest.fixture(scope="module")
def particles(data):
    torch.set_default_dtype(torch.float64)
    try:
        algorithm = bf.PACPFL(particles=3, draws=20, integrated=False)
        return bf.fit(conjugate_hierarchy, data, algorithm, rounds=2, **QUIET)
    finally:
        torch.set_default_dtype(torch.float32)


def two_observed(federation):
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    with federation.clients():
        alpha = pyro.sample("alpha", dist.Normal(mu, 1.0))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(alpha, 0.5), obs=obs.get("y"))
        pyro.sample("survey", dist.Normal(alpha, 1e-3), obs=obs["y"][..., :1])


def test_the_weight_is_the_likelihood_where_clients_draw_from_their_prior(particles, data):
    for chunk, found in weighted_draws(particles, 90, 0):
        alpha = found.values["alpha"]
        assert alpha.shape == (90, len(chunk), 1)
        for i, client in enumerate(chunk.tolist()):
            y = data.select([data.names[client]])["y"]
            by_hand = Normal(alpha[:, i], 0.5).log_prob(y).sum(-1)
            torch.testing.assert_close(found.log_weights[:, i], by_hand)


@pytest.mark.parametrize("beta", [None, 1.0])
def test_draws_around_modes_are_exact_where_the_posterior_is_normal(data, beta):
    """β rows of variance 0.25: the weights are the same for all draws at a particle, log Z_i of its closed form."""
    algorithm = bf.PACPFL(particles=3, beta=beta)
    posterior = bf.fit(conjugate_hierarchy, data, algorithm, rounds=2, **QUIET)
    for chunk, found in weighted_draws(posterior, 9000, 0):
        alpha, mu = found.values["alpha"][..., 0], found.values["mu"].reshape(-1)
        for i, client in enumerate(chunk.tolist()):
            y = data.select([data.names[client]])["y"]
            rows = float(beta or len(y))
            precision = 1 + 4 * rows
            mean, sd = (mu + 4 * rows * y.mean()) / precision, precision**-0.5
            standard = (alpha[:, i] - mean) / sd
            assert abs(float(standard.mean())) < 4 / 9000**0.5
            assert abs(float(standard.std()) - 1) < 4 / 18_000**0.5
            terms = Normal(alpha[:, i, None], 0.5).log_prob(y).mean(-1) * rows
            log_z = terms + Normal(mu, 1.0).log_prob(alpha[:, i])
            log_z = log_z - Normal(mean, sd).log_prob(alpha[:, i])
            torch.testing.assert_close(found.log_weights[:, i], log_z)
            for value in mu.unique():
                assert float(found.log_weights[mu == value, i].std()) < 1e-8


def test_a_tempered_likelihood_has_less_weight(data):
    algorithm = bf.PACPFL(particles=2, draws=5, beta=1.0, integrated=False)
    posterior = bf.fit(conjugate_hierarchy, data, algorithm, rounds=1, **QUIET)
    for chunk, found in weighted_draws(posterior, 10, 0):
        for i, client in enumerate(chunk.tolist()):
            y = data.select([data.names[client]])["y"]
            by_hand = Normal(found.values["alpha"][:, i], 0.5).log_prob(y).mean(-1)
            torch.testing.assert_close(found.log_weights[:, i], by_hand)


def test_the_support_of_theta_is_enumerated(data, particles):
    assert theta_support(particles)[1] == 3
    point = bf.fit(conjugate_hierarchy, data, bf.FedAvg(), rounds=1, **QUIET)
    assert theta_support(point) == ({}, 1)
    assert theta_support(bf.fit(conjugate_hierarchy, data, bf.SFVI(), rounds=1, **QUIET)) is None


def test_each_particle_has_as_many_draws_as_the_others(particles):
    _chunk, found = next(weighted_draws(particles, 100, 0))
    assert found.count == 99
    _mu, counts = found.values["mu"].unique(return_counts=True)
    assert counts.tolist() == [33, 33, 33]


def test_where_nothing_is_random_there_is_one_draw(data):
    posterior = bf.fit(conjugate_hierarchy, data, bf.FedAvg(), rounds=2, **QUIET)
    mixture = posterior.predictive()
    assert mixture.mixture_distribution.probs.shape == (data.rows, 1)
    alpha = posterior.sample(3)["alpha"]
    assert torch.equal(alpha[0], alpha[2])
    torch.testing.assert_close(mixture.mean, alpha[0, data.owner])


def test_resampling_follows_the_weights():
    """20,000 draws: the standard error of a frequency is at most 0.0036."""
    torch.manual_seed(0)
    log_weights = torch.randn(6, 2)
    values = {"w": torch.arange(6.0)[:, None, None].expand(6, 2, 1)}
    keys = noise.fold(noise.key(0), torch.arange(2))
    picked = Draws(values, 6, log_weights).resample(1, 20_000, keys).values["w"][..., 0]
    for client in range(2):
        share = torch.bincount(picked[:, client].long(), minlength=6) / 20_000
        assert (share - log_weights[:, client].softmax(0)).abs().max() < 0.015
    assert abs(float(torch.corrcoef(picked.T)[0, 1])) < 4 / 20_000**0.5
    groups = Draws(values, 6, log_weights).resample(3, 2, keys).values["w"][..., 0]
    assert [set((row // 2).tolist()) for row in groups.reshape(3, -1)] == [{0.0}, {1.0}, {2.0}]


def test_a_weight_of_zero_is_never_chosen():
    weights = torch.tensor([[-torch.inf], [0.0], [-torch.inf]])
    values = {"w": torch.arange(3.0)[:, None, None]}
    keys = noise.fold(noise.key(0), torch.arange(1))
    assert (Draws(values, 3, weights).resample(1, 1000, keys).values["w"] == 1).all()


def test_predictions_of_several_sites_use_the_same_draw(data):
    """The weights of the draws are those of all rows."""
    posterior = bf.fit(two_observed, data, bf.PACPFL(particles=2), rounds=1, **QUIET)
    found = posterior.predict(num_samples=2000)
    residual = found["y"] - found["survey"][:, data.owner]
    assert (residual.std(0) / 0.5 - 1).abs().max() < 8 / 4000**0.5


ALGORITHMS = [
    bf.FedAvg(),
    bf.SFVI(local_steps=1, draws=1),
    bf.PACPFL(particles=2, draws=3),
    bf.FedABML(),
]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_results_do_not_depend_on_chunks_of_clients(data, algorithm, monkeypatch):
    posterior = bf.fit(conjugate_hierarchy, data, algorithm, rounds=2, **QUIET)

    def everything():
        return [
            *posterior.sample(12).values(),
            posterior.log_likelihood(num_samples=12)["y"],
            posterior.predictive(num_samples=12).log_prob(data["y"]),
            posterior.elbo(12),
        ]

    together = everything()
    monkeypatch.setattr(module, "PASS", 50)
    monkeypatch.setattr(module, "chunks", partial(cut, most=50))
    for one, other in zip(everything(), together, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_selected_clients_have_the_same_draws_as_among_all(data, particles):
    some = [data.names[4], data.names[1]]
    alpha = particles.sample(20)["alpha"]
    torch.testing.assert_close(particles.select(some).sample(20)["alpha"], alpha[:, [4, 1]])


NETWORKS = {
    "points": {},
    "shared": {"local": ()},
    "personal head": {"local": ["2."]},
    "hyper-prior": {"hyper_scale": 0.4, "spread": "learnt"},
    "client's own spread": {"spread": "client"},
}


@pytest.mark.parametrize("settings", NETWORKS.values(), ids=NETWORKS)
def test_the_posterior_of_a_network_works_for_all_ways_of_sharing(settings, tmp_path):
    torch.manual_seed(0)
    data = bf.Federation.from_arrays(
        {f"c{i}": {"x": torch.randn(3 + i, 4), "y": torch.arange(3 + i) % 3} for i in range(4)}
    )
    model = models.Network(models.mlp(4, 5, 3), **settings)
    posterior = bf.fit(model, data.select(["c0", "c2", "c3"]), bf.FedAvg(), rounds=2, **QUIET)
    new = posterior.personalize(data.select(["c1"]), steps=3)
    for one in (posterior, new):
        rows = one.federation.rows
        assert one.predict(num_samples=5)["y"].shape == (5, rows)
        assert one.log_likelihood(num_samples=5)["y"].shape == (5, rows)
        probabilities = one.probabilities()["y"]
        torch.testing.assert_close(probabilities, one.probabilities(centre=True)["y"])
        torch.testing.assert_close(
            probabilities, one.predictive().component_distribution.probs[:, 0]
        )
        sites = {site.name for site in (*one.program.globals, *one.program.locals)}
        assert one.sample(5).keys() == sites
        idata = one.to_arviz(8)
        assert idata.log_likelihood["y"].shape == (1, 8, rows)
        assert ("posterior" in set(idata)) == bool(sites)
        one.save(tmp_path / "p")
        again = bf.Posterior.load(tmp_path / "p", model, one.federation)
        torch.testing.assert_close(again.probabilities()["y"], probabilities)


def test_draws_of_a_posterior_are_made_once_for_arviz(monkeypatch):
    """Draws, log likelihoods, predictions and derived values share them, and so does a second call."""
    made, of_clients = [], module.draw_clients

    def count(*args, **kwargs):
        made.append(args[1:3])
        return of_clients(*args, **kwargs)

    monkeypatch.setattr(module, "draw_clients", count)
    posterior = bf.fit(models.eight_schools, datasets.eight_schools(), rounds=3)
    posterior.sample(50)
    made.clear()
    first = posterior.to_arviz(60)
    assert len(made) == 1
    again = posterior.to_arviz(60)
    assert len(made) == 1
    assert first.posterior.equals(again.posterior)
    for value in posterior.sample(60).values():
        value.zero_()
    assert first.posterior.equals(posterior.to_arviz(60).posterior)
    posterior.sample(60, seed=1)
    assert len(made) == 2


def test_draws_that_are_too_large_are_not_kept(monkeypatch):
    posterior = bf.fit(models.eight_schools, datasets.eight_schools(), rounds=3)
    kept = posterior.sample(50)
    monkeypatch.setattr(module, "KEPT", 10)
    other = bf.fit(models.eight_schools, datasets.eight_schools(), rounds=3)
    found = other.sample(50)
    assert not module._last_draws[other][1] and module._last_draws[posterior][1]
    for name, value in kept.items():
        torch.testing.assert_close(found[name], value)


def test_draws_of_any_clients_are_put_together_from_kept_ones(monkeypatch):
    """Those of few clients, in another order, are the same as if they were made for them."""
    posterior = bf.fit(models.eight_schools, datasets.eight_schools(), rounds=5)
    list(module.equal_draws(posterior, 20, 0))
    wanted = torch.tensor([5, 2])
    theta = module.draw_theta(posterior, 20, posterior.key(0))
    expected = module.draw_clients(posterior, theta, 20, wanted, posterior.key(0))
    monkeypatch.setattr(module, "client_chunks", lambda *_: iter([wanted]))
    monkeypatch.setattr(module, "draw_clients", None)  # none is made
    ((_, found),) = module.equal_draws(posterior, 20, 0)
    for name, value in expected.values.items():
        torch.testing.assert_close(found.values[name], value)
