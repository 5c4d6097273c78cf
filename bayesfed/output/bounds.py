"""PAC-Bayes bounds on the risk of clients, for a loss in [a, b] (PAC-PFL, sections 3 and 4).

    client       E_{P~Q} L_i ≤ (1/β) (−E ln Z_i + β² (b − a)² / 8 m_i + I(ε_i, m_i, δ) + ln 1/δ)                 (eq. 6)
    server       mean of all clients' risks, (9);       a new client, Lemma 4.6

Z_i = E_{w ~ P} exp(−(β / m_i) Σ ℓ(w, row)) is over the rows that the client conditions on; the risk is that of its
Gibbs posterior ∝ P(w) exp(−(β / m_i) Σ ℓ). A log loss is unbounded, so :func:`clipped` clips it to [a, b]. I is the
cost of a prior that has seen the client's rows. If the prior is sampled from the optimal hyper-posterior Q*, it is
ε_i-private with ε_i = 2 β' τ (b − a) / m_i (Lemma 4.5), where β' is the β of Q*, with which the prior was trained: one
row changes ln Z_β' by at most β' (b − a) / m_i. For a prior that has seen none of the rows, ε_i = 0.

All three bounds assume the same clipped loss in Z and in Q*, and a prior that is *sampled* from Q*. Particles of PACPFL
that have seen the rows meet neither assumption: their loss was not clipped, and SVGD is deterministic, so that there is
no ε_i (PAC-PFL, 8.4). For them the bound is that of samples from the Q* which they approximate.

Each function warns if its result is vacuous, above b, or if β or λ is outside the range of its theorem.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bayesfed.data.federation import Federation
from bayesfed.elbo import noise
from bayesfed.output.dependent_rows import log_likelihoods_of_functions
from bayesfed.output.draws import draw_clients, run_model, theta_support
from bayesfed.output.fitted import Fitted
from bayesfed.rules import Stein

if TYPE_CHECKING:
    import pandas as pd


class VacuousBound(UserWarning):
    """A bound that is no better than the largest loss, or whose theorem does not apply."""


def clipped(log_likelihood: Tensor, low: float, high: float) -> Tensor:
    """Compute the log loss −log p, clipped to [a, b].

    Example:
        >>> import torch
        >>> from bayesfed import bounds
        >>> bounds.clipped(torch.tensor([-0.5, -7.0]), low=0.0, high=3.0)
        tensor([0.5000, 3.0000])
    """
    return (-log_likelihood).clamp(low, high)


def log_partition(losses: Tensor, beta: float) -> Tensor:
    """Estimate ln Z = ln E_{w ~ P} exp(−β · mean loss) from draws of w.

    The estimate is too low on average, so that bounds are too high.

    Args:
        losses: losses on m rows of L hypotheses drawn from the prior, ``(L, ..., m)``.
        beta: β.

    Returns:
        ``(...)``.
    """
    return (-beta * losses.mean(-1)).logsumexp(0) - math.log(len(losses))


def privacy_cost(epsilon: float, rows: int, delta: float) -> float:
    """Compute I(ε, m, δ) of Theorem 3.2, the cost of an ε-private prior that has seen the m rows.

    Example:
        >>> from bayesfed import bounds
        >>> round(bounds.privacy_cost(0.0, rows=10, delta=0.1), 4)  # ln 2
        0.6931
    """
    return rows * epsilon**2 / 2 + epsilon * math.sqrt(rows * math.log(4 / delta) / 2) + math.log(2)


def client(
    log_z: float,
    *,
    rows: int,
    beta: float,
    low: float,
    high: float,
    delta: float,
    tau: float = 0.0,
    trained: float | None = None,
    seen: int | None = None,
) -> float:
    """Bound a client's risk, with probability 1 − δ (eq. 6).

    Args:
        log_z: ln Z_β of the m_i + m̃_i rows that the client conditions on, averaged over priors from Q.
        rows: m_i + m̃_i.
        beta: β.
        low: a, the least loss.
        high: b, the greatest.
        delta: δ.
        tau: τ of the Q* that the prior is sampled from; 0 for a prior that has seen no data.
        trained: β' of that Q*; by default β.
        seen: m_i, the number of rows that Q* has seen; by default all.

    Example:
        >>> from bayesfed import bounds
        >>> round(bounds.client(-2.0, rows=100, beta=10.0, low=0.0, high=1.0, delta=0.1), 4)
        0.5121
    """
    seen = rows if seen is None else seen
    epsilon = _epsilon(beta if trained is None else trained, tau, high - low, seen)
    paid = beta**2 * (high - low) ** 2 / (8 * rows) + privacy_cost(epsilon, seen, delta)
    return _bound("client", -log_z / beta, (paid + math.log(1 / delta)) / beta, low, high)


def server(
    log_z: Sequence[float],
    kl: float,
    *,
    rows: Sequence[int],
    new_rows: Sequence[int] | None,
    beta: float,
    lam: float,
    low: float,
    high: float,
    delta: float,
    upsilon: float = 1e-4,
) -> float:
    """Bound the mean risk of all n clients, with probability 1 − δ (Theorem 4.2, Lemma 4.3).

    Δ_i = (b − a) min(1, e^x − e^−x) / n with x = 2 β (b − a) m̃_i / (m_i + m̃_i) bounds the change of a client's risk
    by new rows. The theorem has b (e^x − e^−x), by eq. 21, which holds for a ≥ 0 only. New rows change the risk of ℓ −
    a as much as that of ℓ, so b may be replaced by b − a: this holds for any a, and is tighter for a > 0.

    Args:
        log_z: E_{P~Q} ln Z_β of each client.
        kl: KL(Q ‖ hyper-prior).
        rows: m_i.
        new_rows: m̃_i, rows that come later; None if unknown.
        beta: β.
        lam: λ.
        low: a.
        high: b.
        delta: δ.
        upsilon: υ.

    Raises:
        ValueError: the sequences have different lengths.
    """
    if len(rows) != len(log_z) or (new_rows is not None and len(new_rows) != len(rows)):
        raise ValueError("log_z, rows and new_rows need one number for each client")
    n, width = len(rows), high - low
    if new_rows is None:
        changed, gaps = n, [width / n] * n
    else:
        changed = sum(extra > 0 for extra in new_rows)
        powers = [
            2 * beta * width * extra / (m + extra) for m, extra in zip(rows, new_rows, strict=True)
        ]
        gaps = [width * min(1.0, 2 * math.sinh(min(power, 1.0))) / n for power in powers]
    least = changed + upsilon
    data = -sum(log_z) / (n * beta) + (1 / (n * beta) + least / lam) * kl
    paid = _data_free_terms(rows, gaps, beta, lam, least, width, delta)
    return _bound("server", data, paid, low, high)


def new_client(
    log_z: float,
    *,
    rows: Sequence[int],
    changed: int,
    beta: float,
    lam: float,
    low: float,
    high: float,
    delta: float,
    upsilon: float = 1e-4,
) -> float:
    """Bound the expected risk of a client that takes no part in training, with probability 1 − δ (Lemma 4.6).

    Args:
        log_z: ln Z_τ = ln E_{P ~ hyper-prior} exp(τ Σ_i ln Z_β(P, S_i)).
        rows: m_i of the n clients that took part.
        changed: n₂, the number of these that get more rows.
        beta: β.
        lam: λ.
        low: a.
        high: b.
        delta: δ.
        upsilon: υ.
    """
    n, width, least = len(rows), high - low, changed + upsilon
    data = -(1 / (n * beta) + least / lam) * log_z
    paid = _data_free_terms(rows, [width / n] * n, beta, lam, least, width, delta)
    return _bound("new client's", data, paid, low, high)


def report(
    posterior: Fitted,
    test: Federation,
    *,
    low: float,
    high: float,
    delta: float = 0.1,
    beta: float | None = None,
    draws: int = 1000,
    seen: bool = True,
    seed: int = 0,
) -> pd.DataFrame:
    """Tabulate each client's bound and its risk on test rows, for the clipped log loss of a PAC-PFL posterior.

    Hypotheses are drawn from the priors that the particles are, and weighted by exp(−β mean loss) on the client's rows.
    By this Monte Carlo estimate risks have an error, large if the effective sample size is small, and ln Z is too low
    on average.

    No theorem covers particles that have seen the rows, since SVGD is deterministic and their loss was not clipped
    (PAC-PFL, 8.4). Their bound is that of priors sampled from the Q* of the clipped loss, with its ε_i.

    Args:
        posterior: a posterior of :class:`~bayesfed.PACPFL`.
        test: rows of the posterior's clients.
        low: a.
        high: b.
        delta: δ, for each client separately.
        beta: β; by default √m_i, so that the bound tightens as m_i grows.
        draws: number of hypotheses for each particle.
        seen: the particles were fitted to these clients' rows; False for new clients (ε_i = 0).
        seed: seed of the draws.

    Returns:
        One row per client: ``rows`` m_i, ``beta``, ``epsilon`` ε_i, ``empirical`` and ``risk`` of the Gibbs posterior
        on its own and on the test rows, ``bound``, ``vacuous``, and ``covered``: the theorem covers these particles, as
        they have not seen the rows.

    Raises:
        TypeError: the posterior has no particles.
        ValueError: rows of a client are one event, but not of a function and independent noise.
    """
    import pandas as pd

    found: list[dict[str, object]] = []
    algorithm, federation = posterior.algorithm, posterior.federation
    if not posterior.program.weights_draws:
        raise TypeError(
            f"{algorithm} has no particles, which the bounds take as priors: use PACPFL"
        )
    tau, trained_beta = 0.0, getattr(posterior.program.guide, "beta", None)
    if seen:
        assert isinstance(algorithm.rule, Stein)
        tau = algorithm.rule.temperature(len(federation), federation.rows / len(federation))
    for name, own, there in prior_losses(posterior, test, draws, seed, low, high):
        m = own.shape[-1]
        b = math.sqrt(m) if beta is None else beta
        trained = m if trained_beta is None else trained_beta
        log_z = float(log_partition(own, b).mean())
        weight = (-b * own.mean(-1)).softmax(0)  # (L, k)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", VacuousBound)
            bound = client(
                log_z, rows=m, beta=b, low=low, high=high, delta=delta, tau=tau, trained=trained
            )
        found.append(
            {
                "client": name,
                "rows": m,
                "beta": b,
                "epsilon": _epsilon(trained, tau, high - low, m),
                "empirical": float((weight * own.mean(-1)).sum(0).mean()),
                "risk": float((weight * there.mean(-1)).sum(0).mean()),
                "bound": bound,
                "vacuous": bound >= high,
                "covered": not seen,
            }
        )
    table = pd.DataFrame(found).set_index("client")
    vacuous = int(table["vacuous"].sum())
    if vacuous:
        _warn(
            f"{vacuous} of {len(test)} clients' bounds are vacuous (at least b = {high:g}): more rows, a smaller "
            "[a, b], or a smaller tau would tighten them"
        )
    return table


def prior_losses(
    fitted: Fitted, test: Federation, draws: int, seed: int, low: float, high: float
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Compute the log loss, clipped to [a, b], of hypotheses drawn from the priors that the particles are.

    Yields:
        For each client of ``test`` its name and the losses ``(L, k, m)`` on its own and on the test rows.
    """
    program, (site,) = fitted.program, fitted.program.observed
    few, test = fitted.select(test.names), test.to(fitted.federation.device)
    priors = theta_support(fitted)
    if priors is None:
        raise TypeError(
            f"{program.guide_name} is no list of priors: q(θ) has infinitely many values"
        )
    theta, size = priors
    key, each = fitted.key(seed, "prior losses"), draws if program.locals else 1
    for i, name in enumerate(test.names):
        chunk = torch.tensor([i])
        batches = few.federation.batch(chunk), test.batch(chunk)
        found = draw_clients(few, theta, size, chunk, key, each)
        if site.joint:
            keys = noise.fold(key, few.federation.stream_ids[chunk])
            log_probs = log_likelihoods_of_functions(
                few, found, chunk, *batches, draws // each, keys
            )
        else:
            nodes = [
                run_model(few, program.model, found, chunk, batch)[site.name] for batch in batches
            ]
            log_probs = tuple(
                node["fn"].log_prob(node["value"]).expand(found.count, 1, -1)[None, :, 0]
                for node in nodes
            )
        own, there = (
            value.reshape(-1, size, each, value.shape[-1]).transpose(1, 2).flatten(0, 1)
            for value in log_probs
        )
        yield name, clipped(own, low, high), clipped(there, low, high)


