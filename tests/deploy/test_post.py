"""A fit by post is the fit over a wire; files that are old, changed, of others or of another study are refused."""

import itertools
from dataclasses import replace

import pytest
import torch

import bayesfed as bf
from bayesfed.deploy import masking, post
from bayesfed.deploy.letters import (
    read_letter,
)
from bayesfed.deploy.messages import MessageError, unpack
from bayesfed.deploy.post import Unanswered
from bayesfed.deploy.server import run_server
from bayesfed.engine import files
from bayesfed.settings import LeaveOneOutSettings
from tests.deploy import test_effects as effects
from tests.deploy.in_process import nodes_of, run_on
from tests.deploy.runs_over_nodes import PLAN, Wire, fitted
from tests.deploy.study_by_post import SCHOOLS, Study, study_of
from tests.deploy.test_secure_runs import acquainted


def on_a_wire(plan, folder):
    """The same fit by calls of the same nodes in another folder."""
    return run_on(acquainted(nodes_of(SCHOOLS, plan, folder)), plan, folder)


def same_bits(found, expected):
    """The parameters, the draws and the history of two fits."""
    assert found.params.keys() == expected.params.keys()
    for name, value in expected.params.items():
        assert torch.equal(found.params[name], value), name
    for name, value in expected.sample(50).items():
        assert torch.equal(found.sample(50)[name], value), name
    assert torch.equal(found.posterior.history["elbo"], expected.posterior.history["elbo"])


def local_params(folder, plan):
    """What each node has stored of its clients."""
    nodes = nodes_of(SCHOOLS, plan, folder)
    files = [next((node.folder / "runs").glob("*/posterior.safetensors")) for node in nodes]
    return [
        bf.Posterior.load(file, plan.model, node.federation).sample(20)
        for file, node in zip(files, nodes, strict=True)
    ]


