"""bayesfed between Flower's own processes: rounds, keys, certificates, and how a network ends."""

import json
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import xarray as xr

pytest.importorskip("flwr")

from flwr.supercore.task_identity import TaskIdentity

import bayesfed as bf
from bayesfed import datasets
from bayesfed.cli.deployment import make_plan
from bayesfed.cli.experiment import read_experiment
from docs import own_parts
from tests.deploy.flower_workers import workers
from tests.deploy.in_process import nodes_of
from tests.deploy.test_own_parts import listening
from tests.scripts import load

ROOT = Path(__file__).parents[2]
APP = ROOT / "bayesfed" / "deploy" / "flower_app"
net = load("experiments/deployment/network.py")


@pytest.fixture(autouse=True)
def identity(monkeypatch):
    """What Flower's processes are told when they start, and every message is signed with."""
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


INSTITUTIONS = ("north", "south", "west")
ECHO = '''
import json, time
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from bayesfed.deploy.transport import Wait
from bayesfed.deploy.flower import carrier

server_app = ServerApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Two rounds over all nodes, and what came back into a file."""
    config, server = context.run_config, carrier(grid)
    while len(nodes := list(server.reachable())) < config["nodes"]:
        time.sleep(0.1)
    rounds = []
    for word in ("first", "second"):
        found = server.exchange({node: word.encode() for node in nodes}, Wait(config["seconds"]))
        rounds.append(sorted(answer.decode() for answer in found.values()))
    with open(config["report"], "w") as file:
        json.dump(rounds, file)
'''


@pytest.fixture
def folder():
    """Short, as a Unix socket's path has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="bf") as name:
        yield Path(name)


def echo_app(folder):
    """The documentation's app, with a server that only sends words around."""
    app = folder / "echo"
    app.mkdir()
    given = (APP / "pyproject.toml").read_text()
    more = 'report = ""\nnodes = 3\nseconds = 60.0\n'
    (app / "pyproject.toml").write_text(
        given.replace("bayesfed.cli.flower_server:server_app", "echo:server_app") + more
    )
    (app / "echo.py").write_text(ECHO)
    return app


def named(name):
    return lambda message: message + b" " + name.encode()


@contextmanager
def named_workers(folder):
    with ExitStack() as stack:
        addresses = {node: str(folder / f"{node}.sock") for node in INSTITUTIONS}
        for node, address in addresses.items():
            stack.enter_context(workers(address, handle=named(node)))
        yield addresses


def left_over(folder, seconds=0.0):
    """Processes that were started with something in a folder, by their command lines, or none within some seconds."""
    deadline = time.monotonic() + seconds
    while (found := _started_with(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def _started_with(folder):
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            text = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
            if str(folder).encode() in text:
                found.append((process / "cmdline").read_text())
    return found


BOTH = [[f"{word} {node}" for node in INSTITUTIONS] for word in ("first", "second")]


@pytest.mark.slow
@pytest.mark.parametrize("tls", [False, True], ids=["insecure", "tls"])
def test_rounds_between_processes(folder, tls):
    app, report = echo_app(folder), folder / "report.json"
    with (
        named_workers(folder) as addresses,
        net.network(addresses, folder / "f", tls=tls) as flower,
    ):
        flower.run(app, report=str(report))
        assert json.loads(report.read_text()) == BOTH
        flower.stop("south", signal.SIGTERM)  # says goodbye: is no longer reachable
        flower.run(app, report=str(report), nodes=2)
        assert json.loads(report.read_text()) == [[a, c] for a, b, c in BOTH]
    assert left_over(folder, seconds=5) == []


OWN = """
[model]
name = "eight_schools"
[data]
client = "school"
[algorithm]
name = "mine.py:with_momentum"
[schedule]
rounds = 3
[deployment]
institutions = ["node0", "node1", "node2"]
"""


@pytest.mark.slow
def test_own_parts_in_a_file_between_flowers_processes(folder):
    """The server's process imports the file beside its experiment; each node has imported its own copy."""
    for place in ("server", "nodes"):
        (folder / place).mkdir()
        (folder / place / "mine.py").write_text(Path(own_parts.__file__).read_text())
        (folder / place / "own.toml").write_text(OWN)
    schools = datasets.eight_schools()
    plan = make_plan(read_experiment(folder / "nodes" / "own.toml"), folder / "nodes")
    assert type(plan.algorithm.rule).__module__ == "mine"
    try:
        with ExitStack() as stack:
            addresses = {
                node.name: stack.enter_context(listening(node.handle))
                for node in nodes_of(schools, plan, folder)
            }
            over = stack.enter_context(net.network(addresses, folder / "f", tls=False))
            where = {"experiment": folder / "server" / "own.toml", "folder": folder / "found"}
            over.run(APP, **{name: str(path) for name, path in where.items()})
        expected = bf.fit(plan.model, schools, plan.algorithm, rounds=plan.rounds)
    finally:
        sys.modules.pop("mine", None)
    globals_ = xr.open_dataset(folder / "found" / "globals.nc", group="posterior")
    draws = expected.sample(1)
    for name in ("mu", "tau"):
        assert float(globals_[name][0, 0]) == pytest.approx(float(draws[name][0]), abs=1e-4)


@pytest.mark.slow
def test_nobody_gets_in_without_a_key_or_with_a_wrong_certificate(folder):
    """The SuperLink turns away keys that were not registered, and a node a SuperLink of another authority."""
    with net.network({}, folder / "f", tls=True) as flower:
        other = folder / "other"
        other.mkdir()
        net.write_certificates(other)
        known, theirs = flower.folder, flower.port
        unknown = net.write_key(folder, "unknown")
        strangers = {
            "keyless": (known, None, True, "All SuperNodes must be registered"),
            "unknown": (known, unknown, True, "[code: 2004] Failed to activate SuperNode"),
            "misled": (other, unknown, True, "CERTIFICATE_VERIFY_FAILED"),
            "plain": (known, None, False, "Connection attempt failed"),
        }
        for name, (certificates, key, tls, _) in strangers.items():
            flower.commands[name] = net.supernode_command(certificates, theirs, "/a.sock", key, tls)
            flower.start(name)
        for name, (*_, said) in strangers.items():
            flower.await_line(name, said)
            assert "SuperNode ID:" not in flower.log(name), name
        listed = json.loads(flower.flwr("supernode", "list", net.CONNECTION, "--format", "json"))
        assert listed["success"] and listed["nodes"] == []


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_network_ends_with_whoever_started_it(folder, how):
    program = (
        "import signal, sys, time; from pathlib import Path\n"
        "import network\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored by what runs behind a shell
        f"with network.network({{'north': '/a.sock'}}, Path({str(folder / 'f')!r}), tls=False):\n"
        "    print('up', flush=True)\n"
        "    time.sleep(100)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=ROOT / "experiments" / "deployment",
    ) as started:
        assert started.stdout.readline() == b"up\n"
        assert len(left_over(folder)) >= 4  # SuperLink, SuperNode, and what each starts
        started.send_signal(how)
        started.wait(20)
    assert left_over(folder, seconds=15) == []


@pytest.mark.slow
def test_rounds_in_a_simulation(folder):
    """The workers are named in the run's configuration, in the order of the partitions."""
    pytest.importorskip("ray")
    app, report = echo_app(folder), folder / "report.json"
    with named_workers(folder) as addresses, net.simulation(folder / "f") as flower:
        flower.run(app, supernodes=3, report=str(report), sockets=" ".join(addresses.values()))
        assert json.loads(report.read_text()) == BOTH
    assert left_over(folder, seconds=15) == []
