"""On a GPU, where one is at hand: the same runs as on the CPU, compiled steps as CUDA graphs."""

import pytest
import torch

import bayesfed as bf
from bayesfed.tracing import inductor
from tests.invariants.cases import CASES, federation

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def test_an_expanded_tensor_is_copied_once():
    """What a CUDA graph reads has the strides of what it was recorded for."""
    values = [torch.rand(3, 1, 4).expand(3, 5, 4), torch.rand(4, 3).mT, torch.tensor(1.0)]
    for value in values:
        place = inductor._without_repetitions(value).clone()
        read = place.expand_as(value)
        assert read.stride() == value.stride()
        assert torch.equal(read, value)
        place.copy_(inductor._without_repetitions(value) + 1)
        assert torch.equal(read, value + 1)


@on_a_gpu
@pytest.mark.filterwarnings("ignore:draw runs eagerly")  # Pyro's splines choose by number
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_run_is_the_cpus(name, compile, float64):
    def fit(device, compile=False):
        algorithm, model = CASES[name]()
        return bf.fit(
            model,
            federation(),
            algorithm,
            rounds=4,
            clients_per_round=2,
            batch_size=4,
            execution=bf.Execution(device=device, compile=compile),
            progress=False,
        )

    cpu, gpu = fit("cpu"), fit("cuda", compile)
    for part in ("params", "local_params", "history"):
        for key, value in getattr(cpu, part).items():
            if key != "seconds":
                found = getattr(gpu, part)[key].cpu()
                torch.testing.assert_close(found, value, rtol=1e-6, atol=1e-8)
