"""Sphinx configuration. The build needs no network: it fetches no inventories and no data."""

import importlib
import os
import subprocess
from importlib.metadata import version as installed_version

project = "bayesfed"
author = "The bayesfed developers"
copyright = "The bayesfed developers"
release = installed_version("bayesfed")
version = ".".join(release.split(".")[:2])

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "myst_nb",
]
exclude_patterns = ["_build", "notebooks", "jupyter_execute", "**.ipynb_checkpoints"]

# Pages are MyST markdown. Cells of {code-cell} blocks run on every build, but with DOCS_CELLS=off none, and with
# DOCS_CELLS=part those of a sixth of the pages, another sixth with the next commit: one to two minutes on two cores.
PARTS = (
    {"gallery", "hospitals"},
    {"priors", "speed"},
    {"arviz", "calibration"},
    {"data", "models", "networks", "own_parts"},
    {"distributions", "first_model", "formulas", "tutorial"},
    {
        *("checking", "coming_from_pyro", "comparing", "effects"),
        *("hospitals_by_post", "sensitivity", "wards"),
    },
)
WITH_CELLS = set().union(*PARTS)
myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
cells = os.environ.get("DOCS_CELLS", "force")
nb_execution_mode = "off" if cells == "off" else "force"
suppress_warnings = [] if cells == "force" else ["myst-nb.lexer"]  # a kernel gives the language
if cells == "part":
    done = subprocess.run(["git", "rev-list", "--count", "HEAD"], capture_output=True, check=True)
    runs = PARTS[int(done.stdout) % len(PARTS)]
    nb_execution_excludepatterns = [f"{name}.md" for name in WITH_CELLS - runs]
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_execution_show_tb = True

nb_render_markdown_format = "myst"  # tables that a cell displays

# What would come and go in a page: ArviZ 0.x announces its 1.0 once a day, at import, and tqdm
# misses a widget that no page needs.
os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning:arviz,ignore:IProgress not found")

autosummary_generate = True
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
# numbers with bounds, which would be written out in full
autodoc_type_aliases = {"Count": "int", "Times": "int", "Rate": "float", "Weight": "float"}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True


_FIRST = {
    *("arviz", "coming_from_pyro", "data", "hospitals", "hospitals_by_post"),
    *("networks", "own_parts", "priors", "tutorial"),
}
"""About half of each part."""


def setup(app):
    """Two processes read pages in this order: some with cells, those without, and the others with cells."""
    app.connect(
        "build-finished", importlib.import_module("sphinx-mathjax-offline").copy_mathjax_files
    )
    app.connect("env-before-read-docs", lambda app, env, names: names.sort(key=_place))


def _place(name):
    return 0 if name in _FIRST else 1 + (name in WITH_CELLS)


mathjax_path = "mathjax/tex-chtml.js"  # formulas in pages that are read without a network

html_theme = "pydata_sphinx_theme"
html_title = "bayesfed"
html_theme_options = {
    "header_links_before_dropdown": 6,
    "navbar_align": "left",
    "navigation_with_keys": False,
    "secondary_sidebar_items": ["page-toc"],
    "show_prev_next": False,
}
html_sidebars: dict[str, list[str]] = {"index": [], "gallery": []}  # these have no subpages
html_static_path = ["_static"]
html_css_files = ["bayesfed.css"]
