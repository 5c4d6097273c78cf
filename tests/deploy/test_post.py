"""A fit by post is the fit over a wire; files that are old, changed, of others or of another study are refused."""

import itertools
import json
import shutil
from dataclasses import replace

import pytest
import torch

import bayesfed as bf
from bayesfed import datasets
from bayesfed.deploy import masking, post
from bayesfed.deploy.answering import draft_answer, public_key_of, sign_answer, signing_key
from bayesfed.deploy.institutions import Patience
from bayesfed.deploy.letters import (
    new_signing_key,
    public_signing_key,
    read_letter,
    sign_letter,
)
from bayesfed.deploy.messages import Ask, Done, MessageError, Refusal, pack, unpack
from bayesfed.deploy.node import Node
from bayesfed.deploy.post import Post, Unanswered
from bayesfed.deploy.server import run_server
from bayesfed.engine import files
from bayesfed.settings import LeaveOneOutSettings
from tests.deploy import test_effects as effects
from tests.deploy.in_process import nodes_of, run_on
from tests.deploy.test_deployed import PLAN, Wire, fitted
from tests.deploy.test_secure_runs import acquainted

SCHOOLS = datasets.eight_schools()


class Study:
    """A coordinator and nodes; each command is a new process, which has nothing but files.

    Nodes restart with each letter if ``restarting``; else they are resident, which is faster.
    """

    def __init__(self, nodes, plan, folder, *, restarting=False, **patience):
        self.restarting = restarting
        self.nodes = {node.name: node for node in nodes}
        self.plan, self.folder = plan, folder
        self.patience = Patience(tuple(self.nodes), **patience)
        self.result = None
        self.desk.begin(folder / "experiment.toml")

    @property
    def desk(self):
        """The coordinator's letters, as a new process sees them."""
        keys = {name: public_key_of(node.folder) for name, node in self.nodes.items()}
        return Post(self.folder / "post", tuple(self.nodes), keys)

    def at(self, name):
        """The node, as a new process sees it."""
        was = self.nodes[name]
        if not self.restarting:
            return was
        return Node(was.name, was.federation, was.plan, was.folder, was.execution, was.pinned)

    def ask(self):
        """Go on as far as the answers allow, and return the letter."""
        desk = self.desk
        if not desk.missing:
            try:
                file = self.folder / "server.safetensors"
                self.result = run_server(desk.carrier(), self.plan, self.patience, file)
                desk.write_last()
            except Unanswered as waiting:
                desk.write(waiting.requests)
        return desk.letter_path.read_bytes()

    def answer(self, name, letter):
        """What an institution sends."""
        node = self.at(name)
        coordinator = public_signing_key(self.desk.key)
        return sign_answer(node, draft_answer(node, letter, coordinator))

    def answers(self, letter):
        """What all that are asked send."""
        return [self.answer(name, letter) for name in read_letter(letter).head.requests]

    def rounds(self, count):
        """Go on until the letter of a round is there; return that letter."""
        while True:
            letter = self.ask()
            asked = unpack(read_letter(letter).messages[-1])[0]
            if isinstance(asked, Ask) and asked.round.number == count:
                return letter
            for answer in self.answers(letter):
                self.desk.take(answer)

    def finish(self):
        """Go on to the end; return the number of letters that were answered."""
        for number in itertools.count():
            letter = self.ask()
            if self.result is not None:
                for name in self.nodes:  # no answer comes of it
                    draft_answer(self.at(name), letter, public_signing_key(self.desk.key))
                return number
            for answer in self.answers(letter):
                self.desk.take(answer)


def study_of(plan, folder, **options):
    return Study(nodes_of(SCHOOLS, plan, folder), plan, folder, **options)


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
            12,
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


# -- adversaries ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    """A study whose round 2 is asked for, with the answers to it and to the round before: to be read only."""
    study = study_of(PLAN, tmp_path_factory.mktemp("sample"))
    before = study.rounds(0)
    old = dict(zip(study.nodes, study.answers(before), strict=True))
    for answer in old.values():
        study.desk.take(answer)
    letter = study.ask()
    return study, before, old, letter, dict(zip(study.nodes, study.answers(letter), strict=True))


def taken(study):
    """All that the coordinator has stored."""
    folder = study.folder / "post"
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def refused(study, data, why):
    before = taken(study)
    with pytest.raises(MessageError, match=why):
        study.desk.take(data)
    assert taken(study) == before


