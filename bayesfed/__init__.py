"""Hierarchical Bayesian models, written in Pyro, fitted across clients whose data never meet."""

import ast
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

from bayesfed.tracing.garbage import without_garbage_collection

__version__ = "0.1.0"

# GPyTorch's linear algebra uses TorchScript at import, of which torch 2.14 and later warn every user.
warnings.filterwarnings("ignore", r"`torch\.jit\.script` is deprecated")

_MODULES = {
    alias.name: node.module
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    if isinstance(node, ast.ImportFrom) and node.module
    for alias in node.names
}
"""The modules of the public names, as the stub file gives them (SPEC 1, *Lazy loading of submodules and functions*)."""

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    """Import the module of a public name when the name is first used: torch and Pyro take seconds (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with without_garbage_collection():
        module = import_module(_MODULES[name])
        value = vars(module).get(name) or import_module(f"{module.__name__}.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__all__", "__doc__", "__version__"])
