"""Random hierarchical programs that are correct, with data of their own; seed by seed the same."""

import numpy as np
import pyro
import pyro.distributions as dist
import torch

import bayesfed as bf

GLOBALS = {
    "real": lambda: dist.Normal(0.3, 2.0),
    "wide": lambda: dist.Normal(0.0, 50.0),
    "heavy": lambda: dist.Cauchy(0.0, 1.0),
    "positive": lambda: dist.Gamma(2.0, 1.5),
    "scale": lambda: dist.HalfCauchy(2.0),
    "interval": lambda: dist.Uniform(-1.0, 3.0),
    "vector": lambda: dist.Normal(0.0, 1.0).expand([3]).to_event(1),
    "matrix": lambda: dist.Normal(0.0, 1.0).expand([2, 3]).to_event(2),
    "ordered": lambda: dist.TransformedDistribution(
        dist.Normal(torch.zeros(2), 1.0).to_event(1),
        dist.transforms.OrderedTransform(),
    ),
    "simplex": lambda: dist.Dirichlet(torch.ones(3)),
    "correlations": lambda: dist.LKJCholesky(2, 1.5),
}
LOCALS = {
    "real": lambda m, s: dist.Normal(m, s),
    "heavy": lambda m, s: dist.StudentT(4.0, m, s),
    "positive": lambda m, s: dist.LogNormal(m.tanh(), s.clamp(max=1.0)),
    "unit": lambda m, s: dist.Beta(1.0 + s, 2.0),
    "vector": lambda m, s: dist.Normal(m[..., None] + torch.zeros(2), s[..., None]).to_event(1),
    "jointly": lambda m, s: dist.MultivariateNormal(
        m[..., None] + torch.zeros(2), scale_tril=s[..., None, None] * torch.eye(2)
    ),
    "simplex": lambda m, s: dist.Dirichlet(torch.ones(3) * s[..., None]),
}
LIKELIHOODS = {
    "Normal": (lambda m, s: dist.Normal(m, s), lambda u: u),
    "StudentT": (lambda m, s: dist.StudentT(5.0, m, s), lambda u: u),
    "Laplace": (lambda m, s: dist.Laplace(m, s), lambda u: u),
    "LogNormal": (lambda m, s: dist.LogNormal(m, s), lambda u: u.exp()),
    "Gamma": (lambda m, s: dist.Gamma(1.0 + s, m.clamp(-5, 5).exp()), lambda u: u.exp()),
    "Poisson": (lambda m, s: dist.Poisson(m.clamp(-5, 5).exp()), lambda u: u.abs().round()),
    "NegativeBinomial": (
        lambda m, s: dist.NegativeBinomial(1.0 + s, logits=m),
        lambda u: u.abs().round(),
    ),
    "Bernoulli": (lambda m, s: dist.Bernoulli(logits=m), lambda u: (u > 0).to(u)),
    "Binomial": (
        lambda m, s: dist.Binomial(4, logits=m),
        lambda u: u.abs().round().clamp(max=4),
    ),
    "Categorical": (
        lambda m, s: dist.Categorical(logits=torch.stack([m, -m, 0.5 * m], -1)),
        lambda u: u.abs().round().clamp(max=2),
    ),
    "pair": (
        lambda m, s: dist.Normal(torch.stack([m, -m], -1), s[..., None]).to_event(1),
        lambda u: torch.stack([u, 1 - u], -1),
    ),
}


def _number(value, event_dim):
    """One number a site, whatever its shape."""
    return value.sum(tuple(range(-event_dim, 0))) if event_dim else value


def program(seed):
    """A model and its federation.

    Globals and locals of several families, shapes and supports; locals that depend on earlier ones; regressions with
    global and with the client's own coefficients; fields of a client (the same in all of its rows), of a row and
    group labels; one to three observed sites, of a row, or of a client as a mean of its rows worked out beforehand.
    """
    rng = np.random.default_rng(seed)

    def some(kinds, low, high):
        return rng.choice(list(kinds), size=int(rng.integers(low, high + 1))).tolist()

    global_kinds, local_kinds = some(GLOBALS, 0, 3), some(LOCALS, 1, 3)
    seen, columns = some(LIKELIHOODS, 1, 2), int(rng.integers(1, 4))
    chained, centred, sloped, grouped, of_client, own_scale = rng.random(6) < 0.5
    link = rng.choice(["additive", "multiplied", "quadratic"])

    def model(federation):
        beta = pyro.sample("beta", dist.Normal(0.0, 1.0).expand([columns]).to_event(1))
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        effects = torch.zeros(3)
        if grouped:
            effects = pyro.sample(
                "effects", dist.Normal(torch.zeros(3), tau[..., None]).to_event(1)
            )
        level, spread = torch.zeros(()), 0.2 + tau
        for j, kind in enumerate(global_kinds):
            fn = GLOBALS[kind]()
            value = _number(pyro.sample(f"g{j}", fn), fn.event_dim)
            level = level + (0.3 * value if kind != "heavy" else value.tanh())
        with federation.clients():
            for j, kind in enumerate(local_kinds):
                fn = LOCALS[kind](level, spread)
                value = _number(pyro.sample(f"l{j}", fn), fn.event_dim)
                level = level + value
                if chained:
                    spread = 0.3 + value.abs().clamp(max=3.0)
            slope = pyro.sample("slope", dist.Normal(beta[..., 0], tau)) if sloped else 0.0
            noise = pyro.sample("own", dist.LogNormal(-0.5, 0.3)) if own_scale else 0.1 + tau
            with federation.observations() as obs:
                x = obs["x"] - 0.5 if centred else obs["x"]
                mean = level + (beta[..., :] * x).sum(-1)
                if link == "multiplied":
                    mean = mean * (1.0 + 0.1 * obs["u"])
                if link == "quadratic":
                    mean = mean + 0.1 * beta[..., 0] * obs["x"][..., 0].square()
                mean = mean + slope * obs["x"][..., -1]
                label = torch.nn.functional.one_hot(obs["group"].long(), 3)
                mean = mean + (effects * label).sum(-1)
                for j, kind in enumerate(seen):
                    fn = LIKELIHOODS[kind][0](mean, noise + torch.zeros_like(mean))
                    pyro.sample(f"y{j}", fn, obs=obs.get(f"y{j}"))
                summary = obs["summary"][..., :1]
            if of_client:
                pyro.sample("summary", dist.Normal(level, 1.0), obs=summary)

    clients = {}
    for i in range(int(rng.integers(1, 7))):
        n, u = int(rng.integers(1, 12)), float(rng.normal())
        rows = {
            "x": torch.tensor(rng.normal(0.5, 1.0, (n, columns)), dtype=torch.float32),
            "u": torch.full((n,), u),
            "summary": torch.full((n,), float(rng.normal())),
            "group": torch.tensor(rng.integers(0, 3, n), dtype=torch.float32),
        }
        for j, kind in enumerate(seen):
            noise = torch.tensor(rng.normal(0.0, 1.5, n), dtype=torch.float32)
            rows[f"y{j}"] = LIKELIHOODS[kind][1](noise)
        clients[f"client {i}"] = rows
    return model, bf.Federation.from_arrays(clients)
