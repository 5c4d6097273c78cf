"""A fit as steps: start, step and finish, and clients that were in no cohort."""

import pyro
import pyro.distributions as dist
import pytest
import torch

import bayesfed as bf
from tests.invariants.cases import CASES, federation
from tests.same_fits import EXACTLY, same

# -- clients that were in no cohort -----------------------------------------------------------------------------


def far_apart():
    generator = torch.Generator().manual_seed(0)
    return bf.Federation.from_arrays(
        {f"c{i}": {"y": 5.0 * (-1) ** i + torch.randn(6, generator=generator)} for i in range(20)}
    )


def unit_noise(federation):
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfNormal(5.0))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(mu, tau))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(a, 1.0), obs=obs.get("y"))


@pytest.mark.parametrize("algorithm", [bf.SFVI(), bf.PVI()], ids=str)
def test_clients_that_were_in_no_cohort_have_posteriors_too(algorithm):
    """Six rows of unit noise: a mean within .41 of theirs, whatever else; eight of 20 clients are visited."""
    data = far_apart()
    how = {"rounds": 8, "clients_per_round": 1, "progress": False}
    run = bf.start(
        unit_noise, data, algorithm, **{k: how[k] for k in ("rounds", "clients_per_round")}
    )
    for _ in range(8):
        bf.step(run)
    assert run.client_terms.isnan().sum() >= 12
    kept = {name: value.clone() for name, value in run.clients.tensors["params"].items()}
    a = bf.finish(run).sample(2000)["a"]
    own = torch.stack([data.select([name])["y"].mean() for name in data.names])
    unseen = run.client_terms.isnan()
    assert ((a.mean(0) - own).abs()[unseen] < 1.5).all()  # at the start they are 5 off
    assert (a.std(0)[unseen] > 0.2).all()
    for name, value in run.clients.tensors["params"].items():
        assert torch.equal(value, kept[name])  # the run may go on


def test_clients_that_were_in_no_cohort_are_named_where_states_lie_in_files(tmp_path):
    with pytest.warns(UserWarning, match=r"of 20 clients were in no cohort, such as 'c"):
        bf.fit(
            unit_noise,
            far_apart(),
            bf.SFVI(),
            rounds=2,
            clients_per_round=1,
            execution=bf.Execution(states=tmp_path / "states"),
        )


# -- start, step, finish --------------------------------------------------------------------------


def options(name, **settings):
    algorithm, model = CASES[name]()
    how = {"rounds": 4, "clients_per_round": 3, "batch_size": 3, "seed": 2} | settings
    execution = how.pop("execution", bf.Execution(compile=False))
    return model, federation(), algorithm, how | {"execution": execution}


@pytest.mark.parametrize("name", ["SFVI", "FedAvg", "Scaffold", "PFedVEM of a network", "CAFeMe"])
def test_steps_by_hand_are_a_fit(name):
    model, data, algorithm, how = options(name)
    seen = []
    expected = bf.fit(model, data, algorithm, callbacks=[seen.append], **how)
    run = bf.start(model, data, algorithm, **how)
    rounds = [bf.step(run) for _ in range(4)]
    same(bf.finish(run), expected, **EXACTLY)
    assert [r.cohort for r in rounds] == [r.cohort for r in seen]
    assert [r.elbo for r in rounds] == [r.elbo for r in seen]
    assert run.history["elbo"].tolist() == [r.elbo for r in rounds]
    for one, other in zip(rounds, seen, strict=True):
        assert torch.equal(one.client_terms, other.client_terms)
        assert all(torch.equal(one.params[name], other.params[name]) for name in one.params)


@pytest.mark.filterwarnings(
    "ignore:.*clients were in no cohort"
)  # told of where states lie in files
@pytest.mark.parametrize("files", [False, True])
@pytest.mark.parametrize("name", ["SFVI", "FedAvg of a network", "FedABML of a network"])
def test_a_run_may_be_finished_and_go_on(name, files, tmp_path):
    """The posterior halfway is that of its rounds, and the end is that of a run that was left alone."""

    def how_to_run(folder):
        where = tmp_path / folder if files else None
        return options(name, execution=bf.Execution(compile=False, states=where))

    model, data, algorithm, how = how_to_run("whole")
    expected = bf.fit(model, data, algorithm, **how)
    model, data, algorithm, how = how_to_run("halves")
    run = bf.start(model, data, algorithm, **how)
    bf.step(run)
    bf.step(run)
    half = bf.finish(run)
    assert len(half.history["elbo"]) == 2
    before = {name: value.clone() for name, value in half.local_params.items()}
    same(bf.finish(run), half, **EXACTLY)  # once more
    bf.step(run)
    bf.step(run)
    same(bf.finish(run), expected, **EXACTLY)
    if not files:
        assert all(torch.equal(half.local_params[name], value) for name, value in before.items())


def test_two_runs_are_independent():
    """All that a run changes is in it: steps of two runs can be taken by turns."""
    one, other = (bf.start(*options("SFVI")[:3], **options("SFVI", seed=s)[3]) for s in (2, 3))
    for _ in range(4):
        bf.step(one)
        bf.step(other)
    for seed, run in ((2, one), (3, other)):
        model, data, algorithm, how = options("SFVI", seed=seed)
        same(bf.finish(run), bf.fit(model, data, algorithm, **how), **EXACTLY)


def test_a_run_that_is_over_cannot_step():
    model, data, algorithm, how = options("SFVI")
    run = bf.start(model, data, algorithm, **how | {"rounds": 1})
    bf.step(run)
    with pytest.raises(ValueError, match="the run has done its 1 round:"):
        bf.step(run)
    assert run.done == 1


def test_the_properties_of_a_run():
    model, data, algorithm, how = options("SFVI")
    privacy = bf.Privacy(clip=1.0, epsilon=2.0, mechanism="laplace")
    run = bf.start(model, data, algorithm, privacy=privacy, **how)
    assert run.title == "SFVI (FullRank globals, conditioned locals), ε = 2"
    assert (run.cohort_size, run.done, run.rounds) == (3, 0, 4)
    assert run.description["algorithm"]["name"] == "SFVI"
    assert run.client_terms.isnan().all()
    with pytest.warns(UserWarning, match="the noise that privacy adds"):
        bf.step(run)
    assert int((~run.client_terms.isnan()).sum()) == 3


@pytest.mark.parametrize("device", ["gpu0", *([] if torch.cuda.is_available() else ["cuda"])])
def test_a_device_that_torch_does_not_have_is_refused(device):
    with pytest.raises(ValueError, match=f"device is '{device}', which torch .* Leave device out"):
        bf.Execution(device=device)
