"""NUTS on the pooled data for any program that bayesfed takes, independent of bayesfed's own inference.

Pyro gives the potential energy of the program as it is written, with all clients in one plate. Its value and gradient
are traced into one list of operations and compiled, since Pyro's handlers take nearly all the time of so small a model.
At random points the result is compared with Pyro's own. nutpie's NUTS samples it: a reference takes a quarter of a
minute for a thousand effective draws, where Pyro's own NUTS takes three to seven minutes.

Summaries of the draws are kept in ``references``, one file per posterior, so that tables are made again without NUTS.
A file has the potential energy of its program at a seeded random point: where a program or its data have changed since,
that differs, and NUTS is run again.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import arviz as az
import numpy as np
import pyro
import pyro.distributions as dist
import torch
from distances import Summary, summary
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

REFERENCES = Path(__file__).parent / "references"
SAME = 1e-4
"""The largest relative difference between energies of the same program, as machines round differently."""
CHAINS, WARMUP, DRAWS, MORE = 4, 1000, 1000, 8000
R_HAT, ESS = 1.01, 500
"""The largest r-hat and the smallest effective sample size of chains that have mixed."""
LEAST = 4000
"""The smallest effective sample size of a reference: fewer draws miss tails, and so have too small a spread."""
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
    least: float = LEAST,
) -> dict[str, Summary]:
    """Return summaries of draws of the program's continuous latent variables, from ``references`` if they are there.

    Normal variables are non-centred by Pyro's LocScaleReparam, which leaves the posterior as it is. Where the chains do
    not agree then, clients may have too many rows for it: local variables are sampled as they are written, all or one
    of them, and the chains with the largest effective sample size are taken. Where they do not agree, or their
    effective sample size is less than ``least``, longer chains are made.
    """
    path = REFERENCES / f"{name.replace(',', '').replace(' ', '_')}.json"
    energy = _energy(model, federation)
    if path.exists():
        kept = json.loads(path.read_text(encoding="utf-8"))
        if abs(kept["energy"] - energy) <= SAME * max(abs(energy), 1.0):
            return {
                site: Summary(**{name: np.array(part) for name, part in parts.items()})
                for site, parts in kept["variables"].items()
            }
        print(f"{name}: the program or its data have changed, NUTS is run again", flush=True)
    start = time.perf_counter()
    chains = _chains(model, federation, least)
    about = {
        "seconds": round(time.perf_counter() - start),
        "r_hat": round(r_hat(chains), 4),
        "ess": round(ess(chains)),
        "divergences": int(chains.sample_stats.diverging.sum()),
    }
    print(f"{name}: NUTS {about}", flush=True)
    sizes = az.ess(chains)
    found = {
        str(site): _summary(draws.values, sizes[site].values)
        for site, draws in chains.posterior.data_vars.items()
    }
    REFERENCES.mkdir(exist_ok=True)
    path.write_text(_written(energy, about, found), encoding="utf-8")
    return found


def _energy(model: Callable[[Any], None], federation: bf.Federation) -> float:
    """Return the potential energy of a program at a seeded random point."""
    pyro.set_rng_seed(0)
    first, potential, *_ = initialize_model(model, (federation,))
    return float(potential(first))


def _summary(chains: np.ndarray, size: np.ndarray) -> Summary:
    """Return the summary of chains ``(C, S, ...)`` of a variable, whose effective sample size is ``(...)``."""
    found = summary(chains.reshape(-1, *chains.shape[2:]))
    return found._replace(size=np.where(found.sd > 0, np.ravel(size), found.size))


def _written(energy: float, about: Mapping[str, Any], found: Mapping[str, Summary]) -> str:
    """Return the text of a file of references: numbers have five digits."""
    variables = {
        site: {
            name: np.vectorize(lambda x: float(f"{x:.5g}"))(part).tolist()
            for name, part in parts._asdict().items()
        }
        for site, parts in found.items()
    }
    return json.dumps({"energy": energy, **about, "variables": variables}) + "\n"


def _chains(model: Callable[[Any], None], federation: bf.Federation, least: float) -> Any:
    """Return chains of NUTS of the program's continuous latent variables, as ArviZ' data."""
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
    local = [s for s in normal if s.local]
    ways = [
        normal,
        *([s for s in normal if s not in some] for some in (local, *([s] for s in local))),
    ]
    tried: list[tuple[_Compiled, Any]] = []
    for number, free in enumerate(ways):
        if not any(good(chains) for _, chains in tried) and free not in ways[:number]:
            way = _Compiled(model, federation, latent, free, kinds)
            tried.append((way, way.sample(DRAWS)))
    best, chains = max(tried, key=lambda pair: ess(pair[1]))
    if good(chains) and ess(chains) >= least:
        return chains
    return best.sample(max(MORE, math.ceil(DRAWS * least / max(ess(chains), ESS))))


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
        import nutpie
        from nutpie.compiled_pyfunc import from_pyfunc

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
