"""The objects that an experiment names: its model, algorithm, clients, and how it runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bayesfed import models
from bayesfed.algorithms.registry import algorithm_of
from bayesfed.cli.catalogue import DATASETS, MODELS
from bayesfed.cli.errors import one_line
from bayesfed.cli.experiment import FORMULA_DATA, DataSection, Experiment, ModelSection
from bayesfed.cli.own_code import load_function, load_part
from bayesfed.data.columns import check_columns
from bayesfed.data.federation import Federation, Model
from bayesfed.data.ingest import Missing
from bayesfed.data.moments import rows_at_hand
from bayesfed.data.plural import plural
from bayesfed.deploy.coded import RowsToCode
from bayesfed.engine.cohort import cohort_size
from bayesfed.engine.execution import Execution
from bayesfed.engine.moments import Moments
from bayesfed.engine.privacy import Privacy
from bayesfed.formulas.clients import complete_rows, split_by_client
from bayesfed.formulas.formula import Formula, formula
from bayesfed.formulas.settings import FormulaSettings
from bayesfed.formulas.terms import FormulaError
from bayesfed.settings import CUSTOM, SettingsError, choose, made, nearest
from bayesfed.vmap.choose import for_batches


@dataclass(frozen=True)
class Choices:
    """The objects that a run needs.

    Attributes:
        model: the Pyro program.
        algorithm: how it is fitted.
        everyone: all clients, including those held out.
        federation: the clients that take part, with the rows that they train on.
        held: the clients held out, if there are any.
        execution: where and how it runs.
        privacy: the clip and the noise.
        held_out: the rows that nobody trains on, if there are any.
        shown: the local variables to plot.
    """

    model: Model
    algorithm: Any
    everyone: Federation
    federation: Federation
    held: Federation | None
    execution: Execution
    privacy: Privacy | None
    held_out: Federation | None
    shown: list[str]


def choices(config: Experiment, rows: pd.DataFrame | None, base: Path) -> Choices:
    """Return the objects that an experiment file in the folder ``base`` names, with the rows of its data file.

    Raises:
        SettingsError: an unknown name, setting, file, column or client.
    """
    algorithm = named_algorithm(config, base)  # first: its file may have the model too
    model = named_model(config.model, base) if config.model.formula is None else None
    execution = made(Execution, config.execution, "execution")
    privacy = None if config.privacy is None else made(Privacy, config.privacy, "privacy")
    model, everyone = _with_clients(config, model, rows, base)
    everyone, federation, held = _split(config, everyone, execution.device)
    shown = _shown_variables(config, model, federation)
    schedule, held_out = config.schedule, None
    if schedule.held_out is not None:
        federation, held_out = federation.split(test=schedule.held_out, seed=schedule.seed)
    cohort_size(schedule.clients_per_round, len(federation))
    return Choices(
        model, algorithm, everyone, federation, held, execution, privacy, held_out, shown
    )


def named_model(section: ModelSection, base: Path) -> Model:
    """Return the model of a name."""
    name, own = str(section.name), section.model_extra or {}
    if ":" in name:
        if own:
            raise SettingsError(
                f"model.{next(iter(own))}: {name} is a function and has no settings"
            )
        return load_function(name, base, "model.name")
    if name not in MODELS and name.endswith(".py"):
        raise SettingsError(f'model.name is "{name}"; say which function: "{name}:function"')
    if name not in MODELS and isinstance(getattr(models, name, None), type):
        raise SettingsError(
            f'model.name is "{name}", which is made in Python: write net = models.{name}(...) in a file, and '
            'name = "file.py:net"'
        )
    model = choose(name, MODELS, "model.name")
    if isinstance(model, type):
        return made(model, own, "model")
    if own:
        raise SettingsError(f"model.{next(iter(own))} is unknown; {name} has no settings")
    return model


def named_algorithm(config: Experiment, base: Path) -> Any:
    """Return the algorithm; its ``guide`` may be ``file.py:function``, it and its parts ``file.py:name``."""
    data, guide = dict(config.algorithm), None
    named = data.get("guide")
    if isinstance(named, str) and ":" in named:
        guide = load_function(named, base, "algorithm.guide")
        data["guide"] = CUSTOM
    elif named is not None:
        raise SettingsError(
            f'algorithm.guide is {named!r}; give "file.py:function", or leave it out and choose '
            "algorithm.global_guide"
        )

    def load(reference: str, where: str) -> Any:
        return load_part(reference, base, where)

    algorithm = algorithm_of(data, guide=guide, load=load)
    algorithm.check()  # before anything is written
    return algorithm


def _with_clients(
    config: Experiment, model: Model | None, rows: pd.DataFrame | None, base: Path
) -> tuple[Model, Federation]:
    """Return the model, by default that of the formula, and all clients."""
    data, text, family = config.data, str(config.model.formula), config.model.family
    if model is not None:
        return model, load_clients(data, rows, base)
    assert rows is not None  # a formula has the rows of a frame
    try:
        settings = FormulaSettings(text, family or "gaussian", str(data.client))
        clients = _rows_of_formula(settings, data, rows)
        written = formula(text, clients, client=settings.client, family=settings.family)
        return written, written.federation
    except FormulaError as error:
        raise SettingsError(f"model.formula: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise SettingsError(f"data ({base / data.source}): {one_line(error)}") from error


def load_clients(
    data: DataSection, rows: pd.DataFrame | None, base: Path, alone: str | None = None
) -> Federation:
    """Return all clients; if ``alone`` is given, it is the client of all rows.

    Raises:
        SettingsError: the data are not valid for clients; the message names the file.
    """
    if data.kind == "dataset":
        found = choose(data.source, DATASETS, "data.dataset")()
        return found if isinstance(found, Federation) else found[0]
    client, path = str(data.client), base / data.source
    try:
        if rows is not None:
            rows = rows if alone is None else rows.assign(**{client: alone})
            return Federation.from_frame(
                rows, client=client, fields=data.fields, missing=data.missing
            )
        fields = None if data.fields is None else list(data.fields)
        if data.kind == "moments":
            return Moments.load(path).federation()
        if data.kind == "npz":
            return _load_npz(path, client, fields, data.missing, alone)
        if alone is not None:
            raise ValueError("an Arrow file has a column with the client of each row")
        return Federation.from_arrow(path, client=client, fields=fields, missing=data.missing)
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise SettingsError(f"data ({path}): {one_line(error)}") from error


def formula_settings(config: Experiment) -> FormulaSettings:
    """Return the formula of an experiment over nodes, whose coding is agreed when the run begins.

    Raises:
        SettingsError: it cannot be read, or there is no column of the clients.
    """
    section, client = config.model, config.data.client
    if client is None:
        raise SettingsError(
            "data.client is missing: for a formula over nodes, the column that names the client of each row, and the "
            'clients in ( ... | client), as in client = "hospital"'
        )
    try:
        settings = FormulaSettings(str(section.formula), section.family or "gaussian", client)
        assert settings.terms is not None
    except FormulaError as error:
        raise SettingsError(f"model.formula: {error}") from error
    return settings


def load_frames(
    settings: FormulaSettings,
    data: DataSection,
    rows: pd.DataFrame | None,
    base: Path,
    alone: str | None = None,
) -> dict[str, pd.DataFrame]:
    """Return each client's rows, for a formula; if ``alone`` is given, it is the client of all rows.

    Raises:
        SettingsError: a column of the formula does not exist or cannot be read, a row has no client, or the data are of
            another kind; the message names the file.
    """
    if rows is None:
        raise SettingsError("a formula names columns: give data.csv or data.parquet")
    if data.fields is not None or data.missing == "keep":
        raise SettingsError(FORMULA_DATA)
    try:
        rows = rows if alone is None else rows.assign(**{str(data.client): alone})
        frames = _rows_of_formula(settings, data, rows)
        RowsToCode.read(settings, frames)  # a mistake in the columns comes before the node listens
        return frames
    except (ValueError, KeyError, TypeError) as error:
        raise SettingsError(f"data ({base / data.source}): {one_line(error)}") from error


def _rows_of_formula(
    settings: FormulaSettings, data: DataSection, rows: pd.DataFrame
) -> dict[str, pd.DataFrame]:
    """Return each client's rows; those that lack a value are left out, if the section says so."""
    clients = split_by_client(rows, settings.client)
    return complete_rows(settings, clients) if data.missing == "drop" else clients


