"""Is one batched pass for the gradient of ln Z faster than loops over clients and particles? Makes particles.md.

    python experiments/benchmarks/particles.py             # a minute; on a machine that does nothing else

24 clients with 150 rows, 4 particles. The pass, compiled and eager, is timed beside two loops over clients and
particles: the same pass, one client and one particle at a time; and GPyTorch alone, an ExactGP and its
ExactMarginalLogLikelihood for each, backward, the parameters' gradients. All take turns in one process on one thread.
Ratios are medians, with the least and the greatest.
"""

from __future__ import annotations

import statistics

import gpytorch
import torch
from timing import interleaved, ratio, runner
from torch import Tensor, nn

import bayesfed as bf
from bayesfed import models
from bayesfed.data.batch import Batch
from bayesfed.data.minibatches import Minibatches
from bayesfed.elbo import noise
from bayesfed.guides.particles import PARTICLES
from bayesfed.steps.job import Job
from bayesfed.tracing.compiler import Compiler, using

CLIENTS, ROWS, COUNT, INPUTS = 24, 150, 4, 15


class Exact(gpytorch.models.ExactGP):
    """The same prior in GPyTorch alone."""

    def __init__(self, x: Tensor, y: Tensor, likelihood: gpytorch.likelihoods.GaussianLikelihood):
        super().__init__(x, y, likelihood)
        self.mean = _network(1)
        self.features = _network(2)
        self.kernel = gpytorch.kernels.RBFKernel()
        self.kernel.lengthscale = 1.0
        self.kernel.requires_grad_(False)

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        """Return the prior at inputs; GPyTorch's interface."""
        covariance = self.kernel(self.features(x))
        return gpytorch.distributions.MultivariateNormal(self.mean(x).squeeze(-1), covariance)

    def parts(self) -> list[nn.Parameter]:
        """Return the parameters in the order of φ."""
        every = [*self.mean.parameters(), *self.features.parameters()]
        return [*every, *self.likelihood.parameters()]


def _network(outputs: int) -> nn.Module:
    return models.mlp(INPUTS, 16, 16, outputs, activation=nn.Tanh)


def measure(repeats: int) -> list[list[str]]:
    """Time the four in turn."""
    arrays = {
        f"client {i}": {"x": torch.randn(ROWS, INPUTS), "y": torch.randn(ROWS)}
        for i in range(CLIENTS)
    }
    federation = bf.Federation.from_arrays(arrays)
    model = models.GaussianProcess(_network(1), features=_network(2), hyper_scale=0.3)
    algorithm = bf.PACPFL(particles=COUNT)
    program = algorithm.program(model, federation)
    particles = program.init[PARTICLES]
    keys, batch = noise.fold(noise.key(0), federation.stream_ids), federation.batch()

    def gradient(particles: Tensor, batch: Batch, keys: Tensor) -> Tensor:
        rows = Minibatches(lambda step: batch, federation.lengths[batch.index], ROWS)
        job = Job(program, {"theta": {PARTICLES: particles}}, {}, rows, keys)
        return algorithm.work(job).upload["gradients"][PARTICLES]

    def batched() -> Tensor:
        return gradient(particles, batch, keys)

    def apart() -> Tensor:
        found = torch.empty(CLIENTS, COUNT, particles.shape[1])
        for i in range(CLIENTS):
            own = federation.batch(torch.tensor([i]))
            for k in range(COUNT):
                found[i, k] = gradient(particles[k : k + 1], own, keys[i : i + 1])[0, 0]
        return found

    def gpytorch_alone() -> Tensor:
        found = torch.empty(CLIENTS, COUNT, particles.shape[1])
        for i, name in enumerate(federation.names):
            x, y = arrays[name]["x"], arrays[name]["y"]
            exact = Exact(x, y, gpytorch.likelihoods.GaussianLikelihood())
            evidence = gpytorch.mlls.ExactMarginalLogLikelihood(exact.likelihood, exact)
            exact.train()
            for k in range(COUNT):
                nn.utils.vector_to_parameters(particles[k].clone(), exact.parts())
                exact.zero_grad()
                (evidence(exact(x), y) * ROWS).backward()
                found[i, k] = torch.cat([p.grad.flatten() for p in exact.parts()])
        return found

    compiler = Compiler(True)

    def compiled() -> Tensor:
        with using(compiler):
            return batched()

    contenders = {
        "compiled": compiled,
        "batched": batched,
        "the same pass, one by one": apart,
        "GPyTorch alone": gpytorch_alone,
    }
    expected = batched()
    scale = float(expected.abs().max())
    times = interleaved(contenders, repeats)
    rows = []
    for name, run in contenders.items():
        differs = float((run() - expected).abs().max()) / scale
        ratios = [ratio(times[name], times[to]) for to in ("compiled", "batched")]
        ms = f"{1000 * statistics.median(times[name]):.0f}"
        rows.append([name, ms, *ratios, f"{differs:.0e}"])
    return rows


def main() -> None:
    given = runner.arguments(__doc__, repeats=15)
    columns = "gradient | ms | times the compiled | times the batched | differs by"
    runner.table(columns, {(): [(given.repeats,)]}, measure, given)


if __name__ == "__main__":
    main()
