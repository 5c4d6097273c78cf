"""Parts of a program as code: numbers, and statements of Pyro."""

from collections.abc import Sequence

EXACT = 15
"""The digits of a mean, which is already rounded relative to the standard deviation."""


def over(code: str, scale: float) -> str:
    """Write a value divided by a number."""
    return code if scale == 1 else f"{code} / {number(scale)}"


def times(scale: float, code: str) -> str:
    """Write a number times a value."""
    return code if scale == 1 else f"{number(scale)} * {code}"


def sample(name: str, distribution: str | None) -> str:
    """Write a sample statement."""
    return f"pyro.sample({quoted(name)}, {distribution})"


def sample_named(name: str, distribution: str) -> str:
    """Write a sample statement whose value has the name of a derived quantity, as those with default priors have."""
    return named(name, sample(f"_prior|{name}", distribution))


def named(name: str, value: str) -> str:
    """Write a deterministic site."""
    return f"pyro.deterministic({quoted(name)}, {value})"


def number(value: float, digits: int = 7) -> str:
    """Write a number; seven digits are more than the precision of a sum of single-precision numbers."""
    return repr(float(f"{value:.{digits}g}"))


def numbers(values: Sequence[float], digits: int = 7) -> str:
    """Write a list of numbers."""
    return f"[{', '.join(number(value, digits) for value in values)}]"


def tensor(values: Sequence[float], digits: int = 7) -> str:
    """Write a tensor of numbers."""
    return f"torch.tensor({numbers(values, digits)})"


def quoted(text: str) -> str:
    """Write a text."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
