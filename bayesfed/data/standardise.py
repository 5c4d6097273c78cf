"""Means and standard deviations of fields over all clients' rows, computed from sums within each client."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from bayesfed.data.federation import Federation


def standardise(
    federation: Federation, fields: Sequence[str]
) -> tuple[Federation, dict[str, tuple[Tensor, Tensor]]]:
    """Shift and scale fields to mean 0 and standard deviation 1 over all clients' rows together.

    No rows are pooled: each client gives three sums per field, n_i, Σ_j x_ij and Σ_j x_ij², and
    the constants are computed from the totals of these sums, in float64::

        loc   = Σ_i Σ_j x_ij / Σ_i n_i
        scale = √(Σ_i Σ_j x_ij² / Σ_i n_i − loc²)

    The standard deviation is that of the population (divisor n). Each entry of a vector field has
    its own constants.

    Args:
        federation: the clients.
        fields: names of the fields to standardise; an integer field becomes floating.

    Returns:
        The federation with these fields standardised and the others unchanged, and the constants
        used: field name to ``(loc, scale)``, float64, each with the field's event shape and in the
        field's raw unit. The raw value is ``loc + scale * x``.

    Raises:
        KeyError: a field does not exist.
        ValueError: an entry of a field is constant, varies by less than a millionth of its size
            (subtract a known offset first) or overflows, so that its standard deviation cannot be
            computed from sums.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import datasets
        >>> federation = bf.Federation.from_arrays(
        ...     {"north": {"x": [1.0, 2.0]}, "south": {"x": [6.0]}}
        ... )
        >>> standardised, constants = datasets.standardise(federation, ["x"])
        >>> constants["x"]
        (tensor(3., dtype=torch.float64), tensor(2.1602, dtype=torch.float64))
        >>> standardised["x"]
        tensor([-0.9258, -0.4629,  1.3887])
    """
    wanted = [fields] if isinstance(fields, str) else list(fields)
    standardised = dict(federation.fields)
    constants = {}
    for field in wanted:
        loc, scale = moments(federation, field)
        if scale.isnan().any():
            raise ValueError(
                f"field {field!r} cannot be standardised: an entry of it is constant, varies by "
                "less than a millionth of its size (subtract an offset first), or overflows"
            )
        raw = federation[field].double()
        standardised[field] = ((raw - loc) / scale).to(federation.dtype)
        constants[field] = (loc, scale)
    return replace(federation, fields=standardised), constants


def moments(federation: Federation, field: str) -> tuple[Tensor, Tensor]:
    """Compute the mean and standard deviation of a field over all clients' rows together, from sums in each client.

    Returns:
        Both in float64, each with the field's event shape. The standard deviation is NaN where it cannot be computed
        from sums, see :func:`standardise`.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed.data.standardise import moments
        >>> federation = bf.Federation.from_arrays({"north": {"x": [1.0, 2.0]}, "south": {"x": [6.0]}})
        >>> [round(float(value), 4) for value in moments(federation, "x")]
        [3.0, 2.1602]
    """
    n, sums, squares = client_sums(federation, field)
    loc = sums.sum(0) / n
    variance = squares.sum(0) / n - loc.square()
    # below this threshold rounding is no longer negligible; a comparison with NaN is False
    sound = variance > 1e-12 * squares.sum(0) / n
    return loc, variance.where(sound, torch.nan).sqrt()


def client_sums(federation: Federation, field: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return the number of all clients' rows, and Σ_j x_ij and Σ_j x_ij² of each client, ``(N, *event)``, float64.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed.data.standardise import client_sums
        >>> federation = bf.Federation.from_arrays({"north": {"x": [1.0, 2.0]}, "south": {"x": [6.0]}})
        >>> [value.tolist() for value in client_sums(federation, "x")]
        [3, [3.0, 6.0], [5.0, 36.0]]
    """
    raw = federation[field].double()
    # only these sums, one row per client, leave a client
    sums = raw.new_zeros(len(federation), *raw.shape[1:]).index_add(0, federation.owner, raw)
    squares = torch.zeros_like(sums).index_add(0, federation.owner, raw.square())
    return federation.lengths.sum(), sums, squares
