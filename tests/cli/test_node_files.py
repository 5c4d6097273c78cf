"""Node files, and what a node's rows may stand in."""

import io
import signal
import subprocess
import sys

import arviz as az
import numpy as np
import pandas as pd
import pytest

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.cli.app import main
from bayesfed.cli.choices import load_clients
from bayesfed.cli.deployment import (
    draws_dataset,
    local_posteriors,
    make_plan,
    prior_dataset,
    run_on,
)
from bayesfed.cli.experiment import read_experiment, read_node_file, read_rows
from bayesfed.deploy.global_posterior import GlobalPosterior
from bayesfed.deploy.node import Node
from bayesfed.engine.files import lock
from bayesfed.settings import SettingsError
from tests.deploy.in_process import wire

EXPERIMENT = """
[model]
name = "varying_intercept"

[data]
client = "ward"
fields = ["x", "y"]

[schedule]
rounds = 4

[deployment]
institutions = ["north", "south", "west"]

[deployment.sockets]
north = "./north.sock"
south = "./south.sock"
west = "./west.sock"
"""
NODE_FILE = """
name = "{name}"
experiment = "experiment.toml"
socket = "./{name}.sock"

[data]
{data}
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "experiment.toml").write_text(EXPERIMENT)
    rng = np.random.default_rng(0)
    for name in ("north", "south", "west"):
        frame = pd.DataFrame({"ward": [f"{name}{i // 5}" for i in range(10)]})
        frame["x"], frame["y"] = rng.normal(size=10), rng.normal(size=10)
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
        (tmp_path / f"{name}.toml").write_text(
            NODE_FILE.format(name=name, data=f'csv = "{name}.csv"')
        )
    return tmp_path


def federation_of(path):
    node, experiment, _ = read_node_file(path)
    rows = read_rows(experiment.data, path.parent)
    return load_clients(experiment.data, rows, path.parent, node.name if node.one_client else None)


def test_a_node_reads_its_rows_as_the_experiment_says(folder):
    found = federation_of(folder / "north.toml")
    assert found.names == ("north0", "north1") and set(found.fields) == {"x", "y"}


@pytest.mark.parametrize("kind", ["csv", "parquet", "npz", "arrow"])
def test_the_same_rows_in_any_file(kind, folder):
    frame = pd.read_csv(folder / "north.csv")
    if kind == "parquet":
        frame.to_parquet(folder / "north.parquet")
    elif kind == "npz":
        arrays = {name: frame[name].to_numpy() for name in ("x", "y")}
        np.savez(folder / "north.npz", ward=frame["ward"].to_numpy().astype("U"), **arrays)
    elif kind == "arrow":
        import pyarrow as pa

        table = pa.Table.from_pandas(frame, preserve_index=False)
        with pa.ipc.new_file(str(folder / "north.arrow"), table.schema) as writer:
            writer.write_table(table)
    data = f'{kind} = "north.{kind}"'
    (folder / "other.toml").write_text(NODE_FILE.format(name="north", data=data))
    expected, found = federation_of(folder / "north.toml"), federation_of(folder / "other.toml")
    assert found.names == expected.names
    for name in expected.fields:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-6)


def test_a_file_of_pickles_is_not_opened(folder):
    np.savez(
        folder / "north.npz", ward=np.array(["a", {}], dtype=object), x=[1.0, 2.0], y=[1.0, 2.0]
    )
    (folder / "other.toml").write_text(NODE_FILE.format(name="north", data='npz = "north.npz"'))
    with pytest.raises(SettingsError, match="allow_pickle=False"):
        federation_of(folder / "other.toml")


def test_a_node_may_be_one_client(folder):
    frame = pd.read_csv(folder / "north.csv").drop(columns="ward")
    frame.to_csv(folder / "alone.csv", index=False)
    text = NODE_FILE.format(name="north", data='csv = "alone.csv"')
    (folder / "alone.toml").write_text(f"one_client = true\n{text}")
    node, experiment, _ = read_node_file(folder / "alone.toml")
    assert node.one_client
    rows = read_rows(experiment.data, folder, alone=True)
    found = load_clients(experiment.data, rows, folder, "north")
    assert found.names == ("north",) and found.rows == 10
    with pytest.raises(SettingsError, match="no column 'ward'"):
        read_rows(experiment.data, folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("socket = 3", "socket is 3"),
        ('dataset = "grunfeld"', "a dataset has its clients"),
        ("", "a node's is one of csv"),
        ('csv = "nowhere.csv"', "there is no file"),
        ('csv = "north.csv"\nfields = ["x", "z"]', "'z'"),
    ],
)
def test_a_mistake_in_a_node_file_is_one_line(change, said, folder, capsys):
    text = NODE_FILE.format(
        name="north", data=change if "socket" not in change else 'csv = "north.csv"'
    )
    if "socket" in change:
        text = text.replace('socket = "./north.sock"', change)
    (folder / "bad.toml").write_text(text)
    assert main(["node", str(folder / "bad.toml")]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_a_second_worker_of_a_node_is_refused(folder, capsys):
    vectors = EXPERIMENT.replace('["x", "y"]', '{ x = ["x"], y = "y" }')
    (folder / "experiment.toml").write_text(vectors)
    (folder / "north").mkdir()
    with lock(folder / "north" / ".node.lock", "it"):
        assert main(["node", str(folder / "north.toml")]) == 2
    assert "another process has the folder of institution 'north'" in capsys.readouterr().err


def test_what_a_run_between_machines_cannot_have_is_said(folder):
    path = folder / "experiment.toml"
    for change, said in (
        (["schedule.held_out=0.1"], "schedule.held_out"),
        (["privacy.noise=1.0", "deployment.secure=true"], "honest is the number of institutions"),
        (["effects=[{variables = {x = 1}, level = 'new'}]"], 'level is "clients" or "average"'),
    ):
        with pytest.raises((SettingsError, ValueError), match=said):
            make_plan(read_experiment(path, change), folder)


def test_on_needs_the_nodes(tmp_path, capsys):
    file = tmp_path / "e.toml"
    file.write_text('[model]\nname = "eight_schools"\n[data]\ndataset = "eight_schools"\n')
    assert main(["run", str(file), "--on", "sockets"]) == 2
    assert "deployment is missing" in capsys.readouterr().err


FORMULA = """
[model]
formula = "y ~ x + kind + (1 | ward)"

