"""Image data sets in the files of their authors, read from a folder; nothing is downloaded.

.. code-block:: python

    train, test = images.cifar10("data/cifar-10-batches-py")
    federation = train.deal(owner)  # the client of each image

:func:`femnist` has clients of its own, the writers. A data set of Hugging Face is read by :func:`from_hugging_face`, or
is dealt to clients by its partitioners with :meth:`bayesfed.Federation.from_partitioner`.
"""

import gzip
import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesfed.data.federation import Federation
from bayesfed.data.optional import import_optional
from bayesfed.data.plural import plural

EXTRA = "'bayesfed[images]'"
ARRAYS = {
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("_codecs", "encode"),
}
"""All that a pickled array needs; other names in a file, which could run code, are refused."""


@dataclass(frozen=True, eq=False)
class Images:
    """Images and their labels.

    Attributes:
        x: float32 in [0, 1], ``(rows, channels, height, width)``.
        y: int64 from 0, ``(rows,)``.
    """

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def deal(self, owner: Sequence[Any]) -> Federation:
        """Return a federation with fields ``x`` and ``y`` of the clients that own the images.

        Args:
            owner: the client of each image; one that is None is left out.

        Raises:
            ValueError: there are not as many owners as images.

        Example:
            >>> import torch
            >>> from bayesfed.data.images import Images
            >>> images = Images(torch.zeros(3, 1, 2, 2), torch.tensor([0, 1, 0]))
            >>> images.deal(["north", "south", "north"])
            Federation: 2 clients, 3 rows (1 to 2 a client), fields x[1, 2, 2], y
        """
        if len(owner) != len(self):
            raise ValueError(
                f"owner has {plural(len(owner), 'client')} for {plural(len(self), 'image')}: give one for each"
            )
        rows: dict[str, list[int]] = {}
        for row, client in enumerate(owner):
            if client is not None:
                rows.setdefault(str(client), []).append(row)
        return Federation.from_arrays(
            {client: {"x": self.x[at], "y": self.y[at]} for client, at in rows.items()}
        )


def cifar10(folder: str | Path) -> tuple[Images, Images]:
    """Read CIFAR-10's training and test images from the folder ``cifar-10-batches-py`` of its Python version.

    Source: A. Krizhevsky (2009), "Learning multiple layers of features from tiny images".

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file holds something other than arrays and lists.
    """
    train = [_cifar(Path(folder) / f"data_batch_{i}", "labels") for i in range(1, 6)]
    return _joined(train), _cifar(Path(folder) / "test_batch", "labels")


def cifar100(folder: str | Path, *, coarse: bool = False) -> tuple[Images, Images]:
    """Read CIFAR-100's training and test images from the folder ``cifar-100-python`` of its Python version.

    Args:
        folder: the folder.
        coarse: labels are the 20 superclasses in place of the 100 classes.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file holds something other than arrays and lists.
    """
    labels = "coarse_labels" if coarse else "fine_labels"
    train, test = (_cifar(Path(folder) / part, labels) for part in ("train", "test"))
    return train, test


def fashion_mnist(folder: str | Path) -> tuple[Images, Images]:
    """Read Fashion-MNIST, or MNIST, whose files have the same names: ``train-images-idx3-ubyte.gz`` and three more.

    Source: H. Xiao, K. Rasul & R. Vollgraf (2017), "Fashion-MNIST".

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is not in the IDX format.
    """
    train, test = (_idx(Path(folder), part) for part in ("train", "t10k"))
    return train, test


def emnist(folder: str | Path, kind: str = "balanced") -> tuple[Images, Images]:
    """Read a part of EMNIST from its files ``emnist-KIND-train-images-idx3-ubyte.gz`` and three more.

    The files hold images with rows and columns exchanged, which are put right. Labels of ``"letters"`` count from 0.

    Source: G. Cohen et al. (2017), "EMNIST: extending MNIST to handwritten letters".

    Args:
        folder: the folder.
        kind: ``"balanced"``, ``"byclass"``, ``"bymerge"``, ``"digits"``, ``"letters"`` or ``"mnist"``.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is not in the IDX format.
    """
    first = int(kind == "letters")
    parts = (_idx(Path(folder), f"emnist-{kind}-{part}") for part in ("train", "test"))
    train, test = (Images(part.x.mT.contiguous(), part.y - first) for part in parts)
    return train, test


def svhn(folder: str | Path) -> tuple[Images, Images]:
    """Read the Street View House Numbers from ``train_32x32.mat`` and ``test_32x32.mat``.

    Source: Y. Netzer et al. (2011), "Reading digits in natural images with unsupervised feature learning".

    Raises:
        FileNotFoundError: a file is missing.
        ImportError: scipy is missing: ``pip install 'bayesfed[images]'``.
    """
    io = import_optional("scipy.io", EXTRA)

    def part(name: str) -> Images:
        found = io.loadmat(str(_existing(Path(folder) / f"{name}_32x32.mat")))
        pixels = torch.as_tensor(found["X"]).permute(3, 2, 0, 1)
        return Images(pixels.float() / 255, torch.as_tensor(found["y"]).flatten().long() % 10)

    return part("train"), part("test")


