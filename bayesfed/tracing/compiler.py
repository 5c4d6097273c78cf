"""Steps of a round, each written down once as a flat graph of ATen operations, and compiled where that pays.

A step is a pure function of tensors: loss, gradients, optimiser. Run eagerly, each of its operations costs Python,
Pyro's handlers, autograd and a pass over memory. Traced, it is the list of its operations, without handlers and
autograd; compiled by Inductor, elementwise operations share their passes too. What differs from call to call must be
an argument: noise, rows, rates.

    @traceable
    def step(self, program, state, batch, noise, lr): ...

runs as it is written, unless a :class:`Compiler` is in use (:func:`bayesfed.fit` has one). Then there is a graph for
every combination of shapes; a float becomes an argument of the graph, what is neither tensor nor float a part of it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

import pyro
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from bayesfed.data.batch import Batch, Fields
from bayesfed.tracing.recorder import Recorder

P = ParamSpec("P")
R = TypeVar("R")
Mode = Literal["auto"] | bool

GRAPHS, TRACED = 16, 4
"""Compiled, and merely traced graphs of one function: where shapes differ more than that, the rest run eagerly."""
_OPERATION, _TRACED, _BYTES = 12e-6, 5e-6, 1.5e10
"""Seconds that an operation costs through Pyro and autograd, and in a graph that is run as it is; bytes a second."""
_COMPILING, _COMPILING_ONE = 20.0, 0.03
"""Seconds that Inductor takes for a graph at first, and for each of its operations."""
_LIBRARIES = (
    *tuple(module.__path__[0] for module in (torch, pyro)),
    str(Path(__file__).parents[1]),
    contextlib.__file__,
)

_active: ContextVar[Compiler | None] = ContextVar("compiler", default=None)
_recording: ContextVar[bool] = ContextVar("recording", default=False)
_inductor: ContextVar[bool] = ContextVar("for Inductor", default=False)


def traceable(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a pure function of tensors, which the :class:`Compiler` in use may trace and compile.

    Its arguments are positional: tensors, floats, and dicts, lists, named tuples and batches of them; whatever else is
    the same object at every call.

    Example:
        >>> import torch
        >>> from bayesfed.tracing.compiler import Compiler, traceable, using
        >>> @traceable
        ... def step(w, lr):
        ...     return w - lr * (2 * w)
        >>> with using(Compiler(mode=True)) as compiler:
        ...     for lr in (0.25, 0.5):
        ...         print(step(torch.ones(3), lr).tolist(), len(compiler.graphs))
        [0.5, 0.5, 0.5] 1
        [0.0, 0.0, 0.0] 1
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        compiler = _active.get()
        if compiler is None or kwargs:
            return function(*args, **kwargs)
        return compiler(function, args)

    return run


@contextmanager
def using(compiler: Compiler | None) -> Iterator[Compiler | None]:
    """Let a compiler run every :func:`traceable` function that is called in the block; None runs them eagerly."""
    token = _active.set(compiler)
    try:
        yield compiler
    finally:
        _active.reset(token)


def tracing() -> bool:
    """Whether a graph is being traced, so that no branch may depend on numbers."""
    return _recording.get()


def compiling() -> bool:
    """Whether it is traced for Inductor, which does best with long formulas of simple operations."""
    return _inductor.get()


@dataclass
class _Work:
    """What one call of a step costs, and how often it was called in the first round."""

    operations: int
    bytes: int
    calls: int = 0

    @property
    def small(self) -> bool:
        """Whether it is what operations cost each, not what they write, that takes the time."""
        return self.operations * _OPERATION > self.bytes / _BYTES

    @property
    def seconds(self) -> float:
        """In a round, traced where that is any use."""
        each = _TRACED if self.small else _OPERATION
        return self.calls * (self.operations * each + self.bytes / _BYTES)


@dataclass
class Compiler:
    """Traced and compiled steps of one run.

    Attributes:
        mode: True compiles every step at its first call, False runs all eagerly. ``"auto"`` takes what is cheapest by
            the operations of a step's first call and the bytes that they write: where operations cost more than what
            they write the graph is run as it is, and after the first round a step is compiled if the rest of the run
            would take it longer than that does. The count depends on shapes only, so a run always chooses alike.
        graphs: by function, what is static and shapes: the graph, or None where the function runs eagerly.
        seconds: spent on tracing and compiling.
        reason: what was chosen, and why.
        chosen: the names of the functions that ``"auto"`` compiles.
    """

    mode: Mode = "auto"
    graphs: dict[Any, Callable[..., Any] | None] = field(default_factory=dict)
    seconds: float = 0.0
    reason: str = ""
    chosen: set[str] = field(default_factory=set)
    _work: dict[Any, _Work] = field(default_factory=dict)
    _refused: dict[str, str] = field(default_factory=dict)

    def __call__(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        """The function's result."""
        if self.mode is False or tracing():
            return function(*args)
        tensors: list[Tensor] = []
        form = _form(tuple(args), tensors)
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        if device is not None:  # rates too: what a CUDA graph reads lies on its device
            tensors = [tensor.to(device) for tensor in tensors]
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return function(*args)  # a graph ends gradients
        key = function, torch.get_num_threads(), form
        if key not in self.graphs:
            started = time.perf_counter()
            compiles = self.mode is True or function.__qualname__ in self.chosen
            self.graphs[key] = (self._compiled if compiles else self._traced)(key, tensors)
            self.seconds += time.perf_counter() - started
        if key in self._work:
            self._work[key].calls += 1
        graph = self.graphs[key]
        return function(*args) if graph is None else graph(tensors)

    def decide(self, rounds: int) -> None:
        """After the first round: what to compile for the ``rounds`` that are left."""
        if self.mode != "auto":
            return
        total = 0.0
        for function in {key[0] for key in self._work}:
            works = [work for key, work in self._work.items() if key[0] is function]
            seconds = rounds * sum(work.seconds for work in works)
            total += seconds
            if seconds > _COMPILING + _COMPILING_ONE * max(work.operations for work in works):
                self.chosen.add(function.__qualname__)
        traced = any(self.graphs.values())
        self.graphs = {k: v for k, v in self.graphs.items() if k[0].__qualname__ not in self.chosen}
        chosen = "compiled" if self.chosen else "traced" if traced else "eager"
        about = f"about {total:.0f} s of work" if total >= 1 else "less than a second of work"
        self.reason = f"{chosen}: {about}"

    def __str__(self) -> str:
        made = sum(graph is not None for graph in self.graphs.values())
        return (
            f"{self.reason or 'compiled'}, {made} graphs in {self.seconds:.0f} s"
            if made
            else self.reason
        )

    def _traced(self, key: Any, tensors: list[Tensor]) -> Callable[[list[Tensor]], Any] | None:
        """The graph as it is, checked at its second call: at other numbers than those that it was traced with.

        Of shapes beyond the first few the function itself, run as if it were traced: whichever shapes came first, the
        numbers are the same.
        """
        if self._too_many(key, TRACED):
            others = [graph for other, graph in self.graphs.items() if other[0] is key[0]]
            return None if None in others else functools.partial(_as_if_traced, key)
        recorder = Recorder()
        try:
            with _uncollected():
                results, form = _recorded(recorder, key, tensors)
                graph = recorder.function(results)
        except Exception:  # not to be traced, or wrong: run eagerly it will say what it is
            return None
        finally:
            self._work[key] = _Work(recorder.operations, recorder.bytes)
        if not self._work[key].small:
            return None
        calls = 0

        def run(tensors: list[Tensor]) -> Any:
            nonlocal calls
            calls += 1
            with torch.no_grad():
                found = graph(*tensors)
            if calls == 2 and not _agree(found, expected := _eager(key, tensors), 1e-3):
                why = "what it does depends on more than its arguments"
                self._refuse(key[0].__qualname__, why)
                self.graphs[key] = None
                found = expected
            return _filled(form, iter(found))

        return run

    def _compiled(self, key: Any, tensors: list[Tensor]) -> Callable[[list[Tensor]], Any] | None:
        """The graph as Inductor makes it, checked at once."""
        name = key[0].__qualname__
        if name in self._refused:
            return None
        if self._too_many(key, GRAPHS):
            shapes = f"its shapes differ too much from call to call ({GRAPHS} graphs are made)"
            self._refuse(name, shapes)
            return None
        try:
            recorder = Recorder()
            with _uncollected(), _set(_inductor):
                expected, form = _recorded(recorder, key, tensors)
                graph = recorder.graph(expected)
        except Exception as error:  # whatever a model may do that cannot be traced
            self._refuse(name, _where(error))
            return None
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Inductor's, at itself
                from bayesfed.tracing import inductor  # seconds to import

                compiled = inductor.compiled(graph, tensors)
                found = compiled(*tensors)
        except Exception as error:  # no C++ compiler, or an operation that Inductor lacks
            self._refuse(name, f"Inductor could not compile it: {_first_line(error)}")
            return None
        lowered = torch.is_autocast_enabled(tensors[0].device.type)
        if not _agree(found, expected, 0.05 if lowered else 1e-3):
            self._refuse(name, "what Inductor made of it gives other numbers")
            return None

        def run(tensors: list[Tensor]) -> Any:
            with torch.no_grad():
                return _filled(form, iter(compiled(*tensors)))

        return run

    def _too_many(self, key: Any, most: int) -> bool:
        return sum(other[0] is key[0] for other in self.graphs) >= most

    def _refuse(self, name: str, why: str) -> None:
        if why not in self._refused.values():  # several steps of a model meet the same obstacle
            warnings.warn(f"{name} runs eagerly: {why}", stacklevel=2)
        self._refused[name] = why


