"""Experiment files: TOML, and the rows that they name, checked before anything that takes long to import is."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import Field, model_validator

from bayesfed.data.columns import check_columns
from bayesfed.settings import Count, Rate, Schedule, SettingsError, Strict, Times, shown, validated

if TYPE_CHECKING:
    import pandas as pd


class ModelSection(Strict, extra="allow"):
    """Which model: the name of one in ``bayesfed.models`` with its settings, ``"file.py:function"``, or a formula."""

    name: str | None = None
    formula: str | None = None
    family: str | None = None

    @model_validator(mode="after")
    def _one_model(self) -> ModelSection:
        if (self.name is None) == (self.formula is None):
            raise ValueError('give either name (a model) or formula ("y ~ x + (1 | site)")')
        if self.family is not None and self.formula is None:
            raise ValueError("family is for a formula; a model has its likelihood already")
        if self.formula is not None and self.model_extra:
            raise ValueError(f"{next(iter(self.model_extra))} is for a model by name")
        return self

    def __str__(self) -> str:
        return str(self.name or self.formula)


Kind = Literal["dataset", "csv", "parquet", "arrow", "npz"]
KINDS: tuple[Kind, ...] = get_args(Kind)
ONE_OF = "give one of dataset (a name), csv, parquet, arrow and npz (a path)"


class DataSection(Strict):
    """Which data: a data set by name, or a file and how its columns are to be read.

    A CSV or Parquet file has a row per observation, an Arrow file stays on disk, and an NPZ file has an array for each
    field and one that says whose row it is.
    """

    dataset: str | None = None
    csv: str | None = None
    parquet: str | None = None
    arrow: str | None = None
    npz: str | None = None
    client: str | None = None
    fields: list[str] | dict[str, str | list[str]] | None = None
    missing: Literal["fail", "drop", "keep"] = "fail"
    hold_out: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def _one_source(self) -> DataSection:
        if len(self._given) > 1:
            raise ValueError(ONE_OF)
        if not self._given:  # the sites have theirs
            return self
        if self.dataset is None and self.client is None:
            raise ValueError(f"{self.kind} needs client, the column that says whose row it is")
        idle = sorted(self.model_fields_set & {"client", "fields", "missing"})
        if self.dataset is not None and any(getattr(self, k) not in (None, "fail") for k in idle):
            raise ValueError(
                f"{idle[0]} is for a file; a dataset has its clients and fields already"
            )
        if isinstance(self.fields, dict) and self.kind in ("arrow", "npz"):
            raise ValueError(f"fields of {self.kind} are a list of names, under which they stand")
        return self

    @property
    def kind(self) -> Kind:
        """Which of these it is."""
        return self._given[0]

    @property
    def _given(self) -> list[Kind]:
        return [kind for kind in KINDS if getattr(self, kind) is not None]

    @property
    def here(self) -> bool:
        """Whether the section names data."""
        return bool(self._given)

    @property
    def source(self) -> str:
        """Its name or path."""
        return str(getattr(self, self.kind))


class ScheduleSection(Schedule):
    """How long, and how much of it a round: arguments of :func:`bayesfed.fit`; ``held_out`` as a part of all rows."""

    held_out: Annotated[float, Field(gt=0, lt=1)] | None = None
    progress: bool | None = None


class Output(Strict):
    """Where the results go, how many draws they hold and which local sites the plot shows."""

    folder: str | None = None
    num_samples: Annotated[int, Field(ge=4)] = 1000
    sites: list[str] | None = None


class ExpectedSite(Strict):
    """What a site brings that may join later."""

    clients: Count
    rows: Count


class DeploymentSection(Strict):
    """Where the clients are: at sites, each with a ``bayesfed node``; see :mod:`bayesfed.deploy`.

    Attributes:
        sites: their names, all of them.
        sockets: by site, where its worker listens, if it is on this machine.
        superlink: of Flower, what ``$FLWR_HOME/config.toml`` calls it.
        seconds: how long a round waits for answers.
        minimum: how many sites must answer in time; else the round is asked again.
        attempts: how often.
        joining: how long the run waits for all sites at its start, in seconds.
        enough: a round goes on once so many sites have answered; by default all that it asks.
        late: in how many later rounds an answer still counts, of SFVI and PVI.
        expected: sites that may join after the start, and with how many clients and rows.
        median: what counts is the median of the sites' mean moves.
        secure: the server sees sums of the sites' uploads only.
        honest: with ``secure`` and privacy, the shares of noise of how many sites are noise enough.
    """

    sites: Annotated[list[str], Field(min_length=1)]
    sockets: dict[str, str] = Field(default_factory=dict)
    superlink: str = "local-deployment"
    seconds: Rate = 600.0
    minimum: Count = 1
    attempts: Count = 10
    joining: Rate = 600.0
    enough: Count | None = None
    late: Times = 0
    expected: dict[str, ExpectedSite] = Field(default_factory=dict)
    median: bool = False
    secure: bool = False
    honest: Count | None = None


class Experiment(Strict):
    """An experiment file."""

    model: ModelSection
    data: DataSection = Field(default_factory=DataSection)
    algorithm: dict[str, Any] = Field(default_factory=dict)
    schedule: ScheduleSection = Field(default_factory=ScheduleSection)
    execution: dict[str, Any] = Field(default_factory=dict)
    privacy: dict[str, Any] | None = None
    output: Output = Field(default_factory=Output)
    deployment: DeploymentSection | None = None

    @model_validator(mode="after")
    def _columns_of_a_formula(self) -> Experiment:
        if self.deployment is None and not self.data.here:
            raise ValueError(f"data: {ONE_OF}")
        if self.model.formula is not None and self.data.here:
            if self.data.kind not in ("csv", "parquet"):
                raise ValueError("a formula names columns: give data.csv or data.parquet")
            if self.data.fields is not None or self.data.missing != "fail":
                raise ValueError(
                    "data.fields and data.missing are for models by name: a formula says what it reads"
                )
        return self


class SiteFile(Strict):
    """What a site adds to the experiment that all have agreed on: its rows, its folder and its worker's address.

    Attributes:
        name: what the site is called.
        experiment: the experiment file.
        socket: where its worker listens: ``HOST:PORT`` of this machine, or a Unix socket's path with a slash.
        folder: where it keeps what must not be lost, by default one called like the site.
        data: in place of the experiment's.
        one_client: all rows are those of one client, called like the site.
        execution: how it runs.
        identities: of secure sums, the public keys of all sites, which they have given to each other.
        own_socket: a Unix socket's path with a slash, where the worker answers the site's own people; none by default.
    """

    name: Annotated[str, Field(min_length=1)]
    experiment: str
    socket: str
    own_socket: Annotated[str, Field(pattern="/")] | None = None
    folder: str | None = None
    data: dict[str, Any]
    one_client: bool = False
    execution: dict[str, Any] = Field(default_factory=dict)
    identities: dict[str, Annotated[str, Field(pattern="^[0-9a-f]{64}$")]] = Field(
        default_factory=dict
    )


def read_site(path: Path) -> tuple[SiteFile, Experiment, Path]:
    """A site's file, its experiment with the site's data, and the folder that paths of its model are relative to.

    Raises:
        SettingsError: bad TOML, an unknown key, a value of the wrong type.
        OSError: a file cannot be read.
    """
    site = validated(SiteFile, _toml(path))
    agreed = path.parent / site.experiment
    experiment = read_experiment(agreed)
    before = experiment.data.model_dump(exclude_unset=True)
    data = {name: v for name, v in before.items() if name not in (*KINDS, "hold_out")} | site.data
    if site.one_client:
        if "client" in site.data:
            raise SettingsError("data.client is a column; with one_client there is none")
        data["client"] = before.get("client", "client")
    section = validated(DataSection, data, "data")
    if not section.here or section.kind == "dataset":
        raise SettingsError("data: a site's is one of csv, parquet, arrow and npz (a path)")
    return site, experiment.model_copy(update={"data": section}), agreed.parent


def address_of(socket: str, base: Path) -> str:
    """A Unix socket's path is seen from the file that names it."""
    return str((base / socket).resolve()) if "/" in socket else socket


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise SettingsError(f"{path} is not UTF-8 text, so it is no TOML") from None
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path}: {error}") from None


