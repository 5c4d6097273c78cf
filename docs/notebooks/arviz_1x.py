"""Run the cells of arviz_1x.md under ArviZ 1.x and keep what came out: makes docs/arviz_1x.ipynb.

    python3.12 -m venv 1x && 1x/bin/pip install -e '.[dev]' 'arviz>=1,<2'
    1x/bin/python docs/notebooks/arviz_1x.py

Tables and pictures are kept, warnings are not.
"""

from __future__ import annotations

from pathlib import Path

import arviz as az
import nbformat
from myst_nb.core.read import read_myst_markdown_notebook
from myst_parser.config.main import MdParserConfig
from nbclient import NotebookClient

HERE = Path(__file__).parent


def main() -> None:
    """Fails where a cell does."""
    assert not az.__version__.startswith("0."), "this is of ArviZ 1.x"
    text = (HERE / "arviz_1x.md").read_text(encoding="utf-8")
    notebook = read_myst_markdown_notebook(text, MdParserConfig())
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":  # warnings have paths of the machine
            cell.outputs = [one for one in cell.outputs if one.get("name") != "stderr"]
    nbformat.write(notebook, HERE.parent / "arviz_1x.ipynb")


if __name__ == "__main__":
    main()
