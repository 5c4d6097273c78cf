import itertools
import math

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
import torch
from scipy.integrate import quad
from scipy.stats import expon, halfnorm, kstest, norm
from statsmodels.duration.hazard_regression import PHReg

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.data.federation import Federation
from bayesfed.models.cox import PiecewiseExponential

CUTS = [0.5, 2.0]


def test_sites(check_sites):
    sites = {"log_hazard": (3,), "tau": (), "beta": (2,)}
    check_sites(models.Cox(CUTS), sites, {"alpha": ()}, outcome="time")


def test_batched_draws_agree_with_single_draws(check_draws):
    check_draws(models.Cox(CUTS), outcome="time")


def test_log_joint_by_hand(log_joint):
    """Times lie in the first interval, on a cut, and censored in the last; H is the integral of h by quadrature."""
    hazards, eta = np.array([0.3, 1.2, 0.1]), [1.2 + 0.4, 1.2 + 0.2, -0.3 + 1.2]
    times, events = [0.4, 2.0, 7.0], [1, 1, 0]

    def hazard(t):
        return hazards[np.searchsorted(CUTS, t, side="left")]

    rows = sum(
        event * (math.log(hazard(t)) + e)
        - math.exp(e) * quad(hazard, 0, t, points=[c for c in CUTS if c < t] or None)[0]
        for t, e, event in zip(times, eta, events, strict=True)
    )
    expected = (
        norm(-math.log(1.25), 2).logpdf(np.log(hazards)).sum()  # 1.25 is the median of the cuts
        + halfnorm(0, 1).logpdf(0.75)  # tau
        + norm(0, 1).logpdf(0.4)  # beta
        + norm(0, 0.75).logpdf([1.2, -0.3]).sum()  # alpha
        + rows
    )
    federation = Federation.from_arrays(
        {
            "A": {"x": [[1.0], [0.5]], "time": times[:2], "event": events[:2]},
            "B": {"x": [[3.0]], "time": times[2:], "event": events[2:]},
        }
    )
    values = {
        "log_hazard": torch.tensor(hazards).log(),
        "tau": torch.tensor(0.75),
        "beta": torch.tensor([0.4]),
        "alpha": torch.tensor([[1.2], [-0.3]]),
    }
    assert log_joint(models.Cox(CUTS), federation, values) == pytest.approx(expected, abs=1e-8)


def test_the_unit_of_time_does_not_matter(log_joint):
    """In days all hazards are 365 times smaller, and the density of a time is that in years over 365."""
    found = []
    for unit in (1.0, 365.0):
        rows = {"x": [[1.0], [0.5]], "time": [0.4 * unit, 1.9 * unit], "event": [1, 0]}
        values = {
            "log_hazard": torch.tensor([-1.0, 0.3, 0.1]) - math.log(unit),
            "tau": torch.tensor(0.75),
            "beta": torch.tensor([0.4]),
            "alpha": torch.tensor([[1.2]]),
        }
        model = models.Cox([0.5 * unit, 1.0 * unit])
        found.append(log_joint(model, Federation.from_arrays({"A": rows}), values))
    assert found[0] - found[1] == pytest.approx(math.log(365.0), abs=1e-9)


def most_likely(frame, cuts, predictors):
    """Return the maximum likelihood estimate of β and log λ without clients, by Newton's method."""
    x, time, event = (torch.tensor(frame[c].to_numpy(float)) for c in (predictors, "time", "event"))

    def loss(at):
        distribution = PiecewiseExponential(
            cuts, at[: len(cuts) + 1], x @ at[len(cuts) + 1 :], event
        )
        return -distribution.log_prob(time).sum()

    at = torch.zeros(len(cuts) + 1 + len(predictors))
    for _ in range(30):
        gradient = torch.func.grad(loss)(at)
        at = at - torch.linalg.solve(torch.func.hessian(loss)(at), gradient)
    return at[len(cuts) + 1 :].numpy(), at[: len(cuts) + 1].numpy()


def test_the_likelihood_is_that_of_poisson_regression_on_split_rows():
    """The maximum is that of statsmodels' GLM, with the logarithm of the time at risk as offset."""
    federation, cuts = datasets.kidney(), [0.5, 1.0, 5.0]
    frame = pd.DataFrame({name: federation[name] for name in ("time", "event")})
    frame[["age", "female"]] = federation["x"].numpy()
    split, edges = [], [0.0, *cuts, math.inf]
    for row in frame.itertuples():
        for k, (start, end) in enumerate(itertools.pairwise(edges)):
            if row.time > start:
                died = row.event * (row.time <= end)
                ones = np.eye(len(cuts) + 1)[k]
                split.append([died, min(row.time, end) - start, row.age, row.female, *ones])
    split = np.array(split)
    poisson = sm.GLM(split[:, 0], split[:, 2:], sm.families.Poisson(), offset=np.log(split[:, 1]))
    expected = poisson.fit(tol=1e-12).params
    beta, log_hazard = most_likely(frame, cuts, ["age", "female"])
    np.testing.assert_allclose(np.concatenate([beta, log_hazard]), expected, atol=1e-6)


def test_with_many_intervals_it_is_cox_regression():
    """A cut before each event gives the partial likelihood's maximum, exactly if no two events are at one time.

    Breslow (1974): with a hazard of its own up to each event, and rows at risk until the end of the interval in which
    they are censored. Times are ranks here, censored ones just after the event before them, so that it is exact to
    what they spend there, a millionth of an interval.
    """
    generator = np.random.default_rng(0)
    n = 60
    x = generator.normal(size=(n, 2))
    order = np.argsort(generator.exponential(size=n) / np.exp(x @ [0.7, -0.4]))
    frame = pd.DataFrame(x[order], columns=["u", "v"])
    frame["event"] = (generator.uniform(size=n) < 0.7).astype(float)
    frame.loc[n - 1, "event"] = 1.0
    frame["time"] = np.cumsum(frame["event"]) + 1 + np.where(frame["event"] == 1, 0.0, 1e-6)
    ends = np.unique(frame.loc[frame["event"] == 1, "time"])[:-1]
    beta, _ = most_likely(frame, ends.tolist(), ["u", "v"])
    cox = PHReg(frame["time"], frame[["u", "v"]], status=frame["event"]).fit()
    np.testing.assert_allclose(beta, cox.params, atol=1e-5)


def test_draws_have_the_hazard():
    """Kolmogorov's test of 4000 draws: H(t) is an exponential time."""
    distribution = PiecewiseExponential(CUTS, torch.tensor([-1.0, 0.5, -0.7]), torch.tensor(0.3))
    draws = distribution.sample((4000,))
    cumulative = -PiecewiseExponential(
        CUTS, distribution.log_hazard, distribution.log_ratio, torch.tensor(0.0)
    ).log_prob(draws)
    assert kstest(cumulative.numpy(), expon.cdf).pvalue > 1e-3


def test_censored_times_are_predicted_beyond_the_censoring():
    rows = {"x": [[0.0]] * 6, "time": [0.4] + [1.0] * 5, "event": [1, 0, 0, 0, 0, 0]}
    federation = Federation.from_arrays({f"hospital {i}": rows for i in range(4)})
    posterior = bf.fit(models.Cox([1.0]), federation)
    times = posterior.predict()["time"]
    assert times.min() > 0
    assert (times > 1).double().mean() > 0.7


@pytest.mark.parametrize("cuts", [[0.0, 1.0], [2.0, 1.0], [1.0, 1.0], [math.inf], [math.nan]])
def test_invalid_cuts_are_refused(cuts):
    with pytest.raises(ValueError, match="they must be positive and ascend"):
        models.Cox(cuts)
