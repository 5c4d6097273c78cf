"""Reports of fits of several kinds, of run folders, and of a run between machines."""

import re
from contextlib import nullcontext

import arviz as az
import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.cli.app import main
from bayesfed.cli.run_report import read_run
from bayesfed.data.fingerprint import data_fingerprint
from bayesfed.output.arviz_compat import OLD, dataset
from bayesfed.output.study import hashes, name_of, prior_sensitivity, source_of
from tests.report.test_page import Page

EXPERIMENT = """
[model]
name = "{model}"
[data]
dataset = "grunfeld"
[schedule]
rounds = 25
[output]
num_samples = 300
[[effects]]
variables = {{"x[0]" = 1.0}}
"""


def page_of(path):
    return Page(path.read_text(encoding="utf-8"))


def test_a_formula(tmp_path):
    """The prior of a coefficient in the data's units is shown, as those are what the posterior has."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"ward": rng.choice(list("abc"), 90), "x": rng.normal(50, 9, 90)})
    frame["y"] = 0.1 * frame["x"] + rng.normal(size=90)
    model = bf.formula("y ~ x + (1 | ward)", frame)
    posterior = bf.fit(model, model.federation)
    effect = bf.effects.comparisons(posterior, "x")
    posterior.report(tmp_path / "a.html", title="Wards", effects=[effect])
    page = page_of(tmp_path / "a.html")
    assert "Wards" in page.text and "y ~ x + (1 | ward), fitted by SFVI." in page.text
    assert {"globals", "effects", "clients", "checks", "priors"} <= page.ids
    assert model.source.split("\n")[0] in page.text
    assert "prior sensitivity" in page.text and "mean of y: 0 of 3" in page.text
    left_out = bf.leave_one_client_out(posterior)
    assert f"Leave-one-client-out: elpd {left_out.elpd:.1f}" in page.text
    assert effect.estimand in page.text and effect.level in page.text


def classes(federation):
    level = pyro.sample("level", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with federation.clients():
        own = pyro.sample("own", dist.Normal(level, 1.0).to_event(1))
        with federation.observations() as obs:
            pyro.sample("y", dist.Categorical(logits=own), obs=obs.get("y"))


@pytest.mark.parametrize("kind", ["points", "private", "classes", "missing outcomes"])
def test_fits_that_lack_some_of_the_facts(tmp_path, kind):
    data, options, missing = datasets.eight_schools(), {}, set()
    model, algorithm = models.eight_schools, bf.SFVI()
    if kind == "points":
        model, algorithm, options = network(), bf.FedAvg(), {"rounds": 2}
        data, missing = datasets.digits()[0], {"priors"}
    elif kind == "private":
        options = {"rounds": 30, "privacy": bf.Privacy(clip=1.0, noise=0.1, seed=0)}
    elif kind == "classes":
        rows = {name: {"y": torch.arange(12) % 3} for name in "ab"}
        model, data = classes, bf.Federation.from_arrays(rows)
    elif kind == "missing outcomes":
        data = bf.Federation.from_arrays(
            {n: {"y": [1.0, float("nan"), 2.0], "sigma": [9.0, 9.0, 9.0]} for n in "ab"},
            missing="keep",
        )
    with pytest.warns() if kind == "private" else nullcontext():
        posterior = bf.fit(model, data, algorithm, **options)
    posterior.report(tmp_path / "a.html", num_samples=100)
    page = page_of(tmp_path / "a.html")
    assert not missing & page.ids
    assert {link[1:] for link in page.links} <= page.ids
    if kind == "private":
        assert "Differential privacy: ε =" in page.text and "There is no Pareto" in page.text
    if kind == "classes":
        assert "Share of y that is predicted right" in page.text
    assert not re.search(r"\bnan\b", page.text)


def network():
    return models.Network(models.mlp(64, 10), local=(), scale=0.1)


def test_sources_and_hashes():
    assert source_of(models.eight_schools).startswith("def eight_schools(")
    assert "class Cox" in source_of(models.Cox([1.0]))
    assert source_of(eval("lambda federation: None")) == ""
    assert name_of(models.eight_schools) == "eight_schools"
    one, other = (hashes(text, None)["program (SHA-256)"] for text in ("a", "b"))
    assert one != other and hashes("", None) == {}


def test_sensitivity_is_that_of_arviz():
    posterior = bf.fit(models.eight_schools, datasets.eight_schools())
    idata = posterior.to_arviz(500)
    groups = {n: dataset(idata, n) for n in ("posterior", "log_prior", "log_likelihood")}
    found = prior_sensitivity(groups)
    for position, component in enumerate(("prior", "likelihood")):
        names = ["mu", "tau"]
        expected = (
            az.psens(idata, component=component, var_names=names)
            if OLD
            else az.psense(idata, group=component, var_names=names)
        )
        for name in ("mu", "tau"):
            assert found[name][position] == pytest.approx(float(expected[name]), rel=1e-6)


@pytest.mark.slow
def test_run_folders(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for model in ("varying_slope", "varying_intercept"):
        (tmp_path / f"{model}.toml").write_text(EXPERIMENT.format(model=model))
        assert main(["run", f"{model}.toml", "--output", model]) == 0
    assert main(["report", "varying_slope"]) == 0
    assert "varying_slope/report.html" in capsys.readouterr().out
    one = page_of(tmp_path / "varying_slope" / "report.html")
    assert "def varying_slope(federation" in one.text and "effects" in one.ids
    study, _ = read_run(tmp_path / "varying_slope")
    summary = pd.read_csv(tmp_path / "varying_slope" / "summary.csv", index_col="variable")
    for found in study.globals:
        assert found.mean == pytest.approx(summary.loc[found.label, "mean"], rel=1e-5)
        assert found.interval[0] == pytest.approx(summary.loc[found.label, "hdi_3%"], rel=1e-5)
    assert study.rows == 220 and study.clients == 11
    rows = data_fingerprint(datasets.grunfeld())
    assert study.hashes == hashes(source_of(models.varying_slope), rows)
    assert main(["report", "varying_slope", "varying_intercept", "--output", "both.html"]) == 0
    both = page_of(tmp_path / "both.html")
    assert "Expected log predictive density" in both.text and "comparison" in both.ids
    assert both.text.count("✓ in this file") > one.text.count("✓ in this file")
    capsys.readouterr()
    for arguments, said in (
        (["report", "."], "has no posterior.nc or globals.nc"),
        (["report", "varying_slope", "varying_slope"], "two runs have the same name"),
    ):
        assert main(arguments) == 2
        assert said in capsys.readouterr().err
