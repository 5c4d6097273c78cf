"""What an algorithm of one's own need not say, and what its uploads are called."""

import pytest
import torch

import bayesfed as bf
from bayesfed.algorithms.protocol import Algorithm, Turn
from bayesfed.elbo import noise
from bayesfed.engine.batches import batches
from bayesfed.steps.job import Job


def test_what_an_algorithm_need_not_say():
    """One draw a step, nothing remembered, constant learning rates."""
    plain = Algorithm()
    assert plain.draws == 1
    assert (plain.lr_decay, plain.corrected, plain.remembered) == (1.0, False, ())


@pytest.mark.parametrize("algorithm", [bf.FedAvg(), bf.PFedVEM(), bf.FOLA(), bf.SFVI()], ids=repr)
def test_uploads_are_tensors_by_name(algorithm):
    """Between machines they are written into messages, whose parts have names."""
    data = bf.datasets.eight_schools()
    program = algorithm.program(bf.models.eight_schools, data)
    server, keys = algorithm.start(program), noise.fold(noise.key(0), data.stream_ids)
    clients = algorithm.start_clients(program, server, data.batch())
    message = algorithm.broadcast(Turn(program, noise.key(0), 8), server)
    job = Job(program, message, clients, batches(data, torch.arange(8), None, keys), keys)
    upload = algorithm.work(job).upload
    assert {type(name) for name in upload} == {str}
    assert {type(value) for value in upload.values()} == {torch.Tensor}
    assert {len(value) for value in upload.values()} == {8}
