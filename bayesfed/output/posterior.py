"""The fitted posterior: draws, predictions, log likelihoods and new clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributions import MixtureSameFamily

from bayesfed.checks.data import check_rows
from bayesfed.data.federation import Federation, Model
from bayesfed.engine.stopping.drift import caveat
from bayesfed.output import checkpoint, khat, mixture, poor_variables, predictions
from bayesfed.output.chains import correction_by_chains, remedy, with_chains_where_uncertain
from bayesfed.output.correction import correct
from bayesfed.output.fitted import CorrectionResult, Fitted
from bayesfed.output.importance import pareto_k
from bayesfed.output.log_densities import elbo
from bayesfed.output.log_evidence import LogEvidence, estimate_log_evidence
from bayesfed.output.personalize import personalize_new
from bayesfed.output.poor_variables import ClientCheck, Distance
from bayesfed.output.precision import caveat as precision_caveat
from bayesfed.output.precision import checked_precision
from bayesfed.output.without import leave_out
from bayesfed.report.facts import EffectTable

if TYPE_CHECKING:
    import arviz as az
    import pandas as pd
    import xarray as xr


@dataclass(frozen=True, eq=False)
class Posterior(Fitted):
    """q(θ) Π_i q(w_i | θ), fitted to a federation, with draws, predictions and diagnostics as methods.

    Its attributes are those of :class:`~bayesfed.output.fitted.Fitted`: ``params``, ``local_params``, ``history``,
    ``federation``, ``program``, ``algorithm`` and others.
    """

    @cached_property
    def khat(self) -> float | None:
        """Pareto k-hat of the importance weights p(D, θ, w) / q(θ, w): above its limit q is a poor approximation.

        The limit is min(0.7, 1 − 1 / log10 S) of S draws, 0.67 of the thousand of an uncorrected q. For a corrected
        posterior it is that of the weights by which its draws were resampled. None if the draws are those of chains, if
        q(θ) has no density, under privacy, or if the clients' rows are too many.
        """
        if self.correction is not None:
            return self.correction.khat
        return None if self._log_weights is None else pareto_k(self._log_weights)

    @cached_property
    def _log_weights(self) -> Tensor | None:
        return None if self.correction is not None else khat.log_weights(self)

    @cached_property
    def poor_globals(self) -> dict[str, Distance]:
        """The global sites in which an uncorrected q(θ) differs from its importance-weighted draws, the worst first.

        By site the shift of its mean and the ratio of its sd, see :mod:`bayesfed.output.poor_variables`.
        """
        if self._log_weights is None:
            return {}
        return poor_variables.find_poor_globals(self, self._log_weights)

    @cached_property
    def poor_clients(self) -> dict[str, Distance]:
        """The clients whose draws are not a good approximation of their posteriors given θ, the worst first.

        By client the site, the shift of its mean and the ratio of its standard deviation, see
        :mod:`bayesfed.output.poor_variables`. :meth:`corrected` draws their variables by importance sampling.
        """
        return self._client_check.poor

    @cached_property
    def log_evidence(self) -> LogEvidence:
        """The log evidence log p(D) of the model, with Monte Carlo standard error and k-hat of its importance weights.

        The difference of two is a log Bayes factor. Evidence depends on the priors, however weak they are; both models
        must have the same rows, and the outcome in the same unit. See :mod:`bayesfed.output.log_evidence`.

        Raises:
            ValueError: this is the posterior of some of the clients, or it has no importance weights: those of point
                estimates, particles and private runs, and if the clients have too many rows.
        """
        return estimate_log_evidence(self, self._log_weights)

    @cached_property
    def _plain(self) -> Posterior:
        return replace(self, correction=None, correctable=True, resampled=frozenset())

    @cached_property
    def _client_check(self) -> ClientCheck:
        return poor_variables.check_clients(self)

    @property
    def caveat(self) -> str:
        """What limits the posterior, empty if nothing is known.

        That q had not converged; and that it is far from the posterior, as a whole or for some variables or clients, or
        that there are too few draws for the precision that was asked for.
        """
        moving = caveat(self.moving, self.rising, len(self.history["elbo"]), self.converged)
        draws = khat.draws_of(self, self._log_weights)
        far = khat.caveat(self.khat, draws) or ("" if self.correctable else khat.UNCORRECTABLE)
        far = far or khat.weights_caveat(self.correction)
        far += remedy(self) if far else ""
        poor = poor_variables.caveat(self.poor_globals, self.poor_clients)
        return "; ".join(filter(None, (moving, far or precision_caveat(self) or poor)))

    def __repr__(self) -> str:
        return self.title + (self.caveat and f"\n{self.caveat}")

    def corrected(self) -> Posterior:
        """Return the posterior with draws by importance sampling, where q needs and allows it.

        Draws of θ in place of q(θ), see :mod:`bayesfed.output.correction`, and of the variables of
        :attr:`poor_clients` in place of q(w_i | θ). Fits by SFVI are corrected when they end. Where the importance
        weights of a fit that stopped by itself are too uneven, or have a k-hat above 0.5, chains are tried, see
        :meth:`with_chains`.

        Raises:
            ValueError: this is not the posterior of all clients of the fit, whose rows determine the weights.
        """
        self.check_is_of_all("correct the posterior of the fit, then select or personalize")
        return self._plain.with_correction(correct(self._plain))

    def with_correction(self, found: CorrectionResult) -> Posterior:
        """Return the posterior with this correction of q(θ), or with chains where its weights are not certain.

        Args:
            found: the outcome of importance sampling.
        """
        correction, correctable = with_chains_where_uncertain(self, found)
        corrected = replace(self, correction=correction, correctable=correctable)
        return corrected.with_clients_resampled()

    def with_chains(self, *, seed: int = 0) -> Posterior:
        """Return the posterior with draws of θ by Hamiltonian Monte Carlo, many chains that start near the posterior.

        They are exact but for Monte Carlo error, where q is not: see :mod:`bayesfed.output.chains`. Each step of a
        chain needs the rows of all clients, so that this is for data in one process.

        Args:
            seed: seed of the chains.

        Raises:
            ValueError: chains do not apply to this fit, or have not mixed.
        """
        correction = correction_by_chains(self, seed)
        return replace(self._plain, correction=correction).with_clients_resampled()

    def with_precision(self, precision: float) -> Posterior:
        """Return the posterior with enough draws of θ for a Monte Carlo error of the globals' means.

        By more importance sampling, then by chains; :attr:`caveat` says if it is not reached. Give :meth:`sample` and
        :meth:`to_arviz` a ``num_samples`` of at least 1 / precision²: they draw from these.

        Args:
            precision: the largest :attr:`monte_carlo_error`, at least 0.002 and below 1, in posterior standard
            deviations.

        Raises:
            ValueError: it is out of range; this is not the posterior of all clients of the fit, or it was private.

        Example:
            >>> import bayesfed as bf
            >>> from bayesfed import datasets, models
            >>> posterior = bf.fit(models.eight_schools, datasets.eight_schools()).with_precision(0.01)
            >>> posterior.monte_carlo_error <= 0.01
            True
        """
        return replace(self, precision=checked_precision(self, precision)).corrected()

    def without(self, *clients: str) -> Posterior:
        """Return the posterior without some of the clients; see :func:`bayesfed.output.without.leave_out`."""
        return leave_out(self, clients).with_clients_resampled()

    def with_clients_resampled(self) -> Posterior:
        """Return the posterior with the variables of clients drawn by importance sampling where q may be poor."""
        doubtful = self._client_check.doubtful
        return replace(self, resampled=self.resampled | doubtful) if doubtful else self

    def sample(
        self, num_samples: int = 1000, *, seed: int = 0, centre: bool = False
    ) -> dict[str, Tensor]:
        """Draw every latent site, independently.

        If the guide weights draws, as particles do, θ is drawn from q(θ), and a client's variables are chosen by weight
        from several draws given θ.

        Args:
            num_samples: S.
            seed: seed of the draws.
            centre: return the centre of the guide (zero noise) for every draw: the posterior mean if the guide is
                Normal, one of the particles if there are particles.

        Returns:
            Site name to draws: globals ``(S, *event)``, locals ``(S, N, *event)``; globals only, if the posterior was
            loaded without rows.
        """
        return predictions.sample(self, num_samples, seed, centre=centre)

    def predict(
        self, federation: Federation | None = None, num_samples: int = 1000, *, seed: int = 0
    ) -> dict[str, Tensor]:
        """Draw from the posterior predictive distribution.

        Args:
            federation: rows to predict, of clients of this posterior (:meth:`personalize` adds new ones); observed
                fields may be absent if the model reads them with ``obs.get``. By default the rows of the fit.
            num_samples: S.
            seed: seed of the draws.

        Returns:
            Observed site to draws ``(S, rows, *event)``, rows in the federation's order; ``(S, N, *event)`` for a site
            outside the observations plate.
        """
        return predictions.predict(self, self._rows(federation), num_samples, seed)

    def log_likelihood(
        self, federation: Federation | None = None, num_samples: int = 1000, *, seed: int = 0
    ) -> dict[str, Tensor]:
        """Compute log p(observation | draw) of every row, for the draws that :meth:`sample` gives.

        If clients have discrete variables, the density of a row of the fit is conditional on all other rows of its
        client, as leave-one-out needs it, and that of a new row on the client's rows of the fit.

        Args:
            federation: rows of clients of this posterior, with their outcomes; by default the rows of the fit.
            num_samples: S.
            seed: seed of the draws.

        Returns:
            Observed site, or factor, to ``(S, rows)``, NaN where the outcome is missing, or ``(S, N)`` for a site
            outside the observations plate.

        Raises:
            ValueError: the rows have no outcomes.
        """
        return predictions.log_likelihood(self, self._rows(federation), num_samples, seed)

    def derived(
        self, federation: Federation | None = None, num_samples: int = 1000, *, seed: int = 0
    ) -> dict[str, Tensor]:
        """Compute the model's ``pyro.deterministic`` sites, for the draws that :meth:`sample` gives.

        Args:
            federation: rows of clients of this posterior; by default the rows of the fit.
            num_samples: S.
            seed: seed of the draws.

        Returns:
            Name to ``(S, *)`` for a site outside the clients plate, ``(S, N, *)`` inside it, ``(S, rows, *)`` inside
            the observations plate.

        Example:
            >>> import bayesfed as bf, pandas as pd
            >>> rows = pd.DataFrame({"site": ["a", "a", "b"], "x": [0.0, 1.0, 2.0], "y": [1.0, 3.0, 2.0]})
            >>> model = bf.formula("y ~ x + (1 | site)", rows)
            >>> bf.fit(model, model.federation, rounds=2).derived(num_samples=100)["x"].shape
            torch.Size([100])
        """
        return predictions.derived(self, self._rows(federation), num_samples, seed)

    def probabilities(
        self,
        federation: Federation | None = None,
        num_samples: int = 100,
        *,
        seed: int = 0,
        centre: bool = False,
    ) -> dict[str, Tensor]:
        """Compute class probabilities of every row, averaged over draws of the posterior.

        Args:
            federation: rows of clients of this posterior; by default the rows of the fit.
            num_samples: S.
            seed: seed of the draws.
            centre: predict with the posterior's centre instead of draws, see :meth:`sample`; without effect where a
                client's rows are one event, as of a Gaussian process.

        Returns:
            Observed site to ``(rows, classes)``, or ``(N, classes)`` for a site outside the observations plate; the
            classes are the site's possible values, in order.

        Raises:
            ValueError: the possible values of an observed site cannot be enumerated.
        """
        rows = self._rows(federation)
        return predictions.probabilities(self, rows, num_samples, seed, centre=centre)

    def kinds(self, num_samples: int = 1000, *, seed: int = 0) -> dict[str, Tensor]:
        """Compute posterior probabilities of the clients' discrete variables, which the fit summed out.

        Args:
            num_samples: number of draws of all other variables, over which the probabilities are averaged.
            seed: seed of the draws.

        Returns:
            Discrete site inside the clients plate to ``(N, values)``, in the order in which the site's distribution
            enumerates them; empty if there is none.

        Example:
            >>> import bayesfed as bf, pyro, pyro.distributions as dist
            >>> def model(federation):
            ...     level = pyro.sample("level", dist.Normal(0.0, 1.0))
            ...     with federation.clients():
            ...         high = pyro.sample("high", dist.Bernoulli(0.5))
            ...         with federation.observations() as obs:
            ...             pyro.sample("y", dist.Normal(level + 9 * high, 1.0), obs=obs.get("y"))
            >>> data = bf.Federation.from_arrays({"a": {"y": [9.0, 8.0]}, "b": {"y": [0.5]}})
            >>> bf.fit(model, data).kinds(100)["high"].argmax(1)
            tensor([1, 0])
        """
        return predictions.discrete_probabilities(self, num_samples, seed)

    def predictive(
        self, federation: Federation | None = None, num_samples: int = 100, *, seed: int = 0
    ) -> MixtureSameFamily:
        """Return the predictive distribution of every row; see :func:`bayesfed.output.mixture.predictive`."""
        return mixture.predictive(self, self._rows(federation), num_samples, seed=seed)

    def elbo(self, num_samples: int = 1000, *, seed: int = 0) -> Tensor:
        """Compute the ELBO of all clients, one value per draw: shape ``(S,)``; its mean estimates the ELBO."""
        return elbo(self, num_samples, seed)

    def personalize(
        self,
        federation: Federation,
        *,
        steps: int | None = None,
        lr: float | None = None,
        batch_size: int | None = None,
        seed: int = 0,
    ) -> Posterior:
        """Fit the local posteriors of clients that took no part, with q(θ) unchanged.

        Each client works on its own variables; it sends nothing, and no other client takes part.

        Args:
            federation: the new clients and their data. A client without outcomes gets variables that follow from q(θ)
                and its covariates.
            steps: number of steps; by default the algorithm's ``personal_steps``.
            lr: learning rate of the steps; by default the algorithm's.
            batch_size: rows per client and step; by default all.
            seed: seed of the noise.

        Returns:
            A posterior over the new clients.
        """
        options: dict[str, Any] = {"steps": steps, "lr": lr, "batch_size": batch_size}
        rows = self._rows(federation)
        federation, own = personalize_new(self, rows, seed, **options)
        return replace(self, federation=federation, local_params=own)

    def to_arviz(self, num_samples: int = 1000, *, seed: int = 0) -> az.InferenceData | xr.DataTree:
        """Return draws, predictions and data for ArviZ; see :func:`bayesfed.output.inference_data.to_arviz`."""
        from bayesfed.output.inference_data import to_arviz

        return to_arviz(self, num_samples, seed=seed, khat=self.khat, caveat=self.caveat)

    def to_frame(self, num_samples: int = 4000, *, seed: int = 0) -> pd.DataFrame:
        """Return draws as a table that R's posterior reads; see :func:`bayesfed.output.table.draws_table`."""
        from bayesfed.output.table import draws_table

        return draws_table(self, num_samples, seed=seed)

    def report(
        self,
        path: str | Path,
        *,
        title: str = "",
        effects: Sequence[EffectTable] = (),
        num_samples: int = 1000,
    ) -> None:
        """Write a report as one HTML file; see :func:`bayesfed.output.study.write_report`."""
        from bayesfed.output.study import write_report

        options: dict[str, Any] = {"title": title, "effects": effects, "num_samples": num_samples}
        write_report(self, path, **options, khat=self.khat, caveat=self.caveat)

    def save(self, path: str | Path) -> None:
        """Write to one safetensors file, atomically; see :func:`bayesfed.output.checkpoint.save`."""
        checkpoint.save(self, path)

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: Model,
        federation: Federation | None = None,
        *,
        guide: Callable[[Any], Any] | None = None,
        other_rows: bool = False,
    ) -> Posterior:
        """Read a file that :meth:`save` wrote; see :func:`bayesfed.output.checkpoint.load`."""
        found = checkpoint.load(path, model, federation, guide=guide, other_rows=other_rows)
        return cls(**vars(found))

    def _rows(self, federation: Federation | None) -> Federation:
        """Return the given rows on the device of the fit, by default the rows of the fit, as the same object."""
        if federation is None or federation is self.federation:
            return self.federation
        check_rows(federation)
        return federation.to(self.federation.device)
