"""A run over Flower whose processes may be killed: SuperLink, ServerApp, SuperNodes and workers, all on this machine.

A dead process is started again, as systemd does it: a SuperNode every five seconds, until the SuperLink lets it in,
which is after two heartbeats (60 s) of the dead one; and `flwr run`, until there is a result.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

from institutions import NAMES, sockets, start_worker
from network import BIN, CONNECTION, Network, network

from bayesfed.cli.flower_server import APP

AGAIN = 5.0
"""Seconds between two starts of a process that ends."""


class FlowerProcesses:
    """A SuperLink and SuperNodes with TLS and keys, and the institutions' workers."""

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
            self.workers[name] = start_worker(self.folder, name)
        flower = network(sockets(self.folder), self.folder / "flower", tls=True)
        self.flower = self.stack.enter_context(flower)
        self._start_client()

    def tick(self) -> None:
        """Start dead processes again."""
        for name in NAMES:
            if self.workers[name].poll() is not None and self._due(f"worker of {name}"):
                self.workers[name] = start_worker(self.folder, name)
        for part, process in list(self.flower.processes.items()):
            if process.poll() is not None and self._due(part):
                self.flower.start(part)
        ended = self.client is not None and self.client.poll() is not None
        if ended and not self._result() and self._due("flwr run"):
            self._start_client()

    def kill(self, name: str) -> bool:
        """Kill this process and none that it has started, as the kernel does; return whether it was there."""
        kind, _, site = name.partition(" of ")
        if kind == "ServerApp":
            found = self._ours(b"serverapp")
            _kill(found)
            return bool(found)
        process = {
            "worker": self.workers.get(site),
            "SuperNode": self.flower.processes.get(site),
            "SuperLink": self.flower.processes["superlink"],
        }[kind]
        assert process is not None
        there = process.poll() is None
        process.kill()
        process.wait()
        return there

    def ended(self) -> bool:
        """Return whether there is a result, and the client that asked for it has ended."""
        return self._result() and self.client is not None and self.client.poll() is not None

    def stop(self) -> None:
        """End all processes, and those that killed ones have left behind."""
        for process in [*self.workers.values(), *([self.client] if self.client else [])]:
            process.kill()
            process.wait()
        self.stack.close()
        _kill(self._ours())

    def _result(self) -> bool:
        return (self.folder / "runs" / "experiment" / "summary.csv").exists()

    def _due(self, name: str) -> bool:
        """Return whether it is time to start a process again, and note the time."""
        now = time.monotonic()
        if now - self.started.get(name, -AGAIN) < AGAIN:
            return False
        self.started[name] = now
        return True

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
        """Return the processes that were started with this run's folder, and are named so."""
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
