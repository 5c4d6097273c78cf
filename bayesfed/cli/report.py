"""The results of a run: configuration, history, posterior and summary, in one folder."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import tomli_w
import xarray as xr
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bayesfed.cli.netcdf import write_netcdf
from bayesfed.effects.result import Effects
from bayesfed.engine.files import atomically, sweep
from bayesfed.engine.run import Round
from bayesfed.engine.run_file import read_history
from bayesfed.output.comparison import Comparison
from bayesfed.report.collect import labels
from bayesfed.report.numbers import format_row, highest_density

FILES = {
    "config.toml": "the experiment with every setting; bayesfed run repeats it",
    "program.py": "the source of the model, as it was fitted",
    "history.csv": "ELBO and time of each round",
    "posterior.safetensors": "the posterior, for bayesfed.Posterior.load",
    "moments.safetensors": "counts, means and covariances of the clients, for bayesfed.Moments.load",
    "posterior.nc": "draws, predictions and data, for arviz.from_netcdf",
    "held_out.safetensors": "the posterior of the clients held out",
    "held_out.nc": "their draws, predictions and data",
    "globals.nc": "draws of the global variables, for arviz.from_netcdf",
    "summary.csv": "mean, sd and 94 % interval of every variable",
    "effects.csv": "the effects of the experiment, with their levels",
    "leave_one_out.csv": "predictive densities of observations or clients that are left out",
    "forest.png": "the clients beside the population",
    "report.html": "the report of bayesfed report",
    "run.safetensors": "the run, for bayesfed run --resume",
}
"""The files of a run folder, in the order in which they are named."""
RUN = "run.safetensors"
LARGE = 10_000
"""The most numbers that a variable has in a draw, if its draws are written unless asked for."""
_MOST_ROWS = 40


class RunFolder:
    """The folder of one run. Nothing is written before the first round is done.

    A folder that holds anything is never written to: the run goes to ``<folder>-2``, ``-3``, ...
    With ``overwrite`` the files of the earlier run are removed after the first round, ``run.safetensors`` at once.
    With ``go_on`` the run in the folder is resumed, or started if the folder is empty.

    Attributes:
        path: the folder; it exists.
        rounds: rounds recorded so far.

    Raises:
        FileExistsError: the folder holds files, but no run to go on with.
    """

    def __init__(self, wanted: Path, *, overwrite: bool = False, go_on: bool = False) -> None:
        self.path, number = wanted, 1
        while not (overwrite or go_on) and _used(self.path):
            number += 1
            self.path = wanted.with_name(f"{wanted.name}-{number}")
        if go_on and _used(wanted) and not self.run.exists():
            raise FileExistsError(
                errno.EEXIST, f"there is no {RUN} to go on with: leave out --resume", str(wanted)
            )
        self._ours = not self.path.exists()
        self.path.mkdir(parents=True, exist_ok=True)
        if overwrite:
            self.run.unlink(missing_ok=True)
        self.rounds = 0
        self.config = ""

    @property
    def run(self) -> Path:
        """The file that stores the run after its rounds."""
        return self.path / RUN

    def record(self, done: Round) -> None:
        """Append a round to ``history.csv``; before the first one call :meth:`begin`."""
        if not self.rounds:
            self.begin(done.number - 1)
        row = (done.number, done.elbo, done.seconds, len(done.cohort))
        with (self.path / "history.csv").open("a", encoding="utf-8") as file:
            file.write(_line(*row))
        self.rounds = done.number

    def begin(self, done: int) -> None:
        """Write ``config.toml`` and the history of the rounds done before; remove earlier results."""
        for name in FILES.keys() - {RUN}:
            sweep(self.path / name)
            if name != "history.csv":
                (self.path / name).unlink(missing_ok=True)
        self.write("config.toml", self.config)
        rows = []
        if done:
            was = read_history(self.run)
            numbers = zip(was["elbo"][:done], was["seconds"], was["clients"], strict=False)
            rows = [_line(number, *row) for number, row in enumerate(numbers, 1)]
        self.write("history.csv", "".join(["round,elbo,seconds,clients\n", *rows]))
        self.rounds = done

    def write(self, name: str, text: str) -> None:
        """Write a text file, atomically."""
        with atomically(self.path / name) as temporary:
            temporary.write_text(text, encoding="utf-8")

    @property
    def complete(self) -> bool:
        """True if the folder has all results of this configuration: ``forest.png`` is written last."""
        config = self.path / "config.toml"
        same = config.exists() and config.read_text(encoding="utf-8") == self.config
        return same and (self.path / "forest.png").exists()

    def print_results(self, console: Console, caveat: str) -> None:
        """Print the summary that was written before, and the files."""
        table = pd.read_csv(self.path / "summary.csv", index_col="variable")
        print_summary(table, console, caveat)
        self.print_files(console)

    def abandon(self) -> None:
        """Remove the folder, if it is this run's and empty."""
        if self._ours and not any(self.path.iterdir()):
            self.path.rmdir()

    def write_draws(self, name: str, groups: Mapping[str, xr.Dataset]) -> None:
        """Write the groups of ArviZ's data that are not empty as netCDF 4, atomically."""
        with atomically(self.path / name) as temporary:
            write_netcdf(temporary, {name: group for name, group in groups.items() if len(group)})

    def write_summary(
        self,
        posterior: xr.Dataset,
        console: Console,
        caveat: str,
        held_out: xr.Dataset | None = None,
    ) -> None:
        """Write and print a :func:`summary`."""
        table = summary(posterior, held_out)
        self.write("summary.csv", table.to_csv(index_label="variable", float_format="%.6g"))
        print_summary(table, console, caveat)

    def write_effects(self, effects: Sequence[Effects], console: Console) -> None:
        """Write all effects into one table, and print each."""
        if not effects:
            return
        tables = [one.to_frame().assign(estimand=one.estimand, level=one.level) for one in effects]
        table = pd.concat(tables, keys=range(1, len(tables) + 1), names=["effect"])
        text = table.droplevel(1).to_csv(float_format="%.6g")
        self.write("effects.csv", text)
        for one in effects:
            console.print(f"\n{one!r}", soft_wrap=True, markup=False)
        console.print()

    def write_comparison(self, found: Comparison, console: Console) -> None:
        """Write and print the table of :func:`bayesfed.compare`."""
        table = found.table.assign(unit=found.unit, count=found.count)
        self.write("leave_one_out.csv", table.to_csv(float_format="%.6g"))
        console.print(f"{found!r}\n", soft_wrap=True, markup=False)

    def print_files(self, console: Console) -> None:
        """Print the files that exist, each with its contents."""
        for name, what in FILES.items():
            if (self.path / name).exists():
                line = Text(str(self.path / name), style="bold").append(f"  {what}", style="dim")
                console.print(line, soft_wrap=True)


