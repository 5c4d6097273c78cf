"""Chains of Hamiltonian Monte Carlo against integrals on a grid, NUTS and differences of the density."""

import arviz as az
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.guides.family import GLOBAL
from bayesfed.output import chains
from bayesfed.output.client_chains import LARGEST, ChainClients, Leap, Memory, MoveHere
from bayesfed.output.draws import draw_theta
from bayesfed.output.fitted import Correction, CorrectionResult
from bayesfed.output.prior_coordinates import find_prior_coordinates
from bayesfed.output.trajectories import Server
from tests.engine.test_moments import data, intercepts_and_slopes
from tests.output.test_correction import SCHOOLS, of_grid
from tests.output.test_evidence import rows_that_depend


def normal_scale(federation):
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    log_tau = pyro.sample("log_tau", dist.Normal(1.0, 1.0))
    with federation.clients():
        theta = pyro.sample("theta", dist.Normal(mu, log_tau.exp()))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(theta, obs["sigma"]), obs=obs.get("y"))


def log_normal_effects(federation):
    """A scale over global effects, and all kinds of priors with coordinates of their own."""
    spread = pyro.sample("spread", dist.HalfCauchy(1.0))
    rate = pyro.sample("rate", dist.LogNormal(torch.zeros(3), spread).to_event(1))
    shift = pyro.sample("shift", dist.Cauchy(0.0, 2.0))
    tau = pyro.sample("tau", dist.Exponential(0.2))
    sd = pyro.sample("sd", dist.HalfNormal(10.0))
    with federation.clients():
        theta = pyro.sample("theta", dist.Normal(shift + rate.sum(-1), tau))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(theta, obs["sigma"] + sd), obs=obs.get("y"))


@pytest.mark.parametrize(
    ("model", "data", "in_prior"),
    [
        (normal_scale, datasets.eight_schools, False),
        (models.eight_schools, datasets.eight_schools, True),
        (models.varying_slope, datasets.grunfeld, True),
        (log_normal_effects, datasets.eight_schools, True),
    ],
)
def test_gradients_are_those_of_the_density(model, data, in_prior, float64):
    posterior = bf.fit(model, data(), rounds=3, progress=False)
    key = posterior.key(1)
    clients = ChainClients.of(posterior, 4, key)
    z = draw_theta(posterior, 4, key)[GLOBAL][:, 0, 0]
    coordinates = find_prior_coordinates(posterior.program, posterior.params, z)
    assert (coordinates is None) is (not in_prior)
    how = posterior.program, posterior.params, key, MoveHere(clients), coordinates
    server = Server(*how)
    z, e = server.from_guide(z), clients._normals(0)

    def density(v, e):
        place, slope = clients._place(server.to_guide(v), e)
        prior, own = server.prior(v, slope)
        return prior + place.value, own, place.slope

    with torch.no_grad():
        _, of_z, of_e = density(z, e)
        torch.manual_seed(0)
        along_z, along_e = torch.randn_like(z), torch.randn_like(e)
        for slope, along, moved in (
            (of_z, along_z, lambda step: (z + step * along_z, e)),
            (of_e, along_e, lambda step: (z, e + step * along_e)),
        ):
            values = [density(*moved(step))[0] for step in (1e-4, -1e-4)]
            expected = (values[0] - values[1]) / 2e-4
            found = (slope * along).flatten(1).sum(1)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_gains_are_differences_of_the_energy(float64):
    """Of a trajectory of three steps; a trajectory that is asked again is the same."""
    posterior = bf.fit(models.eight_schools, datasets.eight_schools(), rounds=3, progress=False)
    clients = ChainClients.of(posterior, 4, posterior.key(1))
    z = draw_theta(posterior, 4, posterior.key(1))[GLOBAL][:, 0, 0]
    everywhere = torch.ones(4, dtype=torch.bool)
    with torch.no_grad():
        memory, moved = clients.move(None, Leap(0, 0, 0.0, z, everywhere))
        assert moved.gain.tolist() == [0.0] * 4
        began = memory
        for _ in range(2):
            gains = []
            for step in range(3):
                asked = Leap(1, step, 0.2, z + 0.1 * (step + 1), everywhere)
                memory, moved = clients.move(memory, asked)
                gains.append(moved.gain)
            r = clients._normals(1)
            before = began.now.value - r.square().sum((1, 2)) / 2
            after = memory.now.value - memory.momentum.square().sum((1, 2)) / 2
            torch.testing.assert_close(gains[-1], after - before)
        again = Memory.from_tensors(
            memory.to_tensors(), iteration=memory.iteration, step=memory.step, seen=memory.seen
        )
        one, other = (clients.move(m, Leap(2, 0, 0.2, z, ~everywhere))[1] for m in (memory, again))
        assert torch.equal(one.gain, other.gain)
        back, _ = clients.move(memory, Leap(2, 0, 0.0, z, ~everywhere))
        torch.testing.assert_close(back.start.e, began.now.e)


