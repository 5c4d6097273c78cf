"""The server's part of SFVI: the terms that it keeps of its clients."""

import torch

from bayesfed.rules import NaturalGradient
from bayesfed.rules.natural_gradient import QUADRATIC


def test_a_stale_update_has_as_much_left_as_if_it_had_been_in_time():
    of_two = {name: torch.full((3,), 4.0) for name in QUADRATIC}
    server = {"quadratic": {"level": torch.tensor(3.0)}}
    total = {
        "quadratic": of_two,
        "forgetting": {"level": torch.tensor(2.0)},
        "gradients": {"mu": torch.ones(2)},
        "mean gradient": {"rate": torch.ones(1)},
    }
    found = NaturalGradient().stale(server, total, 2)
    assert found.keys() == {"quadratic", "mean gradient"}
    assert found["quadratic"].keys() == of_two.keys()
    for name, value in of_two.items():
        left = value * torch.tensor(-2.0).exp()
        torch.testing.assert_close(found["quadratic"][name], left)
    assert torch.equal(found["mean gradient"]["rate"], total["mean gradient"]["rate"])
