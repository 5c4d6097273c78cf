import pytest
import torch

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.settings import SettingsError
from bayesfed.steps import Descent, optimizer

pytestmark = pytest.mark.usefixtures("float64")


def start():
    generator = torch.Generator().manual_seed(0)
    return {"a": torch.randn(3, 2, generator=generator), "b": torch.randn(3, generator=generator)}


def gradients(params):
    """Of −½ a² + sin b, uphill."""
    return {"a": -params["a"], "b": params["b"].cos()}


def torch_adam(params, lr, betas=(0.9, 0.999)):
    leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
    return leaves, torch.optim.Adam(leaves.values(), lr=lr, betas=betas, maximize=True)


@pytest.mark.parametrize("rows", [None, 3], ids=["server", "a row per client"])
def test_it_is_adam(rows):
    """Step by step, on gradients that fall so that Adam's direction stays below 1 (asserted)."""
    state = optimizer.init(start(), rows=rows)
    leaves, theirs = torch_adam(start(), 0.1)
    for step in range(30):
        grads = {n: g * 0.8**step for n, g in gradients(state["params"]).items()}
        before = state["params"]
        for name, leaf in leaves.items():
            leaf.grad = grads[name].clone()
        theirs.step()
        state = optimizer.ascend(state, grads, 0.1)
        for name, leaf in leaves.items():
            assert ((state["params"][name] - before[name]).abs() <= 0.1 * (1 + 1e-12)).all()
            torch.testing.assert_close(state["params"][name], leaf.detach(), rtol=0, atol=1e-12)


def test_beta2_is_torchs():
    state = optimizer.init(start())
    leaves, theirs = torch_adam(start(), 0.1, (0.8, 0.99))
    for step in range(10):
        grads = {n: g * 0.7**step for n, g in gradients(state["params"]).items()}
        for name, leaf in leaves.items():
            leaf.grad = grads[name].clone()
        theirs.step()
        state = optimizer.ascend(state, grads, 0.1, beta1=0.8, beta2=0.99)
    for name, leaf in leaves.items():
        torch.testing.assert_close(state["params"][name], leaf.detach(), rtol=0, atol=1e-12)


def test_the_direction_is_clipped_to_one():
    """After small gradients a large one makes Adam's direction exceed 1: torch's step is longer."""
    params = {"w": torch.zeros(2)}
    state = optimizer.init(params)
    leaves, theirs = torch_adam(params, 0.1)
    for scale in [0.001] * 100 + [1.0] * 5:
        grads = {"w": scale * torch.tensor([1.0, -1.0])}
        before, theirs_before = state["params"]["w"], leaves["w"].detach().clone()
        leaves["w"].grad = grads["w"].clone()
        theirs.step()
        state = optimizer.ascend(state, grads, 0.1)
    longer = leaves["w"].detach() - theirs_before
    assert (longer.abs() > 0.15).all()
    torch.testing.assert_close(
        state["params"]["w"] - before, torch.tensor([0.1, -0.1]), rtol=0, atol=1e-12
    )


def test_rows_step_by_themselves():
    """A client that was absent keeps its state, and later steps as if it had been alone."""
    together = optimizer.init(start(), rows=3)
    alone = {
        i: optimizer.take(optimizer.init(start(), rows=3), torch.tensor([i])) for i in range(3)
    }
    for cohort in ([0, 2], [2], [0, 1, 2], [1, 2]):
        rows = torch.tensor(cohort)
        state = optimizer.take(together, rows)
        absent = [i for i in range(3) if i not in cohort]
        before = optimizer.take(together, torch.tensor(absent, dtype=torch.int64))
        optimizer.put(together, rows, optimizer.ascend(state, gradients(state["params"]), 0.1))
        after = optimizer.take(together, torch.tensor(absent, dtype=torch.int64))
        for part, tensors in before.items():
            for name, tensor in tensors.items():
                assert torch.equal(tensor, after[part][name])
        for i in cohort:
            alone[i] = optimizer.ascend(alone[i], gradients(alone[i]["params"]), 0.1)
    assert together["step"]["step"].tolist() == [2, 2, 4]
    for i, state in alone.items():
        assert torch.equal(
            optimizer.take(together, torch.tensor([i]))["params"]["a"], state["params"]["a"]
        )


