"""Several processes, for instance one per GPU of a machine, that share a cohort's work by ``torch.distributed``.

Client i belongs to process i mod P, which alone has its state. The processes exchange nothing but the sum of invariant
2 (and with it the clients' ELBO terms), which each of them then decodes.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup
"""A group of processes, such as ``torch.distributed.group.WORLD``."""


def own(clients: Tensor, group: Group | None) -> Tensor:
    """Mark the clients of this process: bool ``(K,)``.

    Example:
        >>> import torch
        >>> from bayesfed.engine import processes
        >>> processes.own(torch.tensor([3, 8]), None).tolist()  # a process alone
        [True, True]
    """
    if group is None:
        return torch.ones_like(clients, dtype=torch.bool)
    return clients % group.size() == group.rank()


def broadcast(value: Tensor, group: Group | None) -> Tensor:
    """Return the first process's value in all processes."""
    if group is None:
        return value
    found = value.contiguous()
    dist.broadcast(found, group=group, group_src=0)
    return found


def sum_over_processes(values: Mapping[str, Tensor], group: Group | None) -> dict[str, Tensor]:
    """Sum tensors over all processes; the result is the same in each."""
    if group is None:
        return dict(values)
    found = {name: value.contiguous() for name, value in values.items()}
    for value in found.values():
        dist.all_reduce(value, group=group)
    return found
