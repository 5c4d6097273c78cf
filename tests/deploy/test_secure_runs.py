"""Secure sums in a run: the same fit, of which the server sees sums; dropouts, kills, and the noise of privacy."""

import math
from dataclasses import replace

import pytest
import torch

import bayesfed as bf
from bayesfed import datasets
from bayesfed.deploy import secure
from bayesfed.deploy.institutions import Patience
from bayesfed.deploy.messages import Ask, MessageError, Open, Refusal, Reply, pack, unpack
from bayesfed.deploy.node import Node
from bayesfed.deploy.server import run_server
from bayesfed.deploy.transport import Carrier
from bayesfed.engine.stopping import convergence
from bayesfed.guides.fisher import prior_units
from bayesfed.output.correction import correct
from bayesfed.output.fitted import CorrectionResult
from bayesfed.output.log_densities import sum_log_weights
from bayesfed.rules.observed_information import PRECISE
from tests.deploy import runs_over_nodes as deployed
from tests.deploy.in_process import nodes_of
from tests.deploy.runs_over_nodes import Wire, fitted, same

SCHOOLS = datasets.eight_schools()
PLAN = replace(deployed.PLAN, secure=True)
PRIVATE = replace(PLAN, privacy=bf.Privacy(clip=1.0, noise=1e-6), honest=2)


def acquainted(nodes):
    """Each has the public keys of all."""
    pinned = {node.name: secure.public_key(node.identity) for node in nodes}
    for node in nodes:
        node.pinned = pinned
    return nodes


def in_process(plan=PLAN):
    settings = {"rounds": plan.rounds, "privacy": plan.privacy, "seed": plan.seed}
    return bf.fit(plan.model, SCHOOLS, plan.algorithm, **settings)


@pytest.fixture
def nodes(tmp_path):
    return acquainted(nodes_of(SCHOOLS, PLAN, tmp_path, 4))


def test_it_is_the_fit_in_one_process(nodes, tmp_path):
    found = fitted(Wire(nodes), PLAN, tmp_path)
    expected = in_process()
    same(found.params, expected.params)
    torch.testing.assert_close(
        found.posterior.history["elbo"], expected.history["elbo"], rtol=1e-5, atol=1e-4
    )


@pytest.mark.slow
def test_draws_of_theta_are_weighed_in_secure_sums_too(tmp_path):
    """What a node says of them is masked, and their sum is that of one process.

    With some seeds round-off chooses another centre of a proposal, and other draws with it.
    """
    plan = replace(PLAN, algorithm=bf.SFVI(), rounds=None, seed=1)
    at = Wire(acquainted(nodes_of(SCHOOLS, plan, tmp_path)))
    found, expected = fitted(at, plan, tmp_path), in_process(plan)
    assert found.posterior.correction.khat == pytest.approx(expected.correction.khat, abs=1e-3)
    for name, value in found.sample(200).items():
        torch.testing.assert_close(value, expected.sample(200)[name], rtol=1e-3, atol=1e-3)
    told = [unpack(r)[1] for _, p, r in at.heard if unpack(p)[0].kind == "evaluate"]
    assert told and all(set(parts) == {"masked"} for parts in told)