def _recorded(recorder: Recorder, key: Any, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
    """The results of a function at these tensors, whose operations are noted, and their form."""
    # a tensor that is given twice must not become one input: at the next call it may be two
    inputs = [tensor.detach() for tensor in tensors]
    with _set(_recording), recorder.of(inputs):
        return _flat(key, inputs)


@contextmanager
def _uncollected() -> Iterator[None]:
    """No search for garbage while thousands of objects are made that are all needed: it takes as long as all else."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@contextmanager
def _set(flag: ContextVar[bool]) -> Iterator[None]:
    token = flag.set(True)
    try:
        yield
    finally:
        flag.reset(token)


def _as_if_traced(key: Any, tensors: Sequence[Tensor]) -> Any:
    with _set(_recording):
        found, form = _flat(key, tensors)
    return _filled(form, iter(found))


def _eager(key: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
    with using(None):
        return _flat(key, tensors)[0]


def _flat(key: Any, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
    """A function's results as a list, and their form."""
    function, _, form = key
    found: list[Tensor] = []
    with torch.enable_grad(), pyro.validation_enabled(False), _SameStorage():
        made = _form(function(*_filled(form, iter(tensors))), found)
    return [x.detach() for x in found], made


class _SameStorage(TorchFunctionMode):
    """``torch.equal`` as whether both are the same numbers in memory: GPyTorch's kernels ask it to save work."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not torch.equal:
            return func(*args, **(kwargs or {}))
        one, other = ((x.data_ptr(), x.shape, x.stride()) for x in args)
        return one == other


class _Same:
    """An argument that must be the same object for a graph to be of use."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _form(value: Any, tensors: list[Tensor]) -> Any:
    """What a graph depends on: nesting, shapes and whatever is no tensor. The tensors are appended to ``tensors``.

    A float is a tensor without dimensions.
    """
    kind = type(value)
    if isinstance(value, Tensor):
        tensors.append(value)
        return Tensor, value.shape, value.stride(), value.dtype, value.device
    if kind is float:
        return _form(torch.tensor(value, dtype=torch.float64), tensors)
    if kind is dict or kind is Fields:
        return kind, tuple(value), *[_form(v, tensors) for v in value.values()]
    if kind is Batch:
        return kind, *[_form(v, tensors) for v in vars(value).values()]
    if issubclass(kind, list | tuple):
        return kind, *[_form(v, tensors) for v in value]
    if kind in (int, bool, str, type(None)):
        return kind, value
    return _Same, _Same(value)


def _filled(form: Any, tensors: Iterator[Tensor]) -> Any:
    """A value of that form, with these tensors."""
    kind, *parts = form
    if kind is Tensor:
        return next(tensors)
    if kind is dict or kind is Fields:
        return kind(zip(parts[0], [_filled(part, tensors) for part in parts[1:]], strict=True))
    if kind is list or kind is tuple:
        return kind([_filled(part, tensors) for part in parts])
    if kind is Batch or issubclass(kind, tuple):
        return kind(*[_filled(part, tensors) for part in parts])
    return parts[0].value if kind is _Same else parts[0]


def _agree(found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> bool:
    """Whether tensors are alike to a fraction of the largest of each, or to round-off of the largest of all."""
    floats = [b for b in expected if b.is_floating_point() and b.numel()]
    largest = max((_size(b) for b in floats), default=0.0)
    for a, b in zip(found, expected, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if b.is_floating_point() and b.numel():
            atol = max(tolerance * _size(b), 100 * torch.finfo(b.dtype).eps * largest)
            if not torch.allclose(a, b, rtol=tolerance, atol=atol, equal_nan=True):
                return False
        elif not torch.equal(a, b):
            return False
    return True


def _size(x: Tensor) -> float:
    return float(x.abs().nan_to_num(0, 0).max())


def users_frames(error: Exception) -> list[traceback.FrameSummary]:
    """The places that an error passed through which are neither of this package nor of what it stands on."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]


def _where(error: Exception) -> str:
    """The line of the user's that an error comes from, and what it says."""
    theirs = [frame for frame in users_frames(error) if frame.line]
    if theirs:
        frame = theirs[-1]
        place = f"{Path(frame.filename).name}, line {frame.lineno}, cannot be traced ({frame.line})"
    else:
        place = "it cannot be traced"
    return f"{place}: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
