"""A membership game against private runs: measured lower bounds on ε beside what is claimed. Makes attack.md.

    python experiments/attack.py                    # minutes on two cores
    python experiments/attack.py --trials 200

The adversary knows the model, the algorithm, all settings, the seed, every other client's data, and both federations
that may be: they differ in one client's rows, chosen so that its uploads lie at opposite ends of the clip. It sees
every noisy sum of a run, works out what either federation would have sent in that round, and takes the likelihood
ratio of the whole transcript: by Neyman and Pearson no test does better. Where cohorts are secret, the ratio is of
mixtures over them. It also tries the noise that the run's seed would give. A test at a threshold with true positive
rate p and false positive rate q shows ε ≥ ln((p - δ) / q). p and q are taken by Clopper and Pearson's 99 % limits on
one half of the trials, at the threshold that is best on the other half.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from scipy.stats import beta
from torch import Tensor

import bayesfed as bf
from bayesfed.algorithms.protocol import Turn
from bayesfed.elbo import noise
from bayesfed.engine.cohort import Cohort

sys.path.append(str(Path(__file__).parent))
from tables import done, keep

HERE = Path(__file__).parent
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
        """What the clients have; the first one's rows lie on either side."""
        side = FAR if bit else -FAR
        others = {f"client {i}": {"y": [0.5 * i, -0.5 * i]} for i in range(1, self.clients)}
        return bf.Federation.from_arrays({"victim": {"y": [side, side]}} | others)

    def start(self, bit: int) -> bf.Run:
        """A run of one of the two federations."""
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
    """The noisy sums of all rounds."""
    told: list[dict[str, Tensor]] = []
    add_noise = bf.Privacy.add_noise

    def listening(self: bf.Privacy, *args: Any) -> dict[str, Tensor]:
        told.append(dict(add_noise(self, *args)))
        return dict(told[-1])

    bf.Privacy.add_noise = listening  # type: ignore[method-assign]
    try:
        yield told
    finally:
        bf.Privacy.add_noise = add_noise  # type: ignore[method-assign]


def sums(run: bf.Run, world: bf.Run, cohort: tuple[int, ...]) -> dict[str, Tensor]:
    """What a cohort of a world would send in the next round of a run, clipped and added up."""
    key = noise.fold(noise.key(run.plan.seed), run.done)
    rate = run.stopping.rate(run.done)
    turn = Turn(world.program, noise.fold(key, -1), run.cohort_size, rate)
    work = Cohort(
        world.plan,
        world.program,
        world.federation,
        world.clients,
        world.privacy,
        float(run.clip),
        noisy=True,
    )
    message = world.plan.algorithm.broadcast(turn, run.server)
    total, _, _ = work(message, torch.tensor(cohort), key, rate)
    return total


def log_density(
    run: bf.Run, told: dict[str, Tensor], total: dict[str, Tensor], clip: float, number: int
) -> float:
    """Of the noisy sums, given what they are the sums of; infinite where the seed's own noise accounts for them."""
    privacy, multiplier = run.privacy, run.multiplier
    zero = {name: torch.zeros_like(value) for name, value in total.items()}
    guess = dataclasses.replace(privacy, seed=run.plan.seed).add_noise(
        zero, clip, multiplier, number
    )
    if all(torch.allclose(told[n], total[n] + guess[n], rtol=1e-9) for n in total):
        return math.inf
    found = 0.0
    for name, value in total.items():
        scale = privacy.scale(name, clip, multiplier)
        law: Any = dist.Normal if privacy.mechanism == "gaussian" else dist.Laplace
        found += float(law(value, scale).log_prob(told[name]).sum())
    return found


def fresh(run: bf.Run) -> bf.Run:
    """A run as it started."""
    changed = {name: getattr(run, name).clone() for name in ("client_terms", "refused", "history")}
    return dataclasses.replace(run, clients=copy.deepcopy(run.clients), **changed)


def ratio(game: Game, starts: Sequence[bf.Run], bit: int) -> float:
    """ln p(transcript | one) - ln p(transcript | other) of a run of federation ``bit``."""
    worlds, run = [fresh(start) for start in starts], fresh(starts[bit])
    cohorts = list(itertools.combinations(range(game.clients), game.size))
    found = [0.0, 0.0]
    for number in range(game.rounds):
        clip = float(run.clip)
        expected = [[sums(run, world, cohort) for cohort in cohorts] for world in worlds]
        with overheard() as told:
            bf.step(run)
        for i, options in enumerate(expected):
            each = [log_density(run, told[0], total, clip, number) for total in options]
            found[i] += float(torch.tensor(each, dtype=torch.float64).logsumexp(0))
    return found[1] - found[0]


def lower_bound(zeros: list[float], ones: list[float], delta: float) -> float:
    """On ε, from the ratios of runs of either federation, at the middle of the widest gap that shows most."""
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


def played(name: str, first: int, trials: int) -> list[tuple[float, float]]:
    """The ratios of so many runs of either federation."""
    torch.set_num_threads(1)
    game = GAMES[name]
    starts = game.start(0), game.start(1)
    return [(ratio(game, starts, 0), ratio(game, starts, 1)) for _ in range(first, first + trials)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--games", nargs="+", choices=GAMES, default=list(GAMES))
    parser.add_argument("--trials", type=int, default=2000, help="of either federation")
    parser.add_argument("--jobs", type=int, default=2)
    asked = parser.parse_args()
    header = [
        "| mechanism | rounds | ε claimed | ε measured, at least | trials |",
        "| --- " * 5 + "|",
    ]
    found: dict[str, list[tuple[float, float]]] = {}
    calls = [(name, i, 100) for name in asked.games for i in range(0, asked.trials, 100)]
    for (name, *_), pairs in done(played, calls, asked.jobs, resume=False):
        found.setdefault(name, []).extend(map(tuple, pairs))
        if len(found[name]) >= asked.trials:
            zeros, ones = map(list, zip(*found[name], strict=True))
            run = GAMES[name].start(0)
            delta = run.privacy.delta if run.privacy.mechanism == "gaussian" else 0.0
            measured = lower_bound(zeros, ones, delta)
            cells = [name, run.rounds, f"{run.epsilon:.2f}", f"{measured:.2f}", 2 * len(zeros)]
            row = f"| {' | '.join(map(str, cells))} |"
            keep(HERE / "attack.md", header, row, list(GAMES))
            print(row, flush=True)


if __name__ == "__main__":
    main()