def test_it_is_a_pure_function():
    params = start()
    state = optimizer.init(params, rows=3)
    optimizer.ascend(state, gradients(params), 0.1)
    assert all(torch.equal(value, start()[name]) for name, value in state["params"].items())
    assert state["step"]["step"].tolist() == [0, 0, 0]
    assert all((value == 0).all() for part in ("mean", "square") for value in state[part].values())


def test_a_zero_gradient_moves_nothing():
    params = start()
    state = optimizer.ascend(optimizer.init(params), {n: v * 0 for n, v in params.items()}, 0.1)
    assert all(torch.equal(value, params[name]) for name, value in state["params"].items())


@pytest.mark.parametrize("rule", ["sgd", "momentum", "adam"])
def test_descent_is_torchs(rule):
    """Against torch.optim, on gradients that fall; a client that rests keeps its whole state."""
    state = optimizer.begin(rule, start(), rows=3)
    leaves = {name: value.clone().requires_grad_() for name, value in start().items()}
    theirs = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    }[rule](list(leaves.values()))
    everyone = torch.ones(3, dtype=torch.bool)
    for step in range(10):
        grads = {n: -g * 0.8**step for n, g in gradients(state["params"]).items()}
        for name, leaf in leaves.items():
            leaf.grad = grads[name].clone()
        theirs.step()
        state = optimizer.descend(rule, state, grads, 0.1, everyone)
        for name, leaf in leaves.items():
            torch.testing.assert_close(state["params"][name], leaf.detach(), rtol=0, atol=1e-12)
    active = torch.tensor([True, False, True])
    after = optimizer.descend(rule, state, gradients(state["params"]), 0.1, active)
    for part, tensors in state.items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor[1], after[part][name][1])
    assert not torch.equal(after["params"]["a"][0], state["params"]["a"][0])


@pytest.mark.parametrize("rule", ["sgd", "momentum", "adam"])
def test_short_steps_beside_a_large_value_are_not_rounded_in_its_unit(rule):
    """A step of 10^-4 units of 3000, from 17,000: beside 17,000 it would have been rounded to 0 or to 6."""
    state = optimizer.begin(rule, {"w": torch.tensor([17_000.0])}, rows=1)
    units = {"w": torch.tensor([3_000.0])}
    grads = {"w": torch.full_like(state["params"]["w"], 1e-3)}
    lr = 1e-4 if rule == "adam" else 0.1
    new = optimizer.descend(rule, state, grads, lr, units=units)["params"]["w"]
    assert new.item() == pytest.approx(17_000 - 0.3, abs=0.003)


def test_long_gradients_are_shortened_client_by_client():
    """To a root mean square of 1 over all of a client's numbers; others stay as they are, as do directions."""
    generator = torch.Generator().manual_seed(0)
    grads = {
        "a": torch.randn(3, 1, 2, generator=generator)
        * torch.tensor([0.1, 10.0, 0.0])[:, None, None],
        "b": torch.randn(3, generator=generator) * torch.tensor([0.1, 10.0, 0.0]),
    }
    found = optimizer.clipped(grads)
    for name in grads:
        assert torch.equal(found[name][[0, 2]], grads[name][[0, 2]])
    before, after = (torch.cat([g["a"][1].flatten(), g["b"][1:2]]) for g in (grads, found))
    torch.testing.assert_close(after.square().mean(), torch.tensor(1.0))
    torch.testing.assert_close(after / after.norm(), before / before.norm())


def test_shortening_can_be_differentiated_at_zero():
    w = torch.zeros(2, 3, requires_grad=True)
    (grad,) = torch.autograd.grad(optimizer.clipped({"w": 2 * w})["w"].sum(), w)
    assert torch.equal(grad, torch.full((2, 3), 2.0))


def test_without_a_mask_all_step():
    state = optimizer.begin("momentum", start(), rows=3)
    grads, everyone = gradients(start()), torch.ones(3, dtype=torch.bool)
    one, other = (optimizer.descend("momentum", state, grads, 0.1, a) for a in (None, everyone))
    assert all(torch.equal(one["params"][n], other["params"][n]) for n in grads)


def test_an_unknown_rule_is_refused_before_a_run():
    schools, steps = datasets.eight_schools(), Descent(optimizer="sdg")
    with pytest.raises(SettingsError, match=r'^steps\.optimizer is "sdg"; it must be .sgd'):
        bf.start(models.eight_schools, schools, bf.FedAvg().replace(steps=steps), rounds=1)
