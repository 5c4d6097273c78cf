"""Do Gaussian processes with a federated prior forecast better than other methods? Makes regression.md.

    python experiments/pac_pfl/regression.py                                            # everything: hours on two cores
    python experiments/pac_pfl/regression.py polynomials east-west-150 --methods PACPFL PFedGP
    python experiments/pac_pfl/regression.py pvgis-east-west-150 pvgis-south-150 --weather FILE

24 clients train, 24 more join later. Data sets: polynomials of two kinds, 10 rows a client; houses with photovoltaic
panels, which face east or west or all south, with 150 or 610 hours (bayesfed.simulations). Cells are the mean over the
clients of RSMSE (calibration error, H = 20), of test rows, first of the clients that trained, then of those that
joined: mean ± 95 % interval over the seeds (t).

Houses have the weather of Greensboro from 16 May on or, with "pvgis", that of 45° N 8° E from 1 June on: a typical year
of PVGIS (CSV, "--weather"), two degrees from Lausanne, of which the paper has PVGIS' data. Every third day is for the
test; the paper trains on the first two weeks of June 2018 and tests on June and July 2019. Its RSMSE, trained / joined:
PV-EW 150: PAC-PFL 0.41 / 0.42, pFedGP 0.45 / 0.45, MTL 0.43 / 0.42, MAML 0.52 / 0.52, Vanilla 0.63, Pooled 0.47;
PV-S 150: PAC-PFL 0.43 / 0.43, pFedGP 0.48 / 0.46, MTL 0.45 / 0.44, MAML 0.57 / 0.55, Vanilla 0.68, Pooled 0.48.

Each method's settings are chosen from its grid on a federation of another seed, by the mean RSMSE of both groups. "tau"
is in units of 1 / n: 24 is the sum over the clients (τ = 1), 1 their mean. A prior is either two networks (16, 16,
tanh), for the mean and before the kernel, or GPyTorch's: a linear mean, RBF with a length scale for each input. PACPFL
has 4 particles, which take 1000 steps of Adam.
"""

from __future__ import annotations

import math
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpytorch
import torch
from scipy.stats import t as student
from torch import Tensor, nn

import bayesfed as bf
from bayesfed import datasets, metrics, models, simulations
from bayesfed.algorithms import METHODS as ALGORITHMS
from bayesfed.functional.multivariate_normal import Gaussian, conditioned

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))
import runner  # noqa: E402

OLD = 24
TUNING = 1000  # the seed on which settings are chosen
PVGIS = runner.ROOT / "shared/data/pvgis_tmy_45N_8E.csv"
DRAWS = 500
Task = tuple[bf.Federation, bf.Federation]


def polynomials(seed: int, old: int = OLD, new: int = OLD) -> Task:
    """Return polynomials standardised by the clients that train, as the paper does."""
    train, test = simulations.polynomials(clients=old + new, seed=seed)
    _, constants = datasets.standardise(train.select(train.names[:old]), ["x", "y"])

    def scaled(federation: bf.Federation) -> bf.Federation:
        fields = {
            name: ((federation[name] - loc) / scale).to(federation.dtype)
            for name, (loc, scale) in constants.items()
        }
        return bf.Federation(fields, federation.offsets, federation.names)

    return scaled(train), scaled(test)


def from_june(year: str) -> str:
    """Return a typical year of PVGIS (CSV) so that the rows of bayesfed.simulations begin on 1 June, with its sun.

    Those rows begin on 16 May, and the file has days without irradiance in May, gaps of the satellites' record. So the
    hours of 16 to 31 May are dated 15 May: they only precede those of June. The irradiance is measured some minutes
    after the full hour, for which the sun is computed. Further east it has the same height at the full hour, so the
    longitude is moved by 15° per hour.
    """
    hours = float(re.findall(r"Irradiance Time Offset \(h\): (\S+)", year)[0])
    longitude = float(re.findall(r"Longitude \(decimal degrees\): (\S+)", year)[0])
    moved = re.sub(
        r"(?<=Longitude \(decimal degrees\): )\S+", f"{longitude + 15 * hours:.3f}", year
    )
    return re.sub(r"^(\d{4}05)(?:1[6-9]|2\d|3[01]):", r"\g<1>15:", moved, flags=re.MULTILINE)


