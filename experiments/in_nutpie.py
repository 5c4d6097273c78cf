"""One chain of nutpie's NUTS on the log density of a model in NumPyro, and its gradient by JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import nutpie
from jax.flatten_util import ravel_pytree
from nutpie.compiled_pyfunc import from_pyfunc


def compile_density(potential: Callable[[Any], Any], z: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Return what nutpie samples, and the function that gives its vectors the structure of z.

    Args:
        potential: the negative log density of unconstrained values.
        z: such values, by name.
    """
    flat, unravel = ravel_pytree(z)
    value = jax.jit(jax.value_and_grad(lambda x: -potential(unravel(x))))

    def log_density() -> Any:
        return lambda x: tuple(np.asarray(part, dtype=float) for part in value(x))

    def expand(*_: int) -> Any:
        return lambda x: {"x": x}

    size = len(flat)
    return from_pyfunc(size, log_density, expand, [np.dtype(float)], [(size,)], ["x"]), unravel


def sample_chain(compiled: Any, seed: int) -> np.ndarray:
    """Return 1000 draws of the unconstrained vector after 1000 of warm-up, ``(1000, D)``."""
    trace = nutpie.sample(
        compiled, draws=1000, tune=1000, chains=1, cores=1, seed=seed, progress_bar=False
    )
    return np.asarray(trace.posterior["x"])[0]
