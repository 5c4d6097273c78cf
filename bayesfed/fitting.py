"""Federated rounds in one process: start, then steps, then finish; :func:`fit` is their loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesfed.algorithms import Algorithm
from bayesfed.checks.data import check_data, check_rows
from bayesfed.checks.independence import check_independence
from bayesfed.checks.sufficient import with_sufficient_rows
from bayesfed.checks.units import warn_of_units
from bayesfed.data.federation import Federation, Model
from bayesfed.data.moments import is_of_moments
from bayesfed.elbo.handlers import on_cpu
from bayesfed.elbo.program import Params, Program
from bayesfed.engine.cohort import cohort_size
from bayesfed.engine.ending import stopping_rule
from bayesfed.engine.execution import Execution
from bayesfed.engine.interrupts import delayed_interrupts
from bayesfed.engine.plan import Plan
from bayesfed.engine.privacy import NO_PRIVACY, Privacy
from bayesfed.engine.program import build_by_moments, build_program
from bayesfed.engine.progress import show_rounds
from bayesfed.engine.resume import initialise, save
from bayesfed.engine.rounds import answer, ask, update
from bayesfed.engine.run import Round, Run, Stopped
from bayesfed.engine.run_file import HISTORY, RunFile
from bayesfed.engine.states import States
from bayesfed.engine.stopping.drift import caveat, warn_if_moving
from bayesfed.engine.stopping.held_out import HeldOut, check_clients
from bayesfed.engine.watch import warn_if_falling, warn_of_refused, warn_of_uphill
from bayesfed.output.correction import correct
from bayesfed.output.effort import FEWEST, Probed, draws_of_q, probe, probed_effort
from bayesfed.output.locals_of_run import (
    fitted_cohort,
    kept_local_params,
    log_predictive,
    make_local_params,
)
from bayesfed.output.posterior import Posterior
from bayesfed.output.sums_over_points import with_moments
from bayesfed.rules.rule import Robust
from bayesfed.steps.noise_of_weights import NEAR_ALONE
from bayesfed.tracing.compiler import Compiler


@on_cpu()
def start(
    model: Model,
    federation: Federation,
    algorithm: Algorithm | None = None,
    *,
    execution: Execution | None = None,
    resume: str | Path | None = None,
    **options: Any,
) -> Run:
    """Start a run: it is before its first round, or where its file ends.

    Args:
        model: as for :func:`fit`, like all other arguments.
        federation: the clients' data.
        algorithm: by default :class:`~bayesfed.SFVI`.
        execution: where and how the clients' work runs.
        resume: the run's file.
        options: ``rounds``, ``clients_per_round``, ``batch_size``, ``privacy``, ``held_out``, ``seed`` and
            ``precision``.

    Returns:
        The run, for :func:`step` and :func:`finish`.

    Raises:
        TypeError, KeyError, ValueError, FileExistsError: see :func:`fit`.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> run = bf.start(models.eight_schools, datasets.eight_schools(), rounds=2)
        >>> [bf.step(run).number, bf.step(run).number]
        [1, 2]
        >>> bf.finish(run)
        Posterior: SFVI (FullRank globals, conditioned locals), 2 rounds, 8 clients; globals mu, tau; locals theta
        2 rounds are too few to tell whether the fit has converged
    """
    chosen: dict[str, Any] = {"algorithm": algorithm, "execution": execution}
    plan = Plan(model, **{n: v for n, v in chosen.items() if v is not None}, **options)
    if isinstance(plan.algorithm.rule, Robust):
        raise ValueError(
            f"rule: {type(plan.algorithm.rule).__name__} combines institutions' sums, and in one process "
            "there are none: use it between machines, or Mean here"
        )
    return start_run(plan, federation, resume)


@on_cpu()
def start_run(plan: Plan, federation: Federation, resume: str | Path | None = None) -> Run:
    """Check the model and the data of a plan, and start its run; see :func:`start`."""
    check_rows(federation)
    execution = plan.execution
    if resume is not None and execution.group is not None:
        raise ValueError(
            "a file to resume from holds the whole run: leave out resume, or the execution's group"
        )
    if execution.device is not None:
        federation = federation.to(execution.device)
    cohort_size(plan.clients_per_round, len(federation))  # fails early
    moments = is_of_moments(federation)
    if moments and plan.batch_size is not None:
        raise ValueError("batch_size: the clients are here by their moments alone: leave it out")
    build, rows = (
        (build_by_moments, federation.sufficient) if moments else (build_program, federation)
    )
    program = build(plan.model, federation, plan.algorithm, plan.seed)
    check_data(program, rows)
    check_independence(program, rows, shuffled=plan.batch_size is not None)
    warn_of_units(program, rows)
    if plan.batch_size is None and not moments:
        federation = with_sufficient_rows(program, federation, plan.algorithm)
    run = prepare_run(plan, program, federation, resume)
    _try_correction(run)
    return run


def prepare_run(
    plan: Plan,
    program: Program,
    federation: Federation,
    resume: str | Path | None,
    institutions: int | None = None,
) -> Run:
    """A run of a program that has been checked: before its first round, or where its file ends.

    Args:
        plan: the options of the fit.
        program: the model/guide pair.
        federation: the clients' data.
        resume: the run's file.
        institutions: between machines, their number; the rows of ``federation`` are then made up.
    """
    clients = len(federation)
    server = plan.algorithm.start(program, plan.whole(program.clients))
    if plan.held_out is None:
        stopping = stopping_rule(plan, program, server)
    else:
        check_clients(federation, plan.held_out)
        rows = plan.held_out.to(federation.device)

        def score(params: Params, cohort: Tensor) -> Tensor:
            names = [federation.names[i] for i in cohort.tolist()]
            return log_predictive(fitted_cohort(run, params, names), rows.select(names))

        stopping = HeldOut(rows, plan.algorithm.lr_decay, score)
    run = Run(
        plan=plan,
        program=program,
        federation=federation,
        stopping=stopping,
        cohort_size=cohort_size(plan.clients_per_round, clients),
        server=server,
        clients=States(clients if institutions is None else 1, device=federation.device),
        client_terms=torch.full((clients,), torch.nan, dtype=federation.dtype),
        term_totals=torch.zeros(2, dtype=torch.float64),
        refused=torch.zeros(clients, dtype=torch.int64),
        clip=(plan.privacy or NO_PRIVACY).first_clip(),
        history={name: torch.zeros(stopping.bound, dtype=torch.float64) for name in HISTORY},
        compiler=Compiler(plan.execution.compile),
        accepted=None if institutions is None else torch.full((institutions, 2), -1),
    )
    if resume is not None:
        run.file = RunFile(Path(resume), run.description, program, federation)
    initialise(run)
    return run


@on_cpu()
def step(run: Run) -> Round:
    """Run one round: a cohort's work, the sum of its uploads, the server's update. Changes ``run``, and its file.

    Raises:
        ValueError: the run has done all its rounds.
        Stopped: see :func:`fit`.
    """
    question = ask(run)
    report = update(run, question, answer(run, question))
    _try_correction(run)
    return report


def _try_correction(run: Run) -> None:
    """End a run that may be near its target if importance weights show that q(θ), or its correction, is good enough."""
    if not run.stopping.provisional:
        return
    early = run.stopping.early
    probed, posterior = None, None
    effort = probed_effort(make_posterior(run, {})) if early else None
    if effort is not None and effort.shared:
        if not run.stopping.is_worth_correcting(distant=False, noisy=True):
            return run.stopping.withdraw()
        posterior = _posterior_with_moments(run)
    elif effort is not None:
        is_worth = partial(
            run.stopping.is_worth_correcting, large=effort.large, mixture=effort.mixture
        )
        if not is_worth(distant=False, noisy=False):  # whatever a probe would show
            return run.stopping.withdraw()
        probed = _probe(run)
        if probed and not is_worth(*probed):
            return run.stopping.withdraw()
    if posterior is None:
        near = NEAR_ALONE if probed and probed.noisy else None
        posterior = make_posterior(run, _local_params(run, near))
    found = correct(posterior, probed=probed)
    if found.confirms(early):
        run.confirmed = posterior, found
    else:
        run.stopping.withdraw()


def _posterior_with_moments(run: Run) -> Posterior | None:
    """Return the posterior with clients' factors that have the moments of theirs; None if their states are not here."""
    kept = kept_local_params(run, global_params(run))
    if kept is None:
        return None
    posterior = make_posterior(run, kept)
    return with_moments(posterior, draws_of_q(posterior, FEWEST))


