"""Is comparison of models by leave-one-out right? Beside ArviZ, and between machines; makes leave_one_out.md.

    python experiments/leave_one_out.py                # three minutes

Investment of eleven firms in twenty years (Grunfeld), three models: an intercept, or an intercept and slopes for each
firm, with Normal or with Student's t errors. "ArviZ" is az.compare of az.loo on the log likelihoods of all rows, whose
standard errors divide by n and not by n - 1. "Institutions" are three, of three or four firms each, that send secure
sums; "exchanges" are the sums that stacking asks them for. Firms that are left out have no counterpart in ArviZ. One
process draws θ by chains where importance weights are uneven, and again without a firm whose weights are; institutions
cannot, so that their figures differ by Monte Carlo error, and more of their k-hat are high.
"""

from __future__ import annotations

import functools
import tempfile
import warnings
from pathlib import Path

import arviz as az
import pyro
import pyro.distributions as dist
import runner

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.deploy import secure
from bayesfed.deploy.bundles import split
from bayesfed.deploy.institutions import Patience
from bayesfed.deploy.messages import unpack
from bayesfed.deploy.node import Node
from bayesfed.deploy.plan import DeploymentPlan
from bayesfed.deploy.server import run_server
from bayesfed.deploy.transport import Carrier
from bayesfed.output.comparison import Comparison
from bayesfed.settings import LeaveOneOutSettings

COLUMNS = (
    "left out: model | elpd ± error: ArviZ | one process | institutions | difference ± error: ArviZ | one process "
    "| institutions | p_loo: ArviZ | one process | institutions | weight: ArviZ | one process | institutions "
    "| k-hat above its limit: ArviZ | one process | institutions | exchanges"
)
S = 2000


def heavy_tails(federation):
    """An intercept and slopes for each firm, and Student's t errors."""
    predictors = federation.event_shape("x")
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    slope = pyro.sample("slope", dist.Normal(0.0, 2.0).expand(predictors).to_event(1))
    spread = pyro.sample("spread", dist.HalfNormal(1.0).expand(predictors).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with federation.clients():
        alpha = pyro.sample("alpha", dist.Normal(mu, tau))
        beta = pyro.sample("beta", dist.Normal(slope, spread).to_event(1))
        with federation.observations() as obs:
            mean = alpha + (beta * obs["x"]).sum(-1)
            pyro.sample("y", dist.StudentT(4.0, mean, sigma), obs=obs.get("y"))


MODELS = {
    "intercepts": models.varying_intercept,
    "slopes": models.varying_slope,
    "heavy tails": heavy_tails,
}


@functools.cache
def in_process() -> dict[str, bf.Posterior]:
    """Fit all models in one process."""
    return {name: bf.fit(m, datasets.grunfeld(), progress=False) for name, m in MODELS.items()}


@functools.cache
def by_arviz() -> dict[str, dict[str, float]]:
    """Compare all models by ArviZ; return the columns of its table by model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {n: az.loo(p.to_arviz(S), pointwise=True) for n, p in in_process().items()}
        table = az.compare(found)
    table["high_k"] = [
        int((found[name].pareto_k > found[name].good_k).sum()) for name in table.index
    ]
    return table.to_dict("index")


@functools.cache
def between_institutions(unit: str) -> tuple[Comparison, int]:
    """Fit all models over three institutions, one after the other; return the last comparison, and its exchanges."""
    firms, before, asked = datasets.grunfeld(), [], 0
    shares = {"a": firms.names[:4], "b": firms.names[4:8], "c": firms.names[8:]}
    with tempfile.TemporaryDirectory() as folder:
        for name, model in MODELS.items():
            settings = LeaveOneOutSettings(
                name=name.replace(" ", "-"), compare=list(before), unit=unit, num_samples=S
            )
            plan = DeploymentPlan(model, bf.SFVI(), secure=True, leave_one_out=settings)
            nodes = {n: Node(n, firms.select(s), plan, f"{folder}/{n}") for n, s in shares.items()}
            pinned = {n: secure.public_key(node.identity) for n, node in nodes.items()}
            asked = 0

            def exchange(messages, wait, nodes=nodes):
                nonlocal asked
                sent = [one for payload in messages.values() for one in split(payload)]
                kinds = [unpack(one)[0].kind for one in sent]
                asked += "leave_out" in kinds
                return {at: nodes[at].handle(payload) for at, payload in messages.items()}

            for node in nodes.values():
                node.pinned = pinned
            carrier = Carrier(lambda nodes=nodes: list(nodes), exchange)
            found = run_server(carrier, plan, Patience(tuple(nodes)), Path(folder) / f"{name}.run")
            before.append(settings.name)
    assert found.comparison is not None
    return found.comparison, asked - 1


def measure(unit: str, name: str) -> list[str]:
    """Return the cells of one model."""
    one = bf.compare(in_process(), unit, num_samples=S).table.loc[name].to_dict()
    there, asked = between_institutions(unit)
    other = there.table.loc[name.replace(" ", "-")].to_dict()
    arviz = by_arviz()[name] if unit == "observation" else None
    cells = []
    for shown in (
        lambda t: f"{t.get('elpd', t.get('elpd_loo')):.2f} ± {t['se']:.2f}",
        lambda t: f"{t['elpd_diff']:.2f} ± {t['dse']:.2f}",
        lambda t: f"{p:.2f}" if (p := t.get("p_loo")) is not None else "",
        lambda t: f"{t['weight']:.3f}",
        lambda t: f"{t['high_k']:.0f}",
    ):
        cells += ["" if table is None else shown(table) for table in (arviz, one, other)]
    return [*cells, str(asked)]


def main() -> None:
    given = runner.arguments(__doc__)
    rows = {
        f"{unit}: {name}": [(unit, name)] for unit in ("observation", "client") for name in MODELS
    }
    runner.table(COLUMNS, rows, measure, given)


if __name__ == "__main__":
    main()
