"""What a node's own people are told of rows, by its worker or without it; that nobody else can ask."""

import io
import queue
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import bayesfed as bf
from bayesfed.cli.app import main
from bayesfed.cli.choices import load_clients
from bayesfed.cli.deployment import local_posteriors, make_plan
from bayesfed.cli.experiment import read_node_file, read_rows
from bayesfed.cli.local_queries import Answer, Question, ask
from bayesfed.deploy.institutions import Patience
from bayesfed.deploy.messages import Hello, Refusal, pack, unpack
from bayesfed.deploy.node import Node
from bayesfed.deploy.server import run_server
from bayesfed.deploy.sockets import call, serve
from bayesfed.deploy.transport import Carrier

INSTITUTIONS = ("north", "south")
WARDS = """
import torch
import pyro
import pyro.distributions as dist


def normal(federation):
    \"\"\"mu is all but known, so that each ward's a has a posterior in closed form.\"\"\"
    mu = pyro.sample("mu", dist.Normal(0.0, 1e-3))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(mu, 1.0))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(a + obs["x"], 1.0), obs=obs.get("y"))


def binary(federation):
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(mu, 1.0))
        pyro.sample("size", dist.Normal(a, 1.0), obs=federation.of_clients("s"))
        with federation.observations() as obs:
            pyro.sample("y", dist.Bernoulli(logits=a + obs["x"]), obs=obs.get("y"))


def classes(federation):
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(mu, 1.0).expand([3]).to_event(1))
        pyro.sample("size", dist.Normal(a[..., 0], 1.0), obs=federation.of_clients("s"))
        with federation.observations() as obs:
            y = obs.get("y")
            pyro.sample("y", dist.Categorical(logits=a + obs["x"][..., None] * torch.arange(3.0)), obs=y)
"""
ROWS = {"north": {"a": [1.0, 2.0, 0.5], "b": [-1.0]}, "south": {"c": [0.0, 0.0], "d": [3.0]}}


def experiment(folder, model="normal", rounds=15):
    (folder / "wards.py").write_text(WARDS)
    fields = '["x", "y"]' if model == "normal" else '["x", "y", "s"]'
    (folder / "experiment.toml").write_text(
        f'[model]\nname = "wards.py:{model}"\n[data]\nclient = "ward"\nfields = {fields}\n'
        f"[algorithm]\ncorrected = false\n[schedule]\nrounds = {rounds}\n"
        '[deployment]\ninstitutions = ["north", "south"]\n'
    )
    for name in INSTITUTIONS:
        rows = [(w, i, y) for w, values in ROWS[name].items() for i, y in enumerate(values)]
        frame = pd.DataFrame(rows, columns=["ward", "x", "y"])
        frame["y"] = (
            frame["y"] + frame["x"]
            if model == "normal"
            else frame["y"].abs().round().clip(upper={"classes": 2, "binary": 1}[model])
        )
        frame.assign(s=0.5).to_csv(folder / f"{name}.csv", index=False)
        (folder / f"{name}.toml").write_text(
            f'name = "{name}"\nexperiment = "experiment.toml"\nsocket = "./{name}.sock"\n'
            f'own_socket = "./{name}.own.sock"\n[data]\ncsv = "{name}.csv"\n'
        )


def parts(folder, name):
    """A node's worker, and what it keeps."""
    path = folder / f"{name}.toml"
    node, config, base = read_node_file(path)
    rows, plan = read_rows(config.data, folder), make_plan(config, base)
    federation = load_clients(config.data, rows, folder)
    worker = Node(name, federation, plan, folder / name, bf.Execution(compile=False))
    return worker, local_posteriors(node, config, rows, folder, base)


def fitted(folder, between=lambda: None, file="server.safetensors"):
    """The fit over the nodes; ``between`` is called before every message."""
    nodes = {name: parts(folder, name)[0] for name in INSTITUTIONS}

    def exchange(messages, wait):
        between()
        return {at: nodes[at].handle(payload) for at, payload in messages.items()}

    carrier = Carrier(lambda: list(nodes), exchange)
    return run_server(carrier, nodes["north"].plan, Patience(INSTITUTIONS), folder / file)


@pytest.fixture(scope="module")
def folder():
    """Short, as a Unix socket's path has at most 107 bytes; with a fit that has ended."""
    with tempfile.TemporaryDirectory(prefix="bf") as name:
        experiment(Path(name))
        fitted(Path(name))
        yield Path(name)


def table(text):
    return pd.read_csv(io.StringIO(text))


def predicted(folder, capsys, rows, *more):
    (folder / "rows.csv").write_text(rows)
    assert main(["predict", str(folder / "north.toml"), str(folder / "rows.csv"), *more]) == 0
    return table(capsys.readouterr().out)


def law(values):
    """Mean and variance of a ward's a, given its outcomes less x."""
    return sum(values) / (len(values) + 1), 1 / (len(values) + 1)


MIXED = "ward,x,y\nnew,0,2\nb,10,\nnew,1,2\na,10,\nnew,10,\nnobody,0,\n"


