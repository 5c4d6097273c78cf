"""Ten ways to deal MNIST out to clients.

Each takes the path of an MNIST npz file (or the arrays, as :class:`Digits`) and a seed. Inputs are float32 in [0, 1],
flat (784 for MNIST); labels are int64. Training and validation images come from the official training split and no
image is dealt twice, neither to two clients nor to training and validation (ValueError if a digit runs out). Test
images come from the official test split; there a client never holds an image twice, but different clients may share
one, since 100 clients with 200 images each need more than the 10,000 there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import bayesfed as bf

DIGITS = 10


@dataclass(frozen=True, eq=False)
class Digits:
    """The official split: images uint8, ``(n, height, width)``; labels integers 0 to 9, ``(n,)``."""

    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray


@dataclass(frozen=True, eq=False)
class Task:
    """The result of a recipe; every federation has fields ``x`` ``(pixels,)`` and ``y``.

    Attributes:
        train: the clients that are fitted.
        valid: the same clients, other images of the training split: for tuning.
        test: the same clients, images of the test split.
        classes: number of labels.
        new: clients that join later: ``(their labelled images, their test images)``.
    """

    train: bf.Federation
    valid: bf.Federation
    test: bf.Federation
    classes: int
    new: tuple[bf.Federation, bf.Federation] | None = None


Source = Digits | str | Path


def load(path: str | Path) -> Digits:
    """Read an npz file with ``train_images``, ``train_labels``, ``test_images`` and ``test_labels``."""
    with np.load(path) as file:
        return Digits(
            *(
                file[f"{split}_{kind}"]
                for split in ("train", "test")
                for kind in ("images", "labels")
            )
        )


def few_images(source: Source, seed: int = 0) -> Task:
    """Deal to 100 clients with five random digits each 4 training images of each: 20 in all.

    For validation and for the test, 40 images of each digit: 200 in all.
    """
    data, rng = _opened(source, seed)
    return _by_digit(data, rng, _choices(rng, clients=100, digits=5), train=20, held=200)


def small_shards(source: Source, seed: int = 0) -> Task:
    """Deal to 100 clients with two random digits each 10 training images of each: 20 in all.

    For validation and for the test, 50 images of each digit: 100 in all.
    """
    data, rng = _opened(source, seed)
    return _by_digit(data, rng, _choices(rng, clients=100, digits=2), train=20, held=100)


def concept_drift(source: Source, seed: int = 0) -> Task:
    """Deal to 50 clients five labels of two digits each (digit // 2), of which a client sees one: a coin toss.

    From 50 to 150 training images a client, uniformly; 200 for validation and 200 for the test. All as
    evenly spread over the client's five digits as they go.
    """
    data, rng = _opened(source, seed)
    digits = 2 * np.arange(5) + rng.integers(2, size=(50, 5))
    task = _by_digit(data, rng, digits, train=rng.integers(50, 151, size=50), held=200)
    parts = [_halved(part) for part in (task.train, task.valid, task.test)]
    return Task(*parts, classes=5)


def new_clients(source: Source, seed: int = 0) -> Task:
    """Deal to 100 clients with five random digits each, whose images are turned; 20 of them join later.

    Client i turns its images by (i modulo 4) times 90 degrees, counterclockwise. The first 80 train with 200
    images; the last 20, five of each rotation, have 20 labelled images. All have 200 for the test and
    the first 80 also 200 for validation.
    """
    data, rng = _opened(source, seed)
    digits = _choices(rng, clients=100, digits=5)
    names, turns = _names(100), np.arange(100) % 4
    wanted = [
        _spread(rng, digits[:80], 200),
        _spread(rng, digits[:80], 200),
        _spread(rng, digits[80:], 20),
    ]
    dealt = _deal(rng, data.train_y, np.concatenate(wanted))
    drawn = _draw(rng, data.test_y, _spread(rng, digits, 200))

    def turned(split: str, rows: list[np.ndarray], who: slice) -> bf.Federation:
        x, y = (data.train_x, data.train_y) if split == "train" else (data.test_x, data.test_y)
        return _federation(x, y, rows, names[who], turns[who])

    first, last = slice(0, 80), slice(80, 100)
    return Task(
        train=turned("train", dealt[:80], first),
        valid=turned("train", dealt[80:160], first),
        test=turned("test", drawn[:80], first),
        classes=DIGITS,
        new=(turned("train", dealt[160:], last), turned("test", drawn[80:], last)),
    )


def extreme_skew(source: Source, seed: int = 0) -> Task:
    """Deal the training split to 20 clients digit by digit, in Dirichlet(0.01) proportions.

    Such proportions give nearly all of a digit to one client, so that most of 20 clients get nothing of
    any of the ten. Each of these, one after the other, takes half of what is then the largest lot of
    one digit in one hand: 20 clients, most of them with a single digit.

    Then a tenth of each client's images, rounded down, is set aside for validation; a client with fewer than ten
    has none there. ``train`` and ``valid`` together are the whole split. The test is the official one, as
    one client called "everyone".
    """
    data, rng = _opened(source, seed)
    shares = rng.dirichlet(np.full(20, 0.01), size=DIGITS)  # (digit, client)
    available = np.bincount(data.train_y, minlength=DIGITS)
    ends = np.rint(shares.cumsum(1) / shares.sum(1, keepdims=True) * available[:, None]).astype(int)
    wanted = np.diff(ends, axis=1, prepend=0).T  # (client, digit)
    for client in np.flatnonzero(wanted.sum(1) == 0):
        donor, digit = np.unravel_index(wanted.argmax(), wanted.shape)
        wanted[client, digit] = wanted[donor, digit] // 2
        wanted[donor, digit] -= wanted[client, digit]
    rows = _deal(rng, data.train_y, wanted)
    names = _names(20)
    aside = [(name, r[: len(r) // 10]) for name, r in zip(names, rows, strict=True) if len(r) >= 10]
    return Task(
        train=_federation(data.train_x, data.train_y, [r[len(r) // 10 :] for r in rows], names),
        valid=_federation(
            data.train_x, data.train_y, [r for _, r in aside], [name for name, _ in aside]
        ),
        test=_federation(data.test_x, data.test_y, [np.arange(len(data.test_y))], ["everyone"]),
        classes=DIGITS,
    )


def dirichlet_03(source: Source, seed: int = 0) -> Task:
    """Deal to 100 clients 20 training images each, in Dirichlet(0.3) shares of the digits.

    For validation and for the test, 100 images in the same shares.
    """
    return _in_shares(source, seed, 0.3)


def dirichlet_1(source: Source, seed: int = 0) -> Task:
    """Deal to 100 clients 20 training images each, in Dirichlet(1) shares; for the rest see :func:`dirichlet_03`."""
    return _in_shares(source, seed, 1.0)


def balanced_test(source: Source, seed: int = 0) -> Task:
    """Deal training images as :func:`dirichlet_03`; for validation and for the test a client has 10 of each digit."""
    return _in_shares(source, seed, 0.3, balanced=True)


def _in_shares(source: Source, seed: int, alpha: float, balanced: bool = False) -> Task:
    """Return a task of clients whose images have Dirichlet shares of the digits."""
    data, rng = _opened(source, seed)
    shares, names = rng.dirichlet(np.full(DIGITS, alpha), size=100), _names(100)
    train, valid, test = (
        np.stack([rng.multinomial(count, each) for each in shares]) for count in (20, 100, 100)
    )
    if balanced:
        valid = test = np.full((100, DIGITS), 10)
    dealt = _deal(rng, data.train_y, np.concatenate([train, valid]))
    return Task(
        train=_federation(data.train_x, data.train_y, dealt[:100], names),
        valid=_federation(data.train_x, data.train_y, dealt[100:], names),
        test=_federation(data.test_x, data.test_y, _draw(rng, data.test_y, test), names),
        classes=DIGITS,
    )


def rotated_shards(source: Source, seed: int = 0) -> Task:
    """Deal to 100 clients two shards of 270 images of one digit each, turned by the angle of the client's group.

    As RMNIST of CAFeMe (section 8.1): client i is in group i modulo 10, whose images are turned by 20 times as many
    degrees, and the last 20 clients join later. 50 of a client's images of each digit are for validation, the others
    are its own rows. For the test, 200 images in the same proportions from the test split.
    """
    data, rng = _opened(source, seed)
    shards = rng.permutation(np.repeat(np.arange(DIGITS), 20)).reshape(100, 2)
    counts = np.zeros((100, DIGITS), dtype=int)
    for i, digits in enumerate(shards):
        np.add.at(counts[i], digits, 270)
    return _rotated(data, rng, counts)


def rotated_dirichlet(source: Source, seed: int = 0) -> Task:
    """Deal to 100 clients turned images as :func:`rotated_shards`, in Dirichlet(0.3) proportions of the digits.

    From 200 to 800 images a client, uniformly, as far as a digit has enough.
    """
    data, rng = _opened(source, seed)
    shares = rng.dirichlet(np.full(DIGITS, 0.3), size=100) * rng.integers(200, 801, size=(100, 1))
    least = (np.bincount(data.train_y, minlength=DIGITS) / shares.sum(0)).min()
    return _rotated(data, rng, np.floor(shares * min(1.0, least)).astype(int))


def _rotated(data: Digits, rng: np.random.Generator, counts: np.ndarray) -> Task:
    """Return a task of clients with that many images of each digit, ``(100, 10)``, turned by groups."""
    names = _names(100)
    angles = 20.0 * (np.arange(100) % 10)
    aside = np.minimum(counts // 5, 50)
    dealt = _deal(rng, data.train_y, np.concatenate([counts - aside, aside]))
    likely = np.ceil(200 * counts / counts.sum(1, keepdims=True)).astype(int)
    drawn = _draw(rng, data.test_y, likely)

    def turned(split: str, rows: list[np.ndarray], who: slice) -> bf.Federation:
        x, y = (data.train_x, data.train_y) if split == "train" else (data.test_x, data.test_y)
        found = _federation(x, y, rows[who], names[who])
        return bf.Federation(
            found.fields | {"x": _turned(found["x"], x.shape[1:], angles[who][found.owner])},
            found.offsets,
            found.names,
        )

    first, last = slice(0, 80), slice(80, 100)
    return Task(
        train=turned("train", dealt[:100], first),
        valid=turned("train", dealt[100:], first),
        test=turned("test", drawn, first),
        classes=DIGITS,
        new=(turned("train", dealt[:100], last), turned("test", drawn, last)),
    )


def _turned(x: torch.Tensor, size: tuple[int, ...], degrees: np.ndarray) -> torch.Tensor:
    """Return flat images ``(rows, pixels)`` turned counterclockwise, bilinear, black where nothing was."""
    a = torch.as_tensor(np.deg2rad(degrees), dtype=x.dtype)
    zero = torch.zeros_like(a)
    rows = torch.stack([a.cos(), -a.sin(), zero, a.sin(), a.cos(), zero], -1)
    images = x.reshape(-1, 1, *size)
    grid = torch.nn.functional.affine_grid(
        rows.reshape(-1, 2, 3), list(images.shape), align_corners=False
    )
    turned = torch.nn.functional.grid_sample(images, grid, align_corners=False)
    return turned.reshape(len(x), -1)


# -- dealing --------------------------------------------------------------------------------------


def _opened(source: Source, seed: int) -> tuple[Digits, np.random.Generator]:
    return source if isinstance(source, Digits) else load(source), np.random.default_rng(seed)


def _names(clients: int) -> list[str]:
    return [f"client {i}" for i in range(clients)]


def _choices(rng: np.random.Generator, *, clients: int, digits: int) -> np.ndarray:
    """Return distinct random digits for each client: ``(clients, digits)``."""
    return np.stack([rng.choice(DIGITS, size=digits, replace=False) for _ in range(clients)])


def _spread(rng: np.random.Generator, digits: np.ndarray, images: int | np.ndarray) -> np.ndarray:
    """Return how many images of each digit a client gets, ``(clients, 10)``: as even as possible over its own.

    The remainder goes to random ones of its digits.
    """
    clients, each = digits.shape
    whole, rest = np.divmod(np.broadcast_to(images, clients), each)
    counts = np.zeros((clients, DIGITS), dtype=np.int64)
    for client in range(clients):
        extra = rng.permutation(each) < rest[client]
        counts[client, digits[client]] = whole[client] + extra
    return counts


def _deal(rng: np.random.Generator, labels: np.ndarray, wanted: np.ndarray) -> list[np.ndarray]:
    """Return rows with that many of each digit, ``wanted`` ``(hands, 10)``; no row is in two hands."""
    hands: list[list[np.ndarray]] = [[] for _ in wanted]
    for digit in range(DIGITS):
        pool = rng.permutation(np.flatnonzero(labels == digit))
        ends = wanted[:, digit].cumsum()
        if ends[-1] > len(pool):
            raise ValueError(
                f"{ends[-1]} images of digit {digit} are wanted, there are {len(pool)}"
            )
        for hand, rows in zip(hands, np.split(pool, ends), strict=False):  # the last is left over
            hand.append(rows)
    return [rng.permutation(np.concatenate(hand)) for hand in hands]


def _draw(rng: np.random.Generator, labels: np.ndarray, wanted: np.ndarray) -> list[np.ndarray]:
    """Return the same as :func:`_deal`, but each hand from the full pack."""
    return [_deal(rng, labels, hand[None])[0] for hand in wanted]


def _by_digit(
    data: Digits,
    rng: np.random.Generator,
    digits: np.ndarray,
    *,
    train: int | np.ndarray,
    held: int,
) -> Task:
    """Return a task of clients with these digits, as many test as validation images."""
    clients, names = len(digits), _names(len(digits))
    wanted = np.concatenate([_spread(rng, digits, train), _spread(rng, digits, held)])
    dealt = _deal(rng, data.train_y, wanted)
    drawn = _draw(rng, data.test_y, _spread(rng, digits, held))
    return Task(
        train=_federation(data.train_x, data.train_y, dealt[:clients], names),
        valid=_federation(data.train_x, data.train_y, dealt[clients:], names),
        test=_federation(data.test_x, data.test_y, drawn, names),
        classes=DIGITS,
    )


def _halved(federation: bf.Federation) -> bf.Federation:
    fields = {"x": federation["x"], "y": federation["y"] // 2}
    return bf.Federation(fields, federation.offsets, federation.names)


def _federation(
    images: np.ndarray,
    labels: np.ndarray,
    rows: Sequence[np.ndarray],
    names: Sequence[str],
    turns: np.ndarray | None = None,
) -> bf.Federation:
    """Return clients with these rows, each one's images turned that many times by 90 degrees."""
    turns = np.zeros(len(rows), dtype=int) if turns is None else turns
    x = np.concatenate(
        [np.rot90(images[r], k, axes=(1, 2)) for r, k in zip(rows, turns, strict=True)]
    )
    y = labels[np.concatenate(rows)].astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum([len(r) for r in rows])])
    fields = {
        "x": torch.from_numpy(x.reshape(len(x), -1)).to(torch.float32) / 255,
        "y": torch.from_numpy(y),
    }
    return bf.Federation(fields, torch.as_tensor(offsets, dtype=torch.int64), tuple(names))
