"""Checks of settings: rules from a dataclass's annotations, checked by pydantic, with errors of one line.

The same check is made wherever settings come from: an algorithm's when it is fitted, those of ``Privacy`` and
``Execution`` when they are constructed, and all of them when they are read from a checkpoint or an experiment file.

    lr: Rate = 0.1           positive            local_steps: int = 1           at least 1
    kl_weight: float = 1.0   not negative        personal_steps: Times = 50     at least 0
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
    model_validator,
)

Count = Annotated[int, Field(ge=1)]
"""The rule for a field annotated ``int``."""
Times = Annotated[int, Field(ge=0)]
"""A number of repetitions, which may be 0."""
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""The rule for a field annotated ``float``."""
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""A positive number."""

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

CUSTOM = "custom"
"""The placeholder of a user's Pyro guide, which is code and cannot be stored."""


class SettingsError(ValueError):
    """An invalid key or value of settings; the message is one line that names the dotted key."""


class Strict(BaseModel):
    """A model without extra keys and without conversions."""

    model_config = ConfigDict(extra="forbid", strict=True, arbitrary_types_allowed=True)


class Schedule(Strict):
    """The length of a run and the size of a round: arguments of :func:`bayesfed.fit`."""

    rounds: Count | None = None
    clients_per_round: int | float = 1.0
    batch_size: Count | None = None
    seed: int = 0
    precision: Annotated[float, Field(ge=0.002, lt=1)] | None = None


class EffectSettings(Strict):
    """An effect that is agreed on before a fit: arguments of ``bf.effects.comparisons``, ``predictions`` or ``slopes``.

    Attributes:
        kind: the function.
        variables: variable to values; of comparisons also to a number that is added to each row's own value; of slopes
            to the step of the derivative.
        by: variable to the values whose rows are groups.
        hypotheses: about the effect's rows ``b1``, ``b2``, ... and global variables, as of ``bf.effects.hypotheses``.
    """

    kind: Literal["comparisons", "predictions", "slopes"] = "comparisons"
    variables: dict[str, float | str | list[float | str]]
    comparison: Literal["difference", "ratio", "odds_ratio"] = "difference"
    level: Literal["clients", "average", "new"] = "clients"
    at: dict[str, float | str] = Field(default_factory=dict)
    by: dict[str, list[float | str]] = Field(default_factory=dict)
    weights: str | None = None
    scale: Literal["response", "link"] = "response"
    outcome: str | None = None
    prob: Annotated[float, Field(gt=0, lt=1)] = 0.94
    num_samples: Annotated[int, Field(ge=4)] = 1000
    hypotheses: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def _steps(self) -> EffectSettings:
        for name, step in self.variables.items() if self.kind == "slopes" else ():
            if isinstance(step, str | list) or not step > 0:
                raise ValueError(
                    f"of slopes the value of a variable is the step of its derivative, above 0, not {name} = {step!r}"
                )
        return self


FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]
"""A name that is a file's too: letters, digits, dashes and underscores."""


class LeaveOneOutSettings(Strict):
    """Leave-one-out cross-validation that is agreed on before a fit between machines, see ``bf.compare``.

    Attributes:
        name: the name under which each institution stores its predictive densities.
        compare: the names of earlier fits to the same rows.
    """

    name: FileName = "model"
    compare: list[FileName] = Field(default_factory=list)
    unit: Literal["observation", "client"] = "observation"
    outcome: str | None = None
    num_samples: Annotated[int, Field(ge=200)] = 2000
    seed: Times = 0

    @model_validator(mode="after")
    def _distinct(self) -> LeaveOneOutSettings:
        if len({self.name, *self.compare}) <= len(self.compare):
            raise ValueError("compare has the names of other fits, each once")
        return self


# -- from annotations -----------------------------------------------------------------------------


@cache
def schema(cls: type[Any]) -> type[BaseModel]:
    """Make a model of a dataclass's fields and defaults: an ``int`` is a :data:`Count`, a ``float`` a :data:`Weight`.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed.settings import schema
        >>> schema(bf.MeanField).model_validate({"init_scale": 0.5})
        MeanField(init_scale=0.5)
    """
    hints, fields = get_type_hints(cls, include_extras=True), {}
    for field in dataclasses.fields(cls):
        default: Any = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        default = ... if default is dataclasses.MISSING else default
        fields[field.name] = (ruled(hints[field.name]), default)
    return create_model(cls.__name__, __base__=Strict, **fields)  # type: ignore[call-overload]


def ruled(kind: Any) -> Any:
    """Add the rules of plain numbers to an annotation; nested dataclasses are checked separately."""
    if get_origin(kind) in (Union, UnionType):
        return Union[tuple(map(ruled, get_args(kind)))]  # noqa: UP007
    if dataclasses.is_dataclass(kind):
        return Any
    return {int: Count, float: Weight}.get(kind, kind) if isinstance(kind, type) else kind


