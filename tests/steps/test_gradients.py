"""Steps of φ_i, differentiable in where they start or not."""

import pytest
import torch

from bayesfed.steps.gradients import adapted


def cubic(phi, step):
    return phi["w"] ** 3 / 3


@pytest.mark.parametrize("order", ["detached", "first", "second"])
def test_what_the_result_is_differentiable_in(order):
    """w ← w − w² / 4 twice: dw/dw₀ is Π (1 − w / 2) through the steps, 1 where their gradients are constants."""
    start = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    w, slope = start.detach(), torch.ones(2, dtype=torch.float64)
    for _ in range(2):
        slope = slope * (1 - w / 2)
        w = w - w**2 / 4
    found = adapted(cubic, {"w": start}, 2, 0.25, order=order)["w"]
    torch.testing.assert_close(found.detach(), w)
    assert found.requires_grad == (order != "detached")
    if order != "detached":
        (grad,) = torch.autograd.grad(found.sum(), start)
        torch.testing.assert_close(grad, slope if order == "second" else torch.ones_like(slope))


@pytest.mark.parametrize("order", ["detached", "first", "second"])
def test_nothing_is_kept_where_the_start_needs_no_gradient(order):
    found = adapted(cubic, {"w": torch.ones(2)}, 2, 0.25, order=order)["w"]
    assert not found.requires_grad
    assert found.grad_fn is None


def test_a_loss_at_each_step_knows_which_it_is():
    seen = []

    def loss(phi, step):
        seen.append(step)
        return phi["w"]

    found = adapted(loss, {"w": torch.zeros(1)}, 3, 0.5, order="detached")["w"]
    assert seen == [0, 1, 2]
    assert found.tolist() == [-1.5]


def test_an_unknown_order_is_refused():
    with pytest.raises(ValueError, match="order is 'third'"):
        adapted(cubic, {"w": torch.ones(2)}, 1, 0.5, order="third")
