"""What is installed here: versions, the compiler, the GPU, memory, and what is missing for which feature."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

import bayesfed

STACK = ("torch", "pyro-ppl", "arviz", "gpytorch", "numpy", "pandas", "xarray")
EXTRAS = {
    "datasets": (("statsmodels",), "the data sets grunfeld, china_smoking, randhie and anes96"),
    "formulas": (("formulae",), "models written as formulas"),
    "arrow": (("pyarrow",), "Parquet and Arrow files"),
    "partitioners": (("flwr-datasets",), "Federation.from_partitioner"),
    "images": (("pillow", "scipy"), "readers of image data sets"),
    "photovoltaics": (("pvlib",), "simulated photovoltaic houses"),
    "deploy": (("cryptography",), "secure sums between machines"),
    "flower": (("flwr",), "runs over Flower"),
    "benchmarks": (
        ("flwr", "jax", "numpyro", "nutpie"),
        "the programs that experiments compare with",
    ),
}
"""Extras: the distributions of each, and what they are for."""


def show() -> None:
    """Print the findings as a table."""
    table = Table(box=None, show_header=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    for name, text in findings():
        table.add_row(name, Text(text))
    Console(highlight=False).print(table)


def findings() -> list[tuple[str, str]]:
    """Return name and text of each row: versions, compiler, GPU, memory, cores, extras."""
    return [
        ("bayesfed", bayesfed.__version__),
        ("Python", f"{platform.python_version()}, {platform.system()} {platform.machine()}"),
        *((name, _version(name) or "missing") for name in STACK),
        ("compiler", compiler()),
        ("GPU", gpu()),
        ("memory", memory(Path("/proc/meminfo"))),
        ("cores", f"{os.cpu_count()}, {torch.get_num_threads()} used by torch"),
        *((name, _extra(name)) for name in EXTRAS),
    ]


def compiler() -> str:
    """Compile a function that no cache has, and say whether that works."""
    begin, new = time.perf_counter(), time.time()
    try:
        torch.compile(lambda x: torch.sin(x) + new)(torch.ones(100))
    except Exception as error:
        said = (str(error).strip() or "no message").splitlines()[0]
        return f"does not work, so that no step is compiled: {type(error).__name__}: {said}"
    return f"works, {time.perf_counter() - begin:.0f} s for a small function"


def gpu() -> str:
    """Return the GPUs that torch can use and their free memory, or why there is none."""
    if not torch.cuda.is_available():
        built = "none is found" if torch.version.cuda else "this torch is a build for CPUs"
        return f"none: {built}"
    devices = range(torch.cuda.device_count())
    return "; ".join(
        "{}, {:.1f} of {:.1f} GB free".format(
            torch.cuda.get_device_name(i), *(size / 1e9 for size in torch.cuda.mem_get_info(i))
        )
        for i in devices
    )


def memory(file: Path) -> str:
    """Return the free and the whole memory of a machine, from a file like ``/proc/meminfo``."""
    if not file.exists():
        return f"unknown: there is no {file}"
    kilobytes = {
        name: int(rest.split()[0])
        for name, _, rest in (
            line.partition(":") for line in file.read_text(encoding="utf-8").splitlines()
        )
    }
    free, whole = kilobytes["MemAvailable"] / 1e6, kilobytes["MemTotal"] / 1e6
    return f"{free:.1f} of {whole:.1f} GB free"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _extra(name: str) -> str:
    distributions, purpose = EXTRAS[name]
    missing = [each for each in distributions if _version(each) is None]
    if missing:
        return f"missing {', '.join(missing)}, for {purpose}: pip install 'bayesfed[{name}]'"
    return f"{', '.join(f'{each} {_version(each)}' for each in distributions)}: {purpose}"
