"""Hostile nodes, nodes that do not fit together, and what a log and a schema reveal."""

import math
from dataclasses import replace

import pytest

import bayesfed as bf
from bayesfed.deploy import institutions
from bayesfed.deploy.institutions import Patience
from bayesfed.deploy.messages import (
    Ask,
    Begin,
    Finish,
    Hello,
    MessageError,
    Refusal,
    Reply,
    Schema,
    pack,
    unpack,
    unpack_as,
)
from bayesfed.deploy.node import Node
from bayesfed.deploy.server import run_server
from bayesfed.deploy.transport import Carrier
from tests.deploy.in_process import nodes_of
from tests.deploy.runs_over_nodes import (
    PLAN,
    SCHOOLS,
    Wire,
    changed,
    fitted,
    kinds_of,
    same,
)

SHORT = replace(PLAN, rounds=2)


def asked_of(at):
    """The first question that a node was asked, and its answer."""
    return next((n, p, r) for n, p, r in at.heard if isinstance(unpack(p)[0], Ask))


def replayed(reply, kept=[]):  # noqa: B006
    kept.append(reply)
    return kept[0]


HOSTILE = {
    "not finite": (changed("total", lambda v: v * math.nan), "is not finite"),
    "absurdly large": (changed("total", lambda v: v * 1e6), "the institutions' median is"),
    "misshapen": (changed("total", lambda v: v.flatten()[:1]), "in place of"),
    "of another type": (changed("total", lambda v: v.double()), "in place of"),
    "too few clients": (changed("sound", lambda v: v[:-1]), "in place of"),
    "without its upload": (lambda r: pack(unpack(r)[0]), "lacks"),
    "another round's": (replayed, "round 0 came in place of"),
    "rubbish": (lambda r: b"\x80\x04" + r, "not a whole safetensors file"),
    "nothing": (lambda r: b"", "not a whole safetensors file"),
    "another kind": (lambda r: pack(Hello()), "of kind hello"),
}


@pytest.fixture(scope="module")
def without_node1(tmp_path_factory):
    """θ of a run in which it says nothing."""
    folder = tmp_path_factory.mktemp("alone")
    at = Wire(nodes_of(SCHOOLS, SHORT, folder, 4))
    at.silent = lambda name, kind: name == "node1" and kind == "ask"
    return fitted(at, SHORT, folder).params


@pytest.mark.parametrize("what", HOSTILE)
def test_what_a_hostile_node_sends_is_refused_and_moves_nothing(what, without_node1, tmp_path):
    """The run is that of the other nodes, to the last bit."""
    change, why = HOSTILE[what]
    nodes, said = nodes_of(SCHOOLS, SHORT, tmp_path, 4), []
    at = Wire(nodes)
    at.changed = {("node1", "ask"): change}
    found = fitted(at, SHORT, tmp_path, said)
    times = 1 if what == "another round's" else 2
    assert found.refused == {"node0": 0, "node1": times, "node2": 0, "node3": 0}
    assert any("refused what institution 'node1' sent" in line and why in line for line in said), (
        said
    )
    if what != "another round's":
        same(found.params, without_node1, 0.0)


def test_an_upload_longer_than_its_clip_is_refused(tmp_path):
    plan = replace(PLAN, privacy=bf.Privacy(clip=0.2))
    nodes, said = nodes_of(SCHOOLS, plan, tmp_path), []
    at = Wire(nodes)
    at.changed = {("node1", "ask"): changed("total", lambda v: v * 30)}
    assert fitted(at, plan, tmp_path, said).refused["node1"] == 3
    assert any("clients it can be" in line for line in said)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (replace(PLAN, seed=1), "seed is 1 here and 0 there"),
        (
            replace(PLAN, algorithm=bf.SFVI(lr=0.5, corrected=False, local_steps=2)),
            "algorithm.lr is 0.5 here",
        ),
        (replace(PLAN, algorithm=bf.PVI()), "algorithm"),
        (replace(PLAN, privacy=bf.Privacy(clip=1.0)), "privacy is"),
    ],
)
def test_a_node_that_agreed_to_something_else_refuses(other, why, tmp_path):
    nodes = nodes_of(SCHOOLS, PLAN, tmp_path)
    nodes[1] = Node("node1", nodes[1].federation, other, tmp_path / "node1")
    with pytest.raises(
        MessageError, match=rf"institution 'node1': another run was agreed on: .*{why}"
    ):
        fitted(Wire(nodes), PLAN, tmp_path)


