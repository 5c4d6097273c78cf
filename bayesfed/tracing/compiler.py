"""Tracing of the steps of a round to flat graphs of ATen operations, and compilation where it saves time.

A step is a pure function of tensors: loss, gradients, optimiser. Run eagerly, each of its operations pays for Python,
Pyro's handlers, autograd and a pass over memory. A traced step is the list of its operations, without handlers and
autograd; compiled by Inductor, elementwise operations share their passes too. Everything that differs from call to
call must be an argument: noise, rows, rates.

    @traceable
    def step(self, program, state, batch, noise, lr): ...

runs eagerly, unless a :class:`Compiler` is in use (:func:`bayesfed.fit` has one). Then there is a graph for every
combination of shapes. A float becomes an argument of the graph; a value that is neither tensor nor float is a constant
of it.
"""

from __future__ import annotations

import contextlib
import functools
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

from bayesfed.tracing.garbage import without_garbage_collection
from bayesfed.tracing.recorder import Recorder
from bayesfed.tracing.replacements import Replacements
from bayesfed.tracing.structure import flatten, unflatten

P = ParamSpec("P")
R = TypeVar("R")
Mode = Literal["auto"] | bool

GRAPHS, TRACED = 16, 4
"""The most graphs of one function, compiled or only traced; for further shapes the function runs eagerly."""
_OPERATION, _TRACED, _BYTES = 12e-6, 5e-6, 1.5e10
"""Seconds per operation through Pyro and autograd, seconds per operation of a traced graph, bytes per second."""
_COMPILING, _COMPILING_ONE = 20.0, 0.03
"""Seconds that Inductor takes to start, and for each operation of a graph."""
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

    Its arguments are positional: tensors, floats, and dicts, lists, named tuples and batches of them; any other
    argument must be the same object at every call.

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
    """Return whether a graph is being traced, so that no branch may depend on numbers."""
    return _recording.get()


def compiling() -> bool:
    """Return whether a graph is being traced for Inductor, which compiles long formulas of simple operations best."""
    return _inductor.get()


@dataclass
class _Cost:
    """The cost of one call of a step, and the number of its calls in the first round."""

    operations: int
    bytes: int
    calls: int = 0

    @property
    def small(self) -> bool:
        """True if the overhead of the operations exceeds a quarter of the time to write their results."""
        return 4 * self.operations * _OPERATION > self.bytes / _BYTES

    @property
    def seconds(self) -> float:
        """The time of all calls in a round, traced if that saves time."""
        each = _TRACED if self.small else _OPERATION
        return self.calls * (self.operations * each + self.bytes / _BYTES)


