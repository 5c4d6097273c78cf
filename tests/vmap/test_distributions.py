"""Distributions of each kind have Pyro's own log density, client by client, or are refused in one line."""

from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.distributions import constraints, transforms

import bayesfed as bf
from bayesfed.elbo import handlers, noise
from bayesfed.elbo.log_density import log_density

ROWS, DRAWS = (3, 1, 2), 2


class Truncated(dist.TorchDistribution):
    """An exponential distribution above a bound, as a user might write it."""

    arg_constraints = {"low": constraints.real}  # noqa: RUF012  (torch's interface)
    has_rsample = True

    def __init__(self, low):
        self.low = low
        super().__init__(low.shape, validate_args=False)

    @constraints.dependent_property(is_discrete=False, event_dim=0)
    def support(self):
        return constraints.greater_than(self.low)

    def expand(self, batch_shape, _instance=None):
        return Truncated(self.low.expand(batch_shape))

    def rsample(self, sample_shape=()):
        return self.low - torch.rand((*sample_shape, *self.batch_shape)).log()

    def log_prob(self, value):
        return self.low - value


def pair(m):
    return torch.stack([m, m + 0.5], -1)


def hidden(m):
    steps = [dist.Normal(torch.zeros(3, size), 1.0).to_event(1) for size in (2, 1)]
    first = dist.Normal(pair(m), 1.0).to_event(1)
    return dist.LinearHMM(first, torch.eye(2), steps[0], torch.ones(2, 1), steps[1], duration=3)


def gaussian_process(m):
    parts = [dist.MultivariateNormal(torch.zeros(3, size), torch.eye(size)) for size in (2, 1)]
    first = dist.MultivariateNormal(pair(m), torch.eye(2))
    return dist.GaussianHMM(first, torch.eye(2), parts[0], torch.ones(2, 1), parts[1], duration=3)


FITS = {
    "transformed": lambda m: dist.TransformedDistribution(
        dist.Normal(pair(m), 1.0).to_event(1), [transforms.OrderedTransform()]
    ),
    "of an inverse transform": lambda m: dist.TransformedDistribution(
        dist.Gamma(m.exp() + 1, 2.0), [transforms.ExpTransform().inv]
    ),
    "independent": lambda m: dist.Gamma(pair(m).exp() + 1, 2.0).to_event(1),
    "constant, expanded": lambda m: dist.Normal(0.0, 1.0).expand([3]).to_event(1),
    "masked": lambda m: dist.Normal(m, 1.0).mask(True),
    "folded": lambda m: dist.FoldedDistribution(dist.StudentT(4.0, m, 1.0)),
    "bounds that are tensors": lambda m: dist.Pareto(torch.tensor(0.5), m.exp() + 1),
    "a user's own": Truncated,
    "a Gaussian process": gaussian_process,
    "a matrix": lambda m: dist.LKJCholesky(3, m.exp() + 1),
}
OUTCOMES = FITS | {
    "a mixture": lambda m: dist.MixtureSameFamily(
        dist.Categorical(logits=pair(m)), dist.Poisson(pair(m).exp())
    ),
    "a masked mixture": lambda m: dist.MaskedMixture(
        m > 0, dist.Normal(m, 1.0), dist.Laplace(m, 2.0)
    ),
    "zero-inflated": lambda m: dist.ZeroInflatedPoisson(m.exp(), gate=torch.tensor(0.3)),
    "written in place": lambda m: dist.OrderedLogistic(m, torch.tensor([-1.0, 1.0])),
}
LATENTS = {
    "a point": (lambda m: dist.Delta(m), "is Delta, which has no density"),
    "a mixture": (OUTCOMES["a mixture"], "is discrete"),
    "a mixture of numbers": (
        lambda m: dist.MixtureSameFamily(
            dist.Categorical(logits=torch.zeros(2)), dist.Normal(pair(m), 1.0)
        ),
        "no transform from the reals",
    ),
    "without density": (hidden, "the log density of LinearHMM is missing"),
    "without sampler": (lambda m: dist.VonMises3D(torch.ones(3) + m[..., None]), "no sampler"),
    "an infinite bound": (
        lambda m: dist.GeneralizedPareto(m, 1.0, 0.2),
        "no transform from the reals",
    ),
    "an atom": (
        lambda m: dist.ZeroInflatedDistribution(
            dist.Gamma(m.exp() + 1, 1.0), gate=torch.tensor(0.3)
        ),
        "with positive probability",
    ),
    "no numbers": (lambda m: dist.Unit(m), "no numbers"),
}


