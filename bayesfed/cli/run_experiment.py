"""The run of an experiment in one process: the fit, and the folder of results."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

from rich.console import Console

import bayesfed
from bayesfed.algorithms.registry import settings_of
from bayesfed.cli import report
from bayesfed.cli.choices import Choices
from bayesfed.cli.errors import RunError, one_line
from bayesfed.cli.experiment import Experiment
from bayesfed.cli.forest import plot_forest, population_means
from bayesfed.cli.own_code import with_files
from bayesfed.data.moments import is_of_moments
from bayesfed.data.plural import plural
from bayesfed.effects.agreed import check_effect, effects_of
from bayesfed.engine.progress import show_work
from bayesfed.engine.stopping.rule import BOUND
from bayesfed.fitting import fit
from bayesfed.output.comparison import compare
from bayesfed.output.inference_data import data_groups
from bayesfed.output.posterior import Posterior
from bayesfed.output.study import source_of
from bayesfed.settings import SettingsError


def fit_and_write(
    config: Experiment,
    chosen: Choices,
    experiment: Path,
    wanted: Path,
    *,
    overwrite: bool,
    resume: bool,
    debug: bool,
) -> None:
    """Fit, and write the results into the folder that is wanted, or beside it.

    Raises:
        SettingsError: a variable of an effect does not exist, or does not take its values.
        RunError: the run failed or was interrupted after its first round.
    """
    for number, agreed in enumerate(config.effects):
        try:
            check_effect(chosen.model, chosen.federation, agreed)
        except (KeyError, ValueError) as error:
            raise SettingsError(f"effects[{number}]: {error}") from None
    if config.leave_one_out is not None and config.leave_one_out.compare:
        raise SettingsError(
            "leave_one_out.compare: for data at institutions; in one process load both posteriors, and bf.compare them"
        )
    if is_of_moments(chosen.federation) and (config.effects or config.leave_one_out is not None):
        raise SettingsError(
            "effects, leave_one_out: they need the clients' rows, and data.moments has none: leave them out"
        )
    folder = report.RunFolder(wanted, overwrite=overwrite, go_on=resume)
    folder.config = _resolve(config, chosen, experiment, folder.path, wanted)
    console = Console(highlight=False)
    rounds = config.schedule.rounds
    length = f"at most {BOUND} rounds" if rounds is None else plural(rounds, "round")
    if folder.path != wanted and (wanted / report.RUN).exists():
        console.print(f"{wanted} holds a run, with which --resume would go on", soft_wrap=True)
    for line in (
        f"{config.model} on {config.data.source}",
        f"{chosen.everyone!r}" + (f"; {len(chosen.held)} held out" if chosen.held else ""),
        f"{chosen.algorithm}, {length}, "
        + (f"going on in {folder.path}" if folder.run.exists() else f"results in {folder.path}"),
    ):
        console.print(line, soft_wrap=True, markup=False)
    try:
        with warnings.catch_warnings():
            # fit reports itself which client's numbers are not finite
            warnings.filterwarnings("ignore", "Encountered (NaN|[+-]?inf)", UserWarning)
            posterior = fit(
                chosen.model,
                chosen.federation,
                chosen.algorithm,
                **config.schedule.model_dump() | {"held_out": chosen.held_out},
                privacy=chosen.privacy,
                execution=chosen.execution,
                resume=folder.run,
                callbacks=[folder.record],
            )
        if not folder.rounds:  # all of them were done before
            if folder.complete:
                folder.print_results(console, posterior.caveat)
                return
            folder.begin(len(posterior.history["elbo"]))
        with show_work("draws, predictions and files", console):
            personal = posterior.personalize(chosen.held) if chosen.held else None
            _write(folder, posterior, personal, config, chosen, console)
    except BaseException as error:
        folder.abandon()
        so_far = ""
        if folder.rounds:
            so_far = f"; the rounds so far ({folder.rounds}) are in {folder.path / 'history.csv'}"
        if isinstance(error, KeyboardInterrupt):
            there = "" if folder.path == wanted else f"--output {folder.path} "
            again = f"; {there}--resume goes on" if folder.run.exists() else ""
            raise RunError(f"interrupted{so_far}{again}", 130) from error
        if folder.rounds and isinstance(error, Exception) and not debug:
            raise RunError(f"{one_line(error)}{so_far}") from error
        raise


def _write(
    folder: report.RunFolder,
    posterior: Posterior,
    personal: Posterior | None,
    config: Experiment,
    chosen: Choices,
    console: Console,
) -> None:
    """Write everything but the history and print the summary."""
    draws, written, large = {}, {}, dict[str, int]()
    for name, part in (("posterior", posterior), ("held_out", personal)):
        if part is not None:
            part.save(folder.path / f"{name}.safetensors")
            groups = data_groups(
                part, config.output.num_samples, khat=part.khat, caveat=part.caveat
            )
            draws[name] = groups["posterior"]
            if not config.output.large:
                large = report.large_variables(draws[name])
                for group in groups.keys() & {"posterior", "prior"}:
                    groups[group] = groups[group].drop_vars(groups[group].keys() & large.keys())
            folder.write_draws(f"{name}.nc", groups)
            written[name] = groups["posterior"]
    folder.write_summary(written["posterior"], console, posterior.caveat, written.get("held_out"))
    found = effects_of(posterior, config.effects, lambda line: console.print(line, markup=False))
    folder.write_effects(found, console)
    if (wanted := config.leave_one_out) is not None:
        options = wanted.model_dump(include={"unit", "outcome", "num_samples", "seed"})
        folder.write_comparison(compare({wanted.name: posterior}, **options), console)
    folder.write("program.py", source_of(chosen.model))
    for name, size in large.items():
        console.print(
            f"{name}, {plural(size, 'number')} in a draw, is in posterior.safetensors only; output.large = true "
            "writes its draws and its summary too",
            soft_wrap=True,
            markup=False,
        )
    plot_forest(
        folder.path / "forest.png",
        draws["posterior"],
        population_means(posterior),
        variables=chosen.shown,
        held_out=draws.get("held_out"),
        client_dim=posterior.federation.client_dim,
        title=f"{config.model} on {config.data.source}: "
        f"{posterior.algorithm}, {plural(len(posterior.history['elbo']), 'round')}",
    )
    last = posterior.history["elbo"][-20:]
    seconds = float(posterior.history["seconds"].sum())
    console.print(
        f"ELBO {float(last.mean()):,.2f} (mean of the last {plural(len(last), 'round')}); "
        f"{seconds:,.1f} s in {plural(len(posterior.history['elbo']), 'round')}"
        + (", then it had converged" if posterior.converged else "")
        + (f", {posterior.compiled}" if posterior.compiled else "")
    )
    if posterior.epsilon is not None and chosen.privacy is not None:
        delta = f", δ = {chosen.privacy.delta:g}" if chosen.privacy.mechanism == "gaussian" else ""
        console.print(f"privacy spent: ε = {posterior.epsilon:.3g}{delta}")
    folder.print_files(console)


def _resolve(
    config: Experiment, chosen: Choices, experiment: Path, folder: Path, wanted: Path
) -> str:
    """Return the experiment with every setting as TOML; paths are relative to the run's folder."""
    idle = {name for name in ("effects", "leave_one_out") if not getattr(config, name)}
    data: dict[str, Any] = config.model_dump(exclude={"execution", "privacy", "deployment"} | idle)
    data["execution"] = dataclasses.asdict(chosen.execution)
    if chosen.privacy is not None:
        data["privacy"] = dataclasses.asdict(chosen.privacy)
    data["algorithm"] = with_files(settings_of(chosen.algorithm), folder)
    named = config.algorithm.get("guide")
    if named is not None:
        data["algorithm"]["guide"] = named
    base = experiment.parent
    for section, key in (("model", "name"), ("algorithm", "guide")):
        value = data[section].get(key)
        if value is not None and ":" in value:
            file, _, function = value.rpartition(":")
            data[section][key] = f"{report.relative(base / file, folder)}:{function}"
    if config.data.kind != "dataset":
        data["data"][config.data.kind] = report.relative(base / config.data.source, folder)
    if not wanted.is_absolute():
        data["output"]["folder"] = wanted.as_posix()
    name, version = experiment.name, bayesfed.__version__
    head = f"# {name} as it was run by bayesfed {version}; keys that are not here were not set\n\n"
    return head + report.to_toml(data)
