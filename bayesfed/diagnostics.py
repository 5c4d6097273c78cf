"""Checks that keep a run from being silently wrong: data outside a site's support, numbers not finite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from pyro import poutine
from torch import Tensor

from bayesfed import handlers, noise

if TYPE_CHECKING:
    from bayesfed.federation import Federation
    from bayesfed.program import Program


def check_data(program: Program, federation: Federation) -> None:
    """Run the model once over every row of every client, in chunks, before the first round.

    Raises:
        ValueError: an observed value lies outside its site's support (names site, client and row), or
            a client's observation has the wrong shape.
    """
    local = [s.name for s in program.sites.values() if s.observed]
    server = program.noise(noise.key(0).to(federation.device), 1, local=False)
    for chunk in federation.chunks():
        batch = federation.batch(chunk)
        keys = noise.fold(noise.key(0).to(federation.device), federation.streams[chunk])
        with (
            torch.no_grad(),
            handlers.trusted(),
            handlers.Parameters(program.init),
            handlers.Noise(server | program.noise(keys, 1, local=True)),
            handlers.particles(1),
        ):
            guide = poutine.trace(program.guide).get_trace(batch)
            model = poutine.trace(poutine.replay(program.model, trace=guide)).get_trace(batch)
        for name in local:
            node = model.nodes[name]
            fn, value = node["fn"], node["value"]
            inside = fn.support.check(value)
            inside = inside.reshape(1, len(chunk), *inside.shape[-1:])[0] | ~batch.mask
            if not inside.all():
                client, row = (~inside).nonzero()[0].tolist()
                raise ValueError(
                    f"client {federation.names[int(chunk[client])]!r}, row {row}: observed site {name!r} "
                    f"is {value.reshape(inside.shape + fn.event_shape)[client, row].tolist()}, outside "
                    f"the support of {type(fn).__name__} ({fn.support})"
                )


def check_finite(
    terms: Tensor, upload: Mapping[str, Tensor], names: Sequence[str], number: int
) -> None:
    """Fail on a client whose ELBO term or upload is NaN or infinite.

    Args:
        terms: the clients' ELBO terms ``(K,)``.
        upload: what they send, ``(K, ...)`` each.
        names: the K clients.
        number: the round, for the message.

    Raises:
        FloatingPointError: names the first such client.
    """
    finite = terms.isfinite()
    for value in upload.values():
        finite = finite & value.reshape(len(terms), -1).isfinite().all(-1)
    if not finite.all():
        client = int((~finite).nonzero()[0])
        what = f"ELBO term ({float(terms[client])})"
        if terms[client].isfinite():
            what = "upload"
        raise FloatingPointError(
            f"round {number}: the {what} of client {names[client]!r} is not finite. Look for extreme "
            "values among its rows, standardise the fields, or lower the learning rates"
        )
