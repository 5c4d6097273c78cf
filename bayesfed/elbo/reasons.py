"""What stops a program, in the words of those who wrote it: the line, what is the matter, what to write instead."""

from __future__ import annotations

import linecache
import re
import textwrap
from pathlib import Path
from types import TracebackType

import pyro
import torch

_OURS = Path(__file__).parents[1]
_LIBRARIES = tuple(str(Path(package.__file__ or "").parent) for package in (pyro, torch))
_REASONS = {
    r"data-dependent control flow|\.item\(\)|Boolean value of Tensor": (
        "it asks for the value of a tensor (if, while, float(...), .item()), of which there is one for each draw and "
        "each client. Write torch.where(condition, a, b), or keep to tensors"
    ),
    r"in-?place|overwrite": (
        "it writes into a tensor. Collect the parts in a list and take torch.stack(parts)"
    ),
    r"random(ness)? ": (
        "it draws numbers of its own. Sample them with pyro.sample, or give them as data"
    ),
    r"used as indices must be": (
        'an index must be whole numbers: effect[obs["kind"].long()], see docs/first_model.md, "Categories"'
    ),
    r"out of (bounds|range)": (
        "an index is larger than what it is to index: categories count from 0, and a variable needs an entry for each"
    ),
    r"size|shape|broadcast|dim": (
        "shapes do not fit. A variable outside `with federation.clients()` has the shape of its distribution, one "
        "inside (1, 1) in front of it, for one client and its rows, and a field (1, rows): "
        'obs["x"] @ beta, (w * obs["x"]).sum(-1)'
    ),
}
"""By what an error of torch or Pyro says."""
LONG = 160


def explained(error: Exception, name: str) -> Exception:
    """The error of a program as one that names its line; our own as they are.

    Args:
        error: as it was raised.
        name: of the program.
    """
    frames = list(_frames(error.__traceback__))
    theirs = [frame for frame in frames if not _within(frame[0])]
    if not theirs or Path(frames[-1][0]).is_relative_to(_OURS):
        return error
    file, number = theirs[-1]
    line = linecache.getline(file, number).strip()
    said = textwrap.shorten(str(error).split("\n")[0], LONG, placeholder=" ...")
    reason = next((text for what, text in _REASONS.items() if re.search(what, said, re.I)), "")
    where = f"model {name!r}, line {number}" + (f", `{line}`" if line else "")
    return ValueError(f"{where}: {reason} ({said})" if reason else f"{where}: {said}")


def _frames(traceback: TracebackType | None) -> list[tuple[str, int]]:
    found = []
    while traceback is not None:
        found.append((traceback.tb_frame.f_code.co_filename, traceback.tb_lineno))
        traceback = traceback.tb_next
    return found


def _within(file: str) -> bool:
    """Whether a file is of this package or of what it stands on."""
    path = Path(file)
    return path.is_relative_to(_OURS) or file.startswith(_LIBRARIES) or "contextlib" in path.name
