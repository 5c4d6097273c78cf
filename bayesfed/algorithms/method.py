"""Methods by name: a composition of parts, and the keywords by which users set the parts' fields."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any, get_type_hints

from pydantic import BaseModel, create_model

from bayesfed.algorithms.algorithm import Algorithm
from bayesfed.settings import Strict, plain_number, ruled, validated


@dataclass(frozen=True)
class Setting:
    """A keyword of a method.

    Attributes:
        paths: the fields that it sets, such as ``"steps.lr"``; all hold the same value.
        values: what the fields hold, by what users write, where these differ.
        kinds: the classes of which the value may be, where it is a part itself.
        wrap: what is made of a value before it is set; such a keyword is None by default.
        value_type: the type of its values, by default that of the first field.
    """

    paths: tuple[str, ...]
    values: Mapping[Any, Any] = field(default_factory=dict)
    kinds: tuple[type[Any], ...] = ()
    wrap: Callable[[Any], Any] | None = None
    value_type: Any = None

    def value(self, algorithm: Algorithm) -> Any:
        """Return what a user would have written for an algorithm."""
        held = get(algorithm, self.paths[0])
        if self.wrap is not None:
            name = self.paths[0].split(".")[-1]
            return getattr(held, "guide", None) if name == "globals" else held
        if self.kinds and not isinstance(held, (*self.kinds, *map(type, self.values.values()))):
            return None
        return next((k for k, v in self.values.items() if v == held), held)

    def set(self, algorithm: Algorithm, value: Any) -> Algorithm:
        """Return the algorithm with a value of the keyword."""
        if self.wrap is not None:
            if value is None:
                return algorithm
            value = self.wrap(value)
        else:
            value = next((v for k, v in self.values.items() if k == value), value)
        for path in self.paths:
            algorithm = put(algorithm, path, value)
        return algorithm

    def annotation(self, algorithm: Algorithm) -> Any:
        """Return the type of its values, with their rules."""
        if self.wrap is not None:
            return Callable[..., Any] | None
        if self.value_type is not None:
            return self.value_type
        if self.kinds:
            return Any
        if self.values:
            return type(next(iter(self.values)))
        owner, _, name = self.paths[0].rpartition(".")
        part = get(algorithm, owner) if owner else algorithm
        return ruled(get_type_hints(type(part), include_extras=True)[name])


class Method:
    """A method of the literature: calling it with settings gives an :class:`~bayesfed.Algorithm`.

    Args:
        name: its name.
        summary: one sentence, with its source.
        algorithm: the composition with default settings.
        settings: the fields that each keyword sets: a path such as ``"steps.lr"``, several, or a :class:`Setting`.

    Example:
        >>> import bayesfed as bf
        >>> bf.FedAvg(lr=0.05).steps.lr
        0.05
        >>> bf.FedAvg(learning_rate=0.05)
        Traceback (most recent call last):
        bayesfed.settings.SettingsError: learning_rate is unknown; did you mean ...
    """

    def __init__(
        self,
        name: str,
        summary: str,
        algorithm: Algorithm,
        **settings: str | tuple[str, ...] | Setting,
    ) -> None:
        self.name = self.__name__ = self.__qualname__ = name
        self.__doc__ = summary
        self.default = replace(algorithm, name=name)
        self.settings = {
            key: value
            if isinstance(value, Setting)
            else Setting((value,) if isinstance(value, str) else value)
            for key, value in settings.items()
        }
        self.__signature__ = inspect.Signature(
            [
                inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=value)
                for key, value in self.values(self.default).items()
            ]
        )

    def __call__(self, **settings: Any) -> Algorithm:
        """Return the algorithm with these settings.

        Raises:
            SettingsError: an unknown setting, or a value that it cannot have.
        """
        return self.build(settings, "")

    def __repr__(self) -> str:
        return f"bayesfed.{self.name}"

    def build(self, settings: Mapping[str, Any], where: str) -> Algorithm:
        """Return the algorithm with these settings; ``where`` is their dotted key, for messages."""
        plain = {key: plain_number(value) for key, value in settings.items()}
        validated(self.schema(), plain, where)
        algorithm = self.default
        for key, value in plain.items():
            algorithm = self.settings[key].set(algorithm, value)
        return algorithm

    def values(self, algorithm: Algorithm) -> dict[str, Any]:
        """Return the settings of an algorithm."""
        return {key: setting.value(algorithm) for key, setting in self.settings.items()}

    def schema(self) -> type[BaseModel]:
        """Return the types and defaults of all settings."""
        fields: Any = {
            key: (setting.annotation(self.default), setting.value(self.default))
            for key, setting in self.settings.items()
        }
        return create_model(self.name, __base__=Strict, **fields)  # type: ignore[no-any-return]


def get(value: Any, path: str) -> Any:
    """Return a field of nested dataclasses and tuples: ``"steps.phases.0.lr"``."""
    for name in path.split("."):
        value = value[int(name)] if isinstance(value, tuple) else getattr(value, name)
    return value


def put(value: Any, path: str, new: Any) -> Any:
    """Return nested dataclasses and tuples with another value of a field."""
    name, _, rest = path.partition(".")
    if isinstance(value, tuple):
        items = list(value)
        items[int(name)] = put(items[int(name)], rest, new) if rest else new
        return tuple(items)
    assert is_dataclass(value)
    inner = put(getattr(value, name), rest, new) if rest else new
    return replace(value, **{name: inner})
