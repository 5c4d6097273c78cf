"""Methods: every keyword sets a field, and is refused by name where it is unknown or out of range."""

import ast
import inspect
import math
import typing
from pathlib import Path

import pytest
import torch

import bayesfed as bf
from bayesfed import datasets, models, rules
from bayesfed.algorithms import METHODS, Algorithm, Method
from bayesfed.algorithms.method import get, put
from bayesfed.settings import SettingsError
from bayesfed.steps import Descent

NAMES = sorted(METHODS)
SIGNATURES = {
    "FedAvg": "lr local_epochs local_steps optimizer proximal averaged_rounds lr_decay personal_steps",
    "FedProx": "lr local_epochs local_steps optimizer proximal averaged_rounds lr_decay personal_steps",
    "FedNova": "lr local_epochs local_steps optimizer proximal lr_decay personal_steps",
    "Scaffold": "lr local_epochs local_steps optimizer proximal lr_decay personal_steps",
    "FedCurv": "lam lr local_epochs local_steps lr_decay personal_steps",
    "FedPer": "lr local_epochs optimizer lr_decay personal_steps",
    "FedRep": "lr head_epochs local_epochs optimizer lr_decay personal_steps",
    "FedBABU": "lr local_epochs optimizer lr_decay personal_steps",
    "Local": "lr local_epochs optimizer lr_decay personal_steps",
    "Ditto": "lam lr local_epochs local_steps optimizer lr_decay personal_steps",
    "PerFedAvg": "lr prior_lr inner_steps second_order local_epochs local_steps prior_optimizer "
    "lr_decay personal_steps",
    "PFedMe": "lam lr prior_lr inner_steps local_epochs local_steps lr_decay personal_steps",
    "CAFeMe": "inner_lr lr optimizer inner_steps second_order personal_fraction support_rows outer_steps weighted "
    "lr_decay personal_steps",
    "FedABML": "local_epochs local_steps inner_steps lr prior_lr shared_lr kl_weight draws natural weighted lr_decay "
    "personal_steps",
    "PFedVEM": "point head_epochs body_epochs head_steps body_steps lr body_lr optimizer kl_weight draws init_scale "
    "upload_fraction lr_decay personal_steps",
    "FedPop": "local_steps body_lr init_scale upload_fraction lr_decay personal_steps",
    "FOLA": "lr prior_weight local_epochs local_steps covariance fisher online cavity damping gamma personal_steps",
    "FedBE": "lr local_epochs local_steps gamma lr_decay personal_steps",
    "PACPFL": "particles draws integrated tau lam beta new_data_clients upsilon flat lr optimizer "
    "lr_decay",
    "SFVI": "global_guide conditioned guide local_steps draws lr local_lr corrected lr_decay personal_steps",
    "SFVIAvg": "global_guide conditioned local_steps draws lr local_lr corrected lr_decay personal_steps",
    "PVI": "conditioned damping local_steps step draws local_lr corrected lr_decay personal_steps",
}
SIGNATURES |= {
    "PFedBayes": SIGNATURES["FedABML"],
    "PFedMAP": SIGNATURES["PFedVEM"],
    "PFedGP": SIGNATURES["PACPFL"],
}


def test_every_method_is_in_the_table_and_in_the_package():
    assert METHODS.keys() == SIGNATURES.keys() | {"MAML", "MTL", "Pooled"}
    for name in SIGNATURES:
        assert getattr(bf, name) is METHODS[name]
        assert isinstance(METHODS[name], Method)
        assert METHODS[name].name == name
    assert METHODS["MAML"] is bf.PerFedAvg
    assert METHODS["MTL"] is METHODS["PFedMAP"]


def test_pooled_is_gradient_descent_on_all_rows_and_refuses_several_clients():
    data = datasets.eight_schools()
    with pytest.raises(
        ValueError, match=r"single client with all rows, and there are 8: .*pool\(\)"
    ):
        bf.fit(models.eight_schools, data, METHODS["Pooled"](), rounds=1)
    found, expected = (
        bf.fit(models.eight_schools, data.pool(), method(lr=0.01), rounds=3).params
        for method in (METHODS["Pooled"], bf.FedAvg)
    )
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


@pytest.mark.parametrize("name", sorted(SIGNATURES))
def test_signatures(name):
    """What help() shows: keywords with the defaults of the composition."""
    method = METHODS[name]
    found = inspect.signature(method)
    assert list(found.parameters) == SIGNATURES[name].split()
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in found.parameters.values())
    defaults = {key: parameter.default for key, parameter in found.parameters.items()}
    assert method(**defaults) == method()
    assert method.values(method()) == defaults
    assert method.__doc__.endswith((".", ")."))
    assert method.__name__ == name


@pytest.mark.parametrize("name", sorted(SIGNATURES))
def test_help_says_what_each_setting_means(name):
    method = METHODS[name]
    lines = method.__doc__.splitlines()
    for key in SIGNATURES[name].split():
        assert any(
            line.startswith(f"- ``{key}``: ") and len(line) > len(key) + 12 for line in lines
        )


@pytest.mark.parametrize("name", NAMES)
def test_defaults_make_an_algorithm_that_fits(name):
    algorithm = METHODS[name]()
    assert isinstance(algorithm, Algorithm)
    assert str(algorithm) == algorithm.name == METHODS[name].name
    algorithm.check()


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_can_be_set_and_read(name):
    """Each keyword reaches all of its fields, and no other field."""
    method = METHODS[name]
    for key, setting in method.settings.items():
        default = setting.value(method.default)
        if setting.wrap is not None or setting.kinds:
            continue  # guides, see below
        value = another(setting.annotation(method.default), default)
        algorithm = method(**{key: value})
        assert method.values(algorithm) == method.values(method()) | {key: value}, key
        held = {get(algorithm, path) for path in setting.paths}
        assert held == {setting.values.get(value, value)}
        before = {path: get(method.default, path) for path in setting.paths}
        assert put(algorithm, before) == method()


