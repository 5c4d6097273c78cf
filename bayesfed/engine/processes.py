"""Several processes, say one for each GPU of a machine, that share a cohort's work by ``torch.distributed``.

Client i belongs to process i mod P, which alone keeps its state. All that passes between them is the sum of law 2 (the
clients' terms beside the uploads), after which every process knows the same and decodes it by itself.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup
"""What ``torch.distributed.group.WORLD`` is, for one."""


def own(clients: Tensor, group: Group | None) -> Tensor:
    """Which clients are this process's: bool ``(K,)``.

    Example:
        >>> import torch
        >>> from bayesfed.engine import processes
        >>> processes.own(torch.tensor([3, 8]), None).tolist()  # a process alone
        [True, True]
    """
    if group is None:
        return torch.ones_like(clients, dtype=torch.bool)
    return clients % group.size() == group.rank()


def told(value: Tensor, group: Group | None) -> Tensor:
    """What the first process has, in all of them."""
    if group is None:
        return value
    found = value.contiguous()
    dist.broadcast(found, group=group, group_src=0)
    return found


def summed(values: Mapping[str, Tensor], group: Group | None) -> dict[str, Tensor]:
    """The sum over processes, the same in all of them."""
    if group is None:
        return dict(values)
    found = {name: value.contiguous() for name, value in values.items()}
    for value in found.values():
        dist.all_reduce(value, group=group)
    return found