def test_chains_that_were_interrupted_go_on(tmp_path):
    """After any trajectory: the clients' memory and the server's file are those of a run without a break."""
    posterior = bf.fit(models.eight_schools, SCHOOLS, rounds=10, progress=False)
    key = chains.chains_key(posterior, 0)

    class Killed(Exception):
        pass

    here = MoveHere(ChainClients.of(posterior, 64, key))

    def stops(asked):
        if (asked.iteration, asked.step) == (17, 1):
            raise Killed
        return here(asked)

    file = chains.ChainsFile(tmp_path / "chains", {"of": "this"})
    with pytest.raises(Killed):
        chains.sample_chains(posterior, move=stops, resume=file)
    found = chains.sample_chains(posterior, move=here, resume=file)
    expected = chains.sample_chains(posterior)
    assert torch.equal(found.z, expected.z)
    assert found.gradients == expected.gradients


def test_a_q_that_is_far_from_the_posterior():
    """Of two rounds; within five Monte Carlo errors of 2000 draws, as in test_correction.py."""
    start = bf.fit(
        models.eight_schools, SCHOOLS, bf.SFVI(corrected=False), rounds=2, progress=False
    )
    posterior = start.with_chains()
    assert posterior.correction.rhat < 1.05
    assert posterior.khat is None
    truth, draws, before = of_grid(), posterior.sample(20_000), start.sample(20_000)
    for name, (mean, sd) in truth.items():
        assert abs(float(draws[name].mean()) - mean) < 0.11 * sd
        assert abs(float(draws[name].std()) / sd - 1) < 0.12
    mean, sd = truth["mu"]
    assert abs(float(before["mu"].mean()) - mean) > 0.3 * sd


def test_chains_start_where_importance_weights_say_that_the_posterior_is():
    """One round, whose q is forty times as wide; chains that start there do not mix, and cannot say how it differs.

    Weights integrate the clients' variables out, and chains draw them: within five Monte Carlo errors of 1500 draws.
    """
    start = bf.fit(intercepts_and_slopes(None), data(40), progress=False)
    assert start.khat < 0.3
    weighted, drawn = start.sample(20_000), start.with_chains().sample(20_000)
    for name in ("b", "tau", "sigma"):
        sd = weighted[name].std(0)
        assert ((drawn[name].mean(0) - weighted[name].mean(0)).abs() < 0.13 * sd).all()
        assert ((drawn[name].std(0) / sd).log().abs() < 0.13).all()


def test_chains_replace_weights_that_are_too_uneven(monkeypatch, tmp_path):
    """Where a run stops by itself; the file of the posterior keeps them."""
    fails = CorrectionResult(reliable=False)
    for place in ("bayesfed.output.posterior.correct", "bayesfed.fitting.correct"):
        monkeypatch.setattr(place, lambda *_, **__: fails)
    posterior = bf.fit(models.eight_schools, SCHOOLS, progress=False)
    assert posterior.correctable
    assert posterior.correction.rhat < 1.05
    assert posterior.correction.ess > 1000
    number, count = posterior.correction.chains, posterior.correction.count
    found = posterior.to_arviz(count).posterior
    assert "Hamiltonian" in found.attrs["corrected"]
    assert found.sizes["chain"] == number
    assert found.sizes["draw"] == count // number
    assert float(az.rhat(found)["mu"]) < 1.05
    assert posterior.to_arviz(50).posterior.sizes["draw"] == 4
    drawn = posterior.sample(count)["mu"].reshape(-1, number).T
    np.testing.assert_array_equal(found["mu"].values, drawn)
    posterior.save(tmp_path / "chains.safetensors")
    again = bf.Posterior.load(tmp_path / "chains.safetensors", models.eight_schools, SCHOOLS)
    assert again.correction.rhat == posterior.correction.rhat
    assert again.correction.chains == number
    assert torch.equal(again.correction.theta[GLOBAL], posterior.correction.theta[GLOBAL])
    given = bf.fit(models.eight_schools, SCHOOLS, rounds=5, progress=False)
    assert given.correction is None
    assert not given.correctable


