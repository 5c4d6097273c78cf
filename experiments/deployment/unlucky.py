"""Runs in which sites are missing or lie, beside the run in which none is: makes unlucky.md.

    python experiments/deployment/unlucky.py       # about twenty minutes

Ten sites of one or two firms or clients each, workers in this process. *Missing*: in each round each site stays silent
with probability .3. *Hostile*: one of the ten (10 %) sends what it likes, in every round. How far q(θ) is then from the
run without, in standard deviations of its own, and how many of the uploads were refused; for networks the accuracy
on held-out rows of the clients of honest sites.
"""

from __future__ import annotations

import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.deploy.carrier import Carrier, Wait
from bayesfed.deploy.messages import Reply, packed, unpacked
from bayesfed.deploy.plan import Plan
from bayesfed.deploy.server import Globals, deployed
from bayesfed.deploy.site import Site
from bayesfed.deploy.sites import Patience

HERE = Path(__file__).parent
SITES, MISSING, LIAR = 10, 0.3, "site3"
Change = Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]
LIES: dict[str, Change] = {
    "NaN": lambda total: {n: v * torch.nan for n, v in total.items()},
    "a million times": lambda total: {n: v * 1e6 for n, v in total.items()},
    "ten times": lambda total: {n: v * 10 for n, v in total.items()},
    "the other sign": lambda total: {n: -v for n, v in total.items()},
}


def cases() -> dict[str, tuple[Any, bf.Federation, bf.Federation | None, Any, dict[str, Any]]]:
    """Model, clients, held-out rows, algorithm and schedule."""
    firms = datasets.grunfeld()
    train, test = datasets.digits(clients=20)
    network = models.Network(models.mlp(64, 10))
    small = {"rounds": 40}
    wide = {"rounds": 20, "batch_size": 10}
    return {
        "SFVI": (models.varying_slope, firms, None, bf.SFVI(corrected=False), small),
        "SFVIAvg": (models.varying_slope, firms, None, bf.SFVIAvg(), small),
        "PVI": (models.varying_slope, firms, None, bf.PVI(), small),
        "FedAvg": (network, train, test, bf.FedAvg(), wide),
        "FedABML": (network, train, test, bf.FedABML(), wide),
        "PFedVEM": (network, train, test, bf.PFedVEM(), wide),
        "FOLA": (network, train, test, bf.FOLA(), wide),
    }


def over_sites(
    plan: Plan,
    federation: bf.Federation,
    folder: str,
    *,
    missing: float = 0.0,
    lie: Change | None = None,
) -> tuple[Globals, dict[str, Site]]:
    """The fit, and the sites."""
    cuts = [round(i * len(federation) / SITES) for i in range(SITES + 1)]
    sites = {
        f"site{i}": Site(
            f"site{i}", federation.select(federation.names[a:b]), plan, f"{folder}/{i}"
        )
        for i, (a, b) in enumerate(pairwise(cuts))
    }
    chance = random.Random(0)

    def exchange(messages: Mapping[str, bytes], wait: Wait) -> dict[str, bytes]:
        found = {}
        for at, payload in messages.items():
            asked = unpacked(payload)[0].kind == "ask"
            if asked and chance.random() < missing:
                continue
            found[at] = sites[at].handle(payload)
            if lie is not None and asked and at == LIAR:
                reply, parts = unpacked(found[at])
                if isinstance(reply, Reply):
                    found[at] = packed(reply, **(parts | {"total": dict(lie(parts["total"]))}))
        return found

    patience = Patience(tuple(sites), seconds=5.0)
    carrier = Carrier(lambda: list(sites), exchange)
    return deployed(carrier, plan, patience, f"{folder}/server.safetensors"), sites


def distance(found: Globals, other: Globals) -> str:
    """Of the means and standard deviations of the global sites."""
    one, two = found.sample(2000), other.sample(2000)
    shift, ratio = 0.0, [1.0]
    for name, value in one.items():
        sd = two[name].std(0)
        shift = max(shift, float(((value.mean(0) - two[name].mean(0)).abs() / sd).max()))
        ratio += (value.std(0) / sd).flatten().tolist()
    return f"{shift:.2f} sd, {min(ratio):.2f} to {max(ratio):.2f}"


def accuracy(sites: Mapping[str, Site], test: bf.Federation) -> str:
    """Of the clients of honest sites on rows of theirs that nobody trained on."""
    right = rows = 0
    for name, site in sites.items():
        own = test.select(site.federation.names)
        for part in site._parts.values():
            if name != LIAR and part.posterior is not None:
                (probabilities,) = part.posterior.probabilities(own, 50).values()
                right += int((probabilities.argmax(-1) == own["y"]).sum())
                rows += own.rows
    return f"{100 * right / rows:.1f} %"


def row(name: str) -> str:
    """A row of the table."""
    model, federation, test, algorithm, schedule = cases()[name]
    plan, cells = Plan(model, algorithm, **schedule), []

    def told(found: Globals, sites: dict[str, Site], whole: Globals | None) -> str:
        if test is not None:
            return accuracy(sites, test)
        return "-" if whole is None else distance(found, whole)

    with tempfile.TemporaryDirectory() as folder:
        whole, sites = over_sites(plan, federation, f"{folder}/whole")
        cells.append(told(whole, sites, None))
        found, sites = over_sites(plan, federation, f"{folder}/missing", missing=MISSING)
        cells.append(told(found, sites, whole))
        for what, lie in LIES.items():
            try:
                found, sites = over_sites(plan, federation, f"{folder}/{what}", lie=lie)
                cells.append(f"{told(found, sites, whole)}; {found.refused[LIAR]} refused")
            except FloatingPointError as error:
                cells.append(f"stopped: {str(error)[:40]}")
    return f"| {name} | " + " | ".join(cells) + " |"


def main() -> None:
    """Print the table and write it."""
    warnings.simplefilter("ignore")
    heads = ["", "none missing", "30 % missing", *(f"one in ten sends {what}" for what in LIES)]
    lines = ["| " + " | ".join(heads) + " |", "| --- " * len(heads) + "|"]
    for name in sys.argv[1:] or cases():
        lines.append(row(name))
        print(lines[-1], flush=True)
    if len(sys.argv) == 1:
        (HERE / "unlucky.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
