"""A fingerprint of model and guide, stored in files so that changes are noticed: their values at fixed points.

    log p(θ_s),   log p(w_s | θ_s),   log p(D_i | w_s, θ_s)      by site of the model
    θ_s(ε_s),     w_s(θ_s, ε_s)                                  by latent site of the guide, at fixed noise ε_s

It holds these numbers at fixed values, for a client with one row of zeros and for a few clients of the federation.
Numbers differ between processors, so they are stored themselves, not as a hash, and compared up to round-off: a change
of every site's density by less than 1e-4 of its terms (1e-8 in double precision) is not seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import biject_to

from bayesfed.data.batch import Batch
from bayesfed.data.federation import Federation
from bayesfed.data.moments import rows_at_hand
from bayesfed.elbo import handlers, noise
from bayesfed.elbo.log_density import log_density
from bayesfed.elbo.moments import unconstrained_shape
from bayesfed.elbo.program import Params, Program

DRAWS, CLIENTS, ROWS = 2, 4, 32
"""The numbers of fixed values and of clients, and the most rows of each client."""
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}
_JOINT = 100.0
"""The factor by which the tolerance is larger for the density of dependent rows."""
_MODEL, _GUIDE = "model ", "guide "


def witnesses(clients: int) -> Tensor:
    """The positions of the clients whose rows enter the fingerprint: int64 ``(K,)``.

    Example:
        >>> from bayesfed.checks.program_fingerprint import witnesses
        >>> witnesses(100).tolist(), witnesses(2).tolist()
        ([0, 33, 66, 99], [0, 1])
    """
    return torch.linspace(0, clients - 1, CLIENTS, device="cpu").round().long().unique()


@handlers.on_cpu()
def program_fingerprint(
    program: Program, federation: Federation, clients: Tensor
) -> dict[str, Tensor]:
    """Return a number per sample site, ``"model <site>"`` and ``"guide <site>"``, and the size of the terms it sums.

    Args:
        program: the model/guide pair.
        federation: some clients.
        clients: positions of the clients to evaluate, int64 ``(K,)``; if empty, only a client with a row of zeros.

    Returns:
        float64 ``(2, S, 1 + K)`` on the CPU, for global sites ``(2, S, 1)``.
    """
    found = _at(program, program.schema)
    if len(clients):
        federation = rows_at_hand(federation)
        lengths = federation.lengths[clients]
        positions = torch.arange(min(ROWS, int(lengths.max())))
        batch = federation.batch(clients, torch.where(positions < lengths[:, None], positions, -1))
        for name, value in _at(program, batch).items():
            if program.sites[name[len(_MODEL) :]].local:
                found[name] = torch.cat([found[name], value], -1)
    return found


def select_clients(
    fingerprint: Mapping[str, Tensor], positions: Sequence[int]
) -> dict[str, Tensor]:
    """Return the fingerprint of some of its clients only."""
    columns = [0, *(1 + position for position in positions)]
    return {n: v if v.shape[-1] == 1 else v[..., columns] for n, v in fingerprint.items()}


def describe_program_change(
    program: Program, before: Mapping[str, Tensor], now: Mapping[str, Tensor]
) -> str | None:
    """Describe the first change between two fingerprints of a program, or return None if there is none.

    Args:
        program: the program now.
        before: its :func:`program_fingerprint`, of the same clients.
        now: that of the program now.
    """
    tolerance = _TOLERANCE.get(program.schema.scale.dtype, 1e-2)
    changed = []
    for name in [*now, *(name for name in before if name not in now)]:
        kind, site = name[: len(_MODEL)], name[len(_MODEL) :]
        if name in now and name in before:
            loose = tolerance * (_JOINT if program.sites[site].joint else 1.0)
            if _same(before[name], now[name], loose):
                continue
        elif kind == _MODEL:
            return f"the model has {'no' if name in before else 'a'} site {site!r} now"
        changed.append((kind, site))
    model = [_part(program, site) for kind, site in changed if kind == _MODEL]
    if changed and not model:  # a guide may use the model's priors, so they are named first
        return f"the guide of {changed[0][1]!r}, or a prior that it uses, has changed"
    if len(model) < 2:
        return f"{model[0]} has changed" if model else None
    return f"{', '.join(model[:-1])} and {model[-1]} have changed"


def _part(program: Program, name: str) -> str:
    return f"the {'likelihood' if program.sites[name].observed else 'prior'} of {name!r}"


def _same(before: Tensor, now: Tensor, tolerance: float) -> bool:
    if before.shape != now.shape or before.dtype != now.dtype:
        return False
    (one, size), (other, _) = before, now
    equal = (one == other) | (one.isnan() & other.isnan())  # infinities are equal to themselves
    return bool((equal | ((one - other).abs() <= tolerance * (1 + size))).all())


class _Fixed(Messenger):
    """Give latent sites fixed values; ``found`` has Σ log p and Σ |log p| over rows by site, ``(S, K or 1)`` each."""

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        self.like = like
        self.found: dict[str, tuple[Tensor, Tensor]] = {}

    def _pyro_sample(self, msg: Any) -> None:
        if handlers.is_plate(msg):
            return
        fn = msg["fn"]
        if not msg["is_observed"]:
            shape = unconstrained_shape(fn.support, fn.shape())
            event = shape[len(fn.batch_shape) :]
            fixed = _fixed(msg["name"], torch.Size([DRAWS, 1, 1, *event]), self.like)
            msg["value"] = biject_to(fn.support)(fixed.expand(shape))
            msg["done"] = True
        log_prob = log_density(msg)
        if hasattr(fn, "given"):  # the distribution in predictions and in personal steps counts too
            mask = torch.as_tensor(True if msg["mask"] is None else msg["mask"])
            own = fn.evidence(msg["value"], mask.expand(fn.batch_shape))
            log_prob = log_prob + log_density(msg, fn.given(own))
        self.found[msg["name"]] = log_prob.sum(-1), log_prob.abs().sum(-1)


def _at(program: Program, batch: Batch) -> dict[str, Tensor]:
    """The fingerprint of K clients: ``(2, S, K or 1)`` by site."""
    like = batch.scale
    start = program.init | {n: value[:1] for n, value in program.init_locals(batch).items()}
    params: Params = {name: _fixed(name, value.shape, like) for name, value in start.items()}
    for name in program.local_params:
        params[name] = params[name].expand(len(batch), *params[name].shape[1:])
    keys = noise.key(0).to(batch.device).expand(len(batch))
    supplied = program.noise(keys[0], DRAWS, local=False) | program.noise(keys, DRAWS, local=True)
    fixed = _Fixed(like)
    with torch.no_grad():
        with handlers.given(batch.device, params, supplied, draws=DRAWS):
            guide = poutine.trace(program.guide).get_trace(batch)
        with fixed, handlers.given(batch.device, params, draws=DRAWS):
            program.model(batch)
    found = {f"{_MODEL}{name}": parts for name, parts in fixed.found.items()}
    for site in (*program.globals, *program.locals):
        value = guide.nodes[site.name]["value"].flatten(start_dim=2)
        found[f"{_GUIDE}{site.name}"] = value.sum(-1), value.abs().sum(-1)
    digest = {}
    for name, parts in found.items():
        width = len(batch) if program.sites[name[len(_MODEL) :]].local else 1
        digest[name] = torch.stack([part.expand(DRAWS, width) for part in parts]).double().cpu()
    return digest


def _fixed(name: str, shape: torch.Size, like: Tensor) -> Tensor:
    """Fixed standard normal numbers that depend on a name alone."""
    key = noise.fold(noise.key(0), noise.word(name)).to(like.device)
    return noise.Draw("normal", tuple(shape))(key, like.dtype)
