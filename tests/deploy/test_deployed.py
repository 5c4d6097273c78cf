"""A fit over nodes is the fit in one process; what is killed, absent or hostile changes nothing that was accepted."""

import math
from dataclasses import replace

import pytest
import torch

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.deploy import institutions, server_program
from bayesfed.deploy.bundles import join, split
from bayesfed.deploy.institutions import Expected, Patience
from bayesfed.deploy.messages import (
    Ask,
    Begin,
    Finish,
    Hello,
    MessageError,
    Refusal,
    Reply,
    Schema,
    pack,
    unpack,
    unpack_as,
)
from bayesfed.deploy.node import Node
from bayesfed.deploy.plan import DeploymentPlan
from bayesfed.deploy.server import run_server
from bayesfed.deploy.transport import Carrier
from bayesfed.engine.stopping import convergence
from bayesfed.output.correction import CorrectionResult, correct
from bayesfed.rules import MedianOfInstitutions
from bayesfed.rules.natural_gradient import fade
from tests.deploy.in_process import divided, nodes_of, run_on

SCHOOLS = datasets.eight_schools()
EAGER = bf.Execution(compile=False)
PLAN = DeploymentPlan(
    models.eight_schools, bf.SFVI(corrected=False, local_steps=2), rounds=3, execution=EAGER
)
SHORT = replace(PLAN, rounds=2)


@pytest.fixture(scope="module")
def in_one_process():
    """The fit in one process."""
    return bf.fit(PLAN.model, SCHOOLS, PLAN.algorithm, rounds=3, execution=EAGER)


def posteriors(nodes):
    return [
        bf.Posterior.load(
            next((node.folder / "runs").glob("*/posterior.safetensors")),
            node.plan.model,
            node.federation,
        )
        for node in nodes
    ]


def same(found, expected, tolerance=1e-5):
    """Up to the order of sums in single precision."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "plan",
    [
        # seeds whose weights are even enough without chains, which nodes do not run, and with few proposals: further
        # ones lie around resampled draws, whose choice stands on the last digits
        pytest.param(
            replace(PLAN, algorithm=bf.SFVI(), rounds=None, seed=1), marks=pytest.mark.slow
        ),
        replace(PLAN, clients_per_round=0.5, rounds=6),
        replace(PLAN, algorithm=bf.PVI(), seed=3),
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
    plan = replace(PLAN, algorithm=bf.SFVI(), rounds=None)
    nodes = nodes_of(SCHOOLS, plan, tmp_path)
    found = run_on(nodes, plan, tmp_path)
    expected = bf.fit(plan.model, SCHOOLS, bf.SFVI(corrected=False))
    assert seen == [True] * (convergence.TRIES + 1) and found.posterior.converged
    same(found.params, expected.params)
    assert {len(own.history["elbo"]) for own in posteriors(nodes)} == {
        len(expected.history["elbo"])
    }


def test_nodes_look_closely_where_they_are_asked_to(tmp_path, monkeypatch):
    """Any noise of their weights being too much, the corrected draws of θ and of each node's clients are the same."""
    monkeypatch.setattr("bayesfed.output.correction.QUIET", -1.0)
    monkeypatch.setattr("bayesfed.deploy.node_run.QUIET", -1.0)
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


class Wire:
    """A carrier that can be cut, changed and listened to."""

    def __init__(self, nodes):
        self.nodes = {node.name: node for node in nodes}
        self.changed = {}
        self.silent = lambda name, kind: False
        self.late = lambda name, kind: False
        self.heard = []
        self.under_way = {}

    def exchange(self, messages, wait):
        if not messages:
            return {}
        found = {at: reply for at, reply in self.under_way.items() if at not in messages}
        self.under_way = {}
        for at, payload in messages.items():
            asked, kinds = split(payload), kinds_of(payload)
            silent = [self.silent(at, kind) for kind in kinds]
            if any(silent):  # it dies at the first such message of a bundle
                for one in asked[: silent.index(True)]:
                    self.nodes[at].handle(one)
                continue
            replies = split(self.nodes[at].handle(payload))
            self.heard += [(at, *pair) for pair in zip(asked, replies, strict=False)]
            if any([self.late(at, kind) for kind in kinds]):
                self.under_way[at] = join(replies)
                continue
            changes = [self.changed.get((at, kind), lambda r: r) for kind in kinds]
            found[at] = join([of(one) for of, one in zip(changes, replies, strict=False)])
        return found

    @property
    def carrier(self):
        return Carrier(lambda: list(self.nodes), self.exchange)


