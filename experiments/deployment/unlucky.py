"""Runs in which institutions are missing, late or hostile, beside the run in which none is: makes unlucky.md.

    python experiments/deployment/unlucky.py                 # about half an hour
    python experiments/deployment/unlucky.py SFVI PVI        # these rows

Ten institutions of one or two firms or clients each, nodes in this process. *Missing*: in each round each is silent
with probability 0.3. *Late*: it answers one to three rounds later instead, and that counts then. *Hostile*: one of the
ten (10 %) sends what it likes, in every round; in rows "of medians" what counts is the median of the nodes. How far
q(θ) is then from the run without, in standard deviations of its own, and how many of the uploads were refused; for
networks the accuracy on held-out rows of the clients of honest nodes.
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
from bayesfed.algorithms import Algorithm
from bayesfed.deploy.institutions import Patience
from bayesfed.deploy.messages import Reply, pack, unpack
from bayesfed.deploy.node import Node
from bayesfed.deploy.plan import Plan
from bayesfed.deploy.server import GlobalPosterior, run_server
from bayesfed.deploy.transport import Carrier, Wait

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))
from tables import keep  # noqa: E402

INSTITUTIONS, MISSING, LIAR = 10, 0.3, "node3"
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
        "FedAvg, of medians": (network, train, test, bf.FedAvg(), wide | {"median": True}),
        "FedABML": (network, train, test, bf.FedABML(), wide),
        "FedABML, of medians": (network, train, test, bf.FedABML(), wide | {"median": True}),
        "PFedVEM": (network, train, test, bf.PFedVEM(), wide),
        "FOLA": (network, train, test, bf.FOLA(), wide),
    }


def over_nodes(
    plan: Plan,
    federation: bf.Federation,
    folder: str,
    *,
    missing: float = 0.0,
    late: bool = False,
    lie: Change | None = None,
) -> tuple[GlobalPosterior, dict[str, Node]]:
    """The fit, and the nodes."""
    cuts = [round(i * len(federation) / INSTITUTIONS) for i in range(INSTITUTIONS + 1)]
    nodes = {
        f"node{i}": Node(
            f"node{i}", federation.select(federation.names[a:b]), plan, f"{folder}/{i}"
        )
        for i, (a, b) in enumerate(pairwise(cuts))
    }
    chance, rounds, under_way = random.Random(0), 0, dict[str, tuple[int, bytes]]()

    def exchange(messages: Mapping[str, bytes], wait: Wait) -> dict[str, bytes]:
        nonlocal rounds
        rounds += any(unpack(payload)[0].kind == "ask" for payload in messages.values())
        found = {at: reply for at, (due, reply) in under_way.items() if due <= rounds}
        for at in [*found, *messages]:
            under_way.pop(at, None)
        for at, payload in messages.items():
            asked = unpack(payload)[0].kind == "ask"
            if asked and chance.random() < missing:
                if late:
                    under_way[at] = rounds + chance.randint(1, 3), nodes[at].handle(payload)
                continue
            found[at] = nodes[at].handle(payload)
            if lie is not None and asked and at == LIAR:
                reply, parts = unpack(found[at])
                if isinstance(reply, Reply):
                    found[at] = pack(reply, **(parts | {"total": dict(lie(parts["total"]))}))
        return found

    patience = Patience(tuple(nodes), seconds=5.0, max_staleness=3 if late else 0)
    carrier = Carrier(lambda: list(nodes), exchange)
    return run_server(carrier, plan, patience, f"{folder}/server.safetensors"), nodes


def distance(found: GlobalPosterior, other: GlobalPosterior) -> str:
    """Return the distance of the means and standard deviations of the global variables."""
    one, two = found.sample(2000), other.sample(2000)
    shift, ratio = 0.0, [1.0]
    for name, value in one.items():
        sd = two[name].std(0)
        shift = max(shift, float(((value.mean(0) - two[name].mean(0)).abs() / sd).max()))
        ratio += (value.std(0) / sd).flatten().tolist()
    return f"{shift:.2f} sd, {min(ratio):.2f} to {max(ratio):.2f}"


def accuracy(nodes: Mapping[str, Node], test: bf.Federation) -> str:
    """Return the accuracy of the clients of honest institutions on rows that nobody trained on."""
    right = rows = 0
    for name, node in nodes.items():
        own = test.select(node.federation.names)
        for part in node._runs.values():
            if name != LIAR and part.posterior is not None:
                (probabilities,) = part.posterior.probabilities(own, 50).values()
                right += int((probabilities.argmax(-1) == own["y"]).sum())
                rows += own.rows
    return f"{100 * right / rows:.1f} %"


def row(name: str) -> str:
    """A row of the table."""
    model, federation, test, algorithm, schedule = cases()[name]
    plan, cells = Plan(model, algorithm, **schedule), []

    def result(
        found: GlobalPosterior, nodes: dict[str, Node], whole: GlobalPosterior | None
    ) -> str:
        if test is not None:
            return accuracy(nodes, test)
        return "-" if whole is None else distance(found, whole)

    with tempfile.TemporaryDirectory() as folder:
        whole, nodes = over_nodes(plan, federation, f"{folder}/whole")
        cells.append(result(whole, nodes, None))
        found, nodes = over_nodes(plan, federation, f"{folder}/missing", missing=MISSING)
        cells.append(result(found, nodes, whole))
        if type(algorithm).late is Algorithm.late:
            cells.append("refused")
        else:
            found, nodes = over_nodes(
                plan, federation, f"{folder}/late", missing=MISSING, late=True
            )
            cells.append(result(found, nodes, whole))
        for what, lie in LIES.items():
            try:
                found, nodes = over_nodes(plan, federation, f"{folder}/{what}", lie=lie)
                cells.append(f"{result(found, nodes, whole)}; {found.refused[LIAR]} refused")
            except FloatingPointError as error:
                cells.append(f"stopped: {str(error)[:40]}")
    return f"| {name} | " + " | ".join(cells) + " |"


def main() -> None:
    """Print the table and write it."""
    warnings.simplefilter("ignore")
    lies = [f"one in ten sends {what}" for what in LIES]
    heads = ["algorithm", "none missing", "30 % missing", "30 % late", *lies]
    for name in sys.argv[1:] or cases():
        found = row(name)
        print(found, flush=True)
        header = ["| " + " | ".join(heads) + " |", "| --- " * len(heads) + "|"]
        keep(HERE / "unlucky.md", header, found, list(cases()))


if __name__ == "__main__":
    main()
