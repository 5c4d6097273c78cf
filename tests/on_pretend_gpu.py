"""Fits, and what follows them, on a device that is as strict as a GPU and needs none: run by test_pretend_gpu.py."""

from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.special import expit

import bayesfed as bf
from bayesfed import models
from bayesfed.engine.program import build_program
from bayesfed.output import metrics, shared_points, sum_of_evidence
from bayesfed.output.log_densities import sum_log_weights
from bayesfed.vmap.one_client import OneClient
from tests import pretend_gpu
from tests.invariants.cases import CASES, federation, small
from tests.output import test_shared_points, test_sum_of_evidence
from tests.test_gpu import QUESTIONS, as_tensors

pytestmark = pytest.mark.skipif(
    not pretend_gpu.AVAILABLE, reason="this torch has no devices in Python"
)
LONG = {"with_chains", "report"}
"""The questions that take seconds, left to ``make test-all``."""


@pytest.fixture(autouse=True)
def device():
    pretend_gpu.register()
    return torch.device("pretend", 0)


def fit(model, federation, device, algorithm=None, **settings):
    execution = bf.Execution(device=device, compile=False)
    return bf.fit(model, federation, algorithm, execution=execution, progress=False, **settings)


def assert_same(found, expected):
    for one, other in zip(as_tensors(found), as_tensors(expected), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


MIXED = {
    "operands": lambda x: x + torch.ones(3),
    "the first": lambda x: torch.ones(3) * x.sum(),
    "an index": lambda x: torch.ones(3)[x.long()],
    "a mask": lambda x: torch.ones(3)[x > 0],
    "in place": lambda x: torch.ones(3).add_(x),
    "numpy": lambda x: x.numpy(),
    "vmap": lambda x: torch.vmap(torch.add)(x, torch.ones(3)),
    "parts": lambda x: torch.cat([x, torch.ones(3)]),
}
ALLOWED = {
    "a number": lambda x: x + torch.tensor(2.0),
    "an index": lambda x: x[torch.tensor([2, 0])],
    "a mask": lambda x: x[torch.tensor([True, False, True])],
    "a copy": lambda x: x.cpu() + torch.ones(3),
    "in place": lambda x: x.clone().copy_(torch.ones(3)),
    "item": lambda x: torch.tensor([x[1].item()]),
    "quantiles": lambda x: x.quantile(0.5, dim=0),
}


@pytest.mark.parametrize("operation", MIXED)
def test_operations_on_two_devices_are_errors(operation, device):
    with pytest.raises((RuntimeError, TypeError)):
        MIXED[operation](torch.arange(3.0, device=device))


@pytest.mark.parametrize("operation", ALLOWED)
def test_exceptions_are_pytorchs(operation, device):
    found = ALLOWED[operation](torch.arange(3.0, device=device))
    assert torch.equal(found.cpu(), ALLOWED[operation](torch.arange(3.0)))


def test_an_index_out_of_range_breaks_the_device(device):
    with pytest.raises(IndexError):
        torch.arange(3.0, device=device)[torch.tensor([3])]
    with pytest.raises(RuntimeError, match="device-side assert"):
        torch.arange(3.0, device=device) + 1


@pytest.fixture(scope="module")
def on_both():
    """The same fit of a formula on the CPU and on the pretended device, and rows of the same clients on the CPU."""
    pretend_gpu.register()
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"ward": rng.choice(list("ABC"), 40), "x": rng.normal(size=40)})
    frame["died"] = (rng.random(40) < expit(0.5 * frame.x)).astype(float)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    model = bf.formula("died ~ x + (1 | ward)", frame, family="bernoulli")
    yield [
        fit(model, model.federation, device, bf.SFVI(personal_steps=2))
        for device in ("cpu", "pretend")
    ]
    torch.set_default_dtype(before)


@pytest.mark.filterwarnings("ignore:Pareto k is above")  # of 200 draws
@pytest.mark.parametrize(
    "question", [pytest.param(q, marks=[pytest.mark.slow] * (q in LONG)) for q in QUESTIONS]
)
def test_what_follows_a_fit_is_the_cpus(question, on_both, tmp_path):
    expected, found = (QUESTIONS[question](p, tmp_path) for p in on_both)
    assert_same(found, expected)


ON_ROWS = {
    "predict": lambda p, rows: p.predict(rows, 5),
    "log_likelihood": lambda p, rows: p.log_likelihood(rows, 5),
    "derived": lambda p, rows: p.derived(rows, 5),
    "probabilities": lambda p, rows: p.probabilities(rows, 5),
    "predictive": lambda p, rows: p.predictive(rows, 5).log_prob(p.predict(rows, 1)["y"][0]),
    "personalize": lambda p, rows: p.personalize(rows).sample(5),
    "classification": lambda p, rows: metrics.classification(
        p.probabilities(rows, 5)["y"], rows["y"], rows.owner, rows.names
    ).overall.to_frame(),
}
"""By name: what is asked of a posterior about rows."""


