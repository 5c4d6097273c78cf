"""Losses of point estimates equal the densities of the model itself."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.elbo import noise
from bayesfed.elbo.elbo import (
    centred_losses,
    client_losses,
    elbo_terms,
    local_priors,
    server_pass,
)

pytestmark = pytest.mark.usefixtures("float64")


def rates(federation):
    """A model with a local site whose prior is not Normal."""
    shape = pyro.sample("shape", dist.LogNormal(0.0, 1.0))
    with federation.clients():
        middle = pyro.sample("middle", dist.Normal(shape, 1.0))
        rate = pyro.sample("rate", dist.Gamma(shape, torch.exp(-middle)))
        with federation.observations() as obs:
            pyro.sample("y", dist.Exponential(rate), obs=obs.get("y"))


def waits():
    generator = torch.Generator().manual_seed(0)
    return bf.Federation.from_arrays(
        {f"{n} rows": {"y": torch.rand(n, generator=generator) + 0.1} for n in (2, 5)}
    )


CASES = {
    "varying_slope": lambda: (models.varying_slope, datasets.grunfeld()),
    "no Normal prior": lambda: (rates, waits()),
    "network": lambda: (
        models.Network(models.mlp(64, 3, 10), hyper_scale=1.0),
        datasets.digits(clients=3)[0],
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_clients_at_the_centre_of_their_priors(case):
    """The losses and gradients from one run equal those from two runs, with the priors' moments in between."""
    model, data = case()
    program = bf.FedAvg().program(model, data)
    batch = data.batch()
    theta = {n: (v + 0.1).requires_grad_() for n, v in program.init.items()}
    found = centred_losses(program, theta, batch)
    middle = program.guide.at(local_priors(program, theta, batch))
    expected = client_losses(program, theta | middle, batch, {}, 1)
    torch.testing.assert_close(found.nll, expected.nll)
    torch.testing.assert_close(found.hyper, expected.hyper)
    ours, theirs = (
        torch.autograd.grad(losses.nll.sum(), list(theta.values()), allow_unused=True)
        for losses in (found, expected)
    )
    torch.testing.assert_close(ours, theirs)


def test_losses_are_the_densities_of_the_program():
    """The likelihood and the hyper-prior of a pooled run of the model at the same values."""
    data = waits()
    program = bf.FedAvg().program(rates, data)
    found = centred_losses(program, program.init, data.batch())
    shape = program.init["shape.loc"].exp()
    middle = shape.expand(2, 1)
    rate = torch.exp(local_priors(program, program.init, data.batch())["rate"].loc)
    values = {"shape": shape, "middle": middle, "rate": rate}
    trace = poutine.trace(poutine.condition(rates, values)).get_trace(data)
    trace.compute_log_prob()
    torch.testing.assert_close(found.nll, -trace.nodes["y"]["log_prob"].sum(-1))
    # in the coordinate log(shape) the density has the factor shape
    hyper = -(trace.nodes["shape"]["log_prob"] + shape.log())
    torch.testing.assert_close(found.hyper, hyper.expand(2))


@pytest.mark.parametrize(
    "algorithm",
    [
        bf.SFVI(),
        bf.SFVI(global_guide=bf.MeanField(), conditioned=False),
        bf.PFedVEM(),
    ],
    ids=["full rank", "mean field", "points"],
)
def test_a_parameter_that_is_left_out_is_named(algorithm):
    """A parameter without a value is an error, in the model and in the guide, local or global."""

    def model(federation):
        slope = pyro.param("slope", torch.tensor(0.5))
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with federation.clients() as index:
            ones = torch.ones(len(index), 1)
            spread = pyro.param("spread", ones, constraint=dist.constraints.positive, event_dim=0)
            a = pyro.sample("a", dist.Normal(mu, spread))
            with federation.observations() as obs:
                pyro.sample("y", dist.Normal(a + slope, 1.0), obs=obs.get("y"))

    data = waits()
    program, batch = algorithm.program(model, data), data.batch()
    params = program.init | program.init_locals(batch)
    server = program.noise(noise.key(0), 1, local=False)
    supplied = server | program.noise(noise.fold(noise.key(0), data.stream_ids), 1, local=True)
    assert {"slope", "spread"} < params.keys()
    elbo_terms(program, params, {}, batch, supplied, 1)
    for left_out in params:
        rest = {name: value for name, value in params.items() if name != left_out}
        with pytest.raises(RuntimeError, match=f"parameter '{left_out}' is given no value"):
            elbo_terms(program, rest, {}, batch, supplied, 1)
    for left_out in program.init:  # the server has no client's parameters, and needs none
        rest = {name: value for name, value in program.init.items() if name != left_out}
        with pytest.raises(RuntimeError, match=f"parameter '{left_out}' is given no value"):
            server_pass(program, rest, server, 1)
    server_pass(program, program.init, server, 1)
