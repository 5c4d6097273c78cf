"""Clipping, noise and what they cost, for any aggregation rule."""

import dataclasses
import itertools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.stats import kstest

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.guides.particles import PARTICLES


@pytest.mark.parametrize("mechanism", ["gaussian", "laplace"])
def test_an_upload_is_clipped_in_its_mechanisms_norm(mechanism):
    order = {"gaussian": 2, "laplace": 1}[mechanism]
    torch.manual_seed(0)
    length = torch.linspace(0.01, 3, 50)
    upload = {"a": length[:, None, None] * torch.randn(50, 3, 2), "b": length * torch.randn(50)}
    clipped = bf.Privacy(clip=2.0, mechanism=mechanism).clipped(upload)
    flat, before = (torch.cat([v["a"].flatten(1), v["b"][:, None]], 1) for v in (clipped, upload))
    norm = before.norm(order, dim=1)
    assert (norm > 2).any() and (norm < 2).any()
    assert (flat.norm(order, dim=1) <= 2 * (1 + 1e-6)).all()
    torch.testing.assert_close(flat[norm < 2], before[norm < 2], rtol=0, atol=0)
    ratio = flat / before
    torch.testing.assert_close(ratio, ratio[:, :1].expand_as(ratio))  # only its length changes


@pytest.mark.parametrize("seed", [0, None])
@pytest.mark.parametrize("mechanism", ["gaussian", "laplace"])
def test_the_noise_has_the_scale_that_it_says(mechanism, seed):
    """100,000 draws: the standard error of an estimated scale is 0.3 % or less, so that 1.5 % is five of them; the law
    by Kolmogorov-Smirnov, which fails once in 100,000 runs without a seed."""
    privacy = bf.Privacy(clip=1.5, noise=0.7, mechanism=mechanism)
    total = {"a": torch.zeros(50_000, 2, dtype=torch.float64)}
    drawn = dataclasses.replace(privacy, seed=seed).noisy(total, 0.7, 0)["a"].flatten()
    scale = 2 * 1.5 * 0.7
    found = float(drawn.std() if mechanism == "gaussian" else drawn.abs().mean())
    assert found == pytest.approx(scale, rel=0.015)
    law = {"gaussian": "norm", "laplace": "laplace"}[mechanism]
    assert kstest(drawn.numpy() / scale, law).pvalue > 1e-5


def test_laplace_noise_keeps_epsilon():
    """The privacy loss of one release, audited: ln p(x | one) − ln p(x | other) ≤ ε for neighbours 2 γ apart in L1."""
    epsilon = 0.8
    privacy = bf.Privacy(clip=1.0, epsilon=epsilon, mechanism="laplace")
    scale = 2 * privacy.multiplier(rounds=1, cohort=5, clients=5)
    law = torch.distributions.Laplace(torch.tensor([0.0, 0.0]), scale)
    other = torch.distributions.Laplace(torch.tensor([0.5, 1.5]), scale)  # Σ |difference| = 2 γ
    x = torch.linspace(-20, 20, 401)
    grid = torch.cartesian_prod(x, x)
    loss = (law.log_prob(grid) - other.log_prob(grid)).sum(1)
    assert float(loss.abs().max()) == pytest.approx(epsilon, rel=1e-5)


def test_laplace_composes_and_is_amplified():
    privacy = bf.Privacy(clip=1.0, noise=4.0, mechanism="laplace")
    assert privacy.spent(10, 5, 5) == pytest.approx(10 / 4.0)
    a_round = math.log(1 + 0.1 * (math.exp(1 / 4.0) - 1))
    assert privacy.spent(10, 5, 50) == pytest.approx(10 * a_round)


@pytest.mark.parametrize("mechanism", ["gaussian", "laplace"])
@pytest.mark.parametrize("cohort", [12, 60])
def test_a_requested_epsilon_sets_the_noise(mechanism, cohort):
    privacy = bf.Privacy(clip=1.0, epsilon=3.0, delta=1e-4, mechanism=mechanism)
    assert privacy.spent(50, cohort, 60) == pytest.approx(3.0, rel=1e-3)
    given = bf.Privacy(
        clip=1.0, noise=privacy.multiplier(50, cohort, 60), delta=1e-4, mechanism=mechanism
    )
    assert given.spent(50, cohort, 60) == pytest.approx(3.0, rel=1e-3)


