"""Files of draws, against those that xarray writes."""

import arviz as az
import h5netcdf
import numpy as np
import xarray as xr

from bayesfed.cli.netcdf import write_netcdf


def groups():
    coords = {
        "chain": [0],
        "draw": np.arange(5),
        "client": ["north", "Øst"],
        "row": [3, 4, 7],
        "row_client": ("row", ["north", "Øst", "Øst"]),
    }
    values = np.random.default_rng(0).normal(size=(1, 5, 2)).astype(np.float32)
    values[0, 1, 1] = np.nan
    drawn = xr.Dataset(
        {"a": (("chain", "draw", "client"), values), "n": (("row",), np.array([1, 2, 3]))},
        coords,
        {"khat": 0.3, "converged": 1, "caveat": "q(θ) is off"},
    )
    flags = xr.Dataset({"b": (("client",), [True, False])}, {"client": coords["client"]})
    return {"posterior": drawn, "constant_data": flags}


def test_it_is_read_as_what_xarray_writes(tmp_path):
    write_netcdf(tmp_path / "one.nc", groups())
    for mode, (name, data) in zip("wa", groups().items(), strict=True):
        data.to_netcdf(tmp_path / "other.nc", mode=mode, group=name, engine="h5netcdf")
    for name, data in groups().items():
        one, other = (
            xr.load_dataset(tmp_path / file, group=name, engine="h5netcdf")
            for file in ("one.nc", "other.nc")
        )
        xr.testing.assert_identical(one, other)
        xr.testing.assert_equal(one, data)
        assert one.attrs == data.attrs
    assert az.from_netcdf(tmp_path / "one.nc")["posterior"]["client"].values.tolist() == [
        "north",
        "Øst",
    ]
    with h5netcdf.File(tmp_path / "one.nc") as file:
        assert file["posterior"].variables["a"].dimensions == ("chain", "draw", "client")


def test_dimensions_without_coordinates_are_counted(tmp_path):
    write_netcdf(
        tmp_path / "one.nc", {"posterior": xr.Dataset({"mu": (("chain", "draw"), [[1.0, 2.0]])})}
    )
    found = az.from_netcdf(tmp_path / "one.nc").posterior
    assert found["mu"].values.tolist() == [[1.0, 2.0]]
    assert found["draw"].values.tolist() == [0, 1]
