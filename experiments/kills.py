"""Do runs that are killed (``kill -9``) at random times go on to the same numbers? Makes kills.md.

    python experiments/kills.py

Every run is written after each of its rounds. Half of the kills come at a random time, the others at the next write
after it. A killed run is started again by the same call until it ends, often with more kills on the way, and then
compared with one that never stopped: the server's and the clients' states, the ELBO of every round and the posterior,
bit for bit. "In a write": the process left a temporary file. "In a round": it had changed clients' states in files
since the run was last written.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import runner
import torch

import bayesfed as bf
from bayesfed.engine import run_file
from bayesfed.engine.files import read_tensors

COLUMNS = "algorithm | clients' states | kills | in a write | in a round | runs | bit-identical"
ALGORITHMS = {
    "SFVI": bf.SFVI(local_steps=1, draws=2),
    "PFedVEM": bf.PFedVEM(head_steps=1, body_epochs=1, draws=2, personal_steps=2),
    "FOLA": bf.FOLA(local_epochs=1, personal_steps=2),
    "FedAvg": bf.FedAvg(local_epochs=1, personal_steps=2),
    "PACPFL": bf.PACPFL(particles=2, draws=2),
}
ROUNDS, CLIENTS = 12, 12


def model(federation: Any) -> None:
    """Two numbers of each client's own."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with federation.clients():
        w = pyro.sample("w", dist.Normal(mu, 0.5).to_event(1))
        with federation.observations() as obs:
            mean = (w * obs["x"]).sum(-1)
            pyro.sample("y", dist.Normal(mean, 1.0), obs=obs.get("y"))


def data() -> bf.Federation:
    generator = torch.Generator().manual_seed(0)
    x = [torch.randn(n, 2, generator=generator) for n in range(4, 4 + CLIENTS)]
    clients = {f"client {i}": {"x": v, "y": v.sum(1).square()} for i, v in enumerate(x)}
    return bf.Federation.from_arrays(clients)


def run(name: str, files: bool, folder: Path) -> None:
    """Start a run or resume it, to the end."""
    posterior = bf.fit(
        model,
        data(),
        ALGORITHMS[name],
        rounds=ROUNDS,
        clients_per_round=4,
        batch_size=6,
        execution=bf.Execution(compile=False, states=folder / "states" if files else None),
        resume=folder / "run.safetensors",
        progress=False,
    )
    posterior.save(folder / "posterior.safetensors")


def forked(work: Callable[[], None]) -> int:
    """Start a process that shares what this one has imported, and return its number."""
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    try:
        work()
        os._exit(0)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        os._exit(1)


def numbers(folder: Path) -> dict[str, bytes]:
    """Return all numbers of a run that has ended, but the seconds that its rounds took."""
    found = {}
    for file, name in (("run.safetensors", "bayesfed run"), ("posterior.safetensors", "bayesfed")):
        tensors, _ = read_tensors(folder / file, name)
        timed = {"history/seconds", "['history']['seconds']"}
        found |= {f"{file} {n}": v.numpy().tobytes() for n, v in tensors.items() if n not in timed}
    for path in folder.glob("states/*.npy"):
        records = np.load(path)
        found |= {f"{path.name} {n}": records[n].tobytes() for n in records.dtype.names}
    return found


def count_kills(name: str, files: bool, kills: int, chance: random.Random) -> dict[str, int]:
    """Kill a run that many times and count what the kills met."""
    met = {"kills": 0, "in a write": 0, "in a round": 0, "runs": 0, "bit-identical": 0}
    with tempfile.TemporaryDirectory() as place:
        whole, folder = Path(place) / "whole", Path(place) / "run"
        for _ in range(2):  # what the first run imports lazily, forked processes share
            shutil.rmtree(whole, ignore_errors=True)
            whole.mkdir()
            begin = time.perf_counter()
            run(name, files, whole)
            seconds = time.perf_counter() - begin
        expected = numbers(whole)
        while met["kills"] < kills or folder.exists():
            folder.mkdir(exist_ok=True)
            pid = forked(lambda: run(name, files, folder))
            if met["kills"] < kills:
                time.sleep(chance.uniform(0, seconds))
                if chance.random() < 0.5:
                    wait_for_a_write(folder, seconds)
                os.kill(pid, signal.SIGKILL)
            if finish(pid):
                met["kills"] += 1
                met["in a write"] += any(folder.glob(".*"))
                met["in a round"] += any(folder.glob("states/*.journal"))
            else:
                met["runs"] += 1
                met["bit-identical"] += numbers(folder) == expected
                shutil.rmtree(folder)
    return met


def wait_for_a_write(folder: Path, most: float) -> None:
    """Wait until a temporary file is there, or for that many seconds."""
    end = time.perf_counter() + most
    while time.perf_counter() < end and not any(folder.glob(".*")):
        pass


def finish(pid: int) -> bool:
    """Wait for a process and return whether it was killed."""
    status = os.waitpid(pid, 0)[1]
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise SystemExit("a run failed")
    return os.WIFSIGNALED(status)


def measure(name: str, where: str, kills: int, seed: int) -> list[int]:
    """Kill runs of an algorithm and compare those that go on with one that never stopped."""
    run_file._SHARE = float("inf")
    met = count_kills(name, where == "in files", kills, random.Random(f"{name} {where} {seed}"))
    if met["bit-identical"] != met["runs"]:
        raise SystemExit("a run that went on ended elsewhere than one that never stopped")
    return list(met.values())


def main() -> None:
    given = runner.arguments(__doc__, kills=200, seed=0)
    names = [name for name in ALGORITHMS if not given.rows or name in given.rows]
    settings = [(name, where) for name in names for where in ("in memory", "in files")]
    ends = [given.kills * number // len(settings) for number in range(len(settings) + 1)]
    rows = {
        key: [(*key, end - begin, given.seed)]
        for key, begin, end in zip(settings, ends, ends[1:], strict=False)
    }
    runner.table(COLUMNS, rows, measure, given)


if __name__ == "__main__":
    main()
