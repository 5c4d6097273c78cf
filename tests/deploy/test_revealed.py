"""Institutions that reveal moments: one upload, the fit of one process, and refusals by name."""

import json
from collections import Counter
from dataclasses import replace

import pandas as pd
import pyro.distributions as dist
import pytest
import torch

import bayesfed as bf
from bayesfed.deploy.answering import draft_answer
from bayesfed.deploy.institutions import Expected, Patience
from bayesfed.deploy.letters import public_signing_key
from bayesfed.deploy.messages import MessageError, pack, unpack
from bayesfed.deploy.moments_messages import Deliver, Reveal, Revealed
from bayesfed.deploy.node import Node
from bayesfed.deploy.node_moments import Consent
from bayesfed.deploy.plan import DeploymentPlan
from bayesfed.deploy.server import run_server
from bayesfed.deploy.transport import Carrier
from bayesfed.formulas.settings import FormulaSettings
from bayesfed.rules import MedianOfInstitutions
from bayesfed.settings import EffectSettings, LeaveOneOutSettings
from tests.deploy.in_process import divided, wire
from tests.deploy.test_formulas import HOSPITALS, frames
from tests.deploy.test_post import Study
from tests.engine.test_moments import NOT_ENOUGH, data, hierarchy

EAGER = bf.Execution(compile=False)
ROWS = data(6)
PLAN = DeploymentPlan(
    hierarchy(), bf.SFVI(corrected=False), rounds=3, execution=EAGER, reveal="moments"
)
YES = Consent("moments")


def nodes_of(folder, plan=PLAN, rows=ROWS, consent=YES):
    parts = divided(rows, 3)
    return [Node(n, part, plan, folder / n, EAGER, consent=consent) for n, part in parts.items()]


