"""Save and load a posterior as one safetensors file, without pickle, so that opening a file runs no code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from bayesfed.algorithms.algorithm import Algorithm
from bayesfed.algorithms.registry import algorithm_of, settings_of
from bayesfed.checks.program_fingerprint import (
    describe_program_change,
    program_fingerprint,
    select_clients,
    witnesses,
)
from bayesfed.checks.sufficient import with_sufficient_rows
from bayesfed.data.absent import AbsentColumn, are_absent
from bayesfed.data.federation import Federation, Model
from bayesfed.data.fingerprint import data_fingerprint, describe_data_change
from bayesfed.data.moments import is_of_moments
from bayesfed.elbo.program import Params, Program
from bayesfed.engine.files import read_tensors, write_tensors
from bayesfed.engine.made_up import build_without_rows
from bayesfed.engine.parts import flat, nested
from bayesfed.engine.program import build_by_moments, build_program
from bayesfed.output.fitted import Correction, Fitted

FORMAT = 3
"""Version of the file's layout."""
_METADATA = "bayesfed"
_VERSION = version("bayesfed")


@runtime_checkable
class Placed(Protocol):
    """A guide whose parameters are relative to coordinates of its own, which a file must hold too."""

    def coordinates(self) -> dict[str, Tensor]:
        """Return the coordinates of each of the model's latent sites."""

    def placed(self, coordinates: Mapping[str, Tensor]) -> Callable[[Any], Any]:
        """Return the same guide in given coordinates."""


def save(fitted: Fitted, path: str | Path, *, globals_only: bool = False) -> None:
    """Write a posterior to one safetensors file, atomically; or q(θ) alone, if the clients are elsewhere.

    Tensors are called ``<part>/<name>``. The parts are ``params`` and ``local_params`` (unconstrained; local ones have
    one row per client), ``history`` (one number per round), ``start.globals`` and ``start.locals`` (the coordinates of
    a guide that is :class:`Placed`: origin and unit ``(2, P)``), ``correction`` (draws in place of q(θ)),
    ``correction.weights`` (``log_weights``, the log importance weights from which these were chosen), ``data`` and
    ``program`` (fingerprints by which :func:`load` recognises data, model and guide, see
    :mod:`bayesfed.data.fingerprint` and :mod:`bayesfed.checks.program_fingerprint`). The metadata's entry ``bayesfed``
    is JSON: ``format``, ``version``, ``algorithm`` (see :func:`bayesfed.algorithms.registry.settings_of`), ``seed``,
    ``epsilon``, ``moving``, ``rising``, ``converged``; of the correction ``khat``, ``chains``, ``rhat``, ``ess`` and
    ``closely`` (its ``laplace``); ``clients``, ``whole`` (numbers of clients and rows of the fit, of which these may be
    some), ``sites``, ``schema`` (shapes and types of the fields) and ``globals_only``.

    The file does not hold the data and the model, but the clients' names and local posteriors. Its hashes can confirm a
    guess of a small client's rows: share such a file only with people who may see the data.

    Raises:
        TypeError: the algorithm's settings are not plain data.
        OSError: the file cannot be written; a file that was at ``path`` before is unchanged.

    Example:
        >>> import bayesfed as bf, tempfile
        >>> from bayesfed import datasets, models
        >>> schools = datasets.eight_schools()
        >>> posterior = bf.fit(models.eight_schools, schools, rounds=5)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     posterior.save(f"{folder}/schools.safetensors")
        ...     bf.Posterior.load(f"{folder}/schools.safetensors", models.eight_schools, schools)
        Posterior: SFVI (FullRank globals, conditioned locals), 5 rounds, 8 clients; globals mu, tau; locals theta
        5 rounds are too few to tell whether the fit has converged
    """
    parts: dict[str, dict[str, Tensor]] = {
        "params": fitted.params,
        "local_params": dict(fitted.local_params),
        "history": dict(fitted.history),
        "data": {} if globals_only else data_fingerprint(fitted.federation),
        "program": program_fingerprint(
            fitted.program,
            fitted.federation,
            witnesses(len(fitted.federation)),
        ),
    }
    program, correction = fitted.program, fitted.correction
    if correction is not None:
        parts["correction"] = correction.theta
        if correction.log_weights is not None:
            parts["correction.weights"] = {"log_weights": correction.log_weights}
    if isinstance(program.guide, Placed):
        for name, value in program.guide.coordinates().items():
            part = "start.locals" if program.sites[name].local else "start.globals"
            parts.setdefault(part, {})[name] = value
    metadata = {
        "format": FORMAT,
        "version": _VERSION,
        "algorithm": settings_of(fitted.algorithm),
        "seed": fitted.seed,
        "epsilon": fitted.epsilon,
        "moving": fitted.moving and dict(fitted.moving),
        "rising": fitted.rising,
        "converged": fitted.converged,
        "khat": None if correction is None else correction.khat,
        "chains": 1 if correction is None else correction.chains,
        "rhat": None if correction is None else correction.rhat,
        "ess": None if correction is None else correction.ess,
        "closely": fitted.laplace,
        "correctable": fitted.correctable,
        "resampled": sorted(fitted.resampled),
        "precision": fitted.precision,
        "clients": list(fitted.federation.names),
        "whole": {"clients": program.clients, "rows": program.rows},
        "sites": list(program.sites),
        "schema": _schema(fitted.federation),
        "globals_only": globals_only,
    }
    write_tensors(Path(path), flat(parts), _METADATA, metadata)


