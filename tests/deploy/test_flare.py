"""The job for NVIDIA FLARE: with a stand-in for what it calls, and, where FLARE is installed, in its simulator."""

import importlib.util
import os
import queue
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pandas as pd
import pytest

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.deploy.node import Node
from bayesfed.deploy.plan import DeploymentPlan
from bayesfed.deploy.sockets import serve
from bayesfed.deploy.transport import Wait

JOB = Path(__file__).parents[2] / "docs" / "deployment" / "flare_job"
INSTITUTIONS = ("north", "south")


@contextmanager
def worker(address, handle):
    ready, stop = queue.Queue(), threading.Event()
    given = {"ready": ready.put, "stop": stop}
    thread = threading.Thread(target=serve, args=(address, handle), kwargs=given)
    thread.start()
    try:
        yield ready.get(timeout=10)
    finally:
        stop.set()
        thread.join(10)


@pytest.fixture
def folder():
    """Short, as a Unix socket's path has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="bf") as name:
        yield Path(name)


class Found:
    """What a call of nodes gives, as FLARE's ResultQueue: pairs of those that answered, and why others did not."""

    def __init__(self):
        self.answers, self.failures = [], {}

    def __iter__(self):
        return iter(self.answers)


class StandIn:
    """As much of `nvflare.collab.collab` as the job uses; each call must be what FLARE 2.9 takes."""

    def __init__(self, names):
        self.clients = [SimpleNamespace(name=name) for name in names]
        self.at, self.asked = None, []

    def publish(self, function):
        self.published = function
        return function

    def main(self, function):
        return function

    @property
    def site_name(self):
        return self.at

    def get_app_prop(self, name):
        assert name == "experiment"
        return "/srv/experiment.toml"

    def get_clients(self, names):
        assert set(names) <= {client.name for client in self.clients}

        def options(*, blocking, timeout):
            assert blocking is False  # else they would be asked one after the other

            def forward(message, seconds):
                self.asked.append((tuple(names), timeout, seconds))
                found = Found()
                for self.at in names:
                    try:
                        found.answers.append((self.at, self.published(message, seconds)))
                    except Exception as error:
                        found.failures[self.at] = error
                return found

            return SimpleNamespace(forward=forward)

        return options


@pytest.fixture
def job(monkeypatch):
    collab = StandIn([*INSTITUTIONS, "west"])
    module = ModuleType("nvflare.collab")
    module.collab = collab
    monkeypatch.setitem(sys.modules, "nvflare", ModuleType("nvflare"))
    monkeypatch.setitem(sys.modules, "nvflare.collab", module)
    spec = importlib.util.spec_from_file_location("bayesfed_job_tried", JOB / "bayesfed_job.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made, collab


def test_each_node_is_asked_its_own_and_who_fails_is_left_out(job, folder, monkeypatch, caplog):
    made, collab = job
    monkeypatch.setenv("BAYESFED_SOCKET", str(folder / "{site}.sock"))
    with (
        worker(str(folder / "north.sock"), bytes.upper),
        worker(str(folder / "south.sock"), bytes.title),
    ):
        nodes = made.carrier()
        assert list(nodes.reachable()) == ["north", "south", "west"]
        sent = {"north": b"to north", "south": b"to south", "west": b"to west"}
        found = nodes.exchange(sent, Wait(5.0))
    assert found == {"north": b"TO NORTH", "south": b"To South"}
    assert collab.asked == [((node,), 5.0, 5.0) for node in sent]
    assert "west: " in caplog.text and "west.sock" in caplog.text


def test_the_job_runs_the_experiment(job, monkeypatch):
    made, _ = job
    seen = []
    monkeypatch.setattr("bayesfed.cli.deployment.run_file", lambda wire, path: seen.append(path))
    made.main()
    assert seen == [Path("/srv/experiment.toml")]


SIMULATED = """
import sys
import bayesfed_job
from nvflare.collab import CollabRecipe
from nvflare.recipe.sim_env import SimEnv

if __name__ == "__main__":
    recipe = CollabRecipe("bayesfed", server=bayesfed_job, client=bayesfed_job, min_clients=2)
    recipe.set_server_prop("experiment", sys.argv[1])
    recipe.execute(SimEnv(clients=["north", "south"], workspace_root=sys.argv[2])).get_result()
"""
EXPERIMENT = """
[model]
name = "eight_schools"
[data]
client = "school"
[algorithm]
corrected = false
[schedule]
rounds = 3
[deployment]
institutions = ["north", "south"]
"""


@pytest.mark.slow
def test_a_fit_in_flares_simulator_is_the_fit_in_one_process(folder):
    """Of two nodes, one of whose workers is not there when it is asked first."""
    pytest.importorskip("nvflare")
    schools = datasets.eight_schools()
    plan = DeploymentPlan(models.eight_schools, bf.SFVI(corrected=False), rounds=3)
    (folder / "experiment.toml").write_text(EXPERIMENT)
    (folder / "simulated.py").write_text(SIMULATED)
    north, south = (
        Node(name, schools.select(names), plan, folder / name)
        for name, names in zip(INSTITUTIONS, (schools.names[:3], schools.names[3:]), strict=True)
    )
    asked, alone = threading.Event(), threading.Lock()  # nodes are processes elsewhere

    def of(node):
        def handle(message):
            asked.set()
            with alone:
                return node.handle(message)

        return handle

    path = f"{JOB}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    given = {"BAYESFED_SOCKET": str(folder / "{site}.sock"), "PYTHONPATH": path}
    command = [sys.executable, "simulated.py", folder / "experiment.toml", folder / "flare"]
    with (
        worker(str(folder / "north.sock"), of(north)),
        (folder / "log").open("w") as log,
        subprocess.Popen(
            command, cwd=folder, env=os.environ | given, stdout=log, stderr=subprocess.STDOUT
        ) as started,
    ):
        assert asked.wait(120), (folder / "log").read_text()
        with worker(str(folder / "south.sock"), of(south)):
            assert started.wait(240) == 0, (folder / "log").read_text()
    said = (folder / "log").read_text()
    assert "south.sock" in said, "the worker was there from the start"
    table = pd.read_csv(folder / "runs" / "experiment" / "summary.csv", index_col="variable")
    here = bf.fit(plan.model, schools, plan.algorithm, rounds=3).sample(1000)
    for name in ("mu", "tau"):
        np.testing.assert_allclose(table["mean"][name], float(here[name].mean()), rtol=1e-3)
        np.testing.assert_allclose(table["sd"][name], float(here[name].std()), rtol=1e-3)
