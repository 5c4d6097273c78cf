"""Variables that are summed or integrated out, and runs of the program at given values of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.distributions import Normal, biject_to

from bayesfed.data.batch import OBSERVATIONS
from bayesfed.data.missing import MISSING
from bayesfed.elbo import handlers
from bayesfed.vmap import distributions
from bayesfed.vmap.boundary import Boundary, layout_of, weight_of, weight_outside
from bayesfed.vmap.levels import Layout, Levels
from bayesfed.vmap.mixtures import masked, repeat_draws
from bayesfed.vmap.quadrature import Place

Values = Mapping[str, Tensor]


@dataclass(frozen=True)
class Marginalised:
    """A variable that is summed or integrated out.

    Attributes:
        layout: the layout of its dimensions.
        of_row: whether each row has one; else each client has.
        value: its value in the program's own run, or the data if it is observed in some rows.
        values: all possible values of a discrete variable.
        place: location and scale of a continuous variable's prior, unconstrained: ``(S or 1, K, B)``.
    """

    layout: Layout
    of_row: bool
    value: Tensor
    values: Tensor | None
    place: Place | None


class Rerun(Boundary):
    """Run the program again with given values, up to a site.

    Args:
        levels: the levels of vmap, with draws for the nodes.
        until: the name of the site.
        marginalised: the variables that are summed or integrated out.
        values: the values of all other earlier sites, outside vmap.
        nth: the number of the value that each discrete variable has.
        points: values of the continuous variable, unconstrained; by default its value in the first run.
        copies: the number of points of a row.

    Attributes:
        distribution: the distribution of the site.
        log_weight: log density of the variables of a row, and of the observed sites after the first of them.
        log_client: log density of the variables of the client.
    """

    distribution: Any

    def __init__(
        self,
        levels: Levels,
        until: str,
        marginalised: Mapping[str, Marginalised],
        values: Values,
        nth: Mapping[str, int],
        points: Values,
        copies: int,
    ) -> None:
        super().__init__(levels)
        self.until, self.marginalised, self.values = until, marginalised, values
        self.nth, self.points, self.copies = nth, points, copies
        self.log_weight, self.after = torch.zeros(()), False
        self.log_client = torch.zeros(())

    def __exit__(self, kind: Any, *error: Any) -> Any:
        super().__exit__(kind, *error)
        return kind is _Reached

    def _pyro_sample(self, msg: Any) -> None:
        msg["stop"] = msg["done"] = True
        if handlers.is_plate(msg) or msg["infer"].get("_deterministic"):
            msg["done"] = False
            return
        fn, layout, name = distributions.expand_matrices(msg["fn"]), layout_of(msg), msg["name"]
        one, event = self.marginalised.get(name), fn.event_dim + len(layout.own)
        counts = self.after and OBSERVATIONS in handlers.plates(msg)
        mask = weight_of(msg, "mask", msg["mask"], layout)
        missing = weight_of(msg, "mask", msg["infer"].get(MISSING), layout)
        if name == self.until or one is not None or counts:
            with temporarily_clear_interpreter_stack():
                distribution = distributions.batched(fn, self.levels, layout)
                if name == self.until:
                    self.distribution = distribution
                    raise _Reached
                if counts and name in self.values:
                    own = repeat_draws(self.values[name], self.copies, event)
                    mask = weight_outside(mask, self.levels, layout)
                    self.log_weight = self.log_weight + masked(distribution.log_prob(own), mask)
                if one is not None:
                    missing = weight_outside(missing, self.levels, layout)
                    value, log_prob = self._of(name, one, distribution, missing)
                    if one.of_row:
                        self.log_weight, self.after = self.log_weight + log_prob, True
                    else:
                        self.log_client = self.log_client + log_prob
        if one is not None:
            msg["value"] = self.levels.enter(value, layout, event)
        elif not msg["is_observed"]:
            msg["value"] = self.levels.enter(
                repeat_draws(self.values[name], self.copies, event), layout, event
            )

    def _of(
        self, name: str, one: Marginalised, distribution: Any, missing: Any
    ) -> tuple[Tensor, Tensor]:
        """A variable's value and log density; where it has data, the data and a density that integrates to 1."""
        if one.values is None and name not in self.points:
            return one.value, torch.zeros(())
        if one.values is not None:
            value = one.values[self.nth[name]]
            log_prob, flat = distribution.log_prob(value), -torch.tensor(len(one.values)).log()
        else:
            u, transform = self.points[name], biject_to(distribution.support)
            value = transform(u)
            log_prob = distribution.log_prob(value) + transform.log_abs_det_jacobian(u, value)
            flat = Normal(0.0, 1.0).log_prob(u)
        if isinstance(missing, Tensor):
            value = torch.where(missing, value, repeat_draws(one.value, self.copies, 0))
            log_prob = torch.where(missing, log_prob, flat)
        return value, log_prob


class _Reached(Exception):
    """The run has reached its last site."""
