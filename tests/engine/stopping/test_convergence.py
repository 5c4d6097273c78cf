"""A run without a number of rounds stops when q(θ) has converged, and not before."""

import importlib
import math
from itertools import pairwise

import pyro
import pyro.distributions as dist
import pytest
import torch

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.engine.stopping import convergence
from bayesfed.engine.stopping.convergence import Convergence
from bayesfed.engine.stopping.drift import caveat
from bayesfed.output.fitted import CorrectionResult


def fresh(clients=1, sites=None, levels=(1.0,), corrected=False):
    sites = sites or {"mu": 1}
    size = sum(sites.values())
    places = torch.zeros(convergence.BOUND + 1, 2, size)
    places[0, 1] = 1.0
    marks = torch.tensor([0, 0, 0, 0, 0 if corrected else convergence.TRIES])
    visits = torch.zeros(clients, dtype=torch.int64)
    paces = torch.ones(convergence.BOUND)
    return Convergence(None, None, levels, 0.01, places, paces, visits, marks, sites, 0.3, 1.0)


def stops(of, mean, *, sd=1.0, pace=1.0, elbo=0.0, cohort=lambda n: torch.tensor([0]), rounds=400):
    """After how many rounds a run is done whose mean is so many, by round, and the ELBO likewise."""
    value = elbo if callable(elbo) else lambda n: elbo
    for n in range(1, rounds + 1):
        where = torch.stack([torch.as_tensor(mean(n)).reshape(-1), torch.full((1,), sd)])
        history = torch.tensor([value(i) for i in range(1, n + 1)], dtype=torch.float64)
        of.add_round(where, pace, history, cohort(n))
        if of.converged:
            return n
    return None


@pytest.mark.parametrize(
    "algorithm", [bf.SFVI(), bf.SFVI(global_guide=bf.Flow()), bf.PVI()], ids=str
)
def test_a_run_starts_at_full_rate(algorithm):
    assert (
        bf.start(models.eight_schools, datasets.eight_schools(), algorithm).stopping.rate(0) == 1.0
    )


def noisy(n):
    """A place whose noise is worth rounds in which the rates fall."""
    return 0.04 * (-1) ** n


def test_a_constant_place_converges_at_once_and_one_with_noise_after_the_rates_have_fallen():
    assert stops(fresh(), lambda n: 0.0) == convergence.LEAST
    assert stops(fresh(), noisy) == convergence.LEAST + convergence.COOLING


@pytest.mark.parametrize("shrinks", [0.5, 0.8, 0.9, 0.97])
def test_a_run_stops_where_little_distance_is_left(shrinks):
    """Of 20 sd, a part of what is left in each round."""
    done = stops(fresh(), lambda n: 20.0 * shrinks**n, pace=1 - shrinks)
    assert done is not None
    assert 20.0 * shrinks**done < 0.1


def test_little_noise_is_no_distance_and_much_noise_is_no_convergence():
    noise = torch.randn(401, generator=torch.Generator().manual_seed(0)).tolist()
    quiet, loud = (
        stops(fresh(), lambda n, size=size: size * noise[n], pace=1.0) for size in (0.03, 1.0)
    )
    assert quiet is not None and quiet < 15
    assert loud is None or loud > 100


@pytest.mark.parametrize("drift", [0.01, 0.003])
def test_a_slow_drift_is_no_convergence(drift):
    """As long as it lasts, and it comes to more than a tenth of a standard deviation in a third of the rounds."""
    most = 3 * convergence.MOVE / drift  # the rounds whose third has a longer drift than is allowed
    done = stops(fresh(), lambda n: drift * n + 0.3 * n**0.5, pace=0.05, rounds=int(most))
    assert done is None


def test_a_plateau_on_which_the_elbo_rises_is_no_convergence():
    done = stops(
        fresh(), lambda n: 0.0 if n < 60 else 5.0, elbo=lambda n: min(n, 60) * 1.0, rounds=60
    )
    assert done is None
    assert stops(fresh(), lambda n: 0.0, elbo=0.0, rounds=60) is not None


