"""The caveat of a fit that has not converged, and none of a fit that has."""

import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.engine.stopping import drift
from bayesfed.steps.gradients import annealed, elapsed

SLOW = bf.SFVI(local_steps=1, lr=0.002)


def levels():
    generator = torch.Generator().manual_seed(0)
    return bf.Federation.from_arrays(
        {f"c{i}": {"y": 3.0 + torch.randn(n, generator=generator)} for i, n in enumerate((5, 9, 3))}
    )


def hierarchy(width):
    def model(federation):
        mu = pyro.sample("mu", dist.Normal(0.0, width))
        with federation.clients():
            a = pyro.sample("a", dist.Normal(mu, 1.0))
            with federation.observations() as obs:
                pyro.sample("y", dist.Normal(a, 1.0), obs=obs.get("y"))

    return model


def fit(width, rounds, algorithm=SLOW, **how):
    return bf.fit(hierarchy(width), levels(), algorithm, rounds=rounds, **how)


@pytest.fixture(scope="module")
def still_moving():
    return fit(40.0, 44)


@pytest.mark.parametrize("final", [0.01, 0.3, 1.0])
def test_time_is_what_the_rates_add_up_to(final):
    rates = torch.tensor([annealed(final, (n + 0.5) / 1000) for n in range(1000)])
    expected = rates.cumsum(0) / rates.sum()
    found = [elapsed(final, (n + 1) / 1000) for n in range(1000)]
    torch.testing.assert_close(torch.tensor(found), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kappa", [0.3, 0.6, 1.2])
def test_the_extrapolation_of_a_geometric_move(kappa):
    """Twelve windows of exp(−κ s), of which exp(−12 κ) is left; a window's mean lies near its middle."""
    s = torch.arange(6, 12, dtype=torch.float64) + 0.5
    scale = math.exp(6 * kappa)
    found = drift.extrapolate((scale * torch.exp(-kappa * s))[:, None])
    assert found == pytest.approx(scale * math.exp(-12 * kappa), rel=0.3, abs=1e-3)


@pytest.mark.parametrize("seed", range(40))
def test_noise_alone_is_no_drift(seed):
    """Means of windows a twentieth of a standard deviation apart, as those of good fits are at most."""
    noise = torch.randn(6, 3, generator=torch.Generator().manual_seed(seed))
    assert drift.extrapolate(0.05 * noise) < drift.FAR


@pytest.mark.parametrize("seed", range(10))
def test_a_steady_drift_is_seen_under_noise(seed):
    noise = torch.randn(6, 1, generator=torch.Generator().manual_seed(seed))
    assert drift.extrapolate(0.2 * torch.arange(6.0)[:, None] + 0.01 * noise) > drift.FAR


def test_the_means_of_windows_are_those_of_the_rounds():
    """Six windows of the last rounds, whatever lay in their place before, weighted by rate."""
    rounds, final = 50, 0.01
    where = torch.zeros(drift.KEPT, 2)
    values = torch.randn(rounds, generator=torch.Generator().manual_seed(0))
    for n in range(rounds):
        drift.add_round(where, {"loc": values[n : n + 1]}, final, n, rounds)
    edges = [elapsed(final, n / rounds) for n in range(rounds + 1)]
    for window in range(6, 12):
        at = [n for n in range(rounds) if int(12 * edges[n]) == window]
        weight = torch.tensor([edges[n + 1] - edges[n] for n in at])
        weight_there, total = where[window % 6]
        torch.testing.assert_close(total / weight_there, (weight * values[at]).sum() / weight.sum())


def test_a_wide_prior_has_not_converged_after_eighty_rounds():
    """sd 2.7 where .6 is exact, and tables that look like any others."""
    with pytest.warns(UserWarning, match=r"not converged after 80 rounds.*mu \d\.\d sd"):
        posterior = fit(100.0, 80, bf.SFVI(local_steps=1, lr=0.004, corrected=False))
    assert posterior.sample(2000)["mu"].std() > 2
    assert posterior.moving["mu"] > 1
    assert repr(posterior).endswith(posterior.caveat)
    assert posterior.to_arviz(8)["posterior"].attrs["caveat"] == posterior.caveat


@pytest.mark.parametrize(
    ("width", "cohort", "rounds"), [(5.0, 1.0, 120), (5.0, 2, 150), (100.0, 1.0, 200)]
)
def test_a_fit_that_has_converged_has_no_caveat(width, cohort, rounds):
    posterior = fit(width, rounds, bf.SFVI(local_steps=1), clients_per_round=cohort)
    assert posterior.caveat == ""
    assert "\n" not in repr(posterior)
    assert "caveat" not in posterior.to_arviz(8)["posterior"].attrs


def elbos(rounds, kappa, amount, sd):
    """An ELBO that has ``amount`` nats to go in the end, e^κ times as much a window before, with noise."""
    noise = torch.randn(rounds, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    left = [12 * kappa * (1 - elapsed(0.01, (n + 0.5) / rounds)) for n in range(rounds)]
    return -100.0 - amount * torch.tensor(left, dtype=torch.float64).exp() + sd * noise


def test_clients_that_have_not_converged_are_seen_in_the_elbo():
    """As with heavy-tailed locals after 300 rounds: .6 nats short, the clients' sds 1.6 times too wide."""
    found = drift.elbo_left(elbos(300, 0.4, 0.6, 0.3), 29, 0.01, 300)
    assert 0.35 < found < 1.2
    assert drift.caveat({}, found, 300, None) == (
        f"not converged after 300 rounds, about this far from where it was going: the ELBO {found:.1f} nats"
    )


@pytest.mark.parametrize(("kappa", "amount", "rows"), [(1.0, 0.01, 29), (0.4, 0.6, 5000)])
def test_a_small_rise_of_the_elbo_counts_as_none(kappa, amount, rows):
    assert drift.elbo_left(elbos(300, kappa, amount, 0.3), rows, 0.01, 300) == 0


def test_a_falling_elbo_has_no_rise():
    assert drift.elbo_left(-elbos(300, 0.4, 0.6, 0.3), 29, 0.01, 300) == 0


@pytest.mark.parametrize(
    ("algorithm", "rounds"),
    [
        (bf.SFVI(local_steps=1), 3),
        (bf.SFVI(local_steps=1), 39),
        (bf.FedAvg(), 3),
        (bf.FedAvg(), 19),
    ],
    ids=str,
)
def test_a_few_rounds_are_too_few_to_tell(algorithm, rounds):
    """39 at rates that fall to nothing are worth 19.7."""
    schools = datasets.eight_schools()
    posterior = bf.fit(models.eight_schools, schools, algorithm, rounds=rounds)
    assert posterior.caveat == f"{rounds} rounds are too few to tell whether the fit has converged"


def test_a_run_that_is_finished_early_is_judged_by_its_rounds():
    run = bf.start(hierarchy(40.0), levels(), SLOW, rounds=80)
    for _ in range(20):
        bf.step(run)
    assert "too few" in bf.finish(run).caveat
    for _ in range(30):
        bf.step(run)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert "not converged after 50 rounds" in bf.finish(run).caveat


def test_the_caveat_is_saved(still_moving, tmp_path):
    posterior = still_moving
    assert posterior.moving
    posterior.save(tmp_path / "p.safetensors")
    again = bf.Posterior.load(tmp_path / "p.safetensors", hierarchy(40.0), levels())
    assert (again.moving, again.rising) == (posterior.moving, posterior.rising)
    assert again.caveat == posterior.caveat


def test_a_resumed_run_has_the_same_caveat(still_moving, tmp_path):
    """The windows are a part of what a run is resumed from."""

    class Enough(Exception):
        pass

    def stop(report):
        if report.number == 30:
            raise Enough

    with pytest.raises(Enough):
        fit(40.0, 44, resume=tmp_path / "run", callbacks=[stop])
    again = fit(40.0, 44, resume=tmp_path / "run")
    assert (again.moving, again.rising) == (still_moving.moving, still_moving.rising)
