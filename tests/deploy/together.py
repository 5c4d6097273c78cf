"""Sites in one process, reached without a wire."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import bayesfed as bf
from bayesfed.deploy.institutions import Patience
from bayesfed.deploy.node import Site
from bayesfed.deploy.plan import DeploymentPlan
from bayesfed.deploy.server import Globals, deployed
from bayesfed.deploy.transport import Carrier, Wait


def divided(federation: bf.Federation, count: int) -> dict[str, bf.Federation]:
    """Clients dealt to so many sites, in their order."""
    names = federation.names
    cuts = [round(i * len(names) / count) for i in range(count + 1)]
    return {
        f"site{i}": federation.select(names[a:b])
        for i, (a, b) in enumerate(itertools.pairwise(cuts))
    }


def sites_of(
    federation: bf.Federation, plan: DeploymentPlan, folder: Path, count: int = 3
) -> list[Site]:
    """The sites."""
    return [
        Site(name, part, plan, folder / name, bf.Execution(compile=False))
        for name, part in divided(federation, count).items()
    ]


def wire(sites: Sequence[Site]) -> Carrier:
    """Calls in place of messages that travel."""
    by_address = {site.name: site for site in sites}

    def exchange(messages: Mapping[str, bytes], wait: Wait) -> dict[str, bytes]:
        return {at: by_address[at].handle(payload) for at, payload in messages.items()}

    return Carrier(lambda: list(by_address), exchange)


def run_on(sites: Sequence[Site], plan: DeploymentPlan, folder: Path, **options) -> Globals:
    """The whole fit."""
    patience = Patience(tuple(site.name for site in sites), joining=5.0, seconds=60.0)
    return deployed(wire(sites), plan, patience, folder / "server.safetensors", **options)
