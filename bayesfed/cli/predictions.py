"""Predictions of an institution's posterior for rows, as a table: for its own people, by the node or without it."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
from torch.distributions.constraints import boolean, integer_interval

from bayesfed.cli.errors import one_line
from bayesfed.cli.local_queries import Answer, Question, read_question
from bayesfed.data.federation import Federation, Model
from bayesfed.deploy.messages import Begin, unpack_as
from bayesfed.deploy.moments_messages import Deliver
from bayesfed.deploy.node_clients import NodeClients
from bayesfed.deploy.node_moments import DELIVERED
from bayesfed.deploy.node_run import BEGIN, POSTERIOR
from bayesfed.deploy.plan import DeploymentPlan
from bayesfed.effects.rows import formula_of
from bayesfed.elbo.handlers import on_cpu
from bayesfed.formulas.clients import code_with_gaps, split_by_client
from bayesfed.output.posterior import Posterior
from bayesfed.settings import SettingsError

QUANTILES = {"3 %": 0.03, "50 %": 0.5, "97 %": 0.97}
_ROW, _CLIENT, _VARIABLE = "row", "client", "variable"


@dataclass
class LocalPosteriors:
    """The posteriors of an institution's fits, for its own people.

    Attributes:
        federation: its clients, with the rows of the fit; of a formula, client's name to rows.
        plan: the model and how it was fitted.
        folder: the node's.
        client: the column with a row's client.
        fields: the columns of each field in a CSV file.
        alone: the client of all rows, if the institution is one client.
        held: the names of clients that take no part in the rounds.
    """

    federation: Federation | Mapping[str, pd.DataFrame]
    plan: DeploymentPlan
    folder: Path
    client: str
    fields: list[str] | dict[str, str | list[str]] | None
    alone: str | None = None
    held: Sequence[str] = ()
    _last: tuple[tuple[Path, int], Posterior] | None = field(default=None, init=False)

    def handle(self, payload: bytes) -> bytes:
        """Return the answer to a question, as bytes; to an invalid one it is an error."""
        try:
            answer = Answer(table=self.table(read_question(payload)))
        except Exception as error:
            answer = Answer(error=one_line(error))
        return answer.model_dump_json().encode()

    @on_cpu()
    def table(self, question: Question) -> str:
        """Return the answer to a question, as the text of a CSV file.

        Raises:
            ValueError: the rows do not have the fields of the fit; there is no such fit.
        """
        posterior = self.posterior(question.run)
        rows = pd.read_csv(io.StringIO(question.rows), dtype={self.client: str})
        if not len(rows):
            raise ValueError("there are no rows to predict")
        if self.alone is not None and self.client not in rows.columns:
            rows = rows.assign(**{self.client: self.alone})
        own = self._clients(rows, posterior)
        _check_fields(own, posterior.federation)
        order, parts = np.argsort(pd.factorize(rows[self.client])[0], kind="stable"), []
        known = set(posterior.federation.names)
        for new in (False, True):
            names = [name for name in own.names if (name not in known) is new]
            if names:
                some, at = own.select(names), own.index(names).numpy()
                numbers = 1 + order[np.isin(own.owner.numpy(), at)]
                of = posterior.personalize(some) if new else posterior.select(names)
                found = _variables(of) if question.variables else _outcomes(of, some, numbers)
                parts.append(found.assign(new=new))
        table = pd.concat(parts)
        _check_finite(table)
        if _ROW in table:
            table = table.astype({_ROW: "Int64"}).sort_values(_ROW, kind="stable")
        text: str = table.to_csv(index=False, float_format="%.6g")
        return text

    def _clients(self, rows: pd.DataFrame, posterior: Posterior) -> Federation:
        """Return the clients of rows whose outcomes may be missing."""
        formula = formula_of(posterior.program.model)
        if formula is not None:
            return code_with_gaps(formula.coding, split_by_client(rows, self.client))
        rows = self._with_outcomes(rows, posterior)
        return Federation.from_frame(rows, client=self.client, fields=self.fields, missing="keep")

    def _with_outcomes(self, rows: pd.DataFrame, posterior: Posterior) -> pd.DataFrame:
        """Return the rows with empty columns in place of the outcomes that they lack, since these are predicted."""
        named = self.fields if isinstance(self.fields, dict) else {}
        columns = []
        for site in posterior.program.observed:
            if site.name in posterior.federation.fields:
                found = named.get(site.name, site.name)
                columns += [found] if isinstance(found, str) else found
        return rows.assign(**{name: np.nan for name in columns if name not in rows})

    def posterior(self, run: str | None = None) -> Posterior:
        """Return the posterior of a run, by default of the run that ended last.

        Raises:
            SettingsError: no run of that name has ended here.
        """
        ended = sorted(
            (self.folder / "runs").glob(f"*/{POSTERIOR}"), key=lambda path: path.stat().st_mtime_ns
        )
        paths = [path for path in ended if run is None or path.parent.name == run]
        if not paths:
            known = ", ".join(path.parent.name for path in ended) or "none"
            raise SettingsError(
                f"no fit{'' if run is None else f' {run!r}'} has ended here; those that have: {known}"
            )
        path, algorithm = paths[-1], self.plan.algorithm
        key = (path, path.stat().st_mtime_ns)
        if self._last is None or self._last[0] != key:
            guide = getattr(algorithm.globals, "guide", None)
            model, federation = self._model_and_clients(path.parent)
            found = Posterior.load(path, model, federation, guide=guide)
            self._last = (key, found)
        return self._last[1]

    def _model_and_clients(self, run: Path) -> tuple[Model, Federation]:
        """Return the model of a run and its clients; those of a formula are coded as was agreed for this run."""
        clients, agreement = NodeClients.divide(self.plan, self.federation, self.held), None
        if self.plan.formula is not None:
            if (run / DELIVERED).exists():  # it was fitted to moments
                agreement = unpack_as((run / DELIVERED).read_bytes(), Deliver)[0].agreement
            else:
                agreement = unpack_as((run / BEGIN).read_bytes(), Begin)[0].agreement
        model, federation, _ = clients.code(agreement)
        return model, federation


def _check_fields(found: Federation, expected: Federation) -> None:
    for name in expected.fields:
        if name not in found.fields:
            raise ValueError(f"the rows have no field {name!r}; it may be empty if it is not known")
        one, other = tuple(found.event_shape(name)), tuple(expected.event_shape(name))
        if one != other:
            raise ValueError(f"field {name!r} has shape {one} a row, in the fit it is {other}")


def _check_finite(table: pd.DataFrame) -> None:
    """Fail on a row without a prediction, because a number on which its outcome depends is missing."""
    lacking = table[table["mean"].isna()]
    if len(lacking):
        first = lacking.iloc[0]
        raise ValueError(
            f"there is no prediction of {first['variable']} for client {first['client']!r}: its rows lack a number "
            "that is no outcome"
        )


def _outcomes(posterior: Posterior, rows: Federation, numbers: np.ndarray) -> pd.DataFrame:
    """Return predictions for every row, by its number, and for every client if an outcome is the client's."""
    clients, draws, tables = np.array(rows.names), posterior.predict(rows), []
    by_row = {_ROW: numbers, _CLIENT: clients[rows.owner.numpy()]}
    for site in posterior.program.observed:
        whose = by_row if site.per_row or site.joint else {_CLIENT: clients}
        value, last = draws[site.name].numpy(force=True), getattr(site.support, "upper_bound", None)
        if isinstance(site.support, integer_interval) and isinstance(last, int):  # of classes
            for k in range(last + 1):
                heads = whose | {_VARIABLE: f"{site.name} = {k}"}
                tables.append(pd.DataFrame(heads | {"mean": (value == k).mean(0)}))
        else:
            found = _describe(site.name, whose, value)
            # of 0 and 1 the mean says all
            binary = getattr(site.support, "base_constraint", site.support) is boolean
            tables += [t.drop(columns=["sd", *QUANTILES]) if binary else t for t in found]
    return pd.concat(tables)


