"""On a GPU, where one is at hand: the same runs as on the CPU, compiled steps as CUDA graphs."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.special import expit

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
                # round-off of a matrix, as of a precision's root, is relative to its largest number
                largest = float(value.nan_to_num().abs().max()) if value.numel() else 0.0
                torch.testing.assert_close(found, value, rtol=1e-6, atol=1e-8 * max(1.0, largest))


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


def as_tensors(answer):
    """Return all numbers of an answer of any kind, on the CPU."""
    if isinstance(answer, torch.Tensor):
        return [answer.detach().cpu().double()]
    if isinstance(answer, dict):
        return [t for key in sorted(answer) for t in as_tensors(answer[key])]
    if hasattr(answer, "select_dtypes"):
        return [torch.tensor(answer.select_dtypes("number").to_numpy(float))]
    return [torch.tensor(float(answer), dtype=torch.float64)]


def saved(posterior, tmp_path):
    path = tmp_path / posterior.federation.device.type
    posterior.save(path)
    model = posterior.program.model
    return bf.Posterior.load(path, model, posterior.federation).sample(20)


QUESTIONS = {
    "sample": lambda p, _: p.sample(50),
    "elbo": lambda p, _: p.elbo(50),
    "khat": lambda p, _: p.khat,
    "log_evidence": lambda p, _: p.log_evidence.value,
    "log_likelihood": lambda p, _: p.log_likelihood(p.federation, 20),
    "derived": lambda p, _: p.derived(num_samples=20),
    "poor_globals": lambda p, _: len(p.poor_globals),
    "poor_clients": lambda p, _: len(p.poor_clients),
    "corrected": lambda p, _: p.corrected().sample(20),
    "with_precision": lambda p, _: p.with_precision(0.1).sample(20),
    "with_chains": lambda p, _: {n: v.mean(0) for n, v in p.with_chains().sample(4000).items()},
    "without": lambda p, _: p.without("A").sample(20),
    "with_clients_resampled": lambda p, _: p.with_clients_resampled().sample(20),
    "personalize": lambda p, _: p.personalize(p.federation.select(["A", "B"])).sample(20),
    "to_frame": lambda p, _: p.to_frame(40),
    "predict": lambda p, _: p.predict(p.federation, 20),
    "leave_one_client_out": lambda p, _: bf.leave_one_client_out(p).table,
    "loo": lambda p, _: bf.loo(p.to_arviz(200)).elpd_loo,
    "predictions": lambda p, _: bf.effects.predictions(p, {"x": 1.0}, num_samples=20).draws,
    "comparisons": lambda p, _: bf.effects.comparisons(p, "x", num_samples=20).draws,
    "slopes": lambda p, _: bf.effects.slopes(p, "x", num_samples=20).draws,
    "hypotheses": lambda p, _: bf.effects.hypotheses(p, "x > 0", num_samples=20).draws,
    "save and load": saved,
    "report": lambda p, path: p.report(path / "report.html") or 0.0,
}
"""By name: what is asked after a fit, with a folder for files."""


@pytest.fixture(scope="module")
def on_both():
    """The same fit of a formula on the CPU and on the GPU."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"ward": rng.choice(list("ABCDE"), 150), "x": rng.normal(size=150)})
    frame["died"] = (rng.random(150) < expit(0.5 * frame.x)).astype(float)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    model = bf.formula("died ~ x + (1 | ward)", frame, family="bernoulli")
    yield [
        bf.fit(model, model.federation, progress=False, execution=bf.Execution(device=device))
        for device in ("cpu", "cuda")
    ]
    torch.set_default_dtype(before)


@on_a_gpu
@pytest.mark.parametrize("question", QUESTIONS)
def test_what_follows_a_fit_is_the_cpus(question, on_both, tmp_path):
    expected, found = (as_tensors(QUESTIONS[question](p, tmp_path)) for p in on_both)
    for one, other in zip(found, expected, strict=True):
        loose = {"rtol": 0.2, "atol": 0.1} if question == "with_chains" else {}
        torch.testing.assert_close(one, other, **{"rtol": 1e-4, "atol": 1e-5} | loose)
