"""A fit between processes, one of which is killed: python experiments/deployment/demo.py, or make deployment.

A SuperLink and three SuperNodes with TLS and keys of their own, and three nodes, all on this machine. The
model of experiments/grunfeld.toml is fitted; after a few rounds the worker in the midwest is killed and started again.
In the end θ is compared with that of the fit in one process, where the data are in one place. About five minutes, most
of which is Flower's, which starts a process for every message.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pandas as pd

import bayesfed as bf
from bayesfed import datasets, models

sys.path.insert(0, str(Path(__file__).parent))
from institutions import NAMES, written
from network import network

from bayesfed.cli.flower_server import APP

KILLED, AFTER = "midwest", 3


def worker(folder: Path, name: str) -> subprocess.Popen[bytes]:
    """Start a node."""
    command = [sys.executable, "-m", "bayesfed.cli.app", "node", f"{name}.toml"]
    return subprocess.Popen(command, cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"})


def rounds(folder: Path) -> int:
    """How many are done."""
    history = folder / "runs" / "experiment" / "history.csv"
    return len(history.read_text().splitlines()) - 1 if history.exists() else 0


def kill_one(
    folder: Path, workers: dict[str, subprocess.Popen[bytes]], done: threading.Event
) -> None:
    """Kill a worker once some rounds are done, and start it again."""
    while rounds(folder) < AFTER and not done.is_set():
        time.sleep(0.2)
    workers[KILLED].send_signal(signal.SIGKILL)
    workers[KILLED].wait()
    print(
        f"killed the worker of {KILLED} after round {rounds(folder)}; starting it again", flush=True
    )
    workers[KILLED] = worker(folder, KILLED)


def main() -> None:
    """Show that the two fits are one."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bf") as name:
        folder, done = Path(name), threading.Event()
        for node, part in written(folder).items():
            print(f"{node}: {part}")
        workers = {node: worker(folder, node) for node in NAMES}
        try:
            while not all((folder / f"{node}.sock").exists() for node in NAMES):
                time.sleep(0.2)
            sockets = {node: str(folder / f"{node}.sock") for node in NAMES}
            with network(sockets, folder / "flower", tls=True) as made:
                print("SuperLink and SuperNodes are up, with TLS and keys", flush=True)
                killer = threading.Thread(target=kill_one, args=(folder, workers, done))
                killer.start()
                try:
                    made.run(APP, experiment=str(folder / "experiment.toml"), seconds=1200.0)
                finally:
                    done.set()
                    killer.join()
        finally:
            for process in workers.values():
                process.kill()
                process.wait()
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
