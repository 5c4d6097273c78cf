"""A posterior loaded without rows: what needs none is as before, and all else says what to give."""

from __future__ import annotations

import inspect

import arviz as az
import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.data.absent import RowsAbsent
from bayesfed.deploy.global_posterior import GlobalPosterior
from bayesfed.engine.files import read_tensors, write_tensors
from bayesfed.output.posterior import Posterior

OLD = az.__version__.startswith("0.")
GENERATOR = torch.Generator().manual_seed(0)


def slopes(federation):
    """Derived values outside and inside the clients plate, a pyro.param, and a vector."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    beta = pyro.sample("beta", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    scale = pyro.param("scale", torch.tensor(1.0), constraint=dist.constraints.positive)
    pyro.deterministic("ratio", beta[..., 0] / (1 + beta[..., 1].abs()))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(mu, 0.5))
        pyro.deterministic("gap", a - mu)
        with federation.observations() as obs:
            eta = a + (beta * obs["x"]).sum(-1)
            pyro.sample("y", dist.Normal(eta, scale), obs=obs.get("y"))


def rows(clients):
    return bf.Federation.from_arrays(
        {
            name: {
                "x": torch.randn(12, 2, generator=GENERATOR),
                "y": torch.randn(12, generator=GENERATOR),
            }
            for name in clients
        }
    )


DATA, NEW = rows("abcd"), rows(["new"])
FITS = {
    "corrected": (slopes, DATA, bf.SFVI(), 20),
    "plain": (models.eight_schools, datasets.eight_schools(), bf.PVI(), 3),
    "a point": (models.eight_schools, datasets.eight_schools(), bf.FedAvg(), 2),
    "particles": (models.eight_schools, datasets.eight_schools(), bf.PACPFL(), 2),
    "point and locals": (models.varying_slope, datasets.grunfeld(), bf.FedABML(), 2),
    "processes": (models.GaussianProcess(), NEW.to(), bf.PACPFL(), 1),
}


@pytest.fixture(scope="module", params=FITS)
def pair(request, tmp_path_factory):
    """A posterior, and the same loaded without rows."""
    model, data, algorithm, rounds = FITS[request.param]
    posterior = bf.fit(model, data, algorithm, rounds=rounds)
    path = tmp_path_factory.mktemp("without") / "p.safetensors"
    posterior.save(path)
    return posterior, Posterior.load(path, model)


def calls(posterior, data, folder):
    """Each public method and property of a posterior, as one calls it."""
    given = {
        "select": lambda: posterior.select(data.names[:1]),
        "personalize": lambda: posterior.personalize(data, steps=1),
        "without": lambda: posterior.without(data.names[0]),
        "params_of": lambda: posterior.params_of(torch.arange(1)),
        "check_known": lambda: posterior.check_known(data.names),
        "key": lambda: posterior.key(0),
        "report": lambda: posterior.report(folder / "report.html", num_samples=50),
        "save": lambda: posterior.save(folder / "again.safetensors"),
        "load": None,
        "with_correction": None,
    }
    for name in dir(Posterior):
        if name.startswith("_") or given.get(name, "") is None:
            continue
        value = inspect.getattr_static(Posterior, name)
        if name in given:
            yield name, given[name]
        elif inspect.isfunction(value):
            few = (
                {"num_samples": 20} if "num_samples" in inspect.signature(value).parameters else {}
            )
            yield name, lambda name=name, few=few: getattr(posterior, name)(**few)
        else:
            yield name, lambda name=name: getattr(posterior, name)
    yield "repr", lambda: repr(posterior)
    yield "loo", lambda: bf.loo(posterior.to_arviz(20))
    yield "compare", lambda: bf.compare({"one": posterior})
    yield "leave_one_client_out", lambda: bf.leave_one_client_out(posterior, 200)
    yield "effects", lambda: bf.effects.predictions(posterior, {next(iter(data.fields)): [0.0]})
    yield "entry", lambda: bf.effects.predictions(posterior, {"x[0]": [0.0]})
    yield "hypotheses", lambda: bf.effects.hypotheses(posterior, "mu > 0", num_samples=20)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_public_method_works_or_says_what_to_give(pair, tmp_path):
    """An error is of the rows, or the same as with rows."""
    posterior, without = pair
    with_rows = dict(calls(posterior, posterior.federation, tmp_path))
    refused, worked = set(), set()
    for name, call in calls(without, posterior.federation, tmp_path):
        try:
            call()
            worked.add(name)
        except RowsAbsent as error:
            assert "bf.Posterior.load(path, model, federation)" in str(error)
            assert "\n" not in str(error)
            refused.add(name)
        except Exception as error:
            if name == "loo":
                assert "loaded with its rows" in str(error)
                continue
            with pytest.raises(type(error)) as there:
                with_rows[name]()
            assert str(there.value)[:30] == str(error)[:30]
    assert worked >= {
        *("sample", "derived", "to_arviz", "to_frame", "report", "personalize", "select"),
        *("repr", "caveat", "khat"),
    }
    assert refused >= {"predict", "log_likelihood", "elbo", "predictive", "save", "compare"}


def test_the_globals_are_as_before(pair):
    posterior, without = pair
    drawn, expected = without.sample(50), posterior.sample(50)
    names = {site.name for site in posterior.program.globals}
    assert drawn.keys() == names
    for name in names:
        torch.testing.assert_close(drawn[name], expected[name])
    derived = without.derived(num_samples=50)
    assert derived.keys() == {n for n, dims in posterior.program.derived.items() if not dims}
    more = posterior.derived(num_samples=50)
    for name, value in derived.items():
        torch.testing.assert_close(value, more[name])
    frame, whole = without.to_frame(20), posterior.to_frame(20)
    pd.testing.assert_frame_equal(frame, whole[frame.columns])
    assert without.federation.names == posterior.federation.names
    assert "elsewhere" in repr(without.federation)


@pytest.fixture(scope="module")
def reopened(tmp_path_factory):
    posterior = bf.fit(slopes, DATA)
    path = tmp_path_factory.mktemp("server") / "server.safetensors"
    GlobalPosterior(posterior, {}, {}).save(path)
    return posterior, Posterior.load(path, slopes), path


def test_a_server_reopens_its_study(reopened, tmp_path):
    posterior, without, path = reopened
    idata = without.to_arviz(40)
    groups = (
        {name.strip("/") for name in getattr(idata, "groups", ())} if not OLD else idata.groups()
    )
    assert set(groups) - {""} == {"posterior", "log_prior", "prior", "params", "history"}
    whole = posterior.to_arviz(40)
    for name in ("mu", "beta", "ratio"):
        np.testing.assert_allclose(idata["posterior"][name], whole["posterior"][name], rtol=1e-5)
    np.testing.assert_allclose(idata["log_prior"]["mu"], whole["log_prior"]["mu"], rtol=1e-5)
    assert idata["params"]["scale"].item() == pytest.approx(whole["params"]["scale"].item())
    assert idata["prior"]["beta"].shape == (1, 40, 2)
    without.report(tmp_path / "study.html", num_samples=40)
    assert "beta[1]" in (tmp_path / "study.html").read_text()
    ratio = bf.effects.hypotheses(without, "ratio > 0").draws
    torch.testing.assert_close(ratio, bf.effects.hypotheses(posterior, "ratio > 0").draws)
    average = {"level": "average", "rows": DATA, "num_samples": 20}
    found, expected = (
        bf.effects.predictions(one, {"x[0]": [0.0, 1.0]}, **average).draws
        for one in (without, posterior)
    )
    torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match="is a server's, without the clients' variables"):
        Posterior.load(path, slopes, DATA)


def test_new_clients_are_as_before(reopened):
    posterior, without, _ = reopened
    drawn, expected = (
        one.personalize(NEW, steps=3).predict(num_samples=10)["y"] for one in (without, posterior)
    )
    torch.testing.assert_close(drawn, expected)


def test_the_evidence_is_stored(tmp_path):
    schools = datasets.eight_schools()
    posterior = bf.fit(models.eight_schools, schools)
    posterior.save(tmp_path / "p.safetensors")
    without = Posterior.load(tmp_path / "p.safetensors", models.eight_schools)
    assert without.log_evidence.value == posterior.log_evidence.value
    assert without.khat == posterior.khat
    with pytest.raises(ValueError, match="of another model"):
        Posterior.load(tmp_path / "p.safetensors", wider_schools)
    tensors, metadata = read_tensors(tmp_path / "p.safetensors", "bayesfed")
    del metadata["schema"]
    write_tensors(tmp_path / "old.safetensors", tensors, "bayesfed", metadata)
    with pytest.raises(ValueError, match="stored no shapes of the fields: give the rows"):
        Posterior.load(tmp_path / "old.safetensors", models.eight_schools)
    Posterior.load(tmp_path / "old.safetensors", models.eight_schools, schools)


def wider_schools(federation):
    mu = pyro.sample("mu", dist.Normal(0.0, 7.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    with federation.clients():
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(theta, obs["sigma"]), obs=obs.get("y"))
