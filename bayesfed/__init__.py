"""Hierarchical Bayesian models, written in Pyro, fitted across clients whose data never meet."""

import gc
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bayesfed.api import *  # noqa: F403

__version__ = "0.1.0"

if not TYPE_CHECKING:  # where it is seen, every name is one of the package

    def __getattr__(name: str) -> Any:
        """A public name: all are imported with the first, as torch, Pyro and ArviZ take seconds (PEP 562)."""
        if name.startswith("_") and name != "__all__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        collecting = gc.isenabled()
        gc.disable()  # of all that torch has made a pass takes a tenth of a second
        try:
            return getattr(import_module("bayesfed.api"), name)
        except AttributeError:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
        finally:
            if collecting:
                gc.enable()

    def __dir__() -> list[str]:
        return sorted([*import_module("bayesfed.api").__all__, "__all__", "__doc__", "__version__"])
