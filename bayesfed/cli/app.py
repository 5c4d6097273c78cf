"""The command line: ``bayesfed run experiment.toml``, ``report runs/experiment``, ``node node.toml``, ``list``, ...

A command imports torch, Pyro and ArviZ, which takes seconds, once it needs them: help, and mistakes in an experiment
file or in the columns of its data, come before.
"""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import click
import typer

from bayesfed import __version__
from bayesfed.cli.errors import RunError, one_line
from bayesfed.cli.experiment import (
    is_node_file,
    read_experiment,
    read_node_file,
    read_rows,
    socket_address,
)
from bayesfed.cli.local_queries import Question, ask, read_text
from bayesfed.settings import SettingsError
from bayesfed.tracing.garbage import without_garbage_collection

app = typer.Typer(
    help="Fit hierarchical Bayesian models across clients whose data never meet.",
    add_completion=False,
    pretty_exceptions_enable=False,
    suggest_commands=False,
    rich_markup_mode=None,
)

_STARTER = Path(__file__).with_name("starter")
_MISTAKES = (ValueError, KeyError, TypeError, OSError, ImportError, NotImplementedError)


class Transport(StrEnum):
    """The transports of messages between a server and nodes."""

    sockets = "sockets"
    flower = "flower"


class Listed(StrEnum):
    """The kinds of names that can be listed."""

    models = "models"
    datasets = "datasets"
    algorithms = "algorithms"
    guides = "guides"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0, 1 (a run failed), 2 (a mistake to correct) or 130 (Ctrl-C).

    A mistake prints one line on stderr, ``error: ...``; with ``--debug`` the traceback instead. A warning is a line
    ``warning: ...``.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # θ and ± may not be in the encoding of a pipe
            stream.reconfigure(errors="backslashreplace")
    usual, warnings.formatwarning = warnings.formatwarning, _warning_line
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
        _complain(one_line(error))
        if isinstance(error, RunError):
            return error.code
        return 2 if isinstance(error, _MISTAKES) else 1
    finally:
        warnings.formatwarning = usual


def _warning_line(message: Warning | str, *_: object, **__: object) -> str:
    return f"warning: {message}\n"


