"""How long a round takes between Flower's processes on this machine, of apps that compute nothing.

    python experiments/deployment/rounds.py [ROUNDS]     writes rounds.md

Three sites. "Flower's own" is Flower's empty app: ``Grid.send_and_receive``, and a ClientApp that returns its message.
"bayesfed's" is :func:`bayesfed.deploy.flower.carrier`, and :data:`bayesfed.deploy.flower.client_app` before workers
that stay and return their message. A round is from the first push to the last answer.
"""

import contextlib
import json
import queue
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from network import network

from bayesfed.deploy.sockets import serve

SITES = ("north", "south", "west")
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
    while len(nodes := list(grid.get_node_ids())) < 3:
        time.sleep(0.1)
    for _ in range(config["rounds"]):
        payload = os.urandom(config["size"])
        begun = time.monotonic()
        answers = exchange(nodes, payload)
        assert answers == [payload] * 3, [len(answer or b"") for answer in answers]
        seconds.append(time.monotonic() - begun)
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
    from bayesfed.deploy.flower import carrier

    made = carrier(grid)

    def exchange(nodes, payload):
        found = made.exchange({str(node): payload for node in nodes}, 120.0)
        return [found.get(str(node)) for node in nodes]

    timed(grid, context, exchange)
"""

APPS = {
    "empty": "measured:empty_client",
    "array": "measured:empty_client",
    "bayesfed": "bayesfed.deploy.flower:client_app",
}


def write_app(folder: Path, name: str) -> Path:
    """A folder that `flwr run` takes."""
    app = folder / name
    app.mkdir(exist_ok=True)
    (app / "pyproject.toml").write_text(PYPROJECT.format(name=name, client=APPS[name]))
    (app / "measured.py").write_text(MEASURED)
    return app


@contextlib.contextmanager
def echoes(folder: Path) -> Iterator[dict[str, str]]:
    """Workers that return their message: their addresses by site."""
    stop, ready = threading.Event(), queue.Queue[str]()
    addresses = {site: str(folder / f"{site}.sock") for site in SITES}
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


def measured(tls: bool, cases: list[tuple[str, int]], rounds: int) -> Iterator[list[float]]:
    """Seconds of each round of each case."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with echoes(folder) as addresses, network(addresses, folder / "flower", tls=tls) as flower:
            for app, size in cases:
                report = folder / "report.json"
                flower.run(write_app(folder, app), rounds=rounds, size=size, report=str(report))
                yield json.loads(report.read_text())


def main(rounds: int) -> None:
    """Measure, print as it goes, and write rounds.md."""
    cases = [("empty", 0), ("bayesfed", 0), ("bayesfed", MEGABYTE), ("bayesfed", 50 * MEGABYTE)]
    cases += [("empty", 50 * MEGABYTE), ("array", 50 * MEGABYTE)]
    for tls in (False, True):
        for (app, size), seconds in zip(cases, measured(tls, cases, rounds), strict=True):
            print(
                tls,
                app,
                size,
                [round(s, 2) for s in seconds],
                statistics.median(seconds),
                flush=True,
            )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
