"""On a GPU, where one is at hand: the same runs as on the CPU, compiled steps as CUDA graphs."""

import pytest
import torch

import bayesfed as bf
from bayesfed.tracing import inductor
from tests.invariants.cases import CASES, federation

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def test_an_expanded_tensor_is_copied_once():
    """What a CUDA graph reads are dense copies, and graphs are compiled for their strides."""
    column = torch.rand(8, 4)[:, None, :1].expand(8, 2, 1)
    values = [torch.rand(3, 1, 4).expand(3, 5, 4), torch.rand(4, 3).mT, torch.tensor(1.0), column]
    places, read = inductor.copies(values)
    assert [place.numel() for place in places] == [12, 12, 1, 8]
    assert all(torch.equal(*pair) for pair in zip(read, values, strict=True))
    assert read[-1].stride() == (1, 0, 1)
    assert column.stride() == (4, 0, 1)
    for place, seen, value in zip(places, read, values, strict=True):
        place.copy_(inductor._without_repetitions(value) + 1)
        assert torch.equal(seen, value + 1)


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


@on_a_gpu
@pytest.mark.parametrize("name", ["SFVI", "PFedVEM", "FedAvg", "PACPFL"])
def test_a_posterior_answers_on_the_gpu(name):
    algorithm, model = CASES[name]()
    execution = bf.Execution(device="cuda")
    posterior = bf.fit(
        model, federation(), algorithm, rounds=4, execution=execution, progress=False
    )
    assert posterior.federation.device.type == "cuda"
    idata = posterior.to_arviz(num_samples=20)
    assert "posterior" in idata.groups()
    assert posterior.predict(posterior.federation, 10)["y"].device.type == "cuda"
    assert len(posterior.personalize(posterior.federation).federation) == len(federation())
