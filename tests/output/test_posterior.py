"""Draws, predictions and new clients of a posterior that is known in closed form."""

import pyro
import pyro.distributions as dist
import pytest
import torch

import bayesfed as bf
from bayesfed import models
from tests.scenarios import conjugate_hierarchy, exact, ragged

pytestmark = pytest.mark.usefixtures("float64")

QUICK = bf.SFVI(local_steps=2, draws=2)
S = 4000
# Four Monte Carlo errors, of a mean in sd (1/√S) and of a log sd (1/√2S), and as much again for the
# error of the optimiser.
MEAN, SPREAD = 8 / S**0.5, 8 / (2 * S) ** 0.5


@pytest.fixture(scope="module")
def data():
    return ragged(6, dtype=torch.float64)


@pytest.fixture(scope="module")
def fitted(data):
    """All clients but the last; the guide contains the exact posterior."""
    torch.set_default_dtype(torch.float64)
    try:
        others, _ = data.hold_out(data.names[-1])
        return bf.fit(conjugate_hierarchy, others, bf.SFVI(local_steps=4, draws=4), rounds=40)
    finally:
        torch.set_default_dtype(torch.float32)


def assert_moments(draws, loc, sd):
    """The draws have this mean and standard deviation, S being 4000."""
    assert len(draws) == S
    assert ((draws.mean(0) - loc).abs() / sd).max() < MEAN
    assert (draws.std(0) / sd).log().abs().max() < SPREAD


# -- sample ---------------------------------------------------------------------------------------


def test_samples_have_the_exact_moments(fitted):
    truth, draws = exact(fitted.federation), fitted.sample(S)
    assert list(draws) == ["mu", "alpha"]
    assert draws["mu"].shape == (S,)
    assert draws["alpha"].shape == (S, 5)
    assert_moments(draws["mu"], *map(torch.tensor, truth.mu))
    assert_moments(draws["alpha"], *truth.alpha)
    # alpha_i | mu has slope 1 / (1 + 4 n_i) in mu; four errors of a slope, see MEAN
    residual = draws["alpha"].std(0)
    mu = draws["mu"] - draws["mu"].mean()
    slope = (mu[:, None] * draws["alpha"]).sum(0) / mu.square().sum()
    error = residual / truth.mu[1] / S**0.5
    assert ((slope - 1 / (1 + 4 * fitted.federation.lengths)).abs() < 8 * error).all()


def test_the_centre_is_the_mean_of_a_normal_guide(fitted):
    draws, centre = fitted.sample(S), fitted.sample(2, centre=True)
    for name, values in draws.items():
        assert torch.equal(centre[name][0], centre[name][1])
        assert ((values.mean(0) - centre[name][0]).abs() < MEAN * values.std(0)).all()


def test_seeds_of_samples(fitted):
    first, same, other = (fitted.sample(10, seed=seed) for seed in (1, 1, 2))
    for name in first:
        assert torch.equal(first[name], same[name])
        assert not (first[name] == other[name]).any()
        assert torch.equal(fitted.sample(20, seed=1)[name][:10], first[name])


def test_draws_do_not_touch_torchs_generator(fitted):
    state = torch.get_rng_state()
    fitted.sample(3)
    fitted.predict(num_samples=3)
    fitted.log_likelihood(num_samples=3)
    fitted.elbo(3)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_network_names_the_parameters_that_its_clients_share():
    rows = {"x": torch.zeros(4, 2), "y": torch.tensor([0, 1, 0, 1])}
    data = bf.Federation.from_arrays({"a": rows, "b": rows})
    posterior = bf.fit(models.Network(models.mlp(2, 2)), data, bf.FedAvg(), rounds=1)
    assert "globals prior.loc; locals weights" in repr(posterior)


def test_repr(fitted):
    assert repr(fitted).startswith("Posterior: SFVI")
    assert repr(fitted).endswith("40 rounds, 5 clients; globals mu; locals alpha")


# -- predict and log_likelihood -------------------------------------------------------------------