def check(settings: Any, where: str = "") -> None:
    """Raise an error for an invalid field of a dataclass; other objects have no settings.

    Raises:
        SettingsError: names the field.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed.settings import check
        >>> check(bf.SFVI(local_steps=0))
        Traceback (most recent call last):
        bayesfed.settings.SettingsError: local_steps is 0; it must be at least 1
    """
    if not dataclasses.is_dataclass(settings):
        return
    cls: Any = type(settings)
    data, code = {}, callables(cls)
    for field in dataclasses.fields(settings):
        value = data[field.name] = plain_number(getattr(settings, field.name))
        if field.name not in code:
            check(value, f"{where}.{field.name}".lstrip("."))
    validated(schema(cls), data, where)


def made(cls: type[T], data: Any, where: str) -> T:
    """Make a dataclass from plain data, with a SettingsError if they are invalid."""
    checked = validated(schema(cls), data, where)  # type: ignore[arg-type]
    try:
        return cls(**{name: getattr(checked, name) for name in checked.model_fields_set})
    except ValueError as error:
        raise SettingsError(f"{where}: {error}") from None


@cache
def callables(cls: type[Any]) -> tuple[str, ...]:
    """Return the fields that hold code."""
    return tuple(n for n, kind in get_type_hints(cls).items() if "Callable" in str(kind))


def plain_number(value: Any) -> Any:
    """Convert a NumPy number to a Python number."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


# -- messages -------------------------------------------------------------------------------------

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
    "greater_than": "more than {gt:g}",
    "less_than": "less than {lt:g}",
    "less_than_equal": "at most {le:g}",
    "callable_type": "a Pyro guide",
    "literal_error": "{expected}",
    "is_instance_of": "a {class}",
    "path_type": "a path",
}


def choose(name: Any, registry: Mapping[str, T], where: str) -> T:
    """Return the entry of a registry, or raise an error that names the nearest and all others.

    Example:
        >>> from bayesfed.settings import choose
        >>> choose("PVVI", {"SFVI": 1, "PVI": 2}, "algorithm.name")
        Traceback (most recent call last):
        bayesfed.settings.SettingsError: algorithm.name is "PVVI"; did you mean 'PVI'? choose one of ...
    """
    if isinstance(name, str) and name in registry:
        return registry[name]
    raise SettingsError(
        f"{where} is {shown(name)}; {nearest(name, registry)}choose one of {', '.join(registry)}"
    )


def nearest(name: Any, known: Mapping[str, Any] | Sequence[str]) -> str:
    """Return ``"did you mean 'x'? "``, or an empty string if no name is similar."""
    lower = {str(k).lower(): k for k in known}
    near = difflib.get_close_matches(str(name).lower(), lower, n=1)
    return f"did you mean {lower[near[0]]!r}? " if near else ""


def validated(schema: type[M], data: Any, where: str = "") -> M:
    """Return data as an instance of a schema, or raise a :class:`SettingsError` of one line."""
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        raise SettingsError(_explain(error, schema, data, where)) from None


def _explain(error: ValidationError, schema: type[BaseModel], data: Any, where: str) -> str:
    """Describe the first unknown or missing key, or else the deepest invalid value, in one line."""
    errors = error.errors(include_url=False)
    for kind in ("extra_forbidden", "missing"):
        for item in errors:
            if item["type"] == kind:
                inner = schema
                for part in item["loc"][:-1]:
                    inner = _section(inner.model_fields[str(part)].annotation)
                key = str(item["loc"][-1])
                full = _dotted_key(where, item["loc"])
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
        return _dotted_key(where, path) + found[path][0]
    kinds = list(dict.fromkeys(found[path]))
    if "a number" in kinds and "a whole number" in kinds:
        kinds.remove("a whole number")
    allowed = " or ".join(kinds)
    return f"{_dotted_key(where, path)} is {shown(given[path])}; it must be {allowed}"


def _section(kind: Any) -> type[BaseModel]:
    """Return the model of a section that may be None."""
    return next(
        (m for m in get_args(kind) if isinstance(m, type) and issubclass(m, BaseModel)), kind
    )


def _resolve(loc: tuple[int | str, ...], data: Any) -> tuple[tuple[int | str, ...], Any]:
    """Return the part of an error's location that exists in the data, without pydantic's members of unions."""
    path: list[int | str] = []
    for part in loc:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            continue
        path.append(part)
    return tuple(path), data


def _dotted_key(where: str, path: tuple[int | str, ...]) -> str:
    """Return a location as a dotted key."""
    text = where
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.lstrip(".") or "the file"


def shown(value: Any) -> str:
    """Return a value as shortened JSON, for a message."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
