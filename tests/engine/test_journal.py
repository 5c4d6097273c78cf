"""Clients' records in files go back to what they were, whatever a process had done to them when it was killed."""

import numpy as np
import pytest
import torch

from bayesfed.engine.journal import Journal
from bayesfed.engine.states import States


def state(rows, value):
    return {
        "params": {"w": torch.full((rows, 2), float(value))},
        "step": {"step": torch.ones(rows)},
    }


def new_states(folder, clients=6):
    states = States(clients, folder, journal=Journal(folder, "mine", new=True))
    states.begin(torch.arange(clients), state(clients, 0))
    states.flush()
    states.commit(0)
    return states


def again(folder, done, clients=6):
    states = States(clients, folder, journal=Journal(folder, "mine", new=False))
    states.reopen(state(1, 0), done)
    return states


def numbers(states, clients=6):
    return states.take(torch.arange(clients))["params"]["w"][:, 0].tolist()


def journals(folder):
    return sorted(path.name for path in folder.glob("*.journal"))


def test_later_changes_are_undone(tmp_path):
    states = new_states(tmp_path)
    states.put(torch.tensor([1, 4]), state(2, 7))
    states.flush()
    states.commit(1)
    states.put(torch.tensor([4, 5]), state(2, 8))
    states.put(torch.tensor([5, 0]), state(2, 9))
    assert journals(tmp_path) == ["params-step.1.journal"]
    assert numbers(states) == [9.0, 7.0, 0.0, 0.0, 8.0, 9.0]
    assert numbers(again(tmp_path, 1)) == [0.0, 7.0, 0.0, 0.0, 7.0, 0.0]
    assert journals(tmp_path) == []
    assert numbers(again(tmp_path, 1)) == [0.0, 7.0, 0.0, 0.0, 7.0, 0.0]


def test_a_journal_of_another_round_is_not_used(tmp_path):
    """The process was killed between writing the run and beginning the next journal."""
    states = new_states(tmp_path)
    states.put(torch.tensor([2]), state(1, 7))
    assert journals(tmp_path) == ["params-step.0.journal"]
    assert numbers(again(tmp_path, 1)) == [0.0, 0.0, 7.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("cut", [1, 20, 70])
def test_an_incomplete_block(cut, tmp_path):
    """Its clients' states were not changed yet; those of the block before were."""
    states = new_states(tmp_path)
    states.put(torch.tensor([0, 1]), state(2, 7))
    path = tmp_path / "params-step.0.journal"
    states.put(torch.tensor([2, 3, 4]), state(3, 8))
    path.write_bytes(path.read_bytes()[:-cut])
    records = np.load(tmp_path / "params-step.npy", mmap_mode="r+")
    records["params.w"][2:5] = 0
    records.flush()
    assert numbers(again(tmp_path, 0)) == [0.0] * 6


def test_a_client_is_noted_once(tmp_path):
    states = new_states(tmp_path)
    for value in range(5):
        states.put(torch.tensor([3, 1]), state(2, value))
    size = (tmp_path / "params-step.0.journal").stat().st_size
    assert size < 2 * (8 + states._files["params-step"].dtype.itemsize) + 20
    states.put(torch.tensor([3, 2]), state(2, 9))
    assert numbers(again(tmp_path, 0)) == [0.0] * 6


def test_a_folder_is_of_one_run(tmp_path):
    new_states(tmp_path)
    with pytest.raises(FileExistsError, match="states of another run"):
        Journal(tmp_path, "yours", new=True)
    with pytest.raises(ValueError, match="does not have the clients' states of this run"):
        Journal(tmp_path, "yours", new=False)
    with pytest.raises(ValueError, match="does not have the states of these clients"):
        again(tmp_path, 0, clients=7)


def test_states_of_a_run_without_a_file_are_started_again(tmp_path):
    states = States(6, tmp_path, journal=Journal(tmp_path, "mine", new=True))
    states.begin(torch.arange(3), state(3, 5))
    assert numbers(new_states(tmp_path)) == [0.0] * 6
