"""Does each distribution that Pyro exports fit, as outcome, as local and as global variable? Makes distributions.md.

    python experiments/distributions.py                # about ten minutes
    python experiments/distributions.py Gamma Weibull

A program has the distribution at one of three places, and Normal distributions at the others:

- outcome: ``level ~ N(0, 1); own_i ~ N(level, 0.5); y_ij ~ D(own_i)``
- local: ``level ~ N(0, 1); w_i ~ D(level); y_ij ~ N(sum of w_i, 1)``
- global: ``level ~ N(0, 1); w ~ D(level); own_i ~ N(sum of w, 0.5); y_ij ~ N(own_i, 1)``

"fits" says that the log density of each site, at two draws of all variables, is the sum of Pyro's own log densities,
client by client and without plates, and that after two rounds draws and predictions are finite, in the support and of
the right shape. "fits, no predictions" says that the distribution has no sampler, and that ArviZ data come without
them. Else the table has the sentence that a user gets.
"""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import runner
import torch
from pyro import poutine
from pyro.distributions import constraints, transforms
from torch import Tensor

import bayesfed as bf
from bayesfed.elbo import handlers, noise
from bayesfed.elbo.log_density import log_density

COLUMNS = "distribution | outcome | local variable | global variable"
PLACES = ("outcome", "local", "global")
ROWS = (5, 3, 1)
"""The numbers of rows of the clients."""


class Truncated(dist.TorchDistribution):
    """A Normal distribution truncated to (low, ∞): a distribution of a user's own."""

    arg_constraints = {"loc": constraints.real, "low": constraints.real}  # noqa: RUF012
    has_rsample = True

    def __init__(self, loc: Tensor, low: float, validate_args: bool | None = None) -> None:
        self.loc, self.low = loc, torch.as_tensor(low).expand_as(loc)
        super().__init__(loc.shape, validate_args=validate_args)

    @constraints.dependent_property(is_discrete=False, event_dim=0)
    def support(self) -> Any:
        """The numbers above ``low``."""
        return constraints.greater_than(self.low)

    def expand(self, batch_shape: Any, _instance: Any = None) -> Truncated:
        """The same distribution of a larger batch shape."""
        return Truncated(self.loc.expand(batch_shape), self.low.expand(batch_shape), False)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """A draw, by the inverse of the distribution function."""
        below = torch.special.ndtr(self.low - self.loc)
        u = torch.rand((*sample_shape, *self.batch_shape))
        return self.loc + torch.special.ndtri(below + (1 - below) * u)

    def log_prob(self, value: Tensor) -> Tensor:
        """The log density."""
        normaliser = torch.special.log_ndtr(self.loc - self.low)
        return dist.Normal(self.loc, 1.0).log_prob(value) - normaliser


def vector(m: Tensor, *shifts: float) -> Tensor:
    """Parameters of an event: m, shifted by each number."""
    return torch.stack([m + shift for shift in shifts or (0.0, 0.4, -0.3)], -1)


def two(m: Tensor) -> Tensor:
    return vector(m, 0.0, 0.5)


def root(m: Tensor, size: int = 3) -> Tensor:
    """A Cholesky factor that depends on m."""
    return torch.eye(size) * (0.2 * m).exp()[..., None, None] + 0.3 * torch.ones(size, size).tril(
        -1
    )


def normals(loc: Tensor) -> Any:
    return dist.Normal(loc, 1.0).to_event(1)


def hidden(m: Tensor, steps: int = 3) -> tuple[Any, ...]:
    """The parts of a linear Gaussian process in two dimensions, observed in one."""
    first = dist.MultivariateNormal(two(m), torch.eye(2))
    noise_of_steps = dist.MultivariateNormal(torch.zeros(steps, 2), torch.eye(2))
    seen = dist.MultivariateNormal(torch.zeros(steps, 1), torch.eye(1))
    return first, 0.5 * torch.eye(2), noise_of_steps, torch.ones(2, 1), seen


