"""The execution of a run, which changes its memory and time, and its numbers by round-off at most."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from bayesfed.engine.processes import Group
from bayesfed.settings import check
from bayesfed.tracing.compiler import Mode
from bayesfed.tracing.precision import Precision


@dataclass(frozen=True)
class Execution:
    """The execution of the clients' work: chunks, files, compilation, precision, processes and device.

    Attributes:
        chunk_size: number of clients that run as one batch, of similar numbers of rows; by default the whole cohort. If
            clients differ much in size, small chunks avoid padding the small ones to the length of the large ones.
            ``"auto"``: chunks of about a gigabyte, in which padding is at most a fifth of the work.
        states: a folder for the clients' states, in memory-mapped files, for more clients than fit into memory: only
            the cohort's states are in memory. The posterior reads its ``local_params`` from there, so keep the folder
            as long as the posterior. By default states are in memory.
        compile: whether steps are compiled: True compiles all, False none, ``"auto"`` traces or compiles those where
            that pays, see :class:`~bayesfed.tracing.compiler.Compiler`. The choice is shown with the progress and
            stored as ``posterior.compiled``.
        precision: of the clients' matrix products: ``"full"``, ``"tf32"`` or ``"bf16"``, see
            :func:`bayesfed.tracing.precision.products`.
        group: processes of ``torch.distributed``, each running the same call, among which the cohort is split: one
            for each GPU, started by ``torchrun``, with ``group=torch.distributed.group.WORLD``.
        device: the device to run on; by default that of the data.

    Raises:
        ValueError: a setting is out of range, or both ``group`` and ``states`` are given.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> here = bf.Execution(compile=False, chunk_size=3)
        >>> bf.fit(models.eight_schools, datasets.eight_schools(), rounds=2, execution=here).compiled
        ''
    """

    chunk_size: int | Literal["auto"] | None = None
    states: str | Path | None = None
    compile: Mode = "auto"
    precision: Precision = "full"
    group: Group | None = None
    device: str | torch.device | None = None

    def __post_init__(self) -> None:
        check(self)
        if self.group is not None and self.states is not None:
            raise ValueError("states are files of one process: leave out states, or group")
        if self.device is not None:
            _check_device(self.device)


def _check_device(device: str | torch.device) -> None:
    """Fail on a device that torch does not have here."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        said = str(error).split("\n")[0].rstrip(".")
        raise ValueError(
            f"device is {str(device)!r}, which torch {torch.__version__} cannot use here ({said}). Leave device out to "
            "run on the CPU; a GPU needs a build of torch for it, and its driver"
        ) from None


@contextmanager
def threads(numbers: int) -> Iterator[None]:
    """Use one thread for a cohort of few numbers, whose distribution to others would take longer than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if numbers < 200_000 else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
