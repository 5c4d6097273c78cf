"""PAC-PFL: SVGD, the evidence of clients, conditioning."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import RenyiELBO
from torch.distributions import Normal

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.data.minibatches import Minibatches
from bayesfed.elbo import noise
from bayesfed.guides.particles import PARTICLES
from bayesfed.rules import Turn
from bayesfed.rules.stein import stein_direction
from bayesfed.steps.evidence import log_evidence
from bayesfed.steps.job import Job
from tests.scenarios import summed

float64 = pytest.mark.usefixtures("float64")


def line(federation):
    """y = (μ + a_i) + noise, a client's a_i local: the evidence of a client is Gaussian."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(mu, 0.5))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(a, 1.0), obs=obs.get("y"))


def shared(federation):
    """No local variables: the posterior of μ is Gaussian, in closed form."""
    mu = pyro.sample("mu", dist.Normal(1.0, 2.0))
    with federation.clients(), federation.observations() as obs:
        pyro.sample("y", dist.Normal(mu, 1.0), obs=obs.get("y"))


def data(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return bf.Federation.from_arrays(
        {
            f"client {i}": {"y": 1 + torch.randn(n, generator=generator)}
            for i, n in enumerate(lengths)
        }
    )


def update(algorithm, program, message, federation, keys=None, private=False):
    """Uploads and terms of all clients."""
    message = message if "theta" in message else {"theta": message}
    keys = noise.fold(noise.key(0), federation.stream_ids) if keys is None else keys
    rows = Minibatches(
        lambda step: federation.batch(), federation.lengths, int(federation.lengths.max())
    )
    answer = algorithm.work(Job(program, message, {}, rows, keys, private=private))
    return answer.upload, answer.terms


def draws_of_prior(program, keys, particles):
    """Return the noise of L draws of the clients' variables for each particle."""
    draws = program.local_draws if program.locals else 1
    return program.noise(keys, particles * draws, local=True)


def log_evidence_of_line(mu, y):
    covariance = torch.eye(len(y)) + 0.25
    return dist.MultivariateNormal(mu * torch.ones(len(y)), covariance).log_prob(y)


# -- SVGD ---------------------------------------------------------------------------------------------


@float64
def test_one_particle_is_gradient_ascent():
    """Of the log joint of a Gaussian model, against the closed form of each step."""
    federation = data(3, 5)
    y, lr = federation["y"], 0.01
    algorithm = bf.PACPFL(particles=1, optimizer="sgd", lr=lr, lr_decay=1.0)
    posterior = bf.fit(shared, federation, algorithm, rounds=7)
    torch.manual_seed(0)
    program = algorithm.program(shared, federation)
    mu, unit = program.init[PARTICLES].squeeze(), program.guide.unit.squeeze()
    for _ in range(7):
        mu = mu + lr * unit**2 * ((y - mu).sum() - (mu - 1) / 4)
    torch.testing.assert_close(posterior.params[PARTICLES].squeeze(), mu, rtol=1e-10, atol=1e-10)


def test_the_hyper_posterior_of_a_gaussian_model():
    """50 particles of one mean: its mean to a tenth of the posterior's sd, its sd within 15 % (Monte Carlo: 10 %)."""
    federation = data(6, 9, 4)
    posterior = bf.fit(
        shared, federation, bf.PACPFL(particles=50, lr=0.05), rounds=400, progress=False
    )
    precision = federation.rows + 1 / 4
    mean, sd = float(federation["y"].sum() + 1 / 4) / precision, precision**-0.5
    particles = posterior.params[PARTICLES].squeeze()
    assert abs(float(particles.mean()) - mean) < 0.1 * sd
    assert abs(float(particles.std()) / sd - 1) < 0.15


# -- what clients send --------------------------------------------------------------------------------


@float64
def test_the_evidence_is_renyis_bound_at_alpha_zero():
    """logsumexp − ln L of eq. 38 against Pyro's estimator with the same draws, one client at a time."""
    federation, draws = data(3, 5), 6
    algorithm = bf.PACPFL(particles=2, draws=draws, integrated=False)
    program = algorithm.program(line, federation)
    keys = noise.fold(noise.key(3), federation.stream_ids)
    particles = torch.tensor([[0.3], [-1.0]])
    supplied = draws_of_prior(program, keys, 2)
    found = log_evidence(
        program, {PARTICLES: particles}, particles[:, None, None], federation.batch(), supplied
    )
    supplied = supplied["a"][0]  # (2 L, K, 1)
    for kappa, mu in enumerate(particles.squeeze()):
        for k, name in enumerate(federation.names):
            a = iter(mu + 0.5 * supplied[kappa * draws : (kappa + 1) * draws, k, 0])
            own = federation.select([name])

            def model(mu=mu, own=own):
                a = pyro.sample("a", dist.Normal(mu, 0.5))
                with pyro.plate("rows", own.rows):
                    pyro.sample("y", dist.Normal(a, 1.0), obs=own["y"])

            def guide(mu=mu, a=a):
                class Given(dist.Normal):
                    def rsample(self, sample_shape=()):
                        return next(a)

                pyro.sample("a", Given(mu, 0.5))

            theirs = -RenyiELBO(alpha=0.0, num_particles=draws).loss(model, guide)
            torch.testing.assert_close(float(found[kappa, k]), float(theirs), rtol=1e-9, atol=1e-9)


@float64
def test_the_evidence_nears_the_closed_form():
    """A million draws of a client's variable: the standard error of ln Z is below 0.002."""
    federation = data(3, 5)
    algorithm = bf.PACPFL(particles=1, draws=100_000)
    program = algorithm.program(line, federation)
    phi = torch.tensor([[[[0.3]]]])
    found = torch.stack(
        [
            log_evidence(
                program,
                {PARTICLES: phi[:, 0, 0]},
                phi,
                federation.batch(),
                draws_of_prior(program, noise.fold(noise.key(seed), federation.stream_ids), 1),
            )[0].detach()
            for seed in range(10)
        ]
    ).mean(0)
    exact = torch.stack(
        [log_evidence_of_line(0.3, federation.select([n])["y"]) for n in federation.names]
    )
    torch.testing.assert_close(found, exact, rtol=0, atol=0.008)


@float64
def test_the_evidence_of_a_bayesian_network():
    """A linear one, for regression: y ~ N(X m, s² X Xᵀ + noise²). 200,000 draws of three weights."""
    torch.manual_seed(0)
    federation = bf.Federation.from_arrays({"a": {"x": torch.randn(3, 2), "y": torch.randn(3)}})
    model = models.Network(
        torch.nn.Linear(2, 1), likelihood="normal", noise=0.7, scale=0.5, hyper_scale=1.0
    )
    algorithm = bf.PACPFL(particles=1, draws=200_000)
    program = algorithm.program(model, federation)
    m = torch.randn(3)
    keys = noise.fold(noise.key(0), federation.stream_ids)
    found = log_evidence(
        program,
        {PARTICLES: m[None]},
        m[None, None, None],
        federation.batch(),
        draws_of_prior(program, keys, 1),
    )
    design = torch.cat([federation["x"], torch.ones(3, 1)], 1)
    covariance = 0.25 * design @ design.T + 0.49 * torch.eye(3)
    exact = dist.MultivariateNormal(design @ m, covariance).log_prob(federation["y"])
    assert abs(float(found) - float(exact)) < 0.02  # standard error 0.003


@float64
def test_a_client_uploads_the_gradient_of_each_particle():
    federation = data(3, 5)
    algorithm = bf.PACPFL(particles=2)
    program = algorithm.program(shared, federation)
    message = {PARTICLES: torch.tensor([[0.3], [-1.0]])}
    keys = noise.fold(noise.key(0), federation.stream_ids)
    upload, terms = update(algorithm, program, message, federation, keys)
    for k, name in enumerate(federation.names):
        y = federation.select([name])["y"]
        by_hand = (y[:, None] - message[PARTICLES].T).sum(0)[:, None]
        torch.testing.assert_close(
            upload["gradients"][PARTICLES][k], by_hand, rtol=1e-10, atol=1e-10
        )
        likelihood = Normal(message[PARTICLES], 1.0).log_prob(y).sum(1).mean()
        torch.testing.assert_close(terms[k], likelihood, rtol=1e-10, atol=1e-10)


@float64
def test_tau_weighs_the_clients_and_a_flat_hyper_prior_weighs_nothing():
    federation = data(4, 4)
    y, lr = federation["y"], 0.01
    for tau, flat in ((0.25, False), (1.0, True)):
        algorithm = bf.PACPFL(
            particles=1,
            optimizer="sgd",
            lr=lr,
            lr_decay=1.0,
            tau=tau,
            flat=flat,
        )
        torch.manual_seed(0)
        program = algorithm.program(shared, federation)
        start, unit = program.init[PARTICLES].squeeze(), program.guide.unit.squeeze()
        found = bf.fit(shared, federation, algorithm, rounds=1).params[PARTICLES].squeeze()
        prior = 0.0 if flat else (start - 1) / 4
        by_hand = start + lr * unit**2 * (tau * (y - start).sum() - prior)
        torch.testing.assert_close(found, by_hand, rtol=1e-10, atol=1e-10)


@float64
def test_beta_tempers_the_likelihood():
    """β = 1 counts a client's rows as one: E exp(mean log p), by quadrature."""
    federation = data(4)
    algorithm = bf.PACPFL(particles=1, draws=200_000, beta=1.0)
    program = algorithm.program(line, federation)
    phi = torch.tensor([[[[0.3]]]])
    keys = noise.fold(noise.key(0), federation.stream_ids)
    supplied = draws_of_prior(program, keys, 1)
    found = log_evidence(program, {PARTICLES: phi[0, 0]}, phi, federation.batch(), supplied)
    grid = torch.linspace(-5, 6, 20_001)
    density = Normal(0.3, 0.5).log_prob(grid).exp()
    mean = Normal(grid[:, None], 1.0).log_prob(federation["y"]).mean(1).exp()
    exact = torch.trapezoid(density * mean, grid).log()
    assert abs(float(found) - float(exact)) < 0.005  # standard error 0.001
    with pytest.raises(ValueError, match="beta is for models with local"):
        bf.PACPFL(beta=1.0).program(shared, federation)


def processes(clients, rows):
    """Functions from one Gaussian process, mean −0.3, RBF kernel of length 1, noise of variance 0.25."""
    generator = torch.Generator().manual_seed(0)
    x = 2 * torch.randn(clients, rows, generator=generator)
    covariance = (-(x[..., None] - x[:, None]).square() / 2).exp() + 0.25 * torch.eye(rows)
    y = torch.linalg.cholesky(covariance) @ torch.randn(clients, rows, 1, generator=generator)
    fields = {"x": x.flatten(), "y": y.flatten() - 0.3}
    federation = bf.Federation(
        fields, torch.arange(clients + 1) * rows, [f"{i}" for i in range(clients)]
    )
    return federation, torch.tensor([[-0.3, math.log(math.expm1(0.25 - 1e-4))]])


@float64
def test_a_minibatch_of_a_gaussian_process_counts_for_all_rows():
    """n_i / b_i times ln Z of the minibatch, by torch's multivariate Normal; clients of 2 rows give both."""
    federation, phi = processes(3, 6)
    algorithm = bf.PACPFL(particles=1)
    program = algorithm.program(models.GaussianProcess(), federation)
    rows = torch.tensor([[0, 4, -1], [5, 1, 2], [3, -1, -1]])
    found = log_evidence(
        program,
        {PARTICLES: phi},
        phi[:, None, None],
        federation.batch(torch.arange(3), rows),
        draws_of_prior(program, federation.stream_ids, 1),
    )
    for k in range(3):
        own = 6 * k + rows[k][rows[k] >= 0]
        x, y = federation["x"][own], federation["y"][own]
        covariance = (-(x[:, None] - x).square() / 2).exp() + 0.25 * torch.eye(len(x))
        log_z = dist.MultivariateNormal(torch.full_like(y, -0.3), covariance).log_prob(y)
        torch.testing.assert_close(found[0, k], 6 / len(x) * log_z)


@float64
def test_minibatches_of_a_gaussian_process_have_no_drift_where_the_data_come_from():
    """Their gradients have mean 0 at the true φ, to four standard errors over 4000 clients.

    Rows that counted twice under one function (the letter of Algorithm 2, Z_{m_i} of b rows) would not: the mean
    gradient in the noise's parameter would be −1.2, a hundred standard errors, and end in no noise at all.
    """
    federation, phi = processes(4000, 6)
    algorithm = bf.PACPFL(particles=1)
    program = algorithm.program(models.GaussianProcess(), federation)
    batch = federation.batch(torch.arange(4000), torch.tensor([[0, 2, 4]]).expand(4000, 3))
    supplied = draws_of_prior(program, federation.stream_ids, 1)
    slopes, _, _ = algorithm.steps.slopes(program, {PARTICLES: phi}, batch, supplied, False)
    slopes = slopes[PARTICLES].reshape(4000, 2)
    assert (slopes.mean(0).abs() < 4 * slopes.std(0) / 4000**0.5).all()


@float64
def test_clients_send_the_curvature_of_their_evidence_where_it_is_of_use():
    """ȳ_i of n rows is N(μ, 1/4 + 1/n) given μ, whatever μ is. Named optimisers and single points do without."""
    federation = data(4, 9)
    algorithm = bf.PACPFL(particles=3)
    program = algorithm.program(line, federation)
    server = algorithm.start(program)
    asked = algorithm.broadcast(Turn(program, noise.key(0), 2), server)
    exact = -1 / (0.25 + 1 / torch.tensor([4.0, 9.0]))
    found = update(algorithm, program, asked, federation)[0]["curvature"][PARTICLES]
    torch.testing.assert_close(found, exact[:, None, None, None].expand(2, 3, 1, 1))
    private = update(algorithm, program, asked, federation, private=True)[0]
    assert private.keys() == {"gradients"}
    for other in (bf.PACPFL(particles=3, optimizer="adam"), bf.PFedGP()):
        program = other.program(line, federation)
        plain = other.broadcast(Turn(program, noise.key(0), 2), other.start(program))
        assert plain.keys() == {"theta"}


# -- parameters beside particles -------------------------------------------------------------------------


def half_and_half(federation):
    """A random global, one whose prior is a parameter, and a parameter that the likelihood reads."""
    centre = pyro.param("centre", torch.tensor(0.5))
    mu = pyro.sample("mu", dist.Normal(centre, 2.0))
    slope = pyro.param("slope", torch.tensor([0.2, -0.3]), event_dim=1)
    sd = pyro.param("sd", torch.tensor(1.5), constraint=dist.constraints.positive)
    with federation.clients(), federation.observations() as obs:
        mean = mu + (obs["x"] * slope).sum(-1)
        pyro.sample("y", dist.Normal(mean, sd), obs=obs.get("y"))


def with_inputs(*lengths):
    generator = torch.Generator().manual_seed(0)
    return bf.Federation.from_arrays(
        {
            f"client {i}": {
                "x": torch.randn(n, 2, generator=generator),
                "y": 1 + torch.randn(n, generator=generator),
            }
            for i, n in enumerate(lengths)
        }
    )


@float64
@pytest.mark.parametrize("flat", [False, True])
def test_parameters_take_the_mean_of_their_slopes_over_the_particles(flat):
    """A round by hand: clients' gradients by autograd of each particle's joint density; SVGD for the particles."""
    federation, tau, lr = with_inputs(4, 7), 0.3, 0.01
    algorithm = bf.PACPFL(particles=3, tau=tau, optimizer="sgd", lr=lr, flat=flat)
    program = algorithm.program(half_and_half, federation)
    server = algorithm.start(program)
    start = {name: value.clone() for name, value in server["params"].items()}
    upload, _ = update(algorithm, program, start, federation)
    after, _ = algorithm.decode(Turn(program, noise.key(0), 2), server, summed(upload))

    at = {name: value.clone().requires_grad_() for name, value in start.items()}
    evidence, prior = [], []
    for mu in at[PARTICLES][:, 0]:
        mean = mu + federation["x"] @ at["slope"]
        evidence.append(Normal(mean, at["sd"].exp()).log_prob(federation["y"]).sum())
        prior.append(Normal(at["centre"], 2.0).log_prob(mu))
    joint = tau * torch.stack(evidence) + (0.0 if flat else torch.stack(prior))
    grads = dict(
        zip(at, torch.autograd.grad(joint.sum(), list(at.values()), allow_unused=True), strict=True)
    )
    for name, value in start.items():
        if name == PARTICLES:
            unit = program.guide.unit
            by_hand = value + lr * unit * stein_direction(value / unit, unit * grads[name])
        else:
            slope = torch.zeros_like(value) if grads[name] is None else grads[name] / 3
            by_hand = value + lr * slope
        torch.testing.assert_close(after["params"][name], by_hand, rtol=1e-10, atol=1e-10)
    assert (after["params"]["centre"] != start["centre"]) == (not flat)


def only_parameters(federation):
    """Least squares with a local offset: its marginal likelihood is Gaussian."""
    mu = pyro.param("mu", torch.tensor(0.0))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(mu, 0.5))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(a, 1.0), obs=obs.get("y"))


