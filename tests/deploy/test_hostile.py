"""One node can neither stop the run of the others, nor pose as another; beside what test_refused_answers.py has."""

import math
from dataclasses import replace

import pytest
import torch

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.deploy import secure
from bayesfed.deploy.institutions import Patience
from bayesfed.deploy.messages import Digest, MessageError, Refusal, pack, unpack, unpack_as
from bayesfed.deploy.plan import DeploymentPlan
from bayesfed.deploy.server import run_server
from bayesfed.deploy.transport import Carrier
from bayesfed.engine.parts import ROWS
from tests.deploy.in_process import nodes_of
from tests.deploy.runs_over_nodes import PLAN, SCHOOLS, Wire, changed, fitted


def hostile(plan, folder, change, kind="ask", who="node1", count=4, federation=SCHOOLS, **patience):
    """A run in which one node's answers of a kind are changed, and what was said."""
    at, said = Wire(nodes_of(federation, plan, folder, count)), []
    at.changed = {(who, kind): change}
    return fitted(at, plan, folder, said, **patience), said


@pytest.mark.parametrize(
    ("algorithm", "times", "rounds"),
    [(bf.SFVI(corrected=False), -5, 2), (bf.PVI(corrected=False), -100, 4)],
    ids=["SFVI", "PVI"],
)
def test_an_upload_after_which_there_is_no_step_is_refused(algorithm, times, rounds, tmp_path):
    """One of four nodes turns its upload round, so that a precision is negative: it is within all bounds."""
    plan = replace(PLAN, algorithm=algorithm, rounds=rounds)
    found, said = hostile(plan, tmp_path, changed("total", lambda v: times * v))
    assert found.refused["node1"] >= 1 and sum(found.refused.values()) == found.refused["node1"]
    assert any("'node1' sent: with it the server's step has no solution" in line for line in said)
    assert all(bool(value.isfinite().all()) for value in found.params.values())


def test_a_late_one_is_refused_too(tmp_path):
    plan = replace(PLAN, algorithm=bf.PVI(corrected=False), rounds=4)
    at, said = Wire(nodes_of(SCHOOLS, plan, tmp_path, 4)), []
    at.late = lambda name, kind: name == "node1" and kind == "ask"
    heard, turned = at.exchange, changed("total", lambda v: -100 * v)

    def exchange(messages, wait):
        found = heard(messages, wait)
        return {at: reply if at in messages else turned(reply) for at, reply in found.items()}

    at.exchange = exchange
    found = fitted(at, plan, tmp_path, said, max_staleness=2)
    assert found.refused["node1"] == 2, said
    assert any("stale as it is, the server's step has no solution" in line for line in said)


def test_what_diverges_without_a_liar_is_nobodys_fault(tmp_path):
    """Where leaving out a node does not help, the run stops as it did."""
    plan = replace(PLAN, algorithm=bf.PVI(corrected=False))
    at, said = Wire(nodes_of(SCHOOLS, plan, tmp_path, 4)), []
    turned = changed("total", lambda v: -20 * v)
    at.changed = {(f"node{i}", "ask"): turned for i in range(4)}
    with pytest.raises(FloatingPointError, match="far from a proper Gaussian"):
        fitted(at, plan, tmp_path, said)
    assert not any("refused" in line for line in said)


def terms(change):
    """Change what is said of the ELBO: its terms, by how much they have changed, and who is new."""
    return changed("elbo", lambda v: change(v.clone()))


def put(at, value):
    def change(said):
        said[at] = value
        return said

    return terms(change)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (put(2, 1e6), "1e+06 of its 2 clients are new"),
        (put(2, -1.0), "-1 of its 2 clients are new"),
        (put(2, 0.5), "0.5 of its 2 clients are new"),
        (put(3, 1e6), "the steps of 1e+06 of its 2 clients went uphill"),
        (put(0, 1e300), "beyond the range of single precision"),
        (put(1, -1e300), "beyond the range of single precision"),
        (put(1, math.nan), "is not finite"),
    ],
)
def test_what_cannot_be_said_of_the_elbo_is_refused(change, why, tmp_path):
    found, said = hostile(replace(PLAN, rounds=1), tmp_path, change)
    assert found.refused["node1"] == 1 and any(why in line for line in said), said
    assert bool(found.posterior.history["elbo"].isfinite().all())


def test_a_weight_below_nothing_is_refused(tmp_path):
    """Weights that add up to nothing would be divided by."""
    train, _ = datasets.digits(clients=4)
    plan = DeploymentPlan(models.Network(models.mlp(64, 10)), bf.FedAvg(), 1, 1.0, 10)

    def negative(reply):
        message, parts = unpack(reply)
        total = parts["total"]
        return pack(message, **(parts | {"total": total | {ROWS: -3 * total[ROWS]}}))

    found, said = hostile(plan, tmp_path, negative, federation=train)
    assert found.refused["node1"] == 1 and any("is negative" in line for line in said)