def fitted(at, plan, folder, said=None, **patience):
    waited = {"joining": 1.0, "seconds": 5.0} | patience
    lines = [] if said is None else said
    found = Patience(tuple(at.nodes), **waited)
    return run_server(at.carrier, plan, found, folder / "server.safetensors", report=lines.append)


def kinds_of(payload):
    """The kinds of the messages of an exchange."""
    return [unpack(one)[0].kind for one in split(payload)]


def asked_of(at):
    """The first question that a node was asked, and its answer."""
    return next((n, p, r) for n, p, r in at.heard if isinstance(unpack(p)[0], Ask))


def test_the_same_question_has_the_same_bytes_also_after_a_restart(tmp_path):
    nodes = nodes_of(SCHOOLS, PLAN, tmp_path)
    at = Wire(nodes)
    at.silent = lambda name, kind: kind == "finish"
    with pytest.raises(TimeoutError, match="does not answer"):
        fitted(at, PLAN, tmp_path, attempts=1)
    name, question, reply = [h for h in at.heard if isinstance(unpack(h[1])[0], Ask)][-1]
    assert at.nodes[name].handle(question) == reply
    again = Node(name, at.nodes[name].federation, PLAN, tmp_path / name)
    assert again.handle(question) == reply
    message, parts = unpack(question)
    other = pack(message.model_copy(update={"rate": 0.5}), **parts)
    refusal, _ = unpack(again.handle(other))
    assert isinstance(refusal, Refusal) and "answered once" in refusal.why


def test_what_was_not_accepted_is_forgotten(in_one_process, tmp_path):
    """A second attempt at a round finds the clients as they were."""
    node = nodes_of(SCHOOLS, PLAN, tmp_path, 1)[0]
    at = Wire([node])
    lost = {"count": 0}

    def swallow(reply):
        lost["count"] += 1
        return pack(Refusal(why="lost")) if lost["count"] in (2, 3) else reply

    at.changed = {("node0", "ask"): swallow}
    found = fitted(at, PLAN, tmp_path)
    same(found.params, in_one_process.params)
    assert lost["count"] == 5 and found.refused == {"node0": 2}


@pytest.mark.parametrize("when", [3, 5])
def test_all_that_are_killed_at_once_go_on(in_one_process, when, tmp_path):
    """Server and nodes, as in a power cut, at the nth exchange of messages."""

    class Killed(Exception):
        pass

    count = {"count": 0}

    def carrier():
        at = Wire(nodes_of(SCHOOLS, PLAN, tmp_path))

        def exchange(messages, wait):
            count["count"] += 1
            found = at.exchange(messages, wait)
            if count["count"] == when:
                raise Killed
            return found

        return Carrier(lambda: list(at.nodes), exchange)

    patience = Patience(("node0", "node1", "node2"), joining=1.0, seconds=1.0, attempts=2)
    with pytest.raises(Killed):
        run_server(carrier(), PLAN, patience, tmp_path / "s.safetensors")
    found = run_server(carrier(), PLAN, patience, tmp_path / "s.safetensors")
    same(found.params, in_one_process.params)


def test_a_question_that_comes_after_a_later_one_puts_nothing_back(in_one_process, tmp_path):
    """Flower may deliver a first attempt when the second has been answered, and taken by the server."""
    node = nodes_of(SCHOOLS, PLAN, tmp_path, 1)[0]
    at, first, stale = Wire([node]), [], []
    honest = at.exchange

    def exchange(messages, wait):
        asks = [p for b in messages.values() for p in split(b) if isinstance(unpack(p)[0], Ask)]
        if asks and not first:
            first.extend(asks)
            return {}  # it is under way for long
        found = honest(messages, wait)
        if asks and len(stale) < 2:
            stale.append(unpack(node.handle(first[0]))[0])
        return found

    at.exchange = exchange
    found = fitted(at, PLAN, tmp_path)
    same(found.params, in_one_process.params)
    assert found.refused == {"node0": 0}
    assert [type(reply) for reply in stale] == [Refusal, Refusal]
    assert "which was answered" in stale[0].why