@float64
def test_parameters_alone_are_points_of_maximum_marginal_likelihood():
    """μ̂ in closed form: the clients' means, weighted by n_i / (n_i + 4); and draws of it are that point."""
    federation = data(6, 3, 12)
    algorithm = bf.PACPFL(particles=1, flat=True, draws=100, lr=0.03)
    posterior = bf.fit(only_parameters, federation, algorithm, rounds=300)
    means = torch.stack([federation.select([n])["y"].mean() for n in federation.names])
    weight = federation.lengths / (federation.lengths + 4)
    exact = float((weight * means).sum() / weight.sum())
    assert abs(float(posterior.params["mu"]) - exact) < 0.02
    a = posterior.sample(2000)["a"]
    for k, n in enumerate(federation.lengths.tolist()):
        mean = (n * means[k] + 4 * posterior.params["mu"]) / (n + 4)
        assert abs(float(a[:, k].mean() - mean)) < 4 * ((n + 4) * 2000) ** -0.5 + 0.02
    with pytest.raises(ValueError, match="no global of the model is random"):
        bf.PACPFL(particles=2, flat=True).program(only_parameters, federation)


def test_what_a_client_cannot_do_is_named():
    def own_spread(federation):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with federation.clients() as index:
            ones = torch.ones(len(index), 1)
            spread = pyro.param("spread", ones, constraint=dist.constraints.positive, event_dim=0)
            a = pyro.sample("a", dist.Normal(mu, spread))
            with federation.observations() as obs:
                pyro.sample("y", dist.Normal(a, 1.0), obs=obs.get("y"))

    def gamma(federation):
        mu = pyro.sample("mu", dist.LogNormal(0.0, 1.0))
        with federation.clients():
            a = pyro.sample("a", dist.Gamma(2.0, mu))
            with federation.observations() as obs:
                pyro.sample("y", dist.Normal(a, 1.0), obs=obs.get("y"))

    with pytest.raises(ValueError, match="parameter 'spread' is a client's own.*PFedVEM"):
        bf.PACPFL().program(own_spread, data(3, 4))
    with pytest.raises(ValueError, match="from their prior.*SFVI.*site 'a'"):
        bf.PACPFL().program(gamma, data(3, 4))


def test_a_model_without_global_variables_is_refused():
    train, _ = datasets.digits(clients=4)
    with pytest.raises(ValueError, match="no global of the model is random.*PFedGP"):
        bf.PACPFL().program(models.Network(models.mlp(64, 10)), train)
