"""How long does one step of a cohort take, beside torch batched by hand and torch in a loop? Makes steps.md.

    python experiments/benchmarks/steps.py                          # some minutes, on a machine that does nothing else
    python experiments/benchmarks/steps.py "MLP" --repeats 5        # one problem

A step has draws, a gradient and an optimiser. Every client has a mean-field posterior over its weights, one draw a step
and plain gradient descent; the radon-like model has 8 draws of four global variables from the server, one intercept a
client, and Adam. "Hand" is torch written for this model, all clients as one batch, in place; "loop" the same for one
client after another. All do the same mathematics: "differ by" compares gradients with the same noise, relative to the
largest of them. Times are medians of rounds in which the contenders take turns.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import torch
import torch.nn.functional as F
from timing import interleaved, limits, ratio, runner
from torch import Tensor, nn

import bayesfed as bf
from bayesfed import models
from bayesfed.elbo import noise
from bayesfed.steps.gradients import copies
from bayesfed.steps.local_variational import local_step, phi_state
from bayesfed.steps.steps import Inputs
from bayesfed.tracing.compiler import Compiler, using

LR = 0.01


@dataclass
class Problem:
    """Contenders, and gradients of ours and by hand with the same noise."""

    ours: Callable[[], object]
    hand: Callable[[], object]
    loop: Callable[[], object]
    difference: Callable[[], float]
    flop: float  # of matrix products
    numbers: int  # that a step must read or write at least: parameters twice, rows once


def bayesian_network(
    module: nn.Module,
    forward: Callable[[Tensor, Tensor], Tensor],
    forward_one: Callable[[Tensor, Tensor], Tensor],
    clients: int,
    rows: int,
    inputs: int,
    classes: int,
    flop_per_row: float,
) -> Problem:
    """Return a step of FedABML on q(w_i) = N(loc, e^{2 log_scale}) of every client around N(m, s²)."""
    x, y = torch.rand(clients * rows, inputs), torch.randint(0, classes, (clients * rows,))
    offsets = torch.arange(0, clients * rows + 1, rows)
    federation = bf.Federation({"x": x, "y": y}, offsets, [f"{i}" for i in range(clients)])
    model = models.Network(module, spread="learnt", scale=0.05)
    algorithm = bf.FedABML(draws=1, natural=False)
    program = algorithm.program(model, federation)
    batch = federation.batch()
    inner, theta = algorithm.steps.inner, copies(program.init, clients)
    constants = inner.constants(program, batch)
    keys = noise.fold(noise.key(0), federation.stream_ids)
    state = {"phi": algorithm.locals.begin(program, theta, batch), "step": 0}
    rate = torch.full((clients,), LR)
    given = Inputs(batch, (rate, rate), constants=constants)

    def ours() -> dict[str, Tensor]:
        state["step"] += 1
        supplied = inner.noise(program, keys, state["step"])
        at = theta | state["phi"]
        state["phi"] = inner.own_step(program, at, given, supplied)
        return state["phi"]

    m, log_s = theta["prior.loc"][:, 0], theta["prior.scale"][:, 0]  # unconstrained: log s
    loc, log_scale = m.clone(), log_s.clone()
    images, labels = batch.fields["x"], batch.fields["y"]

    def slope(eps: Tensor, loc: Tensor, log_scale: Tensor) -> tuple[Tensor, ...]:
        a, b = loc.detach().requires_grad_(), log_scale.detach().requires_grad_()
        logits = forward(a + b.exp() * eps, images)
        nll = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        kl = log_s - b + ((2 * b).exp() + (a - m) ** 2) / (2 * (2 * log_s).exp()) - 0.5
        return torch.autograd.grad((nll + kl.sum()) / rows, (a, b))

    def hand() -> None:
        grads = slope(torch.randn_like(loc), loc, log_scale)
        loc.sub_(grads[0], alpha=LR)
        log_scale.sub_(grads[1], alpha=LR)

    def loop() -> None:
        for i in range(clients):
            a, b = loc[i].detach().requires_grad_(), log_scale[i].detach().requires_grad_()
            logits = forward_one(a + b.exp() * torch.randn_like(a), images[i])
            nll = F.cross_entropy(logits, labels[i], reduction="sum")
            s = log_s[i]
            kl = s - b + ((2 * b).exp() + (a - m[i]) ** 2) / (2 * (2 * s).exp()) - 0.5
            grads = torch.autograd.grad((nll + kl.sum()) / rows, (a, b))
            loc[i].sub_(grads[0], alpha=LR)
            log_scale[i].sub_(grads[1], alpha=LR)

    def difference() -> float:
        phi, one = algorithm.locals.begin(program, theta, batch), rate / LR
        supplied = inner.noise(program, keys)
        new = inner.own_step(program, theta | phi, given._replace(rates=(one, one)), supplied)
        grads = slope(supplied["weights"][0][0, :, 0], m, log_s)
        worst = 0.0
        for name, grad in zip(("loc", "log_scale"), grads, strict=True):
            own = (phi[f"weights.{name}"] - new[f"weights.{name}"])[:, 0]
            worst = max(worst, float((own - grad).abs().max() / grad.abs().max()))
        return worst

    size = clients * model.size
    return Problem(
        ours, hand, loop, difference, clients * rows * flop_per_row, 6 * size + x.numel()
    )


def _layers(w: Tensor, sizes: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    """Return weights ``(..., out, in)`` and biases ``(..., out)`` of an MLP."""
    found, at = [], 0
    for before, after in itertools.pairwise(sizes):
        weight = w[..., at : at + before * after].unflatten(-1, (after, before))
        at += before * after
        found.append((weight, w[..., at : at + after]))
        at += after
    return found


def mlp(clients: int, rows: int, *sizes: int) -> Problem:
    def forward(w: Tensor, x: Tensor) -> Tensor:
        for number, (weight, bias) in enumerate(_layers(w, sizes)):
            x = torch.relu(x) if number else x
            x = torch.baddbmm(bias[:, None], x, weight.mT)
        return x

    def forward_one(w: Tensor, x: Tensor) -> Tensor:
        for number, (weight, bias) in enumerate(_layers(w, sizes)):
            x = torch.relu(x) if number else x
            x = F.linear(x, weight, bias)
        return x

    pairs = [a * b for a, b in itertools.pairwise(sizes)]
    flop = 2 * (3 * sum(pairs) - pairs[0])  # forward, and backward but for the images
    return bayesian_network(
        models.mlp(*sizes), forward, forward_one, clients, rows, sizes[0], sizes[-1], flop
    )


def cnn(clients: int, rows: int) -> Problem:
    """Return a step on two convolutions and two layers, 28 × 28; by hand, clients are groups of channels."""
    module = models.cnn((1, 28, 28), 10, channels=(8, 16), hidden=32)
    shapes = [p.shape for p in module.parameters()]

    def parts(w: Tensor) -> list[Tensor]:
        sizes = [shape.numel() for shape in shapes]
        split = w.split(sizes, -1)
        return [p.unflatten(-1, shape) for p, shape in zip(split, shapes, strict=True)]

    def forward(w: Tensor, x: Tensor) -> Tensor:
        k = len(x)
        p = parts(w)
        h = x.transpose(0, 1).unflatten(-1, (28, 28))  # rows, clients, 28, 28
        for weight, bias in ((p[0], p[1]), (p[2], p[3])):
            h = F.conv2d(h, weight.flatten(0, 1), bias.flatten(), padding=2, groups=k)
            h = F.max_pool2d(torch.relu(h), 2)
        h = h.unflatten(1, (k, -1)).transpose(0, 1).flatten(2)
        h = torch.relu(torch.baddbmm(p[5][:, None], h, p[4].mT))
        return torch.baddbmm(p[7][:, None], h, p[6].mT)

    def forward_one(w: Tensor, x: Tensor) -> Tensor:
        p = parts(w)
        h = x.unflatten(-1, (1, 28, 28))
        for weight, bias in ((p[0], p[1]), (p[2], p[3])):
            h = F.max_pool2d(torch.relu(F.conv2d(h, weight, bias, padding=2)), 2)
        return F.linear(torch.relu(F.linear(h.flatten(1), p[4], p[5])), p[6], p[7])

    first, second = 2 * 25 * 8 * 784, 2 * 25 * 8 * 16 * 196
    rest = 2 * (16 * 49 * 32 + 320)
    flop = 2 * first + 3 * (second + rest)
    return bayesian_network(module, forward, forward_one, clients, rows, 784, 10, flop)


GLOBALS = ("mu", "log_tau", "slope", "log_sigma")


def radon(clients: int, rows: int, draws: int = 8) -> Problem:
    """Return a step on varying intercepts: gradients in q(alpha_i) and in the server's draws of the globals."""

    def model(federation: Any) -> None:
        mu, log_tau, slope, log_sigma = (pyro.sample(n, dist.Normal(0.0, 2.0)) for n in GLOBALS)
        with federation.clients():
            alpha = pyro.sample("alpha", dist.Normal(mu, log_tau.exp()))
            with federation.observations() as obs:
                mean = alpha + slope * obs["floor"]
                y = dist.Normal(mean, log_sigma.exp())
                pyro.sample("log_radon", y, obs=obs.get("log_radon"))

    def guide(federation: Any) -> None:
        for name in GLOBALS:
            loc = pyro.param(f"{name}.loc", torch.tensor(0.0))
            pyro.sample(name, dist.Normal(loc, 0.1))
        with federation.clients() as index:
            loc = pyro.param("alpha.loc", torch.zeros(len(index), 1))
            log_scale = pyro.param("alpha.log_scale", torch.zeros(len(index), 1))
            pyro.sample("alpha", dist.Normal(loc, log_scale.exp()))

    offsets = torch.arange(0, clients * rows + 1, rows)
    fields = {"floor": torch.rand(clients * rows).round(), "log_radon": torch.randn(clients * rows)}
    federation = bf.Federation(fields, offsets, [f"{i}" for i in range(clients)])
    algorithm = bf.SFVI(guide=guide, draws=draws)
    program = algorithm.program(model, federation)
    batch = federation.batch()
    keys = noise.fold(noise.key(0), federation.stream_ids)
    first = algorithm.start_clients(program, algorithm.start(program), batch)
    first = phi_state(first)
    theta = {name: torch.randn(draws, 1, 1) * 0.1 for name in GLOBALS}
    state: dict[str, Any] = {"clients": first, "step": 0}
    given = Inputs(batch, (LR,), constants=program.init)

    def ours() -> object:
        state["step"] += 1
        supplied = program.noise(noise.fold(keys, state["step"]), draws, local=True)
        state["clients"], grads, term = local_step(
            program, theta, state["clients"], given, supplied, draws
        )
        return grads, term

    loc, log_scale = torch.zeros(clients, 1), torch.zeros(clients, 1)
    adam = torch.optim.Adam([loc, log_scale], lr=LR, eps=0.1)
    x, y = batch.fields["floor"], batch.fields["log_radon"]
    half_log_tau = 0.9189385332046727

    def slope(
        eps: Tensor, loc: Tensor, log_scale: Tensor, x: Tensor, y: Tensor
    ) -> tuple[Tensor, ...]:
        a, b = loc.detach().requires_grad_(), log_scale.detach().requires_grad_()
        g = [theta[n].expand(-1, len(loc), -1).detach().requires_grad_() for n in GLOBALS]
        mu, log_tau, beta, log_sigma = g
        alpha = a + b.exp() * eps
        likelihood = -0.5 * ((y - alpha - beta * x) / log_sigma.exp()) ** 2 - log_sigma
        prior = -0.5 * ((alpha - mu) / log_tau.exp()) ** 2 - log_tau
        q = -0.5 * ((alpha - a) / b.exp()) ** 2 - b
        term = (likelihood - half_log_tau).sum(-1) + (prior - q).sum(-1)
        return torch.autograd.grad(term.mean(0).sum(), (a, b, *g))

    def hand() -> None:
        grads = slope(torch.randn(draws, clients, 1), loc, log_scale, x, y)
        loc.grad, log_scale.grad = -grads[0], -grads[1]
        adam.step()

    own = [
        [loc[i : i + 1].clone().requires_grad_(), log_scale[i : i + 1].clone().requires_grad_()]
        for i in range(clients)
    ]
    optimizers = [torch.optim.Adam(pair, lr=LR, eps=0.1) for pair in own]

    def loop() -> None:
        for i, (pair, optimizer) in enumerate(zip(own, optimizers, strict=True)):
            grads = slope(torch.randn(draws, 1, 1), *pair, x[i : i + 1], y[i : i + 1])
            pair[0].grad, pair[1].grad = -grads[0], -grads[1]
            optimizer.step()

    def difference() -> float:
        supplied = program.noise(keys, draws, local=True)
        _, grads, _ = local_step(program, theta, first, given, supplied, draws)
        zeros = torch.zeros(clients, 1)
        by_hand = slope(supplied["alpha"][0], zeros, zeros, x, y)[2:]
        return max(
            float((grads[n].squeeze() - g.squeeze().T).abs().max() / g.abs().max())
            for n, g in zip(GLOBALS, by_hand, strict=True)
        )

    return Problem(ours, hand, loop, difference, 0.0, 2 * clients * rows + 8 * clients)


