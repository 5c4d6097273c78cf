"""The models and data sets that an experiment file can name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from bayesfed import models
from bayesfed.data import datasets
from bayesfed.data.federation import Federation, Model

MODELS: Mapping[str, Model | type[Any]] = {
    name: function
    for name, function in ((name, getattr(models, name)) for name in models.__all__)
    if inspect.isfunction(function)
    and list(inspect.signature(function).parameters) == ["federation"]
} | {model.__name__: model for model in (models.OrderedLogistic, models.Cox)}
"""Models by name: functions, and classes that make a model from plain settings."""
DATASETS: dict[str, Callable[[], Federation | tuple[Federation, Federation]]] = {
    name: function
    for name, function in vars(datasets).items()
    if inspect.isfunction(function)
    and not name.startswith("_")
    and function.__module__ == datasets.__name__
    and all(p.default is not p.empty for p in inspect.signature(function).parameters.values())
}
"""Data sets by name; of one that has a part for testing, the part for training is fitted."""
