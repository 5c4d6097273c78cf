"""The server's half of a fit to moments: one upload of each institution, and then everything in one process.

The moments are stored beside the run's file as soon as all are there: a server that starts again does not ask for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from bayesfed.data.plural import plural
from bayesfed.deploy.agree import agree
from bayesfed.deploy.bundles import as_array
from bayesfed.deploy.coded import write_agreement
from bayesfed.deploy.coding_messages import AgreedCoding
from bayesfed.deploy.contents import check_like
from bayesfed.deploy.global_posterior import GlobalPosterior
from bayesfed.deploy.institutions import Institution, Institutions, run_name
from bayesfed.deploy.messages import Done, MessageError, Tensors, pack
from bayesfed.deploy.moments_messages import Deliver, Reveal, Revealed
from bayesfed.deploy.plan import DeploymentPlan
from bayesfed.engine.moments import Moments
from bayesfed.engine.run import Round
from bayesfed.fitting import finish, start_run, step
from bayesfed.formulas.formula import Formula
from bayesfed.output.posterior import Posterior


def fit_revealed(
    institutions: Institutions, file: Path, callbacks: Sequence[Callable[[Round], object]]
) -> GlobalPosterior:
    """Ask the institutions for their clients' moments, fit the plan to these, and send each its clients' posterior.

    Args:
        institutions: those of the run.
        file: stores the run; the moments are beside it.
        callbacks: called after each round.

    Raises:
        MessageError: an institution refuses, or its moments are not those of its clients.
        ValueError: an institution would join later; see :func:`bayesfed.fit`.
    """
    if institutions.patience.expected:
        raise ValueError(
            "deployment.expected: moments are asked for once, of all: leave it out, or reveal"
        )
    members = institutions.gather()
    if institutions.plan.formula is not None:
        institutions.plan, members = agree(institutions, members, file)
    plan = institutions.plan
    stored = file.with_name(f".{file.name}.moments.safetensors")
    if not stored.exists():
        _ask(institutions, members).save(stored)
    moments = Moments.load(stored)
    federation = moments.federation()
    if isinstance(plan.model, Formula):
        plan = replace(plan, model=replace(plan.model, federation=federation))
    run = start_run(plan, federation, file)
    while run.done < run.rounds:
        done = step(run)
        for callback in callbacks:
            callback(done)
    posterior = finish(run)
    message = Deliver(run=run_name(run), agreement=_agreement(plan))
    _deliver(institutions, members, message, posterior)
    return GlobalPosterior(
        posterior,
        institutions.refused,
        institutions.absent,
        moments=moments,
        exchanges=institutions.exchanges,
    )


def _ask(institutions: Institutions, members: Sequence[Institution]) -> Moments:
    """Return the moments of all clients, in the order of the plan."""
    plan, run = institutions.plan, f"{institutions.new_number('moments'):x}"
    request = pack(Reveal(run=run, terms=plan.description, agreement=_agreement(plan)))
    requests = {member.name: request for member in members}
    found = institutions.request_all(requests, Revealed, run)
    moments: Moments | None = None
    for member in members:
        own = _read(member, *found[member.name])
        moments = own if moments is None else moments.and_those_of(own)
    assert moments is not None
    return moments


def _read(member: Institution, reply: Revealed, parts: Mapping[str, Tensors]) -> Moments:
    """Return an institution's answer, checked.

    Raises:
        MessageError: it is not of the institution's clients and fields, or has numbers that no rows have.
    """
    schema, who = member.schema, f"institution {member.name!r}"
    if reply.clients != schema.clients or set(reply.fields) != set(schema.fields):
        raise MessageError(
            f"{who}: its moments are of other clients or fields than its description"
        )
    kinds = {
        name: (tuple(schema.fields[name].shape), getattr(torch, schema.fields[name].dtype))
        for name in reply.fields
    }
    clients, numbers = len(schema.clients), sum(torch.Size(s).numel() for s, _ in kinds.values())
    form = {
        "counts": torch.zeros(clients, dtype=torch.int64),
        "mean": torch.zeros(clients, numbers, dtype=torch.float64),
        "covariance": torch.zeros(clients, numbers, numbers, dtype=torch.float64),
    }
    found = parts.get("moments", {})
    check_like(f"{who}: its moments", found, form)
    covariance = found["covariance"]
    for name, sound in {
        "counts": found["counts"].sum() == schema.rows and bool((found["counts"] > 0).all()),
        "mean": found["mean"].isfinite().all(),
        "covariance": covariance.isfinite().all() and torch.equal(covariance, covariance.mT),
    }.items():
        if not bool(sound):
            raise MessageError(f"{who}: its {name} cannot be those of {plural(schema.rows, 'row')}")
    smallest, largest = torch.linalg.eigvalsh(covariance)[:, [0, -1]].T
    if bool((smallest < -1e-9 * largest).any()):
        raise MessageError(f"{who}: its covariance has a negative eigenvalue")
    return Moments(tuple(schema.clients), schema.client_dim, kinds, **found)


def _deliver(
    institutions: Institutions,
    members: Sequence[Institution],
    message: Deliver,
    posterior: Posterior,
) -> None:
    """Send each institution the posterior of its clients; the fit is done if one of them does not take it."""
    requests = {}
    for member in members:
        with TemporaryDirectory() as folder:
            path = Path(folder) / "posterior.safetensors"
            posterior.select(member.schema.clients).save(path)
            requests[member.name] = pack(message, file={"bytes": as_array(path.read_bytes())})
    try:
        institutions.request_all(requests, Done, message.run)
    except (MessageError, TimeoutError) as error:
        institutions.report(f"an institution has not got its posterior: {error}")


def _agreement(plan: DeploymentPlan) -> AgreedCoding | None:
    model = plan.model
    return write_agreement(model.agreement) if isinstance(model, Formula) else None
