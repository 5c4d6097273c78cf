"""Facts beside computations by pandas and by hand."""

import json

import numpy as np
import pandas as pd
import pytest
import xarray as xr

from bayesfed.report.collect import make_study
from bayesfed.report.logs import read_log

ATTRS = {"algorithm": "SFVI", "seed": 0, "rounds": 3}
GIVEN = {
    "name": "n",
    "model": "m",
    "program": "",
    "settings": "",
    "clients": 2,
    "rows": 5,
    "sensitivity": {},
}


def groups(repeats=1):
    rng = np.random.default_rng(0)
    mu = np.repeat(rng.normal(size=400 // repeats), repeats)[None]
    draws = xr.Dataset(
        {
            "mu": (("chain", "draw"), mu),
            "b": (("chain", "draw", "client", "b_dim_0"), rng.normal(size=(1, 400, 2, 2))),
            "row": (("chain", "draw", "observation"), rng.normal(size=(1, 400, 5))),
        },
        coords={"client": ["one", "two"], "b_dim_0": ["x", "z"]},
        attrs=ATTRS,
    )
    owner = ["two", "one", "two", "two", "one"]  # the order of the rows does not matter
    y = xr.DataArray(
        [1.0, 2.0, 4.0, 8.0, 5.0],
        dims="observation",
        coords={"observation_client": ("observation", owner)},
    )
    predicted = xr.Dataset({"y": (("chain", "draw", "observation"), rng.normal(3, 2, (1, 400, 5)))})
    return {
        "posterior": draws,
        "posterior_predictive": predicted,
        "prior_predictive": predicted,
        "observed_data": xr.Dataset({"y": y}),
        "prior": xr.Dataset({"mu": (("chain", "draw"), rng.normal(size=(1, 400)))}),
    }


def test_variables_of_the_server_and_of_the_clients():
    given = groups()
    found = make_study(given, **GIVEN)
    (mu,) = found.globals  # not that of the rows
    values = given["posterior"]["mu"].values.ravel()
    assert mu.mean == pytest.approx(values.mean()) and mu.sd == pytest.approx(values.std(ddof=1))
    assert mu.mcse == pytest.approx(mu.sd / 20)
    inside = np.mean((values >= mu.interval[0]) & (values <= mu.interval[1]))
    assert 0.93 < inside < 0.95
    assert mu.density[0].sum() == pytest.approx(1.0, abs=0.02)
    assert [one.label for one in found.locals] == ["b[x]", "b[z]"]
    expected = given["posterior"]["b"].sel(b_dim_0="z").mean(("chain", "draw"))
    assert np.allclose(found.locals[1].mean, expected)
    assert found.locals[1].clients == ["one", "two"]


def test_draws_that_are_repeated_count_once():
    plain, repeated = (make_study(groups(n), **GIVEN) for n in (1, 4))
    assert plain.effective == pytest.approx(400)
    assert 75 < repeated.effective < 105
    assert repeated.globals[0].mcse > 1.9 * repeated.globals[0].sd / 20


def test_checks_are_of_each_clients_own_rows():
    given = groups()
    found = make_study(given, **GIVEN)
    mean = next(one for one in found.checks if one.label == "mean of y")
    y = given["observed_data"]["y"]
    table = pd.DataFrame({"client": y.observation_client.values, "y": y.values})
    assert mean.clients == ["two", "one"]
    assert np.allclose(mean.observed, table.groupby("client")["y"].mean()[mean.clients])
    drawn = given["posterior_predictive"]["y"].values[0][:, [1, 4]].mean(1)
    assert mean.mean[1] == pytest.approx(drawn.mean())
    assert mean.tail[1] == pytest.approx((drawn > 3.5).mean())
    assert [one.label for one in found.checks] == ["mean of y"]  # "one" has two rows
    whole, sd = found.prior_checks
    assert whole.observed == pytest.approx([4.0]) and sd.observed == pytest.approx(
        [np.std(y.values)]
    )


def test_a_log_is_summed_up_by_kind_of_message(tmp_path):
    sent = [
        {"kind": "schema", "institution": "north"},
        {"kind": "reply", "run": "a"},
        {"kind": "reply", "run": "a"},
        {"kind": "reply", "run": "b"},
    ]
    lines = [
        {"time": "t", "what": "sent", "bytes": 10, "message": m, "tensors": {"total/x": [2, 3]}}
        for m in sent
    ]
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(map(json.dumps, [*lines, {"time": "t", "what": "failed"}])))
    found = {one.kind: one for one in read_log(path, "a")}
    assert (found["reply"].count, found["reply"].numbers, found["reply"].size) == (2, 12, 20)
    assert found["schema"].count == 1
    assert {one.kind: one.count for one in read_log(path)}["reply"] == 3
    path.write_text("no log")
    with pytest.raises(ValueError, match="line 1 is not one of a node's"):
        read_log(path)