@pytest.mark.parametrize("when", [1, 2, pytest.param(3, marks=pytest.mark.slow), 5])
def test_a_server_that_is_killed_goes_on(in_one_process, when, tmp_path):
    """At its nth exchange of messages: before or after what it has sent has arrived."""

    class Killed(Exception):
        pass

    nodes = nodes_of(SCHOOLS, PLAN, tmp_path)
    at, count = Wire(nodes), {"count": 0}
    whole = at.carrier

    def exchange(messages, wait):
        count["count"] += 1
        found = whole.exchange(messages, wait)
        if count["count"] == when:
            raise Killed
        return found

    patience = Patience(tuple(at.nodes), joining=1.0, seconds=5.0)
    with pytest.raises(Killed):
        run_server(Carrier(whole.reachable, exchange), PLAN, patience, tmp_path / "s.safetensors")
    found = run_server(whole, PLAN, patience, tmp_path / "s.safetensors")
    same(found.params, in_one_process.params)


def test_a_node_that_is_started_anew_after_each_message_changes_nothing(in_one_process, tmp_path):
    parts = divided(SCHOOLS, 3)

    def exchange(messages, wait):
        return {
            at: Node(at, parts[at], PLAN, tmp_path / at, EAGER).handle(payload)
            for at, payload in messages.items()
        }

    patience = Patience(tuple(parts), joining=1.0)
    found = run_server(
        Carrier(lambda: list(parts), exchange), PLAN, patience, tmp_path / "server.safetensors"
    )
    same(found.params, in_one_process.params)


def test_a_node_that_does_not_answer_is_left_out_of_the_round(tmp_path):
    nodes, said = nodes_of(SCHOOLS, PLAN, tmp_path), []
    at, rounds = Wire(nodes), {"count": 0}

    def silent(name, kind):
        rounds["count"] += kind == "ask" and name == "node1"
        return name == "node1" and kind == "ask" and rounds["count"] == 2

    at.silent = silent
    found = fitted(at, PLAN, tmp_path, said)
    assert found.absent == {"node0": 0, "node1": 1, "node2": 0}
    assert found.posterior.history["clients"].tolist() == [8, 6, 8]
    assert any("'node1' has not answered" in line for line in said)


def test_a_round_waits_for_the_fewest_that_are_enough(in_one_process, tmp_path):
    at = Wire(nodes_of(SCHOOLS, PLAN, tmp_path))
    at.silent = lambda name, kind: name != "node0" and kind == "ask"
    with pytest.raises(TimeoutError, match="fewer than 2 institutions have answered, 3 times"):
        fitted(at, PLAN, tmp_path, minimum=2, attempts=3)
    at.silent = lambda name, kind: False
    found = fitted(at, PLAN, tmp_path, minimum=2)
    same(found.params, in_one_process.params)


def test_the_end_waits_for_a_node_that_is_started_again(in_one_process, tmp_path):
    """It is away for longer than as many messages as attempts."""
    at, away = Wire(nodes_of(SCHOOLS, PLAN, tmp_path)), {"left": 5}

    def silent(name, kind):
        gone = name == "node1" and away["left"] > 0 and (kind == "finish" or away["left"] < 5)
        away["left"] -= gone
        return gone

    at.silent = silent
    found = fitted(at, PLAN, tmp_path, attempts=2)
    assert not away["left"]
    same(found.params, in_one_process.params)


def changed(part, change):
    def of(reply):
        message, parts = unpack(reply)
        parts[part] = {name: change(value) for name, value in parts[part].items()}
        return pack(message, **parts)

    return of


def replayed(reply, kept=[]):  # noqa: B006
    kept.append(reply)
    return kept[0]