def load(
    path: str | Path,
    model: Model,
    federation: Federation | None = None,
    *,
    guide: Callable[[Any], Any] | None = None,
    other_rows: bool = False,
) -> Fitted:
    """Read a file that :func:`save` wrote.

    Args:
        path: the file.
        model: the model that was fitted.
        federation: clients of the fit, all or some, in any order: local posteriors are matched by the clients' names.
            Without it the result is q(θ) alone, of which :mod:`bayesfed.output.without_rows` says what it can do.
        guide: the Pyro guide, if the fit had one of your own.
        other_rows: the federation holds other rows of these clients, such as rows to predict if the rows of the fit are
            not available. Log likelihoods and the ELBO are then those of these rows.

    Returns:
        The posterior of the federation's clients, on the federation's device.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is no checkpoint, or one of another format; its numbers have another floating type than the
            federation's (``federation.to(dtype=...)``); a client is not in it; the model, its priors,
            the guide or the data are not those of the fit; the file is a server's, without the clients' variables;
            ``other_rows`` is given, but predictions need the rows of the fit.
    """
    metadata, parts = _read(Path(path))
    if federation is None:
        federation = _without_rows(path, metadata, parts)
    elif metadata.get("globals_only"):
        raise ValueError(
            f"{path} is a server's, without the clients' variables: load it without rows, bf.Posterior.load(path, "
            "model); new clients: personalize(federation); clients of the fit: load the file of their institution"
        )
    known = {name: row for row, name in enumerate(metadata["clients"])}
    missing = [name for name in federation.names if name not in known]
    if missing:
        some = ", ".join(list(known)[:8]) + (", ..." if len(known) > 8 else "")
        raise ValueError(
            f"{path} has no client {missing[0]!r}, its clients are {some}: load it without that "
            "client (federation.select), then personalize"
        )
    dtypes = {value.dtype for value in parts["params"].values()}
    if dtypes and dtypes != {federation.dtype}:
        raise ValueError(
            f"{path} holds {_type(dtypes.pop())}, the federation {_type(federation.dtype)}: "
            "convert the federation with federation.to(dtype=...)"
        )
    try:
        algorithm = algorithm_of(metadata["algorithm"], guide=guide)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    program = _build(model, federation, algorithm, metadata)
    if list(program.sites) != metadata["sites"]:
        raise ValueError(
            f"{path} was fitted to a model with sites {', '.join(metadata['sites'])}; this one has "
            f"{', '.join(program.sites)}"
        )

    def moved(values: Params) -> Params:
        return {name: value.to(federation.device) for name, value in values.items()}

    starts = {**parts.pop("start.globals", {}), **parts.pop("start.locals", {})}
    if isinstance(program.guide, Placed):
        program = replace(program, guide=program.guide.placed(moved(starts)))
    position = torch.tensor([known[name] for name in federation.names])
    local_params: Params = {}
    _check_shapes(path, parts["params"], program.init)
    absent = are_absent(federation.sufficient.fields)
    if not absent:
        local_params = moved({n: value[position] for n, value in parts["local_params"].items()})
        for start in program.starts(federation):
            shapes = {n: v[start.index] for n, v in local_params.items()}
            _check_shapes(path, shapes, program.init_locals(start))
    if absent:
        other_rows = True
    elif not other_rows:
        _check_data(path, federation, {n: v[position] for n, v in parts["data"].items()})
    elif program.weights_draws or program.joint or program.conditional:
        raise ValueError(
            f"{path}: predictions of this posterior need the rows of the fit. Load it with them, then predict others"
        )
    _check_program(path, program, federation, other_rows, metadata, parts["program"])
    program = replace(program, **metadata.get("whole", {}))
    correction = None
    if theta := moved(parts.get("correction", {})):
        correction = Correction(
            theta,
            metadata["khat"],
            metadata.get("closely", False),
            metadata.get("chains", 1),
            metadata.get("rhat"),
            metadata.get("ess"),
            moved(parts.get("correction.weights", {})).get("log_weights"),
        )
    return Fitted(
        program=program,
        federation=federation
        if absent or is_of_moments(federation)
        else with_sufficient_rows(program, federation, algorithm),
        params=moved(parts["params"]),
        local_params=local_params,
        history=parts["history"],
        algorithm=algorithm,
        seed=metadata["seed"],
        epsilon=metadata.get("epsilon"),
        moving=metadata.get("moving", {}),
        rising=metadata.get("rising", 0.0),
        converged=metadata.get("converged"),
        correction=correction,
        correctable=metadata.get("correctable", True),
        resampled=frozenset(metadata.get("resampled", ())),
        precision=metadata.get("precision"),
    )


