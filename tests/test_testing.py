"""The check of algorithms passes for all methods and worked examples, and names the faults of broken parts."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

import bayesfed as bf
from bayesfed import models
from bayesfed.algorithms import METHODS, Algorithm
from bayesfed.rules import Mean, mean_of
from bayesfed.steps import Descent
from bayesfed.testing import check_algorithm
from docs import own_parts

SMALL = {
    "local_steps": 2,
    "local_epochs": 1,
    "head_epochs": 1,
    "finetune_steps": 1,
    "inner_steps": 1,
    "outer_steps": 2,
    "particles": 2,
    "draws": 2,
}


def federation(clients=4):
    generator = torch.Generator().manual_seed(0)

    def client(n):
        x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
        return {"x": x, "y": (x.sum(1) > 0).double()}

    return bf.Federation.from_arrays({f"client {n}": client(n) for n in range(4, 4 + clients)})


def network(**settings):
    torch.manual_seed(0)
    return models.Network(models.mlp(3, 4, 2), **settings)


def modulated():
    torch.manual_seed(0)
    return models.Modulated(models.mlp(3, 4, 2), models.mlp(3, 2), context=3)


MODELS: dict[str, Callable[[], Any]] = {
    "CAFeMe": modulated,
    **dict.fromkeys(("FedPer", "FedRep", "FedBABU"), lambda: network(local=["2."], scale=0.5)),
    "FOLA": lambda: network(local=(), hyper_scale=1.0),
    **dict.fromkeys(("PACPFL", "PFedGP"), lambda: network(scale=0.3, hyper_scale=0.4)),
}


def small(name):
    method = METHODS[name]
    given = SMALL | ({"draws": 8} if name == "PVI" else {})
    return method(**{key: value for key, value in given.items() if key in method.settings})


@pytest.mark.parametrize("name", [n for n, m in METHODS.items() if m.name == n and n != "Pooled"])
def test_every_method_passes(name, float64):
    model = MODELS.get(name, lambda: models.hierarchical_logistic)()
    check_algorithm(small(name), model, federation())


@pytest.mark.parametrize("make", [lambda: own_parts.adam, own_parts.with_momentum])
def test_the_worked_examples_pass(make, float64):
    check_algorithm(make(), models.hierarchical_logistic, federation())


# -- parts that are broken on purpose ------------------------------------------------------------------

SEEN = []


@dataclass(frozen=True)
class FirstCounts(Mean):
    """The first client of a batch counts twice."""

    def encode(self, job, work):
        upload, memory = super().encode(job, work)
        twice = torch.ones(len(job))
        twice[0] = 2.0
        upload["theta"] = {
            n: v * twice.reshape(-1, *[1] * (v.ndim - 1)) for n, v in upload["theta"].items()
        }
        return upload, memory


@dataclass(frozen=True)
class Centred(Mean):
    """Subtracts the mean move of the batch, which only the server may have."""

    def encode(self, job, work):
        upload, memory = super().encode(job, work)
        upload["theta"] = {n: v - v.mean(0) / 2 for n, v in upload["theta"].items()}
        return upload, memory


@dataclass(frozen=True)
class SumUploaded(Mean):
    """Uploads a sum in place of a row for each client."""

    def encode(self, job, work):
        upload, memory = super().encode(job, work)
        return upload | {"theta": {n: v.sum(0) for n, v in upload["theta"].items()}}, memory


@dataclass(frozen=True)
class Momentum(Mean):
    """Keeps the last move outside the server's state."""

    def decode(self, turn, server, total):
        move = mean_of(turn, total)
        theta = {
            n: server["theta"][n] + v + 0.5 * sum(s[n] for s in SEEN[-1:]) for n, v in move.items()
        }
        SEEN.append(move)
        return {"theta": theta}, torch.zeros(())


@dataclass(frozen=True)
class Counting(Mean):
    """Counts rounds by a number that is no tensor."""

    def start(self, program):
        return super().start(program) | {"rounds": 0}

    def decode(self, turn, server, total):
        new, term = super().decode(turn, server, total)
        return new | {"rounds": server["rounds"] + 1}, term


@dataclass(frozen=True)
class Growing(Mean):
    """The server's state gets longer."""

    def decode(self, turn, server, total):
        new, term = super().decode(turn, server, total)
        return new | {"last": server["theta"]}, term


@dataclass(frozen=True)
class InPlace(Mean):
    """Changes the server's state in place."""

    def decode(self, turn, server, total):
        for name, value in mean_of(turn, total).items():
            server["theta"][name] += value
        return server, torch.zeros(())


