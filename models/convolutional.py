"""Convolutional networks without state, for :class:`~bayesfed.models.Network`.

Flat rows are images too: each network begins by giving its input the shape of an image.
"""

import itertools
from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.functional import relu

Shape = tuple[int, int, int]
"""Channels, height and width of an image."""


def cnn(
    shape: Shape, classes: int, channels: Sequence[int] = (32, 32), hidden: int = 128
) -> nn.Sequential:
    """Make convolutions 5 × 5 with ReLU and 2 × 2 pooling, then one hidden layer and the head.

    Args:
        shape: channels, height and width of one image; rows may be flat or not.
        classes: number of outputs.
        channels: number of channels of each convolution: two as in the FEMNIST benchmark; three, as ``(32, 64, 64)``,
            make the usual five layers for CIFAR.
        hidden: width of the layer before the head.

    Example:
        >>> import torch
        >>> from bayesfed import models
        >>> models.cnn((1, 28, 28), 62)(torch.zeros(5, 784)).shape
        torch.Size([5, 62])
    """
    layers: list[nn.Module] = [*_as_image(shape)]
    before, height, width = shape
    for after in channels:
        layers += [nn.Conv2d(before, after, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
        before, height, width = after, height // 2, width // 2
    layers += [nn.Flatten(), nn.Linear(before * height * width, hidden), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(hidden, classes))


def lenet(shape: Shape, classes: int) -> nn.Sequential:
    """Make LeNet-5 with ReLU and maxima: two convolutions 5 × 5 of 6 and 16 channels, layers of 120 and 84.

    Source: Y. LeCun et al. (1998), "Gradient-based learning applied to document recognition".

    Example:
        >>> import torch
        >>> from bayesfed import models
        >>> models.lenet((1, 28, 28), 10)(torch.zeros(5, 784)).shape
        torch.Size([5, 10])
    """
    convolutions = [
        nn.Conv2d(shape[0], 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    ]
    size = 16 * ((shape[1] // 2 - 4) // 2) * ((shape[2] // 2 - 4) // 2)
    dense = [nn.Linear(size, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, classes)]
    return nn.Sequential(*_as_image(shape), *convolutions, *dense)


def resnet18(shape: Shape, classes: int, *, width: int = 64, groups: int = 2) -> nn.Sequential:
    """Make ResNet-18 for small images, with GroupNorm in place of BatchNorm.

    A convolution 3 × 3, four stages of two residual blocks, of which all but the first stage halve height and width
    and double the channels, the mean over the image, and the head. GroupNorm has no running means, which clients would
    have to share or keep (Hsieh et al. 2020, "The non-IID data quagmire of decentralized machine learning").

    Source: K. He et al. (2016), "Deep residual learning for image recognition".

    Args:
        shape: channels, height and width of an image.
        classes: number of outputs.
        width: channels of the first stage.
        groups: of GroupNorm, a divisor of ``width``.

    Example:
        >>> import torch
        >>> from bayesfed import models
        >>> models.resnet18((3, 32, 32), 10, width=8)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    stem = [nn.Conv2d(shape[0], width, 3, padding=1, bias=False), nn.GroupNorm(groups, width)]
    widths = [width, width, 2 * width, 4 * width, 8 * width]
    stages = [
        nn.Sequential(
            _Residual(before, after, 1 if stage == 0 else 2, groups),
            _Residual(after, after, 1, groups),
        )
        for stage, (before, after) in enumerate(itertools.pairwise(widths))
    ]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes)]
    return nn.Sequential(*_as_image(shape), *stem, nn.ReLU(), *stages, *head)


class _Residual(nn.Module):
    """Two convolutions 3 × 3, beside the identity or a convolution 1 × 1."""

    def __init__(self, before: int, after: int, stride: int, groups: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.GroupNorm(groups, after) for _ in range(2)])
        same = stride == 1 and before == after
        self.beside = nn.Identity() if same else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = relu(self.norms[0](self.first(x)))
        return relu(self.norms[1](self.second(h)) + self.beside(x))


def _as_image(shape: Shape) -> list[nn.Module]:
    return [nn.Flatten(), nn.Unflatten(1, shape)]
