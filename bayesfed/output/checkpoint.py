"""A posterior in one safetensors file: no pickle, so that opening a file runs no code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from bayesfed.algorithms.registry import algorithm_of
from bayesfed.checks.program_fingerprint import (
    describe_program_change,
    program_fingerprint,
    select_clients,
    witnesses,
)
from bayesfed.data.federation import Federation, Model
from bayesfed.data.fingerprint import data_fingerprint, describe_data_change
from bayesfed.elbo import noise
from bayesfed.elbo.program import Params
from bayesfed.engine.files import read_tensors, write_tensors
from bayesfed.output.correction import Correction
from bayesfed.settings import settings_of
from bayesfed.vmap.choose import for_batches

if TYPE_CHECKING:
    from bayesfed.output.posterior import Posterior

FORMAT = 2
"""Version of the file's layout."""
_METADATA = "bayesfed"
_VERSION = version("bayesfed")


@runtime_checkable
class Placed(Protocol):
    """A guide that has coordinates of its own, without which its parameters mean nothing."""

    def coordinates(self) -> dict[str, Tensor]:
        """Of each of the model's latent sites."""

    def placed(self, coordinates: Mapping[str, Tensor]) -> Callable[[Any], Any]:
        """The same guide in these coordinates."""


def save(posterior: Posterior, path: str | Path) -> None:
    """Write a posterior to one safetensors file, atomically.

    Tensors are called ``<part>/<name>``. The parts are ``params`` and ``local_params``
    (unconstrained; local ones have a row per client), ``history`` (one number a round),
    ``start.globals`` and ``start.locals`` (the coordinates of a guide that is :class:`Placed`: origin
    and unit ``(2, P)``), ``correction`` (draws that stand for q(θ)), ``data`` and ``program`` (by which
    :func:`load` knows data, model and guide again, see :mod:`bayesfed.data.fingerprint` and
    :mod:`bayesfed.checks.program_fingerprint`). The metadata's entry ``bayesfed`` is JSON: ``format``,
    ``version``, ``algorithm`` (see :func:`bayesfed.settings.settings_of`),
    ``seed``, ``epsilon``, ``moving``, ``rising``, ``settled``, ``khat`` and ``closely`` of the correction, ``clients``
    and ``sites``.

    The data and the model are not in it, the clients' names and local posteriors are. A guess of a small client's rows
    can be confirmed by its hashes: such a file is for those who may see the data.

    Raises:
        TypeError: the algorithm's settings are not plain data.
        OSError: the file cannot be written; what was at ``path`` is still there.

    Example:
        >>> import bayesfed as bf, tempfile
        >>> from bayesfed import datasets, models
        >>> schools = datasets.eight_schools()
        >>> posterior = bf.fit(models.eight_schools, schools, rounds=5)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     posterior.save(f"{folder}/schools.safetensors")
        ...     bf.Posterior.load(f"{folder}/schools.safetensors", models.eight_schools, schools)
        Posterior: SFVI (FullRank globals, conditioned locals), 5 rounds, 8 clients; globals mu, tau; locals theta
        5 rounds are too few to tell whether the fit still moves
    """
    parts: dict[str, dict[str, Tensor]] = {
        "params": posterior.params,
        "local_params": dict(posterior.local_params),
        "history": dict(posterior.history),
        "data": data_fingerprint(posterior.federation),
        "program": program_fingerprint(
            posterior.program,
            posterior.federation,
            witnesses(len(posterior.federation)),
        ),
    }
    program, mended = posterior.program, posterior.correction
    if mended is not None:
        parts["correction"] = mended.theta
    if isinstance(program.guide, Placed):
        for name, value in program.guide.coordinates().items():
            part = "start.locals" if program.sites[name].local else "start.globals"
            parts.setdefault(part, {})[name] = value
    metadata = {
        "format": FORMAT,
        "version": _VERSION,
        "algorithm": settings_of(posterior.algorithm),
        "seed": posterior.seed,
        "epsilon": posterior.epsilon,
        "moving": posterior.moving and dict(posterior.moving),
        "rising": posterior.rising,
        "settled": posterior.settled,
        "khat": None if mended is None else mended.khat,
        "closely": mended is not None and mended.closely,
        "clients": list(posterior.federation.names),
        "sites": list(posterior.program.sites),
    }
    tensors = {
        f"{part}/{name}": value for part, values in parts.items() for name, value in values.items()
    }
    write_tensors(Path(path), tensors, _METADATA, metadata)


