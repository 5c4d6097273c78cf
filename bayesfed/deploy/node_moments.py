"""A node's half of a fit to moments: it reveals those of each client once, if its own settings say that it may."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch

from bayesfed.checks.data import check_data
from bayesfed.checks.sufficient import check_moments
from bayesfed.deploy.messages import Done, MessageError, Tensors, pack
from bayesfed.deploy.moments_messages import Deliver, Reveal, Revealed
from bayesfed.deploy.node_agreement import Handler
from bayesfed.deploy.node_clients import NodeClients
from bayesfed.deploy.node_run import POSTERIOR
from bayesfed.deploy.plan import DeploymentPlan, difference
from bayesfed.engine.files import atomically
from bayesfed.engine.moments import FEWEST_ROWS, Moments, RowsSingledOut
from bayesfed.engine.program import build_program
from bayesfed.output.posterior import Posterior

DELIVERED = "deliver.message"


@dataclass(frozen=True)
class Consent:
    """The institution's own settings of what it reveals.

    Attributes:
        reveal: ``"moments"`` if the counts, means and covariances of each client's rows may leave.
        fewest_rows: the fewest rows that they may single out, see :meth:`bayesfed.Moments.of`.
    """

    reveal: Literal["moments"] | None = None
    fewest_rows: int = FEWEST_ROWS


@dataclass(frozen=True)
class NodeMoments:
    """A node's answers where moments are revealed.

    Attributes:
        plan: the fit that it has agreed to.
        clients: its clients.
        consent: its own settings.
        folder: returns where a run of this name is stored.
        record: adds a line to the institution's log.
    """

    plan: DeploymentPlan
    clients: NodeClients
    consent: Consent
    folder: Callable[[str], Path]
    record: Callable[..., None]

    @property
    def handlers(self) -> dict[type[Any], Handler]:
        """The answers, by kind of message."""
        return {
            Reveal: lambda message, parts, payload: self.reveal(message),
            Deliver: lambda message, parts, payload: self.deliver(message, parts),
        }

    def reveal(self, message: Reveal) -> bytes:
        """Return the moments of each client, once the likelihood of its own rows is seen to depend on nothing else."""
        differs = difference(self.plan.description, message.terms)
        if differs is not None:
            raise MessageError(f"another run was agreed on: {differs}")
        self._check_agreed()
        if self.consent.reveal != "moments":
            raise MessageError(
                'its node file has no reveal = "moments", so that no counts, means and covariances of a client leave: '
                "write it there if they may, or leave deployment.reveal out of the experiment"
            )
        model, federation, _ = self.clients.code(message.agreement)
        try:
            moments = Moments.of(federation, fewest_rows=self.consent.fewest_rows)
        except RowsSingledOut as error:
            self.record("refused", error=str(error))
            raise MessageError(
                f"moments of client {error.client!r} would single out fewer rows than fewest_rows = "
                f"{self.consent.fewest_rows}: its log says more"
            ) from None
        except ValueError as error:
            raise MessageError(f"{error}") from None
        plan, few = self.plan, moments.federation().sufficient.to(federation.device)
        program = build_program(model, federation, plan.algorithm, plan.seed)
        check_data(program, federation)
        try:
            check_moments(plan.algorithm, program, federation, few)
        except ValueError as error:
            raise MessageError(f"{error}") from None
        clients, fields = list(moments.names), list(moments.kinds)
        tensors = {
            "counts": moments.counts,
            "mean": moments.mean,
            "covariance": moments.covariance,
        }
        return pack(Revealed(run=message.run, clients=clients, fields=fields), moments=tensors)

    def deliver(self, message: Deliver, parts: Mapping[str, Tensors]) -> bytes:
        """Store the posterior of the node's clients, for predictions as after any fit."""
        self._check_agreed()
        file = parts.get("file", {}).get("bytes", torch.zeros(0))
        if file.dtype != torch.uint8 or file.ndim != 1:
            raise MessageError("a posterior's file is bytes")
        model, federation, _ = self.clients.code(message.agreement)
        guide: Any = getattr(self.plan.algorithm.globals, "guide", None)
        with TemporaryDirectory() as folder:
            path = Path(folder) / POSTERIOR
            path.write_bytes(file.numpy().tobytes())
            try:
                found = Posterior.load(path, model, federation, guide=guide, other_rows=True)
            except (ValueError, KeyError) as error:
                raise MessageError(f"this is no posterior of its clients: {error}") from None
        own = self.folder(message.run)
        own.mkdir(parents=True, exist_ok=True)
        with atomically(own / DELIVERED) as temporary:
            temporary.write_bytes(pack(message))
        found.save(own / POSTERIOR)
        return pack(Done(run=message.run))

    def _check_agreed(self) -> None:
        if self.plan.reveal != "moments":
            raise MessageError("no moments were agreed on")
