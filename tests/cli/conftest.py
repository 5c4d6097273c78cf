from pathlib import Path

import pytest

from bayesfed.cli import forest, run_experiment


@pytest.fixture(autouse=True)
def blank_plots(monkeypatch):
    """Runs write an empty picture: to draw one takes as long as the fit. A test that draws asks for ``drawn_plots``."""
    monkeypatch.setattr(
        run_experiment, "plot_forest", lambda path, *_, **__: Path(path).write_bytes(b"")
    )


@pytest.fixture
def drawn_plots(blank_plots, monkeypatch):
    monkeypatch.setattr(run_experiment, "plot_forest", forest.plot_forest)