def test_predictions_have_the_exact_moments(fitted):
    federation = fitted.federation
    loc, sd = (x[federation.owner] for x in exact(federation).alpha)
    y = fitted.predict(num_samples=S)["y"]
    assert y.shape == (S, federation.rows)
    assert_moments(y, loc, (sd**2 + 0.25).sqrt())
    noise = y - fitted.sample(S)["alpha"][:, federation.owner]
    assert_moments(noise, 0.0, torch.tensor(0.5))
    assert torch.equal(
        fitted.predict(num_samples=9, seed=3)["y"], fitted.predict(None, 9, seed=3)["y"]
    )


def test_predictions_of_other_rows_of_some_clients(fitted):
    """Rows in the order of the federation asked for; the observed field may be absent."""
    names = fitted.federation.names
    asked = bf.Federation.from_arrays(
        {names[3]: {"age": [1.0, 2.0]}, names[0]: {"age": [3.0]}, names[1]: {"age": [4.0] * 4}}
    )
    y = fitted.predict(asked, S)["y"]
    assert y.shape == (S, 7)
    rows = torch.tensor([3, 3, 0, 1, 1, 1, 1])
    loc, sd = (x[rows] for x in exact(fitted.federation).alpha)
    assert_moments(y, loc, (sd**2 + 0.25).sqrt())


def test_test_rows_of_a_split():
    data = bf.Federation.from_arrays({f"c{i}": {"y": torch.randn(3 + i)} for i in range(3)})
    train, test = data.split(test=0.3, seed=0)
    posterior = bf.fit(conjugate_hierarchy, train, QUICK, rounds=3)
    assert posterior.predict(test, 10)["y"].shape == (10, test.rows)
    found = posterior.log_likelihood(test, 10)["y"]
    alpha = posterior.sample(10)["alpha"][:, test.owner]
    torch.testing.assert_close(found, dist.Normal(alpha, 0.5).log_prob(test["y"]))


def test_log_likelihood_is_that_of_the_draws(fitted):
    federation = fitted.federation
    found = fitted.log_likelihood(num_samples=50, seed=4)["y"]
    alpha = fitted.sample(50, seed=4)["alpha"][:, federation.owner]
    torch.testing.assert_close(found, dist.Normal(alpha, 0.5).log_prob(federation["y"]))
    some = federation.select([federation.names[4], federation.names[1]])
    alpha = fitted.sample(50)["alpha"][:, torch.tensor([4, 1])[some.owner]]
    found = fitted.log_likelihood(some, 50)["y"]
    torch.testing.assert_close(found, dist.Normal(alpha, 0.5).log_prob(some["y"]))


def test_rows_without_outcomes_have_no_log_likelihood(fitted):
    """Not that of outcomes that are drawn in their place."""
    asked = bf.Federation.from_arrays({fitted.federation.names[0]: {"age": [1.0, 2.0]}})
    assert fitted.predict(asked, 3)["y"].shape == (3, 2)
    with pytest.raises(ValueError, match="the rows have no outcomes of site 'y': give the field"):
        fitted.log_likelihood(asked, 3)


@pytest.mark.parametrize("method", ["predict", "log_likelihood"])
def test_unknown_clients_are_sent_to_personalize(fitted, data, method):
    _, new = data.hold_out(data.names[-1])
    with pytest.raises(
        KeyError, match=rf"{data.names[-1]!r} took no part in the fit: .*personalize"
    ):
        getattr(fitted, method)(new, 3)


# -- elbo -----------------------------------------------------------------------------------------


def test_elbo_is_below_the_evidence_and_close(fitted):
    elbo = fitted.elbo(S)
    assert elbo.shape == (S,)
    evidence = exact(fitted.federation).log_evidence
    error = float(elbo.std()) / S**0.5
    # 0.05 nats is the error after 150 rounds
    assert evidence - 0.05 < elbo.mean() < evidence + 4 * error + 1e-9
    assert torch.equal(fitted.elbo(5, seed=1), fitted.elbo(5, seed=1))


# -- personalize ----------------------------------------------------------------------------------


