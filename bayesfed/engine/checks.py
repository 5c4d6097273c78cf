"""Checks that keep a run from being silently wrong: data outside a site's support, numbers not finite."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bayesfed.algorithms.settings import Count, Strict
from bayesfed.data.federation import Federation
from bayesfed.elbo import noise
from bayesfed.elbo.program import Program
from bayesfed.elbo.terms import run


class Schedule(Strict):
    """How long a run is, and how much of it a round: the same arguments of :func:`bayesfed.fit`."""

    rounds: Count
    clients_per_round: int | float = 1.0
    batch_size: Count | None = None
    seed: int = 0


def warn_if_falling(elbo: Sequence[float]) -> None:
    """Warn where the last tenth of 50 rounds or more has a clearly lower ELBO than an earlier one."""
    tenth = len(elbo) // 10
    if tenth < 5:
        return
    tenths = [elbo[i * tenth : (i + 1) * tenth] for i in range(9)] + [elbo[-tenth:]]
    best = max(tenths, key=statistics.median)
    before, last = statistics.median(best), statistics.median(tenths[-1])
    if last + 3 * max(statistics.stdev(best), statistics.stdev(tenths[-1])) < before:
        warnings.warn(
            f"the ELBO fell from {before:,.1f} to {last:,.1f}: the fit has diverged, do not use it. Lower "
            "lr and local_lr, or standardise the fields",
            stacklevel=3,
        )


def check_data(program: Program, federation: Federation) -> None:
    """Run the model once over every row of every client, in chunks, before the first round.

    Raises:
        ValueError: an observed value lies outside its site's support (names site, client and row), or
            a client's observation has the wrong shape.
    """
    observed = [site.name for site in program.observed]
    server = program.noise(noise.key(0).to(federation.device), 1, local=False)
    for chunk in program.chunks(federation):
        batch = federation.batch(chunk)
        keys = noise.fold(noise.key(0).to(federation.device), federation.stream_ids[chunk])
        supplied = server | program.noise(keys, 1, local=True)
        with torch.no_grad():
            _, model = run(program, program.init, {}, batch, supplied, 1)
        for name in observed:
            node = model.nodes[name]
            fn, value = node["fn"], node["value"]
            inside = fn.support.check(value)
            inside = inside.reshape(len(chunk), -1)
            if program.sites[name].per_row:
                inside = inside | ~batch.mask
            if not inside.all():
                client, row = (~inside).nonzero()[0].tolist()
                raise ValueError(
                    f"client {federation.names[int(chunk[client])]!r}, row {row}: observed site {name!r} "
                    f"is {value.reshape(inside.shape + fn.event_shape)[client, row].tolist()}, outside "
                    f"the support of {type(fn).__name__} ({fn.support})"
                )


def finite(terms: Tensor, upload: Mapping[str, Tensor]) -> Tensor:
    """Whether all that K clients send is a number: bool ``(K,)``, of terms ``(K,)`` and tensors ``(K, ...)``."""
    found = terms.isfinite()
    for value in upload.values():
        found = found & value.reshape(len(terms), -1).isfinite().all(-1)
    return found


def check_finite(sound: Tensor, terms: Tensor, names: Sequence[str], number: int) -> None:
    """Fail on a client whose ELBO term or upload is NaN or infinite.

    Args:
        sound: see :func:`finite`, ``(K,)``.
        terms: the clients' ELBO terms ``(K,)``.
        names: the K clients.
        number: the round, for the message.

    Raises:
        FloatingPointError: names the first such client.
    """
    if not sound.all():
        client = int((~sound).nonzero()[0])
        what = f"ELBO term ({float(terms[client])})"
        if terms[client].isfinite():
            what = "upload"
        raise FloatingPointError(
            f"round {number}: the {what} of client {names[client]!r} is not finite. Look for extreme "
            "values among its rows, standardise the fields, or lower the learning rates"
        )
