"""Falls on the wards of three hospitals."""

import pyro
import pyro.distributions as dist
import torch


def falls(federation):
    """Monthly falls by age and staff: counts whose rates differ between wards, which are partially pooled."""
    base = pyro.sample("base", dist.Normal(0.0, 1.0))  # log falls in 30 days on the average ward
    effect = pyro.sample("effect", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with federation.clients():
        ward = pyro.sample("ward", dist.Normal(base, tau))
        with federation.observations() as obs:
            age, staff = (obs["age"] - 75.0) / 10.0, (obs["staff"] - 8.0) / 2.0
            rate = ward + effect[..., 0] * age + effect[..., 1] * staff
            mean = torch.exp(rate) * obs["days"] / 30.0
            pyro.sample("falls", dist.Poisson(mean), obs=obs.get("falls"))
