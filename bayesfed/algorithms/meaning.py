"""What the fields of a class mean, as its docstring says: for the help on methods, and for the command line."""

import inspect
import re
from functools import cache


@cache
def meanings(cls: type[object]) -> dict[str, str]:
    """Return the documentation of a class's attributes by name, inherited ones where they are defined.

    Example:
        >>> from bayesfed.algorithms.meaning import meanings
        >>> from bayesfed.steps import GradientsAtDraws
        >>> meanings(GradientsAtDraws)["local_lr"]
        "Adam's rate for the clients' parameters."
    """
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        _, _, section = (inspect.getdoc(base) or "").partition("Attributes:\n")
        section = section.split("\n\n")[0]
        entries = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", section, flags=re.MULTILINE)
        found |= {name: plain(text) for name, text in entries}
    return found


def plain(text: str) -> str:
    """Return text of a docstring on one line, without Sphinx markup."""
    return re.sub(r":\w+:`~?([^`]*)`", r"\1", " ".join(text.split())).replace("``", "")
