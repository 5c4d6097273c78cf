"""A user's own parts between machines: over sockets, and refused where the machines' files differ."""

import io
import queue
import threading
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import pandas as pd
import pytest
import torch

import bayesfed as bf
from bayesfed.cli.local_queries import Question
from bayesfed.cli.predictions import LocalPosteriors
from bayesfed.deploy import plan as plans
from bayesfed.deploy.institutions import Patience
from bayesfed.deploy.plan import DeploymentPlan, code_digests, difference
from bayesfed.deploy.server import run_server
from bayesfed.deploy.sockets import carrier, serve
from docs import own_parts
from tests.deploy.in_process import nodes_of

SCHOOLS = bf.datasets.eight_schools()
PLAN = DeploymentPlan(bf.models.eight_schools, own_parts.with_momentum(), rounds=3)

TURN = threading.Lock()


@contextmanager
def listening(handle):
    """The address of a worker in a thread; one works at a time, as Pyro is not made for threads."""

    def alone(payload):
        with TURN:
            return handle(payload)

    address, stop = queue.Queue(), threading.Event()
    worker = partial(serve, "127.0.0.1:0", alone, ready=address.put, stop=stop)
    thread = threading.Thread(target=worker, daemon=True)
    thread.start()
    try:
        yield address.get(timeout=10)
    finally:
        stop.set()
        thread.join(10)


@pytest.mark.parametrize(
    "algorithm", [own_parts.adam, own_parts.with_momentum()], ids=["server", "clients and server"]
)
def test_over_sockets_it_is_the_fit_in_one_process(algorithm, tmp_path):
    plan = replace(PLAN, algorithm=algorithm)
    nodes = nodes_of(SCHOOLS, plan, tmp_path)
    with ExitStack() as stack:
        addresses = [stack.enter_context(listening(node.handle)) for node in nodes]
        patience = Patience(tuple(node.name for node in nodes), joining=10.0, seconds=60.0)
        found = run_server(carrier(addresses), plan, patience, tmp_path / "server.safetensors")
    expected = bf.fit(plan.model, SCHOOLS, algorithm, rounds=plan.rounds)
    assert found.posterior.algorithm == algorithm
    for name, value in expected.params.items():
        torch.testing.assert_close(found.params[name], value, rtol=1e-5, atol=1e-5)
    of_nodes = [
        bf.Posterior.load(
            next((node.folder / "runs").glob("*/posterior.safetensors")),
            plan.model,
            node.federation,
        )
        for node in nodes
    ]
    assert all(posterior.algorithm == algorithm for posterior in of_nodes)
    for name, value in expected.local_params.items():
        joined = torch.cat([posterior.local_params[name] for posterior in of_nodes])
        torch.testing.assert_close(joined, value, rtol=1e-4, atol=1e-4)
    local = LocalPosteriors(nodes[0].federation, plan, nodes[0].folder, "school", ["y", "sigma"])
    rows = f"school,y,sigma\n{SCHOOLS.names[0]},,1e-3\nnew,,1e-3\n"
    table = pd.read_csv(io.StringIO(local.table(Question(rows=rows))), index_col="client")
    theta = expected.sample(1)["theta"][0]
    assert table["mean"][SCHOOLS.names[0]] == pytest.approx(float(theta[0]), abs=1e-3)
    mu = expected.sample(1)["mu"]
    assert table["mean"]["new"] == pytest.approx(float(mu), abs=1e-3)


def test_the_plan_names_the_module_and_digests_its_file(monkeypatch):
    mine = PLAN.description
    assert mine["algorithm"]["rule"]["name"] == "docs.own_parts:TrimmedMean"
    assert list(mine["own code"]) == ["docs.own_parts"]
    assert replace(PLAN, algorithm=bf.FedAvg()).description["own code"] == {}
    monkeypatch.setattr(plans, "code_digests", lambda settings: {"docs.own_parts": "0"})
    assert difference(mine, PLAN.description).startswith("own code.docs.own_parts is")


def test_parts_in_parts_are_found():
    settings = {"steps": {"name": "InTurn", "phases": [{"name": "docs.own_parts:LastingMomentum"}]}}
    assert list(code_digests(settings)) == ["docs.own_parts"]
