"""The families: likelihoods of an outcome, with the default priors of their parameters."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pyro.distributions as dist
import torch

from bayesfed.formulas.terms import FormulaError

_FOLDED = "dist.FoldedDistribution(dist.StudentT(4.0, 0.0, 1.0))"


@dataclass(frozen=True)
class Family:
    """A likelihood as code, a function of the linear predictor ``mean`` and of further parameters.

    Attributes:
        link: ``"identity"``, ``"log"`` or ``"logit"``.
        likelihood: the code of the distribution of an observation.
        parameters: name to the code of its default prior.
        in_units: the parameters that have the outcome's unit.
    """

    link: Literal["identity", "log", "logit"]
    likelihood: str
    parameters: Mapping[str, str] = field(default_factory=dict)
    in_units: tuple[str, ...] = ()


FAMILIES = {
    "gaussian": Family("identity", "dist.Normal(mean, sigma)", {"sigma": _FOLDED}, ("sigma",)),
    "student_t": Family(
        "identity",
        "dist.StudentT(nu, mean, sigma)",
        {"sigma": _FOLDED, "nu": "dist.Gamma(2.0, 0.1)"},
        ("sigma",),
    ),
    "bernoulli": Family("logit", "dist.Bernoulli(logits=mean)"),
    "binomial": Family("logit", 'dist.Binomial(obs["trials"], logits=mean)'),
    "beta": Family(
        "logit",
        "dist.Beta(kappa * mean.sigmoid(), kappa * (-mean).sigmoid())",
        {"kappa": "dist.HalfCauchy(1.0)"},
    ),
    "poisson": Family("log", "dist.Poisson(mean.exp())"),
    "negative_binomial": Family(
        "log",
        "dist.NegativeBinomial(alpha, logits=mean - alpha.log())",
        {"alpha": "dist.HalfCauchy(1.0)"},
    ),
    "gamma": Family(
        "log", "dist.Gamma(alpha, alpha * (-mean).exp())", {"alpha": "dist.HalfCauchy(1.0)"}
    ),
}
"""Name to family."""
_ALSO = {
    "nbinom": "negative_binomial",
    "nbinom2": "negative_binomial",
    "t": "student_t",
    "student": "student_t",
    "negativebinomial": "negative_binomial",
    "negbinomial": "negative_binomial",
    "normal": "gaussian",
}


_REMEDIES = {
    "cumulative": "take models.OrderedLogistic",
    "weibull": "take models.weibull_survival",
    "cox": "take models.Cox",
    "lognormal": "write log(y) as the outcome, with family 'gaussian'",
    "quasipoisson": "'negative_binomial' has overdispersed counts",
    "logistic": "write 'bernoulli' for outcomes of 0 and 1",
}
"""Family of brms, lme4 or R to what to take instead."""


def family_of(name: str) -> str:
    """Return a family's name here from its name here or in brms or bambi.

    Raises:
        FormulaError: there is no such family.

    Example:
        >>> from bayesfed.formulas.families import family_of
        >>> family_of("negbinomial")
        'negative_binomial'
    """
    found = _ALSO.get(name.lower(), name.lower())
    if found not in FAMILIES:
        remedy = _REMEDIES.get(found, "any other likelihood is a model in Pyro")
        raise FormulaError(f"no family {name!r}: there are {', '.join(FAMILIES)}; {remedy}")
    return found


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
