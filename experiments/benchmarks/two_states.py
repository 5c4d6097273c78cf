"""How long do whole fits and rounds take, beside another checkout of the project? Makes two_states.md.

    pip install 'bayesfed[benchmarks]'
    git worktree add ../old 52dbb86 && make -C ../old shape
    python experiments/benchmarks/two_states.py --old ../old     # on a machine that does nothing else, half an hour

Each measurement runs in a new process, old and new in turn, one thread, nothing in Inductor's cache. Hierarchies are
those of problems.py, fitted with the usual settings until they have converged; "cold" is the first fit of a process,
imports apart, "warm" the least of the next two, "round" the median of fifteen rounds under ``compile="auto"``. The
networks are ten rounds on a recipe of mnist/recipes.py, 50 personal steps and predictions. Cells are the median ratio
of new to old over the passes, with the least and the greatest.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = [ROOT / "experiments", ROOT / "experiments/benchmarks", ROOT / "experiments/mnist"]
sys.path += map(str, HERE)

COLUMNS = "what | old: cold, s | warm, s | round, ms | new ÷ old: cold | warm | round"
FITS = {  # on grunfeld, with a fixed number of rounds
    "grunfeld, PVI": ("PVI", 20),
    "grunfeld, FOLA": ("FOLA", 10),
    "grunfeld, PFedVEM": ("PFedVEM", 30),
}
NETWORKS = ("few_images, FedAvg", "few_images, PFedVEM")


def fit_of(name: str) -> Callable[[int], Any]:
    """Return a whole fit by its seed."""
    import bayesfed as bf

    if name in NETWORKS:
        import recipes
        import whole_runs

        recipe, method = name.split(", ")
        task = getattr(recipes, recipe)(str(ROOT / "shared/data/mnist.npz"), 0)
        return lambda seed: whole_runs.ours(method, task, 10)
    from problems import PROBLEMS

    if name in FITS:
        method, rounds = FITS[name]
        model, data = PROBLEMS["grunfeld"].model, PROBLEMS["grunfeld"].data()
        how = {"progress": False, "execution": bf.Execution(compile="auto"), "rounds": rounds}
        return lambda seed: bf.fit(model, data, getattr(bf, method)(), seed=seed, **how)
    problem, data = PROBLEMS[name], PROBLEMS[name].data()
    return lambda seed: bf.fit(problem.model, data, seed=seed, progress=False).sample(100)


def round_of(name: str) -> Callable[[], Any]:
    """Return one round of SFVI after another."""
    from problems import PROBLEMS

    import bayesfed as bf

    problem = PROBLEMS[name]
    how = {"rounds": 30, "execution": bf.Execution(compile="auto")}
    run = bf.start(problem.model, problem.data(), **how)
    return lambda: bf.step(run)


def measured(name: str) -> list[float]:
    """Return seconds of a first fit and of later ones, and milliseconds of a round."""
    import torch

    torch.set_num_threads(1)
    fit, seconds = fit_of(name), []
    for seed in range(2 if name in NETWORKS else 3):
        start = time.perf_counter()
        fit(seed)
        seconds.append(time.perf_counter() - start)
    found = [seconds[0], min(seconds[1:])]
    if name in FITS or name in NETWORKS:
        return found
    step, rounds = round_of(name), []
    for _ in range(19):
        start = time.perf_counter()
        step()
        rounds.append(1e3 * (time.perf_counter() - start))
    return [*found, statistics.median(rounds[4:])]


def imported(_: str) -> list[float]:
    """Return the seconds that the import and the first use of ``bf.fit`` take."""
    start = time.perf_counter()
    import bayesfed

    bayesfed.fit  # noqa: B018 - loads it
    return [time.perf_counter() - start]


def child(root: Path, name: str) -> list[float]:
    """Return what a new process finds with the package of a checkout and the problems of this one."""
    paths = [root / "build/shape", *HERE]
    with tempfile.TemporaryDirectory() as cache:
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "TORCHINDUCTOR_CACHE_DIR": cache,
        }
        command = [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), "--child", name]
        done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{root}, {name}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(name: str, old: str, passes: int) -> list[list[list[float]]]:
    """Return what old and new take, in turn."""
    roots = Path(old).resolve(), ROOT
    return [[child(root, name) for root in roots] for _ in range(passes)]


def cells(_: Any, found: list[Any]) -> list[str]:
    """Return the old figures and the ratios."""
    (passes,) = found
    width = len(passes[0][0])
    old = [statistics.median(pair[0][i] for pair in passes) for i in range(width)]
    made = [f"{value:.0f}" if i == 2 else f"{value:.2f}" for i, value in enumerate(old)]
    ratios = [sorted(new[i] / before[i] for before, new in passes) for i in range(width)]
    words = [f"{statistics.median(r):.2f} ({r[0]:.2f} to {r[-1]:.2f})" for r in ratios]
    return made + [""] * (3 - width) + words + [""] * (3 - width)


def main() -> None:
    from problems import PROBLEMS
    from timing import runner

    given = runner.arguments(__doc__, old="../old", passes=3)
    names = ["import", *PROBLEMS, *FITS, *NETWORKS]
    rows = {name: [(name, given.old, given.passes)] for name in names}
    runner.table(COLUMNS, rows, measure, given, cells, threads=None)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        take = imported if sys.argv[2] == "import" else measured
        print(json.dumps(take(sys.argv[2])))
    else:
        main()
