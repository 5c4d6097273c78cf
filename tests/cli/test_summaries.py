"""The summary and the forest plot of a run, and rows that are held out."""

import contextlib
from pathlib import Path

import arviz as az
import numpy as np
import pandas as pd
import pyro.distributions as dist
import torch

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.cli import app as cli
from bayesfed.cli import forest, report

# -- the report -----------------------------------------------------------------------------------


def test_the_population_mean_is_found_in_the_model():
    def find(model, federation):
        return forest.population_means(bf.fit(model, federation, bf.SFVI(local_steps=1), rounds=1))

    assert find(models.eight_schools, datasets.eight_schools()) == {"theta": "mu"}
    data = {n: {"x": [[0.5, 1.0]], "y": [1.0]} for n in "ab"}
    federation = bf.Federation.from_arrays(data)
    found = find(models.varying_slope, federation)
    assert found == {"alpha": "mu_alpha", "beta": "mu_beta"}
    assert find(models.varying_intercept, federation) == {"alpha": "mu"}

    def elsewhere(federation):  # mu is a mean, but not that of theta
        import pyro

        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with federation.clients():
            theta = pyro.sample("theta", dist.Normal(0.0, 1.0))
            scale = pyro.sample("scale", dist.LogNormal(mu, 1.0))
            with federation.observations() as obs:
                pyro.sample("y", dist.Normal(mu + theta, scale), obs=obs.get("y"))

    assert find(elsewhere, federation) == {}


def test_many_clients_and_panels_can_be_drawn(tmp_path):
    import xarray as xr

    generator = np.random.default_rng(0)
    draws = xr.Dataset(
        {
            "w": (("chain", "draw", "client", "w_dim_0"), generator.normal(size=(2, 20, 80, 15))),
            "m": (("chain", "draw"), generator.normal(size=(2, 20))),
        },
        coords={"client": [f"c{i}" for i in range(80)]},
    )
    forest.plot_forest(tmp_path / "a.png", draws, {}, variables=["w"])
    forest.plot_forest(tmp_path / "b.png", draws.drop_vars("m"), {}, variables=["w"], title="$x")
    forest.plot_forest(tmp_path / "c.png", draws, {}, variables=[])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.png", "b.png", "c.png"]


def test_each_global_variable_has_an_axis_of_its_own(tmp_path, monkeypatch):
    """An effect of 0.02 ± 0.001 beside an intercept of 100."""
    import xarray as xr

    figures, generator = [], np.random.default_rng(0)
    monkeypatch.setattr(forest.Figure, "savefig", lambda self, *_, **__: figures.append(self))
    monkeypatch.setattr(forest, "atomically", lambda path: contextlib.nullcontext(path))
    sizes = {"Intercept": (100.0, 5.0), "age": (0.02, 0.001)}
    draws = {n: (("chain", "draw"), generator.normal(*s, (1, 50))) for n, s in sizes.items()}
    clients = {"a": (("chain", "draw", "client"), generator.normal(size=(1, 50, 2)))}
    posterior = xr.Dataset(draws | clients, coords={"client": ["c", "d"]})
    forest.plot_forest(tmp_path / "a.png", posterior, {}, variables=[])
    widths = [np.ptp(axis.get_xlim()) for axis in figures[0].axes]
    assert widths[0] > 10 and widths[1] < 0.01


def test_the_digits_are_those_for_training():
    from bayesfed.cli.choices import load_clients
    from bayesfed.cli.experiment import DataSection

    found = load_clients(DataSection(dataset="digits"), None, Path())
    assert torch.equal(found["x"], datasets.digits()[0]["x"])


def test_numbers_have_the_decimals_their_sd_needs():
    assert report.format_row([0.1, float("nan")], sd=float("nan")) == ["0.100", "nan"]
    assert report.format_row([2.0], sd=0.0) == ["2.000"]


def test_a_long_summary_is_cut(schools, capsys):
    from rich.console import Console

    table = pd.DataFrame(
        torch.rand(50, 4).numpy(),
        columns=["mean", "sd", "hdi_3%", "hdi_97%"],
        index=[f"v{i}" for i in range(50)],
    )
    report.print_summary(table, Console())
    assert "... and 10 more in summary.csv" in capsys.readouterr().out


def test_of_no_variables_there_is_an_empty_summary(capsys):
    """A server's of a network: it has no globals, and the clients' are at their sites."""
    from rich.console import Console
    from xarray import Dataset

    table = report.summary(Dataset())
    report.print_summary(table, Console())
    assert table.to_csv(index_label="variable") == "variable,mean,sd,hdi_3%,hdi_97%\n"


def test_points_stop_on_rows_that_are_held_out(tmp_path, capsys):
    """The others are trained on."""
    file = tmp_path / "smoking.toml"
    file.write_text(
        'model.name = "hierarchical_logistic"\ndata.dataset = "china_smoking"\n'
        'algorithm.name = "FedAvg"\nalgorithm.lr = 0.3\nalgorithm.personal_steps = 5\n'
        "schedule.held_out = 0.2\nschedule.batch_size = 100\noutput.num_samples = 4\n"
    )
    assert cli.main(["run", str(file), "--output", str(tmp_path / "out")]) == 0
    assert "at most 500 rounds" in capsys.readouterr().out
    assert len(pd.read_csv(tmp_path / "out" / "history.csv")) < 500
    rows = datasets.china_smoking().split(test=0.2, seed=0)[0].rows
    kept = az.from_netcdf(tmp_path / "out" / "posterior.nc")
    assert kept.observed_data["y"].size == rows
