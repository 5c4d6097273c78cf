"""A fit over nodes is the fit in one process."""

from dataclasses import replace

import pytest
import torch

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.deploy import server_program
from bayesfed.deploy.messages import (
    unpack,
)
from bayesfed.deploy.plan import DeploymentPlan
from bayesfed.engine.stopping import convergence
from bayesfed.output.correction import correct
from bayesfed.output.fitted import CorrectionResult
from tests.deploy.in_process import nodes_of, run_on
from tests.deploy.runs_over_nodes import PLAN, SCHOOLS, Wire, fitted, kinds_of, posteriors, same


@pytest.mark.parametrize(
    "plan",
    [
        # seeds whose weights are even enough without chains, which nodes do not run, and with few proposals: further
        # ones lie around resampled draws, whose choice stands on the last digits
        pytest.param(
            replace(PLAN, algorithm=bf.SFVI(), rounds=None, seed=1), marks=pytest.mark.slow
        ),
        replace(PLAN, clients_per_round=0.5, rounds=6),
        replace(PLAN, algorithm=bf.PVI(), seed=4),
        replace(PLAN, algorithm=bf.SFVI(), privacy=bf.Privacy(clip=0.2)),
        replace(PLAN, algorithm=PLAN.algorithm.replace(globals=bf.Flow(), name="SFVI"), rounds=4),
    ],
    ids=["until convergence, corrected", "half of the clients", "PVI", "clipped", "Flow"],
)
def test_it_is_the_fit_in_one_process(plan, tmp_path):
    nodes = nodes_of(SCHOOLS, plan, tmp_path)
    found = run_on(nodes, plan, tmp_path)
    expected = bf.fit(
        plan.model,
        SCHOOLS,
        plan.algorithm,
        rounds=plan.rounds,
        clients_per_round=plan.clients_per_round,
        privacy=plan.privacy,
        seed=plan.seed,
    )
    # extrapolated gradients and Adam's steps on a spline enlarge round-off
    same(found.params, expected.params, 1e-4 if plan.algorithm.globals == bf.Flow() else 1e-5)
    torch.testing.assert_close(
        found.posterior.history["elbo"], expected.history["elbo"], rtol=1e-5, atol=1e-4
    )
    local = [posterior.local_params for posterior in posteriors(nodes)]
    joined = {name: torch.cat([own[name] for own in local]) for name in expected.local_params}
    same(joined, dict(expected.local_params))
    draws, own = found.sample(200), expected.sample(200)
    for name, value in draws.items():  # near the tail a draw stands on many digits
        close = torch.isclose(value, own[name], rtol=1e-3, atol=1e-3).double().mean()
        # resampled draws: a weight's last digits may choose the neighbour of one
        assert close == 1 if expected.correction is None else close > 0.98


@pytest.mark.slow
def test_nodes_go_on_where_their_weights_say_nothing(tmp_path, monkeypatch):
    """They had come to an end, and forget it: the run settles where one does whose draws nobody weighs."""
    seen = []

    def weighs_nothing(posterior, weigh, **how):
        seen.append(correct(posterior, weigh, **how).reliable)
        return CorrectionResult(reliable=False)

    monkeypatch.setattr("bayesfed.deploy.server.correct", weighs_nothing)
    # with the draws of seed 0 the third of these corrections is not reliable
    plan = replace(PLAN, algorithm=bf.SFVI(), rounds=None, seed=1)
    nodes = nodes_of(SCHOOLS, plan, tmp_path)
    found = run_on(nodes, plan, tmp_path)
    expected = bf.fit(plan.model, SCHOOLS, bf.SFVI(corrected=False), seed=plan.seed)
    assert seen == [True] * (convergence.TRIES + 1) and found.posterior.converged
    same(found.params, expected.params)
    assert {len(own.history["elbo"]) for own in posteriors(nodes)} == {
        len(expected.history["elbo"])
    }