HOSTILE = {
    "not finite": (changed("total", lambda v: v * math.nan), "is not finite"),
    "absurdly large": (changed("total", lambda v: v * 1e6), "the institutions' median is"),
    "misshapen": (changed("total", lambda v: v.flatten()[:1]), "in place of"),
    "of another type": (changed("total", lambda v: v.double()), "in place of"),
    "too few clients": (changed("sound", lambda v: v[:-1]), "in place of"),
    "without its upload": (lambda r: pack(unpack(r)[0]), "lacks"),
    "another round's": (replayed, "round 0 came in place of"),
    "rubbish": (lambda r: b"\x80\x04" + r, "not a whole safetensors file"),
    "nothing": (lambda r: b"", "not a whole safetensors file"),
    "another kind": (lambda r: pack(Hello()), "of kind hello"),
}


@pytest.fixture(scope="module")
def without_node1(tmp_path_factory):
    """θ of a run in which it says nothing."""
    folder = tmp_path_factory.mktemp("alone")
    at = Wire(nodes_of(SCHOOLS, SHORT, folder, 4))
    at.silent = lambda name, kind: name == "node1" and kind == "ask"
    return fitted(at, SHORT, folder).params


@pytest.mark.parametrize("what", HOSTILE)
def test_what_a_hostile_node_sends_is_refused_and_moves_nothing(what, without_node1, tmp_path):
    """The run is that of the other nodes, to the last bit."""
    change, why = HOSTILE[what]
    nodes, said = nodes_of(SCHOOLS, SHORT, tmp_path, 4), []
    at = Wire(nodes)
    at.changed = {("node1", "ask"): change}
    found = fitted(at, SHORT, tmp_path, said)
    times = 1 if what == "another round's" else 2
    assert found.refused == {"node0": 0, "node1": times, "node2": 0, "node3": 0}
    assert any("refused what institution 'node1' sent" in line and why in line for line in said), (
        said
    )
    if what != "another round's":
        same(found.params, without_node1, 0.0)


def test_an_upload_longer_than_its_clip_is_refused(tmp_path):
    plan = replace(PLAN, privacy=bf.Privacy(clip=0.2))
    nodes, said = nodes_of(SCHOOLS, plan, tmp_path), []
    at = Wire(nodes)
    at.changed = {("node1", "ask"): changed("total", lambda v: v * 30)}
    assert fitted(at, plan, tmp_path, said).refused["node1"] == 3
    assert any("clients it can be" in line for line in said)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (replace(PLAN, seed=1), "seed is 1 here and 0 there"),
        (
            replace(PLAN, algorithm=bf.SFVI(lr=0.5, corrected=False, local_steps=2)),
            "algorithm.lr is 0.5 here",
        ),
        (replace(PLAN, algorithm=bf.PVI()), "algorithm"),
        (replace(PLAN, privacy=bf.Privacy(clip=1.0)), "privacy is"),
    ],
)
def test_a_node_that_agreed_to_something_else_refuses(other, why, tmp_path):
    nodes = nodes_of(SCHOOLS, PLAN, tmp_path)
    nodes[1] = Node("node1", nodes[1].federation, other, tmp_path / "node1")
    with pytest.raises(
        MessageError, match=rf"institution 'node1': another run was agreed on: .*{why}"
    ):
        fitted(Wire(nodes), PLAN, tmp_path)


def test_a_node_with_another_model_is_named(tmp_path):
    import pyro
    import pyro.distributions as dist

    def wider(federation):
        mu = pyro.sample("mu", dist.Normal(0.0, 6.0))
        tau = pyro.sample("tau", dist.HalfCauchy(5.0))
        with federation.clients():
            theta = pyro.sample("theta", dist.Normal(mu, tau))
            with federation.observations() as obs:
                pyro.sample("y", dist.Normal(theta, obs["sigma"]), obs=obs.get("y"))

    nodes = nodes_of(SCHOOLS, PLAN, tmp_path)
    nodes[2] = Node("node2", nodes[2].federation, replace(PLAN, model=wider), tmp_path / "node2")
    at = Wire(nodes)
    with pytest.raises(
        MessageError, match="institution 'node2': its model is not the server's: the prior of 'mu'"
    ):
        fitted(at, PLAN, tmp_path)
    sent = [(name, unpack(reply)[0].kind) for name, _, reply in at.heard]
    assert ("node1", "reply") in sent and ("node2", "reply") not in sent


