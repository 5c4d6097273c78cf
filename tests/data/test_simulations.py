"""Tests of simulated federations: their distributions and their seeds."""

import numpy as np
import pandas as pd
import pytest
import torch

import bayesfed as bf
from bayesfed import models, simulations

pytest.importorskip("pvlib")


def residuals(federation, kind):
    """Return y − mean for one kind of clients, ``(clients, rows)``, from the roots in the paper."""
    rows = federation.batch().fields
    x, y = rows["x"].squeeze(-1).double(), rows["y"].double()
    roots = torch.tensor(simulations._ROOTS[kind], dtype=torch.float64)
    mean = (1, -1)[kind] * (x[..., None] - roots).prod(-1)
    return x[kind::2], (y - mean)[kind::2]


@pytest.mark.parametrize("kind", [0, 1])
def test_polynomials_vary_around_their_mean_as_they_should(kind):
    """400 clients of one kind: variance 0.2² + 0.05² at every x, and its covariance at a distance.

    The standard error of a variance of 400 independent functions is 7 % of it.
    """
    train, _ = simulations.polynomials(clients=800, rows=40, test_rows=1)
    x, residual = residuals(train, kind)
    variance = 0.2**2 + 0.05**2
    assert float(residual[:, 0].square().mean()) == pytest.approx(variance, rel=0.21)
    assert abs(float(residual[:, 0].mean())) < 3 * (variance / 400) ** 0.5
    close = (x[:, :1] - x[:, 1:]).abs()
    products = residual[:, :1] * residual[:, 1:]
    length = (0.3, 3.0)[kind]
    expected = 0.2**2 * (-close.square() / (2 * length**2)).exp()
    assert abs(float((products - expected).mean())) < 4 * 0.2**2 / 400**0.5
    assert x.abs().max() <= 0.8


def test_polynomials_depend_on_their_seed_alone():
    one, again, other = (simulations.polynomials(clients=4, seed=s)[0] for s in (3, 3, 4))
    assert torch.equal(one["y"], again["y"]) and not torch.equal(one["y"], other["y"])
    train, test = simulations.polynomials(clients=3, rows=7, test_rows=11)
    assert train.lengths.tolist() == [7] * 3 and test.lengths.tolist() == [11] * 3


@pytest.fixture(scope="module")
def houses():
    return {
        facing: simulations.photovoltaics(facing, clients=12, rows=150)
        for facing in ("east-west", "south")
    }


def test_houses_are_standardised_by_their_training_rows(houses):
    train, test = houses["south"]
    y = train.batch().fields["y"].double()
    assert y.mean(1).abs().max() < 1e-5 and (y.std(1, correction=0) - 1).abs().max() < 1e-5
    x = train.batch().fields["x"].double()
    assert x.shape == (12, 150, 15) and x.mean(1).abs().max() < 1e-5
    assert test.batch().fields["y"].mean(1).abs().max() < 1  # test days lie between training days
    assert torch.isfinite(test["x"]).all()


def test_houses_that_face_both_ways_differ_more(houses):
    """The mean correlation between houses, and two groups that peak before and after noon."""
    correlation = {f: torch.corrcoef(t.batch().fields["y"]) for f, (t, _) in houses.items()}
    apart = ~torch.eye(12, dtype=torch.bool)
    assert correlation["east-west"][apart].mean() < correlation["south"][apart].mean()
    train, _ = houses["east-west"]
    fields = train.batch().fields
    sine = fields["x"][
        ..., simulations.FEATURES.index("sine of the hour")
    ]  # decreases during the day
    peak = (sine * fields["y"]).mean(1)
    assert (peak > 0.3).any() and (peak < -0.3).any()


def test_the_first_lag_is_the_output_an_hour_before(houses):
    train, _ = houses["south"]
    first = train.select(["house 0"])
    lag, output = first["x"][:, 0].double(), first["y"].double()
    slope = torch.corrcoef(torch.stack([lag[1:], output[:-1]]))[0, 1]
    assert slope > 0.9  # not 1: the hour before the first of a day is no row


def test_a_file_of_pvgis_can_be_used(tmp_path):
    """The file has a year in PVGIS' format: clear days on which the sun rises at six."""
    times = pd.date_range("2018-01-01", periods=8760, freq="h")
    height = np.sin((times.hour.to_numpy() - 6) / 12 * np.pi).clip(0)
    wave = 0.6 + 0.4 * np.sin(np.arange(8760) / 37)
    head = [
        "Latitude (decimal degrees): 45.000",
        "Longitude (decimal degrees): 8.000",
        "Elevation (m): 250.0",
        "Irradiance Time Offset (h): 0.1761",
        "month,year",
        *(f"{month},2018" for month in range(1, 13)),
        "time(UTC),T2m,RH,G(h),Gb(n),Gd(h),IR(h),WS10m,WD10m,SP",
    ]
    rows = [
        f"{time:%Y%m%d:%H%M},{10 + 5 * h:.2f},60.0,"
        f"{700 * h * w:.1f},{800 * h * w:.1f},{100 * h:.1f},300.0,{1 + w:.2f},90.0,99000.0"
        for time, h, w in zip(times, height, wave, strict=True)
    ]
    tail = ["", "T2m: 2-m air temperature (degree Celsius)", "RH: relative humidity (%)"]
    tail += ["G(h): a", "Gb(n): b", "Gd(h): c", "IR(h): d", "WS10m: e", "WD10m: f", "SP: g", ""]
    tail += ["PVGIS (c) European Union, 2001-2025", ""]
    path = tmp_path / "pvgis.csv"
    path.write_text("\n".join([*head, *rows, *tail]))
    train, test = simulations.photovoltaics(clients=2, rows=100, weather=path)
    assert train.lengths.tolist() == [100, 100] and test.rows > 0
    assert torch.isfinite(train["x"]).all()


def test_invalid_arguments_are_refused():
    with pytest.raises(ValueError, match="facing is 'north'"):
        simulations.photovoltaics("north")
    with pytest.raises(ValueError, match="there are .* bright hours"):
        simulations.photovoltaics(clients=1, rows=5000)


def test_pac_pfl_learns_polynomials():
    """For new clients, conditioning under the learnt prior predicts better than under a draw from the hyper-prior."""
    train, test = simulations.polynomials(clients=16, test_rows=50)
    old, new = train.hold_out(train.names[8:])
    torch.manual_seed(0)
    tanh = torch.nn.Tanh
    model = models.GaussianProcess(
        models.mlp(1, 8, 8, 1, activation=tanh), features=models.mlp(1, 8, 2, activation=tanh)
    )
    rows = test.select(new.names)
    density = {}
    for rounds in (1, 150):
        posterior = bf.fit(model, old, bf.PACPFL(particles=2, lr=0.03), rounds=rounds)
        density[rounds] = float(
            posterior.personalize(new).predictive(rows).log_prob(rows["y"]).mean()
        )
    assert density[150] > density[1] + 0.3
