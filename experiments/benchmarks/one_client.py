"""Is a program batched over draws and clients faster than one for one client and one draw under torch.vmap?

    python experiments/benchmarks/one_client.py        # two minutes, on a quiet machine

The value and gradient of log p(w_i | θ) + log p(D_i | w_i, θ) are timed, all values given: with the model's plates as
leading dimensions, and with the model run by bayesfed.vmap for one client and one draw. Each is run eagerly, as a graph
of ``make_fx``, and compiled by Inductor. Runs take turns; times are medians. Makes one_client.md.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import pyro
import torch
from pyro import poutine
from timing import runner
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import bayesfed as bf
from bayesfed import datasets, models, simulations
from bayesfed.elbo import handlers
from bayesfed.elbo.sites import sites
from bayesfed.tracing import inductor
from bayesfed.tracing.compiler import _SameStorage
from bayesfed.vmap.one_client import OneClient

DRAWS = 8
CASES: dict[str, Callable[[], tuple[Any, bf.Federation, int]]] = {
    "varying_slope, 11 clients × 20 rows": lambda: (models.varying_slope, datasets.grunfeld(), 20),
    "hierarchical_logistic, 8 × 200": lambda: (
        models.hierarchical_logistic,
        datasets.china_smoking(),
        200,
    ),
    "Network 64-32-10, 20 × 16": lambda: (
        models.Network(models.mlp(64, 32, 10), spread="learnt", scale=0.1, hyper_scale=0.3),
        datasets.digits(clients=20)[0],
        16,
    ),
    "GaussianProcess, 12 × 10": lambda: (
        models.GaussianProcess(),
        simulations.polynomials(clients=12)[0],
        10,
    ),
}


def log_joint(model: Any, given: Mapping[str, Tensor], batch: Any) -> Tensor:
    """Return log p of the local and the observed sample sites, summed."""
    with (
        pyro.validation_enabled(False),
        handlers.Parameters(),
        handlers.draws_plate(DRAWS),
        handlers.Values(given),
    ):
        trace = poutine.trace(model).get_trace(batch)
        trace.compute_log_prob()
    nodes = [node for node in trace.nodes.values() if node["type"] == "sample"]
    return sum(
        (n["log_prob"].sum() for n in nodes if handlers.is_local(n) and not handlers.is_plate(n)),
        start=torch.zeros(()),
    )


def prior_values(model: Any, batch: Any, federation: bf.Federation) -> dict[str, Tensor]:
    """Draw the latent variables from the prior."""
    with handlers.Parameters(), handlers.draws_plate(DRAWS), torch.no_grad():
        nodes = poutine.trace(model).get_trace(batch).nodes
    return {
        site.name: nodes[site.name]["value"]
        .expand(DRAWS, len(federation) if site.local else 1, 1, *site.event_shape)
        .clone()
        for site in sites(model, federation).values()
        if not site.observed
    }


def gradient(function: Callable[[dict[str, Tensor]], Tensor], names: list[str]) -> Any:
    """Return a function of a flat list of tensors: value and gradients."""

    def run(*tensors: Tensor) -> list[Tensor]:
        given = {n: t.detach().requires_grad_() for n, t in zip(names, tensors, strict=True)}
        with torch.enable_grad():
            value = function(given)
            grads = torch.autograd.grad(
                value, list(given.values()), allow_unused=True, materialize_grads=True
            )
        return [value.detach(), *(g.detach() for g in grads)]

    return run


def measure(name: str) -> list[list[Any]]:
    """Time both ways, and compare their gradients."""
    model, federation, size = CASES[name]()
    rows = torch.arange(size).expand(len(federation), -1)
    batch = federation.batch(torch.arange(len(federation)), rows)
    values = prior_values(model, batch, federation)
    tensors, found, failed = list(values.values()), {}, []
    for way, program in (("batched", model), ("vmapped", OneClient(model))):
        run = gradient(lambda given, program=program: log_joint(program, given, batch), [*values])
        try:
            result = run(*tensors)
            with _SameStorage():
                graph = make_fx(run)(*tensors)
        except Exception as error:
            words = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
            failed.append(["", way, words, *[""] * 4])
            continue
        begin = time.perf_counter()
        with torch.no_grad():
            compiled = inductor.compile_graph(graph, tensors)
            compiled(*tensors)
        found[way] = result, (run, graph, compiled), time.perf_counter() - begin
    times = {way: ([], [], []) for way in found}
    for _ in range(20):
        for way, (_, runs, _) in found.items():
            for run, spent in zip(runs, times[way], strict=True):
                begin = time.perf_counter()
                with torch.no_grad():
                    run(*tensors)
                spent.append(time.perf_counter() - begin)
    gap = "–"
    if len(found) == 2:
        pairs = zip(found["batched"][0], found["vmapped"][0], strict=True)
        differs = (float((a - b).abs().max() / b.abs().max().clamp(min=1e-9)) for a, b in pairs)
        gap = f"{max(differs):.0e}"
    cells = []
    for way, (_, runs, seconds) in found.items():
        middle = [f"{1000 * statistics.median(spent):.2f}" for spent in times[way]]
        cells.append([gap, way, len(runs[1].graph.nodes), *middle, f"{seconds:.0f}"])
    return [*cells, *failed]


def main() -> None:
    columns = "value and gradient of | differ by | way | nodes | eager, ms | traced, ms | compiled, ms | compile, s"
    runner.table(columns, list(CASES), measure, runner.arguments(__doc__))


if __name__ == "__main__":
    main()