def test_rows_of_the_fit_stay_the_same_object(on_both):
    """The density of a row of the fit is conditional on the other rows, that of a new row on all rows of the fit."""
    for posterior in on_both:
        assert posterior._rows(posterior.federation) is posterior.federation


def test_a_file_is_read_on_the_cpu(on_both, tmp_path):
    cpu, other = on_both
    other.save(tmp_path / "fit")
    model = cpu.program.model
    read = bf.Posterior.load(tmp_path / "fit", model, cpu.federation)
    assert_same(read.sample(5), cpu.sample(5))
    without = bf.Posterior.load(tmp_path / "fit", model).personalize(other.federation)
    assert without.federation.device.type == "cpu"


def without_locals(data):
    beta = pyro.sample("beta", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    bound = pyro.sample("bound", dist.LogNormal(torch.zeros(1), 1.0).to_event(1))
    pyro.sample("bounded", dist.Uniform(-bound, bound).to_event(1))
    with data.clients(), data.observations() as obs:
        logits = (obs["x"] * beta).sum(-1)
        pyro.sample("y", dist.Bernoulli(logits=logits), obs=obs.get("y"))


FITTED = {
    name: CASES[name] for name in ("FedAvg of a network", "PFedVEM of a network", "PACPFL")
} | {
    "PACPFL of functions": lambda: (small(bf.PACPFL()), models.GaussianProcess(classes=2)),
    "SFVI without local variables": lambda: (small(bf.SFVI()), without_locals),
}


@pytest.mark.parametrize("name", FITTED)
def test_rows_may_lie_on_the_cpu(name, float64):
    algorithm, model = FITTED[name]()
    cpu, other = (
        fit(model, federation(), device, algorithm, rounds=1) for device in ("cpu", "pretend")
    )
    rows = federation().select(["client 9", "client 4"])
    for ask in ON_ROWS.values():
        assert_same(ask(other, rows), ask(cpu, rows))
    assert {value.device.type for value in other.sample(5).values()} == {"pretend"}


def test_a_program_of_one_client_is_found_without_breaking_the_device(device):
    """The effect of a client's item has no dimension of clients: only vmap runs this program."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"ward": rng.choice(list("AB"), 24), "item": rng.integers(0, 4, 24)})
    frame["y"] = rng.normal(size=24)
    model = bf.formula("y ~ 1 + (1 | ward) + (1 | item)", frame, client="ward")
    program = build_program(model, model.federation.to(device), bf.SFVI(), seed=0)
    assert isinstance(program.model.model, OneClient)
    assert torch.ones(2, device=device).sum() == 2


def test_a_label_out_of_range_is_named_and_leaves_the_device_usable(device):
    algorithm, model = CASES["FedAvg of a network"]()
    data = federation()
    wrong = replace(data, fields={**data.fields, "y": data["y"] + 5})
    with pytest.raises(ValueError, match="'y'"):
        fit(model, wrong, device, algorithm, rounds=1)
    assert fit(model, data, device, algorithm, rounds=1).sample(2)


@pytest.mark.parametrize("where", ["cpu", "pretend"])
def test_errors_of_models_say_what_to_write(where):
    def model(data, table=torch.ones(5)):  # noqa: B008
        few = pyro.sample("few", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with data.clients(), data.observations() as obs:
            chosen = few[..., 2 + obs["y"].long()] if table is None else table * few[..., :1]
            pyro.sample("y", dist.Normal(chosen[..., :1], 1.0), obs=obs["y"])

    with pytest.raises(ValueError, match="categories count from 0"):
        fit(partial(model, table=None), federation(), where, rounds=1)
    if where == "pretend":
        with pytest.raises(ValueError, match="outside the model lies on another device"):
            fit(model, federation(), where, rounds=1)


def test_rows_are_read_at_points_that_all_draws_share(device, monkeypatch):
    """Also where the points give a bound only, and where they give nothing."""
    monkeypatch.setattr(shared_points, "ENOUGH", 0)
    monkeypatch.setattr(shared_points, "MANY", 0)
    monkeypatch.setattr(sum_of_evidence, "NEGLIGIBLE", 20.0)
    posterior = fit(test_shared_points.slopes, test_shared_points.data(), device)
    assert posterior.correction is not None
    assert posterior.sample(100)["effect"].isfinite().all()
    z = posterior.correction.theta["global"][:60]
    theta = {"global": torch.cat([z, test_sum_of_evidence.around(z, 2.0)])}
    plain = replace(posterior, correction=None)
    found = sum_log_weights(plain, theta, 120, plain.key(0), laplace=True)
    assert found.device == device and found[:60].isfinite().all()
