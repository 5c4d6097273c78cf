"""The report of a posterior: its facts are collected here, and rendered by :mod:`bayesfed.report`."""

from __future__ import annotations

import hashlib
import inspect
import json
import platform
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import xarray as xr
from torch import Tensor

from bayesfed.algorithms.registry import settings_of
from bayesfed.data.absent import are_absent
from bayesfed.data.fingerprint import data_fingerprint
from bayesfed.elbo.sites import InspectedModel
from bayesfed.engine.files import atomically
from bayesfed.formulas.formula import Formula
from bayesfed.output.fitted import Fitted
from bayesfed.output.inference_data import data_groups
from bayesfed.output.khat import has_density
from bayesfed.output.leave_one_client_out import leave_one_client_out
from bayesfed.output.loo import loo
from bayesfed.report.collect import MOST_GLOBALS, Groups, global_names, make_study, scalars
from bayesfed.report.facts import Comparison, Effect, EffectTable
from bayesfed.report.page import render
from bayesfed.vmap.one_client import OneClient

CLIENTS, ROWS = 40, 20_000
"""The most clients, and rows of all of them, of which each is left out in turn."""
LARGEST, FEWEST = 50_000_000, 100
"""The largest number of predicted rows times draws, and the fewest draws that are made to stay below it."""


