"""bayesfed as a Flower app: what its client forwards, what its server makes of what comes back, and who gets in."""

import importlib.util
import queue
import subprocess
import sys
import threading
import time
import types
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Context, Error, Message, RecordDict

from bayesfed.deploy import flower
from bayesfed.deploy.sockets import serve

ROOT = Path(__file__).parents[2]
APP = ROOT / "docs" / "deployment" / "flower_app"
SPEC = importlib.util.spec_from_file_location(
    "deployment_network", ROOT / "experiments" / "deployment" / "network.py"
)
net = importlib.util.module_from_spec(SPEC)
sys.modules["deployment_network"] = net  # dataclasses look their module up
SPEC.loader.exec_module(net)


@contextmanager
def workers(*addresses, handle=bytes.upper):
    stop, ready = threading.Event(), queue.Queue()
    threads = [
        threading.Thread(
            target=serve, args=(address, handle), kwargs={"ready": ready.put, "stop": stop}
        )
        for address in addresses
    ]
    for thread in threads:
        thread.start()
    try:
        yield [ready.get(timeout=5) for _ in threads]
    finally:
        stop.set()
        for thread in threads:
            thread.join(5)


def context(node, run=None):
    return Context(1, 2, node, RecordDict(), run or {}, 3)


def asked(payload, ttl=5.0):
    content = RecordDict({"bayesfed": ConfigRecord({"payload": payload})})
    message = Message(content, 7, "query", ttl=ttl)
    message.metadata.__dict__["_message_id"] = "asked"
    return message


class FakeGrid:
    """What Flower's Grid does with messages, without its processes.

    ``late`` says how many pulls a node's answer takes; a node that is not in it never answers.
    """

    def __init__(self, app, contexts, late):
        self.app, self.contexts, self.late = app, contexts, dict(late)
        self.sent, self.pulls = {}, 0

    def get_node_ids(self):
        return list(self.contexts)

    def push_messages(self, messages):
        names = []
        for message in messages:
            known = message.metadata.dst_node_id in self.contexts
            names.append(f"m{len(self.sent)}" if known else None)
            if known:
                message.metadata.__dict__["_message_id"] = names[-1]
                self.sent[names[-1]] = message
        return names

    def pull_messages(self, names):
        self.pulls += 1
        ready = [
            n for n in names if self.late.get(self.sent[n].metadata.dst_node_id, 99) < self.pulls
        ]
        return [self.answer(self.sent[name]) for name in ready]

    def answer(self, message):
        try:
            return self.app(message, self.contexts[message.metadata.dst_node_id])
        except Exception as error:
            return Message(Error(1, f"{type(error).__name__}: {error}"), reply_to=message)


def test_the_client_hands_the_message_to_its_worker_and_returns_the_answer(tmp_path):
    with workers(str(tmp_path / "worker.sock")) as (address,):
        reply = flower.client_app(asked(b"hello"), context({"socket": address}))
    assert reply.content["bayesfed"]["payload"] == b"HELLO"
    assert reply.metadata.reply_to_message_id == "asked"


def test_the_client_waits_as_long_as_the_server_does(tmp_path):
    def slow(message):
        time.sleep(1.0)
        return message

    address = str(tmp_path / "worker.sock")
    with (
        workers(address, handle=slow),
        pytest.raises(TimeoutError, match=f"{address} did not answer within 0.2 s"),
    ):
        flower.client_app(asked(b"hello", ttl=0.2), context({"socket": address}))


def test_in_a_simulation_the_partition_names_the_worker():
    run = {"sockets": "/a.sock  /b.sock"}
    assert flower.worker(context({"partition-id": 1, "num-partitions": 2}, run)) == "/b.sock"
    with pytest.raises(ValueError, match="2 addresses in sockets for node 3 of 4"):
        flower.worker(context({"partition-id": 2, "num-partitions": 4}, run))


