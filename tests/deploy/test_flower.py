"""bayesfed as a Flower app: what its client forwards, what its server makes of what comes back, and who gets in."""

import queue
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.deploy import flower
from bayesfed.deploy.institutions import Patience
from bayesfed.deploy.plan import DeploymentPlan
from bayesfed.deploy.server import run_server
from bayesfed.deploy.sockets import serve
from bayesfed.deploy.transport import Wait
from docs import own_parts
from tests.deploy.flower_workers import workers
from tests.deploy.in_process import nodes_of
from tests.deploy.test_own_parts import listening

ROOT = Path(__file__).parents[2]
APP = ROOT / "bayesfed" / "deploy" / "flower_app"


@pytest.fixture(autouse=True)
def identity(monkeypatch):
    """What Flower's processes are told when they start, and every message is signed with."""
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


def context(node, run=None):
    return Context(1, 2, node, RecordDict(), run or {}, 3)


def asked(payload, ttl=5.0):
    array = Array("uint8", (len(payload),), "bytes", payload)
    content = RecordDict({"bayesfed": ArrayRecord({"payload": array})})
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
    assert reply.content["bayesfed"]["payload"].data == b"HELLO"
    assert reply.metadata.reply_to_message_id == "asked"


@pytest.mark.parametrize("size", [0, 1, 12_000_000])
def test_flower_carries_any_bytes(size):
    """Through what Flower makes of a message between processes, of which an array of 12 MB has three pieces."""
    sent = flower._content(payload := bytes(range(256)) * (size // 256) + b"x" * (size % 256))
    objects = get_all_nested_objects(sent)
    contents = {name: part.deflate() for name, part in objects.items()}
    assert max(map(len, contents.values())) < 6_000_000
    assert flower._payload(inflate_object_from_contents(sent.object_id, contents)) == payload


def test_the_client_asks_no_question_of_the_nodes_own_people(tmp_path):
    """Not even where the node has named the wrong socket, whatever the message is."""
    own, ready, stop, asked_there = str(tmp_path / "own.sock"), queue.Queue(), threading.Event(), []
    thread = threading.Thread(
        target=serve,
        args=(str(tmp_path / "worker.sock"), bytes.upper),
        kwargs={"local": (own, asked_there.append), "ready": ready.put, "stop": stop},
    )
    thread.start()
    ready.get(timeout=5)
    try:
        for payload in (b"hello", b'{"rows":"ward,x\\na,1"}', bytes([128, *[0] * 7, 1])):
            with pytest.raises(ConnectionError, match="own.sock"):
                flower.client_app(asked(payload), context({"socket": own}))
    finally:
        stop.set()
        thread.join(5)
    assert asked_there == []


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
    assert flower.node_address(context({"partition-id": 1, "num-partitions": 2}, run)) == "/b.sock"
    with pytest.raises(ValueError, match="2 addresses in sockets for node 3 of 4"):
        flower.node_address(context({"partition-id": 2, "num-partitions": 4}, run))


def test_the_run_cannot_name_a_nodes_socket():
    """Who starts a run is not who owns a node's machine: only the node's own configuration is heard there."""
    run = {"sockets": "/run/docker.sock"}
    assert flower.node_address(context({"socket": "/a.sock", "partition-id": 0}, run)) == "/a.sock"
    with pytest.raises(
        ValueError, match="no node's address: start the SuperNode with --node-config"
    ):
        flower.node_address(context({}, run))


@pytest.mark.parametrize(
    "content",
    [
        RecordDict(),
        RecordDict({"other": ArrayRecord({"payload": Array("uint8", (0,), "bytes", b"")})}),
        RecordDict({"bayesfed": ArrayRecord({"other": Array("uint8", (0,), "bytes", b"")})}),
        RecordDict({"bayesfed": ConfigRecord({"payload": b"text"})}),
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
        nodes = flower.carrier(grid)
        assert list(nodes.reachable()) == ["11", "12", "13", "14"]
        messages = {str(node): f"to {node}".encode() for node in (11, 12, 13, 14, 15)}
        begun = time.monotonic()
        assert nodes.exchange(messages, Wait(0.6)) == {"11": b"TO 11", "12": b"TO 12"}
        assert 0.5 < time.monotonic() - begun < 1.0
    assert "node 13: ConnectionError" in caplog.text and "c.sock" in caplog.text
    assert "node 14: no answer within 0.6 s" in caplog.text
    assert "node 15: Flower does not list it any more" in caplog.text


def test_a_round_that_is_answered_waits_for_nobody(tmp_path):
    with workers(str(tmp_path / "a.sock")) as (address,):
        grid = FakeGrid(flower.client_app, {11: context({"socket": address})}, {11: 0})
        begun = time.monotonic()
        assert flower.carrier(grid).exchange({"11": b"a"}, Wait(60.0)) == {"11": b"A"}
        assert flower.carrier(grid).exchange({}, Wait(60.0)) == {}
        assert time.monotonic() - begun < 0.4


def test_a_round_that_has_enough_goes_on_and_the_rest_comes_later(tmp_path):
    with workers(str(tmp_path / "a.sock"), str(tmp_path / "b.sock")) as addresses:
        contexts = {
            node: context({"socket": address})
            for node, address in zip((11, 12), addresses, strict=True)
        }
        nodes = flower.carrier(FakeGrid(flower.client_app, contexts, {11: 0, 12: 3}))
        messages = {"11": b"a", "12": b"b"}
        assert nodes.exchange(messages, Wait(60.0, enough=1, stale_seconds=60.0)) == {"11": b"A"}
        found = {}
        while "12" not in found:
            found = nodes.exchange({"11": b"c"}, Wait(60.0))
        assert found == {"11": b"C", "12": b"B"}


def test_an_answer_of_another_app_is_none(caplog):
    def other(message, context):
        return Message(RecordDict(), reply_to=message)

    grid = FakeGrid(other, {11: context({})}, {11: 0})
    assert flower.carrier(grid).exchange({"11": b""}, Wait(1.0)) == {}
    assert "node 11: its answer is not of bayesfed's client" in caplog.text


def test_the_server_app_runs_the_experiment(monkeypatch):
    from bayesfed.cli import flower_server as server

    seen = []
    monkeypatch.setattr(server, "run_file", lambda *given: seen.append(given))
    grid, run = FakeGrid(None, {11: None}, {}), {"experiment": "/srv/a.toml", "folder": ""}
    server.server_app(grid, context({}, run))
    server.server_app(grid, context({}, run | {"folder": "/srv/runs/a"}))
    assert seen[0][0].reachable() == ["11"] and seen[0][1:] == (Path("/srv/a.toml"), None)
    assert seen[1][1:] == (Path("/srv/a.toml"), Path("/srv/runs/a"))
    with pytest.raises(ValueError, match="experiment is missing"):
        server.server_app(FakeGrid(None, {}, {}), context({}, {"experiment": ""}))


def test_results_are_in_the_working_directory_as_those_of_all_runs(tmp_path, monkeypatch):
    from bayesfed.cli import flower_server as server

    commands, result = [], tmp_path / "runs" / "a" / "summary.csv"

    def flwr(command, check):
        commands.append(command)
        result.parent.mkdir(parents=True)
        result.write_text("")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(server.subprocess, "run", flwr)
    server.run_over_flower(Path("study/a.toml"), Path("runs/a"), "local")
    given = f'experiment="{tmp_path}/study/a.toml" folder="{tmp_path}/runs/a"'
    assert commands[0][-2:] == ["--run-config", given]


@pytest.mark.parametrize(
    "algorithm", [own_parts.adam, own_parts.with_momentum()], ids=["FedAdam", "TrimmedMean"]
)
def test_own_parts_over_flowers_messages_are_the_fit_in_one_process(algorithm, tmp_path):
    schools = datasets.eight_schools()
    plan = DeploymentPlan(models.eight_schools, algorithm, rounds=3)
    nodes = nodes_of(schools, plan, tmp_path)
    with ExitStack() as stack:
        contexts = {
            11 + i: context({"socket": stack.enter_context(listening(node.handle))})
            for i, node in enumerate(nodes)
        }
        grid = FakeGrid(flower.client_app, contexts, dict.fromkeys(contexts, 0))
        patience = Patience(tuple(node.name for node in nodes), joining=10.0, seconds=60.0)
        found = run_server(flower.carrier(grid), plan, patience, tmp_path / "server.safetensors")
    expected = bf.fit(plan.model, schools, algorithm, rounds=plan.rounds)
    for name, value in expected.params.items():
        torch.testing.assert_close(found.params[name], value, rtol=1e-5, atol=1e-5)
    for node in nodes:
        stored = next((node.folder / "runs").glob("*/posterior.safetensors"))
        own = bf.Posterior.load(stored, plan.model, node.federation)
        assert own.algorithm == algorithm
        here = expected.log_likelihood(node.federation, 1)["y"]
        there = own.log_likelihood(node.federation, 1)["y"]
        torch.testing.assert_close(there, here, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # Flower 1.41's own
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
