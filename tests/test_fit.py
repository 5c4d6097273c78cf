import dataclasses
import io
import re
import signal

import pandas as pd
import pytest
import torch

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.engine.cohort import cohort_size
from bayesfed.steps import GradientsAtDraws
from tests.same_fits import EXACTLY, same
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
    wanted = f"round 2 of 2, ELBO {posterior.history['elbo'][-1]:,.2f}, "
    assert re.search(re.escape(wanted) + r"\d+ s$", lines[-1])


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
