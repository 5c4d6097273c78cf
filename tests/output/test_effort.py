"""Probes of fits whose data are large, by draws of a posterior that is known."""

from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch

import bayesfed as bf
from bayesfed.output import effort, khat
from bayesfed.output.effort import (
    DRAWS,
    EACH,
    FEWEST,
    LATER,
    LONGER,
    MORE,
    PER_DIMENSION,
    effort_of,
    probe,
    probed_effort,
)
from tests.guides import test_client_laplace
from tests.scenarios import conjugate_hierarchy

SD = 0.5
"""Of the outcomes of :func:`~tests.scenarios.conjugate_hierarchy`."""


@pytest.fixture(scope="module")
def fitted():
    y = torch.arange(24, dtype=torch.float32).sin()
    clients = {f"c{i}": {"y": y[i::8]} for i in range(8)}
    return bf.fit(conjugate_hierarchy, bf.Federation.from_arrays(clients), bf.SFVI(corrected=False))


@pytest.fixture
def large(fitted, monkeypatch):
    draws = khat.affordable_draws(fitted, fitted.rows_read)
    monkeypatch.setattr(khat, "WORK", khat.WORK * 100 / draws)
    return fitted


def test_small_data_are_not_probed(fitted):
    assert probed_effort(fitted) is None and not effort_of(fitted).large


@pytest.mark.parametrize(("affordable", "probed"), [(16_000, False), (100, True)])
def test_clients_elsewhere_are_probed_only_if_data_are_large(
    affordable, probed, fitted, monkeypatch
):
    """There a probe is an exchange between machines, which takes longer than estimates for middling data."""
    draws = khat.affordable_draws(fitted, fitted.rows_read)
    monkeypatch.setattr(khat, "WORK", khat.WORK * affordable / draws)
    assert probed_effort(fitted)
    assert (probed_effort(fitted, elsewhere=True) is not None) is probed


def test_a_right_q_is_neither_distant_nor_noisy(large):
    assert effort_of(large).large and probed_effort(large)
    assert probe(large) == (False, False)


def test_a_q_of_theta_that_is_far_off_is_distant(large):
    params = dict(large.params)
    params["global.loc"] = params["global.loc"] + 20.0
    assert probe(replace(large, params=params)) == (True, False)


def test_a_q_of_clients_that_is_off_is_noisy(large):
    """By three standard deviations each: 8 clients' log weights have a variance of 72."""
    moved = {
        name: value + 3.0 * SD / 3**0.5 if name.endswith("loc") else value
        for name, value in large.local_params.items()
    }
    assert moved.keys() == large.local_params.keys()
    assert probe(replace(large, local_params=moved)).noisy


def test_data_that_would_take_too_long_have_no_draws(fitted, monkeypatch):
    draws = khat.affordable_draws(fitted, fitted.rows_read)
    monkeypatch.setattr(khat, "WORK", khat.WORK * 2 / draws)
    assert effort_of(fitted) is None and probed_effort(fitted) is None


def test_large_data_whose_globals_are_too_many_have_no_draws(large, monkeypatch):
    """Their covariance, of as many rows and columns, is not computed either."""
    assert effort_of(large).least * EACH <= FEWEST
    most = FEWEST // (EACH * PER_DIMENSION)
    for size, none in ((most, False), (most + 1, True)):
        draws = torch.zeros(1, size)
        monkeypatch.setattr("bayesfed.output.effort.draws_of_q", lambda *_, z=draws: z)
        assert (effort_of(large) is None) is none
        assert (probed_effort(large) is None) is none


def kinds_of_rows(federation):
    """Each row is of one of eight kinds, which are summed out."""
    mu = pyro.sample("mu", dist.Normal(torch.zeros(8), 1.0).to_event(1))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        with federation.observations() as obs:
            kind = pyro.sample("kind", dist.Categorical(torch.ones(8) / 8))
            pyro.sample("y", dist.Normal(mu[kind] + a, 1.0), obs=obs.get("y"))


def mixture_of_rows(federation):
    """The same, with the sum written out."""
    mu = pyro.sample("mu", dist.Normal(torch.zeros(8), 1.0).to_event(1))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        with federation.observations() as obs:
            parts = dist.Normal(mu + a[..., None], 1.0)
            kinds = dist.Categorical(torch.ones(8) / 8)
            pyro.sample("y", dist.MixtureSameFamily(kinds, parts), obs=obs.get("y"))