def test_beside_uploads_of_nothing_none_is_too_large(tmp_path):
    """Such as where most clients have no outcomes in a round: the median is 0."""
    plan = replace(PLAN, rounds=1)
    at = Wire(nodes_of(SCHOOLS, plan, tmp_path, 4))
    nothing = changed("total", torch.zeros_like)
    at.changed = {(f"node{i}", "ask"): nothing for i in range(3)}
    assert set(fitted(at, plan, tmp_path).refused.values()) == {0}


# -- who is who ------------------------------------------------------------------------------------


def test_no_node_takes_anothers_place(tmp_path):
    """node1 says that it is node2 as soon as both are looked for: it is not asked for node2."""
    at, said = Wire(nodes_of(SCHOOLS, PLAN, tmp_path)), []
    greeted = {"node1": 0}

    def hello(reply):
        schema, _ = unpack(reply)
        greeted["node1"] += 1
        return (
            reply
            if greeted["node1"] == 1
            else pack(schema.model_copy(update={"institution": "node2"}))
        )

    count = {"asks": 0}

    def silent(name, kind):
        count["asks"] += kind == "ask" and name == "node1"
        return kind == "ask" and name in ("node1", "node2") and count["asks"] == 1

    at.changed, at.silent = {("node1", "hello"): hello}, silent
    fitted(at, PLAN, tmp_path, said, minimum=3, seconds=1.0)
    assert "node1 was institution 'node1', it is not 'node2' now" in said


def test_two_that_have_one_name_are_both_left_out(tmp_path):
    nodes, said = nodes_of(SCHOOLS, PLAN, tmp_path), []
    at = Wire(nodes)

    def exchange(messages, wait):
        found = at.exchange({a: p for a, p in messages.items() if a != "copy"}, wait)
        if "copy" in messages:
            found["copy"] = nodes[1].handle(messages["copy"])
        return found

    carrier = Carrier(lambda: [*at.nodes, "copy"], exchange)
    patience = Patience(tuple(at.nodes), joining=1.0, seconds=1.0)
    with pytest.raises(TimeoutError, match="institution 'node1' has not answered"):
        run_server(carrier, PLAN, patience, tmp_path / "s.safetensors", report=said.append)
    assert "copy and node1 both claim to be institution 'node1': neither is accepted" in said


# -- beginning and end -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["begin", "finish", "end"])
def test_rubbish_is_told_with_the_name_of_its_node(kind, tmp_path):
    with pytest.raises(MessageError, match="from institution 'node1': these bytes are not a whole"):
        hostile(replace(PLAN, rounds=1), tmp_path, lambda reply: b"rubbish", kind)


@pytest.mark.parametrize(
    "change",
    [lambda v: v > 0, lambda v: v.to(torch.complex64), lambda v: v[:0], lambda v: v.float()],
    ids=["bool", "complex", "shape", "float32"],
)
def test_a_digest_of_another_type_is_another_model(change, tmp_path):
    with pytest.raises(MessageError, match="institution 'node1' has another model"):
        hostile(PLAN, tmp_path, changed("program", change), "begin")


def test_weights_of_another_form_are_told_with_the_name_of_their_node(tmp_path):
    plan = replace(PLAN, algorithm=bf.SFVI(), rounds=3)
    with pytest.raises(MessageError, match="institution 'node1': the log densities"):
        hostile(plan, tmp_path, changed("sums", lambda v: v[:1]), "evaluate")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_no_numbers_leave_the_posterior_as_it_is(value, tmp_path):
    plan = replace(PLAN, algorithm=bf.SFVI(), rounds=3)
    found, _ = hostile(plan, tmp_path, changed("sums", lambda v: v * 0 + value), "evaluate")
    assert found.posterior.correction is None
    assert all(bool(draws.isfinite().all()) for draws in found.sample(100).values())


def test_a_refusal_moves_no_terminal():
    refusal = pack(Refusal(why="no\x1b]0;title\x07\nway " + "x" * 5000))
    with pytest.raises(MessageError) as caught:
        unpack_as(refusal, Digest)
    assert str(caught.value).startswith("no ]0;title  way x") and len(str(caught.value)) == 1000


ZERO, ONE = bytes(32).hex(), (1).to_bytes(32, "little").hex()


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"b": ZERO}, "'b' has a key that gives no secret"),
        ({"b": ONE}, "'b' has a key that gives no secret"),
        ({"b": "same"}, "'a' and 'b' have one key of this run"),
    ],
)
def test_a_key_that_hides_nothing_is_named(keys, why):
    """RFC 7748, section 6.1: points of low order give the secret 0, whatever the other key."""
    good = secure.public_key(secure.new_key()).hex()
    keys = {name: good if key == "same" else key for name, key in keys.items()}
    secure.check_keys({"a": good})
    with pytest.raises(ValueError, match=why):
        secure.check_keys({"a": good} | keys)