def _complain(text: str) -> None:
    print(f"error: {text}", file=sys.stderr)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    if version:
        print(f"bayesfed {__version__}")
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
    on: Annotated[
        Transport | None,
        typer.Option("--on", help="The clients are at institutions: how messages get there."),
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Fit the model of an experiment file and write a folder of results.

    The folder is --output, else [output] folder, else runs/<name of the file> in the working directory. If it holds
    anything already, the run goes to <folder>-2, -3, ... instead. A run that was stopped goes on with --resume and
    the same experiment, which may have more rounds.
    """
    if overwrite and resume:
        raise click.UsageError("give either --resume or --overwrite")
    config = read_experiment(experiment, overrides or ())
    folder = output or Path(config.output.folder or Path("runs") / experiment.stem)
    if on is not None:
        if config.deployment is None:
            raise SettingsError("deployment is missing: --on needs the names of the institutions")
        if on is Transport.flower:
            if overrides or overwrite:
                raise SettingsError(
                    "--on flower takes the experiment as in its file, which the institutions have too"
                )
            from bayesfed.cli.flower_server import run_over_flower

            run_over_flower(experiment, folder, config.deployment.superlink)
            return
        from bayesfed.cli.deployment import run_on_sockets

        run_on_sockets(config, experiment, folder, overwrite=overwrite, resume=resume)
        return
    if not config.data.is_given:
        raise SettingsError("data is missing: the clients are at institutions, so run it with --on")
    rows = read_rows(config.data, experiment.parent)
    with without_garbage_collection():
        from bayesfed.cli.choices import choices
        from bayesfed.cli.run_experiment import fit_and_write

    chosen = choices(config, rows, experiment.parent)
    fit_and_write(
        config, chosen, experiment, folder, overwrite=overwrite, resume=resume, debug=debug
    )


@app.command()
def node(
    file: Annotated[Path, typer.Argument(help="Node file (TOML).")],
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Answer for the clients of an institution, until stopped.

    Reads the institution's rows, listens on its socket and stores its clients' local variables in its folder, where
    log.jsonl says what left the institution.
    """
    config, experiment, base = read_node_file(file)
    rows = read_rows(experiment.data, file.parent, alone=config.one_client)
    from bayesfed.cli.deployment import run_node

    run_node(config, experiment, rows, file.parent, base)


@app.command()
def key(
    file: Annotated[Path, typer.Argument(help="Node file, or the coordinator's experiment file.")],
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """By post: print the public key of an institution, or of the coordinator.

    An institution's goes into the experiment file, the coordinator's into the node files. The private keys are made
    here and do not leave. Compare the public ones by telephone.
    """
    if is_node_file(file):
        config, experiment, _ = read_node_file(file)
        from bayesfed.cli.post import show_institution_key

        show_institution_key(config, experiment, file.parent)
        return
    agreed = read_experiment(file)
    from bayesfed.cli.post import show_coordinator_key

    show_coordinator_key(agreed, file)


@app.command("ask")
def ask_(
    experiment: Annotated[Path, typer.Argument(help="Experiment file (TOML).")],
    output: Annotated[
        Path | None, typer.Option("--output", help="The letter's file, in place of redirection.")
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option("--without", metavar="NAME", help="Wait no longer for its answer this round."),
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """By post, at the coordinator: write the next letter to the institutions, as in ask run.toml > round-03.ask.

    A letter is written again, with the same bytes, until all answers to it have been taken. When the study is done
    its results are where bayesfed run writes them.
    """
    if output is None and sys.stdout.isatty():
        raise click.UsageError(f"a letter is a file: bayesfed ask {experiment} > round-01.ask")
    config = read_experiment(experiment)
    folder = Path(config.output.folder or Path("runs") / experiment.stem)
    with without_garbage_collection():
        from bayesfed.cli.post import ask

    ask(experiment, folder, output, without or [])


@app.command()
def answer(
    letter: Annotated[Path, typer.Argument(help="The coordinator's letter.")],
    node: Annotated[Path, typer.Option("--node", help="Node file (TOML).")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before it is written.")] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", help="The answer; else <institution>-<letter>.answer."),
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """By post, at an institution: show what would leave it in answer to a letter, and write the signed answer.

    Nothing leaves by this command: the answer is a file, which somebody sends. log.jsonl in the node's folder lists
    what was written.
    """
    config, experiment, base = read_node_file(node)
    rows = read_rows(experiment.data, node.parent, alone=config.one_client)
    with without_garbage_collection():
        from bayesfed.cli.post import answer as write_answer

    write_answer(letter, config, experiment, rows, node.parent, base, output, yes=yes)


@app.command()
def take(
    answers: Annotated[list[Path], typer.Argument(help="Institutions' answers.")],
    experiment: Annotated[
        Path | None,
        typer.Option("--experiment", help="The study; by default it is looked for in runs."),
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """By post, at the coordinator: check the signatures of institutions' answers, and go on with the run."""
    with without_garbage_collection():
        from bayesfed.cli.post import take as take_answers

    take_answers(answers, experiment)


@app.command()
def predict(
    file: Annotated[Path, typer.Argument(help="Node file (TOML).")],
    rows: Annotated[Path, typer.Argument(help="Rows to predict (CSV), with the fit's columns.")],
    output: Annotated[
        Path | None, typer.Option("--output", help="Write the table there, not to the terminal.")
    ] = None,
    variables: Annotated[
        bool, typer.Option("--variables", help="Clients' local variables, not rows' outcomes.")
    ] = False,
    run: Annotated[
        str | None, typer.Option("--run", help="The fit; by default the last that ended.")
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """At an institution: predict rows by its posterior, as a CSV table of means, sds and quantiles.

    Clients of the fit have the local variables that the node has stored; new ones get theirs from the global
    variables and those of their rows that have an outcome. Nothing leaves the institution. If the node file has an
    own_socket the node there answers, if it runs.
    """
    config, experiment, base = read_node_file(file)
    question = Question(rows=read_text(rows), variables=variables, run=run)
    found = None
    if config.own_socket is not None:
        with contextlib.suppress(ConnectionError):  # it works without a node too
            found = ask(socket_address(config.own_socket, file.parent), question)
    if found is None:
        own = read_rows(experiment.data, file.parent, alone=config.one_client)
        from bayesfed.cli.deployment import local_posteriors

        found = local_posteriors(config, experiment, own, file.parent, base).table(question)
    if output is None:
        print(found, end="")
    else:
        output.write_text(found, encoding="utf-8")


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders that bayesfed run has written.")],
    output: Annotated[
        Path | None, typer.Option("--output", help="The file; else report.html in the first.")
    ] = None,
    title: Annotated[str, typer.Option("--title", help="The heading.")] = "",
    logs: Annotated[
        list[Path] | None,
        typer.Option("--log", help="A node's folder, whose log says what left the institution."),
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Write a report of a run, or of several beside each other, as one HTML file for a browser.

    It has tables, figures, predictive checks by client, the program and its priors, what left each institution, and a
    checklist. It needs no network.
    """
    from bayesfed.cli.run_report import report_runs

    report_runs(runs, output or runs[0] / "report.html", title, logs or [])


@app.command("list")
def list_(
    what: Annotated[Listed | None, typer.Argument(help="By default everything.")] = None,
) -> None:
    """Show the models, data sets, algorithms and guides that an experiment can name."""
    from bayesfed.cli.listing import show

    show(None if what is None else what.value)


@app.command()
def new(
    folder: Annotated[Path, typer.Argument(help="The folder to make.")],
) -> None:
    """Make a folder for a study that runs at once: rows, data check, model, experiment, test.

    Its README.md says what each file is and how to put your own rows and model in place.
    """
    if folder.exists():
        raise click.UsageError(f"{folder} exists already: give another name")
    folder.mkdir(parents=True)
    for source in sorted(_STARTER.iterdir()):
        (folder / source.name.removesuffix(".txt")).write_bytes(source.read_bytes())
    print(f"{folder} is made; next: cd {folder} && bayesfed run experiment.toml")


@app.command()
def doctor() -> None:
    """Show what is installed: versions, compiler, GPU, memory, and what is missing for which feature."""
    from bayesfed.cli.doctor import show

    show()


if __name__ == "__main__":
    raise SystemExit(main())
