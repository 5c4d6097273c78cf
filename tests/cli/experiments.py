"""Experiment files, and the rows of what a run writes."""

import csv

from bayesfed.cli import app as cli

SCHOOLS = """
[model]
name = "eight_schools"
[data]
dataset = "eight_schools"
[algorithm]
name = "SFVI"
local_steps = 1
draws = 2
[schedule]
rounds = 3
[output]
num_samples = 40
"""


MY_MODEL = '''
import pyro
import pyro.distributions as dist
from beside import SPREAD


def heights(federation):
    """Heights in towns."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with federation.clients():
        town = pyro.sample("town", dist.Normal(mu, SPREAD).to_event(1))
        bias = pyro.sample("bias", dist.Normal(0.0, tau))
        with federation.observations() as obs:
            mean = bias + (town * obs["x"]).sum(-1)
            pyro.sample("height", dist.Normal(mean, 1.0), obs=obs.get("height"))


def guide(federation):
    import torch

    loc = pyro.param("loc", torch.zeros(2), event_dim=1)
    pyro.sample("mu", dist.Normal(loc, 1.0).to_event(1))
    pyro.sample("tau", dist.LogNormal(0.0, 1.0))
    with federation.clients():
        rows = pyro.param("rows", torch.zeros(len(federation), 1, 2), event_dim=1)
        pyro.sample("town", dist.Normal(rows, 1.0).to_event(1))
        pyro.sample("bias", dist.Normal(0.0, 1.0))
'''


def rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def fails(capsys, *arguments):
    """The exit code and the one line on stderr."""
    code = cli.main(list(arguments))
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert error.endswith("\n")
    return code, error[len("error: ") : -1]
