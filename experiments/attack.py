"""How much does a private run reveal, beside what is claimed? A membership game; makes attack.md.

    python experiments/attack.py                    # minutes on two cores
    python experiments/attack.py --trials 200 --out attack.md

The adversary has the model, the algorithm, all settings, the seed, every other client's data, and both federations that
are possible: they differ in one client's rows, chosen so that its uploads lie at opposite ends of the clip. It sees
every noisy sum of a run, computes what either federation would have sent in that round, and takes the likelihood ratio
of the whole transcript: by Neyman and Pearson no test does better. Where cohorts are secret, the ratio is of mixtures
over them. It also tries the noise that the run's seed would give. A test at a threshold with true positive rate p and
false positive rate q shows ε ≥ ln((p - δ) / q). p and q are taken by Clopper and Pearson's 99 % limits on one half of
the trials, at the threshold that is best on the other half.

In the last two games the adversary looks at the last bits of a single noisy number (Mironov 2012). If a sum can have
become the noisy number by no noise there is, it was not that sum. One game has floating-point noise, the other the
discrete noise that the package draws.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyro
import pyro.distributions as dist
import torch
from scipy.stats import beta
from torch import Tensor

import bayesfed as bf
from bayesfed.elbo import noise
from bayesfed.engine.cohort import Cohort
from bayesfed.engine.parts import flat
from bayesfed.rules import Turn
from bayesfed.steps.gradients import annealed

sys.path.append(str(Path(__file__).parent))
import runner

CONFIDENCE = 0.99
FAR = 50.0
SURE = 1e6


def shared(federation: Any) -> None:
    """A mean that all clients share."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    with federation.clients(), federation.observations() as obs:
        pyro.sample("y", dist.Normal(mu, 1.0), obs=obs.get("y"))


def varying(federation: Any) -> None:
    """A mean for every client."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    with federation.clients():
        alpha = pyro.sample("alpha", dist.Normal(mu, 1.0))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(alpha, 1.0), obs=obs.get("y"))


@dataclasses.dataclass(frozen=True)
class Game:
    """A private run that is attacked."""

    model: Any
    algorithm: Any
    privacy: bf.Privacy
    rounds: int = 2
    size: int = 3
    clients: int = 3

    def federation(self, bit: int) -> bf.Federation:
        """Return the clients' rows; those of the first lie on either side."""
        side = FAR if bit else -FAR
        others = {f"client {i}": {"y": [0.5 * i, -0.5 * i]} for i in range(1, self.clients)}
        return bf.Federation.from_arrays({"victim": {"y": [side, side]}} | others)

    def start(self, bit: int) -> bf.Run:
        """Start a run of one of the two federations."""
        return bf.start(
            self.model,
            self.federation(bit),
            self.algorithm,
            rounds=self.rounds,
            clients_per_round=self.size,
            privacy=self.privacy,
            execution=bf.Execution(compile=False),
        )


@contextmanager
def overheard() -> Iterator[list[dict[str, Tensor]]]:
    """Record the noisy sums of all rounds."""
    heard: list[dict[str, Tensor]] = []
    add_noise = bf.Privacy.add_noise

    def listening(self: bf.Privacy, *args: Any) -> dict[str, Tensor]:
        heard.append(dict(add_noise(self, *args)))
        return dict(heard[-1])

    with patch.object(bf.Privacy, "add_noise", listening):
        yield heard


def sums(run: bf.Run, world: bf.Run, cohort: tuple[int, ...]) -> dict[str, Tensor]:
    """Return what a cohort of a world would send in the next round of a run, clipped and added up."""
    key = noise.fold(noise.key(run.plan.seed), run.done)
    rate = annealed(run.plan.algorithm.lr_decay, run.done / run.rounds)
    added = run.privacy.scale("", float(run.clip), run.multiplier)
    turn = Turn(world.program, noise.fold(key, -1), run.cohort_size, rate, added)
    work = Cohort(world, float(run.clip), noisy=True)
    message = flat(world.plan.algorithm.broadcast(turn, run.server))
    total, _, _ = work(message, torch.tensor(cohort), key, rate)
    return total


