"""Uploads that are not finite: left out, counted and named; the clients keep what they had; the run goes on."""

from dataclasses import dataclass
from itertools import count

import pyro
import pyro.distributions as dist
import pytest
import torch

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.engine.not_finite import name_globals
from bayesfed.engine.parts import flat
from bayesfed.engine.watch import warn_of_infinities
from bayesfed.rules import NaturalGradient
from bayesfed.steps import Descent
from tests.invariants.cases import federation, small

pytestmark = pytest.mark.usefixtures("float64")
VICTIM = 2


@dataclass(frozen=True)
class Spoilt(Descent):
    """Of one client nothing is a number, neither what it sends nor what it would keep."""

    def run(self, job, locals_):
        work, clients = super().run(job, locals_), job.rows(0).index
        bad = (clients == VICTIM).to(work.terms)

        def spoilt(value):
            return torch.where(bad.reshape(-1, *[1] * (value.ndim - 1)) > 0, torch.nan, value)

        parts = {n: {k: spoilt(v) for k, v in part.items()} for n, part in work.found.items()}
        return work._replace(found=parts)


def with_steps(cls, algorithm):
    """Return an algorithm, with small settings, whose steps are of another class."""
    algorithm = small(algorithm)
    return algorithm.replace(steps=cls(**vars(algorithm.steps)), name=algorithm.name)


def started(algorithm, **settings):
    settings = {"rounds": 3, "seed": 1} | settings
    quick = bf.Execution(compile=False)
    return bf.start(
        models.hierarchical_logistic, federation(), algorithm, execution=quick, **settings
    )


def test_a_round_without_a_client_is_a_round_of_the_others():
    """By hand: c_i and θ_i of the four others, whose mean is over four."""
    run, whole = started(with_steps(Spoilt, bf.Scaffold())), started(small(bf.Scaffold()))
    report = bf.step(run)
    assert report.refused == ["client 5"] and len(report.cohort) == len(report.client_terms) == 4
    bf.step(whole)
    control = whole.clients.tensors["control"]
    others = torch.arange(5) != VICTIM
    for name, value in control.items():
        assert torch.equal(run.clients.tensors["control"][name][others], value[others])
        assert not run.clients.tensors["control"][name][VICTIM].any()
        mean = value[others].mean(0)[0]
        torch.testing.assert_close(run.server["control"][name], mean * 4 / 5, rtol=1e-9, atol=1e-12)


def test_refused_uploads_are_counted_and_named_at_the_end():
    run = started(with_steps(Spoilt, bf.Scaffold()))
    for _ in range(3):
        bf.step(run)
    with pytest.warns(
        UserWarning, match=r"3 uploads of 1 client, .* did not count: 'client 5' \(3\)"
    ):
        posterior = bf.finish(run)
    assert posterior.history["clients"].tolist() == [4, 4, 4]
    assert all(value.isfinite().all() for value in posterior.params.values())
    assert posterior.history["elbo"].isfinite().all()


def test_a_round_in_which_nothing_counts_changes_nothing():
    """One client a round: of ten rounds the victim's are less than half."""
    run = started(with_steps(Spoilt, bf.Scaffold()), rounds=30, clients_per_round=1, seed=2)
    seen = []
    for _ in range(30):
        before = {name: value.clone() for name, value in flat(run.server).items()}
        seen.append(bf.step(run))
        if seen[-1].refused:
            after = flat(run.server)
            assert all(torch.equal(after[name], value) for name, value in before.items())
            assert torch.isnan(torch.tensor(seen[-1].elbo))
    assert 0 < sum(bool(report.refused) for report in seen) < 15


@dataclass(frozen=True)
class Failing(Descent):
    """From the third round on most clients fail."""

    def run(self, job, locals_):
        work = super().run(job, locals_)
        bad = (job.rows(0).index < 3) & (job.rate < 0.99)
        return work._replace(terms=torch.where(bad, torch.nan, work.terms))


def test_a_run_stops_where_too_many_uploads_fail_and_can_be_finished():
    """Three of five, 3/5 of the last ten rounds' uploads only after many: rates are 1, .97 … , so from round 3."""
    run = started(with_steps(Failing, bf.FedAvg(lr_decay=0.5)), rounds=60)
    before = {}
    with pytest.raises(
        bf.Stopped, match=r"round \d+: the ELBO term \(nan\) of client 'client 4' and of 2 others"
    ) as stopped:
        while True:
            before = {name: value.clone() for name, value in run.server["theta"].items()}
            bf.step(run)
    assert stopped.value.run is run and 5 < run.done < 60
    with pytest.warns(UserWarning, match="uploads of 3 clients"):
        posterior = bf.finish(stopped.value.run)
    assert len(posterior.history["elbo"]) == run.done
    assert all(torch.equal(posterior.params[name], value) for name, value in before.items())


def no_solution(server):
    raise torch.linalg.LinAlgError("linalg.eigh: it did not converge\nand more")


