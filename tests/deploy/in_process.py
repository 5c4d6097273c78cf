"""Institutions in one process, reached without a wire."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import bayesfed as bf
from bayesfed.deploy.institutions import Patience
from bayesfed.deploy.node import Node
from bayesfed.deploy.plan import DeploymentPlan
from bayesfed.deploy.server import GlobalPosterior, run_server
from bayesfed.deploy.transport import Carrier, Wait


def divided(federation: bf.Federation, count: int) -> dict[str, bf.Federation]:
    """Clients dealt to so many nodes, in their order."""
    names = federation.names
    cuts = [round(i * len(names) / count) for i in range(count + 1)]
    return {
        f"node{i}": federation.select(names[a:b])
        for i, (a, b) in enumerate(itertools.pairwise(cuts))
    }


def nodes_of(
    federation: bf.Federation, plan: DeploymentPlan, folder: Path, count: int = 3
) -> list[Node]:
    """The nodes."""
    return [
        Node(name, part, plan, folder / name, bf.Execution(compile=False))
        for name, part in divided(federation, count).items()
    ]


def wire(nodes: Sequence[Node]) -> Carrier:
    """Calls in place of messages that travel."""
    by_address = {node.name: node for node in nodes}

    def exchange(messages: Mapping[str, bytes], wait: Wait) -> dict[str, bytes]:
        return {at: by_address[at].handle(payload) for at, payload in messages.items()}

    return Carrier(lambda: list(by_address), exchange)


def run_on(nodes: Sequence[Node], plan: DeploymentPlan, folder: Path, **options) -> GlobalPosterior:
    """The whole fit."""
    patience = Patience(tuple(node.name for node in nodes), joining=5.0, seconds=60.0)
    return run_server(wire(nodes), plan, patience, folder / "server.safetensors", **options)