NETS = torch.tensor([0.0, 0.5, 1.0, 2.0])
Make = Callable[[Tensor], Any]
# ruff: noqa: E501
# fmt: off
DISTRIBUTIONS: dict[str, Make] = {
    "AVFMultivariateNormal": lambda m: dist.AVFMultivariateNormal(vector(m), root(m), torch.zeros(2, 1, 3)),
    "AffineBeta": lambda m: dist.AffineBeta(m.exp(), 2.0 + 0 * m, -1.0 + 0 * m, 3.0 + 0 * m),
    "AsymmetricLaplace": lambda m: dist.AsymmetricLaplace(m, 1.0, 1.5),
    "Bernoulli": lambda m: dist.Bernoulli(logits=m),
    "Beta": lambda m: dist.Beta(m.exp() + 1, 2.0),
    "BetaBinomial": lambda m: dist.BetaBinomial(m.exp(), 2.0 + 0 * m, 8),
    "Binomial": lambda m: dist.Binomial(8, logits=m),
    "Categorical": lambda m: dist.Categorical(logits=vector(m)),
    "Cauchy": lambda m: dist.Cauchy(m, 1.0),
    "Chi2": lambda m: dist.Chi2(m.exp() + 1),
    "CoalescentTimes": lambda m: dist.CoalescentTimes(NETS, m.exp()),
    "CoalescentTimesWithRate": lambda m: dist.CoalescentTimesWithRate(NETS, vector(m, 0.0, 0.1, 0.2).exp()),
    "ContinuousBernoulli": lambda m: dist.ContinuousBernoulli(logits=m),
    "Delta": lambda m: dist.Delta(m),
    "Dirichlet": lambda m: dist.Dirichlet(vector(m).exp() + 1),
    "DirichletMultinomial": lambda m: dist.DirichletMultinomial(vector(m).exp(), 9),
    "DiscreteHMM": lambda m: dist.DiscreteHMM(torch.zeros(2), torch.eye(2), dist.Normal(two(m)[..., None, :], 1.0), duration=3),
    "Empirical": lambda m: dist.Empirical(vector(m), torch.zeros(3) + 0 * m[..., None]),
    "ExpandedDistribution": lambda m: dist.ExpandedDistribution(dist.Normal(m, 1.0), m.shape),
    "Exponential": lambda m: dist.Exponential(m.exp()),
    "ExtendedBetaBinomial": lambda m: dist.ExtendedBetaBinomial(m.exp(), 2.0 + 0 * m, 8),
    "ExtendedBinomial": lambda m: dist.ExtendedBinomial(8, logits=m),
    "FisherSnedecor": lambda m: dist.FisherSnedecor(m.exp() + 2, 5.0),
    "FoldedDistribution": lambda m: dist.FoldedDistribution(dist.Normal(m, 1.0)),
    "Gamma": lambda m: dist.Gamma(m.exp() + 1, 2.0),
    "GammaGaussianHMM": lambda m: dist.GammaGaussianHMM(dist.Gamma(m.exp() + 1, 2.0), *hidden(m)),
    "GammaPoisson": lambda m: dist.GammaPoisson(m.exp(), 0.5),
    "GaussianHMM": lambda m: dist.GaussianHMM(*hidden(m), duration=3),
    "GaussianMRF": lambda m: dist.GaussianMRF(hidden(m)[0], dist.MultivariateNormal(torch.zeros(3, 4), torch.eye(4)), dist.MultivariateNormal(torch.zeros(3, 3), torch.eye(3))),
    "GaussianScaleMixture": lambda m: dist.GaussianScaleMixture(two(m).exp(), torch.zeros(2), torch.tensor([0.5, 2.0])),
    "GeneralizedPareto": lambda m: dist.GeneralizedPareto(0.0 * m, m.exp(), 0.2),
    "Geometric": lambda m: dist.Geometric(logits=m),
    "GroupedNormalNormal": lambda m: dist.GroupedNormalNormal(two(m), torch.ones(2), torch.ones(3), torch.tensor([0, 0, 1])),
    "Gumbel": lambda m: dist.Gumbel(m, 1.0),
    "HalfCauchy": lambda m: dist.HalfCauchy(m.exp()),
    "HalfNormal": lambda m: dist.HalfNormal(m.exp()),
    "ImproperUniform": lambda m: dist.ImproperUniform(constraints.positive, m.shape, ()),
    "Independent": lambda m: dist.Independent(dist.Normal(vector(m), 1.0), 1),
    "IndependentHMM": lambda m: dist.IndependentHMM(dist.GaussianHMM(*hidden(vector(m, 0.0, 0.3)), duration=3)),
    "InverseGamma": lambda m: dist.InverseGamma(m.exp() + 2, 2.0),
    "Kumaraswamy": lambda m: dist.Kumaraswamy(m.exp() + 1, 2.0),
    "LKJ": lambda m: dist.LKJ(3, m.exp() + 1),
    "LKJCholesky": lambda m: dist.LKJCholesky(3, m.exp() + 1),
    "LKJCorrCholesky": lambda m: dist.LKJCorrCholesky(3, m.exp() + 1),
    "Laplace": lambda m: dist.Laplace(m, 1.0),
    "LinearHMM": lambda m: dist.LinearHMM(normals(two(m)), 0.5 * torch.eye(2), normals(torch.zeros(3, 2)), torch.ones(2, 1), normals(torch.zeros(3, 1)), duration=3),
    "LogNormal": lambda m: dist.LogNormal(m, 1.0),
    "LogNormalNegativeBinomial": lambda m: dist.LogNormalNegativeBinomial(5.0 + 0 * m, m, 0.3 + 0 * m),
    "Logistic": lambda m: dist.Logistic(m, 1.0),
    "LogisticNormal": lambda m: dist.LogisticNormal(two(m), torch.ones(2)),
    "LowRankMultivariateNormal": lambda m: dist.LowRankMultivariateNormal(vector(m), torch.ones(3, 1), torch.ones(3)),
    "MaskedDistribution": lambda m: dist.MaskedDistribution(dist.Normal(m, 1.0), torch.ones(m.shape, dtype=torch.bool)),
    "MaskedMixture": lambda m: dist.MaskedMixture(m > 0, dist.Normal(m, 1.0), dist.Normal(m, 3.0)),
    "MixtureOfDiagNormals": lambda m: dist.MixtureOfDiagNormals(torch.stack([two(m), -two(m)], -2), torch.ones(*m.shape, 2, 2), torch.zeros(*m.shape, 2)),
    "MixtureOfDiagNormalsSharedCovariance": lambda m: dist.MixtureOfDiagNormalsSharedCovariance(torch.stack([two(m), -two(m)], -2), torch.ones(*m.shape, 2), torch.zeros(*m.shape, 2)),
    "MixtureSameFamily": lambda m: dist.MixtureSameFamily(dist.Categorical(logits=torch.zeros(2)), dist.Normal(two(m), 1.0)),
    "Multinomial": lambda m: dist.Multinomial(9, logits=vector(m)),
    "MultivariateNormal": lambda m: dist.MultivariateNormal(vector(m), scale_tril=root(m)),
    "MultivariateStudentT": lambda m: dist.MultivariateStudentT(torch.tensor(4.0), vector(m), root(m)),
    "NanMaskedMultivariateNormal": lambda m: dist.NanMaskedMultivariateNormal(vector(m), scale_tril=root(m)),
    "NanMaskedNormal": lambda m: dist.NanMaskedNormal(m, 1.0),
    "NegativeBinomial": lambda m: dist.NegativeBinomial(5.0, logits=m),
    "Normal": lambda m: dist.Normal(m, 1.0),
    "OMTMultivariateNormal": lambda m: dist.OMTMultivariateNormal(vector(m), root(m)),
    "OneHotCategorical": lambda m: dist.OneHotCategorical(logits=vector(m)),
    "OneHotCategoricalStraightThrough": lambda m: dist.OneHotCategoricalStraightThrough(logits=vector(m)),
    "OneOneMatching": lambda m: dist.OneOneMatching(torch.eye(3) * m[..., None, None]),
    "OneTwoMatching": lambda m: dist.OneTwoMatching(torch.ones(4, 2) * m[..., None, None]),
    "OrderedLogistic": lambda m: dist.OrderedLogistic(m, torch.tensor([-1.0, 0.0, 1.0])),
    "Pareto": lambda m: dist.Pareto(0.5, m.exp() + 1),
    "Poisson": lambda m: dist.Poisson(m.exp()),
    "ProjectedNormal": lambda m: dist.ProjectedNormal(vector(m)),
    "Rejector": lambda m: dist.Rejector(dist.Exponential(m.exp()), lambda x: -0.1 * x, (m.exp() / (m.exp() + 0.1)).log()),
    "RelaxedBernoulli": lambda m: dist.RelaxedBernoulli(torch.tensor(0.7), logits=m),
    "RelaxedBernoulliStraightThrough": lambda m: dist.RelaxedBernoulliStraightThrough(torch.tensor(0.7), logits=m),
    "RelaxedOneHotCategorical": lambda m: dist.RelaxedOneHotCategorical(torch.tensor(0.7), logits=vector(m)),
    "RelaxedOneHotCategoricalStraightThrough": lambda m: dist.RelaxedOneHotCategoricalStraightThrough(torch.tensor(0.7), logits=vector(m)),
    "SineBivariateVonMises": lambda m: dist.SineBivariateVonMises(m, 0.5 * m, 2.0 + 0 * m, 2.0 + 0 * m, correlation=0.5 + 0 * m),
    "SineSkewed": lambda m: dist.SineSkewed(dist.VonMises(two(m), 2.0).to_event(1), torch.tensor([0.3, 0.2]).expand(*m.shape, 2)),
    "SkewLogistic": lambda m: dist.SkewLogistic(m, 1.0, 1.5),
    "SoftAsymmetricLaplace": lambda m: dist.SoftAsymmetricLaplace(m, 1.0, 1.5),
    "SoftLaplace": lambda m: dist.SoftLaplace(m, 1.0),
    "SpanningTree": lambda m: dist.SpanningTree(torch.tensor([0.1, 0.2, 0.3]) * m[..., None]),
    "Stable": lambda m: dist.Stable(1.5, 0.0, 1.0, m),
    "StableWithLogProb": lambda m: dist.StableWithLogProb(1.5, 0.0, 1.0, m),
    "StudentT": lambda m: dist.StudentT(4.0, m, 1.0),
    "TransformedDistribution": lambda m: dist.TransformedDistribution(normals(vector(m)), [transforms.OrderedTransform()]),
    "TruncatedPolyaGamma": lambda m: dist.TruncatedPolyaGamma(m),
    "Uniform": lambda m: dist.Uniform(-3.0, 3.0 + 0 * m),
    "Unit": lambda m: dist.Unit(-m.square()),
    "VonMises": lambda m: dist.VonMises(m, 2.0),
    "VonMises3D": lambda m: dist.VonMises3D(vector(m)),
    "Weibull": lambda m: dist.Weibull(m.exp() + 1, 2.0),
    "Wishart": lambda m: dist.Wishart(torch.tensor(5.0), scale_tril=root(m)),
    "ZeroInflatedDistribution": lambda m: dist.ZeroInflatedDistribution(dist.Poisson(m.exp()), gate=torch.tensor(0.3)),
    "ZeroInflatedNegativeBinomial": lambda m: dist.ZeroInflatedNegativeBinomial(5.0, logits=m, gate=torch.tensor(0.3)),
    "ZeroInflatedPoisson": lambda m: dist.ZeroInflatedPoisson(m.exp(), gate=torch.tensor(0.3)),
    "a constant Normal of 3, to_event": lambda m: dist.Normal(0.0, 1.0).expand([3]).to_event(1),
    "a constant Normal": lambda m: dist.Normal(0.0, 1.0),
    "masked by a tensor": lambda m: dist.Normal(m, 1.0).mask(torch.tensor(True)),
    "an independent Gamma of 2": lambda m: dist.Gamma(two(m).exp() + 1, 2.0).to_event(1),
    "a folded StudentT": lambda m: dist.FoldedDistribution(dist.StudentT(4.0, m, 1.0)),
    "a transformed Beta, on (-1, 1)": lambda m: dist.TransformedDistribution(dist.Beta(m.exp() + 1, 2.0), transforms.AffineTransform(-1.0, 2.0)),
    "a logit-Normal": lambda m: dist.TransformedDistribution(dist.Normal(m, 1.0), transforms.SigmoidTransform()),
    "a softplus of a Normal": lambda m: dist.TransformedDistribution(dist.Normal(m, 1.0), transforms.SoftplusTransform()),
    "a spline of a Normal": lambda m: dist.TransformedDistribution(normals(m[..., None]), [SPLINE]),
    "a mixture of Gammas": lambda m: dist.MixtureSameFamily(dist.Categorical(logits=two(m)), dist.Gamma(two(m).exp() + 1, 2.0)),
    "a mixture of Normal vectors": lambda m: dist.MixtureSameFamily(dist.Categorical(logits=torch.zeros(2)), normals(torch.stack([vector(m), -vector(m)], -2))),
    "a mixture of Poissons": lambda m: dist.MixtureSameFamily(dist.Categorical(logits=torch.zeros(2)), dist.Poisson(two(m).exp())),
    "a zero-inflated Gamma": lambda m: dist.ZeroInflatedDistribution(dist.Gamma(m.exp() + 1, 2.0), gate_logits=m),
    "Multinomial of no total": lambda m: dist.Multinomial(logits=vector(m), validate_args=False),
    "a matrix Normal": lambda m: dist.Normal(torch.ones(2, 2) * m[..., None, None], 1.0).to_event(2),
    "truncated, of a user's own": lambda m: Truncated(m, -1.0),
}
# fmt: on
torch.manual_seed(0)
SPLINE = transforms.Spline(1, count_bins=4)


