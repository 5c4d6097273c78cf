"""The server of a run over Flower: its ServerApp, and what starts it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from bayesfed.cli.deployment import run_file
from bayesfed.cli.messages import RunError
from bayesfed.deploy import flower
from bayesfed.settings import SettingsError

APP = Path(flower.__file__).with_name("flower_app")
"""What ``flwr run`` takes: a pyproject.toml that names :data:`server_app` and the client's."""

server_app = ServerApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the experiment whose path the run's configuration has over the nodes that Flower knows.

    Raises:
        SettingsError: there is no path, or the experiment has mistakes.
    """
    named = str(context.run_config.get("experiment", ""))
    if not named:
        raise SettingsError(
            "experiment is missing: --run-config 'experiment=\"/path/on/the/server.toml\"'"
        )
    run_file(flower.carrier(grid), Path(named))


def run_over_flower(experiment: Path, superlink: str) -> None:
    """``flwr run`` of an experiment on this machine's SuperLink, as ``$FLWR_HOME/config.toml`` names it.

    Raises:
        RunError: ``flwr run`` failed, or ended without a result.
    """
    path = experiment.resolve()
    result = path.parent / "runs" / path.stem / "summary.csv"
    before = result.stat().st_mtime_ns if result.exists() else None
    command = [
        "flwr",
        "run",
        str(APP),
        superlink,
        "--stream",
        "--run-config",
        f'experiment="{path}"',
    ]
    print(" ".join(command), flush=True)
    done = subprocess.run([str(Path(sys.executable).with_name("flwr")), *command[1:]], check=False)
    after = result.stat().st_mtime_ns if result.exists() else None
    if done.returncode or after == before:  # its status is 0 also where the run has failed
        raise RunError(
            "the run has failed: Flower's log above says why; the same command goes on with it"
        )