def test_every_client_must_have_been_seen_since_the_last_move():
    """The last of four is seen in every tenth round only, and q(θ) moves when it is."""
    seen = {}

    def cohort(n):
        return torch.tensor([3]) if n % 10 == 0 else torch.arange(3)

    def mean(n):
        seen[n] = 4.0 * (1 - 0.2 ** (n // 10))
        return seen[n]

    done = stops(fresh(clients=4), mean, cohort=cohort)
    assert done is not None and done >= 30
    assert 4.0 - seen[done] < 0.1
    never = stops(fresh(clients=2), lambda n: 0.0, cohort=lambda n: torch.tensor([0]))
    assert never is None


def test_one_coordinate_that_moves_prevents_convergence():
    def mean(n):
        return torch.tensor([0.0, 0.2 * n])

    of = fresh(sites={"mu": 1, "beta": 1})
    for n in range(1, 50):
        where = torch.stack([mean(n), torch.ones(2)])
        of.add_round(where, 1.0, torch.zeros(n, dtype=torch.float64), torch.tensor([0]))
    assert not of.converged
    assert list(of.distances(49)) == ["beta"]


def test_nan_is_no_convergence():
    of = fresh(sites={"mu": 1, "beta": 1})
    for n in range(1, 20):
        where = torch.tensor([[0.0, math.nan], [1.0, 1.0]])
        of.add_round(where, 1.0, torch.zeros(n, dtype=torch.float64), torch.tensor([0]))
    assert not of.converged


def test_a_run_that_moves_while_its_rates_fall_goes_on():
    of = fresh()
    done = stops(of, lambda n: noisy(n) if n < 5 else 2.0 + noisy(n))
    assert done is not None and done > 12


def test_levels_come_one_after_the_other():
    of, rates = fresh(levels=(1.0, 0.5)), []

    def mean(n):
        rates.append(of.rate(n - 1))
        return noisy(n)

    done = stops(of, mean)
    first, second = rates.index(0.5), done - convergence.COOLING
    assert rates[:first] == [1.0] * convergence.LEAST
    assert set(rates[first:second]) == {0.5}
    assert rates[second:] == sorted(rates[second:], reverse=True) and rates[-1] < 0.1


def test_provisional_ends_where_draws_are_corrected():
    """Early ones after the first round and on the way, and one near the target; then none but the end itself."""
    shrinks, far = 0.9, 40.0

    def mean(n):
        return far * shrinks**n

    of, done, ends = fresh(corrected=True), 0, []
    whole = stops(fresh(), mean, pace=1 - shrinks)
    while not ends or ends[-1][1]:
        done += 1
        where = torch.tensor([[mean(done)], [1.0]])
        of.add_round(where, 1 - shrinks, torch.zeros(done, dtype=torch.float64), torch.tensor([0]))
        assert of.early is (of.provisional and len(ends) <= len(convergence.CLOSE))
        assert not of.provisional or of.rate(done) == 1.0
        if of.converged:
            ends.append((done, of.provisional))
        if of.provisional:
            of.withdraw()  # the weights were too uneven
            assert not of.converged and not of.provisional and not of.early
    (first, _), *tries, (near, _), (end, _) = ends
    assert first == 1
    factors = convergence.NEAR, *reversed(convergence.CLOSE)
    for (early, _), (least, most) in zip(tries, reversed([*pairwise(factors)]), strict=True):
        assert least < mean(early) / convergence.STEP < most
    assert mean(near) < convergence.NEAR * convergence.STEP
    assert tries[-1][0] < near < end == whole


def test_the_first_early_end_waits_for_all_clients_and_the_second_for_short_steps_not_for_the_elbo():
    of = fresh(clients=3, corrected=True)
    assert stops(of, lambda n: 0.0, cohort=lambda n: torch.tensor([n - 1])) == 3 and of.early
    of = fresh(corrected=True)
    of.marks[convergence._TRIED] = 1
    assert stops(of, lambda n: 0.0, elbo=lambda n: 10.0 * n) == convergence.LAST
    assert of.early


@pytest.mark.parametrize("step", [0.9 * convergence.SHORT, 1.1 * convergence.SHORT])
def test_a_short_last_step_after_a_long_way_is_enough_for_the_second_correction(step):
    of = fresh(corrected=True)
    for n in (1, 2):
        where = torch.tensor([[1000.0 * n], [1.0]])
        history = torch.zeros(n, dtype=torch.float64)
        of.add_round(where, 1.0, history, torch.tensor([0]), step)
        if n == 1:
            assert of.early
            of.withdraw()
    assert of.early is (step < convergence.SHORT)


@pytest.mark.parametrize(("large", "waits"), [(False, len(convergence.CLOSE)), (True, 1)])
def test_noisy_weights_are_corrected_at_the_last_early_end_or_of_large_data_at_the_second(
    large, waits
):
    """Estimates without noise take longer than a few rounds, of large data as long as some."""
    of = fresh(corrected=True)
    for tried in range(1, convergence.TRIES):
        of.marks[convergence._TRIED] = tried
        assert of.is_worth_correcting(distant=False, noisy=False, large=large)
        assert not of.is_worth_correcting(distant=True, noisy=False, large=large)
        assert of.is_worth_correcting(distant=False, noisy=True, large=large) is (tried > waits)
        worth = of.is_worth_correcting(distant=False, noisy=False, large=large, mixture=True)
        assert worth is (tried > 1)


def test_an_early_end_needs_weights_of_finite_variance():
    uneven, certain = CorrectionResult(reliable=True), CorrectionResult(reliable=True, certain=True)
    assert uneven.confirms(early=False) and not uneven.confirms(early=True)
    assert certain.confirms(early=False) and certain.confirms(early=True)
    assert not CorrectionResult(reliable=False).confirms(early=False)


# -- fits ------------------------------------------------------------------------------------------


def outlier(federation):
    mu = pyro.sample("mu", dist.Normal(0.0, 100.0))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(mu, 1.0))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(a, 1.0), obs=obs.get("y"))


