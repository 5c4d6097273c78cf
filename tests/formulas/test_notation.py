"""Notations of R that formulas take, warnings, and what is refused in one line."""

import pandas as pd
import pyro.distributions as dist
import pytest
import torch

import bayesfed as bf

TRANSLATED = {
    "y ~ I(x^2) + (1 | hospital)": "y ~ I(x**2) + (1 | hospital)",
    "y ~ (x + z)^2 + (1 | hospital)": "y ~ x*z + (1 | hospital)",
    "y ~ factor(item) + (1 | hospital)": "y ~ C(item) + (1 | hospital)",
    "y ~ as.factor(item) + (1 | hospital)": "y ~ C(item) + (1 | hospital)",
    "y ~ x + (1 |p| hospital)": "y ~ x + (1 | hospital)",
    "y ~ x + (0 + x |p| hospital)": "y ~ x + (0 + x | hospital)",
    "y ~ x + (1 + x |p| hospital)": "y ~ x + (1 + x | hospital)",
}


@pytest.mark.parametrize("text", TRANSLATED)
def test_notation_of_r_with_one_meaning_is_translated(frame, text):
    found, meant = bf.formula(text, frame), bf.formula(TRANSLATED[text], frame)
    assert found.source.split('"""')[2] == meant.source.split('"""')[2]
    assert torch.equal(found.federation["X"], meant.federation["X"])


def test_successes_and_failures_of_r_are_a_proportion(frame):
    text = "cbind(s, n - s) ~ x + (1 | hospital)"
    found = bf.formula(text, frame, family="binomial")
    meant = bf.formula("p(s, n) ~ x + (1 | hospital)", frame, family="binomial")
    assert torch.equal(found.federation["trials"], meant.federation["trials"])


def test_quoted_levels_are_not_translated(frame):
    kinds = frame.kind.replace({"b": "b^2"})
    model = bf.formula(
        'kind["b^2"] ~ x + (1 | hospital)', frame.assign(kind=kinds), family="bernoulli"
    )
    assert torch.equal(model.federation["kind"].sum(), torch.tensor((frame.kind == "b").sum()))


def test_zeros_and_ones_under_a_gaussian_are_warned_of(frame):
    with pytest.warns(UserWarning, match="'male' is 0 or 1 in all rows.*family='bernoulli'"):
        bf.formula("male ~ x + (1 | hospital)", frame)
    with pytest.raises(ValueError, match="for outcomes of 0 and 1 take 'bernoulli'"):
        bf.formula("male ~ x + (1 | hospital)", frame, family="binomial")


def test_levels_that_would_leave_a_client_are_warned_of(frame):
    dates = pd.Series(pd.date_range("2020-01-01", periods=len(frame)).strftime("%d.%m.%Y"))
    with pytest.warns(
        UserWarning, match="'date' has 90 levels, .* and 90 of them occur at one client only"
    ):
        bf.formula("y ~ x + date + (1 | hospital)", frame.assign(date=dates))


