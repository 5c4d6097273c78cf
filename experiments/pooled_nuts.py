"""NUTS on the pooled data, for any program of bayesfed's, knowing nothing of bayesfed's own inference.

Pyro gives the potential energy of the program as it is written, with all clients in one plate. Its value and gradient
are traced into one list of operations and compiled, since of so small a model Pyro's handlers take nearly all the time;
at random points the result is compared with Pyro's own. NumPyro's NUTS walks over it, calling back at each step. A
reference takes seconds so, where Pyro's own NUTS takes minutes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import arviz as az
import jax
import numpy as np
import pyro
import torch
from numpyro.infer import MCMC, NUTS
from pyro import poutine
from pyro.infer.mcmc.util import initialize_model
from pyro.infer.reparam import LocScaleReparam
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.distributions import constraints
from torch.fx.experimental.proxy_tensor import make_fx

import bayesfed as bf
from bayesfed.elbo.form import for_batches
from bayesfed.elbo.sites import sites

RUNS = Path(__file__).parents[1] / "runs" / "reference"
CHAINS, WARMUP, DRAWS = 4, 1000, (1000, 4000)
"""More draws are taken where with fewer they do not agree or count for too little:"""
R_HAT, ESS = 1.02, 400


def nuts(
    name: str, model: Callable[[Any], None], federation: bf.Federation, centred: bool
) -> dict[str, np.ndarray]:
    """Draws ``(S, ...)`` of the program's continuous latent sites; kept in runs/reference.

    With ``centred=False`` Pyro's LocScaleReparam makes the local sites non-centred: the same posterior, and
    easier to walk where a client has few rows.
    """
    path = RUNS / f"{name}.npz"
    if path.exists():
        return dict(np.load(path))
    began = time.perf_counter()
    found = sites(for_batches(model, federation), federation).values()
    latent = [s for s in found if not s.observed and not s.support.is_discrete]
    moved = [s.name for s in latent if s.local and _is_real(s.support) and not centred]
    free = poutine.reparam(model, config={site: LocScaleReparam(0.0) for site in moved})
    starts = []
    for chain in range(CHAINS):
        pyro.clear_param_store()
        pyro.set_rng_seed(chain)
        first, potential, transforms, _ = initialize_model(free, (federation,))
        starts.append(torch.cat([u.detach().reshape(-1) for u in first.values()]))
    shapes = {site: u.shape for site, u in first.items()}

    def energy(z: Tensor) -> list[Tensor]:
        z = z.detach().requires_grad_()
        value = potential(_parts(z, shapes))
        return [value.detach(), *torch.autograd.grad(value, z)]

    def values(z: Tensor) -> list[Tensor]:
        given = {site: transforms[site].inv(u) for site, u in _parts(z, shapes).items()}
        nodes = poutine.trace(poutine.condition(free, given)).get_trace(federation).nodes
        return [nodes[s.name]["value"].squeeze(1 if s.local else ()) for s in latent]

    fast, of_draw = _traced(energy, starts), _traced(values, starts)
    for draws in DRAWS:
        chains = _walked(fast, torch.stack(starts), draws)
        drawn = [[of_draw(z) for z in chain] for chain in chains]
        merged = {
            site.name: np.stack([torch.stack([d[i] for d in chain]).numpy() for chain in drawn])
            for i, site in enumerate(latent)
        }
        told = az.convert_to_dataset(merged)
        r_hat, ess = float(az.rhat(told).to_array().max()), float(az.ess(told).to_array().min())
        seconds = time.perf_counter() - began
        print(f"{name}: NUTS {seconds:.0f} s, r_hat {r_hat:.3f}, ess {ess:.0f}", flush=True)
        if r_hat < R_HAT and ess > ESS:
            break
    result = {k: v.reshape(-1, *v.shape[2:]) for k, v in merged.items()}
    RUNS.mkdir(parents=True, exist_ok=True)
    np.savez(path, **result)
    return result


def _parts(z: Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """The sites' unconstrained values from one vector of all."""
    parts = z.split([shape.numel() for shape in shapes.values()])
    return {site: part.reshape(shapes[site]) for site, part in zip(shapes, parts, strict=True)}


def _traced(
    what: Callable[[Tensor], list[Tensor]], at: list[Tensor]
) -> Callable[..., list[Tensor]]:
    """The function as compiled operations, found equal to itself at these points and between them."""
    with pyro.validation_enabled(False):
        graph = make_fx(what, decomposition_table=select_decomp_table())(at[0].clone())
    fast = torch._inductor.compile(graph, [at[0]])
    for z in [*at, *(a.lerp(b, 0.3) for a, b in itertools.pairwise(at))]:
        torch.testing.assert_close(fast(z), what(z), rtol=1e-4, atol=1e-4)
    return fast


def _walked(energy: Callable[[Tensor], list[Tensor]], starts: Tensor, draws: int) -> Tensor:
    """Chains of NumPyro's NUTS over a potential energy, ``(chains, draws, size)``."""
    like = [jax.ShapeDtypeStruct((), np.float32), jax.ShapeDtypeStruct(starts[0].shape, np.float32)]

    def call(z: Any) -> list[np.ndarray]:
        return [x.numpy() for x in energy(torch.from_numpy(np.array(z)))]

    @jax.custom_vjp
    def potential(z: Any) -> Any:
        return jax.pure_callback(call, like, z)[0]

    def forward(z: Any) -> Any:
        return tuple(jax.pure_callback(call, like, z))

    potential.defvjp(forward, lambda gradient, by: (by * gradient,))
    mcmc = MCMC(
        NUTS(potential_fn=potential, target_accept_prob=0.9),
        num_warmup=WARMUP,
        num_samples=draws,
        num_chains=CHAINS,
        chain_method="sequential",
        progress_bar=False,
    )
    mcmc.run(jax.random.PRNGKey(0), init_params=starts.numpy())
    return torch.from_numpy(np.array(mcmc.get_samples(group_by_chain=True)))


def _is_real(support: Any) -> bool:
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return support is constraints.real
