"""A fit between processes, one of which is killed: python experiments/deployment/demo.py, or make deployment.

A SuperLink and three SuperNodes with TLS and keys of their own, and three institutions' workers, all on this machine.
The model of experiments/grunfeld.toml is fitted; after a few rounds the worker in the midwest is killed and started
again. In the end θ is compared with that of the fit in one process, where the data are in one place. About five
minutes, most of which are Flower's, which starts a process for every message.
"""

from __future__ import annotations

import subprocess
import tempfile
import threading
import time
from pathlib import Path

import pandas as pd
from institutions import sockets, start_worker, workers, write
from network import network

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.cli.flower_server import APP

KILLED, AFTER = "midwest", 3


def rounds(folder: Path) -> int:
    """Return how many rounds are done."""
    history = folder / "runs" / "experiment" / "history.csv"
    return len(history.read_text().splitlines()) - 1 if history.exists() else 0


def kill_one(
    folder: Path, running: dict[str, subprocess.Popen[bytes]], done: threading.Event
) -> None:
    """Kill a worker after some rounds, and start it again."""
    while rounds(folder) < AFTER and not done.is_set():
        time.sleep(0.2)
    running[KILLED].kill()
    running[KILLED].wait()
    print(
        f"killed the worker of {KILLED} after round {rounds(folder)}; starting it again", flush=True
    )
    running[KILLED] = start_worker(folder, KILLED)


def main() -> None:
    """Fit between processes and in one, and compare."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bf") as name:
        folder, done = Path(name), threading.Event()
        for site, part in write(folder).items():
            print(f"{site}: {part}")
        with (
            workers(folder) as running,
            network(sockets(folder), folder / "flower", tls=True) as made,
        ):
            print("SuperLink and SuperNodes are up, with TLS and keys", flush=True)
            killer = threading.Thread(target=kill_one, args=(folder, running, done))
            killer.start()
            try:
                made.run(APP, experiment=str(folder / "experiment.toml"), seconds=1200.0)
            finally:
                done.set()
                killer.join()
        table = pd.read_csv(folder / "runs" / "experiment" / "summary.csv", index_col="variable")
        print(
            f"between processes: {rounds(folder)} rounds in {time.monotonic() - begin:.0f} s in all"
        )
    here = bf.fit(models.varying_slope, datasets.grunfeld())
    print(f"in one process: {len(here.history['elbo'])} rounds")
    draws = here.sample(1000)
    alone = {}
    for variable, value in draws.items():
        if not here.program.sites[variable].local:
            flat = value.reshape(len(value), -1)
            for j in range(flat.shape[1]):
                label = variable if value.ndim == 1 else f"{variable}[{j}]"
                alone[label] = (float(flat[:, j].mean()), float(flat[:, j].std()))
    table["mean in one process"] = [alone[label][0] for label in table.index]
    table["sd in one process"] = [alone[label][1] for label in table.index]
    columns = ["mean", "mean in one process", "sd", "sd in one process"]
    print(table[columns].to_string(float_format="{:.4f}".format))
    worst = ((table["mean"] - table["mean in one process"]).abs() / table["sd"]).max()
    print(f"largest difference of a mean: {worst:.1e} standard deviations")
    assert worst < 0.01, "these are two posteriors"


if __name__ == "__main__":
    main()
