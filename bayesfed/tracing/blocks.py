"""Functions of many draws, run in blocks of draws that fit in the processor's cache, from their recorded operations.

Through Pyro's handlers a call takes milliseconds, so that it must have many draws to pay, and each of its operations
writes megabytes. A recorded function has the overhead of its operations alone, and can run in smaller blocks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesfed.tracing.compiler import agree, record, run_eagerly, tracing
from bayesfed.tracing.garbage import without_garbage_collection
from bayesfed.tracing.operations import Recording, as_function
from bayesfed.tracing.recorder import Recorder
from bayesfed.tracing.specialise import specialise
from bayesfed.tracing.structure import flatten

CACHE = 200_000
"""Numbers in the largest intermediate result of a block: most of a megabyte in single precision."""
EAGER = 1_000_000
"""The same where the function is not recorded."""
FEWEST = 4
"""The number of blocks from which a function is recorded: that takes as long as about two blocks without."""
MOST = 32
"""Recordings of one program that are kept."""


class Checked(NamedTuple):
    """A recording.

    Attributes:
        recording: it may be specialised to any numbers of the same shapes.
        checked: the operations of its specialisations that have been compared with the function itself.
    """

    recording: Recording
    checked: set[tuple[Any, ...]]


_recordings: dict[int, dict[Any, Checked | None]] = {}


@torch.no_grad()
def in_blocks(
    function: Callable[..., Any],
    program: Any,
    fixed: tuple[Any, ...],
    draws: Sequence[Tensor],
    numbers: int,
) -> list[Tensor]:
    """Compute a function of draws; draws do not depend on each other.

    Args:
        function: ``function(program, *fixed, *draws)``, a pure function of tensors. It returns a list of tensors of the
            same number of draws.
        program: a static argument, whose life is that of the recordings.
        fixed: arguments without draws, such as parameters and rows: what the structure module can flatten.
        draws: tensors with the same number of draws in front.
        numbers: of one draw in the largest intermediate result.

    Example:
        >>> import torch
        >>> from bayesfed.tracing.blocks import in_blocks
        >>> def density(program, loc, x):
        ...     return [-(x - loc).square().sum(-1) / 2]
        >>> class Program: ...
        >>> in_blocks(density, Program(), (torch.ones(3),), [torch.zeros(2, 3)], 3)
        [tensor([-1.5000, -1.5000])]
    """
    count, size = len(draws[0]), max(1, CACHE // numbers)
    on_cpu = draws[0].device.type == "cpu" and not torch.is_autocast_enabled("cpu")
    if on_cpu and count >= FEWEST * size and not tracing():
        in_order = [x.contiguous() for x in draws]
        graph = _recorded(function, program, fixed, in_order, size)
        if graph is not None:
            return _run(graph, in_order, size)
    size = min(count, max(1, EAGER // numbers))
    return _run(partial(function, program, *fixed), draws, size)


def _run(function: Callable[..., list[Tensor]], draws: Sequence[Tensor], size: int) -> list[Tensor]:
    """Run a function on blocks of ``size`` draws; the last one contains draws of the one before, if need be."""
    count, found = len(draws[0]), []
    for at in range(0, count, size):
        start = min(at, count - size)
        results = function(*[x[start : start + size] for x in draws])
        found.append([x[at - start :] for x in results])
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


def _recorded(
    function: Callable[..., Any],
    program: Any,
    fixed: tuple[Any, ...],
    draws: Sequence[Tensor],
    size: int,
) -> Callable[..., list[Tensor]] | None:
    """Return a function of blocks of draws from its recorded operations; None if it cannot be recorded."""
    if id(program) not in _recordings:
        _recordings[id(program)] = {}
        weakref.finalize(program, _recordings.pop, id(program), None)
    kept = _recordings[id(program)]
    tensors: list[Tensor] = []
    structure = flatten((*fixed, *[x[:size] for x in draws]), tensors)
    numbers = tensors[: -len(draws)]
    key = function, torch.get_num_threads(), structure
    if key not in kept and len(kept) >= MOST:
        kept.clear()
    run = partial(function, program), None, structure
    if key not in kept:
        kept[key] = _record(run, tensors)
    found = kept[key]
    if found is None:
        return None
    special = specialise(found.recording, {i: number.detach() for i, number in enumerate(numbers)})
    graph, operations = as_function(*special), tuple(one.target for one in special.operations)
    if operations not in found.checked:
        second = [x[-size:] for x in draws]
        if not agree(graph(*second), run_eagerly(run, [*numbers, *second]), 1e-3):
            kept[key] = None
            return None
        found.checked.add(operations)
    return graph


def _record(run: Any, tensors: Sequence[Tensor]) -> Checked | None:
    """Record a function; return None if its operations depend on numbers."""
    recorder = Recorder()
    try:
        with without_garbage_collection():
            results, _ = record(recorder, run, tensors)
            return Checked(recorder.recording(results), set())
    except Exception:  # the eager run raises the error, if it is one
        return None
