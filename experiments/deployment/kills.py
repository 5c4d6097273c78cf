"""Do runs go on to the same numbers whose processes are killed at random and started again? Makes kills.md.

    python experiments/deployment/kills.py [KILLS] [--secure]       # 100 kills: six minutes
    python experiments/deployment/kills.py 25 --flower              # over Flower, with TLS and keys: half an hour

Three institutions' workers (``bayesfed node``) and a server (``bayesfed run --on sockets``) are processes of this
machine. One of the four is killed (SIGKILL) after a random time and started again at once; when the server has ended,
another run begins. In the end θ, and the clients' parameters, are compared with those of the run that was left alone.

``--flower``: the processes are Flower's SuperLink, ServerApp and three SuperNodes, and the workers; see
flower_processes.py for how they are started again. The run that is left alone is one without Flower.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from flower_processes import FlowerProcesses
from institutions import COMMAND, NAMES, identities, runner, start, write
from safetensors.torch import load_file

RUN = [*COMMAND, "run", "experiment.toml", "--on", "sockets", "--output", "result", "--resume"]


class SocketProcesses:
    """The institutions' workers and the server, without Flower."""

    between, seconds = (0.5, 6.0), 60

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.command = {name: [*COMMAND, "node", f"{name}.toml"] for name in NAMES}
        self.command["server"] = RUN
        self.killable = list(self.command)
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def begin(self) -> None:
        """Start everything."""
        for name in self.command:
            self._start(name)

    def tick(self) -> None:
        """Do nothing: :meth:`kill` starts what it has killed."""

    def ended(self) -> bool:
        """Return whether the server has ended.

        Raises:
            RuntimeError: it failed.
        """
        status = self.running["server"].poll()
        if status:
            raise RuntimeError((self.folder / "server.out").read_text()[-2000:])
        return status is not None

    def _start(self, name: str) -> None:
        self.running[name] = start(self.folder, name, self.command[name])

    def kill(self, name: str) -> bool:
        """Kill a process, as the kernel does where memory runs out, and start it again."""
        self._kill(name)
        self._start(name)
        return True

    def _kill(self, name: str) -> None:
        self.running[name].kill()
        self.running[name].wait()

    def stop(self) -> None:
        """End all processes."""
        for name in self.running:
            self._kill(name)


def found(folder: Path) -> dict[str, torch.Tensor]:
    """Return the institutions' parameters in the end."""
    parameters = {}
    for name in NAMES:
        runs = sorted((folder / name / "runs").iterdir(), key=lambda path: path.stat().st_mtime)
        for key, value in load_file(runs[-1] / "posterior.safetensors").items():
            if key.startswith(("params/", "local_params/")):
                parameters[f"{name} {key}"] = value
    return parameters


Processes = SocketProcesses | FlowerProcesses


def one_run(
    kind: type[Processes],
    folder: Path,
    rounds: int,
    secure: bool,
    kills: int,
    chance: random.Random,
) -> Counter[str]:
    """Run to the end with at most that many kills, and return how often each process was killed."""
    write(folder, secure=secure, rounds=rounds, seconds=kind.seconds)
    if secure:
        identities(folder)
    processes, killed = kind(folder), Counter[str]()
    try:
        processes.begin()
        while not processes.ended():
            end = time.monotonic() + chance.uniform(*processes.between)
            while time.monotonic() < end and not processes.ended():
                processes.tick()
                time.sleep(0.05)
            if processes.ended() or killed.total() == kills:
                continue
            name = chance.choice(processes.killable)
            if not processes.kill(name):
                continue
            killed[name] += 1
            if kind is FlowerProcesses:
                print(f"  {time.strftime('%H:%M:%S')} killed: {name}", flush=True)
    finally:
        processes.stop()
    return killed


def main() -> None:
    """Kill, compare, print the result and write it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kills", type=int, nargs="?", default=100)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--secure", action="store_true")
    parser.add_argument("--flower", action="store_true")
    given = parser.parse_args()
    kind: type[Processes] = FlowerProcesses if given.flower else SocketProcesses
    chance, done, runs, worst = random.Random(0), Counter[str](), 0, 0.0
    with tempfile.TemporaryDirectory(prefix="bf") as folder:

        def run(
            how: type[Processes], name: str, kills: int
        ) -> tuple[Counter[str], dict[str, torch.Tensor]]:
            here = Path(folder) / name
            return one_run(how, here, given.rounds, given.secure, kills, chance), found(here)

        _, expected = run(SocketProcesses, "alone", 0)
        while done.total() < given.kills:
            killed, now = run(kind, f"run{runs}", given.kills - done.total())
            assert now.keys() == expected.keys()
            differs = max(float((now[n] - v).abs().max()) for n, v in expected.items())
            done, runs, worst = done + killed, runs + 1, max(worst, differs)
            print(f"run {runs}: {dict(killed)}, differs by {differs:.1e}", flush=True)
    how = " over Flower, with TLS and keys" * given.flower + " with secure sums" * given.secure
    text = (
        f"{done.total()} kills ({', '.join(f'{name} {count}' for name, count in sorted(done.items()))}) in {runs} "
        f"run{'s' * (runs > 1)} of {given.rounds} rounds{how}: all ended; the largest "
        f"difference of any parameter, θ's or a client's, from the run that was left alone: {worst:.1e}"
    )
    print(text)
    if given.kills >= (20 if given.flower else 100):
        name = "kills" + "_flower" * given.flower + "_secure" * given.secure
        runner.write(Path(__file__).with_name(f"{name}.md"), [text])


if __name__ == "__main__":
    main()
