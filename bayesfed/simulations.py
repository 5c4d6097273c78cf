"""Simulated federations whose clients are of two kinds: polynomials, and photovoltaic plants under real weather."""

from __future__ import annotations

import torch

from bayesfed.federation import Federation

# PAC-PFL, section 8.4: roots of the mean functions of the two kinds of clients, and their length scales
_ROOTS = (
    (2.13090278, 1.04920788, 0.77719797, -0.79079416, 0.47808944, 0.41619282, 0.63380681),
    (-0.93890047, -0.53067272, -0.83405262, -1.41970533, 0.11923567, 0.11692263, 0.69670114),
)
_SIGNS = (1.0, -1.0)
_LENGTH_SCALES = (0.3, 3.0)


def polynomials(
    clients: int = 24, rows: int = 10, test_rows: int = 200, seed: int = 0
) -> tuple[Federation, Federation]:
    """Functions from two Gaussian processes with polynomial means: ``(train, test)``.

    Client i has a function f ~ GP(±Π_j (x − r_j), 0.2² exp(−(x − x')² / 2ℓ²)), the sign, the seven roots and ℓ those
    of the first kind (ℓ = 0.3) where i is even and of the second (ℓ = 3) where it is odd. It sees
    y = f(x) + 0.05 ε at x from a standard normal truncated to [−0.8, 0.8].

    Fields, all scalar: ``x``, ``y``.

    Args:
        clients: N; "client 0", "client 1", ...
        rows: of each client, for training.
        test_rows: of each client, of the same function.
        seed: of everything.

    Source: M. Boroujeni, A. Krause, G. Ferrari Trecate, "Personalized federated learning of probabilistic models: a
    PAC-Bayesian approach", the polynomial data.

    Example:
        >>> from bayesfed import simulations
        >>> train, test = simulations.polynomials()
        >>> train
        Federation: 24 clients, 240 rows (10 to 10 a client), fields x, y
    """
    generator = torch.Generator().manual_seed(seed)
    count = rows + test_rows
    x = torch.nn.init.trunc_normal_(
        torch.empty(clients, count, dtype=torch.float64), a=-0.8, b=0.8, generator=generator
    )
    kind = torch.arange(clients) % 2
    roots = torch.tensor(_ROOTS, dtype=torch.float64)[kind]
    mean = torch.tensor(_SIGNS)[kind, None] * (x[..., None] - roots[:, None]).prod(-1)
    scaled = x / torch.tensor(_LENGTH_SCALES, dtype=torch.float64)[kind, None]
    covariance = 0.2**2 * (-(scaled[:, :, None] - scaled[:, None]).square() / 2).exp()
    jitter = 1e-9 * torch.eye(count, dtype=torch.float64)
    noise = torch.randn(2, clients, count, generator=generator, dtype=torch.float64)
    f = mean + (torch.linalg.cholesky(covariance + jitter) @ noise[0, ..., None]).squeeze(-1)
    y = f + 0.05 * noise[1]
    train, test = (
        {f"client {i}": {"x": x[i, part], "y": y[i, part]} for i in range(clients)}
        for part in (slice(rows), slice(rows, None))
    )
    dtype = torch.get_default_dtype()
    return (
        Federation.from_arrays(train).to(dtype=dtype),
        Federation.from_arrays(test).to(dtype=dtype),
    )