@pytest.mark.parametrize("model", [kinds_of_rows, mixture_of_rows])
def test_the_terms_of_a_sum_count(model, fitted):
    """A row's density is that of eight rows, so that estimates without noise cost eight times as much."""
    algorithm = bf.SFVI(corrected=False)
    own = bf.fit(model, fitted.federation, algorithm, rounds=1, progress=False)
    assert own.program.terms == 8 and fitted.program.terms == 1
    assert effort_of(own).cost == pytest.approx(8 * effort_of(fitted).cost)


def test_mixtures_are_probed_however_small_their_data_are(fitted):
    """Where clients are elsewhere a probe is an exchange, and only large data are worth one."""
    algorithm = bf.SFVI(corrected=False)
    own = bf.fit(kinds_of_rows, fitted.federation, algorithm, rounds=1, progress=False)
    assert not effort_of(own).slow
    assert probed_effort(own) and probed_effort(own, elsewhere=True) is None


def test_later_proposals_have_up_to_twice_the_draws_that_are_affordable(fitted, monkeypatch):
    """Another proposal is another exchange."""
    assert effort_of(fitted).later == LATER
    draws = khat.affordable_draws(fitted, fitted.rows_read)
    monkeypatch.setattr(khat, "WORK", khat.WORK * 6000 / draws)
    found = effort_of(fitted)
    assert found.draws == found.affordable < DRAWS and found.later == LONGER * found.affordable
    assert found.further(found.least - 1) == found.further(0.0) == found.later


def test_later_proposals_have_fewer_draws_where_laplace_takes_long(fitted, monkeypatch):
    """But no fewer than the first, or twice as many if a part is as wide as the prior."""
    found = effort_of(fitted)
    assert found.further(0.0, laplace=True) == found.further(0.0) == LATER
    size = len(fitted.federation) * (fitted.federation.rows // len(fitted.federation) + 1)
    monkeypatch.setattr(effort, "BY_LAPLACE", 3000 * size)
    found = effort_of(fitted)
    assert found.further(0.0) == LATER and found.further(0.0, laplace=True) == 3000
    assert found.further(0.0, laplace=True, wide=True) == 2 * DRAWS
    monkeypatch.setattr(effort, "BY_LAPLACE", size)
    assert effort_of(fitted).further(0.0, laplace=True) == DRAWS


@pytest.fixture(scope="module")
def at_theta():
    """A fit in which q(w_i | θ) is Laplace's approximation at θ, and not exact."""
    algorithm = bf.SFVI(corrected=False)
    return bf.fit(test_client_laplace.counts, test_client_laplace.counted(), algorithm)


def test_a_laplace_approximation_at_theta_is_probed_whatever_its_size(at_theta, monkeypatch):
    assert probed_effort(at_theta) and not probed_effort(at_theta, elsewhere=True)
    assert probe(at_theta) == (False, False)
    for away in (1.0, 3.0, -1.0):
        far = {**at_theta.params, "global.loc": at_theta.params["global.loc"] + away}
        assert probe(replace(at_theta, params=far)) == (True, False)
    monkeypatch.setattr(effort, "BY_LAPLACE", 1e9)
    assert effort_of(at_theta).draws == DRAWS
    monkeypatch.setattr(effort, "BY_LAPLACE", 1)
    found = effort_of(at_theta)
    assert (found.draws, found.later) == (MORE, LONGER * MORE)


@pytest.mark.parametrize(("most", "more"), [(8 * MORE, True), (8 * MORE - 1, False)])
def test_few_clients_with_shared_points_have_as_many_draws_as_take_little_time(
    most, more, fitted, monkeypatch
):
    """The time is that of clients times draws, not of rows times draws."""
    affordable = khat.affordable_draws(fitted, fitted.rows_read)
    monkeypatch.setattr(khat, "WORK", khat.WORK * 1200 / affordable)
    monkeypatch.setattr("bayesfed.output.effort.share_points", lambda *_: True)
    monkeypatch.setattr("bayesfed.output.effort.OF_CLIENTS", most)
    found = effort_of(fitted)
    assert FEWEST <= found.affordable < MORE / LONGER and not found.large
    draws = MORE if more else found.affordable
    assert (found.draws, found.later) == (draws, LONGER * draws)
    assert effort_of(fitted, elsewhere=True).draws == found.affordable
