"""Tests of formulas against formulae's matrices of the pooled rows, scipy's densities, and a fit in other units."""

import pickle

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch
from formulae import design_matrices
from pyro import poutine
from scipy import stats

import bayesfed as bf
from bayesfed.formulas.agreement import Agreement, add_totals


def traced(model):
    """Draw from the program on the pooled rows: values by name, without the dimensions of plates."""
    with pyro.poutine.seed(rng_seed=1):
        nodes = poutine.trace(model).get_trace(model.federation).nodes
    return nodes


def flat(model, value):
    """Reshape ``(N, B)`` to rows."""
    mask = model.federation.batch().mask
    return value.expand(mask.shape)[mask].double().numpy()


def expected(text, frame, nodes, factors):
    """Compute the linear predictor by formulae's matrices, from coefficients in the data's units."""
    vector = {"c": lambda *values: np.array(values)}
    design = design_matrices(text.replace("||", "|"), frame, extra_namespace=vector)
    common = design.common.as_dataframe()
    total = np.zeros(len(frame))
    for label in common:
        if label.startswith("offset("):
            total += common[label]
        else:
            total += common[label].to_numpy(float) * float(nodes[label]["value"])
    for term in design.group.terms.values() if design.group else ():
        matrix = np.asarray(design.group[term.name].todense())
        labels = ["1"] if term.kind == "intercept" else term.expr.labels
        effects = [nodes[f"{label}|{term.factor.name}"]["value"] for label in labels]
        order = factors[term.factor.name]
        values = np.stack([e.reshape(-1).double().numpy()[order] for e in effects], -1)
        total += matrix @ values.reshape(-1)
    return total


@pytest.mark.parametrize(
    "text",
    [
        "y ~ x + z",
        "y ~ x*kind + (1 | hospital)",
        "y ~ 0 + kind + x:kind + (1 + x | hospital)",
        "y ~ scale(x) + center(z):kind + I(x**2) + male + (1 + x + z || hospital)",
        "y ~ np.log(x + 20) + C(item) + (0 + kind | hospital)",
        "y ~ x + (1 + z | hospital) + (1 + x | item)",
        "y ~ x + (1 | hospital/ward)",
        "y ~ T(kind, ref='b') + (1 + x | hospital:ward) + (x || item)",
        "y ~ C(kind, Sum) + offset(z) + (1 | hospital) + (0 + z | hospital)",
        "y ~ x + (kind | hospital)",
        "y ~ C(male)*x +\n x:z + (1 | hospital)",
        "y ~ poly(x, 2)*z + poly(z, 3, raw=True) + (1 | hospital)",
        "y ~ bs(x, knots=c(4, 6), lower_bound=-5, upper_bound=15) + (1 | hospital)",
    ],
)
def test_the_predictor_is_that_of_formulae_on_the_pooled_rows(frame, text):
    """Levels, codes, centring, scaling and the conversion to the data's units are tested at once; C lacks two kinds.

    Float32 keeps seven digits of numbers about 100.
    """
    model = bf.formula(text, frame, client="hospital")
    nodes = traced(model)
    hospitals = list(model.federation.names)
    by_name = [hospitals.index(name) for name in sorted(hospitals)]
    wards = [2 * i + k for i in by_name for k in range(2)]
    factors = {"hospital": by_name, "hospital:ward": wards, "item": slice(None)}
    pooled = pd.concat([frame[frame.hospital == name] for name in hospitals])
    total = expected(text, pooled, nodes, factors)
    found = flat(model, nodes["y"]["fn"].loc)
    np.testing.assert_allclose(found, total, rtol=1e-4, atol=2e-3)


def test_the_default_priors_are_those_of_rstanarm_in_the_datas_units(frame):
    """log p of the standardised sample sites, with the change of variables, equals Normals in the data's units."""
    model = bf.formula("y ~ x + (1 + x || hospital)", frame)
    nodes = traced(model)
    sd_x, sd_y = frame.x.std(ddof=0), frame.y.std(ddof=0)
    value = {name: float(nodes[name]["value"]) for name in ("Intercept", "x", "sigma")}
    at_mean = value["Intercept"] + value["x"] * frame.x.mean()

    def log_prob(name):
        return float(nodes[name]["fn"].log_prob(nodes[name]["value"]).sum())

    change = {"_intercept": sd_y, "_beta": sd_y / sd_x, "_sigma": sd_y}
    priors = {
        "_intercept": stats.norm.logpdf(at_mean, frame.y.mean(), 2.5 * sd_y),
        "_beta": stats.norm.logpdf(value["x"], 0.0, 2.5 * sd_y / sd_x),
        "_sigma": np.log(2.0) + stats.t.logpdf(value["sigma"], 4, 0.0, sd_y),
    }
    for name, prior in priors.items():
        assert log_prob(name) - np.log(change[name]) == pytest.approx(prior, abs=1e-4)
    scales = [float(nodes[f"{name}|hospital_sigma"]["value"]) for name in ("1", "x")]
    units = np.array([sd_y, sd_y / sd_x])
    written = stats.halfnorm.logpdf(scales, scale=2.5 * units).sum()
    assert log_prob("_tau|hospital") - np.log(units).sum() == pytest.approx(written, abs=1e-4)


