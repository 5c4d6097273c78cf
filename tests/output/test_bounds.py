"""PAC-Bayes bounds: their formulas, and that they hold."""

import itertools
import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch

import bayesfed as bf
from bayesfed import bounds, models, simulations
from bayesfed.output.bounds import VacuousBound


def test_the_client_bound_by_hand():
    """Eq. 6 with numbers: a prior that has seen 80 of 100 rows."""
    epsilon = 2 * 5 * 0.1 * 2 / 80
    privacy = 80 * epsilon**2 / 2 + epsilon * math.sqrt(40 * math.log(4 / 0.05)) + math.log(2)
    by_hand = (3.0 + 25 * 4 / 800 + privacy + math.log(20)) / 5
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", VacuousBound)
        found = bounds.client(
            -3.0, rows=100, beta=5.0, low=0.0, high=2.0, delta=0.05, tau=0.1, seen=80
        )
        unseen = bounds.client(
            -3.0, rows=100, beta=5.0, low=0.0, high=2.0, delta=0.05, tau=0.1, seen=0
        )
    assert found == pytest.approx(by_hand, rel=1e-12)
    by_hand = (3.0 + 25 * 4 / 800 + math.log(2) + math.log(20)) / 5
    assert unseen == pytest.approx(by_hand, rel=1e-12)


def test_the_server_bound_by_hand():
    """Theorem 4.2 for two clients, one of whom gets as many rows again; and Lemma 4.3."""
    beta, lam, upsilon, delta = 2.0, 30.0, 0.1, 0.1
    growth = 1.0 * (math.exp(2 * 2.0 * 0.5) - math.exp(-2 * 2.0 * 0.5))
    gap = min(1.0, growth) / 2
    by_hand = (
        (1.0 + 2.0) / (2 * beta)
        + (1 / (2 * beta) + 1.1 / lam) * 0.7
        + beta / 16 * (1 / 50 + 1 / 40)
        + lam * gap**2 / (8 * 1.1)
        + math.log(10) / math.sqrt(2)
    )
    with pytest.warns(VacuousBound):
        found = bounds.server(
            [-1.0, -2.0],
            0.7,
            rows=[50, 40],
            new_rows=[50, 0],
            beta=beta,
            lam=lam,
            low=0.0,
            high=1.0,
            delta=delta,
            upsilon=upsilon,
        )
    assert found == pytest.approx(by_hand, rel=1e-12)
    with pytest.warns(VacuousBound):
        unknown = bounds.server(
            [-1.0, -2.0],
            0.7,
            rows=[50, 40],
            new_rows=None,
            beta=beta,
            lam=lam,
            low=0.0,
            high=1.0,
            delta=delta,
            upsilon=upsilon,
        )
    by_hand += 1.0 / lam * 0.7 + lam * (2 * 0.5**2 / (8 * 2.1) - gap**2 / (8 * 1.1))
    assert unknown == pytest.approx(by_hand, rel=1e-12)


def test_the_new_clients_bound_by_hand():
    by_hand = (
        (1 / (3 * 2.0) + 1.1 / 30) * 4.0
        + 4 / 24 * (2.0 * (1 / 10 + 1 / 20 + 1 / 30) + 30 / 1.1)
        + math.log(10) / math.sqrt(3)
    )
    with pytest.warns(VacuousBound):
        found = bounds.new_client(
            -4.0,
            rows=[10, 20, 30],
            changed=1,
            beta=2.0,
            lam=30.0,
            low=0.0,
            high=2.0,
            delta=0.1,
            upsilon=0.1,
        )
    assert found == pytest.approx(by_hand, rel=1e-12)


