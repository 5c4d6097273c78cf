"""Runs that are killed (``kill -9``) at random times and go on: makes kills.md.

    python experiments/kills.py

Every run is written after each of its rounds. Half of the kills come at a random time, the others at the next write
after it. A killed run is started again by the same call until it ends, often with more kills on the way, and then
compared with one that never stopped: the server's and the clients' states, the ELBO of every round and the posterior,
bit for bit. "In a write": the process left a temporary file. "In a round": it had changed clients' states in files
since the run was last written.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

import bayesfed as bf
from bayesfed.engine import run_file
from bayesfed.engine.files import read_tensors

HERE = Path(__file__).parent
HEADER = [
    "| algorithm | clients' states | kills | in a write | in a round | runs | bit-identical |",
    "| --- | --- | --- | --- | --- | --- | --- |",
]
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
    """Begin or go on, to the end."""
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
    """A process of its own, which shares what this one has imported."""
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    try:
        work()
        os._exit(0)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        os._exit(1)


def left(folder: Path) -> dict[str, bytes]:
    """All numbers of a run that is over, but the seconds that its rounds took."""
    found = {}
    for file, name in (("run.safetensors", "bayesfed run"), ("posterior.safetensors", "bayesfed")):
        tensors, _ = read_tensors(folder / file, name)
        tensors.pop("history/seconds", None)
        tensors = {n: v[[0, 2]] if "history" in n and v.ndim > 1 else v for n, v in tensors.items()}
        found |= {f"{file} {n}": v.numpy().tobytes() for n, v in tensors.items()}
    for path in folder.glob("states/*.npy"):
        records = np.load(path)
        found |= {f"{path.name} {n}": records[n].tobytes() for n in records.dtype.names}
    return found


def killed(name: str, files: bool, kills: int, chance: random.Random) -> dict[str, int]:
    """So many kills, and what they met."""
    met = {"kills": 0, "in a write": 0, "in a round": 0, "runs": 0, "bit-identical": 0}
    with tempfile.TemporaryDirectory() as place:
        whole, folder = Path(place) / "whole", Path(place) / "run"
        for _ in range(2):  # what the first run imports lazily, forked processes share
            shutil.rmtree(whole, ignore_errors=True)
            whole.mkdir()
            begin = time.perf_counter()
            run(name, files, whole)
            seconds = time.perf_counter() - begin
        expected = left(whole)
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
                met["bit-identical"] += left(folder) == expected
                shutil.rmtree(folder)
    return met


def wait_for_a_write(folder: Path, most: float) -> None:
    """Until a temporary file is there, or for so many seconds."""
    end = time.perf_counter() + most
    while time.perf_counter() < end and not any(folder.glob(".*")):
        pass


def finish(pid: int) -> bool:
    """Wait for a process; whether it was killed."""
    status = os.waitpid(pid, 0)[1]
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise SystemExit("a run failed")
    return os.WIFSIGNALED(status)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--only", nargs="*", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)  # processes are forked
    warnings.simplefilter("ignore")
    run_file._SHARE = float("inf")
    chance, lines = random.Random(args.seed), []
    print("\n".join(HEADER))
    settings = [(name, files) for name in args.only for files in (False, True)]
    for number, (name, files) in enumerate(settings):
        share = args.kills * (number + 1) // len(settings) - args.kills * number // len(settings)
        met = killed(name, files, share, chance)
        cells = (name, "in files" if files else "in memory", *map(str, met.values()))
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
        if met["bit-identical"] != met["runs"]:
            raise SystemExit("a run that went on ended elsewhere than one that never stopped")
    if args.only == list(ALGORITHMS) and args.kills == parser.get_default("kills"):
        (HERE / "kills.md").write_text("\n".join([*HEADER, *lines]) + "\n")


if __name__ == "__main__":
    main()
