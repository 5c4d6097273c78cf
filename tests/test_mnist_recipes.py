"""The MNIST recipes, on images of 2 × 2 pixels that say which image they are."""

import numpy as np
import pytest
import torch

from tests.scripts import load

recipes = load("experiments/mnist/recipes.py")

RECIPES = ["few_images", "small_shards", "concept_drift", "new_clients", "extreme_skew"]
RECIPES += ["dirichlet_03", "dirichlet_1", "balanced_test"]
TRAIN, TEST = 251, 252


def pictures(n, split):
    """Image i is [[255, split], [i // 250, i % 250]]; only the corner has 255, so it shows a rotation."""
    i = np.arange(n)
    pixels = [np.full(n, 255), np.full(n, split), i // 250, i % 250]
    return np.stack(pixels, 1).reshape(n, 2, 2).astype(np.uint8)


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(7)
    labels = [rng.permutation(np.arange(n) % 10).astype(np.uint8) for n in (60_000, 10_000)]
    return recipes.Digits(pictures(60_000, TRAIN), labels[0], pictures(10_000, TEST), labels[1])


@pytest.fixture(scope="module", params=RECIPES)
def task(request, data):
    return getattr(recipes, request.param)(data, seed=1)


def read(federation):
    """``(rotation, split, row)`` of every image."""
    x = (federation["x"] * 255).round().long().reshape(-1, 2, 2).numpy()
    corners = np.stack([x[:, 0, 0], x[:, 1, 0], x[:, 1, 1], x[:, 0, 1]], 1)  # counterclockwise
    turn = corners.argmax(1)
    upright = np.stack([np.rot90(image, -k) for image, k in zip(x, turn, strict=True)])
    return turn, upright[:, 0, 1], 250 * upright[:, 1, 0] + upright[:, 1, 1]


def by_client(federation):
    turn, _, row = read(federation)
    y = federation["y"].numpy()
    return {
        name: (turn[mine], row[mine], y[mine])
        for i, name in enumerate(federation.names)
        for mine in [federation.owner.numpy() == i]
    }


def counts(federation, classes=10):
    return {
        name: np.bincount(y, minlength=classes) for name, (_, _, y) in by_client(federation).items()
    }


def test_images_come_from_the_right_split_and_training_images_are_dealt_once(task):
    joining = [task.new[0]] if task.new else []
    used = []
    for federation in (task.train, task.valid, *joining):
        _, split, row = read(federation)
        assert (split == TRAIN).all()
        used.append(row)
    used = np.concatenate(used)
    assert len(np.unique(used)) == len(used)
    for federation in (task.test, *([task.new[1]] if task.new else [])):
        assert (read(federation)[1] == TEST).all()
        for _, row, _ in by_client(federation).values():
            assert len(np.unique(row)) == len(row)


def test_inputs_and_labels(task, data):
    for federation in (task.train, task.valid, task.test, *(task.new or ())):
        assert federation["x"].dtype == torch.float32
        assert federation["x"].shape == (federation.rows, 4)
        assert (federation["x"].min(), federation["x"].max()) == (0, 1)
        assert federation["y"].dtype == torch.int64
        _, split, row = read(federation)
        true = np.where(split == TRAIN, data.train_y[row], data.test_y[row % 10_000])
        assert (federation["y"].numpy() == (true if task.classes == 10 else true // 2)).all()


@pytest.mark.parametrize("name", RECIPES)
def test_the_seed_decides(data, name):
    recipe = getattr(recipes, name)
    first, again, other = (recipe(data, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.train["x"], again.train["x"])
    assert torch.equal(first.test["x"], again.test["x"])
    assert first.train["x"].shape != other.train["x"].shape or not torch.equal(
        first.train["x"], other.train["x"]
    )


@pytest.mark.parametrize(
    ("name", "digits", "train", "held"), [("few_images", 5, 4, 40), ("small_shards", 2, 10, 50)]
)
def test_few_images_and_small_shards(data, name, digits, train, held):
    task = getattr(recipes, name)(data, seed=0)
    assert (len(task.train), task.classes, task.new) == (100, 10, None)
    assert task.train.names == task.valid.names == task.test.names
    own = counts(task.train)
    for count in own.values():
        assert sorted(count) == [0] * (10 - digits) + [train] * digits
    for other in (task.valid, task.test):
        for client, count in counts(other).items():
            assert (count == np.where(own[client] > 0, held, 0)).all()
    assert len({tuple(c) for c in own.values()}) > 20


@pytest.mark.parametrize(("name", "alpha"), [("dirichlet_03", 0.3), ("dirichlet_1", 1.0)])
def test_shares_of_digits(data, name, alpha):
    """Of Dirichlet(α) shares p_k the expectation of Σ p_k² is (α + 1) / (10 α + 1)."""
    task = getattr(recipes, name)(data, seed=2)
    held = np.stack(list(counts(task.test).values()))
    assert (held.sum(1) == 100).all()
    assert all(found.sum() == 20 for found in counts(task.train).values())
    pairs = (held * (held - 1)).sum(1) / (100 * 99)  # unbiased for Σ p_k²
    assert abs(pairs.mean() - (alpha + 1) / (10 * alpha + 1)) < 4 * pairs.std() / 10


def test_a_test_in_other_shares(data):
    task, same = recipes.balanced_test(data, seed=2), recipes.dirichlet_03(data, seed=2)
    for one, other in zip(counts(task.train).values(), counts(same.train).values(), strict=True):
        assert (one == other).all()
    assert all((found == 10).all() for found in counts(task.test).values())


def test_concept_drift(data):
    task = recipes.concept_drift(data, seed=0)
    assert (len(task.train), task.classes) == (50, 5)
    assert task.train.lengths.min() >= 50
    assert task.train.lengths.max() <= 150
    assert len(task.train.lengths.unique()) > 20
    assert task.test.lengths.tolist() == task.valid.lengths.tolist() == [200] * 50
    chosen = []
    train, valid, test = (by_client(part) for part in (task.train, task.valid, task.test))
    for client, (_, row, y) in train.items():
        digits = np.unique(data.train_y[row])
        assert (digits // 2).tolist() == [0, 1, 2, 3, 4]
        assert np.ptp(np.bincount(y)) <= 1
        assert (np.unique(data.train_y[valid[client][1]]) == digits).all()
        assert (np.unique(data.test_y[test[client][1]]) == digits).all()
        chosen.append(digits % 2)
    assert (np.abs(np.mean(chosen, 0) - 0.5) < 0.3).all()  # tossed for each client and label


def test_new_clients(data):
    task = recipes.new_clients(data, seed=0)
    labelled, test = task.new
    assert task.train.names == task.valid.names == task.test.names
    assert labelled.names == test.names
    assert (len(task.train), len(labelled)) == (80, 20)
    assert not set(task.train.names) & set(labelled.names)
    for federation, rows in [(task.train, 200), (task.test, 200), (labelled, 20), (test, 200)]:
        assert federation.lengths.tolist() == [rows] * len(federation)
    for seen, later in [(task.train, task.valid), (task.train, task.test), (labelled, test)]:
        turns, own, others = [], by_client(seen), by_client(later)
        for client, (turn, _, y) in own.items():
            assert len(np.unique(turn)) == 1
            assert (others[client][0] == turn[0]).all()
            assert len(np.unique(y)) == 5
            assert (np.unique(others[client][2]) == np.unique(y)).all()
            turns.append(turn[0])
        assert np.bincount(turns).tolist() == [len(seen) // 4] * 4


@pytest.mark.parametrize("seed", range(3))
def test_extreme_skew(data, seed):
    task = recipes.extreme_skew(data, seed=seed)
    assert len(task.train) == 20
    assert task.train.rows + task.valid.rows == 60_000
    assert (task.test.names, task.test.rows) == (("everyone",), 10_000)
    assert (np.sort(read(task.test)[2]) == np.arange(10_000)).all()
    valid = dict(zip(task.valid.names, task.valid.lengths.tolist(), strict=True))
    for client, n in zip(task.train.names, task.train.lengths.tolist(), strict=True):
        assert valid.get(client, 0) == (n + valid.get(client, 0)) // 10
    # far from the ten digits that an even deal would give
    assert np.mean([(c > 0).sum() for c in counts(task.train).values()]) < 3


def test_a_digit_that_runs_out(data):
    short = recipes.Digits(data.train_x[:9000], data.train_y[:9000], data.test_x, data.test_y)
    with pytest.raises(ValueError, match=r"images of digit \d are wanted, there are \d+"):
        recipes.few_images(short)


def test_the_file(data, tmp_path):
    path = tmp_path / "mnist.npz"
    np.savez(
        path,
        train_images=data.train_x,
        train_labels=data.train_y,
        test_images=data.test_x,
        test_labels=data.test_y,
    )
    first, second = recipes.small_shards(path, seed=3), recipes.small_shards(data, seed=3)
    assert torch.equal(first.test["x"], second.test["x"])
    assert torch.equal(first.train["y"], second.train["y"])


def test_images_are_turned_by_any_angle():
    rng = np.random.default_rng(0)
    x = torch.tensor(rng.random((4, 25)), dtype=torch.float32)
    found = recipes._turned(x, (5, 5), np.array([0.0, 90.0, 180.0, 45.0])).reshape(4, 5, 5)
    for i in range(3):
        expected = torch.rot90(x[i].reshape(5, 5), i)
        torch.testing.assert_close(found[i], expected, atol=1e-5, rtol=0)
    centre = x[3].reshape(5, 5)[2, 2]
    torch.testing.assert_close(found[3, 2, 2], centre, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["rotated_shards", "rotated_dirichlet"])
def test_rotated_clients(data, name):
    task = getattr(recipes, name)(data, seed=1)
    own, unseen = task.new
    assert len(task.train) == len(task.valid) == 80 and len(own) == len(unseen) == 20
    digits = [len(np.unique(own["y"][own.owner == i])) for i in range(20)]
    assert max(digits) <= (2 if name == "rotated_shards" else 10)
    for i in range(20):  # the same digits ahead as in a client's own rows
        mine, ahead = own["y"][own.owner == i], unseen["y"][unseen.owner == i]
        assert set(mine.tolist()) <= set(ahead.tolist())
    if name == "rotated_shards":
        assert set(task.train.lengths.tolist()) <= {440, 490}  # two shards of one digit or of two
