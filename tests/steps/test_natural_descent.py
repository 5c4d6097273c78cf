"""q(w_i) at its optimum, which is known in closed form for a linear regression."""

import numpy as np
import pytest

import bayesfed as bf
from bayesfed import models


def rows():
    """Three clients, whose three fields go together: their correlations are 0.99."""
    generator, clients = np.random.default_rng(0), {}
    for i in range(3):
        x = generator.normal(size=(20, 1)) + 0.1 * generator.normal(size=(20, 3))
        y = i + x @ np.array([1.0, -0.5, 0.5]) + 0.5 * generator.normal(size=20)
        clients[f"client {i}"] = {"x": x, "y": y}
    return bf.Federation.from_arrays(clients)


@pytest.mark.parametrize(("method", "weight"), [("FedABML", 1.0), ("PFedBayes", 0.05)])
def test_clients_reach_the_optimum_where_their_variables_are_correlated(method, weight):
    """Diagonal steps went back and forth, without end: by more than the largest of these standard deviations.

    Against exp(−½ wᵀ P w + hᵀ w), KL times a weight, a factorised q has means P⁻¹ h and variances weight / P_jj.
    """
    data = rows()
    posterior = bf.fit(models.varying_slope, data, getattr(bf, method)(), rounds=1)
    theta = {n: v[0].double().numpy() for n, v in posterior.sample(1).items()}
    centre = np.append(theta["mu_alpha"], theta["mu_beta"])
    prior = weight / np.append(theta["tau_alpha"], theta["tau_beta"]) ** 2
    found = {n: v.double().numpy().reshape(3, -1) for n, v in posterior.local_params.items()}
    loc = np.hstack([found["alpha.loc"], found["beta.loc"]])
    scale = np.exp(np.hstack([found["alpha.log_scale"], found["beta.log_scale"]]))
    for i, name in enumerate(data.names):
        one = data.select([name])
        x = np.hstack([np.ones((20, 1)), one["x"].double().numpy()])
        precision = x.T @ x / theta["sigma"] ** 2 + np.diag(prior)
        shift = x.T @ one["y"].double().numpy() / theta["sigma"] ** 2 + prior * centre
        sd = (weight / precision.diagonal()) ** 0.5
        np.testing.assert_allclose(loc[i], np.linalg.solve(precision, shift), atol=0.02 * sd.max())
        np.testing.assert_allclose(scale[i], sd, rtol=0.01)
