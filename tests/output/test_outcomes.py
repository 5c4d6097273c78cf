"""Predictions of counts have the totals of their rows; a distribution without sampler is named."""

import pyro
import pyro.distributions as dist
import pytest
import torch

import bayesfed as bf

TOTALS = ([4.0, 0.0, 30.0], [7.0, 100.0])
SHARES = torch.tensor([0.2, 0.3, 0.5])


def federation():
    clients = {}
    for i, totals in enumerate(TOTALS):
        counts = [[n // 5, n // 3, n - n // 5 - n // 3] for n in totals]
        clients[f"c{i}"] = {"depth": totals, "y": counts}
    return bf.Federation.from_arrays(clients)


def program(make):
    def model(data):
        level = pyro.sample("level", dist.Normal(0.0, 0.01))
        with data.clients():
            own = pyro.sample("own", dist.Normal(level, 0.01))
            with data.observations() as obs:
                pyro.sample("y", make(own, obs), obs=obs.get("y"))

    return model


def votes(own, obs):
    logits = SHARES.log() + 0 * own[..., None]
    return dist.Multinomial(logits=logits, validate_args=False)


def taxa(own, obs):
    shares = 500.0 * SHARES * own[..., None].exp()
    return dist.DirichletMultinomial(shares, total_count=obs["depth"])


@pytest.mark.parametrize("make", [votes, taxa])
def test_counts_have_the_totals_of_their_rows(make):
    """Their means are totals × shares, up to the error of 1500 draws."""
    data = federation()
    posterior = bf.fit(program(make), data, rounds=2)
    drawn, totals = posterior.predict(data, 1500)["y"], data["depth"]
    assert torch.equal(drawn.sum(-1), totals.expand(1500, -1))
    assert (drawn == drawn.round()).all() and (drawn >= 0).all()
    error = (totals[:, None] * SHARES * (1 - SHARES) / 1500 * 2).sqrt()
    assert ((drawn.mean(0) - totals[:, None] * SHARES).abs() <= 4 * error).all()
    assert "posterior_predictive" in str(posterior.to_arviz(10))


def test_rows_without_outcomes_need_a_total():
    posterior = bf.fit(program(votes), federation(), rounds=2)
    rows = bf.Federation.from_arrays({"c0": {"depth": [3.0]}, "c1": {"depth": [1.0]}})
    with pytest.raises(
        NotImplementedError, match="^site 'y': Multinomial has no total_count[^\n]*$"
    ):
        posterior.predict(rows, 10)


def test_an_outcome_without_sampler_leaves_out_its_predictions():
    def make(own, obs):
        return dist.ImproperUniform(dist.constraints.positive, own.shape, ())

    rows = {"y": [1.0, 2.0]}
    posterior = bf.fit(program(make), bf.Federation.from_arrays({"a": rows, "b": rows}), rounds=2)
    with pytest.raises(
        NotImplementedError, match="^site 'y': ImproperUniform has no sampler[^\n]*$"
    ):
        posterior.predict(num_samples=10)
    with pytest.warns(UserWarning, match="site 'y': ImproperUniform has no sampler"):
        groups = str(posterior.to_arviz(10))
    assert "posterior_predictive" not in groups and "log_likelihood" in groups
