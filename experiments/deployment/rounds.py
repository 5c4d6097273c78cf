"""How long does a round take between Flower's processes on this machine? Makes rounds.md.

    python experiments/deployment/rounds.py

The apps compute nothing. "Flower's own" is Flower's empty app: ``Grid.send_and_receive``, and a ClientApp that returns
its message. "bayesfed's" is :func:`bayesfed.deploy.flower.carrier`, and :data:`bayesfed.deploy.flower.client_app`
before workers that return their message. A round is from the first push to the last answer. Institutions on one machine
share its cores, and a round starts a process at each: one alone waits as long as one on a machine of its own.
"""

import contextlib
import json
import queue
import statistics
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from institutions import runner
from network import network

from bayesfed.deploy.sockets import serve

MEGABYTE = 10**6

PYPROJECT = """
[project]
name = "{name}"
version = "0.1.0"
description = "nothing, measured"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "bayesfed"

[tool.flwr.app.components]
serverapp = "measured:{name}_server"
clientapp = "{client}"

[tool.flwr.app.config]
rounds = 5
nodes = 3
size = 0
report = ""
"""

MEASURED = """
import json, os, time
from flwr.app import ArrayRecord, Array, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

empty_client = ClientApp()
empty_server = ServerApp()
array_server = ServerApp()
bayesfed_server = ServerApp()


@empty_client.train()
def train(message: Message, context: Context) -> Message:
    return Message(message.content, reply_to=message)


def timed(grid, context, exchange):
    config, seconds = context.run_config, []
    while len(nodes := list(grid.get_node_ids())) < config["nodes"]:
        time.sleep(0.1)
    for _ in range(config["rounds"]):
        payload = os.urandom(config["size"])
        begin = time.monotonic()
        answers = exchange(nodes, payload)
        assert answers == [payload] * len(nodes), [len(answer or b"") for answer in answers]
        seconds.append(time.monotonic() - begin)
    with open(config["report"], "w") as file:
        json.dump(seconds, file)


def sent_and_received(grid, record, read):
    def exchange(nodes, payload):
        content = RecordDict({"payload": record(payload)})
        messages = [Message(content, node, "train") for node in nodes]
        return [read(reply.content["payload"]) for reply in grid.send_and_receive(messages)]

    return exchange


@empty_server.main()
def main(grid: Grid, context: Context) -> None:
    timed(grid, context, sent_and_received(grid, lambda p: ConfigRecord({"p": p}), lambda r: r["p"]))


@array_server.main()
def main(grid: Grid, context: Context) -> None:
    array = lambda p: ArrayRecord({"p": Array("uint8", (len(p),), "bytes", p)})
    timed(grid, context, sent_and_received(grid, array, lambda r: r["p"].data))


@bayesfed_server.main()
def main(grid: Grid, context: Context) -> None:
    from bayesfed.deploy.transport import Wait
    from bayesfed.deploy.flower import carrier

    made = carrier(grid)

    def exchange(nodes, payload):
        found = made.exchange({str(node): payload for node in nodes}, Wait(120.0))
        return [found.get(str(node)) for node in nodes]

    timed(grid, context, exchange)
"""

APPS = {
    "empty": "measured:empty_client",
    "array": "measured:empty_client",
    "bayesfed": "bayesfed.deploy.flower:client_app",
}


def write_app(folder: Path, name: str) -> Path:
    """Write an app that `flwr run` takes, and return its folder."""
    app = folder / name
    app.mkdir(exist_ok=True)
    (app / "pyproject.toml").write_text(PYPROJECT.format(name=name, client=APPS[name]))
    (app / "measured.py").write_text(MEASURED)
    return app


@contextlib.contextmanager
def echoes(folder: Path, sites: int) -> Iterator[dict[str, str]]:
    """Start workers that return their message, and give their addresses by name."""
    stop, ready = threading.Event(), queue.Queue[str]()
    addresses = {f"site-{i}": str(folder / f"{i}.sock") for i in range(sites)}
    threads = [
        threading.Thread(
            target=serve, args=(address, bytes), kwargs={"ready": ready.put, "stop": stop}
        )
        for address in addresses.values()
    ]
    for thread in threads:
        thread.start()
    for _ in threads:
        ready.get(timeout=10)
    try:
        yield addresses
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def measure(sites: int, tls: bool, app: str, size: int, rounds: int) -> list[str]:
    """Time rounds of an app."""
    with tempfile.TemporaryDirectory(prefix="bf") as name:
        folder = Path(name)
        report = folder / "report.json"
        given = {"rounds": rounds, "nodes": sites, "size": size, "report": str(report)}
        with (
            echoes(folder, sites) as addresses,
            network(addresses, folder / "flower", tls=tls) as flower,
        ):
            flower.run(write_app(folder, app), **given)
        seconds = json.loads(report.read_text())
    return [f"{s:.1f}" for s in (statistics.median(seconds), min(seconds), max(seconds))]


NAMES = {
    "empty": "Flower's own, a ConfigRecord",
    "array": "Flower's own, an ArrayRecord",
    "bayesfed": "bayesfed's",
}


def main() -> None:
    given, rows = runner.arguments(__doc__, rounds=5), {}
    small = [("empty", 0), ("bayesfed", 0), ("bayesfed", MEGABYTE)]
    large = [(app, 50 * MEGABYTE) for app in APPS]
    for sites, tls in ((1, False), (1, True), (3, False), (3, True)):
        for app, size in small + (large if (sites, tls) == (1, False) else []):
            key = sites, "yes" if tls else "no", NAMES[app], size // MEGABYTE
            rows[key] = [(sites, tls, app, size, given.rounds)]
    columns = "sites | TLS and keys | app | MB a message | median seconds a round | least | most"
    runner.table(columns, rows, measure, given)


if __name__ == "__main__":
    main()