@dataclass(frozen=True)
class Drawing(Mean):
    """Draws from torch's own generator."""

    def decode(self, turn, server, total):
        new, term = super().decode(turn, server, total)
        return {"theta": {n: v + 0.1 * torch.randn_like(v) for n, v in new["theta"].items()}}, term


@dataclass(frozen=True)
class NoSum(Mean):
    """Takes the logarithm of a sum of squares that noise makes negative."""

    def encode(self, job, work):
        upload, memory = super().encode(job, work)
        squares = {n: 1e-12 + 0 * v for n, v in upload["theta"].items()}
        return upload | {"square": squares}, memory

    def decode(self, turn, server, total):
        new, term = super().decode(turn, server, total)
        return {
            "theta": {n: v + 0 * total["square"][n].log() for n, v in new["theta"].items()}
        }, term


@dataclass(frozen=True)
class Forgetful(Mean):
    """Remembers something of another shape than it has at the start."""

    def start_clients(self, program, server, batch):
        return {"last": {"move": torch.zeros(len(batch))}}

    def encode(self, job, work):
        upload, _ = super().encode(job, work)
        return upload, {"last": {"move": torch.zeros(len(job), 2)}}


@dataclass(frozen=True)
class Coded(Mean):
    """Has a setting that is no plain data."""

    weights: Any = field(default_factory=lambda: torch.ones(2))


@dataclass(frozen=True)
class Mutating(Descent):
    """Moves the message itself."""

    def run(self, job, locals_):
        for value in job.theta.values():
            value.mul_(0.5)
        return super().run(job, locals_)


@dataclass(frozen=True)
class Silent(Descent):
    """Does not give what it says."""

    gives = frozenset({"theta", "steps"})  # type: ignore[assignment]

    def run(self, job, locals_):
        work = super().run(job, locals_)
        return work._replace(found={"theta": work.found["theta"]})


@dataclass(frozen=True)
class Together(Descent):
    """Clients' terms are those of the batch."""

    def run(self, job, locals_):
        work = super().run(job, locals_)
        return work._replace(terms=work.terms - work.terms.mean())


@dataclass(frozen=True)
class Unadapted(Descent):
    """Has no way to make a new client's variables."""

    def adapt(self, job, theta, own, steps, lr):
        return {name: value[:1] for name, value in own.items()}


BROKEN = {
    FirstCounts: "FirstCounts.encode: what a client gets depends on the others in its batch, or on their order",
    Centred: "Centred.encode: what a client gets depends on the others in its batch",
    SumUploaded: r"SumUploaded.encode: the upload\['theta'\].* must be a tensor \(4, ...\)",
    Momentum: "Momentum.decode gives something else when it is called again",
    Counting: r"Counting.start: the server's state has \['rounds'\] = 0; it is made of tensors",
    Growing: "Growing.decode changes the server's form",
    InPlace: "InPlace.decode changes server, which it is given",
    Drawing: "Drawing.decode gives something else .* draws from a global generator",
    NoSum: "NoSum.decode .*under noise",
    Forgetful: "Forgetful.encode: the clients' states differ in form",
    Coded: "weights is a Tensor, not plain data",
    Mutating: "Mutating.run changes message, which it is given",
    Silent: r"Silent.run does not give \['steps'\]",
    Together: "Together.run: what a client gets depends on the others",
    Unadapted: "Unadapted.personalize .*shape",
}


@pytest.mark.parametrize("part", BROKEN, ids=lambda part: part.__name__)
def test_a_broken_part_is_named(part, float64):
    broken = {"steps": part()} if issubclass(part, Descent) else {"rule": part()}
    algorithm = bf.FedAvg(local_epochs=1).replace(**broken)
    with pytest.raises(AssertionError, match=BROKEN[part]):
        check_algorithm(algorithm, models.hierarchical_logistic, federation())


def test_a_part_must_be_frozen():
    class_of = dataclass(type("Thawed", (), {}))
    algorithm = replace(bf.FedAvg(), globals=class_of())
    with pytest.raises(
        AssertionError, match=r"Thawed: give the class of globals @dataclass\(frozen=True\)"
    ):
        check_algorithm(algorithm, models.hierarchical_logistic, federation())


def test_parts_that_do_not_fit_are_refused():
    algorithm: Algorithm = bf.FedAvg(proximal=0.1).replace(rule=bf.Scaffold().rule)
    with pytest.raises(AssertionError, match="do not fit"):
        check_algorithm(algorithm, models.hierarchical_logistic, federation())
