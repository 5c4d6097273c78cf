"""A round: what is asked of a cohort, what its clients answer, and what the server makes of the sum.

Between machines :func:`answer` runs at each site for its own clients, and their answers are added up.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from bayesfed.algorithms.protocol import Turn, Upload
from bayesfed.elbo import noise
from bayesfed.engine import processes
from bayesfed.engine.checks import check_growth, refusal
from bayesfed.engine.cohort import Cohort
from bayesfed.engine.execution import threads
from bayesfed.engine.resume import keep
from bayesfed.engine.run import Round, Run, Stopped
from bayesfed.engine.stopping.convergence import USUAL, place
from bayesfed.engine.stopping.drift import record
from bayesfed.engine.stopping.held_out import HeldOut
from bayesfed.output.locals_of_run import fitted_cohort, log_predictive
from bayesfed.tracing.compiler import using
from bayesfed.tracing.precision import products

_SERVER, _COHORT = -1, -2  # streams of a round that belong to no client
_SMALLER = (
    "lower the learning rate, take more clients a round, or check the priors of the global sites and the units of "
    "the fields"
)
PATIENCE = 10
"""Of the uploads of how many rounds more than half must count."""


@dataclass(frozen=True)
class Asked:
    """What a round asks of its cohort.

    Attributes:
        message: what the server sends.
        cohort: positions of the K clients, ascending, int64.
        number: rounds done before it.
        rate: by what the learning rates are multiplied.
        clip: γ of privacy.
        noisy: the sum will be noisy.
        began: when, for how long the round takes.
    """

    message: Upload
    cohort: Tensor
    number: int
    rate: float
    clip: float
    noisy: bool
    began: float


class Answer(NamedTuple):
    """What a cohort, or some of its clients, answer.

    Attributes:
        total: the sum of the uploads that count.
        sound: whose uploads count, bool ``(K,)``.
        said: of these clients Σ of their ELBO terms, by how much Σ of all clients' last terms has changed, and how many
            have taken part for the first time: float64 ``(3,)``.
        terms: each client's ELBO term ``(K,)``, where the server may know it.
        noised: the noise of privacy is in the sum.
    """

    total: Upload
    sound: Tensor
    said: Tensor
    terms: Tensor | None = None
    noised: bool = False


def ask(run: Run) -> Asked:
    """What the next round of a run asks.

    Raises:
        ValueError: the run has done all its rounds.
        Stopped: a step of the server has no solution.
    """
    if run.done == run.rounds:
        raise ValueError(f"the run has done its {run.rounds} rounds: start one with more")
    began, rate, noisy = time.perf_counter(), run.rate, run.multiplier > 0
    with threads(run.numbers), using(run.compiler), _solvable(run):
        message = run.algorithm.broadcast(_turn(run, rate), run.server)
    return Asked(message, _cohort(run), run.done, rate, float(run.clip), noisy, began)


def answer(run: Run, asked: Asked) -> Answer:
    """The work of those clients of the cohort whose rows the run has; what they keep changes.

    Raises:
        Stopped: a step has no solution.
    """
    work = Cohort(
        run.algorithm,
        run.program,
        run.federation,
        run.clients,
        run.batch_size,
        run.execution,
        run.privacy,
        asked.clip,
        asked.noisy,
    )
    key = _key(run, asked.number)
    with (
        threads(run.numbers),
        using(run.compiler),
        _solvable(run),
        products(run.execution.precision, run.federation.device),
    ):
        total, terms, sound = work(asked.message, asked.cohort, key, asked.rate)
    counted = asked.cohort[sound]
    now, before = terms[sound].double(), run.known[counted].cpu().double()
    said = [now.sum(), (now - before.nan_to_num()).sum(), before.isnan().sum()]
    run.known[counted] = terms[sound].to(run.known)
    return Answer(total, sound, torch.stack(said), terms)


def lasts(run: Run, asked: Asked, total: Upload, counted: int) -> bool:
    """Whether the server can go on from a sum of ``counted`` uploads: it has a next state, and can ask by it.

    Changes nothing.
    """
    turn = replace(_turn(run, asked.rate), cohort=counted)
    try:
        with threads(run.numbers), using(run.compiler), _solvable(run):
            server, term = run.algorithm.decode(turn, run.server, total)
            message = run.algorithm.broadcast(turn, server)
    except FloatingPointError:
        return False
    numbers = [term, *run.algorithm.params(server).values(), *message.values()]
    return not any(bool(value.isnan().any()) for value in numbers)


def take(run: Run, asked: Asked, found: Answer) -> Round:
    """The server's next state. Changes ``run``, and its file.

    Raises:
        Stopped: see :func:`~bayesfed.fit`.
    """
    algorithm, federation, cohort, noisy = run.algorithm, run.federation, asked.cohort, asked.noisy
    # where uploads are private, so is whether they were finite
    taken, sound = found.sound, found.sound | noisy
    names = [federation.names[i] for i in cohort[sound].tolist()]
    refused = [federation.names[i] for i in cohort[~sound].tolist()]
    if _too_many(run, len(refused)):
        raise Stopped(refusal(refused, None if found.terms is None else found.terms[~sound]), run)
    total, next_clip, turn = found.total, run.clip, _turn(run, asked.rate)
    server, server_term = run.server, torch.zeros(())
    with threads(run.numbers), using(run.compiler), _solvable(run):
        if run.privacy is not None:
            if run.done == 0:
                run.privacy.warn_if_loud(total, run.multiplier, run.size)
            if not found.noised:
                total = run.privacy.noisy(total, asked.clip, run.multiplier, run.done)
            total = {n: processes.told(v, run.execution.group) for n, v in total.items()}
            next_clip = run.privacy.adapted(total, run.clip, run.multiplier, run.size)
        if names:
            turn = replace(turn, cohort=len(names))
            server, server_term = algorithm.decode(turn, run.server, total)
        if run.privacy is not None and noisy and run.done + 1 == run.rounds:
            run.privacy.warn_if_shaken(algorithm.shaken(server))
    if not math.isfinite(server_term):
        raise Stopped(
            f"the server's ELBO term is {float(server_term)}; lower the learning rate or check the priors of the "
            "global sites",
            run,
        )
    if any(bool(value.isnan().any()) for value in algorithm.params(server).values()):
        raise Stopped(f"the global parameters are no numbers any more; {_SMALLER}", run)
    elbo = math.nan
    if names and not noisy:
        elbo = float(server_term) + _sum_over_all(run, found.said, int(taken.sum()))
    seconds = time.perf_counter() - asked.began
    run.server, run.clip = server, next_clip
    run.refused[cohort[~sound]] += 1
    run.history[:, run.done] = torch.tensor([elbo, seconds, len(names)], dtype=torch.float64)
    run.done += 1
    if run.done == 1:
        run.compiler.decide((run.rounds if run.settling is None else USUAL) - 1)
    params = algorithm.params(server)
    if isinstance(run.settling, HeldOut):
        if names:
            densities = log_predictive(
                fitted_cohort(run, params, names), run.settling.rows.select(names)
            )
            run.settling.record(run.done, cohort[taken], densities)
    elif run.settling is None:
        record(run.path, params, algorithm.lr_decay, run.done - 1, run.rounds)
    else:
        pace = algorithm.pace(turn, server)
        assert pace is not None
        with using(run.compiler):
            where = place(run.program, params, run.settling.sites)
        run.settling.record(where, pace, run.history[0, : run.done], cohort[taken])
    if run.settling is not None and run.settling.settled:
        run.rounds = run.done
    check_growth(run.program, params)
    if run.file is not None:
        keep(run, run.file)
    terms = torch.full(found.sound.shape, math.nan) if found.terms is None else found.terms[sound]
    terms = torch.full_like(terms, math.nan) if noisy else terms
    return Round(run.done, run.rounds, elbo, terms, names, refused, seconds, params)


def _key(run: Run, number: int) -> Tensor:
    """The noise of a round."""
    return noise.fold(noise.key(run.seed).to(run.federation.device), number)


def _turn(run: Run, rate: float) -> Turn:
    """The next round as the server sees it."""
    key, added = noise.fold(_key(run, run.done), _SERVER), 0.0
    if run.privacy is not None and run.multiplier > 0:
        added = run.privacy.scale("", float(run.clip), run.multiplier)
    return Turn(run.program, key, run.size, rate, added)


def _cohort(run: Run) -> Tensor:
    """The clients of the next round, ascending; in secret where that is what privacy rests on.

    Else all take part in N / K rounds, in an order that is drawn anew each time; the last of them takes some twice.
    """
    clients = len(run.federation)
    if run.privacy is None or not run.multiplier:
        turn, number = divmod(run.done, -(-clients // run.size))
        places = (number * run.size + torch.arange(run.size)) % clients
        key = noise.fold(noise.fold(noise.key(run.seed), _COHORT), turn)
        return noise.permuted(key, clients, places).sort().values
    return processes.told(run.privacy.cohort(run.done, clients, run.size), run.execution.group)


@contextmanager
def _solvable(run: Run) -> Iterator[None]:
    """What has no solution stops the run, which goes on from before."""
    try:
        yield
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        said = str(error).split("\n")[0]
        raise Stopped(f"a step has no solution ({said}); {_SMALLER}", run) from error


def _too_many(run: Run, refused: int) -> bool:
    """Whether, of the uploads of the last rounds with this one, half or more do not count."""
    counted = run.history[2, max(0, run.done - PATIENCE + 1) : run.done]
    missing = refused + float((run.size - counted).sum())
    return refused > 0 and 2 * missing >= run.size * (1 + len(counted))


def _sum_over_all(run: Run, said: Tensor, counted: int) -> float:
    """Estimate the sum of all clients' ELBO terms from what the cohort has said, and note it.

    Once every client has taken part only the changes are scaled, which is far less noisy.
    """
    now, change, first = said.tolist()
    clients, seen = len(run.federation), float(run.said[1])
    run.said += torch.tensor([change, first], dtype=torch.float64)
    scale = clients / max(1, counted)
    if seen < clients:
        return float(scale * now)
    return float(run.said[0]) + (scale - 1) * change
