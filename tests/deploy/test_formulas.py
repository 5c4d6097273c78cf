"""A formula over nodes is the formula in one process: its coding is agreed from reports and sums."""

import re

import numpy as np
import pandas as pd
import pytest
import torch

import bayesfed as bf
from bayesfed.deploy.answering import draft_answer, sign_answer
from bayesfed.deploy.institutions import Expected, Patience
from bayesfed.deploy.letters import public_signing_key, read_letter
from bayesfed.deploy.messages import MessageError, pack, unpack
from bayesfed.deploy.node import Node
from bayesfed.deploy.plan import DeploymentPlan
from bayesfed.deploy.server import run_server
from bayesfed.deploy.transport import Carrier
from bayesfed.effects.agreed import effect
from bayesfed.formulas.settings import FormulaSettings
from bayesfed.output.study import source_of
from bayesfed.settings import EffectSettings
from tests.deploy.runs_over_nodes import Wire, fitted, same
from tests.deploy.study_by_post import Study
from tests.deploy.test_secure_runs import acquainted

EAGER = bf.Execution(compile=False)


def hospital(number, patients=18):
    """The third arm is given at the last hospital alone, and the first is not."""
    rng = np.random.default_rng(number)
    arms = ["control", "drug a"] if number < 5 else ["drug a", "drug b"]
    arm = rng.choice(arms, patients)
    age = rng.normal(60, 10, patients).round()
    y = 0.05 * age + (arm == "drug a") + rng.normal(0, 0.5) + rng.normal(size=patients)
    died = rng.binomial(6, 1 / (1 + np.exp(-(y - 3.5))))
    ward = rng.choice(["x", "y", "z"], patients)
    columns = {"arm": arm, "age": age, "y": y, "died": died, "all": 6, "ward": ward}
    columns |= {"dose": np.where(ward == "x", np.nan, age - 50), "grade": died % 3}
    return pd.DataFrame(columns | {"id": [f"{number}-{i}" for i in range(patients)]})


HOSPITALS = {f"hospital {i}": hospital(i) for i in range(6)}
NODES = {f"node{i}": dict(list(HOSPITALS.items())[2 * i : 2 * i + 2]) for i in range(3)}


def plan_of(text, family="gaussian", **options):
    settings = FormulaSettings(text, family, "hospital")
    options = {"rounds": 3, "execution": EAGER} | options
    return DeploymentPlan(settings, bf.SFVI(corrected=False, local_steps=2), **options)


def frames(hospitals):
    return {name: rows.assign(hospital=name) for name, rows in hospitals.items()}


def nodes_of(plan, folder, nodes=NODES):
    return [Node(n, frames(part), plan, folder / n, EAGER) for n, part in nodes.items()]


GAUSSIAN = "y ~ center(age) + arm + (1 + age | hospital)"
GAPS = "y ~ center(age) + mo(grade) + mi(dose) + (1 | hospital)\ndose | mi() ~ arm"
BINOMIAL = "p(died, all) ~ scale(age)*arm + (1 | hospital/ward)"


def in_one_process(text, family, plan, hospitals=HOSPITALS):
    model = bf.formula(text, hospitals, family=family, client="hospital")
    return bf.fit(model, model.federation, plan.algorithm, rounds=plan.rounds, execution=EAGER)


@pytest.mark.parametrize(
    ("text", "family", "secure"),
    [
        (GAUSSIAN, "gaussian", False),
        pytest.param(BINOMIAL, "binomial", False, marks=pytest.mark.slow),
        (GAUSSIAN, "gaussian", True),
        pytest.param(GAPS, "gaussian", False, marks=pytest.mark.slow),
    ],
    ids=["gaussian", "binomial", "secure", "missing covariate"],
)
def test_it_is_the_formula_in_one_process(text, family, secure, tmp_path):
    plan = plan_of(text, family, secure=secure)
    nodes = acquainted(nodes_of(plan, tmp_path))
    at = Wire(nodes)
    found, expected = fitted(at, plan, tmp_path), in_one_process(text, family, plan)
    program = source_of(found.posterior.program.model)
    assert program == source_of(expected.program.model) and "drug b" in program
    # in double precision the difference is below 1e-13
    same(found.params, expected.params, 1e-4)
    torch.testing.assert_close(
        found.posterior.history["elbo"], expected.history["elbo"], rtol=1e-5, atol=1e-4
    )
    own, derived = expected.derived(num_samples=50), found.derived(50)
    assert derived.keys() == {n for n, dims in expected.program.derived.items() if not dims}
    same(derived, {name: own[name] for name in derived}, 1e-3)
    local = [node._runs[next(iter(node._runs))].posterior.derived(num_samples=50) for node in nodes]
    joined = torch.cat([part["1|hospital"] for part in local], 1)
    torch.testing.assert_close(joined, own["1|hospital"], rtol=1e-3, atol=1e-3)
    sums = [unpack(r)[1] for _, p, r in at.heard if unpack(p)[0].kind == "add"]
    assert len(sums) == 6 and all(set(s) == {"masked" if secure else "sums"} for s in sums)
    assert not list(tmp_path.glob("*/agreements/*")) and not list(tmp_path.glob("*/runs/*/run.key"))


