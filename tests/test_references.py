"""The summaries of NUTS that tables compare with belong to their programs, and agree with integrals on grids."""

import importlib
import json
from pathlib import Path

import pytest
import torch

import bayesfed as bf
from tests.output.test_correction import of_grid

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
FILES = sorted((EXPERIMENTS / "references").glob("*.json"))
CENTRED = "posteriordb_eight_schools-eight_schools_centered"


@pytest.fixture
def pooled_nuts(monkeypatch):
    """The module, whose chains are not run."""
    monkeypatch.syspath_prepend(EXPERIMENTS)
    module = importlib.import_module("pooled_nuts")

    def no_chains(*_):
        raise AssertionError("NUTS was run")

    monkeypatch.setattr(module, "_chains", no_chains)
    return module


def test_that_each_entry_has_every_number():
    assert len(FILES) > 60
    for path in FILES:
        for site, parts in json.loads(path.read_text(encoding="utf-8"))["variables"].items():
            sizes = {name: len(part) for name, part in parts.items() if name != "quantiles"}
            assert len(set(sizes.values())) == 1, (path.name, site)
            assert sizes.keys() == {"mean", "sd", "kurtosis", "size"}
            low, *_, high = parts["quantiles"]
            assert all(a <= b for a, b in zip(low, high, strict=True))


def test_eight_schools_against_an_integral_on_a_grid(pooled_nuts):
    """Within four Monte Carlo errors of 15,000 draws; the standard deviation of τ has an error of 1.3 %."""
    program, data, _ = importlib.import_module("first_tries.posteriordb").POSTERIORS[CENTRED[12:]]
    found = pooled_nuts.nuts(CENTRED, program, data())
    for name, (mean, sd) in of_grid().items():
        assert abs(found[name].mean[0] - mean) < 0.033 * sd
        assert abs(found[name].sd[0] / sd - 1) < 0.05


def test_variance_components_of_six_clients_against_an_integral_on_a_grid(pooled_nuts):
    """NUTS' draws of the spread between the batches, whose tail is long, have 0.97 of its standard deviation."""
    program, data = importlib.import_module("first_tries").PROGRAMS["dyes"]
    federation = data()
    y = federation["y"].double().reshape(6, 5)
    between = torch.linspace(0.0005, 6.0, 3000, dtype=torch.float64)[:, None]
    within = torch.linspace(0.2, 1.6, 700, dtype=torch.float64)[None]
    means, variance = y.mean(1), between**2 + within**2 / 5  # of a client's mean, given mu
    precision = 1 / 25 + 6 / variance
    centre = means.sum() / variance / precision
    squares = (means**2).sum() / variance - centre**2 * precision
    rest = (y - means[:, None]).square().sum()
    log_p = -(6 * variance.log() + precision.log() + squares + between**2 + within**2) / 2
    log_p = log_p - 24 * within.log() - rest / (2 * within**2)
    p = (log_p - log_p.max()).exp()
    p = p / p.sum()
    draws = bf.fit(program, federation, seed=1, progress=False).sample(20_000)
    second = {"mu": 1 / precision + centre**2, "between": between**2, "within": within**2}
    for name, first in (("mu", centre), ("between", between), ("within", within)):
        mean = float((p * first).sum())
        sd = (float((p * second[name]).sum()) - mean**2) ** 0.5
        found = draws[name].double()
        assert abs(float(found.mean()) - mean) < 0.05 * sd, name
        assert abs(float(found.std()) / sd - 1) < 0.07, name
        if name == "between":
            assert abs(sd - 0.248) < 0.0005
            reference = pooled_nuts.nuts("first_try_dyes", program, federation)[name]
            assert abs(reference.sd[0] / sd - 1) < 0.04
            assert abs(reference.sd[0] - 0.2405) < 0.0005


def test_other_data_need_other_chains(pooled_nuts, capsys):
    program, data, _ = importlib.import_module("first_tries.posteriordb").POSTERIORS[CENTRED[12:]]
    with pytest.raises(AssertionError, match="NUTS was run"):
        pooled_nuts.nuts(CENTRED, program, data().select(data().names[:7]))
    assert "have changed" in capsys.readouterr().out
