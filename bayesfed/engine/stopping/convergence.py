"""When a run without a number of rounds is done: at full rate until q(θ) has settled, then it cools down.

A place of q(θ) is its means and log standard deviations, unconstrained; lengths are in standard deviations of q. A
round's move, divided by the part of the way to its aim that the round went (:meth:`Algorithm.pace`), is a full step,
and the mean of these is how far there is to go, noise aside. q(θ) has settled when over a third of the rounds so far,
and since the oldest of the clients' last visits (every one must have been seen),

    the mean full step, less its own noise, is short (:data:`STILL`),
    the noise of where full steps lead is small (:data:`NOISE`),
    all moves together are short (:data:`MOVED`): what is slow is not yet still, and
    the ELBO has not risen, beyond its noise: what clients keep, which nobody else sees, is still too.

Then the rates fall over a third as many rounds again, which averages noise out. If q(θ) moves far meanwhile
(:data:`FAR`), the run goes on at full rate.

Where clients weigh draws around q(θ) in the end (:mod:`bayesfed.output.correction`), it need not be so near. Once it is
still to :data:`NEAR` times as much, draws are weighed, once. If they can stand for q(θ), or q(θ) for itself, the run is
done: there is no noise to be averaged out. If not, it goes on until it has settled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesfed.elbo.program import Params, Program
from bayesfed.engine.stopping.drift import NATS, NATS_A_ROW, moments
from bayesfed.steps.gradients import annealed

BOUND, USUAL = 500, 60
"""The most rounds, and as many as there are to be expected."""
STILL, NOISE, MOVED, FAR = 0.1, 0.05, 0.1, 0.25
"""In standard deviations of q(θ), or in its log standard deviation."""
NEAR = 3.0
"""How many times as far from rest q(θ) may be when draws around it are weighed."""
LEAST, COOLING = 3, 4
"""The least numbers of rounds in which q(θ) must be still, and in which the rates fall."""
COORDINATES = 200
"""The most of a site that are looked at, spread evenly over it."""


@dataclass
class Settling:
    """Where q(θ) has been, and what follows from it.

    Attributes:
        levels: of the rates, one after the other, at each of which q(θ) is to settle.
        places: means and standard deviations before the first round and after each, ``(BOUND + 1, 2, P)``.
        paces: of each round, ``(BOUND,)``.
        visits: in which round, counted from 1, each client was last seen; 0 where it never was. ``(N,)``.
        marks: the level; after how many rounds it began; after how many the rates began to fall, 0 while they do not;
            whether the run is done; and whether draws have been weighed, or are not to be. ``(5,)``.
        sites: how many of the coordinates are of each global site.
        nats: by how much the ELBO may rise and yet be still.
        share: of the clients that take part in a round.
    """

    levels: Sequence[float]
    places: Tensor
    paces: Tensor
    visits: Tensor
    marks: Tensor
    sites: dict[str, int]
    nats: float
    share: float

    @property
    def state(self) -> dict[str, Tensor]:
        """All that rounds change."""
        return {name: getattr(self, name) for name in ("places", "paces", "visits", "marks")}

    @property
    def settled(self) -> bool:
        """Whether the run is done."""
        return bool(self.marks[3])

    @property
    def near(self) -> bool:
        """Whether the run is done if draws around q(θ) say so."""
        return self.settled and not self.marks[2]

    def go_on(self) -> None:
        """The draws did not."""
        self.marks[3] = 0

    def rate(self, final: float, done: int) -> float:
        """By what learning rates are multiplied after so many rounds; ``final`` is what is left of them in the end."""
        level, _, cooling, *_ = self.marks.tolist()
        fallen = (done - cooling) / cooling_rounds(cooling) if cooling else 0.0
        return self.levels[level] * annealed(final, fallen)

    def record(self, where: Tensor, pace: float, elbo: Tensor, cohort: Tensor) -> None:
        """Add a round and see what follows.

        Args:
            where: the :func:`place` after it.
            pace: see :meth:`Algorithm.pace`.
            elbo: of all rounds so far, ``(rounds,)``.
            cohort: positions of the clients whose uploads counted.
        """
        done = len(elbo)
        self.places[done], self.paces[done - 1] = where, pace
        self.visits[cohort] = done
        level, began, cooling, _, weighed = self.marks.tolist()
        last = level == len(self.levels) - 1
        if cooling:
            if done == cooling + cooling_rounds(cooling):
                self._cooled(done, cooling)
        elif last and not weighed and self._still(elbo, began, NEAR):
            self.marks[3:] = 1
        elif self._still(elbo, began):
            self.marks[:3] = torch.tensor([level, began, done] if last else [level + 1, done, 0])

    def to_go(self, done: int) -> dict[str, float] | None:
        """How far q(θ) has to go by global site, where that is more than :data:`FAR`; None where noise hides it."""
        began = int(self.marks[1])
        if self.settled:
            return {}
        if done - began < LEAST:
            return None
        step, _, moved = self._seen(done, max(LEAST, math.ceil((done - began) / 3)))
        far = {n: v for n, v in self._by_site(torch.maximum(step, moved)).items() if v > FAR}
        return far or None

    def _still(self, elbo: Tensor, began: int, times: float = 1.0) -> bool:
        """Whether q(θ) has settled at its level, to so many times as much."""
        done, oldest = len(elbo), int(self.visits.min())
        window = max(LEAST, math.ceil((done - began) / 3), done - oldest + 1)
        if not oldest or window > done - began:
            return False
        step, noise, moved = self._seen(done, window)
        return (
            self._within(step, times * STILL)
            and self._within(moved, times * MOVED)
            and float(noise.square().mean().sqrt()) < times * NOISE
            and risen(elbo[-window:]) < self.nats
        )

    def _cooled(self, done: int, cooling: int) -> None:
        """The rates have fallen: done, or on at full rate."""
        window = max(LEAST, cooling_rounds(cooling))
        before = self._at(slice(cooling - window + 1, cooling + 1), done).mean(0)
        moved = (self._at(slice(done, done + 1), done)[0] - before).abs()
        if self._within(moved, FAR):
            self.marks[3] = 1
        else:
            self.marks[1:3] = torch.tensor([done, 0])

    def _seen(self, done: int, window: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of the last rounds: the mean full step less its noise, that of where it leads, all moves; ``(2, P)`` each."""
        places = self._at(slice(done - window, done + 1), done)
        steps = places.diff(dim=0) / self.paces[done - window : done, None, None]
        step = (steps.mean(0).square() - steps.var(0) / window).clamp(min=0).sqrt()
        # what a client has said stands until its next visit, and its noise with it
        noise = (places[:-1] + steps).var(0) / max(1.0, window * self.share)
        return step, noise.sqrt(), (places[-1] - places[0]).abs()

    def _at(self, rounds: slice, done: int) -> Tensor:
        """Places in units of the q(θ) of now, ``(rounds, 2, P)``."""
        means, scales = self.places[rounds].unbind(1)
        return torch.stack([means / self.places[done, 1], scales.clamp(min=1e-30).log()], 1)

    def _within(self, lengths: Tensor, most: float) -> bool:
        """Whether they are less at every site; what is no number is not."""
        return all(length < most for length in self._by_site(lengths).values())

    def _by_site(self, lengths: Tensor) -> dict[str, float]:
        """Root mean square over each site's coordinates; of means or of log standard deviations, whichever is more."""
        parts = lengths.square().split(list(self.sites.values()), -1)
        return {
            name: float(part.mean(-1).max().sqrt())
            for name, part in zip(self.sites, parts, strict=True)
        }