def test_the_first_round_begins_the_run_and_the_end_is_one_exchange(tmp_path):
    """At all institutions, also those that have no client in its cohort."""
    plan = replace(PLAN, rounds=2, clients_per_round=1)
    at, exchanges = Wire(nodes_of(SCHOOLS, plan, tmp_path)), []

    def exchange(messages, wait):
        exchanges.append([kinds_of(messages[name]) for name in sorted(messages)])
        return at.exchange(messages, wait)

    patience = Patience(tuple(at.nodes), joining=1.0, seconds=5.0)
    carrier = Carrier(lambda: list(at.nodes), exchange)
    found = run_server(carrier, plan, patience, tmp_path / "server.safetensors")
    assert [len(one) for one in exchanges] == [3, 3, 1, 3]
    assert sorted(exchanges[1]) == [["begin"], ["begin"], ["begin", "ask"]]
    assert exchanges[2] == [["ask"]] and exchanges[3] == [["finish", "end"]] * 3
    assert found.exchanges == 4


def test_nodes_whose_data_do_not_fit_together_are_named(tmp_path):
    nodes = nodes_of(SCHOOLS, PLAN, tmp_path)
    part = nodes[1].federation
    fields = {"y": part["y"], "se": part["sigma"]}
    nodes[1] = Node("node1", replace(part, fields=fields), PLAN, tmp_path / "node1")
    with pytest.raises(
        MessageError, match="institution 'node0' has a field 'sigma', institution 'node1' has no"
    ):
        fitted(Wire(nodes), PLAN, tmp_path)
    nodes[1] = Node("node1", nodes[0].federation, PLAN, tmp_path / "node1")
    with pytest.raises(MessageError, match="'A' at institution 'node0' and at institution 'node1'"):
        fitted(Wire(nodes), PLAN, tmp_path)


def test_a_node_whose_rows_do_not_fit_the_model_says_no_more_than_that(tmp_path):
    """What is wrong with them stands in its own log."""
    nodes = nodes_of(SCHOOLS, PLAN, tmp_path)
    part = nodes[1].federation
    fields = dict(part.fields) | {"sigma": -part["sigma"]}
    nodes[1] = Node("node1", replace(part, fields=fields), PLAN, tmp_path / "node1")
    with pytest.raises(MessageError) as caught:
        fitted(Wire(nodes), PLAN, tmp_path)
    assert str(caught.value) == "institution 'node1' failed (ValueError): its log says why"
    log = (tmp_path / "node1" / "log.jsonl").read_text()
    assert "sigma" in log or "scale" in log


def test_a_missing_node_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(institutions, "SILENCE", 0.1)
    at, said = Wire(nodes_of(SCHOOLS, PLAN, tmp_path)), []
    at.silent = lambda name, kind: name == "node2"
    with pytest.raises(TimeoutError, match="institution 'node2' has not answered in 1 s"):
        fitted(at, PLAN, tmp_path, said)
    assert said == ["waiting for node2: at most 1 s"]


def test_a_node_out_of_step_says_so(tmp_path):
    """Its folder was put back to an earlier state, or the server's file was."""
    node = nodes_of(SCHOOLS, PLAN, tmp_path, 1)[0]
    at = Wire([node])
    fitted(at, PLAN, tmp_path)
    _, question, _ = asked_of(at)
    message, parts = unpack(question)
    late = message.model_copy(update={"round": message.round.model_copy(update={"number": 9})})
    refusal, _ = unpack(node.handle(pack(late, **parts)))
    assert isinstance(refusal, Refusal) and "Begin another run" in refusal.why


@pytest.mark.parametrize("run", ["../../etc", "", "a/b", "."])
def test_a_run_s_name_is_no_path(run, tmp_path):
    node = nodes_of(SCHOOLS, PLAN, tmp_path, 1)[0]
    with pytest.raises(ValueError):
        begin = Begin(run=run, terms=PLAN.description, clients=8, rows=8, cohort=8)
        unpack_as(node.handle(pack(begin)), Reply)
    assert not (tmp_path.parent / "etc").exists()