def houses(facing: str, rows: int, seed: int, weather: str | None = None) -> Task:
    """Return houses under the weather of pvlib's station, or of a file of PVGIS from 1 June on."""
    if weather is None:
        return simulations.photovoltaics(facing, clients=2 * OLD, rows=rows, seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weather.csv"
        path.write_text(from_june(Path(weather).read_text(encoding="utf-8")), encoding="utf-8")
        return simulations.photovoltaics(
            facing, clients=2 * OLD, rows=rows, seed=seed, weather=path
        )


DATA = (
    "polynomials",
    "east-west-150",
    "south-150",
    "east-west-610",
    "south-610",
    "pvgis-east-west-150",
    "pvgis-south-150",
)


def task(name: str, seed: int, weather: str | None = None) -> Task:
    """Return the training and test rows of a data set; "pvgis" ones need a file with the weather."""
    if name == "polynomials":
        return polynomials(seed)
    facing, _, rows = name.removeprefix("pvgis-").rpartition("-")
    return houses(facing, int(rows), seed, weather)


def prior(kind: str, inputs: int, scale: float = 1.0) -> models.GaussianProcess:
    """Return a prior with networks for mean and kernel, or with GPyTorch's."""
    if kind == "networks":
        return models.GaussianProcess(
            models.mlp(inputs, 16, 16, 1, activation=nn.Tanh),
            features=models.mlp(inputs, 16, 16, 2, activation=nn.Tanh),
            hyper_scale=scale,
        )
    rbf = gpytorch.kernels.RBFKernel(ard_num_dims=inputs)
    mean = gpytorch.means.LinearMean(inputs)
    return models.GaussianProcess(mean, gpytorch.kernels.ScaleKernel(rbf), hyper_scale=scale)


def inputs_of(federation: bf.Federation) -> int:
    return federation["x"].reshape(federation.rows, -1).shape[1]


Predict = Callable[[bf.Federation, bf.Federation], Tensor]
"""A function from clients' own rows and those to predict to draws ``(S, rows)``."""


def _conditioned(posterior: bf.Posterior) -> Predict:
    return lambda own, rows: posterior.personalize(own).predict(rows, DRAWS)["y"]


def pac_pfl(
    train: bf.Federation, *, kind: str, scale: float, tau: float, particles: int = 4
) -> Predict:
    """Fit PACPFL by Adam; τ is in units of 1 / n: 24 is the sum over clients, 1 their average."""
    algorithm = bf.PACPFL(
        particles=particles, tau=tau / len(train), lr=RATE[kind], optimizer="adam"
    )
    model = prior(kind, inputs_of(train), scale)
    return _conditioned(_fit(model, train, algorithm, 1000, 5, 150))


def pfed_gp(train: bf.Federation, *, kind: str, rounds: int) -> Predict:
    """Fit one particle with a flat hyper-prior; it starts at a draw from N(0, 0.4²)."""
    algorithm = ALGORITHMS["PFedGP"](lr=RATE[kind])
    return _conditioned(_fit(prior(kind, inputs_of(train), 0.4), train, algorithm, rounds, 5, 150))


def vanilla(train: bf.Federation, *, kind: str, steps: int) -> Predict:
    """Let each client maximise its evidence by itself: 24 fits as one batch."""

    def predict(own: bf.Federation, rows: bf.Federation) -> Tensor:
        model, batch, queries = prior(kind, inputs_of(own), 0.4), own.batch(), rows.batch()
        x, y = batch.fields["x"], torch.where(batch.mask, batch.fields["y"], 0.0)
        start = model.centre + 0.4 * torch.randn(len(own), 1, model.size)
        phi = nn.Parameter(start)
        optimizer = torch.optim.Adam([phi], lr=RATE[kind])
        for _ in range(steps):
            optimizer.zero_grad()
            evidence = Gaussian(*model.marginal(phi, x, batch.mask)).log_prob(y)
            (-evidence.sum()).backward()
            optimizer.step()
        with torch.no_grad():
            both = torch.cat([x, queries.fields["x"]], 1), torch.cat([batch.mask, queries.mask], 1)
            mean, variance = conditioned(*model.marginal(phi, *both), y, batch.mask)
        mean, variance = mean[queries.mask], variance[queries.mask]
        return mean + variance.sqrt() * torch.randn(DRAWS, len(mean))

    return predict


def pooled_gp(train: bf.Federation, *, kind: str, rounds: int) -> Predict:
    """Fit one process for all clients' rows; of more than 1000, a random 1000."""
    everyone = train.pool()
    rows = torch.randperm(everyone.rows)[:1000]
    fields = {name: value[rows] for name, value in everyone.fields.items()}
    some = bf.Federation(fields, torch.tensor([0, len(rows)]), everyone.names)
    algorithm = ALGORITHMS["PFedGP"](lr=RATE[kind])
    posterior = _fit(prior(kind, inputs_of(train), 0.4), some, algorithm, rounds, 1, 300)
    return lambda own, rows: posterior.predict(rows.pool(), DRAWS)["y"]


def mtl(train: bf.Federation, *, rho: float, noise: float) -> Predict:
    """Fit a network for each client around a common mean."""
    model = _network(train, noise, scale=rho)
    algorithm = ALGORITHMS["MTL"](lr=0.01)
    posterior = _fit(model, train, algorithm, 100, OLD, 50)

    def predict(own: bf.Federation, rows: bf.Federation) -> Tensor:
        known = own.names == train.names
        personal = posterior if known else posterior.personalize(own, steps=200, lr=0.01)
        return personal.predict(rows, DRAWS)["y"]

    return predict


def maml(train: bf.Federation, *, inner: float, noise: float) -> Predict:
    algorithm = bf.PerFedAvg(lr=inner, prior_lr=0.003, prior_optimizer="adam", personal_steps=10)
    posterior = _fit(_network(train, noise), train, algorithm, 200, 5, 50)
    return _conditioned(posterior)


def _network(train: bf.Federation, noise: float, **settings: Any) -> models.Network:
    module = models.mlp(inputs_of(train), 32, 32, 1, activation=nn.Tanh)
    return models.Network(module, likelihood="normal", noise=noise, **settings)


def _fit(
    model: Any, train: bf.Federation, algorithm: Any, rounds: int, cohort: int, batch: int
) -> bf.Posterior:
    return bf.fit(
        model,
        train,
        algorithm,
        rounds=rounds,
        clients_per_round=cohort,
        batch_size=batch,
        seed=int(torch.initial_seed()),
        progress=False,
    )


RATE = {"networks": 0.01, "GPyTorch's": 0.03}
KINDS = ("networks", "GPyTorch's")


@dataclass(frozen=True)
class Method:
    """A way to forecast, and the grid of its settings."""

    fit: Callable[..., Predict]
    grid: dict[str, tuple[Any, ...]]


METHODS = {
    "PACPFL": Method(pac_pfl, {"kind": KINDS, "scale": (0.4, 1.0), "tau": (1.0, 24.0)}),
    "PFedGP": Method(pfed_gp, {"kind": KINDS, "rounds": (300, 1000)}),
    "MTL": Method(mtl, {"rho": (0.03, 0.3), "noise": (0.3, 0.6)}),
    "MAML": Method(maml, {"inner": (0.01, 0.1), "noise": (0.3, 0.6)}),
    "Vanilla GP": Method(vanilla, {"kind": KINDS, "steps": (100, 300)}),
    "Pooled GP": Method(pooled_gp, {"kind": KINDS, "rounds": (100, 300)}),
}


def errors(draws: Tensor, rows: bf.Federation, *names: str) -> list[float]:
    """Return the mean over clients of these errors of draws of their rows."""
    clients = metrics.regression(draws, rows["y"], rows.owner, rows.names).clients
    return [float(clients[name].mean()) for name in names]


def predictions(
    train: bf.Federation, test: bf.Federation, method: str, point: dict[str, Any]
) -> Iterator[tuple[Tensor, bf.Federation]]:
    """Yield draws and test rows of the clients that trained, then of those that joined."""
    predict = METHODS[method].fit(train.select(train.names[:OLD]), **point)
    for names in (train.names[:OLD], train.names[OLD:]):
        rows = test.select(names)
        yield predict(train.select(names), rows), rows


def forecasts(
    name: str, method: str, point: dict[str, Any], seed: int, weather: str | None = None
) -> list[float]:
    """Return RSMSE and calibration error of clients that trained, then of those that joined."""
    torch.manual_seed(seed)
    train, test = task(name, seed, weather)
    found = []
    try:
        for draws, rows in predictions(train, test, method, point):
            found += errors(draws, rows, "rsmse", "calibration")
    except (FloatingPointError, ValueError) as error:
        print(f"{name} {method} {point}: {error}", file=sys.stderr)
        return [math.inf] * 4
    return found


def main() -> None:
    given = runner.arguments(__doc__, jobs=2, methods=list(METHODS), seeds=5, weather=PVGIS)
    asked = [name for name in DATA if not given.rows or name in given.rows]
    weather = {name: [str(given.weather)] for name in DATA if name.startswith("pvgis")}
    trials = {
        (name, method): [
            (name, method, point, TUNING, *weather.get(name, []))
            for point in runner.combinations(METHODS[method].grid)
        ]
        for name in asked
        for method in given.methods
    }
    best = runner.best(forecasts, trials, lambda found: found[0] + found[2], given)
    rows = {
        key: [(*call[:3], seed, *call[4:]) for seed in range(given.seeds)]
        for key, (call, _) in best.items()
    }

    def cells(key: tuple[str, str], found: list[list[float]]) -> list[Any]:
        values = torch.tensor(found, dtype=torch.float64)
        quantile = student.ppf(0.975, given.seeds - 1)
        mean, half = values.mean(0), quantile * values.std(0) / given.seeds**0.5
        texts = [f"{m:.3f} ± {h:.3f}" for m, h in zip(mean, half, strict=True)]
        chosen = runner.chosen_of(best[key][0][2], METHODS[key[1]].grid)
        return [*(f"{texts[i]} ({texts[i + 1]})" for i in (0, 2)), given.seeds, chosen]

    columns = (
        "data | method | RSMSE (calibration error), trained | joined | seeds | chosen of the grid"
    )
    runner.table(columns, rows, forecasts, given, cells)


if __name__ == "__main__":
    main()