def program(make, place):
    def total(name, fn):
        value = pyro.sample(name, fn)
        return value.flatten(-fn.event_dim).sum(-1) if fn.event_dim else value

    def model(federation):
        level = pyro.sample("level", dist.Normal(0.0, 0.5))
        if place == "global":
            level = total("w", make(level))
        with federation.clients():
            own = total("own", make(level) if place == "local" else dist.Normal(level, 0.5))
            with federation.observations() as obs:
                fn = make(own) if place == "outcome" else dist.Normal(own, 1.0)
                pyro.sample("y", fn, obs=obs.get("y"))

    return model


def started(make, place):
    fn = make(torch.tensor(0.2)) if place == "outcome" else dist.Normal(0.2, 1.0)
    with noise.seeded(0):
        rows = [torch.stack([fn.sample() for _ in range(count)]) for count in ROWS]
    data = bf.Federation.from_arrays({f"c{i}": {"y": y} for i, y in enumerate(rows)})
    return bf.start(program(make, place), data, rounds=1).program, data, rows


@pytest.mark.parametrize(
    ("place", "kind"),
    [(place, kind) for place in ("local", "global") for kind in FITS]
    + [("outcome", kind) for kind in OUTCOMES],
)
def test_the_density_is_pyros_own_by_client(place, kind):
    make = OUTCOMES[kind]
    run, data, rows = started(make, place)
    batch = data.batch()
    with noise.seeded(1), handlers.given(batch.device, draws=DRAWS), poutine.trace() as tracer:
        run.model(batch)
    nodes = handlers.sample_sites(tracer.trace)
    found = {
        name: log_density(node).expand(DRAWS, -1, -1).sum((1, 2)) for name, node in nodes.items()
    }
    for s in range(DRAWS):
        value = {name: node["value"][s] for name, node in nodes.items() if name != "y"}
        level, expected = value["level"].squeeze(), {"w": 0.0, "own": 0.0, "y": 0.0}
        if place == "global":
            w, fn = value["w"][0, 0], make(level)
            level, expected["w"] = w.sum(), fn.log_prob(w)
        for i, outcomes in enumerate(rows):
            own = value["own"][i, 0]
            prior = make(level) if place == "local" else dist.Normal(level, 0.5)
            fn = make(own) if place == "outcome" else dist.Normal(own.sum(), 1.0)
            expected["own"] += prior.log_prob(own)
            expected["y"] += sum(fn.log_prob(y) for y in outcomes)
        for name in found.keys() - {"level"}:
            torch.testing.assert_close(
                found[name][s], torch.as_tensor(expected[name]), rtol=1e-4, atol=1e-3
            )


@pytest.mark.parametrize("place", ["local", "global"])
@pytest.mark.parametrize("kind", LATENTS)
def test_a_latent_variable_that_no_guide_can_have(kind, place):
    make, message = LATENTS[kind]
    with pytest.raises(ValueError, match=message) as raised:
        started(make, place)
    assert "\n" not in str(raised.value)


def test_no_distribution_of_pyro_ends_in_a_raw_error():
    """In the table that experiments/distributions.py writes, and docs/distributions.md shows."""
    table = Path(__file__).parents[2] / "experiments" / "distributions.md"
    rows = [line for line in table.read_text().splitlines() if line.startswith("|")][2:]
    assert len(rows) > 110 and not [row for row in rows if "FAILS" in row]