def test_a_new_client_has_its_exact_conditional(fitted, data):
    """alpha | mu, D ~ N((mu + 4 Σy) / p, 1/p), p = 1 + 4n; mu has its distribution N(m, v) given the others' data."""
    _, new = data.hold_out(data.names[-1])
    posterior = fitted.personalize(new, steps=300)
    m, sd = exact(fitted.federation).mu
    precision = 1 + 4 * new.rows
    loc = (m + 4 * float(new["y"].sum())) / precision
    variance = 1 / precision + sd**2 / precision**2
    draws = posterior.sample(S)
    assert draws["alpha"].shape == (S, 1)
    assert_moments(draws["alpha"], loc, torch.tensor(variance**0.5))
    y = posterior.predict(new, S)["y"]
    assert_moments(y, loc, torch.tensor((variance + 0.25) ** 0.5))
    assert posterior.federation.names == data.names[-1:]


def test_personalize_leaves_the_globals_and_the_old_posterior_untouched(fitted, data):
    before = {name: value.clone() for name, value in (fitted.params | fitted.local_params).items()}
    _, new = data.hold_out(data.names[-1])
    posterior = fitted.personalize(new, steps=3, batch_size=1)
    after = fitted.params | fitted.local_params
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert all(torch.equal(posterior.params[n], fitted.params[n]) for n in fitted.params)
    assert torch.equal(posterior.sample(20)["mu"], fitted.sample(20)["mu"])


def classes(federation):
    level = pyro.sample("level", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with federation.clients():
        own = pyro.sample("own", dist.Normal(level, 1.0).to_event(1))
        with federation.observations() as obs:
            pyro.sample("y", dist.Categorical(logits=own), obs=obs.get("y"))


@pytest.mark.parametrize("fitted_as", [torch.int64, torch.uint8, torch.float64])
def test_labels_of_new_clients_may_have_any_type(fitted_as):
    """Two classes, so that booleans can hold them."""
    labels = torch.tensor([0, 1, 1, 0, 1])
    clients = {name: {"y": labels[i:].to(fitted_as)} for i, name in enumerate("abc")}
    of_classes = bf.fit(classes, bf.Federation.from_arrays(clients), rounds=3, progress=False)
    found = []
    for dtype in (torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32, torch.float64):
        new = bf.Federation.from_arrays({"new": {"y": labels.to(dtype)}})
        posterior = of_classes.personalize(new, steps=3)
        found.append(posterior.probabilities(new)["y"])
        assert posterior.predict(new, 2)["y"].shape == (2, 5)
        log_likelihood = posterior.log_likelihood(new, 2)["y"]
        assert log_likelihood.shape == (2, 5) and (log_likelihood < 0).all()
        torch.testing.assert_close(found[-1], found[0])


@pytest.mark.parametrize("fitted_as", [torch.int64, torch.float64])
def test_new_clients_without_labels_follow_the_prior(fitted_as):
    rows = {"y": torch.tensor([0, 1, 1, 0, 2]).to(fitted_as), "x": torch.zeros(5)}
    clients = bf.Federation.from_arrays(dict.fromkeys("abc", rows))
    of_classes = bf.fit(classes, clients, rounds=3, progress=False)
    new = bf.Federation.from_arrays({"new": {"x": torch.zeros(4)}})
    posterior = of_classes.personalize(new, steps=3)
    assert posterior.probabilities(new)["y"].shape == (4, 3)
    own, level = (posterior.sample(S)[name] for name in ("own", "level"))
    assert_moments(own[:, 0] - level, torch.zeros(3), torch.ones(3))


def test_new_clients_without_a_category_are_refused():
    def model(federation):
        effect = pyro.sample("effect", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        with federation.clients(), federation.observations() as obs:
            pyro.sample("y", dist.Normal(effect[obs["kind"]], 1.0), obs=obs.get("y"))

    rows = {"y": torch.zeros(2), "kind": torch.tensor([0, 1])}
    posterior = bf.fit(model, bf.Federation.from_arrays({"a": rows}), rounds=2, progress=False)
    new = bf.Federation.from_arrays({"new": {"y": torch.zeros(2)}})
    with pytest.raises(ValueError, match="does not run on rows without kind. Only outcomes may be"):
        posterior.personalize(new)


def test_new_clients_do_not_see_each_other(fitted):
    new = ragged(3, seed=5)
    both = fitted.personalize(new, steps=5)
    for i, name in enumerate(new.names):
        alone = fitted.personalize(new.select(name), steps=5)
        for param, value in alone.local_params.items():
            torch.testing.assert_close(value[0], both.local_params[param][i], rtol=1e-9, atol=1e-12)
