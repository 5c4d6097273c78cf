"""Institutions whose workers run in this process, reached through the messages that otherwise travel."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path

import torch

import bayesfed as bf
from bayesfed.deploy.bundles import join, split
from bayesfed.deploy.global_posterior import GlobalPosterior
from bayesfed.deploy.institutions import Patience
from bayesfed.deploy.messages import Reply, pack, unpack
from bayesfed.deploy.node import Node
from bayesfed.deploy.plan import DeploymentPlan
from bayesfed.deploy.server import run_server
from bayesfed.deploy.transport import Carrier, Wait

sys.path.append(str(Path(__file__).parents[1]))
import runner

__all__ = ["LIAR", "Change", "fit", "runner"]
LIAR = "site3"
Change = Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]


def fit(
    plan: DeploymentPlan,
    federation: bf.Federation,
    folder: str,
    *,
    institutions: int = 10,
    missing: float = 0.0,
    late: bool = False,
    lie: Change | None = None,
) -> tuple[GlobalPosterior, dict[str, Node]]:
    """Fit over institutions, and return the result and their nodes.

    Args:
        plan: the fit.
        federation: all clients; each institution has some that follow each other.
        folder: for the states of all.
        institutions: how many there are.
        missing: probability with which an institution does not answer in a round.
        late: it answers one to three rounds later instead.
        lie: changes the uploads of one institution.
    """
    cuts = [round(i * len(federation) / institutions) for i in range(institutions + 1)]
    nodes = {
        f"site{i}": Node(
            f"site{i}", federation.select(federation.names[a:b]), plan, f"{folder}/{i}"
        )
        for i, (a, b) in enumerate(pairwise(cuts))
    }
    chance, rounds, under_way = random.Random(0), 0, dict[str, tuple[int, bytes]]()

    def exchange(messages: Mapping[str, bytes], wait: Wait) -> dict[str, bytes]:
        nonlocal rounds
        rounds += any(_is_round(payload) for payload in messages.values())
        found = {at: reply for at, (due, reply) in under_way.items() if due <= rounds}
        for at in [*found, *messages]:
            under_way.pop(at, None)
        for at, payload in messages.items():
            asked = _is_round(payload)
            if asked and chance.random() < missing:
                if late:
                    under_way[at] = rounds + chance.randint(1, 3), nodes[at].handle(payload)
                continue
            found[at] = nodes[at].handle(payload)
            if lie is not None and asked and at == LIAR:
                *others, last = split(found[at])
                reply, parts = unpack(last)
                if isinstance(reply, Reply):
                    changed = pack(reply, **(parts | {"total": dict(lie(parts["total"]))}))
                    found[at] = join([*others, changed])
        return found

    patience = Patience(tuple(nodes), seconds=5.0, max_staleness=3 if late else 0)
    carrier = Carrier(lambda: list(nodes), exchange)
    return run_server(carrier, plan, patience, f"{folder}/server.safetensors"), nodes


def _is_round(payload: bytes) -> bool:
    """Return whether a message, or the last one of a bundle, asks for a round."""
    return unpack(split(payload)[-1])[0].kind == "ask"
