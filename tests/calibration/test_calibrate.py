"""Calibration of exact and of faulty posteriors, whose fit is replaced by a closed form, and of a fit by SFVI."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

import bayesfed as bf
from bayesfed.calibration import calibrate as module
from bayesfed.calibration import replications
from bayesfed.calibration.simulate import make_simulator
from bayesfed.models.weibull_survival import CensoredWeibull
from tests.scenarios import conjugate_hierarchy, exact, ragged

CLIENTS = ragged()


class ClosedForm:
    """The marginals of the conjugate hierarchy, with their scale and location changed."""

    converged, khat, correction, caveat = True, 0.1, None, ""

    def __init__(self, program, federation, scale, shift):
        self.history = {"elbo": torch.zeros(3)}
        self.program, self.exact, self.scale, self.shift = program, exact(federation), scale, shift

    def sample(self, count, *, seed):
        generator = torch.Generator().manual_seed(seed + 1)
        found = {}
        for name, (loc, sd) in {"mu": self.exact.mu, "alpha": self.exact.alpha}.items():
            loc, sd = (torch.as_tensor(x, dtype=torch.float64) for x in (loc, sd))
            z = torch.randn(count, *loc.shape, generator=generator, dtype=torch.float64)
            found[name] = loc + sd * (self.scale * z + self.shift)
        return found


@pytest.fixture
def closed_form(monkeypatch):
    """Return a function that replaces the fit by the closed form, with a scale and a shift in standard deviations."""
    program = make_simulator(conjugate_hierarchy, CLIENTS, bf.SFVI(), 0).fitted.program

    def replace(scale=1.0, shift=0.0):
        def fit(model, federation, algorithm, **options):
            return ClosedForm(program, federation, scale, shift)

        monkeypatch.setattr(replications, "fit", fit)

    replace()
    return replace


def calibrate(n=200, **options):
    return bf.calibrate(conjugate_hierarchy, CLIENTS, n=n, progress=False, **options)


def test_that_the_closed_form_is_calibrated(closed_form):
    found = calibrate()
    assert found.p_value > 0.01 and not found.off
    assert (found.table["p_bias"] > 0.01).all()
    for prob in (50, 80, 90, 95):
        off = (found.table[f"coverage_{prob}"] - prob / 100).abs()
        assert (off < 3 * found.table[f"error_{prob}"]).all()
    assert found.table["z_sd"].between(0.9, 1.1).all()
    assert "No variable is off" in str(found) and "alpha" in found._repr_html_()
    assert dict(found.ranks["alpha"].sizes) == {"replication": 200, "client": 8}
    assert found.ranks["alpha"]["client"].values.tolist() == list(CLIENTS.names)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"scale": 0.5}, "intervals too narrow"),
        ({"scale": 2.0}, "intervals too wide"),
        ({"shift": 0.7}, "estimates too high"),
        ({"shift": -0.7}, "estimates too low"),
    ],
)
def test_that_a_fault_of_the_guide_is_found_and_named(closed_form, fault, words):
    closed_form(**fault)
    found = calibrate(n=100)
    assert found.p_value < 0.01
    assert found.off == {"mu": words, "alpha": words}
    assert f"alpha: {words}" in str(found)
    biased = found.table["p_bias"] < 0.01
    assert biased.all() if "shift" in fault else not biased.any()  # VSBC sees no widths


def test_that_a_wrong_prior_is_found(closed_form):
    def elsewhere(federation):
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        with federation.clients():
            alpha = pyro.sample("alpha", dist.Normal(mu, 3.0))
            with federation.observations() as obs:
                pyro.sample("y", dist.Normal(alpha, 0.5), obs=obs.get("y"))

    found = calibrate(n=100, simulate=elsewhere)
    assert found.p_value < 0.01
    assert found.off["mu"] == "intervals too narrow"


def test_a_fit_beside_the_closed_form(monkeypatch):
    """The means and standard deviations that are recorded are those of the simulated rows, and so is z."""
    seen = []

    def fit(model, federation, *rest, **options):
        seen.append(exact(federation))
        return bf.fit(model, federation, *rest, **options)

    monkeypatch.setattr(replications, "fit", fit)
    found = calibrate(n=6)
    for name in ("mu", "alpha"):
        loc, sd = (np.array([getattr(e, name)[k] for e in seen]) for k in (0, 1))
        assert np.abs((found.means[name] - loc) / sd).max() < 0.15  # 995 draws
        assert np.abs(found.sds[name] / sd - 1).max() < 0.1
        z = (loc - found.truths[name].to_numpy()) / sd
        assert np.abs(z).max() < 4 and np.abs(found.z_scores[name] - z).max() < 0.2
        share = torch.distributions.Normal(0.0, 1.0).cdf(torch.as_tensor(-z)).numpy()
        assert np.abs(found.ranks[name] / 199 - share).max() < 0.15
    assert found.replications["converged"].all() and (found.replications["khat"] < 0.7).all()


def test_that_a_killed_call_goes_on(closed_form, tmp_path):
    """A line that was not written completely is made again; more replications may be added."""
    path, whole = tmp_path / "journal.jsonl", calibrate(n=6)
    calibrate(n=4, path=path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:3]) + lines[3][:20])
    found = calibrate(n=6, path=path)
    assert found.ranks.equals(whole.ranks) and found.means.equals(whole.means)
    assert len(path.read_text().splitlines()) == 7
    with pytest.raises(ValueError, match="another study, seed was 0 and is 1"):
        calibrate(n=6, path=path, seed=1)
    with pytest.raises(ValueError, match="the prior of 'mu' has changed"):
        other = poutine.infer_config(_other_prior, lambda site: {})
        bf.calibrate(other, CLIENTS, n=6, path=path, progress=False)
    with pytest.raises(ValueError, match="field 'y' of client 'client 0'"):
        rows = ragged(seed=0)
        rows.fields["y"][0] = 5.0
        bf.calibrate(conjugate_hierarchy, rows, n=6, path=path, progress=False)
    (tmp_path / "other").write_text("what\nelse\n")
    with pytest.raises(ValueError, match="not a journal"):
        calibrate(path=tmp_path / "other")


def _other_prior(federation):
    mu = pyro.sample("mu", dist.Normal(0.0, 3.0))
    with federation.clients():
        alpha = pyro.sample("alpha", dist.Normal(mu, 1.0))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(alpha, 0.5), obs=obs.get("y"))


def test_that_several_processes_give_the_same(closed_form):
    one, two = calibrate(n=5), calibrate(n=5, jobs=2)
    assert one.ranks.equals(two.ranks) and one.means.equals(two.means)


def test_that_failures_are_named_and_not_dropped(closed_form, monkeypatch):
    exact_fit, count = replications.fit, iter(range(100))

    def fit(*arguments, **options):
        number = next(count)
        if number == 3:
            raise FloatingPointError("the scale of a local prior has grown\nmore")
        found = exact_fit(*arguments, **options)
        found.converged = number != 5
        found.caveat = "poor" if number == 6 else ""
        return found

    monkeypatch.setattr(replications, "fit", fit)
    found = calibrate(n=8)
    assert found.n == 7 and 3 not in found.ranks["replication"]
    assert found.replications.loc[3, "failed"] == (
        "FloatingPointError: the scale of a local prior has grown"
    )
    assert "1 of 8 replications failed and have no ranks, number 3: Floating" in str(found)
    assert "1 of 8 fits had not converged, number 5" in str(found)
    assert "1 fit has a caveat of its own, number 6" in str(found)


def test_that_failures_of_all_are_an_error(closed_form, monkeypatch):
    def fit(*arguments, **options):
        raise RuntimeError("no luck")

    monkeypatch.setattr(replications, "fit", fit)
    with pytest.raises(ValueError, match="all 3 replications failed.*RuntimeError: no luck"):
        calibrate(n=3)


def test_plots(closed_form, monkeypatch):
    import matplotlib

    monkeypatch.setattr(matplotlib.rcParams, "backend", "agg", raising=False)
    import matplotlib.pyplot as plt

    plt.switch_backend("agg")
    found = calibrate(n=40)
    ecdf, histogram = found.plot_ecdf(), found.plot_ranks(["alpha"])
    assert [len(ax.lines) for ax in ecdf.axes] == [1 + 1, 8 + 1]
    heights = [patch.get_height() for patch in histogram.axes[0].patches]
    assert sum(h for h in heights[-20:]) == 40 * 8
    with pytest.raises(KeyError, match="no variable 'beta': mu, alpha"):
        found.plot_ranks(["beta"])
    plt.close("all")


def test_coverage_of_whole_ranks_only(closed_form):
    found = calibrate(n=3)
    assert float(found.coverage(0.99)["mu"]) <= 1.0
    with pytest.raises(ValueError, match="multiple of 0.01"):
        found.coverage(0.995)


# -- the simulation --------------------------------------------------------------------------------


def draws_of(model, federation, count=300):
    simulator = make_simulator(model, federation, bf.SFVI(), 0)
    return [simulator.draw(seed) for seed in range(count)]


def test_moments_of_simulated_outcomes():
    """Var(y) = 2² + 1² + 0.5²; true values and outcomes belong to each other; missing outcomes stay missing."""
    frame = pd.DataFrame({"c": list("aaabbc"), "y": [1.0, np.nan, 2.0, 3.0, 4.0, 5.0]})
    clients = bf.Federation.from_frame(frame, client="c", missing="keep")
    found = draws_of(conjugate_hierarchy, clients)
    y = torch.stack([rows["y"] for _, rows in found])
    assert y.isnan().sum(0).tolist() == [0, 300, 0, 0, 0, 0]
    y = y[:, [0, 2, 3, 4, 5]]
    assert abs(float(y.var(0).mean()) / 5.25 - 1) < 0.15
    alpha = torch.stack([truth["alpha"] for truth, _ in found])[:, [0, 0, 1, 1, 2]]
    assert abs(float((y - alpha).std()) / 0.5 - 1) < 0.05
    mu = torch.stack([truth["mu"] for truth, _ in found])
    assert abs(float((alpha[:, [0, 2, 4]] - mu[:, None]).std()) - 1) < 0.1


def test_that_a_discrete_variable_is_the_same_for_all_rows_of_a_client():
    def kinds(federation):
        level = pyro.sample("level", dist.Normal(0.0, 0.1))
        with federation.clients():
            high = pyro.sample("high", dist.Bernoulli(0.5))
            with federation.observations() as obs:
                pyro.sample("y", dist.Normal(level + 9 * high, 0.1), obs=obs.get("y"))

    clients = bf.Federation.from_arrays({"a": {"y": [9.0, 8.0]}, "b": {"y": [0.5, 0.1]}})
    rows = torch.stack([rows["y"] for _, rows in draws_of(kinds, clients, 20)]).unflatten(1, (2, 2))
    assert (rows[..., 0] - rows[..., 1]).abs().max() < 2
    assert 0.2 < float((rows > 4).float().mean()) < 0.8


def test_that_a_formula_has_ranks_in_the_data_s_units():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"g": np.repeat(list("abcd"), 6), "x": rng.normal(5.0, 2.0, 24)})
    frame["y"] = 100 + 3 * frame.x + rng.normal(0, 2, 24)
    model = bf.formula("y ~ x + (1 | g)", frame)
    found = bf.calibrate(model, model.federation, n=2, rounds=2, progress=False)
    assert sorted(found.ranks) == ["1|g", "1|g_sigma", "Intercept", "sigma", "x"]
    assert found.ranks["1|g"].dims == ("replication", "client")
    assert found.replications["converged"].isna().all()
    with pytest.raises(KeyError, match="'x' is sampled.*if it has a prior, priors={'x': ...}"):
        make_simulator(model, model.federation, bf.SFVI(), 0, {"x": 2.0})
    model = bf.formula("y ~ x + (1 | g)", frame, priors={"x": dist.Normal(0.0, 5.0)})
    truth, _ = make_simulator(model, model.federation, bf.SFVI(), 0, {"x": 2.0}).draw(1)
    assert float(truth["x"]) == 2.0


def test_outcomes_of_clients_and_counts():
    """An outcome of a client is the same in all of its rows; counts keep their totals."""

    def model(federation):
        share = pyro.sample("share", dist.Dirichlet(torch.ones(3)))
        with federation.clients():
            a = pyro.sample("a", dist.Normal(0.0, 1.0))
            pyro.sample("h", dist.Normal(a, 0.1), obs=federation.of_clients("h"))
            with federation.observations() as obs:
                z = dist.Multinomial(probs=share, validate_args=False)
                pyro.sample("z", z, obs=obs.get("z"))

    rows = {"h": [1.0, 1.0], "z": [[3.0, 4.0, 5.0], [1.0, 2.0, 3.0]]}
    clients = bf.Federation.from_arrays({"a": rows, "b": rows | {"h": [2.0, 2.0]}})
    ((truth, simulated),) = draws_of(model, clients, 1)
    assert (simulated["h"].unflatten(0, (2, 2)) - truth["a"][:, None]).abs().max() < 0.5
    assert torch.equal(simulated["h"][::2], simulated["h"][1::2])
    assert torch.equal(simulated["z"].sum(1), clients["z"].sum(1))
    assert not torch.equal(simulated["z"], clients["z"])


def program(distribution, *, factor=False, start=None, weights=False, read=lambda obs: obs["y"]):
    def model(federation):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        shift = 0.0 if start is None else pyro.param("shift", torch.tensor(start))
        with federation.clients():
            a = pyro.sample("a", dist.Normal(mu, 1.0))
            if factor:
                pyro.factor("penalty", -a.square())
            with (
                federation.observations() as obs,
                poutine.scale(scale=obs["w"] if weights else 1.0),
            ):
                pyro.sample("y", distribution(a + shift, obs), obs=read(obs))

    return model


def normal(a, obs):
    return dist.Normal(a, 1.0)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (program(normal, start=0.5), "parameter 'shift' has no prior"),
        (program(normal, factor=True), "pyro.factor 'penalty' has no outcome"),
        (program(normal, weights=True), "site 'y' has weighted rows"),
        (program(normal, read=lambda obs: obs["y"].log()), "site 'y' does not observe a field"),
        (
            program(lambda a, obs: dist.Normal(a + obs["y"].detach(), 1.0)),
            "density of site 'y' depends on an outcome, 'y'",
        ),
    ],
)
def test_what_cannot_be_simulated_is_refused_by_name(model, words):
    rows = {"y": [1.0, 2.0], "w": [0.5, 2.0]}
    clients = bf.Federation.from_arrays({"a": rows, "b": rows})
    with pytest.raises(ValueError, match=words):
        bf.calibrate(model, clients, n=2)


@pytest.mark.parametrize("model", [bf.models.weibull_survival, bf.models.Cox([0.8])])
def test_that_simulated_times_are_censored_at_the_end_of_a_row_s_follow_up(model):
    rows = {"x": [[0.0]] * 40, "time": [1.0] * 20 + [2.0] * 20, "event": [1.0] * 20 + [0.0] * 20}
    clients = bf.Federation.from_arrays({"a": rows, "b": rows})
    names = {
        site.name for site in make_simulator(model, clients, bf.SFVI(), 0).fitted.program.globals
    }
    values = {"mu": 0.7, "tau": 1e-4, "shape": 1.5, "log_hazard": [-1.0, -0.2]}
    at = {name: value for name, value in values.items() if name in names}
    simulator = make_simulator(model, clients, bf.SFVI(), 0, at)
    found = [simulator.draw(seed)[1] for seed in range(20)]
    time, event = (
        torch.stack([f[name] for f in found]).reshape(-1, 2, 20) for name in ("time", "event")
    )
    assert (event[:, 0] == 1).all()  # no end of follow-up
    assert (time[:, 0] > 2).any()
    assert torch.equal(event[:, 1] == 0, time[:, 1] == 2.0)
    cumulative = 0.8 * math.exp(-1.0) + 1.2 * math.exp(-0.2)
    if "shape" in names:
        cumulative = (2.0 / math.exp(0.7)) ** 1.5
    survival = math.exp(-cumulative)
    error = math.sqrt(survival * (1 - survival) / event[:, 1].numel())
    assert abs(float((event[:, 1] == 0).float().mean()) - survival) < 4 * error


def test_that_censored_rows_of_a_formula_are_simulated():
    frame = pd.DataFrame({"site": ["a"] * 8 + ["b"] * 8, "t": [1.0, 2.0] * 8, "gone": [0, 1] * 8})
    model = bf.formula("t | cens(gone) ~ 1 + (1 | site)", frame, family="weibull")
    simulator = make_simulator(model, model.federation, bf.SFVI(), 0)
    _, found = simulator.draw(0)
    ends = torch.tensor([math.inf, 2.0] * 8)
    assert simulator.follow_up["t"].field == "cens"
    assert torch.equal(found["cens"], (found["t"] >= ends).float())


def test_that_an_indicator_that_is_not_clear_and_point_estimates_are_refused():
    rows = {"x": [[0.1], [0.2]], "time": [1.0, 2.0], "seen": [1.0, 0.0], "treated": [1.0, 0.0]}
    clients = bf.Federation.from_arrays({"a": rows, "b": rows})

    def model(federation):
        scale = pyro.sample("scale", dist.Normal(0.0, 1.0))
        with federation.clients(), federation.observations() as obs:
            times = CensoredWeibull(scale.expand(obs["seen"].shape), torch.ones(()), obs["seen"])
            pyro.sample("time", times, obs=obs["time"])

    with pytest.raises(ValueError, match="site 'time' has censored rows, and which field says so"):
        bf.calibrate(model, clients, n=2)
    with pytest.raises(ValueError, match="FedAvg gives mu a point estimate.*bf.SFVI"):
        calibrate(algorithm=bf.FedAvg())
    with pytest.raises(ValueError, match="n is 1"):
        calibrate(n=1)
    with pytest.raises(ValueError, match="batch_size is 0"):
        calibrate(batch_size=0)
    with pytest.raises(TypeError, match="held_out"):
        calibrate(held_out=CLIENTS)


def test_that_a_rank_among_equal_draws_is_drawn():
    """Half of the draws equal the true value: its rank is uniform among them."""
    program = SimpleNamespace(latent=[SimpleNamespace(name="k")], derived={})
    draws = torch.tensor([0.0, 1.0]).repeat_interleave(500)[:995]
    posterior = SimpleNamespace(program=program, sample=lambda count, seed: {"k": draws})
    ranks = [module.Ranks()(posterior, {"k": torch.tensor(1.0)}, s)["rank"]["k"] for s in range(99)]
    assert min(ranks) >= 100 and max(ranks) <= 199 and len(set(ranks)) > 40
    assert json.dumps(ranks)
