"""Experiment files: TOML, checked before anything runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, InstanceOf, model_validator

from bayesfed.algorithms.settings import SettingsError, Strict, made, shown, validated
from bayesfed.engine.checks import Schedule
from bayesfed.engine.execution import Execution
from bayesfed.engine.privacy import Privacy

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib


class ModelSection(Strict):
    """Which model: the name of one in ``bayesfed.models``, or ``"file.py:function"``."""

    name: str


class DataSection(Strict):
    """Which data: a data set by name, or a CSV file and how its columns are to be read."""

    dataset: str | None = None
    csv: str | None = None
    client: str | None = None
    fields: list[str] | dict[str, str | list[str]] | None = None
    missing: Literal["fail", "drop", "keep"] = "fail"
    hold_out: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def _one_source(self) -> DataSection:
        if (self.dataset is None) == (self.csv is None):
            raise ValueError("give either dataset (a name) or csv (a path)")
        if self.csv is not None and self.client is None:
            raise ValueError("csv needs client, the column that says whose row it is")
        idle = sorted(self.model_fields_set & {"client", "fields", "missing"})
        if self.dataset is not None and any(getattr(self, k) not in (None, "fail") for k in idle):
            raise ValueError(f"{idle[0]} is for csv; a dataset has its clients and fields already")
        return self


class ScheduleSection(Schedule):
    """How long, and how much of it a round: arguments of :func:`bayesfed.fit`; ``held_out`` as a part of all rows."""

    held_out: Annotated[float, Field(gt=0, lt=1)] | None = None
    progress: bool | None = None


class Output(Strict):
    """Where the results go, how many draws they hold and which local sites the plot shows."""

    folder: str | None = None
    num_samples: Annotated[int, Field(ge=4, multiple_of=4)] = 1000
    sites: list[str] | None = None


class Experiment(Strict):
    """An experiment file."""

    model: ModelSection
    data: DataSection
    algorithm: dict[str, Any] = Field(default_factory=dict)
    schedule: ScheduleSection = Field(default_factory=ScheduleSection)
    execution: InstanceOf[Execution]
    privacy: InstanceOf[Privacy] | None = None
    output: Output = Field(default_factory=Output)


def read_experiment(path: Path, overrides: Sequence[str] = ()) -> Experiment:
    """Read an experiment file (TOML) and apply ``key=value`` overrides.

    Raises:
        SettingsError: bad TOML (with its line), an unknown key, a value of the wrong type.
        OSError: the file cannot be read.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise SettingsError(f"{path} is not UTF-8 text, so it is no TOML") from None
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path}: {error}") from None
    for override in overrides:
        _override(data, override)
    data["execution"] = made(Execution, data.get("execution", {}), "execution")
    if "privacy" in data:
        data["privacy"] = made(Privacy, data["privacy"], "privacy")
    experiment = validated(Experiment, data)
    experiment.algorithm.setdefault("name", "SFVI")
    return experiment


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
