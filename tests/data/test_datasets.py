import sys

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from bayesfed import datasets, models
from bayesfed.data.federation import Federation


@pytest.fixture(autouse=True)
def float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def raw():
    """Return the tables as statsmodels ships them."""
    from statsmodels import datasets as shipped

    return lambda name: getattr(shipped, name).load_pandas().data


def test_eight_schools_are_those_of_the_paper():
    federation = datasets.eight_schools()
    assert federation.names == tuple("ABCDEFGH")
    assert federation.client_dim == "school"
    y, sigma = federation["y"], federation["sigma"]
    # BDA3, section 5.5: the pooled estimate is 7.7, its standard error 4.1
    weights = sigma**-2
    assert float((weights * y).sum() / weights.sum()) == pytest.approx(7.7, abs=0.05)
    assert float(weights.sum().rsqrt()) == pytest.approx(4.1, abs=0.05)


def test_grunfeld_is_the_shipped_table_in_standardised_logs(raw):
    federation, table = datasets.grunfeld(), raw("grunfeld")
    assert (len(federation), federation.rows) == (11, 220)
    assert federation.client_dim == "firm"
    for i, firm in enumerate(federation.names):
        rows = table[table.firm == firm]
        mine = slice(int(federation.offsets[i]), int(federation.offsets[i + 1]))
        assert federation["year"][mine].tolist() == rows.year.tolist() == list(range(1935, 1955))
    # the docstring's constants give back the raw numbers
    order = table.set_index("firm").loc[list(federation.names)]
    for z, column, loc, scale in [
        (federation["x"][:, 0], "value", 6.073, 1.351),
        (federation["x"][:, 1], "capital", 4.821, 1.499),
        (federation["y"], "invest", 3.911, 1.530),
    ]:
        logs = np.log(order[column].to_numpy())
        np.testing.assert_allclose(loc + scale * z.numpy(), logs, atol=2e-3)
        np.testing.assert_allclose(z.numpy(), (logs - logs.mean()) / logs.std(), atol=1e-12)


def test_china_smoking_is_the_shipped_tables_person_by_person(raw):
    federation, table = datasets.china_smoking(), raw("china_smoking")
    assert federation.rows == table.to_numpy().sum() == 8419
    assert federation.client_dim == "city"
    assert federation["x"].shape == (8419, 1)
    assert federation.names[3] == "Nanjing"
    for name, (_, row) in zip(federation.names, table.iterrows(), strict=True):
        city = federation.select([name])
        for (s, smoker), (c, case) in [
            (s, c) for s in (("no", 0), ("yes", 1)) for c in (("no", 0), ("yes", 1))
        ]:
            count = ((city["x"][:, 0] == smoker) & (city["y"] == case)).sum()
            assert int(count) == row[f"smoking_{s}_cancer_{c}"]


def test_randhie_is_the_shipped_table_by_plan(raw):
    federation, table = datasets.randhie(), raw("randhie")
    assert (len(federation), federation.rows) == (6, 20190)
    assert federation.client_dim == "plan"
    assert float(federation["y"].sum()) == table.mdvis.sum() == 57752
    plans = table.groupby(["lncoins", "idp"])
    assert federation.lengths.tolist() == plans.size().tolist()
    x = table[["physlm", "disea", "hlthg", "hlthf", "hlthp"]]
    z = (x - x.mean()) / x.std(ddof=0)
    for name, (_, rows) in zip(federation.names, plans, strict=True):
        plan = federation.select([name])
        np.testing.assert_array_equal(plan["y"].numpy(), rows.mdvis.to_numpy())
        np.testing.assert_allclose(plan["x"].numpy(), z.loc[rows.index].to_numpy(), atol=1e-9)


def test_anes96_is_the_shipped_table_by_education(raw):
    federation, table = datasets.anes96(), raw("anes96")
    assert (len(federation), federation.rows) == (7, 944)
    assert federation.client_dim == "education"
    x = table[["selfLR", "age", "income"]]
    z = (x - x.mean()) / x.std(ddof=0)
    for name, (_, rows) in zip(federation.names, table.groupby("educ"), strict=True):
        level = federation.select([name])
        np.testing.assert_array_equal(level["y"].numpy(), rows.PID.to_numpy())
        np.testing.assert_allclose(level["x"].numpy(), z.loc[rows.index].to_numpy(), atol=1e-9)


def test_kidney_gives_what_was_published():
    """The reference is R's coxph(Surv(time, status) ~ age + sex, kidney), ties by Efron's method; female is sex − 1.

    T. M. Therneau and P. M. Grambsch (2000), "Modeling Survival Data", section 9.5.2, have 38 patients, 58 infections.
    """
    federation = datasets.kidney()
    assert federation.lengths.tolist() == [2] * 38
    assert int(federation["event"].sum()) == 58
    x, loc, scale = federation["x"].numpy(), (43.6974, 0.7368), (14.6444, 0.4404)
    raw = x * scale + loc
    np.testing.assert_allclose(raw, raw.round(), atol=2e-2)
    from statsmodels.duration.hazard_regression import PHReg

    found = PHReg(
        federation["time"].numpy(), raw.round(), status=federation["event"].numpy(), ties="efron"
    ).fit()
    np.testing.assert_allclose(found.params, [0.002032, -0.829314], atol=2e-6)


