"""The server's result of a fit between machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from bayesfed.data.plural import plural
from bayesfed.effects.result import Effects
from bayesfed.elbo import noise
from bayesfed.elbo.program import Params
from bayesfed.engine.moments import Moments
from bayesfed.engine.stopping.drift import caveat
from bayesfed.output import checkpoint, khat
from bayesfed.output.chains import can_sample
from bayesfed.output.comparison import Comparison
from bayesfed.output.draws import draw_globals
from bayesfed.output.log_evidence import LogEvidence, estimate_log_evidence
from bayesfed.output.posterior import Posterior
from bayesfed.output.precision import caveat as precision_caveat
from bayesfed.output.prior import derived_at, sample_prior


@dataclass(frozen=True)
class GlobalPosterior:
    """The server's result: q(θ). The clients' local variables are at their institutions.

    Attributes:
        posterior: a posterior without clients.
        refused: by institution, the number of its answers that were refused.
        absent: by institution, the number of rounds that it did not answer in time.
        effects: the effects of the plan, each followed by its hypotheses; None for one that could not be computed.
        chain_exchanges: the number of exchanges with all institutions that chains took, with secure sums two for each
            leapfrog step; 0 without chains.
        moments: those of all clients, where the institutions have revealed them; the posterior then has the clients,
            fitted to them.
        comparison: leave-one-out of this fit, and of those that it is compared with, if the plan has it.
        exchanges: the number of exchanges with institutions since the server's process was started: the description of
            their data, the rounds, all sums after these, and the message at the end, after which the institutions have
            the final draws.
    """

    posterior: Posterior
    refused: Mapping[str, int]
    absent: Mapping[str, int]
    effects: tuple[Effects | None, ...] = ()
    comparison: Comparison | None = None
    chain_exchanges: int = 0
    moments: Moments | None = None
    exchanges: int = 0

    @property
    def params(self) -> Params:
        """The guide's global parameters, unconstrained."""
        return self.posterior.params

    def sample(self, num_samples: int = 1000, *, seed: int = 0) -> dict[str, Tensor]:
        """Return independent draws of the global variables, ``(S, *event)`` each."""
        return draw_globals(self.posterior, num_samples, seed)

    def derived(self, num_samples: int = 1000, *, seed: int = 0) -> dict[str, Tensor]:
        """Return the values that the model names by ``pyro.deterministic`` outside the clients plate, ``(S, *)`` each.

        Of a formula they are its coefficients in the data's units. The draws are those of :meth:`sample`.
        """
        of = self.posterior
        one = of.select(of.federation.names[:1])  # made-up rows, of which no such value depends
        draws = self.sample(num_samples, seed=seed)
        with noise.seeded(seed):
            values = sample_prior(one, num_samples, at=draws)
        return derived_at(one, values, num_samples)

    @property
    def khat(self) -> float | None:
        """Pareto k-hat of the weights by which the draws of θ were corrected; None if they were not, or by chains."""
        mended = self.posterior.correction
        return None if mended is None else mended.khat

    @property
    def log_evidence(self) -> LogEvidence:
        """The log evidence of the model, from the weights that corrected q(θ): sums over the institutions.

        Raises:
            ValueError: q(θ) was not corrected, so that the server has no weights.
        """
        mended = self.posterior.correction
        if self.moments is not None:
            return self.posterior.log_evidence
        if mended is None or mended.log_weights is None:
            raise ValueError(
                "log_evidence needs the importance weights of a correction, and this fit had none: q(θ) needed none or "
                "was too poor (khat), draws are from chains, the run was private, or the algorithm does not correct: "
                "use SFVI()"
            )
        return estimate_log_evidence(self.posterior, None)

    @property
    def caveat(self) -> str:
        """A warning to heed before the numbers are used, or an empty text.

        That the fit has not converged; that q(θ) could not be corrected by importance weights, or only by weights
        without a finite variance, and was not drawn by chains; that the fit's precision was not reached.
        """
        of = self.posterior
        if self.moments is not None:
            return of.caveat
        moving = caveat(of.moving, of.rising, len(of.history["elbo"]), of.converged)
        return "; ".join(filter(None, (moving, self._poor or precision_caveat(of, self._chains))))

    @property
    def _poor(self) -> str:
        """The part of :attr:`caveat` about importance weights."""
        of, k = self.posterior, self.khat or 0.0
        if not of.correctable:
            return (
                "q(θ) is not a good approximation of the posterior, and importance weights are too uneven to correct "
                f"it by: {self._chains}. {khat.REMEDY}"
            )
        tried = self.chain_exchanges > 0 and (of.correction is None or of.correction.rhat is None)
        count = khat.DRAWS if of.correction is None else of.correction.count
        poor = khat.caveat(k, count) or khat.weights_caveat(of.correction)
        if not poor:
            return f"draws of θ are by importance weights: {self._chains}" if tried else ""
        return f"{poor}: {self._chains}"

    @property
    def _chains(self) -> str:
        """What chains can do about a poor q(θ), or why they did nothing."""
        of = self.posterior
        if self.chain_exchanges:
            return f"chains have not mixed in {plural(self.chain_exchanges, 'exchange')}, narrower priors may help"
        if not can_sample(of):
            return "chains do not apply, narrower priors may help"
        return (
            "chains = true under [deployment] of the experiment draws from the posterior itself, by hundreds or "
            "thousands of exchanges"
        )

    def save(self, path: str | Path) -> None:
        """Write q(θ) to one safetensors file, for :meth:`bayesfed.Posterior.load` without rows.

        Where moments were revealed the clients' variables are in it too: load it with ``moments.federation()``.
        """
        checkpoint.save(self.posterior, path, globals_only=self.moments is None)

    def __repr__(self) -> str:
        of, names = self.posterior, ", ".join(site.name for site in self.posterior.program.globals)
        used = self.chain_exchanges
        chains = f" and {plural(used, 'exchange')} of chains" if used else ""
        return (
            f"GlobalPosterior: {of.algorithm} ({of.program.guide_name}), "
            f"{plural(len(of.history['elbo']), 'round')}{chains}, {plural(len(self.refused), 'institution')}, "
            f"{plural(of.program.clients, 'client')}; {names or 'none'}"
            + (self.caveat and f"\n{self.caveat}")
        )
