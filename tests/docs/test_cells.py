"""Every page with cells is in one of the parts of which CI runs one at a time."""

import ast
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_that_every_page_with_cells_is_in_one_part():
    tree = ast.parse((DOCS / "conf.py").read_text(encoding="utf-8"))
    (parts,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "PARTS"
    )
    found = [
        sorted(n.value for n in ast.walk(part) if isinstance(n, ast.Constant))
        for part in parts.elts
    ]
    pages = sorted(
        p.stem for p in DOCS.glob("*.md") if "{code-cell}" in p.read_text(encoding="utf-8")
    )
    assert len(pages) > 15
    assert sorted(page for part in found for page in part) == pages
