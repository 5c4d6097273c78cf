"""Data frames of any library, as pandas has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


def to_pandas(frame: Any) -> pd.DataFrame:
    """Convert a frame of polars, an Arrow table or a mapping from column to values to pandas, and check its labels.

    Raises:
        TypeError: it is nothing of the kind.
        ValueError: its columns have labels of several levels.

    Example:
        >>> from bayesfed.data.frames import to_pandas
        >>> to_pandas({"hospital": ["A", "B"], "y": [1.0, 2.0]}).columns.tolist()
        ['hospital', 'y']
    """
    import pandas as pd

    if hasattr(frame, "collect_schema") and hasattr(frame, "collect"):  # lazy
        frame = frame.collect()
    if isinstance(frame, Mapping) and frame:
        if any(isinstance(values, pd.DataFrame | Mapping) for values in frame.values()):
            raise TypeError(
                "a mapping from client to rows is given: use Federation.from_arrays, or pandas.concat with a column "
                "that names the client"
            )
        frame = pd.DataFrame(dict(frame))
    elif hasattr(frame, "to_dicts"):  # polars
        frame = pd.DataFrame(frame.to_dict(as_series=False))
    elif hasattr(frame, "to_pandas"):
        frame = frame.to_pandas()
    if not isinstance(frame, pd.DataFrame):
        raise TypeError(
            f"a data frame is needed, not a {type(frame).__name__}: of pandas or polars, an Arrow table, or a mapping "
            "from column to values; read files by pandas.read_csv or read_parquet"
        )
    if isinstance(frame.columns, pd.MultiIndex):
        raise ValueError(
            "the frame's columns have labels of several levels: give each one name, "
            "frame.columns = ['_'.join(map(str, label)) for label in frame.columns]"
        )
    return frame
