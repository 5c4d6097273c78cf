"""Experiment files and node files (TOML), and the rows that they name, checked before slow imports."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import Field, model_validator

from bayesfed.data.columns import check_columns
from bayesfed.settings import (
    Count,
    EffectSettings,
    LeaveOneOutSettings,
    Rate,
    Schedule,
    SettingsError,
    Strict,
    Times,
    shown,
    validated,
)

if TYPE_CHECKING:
    import pandas as pd


class ModelSection(Strict, extra="allow"):
    """The model: the name of one in ``bayesfed.models`` with its settings, ``"file.py:function"``, or a formula."""

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


Kind = Literal["dataset", "csv", "parquet", "arrow", "npz", "moments"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_RENAMED = {
    ("deployment", "sites"): "deployment.institutions",
    ("deployment", "late"): "deployment.max_staleness",
    ("deployment", "median"): 'algorithm.rule = "MedianOfInstitutions"',
    ("output", "sites"): "output.variables",
}
"""Sections and keys that have another name now."""
FORMULA_DATA = (
    'data.fields and data.missing = "keep" are for models by name: a formula names its columns, and '
    'missing = "drop" leaves out rows that lack one of them'
)
ONE_OF = "give one of dataset (a name), csv, parquet, arrow, npz and moments (a path)"


class DataSection(Strict):
    """The data: a data set by name, or a file and how its columns are to be read.

    A CSV or Parquet file has a row per observation, an Arrow file stays on disk, and an NPZ file has an array for each
    field and one with the client of each row. A file of moments is one that :meth:`bayesfed.Moments.save` wrote.
    """

    dataset: str | None = None
    csv: str | None = None
    parquet: str | None = None
    arrow: str | None = None
    npz: str | None = None
    moments: str | None = None
    client: str | None = None
    fields: list[str] | dict[str, str | list[str]] | None = None
    missing: Literal["fail", "drop", "keep"] = "fail"
    hold_out: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def _one_source(self) -> DataSection:
        if len(self._given) > 1:
            raise ValueError(ONE_OF)
        if not self._given:  # the institutions have theirs
            return self
        named = self.kind in ("dataset", "moments")  # which have their clients
        if not named and self.client is None:
            raise ValueError(f"{self.kind} needs client, the column with the client of each row")
        idle = sorted(self.model_fields_set & {"client", "fields", "missing"})
        has = "a dataset has its" if self.dataset is not None else "moments have their"
        has += " clients and fields already"
        if named and any(getattr(self, k) not in (None, "fail") for k in idle):
            raise ValueError(f"{idle[0]} is for a file of rows; {has}")
        if self.moments is not None and self.hold_out:
            raise ValueError("hold_out is for rows; from moments fit a selection of the clients")
        if isinstance(self.fields, dict) and self.kind in ("arrow", "npz"):
            raise ValueError(f"fields of {self.kind} are a list of names, under which they stand")
        return self

    @property
    def kind(self) -> Kind:
        """The kind of data that is given."""
        return self._given[0]

    @property
    def _given(self) -> list[Kind]:
        return [kind for kind in KINDS if getattr(self, kind) is not None]

    @property
    def is_given(self) -> bool:
        """True if the section names data."""
        return bool(self._given)

    @property
    def source(self) -> str:
        """The data's name or path."""
        return str(getattr(self, self.kind))


class ScheduleSection(Schedule):
    """The length of a run and the size of a round, as in :func:`bayesfed.fit`; ``held_out`` is a part of all rows."""

    held_out: Annotated[float, Field(gt=0, lt=1)] | None = None
    progress: bool | None = None


class Output(Strict):
    """The results' folder, their number of draws, whether of large variables too, and the variables of the plot."""

    folder: str | None = None
    num_samples: Annotated[int, Field(ge=4)] = 1000
    large: bool = False
    variables: list[str] | None = None


class ExpectedInstitution(Strict):
    """The numbers of clients and rows of an institution that may join later."""

    clients: Count
    rows: Count


PublicKey = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class DeploymentSection(Strict):
    """The institutions that hold the clients' rows, each with a ``bayesfed node``; see :mod:`bayesfed.deploy`.

    Attributes:
        institutions: the names of all.
        sockets: by institution, its node's address, if it is on this machine.
        superlink: Flower's name of the SuperLink in ``$FLWR_HOME/config.toml``.
        seconds, minimum, attempts, joining, enough, max_staleness, expected: see
            :class:`~bayesfed.deploy.institutions.Patience`.
        secure, honest, chains, reveal: see :class:`~bayesfed.deploy.plan.DeploymentPlan`.
        keys: by post, by institution, the public key with which it signs its answers.
    """

    institutions: Annotated[list[str], Field(min_length=1)]
    sockets: dict[str, str] = Field(default_factory=dict)
    superlink: str = "local-deployment"
    seconds: Rate = 600.0
    minimum: Count = 1
    attempts: Count = 10
    joining: Rate = 600.0
    enough: Count | None = None
    max_staleness: Times = 0
    expected: dict[str, ExpectedInstitution] = Field(default_factory=dict)
    secure: bool = False
    honest: Count | None = None
    chains: bool = False
    reveal: Literal["moments"] | None = None
    keys: dict[str, PublicKey] = Field(default_factory=dict)