def read_experiment(path: Path, overrides: Sequence[str] = ()) -> Experiment:
    """Read an experiment file (TOML) and apply ``key=value`` overrides.

    Raises:
        SettingsError: bad TOML (with its line), an unknown key, a value of the wrong type.
        OSError: the file cannot be read.
    """
    data = _toml(path)
    for override in overrides:
        _override(data, override)
    experiment = validated(Experiment, data)
    if not {"globals", "locals", "steps", "rule"} <= experiment.algorithm.keys():
        experiment.algorithm.setdefault("name", "SFVI")
    return experiment


def read_rows(data: DataSection, base: Path) -> pd.DataFrame | None:
    """The rows of a CSV or Parquet file, a path being relative to ``base``; None of others, which are read later.

    Raises:
        SettingsError: there is no such file, it cannot be read, or it lacks a column.
        ImportError: pandas reads Parquet by pyarrow.
    """
    if data.kind == "dataset":
        return None
    path = base / data.source
    if not path.exists():
        raise SettingsError(f"data.{data.kind}: there is no file {path}")
    if data.kind in ("arrow", "npz"):
        return None
    import pandas as pd

    fields = data.fields.values() if isinstance(data.fields, dict) else data.fields or ()
    wanted = [c for field in fields for c in ([field] if isinstance(field, str) else field)]
    try:
        frame = (
            pd.read_csv(path, dtype={data.client: str})
            if data.kind == "csv"
            else pd.read_parquet(path)
        )
        check_columns("file", [str(data.client), *wanted], frame.columns)
    except ImportError as error:
        raise ImportError(
            "Parquet is read by pyarrow, which is not installed: pip install 'bayesfed[arrow]'"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise SettingsError(f"data ({path}): {' '.join(str(error).split())}") from error
    return frame


def _override(data: dict[str, Any], override: str) -> None:
    """Set one dotted key, in place: ``schedule.rounds=10``."""
    key, equals, text = override.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        raise SettingsError(f"--set {override}: write it as --set section.key=value")
    try:
        parsed = tomllib.loads(f"value = {text}")
        value = parsed["value"] if len(parsed) == 1 else text
    except tomllib.TOMLDecodeError:
        value = text
    table = data
    for depth, part in enumerate(parts[:-1]):
        inner = table.setdefault(part, {})
        if isinstance(inner, str) and depth:  # global_guide = "Flow", then global_guide.bins=16
            inner = table[part] = {"name": inner}
        if not isinstance(inner, dict):
            raise SettingsError(
                f"--set {override}: {'.'.join(parts[: depth + 1])} is {shown(inner)}, not a table"
            )
        table = inner
    table[parts[-1]] = value
