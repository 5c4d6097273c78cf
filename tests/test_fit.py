import dataclasses
import io
import signal

import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.engine.cohort import cohort_size
from bayesfed.steps import GradientsAtDraws
from tests.invariants.cases import CASES, federation
from tests.scenarios import conjugate_hierarchy, ragged

QUICK = {"local_steps": 1, "draws": 1}


@dataclasses.dataclass(frozen=True)
class Watched(GradientsAtDraws):
    """SFVI's steps, with a list of the rows that each group of clients was given."""

    def run(self, job, locals_):
        SEEN.append([job.rows(step) for step in range(self.steps)])
        return super().run(job, locals_)


def watched(**settings):
    algorithm = bf.SFVI(**settings)
    return algorithm.replace(steps=Watched(**vars(algorithm.steps)))


SEEN: list = []


@pytest.fixture
def seen():
    SEEN.clear()
    return SEEN


def fit(data=None, algorithm=None, device=None, chunk_size=None, **kwargs):
    algorithm = algorithm or bf.SFVI(**QUICK)
    execution = bf.Execution(device=device, chunk_size=chunk_size)
    how = {"rounds": 3, "execution": execution, **kwargs}
    return bf.fit(conjugate_hierarchy, data or ragged(6), algorithm, **how)


def same(first, second, **tolerance):
    for part in ("params", "local_params"):
        for name, value in getattr(first, part).items():
            torch.testing.assert_close(value, getattr(second, part)[name], **tolerance)


EXACTLY = {"rtol": 0, "atol": 0}


# -- cohorts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "clients", "size"),
    [(1, 85, 1), (85, 85, 85), (1.0, 85, 85), (0.2, 85, 17), (0.001, 85, 1), (0.5, 3, 2)],
)
def test_cohort_size(asked, clients, size):
    found = cohort_size(asked, clients)
    assert (found, type(found)) == (size, int)


@pytest.mark.parametrize("asked", [0, 86, 0.0, 1.01, -0.5, float("nan")])
def test_cohort_sizes_that_are_refused(asked):
    with pytest.raises(ValueError, match="clients_per_round is"):
        cohort_size(asked, 85)


def test_cohorts_are_random_distinct_and_seeded():
    cohorts = {}
    for seed in (0, 0, 1):
        rounds = []
        fit(
            rounds=12,
            clients_per_round=2,
            seed=seed,
            callbacks=[lambda r, rounds=rounds: rounds.append(tuple(r.cohort))],
        )
        assert all(len(set(cohort)) == 2 for cohort in rounds)
        assert {name for cohort in rounds for name in cohort} <= set(ragged(6).names)
        assert cohorts.setdefault(seed, rounds) == rounds
        assert len(set(rounds)) > 4  # of 15 pairs
    assert cohorts[0] != cohorts[1]


