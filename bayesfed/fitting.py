"""Federated rounds in one process: start, then steps, then finish; :func:`fit` is their loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from bayesfed.algorithms.protocol import Algorithm, Turn
from bayesfed.algorithms.sfvi import SFVI
from bayesfed.checks.data import check_data
from bayesfed.checks.independence import check_independence
from bayesfed.checks.units import warn_of_units
from bayesfed.data.federation import Federation, Model
from bayesfed.elbo import noise
from bayesfed.elbo.handlers import on_cpu
from bayesfed.elbo.program import Program
from bayesfed.engine.checks import (
    warn_if_falling,
    warn_of_refused,
)
from bayesfed.engine.cohort import cohort_size
from bayesfed.engine.execution import Execution
from bayesfed.engine.privacy import Privacy
from bayesfed.engine.progress import rounds_shown
from bayesfed.engine.resume import Checkpoint, begin
from bayesfed.engine.run import Round, Run
from bayesfed.engine.states import States
from bayesfed.engine.stopping.convergence import BOUND, settling
from bayesfed.engine.stopping.drift import caveat, path, to_go, to_rise, warn_if_moving
from bayesfed.engine.stopping.held_out import held_out as of_held_out
from bayesfed.output.correction import weighed
from bayesfed.output.locals_of_run import of_clients
from bayesfed.output.posterior import Posterior
from bayesfed.rounds import answer, ask, take
from bayesfed.settings import Schedule, check, validated
from bayesfed.tracing.compiler import Compiler
from bayesfed.vmap.choose import for_batches


@on_cpu()
def start(
    model: Model,
    federation: Federation,
    algorithm: Algorithm | None = None,
    *,
    rounds: int | None = None,
    clients_per_round: int | float = 1.0,
    batch_size: int | None = None,
    privacy: Privacy | None = None,
    held_out: Federation | None = None,
    seed: int = 0,
    execution: Execution | None = None,
    resume: str | Path | None = None,
) -> Run:
    """A run before its first round, or where its file ends; arguments and errors as for :func:`fit`.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> run = bf.start(models.eight_schools, datasets.eight_schools(), rounds=2)
        >>> [bf.step(run).number, bf.step(run).number]
        [1, 2]
        >>> bf.finish(run)
        Posterior: SFVI (FullRank globals, conditioned locals), 2 rounds, 8 clients; globals mu, tau; locals theta
        2 rounds are too few to tell whether the fit still moves
    """
    algorithm = SFVI() if algorithm is None else algorithm
    execution = Execution() if execution is None else execution
    if resume is not None and execution.group is not None:
        raise ValueError(
            "a file to resume from holds the whole run: leave out resume, or the execution's group"
        )
    if execution.device is not None:
        federation = federation.to(execution.device)
    size = cohort_size(clients_per_round, len(federation))
    schedule = {"rounds": rounds, "clients_per_round": clients_per_round, "batch_size": batch_size}
    validated(Schedule, schedule | {"seed": seed})
    program = programmed(model, federation, algorithm, seed)
    check_data(program, federation)
    check_independence(program, federation, shuffled=batch_size is not None)
    warn_of_units(program, federation)
    run = begun(
        program,
        federation,
        algorithm,
        size,
        rounds=rounds,
        batch_size=batch_size,
        privacy=privacy,
        held_out=held_out,
        seed=seed,
        execution=execution,
        resume=resume,
    )
    _weigh(run)
    return run


def programmed(model: Model, federation: Federation, algorithm: Algorithm, seed: int) -> Program:
    """The model with the guide that an algorithm chooses for it."""
    check(algorithm)
    with noise.seeded(seed):  # particles start at draws of the prior
        return algorithm.program(for_batches(model, federation), federation)


def begun(
    program: Program,
    federation: Federation,
    algorithm: Algorithm,
    size: int,
    *,
    rounds: int | None,
    batch_size: int | None,
    privacy: Privacy | None,
    held_out: Federation | None,
    seed: int,
    execution: Execution,
    resume: str | Path | None,
    sites: int | None = None,
) -> Run:
    """A run of a program whose clients' rows have been looked at, K = ``size`` of them in a round.

    With ``sites`` these rows are made up, and the clients' own are there.
    """
    server = algorithm.start(program)
    most = BOUND if rounds is None else rounds
    run = Run(
        program=program,
        federation=federation,
        algorithm=algorithm,
        rounds=most,
        size=size,
        batch_size=batch_size,
        privacy=privacy,
        seed=seed,
        execution=execution,
        server=server,
        clients=States(len(federation) if sites is None else 1, device=federation.device),
        known=torch.full((len(federation),), torch.nan, dtype=federation.dtype),
        said=torch.zeros(2, dtype=torch.float64),
        refused=torch.zeros(len(federation), dtype=torch.int64),
        clip=(privacy or Privacy()).first_clip(),
        history=torch.zeros(3, most, dtype=torch.float64),
        path=path(program),
        compiler=Compiler(execution.compile),
        accepted=None if sites is None else torch.full((sites, 2), -1),
    )
    if held_out is not None:
        run.settling = of_held_out(run, held_out.to(federation.device), rounds)
    elif rounds is None:
        if privacy is not None:
            raise ValueError("rounds: privacy is told for a number of rounds, give one")
        turn = Turn(program, noise.key(0), size)
        if algorithm.pace(turn, server) is not None:
            levels, params = algorithm.levels(program), algorithm.params(server)
            share = size / len(federation)
            weighed = algorithm.corrected
            run.settling = settling(program, params, levels, program.rows, share, weighed)
        if run.settling is None:
            raise ValueError(
                f"rounds: {type(algorithm).__name__} has no q(θ) here whose width says when it is done, give a number, "
                "or held_out, rows that do"
            )
    if algorithm.no_noise and run.multiplier:
        raise ValueError(f"{type(algorithm).__name__} cannot be private: {algorithm.no_noise}")
    if resume is not None:
        run.file = Checkpoint(Path(resume), run.settings, program, federation)
    begin(run)
    return run


@on_cpu()
def step(run: Run) -> Round:
    """One round: a cohort's work, the sum of its uploads, the server's next state. Changes ``run``, and its file.

    Raises:
        ValueError: the run has done all its rounds.
        Stopped: see :func:`fit`.
    """
    asked = ask(run)
    report = take(run, asked, answer(run, asked))
    _weigh(run)
    return report


def _weigh(run: Run) -> None:
    """Whether a run whose q(θ) is near is done: if draws around it can stand for it, or it for itself."""
    run.posterior = None
    if not run.near:
        return
    posterior = _concluded(run)
    found = weighed(posterior)
    if found.good:
        run.posterior = replace(posterior, correction=found.correction)
    else:
        run.go_on()


@on_cpu()
def finish(run: Run) -> Posterior:
    """The posterior that a run has come to.

    Clients that keep nothing, or were in no cohort, make their variables from θ here. A run may go on afterwards. With
    clients' states in files a posterior of before reads the new ones.
    """
    if run.posterior is not None:
        return run.posterior
    posterior = _concluded(run)
    return posterior.corrected() if run.algorithm.corrected else posterior


def _concluded(run: Run) -> Posterior:
    params = {name: value.detach() for name, value in run.algorithm.params(run.server).items()}
    return concluded(run, of_clients(run, params))


def concluded(run: Run, local_params: Mapping[str, Tensor]) -> Posterior:
    """The posterior with these variables of the clients, and warnings of what is wrong with it; not yet corrected."""
    params = {name: value.detach() for name, value in run.algorithm.params(run.server).items()}
    history = run.history[:, : run.done].to(torch.get_default_dtype())
    warn_of_refused(run.federation.names, run.refused)
    warn_if_falling(run.history[0, : run.done].tolist(), run.program.rows)
    final, elbo = run.algorithm.lr_decay, run.history[0, : run.done]
    if run.settling is None:
        moving = to_go(run.program, run.path, params, final, run.done, run.rounds)
        rising = to_rise(elbo, run.program.rows, final, run.rounds)
    else:
        moving, rising = run.settling.to_go(run.done), 0.0
    if run.algorithm.particles == 1:  # of a few particles the standard deviation is no measure
        warn_if_moving(caveat(moving, rising, run.done), moving)
    return Posterior(
        program=run.program,
        federation=run.federation,
        params=params,
        local_params=local_params,
        history=dict(zip(("elbo", "seconds", "clients"), history, strict=True)),
        algorithm=run.algorithm,
        seed=run.seed,
        epsilon=run.epsilon,
        compiled=str(run.compiler),
        moving=moving,
        rising=rising,
        settled=None if run.settling is None else run.settling.settled,
    )


def fit(
    model: Model,
    federation: Federation,
    algorithm: Algorithm | None = None,
    *,
    rounds: int | None = None,
    clients_per_round: int | float = 1.0,
    batch_size: int | None = None,
    privacy: Privacy | None = None,
    held_out: Federation | None = None,
    seed: int = 0,
    execution: Execution | None = None,
    resume: str | Path | None = None,
    progress: bool | None = None,
    callbacks: Sequence[Callable[[Round], object]] = (),
) -> Posterior:
    """Fit a hierarchical model to clients whose data never meet.

    Args:
        model: a Pyro program that opens ``federation.clients()`` and ``federation.observations()``.
        federation: the clients' data.
        algorithm: by default :class:`~bayesfed.SFVI`.
        rounds: number of rounds. By default the run stops by itself, when q(θ) moves no more, after 500 at most: see
            :mod:`bayesfed.engine.stopping.convergence`. So it can under SFVI, SFVIAvg and PVI, without privacy, and
            under any algorithm with ``held_out``.
        clients_per_round: cohort size: a number of clients (int) or a fraction of them in (0, 1] (float).
            All clients take part in N / K rounds, in an order that is drawn anew each time; sums over a cohort are
            scaled by N / K, so that every round's gradient is unbiased.
        batch_size: rows that a client uses in a local step, scaled by n_i / b_i; by default all.
        privacy: clip the uploads and add noise to their sums, see :class:`~bayesfed.Privacy`. The ε that the
            run spends is shown with its progress and kept as ``posterior.epsilon``.
        held_out: rows of the same clients that nobody trains on, as ``federation.split`` gives them. Without ``rounds``
            the run stops when its clients predict them no better, after 500 rounds at most: see
            :mod:`bayesfed.engine.stopping.held_out`.
        seed: of every stream of noise.
        execution: chunks, files, compilation, precision, processes and device: see :class:`~bayesfed.Execution`.
        resume: a file that keeps the run after its rounds (it is written in at most a twentieth of the time). Where it
            is there already the run goes on from it, to the very numbers of one that never stopped. It may be given
            other ``rounds``, at least as many as it has done, but where they set the noise (``Privacy(epsilon=)``): the
            learning rates of the rounds to come are then those of a run of that length, and the numbers differ from
            those of one that was that long from the start unless the algorithm's ``lr_decay`` is 1.
        progress: show a progress bar; by default where the output is a terminal.
        callbacks: called with a :class:`Round` after each.

    Returns:
        The :class:`~bayesfed.Posterior`.

    Raises:
        ValueError: the model, the guide, the data or the schedule do not fit; the message names the
            site, client or field. ``resume`` is a file of another run: its settings, model, priors or data differ.
        FileExistsError: the folder of the execution's states holds those of another run.
        Stopped: half of the uploads of the last rounds, or more, are not finite (fewer are left out, counted, and named
            in the end), or the server's ELBO term is not. It holds the run as it was before that round.
        FloatingPointError: the scale of a local prior has grown without bound.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> schools = datasets.eight_schools()
        >>> posterior = bf.fit(models.eight_schools, schools, rounds=20, clients_per_round=0.5)
        >>> posterior
        Posterior: SFVI (FullRank globals, conditioned locals), 20 rounds, 8 clients; globals mu, tau; locals theta
        20 rounds are too few to tell whether the fit still moves
    """
    run = start(
        model,
        federation,
        algorithm,
        rounds=rounds,
        clients_per_round=clients_per_round,
        batch_size=batch_size,
        privacy=privacy,
        held_out=held_out,
        seed=seed,
        execution=execution,
        resume=resume,
    )
    group = run.execution.group
    alone = group is None or not group.rank()
    with rounds_shown(run.title, rounds, progress if alone else False) as show:
        while run.done < run.rounds:
            report = step(run)
            show(run.done, report.elbo, str(run.compiler))
            for callback in callbacks:
                callback(report)
        return finish(run)
