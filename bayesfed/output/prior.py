"""The model's prior, with its parameters as they were fitted: draws, predictions, and densities of draws."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from pyro import poutine
from torch import Tensor

from bayesfed.elbo import handlers
from bayesfed.elbo.log_density import log_density
from bayesfed.output.client_draws import Draws
from bayesfed.output.draws import client_chunks, derive, flatten_rows, run_model
from bayesfed.output.fitted import Fitted
from bayesfed.output.outcomes import NoSampler


def sample_prior(
    fitted: Fitted, num_samples: int, at: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Draw the latent sites from the model alone, by torch's generator: ``(S, *event)`` or ``(S, N, *event)``.

    With draws of the global sites, ``at``, the clients' variables are drawn from their priors given these.
    """
    program, federation = fitted.program, fitted.federation
    common: dict[str, Tensor] = dict(at or {})
    parts: dict[str, list[Tensor]] = {site.name: [] for site in program.locals}
    with torch.no_grad():
        for chunk in client_chunks(fitted, num_samples):
            head = federation.batch(chunk, torch.zeros(len(chunk), 1, dtype=torch.int64))
            params = fitted.params_of(chunk)
            given = {name: value[:, None, None] for name, value in common.items()}
            with (
                handlers.given(head.device, params, values=given, draws=num_samples),
                poutine.trace() as tracer,
                handlers.Until([site.name for site in program.latent]),
            ):
                program.model(head)
            for site in program.latent:
                shape = (num_samples, len(chunk) if site.local else 1, 1, *site.event_shape)
                value = tracer.trace.nodes[site.name]["value"].expand(shape).squeeze(2)
                if site.local:
                    parts[site.name].append(value)
                else:
                    common[site.name] = value.squeeze(1)
    return common | {name: torch.cat(values, 1) for name, values in parts.items()}


def log_prior(fitted: Fitted, draws: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Compute the prior log density of each global site at draws ``(S, *event)`` of all of them: ``(S,)``."""
    program, names = fitted.program, [site.name for site in fitted.program.globals]
    values, count = {name: draws[name][:, None, None] for name in names}, len(draws[names[0]])
    device, own = program.schema.device, program.local_params
    with (
        torch.no_grad(),
        handlers.given(device, fitted.params, values=values, draws=count, starting=own),
        poutine.trace() as tracer,
        handlers.Until(names),
    ):
        program.model(program.schema)
    found = {name: log_density(tracer.trace.nodes[name]) for name in names}
    return {name: value.expand(count, 1, 1).flatten() for name, value in found.items()}


def derived_from_prior(
    fitted: Fitted, prior: Mapping[str, Tensor], num_samples: int
) -> dict[str, Tensor]:
    """Compute ``pyro.deterministic`` values outside the clients plate at draws from the prior: ``(S, *)``.

    Returns an empty dict if the model cannot be run at some draw from the prior.
    """
    try:
        return derived_at(fitted, prior, num_samples)
    except (RuntimeError, ValueError):
        return {}


def derived_at(fitted: Fitted, draws: Mapping[str, Tensor], num_samples: int) -> dict[str, Tensor]:
    """Compute ``pyro.deterministic`` values outside the clients plate at draws of all latent sites: ``(S, *)``."""
    program, federation = fitted.program, fitted.federation
    names = [name for name, dims in program.derived.items() if not dims]
    if not names:
        return {}
    first = torch.zeros(1, dtype=torch.int64)
    values = {
        site.name: draws[site.name][:, first if site.local else None, None]
        for site in program.latent
    }
    batch = federation.batch(first, first[:, None])
    found = derive(fitted, Draws(values, num_samples), first, batch)
    shapes = {name: (num_samples, *found[name].value.shape[3:]) for name in names}
    return {name: found[name].value[:, 0, 0].expand(shape) for name, shape in shapes.items()}


def prior_predictive(
    fitted: Fitted, prior: Mapping[str, Tensor], num_samples: int
) -> dict[str, Tensor]:
    """Draw the observed sites at draws from the prior: ``(S, rows, *event)``, or ``(S, N, *event)`` outside the rows.

    Returns an empty dict, with a warning, if the sites cannot be drawn at some draw from the prior.
    """
    try:
        return draw_outcomes(fitted, prior, num_samples)
    except NoSampler:  # as for the posterior predictive, which warns
        return {}
    except (RuntimeError, ValueError) as error:
        warnings.warn(
            f"there is no prior_predictive, as at some draw from the prior: {error}", stacklevel=5
        )
        return {}


def draw_outcomes(
    fitted: Fitted, prior: Mapping[str, Tensor], num_samples: int
) -> dict[str, Tensor]:
    """Draw the observed sites at draws of the latent ones, as :func:`prior_predictive` does.

    Raises:
        NoSampler: the outcome of a site cannot be drawn.
        ValueError: the model cannot be run at some draw.
    """
    program, federation = fitted.program, fitted.federation
    model = poutine.uncondition(program.model)
    parts: dict[str, list[Tensor]] = {site.name: [] for site in program.observed}
    for chunk in client_chunks(fitted, num_samples, federation):
        batch = federation.batch(chunk)
        values = {
            site.name: prior[site.name][:, chunk if site.local else None, None]
            for site in program.latent
        }
        draws = Draws(values, num_samples)
        nodes = run_model(fitted, model, draws, chunk, batch, prior=True)
        for site in program.observed:
            value = nodes[site.name]["value"]
            if site.joint:
                value = value.squeeze(2).expand(num_samples, *batch.mask.shape)
                parts[site.name].append(value[:, batch.mask])
            else:
                parts[site.name].append(flatten_rows(value, site, batch, num_samples))
    return {name: torch.cat(values, 1) for name, values in parts.items()}
