"""Deaths by treatment and age, with an effect of the treatment for each hospital."""

import pyro
import pyro.distributions as dist


def trial(federation):
    """Logistic regression: ``treated`` and ``died`` are 0 or 1, ``age`` is in years."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.5))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    arm = pyro.sample("arm", dist.Normal(0.0, 1.5))
    arm_sd = pyro.sample("arm_sd", dist.HalfNormal(0.5))
    age = pyro.sample("age", dist.Normal(0.0, 1.0))
    with federation.clients():
        level = pyro.sample("level", dist.Normal(mu, tau))
        effect = pyro.sample("effect", dist.Normal(arm, arm_sd))
        with federation.observations() as obs:
            decades = (obs["age"] - 66.0) / 10.0  # every hospital subtracts the same number
            logits = level + effect * obs["treated"] + age * decades
            pyro.sample("died", dist.Bernoulli(logits=logits), obs=obs.get("died"))
