"""A node's answers while a formula's coding is agreed; what is sent is in :mod:`bayesfed.formulas.reports`."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bayesfed.deploy import secure
from bayesfed.deploy.coded import RowsToCode, read_agreement, split
from bayesfed.deploy.coding_messages import Add, Code, Describe, Totals
from bayesfed.deploy.contents import broadcast_digest
from bayesfed.deploy.masking import Masking, sum_id
from bayesfed.deploy.messages import MessageError, Tensors, pack
from bayesfed.deploy.node_clients import NodeClients, describe_data
from bayesfed.deploy.plan import DeploymentPlan, difference

Handler = Callable[[Any, Mapping[str, Tensors], bytes], bytes]
"""The answer to a message, as bytes, from the message, its tensors, and its own bytes."""


@dataclass(frozen=True)
class NodeAgreement:
    """The institution's half of an agreement.

    Attributes:
        name: the institution.
        plan: the fit that it has agreed to.
        clients: its clients.
        folder: returns where an agreement of this name has its key, for secure sums.
        keys: returns the keys of secure sums.
    """

    name: str
    plan: DeploymentPlan
    clients: NodeClients
    folder: Callable[[str], Path]
    keys: Callable[[Masking], secure.Keys]

    @property
    def handlers(self) -> dict[type[Any], Handler]:
        """The answers, by kind of message."""
        return {
            Describe: lambda message, parts, payload: self.describe(message),
            Add: lambda message, parts, payload: self.add(message),
            Code: lambda message, parts, payload: self.code(message),
        }

    def describe(self, message: Describe) -> bytes:
        """Return the kinds and levels of the columns."""
        differs = difference(self.plan.description, message.terms)
        if differs is not None:
            raise MessageError(f"another run was agreed on: {differs}")
        key = None
        if self.plan.secure:
            folder = self.folder(message.run)
            folder.mkdir(parents=True, exist_ok=True)
            key = secure.public_key(Masking(folder).run_key).hex()
        return pack(self._rows().report(message.run, key))

    def add(self, message: Add) -> bytes:
        """Return the sums that come next."""
        if (message.roster is not None) != self.plan.secure or (
            message.round is not None
        ) != self.plan.secure:
            raise MessageError("a sum is not as secure as was agreed on")
        sums = split(self._rows().sums(read_agreement(message.agreement)))
        if message.round is None:
            return pack(Totals(run=message.run), sums=sums)
        masking = Masking(self.folder(message.run))
        if not masking.folder.exists():
            raise MessageError("this agreement was not started here")
        of = sum_id(message.run, message.round, broadcast_digest(message, {}), message.roster)
        masked = masking.mask(sums, self.keys(masking), of, after=False)
        return pack(Totals(run=message.run), masked=masked)

    def code(self, message: Code) -> bytes:
        """Return the schema of the clients, coded by a complete agreement; delete the key of the agreement."""
        self._rows()
        _, federation, _ = self.clients.code(message.agreement)
        shutil.rmtree(self.folder(message.run), ignore_errors=True)
        return pack(describe_data(self.name, federation))

    def _rows(self) -> RowsToCode:
        if self.clients.rows is None:
            raise MessageError("the model that was agreed on is no formula")
        return self.clients.rows
