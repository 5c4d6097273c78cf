"""A user's own code that an experiment file names: models, guides, and parts of algorithms."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.utils._pytree import tree_map

from bayesfed.algorithms.registry import own_files
from bayesfed.cli import report
from bayesfed.settings import SettingsError, nearest


def load_function(reference: str, base: Path, where: str) -> Any:
    """Return the function that ``file.py:function`` names, such as a model or a guide.

    Args:
        reference: the file, relative to ``base``, and the function.
        base: the folder of the experiment file.
        where: the dotted key, for messages.

    Raises:
        SettingsError: there is no such file or function, or the file cannot be imported.
    """
    path, name = _path(reference, base, where)
    module = sys.modules.get(path.stem)
    if module is None or not _is_of(module, path):
        module = _execute(path, where)
    found = _member(module, name, where, path)
    if not callable(found):
        raise SettingsError(f"{where}: {name!r} in {path} is {found!r}, not a function")
    return found


def load_part(reference: str, base: Path, where: str) -> Any:
    """Return what ``file.py:name`` or ``module:name`` names: a part's class, or an algorithm.

    The file is imported once, as the module of its stem, in which checkpoints find the part by ``module:name``.

    Args:
        reference: the file, relative to ``base``, or an installed module; and the name in it.
        base: the folder of the experiment file.
        where: the dotted key, for messages.

    Raises:
        SettingsError: there is no such file, module or name; the file cannot be imported; or another module has its
            name.
    """
    file, _, name = reference.rpartition(":")
    if not file.endswith(".py"):
        try:
            module = importlib.import_module(file)
        except ImportError as error:
            raise SettingsError(
                f'{where}: {error}; a part in a file is "file.py:{name}"'
            ) from error
        return _member(module, name, where, file)
    path, name = _path(reference, base, where)
    known = sys.modules.get(path.stem)
    if known is None:
        known = _execute(path, where, register=True)
    elif not _is_of(known, path):
        raise SettingsError(
            f"{where}: {path} cannot be imported as the module {path.stem!r}, which is "
            f"{getattr(known, '__file__', None) or 'a part of Python'} already: give the file another name"
        )
    return _member(known, name, where, path)


def with_files(settings: Any, folder: Path) -> Any:
    """Return plain settings in which the parts in files are named by their files, as seen from a folder."""
    names = {}
    for reference, file in own_files(settings).items():
        module, _, name = reference.partition(":")
        if "." not in module:  # else it is a package's, which is installed
            names[reference] = f"{report.relative(file, folder)}:{name}"
    return tree_map(lambda value: names.get(value, value), settings)


def _path(reference: str, base: Path, where: str) -> tuple[Path, str]:
    """Return the file and the name that a reference names."""
    file, _, name = reference.rpartition(":")
    path = base / file
    if not path.is_file():
        raise SettingsError(f"{where}: there is no file {path}")
    return path, name


def _is_of(module: ModuleType, path: Path) -> bool:
    """Return whether a module was imported from a file."""
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).resolve() == path.resolve()


def _execute(path: Path, where: str, *, register: bool = False) -> ModuleType:
    """Return a file as a module.

    While it runs it is in ``sys.modules``, where dataclasses look up the module of their class, unless another has its
    name; it remains there if ``register``.
    """
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    if spec is None or spec.loader is None:
        raise SettingsError(f"{where}: {path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    free = path.stem not in sys.modules
    if free:
        sys.modules[path.stem] = module
    sys.path.insert(0, str(path.resolve().parent))  # for what lies beside it
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        register = False
        raise SettingsError(
            f"{where}: {path} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    finally:
        sys.path.pop(0)
        if free and not register:
            del sys.modules[path.stem]
    return module


def _member(module: ModuleType, name: str, where: str, file: Path | str) -> Any:
    """Return a member of a module."""
    if hasattr(module, name):
        return getattr(module, name)
    own = [
        n
        for n, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", None) == module.__name__
    ]
    raise SettingsError(
        f"{where}: {file} has no {name!r}; {nearest(name, own)}it has {', '.join(own) or 'no functions or classes'}"
    )
