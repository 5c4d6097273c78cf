"""Algorithms by name, from plain data and to plain data: those of checkpoints, experiment files and messages."""

import contextlib
import dataclasses
import json
import operator
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bayesfed.algorithms.algorithm import FIELDS, Algorithm, subclasses
from bayesfed.algorithms.method import Method, Setting
from bayesfed.algorithms.table import METHODS
from bayesfed.guides import Flow, FullRank, MeanField
from bayesfed.guides.globals import Gaussian, LaplaceGaussian, OwnGuide, Particles, Point
from bayesfed.guides.locals import Locals
from bayesfed.rules import Rule
from bayesfed.settings import CUSTOM, SettingsError, choose, made, plain_number, shown
from bayesfed.steps import NaturalDescent, Steps

GUIDES: dict[str, type[Any]] = {family.__name__: family for family in (MeanField, FullRank, Flow)}
"""Families of the globals by name."""
PARTS = ("globals", "locals", "steps", "rule")
Load = Callable[[str, str], Any]
"""Finds what a reference such as ``mine.py:Trimmed`` names; the second argument is its dotted key, for messages."""


def parts_by_name() -> dict[str, type[Any]]:
    """Return the classes of all parts of the package by name."""
    found: list[type[Any]] = [Point, Gaussian, Particles, LaplaceGaussian, OwnGuide, NaturalDescent]
    found += [*GUIDES.values(), *subclasses(Locals), *subclasses(Steps), *subclasses(Rule)]
    return {cls.__name__: cls for cls in found if cls.__module__.startswith("bayesfed.")}


def algorithm_of(
    settings: Any,
    *,
    guide: Callable[[Any], Any] | None = None,
    where: str = "algorithm",
    load: Load | None = None,
) -> Algorithm:
    """Return the algorithm that plain data describe.

    Args:
        settings: the name of a method, or a table of its ``name``, any of its settings, and parts in place of its
            own; or a table of all four parts. A part is a name or a table of its ``name`` and fields; ``module:name``
            is a class outside the package.
        guide: the Pyro guide that ``"guide": "custom"`` means.
        where: the dotted key of these settings, for messages.
        load: finds classes outside the package; by default those of modules that are already imported.

    Raises:
        SettingsError: an unknown name or key, a value of the wrong type, or a guide that is
            described but not given, or the other way round.

    Example:
        >>> from bayesfed.algorithms.registry import algorithm_of
        >>> algorithm_of({"name": "SFVI", "global_guide": "Flow", "local_steps": 5}).globals
        Flow(init_scale=0.3, bins=8, bound=2.5)
        >>> algorithm_of({"name": "FedAvg", "rule": "NormalisedMean"}).rule
        NormalisedMean()
        >>> algorithm_of({"name": "SFVI", "local_step": 5})
        Traceback (most recent call last):
        bayesfed.settings.SettingsError: algorithm.local_step is unknown; did you mean ...
    """
    build = _Builder(guide, load or _imported)
    algorithm = build.algorithm(settings, where)
    if build.guide is not None:
        raise SettingsError(f"a guide was given, but {where} has none of its own")
    return algorithm


@dataclasses.dataclass
class _Builder:
    guide: Callable[[Any], Any] | None
    load: Load

    def algorithm(self, settings: Any, where: str) -> Algorithm:
        data = _table(settings, METHODS, where)
        parts = {key: data.pop(key) for key in PARTS if key in data}
        name = data.pop("name", None)
        if isinstance(name, str) and ":" in name:
            return self._with(self._own(name, data, where), parts, where)
        if len(parts) == len(PARTS):
            found = {key: self.part(value, f"{where}.{key}") for key, value in parts.items()}
            return made(Algorithm, found | data | {"name": name or ""}, where)
        if name is None:
            raise SettingsError(
                f"{where}.name is missing; choose one of {', '.join(METHODS)}, or give all of {', '.join(PARTS)}"
            )
        method = choose(name, METHODS, f"{where}.name")
        chosen = {key: self.setting(method, key, v, f"{where}.{key}") for key, v in data.items()}
        try:
            algorithm = method.build(chosen, where)
        except SettingsError:
            raise
        except ValueError as error:
            raise SettingsError(f"{where}: {error}") from None
        return self._with(algorithm, parts, where)

    def _with(self, algorithm: Algorithm, parts: Mapping[str, Any], where: str) -> Algorithm:
        """Return the algorithm with some parts in place of its own."""
        found = {key: self.part(value, f"{where}.{key}") for key, value in parts.items()}
        return algorithm.replace(**found) if found else algorithm

    def _own(self, reference: str, settings: Mapping[str, Any], where: str) -> Algorithm:
        """Return the user's own algorithm: a value, or what a function returns for these settings."""
        value = self.load(reference, f"{where}.name")
        if isinstance(value, Algorithm) and settings:
            raise SettingsError(
                f"{where}.{next(iter(settings))} is unknown: {reference} is an algorithm, of which only the parts "
                f"({', '.join(PARTS)}) can be replaced; a function that returns it may have settings"
            )
        if callable(value):
            try:
                value = value(**settings)
            except (TypeError, ValueError) as error:
                raise SettingsError(f"{where}: {error}") from error
        if not isinstance(value, Algorithm):
            raise SettingsError(f"{where}.name: {reference} is {value!r}, not a bayesfed.Algorithm")
        return value

    def setting(self, method: Method, key: str, value: Any, where: str) -> Any:
        """Return a value of a method's setting, parts and guides made."""
        setting = method.settings.get(key, Setting(("",)))
        if setting.kinds and value is not None and not isinstance(value, setting.kinds):
            return self.named(value, {cls.__name__: cls for cls in setting.kinds}, where)
        if setting.wrap is not None and value == CUSTOM:
            return self.custom(where)
        return value

    def custom(self, where: str) -> Any:
        if self.guide is None:
            raise SettingsError(
                f"{where} is {CUSTOM!r}: a Pyro guide of your own, which is code and "
                "was not stored; pass it again as guide="
            )
        guide, self.guide = self.guide, None
        return guide

    def part(self, value: Any, where: str) -> Any:
        """Return a part of plain data: a name, a table, or a list of tables."""
        name = value.get("name") if isinstance(value, Mapping) else value
        known = parts_by_name()
        if isinstance(name, str) and ":" in name:
            cls = self.load(name, f"{where}.name")
            if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
                raise SettingsError(
                    f"{where}.name: {name} is {cls!r}; a part is a class with @dataclass(frozen=True), whose fields "
                    "are its settings"
                )
            known = known | {name: cls}
        return self.named(value, known, where)

    def named(self, value: Any, known: Mapping[str, type[Any]], where: str) -> Any:
        data = _table(value, known, where)
        if "name" not in data:
            raise SettingsError(f"{where}.name is missing; choose one of {', '.join(known)}")
        cls = choose(data.pop("name"), known, f"{where}.name")
        fields = {key: self.field(inner, f"{where}.{key}") for key, inner in data.items()}
        return made(cls, fields, where)

    def field(self, value: Any, where: str) -> Any:
        """Return the value of a part's field; tables and lists of tables are parts themselves."""
        if isinstance(value, Mapping) and "name" in value:
            return self.part(value, where)
        if isinstance(value, list | tuple):
            return tuple(self.field(item, f"{where}[{i}]") for i, item in enumerate(value))
        return self.custom(where) if value == CUSTOM else value


