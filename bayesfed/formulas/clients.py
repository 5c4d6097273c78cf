"""The rows of several clients, divided by client and coded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bayesfed.data.columns import check_columns, client_name
from bayesfed.data.federation import Federation
from bayesfed.data.ingest import warn_dropped
from bayesfed.formulas.coding import Coding
from bayesfed.formulas.columns import columns_of
from bayesfed.formulas.settings import FormulaSettings
from bayesfed.formulas.terms import FormulaError

if TYPE_CHECKING:
    import pandas as pd


def split_by_client(
    data: pd.DataFrame | Mapping[str, pd.DataFrame], client: str
) -> dict[str, pd.DataFrame]:
    """Return each client's rows, with its name as a column.

    Raises:
        FormulaError: a row has no client.
        KeyError: there is no such column.
    """
    import pandas as pd

    if not isinstance(data, pd.DataFrame):
        return {name: rows.assign(**{client: name}) for name, rows in data.items()}
    check_columns("frame", [client], data.columns)
    nameless = data[client].isna().to_numpy()
    if nameless.any():
        raise FormulaError(
            f"row {data.index[nameless.argmax()]} has no client: {client!r} is missing there"
        )
    found = data.groupby(client, sort=False, observed=True)
    return {client_name(name): rows for name, rows in found}


def complete_rows(
    settings: FormulaSettings, clients: Mapping[str, pd.DataFrame]
) -> dict[str, pd.DataFrame]:
    """Return the clients' rows without those that lack a value of the formula's columns; a warning says how many.

    Args:
        settings: the formula.
        clients: client to its rows; clients of which no row remains are left out.

    Raises:
        KeyError: a column of the formula does not exist.

    Example:
        >>> import pandas as pd
        >>> from bayesfed.formulas.clients import complete_rows
        >>> from bayesfed.formulas.settings import FormulaSettings
        >>> settings = FormulaSettings("y ~ x + (1 | site)", "gaussian", "site")
        >>> rows = pd.DataFrame({"y": [1.0, 2.0, None], "x": 0.5, "other": [None, 7.0, 8.0], "site": "A"})
        >>> complete_rows(settings, {"A": rows.head(2)})["A"]["y"].tolist()
        [1.0, 2.0]
    """
    parts = (settings.terms, *settings.terms.parameters.values())
    found = {name for part in parts for name in columns_of(part, settings)[0]}
    used = sorted(found - settings.terms.incomplete)
    complete, dropped = dict[str, np.ndarray](), list[int]()
    for i, (name, rows) in enumerate(clients.items()):
        check_columns("frame", used, rows.columns)
        complete[name] = rows[used].notna().all(axis=1).to_numpy()
        dropped += [i] * int((~complete[name]).sum())
    if dropped:
        warn_dropped(torch.tensor(dropped), list(clients), sum(map(len, clients.values())))
    return {name: clients[name][rows] for name, rows in complete.items() if rows.any()}


def code_clients(coding: Coding, clients: Mapping[str, pd.DataFrame]) -> Federation:
    """Code the clients' fields, all rows at once, which is faster than by client and gives the same.

    Raises:
        FormulaError: see :meth:`bayesfed.formulas.coding.Coding.fields`; the message names the client.
    """
    import pandas as pd

    try:
        fields = coding.fields("all", pd.concat(list(clients.values()), ignore_index=True))
    except (ValueError, KeyError):  # code each client alone, for an error that names it
        own = {name: coding.fields(name, rows) for name, rows in clients.items()}
    else:
        ends = np.cumsum([len(rows) for rows in clients.values()])[:-1]
        parts = {label: np.split(values, ends) for label, values in fields.items()}
        own = {
            name: {label: part[i] for label, part in parts.items()}
            for i, name in enumerate(clients)
        }
    gaps: Any = "keep" if coding.terms.uncertain else "fail"
    return Federation.from_arrays(own, client_dim=coding.client, missing=gaps)


def code_with_gaps(coding: Coding, clients: Mapping[str, pd.DataFrame]) -> Federation:
    """Code rows of clients, some of which have no outcome: it is missing there.

    Example:
        >>> import bayesfed as bf, pandas as pd
        >>> from bayesfed.formulas.clients import code_with_gaps
        >>> frame = pd.DataFrame({"y": [1.0, 3.0, 2.0, 5.0], "x": [0.0, 1.0, 1.0, 2.0], "site": ["A", "A", "B", "B"]})
        >>> model = bf.formula("y ~ x + (1 | site)", frame)
        >>> code_with_gaps(model.coding, {"C": pd.DataFrame({"y": [None, 4.0], "x": [1.0, 2.0], "site": "C"})})["y"]
        tensor([nan, 4.])
    """
    outcome, found = coding.outcome, {}
    columns = coding.terms.model.response.var_names & {*coding.kinds}
    columns = {outcome} if outcome in columns else columns  # trials of a proportion are there
    for name, rows in clients.items():
        there = columns <= set(rows.columns)
        known = (
            rows[sorted(columns)].notna().all(axis=1).to_numpy()
            if there
            else np.zeros(len(rows), bool)
        )
        fields: dict[str, np.ndarray] = {}
        for which, idle in ((known, []), (~known, [*columns])):
            if not which.any():
                continue
            some = rows[which].drop(columns=idle, errors="ignore")
            for label, values in coding.fields(name, some).items():
                if label not in fields:
                    whole = (len(rows), *values.shape[1:])
                    fields[label] = np.full(whole, np.nan if label == outcome else 0, values.dtype)
                fields[label][which] = values
        fields.setdefault(outcome, np.full(len(rows), np.nan))
        found[name] = fields
    return Federation.from_arrays(found, client_dim=coding.client, missing="keep")