# -- the fit --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "letters"),
    [
        (PLAN, 4),
        (replace(PLAN, clients_per_round=0.5, rounds=2), 3),
        pytest.param(
            replace(PLAN, algorithm=bf.SFVI(local_steps=2), rounds=8, seed=1),
            1 + 8 + 2,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["three rounds", "half of the clients", "corrected"],
)
def test_it_is_the_fit_over_a_wire_bit_for_bit(plan, letters, tmp_path):
    """With 1 letter to begin and one for each round and each sum of log densities: that is all."""
    study = study_of(plan, tmp_path / "post", restarting=True)
    assert study.finish() == letters
    expected = on_a_wire(plan, tmp_path / "wire")
    same_bits(study.result, expected)
    locals_of = zip(
        local_params(tmp_path / "post", plan), local_params(tmp_path / "wire", plan), strict=True
    )
    for found, wanted in locals_of:
        assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_secure_sums_take_two_letters_a_round(tmp_path):
    """The masks differ from run to run, and the sums do not."""
    plan = replace(PLAN, secure=True, rounds=1)
    study = Study(acquainted(nodes_of(SCHOOLS, plan, tmp_path / "post")), plan, tmp_path / "post")
    assert study.finish() == 2 + 2 * 1
    same_bits(study.result, on_a_wire(plan, tmp_path / "wire"))
    assert not list(study.folder.rglob("run.key"))  # deleted by the last letter


def test_effects_and_leave_one_out_take_one_letter(tmp_path):
    left_out = LeaveOneOutSettings(num_samples=200)
    plan = replace(effects.PLAN, algorithm=PLAN.algorithm, rounds=1, leave_one_out=left_out)
    nodes = nodes_of(effects.CLINICS, plan, tmp_path / "post")
    study = Study(nodes, plan, tmp_path / "post")
    assert study.finish() == 1 + plan.rounds + 1
    expected = run_on(nodes_of(effects.CLINICS, plan, tmp_path / "wire"), plan, tmp_path / "wire")
    for found, wanted in zip(study.result.effects, expected.effects, strict=True):
        assert torch.equal(torch.as_tensor(found.draws), torch.as_tensor(wanted.draws))
    assert study.result.comparison.table.equals(expected.comparison.table)


@pytest.mark.filterwarnings("ignore:the run is resumed:UserWarning")
@pytest.mark.filterwarnings("ignore:the noise that privacy adds:UserWarning")
def test_a_secret_cohort_is_asked_for_once(tmp_path):
    """It comes from the operating system: each process would draw another, and no answer would be to its requests."""
    privacy = bf.Privacy(clip=1.0, noise=0.1)
    plan = replace(PLAN, privacy=privacy, clients_per_round=0.5, rounds=2)
    study = study_of(plan, tmp_path)
    assert study.finish() == 3


# -- commands that are killed ---------------------------------------------------------------------


def test_any_process_may_be_killed_between_two_files(tmp_path, monkeypatch):
    """Each command is called twice, and dies once where it writes, at each of the places where it can."""
    study = study_of(replace(PLAN, rounds=2), tmp_path / "post", restarting=True)
    whole = files.atomically
    countdown = itertools.count()

    def dies(path):
        if next(countdown) % 7 == 3:
            raise KeyboardInterrupt
        return whole(path)

    for module in (post, masking, files):
        monkeypatch.setattr(module, "atomically", dies)

    def again(command, *arguments):
        for _ in range(20):
            try:
                return command(*arguments)
            except KeyboardInterrupt:
                continue
        raise AssertionError("it never ends")

    for _ in range(10):
        letter = again(study.ask)
        if study.result is not None:
            break
        for name in study.nodes:
            answer = again(study.answer, name, letter)
            assert again(study.answer, name, letter) == answer
            again(lambda answer=answer: study.desk.take(answer))
    monkeypatch.undo()
    same_bits(study.result, on_a_wire(replace(PLAN, rounds=2), tmp_path / "wire"))


def test_a_letter_is_the_same_until_all_answers_are_here(tmp_path):
    study = study_of(PLAN, tmp_path)
    letter = study.rounds(1)
    first, *others = study.answers(letter)
    study.desk.take(first)
    assert study.ask() == letter and study.desk.missing == ["node1", "node2"]
    assert study.desk.take(first) == "node0"  # the same file once more
    for answer in others:
        study.desk.take(answer)
    assert study.ask() != letter


# -- without an institution -----------------------------------------------------------------------


def test_a_round_goes_on_without_an_institution(tmp_path):
    """As over a wire that it does not answer on; its answer, once it comes, is refused."""
    plan = replace(PLAN, rounds=2)
    study = study_of(plan, tmp_path / "post")
    letter = study.rounds(1)
    answers = dict(zip(study.nodes, study.answers(letter), strict=True))
    for name in ("node0", "node2"):
        study.desk.take(answers[name])
    with pytest.raises(ValueError, match="--without node0: the last letter does not wait"):
        study.desk.go_on_without(["node0"])
    study.desk.go_on_without(["node1"])
    with pytest.raises(MessageError, match="letter 3 went on without institution 'node1'"):
        study.desk.take(answers["node1"])
    study.finish()
    at = Wire(nodes_of(SCHOOLS, plan, tmp_path / "wire"))
    asked = itertools.count()
    at.silent = lambda name, kind: kind == "ask" and name == "node1" and next(asked) == 1
    expected = fitted(at, plan, tmp_path / "wire")
    same_bits(study.result, expected)


def test_secure_sums_ask_the_others_again(tmp_path):
    plan = replace(PLAN, secure=True, rounds=1)
    study = Study(acquainted(nodes_of(SCHOOLS, plan, tmp_path, 4)), plan, tmp_path)
    letter = study.rounds(0)
    for answer in study.answers(letter)[:3]:
        study.desk.take(answer)
    study.desk.go_on_without(["node3"])
    again = read_letter(study.ask())
    assert set(again.head.requests) == {"node0", "node1", "node2"}
    assert set(unpack(again.messages[0])[0].roster) == set(again.head.requests)
    study.finish()


def test_letters_that_need_all_answers_say_so(tmp_path):
    study = study_of(PLAN, tmp_path)
    study.ask()
    with pytest.raises(ValueError, match="letter 1 needs the answers of all institutions"):
        study.desk.go_on_without(["node1"])


def test_enough_answers_are_enough(tmp_path):
    study = study_of(replace(PLAN, rounds=2), tmp_path, enough=2)
    letter = study.rounds(0)
    for answer in study.answers(letter)[:2]:
        study.desk.take(answer)
    desk = study.desk
    with pytest.raises(Unanswered) as next_one:
        run_server(desk.carrier(), study.plan, study.patience, tmp_path / "server.safetensors")
    rounds = {unpack(own[-1])[0].round.number for own in next_one.value.requests.values()}
    assert rounds == {1} and set(next_one.value.requests) == set(study.nodes)