def test_sets_of_levels_leave_without_counts_and_own_levels_as_a_number(tmp_path):
    plan = plan_of("y ~ arm + (1 | hospital:id)", rounds=1)
    at = Wire(nodes_of(plan, tmp_path))
    fitted(at, plan, tmp_path)
    columns = {at: unpack(r)[0] for at, _, r in at.heard if unpack(r)[0].kind == "columns"}
    assert set(columns["node0"].levels["arm"]) == {"control", "drug a"}
    assert set(columns["node2"].levels["arm"]) <= {"control", "drug a", "drug b"}
    assert columns["node1"].within == {"hospital:id": 18}
    assert set(columns["node1"].levels) == {"arm"}
    to_node = [payload for at, payload, _ in at.heard if at == "node1"]
    assert not any(name in payload for payload in to_node for name in (b"hospital 0", b"4-1"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda f: f.assign(age="old"),
            "institution 'node1': 'age' holds text, where institution 'node0' has number",
        ),
        (
            lambda f: f.assign(y=1e400),
            "institution 'node1' failed .FormulaError.: its log says why",
        ),
    ],
    ids=["another kind", "infinite"],
)
def test_a_mistake_at_one_institution_names_it_and_the_column(change, said, tmp_path):
    plan = plan_of(GAUSSIAN)
    nodes = NODES | {"node1": {name: change(rows) for name, rows in NODES["node1"].items()}}
    with pytest.raises(ValueError, match=said):
        fitted(Wire(nodes_of(plan, tmp_path, nodes)), plan, tmp_path)


def test_a_missing_column_is_named_before_the_node_answers(tmp_path):
    rows = {name: own.drop(columns="arm") for name, own in NODES["node1"].items()}
    with pytest.raises(KeyError, match="no column 'arm'"):
        Node("node1", frames(rows), plan_of(GAUSSIAN), tmp_path)


def test_institutions_with_another_formula_take_no_part(tmp_path):
    plan = plan_of(GAUSSIAN)
    nodes = nodes_of(plan, tmp_path)
    nodes[2].plan = plan_of("y ~ center(age) + (1 | hospital)")
    with pytest.raises(
        MessageError, match="institution 'node2': another run was agreed on: formula.text is"
    ):
        fitted(Wire(nodes), plan, tmp_path)


def test_a_coding_that_differs_is_noticed(tmp_path):
    """As if a node had coded its rows by other levels than those of the agreement."""
    plan = plan_of(GAUSSIAN)
    at = Wire(nodes_of(plan, tmp_path))
    at.changed = {
        ("node1", "begin"): lambda r: pack(
            unpack(r)[0].model_copy(update={"coding": "0" * 64}), **unpack(r)[1]
        )
    }
    with pytest.raises(MessageError, match="'node1' has another model: the formula's program"):
        fitted(at, plan, tmp_path)


def test_noise_does_not_go_with_a_formula():
    with pytest.raises(ValueError, match="agreed from reports and sums without noise"):
        plan_of(GAUSSIAN, privacy=bf.Privacy(clip=1.0, noise=1.0))
    assert plan_of(GAUSSIAN, privacy=bf.Privacy(clip=1.0)).formula.text == GAUSSIAN


@pytest.mark.parametrize("when", [3, pytest.param(5, marks=pytest.mark.slow), 7])
def test_server_and_nodes_that_are_killed_go_on_with_the_agreed_coding(when, tmp_path):
    text = "y ~ center(age) + arm + (1 | hospital)"
    plan, count = plan_of(text, rounds=2), {"exchanges": 0}

    def start():
        at = Wire(nodes_of(plan, tmp_path))
        honest = at.exchange

        def exchange(messages, wait):
            count["exchanges"] += 1
            if count["exchanges"] == when:
                raise InterruptedError
            return honest(messages, wait)

        at.exchange = exchange
        return fitted(at, plan, tmp_path)

    with pytest.raises(InterruptedError):
        start()
    same(start().params, in_one_process(text, "gaussian", plan).params, 1e-4)


