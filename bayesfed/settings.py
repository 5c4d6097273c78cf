"""Plain data to settings and back: algorithms for checkpoints, experiments for the command line."""

from __future__ import annotations

import dataclasses
import difflib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator

from bayesfed import algorithms
from bayesfed.diagnostics import MAY_BE_ZERO
from bayesfed.guides import Flow, FullRank, MeanField
from bayesfed.precision import Precision
from bayesfed.privacy import Privacy

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib

ALGORITHMS: dict[str, type[Any]] = {name: getattr(algorithms, name) for name in algorithms.__all__}
"""Algorithms by name."""
GUIDES: dict[str, type[Any]] = {family.__name__: family for family in (MeanField, FullRank, Flow)}
"""Families of the globals by name."""
CUSTOM = "custom"
"""What stands for a Pyro guide of the user's own, which is code and cannot be stored."""


class SettingsError(ValueError):
    """A key or value that settings cannot have; one line that names the dotted key."""


# -- algorithms -----------------------------------------------------------------------------------


def algorithm_of(
    settings: str | Mapping[str, Any],
    *,
    guide: Callable[[Any], Any] | None = None,
    where: str = "algorithm",
) -> Any:
    """The algorithm that plain data describe.

    Args:
        settings: the algorithm's name, or its ``name`` and any of its fields. A family of the
            globals is given likewise: ``"Flow"`` or ``{"name": "Flow", "bins": 16}``.
        guide: the Pyro guide that ``"guide": "custom"`` stands for.
        where: the dotted key of these settings, for messages.

    Raises:
        SettingsError: an unknown name or key, a value of the wrong type, or a guide that is
            described but not given, or the other way round.

    Example:
        >>> from bayesfed.settings import algorithm_of
        >>> algorithm_of({"name": "SFVI", "global_guide": "Flow", "local_steps": 5}).global_guide
        Flow(init_scale=0.3, bins=8, bound=2.5)
        >>> algorithm_of({"name": "SFVI", "local_step": 5})
        Traceback (most recent call last):
        bayesfed.settings.SettingsError: algorithm.local_step is unknown; did you mean ...
    """
    named = {"name": settings} if isinstance(settings, str) else settings
    if isinstance(named, Mapping) and named.get("name") in algorithms.FAMILY:  # a choice of parts
        parts = settings_of(algorithms.FAMILY[named["name"]]())
        settings = parts | {key: value for key, value in named.items() if key != "name"}
    return _built(settings, ALGORITHMS, where, guide)


def settings_of(algorithm: Any) -> dict[str, Any]:
    """The plain data (fit for JSON) from which :func:`algorithm_of` makes an equal algorithm.

    A Pyro guide of the user's own becomes ``"custom"``.

    Raises:
        TypeError: the algorithm is no dataclass, or a field holds something other than plain data.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed.settings import settings_of
        >>> settings_of(bf.SFVI(global_guide=bf.MeanField(), lr=0.1))["global_guide"]
        {'name': 'MeanField', 'init_scale': 0.3}
    """
    name = type(algorithm).__name__
    if not dataclasses.is_dataclass(algorithm):
        raise TypeError(f"the settings of {name} cannot be stored: it is not a dataclass")
    data: dict[str, Any] = {"name": name}
    for field in dataclasses.fields(algorithm):
        value = getattr(algorithm, field.name)
        if dataclasses.is_dataclass(value) and field.name not in _callables(type(algorithm)):
            value = settings_of(value)
        elif callable(value):
            value = CUSTOM
        elif hasattr(value, "item"):  # a NumPy number
            value = value.item()
        try:
            data[field.name] = json.loads(json.dumps(value))
        except TypeError:
            raise TypeError(
                f"the settings of {name} cannot be stored: {field.name} is a "
                f"{type(value).__name__}, not plain data"
            ) from None
    return data


