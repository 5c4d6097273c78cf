"""The README: its numbers are those of the tables, its output is what its code prints, and it is short."""

import contextlib
import io
import math
import re
from pathlib import Path

import pytest

from tests.scripts import load

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def readme():
    return load("docs/readme.py")


def prose(text: str) -> str:
    """The words of a page: no code, no targets of links, no comments."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.DOTALL)
    return re.sub(r"\]\([^)]*\)", "]", text)


def test_that_the_table_is_made_from_the_experiment_s_table(readme):
    text = readme.README.read_text(encoding="utf-8")
    assert readme.BEGIN + readme.table() + readme.END in text, "run python docs/readme.py"


def test_that_a_number_of_another_table_is_found(readme, tmp_path, monkeypatch):
    text = readme.TABLE.read_text(encoding="utf-8")
    other = text.replace("| eight schools | ", "| eight schools | 7")
    (tmp_path / "other.md").write_text(other, encoding="utf-8")
    monkeypatch.setattr(readme, "TABLE", tmp_path / "other.md")
    assert readme.table() not in readme.README.read_text(encoding="utf-8")


def test_that_no_measured_number_is_outside_the_table(readme):
    text = readme.README.read_text(encoding="utf-8")
    outside = text.split(readme.BEGIN)[0] + text.split(readme.END)[1]
    text = prose(outside).replace("`bf.Privacy(epsilon=3.0)`", "")
    found = re.findall(r"(?<![A-Za-z])\d+(?:\.\d+)*", text)
    assert found == ["3.11", "2.0"], "a number beside those of Python and of the licence"


def test_length(readme):
    words = len(prose(readme.README.read_text(encoding="utf-8")).split())
    assert 600 <= words <= 800


def test_that_the_code_prints_the_output(readme):
    fitted, formula = readme.code()
    names: dict = {}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(fitted, names)
    (shown,) = re.findall(
        r"```text\n(.*?)```", readme.README.read_text(encoding="utf-8"), re.DOTALL
    )
    printed, shown = (re.findall(r"\S+", text) for text in (out.getvalue(), shown))
    assert len(printed) == len(shown)
    for ours, written in zip(printed, shown, strict=True):
        if re.fullmatch(r"-?\d+\.\d+", written):  # round-off of another machine moves draws
            assert float(ours) == pytest.approx(float(written), abs=0.06), (ours, written)
        elif not written.isdigit():
            assert ours == written
    frame = _frame(names["datasets"].china_smoking())
    names |= {"frame": frame}
    exec(formula, names)
    slope = names["posterior"].derived(num_samples=4000)["smoker"]
    assert float(slope.mean()) == pytest.approx(_mantel_haenszel(frame), abs=0.06)


def _mantel_haenszel(frame):
    """The logarithm of the common odds ratio of the cities' tables."""
    above, below = 0.0, 0.0
    for _, city in frame.groupby("city"):
        counts = city.groupby(["smoker", "cancer"]).size()
        above += counts[1, 1] * counts[0, 0] / len(city)
        below += counts[1, 0] * counts[0, 1] / len(city)
    return math.log(above / below)


def _frame(federation):
    import pandas as pd

    cities = [federation.names[int(owner)] for owner in federation.owner]
    smoker, cancer = federation["x"][:, 0].int(), federation["y"].int()
    return pd.DataFrame({"city": cities, "smoker": smoker, "cancer": cancer})