@pytest.mark.parametrize(("clients", "size"), [(6, 2), (7, 3), (5, 5), (12, 1)])
def test_all_clients_take_part_in_as_few_rounds_as_they_can(clients, size):
    cohorts = []
    each = -(-clients // size)
    fit(
        ragged(clients),
        rounds=3 * each,
        clients_per_round=size,
        callbacks=[lambda r: cohorts.append(r.cohort)],
    )
    turns = [cohorts[i : i + each] for i in range(0, len(cohorts), each)]
    for turn in turns:
        assert {name for cohort in turn for name in cohort} == set(ragged(clients).names)
    if size < clients:
        assert turns[0] != turns[1] or turns[1] != turns[2]


def test_clients_outside_the_cohort_keep_their_parameters():
    data = ragged(6)
    algorithm = bf.SFVI(**QUICK)
    program = algorithm.program(conjugate_hierarchy, data)
    start = program.init_locals(data.batch())
    run = bf.start(conjugate_hierarchy, data, algorithm, rounds=1, clients_per_round=2)
    took_part = bf.step(run).cohort
    moved = torch.zeros(6, dtype=torch.bool)
    for name, value in run.clients.tensors["params"].items():
        moved |= (value != start[name]).reshape(6, -1).any(1)
    assert [data.names[i] for i in moved.nonzero().flatten()] == sorted(took_part)


# -- callbacks and history ------------------------------------------------------------------------


def test_a_callback_sees_every_round():
    data, rounds, order = ragged(6), [], []
    posterior = fit(
        data,
        rounds=4,
        clients_per_round=0.5,
        callbacks=[rounds.append, lambda r: order.append(("second", len(rounds)))],
    )
    assert [r.number for r in rounds] == [1, 2, 3, 4]
    assert order == [("second", n) for n in (1, 2, 3, 4)]
    for r in rounds:
        assert isinstance(r, bf.Round)
        assert r.rounds == 4
        assert len(r.cohort) == 3
        assert r.client_terms.shape == (3,)
        assert not r.client_terms.requires_grad
        assert r.seconds > 0
    assert posterior.history["elbo"].tolist() == pytest.approx([r.elbo for r in rounds])
    assert posterior.history["seconds"].tolist() == pytest.approx([r.seconds for r in rounds])
    assert posterior.history["clients"].tolist() == [3, 3, 3, 3]


def test_with_all_clients_the_elbo_is_the_sum_of_terms():
    """server term + Σ client terms: what is left is the same for the first and the second call."""
    rounds = []
    fit(rounds=1, callbacks=[rounds.append])
    half = []
    fit(rounds=1, chunk_size=2, callbacks=[half.append])
    assert rounds[0].elbo == pytest.approx(half[0].elbo, rel=1e-6)
    terms = dict(zip(rounds[0].cohort, rounds[0].client_terms.tolist(), strict=True))
    chunked = dict(zip(half[0].cohort, half[0].client_terms.tolist(), strict=True))
    assert terms == pytest.approx(chunked, rel=1e-5)


def test_a_callback_can_stop_the_run():
    class Enough(Exception):
        pass

    def stop(r):
        if r.number == 2:
            raise Enough

    with pytest.raises(Enough):
        fit(rounds=10, callbacks=[stop])


def test_a_callback_that_returns_true_ends_the_fit_and_leaves_the_posterior():
    posterior = fit(rounds=10, callbacks=[lambda r: r.number == 2, lambda r: None])
    assert len(posterior.history["elbo"]) == 2
    expected = fit(rounds=10, callbacks=[lambda r: r.number == 2])
    torch.testing.assert_close(posterior.params, expected.params, rtol=0.0, atol=0.0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"model": "eight_schools"},
            "model is 'eight_schools': give a Pyro program of the federation",
        ),
        ({"federation": pd.DataFrame({"y": [1.0]})}, "rows are a Federation, not a DataFrame"),
        ({"algorithm": bf.FedAvg}, r"algorithm is bayesfed.FedAvg: .* that bf.FedAvg\(\) returns"),
        ({"algorithm": "FedAvg"}, "algorithm is 'FedAvg': give"),
    ],
)
def test_arguments_of_another_kind_are_named(given, said):
    usual = {"model": models.eight_schools, "federation": datasets.eight_schools()}
    with pytest.raises(TypeError, match=said):
        bf.fit(**(usual | given), rounds=1)


def test_new_clients_are_a_federation():
    with pytest.raises(TypeError, match="rows are a Federation, not a DataFrame"):
        fit(rounds=1).personalize(pd.DataFrame({"y": [1.0]}))


def test_callbacks_are_a_list():
    with pytest.raises(
        TypeError, match="callbacks is one function, <built-in function print>: give"
    ):
        fit(rounds=1, callbacks=print)


@pytest.mark.parametrize("sent", ["callback", "signal"])
def test_an_interrupted_run_is_saved_as_it_is_between_two_rounds(tmp_path, monkeypatch, sent):
    """Files are otherwise written in a twentieth of the time only, which is never here."""
    monkeypatch.setattr("bayesfed.engine.run_file._SHARE", 1e-9)

    def interrupt(r):
        if r.number == 3:
            if sent == "callback":
                raise KeyboardInterrupt
            signal.raise_signal(signal.SIGINT)

    how = {"rounds": 6, "resume": tmp_path / "run"}
    with pytest.raises(KeyboardInterrupt):
        fit(callbacks=[interrupt], **how)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    rounds = []
    again = fit(callbacks=[rounds.append], **how)
    assert [r.number for r in rounds] == [4, 5, 6]
    torch.testing.assert_close(again.params, fit(rounds=6).params, rtol=0.0, atol=0.0)


# -- memory and minibatches -----------------------------------------------------------------------


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("chunk_size", [1, 2, 4, 100])
def test_chunks_change_memory_not_results(seen, chunk_size):
    """Sums are added in another order: float64 round-off, magnified a little by Adam."""
    data = ragged(6)
    whole = fit(data, watched(**QUICK), clients_per_round=5, batch_size=2)
    assert [len(steps[0]) for steps in seen] == [5, 5, 5]
    seen.clear()
    chunked = fit(data, watched(**QUICK), clients_per_round=5, batch_size=2, chunk_size=chunk_size)
    expected = {1: [1] * 5, 2: [2, 2, 1], 4: [4, 1], 100: [5]}[chunk_size]
    assert [len(steps[0]) for steps in seen] == expected * 3
    same(whole, chunked, rtol=1e-9, atol=1e-11)


