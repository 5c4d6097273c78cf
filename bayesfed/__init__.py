"""Hierarchical Bayesian models, written in Pyro, fitted across clients whose data never meet."""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from bayesfed.tracing.garbage import without_garbage_collection

if TYPE_CHECKING:
    from bayesfed.api import *  # noqa: F403

__version__ = "0.1.0"

# GPyTorch's linear algebra uses TorchScript at import, of which torch 2.14 and later warn every user.
warnings.filterwarnings("ignore", r"`torch\.jit\.script` is deprecated")

if not TYPE_CHECKING:  # where it is seen, every name is one of the package

    def __getattr__(name: str) -> Any:
        """A public name: all are imported with the first, as torch, Pyro and ArviZ take seconds (PEP 562)."""
        if name.startswith("_") and name != "__all__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        with without_garbage_collection():
            api = import_module("bayesfed.api")
        try:
            return getattr(api, name)
        except AttributeError:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None

    def __dir__() -> list[str]:
        return sorted([*import_module("bayesfed.api").__all__, "__all__", "__doc__", "__version__"])
