"""Tests of the Gaussian process against GPyTorch, one client and one particle at a time."""

import gpytorch
import pytest
import torch

import bayesfed as bf
from bayesfed import models
from bayesfed.functional.multivariate_normal import Gaussian, conditioned
from bayesfed.functional.networks import apply

LENGTHS = (5, 9, 2)
PARTICLES = 3


@pytest.fixture(autouse=True)
def seeded(float64):
    torch.manual_seed(0)


def federation(dims=2):
    return bf.Federation.from_arrays(
        {
            f"client {i}": {"x": torch.randn(n, dims).squeeze(-1), "y": torch.randn(n)}
            for i, n in enumerate(LENGTHS)
        }
    )


def ard():
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=1.5, ard_num_dims=2))
    return models.GaussianProcess(gpytorch.means.LinearMean(2), kernel)


def networks():
    tanh = torch.nn.Tanh
    return models.GaussianProcess(
        models.mlp(2, 4, 1, activation=tanh), features=models.mlp(2, 3, 2, activation=tanh)
    )


def additive():
    rbf, periodic = gpytorch.kernels.RBFKernel, gpytorch.kernels.PeriodicKernel
    return models.GaussianProcess(kernel=gpytorch.kernels.ScaleKernel(rbf()) + periodic())


class Exact(gpytorch.models.ExactGP):
    """The same prior as GPyTorch's own model, with the parameters φ written into the modules."""

    def __init__(self, model, phi, x, y):
        likelihood = gpytorch.likelihoods.GaussianLikelihood()
        super().__init__(x, y, likelihood)
        self.model = model
        parts = phi.split(
            [
                sum(p.numel() for p in q.parameters() if p.requires_grad)
                for q in model.parts.values()
            ]
        )
        for part, values in zip(model.parts.values(), parts, strict=True):
            at = 0
            for p in part.parameters():
                if p.requires_grad:
                    p.data = values[at : at + p.numel()].reshape(p.shape).clone()
                    at += p.numel()
        self.mean, self.kernel = model.mean, model.parts["kernel"]
        likelihood.noise = model.parts["likelihood"].noise.detach()

    def forward(self, x):
        seen = x if self.model.features is None else self.model.features(x)
        mean = self.mean(x)
        mean = mean if mean.ndim == 1 else mean.squeeze(-1)
        return gpytorch.distributions.MultivariateNormal(mean, self.kernel(seen))


def conditional(model, phi, own, x):
    """Return mean and variance of rows at ``x`` given a client's own, and the evidence, from the joint distribution."""
    y = torch.where(own.mask, own.fields["y"], 0.0)
    evidence = Gaussian(*model.marginal(phi, own.fields["x"], own.mask)).log_prob(y)
    mask = torch.cat([own.mask, torch.ones(x.shape[:2], dtype=torch.bool)], 1)
    mean, covariance = model.marginal(phi, torch.cat([own.fields["x"], x], 1), mask)
    return *conditioned(mean, covariance, y, own.mask), evidence


@pytest.mark.parametrize("make", [ard, networks, additive])
def test_evidence_and_predictions_are_those_of_gpytorch(make):
    model, data = make(), federation()
    phi = model.centre + 0.5 * torch.randn(PARTICLES, 1, 1, model.size)
    batch, queries = data.batch(), torch.randn(len(LENGTHS), 6, 2)
    mean, variance, evidence = (v.detach() for v in conditional(model, phi, batch, queries))
    for s in range(PARTICLES):
        for k, name in enumerate(data.names):
            own = data.select([name])
            exact = Exact(model, phi[s, 0, 0], own["x"], own["y"])
            exact.train()
            mll = gpytorch.mlls.ExactMarginalLogLikelihood(exact.likelihood, exact)
            theirs = mll(exact(own["x"]), own["y"]) * len(own["y"])
            torch.testing.assert_close(evidence[s, k], theirs.detach(), rtol=1e-6, atol=1e-6)
            exact.eval()
            with torch.no_grad(), gpytorch.settings.fast_pred_var(False):
                there = exact.likelihood(exact(queries[k]))
            torch.testing.assert_close(mean[s, k], there.mean, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(variance[s, k], there.variance, rtol=1e-6, atol=1e-6)


def test_the_pyro_program_has_the_same_evidence():
    model, data = ard(), federation()
    from pyro import poutine

    trace = poutine.trace(model).get_trace(data)
    phi = trace.nodes["prior"]["value"]
    log_prob = trace.nodes["y"]["fn"].log_prob(trace.nodes["y"]["value"])
    *_, evidence = conditional(model, phi, data.batch(), torch.zeros(len(LENGTHS), 1, 2))
    torch.testing.assert_close(log_prob.squeeze(-1), evidence, rtol=1e-10, atol=1e-10)


def test_padding_changes_nothing():
    model, data = networks(), federation()
    phi, queries = torch.randn(2, 1, 1, model.size), torch.randn(len(LENGTHS), 4, 2)
    together = conditional(model, phi, data.batch(), queries)
    for k, name in enumerate(data.names):
        alone = conditional(model, phi, data.select([name]).batch(), queries[k : k + 1])
        for one, other in zip(together, alone, strict=True):
            torch.testing.assert_close(one[:, k], other[:, 0], rtol=1e-9, atol=1e-9)


def test_clients_may_have_different_priors():
    model, data = ard(), federation()
    phi = model.centre + torch.randn(2, len(LENGTHS), 1, model.size)
    x, batch = torch.randn(len(LENGTHS), 4, 2), data.batch()
    together = conditional(model, phi, batch, x)
    for k in range(len(LENGTHS)):
        apart = conditional(model, phi[:, k : k + 1], batch, x)
        for one, other in zip(together, apart, strict=True):
            torch.testing.assert_close(one[:, k], other[:, k])


def test_parameters_without_gradient_are_constant():
    kernel = gpytorch.kernels.RBFKernel()
    kernel.lengthscale = 0.7
    kernel.requires_grad_(False)
    model = models.GaussianProcess(kernel=kernel)
    assert model.size == 2  # the constant mean and the noise
    phi = torch.zeros(1, 1, model.size)
    x = torch.tensor([[0.0, 0.7]])
    _, covariance = model.marginal(phi, x, torch.ones(1, 2, dtype=torch.bool))
    torch.testing.assert_close(covariance[0, 0, 1], torch.tensor(-0.5).exp())


def test_networks_are_centred_at_zero_and_other_parameters_at_their_values():
    model = networks()
    assert (model.centre[:-1] == 0).all()
    torch.testing.assert_close(model.noise(model.centre).squeeze(), torch.tensor(0.16))


def test_the_mean_may_be_any_network():
    model, x = networks(), torch.randn(3, 5, 2)
    phi = torch.randn(2, 1, 1, model.size)
    mean, _ = model.marginal(phi, x, torch.ones(3, 5, dtype=torch.bool))
    size = sum(p.numel() for p in model.mean.parameters())
    torch.testing.assert_close(mean, apply(model.mean, phi[..., :size], x).squeeze(-1))


def test_a_mean_that_keeps_state_is_refused():
    with pytest.raises(ValueError, match="GroupNorm or LayerNorm"):
        models.GaussianProcess(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)))
