"""A run of points is done when its clients predict held-out rows no better."""

from __future__ import annotations

import pytest
import torch
from torch.distributions import Categorical

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.engine.stopping import held_out as stopping
from bayesfed.engine.stopping.held_out import HeldOut
from bayesfed.output.locals_of_run import fitted_cohort, log_predictive


@pytest.fixture(scope="module")
def digits():
    train, test = datasets.digits(clients=10)
    return *train.split(test=0.2, seed=0), test


def network():
    torch.manual_seed(0)
    return models.Network(models.mlp(64, 20, 10))


def nll(posterior, test):
    p = posterior.probabilities(test)["y"]
    return float(-Categorical(probs=p).log_prob(test["y"]).mean())


@pytest.mark.slow
def test_a_run_stops_where_a_long_run_is_no_better(digits):
    train, valid, test = digits
    algorithm = bf.FedAvg(lr=0.1, personal_steps=0)
    shared = {"clients_per_round": 0.5, "batch_size": 10}
    posterior = bf.fit(network(), train, algorithm, held_out=valid, **shared)
    rounds = len(posterior.history["elbo"])
    assert posterior.converged
    assert 10 <= rounds < 300
    assert f"converged in {rounds} rounds" in repr(posterior)
    long = bf.fit(network(), train, algorithm, rounds=3 * rounds, **shared)
    # .002 nats a row are no gain; of 350 rows the error of a difference between two close fits is some .01
    assert nll(posterior, test) < nll(long, test) + 0.03


@pytest.mark.parametrize(
    "make",
    [
        lambda: (bf.FedABML(personal_steps=0), models.Network(models.mlp(64, 10), spread="learnt")),
        lambda: (bf.PFedVEM(), models.Network(models.mlp(64, 10, 10), local=["2."])),
        lambda: (bf.PACPFL(particles=2), models.Network(models.mlp(64, 10), hyper_scale=0.1)),
    ],
)
def test_any_algorithm_can_stop_by_held_out_rows(make, digits, monkeypatch):
    """With a gain that none makes it is over when it has looked at ten rounds; kept or made variables, particles."""
    monkeypatch.setattr(stopping, "GAIN", 1e9)
    train, valid, _ = digits
    algorithm, model = make()
    posterior = bf.fit(model, train, algorithm, held_out=valid, batch_size=20)
    assert posterior.converged
    assert len(posterior.history["elbo"]) in (10, 14)  # the latter where rates fall


def test_clients_send_their_log_predictive_density(digits):
    train, valid, _ = digits
    run = bf.start(network(), train, bf.FedAvg(personal_steps=0), held_out=valid)
    bf.step(run)
    few = [train.names[3], train.names[1]]
    rows = valid.select(few)
    posterior = fitted_cohort(run, run.plan.algorithm.params(run.server), few)
    found = log_predictive(posterior, rows)
    p = bf.finish(run).probabilities(rows)["y"]
    density = Categorical(probs=p).log_prob(rows["y"])
    expected = torch.stack([density[rows.owner == i].sum() for i in range(2)])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(run.stopping.densities[[3, 1]].float(), found, rtol=1e-4, atol=1e-4)


def test_the_mean_over_draws_is_inside_the_logarithm():
    x, y = torch.linspace(-1, 1, 40), torch.linspace(-1, 1, 40).sin()
    everything = bf.Federation({"x": x[:, None], "y": y}, torch.arange(0, 41, 10), list("abcd"))
    train, test = everything.split(test=0.3, seed=0)
    posterior = bf.fit(models.varying_intercept, train, rounds=5)
    found = log_predictive(posterior, test, 500)
    density = posterior.log_likelihood(test, 500)["y"]
    for i in range(4):
        rows = density[:, test.owner == i]
        expected = (rows.logsumexp(0) - torch.tensor(500.0).log()).sum()
        # other draws: .1 is several Monte Carlo errors of a sum over a few rows
        assert abs(float(found[i] - expected)) < 0.1


