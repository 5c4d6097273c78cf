"""Plans, carriers and runs over nodes in one process."""

import torch

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.deploy.bundles import join, split
from bayesfed.deploy.institutions import Patience
from bayesfed.deploy.messages import (
    pack,
    unpack,
)
from bayesfed.deploy.plan import DeploymentPlan
from bayesfed.deploy.server import run_server
from bayesfed.deploy.transport import Carrier

SCHOOLS = datasets.eight_schools()


EAGER = bf.Execution(compile=False)


PLAN = DeploymentPlan(
    models.eight_schools, bf.SFVI(corrected=False, local_steps=2), rounds=3, execution=EAGER
)


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


def changed(part, change):
    def of(reply):
        message, parts = unpack(reply)
        parts[part] = {name: change(value) for name, value in parts[part].items()}
        return pack(message, **parts)

    return of
