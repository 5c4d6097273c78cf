"""A device that computes on the CPU and is as strict as a GPU, for tests on machines without one.

Its tensors report the device ``pretend:0`` and hold a tensor on the CPU. As on a GPU, an operation on tensors of two
devices raises an error, and so does :meth:`torch.Tensor.numpy`. PyTorch has exceptions, and so has this device: copies,
tensors without dimensions on the CPU, and indices on the CPU into a tensor of the device. After an index out of range
the device cannot be used, as a GPU cannot. Operations run at once, without the asynchronous execution of a GPU.
Compiled steps and CUDA graphs are left to ``tests/test_gpu.py``.
"""

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._mode_utils import no_dispatch

aten = torch.ops.aten
AVAILABLE = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
NAME = "pretend"

_COPIES = {aten.copy_.default, aten._to_copy.default}
_INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
_INDEXED |= {aten._index_put_impl_.default, aten._unsafe_index.Tensor}


class OnDevice(Tensor):
    """A tensor of the device, ``held`` on the CPU."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, real: Tensor) -> "OnDevice":
        found = Tensor._make_wrapper_subclass(
            cls,
            real.shape,
            strides=real.stride(),
            storage_offset=real.storage_offset(),
            dtype=real.dtype,
            device=torch.device(NAME, 0),
        )
        found.held = real
        return found

    def __repr__(self) -> str:
        return f"{self.held!r}, on {NAME}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = self.detach().clone().requires_grad_(self.requires_grad)
        memo[id(self)] = copied
        return copied

    def tolist(self) -> Any:
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute an operation on the CPU and return tensors of the device, if it is one of the device.

    Raises:
        RuntimeError: tensors are on two devices, and PyTorch has no exception for the operation.
    """
    if _BROKEN:
        raise RuntimeError(f"device-side assert triggered: {_BROKEN[0]}")
    if func is aten._efficientzerotensor.default:  # it has no memory, and needs another dispatch
        func = aten.zeros.default
    if func not in _COPIES:
        _check_devices(func, args, kwargs)
    asked = kwargs.get("device")
    given = {**kwargs, "device": torch.device("cpu")} if asked is not None else kwargs
    try:
        results = func(*_on_cpu(args), **{name: _on_cpu(value) for name, value in given.items()})
    except (IndexError, RuntimeError) as error:
        if re.search("out of (bounds|range)", str(error)):
            _BROKEN.append(str(error))
        raise
    if torch.Tag.inplace_view in func.tags and isinstance(args[0], OnDevice):
        with no_dispatch():  # the shape of the tensor that holds it
            func(*args, **kwargs)
    if func._schema.is_mutable:
        return _written(func, args, kwargs, results)
    if asked is not None and torch.device(asked).type == "cpu":
        return results
    return _on_device(results)


def _on_cpu(value: Any) -> Any:
    """Return an argument with the tensors on the CPU in place of those of the device."""
    if isinstance(value, OnDevice):
        return value.held
    return type(value)(map(_on_cpu, value)) if type(value) in (list, tuple) else value


def _on_device(result: Any) -> Any:
    """Return a result with tensors of the device in place of those on the CPU."""
    if type(result) is Tensor:
        return OnDevice(result)
    return type(result)(map(_on_device, result)) if type(result) in (list, tuple) else result


def _check_devices(func: Any, args: Any, kwargs: Any) -> None:
    if func in _INDEXED:
        indexed, indices, *values = args
        if not isinstance(indexed, OnDevice) and any(isinstance(i, OnDevice) for i in indices):
            raise RuntimeError(
                "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
            )
        args, kwargs = (indexed, *values), {}
    tensors = list(_tensors((args, tuple(kwargs.values()))))
    elsewhere = [x for x in tensors if not isinstance(x, OnDevice) and x.ndim > 0]
    changed = func._schema.is_mutable and isinstance(args[0], Tensor)
    if changed and not isinstance(args[0], OnDevice):
        elsewhere.append(args[0])
    if elsewhere and any(isinstance(x, OnDevice) for x in tensors):
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {NAME}:0 and cpu! ({func})"
        )


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of arguments."""
    if isinstance(value, Tensor):
        yield value
    elif type(value) in (list, tuple):
        for part in value:
            yield from _tensors(part)


def _written(func: Any, args: Any, kwargs: dict[str, Any], results: Any) -> Any:
    """Return the arguments that an operation has written to, in place of its results."""
    named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    changed = [
        named[argument.name]
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    for value in changed:
        if isinstance(value, OnDevice) and value.shape != value.held.shape:
            raise NotImplementedError(f"{func} changes the shape of a tensor in place")
    if isinstance(results, tuple | list):
        return type(results)(changed) if results else results
    return None if results is None else changed[0]


def _create(func: Any, *args: Any, **kwargs: Any) -> Any:
    return compute(func, args, kwargs)


_CREATED = ["arange", "arange.start", "arange.start_step", "empty.memory_format", "empty_strided"]
_CREATED += ["eye", "eye.m", "linspace", "randperm", "tril_indices", "triu_indices"]
_BROKEN: list[str] = []
_REGISTERED: list[torch.library.Library] = []


def register() -> None:
    """Let ``torch.device("pretend")`` be a device, and usable again."""
    _BROKEN.clear()
    if _REGISTERED:
        return
    backend_registration._setup_privateuseone_for_python_backend(NAME)
    every = torch.library.Library("_", "IMPL")
    every.fallback(_create, "PrivateUse1")
    creating = torch.library.Library("aten", "IMPL")
    for name in _CREATED:
        packet, _, overload = name.partition(".")
        func = getattr(getattr(aten, packet), overload or "default")
        creating.impl(name, partial(_create, func), "PrivateUse1")
    creating.impl("_copy_from", _copy_from, "PrivateUse1")
    _REGISTERED.extend([every, creating])


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy without ``__torch_dispatch__``, as :func:`torch.tensor` does."""
    _on_cpu(target).copy_(_on_cpu(source))
    return target
