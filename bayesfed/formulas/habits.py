"""The notation of R's formulas: what can mean only one thing is translated, and all else has a remedy."""

import re

_SPLINE = "give the knots, as in bs(x, knots=c(1.0, 2.0), lower_bound=0.0, upper_bound=4.0)"
_IN_PYRO = "write the model in Pyro"
REMEDIES = {
    # behind the outcome
    "trunc": f"{_IN_PYRO}, with a truncated distribution of the outcome",
    "rate": "add offset(log(n))",
    "mi": "leave out the rows without an outcome; a covariate's line, z | mi() ~ x, comes after that of the outcome",
    # terms
    "cs": f"the effects are the same for all categories of family 'cumulative'; else {_IN_PYRO}",
    "gp": "take models.GaussianProcess",
    **dict.fromkeys(("s", "ns", "cr"), _SPLINE),
    **dict.fromkeys(("t2", "te", "ti"), "write bs(x, knots=...):z, or take models.GaussianProcess"),
    **dict.fromkeys(
        ("ar", "ma", "arma", "lag", "car", "sar"), "store the lagged values as a column"
    ),
    **dict.fromkeys(("Error", "random", "re"), "write (1 | g)"),
    **dict.fromkeys(("gr", "mm"), f"a group is one column, as in (1 | g); else {_IN_PYRO}"),
    # outcomes
    **dict.fromkeys(("mvbind", "mvbf"), "fit one outcome after the other"),
    "cbind": "write y | trials(n), with the number of trials in a column, and family='binomial'",
}
"""Function of R, brms, lme4 or mgcv to what to write instead."""
_TRANSLATIONS = {
    r"\|\s*[^\W\d]\w*\s*\|": "|",  # (1 |id| g): an id matters only where two terms have it
    r"\b(?:as\.)?factor\(": "C(",
    r"\^": "**",
    r"\bTRUE\b": "True",
    r"\bFALSE\b": "False",
    r"Boundary\.knots\s*=\s*c\(([^,)]*),([^,)]*)\)": r"lower_bound=\1, upper_bound=\2",
    r"^\s*cbind\(\s*(\w+)\s*,\s*(\w+)\s*-\s*\1\s*\)": r"p(\1, \2)",
}
_CALLS_OF_BRMS = r"\s*(?:bf|brmsformula)\((.*)\)\s*"
_NEXT_CALL = r"\)\s*\+\s*(?:bf|brmsformula)\("
_RESIDUALS = r"\+\s*set_rescor\(\s*\w*\s*\)\s*$"
_PARTS = r"[\n;,]\s*(?=[^\W\d]\w*\s*(?:\|\s*mi\(\s*\w*\s*\)\s*)?~)"
_REFUSALS = {
    r"%\w*%": "write x:kind for an interaction and (1 | g/h) for nested groups",
    r"[~+(]\s*\.\s*([-+|)]|$)": "write the names of the columns in place of the dot",
    r"\)\s*\[": "leave [, 1] out: functions here return one column",
    r"^\s*\w+\s*/\s*\w+\s*~": "write p(a, n) or a | trials(n) for a successes of n trials, with family='binomial'",
    r"^\s*(as\.)?factor\(": "name the level that is 1, as in kind[\"yes\"] ~ x, with family='bernoulli', or write the "
    "column alone, with family='categorical'",
    r"\|\s*([^\W\d]\w*)\s*\|.*\|\s*\1\s*\|": "two terms with one id are correlated: write one, as in (1 + x | g)",
}


def parts_of(text: str) -> list[str]:
    r"""Return the parts of a formula, each with its own ``~``: those after the first are of parameters.

    Example:
        >>> from bayesfed.formulas.habits import parts_of
        >>> parts_of("bf(y ~ x + (1 | g), sigma ~ z)"), parts_of("y ~ x +\n z\n sigma ~ 1")
        (['y ~ x + (1 | g)', 'sigma ~ z'], ['y ~ x + z', 'sigma ~ 1'])
        >>> parts_of("bf(y ~ mi(z)) + bf(z | mi() ~ x) + set_rescor(FALSE)")
        ['y ~ mi(z)', 'z | mi() ~ x']
    """
    call = re.fullmatch(_CALLS_OF_BRMS, re.sub(_RESIDUALS, "", text), re.DOTALL)
    plain = text if call is None else re.sub(_NEXT_CALL, "\n", call[1])
    parts = re.split(_PARTS, plain.strip())
    return [" ".join(part.split()) for part in parts]


def translate(text: str) -> str:
    """Return a formula with the habits of R translated; quoted levels are left as they are.

    Raises:
        ValueError: something has no counterpart; the message says what to write instead.

    Example:
        >>> from bayesfed.formulas.habits import translate
        >>> translate("cbind(a, n - a) ~ as.factor(kind) + I(x^2) + (1 |p| g)")
        'p(a, n) ~ C(kind) + I(x**2) + (1 | g)'
        >>> translate("y ~ x %in% g")
        Traceback (most recent call last):
        ValueError: write x:kind for an interaction and (1 | g/h) for nested groups
    """
    parts = re.split(r"""("[^"]*"|'[^']*'|`[^`]*`)""", text)  # every second part is quoted
    plain = "".join(parts[::2])
    for pattern, remedy in _REFUSALS.items():
        if re.search(pattern, plain):
            raise ValueError(remedy)
    for pattern, written in _TRANSLATIONS.items():
        parts[::2] = [re.sub(pattern, written, part) for part in parts[::2]]
    return "".join(parts)
