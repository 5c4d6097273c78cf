"""The command line: ``bayesfed run experiment.toml``, ``node site.toml``, ``predict site.toml rows.csv`` and ``list``.

What takes seconds to import (torch, Pyro, ArviZ) is imported by a command once it needs it: help, and mistakes in an
experiment file or in the columns of its data, come before.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import click
import typer

from bayesfed import __version__
from bayesfed.cli.experiment import address_of, read_experiment, read_rows, read_site
from bayesfed.cli.local_queries import Question, asked, text_of
from bayesfed.cli.messages import RunError, message
from bayesfed.settings import SettingsError

app = typer.Typer(
    help="Fit hierarchical Bayesian models across clients whose data never meet.",
    add_completion=False,
    pretty_exceptions_enable=False,
    suggest_commands=False,
    rich_markup_mode=None,
)

_MISTAKES = (ValueError, KeyError, TypeError, OSError, ImportError, NotImplementedError)


class Carrier(StrEnum):
    """What carries messages between a server and sites."""

    sockets = "sockets"
    flower = "flower"


class What(StrEnum):
    """What can be listed."""

    models = "models"
    datasets = "datasets"
    algorithms = "algorithms"
    guides = "guides"


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
        _complain(message(error))
        if isinstance(error, RunError):
            return error.code
        return 2 if isinstance(error, _MISTAKES) else 1


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
        Carrier | None,
        typer.Option("--on", help="The clients are at sites: what carries the messages."),
    ] = None,
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
    folder = output or Path(config.output.folder or Path("runs") / experiment.stem)
    if on is not None:
        if config.deployment is None:
            raise SettingsError("deployment is missing: --on needs the names of the sites")
        if on is Carrier.flower:
            if overrides or output or overwrite:
                raise SettingsError(
                    "--on flower takes the experiment as its file says, which the sites have too"
                )
            from bayesfed.cli.flower import run_over_flower

            run_over_flower(experiment, config.deployment.superlink)
            return
        from bayesfed.cli.deployment import run_on_sockets

        run_on_sockets(config, experiment, folder, overwrite=overwrite, resume=resume)
        return
    if not config.data.here:
        raise SettingsError("data is missing: the clients are at sites, so run it with --on")
    rows = read_rows(config.data, experiment.parent)
    from bayesfed.cli.choices import choices

    chosen = choices(config, rows, experiment.parent)
    from bayesfed.cli.run import fit_and_write

    fit_and_write(
        config, chosen, experiment, folder, overwrite=overwrite, resume=resume, debug=debug
    )


@app.command()
def node(
    site: Annotated[Path, typer.Argument(help="Site file (TOML).")],
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Answer for the clients of a site, until stopped.

    Reads the site's rows, listens on its socket and keeps its clients' variables in its folder. What left the site
    stands in log.jsonl there.
    """
    config, experiment, base = read_site(site)
    rows = read_rows(experiment.data, site.parent)
    from bayesfed.cli.deployment import answer

    answer(config, experiment, rows, site.parent, base)


@app.command()
def predict(
    site: Annotated[Path, typer.Argument(help="Site file (TOML).")],
    rows: Annotated[Path, typer.Argument(help="Rows to predict (CSV), with the fit's columns.")],
    output: Annotated[
        Path | None, typer.Option("--output", help="Write the table there, not to the terminal.")
    ] = None,
    variables: Annotated[
        bool, typer.Option("--variables", help="Of the clients' variables, not of the outcomes.")
    ] = False,
    run: Annotated[
        str | None, typer.Option("--run", help="Of this fit; by default the last that ended.")
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """At a site: what its posterior says of rows, as a CSV table of means, spreads and quantiles.

    Clients of the fit have the variables that the site keeps for them; new ones get theirs from the global
    variables and those of their rows that have an outcome. Nothing leaves the site. Where the site file has an
    own_socket the worker there answers, if it runs.
    """
    config, experiment, base = read_site(site)
    question = Question(rows=text_of(rows), variables=variables, run=run)
    found = None
    if config.own_socket is not None:
        with contextlib.suppress(ConnectionError):  # no worker is needed for it
            found = asked(address_of(config.own_socket, site.parent), question)
    if found is None:
        own = read_rows(experiment.data, site.parent)
        from bayesfed.cli.deployment import kept_of

        found = kept_of(config, experiment, own, site.parent, base).table(question)
    if output is None:
        print(found, end="")
    else:
        output.write_text(found, encoding="utf-8")


@app.command("list")
def list_(
    what: Annotated[What | None, typer.Argument(help="By default everything.")] = None,
) -> None:
    """Show the models, data sets, algorithms and guides that an experiment can name."""
    from bayesfed.cli.listing import show

    show(None if what is None else what.value)


if __name__ == "__main__":
    raise SystemExit(main())