@pytest.mark.slow
def test_nodes_look_closely_where_they_are_asked_to(tmp_path, monkeypatch):
    """Any noise of their weights being too much, the corrected draws of θ and of each node's clients are the same."""
    monkeypatch.setattr("bayesfed.output.estimates.QUIET", -1.0)
    monkeypatch.setattr("bayesfed.deploy.node_run.QUIET", -1.0)
    # two proposals, and few draws: among many, last digits of weights choose other draws
    monkeypatch.setattr("bayesfed.output.correction.PROPOSALS", (2, 2))
    monkeypatch.setattr("bayesfed.output.effort.LATER", 500)
    plan = replace(PLAN, algorithm=bf.SFVI(local_steps=2), rounds=8)
    at = Wire(nodes_of(SCHOOLS, plan, tmp_path / "nodes"))
    nodes, found = list(at.nodes.values()), fitted(at, plan, tmp_path)
    expected = bf.fit(plan.model, SCHOOLS, plan.algorithm, rounds=plan.rounds)
    assert expected.correction.laplace
    # closer estimates come with the first ones, if no node finds its own quiet
    asked = [unpack(p)[0] for n, p, _ in at.heard if n == "node0" and kinds_of(p) == ["evaluate"]]
    assert [one.closely for one in asked] == [False] + [True] * (len(asked) - 1)
    monkeypatch.setattr("bayesfed.deploy.node_run.QUIET", 0.1)
    at = Wire(nodes_of(SCHOOLS, plan, tmp_path / "again"))
    separate = fitted(at, plan, tmp_path / "again")
    assert separate.exchanges == found.exchanges + 1
    assert torch.equal(separate.sample(200)["tau"], found.sample(200)["tau"])
    draws = expected.sample(200)
    torch.testing.assert_close(found.sample(200)["tau"], draws["tau"], rtol=1e-3, atol=1e-3)
    at_nodes = [posterior.sample(200)["theta"] for posterior in posteriors(nodes)]
    torch.testing.assert_close(torch.cat(at_nodes, 1), draws["theta"], rtol=1e-3, atol=1e-3)
    assert found.log_evidence.value == pytest.approx(expected.log_evidence.value, abs=0.01)
    whole = bf.leave_one_client_out(expected, 500).table["elpd"]
    at_nodes = [bf.leave_one_client_out(own, 500).table["elpd"] for own in posteriors(nodes)]
    assert sum(map(sum, at_nodes)) == pytest.approx(whole.sum(), abs=0.05)
    with pytest.raises(ValueError, match="of the fit's 8 clients"):
        posteriors(nodes)[0].without(posteriors(nodes)[0].federation.names[0])


@pytest.mark.slow
@pytest.mark.parametrize("shares", [False, True], ids=["plain", "label shares and sub-classes"])
def test_methods_of_networks_agree_too(shares, tmp_path):
    train, test = datasets.digits(clients=6)
    network = models.Network(models.mlp(64, 10))
    if shares:
        prior = models.LabelShares.learn(train)
        network = models.Network(models.mlp(64, 20), label_shares=prior, subclasses=2)
    plan = DeploymentPlan(network, bf.FedABML(), 3, 0.5, 10)
    nodes = nodes_of(train, plan, tmp_path)
    found = run_on(nodes, plan, tmp_path)
    expected = bf.fit(
        plan.model, train, plan.algorithm, rounds=3, clients_per_round=0.5, batch_size=10
    )
    same(found.params, expected.params, 1e-4)
    for node, posterior in zip(nodes, posteriors(nodes), strict=True):
        rows = test.select(node.federation.names)
        at_node = posterior.probabilities(rows, centre=True)["y"]
        in_process = expected.probabilities(rows, centre=True)["y"]
        torch.testing.assert_close(at_node, in_process, rtol=1e-3, atol=1e-3)


def test_the_form_of_uploads_is_computed_once(tmp_path, monkeypatch):
    """For each form of the server's messages: SFVI's first one differs from the later ones."""
    computed = []

    def counted(run, asked):
        computed.append(asked.number)
        return made_up(run, asked)

    made_up = server_program._made_up_upload
    monkeypatch.setattr(server_program, "_made_up_upload", counted)
    plan = replace(PLAN, algorithm=bf.SFVI(), rounds=None, clients_per_round=1)
    found = run_on(nodes_of(SCHOOLS, plan, tmp_path), plan, tmp_path)
    assert set(found.refused.values()) == {0}
    assert computed == [0, 1]
    assert len(found.posterior.history["elbo"]) > 3


def test_the_nodes_have_posteriors_and_the_server_has_none_of_their_variables(tmp_path):
    fields = {
        name: value + 0.123456 for name, value in SCHOOLS.fields.items()
    }  # like no other number
    nodes = nodes_of(replace(SCHOOLS, fields=fields), PLAN, tmp_path)
    found = run_on(nodes, PLAN, tmp_path)
    for node, posterior in zip(nodes, posteriors(nodes), strict=True):
        assert posterior.sample(10)["theta"].shape == (10, len(node.federation))
    assert not found.posterior.local_params
    assert set(found.sample(10)) == {"mu", "tau"}
    at_server = (tmp_path / "server.safetensors").read_bytes()
    for value in fields.values():
        assert not any(number.numpy().tobytes() in at_server for number in value)


def test_a_second_server_of_a_run_is_refused(tmp_path):
    """Such as one whose SuperLink was killed, and that has not noticed."""
    nodes, refused = nodes_of(SCHOOLS, PLAN, tmp_path), []

    def another(done):
        with pytest.raises(BlockingIOError, match="another process has the run of .*server"):
            run_on(nodes, PLAN, tmp_path)
        refused.append(done.number)

    found = run_on(nodes, PLAN, tmp_path, callbacks=[another])
    assert refused == [1, 2, 3] and set(found.absent.values()) == {0}
    run_on(nodes, PLAN, tmp_path)  # which has ended: nobody has it any more
