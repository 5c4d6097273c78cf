"""``bf.calibrate``: simulation-based calibration of a model together with its fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from bayesfed.algorithms import Algorithm
from bayesfed.algorithms.table import SFVI
from bayesfed.calibration.replications import FitOptions, Record, Study, run_replications
from bayesfed.calibration.result import Calibration, replication_table, to_dataset
from bayesfed.calibration.uniformity import DRAWS
from bayesfed.data.federation import Federation, Model
from bayesfed.elbo.handlers import on_cpu
from bayesfed.output.posterior import Posterior

THIN = 5
"""Of the draws every fifth has a rank: those of a chain depend on each other."""


@dataclass(frozen=True)
class Ranks:
    """A measure of replications: the rank of each true value among draws, and their mean and standard deviation."""

    def __call__(self, posterior: Posterior, truth: Mapping[str, Tensor], seed: int) -> Record:
        """Return nested lists by variable."""
        count = THIN * DRAWS
        draws = posterior.sample(count, seed=seed)
        if posterior.program.derived:
            draws |= posterior.derived(num_samples=count, seed=seed)
        found: Record = {"rank": {}, "truth": {}, "mean": {}, "sd": {}}
        generator = torch.Generator().manual_seed(seed)
        for name in names_in_both(posterior, truth):
            own, value = draws[name].cpu().double(), truth[name].cpu().double()
            if own.shape[1:] != value.shape:
                raise ValueError(f"{name!r} has another shape where it is simulated")
            if not own.isfinite().all():
                raise ValueError(f"{name!r} has draws that are not finite")
            few = own[::THIN]
            ties = (few == value).sum(0)
            among = (torch.rand(ties.shape, generator=generator) * (ties + 1)).long()
            rank = (few < value).sum(0) + torch.minimum(among, ties)
            parts = {"rank": rank, "truth": value, "mean": own.mean(0), "sd": own.std(0)}
            for part, numbers in parts.items():
                found[part][name] = numbers.tolist()
        return found


def names_in_both(posterior: Posterior, truth: Mapping[str, Tensor]) -> list[str]:
    """Return the variables and derived values that are simulated and fitted, without auxiliary ones, ``_name``."""
    program = posterior.program
    derived = [name for name, dims in program.derived.items() if "observation" not in dims]
    names = [name for name in (*(s.name for s in program.latent), *derived) if name in truth]
    return [name for name in names if not name.startswith("_")] or names


@on_cpu()
def calibrate(
    model: Model,
    federation: Federation,
    algorithm: Algorithm | None = None,
    *,
    n: int = 200,
    simulate: Model | None = None,
    path: str | Path | None = None,
    jobs: int = 1,
    seed: int = 0,
    progress: bool | None = None,
    **options: Unpack[FitOptions],
) -> Calibration:
    """Check by simulation whether the intervals of a model and its fit can be believed.

    Each of n replications draws all variables from their priors, and outcomes of all clients given them and their own
    covariates; fits them as :func:`bayesfed.fit` does; and finds the rank of each true value among 199 draws of the
    posterior. If model and fit are right, ranks are uniform and intervals cover as often as they say.

    Args:
        model: the Pyro program.
        federation: the clients. Their covariates are used as they are, and their outcomes are replaced; those that are
            missing stay missing.
        algorithm: by default :class:`~bayesfed.SFVI`. It must have a distribution of θ.
        n: number of replications, at least 2. With 200 a coverage of 90 % has a standard error of 2 %.
        simulate: the program that true values and outcomes are drawn from, with the variables and the outcome of
            ``model``; by default ``model``. Where it differs ranks are not uniform, and show how much that matters.
        path: a file to which each finished replication is written. If it is there the call goes on where it ends, with
            the same results; a larger ``n`` adds replications.
        jobs: number of processes, each with one thread. Where processes are not forked (macOS, Windows) the model must
            be defined in a module, and the call be inside ``if __name__ == "__main__":``.
        seed: of all replications, each of which has its own.
        progress: show a progress bar; by default on a terminal, and elsewhere a line every ten seconds.
        **options: of the fits: ``rounds``, ``clients_per_round``, ``batch_size``, ``privacy`` and ``execution``, as of
            :func:`bayesfed.fit`.

    Returns:
        A :class:`~bayesfed.calibration.Calibration`: print it, or read ``table``, ``verdict`` and ``ranks``.

    Raises:
        TypeError: the model, the algorithm or an option is something else.
        ValueError: outcomes cannot be simulated, with the site or parameter that is the reason; the method has no
            posterior of θ; an option is out of range; ``path`` has replications of another study; all fits failed.

    Sources: S. Talts et al. (2018), "Validating Bayesian inference algorithms with simulation-based calibration"; T.
    Säilynoja, P. Bürkner, A. Vehtari (2022), for the bands and the test; Y. Yao et al. (2018), for ``p_bias``.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> schools = datasets.eight_schools()
        >>> found = bf.calibrate(models.eight_schools, schools, n=4, rounds=2, progress=False)
        >>> found.ranks["theta"].sizes
        Frozen({'replication': 4, 'client': 8})
        >>> found.table.columns[:3].tolist()
        ['variable', 'p', 'p_bias']
    """
    chosen = SFVI() if algorithm is None else algorithm
    study = Study(model, federation, chosen, simulate or model, options, {}, seed, Ranks())
    records = run_replications(
        study,
        n,
        kind={"kind": "calibration", "draws": DRAWS},
        title="calibration",
        path=path,
        jobs=jobs,
        progress=progress,
    )
    parts = {}
    for part in ("rank", "truth", "mean", "sd"):
        values = {r["number"]: r[part] for r in records if not r["failed"]}
        parts[part] = to_dataset(values, study.fitted.fitted)
    return Calibration(
        ranks=parts["rank"].astype(np.int64),
        truths=parts["truth"],
        means=parts["mean"],
        sds=parts["sd"],
        replications=replication_table(records),
        title=f"Calibration of {_name_of(model)} by {chosen}",
    )


def _name_of(model: Any) -> str:
    return getattr(model, "__name__", type(model).__name__)
