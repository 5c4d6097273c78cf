"""Chains between machines: those of one process, also in secure sums and if all are killed; refused under privacy."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import bayesfed as bf
from bayesfed import datasets
from bayesfed.cli.deployment import draws_dataset
from bayesfed.deploy.bundles import split
from bayesfed.deploy.institutions import Patience
from bayesfed.deploy.messages import MoveChains, Refusal, pack, unpack
from bayesfed.deploy.server import run_server
from bayesfed.deploy.transport import Carrier
from bayesfed.guides.family import GLOBAL
from bayesfed.output import chains, client_chains, trajectories
from bayesfed.output.fitted import Correction, CorrectionResult
from tests.deploy import runs_over_nodes as deployed
from tests.deploy.in_process import nodes_of
from tests.deploy.runs_over_nodes import Wire, fitted, posteriors
from tests.deploy.test_secure_runs import acquainted
from tests.output.test_chains import without_locals

SCHOOLS = datasets.eight_schools()
PLAN = replace(deployed.PLAN, algorithm=bf.SFVI(local_steps=2), rounds=8, chains=True)


@pytest.fixture(scope="module", autouse=True)
def short():
    """Chains that are over after twenty trajectories."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (chains, client_chains, trajectories):
            patch.setattr(module, "WARMUP", (4, 6))
        patch.setattr(chains, "BLOCK", 10)
        patch.setattr(chains, "ENOUGH", 1)
        patch.setattr(chains, "QUANTILE", 100.0)
        patch.setattr(chains, "LARGEST_RHAT", 2.0)
        yield


@pytest.fixture(scope="module")
def in_one_process(short):
    """The chains of one process that start at the same q."""
    alone = bf.fit(PLAN.model, SCHOOLS, bf.SFVI(corrected=False, local_steps=2), rounds=8)
    return chains.sample_chains(alone)


@pytest.fixture
def uneven(monkeypatch):
    """Importance weights are too uneven."""
    fails = CorrectionResult(reliable=False)
    monkeypatch.setattr("bayesfed.deploy.server.correct", lambda *_, **__: fails)


def same_chains(found, expected):
    """Up to the last digits of the sums, which may decide whether a chain accepts a trajectory."""
    z = found.posterior.correction.theta[GLOBAL][:, 0, 0].unflatten(0, (-1, len(expected.z)))
    differ = (z.transpose(0, 1) - expected.z).abs().amax((1, 2)) > 1e-2
    assert differ.double().mean() < 0.1
    assert found.posterior.correction.rhat == pytest.approx(expected.rhat, abs=0.01)


def test_they_are_those_of_one_process(in_one_process, uneven, tmp_path):
    nodes, lines = nodes_of(SCHOOLS, PLAN, tmp_path), []
    at = Wire(nodes)
    found = fitted(at, PLAN, tmp_path, lines)
    same_chains(found, in_one_process)
    steps = [unpack(p)[0] for name, p, _ in at.heard if name == "node0"]
    asked = sum(isinstance(message, MoveChains) for message in steps)
    assert found.chain_exchanges == asked == in_one_process.gradients
    assert f"{asked} exchanges of chains" in repr(found)
    assert f"at most {chains.most_gradients(found.posterior):,} exchanges" in lines[0]
    assert found.caveat == "8 rounds are too few to tell whether the fit has converged"
    for posterior in posteriors(nodes):
        assert posterior.correction.chains == 64
        assert posterior.correction.rhat == found.posterior.correction.rhat
        assert torch.equal(posterior.sample(128)["mu"], found.sample(128)["mu"])
    sent = [unpack(r)[1]["sums"] for _, p, r in at.heard if isinstance(unpack(p)[0], MoveChains)]
    shapes = {name: {tuple(one[name].shape) for one in sent} for name in sent[0]}
    assert shapes == {"gain": {(64,)}, "slope": {(64, 2)}}
    kept = draws_dataset(found, 300)
    assert (kept.sizes["chain"], kept.sizes["draw"]) == (64, 4)
    assert kept.attrs["chain_exchanges"] == asked
    expected = found.sample(256)["mu"].reshape(4, 64).T
    np.testing.assert_array_equal(kept["mu"].values, expected)
    assert not list(tmp_path.glob("node*/runs/*/chains.safetensors"))