def test_the_run_cannot_name_a_sites_socket():
    """Who starts a run is not who owns a site's machine: only the node's own configuration is heard there."""
    run = {"sockets": "/run/docker.sock"}
    assert flower.worker(context({"socket": "/a.sock", "partition-id": 0}, run)) == "/a.sock"
    with pytest.raises(
        ValueError, match="no worker's address: start the SuperNode with --node-config"
    ):
        flower.worker(context({}, run))


@pytest.mark.parametrize(
    "content",
    [
        RecordDict(),
        RecordDict({"other": ConfigRecord({"payload": b""})}),
        RecordDict({"bayesfed": ConfigRecord({"other": b""})}),
        RecordDict({"bayesfed": ConfigRecord({"payload": "text"})}),
    ],
)
def test_messages_of_others_reach_no_worker(content):
    message = Message(content, 7, "query")
    with pytest.raises(ValueError, match="not of bayesfed's server"):
        flower.client_app(message, context({"socket": "/none.sock"}))


def test_a_round_over_flower(tmp_path, caplog):
    """Of five nodes one answers at once, one later, one has lost its worker, one is silent, one is gone."""
    with workers(str(tmp_path / "a.sock"), str(tmp_path / "b.sock")):
        contexts = {
            node: context({"socket": str(tmp_path / f"{name}.sock")})
            for node, name in zip((11, 12, 13, 14), "abcd", strict=True)
        }
        grid = FakeGrid(flower.client_app, contexts, {11: 0, 12: 2, 13: 0})
        sites = flower.carrier(grid)
        assert list(sites.reachable()) == ["11", "12", "13", "14"]
        messages = {str(node): f"to {node}".encode() for node in (11, 12, 13, 14, 15)}
        begun = time.monotonic()
        assert sites.exchange(messages, 0.6) == {"11": b"TO 11", "12": b"TO 12"}
        assert 0.5 < time.monotonic() - begun < 1.0
    assert "node 13: ConnectionError" in caplog.text and "c.sock" in caplog.text
    assert "node 14: no answer within 0.6 s" in caplog.text
    assert "node 15: Flower knows it no longer" in caplog.text


def test_a_round_that_is_answered_waits_for_nobody(tmp_path):
    with workers(str(tmp_path / "a.sock")) as (address,):
        grid = FakeGrid(flower.client_app, {11: context({"socket": address})}, {11: 0})
        begun = time.monotonic()
        assert flower.carrier(grid).exchange({"11": b"a"}, 60.0) == {"11": b"A"}
        assert flower.carrier(grid).exchange({}, 60.0) == {}
        assert time.monotonic() - begun < 0.4


def test_an_answer_of_another_app_is_none(caplog):
    def other(message, context):
        return Message(RecordDict(), reply_to=message)

    grid = FakeGrid(other, {11: context({})}, {11: 0})
    assert flower.carrier(grid).exchange({"11": b""}, 1.0) == {}
    assert "node 11: its answer is not of bayesfed's client" in caplog.text


def test_the_server_app_runs_the_run(monkeypatch):
    seen = []
    server = types.ModuleType("bayesfed.deploy.server")
    server.serve_run = lambda carrier, config: seen.append((carrier.reachable(), config))
    monkeypatch.setitem(sys.modules, "bayesfed.deploy.server", server)
    flower.server_app(FakeGrid(None, {11: None}, {}), context({}, {"experiment": "a.toml"}))
    assert seen == [(["11"], {"experiment": "a.toml"})]


def test_flower_takes_the_app():
    """What `flwr run` checks before it sends the app: its fields, and that its components are there."""
    from flwr.cli.build import build_fab_from_disk
    from flwr.cli.config_utils import load_and_validate

    config, warnings = load_and_validate(APP / "pyproject.toml")
    assert warnings == []
    assert config["project"]["dependencies"] == []
    assert len(build_fab_from_disk(APP)) < 10_000


def test_a_clients_process_imports_no_torch():
    program = (
        "import sys, bayesfed.deploy.flower\n"
        "print([name for name in ('torch', 'pyro', 'pydantic', 'pandas') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "[]\n", done.stderr