def test_correlated_effects_have_the_covariance_that_is_named(frame):
    """20,000 draws of u given τ and ρ: their covariance in the data's units, to three Monte Carlo errors."""
    model = bf.formula("y ~ x + (1 + x | hospital)", frame)
    nodes = traced(model)
    mean, (sd_x, sd_y) = frame.x.mean(), (frame[name].std(ddof=0) for name in ("x", "y"))
    torch.manual_seed(0)
    u = nodes["_u|hospital"]["fn"].sample((20000,))[:, 0, 0].double().numpy()
    u = u @ (sd_y * np.array([[1.0, -mean / sd_x], [0.0, 1.0 / sd_x]])).T
    sds = [float(nodes[f"{name}|hospital_sigma"]["value"]) for name in ("1", "x")]
    np.testing.assert_allclose(u.std(0), sds, rtol=0.015)
    found = float(nodes["cor(1, x)|hospital"]["value"])
    assert np.corrcoef(u.T)[0, 1] == pytest.approx(found, abs=0.021)


def test_three_correlated_effects(frame):
    model = bf.formula("y ~ x + z + (1 + x + z | hospital)", frame)
    nodes = traced(model)
    names = {f"cor({pair})|hospital" for pair in ("1, x", "1, z", "x, z")}
    assert names <= set(nodes)
    assert all(-1.0 <= float(nodes[name]["value"]) <= 1.0 for name in names)


def test_a_fit_in_other_units_is_the_same_fit(frame):
    """In dollars or thousands, grams or kilograms, coefficients differ by the factor, up to float32 round-off.

    The surrogate of a correction, a least-squares fit, enlarges it to a thousandth of a standard deviation. By that one
    draw of θ may be chosen in place of the next; with many seeds also a centre of a proposal, and other draws with it.
    """
    rows = frame.assign(dollars=1000.0 * frame.y, grams=1000.0 * frame.x)
    draws = []
    for text in ("y ~ x + (1 + x | hospital)", "dollars ~ grams + (1 + grams | hospital)"):
        model = bf.formula(text, rows)
        draws.append(bf.fit(model, model.federation, rounds=3, seed=4).derived(num_samples=50))
    one, other = draws
    same = {"x", "x|hospital", "x|hospital_sigma", "cor(1, x)|hospital"}
    chosen = torch.zeros(50, dtype=torch.bool)
    for name, value in one.items():
        there = other[name.replace("x", "grams")] / (1.0 if name in same else 1000.0)
        close = torch.isclose(there, value, rtol=3e-3, atol=3e-3)
        chosen |= ~close.reshape(50, -1).all(1)
    assert int(chosen.sum()) <= 2


def test_the_origin_of_a_predictor_does_not_matter(frame):
    """With x + 1000 slopes are the same, of correlated effects too; float32 keeps four digits of x then.

    Without importance weights, by which close draws of θ may be chosen in place of each other.
    """
    draws = []
    for rows in (frame, frame.assign(x=frame.x + 1000.0)):
        model = bf.formula("y ~ x + (1 + x | hospital)", rows)
        fit = bf.fit(model, model.federation, bf.SFVI(corrected=False), rounds=3)
        draws.append(fit.derived(num_samples=50))
    for name in ("x", "x|hospital", "x|hospital_sigma", "sigma"):
        torch.testing.assert_close(draws[1][name], draws[0][name], rtol=0.01, atol=0.01)


def test_the_printed_program_is_run(frame):
    model = bf.formula("count ~ x*kind + (1 + x | hospital)", frame, family="negative_binomial")
    namespace = {}
    exec(str(model), namespace)
    copied = poutine.trace(poutine.seed(namespace["model"], 1)).get_trace(model.federation)
    own = poutine.trace(poutine.seed(model, 1)).get_trace(model.federation)
    assert float(copied.log_prob_sum()) == float(own.log_prob_sum())


