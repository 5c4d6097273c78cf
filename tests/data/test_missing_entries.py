"""Vectors of which some entries are missing, and rows under a mask: what is observed counts, and nothing else."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

import bayesfed as bf
from bayesfed.elbo import handlers
from bayesfed.elbo.log_density import log_density

SIGMA = torch.tensor([[1.0, 0.8], [0.8, 1.0]])
LAWS = {
    "normal": lambda a: dist.MultivariateNormal(a, covariance_matrix=SIGMA),
    "factor": lambda a: dist.MultivariateNormal(a, scale_tril=torch.linalg.cholesky(SIGMA)),
    "low rank": lambda a: dist.LowRankMultivariateNormal(
        a, torch.full((2, 1), 0.8**0.5), torch.full((2,), 0.2)
    ),
    "Pyro's own": lambda a: dist.NanMaskedMultivariateNormal(a, covariance_matrix=SIGMA),
    "independent": lambda a: dist.Normal(a, 1.0).to_event(1),
    "Pyro's own, independent": lambda a: dist.NanMaskedNormal(a, torch.tensor(1.0)).to_event(1),
}


def pairs_model(law):
    def model(federation):
        m = pyro.sample("m", dist.Normal(torch.zeros(2), 2.0).to_event(1))
        with federation.clients():
            a = pyro.sample("a", dist.Normal(m, 0.5).to_event(1))
            with federation.observations() as obs:
                pyro.sample("pair", law(a), obs=obs.get("pair"))

    return model


def half_seen(clients=6):
    generator = torch.Generator().manual_seed(0)
    found = {}
    for i in range(clients):
        noise = torch.randn(6 + i % 3, 2, generator=generator) @ torch.linalg.cholesky(SIGMA).mT
        y = torch.tensor([1.0, -1.0]) + 0.5 * torch.randn(2, generator=generator) + noise
        y[torch.arange(len(y)) % 3 > 0, 1] = torch.nan
        y[0] = torch.nan
        found[f"person {i}"] = {"pair": y}
    return found


def exact(clients, covariance):
    """The mean and the standard deviation of m: Gaussian regressions of what was observed."""
    precision, shift = torch.eye(2) / 4, torch.zeros(2)
    for rows in clients.values():
        entries = [(r, e) for r in range(len(rows["pair"])) for e in (0, 1)]
        seen = [(r, e) for r, e in entries if not rows["pair"][r, e].isnan()]
        h = torch.stack([torch.eye(2)[e] for _, e in seen])
        c = 0.25 * h @ h.T
        for i, (r, e) in enumerate(seen):
            for j, (r2, e2) in enumerate(seen):
                c[i, j] += covariance[e, e2] if r == r2 else 0.0
        y = torch.stack([rows["pair"][r, e] for r, e in seen])
        precision = precision + h.T @ torch.linalg.solve(c, h)
        shift = shift + h.T @ torch.linalg.solve(c, y)
    cov = torch.linalg.inv(precision)
    return cov @ shift, cov.diagonal().sqrt()


@pytest.mark.parametrize("name", LAWS)
def test_what_is_observed_of_a_vector_counts(name):
    clients = half_seen()
    federation = bf.Federation.from_arrays(clients, missing="keep")
    posterior = bf.fit(pairs_model(LAWS[name]), federation, seed=1, progress=False)
    mean, sd = exact(clients, torch.eye(2) if "independent" in name else SIGMA)
    m = posterior.sample(4000)["m"]
    assert ((m.mean(0) - mean).abs() / sd < 0.1).all()
    assert ((m.std(0) / sd - 1).abs() < 0.1).all()


def test_the_log_likelihood_is_of_what_was_observed():
    clients = half_seen()
    federation = bf.Federation.from_arrays(clients, missing="keep")
    posterior = bf.fit(pairs_model(LAWS["normal"]), federation, seed=1, progress=False)
    y, found = federation["pair"], posterior.log_likelihood(num_samples=50, seed=0)["pair"]
    draws = posterior.sample(50, seed=0)["a"][:, federation.owner]
    first = dist.Normal(draws[..., 0], 1.0).log_prob(y[:, 0].nan_to_num())
    both = dist.MultivariateNormal(draws, SIGMA).log_prob(y.nan_to_num())
    expected = torch.where(y[:, 1].isnan(), first, both)
    assert found[:, y[:, 0].isnan()].isnan().all()
    seen = ~y[:, 0].isnan()
    torch.testing.assert_close(found[:, seen], expected[:, seen], rtol=1e-4, atol=1e-4)


def test_vectors_missing_in_part_are_refused_where_the_rest_has_no_known_distribution():
    def model(federation):
        m = pyro.sample("m", dist.Normal(torch.zeros(2), 2.0).to_event(1))
        with federation.clients():
            a = pyro.sample("a", dist.Normal(m, 0.5).to_event(1))
            with federation.observations() as obs:
                law = dist.MultivariateStudentT(torch.tensor(5.0), a, torch.eye(2))
                pyro.sample("pair", law, obs=obs["pair"])

    federation = bf.Federation.from_arrays(half_seen(), missing="keep")
    with pytest.raises(
        ValueError, match=r"'person 0', row 1: site 'pair' is missing in part .*StudentT"
    ):
        bf.fit(model, federation, rounds=1, progress=False)


def test_obs_mask_is_refused_by_name():
    def model(federation):
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        with federation.clients():
            a = pyro.sample("a", dist.Normal(mu, 1.0))
            with federation.observations() as obs:
                seen = obs["seen"] > 0
                pyro.sample("score", dist.Normal(a, 1.0), obs=obs["score"], obs_mask=seen)

    rows = {"score": [1.0, 2.0], "seen": [1.0, 0.0]}
    federation = bf.Federation.from_arrays({"a": rows, "b": rows})
    with pytest.raises(ValueError, match=r"site 'score' has obs_mask="):
        bf.fit(model, federation, rounds=1, progress=False)


def test_masked_rows_have_log_likelihood_zero():
    def model(federation):
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        with federation.clients():
            a = pyro.sample("a", dist.Normal(mu, 1.0))
            with federation.observations() as obs, poutine.mask(mask=obs["seen"] > 0):
                pyro.sample("score", dist.Normal(a, 1.0), obs=obs["score"])

    rows = {"score": [1.0, 2.0, 50.0], "seen": [1.0, 1.0, 0.0]}
    federation = bf.Federation.from_arrays({"a": rows, "b": rows})
    posterior = bf.fit(model, federation, rounds=20, progress=False)
    found = posterior.log_likelihood(num_samples=20)["score"]
    assert (found[:, [2, 5]] == 0).all()
    assert (found[:, [0, 1, 3, 4]] != 0).all()
    assert math.isclose(float(posterior.sample(4000)["mu"].mean()), 1.5, abs_tol=0.2)


@pytest.mark.parametrize("name", LAWS)
def test_predictions_are_of_the_whole_vector(name):
    """Missing entries are predicted, as the others are: around the client's own mean."""
    federation = bf.Federation.from_arrays(half_seen(), missing="keep")
    posterior = bf.fit(pairs_model(LAWS[name]), federation, seed=1, progress=False)
    found = posterior.predict(num_samples=1000)["pair"]
    own = posterior.sample(4000)["a"].mean(0)[federation.owner]
    assert ((found.mean(0) - own).abs() < 0.25).all()
    assert ((found.std(0) - 1).abs() < 0.3).all()
    data = posterior.to_arviz(num_samples=50)
    missing = federation["pair"].isnan().all(1)
    assert data.predictions["pair"].shape[-2:] == (int(missing.sum()), 2)