def _variables(posterior: Posterior) -> pd.DataFrame:
    """Return summaries of the local variables of every client."""
    program, draws = posterior.program, posterior.sample() | posterior.derived()
    local = [site.name for site in program.locals if not site.name.startswith("_")]
    local += [name for name, dims in program.derived.items() if dims == ("client",)]
    if not local:
        raise ValueError("the model has no local variables")
    whose = {_CLIENT: np.array(posterior.federation.names)}
    tables = [t for n in local for t in _describe(n, whose, draws[n].numpy(force=True))]
    return pd.concat(tables)


def _describe(
    name: str, whose: Mapping[str, np.ndarray], draws: np.ndarray
) -> Iterator[pd.DataFrame]:
    """Return mean, standard deviation and quantiles of each number of ``(S, K, *event)`` draws."""
    flat = draws.reshape(*draws.shape[:2], -1).astype(float)
    for j in range(flat.shape[2]):
        value, label = flat[:, :, j], name if draws.ndim == 2 else f"{name}[{j}]"
        found = {"mean": value.mean(0), "sd": value.std(0, ddof=1)}
        found |= dict(zip(QUANTILES, np.quantile(value, list(QUANTILES.values()), 0), strict=True))
        yield pd.DataFrame({**whose, _VARIABLE: label, **found})
