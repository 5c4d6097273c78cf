"""The precision of the clients' matrix products; all other operations have that of the data."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

import torch

Precision = Literal["full", "tf32", "bf16"]


def products(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Compute single-precision products in ``"tf32"`` (8 + 10 bits, on GPUs that have it) or ``"bf16"`` (8 + 7 bits).

    ``"full"`` leaves torch's setting. ``"bf16"`` is ``torch.autocast``; double precision is never lowered.

    Example:
        >>> import torch
        >>> from bayesfed.tracing.precision import products
        >>> with products("bf16", torch.device("cpu")):
        ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
        torch.bfloat16
    """
    if precision == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return _tf32() if precision == "tf32" else nullcontext()


@contextmanager
def _tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
