"""NUTS on the pooled data for any program that bayesfed takes, independent of bayesfed's own inference.

Pyro gives the potential energy of the program as it is written, with all clients in one plate. Its value and gradient
are traced into one list of operations and compiled, since Pyro's handlers take nearly all the time of so small a model.
At random points the result is compared with Pyro's own. nutpie's NUTS samples it: a reference takes a quarter of a
minute, where Pyro's own NUTS takes three to seven minutes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import arviz as az
import numpy as np
import nutpie
import pyro
import pyro.distributions as dist
import torch
from nutpie.compiled_pyfunc import from_pyfunc
from pyro import poutine
from pyro.infer.mcmc.util import initialize_model
from pyro.infer.reparam import LocScaleReparam, TransformReparam
from torch import Tensor
from torch.distributions import biject_to
from torch.utils._pytree import tree_leaves

import bayesfed as bf
from bayesfed.elbo.handlers import sample_sites
from bayesfed.elbo.sites import Site, sites
from bayesfed.tracing.recorder import Recorder
from bayesfed.vmap.choose import for_batches

RUNS = Path(__file__).parents[1] / "runs/reference"
CHAINS, WARMUP, DRAWS, MORE = 4, 1000, 1000, 8000
R_HAT, ESS = 1.01, 500
"""The largest r-hat and the smallest effective sample size that chains may have."""
POINTS = 8
"""Number of random points at which the compiled function is compared with Pyro's."""
EMPTY = {
    getattr(torch.ops.aten, name)
    for name in ("empty", "zeros", "new_empty", "new_zeros", "empty_like", "zeros_like")
}
"""Functions that make tensors into which a program may write what depends on its inputs."""
Function = Callable[[Tensor], list[Tensor]]


def nuts(
    name: str,
    model: Callable[[Any], None],
    federation: bf.Federation,
    *,
    least: float = ESS,
) -> dict[str, np.ndarray]:
    """Return draws ``(S, ...)`` of the program's continuous latent variables; they are stored in runs/reference.

    Normal variables are non-centred by Pyro's LocScaleReparam, which leaves the posterior as it is. Where the chains do
    not agree then, clients may have too many rows for it: local variables are sampled as they are written, and the
    chains with the larger effective sample size are taken. Where they do not agree, or their effective sample size is
    less than ``least``, longer chains are made.
    """
    path = RUNS / f"{name}.npz"
    if path.exists():
        return dict(np.load(path))
    start = time.perf_counter()
    found = sites(for_batches(model, federation), federation).values()
    latent = [s for s in found if not s.observed and not s.support.is_discrete]
    pyro.set_rng_seed(0)
    nodes = sample_sites(poutine.trace(model).get_trace(federation))
    normal = [s for s in latent if _is_normal(nodes[s.name]["fn"])]
    kinds = {
        name: node["value"]
        for name, node in nodes.items()
        if not node["is_observed"] and node["fn"].support.is_discrete
    }
    tried: list[tuple[_Compiled, Any]] = []
    for free in (normal, [s for s in normal if not s.local]):
        if not tried or (not good(tried[0][1]) and free != normal):
            way = _Compiled(model, federation, latent, free, kinds)
            tried.append((way, way.sample(DRAWS)))
    best, chains = max(tried, key=lambda pair: ess(pair[1]))
    if not good(chains) or ess(chains) < least:
        chains = best.sample(MORE)
    print(
        f"{name}: NUTS {time.perf_counter() - start:.0f} s, r_hat {r_hat(chains):.3f}, ess {ess(chains):.0f}, "
        f"{int(chains.sample_stats.diverging.sum())} divergences",
        flush=True,
    )
    draws = {s.name: chains.posterior[s.name].values for s in latent}
    result = {site: value.reshape(-1, *value.shape[2:]) for site, value in draws.items()}
    RUNS.mkdir(parents=True, exist_ok=True)
    np.savez(path, **result)
    return result


def good(chains: Any) -> bool:
    """Return whether the chains agree, and their effective sample size is large enough."""
    return r_hat(chains) < R_HAT and ess(chains) > ESS


def r_hat(chains: Any) -> float:
    """Return the largest r-hat of all entries; constant ones have none."""
    return float(az.rhat(chains).to_array().max())


def ess(chains: Any) -> float:
    """Return the smallest effective sample size of all entries."""
    return float(az.ess(chains).to_array().min())


