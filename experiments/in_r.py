"""Run a script of R on a data frame; the experiments that compare with lme4 and glmmTMB share it."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pandas as pd

__all__ = ["run_r"]


def run_r(
    script: str, frame: pd.DataFrame, arguments: list[str], timeout: float | None = None
) -> str:
    """Return the last line that a script prints, run on one thread.

    Args:
        script: its text. The first of its arguments is the path of the rows as CSV.
        frame: the rows.
        arguments: the further arguments.
        timeout: in seconds.

    Raises:
        subprocess.CalledProcessError: the script has failed.
        subprocess.TimeoutExpired: it has not ended in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        code, rows = Path(folder, "script.R"), Path(folder, "rows.csv")
        code.write_text(script, encoding="utf-8")
        frame.to_csv(rows, index=False)
        done = subprocess.run(
            ["Rscript", str(code), str(rows), *arguments],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            timeout=timeout,
        )
    return done.stdout.splitlines()[-1]
