"""The report of run folders: all facts are in their files, so that neither data nor model are needed."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import xarray as xr

from bayesfed import __version__
from bayesfed.cli.netcdf import read_netcdf
from bayesfed.cli.report import RUN
from bayesfed.engine.files import read_tensors
from bayesfed.engine.parts import nested
from bayesfed.output.study import compare, hashes, prior_sensitivity, write_page
from bayesfed.report.collect import Groups, make_study
from bayesfed.report.facts import Effect, Sent, Study
from bayesfed.report.logs import read_log
from bayesfed.report.page import render
from bayesfed.settings import SettingsError

_DRAWS = {"posterior.nc": False, "globals.nc": True}
"""The files of draws, and whether they are of a run between machines."""
_SHOWN = ("mechanism", "delta", "clip")
"""The settings of privacy that are shown beside ε."""


def report_runs(runs: Sequence[Path], output: Path, title: str, logs: Sequence[Path]) -> None:
    """Write the report of some run folders, and print where it is.

    Args:
        runs: the folders.
        output: the file.
        title: the heading; by default the folders' names.
        logs: folders of nodes, or their logs.

    Raises:
        SettingsError: a folder is not that of a run, or a log does not exist.
    """
    read = [read_run(folder, logs) for folder in runs]
    names = {study.name: groups for study, groups in read}
    if len(names) < len(read):
        raise SettingsError("two runs have the same name: give folders of different names")
    studies = [study for study, _ in read]
    comparison = compare(names) if len(studies) > 1 else None
    write_page(output, render(studies, title=title, comparison=comparison))
    print(output)


def read_run(folder: Path, logs: Sequence[Path] = ()) -> tuple[Study, Groups]:
    """Return the facts of a run, and its draws and data."""
    draws = next((name for name in _DRAWS if (folder / name).exists()), None)
    if draws is None:
        raise SettingsError(f"{folder} has no {' or '.join(_DRAWS)}: give a folder of bayesfed run")
    config = tomllib.loads(text := _text(folder / "config.toml"))
    groups = read_netcdf(folder / draws)
    groups.setdefault("history", _history(folder))
    program, deployed = _text(folder / "program.py"), _DRAWS[draws]
    _, run = read_tensors(folder / RUN, "bayesfed run")
    data, written = None, {"version": __version__}
    if not deployed:
        tensors, written = read_tensors(folder / "posterior.safetensors", "bayesfed")
        data = nested(tensors)["data"]
    model = config["model"]
    study = make_study(
        groups,
        sensitivity=prior_sensitivity(groups),
        name=folder.resolve().name,
        model=str(model.get("name", model.get("formula"))),
        program=program,
        settings=text,
        clients=len(run["clients"]),
        rows=None if data is None else int(data["rows"].sum()),
        privacy={
            name: value for name, value in config.get("privacy", {}).items() if name in _SHOWN
        },
        effects=_effects(folder / "effects.csv"),
        deployed=deployed,
        sent=_sent(logs, run["name"]) if deployed else {},
        hashes=hashes(program, data),
        software={"bayesfed": written["version"]},
    )
    return study, groups


def _history(folder: Path) -> xr.Dataset:
    table = pd.read_csv(folder / "history.csv")
    return xr.Dataset({name: ("round", table[name].to_numpy()) for name in ("elbo", "seconds")})


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _effects(path: Path) -> list[Effect]:
    """Return the effects of a table that :meth:`~bayesfed.cli.report.RunFolder.write_effects` wrote."""
    if not path.exists():
        return []
    found = []
    for _, part in pd.read_csv(path).groupby("effect"):
        table = part.dropna(axis=1, how="all").drop(columns=["effect", "estimand", "level"])
        found.append(Effect(part["estimand"].iloc[0], f"Level: {part['level'].iloc[0]}", table))
    return found


def _sent(logs: Sequence[Path], run: str) -> dict[str, list[Sent]]:
    """Return what the institutions of these logs have sent in a run, by the name of the log's folder."""
    found: dict[str, list[Sent]] = {}
    for given in logs:
        path = given / "log.jsonl" if given.is_dir() else given
        if not path.exists():
            raise SettingsError(f"--log: there is no file {path}")
        found[path.resolve().parent.name] = read_log(path, run)
    return found
