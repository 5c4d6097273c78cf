"""The server's result of a fit between machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from bayesfed.effects.result import Effects
from bayesfed.elbo import noise
from bayesfed.elbo.program import Params
from bayesfed.engine.stopping.drift import caveat
from bayesfed.output import checkpoint, khat
from bayesfed.output.comparison import Comparison
from bayesfed.output.draws import draw_globals
from bayesfed.output.log_evidence import LogEvidence, estimate_log_evidence
from bayesfed.output.posterior import Posterior
from bayesfed.output.prior import derived_at, sample_prior


@dataclass(frozen=True)
class GlobalPosterior:
    """The server's result: q(θ). The clients' local variables are at their institutions.

    Attributes:
        posterior: a posterior without clients.
        refused: by institution, the number of its answers that were refused.
        absent: by institution, the number of rounds that it did not answer in time.
        effects: the effects of the plan; None for one that could not be computed.
        comparison: leave-one-out of this fit, and of those that it is compared with, if the plan has it.
    """

    posterior: Posterior
    refused: Mapping[str, int]
    absent: Mapping[str, int]
    effects: tuple[Effects | None, ...] = ()
    comparison: Comparison | None = None

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
        """Pareto k-hat of the weights by which the draws of θ were corrected; None if they were not."""
        mended = self.posterior.correction
        return None if mended is None else mended.khat

    @property
    def log_evidence(self) -> LogEvidence:
        """The log evidence of the model, from the weights that corrected q(θ): sums over the institutions.

        Raises:
            ValueError: q(θ) was not corrected, so that the server has no weights.
        """
        mended = self.posterior.correction
        if mended is None or mended.log_weights is None:
            raise ValueError(
                "log_evidence needs the importance weights of a correction, and this fit had none: q(θ) needed none or "
                "was too poor (khat), the run was private, or the algorithm does not correct: use SFVI()"
            )
        return estimate_log_evidence(self.posterior, None)

    @property
    def caveat(self) -> str:
        """A warning to heed before the numbers are used, or an empty text."""
        of = self.posterior
        moving = caveat(of.moving, of.rising, len(of.history["elbo"]), of.converged)
        draws = khat.DRAWS if of.correction is None else of.correction.count
        return moving or khat.caveat(self.khat, draws)

    def save(self, path: str | Path) -> None:
        """Write q(θ) to one safetensors file, for :meth:`bayesfed.Posterior.load` without rows."""
        checkpoint.save(self.posterior, path, globals_only=True)

    def __repr__(self) -> str:
        of, names = self.posterior, ", ".join(site.name for site in self.posterior.program.globals)
        return (
            f"GlobalPosterior: {of.algorithm} ({of.program.guide_name}), "
            f"{len(of.history['elbo']):,} rounds, {len(self.refused)} institutions, {of.program.clients:,} clients; "
            f"{names or 'none'}" + (self.caveat and f"\n{self.caveat}")
        )
