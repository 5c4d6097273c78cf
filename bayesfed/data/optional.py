"""Optional dependencies, imported where they are needed."""

import importlib
from typing import Any


def import_optional(module: str, requirement: str) -> Any:
    """Import a module of an optional dependency.

    Args:
        module: its name.
        requirement: the argument of ``pip install`` that installs it.

    Raises:
        ImportError: it is not installed; the message gives the command.

    Example:
        >>> from bayesfed.data.optional import import_optional
        >>> import_optional("not_there.inside", "'bayesfed[all]'")
        Traceback (most recent call last):
        ImportError: not_there is not installed: pip install 'bayesfed[all]'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(f"{package} is not installed: pip install {requirement}") from error