def log_density(
    run: bf.Run, heard: dict[str, Tensor], total: dict[str, Tensor], clip: float, number: int
) -> float:
    """Return the log density of noisy sums given the sums; infinite where the seed's own noise explains them."""
    privacy, multiplier = run.privacy, run.multiplier
    zero = {name: torch.zeros_like(value) for name, value in total.items()}
    guess = dataclasses.replace(privacy, seed=run.plan.seed).add_noise(
        zero, clip, multiplier, number
    )
    if all(torch.allclose(heard[n], total[n] + guess[n], rtol=1e-9) for n in total):
        return math.inf
    found = 0.0
    for name, value in total.items():
        scale = privacy.scale(name, clip, multiplier)
        family: Any = dist.Normal if privacy.mechanism == "gaussian" else dist.Laplace
        found += float(family(value, scale).log_prob(heard[name]).sum())
    return found


def fresh(run: bf.Run) -> bf.Run:
    """Return a copy of a run as it started."""
    names = ("clients", "client_terms", "term_totals", "refused", "history")
    return dataclasses.replace(run, **{n: copy.deepcopy(getattr(run, n)) for n in names})


def ratio(game: Game, starts: Sequence[bf.Run], bit: int) -> float:
    """Return ln p(transcript | one) - ln p(transcript | other) of a run of federation ``bit``."""
    worlds, run = [fresh(start) for start in starts], fresh(starts[bit])
    cohorts = list(itertools.combinations(range(game.clients), game.size))
    found = [0.0, 0.0]
    for number in range(game.rounds):
        clip = float(run.clip)
        expected = [[sums(run, world, cohort) for cohort in cohorts] for world in worlds]
        with overheard() as heard:
            bf.step(run)
        for i, options in enumerate(expected):
            each = [log_density(run, heard[0], total, clip, number) for total in options]
            found[i] += float(torch.tensor(each, dtype=torch.float64).logsumexp(0))
    return found[1] - found[0]


def lower_bound(zeros: list[float], ones: list[float], delta: float) -> float:
    """Return a lower bound on ε from the ratios of runs of either federation.

    The threshold is the middle of the widest gap of those that show most.
    """
    half = len(zeros) // 2

    def shown(q: int, p: int, n: int) -> float:
        each = 1 - (1 - CONFIDENCE) / 2
        low = beta.ppf(1 - each, p, n - p + 1) if p else 0.0
        high = beta.ppf(each, q + 1, n - q) if q < n else 1.0
        return math.log(max(low - delta, 1e-12) / high)

    def above(values: list[float], level: float) -> int:
        return sum(value > level for value in values)

    seen = sorted({max(-SURE, min(SURE, value)) for value in zeros[:half] + ones[:half]})
    gaps = list(itertools.pairwise(seen)) or [(seen[0], seen[0])]
    low, high = max(
        gaps,
        key=lambda gap: (
            shown(above(zeros[:half], gap[0]), above(ones[:half], gap[0]), half),
            gap[1] - gap[0],
        ),
    )
    best, rest = (low + high) / 2, len(zeros) - half
    return max(0.0, shown(above(zeros[half:], best), above(ones[half:], best), rest))


GAMES = {
    "FedAvg, Gaussian": Game(shared, bf.FedAvg(lr=0.01), bf.Privacy(clip=0.5, noise=2.0)),
    "FedAvg, Laplace": Game(
        shared, bf.FedAvg(lr=0.01), bf.Privacy(clip=0.5, noise=2.0, mechanism="laplace")
    ),
    "FedAvg, adaptive clip": Game(shared, bf.FedAvg(lr=0.01), bf.Privacy(noise=2.0), rounds=4),
    "FedAvg, secret cohorts": Game(
        shared, bf.FedAvg(lr=0.01), bf.Privacy(clip=0.5, noise=1.0, mechanism="laplace"), size=2
    ),
    "PACPFL, Gaussian": Game(shared, bf.PACPFL(particles=1), bf.Privacy(clip=5.0, noise=2.0)),
    "PACPFL, Laplace": Game(
        shared, bf.PACPFL(particles=1), bf.Privacy(clip=5.0, noise=2.0, mechanism="laplace")
    ),
    "SFVI, Gaussian": Game(varying, bf.SFVI(local_steps=2), bf.Privacy(clip=1.0, noise=2.0)),
    "SFVI, Laplace": Game(
        varying, bf.SFVI(local_steps=2), bf.Privacy(clip=1.0, noise=2.0, mechanism="laplace")
    ),
}


