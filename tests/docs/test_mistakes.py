"""What the page on the command line quotes of mistakes is what the commands print."""

import re
import shlex
from pathlib import Path

import pytest

from bayesfed.cli.app import main

ROOT = Path(__file__).resolve().parents[2]
QUOTED = re.findall(
    r"^\$ bayesfed (run .+)\nerror: (.+)$", (ROOT / "docs/cli.md").read_text(encoding="utf-8"), re.M
)


@pytest.mark.parametrize(("command", "message"), QUOTED)
def test_that_a_mistake_is_reported_in_these_words(command, message, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert main(shlex.split(command)) == 2
    printed = capsys.readouterr().err
    assert message.removesuffix("...").strip() in " ".join(printed.split())


def test_that_the_page_quotes_mistakes():
    assert len(QUOTED) == 2
