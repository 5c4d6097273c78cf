"""A round: the server's question to a cohort, the clients' answer, and the server's update from the sum of uploads.

Between machines :func:`answer` runs at each institution for its own clients, and the answers are added up.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesfed.data.plural import plural
from bayesfed.elbo import noise
from bayesfed.elbo.program import Params
from bayesfed.engine import processes
from bayesfed.engine.cohort import Cohort
from bayesfed.engine.execution import threads
from bayesfed.engine.not_finite import name_globals, name_in_client
from bayesfed.engine.parts import flat, nested
from bayesfed.engine.resume import save
from bayesfed.engine.run import Round, Run, Stopped
from bayesfed.engine.run_file import HISTORY
from bayesfed.engine.stopping.rule import Outcome
from bayesfed.engine.watch import check_growth, refusal_message
from bayesfed.rules.rule import Turn
from bayesfed.tracing.compiler import using
from bayesfed.tracing.precision import products

_SERVER, _COHORT = -1, -2  # streams of a round that belong to no client
_ADVICE = (
    "lower the learning rate, take more clients a round, or check the priors of the global sites and the units of "
    "the fields"
)
MORE_DRAWS = 4
"""The factor on the number of draws that a run that has diverged may need."""
HALVINGS = 40
"""The number of rounds whose steps may go uphill, each at half the learning rates of the one before."""
OUTLIERS = 0.01
"""The share of a cohort up to which clients whose steps go uphill are left out, and rates stay as they are."""
PATIENCE = 10
"""The number of rounds of whose uploads more than half must count."""


@dataclass(frozen=True)
class Question:
    """The server's question to the cohort of a round.

    Attributes:
        message: sent by the server to every client, flat (:mod:`bayesfed.engine.parts`).
        cohort: positions of the K clients, ascending, int64.
        number: rounds done before it.
        rate: the factor on the learning rates.
        clip: γ of privacy.
        noisy: whether noise is added to the sum.
        start: when the round started, of :func:`time.perf_counter`.
    """

    message: Params
    cohort: Tensor
    number: int
    rate: float
    clip: float
    noisy: bool
    start: float


class Sums(NamedTuple):
    """Sums over the clients of an answer.

    Attributes:
        terms: of their ELBO terms.
        change: of the changes of their ELBO terms since their last visit.
        first: the number of clients that take part for the first time.
        uphill: the number of clients whose steps went uphill.
    """

    terms: float
    change: float
    first: float
    uphill: float


class Answer(NamedTuple):
    """The answer of a cohort, or of some of its clients.

    Attributes:
        total: the sum of the uploads that count.
        sound: whether each upload counts, bool ``(K,)``.
        sums: :class:`Sums`, float64 ``(4,)``.
        terms: each client's ELBO term ``(K,)``, where the server may see it.
        noised: whether the noise of privacy is in the sum already.
    """

    total: Params
    sound: Tensor
    sums: Tensor
    terms: Tensor | None = None
    noised: bool = False


def ask(run: Run) -> Question:
    """The question of the next round of a run.

    Raises:
        ValueError: the run has done all its rounds.
        Stopped: a step of the server has no solution.
    """
    if run.done == run.rounds:
        raise ValueError(f"the run has done its {plural(run.rounds, 'round')}: start one with more")
    start, rate, noisy = time.perf_counter(), run.rate, run.multiplier > 0
    with _server_step(run):
        message = flat(run.plan.algorithm.broadcast(_turn(run, rate), run.server))
    return Question(message, _draw_cohort(run), run.done, rate, float(run.clip), noisy, start)


def answer(run: Run, question: Question) -> Answer:
    """The work of those clients of the cohort whose rows the run has. Changes the clients' states.

    Raises:
        Stopped: a step has no solution.
    """
    work = Cohort(run, question.clip, question.noisy)
    key, device = _round_key(run, question.number), run.federation.device
    with _server_step(run), products(run.plan.execution.precision, device):
        total, terms, sound = work(question.message, question.cohort, key, question.rate)
    counted = question.cohort[sound]
    now, before = terms[sound].double(), run.client_terms[counted].cpu().double()
    sums = Sums(
        terms=float(now.sum()),
        change=float((now - before.nan_to_num()).sum()),
        first=float(before.isnan().sum()),
        uphill=float(terms.isneginf().sum()),
    )
    run.client_terms[counted] = terms[sound].to(run.client_terms)
    return Answer(total, sound, torch.tensor(sums, dtype=torch.float64), terms)


def can_update(run: Run, question: Question, total: Params, counted: int) -> bool:
    """Return whether the server can update from a sum of ``counted`` uploads, and ask again. Changes nothing."""
    turn = _turn(run, question.rate).of(counted)
    try:
        with _server_step(run):
            server, term = run.plan.algorithm.decode(turn, run.server, nested(total))
            message = flat(run.plan.algorithm.broadcast(turn, server))
    except FloatingPointError:
        return False
    numbers = [term, *run.plan.algorithm.params(server).values(), *message.values()]
    return not any(bool(value.isnan().any()) for value in numbers)


def update(run: Run, question: Question, found: Answer) -> Round:
    """The server's update from the sum of a round's uploads. Changes the run, and its file.

    Raises:
        Stopped: see :func:`~bayesfed.fit`.
    """
    # under privacy it is private too whether an upload was finite
    sound, sums = found.sound | question.noisy, Sums(*found.sums.tolist())
    uphill = int(sums.uphill)
    counted, refused = question.cohort[sound], question.cohort[~sound]
    if uphill <= OUTLIERS * len(question.cohort):
        uphill = 0
    elif uphill >= len(refused):
        refused = refused[:0]
    names, refused_names = _names(run, counted), _names(run, refused)
    if uphill and run.uphill == HALVINGS:
        raise _diverged(
            run, f"the clients' steps go uphill at learning rates of {run.rate:.0e} too"
        )
    if _too_many(run, len(refused)):
        terms = None if found.terms is None else found.terms[~sound]
        where = ""
        if run.accepted is None and run.plan.execution.group is None:  # the rows are here
            key = _round_key(run, question.number)
            where = name_in_client(run, int(refused[0]), question.message, key, question.rate)
        raise Stopped(refusal_message(refused_names, terms, where), run)
    with _server_step(run):
        total, clip = _apply_privacy(run, question, found)
        turn, server, server_term = _decode(run, question, total, len(counted))
    params = run.plan.algorithm.params(server)
    _check_finite(run, server_term, params)
    elbo = math.nan
    if len(counted) and not question.noisy:
        elbo = float(server_term) + _estimate_sum(run, sums, int(found.sound.sum()))
    seconds = time.perf_counter() - question.start
    run.server, run.clip = server, clip
    run.refused[refused] += 1
    row = elbo, seconds, len(counted), uphill
    for name, value in zip(HISTORY, row, strict=True):
        run.history[name][run.done] = value
    run.done += 1
    if run.done == 1:
        run.compiler.decide(run.stopping.usual - 1)
    past, cohort = run.history["elbo"][: run.done], question.cohort[found.sound]
    run.stopping.record(Outcome(turn, server, params, past, cohort, run.compiler))
    check_growth(run.program, params)
    save(run)
    terms = torch.full((len(counted),), math.nan)
    if found.terms is not None and not question.noisy:
        terms = found.terms[sound]
    return Round(run.done, run.rounds, elbo, terms, names, refused_names, seconds, params)


def _apply_privacy(run: Run, question: Question, found: Answer) -> tuple[Params, Tensor]:
    """The sum with the noise of privacy, the same in all processes, and the next γ."""
    privacy, total, multiplier = run.privacy, dict(found.total), run.multiplier
    if run.done == 0:
        privacy.warn_if_loud(total, multiplier, run.cohort_size)
    if question.noisy and not found.noised:
        total = privacy.add_noise(total, question.clip, multiplier, run.done)
    group = run.plan.execution.group
    if question.noisy:  # of multiples of the grid, in double precision: from here on they are numbers like any other
        like = run.federation.dtype
        total = {name: processes.broadcast(value, group).to(like) for name, value in total.items()}
    return total, privacy.next_clip(total, run.clip, multiplier, run.cohort_size)


def _decode(run: Run, question: Question, total: Params, counted: int) -> tuple[Turn, Any, Tensor]:
    """The server's next state from the sum of ``counted`` uploads, and its ELBO term; as before from none."""
    algorithm, turn = run.plan.algorithm, _turn(run, question.rate)
    server, term = run.server, torch.zeros(())
    if counted:
        turn = turn.of(counted)
        server, term = algorithm.decode(turn, run.server, nested(total))
    if question.noisy and run.done + 1 == run.rounds:
        progress = algorithm.progress(turn, server)
        run.privacy.warn_if_disturbed(progress.noise if progress else 0.0)
    return turn, server, term