PROBLEMS: dict[str, tuple[Callable[[], Problem], int]] = {
    "MLP 784-100-10, 64 clients × 50": (lambda: mlp(64, 50, 784, 100, 10), 2),
    "logistic 784-10, 200 × 50": (lambda: mlp(200, 50, 784, 10), 2),
    "logistic 8-2, 1000 × 10": (lambda: mlp(1000, 10, 8, 2), 1),
    "CNN 8-16-32, 20 × 20": (lambda: cnn(20, 20), 2),
    "radon, 1000 × 10, 8 draws": (lambda: radon(1000, 10), 1),
}


def measured(
    problem: Problem, repeats: int, finish: Callable[[], object] = lambda: None
) -> tuple[dict[str, list[float]], Compiler, float]:
    """Return seconds of the contenders, the compiler, and how far ours are from hand-written gradients.

    ``finish`` waits for a device.
    """
    compiler = Compiler(True)

    def compiled() -> object:
        with using(compiler):
            return problem.ours()

    def finished(run: Callable[[], object]) -> Callable[[], object]:
        return lambda: (run(), finish())

    with using(compiler):
        difference = problem.difference()
    contenders = {"compiled": compiled, "eager": problem.ours}
    contenders |= {"hand": problem.hand, "loop": problem.loop}
    runs = {name: finished(run) for name, run in contenders.items()}
    return interleaved(runs, repeats), compiler, difference


