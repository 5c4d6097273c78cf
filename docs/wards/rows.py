"""Write the rows of three hospitals, one CSV file each: python rows.py."""

import sys
from pathlib import Path

import numpy as np
import pandas as pd

HOSPITALS = {"north": 4, "south": 3, "west": 5}


def rows_of(hospital):
    """Return a hospital's rows: one is a ward in one month."""
    rng = np.random.default_rng(list(HOSPITALS).index(hospital))
    wards = []
    for number in range(HOSPITALS[hospital]):
        months = rng.integers(8, 24)
        age, staff = rng.normal(75, 10, months).round(), rng.integers(4, 13, months)
        days = rng.integers(20, 32, months)
        rate = rng.normal(0.3, 0.5) + 0.3 * (age - 75) / 10 - 0.2 * (staff - 8) / 2
        count = rng.poisson(np.exp(rate) * days / 30)
        ward = f"{hospital} {number + 1}"
        wards.append(
            pd.DataFrame({"ward": ward, "age": age, "staff": staff, "days": days, "falls": count})
        )
    return pd.concat(wards, ignore_index=True)


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    for name in HOSPITALS:
        rows_of(name).to_csv(folder / f"{name}.csv", index=False)