def test_variables_with_a_users_prior_are_in_the_datas_units(frame):
    priors = {
        "Intercept": dist.StudentT(3.0, 100.0, 10.0),
        "kind": dist.Laplace(0.0, 2.0),
        "sigma": dist.HalfNormal(5.0),
        "1|hospital_sigma": dist.HalfCauchy(1.0),
    }
    text = "y ~ x + kind + (1 + x | hospital)"
    model = bf.formula(text, frame, priors=priors)
    nodes = traced(model)
    assert nodes["_prior|kind[c]"]["fn"].scale == 2.0
    assert nodes["_intercept"]["fn"].loc == 100.0
    assert nodes["_prior|sigma"]["fn"].scale == 5.0
    assert nodes["_prior|1|hospital_sigma"]["fn"].scale == 1.0
    pooled = pd.concat([frame[frame.hospital == name] for name in model.federation.names])
    slope = bf.formula(text, frame, priors={"x|hospital_sigma": dist.HalfNormal(2.0)})
    assert traced(slope)["_prior|x|hospital_sigma"]["fn"].scale == 2.0
    order = [model.federation.names.index(name) for name in sorted(model.federation.names)]
    total = expected(text, pooled, nodes, {"hospital": order})
    np.testing.assert_allclose(flat(model, nodes["y"]["fn"].loc), total, rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize(
    "priors",
    [
        {},
        {
            "x": dist.Normal(0.0, 1.0),
            "sigma": dist.HalfNormal(5.0),
            "1|hospital_sigma": dist.HalfCauchy(1.0),
        },
    ],
    ids=["default", "own"],
)
def test_results_have_the_same_names_under_every_prior(frame, priors):
    """A loop over priors reads the same quantities from each fit."""
    model = bf.formula("y ~ x + (1 + x | hospital)", frame, priors=priors)
    posterior = bf.fit(model, model.federation, bf.SFVI(corrected=False), rounds=1)
    assert set(posterior.derived(num_samples=2)) == {
        *("Intercept", "x", "sigma", "1|hospital", "x|hospital"),
        *("1|hospital_sigma", "x|hospital_sigma", "cor(1, x)|hospital"),
    }
    assert all(name.startswith("_") for name in posterior.sample(2))


def test_parameters_of_a_family_are_derived_quantities_on_every_scale(frame):
    model = bf.formula("count ~ x + (1 | hospital)", frame, family="negative_binomial")
    assert "alpha" in bf.fit(model, model.federation, rounds=1).derived(num_samples=2)


def test_frames_may_keep_the_column_of_their_client(frame):
    frames = {name: rows for name, rows in frame.groupby("hospital", sort=False)}
    text = "y ~ x + (1 | hospital)"
    assert bf.formula(text, frames).source == bf.formula(text, frame).source


def test_frames_of_the_clients_own_give_the_same_as_one(frame):
    sites = {
        name: rows.drop(columns="hospital") for name, rows in frame.groupby("hospital", sort=False)
    }
    text = "y ~ scale(x) + kind + (1 | hospital)"
    one, other = bf.formula(text, frame), bf.formula(text, sites)
    assert one.source == other.source
    torch.testing.assert_close(one.federation["X"], other.federation["X"])
    assert other.federation.names == one.federation.names


def test_an_ordered_categorical_keeps_its_order(frame):
    kinds = pd.Categorical(frame.kind, categories=["c", "b", "a"], ordered=True)
    model = bf.formula("y ~ kind + (1 | hospital)", frame.assign(kind=kinds))
    assert '"kind[b]"' in model.source and '"kind[a]"' in model.source
    sites = {n: r.drop(columns="hospital") for n, r in frame.assign(kind=kinds).groupby("hospital")}
    sites["A"] = sites["A"].assign(kind=sites["A"].kind.cat.reorder_categories(["a", "b", "c"]))
    with pytest.raises(ValueError, match="'kind' is an ordered categorical with other categories"):
        bf.formula("y ~ kind + (1 | hospital)", sites)


def test_a_formula_is_pickled_before_and_after_a_fit(frame):
    model = bf.formula("y ~ x + (1 | hospital)", frame)
    assert pickle.loads(pickle.dumps(model)).source == model.source
    first = bf.fit(model, model.federation, rounds=2)
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(bf.fit(again, again.federation, rounds=2).elbo(9), first.elbo(9))


def test_arviz_has_bambis_names_and_no_working_variables(frame):
    model = bf.formula("y ~ x + kind + (1 | hospital) + (1 | item)", frame, client="hospital")
    posterior = bf.fit(model, model.federation, rounds=2)
    idata = posterior.to_arviz(40)
    assert set(idata.posterior) == {
        *("Intercept", "x", "kind[b]", "kind[c]", "sigma", "1|hospital", "1|hospital_sigma"),
        *("1|item", "1|item_sigma"),
    }
    assert set(idata.prior) == set(idata.posterior) - {"1|hospital"}
    assert idata.posterior.coords["1|item_dim_0"].values.tolist() == ["3", "4", "5", "6"]


def test_new_clients_and_rows_without_outcome_are_coded_as_agreed(frame):
    model = bf.formula("y ~ scale(x) + kind + (1 + x | hospital)", frame)
    new = frame[frame.hospital == "C"].assign(hospital="new")
    encoded = model.encode(new.drop(columns="y"))
    torch.testing.assert_close(encoded["X"], model.federation.select(["C"])["X"])
    assert set(encoded.fields) == set(model.federation.fields) - {"y"}
    posterior = bf.fit(model, model.federation, rounds=2)
    joined = posterior.personalize(model.encode(new))
    assert joined.federation.names == ("new",)
    assert joined.predict(encoded, 7)["y"].shape == (7, len(new))


def test_a_rate_needs_its_trials_but_not_its_successes(frame):
    model = bf.formula("p(s, n) ~ x + (1 | hospital)", frame, family="binomial")
    encoded = model.encode(frame.drop(columns="s"))
    assert set(encoded.fields) == {"X", "trials"}


def test_a_posterior_is_read_back(frame, tmp_path):
    model = bf.formula("y ~ x + (1 + x | hospital)", frame)
    posterior = bf.fit(model, model.federation, rounds=2)
    posterior.save(tmp_path / "posterior.safetensors")
    again = bf.formula("y ~ x + (1 + x | hospital)", frame)
    read = bf.Posterior.load(tmp_path / "posterior.safetensors", again, again.federation)
    torch.testing.assert_close(read.derived(num_samples=5), posterior.derived(num_samples=5))


def test_clients_have_variables_for_their_own_levels_alone():
    """Nine children of three studies, of whom the last has one: three variables a client, with its own numbers."""
    frame = pd.DataFrame(
        {
            "study": list("AAAABBBBC"),
            "child": [11, 12, 13, 14, 24, 23, 22, 21, 31],
            "y": np.random.default_rng(0).normal(size=9),
        }
    )
    model = bf.formula("y ~ (1 | study/child)", frame)
    assert model.coding.own["study:child"] == {
        "A": (11, 12, 13, 14),
        "B": (21, 22, 23, 24),
        "C": (31,),
    }
    assert "1|study:child_dim_0" not in model.coords
    nodes = traced(model)
    effects = nodes["1|study:child"]["value"].squeeze().numpy()
    assert effects.shape == (3, 4)
    of_row = effects[[0, 0, 0, 0, 1, 1, 1, 1, 2], [0, 1, 2, 3, 3, 2, 1, 0, 0]]
    of_study = nodes["1|study"]["value"].flatten().numpy()[[0, 0, 0, 0, 1, 1, 1, 1, 2]]
    total = float(nodes["Intercept"]["value"]) + of_study + of_row
    np.testing.assert_allclose(flat(model, nodes["y"]["fn"].loc), total, rtol=1e-5, atol=1e-6)
    numbers = frame.assign(study=frame.study.map({"A": 1.0, "B": 2.0, "C": 3.0}))
    numbered = bf.formula("y ~ (1 | study/child)", numbers)
    assert torch.equal(numbered.federation["study:child"], model.federation["study:child"])
    swapped = frame[frame.study != "C"].assign(child=[21, 22, 23, 24, 11, 12, 13, 14])
    with pytest.raises(ValueError, match="client 'A': 'study:child' has the level 21"):
        model.encode(swapped)


def test_levels_that_clients_share_have_one_number_everywhere(frame):
    model = bf.formula("y ~ (1 | hospital/item)", frame)
    assert not model.coding.own
    assert model.coords["1|hospital:item_dim_0"] == ["3", "4", "5", "6"]


def test_an_agreement_does_not_depend_on_the_order_in_which_sums_arrive():
    """By post the same answers are read again for each letter; another agreement would be asked for once more."""
    start = Agreement({"x": "number", "y": "number"}, {}, {})
    totals = {"field y": np.array([3.0, 1.0, 2.0]), "field x": np.array([3.0, 4.0, 5.0])}
    both = [add_totals(start, dict(items)) for items in (totals.items(), [*totals.items()][::-1])]
    assert list(both[0].totals) == list(both[1].totals) == ["field x", "field y"]