def no_numbers(server):
    params = {name: value * torch.nan for name, value in server["params"].items()}
    return server | {"params": params}, torch.zeros(())


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (
            no_solution,
            r"round 3: a step has no solution \(linalg.eigh: it did not converge\); take more draws a step "
            r"\(draws=32\), lower the",
        ),
        (
            no_numbers,
            r"round 3: the global parameters are not numbers any more \(sites 'mu', 'tau'\); take more draws a "
            r"step \(draws=32\), lower the",
        ),
    ],
)
def test_a_server_that_cannot_go_on_keeps_what_it_had(result, message, monkeypatch):
    run = bf.start(models.eight_schools, datasets.eight_schools().to(dtype=torch.float64), rounds=5)
    for _ in range(2):
        bf.step(run)
    before = bf.finish(run)
    decode = lambda self, turn, server, total: result(server)  # noqa: E731
    monkeypatch.setattr(NaturalGradient, "decode", decode)
    with pytest.raises(bf.Stopped, match=message) as stopped:
        bf.step(run)
    assert stopped.value.run.done == 2
    for name, value in bf.finish(stopped.value.run).params.items():
        assert torch.equal(value, before.params[name])


@pytest.fixture
def few_draws_fail(monkeypatch):
    """With eight draws a step the server's parameters are not numbers in each third round."""
    whole, rounds = NaturalGradient.decode, count(1)

    def decode(self, turn, server, total):
        found, term = whole(self, turn, server, total)
        fails = turn.steps.draws == 8 and next(rounds) % 3 == 0
        return no_numbers(found) if fails else (found, term)

    monkeypatch.setattr(NaturalGradient, "decode", decode)


def test_a_run_that_diverges_begins_again_with_more_draws(few_draws_fail):
    schools = datasets.eight_schools()
    rounds = []
    with pytest.warns(UserWarning, match=r"round 3: .*The fit begins again, with draws=32"):
        posterior = bf.fit(
            models.eight_schools,
            schools,
            rounds=5,
            seed=3,
            progress=False,
            callbacks=[lambda report: rounds.append(report.number)],
        )
    assert rounds == [1, 2, 1, 2, 3, 4, 5]
    expected = bf.fit(
        models.eight_schools, schools, bf.SFVI(draws=32), rounds=5, seed=3, progress=False
    )
    for name, value in posterior.params.items():
        assert torch.equal(value, expected.params[name])
    assert posterior.algorithm.steps.draws == 32


def test_a_run_with_files_or_privacy_does_not_begin_again(few_draws_fail, tmp_path):
    """The files are that run's, and its rounds are paid for out of the privacy budget."""
    schools = datasets.eight_schools()
    for given in (
        {"resume": tmp_path / "run"},
        {"execution": bf.Execution(states=tmp_path / "states")},
        {"privacy": bf.Privacy(epsilon=50.0, delta=1e-2)},
    ):
        with pytest.raises(bf.Stopped, match=r"round 3: .*draws=32"):
            bf.fit(models.eight_schools, schools, rounds=5, progress=False, **given)


def counts(federation):
    mu, beta = (pyro.sample(name, dist.Normal(0.0, 1.0)) for name in ("mu", "beta"))
    with federation.clients():
        level = pyro.sample("level", dist.Normal(mu, 1.0))
        with federation.observations() as obs:
            rate = (level + beta * obs["x"]).exp()
            pyro.sample("falls", dist.Poisson(rate), obs=obs.get("falls"))


@pytest.mark.filterwarnings("ignore:field 'x'")
@pytest.mark.parametrize(
    ("algorithm", "where"),
    [(bf.SFVI(), "site 'falls', row 1"), (bf.PFedVEM(), "parameter 'beta.loc'")],
)
def test_that_a_run_that_stops_names_client_variable_and_row(algorithm, where):
    x = {"north": [0.1, 0.2], "south": [0.3, 1e9]}
    rows = {name: {"x": own, "falls": [1.0, 3.0]} for name, own in x.items()}
    run = bf.start(counts, bf.Federation.from_arrays(rows), algorithm, rounds=3)
    message = rf"of client 'south' is not finite \({where}\)"
    with pytest.raises(bf.Stopped, match=message):
        for _ in range(3):
            bf.step(run)


def test_that_global_variables_that_are_not_finite_are_named():
    run = bf.start(counts, bf.Federation.from_arrays({"a": {"x": [0.0], "falls": [1.0]}}))
    params = run.plan.algorithm.params(run.server)
    assert name_globals(run.program, params) == ""
    location = torch.tensor([0.0, torch.inf]).to(params["global.loc"])
    assert name_globals(run.program, params | {"global.loc": location}) in (
        "site 'mu'",
        "site 'beta'",
    )


def test_that_local_parameters_that_are_not_finite_are_named():
    with pytest.warns(
        UserWarning, match=r"of 1 client are not finite, such as 'b' \(parameters 'w.loc'\)"
    ):
        warn_of_infinities(["a", "b"], {"w.loc": torch.tensor([0.0, torch.nan])})