def test_at_the_optimal_hyper_posterior_the_data_terms_of_both_bounds_agree():
    """−(1 / nβ) Σ E_Q* ln Z + (1 / nβ + (n₂ + υ) / λ) KL(Q* ‖ P) = −(1 / nβ + (n₂ + υ) / λ) ln Z_τ, for five priors."""
    torch.manual_seed(0)
    n, beta, lam, changed = 4, 3.0, 50.0, 1 + 1e-4
    log_z = -5 * torch.rand(n, 5, dtype=torch.float64)
    tau = lam / (lam + beta * n * changed)
    assert bf.PACPFL(lam=lam, beta=beta, new_data_clients=1).rule.temperature(
        n, 9.0
    ) == pytest.approx(tau)
    score = tau * log_z.sum(0)
    q = score.softmax(0)
    log_z_tau = score.logsumexp(0) - math.log(5)
    kl = (q * (q * 5).log()).sum()
    weight = 1 / (n * beta) + changed / lam
    server = -(q * log_z.sum(0)).sum() / (n * beta) + weight * kl
    torch.testing.assert_close(server, -weight * log_z_tau)


# -- against enumeration: a row is 0 or 1, three hypotheses, losses below zero ---------------------------

LOSSES = torch.tensor(
    [[-1.0, 2.0], [2.0, -1.0], [0.3, 0.1]], dtype=torch.float64
)  # (hypothesis, row)
PRIOR = torch.tensor([0.9, 0.06, 0.04], dtype=torch.float64)
HEADS = 0.5


def samples(rows):
    """Yield the probability of every sample of so many rows, and the mean loss of each hypothesis."""
    for sample in itertools.product((0, 1), repeat=rows):
        yield HEADS ** sum(sample) * (1 - HEADS) ** (rows - sum(sample)), LOSSES[:, sample].mean(1)


def test_the_client_bound_over_every_sample():
    """E_S exp(β (risk − bound at δ = 1)) ≤ ½, which by Markov's inequality is the bound for every δ; the ½ is for a
    prior that may have seen the rows. A tenth is lost, and three times as much would come without Hoeffding's term."""
    risks = LOSSES @ torch.tensor([1 - HEADS, HEADS], dtype=torch.float64)
    rows, beta, expected = 8, 3.0, 0.0
    for probability, mean in samples(rows):
        score = PRIOR.log() - beta * mean
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", VacuousBound)
            bound = bounds.client(
                float(score.logsumexp(0)), rows=rows, beta=beta, low=-1.0, high=2.0, delta=1.0
            )
        expected += probability * math.exp(beta * (float(score.softmax(0) @ risks) - bound))
    assert 0.45 < expected <= 0.5


def test_epsilon_over_every_pair_of_neighbours():
    """Lemma 4.5 is tight: two priors, each of one hypothesis, the losses of which a row swaps; the first is unlikely.

    The bound's own β is √m; that of the hyper-posterior is another.
    """
    rows, trained, tau, low, high = 5, 4.0, 0.2, -1.0, 2.0
    log_q = {}
    for sample in itertools.product((0.0, 1.0), repeat=rows):
        mean = low + (high - low) * torch.tensor([sum(sample), rows - sum(sample)]).double() / rows
        hyper_prior = torch.tensor([1e-6, 1 - 1e-6], dtype=torch.float64)
        log_q[sample] = (hyper_prior.log() - tau * trained * mean).log_softmax(0)
    epsilon = max(
        float((log_q[s] - log_q[t]).abs().max())
        for s, t in itertools.combinations(log_q, 2)
        if sum(x != y for x, y in zip(s, t, strict=True)) == 1
    )
    beta, delta = math.sqrt(rows), 0.1
    paid = beta**2 * 9 / (8 * rows) + bounds.privacy_cost(epsilon, rows, delta) + math.log(10)
    with pytest.warns(VacuousBound, match="would be for any data"):
        found = bounds.client(
            -1.0,
            rows=rows,
            beta=beta,
            low=low,
            high=high,
            delta=delta,
            tau=tau,
            trained=trained,
        )
    assert found == pytest.approx((1.0 + paid) / beta, rel=1e-4)


