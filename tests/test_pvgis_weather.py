"""Weather of PVGIS in the PAC-PFL experiments: on which hours, with which sun, in which features."""

import numpy as np
import pandas as pd
import pytest

from bayesfed import simulations
from tests.scripts import load

pytest.importorskip("pvlib")
regression = load("experiments/pac_pfl/regression.py")

OFFSET = 0.25  # hours from the label to the measurement
HEAD = f"""\
Latitude (decimal degrees): 45.000
Longitude (decimal degrees): 7.500
Elevation (m): 250.0
Irradiance Time Offset (h): {OFFSET}
month,year
"""
COLUMNS = "time(UTC),T2m,RH,G(h),Gb(n),Gd(h),IR(h),WS10m,WD10m,SP"
TAIL = "\n\nT2m: 2-m air temperature (degree Celsius)\nRH: relative humidity (%)\n\nPVGIS (c) a union\n"


def sine(times):
    """Return the sine of the sun's elevation at 45° N 7.5° E on days near the solstice, to a degree or so."""
    tilt = np.radians(23.4) * np.cos(2 * np.pi * (times.dayofyear - 172) / 365.25)
    noon = 12 - 7.5 / 15  # UTC; the equation of time is within six minutes in June and July
    turn = 2 * np.pi * (times.hour + times.minute / 60 - noon) / 24
    height = np.radians(45.0)
    return np.sin(height) * np.sin(tilt) + np.cos(height) * np.cos(tilt) * np.cos(turn)


@pytest.fixture(scope="module")
def year():
    """Clear days, each month of its own year; 16 to 18 May have no irradiance."""
    times = pd.date_range("2018-01-01", periods=8760, freq="h")
    high = np.asarray(sine(times + pd.Timedelta(hours=OFFSET))).clip(0)
    high[(times.month == 5) & np.isin(times.day, [16, 17, 18])] = 0
    rows = [
        f"{2000 + t.month}{t:%m%d:%H%M},{t.day + 0.5},60.0,{900 * h + 1:.1f},{800 * h:.1f},"
        f"{100 * h:.1f},300.0,{1 + t.hour / 10:.1f},90.0,99000.0"
        for t, h in zip(times, high, strict=True)
    ]
    months = "\n".join(f"{month},{2000 + month}" for month in range(1, 13))
    return "\n".join([HEAD + months, COLUMNS, *rows]) + TAIL


@pytest.fixture(scope="module")
def path(year, tmp_path_factory):
    path = tmp_path_factory.mktemp("weather") / "pvgis.csv"
    path.write_text(year)
    return path


@pytest.fixture(scope="module")
def station(year, tmp_path_factory):
    """June and July, as the package reads them of the converted file."""
    path = tmp_path_factory.mktemp("station") / "weather.csv"
    path.write_text(regression.from_june(year))
    read = simulations._station(path)
    return read[read.index.month.isin([6, 7])]


def test_that_the_end_of_may_is_dated_before_the_season_and_nothing_else_is_changed(year):
    before, after = year.splitlines(), regression.from_june(year).splitlines()
    changed = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
    assert changed[0] == (HEAD.splitlines()[1], "Longitude (decimal degrees): 11.250")
    assert len(changed) == 1 + 16 * 24
    assert {a[:6] + a[8:] for a, _ in changed[1:]} == {b[:6] + b[8:] for _, b in changed[1:]}
    assert {a[:8] for a, _ in changed[1:]} == {f"200505{day}" for day in range(16, 32)}
    assert {b[:8] for _, b in changed[1:]} == {"20050515"}


def test_that_hours_are_those_of_the_file_in_utc(station):
    assert list(station.index) == list(
        pd.date_range("2018-06-01", "2018-07-31 23:00", freq="h", tz="UTC")
    )
    assert (station["temp_air"] == station.index.day + 0.5).all()
    assert np.allclose(station["wind_speed"], 1 + station.index.hour / 10)


def test_that_the_sun_is_where_it_was_at_the_measurement(station):
    """To a degree; at the full hour, 15 minutes earlier, it would be off by up to 3.7°."""
    high = np.asarray(sine(station.index + pd.Timedelta(hours=OFFSET)))
    expected = np.degrees(np.arcsin(high))
    up = expected > 3
    assert np.abs(station["elevation"] - expected)[up].max() < 1.5
    before = np.degrees(np.arcsin(np.asarray(sine(station.index))))
    assert np.abs(station["elevation"] - before)[up].max() > 2.5
    assert ((station["dni"] > 100) == (station["elevation"] > 7)).mean() > 0.97


def test_that_rows_of_houses_are_by_daylight_from_the_first_of_june_on(path, station, monkeypatch):
    monkeypatch.setattr(regression, "OLD", 1)
    train, test = regression.task("pvgis-south-150", 3, str(path))
    assert train.lengths.tolist() == [150, 150] and len(test) == 2
    bright = station[station["elevation"] > 10]
    days = bright.index.day_of_year
    expected = bright[days % 3 != 0][:150]
    assert expected.index[0].date().isoformat() == "2018-06-01"
    assert set(expected.index.hour) <= set(range(5, 19))

    def standardised(values):
        return (values - values.mean()) / values.std(ddof=0)

    x = dict(zip(simulations.FEATURES, train.select(["house 0"])["x"].double().T, strict=True))
    before = station.shift(1).loc[expected.index]
    for feature, column in (("global irradiance", "ghi"), ("temperature", "temp_air")):
        assert np.allclose(x[feature], standardised(before[column].to_numpy()), atol=1e-4)
    assert np.allclose(
        x["solar elevation"], standardised(expected["elevation"].to_numpy()), atol=1e-4
    )


def test_that_only_houses_of_pvgis_depend_on_the_file(path, monkeypatch):
    monkeypatch.setattr(regression, "OLD", 1)
    file, usual = (
        regression.task(name, 0, weather)[0]["y"]
        for name, weather in (("pvgis-east-west-150", str(path)), ("east-west-150", None))
    )
    assert file.shape == usual.shape and not (file == usual).all()