@pytest.mark.slow
def test_all_that_are_killed_in_secure_chains_go_on(in_one_process, tmp_path):
    """At a request, at an answer, and between a sum and its seals."""

    class Killed(Exception):
        pass

    plan, heard = replace(PLAN, secure=True), {"count": 0}
    stops = {15: "request", 30: "seals", 45: "answer"}

    def carrier():
        at = Wire(acquainted(nodes_of(SCHOOLS, plan, tmp_path)))

        def exchange(messages, wait):
            message = next((unpack(split(p)[-1])[0] for p in messages.values()), None)
            heard["count"] += isinstance(message, MoveChains)
            kind = "seals" if getattr(message, "kind", "") == "open" else "request"
            if stops.get(heard["count"]) == kind and stops.pop(heard["count"]):
                raise Killed
            found = at.exchange(messages, wait)
            if stops.get(heard["count"]) == "answer" and stops.pop(heard["count"]):
                raise Killed
            return found

        return Carrier(lambda: list(at.nodes), exchange)

    patience = Patience(("node0", "node1", "node2"), joining=1.0, seconds=1.0, attempts=2)
    for _ in range(3):
        with pytest.raises(Killed):
            run_server(carrier(), plan, patience, tmp_path / "s.safetensors")
    found = run_server(carrier(), plan, patience, tmp_path / "s.safetensors")
    assert not stops
    same_chains(found, in_one_process)
    assert found.chain_exchanges == 2 * in_one_process.gradients


def test_without_them_the_caveat_names_what_they_would_mend(uneven, tmp_path):
    plan = replace(PLAN, chains=False)
    found = fitted(Wire(nodes_of(SCHOOLS, plan, tmp_path)), plan, tmp_path)
    assert "importance weights are too uneven" in found.caveat
    assert "chains = true under [deployment]" in found.caveat
    tried = replace(found, chain_exchanges=3000)
    assert "chains have not mixed in 3,000 exchanges" in tried.caveat
    infinite = Correction(found.sample(4000), 0.57, ess=500.0)
    corrected = replace(found.posterior, correction=infinite, correctable=True)
    caveat = replace(found, posterior=corrected).caveat
    assert "Pareto k 0.57 > 0.5" in caveat and "effective sample size of 500" in caveat
    assert "chains = true under [deployment]" in caveat
    for good in (replace(infinite, khat=0.46), replace(infinite, ess=1000.0)):
        low = replace(corrected, correction=good, converged=True, moving={})
        low = replace(found, posterior=replace(low, rising=0.0))
        assert not low.caveat
    assert "chains have not mixed in 6,000" in replace(low, chain_exchanges=6000).caveat
    flawed = replace(found.posterior, moving={"mu": 2.0}, rising=0.0, converged=False)
    both = replace(found, posterior=flawed).caveat
    assert "not converged after 8 rounds" in both
    assert "too uneven" in both


def test_where_they_are_refused(tmp_path):
    with pytest.raises(ValueError, match="deployment.chains: the sums of chains are of the"):
        replace(PLAN, privacy=bf.Privacy(clip=1.0))
    with pytest.raises(ValueError, match="FedAvg does not correct draws"):
        replace(PLAN, algorithm=bf.FedAvg())
    plan = replace(PLAN, model=without_locals)
    data = bf.Federation.from_arrays({n: {"y": [0.1, 0.2]} for n in "xyz"})
    with pytest.raises(ValueError, match="clients whose variables have one Gaussian"):
        fitted(Wire(nodes_of(data, plan, tmp_path)), plan, tmp_path)


def test_a_node_takes_the_steps_that_follow(uneven, tmp_path):
    """Any other is refused, and changes nothing."""
    nodes = nodes_of(SCHOOLS, PLAN, tmp_path, 1)
    at = Wire(nodes)
    at.silent = lambda name, kind: kind == "move_chains"
    with pytest.raises(TimeoutError):
        fitted(at, PLAN, tmp_path, attempts=1)
    run = next((tmp_path / "node0" / "runs").iterdir()).name
    z, taken = torch.zeros(4, 2), torch.ones(4, dtype=torch.bool)
    right = {"z": z, "taken": taken, "key": torch.tensor(1)}

    def asked(iteration, step, **other):
        message = MoveChains(run=run, iteration=iteration, step=step, size=0.1)
        return unpack(nodes[0].handle(pack(message, chains=right | other)))

    def refused(*args, **other):
        message, _ = asked(*args, **other)
        assert isinstance(message, Refusal)
        return message.why

    assert "does not follow the last one here" in refused(1, 0)
    assert "the global vectors of chains are up to 64 × 2" in refused(0, 0, z=torch.zeros(4, 3))
    assert "or not" in refused(0, 0, taken=torch.ones(3, dtype=torch.bool))
    assert "come with a key" in refused(0, 0, key=torch.ones(2, dtype=torch.int64))
    assert "has the tensors" in refused(0, 0, more=z)
    assert asked(0, 0)[0].kind == "chain_sums"
    first = asked(1, 0)[1]["sums"]["gain"]
    assert "does not follow" in refused(1, 2)
    assert "does not follow" in refused(3, 0)
    assert "there are 4 chains, not 5" in refused(
        1, 1, z=torch.zeros(5, 2), taken=torch.ones(5, dtype=torch.bool)
    )
    asked(1, 1)
    assert torch.equal(asked(1, 0)[1]["sums"]["gain"], first)
    nodes[0].plan = replace(PLAN, chains=False)
    assert "no chains were agreed on" in refused(1, 1)
