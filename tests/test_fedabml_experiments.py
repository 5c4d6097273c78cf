"""Independent pieces of the experiments on FedABML."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

import bayesfed as bf

FOLDER = Path(__file__).parents[1] / "experiments"


@pytest.fixture
def script(monkeypatch):
    """Return a function that imports a script of the experiments by its name."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.syspath_prepend(str(FOLDER / "mnist"))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(FOLDER) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_the_loss_after_fine_tuning_is_that_of_gradient_descent_in_closed_form(script):
    """In the eigenbasis of Σ⁻¹ a step multiplies w − μ by 1 − η λ."""
    toy = script("fedabml_toy")
    rng = np.random.default_rng(0)
    mu, start, rate, steps = rng.normal(size=(2, 2)), rng.normal(size=2), 0.03, 10
    factors = rng.normal(size=(2, 2, 2))
    precision = factors @ factors.transpose(0, 2, 1)
    expected = 0.0
    for i in range(2):
        values, vectors = np.linalg.eigh(precision[i])
        left = (1 - rate * values) ** steps * (vectors.T @ (start - mu[i]))
        expected += 0.25 * (values * left**2).sum()
    found = toy.tuned_loss(*map(torch.tensor, (start, mu, precision)), rate, steps)
    np.testing.assert_allclose(float(found), expected, rtol=1e-10)
    at_start = toy.tuned_loss(*map(torch.tensor, (start, mu, precision)), rate, 0)
    assert float(at_start) > expected


def test_small_digits_are_enlarged_to_the_size_and_range_of_mnist(script):
    images = load_digits().images[:50]
    found = script("uncertainty").enlarged(images)
    assert found.shape == (50, 784) and found.min() == 0 and found.max() <= 1
    square = found.reshape(50, 28, 28)
    assert not square[:, :4].any() and not square[:, :, -4:].any()
    middle = square[:, 4:-4, 4:-4]
    np.testing.assert_allclose(middle.mean((1, 2)), images.mean((1, 2)) / 16, atol=0.03)


def test_digits_from_another_source_have_the_labels_of_each_client(script):
    own = {"a": [3, 1, 1, 7, 8, 0], "b": [2, 4, 5, 6, 9, 9]}
    clients = {
        name: {"x": torch.zeros(6, 784), "y": torch.tensor(labels)} for name, labels in own.items()
    }
    federation = bf.Federation.from_arrays(clients)
    found = script("uncertainty").from_another_source(federation, seed=0)
    assert found.names == federation.names and found["x"].shape == (400, 784)
    source = load_digits()
    enlarged = script("uncertainty").enlarged(source.images)
    for name, labels in own.items():
        counts = np.bincount(found.select([name])["y"], minlength=10)
        assert counts.tolist() == [40 if digit in labels else 0 for digit in range(10)]
    for row in range(0, 400, 45):
        same = (enlarged == found["x"][row]).all(1)
        assert int(found["y"][row]) in source.target[same.numpy()]


def test_that_one_setting_is_varied_at_a_time(script):
    rows = script("fedabml_settings").settings()
    assert len(rows) == 14 and rows["k", "2"] == {"λ": 1.0, "k": 2, "s": 3}
    centres = [key for key, point in rows.items() if point == {"λ": 1.0, "k": 5, "s": 3}]
    assert centres == [("λ", "1"), ("k", "5"), ("s", "3")]


def test_that_clients_who_join_later_are_not_among_those_that_train(script):
    settings = script("fedabml_settings")
    rng = np.random.default_rng(0)
    labels = [(np.arange(n) % 10).astype(np.uint8) for n in (25_000, 2_000)]
    images = [rng.integers(0, 256, (len(y), 2, 2), dtype=np.uint8) for y in labels]
    data = settings.recipes.Digits(images[0], labels[0], images[1], labels[1])
    task = settings.joining(settings.recipes.small_shards(data, seed=0))
    own, rows = task.new
    assert (len(task.train), len(own), len(rows)) == (20, 80, 80)
    assert task.train.names == task.valid.names == task.test.names and own.names == rows.names
    assert not set(task.train.names) & set(own.names)