[data]
client = "ward"
"""


@pytest.fixture
def formula(folder):
    """The same folder with a formula, and rows with a column of text whose levels differ."""
    text = (
        FORMULA + "[algorithm]\ncorrected = false\n" + EXPERIMENT[EXPERIMENT.index("[schedule]") :]
    )
    (folder / "experiment.toml").write_text(text)
    for name, kinds in (("north", "ab"), ("south", "bc"), ("west", "ac")):
        frame = pd.read_csv(folder / f"{name}.csv")
        frame.assign(kind=list(5 * kinds)).to_csv(folder / f"{name}.csv", index=False)
    return folder


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda f: f.drop(columns="kind"), "north.csv): the frame has no column 'kind'; it has"),
        (lambda f: f.assign(x=None), "north.csv): client 'north0', row 0: 'x' is missing"),
        (lambda f: f.drop(columns="ward"), "north.csv): the file has no column 'ward'"),
    ],
)
def test_a_formula_says_what_the_rows_lack(change, said, formula, capsys):
    change(pd.read_csv(formula / "north.csv")).to_csv(formula / "north.csv", index=False)
    assert main(["node", str(formula / "north.toml")]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ('client = "ward"\nfields = ["x"]', "a formula names its columns"),
        ("", "data.client is missing: for a formula over nodes"),
        ('client = "ward"\nhold_out = ["north0"]', "each institution names its own clients"),
    ],
)
def test_a_mistake_in_the_experiment_of_a_formula(change, said, formula, capsys):
    path = formula / "experiment.toml"
    path.write_text(path.read_text().replace('client = "ward"', change))
    (formula / "north.toml").write_text(
        NODE_FILE.format(name="north", data='csv = "north.csv"\nclient = "ward"')
        if not change
        else (formula / "north.toml").read_text()
    )
    with pytest.raises(SettingsError, match=said):
        make_plan(read_experiment(path), formula)
        local_of(formula / "north.toml")


def local_of(path):
    node, experiment, base = read_node_file(path)
    alone = node.one_client
    return local_posteriors(
        node, experiment, read_rows(experiment.data, path.parent, alone=alone), path.parent, base
    )


def test_a_formula_over_nodes_gives_the_table_of_one_process(formula, monkeypatch, capsys):
    """The server's table is in the data's units; a node predicts, also of a client that took no part."""
    with (formula / "south.toml").open("a") as file:
        file.write('hold_out = ["south1"]\n')
    nodes = []
    for name in ("north", "south", "west"):
        local = local_of(formula / f"{name}.toml")
        nodes.append(Node(name, local.federation, local.plan, local.folder, held=local.held))
    experiment = formula / "experiment.toml"
    config = read_experiment(experiment)
    run_on(wire(nodes), config, experiment, formula / "result")
    table = pd.read_csv(formula / "result" / "summary.csv", index_col="variable")
    names = {"Intercept", "x", "kind[b]", "kind[c]", "sigma", "1|ward_sigma"}
    assert set(table.index) == names
    frame = pd.concat([pd.read_csv(formula / f"{name}.csv") for name in ("north", "south", "west")])
    model = bf.formula(config.model.formula, frame, client="ward")
    others, _ = model.federation.hold_out(["south1"])
    expected = bf.fit(model, others, bf.SFVI(corrected=False), rounds=4).derived(num_samples=1000)
    for name, row in table.iterrows():
        assert abs(row["mean"] - float(expected[name].mean())) < 1e-3 * row["sd"] + 1e-6
    program = (formula / "result" / "program.py").read_text()
    assert program == str(model)
    rows = pd.read_csv(formula / "south.csv").assign(y=np.nan)
    rows.loc[5:7, "y"] = 1.0
    rows.to_csv(formula / "rows.csv", index=False)
    assert main(["predict", str(formula / "south.toml"), str(formula / "rows.csv")]) == 0
    found = pd.read_csv(io.StringIO(capsys.readouterr().out.rpartition("institutions.\n")[2]))
    assert found.groupby("client")["new"].first().to_dict() == {"south0": False, "south1": True}
    assert np.isfinite(found["mean"]).all()
    main(["predict", str(formula / "south.toml"), str(formula / "rows.csv"), "--variables"])
    assert "1|ward" in capsys.readouterr().out


def test_a_failed_run_leaves_no_folder(folder, monkeypatch, capsys):
    def no_answer(*args, **kwargs):
        raise TimeoutError("no institution has answered")

    monkeypatch.chdir(folder)
    monkeypatch.setattr("bayesfed.cli.deployment.run_server", no_answer)
    assert main(["run", "experiment.toml", "--on", "sockets"]) != 0
    assert "no institution has answered" in capsys.readouterr().err
    assert not list((folder / "runs").iterdir())


def test_draws_of_the_globals_say_how_good_they_are():
    posterior = bf.fit(models.eight_schools, datasets.eight_schools())
    attrs = draws_dataset(GlobalPosterior(posterior, {}, {}), 10).attrs
    assert attrs["converged"] == 1 and attrs["rounds"] == len(posterior.history["elbo"])
    assert attrs["khat"] == posterior.correction.khat


def test_draws_from_the_prior_are_of_the_globals():
    """μ ~ Normal(0, 5) has the quartiles ±3.37."""
    posterior = bf.fit(models.eight_schools, datasets.eight_schools(), rounds=2)
    prior = prior_dataset(GlobalPosterior(posterior, {}, {}), 4000)
    assert set(prior) == {"mu", "tau"} and prior["mu"].dims == ("chain", "draw")
    assert np.allclose(np.quantile(prior["mu"], [0.25, 0.75]), [-3.37, 3.37], atol=0.4)


def test_cryptography_is_for_secure_sums_only(folder):
    """Without it a node starts, and says what a secure sum lacks."""
    program = (
        "import sys; sys.modules['cryptography'] = None\n"
        "from bayesfed.deploy import node, secure\n"
        "secure.new_key()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True
    )
    assert "cryptography is not installed: pip install 'bayesfed[deploy]'" in done.stderr


@pytest.mark.slow
def test_workers_and_a_server_as_processes(folder):
    """Three nodes and a run, as they are started at a shell."""
    vectors = EXPERIMENT.replace('["x", "y"]', '{ x = ["x"], y = "y" }')
    (folder / "experiment.toml").write_text(vectors)
    command = [sys.executable, "-m", "bayesfed.cli.app"]
    nodes = [
        subprocess.Popen([*command, "node", f"{name}.toml"], cwd=folder)
        for name in ("north", "south", "west")
    ]
    try:
        run = [*command, "run", "experiment.toml", "--on", "sockets", "--output", "result"]
        done = subprocess.run(run, cwd=folder, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert len(list(folder.glob("*.sock"))) == 3
        for node in nodes:
            node.terminate()
            assert node.wait(30) == 128 + signal.SIGTERM
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    assert not list(folder.glob("*.sock"))
    assert "The clients' posteriors are at their institutions." in done.stdout
    table = pd.read_csv(folder / "result" / "summary.csv")
    assert not table["variable"].str.contains("north").any()
    attrs = az.from_netcdf(folder / "result" / "globals.nc")["posterior"].attrs
    assert attrs["algorithm"] == "SFVI" and attrs["rounds"] == 4 and "too few" in attrs["caveat"]
    assert len(list(folder.glob("*/runs/*/posterior.safetensors"))) == 3
    stored = folder / "result" / "posterior.safetensors"
    again = bf.Posterior.load(stored, models.varying_intercept)
    drawn = az.from_netcdf(folder / "result" / "globals.nc")["posterior"]["mu"].values[0]
    np.testing.assert_allclose(again.sample(1000)["mu"], drawn, rtol=1e-5)
    logs = [f"--log={folder / name}" for name in ("north", "south")]
    assert main(["report", str(folder / "result"), *logs]) == 0
    report = (folder / "result" / "report.html").read_text(encoding="utf-8")
    assert "<h3>north</h3>" in report and "<h3>south</h3>" in report and "reply" in report
    assert "north0" not in report  # no client is named


@pytest.mark.slow
def test_a_formula_over_sockets(formula):
    """The same table as without a wire."""
    command = [sys.executable, "-m", "bayesfed.cli.app"]
    names = ("north", "south", "west")
    nodes = [subprocess.Popen([*command, "node", f"{name}.toml"], cwd=formula) for name in names]
    try:
        run = [*command, "run", "experiment.toml", "--on", "sockets", "--output", "result"]
        done = subprocess.run(run, cwd=formula, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    found = pd.read_csv(formula / "result" / "summary.csv", index_col="variable")
    path = formula / "experiment.toml"
    local = [local_of(formula / f"{name}.toml") for name in names]
    again = [
        Node(name, own.federation, own.plan, formula / "again" / name)
        for name, own in zip(names, local, strict=True)
    ]
    run_on(wire(again), read_experiment(path), path, formula / "expected")
    expected = pd.read_csv(formula / "expected" / "summary.csv", index_col="variable")
    pd.testing.assert_frame_equal(found, expected, rtol=1e-3, atol=1e-4)
