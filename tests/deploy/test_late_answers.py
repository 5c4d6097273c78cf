"""Nodes that are absent, late, or join late, and rounds that go on without them."""

from dataclasses import replace

import pytest
import torch

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.deploy.institutions import Expected, Patience
from bayesfed.deploy.messages import (
    Ask,
    pack,
    unpack,
)
from bayesfed.deploy.plan import DeploymentPlan
from bayesfed.deploy.server import run_server
from bayesfed.deploy.transport import Carrier
from bayesfed.rules import MedianOfInstitutions
from bayesfed.rules.natural_gradient import fade
from tests.deploy.in_process import nodes_of
from tests.deploy.runs_over_nodes import PLAN, SCHOOLS, Wire, fitted, kinds_of, posteriors, same


def test_a_node_that_does_not_answer_is_left_out_of_the_round(tmp_path):
    nodes, said = nodes_of(SCHOOLS, PLAN, tmp_path), []
    at, rounds = Wire(nodes), {"count": 0}

    def silent(name, kind):
        rounds["count"] += kind == "ask" and name == "node1"
        return name == "node1" and kind == "ask" and rounds["count"] == 2

    at.silent = silent
    found = fitted(at, PLAN, tmp_path, said)
    assert found.absent == {"node0": 0, "node1": 1, "node2": 0}
    assert found.posterior.history["clients"].tolist() == [8, 6, 8]
    assert any("'node1' has not answered" in line for line in said)


def test_a_round_waits_for_the_fewest_that_are_enough(in_one_process, tmp_path):
    at = Wire(nodes_of(SCHOOLS, PLAN, tmp_path))
    at.silent = lambda name, kind: name != "node0" and kind == "ask"
    with pytest.raises(TimeoutError, match="fewer than 2 institutions have answered, 3 times"):
        fitted(at, PLAN, tmp_path, minimum=2, attempts=3)
    at.silent = lambda name, kind: False
    found = fitted(at, PLAN, tmp_path, minimum=2)
    same(found.params, in_one_process.params)


def test_the_end_waits_for_a_node_that_is_started_again(in_one_process, tmp_path):
    """It is away for longer than as many messages as attempts."""
    at, away = Wire(nodes_of(SCHOOLS, PLAN, tmp_path)), {"left": 5}

    def silent(name, kind):
        gone = name == "node1" and away["left"] > 0 and (kind == "finish" or away["left"] < 5)
        away["left"] -= gone
        return gone

    at.silent = silent
    found = fitted(at, PLAN, tmp_path, attempts=2)
    assert not away["left"]
    same(found.params, in_one_process.params)


# -- who is late, and who joins late ---------------------------------------------------------------


@pytest.mark.parametrize(
    "algorithm", [PLAN.algorithm, bf.PVI(corrected=False)], ids=["SFVI", "PVI"]
)
def test_a_late_answer_counts_when_it_comes(algorithm, tmp_path):
    """Then the server's sum is of what the clients remember of their uploads, whichever were late."""
    plan = replace(PLAN, algorithm=algorithm, rounds=8)
    nodes = nodes_of(SCHOOLS, plan, tmp_path)
    at, said = Wire(nodes), []
    at.late = lambda name, kind: name == "node2" and kind == "ask"
    found = fitted(at, plan, tmp_path, said, max_staleness=2)
    assert found.absent == {"node0": 0, "node1": 0, "node2": 4}
    assert sum("has answered round" in line for line in said) == 4
    runs = [part.run for node in nodes for part in node._runs.values()]
    part = "factor" if algorithm.name == "PVI" else "quadratic"
    sent = [run.clients.tensors[part] for run in runs]
    if algorithm.name == "PVI":
        q, prior = runs[0].server.q, runs[0].server.prior
        known = {n: getattr(q, n) - getattr(prior, n) for n in sent[0]}
    else:
        known = dict(runs[0].server["quadratic"])
        level = known.pop("level")
        assert known["seen"] == len(SCHOOLS)
        sent = [own | fade(own, level) for own in sent]
    for name, value in known.items():
        of_clients = sum(own[name].sum(0) for own in sent)
        torch.testing.assert_close(value, of_clients.reshape(value.shape), rtol=1e-4, atol=1e-4)
    whole = bf.fit(PLAN.model, SCHOOLS, algorithm, rounds=8).sample(4000)["mu"]
    assert abs(found.sample(4000)["mu"].mean() - whole.mean()) < 0.3 * whole.std()