def _table(value: Any, known: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a copy of a table; a name is a table of that name alone."""
    if isinstance(value, str):
        return {"name": value}
    if not isinstance(value, Mapping):
        raise SettingsError(
            f"{where} is {shown(value)}; it must be a name or a table with a name, one of {', '.join(known)}"
        )
    return dict(value)


def _imported(reference: str, where: str) -> Any:
    """Return what a reference names in a module that is imported already: opening a file must not run code."""
    file, _, name = reference.partition(":")
    module = sys.modules.get(file)
    if module is None:
        raise SettingsError(
            f"{where} is {reference!r}, code of your own that was not stored: import the module {file!r} first"
        )
    try:
        return operator.attrgetter(name)(module)  # a class in a class has a dotted name
    except AttributeError:
        raise SettingsError(
            f"{where} is {reference!r}, but the module {file!r} ({getattr(module, '__file__', 'a session')}) has no "
            f"{name!r}: it is code of your own and was not stored, so put it there"
        ) from None


# -- to plain data --------------------------------------------------------------------------------


def settings_of(algorithm: Algorithm) -> dict[str, Any]:
    """Return plain data (fit for JSON) of which :func:`algorithm_of` makes an equal algorithm.

    It is a method's name with its settings, where the algorithm is one; else all of its parts. A Pyro guide of the
    user's own becomes ``"custom"``.

    Raises:
        TypeError: a field holds something other than plain data, or a part cannot be found by its module and name.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed.algorithms.registry import settings_of
        >>> settings_of(bf.SFVI(global_guide=bf.MeanField(), lr=0.1))["global_guide"]
        {'name': 'MeanField', 'init_scale': 0.3}
        >>> settings_of(bf.FedAvg().replace(lr_decay=0.1))["rule"]
        {'name': 'Mean', 'by': 'rows', 'averaged_rounds': 1}
    """
    if not isinstance(algorithm, Algorithm):
        raise TypeError(
            f"the settings of {type(algorithm).__name__} cannot be stored: it is not a bayesfed.Algorithm"
        )
    method = METHODS.get(algorithm.name)
    if method is not None:
        # a user's composition of that name may have other parts
        with contextlib.suppress(AttributeError):
            found = method.values(algorithm)
            if method.compose(found) == algorithm:
                return {"name": algorithm.name} | {key: _plain(v, key) for key, v in found.items()}
    return {name: _plain(getattr(algorithm, name), name) for name in FIELDS}


def reference(cls: type[Any]) -> str:
    """Return the name of a part's class: ``module:name`` outside the package."""
    if cls.__module__.startswith("bayesfed."):
        return cls.__name__
    return f"{cls.__module__}:{cls.__qualname__}"


def own_files(settings: Any) -> dict[str, Path]:
    """Return the files of the parts of the user's own in plain settings, by the names ``module:name`` that they have.

    A part that was defined in a session has no file.
    """
    if isinstance(settings, list):
        return {name: file for item in settings for name, file in own_files(item).items()}
    if not isinstance(settings, dict):
        return {}
    name = str(settings.get("name"))
    module, colon, _ = name.partition(":")
    file = getattr(sys.modules.get(module), "__file__", None)
    own = {name: Path(file)} if colon and file is not None else {}
    return own_files(list(settings.values())) | own


def _plain(value: Any, where: str) -> Any:
    value = plain_number(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        name = reference(type(value))
        if "<locals>" in name:
            raise TypeError(
                f"{where} is an instance of {name}, a class inside a function, which could not be found again: define "
                "it at the top of a module"
            )
        fields = dataclasses.fields(value)
        return {"name": name} | {f.name: _plain(getattr(value, f.name), f.name) for f in fields}
    if isinstance(value, tuple):
        return [_plain(item, where) for item in value]
    if callable(value):
        return CUSTOM
    try:
        return json.loads(json.dumps(value))
    except TypeError:
        raise TypeError(
            f"the settings of an algorithm cannot be stored: {where} is a {type(value).__name__}, not plain data"
        ) from None
