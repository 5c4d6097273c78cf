"""A program batched over draws and clients, against the same program for one client and one draw under torch.vmap.

    python experiments/benchmarks/one_client.py        # two minutes, on a quiet machine

What is timed is the value and gradient of log p(w_i | θ) + log p(D_i | w_i, θ), all values given: with the model's
plates as leading dimensions, as the package runs it, and with the model run for one client and one draw, which lifts
both dimensions from the user's program. Each eagerly, as a graph of ``make_fx`` run as it is, and compiled by
Inductor. Runs take turns; times are medians. Makes one_client.md.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro import poutine
from timing import command, write
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import bayesfed as bf
from bayesfed import datasets, models, simulations
from bayesfed.data.batch import Fields
from bayesfed.elbo import handlers
from bayesfed.elbo.sites import sites
from bayesfed.tracing import inductor
from bayesfed.tracing.compiler import _SameStorage

DRAWS = 8


class OneClient:
    """What a program sees of one client: rows ``(1, B, *event)``, which of them count, and by how much."""

    def __init__(self, fields: Mapping[str, Tensor], mask: Tensor, scale: Tensor) -> None:
        self.fields, self.mask = Fields({n: v[None] for n, v in fields.items()}), mask[None]
        self.scale = scale[None]

    def event_shape(self, field: str) -> torch.Size:
        """Of one row."""
        return self.fields[field].shape[2:]

    def clients(self) -> Any:
        """A plate of one."""
        return pyro.plate("clients", 1, dim=-2)

    @contextmanager
    def observations(self) -> Any:
        """The rows."""
        with (
            pyro.plate("observations", self.mask.shape[1], dim=-1),
            poutine.mask(mask=self.mask),
            poutine.scale(scale=self.scale),
        ):
            yield self.fields

    @contextmanager
    def jointly(self) -> Any:
        """The rows as one event."""
        with poutine.scale(scale=self.scale):
            yield self.fields, self.mask


def log_joint(model: Any, given: Mapping[str, Tensor], data: Any) -> Tensor:
    """log p of the local and the observed sites, summed."""
    with pyro.validation_enabled(False), handlers.Parameters(), handlers.Values(given):
        trace = poutine.trace(model).get_trace(data)
        trace.compute_log_prob()
    nodes = [node for node in trace.nodes.values() if node["type"] == "sample"]
    return sum(
        (n["log_prob"].sum() for n in nodes if handlers.is_local(n) and not handlers.is_plate(n)),
        start=torch.zeros(()),
    )


Case = tuple[
    Callable[[dict[str, Tensor]], Tensor], Callable[[dict[str, Tensor]], Tensor], dict[str, Tensor]
]


def case(model: Any, federation: bf.Federation, rows: int) -> Case:
    """The batched and the vmapped sum of log densities as functions of the values, and values of the prior."""
    batch = federation.batch(
        torch.arange(len(federation)), torch.arange(rows).expand(len(federation), -1)
    )
    found = sites(model, federation)
    with handlers.Parameters(), handlers.draws_plate(DRAWS), torch.no_grad():
        torch.manual_seed(0)
        nodes = poutine.trace(model).get_trace(batch).nodes
    values = {}
    for site in found.values():
        if not site.observed:
            clients = len(federation) if site.local else 1
            shape = (DRAWS, clients, 1, *site.event_shape)
            values[site.name] = nodes[site.name]["value"].expand(shape).clone()

    def batched(given: dict[str, Tensor]) -> Tensor:
        with handlers.draws_plate(DRAWS):
            return log_joint(model, given, batch)

    def one(theta: Any, w: Any, fields: Any, mask: Tensor, scale: Tensor) -> Tensor:
        return log_joint(model, theta | w, OneClient(fields, mask, scale))

    per_client = torch.vmap(one, in_dims=(None, 0, 0, 0, 0))
    per_draw = torch.vmap(per_client, in_dims=(0, 0, None, None, None))

    def vmapped(given: dict[str, Tensor]) -> Tensor:
        theta = {n: v[:, 0, 0] for n, v in given.items() if not found[n].local}
        w = {n: v[:, :, None] for n, v in given.items() if found[n].local}
        return per_draw(theta, w, dict(batch.fields), batch.mask, batch.scale).sum()

    return batched, vmapped, values


def gradient(function: Callable[[dict[str, Tensor]], Tensor], names: list[str]) -> Any:
    """A function of a flat list of tensors: value and gradients."""

    def run(*tensors: Tensor) -> list[Tensor]:
        given = {n: t.detach().requires_grad_() for n, t in zip(names, tensors, strict=True)}
        with torch.enable_grad():
            value = function(given)
            grads = torch.autograd.grad(
                value, list(given.values()), allow_unused=True, materialize_grads=True
            )
        return [value.detach(), *(g.detach() for g in grads)]

    return run


def main() -> None:
    command(__doc__).parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    digits = datasets.digits(clients=20)[0]
    cases = {
        "varying_slope, 11 clients × 20 rows": (models.varying_slope, datasets.grunfeld(), 20),
        "hierarchical_logistic, 8 × 200": (
            models.hierarchical_logistic,
            datasets.china_smoking(),
            200,
        ),
        "Network 64-32-10, 20 × 16": (
            models.Network(models.mlp(64, 32, 10), spread="learnt", scale=0.1, hyper_scale=0.3),
            digits,
            16,
        ),
        "GaussianProcess, 12 × 10": (
            models.GaussianProcess(),
            simulations.polynomials(clients=12)[0],
            10,
        ),
    }
    lines = [
        "| value and gradient of | differ by | way | nodes | eager, ms | traced, ms | compiled, ms | compile, s |",
        "| --- |" + " --- |" * 7,
    ]
    for name, parts in cases.items():
        batched, vmapped, values = case(*parts)
        names, tensors = list(values), list(values.values())
        ways: dict[str, dict[str, Any]] = {}
        for way, function in (("batched", batched), ("vmapped", vmapped)):
            run = gradient(function, names)
            try:
                found = run(*tensors)
                with _SameStorage():
                    graph = make_fx(run)(*tensors)
            except Exception as error:
                lines.append(
                    f"| {name} | | {way} | {type(error).__name__}: {str(error).splitlines()[0][:80]} | | | | |"
                )
                print(lines[-1], flush=True)
                continue
            begin = time.perf_counter()
            with torch.no_grad():
                compiled = inductor.compile_graph(graph, tensors)
                compiled(*tensors)
            seconds = time.perf_counter() - begin
            ways[way] = {
                "found": found,
                "nodes": len(graph.graph.nodes),
                "runs": {"eager": run, "traced": graph, "compiled": compiled},
                "seconds": seconds,
                "times": {"eager": [], "traced": [], "compiled": []},
            }
        for _ in range(20):
            for entry in ways.values():
                for kind, run in entry["runs"].items():
                    begin = time.perf_counter()
                    with torch.no_grad():
                        run(*tensors)
                    entry["times"][kind].append(time.perf_counter() - begin)
        if len(ways) == 2:
            pairs = zip(ways["batched"]["found"], ways["vmapped"]["found"], strict=True)
            gap = max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-9)) for a, b in pairs)
            gap = f"{gap:.0e}"
        else:
            gap = "–"
        for way, entry in ways.items():
            cells = [f"{1000 * statistics.median(t):.2f}" for t in entry["times"].values()]
            lines.append(
                f"| {name} | {gap} | {way} | {entry['nodes']} | {' | '.join(cells)} | {entry['seconds']:.0f} |"
            )
            print(lines[-1], flush=True)
    write(Path(__file__), lines)


if __name__ == "__main__":
    main()