def test_a_late_answer_is_looked_at_as_one_in_time_is(tmp_path):
    nodes, said = nodes_of(SCHOOLS, replace(PLAN, rounds=4), tmp_path, 4), []
    at, honest = Wire(nodes), Wire(nodes_of(SCHOOLS, replace(PLAN, rounds=4), tmp_path / "h", 4))
    at.late = lambda name, kind: name == "node2" and kind == "ask"
    honest.silent = at.late
    heard = at.exchange

    def exchange(messages, wait):
        found = heard(messages, wait)
        for name in found.keys() - messages.keys():
            message, parts = unpack(found[name])
            larger = {n: 1e6 * (1 + v) for n, v in parts["total"].items()}
            found[name] = pack(message, **(parts | {"total": larger}))
        return found

    at.exchange = exchange
    found = fitted(at, replace(PLAN, rounds=4), tmp_path, said, max_staleness=2)
    assert found.refused["node2"] == 2 and any("its norm is" in line for line in said)
    expected = fitted(honest, replace(PLAN, rounds=4), tmp_path / "h")
    same(found.params, expected.params, 0)


def test_an_answer_that_is_too_late_moves_nothing(tmp_path):
    nodes = nodes_of(SCHOOLS, PLAN, tmp_path)
    at, alone = Wire(nodes), Wire(nodes_of(SCHOOLS, PLAN, tmp_path / "alone"))
    at.late = lambda name, kind: name == "node2" and kind == "ask"
    alone.silent = at.late
    found = fitted(at, PLAN, tmp_path)
    same(found.params, fitted(alone, PLAN, tmp_path / "alone").params, 0)
    assert found.absent["node2"] == 3


def test_a_round_goes_on_once_enough_have_answered(tmp_path):
    nodes = nodes_of(SCHOOLS, PLAN, tmp_path)
    at, waits = Wire(nodes), []

    def exchange(messages, wait):
        waits.append(wait)
        return at.exchange(messages, wait)

    patience = Patience(tuple(at.nodes), joining=1.0, seconds=5.0, enough=2, max_staleness=3)
    carrier = Carrier(lambda: list(at.nodes), exchange)
    run_server(carrier, PLAN, patience, tmp_path / "server.safetensors")
    assert [wait.enough for wait in waits if wait.enough] == [2] * PLAN.rounds
    assert {wait.stale_seconds for wait in waits if wait.enough} == {15.0}


@pytest.mark.parametrize(
    ("algorithm", "weight"),
    [
        (bf.FedAvg().replace(rule=MedianOfInstitutions()), lambda own: own.rows),
        (bf.FedABML(local_steps=2).replace(rule=MedianOfInstitutions(by="clients")), len),
    ],
    ids=["by rows", "alike"],
)
def test_the_median_of_the_nodes_is_what_moves_the_server(algorithm, weight, tmp_path):
    """Against its definition, and whatever one node of three sends."""
    train, _ = datasets.digits(clients=7)
    plan = DeploymentPlan(models.Network(models.mlp(64, 10)), algorithm, 1, 1.0, 10)
    at = Wire(nodes_of(train, plan, tmp_path))
    found = fitted(at, plan, tmp_path)
    replies = [unpack(r) for _, p, r in at.heard if isinstance(unpack(p)[0], Ask)]
    means = [
        {n: v / weight(node.federation) for n, v in parts["total"].items()}
        for (_, parts), node in zip(replies, at.nodes.values(), strict=True)
    ]
    first = next(unpack(p)[1]["message"] for _, p, _ in at.heard if isinstance(unpack(p)[0], Ask))
    for name, value in found.params.items():
        middle = torch.stack([mean[f"theta/{name}"] for mean in means]).median(0).values
        torch.testing.assert_close(value, first[f"theta/{name}"] + middle)
    liar = Wire(nodes_of(train, plan, tmp_path / "liar"))

    def lies(reply):
        message, parts = unpack(reply)
        return pack(message, **(parts | {"total": {n: 900 * v for n, v in parts["total"].items()}}))

    liar.changed = {("node1", "ask"): lies}
    moved = fitted(liar, plan, tmp_path / "liar").params[name]
    moved = moved - first[f"theta/{name}"]
    honest = torch.stack([means[0][f"theta/{name}"], means[2][f"theta/{name}"]])
    assert bool(((moved >= honest.amin(0) - 1e-6) & (moved <= honest.amax(0) + 1e-6)).all())


