"""Real data sets that packages ship, as federations; nothing is downloaded."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from bayesfed.data.federation import Federation
from bayesfed.data.optional import import_optional
from bayesfed.data.plural import plural
from bayesfed.data.standardise import standardise as standardise

if TYPE_CHECKING:
    import pandas as pd


def eight_schools() -> Federation:
    """Effects of coaching on the verbal SAT in eight schools: 8 clients with one row each.

    Fields, both scalar and in points of the SAT (whose scale runs from 200 to 800): ``y``, the
    estimated effect, and ``sigma``, its standard error. Made for
    :func:`bayesfed.models.eight_schools`.

    Source: D. B. Rubin (1981), "Estimation in parallel randomized experiments", Journal of
    Educational Statistics 6(4), 377–401; the numbers are in A. Gelman et al. (2013), "Bayesian Data
    Analysis", 3rd edition, table 5.2.

    Example:
        >>> from bayesfed import datasets
        >>> datasets.eight_schools()
        Federation: 8 clients, 8 rows (1 to 1 a client), fields y, sigma
    """
    y = [28, 8, -3, 7, -1, 1, 18, 12]
    sigma = [15, 10, 16, 11, 9, 11, 10, 18]
    schools = {
        name: {"y": [effect], "sigma": [error]}
        for name, effect, error in zip("ABCDEFGH", y, sigma, strict=True)
    }
    return Federation.from_arrays(schools, client_dim="school")


def grunfeld() -> Federation:
    """Investment of 11 American firms, 1935 to 1954: 11 clients with 20 rows each.

    Fields:
        ``x``: shape ``(2,)``, the logarithms of the firm's market value on 31 December and of its
        stock of plant and equipment, standardised.

        ``y``: scalar, the logarithm of the firm's gross investment, standardised.

        ``year``: scalar, 1935 to 1954, not standardised.

    The raw unit is millions of dollars of 1947, and all three are positive in every row. The
    logarithms are standardised by :func:`~bayesfed.data.standardise.standardise`, from sums over each firm only: (mean,
    standard deviation) are (6.073, 1.351) and (4.821, 1.499) for ``x`` and (3.911, 1.530) for
    ``y``. Suits :func:`bayesfed.models.varying_intercept` and
    :func:`bayesfed.models.varying_slope`: a slope is the elasticity times the ratio of the two
    standard deviations.

    Source: Y. Grunfeld (1958), "The determinants of corporate investment", doctoral thesis,
    University of Chicago, as restored by C. Kleiber and A. Zeileis (2010), "The Grunfeld data at
    50", German Economic Review 11(4), 404–417. Shipped by statsmodels (public domain).

    Raises:
        ImportError: statsmodels is not installed: ``pip install 'bayesfed[datasets]'``.

    Example:
        >>> from bayesfed import datasets
        >>> datasets.grunfeld()
        Federation: 11 clients, 220 rows (20 to 20 a client), fields x[2], y, year
    """
    frame = _table("grunfeld").astype({"year": float})
    logs = frame.assign(**{c: np.log(frame[c]) for c in ("value", "capital", "invest")})
    federation = Federation.from_frame(
        logs, client="firm", fields={"x": ["value", "capital"], "y": "invest", "year": "year"}
    )
    return standardise(federation, ["x", "y"])[0]


def china_smoking() -> Federation:
    """Smoking and lung cancer in eight Chinese cities: 8 clients, 8419 rows.

    Eight case-control studies, a 2 × 2 table each, expanded to one row per person. The share of
    cases was set by the studies' design, so a city's intercept does not measure how common the
    disease is; its slope, the log odds ratio, can be interpreted.

    Fields:
        ``x``: shape ``(1,)``, 1 for a smoker, else 0.

        ``y``: scalar, 1 for a person with lung cancer, else 0.

    Suits :func:`bayesfed.models.hierarchical_logistic`.

    Source: Z. Liu (1992), "Smoking and lung cancer in China: combined analysis of eight
    case-control studies", International Journal of Epidemiology 21, 197–201. Shipped by
    statsmodels, whose spelling "Nanjng" is corrected here.

    Raises:
        ImportError: statsmodels is not installed: ``pip install 'bayesfed[datasets]'``.

    Example:
        >>> from bayesfed import datasets
        >>> federation = datasets.china_smoking()
        >>> federation
        Federation: 8 clients, 8,419 rows (213 to 2,900 a client), fields x[1], y
        >>> federation.names[:4]
        ('Beijing', 'Shanghai', 'Shenyang', 'Nanjing')
    """
    table = _table("china_smoking").set_index("Location").rename(index={"Nanjng": "Nanjing"})
    cells = [
        ("smoking_yes_cancer_yes", 1, 1),
        ("smoking_yes_cancer_no", 1, 0),
        ("smoking_no_cancer_yes", 0, 1),
        ("smoking_no_cancer_no", 0, 0),
    ]
    cities = {}
    for city, counts in table.iterrows():
        people = np.concatenate([np.tile([[x, y]], (counts[c], 1)) for c, x, y in cells])
        cities[str(city)] = {"x": people[:, :1], "y": people[:, 1]}
    return Federation.from_arrays(cities, client_dim="city")


def randhie() -> Federation:
    """Visits to a doctor under six health insurance plans: 6 clients, 20190 rows.

    The RAND Health Insurance Experiment assigned families at random to plans. A client is a plan
    and holds its members' records; a row is a person in one year. Plans are named after the share
    of the costs that the patient pays (coinsurance) and whether there is an individual deductible.

    Fields:
        ``x``: shape ``(5,)``, standardised: a physical limitation (0 or 1; a fraction where it was
        imputed), an index of chronic disease (0 to 58.6), and self-rated health good, fair, poor
        (0/1 each; none of them means excellent).

        ``y``: scalar, the number of outpatient visits to a doctor in that year, 0 to 77.

    ``x`` is standardised by :func:`~bayesfed.data.standardise.standardise`, from sums over each plan only. Suits
    :func:`bayesfed.models.hierarchical_count`, which ignores two facts: the counts are
    overdispersed relative to a Poisson model, and a person's years are not independent (the shipped
    table does not identify persons). So its posterior is too narrow for conclusions about the plans.

    Source: J. P. Newhouse and the Insurance Experiment Group (1993), "Free for All? Lessons from
    the RAND Health Insurance Experiment", Harvard University Press; the subset of A. C. Cameron and
    P. K. Trivedi (2005), "Microeconometrics", Cambridge University Press. Shipped by statsmodels
    (public domain). Plans are the distinct pairs of its columns ``lncoins`` = ln(coinsurance in
    percent + 1) and ``idp`` (1: an individual deductible).

    Raises:
        ImportError: statsmodels is not installed: ``pip install 'bayesfed[datasets]'``.

    Example:
        >>> from bayesfed import datasets
        >>> federation = datasets.randhie()
        >>> federation
        Federation: 6 clients, 20,190 rows (1,074 to 6,822 a client), fields x[5], y
        >>> federation.names
        ('0 %', '0 %, deductible', '25 %', '50 %', '95 %', '100 %, deductible')
    """
    frame = _table("randhie")
    percent = np.expm1(frame["lncoins"]).round().astype(int)
    deductible = frame["idp"].map({0: "", 1: ", deductible"})
    frame = frame.assign(plan=percent.astype(str) + " %" + deductible)
    federation = Federation.from_frame(
        frame.sort_values(["lncoins", "idp"], kind="stable"),
        client="plan",
        fields={"x": ["physlm", "disea", "hlthg", "hlthf", "hlthp"], "y": "mdvis"},
    )
    return standardise(federation, ["x"])[0]


def anes96() -> Federation:
    """Party identification of American voters in 1996, by their education: 7 clients, 944 rows.

    A client is a level of education and holds its respondents in the American National Election Study.

    Fields:
        ``x``: shape ``(3,)``, standardised: self-placement from left to right (1 to 7), age in years, and the
        household's income (bracket 1 to 24).

        ``y``: scalar, 0 (strong Democrat) to 6 (strong Republican).

    ``x`` is standardised by :func:`~bayesfed.data.standardise.standardise`, from sums over each level only. Suits
    :class:`bayesfed.models.OrderedLogistic` with ``categories=7``.

    Source: American National Election Study of 1996. Shipped by statsmodels (public domain).

    Raises:
        ImportError: statsmodels is not installed: ``pip install 'bayesfed[datasets]'``.

    Example:
        >>> from bayesfed import datasets
        >>> federation = datasets.anes96()
        >>> federation
        Federation: 7 clients, 944 rows (13 to 248 a client), fields x[3], y
        >>> federation.names[:3]
        ('8 grades', 'some high school', 'high school')
    """
    levels = ["8 grades", "some high school", "high school", "some college"]
    levels += ["college", "master", "doctor"]
    frame = _table("anes96").astype(float).sort_values("educ", kind="stable")
    federation = Federation.from_frame(
        frame.assign(education=[levels[int(level) - 1] for level in frame["educ"]]),
        client="education",
        fields={"x": ["selfLR", "age", "income"], "y": "PID"},
    )
    return standardise(federation, ["x"])[0]


def kidney() -> Federation:
    """Months until infection of patients on dialysis, some censored: 38 clients with 2 rows each.

    A client is a patient with a portable dialysis machine; a row is one insertion of its catheter, which ends with an
    infection at the point of insertion, or with a removal for another reason (censored).

    Fields:
        ``x``: shape ``(2,)``, standardised: age in years, and 1 for a woman, 0 for a man.

        ``time``: scalar, in months of 30 days, 2 to 562 days.

        ``event``: scalar, 1 for an infection, 0 where the time is censored.

    ``x`` is standardised by :func:`~bayesfed.data.standardise.standardise`, from sums over each patient only: (mean,
    standard deviation) are (43.70, 14.64) and (0.737, 0.440). Suits :func:`bayesfed.models.weibull_survival`, and
    :class:`bayesfed.models.Cox`, for example with ``cuts=[0.5, 1, 5]``.

    Source: C. A. McGilchrist and C. W. Aisbett (1991), "Regression with frailty in survival analysis", Biometrics
    47(2), 461–466, as in the R package survival.

    Example:
        >>> from bayesfed import datasets
        >>> datasets.kidney()
        Federation: 38 clients, 76 rows (2 to 2 a client), fields x[2], time, event
    """
    # for each patient: two times in days (+ if censored), the age at each, and the sex
    table = """
        8 16 28 28 m; 23 13+ 48 48 f; 22 28 32 32 m; 447 318 31 32 f; 30 12 10 10 m;
        24 245 16 17 f; 7 9 51 51 m; 511 30 55 56 f; 53 196 69 69 f; 15 154 51 52 m;
        7 333 44 44 f; 141 8+ 34 34 f; 96 38 35 35 f; 149+ 70+ 42 42 f; 536 25+ 17 17 f;
        17 4+ 60 60 m; 185 177 60 60 f; 292 114 43 44 f; 22+ 159+ 53 53 f; 15 108+ 44 44 f;
        152 562 46 47 m; 402 24+ 30 30 f; 13 66 62 63 f; 39 46+ 42 43 f; 12 40 43 43 m;
        113+ 201 57 58 f; 132 156 10 10 f; 34 30 52 52 f; 2 25 53 53 m; 130 26 54 54 f;
        27 58 56 56 f; 5+ 43 50 51 f; 152 30 57 57 f; 190 5+ 44 45 f; 119 8 22 22 f;
        54+ 16+ 42 42 f; 6+ 78 52 52 f; 63 8+ 60 60 m
    """
    patients = {}
    for number, patient in enumerate(table.split(";"), 1):
        *times, first, second, sex = patient.split()
        patients[str(number)] = {
            "x": [[float(age), float(sex == "f")] for age in (first, second)],
            "time": [float(time.rstrip("+")) / 30 for time in times],
            "event": [float(not time.endswith("+")) for time in times],
        }
    return standardise(Federation.from_arrays(patients, client_dim="patient"), ["x"])[0]


def digits(clients: int = 20, classes: int = 3, seed: int = 0) -> tuple[Federation, Federation]:
    """Handwritten digits, a few classes for each client: ``(train, test)``, for quick trials.

    Each client has ``classes`` random digits and the same number of images of each: 60 / ``classes``, or fewer if a
    digit has too few images for all clients that have it. No two clients share an image. A third of a client's images,
    drawn at random, are for the test, so by default most clients have 40 and 20.

    Fields:
        ``x``: shape ``(64,)``, an image of 8 × 8 pixels, flat, from 0 (paper) to 1 (ink).

        ``y``: scalar, the digit: int64, 0 to 9.

    Args:
        clients: N; they are called "client 0", "client 1", ...
        classes: digits per client, 1 to 10.
        seed: seed of all random choices.

    Source: E. Alpaydin and C. Kaynak (1998), "Optical recognition of handwritten digits", UCI
    Machine Learning Repository, doi 10.24432/C50P49; its 1797 test images, as shipped by scikit-learn.

    Raises:
        ImportError: scikit-learn is not installed: ``pip install scikit-learn``.
        ValueError: ``classes`` out of range, or so many clients that one has fewer than 3 images.

    Example:
        >>> from bayesfed import datasets
        >>> train, test = datasets.digits(clients=5)
        >>> train
        Federation: 5 clients, 200 rows (40 to 40 a client), fields x[64], y
        >>> test
        Federation: 5 clients, 100 rows (20 to 20 a client), fields x[64], y
    """
    load_digits = import_optional("sklearn.datasets", "scikit-learn").load_digits
    if not 1 <= classes <= 10:
        raise ValueError(f"classes is {classes}; a client has 1 to 10 of the ten digits")
    images, labels = load_digits(return_X_y=True)
    rng = np.random.default_rng(seed)
    chosen = [rng.choice(10, size=classes, replace=False) for _ in range(clients)]
    holders = np.bincount(np.concatenate(chosen), minlength=10) if chosen else np.zeros(10, int)
    packs = [rng.permutation(np.flatnonzero(labels == digit)) for digit in range(10)]
    share = [min(60 // classes, len(packs[d]) // max(1, holders[d])) for d in range(10)]
    parts: list[dict[str, dict[str, Tensor]]] = [{}, {}]
    for i, own in enumerate(chosen):
        each = min(share[d] for d in own)
        rows = rng.permutation(np.concatenate([packs[d][:each] for d in own]))
        for d in own:
            packs[d] = packs[d][each:]
        if len(rows) < 3:
            raise ValueError(
                f"{plural(clients, 'client is', 'clients are')} too many: client {i} has fewer than 3 images"
            )
        for part, taken in zip(parts, np.split(rows, [len(rows) - len(rows) // 3]), strict=True):
            part[f"client {i}"] = {
                "x": torch.as_tensor(images[taken] / 16, dtype=torch.get_default_dtype()),
                "y": torch.as_tensor(labels[taken], dtype=torch.int64),
            }
    return Federation.from_arrays(parts[0]), Federation.from_arrays(parts[1])


def _table(name: str) -> pd.DataFrame:
    """Read a data set of statsmodels, without importing it, which takes a second."""
    import pandas as pd

    spec = find_spec("statsmodels")
    if spec is None or spec.origin is None:
        raise ImportError("statsmodels is not installed: pip install 'bayesfed[datasets]'")
    path = Path(spec.origin).parent / "datasets" / name / f"{name}.csv"
    return pd.read_csv(path, sep="\t" if name == "anes96" else ",", quotechar="'")