def total(value: Tensor, event: int) -> Tensor:
    """The sum over the dimensions of the event."""
    value = value.to(torch.get_default_dtype())
    return value.flatten(-event).sum(-1) if event else value


def program(make: Make, place: str) -> Callable[[Any], None]:
    """The program that has a distribution at a place."""

    def model(federation: Any) -> None:
        level = pyro.sample("level", dist.Normal(0.0, 1.0))
        if place == "global":
            fn = make(level)
            level = total(pyro.sample("w", fn), len(fn.event_shape))
        with federation.clients():
            fn = make(level) if place == "local" else dist.Normal(level, 0.5)
            own = total(pyro.sample("w" if place == "local" else "own", fn), len(fn.event_shape))
            with federation.observations() as obs:
                fn = make(own) if place == "outcome" else dist.Normal(own, 1.0)
                pyro.sample("y", fn, obs=obs.get("y"))

    return model


def outcomes(fn: Any) -> list[Tensor]:
    """Rows of each client: draws of a distribution, or one value if it has no sampler."""

    def one() -> Tensor:
        try:
            return fn.sample()
        except NotImplementedError:
            if isinstance(fn, dist.CoalescentTimesWithRate):
                return dist.CoalescentTimes(NETS).sample()
            if isinstance(fn, dist.VonMises3D):
                return dist.ProjectedNormal(fn.concentration).sample()
            return torch.tensor(2.0) if fn.support.is_discrete else handlers.origin(fn)

    with noise.seeded(0):
        return [torch.stack([one() for _ in range(rows)]) for rows in ROWS]


