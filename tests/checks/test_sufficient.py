"""Fewer rows against those that they replace: distinct rows and rows of moments, on several likelihoods."""

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

import bayesfed as bf
from bayesfed.checks import sufficient
from bayesfed.checks.sufficient import with_sufficient_rows
from bayesfed.data.moments import rows_of_moments
from bayesfed.engine.program import build_program

CLIENTS, ROWS = 20, 300


def data(seed: int = 0) -> bf.Federation:
    generator = np.random.default_rng(seed)
    clients = {}
    for i in range(CLIENTS):
        rows = ROWS + i if i else 2
        x = generator.normal([3.0, 0.0], size=(rows, 2))
        own = np.full(rows, generator.normal())
        y = 1.0 + x @ [0.5 + 0.3 * generator.normal(), -0.4] + 0.2 * own
        y = y + 0.7 * generator.normal(size=rows)
        clients[f"c{i}"] = {"x": x, "own": own, "y": y}
    return bf.Federation.from_arrays(clients)


def program_of(outcome, more=None):
    """A hierarchy with an intercept and a slope of each client, whose outcome is the given distribution of the mean."""

    def model(federation):
        b = pyro.sample("b", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
        extra = more() if more else 0.0
        with federation.clients():
            level = federation.of_clients("own")
            u = pyro.sample("u", dist.Normal(level.new_zeros(2), tau[..., None]).to_event(1))
            with federation.observations() as obs:
                own = b + u
                mean = own[..., 0] + own[..., 1] * obs["x"][..., 0] + 0.5 * obs["x"][..., 1]
                pyro.sample(
                    "y", outcome(mean + level * b[..., 0], sigma, obs, extra), obs=obs.get("y")
                )

    return model


def small(name):
    return lambda: pyro.sample(name, dist.Normal(0.0, 1e-3))


QUADRATIC = {
    "Normal": lambda m, s, o, e: dist.Normal(m, s),
    "another unit": lambda m, s, o, e: dist.Normal(1000 * m, 1000 * s),
    "its own spread": lambda m, s, o, e: dist.Normal(m, s * (1 + o["own"] ** 2)),
}
NOT_QUADRATIC = {
    "Student-t": (lambda m, s, o, e: dist.StudentT(30.0, m, s), None),
    "spread of the rows": (
        lambda m, s, o, e: dist.Normal(m, s * (1 + 0.1 * o["x"][..., 1] ** 2)),
        None,
    ),
    "bent": (lambda m, s, o, e: dist.Normal(torch.nn.functional.softplus(m), s), None),
    "log-Normal": (lambda m, s, o, e: dist.LogNormal(m, s), None),
    "a small curve": (lambda m, s, o, e: dist.Normal(m + e * o["x"][..., 0] ** 2, s), small("c")),
    "a small wave": (lambda m, s, o, e: dist.Normal(m + e * o["x"][..., 0].sin(), s), small("c")),
}


def found(outcome, more=None, algorithm=None, federation=None):
    federation = data() if federation is None else federation
    algorithm = algorithm or bf.SFVI()
    program = build_program(program_of(outcome, more), federation, algorithm, 0)
    return with_sufficient_rows(program, federation, algorithm)


@pytest.mark.parametrize("outcome", QUADRATIC.values(), ids=QUADRATIC)
@pytest.mark.parametrize("algorithm", [bf.SFVI(), bf.FedAvg(), bf.PFedVEM(), bf.PACPFL()], ids=str)
def test_likelihoods_that_are_quadratic_in_the_rows(outcome, algorithm):
    rows = found(outcome, algorithm=algorithm)
    assert rows.sufficient.lengths.tolist() == [2] + (CLIENTS - 1) * [5]
    assert rows.sufficient.counts.tolist() == rows.lengths.tolist()
    assert rows.lengths.sum() == data().rows


@pytest.mark.parametrize(("outcome", "more"), NOT_QUADRATIC.values(), ids=NOT_QUADRATIC)
def test_likelihoods_that_are_not_are_computed_from_all_rows(outcome, more):
    assert found(outcome, more).sufficient.rows == data().rows


def test_rows_of_few_clients_or_with_whole_numbers_stay(monkeypatch):
    normal = QUADRATIC["Normal"]
    few = data().select(["c1", "c2"])
    assert found(normal, federation=few).moments is None
    ids = bf.Federation.from_arrays(
        {
            n: {
                **{f: data().select([n])[f] for f in ("x", "own", "y")},
                "k": torch.arange(300)[: int(k)],
            }
            for n, k in [("c0", 2)]
        }
    )
    monkeypatch.setattr(sufficient, "FEWEST", 1)
    assert found(normal, federation=ids).moments is None


def test_methods_that_read_single_rows_have_all():
    """Squares of rows' gradients are no sums that moments have."""
    assert found(QUADRATIC["Normal"], algorithm=bf.FedCurv()).sufficient.rows == data().rows


def test_constants_of_a_likelihood_count(monkeypatch):
    """A Poisson outcome without covariates depends on its sum alone, but for log y!, which the evidence has."""
    rows = bf.Federation.from_arrays(
        {
            f"c{i}": {"y": np.random.default_rng(i).poisson(3.0 + i, 900).astype(float)}
            for i in range(6)
        }
    )

    def model(federation):
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        with federation.clients():
            u = pyro.sample("u", dist.Normal(0.0, 0.5))
            with federation.observations() as obs:
                pyro.sample("y", dist.Poisson((b + u).exp()), obs=obs.get("y"))

    program = build_program(model, rows, bf.SFVI(), 0)
    monkeypatch.setattr(sufficient, "rows_of_patterns", lambda *_: None)
    assert with_sufficient_rows(program, rows, bf.SFVI()).moments is None


@pytest.mark.parametrize("algorithm", [bf.FedAvg(), bf.FOLA()], ids=str)
def test_clients_are_weighted_by_all_of_their_rows(algorithm, monkeypatch):
    """By n_i, not by d + 1: clients have different numbers of rows here."""
    rows, model = data(), program_of(QUADRATIC["Normal"])
    rows = rows.select(rows.names[1:])
    how = {"rounds": 6, "progress": False, "execution": bf.Execution(compile=False)}
    few = bf.fit(model, rows, algorithm, **how)
    assert few.federation.moments is not None
    monkeypatch.setattr(sufficient, "FEWEST", 10**9)
    for name, value in bf.fit(model, rows, algorithm, **how).params.items():
        torch.testing.assert_close(few.params[name], value, rtol=0.05, atol=0.02)


def wards(whole: bool = False, jitter: float = 0.0) -> bf.Federation:
    """Rows of a binary outcome, a binary and a categorical predictor: at most 12 of a client differ."""
    generator = np.random.default_rng(0)
    clients = {}
    for i in range(CLIENTS):
        x = generator.integers(0, [2, 3], size=(ROWS, 2)) + jitter * generator.random((ROWS, 2))
        p = 1 / (1 + np.exp(-0.5 * generator.normal() - x @ [0.6, -0.4]))
        died = torch.as_tensor(generator.random(ROWS) < p)
        y = died.long() if whole else died.float()
        clients[f"c{i}"] = {"x": x, "own": np.full(ROWS, i / 10), "y": y}
    return bf.Federation.from_arrays(clients)


def bernoulli(mean, sigma, obs, extra):
    return dist.Bernoulli(logits=mean)


def poisson(mean, sigma, obs, extra):
    return dist.Poisson(mean.exp())


ALGORITHMS = [bf.SFVI(), bf.FedAvg(), bf.PFedVEM(), bf.PACPFL(), bf.FOLA(fisher="hessian")]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_rows_that_repeat_are_counted(algorithm):
    rows = found(bernoulli, algorithm=algorithm, federation=wards())
    few = rows.sufficient
    assert few.lengths.max() <= 12
    assert few.counts.tolist() == rows.lengths.tolist()
    for one, other in zip(rows.names, few.names, strict=True):
        parts = torch.cat([rows.select([one])["x"], rows.select([one])["y"][:, None]], 1)
        own = few.select([other])
        again = torch.cat([own["x"], own["y"][:, None]], 1).repeat_interleave(own.weights.long(), 0)
        assert sorted(parts.tolist()) == sorted(again.tolist())


def test_whole_numbers_that_repeat_are_counted_and_rows_that_differ_are_not():
    whole = wards(whole=True)
    assert not whole["y"].is_floating_point()
    assert found(poisson, federation=whole).sufficient.rows < 300
    differ = wards(jitter=0.1)
    assert found(bernoulli, federation=differ).sufficient.rows == differ.rows


def test_squared_gradients_of_rows_are_those_of_all_rows():
    """FOLA's Fisher information adds up squares of single rows."""

    def model(federation):
        b = pyro.sample("b", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with federation.clients(), federation.observations() as obs:
            mean = (b * obs["x"]).sum(-1)
            pyro.sample("y", dist.Normal(mean, 1.0), obs=obs.get("y"))

    for fisher in ("per-sample", "hessian"):
        algorithm = bf.FOLA(fisher=fisher)
        posterior = bf.fit(model, data(), algorithm, rounds=1, progress=False)
        assert (posterior.federation.moments is None) == (fisher == "per-sample")


@pytest.mark.parametrize(
    "algorithm", [bf.SFVI(corrected=False), bf.PVI(corrected=False), bf.FedAvg()], ids=str
)
def test_rounds_on_counted_rows_are_those_on_all_rows(monkeypatch, algorithm):
    model = program_of(bernoulli)
    fits = []
    for fewest in (1, 10**9):
        monkeypatch.setattr(sufficient, "FEWEST", fewest)
        fits.append(bf.fit(model, wards(), algorithm, rounds=2, progress=False))
    one, other = fits
    assert one.federation.sufficient.rows < 300 and other.federation.moments is None
    for name, value in one.params.items():
        torch.testing.assert_close(value, other.params[name], rtol=1e-3, atol=1e-3)
    assert one.log_likelihood(num_samples=5)["y"].shape == (5, other.federation.rows)


def test_a_variable_of_the_row_is_summed_out_once_for_equal_rows(monkeypatch):
    """A program that runs for one client and one draw: its weights enter through vmap."""

    def model(federation):
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        with federation.clients():
            u = pyro.sample("u", dist.Normal(b, 1.0))
            with federation.observations() as obs:
                wrong = pyro.sample("wrong", dist.Bernoulli(0.1))
                logits = (u + obs["x"][..., 0]) * (1 - 2 * wrong)
                pyro.sample("y", dist.Bernoulli(logits=logits), obs=obs.get("y"))

    found = []
    for fewest in (1, 10**9):
        monkeypatch.setattr(sufficient, "FEWEST", fewest)
        found.append(bf.fit(model, wards(), rounds=2, progress=False))
    assert found[0].federation.sufficient.rows < 300 and found[1].federation.moments is None
    for name, value in found[0].params.items():
        torch.testing.assert_close(value, found[1].params[name], rtol=1e-3, atol=1e-3)


def test_moments_are_those_of_the_rows(float64):
    rows = data()
    few = rows_of_moments(rows)
    for name in rows.names:
        one, other = (
            torch.cat([part["x"], part["own"][:, None], part["y"][:, None]], 1)
            for part in (rows.select([name]), few.select([name]))
        )
        torch.testing.assert_close(one.mean(0), other.mean(0), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(one.mT @ one / len(one), other.mT @ other / len(other))
        assert (other[:, 2] == other[0, 2]).all()  # a number that is constant stays so


def test_a_fit_is_the_same(monkeypatch):
    """Posterior, checks and log likelihoods, which are those of all rows."""
    model, rows = program_of(QUADRATIC["Normal"]), data()
    one = bf.fit(model, rows, seed=1, progress=False)
    assert one.federation.sufficient.rows < 100
    monkeypatch.setattr(sufficient, "FEWEST", 10**9)
    other = bf.fit(model, rows, seed=1, progress=False)
    assert other.federation.moments is None
    a, b = one.sample(4000), other.sample(4000)
    for name, value in a.items():
        sd = b[name].std(0)
        assert ((value.mean(0) - b[name].mean(0)).abs() < 0.1 * sd).all()
        assert ((value.std(0) / sd - 1).abs() < 0.1).all()
    assert one.log_likelihood(num_samples=10)["y"].shape == (10, rows.rows)
    assert one.personalize(rows.select(["c3"])).federation.rows == ROWS + 3


def test_a_saved_posterior_gives_the_same_draws(tmp_path):
    model, rows = program_of(QUADRATIC["Normal"]), data()
    posterior = bf.fit(model, rows, rounds=5, progress=False)
    posterior.save(tmp_path / "fit.safetensors")
    again = bf.Posterior.load(tmp_path / "fit.safetensors", model, rows)
    for name, value in posterior.sample(50).items():
        assert torch.equal(value, again.sample(50)[name])
    torch.testing.assert_close(posterior.elbo(20), again.elbo(20))
