"""Gaussian process classification against scikit-learn's Laplace approximation, and integrals by brute force."""

import math

import gpytorch
import pytest
import torch
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

import bayesfed as bf
from bayesfed import models
from bayesfed.functional.gaussian_classes import GaussianClasses

pytestmark = pytest.mark.usefixtures("float64")


def kernel(x, variance=2.0, length=1.3):
    return variance * (-torch.cdist(x, x).square() / (2 * length**2)).exp()


def rows(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 2, generator=generator, dtype=torch.float64)


def scaled(**settings):
    torch.manual_seed(0)
    return models.GaussianProcess(
        kernel=gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()), classes=2, **settings
    )


def test_two_classes_have_the_evidence_and_the_predictions_of_scikit_learn():
    """Its predictions are by an approximation of the last integral, to about 0.002."""
    x, new = rows(25), rows(7, 1)
    y = (x.sum(1) + 0.5 * rows(25, 2)[:, 0] > 0).double()
    theirs = GaussianProcessClassifier(
        ConstantKernel(2.0, "fixed") * RBF(1.3, "fixed"), max_iter_predict=200
    ).fit(x.numpy(), y.numpy())
    both = torch.cat([x, new])
    known, mask = torch.ones(25, dtype=torch.bool), torch.ones(32, dtype=torch.bool)
    mine = GaussianClasses(torch.zeros(25), kernel(x), known, 2)
    assert float(mine.log_prob(y)) == pytest.approx(theirs.log_marginal_likelihood_value_, abs=1e-6)
    probs = GaussianClasses(torch.zeros(32), kernel(both), mask, 2).given(y, known)["probs"]
    expected = torch.as_tensor(theirs.predict_proba(new.numpy()))
    torch.testing.assert_close(probs, expected, rtol=0, atol=3e-3)


def test_classes_one_after_the_other_are_near_the_integral_by_brute_force():
    """Three classes: Σ over 400,000 draws of two functions, within the error of Laplace's method for flat functions."""
    x = rows(5)
    y, mask = torch.tensor([0.0, 2.0, 1.0, 0.0, 2.0]), torch.ones(5, dtype=torch.bool)
    covariance = kernel(x, variance=0.5)
    torch.manual_seed(0)
    f = torch.linalg.cholesky(covariance) @ torch.randn(400_000, 2, 5, 1)
    more = f.squeeze(-1).sigmoid()
    probs = torch.stack([1 - more[:, 0], more[:, 0] * (1 - more[:, 1]), more[:, 0] * more[:, 1]], 1)
    each = probs.gather(1, y.long().expand(len(f), 1, 5)).squeeze(1).prod(1)
    found = GaussianClasses(torch.zeros(5), covariance, mask, 3)
    assert float(found.log_prob(y)) == pytest.approx(math.log(float(each.mean())), abs=0.02)
    share = (probs * each[:, None, None]).mean(0) / each.mean()  # of a row at the place of each
    six = torch.cat([x, x])
    twice = GaussianClasses(
        torch.zeros(10), kernel(six, variance=0.5), torch.ones(10, dtype=torch.bool), 3
    )
    torch.testing.assert_close(twice.given(y, mask)["probs"], share.T, rtol=0, atol=0.01)


def test_the_gradient_is_that_of_the_evidence_and_padding_changes_nothing():
    x, y = rows(6), torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0, 0.0])
    padded = torch.tensor([True] * 6 + [False])

    def evidence(log_variance, rows_):
        covariance = torch.zeros(rows_, rows_)
        covariance[:6, :6] = kernel(x, log_variance.exp())
        labels = torch.cat([y, torch.zeros(rows_ - 6)])
        return GaussianClasses(torch.zeros(rows_), covariance, padded[:rows_], 2).log_prob(labels)

    at = torch.tensor(0.7, requires_grad=True)
    torch.autograd.gradcheck(lambda v: evidence(v, 6), at, eps=1e-5)
    torch.testing.assert_close(evidence(at, 7), evidence(at, 6))
    slopes = [torch.autograd.grad(evidence(at, n), at)[0] for n in (6, 7)]
    torch.testing.assert_close(*slopes)


def test_pfedgp_learns_a_kernel_of_all_clients_and_classifies_new_rows():
    """Clients whose boundaries go different ways: own rows decide, and the kernel is of maximum evidence."""
    generator = torch.Generator().manual_seed(0)

    def client(number, n):
        x = torch.randn(n, 2, generator=generator)
        angle = torch.tensor(0.7 * number)
        side = x[:, 0] * angle.cos() + x[:, 1] * angle.sin()
        return {"x": x, "y": torch.bernoulli((4 * side).sigmoid(), generator=generator)}

    train, test = (
        bf.Federation.from_arrays({f"c{i}": client(i, n + i) for i in range(8)}) for n in (20, 40)
    )
    posterior = bf.fit(scaled(), train, bf.PFedGP(), progress=False)
    probs = posterior.probabilities(test)["y"]
    assert probs.shape == (test.rows, 2)
    assert float((probs.argmax(1) == test["y"]).double().mean()) > 0.8
    nll = -posterior.predictive(test).log_prob(test["y"]).mean()
    assert float(nll) < 0.45
    assert set(posterior.predict(test, 3)["y"].unique().tolist()) == {0.0, 1.0}

    def evidence(phi):
        model, batch = scaled(), train.batch()
        mean, covariance = model.function(phi, batch.fields["x"], batch.mask)
        y = GaussianClasses(mean, covariance, batch.mask, 2)
        return y.log_prob(torch.where(batch.mask, batch.fields["y"], 0.0)).sum()

    best = posterior.params["particles"][0].clone().requires_grad_()
    search = torch.optim.LBFGS([best], max_iter=50, line_search_fn="strong_wolfe")

    def closure():
        search.zero_grad()
        value = -evidence(best)
        value.backward()
        return value

    before = float(evidence(posterior.params["particles"][0]))
    search.step(closure)
    assert before == pytest.approx(float(evidence(best.detach())), abs=0.01)


def test_newtons_method_converges_where_functions_vary_by_much():
    x, mask = rows(20), torch.ones(20, dtype=torch.bool)
    found = [
        float(
            GaussianClasses(torch.zeros(20), kernel(x, v), mask, 2).log_prob((x[:, 0] > 0).double())
        )
        for v in (1e2, 1e4, 1e6)
    ]
    assert all(-14 < value < 0 for value in found)  # coins would have −13.9


def test_noise_beside_classes_is_refused():
    with pytest.raises(ValueError, match="classes have no Gaussian noise"):
        scaled(likelihood=gpytorch.likelihoods.GaussianLikelihood())
