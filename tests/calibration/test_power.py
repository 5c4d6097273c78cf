"""Power and assurance beside closed forms; the fit of the conjugate hierarchy is replaced by its exact posterior."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

import bayesfed as bf
from bayesfed.calibration import replications
from bayesfed.calibration.simulate import make_simulator
from tests.calibration.test_calibrate import ClosedForm
from tests.scenarios import conjugate_hierarchy, ragged

CLIENTS = ragged()


@pytest.fixture
def closed_form(monkeypatch):
    program = make_simulator(conjugate_hierarchy, CLIENTS, bf.SFVI(), 0).fitted.program

    class WithoutDerived(ClosedForm):
        federation = CLIENTS

        def derived(self, **options):
            return {}

    def fit(model, federation, algorithm, **options):
        return WithoutDerived(program, federation, 1.0, 0.0)

    monkeypatch.setattr(replications, "fit", fit)


def power(claims, **options):
    return bf.power(conjugate_hierarchy, CLIENTS, claims, progress=False, **options)


def sd_of_mu():
    """The standard deviation of mu given all data, and that of its estimate given mu."""
    information = float((1 / (1 + 0.25 / CLIENTS.lengths)).sum())
    return (0.25 + information) ** -0.5, information**0.5 / (0.25 + information)


def normal_cdf(x):
    return 0.5 * (1 + math.erf(x / 2**0.5))


def test_power_of_a_known_design(closed_form):
    """Given mu = 1 its posterior mean is Normal, shrunk, with the standard deviation of the estimate."""
    found = power(["mu > 0", "mu", "mu < 0"], at={"mu": 1.0}, n=200)
    sd, of_estimate = sd_of_mu()
    mean = 1.0 * (1 - sd**2 / 4)
    for row, needed in ((0, 1.6449), (1, 1.9600)):
        expected = normal_cdf((mean - needed * sd) / of_estimate)
        assert 0.3 < expected < 0.95
        shown = found.table.loc[row]
        assert abs(shown["power"] - expected) < 3 * math.sqrt(expected * (1 - expected) / 200)
        assert abs(shown["width"] / (2 * 1.96 * sd) - 1) < 0.02
    assert found.table.loc[2, "power"] < 0.02 and found.table.loc[2, "if_false"] < 0.02
    assert math.isnan(found.table.loc[2, "if_true"])
    assert "Power at mu = 1.0; 8 clients, " in str(found) and "mu &gt; 0" in found._repr_html_()


def test_assurance_and_the_share_of_wrong_claims(closed_form):
    found = power("mu > 0", n=200)
    sd, _ = sd_of_mu()
    expected = 1 - normal_cdf(1.6449 * sd / math.sqrt(4 - sd**2))
    (row,) = found.table.to_dict("records")
    assert abs(row["power"] - expected) < 3 * row["error"]
    assert row["if_true"] > 0.6 and row["if_false"] < 0.05 and abs(row["covered"] - 0.95) < 0.04
    assert "Assurance" in str(found)


def test_that_more_clients_have_more_power(closed_form):
    larger = bf.simulations.resample(CLIENTS, clients=40, rows=2)
    assert len(larger) == 40 and larger.lengths.tolist() == [2] * 40
    again = bf.simulations.resample(CLIENTS, clients=40, rows=2)
    assert torch.equal(larger["y"], again["y"]) and set(larger["y"].tolist()) <= set(
        CLIENTS["y"].tolist()
    )
    few = power("mu > 0", at={"mu": 0.6}, n=100)
    many = bf.power(conjugate_hierarchy, larger, "mu > 0", at={"mu": 0.6}, n=100, progress=False)
    assert many.table.loc[0, "power"] > few.table.loc[0, "power"] + 0.2
    with pytest.raises(ValueError, match="clients is 0"):
        bf.simulations.resample(CLIENTS, clients=0)


def test_that_rows_stay_together_and_come_from_one_client():
    rows = {
        f"c{i}": {"x": [10.0 * i, 10.0 * i + 1], "y": [-10.0 * i, -10.0 * i - 1]} for i in range(3)
    }
    made = bf.simulations.resample(bf.Federation.from_arrays(rows), clients=7, rows=4)
    assert torch.equal(made["x"], -made["y"])
    assert all((own // 10).unique().numel() == 1 for own in made["x"].split(4))


def test_a_claim_about_a_client_and_a_design_prior(closed_form):
    def design(federation):
        mu = pyro.sample("mu", dist.Normal(2.0, 0.1))
        with federation.clients():
            alpha = pyro.sample("alpha", dist.Normal(mu, 0.1))
            with federation.observations() as obs:
                pyro.sample("y", dist.Normal(alpha, 0.5), obs=obs.get("y"))

    found = power("alpha['client 0'] > 1", simulate=design, n=50)
    assert found.table.loc[0, "power"] > 0.9
    assert found.outcomes["truth"].between(0.5, 1.5).all() and found.outcomes["true"].all()


def test_what_is_refused_before_a_fit():
    with pytest.raises(KeyError, match="no variable 'beta' in 'beta > 0'"):
        power("beta > 0")
    with pytest.raises(KeyError, match="no global variable 'alpha' is sampled: there are mu"):
        power("mu > 0", at={"alpha": 1.0})
    with pytest.raises(ValueError, match="at: 'mu' has shape"):
        power("mu > 0", at={"mu": [1.0, 2.0]})
    with pytest.raises(ValueError, match="prob is 1"):
        power("mu > 0", prob=1.0)
    with pytest.raises(ValueError, match="cannot be 'beta'|cannot be -1.0"):
        bf.power(bf.models.eight_schools, bf.datasets.eight_schools(), "mu > 0", at={"tau": -1.0})
