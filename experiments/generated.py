"""What does bayesfed make of programs as people write them, right and wrong? Makes generated.md.

    python experiments/generated.py                 # 2000 programs, a quarter of an hour
    python experiments/generated.py --first 100 --count 50 --say      # some, each with its outcome

Programs are generated at random. Half are right: global and local variables of several kinds, categories by index, a
matrix product, a plate of the program's own, vectors with and without ``.to_event``, a variable behind another,
discrete and continuous variables of a row, discrete ones of a client, ``pyro.factor``, ``pyro.deterministic``,
``pyro.markov``, ``poutine.mask``, ``poutine.reparam``, levels of a factor inside each client, mixtures, vectors that
are observed in part, and outcomes of each distribution that fits in the table distributions.md. Of these the log
density of all sample sites together, at two draws of the prior, must be Pyro's own on the pooled data; a continuous
variable of a row is integrated on a fine grid. A quarter of them run a round, too. The others have a mistake of the
list below in the program or in the frame. They must be refused with a helpful message, or give the same answer as
Pyro.

"raw" is an error with the words of torch, Pyro or pandas, or of another kind than errors of settings and data; "silent"
is another number than Pyro's, "warned" one of which a warning says that it may be.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import runner
import torch
from distributions import DISTRIBUTIONS
from pyro import poutine
from pyro.infer.enum import config_enumerate
from pyro.infer.mcmc.util import TraceEinsumEvaluator
from pyro.infer.reparam import LocScaleReparam

import bayesfed as bf
from bayesfed.elbo import handlers, noise

RAW = re.compile(
    r"size of tensor|must match|shape '\[|mat1|vmap|invalid for input|broadcast|dimension out of|"
    r"object has no attribute|unsupported operand|Trace Shapes|could not convert|linalg|positional argument"
)
OUTCOMES = ("y", "count", "yes", "mix", "v", "pair", "out", "grade")
"""The names of the outcomes."""
SLOW = ("Stable", "StableWithLogProb")
TABLE = Path(__file__).with_name("distributions.md").read_text(encoding="utf-8")
DRAWN = [
    name
    for name, make in DISTRIBUTIONS.items()
    if f"| {name} | fits |" in TABLE and name not in SLOW and make(torch.zeros(1)).event_dim < 2
]
"""The distributions of one number or vector that fit as outcome."""
TOLERANCE = 1e-3
"""Relative tolerance of log densities in single precision."""

MISTAKES: dict[str, str] = {
    "index from 1": "categories counted from 1",
    "index not whole": "a category 0.5",
    "no long": "an index without .long()",
    "other name": "a field that is not there",
    "missing in x": "a missing covariate",
    "text in y": "text among the outcomes",
    "infinite": "an infinite covariate",
    "negative counts": "an outcome that the likelihood cannot have",
    "shape": "a product of shapes that do not fit",
    "if": "a question about a value",
    "twice": "a name twice",
    "outside": "outcomes outside the clients plate",
    "no clients": "no clients plate",
    "in place": "writing into a tensor",
    "own noise": "numbers of its own",
    "all clients' kind": "a discrete variable of all clients",
    "other rows": "a mean over the rows",
    "all clients": "the number of clients in a prior",
    "no outcome": "nothing observed",
    "label": "a class beyond the categories",
    "subsample": "a plate that takes a subsample",
    "condition": "pyro.condition of a global variable",
    "module": "pyro.module",
}


def frame(rng: np.random.Generator, mistake: str, table_of: str, gaps: bool) -> pd.DataFrame:
    """Return three to six hospitals with one to nine rows, with draws of a distribution of the table."""
    parts, fn = [], DISTRIBUTIONS[table_of](torch.tensor(0.3))
    torch.manual_seed(int(rng.integers(2**31)))
    for i in range(int(rng.integers(3, 7))):
        n = int(rng.integers(1, 10))
        kind = rng.integers(0, 3, n) + (mistake == "index from 1")
        x = rng.normal(size=(n, 2))
        part = {"site": f"site {i}", "x1": x[:, 0], "x2": x[:, 1]}
        part["kind"] = kind + (0.5 if mistake == "index not whole" else 0)
        part |= {"size": float(rng.normal()), "y": rng.normal(size=n)}
        part["count"] = rng.poisson(2.0, n) - 3 * (mistake == "negative counts")
        part["yes"] = (rng.random(n) < 0.5).astype(float)
        part["seen"] = (rng.random(n) < 0.7).astype(float)
        v = rng.normal(size=(n, 3))
        v[rng.random(v.shape) < 0.3 * gaps] = np.nan
        part |= {"v": list(v), "out": fn.sample((n,)).tolist()}
        parts.append(pd.DataFrame(part))
    table = pd.concat(parts, ignore_index=True)
    if mistake == "label":
        table.loc[0, "kind"] = 2
    if mistake == "index from 1":
        table.loc[0, "kind"] = 3
    if mistake == "missing in x":
        table.loc[0, "x1"] = np.nan
    if mistake == "infinite":
        table.loc[0, "x1"] = np.inf
    if mistake == "text in y":
        table["y"] = table["y"].astype(object)
        table.loc[0, "y"] = "high"
    return table


def program(rng: np.random.Generator, mistake: str, table_of: str) -> Callable[..., None]:
    """Return a hierarchical model of those columns; ``pooled=True`` leaves out missing entries as Pyro does."""
    flip = {name: bool(rng.random() < 0.5) for name in (
        "plate", "event", "behind", "vector", "mixed", "named", "factor", "stacked", "sized", "noisy",
        "kind",
    )}  # fmt: skip
    flip |= {name: bool(rng.random() < 0.25) for name in ("markov", "masked", "reparam", "levels")}
    outcome = str(rng.choice(["y", "count", "yes", "mix", "v", "pair", "out", "out"]))
    if outcome == "out":
        flip |= dict.fromkeys(("noisy", "mixed", "kind"), False)
    if mistake == "label":
        outcome = "grade"
    if mistake in ("negative counts", "text in y"):
        outcome = "count" if mistake == "negative counts" else "y"
    prior = str(rng.choice(["normal", "student", "gamma", "uniform"]))

    def model(federation: Any, pooled: bool = False) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        scale = {
            "normal": lambda: dist.HalfNormal(1.0),
            "student": lambda: dist.HalfCauchy(1.0),
            "gamma": lambda: dist.Gamma(2.0, 2.0),
            "uniform": lambda: dist.Uniform(0.1, 2.0),
        }[prior]()
        tau = pyro.sample("tau", scale)
        if mistake == "all clients":
            tau = tau * len(federation)
        if flip["stacked"]:
            beta = torch.stack([pyro.sample(f"b{j}", dist.Normal(0.0, 1.0)) for j in range(2)], -1)
        else:
            beta = pyro.sample("beta", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        summed = flip["mixed"] or flip["kind"]
        if flip["markov"]:
            walk = [torch.tensor(0.0)]
            for t in pyro.markov(range(3)):
                walk.append(pyro.sample(f"effect{t}", dist.Normal(walk[-1], tau)))
            effect = torch.stack(walk[1:], -1)
        elif flip["plate"] and not summed:  # Pyro's sums are not over plates at one dimension
            with pyro.plate("kinds", 3):
                effect = pyro.sample("effect", dist.Normal(0.0, tau))
        elif flip["event"] or summed:
            effect = pyro.sample("effect", dist.Normal(0.0, tau).expand([3]).to_event(1))
        else:
            effect = pyro.sample("effect", dist.Normal(0.0, 1.0).expand([3]))
        if mistake == "in place":
            effect[0] = 0.0
        if mistake == "all clients' kind":
            mu = mu + pyro.sample("k", dist.Bernoulli(0.5))
        if mistake == "if" and mu > 0:
            tau = 2 * tau
        if mistake == "subsample":
            with pyro.plate("items", 6, subsample_size=3):
                mu = mu + pyro.sample("item", dist.Normal(0.0, 1.0))[..., 0]
        if mistake == "module":
            mu = mu + pyro.module("net", torch.nn.Linear(1, 1))(torch.ones(1))[0]
        if mistake == "twice":
            pyro.sample("mu", dist.Normal(0.0, 1.0))
        if mistake == "no clients":
            rows(federation, mu, tau, beta, effect, None, pooled)
            return
        with federation.clients():
            a = pyro.sample("a", dist.Normal(mu, tau))
            if flip["sized"]:
                a = a + 0.5 * federation.of_clients("size")
            if flip["named"]:
                pyro.deterministic("level", a - mu)
            if flip["kind"]:
                a = a + pyro.sample("k", dist.Categorical(torch.tensor([0.3, 0.5, 0.2])))
            if flip["behind"]:
                a = pyro.sample("c", dist.Normal(a, 0.5))
            slope = beta
            if flip["vector"]:
                slope = beta + pyro.sample("s", dist.Normal(torch.zeros(2), 0.5).to_event(1))
            levels = None
            if flip["levels"] and not (summed or flip["noisy"]):
                with pyro.plate("levels", 3, dim=-3):
                    levels = pyro.sample("u", dist.Normal(0.0, 0.5))
            elif flip["levels"]:
                levels = pyro.sample("u", dist.Normal(torch.zeros(3), 0.5).to_event(1))
            if mistake != "outside":
                rows(federation, a, tau, slope, effect, levels, pooled)
        if mistake == "outside":
            rows(federation, mu, tau, beta, effect, None, pooled)

    def rows(
        federation: Any, a: Any, tau: Any, slope: Any, effect: Any, levels: Any, pooled: bool
    ) -> None:
        with federation.observations() as obs:
            kind = obs["kind"] if mistake == "no long" else obs["kind"].long()
            x = obs["x"]
            if mistake == "other name":
                x = obs["z"]
            if mistake == "shape":
                x = torch.cat([x, x], -1)
            mean = a + (x * slope).sum(-1) + effect[kind]
            of_level = obs["kind"].long()
            if levels is not None and (flip["noisy"] or flip["mixed"] or flip["kind"]):
                mean = mean + (levels * torch.nn.functional.one_hot(of_level, 3)).sum(-1)
            elif levels is not None:
                mean = mean + levels.expand(3, *of_level.shape).gather(0, of_level[None])[0]
            if mistake == "own noise":
                mean = mean + torch.randn(())
            if mistake == "other rows":
                mean = mean - obs["x"][..., 0].mean()
            if flip["noisy"]:
                mean = mean + pyro.sample("e", dist.Normal(0.0, 1.0))
            if flip["mixed"]:
                mean = mean + pyro.sample("late", dist.Bernoulli(0.3))
            if mistake == "no outcome":
                return
            three = mean[..., None] + torch.tensor([0.0, 0.5, -0.5])
            root = torch.eye(3) + 0.3 * torch.ones(3, 3).tril(-1)
            normal, vector = dist.Normal, dist.MultivariateNormal
            if pooled:
                normal, vector = dist.NanMaskedNormal, dist.NanMaskedMultivariateNormal
            two = dist.Normal(torch.stack([mean, mean + 2], -1), 0.5)
            fn = {
                "y": lambda: dist.Normal(mean, 0.3 + tau),
                "count": lambda: dist.Poisson(mean.clamp(-5, 3).exp()),
                "yes": lambda: dist.Bernoulli(logits=mean),
                "mix": lambda: dist.MixtureSameFamily(dist.Categorical(torch.ones(2)), two),
                "v": lambda: normal(three, 0.5).to_event(1),
                "pair": lambda: vector(three, scale_tril=root),
                "out": lambda: DISTRIBUTIONS[table_of](1.5 * mean.tanh()),
                "grade": lambda: dist.Categorical(logits=torch.stack([mean, -mean], -1)),
            }[outcome]()
            field = {"mix": "y", "pair": "v", "grade": "kind"}.get(outcome, outcome)
            seen = poutine.mask(mask=obs["seen"] > 0) if flip["masked"] else nullcontext()
            with seen:
                if flip["factor"] and not flip["mixed"] and outcome in ("y", "count", "yes"):
                    pyro.factor(outcome, fn.log_prob(obs[outcome]))
                else:
                    pyro.sample(outcome, fn, obs=obs.get(field))

    if mistake == "condition":
        return pyro.condition(model, data={"tau": torch.tensor(0.5)})
    if flip["reparam"]:
        return poutine.reparam(model, config={"a": LocScaleReparam(float(rng.choice([0.0, 0.4])))})
    return model


def our_log_density(nodes: Mapping[str, Any]) -> list[float]:
    """Return the log density of all sample sites at two draws of the prior, all clients together."""
    total = torch.zeros(2)
    for node in nodes.values():
        log_prob = node["fn"].log_prob(node["value"])
        mask = node["mask"] if isinstance(node["mask"], torch.Tensor) else torch.tensor(True)
        total = total + torch.where(mask, log_prob, 0.0).expand(2, *log_prob.shape[1:]).sum((1, 2))
    return [float(value) for value in total]


def pyros_log_density(
    program: Any, federation: bf.Federation, values: Mapping[str, torch.Tensor]
) -> float:
    """Return the same by Pyro on the pooled rows, discrete variables summed out by its own enumeration."""
    given = poutine.condition(program, data=values)
    model = poutine.enum(config_enumerate(given), first_available_dim=-3)
    trace = poutine.trace(model).get_trace(federation, pooled=True)
    nodes = [node for node in trace.nodes.values() if node["type"] == "sample"]
    if not any(node["infer"].get("_enumerate_dim") is not None for node in nodes):
        return float(trace.log_prob_sum())
    padding = len(federation) * int(federation.lengths.max()) - federation.rows
    # it sums over the two values of rows that are masked, too
    counted = padding * math.log(2) * ("late" in trace.nodes)
    return float(TraceEinsumEvaluator(trace, True, 2).log_prob(trace)) - counted


def integrated(
    program: Any, federation: bf.Federation, values: Mapping[str, torch.Tensor]
) -> float:
    """Return the same with a row's variables summed on a grid, which Pyro takes for dimensions on the left."""
    grid = torch.linspace(-300.0, 300.0, 30_001).reshape(-1, 1, 1)
    of_row = {"e": grid, "late": torch.tensor([0.0, 1.0]).reshape(-1, 1, 1, 1)}
    by_kind = []
    for kind in range(3):
        data = dict(values) | of_row | {"k": torch.full((len(federation), 1), kind)}
        conditioned = poutine.condition(program, data=data)
        trace = poutine.trace(conditioned).get_trace(federation, pooled=True)
        trace.compute_log_prob()
        nodes = {name: node for name, node in trace.nodes.items() if node["type"] == "sample"}
        rows = {name: nodes[name] for name in nodes if name in {*of_row, *OUTCOMES}}
        each = sum(
            node["log_prob"] if name in OUTCOMES else node["fn"].log_prob(node["value"])
            for name, node in rows.items()
        )
        each = each.reshape(-1, *each.shape[-2:]).logsumexp(0) + math.log(0.02)
        clients = torch.where(federation.batch().mask, each, 0.0).sum(-1)
        of_all = torch.zeros(())
        for name, node in nodes.items():
            if name in rows or handlers.is_plate(node):
                continue
            if handlers.is_local(node):
                clients = clients + node["log_prob"].sum(-1)
            else:
                of_all = of_all + node["log_prob_sum"]
        by_kind.append(clients)
    clients = torch.stack(by_kind).logsumexp(0) if "k" in nodes else by_kind[0]
    return float(of_all + clients.sum())


