from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import bayesfed as bf
from bayesfed.cli import forest, run_experiment
from tests.cli.experiments import MY_MODEL, SCHOOLS


@pytest.fixture(autouse=True)
def blank_plots(monkeypatch):
    """Runs write an empty picture: to draw one takes as long as the fit. A test that draws asks for ``drawn_plots``."""
    monkeypatch.setattr(
        run_experiment, "plot_forest", lambda path, *_, **__: Path(path).write_bytes(b"")
    )


@pytest.fixture
def drawn_plots(blank_plots, monkeypatch):
    monkeypatch.setattr(run_experiment, "plot_forest", forest.plot_forest)


@pytest.fixture
def schools(tmp_path, monkeypatch):
    """An experiment file in the working directory; returns its name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "schools.toml").write_text(SCHOOLS)
    return "schools.toml"


@pytest.fixture
def towns(tmp_path, monkeypatch):
    """An experiment on a CSV with a model of one's own, in another folder than the present one."""
    folder = tmp_path / "study"
    folder.mkdir()
    (folder / "beside.py").write_text("SPREAD = 0.5\n")
    (folder / "mine.py").write_text(MY_MODEL)
    generator = np.random.default_rng(0)
    pd.DataFrame(
        {
            "town": np.repeat(["007", "Ω $x_1$", "Øst", "北京"], [3, 5, 4, 2]),
            "u": generator.normal(size=14),
            "v": generator.normal(size=14),
            "cm": generator.normal(size=14),
        }
    ).to_csv(folder / "towns.csv", index=False)
    (folder / "towns.toml").write_text(
        SCHOOLS.replace('"eight_schools"', '"mine.py:heights"', 1).replace(
            'dataset = "eight_schools"',
            'csv = "towns.csv"\nclient = "town"\nfields = {x = ["u", "v"], height = "cm"}\n'
            'hold_out = ["Øst"]',
        )
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        bf.SFVI, "default", bf.SFVI(personal_steps=20)
    )  # of the town that is held out
    return "study/towns.toml"
