"""The server of a run over Flower: its ServerApp, and the command that starts it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from bayesfed.cli.deployment import run_file
from bayesfed.cli.errors import RunError
from bayesfed.deploy import flower
from bayesfed.settings import SettingsError

APP = Path(flower.__file__).with_name("flower_app")
"""The folder for ``flwr run``: a pyproject.toml that names :data:`server_app` and the client's app."""

server_app = ServerApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the experiment whose path is in the run's configuration, over the SuperNodes that Flower lists.

    Raises:
        SettingsError: there is no path, or the experiment has mistakes.
    """
    named = str(context.run_config.get("experiment", ""))
    if not named:
        raise SettingsError(
            "experiment is missing: --run-config 'experiment=\"/path/on/the/server.toml\"'"
        )
    folder = str(context.run_config.get("folder", ""))
    run_file(flower.carrier(grid), Path(named), Path(folder) if folder else None)


def run_over_flower(experiment: Path, folder: Path, superlink: str) -> None:
    """Call ``flwr run`` for an experiment on this machine's SuperLink, as ``$FLWR_HOME/config.toml`` names it.

    Raises:
        RunError: ``flwr run`` failed, or ended without a result.
    """
    result = folder.resolve() / "summary.csv"
    before = _modified(result)
    command = ["flwr", "run", str(APP), superlink, "--stream"]
    command += [
        "--run-config",
        f'experiment="{experiment.resolve().as_posix()}" folder="{result.parent.as_posix()}"',
    ]
    print(" ".join(command), flush=True)
    beside = shutil.which("flwr", path=Path(sys.executable).parent)  # flwr.exe on Windows
    program = beside or shutil.which("flwr")
    if program is None:
        raise RunError("there is no program flwr: pip install 'bayesfed[flower]'")
    done = subprocess.run([program, *command[1:]], check=False)
    if done.returncode or _modified(result) == before:  # its status is 0 even if the run has failed
        raise RunError(
            "the run has failed: Flower's log above says why; the same command goes on with it"
        )


def _modified(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None
