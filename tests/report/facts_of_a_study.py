"""A study with made-up facts."""

import numpy as np

from bayesfed.report.facts import ByClient, Global, Study


def variable(label, clients, mean=None, observed=None):
    """A quantity whose means grow with the position of the client."""
    mean = np.linspace(-1.0, 1.0, len(clients)) if mean is None else mean
    wide, narrow = (np.stack([mean - width, mean + width], 1) for width in (0.5, 0.2))
    tail = None if observed is None else (mean > observed).astype(float)
    return ByClient(label, list(clients), mean, wide, narrow, observed, tail)


def study(
    *,
    clients=("a", "b", "c"),
    label="mu",
    prior=(0.0, -2.0, 2.0),
    sensitivity=(0.1, 0.2),
    **change,
):
    """A fit without a flaw, with some of its facts changed."""
    density = np.stack([np.exp(-(np.linspace(-3, 3, 60) ** 2)), np.full(60, 0.1)])
    one = Global(label, 1.0, 0.5, (0.1, 1.9), 0.02, prior, density, sensitivity)
    observed = np.linspace(-1.2, 1.2, len(clients))
    facts = {
        "name": "study",
        "model": "model",
        "program": "def model(federation): ...",
        "settings": "",
        "algorithm": "SFVI",
        "seed": 0,
        "rounds": 12,
        "clients": len(clients),
        "rows": 100,
        "draws": 1000,
        "effective": 1000.0,
        "converged": True,
        "caveat": "",
        "khat": 0.3,
        "khat_limit": 0.7,
        "corrected": "",
        "rhat": None,
        "ess": None,
        "epsilon": None,
        "globals": [one],
        "more_globals": 0,
        "params": {},
        "locals": [variable(label, clients)],
        "more_locals": 0,
        "checks": [variable(f"mean of {label}", clients, observed=observed)],
        "prior_checks": [variable(f"mean of {label}", ["all"], observed=np.zeros(1))],
        "elbo": -100 * np.exp(-np.arange(12.0)),
        "seconds": 1.5,
        "software": {"bayesfed": "1"},
    }
    return Study(**facts | change)
