import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

import bayesfed as bf
from bayesfed.algorithms import METHODS
from bayesfed.algorithms.registry import GUIDES, algorithm_of, settings_of
from bayesfed.cli.choices import choices
from bayesfed.cli.experiment import read_experiment
from bayesfed.cli.report import to_toml
from bayesfed.rules import Mean
from bayesfed.settings import (
    Count,
    Rate,
    SettingsError,
    Times,
    check,
    made,
)

MINIMAL = """
[model]
name = "eight_schools"
[data]
dataset = "eight_schools"
[schedule]
rounds = 3
"""


def my_guide(federation):
    raise NotImplementedError


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_algorithm_goes_to_json_and_back(name):
    algorithm = METHODS[name]()
    data = json.loads(json.dumps(settings_of(algorithm)))
    assert data["name"] == METHODS[name].name
    assert set(data) == {"name", *METHODS[name].settings}
    assert algorithm_of(data) == algorithm
    assert algorithm_of(name) == algorithm


@pytest.mark.parametrize(
    "algorithm",
    [
        bf.SFVI(global_guide=bf.Flow(bins=16, init_scale=0.1), conditioned=False, local_steps=3),
        bf.SFVI(global_guide=bf.FullRank(), lr=1),
        bf.SFVIAvg(global_guide=bf.MeanField(init_scale=1.0), draws=1),
        bf.PVI(damping=0.5, step=0.1),
    ],
)
def test_settings_come_back(algorithm):
    assert algorithm_of(json.loads(json.dumps(settings_of(algorithm)))) == algorithm


def test_a_family_may_be_a_name_or_a_table():
    assert algorithm_of({"name": "SFVI", "global_guide": "Flow"}).globals == bf.Flow()
    table = {"name": "Flow", "bins": 16}
    assert algorithm_of({"name": "SFVI", "global_guide": table}).globals == bf.Flow(bins=16)
    assert set(GUIDES) == {"MeanField", "FullRank", "Flow"}


def test_numpy_numbers_are_plain_data():
    assert settings_of(bf.SFVI(lr=np.float32(0.5), local_steps=np.int64(2)))["lr"] == 0.5


def test_a_guide_of_ones_own_is_marked_and_must_be_passed_again():
    data = settings_of(bf.SFVI(guide=my_guide))
    assert data["guide"] == "custom"
    with pytest.raises(
        SettingsError, match=r"^algorithm\.guide is 'custom'.*pass it again as guide=$"
    ):
        algorithm_of(data)
    assert algorithm_of(data, guide=my_guide) == bf.SFVI(guide=my_guide)
    with pytest.raises(SettingsError, match="a guide was given"):
        algorithm_of({"name": "SFVI"}, guide=my_guide)


@dataclasses.dataclass(frozen=True)
class Odd(Mean):
    """A rule with a field that JSON does not have."""

    odd: object = None


