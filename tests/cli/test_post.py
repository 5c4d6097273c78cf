"""``bayesfed ask``, ``answer``, ``take`` and ``key``, on files."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest
import typer

from bayesfed.cli.app import main
from bayesfed.cli.deployment import make_plan
from bayesfed.cli.experiment import read_experiment
from bayesfed.cli.post import count_letters
from bayesfed.report.logs import read_log
from tests.cli.test_node_files import EXPERIMENT

NAMES = ("north", "south", "west")
NODE = """
name = "{name}"
experiment = "run.toml"
{coordinator}

[data]
csv = "{name}.csv"
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A coordinator's and three institutions' files, without keys."""
    monkeypatch.chdir(tmp_path)
    text = EXPERIMENT.replace("rounds = 4", "rounds = 1").split("[deployment.sockets]")[0]
    text = text.replace('["x", "y"]', '{ x = ["x"], y = "y" }')
    (tmp_path / "run.toml").write_text(text + "\n[algorithm]\nname = 'SFVI'\ncorrected = false\n")
    rng = np.random.default_rng(0)
    for name in NAMES:
        frame = pd.DataFrame({"ward": [f"{name}{i // 5}" for i in range(10)]})
        frame["x"], frame["y"] = rng.normal(size=10), rng.normal(size=10)
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
        (tmp_path / f"{name}.toml").write_text(NODE.format(name=name, coordinator=""))
    return tmp_path


def exchange_keys(folder, capsys):
    """What people do before the first letter."""
    lines = []
    for name in NAMES:
        assert main(["key", f"{name}.toml"]) == 0
        section, line = capsys.readouterr().out.splitlines()
        assert section == "[deployment.keys]"
        lines.append(line)
    with (folder / "run.toml").open("a") as file:
        file.write("\n".join(["", section, *lines, ""]))
    assert main(["key", "run.toml"]) == 0
    coordinator = capsys.readouterr().out
    for name in NAMES:
        (folder / f"{name}.toml").write_text(NODE.format(name=name, coordinator=coordinator))


def ask(capfdbinary, name):
    """Write a letter by redirection; return what is on the screen."""
    assert main(["ask", "run.toml"]) == 0
    found = capfdbinary.readouterr()
    with open(name, "wb") as file:
        file.write(found.out)
    return found.err.decode()


def test_a_study(folder, capfdbinary, monkeypatch):
    exchange_keys_in_text(folder, capfdbinary)
    said = ask(capfdbinary, "round-01.ask")
    assert "Letter 1 asks for descriptions of the data; it is for north, south, west." in said
    assert "in all: 1 to begin, 1 for 1 round." in said

    # an institution sees what would leave, and says no, then yes
    monkeypatch.setattr(typer, "confirm", lambda question, err: False)
    assert main(["answer", "round-01.ask", "--node", "north.toml"]) == 1
    said = capfdbinary.readouterr().err.decode()
    assert "north0, north1; 2 in all" in said and "no answer was written" in said
    assert not (folder / "north-round-01.answer").exists()
    what = [
        json.loads(line)["what"] for line in (folder / "north/log.jsonl").read_text().splitlines()
    ]
    assert what == ["declined"]
    monkeypatch.setattr(typer, "confirm", lambda question, err: True)
    assert main(["answer", "round-01.ask", "--node", "north.toml"]) == 0
    for name in NAMES[1:]:
        assert main(["answer", "round-01.ask", "--node", f"{name}.toml", "--yes"]) == 0

    # the coordinator takes what is good, and names what is not
    good = [f"{name}-round-01.answer" for name in NAMES]
    bad = bytearray((folder / good[1]).read_bytes())
    bad[-1] ^= 1
    (folder / "bad.answer").write_bytes(bad)
    capfdbinary.readouterr()
    assert main(["take", good[0], "bad.answer", "north.csv"]) == 1
    said = capfdbinary.readouterr().err.decode()
    assert f"{good[0]}: taken, of institution 'north'" in said
    assert "bad.answer: refused: it is not as institution 'south' has signed it" in said
    assert "north.csv: refused: it is not a letter or an answer" in said
    assert "answers that have not come: south, west" in said
    assert "error: 2 of 3 files were refused" in said
    assert main(["take", *good]) == 0

    said = ask(capfdbinary, "round-02.ask")
    assert "Letter 2 begins the run and asks for round 1; it is for north, south, west." in said
    for name in NAMES:
        assert main(["answer", "round-02.ask", "--node", f"{name}.toml", "--yes"]) == 0
    assert main(["take", *(f"{name}-round-02.answer" for name in NAMES)]) == 0
    assert "the study is done; its last letter: bayesfed ask run.toml" in (
        capfdbinary.readouterr().err.decode()
    )
    said = ask(capfdbinary, "last.ask")
    assert "The study is done: results in runs/run. Letter 3 is the last" in said
    assert {"globals.nc", "summary.csv", "history.csv"} <= {
        p.name for p in folder.glob("runs/run/*")
    }
    assert main(["answer", "last.ask", "--node", "north.toml"]) == 0
    assert "needs no answer" in capfdbinary.readouterr().err.decode()
    assert not (folder / "north-last.answer").exists()
    kinds = {sent.kind for sent in read_log(folder / "north" / "log.jsonl")}
    assert kinds == {"schema", "digest", "reply"}
    assert main(["predict", "north.toml", "north.csv"]) == 0

    # an old letter and an old answer, long after
    assert main(["answer", "round-01.ask", "--node", "north.toml", "--yes"]) == 1
    assert "an old letter, number 1" in capfdbinary.readouterr().err.decode()
    assert main(["take", good[0]]) == 1
    assert "old answer of institution 'north', to letter 1" in capfdbinary.readouterr().err.decode()
    shutil.rmtree(folder / "runs")
    assert main(["take", good[0]]) == 1
    assert "of another study than those whose letters" in capfdbinary.readouterr().err.decode()


def exchange_keys_in_text(folder, capfdbinary):
    class Text:
        """The text of what is printed, whichever fixture captures it."""

        @staticmethod
        def readouterr():
            found = capfdbinary.readouterr()
            return type("Captured", (), {"out": found.out.decode()})

    exchange_keys(folder, Text)


def test_what_is_missing_is_named(folder, capsys):
    assert main(["ask", "run.toml", "--output", "a.ask"]) == 2
    assert "deployment.keys has no key of institution 'north'" in capsys.readouterr().err
    exchange_keys(folder, capsys)
    assert main(["node", "north.toml"]) == 2
    assert "socket is missing" in capsys.readouterr().err
    assert main(["ask", "run.toml", "--output", "a.ask"]) == 0
    assert main(["ask", "run.toml", "--output", "a.ask", "--without", "north"]) == 2
    assert "letter 1 needs the answers of all institutions" in capsys.readouterr().err
    (folder / "north.toml").write_text(NODE.format(name="north", coordinator=""))
    assert main(["answer", "a.ask", "--node", "north.toml"]) == 2
    assert "coordinator is missing" in capsys.readouterr().err
    text = (folder / "run.toml").read_text()
    (folder / "run.toml").write_text(
        text.replace("[deployment]", "[deployment]\nmax_staleness = 2")
    )
    assert main(["ask", "run.toml", "--output", "a.ask"]) == 2
    assert "deployment.max_staleness is for runs over a network" in capsys.readouterr().err
    (folder / "run.toml").write_text(text.replace("[deployment]", "[deployment]\nchains = true"))
    assert main(["ask", "run.toml", "--output", "a.ask"]) == 2
    assert "deployment.chains is for runs over a network" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("corrected = true", "1 to begin, 1 for 1 round, most often 2 to 9 for importance weights"),
        (
            "corrected = false\n[[effects]]\nvariables = { x = 1.0 }",
            "1 to begin, 1 for 1 round, 1 for effects",
        ),
    ],
)
def test_the_number_of_letters_is_said_beforehand(folder, lines, expected):
    text = (folder / "run.toml").read_text().replace("corrected = false", lines)
    (folder / "run.toml").write_text(text)
    assert expected in count_letters(make_plan(read_experiment(folder / "run.toml"), folder))