def cells(
    times: dict[str, list[float]], problem: Problem, flops: float, bandwidth: float
) -> list[str]:
    """Return the columns of times, ratios and the part of the limit that is reached."""
    found = [f"{1000 * statistics.median(of):.3g}" for of in times.values()]
    for of, to in (("compiled", "hand"), ("eager", "hand"), ("loop", "compiled")):
        found.append(ratio(times[of], times[to], ".2g"))
    least = problem.flop / flops + 4 * problem.numbers / bandwidth
    found.append(f"{100 * least / statistics.median(times['compiled']):.0f} %")
    return found


def measure(name: str, repeats: int) -> list[str]:
    """Time a problem."""
    limit, (make, threads) = limits(), PROBLEMS[name]
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    problem = make()
    times, compiler, difference = measured(problem, repeats)
    last = [f"{compiler.seconds:.0f}", str(threads), f"{difference:.0e}"]
    return [*cells(times, problem, *limit), *last]


def note() -> str:
    flops, bandwidth = limits()
    return (
        f"Limit: matrix products at {flops / 1e9:.0f} GFLOP/s and memory at {bandwidth / 1e9:.0f} GB/s, as measured "
        "here with two threads, one after the other: parameters read, their gradients and new values written, rows "
        "read once."
    )


def main() -> None:
    given = runner.arguments(__doc__, repeats=15)
    columns = (
        "one step of | compiled, ms | eager, ms | hand, ms | loop, ms | compiled / hand | eager / hand "
        "| loop / compiled | of the machine's limit | compile, s | threads | differ by"
    )
    rows = {name: [(name, given.repeats)] for name in PROBLEMS}
    runner.table(columns, rows, measure, given, note=note, threads=None)


if __name__ == "__main__":
    main()
