"""How long whole fits take between Flower's processes on this machine, with TLS and keys: makes totals.md.

    python experiments/deployment/totals.py

Three nodes, a SuperLink and three SuperNodes. The demonstration's model is fitted until it has converged, a
network to digits by FedAvg and FedABML, ten rounds each. Seconds are from ``flwr run`` to its end, with the start of
the ServerApp and what comes before and after the rounds; beside them those of the same fit in one process.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.cli.flower_server import APP

sys.path.insert(0, str(Path(__file__).parent))
from institutions import NAMES, NODE_FILE, written
from network import network

HERE = Path(__file__).parent
ROUNDS = 10
MODEL = "from bayesfed import models\n\nnetwork = models.Network(models.mlp(64, 10))\n"
EXPERIMENT = """[model]
name = "model.py:network"

[data]
client = "writer"
fields = {{ x = [{columns}], y = "y" }}

[algorithm]
name = "{algorithm}"

[schedule]
rounds = {rounds}
batch_size = 10

[deployment]
institutions = ["east", "midwest", "west"]
seconds = 120
"""


def demo(folder: Path) -> Callable[[], Any]:
    """The demonstration's nodes, and its fit in one process."""
    written(folder)
    return lambda: bf.fit(models.varying_slope, datasets.grunfeld())


def digits(algorithm: str) -> Callable[[Path], Callable[[], Any]]:
    """Nine clients at three nodes, and the fit in one process."""

    def write(folder: Path) -> Callable[[], Any]:
        folder.mkdir(parents=True)
        train, _ = datasets.digits(clients=9)
        columns = [f"x{i}" for i in range(64)]
        quoted = ", ".join(f'"{name}"' for name in columns)
        (folder / "model.py").write_text(MODEL)
        text = EXPERIMENT.format(columns=quoted, algorithm=algorithm, rounds=ROUNDS)
        (folder / "experiment.toml").write_text(text)
        for name, (a, b) in zip(NAMES, pairwise((0, 3, 6, 9)), strict=True):
            part = train.select(train.names[a:b])
            frame = pd.DataFrame(part["x"].reshape(part.rows, -1).numpy(), columns=columns)
            frame["y"] = part["y"].numpy()
            frame["writer"] = np.repeat(np.array(part.names), part.lengths.numpy())
            frame.to_csv(folder / f"{name}.csv", index=False)
            (folder / f"{name}.toml").write_text(NODE_FILE.format(name=name))
        model = models.Network(models.mlp(64, 10))
        method = getattr(bf, algorithm)()
        return lambda: bf.fit(model, train, method, rounds=ROUNDS, batch_size=10)

    return write


def over_flower(folder: Path) -> float:
    """Seconds of `flwr run`."""
    command = [sys.executable, "-m", "bayesfed.cli.app", "node"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen([*command, f"{name}.toml"], cwd=folder, env=environment) for name in NAMES
    ]
    try:
        while not all((folder / f"{name}.sock").exists() for name in NAMES):
            time.sleep(0.2)
        sockets = {name: str(folder / f"{name}.sock") for name in NAMES}
        with network(sockets, folder / "flower", tls=True) as made:
            begin = time.monotonic()
            made.run(APP, experiment=str(folder / "experiment.toml"), seconds=2400.0)
            return time.monotonic() - begin
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def upload(folder: Path) -> float:
    """Kilobytes that a node sends in a round."""
    lines = (folder / "east" / "log.jsonl").read_text().splitlines()
    sent = [json.loads(line) for line in lines]
    sizes = [line["bytes"] for line in sent if line.get("message", {}).get("kind") == "reply"]
    return statistics.median(sizes) / 1e3


CASES = {
    "network of 650 weights, FedAvg": digits("FedAvg"),
    "network of 650 weights, FedABML": digits("FedABML"),
    "varying_slope, SFVI until converged": demo,
}


def row(case: str) -> str:
    """A row of the table."""
    with tempfile.TemporaryDirectory(prefix="bf") as name:
        folder = Path(name) / "run"
        alone = CASES[case](folder)
        seconds = over_flower(folder)
        history = pd.read_csv(folder / "runs" / "experiment" / "history.csv")
        kilobytes = upload(folder)
    begin = time.monotonic()
    here = alone()
    cells = [
        f"{len(history)} / {len(here.history['elbo'])}",
        f"{history['seconds'].median():.1f}",
        f"{seconds:.0f}",
        f"{time.monotonic() - begin:.1f}",
        f"{kilobytes:.1f}",
        f"{os.getloadavg()[1]:.0f}",
    ]
    return f"| {case} | {' | '.join(cells)} |"


def main() -> None:
    """Print the table and write it."""
    heads = [
        "",
        "rounds, Flower / one process",
        "median seconds a round",
        "seconds in all",
        "seconds in one process",
        "kB a node sends a round",
        "load",
    ]
    lines = ["| " + " | ".join(heads) + " |", "| --- " * len(heads) + "|"]
    for case in CASES:
        lines.append(row(case))
        print(lines[-1], flush=True)
        (HERE / "totals.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
