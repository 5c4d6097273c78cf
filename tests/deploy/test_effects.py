"""Effects between machines: the sums of institutions give the effects of one process, and of nothing else."""

from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch

import bayesfed as bf
from bayesfed.deploy.messages import Average, End, MessageError, Refusal, pack, unpack
from bayesfed.deploy.node_run import END
from bayesfed.deploy.plan import DeploymentPlan
from bayesfed.effects.agreed import effect, effects_of
from bayesfed.settings import EffectSettings
from tests.deploy.in_process import nodes_of
from tests.deploy.runs_over_nodes import Wire, fitted, kinds_of
from tests.deploy.test_secure_runs import acquainted

GENERATOR = torch.Generator().manual_seed(0)


def clinic(place):
    x = torch.randn(12, generator=GENERATOR)
    drug = (torch.rand(12, generator=GENERATOR) < 0.5).float()
    died = (torch.rand(12, generator=GENERATOR) < torch.sigmoid(0.5 * x - drug)).float()
    return {"x": x, "drug": drug, "urban": torch.full((12,), float(place % 2)), "died": died}


CLINICS = bf.Federation.from_arrays({f"clinic {i}": clinic(i) for i in range(6)})


def model(federation):
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    beta = pyro.sample("beta", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(mu, 0.5))
        with federation.observations() as obs:
            eta = a + beta[..., 0] * obs["x"] + beta[..., 1] * obs["drug"]
            pyro.sample("died", dist.Bernoulli(logits=eta), obs=obs.get("died"))


AGREED = (
    EffectSettings(variables={"drug": [0.0, 1.0]}, comparison="odds_ratio", num_samples=50),
    EffectSettings(variables={"x": 1.0}, by={"urban": [1.0, 0.0]}, num_samples=50),
    EffectSettings(
        kind="predictions",
        variables={"drug": [1.0]},
        at={"x": 0.0},
        level="average",
        num_samples=50,
    ),
    EffectSettings(
        kind="slopes",
        variables={"x": 0.1, "drug": 0.05},
        num_samples=50,
        hypotheses=["b1 > 0", "b2 - b1", "exp(beta[1]) < 0.8"],
    ),
)
PLAN = DeploymentPlan(model, bf.SFVI(local_steps=2), rounds=3, effects=AGREED)


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "secure"])
def test_they_are_those_of_one_process(secure, tmp_path):
    plan = replace(PLAN, secure=secure)
    at = Wire(acquainted(nodes_of(CLINICS, plan, tmp_path)))
    found = fitted(at, plan, tmp_path)
    posterior = bf.fit(plan.model, CLINICS, plan.algorithm, rounds=plan.rounds)
    whole = effects_of(posterior, AGREED, print)
    assert len(whole) == 5 and torch.equal(whole[3].draws, effect(posterior, AGREED[3]).draws)
    for expected, one in zip(whole, found.effects, strict=True):
        assert one.labels.equals(expected.labels)
        assert (one.estimand, one.level) == (expected.estimand, expected.level)
        close = torch.isclose(one.draws, expected.draws, rtol=1e-3, atol=1e-3).double().mean()
        assert (
            close > 0.98
        )  # resampled draws: a weight's last digits may choose the neighbour of one
    heard = [unpack(r)[1] for _, p, r in at.heard if unpack(p)[0].kind == "average"]
    assert len(heard) == 12
    assert all(set(parts) == {"masked" if secure else "sums"} for parts in heard)
    keys = list(tmp_path.glob("*/runs/*/run.key"))
    assert not keys, "the keys of the run are deleted"
    if not secure:  # all effects come in one exchange, and the draws on which they stand go with it
        evaluations = {p for n, p, _ in at.heard if n == "node0" and kinds_of(p) == ["evaluate"]}
        assert found.exchanges == 1 + plan.rounds + len(evaluations) + 2