def test_the_log_says_what_left_the_node(tmp_path):
    import json

    node = nodes_of(SCHOOLS, PLAN, tmp_path, 1)[0]
    fitted(Wire([node]), PLAN, tmp_path)
    log = (tmp_path / "node0" / "log.jsonl").read_text()
    lines = [json.loads(line) for line in log.splitlines()]
    replies = [line for line in lines if line["message"].get("kind") == "reply"]
    assert len(replies) == 3 and all(line["bytes"] > 0 for line in replies)
    assert "total/global.loc" in replies[0]["tensors"] or "total" in str(replies[0]["tensors"])


def test_log_densities_are_not_told_under_privacy(tmp_path):
    plan = replace(PLAN, rounds=3, privacy=bf.Privacy(clip=1.0, noise=1e-6, seed=0))
    node = nodes_of(SCHOOLS, plan, tmp_path, 1)[0]
    at = Wire([node])
    found = fitted(at, plan, tmp_path)
    assert found.posterior.epsilon == math.inf
    said = [unpack(reply) for _, payload, reply in at.heard if isinstance(unpack(payload)[0], Ask)]
    assert all(not parts["elbo"]["terms"].any() for _, parts in said)
    assert isinstance(unpack(at.heard[-1][1])[0].kind, str)
    assert not [p for _, p, _ in at.heard if unpack(p)[0].kind == "evaluate"]


def test_the_schema_says_nothing_of_the_rows(tmp_path):
    node = nodes_of(SCHOOLS, PLAN, tmp_path, 1)[0]
    reply = node.handle(pack(Hello()))
    schema, parts = unpack_as(reply, Schema)
    assert not parts and schema.rows == 8 and set(schema.fields) == {"y", "sigma"}


def test_finish_before_begin_is_refused(tmp_path):
    node = nodes_of(SCHOOLS, PLAN, tmp_path, 1)[0]
    early = Finish(
        run="abc", accepted=None, done=0, epsilon=None, moving=None, rising=None, converged=None
    )
    with pytest.raises(MessageError, match="run 'abc' was not started here"):
        unpack_as(node.handle(pack(early)), Reply)


# -- who is late, and who joins late ---------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [PLAN.algorithm, bf.PVI()], ids=["SFVI", "PVI"])
def test_a_late_answer_counts_when_it_comes(algorithm, tmp_path):
    """Then the server's sum is of what the clients remember of their uploads, whichever were late."""
    plan = replace(PLAN, algorithm=algorithm, rounds=8)
    nodes = nodes_of(SCHOOLS, plan, tmp_path)
    at, said = Wire(nodes), []
    at.late = lambda name, kind: name == "node2" and kind == "ask"
    found = fitted(at, plan, tmp_path, said, max_staleness=2)
    assert found.absent == {"node0": 0, "node1": 0, "node2": 4}
    assert sum("has answered round" in line for line in said) == 4
    runs = [part.run for node in nodes for part in node._runs.values()]
    part = "factor" if algorithm.name == "PVI" else "quadratic"
    sent = [run.clients.tensors[part] for run in runs]
    if algorithm.name == "PVI":
        q, prior = runs[0].server.q, runs[0].server.prior
        known = {n: getattr(q, n) - getattr(prior, n) for n in sent[0]}
    else:
        known = dict(runs[0].server["quadratic"])
        level = known.pop("level")
        assert known["seen"] == len(SCHOOLS)
        sent = [own | fade(own, level) for own in sent]
    for name, value in known.items():
        of_clients = sum(own[name].sum(0) for own in sent)
        torch.testing.assert_close(value, of_clients.reshape(value.shape), rtol=1e-4, atol=1e-4)
    whole = bf.fit(PLAN.model, SCHOOLS, algorithm, rounds=8).sample(4000)["mu"]
    assert abs(found.sample(4000)["mu"].mean() - whole.mean()) < 0.3 * whole.std()


