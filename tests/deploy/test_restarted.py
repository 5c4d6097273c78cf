"""What is killed and started again, servers and nodes, changes nothing that was accepted."""

import pytest

from bayesfed.deploy.bundles import split
from bayesfed.deploy.institutions import Patience
from bayesfed.deploy.messages import (
    Ask,
    Refusal,
    pack,
    unpack,
)
from bayesfed.deploy.node import Node
from bayesfed.deploy.server import run_server
from bayesfed.deploy.transport import Carrier
from tests.deploy.in_process import divided, nodes_of
from tests.deploy.runs_over_nodes import EAGER, PLAN, SCHOOLS, Wire, fitted, same


def test_the_same_question_has_the_same_bytes_also_after_a_restart(tmp_path):
    nodes = nodes_of(SCHOOLS, PLAN, tmp_path)
    at = Wire(nodes)
    at.silent = lambda name, kind: kind == "finish"
    with pytest.raises(TimeoutError, match="does not answer"):
        fitted(at, PLAN, tmp_path, attempts=1)
    name, question, reply = [h for h in at.heard if isinstance(unpack(h[1])[0], Ask)][-1]
    assert at.nodes[name].handle(question) == reply
    again = Node(name, at.nodes[name].federation, PLAN, tmp_path / name)
    assert again.handle(question) == reply
    message, parts = unpack(question)
    other = pack(message.model_copy(update={"rate": 0.5}), **parts)
    refusal, _ = unpack(again.handle(other))
    assert isinstance(refusal, Refusal) and "answered once" in refusal.why


def test_what_was_not_accepted_is_forgotten(in_one_process, tmp_path):
    """A second attempt at a round finds the clients as they were."""
    node = nodes_of(SCHOOLS, PLAN, tmp_path, 1)[0]
    at = Wire([node])
    lost = {"count": 0}

    def swallow(reply):
        lost["count"] += 1
        return pack(Refusal(why="lost")) if lost["count"] in (2, 3) else reply

    at.changed = {("node0", "ask"): swallow}
    found = fitted(at, PLAN, tmp_path)
    same(found.params, in_one_process.params)
    assert lost["count"] == 5 and found.refused == {"node0": 2}


@pytest.mark.parametrize("when", [3, 5])
def test_all_that_are_killed_at_once_go_on(in_one_process, when, tmp_path):
    """Server and nodes, as in a power cut, at the nth exchange of messages."""

    class Killed(Exception):
        pass

    count = {"count": 0}

    def carrier():
        at = Wire(nodes_of(SCHOOLS, PLAN, tmp_path))

        def exchange(messages, wait):
            count["count"] += 1
            found = at.exchange(messages, wait)
            if count["count"] == when:
                raise Killed
            return found

        return Carrier(lambda: list(at.nodes), exchange)

    patience = Patience(("node0", "node1", "node2"), joining=1.0, seconds=1.0, attempts=2)
    with pytest.raises(Killed):
        run_server(carrier(), PLAN, patience, tmp_path / "s.safetensors")
    found = run_server(carrier(), PLAN, patience, tmp_path / "s.safetensors")
    same(found.params, in_one_process.params)


def test_a_question_that_comes_after_a_later_one_puts_nothing_back(in_one_process, tmp_path):
    """Flower may deliver a first attempt when the second has been answered, and taken by the server."""
    node = nodes_of(SCHOOLS, PLAN, tmp_path, 1)[0]
    at, first, stale = Wire([node]), [], []
    honest = at.exchange

    def exchange(messages, wait):
        asks = [p for b in messages.values() for p in split(b) if isinstance(unpack(p)[0], Ask)]
        if asks and not first:
            first.extend(asks)
            return {}  # it is under way for long
        found = honest(messages, wait)
        if asks and len(stale) < 2:
            stale.append(unpack(node.handle(first[0]))[0])
        return found

    at.exchange = exchange
    found = fitted(at, PLAN, tmp_path)
    same(found.params, in_one_process.params)
    assert found.refused == {"node0": 0}
    assert [type(reply) for reply in stale] == [Refusal, Refusal]
    assert "which was answered" in stale[0].why


@pytest.mark.parametrize("when", [1, 2, pytest.param(3, marks=pytest.mark.slow), 5])
def test_a_server_that_is_killed_goes_on(in_one_process, when, tmp_path):
    """At its nth exchange of messages: before or after what it has sent has arrived."""

    class Killed(Exception):
        pass

    nodes = nodes_of(SCHOOLS, PLAN, tmp_path)
    at, count = Wire(nodes), {"count": 0}
    whole = at.carrier

    def exchange(messages, wait):
        count["count"] += 1
        found = whole.exchange(messages, wait)
        if count["count"] == when:
            raise Killed
        return found

    patience = Patience(tuple(at.nodes), joining=1.0, seconds=5.0)
    with pytest.raises(Killed):
        run_server(Carrier(whole.reachable, exchange), PLAN, patience, tmp_path / "s.safetensors")
    found = run_server(whole, PLAN, patience, tmp_path / "s.safetensors")
    same(found.params, in_one_process.params)


def test_a_node_that_is_started_anew_after_each_message_changes_nothing(in_one_process, tmp_path):
    parts = divided(SCHOOLS, 3)

    def exchange(messages, wait):
        return {
            at: Node(at, parts[at], PLAN, tmp_path / at, EAGER).handle(payload)
            for at, payload in messages.items()
        }

    patience = Patience(tuple(parts), joining=1.0)
    found = run_server(
        Carrier(lambda: list(parts), exchange), PLAN, patience, tmp_path / "server.safetensors"
    )
    same(found.params, in_one_process.params)
