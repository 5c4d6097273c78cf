"""Student's t distribution with five degrees of freedom, of which proposals of importance sampling are mixtures."""

from __future__ import annotations

import math

from torch import Tensor

FREEDOM = 5
"""Degrees of freedom."""
PER_SD = math.sqrt((FREEDOM - 2) / FREEDOM)
"""The scale of a t distribution whose standard deviation is 1."""


def student_log_density(square: Tensor, size: int) -> Tensor:
    """Compute the log density of a multivariate t distribution of scale 1 at squared distances from its centre.

    Args:
        square: squared Euclidean distances, of any shape.
        size: the number of dimensions.

    Example:
        >>> import torch
        >>> from pyro.distributions import MultivariateStudentT
        >>> from bayesfed.output.student import FREEDOM, student_log_density
        >>> x, df = torch.tensor([1.0, 2.0]), torch.tensor(float(FREEDOM))
        >>> expected = MultivariateStudentT(df, torch.zeros(2), torch.eye(2)).log_prob(x)
        >>> bool(torch.isclose(student_log_density(x.square().sum(), 2), expected))
        True
    """
    level = math.lgamma((FREEDOM + size) / 2) - math.lgamma(FREEDOM / 2)
    level -= size / 2 * math.log(FREEDOM * math.pi)
    return level - (FREEDOM + size) / 2 * (square / FREEDOM).log1p()