# -- the rule --------------------------------------------------------------------------------------


@pytest.fixture
def rule(digits):
    return HeldOut(digits[1], 1.0, lambda params, cohort: None)


def rounds_of(rule, values, clients=10, cohort=None):
    """After how many rounds it is done: each client says that a row has this density."""
    lengths = rule.rows.lengths.double()
    for done, value in enumerate(values, 1):
        some = torch.arange(clients) if cohort is None else cohort(done)
        rule.add_round(done, some, value * lengths[some])
        if rule.converged:
            return done
    return None


def test_a_rise_does_not_end_the_run(rule):
    rising = [-2.0 + 0.02 * t for t in range(60)]
    assert rounds_of(rule, rising) is None


def test_a_plateau_ends_the_run(rule):
    values = [-2.0 + 0.05 * min(t, 20) for t in range(100)]
    assert 38 <= rounds_of(rule, values) <= 60


def test_a_fall_ends_the_run(rule):
    values = [-2.0 + 0.05 * min(t, 20) - 0.02 * max(0, t - 20) for t in range(100)]
    assert 21 <= rounds_of(rule, values) <= 50


def test_clients_that_have_not_been_seen_are_waited_for(rule):
    flat = [-1.0] * 200
    assert rounds_of(rule, flat, cohort=lambda done: torch.arange(9)) is None


def test_the_window_reaches_back_to_the_oldest_last_visit(rule):
    """All rise while they are seen one after the other: the mean goes on rising."""
    values = [-2.0 + 0.01 * t for t in range(150)]
    assert rounds_of(rule, values, cohort=lambda done: torch.tensor([done % 10])) is None


def test_noise_is_no_gain(rule):
    torch.manual_seed(0)
    values = (-1.0 + 0.05 * torch.randn(100)).tolist()
    assert rounds_of(rule, values) is not None


# -- what cannot be, and what goes on --------------------------------------------------------------


def test_refusals(digits):
    train, valid, _ = digits
    with pytest.raises(ValueError, match="leave out rounds"):
        bf.start(network(), train, bf.FedAvg(), rounds=3, held_out=valid)
    with pytest.raises(ValueError, match="privacy accounts"):
        bf.start(network(), train, bf.FedAvg(), held_out=valid, privacy=bf.Privacy(noise=1.0))
    others = valid.select(reversed(valid.names))
    with pytest.raises(
        ValueError, match=f"'{valid.names[-1]}' where the federation has '{valid.names[0]}'"
    ):
        bf.start(network(), train, bf.FedAvg(), held_out=others)
    with pytest.raises(ValueError, match="or held_out"):
        bf.start(network(), train, bf.FedAvg())


def test_a_resumed_run_ends_as_one_that_never_stopped(digits, tmp_path, monkeypatch):
    monkeypatch.setattr(stopping, "GAIN", 0.02)  # in fewer rounds
    train, valid, _ = digits
    shared = {"held_out": valid, "batch_size": 10, "clients_per_round": 0.5}
    whole = bf.fit(network(), train, bf.FedAvg(personal_steps=0), **shared)
    assert len(whole.history["elbo"]) > stopping.LEAST
    path = tmp_path / "run.safetensors"
    run = bf.start(network(), train, bf.FedAvg(personal_steps=0), resume=path, **shared)
    for _ in range(5):
        bf.step(run)
    again = bf.fit(network(), train, bf.FedAvg(personal_steps=0), resume=path, **shared)
    assert len(again.history["elbo"]) == len(whole.history["elbo"])
    for name, value in whole.params.items():
        assert torch.equal(again.params[name], value)
    with pytest.raises(ValueError, match="held_out"):
        other = train.split(test=0.5, seed=1)[1]
        bf.fit(
            network(),
            train,
            bf.FedAvg(personal_steps=0),
            resume=path,
            **shared | {"held_out": other},
        )
