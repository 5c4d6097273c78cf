"""The programs of first_try.py and their data, by name in the order of the table."""

from __future__ import annotations

from first_tries import normal, latent, counts, categories  # isort: skip
from first_tries.data import PROGRAMS
from first_tries.latent import REFERENCES

__all__ = ["PROGRAMS", "REFERENCES", "categories", "counts", "latent", "normal"]
