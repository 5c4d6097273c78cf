"""Algorithms to plain data and back: methods, compositions, parts of a user's own."""

import json
import sys
from dataclasses import dataclass

import pytest

import bayesfed as bf
from bayesfed import rules, steps
from bayesfed.algorithms import METHODS
from bayesfed.algorithms.registry import (
    algorithm_of,
    parts_by_name,
    reference,
    settings_of,
)
from bayesfed.guides.globals import OwnGuide
from bayesfed.guides.locals import Kept
from bayesfed.rules import Mean
from bayesfed.settings import SettingsError
from bayesfed.steps import Alternate, Descent, InTurn

HERE = __name__


@dataclass(frozen=True)
class Trimmed(Mean):
    """A rule of the user's own, with a setting."""

    most: float = 1.0


def my_guide(federation):
    raise NotImplementedError


def through_json(algorithm):
    return json.loads(json.dumps(settings_of(algorithm)))


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_comes_back(name):
    algorithm = METHODS[name]()
    data = through_json(algorithm)
    assert data["name"] == METHODS[name].name
    assert data.keys() == {"name", *METHODS[name].settings}
    assert algorithm_of(data) == algorithm == algorithm_of(name) == algorithm_of({"name": name})


COMPOSITIONS = [
    bf.FedAvg().replace(rule=rules.NormalisedMean()),
    bf.FedAvg().replace(lr_decay=0.1),
    bf.FedAvg().replace(rule=rules.ControlVariates(), name="mine"),
    bf.FedABML().replace(rule=rules.MStep(kl_weight=0.5), corrected=False),
    bf.FedPer().replace(steps=InTurn((Descent("locals"), Descent("body", lr=0.3)))),
    bf.PFedMe().replace(steps=Alternate(Descent("locals", proximal=1.0), 3, Descent())),
    bf.SFVI().replace(globals=bf.Flow(bins=4), steps=steps.GradientsAtDraws(steps=2)),
    bf.PVI().replace(locals=Kept()),  # which does not fit; that is found where it is used
    bf.FOLA().replace(rule=rules.ProductOfGaussians(cavity=True)),
]


@pytest.mark.parametrize("algorithm", COMPOSITIONS, ids=str)
def test_compositions_come_back(algorithm):
    data = through_json(algorithm)
    assert data.keys() >= {"globals", "locals", "steps", "rule"}
    assert algorithm_of(data) == algorithm


def test_a_changed_method_is_stored_by_its_parts():
    """Fields that no keyword sets are not lost, and the name stays that of the composition."""
    changed = bf.FedAvg().replace(steps=Descent(clip=1.0), name="FedAvg")
    assert through_json(changed)["steps"]["clip"] == 1.0
    assert algorithm_of(through_json(changed)) == changed
    assert "steps" not in through_json(bf.FedAvg(lr=0.3))


def test_parts_replace_those_of_a_method():
    found = algorithm_of({"name": "FedAvg", "lr": 0.3, "rule": "NormalisedMean"})
    assert found == bf.FedAvg(lr=0.3).replace(rule=rules.NormalisedMean())
    table = {"name": "Mean", "by": "clients"}
    assert algorithm_of({"name": "FedAvg", "rule": table}).rule == Mean("clients")


# -- parts of one's own -------------------------------------------------------------------------------


def test_a_rule_of_ones_own_is_stored_by_its_module():
    algorithm = bf.FedAvg().replace(rule=Trimmed(most=2.0))
    data = through_json(algorithm)
    assert data["rule"] == {
        "name": f"{HERE}:Trimmed",
        "by": "rows",
        "averaged_rounds": 1,
        "most": 2.0,
    }
    assert reference(Trimmed) == f"{HERE}:Trimmed"
    assert reference(Mean) == "Mean"
    assert algorithm_of(data) == algorithm
    assert algorithm_of({"name": "FedAvg", "rule": f"{HERE}:Trimmed"}).rule == Trimmed()
    assert "Trimmed" not in parts_by_name()