def test_clients_held_out_take_part_in_the_agreement_and_get_their_effects_afterwards(tmp_path):
    text = "y ~ center(age) + arm + (1 | hospital)"
    plan, held = plan_of(text), "hospital 1"
    nodes = nodes_of(plan, tmp_path)
    nodes[0] = Node("node0", frames(NODES["node0"]), plan, tmp_path / "node0", EAGER, held=[held])
    found = fitted(Wire(nodes), plan, tmp_path)
    model = bf.formula(text, HOSPITALS, client="hospital")
    others, left_out = model.federation.hold_out([held])
    expected = bf.fit(model, others, plan.algorithm, rounds=3, execution=EAGER)
    same(found.params, expected.params, 1e-4)
    file = next((tmp_path / "node0").glob("runs/*/held_out.safetensors"))
    at_node = bf.Posterior.load(file, model, left_out).derived(num_samples=50)["1|hospital"]
    own = expected.personalize(left_out).derived(num_samples=50)["1|hospital"]
    torch.testing.assert_close(at_node, own, rtol=1e-3, atol=1e-3)


def test_effects_are_those_of_one_process(tmp_path):
    agreed = (
        EffectSettings(variables={"arm": ["control", "drug a"]}, num_samples=50),
        EffectSettings(
            kind="predictions",
            variables={"age": [50.0, 70.0]},
            by={"ward": ["x", "y", "z"]},
            num_samples=50,
        ),
    )
    text = "y ~ center(age) + arm + (1 | hospital)"
    plan = plan_of(text, effects=agreed)
    found = fitted(Wire(nodes_of(plan, tmp_path)), plan, tmp_path)
    expected = in_one_process(text, "gaussian", plan)
    for settings, one in zip(agreed, found.effects, strict=True):
        other = effect(expected, settings)
        assert one.labels.equals(other.labels)
        torch.testing.assert_close(one.draws, other.draws, rtol=1e-3, atol=1e-3)
    for variables, said in (
        ({"arm": ["control", "none"]}, "'arm' has the level 'none'"),
        ({"sex": 1.0}, "'sex' is no column"),
    ):
        wrong = plan_of(text, effects=(EffectSettings(variables=variables),))
        with pytest.raises((KeyError, ValueError), match=said):
            fitted(Wire(nodes_of(wrong, tmp_path / said[:4])), wrong, tmp_path / said[:4])


@pytest.mark.parametrize("new", [False, True], ids=["known levels", "a new level"])
def test_an_institution_that_joins_is_coded_by_the_agreement_of_the_others(new, tmp_path):
    plan = plan_of("y ~ arm + (1 | hospital)")
    arm = "drug c" if new else "drug a"
    late = {"hospital 9": hospital(9).assign(arm=["control", arm] * 9)}
    at = Wire(nodes_of(plan, tmp_path, NODES | {"node3": late}))
    rounds = []
    reachable = Carrier(lambda: [n for n in at.nodes if n != "node3" or len(rounds)], at.exchange)
    patience = Patience(tuple(at.nodes), 5.0, joining=1.0, expected={"node3": Expected(1, 18)})
    lines = []
    run_server(
        reachable,
        plan,
        patience,
        tmp_path / "server.safetensors",
        report=lines.append,
        callbacks=[rounds.append],
    )
    said = (
        "institution 'node3' cannot join: .*'arm' has the level 'drug c'"
        if new
        else "institution 'node3' has joined"
    )
    assert any(re.search(said, line) for line in lines)


def test_by_post_it_is_the_same_and_what_would_leave_is_said(tmp_path):
    plan = plan_of("y ~ center(age) + arm + (1 | hospital:ward)", rounds=1, secure=True)
    study = Study(acquainted(nodes_of(plan, tmp_path / "post")), plan, tmp_path / "post")
    lines = []
    for _ in range(20):
        letter = study.ask()
        if read_letter(letter).head.final:
            break
        key = public_signing_key(study.desk.key)
        for name, node in study.nodes.items():
            draft = draft_answer(node, letter, key)
            lines += draft.lines if name == "node2" else []
            study.desk.take(sign_answer(node, draft))
    found = fitted(Wire(acquainted(nodes_of(plan, tmp_path / "wire"))), plan, tmp_path / "wire")
    same(study.result.params, found.params, 1e-5)
    said = "\n".join(lines)
    assert "of the columns age, arm, hospital, ward, y: whether they hold numbers or text" in said
    assert "levels of arm: " in said and "levels of ward" not in said
    assert "the largest number of levels of hospital:ward at a client: 3; no level" in said
    assert "field X: 7 numbers" in said and "masked (" in said