def settling(
    program: Program,
    params: Params,
    levels: Sequence[float],
    rows: int,
    share: float,
    weighed: bool,
) -> Settling | None:
    """A run's before its first round, with so many rows in all; None where q(θ) has no width anywhere.

    ``weighed``: draws around q(θ) are weighed in the end.
    """
    if not program.random:
        return None
    found = moments(program, params)
    sites = {
        name: min(len(means), COORDINATES)
        for name, (means, scales) in found.items()
        if (scales > 0).all()
    }
    if not sites:
        return None
    places = torch.zeros(BOUND + 1, 2, sum(sites.values()))
    places[0] = _chosen(found, sites)
    return Settling(
        levels=levels,
        places=places,
        paces=torch.ones(BOUND),
        visits=torch.zeros(program.clients, dtype=torch.int64),
        marks=torch.tensor([0, 0, 0, 0, not weighed], dtype=torch.int64),
        sites=sites,
        nats=NATS + NATS_A_ROW * rows,
        share=share,
    )


def place(program: Program, params: Params, sites: Mapping[str, int]) -> Tensor:
    """Means and standard deviations of some coordinates of each site, ``(2, P)``."""
    return _chosen(moments(program, params), sites)


def _chosen(found: Mapping[str, tuple[Tensor, Tensor]], sites: Mapping[str, int]) -> Tensor:
    parts = []
    for name, count in sites.items():
        means, scales = found[name]
        some = torch.linspace(0, len(means) - 1, count).long()
        parts.append(torch.stack([means[some], scales[some]]))
    return torch.cat(parts, 1).cpu()


def cooling_rounds(rounds: int) -> int:
    """In how many rounds the rates fall, after so many at full rate."""
    return max(COOLING, math.ceil(rounds / 3))


def risen(values: Tensor) -> float:
    """By how much numbers ``(n,)`` rise from the first to the last on a straight line, less its standard error."""
    values = values[values.isfinite()]
    if len(values) < LEAST:
        return math.inf
    time = torch.arange(len(values), dtype=values.dtype)
    time = time - time.mean()
    slope = (time * values).sum() / time.square().sum()
    residual = values - values.mean() - slope * time
    error = residual.square().sum() / (len(values) - 2) / time.square().sum()
    return float(slope - error.sqrt()) * (len(values) - 1)
