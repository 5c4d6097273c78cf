"""The page in a browser, at two widths: nothing is wider than the window, nothing is loaded, no script runs."""

import html
import json
import shutil
import subprocess

import numpy as np
import pytest

from bayesfed.report.page import render
from tests.report.facts_of_a_study import study, variable

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "chromium-headless-shell")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
FRAME = """<!DOCTYPE html><title>frame</title><iframe width="{width}" height="900" srcdoc="{page}"></iframe><script>
onload = () => {{
  const inside = document.querySelector("iframe").contentWindow, page = inside.document;
  const found = {{
    width: page.documentElement.scrollWidth,
    scripts: page.scripts.length,
    ran: "ran" in inside,
    loaded: inside.performance.getEntriesByType("resource").length,
    headings: page.querySelectorAll("h2").length,
    background: inside.getComputedStyle(page.body).backgroundColor,
  }};
  document.body.innerHTML = "<pre>" + JSON.stringify(found) + "</pre>";
}};
</script>"""


@pytest.mark.skipif(BROWSER is None, reason=f"no browser is installed ({', '.join(NAMES)})")
@pytest.mark.parametrize("width", [400, 1200])
@pytest.mark.parametrize("count", [10, 3000])
def test_in_a_browser(tmp_path, width, count):
    names = ["<script>ran = 1</script>", "a" * 120, *(f"client {i}" for i in range(count))]
    small = np.linspace(-1.0, 1.0, len(names)) * 1e-4  # numbers with many digits
    label = "<img src=x onerror='ran = 1'>"
    shown = [variable(label, names), variable("small", names, mean=small + 1234.5)]
    text = render([study(clients=names, label=label, locals=shown)])
    path = tmp_path / "frame.html"
    path.write_text(FRAME.format(width=width, page=html.escape(text)), encoding="utf-8")
    options = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/user")
    command = [BROWSER, *options, "--virtual-time-budget=3000", "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    printed = done.stdout.partition("<pre>")[2].partition("</pre>")[0]
    found = json.loads(printed)
    assert found["width"] <= width
    assert not found["scripts"] and not found["ran"] and not found["loaded"]
    assert found["headings"] == 9