def _built(
    settings: Any,
    registry: Mapping[str, type[Any]],
    where: str,
    guide: Callable[[Any], Any] | None = None,
) -> Any:
    if isinstance(settings, str):
        settings = {"name": settings}
    if not isinstance(settings, Mapping):
        raise SettingsError(
            f"{where} is {_shown(settings)}; it must be a name or a table with a name, one of "
            f"{', '.join(registry)}"
        )
    if "name" not in settings:
        raise SettingsError(f"{where}.name is missing; choose one of {', '.join(registry)}")
    cls = choose(settings["name"], registry, f"{where}.name")
    data = {key: value for key, value in settings.items() if key != "name"}
    for name, families in _families(cls).items():
        if data.get(name) is not None:
            data[name] = _built(data[name], families, f"{where}.{name}")
    custom = _callables(cls)
    for name in custom:
        if data.get(name) == CUSTOM:
            if guide is None:
                raise SettingsError(
                    f"{where}.{name} is {CUSTOM!r}: a Pyro guide of your own, which is code and "
                    "was not stored; pass it again as guide="
                )
            data[name], guide = guide, None
    if guide is not None:
        raise SettingsError(f"a guide was given, but {where} has none of its own")
    checked = validated(_schema(cls), data, where)
    try:
        return cls(**{name: getattr(checked, name) for name in checked.model_fields_set})
    except ValueError as error:
        raise SettingsError(f"{where}: {error}") from None


def _families(cls: type[Any]) -> dict[str, dict[str, type[Any]]]:
    """Fields that hold a dataclass: field name to what may stand there, by name."""
    found: dict[str, dict[str, type[Any]]] = {}
    for name, kind in get_type_hints(cls).items():
        members = {
            m.__name__: m
            for m in get_args(kind)
            if isinstance(m, type) and dataclasses.is_dataclass(m)
        }
        if members:
            found[name] = members
    return found


def _callables(cls: type[Any]) -> list[str]:
    """Fields that hold code."""
    return [n for n, kind in get_type_hints(cls).items() if "Callable" in str(kind)]


def _schema(cls: type[Any]) -> type[BaseModel]:
    """A model of an algorithm's (or guide's) fields that knows their types and defaults.

    Whole numbers count something, so they are at least 1; other numbers are rates and scales,
    finite and not negative.
    """
    hints = get_type_hints(cls)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        kind: Any = hints[field.name]
        if field.name in _families(cls):  # built before, with errors of their own
            kind = Any
        elif kind is int:
            kind = Annotated[int, Field(ge=0 if field.name in MAY_BE_ZERO else 1)]
        elif kind is float:
            kind = Annotated[float, Field(ge=0, allow_inf_nan=False)]
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        fields[field.name] = (kind, ... if default is dataclasses.MISSING else default)
    return create_model(cls.__name__, __base__=_Strict, **fields)


# -- experiments ----------------------------------------------------------------------------------


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ModelSection(_Strict):
    """Which model: the name of one in ``bayesfed.models``, or ``"file.py:function"``."""

    name: str


class DataSection(_Strict):
    """Which data: a data set by name, or a CSV file and how its columns are to be read."""

    dataset: str | None = None
    csv: str | None = None
    client: str | None = None
    fields: list[str] | dict[str, str | list[str]] | None = None
    missing: Literal["fail", "drop"] = "fail"
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


class Schedule(_Strict):
    """How long and how: the arguments of :func:`bayesfed.fit`."""

    rounds: Annotated[int, Field(ge=1)]
    clients_per_round: int | float = 1.0
    batch_size: Annotated[int, Field(ge=1)] | None = None
    chunk_size: Annotated[int, Field(ge=1)] | Literal["auto"] | None = None
    compile: Literal["auto"] | bool = "auto"
    precision: Precision = "full"
    seed: int = 0
    device: str | None = None
    progress: bool | None = None


class PrivacySection(_Strict):
    """The settings of :class:`bayesfed.Privacy`."""

    clip: float
    epsilon: float | None = None
    noise: float | None = None
    delta: float = 1e-5
    mechanism: Literal["gaussian", "laplace"] = "gaussian"

    @model_validator(mode="after")
    def _possible(self) -> PrivacySection:
        Privacy(**self.model_dump())
        return self