def test_draws_at_which_data_are_impossible_have_no_weight(tmp_path, monkeypatch):
    """A secure sum is of finite numbers."""

    def impossible(posterior, theta, count, *rest, **how):
        found = sum_log_weights(posterior, theta, count, *rest, **how)
        return found.where(theta["global"][:, 0, 0, 0] < 0.5, -torch.inf)

    monkeypatch.setattr("bayesfed.deploy.node_run.sum_log_weights", impossible)
    runs = {}
    for kind, secret in (("secure", True), ("plain", False)):
        plan = replace(PLAN, algorithm=bf.SFVI(), rounds=None, secure=secret)
        (tmp_path / kind).mkdir()
        at = Wire(acquainted(nodes_of(SCHOOLS, plan, tmp_path / kind)))
        runs[kind] = fitted(at, plan, tmp_path / kind).posterior.correction
    assert float(runs["plain"].theta["global"][:, 0, 0, 0].max()) < 0.5
    torch.testing.assert_close(runs["secure"].theta, runs["plain"].theta, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_rounds_go_on_after_secure_sums_that_say_nothing(tmp_path, monkeypatch):
    """These come after all rounds so far, and nodes do not mask for an earlier sum."""
    seen = []

    def says_nothing(posterior, sum_log_weights, **how):
        seen.append(correct(posterior, sum_log_weights, **how).reliable)
        return CorrectionResult(reliable=False)

    monkeypatch.setattr("bayesfed.deploy.server.correct", says_nothing)
    plan = replace(PLAN, algorithm=bf.SFVI(), rounds=None)
    found = fitted(Wire(acquainted(nodes_of(SCHOOLS, plan, tmp_path))), plan, tmp_path)
    expected = bf.fit(plan.model, SCHOOLS, bf.SFVI(corrected=False))
    assert len(seen) == convergence.TRIES + 1 and found.posterior.converged
    same(found.params, expected.params)


@pytest.mark.parametrize("algorithm", [bf.FedAvg(), bf.PFedMAP()], ids=str)
@pytest.mark.parametrize("secure_sums", [True, False], ids=["secure", "plain"])
def test_a_point_estimate_stops_by_itself_at_the_same_place(algorithm, secure_sums, tmp_path):
    """Without a number of rounds the server takes quasi-Newton steps."""
    plan = replace(PLAN, algorithm=algorithm, rounds=None, secure=secure_sums)
    found = fitted(Wire(acquainted(nodes_of(SCHOOLS, plan, tmp_path))), plan, tmp_path)
    expected = in_process(plan)
    assert found.posterior.converged and expected.converged
    for name, value in expected.params.items():
        torch.testing.assert_close(found.params[name], value, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_newton_steps_on_the_observed_information_end_at_the_same_place(tmp_path):
    """FedPop: draws of chains differ after round-off. Both ends have a standard error of 0.02 standard deviations."""
    plan = replace(PLAN, algorithm=bf.FedPop(), rounds=None)
    found = fitted(Wire(acquainted(nodes_of(SCHOOLS, plan, tmp_path))), plan, tmp_path)
    run = bf.start(plan.model, SCHOOLS, plan.algorithm)
    while not run.stopping.converged:
        bf.step(run)
    assert found.posterior.converged
    units, theta = prior_units(run.program), run.server["theta"]
    away = torch.cat([((found.params[n] - v) / units[n]).flatten() for n, v in theta.items()])
    length = torch.linalg.cholesky(run.server["newton"]["information"]).mT @ away.double()
    assert bool((length.abs() < 4 * 2**0.5 * PRECISE).all())


def test_no_upload_is_among_what_the_server_hears(nodes, tmp_path):
    """Nor in what it keeps: of each part there are words, which no two answers have in common."""
    at = Wire(nodes)
    fitted(at, PLAN, tmp_path)
    seen = set()
    for _, payload, reply in at.heard:
        if isinstance(unpack(payload)[0], Ask):
            message, parts = unpack(reply)
            assert isinstance(message, Reply) and set(parts) == {"masked", "sound"}
            for value in parts["masked"].values():
                assert value.dtype == torch.int64
                words = set(value.flatten().tolist())
                assert not words & seen
                seen |= words
    assert not (tmp_path / "server.safetensors.masked").exists()


def test_a_node_that_does_not_answer_costs_an_attempt(nodes, tmp_path):
    at, said, asked = Wire(nodes), [], {"count": 0}

    def silent(name, kind):
        asked["count"] += kind == "ask" and name == "node1"
        return kind == "ask" and name == "node1" and asked["count"] == 2

    at.silent = silent
    found = fitted(at, PLAN, tmp_path, said)
    assert found.posterior.history["clients"].tolist() == [8, 6, 8]
    assert any("3 of 4 institutions have answered, asking again" in line for line in said)


def test_of_two_nodes_there_is_no_sum(tmp_path):
    two = acquainted(nodes_of(SCHOOLS, PLAN, tmp_path, 2))
    with pytest.raises((TimeoutError, MessageError), match="2 institutions|fewer than 3"):
        fitted(Wire(two), PLAN, tmp_path, attempts=1)


@pytest.mark.parametrize("kind", ["ask", "open"])
def test_a_server_that_is_killed_goes_on(kind, nodes, tmp_path):
    """After the second round's uploads are in, and after its seals are told."""

    class Killed(Exception):
        pass

    at, count = Wire(nodes), {"count": 0}
    whole = at.carrier

    def exchange(messages, wait):
        found = whole.exchange(messages, wait)
        kinds = {unpack(payload)[0].kind for payload in messages.values()}
        count["count"] += kind in kinds
        if kind in kinds and count["count"] == 2:
            raise Killed
        return found

    patience = Patience(tuple(at.nodes), joining=1.0, seconds=5.0)
    file = tmp_path / "server.safetensors"
    with pytest.raises(Killed):
        run_server(Carrier(whole.reachable, exchange), PLAN, patience, file)
    found = run_server(whole, PLAN, patience, file)
    same(found.params, in_process().params)


def test_a_seal_is_told_of_one_attempt_only(nodes, tmp_path):
    at = Wire(nodes)
    at.silent = lambda name, kind: kind == "finish"
    with pytest.raises(TimeoutError):
        fitted(at, PLAN, tmp_path, attempts=1)
    name, payload, _ = next(h for h in at.heard if isinstance(unpack(h[1])[0], Open))
    message, _ = unpack(payload)
    early = message.model_copy(update={"round": message.round.model_copy(update={"number": 9})})
    for asked in (message, early):  # of an earlier round, and of one that never was
        refusal, _ = unpack(at.nodes[name].handle(pack(asked)))
        assert isinstance(refusal, Refusal)


def test_a_server_that_names_nodes_of_its_own_gets_nothing(nodes, tmp_path):
    """It puts a node that nobody has pinned into the roster."""
    at = Wire(nodes)
    heard = at.exchange

    def exchange(messages, wait):
        changed = {}
        for name, payload in messages.items():
            message, parts = unpack(payload)
            if isinstance(message, Ask):
                ghost = {"ghost": secure.public_key(secure.new_key())}
                roster = message.roster | {n: key.hex() for n, key in ghost.items()}
                payload = pack(message.model_copy(update={"roster": roster}), **parts)
            changed[name] = payload
        return heard(changed, wait)

    patience = Patience(tuple(at.nodes), joining=1.0, seconds=5.0, attempts=1)
    with pytest.raises(TimeoutError, match="fewer than 3"):
        run_server(Carrier(lambda: list(at.nodes), exchange), PLAN, patience, tmp_path / "s")
    log = (tmp_path / "node0" / "log.jsonl").read_text()
    assert "has no pinned key of ghost" in log


def test_the_noise_of_privacy_comes_from_the_nodes(tmp_path):
    """The server adds none, and is told nothing beside the sum."""
    nodes = acquainted(nodes_of(SCHOOLS, PRIVATE, tmp_path))
    at = Wire(nodes)
    found = fitted(at, PRIVATE, tmp_path)
    assert found.posterior.epsilon is not None and math.isfinite(found.posterior.epsilon)
    assert found.posterior.history["elbo"].isnan().all()
    same(found.params, in_process(PRIVATE).params, 1e-3)  # the noise is that small
    loud = replace(PRIVATE, privacy=bf.Privacy(clip=1.0, noise=1e3))
    other = acquainted(nodes_of(SCHOOLS, loud, tmp_path / "loud"))
    (tmp_path / "loud").mkdir(exist_ok=True)
    with pytest.warns(UserWarning, match="noise that privacy adds"):
        shaken = fitted(Wire(other), loud, tmp_path / "loud")
    moved = [float((shaken.params[n] - found.params[n]).abs().max()) for n in found.params]
    assert max(moved) > 0.1


def test_a_round_that_is_less_private_than_agreed_is_refused(tmp_path):
    node = acquainted(nodes_of(SCHOOLS, PRIVATE, tmp_path))[0]
    at = Wire([node])
    at.nodes |= {s.name: s for s in acquainted(nodes_of(SCHOOLS, PRIVATE, tmp_path))}
    fitted(at, PRIVATE, tmp_path)
    _, payload, _ = next(h for h in at.heard if isinstance(unpack(h[1])[0], Ask))
    message, parts = unpack(payload)
    later = message.round.model_copy(update={"number": 5})
    for change in ({"noisy": False}, {"roster": None}, {"clip": 9.0}):
        worse = pack(message.model_copy(update={"round": later} | change), **parts)
        refusal, _ = unpack(at.nodes["node0"].handle(worse))
        assert isinstance(refusal, Refusal)
        assert "as private as was agreed" in refusal.why or "the clip is 9.0" in refusal.why


def test_noise_under_secure_sums_needs_to_know_of_how_many_nodes():
    with pytest.raises(ValueError, match="honest is the number of institutions"):
        replace(PRIVATE, honest=None)
    with pytest.raises(ValueError, match="honest is the number of institutions"):
        replace(PLAN, honest=2)
    with pytest.raises(ValueError, match="honest is 0: noise needs at least one institution"):
        replace(PRIVATE, honest=0)
    with pytest.raises(ValueError, match="whoever has the seed can subtract"):
        replace(PRIVATE, privacy=bf.Privacy(clip=1.0, noise=1.0, seed=0))


def test_keys_are_their_owner_s_and_a_run_s_is_gone_in_the_end(nodes, tmp_path):
    fitted(Wire(nodes), PLAN, tmp_path)
    for node in nodes:
        assert (node.folder / "identity.key").stat().st_mode & 0o077 == 0
        assert not list((node.folder / "runs").glob("*/run.key"))
        again = Node(node.name, node.federation, PLAN, node.folder)
        assert again.identity == node.identity