def test_a_module_that_is_not_imported_is_refused(tmp_path, monkeypatch):
    """Opening a file must not run code: the module is there, and is not imported."""
    (tmp_path / "never_imported.py").write_text("raise AssertionError('it was run')\n")
    monkeypatch.syspath_prepend(tmp_path)
    data = {"name": "FedAvg", "rule": "never_imported:Trimmed"}
    with pytest.raises(
        SettingsError,
        match=r"^algorithm\.rule\.name is 'never_imported:Trimmed'.* import the module 'never_imported' first$",
    ):
        algorithm_of(data)
    assert "never_imported" not in sys.modules


def test_references_are_looked_up_by_whoever_reads_them():
    seen = []

    def load(name, where):
        seen.append((name, where))
        return Trimmed

    found = algorithm_of({"name": "FedAvg", "rule": {"name": "my.py:T", "most": 3.0}}, load=load)
    assert found.rule == Trimmed(most=3.0)
    assert seen == [("my.py:T", "algorithm.rule.name")]


@pytest.mark.parametrize("made", [bf.FedAvg(lr=0.3), lambda: bf.FedAvg(lr=0.3)])
def test_an_algorithm_of_ones_own(made):
    """A value, or a function that returns one."""
    found = algorithm_of("mine.py:algorithm", load=lambda name, where: made)
    assert found == bf.FedAvg(lr=0.3)
    with pytest.raises(SettingsError, match=r"mine\.py:algorithm is 3, not a bayesfed\.Algorithm"):
        algorithm_of("mine.py:algorithm", load=lambda name, where: lambda: 3)


def test_a_class_inside_a_function_cannot_be_stored():
    @dataclass(frozen=True)
    class Inner(Mean):
        pass

    with pytest.raises(TypeError, match=r"rule is an instance of .*Inner, a class inside a funct"):
        settings_of(bf.FedAvg().replace(rule=Inner()))


def test_a_guide_in_a_composition():
    algorithm = bf.SFVI().replace(globals=OwnGuide(my_guide))
    data = through_json(algorithm)
    assert data["globals"] == {"name": "OwnGuide", "guide": "custom"}
    assert algorithm_of(data, guide=my_guide) == algorithm
    with pytest.raises(SettingsError, match=r"pass it again as guide=$"):
        algorithm_of(data)


# -- mistakes -----------------------------------------------------------------------------------------

PARTS = {"globals": "Point", "locals": "AtPrior", "steps": "Descent", "rule": "Mean"}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (PARTS | {"rule": "Maen"}, "algorithm.rule.name is \"Maen\"; did you mean 'Mean'?"),
        (PARTS | {"rule": {"name": "Mean", "bye": 1}}, "algorithm.rule.bye is unknown; did you"),
        (PARTS | {"rule": {"by": "rows"}}, "algorithm.rule.name is missing; choose one of"),
        (PARTS | {"rule": 3}, "algorithm.rule is 3; it must be a name or a table with a name"),
        (PARTS | {"rule": {"name": "Mean", "by": "size"}}, 'algorithm.rule.by is "size"; it must'),
        (
            PARTS | {"steps": {"name": "Descent", "lr": 0}},
            "algorithm.steps.lr is 0; it must be more than 0",
        ),
        (PARTS | {"lr": 0.1}, "algorithm.lr is unknown; "),
        (PARTS | {"lr_decay": "slow"}, 'algorithm.lr_decay is "slow"; it must be a number'),
        ({"rule": "Mean"}, "algorithm.name is missing; choose one of FedAvg"),
        ({"name": "FedAvg", "rule": "Stien"}, 'algorithm.rule.name is "Stien"; did you mean'),
    ],
)
def test_a_mistake_is_one_line_with_its_key(data, message):
    with pytest.raises(SettingsError) as error:
        algorithm_of(data)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)
