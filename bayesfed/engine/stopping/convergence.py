"""The stopping rule of a run that ends when q(θ) has converged: full learning rates until then, then a cool-down.

A place of q(θ) is its means and log standard deviations, unconstrained; lengths are in standard deviations of q. A
round's move, divided by the fraction of the way to its target that the round went (:meth:`Algorithm.progress`), is a
full step, and the mean of the full steps is the distance that is left, apart from noise. q(θ) has converged at a
learning rate when, over a third of the rounds so far and since the oldest of the clients' last visits (every client
must have been seen),

    the mean full step, less its own noise, is short (:data:`STEP`), the noise of where full steps lead is small
    (:data:`NOISE`), all moves together are short (:data:`MOVE`), so that a slow drift is not taken for convergence, and
    the ELBO has not risen, beyond its noise, so that what stateful clients keep, which only they see, has converged
    too.

Then the rates fall over a third as many rounds again, which averages noise out, unless there is next to none
(:data:`NO_NOISE`). If q(θ) moves far meanwhile (:data:`FAR`), the run goes on at full rate.

If draws of θ are corrected by importance weights in the end (:mod:`bayesfed.output.correction`), q(θ) need not be that
close. The run ends provisionally, early, as soon as all clients have been seen, wherever q(θ) is; once the last two
steps, their noise and the moves are within :data:`CLOSE` times these tolerances, whatever the ELBO has done, and again
within the next of these factors; and once q(θ) has converged to within :data:`NEAR` times these tolerances. Of data so
large that the first steps are very long, one short step (:data:`SHORT`) is enough for the second time. If the weights
show that q(θ) or its correction is good enough, there is no noise left to be averaged out, and the run is done.
After an early end they must have a finite variance and a large effective sample size. If they do not, which one
exchange shows where q(θ) is far, the end is withdrawn, and the run goes on until q(θ) has converged. Of large data, a
probe of few draws comes first (:mod:`bayesfed.output.effort`): estimates that take longer than a few rounds wait for
the last early end, or, where rounds take long too, for the second. Estimates of mixtures and integrals, which take as
many times longer as a row has terms, wait for the second early end in any case.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesfed.algorithms.algorithm import Algorithm
from bayesfed.elbo.program import Params, Program
from bayesfed.engine.stopping.drift import NATS, NATS_PER_ROW, moments
from bayesfed.engine.stopping.rule import BOUND, Outcome, Remaining, Stopping
from bayesfed.steps.gradients import annealed
from bayesfed.tracing.compiler import using

STEP, NOISE, MOVE, FAR = 0.1, 0.05, 0.1, 0.25
"""Tolerances, in standard deviations of q(θ) or in its log standard deviation."""
NO_NOISE = 0.02
"""The largest noise, likewise, that is not worth rounds in which the rates fall."""
CLOSE, NEAR = (150.0, 12.0), 3.0
"""The factors on the tolerances within which a correction is tried, one after the other, early, after the first try;
and the last time."""
SHORT = 1.0
"""The length of the last step, likewise, at which a second correction is tried whatever the steps before it."""
LAST, LEAST, COOLING = 2, 3, 4
"""The smallest numbers of rounds whose steps are measured before the second correction, in which convergence is
assessed, and in which the rates fall."""
TRIES = len(CLOSE) + 2
"""The number of times that a correction is tried."""
COORDINATES = 200
"""The largest number of coordinates of a sample site that are followed, spread evenly over it."""

_LEVEL, _BEGAN, _COOLING, _ENDED, _TRIED = range(5)
"""The positions in ``Convergence.marks``."""


@dataclass
class Convergence(Stopping):
    """End when q(θ) has converged.

    Attributes:
        algorithm: gives the pace of each round.
        program: the model/guide pair.
        levels: factors on the learning rates, one after the other, at each of which q(θ) has to converge.
        final: what is left of the learning rates at the end of the cool-down.
        places: means and standard deviations before the first round and after each, ``(BOUND + 1, 2, P)``.
        paces: of each round, ``(BOUND,)``.
        visits: the round, counted from 1, in which each client was last seen; 0 before its first visit. ``(N,)``.
        marks: the level; after how many rounds it began; after how many the rates began to fall, 0 before that;
            whether the run has ended; and how often a correction has been tried, :data:`TRIES` if it is not to be
            tried. ``(5,)``.
        sites: number of coordinates that are followed, by global sample site.
        nats: the rise of the ELBO that counts as none.
        share: the fraction of the clients that take part in a round.
    """

    changing = ("places", "paces", "visits", "marks")
    algorithm: Algorithm
    program: Program
    levels: Sequence[float]
    final: float
    places: Tensor
    paces: Tensor
    visits: Tensor
    marks: Tensor
    sites: dict[str, int]
    nats: float
    share: float

    @property
    def converged(self) -> bool:
        """True if the run has ended."""
        return bool(self.marks[_ENDED])

    @property
    def provisional(self) -> bool:
        """True if the run has ended without a cool-down, so that a correction has to confirm it."""
        return self.converged and not self.marks[_COOLING]

    @property
    def early(self) -> bool:
        """True if the run has ended provisionally before q(θ) has converged."""
        return self.provisional and int(self.marks[_TRIED]) < TRIES

    def is_worth_correcting(
        self, distant: bool, noisy: bool, large: bool = True, mixture: bool = False
    ) -> bool:
        """Return whether data that are probed are worth a correction after an early end.

        Args:
            distant: q(θ) is far from the posterior.
            noisy: weights need estimates without noise, which take longer than a few rounds.
            large: so do rounds.
            mixture: rows are sums or integrals, whose estimates with noise take longer than a round.
        """
        waits = int(mixture)
        if noisy:
            waits = 1 if large else len(CLOSE)
        return not distant and int(self.marks[_TRIED]) > waits

    def withdraw(self) -> None:
        """Withdraw a provisional end: the run goes on at full rate."""
        self.marks[_ENDED] = 0

    def rate(self, done: int) -> float:
        """The factor on the learning rates after so many rounds."""
        level, _, cooling, *_ = self.marks.tolist()
        fallen = (done - cooling) / cooling_rounds(cooling) if cooling else 0.0
        return self.levels[level] * annealed(self.final, fallen)

    def record(self, outcome: Outcome) -> None:
        """Record the place of q(θ) and the pace of the round, and end the run if q(θ) has converged."""
        progress = self.algorithm.progress(outcome.turn, outcome.server)
        assert progress is not None
        with using(outcome.compiler):
            place = _place(moments(self.program, outcome.params), self.sites)
        self.add_round(place, progress.pace, outcome.elbo, outcome.cohort, progress.step)

    def add_round(
        self,
        place: Tensor,
        pace: float,
        elbo: Tensor,
        cohort: Tensor,
        step: float = math.inf,
    ) -> None:
        """Add a round, and go on to the next level, to the cool-down or to the end if q(θ) has converged.

        Args:
            place: means and standard deviations after it, ``(2, P)``.
            pace: see :class:`~bayesfed.rules.Progress`.
            elbo: of all rounds so far, ``(rounds,)``.
            cohort: positions of the clients whose uploads counted.
            step: see :class:`~bayesfed.rules.Progress`.
        """
        done = len(elbo)
        self.places[done], self.paces[done - 1] = place, pace
        self.visits[cohort] = done
        level, start, cooling, _, tried = self.marks.tolist()
        last = level == len(self.levels) - 1
        if cooling:
            if done == cooling + cooling_rounds(cooling):
                self._end_cooling(done, cooling)
            return
        if not self.visits.min():
            return
        if last and tried < TRIES - 1 and self._is_close(done, start, tried, step):
            self.marks[[_ENDED, _TRIED]] = torch.tensor([1, tried + 1])
            return
        window = self._window(done, start)
        if window > done - start:
            return
        found = self._measure(done, window)
        if not rise(elbo[-window:]) < self.nats:  # nor if it is not a number
            return
        if last and tried < TRIES and self._are_small(*found, NEAR):
            self.marks[[_ENDED, _TRIED]] = torch.tensor([1, TRIES])
        elif self._are_small(*found):
            marks = [level, start, done] if last else [level + 1, done, 0]
            self.marks[[_LEVEL, _BEGAN, _COOLING]] = torch.tensor(marks)
            if last and float(found[1].max()) < NO_NOISE:
                self.marks[_ENDED] = 1

    def remaining(self, params: Params, elbo: Tensor) -> Remaining:
        """The distances beyond :data:`FAR`; None where noise hides them."""
        return self.distances(len(elbo)), 0.0

    def distances(self, done: int) -> dict[str, float] | None:
        """The distances of q(θ) from convergence after so many rounds, by global sample site, beyond :data:`FAR`."""
        start = int(self.marks[_BEGAN])
        if self.converged:
            return {}
        if done - start < LEAST:
            return None
        step, _, move = self._measure(done, max(LEAST, math.ceil((done - start) / 3)))
        far = {n: v for n, v in self._by_site(torch.maximum(step, move)).items() if v > FAR}
        return far or None

    def _is_close(self, done: int, start: int, tried: int, last: float) -> bool:
        """Return whether a correction may succeed early after so many have been tried: none yet, or short steps.

        The steps are the last ones, and the moves those since the oldest of the clients' last visits. A short ``last``
        step is enough for the second.
        """
        if not tried or (tried == 1 and last < SHORT):
            return True
        window = max(LAST, self._since_visits(done))
        return window <= done - start and self._are_small(
            *self._measure(done, window), CLOSE[tried - 1]
        )

    def _are_small(self, step: Tensor, noise: Tensor, move: Tensor, factor: float = 1.0) -> bool:
        """Return whether what was measured is within ``factor`` times the tolerances."""
        return (
            self._within(step, factor * STEP)
            and self._within(move, factor * MOVE)
            and float(noise.square().mean().sqrt()) < factor * NOISE
        )

    def _window(self, done: int, start: int) -> int:
        """Return the number of rounds over which convergence is assessed."""
        return max(LEAST, math.ceil((done - start) / 3), self._since_visits(done))

    def _since_visits(self, done: int) -> int:
        """Return the number of rounds since the oldest of the clients' last visits, that round included."""
        return done - int(self.visits.min()) + 1

    def _end_cooling(self, done: int, cooling: int) -> None:
        """End the run after its cool-down, or go on at full rate if q(θ) has moved far."""
        window = max(LEAST, cooling_rounds(cooling))
        before = self._scaled(slice(cooling - window + 1, cooling + 1), done).mean(0)
        move = (self._scaled(slice(done, done + 1), done)[0] - before).abs()
        if self._within(move, FAR):
            self.marks[_ENDED] = 1
        else:
            self.marks[[_BEGAN, _COOLING]] = torch.tensor([done, 0])

    def _measure(self, done: int, window: int) -> tuple[Tensor, Tensor, Tensor]:
        """Over the last rounds: the mean full step less its noise, the noise of its target, the move: ``(2, P)``."""
        places = self._scaled(slice(done - window, done + 1), done)
        steps = places.diff(dim=0) / self.paces[done - window : done, None, None]
        step = (steps.mean(0).square() - steps.var(0) / window).clamp(min=0).sqrt()
        # a client's last upload counts until its next visit, and so does its noise
        noise = (places[:-1] + steps).var(0) / max(1.0, window * self.share)
        return step, noise.sqrt(), (places[-1] - places[0]).abs()

    def _scaled(self, rounds: slice, done: int) -> Tensor:
        """Places in units of the present q(θ), ``(rounds, 2, P)``."""
        means, scales = self.places[rounds].unbind(1)
        return torch.stack([means / self.places[done, 1], scales.clamp(min=1e-30).log()], 1)

    def _within(self, lengths: Tensor, tolerance: float) -> bool:
        """Return whether lengths ``(2, P)`` are within a tolerance at every sample site; NaN is not."""
        return all(length < tolerance for length in self._by_site(lengths).values())

    def _by_site(self, lengths: Tensor) -> dict[str, float]:
        """Root mean squares over each site's coordinates, of means or log standard deviations, whichever is larger."""
        parts = lengths.square().split(list(self.sites.values()), -1)
        return {
            name: float(part.mean(-1).max().sqrt())
            for name, part in zip(self.sites, parts, strict=True)
        }