def _load_npz(
    path: Path, client: str, fields: list[str] | None, missing: Missing, alone: str | None
) -> Federation:
    """Return the clients of an array for each field and one with the client of each row; none may be a pickle."""
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    fields = [name for name in arrays if name != client] if fields is None else fields
    check_columns("file", [*([] if alone else [client]), *fields], list(arrays))
    whose = np.full(len(arrays[fields[0]]), alone) if alone else arrays[client].astype(str)
    for name in fields:
        if arrays[name].shape[:1] != whose.shape:
            raise ValueError(
                f"array {name!r} has {plural(len(arrays[name]), 'row')}, not {len(whose)}"
            )
    clients = {
        name: {field: arrays[field][whose == name] for field in fields} for name in pd.unique(whose)
    }
    return Federation.from_arrays(clients, client_dim=client, missing=missing)


def _split(
    config: Experiment, federation: Federation, device: Any
) -> tuple[Federation, Federation, Federation | None]:
    """Return all clients, those that take part and those held out, on the device."""
    data = config.data
    if device is not None:
        federation = federation.to(device)
    if not data.hold_out:
        return federation, federation, None
    for name in data.hold_out:
        if name not in federation.names:
            near = nearest(name, federation.names) or f"they are {', '.join(federation.names[:8])}"
            raise SettingsError(f'data.hold_out: there is no client "{name}"; {near.strip()}')
    if len(set(data.hold_out)) >= len(federation):
        raise SettingsError("data.hold_out names every client: none is left to fit")
    return federation, *federation.hold_out(data.hold_out)


def _shown_variables(config: Experiment, model: Model, federation: Federation) -> list[str]:
    """Return the local variables to plot."""
    if isinstance(model, Formula):
        local = model.effects
    else:
        inspected = for_batches(model, rows_at_hand(federation))
        found = [s.name for s in inspected.find_sites().values() if s.local and not s.observed]
        local = [name for name in found if not name.startswith("_")]  # which ArviZ does not have
    for name in config.output.variables or ():
        if name not in local:
            raise SettingsError(
                f'output.variables: there is no local variable "{name}"; {nearest(name, local)}'
                f"the model has {', '.join(local)}"
            )
    return local if config.output.variables is None else config.output.variables
