"""Simulated federations: polynomials, photovoltaic plants under real weather, and resampled clients of others."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from bayesfed.data.federation import Federation
from bayesfed.data.optional import import_optional

if TYPE_CHECKING:
    import pandas as pd

# PAC-PFL, section 8.4: roots of the mean functions of the two kinds of clients, and their length scales
_ROOTS = (
    (2.13090278, 1.04920788, 0.77719797, -0.79079416, 0.47808944, 0.41619282, 0.63380681),
    (-0.93890047, -0.53067272, -0.83405262, -1.41970533, 0.11923567, 0.11692263, 0.69670114),
)
_SIGNS = (1.0, -1.0)
_LENGTH_SCALES = (0.3, 3.0)


def polynomials(
    clients: int = 24, rows: int = 10, test_rows: int = 200, seed: int = 0
) -> tuple[Federation, Federation]:
    """Simulate clients' functions from two Gaussian processes with polynomial means: ``(train, test)``.

    Client i has a function f ~ GP(±Π_j (x − r_j), 0.2² exp(−(x − x')² / 2ℓ²)); the sign, the seven roots and ℓ are
    those of the first kind (ℓ = 0.3) if i is even and of the second (ℓ = 3) if it is odd. It observes
    y = f(x) + 0.05 ε at x from a standard normal truncated to [−0.8, 0.8].

    Fields: ``x``, shape ``(1,)``, and ``y``, scalar.

    Args:
        clients: N; "client 0", "client 1", ...
        rows: training rows per client.
        test_rows: test rows per client, of the same function.
        seed: seed of all random numbers.

    Source: M. Boroujeni, A. Krause, G. Ferrari Trecate, "Personalized federated learning of probabilistic models: a
    PAC-Bayesian approach", the polynomial data.

    Example:
        >>> from bayesfed import simulations
        >>> train, test = simulations.polynomials()
        >>> train
        Federation: 24 clients, 240 rows (10 to 10 a client), fields x[1], y
    """
    generator = torch.Generator().manual_seed(seed)
    count = rows + test_rows
    x = torch.nn.init.trunc_normal_(
        torch.empty(clients, count, dtype=torch.float64), a=-0.8, b=0.8, generator=generator
    )
    kind = torch.arange(clients) % 2
    roots = torch.tensor(_ROOTS, dtype=torch.float64)[kind]
    mean = torch.tensor(_SIGNS)[kind, None] * (x[..., None] - roots[:, None]).prod(-1)
    scaled = x / torch.tensor(_LENGTH_SCALES, dtype=torch.float64)[kind, None]
    covariance = 0.2**2 * (-(scaled[:, :, None] - scaled[:, None]).square() / 2).exp()
    jitter = 1e-9 * torch.eye(count, dtype=torch.float64)
    noise = torch.randn(2, clients, count, generator=generator, dtype=torch.float64)
    f = mean + (torch.linalg.cholesky(covariance + jitter) @ noise[0, ..., None]).squeeze(-1)
    y = f + 0.05 * noise[1]
    train, test = (
        {f"client {i}": {"x": x[i, part, None], "y": y[i, part]} for i in range(clients)}
        for part in (slice(rows), slice(rows, None))
    )
    dtype = torch.get_default_dtype()
    return (
        Federation.from_arrays(train).to(dtype=dtype),
        Federation.from_arrays(test).to(dtype=dtype),
    )


# -- resampled clients -----------------------------------------------------------------------------


def resample(
    federation: Federation, clients: int, rows: int | None = None, seed: int = 0
) -> Federation:
    """Make a federation of another size, whose clients have rows of those of a given one: for :func:`bayesfed.power`.

    Each of the new clients, "client 0", "client 1", ..., has rows drawn from one of the old ones, with replacement. The
    old clients are taken in random order, and again in another if there are fewer. All fields of a row stay together.

    Args:
        federation: the clients to draw from.
        clients: the number of new clients.
        rows: the number of rows of each; by default as many as the old client has.
        seed: of the draws.

    Raises:
        ValueError: a number is less than 1.

    Example:
        >>> from bayesfed import datasets, simulations
        >>> simulations.resample(datasets.grunfeld(), clients=30, rows=5)
        Federation: 30 clients, 150 rows (5 to 5 a client), fields x[2], y, year
    """
    if clients < 1 or (rows is not None and rows < 1):
        raise ValueError(f"clients is {clients} and rows is {rows}; both must be at least 1")
    generator = torch.Generator().manual_seed(seed)
    turns = -(-clients // len(federation))
    orders = [torch.randperm(len(federation), generator=generator) for _ in range(turns)]
    old = torch.cat(orders)[:clients]
    lengths = federation.lengths[old]
    sizes = lengths if rows is None else torch.full((clients,), rows)
    drawn = [
        start + torch.randint(int(length), (int(size),), generator=generator)
        for start, length, size in zip(federation.offsets[old], lengths, sizes, strict=True)
    ]
    taken = torch.cat(drawn).to(federation.device)
    return Federation(
        {name: federation[name][taken] for name in federation.fields},
        torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)]),
        tuple(f"client {i}" for i in range(clients)),
        federation.client_dim,
        federation.gaps,
    )


# -- photovoltaics --------------------------------------------------------------------------------

FEATURES = (
    *(f"output {lag} h before" for lag in (1, 2, 3, 23, 24, 25)),
    "global irradiance",
    "direct normal irradiance",
    "diffuse irradiance",
    "temperature",
    "wind speed",
    "solar elevation",
    "sine of the hour",
    "cosine of the hour",
    "day of the year",
)
"""The 15 inputs of :func:`photovoltaics`; the weather is that of the station in the previous hour."""


def photovoltaics(
    facing: str = "east-west",
    clients: int = 48,
    rows: int = 150,
    seed: int = 0,
    weather: str | Path | None = None,
) -> tuple[Federation, Federation]:
    """Simulate houses with photovoltaic panels that forecast their output of the next hour: ``(train, test)``.

    Each house is computed by pvlib (Hay-Davies sky, cell temperature, PVWatts) from one station's typical year. Its
    panels face east or west with equal probability, or south, with a standard deviation of 15°; they are tilted by 15°
    to 40°. Each house has its own clouds, which scale all irradiance by exp(a − 0.02), where a is autoregressive from
    hour to hour (standard deviation 0.2). A building 30° wide in a random direction blocks the direct light below an
    elevation of 5° to 25°.

    Rows are the hours with the sun higher than 10°, from 16 May to 15 August. Every third day is for the test; the test
    ends with the last training row.

    Fields, standardised by each house's training rows:
        ``x``: shape ``(15,)``, see :data:`FEATURES`.

        ``y``: scalar, the output.

    Args:
        facing: ``"east-west"`` or ``"south"``.
        clients: N; "house 0", "house 1", ...
        rows: training rows per house: 150 are two weeks, 610 two months.
        seed: seed of the houses.
        weather: a typical year of PVGIS (CSV) or of NSRDB (TMY3); by default the TMY3 file of Greensboro, North
            Carolina, that pvlib ships.

    Raises:
        ImportError: pvlib is not installed: ``pip install 'bayesfed[photovoltaics]'``.
        ValueError: an unknown direction, or more rows than there are.

    Example:
        >>> from bayesfed import simulations
        >>> train, test = simulations.photovoltaics(clients=2, rows=150)
        >>> train
        Federation: 2 clients, 300 rows (150 to 150 a client), fields x[15], y
    """
    if facing not in ("east-west", "south"):
        raise ValueError(f"facing is {facing!r}: use 'east-west' or 'south'")
    station = _station(weather)
    rng = np.random.default_rng(seed)
    sides = np.where(rng.random(clients) < 0.5, 90.0, 270.0)
    azimuths = rng.normal(sides if facing == "east-west" else 180.0, 15.0, size=clients)
    day = station["day"].to_numpy()
    bright = (station["elevation"] > 10).to_numpy()
    season = bright & (day >= _day(5, 16)) & (day <= _day(8, 15))
    train, test = (np.flatnonzero(season & days) for days in (day % 3 != 0, day % 3 == 0))
    if rows > len(train):
        raise ValueError(f"rows is {rows}; there are {len(train)} bright hours on training days")
    train, test = train[:rows], test[test < train[rows - 1]]
    parts: list[dict[str, dict[str, np.ndarray]]] = [{}, {}]
    for i, azimuth in enumerate(azimuths):
        output = _output(station, azimuth, rng)
        lags = [np.roll(output, lag) for lag in (1, 2, 3, 23, 24, 25)]
        before = [np.roll(station[c], 1) for c in ("ghi", "dni", "dhi", "temp_air", "wind_speed")]
        hour = 2 * np.pi * station.index.hour / 24
        x = np.stack([*lags, *before, station["elevation"], np.sin(hour), np.cos(hour), day], 1)
        x = (x - x[train].mean(0)) / x[train].std(0)
        y = (output - output[train].mean()) / output[train].std()
        for part, taken in zip(parts, (train, test), strict=True):
            part[f"house {i}"] = {"x": x[taken], "y": y[taken]}
    first, second = (Federation.from_arrays(part, client_dim="house") for part in parts)
    return first, second


def _day(month: int, day: int) -> int:
    """Return the number of a day in a year without a 29th of February."""
    return date(2018, month, day).timetuple().tm_yday


def _station(weather: str | Path | None) -> pd.DataFrame:
    """Read hourly irradiance, temperature, wind and the position of the sun, one row per hour of a year."""
    import pandas as pd

    pvlib = import_optional("pvlib", "'bayesfed[photovoltaics]'")
    path = Path(pvlib.__file__).parent / "data/723170TYA.CSV" if weather is None else Path(weather)
    with path.open(encoding="latin-1") as file:
        is_pvgis = "Latitude" in file.readline()
    if is_pvgis:
        data, meta = pvlib.iotools.read_pvgis_tmy(path)
        place, shift = meta["inputs"], pd.Timedelta(0)
    else:
        data, place = pvlib.iotools.read_tmy3(path, coerce_year=2018, map_variables=True)
        shift = pd.Timedelta(minutes=30)  # a label is the end of its hour
    columns = ["ghi", "dni", "dhi", "temp_air", "wind_speed"]
    station = data[columns].astype(float)
    at = station.index.map(lambda t: t.replace(year=2018)) - shift
    sun = pvlib.solarposition.get_solarposition(at, place["latitude"], place["longitude"])
    station.index = at
    station["zenith"], station["elevation"] = sun["apparent_zenith"], sun["apparent_elevation"]
    station["azimuth"], station["day"] = sun["azimuth"], at.day_of_year
    return station


def _output(station: pd.DataFrame, azimuth: float, rng: np.random.Generator) -> np.ndarray:
    """Simulate the output of a house's panels in every hour, per unit of their size."""
    import pvlib

    tilt, neighbour = rng.uniform(15, 40), rng.uniform(0, 360)
    height = rng.uniform(5, 25)
    steps = rng.normal(size=len(station))
    clouds = np.zeros(len(station))
    for hour, step in enumerate(steps):
        clouds[hour] = 0.7 * clouds[hour - 1] + 0.2 * (1 - 0.7**2) ** 0.5 * step
    sky = station[["ghi", "dni", "dhi"]].mul(np.exp(clouds - 0.02), axis=0)
    apart = (station["azimuth"] - neighbour + 180) % 360 - 180
    shaded = (apart.abs() < 15) & (station["elevation"] < height)
    light = pvlib.irradiance.get_total_irradiance(
        tilt,
        azimuth,
        station["zenith"],
        station["azimuth"],
        sky["dni"].where(~shaded, 0.0),
        sky["ghi"],
        sky["dhi"],
        dni_extra=pvlib.irradiance.get_extra_radiation(station.index),
        model="haydavies",
    )["poa_global"].fillna(0.0)
    cell = pvlib.temperature.faiman(light, station["temp_air"], station["wind_speed"])
    return pvlib.pvsystem.pvwatts_dc(light, cell, 1.0, -0.004).clip(lower=0.0).to_numpy()