def forged(file, private, messages=None, **changes):
    """A file with other contents, signed by this key."""
    head = file.head.model_copy(update=changes)
    return sign_letter(head, list(file.messages if messages is None else messages), private)


def test_an_old_answer_is_refused(sample):
    study, _, old, _, _ = sample
    refused(
        study, old["node0"], "old answer of institution 'node0', to letter 2; the last is letter 3"
    )


def test_every_changed_byte_is_noticed(sample):
    study, _, _, _, answers = sample
    data = answers["node0"]
    for place in range(0, len(data), len(data) // 40):
        changed = bytearray(data)
        changed[place] ^= 1
        refused(study, bytes(changed), ".+")
    refused(study, data[: len(data) // 2], "not a whole one")
    refused(study, b"", "not a whole one")
    refused(study, pack(Done(run="x")), "not a letter or an answer")
    refused(study, sample[3], "a letter to the institutions, not an answer")


def test_an_answer_signed_by_another_institution_is_refused(sample):
    study, _, _, _, answers = sample
    file, other = read_letter(answers["node0"]), signing_key(study.nodes["node1"].folder)
    refused(study, forged(file, other), "not as institution 'node0' has signed it")
    renamed = forged(file, signing_key(study.nodes["node0"].folder), institution="node1")
    refused(study, renamed, "not as institution 'node1' has signed it")
    stranger = forged(file, new_signing_key(), institution="stranger")
    refused(study, stranger, "'stranger', which has no part in this study")


def test_a_file_of_another_study_is_refused(sample, tmp_path):
    """The same institutions, with the same keys, in a second study of the same experiment."""
    study, _, _, letter, answers = sample
    second = Study(study.nodes.values(), study.plan, tmp_path)
    second.ask()
    refused(second, answers["node0"], "an answer of institution 'node0' in another study")
    elsewhere = public_signing_key(second.desk.key)
    with pytest.raises(MessageError, match="not as the coordinator has signed it"):
        draft_answer(study.at("node0"), letter, elsewhere)


def test_a_second_answer_to_a_letter_is_refused(sample, tmp_path):
    """Signed by the institution itself, with other numbers in it."""
    study = sample[0]
    shutil.copytree(study.folder, tmp_path / "copy")
    copy = Study(nodes_of(SCHOOLS, PLAN, tmp_path / "copy"), PLAN, tmp_path / "copy")
    file = read_letter(sample[4]["node0"])
    own, (message, parts) = signing_key(copy.nodes["node0"].folder), unpack(file.messages[0])
    parts["total"] = {name: value + 1 for name, value in parts["total"].items()}
    copy.desk.take(sample[4]["node0"])
    refused(
        copy,
        forged(file, own, [pack(message, **parts)]),
        "a second, different answer of institution 'node0'",
    )


@pytest.mark.parametrize(
    ("messages", "changes", "why"),
    [
        ([], {}, "answers 0 messages of 1"),
        ([b"no message"], {}, "not a whole safetensors file"),
        ([pack(Refusal(why="no consent"))], {}, "no consent"),
        ([pack(Done(run="other"))], {}, "answers in another run"),
        (None, {"letter": "0" * 64}, "another letter 3 than the one here"),
        (None, {"number": 4}, "letter 4, which was not sent yet"),
    ],
)
def test_a_dishonest_institution_cannot_answer_something_else(sample, messages, changes, why):
    study, _, _, _, answers = sample
    file, own = read_letter(answers["node0"]), signing_key(study.nodes["node0"].folder)
    refused(study, forged(file, own, messages, **changes), why)


def test_numbers_that_cannot_be_are_refused_by_the_server_and_asked_for_again(sample, tmp_path):
    """As over a wire: the other answers count, and the report names the institution."""
    study = sample[0]
    shutil.copytree(study.folder, tmp_path / "copy")
    copy = Study(nodes_of(SCHOOLS, PLAN, tmp_path / "copy"), PLAN, tmp_path / "copy")
    file = read_letter(sample[4]["node0"])
    message, parts = unpack(file.messages[0])
    parts["total"] = {n: torch.full_like(v, torch.nan) for n, v in parts["total"].items()}
    own = signing_key(copy.nodes["node0"].folder)
    copy.desk.take(forged(file, own, [pack(message, **parts)]))
    for name in ("node1", "node2"):
        copy.desk.take(sample[4][name])
    lines = []
    with pytest.raises(Unanswered):
        file = tmp_path / "copy" / "server.safetensors"
        run_server(copy.desk.carrier(), PLAN, copy.patience, file, report=lines.append)
    assert any("refused what institution 'node0' sent" in line for line in lines)


def test_an_institution_reads_no_old_changed_or_forged_letter(sample):
    study, before, _, letter, _ = sample
    node, coordinator = study.at("node0"), public_signing_key(study.desk.key)
    with pytest.raises(MessageError, match="an old letter, number 2; letter 3"):
        draft_answer(node, before, coordinator)
    file = read_letter(letter)
    message, parts = unpack(file.requests_to("node0")[0])
    parts["message"] = {name: value + 1 for name, value in parts["message"].items()}
    evil = pack(message, **parts)
    for key in (new_signing_key(), signing_key(study.nodes["node1"].folder)):
        with pytest.raises(MessageError, match="not as the coordinator has signed it"):
            draft_answer(node, forged(file, key, [evil] * 3), coordinator)
    with pytest.raises(MessageError, match="another letter 3 of this study was read before"):
        draft_answer(node, forged(file, study.desk.key, [evil] * 3), coordinator)
    with pytest.raises(MessageError, match="round 1 .* was asked before, with another message"):
        draft_answer(node, forged(file, study.desk.key, [evil] * 3, number=4), coordinator)
    with pytest.raises(MessageError, match="not for institution 'node0', but for node1"):
        other = {"node1": file.head.requests["node1"]}
        draft_answer(node, forged(file, study.desk.key, requests=other), coordinator)
    with pytest.raises(MessageError, match="an institution's answer, not a letter"):
        draft_answer(node, sample[4]["node1"], coordinator)


def test_an_institution_with_another_model_is_named_and_may_answer_again(tmp_path):
    study = study_of(PLAN, tmp_path)
    study.nodes["node1"].plan = replace(PLAN, seed=3)
    for answer in study.answers(study.ask()):
        study.desk.take(answer)
    letter = study.ask()
    with pytest.raises(MessageError, match="another run was agreed on: seed is 3 here and 0 there"):
        study.answer("node1", letter)
    study.nodes["node1"].plan = PLAN
    for answer in study.answers(letter):
        study.desk.take(answer)
    assert read_letter(study.ask()).head.number == 3


def test_two_institutions_do_not_have_one_key(tmp_path):
    with pytest.raises(ValueError, match="'a' and 'b' have the same key"):
        Post(tmp_path, ("a", "b"), {"a": "0" * 64, "b": "0" * 64})
    with pytest.raises(ValueError, match=r"deployment\.keys has no key of institution 'b'"):
        Post(tmp_path, ("a", "b"), {"a": "0" * 64})


# -- what leaves ----------------------------------------------------------------------------------


def test_the_log_lists_what_left_and_only_that(sample):
    study, _, _, letter, _ = sample
    node = study.at("node2")
    log = node.folder / "log.jsonl"
    before = log.read_text()
    draft = draft_answer(node, letter, public_signing_key(study.desk.key))
    assert log.read_text() == before  # nobody has agreed
    sign_answer(node, draft)
    (entry,) = [json.loads(line) for line in log.read_text()[len(before) :].splitlines()]
    assert (entry["what"], entry["by"], entry["letter"]) == ("sent", "post", 3)
    assert entry["study"] == study.desk.study and entry["message"]["kind"] == "reply"
    assert entry["bytes"] == len(draft.replies[0])


def test_the_words_count_what_is_in_the_file(sample):
    study, _, _, letter, answers = sample
    draft = draft_answer(study.at("node2"), letter, public_signing_key(study.desk.key))
    text = "\n".join(draft.lines)
    _, parts = unpack(read_letter(answers["node2"]).messages[0])
    numbers = sum(value.numel() for part in parts.values() for value in part.values())
    names = study.nodes["node2"].federation.names
    assert (
        f"round 2: sums over {len(names)} clients ({', '.join(names)}) with {len(names)} rows"
        in text
    )
    assert f"{numbers} numbers in all, which the coordinator can read: no secure sums" in text
    for name, value in parts["total"].items():
        assert f"  {name}: {value.numel():,} number" in text
    assert "without noise" in text
