"""Whole runs on MNIST recipes, against plain PyTorch that goes from client to client. Makes whole_runs.md.

    python experiments/benchmarks/whole_runs.py               # on a machine that does nothing else, half an hour
    python experiments/benchmarks/whole_runs.py FedAvg --recipes few_images
    python experiments/benchmarks/whole_runs.py FedABML --recipes few_images --rounds 10    # in place of 100

What a user waits for: a fit of 100 rounds, 50 personal steps of every client, and the class probabilities of all test
rows (20 draws of a posterior, one of a point). The loop does the same as one would write it, with an nn.Module for
each client (or flat vectors where weights are random), autograd and a step, and goes through the same numbers of
clients, epochs and minibatches; new clients are those who personalise and predict in *new_clients*. Both take
turns, in a new process each time; "cold" is the first run of a process, imports apart, without Inductor's cache,
"warm" the second.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timing import command
from torch import Tensor, nn

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("mnist", ".")]
from tables import alone, grown

RECIPES = ("few_images", "small_shards", "new_clients")
METHODS = ("FedAvg", "FedABML", "PFedVEM")
ROUNDS, FRACTION, EPOCHS, BATCH, STEPS, DRAWS = 100, 0.1, 5, 50, 50, 20
HEADER = [
    "| method | recipe | ours cold, s: fit + personalise + predict | warm | loop, first | second "
    "| cold ÷ loop | warm ÷ loop |",
    "| --- | --- | --- | --- | --- | --- | --- | --- |",
]
TRAINING = 5  # draws in a step of training, where weights are random


# -- ours ------------------------------------------------------------------------------------------


def ours(method: str, task: Any, rounds: int) -> list[float]:
    """Seconds of the fit, of personalising and of predicting."""
    import bayesfed as bf
    from bayesfed.models import Network, mlp

    net = mlp(784, 100, task.classes)
    algorithm, model = {
        "FedAvg": lambda: (bf.FedAvg(lr=0.1, personal_steps=STEPS), Network(net)),
        "FedABML": lambda: (
            bf.FedABML(lr=0.1, prior_lr=0.5, draws=TRAINING, personal_steps=STEPS),
            Network(net, spread="learnt", scale=0.1),
        ),
        "PFedVEM": lambda: (
            bf.PFedVEM(lr=0.01, body_lr=0.1),
            Network(net, local=["2."], spread="client", scale=0.1),
        ),
    }[method]()
    marks = [time.perf_counter()]
    posterior = bf.fit(
        model,
        task.train,
        algorithm,
        rounds=rounds,
        clients_per_round=FRACTION,
        batch_size=BATCH,
        progress=False,
    )
    marks.append(time.perf_counter())
    if task.new is not None:
        posterior = posterior.personalize(task.new[0], batch_size=BATCH)
    len(posterior.local_params)  # what has not been made yet is made now
    marks.append(time.perf_counter())
    rows = task.test if task.new is None else task.new[1]
    posterior.probabilities(rows, DRAWS)
    marks.append(time.perf_counter())
    return [b - a for a, b in itertools.pairwise(marks)]


# -- loops -----------------------------------------------------------------------------------------

Clients = list[tuple[Tensor, Tensor]]


def steps(x: Tensor, y: Tensor, count: int | None = None) -> Any:
    """Minibatches of some steps, or of the epochs of a round."""
    done, most = 0, EPOCHS * -(-len(x) // BATCH) if count is None else count
    while done < most:
        for rows in torch.randperm(len(x)).split(BATCH)[: most - done]:
            yield x[rows], y[rows]
            done += 1


def fed_avg(
    train: Clients, old: Clients, new: Clients, tests: list[Tensor], classes: int, rounds: int
) -> Any:
    """One network, then one for each client."""

    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, classes))

    def descend(net: nn.Module, batches: Any) -> None:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for images, labels in batches:
            optimizer.zero_grad()
            F.cross_entropy(net(images), labels).backward()
            optimizer.step()

    server, net = network(), network()
    for _ in range(rounds):
        cohort = torch.randperm(len(train))[: round(FRACTION * len(train))].tolist()
        total = {n: torch.zeros_like(v) for n, v in server.state_dict().items()}
        for i in cohort:
            net.load_state_dict(server.state_dict())
            descend(net, steps(*train[i]))
            for name, value in net.state_dict().items():
                total[name] += value / len(cohort)
        server.load_state_dict(total)
    yield
    personal = []
    for x, y in new or old:
        own = network()
        own.load_state_dict(server.state_dict())
        descend(own, steps(x, y, STEPS))
        personal.append(own)
    yield
    with torch.no_grad():
        torch.cat([own(x).softmax(-1) for own, x in zip(personal, tests, strict=True)])
    yield


def _network(w: Tensor, x: Tensor, classes: int) -> Tensor:
    """784-100-classes from a flat vector."""
    hidden = torch.relu(F.linear(x, w[:78400].view(100, 784), w[78400:78500]))
    end = 78500 + 100 * classes
    return F.linear(hidden, w[78500:end].view(classes, 100), w[end:])


def _kl(m: Tensor, v: Tensor, loc: Tensor, log_scale: Tensor) -> Tensor:
    gap = ((2 * v).exp() + (m - loc) ** 2) / (2 * (2 * log_scale).exp())
    return (log_scale - v + gap - 0.5).sum()


def fed_abml(
    train: Clients, old: Clients, new: Clients, tests: list[Tensor], classes: int, rounds: int
) -> Any:
    """A step on a client's Gaussian, with draws of all weights, then a step on its prior."""
    size = 78500 + 101 * classes
    server = [0.05 * torch.randn(size), torch.full((size,), -3.0)]

    def ascend(phi: Any, theta: Any, images: Tensor, labels: Tensor, rows: int) -> Any:
        m, v = (value.requires_grad_() for value in phi)
        loss = 0.0
        for _ in range(TRAINING):
            w = m + v.exp() * torch.randn_like(m)
            loss = loss + F.cross_entropy(_network(w, images, classes), labels) / TRAINING
        grads = torch.autograd.grad(loss + _kl(m, v, *theta) / rows, (m, v))
        return [p.detach() - 0.001 * g for p, g in zip(phi, grads, strict=True)]

    for _ in range(rounds):
        cohort = torch.randperm(len(train))[: round(FRACTION * len(train))].tolist()
        total = [torch.zeros_like(value) for value in server]
        for x, y in (train[i] for i in cohort):
            theta, phi = [v.clone() for v in server], [v.clone() for v in server]
            for images, labels in steps(x, y):
                phi = ascend(phi, theta, images, labels, len(x))
                loc, log_scale = (value.requires_grad_() for value in theta)
                grads = torch.autograd.grad(_kl(*phi, loc, log_scale) / len(x), (loc, log_scale))
                theta = [p.detach() - 0.001 * g for p, g in zip(theta, grads, strict=True)]
            for sum_, value in zip(total, theta, strict=True):
                sum_ += value / len(cohort)
        server = total
    yield
    personal = []
    for x, y in new or old:
        phi = [v.clone() for v in server]
        for images, labels in steps(x, y, STEPS):
            phi = ascend(phi, server, images, labels, len(x))
        personal.append(phi)
    yield
    with torch.no_grad():
        for (m, v), x in zip(personal, tests, strict=True):
            for _ in range(DRAWS):
                _network(m + v.exp() * torch.randn_like(m), x, classes).softmax(-1)
    yield


