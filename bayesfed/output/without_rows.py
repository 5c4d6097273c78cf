"""A posterior of clients whose rows are elsewhere: what a server has that reopens its study.

It draws the global variables (``sample``, ``derived``, both without the clients'), has ``khat``, ``log_evidence`` and
``caveat`` where the fit stored what they need, gives ``to_arviz`` and ``report`` the groups ``posterior``, ``prior``,
``log_prior``, ``params`` and ``history``, and is itself given rows by ``personalize``, and by effects at the average or
a new client. Everything else needs the clients' rows, and raises :class:`~bayesfed.data.absent.RowsAbsent`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pyro import poutine
from torch import Tensor

from bayesfed.elbo import handlers, noise
from bayesfed.output.draws import draw_theta, globals_at
from bayesfed.output.fitted import Fitted


def sample_globals(
    fitted: Fitted, num_samples: int, seed: int, *, centre: bool
) -> dict[str, Tensor]:
    """Draw the global variables, ``(S, *event)``."""
    theta = draw_theta(fitted, num_samples, fitted.key(seed), centre)
    return dict(globals_at(fitted, theta, num_samples))


def derive_globals(fitted: Fitted, values: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """Compute the ``pyro.deterministic`` values outside the clients plate at draws of the global variables: ``(S, *)``.

    The model runs on a row of zeros, with clients' variables from their prior, on which these values do not depend.
    """
    program = fitted.program
    names = [name for name, dims in program.derived.items() if not dims]
    if not names:
        return {}
    given = {name: value[:, None, None] for name, value in values.items()}
    device, own = program.schema.device, program.local_params
    with (
        torch.no_grad(),
        noise.seeded(0),
        handlers.given(device, fitted.params, values=given, draws=count, starting=own),
        handlers.Derived() as derived,
    ):
        program.model(program.schema)
    shapes = {name: (count, *derived.found[name].value.shape[3:]) for name in names}
    return {n: derived.found[n].value[:, 0, 0].expand(shape) for n, shape in shapes.items()}


def sample_global_prior(fitted: Fitted, num_samples: int) -> dict[str, Tensor]:
    """Draw the global variables from the model alone, by torch's generator: ``(S, *event)``."""
    program, names = fitted.program, [site.name for site in fitted.program.globals]
    device, own = program.schema.device, program.local_params
    with (
        torch.no_grad(),
        handlers.given(device, fitted.params, values={}, draws=num_samples, starting=own),
        poutine.trace() as tracer,
        handlers.Until(names),
    ):
        program.model(program.schema)
    found = {}
    for site in program.globals:
        value = tracer.trace.nodes[site.name]["value"]
        found[site.name] = value.expand(num_samples, 1, 1, *site.event_shape)[:, 0, 0]
    return found


def global_parameters(fitted: Fitted) -> dict[str, Tensor]:
    """Return the model's ``pyro.param`` outside the clients plate, constrained."""
    program = fitted.program
    given = handlers.given(program.schema.device, fitted.params, {}, starting=program.local_params)
    with torch.no_grad(), noise.seeded(0), given as parameters:
        poutine.trace(program.model).get_trace(program.schema)
    found = {name: seen["value"] for name, seen in parameters.seen.items()}
    return {name: value for name, value in found.items() if name not in program.local_params}
