"""Methods by name: a composition of parts, and the keywords by which users set the parts' fields."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, get_type_hints

from pydantic import BaseModel, create_model

from bayesfed.algorithms.algorithm import Algorithm
from bayesfed.algorithms.meaning import meanings
from bayesfed.settings import SettingsError, Strict, check, plain_number, ruled, validated


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
            return getattr(held, "guide", None)
        if self.kinds and not isinstance(held, (*self.kinds, *map(type, self.values.values()))):
            return None
        return next((k for k, v in self.values.items() if v == held), held)

    def changes(self, value: Any) -> dict[str, Any]:
        """Return the values of the fields, by path, that a value of the keyword means."""
        if self.wrap is None:
            value = next((v for k, v in self.values.items() if k == value), value)
        elif value is None:
            return {}
        else:
            value = self.wrap(value)
        return dict.fromkeys(self.paths, value)

    def check(self, value: Any, where: str) -> None:
        """Refuse a part of another class, or with fields out of range."""
        if not self.kinds or value is None:
            return
        if not isinstance(value, self.kinds):
            names = " or ".join(f"{cls.__name__}()" for cls in self.kinds)
            raise SettingsError(f"{where} is {value!r}; it must be {names}")
        check(value, where)

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
        summary: one sentence, with its source. The method's docstring has it, and what each setting means.
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
        self.summary = summary
        self.default = replace(algorithm, name=name)
        self.settings = {
            key: value
            if isinstance(value, Setting)
            else Setting((value,) if isinstance(value, str) else value)
            for key, value in settings.items()
        }
        entries = [f"- ``{key}``: {self.meaning(key)}" for key in self.settings]
        self.__doc__ = "\n".join([summary, "", "Settings:", "", *entries])
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

    def meaning(self, key: str) -> str:
        """Return what a setting means: the documentation of the field of a part that it sets."""
        part, name = holder(self.default, self.settings[key].paths[0])
        return meanings(part.__class__).get(name, "")

    def variant(self, name: str, summary: str, algorithm: Algorithm) -> "Method":
        """Return a method of another composition, with the keywords of this one for which that has a field."""
        settings = {
            key: setting
            for key, setting in self.settings.items()
            if hasattr(*holder(algorithm, setting.paths[0]))
        }
        return Method(name, summary, algorithm, **settings)

    def build(self, settings: Mapping[str, Any], where: str) -> Algorithm:
        """Return the algorithm with these settings; ``where`` is their dotted key, for messages."""
        plain = {key: plain_number(value) for key, value in settings.items()}
        validated(self.schema, plain, where)
        for key, value in plain.items():
            self.settings[key].check(value, f"{where}.{key}".lstrip("."))
        return self.compose(plain)

    def compose(self, settings: Mapping[str, Any]) -> Algorithm:
        """Return the default composition with other values of these settings."""
        changes: dict[str, Any] = {}
        for key, value in settings.items():
            changes |= self.settings[key].changes(value)
        try:
            algorithm: Algorithm = put(self.default, changes)
        except ValueError as error:
            raise ValueError(self._by_keyword(str(error))) from None
        return algorithm

    def _by_keyword(self, message: str) -> str:
        """Return a message that begins with the path of a field with the keyword in its place."""
        for key, setting in self.settings.items():
            for path in setting.paths:
                if message.startswith(f"{path} "):
                    return key + message.removeprefix(path)
        return message

    def values(self, algorithm: Algorithm) -> dict[str, Any]:
        """Return the settings of an algorithm."""
        return {key: setting.value(algorithm) for key, setting in self.settings.items()}

    @cached_property
    def schema(self) -> type[BaseModel]:
        """The types and defaults of all settings."""
        fields: Any = {
            key: (setting.annotation(self.default), setting.value(self.default))
            for key, setting in self.settings.items()
        }
        return create_model(self.name, __base__=Strict, **fields)


def holder(value: Any, path: str) -> tuple[Any, str]:
    """Return the dataclass that has the field of a path, and the field's name."""
    owner, _, name = path.rpartition(".")
    return (get(value, owner) if owner else value), name


def get(value: Any, path: str) -> Any:
    """Return a field of nested dataclasses and tuples: ``"steps.phases.0.lr"``."""
    for name in path.split("."):
        value = value[int(name)] if isinstance(value, tuple) else getattr(value, name)
    return value


def put(value: Any, changes: Mapping[str, Any], where: str = "") -> Any:
    """Return nested dataclasses and tuples with other values of some fields, by path.

    Each is made once, so that it sees all of its new values together.

    Raises:
        ValueError: a dataclass refuses its values; the message begins with the path to it.
    """
    new: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = {}
    for path, change in changes.items():
        name, _, rest = path.partition(".")
        if rest:
            inner.setdefault(name, {})[rest] = change
        else:
            new[name] = change
    new |= {n: put(get(value, n), some, f"{where}{n}.") for n, some in inner.items()}
    if isinstance(value, tuple):
        return tuple(new.get(str(number), item) for number, item in enumerate(value))
    try:
        return replace(value, **new)
    except ValueError as error:
        raise ValueError(f"{where}{error}") from None
