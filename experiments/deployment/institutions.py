"""Folders and workers of three institutions: their firms' rows, their node files and the experiment that all have.

python experiments/deployment/institutions.py FOLDER [--secure]
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

import bayesfed as bf
from bayesfed import datasets
from bayesfed.deploy.secure import new_key, public_key

sys.path.append(str(Path(__file__).parents[1]))
import runner

__all__ = [
    "COMMAND",
    "NAMES",
    "identities",
    "runner",
    "sockets",
    "start",
    "start_worker",
    "workers",
    "write",
]
EXPERIMENT = Path(__file__).with_name("experiment.toml")
SITE = """name = "{name}"
experiment = "experiment.toml"
socket = "./{name}.sock"

[data]
csv = "{name}.csv"
"""
NAMES = ("east", "midwest", "west")


def rows(federation: bf.Federation) -> pd.DataFrame:
    """Return the rows of clients, with the columns that the experiment names."""
    value, capital = federation["x"].unbind(-1)
    firms = np.repeat(np.array(federation.names), federation.lengths.numpy())
    columns = {"firm": firms, "value": value, "capital": capital, "invest": federation["y"]}
    return pd.DataFrame({name: np.asarray(column) for name, column in columns.items()})


def write(
    folder: Path, *, secure: bool = False, rounds: int | None = None, seconds: int = 60
) -> dict[str, bf.Federation]:
    """Write each institution's files into a folder, and return its clients."""
    folder.mkdir(parents=True, exist_ok=True)
    firms, sites = datasets.grunfeld(), {}
    text = EXPERIMENT.read_text(encoding="utf-8")
    sockets = "".join(f'{name} = "./{name}.sock"\n' for name in NAMES)
    hidden = "secure = true                 # the server sees the sum of what the sites upload\n"
    if rounds is not None:
        text = text.replace("seed = 0", f"seed = 0\nrounds = {rounds}")
    text = text.replace("seconds = 60 ", f"seconds = {seconds} ")
    text = f"{text}{hidden if secure else ''}\n[deployment.sockets]\n{sockets}"
    (folder / "experiment.toml").write_text(text, encoding="utf-8")
    for number, name in enumerate(NAMES):
        sites[name] = firms.select(firms.names[number * 4 : number * 4 + 4])
        rows(sites[name]).to_csv(folder / f"{name}.csv", index=False)
        (folder / f"{name}.toml").write_text(SITE.format(name=name), encoding="utf-8")
    return sites


def identities(folder: Path) -> None:
    """Make the keys of secure sums, and give each institution the public ones of all; people do that by telephone."""
    keys = {}
    for name in NAMES:
        (folder / name).mkdir(exist_ok=True)
        private = new_key()
        (folder / name / "identity.key").write_bytes(private)
        keys[name] = public_key(private).hex()
    text = "\n[identities]\n" + "".join(f'{name} = "{key}"\n' for name, key in keys.items())
    for name in NAMES:
        with (folder / f"{name}.toml").open("a", encoding="utf-8") as file:
            file.write(text)


COMMAND = [sys.executable, "-m", "bayesfed.cli.app"]


def start(folder: Path, name: str, command: list[str]) -> subprocess.Popen[bytes]:
    """Start a process of the folder, with its output in a file."""
    with (folder / f"{name}.out").open("ab") as out:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, cwd=folder, stdout=out, stderr=out, env=environment)


def start_worker(folder: Path, name: str) -> subprocess.Popen[bytes]:
    """Start an institution's worker."""
    return start(folder, name, [*COMMAND, "node", f"{name}.toml"])


def sockets(folder: Path) -> dict[str, str]:
    """Wait until all workers listen, and return their addresses."""
    found = {name: folder / f"{name}.sock" for name in NAMES}
    while not all(path.exists() for path in found.values()):
        time.sleep(0.2)
    return {name: str(path) for name, path in found.items()}


@contextlib.contextmanager
def workers(folder: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Start all institutions' workers, which end with the block."""
    running = {name: start_worker(folder, name) for name in NAMES}
    try:
        yield running
    finally:
        for worker in running.values():
            worker.kill()
            worker.wait()


if __name__ == "__main__":
    secure, target = "--secure" in sys.argv, Path(sys.argv[1])
    for name, part in write(target, secure=secure).items():
        print(f"{name}: {part}")
    if secure:
        identities(target)