def server(low, high, shift=0.0, new_rows=(1, 0)):
    """The server's bound of two clients whose losses are shifted, β = 0.1, λ = 8 (n₂ + υ) and no divergence."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", VacuousBound)
        return bounds.server(
            [-0.2 - 0.1 * shift, -0.3 - 0.1 * shift],
            0.0,
            rows=[3, 2],
            new_rows=list(new_rows),
            beta=0.1,
            lam=8 * (sum(extra > 0 for extra in new_rows) + 1e-4),
            low=low + shift,
            high=high + shift,
            delta=0.1,
        )


@pytest.mark.parametrize("shift", [-5.0, -2.0, 3.0])
def test_shifted_losses_shift_the_servers_bound(shift):
    """The bound rises by the shift, also if losses are negative."""
    assert server(-1.0, 2.0, shift) == pytest.approx(server(-1.0, 2.0) + shift, rel=1e-12)


def test_new_rows_move_the_risk_by_less_than_the_servers_bound_has():
    """n Δ_1 of Theorem 4.2, found from the bound, against the risk's range over every further row of every sample.

    All losses lie below zero, where the paper's factor b would have Δ < 0.
    """
    low, high, beta, widest = -3.0, 0.0, 0.1, 0.0
    shifted = LOSSES - 2.0
    risks = shifted @ torch.tensor([1 - HEADS, HEADS], dtype=torch.float64)
    for _, mean in samples(3):
        after = [
            (PRIOR.log() - beta * (3 * (mean - 2.0) + shifted[:, row]) / 4).softmax(0) @ risks
            for row in (0, 1)
        ]
        widest = max(widest, float((after[0] - after[1]).abs()))
    gap = math.sqrt(server(low, high) - server(low, high, new_rows=(0, 0)))
    assert widest < 2 * gap < high - low
    x = 2 * beta * (high - low) / 4
    assert gap == pytest.approx(3.0 * (math.exp(x) - math.exp(-x)) / 2, rel=1e-6)


# -- against simulation -----------------------------------------------------------------------------------


def thresholds(generator, rows, noise=0.1):
    """Labels of x in (0, 1) that change at a threshold of the client's, one in ten wrong."""
    at = torch.rand((), generator=generator)
    x = torch.rand(rows, generator=generator)
    flip = torch.rand(rows, generator=generator) < noise
    return at, x, (x > at) ^ flip


def test_the_client_bound_holds():
    """200 federations of one client with 50 rows, a uniform prior over 101 thresholds, 0-1 loss, δ = 0.1.

    The risk of a threshold is known: 0.1 + 0.8 times its distance to the client's. The bound may fail in a tenth of
    the federations, and by chance (binomial, two standard errors) in 14.2 % of 200.
    """
    generator = torch.Generator().manual_seed(0)
    hypotheses, beta, failed, tightest = torch.linspace(0, 1, 101), 15.0, 0, []
    for _ in range(200):
        at, x, y = thresholds(generator, 50)
        losses = ((x > hypotheses[:, None]) != y).double()
        log_z = float(bounds.log_partition(losses, beta))
        weight = (-beta * losses.mean(1)).softmax(0)
        risk = float((weight * (0.1 + 0.8 * (hypotheses - at).abs())).sum())
        bound = bounds.client(log_z, rows=50, beta=beta, low=0.0, high=1.0, delta=0.1)
        failed += risk > bound
        tightest.append(bound - risk)
    assert failed / 200 <= 0.1 + 2 * math.sqrt(0.1 * 0.9 / 200)
    assert sum(tightest) / 200 < 0.5  # and it is no trivial bound


@pytest.mark.parametrize(
    ("bound", "settings", "message"),
    [
        ("client", {"log_z": -1.0, "rows": 3, "beta": 1.0, "high": 1.0}, "never exceeds 1"),
        ("client", {"log_z": -20.0, "rows": 3, "beta": 3.0, "high": 9.0}, "would be for any data"),
        (
            "client",
            {"log_z": -1.0, "rows": 3, "beta": 3.0, "high": 1.0, "tau": 1.0},
            "for any data",
        ),
        (
            "new_client",
            {"log_z": -1.0, "rows": [5], "changed": 1, "beta": 2.0, "lam": 0.5, "high": 1.0},
            "not above √n (n₂ + υ)",
        ),
        (
            "new_client",
            {"log_z": -1.0, "rows": [5, 5], "changed": 1, "beta": 0.1, "lam": 5.0, "high": 1.0},
            "below 1 / √n",
        ),
        (  # as the paper has it λ need only exceed n₂ + υ, which is about 1 here
            "new_client",
            {"log_z": -1.0, "rows": [5] * 9, "changed": 1, "beta": 0.4, "lam": 2.9, "high": 1.0},
            "not above √n (n₂ + υ)",
        ),
        (
            "new_client",
            {"log_z": -1.0, "rows": [5] * 9, "changed": 1, "beta": 0.3, "lam": 9.0, "high": 1.0},
            "below 1 / √n = 0.333",
        ),
    ],
)
def test_vacuous_bounds_are_reported(bound, settings, message):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        getattr(bounds, bound)(**settings, low=0.0, delta=0.1)
    assert any(message in str(warning.message) for warning in said)


