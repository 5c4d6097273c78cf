"""Draws as netCDF 4, written by h5py: xarray opens the file again for each group, which takes ten times as long."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import h5py
import xarray as xr


def write_netcdf(path: Path, groups: Mapping[str, xr.Dataset]) -> None:
    """Write data sets as the groups of a netCDF 4 file. Dimensions without coordinates are counted from 0.

    Args:
        path: the file, which is replaced.
        groups: the data sets by group.
    """
    with h5py.File(path, "w", track_order=True) as file:
        numbers: dict[str, int] = {}
        for name, given in groups.items():
            bare = {
                dim: range(size) for dim, size in given.sizes.items() if dim not in given.coords
            }
            data = given.assign_coords(bare)
            found, attributes = xr.conventions.encode_dataset_coordinates(data)
            variables, attributes = xr.conventions.cf_encoder(found, attributes)
            group = file.create_group(name, track_order=True)
            group.attrs.update(attributes)
            for variable in sorted(variables, key=lambda one: one not in data.dims):
                values = variables[variable].values
                if values.dtype.kind in "UO":
                    values = values.astype(h5py.string_dtype())
                made = group.create_dataset(variable, data=values, track_order=True)
                made.attrs.update(variables[variable].attrs)
                if variable in data.dims:
                    made.make_scale(variable)
                    made.attrs["_Netcdf4Dimid"] = numbers.setdefault(
                        f"{name}/{variable}", len(numbers)
                    )
                    continue
                for axis, dim in enumerate(variables[variable].dims):
                    made.dims[axis].attach_scale(group[dim])


def read_netcdf(path: Path) -> dict[str, xr.Dataset]:
    """Return the data sets of a netCDF 4 file by group."""
    with h5py.File(path) as file:
        names = list(file)
    return {name: xr.load_dataset(path, group=name, engine="h5netcdf") for name in names}