def another(kind, default):
    """Return a value of a setting that is not its default."""
    kinds = [kind, *typing.get_args(kind)]
    choices = [x for k in kinds for x in typing.get_args(k) if isinstance(x, str)]
    if choices:
        return next(choice for choice in choices if choice != default)
    if isinstance(default, bool) or bool in kinds:
        return not default
    if isinstance(default, float) or float in kinds or "float" in str(kind):
        return 0.25 if default != 0.25 else 0.5
    return 6 if default != 6 else 8


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_setting_is_refused_by_name(name):
    with pytest.raises(SettingsError, match=r"^nothing_such is unknown; .*allowed here: ") as error:
        METHODS[name](nothing_such=1)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", NAMES)
def test_settings_out_of_range_are_refused_by_name(name):
    """Not a number is in no range; nor is text where a number is due."""
    method = METHODS[name]
    for key, setting in method.settings.items():
        if setting.kinds:
            continue
        for value in ("nonsense", math.nan):
            with pytest.raises(SettingsError, match=rf"^{key} is ") as error:
                method(**{key: value})
            assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: bf.FedAvg(lr=0.0), "lr is 0.0; it must be more than 0"),
        (lambda: bf.FedAvg(proximall=0.1), "proximall is unknown; did you mean 'proximal'?"),
        (lambda: bf.FedABML(prior_lr=2.0), "prior_lr is 2.0: natural steps diverge from 2 on"),
        (lambda: bf.PVI(draws=7), "draws is 7; PVI draws pairs"),
        (lambda: bf.FedAvg(local_epochs=0), "local_epochs is 0; it must be at least 1"),
        (lambda: bf.FedAvg(optimizer="adamw"), "optimizer is \"adamw\"; it must be 'sgd'"),
        (lambda: bf.FedAvg(personal_steps=-1), "personal_steps is -1; it must be at least 0"),
        (lambda: bf.PFedMe(lam=0.0), "lam is 0.0; it must be more than 0"),
        (lambda: bf.CAFeMe(personal_fraction=1.0), "personal_fraction is 1.0; it must be less"),
        (lambda: bf.PFedVEM(upload_fraction=0), "upload_fraction is 0"),
        (lambda: bf.FOLA(damping=1.5), "damping is 1.5; it must be at most 1"),
        (lambda: bf.FOLA(covariance="half"), 'covariance is "half"; it must be'),
        (lambda: bf.SFVI(guide=3), "guide is 3; it must be"),
        (lambda: bf.SFVI(corrected=1), "corrected is 1; it must be true or false"),
        (lambda: bf.PACPFL(particles=0), "particles is 0; it must be at least 1"),
    ],
)
def test_messages(make, message):
    with pytest.raises(ValueError) as error:
        make()
    assert str(error.value).startswith(message)


def test_settings_are_keywords():
    with pytest.raises(TypeError):
        bf.FedAvg(0.1)


def test_the_order_of_settings_does_not_matter():
    """A rate that only plain steps may have, given before and after the word that makes them plain."""
    plain = bf.FedABML(natural=False, lr=3.0, prior_lr=3.0)
    assert bf.FedABML(lr=3.0, prior_lr=3.0, natural=False) == plain


def test_a_setting_that_is_a_part():
    """None is the family that the number of dimensions chooses."""
    assert bf.SFVI(global_guide=bf.Flow(bins=4)).globals == bf.Flow(bins=4)
    assert bf.SFVI(global_guide=None) == bf.SFVI()
    assert bf.SFVI.values(bf.SFVI())["global_guide"] is None
    guide = inspect.signature  # any callable
    assert bf.SFVI.values(bf.SFVI(guide=guide))["guide"] is guide
    assert bf.SFVI.values(bf.SFVI())["guide"] is None


def test_fields_of_parts_are_checked_before_a_run_too():
    """A composition made by hand has no keyword: its field is named."""
    algorithm = bf.FedAvg().replace(steps=Descent(lr=-1.0))
    schools = bf.datasets.eight_schools()
    with pytest.raises(SettingsError, match=r"steps\.lr is -1\.0; it must be more than 0"):
        bf.start(bf.models.eight_schools, schools, algorithm, rounds=1)


# -- a rule is a few lines -----------------------------------------------------------------------------


def code_lines(cls):
    """Return the number of lines of a class without docstrings, comments and blank lines."""
    source = Path(inspect.getfile(cls)).read_text()
    tree = ast.parse(source)
    (node,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == cls.__name__)
    texts = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(inner):
            texts.update(range(inner.body[0].lineno, inner.body[0].end_lineno + 1))
    lines = source.splitlines()
    first = node.decorator_list[0].lineno if node.decorator_list else node.lineno
    return sum(
        number not in texts and bool(line := lines[number - 1].strip()) and line[0] != "#"
        for number in range(first, node.end_lineno + 1)
    )


@pytest.mark.parametrize(
    ("rule", "most"), [(rules.NormalisedMean, 15), (rules.ControlVariates, 30)]
)
def test_fednova_and_scaffold_are_small(rule, most):
    assert code_lines(rule) <= most