def convergence(
    algorithm: Algorithm, program: Program, params: Params, share: float
) -> Convergence | None:
    """The rule before the first round; None where q(θ) has no standard deviation at any sample site.

    Args:
        algorithm: its rule must report its progress.
        program: the model/guide pair.
        params: the guide's global parameters.
        share: the fraction of the clients that take part in a round.
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
    places[0] = _place(found, sites)
    return Convergence(
        algorithm=algorithm,
        program=program,
        levels=program.levels,
        final=algorithm.lr_decay,
        places=places,
        paces=torch.ones(BOUND),
        visits=torch.zeros(program.clients, dtype=torch.int64),
        marks=torch.tensor([0, 0, 0, 0, 0 if algorithm.corrected else TRIES], dtype=torch.int64),
        sites=sites,
        nats=NATS + NATS_PER_ROW * program.rows,
        share=share,
    )


def _place(found: Mapping[str, tuple[Tensor, Tensor]], sites: Mapping[str, int]) -> Tensor:
    """Means and standard deviations of some coordinates of each sample site, ``(2, P)``."""
    parts = []
    for name, count in sites.items():
        means, scales = found[name]
        some = torch.linspace(0, len(means) - 1, count).long()
        parts.append(torch.stack([means[some], scales[some]]))
    return torch.cat(parts, 1).cpu()


def cooling_rounds(rounds: int) -> int:
    """The number of rounds over which the rates fall, after so many at full rate."""
    return max(COOLING, math.ceil(rounds / 3))


def rise(values: Tensor) -> float:
    """The rise of numbers ``(n,)`` from the first to the last on a fitted line, less its standard error."""
    values = values[values.isfinite()]
    if len(values) < LEAST:
        return math.inf
    time = torch.arange(len(values), dtype=values.dtype)
    time = time - time.mean()
    slope = (time * values).sum() / time.square().sum()
    residual = values - values.mean() - slope * time
    error = residual.square().sum() / (len(values) - 2) / time.square().sum()
    return float(slope - error.sqrt()) * (len(values) - 1)