class _Compiled:
    """A program with some variables non-centred, as compiled functions of one unconstrained vector."""

    def __init__(
        self,
        model: Any,
        federation: bf.Federation,
        latent: list[Site],
        free: list[Site],
        kinds: dict[str, Tensor],
    ) -> None:
        config: dict[str, Any] = {s.name: TransformReparam() for s in free if _is_positive(s)}
        config |= {
            f"{s.name}_base" if s.name in config else s.name: LocScaleReparam(0.0) for s in free
        }
        program = poutine.reparam(model, config=config)
        points = []
        for seed in range(POINTS):
            pyro.set_rng_seed(seed)
            first, potential, transforms, _ = initialize_model(program, (federation,))
            points.append(torch.cat([u.detach().reshape(-1) for u in first.values()]))
        shapes = {site: u.shape for site, u in first.items()}

        def energy(z: Tensor) -> list[Tensor]:
            z = z.detach().requires_grad_()
            value = potential(_parts(z, shapes))
            return [value.detach(), *torch.autograd.grad(value, z)]

        def values(z: Tensor) -> list[Tensor]:
            given = {site: transforms[site].inv(u) for site, u in _parts(z, shapes).items()}
            at = poutine.condition(program, given | kinds)
            nodes = poutine.trace(at).get_trace(federation).nodes
            return [nodes[s.name]["value"].squeeze(1 if s.local else ()) for s in latent]

        self.latent, self.size = latent, len(points[0])
        self.energy = _traced(energy, points, compiles=True)
        self.values = _traced(values, points, compiles=False)

    def sample(self, draws: int) -> Any:
        """Return chains of NUTS as ArviZ' data."""
        like = self.values(torch.zeros(self.size))

        def log_density(z: np.ndarray) -> tuple[float, np.ndarray]:
            energy, gradient = self.energy(torch.from_numpy(z).float())
            return -float(energy), -gradient.double().numpy()

        def expanded(z: np.ndarray) -> dict[str, np.ndarray]:
            found = self.values(torch.from_numpy(z).float())
            return {s.name: x.numpy() for s, x in zip(self.latent, found, strict=True)}

        compiled = from_pyfunc(
            self.size,
            lambda: log_density,
            lambda *_: expanded,
            [np.dtype(np.float32)] * len(like),
            [tuple(x.shape) for x in like],
            [s.name for s in self.latent],
        )
        return nutpie.sample(
            compiled,
            draws=draws,
            tune=WARMUP,
            chains=CHAINS,
            cores=1,
            seed=0,
            target_accept=0.9,
            progress_bar=False,
            save_warmup=False,
        )


def _parts(z: Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Split one vector into the unconstrained values of all sample sites."""
    parts = z.split([shape.numel() for shape in shapes.values()])
    return {site: part.reshape(shapes[site]) for site, part in zip(shapes, parts, strict=True)}


class _Dependent(Recorder):
    """A recorder of what depends on the inputs, or may be written into; everything else is computed once."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        empty = func.overloadpacket in EMPTY
        if not self._depends((args, kwargs)) and not empty:
            return func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.index.Tensor or self._depends(args[1]):
            return super().__torch_dispatch__(func, types, args, kwargs)
        result = func(*args)  # at known places: the shape depends on nothing
        places = [at for mask in args[1] for at in _positions(mask)]
        self.note(func, (args[0], places), {}, result)
        return result

    def _depends(self, values: Any) -> bool:
        tensors = [x for x in tree_leaves(values) if isinstance(x, Tensor)]
        return any(x in self._values and self._values[x].constant is None for x in tensors)


def _positions(mask: Tensor | None) -> list[Tensor | None]:
    """Return a Boolean index as one of integers."""
    return (
        list(mask.nonzero(as_tuple=True))
        if mask is not None and mask.dtype == torch.bool
        else [mask]
    )


def _traced(what: Function, at: list[Tensor], *, compiles: bool) -> Function:
    """Return a function as a list of operations, compared with the function itself at these points."""
    recorder, z = _Dependent(), at[0].clone()
    with pyro.validation_enabled(False), recorder.with_inputs([z]):
        found = what(z)
    fast: Function = recorder.function(found)
    if compiles:
        fast = torch._inductor.compile(recorder.graph(found), [z])
    for z in at:
        torch.testing.assert_close(fast(z), what(z), rtol=1e-4, atol=1e-4)
    return fast


def _is_positive(site: Site) -> bool:
    """Return whether a variable for which :func:`_is_normal` holds is log-Normal."""
    return not bool(biject_to(site.support)(torch.tensor([-1.0])) < 0)


def _is_normal(fn: Any) -> bool:
    """Return whether a distribution is Normal, log-Normal or Student's: it has a location and a scale."""
    while isinstance(fn, dist.Independent | dist.ExpandedDistribution):
        fn = fn.base_dist
    return isinstance(fn, dist.Normal | dist.LogNormal | dist.StudentT)