def test_gaussian_accounting_against_a_closed_form():
    """One release: δ(ε) of the Gaussian mechanism is known exactly (Balle & Wang 2018, eq. 6); Rényi's bound is above
    it and not by far."""
    multiplier, delta = 2.0, 1e-5
    found = bf.Privacy(clip=1.0, noise=multiplier, delta=delta).spent(1, 4, 4)
    normal = torch.distributions.Normal(0.0, 1.0)

    def spent_delta(epsilon):
        a, b = 1 / (2 * multiplier), epsilon * multiplier
        first, second = (normal.cdf(torch.tensor(v, dtype=torch.float64)) for v in (a - b, -a - b))
        return float(first - math.exp(epsilon) * second)

    low, high = 0.0, 10.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if spent_delta(middle) > delta else (low, middle)
    assert low <= found <= 1.3 * low


@pytest.mark.parametrize(
    "algorithm",
    [bf.SFVI(), bf.SFVIAvg(), bf.PVI(), bf.PACPFL(particles=2)],
    ids=lambda a: type(a).__name__,
)
def test_no_noise_and_no_clipping_is_no_privacy(algorithm):
    schools = datasets.eight_schools()
    runs = [
        bf.fit(
            models.eight_schools, schools, algorithm, rounds=4, clients_per_round=5, privacy=privacy
        )
        for privacy in (None, bf.Privacy(clip=math.inf))
    ]
    for name, value in runs[0].params.items():
        assert torch.equal(value, runs[1].params[name])
    assert runs[0].epsilon is None and runs[1].epsilon == math.inf


def test_the_sum_is_private_not_the_uploads_one_by_one():
    """Noise is drawn once a round, whatever the chunks."""
    schools = datasets.eight_schools()
    privacy = bf.Privacy(clip=0.5, noise=1.0, mechanism="laplace", seed=0)
    runs = [
        bf.fit(
            models.eight_schools,
            schools,
            rounds=3,
            privacy=privacy,
            execution=bf.Execution(chunk_size=size),
        )
        for size in (8, 3)
    ]
    for name, value in runs[0].params.items():
        torch.testing.assert_close(value, runs[1].params[name], rtol=1e-4, atol=1e-5)