def _check_finite(run: Run, server_term: Tensor, params: Params) -> None:
    """Stop the run if the server's next state has no finite ELBO term or a parameter that is not a number."""
    if not math.isfinite(server_term):
        found = name_globals(run.program, params)
        where = f" ({found})" if found else ""
        raise Stopped(
            f"the server's ELBO term is {float(server_term)}{where}; lower the learning rate or check the priors of "
            "the global sites",
            run,
        )
    if any(bool(value.isnan().any()) for value in params.values()):
        found = name_globals(run.program, params)
        raise _diverged(run, f"the global parameters are not numbers any more ({found})")


def _diverged(run: Run, problem: str) -> Stopped:
    """Return the error of a run that has diverged, with what may help."""
    now = getattr(run.plan.algorithm.steps, "draws", None)
    draws = MORE_DRAWS * now if now else None
    more = f"take more draws a step (draws={draws}), " if draws else ""
    return Stopped(f"{problem}; {more}{_ADVICE}", run, draws)


def _names(run: Run, clients: Tensor) -> list[str]:
    return [run.federation.names[i] for i in clients.tolist()]


def _round_key(run: Run, number: int) -> Tensor:
    """The noise key of a round."""
    return noise.fold(noise.key(run.plan.seed).to(run.federation.device), number)