def pfed_vem(
    train: Clients, old: Clients, new: Clients, tests: list[Tensor], classes: int, rounds: int
) -> Any:
    """Epochs on the Gaussian of a client's head (Adam), then on the body, with draws of the head in each step."""
    body, size = nn.Linear(784, 100), 101 * classes
    centre = 0.05 * torch.randn(size)
    heads = [[centre.clone(), torch.full((size,), -2.3)] for _ in new or old]

    def expected(hidden: Tensor, labels: Tensor, m: Tensor, v: Tensor) -> Tensor:
        loss = torch.zeros(())
        for _ in range(TRAINING):
            w = m + v.exp() * torch.randn_like(m)
            outputs = F.linear(hidden, w[: 100 * classes].view(classes, 100), w[100 * classes :])
            loss = loss + F.cross_entropy(outputs, labels) / TRAINING
        return loss

    def e_step(head: list[Tensor], x: Tensor, y: Tensor, count: int | None) -> list[Tensor]:
        m, v = (value.detach().requires_grad_() for value in head)
        rho = ((2 * v).exp() + (m - centre) ** 2).mean().log().detach() / 2
        adam = torch.optim.Adam([m, v], lr=0.01)
        for images, labels in steps(x, y, count):
            with torch.no_grad():
                hidden = torch.relu(body(images))
            adam.zero_grad()
            (expected(hidden, labels, m, v) + _kl(m, v, centre, rho) / len(x)).backward()
            adam.step()
        return [m.detach(), v.detach()]

    for _ in range(rounds):
        cohort = torch.randperm(len(train))[: round(FRACTION * len(train))].tolist()
        start = {n: p.clone() for n, p in body.state_dict().items()}
        total = {n: torch.zeros_like(p) for n, p in start.items()}
        mean = torch.zeros(size)
        for i in cohort:
            body.load_state_dict(start)
            head = e_step(heads[i] if not new else [centre, heads[0][1]], *train[i], None)
            sgd = torch.optim.SGD(body.parameters(), lr=0.1)
            for images, labels in steps(*train[i]):
                sgd.zero_grad()
                expected(torch.relu(body(images)), labels, *head).backward()
                sgd.step()
            for name, value in body.state_dict().items():
                total[name] += value / len(cohort)
            mean += head[0] / len(cohort)
            if not new:
                heads[i] = head
        body.load_state_dict(total)
        centre = mean
    yield
    if new:
        heads = [e_step(head, x, y, STEPS) for head, (x, y) in zip(heads, new, strict=True)]
    yield
    with torch.no_grad():
        for (m, v), x in zip(heads, tests, strict=True):
            hidden = torch.relu(body(x))
            for _ in range(DRAWS):
                w = m + v.exp() * torch.randn_like(m)
                F.linear(hidden, w[: 100 * classes].view(classes, 100), w[100 * classes :]).softmax(
                    -1
                )
    yield


