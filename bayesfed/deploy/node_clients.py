"""The clients of a node: those that take part and those that are held out, coded, or as rows of a formula."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING

from bayesfed.data.federation import Federation, Model
from bayesfed.deploy.coded import RowsToCode, read_agreement
from bayesfed.deploy.coding_messages import AgreedCoding
from bayesfed.deploy.messages import FieldSchema, Schema
from bayesfed.deploy.plan import DeploymentPlan

if TYPE_CHECKING:
    import pandas as pd

_VERSION = version("bayesfed")


@dataclass(frozen=True)
class NodeClients:
    """The clients of a node.

    Attributes:
        plan: the fit.
        data: the clients that take part: a federation; of a formula, client's name to rows.
        rows: of a formula, the rows of all clients.
        held_out: of another model, the clients that are held out, if there are any.
    """

    plan: DeploymentPlan
    data: Federation | Mapping[str, pd.DataFrame]
    rows: RowsToCode | None
    held_out: Federation | None

    @classmethod
    def divide(
        cls,
        plan: DeploymentPlan,
        data: Federation | Mapping[str, pd.DataFrame],
        held: Sequence[str],
    ) -> NodeClients:
        """Divide a node's clients into those that take part and those that are held out.

        Raises:
            TypeError: the rows of a model that is no formula are not coded.
            ValueError: a client that is held out does not exist, or none is left.
        """
        if isinstance(data, Federation):
            left = _others(data.names, held)
            if not held:
                return cls(plan, data, None, None)
            return cls(plan, data.select(left), None, data.select(held))
        if plan.formula is None:
            raise TypeError("federation: frames are coded by a formula, and the model is none")
        rows = RowsToCode.read(plan.formula, data)
        return cls(plan, {name: data[name] for name in _others(list(data), held)}, rows, None)

    def describe(self, name: str) -> Schema:
        """Return the description of the institution's data; fields of a formula are not there yet."""
        if isinstance(self.data, Federation):
            return describe_data(name, self.data)
        assert self.plan.formula is not None
        return Schema(
            institution=name,
            clients=list(self.data),
            rows=sum(map(len, self.data.values())),
            client_dim=self.plan.formula.client,
            gaps=False,
            fields={},
            version=_VERSION,
        )

    def code(self, agreement: AgreedCoding | None) -> tuple[Model, Federation, Federation | None]:
        """Return the model, the clients that take part, and those that are held out, coded as was agreed."""
        if isinstance(self.data, Federation):
            return self.plan.model, self.data, self.held_out
        assert self.rows is not None
        formula = self.rows.code(read_agreement(agreement))
        everyone = formula.federation
        held = [name for name in everyone.names if name not in self.data]
        return formula, everyone.select(self.data), everyone.select(held) if held else None


def describe_data(name: str, data: Federation) -> Schema:
    """Return the description of an institution's data."""
    fields = {
        field: FieldSchema(shape=list(v.shape[1:]), dtype=str(v.dtype).removeprefix("torch."))  # type: ignore[arg-type]
        for field, v in data.fields.items()
    }
    return Schema(
        institution=name,
        clients=list(data.names),
        rows=data.rows,
        client_dim=data.client_dim,
        gaps=data.gaps,
        fields=fields,
        version=_VERSION,
    )


def _others(names: Sequence[str], held: Sequence[str]) -> list[str]:
    """Return the clients that are not held out.

    Raises:
        ValueError: a client that is held out does not exist, or none is left.
    """
    for name in held:
        if name not in names:
            raise ValueError(
                f"hold_out: there is no client {name!r}; they are {', '.join(names[:8])}"
            )
    left = [name for name in names if name not in held]
    if not left:
        raise ValueError("hold_out names every client of the institution: none is left to fit")
    return left
