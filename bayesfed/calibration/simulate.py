"""Data sets simulated from a model's prior on the clients' own covariates: true values and outcomes in their fields.

    (θ, w) ~ p(θ) Π_i p(w_i | θ),   y_ij ~ p(· | θ, w_i, x_ij)

The outcome of each observed site is put into the field that the program has read it from, which is found by comparing
values; times of events are censored as :mod:`bayesfed.calibration.censoring` says. One simulated data set is then
checked: the program must read these outcomes, and its densities must not depend on that field otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from pyro import poutine
from pyro.distributions.util import broadcast_shape
from torch import Tensor

from bayesfed.algorithms import Algorithm
from bayesfed.calibration.censoring import FollowUp, find_event, find_follow_up
from bayesfed.data.columns import UnknownName
from bayesfed.data.federation import Federation, Model
from bayesfed.elbo import noise
from bayesfed.engine.program import build_program
from bayesfed.output.client_draws import Draws
from bayesfed.output.draws import client_chunks, derive, flatten_rows, run_model, theta_support
from bayesfed.output.fitted import Fitted
from bayesfed.output.outcomes import NoSampler
from bayesfed.output.prior import draw_outcomes, sample_prior

TOLERANCE = 1e-3
"""The largest difference of log densities that is taken for round-off, relative to their size."""


@dataclass(frozen=True, eq=False)
class Simulator:
    """A model from whose prior true values and outcomes are drawn.

    Attributes:
        fitted: the program and the clients, before any fit.
        fields: observed site to the field that its outcomes are read from.
        at: global sites to given true values, ``(1, *event)``; all others are drawn from their priors.
        follow_up: observed sites with censored rows to when these are censored.
    """

    fitted: Fitted
    fields: Mapping[str, str]
    at: Mapping[str, Tensor]
    follow_up: Mapping[str, FollowUp]

    def draw(self, seed: int) -> tuple[dict[str, Tensor], Federation]:
        """Draw true values, of globals ``(*event)`` and of clients ``(N, *event)``, and the clients with outcomes.

        Raises:
            ValueError: the model cannot be run at the values drawn, or an outcome is not finite.
        """
        with noise.seeded(seed), torch.no_grad():
            prior = sample_prior(self.fitted, 1, self.at)
            simulated = self._with_outcomes(self._outcomes(prior))
            truth = {name: value[0] for name, value in prior.items()}
            return truth | self._derived(prior, simulated), simulated

    def _outcomes(self, prior: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Draw outcomes ``(1, rows or N, *event)``, times among them until the end of the follow-up."""
        outcomes = draw_outcomes(self.fitted, prior, 1)
        return outcomes | {s: found.censor(outcomes[s]) for s, found in self.follow_up.items()}

    def _with_outcomes(self, outcomes: Mapping[str, Tensor]) -> Federation:
        """Return the clients with outcomes ``(1, rows or N, *event)`` in place of theirs, where these are not missing.

        Raises:
            ValueError: an outcome is not finite.
        """
        federation = self.fitted.federation
        fields: dict[str, Any] = dict(federation.fields)
        for site, field in self.fields.items():
            old, new = federation[field], outcomes[site][0]
            if not new.isfinite().all():
                raise ValueError(
                    f"site {site!r} has outcomes that are not finite at a draw of its prior"
                )
            sites = self.fitted.program.sites
            if not (sites[site].per_row or sites[site].joint):
                new = new[federation.owner]
            new = new.reshape(old.shape).to(old)
            fields[field] = new.where(~old.isnan(), old)
            if site in self.follow_up:
                indicator = self.follow_up[site].indicator(new)
                fields[self.follow_up[site].field] = indicator.to(
                    federation[self.follow_up[site].field]
                )
        return replace(federation, fields=fields, moments=None)

    def _derived(self, prior: Mapping[str, Tensor], simulated: Federation) -> dict[str, Tensor]:
        """Return the model's derived values outside the rows, at the true values."""
        fitted = replace(self.fitted, federation=simulated)
        dims = fitted.program.derived
        parts: dict[str, list[Tensor]] = {n: [] for n, d in dims.items() if "observation" not in d}
        for chunk in client_chunks(fitted, 1, simulated) if parts else ():
            batch = simulated.batch(chunk)
            found = derive(fitted, self._draws(prior, chunk), chunk, batch)
            for name in parts:
                value = flatten_rows(found[name].value, found[name], batch, 1)[0]
                if found[name].local or not parts[name]:
                    parts[name].append(value if found[name].local else value[0])
        return {
            name: torch.cat(values) if dims[name] else values[0] for name, values in parts.items()
        }

    def _draws(self, prior: Mapping[str, Tensor], chunk: Tensor) -> Draws:
        latent = self.fitted.program.latent
        values = {s.name: prior[s.name][:, chunk if s.local else None, None] for s in latent}
        return Draws(values, 1)

    def check(self, seed: int = 0) -> None:
        """Simulate once, and check that the program reads the outcomes, and that nothing else depends on their fields.

        Raises:
            ValueError: names the site and the field.
        """
        from bayesfed.output.inference_data import find_data  # xarray takes a while to import

        with noise.seeded(seed), torch.no_grad():
            prior = sample_prior(self.fitted, 1, self.at)
            outcomes = self._outcomes(prior)
            simulated = self._with_outcomes(outcomes)
            old = {name: self.fitted.federation.fields[name] for name in self.fields.values()}
            observed = replace(simulated, fields={**simulated.fields, **old})
            again, _ = find_data(replace(self.fitted, federation=simulated))
            before, after = (
                self._densities(prior, rows, outcomes) for rows in (observed, simulated)
            )
        for site, field in self.fields.items():
            there = ~again[site].isnan()
            if not torch.equal(again[site][there], outcomes[site][0].to(again[site])[there]):
                raise ValueError(
                    f"site {site!r} does not read simulated outcomes from field {field!r}: observe a field as it is, "
                    f'obs=obs.get("{field}"), and compute what else is needed of it beforehand'
                )
        for site, one in before.items():
            if not torch.allclose(one, after[site], TOLERANCE, TOLERANCE, equal_nan=True):
                names = ", ".join(map(repr, self.fields.values()))
                raise ValueError(
                    f"the density of site {site!r} depends on an outcome, {names}, other than as its observed value: "
                    "outcomes that depend on others cannot be simulated"
                )

    def _densities(
        self, prior: Mapping[str, Tensor], federation: Federation, outcomes: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the log densities of the observed sites of the first clients at outcomes, given their fields."""
        program = self.fitted.program
        chunk = next(iter(client_chunks(self.fitted, 1, federation)))
        batch, first = federation.batch(chunk), int(federation.offsets[chunk[-1] + 1])
        values = dict(self._draws(prior, chunk).values)
        for site in program.observed:
            if site.per_row:
                event = outcomes[site.name].shape[2:]
                own = outcomes[site.name].new_zeros(1, *batch.mask.shape, *event)
                own[:, batch.mask] = outcomes[site.name][:, :first]
                own[:, ~batch.mask] = outcomes[site.name][:, :1]
                values[site.name] = own
        model = poutine.uncondition(program.model)
        nodes = run_model(self.fitted, model, Draws(values, 1), chunk, batch, prior=True)
        found = {}
        for site in program.observed:
            if site.per_row:
                value = nodes[site.name]["fn"].log_prob(values[site.name])
                found[site.name] = value.expand(1, *batch.mask.shape)[:, batch.mask]
        return found


def make_simulator(
    model: Model,
    federation: Federation,
    algorithm: Algorithm,
    seed: int,
    at: Mapping[str, Any] | None = None,
) -> Simulator:
    """Make the simulator of a model, or refuse the model by name.

    Args:
        model: the Pyro program.
        federation: the clients, with covariates, and with outcomes, of which only the places of missing ones count.
        algorithm: its guide says which variables there are.
        seed: of the program and of the check.
        at: true values of global variables.

    Raises:
        ValueError: a parameter has no prior; a factor, weighted rows, or an outcome that has no sampler or is not a
            field cannot be simulated; it is not clear which field says that rows are censored.
        KeyError: ``at`` names no global variable.
    """
    from bayesfed.output.inference_data import find_data  # xarray takes a while to import

    program = build_program(model, federation, algorithm, seed)
    fitted = Fitted(program, federation, program.init, {}, {}, algorithm, seed)
    events = _check_priors(fitted)
    data, params = find_data(fitted)
    if params:
        raise ValueError(
            f"parameter {next(iter(params))!r} has no prior from which a true value could be drawn: sample it with "
            "pyro.sample in place of pyro.param"
        )
    fields = {site.name: _field_of(fitted, site.name, data[site.name]) for site in program.observed}
    follow_up = find_follow_up(events, fields, federation)
    simulator = Simulator(fitted, fields, _given(fitted, at or {}), follow_up)
    try:
        simulator.check(seed)
    except NoSampler as error:
        raise ValueError(f"outcomes cannot be simulated: {error}") from None
    return simulator


def check_posterior(simulator: Simulator) -> None:
    """Refuse a method whose q(θ) is a point estimate, or has a few values.

    Raises:
        ValueError: names the method and the variables.
    """
    fitted, names = simulator.fitted, [site.name for site in simulator.fitted.program.globals]
    if names and theta_support(fitted) is not None:
        raise ValueError(
            f"{fitted.algorithm} gives {', '.join(names[:4])} a point estimate or a few values, and no posterior whose "
            "intervals could be checked: use a method with a distribution of θ, such as bf.SFVI()"
        )


def _check_priors(fitted: Fitted) -> dict[str, Tensor]:
    """Refuse factors and weighted rows; return which rows have events for each site that can be censored."""
    program, federation = fitted.program, fitted.federation
    for site in program.likelihood:
        if site.factor:
            raise ValueError(
                f"pyro.factor {site.name!r} has no outcome that could be simulated: write it as the distribution of an "
                "observed site"
            )
        if site.conditional:
            raise ValueError(
                f"site {site.name!r} has a variable of the client integrated out in closed form, and is not simulated "
                "with it: sample that variable in the program"
            )
    events: dict[str, list[Tensor]] = {}
    with noise.seeded(0), torch.no_grad():
        prior = _sample_prior(fitted)
        for chunk in client_chunks(fitted, 1, federation):
            batch = federation.batch(chunk)
            values = {
                s.name: prior[s.name][:, chunk if s.local else None, None] for s in program.latent
            }
            nodes = run_model(fitted, program.model, Draws(values, 1), chunk, batch, prior=True)
            for site in program.observed:
                _check_rows(site.name, nodes[site.name], batch.mask)
                event = find_event(nodes[site.name], batch.mask)
                if event is not None:
                    events.setdefault(site.name, []).append(event)
    return {name: torch.cat(parts) for name, parts in events.items()}


def _check_rows(name: str, node: Mapping[str, Any], mask: Tensor) -> None:
    """Refuse rows that are weighted."""
    scale = torch.as_tensor(1.0 if node["scale"] is None else node["scale"])
    if (scale.expand(broadcast_shape(scale.shape, mask.shape)) != 1).any():
        raise ValueError(
            f"site {name!r} has weighted rows, whose densities are not those of simulated outcomes: calibrate the "
            "model without weights"
        )


def _sample_prior(fitted: Fitted) -> dict[str, Tensor]:
    """Draw once from the prior, or raise a ValueError that says which parameter has none."""
    try:
        return sample_prior(fitted, 1)
    except RuntimeError as error:  # a local pyro.param has no value before a fit
        raise ValueError(f"true values cannot be drawn from the prior: {error}") from None


def _field_of(fitted: Fitted, site: str, data: Tensor) -> str:
    """Return the field that an observed site reads: that of its name, or the first, among those with its values."""
    federation = fitted.federation
    found = []
    for name in federation.fields:
        value = federation[name]
        if len(value) != len(data):  # an outcome of clients
            value = value[federation.offsets[:-1].to(value.device)]
        value = value.to(data)
        if value.shape == data.shape and bool(((value == data) | (data.isnan())).all()):
            found.append(name)
    if not found:
        raise ValueError(
            f"site {site!r} does not observe a field as it is, so that a simulated outcome cannot take its place: "
            "compute the outcome beforehand, and observe that field"
        )
    return site if site in found else found[0]


def _given(fitted: Fitted, at: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return given true values by global site, ``(1, *event)``."""
    sites, found = {site.name: site for site in fitted.program.globals}, {}
    for name, value in at.items():
        site = sites.get(name) or sites.get(f"_prior|{name}")
        if site is None:
            remedy = f"there are {', '.join(sites)}"
            if name in fitted.program.derived:
                remedy += (
                    f". A slope of a formula is sampled if it has a prior, priors={{{name!r}: ...}}"
                )
            raise UnknownName(f"at: no global variable {name!r} is sampled: {remedy}")
        given = torch.as_tensor(value, dtype=fitted.federation.dtype)
        if given.shape != site.event_shape:
            raise ValueError(
                f"at: {name!r} has shape {tuple(site.event_shape)}, not {tuple(given.shape)}"
            )
        if not bool(torch.as_tensor(site.support.check(given)).all()):
            raise ValueError(f"at: {name!r} cannot be {value!r}, which is outside its support")
        found[site.name] = given[None].to(fitted.federation.device)
    return found