def test_a_late_answer_is_looked_at_as_one_in_time_is(tmp_path):
    nodes, said = nodes_of(SCHOOLS, replace(PLAN, rounds=4), tmp_path, 4), []
    at, honest = Wire(nodes), Wire(nodes_of(SCHOOLS, replace(PLAN, rounds=4), tmp_path / "h", 4))
    at.late = lambda name, kind: name == "node2" and kind == "ask"
    honest.silent = at.late
    heard = at.exchange

    def exchange(messages, wait):
        found = heard(messages, wait)
        for name in found.keys() - messages.keys():
            message, parts = unpack(found[name])
            larger = {n: 1e6 * (1 + v) for n, v in parts["total"].items()}
            found[name] = pack(message, **(parts | {"total": larger}))
        return found

    at.exchange = exchange
    found = fitted(at, replace(PLAN, rounds=4), tmp_path, said, max_staleness=2)
    assert found.refused["node2"] == 2 and any("its norm is" in line for line in said)
    expected = fitted(honest, replace(PLAN, rounds=4), tmp_path / "h")
    same(found.params, expected.params, 0)


def test_an_answer_that_is_too_late_moves_nothing(tmp_path):
    nodes = nodes_of(SCHOOLS, PLAN, tmp_path)
    at, alone = Wire(nodes), Wire(nodes_of(SCHOOLS, PLAN, tmp_path / "alone"))
    at.late = lambda name, kind: name == "node2" and kind == "ask"
    alone.silent = at.late
    found = fitted(at, PLAN, tmp_path)
    same(found.params, fitted(alone, PLAN, tmp_path / "alone").params, 0)
    assert found.absent["node2"] == 3


def test_a_round_goes_on_once_enough_have_answered(tmp_path):
    nodes = nodes_of(SCHOOLS, PLAN, tmp_path)
    at, waits = Wire(nodes), []

    def exchange(messages, wait):
        waits.append(wait)
        return at.exchange(messages, wait)

    patience = Patience(tuple(at.nodes), joining=1.0, seconds=5.0, enough=2, max_staleness=3)
    carrier = Carrier(lambda: list(at.nodes), exchange)
    run_server(carrier, PLAN, patience, tmp_path / "server.safetensors")
    assert [wait.enough for wait in waits if wait.enough] == [2] * PLAN.rounds
    assert {wait.stale_seconds for wait in waits if wait.enough} == {15.0}


@pytest.mark.parametrize(
    ("algorithm", "weight"),
    [
        (bf.FedAvg().replace(rule=MedianOfInstitutions()), lambda own: own.rows),
        (bf.FedABML().replace(rule=MedianOfInstitutions(by="clients")), len),
    ],
    ids=["by rows", "alike"],
)
def test_the_median_of_the_nodes_is_what_moves_the_server(algorithm, weight, tmp_path):
    """Against its definition, and whatever one node of three sends."""
    train, _ = datasets.digits(clients=7)
    plan = DeploymentPlan(models.Network(models.mlp(64, 10)), algorithm, 1, 1.0, 10)
    at = Wire(nodes_of(train, plan, tmp_path))
    found = fitted(at, plan, tmp_path)
    replies = [unpack(r) for _, p, r in at.heard if isinstance(unpack(p)[0], Ask)]
    means = [
        {n: v / weight(node.federation) for n, v in parts["total"].items()}
        for (_, parts), node in zip(replies, at.nodes.values(), strict=True)
    ]
    first = next(unpack(p)[1]["message"] for _, p, _ in at.heard if isinstance(unpack(p)[0], Ask))
    for name, value in found.params.items():
        middle = torch.stack([mean[f"theta/{name}"] for mean in means]).median(0).values
        torch.testing.assert_close(value, first[f"theta/{name}"] + middle)
    liar = Wire(nodes_of(train, plan, tmp_path / "liar"))

    def lies(reply):
        message, parts = unpack(reply)
        return pack(message, **(parts | {"total": {n: 900 * v for n, v in parts["total"].items()}}))

    liar.changed = {("node1", "ask"): lies}
    moved = fitted(liar, plan, tmp_path / "liar").params[name]
    moved = moved - first[f"theta/{name}"]
    honest = torch.stack([means[0][f"theta/{name}"], means[2][f"theta/{name}"]])
    assert bool(((moved >= honest.amin(0) - 1e-6) & (moved <= honest.amax(0) + 1e-6)).all())


