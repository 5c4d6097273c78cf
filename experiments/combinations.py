"""Which compositions of globals, locals, steps and rule run, on three models? Makes combinations.md.

    python experiments/combinations.py            # everything, about a quarter of an hour
    python experiments/combinations.py Network

Every combination of the package's parts, with their default settings, is checked. Those that
:meth:`bayesfed.Algorithm.check` refuses are counted by the reason; each refusal must be a ValueError of one line. All
others are fitted: 60 rounds of two hierarchies, 10 rounds of a network in minibatches of 10 rows.

"method" is the first method of the literature with the same parts, whatever their settings, or "no paper's". The result
on a hierarchy is the largest shift of the posterior mean of a global variable from that of NUTS on the pooled rows, in
NUTS' standard deviations; a point estimate of θ is compared with the same mean. On the network it is the accuracy of
all test rows. A model that lacks what the parts need is refused, and a run that cannot go on is stopped, by a message
of one line. Any other error is a mistake, and the script fails in the end.

MedianOfInstitutions is Mean unless there are institutions: its combinations are checked but not fitted.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import runner
import torch
from distances import distance, moments
from pyro.infer import MCMC, NUTS
from torch.distributions import constraints

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.algorithms import METHODS
from bayesfed.algorithms.algorithm import subclasses
from bayesfed.elbo.sites import sites
from bayesfed.guides.globals import Gaussian, LaplaceGaussian, OwnGuide, Particles, Point
from bayesfed.guides.locals import Kept, Locals, Remade
from bayesfed.rules import Rule
from bayesfed.steps import Alternate, Descent, InTurn, Steps

COLUMNS = "model | globals | locals | steps | rule | method | result"
NO_PAPER = "no paper's"
FAMILIES = (bf.MeanField(), bf.FullRank(), bf.Flow())


# -- models and their data -------------------------------------------------------------------------


@cache
def case(name: str) -> tuple[Any, bf.Federation, bf.Federation | None, dict[str, Any]]:
    """Return a model, its rows, test rows and the options of its fits."""
    if name == "Network":
        train, test = datasets.digits(clients=5)
        options = {"rounds": 10, "batch_size": 10}
        return models.Network(models.mlp(64, 32, 10), local=["2."]), train, test, options
    data = {"varying_slope": datasets.grunfeld, "hierarchical_logistic": datasets.china_smoking}
    return getattr(models, name), data[name](), None, {"rounds": 60}


def mean_field(federation: Any) -> None:
    """Sample all variables of a model independently: the guide that a user might write. See :func:`with_guide`."""
    raise NotImplementedError


def with_guide(algorithm: bf.Algorithm, model: Any, federation: bf.Federation) -> bf.Algorithm:
    """Return the algorithm with a mean-field guide of this model in place of :func:`mean_field`."""
    found = [site for site in sites(model, federation).values() if not site.observed]

    def sample(name: str, support: Any, shape: tuple[int, ...], events: int) -> None:
        loc = pyro.param(f"{name}.loc", torch.zeros(shape), event_dim=events)
        scale = pyro.param(
            f"{name}.scale",
            torch.full(shape, 0.3),
            constraint=constraints.positive,
            event_dim=events,
        )
        negative = bool(support.check(torch.full(shape, -1.0)).all())
        family = dist.Normal if negative else dist.LogNormal
        pyro.sample(name, family(loc, scale).to_event(events))

    def guide(federation: Any) -> None:
        for site in found:
            if not site.local:
                shape = tuple(site.event_shape)
                sample(site.name, site.support, shape, len(shape))
        with federation.clients():
            for site in found:
                if site.local:
                    shape = tuple(site.event_shape)
                    sample(site.name, site.support, (len(federation), 1, *shape), len(shape))

    return algorithm.replace(globals=OwnGuide(guide))


def nuts(name: str) -> dict[str, np.ndarray]:
    """Return 500 draws of Pyro's NUTS on the pooled rows; they are stored in runs/reference."""
    path = runner.ROOT / f"runs/reference/combinations_{name}.npz"
    if not path.exists():
        model, federation, *_ = case(name)
        pyro.set_rng_seed(0)
        kernel = NUTS(model, jit_compile=True, ignore_jit_warnings=True, max_tree_depth=7)
        chain = MCMC(kernel, num_samples=500, warmup_steps=500, disable_progbar=True)
        chain.run(federation)
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, **{n: draws.numpy() for n, draws in chain.get_samples().items()})
    return dict(np.load(path))


# -- parts -----------------------------------------------------------------------------------------


def label(part: Any) -> str:
    """Return the name of a part, with the choice that makes it another: ``Kept point``, ``Descent body``."""
    name = type(part).__name__
    if isinstance(part, InTurn):
        return f"{name} {', '.join(phase.moves for phase in part.phases)}"
    if isinstance(part, Alternate):
        return f"{name} {type(part.inner).__name__}"
    if isinstance(part, Kept | Remade):
        return f"{name} {part.kind}"
    return f"{name} {part.moves}" if isinstance(part, Descent) else name


def labels(algorithm: bf.Algorithm) -> tuple[str, ...]:
    """Return the names of the four parts."""
    parts = (algorithm.globals, algorithm.locals, algorithm.steps, algorithm.rule)
    return tuple(label(part) for part in parts)


def defaults(base: type[Any], *leave_out: type[Any]) -> list[Any]:
    """Return the package's parts of a kind with default settings."""
    kinds = [cls for cls in subclasses(base) if cls.__module__.startswith("bayesfed.")]
    return [cls() for cls in kinds if cls not in leave_out]