@pytest.mark.parametrize("cohort", [1.0, 1])
def test_a_fit_ends_at_the_exact_posterior(cohort):
    """One of six clients is far from the others; one a round is seen, or all."""
    generator = torch.Generator().manual_seed(0)
    rows = {
        f"{i}": {"y": (8.0 if i == 4 else 0.0) + torch.randn(8, generator=generator)}
        for i in range(6)
    }
    federation = bf.Federation.from_arrays(rows)
    posterior = bf.fit(outlier, federation, clients_per_round=cohort)
    # y_i's mean is N(mu, 1 + 1/8)
    means = torch.stack([value["y"].mean() for value in rows.values()]).double()
    precision = 6 / 1.125 + 100.0**-2
    exact = float(means.sum() / 1.125 / precision)
    mu = posterior.sample(4000)["mu"]
    assert posterior.converged
    assert posterior.caveat == ""
    assert abs(float(mu.mean()) - exact) < 0.1 * precision**-0.5
    assert 0.9 < float(mu.std()) * precision**0.5 < 1.1


@pytest.fixture(scope="module")
def near():
    """Eight schools, fitted until a correction does."""
    return bf.fit(models.eight_schools, datasets.eight_schools())


def test_convergence_is_shown_and_saved(near, tmp_path):
    schools, posterior = datasets.eight_schools(), near
    rounds = len(posterior.history["elbo"])
    assert posterior.converged and rounds < 30
    assert f"converged in {rounds} round" in repr(posterior)
    posterior.save(tmp_path / "a.safetensors")
    assert bf.Posterior.load(tmp_path / "a.safetensors", models.eight_schools, schools).converged
    given = bf.fit(models.eight_schools, schools, rounds=rounds)
    assert given.converged is None and len(given.history["elbo"]) == rounds


def test_an_interrupted_run_ends_as_one_that_never_stopped(tmp_path):
    schools, file = datasets.eight_schools(), tmp_path / "run.safetensors"

    def interrupt(done):
        if done.number == 1:
            raise KeyboardInterrupt

    what = {"clients_per_round": 0.5}
    whole = bf.fit(models.eight_schools, schools, **what)
    with pytest.raises(KeyboardInterrupt):
        bf.fit(models.eight_schools, schools, resume=file, callbacks=[interrupt], **what)
    again = bf.fit(models.eight_schools, schools, resume=file, **what)
    for name, value in whole.params.items():
        assert torch.equal(again.params[name], value), name
    assert torch.equal(again.history["elbo"], whole.history["elbo"])
    over = bf.start(models.eight_schools, schools, resume=file, **what)
    assert over.done == over.rounds == len(whole.history["elbo"])
    with pytest.raises(ValueError, match='rounds "until convergence"'):
        bf.fit(models.eight_schools, schools, resume=file, rounds=40, **what)