def test_a_median_is_for_rules_that_average_between_machines_in_clear_sums():
    rule = MedianOfInstitutions()
    with pytest.raises(ValueError, match="MedianOfInstitutions.* does not go with"):
        bf.SFVI().replace(rule=rule).check()
    median = bf.FedAvg().replace(rule=rule)
    with pytest.raises(ValueError, match="in one process there are none"):
        bf.fit(models.Network(models.mlp(64, 10)), datasets.digits(clients=7)[0], median, rounds=1)
    with pytest.raises(ValueError, match="not seen in a secure or noisy sum"):
        replace(PLAN, algorithm=median, secure=True)


@pytest.mark.parametrize(
    ("plan", "patience", "why"),
    [
        (
            replace(PLAN, algorithm=bf.SFVIAvg()),
            {"max_staleness": 1},
            "SFVIAvg uploads what is of use",
        ),
        (
            replace(PLAN, privacy=bf.Privacy(clip=1.0)),
            {"max_staleness": 1},
            "max_staleness: clip and noise",
        ),
        (replace(PLAN, secure=True), {"enough": 2}, "a secure sum is of all"),
        (PLAN, {"enough": 1, "minimum": 2}, "fewer than the minimum"),
        (PLAN, {"expected": {f"node{i}": Expected(2, 2) for i in range(3)}}, "there at the start"),
    ],
)
def test_what_cannot_be_waited_for_is_refused(plan, patience, why, tmp_path):
    with pytest.raises(ValueError, match=why):
        fitted(Wire(nodes_of(SCHOOLS, plan, tmp_path)), plan, tmp_path, **patience)


def joined(plan, folder, come, brings, killed=None):
    """A run in which the last node is not there before its fourth question; and what was said."""
    nodes, said = nodes_of(SCHOOLS, plan, folder), []
    at, asked = Wire(nodes), {"rounds": 0}

    def exchange(messages, wait):
        asked["rounds"] += any(kinds_of(p)[-1] == "ask" for p in messages.values())
        if asked["rounds"] == killed:
            asked["rounds"] += 1
            raise InterruptedError
        return at.exchange(messages, wait)

    def reachable():
        return [name for name in at.nodes if name != "node2" or asked["rounds"] >= come]

    patience = Patience(tuple(at.nodes), 5.0, joining=1.0, expected={"node2": brings})
    options = (Carrier(reachable, exchange), plan, patience, folder / "server.safetensors")
    if killed is not None:
        with pytest.raises(InterruptedError):
            run_server(*options, report=said.append)
    return run_server(*options, report=said.append), said, nodes


@pytest.mark.parametrize("killed", [None, 5], ids=["", "killed"])
def test_a_node_that_joins_later_is_one_that_was_silent_before(killed, tmp_path):
    plan = replace(PLAN, rounds=6)
    whole = Wire(nodes_of(SCHOOLS, plan, tmp_path / "silent"))
    counts = {"asks": 0}

    def silent(name, kind):
        counts["asks"] += kind == "ask" and name == "node2"
        return name == "node2" and kind == "ask" and counts["asks"] <= 3

    whole.silent = silent
    expected = fitted(whole, plan, tmp_path / "silent")
    found, said, nodes = joined(plan, tmp_path, 3, Expected(3, 3), killed)
    assert "round 4: institution 'node2' has joined" in said
    same(found.params, expected.params, 0)
    assert posteriors(nodes)[2].sample(5)["theta"].shape == (5, 3)


def test_a_node_that_never_joins_is_named(tmp_path):
    found, said, _ = joined(PLAN, tmp_path, 99, Expected(3, 3))
    assert "institution 'node2' has not joined" in said[-1] and found.posterior.program.clients == 8


def test_who_brings_what_was_not_expected_is_left_out(tmp_path):
    found, said, _ = joined(PLAN, tmp_path, 1, Expected(3, 4))
    assert any(
        "cannot join: it has 3 clients of 3 rows in all, 3 of 4 were" in line for line in said
    )
    assert found.refused["node2"] >= 1
