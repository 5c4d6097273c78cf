"""Three sites' folders, for the demonstration: their firms' rows, their site files and the experiment that all have.

python experiments/deployment/sites.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd

import bayesfed as bf
from bayesfed import datasets

EXPERIMENT = Path(__file__).with_name("experiment.toml")
SITE = """name = "{name}"
experiment = "experiment.toml"
socket = "./{name}.sock"

[data]
csv = "{name}.csv"
"""
NAMES = ("east", "midwest", "west")


def rows(federation: bf.Federation) -> pd.DataFrame:
    """The rows of clients, with the columns that the experiment names."""
    value, capital = federation["x"].unbind(-1)
    firms = np.repeat(np.array(federation.names), federation.lengths.numpy())
    columns = {"firm": firms, "value": value, "capital": capital, "invest": federation["y"]}
    return pd.DataFrame({name: np.asarray(column) for name, column in columns.items()})


def written(folder: Path) -> dict[str, bf.Federation]:
    """Write what each site has into a folder, and give its clients."""
    folder.mkdir(parents=True, exist_ok=True)
    firms, sites = datasets.grunfeld(), {}
    text = EXPERIMENT.read_text(encoding="utf-8")
    sockets = "".join(f'{name} = "./{name}.sock"\n' for name in NAMES)
    (folder / "experiment.toml").write_text(f"{text}\n[deployment.sockets]\n{sockets}")
    for number, name in enumerate(NAMES):
        sites[name] = firms.select(firms.names[number * 4 : number * 4 + 4])
        rows(sites[name]).to_csv(folder / f"{name}.csv", index=False)
        (folder / f"{name}.toml").write_text(SITE.format(name=name), encoding="utf-8")
    return sites


if __name__ == "__main__":
    for name, part in written(Path(sys.argv[1])).items():
        print(f"{name}: {part}")