def write_report(
    fitted: Fitted,
    path: str | Path,
    *,
    title: str = "",
    effects: Sequence[EffectTable] = (),
    num_samples: int = 1000,
    khat: float | None = None,
    caveat: str = "",
) -> None:
    """Write a report as one HTML file, which needs no network and runs no script.

    Args:
        fitted: a posterior.
        path: the file.
        title: the heading; by default the model's name.
        effects: what :mod:`bayesfed.effects` returned, to be shown as tables and forest plots.
        num_samples: number of draws; fewer, but at least 100, where rows times draws would be more than 50 million.
            Clients are left out in turn in fits of at most 40 clients and 20,000 rows.
        khat: Pareto k-hat of q.
        caveat: a warning about q.

    Raises:
        OSError: the file cannot be written.

    Example:
        >>> import bayesfed as bf, pathlib, tempfile
        >>> from bayesfed import datasets, models
        >>> posterior = bf.fit(models.eight_schools, datasets.eight_schools())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     posterior.report(f"{folder}/schools.html", title="Eight schools")
        ...     "<h1>Eight schools</h1>" in pathlib.Path(f"{folder}/schools.html").read_text("utf-8")
        True
    """
    rows, model = fitted.federation.rows, fitted.program.model
    draws = min(num_samples, max(FEWEST, LARGEST // rows))
    absent = are_absent(fitted.federation.fields)
    groups = data_groups(fitted, draws, khat=khat, caveat=caveat)
    program = source_of(model)
    study = make_study(
        groups,
        sensitivity=prior_sensitivity(groups),
        name=title or name_of(model),
        model=name_of(model),
        program=program,
        settings=json.dumps(settings_of(fitted.algorithm), indent=2),
        clients=len(fitted.federation),
        rows=fitted.program.rows if absent else rows,
        effects=[Effect(e.estimand, f"Level: {e.level}", e.to_frame()) for e in effects],
        left_out=_left_out(fitted),
        hashes=hashes(program, None if absent else data_fingerprint(fitted.federation)),
        software={name: version(name) for name in ("bayesfed", "pyro-ppl", "torch")}
        | {"Python": platform.python_version()},
    )
    write_page(Path(path), render([study]))


def _left_out(fitted: Fitted) -> Effect | None:
    """Return the table of clients that are left out in turn; None of many clients, or if it cannot be computed."""
    clients, rows = len(fitted.federation), fitted.federation.rows
    if are_absent(fitted.federation.fields):
        return None
    everyone = clients == fitted.program.clients
    weighted = fitted.correction is not None or (has_density(fitted) and everyone)
    if not weighted or not 1 < clients <= CLIENTS or rows > ROWS:
        return None
    found = leave_one_client_out(fitted)
    note = f"Leave-one-client-out: elpd {found.elpd:.1f} ± {found.se:.1f}. {found.caveat}"
    return Effect("Each client, left out in turn", note, found.table)


def write_page(path: Path, text: str) -> None:
    """Write a page, atomically; what UTF-8 cannot hold is replaced."""
    with atomically(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="replace")


def source_of(model: Any) -> str:
    """Return the source of a model, or an empty string if Python cannot find it.

    Example:
        >>> from bayesfed import models
        >>> from bayesfed.output.study import source_of
        >>> source_of(models.eight_schools).splitlines()[0]
        'def eight_schools(federation: Federation | Batch) -> None:'
    """
    model = _unwrapped(model)
    if isinstance(model, Formula):
        return model.source
    try:
        return textwrap.dedent(
            inspect.getsource(model if inspect.isroutine(model) else type(model))
        )
    except (OSError, TypeError):
        return ""


def name_of(model: Any) -> str:
    """Return the name of a model's function or class, or the text of a formula."""
    model = _unwrapped(model)
    return str(getattr(model, "__name__", type(model).__name__))


def _unwrapped(model: Any) -> Any:
    while isinstance(model, OneClient | InspectedModel):
        model = model.model
    return model


def hashes(program: str, data: Mapping[str, Tensor] | None) -> dict[str, str]:
    """Return SHA-256 of a program's source, and of a :func:`~bayesfed.data.fingerprint.data_fingerprint`."""
    found = {"program (SHA-256)": hashlib.sha256(program.encode()).hexdigest()} if program else {}
    if data is not None:
        digest = hashlib.sha256()
        for name, values in sorted(data.items()):
            digest.update(name.encode() + values.cpu().numpy().tobytes())
        found["data (SHA-256)"] = digest.hexdigest()
    return found


def prior_sensitivity(groups: Groups) -> dict[str, tuple[float, float]]:
    """Return the sensitivity of each global variable to power-scaling of the prior and of the likelihood, by label.

    Empty if the draws have no ``log_prior``.
    """
    from bayesfed.output.arviz_compat import power_scaling  # ArviZ takes a second to import

    if not {"log_prior", "log_likelihood"} <= groups.keys():
        return {}
    likelihood = groups["log_likelihood"]
    rows = [dim for dim in likelihood.dims if dim not in ("chain", "draw")]
    summed = {name: v.sum([d for d in v.dims if d in rows]) for name, v in likelihood.items()}
    posterior = groups["posterior"]
    names = [n for n in global_names(posterior) if posterior[n][0, 0].size <= MOST_GLOBALS]
    few = {
        "posterior": posterior[names],
        "log_prior": groups["log_prior"],
        "log_likelihood": xr.Dataset(summed),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of uneven weights: the sensitivity is large then
        both = [power_scaling(few, part).values() for part in ("prior", "likelihood")]
    prior, data = (
        {n: float(x[0]) for v in part for n, x in scalars(v.expand_dims(["chain", "draw"]))}
        for part in both
    )
    return {name: (value, data[name]) for name, value in prior.items()}


def compare(runs: Mapping[str, Groups]) -> Comparison:
    """Compare runs by leave-one-out, if they have the same outcomes and the densities of these.

    Args:
        runs: draws and data of each, by name.
    """
    from bayesfed.output.arviz_compat import az, product

    if why := _obstacle(list(runs.values())):
        return Comparison(None, f"There is no leave-one-out comparison: {why}.")
    found, heed = {}, []
    try:
        for name, run in runs.items():
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                found[name] = loo(product(run))
            heed += [f"{name}: {w.message}." for w in caught if "Pareto k" in str(w.message)]
    except ValueError as error:
        return Comparison(None, f"There is no leave-one-out comparison: {name}: {error}.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        table = az.compare(found)
    names = {"elpd_loo": "elpd", "elpd_diff": "diff"}
    return Comparison(table.rename(columns=names), " ".join(heed))


def _obstacle(runs: Sequence[Groups]) -> str:
    """Return the reason why leave-one-out does not compare runs, or an empty string."""
    if not all({"log_likelihood", "observed_data"} <= run.keys() for run in runs):
        return "a run has no log likelihoods"
    if not all(run["observed_data"].equals(runs[0]["observed_data"]) for run in runs):
        return "the runs have different outcomes"
    return "the model has several outcomes" if len(runs[0]["log_likelihood"]) > 1 else ""