def test_what_a_run_spends_is_kept(tmp_path):
    schools = datasets.eight_schools()
    privacy = bf.Privacy(clip=1.0, epsilon=5.0, mechanism="laplace")
    posterior = bf.fit(models.eight_schools, schools, rounds=3, privacy=privacy)
    assert posterior.epsilon == pytest.approx(5.0)
    assert "ε = 5" in repr(posterior)
    posterior.save(tmp_path / "run.safetensors")
    loaded = bf.Posterior.load(tmp_path / "run.safetensors", models.eight_schools, schools)
    assert loaded.epsilon == posterior.epsilon
    assert posterior.to_arviz(40).posterior.attrs["epsilon"] == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip": 0.0}, "clip is 0.0"),
        ({"clip": 1.0, "epsilon": 1.0, "noise": 1.0}, "either epsilon"),
        ({"clip": 1.0, "epsilon": -1.0}, "epsilon is -1.0"),
        ({"clip": 1.0, "noise": -1.0}, "noise is -1.0"),
        ({"clip": 1.0, "delta": 1.0}, "delta is 1.0"),
        ({"clip": 1.0, "mechanism": "exponential"}, "must be 'gaussian' or 'laplace'"),
        ({"clip": math.inf, "epsilon": 1.0}, "needs a finite clip"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        bf.Privacy(**settings)


def test_it_is_plain_data():
    assert dataclasses.asdict(bf.Privacy(clip=1.0)) == {
        "clip": 1.0,
        "epsilon": None,
        "noise": None,
        "delta": 1e-5,
        "mechanism": "gaussian",
        "seed": None,
    }


# -- the adversary, who knows the model, the algorithm, all settings, all files and all clients but one ------------


def shared(federation):
    """A mean that all clients share."""
    mu = pyro.sample("mu", dist.Normal(1.0, 2.0))
    with federation.clients(), federation.observations() as obs:
        pyro.sample("y", dist.Normal(mu, 1.0), obs=obs.get("y"))


def recovered(secret, privacy):
    """The victim's upload as the adversary works it out, and as it is: of one round of gradients."""
    generator = torch.Generator().manual_seed(0)
    clients = {f"c{i}": {"y": 1 + torch.randn(5, generator=generator)} for i in range(10)}
    data = bf.Federation.from_arrays(clients | {"victim": {"y": torch.full((5,), 1.0 + secret)}})
    algorithm = bf.PACPFL(particles=1, optimizer="sgd", lr=0.01, lr_decay=1.0)
    posterior = bf.fit(shared, data, algorithm, rounds=1, privacy=privacy)
    again = bf.fit(shared, data, algorithm, rounds=1, privacy=privacy, seed=posterior.seed)
    start = bf.start(shared, data, algorithm, rounds=1, seed=posterior.seed).program.init[PARTICLES]
    zero = {PARTICLES: torch.zeros_like(start)}
    scale = privacy.multiplier(1, 11, 11)
    guess = dataclasses.replace(privacy, seed=privacy.seed or posterior.seed)
    drawn = guess.noisy(zero, scale, 0)[PARTICLES]
    total = (posterior.params[PARTICLES] - start) / 0.01 + (start - 1) / 4 - drawn
    own = {name: float((rows["y"] - start.squeeze()).sum()) for name, rows in clients.items()}
    truth = float((data.select(["victim"])["y"] - start.squeeze()).sum())
    return float(total) - sum(own.values()), truth, posterior, again


@pytest.mark.usefixtures("float64")
def test_nothing_that_is_kept_tells_the_noise():
    """Noise of scale 2 · 50 / 0.1 = 1000: within 1 of it once in 1000 trials."""
    privacy = bf.Privacy(clip=50.0, epsilon=0.1, mechanism="laplace")
    found, truth, posterior, again = recovered(0.5, privacy)
    assert abs(found - truth) > 1
    assert posterior.epsilon == pytest.approx(0.1)
    assert not torch.equal(posterior.params[PARTICLES], again.params[PARTICLES])


@pytest.mark.usefixtures("float64")
def test_a_seed_tells_the_noise_and_is_no_privacy():
    privacy = bf.Privacy(clip=50.0, epsilon=0.1, mechanism="laplace", seed=3)
    found, truth, posterior, again = recovered(0.5, privacy)
    assert found == pytest.approx(truth, rel=1e-4)
    assert posterior.epsilon == math.inf
    assert torch.equal(posterior.params[PARTICLES], again.params[PARTICLES])


def test_private_cohorts_are_secret():
    """Twelve cohorts of 4 of 8 clients are the same twice once in 70^12 trials."""
    schools, seen = datasets.eight_schools(), []
    for privacy in (
        bf.Privacy(clip=1.0, noise=1e-3, mechanism="laplace", seed=s) for s in (None, None, 1, 1)
    ):
        rounds = []
        bf.fit(
            models.eight_schools,
            schools,
            bf.FedAvg(),
            rounds=12,
            clients_per_round=4,
            privacy=privacy,
            callbacks=[rounds.append],
        )
        assert all(len(set(r.cohort)) == 4 for r in rounds)
        seen.append([r.cohort for r in rounds])
    assert seen[0] != seen[1] and seen[2] == seen[3]


@pytest.mark.parametrize(
    "algorithm", [bf.FedAvg(), bf.PACPFL(particles=2), bf.SFVI(), bf.PVI()], ids=str
)
def test_memory_forgoes_the_secrecy_of_cohorts(algorithm):
    """What a client that keeps something sends depends on the cohorts it was in: no theorem makes less of that."""
    privacy = bf.Privacy(clip=1.0, noise=4.0, mechanism="laplace")
    run = bf.start(
        models.eight_schools,
        datasets.eight_schools(),
        algorithm,
        rounds=10,
        clients_per_round=2,
        privacy=privacy,
    )
    memory = isinstance(algorithm, bf.SFVI | bf.PVI)
    assert run.epsilon == pytest.approx(privacy.spent(10, 8 if memory else 2, 8))
    before = run.epsilon
    bf.finish(run)  # where those that keep nothing make their variables
    assert run.epsilon == before


def test_memory_leaks_more_than_the_formula_for_secret_cohorts():
    """The whole of a game: 3 clients, cohorts of 2, 2 rounds, ε' = 1 a round. The victim sends γ or −γ; another client
    one of them by whether it was in the first cohort. The adversary sees sums so large that each upload u counts by
    exp(u / 2γ), the most that Laplace noise tells. Over all ways in which the others may choose, the loss exceeds what
    the theorem for clients without memory allows; that of all rounds holds.
    """
    cohorts = list(itertools.combinations(range(3), 2))
    pasts = ((), (False,), (True,))

    def loss(choices):
        others = dict(zip(itertools.product((1, 2), pasts), choices, strict=True))
        chance = {1: 0.0, -1: 0.0}
        for bit in chance:
            for drawn in itertools.product(cohorts, repeat=2):
                total = 0
                for number, cohort in enumerate(drawn):
                    for i in cohort:
                        past = tuple(i in before for before in drawn[:number])
                        total += bit if i == 0 else others[i, past]
                chance[bit] += math.exp(total / 2)
        return math.log(chance[1] / chance[-1])

    worst = max(loss(choices) for choices in itertools.product((-1, 1), repeat=6))
    privacy = bf.Privacy(clip=1.0, noise=1.0, mechanism="laplace")
    assert privacy.spent(2, 2, 3) < worst <= privacy.spent(2, 3, 3)