def test_what_is_not_plain_data_is_refused():
    algorithm = bf.FedAvg().replace(rule=Odd(odd={1}))
    with pytest.raises(TypeError, match="settings of an algorithm cannot be stored: odd is a set"):
        settings_of(algorithm)
    with pytest.raises(TypeError, match="the settings of object cannot be stored"):
        settings_of(object())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"name": "SFVI", "local_step": 5},
            "algorithm.local_step is unknown; did you mean 'local_steps'? allowed here: global_g",
        ),
        ({"name": "SFVI", "local_steps": "5"}, '.local_steps is "5"; it must be a whole number'),
        ({"name": "SFVI", "local_steps": 2.5}, ".local_steps is 2.5; it must be a whole number"),
        ({"name": "SFVI", "local_steps": True}, ".local_steps is true; it must be a whole number"),
        ({"name": "SFVI", "local_steps": 0}, "algorithm.local_steps is 0; it must be at least 1"),
        ({"name": "SFVI", "lr": -1.0}, "algorithm.lr is -1.0; it must be at least 0"),
        ({"name": "SFVI", "lr": float("nan")}, "algorithm.lr is NaN; it must be a finite number"),
        ({"name": "SFVI", "lr": [0.1]}, "algorithm.lr is [0.1]; it must be a number"),
        (
            {"name": "SFVI", "conditioned": 1},
            ".conditioned is 1; it must be true or false",
        ),
        (
            {"name": "sfvi"},
            "algorithm.name is \"sfvi\"; did you mean 'SFVI'? choose one of FedAvg, FedProx, FedNova",
        ),
        ({"lr": 0.1}, "algorithm.name is missing; choose one of FedAvg"),
        (3, "algorithm is 3; it must be a name or a table with a name, one of FedAvg"),
        (
            {"name": "SFVI", "global_guide": {"name": "Flow", "bin": 16}},
            "algorithm.global_guide.bin is unknown; did you mean 'bins'? allowed here: init_sc",
        ),
        (
            {"name": "SFVI", "global_guide": {"name": "Flow", "bins": "many"}},
            'algorithm.global_guide.bins is "many"; it must be a whole number',
        ),
        (
            {"name": "SFVIAvg", "global_guide": "Flow"},
            'algorithm.global_guide.name is "Flow"; choose one of MeanField, FullRank',
        ),
        ({"name": "SFVI", "global_guide": 3}, "algorithm.global_guide is 3; it must be a name or"),
        ({"name": "SFVI", "guide": 3}, "algorithm.guide is 3; it must be a Pyro guide"),
        ({"name": "PVI", "draws": 7}, "algorithm: draws is 7"),
        ({"name": "FOLA", "damping": 1.5}, "algorithm.damping is 1.5; it must be at most 1"),
    ],
)
def test_a_mistake_in_an_algorithm_is_one_line_with_its_key(data, message):
    with pytest.raises(SettingsError) as caught:
        algorithm_of(data)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_method_is_made_by_its_name():
    for name, method in METHODS.items():
        assert algorithm_of(name) == method()
    name = "FedProx"
    assert algorithm_of({"name": name, "personal_steps": 3}) == METHODS[name](personal_steps=3)
    with pytest.raises(SettingsError, match="personal_step is unknown; did you mean"):
        algorithm_of({"name": name, "personal_step": 3})
    with pytest.raises(SettingsError, match=rf"did you mean '{name}'\?"):
        algorithm_of(name + "x")


# -- one rule, in the annotations -----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Small:
    steps: Count | None = 1


@dataclasses.dataclass(frozen=True)
class Everything:
    """One of each kind; plain ``int`` and ``float`` have the rule that fits most."""

    steps: int = 1
    some: int | None = None
    rest: Times = 0
    weight: float = 0.0
    rate: Rate = 0.1
    flag: bool = False
    rule: str = "sgd"
    small: Small | None = None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"steps": 0}, "steps is 0; it must be at least 1"),
        ({"steps": 2.0}, "steps is 2.0; it must be a whole number"),
        ({"steps": True}, "steps is true; it must be a whole number"),
        ({"some": 0}, "some is 0; it must be at least 1"),
        ({"rest": -1}, "rest is -1; it must be at least 0"),
        ({"weight": -0.1}, "weight is -0.1; it must be at least 0"),
        ({"weight": float("inf")}, "weight is Infinity; it must be a finite number"),
        ({"weight": "1"}, 'weight is "1"; it must be a number'),
        ({"rate": 0.0}, "rate is 0.0; it must be more than 0"),
        ({"rate": float("nan")}, "rate is NaN; it must be a finite number"),
        ({"flag": 1}, "flag is 1; it must be true or false"),
        ({"rule": 1}, "rule is 1; it must be text"),
        ({"small": Small(0)}, "small.steps is 0; it must be at least 1"),
    ],
)
def test_the_same_rule_in_python_and_in_files(data, message):
    with pytest.raises(SettingsError) as caught:
        check(Everything(**data))
    assert str(caught.value) == message
    if "small" not in data:
        with pytest.raises(SettingsError) as caught:
            made(Everything, data, "here")
        assert str(caught.value) == f"here.{message}"


