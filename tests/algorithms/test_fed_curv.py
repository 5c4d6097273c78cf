"""FedCurv against its authors' loss in plain torch, clients of unequal sizes."""

import pytest
import torch
from torch import nn

import bayesfed as bf
from bayesfed import FedCurv, models

EAGER = bf.Execution(compile=False)


def clients(rows):
    generator = torch.Generator().manual_seed(0)
    found = {}
    for i, n in enumerate(rows):
        x = torch.randn(n, 2, generator=generator)
        coefficients, noise = (
            torch.randn(2, generator=generator),
            torch.randn(n, generator=generator),
        )
        found[f"client {i}"] = {"x": x, "y": x @ coefficients + 0.3 * noise}
    return found


def network():
    line = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        line.weight.copy_(torch.tensor([[0.2, -0.1]]))
    return models.Network(line, likelihood="normal")


def plain(data, lam, lr, steps, rounds):
    """Their ends, their Fisher information, and the mean, after so many rounds."""
    start = torch.tensor([0.2, -0.1])
    known = [(torch.zeros(2), torch.zeros(2))] * len(data)
    for _ in range(rounds):
        before, trained = known, []
        for i, rows in enumerate(data.values()):
            others = [before[j] for j in range(len(data)) if j != i]
            fisher, pull = sum(f for f, _ in others), sum(f * w for f, w in others)
            w = start
            for _ in range(steps):
                each = (rows["x"] @ w - rows["y"])[:, None] * rows["x"]
                # the penalty's gradient at the point that the step arrives at
                w = (w - lr * each.mean(0) + 2 * lr * lam * pull) / (1 + 2 * lr * lam * fisher)
            each = (rows["x"] @ w - rows["y"])[:, None] * rows["x"]
            trained.append((each.square().mean(0), w))
        sizes = torch.tensor([float(len(rows["y"])) for rows in data.values()])
        start = (sizes[:, None] * torch.stack([w for _, w in trained])).sum(0) / sizes.sum()
        known = trained
    return start, before, trained


@pytest.mark.parametrize("rows", [(8, 8, 8), (5, 10, 40)])
@pytest.mark.parametrize("chunk", [None, 1])
def test_it_is_the_authors_loss(float64, rows, chunk):
    data = clients(rows)
    algorithm = FedCurv(lam=0.3, lr=0.05, local_steps=4)
    run = bf.start(
        network(),
        bf.Federation.from_arrays(data),
        algorithm,
        rounds=4,
        execution=bf.Execution(compile=False, chunk_size=chunk),
    )
    for _ in range(4):
        bf.step(run)
    mean, _, trained = plain(data, 0.3, 0.05, 4, 4)
    torch.testing.assert_close(run.server["theta"]["prior.loc"], mean)
    torch.testing.assert_close(run.server["fisher"]["prior.loc"], sum(f for f, _ in trained))
    torch.testing.assert_close(run.server["pull"]["prior.loc"], sum(f * w for f, w in trained))


@pytest.mark.parametrize("rows", [(10, 10, 10), (5, 10, 40)])
def test_clients_end_where_loss_and_penalty_balance(float64, rows):
    """∇L_i + 2 λ Σ_{j≠i} F_j (θ_i − θ_j) = 0, by automatic differentiation of the loss as the authors write it."""
    data, lam = clients(rows), 2.0
    federation = bf.Federation.from_arrays(data)
    run = bf.start(
        network(),
        federation,
        FedCurv(lam=lam, lr=0.1, local_steps=250),
        rounds=2,
        execution=EAGER,
    )
    states = []
    for _ in range(2):
        bf.step(run)
        kept = run.clients.tensors
        fisher = kept["fisher"]["prior.loc"].squeeze(1).clone()
        states.append((fisher, kept["pull"]["prior.loc"].squeeze(1) / fisher))
    (fisher, before), (_, ends) = states
    for i, rows_of in enumerate(data.values()):
        theta = ends[i].clone().requires_grad_()
        loss = 0.5 * (rows_of["x"] @ theta - rows_of["y"]).square().mean()
        for j in range(len(data)):
            if j != i:
                loss = loss + lam * ((theta - before[j]) ** 2 * fisher[j]).sum()
        (residual,) = torch.autograd.grad(loss, theta)
        assert float(residual.abs().max()) < 1e-8


def test_without_penalty_it_is_fedavg(float64):
    federation = bf.Federation.from_arrays(clients((5, 10, 40)))
    how = {"rounds": 3, "batch_size": 4, "execution": EAGER}
    curved = bf.fit(network(), federation, FedCurv(lam=0.0, lr=0.05), **how)
    averaged = bf.fit(network(), federation, bf.FedAvg(lr=0.05), **how)
    torch.testing.assert_close(curved.params["prior.loc"], averaged.params["prior.loc"])
