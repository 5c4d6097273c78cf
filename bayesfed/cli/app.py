"""The command line: ``bayesfed run experiment.toml`` and ``bayesfed list``."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import click
import pandas as pd
import typer
from rich.console import Console
from rich.text import Text

import bayesfed
from bayesfed.algorithms import settings
from bayesfed.algorithms.registry import algorithm_of
from bayesfed.algorithms.settings import SettingsError, choose, nearest
from bayesfed.cli import report
from bayesfed.cli.experiment import Experiment, read_experiment
from bayesfed.cli.forest import forest, population_means
from bayesfed.cli.listing import DATASETS, MODELS, What, show
from bayesfed.data.federation import Federation, Model
from bayesfed.elbo.sites import sites
from bayesfed.engine.cohort import cohort_size
from bayesfed.engine.settling import BOUND
from bayesfed.fit import fit

app = typer.Typer(
    help="Fit hierarchical Bayesian models across clients whose data never meet.",
    add_completion=False,
    pretty_exceptions_enable=False,
    suggest_commands=False,
    rich_markup_mode=None,
)


_MISTAKES = (ValueError, KeyError, TypeError, OSError, ImportError, NotImplementedError)


class RunError(Exception):
    """A run that ended early, with the exit code that says how."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0, 1 (a run failed), 2 (a mistake to mend) or 130 (Ctrl-C).

    A mistake gives one line on stderr, ``error: ...``; ``--debug`` gives the traceback instead.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = app(args=arguments, prog_name="bayesfed", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.ClickException as error:
        _complain(error.format_message())
        return 2
    except (KeyboardInterrupt, click.Abort):
        _complain("interrupted")
        return 130
    except Exception as error:
        if "--debug" in arguments:
            raise
        _complain(_message(error))
        if isinstance(error, RunError):
            return error.code
        return 2 if isinstance(error, _MISTAKES) else 1


def _complain(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)


def _message(error: BaseException) -> str:
    """An exception as one line."""
    ours = isinstance(
        error, ValueError | KeyError | TypeError | FloatingPointError | ImportError | RunError
    )
    text = str(error)
    if isinstance(error, KeyError) and error.args:
        text = str(error.args[0])
    elif isinstance(error, OSError) and error.strerror:
        ours = True
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    text = " ".join(text.split("Trace Shapes:")[0].split())  # Pyro appends a table to messages
    if ours and text:
        return text
    return f"{type(error).__name__}: {text} (--debug shows where)"


# -- run ------------------------------------------------------------------------------------------


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    if version:
        print(f"bayesfed {bayesfed.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def run(
    experiment: Annotated[Path, typer.Argument(help="Experiment file (TOML).")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Set a key, e.g. schedule.rounds=10."),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", help="Folder for the results.")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier run in the folder.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in the folder, or begin it there.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Fit the model of an experiment file and write a folder of results.

    The folder is --output, else [output] folder, else runs/<name of the file>, seen from where you
    stand. If it holds anything already, the run goes to <folder>-2, -3, ... instead. A run that was stopped goes
    on with --resume and the same experiment, which may have more rounds.
    """
    if overwrite and resume:
        raise click.UsageError("give either --resume or --overwrite")
    config = read_experiment(experiment, overrides or ())
    base = experiment.parent
    model = _model(config.model.name, base)
    algorithm = _algorithm(config, base)
    everyone, federation, held = _federation(config, base)
    shown = _shown_sites(config, model, federation)
    schedule = config.schedule.model_dump()
    if config.schedule.held_out is not None:
        part, seed = config.schedule.held_out, config.schedule.seed
        federation, schedule["held_out"] = federation.split(test=part, seed=seed)
    cohort_size(config.schedule.clients_per_round, len(federation))
    wanted = output or Path(config.output.folder or Path("runs") / experiment.stem)
    folder = report.RunFolder(wanted, overwrite=overwrite, go_on=resume)
    folder.config = _resolved(config, algorithm, base, folder.path, wanted, experiment.name)
    console = Console(highlight=False)
    rounds = config.schedule.rounds
    length = f"at most {BOUND}" if rounds is None else f"{rounds:,}"
    if folder.path != wanted and (wanted / report.RUN).exists():
        console.print(f"{wanted} holds a run, with which --resume would go on", soft_wrap=True)
    for line in (
        f"{config.model.name} on {config.data.dataset or config.data.csv}",
        f"{everyone!r}" + (f"; {len(held)} held out" if held else ""),
        f"{type(algorithm).__name__}, {length} rounds, "
        + (f"going on in {folder.path}" if folder.run.exists() else f"results in {folder.path}"),
    ):
        console.print(line, soft_wrap=True, markup=False)
    try:
        with warnings.catch_warnings():
            # fit itself says which client's numbers are not finite
            warnings.filterwarnings("ignore", "Encountered (NaN|[+-]?inf)", UserWarning)
            posterior = fit(
                model,
                federation,
                algorithm,
                **schedule,
                privacy=config.privacy,
                execution=config.execution,
                resume=folder.run,
                callbacks=[folder.record],
            )
        if not folder.rounds:  # all of them were done before
            folder.begin(len(posterior.history["elbo"]))
        personal = posterior.personalize(held) if held else None
        _write(folder, posterior, personal, config, shown, console)
    except BaseException as error:
        folder.abandon()
        kept = ""
        if folder.rounds:
            kept = f"; the rounds so far ({folder.rounds}) are in {folder.path / 'history.csv'}"
        if isinstance(error, KeyboardInterrupt):
            there = "" if folder.path == wanted else f"--output {folder.path} "
            again = f"; {there}--resume goes on" if folder.run.exists() else ""
            raise RunError(f"interrupted{kept}{again}", 130) from error
        if folder.rounds and isinstance(error, Exception) and not debug:
            raise RunError(f"{_message(error)}{kept}") from error
        raise


def _write(
    folder: report.RunFolder,
    posterior: bayesfed.Posterior,
    personal: bayesfed.Posterior | None,
    config: Experiment,
    shown: Sequence[str],
    console: Console,
) -> None:
    """Write everything but the history and print the summary."""
    draws = {}
    for name, part in (("posterior", posterior), ("held_out", personal)):
        if part is not None:
            part.save(folder.path / f"{name}.safetensors")
            idata = part.to_arviz(config.output.num_samples)
            folder.write_draws(f"{name}.nc", idata)
            draws[name] = idata["posterior"]
    table = report.summary(draws["posterior"], draws.get("held_out"))
    folder.write("summary.csv", table.to_csv(index_label="variable", float_format="%.6g"))
    forest(
        folder.path / "forest.png",
        draws["posterior"],
        population_means(posterior),
        sites=shown,
        held_out=draws.get("held_out"),
        client_dim=posterior.federation.client_dim,
        title=f"{config.model.name} on {config.data.dataset or config.data.csv}: "
        f"{type(posterior.algorithm).__name__}, {len(posterior.history['elbo']):,} rounds",
    )
    report.print_summary(table, console, posterior.caveat)
    last = posterior.history["elbo"][-20:]
    seconds = float(posterior.history["seconds"].sum())
    console.print(
        f"ELBO {float(last.mean()):,.2f} (mean of the last {len(last)} rounds); "
        f"{seconds:,.1f} s in {len(posterior.history['elbo']):,} rounds"
        + (", then it had settled" if posterior.settled else "")
        + (f", {posterior.compiled}" if posterior.compiled else "")
    )
    if posterior.epsilon is not None and config.privacy is not None:
        delta = f", δ = {config.privacy.delta:g}" if config.privacy.mechanism == "gaussian" else ""
        console.print(f"privacy spent: ε = {posterior.epsilon:.3g}{delta}")
    for name, what in folder.written():
        line = Text(str(folder.path / name), style="bold").append(f"  {what}", style="dim")
        console.print(line, soft_wrap=True)


def _model(name: str, base: Path) -> Model:
    if ":" in name:
        return _function(name, base, "model.name")
    if name not in MODELS and name.endswith(".py"):
        raise SettingsError(f'model.name is "{name}"; say which function: "{name}:function"')
    return choose(name, MODELS, "model.name")


def _function(name: str, base: Path, where: str) -> Any:
    """``file.py:function``, the file being relative to ``base``."""
    file, _, function = name.rpartition(":")
    path = base / file
    if not path.is_file():
        raise SettingsError(f"{where}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise SettingsError(f"{where}: {path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))  # for what lies beside it
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise SettingsError(
            f"{where}: {path} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    finally:
        sys.path.pop(0)
    own = [
        n
        for n, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", None) == module.__name__
    ]
    if not callable(getattr(module, function, None)):
        raise SettingsError(
            f"{where}: {path} has no function {function!r}; {nearest(function, own)}"
            f"it has {', '.join(own) or 'none'}"
        )
    return getattr(module, function)


def _algorithm(config: Experiment, base: Path) -> Any:
    """The algorithm; its ``guide`` may be ``file.py:function``."""
    data, guide = dict(config.algorithm), None
    named = data.get("guide")
    if isinstance(named, str) and ":" in named:
        guide = _function(named, base, "algorithm.guide")
        data["guide"] = settings.CUSTOM
    elif named is not None:
        raise SettingsError(
            f'algorithm.guide is {named!r}; give "file.py:function", or leave it out and choose '
            "algorithm.global_guide"
        )
    return algorithm_of(data, guide=guide)


def _federation(config: Experiment, base: Path) -> tuple[Federation, Federation, Federation | None]:
    """All clients, those that take part and those held out, on the device."""
    data = config.data
    if data.dataset is not None:
        federation = choose(data.dataset, DATASETS, "data.dataset")()
    else:
        path = base / str(data.csv)
        if not path.is_file():
            raise SettingsError(f"data.csv: there is no file {path}")
        try:
            frame = pd.read_csv(path, dtype={data.client: str})
            federation = Federation.from_frame(
                frame, client=str(data.client), fields=data.fields, missing=data.missing
            )
        except (ValueError, KeyError, TypeError) as error:
            raise SettingsError(f"data ({path}): {_message(error)}") from error
    device = config.execution.device
    if device is not None:
        try:
            federation = federation.to(device)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).split("\n")[0]
            raise SettingsError(f'execution.device is "{device}": {reason}') from error
    if not data.hold_out:
        return federation, federation, None
    for name in data.hold_out:
        if name not in federation.names:
            near = nearest(name, federation.names) or f"they are {', '.join(federation.names[:8])}"
            raise SettingsError(f'data.hold_out: there is no client "{name}"; {near.strip()}')
    if len(set(data.hold_out)) >= len(federation):
        raise SettingsError("data.hold_out names every client: none is left to fit")
    return federation, *federation.hold_out(data.hold_out)


def _shown_sites(config: Experiment, model: Model, federation: Federation) -> list[str]:
    local = [s.name for s in sites(model, federation).values() if s.local and not s.observed]
    for name in config.output.sites or ():
        if name not in local:
            raise SettingsError(
                f'output.sites: there is no local site "{name}"; {nearest(name, local)}'
                f"the model has {', '.join(local)}"
            )
    return local if config.output.sites is None else config.output.sites


def _resolved(
    config: Experiment, algorithm: Any, base: Path, folder: Path, wanted: Path, name: str
) -> str:
    """The experiment with every setting, with paths as seen from the run's folder."""
    made = {"execution": config.execution, "privacy": config.privacy}
    data: dict[str, dict[str, Any]] = config.model_dump(exclude=set(made))
    data |= {name: dataclasses.asdict(part) for name, part in made.items() if part is not None}
    data["algorithm"] = settings.settings_of(algorithm)
    named = config.algorithm.get("guide")
    if named is not None:
        data["algorithm"]["guide"] = named
    for section, key in (("model", "name"), ("algorithm", "guide"), ("data", "csv")):
        value = data[section].get(key)
        if value is None or (key != "csv" and ":" not in value):
            continue
        file, colon, function = value.rpartition(":") if key != "csv" else (value, "", "")
        data[section][key] = report.relative(base / file, folder) + colon + function
    if not wanted.is_absolute():
        data["output"]["folder"] = wanted.as_posix()
    version = bayesfed.__version__
    head = f"# {name} as it was run by bayesfed {version}; keys that are not here were not set\n\n"
    return head + report.to_toml(data)


# -- list -----------------------------------------------------------------------------------------


@app.command("list")
def list_(
    what: Annotated[What | None, typer.Argument(help="By default everything.")] = None,
) -> None:
    """Show the models, data sets, algorithms and guides that an experiment can name."""
    show(Console(highlight=False), what)


if __name__ == "__main__":
    raise SystemExit(main())