@pytest.mark.filterwarnings("ignore:field 'y' is about")  # numbers that say whose they are
def test_minibatches(seen):
    data = bf.Federation.from_arrays(
        {f"c{n}": {"y": 100.0 * n + torch.arange(n)} for n in (1, 3, 20)}
    )
    fit(data, watched(local_steps=3, draws=1), rounds=2, batch_size=4)
    drawn = set()
    for steps in seen:
        for batch in steps:
            assert batch.mask.shape == (3, 4)
            used = torch.minimum(data.lengths[batch.index], torch.tensor(4))
            assert batch.mask.sum(1).tolist() == used.tolist()
            torch.testing.assert_close(batch.scale[:, 0], data.lengths[batch.index] / used)
            for i, y, mask in zip(batch.index, batch.fields["y"], batch.mask, strict=True):
                rows = y[mask]
                assert len(rows.unique()) == len(rows)
                assert (rows // 100 == data.lengths[i]).all()  # a client's own rows
            drawn.add(tuple(batch.fields["y"][batch.index == 2].flatten().tolist()))
    assert len(drawn) == 6  # 4 of 20 rows, afresh at every step


def test_without_batch_size_all_rows_are_used(seen):
    data = ragged(4)
    fit(data, watched(**QUICK), rounds=1)
    (steps,) = seen
    assert steps[0].mask.sum() == data.rows
    assert (steps[0].scale == 1).all()


# -- seeds, devices, algorithms -------------------------------------------------------------------


def test_a_seed_repeats_the_run_and_another_does_not():
    first, again, other = (fit(seed=seed) for seed in (0, 0, 1))
    same(first, again, **EXACTLY)
    assert torch.equal(first.history["elbo"], again.history["elbo"])
    assert not torch.equal(first.history["elbo"], other.history["elbo"])


def test_the_global_generator_is_neither_read_nor_moved():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = fit(batch_size=1, clients_per_round=3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    same(first, fit(batch_size=1, clients_per_round=3), **EXACTLY)


def test_device_and_type():
    posterior = fit(device="cpu")
    assert posterior.federation.device == torch.device("cpu")
    same(posterior, fit(), **EXACTLY)
    double = fit(ragged(6, dtype=torch.float64))
    values = (double.params | double.local_params).values()
    assert {value.dtype for value in values} == {torch.float64}


def test_the_default_algorithm_is_sfvi():
    posterior = bf.fit(conjugate_hierarchy, ragged(2), rounds=1)
    assert posterior.algorithm == bf.SFVI()


def test_the_order_of_clients_does_not_matter():
    """Streams belong to names, so each client draws the same noise wherever it stands."""
    data = ragged(5, dtype=torch.float64)
    first = fit(data)
    second = fit(data.select(data.names[::-1]))
    for name, value in first.local_params.items():
        torch.testing.assert_close(value, second.local_params[name].flip(0), rtol=1e-5, atol=1e-6)


# -- the progress bar -----------------------------------------------------------------------------


@pytest.mark.parametrize("progress", [None, False])
def test_no_bar_where_there_is_no_terminal(capsys, progress):
    fit(progress=progress)
    assert capsys.readouterr() == ("", "")


def test_lines_where_there_is_no_terminal_and_the_fit_takes_long(capsys, monkeypatch):
    monkeypatch.setattr("bayesfed.engine.progress.INTERVAL", 0.0)
    posterior = fit(rounds=2)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert f"round 2 of 2, ELBO {posterior.history['elbo'][-1]:,.2f}, 0 s" in lines[-1]


def test_the_bar_shows_rounds_and_elbo(capsys):
    posterior = fit(progress=True)
    out, error = capsys.readouterr()
    assert out == ""
    assert "3/3" in error
    assert f"ELBO {posterior.history['elbo'][-1]:,.2f}" in error


def test_a_bar_by_default_on_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", terminal)
    fit()
    assert "3/3" in terminal.getvalue()


def test_a_round_cannot_be_changed():
    rounds = []
    fit(rounds=1, callbacks=[rounds.append])
    with pytest.raises(dataclasses.FrozenInstanceError):
        rounds[0].elbo = 0.0


# -- chunks ---------------------------------------------------------------------------------------


def test_automatic_chunks_change_nothing():
    same(fit(), fit(chunk_size="auto"), rtol=1e-6, atol=1e-6)


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
