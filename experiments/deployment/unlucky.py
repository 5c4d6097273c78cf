"""What do institutions do to a fit that are missing, late or hostile? Makes unlucky.md.

    python experiments/deployment/unlucky.py                 # about half an hour
    python experiments/deployment/unlucky.py SFVI PVI        # these rows

Ten institutions of one or two firms or clients each, workers in this process. *Missing*: in each round each institution
does not answer with probability 0.3. *Late*: it answers one to three rounds later instead, and that counts then.
*Hostile*: one of the ten (10 %) changes its upload in every round; in rows "of medians" the median of the institutions
counts. The cells are the distance of q(θ) from the run without, in standard deviations of its own, the range of the
ratios of standard deviations, and how many uploads were refused, of one in each of 40 rounds (networks: 20); "refused"
alone is of an algorithm that cannot use late uploads. For networks they are the accuracy on held-out rows of the
clients of honest institutions. PVI has not converged after 40 rounds in the run without either, so that its distances
say nothing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any

import in_process
import torch
from distances import distance, moments
from in_process import LIAR, Change, runner

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.deploy.global_posterior import GlobalPosterior
from bayesfed.deploy.node import Node
from bayesfed.deploy.plan import DeploymentPlan
from bayesfed.rules import MedianOfInstitutions

MISSING = 0.3
LIES: dict[str, Change] = {
    "NaN": lambda total: {n: v * torch.nan for n, v in total.items()},
    "a million times": lambda total: {n: v * 1e6 for n, v in total.items()},
    "ten times": lambda total: {n: v * 10 for n, v in total.items()},
    "the other sign": lambda total: {n: -v for n, v in total.items()},
}


def cases() -> dict[str, tuple[Any, bf.Federation, bf.Federation | None, Any, dict[str, Any]]]:
    """Return model, clients, held-out rows, algorithm and schedule of each row."""
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
        "FedAvg, of medians": (
            network,
            train,
            test,
            bf.FedAvg().replace(rule=MedianOfInstitutions()),
            wide,
        ),
        "FedABML": (network, train, test, bf.FedABML(), wide),
        "FedABML, of medians": (
            network,
            train,
            test,
            bf.FedABML().replace(rule=MedianOfInstitutions(by="clients")),
            wide,
        ),
        "PFedVEM": (network, train, test, bf.PFedVEM(), wide),
        "FOLA": (network, train, test, bf.FOLA(), wide),
    }


def away(found: GlobalPosterior, other: GlobalPosterior) -> str:
    """Return the distance of the means and standard deviations of the global variables."""
    one, two = found.sample(2000), other.sample(2000)
    shift, least, most = distance(moments(one, one), moments(two, one))
    return f"{shift:.2f} sd, {min(1, least):.2f} to {max(1, most):.2f}"


def accuracy(sites: Mapping[str, Node], test: bf.Federation) -> str:
    """Return the accuracy of honest institutions' clients on their held-out rows."""
    right = rows = 0
    for name, site in sites.items():
        own = test.select(site.federation.names)
        for part in site._runs.values():
            if name != LIAR and part.posterior is not None:
                (probabilities,) = part.posterior.probabilities(own, 50).values()
                right += int((probabilities.argmax(-1) == own["y"]).sum())
                rows += own.rows
    return f"{100 * right / rows:.1f} %"


def measure(name: str) -> list[str]:
    """Fit without and with each trouble."""
    model, federation, test, algorithm, schedule = cases()[name]
    plan, whole = DeploymentPlan(model, algorithm, **schedule), []

    with tempfile.TemporaryDirectory() as folder:

        def fit(what: str, **trouble: Any) -> tuple[GlobalPosterior, str]:
            found, sites = in_process.fit(plan, federation, f"{folder}/{what}", **trouble)
            whole.append(found)
            if test is not None:
                return found, accuracy(sites, test)
            return found, "-" if len(whole) == 1 else away(found, whole[0])

        cells = [fit("whole")[1], fit("missing", missing=MISSING)[1]]
        try:
            cells.append(fit("late", missing=MISSING, late=True)[1])
        except ValueError:  # the algorithm cannot use stale updates
            cells.append("refused")
        for what, lie in LIES.items():
            try:
                found, cell = fit(what, lie=lie)
                cells.append(f"{cell}; {found.refused[LIAR]} refused")
            except FloatingPointError as error:
                cells.append(f"stopped: {str(error)[:40]}")
    return cells


def main() -> None:
    lies = " | ".join(f"one in ten sends {what}" for what in LIES)
    columns = f"algorithm | none missing | 30 % missing | 30 % late | {lies}"
    runner.table(columns, list(cases()), measure, runner.arguments(__doc__))


if __name__ == "__main__":
    main()