def _probe(run: Run) -> Probed | None:
    """Show how good q is before clients take their last steps, which takes long for many; None if that is not here."""
    kept = kept_local_params(run, global_params(run))
    return None if kept is None else probe(make_posterior(run, kept))


@on_cpu()
def finish(run: Run) -> Posterior:
    """Make the posterior of a run, which may go on afterwards.

    Stateless clients, and clients that were in no cohort, make their variables from θ here. If the clients' states are
    in files, the posterior reads them there, as later rounds leave them.
    """
    if run.stopping.provisional:
        posterior, found = run.confirmed
        warn_of_flaws(run, posterior)
        return posterior.with_correction(found)
    posterior = make_posterior(run, _local_params(run))
    warn_of_flaws(run, posterior)
    return posterior.corrected() if run.plan.algorithm.corrected else posterior


def global_params(run: Run) -> Params:
    """The guide's global parameters."""
    return {n: v.detach() for n, v in run.plan.algorithm.params(run.server).items()}


def _local_params(run: Run, near: float | None = None) -> Mapping[str, Tensor]:
    return make_local_params(run, global_params(run), near)


def make_posterior(run: Run, local_params: Mapping[str, Tensor]) -> Posterior:
    """The posterior with these local parameters of the clients, without correction and without warnings."""
    plan, params = run.plan, global_params(run)
    done = {name: values[: run.done] for name, values in run.history.items()}
    moving, rising = run.stopping.remaining(params, done["elbo"])
    return Posterior(
        program=run.program,
        federation=run.federation,
        params=params,
        local_params=local_params,
        history={n: done[n].to(torch.get_default_dtype()) for n in ("elbo", "seconds", "clients")},
        algorithm=plan.algorithm,
        seed=plan.seed,
        epsilon=run.epsilon,
        compiled=str(run.compiler),
        moving=moving,
        rising=rising,
        converged=run.stopping.converged,
        precision=plan.precision,
    )