class Experiment(Strict):
    """The contents of an experiment file."""

    model: ModelSection
    data: DataSection = Field(default_factory=DataSection)
    algorithm: dict[str, Any] = Field(default_factory=dict)
    schedule: ScheduleSection = Field(default_factory=ScheduleSection)
    execution: dict[str, Any] = Field(default_factory=dict)
    privacy: dict[str, Any] | None = None
    output: Output = Field(default_factory=Output)
    effects: list[EffectSettings] = Field(default_factory=list)
    leave_one_out: LeaveOneOutSettings | None = None
    deployment: DeploymentSection | None = None

    @model_validator(mode="after")
    def _columns_of_a_formula(self) -> Experiment:
        if self.deployment is None and not self.data.is_given:
            raise ValueError(f"data: {ONE_OF}")
        if self.model.formula is not None and self.data.is_given:
            if self.data.kind not in ("csv", "parquet"):
                raise ValueError("a formula names columns: give data.csv or data.parquet")
            if self.data.fields is not None or self.data.missing == "keep":
                raise ValueError(FORMULA_DATA)
        return self


class NodeFile(Strict):
    """The settings of one institution, beside the experiment on which all have agreed: its rows, folder and socket.

    Attributes:
        name: the institution's name.
        experiment: the experiment file.
        socket: where the node listens: ``HOST:PORT`` of this machine, or a Unix socket's path with a slash. By post
            there is none.
        folder: where it stores what must not be lost, by default a folder with the institution's name.
        data: replaces the experiment's.
        one_client: true if all rows are those of one client, with the institution's name.
        execution: how it runs.
        identities: for secure sums, the public keys of all institutions, which they have exchanged.
        own_socket: a Unix socket's path with a slash, where the node answers the institution's own people, if given.
        coordinator: by post, the public key with which the coordinator signs its letters.
        reveal, fewest_rows: see :class:`~bayesfed.deploy.node_moments.Consent`.
    """

    name: Annotated[str, Field(min_length=1)]
    experiment: str
    socket: str | None = None
    own_socket: Annotated[str, Field(pattern="/")] | None = None
    folder: str | None = None
    data: dict[str, Any]
    one_client: bool = False
    execution: dict[str, Any] = Field(default_factory=dict)
    identities: dict[str, PublicKey] = Field(default_factory=dict)
    coordinator: PublicKey | None = None
    reveal: Literal["moments"] | None = None
    fewest_rows: Count = 3


def read_node_file(path: Path) -> tuple[NodeFile, Experiment, Path]:
    """Return a node's file, its experiment with the institution's data, and the folder of the model's paths.

    Raises:
        SettingsError: bad TOML, an unknown key, a value of the wrong type.
        OSError: a file cannot be read.
    """
    node = validated(NodeFile, _toml(path))
    agreed = path.parent / node.experiment
    experiment = read_experiment(agreed)
    before = experiment.data.model_dump(exclude_unset=True)
    data = {name: v for name, v in before.items() if name not in (*KINDS, "hold_out")} | node.data
    if node.one_client:
        if "client" in node.data:
            raise SettingsError("data.client is a column; with one_client there is none")
        data["client"] = before.get("client", "client")
    section = validated(DataSection, data, "data")
    if not section.is_given or section.kind in ("dataset", "moments"):
        raise SettingsError("data: a node's is one of csv, parquet, arrow and npz (a path)")
    return node, experiment.model_copy(update={"data": section}), agreed.parent


def is_node_file(path: Path) -> bool:
    """Return whether a file is a node file, not an experiment file.

    Raises:
        SettingsError: bad TOML.
        OSError: the file cannot be read.
    """
    return "experiment" in _toml(path)


def socket_address(socket: str, base: Path) -> str:
    """Return an address in which a Unix socket's path, relative to the folder ``base``, is absolute."""
    return (base / socket).resolve().as_posix() if "/" in socket else socket


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
    for (section, old), new in _RENAMED.items():
        if isinstance(data.get(section), dict) and old in data[section]:
            raise SettingsError(f"{section}.{old} is now called {new}")
    experiment = validated(Experiment, data)
    if not {"globals", "locals", "steps", "rule"} <= experiment.algorithm.keys():
        experiment.algorithm.setdefault("name", "SFVI")
    return experiment


def read_rows(data: DataSection, base: Path, *, alone: bool = False) -> pd.DataFrame | None:
    """Return the rows of a CSV or Parquet file, whose path is relative to ``base``; None for other kinds of data.

    With ``alone`` all rows are of one client, and no column names it.

    Raises:
        SettingsError: there is no such file, it cannot be read, or it lacks a column.
        ImportError: pyarrow, which reads Parquet, is not installed.
    """
    if data.kind == "dataset":
        return None
    path = base / data.source
    if not path.exists():
        raise SettingsError(f"data.{data.kind}: there is no file {path}")
    if data.kind in ("arrow", "npz", "moments"):
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
        named = [] if alone else [str(data.client)]
        check_columns("file", [*named, *wanted], frame.columns)
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