def load(
    path: str | Path,
    model: Model,
    federation: Federation,
    *,
    guide: Callable[[Any], Any] | None = None,
    other_rows: bool = False,
) -> dict[str, Any]:
    """Read what :func:`save` wrote.

    Args:
        path: the file.
        model: the model that was fitted.
        federation: clients of the fit, all or some, in any order: local posteriors are matched by
            the clients' names.
        guide: the Pyro guide, where the fit had one of your own.
        other_rows: the federation holds other rows of these clients, say those to predict where the rows of the fit
            are not at hand. Its numbers then are those of the old posterior on the new rows.

    Returns:
        The fields of the :class:`~bayesfed.Posterior` of the federation's clients, on the federation's device.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is no checkpoint or one of a later version; a client is not in it; the
            model, its priors, the guide or the data are not those of the fit; ``other_rows``, but predictions need
            those of the fit.
    """
    metadata, parts = _read(Path(path))
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
    with noise.seeded(0):  # particles start at draws of the prior
        program = algorithm.program(for_batches(model, federation), federation)
    if list(program.sites) != metadata["sites"]:
        raise ValueError(
            f"{path} was fitted to a model with sites {', '.join(metadata['sites'])}; this one has "
            f"{', '.join(program.sites)}"
        )
    starts = {**parts.pop("start.globals", {}), **parts.pop("start.locals", {})}
    if isinstance(program.guide, Placed):
        found = {name: value.to(federation.device) for name, value in starts.items()}
        program = replace(program, guide=program.guide.placed(found))
    position = torch.tensor([known[name] for name in federation.names])
    local_params = {name: value[position] for name, value in parts["local_params"].items()}
    _same_shapes(path, parts["params"], program.init)
    for start in program.starts(federation):
        shapes = {n: v[start.index] for n, v in local_params.items()}
        _same_shapes(path, shapes, program.init_locals(start))
    if not other_rows:
        before = {name: value[position] for name, value in parts["data"].items()}
        changed = describe_data_change(before, data_fingerprint(federation), federation.names)
        if changed is not None:
            raise ValueError(
                f"{path} is a posterior of other data: {changed}. Load it with the rows of the fit, then predict "
                "others, or fit again. If other rows of the clients are meant, say other_rows=True"
            )
    elif algorithm.weighs or program.joint:
        raise ValueError(
            f"{path}: predictions of this posterior need the rows of the fit. Load it with them, then predict others"
        )
    seen = [metadata["clients"][row] for row in witnesses(len(known)).tolist()]
    here = [] if other_rows else [name for name in seen if name in federation.names]
    before = select_clients(parts["program"], [seen.index(name) for name in here])
    now = program_fingerprint(program, federation, federation.index(here))
    changed = describe_program_change(program, before, now)
    if changed is not None:
        raise ValueError(
            f"{path} is a posterior of another model: {changed} (saved with bayesfed {metadata['version']}). Load it "
            "with the model of the fit, or fit again"
        )
    theta = {n: value.to(federation.device) for n, value in parts.get("correction", {}).items()}
    mended = Correction(theta, metadata["khat"], metadata.get("closely", False)) if theta else None
    return {
        "program": program,
        "federation": federation,
        "params": {n: value.to(federation.device) for n, value in parts["params"].items()},
        "local_params": {n: value.to(federation.device) for n, value in local_params.items()},
        "history": parts["history"],
        "algorithm": algorithm,
        "seed": metadata["seed"],
        "epsilon": metadata.get("epsilon"),
        "moving": metadata.get("moving", {}),
        "rising": metadata.get("rising", 0.0),
        "settled": metadata.get("settled"),
        "correction": mended,
    }


def _read(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """The metadata, and the tensors by part and name."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint {path}")
    parts: dict[str, dict[str, Tensor]] = {"params": {}, "local_params": {}, "history": {}}
    tensors, metadata = read_tensors(path, _METADATA)
    for full, value in tensors.items():
        part, _, name = full.partition("/")
        parts.setdefault(part, {})[name] = value
    if metadata is None:
        raise ValueError(f"{path} is a safetensors file, but not one of bayesfed's")
    if metadata["format"] != FORMAT:
        raise ValueError(
            f"{path} has format {metadata['format']}, written by bayesfed {metadata['version']}; "
            f"this is bayesfed {_VERSION}, which reads format {FORMAT}: fit again, or take that version"
        )
    return metadata, parts


def _same_shapes(path: str | Path, saved: Params, expected: Params) -> None:
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
    return str(dtype).removeprefix("torch.")
