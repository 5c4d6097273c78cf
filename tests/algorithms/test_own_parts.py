"""A user's own rule, steps and compositions, of a module outside the package: runs, files, and what is refused."""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import bayesfed as bf
from bayesfed.algorithms.registry import algorithm_of, settings_of
from bayesfed.engine import run_file
from bayesfed.rules import Mean
from bayesfed.settings import SettingsError
from docs import own_parts

SCHOOLS = bf.datasets.eight_schools()
MODEL = bf.models.eight_schools
OWN = {
    "rule with a state": own_parts.adam,
    "steps with a state": bf.FedAvg().replace(steps=own_parts.LastingMomentum()),
    "composition": own_parts.with_momentum(),
}
EAGER = bf.Execution(compile=False)


@dataclass(frozen=True)
class Half(Mean):
    """Half of the mean move."""

    def encode(self, job, work):
        upload, memory = super().encode(job, work)
        return upload | {"theta": {n: v / 2 for n, v in upload["theta"].items()}}, memory


def same(one, other):
    for part in ("params", "local_params"):
        for name, value in getattr(other, part).items():
            assert torch.equal(getattr(one, part)[name], value), name


@pytest.mark.parametrize("name", OWN)
def test_a_run_goes_on_to_the_same_numbers(name, tmp_path, monkeypatch):
    monkeypatch.setattr(run_file, "_SHARE", float("inf"))
    path = tmp_path / "run.safetensors"

    def keep(done):
        shutil.copy(path, tmp_path / f"{done.number}.safetensors")

    def fit(path, **options):
        return bf.fit(MODEL, SCHOOLS, OWN[name], rounds=3, resume=path, execution=EAGER, **options)

    whole = fit(path, callbacks=[keep])
    for number in (1, 2, 3):
        same(fit(tmp_path / f"{number}.safetensors"), whole)


@pytest.mark.parametrize("name", OWN)
def test_steps_by_hand_are_the_fit_and_states_change(name):
    run = bf.start(MODEL, SCHOOLS, OWN[name], rounds=2, execution=EAGER)
    assert bf.step(run).number == 1 and bf.step(run).number == 2
    if name != "steps with a state":
        state = (
            run.server["step"]["step"]
            if "step" in run.server
            else run.server["threshold"]["mu.loc"]
        )
        assert float(state) not in (0.0, 0.1)
    if name != "rule with a state":
        assert all((v != 0).any() for v in run.clients.tensors["velocity"].values())
    same(bf.finish(run), bf.fit(MODEL, SCHOOLS, OWN[name], rounds=2, execution=EAGER))


@pytest.mark.parametrize("name", OWN)
def test_a_posterior_comes_back_with_its_own_parts(name, tmp_path):
    fitted = bf.fit(MODEL, SCHOOLS, OWN[name], rounds=2)
    fitted.save(tmp_path / "p.safetensors")
    found = bf.Posterior.load(tmp_path / "p.safetensors", MODEL, SCHOOLS)
    assert found.algorithm == OWN[name] and str(found.algorithm) == str(OWN[name])
    same(found, fitted)
    assert (
        found.personalize(SCHOOLS.select(["A"])).local_params.keys() == fitted.local_params.keys()
    )


@pytest.mark.parametrize("name", OWN)
def test_settings_are_plain_data_with_the_module_of_the_part(name):
    data = json.loads(json.dumps(settings_of(OWN[name])))
    assert any("docs.own_parts:" in str(value) for value in data.values())
    assert algorithm_of(data) == OWN[name]


def test_opening_a_file_imports_nothing(tmp_path, monkeypatch):
    """Neither the module of the part nor any other is imported; the error says which to import."""
    (tmp_path / "elsewhere.py").write_text(Path(own_parts.__file__).read_text())
    monkeypatch.syspath_prepend(tmp_path)
    code = (
        "import bayesfed as bf, elsewhere\n"
        "bf.fit(bf.models.eight_schools, bf.datasets.eight_schools(), elsewhere.adam, rounds=1).save('p.safetensors')"
    )
    env = {"PYTHONPATH": ":".join([str(tmp_path), *sys.path]), "PYTHONWARNINGS": "ignore"}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, env=env)
    with pytest.raises(ValueError, match=r"import the module 'elsewhere' first") as error:
        bf.Posterior.load(tmp_path / "p.safetensors", MODEL, SCHOOLS)
    assert "\n" not in str(error.value) and "elsewhere" not in sys.modules
    import elsewhere  # as the error says

    try:
        found = bf.Posterior.load(tmp_path / "p.safetensors", MODEL, SCHOOLS)
        assert found.algorithm == elsewhere.adam
        del elsewhere.FedAdam
        with pytest.raises(ValueError, match="has no 'FedAdam'"):
            bf.Posterior.load(tmp_path / "p.safetensors", MODEL, SCHOOLS)
    finally:
        del sys.modules["elsewhere"]


def test_a_part_in_a_method_of_the_table():
    algorithm = algorithm_of({"name": "FedAvg", "lr": 0.05, "rule": f"{__name__}:Half"})
    assert algorithm == bf.FedAvg(lr=0.05).replace(rule=Half())
    table = {"name": f"{__name__}:Half", "by": "clients"}
    assert algorithm_of({"name": "FedAvg", "rule": table}).rule == Half(by="clients")
    moved = bf.fit(MODEL, SCHOOLS, algorithm, rounds=1).params["mu.loc"]
    whole = bf.fit(MODEL, SCHOOLS, bf.FedAvg(lr=0.05), rounds=1).params["mu.loc"]
    torch.testing.assert_close(2 * moved, whole)


def test_a_composition_by_name_with_other_parts_and_settings():
    own = {"name": "docs.own_parts:with_momentum"}
    assert algorithm_of(own) == own_parts.with_momentum()
    assert algorithm_of(own | {"lr": 0.5}) == own_parts.with_momentum(lr=0.5)
    assert algorithm_of({"name": "docs.own_parts:adam", "rule": "Mean"}).rule == Mean()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"name": "docs.own_parts:with_momentum", "ls": 1},
            "algorithm: .*unexpected keyword argument 'ls'",
        ),
        (
            {"name": "docs.own_parts:adam", "lr": 0.1},
            "algorithm.lr is unknown: docs.own_parts:adam is an algorithm",
        ),
        ({"name": "docs.own_parts:Rate"}, "algorithm"),
        ({"name": "docs.own_parts:nowhere"}, "has no 'nowhere'"),
        (
            {"name": "FedAvg", "rule": "docs.own_parts:with_momentum"},
            r"a part is a class with @dataclass\(frozen=True\)",
        ),
        (
            {"name": "FedAvg", "rule": {"name": "docs.own_parts:FedAdam", "rate": 1.0}},
            "algorithm.rule.rate is unknown",
        ),
        (
            {"name": "FedAvg", "rule": {"name": "docs.own_parts:FedAdam", "lr": -1.0}},
            "algorithm.rule.lr is -1.0",
        ),
    ],
)
def test_mistakes_name_the_key(data, message):
    with pytest.raises(SettingsError, match=message):
        algorithm_of(data)


def test_a_class_in_a_function_cannot_be_stored():
    @dataclass(frozen=True)
    class Inner(Mean):
        """Is nowhere to be found again."""

    with pytest.raises(TypeError, match="define it at the top of a module"):
        settings_of(bf.FedAvg().replace(rule=Inner()))
