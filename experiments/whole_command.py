"""How long does `bayesfed run` take, and what takes it? Makes whole_command.md.

    pip install 'bayesfed[benchmarks]'
    git worktree add ../old 52dbb86 && make -C ../old shape
    python experiments/whole_command.py --old ../old      # on a machine that does nothing else, ten minutes

The problems are those of problems.py and the shipped experiment of Grunfeld's firms. The rows of each are written to a
file, and the whole command is run in a new process with the usual settings and 1,000 draws, by the other checkout (of
commit 52dbb86) and by this one in turn. The other one corrects fewer fits, so that its second commands take less time
on most problems. Columns are seconds: "import" up to the call of the command, "start" up to the fit, "fit" until the
posterior is there, with its corrections, "to_arviz" its data sets for ArviZ, "rest" writing, the summary, the plot and
held-out clients. "warm" figures are those of a second command in the same process with another seed. The last columns
are the whole command relative to twice the fit and the imports, and to_arviz relative to the fit.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

COLUMNS = (
    "problem | other checkout: whole | warm | import | start | fit | to_arviz | rest | whole "
    "| warm: fit | to_arviz | whole | whole ÷ (2 fits + import) | to_arviz ÷ fit | warm"
)
SHIPPED = {
    "eight schools": "eight_schools",
    "grunfeld": "varying_slope",
    "radon": "varying_intercept",
    "count": "hierarchical_count",
    "logistic": "hierarchical_logistic",
    "anes96": "OrderedLogistic",
    "kidney": "weibull_survival",
    "kidney, Cox": "Cox",
}
SETTINGS = {"anes96": "categories = 7", "kidney, Cox": "cuts = [0.5, 1.0, 5.0]"}
EXPERIMENT = "experiments/grunfeld.toml"
MODULE = """
from typing import Any

import pyro
import pyro.distributions as dist
from bayesfed.models.weibull_survival import CensoredWeibull


"""
"""What the models of problems.py import."""


def write_experiment(name: str, folder: Path) -> Path:
    """Write a problem's rows, its model if the package has none of it, and the experiment file; return the latter."""
    import numpy as np
    import runner
    from problems import PROBLEMS

    if name == EXPERIMENT:
        return runner.ROOT / EXPERIMENT
    problem, federation = PROBLEMS[name], PROBLEMS[name].data()
    rows = {field: federation[field].numpy() for field in federation.fields}
    np.savez(folder / "rows.npz", client=np.array(federation.names)[federation.owner], **rows)
    model = SHIPPED.get(name)
    if model is None:
        model = f"model.py:{problem.model.__name__}"
        text = MODULE + inspect.getsource(problem.model)
        (folder / "model.py").write_text(text)
    fields = json.dumps(list(rows))
    (folder / "experiment.toml").write_text(
        f'[model]\nname = "{model}"\n{SETTINGS.get(name, "")}\n'
        f'[data]\nnpz = "rows.npz"\nclient = "client"\nfields = {fields}\n'
    )
    return folder / "experiment.toml"


def timed(holder: Any, name: str, spent: dict[str, float]) -> None:
    """Add the seconds of all calls of a function to ``spent``, and the time of the first call."""
    function: Callable[..., Any] = getattr(holder, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        spent.setdefault(f"{name} from", begin)
        try:
            return function(*args, **kwargs)
        finally:
            spent[name] = spent.get(name, 0.0) + time.perf_counter() - begin

    setattr(holder, name, call)


def run_command(experiment: str) -> list[dict[str, float]]:
    """Run the command twice in this process; return the seconds of its parts."""
    begin = time.perf_counter()
    import importlib

    import bayesfed.cli.choices
    from bayesfed.cli.app import main as command

    new = importlib.util.find_spec("bayesfed.cli.run_experiment") is not None
    runs = importlib.import_module(f"bayesfed.cli.run{'_experiment' if new else ''}")
    imported, found = time.perf_counter() - begin, []
    direct = hasattr(runs, "data_groups")  # without ArviZ
    holder, name = (runs, "data_groups") if direct else (bayesfed.Posterior, "to_arviz")
    for seed in range(2):
        spent: dict[str, float] = {}
        before = runs.fit, getattr(holder, name)
        timed(runs, "fit", spent)
        timed(holder, name, spent)
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            command(["run", experiment, "--set", f"schedule.seed={seed}", "--output", folder])
            whole = time.perf_counter() - start
        runs.fit = before[0]
        setattr(holder, name, before[1])
        parts = {"fit": spent["fit"], "to_arviz": spent[name]}
        parts |= {"import": imported if seed == 0 else 0.0, "start": spent["fit from"] - start}
        found.append(parts | {"whole": whole + parts["import"]})
    return found


def measure(name: str, old: str, passes: int) -> list[list[list[dict[str, float]]]]:
    """Return the parts of cold and warm commands, of the other checkout and this one in turn."""
    import runner

    roots = Path(old).resolve(), runner.ROOT
    if not (roots[0] / "build/shape").exists():  # else it would be this checkout, as installed
        raise SystemExit(f"--old: run `make -C {old} shape` first")
    with tempfile.TemporaryDirectory() as folder:
        experiment = write_experiment(name, Path(folder))
        return [[child(root, experiment) for root in roots] for _ in range(passes)]


def child(root: Path, experiment: Path) -> list[dict[str, float]]:
    """Return what a new process with the package of a checkout measures."""
    with tempfile.TemporaryDirectory() as cache:
        env = os.environ | {
            "PYTHONPATH": str(root / "build/shape"),
            "TORCHINDUCTOR_CACHE_DIR": cache,
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-P", "-W", "ignore", str(Path(__file__).resolve())]
        done = subprocess.run(
            [*command, "--child", str(experiment)],
            cwd=root,
            env=env,
            capture_output=True,
            text=True,
        )
    if done.returncode:
        raise RuntimeError(f"{root}, {experiment}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def cells(_: Any, found: list[Any]) -> list[str]:
    """Return medians over passes."""
    import statistics

    (passes,) = found

    def median(state: int, run: int, part: str) -> float:
        return statistics.median(one[state][run][part] for one in passes)

    cold = {part: median(1, 0, part) for part in passes[0][1][0]}
    warm = {part: median(1, 1, part) for part in passes[0][1][1]}
    rest = cold["whole"] - sum(cold[part] for part in ("import", "start", "fit", "to_arviz"))
    seconds = [median(0, 0, "whole"), median(0, 1, "whole")]
    seconds += [cold[part] for part in ("import", "start", "fit", "to_arviz")]
    seconds += [rest, cold["whole"], warm["fit"], warm["to_arviz"], warm["whole"]]
    ratios = [cold["whole"] / (2 * cold["fit"] + cold["import"])]
    ratios += [cold["to_arviz"] / cold["fit"], warm["to_arviz"] / warm["fit"]]
    return [f"{value:.2f}" for value in (*seconds, *ratios)]


def main() -> None:
    import runner
    from problems import PROBLEMS

    given = runner.arguments(__doc__, old="../old", passes=3)
    rows = {name: [(name, given.old, given.passes)] for name in [EXPERIMENT, *PROBLEMS]}
    runner.table(COLUMNS, rows, measure, given, cells)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print("\n" + json.dumps(run_command(sys.argv[2])))
    else:
        main()
