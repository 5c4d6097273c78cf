"""Algorithms by name, and made from plain data: those of checkpoints and of experiment files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bayesfed import algorithms
from bayesfed.algorithms import FAMILY
from bayesfed.guides import Flow, FullRank, MeanField
from bayesfed.settings import (
    CUSTOM,
    SettingsError,
    callables,
    choose,
    families,
    made,
    settings_of,
    shown,
)

ALGORITHMS: dict[str, type[Any]] = {name: getattr(algorithms, name) for name in algorithms.__all__}
"""Algorithms by name."""
GUIDES: dict[str, type[Any]] = {family.__name__: family for family in (MeanField, FullRank, Flow)}
"""Families of the globals by name."""


def algorithm_of(
    settings: str | Mapping[str, Any],
    *,
    guide: Callable[[Any], Any] | None = None,
    where: str = "algorithm",
) -> Any:
    """The algorithm that plain data describe.

    Args:
        settings: the name of the algorithm or of a special case, or its ``name`` and any of its fields. A family of
            the globals is given likewise: ``"Flow"`` or ``{"name": "Flow", "bins": 16}``.
        guide: the Pyro guide that ``"guide": "custom"`` stands for.
        where: the dotted key of these settings, for messages.

    Raises:
        SettingsError: an unknown name or key, a value of the wrong type, or a guide that is
            described but not given, or the other way round.

    Example:
        >>> from bayesfed.algorithms.registry import algorithm_of
        >>> algorithm_of({"name": "SFVI", "global_guide": "Flow", "local_steps": 5}).global_guide
        Flow(init_scale=0.3, bins=8, bound=2.5)
        >>> algorithm_of({"name": "SFVI", "local_step": 5})
        Traceback (most recent call last):
        bayesfed.settings.SettingsError: algorithm.local_step is unknown; did you mean ...
    """
    named = {"name": settings} if isinstance(settings, str) else settings
    if isinstance(named, Mapping) and (name := str(named.get("name"))) in FAMILY:
        parts = settings_of(FAMILY[name]())
        settings = parts | {key: value for key, value in named.items() if key != "name"}
    return _built(settings, ALGORITHMS | FAMILY, where, guide)


def _built(
    settings: Any,
    registry: Mapping[str, Any],
    where: str,
    guide: Callable[[Any], Any] | None = None,
) -> Any:
    if isinstance(settings, str):
        settings = {"name": settings}
    if not isinstance(settings, Mapping):
        raise SettingsError(
            f"{where} is {shown(settings)}; it must be a name or a table with a name, one of "
            f"{', '.join(registry)}"
        )
    if "name" not in settings:
        raise SettingsError(f"{where}.name is missing; choose one of {', '.join(registry)}")
    cls = choose(settings["name"], registry, f"{where}.name")
    data = {key: value for key, value in settings.items() if key != "name"}
    for name, choices in families(cls).items():
        if data.get(name) is not None:
            data[name] = _built(data[name], choices, f"{where}.{name}")
    for name in callables(cls):
        if data.get(name) == CUSTOM:
            if guide is None:
                raise SettingsError(
                    f"{where}.{name} is {CUSTOM!r}: a Pyro guide of your own, which is code and "
                    "was not stored; pass it again as guide="
                )
            data[name], guide = guide, None
    if guide is not None:
        raise SettingsError(f"a guide was given, but {where} has none of its own")
    return made(cls, data, where)
