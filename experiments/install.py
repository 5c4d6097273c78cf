"""What does each required package cost, in an installation and at import? Makes install.md.

    python -m venv fresh && fresh/bin/pip install -c constraints.txt .
    python experiments/install.py --python fresh/bin/python

Rows are what pyproject.toml requires. "MB" is the size of the package's files; "MB saved" is by how much an
installation would shrink without it and without the packages that nothing else needs. The seconds are the median of
five imports of the package in a new process that has imported torch (torch: nothing), once files are in memory. "fit"
says whether a first ``bf.fit`` imports it at all; other packages are imported by what needs them, such as ``to_arviz``
or ``bayesfed run``.
"""

import json
import subprocess

import runner

SIZES = """
import importlib.metadata as m, json, re, sys
def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()
found = {canonical(d.name): d for d in m.distributions()}
def needs(name):
    for line in (found[name].requires or []) if name in found else []:
        if "extra ==" not in line:
            other = canonical(re.match(r"[\\w.-]+", line)[0])
            if other in found:
                yield other
def closure(roots, without=None):
    seen, todo = set(), [r for r in roots if r != without]
    while todo:
        one = todo.pop()
        if one not in seen:
            seen.add(one)
            todo += [n for n in needs(one) if n != without]
    return seen
def size(name):
    files = found[name].files or []
    return sum(f.locate().stat().st_size for f in files if f.locate().is_file()) / 1e6
roots = list(dict.fromkeys(needs("bayesfed")))
whole = closure(roots)
print(json.dumps([sum(map(size, whole)), {
    r: [size(r), sum(size(n) for n in whole - closure(roots, r))] for r in roots
}]))
"""
IMPORT = """
import sys, time
{before}
begin = time.perf_counter()
import {module}
print(time.perf_counter() - begin)
"""
FIT = """
import json, sys
import bayesfed as bf
from bayesfed import datasets, models
bf.fit(models.eight_schools, datasets.eight_schools(), rounds=2)
print(json.dumps(sorted(sys.modules)))
"""
MODULES = {"dp-accounting": "dp_accounting", "pyro-ppl": "pyro", "tomli-w": "tomli_w"}


def run(python: str, program: str) -> str:
    """Return the last line that a program prints."""
    done = subprocess.run([python, "-I", "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


def measure(python: str) -> list[list[str]]:
    """Return the cells of all packages, the largest first, and of all together."""
    whole, sizes = json.loads(run(python, SIZES))
    used = json.loads(run(python, FIT))
    rows = []
    for name, (own, saved) in sorted(sizes.items(), key=lambda item: -item[1][1]):
        module = MODULES.get(name, name)
        program = IMPORT.format(module=module, before="" if name == "torch" else "import torch")
        seconds = sorted(float(run(python, program)) for _ in range(5))[2]
        imported = "yes" if module in used else "no"
        rows.append([name, f"{own:.0f}", f"{saved:.0f}", f"{seconds:.2f}", imported])
    return [*rows, ["all", f"{whole:.0f}", "", "", ""]]


def main() -> None:
    given = runner.arguments(__doc__, python="python")
    rows = {(): [(given.python,)]}
    columns = "package | MB | MB saved | seconds to import | fit"
    runner.table(columns, rows, measure, given, lambda _, found: found[0])


if __name__ == "__main__":
    main()