def sun397(
    folder: str | Path, *, size: tuple[int, int] = (64, 64), partition: int = 1
) -> tuple[Images, Images]:
    """Read a training and a test partition of the SUN397 scenes, each image resized.

    The folder has ``ClassName.txt``, ``Training_01.txt``, ``Testing_01.txt`` and the images that these name.

    Source: J. Xiao et al. (2010), "SUN database: large-scale scene recognition from abbey to zoo".

    Args:
        folder: the folder.
        size: height and width of the images.
        partition: 1 to 10.

    Raises:
        FileNotFoundError: a file is missing.
        ImportError: Pillow is missing: ``pip install 'bayesfed[images]'``.
    """
    image, root = import_optional("PIL.Image", EXTRA), Path(folder)
    names = _existing(root / "ClassName.txt").read_text(encoding="utf-8").split()
    labels = {name: label for label, name in enumerate(names)}

    def part(name: str) -> Images:
        paths = _existing(root / f"{name}_{partition:02d}.txt").read_text(encoding="utf-8").split()
        pixels = []
        for path in paths:
            with image.open(_existing(root / path.lstrip("/"))) as file:
                pixels.append(np.asarray(file.convert("RGB").resize(size[::-1])))
        x = torch.as_tensor(np.stack(pixels)).permute(0, 3, 1, 2).float() / 255
        return Images(x, torch.tensor([labels[path.rpartition("/")[0]] for path in paths]))

    return part("Training"), part("Testing")


def femnist(folder: str | Path) -> tuple[Federation, Federation]:
    """Read FEMNIST's training and test images from the JSON files that LEAF writes to ``train`` and ``test``.

    The clients are the writers; fields ``x`` ``(1, 28, 28)`` and ``y``, 0 to 61.

    Source: S. Caldas et al. (2018), "LEAF: a benchmark for federated settings".

    Raises:
        FileNotFoundError: there is no file in a folder.
    """

    def part(name: str) -> Federation:
        paths = sorted((Path(folder) / name).glob("*.json"))
        if not paths:
            raise FileNotFoundError(
                f"{Path(folder) / name} has no JSON file: give the folder `data` that LEAF makes for FEMNIST"
            )
        clients = {}
        for path in paths:
            for writer, rows in json.loads(path.read_text(encoding="utf-8"))["user_data"].items():
                x = torch.tensor(rows["x"]).reshape(-1, 1, 28, 28)
                clients[writer] = {"x": x, "y": torch.tensor(rows["y"])}
        return Federation.from_arrays(clients, client_dim="writer")

    return part("train"), part("test")


def from_hugging_face(dataset: Any, *, image: str = "image", label: str = "label") -> Images:
    """Read images and labels of one size from a ``datasets.Dataset``.

    Args:
        dataset: such as ``datasets.load_dataset("uoft-cs/cifar10", split="train")``.
        image: the column of images.
        label: the column of labels, from 0.

    Raises:
        KeyError: a column does not exist.
    """
    for column in (image, label):
        if column not in dataset.column_names:
            raise KeyError(
                f"the data set has no column {column!r}; there are {dataset.column_names}: name it by image= or label="
            )
    pixels = torch.as_tensor(np.stack([np.asarray(each) for each in dataset[image]]))
    pixels = pixels.permute(0, 3, 1, 2) if pixels.ndim == 4 else pixels[:, None]
    return Images(pixels.float() / 255, torch.tensor(dataset[label]))


# -- file formats ------------------------------------------------------------------------------------


class _Arrays(pickle.Unpickler):
    """A reader of pickled arrays and lists, that refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ARRAYS:
            raise ValueError(
                f"the file needs {module}.{name}, and a file of CIFAR holds arrays and lists only: do not open it"
            )
        return super().find_class(module, name)


def _cifar(path: Path, labels: str) -> Images:
    with _existing(path).open("rb") as file:
        found = _Arrays(file, encoding="latin1").load()
    pixels = torch.as_tensor(np.asarray(found["data"])).reshape(-1, 3, 32, 32)
    return Images(pixels.float() / 255, torch.tensor(found[labels]))


def _idx(folder: Path, name: str) -> Images:
    pixels, labels = (
        _read_idx(folder / f"{name}-{part}-ubyte.gz") for part in ("images-idx3", "labels-idx1")
    )
    return Images(pixels[:, None].float() / 255, labels.long())


def _read_idx(path: Path) -> Tensor:
    """Read bytes in the IDX format: two zero bytes, the type 8, the number of axes, their lengths, the values."""
    with gzip.open(_existing(path)) as file:
        raw = file.read()
    if raw[:3] != b"\x00\x00\x08":
        raise ValueError(f"{path} is not in the IDX format of bytes")
    shape = np.frombuffer(raw, ">i4", raw[3], 4)
    return torch.tensor(np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape))


def _existing(path: Path) -> Path:
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist: nothing is downloaded here; give the folder that the data set was unpacked to"
        )
    return path


def _joined(parts: Sequence[Images]) -> Images:
    return Images(torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts]))