class Output(_Strict):
    """Where the results go, how many draws they hold and which local sites the plot shows."""

    folder: str | None = None
    num_samples: Annotated[int, Field(ge=4, multiple_of=4)] = 1000
    sites: list[str] | None = None


class Experiment(_Strict):
    """An experiment file."""

    model: ModelSection
    data: DataSection
    algorithm: dict[str, Any] = Field(default_factory=dict)
    schedule: Schedule
    privacy: PrivacySection | None = None
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
                f"--set {override}: {'.'.join(parts[: depth + 1])} is {_shown(inner)}, not a table"
            )
        table = inner
    table[parts[-1]] = value


# -- messages -------------------------------------------------------------------------------------

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

_KINDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "greater_than_equal": "at least {ge:g}",
    "multiple_of": "a multiple of {multiple_of}",
    "callable_type": "a Pyro guide",
    "literal_error": "{expected}",
}


def choose(name: Any, registry: Mapping[str, T], where: str) -> T:
    """The entry of a registry, or an error that names the nearest and all others.

    Example:
        >>> from bayesfed.settings import GUIDES, choose
        >>> choose("Flwo", GUIDES, "algorithm.global_guide.name")
        Traceback (most recent call last):
        bayesfed.settings.SettingsError: algorithm.global_guide.name is "Flwo"; did you mean ...
    """
    if isinstance(name, str) and name in registry:
        return registry[name]
    raise SettingsError(
        f"{where} is {_shown(name)}; {nearest(name, registry)}choose one of {', '.join(registry)}"
    )


def nearest(name: Any, known: Mapping[str, Any] | Sequence[str]) -> str:
    """``"did you mean 'x'? "``, or nothing where no name is near."""
    lower = {str(k).lower(): k for k in known}
    near = difflib.get_close_matches(str(name).lower(), lower, n=1)
    return f"did you mean {lower[near[0]]!r}? " if near else ""


def validated(schema: type[M], data: Any, where: str = "") -> M:
    """Data as an instance of a schema, or a :class:`SettingsError` of one line."""
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        raise SettingsError(_explain(error, schema, data, where)) from None


def _explain(error: ValidationError, schema: type[BaseModel], data: Any, where: str) -> str:
    errors = error.errors(include_url=False)
    for kind in ("extra_forbidden", "missing"):
        for item in errors:
            if item["type"] == kind:
                inner = schema
                for part in item["loc"][:-1]:
                    inner = inner.model_fields[str(part)].annotation  # type: ignore[assignment]
                key = str(item["loc"][-1])
                full = _dotted(where, item["loc"])
                if kind == "missing":
                    return f"{full} is missing"
                known = list(inner.model_fields)
                return f"{full} is unknown; {nearest(key, known)}allowed here: {', '.join(known)}"
    found: dict[tuple[int | str, ...], list[str]] = {}
    given: dict[tuple[int | str, ...], Any] = {}
    for item in errors:
        path, value = _resolve(item["loc"], data)
        text = _KINDS.get(item["type"])
        if text is None:
            message = item["msg"].removeprefix("Value error, ")
            found.setdefault(path, []).append(f": {message}")
            continue
        given[path] = value
        found.setdefault(path, []).append(text.format(**item.get("ctx", {})))
    path = max(found, key=len)
    if path not in given:
        return _dotted(where, path) + found[path][0]
    kinds = list(dict.fromkeys(found[path]))
    if "a number" in kinds and "a whole number" in kinds:
        kinds.remove("a whole number")
    allowed = " or ".join(kinds)
    return f"{_dotted(where, path)} is {_shown(given[path])}; it must be {allowed}"


def _resolve(loc: tuple[int | str, ...], data: Any) -> tuple[tuple[int | str, ...], Any]:
    """The part of an error's place that is in the data: pydantic adds the members of unions."""
    path: list[int | str] = []
    for part in loc:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            continue
        path.append(part)
    return tuple(path), data


def _dotted(where: str, path: tuple[int | str, ...]) -> str:
    text = where
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.lstrip(".") or "the file"


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
