"""Algorithms: compositions of globals, locals, steps and rule; the table of all methods."""

from bayesfed.algorithms.algorithm import Algorithm
from bayesfed.algorithms.method import Method
from bayesfed.algorithms.table import METHODS

__all__ = ["METHODS", "Algorithm", "Method"]
