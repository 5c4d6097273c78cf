"""The node's side of leave-one-out: predictive densities of its clients' rows, stored, and sums of them.

An institution stores the densities of each fit under the name on which all have agreed, in
``leave_one_out/<name>.safetensors`` of its folder, so that a later experiment can be compared with it. Nothing of it is
sent but sums over the institution's rows or clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from bayesfed.data.plural import plural
from bayesfed.deploy.messages import MessageError, Tensors
from bayesfed.engine.files import read_tensors, write_tensors
from bayesfed.output.comparison import ElpdSums, sum_elpds
from bayesfed.output.draws import draw_theta
from bayesfed.output.elpds import (
    Elpds,
    describe_difference,
    describe_observations,
    leave_each_out,
)
from bayesfed.output.fitted import Correction
from bayesfed.output.posterior import Posterior
from bayesfed.output.stacking import STEPS, MixtureSums, mixture_sums
from bayesfed.output.without import DRAWS
from bayesfed.settings import LeaveOneOutSettings

LEAST = 5
"""The smallest number of observations over which an institution sends sums."""
_METADATA = "bayesfed leave-one-out"
_ARRAYS = ("elpd", "fit", "khat")
S = TypeVar("S", ElpdSums, MixtureSums)


class NodeElpds:
    """The predictive densities of an institution's observations, or clients, under the models of a comparison.

    Args:
        posterior: of the institution's clients, with the corrected draws of θ.
        agreed: what is left out, and the earlier fits to compare with.
        folder: the node's.

    Raises:
        MessageError: the institution has too few observations; an earlier fit is not stored, or was of other data.
    """

    def __init__(self, posterior: Posterior, agreed: LeaveOneOutSettings, folder: Path) -> None:
        if agreed.unit == "client":
            posterior = with_draws(posterior)
        own = leave_each_out(
            posterior, agreed.unit, agreed.num_samples, agreed.seed, agreed.outcome
        )
        if agreed.unit == "observation" and len(own.elpd) < LEAST:
            raise MessageError(
                f"{plural(len(own.elpd), 'observation is', 'observations are')} too few to send sums over: {LEAST} "
                "are needed"
            )
        if not np.isfinite(own.elpd).all():
            raise MessageError("some predictive densities are 0, whose logarithm has no sum")
        what = describe_observations(posterior, agreed.unit, agreed.outcome)
        path = folder / "leave_one_out"
        path.mkdir(exist_ok=True)
        tensors: Tensors = {
            name: torch.from_numpy(np.array(getattr(own, name))) for name in _ARRAYS
        }
        about = {
            "clients": list(posterior.federation.names),
            "unit": agreed.unit,
            "limit": own.limit,
        }
        self._about: dict[str, Any] = about
        self._what = what
        self.models = [own, *(self._load(path, name) for name in agreed.compare)]
        self.asked = 0
        write_tensors(path / f"{agreed.name}.safetensors", tensors | what, _METADATA, about)

    def sums(self, weights: Tensor | None) -> Tensors:
        """Return the sums over all observations; for stacking those at weights of the models.

        Raises:
            MessageError: the weights are not those of a mixture; or there were too many.
        """
        if weights is None:
            found = sum_elpds(self.models)
            return to_tensors(found)
        count = len(self.models)
        if weights.dtype != torch.float64 or weights.shape != (count,):
            raise MessageError(f"stacking has {count} weights, float64")
        if not bool((weights > 0).all()) or abs(float(weights.sum()) - 1) > 1e-6:
            raise MessageError("weights of models are positive and sum to 1")
        self.asked += 1
        if self.asked > STEPS:
            raise MessageError(f"stacking asks for sums at {STEPS} weights at most")
        elpd = np.stack([one.elpd for one in self.models], 1)
        return to_tensors(mixture_sums(elpd, weights.cpu().numpy()))

    def _load(self, path: Path, name: str) -> Elpds:
        """Return the densities of an earlier fit to the same data."""
        file = path / f"{name}.safetensors"
        if not file.exists():
            raise MessageError(
                f"no leave-one-out called {name!r} is stored here: run its experiment first, with this folder"
            )
        found, about = read_tensors(file, _METADATA)
        if about != self._about:
            raise MessageError(f"leave-one-out {name!r} is of other clients, units or draws")
        differs = describe_difference(self._what, found, about["clients"])
        if differs is not None:
            raise MessageError(f"leave-one-out {name!r} is of other data")
        return Elpds(**{part: found[part].numpy() for part in _ARRAYS}, limit=about["limit"])


def with_draws(posterior: Posterior) -> Posterior:
    """Return a posterior whose q(θ) needed no correction with draws of θ, which an institution cannot weight.

    The weights would need all other institutions' rows.
    """
    if posterior.correction is not None:
        return posterior
    theta = draw_theta(posterior, DRAWS, posterior.key(0, "left out"))
    return replace(posterior, correction=Correction(theta, 0.0))


def to_tensors(sums: ElpdSums | MixtureSums) -> Tensors:
    """Return sums as tensors, float64; sums that do not exist are 0."""
    found: dict[str, Any] = {field.name: getattr(sums, field.name) for field in fields(sums)}
    return {
        name: torch.as_tensor(value, dtype=torch.float64).nan_to_num(0.0)
        for name, value in found.items()
    }


def from_tensors(kind: type[S], tensors: Tensors) -> S:
    """Return the sums in tensors of :func:`to_tensors`.

    Example:
        >>> import numpy as np
        >>> from bayesfed.deploy.node_elpds import from_tensors, to_tensors
        >>> from bayesfed.output.stacking import MixtureSums, mixture_sums
        >>> sums = mixture_sums(np.zeros((3, 2)), np.array([0.25, 0.75]))
        >>> from_tensors(MixtureSums, to_tensors(sums)).shares.tolist()
        [0.75, 2.25]
    """
    numbers = {name: value.numpy() for name, value in tensors.items()}
    scalars = {name: value.item() for name, value in numbers.items() if not value.ndim}
    return kind(**(numbers | scalars))


def form_of_sums(models: int, *, stacking: bool) -> Tensors:
    """Return tensors like the sums over K models."""
    k, kk = torch.zeros(models, dtype=torch.float64), torch.zeros(models, models).double()
    one = torch.zeros((), dtype=torch.float64)
    if stacking:
        return {"value": one, "shares": k, "products": kk}
    high = torch.zeros(2, models, dtype=torch.float64)
    return {"count": one, "elpd": k, "products": kk, "fit": k, "high": high}


def names_of(agreed: LeaveOneOutSettings) -> Sequence[str]:
    """Return the names of the models in the order of their sums."""
    return (agreed.name, *agreed.compare)