def drawn(seed: int) -> tuple[np.random.Generator, str]:
    """Return the generator of a program, and its mistake, if it has one."""
    rng = np.random.default_rng(seed)
    return rng, "" if seed % 2 else str(rng.choice(list(MISTAKES)))


def measure(seed: int) -> tuple[str, str]:
    """Return the outcome of a program with a mistake, or of a right one, and the message."""
    rng, mistake = drawn(seed)
    try:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            columns = ("kind", "size", "y", "count", "yes", "seen", "v", "out")
            fields = {"x": ["x1", "x2"]} | {name: name for name in columns}
            table_of, gaps = str(rng.choice(DRAWN)), not mistake and bool(rng.random() < 0.5)
            federation = bf.Federation.from_frame(
                frame(rng, mistake, table_of, gaps),
                client="site",
                fields=fields,
                missing="keep" if gaps else "fail",
            )
            made = program(rng, mistake, table_of)
            run = bf.start(made, federation, rounds=1)
            if mistake or seed % 8 == 1:
                bf.step(run)
    except (ValueError, KeyError, TypeError, NotImplementedError, bf.Stopped) as error:
        said = str(error.args[0])
        own = re.sub(r" \(.*\)$", "", said)  # torch's own words follow in brackets
        return "raw" if RAW.search(own) else "refused", said
    except Exception as error:
        return "raw", f"{type(error).__name__}: {error}"
    batch = federation.batch()
    with noise.seeded(seed), handlers.given(batch.device, draws=2), poutine.trace() as tracer:
        run.program.model(batch)
    nodes = handlers.sample_sites(tracer.trace)
    latent = {name: node["value"] for name, node in nodes.items() if not node["is_observed"]}
    whole = replace(federation, gaps=False)  # Pyro's own distributions leave out missing entries
    try:
        pooled = poutine.trace(made).get_trace(whole, pooled=True).nodes
    except Exception as error:
        return "not by Pyro", f"{type(error).__name__}: {error}"
    summed = {"e", "late", "k"} & pooled.keys()
    found = our_log_density(nodes)
    for draw in range(2):
        values = {}
        for name, value in latent.items():
            values[name] = value[draw] if run.program.sites[name].local else value[draw][0, 0]
            if name == "u" and nodes[name]["fn"].event_dim and not summed:
                values[name] = value[draw].movedim(-1, 0)
        try:
            reference = integrated if "e" in pooled else pyros_log_density
            expected = reference(made, whole, values)
        except Exception as error:
            return "not by Pyro", f"{type(error).__name__}: {error}"
        if abs(found[draw] - expected) > TOLERANCE * (1 + abs(expected)):
            warned = any("has not converged with" in str(one.message) for one in heard)
            said = f"{found[draw]:.4f}, Pyro {expected:.4f}"
            return "warned" if warned else "silent", said
    return "same", ""


def main() -> None:
    given = runner.arguments(__doc__, first=0, count=2000, say=False)
    rows: dict[str, list[tuple[int]]] = {name: [] for name in ("right", *MISTAKES.values())}
    for seed in range(given.first, given.first + given.count):
        rows[MISTAKES.get(drawn(seed)[1], "right")].append((seed,))
    outcomes = ["same", "refused", "not by Pyro", "warned", "silent", "raw"]

    def cells(_: Any, found: list[tuple[str, str]]) -> list[int]:
        for came, said in found:
            if given.say or came in ("raw", "silent"):
                print(f"{came}: {said.splitlines()[0] if said else ''}")
        return [sum(came == outcome for came, _ in found) for outcome in outcomes]

    needed = {name: calls for name, calls in rows.items() if calls}
    runner.table(f"program | {' | '.join(outcomes)}", needed, measure, given, cells)


if __name__ == "__main__":
    main()
