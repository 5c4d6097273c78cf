"""Differential privacy without a server that is trusted with the noise: each institution adds a share before it masks.

:class:`~bayesfed.Privacy` sets the size of the noise in a round's sum. Each of M institutions adds a share such that
the shares of any ``of`` institutions, ``of`` ≤ M, are noise enough: M − ``of`` institutions may collude with the
server, to which they can reveal their own shares. An institution that looks at θ by itself counts as one. The sum of
all has M / ``of`` times the variance.

Gaussian: N(0, scale² / of). Laplace: the difference of two Gamma(1 / of, scale) variables, since a Laplace variable is
the difference of two exponential ones and these are sums of ``of`` such Gamma variables (Ács & Castelluccia 2011, *I
have a DREAM!*). Both are for sums whose terms nobody sees, as in :mod:`bayesfed.deploy.secure`: a share alone is too
little.

Shares come from the operating system's entropy. An institution that is asked for the same attempt again sends the same
stored bytes: the mean of many draws would be its upload. A share is drawn in double precision and rounded to multiples
of 2⁻⁵⁷ with the upload: the distribution of the sum is not exactly that of the theorems, and there is no protection
from the attack on floating-point numbers of Mironov (2012).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from bayesfed.engine.privacy import Privacy, entropy


def noise_share(
    shape: Sequence[int], mechanism: Literal["gaussian", "laplace"], scale: float, of: int
) -> Tensor:
    """Return one institution's share of noise, float64: the sum of ``of`` such shares has this scale.

    Raises:
        ValueError: an unknown mechanism, a scale that is not positive and finite, or ``of`` below 1.

    Example:
        >>> import torch
        >>> from bayesfed.deploy.noise_shares import noise_share
        >>> shares = [noise_share((100_000,), "laplace", scale=2.0, of=5) for _ in range(5)]
        >>> bool((sum(shares).abs().mean() - 2.0).abs() < 0.05)  # Laplace's scale is its mean absolute value
        True
    """
    if not (0 < scale < math.inf):
        raise ValueError(f"the scale of noise is {scale}; it must be positive and finite")
    if of < 1:
        raise ValueError(f"noise cannot be shared out among {of} institutions")
    if mechanism == "gaussian":
        return scale / math.sqrt(of) * torch.special.ndtri(entropy(shape))
    if mechanism == "laplace":
        return scale * (_gamma(1 / of, shape) - _gamma(1 / of, shape))
    raise ValueError(f"mechanism is {mechanism!r}; it must be 'gaussian' or 'laplace'")


def add_noise_share(
    upload: Mapping[str, Tensor], privacy: Privacy, clip: float, multiplier: float, of: int
) -> dict[str, Tensor]:
    """Return an institution's sum of clipped uploads with its share of the round's noise, float64.

    Args:
        upload: the sum over its clients, each clipped.
        privacy: the settings that the institutions agreed on.
        clip: γ of the round.
        multiplier: the noise multiplier, from :meth:`bayesfed.Privacy.multiplier`. The institution must compute it
            itself: a server that is not trusted with the noise is not trusted with its scale. Cohorts that the server
            chooses hide nobody, so it is the multiplier for cohorts of all clients.
        of: the number of institutions of the roster that neither collude with the server nor subtract their own shares.

    Raises:
        ValueError: noise with a seed, which whoever has the seed can subtract; as :func:`noise_share`.
    """
    if privacy.seed is not None:
        raise ValueError("Privacy(seed=) is for tests in one process: a share of noise has no seed")
    noisy = {}
    for name, value in upload.items():
        scale = privacy.scale(name, clip, multiplier)
        noise = noise_share(value.shape, privacy.mechanism, scale, of)
        noisy[name] = value.double() + noise.to(value.device)
    return noisy


def _gamma(concentration: float, shape: Sequence[int]) -> Tensor:
    """Return Gamma variables of scale 1 (Marsaglia & Tsang 2000): rejection for 1 + concentration, then section 6."""
    count, d = math.prod(shape), concentration + 2 / 3
    found = torch.empty(0, dtype=torch.float64)
    while (missing := count - len(found)) > 0:
        x = torch.special.ndtri(entropy((missing,)))
        v = (1 + x / math.sqrt(9 * d)).clamp(min=0) ** 3
        accepted = entropy((missing,)).log() < x.square() / 2 + d - d * v + d * v.log()
        found = torch.cat([found, d * v[accepted]])
    return (found * entropy((count,)) ** (1 / concentration)).reshape(tuple(shape))
