"""A cohort split among processes gives the run of one process: they exchange nothing but the sum of invariant 2."""

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import bayesfed as bf
from bayesfed import models
from tests.invariants.cases import ON_A_HIERARCHY, ON_A_NETWORK, federation

CASES = ON_A_HIERARCHY | {"CAFeMe": ON_A_NETWORK["CAFeMe"]}


def fit(name, group=None):
    algorithm, model = CASES[name]()
    cohort = 1 + list(CASES).index(name) % 5  # a cohort of 1 leaves a process without work
    return bf.fit(
        model,
        federation(),
        algorithm,
        rounds=2,
        clients_per_round=cohort,
        seed=2,
        execution=bf.Execution(compile=False, chunk_size=2, group=group),
        progress=False,
    )


def one_process(rank, folder):
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    found = {}
    for name in CASES:
        posterior = fit(name, dist.group.WORLD)
        found[name] = {
            "elbo": posterior.history["elbo"],
            **posterior.params,
            **posterior.local_params,
        }
    bad = federation()
    bad.fields["x"][-1] = 1e300  # of the last client, which process 0 has: its square overflows
    bf.fit(
        models.varying_intercept,
        bad,
        bf.SFVI(local_steps=1),
        rounds=1,
        execution=bf.Execution(group=dist.group.WORLD),
        callbacks=[lambda done: found.update(refused=done.refused, counted=done.cohort)],
    )
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def runs():
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(one_process, args=(folder,), nprocs=2, start_method="spawn")
        yield [torch.load(Path(folder) / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_two_processes_run_as_one(name, runs, float64):
    alone = fit(name)
    expected = {"elbo": alone.history["elbo"], **alone.params, **alone.local_params}
    assert expected.keys() == runs[0][name].keys()
    for key, value in expected.items():
        # fifty steps of Adam on clients that were in no cohort enlarge round-off a thousandfold
        wide = 1e3 if key in alone.local_params else 1.0
        torch.testing.assert_close(runs[0][name][key], value, rtol=1e-9 * wide, atol=1e-11 * wide)
        assert torch.equal(runs[1][name][key], runs[0][name][key])


def test_every_process_learns_of_a_bad_client(runs):
    for run in runs:
        assert run["refused"] == ["client 6"]
        assert run["counted"] == runs[0]["counted"] and "client 6" not in run["counted"]


def test_files_are_of_one_process(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="leave out states, or group"):
            bf.Execution(states=tmp_path, group=dist.group.WORLD)
        with pytest.raises(ValueError, match="leave out resume, or the execution's group"):
            bf.fit(
                models.varying_intercept,
                federation(),
                rounds=1,
                resume=tmp_path / "run",
                execution=bf.Execution(group=dist.group.WORLD),
            )
    finally:
        dist.destroy_process_group()