def test_seeds_make_other_chains():
    start = bf.fit(models.eight_schools, SCHOOLS, rounds=10, progress=False)
    one, same, other = (start.with_chains(seed=s).correction.theta[GLOBAL] for s in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_where_chains_do_not_apply():
    point = bf.fit(models.eight_schools, SCHOOLS, bf.FedAvg(), rounds=2, progress=False)
    with pytest.raises(ValueError, match="q.θ. with a density"):
        point.with_chains()
    whole = bf.fit(models.eight_schools, SCHOOLS, rounds=5, progress=False)
    with pytest.raises(ValueError, match="all clients of the fit"):
        whole.select(["A", "B"]).with_chains()


def without_locals(federation):
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    b = pyro.sample("b", dist.HalfNormal(1.0))
    with federation.clients(), federation.observations() as obs:
        pyro.sample("y", dist.Normal(a * b, 0.5), obs=obs.get("y"))


def test_a_model_without_variables_of_clients_has_no_chains(monkeypatch):
    """Not even where weights are too uneven: the fit says so."""
    data = bf.Federation.from_arrays({"x": {"y": [0.3, 0.5]}, "z": {"y": [0.1]}})
    fails = CorrectionResult(reliable=False)
    for place in ("bayesfed.output.posterior.correct", "bayesfed.fitting.correct"):
        monkeypatch.setattr(place, lambda *_, **__: fails)
    posterior = bf.fit(without_locals, data, progress=False)
    assert "too uneven" in posterior.caveat
    with pytest.raises(ValueError, match="one Gaussian for all variables"):
        posterior.with_chains()


def items(federation):
    """Answers of persons, the clients, to 20 questions: a logistic model of two parameters each."""
    a = pyro.sample("a", dist.LogNormal(0.0, 0.5).expand([20]).to_event(1))
    b = pyro.sample("b", dist.Normal(0.0, 1.5).expand([20]).to_event(1))
    sd = pyro.sample("sd", dist.HalfNormal(1.0))
    with federation.clients():
        t = pyro.sample("t", dist.Normal(0.0, sd))
        with federation.observations() as obs:
            which = obs["item"]
            logits = (a * which).sum(-1) * (t - (b * which).sum(-1))
            pyro.sample("y", dist.Bernoulli(logits=logits), obs=obs.get("y"))


def answers():
    g = np.random.default_rng(0)
    a, b, t = np.exp(0.4 * g.normal(size=20)), 1.2 * g.normal(size=20), g.normal(size=100)
    persons = {}
    for i in range(100):
        p = 1 / (1 + np.exp(-a * (t[i] - b)))
        persons[f"person {i}"] = {"item": np.eye(20), "y": (g.random(20) < p).astype(float)}
    return bf.Federation.from_arrays(persons)


# fmt: off
MEANS = (-0.81, 2.43, -0.66, 0.12, 1.02, -0.18, -0.74, -1.74, -0.46, 0.01,
         -1.08, -0.40, -0.57, 0.61, -0.04, 0.36, -0.92, -0.34, 0.54, 1.76)
SPREADS = (0.389, 0.631, 0.303, 0.282, 0.432, 0.325, 0.229, 0.478, 0.288, 0.314,
           0.384, 0.275, 0.464, 0.363, 0.260, 0.265, 0.411, 0.336, 0.227, 0.458)
# fmt: on
"""Of b, by NumPyro's NUTS, 2 chains of 2000 draws."""


@pytest.mark.slow
def test_forty_global_variables():
    """Standard deviations of q are 0.76 to 0.91 of these; weights have a k-hat of 0.9."""
    posterior = bf.fit(items, answers(), progress=False)
    assert posterior.correction.rhat < 1.05
    draws = posterior.sample(4000)["b"]
    mean, sd = torch.tensor(MEANS), torch.tensor(SPREADS)
    assert float(((draws.mean(0) - mean) / sd).abs().max()) < 0.15
    assert float((draws.std(0) / sd - 1).abs().max()) < 0.2  # kurtosis up to 8


def test_a_chain_at_which_a_matrix_has_no_factor_stays_where_it_is():
    """The last chain goes where 1 / step² is infinite; the others move as they do beside one that does not."""
    clients = {f"c{i}": {"x": np.eye(3), "y": np.arange(3.0) - i} for i in range(4)}
    federation = bf.Federation.from_arrays(clients).to(dtype=torch.float32)
    algorithm = bf.SFVI(corrected=False)
    posterior = bf.fit(rows_that_depend, federation, algorithm, rounds=3, progress=False)
    key = posterior.key(1)
    z = draw_theta(posterior, 5, key)[GLOBAL][:, 0, 0]
    far, everywhere = z.clone(), torch.ones(5, dtype=torch.bool)
    far[-1] = -60.0
    movers, found = ChainClients.of(posterior, 5, key), []
    memory, _ = movers.move(None, Leap(0, 0, 0.0, z, everywhere))
    for at in (far, z):
        found.append(movers.move(memory, Leap(1, 0, 0.1, at, everywhere))[1])
    assert float(found[0].gain[-1]) == -LARGEST and not found[0].slope[-1].any()
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one[:4], other[:4], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [1, 10, 43])
def test_quantiles_of_so_many_draws_are_within_their_tolerance(size):
    """Of sets of Normal draws 5 % have a quantile that is off by more than 0.15, or fewer where one bounds another."""
    generator = np.random.default_rng(size)
    n, sets = round(chains.draws_for_quantiles(size)), 400
    draws = generator.normal(size=(sets, n, size)).astype(np.float32)
    off = np.abs(np.quantile(draws, [0.05, 0.95], axis=1) - np.array([[[-1.645]], [[1.645]]]))
    share = (off.max((0, 2)) > 0.15).mean()
    assert 0.02 < share < 0.08  # three standard errors of 5 % are 3.3 %


