"""A run over Flower whose processes may be killed: SuperLink, ServerApp, SuperNodes and workers, all on this machine.

Who is dead is started again, as systemd does it: a SuperNode every five seconds, until the SuperLink lets it in, which
is when two heartbeats (60 s) of the dead one are over; and `flwr run`, until there is a result.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from institutions import NAMES
from network import BIN, CONNECTION, Network, network

from bayesfed.cli.flower_server import APP

AGAIN = 5.0
"""Seconds between two starts of a process that does not stay."""


class FlowerProcesses:
    """A SuperLink and SuperNodes with TLS and keys, and the nodes."""

    between, seconds = (15.0, 60.0), 240

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.killable = [
            *(f"worker of {name}" for name in NAMES),
            *(f"SuperNode of {name}" for name in NAMES),
            "SuperLink",
            "ServerApp",
        ]
        self.stack = contextlib.ExitStack()
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        self.client: subprocess.Popen[bytes] | None = None
        self.started: dict[str, float] = {}
        self.flower: Network

    def begin(self) -> None:
        """Start everything."""
        for name in NAMES:
            self._start_worker(name)
        while not all((self.folder / f"{name}.sock").exists() for name in NAMES):
            time.sleep(0.2)
        sockets = {name: str(self.folder / f"{name}.sock") for name in NAMES}
        self.flower = self.stack.enter_context(network(sockets, self.folder / "flower", tls=True))
        self._start_client()

    def tick(self) -> None:
        """Start again who is dead."""
        for name in NAMES:
            if self.workers[name].poll() is not None and self._due(f"worker of {name}"):
                self._start_worker(name)
        for part, process in list(self.flower.processes.items()):
            if process.poll() is not None and self._due(part):
                self.flower.start(part)
        ended = self.client is not None and self.client.poll() is not None
        if ended and not self._result() and self._due("flwr run"):
            self._start_client()

    def kill(self, name: str) -> bool:
        """As the kernel does where memory runs out: this process, none that it has started; whether it was there."""
        kind, _, node = name.partition(" of ")
        if kind == "ServerApp":
            found = self._ours(b"serverapp")
            _kill(found)
            return bool(found)
        process = {
            "worker": self.workers.get(node),
            "SuperNode": self.flower.processes.get(node),
            "SuperLink": self.flower.processes["superlink"],
        }[kind]
        assert process is not None
        there = process.poll() is None
        process.kill()
        process.wait()
        return there

    def ended(self) -> bool:
        """Whether there is a result, and whoever asked for it has gone."""
        return self._result() and self.client is not None and self.client.poll() is not None

    def stop(self) -> None:
        """All of them, and what killed ones have left behind."""
        for process in [*self.workers.values(), *([self.client] if self.client else [])]:
            process.kill()
            process.wait()
        self.stack.close()
        _kill(self._ours())

    def _result(self) -> bool:
        return (self.folder / "runs" / "experiment" / "summary.csv").exists()

    def _due(self, name: str) -> bool:
        """Whether it is time to start a process again; notes that it was."""
        now = time.monotonic()
        if now - self.started.get(name, -AGAIN) < AGAIN:
            return False
        self.started[name] = now
        return True

    def _start_worker(self, name: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as out:
            self.workers[name] = subprocess.Popen(
                [sys.executable, "-m", "bayesfed.cli.app", "node", f"{name}.toml"],
                cwd=self.folder,
                stdout=out,
                stderr=out,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )

    def _start_client(self) -> None:
        path = self.folder / "experiment.toml"
        command = [BIN / "flwr", "run", APP, CONNECTION, "--stream"]
        with (self.folder / "flwr.out").open("ab") as out:
            self.client = subprocess.Popen(
                [*command, "--run-config", f'experiment="{path}"'],
                stdout=out,
                stderr=out,
                env=self.flower.environment,
            )

    def _ours(self, named: bytes = b"") -> list[int]:
        """The processes that were started with this run's folder, and are named so."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                started_with = (process / "environ").read_bytes() + b"\0"
                home = f"FLWR_HOME={self.folder / 'flower' / 'flwr'}\0"
                if home.encode() in started_with and named in (process / "cmdline").read_bytes():
                    found.append(int(process.name))
        return found


def _kill(processes: list[int]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