def test_rows_of_other_clients_are_refused():
    with pytest.raises(ValueError, match="one number for each client"):
        bounds.server(
            [-1.0],
            0.1,
            rows=[5, 6],
            new_rows=None,
            beta=1.0,
            lam=10.0,
            low=0.0,
            high=1.0,
            delta=0.1,
        )


def test_the_report_lists_bounds_and_risks():
    train, test = simulations.polynomials(clients=4, rows=30)
    posterior = bf.fit(models.GaussianProcess(), train, bf.PACPFL(particles=2, tau=1e-3), rounds=5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", VacuousBound)
        table = bounds.report(posterior, test, low=-1.0, high=3.0, draws=200)
    assert list(table.index) == list(test.names)
    assert ((table["risk"] >= -1) & (table["risk"] <= 3)).all()
    assert (table["risk"] <= table["bound"]).all()
    epsilon = (
        2 * 30 * 1e-3 * 4 / 30
    )  # the particles were fitted with β = m_i, whatever β the bound takes
    assert table["epsilon"].to_list() == pytest.approx([epsilon] * 4)
    new = bounds.report(posterior, test, low=-1.0, high=3.0, draws=200, seen=False, beta=30.0)
    assert (new["epsilon"] == 0).all() and (new["beta"] == 30).all()
    assert new["covered"].all() and not table["covered"].any()  # particles are no sample from Q*
    for _, own, there in bounds.prior_losses(posterior, test, 200, 0, -1.0, 0.5):
        for losses in (own, there):
            assert losses.min() >= -1 and losses.max() == 0.5  # cut off, of rows seen and not seen
    with pytest.raises(TypeError, match="no particles"):
        bounds.report(
            bf.fit(models.varying_intercept, bf.datasets.grunfeld(), rounds=1),
            bf.datasets.grunfeld(),
            low=0.0,
            high=1.0,
        )


def test_the_report_uses_the_beta_of_the_training():
    """ε_i = 2 β' τ (b − a) / m_i with PACPFL's β' = 3, under the bound's own β = √m_i."""

    def line(federation):
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        with federation.clients():
            a = pyro.sample("a", dist.Normal(mu, 0.5))
            with federation.observations() as obs:
                pyro.sample("y", dist.Normal(a, 1.0), obs=obs.get("y"))

    rows = bf.Federation.from_arrays({"a": {"y": torch.zeros(9)}, "b": {"y": torch.ones(16)}})
    algorithm = bf.PACPFL(particles=2, tau=0.01, beta=3.0)
    posterior = bf.fit(line, rows, algorithm, rounds=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", VacuousBound)
        table = bounds.report(posterior, rows, low=0.0, high=4.0, draws=100)
    assert table["beta"].to_list() == [3.0, 4.0]
    for name, own, there in bounds.prior_losses(posterior, rows, 100, 0, 0.0, 4.0):
        gibbs = (-table["beta"][name] * own.mean(-1)).softmax(0)  # of each particle's hypotheses
        for column, losses in (("empirical", own), ("risk", there)):
            of_particles = (gibbs * losses.mean(-1)).sum(0)
            assert len(of_particles) == 2
            assert table[column][name] == pytest.approx(float(of_particles.mean()), rel=1e-5)
    assert table["epsilon"].to_list() == pytest.approx([0.24 / 9, 0.24 / 16])
