"""The figure of the README, and its numbers: each is read from a table under ``experiments``.

    python docs/readme.py            # write the table of README.md anew from experiments/seconds_to_truth.md
    python docs/readme.py --lines    # print the README's first program
    python docs/readme.py --figure   # fit the README's model and draw docs/_static/forest.svg

``tests/docs/test_numbers.py`` fails where the README and the table differ.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
TABLE = ROOT / "experiments/seconds_to_truth.md"
BEGIN, END = "<!-- from experiments/seconds_to_truth.md -->\n", "<!-- end -->\n"
PROBLEMS = {
    "eight schools": "eight schools",
    "correlated slopes": "correlated intercepts and slopes",
    "radon": "radon in 85 counties",
    "logistic": "logistic, two random slopes",
    "negative binomial": "negative binomial",
    "kidney, Cox": "kidney infections, Cox",
}
"""The rows of the README's table, by their names in the experiment's table."""
UNDATED = "25 November 2026, bayesfed 0.1.0, two cores of an AMD EPYC"
"""What the table was made with, if it has no header of its own."""


def rows(path: Path) -> list[dict[str, list[str]]]:
    """Return a Markdown table's rows: from a column's name to the cells under it, as names may come twice."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
    names, _, *cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    found = []
    for row in cells:
        one: dict[str, list[str]] = {}
        for name, cell in zip(names, row, strict=True):
            one.setdefault(name, []).append(cell)
        found.append(one)
    return found


def made_with(path: Path) -> str:
    """Return the date, the version and the machine of a table."""
    first = path.read_text(encoding="utf-8").split("\n")[0]
    found = re.match(r"Made by `.*?`, (\S+), commit \S+, (bayesfed \S+), torch \S+, (.*)\.", first)
    return f"{found[1]}, {found[2]}, {found[3]}" if found else UNDATED


def table() -> str:
    """Return the README's table of distances and seconds."""
    found = {row["problem"][0]: row for row in rows(TABLE)}
    lines = [
        "| problem | rounds | means | sd ratios | seconds: first fit, next | NUTS: first, next |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, title in PROBLEMS.items():
        row = found[name]
        shift, ratio = row["distance"][0].split(", ")
        ours = f"{row['bayesfed cold'][0]}, {row['warm'][0]}"
        nuts = f"{row['NumPyro cold'][0]}, {row['warm'][1]}"
        lines.append(f"| {title} | {row['rounds'][0]} | {shift} | {ratio} | {ours} | {nuts} |")
    return "\n".join([*lines, "", f"Made {made_with(TABLE)}.", ""])


def write() -> None:
    """Put the table into the README."""
    text = README.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    README.write_text(before + BEGIN + table() + END + rest.split(END)[1], encoding="utf-8")


def code() -> list[str]:
    """Return the Python blocks of the README."""
    return re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def draw() -> None:
    """Fit the README's model and draw each city's estimate by itself, the federated one, and all cities'."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "bayesfed", "svg.fonttype": "none"}
    import matplotlib.pyplot as plt
    import torch

    names: dict[str, object] = {}
    exec(code()[0], names)
    posterior = names["posterior"]
    draws = posterior.sample(4000)  # type: ignore[attr-defined]
    federation = names["datasets"].china_smoking()  # type: ignore[attr-defined]
    fig, ax = plt.subplots(figsize=(7, 3.6))
    for at, city in enumerate(federation.names):
        x, y = (federation.select([city])[field].double().flatten() for field in ("x", "y"))
        counts = torch.stack([((x == a) & (y == b)).sum() for a in (1, 0) for b in (1, 0)])
        ratio = (counts[0] * counts[3] / (counts[1] * counts[2])).log()
        error = (1 / counts).sum().sqrt()  # Woolf's standard error
        ax.errorbar(ratio, at - 0.15, xerr=1.88 * error, fmt="o", color="0.6", ms=4)
        _interval(ax, draws["beta"][:, at], at + 0.15, "C0")
    _interval(ax, draws["mu"], len(federation.names), "k")
    ax.set_yticks(range(len(federation.names) + 1), [*federation.names, "all cities (mu)"])
    ax.invert_yaxis()
    ax.set_xlabel("log odds ratio of lung cancer for smokers, with 94 % intervals")
    ax.plot([], [], "o-", color="0.6", label="the city alone")
    ax.plot([], [], "o-", color="C0", label="federated")
    ax.legend(loc="lower right", frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
    fig.patch.set_facecolor("white")
    fig.tight_layout()
    fig.savefig(ROOT / "docs/_static/forest.svg", metadata={"Date": None})


def _interval(ax: object, draws: object, at: float, color: str) -> None:
    """Draw a mean and the central interval of 94 %."""
    import numpy as np

    low, high = np.quantile(draws, [0.03, 0.97])
    mean = float(draws.mean())  # type: ignore[attr-defined]
    error = [[mean - low], [high - mean]]
    ax.errorbar(mean, at, xerr=error, fmt="o", color=color, ms=5)  # type: ignore[attr-defined]


if __name__ == "__main__":
    if "--lines" in sys.argv:
        print(re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)[0])
    else:
        draw() if "--figure" in sys.argv else write()
