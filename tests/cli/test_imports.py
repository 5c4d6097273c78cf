"""Torch, Pyro and ArviZ take seconds to import: nothing that can be said without them waits for them."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "pyro", "arviz", "matplotlib", "scipy")
FILE = """
[model]
name = "varying_intercept"
[data]
csv = "towns.csv"
client = "town"
fields = { x = ["u"], y = "v" }
"""


def python(program, folder):
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=folder
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--help"], "Usage: bayesfed"),
        (["--version"], "bayesfed 0"),
        (["rum"], "No such command 'rum'"),
        (["run", "no.toml"], "no.toml: No such file"),
        (["run", "towns.toml", "--set", "schedule.round=1"], "schedule.round is unknown"),
        (["run", "towns.toml", "--set", "data.csv=no.csv"], "there is no file no.csv"),
        (["run", "towns.toml", "--set", "data.client=city"], "no column 'city'; it has town, u, v"),
        (["run", "towns.toml", "--set", "data.fields.y=w"], "no column 'w'; it has town, u, v"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_help_and_mistakes_come_before(arguments, said, tmp_path):
    (tmp_path / "towns.toml").write_text(FILE)
    (tmp_path / "towns.csv").write_text("town,u,v\nA,1.0,2.0\nB,3.0,4.0\n")
    done = python(
        "import sys\n"
        "from bayesfed.cli.app import main\n"
        f"main({arguments!r})\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])",
        tmp_path,
    )
    assert said in done.stdout + done.stderr
    assert done.stdout.endswith("[]\n")


def test_public_names_come_when_they_are_asked_for(tmp_path):
    done = python(
        "import sys, bayesfed as bf\n"
        "assert 'torch' not in sys.modules\n"
        "assert bf.fit and bf.SFVI and bf.Federation\n"
        "unused = 'calibration', 'effects', 'formulas', 'models', 'testing'\n"
        "assert not [name for name in unused if f'bayesfed.{name}' in sys.modules]\n"
        "import bayesfed.fitting\n"
        "assert bf.fit is bayesfed.fitting.fit\n"
        "assert bf.models.Cox and bf.datasets.kidney and 'SFVI' in dir(bf)\n"
        "late = 'pandas', 'arviz', 'xarray', 'matplotlib', 'scipy', 'rich'\n"
        "assert not [name for name in late if name in sys.modules]\n"
        "assert not {'Any', 'import_module', 'TYPE_CHECKING'} & {*dir(bf)}\n"
        "from bayesfed import *\n"
        "assert fit is bf.fit and set(bf.__all__) <= set(globals())\n"
        "bf.nothing",
        tmp_path,
    )
    assert done.stderr.strip().splitlines()[-1] == (
        "AttributeError: module 'bayesfed' has no attribute 'nothing'"
    )


def test_a_fit_does_without_compiler_and_arviz(tmp_path):
    """torch imports its compiler, or SymPy, to draw from a MultivariateNormal and to compare shapes."""
    done = python(
        "import sys, torch, pyro\n"
        "before = set(sys.modules)\n"
        "import bayesfed as bf\n"
        "posterior = bf.fit(bf.models.varying_slope, bf.datasets.grunfeld())\n"
        "assert posterior.correction is not None\n"
        "posterior.sample(10), posterior.predict(num_samples=10)\n"
        "late = {'sympy', 'torch._dynamo', 'arviz', 'matplotlib'}\n"
        "print(sorted(late & sys.modules.keys() - before))",
        tmp_path,
    )
    assert done.stdout == "[]\n", done.stderr