def run(nodes, folder, plan=PLAN, counted=None, **patience):
    """The server's run; ``counted`` counts the kinds of messages to all nodes."""
    carrier = wire(nodes)

    def exchange(messages, wait):
        if counted is not None:
            counted.update(unpack(payload)[0].kind for payload in messages.values())
        return carrier.exchange(messages, wait)

    names = tuple(node.name for node in nodes)
    how = Patience(names, joining=5.0, seconds=5.0, attempts=1, **patience)
    return run_server(
        Carrier(carrier.reachable, exchange), plan, how, folder / "server.safetensors"
    )


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A whole run: its nodes, its result, and the numbers of messages."""
    folder, counted = tmp_path_factory.mktemp("revealed"), Counter()
    nodes = nodes_of(folder)
    return nodes, run(nodes, folder, counted=counted), counted, folder


def test_one_upload_gives_the_fit_of_one_process(study):
    _, found, counted, _ = study
    assert counted == {"hello": 3, "reveal": 3, "deliver": 3}
    assert (
        found.exchanges == 3
    )  # with the descriptions of the data, and the posteriors that are sent at the end
    expected = bf.fit(hierarchy(), ROWS, PLAN.algorithm, rounds=3, execution=EAGER, progress=False)
    for name, value in expected.params.items():
        torch.testing.assert_close(found.params[name], value, rtol=1e-3, atol=1e-3)
    assert found.posterior.federation.names == ROWS.names
    for name, value in found.sample(50).items():
        torch.testing.assert_close(value, expected.sample(50)[name], rtol=0.02, atol=0.02)
    assert "6 clients" in repr(found)


def test_other_fits_and_a_restart_ask_nobody(study):
    """Another prior, fewer predictors, a client less: with no exchange. The same command has the same result."""
    nodes, found, counted, folder = study
    before, federation = Counter(counted), found.moments.federation()
    how = {"rounds": 2, "execution": EAGER, "progress": False}
    less = bf.fit(hierarchy(0.3, ("x",)), federation.select(federation.names[1:]), **how)
    assert len(less.federation) == 5
    assert counted == before
    again = run(nodes, folder, counted=counted)
    assert counted["reveal"] == before["reveal"]
    for name, value in found.params.items():
        assert torch.equal(again.params[name], value)


def test_nodes_have_the_posterior_of_their_clients(study):
    nodes, found, _, _ = study
    for node in nodes:
        (path,) = node.folder.glob("runs/*/posterior.safetensors")
        own = bf.Posterior.load(path, hierarchy(), node.federation)
        names, at = node.federation.names, found.posterior.federation.index(node.federation.names)
        assert own.federation.names == names
        expected = found.posterior.sample(20)["u"][:, at]
        torch.testing.assert_close(own.sample(20)["u"], expected)
        assert own.predict(num_samples=5)["y"].shape == (5, node.federation.rows)
        log = [json.loads(line) for line in (node.folder / "log.jsonl").read_text().splitlines()]
        sent = [line["message"]["kind"] for line in log if line["what"] == "sent"]
        assert sent[:3] == ["schema", "revealed", "done"]


def test_two_tables_with_the_same_moments_give_the_same_upload(tmp_path):
    """What is sent does not tell rows from others with their moments: the mirror image of the rows at their mean."""
    x = torch.randn(2, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64).round(
        decimals=1
    )
    uploads = []
    for sign in (1.0, -1.0):
        rows = sign * (x - x.mean(1, keepdim=True)) + 2.0
        fields = {"x": rows[0], "arm": rows[1], "size": torch.ones(40).double(), "y": rows.sum(0)}
        own = bf.Federation.from_arrays({"a": fields})
        node = Node("n", own, PLAN, tmp_path / f"{sign}", EAGER, consent=YES)
        reply, parts = unpack(node.answer(pack(Reveal(run="1", terms=PLAN.description))))
        assert isinstance(reply, Revealed), reply
        uploads.append((own["x"], parts["moments"]))
    (one, first), (other, second) = uploads
    assert not torch.allclose(one.sort().values, other.sort().values)
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, rtol=1e-12, atol=1e-12)


def refused(tmp_path, match, plan=PLAN, nodes=None, **options):
    nodes = nodes_of(tmp_path, plan) if nodes is None else nodes
    with pytest.raises(MessageError, match=match):
        run(nodes, tmp_path, plan, **options)


def test_a_node_that_has_not_agreed_refuses(tmp_path):
    refused(
        tmp_path,
        r'\'node0\': its node file has no reveal = "moments".*write it there',
        nodes=nodes_of(tmp_path, consent=Consent()),
    )
    other = replace(PLAN, reveal=None)
    refused(tmp_path, "another run was agreed on: reveal", nodes=nodes_of(tmp_path, other))
    (node, *_) = nodes_of(tmp_path, other)
    for message in (Reveal(run="1", terms=other.description), Deliver(run="1")):
        assert "no moments were agreed on" in unpack(node.answer(pack(message)))[0].why


def test_likelihoods_that_need_the_rows_are_refused(tmp_path):
    plan = replace(PLAN, model=hierarchy(outcome=NOT_ENOUGH["Student-t"]))
    refused(tmp_path, r"'node0': moments: .* 'y' depends on more than", plan)
    counts = bf.Federation.from_arrays(
        {n: {f: ROWS.select([n])[f].abs().round() for f in ROWS.fields} for n in ROWS.names}
    )
    plan = replace(PLAN, model=hierarchy(outcome=lambda m, s, o: dist.Poisson(m.exp())))
    nodes = nodes_of(tmp_path, plan, counts)
    refused(tmp_path, r"'y' cannot be observed at means, .*discrete", plan, nodes)


def test_clients_that_moments_single_out_are_refused_without_a_number(tmp_path):
    nodes = nodes_of(tmp_path, consent=Consent("moments", fewest_rows=20))
    refused(
        tmp_path,
        r"client 'c0' would single out fewer rows than fewest_rows = 20: its log",
        nodes=nodes,
    )
    log = (tmp_path / "node0" / "log.jsonl").read_text()
    assert "largest leverage" in log


def test_what_moments_exclude_is_refused_early(tmp_path):
    effect = EffectSettings(kind="comparisons", variables={"arm": [0.0, 1.0]})
    exclude = {
        "deployment.secure": {"secure": True},
        "privacy": {"privacy": bf.Privacy(clip=1.0)},
        "effects": {"effects": (effect,)},
        "leave_one_out": {"leave_one_out": LeaveOneOutSettings(name="a")},
        "schedule.batch_size": {"batch_size": 5},
        "deployment.chains": {"chains": True, "algorithm": bf.SFVI()},
        "algorithm.rule": {"algorithm": bf.FedAvg().replace(rule=MedianOfInstitutions())},
    }
    for name, options in exclude.items():
        with pytest.raises(ValueError, match=f"{name} and deployment.reveal exclude each other"):
            replace(PLAN, **options)
    with pytest.raises(ValueError, match="deployment.reveal is 'rows'"):
        replace(PLAN, reveal="rows")
    with pytest.raises(ValueError, match=r"deployment.expected: moments are asked for once"):
        run(nodes_of(tmp_path), tmp_path, expected={"node2": Expected(2, 10)})


@pytest.mark.parametrize(
    ("part", "change", "problem"),
    [
        ("counts", lambda v: v + 1, "counts cannot be those"),
        ("mean", lambda v: v * torch.nan, "mean cannot be those"),
        ("covariance", lambda v: v + torch.eye(v.shape[-1])[0].double(), "covariance cannot be"),
        ("covariance", lambda v: -v, "negative eigenvalue"),
        ("mean", lambda v: v[:, :1], "in place of"),
    ],
)
def test_moments_that_no_rows_have_are_refused(tmp_path, part, change, problem):
    nodes = nodes_of(tmp_path)
    honest = nodes[1].handle

    def hostile(payload):
        reply, parts = unpack(honest(payload))
        if isinstance(reply, Revealed):
            parts["moments"][part] = change(parts["moments"][part])
        return pack(reply, **parts)

    nodes[1].handle = hostile
    refused(tmp_path, f"institution 'node1': .*{problem}", nodes=nodes)


def test_a_formula_is_fitted_to_moments(tmp_path):
    """Its coding is agreed first; a category is a column for each level but one."""
    tables = {
        name: pd.concat([rows, rows.assign(y=rows["y"] + 0.3, age=rows["age"] + 5)] * 2)
        for name, rows in list(HOSPITALS.items())[:4]
    }
    settings = FormulaSettings("y ~ arm + age + (1 | hospital)", "gaussian", "hospital")
    plan = replace(PLAN, model=settings)
    parts = {"n0": list(tables)[:2], "n1": list(tables)[2:]}
    nodes = [
        Node(n, frames({k: tables[k] for k in own}), plan, tmp_path / n, EAGER, consent=YES)
        for n, own in parts.items()
    ]
    found = run(nodes, tmp_path, plan)
    model = bf.formula(settings.text, pd.concat(frames(tables).values()), client="hospital")
    how = {"rounds": 3, "execution": EAGER, "progress": False}
    expected = bf.fit(model, model.federation, plan.algorithm, **how).derived(num_samples=50)
    for name, value in found.derived(50).items():
        torch.testing.assert_close(value, expected[name], rtol=0.02, atol=0.02)


def test_moments_by_post_are_shown_in_words(tmp_path):
    nodes = nodes_of(tmp_path / "nodes")
    study = Study(nodes, PLAN, tmp_path)
    letters = 0
    while study.result is None:
        letter = study.ask()
        if study.result is None:
            letters += 1
            key = public_signing_key(study.desk.key)
            lines = "\n".join(draft_answer(nodes[0], letter, key).lines)
            for node in nodes:
                study.desk.take(study.answer(node.name, letter))
    assert letters == 2
    assert "of each of 2 clients (c0, c1) with 85 rows: the number of its rows (85 in all)" in lines
    assert "the means of 4 fields (x, arm, size, y), and their variances and covariances" in lines
    last = study.ask()
    for node in nodes:  # which needs no answer
        assert draft_answer(node, last, public_signing_key(study.desk.key)).final
        assert list(node.folder.glob("runs/*/posterior.safetensors"))