LOOPS = {"FedAvg": fed_avg, "FedABML": fed_abml, "PFedVEM": pfed_vem}


def apart(federation: Any) -> Clients:
    """The clients' own tensors."""
    ends = federation.offsets.tolist()
    return [(federation["x"][a:b], federation["y"][a:b]) for a, b in itertools.pairwise(ends)]


def loop(method: str, task: Any, rounds: int) -> list[float]:
    """As :func:`ours`."""
    old, new = apart(task.train), [] if task.new is None else apart(task.new[0])
    tests = [x for x, _ in apart(task.test if task.new is None else task.new[1])]
    marks = [time.perf_counter()]
    for _ in LOOPS[method](old, old, new, tests, task.classes, rounds):
        marks.append(time.perf_counter())
    return [b - a for a, b in itertools.pairwise(marks)]


# -- the table -------------------------------------------------------------------------------------


def one(method: str, recipe: str, who: str, rounds: int, data: Path) -> list[list[float]]:
    """Cold and warm in this process."""
    import recipes

    warnings.simplefilter("ignore")
    task = getattr(recipes, recipe)(data, 0)
    torch.manual_seed(0)
    return [{"ours": ours, "loop": loop}[who](method, task, rounds) for _ in range(2)]


def row(method: str, recipe: str, rounds: int, data: Path) -> str:
    """The cells of a method on a recipe."""
    found = {
        who: alone(
            __file__,
            method,
            *("--recipes", recipe, "--who", who, "--rounds", str(rounds), "--data", str(data)),
        )
        for who in ("ours", "loop")
    }
    cells = [method, recipe if rounds == ROUNDS else f"{recipe}, {rounds} rounds"]
    for who in ("ours", "loop"):
        cells += [" + ".join(f"{part:.1f}" for part in run) for run in found[who]]
    cold, warm = (
        sum(found["ours"][when]) / sum(found["loop"][1]) for when in range(2)
    )  # the loop has nothing to warm up
    return f"| {' | '.join(cells)} | {cold:.2f} | {warm:.2f} |"


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("methods", nargs="*", metavar="method", default=list(METHODS))
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of the fit")
    parser.add_argument("--who", choices=("ours", "loop"), help="in this process")
    data = Path(__file__).parents[3] / "shared/data/mnist.npz"
    parser.add_argument("--data", type=Path, default=data)
    args = parser.parse_args()
    if args.who:
        print(json.dumps(one(args.methods[0], args.recipes[0], args.who, args.rounds, args.data)))
        return
    found = (
        row(method, recipe, args.rounds, args.data)
        for method in args.methods
        for recipe in args.recipes
    )
    grown(Path(__file__).with_suffix(".md"), HEADER, found, METHODS, columns=2)


if __name__ == "__main__":
    main()
