"""Three institutions' folders, for the demonstration: firms' rows, node files and the experiment that all have.

python experiments/deployment/institutions.py FOLDER [--secure]
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd

import bayesfed as bf
from bayesfed import datasets
from bayesfed.deploy.secure import new_key, public_key

EXPERIMENT = Path(__file__).with_name("experiment.toml")
NODE_FILE = """name = "{name}"
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


def written(
    folder: Path, *, secure: bool = False, rounds: int | None = None, seconds: int = 60
) -> dict[str, bf.Federation]:
    """Write the files of each institution into a folder, and return its clients."""
    folder.mkdir(parents=True, exist_ok=True)
    firms, nodes = datasets.grunfeld(), {}
    text = EXPERIMENT.read_text(encoding="utf-8")
    sockets = "".join(f'{name} = "./{name}.sock"\n' for name in NAMES)
    hidden = "secure = true                 # the server sees the sum of the uploads\n"
    if rounds is not None:
        text = text.replace("seed = 0", f"seed = 0\nrounds = {rounds}")
    text = text.replace("seconds = 60 ", f"seconds = {seconds} ")
    text = f"{text}{hidden if secure else ''}\n[deployment.sockets]\n{sockets}"
    (folder / "experiment.toml").write_text(text, encoding="utf-8")
    for number, name in enumerate(NAMES):
        nodes[name] = firms.select(firms.names[number * 4 : number * 4 + 4])
        rows(nodes[name]).to_csv(folder / f"{name}.csv", index=False)
        (folder / f"{name}.toml").write_text(NODE_FILE.format(name=name), encoding="utf-8")
    return nodes


def identities(folder: Path) -> None:
    """Make the nodes' keys of secure sums, and give each the public ones of all: nodes do that by telephone."""
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


if __name__ == "__main__":
    secure, target = "--secure" in sys.argv, Path(sys.argv[1])
    for name, part in written(target, secure=secure).items():
        print(f"{name}: {part}")
    if secure:
        identities(target)