def floating(privacy: bf.Privacy, total: Tensor) -> Tensor:
    """Add Laplace noise of uniform numbers of 52 bits, in single precision, as it was once."""
    centred = torch.rand((), dtype=torch.float64) - 0.5
    drawn = -centred.sign() * torch.log1p(-2 * centred.abs())
    return total + privacy.scale("", 1.0, 1.0) * drawn.to(total)


def discrete(privacy: bf.Privacy, total: Tensor) -> Tensor:
    """Add the noise of a private run."""
    return privacy.add_noise({"": total}, 1.0, 1.0, 0)[""]


BITS = {"last bits, floating-point noise": floating, "last bits, discrete noise": discrete}


def is_possible(privacy: bf.Privacy, total: Tensor, noisy: Tensor) -> bool:
    """Return false if no noise makes this sum that noisy number."""
    if noisy.dtype == torch.float64:  # on the grid
        return float((noisy - total) / privacy.grid("", 1.0)).is_integer()
    scale = privacy.scale("", 1.0, 1.0)
    near = ((noisy.double() - total.double()) / scale).to(total)
    steps = torch.arange(-64, 65, dtype=torch.int32)
    noises = (near.view(torch.int32) + steps).view(torch.float32)
    return bool((total + scale * noises == noisy).any())


def last_bits(add: Any, trials: int) -> list[tuple[float, float]]:
    """Return the ratios of that many sums of either federation, in which a client sends one or the other end."""
    privacy = bf.Privacy(clip=1.0, noise=1.0, mechanism="laplace")
    others = torch.tensor([[0.7], [0.4]])
    totals = []
    for side in (1.0, -1.0):
        upload, _ = privacy.clip_uploads({"": torch.cat([others, torch.tensor([[side]])])}, 1.0)
        totals.append(upload[""].sum(0)[0].to(torch.float32 if add is floating else torch.float64))

    def one(bit: int) -> float:
        noisy = add(privacy, totals[bit])
        densities = [
            -abs(float(noisy - t)) / privacy.scale("", 1.0, 1.0)
            if is_possible(privacy, t, noisy)
            else -math.inf
            for t in totals
        ]
        return densities[1] - densities[0]

    return [(one(0), one(1)) for _ in range(trials)]


def played(name: str, first: int, trials: int) -> list[tuple[float, float]]:
    """Return the ratios of that many runs of either federation."""
    game = GAMES[name]
    starts = game.start(0), game.start(1)
    return [(ratio(game, starts, 0), ratio(game, starts, 1)) for _ in range(first, first + trials)]


def measure(name: str, first: int, trials: int) -> dict[str, Any]:
    """Play a game that many times."""
    if name in BITS:
        ratios = last_bits(BITS[name], trials)
        return {"rounds": 1, "epsilon": 1.0, "delta": 0.0, "ratios": ratios}
    run = GAMES[name].start(0)
    delta = run.privacy.delta if run.privacy.mechanism == "gaussian" else 0.0
    ratios = played(name, first, trials)
    return {"rounds": run.rounds, "epsilon": run.epsilon, "delta": delta, "ratios": ratios}


def cells(_: Any, found: list[dict[str, Any]]) -> list[Any]:
    """Return the cells of a game from all its trials."""
    pairs, one = [pair for each in found for pair in each["ratios"]], found[0]
    zeros, ones = map(list, zip(*pairs, strict=True))
    bound = lower_bound(zeros, ones, one["delta"])
    return [one["rounds"], f"{one['epsilon']:.2f}", f"{bound:.2f}", 2 * len(pairs)]


def main() -> None:
    given = runner.arguments(__doc__, jobs=2, trials=2000)
    rows = {name: [(name, i, 100) for i in range(0, given.trials, 100)] for name in (*GAMES, *BITS)}
    columns = "mechanism | rounds | ε claimed | ε measured, at least | trials"
    runner.table(columns, rows, measure, given, cells)


if __name__ == "__main__":
    main()