def test_a_node_with_another_model_is_named(tmp_path):
    import pyro
    import pyro.distributions as dist

    def wider(federation):
        mu = pyro.sample("mu", dist.Normal(0.0, 6.0))
        tau = pyro.sample("tau", dist.HalfCauchy(5.0))
        with federation.clients():
            theta = pyro.sample("theta", dist.Normal(mu, tau))
            with federation.observations() as obs:
                pyro.sample("y", dist.Normal(theta, obs["sigma"]), obs=obs.get("y"))

    nodes = nodes_of(SCHOOLS, PLAN, tmp_path)
    nodes[2] = Node("node2", nodes[2].federation, replace(PLAN, model=wider), tmp_path / "node2")
    at = Wire(nodes)
    with pytest.raises(
        MessageError, match="institution 'node2': its model is not the server's: the prior of 'mu'"
    ):
        fitted(at, PLAN, tmp_path)
    sent = [(name, unpack(reply)[0].kind) for name, _, reply in at.heard]
    assert ("node1", "reply") in sent and ("node2", "reply") not in sent


def test_the_first_round_begins_the_run_and_the_end_is_one_exchange(tmp_path):
    """At all institutions, also those that have no client in its cohort."""
    plan = replace(PLAN, rounds=2, clients_per_round=1)
    at, exchanges = Wire(nodes_of(SCHOOLS, plan, tmp_path)), []

    def exchange(messages, wait):
        exchanges.append([kinds_of(messages[name]) for name in sorted(messages)])
        return at.exchange(messages, wait)

    patience = Patience(tuple(at.nodes), joining=1.0, seconds=5.0)
    carrier = Carrier(lambda: list(at.nodes), exchange)
    found = run_server(carrier, plan, patience, tmp_path / "server.safetensors")
    assert [len(one) for one in exchanges] == [3, 3, 1, 3]
    assert sorted(exchanges[1]) == [["begin"], ["begin"], ["begin", "ask"]]
    assert exchanges[2] == [["ask"]] and exchanges[3] == [["finish", "end"]] * 3
    assert found.exchanges == 4


def test_nodes_whose_data_do_not_fit_together_are_named(tmp_path):
    nodes = nodes_of(SCHOOLS, PLAN, tmp_path)
    part = nodes[1].federation
    fields = {"y": part["y"], "se": part["sigma"]}
    nodes[1] = Node("node1", replace(part, fields=fields), PLAN, tmp_path / "node1")
    with pytest.raises(
        MessageError, match="institution 'node0' has a field 'sigma', institution 'node1' has no"
    ):
        fitted(Wire(nodes), PLAN, tmp_path)
    nodes[1] = Node("node1", nodes[0].federation, PLAN, tmp_path / "node1")
    with pytest.raises(MessageError, match="'A' at institution 'node0' and at institution 'node1'"):
        fitted(Wire(nodes), PLAN, tmp_path)


def test_a_node_whose_rows_do_not_fit_the_model_says_no_more_than_that(tmp_path):
    """What is wrong with them stands in its own log."""
    nodes = nodes_of(SCHOOLS, PLAN, tmp_path)
    part = nodes[1].federation
    fields = dict(part.fields) | {"sigma": -part["sigma"]}
    nodes[1] = Node("node1", replace(part, fields=fields), PLAN, tmp_path / "node1")
    with pytest.raises(MessageError) as caught:
        fitted(Wire(nodes), PLAN, tmp_path)
    assert str(caught.value) == "institution 'node1' failed (ValueError): its log says why"
    log = (tmp_path / "node1" / "log.jsonl").read_text()
    assert "sigma" in log or "scale" in log