def by_hand(make: Make, place: str, draw: dict[str, Tensor], rows: list[Tensor]) -> Tensor:
    """The log density of a program's variables and outcomes: a sum of Pyro's own, without plates."""
    level = draw["level"]
    found = dist.Normal(0.0, 1.0).log_prob(level)
    if place == "global":
        fn = make(level)
        found = found + fn.log_prob(draw["w"])
        level = total(draw["w"], len(fn.event_shape))
    prior = make(level) if place == "local" else dist.Normal(level, 0.5)
    name, event = "w" if place == "local" else "own", len(prior.event_shape)

    def of_client(own: Tensor, values: Tensor) -> Tensor:
        outcome = (
            make(total(own, event)) if place == "outcome" else dist.Normal(total(own, event), 1.0)
        )
        return prior.log_prob(own) + torch.stack([outcome.log_prob(y) for y in values]).sum()

    for i, values in enumerate(rows):
        if name in draw:
            found = found + of_client(draw[name][i], values)
        else:  # summed out
            each = [of_client(own, values) for own in prior.enumerate_support()]
            found = found + torch.stack(each).logsumexp(0)
    return found


def ours(program: Any, federation: bf.Federation, draws: dict[str, Tensor]) -> Tensor:
    """The log densities of bayesfed's program: ``(S,)``."""
    values = {
        n: v.unsqueeze(2) if program.sites[n].local else v[:, None, None] for n, v in draws.items()
    }
    params = {**program.init, **program.init_locals(federation.batch())}
    count = len(draws["level"])
    with handlers.given(federation.device, params, values=values, draws=count):
        nodes = handlers.sample_sites(poutine.trace(program.model).get_trace(federation.batch()))
    each = {name: log_density(node) for name, node in nodes.items()}
    return sum(
        v.expand(torch.broadcast_shapes(v.shape, (count, 1, 1))).flatten(1).sum(1)
        for v in each.values()
    )


