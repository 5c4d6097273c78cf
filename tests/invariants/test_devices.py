"""A client's work waits for no device, and all its tensors lie where the data are.

On torch's ``meta`` device tensors have shapes and no numbers: asking for a number raises, as would waiting for a GPU if
torch could forbid it, and so does an operation on tensors of two devices. What runs there asks for nothing.
"""

import copy

import pytest
import torch

import bayesfed as bf
from bayesfed import models
from bayesfed.elbo import noise
from bayesfed.engine.batches import batches
from bayesfed.rules import MStep, NaturalGradient, ProductOfFactors, ProductOfGaussians, Turn
from bayesfed.steps.job import Job
from tests.invariants.cases import CASES, SPECIAL, federation
from tests.scenarios import summed

META = torch.device("meta")


def moved(value, monkeypatch, keep=()):
    """The same with its tensors on the meta device, but for some objects in it."""
    monkeypatch.setattr(torch.Tensor, "__deepcopy__", lambda tensor, memo: tensor.to(META))
    value = copy.deepcopy(value, {id(one): one for one in keep})
    monkeypatch.undo()
    return value


WORKS = (CASES | SPECIAL).keys() - {"SFVI, flow"}  # torch's splines look at their bounds
SERVERS_THAT_LOOK = (ProductOfFactors, MStep, ProductOfGaussians, NaturalGradient)
"""Rules that read numbers, such as whether the product of all factors is a proper Gaussian, or whether q(θ) is far."""


@pytest.mark.parametrize(
    ("name", "batch_size"), [*((name, 4) for name in sorted(WORKS)), ("FedAvg", None)]
)
def test_a_cohorts_work_needs_no_number_from_the_device(name, batch_size, monkeypatch):
    algorithm, model = (CASES | SPECIAL)[name]()
    data = federation()
    program = algorithm.program(model, data)  # once, and it may look at numbers, as a server may
    server = algorithm.start(program)
    (clients,) = (algorithm.start_clients(program, server, b) for b in program.starts(data))
    message = algorithm.broadcast(Turn(program, noise.key(0), len(data)), server)
    data = data.to(META)
    program, server, clients, message = moved(
        (program, server, clients, message), monkeypatch, keep=[model]
    )
    turn = Turn(program, noise.key(0).to(META), len(data))
    everyone = torch.arange(len(data))
    keys = noise.fold(turn.key, data.stream_ids[everyone])
    job = Job(program, message, clients, batches(data, everyone, batch_size, keys), keys)
    answer = algorithm.work(job)
    states = (answer.upload, answer.clients, answer.memory)
    tensors = [value for state in states for part in state.values() for value in part.values()]
    assert {value.device for value in (answer.terms, *tensors)} == {META}
    if not isinstance(algorithm.rule, SERVERS_THAT_LOOK):
        algorithm.decode(turn, server, summed(answer.upload))


def test_a_default_device_does_not_matter():
    """With another default device the schedule stays on the CPU, and the model where its data are."""
    data, algorithm = federation(), bf.SFVI(local_steps=2)

    def fit():
        return bf.fit(models.hierarchical_logistic, data, algorithm, rounds=2, progress=False)

    expected = fit()
    with torch.device("meta"):
        found = fit()
    for name, value in expected.params.items():
        assert torch.equal(found.params[name], value)