def test_it_is_the_posterior_predictive_of_old_and_new_clients(folder, capsys):
    found = predicted(folder, capsys, MIXED)
    assert list(found["row"]) == [1, 2, 3, 4, 5, 6]
    assert list(found["client"]) == ["new", "b", "new", "a", "new", "nobody"]
    assert list(found["new"]) == [True, False, True, False, True, True]
    for row, values, x in (
        (1, [-1.0], 10),
        (3, [1.0, 2.0, 0.5], 10),
        (4, [2.0, 1.0], 10),
        (5, [], 0),
    ):
        mean, variance = law(values)
        sd = (1 + variance) ** 0.5
        assert found["mean"][row] == pytest.approx(mean + x, abs=0.15)
        assert found["sd"][row] == pytest.approx(sd, rel=0.1)
        assert found["50 %"][row] == pytest.approx(mean + x, abs=0.2)
        assert found["97 %"][row] == pytest.approx(mean + x + 1.881 * sd, abs=0.35)
        assert found["3 %"][row] == pytest.approx(mean + x - 1.881 * sd, abs=0.35)


def test_rows_without_the_column_of_the_outcome_are_those_with_an_empty_one(folder, capsys):
    without = predicted(folder, capsys, "ward,x\nb,10\nnobody,0\n")
    pd.testing.assert_frame_equal(
        without, predicted(folder, capsys, "ward,x,y\nb,10,\nnobody,0,\n")
    )


def test_it_is_the_posterior_of_old_and_new_clients(folder, capsys):
    found = predicted(folder, capsys, MIXED, "--variables").set_index("client")
    assert set(found["variable"]) == {"a"} and "row" not in found
    for name, values in {
        "a": [1.0, 2.0, 0.5],
        "b": [-1.0],
        "new": [2.0, 1.0],
        "nobody": [],
    }.items():
        mean, variance = law(values)
        assert found["mean"][name] == pytest.approx(mean, abs=0.12), name
        assert found["sd"][name] == pytest.approx(variance**0.5, rel=0.1), name


def test_classes_have_probabilities_and_clients_outcomes_no_row(tmp_path, capsys):
    experiment(tmp_path, "classes", rounds=2)
    fitted(tmp_path)
    rows = "ward,x,y,s\nb,1,,0.5\na,0,,0.5\nnew,1,2,0.5\n"
    found = predicted(tmp_path, capsys, rows)
    share = found[found["variable"].str.startswith("y = ")]
    assert list(share["row"]) == [1, 1, 1, 2, 2, 2, 3, 3, 3] and share["sd"].isna().all()
    kept = parts(tmp_path, "north")[1]
    frame = table(rows).iloc[[1, 0]]
    known = bf.Federation.from_frame(frame, client="ward", fields=["x", "y", "s"], missing="keep")
    expected = kept.posterior().select(["a", "b"])
    torch.testing.assert_close(
        torch.tensor(share["mean"].to_numpy()[:6].reshape(2, 3)[::-1].copy()).float(),
        by_hand(expected, known),
        atol=0.06,
        rtol=0,
    )
    sizes = found[found["variable"] == "size"]
    assert sizes["row"].isna().all() and set(sizes["client"]) == {"a", "b", "new"}


def test_of_a_binary_outcome_there_is_the_probability_alone(tmp_path, capsys):
    """The standard deviation of 0 and 1 is that of the mean, and their quantiles are 0 and 1."""
    experiment(tmp_path, "binary", rounds=2)
    fitted(tmp_path)
    found = predicted(tmp_path, capsys, "ward,x,y,s\na,-1,,0.5\na,0,,0.5\na,3,,0.5\n")
    rows, size = found[found["variable"] == "y"], found[found["variable"] == "size"]
    assert rows[["sd", "3 %", "50 %", "97 %"]].isna().all(axis=None) and size["sd"].notna().all()
    a = parts(tmp_path, "north")[1].posterior().select(["a"]).sample(4000, seed=1)["a"]
    expected = torch.sigmoid(a + torch.tensor([-1.0, 0.0, 3.0])).mean(0)
    np.testing.assert_allclose(rows["mean"], expected, atol=0.06)


def by_hand(posterior, federation):
    """Softmax of a + x k, averaged over draws."""
    a, x = posterior.sample(4000, seed=1)["a"], federation["x"]
    return (a + x[:, None] * torch.arange(3.0)).softmax(-1).mean(0)


@contextmanager
def running(folder, name="north"):
    """The worker of a node with both its sockets."""
    worker, kept = parts(folder, name)
    ready, stop = queue.Queue(), threading.Event()
    own = str(folder / f"{name}.own.sock")
    thread = threading.Thread(
        target=serve,
        args=(str(folder / f"{name}.sock"), worker.handle),
        kwargs={"local": (own, kept.handle), "ready": ready.put, "stop": stop},
    )
    thread.start()
    try:
        yield ready.get(timeout=10), own
    finally:
        stop.set()
        thread.join(10)