def _schema(federation: Federation) -> dict[str, Any]:
    """Return the names, shapes and types of the fields as plain data."""
    fields = {n: [_type(v.dtype), list(v.shape[1:])] for n, v in federation.fields.items()}
    return {"client_dim": federation.client_dim, "gaps": federation.gaps, "fields": fields}


def _without_rows(
    path: str | Path, metadata: Mapping[str, Any], parts: Mapping[str, Mapping[str, Tensor]]
) -> Federation:
    """Return the clients of a file, whose rows are elsewhere."""
    if "schema" not in metadata:
        raise ValueError(
            f"{path} was written by an earlier bayesfed {metadata['version']}, which stored no shapes of the fields: "
            "give the rows, bf.Posterior.load(path, model, federation)"
        )
    names, schema = metadata["clients"], metadata["schema"]
    one_each = torch.ones(len(names), dtype=torch.int64)
    lengths = parts.get("data", {}).get("rows", one_each)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    fields = {
        name: AbsentColumn(int(offsets[-1]), tuple(shape), getattr(torch, dtype))
        for name, (dtype, shape) in schema["fields"].items()
    }
    return Federation(fields, offsets, tuple(names), schema["client_dim"], schema["gaps"])


def _build(
    model: Model, federation: Federation, algorithm: Algorithm, metadata: Mapping[str, Any]
) -> Program:
    """Build the program of some clients; that of absent rows from made-up ones."""
    if is_of_moments(federation):
        return build_by_moments(model, federation, algorithm, metadata["seed"])
    if not are_absent(federation.fields):
        return build_program(model, federation, algorithm, metadata["seed"])
    fields = {n: (v.shape[1:], v.dtype) for n, v in federation.fields.items()}
    how = model, algorithm, metadata["seed"], federation.names, fields, federation.client_dim
    return build_without_rows(*how, gaps=federation.gaps)[0]


def _check_data(path: str | Path, federation: Federation, before: Mapping[str, Tensor]) -> None:
    """Fail if the clients' rows differ from those of the fit, whose fingerprint is ``before``."""
    changed = describe_data_change(before, data_fingerprint(federation), federation.names)
    if changed is not None:
        raise ValueError(
            f"{path} is a posterior of other data: {changed}. Load it with the rows of the fit, then predict "
            "others, or fit again. If other rows of the clients are meant, say other_rows=True"
        )


def _check_program(
    path: str | Path,
    program: Program,
    federation: Federation,
    other_rows: bool,
    metadata: Mapping[str, Any],
    saved: Mapping[str, Tensor],
) -> None:
    """Fail if the model or the guide differs from that of the fit, whose fingerprint is ``saved``."""
    clients = metadata["clients"]
    seen = [clients[row] for row in witnesses(len(clients)).tolist()]
    here = [] if other_rows else [name for name in seen if name in federation.names]
    before = select_clients(saved, [seen.index(name) for name in here])
    now = program_fingerprint(program, federation, federation.index(here))
    changed = describe_program_change(program, before, now)
    if changed is not None:
        raise ValueError(
            f"{path} is a posterior of another model: {changed} (saved with bayesfed {metadata['version']}). Load it "
            "with the model of the fit, or fit again"
        )


def _read(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """Read the metadata, and the tensors by part and name."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint {path}")
    tensors, metadata = read_tensors(path, _METADATA)
    parts: dict[str, dict[str, Tensor]] = {"params": {}, "local_params": {}, "history": {}}
    parts |= nested(tensors)
    if metadata is None:
        raise ValueError(f"{path} is a safetensors file, but not one of bayesfed's")
    if metadata["format"] != FORMAT:
        raise ValueError(
            f"{path} has format {metadata['format']}, written by bayesfed {metadata['version']}; "
            f"this is bayesfed {_VERSION}, which reads format {FORMAT}: fit again, or take that version"
        )
    return metadata, parts


def _check_shapes(path: str | Path, saved: Params, expected: Params) -> None:
    """Fail if names or shapes of parameters differ from those of the model and guide."""
    for name in [*expected, *saved]:
        if name not in saved:
            raise ValueError(
                f"{path} lacks parameter {name!r} of this model and guide: it was fitted with "
                f"another model (its parameters: {', '.join(saved) or 'none'})"
            )
        if name not in expected:
            raise ValueError(
                f"{path} has parameter {name!r}, which this model and guide do not: it was fitted "
                f"with another model (these parameters: {', '.join(expected) or 'none'})"
            )
        if saved[name].shape != expected[name].shape:
            raise ValueError(
                f"{path}: parameter {name!r} has shape {tuple(saved[name].shape)}, this model and "
                f"guide need {tuple(expected[name].shape)}: it was fitted with another model or "
                "with fields of another shape"
            )


def _type(dtype: torch.dtype) -> str:
    """Return the name of a dtype, without torch's prefix."""
    return str(dtype).removeprefix("torch.")
