"""Letters that are old, changed, forged or of another study, and the log of what left."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from bayesfed.deploy.answering import draft_answer, sign_answer, signing_key
from bayesfed.deploy.letters import (
    new_signing_key,
    public_signing_key,
    read_letter,
    sign_letter,
)
from bayesfed.deploy.messages import Done, MessageError, Refusal, pack, unpack
from bayesfed.deploy.post import Post, Unanswered
from bayesfed.deploy.server import run_server
from tests.deploy.in_process import nodes_of
from tests.deploy.runs_over_nodes import PLAN
from tests.deploy.study_by_post import SCHOOLS, Study, study_of

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