@pytest.mark.parametrize(
    ("model", "dataset"),
    [
        (models.OrderedLogistic(7), datasets.anes96),
        (models.weibull_survival, datasets.kidney),
        (models.Cox([0.5, 1, 5]), datasets.kidney),
        (models.eight_schools, datasets.eight_schools),
        (models.varying_intercept, datasets.grunfeld),
        (models.varying_slope, datasets.grunfeld),
        (models.hierarchical_logistic, datasets.china_smoking),
        (models.hierarchical_count, datasets.randhie),
    ],
)
def test_the_model_that_the_docstring_names_takes_the_dataset(model, dataset):
    import pyro
    from pyro import poutine

    pyro.set_rng_seed(0)
    trace = poutine.trace(model).get_trace(dataset())
    assert trace.observation_nodes in (["y"], ["time"])
    assert torch.isfinite(trace.log_prob_sum())


@pytest.mark.parametrize(
    "dataset", [datasets.grunfeld, datasets.china_smoking, datasets.randhie, datasets.anes96]
)
def test_without_statsmodels_the_error_names_the_extra(monkeypatch, dataset):
    monkeypatch.setattr("bayesfed.data.datasets.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'bayesfed\[datasets\]'"):
        dataset()


# -- digits ---------------------------------------------------------------------------------------


def test_digits_are_the_shipped_images_dealt_once():
    train, test = datasets.digits(clients=20, classes=3, seed=0)
    assert train.names == test.names == tuple(f"client {i}" for i in range(20))
    x, y = (torch.cat([part[field] for part in (train, test)]) for field in ("x", "y"))
    assert (x.shape[1:], x.dtype, y.dtype) == ((64,), torch.float64, torch.int64)
    shipped = load_digits()
    label = {tuple(image): int(k) for image, k in zip(shipped.data, shipped.target, strict=True)}
    assert len(label) == 1797  # no two images are the same
    images = [tuple(image) for image in (16 * x).tolist()]
    assert len(set(images)) == len(images)
    assert [label[image] for image in images] == y.tolist()


@pytest.mark.parametrize(("clients", "classes"), [(20, 3), (7, 10), (50, 1)])
def test_digits_gives_each_client_so_many_classes(clients, classes):
    train, test = datasets.digits(clients, classes, seed=1)
    both = [part.select([name])["y"] for name in train.names for part in (train, test)]
    for ours, held in zip(both[::2], both[1::2], strict=True):
        count = torch.cat([ours, held]).bincount(minlength=10)
        assert (count > 0).sum() == classes
        assert len(count[count > 0].unique()) == 1
        assert len(held) == (len(ours) + len(held)) // 3
    assert train.lengths.max() == 40
    assert test.lengths.max() == 20


def test_digits_is_seeded():
    first, again, other = (datasets.digits(4, seed=seed)[0]["x"] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_digits_says_what_is_wrong(monkeypatch):
    with pytest.raises(ValueError, match="classes is 11"):
        datasets.digits(classes=11)
    with pytest.raises(ValueError, match="5,000 clients are too many: client 0 has fewer than 3"):
        datasets.digits(clients=5000)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match="pip install scikit-learn"):
        datasets.digits()


# -- standardise ----------------------------------------------------------------------------------


@pytest.fixture
def three() -> Federation:
    generator = torch.Generator().manual_seed(0)
    return Federation.from_arrays(
        {
            name: {
                "x": 5 + 3 * torch.randn(n, 2, generator=generator),
                "k": torch.arange(n) + n,
                "y": torch.arange(float(n)),
            }
            for name, n in [("a", 4), ("b", 1), ("c", 7)]
        }
    )


def test_standardise_agrees_with_numpy_on_the_pooled_rows(three):
    standardised, constants = datasets.standardise(three, ["x", "k"])
    assert list(constants) == ["x", "k"]
    for field, (loc, scale) in constants.items():
        pooled = three[field].numpy()
        np.testing.assert_allclose(loc.numpy(), pooled.mean(0), rtol=1e-12)
        np.testing.assert_allclose(scale.numpy(), pooled.std(0), rtol=1e-12)
        np.testing.assert_allclose(
            standardised[field].numpy(), (pooled - pooled.mean(0)) / pooled.std(0), atol=1e-12
        )
    assert standardised["k"].dtype == torch.float64
    assert standardised["y"] is three["y"]
    assert standardised.names == three.names
    assert three["k"].dtype == torch.int64, "the federation given is left as it was"


def test_standardise_does_not_depend_on_the_order_of_the_clients(three):
    _, constants = datasets.standardise(three, ["x"])
    _, permuted = datasets.standardise(three.select(["c", "a", "b"]), ["x"])
    torch.testing.assert_close(permuted["x"], constants["x"], rtol=1e-13, atol=0)


def test_standardise_keeps_single_precision_and_computes_in_double(three):
    standardised, constants = datasets.standardise(three.to(dtype=torch.float32), ["x"])
    assert standardised["x"].dtype == torch.float32
    assert constants["x"][0].dtype == torch.float64


@pytest.mark.parametrize("entry", [0.0, 0.1, 1e200])
def test_standardise_refuses_what_has_no_standard_deviation(entry):
    clients = {"a": {"x": [[1.0, entry], [2.0, entry]]}, "b": {"x": [[3.0, entry]]}}
    with pytest.raises(ValueError, match="field 'x' cannot be standardised"):
        datasets.standardise(Federation.from_arrays(clients), ["x"])


def test_standardise_names_the_fields_there_are(three):
    with pytest.raises(KeyError, match="unknown field 'z': the federation has x, k, y"):
        datasets.standardise(three, ["z"])
