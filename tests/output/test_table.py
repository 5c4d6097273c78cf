"""Draws as a table: its layout, and what R's posterior makes of it."""

from __future__ import annotations

import shutil
import subprocess
import sys

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch

import bayesfed as bf
from bayesfed import datasets, models


def two_numbers(federation):
    beta = pyro.sample("beta", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    _scale = pyro.sample("_scale", dist.HalfNormal(1.0))
    pyro.deterministic("total", beta.sum(-1))
    with federation.clients():
        b = pyro.sample("b", dist.Normal(beta, 1.0).to_event(1))
        pyro.deterministic("first", b[..., 0])
        with federation.observations() as obs:
            mean = pyro.deterministic("mean", b[..., 0] + b[..., 1] * obs["x"])
            pyro.sample("y", dist.Normal(mean, 1.0 + _scale), obs=obs.get("y"))


@pytest.fixture(scope="module")
def posterior():
    rows = {"x": [0.0, 1.0, 2.0], "y": [1.0, 2.0, 2.5]}
    data = bf.Federation.from_arrays({"north": rows, "St. Mary's, [2]": rows})
    return bf.fit(two_numbers, data, rounds=3)


def test_names_and_draws(posterior):
    frame, drawn = posterior.to_frame(50), posterior.sample(50)
    other = "St. Mary's_ _2_"
    assert frame.columns.tolist() == [
        *(".chain", ".iteration", ".draw", "beta[1]", "beta[2]"),
        *("b[north,1]", "b[north,2]", f"b[{other},1]", f"b[{other},2]"),
        *("total", "first[north]", f"first[{other}]"),
    ]
    assert frame[".chain"].unique().tolist() == [1]
    assert frame[".draw"].tolist() == frame[".iteration"].tolist() == list(range(1, 51))
    np.testing.assert_array_equal(frame["b[north,2]"], drawn["b"][:, 0, 1])
    np.testing.assert_allclose(frame["total"], frame["beta[1]"] + frame["beta[2]"], rtol=1e-5)
    np.testing.assert_allclose(frame[f"first[{other}]"], frame[f"b[{other},1]"])


def test_levels_of_a_formula_are_named():
    rows = pd.DataFrame({"y": np.arange(8.0), "kind": list("abcabcab"), "site": list("uvuvuvuv")})
    model = bf.formula("y ~ kind + (1 | site)", rows)
    frame = bf.fit(model, model.federation, rounds=2).to_frame(10)
    assert {"Intercept", "kind[b]", "kind[c]", "1|site[u]"} <= set(frame)


def test_chains_come_one_after_the_other():
    posterior = bf.fit(models.eight_schools, datasets.eight_schools()).with_chains()
    chains = posterior.correction.chains
    frame, drawn = posterior.to_frame(100 * chains), posterior.sample(100 * chains)["mu"]
    assert frame[".chain"].value_counts().to_dict() == dict.fromkeys(range(1, chains + 1), 100)
    assert (frame[".draw"] == (frame[".chain"] - 1) * 100 + frame[".iteration"]).all()
    second = frame.loc[frame[".chain"] == 2, "mu"]
    np.testing.assert_array_equal(second, drawn[1::chains])
    idata = posterior.to_arviz(100 * chains)
    np.testing.assert_array_equal(second, idata["posterior"]["mu"][1])


def test_parquet_keeps_names_and_numbers(posterior, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    frame = posterior.to_frame(20)
    frame.to_parquet(tmp_path / "draws.parquet")
    found = parquet.read_table(tmp_path / "draws.parquet")
    assert found.column_names == frame.columns.tolist()
    assert {str(found.schema.field(name).type) for name in (".chain", ".draw")} == {"int64"}
    for name in found.column_names:
        np.testing.assert_array_equal(found[name].to_numpy(), frame[name])


def test_parquet_without_pyarrow_is_refused_by_name(posterior, tmp_path, monkeypatch):
    for package in ("pyarrow", "fastparquet"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match="pyarrow is required for parquet support"):
        posterior.to_frame(5).to_parquet(tmp_path / "draws.parquet")
    assert not (tmp_path / "draws.parquet").exists()


def has_r() -> bool:
    rscript = shutil.which("Rscript")
    look = [rscript, "-e", 'quit(status = !requireNamespace("posterior", quietly = TRUE))']
    return rscript is not None and subprocess.run(look, check=False).returncode == 0


@pytest.mark.skipif(shutil.which("Rscript") is None, reason="R is not installed")
def test_posterior_of_r_reads_it(posterior, tmp_path):
    if not has_r():
        pytest.skip("R's posterior is not installed")
    frame = posterior.to_frame(200)
    frame.to_csv(tmp_path / "draws.csv", index=False)
    code = f"""
        library(posterior)
        draws <- as_draws_df(read.csv("{tmp_path / "draws.csv"}", check.names = FALSE))
        cat(ndraws(draws), nchains(draws), nvariables(draws), "\\n")
        s <- summarise_draws(draws, mean, sd)
        s[-1] <- lapply(s[-1], as.numeric)
        write.csv(s, "{tmp_path / "summary.csv"}", row.names = FALSE)
        r <- as_draws_rvars(draws)
        cat(dim(r$b), dimnames(r$b)[[1]][1], "\\n")
    """
    (tmp_path / "read.R").write_text(code)
    run = ["Rscript", tmp_path / "read.R"]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    size, shape = done.stdout.splitlines()[-2:]
    assert size.split() == ["200", "1", "9"]
    assert shape.split()[:3] == ["2", "2", "north"]
    summary = pd.read_csv(tmp_path / "summary.csv", index_col="variable")
    for name in ("beta[2]", "b[north,1]", "total"):
        assert summary.loc[name, "mean"] == pytest.approx(frame[name].mean(), rel=1e-4)
        assert summary.loc[name, "sd"] == pytest.approx(frame[name].std(), rel=1e-4)