REFUSED = {
    "y x": "write outcome ~ predictors",
    "~ x": "write outcome ~ predictors",
    "y ~ x + (1 | hospital": r"cannot be read: Expect '\)'",
    "y ~ x) + z": r"cannot be read from '\)' on",
    "y / n ~ x": r"write p\(a, n\) or a \| trials\(n\)",
    "y | mi() ~ x": r"behind the outcome there are trials\(n\), .*leave out the rows",
    "y | rate(n) ~ x": r"add offset\(log\(n\)\)",
    "y ~ . + (1 | hospital)": "write the names of the columns in place of the dot",
    "y ~ x %in% kind": "write x:kind",
    "y ~ scale(x)[, 1]": "functions here return one column",
    "y ~ x | hospital": r"write a group in parentheses, as in \(x \| g\)",
    "y ~ x^2": r"x\*\*2 crosses x with itself, which is x: write I\(x\*\*2\)",
    "y ~ s(x, k = 5)": "give the knots",
    "y ~ Error(hospital)": r"write \(1 \| g\)",
    "y ~ (1 | mm(item, ward))": "a group is one column",
    "y ~ (1 |p| hospital) + (0 + x |p| hospital)": "two terms with one id are correlated",
    "factor(kind) ~ x": "name the level that is 1",
    "cbind(s, n) ~ x": r"write y \| trials\(n\)",
    "y ~ I(x - np.mean(x))": r"np.mean\(\) is not a supported function of single rows",
    "y ~ C(np.round(x))": r"C\(\) takes a column",
    "scale(y) ~ x": "write the outcome itself",
    "mvbind(y, z) ~ x": r"mvbind\(\) is not a supported function",
    "y ~ x + 3": "3 is a number, not a column",
    "y ~ xx": "no column 'xx'",
    "y ~ 0": "no predictors",
    "y ~ I(0 * x)": "is the same in all rows",
    "y ~ np.log(z)": r"client '.', row \d+: np.log\(z\) is not finite",
    "y ~ (1 | np.round(x))": "a group's factor is a column",
    "y ~ (1 | hospital) + (x | hospital)": r"1\|hospital is there twice",
    "yes ~ x": r"name the level that is 1, as in yes\['yes'\]",
    "p(s, n) ~ x": "the binomial families, and only they",
    "sigma ~ x + (1 | hospital)": "the name 'sigma' is used twice",
    "day ~ x": "column 'day' is datetime64",
    "y ~ gap": r"client '.', row 3: 'gap' is missing",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(frame, text):
    rows = frame.assign(
        day=pd.Timestamp("2020-01-01"), gap=frame.x.where(frame.index != 3), sigma=frame.y
    )
    with pytest.raises((ValueError, KeyError), match=REFUSED[text]) as error:
        bf.formula(text, rows, client="hospital")
    assert "\n" not in str(error.value)


def test_settings_that_do_not_fit_are_refused(frame):
    text = "y ~ x + (1 | hospital)"
    with pytest.raises(ValueError, match="no family 'gausian': any other .*; there are gaussian"):
        bf.formula(text, frame, family="gausian")
    with pytest.raises(ValueError, match=r"no family 'cox'.*models\.Cox"):
        bf.formula(text, frame, family="cox")
    with pytest.raises(
        ValueError, match="priors has 'z', which the model does not have: it has Intercept, x"
    ):
        bf.formula(text, frame, priors={"z": dist.Normal(0.0, 1.0)})
    with pytest.raises(ValueError, match=r"priors\['x'\] is 2.0: give a distribution"):
        bf.formula(text, frame, priors={"x": 2.0})
    with pytest.raises(ValueError, match=r"priors\['x'\] has a shape"):
        bf.formula(text, frame, priors={"x": dist.Normal(torch.zeros(2), 1.0)})
    with pytest.raises(ValueError, match="pass client=, .*: hospital, item"):
        bf.formula(text + " + (1 | item)", frame)
    with pytest.raises(ValueError, match="pass client=, .*: the formula has no"):
        bf.formula("y ~ x", frame)
    with pytest.raises(ValueError, match="row 5 has no client"):
        bf.formula(text, frame.assign(hospital=frame.hospital.where(frame.index != 5)))
    numbers = {"A": frame.assign(kind=1.0), "B": frame}
    with pytest.raises(
        ValueError, match="client 'B': 'kind' holds text, where client 'A' has number"
    ):
        bf.formula("y ~ kind", numbers, client="site")


def test_rows_that_come_later_are_refused_where_they_do_not_fit(frame):
    model = bf.formula("y ~ x + kind + (1 | hospital) + (1 | item)", frame, client="hospital")
    with pytest.raises(
        ValueError, match="client 'A': 'kind' has the level 'q', which no client had"
    ):
        model.encode(frame.assign(kind="q"))
    with pytest.raises(ValueError, match="'item' has the level 99, which no client had"):
        model.encode(frame.assign(item=99))
    with pytest.raises(
        ValueError, match="client 'A': 'x' holds text, where other clients have number"
    ):
        model.encode(frame.assign(x="1"))
    with pytest.raises(KeyError, match="frame of client 'A' has no column 'x'"):
        model.encode(frame.drop(columns="x"))
