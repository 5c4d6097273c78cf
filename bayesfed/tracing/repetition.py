"""Operations on draws that repeat, computed once for the draws that do not.

A log density of many points of quadrature at each draw of θ has each draw many times: what depends on θ alone, such as
the Cholesky factor of a covariance, is the same for all points of a draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from bayesfed.tracing.dispatch_mode import DispatchMode
from bayesfed.tracing.recorder import places_written


class Repetition(DispatchMode):
    """While operations are recorded: compute those on draws of which all repeat once, and repeat the result.

    What no other operation reads of the repeated results is left out of the recording. Results are compared with those
    of the operation itself; where they differ, as those of a sum over draws do, that one is recorded.

    Attributes:
        once: S draws ``(S, ...)``.
        times: how often they are repeated.

    Example:
        >>> import torch
        >>> from bayesfed.tracing.recorder import Recorder
        >>> from bayesfed.tracing.repetition import Repetition
        >>> recorder, x, u = Recorder(), torch.ones(2, 1), torch.ones(6, 1)
        >>> with recorder.with_inputs([x, u]), Repetition(x, 3) as repetition:
        ...     y = repetition.repeated.exp() + u
        >>> [operation.target.__name__ for operation in recorder.recording([y]).operations]
        ['exp.default', 'repeat.default', 'add.Tensor']
    """

    def __init__(self, once: Tensor, times: int) -> None:
        super().__init__()
        self.once, self.times = once, times
        self._once = WeakTensorKeyDictionary()
        self._results: set[int] = set()  # their memory
        self.repeated = self._repeat(once)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation, on draws that do not repeat if all do.

        Raises:
            ValueError: it would change a repeated result, of which others may be views.
        """
        kwargs = kwargs or {}
        changed = [
            (args[i] if i < len(args) else kwargs.get(name)) for i, name in places_written(func)
        ]
        if any(_memory(x) in self._results for x in _tensors(changed)):
            raise ValueError(f"it changes what may be computed once for many draws ({func})")
        nothing = self.times == 1 or not func._schema.returns
        if nothing or not self._all_repeat((args, list(kwargs.values()))):
            return func(*args, **kwargs)
        try:
            found = func(*self._of_once(args), **{n: self._of_once(v) for n, v in kwargs.items()})
        except Exception:  # it has the number of draws among its arguments
            return func(*args, **kwargs)
        with _disable_current_modes():
            expected = func(*args, **kwargs)
        parts, wanted = ([x] if isinstance(x, Tensor) else list(x) for x in (found, expected))
        if not all(self._is_repeated(x, full) for x, full in zip(parts, wanted, strict=True)):
            return func(*args, **kwargs)
        results = [self._repeat(x) for x in parts]
        return results[0] if isinstance(found, Tensor) else type(expected)(results)

    def _repeat(self, once: Tensor) -> Tensor:
        repeated = once.repeat(self.times, *[1] * (once.ndim - 1))
        self._once[repeated] = once
        self._results.add(_memory(repeated))
        return repeated

    def _all_repeat(self, args: Any) -> bool:
        """Return whether a tensor repeats, and all others have no draws in front."""
        tensors = list(_tensors(args))
        draws = self.times * len(self.once)
        return any(x in self._once for x in tensors) and all(
            x in self._once or not x.ndim or len(x) != draws for x in tensors
        )

    def _of_once(self, arg: Any) -> Any:
        """Return an argument for the draws that do not repeat."""
        if isinstance(arg, Tensor):
            return self._once.get(arg, arg)
        if not isinstance(arg, list | tuple):
            return arg
        draws = self.times * len(self.once)
        return type(arg)(
            len(self.once)
            if i == 0 and type(part) is int and part == draws
            else self._of_once(part)
            for i, part in enumerate(arg)
        )

    def _is_repeated(self, once: Any, full: Any) -> bool:
        """Return whether a result is that of the draws once, repeated."""
        if not isinstance(once, Tensor) or not once.ndim or len(once) != len(self.once):
            return False
        with _disable_current_modes():
            repeated = once.repeat(self.times, *[1] * (once.ndim - 1))
            same = repeated.shape == full.shape and repeated.dtype == full.dtype
            return same and torch.allclose(repeated, full, rtol=1e-4, atol=0, equal_nan=True)


def _tensors(arg: Any) -> Sequence[Tensor]:
    """Return the tensors in arguments of an operation."""
    if isinstance(arg, Tensor):
        return [arg]
    return [x for part in arg for x in _tensors(part)] if isinstance(arg, list | tuple) else []


def _memory(x: Tensor) -> int:
    """Return the address of a tensor's numbers."""
    return x.untyped_storage()._cdata
