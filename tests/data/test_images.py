"""Image data sets, read from small files in the formats of their authors."""

import gzip
import json
import pickle
import struct

import numpy as np
import pytest
import torch

import bayesfed as bf
from bayesfed import images, models

RNG = np.random.default_rng(0)


class Python2(pickle._Pickler):
    """Writes bytes as the strings of Python 2, as CIFAR's files have them."""

    dispatch = dict(pickle._Pickler.dispatch)  # noqa: RUF012  (pickle's interface)

    def save_bytes(self, value):
        self.write(pickle.BINSTRING + struct.pack("<i", len(value)) + value)

    dispatch[bytes] = save_bytes


def pickled(path, **content):
    with path.open("wb") as file:
        Python2(file, protocol=2).dump({name.encode(): value for name, value in content.items()})


def idx(path, array):
    head = struct.pack(f">HBB{array.ndim}i", 0, 8, array.ndim, *array.shape)
    path.write_bytes(gzip.compress(head + array.astype(np.uint8).tobytes()))


def pixels(*shape):
    return RNG.integers(256, size=shape, dtype=np.uint8)


@pytest.mark.parametrize("coarse", [False, True])
def test_cifar(tmp_path, coarse):
    rows = pixels(2, 3 * 32 * 32)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        pickled(tmp_path / name, data=rows, labels=[3, 9], batch_label=b"")
    for name in ("train", "test"):
        pickled(tmp_path / name, data=rows, fine_labels=[7, 99], coarse_labels=[1, 19])
    train, test = images.cifar10(tmp_path)
    assert len(train) == 10 and test.y.tolist() == [3, 9]
    # a row holds the red pixels, line by line, then the green and the blue ones
    assert test.x[1, 2, 0, 5] == torch.tensor(rows[1, 2 * 1024 + 5]) / 255
    train, _ = images.cifar100(tmp_path, coarse=coarse)
    assert train.y.tolist() == ([1, 19] if coarse else [7, 99])


def test_a_pickle_that_would_run_code_is_refused(tmp_path):
    class Harmful:
        def __reduce__(self):
            return (tmp_path.joinpath("harm").touch, ())

    pickled(tmp_path / "train", data=Harmful(), fine_labels=[0])
    with pytest.raises(ValueError, match="arrays and lists only"):
        images.cifar100(tmp_path)
    assert not (tmp_path / "harm").exists()


def test_idx_files(tmp_path):
    x, y = pixels(3, 28, 28), np.array([1, 2, 26])
    for name in ("train", "t10k", "emnist-letters-train", "emnist-letters-test"):
        idx(tmp_path / f"{name}-images-idx3-ubyte.gz", x)
        idx(tmp_path / f"{name}-labels-idx1-ubyte.gz", y)
    train, test = images.fashion_mnist(tmp_path)
    assert train.x.shape == (3, 1, 28, 28) and test.y.tolist() == [1, 2, 26]
    assert torch.equal(train.x[:, 0], torch.tensor(x) / 255)
    letters, _ = images.emnist(tmp_path, "letters")
    assert letters.y.tolist() == [0, 1, 25]
    assert torch.equal(letters.x[:, 0], torch.tensor(x).mT / 255)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(b"something else"))
    with pytest.raises(ValueError, match="IDX"):
        images.fashion_mnist(tmp_path)


def test_svhn(tmp_path):
    io = pytest.importorskip("scipy.io")
    x, y = pixels(32, 32, 3, 2), np.array([[10], [4]])  # 10 stands for the digit 0
    for name in ("train", "test"):
        io.savemat(tmp_path / f"{name}_32x32.mat", {"X": x, "y": y})
    train, _ = images.svhn(tmp_path)
    assert train.y.tolist() == [0, 4]
    assert torch.equal(train.x[1, 2], torch.tensor(x[..., 2, 1]) / 255)


def test_sun397(tmp_path):
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "ClassName.txt").write_text("/a/abbey\n/b/balcony/exterior\n")
    for scene, colour in (("a/abbey", (255, 0, 0)), ("b/balcony/exterior", (0, 0, 255))):
        (tmp_path / scene).mkdir(parents=True)
        image.new("RGB", (20, 10), colour).save(tmp_path / scene / "sun_1.png")
    for name in ("Training_01.txt", "Testing_01.txt"):
        (tmp_path / name).write_text("/b/balcony/exterior/sun_1.png\n/a/abbey/sun_1.png\n")
    train, _ = images.sun397(tmp_path, size=(6, 8))
    assert train.x.shape == (2, 3, 6, 8) and train.y.tolist() == [1, 0]
    assert train.x[:, :, 0, 0].tolist() == [[0, 0, 1], [1, 0, 0]]


def test_femnist_has_the_writers_as_clients(tmp_path):
    for name in ("train", "test"):
        (tmp_path / name).mkdir()
        for file in range(2):
            rows = {"x": RNG.random((2 + file, 784)).tolist(), "y": [3, 61, 0][: 2 + file]}
            users = {"users": [f"f{file}"], "num_samples": [2], "user_data": {f"f{file}": rows}}
            (tmp_path / name / f"part_{file}.json").write_text(json.dumps(users))
    train, _ = images.femnist(tmp_path)
    assert train.names == ("f0", "f1") and train.lengths.tolist() == [2, 3]
    assert train["x"].shape == (5, 1, 28, 28) and train["y"].tolist() == [3, 61, 3, 61, 0]
    with pytest.raises(FileNotFoundError, match="LEAF"):
        images.femnist(tmp_path / "train")


def test_hugging_face():
    datasets, image = pytest.importorskip("datasets"), pytest.importorskip("PIL.Image")
    x = pixels(3, 8, 6, 3)
    drawn = [image.fromarray(each) for each in x]
    data = datasets.Dataset.from_dict({"img": drawn, "label": [2, 0, 1]})
    found = images.from_hugging_face(data, image="img")
    assert torch.equal(found.x, torch.tensor(x).permute(0, 3, 1, 2) / 255)
    with pytest.raises(KeyError, match="image="):
        images.from_hugging_face(data)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"data_batch_1 does not exist.*unpacked"):
        images.cifar10(tmp_path)


def test_images_are_dealt_to_clients_and_fitted():
    found = images.Images(torch.rand(12, 3, 8, 8), torch.arange(12) % 3)
    federation = found.deal(["a", "b", None] * 4)
    assert federation.names == ("a", "b") and federation.lengths.tolist() == [4, 4]
    network = models.Network(models.resnet18((3, 8, 8), 3, width=4))
    posterior = bf.fit(network, federation, bf.FedAvg(personal_steps=0), rounds=1, progress=False)
    assert posterior.probabilities(federation, 1)["y"].shape == (8, 3)
    with pytest.raises(ValueError, match="12 images"):
        found.deal(["a"])


def test_resnet18_has_the_published_number_of_weights():
    # 11,173,962 with BatchNorm's scales and shifts, of which GroupNorm has as many but for the three shortcuts' own
    network = models.resnet18((3, 32, 32), 10)
    assert sum(p.numel() for p in network.parameters()) == 11_173_962 - 2 * (128 + 256 + 512)


def test_lenet_has_the_published_number_of_weights():
    # 61,706 in LeNet-5 as it is used on MNIST
    assert sum(p.numel() for p in models.lenet((1, 28, 28), 10).parameters()) == 61_706
