"""Comparisons of tensors and states in the check of algorithms, and errors that name the part to blame."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

T = TypeVar("T")


def label(part: Any) -> str:
    """Return the name of a part's class."""
    return type(part).__name__


def guarded(part: Any, member: str, call: Callable[[], T], advice: str = "") -> T:
    """Return what a call returns; an exception names the member."""
    try:
        return call()
    except Exception as error:
        raise AssertionError(
            f"{label(part)}.{member} fails{advice}: {type(error).__name__}: {error}"
        ) from error


def call_pure(part: Any, member: str, arguments: tuple[Any, ...], **given: Any) -> Any:
    """Return what a member returns, once it has returned the same twice and left alone what it is given."""
    before = tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, given)
    method = getattr(part, member)
    first = guarded(part, member, lambda: method(*arguments))
    for name, value in given.items():
        if (difference := describe_difference(before[name], value, exact=True)) is not None:
            raise AssertionError(
                f"{label(part)}.{member} changes {name}, which it is given ({difference}): return new tensors"
            )
    again = guarded(part, member, lambda: method(*arguments))
    if (difference := describe_difference(first, again, exact=True)) is not None:
        raise AssertionError(
            f"{label(part)}.{member} gives something else when it is called again ({difference}): it keeps a state of "
            "its own, or draws from a global generator. States belong to the server (start, decode) or the clients "
            "(start_clients, run, encode), and noise comes from the keys of the job or turn"
        )
    return first


def check_rows(part: Any, member: str, what: str, values: Any, clients: int) -> None:
    """Fail unless all values are tensors with a row for each client."""
    for path, value in tree_flatten_with_path(values)[0]:
        if not isinstance(value, Tensor) or value.shape[:1] != (clients,):
            shown = tuple(value.shape) if isinstance(value, Tensor) else repr(value)
            raise AssertionError(
                f"{label(part)}.{member}: {what}{keystr(path)} is {shown}; it must be a tensor ({clients}, ...) of "
                "a row for each client"
            )


def check_close(part: Any, member: str, whole: Any, alone: Any, some: Tensor) -> None:
    """Fail unless clients in a batch have, to round-off, what they have by themselves."""
    if (
        difference := describe_difference(tree_map(lambda v: v[some], whole), alone, exact=False)
    ) is not None:
        raise AssertionError(
            f"{label(part)}.{member}: what a client gets depends on the others in its batch, or on their order "
            f"({difference}); only the sum over the clients may bring them together, in decode"
        )


def describe_difference(one: Any, other: Any, *, exact: bool | None = None) -> str | None:
    """Return the first difference in words, None where there is none.

    Args:
        one: nested tensors.
        other: the same.
        exact: compare numbers bit by bit, or to round-off; None compares names, shapes and types only.
    """
    (before, tree), (after, other_tree) = map(tree_flatten_with_path, (one, other))
    if tree != other_tree:
        names, others = ([keystr(path) for path, _ in leaves] for leaves in (before, after))
        return f"{names} against {others}"
    for (path, a), (_, b) in zip(before, after, strict=True):
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            if type(a) is not type(b) or (exact is not None and a != b):
                return f"{keystr(path)} is {a!r} against {b!r}"
        elif (a.shape, a.dtype) != (b.shape, b.dtype):
            return (
                f"{keystr(path)} is {tuple(a.shape)} {a.dtype} against {tuple(b.shape)} {b.dtype}"
            )
        elif exact is not None and (worst := distance(a, b)) > (0.0 if exact else tolerance(a)):
            return f"{keystr(path)} differs by {worst:.3g}"
    return None


def distance(a: Tensor, b: Tensor) -> float:
    """Return the largest difference, infinite where one of two numbers is not finite."""
    distance = (a.double() - b.double()).abs()
    same = (a == b) | (a.isnan() & b.isnan())
    return (
        float(torch.where(same, 0.0, distance.nan_to_num(nan=torch.inf)).amax())
        if a.numel()
        else 0.0
    )


def tolerance(value: Tensor) -> float:
    """Return what round-off may make of a tensor's numbers."""
    if not value.is_floating_point():
        return 0.0
    largest = float(value.detach().abs().nan_to_num().amax()) if value.numel() else 0.0
    return float(torch.finfo(value.dtype).eps ** 0.5) * max(1.0, largest)


def finite(values: Any) -> bool:
    """Return whether no number is infinite or NaN."""
    leaves = [leaf for _, leaf in tree_flatten_with_path(values)[0]]
    return all(bool(leaf.isfinite().all()) for leaf in leaves if isinstance(leaf, Tensor))
