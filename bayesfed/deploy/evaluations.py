"""Evaluations of draws of θ at the institutions after the rounds, for the importance weights of the server."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from bayesfed.data.plural import plural
from bayesfed.deploy.institutions import Institutions, run_name
from bayesfed.deploy.messages import Evaluate, LogDensities
from bayesfed.deploy.sums import request_sum
from bayesfed.elbo.program import Params
from bayesfed.engine.run import Run
from bayesfed.output.fitted import Fitted
from bayesfed.output.log_densities import Probe


@dataclass
class Evaluations:
    """Sums over the institutions, as :func:`~bayesfed.output.log_densities.sum_log_weights` is one over clients.

    An institution whose own estimates are noisy sends closer ones with its answer. If all do, these are not asked for.

    Attributes:
        institutions: of the run.
        run: the server's.
        count: the number of requests since the last round.
    """

    institutions: Institutions
    run: Run
    count: int = field(default=0, init=False)
    _closer: tuple[Params, Tensor] | None = field(default=None, init=False)

    def __call__(
        self,
        fitted: Fitted,
        theta: Params,
        count: int,
        key: Tensor,
        laplace: bool = False,
        probe: Probe | None = None,
    ) -> Tensor:
        """Return the sum of the clients' log densities at draws of θ, ``(count,)``."""
        closer, self._closer = self._closer, None
        if laplace and closer is not None and _are_same(closer[0], theta):
            return closer[1]
        institutions = self.institutions
        probe = None if institutions.plan.secure else probe
        message = Evaluate(run=run_name(self.run), closely=laplace, probe=probe)
        form = {"terms": torch.zeros(count, dtype=torch.float64)}
        optional = probe and {"closer": torch.zeros(probe.first, dtype=torch.float64)}
        self.count += 1
        called = f"evaluation {self.count} after {plural(self.run.done, 'round')}"
        found = request_sum(
            institutions,
            message,
            LogDensities,
            lambda _: form,
            "log densities",
            called,
            {"theta": theta, "key": {"key": key}},
            optional,
        )
        if probe is not None and "closer" in found:
            first = {name: value[: probe.first] for name, value in theta.items()}
            self._closer = first, found["closer"]
        return found["terms"]


def _are_same(one: Params, other: Params) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)