def warn_of_flaws(run: Run, posterior: Posterior) -> None:
    """Warn of uploads that did not count, steps that went uphill, an ELBO that fell, a fit that has not converged."""
    warn_of_refused(run.federation.names, run.refused)
    warn_of_uphill(run.uphill)
    warn_if_falling(run.history["elbo"][: run.done].tolist(), run.program.rows)
    if run.program.particles == 1:  # the standard deviation of a few particles is no measure
        moving = posterior.moving
        warn_if_moving(caveat(moving, posterior.rising, run.done, posterior.converged), moving)


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
    precision: float | None = None,
) -> Posterior:
    """Fit a hierarchical model to clients whose data never meet.

    Args:
        model: a Pyro program that opens ``federation.clients()`` and ``federation.observations()``.
        federation: the clients' data.
        algorithm: by default :class:`~bayesfed.SFVI`.
        rounds: number of rounds. By default the run stops by itself when q(θ) has converged, after 500 rounds at most:
            see :mod:`bayesfed.engine.stopping.convergence`. This needs SFVI, SFVIAvg, PVI, or FOLA of at most
            50 globals, without privacy; or, by all clients with all rows, PACPFL, FedBE or a point estimate of at most
            50 globals, which takes quasi-Newton steps then (:mod:`bayesfed.rules.quasi_newton`); or ``held_out``, with
            any algorithm.
        clients_per_round: cohort size: a number of clients (int) or a fraction of them in (0, 1] (float).
            All clients take part in N / K rounds, in an order that is drawn again each time (each cohort by itself
            and in secret where privacy adds noise); sums over a cohort are scaled by N / K, so that every round's
            gradient is unbiased.
        batch_size: number of rows that a client uses in a local step, scaled by n_i / b_i; by default all.
        privacy: clips the uploads and adds noise to their sums, see :class:`~bayesfed.Privacy`. The ε that the
            run spends is shown with its progress and stored as ``posterior.epsilon``.
        held_out: rows of the same clients, in the same order, that are not trained on, as ``federation.split`` gives
            them. The run stops when its clients predict them no better, after 500 rounds at most: see
            :mod:`bayesfed.engine.stopping.held_out`. Not together with ``rounds``, privacy or several processes.
        seed: of all random numbers but the noise and the cohorts of privacy, which come from the operating system.
        execution: chunks, files, compilation, precision, processes and device: see :class:`~bayesfed.Execution`.
        resume: a file that the run is saved to after its rounds, in at most a twentieth of the time, and when it is
            interrupted: an interrupt waits for the end of the round, a second one does not. If the file is there
            already the run is resumed from it, with results bit-identical to those of an uninterrupted run, unless
            privacy draws other noise. A run that was given ``rounds`` may be given others, at least as many as it has
            done, unless they set the noise (``Privacy(epsilon=)``): the learning rates of the following rounds are then
            those of a run of that length, and the numbers differ from those of a run that was that long from the start
            unless the algorithm's ``lr_decay`` is 1.
        progress: show a progress bar; by default on a terminal, and elsewhere a line every ten seconds.
        callbacks: called with a :class:`Round` after each round. If one returns True the fit ends with that round.
        precision: the largest Monte Carlo standard error of the globals' means, in their posterior standard deviations,
            such as 0.01, at least 0.002 and below 1; of SFVI, SFVIAvg and PVI, without privacy. After the rounds, draws
            of θ are made until it is reached, see :meth:`bayesfed.Posterior.with_precision`. A thousand independent
            draws have 0.03, the usual goal.

    Returns:
        The :class:`~bayesfed.Posterior`.

    Raises:
        TypeError: the model is no function, the data are no federation, the algorithm is none (call it,
            ``bf.FedAvg()``), or ``callbacks`` is a function.
        KeyError: the model reads a field that the federation does not have.
        ValueError: the model, the guide, the data or the options do not fit; the message names the
            site, client, field or option. ``resume`` is the file of another run: its options, model, priors or data
            differ.
        FileExistsError: the folder of the execution's states has the states of another run.
        Stopped: half of the uploads of the last rounds, or more, are not finite (fewer are left out, counted, and named
            at the end), or the server's ELBO term is not finite, or the run has diverged. It holds the run as it was
            before that round. A run that has diverged begins again once, with four times as many draws a step, and
            warns of it, unless it has a file, states in files or privacy.
        FloatingPointError: the scale of a local prior has grown without bound, or PVI's product of factors is far
            from a proper Gaussian.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> schools = datasets.eight_schools()
        >>> posterior = bf.fit(models.eight_schools, schools, rounds=20, clients_per_round=0.5)
        >>> posterior
        Posterior: SFVI (FullRank globals, conditioned locals), 20 rounds, 8 clients; globals mu, tau; locals theta
        20 rounds are too few to tell whether the fit has converged
    """
    if callable(callbacks):
        raise TypeError(f"callbacks is one function, {callbacks!r}: give a list of them")
    options: dict[str, Any] = {
        "rounds": rounds,
        "clients_per_round": clients_per_round,
        "batch_size": batch_size,
        "privacy": privacy,
        "held_out": held_out,
        "seed": seed,
        "execution": execution,
        "precision": precision,
    }
    run = start(model, federation, algorithm, resume=resume, **options)
    try:
        return _run_to_its_end(run, rounds, progress, callbacks)
    except Stopped as stopped:
        kept = resume is not None or privacy is not None or run.plan.execution.states is not None
        if stopped.draws is None or kept:
            raise
        steps: Any = run.plan.algorithm.steps
        more = replace(run.plan.algorithm, steps=replace(steps, draws=stopped.draws))
        warnings.warn(f"{stopped}. The fit begins again, with draws={stopped.draws}", stacklevel=2)
    run = start(model, federation, more, **options)
    return _run_to_its_end(run, rounds, progress, callbacks)


def _run_to_its_end(
    run: Run,
    rounds: int | None,
    progress: bool | None,
    callbacks: Sequence[Callable[[Round], object]],
) -> Posterior:
    """Run all rounds, and make the posterior; arguments as of :func:`fit`."""
    group = run.plan.execution.group
    progress = progress if group is None or not group.rank() else False
    with show_rounds(run.title, rounds, progress) as show, delayed_interrupts() as interrupt:
        stop = False
        while run.done < run.rounds and not stop:
            report = step(run)
            try:
                show(run.done, report.elbo, str(run.compiler))
                stop = any([callback(report) is True for callback in callbacks])
                interrupt()
            except BaseException:
                save(run, due=True)
                raise
        if stop:
            save(run, due=True)
        if run.done:
            last = float(run.history["elbo"][run.done - 1])
            show(run.done, last, "importance weights, and a check of the clients")
        return finish(run)