def _used(folder: Path) -> bool:
    """Return whether a folder holds more than a killed process leaves before anything is written."""
    return folder.is_dir() and any(not file.name.startswith(".") for file in folder.iterdir())


def _line(number: int, elbo: float, seconds: float, clients: float) -> str:
    return f"{number},{elbo},{seconds:.6f},{clients:.0f}\n"


# -- numbers --------------------------------------------------------------------------------------


def summary(posterior: xr.Dataset, held_out: xr.Dataset | None = None) -> pd.DataFrame:
    """Return mean, sd and 94 % highest-density interval of every scalar, globals first.

    ``r_hat`` and effective sample sizes are left out: they mean nothing for independent draws.

    Args:
        posterior: draws, dims ``chain`` and ``draw`` in front.
        held_out: draws of clients that took no part, marked in a column ``held_out``.
    """
    names = sorted(map(str, posterior), key=lambda name: "client" in posterior[name].dims)
    table = _summary(posterior, names)
    if held_out is None:
        return table
    local = [name for name in names if "client" in posterior[name].dims]
    extra = _summary(held_out, local)
    return pd.concat([table.assign(held_out=False), extra.assign(held_out=True)])


def _summary(posterior: xr.Dataset, names: Sequence[str]) -> pd.DataFrame:
    """Return the rows of a :func:`summary` of some variables."""
    names_of_rows, rows = list[str](), [np.empty((0, 4))]
    for name in names:
        value = posterior[name]
        draws = value.values.reshape(value.shape[0] * value.shape[1], -1).astype(float)
        spread = draws.std(0, ddof=min(1, len(draws) - 1))
        rows.append(np.column_stack([draws.mean(0), spread, highest_density(draws, 0.94)]))
        names_of_rows += labels(value)
    return pd.DataFrame(np.concatenate(rows), names_of_rows, ["mean", "sd", "hdi_3%", "hdi_97%"])


def print_summary(table: pd.DataFrame, console: Console, caveat: str = "") -> None:
    """Print the first 40 rows of a :func:`summary`, below a caveat, if there is one."""
    if caveat:
        console.print(Text(caveat, style="yellow"))
    shown = Table(box=None, header_style="bold", pad_edge=False)
    shown.add_column("")
    for column in ("mean", "sd", "3 %", "97 %"):
        shown.add_column(column, justify="right")
    marked = "held_out" in table.columns
    for name, row in table.head(_MOST_ROWS).iterrows():
        label = Text(str(name))
        if marked and row["held_out"]:
            label.append(" (held out)", style="dim")
        numbers = row[["mean", "sd", "hdi_3%", "hdi_97%"]].astype(float).tolist()
        shown.add_row(label, *format_row(numbers, numbers[1]))
    console.print(shown)
    if len(table) > _MOST_ROWS:
        console.print(f"... and {len(table) - _MOST_ROWS:,} more in summary.csv")


def large_variables(posterior: xr.Dataset) -> dict[str, int]:
    """Return the numbers in a draw of each variable that has more than :data:`LARGE`, such as clients' networks."""
    sizes = {str(name): value[0, 0].size for name, value in posterior.items()}
    return {name: size for name, size in sizes.items() if size > LARGE}


# -- the configuration -----------------------------------------------------------------------------


def relative(path: Path, folder: Path) -> str:
    """Return a path relative to a folder, with forward slashes; absolute if on another drive."""
    try:
        return Path(os.path.relpath(path, folder)).as_posix()
    except ValueError:
        return path.resolve().as_posix()


def to_toml(sections: Mapping[str, Any]) -> str:
    """Return sections as TOML, which has no null: keys that are None are left out.

    Example:
        >>> from bayesfed.cli.report import to_toml
        >>> print(to_toml({"data": {"csv": "a.csv", "fields": {"x": "u"}, "client": None}}))
        [data]
        csv = "a.csv"
        <BLANKLINE>
        [data.fields]
        x = "u"
        <BLANKLINE>
    """
    return tomli_w.dumps(_without_null(sections))


def _without_null(table: Mapping[str, Any]) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(one) for one in value]
        return _without_null(value) if isinstance(value, Mapping) else value

    return {key: plain(value) for key, value in table.items() if value is not None}
