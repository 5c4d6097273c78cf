"""Metrics of predictions, per client and over all rows: accuracy, likelihood and calibration."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bayesfed.data.plural import plural

if TYPE_CHECKING:
    import pandas as pd

_ONE = 1 - 2.0**-24
"""The largest single-precision number below 1; torchmetrics uses confidences in single precision."""


@dataclass(frozen=True, eq=False)
class Report:
    """Metrics of one set of predictions.

    Attributes:
        clients: one row per client, indexed by its name; the last column, ``n``, is its number of rows.
        overall: the same metrics over the pooled rows of all clients.

    ``clients.drop(columns="n").mean()`` is the mean in which all clients have the same weight.
    """

    clients: pd.DataFrame
    overall: pd.Series


def classification(
    probabilities: Tensor, labels: Tensor, owner: Tensor, names: Sequence[str], bins: int = 15
) -> Report:
    """Compute accuracy, negative log-likelihood, Brier score, calibration error and entropy.

    Columns of the report, computed in float64 except ``ece``, which torchmetrics computes in float32:
        ``accuracy``: fraction of rows whose most probable class, the first one if several are equal, is the label.

        ``nll``: mean of −log p(label), in nats; infinite where a label has probability 0.

        ``brier``: mean of Σ_c (p_c − [label = c])², from 0 to 2 (G. W. Brier, 1950, Monthly Weather
        Review 78, eq. 2).

        ``ece``: expected calibration error of the most probable class, Σ_b n_b/n abs(accuracy_b −
        confidence_b) over ``bins`` equal bins of confidence (C. Guo et al., 2017, "On calibration of
        modern neural networks", eq. 3). Bins are closed on the left, and the last one on both sides; those of the paper
        are closed on the right. With few rows it is large even for a calibrated prediction.

        ``entropy``: mean of −Σ_c p_c log p_c, the predictive entropy, in nats.

    Args:
        probabilities: shape ``(n, C)``, averaged over the posterior's draws.
        labels: integers 0 to C − 1, shape ``(n,)``.
        owner: position of each row's client, as ``federation.owner``: int64, shape ``(n,)``.
        names: the clients' names, as ``federation.names``.
        bins: number of bins of the calibration error.

    Raises:
        ValueError: shapes do not match; a row of ``probabilities`` is not a distribution (but logits, or not finite); a
            label is not one of the classes; a client has no rows.

    Example:
        >>> import torch
        >>> from bayesfed import metrics
        >>> p = torch.tensor([[0.8, 0.2], [0.6, 0.4], [0.5, 0.5]])
        >>> owner = torch.tensor([0, 0, 1])
        >>> report = metrics.classification(p, torch.tensor([0, 1, 0]), owner, ["north", "south"])
        >>> report.clients.round(3)
                accuracy    nll  brier  ece  entropy  n
        client
        north        0.5  0.570    0.4  0.4    0.587  2
        south        1.0  0.693    0.5  0.5    0.693  1
        >>> float(report.overall["accuracy"].round(3))
        0.667
    """
    p = probabilities.detach().double()
    labels = labels.to(p.device, torch.long)
    if p.ndim != 2 or labels.shape != p.shape[:1]:
        raise ValueError(
            f"probabilities have shape {tuple(p.shape)} and labels {tuple(labels.shape)}; "
            "they need (n, classes) and (n,)"
        )
    groups = _rows_of(owner, names, len(p))
    proper = (p >= 0).all(1) & ((p.sum(1) - 1).abs() < 1e-3)  # False for a NaN
    if not proper.all():
        row = int((~proper).nonzero()[0])
        raise ValueError(
            f"client {names[int(owner[row])]!r}: row {row} of probabilities is not a distribution "
            f"({_shortened(p[row])}). They must be at least 0 and sum to 1: neither logits nor log "
            "probabilities"
        )
    known = (labels >= 0) & (labels < p.shape[1])
    if not known.all():
        row = int((~known).nonzero()[0])
        raise ValueError(
            f"client {names[int(owner[row])]!r}: row {row} has label {int(labels[row])}, the "
            f"probabilities are of classes 0 to {p.shape[1] - 1}"
        )
    right = (p.argmax(1) == labels).double()
    nll = -p.gather(1, labels[:, None])[:, 0].log()
    brier = (p - torch.nn.functional.one_hot(labels, p.shape[1])).square().sum(1)
    entropy = torch.special.entr(p).sum(1)

    def measure(rows: Tensor) -> dict[str, float]:
        return {
            "accuracy": float(right[rows].mean()),
            "nll": float(nll[rows].mean()),
            "brier": float(brier[rows].mean()),
            "ece": _calibration_of_classes(p[rows], labels[rows], bins),
            "entropy": float(entropy[rows].mean()),
        }

    return _report(groups, names, measure)


def regression(
    draws: Tensor,
    targets: Tensor,
    owner: Tensor,
    names: Sequence[str],
    *,
    log_likelihood: Tensor | None = None,
    levels: int = 20,
) -> Report:
    """Compute relative error, negative log-likelihood and calibration error of a scalar prediction.

    Columns of the report:
        ``rsmse``: √(mean of (mean prediction − target)²) / the targets' standard deviation (divisor n), over the
        client's own rows; 1 if every prediction is their mean, and infinite or NaN if a client's targets are all equal.

        ``nll``: mean of −log (1/S) Σ_s p(target | draw s), in nats; only with ``log_likelihood``.

        ``calibration``: mean of abs(q̂_h − q_h) over the H levels q_h = (h − ½)/H, where q̂_h is the
        fraction of rows whose predictive distribution function at the target is at most q_h
        (V. Kuleshov et al., 2018, "Accurate uncertainties for deep learning using calibrated
        regression", section 3; here the mean of absolute differences in place of the sum of squares of eq. 9, and
        levels at the middles of H equal parts, since every prediction is right at a level of 1). From 0 to ½.

    The distribution function at a target is estimated by (r + ½)/(S + 1), where r is the number of the S draws below
    it, and draws equal to it count by half. The mean of the estimate is ½ for every S if predictions are calibrated.

    Args:
        draws: draws from the posterior predictive, as ``posterior.predict`` returns them: shape ``(S, n)``.
        targets: shape ``(n,)``.
        owner: position of each row's client, as ``federation.owner``: int64, shape ``(n,)``.
        names: the clients' names, as ``federation.names``.
        log_likelihood: log p(target | draw) as ``posterior.log_likelihood`` returns it: shape ``(S', n)``.
        levels: H.

    Raises:
        ValueError: shapes do not match; draws or targets are not finite; a client has no rows; ``levels`` is less
            than 1.

    Example:
        >>> import torch
        >>> from bayesfed import metrics
        >>> draws = torch.tensor([[0.0, 0.0, 5.0], [2.0, 4.0, 9.0]])
        >>> targets, owner = torch.tensor([1.0, 3.0, 7.0]), torch.tensor([0, 0, 1])
        >>> metrics.regression(draws, targets, owner, ["a", "b"], levels=2).overall.round(3)
        rsmse          0.231
        calibration    0.250
        n              3.000
        Name: overall, dtype: float64
    """
    if draws.ndim != 2 or targets.shape != draws.shape[1:]:
        raise ValueError(
            f"draws have shape {tuple(draws.shape)} and targets {tuple(targets.shape)}; "
            "they need (S, n) and (n,)"
        )
    if log_likelihood is not None and log_likelihood.shape[1:] != targets.shape:
        raise ValueError(
            f"log_likelihood has shape {tuple(log_likelihood.shape)}; it needs (S, {len(targets)})"
        )
    if levels < 1:
        raise ValueError(f"levels is {levels}; it must be a whole number of at least 1")
    groups = _rows_of(owner, names, len(targets))
    draws, targets = draws.detach(), targets.detach().to(draws.device)
    finite = draws.isfinite().all(0) & targets.isfinite()
    if not finite.all():
        row = int((~finite).nonzero()[0])
        raise ValueError(
            f"client {names[int(owner[row])]!r}: row {row} has a draw or target that is not finite"
        )
    error = draws.mean(0).double() - targets.double()
    rank = (draws < targets).sum(0) + 0.5 * (draws == targets).sum(0)
    cdf = (rank.double() + 0.5) / (len(draws) + 1)
    level = (torch.arange(levels, dtype=torch.float64, device=draws.device) + 0.5) / levels
    nll = None
    if log_likelihood is not None:
        nll = math.log(len(log_likelihood)) - log_likelihood.detach().logsumexp(0).double()

    def measure(rows: Tensor) -> dict[str, float]:
        spread = targets[rows].double().std(correction=0)
        covered = (cdf[rows, None] <= level).double().mean(0)
        likelihood = {} if nll is None else {"nll": float(nll[rows].mean())}
        return {
            "rsmse": float(error[rows].square().mean().sqrt() / spread),
            **likelihood,
            "calibration": float((covered - level).abs().mean()),
        }

    return _report(groups, names, measure)


def aggregate(clients: pd.DataFrame) -> pd.Series:
    """Average the clients' metrics, weighted by their numbers of rows, as a server can do without the rows.

    It equals :attr:`Report.overall` in metrics that are means over rows (``accuracy``, ``nll``, ``brier``,
    ``entropy``). Calibration errors of opposite sign cancel in a pool, so here ``ece`` and
    ``calibration`` are at least those of :attr:`Report.overall`; ``rsmse`` is relative to each client's own spread.

    Args:
        clients: :attr:`Report.clients`.

    Example:
        >>> import pandas as pd
        >>> from bayesfed import metrics
        >>> clients = pd.DataFrame({"accuracy": [1.0, 0.5], "n": [1, 3]}, index=["north", "south"])
        >>> float(metrics.aggregate(clients)["accuracy"])
        0.625
    """
    import pandas as pd

    n = clients["n"]
    mean = clients.drop(columns="n").mul(n, axis=0).sum(skipna=False) / n.sum()
    return pd.concat([mean, pd.Series({"n": float(n.sum())})]).rename("aggregate")


def _report(
    groups: Sequence[Tensor], names: Sequence[str], measure: Callable[[Tensor], dict[str, float]]
) -> Report:
    import pandas as pd

    everyone = torch.cat(list(groups))
    return Report(
        clients=pd.DataFrame(
            [{**measure(rows), "n": len(rows)} for rows in groups],
            index=pd.Index(list(names), name="client"),
        ),
        overall=pd.Series({**measure(everyone), "n": float(len(everyone))}, name="overall"),
    )


def _rows_of(owner: Tensor, names: Sequence[str], n: int) -> tuple[Tensor, ...]:
    """Return the positions of each client's rows, in order."""
    if owner.shape != (n,) or owner.dtype != torch.int64:
        raise ValueError(
            f"owner is {owner.dtype} of shape {tuple(owner.shape)}; it needs a client's position, "
            f"int64, for each of the {plural(n, 'row')}"
        )
    if n and not (int(owner.min()) >= 0 and int(owner.max()) < len(names)):
        raise ValueError(
            f"owner goes from {int(owner.min())} to {int(owner.max())}, there are {len(names)} names"
        )
    owner = owner.cpu()
    counts = owner.bincount(minlength=len(names)).tolist()
    if 0 in counts:
        raise ValueError(f"client {names[counts.index(0)]!r} has no rows: leave out its name")
    if not counts:
        raise ValueError("metrics need at least one client; no names were given")
    return owner.argsort(stable=True).split(counts)


def _calibration_of_classes(p: Tensor, labels: Tensor, bins: int) -> float:
    # imported here, since the import takes as long as that of torch
    from torchmetrics.functional.classification import multiclass_calibration_error

    # torchmetrics treats numbers above 1 as logits, and puts a confidence of 1 into a bin of its own
    p = p.clamp(max=_ONE)
    return float(multiclass_calibration_error(p, labels, num_classes=p.shape[1], n_bins=bins))


def _shortened(row: Tensor) -> str:
    return ", ".join(f"{v:.3g}" for v in row[:4].tolist()) + (", ..." if len(row) > 4 else "")