def test_a_missing_covariate_is_named_where_vectors_are_missing_in_part_too():
    def model(federation):
        m = pyro.sample("m", dist.Normal(torch.zeros(2), 2.0).to_event(1))
        with federation.clients(), federation.observations() as obs:
            law = dist.MultivariateStudentT(
                torch.tensor(5.0), m + obs["x"][..., None], torch.eye(2)
            )
            pyro.sample("pair", law, obs=obs["pair"])

    rows = {"pair": [[1.0, 2.0], [0.0, 1.0], [1.0, torch.nan]], "x": [1.0, torch.nan, 1.0]}
    federation = bf.Federation.from_arrays({"a": rows, "b": rows}, missing="keep")
    with pytest.raises(ValueError, match="'a', row 1: x is missing"):
        bf.fit(model, federation, rounds=1, progress=False)


@pytest.mark.parametrize("factor", [False, True], ids=["observed", "pyro.factor"])
def test_an_outcome_that_is_complete_counts_where_another_field_has_gaps(factor):
    """A mixture has no transform from the reals, and the value of a factor holds no number."""
    y = torch.tensor([0.5, -1.0, 2.0])
    gaps = torch.tensor([math.nan, 1.0, math.nan])
    data = bf.Federation.from_arrays({"a": {"y": y, "other": gaps}}, missing="keep")

    def model(federation):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with federation.clients(), federation.observations() as obs:
            parts = dist.Normal(torch.stack([mu + 0 * obs["y"], mu + 2 + 0 * obs["y"]], -1), 0.5)
            fn = dist.MixtureSameFamily(dist.Categorical(torch.ones(2)), parts)
            if factor:
                pyro.factor("y", fn.log_prob(obs["y"]))
            else:
                pyro.sample("y", fn, obs=obs["y"])

    program = bf.start(model, data, rounds=1).program
    with handlers.given(data.device, values={"mu": torch.tensor(0.3)}, draws=1):
        nodes = poutine.trace(program.model).get_trace(data.batch()).nodes
    parts = [dist.Normal(loc, 0.5).log_prob(y) for loc in (0.3, 2.3)]
    expected = (torch.stack(parts).logsumexp(0) - math.log(2.0)).sum()
    assert float(log_density(nodes["y"]).sum()) == pytest.approx(float(expected), rel=1e-5)
