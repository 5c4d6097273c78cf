"""The families: the likelihood of an outcome, its parameters with their links and default priors, in one table."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal

import pyro.distributions as dist
import torch
from torch import Tensor

from bayesfed.formulas.terms import FormulaError

Link = Literal["identity", "log", "logit"]


@dataclass(frozen=True)
class Parameter:
    """A parameter of a family: one number, or ``inverse link (linear predictor)`` where the formula has its predictors.

    Attributes:
        link: ``"log"`` or ``"logit"``.
        prior: the code of its default prior as one number.
        in_units: it has the outcome's unit.
    """

    link: Link
    prior: str
    in_units: bool = False


@dataclass(frozen=True)
class Family:
    """A likelihood as code, a function of the linear predictor ``mean`` and of further parameters.

    The expectation of the outcome, for predictions and effects, is that of the distribution.

    Attributes:
        name: as in ``bf.formula(..., family=name)``.
        link: from the expectation to the linear predictor; of zero-inflated and hurdle families, from that of the part
            without additional zeros.
        likelihood: the code of the distribution of an observation.
        values: the outcomes that it has, a key of :data:`VALUES`.
        linear_predictor: the linear predictor as a function of the distribution; None if there are several.
        parameters: name to parameter, in the likelihood by its name.
        behind: function behind the outcome, ``"cens"`` or ``"se"``, to the likelihood with it.
        trials: the outcome is ``p(y, n)``.
        of_log: the linear predictor is the expectation of log y.
    """

    name: str
    link: Link
    likelihood: str
    values: str
    linear_predictor: Callable[[Any], Tensor] | None
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    behind: Mapping[str, str] = field(default_factory=dict)
    trials: bool = False
    of_log: bool = False

    @property
    def categories(self) -> bool:
        """The outcome is one of several categories."""
        return self.values == "categories"

    @property
    def standardised(self) -> bool:
        """The program standardises the outcome, or its logarithm."""
        return self.link == "identity" or self.of_log

    @property
    def thresholds(self) -> bool:
        """Thresholds between categories are in place of the intercept."""
        return "cutpoints" in self.likelihood

    def parameters_of(self, likelihood: str) -> dict[str, Parameter]:
        """Return the parameters that are in a likelihood."""
        found = self.parameters.items()
        return {name: value for name, value in found if re.search(rf"\b{name}\b", likelihood)}


VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "numbers": lambda y: y.isfinite(),
    "numbers above 0": lambda y: y > 0,
    "numbers from 0": lambda y: y >= 0,
    "numbers between 0 and 1": lambda y: (y > 0) & (y < 1),
    "numbers from 0 to below 1": lambda y: (y >= 0) & (y < 1),
    "0 and 1": lambda y: (y == 0) | (y == 1),
    "counts": lambda y: (y >= 0) & (y == y.round()),
    "categories": lambda y: y.isfinite(),
}
"""The values of an outcome, to a test of them."""

_SIGMA = {"sigma": Parameter("log", "dist.FoldedDistribution(dist.StudentT(4.0, 0.0, 1.0))", True)}
_NU = {"nu": Parameter("log", "dist.Gamma(2.0, 0.1)")}
_ALPHA = {"alpha": Parameter("log", "dist.HalfCauchy(1.0)")}
_KAPPA = {"kappa": Parameter("log", "dist.HalfCauchy(1.0)")}
_ZI = {"zi": Parameter("logit", "dist.Beta(1.0, 1.0)")}
_HU = {"hu": Parameter("logit", "dist.Beta(1.0, 1.0)")}
_GAMMA = "dist.Gamma(alpha, alpha * (-mean).exp())"
_WEIBULL = "mean - (1.0 + 1.0 / alpha).lgamma()"
_EVENT = '1.0 - obs["cens"]'
_BETA = "kappa * mean.sigmoid(), kappa * (-mean).sigmoid()"
_POISSON = "dist.Poisson(mean.exp())"
_NB = "alpha, logits=mean - alpha.log()"


def _log_mean(fn: Any) -> Tensor:
    return fn.mean.log()


def _log_mean_of_base(fn: Any) -> Tensor:
    return fn.base_dist.mean.log()


def _logit_mean(fn: Any) -> Tensor:
    """Of a Beta distribution, of a binomial one whose probability has it, or of such a part of a hurdle."""
    beta = getattr(fn, "base_dist", fn)
    return beta.concentration1.log() - beta.concentration0.log()


IMPORTS = {
    "CensoredWeibull": "bayesfed.models.weibull_survival",
    "Hurdle": "bayesfed.formulas.hurdle",
    "Ordered": "bayesfed.models.ordered_logistic",
    "SimplexToOrderedTransform": "pyro.distributions.transforms",
}
"""Name in a program to the module from which it is imported."""

# fmt: off
_TABLE = (
    Family("gaussian", "identity", "dist.Normal(mean, sigma)", "numbers", attrgetter("loc"),
           _SIGMA, {"se": 'dist.Normal(mean, obs["se"])'}),
    Family("student_t", "identity", "dist.StudentT(nu, mean, sigma)", "numbers", attrgetter("loc"),
           _SIGMA | _NU),
    Family("lognormal", "log", "dist.LogNormal(mean, sigma)", "numbers above 0", _log_mean,
           _SIGMA, of_log=True),
    Family("gamma", "log", _GAMMA, "numbers above 0", _log_mean, _ALPHA),
    Family("weibull", "log", f"dist.Weibull(({_WEIBULL}).exp(), alpha)", "numbers above 0",
           _log_mean, _ALPHA, {"cens": f"CensoredWeibull({_WEIBULL}, alpha, {_EVENT})"}),
    Family("exponential", "log", "dist.Exponential((-mean).exp())", "numbers above 0", _log_mean,
           behind={"cens": f"CensoredWeibull(mean, torch.ones(()), {_EVENT})"}),
    Family("hurdle_gamma", "log", f"Hurdle({_GAMMA}, hu)", "numbers from 0",
           _log_mean_of_base, _ALPHA | _HU),
    Family("beta", "logit", f"dist.Beta({_BETA})", "numbers between 0 and 1", _logit_mean, _KAPPA),
    Family("zero_inflated_beta", "logit", f"Hurdle(dist.Beta({_BETA}), zi)",
           "numbers from 0 to below 1", _logit_mean, _KAPPA | _ZI),
    Family("bernoulli", "logit", "dist.Bernoulli(logits=mean)", "0 and 1", attrgetter("logits")),
    Family("binomial", "logit", 'dist.Binomial(obs["trials"], logits=mean)', "counts",
           attrgetter("logits"), trials=True),
    Family("beta_binomial", "logit", f'dist.BetaBinomial({_BETA}, obs["trials"])', "counts",
           _logit_mean, _KAPPA, trials=True),
    Family("poisson", "log", _POISSON, "counts", _log_mean),
    Family("negative_binomial", "log", f"dist.NegativeBinomial({_NB})", "counts", _log_mean,
           _ALPHA),
    Family("zero_inflated_poisson", "log", "dist.ZeroInflatedPoisson(mean.exp(), gate=zi)",
           "counts", _log_mean_of_base, _ZI),
    Family("zero_inflated_negative_binomial", "log",
           f"dist.ZeroInflatedNegativeBinomial({_NB}, gate=zi)", "counts", _log_mean_of_base,
           _ALPHA | _ZI),
    Family("hurdle_poisson", "log", f"Hurdle({_POISSON}, hu)", "counts", _log_mean_of_base, _HU),
    Family("hurdle_negative_binomial", "log", f"Hurdle(dist.NegativeBinomial({_NB}), hu)",
           "counts", _log_mean_of_base, _ALPHA | _HU),
    Family("cumulative", "logit", "Ordered(mean, cutpoints)", "categories",
           attrgetter("location")),
    Family("categorical", "logit", "dist.Categorical(logits=torch.stack(logits, -1))",
           "categories", None),
)
# fmt: on
FAMILIES = {family.name: family for family in _TABLE}
"""Name to family."""
_ALSO = {
    "nbinom": "negative_binomial",
    "nbinom2": "negative_binomial",
    "negbinomial": "negative_binomial",
    "t": "student_t",
    "student": "student_t",
    "normal": "gaussian",
    "ordinal": "cumulative",
    "zeroinflatednegbinomial": "zero_inflated_negative_binomial",
    "hurdlenegbinomial": "hurdle_negative_binomial",
}
PARAMETERS = {"shape": "alpha", "phi": "kappa"}
"""Parameter of brms to its name here."""
_REMEDIES = {
    "cox": "take models.Cox",
    "hurdlelognormal": "take 'hurdle_gamma'",
    "inversegaussian": "take 'gamma' or 'lognormal'",
    "multinomial": "give each outcome a row, with family 'categorical'",
    "quasipoisson": "'negative_binomial' has overdispersed counts",
    "logistic": "write 'bernoulli' for outcomes of 0 and 1",
    "zeroinflatedbinomial": "'beta_binomial' has overdispersed successes",
}
"""Family of brms, lme4 or R to what to take instead."""


def family_of(name: str) -> Family:
    """Return a family from its name here or in brms or bambi.

    Raises:
        FormulaError: there is no such family.

    Example:
        >>> from bayesfed.formulas.families import family_of
        >>> family_of("negbinomial").name, family_of("ZeroInflatedPoisson").likelihood
        ('negative_binomial', 'dist.ZeroInflatedPoisson(mean.exp(), gate=zi)')
    """
    plain = name.lower().replace("_", "").replace(".", "")
    found = {name.replace("_", ""): name for name in FAMILIES} | _ALSO
    if plain not in found:
        remedy = _REMEDIES.get(plain, "any other likelihood is a model in Pyro")
        raise FormulaError(f"no family {name!r}: {remedy}; there are {', '.join(FAMILIES)}")
    return FAMILIES[found[plain]]


def prior_code(name: str, prior: Any) -> str:
    """Return a prior as code.

    Raises:
        FormulaError: it is not a distribution of a number, or cannot be written as code.

    Example:
        >>> import pyro.distributions as dist
        >>> from bayesfed.formulas.families import prior_code
        >>> prior_code("x", dist.StudentT(3.0, 0.0, 2.5))
        'dist.StudentT(df=3.0, loc=0.0, scale=2.5)'
    """
    if not isinstance(prior, torch.distributions.Distribution) or not hasattr(prior, "event_shape"):
        raise FormulaError(
            f"priors[{name!r}] is {prior!r}: give a distribution, such as dist.Normal(0.0, 1.0)"
        )
    if prior.batch_shape or prior.event_shape:
        raise FormulaError(
            f"priors[{name!r}] has a shape: give a distribution of one number, which is used for all columns"
        )
    kind = type(prior).__name__
    names = [key for key in prior.arg_constraints if key != "logits"]
    values = {key: float(f"{float(getattr(prior, key)):.7g}") for key in names}
    try:
        written = type(getattr(dist, kind)(**values)) is type(prior)
    except (AttributeError, TypeError):
        written = False
    if not written:
        raise FormulaError(
            f"priors[{name!r}], a {kind}, cannot be written as code: use one of pyro.distributions with numbers as "
            "parameters"
        )
    return f"dist.{kind}({', '.join(f'{key}={value!r}' for key, value in values.items())})"