def compositions() -> dict[tuple[str, ...], bf.Algorithm]:
    """Return all combinations, by the names of their parts."""
    some = [Point(), Gaussian(), *FAMILIES, Particles(), LaplaceGaussian(), OwnGuide(mean_field)]
    kinds = [family(kind) for family in (Kept, Remade) for kind in ("point", "normal")]
    steps = [Descent(moves) for moves in ("globals", "body", "locals", "all")]
    steps += [method().steps for method in (bf.FedRep, bf.Ditto, bf.FedABML, bf.PFedMe)]
    every = itertools.product(
        some,
        [*kinds, *defaults(Locals, Kept, Remade)],
        [*steps, *defaults(Steps, Descent, InTurn, Alternate)],
        defaults(Rule),
    )
    return {labels(found): found for found in (bf.Algorithm(*parts) for parts in every)}


@cache
def method_names() -> dict[tuple[str, ...], str]:
    """Return the methods of the literature by the names of their parts; the first, where several share them."""
    made = [(name, method()) for name, method in METHODS.items()]
    made += [("SFVI", bf.SFVI(global_guide=family)) for family in FAMILIES]
    made += [("SFVI", bf.SFVI(guide=mean_field))]
    made += [("SFVIAvg", bf.SFVIAvg(global_guide=family)) for family in FAMILIES[:2]]
    return {labels(algorithm): name for name, algorithm in reversed(made)}


def refusal(algorithm: bf.Algorithm) -> str:
    """Return why the parts do not fit; empty where they do.

    Raises:
        AssertionError: the message has several lines.
    """
    try:
        algorithm.check()
    except ValueError as error:
        assert "\n" not in str(error), error
        return str(error)
    return ""


def reason(message: str) -> str:
    """Return a refusal without the names of parts and without what to write instead."""
    start = message.split(": ", 1)[1].split(": take ")[0]
    return re.sub(r"(globals|locals|steps|rule)=\w+\(\)", r"\1", start)


# -- the table -------------------------------------------------------------------------------------


def measure(name: str, *parts: str) -> list[str]:
    """Fit a model by a composition; return the method's name and the result."""
    model, train, test, options = case(name)
    algorithm = compositions()[parts]
    if isinstance(algorithm.globals, OwnGuide):
        algorithm = with_guide(algorithm, model, train)
    quiet = {"progress": False, "seed": 1, "execution": bf.Execution(compile=False)}
    method = method_names().get(parts, NO_PAPER)
    try:
        posterior = bf.fit(model, train, algorithm, **options, **quiet)
        return [method, result(posterior, name, test)]
    except Exception as error:  # each is told apart, and a mistake fails the script in the end
        how = "refused" if isinstance(error, ValueError) else "stopped"
        if not isinstance(error, ValueError | bf.Stopped) or "\n" in str(error):
            how = f"mistake: {type(error).__name__}"
        return [method, f"{how}: {error}".replace("\n", " ").replace("|", "/")]


def result(posterior: bf.Posterior, name: str, test: bf.Federation | None) -> str:
    """Return how good a fit is.

    Raises:
        FloatingPointError: draws are not finite.
    """
    if test is not None:
        (site,) = posterior.program.observed
        right = posterior.probabilities(test, 50)[site.name].argmax(-1) == test["y"]
        return f"accuracy {100 * float(right.double().mean()):.1f} %"
    names = [site.name for site in posterior.program.globals]
    draws = posterior.sample(2000)
    if not all(value.isfinite().all() for value in draws.values()):
        raise FloatingPointError("draws are not finite")
    shift, _, most = distance(moments(draws, names), moments(nuts(name), names))
    return f"{'distance from NUTS’ mean' if most < 1e-3 else 'shift'} {shift:.2f}"


def new_ones(found: dict[Any, list[str]]) -> set[tuple[str, ...]]:
    """Return the compositions that no paper has and that ran on a model."""
    good = ("accuracy", "shift", "distance")
    return {
        k[1:] for k, (name, cell) in found.items() if name == NO_PAPER and cell.startswith(good)
    }


def summary(refused: dict[tuple[str, ...], str], found: dict[Any, list[str]]) -> str:
    """Return the numbers of combinations, and the refusals by their reasons."""
    counts = Counter(reason(message) for message in refused.values())
    examples = {reason(message): message for message in reversed(refused.values())}
    lines = [
        f"Of {len(compositions()):,} combinations {len(refused):,} are refused by their parts. "
        f"{len({key[1:] for key in found})} of the others are fitted here; {len(new_ones(found))} of them, whose "
        "parts are those of no paper's method, run on at least one model. The refusals, each kind with an example:",
        "",
        *(f"- {count:,} times {why}: “{examples[why]}”" for why, count in counts.most_common()),
    ]
    return "\n".join(lines)


def main() -> None:
    given = runner.arguments(__doc__)
    every = compositions()
    refused = {parts: why for parts, algorithm in every.items() if (why := refusal(algorithm))}
    only_between = {parts for parts in every if parts[-1] == "MedianOfInstitutions"}
    fitting = [parts for parts in every if parts not in refused.keys() | only_between]
    cases = ("Network", "varying_slope", "hierarchical_logistic")
    found: dict[Any, list[str]] = {}

    def remember(key: Any, results: list[Any]) -> list[str]:
        found[key] = results[0]
        return found[key]

    rows = {(name, *parts): [(name, *parts)] for name in cases for parts in fitting}
    runner.table(COLUMNS, rows, measure, given, remember, note=lambda: summary(refused, found))
    mistakes = [f"{key}: {cell}" for key, (_, cell) in found.items() if cell.startswith("mistake")]
    assert not mistakes, "\n".join(mistakes)
    assert len(new_ones(found)) >= 5, "hardly a composition runs that no paper has"


if __name__ == "__main__":
    main()