def test_what_may_be_may_be():
    odd = Everything(np.int64(3), 4, 0, 0.0, 1, True, "adam", Small(None))
    check(odd)
    check(Everything(weight=np.float32(0.5)))
    check(object())  # no dataclass, so no settings
    assert made(Everything, {"rest": 0, "rate": 2}, "x") == Everything(rest=0, rate=2.0)


def test_an_algorithm_is_checked_before_it_runs():
    data = bf.datasets.eight_schools()
    with pytest.raises(SettingsError, match=r"^local_steps is 0; it must be at least 1$"):
        bf.start(bf.models.eight_schools, data, bf.SFVI(local_steps=0), rounds=1)
    guide = bf.Flow(bins=0)
    with pytest.raises(SettingsError, match=r"^global_guide.bins is 0; it must be at least 1$"):
        bf.start(bf.models.eight_schools, data, bf.SFVI(global_guide=guide), rounds=1)


def experiment(tmp_path: Path, text: str = MINIMAL, *overrides: str):
    path = tmp_path / "x.toml"
    path.write_text(text)
    return read_experiment(path, overrides)


def test_defaults_of_an_experiment(tmp_path):
    read = experiment(tmp_path)
    assert read.algorithm == {"name": "SFVI"}
    assert read.schedule.clients_per_round == 1.0
    assert read.output.num_samples == 1000


def test_a_cohort_keeps_its_type(tmp_path):
    one = experiment(tmp_path, MINIMAL, "schedule.clients_per_round=1").schedule.clients_per_round
    everyone = experiment(tmp_path, MINIMAL, "schedule.clients_per_round=1.0")
    assert isinstance(one, int)
    assert isinstance(everyone.schedule.clients_per_round, float)


