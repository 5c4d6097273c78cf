"""Runs whose processes are killed at random and started again, beside one that is left alone: makes kills.md.

    python experiments/deployment/kills.py [KILLS] [--secure]       # 100 kills: half an hour

Three sites' workers (``bayesfed node``) and a server (``bayesfed run --on sockets``) are processes of this machine. One
of the four is killed (SIGKILL) after a random time and started again at once; when the server has ended, another run
begins. In the end θ, and the clients' parameters, are compared with those of the run that was left alone.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))
from sites import NAMES, identities, written

HERE = Path(__file__).parent
COMMAND = [sys.executable, "-m", "bayesfed.cli.app"]
RUN = [*COMMAND, "run", "experiment.toml", "--on", "sockets", "--output", "result", "--resume"]


class Processes:
    """The sites' workers and the server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.command = {name: [*COMMAND, "node", f"{name}.toml"] for name in NAMES}
        self.command["server"] = RUN
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        """Start one, its output in a file."""
        with (self.folder / f"{name}.out").open("ab") as out:
            self.running[name] = subprocess.Popen(
                self.command[name],
                cwd=self.folder,
                stdout=out,
                stderr=out,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )

    def kill(self, name: str) -> None:
        """As the kernel does where memory runs out."""
        self.running[name].send_signal(signal.SIGKILL)
        self.running[name].wait()

    def stop(self) -> None:
        """All of them."""
        for name in self.running:
            self.kill(name)


def found(folder: Path) -> dict[str, torch.Tensor]:
    """What the sites have in the end."""
    parameters = {}
    for name in NAMES:
        runs = sorted((folder / name / "runs").iterdir(), key=lambda path: path.stat().st_mtime)
        for key, value in load_file(runs[-1] / "posterior.safetensors").items():
            if key.startswith(("params/", "local_params/")):
                parameters[f"{name} {key}"] = value
    return parameters


def one_run(folder: Path, rounds: int, secure: bool, kills: int, chance: random.Random) -> Counter:
    """A whole run with at most so many kills: how often each process was killed, and of which it ended by itself."""
    written(folder, secure=secure, rounds=rounds)
    if secure:
        identities(folder)
    processes, killed = Processes(folder), Counter[str]()
    for name in processes.command:
        processes.start(name)
    try:
        while processes.running["server"].poll() is None:
            end = time.monotonic() + chance.uniform(0.5, 6.0)
            while time.monotonic() < end and processes.running["server"].poll() is None:
                time.sleep(0.05)
            if processes.running["server"].poll() is not None or killed.total() == kills:
                continue
            name = chance.choice(list(processes.command))
            processes.kill(name)
            killed[name] += 1
            processes.start(name)
        if processes.running["server"].returncode:
            raise RuntimeError((folder / "server.out").read_text()[-2000:])
    finally:
        processes.stop()
    return killed


def main() -> None:
    """Print the table and write it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kills", type=int, nargs="?", default=100)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--secure", action="store_true")
    given = parser.parse_args()
    chance, done, runs, worst = random.Random(0), Counter[str](), 0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        alone = Path(folder) / "alone"
        one_run(alone, given.rounds, given.secure, 0, chance)
        expected = found(alone)
        while done.total() < given.kills:
            here = Path(folder) / f"run{runs}"
            killed = one_run(here, given.rounds, given.secure, given.kills - done.total(), chance)
            now = found(here)
            assert now.keys() == expected.keys()
            differs = max(float((now[n] - v).abs().max()) for n, v in expected.items())
            done, runs, worst = done + killed, runs + 1, max(worst, differs)
            print(f"run {runs}: {dict(killed)}, differs by {differs:.1e}", flush=True)
    text = (
        f"{done.total()} kills ({', '.join(f'{name} {count}' for name, count in sorted(done.items()))}) in {runs} "
        f"runs of {given.rounds} rounds{' with secure sums' if given.secure else ''}: all ended; the largest "
        f"difference of any parameter, θ's or a client's, from the run that was left alone: {worst:.1e}\n"
    )
    print(text)
    if given.kills >= 100:
        name = "kills_secure.md" if given.secure else "kills.md"
        (HERE / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
