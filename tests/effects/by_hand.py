"""Fits and draws of the same quantities in NumPy."""

import numpy as np

import bayesfed as bf

S = 200


def as_numpy(draws):
    return {name: value.double().numpy() for name, value in draws.items()}


def fitted(text, frame, **settings):
    model = bf.formula(text, frame, **settings)
    posterior = bf.fit(model, model.federation, rounds=3, execution=bf.Execution(compile=False))
    return posterior, as_numpy(posterior.derived(num_samples=S))


def check(found, expected, tolerance=2e-5):
    expected = np.stack([np.broadcast_to(one, S) for one in expected], 1)
    np.testing.assert_allclose(found.draws.numpy(), expected, rtol=tolerance, atol=tolerance)
