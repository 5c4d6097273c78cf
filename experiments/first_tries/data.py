"""The data of the first tries: textbooks', or simulated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import bayesfed as bf

Data = Callable[[], bf.Federation]
PROGRAMS: dict[str, tuple[Callable[[Any], None], Data]] = {}


def on(data: Data) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Enter a program and its data into the table."""

    def enter(program: Callable[[Any], None]) -> Callable[[Any], None]:
        PROGRAMS[program.__name__] = program, data
        return program

    return enter


def rows(**columns: Any) -> Callable[[], bf.Federation]:
    """Return data with one row a client."""
    length = len(next(iter(columns.values())))

    def data() -> bf.Federation:
        return bf.Federation.from_arrays(
            {
                f"{i + 1}": {name: [float(v[i])] for name, v in columns.items()}
                for i in range(length)
            }
        )

    return data


def simulated(
    make: Callable[[np.random.Generator, int, int], dict[str, Any]],
    clients: int = 12,
    least: int = 6,
    seed: int = 0,
) -> Callable[[], bf.Federation]:
    """Return data of clients with ``least`` rows and more; ``make`` gives client i's n rows."""

    def data() -> bf.Federation:
        generator = np.random.default_rng(seed)
        return bf.Federation.from_arrays(
            {f"c{i}": make(generator, i, least + i % 7) for i in range(clients)}
        )

    return data


def lines(generator: np.random.Generator, i: int, n: int) -> dict[str, Any]:
    """Draw y = a_i + 0.8 x₁ − 0.5 x₂ + an effect of one of three kinds + noise."""
    x, kind = generator.normal(size=(n, 2)), generator.integers(0, 3, n)
    a = np.random.default_rng(1000 + i).normal(1.0, 0.7)
    mean = a + x @ [0.8, -0.5] + np.array([0.0, 0.6, -0.4])[kind]
    return {"x": x, "kind": kind.astype(float), "y": mean + 0.6 * generator.normal(size=n)}


def of_lines(outcome: Callable[[np.random.Generator, Any], Any], **settings: Any) -> Any:
    """Return the data of :func:`lines` with another outcome, made from that y."""

    def make(generator: np.random.Generator, i: int, n: int) -> dict[str, Any]:
        found = lines(generator, i, n)
        return {**found, "y": outcome(generator, found["y"])}

    return simulated(make, **settings)


def hospitals(generator: np.random.Generator, i: int, n: int) -> dict[str, Any]:
    """Draw rows of nine hospitals in three regions, with wards."""
    region = i % 3
    level = [1.0, -0.3, 0.2][region] + np.random.default_rng(2000 + i).normal(0, 0.5)
    ward = generator.integers(0, 4, n)
    shift = np.random.default_rng(3000 + i).normal(0, 0.4, 4)[ward]
    y = 2 + level + shift + generator.normal(size=n)
    return {"region": np.full(n, float(region)), "ward": ward.astype(float), "y": y}


def series(generator: np.random.Generator, i: int, n: int) -> dict[str, Any]:
    """Draw an autoregression with ρ = 0.7 around a level of its own."""
    level, y = np.random.default_rng(4000 + i).normal(0, 1), [0.0]
    for _ in range(2 * n):
        y.append(level * 0.3 + 0.7 * y[-1] + 0.5 * generator.normal())
    return {"y": y[1:], "before": y[:-1]}


def answers(generator: np.random.Generator, i: int, n: int) -> dict[str, Any]:
    """Draw a person's answers to five items of other difficulties."""
    ability = np.random.default_rng(5000 + i).normal()
    item = np.arange(5)
    p = 1 / (1 + np.exp(-(ability - np.array([-1.0, -0.5, 0.0, 0.5, 1.0]))))
    return {"item": item.astype(float), "y": (generator.random(5) < p).astype(float)}
