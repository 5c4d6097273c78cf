"""How long do whole fits take between Flower's processes on this machine, with TLS and keys? Makes totals.md.

    python experiments/deployment/totals.py

Three institutions' workers, a SuperLink and three SuperNodes. The demonstration's model is fitted until it has
converged, a network to digits by FedAvg and FedABML, ten rounds each. Seconds are from ``flwr run`` to its end, with
the start of the ServerApp and all before and after the rounds; beside them those of the same fit in one process.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from institutions import NAMES, SITE, runner, sockets, workers, write
from network import network

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.cli.flower_server import APP

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
sites = ["east", "midwest", "west"]
seconds = 120
"""


def demo(folder: Path) -> Callable[[], Any]:
    """Write the demonstration's files, and return its fit in one process."""
    write(folder)
    return lambda: bf.fit(models.varying_slope, datasets.grunfeld())


def digits(algorithm: str) -> Callable[[Path], Callable[[], Any]]:
    """Return what writes nine clients at three institutions, and gives the fit in one process."""

    def write_digits(folder: Path) -> Callable[[], Any]:
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
            (folder / f"{name}.toml").write_text(SITE.format(name=name))
        model = models.Network(models.mlp(64, 10))
        method = getattr(bf, algorithm)()
        return lambda: bf.fit(model, train, method, rounds=ROUNDS, batch_size=10)

    return write_digits


def over_flower(folder: Path) -> float:
    """Return the seconds of `flwr run`."""
    with workers(folder), network(sockets(folder), folder / "flower", tls=True) as made:
        begin = time.monotonic()
        made.run(APP, experiment=str(folder / "experiment.toml"), seconds=2400.0)
        return time.monotonic() - begin


def upload(folder: Path) -> float:
    """Return the kilobytes that an institution sends in a round."""
    lines = (folder / "east" / "log.jsonl").read_text().splitlines()
    sent = [json.loads(line) for line in lines]
    sizes = [line["bytes"] for line in sent if line.get("message", {}).get("kind") == "reply"]
    return statistics.median(sizes) / 1e3


CASES = {
    "network of 650 weights, FedAvg": digits("FedAvg"),
    "network of 650 weights, FedABML": digits("FedABML"),
    "varying_slope, SFVI until converged": demo,
}


def measure(case: str) -> list[str]:
    """Fit over Flower and in one process."""
    with tempfile.TemporaryDirectory(prefix="bf") as name:
        folder = Path(name) / "run"
        alone = CASES[case](folder)
        seconds = over_flower(folder)
        history = pd.read_csv(folder / "runs" / "experiment" / "history.csv")
        kilobytes = upload(folder)
    begin = time.monotonic()
    here = alone()
    return [
        f"{len(history)} / {len(here.history['elbo'])}",
        f"{history['seconds'].median():.1f}",
        f"{seconds:.0f}",
        f"{time.monotonic() - begin:.1f}",
        f"{kilobytes:.1f}",
        f"{os.getloadavg()[1]:.0f}",
    ]


def main() -> None:
    columns = (
        "fit | rounds, Flower / one process | median seconds a round | seconds in all "
        "| seconds in one process | kB an institution sends a round | load"
    )
    runner.table(columns, list(CASES), measure, runner.arguments(__doc__))


if __name__ == "__main__":
    main()
