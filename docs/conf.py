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
# DOCS_CELLS=part those of a quarter of the pages, another quarter with the next commit: a minute or so on two cores.
PARTS = (
    {"priors", "speed"},
    {"calibration", "coming_from_pyro", "first_model", "hospitals", "wards"},
    {"arviz", "comparing", "data", "models", "tutorial"},
    {
        *("checking", "distributions", "effects", "formulas", "gallery"),
        *("networks", "own_parts", "sensitivity"),
    },
)
myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
cells = os.environ.get("DOCS_CELLS", "force")
nb_execution_mode = "off" if cells == "off" else "force"
suppress_warnings = [] if cells == "force" else ["myst-nb.lexer"]  # a kernel gives the language
if cells == "part":
    done = subprocess.run(["git", "rev-list", "--count", "HEAD"], capture_output=True, check=True)
    runs = PARTS[int(done.stdout) % len(PARTS)]
    nb_execution_excludepatterns = [f"{name}.md" for name in set().union(*PARTS) - runs]
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
    "api",
    "arviz",
    "cli",
    "data",
    "formulas",
    "gallery",
    "hospitals",
    "idea",
    "own_parts",
    "tutorial",
}


def setup(app):
    """Two processes read a half of the pages each, in this order: each half runs about as long."""
    app.connect(
        "build-finished", importlib.import_module("sphinx-mathjax-offline").copy_mathjax_files
    )
    app.connect("env-before-read-docs", lambda app, env, names: names.sort(key=_not_first))


def _not_first(name):
    return name not in _FIRST


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
