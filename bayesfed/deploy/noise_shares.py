"""Differential privacy without a server that is trusted with the noise: each site adds a share before it masks.

:class:`~bayesfed.Privacy` says how large the noise of a round's sum has to be. Each of M sites adds a share such that
the shares of any ``of`` sites, ``of`` ≤ M, are noise enough: M − ``of`` sites may collude with the server, to which
they can tell their own shares. A site that looks at θ by itself counts as one. The sum of all has M / ``of`` times the
variance.

Gaussian: N(0, scale² / of). Laplace: the difference of two Gamma(1 / of, scale) variables, since Laplace's law is that
of the difference of two exponential ones and these are sums of ``of`` such Gamma variables (Ács & Castelluccia 2011,
*I have a DREAM!*). Both are for sums that nobody sees the terms of, as in :mod:`bayesfed.deploy.secure`: a share alone
is too little.

Shares come from the operating system's entropy. A site that is asked for the same attempt again sends the same bytes,
which it kept: the mean of many draws would be its upload. A share is drawn in double precision and rounded to
multiples of 2⁻⁵⁷ with the upload: the law of their sum is not exactly that of the theorems, and the attack on
floating-point numbers of Mironov (2012) is not guarded against.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from bayesfed.engine.privacy import Privacy, entropy


def share(
    shape: Sequence[int], mechanism: Literal["gaussian", "laplace"], scale: float, of: int
) -> Tensor:
    """One site's share of noise of this scale, float64: what ``of`` such shares add up to has it.

    Raises:
        ValueError: an unknown mechanism, a scale that is not positive and finite, or ``of`` below 1.

    Example:
        >>> import torch
        >>> from bayesfed.deploy.noise_shares import share
        >>> noise = torch.stack([share((100_000,), "laplace", scale=2.0, of=5) for _ in range(5)]).sum(0)
        >>> bool((noise.abs().mean() - 2.0).abs() < 0.05)  # Laplace's scale is its mean absolute value
        True
    """
    if not (0 < scale < math.inf):
        raise ValueError(f"the scale of noise is {scale}; it must be positive and finite")
    if of < 1:
        raise ValueError(f"noise cannot be shared out among {of} sites")
    if mechanism == "gaussian":
        return scale / math.sqrt(of) * torch.special.ndtri(entropy(shape))
    if mechanism == "laplace":
        return scale * (_gamma(1 / of, shape) - _gamma(1 / of, shape))
    raise ValueError(f"mechanism is {mechanism!r}; it must be 'gaussian' or 'laplace'")


def noisy(
    upload: Mapping[str, Tensor], privacy: Privacy, clip: float, multiplier: float, of: int
) -> dict[str, Tensor]:
    """A site's sum of clipped uploads with its share of the round's noise, float64.

    Args:
        upload: the sum over its clients, each clipped.
        privacy: agreed upon by the sites.
        clip: γ of the round.
        multiplier: of the noise, from :meth:`bayesfed.Privacy.multiplier`. It is the site that has to know it: a
            server that is not trusted with the noise is not trusted with its scale. Cohorts that the server knows hide
            nobody, so it is that of cohorts of all clients.
        of: how many sites of the roster are taken neither to collude with the server nor to take off their own shares.

    Raises:
        ValueError: noise with a seed, which whoever knows the seed can take off; as :func:`share`.
    """
    if privacy.seed is not None:
        raise ValueError("Privacy(seed=) is for tests in one process: a share of noise has no seed")
    return {
        name: value.double()
        + share(value.shape, privacy.mechanism, privacy.scale(name, clip, multiplier), of).to(
            value.device
        )
        for name, value in upload.items()
    }


def _gamma(concentration: float, shape: Sequence[int]) -> Tensor:
    """Gamma variables of scale 1 (Marsaglia & Tsang 2000): for 1 + concentration by rejection, then section 6."""
    count, d = math.prod(shape), concentration + 2 / 3
    found = torch.empty(0, dtype=torch.float64)
    while (missing := count - len(found)) > 0:
        x = torch.special.ndtri(entropy((missing,)))
        v = (1 + x / math.sqrt(9 * d)).clamp(min=0) ** 3
        kept = entropy((missing,)).log() < x.square() / 2 + d - d * v + d * v.log()
        found = torch.cat([found, d * v[kept]])
    return (found * entropy((count,)) ** (1 / concentration)).reshape(tuple(shape))
