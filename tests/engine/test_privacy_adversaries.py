"""Privacy against an adversary with the model, the algorithm, all settings, all files and all clients but one."""

import dataclasses
import itertools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.guides.particles import PARTICLES

pytestmark = pytest.mark.filterwarnings("ignore:the noise that privacy adds")


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
    program = bf.start(shared, data, algorithm, rounds=1, seed=posterior.seed).program
    start, unit = program.init[PARTICLES], program.guide.unit
    part = f"gradients/{PARTICLES}"
    zero = {part: torch.zeros_like(start)}
    scale = privacy.multiplier(1, 11, 11)
    guess = dataclasses.replace(privacy, seed=privacy.seed or posterior.seed)
    drawn = guess.add_noise(zero, privacy.clip, scale, 0)[part]
    total = (posterior.params[PARTICLES] - start) / (0.01 * unit**2) + (start - 1) / 4 - drawn
    own = {name: float((rows["y"] - start.squeeze()).sum()) for name, rows in clients.items()}
    truth = float((data.select(["victim"])["y"] - start.squeeze()).sum())
    return float(total) - sum(own.values()), truth, posterior, again


@pytest.mark.usefixtures("float64")
def test_nothing_that_is_stored_reveals_the_noise():
    """Noise of scale 2 · 50 / 0.1 = 1000: within 1 of it once in 1000 trials."""
    privacy = bf.Privacy(clip=50.0, epsilon=0.1, mechanism="laplace")
    found, truth, posterior, again = recovered(0.5, privacy)
    assert abs(found - truth) > 1
    assert posterior.epsilon == pytest.approx(0.1)
    assert not torch.equal(posterior.params[PARTICLES], again.params[PARTICLES])


@pytest.mark.usefixtures("float64")
def test_a_seed_reveals_the_noise_so_that_epsilon_is_infinite():
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
    "algorithm", [bf.FedAvg(), bf.PACPFL(particles=2), bf.SFVI(), bf.Ditto()], ids=str
)
def test_stateful_clients_have_no_secret_cohorts(algorithm):
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
    memory = algorithm.name in ("SFVI", "Ditto")
    assert run.epsilon == pytest.approx(privacy.spent(10, 8 if memory else 2, 8))
    before = run.epsilon
    bf.finish(run)  # where those that keep nothing make their variables
    assert run.epsilon == before


def test_stateful_clients_leak_more_than_the_formula_for_secret_cohorts():
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


def test_warning_of_noise_that_drowns_the_signal():
    """Eight clients send 16 numbers each of norm γ at most, 8 γ together; noise of scale 2 γ each has that length."""
    data, total = datasets.eight_schools(), {"a": torch.zeros(16)}
    privacy = bf.Privacy(clip=1.0)
    with pytest.warns(UserWarning, match=r"about 1\.0 times as long .* 8 clients .*16 numbers"):
        privacy.warn_if_loud(total, 1.0, 8)
    privacy.warn_if_loud(total, 0.5, 8)
    loud = bf.Privacy(clip=1.0, noise=3.0, mechanism="laplace")
    run = bf.start(models.eight_schools, data, bf.FedAvg(), rounds=2, privacy=loud)
    with pytest.warns(
        UserWarning, match="the result may be off by more than its standard deviations"
    ):
        bf.step(run)


def test_warning_of_noise_that_moves_a_posterior_by_its_own_width():
    """Whatever the length of what clients send, a q(θ) that is narrow beside the noise does not know where it is."""
    privacy = bf.Privacy(clip=1.0)
    with pytest.warns(UserWarning, match=r"would move q\(θ\) by 0\.6 of its standard deviations"):
        privacy.warn_if_disturbed(0.6)
    privacy.warn_if_disturbed(0.4)
    data = datasets.eight_schools()
    shaken = bf.Privacy(clip=1.0, noise=0.2, seed=0)
    run = bf.start(models.eight_schools, data, rounds=1, privacy=shaken)
    with pytest.warns(UserWarning, match="would move q"):
        bf.step(run)


@pytest.mark.usefixtures("float64")
def test_patients_as_clients_are_the_same_fit_as_hospitals():
    """A model without variables of a client, a step a round: then ε of a client is ε of a row of the same fit."""
    rows = {name: [0.5, 1.5, 2.5][: 1 + i] for i, name in enumerate(["north", "south", "west"])}
    hospitals = bf.Federation.from_arrays({name: {"y": y} for name, y in rows.items()})
    patients = bf.Federation.from_arrays(
        {f"{name} {i}": {"y": [v]} for name, y in rows.items() for i, v in enumerate(y)}
    )
    algorithm = bf.FedAvg(lr=0.1, local_steps=1, optimizer="sgd")
    found = [bf.fit(shared, data, algorithm, rounds=3, seed=0) for data in (hospitals, patients)]
    for name, value in found[0].params.items():
        torch.testing.assert_close(value, found[1].params[name])
