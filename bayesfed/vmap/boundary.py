"""Leave vmap at each Pyro site so that handlers see batched tensors, then enter it again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch._C import _functorch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from bayesfed.data.batch import CLIENTS, OBSERVATIONS
from bayesfed.elbo.handlers import check_local_param, complete_param
from bayesfed.vmap.levels import Layout, Levels


class Boundary(Messenger):
    """Leave vmap before the outer handlers process a site or parameter, and enter it again with its value."""

    def __init__(self, levels: Levels) -> None:
        super().__init__()
        self.levels = levels
        self.out = ExitStack()
        self.back: Callable[[Any], Any] | None = None

    def __exit__(self, *error: Any) -> Any:
        self.out.close()
        return super().__exit__(*error)

    def _leave(self, back: Callable[[Any], Any]) -> None:
        """Leave vmap; ``back`` turns the value from outside into the value that the program gets."""
        self.back = back
        self.out.enter_context(temporarily_clear_interpreter_stack())

    def _return(self, msg: Any) -> None:
        if self.back is not None:
            self.out.close()
            msg["value"], self.back = self.back(msg["value"]), None

    _pyro_post_param = _return

    def _pyro_param(self, msg: Any) -> None:
        if msg["value"] is not None:
            msg["stop"] = True
            return
        name, *init = complete_param(msg)
        start = init[0]() if init and callable(init[0]) else init[0] if init else None
        if start is not None and _functorch.is_batchedtensor(start):
            raise ValueError(
                f"parameter {name!r} starts at a value that depends on a draw or a client: start it at a constant. If "
                "poutine.reparam makes it, to learn how far a site is centred, write LocScaleReparam(0.0), or leave "
                "poutine.reparam out: the guide follows the prior of local variables without it"
            )
        local = CLIENTS in {frame.name for frame in msg["cond_indep_stack"]}
        event = None if start is None else start.ndim

        def back(value: Tensor) -> Tensor:
            if local:
                return self.levels.inside(value[None]).unsqueeze(0)
            lead = 0 if event is None else value.ndim - event
            if not lead:
                return value
            value = value.reshape((*[1] * (3 - lead), *value.shape))
            return self.levels.inside(value).squeeze(0)

        self._leave(back)
        if local and start is not None:
            check_local_param(name, start, 1)
            msg["args"] = name, start.expand(self.levels.clients[1], *start.shape[1:])


def layout_of(msg: Any, batch: torch.Size | None = None) -> Layout:
    """The layout of a site's dimensions."""
    batch = torch.Size(msg["fn"].batch_shape if batch is None else batch)
    frames = {frame.name: frame.dim for frame in msg["cond_indep_stack"]}
    others = {dim for name, dim in frames.items() if name not in (CLIENTS, OBSERVATIONS)}
    rows = OBSERVATIONS in frames or (batch[-1:] == (1,) and -1 not in others)
    return Layout(batch, CLIENTS in frames, CLIENTS in frames and rows)


def weight_of(msg: Any, what: str, weight: Any, layout: Layout) -> Any:
    """Expand a site's mask or scale to its batch.

    Raises:
        ValueError: it differs along a plate of the program's own.
    """
    if not isinstance(weight, Tensor):
        return weight
    lead = len(layout.batch) - weight.ndim
    if any(axis >= lead and weight.shape[axis - lead] > 1 for axis in layout.own):
        raise ValueError(
            f"site {msg['name']!r}: a {what} differs along a plate of the program's own. Give the site's log "
            "density by pyro.factor, with 0 for what does not count"
        )
    return weight.expand(layout.batch)


def weight_outside(weight: Any, levels: Levels, layout: Layout) -> Any:
    """A mask or scale outside vmap: ``(S, K, B or 1)``, 1 if rows are alike, and no S without a plate of draws."""
    if not isinstance(weight, Tensor):
        return weight
    weight = levels.leave(weight, layout)
    for _ in layout.own:
        weight = weight.select(-1, 0)
    return weight if weight.stride(-1) else weight[..., :1]  # the same for all rows