def test_the_worker_says_what_the_command_says_by_itself(folder, capsys, monkeypatch):
    alone = predicted(folder, capsys, MIXED)
    with running(folder) as (_, own):
        monkeypatch.setattr("bayesfed.cli.deployment.local_posteriors", None)  # the worker answers
        pd.testing.assert_frame_equal(predicted(folder, capsys, MIXED), alone)
        with pytest.raises(ValueError, match="no column 'x'"):
            ask(own, Question(rows="ward,y\na,1\n"))
    assert not (folder / "north.own.sock").exists()


def test_no_message_of_a_server_is_a_question(folder):
    """Not at the server's socket, nor at the other, if a node has given that to Flower by mistake."""
    question = Question(rows=MIXED).model_dump_json().encode()
    with running(folder) as (public, own):
        reply, _ = unpack(call(public, question, 10.0))
        assert isinstance(reply, Refusal)
        with pytest.raises(ConnectionError):
            call(public, question, 10.0, local=True)
        for payload in (question, pack(Hello())):
            with pytest.raises(ConnectionError):
                call(
                    own, payload, 10.0
                )  # as Flower's client calls, see tests/deploy/test_flower.py
        told = Answer.model_validate_json(call(own, pack(Hello()), 10.0, local=True))
        assert told.error.startswith("not a question") and not told.table
        assert ask(own, Question(rows=MIXED)).startswith("row,client,variable")


def test_people_ask_at_a_socket_of_their_own_user():
    with pytest.raises(ValueError, match="open to every user of the machine"):
        serve("127.0.0.1:0", bytes, local=("127.0.0.1:0", bytes))


def test_questions_change_no_fit(folder, tmp_path):
    experiment(tmp_path, rounds=2)
    alone = fitted(tmp_path, file="alone.safetensors")
    kept, said = parts(tmp_path, "north")[1], []

    def question():
        if len(said) < 4:
            asked_now = Question(rows=MIXED, variables=len(said) % 2 == 1)
            said.append(kept.handle(asked_now.model_dump_json().encode()))

    among = fitted(tmp_path, question, "among.safetensors")
    assert [bool(Answer.model_validate_json(answer).table) for answer in said] == 4 * [True]
    for name, value in alone.params.items():
        assert torch.equal(among.params[name], value)
    one, other = (
        bf.Posterior.load(path, kept.plan.model, kept.federation)
        for path in sorted((tmp_path / "north" / "runs").glob("*/posterior.safetensors"))
    )
    for name, value in one.local_params.items():
        assert torch.equal(other.local_params[name], value)


@pytest.mark.parametrize(
    ("rows", "more", "said"),
    [
        ("ward,y\na,1\n", (), "no column 'x'"),
        ("ward,x,y\na,,1\n", (), "there is no prediction of y for client 'a'"),
        ("ward,x,y\na,one,1\n", (), "field 'x' is categorical or text"),
        ("ward,x,y\n,1,1\n", (), "has no client"),
        ("", (), "No columns to parse from file"),
        ("ward,x,y\n", (), "there are no rows to predict"),
        (MIXED, ("--run", "other"), "no fit 'other' has ended here; those that have: "),
    ],
)
def test_a_mistake_in_the_rows_is_one_line(rows, more, said, folder, capsys):
    (folder / "bad.csv").write_text(rows)
    assert main(["predict", str(folder / "north.toml"), str(folder / "bad.csv"), *more]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_before_a_fit_has_ended_there_is_nothing_to_say(tmp_path, capsys):
    experiment(tmp_path)
    (tmp_path / "rows.csv").write_text(MIXED)
    assert main(["predict", str(tmp_path / "north.toml"), str(tmp_path / "rows.csv")]) == 2
    assert "no fit has ended here; those that have: none" in capsys.readouterr().err
    (tmp_path / "rows.csv").write_bytes(b"\xff\xfe")
    assert main(["predict", str(tmp_path / "north.toml"), str(tmp_path / "rows.csv")]) == 2
    assert "is not UTF-8 text" in capsys.readouterr().err


def test_the_table_goes_to_a_file(folder, capsys):
    whole = predicted(folder, capsys, MIXED)
    path = str(folder / "found.csv")
    (folder / "rows.csv").write_text(MIXED)
    command = ["predict", str(folder / "north.toml"), str(folder / "rows.csv"), "--output", path]
    assert main(command) == 0 and capsys.readouterr().out == ""
    pd.testing.assert_frame_equal(pd.read_csv(path), whole)


def test_who_asks_a_worker_waits_for_no_torch(folder):
    (folder / "rows.csv").write_text(MIXED)
    program = (
        "import sys\nfrom bayesfed.cli.app import main\n"
        "assert main(['predict', 'north.toml', 'rows.csv', '--output', 'x.csv']) == 0\n"
        "print([name for name in ('torch', 'pyro', 'pandas') if name in sys.modules])"
    )
    with running(folder):
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True
        )
    assert done.stdout == "[]\n", done.stderr
