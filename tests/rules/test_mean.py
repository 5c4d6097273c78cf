"""Means of the clients' moves, and the average of θ over the last rounds."""

import pytest
import torch

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.settings import SettingsError


def thetas(rounds: int, **settings: object) -> tuple[list[torch.Tensor], bf.Posterior]:
    """Return θ after each round, two of eight clients in each, and the posterior."""
    run = bf.start(
        models.eight_schools,
        datasets.eight_schools(),
        bf.FedAvg(lr=0.05, **settings),
        rounds=rounds,
        clients_per_round=2,
        seed=3,
    )
    found = []
    for _ in range(rounds):
        bf.step(run)
        found.append(torch.cat([value.flatten() for value in run.server["theta"].values()]))
    return found, bf.finish(run)


def of(posterior: bf.Posterior) -> torch.Tensor:
    return torch.cat([value.flatten() for value in posterior.params.values()])


def test_the_posterior_has_the_mean_of_the_rounds_while_these_are_few() -> None:
    found, posterior = thetas(5, averaged_rounds=5)
    torch.testing.assert_close(of(posterior), torch.stack(found).mean(0))


def test_later_rounds_move_the_average_by_a_part() -> None:
    found, posterior = thetas(9, averaged_rounds=4)
    weights = [0.75**5 / 4] * 4 + [0.25 * 0.75**k for k in (4, 3, 2, 1, 0)]
    assert sum(weights) == pytest.approx(1)
    expected = sum(weight * theta for weight, theta in zip(weights, found, strict=True))
    torch.testing.assert_close(of(posterior), expected)


def test_clients_are_sent_the_last_theta_all_the_same() -> None:
    averaged, posterior = thetas(6, averaged_rounds=3)
    plain, last = thetas(6)
    torch.testing.assert_close(averaged, plain, rtol=0, atol=0)
    torch.testing.assert_close(of(last), plain[-1], rtol=0, atol=0)
    assert not torch.allclose(of(posterior), of(last))


def test_without_a_number_of_rounds_the_optimum_is_not_averaged() -> None:
    fits = [
        bf.fit(models.eight_schools, datasets.eight_schools(), bf.FedAvg(averaged_rounds=number))
        for number in (1, 5)
    ]
    torch.testing.assert_close(*map(of, fits), rtol=0, atol=0)


def test_variants_of_another_rule_lack_the_setting() -> None:
    with pytest.raises(SettingsError, match="averaged_rounds is unknown"):
        bf.FedNova(averaged_rounds=3)
    assert bf.FedProx(averaged_rounds=3).rule.averaged_rounds == 3