def test_larger_fits_name_chains_in_place_of_running_them(monkeypatch):
    """A thousand clients would take a minute of gradients after a fit of seconds."""
    monkeypatch.setattr(chains, "QUICK", 0.0)
    found = CorrectionResult(reliable=False)
    fitted = bf.fit(models.eight_schools, datasets.eight_schools(), bf.SFVI(corrected=False))
    poor = fitted.with_correction(found)
    assert poor.correction is None
    assert "posterior.with_chains() draws from the posterior itself" in poor.caveat
    assert poor.with_chains().caveat == ""


def test_weights_that_are_not_certain_are_replaced_by_chains():
    """Of proposals that are too narrow weights are even; nothing else shows it but their effective sample size."""
    fitted = bf.fit(models.eight_schools, datasets.eight_schools(), bf.SFVI(corrected=False))
    right = fitted.corrected().correction.theta["global"]
    narrow = Correction({"global": 0.5 * right}, 0.2, ess=1e5)
    kept = fitted.with_correction(CorrectionResult(True, narrow, certain=True))
    mended = fitted.with_correction(CorrectionResult(True, narrow))
    sds = [float(p.sample(4000)["mu"].std()) for p in (kept, mended, fitted.corrected())]
    assert kept.correction.chains == 1 and mended.correction.chains > 1
    assert sds[0] < 0.7 * sds[2] and sds[1] == pytest.approx(sds[2], rel=0.1)


def test_chains_that_agree_are_used_with_fewer_draws():
    """Of chains that do not agree, no number is enough; importance weights that are more exact stay."""
    z = torch.zeros(4, 10, 2)
    few = chains.Chains(z, 1.04, 500.0, 0.8, 3000)
    assert not few.mixed
    assert few.correction().ess == 500
    assert few._replace(ess=300.0).correction() is None
    assert few._replace(rhat=1.06, ess=2000.0).correction() is None
    drawn = few.correction()
    finite = Correction(drawn.theta, 0.3, ess=900.0)
    uneven = Correction(drawn.theta, 0.57, ess=900.0)
    assert chains.better_correction(finite, drawn) is finite
    assert chains.better_correction(uneven, drawn) is drawn
    assert chains.better_correction(finite, None) is finite
    assert chains.better_correction(None, drawn) is drawn


@pytest.mark.parametrize(("shift", "lag", "stuck"), [(3.0, 0.0, True), (0.0, 0.8, False)])
def test_chains_that_stay_at_modes_of_their_own_are_given_up(shift, lag, stuck):
    """Chains that move slowly but everywhere go on: six times as many draws are enough."""
    generator = np.random.default_rng(0)
    z = np.zeros((16, 100, 2), dtype=np.float32)
    z[:, 0] = generator.normal(size=(16, 2))
    for t in range(1, 100):
        z[:, t] = lag * z[:, t - 1] + (1 - lag**2) ** 0.5 * generator.normal(size=(16, 2))
    z += shift * (np.arange(16)[:, None, None] % 2)
    found = chains._summary([*torch.as_tensor(z).unbind(1)], [0.8], 500, chains.ENOUGH)
    assert found.rhat > chains.LARGEST_RHAT
    assert found.ess < chains.FEW
    assert chains._are_stuck(found, 3000) is stuck