@dataclass
class Compiler:
    """Traced and compiled steps of one run.

    Attributes:
        mode: True compiles every step at its first call, False runs all eagerly. ``"auto"`` estimates costs from the
            number of operations in a step's first call and the bytes that they write. If the overhead of the operations
            exceeds a quarter of the time to write their results, the traced graph is run. After the first round a step
            is compiled if the rest of the run would take longer than the compilation. These counts depend on shapes
            only, so the same run always makes the same choice.
        graphs: (function, threads, structure of the arguments) to graph, or None if the function runs eagerly.
        seconds: time spent on tracing and compiling.
        reason: the choice and its reason, for reports.
        chosen: the names of the functions that ``"auto"`` compiles.
    """

    mode: Mode = "auto"
    graphs: dict[Any, Callable[..., Any] | None] = field(default_factory=dict)
    seconds: float = 0.0
    reason: str = ""
    chosen: set[str] = field(default_factory=set)
    _work: dict[Any, _Cost] = field(default_factory=dict)
    _refused: dict[str, str] = field(default_factory=dict)

    def __call__(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Return the function's result, by a graph where there is one."""
        if self.mode is False or tracing():
            return function(*args)
        tensors: list[Tensor] = []
        structure = flatten(tuple(args), tensors)
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        if device is not None:  # rates too: a CUDA graph reads only from its device
            tensors = [tensor.to(device) for tensor in tensors]
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return function(*args)  # gradients do not flow through a graph
        key = function, torch.get_num_threads(), structure
        if key not in self.graphs:
            started = time.perf_counter()
            compiles = self.mode is True or function.__qualname__ in self.chosen
            self.graphs[key] = (self._compile if compiles else self._trace)(key, tensors)
            self.seconds += time.perf_counter() - started
        if key in self._work:
            self._work[key].calls += 1
        graph = self.graphs[key]
        return function(*args) if graph is None else graph(tensors)

    def decide(self, rounds: int) -> None:
        """Choose the functions to compile, after the first round, for the remaining ``rounds``."""
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

    def _trace(self, key: Any, tensors: list[Tensor]) -> Callable[[list[Tensor]], Any] | None:
        """Return the traced graph, which is checked at its first call, and at its second, with other numbers.

        For shapes beyond the first few, return the function itself, run as if it were traced, so that the numbers do
        not depend on which shapes came first.
        """
        if self._too_many(key, TRACED):
            others = [graph for other, graph in self.graphs.items() if other[0] is key[0]]
            return None if None in others else functools.partial(_run_as_if_traced, key)
        recorder = Recorder()
        try:
            with without_garbage_collection():
                results, structure = record(recorder, key, tensors)
                graph = recorder.function(results)
        except Exception:  # it cannot be traced, or is wrong: the eager run raises the error
            return None
        finally:
            self._work[key] = _Cost(recorder.operations, recorder.bytes)
        if not self._work[key].small:
            return None
        checks: list[tuple[str, Callable[[list[Tensor]], list[Tensor]]]] = [
            ("its result depends on more than its arguments", functools.partial(run_eagerly, key)),
            ("its traced graph gives other numbers", lambda _: results),
        ]

        def run(tensors: list[Tensor]) -> Any:
            with torch.no_grad():
                found = graph(*tensors)
            if checks:
                why, run_otherwise = checks.pop()
                if not agree(found, expected := run_otherwise(tensors), 1e-3):
                    self._refuse(key[0].__qualname__, why)
                    self.graphs[key] = None
                    found = expected
            return unflatten(structure, iter(found))

        return run

    def _compile(self, key: Any, tensors: list[Tensor]) -> Callable[[list[Tensor]], Any] | None:
        """Return the graph compiled by Inductor, which is checked at once."""
        name = key[0].__qualname__
        if name in self._refused:
            return None
        if self._too_many(key, GRAPHS):
            shapes = f"its shapes differ too much from call to call ({GRAPHS} graphs are made)"
            self._refuse(name, shapes)
            return None
        try:
            recorder = Recorder()
            with without_garbage_collection(), _switched_on(_inductor):
                expected, structure = record(recorder, key, tensors)
                graph = recorder.graph(expected)
        except Exception as error:  # a model may do anything that cannot be traced
            self._refuse(name, _describe_location(error))
            return None
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Inductor's own warnings
                from bayesfed.tracing import inductor  # seconds to import

                compiled = inductor.compile_graph(graph, tensors)
                found = compiled(*tensors)
        except Exception as error:  # no C++ compiler, or an operation that Inductor lacks
            self._refuse(name, f"Inductor could not compile it: {_first_line(error)}")
            return None
        lowered = torch.is_autocast_enabled(tensors[0].device.type)
        if not agree(found, expected, 0.05 if lowered else 1e-3):
            self._refuse(name, "the graph compiled by Inductor gives other numbers")
            return None

        def run(tensors: list[Tensor]) -> Any:
            with torch.no_grad():
                return unflatten(structure, iter(compiled(*tensors)))

        return run

    def _too_many(self, key: Any, most: int) -> bool:
        """Return whether a function has as many graphs as it may have."""
        return sum(other[0] is key[0] for other in self.graphs) >= most

    def _refuse(self, name: str, why: str) -> None:
        """Warn, once for each reason, that a function runs eagerly."""
        if why not in self._refused.values():  # several steps may fail for the same reason
            warnings.warn(f"{name} runs eagerly: {why}", stacklevel=2)
        self._refused[name] = why


def record(recorder: Recorder, key: Any, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
    """Run a function on these tensors, record its operations, and return its results and their structure."""
    # a tensor given twice must be two inputs: at the next call there may be two tensors
    inputs = [tensor.detach() for tensor in tensors]
    with _switched_on(_recording), recorder.with_inputs(inputs):
        return _run_flat(key, inputs)


@contextmanager
def _switched_on(flag: ContextVar[bool]) -> Iterator[None]:
    """Set a flag for the block."""
    token = flag.set(True)
    try:
        yield
    finally:
        flag.reset(token)


def _run_as_if_traced(key: Any, tensors: Sequence[Tensor]) -> Any:
    """Run a function with the branches that it takes while it is traced."""
    with _switched_on(_recording):
        found, structure = _run_flat(key, tensors)
    return unflatten(structure, iter(found))


def run_eagerly(key: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Run a function without any graph, its own steps included."""
    with using(None):
        return _run_flat(key, tensors)[0]


def _run_flat(key: Any, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
    """Run a function and return its results as a list, and their structure."""
    function, _, structure = key
    found: list[Tensor] = []
    with torch.enable_grad(), pyro.validation_enabled(False), Replacements():
        made = flatten(function(*unflatten(structure, iter(tensors))), found)
    return [x.detach() for x in found], made


def agree(found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> bool:
    """Compare tensors up to a fraction of each one's largest number, or round-off of the largest of all.

    Numbers that are not finite are left out: simplified operations may avoid an overflow.
    """
    floats = [b for b in expected if b.is_floating_point() and b.numel()]
    largest = max((_largest(b) for b in floats), default=0.0)
    for a, b in zip(found, expected, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if b.is_floating_point() and b.numel():
            atol = max(tolerance * _largest(b), 100 * torch.finfo(b.dtype).eps * largest)
            finite = b.isfinite()
            if not torch.allclose(a[finite], b[finite], rtol=tolerance, atol=atol):
                return False
        elif not torch.equal(a, b):
            return False
    return True


def _largest(x: Tensor) -> float:
    """Return the largest finite absolute value."""
    return float(x.abs().nan_to_num(0, 0).max())


def users_frames(error: Exception) -> list[traceback.FrameSummary]:
    """Return the frames of an error's traceback that are outside this package, Pyro and torch."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]


def _describe_location(error: Exception) -> str:
    """Name the line of the user's code that an error comes from, with the error's message."""
    frames = [frame for frame in users_frames(error) if frame.line]
    if frames:
        frame = frames[-1]
        place = f"{Path(frame.filename).name}, line {frame.lineno}, cannot be traced ({frame.line})"
    else:
        place = "it cannot be traced"
    return f"{place}: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
