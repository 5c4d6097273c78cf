"""Exceptions as one line of text."""

from __future__ import annotations


class RunError(Exception):
    """A run that ended early, with the exit code that says how."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def one_line(error: BaseException) -> str:
    r"""Return an exception as one line.

    Example:
        >>> from bayesfed.cli.errors import one_line
        >>> one_line(ValueError("x is 3,\n  which is too much")), one_line(AssertionError("no"))
        ('x is 3, which is too much', 'AssertionError: no (--debug shows where)')
    """
    ours = isinstance(
        error, ValueError | KeyError | TypeError | FloatingPointError | ImportError | RunError
    )
    text = str(error)
    if isinstance(error, KeyError) and error.args:
        text = str(error.args[0])
    elif isinstance(error, OSError) and error.strerror:
        ours = True
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    text = " ".join(text.split("Trace Shapes:")[0].split())  # Pyro appends a table to messages
    if ours and text:
        return text
    return f"{type(error).__name__}: {text} (--debug shows where)"
