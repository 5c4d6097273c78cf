"""Clients' states in files: the same runs as in memory, and of the files only what was written."""

import numpy as np
import pytest
import torch

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.engine.states import States


def state(rows, value):
    return {"params": {"w": torch.full((rows, 1, 3), value)}, "step": {"step": torch.ones(rows)}}


def test_states_that_were_put_are_taken(tmp_path):
    for folder in (None, tmp_path / "new" / "folder"):
        states = States(5, folder)
        states.begin(torch.tensor([0, 1, 2, 3, 4]), state(5, 0.0))
        states.put(torch.tensor([4, 1]), state(2, 7.0))
        found = states.take(torch.tensor([1, 2, 4]))
        assert found["params"]["w"][:, 0, 0].tolist() == [7.0, 0.0, 7.0]
        assert found["step"]["step"].tolist() == [1.0] * 3
        found["params"]["w"].zero_()  # a copy
        assert float(states.take(torch.tensor([1]))["params"]["w"].sum()) == 21.0


def test_files_are_numpys_and_zeros_take_no_disk(tmp_path):
    states = States(20_000, tmp_path)
    states.begin(torch.arange(20_000), {"mean": {"a/b": torch.zeros(20_000, 100)}})
    states.put(torch.tensor([19_999]), {"mean": {"a/b": torch.ones(1, 100)}})
    file = tmp_path / "mean.npy"
    assert np.load(file, mmap_mode="r")["mean.a/b"][19_999].sum() == 100
    if file.stat().st_blocks * 512 < file.stat().st_size:  # the file system knows holes
        assert file.stat().st_blocks * 512 < 1_000_000


def test_states_of_another_run_are_not_overwritten(tmp_path):
    States(2, tmp_path).begin(torch.arange(2), state(2, 1.0))
    with pytest.raises(FileExistsError, match="states of another run"):
        States(2, tmp_path)


def test_stateless_clients(tmp_path):
    states = States(3, tmp_path)
    states.begin(torch.arange(3), {})
    assert states.take(torch.arange(2)) == {}
    states.put(torch.arange(2), {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "algorithm",
    [bf.SFVI(local_steps=2), bf.SFVIAvg(), bf.PVI(corrected=False)],
    ids=str,
)
def test_a_run_is_the_same_in_files(tmp_path, algorithm):
    schools = datasets.eight_schools()

    def fit(states):
        return bf.fit(
            models.eight_schools,
            schools,
            algorithm,
            rounds=5,
            clients_per_round=5,
            execution=bf.Execution(states=states),
            progress=False,
        )

    memory, disk = fit(None), fit(tmp_path)
    assert disk.history["elbo"].tolist() == memory.history["elbo"].tolist()
    for name, value in memory.local_params.items():
        assert torch.equal(disk.local_params[name], value)
    disk.save(tmp_path / "posterior.safetensors")
    loaded = bf.Posterior.load(tmp_path / "posterior.safetensors", models.eight_schools, schools)
    for name, value in memory.local_params.items():
        assert torch.equal(loaded.local_params[name], value)


def test_local_posteriors_made_at_the_end_are_kept_there_too(tmp_path):
    schools = datasets.eight_schools()
    data = bf.Federation.from_arrays({name: {"x": [[1.0]], "y": [0.0]} for name in schools.names})
    posterior = bf.fit(
        models.Network(models.mlp(1, 2)),
        data,
        bf.FedAvg(personal_steps=1),
        rounds=2,
        execution=bf.Execution(states=tmp_path),
        progress=False,
    )
    name = next(iter(posterior.local_params))
    assert np.array_equal(
        np.load(tmp_path / "personal.npy")[f"personal.{name}"], posterior.local_params[name]
    )


def test_zeros_take_no_disk_whichever_clients_come_first(tmp_path):
    """Four megabytes for each client, in chunks, of which a part is zero."""
    states = States(8, tmp_path)
    for some in torch.arange(8).split(3):
        size = (len(some), 1_000_000)
        states.begin(some, {"params": {"w": torch.ones(size), "m": torch.zeros(size)}})
    used = sum(file.stat().st_blocks * 512 for file in tmp_path.iterdir())
    assert used < 1.2 * 8 * 4_000_000
    states.begin(torch.tensor([2]), {"params": {"w": torch.zeros(1, 1_000_000)}})
    assert states.take(torch.tensor([1, 2]))["params"]["w"].sum(1).tolist() == [1e6, 0.0]