def test_a_node_answers_what_it_has_agreed_to_and_only_when_it_has_the_final_posterior(tmp_path):
    nodes = nodes_of(CLINICS, PLAN, tmp_path)
    at = Wire(nodes)
    fitted(at, PLAN, tmp_path)
    run = next((tmp_path / "node0" / "runs").iterdir()).name

    def refused(node, message, **parts):
        answer, _ = unpack(node.handle(pack(message, **parts)))
        assert isinstance(answer, Refusal)
        return answer.why

    assert "no such effect was agreed on" in refused(nodes[0], Average(run=run, effect=4))
    asked = pack(Average(run=run, effect=0))
    before = nodes[0].handle(asked)
    nodes[0]._runs.clear()  # as after a restart
    assert nodes[0].handle(asked) == before
    nodes[0]._runs.clear()
    (tmp_path / "node0" / "runs" / run / END).unlink()  # as if it had ended before the message came
    assert "End comes first" in refused(nodes[0], Average(run=run, effect=0))
    ended = next(p for _, p, _ in at.heard if isinstance(unpack(p)[0], End))
    nodes[0].handle(ended)
    assert nodes[0].handle(asked) == before
    assert unpack(before)[1]["sums"]["weight"].tolist() == [[24.0], [24.0]]


def test_an_effect_that_an_institution_cannot_compute_is_left_out(tmp_path):
    other = EffectSettings(variables={"x": 1.0}, by={"urban": [1.0]}, num_samples=50)
    plan = replace(PLAN, effects=(other, AGREED[0]))
    lines = []
    found = fitted(Wire(nodes_of(CLINICS, plan, tmp_path)), plan, tmp_path, lines)
    assert found.effects[0] is None and found.effects[1] is not None
    assert any(line.startswith("effect 1 is left out: ") for line in lines)


def test_an_institution_that_agreed_to_other_effects_takes_no_part(tmp_path):
    nodes = nodes_of(CLINICS, PLAN, tmp_path)
    nodes[1].plan = replace(PLAN, effects=AGREED[:1])
    with pytest.raises(MessageError, match="effects"):
        fitted(Wire(nodes), PLAN, tmp_path)


def test_a_variable_that_no_field_is_comes_before_the_first_round(tmp_path):
    plan = replace(PLAN, effects=(EffectSettings(variables={"age": 1.0}),))
    at = Wire(nodes_of(CLINICS, plan, tmp_path))
    with pytest.raises(KeyError, match="unknown field 'age'"):
        fitted(at, plan, tmp_path)
    assert {unpack(p)[0].kind for _, p, _ in at.heard} == {"hello"}


def test_sums_without_noise_do_not_go_with_privacy():
    with pytest.raises(ValueError, match="their sums have no noise"):
        replace(PLAN, privacy=bf.Privacy(clip=1.0, noise=1.0))
    with pytest.raises(ValueError, match='level is "clients" or "average"'):
        replace(PLAN, effects=(EffectSettings(variables={"x": 1.0}, level="new"),))


def test_hypotheses_and_slopes_beside_the_logistic_function():
    """A slope of a logistic model is the mean of p (1 - p) beta, and a hypothesis a share of draws."""
    posterior = bf.fit(model, CLINICS, bf.SFVI(local_steps=2), rounds=2)
    _, _, _, slopes, tested = effects_of(posterior, AGREED, print)
    draws, rows = posterior.sample(50), CLINICS
    eta = draws["a"][:, rows.owner] + draws["beta"][:, :1] * rows["x"]
    p = torch.sigmoid(eta + draws["beta"][:, 1:] * rows["drug"]).double()
    expected = (p * (1 - p)).mean(1, keepdim=True) * draws["beta"].double()
    torch.testing.assert_close(slopes.draws, expected, rtol=5e-3, atol=1e-4)
    table = tested.to_frame()
    assert table["probability"][0] == pytest.approx(float((expected[:, 0] > 0).double().mean()))
    share = float((draws["beta"][:, 1].exp() < 0.8).double().mean())
    assert table["probability"][2] == pytest.approx(share)


@pytest.mark.parametrize("step", [0.0, [0.0, 1.0], "a"])
def test_the_step_of_a_slope_is_a_number(step):
    with pytest.raises(ValueError, match="the step of its derivative, above 0"):
        EffectSettings(kind="slopes", variables={"x": step})


def test_a_hypothesis_that_cannot_be_read_is_reported(tmp_path):
    wrong = EffectSettings(variables={"x": 1.0}, num_samples=50, hypotheses=["gamma > 0"])
    plan = replace(PLAN, effects=(wrong,))
    lines = []
    found = fitted(Wire(nodes_of(CLINICS, plan, tmp_path)), plan, tmp_path, lines)
    assert len(found.effects) == 1 and found.effects[0] is not None
    assert any("hypotheses are left out: no variable 'gamma'" in line for line in lines)