def test_a_median_is_for_rules_that_average_between_machines_in_clear_sums():
    rule = MedianOfInstitutions()
    with pytest.raises(ValueError, match="MedianOfInstitutions.* does not go with"):
        bf.SFVI().replace(rule=rule).check()
    median = bf.FedAvg().replace(rule=rule)
    with pytest.raises(ValueError, match="in one process there are none"):
        bf.fit(models.Network(models.mlp(64, 10)), datasets.digits(clients=7)[0], median, rounds=1)
    with pytest.raises(ValueError, match="not seen in a secure or noisy sum"):
        replace(PLAN, algorithm=median, secure=True)


@pytest.mark.parametrize(
    ("plan", "patience", "why"),
    [
        (
            replace(PLAN, algorithm=bf.SFVIAvg()),
            {"max_staleness": 1},
            "SFVIAvg uploads what is of use",
        ),
        (
            replace(PLAN, privacy=bf.Privacy(clip=1.0)),
            {"max_staleness": 1},
            "max_staleness: clip and noise",
        ),
        (replace(PLAN, secure=True), {"enough": 2}, "a secure sum is of all"),
        (PLAN, {"enough": 1, "minimum": 2}, "fewer than the minimum"),
        (PLAN, {"expected": {f"node{i}": Expected(2, 2) for i in range(3)}}, "there at the start"),
    ],
)
def test_what_cannot_be_waited_for_is_refused(plan, patience, why, tmp_path):
    with pytest.raises(ValueError, match=why):
        fitted(Wire(nodes_of(SCHOOLS, plan, tmp_path)), plan, tmp_path, **patience)


def joined(plan, folder, come, brings, killed=None):
    """A run in which the last node is not there before its fourth question; and what was said."""
    nodes, said = nodes_of(SCHOOLS, plan, folder), []
    at, asked = Wire(nodes), {"rounds": 0}

    def exchange(messages, wait):
        asked["rounds"] += any(kinds_of(p)[-1] == "ask" for p in messages.values())
        if asked["rounds"] == killed:
            asked["rounds"] += 1
            raise InterruptedError
        return at.exchange(messages, wait)

    def reachable():
        return [name for name in at.nodes if name != "node2" or asked["rounds"] >= come]

    patience = Patience(tuple(at.nodes), 5.0, joining=1.0, expected={"node2": brings})
    options = (Carrier(reachable, exchange), plan, patience, folder / "server.safetensors")
    if killed is not None:
        with pytest.raises(InterruptedError):
            run_server(*options, report=said.append)
    return run_server(*options, report=said.append), said, nodes


@pytest.mark.parametrize("killed", [None, 5], ids=["", "killed"])
def test_a_node_that_joins_later_is_one_that_was_silent_before(killed, tmp_path):
    plan = replace(PLAN, rounds=6)
    whole = Wire(nodes_of(SCHOOLS, plan, tmp_path / "silent"))
    counts = {"asks": 0}

    def silent(name, kind):
        counts["asks"] += kind == "ask" and name == "node2"
        return name == "node2" and kind == "ask" and counts["asks"] <= 3

    whole.silent = silent
    expected = fitted(whole, plan, tmp_path / "silent")
    found, said, nodes = joined(plan, tmp_path, 3, Expected(3, 3), killed)
    assert "round 4: institution 'node2' has joined" in said
    same(found.params, expected.params, 0)
    assert posteriors(nodes)[2].sample(5)["theta"].shape == (5, 3)


def test_a_node_that_never_joins_is_named(tmp_path):
    found, said, _ = joined(PLAN, tmp_path, 99, Expected(3, 3))
    assert "institution 'node2' has not joined" in said[-1] and found.posterior.program.clients == 8


def test_who_brings_what_was_not_expected_is_left_out(tmp_path):
    found, said, _ = joined(PLAN, tmp_path, 1, Expected(3, 4))
    assert any(
        "cannot join: it has 3 clients of 3 rows in all, 3 of 4 were" in line for line in said
    )
    assert found.refused["node2"] >= 1