def test_a_fit_whose_correction_fails_goes_on(near, monkeypatch, tmp_path):
    """To where it converges without a correction; so does a run that was interrupted during the correction."""
    schools, file = datasets.eight_schools(), tmp_path / "run.safetensors"
    fitting = importlib.import_module("bayesfed.fitting")
    plain = bf.fit(models.eight_schools, schools, bf.SFVI(corrected=False))
    rounds = len(plain.history["elbo"])
    assert near.converged and near.correction is not None and len(near.history["elbo"]) < rounds

    def interrupt(posterior, **how):
        raise KeyboardInterrupt

    monkeypatch.setattr(fitting, "correct", interrupt)
    with pytest.raises(KeyboardInterrupt):
        bf.fit(models.eight_schools, schools, resume=file)
    monkeypatch.setattr(fitting, "correct", lambda _, **how: CorrectionResult(reliable=False))
    run = bf.start(models.eight_schools, schools, resume=file)
    assert run.done == len(near.history["elbo"]) < run.rounds
    for given in ({}, {"resume": file}):
        found = bf.fit(models.eight_schools, schools, **given)
        assert found.converged and len(found.history["elbo"]) == rounds
        for name, value in plain.params.items():
            assert torch.equal(found.params[name], value)


def test_weights_of_an_integral_are_not_tried_at_the_first_early_end(monkeypatch):
    """Rows whose covariate is measured with error: a round takes less time than their weights do."""

    def model(federation):
        slope = pyro.sample("slope", dist.Normal(0.0, 2.0))
        with federation.clients():
            level = pyro.sample("level", dist.Normal(0.0, 3.0))
            with federation.observations() as obs:
                true = pyro.sample("true", dist.Normal(0.0, 1.0))
                pyro.sample("x", dist.Normal(true, 0.5), obs=obs["x"])
                pyro.sample("y", dist.Normal(level + slope * true, 1.0), obs=obs.get("y"))

    generator, tried = torch.Generator().manual_seed(0), []
    rows = {f"c{i}": torch.randn(2, 6, generator=generator) for i in range(3)}
    data = bf.Federation.from_arrays({name: {"x": x, "y": x + e} for name, (x, e) in rows.items()})

    def note(posterior, **how):
        tried.append(len(posterior.history["elbo"]))
        return CorrectionResult(reliable=True, certain=True)

    monkeypatch.setattr(importlib.import_module("bayesfed.fitting"), "correct", note)
    assert len(bf.fit(model, data).history["elbo"]) == 2
    assert tried == [2]


def test_the_bound_is_in_the_caveat(monkeypatch):
    monkeypatch.setattr(convergence, "rise", lambda values: math.inf)
    monkeypatch.setattr(Convergence, "bound", 12)
    plain = bf.SFVI(corrected=False)
    posterior = bf.fit(models.eight_schools, datasets.eight_schools(), plain)
    assert posterior.converged is False
    assert "12 rounds" in posterior.caveat


def test_a_run_to_the_bound_says_that_noise_hides_the_distance():
    """500 rounds are not too few."""
    assert "noise hides the distance" in caveat(None, 0.0, 500, False)
    assert "too few" in caveat(None, 0.0, 499, False)
    assert "too few" in caveat(None, None, 600, None)  # of more rounds that were given


@pytest.mark.parametrize(
    ("algorithm", "more", "message"),
    [
        (bf.FedAvg(optimizer="adam"), {}, "FedAvg has no q"),
        (bf.SFVI(), {"privacy": bf.Privacy(epsilon=1.0)}, "ε depends on the number"),
    ],
)
def test_runs_that_need_a_number_of_rounds(algorithm, more, message):
    with pytest.raises(ValueError, match=f"rounds: {message}"):
        bf.fit(models.eight_schools, datasets.eight_schools(), algorithm, **more)