def _turn(run: Run, rate: float) -> Turn:
    """The next round as the server sees it."""
    key = noise.fold(_round_key(run, run.done), _SERVER)
    added = run.privacy.scale("", float(run.clip), run.multiplier)
    everyone = run.cohort_size == len(run.federation) and not run.multiplier
    whole = everyone and run.plan.batch_size is None
    return Turn(run.program, key, run.cohort_size, rate, added, whole=whole)


def _draw_cohort(run: Run) -> Tensor:
    """The clients of the next round, ascending; drawn in secret if privacy relies on it.

    Else all take part in N / K rounds, in an order that is drawn anew each time; the last of them takes some twice.
    """
    clients, size = len(run.federation), run.cohort_size
    if not run.multiplier:
        turn, number = divmod(run.done, -(-clients // size))
        places = (number * size + torch.arange(size)) % clients
        key = noise.fold(noise.fold(noise.key(run.plan.seed), _COHORT), turn)
        return noise.permuted(key, clients, places).sort().values
    secret = run.privacy.cohort(run.done, clients, size)
    return processes.broadcast(secret, run.plan.execution.group)


@contextmanager
def _server_step(run: Run) -> Iterator[None]:
    """Compute with the run's threads and compiler; a step without a solution stops the run as it was before."""
    try:
        with threads(run.numbers), using(run.compiler):
            yield
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        reason = str(error).split("\n")[0]
        raise _diverged(run, f"a step has no solution ({reason})") from error


def _too_many(run: Run, refused: int) -> bool:
    """Return whether half or more of the uploads of the last rounds and this one do not count."""
    counted = run.history["clients"][max(0, run.done - PATIENCE + 1) : run.done]
    missing = refused + float((run.cohort_size - counted).sum())
    return refused > 0 and 2 * missing >= run.cohort_size * (1 + len(counted))


def add_to_totals(run: Run, sums: Sums) -> None:
    """Add the cohort's changes to the totals of a run."""
    run.term_totals += torch.tensor([sums.change, sums.first], dtype=torch.float64)


def _estimate_sum(run: Run, sums: Sums, counted: int) -> float:
    """Estimate the sum of all clients' ELBO terms from the cohort's, and add the cohort's change to the totals.

    Once every client has taken part only the changes are scaled, which is far less noisy.
    """
    clients, seen = len(run.federation), float(run.term_totals[1])
    add_to_totals(run, sums)
    scale = clients / max(1, counted)
    if seen < clients:
        return scale * sums.terms
    return float(run.term_totals[0]) + (scale - 1) * sums.change