def test_a_missing_node_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(institutions, "SILENCE", 0.1)
    at, said = Wire(nodes_of(SCHOOLS, PLAN, tmp_path)), []
    at.silent = lambda name, kind: name == "node2"
    with pytest.raises(TimeoutError, match="institution 'node2' has not answered in 1 s"):
        fitted(at, PLAN, tmp_path, said)
    assert said == ["waiting for node2: at most 1 s"]


def test_a_node_out_of_step_says_so(tmp_path):
    """Its folder was put back to an earlier state, or the server's file was."""
    node = nodes_of(SCHOOLS, PLAN, tmp_path, 1)[0]
    at = Wire([node])
    fitted(at, PLAN, tmp_path)
    _, question, _ = asked_of(at)
    message, parts = unpack(question)
    late = message.model_copy(update={"round": message.round.model_copy(update={"number": 9})})
    refusal, _ = unpack(node.handle(pack(late, **parts)))
    assert isinstance(refusal, Refusal) and "Begin another run" in refusal.why


@pytest.mark.parametrize("run", ["../../etc", "", "a/b", "."])
def test_a_run_s_name_is_no_path(run, tmp_path):
    node = nodes_of(SCHOOLS, PLAN, tmp_path, 1)[0]
    with pytest.raises(ValueError):
        begin = Begin(run=run, terms=PLAN.description, clients=8, rows=8, cohort=8)
        unpack_as(node.handle(pack(begin)), Reply)
    assert not (tmp_path.parent / "etc").exists()


def test_the_log_says_what_left_the_node(tmp_path):
    import json

    node = nodes_of(SCHOOLS, PLAN, tmp_path, 1)[0]
    fitted(Wire([node]), PLAN, tmp_path)
    log = (tmp_path / "node0" / "log.jsonl").read_text()
    lines = [json.loads(line) for line in log.splitlines()]
    replies = [line for line in lines if line["message"].get("kind") == "reply"]
    assert len(replies) == 3 and all(line["bytes"] > 0 for line in replies)
    assert "total/global.loc" in replies[0]["tensors"] or "total" in str(replies[0]["tensors"])


def test_log_densities_are_not_told_under_privacy(tmp_path):
    plan = replace(PLAN, rounds=3, privacy=bf.Privacy(clip=1.0, noise=1e-6, seed=0))
    node = nodes_of(SCHOOLS, plan, tmp_path, 1)[0]
    at = Wire([node])
    found = fitted(at, plan, tmp_path)
    assert found.posterior.epsilon == math.inf
    said = [unpack(reply) for _, payload, reply in at.heard if isinstance(unpack(payload)[0], Ask)]
    assert all(not parts["elbo"]["terms"].any() for _, parts in said)
    assert isinstance(unpack(at.heard[-1][1])[0].kind, str)
    assert not [p for _, p, _ in at.heard if unpack(p)[0].kind == "evaluate"]


def test_the_schema_says_nothing_of_the_rows(tmp_path):
    node = nodes_of(SCHOOLS, PLAN, tmp_path, 1)[0]
    reply = node.handle(pack(Hello()))
    schema, parts = unpack_as(reply, Schema)
    assert not parts and schema.rows == 8 and set(schema.fields) == {"y", "sigma"}


def test_finish_before_begin_is_refused(tmp_path):
    node = nodes_of(SCHOOLS, PLAN, tmp_path, 1)[0]
    early = Finish(
        run="abc", accepted=None, done=0, epsilon=None, moving=None, rising=None, converged=None
    )
    with pytest.raises(MessageError, match="run 'abc' was not started here"):
        unpack_as(node.handle(pack(early)), Reply)
