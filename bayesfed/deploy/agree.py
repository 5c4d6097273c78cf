"""The server's half of the agreement on a formula's coding, before the run begins: it asks for reports and sums.

The result is stored beside the run's file, so that a run that goes on has the coding that it began with. The sums are
secure sums where the run's are; sets of levels cannot be summed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from bayesfed.deploy import secure
from bayesfed.deploy.coded import (
    join,
    read_agreement,
    read_columns,
    write_agreement,
)
from bayesfed.deploy.coding_messages import Add, AgreedCoding, Code, Columns, Describe, Totals
from bayesfed.deploy.contents import broadcast_digest, check_like
from bayesfed.deploy.institutions import Institution, Institutions
from bayesfed.deploy.messages import MessageError, RoundId, Schema, Tensors, pack
from bayesfed.deploy.plan import DeploymentPlan
from bayesfed.deploy.schemas import schema_difference
from bayesfed.deploy.secure_round import unmask_sum, words_like
from bayesfed.engine.files import atomically
from bayesfed.engine.made_up import made_up_federation
from bayesfed.formulas.agreement import (
    FIELD,
    Agreement,
    add_totals,
    agree_on_columns,
    make_coding,
    open_calls,
)
from bayesfed.formulas.formula import check_predictors, write_formula
from bayesfed.formulas.settings import FormulaSettings


def agree(
    institutions: Institutions, members: list[Institution], file: Path
) -> tuple[DeploymentPlan, list[Institution]]:
    """Agree on the coding of the plan's formula.

    Args:
        institutions: those of the run.
        members: the institutions as they have described themselves.
        file: the run's file.

    Returns:
        The plan with the program of the formula as its model, and the institutions with the schemas of coded fields.

    Raises:
        FormulaError: the columns of institutions do not fit together, or cannot be coded.
        MessageError: an institution refuses.
    """
    plan = institutions.plan
    assert plan.formula is not None
    for member in members:
        if member.schema.fields:
            raise MessageError(
                f"institution {member.name!r} has a model by name, not the formula {plan.formula.text!r}"
            )
    run = f"{institutions.new_number('agreement'):x}"
    stored = file.with_name(f".{file.name}.coding.json")
    if file.exists() and stored.exists():
        agreement = read_agreement(AgreedCoding.model_validate_json(stored.read_bytes()))
    else:
        agreement = _agreement(institutions, plan.formula, run)
        with atomically(stored) as path:
            path.write_text(write_agreement(agreement).model_dump_json(), encoding="utf-8")
    names = [member.name for member in members if member.name in institutions.present]
    schemas = coded_schemas(institutions, agreement, names, run)
    first = schemas[names[0]]
    for name in names[1:]:
        if (differs := schema_difference(first, schemas[name])) is not None:
            raise MessageError(differs)
    members = [
        replace(member, schema=member.schema.model_copy(update={"fields": first.fields}))
        for member in members
    ]
    coding = make_coding(plan.formula, agreement)
    clients = [name for member in members for name in member.schema.clients]
    fields = {n: (kind.shape, getattr(torch, kind.dtype)) for n, kind in first.fields.items()}
    federation = made_up_federation(clients, fields, first.client_dim, gaps=False, filling=1.0)
    model = write_formula(plan.formula, agreement, coding, federation)
    return replace(plan, model=model), members


def coded_schemas(
    institutions: Institutions, agreement: Agreement, names: list[str], run: str
) -> dict[str, Schema]:
    """Tell institutions that the agreement is complete, and return the schemas of their coded clients."""
    message = Code(run=run, agreement=write_agreement(agreement))
    found = institutions.request_all(dict.fromkeys(names, pack(message)), Schema, run)
    return {name: schema for name, (schema, _) in found.items()}


def _agreement(institutions: Institutions, settings: FormulaSettings, run: str) -> Agreement:
    """Return a new agreement of the name ``run``."""
    plan = institutions.plan
    request = pack(Describe(run=run, terms=plan.description))
    found = institutions.request_all(
        dict.fromkeys(sorted(institutions.present), request), Columns, run
    )
    columns = {name: found[name][0] for name in sorted(found)}
    keys = {name: message.key for name, message in columns.items() if message.key is not None}
    if plan.secure:
        for name in columns.keys() - keys.keys():
            raise MessageError(f"institution {name!r} has no key for secure sums")
        secure.check_keys(keys)
    reports = {name: read_columns(message) for name, message in columns.items()}
    agreement, step = agree_on_columns(reports, "institution"), 0
    check_predictors(settings, make_coding(settings, agreement))
    institutions.keys = keys
    while not agreement.complete:
        agreement = add_totals(agreement, join(_ask(institutions, settings, run, step, agreement)))
        step += 1
    institutions.keys = {}  # those of the run follow
    return agreement


def _ask(
    institutions: Institutions, settings: FormulaSettings, run: str, step: int, agreement: Agreement
) -> Tensors:
    """Return the next sums over all institutions."""
    coding = make_coding(settings, agreement)
    message, part = Add(run=run, agreement=write_agreement(agreement)), "sums"
    if institutions.plan.secure:
        round_id, part = RoundId(number=step, attempt=0), "masked"
        message = message.model_copy(update={"round": round_id, "roster": dict(institutions.keys)})
    requests = dict.fromkeys(sorted(institutions.present), pack(message))
    answers = institutions.request_all(requests, Totals, run)
    own = {name: answers[name][1].get(part, {}) for name in sorted(answers)}
    first = next(iter(own.values()))
    form = {
        name: torch.zeros(3, value.shape[-1] if value.ndim else 0, dtype=torch.float64)
        for name, value in first.items()
    }
    wanted = form if message.round is None else {n: words_like(v) for n, v in form.items()}
    for name, sums in own.items():
        check_like(f"institution {name!r}: the sums", sums, wanted)
    expected = {one.name for one in open_calls(coding, agreement.totals)}
    if (
        not first
        or (expected and set(first) != expected)
        or any(not name.startswith(FIELD) for name in set(first) - expected)
    ):
        raise MessageError(
            f"institution {next(iter(own))!r}: its sums are not those that come next"
        )
    if message.round is not None:
        broadcast = broadcast_digest(message, {})
        return unmask_sum(institutions, run, message.round, broadcast, own)
    return {name: torch.stack([sums[name] for sums in own.values()]).sum(0) for name in form}