def measure(name: str, place: str) -> str:
    """Fit one program for two rounds, and compare it."""
    make = DISTRIBUTIONS[name]
    fn = make(torch.tensor(0.3)) if place == "outcome" else dist.Normal(0.5, 1.0)
    rows = outcomes(fn)
    federation = bf.Federation.from_arrays({f"c{i}": {"y": y} for i, y in enumerate(rows)})
    posterior = bf.fit(program(make, place), federation, rounds=2, progress=False)
    draws = posterior.sample(20)
    expected = [by_hand(make, place, {n: v[s] for n, v in draws.items()}, rows) for s in range(20)]
    found = ours(posterior.program, federation, draws)
    assert torch.allclose(found, torch.stack(expected).reshape(-1), rtol=1e-4, atol=1e-3), (
        found,
        expected,
    )
    if place != "outcome" and "w" in draws:
        w = make(torch.tensor(0.3))
        check(draws["w"], w, (20, 3) if place == "local" else (20,))
    arviz = posterior.to_arviz(20)
    if not hasattr(arviz, "posterior_predictive"):
        return "fits, no predictions"
    check(posterior.predict(federation, 20)["y"], fn, (20, sum(ROWS)))
    return "fits"


def check(values: Tensor, fn: Any, lead: tuple[int, ...]) -> None:
    """Fail unless draws have the shape, are finite and lie in the support of a distribution."""
    assert values.shape == (*lead, *fn.event_shape), (values.shape, fn.event_shape)
    assert values.isfinite().all(), values
    assert fn.support.check(values).all(), values


def cell(name: str, place: str) -> str:
    """The cell of the table."""
    try:
        return measure(name, place)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        own = "/bayesfed/" in frame.filename and (frame.line or "").startswith("raise")
        words = re.sub(
            r"model 'model', line \d+, `.*`: ", "the line, ", " ".join(str(error).split())
        )
        return (
            words
            if own
            else f"FAILS: {type(error).__name__} at {frame.filename[-40:]}:{frame.lineno}: {words}"
        )


def main() -> None:
    missing = [
        name
        for name in dist.__all__
        if inspect.isclass(kind := getattr(dist, name))
        and issubclass(kind, torch.distributions.Distribution)
        and name not in (*DISTRIBUTIONS, "TorchDistribution", "ExponentialFamily")
    ]
    assert not missing, missing
    given = runner.arguments(__doc__)
    calls = {name: [(name, place) for place in PLACES] for name in DISTRIBUTIONS}
    runner.table(COLUMNS, calls, cell, given, lambda _, found: found)


if __name__ == "__main__":
    main()