def test_overrides_are_toml_or_else_text(tmp_path):
    read = experiment(
        tmp_path,
        MINIMAL + '[algorithm]\nname = "SFVI"\nglobal_guide = "Flow"\n',
        "schedule.rounds=10",
        "execution.device=cpu",
        "execution.chunk_size=3",
        "privacy.clip=1.0",
        'data.hold_out=["A", "B"]',
        "algorithm.global_guide.bins=16",
        "output.folder=a=b",
    )
    assert read.schedule.rounds == 10
    chosen = choices(read, None, tmp_path)
    assert chosen.execution == bf.Execution(device="cpu", chunk_size=3)
    assert chosen.privacy == bf.Privacy(clip=1.0)
    assert read.data.hold_out == ["A", "B"]
    assert algorithm_of(read.algorithm).globals == bf.Flow(bins=16)
    assert read.output.folder == "a=b"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("schedule.rounds", "--set schedule.rounds: write it as --set section.key=value"),
        ("=3", "--set =3: write it as --set section.key=value"),
        ("schedule.rounds.x=3", "schedule.rounds is 3, not a table"),
        (
            "schedule.round=3",
            "schedule.round is unknown; did you mean 'rounds'? allowed here: rou",
        ),
        (
            "shedule.rounds=3",
            "shedule is unknown; did you mean 'schedule'? allowed here: model",
        ),
        ("schedule.rounds=ten", 'schedule.rounds is "ten"; it must be a whole number'),
        ("schedule.rounds=0", "schedule.rounds is 0; it must be at least 1"),
        (
            "schedule.clients_per_round=all",
            'clients_per_round is "all"; it must be a number',
        ),
        (
            "schedule.compile=true",
            "schedule.compile is unknown; allowed here: rounds, clients_per_round, batch_size, seed",
        ),
        ("execution.compile=always", "execution.compile is \"always\"; it must be 'auto' or true"),
        (
            "execution.precision=half",
            "execution.precision is \"half\"; it must be 'full', 'tf32' or",
        ),
        ("execution.chunk_size=0", "execution.chunk_size is 0; it must be at least 1 or 'auto'"),
        ("execution.chunks=2", "execution.chunks is unknown; did you mean 'chunk_size'?"),
        ("execution=fast", 'execution is "fast"; it must be a table'),
        ("privacy={clip = 0.0}", "privacy.clip is 0.0; it must be more than 0"),
        ("privacy={clip = 1.0, delta = 1.0}", "privacy.delta is 1.0; it must be less than 1"),
        ("privacy={clip = 1.0, mechanism = 'x'}", "mechanism is \"x\"; it must be 'gaussian' or"),
        (
            "privacy={clip = 1.0, epsilon = 1.0, noise = 1.0}",
            "privacy: give either epsilon, which sets the noise, or noise",
        ),
        ("schedule.progress=yes", 'schedule.progress is "yes"; it must be true or false'),
        ("output.num_samples=3", "output.num_samples is 3; it must be at least 4"),
        ("data.missing=dorp", "data.missing is \"dorp\"; it must be 'fail', 'drop' or 'keep'"),
        (
            "data.csv=a.csv",
            "data: give one of dataset (a name), csv, parquet, arrow, npz and moments (a path)",
        ),
        ("data.client=a", "data: client is for a file"),
        (
            "deployment.institution=1",
            "deployment.institution is unknown; did you mean 'institutions'?",
        ),
        ("deployment.sites=[]", "deployment.sites is now called deployment.institutions"),
        ("deployment.late=1", "deployment.late is now called deployment.max_staleness"),
        ("output.sites=[]", "output.sites is now called output.variables"),
        ("data.fields=3", "data.fields is 3; it must be a list or a table"),
        ("data.fields={y = 3}", "data.fields.y is 3; it must be text or a list"),
        ('data.fields=["a", 3]', "data.fields[1] is 3; it must be text"),
        ("data.hold_out=A", 'data.hold_out is "A"; it must be a list'),
        ("data=3", "data is 3; it must be a table"),
        ("algorithm=SFVI", 'algorithm is "SFVI"; it must be a table'),
    ],
)
def test_a_mistake_in_an_experiment_is_one_line_with_its_key(tmp_path, override, message):
    with pytest.raises(SettingsError) as caught:
        choices(experiment(tmp_path, MINIMAL, override), None, tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_missing_is_named(tmp_path):
    assert experiment(tmp_path, MINIMAL.replace("rounds = 3", "")).schedule.rounds is None
    with pytest.raises(SettingsError, match=r"^model is missing$"):
        experiment(tmp_path, "")


def test_bad_toml_names_file_and_line(tmp_path):
    with pytest.raises(SettingsError, match=r"x\.toml: .*line 3"):
        experiment(tmp_path, "[model]\nname = 'a'\nrounds 3\n")
    (tmp_path / "latin.toml").write_bytes(b"[model]\nname = '\xe9'\n")
    with pytest.raises(SettingsError, match="not UTF-8"):
        read_experiment(tmp_path / "latin.toml")


def test_written_toml_reads_back(tmp_path):
    data = {
        "model": {"name": 'odd "name"\n\t\\ \x7f Ω'},
        "data": {"csv": "a.csv", "client": "c", "fields": {"y": "a b", "x y": ["u", "v"]}},
        "algorithm": {"name": "SFVI", "lr": 1e-05, "conditioned": False, "guide": None},
        "schedule": {"rounds": 3, "clients_per_round": 1.0},
        "output": {},
    }
    read = experiment(tmp_path, to_toml(data)).model_dump(exclude_unset=True, exclude={"execution"})
    del data["algorithm"]["guide"]
    assert read == data
    assert isinstance(read["schedule"]["clients_per_round"], float)