def _epsilon(trained: float, tau: float, width: float, seen: int) -> float:
    """Compute ε_i of a prior from the optimal hyper-posterior (Lemma 4.5)."""
    return 2 * trained * tau * width / seen if seen else 0.0


def _data_free_terms(
    rows: Sequence[int],
    gaps: Sequence[float],
    beta: float,
    lam: float,
    least: float,
    width: float,
    delta: float,
) -> float:
    """Sum the terms of Theorem 4.2 and Lemma 4.6 that no loss enters; ``least`` is n₂ + υ, ``gaps`` are Δ_i.

    The paper asks for n β ≥ 1 and λ > n₂ + υ. But ln(1/δ) / √n rests on E exp(√n ψ / κ) ≤ (E exp ψ)^(√n / κ), Jensen's
    inequality for κ = n β and for κ = λ / (n₂ + υ), which holds where κ ≥ √n.
    """
    n = len(rows)
    if beta < 1 / math.sqrt(n):
        _warn(f"beta is {beta:g}, below 1 / √n = {n**-0.5:g}: the theorem's proof does not apply")
    if lam <= least * math.sqrt(n):
        _warn(
            f"lam is {lam:g}, not above √n (n₂ + υ) = {least * n**0.5:g}: the theorem's proof does not apply"
        )
    return (
        beta * width**2 / (8 * n) * sum(1 / m for m in rows)
        + lam * sum(gap**2 for gap in gaps) / (8 * least)
        + math.log(1 / delta) / math.sqrt(n)
    )


def _bound(what: str, data: float, paid: float, low: float, high: float) -> float:
    """Add the part that depends on the losses, at least a, and the part that does not; warn if the sum is vacuous.

    PAC-PFL (8.3.1) names two cases in which the second part alone is too large: with β = m_i, b − a ≥ 8 and
    ε_i ≥ √(2 (b − a)).
    """
    if data + paid >= high:
        why = ""
        if paid >= high - low:
            why = f", and would be for any data: its terms without a loss add up to {paid:.3g}"
        _warn(
            f"the {what} bound {data + paid:.3g} is vacuous: the loss never exceeds {high:g}{why}"
        )
    return data + paid


def _warn(message: str) -> None:
    warnings.warn(message, VacuousBound, stacklevel=4)
